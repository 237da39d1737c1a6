"""8-bit floats with scales: what rounding keeps. ``test_flash3_fp8.py`` has the attention of rounded tensors."""

from __future__ import annotations

import pytest
import torch

from dilated_attention.backends.flash.flash3_fp8 import E4M3_MAX, quantise

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# (batch, positions, heads, head dim, scales)
SHAPES = [(2, 40, 4, 16, 2), (1, 33, 6, 48, 1), (1, 20, 4, 16, 4), (3, 3, 1, 16, 1)]


def strided(shape: tuple[int, ...]) -> torch.Tensor:
    """Every third position, one element large, one channel far from 0."""
    B, N, H, D, _ = shape
    x = torch.randn(B, N, H, D, generator=torch.Generator().manual_seed(N)).bfloat16()
    x[..., 3] += 4
    x[0, 0, 0, 1] = 30.0
    return x.to(DEVICE)[:, 1::3] if N > 3 else x.to(DEVICE)[:, 1:2]


@pytest.mark.parametrize("centre", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_rounding_is_within_a_sixteenth_and_the_mean_is_kept(shape: tuple[int, ...], centre: bool) -> None:
    x, num_scales = strided(shape), shape[4]
    y, descale, mean = quantise(x, num_scales, centre=centre)
    P, L, G, D = x.shape
    assert y.dtype is torch.float8_e4m3fn
    assert y.is_contiguous()
    assert descale.shape == (P, num_scales)
    group = G // num_scales
    back = y.float() * descale.repeat_interleave(group, 1)[:, None, :, None]
    if not centre:
        # half a unit of 3 mantissa bits; below 2^-6 of the scaled range steps are equal
        assert ((back - x.float()).abs() <= x.float().abs() / 16 + descale.max() * 2**-10).all()
        return
    back = back + mean.repeat_interleave(group, 1)[:, None]
    columns = (1, 3)
    left, right = (t.float().view(P, L, num_scales, group, D).mean(columns) for t in (back, x))
    torch.testing.assert_close(left, right, atol=1e-5, rtol=1e-5)


def test_values_that_are_not_finite_stay_so_and_spoil_no_scale() -> None:
    x = torch.randn(2, 8, 2, 16)
    clean = quantise(x, 2, centre=True)
    x[0, 3, 1, 5], x[1, 2, 0, 0] = torch.nan, -torch.inf
    y, descale, mean = quantise(x, 2, centre=True)
    assert y.float().isnan().nonzero().tolist() == [[0, 3, 1, 5], [1, 2, 0, 0]]
    assert descale.isfinite().all()
    assert mean.isfinite().all()
    assert torch.equal(y[0, :, 0].float(), clean.y[0, :, 0].float())


def test_zeros_and_the_largest_element_are_exact() -> None:
    x = torch.zeros(1, 4, 2, 16)
    x[0, 1, 1, 2] = -1e-20
    y, descale, _ = quantise(x, 2)
    assert descale.isfinite().all()
    assert (y[:, :, 0].float() == 0).all()
    assert y[0, 1, 1, 2].float() == -E4M3_MAX
