"""The end of a residual branch, x + drop_path(dropout(y)), which saves one seed for the backward instead of a mask.

A hash of an element's index and the seed decides whether the element is kept, so the backward recomputes the same mask, on any device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dilated_attention.backends.hardware import has_kernels
from dilated_attention.engine.oom import explains_shortage
from dilated_attention.engine.ops.eager import is_eager, is_transformed
from dilated_attention.engine.ops.transforms import on_tangents, on_transforms

# SplitMix64 (Steele, Lea, Flood 2014) with signed 64-bit constants; int64 products wrap, as the algorithm requires
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64
# elements hashed at a time: three int64 tensors of this size fit in a CPU's cache
_CHUNK = 2**16


def add_dropped(x: torch.Tensor, y: torch.Tensor, *, dropout: float = 0.0, path: torch.Tensor | None = None) -> torch.Tensor:
    """Computes x + path · dropout(y).

    Args:
        x, y: (B, …), of equal shape.
        dropout: p ∈ [0, 1): probability that an element of y is dropped; the kept elements are scaled by 1/(1 − p). Pass 0 in evaluation.
        path: float factors of y, 0 where stochastic depth drops the branch: (B,), one per sample, or (B, N), one per row. None for 1.

    Returns:
        A tensor of x's shape in the dtype of x + y. Without dropout and path it is plain x + y.

    The seed is drawn from the default generator of x's device: it is reproducible under ``manual_seed``, repeated by activation
    checkpointing, and new in each replay of a CUDA graph. The mask differs from that of nn.Dropout under the same seed.
    """
    if not dropout and path is None:
        return x + y
    seed = torch.randint(2**62, (), dtype=torch.int64, device=x.device) if dropout else None
    call = _AddDropped.apply if is_eager([x, y]) else add_dropped_op
    return call(x, y, seed, path, dropout, torch.promote_types(x.dtype, y.dtype))


@explains_shortage("forward of add_dropped")
def _add_dropped(
    x: torch.Tensor | None, y: torch.Tensor, seed: torch.Tensor | None, path: torch.Tensor | None, dropout: float, dtype: torch.dtype
) -> torch.Tensor:
    """Computes x + path · dropout(y) in ``dtype``. Without x it is its own backward: linear and diagonal in y."""
    y = y.contiguous()
    threshold, scale = threshold_of(dropout), 1 / (1 - dropout)
    if has_kernels(y) and (x is None or has_kernels(x)):
        from dilated_attention.functional import fused_norm_linear_triton

        path = None if path is None else path.float().contiguous()
        return fused_norm_linear_triton.dropped(None if x is None else x.contiguous(), y, seed, path, threshold, scale, dtype)
    out = _scaled(y, path, scale, dtype).contiguous()
    if seed is not None:
        flat = out.view(-1)
        for start in range(0, flat.numel(), _CHUNK):
            part = flat[start : start + _CHUNK]
            # fills instead of multiplying: 0 · inf would be NaN, where the kernel returns 0
            part.masked_fill_(~keep_mask(seed, start, part.numel(), threshold), 0)
    return (out if x is None else out.add_(x)).to(dtype)


def _scaled(y: torch.Tensor, path: torch.Tensor | None, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """Computes scale · path · y in ``dtype``, or in float32 if that is wider."""
    wide = torch.promote_types(dtype, torch.float32)
    factor = torch.full((1,), scale, dtype=wide, device=y.device) if path is None else path.to(wide) * scale
    return y.to(wide) * factor.view(*factor.shape, *(1,) * (y.ndim - factor.ndim))


def _plain(
    x: torch.Tensor | None, y: torch.Tensor, seed: torch.Tensor | None, path: torch.Tensor | None, dropout: float, dtype: torch.dtype
) -> torch.Tensor:
    """Computes the same in plain torch with the whole mask at once; every torch.func transform and forward-mode AD can go through it."""
    out = _scaled(y, path, 1 / (1 - dropout), dtype)
    if seed is not None:
        out = out.masked_fill(~keep_mask(seed, 0, y.numel(), threshold_of(dropout)).view(y.shape), 0)
    return (out if x is None else out + x).to(dtype)


def threshold_of(dropout: float) -> int:
    """Returns the threshold below which a 31-bit hash means that the element is dropped."""
    return int(dropout * 2**31)


def keep_mask(seed: torch.Tensor, start: int, count: int, threshold: int) -> torch.Tensor:
    """Returns a bool mask (count,): which elements from index ``start`` on are kept.

    Element ``i`` is decided by number ``i + 1`` of the SplitMix64 sequence that begins at ``seed``.
    """
    # the seed is not added in place, since vmap may map it
    state = torch.arange(start + 1, start + count + 1, device=seed.device).mul_(_GOLDEN) + seed
    state = state.bitwise_xor_(_shift(state, 30)).mul_(_MIX_1)
    state = state.bitwise_xor_(_shift(state, 27)).mul_(_MIX_2)
    state = state.bitwise_xor_(_shift(state, 31))
    # the 31 highest bits
    return _shift(state, 33) >= threshold


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Shifts int64 right logically, without the sign."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)


add_dropped_op = torch.library.custom_op("dilated_attention::add_dropped", _add_dropped, mutates_args=())


@add_dropped_op.register_fake
def _(x: torch.Tensor | None, y: torch.Tensor, seed: Any, path: Any, dropout: float, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_like(y, dtype=dtype, memory_format=torch.contiguous_format)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, y, seed, path, dropout, _ = inputs
    ctx.save_for_backward(seed, path)
    ctx.dtypes, ctx.dropout = (None if x is None else x.dtype, y.dtype), dropout


def _autograd(ctx: Any, grad: torch.Tensor, backward: Callable[..., torch.Tensor] = add_dropped_op) -> tuple[Any, ...]:
    seed, path = ctx.saved_tensors
    dx = grad.to(ctx.dtypes[0]) if ctx.needs_input_grad[0] else None
    dy = backward(None, grad, seed, path, ctx.dropout, ctx.dtypes[1]) if ctx.needs_input_grad[1] else None
    return dx, dy, None, None, None, None


class _AddDropped(torch.autograd.Function):
    """The same forward and backward as a plain autograd function, without the overhead of a custom op."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> torch.Tensor:
        output = _add_dropped(*inputs)
        _setup_context(ctx, inputs, output)
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        # where a second derivative or a transform may be asked for, calls the op, which supports both
        return _autograd(ctx, grad, add_dropped_op if torch.is_grad_enabled() or is_transformed() else _add_dropped)


add_dropped_op.register_autograd(_autograd, setup_context=_setup_context)
on_transforms(add_dropped_op, _plain)
on_tangents(add_dropped_op, _plain)
