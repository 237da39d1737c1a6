"""Parts merged into the whole: the one law, its kernels, branch buffers of a call in chunks, and what of them a forward saves."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dilated_attention import DilatedPattern, dilated_attention
from dilated_attention.backends.merge import add_zero_keys, merge_, merge_onto
from dilated_attention.engine.branches import branch_buffers, chunking
from dilated_attention.testing import max_error
from tests.helpers import fused

merge_triton = pytest.importorskip("dilated_attention.engine.branches.merge_triton")
onto_triton = pytest.importorskip("dilated_attention.backends.merge_inplace_triton")
Part = tuple[torch.Tensor, torch.Tensor]


def merge(out_1: torch.Tensor, lse_1: torch.Tensor, out_2: torch.Tensor, lse_2: torch.Tensor) -> Part:
    """``merge_`` into new tensors."""
    out, lse = out_1.clone(), lse_1.clone()
    merge_(out, lse, out_2, lse_2)
    return out, lse


def softmax_part(scores: torch.Tensor, values: torch.Tensor) -> Part:
    """(out (D,), lse ()) of one row over some keys, each part rounded to float32 from float64 like a kernel's result."""
    if not len(scores):
        return torch.zeros(values.shape[1]), torch.tensor(-math.inf)
    lse = scores.logsumexp(0)
    return ((scores - lse).exp() @ values).float(), lse.float()


@given(data=st.data())
@settings(max_examples=300)
def test_merge_law(data: st.DataObject) -> None:
    """Any split of the keys, merged in any order and bracketing, is the whole softmax, within 4 ulp of float32 per merge's path."""
    count = data.draw(st.integers(1, 24), "keys")
    spread = data.draw(st.sampled_from([0.0, 1.0, 30.0, 1e4]), "spread")
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32), "seed"))
    scores = torch.randn(count, generator=generator, dtype=torch.float64) * spread
    # float32 holds the lse of a part to half an ulp of the lse: at 1e4 that is 5e-4 of a weight, so the grid is what float32 holds
    scores = scores.round() if spread > 1 else scores
    values = torch.randn(count, 4, generator=generator, dtype=torch.float64)
    cuts = sorted(data.draw(st.lists(st.integers(0, count), max_size=6), "cuts"))
    parts = [softmax_part(scores[a:b], values[a:b]) for a, b in itertools.pairwise([0, *cuts, count])]
    # each merge rounds lse once; an error of lse is a relative error of the weights that follow from it
    merges = max(1, len(parts) - 1)
    while len(parts) > 1:
        one, other = (parts.pop(data.draw(st.integers(0, len(parts) - 1))) for _ in range(2))
        parts.append(merge(*one, *other))
    (out, lse), truth = parts[0], scores.logsumexp(0)
    ulp = torch.finfo(torch.float32).eps
    lse_error = 4 * ulp * merges * max(1.0, abs(float(truth)), float(scores.abs().max()))
    assert abs(float(lse) - float(truth)) <= lse_error
    assert max_error(out, (scores - truth).exp() @ values) <= (4 * ulp * merges + 2 * lse_error) * float(values.abs().max())


def test_merge_of_huge_and_tiny_and_of_nothing() -> None:
    out_1, out_2 = torch.full((1, 2), 3.0), torch.full((1, 2), 5.0)
    for low, high in ((-1e4, 1e4), (-3e38, 3e38), (-1e38, 0.0), (-math.inf, 50.1)):
        for parts in ((out_1, low, out_2, high), (out_2, high, out_1, low)):
            out, lse = merge(*(torch.tensor([x]) if isinstance(x, float) else x for x in parts))
            assert torch.equal(out, out_2) and float(lse) == torch.tensor(high).item()
    out, lse = merge(out_1, torch.tensor([1e4]), out_2, torch.tensor([1e4]))
    assert torch.equal(out, torch.full((1, 2), 4.0)) and float(lse) == pytest.approx(1e4 + math.log(2))
    out, lse = merge(*[torch.zeros(1, 2), torch.tensor([-math.inf])] * 2)
    assert not out.any() and float(lse) == -math.inf


