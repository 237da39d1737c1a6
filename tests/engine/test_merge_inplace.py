"""A part merged into a result that stands: the torch twin against float64, the Triton kernel against the twin."""

from __future__ import annotations

import pytest
import torch

from dilated_attention.backends.merge import merge_onto
from tests.helpers.merge_twin import merge

onto_triton = pytest.importorskip("dilated_attention.backends.merge_inplace_triton")
CASES = [(1, 1, 1, 1), (2, 37, 3, 64), (3, 5, 2, 59), (1, 130, 4, 128), (2, 3, 1, 256), (5, 4099, 12, 64)]


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
def test_merges_like_float64_and_rounds_once(shape: tuple[int, int, int, int], dtype: torch.dtype, kernel: object, device: str) -> None:
    if device == "cpu" and shape == CASES[-1]:
        pytest.skip("long for the interpreter")
    out, lse, part, part_lse = views(shape, dtype, device)
    want, want_lse = merge(out.double(), lse.double(), part.double(), part_lse.double())
    assert callable(kernel)
    kernel(out, lse, part, part_lse)
    half_a_step = torch.finfo(dtype).eps / 2
    if device == "cpu" and kernel is onto_triton.merge_onto and dtype is torch.bfloat16:
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
