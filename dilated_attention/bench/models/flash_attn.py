"""A stand-in for the package flash-attn: its functions as TorchScale and ring-flash-attention call them, on this library's backends.

The same kernel then runs under another schedule, without this library's own operator around it.
"""

from __future__ import annotations

from typing import Any

import torch

from dilated_attention.backends import Options, registry
from dilated_attention.backends.base import Bounds

# the backend behind ``FUNCTIONS``, which ring-flash-attention imports once
standing_in = {"kernel": "auto"}


class _Kernel(torch.autograd.Function):
    """A backend's forward and backward; lse has no gradient."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, name: str, options: Options
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = registry.get(name).forward(q, k, v, options)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.mark_non_differentiable(lse)
        ctx.settings = name, options
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        name, options = ctx.settings
        q, k, v, out, lse = ctx.saved_tensors
        return *registry.get(name).backward(grads[0].contiguous(), q, k, v, out, lse, options), None, None


def flash_attn_func(
    kernel: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout: float = 0.0, bias: None = None,
    softmax_scale: float | None = None, is_causal: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Returns (out, lse) of q, k, v (B, N, H, D) by a backend, as TorchScale calls flash-attn's function."""
    if bias is not None or dropout:
        raise ValueError(f"bias is {bias} and dropout {dropout}; expected None and 0: flash-attn's stand-in has neither")
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    found: tuple[torch.Tensor, torch.Tensor] = _Kernel.apply(q, k, v, kernel, Options(scale=scale, causal=is_causal))
    return found


# dense and for packed documents. ring-flash-attention asks for their parameters, and passes all by name
def forward(**given: Any) -> tuple[torch.Tensor, torch.Tensor, None, None]:
    backend, (q, k, v) = registry.get(standing_in["kernel"]), [given[name] for name in "qkv"]
    if "cu_seqlens_q" not in given:
        return *backend.forward(q, k, v, _options(given)), None, None
    out = torch.empty_like(q)
    lse = backend.forward_packed(q[None], k[None], v[None], _bounds(given), _options(given), out[None])
    return out, lse[0], None, None


def backward(**given: Any) -> None:
    backend, (dq, dk, dv) = registry.get(standing_in["kernel"]), (given[name] for name in ("dq", "dk", "dv"))
    dout, q, k, v, out, lse = (given[name].contiguous() for name in ("dout", *"qkv", "out", "softmax_lse"))
    if "cu_seqlens_q" not in given:
        backend.backward_into(dout, q, k, v, out, lse, _options(given), (dq, dk, dv))
        return
    packed = [x[None] for x in (dout, q, k, v, out, lse)]
    backend.backward_packed(*packed, _bounds(given), _options(given), (dq[None], dk[None], dv[None]))  # type: ignore[call-arg]


FUNCTIONS = {"_flash_attn_forward": forward, "_flash_attn_varlen_forward": forward}
FUNCTIONS |= {"_flash_attn_backward": backward, "_flash_attn_varlen_backward": backward}  # type: ignore[dict-item]


def _options(given: dict[str, Any]) -> Options:
    others = {name: given.get(name) for name in ("dropout_p", "softcap", "alibi_slopes", "window_size_left", "window_size_right")}
    assert all(value in (None, 0, -1) for value in others.values()), f"the stand-in has no dropout, window, softcap or ALiBi: {others}"
    return Options(scale=given["softmax_scale"], causal=given["causal"])


def _bounds(given: dict[str, Any]) -> Bounds:
    return Bounds(*(given[f"{what}_{side}"] for what in ("cu_seqlens", "max_seqlen") for side in "qk"))
