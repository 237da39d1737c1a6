"""The flash-attn adapter against a stand-in with flash-attn 2.8's published signatures: the package itself must be compiled.

The stand-in computes in plain torch, so a swapped argument, a wrong window or a lost gradient shows as a wrong number.
"""

from __future__ import annotations

import dataclasses
import sys
import types
from collections.abc import Iterator

import pytest
import torch

from dilated_attention.backends import Mask, Options
from dilated_attention.backends.flash.flash2 import Flash2Backend
from dilated_attention.backends.torch_ops.math import MathBackend

MATH = MathBackend()


def _options(q: torch.Tensor, k: torch.Tensor, scale: float, causal: bool, left: int, right: int, softcap: float) -> Options:
    if causal:
        assert (left, right) == (-1, -1)
        return Options(scale=scale, causal=True, softcap=softcap)
    if (left, right) == (-1, -1):
        return Options(scale=scale, softcap=softcap)
    diagonal = k.shape[1] - q.shape[1]
    return Options(
        scale=scale, mask=Mask(band=(None if left < 0 else diagonal - left, None if right < 0 else diagonal + right)), softcap=softcap
    )


def _flash_attn_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    return_softmax: bool,
) -> tuple[torch.Tensor, torch.Tensor, None, None]:
    assert (dropout_p, alibi_slopes, return_softmax) == (0.0, None, False)
    out, lse = MATH.forward(q, k, v, _options(q, k, softmax_scale, causal, window_size_left, window_size_right, softcap))
    # the kernel's own convention for a row without keys
    return out, lse.masked_fill(lse == -torch.inf, torch.inf), None, None


def _flash_attn_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    deterministic: bool,
    rng_state: torch.Tensor | None = None,
) -> torch.Tensor:
    assert (dropout_p, alibi_slopes, deterministic) == (0.0, None, True)
    assert softmax_lse.is_contiguous()
    options = _options(q, k, softmax_scale, causal, window_size_left, window_size_right, softcap)
    for given, share in zip((dq, dk, dv), MATH.backward(dout, q, k, v, out, softmax_lse, options), strict=True):
        given.copy_(share)
    return softmax_lse


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    package, interface = types.ModuleType("flash_attn"), types.ModuleType("flash_attn.flash_attn_interface")
    interface._flash_attn_forward = _flash_attn_forward  # type: ignore[attr-defined]
    interface._flash_attn_backward = _flash_attn_backward  # type: ignore[attr-defined]
    package.flash_attn_interface = interface  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", interface)
    yield


@pytest.mark.parametrize(
    "options", [Options(scale=0.2), Options(scale=0.2, causal=True, softcap=0.4), Options(scale=0.2, mask=Mask(band=(-3, 6)))]
)
def test_forward_and_backward_reach_the_kernel_as_meant(options: Options) -> None:
    num_keys = 9 if options.causal else 12
    q, dout = torch.randn(2, 9, 4, 16), torch.randn(2, 9, 4, 16)
    k, v = torch.randn(2, num_keys, 2, 16), torch.randn(2, num_keys, 2, 16)
    out, lse = Flash2Backend().forward(q, k, v, options)
    expected_out, expected_lse = MATH.forward(q, k, v, options)
    assert torch.equal(out, expected_out)
    assert torch.equal(lse, expected_lse)
    deterministic = dataclasses.replace(options, deterministic=True)
    grads = Flash2Backend().backward(dout, q, k, v, out, lse.transpose(1, 2).contiguous().transpose(1, 2), deterministic)
    for got, want in zip(grads, MATH.backward(dout, q, k, v, out, lse, options), strict=True):
        assert torch.equal(got, want)