def test_zero_keys_are_keys_of_score_and_value_zero() -> None:
    out, lse = torch.randn(4, 6, dtype=torch.float64), torch.tensor([0.3, -4.0, 9.0, -math.inf], dtype=torch.float64)
    out[3] = 0
    found, truth = add_zero_keys(out, lse, 5), merge(out, lse, torch.zeros_like(out), torch.full_like(lse, math.log(5)))
    assert all(max_error(x, y) <= 1e-15 for x, y in zip(found, truth, strict=True))
    assert not found[0][3].any() and float(found[1][3]) == pytest.approx(math.log(5))


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 37, 3, 64), (3, 5, 2, 59), (2, 3, 1, 256), (5, 4099, 12, 64)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kernel", [merge_onto, onto_triton.merge_onto], ids=["torch", "triton"])
def test_a_part_merges_onto_views_like_float64_and_rounds_once(
    shape: tuple[int, int, int, int], dtype: torch.dtype, kernel: Callable[..., None], device: str
) -> None:
    """Strided rows of larger tensors, with empty rows on one side, the other, and both; what lies between the rows is left alone."""
    P, L, G, D = shape
    if device == "cpu" and L > 4000:
        pytest.skip("long for the interpreter")
    generator = torch.Generator().manual_seed(L * 7 + D)
    whole = torch.randn((P, 2 * L, G + 1, D), generator=generator).to(dtype).to(device)
    out, part = whole[:, ::2, 1:], torch.randn((P, L, G, D), generator=generator).to(dtype).to(device)
    lse, part_lse = (torch.randn((P, G, n), generator=generator).mul(5).to(device).transpose(1, 2) for n in (2 * L, L))
    lse = lse[:, 1::2]
    for x, y, step in ((out, lse, 3), (part, part_lse, 2)):
        y[:, ::step], x[:, ::step] = -torch.inf, 0
    want, want_lse = merge(out.double(), lse.double(), part.double(), part_lse.double())
    before = whole.clone()
    kernel(out, lse, part, part_lse)
    # Triton's interpreter cuts bfloat16 off instead of rounding it
    cut_off = device == "cpu" and kernel is onto_triton.merge_onto and dtype is torch.bfloat16
    half_a_step = torch.finfo(dtype).eps * (1 if cut_off else 0.5)
    assert bool(((out.double() - want).abs() <= 1.01 * half_a_step * want.abs() + 4e-6).all())
    assert torch.equal(lse == -torch.inf, want_lse == -torch.inf)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-6, atol=2e-6)
    out.copy_(before[:, ::2, 1:])
    assert torch.equal(whole, before)


# --- branch buffers ----------------------------------------------------------------------------------------------------------------------


def random_buffers(rng: random.Random, heads: int, n: int) -> branch_buffers.BranchBuffers:
    if rng.random() < 0.4:
        # LongNet's: the direct branch has most rows to itself
        shortest, growth = rng.choice([4, 8, 12]), rng.choice([2, 4])
        pattern = DilatedPattern([shortest * growth**i for i in range(3)], [growth**i for i in range(3)], rng.choice(["cyclic", "zero"]))
    else:
        lengths = [rng.randint(1, 2 * n) for _ in range(rng.randint(1, 4))]
        rates = [rng.choice([1, rng.randint(1, min(w, 9))]) for w in lengths]
        split = rng.random() < 0.3
        offsets = "cyclic" if split else rng.choice(["cyclic", "blocked", "zero"])
        pattern = DilatedPattern(lengths, rates, offsets, "split" if split else "all", rng.choice(["mask", "zero_keys"]))
    low = rng.randrange(heads)
    buffers = branch_buffers.make_branch_buffers(pattern, heads, (low, rng.randint(low + 1, heads)), n, False)
    # as where outputs of branches are saved
    return replace(buffers, direct=None) if rng.random() < 0.4 else buffers


