"""precision="fp8": who takes it, who refuses it and why, and that the adapter reaches fa3_fwd as meant."""

from typing import Any

import pytest
import torch

from dilated_attention import (
    BackendUnavailable,
    DilatedAttention,
    MultiheadDilatedAttention,
    attention,
    dilated_attention,
)
from dilated_attention.backends import AttentionRequest, Options, detect, registry
from dilated_attention.backends.flash import flash3_fp8
from dilated_attention.backends.flash.flash3_fp8 import Flash3Fp8Backend, quantise
from dilated_attention.backends.torch_ops.math import MathBackend
from dilated_attention.factory import EXAMPLES
from tests.backends.test_libraries import Flash3Ops

HOPPER = EXAMPLES["hopper"]
FP8: dict[str, Any] = {"hardware": HOPPER, "dtype": torch.bfloat16, "head_dim": 64, "precision": "fp8"}
BACKEND = registry.get("flash3_fp8")


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Errors of 8-bit arithmetic are a matter of the draw: every run has the same."""
    torch.manual_seed(0)


def test_no_silent_fallback_through_any_door() -> None:
    q = torch.randn(1, 8, 2, 16)
    layer = MultiheadDilatedAttention(32, 2, [4], [1], precision="fp8")
    calls = (
        lambda: dilated_attention(q, q, q, [4], [1], precision="fp8"),
        lambda: attention(q, q, q, precision="fp8"),
        lambda: dilated_attention(q, q, q, [4], [1], precision="fp8", backend="math"),
        lambda: DilatedAttention([4], [1], precision="fp8")(q, q, q),
        lambda: layer(torch.randn(1, 8, 32)),
    )
    for call in calls:
        with pytest.raises(BackendUnavailable, match="not fp8"):
            call()
    with pytest.raises(BackendUnavailable, match="computes fp8 only, not native"):
        dilated_attention(q, q, q, [4], [1], backend="flash3_fp8")
    of_training = BACKEND.reasons_against(AttentionRequest(**(FP8 | {"needs_grad": True})))
    assert 'call it under torch.no_grad(), or train with precision="native"' in of_training[-1]


class StandIn(Flash3Ops):
    """fa3_fwd's published signature, which is FlashAttention-3's, so a swapped argument or descale shows as a wrong number."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int, int]] = []

    def fwd(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, ...]:
        assert all(x is None for x in (*rest[:3], *rest[4:17]))
        assert all(x.dtype is torch.float8_e4m3fn and x.stride(-1) == 1 for x in (q, k, v))
        assert rest[22:26] == (-1, -1, 0, 0.0) and rest[27] is rest[29] is None and rest[30] == 0
        self.calls.append((q.shape[1], k.shape[1], rest[28]))
        descales = rest[17:20]
        assert all(d.shape == (q.shape[0], k.shape[2]) for d in descales)
        wide = (
            x.float() * d.repeat_interleave(x.shape[2] // d.shape[1], 1)[:, None, :, None] for x, d in zip((q, k, v), descales, strict=True)
        )
        return super().fwd(*wide, *rest)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    ops = StandIn()
    monkeypatch.setattr(flash3_fp8, "_ops", lambda: ops)
    return ops


def relative(x: torch.Tensor, true: torch.Tensor) -> float:
    return ((x.double() - true.double()).norm() / true.double().norm()).item()


@pytest.mark.parametrize("causal", [False, True])
def test_many_keys_are_summed_in_parts_and_rows_cut_to_bound_memory(
    stand_in: StandIn, monkeypatch: pytest.MonkeyPatch, causal: bool
) -> None:
    monkeypatch.setattr(flash3_fp8, "_SPLIT_BYTES", 1)
    monkeypatch.setattr(flash3_fp8, "_LEAST_ROWS", 16)
    q, k, v = (torch.randn(1, 40, 2, 16).bfloat16() for _ in range(3))
    whole, whole_lse = Flash3Fp8Backend().forward(q, k, v, Options(scale=0.25, causal=causal))
    stand_in.calls.clear()
    out, lse = Flash3Fp8Backend(keys_a_sum=12).forward(q, k, v, Options(scale=0.25, causal=causal))
    assert stand_in.calls == ([(16, 16, 4), (16, 32, 4), (8, 40, 4)] if causal else [(16, 40, 4), (16, 40, 4), (8, 40, 4)])
    torch.testing.assert_close(out, whole)
    torch.testing.assert_close(lse, whole_lse)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("kv_heads", "dtype"), [(4, torch.float16), (2, torch.bfloat16)])
