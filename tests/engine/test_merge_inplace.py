"""A part merged into a result that stands: the torch twin against float64, the Triton kernel against the twin."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from dilated_attention.engine.branches import merge as merge_module
from dilated_attention.engine.branches.merge import add_up, merge, merge_onto

onto_triton = pytest.importorskip("dilated_attention.engine.branches.merge_inplace_triton")
CASES = [(1, 1, 1, 1), (2, 37, 3, 64), (3, 5, 2, 59), (1, 130, 4, 128), (2, 3, 1, 256)]


def views(shape: tuple[int, int, int, int], dtype: torch.dtype, device: str = "cpu") -> tuple[torch.Tensor, ...]:
    """out and lse as strided rows of larger tensors, with empty rows on one side, the other, and both."""
    P, L, G, D = shape
    generator = torch.Generator().manual_seed(L * 7 + D)
    out = torch.randn((P, 2 * L, G + 1, D), generator=generator).to(dtype).to(device)[:, ::2, 1:]
    lse = (torch.randn((P, G, 2 * L), generator=generator) * 5).to(device).transpose(1, 2)[:, 1::2]
    part = torch.randn((P, L, G, D), generator=generator).to(dtype).to(device)
    part_lse = (torch.randn((P, G, L), generator=generator) * 5).to(device).transpose(1, 2)
    for rows, empty in ((slice(0, None, 3), lse), (slice(0, None, 2), part_lse)):
        empty[:, rows] = -torch.inf
    out[lse == -torch.inf] = 0
    part[part_lse == -torch.inf] = 0
    return out, lse, part, part_lse


@pytest.mark.parametrize("shape", CASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kernel", [merge_onto, onto_triton.merge_onto])
def test_merges_like_float64_and_rounds_once(shape: tuple[int, int, int, int], dtype: torch.dtype, kernel: object) -> None:
    out, lse, part, part_lse = views(shape, dtype)
    want, want_lse = merge(out.double(), lse.double(), part.double(), part_lse.double())
    assert callable(kernel)
    kernel(out, lse, part, part_lse)
    half_a_step = torch.finfo(dtype).eps / 2
    if kernel is onto_triton.merge_onto and dtype is torch.bfloat16:
        # Triton's interpreter cuts bfloat16 off instead of rounding it
        half_a_step *= 2
    assert bool(((out.double() - want).abs() <= 1.01 * half_a_step * want.abs() + 4e-6).all())
    assert torch.equal(lse == -torch.inf, want_lse == -torch.inf)
    finite = want_lse.isfinite()
    torch.testing.assert_close(lse.double()[finite], want_lse[finite], rtol=1e-6, atol=2e-6)
    assert not out.isnan().any() and not lse.isnan().any()


def test_what_lies_between_the_rows_is_left_alone() -> None:
    whole = torch.randn(1, 20, 2, 8)
    before = whole.clone()
    lse = torch.zeros(1, 10, 2)
    onto_triton.merge_onto(whole[:, ::2], lse, torch.randn(1, 10, 2, 8), torch.zeros(1, 10, 2))
    assert torch.equal(whole[:, 1::2], before[:, 1::2])
    assert not torch.equal(whole[:, ::2], before[:, ::2])


@pytest.mark.parametrize("shape", CASES)
@pytest.mark.parametrize("shares", [(0, 3), (1, 0), (2, 1), (2, 5)])
@pytest.mark.parametrize("writes", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("add", [add_up, onto_triton.add_up])
def test_shares_are_added_up_in_float32(
    shape: tuple[int, int, int, int], shares: tuple[int, int], writes: bool, dtype: torch.dtype, add: Callable[..., None]
) -> None:
    B, L, G, D = shape
    generator = torch.Generator().manual_seed(L)
    own = [torch.randn((L, 2, B, G, D), generator=generator).to(dtype) for _ in range(shares[0])]
    came = torch.randn((shares[1], L, 2, B, G, D), generator=generator).to(dtype) if shares[1] else None
    whole = [torch.randn((B, 3 * L, G + 2, D), generator=generator).to(dtype) for _ in range(2)]
    before = [x.clone() for x in whole]
    grads = [x[:, 1::3, 1:-1] for x in whole]
    total = sum(x.double() for x in (*own, *([] if came is None else came)))
    assert isinstance(total, torch.Tensor)
    want = [total[:, which].transpose(0, 1) + (0 if writes else grads[which].double()) for which in range(2)]
    add(*grads, own, came, writes=writes)
    for grad, right in zip(grads, want, strict=True):
        assert bool(((grad.double() - right).abs() <= torch.finfo(dtype).eps / 1.99 * right.abs() + 4e-6).all())
    for now, then in zip(whole, before, strict=True):
        assert torch.equal(now[:, ::3], then[:, ::3]) and torch.equal(now[:, :, 0], then[:, :, 0])


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [*CASES, (5, 4099, 12, 64)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_kernel_on_a_gpu_equals_the_twin(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    theirs = views(shape, dtype, "cuda")
    ours = [x.cpu() for x in theirs]
    merge_onto(*theirs)
    merge_module.merge_onto(*ours)
    torch.testing.assert_close(theirs[0].cpu(), ours[0], rtol=torch.finfo(dtype).eps, atol=1e-6)
    torch.testing.assert_close(theirs[1].cpu(), ours[1], rtol=1e-6, atol=2e-6)