# the dtype by the seed, of which either has a direct branch and none
@pytest.mark.parametrize(("seed", "dtype"), [(seed, (torch.float32, torch.bfloat16)[seed % 2]) for seed in range(24)])
def test_kernels_of_buffers_equal_their_definition(monkeypatch: pytest.MonkeyPatch, seed: int, dtype: torch.dtype) -> None:
    """Random patterns, ragged ends, empty parts, zero keys, strided results, head dims that are no power of two."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rng = random.Random(seed)
    torch.manual_seed(seed)
    B, D, n = rng.choice([1, 2]), rng.choice([8, 24, 40]), rng.randint(1, 150)
    buffers = random_buffers(rng, rng.choice([1, 3, 4]), n)
    H, size = buffers.heads, B * buffers.heads
    flats = [torch.randn(size * D * buffers.rows(with_direct=False), device=device).to(dtype) for _ in range(3)]
    flat_lse = torch.randn(size * buffers.rows(with_direct=True), device=device) * 4
    flat_lse[torch.rand_like(flat_lse) < 0.2] = -torch.inf
    flat_lse[torch.rand_like(flat_lse) < 0.1] = 1e4
    # heads of a larger tensor, as a chunk's
    out = torch.randn(B, n, H + 2, D, device=device).to(dtype)[:, :, 1:-1]
    if buffers.direct is not None:
        # what a backend writes of an empty row
        lses = fused.split(buffers, flat_lse, B, 0, with_direct=True)
        empty = fused.at_positions(buffers, buffers.direct, lses[buffers.direct], -torch.inf) == -torch.inf
        out.masked_fill_(empty[..., None], 0.0)
    monkeypatch.setattr(merge_triton, "_PROGRAMS_ASIDE", 3)
    options, tolerance = {"is_concurrent": rng.random() < 0.5}, 1e-5 if dtype is torch.float32 else 0.04
    # with each branch's separate output left behind, too
    for own in (False, True) if buffers.direct is None else (False,):
        both = []
        for kernels in (fused, merge_triton):
            tensors = out.clone(), torch.full((B, H, n), torch.nan, device=device), flats[0].clone()
            kernels.merge_buffers(buffers, tensors[0], tensors[1].transpose(1, 2), tensors[2], flat_lse, own=own, **options)
            rows = [
                fused.at_positions(buffers, b, x, 0.0)
                for b, x in enumerate(fused.split(buffers, tensors[2], B, D, with_direct=False))
                if own and x is not None
            ]
            both.append([tensors[0], *rows, tensors[1]])
        for x, y in zip(*both, strict=True):
            torch.testing.assert_close(x, y, atol=1e-5 if x.dim() == 3 else tolerance, rtol=1e-6)
    grads = [torch.randn(B, n, H, D, device=device).to(dtype) for _ in range(3)]
    found = [grad.clone() for grad in grads]
    merge_triton.sum_buffers(buffers, found, flats, **options)
    fused.sum_buffers(buffers, grads, flats)
    torch.testing.assert_close(found, grads, atol=tolerance, rtol=0)


def test_steps_of_rows_that_other_branches_take() -> None:
    """The merge reads no other rows where one branch takes everything."""

    def step(lengths: list[int], rates: list[int], offsets: Any = "cyclic", heads: int = 12) -> int:
        return branch_buffers.make_branch_buffers(DilatedPattern(lengths, rates, offsets), heads, (0, heads), 2**16, False).step

    assert step([2048, 4096, 8192, 16384, 32768], [1, 2, 4, 6, 12]) == step([2048, 4096, 8192], [1, 4, 8], ((0,), (1,), (3,)), 1) == 2
    # a whole sequence needs no segments that the step divides
    assert step([2048, 8192, 32768], [1, 4, 16]) == step([2048, 99_999], [1, 4]) == 4
    # no branch that takes everything, odd rates and lengths, offsets that disagree
    assert {step([2048, 4096], [2, 4]), step([2048, 4096], [1, 3]), step([2048, 4097], [1, 4])} == {1}
    assert step([2048, 4096, 8192], [1, 2, 4], "blocked", 4) == 1


# --- chunks ------------------------------------------------------------------------------------------------------------------------------


@given(data=st.data())
@settings(max_examples=100)
def test_chunks_partition_the_call_begin_with_segments_and_keep_to_the_budget(data: st.DataObject) -> None:
    kv_heads, ratio = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    heads, n = kv_heads * ratio, data.draw(st.integers(1, 300))
    lengths = tuple(data.draw(st.lists(st.sampled_from([1, 2, 3, 4, 8, 12, 16, 24, 48, 1000]), min_size=1, max_size=3)))
    rates = tuple(data.draw(st.integers(1, w)) for w in lengths)
    pattern = DilatedPattern(lengths, rates, "cyclic", "all", data.draw(st.sampled_from(["mask", "zero_keys"])))
    budget = data.draw(st.integers(1, 5000))
    cut = chunking.make_chunk_sizes(pattern, chunking.CallSizes(2, n, heads, kv_heads, 1, 1), 1, budget)
    taken, sizes = torch.zeros(n, heads, dtype=torch.int64), []
    for (low, high), (first, last) in cut.chunks(heads, n):
        taken[first:last, low:high] += 1
        assert low % ratio == 0 and all(first % w == 0 for w in lengths if first)
        buffers = branch_buffers.make_branch_buffers(pattern, heads, (low, high), last - first, False)
        sizes.append(buffers.rows(with_direct=False) * 2 * (high - low))
    assert bool((taken == 1).all())
    smallest = cut.heads == ratio and (cut.positions == n or cut.positions <= max(lengths) * 12)
    assert smallest or max(sizes) * min(len(sizes), 2) <= budget


def test_a_million_positions_of_longnet_keep_to_the_budget() -> None:
    """16 heads of 128, the paper's geometric branches: parts of the forward within 5 % of q, k and v, of the backward within 1 GiB."""
    n, pattern = 2**20, DilatedPattern([2048 << i for i in range(5)], [1 << i for i in range(5)])
    sizes = chunking.CallSizes(1, n, 16, 16, 128, 2)
    for cut, row_bytes, limit in (
        (chunking.forward_chunk_sizes(pattern, sizes), 260, sizes.input_bytes // 20),
        (chunking.backward_chunk_sizes(pattern, sizes), 768, 2**30),
    ):
        buffers = branch_buffers.make_branch_buffers(pattern, 16, (0, cut.heads), cut.positions, False)
        assert cut.concurrent * cut.heads * buffers.rows(with_direct=False) * row_bytes <= limit and cut.positions % 32768 == 0


def test_only_a_call_with_detached_mixing_saves_outputs_of_branches_within_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Elements that autograd saves, beside q, k, v, out and lse."""
    q, k, v = (torch.randn(2, 20, 2, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    elements = 2 * 2 * 4 * (3 * 8 + 5)
    detached = {"mixture_grad": "detached", "tail": "zero_keys", "head_offsets": "blocked"}

    def saved(k: torch.Tensor = k, v: torch.Tensor = v, lengths: Any = (8, 40), rates: Any = (1, 4), **options: Any) -> int:
        fused.run_fused(monkeypatch)
        sizes: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.numel()), lambda _: None):
            dilated_attention(q, k, v, lengths, rates, **detached | options)
        return elements * sizes.count(elements)

    assert saved() == saved(key_padding_mask=(torch.arange(20) > 17).repeat(2, 1)) == elements
    assert not saved(mixture_grad="exact") and not saved(dropout_p=0.1) and not saved(lengths=(8,), rates=(1,))
    assert not saved(k[:, :, :1], v[:, :, :1])
    monkeypatch.setattr(chunking, "transient_budget", lambda _, is_backward=False: elements * 8 - 1)
    assert not saved()
