"""8-bit floats with scales: what the definition keeps, and the Triton kernels against it."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.fp8_twin import E4M3_MAX, quantise_torch, restore_torch_

GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# (batch, positions, heads, head dim, scales)
SHAPES = [(2, 40, 4, 16, 2), (1, 33, 6, 48, 1), (1, 20, 4, 16, 4), (3, 3, 1, 16, 1)]


def strided(shape: tuple[int, ...], device: str = "cpu") -> torch.Tensor:
    """Every third position, one element large, one channel far from 0."""
    B, N, H, D, _ = shape
    x = torch.randn(B, N, H, D, generator=torch.Generator().manual_seed(N)).bfloat16()
    x[..., 3] += 4
    x[0, 0, 0, 1] = 30.0
    return x.to(device)[:, 1::3] if N > 3 else x.to(device)[:, 1:2]


@pytest.mark.parametrize("centre", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_rounding_is_within_a_sixteenth_and_the_mean_is_kept(shape: tuple[int, ...], centre: bool) -> None:
    x, num_scales = strided(shape), shape[4]
    y, descale, mean = quantise_torch(x, num_scales, centre=centre)
    P, L, G, D = x.shape
    assert y.dtype is torch.float8_e4m3fn
    assert y.is_contiguous()
    assert descale.shape == (P, num_scales)
    group = G // num_scales
    back = y.float() * descale.repeat_interleave(group, 1)[:, None, :, None]
    if not centre:
        assert mean is None
        # half a unit of 3 mantissa bits; below 2^-6 of the scaled range steps are equal
        assert ((back - x.float()).abs() <= x.float().abs() / 16 + descale.max() * 2**-10).all()
        return
    assert mean is not None
    back = back + mean.repeat_interleave(group, 1)[:, None]
    columns = (1, 3)
    left, right = (t.float().view(P, L, num_scales, group, D).mean(columns) for t in (back, x))
    torch.testing.assert_close(left, right, atol=1e-5, rtol=1e-5)


def test_values_that_are_not_finite_stay_so_and_spoil_no_scale() -> None:
    x = torch.randn(2, 8, 2, 16)
    clean = quantise_torch(x, 2, centre=True)
    x[0, 3, 1, 5], x[1, 2, 0, 0] = torch.nan, -torch.inf
    y, descale, mean = quantise_torch(x, 2, centre=True)
    assert y.float().isnan().nonzero().tolist() == [[0, 3, 1, 5], [1, 2, 0, 0]]
    assert mean is not None
    assert descale.isfinite().all()
    assert mean.isfinite().all()
    assert torch.equal(y[0, :, 0].float(), clean.y[0, :, 0].float())


def test_zeros_and_the_largest_element_are_exact() -> None:
    x = torch.zeros(1, 4, 2, 16)
    x[0, 1, 1, 2] = -1e-20
    y, descale, _ = quantise_torch(x, 2)
    assert descale.isfinite().all()
    assert (y[:, :, 0].float() == 0).all()
    assert y[0, 1, 1, 2].float() == -E4M3_MAX


def test_attention_of_centred_tensors_is_restored_exactly() -> None:
    """Scores and values without their means, then restore_: the attention of the whole tensors, grouped heads too."""
    P, L, S, G, K, D = 2, 5, 7, 4, 2, 16
    q, k, v = torch.randn(P, L, G, D), torch.randn(P, S, K, D) + 2, torch.randn(P, S, K, D) - 3

    def attend(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = torch.einsum("plgd,psgd->pgls", q, k.repeat_interleave(2, 2)) * 0.3
        return torch.einsum("pgls,psgd->plgd", scores.softmax(-1), v.repeat_interleave(2, 2)).contiguous(), scores.logsumexp(-1)

    expected_out, expected_lse = attend(k, v)
    k_mean, v_mean = k.mean(1), v.mean(1)
    out, lse = attend(k - k_mean[:, None], v - v_mean[:, None])
    restore_torch_(out, lse, q, k_mean, v_mean, 0.3)
    torch.testing.assert_close(out, expected_out)
    torch.testing.assert_close(lse, expected_lse)


@pytest.mark.slow
@pytest.mark.parametrize("centre", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_kernels_are_the_definition(shape: tuple[int, ...], centre: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted on a CPU, compiled on a GPU; several tiles and chunks in few rows; all but the rounding to 8 bits."""
    kernels = pytest.importorskip("dilated_attention.backends.flash.fp8")
    monkeypatch.setattr(kernels, "_TILE", 64)
    monkeypatch.setattr(kernels, "_CHUNK_TILES", 2)
    x, num_scales = strided(shape, DEVICE), shape[4]
    P, L, G, D = x.shape
    one_channel, one_row = torch.arange(D, device=DEVICE) == 5, (torch.arange(L, device=DEVICE) == 0)[:, None, None]
    for y in (x, x.masked_fill(one_channel, torch.nan), x.masked_fill(one_row, torch.inf)):
        got = kernels.quantise(y, num_scales, centre=centre, dtype=torch.float32)
        want = quantise_torch(y, num_scales, centre=centre, dtype=torch.float32)
        for a, b in zip(got, want, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                torch.testing.assert_close(a, b, equal_nan=True, atol=1e-4, rtol=1e-5)
    means = torch.randn(2, P, num_scales, D, device=DEVICE)
    out, lse = torch.randn(P, L, G, D, device=DEVICE), torch.randn(P, G, L, device=DEVICE)
    want_out, want_lse = out.clone(), lse.clone()
    kernels.restore_(out, lse, x, means[0], means[1], 0.3)
    restore_torch_(want_out, want_lse, x, means[0], means[1], 0.3)
    torch.testing.assert_close(out, want_out)
    torch.testing.assert_close(lse, want_lse, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("shape", [pytest.param(shape, marks=GPU) for shape in [*SHAPES, (2, 9000, 4, 64, 4), (1, 9000, 8, 80, 2)]])
def test_kernels_on_a_gpu_round_as_the_definition(shape: tuple[int, ...]) -> None:
    from dilated_attention.backends.flash.fp8 import quantise, restore_

    x, num_scales = strided(shape, "cuda"), shape[4]
    P, L, G, D = x.shape
    for centre in (False, True):
        got, want = quantise(x, num_scales, centre=centre), quantise_torch(x, num_scales, centre=centre)
        torch.testing.assert_close(got.descale, want.descale, atol=0, rtol=1e-6)
        # a scale one unit in the last place apart may round to the neighbour
        assert (got.y.float() != want.y.float()).float().mean() < 1e-3
        torch.testing.assert_close(got.y.float(), want.y.float(), atol=2.0, rtol=0.13)
        if centre:
            torch.testing.assert_close(got.mean, want.mean, atol=1e-3, rtol=1e-5)
    means = torch.randn(2, P, num_scales, D, device="cuda")
    out, lse = torch.randn(P, L, G, D, device="cuda").bfloat16(), torch.randn(P, G, L, device="cuda")
    want_out, want_lse = out.clone(), lse.clone()
    restore_(out, lse, x, means[0], means[1], 0.3)
    restore_torch_(want_out, want_lse, x, means[0], means[1], 0.3)
    torch.testing.assert_close(out, want_out)
    torch.testing.assert_close(lse, want_lse, atol=1e-4, rtol=1e-4)
