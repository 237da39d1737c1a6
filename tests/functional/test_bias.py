"""Biases by formula: what no random case has. Against torch's attention with a mask, memory, refusals, what is computed for whom.

Any case with a bias, in any form, by any backend: tests/engine/test_oracle.py; refused arguments: test_bad_input.py."""

from typing import Any

import pytest
import torch

import dilated_attention as da
from dilated_attention.engine.ops.resolve import ResolvedCall
from dilated_attention.pattern import LocalWindow
from tests.helpers.largest import Largest

B, N, H, D = 2, 40, 4, 8


def tensors(n: int = N, dtype: torch.dtype = torch.float64, batch: int = B) -> list[torch.Tensor]:
    """q, k, v, slopes and places (N, 2)."""
    generator = torch.Generator().manual_seed(7)
    shapes = [(batch, n, H, D)] * 3 + [(H,), (n, 2)]
    made = [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]
    return [*(x.requires_grad_() for x in made[:4]), made[4]]


@pytest.mark.parametrize("kind", ["alibi", "line", "plane"])
def test_equals_torch_with_the_bias_as_a_mask(kind: str) -> None:
    q, k, v, slopes, places = tensors()
    c = {"alibi": torch.arange(float(N)).double()[:, None], "line": places[:, :1], "plane": places}[kind]
    bias = da.Alibi(slopes) if kind == "alibi" else da.Distance(places[:, 0] if kind == "line" else places, slopes)
    mask = -slopes[:, None, None] * torch.cdist(c, c)
    truth = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), attn_mask=mask[None])
    torch.testing.assert_close(da.attention(q, k, v, bias=bias).transpose(1, 2), truth)


@pytest.mark.parametrize("kind", ["dense", "dilated", "blocks"])
def test_no_tensor_has_a_number_for_each_pair(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of N = 6000 positions, forward and backward."""
    n = 6000
    q, k, v, slopes, places = (x[:, :, :1] if x.ndim == 4 else x for x in tensors(n, torch.float32, 1))
    bias = da.Distance(places, slopes[:1])
    call = {
        "dense": lambda: da.attention(q, k, v, bias=bias),
        "dilated": lambda: da.dilated_attention(q, k, v, [2000, n], [1, 2], bias=bias),
        "blocks": lambda: da.block_sparse_attention(q, k, v, LocalWindow(300), bias=bias),
    }[kind]
    # a mode around the call would see the op alone
    seen, run = Largest(), ResolvedCall._run

    def watched(*given: Any) -> Any:
        with seen:
            return run(*given)

    monkeypatch.setattr(ResolvedCall, "_run", watched)
    grads = torch.autograd.grad(call().sum(), (q, k, v, slopes))
    assert all(bool(x.isfinite().all()) for x in grads)
    # a block of rows at a time, 32 MiB of them
    assert 3 * n * D < seen.elements < 32 * 2**20 // 4 + n < n * n // 4


def test_what_needs_no_gradient_gets_none_and_dtypes_are_kept() -> None:
    q, k, v, slopes, places = tensors(dtype=torch.float32)
    out = da.attention(q, k, v, bias=da.Distance(places.round().long(), slopes.detach()))
    assert all(x.grad_fn is None or x.abs().sum() > 0 for x in torch.autograd.grad(out.sum(), (q, k, v)))
    # slopes alone need one
    (dslopes,) = torch.autograd.grad(da.attention(*(x.detach() for x in (q, k, v)), bias=da.Alibi(slopes)).sin().sum(), slopes)
    assert dslopes.dtype is torch.float32 and bool(dslopes.all())
    with torch.autocast("cpu", torch.bfloat16):
        assert da.attention(q, k, v, bias=da.Alibi(slopes)).dtype is torch.bfloat16


@pytest.mark.parametrize("backend", ["math", "auto"])
def test_a_number_that_no_row_reads_changes_no_gradient(backend: str) -> None:
    q, k, v, slopes, places = (x.detach() for x in tensors())
    hidden = torch.zeros(B, N, dtype=torch.bool)
    hidden[:, 30:] = True

    def gradient(k: torch.Tensor) -> torch.Tensor:
        learned = slopes.clone().requires_grad_()
        out = da.attention(q, k, v, key_padding_mask=hidden, window=5, bias=da.Distance(places, learned), backend=backend)
        return torch.autograd.grad(out[:, :20].sin().sum(), learned)[0]

    spoilt = k.clone()
    spoilt[:, 31] = torch.nan
    torch.testing.assert_close(gradient(spoilt), gradient(k))
    spoilt[0, 3, 1] = torch.nan
    assert gradient(spoilt).isnan().tolist() == [False, True, False, False]
