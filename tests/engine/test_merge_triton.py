"""The fused kernels against their torch twins: interpreted on a CPU, compiled on a GPU."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from dilated_attention.engine.branches import branch_buffers
from dilated_attention.pattern import DilatedPattern
from tests.helpers import merge_twin

pytest.importorskip("triton")
from dilated_attention.engine.branches import merge_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def random_layers(rng: random.Random, heads: int, n: int) -> branch_buffers.BranchBuffers:
    if rng.random() < 0.4:
        # LongNet's: the direct branch has most rows to itself
        first_length, growth = rng.choice([4, 8, 12]), rng.choice([2, 4])
        lengths = [first_length * growth**i for i in range(3)]
        pattern = DilatedPattern(lengths, [growth**i for i in range(3)], rng.choice(["cyclic", "zero"]))
    else:
        lengths = [rng.randint(1, 2 * n) for _ in range(rng.randint(1, 4))]
        rates = [rng.choice([1, rng.randint(1, min(w, 9))]) for w in lengths]
        split = rng.random() < 0.3
        offsets = "cyclic" if split else rng.choice(["cyclic", "blocked", "zero"])
        pattern = DilatedPattern(lengths, rates, offsets, "split" if split else "all", rng.choice(["mask", "zero_keys"]))
    first = rng.randrange(heads)
    buffers = branch_buffers.make_branch_buffers(pattern, heads, (first, rng.randint(first + 1, heads)), n, False)
    # as where outputs of branches are kept
    return replace(buffers, direct=None) if rng.random() < 0.4 else buffers


# the dtype by the seed, of which either has a direct branch and none
@pytest.mark.parametrize(("seed", "dtype"), [(seed, (torch.float32, torch.bfloat16)[seed % 2]) for seed in range(24)])
def test_kernels_equal_their_twins(monkeypatch: pytest.MonkeyPatch, seed: int, dtype: torch.dtype) -> None:
    """Random patterns, ragged ends, empty parts, zero keys, strided results, head dims that are no power of two."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    B, D, n = rng.choice([1, 2]), rng.choice([8, 24, 40]), rng.randint(1, 150)
    buffers = random_layers(rng, rng.choice([1, 3, 4]), n)
    H = buffers.heads
    flat = torch.randn(B * H * D * buffers.rows(with_direct=False), device=DEVICE).to(dtype)
    flat_lse = torch.randn(B * H * buffers.rows(with_direct=True), device=DEVICE) * 4
    flat_lse[torch.rand_like(flat_lse) < 0.2] = -torch.inf
    flat_lse[torch.rand_like(flat_lse) < 0.1] = 1e4
    lse_views = merge_twin.split(buffers, flat_lse, B, head_dim=0, with_direct=True)
    # heads of a larger tensor, as a chunk's
    out = torch.randn(B, n, H + 2, D, device=DEVICE).to(dtype)[:, :, 1:-1]
    if buffers.direct is not None:
        # what a backend writes of an empty row
        empty = merge_twin.at_positions(buffers, buffers.direct, lse_views[buffers.direct], -torch.inf) == -torch.inf
        out.masked_fill_(empty[..., None], 0.0)
    found, lse, found_lse = out.clone(), *(torch.full((B, H, n), torch.nan, device=DEVICE) for _ in range(2))
    merge_twin.merge_buffers(buffers, out, lse.transpose(1, 2), flat, flat_lse)
    is_concurrent = rng.random() < 0.5
    monkeypatch.setattr(merge_triton, "_PROGRAMS_ASIDE", 3)
    merge_triton.merge_buffers(buffers, found, found_lse.transpose(1, 2), flat, flat_lse, is_concurrent=is_concurrent)
    tolerance = 1e-5 if dtype is torch.float32 else 0.04
    torch.testing.assert_close(found, out, atol=tolerance, rtol=0)
    torch.testing.assert_close(found_lse, lse, atol=1e-5, rtol=1e-6)
    if buffers.direct is None:
        # the results stay the same, and each branch's own output is left behind
        own = flat.clone()
        merge_triton.merge_buffers(buffers, found, found_lse.transpose(1, 2), own, flat_lse, is_concurrent=is_concurrent, own=True)
        torch.testing.assert_close(found, out, atol=tolerance, rtol=0)
        twin = flat.clone()
        merge_twin.merge_buffers(buffers, found, found_lse.transpose(1, 2), twin, flat_lse, own=True)
        own_views, twins = (merge_twin.split(buffers, x, B, head_dim=D, with_direct=True) for x in (own, twin))
        for branch, (view, twin) in enumerate(zip(own_views, twins, strict=True)):
            rows, expected = (merge_twin.at_positions(buffers, branch, x, 0.0) for x in (view, twin))
            torch.testing.assert_close(rows, expected, atol=tolerance, rtol=0)

    grads = [torch.randn(B, n, H, D, device=DEVICE).to(dtype) for _ in range(3)]
    founds = [grad.clone() for grad in grads]
    flats = [flat, torch.randn_like(flat), torch.randn_like(flat)]
    merge_triton.sum_buffers(buffers, founds, flats, is_concurrent=is_concurrent)
    merge_twin.sum_buffers(buffers, grads, flats)
    for grad, found in zip(grads, founds, strict=True):
        torch.testing.assert_close(found, grad, atol=tolerance, rtol=0)


def test_rows_of_the_direct_branch_alone_are_left_as_they_stand() -> None:
    buffers = branch_buffers.make_branch_buffers(DilatedPattern((4, 8), (1, 4)), 1, (0, 1), 8, False)
    out = torch.full((1, 8, 1, 8), torch.nan, device=DEVICE)
    out[:, [0, 4]] = 1.0
    flat = torch.full((8 * buffers.rows(with_direct=False),), 3.0, device=DEVICE)
    flat_lse = torch.zeros(buffers.rows(with_direct=True), device=DEVICE)
    lse = torch.empty(1, 1, 8, device=DEVICE)
    merge_triton.merge_buffers(buffers, out, lse.transpose(1, 2), flat, flat_lse)
    assert out[0, :, 0, 0].isnan().tolist() == [False, True, True, True, False, True, True, True]
    assert out[0, [0, 4]].unique().item() == pytest.approx(2.0)
    assert lse.unique().tolist() == pytest.approx([0.0, 0.6931472])


def test_steps_of_rows_that_other_branches_take() -> None:
    def step(lengths: list[int], rates: list[int], offsets: object = "cyclic", heads: int = 12, n: int = 2**16) -> int:
        pattern = DilatedPattern(lengths, rates, offsets)  # type: ignore[arg-type]
        return branch_buffers.make_branch_buffers(pattern, heads, (0, heads), n, False).step

    assert step([2048, 4096, 8192], [1, 2, 4]) == 2
    assert step([2048, 4096, 8192, 16384, 32768], [1, 2, 4, 6, 12]) == 2
    assert step([2048, 8192, 32768], [1, 4, 16]) == 4
    # a whole sequence needs no segments that the step divides
    assert step([2048, 99_999], [1, 4]) == 4
    assert step([2048, 4097], [1, 4]) == 1
    # no branch that takes everything, odd rates, offsets that disagree
    assert step([2048, 4096], [2, 4]) == 1
    assert step([2048, 4096], [1, 3]) == 1
    assert step([2048, 4096, 8192], [1, 4, 8], ((0,), (1,), (3,)), heads=1) == 2
    assert step([2048, 4096, 8192], [1, 2, 4], "blocked", heads=4) == 1