def test_a_dilated_call_runs_on_it_segment_by_segment(
    stand_in: StandIn, monkeypatch: pytest.MonkeyPatch, causal: bool, kv_heads: int, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(Flash3Fp8Backend, "reasons_against", lambda self, request: [] if request.precision == "fp8" else ["fp8 only"])
    monkeypatch.setattr(registry, "cached", {})
    q, k, v = (torch.randn(2, 150, heads, 32).to(dtype) for heads in (4, kv_heads, kv_heads))
    tensors, options = (q, k + 3, v + 1), {"is_causal": causal, "return_lse": True}
    true_out, true_lse = dilated_attention(*(x.double() for x in tensors), [32, 64], [1, 4], **options)
    assert not stand_in.calls
    out, lse = dilated_attention(*tensors, [32, 64], [1, 4], **options, precision="fp8")
    assert {(32, 32), (16, 16)} <= {call[:2] for call in stand_in.calls}
    assert out.dtype is dtype and lse.dtype is torch.float32
    assert 1e-4 < relative(out, true_out) < 0.03
    assert 1e-4 < (lse - true_lse).abs().max() < 0.15


# --- rounding to 8 bits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("centre", [False, True])
@pytest.mark.parametrize("num_scales", [1, 2])
def test_rounding_is_within_a_sixteenth_and_the_mean_is_kept(num_scales: int, centre: bool) -> None:
    """Of every third position, one element large, one channel far from 0."""
    wide = torch.randn(2, 40, 4, 16).bfloat16()
    wide[..., 3] += 4
    wide[0, 1, 0, 1] = 30.0
    x = wide[:, 1::3]
    y, descale, mean = quantise(x, num_scales, centre=centre)
    P, L, G, D = x.shape
    assert y.dtype is torch.float8_e4m3fn and y.is_contiguous() and descale.shape == (P, num_scales)
    group = G // num_scales
    back = y.float() * descale.repeat_interleave(group, 1)[:, None, :, None]
    if not centre:
        # half a unit of 3 mantissa bits; below 2^-6 of the scaled range steps are equal
        assert ((back - x.float()).abs() <= x.float().abs() / 16 + descale.max() * 2**-10).all()
        return
    back = back + mean.repeat_interleave(group, 1)[:, None]
    left, right = (t.float().view(P, L, num_scales, group, D).mean((1, 3)) for t in (back, x))
    torch.testing.assert_close(left, right, atol=1e-5, rtol=1e-5)


def test_values_that_are_not_finite_stay_so_and_spoil_no_scale() -> None:
    x = torch.randn(2, 8, 2, 16)
    clean, *_ = quantise(x, 2, centre=True)
    x[0, 3, 1, 5], x[1, 2, 0, 0] = torch.nan, -torch.inf
    y, descale, mean = quantise(x, 2, centre=True)
    assert y.float().isnan().nonzero().tolist() == [[0, 3, 1, 5], [1, 2, 0, 0]] and descale.isfinite().all() and mean.isfinite().all()
    assert torch.equal(y[0, :, 0].float(), clean[0, :, 0].float())


def test_library_paths_are_checked_and_there_is_no_backward(tmp_path: Any) -> None:
    with pytest.raises(ValueError, match="is not a file; expected the path of a shared library"):
        flash3_fp8.load_library(tmp_path / "none.so")
    with pytest.raises(NotImplementedError):
        BACKEND.backward()  # type: ignore[call-arg]


on_hopper = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or bool(BACKEND.reasons_against(AttentionRequest(**(FP8 | {"hardware": detect()})))),
        reason="needs a Hopper GPU and fa3-fwd (FLASH3_FP8_LIBRARY=…/_C.abi3.so)",
    ),
]


@pytest.mark.parametrize("head_dim", [pytest.param(d, marks=on_hopper) for d in (16, 48, 64, 80, 96, 128, 160, 192, 256)])
def test_on_a_gpu_the_error_is_that_of_rounding(head_dim: int) -> None:
    """Against float64 attention of the tensors as rounded to 8 bits, what is left is P's own rounding to 8 bits."""
    for heads, kv_heads, causal in ((4, 4, False), (4, 2, True), (3, 1, False)):
        q, k, v = (torch.randn(2, 1400, h, head_dim, device="cuda").bfloat16()[:, 1::2] for h in (heads, kv_heads, kv_heads))
        k, v = k + 2, v + 1
        options = Options(scale=head_dim**-0.5, causal=causal)
        true_out, _ = MathBackend().forward(q.double(), k.double(), v.double(), options)
        rounded, means = [], []
        for x, centre in ((q, False), (k, True), (v, True)):
            y, descale, mean = quantise(x, kv_heads, centre=centre)
            rounded.append(y.double() * descale.repeat_interleave(x.shape[2] // kv_heads, 1)[:, None, :, None])
            means += [mean.double()] if centre else []
        spread_out, same_lse = MathBackend().forward(*rounded, options)
        # the part of the scores that the keys share is of q as given, not as rounded
        same_lse = same_lse + options.scale * torch.einsum("plkgd,pkd->pkgl", q.double().unflatten(2, (kv_heads, -1)), means[0]).flatten(
            1, 2
        )
        same_out = spread_out + means[1].repeat_interleave(heads // kv_heads, 1)[:, None]
        for keys in (flash3_fp8.KEYS_A_SUM, 128):
            out, lse = Flash3Fp8Backend(keys_a_sum=keys).forward(q, k, v, options)
            assert (lse - same_lse).abs().max() < 2e-2
            assert relative(out, same_out) < 0.05 * (spread_out.norm() / same_out.norm()).item() + 4e-3
            assert relative(out, true_out) < 1.5 * relative(same_out, true_out) + 4e-3


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=on_hopper) for kind in ("dense", "dilated", "causal", "long")])
def test_on_a_gpu_through_the_door(kind: str) -> None:
    n = 20_000 if kind == "long" else 3000
    q, k, v = (torch.randn(1, n, 4, 64, device="cuda").half() + 1 for _ in range(3))

    def run(x: tuple[torch.Tensor, ...], precision: str) -> torch.Tensor:
        if kind in ("dense", "long"):
            return attention(*x, precision=precision)  # type: ignore[no-any-return]
        return dilated_attention(*x, [512, 2048], [1, 4], is_causal=kind == "causal", precision=precision)  # type: ignore[no-any-return]

    out = run((q, k, v), "fp8")
    native = run((q, k, v), "native")
    assert out.dtype is torch.float16
    assert 1e-6 < relative(out, native) < 0.02
    with pytest.raises(BackendUnavailable, match=r"torch\.no_grad"):
        run((q.requires_grad_(), k, v), "fp8")
    with torch.no_grad():
        assert torch.equal(run((q, k, v), "fp8"), out)
