"""The custom op of dilated attention: schema, fake, autograd. Opaque to torch.compile, so nothing breaks a graph.

``torch.ops.dilated_attention.dilated_attention`` is what a selective-checkpointing policy lists as must-save.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from typing import Any

import torch

from dilated_attention.backends import NESTED, BackendUnavailable, Options, Request, detect, registry
from dilated_attention.backends.base import accumulation_dtype
from dilated_attention.engine import families, schedule
from dilated_attention.engine.plan import Shape
from dilated_attention.engine.run import Call
from dilated_attention.pattern import DilatedPattern

# queries a windowed problem holds on a backend that masks instead of skipping
WINDOW_BLOCK = 512


@functools.lru_cache(maxsize=256)
def pattern_of(
    segment_lengths: tuple[int, ...],
    dilation_rates: tuple[int, ...],
    head_offsets: str,
    offset_list: tuple[int, ...],
    branch_heads: str,
    tail: str,
) -> DilatedPattern:
    """The pattern of the op's flat arguments; ``head_offsets="list"`` reads ``offset_list``, H integers per branch in a row."""
    if head_offsets != "list":
        return DilatedPattern(segment_lengths, dilation_rates, head_offsets, branch_heads, tail)
    heads = len(offset_list) // len(segment_lengths)
    rows = tuple(offset_list[i : i + heads] for i in range(0, len(offset_list), heads))
    return DilatedPattern(segment_lengths, dilation_rates, rows, branch_heads, tail)


@torch.library.custom_op("dilated_attention::dilated_attention", mutates_args=())
def dilated_attention_op(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    key_padding_mask: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    seed: torch.Tensor | None,
    segment_lengths: list[int],
    dilation_rates: list[int],
    head_offsets: str,
    offset_list: list[int],
    branch_heads: str,
    tail: str,
    window: list[int],
    is_causal: bool,
    scale: float,
    query_offset: int,
    dropout_p: float,
    detached: bool,
    deterministic: bool,
    needs_grad: bool,
    backend: str,
    precision: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out (B, Nq, H, D), lse (B, H, Nq)). ``window`` is [] or [left, right], −1 for unbounded. Arguments are checked by the caller."""
    pattern = pattern_of(tuple(segment_lengths), tuple(dilation_rates), head_offsets, tuple(offset_list), branch_heads, tail)
    settings = (window, is_causal, scale, query_offset, dropout_p, detached, deterministic, needs_grad, backend, precision)
    if not q.numel():
        if cu_seqlens is not None:
            document_ranges(cu_seqlens, k.shape[1])
        return torch.empty_like(q, memory_format=torch.contiguous_format), _new_lse(q, -torch.inf)
    q, k, v = (kernel_ready(x) for x in (q, k, v))
    shape, call = _prepare(False, (q, k, v), key_padding_mask, cu_seqlens, seed, pattern, *settings)
    with _without_autocast(q):
        return schedule.forward(pattern, shape, q, k, v, call)


@torch.library.custom_op("dilated_attention::dilated_attention_backward", mutates_args=())
def dilated_attention_backward_op(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    key_padding_mask: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    seed: torch.Tensor | None,
    segment_lengths: list[int],
    dilation_rates: list[int],
    head_offsets: str,
    offset_list: list[int],
    branch_heads: str,
    tail: str,
    window: list[int],
    is_causal: bool,
    scale: float,
    query_offset: int,
    dropout_p: float,
    detached: bool,
    deterministic: bool,
    needs_grad: bool,
    backend: str,
    precision: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dq, dk, dv), contiguous, in the inputs' dtype."""
    if not q.numel():
        return (
            _new_like(q),
            torch.zeros_like(k, memory_format=torch.contiguous_format),
            torch.zeros_like(v, memory_format=torch.contiguous_format),
        )
    pattern = pattern_of(tuple(segment_lengths), tuple(dilation_rates), head_offsets, tuple(offset_list), branch_heads, tail)
    settings = (window, is_causal, scale, query_offset, dropout_p, detached, deterministic, needs_grad, backend, precision)
    dout, q, k, v, out = (kernel_ready(x) for x in (dout, q, k, v, out))
    shape, call = _prepare(True, (q, k, v, dout), key_padding_mask, cu_seqlens, seed, pattern, *settings)
    with _without_autocast(q):
        dq, dk, dv = schedule.backward(pattern, shape, (dout, q, k, v, out, lse), call, dlse)
    return dq, dk, dv


def _without_autocast(x: torch.Tensor) -> torch.autocast:
    """The caller's autocast stays on inside an op and would round a backend's float32 arithmetic to half precision."""
    return torch.autocast(x.device.type, enabled=False)


def _prepare(
    is_backward: bool,
    views: tuple[torch.Tensor, ...],
    key_padding_mask: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    seed: torch.Tensor | None,
    pattern: DilatedPattern,
    window: list[int],
    is_causal: bool,
    scale: float,
    query_offset: int,
    dropout_p: float,
    detached: bool,
    deterministic: bool,
    needs_grad: bool,
    backend: str,
    precision: str,
) -> tuple[Shape, Call]:
    """Choose the backend of this pass and plan it on ``views`` (q, k and what else kernels read).

    The forward of a call that needs gradients asks for both passes, so BackendUnavailable comes before anything is allocated.
    """
    q, k = views[:2]
    _, Nq, H, D = q.shape
    Nk, Hk = k.shape[1:3]
    documents = ((0, Nk),) if cu_seqlens is None else document_ranges(cu_seqlens, Nk)
    longest = min(max(pattern.segment_lengths), max((end - start for start, end in documents), default=0))
    request = Request(
        hardware=detect(q.device),
        dtype=q.dtype,
        head_dim=D,
        num_heads=H,
        num_kv_heads=Hk,
        causal=is_causal,
        needs_grad=is_backward,
        key_mask=key_padding_mask is not None,
        window=bool(window),
        dropout=dropout_p > 0,
        deterministic=deterministic or torch.are_deterministic_algorithms_enabled(),
        torch_deterministic=torch.are_deterministic_algorithms_enabled(),
        precision=precision,
        extent=max(_segment_extent(x, longest) for x in views),
        length=max(-(-min(w, longest) // r) for w, r in pattern.branches),
    )
    # each pass has its own choice: every backend's backward takes any other's out and lse
    chosen = registry.select(request, backend)
    if needs_grad and not is_backward:
        registry.select(replace(request, needs_grad=True), backend)
    shape = Shape(
        num_heads=H,
        num_kv_heads=Hk,
        queries=(query_offset, query_offset + Nq),
        keys=(0, Nk),
        documents=documents,
        is_causal=is_causal,
        window=(None if window[0] < 0 else window[0], None if window[1] < 0 else window[1]) if window else None,
        window_block=None if chosen.facts.native_window else WINDOW_BLOCK,
        shifted_heads=key_padding_mask is None and dropout_p == 0,
    )
    call = Call(
        backend=chosen,
        options=Options(scale=scale, deterministic=request.deterministic),
        query_offset=query_offset,
        padding=key_padding_mask,
        dropout_p=dropout_p,
        seed=int(seed.item()) if seed is not None else 0,
        detached=detached,
        is_causal=is_causal,
        nested=not is_backward and _is_nested(request, pattern, views, shape, scale, backend),
    )
    return shape, call


def _is_nested(
    request: Request, pattern: DilatedPattern, views: tuple[torch.Tensor, ...], shape: Shape, scale: float, backend: str
) -> bool:
    """Whether the forward visits the pairs of nested branches once: where it can, if no other kernel is asked for by name."""
    q, k, v = views[:3]
    if backend != NESTED and (backend != "auto" or q.device.type not in schedule.FUSED_DEVICES):
        return False
    reasons = families.why_not(request, pattern, (q, k, v), len(shape.documents), scale)
    if reasons and backend == NESTED:
        raise BackendUnavailable(
            f"backend={NESTED!r} cannot compute {request.describe()}\n  {NESTED}: {'; '.join(reasons)}\n"
            "  backend='auto' takes it wherever it can, and other kernels elsewhere"
        )
    if reasons or (backend == "auto" and not families.is_worth_it(pattern, q, shape.is_causal)):
        return False
    _tell_nested(request)
    return True


@functools.lru_cache(maxsize=256)
def _tell_nested(request: Request) -> None:
    """Once for a kind of call: a training step makes the same ones over and over."""
    registry.tell_once(f"forward: pairs that nested branches share are visited once (kernel {NESTED!r}), for {request.describe()}")


def document_ranges(cu_seqlens: torch.Tensor, num_keys: int) -> tuple[tuple[int, int], ...]:
    """(start, end) of each document. Reads the values, so it waits for the GPU where they lie on one."""
    bounds = cu_seqlens.tolist()
    if bounds[0] != 0 or bounds[-1] != num_keys or any(b < a for a, b in itertools.pairwise(bounds)):
        shown = bounds if len(bounds) <= 12 else [*bounds[:6], "…", *bounds[-5:]]
        raise ValueError(f"cu_seqlens is {shown}; expected bounds that start at 0, never decrease and end at N = {num_keys}")
    return tuple((a, b) for a, b in itertools.pairwise(bounds) if a < b)


def _segment_extent(x: torch.Tensor, length: int) -> int:
    """Elements between the first and the last one of ``length`` positions of all heads: with heads first, heads lie far apart."""
    return 1 + (length - 1) * x.stride(1) + (x.shape[2] - 1) * x.stride(2) + x.shape[3] - 1


def kernel_ready(x: torch.Tensor) -> torch.Tensor:
    """x as kernels take it: last stride 1 and, on a GPU, 16-byte aligned rows; else a contiguous copy."""
    if x.stride(-1) != 1 and x.shape[-1] > 0:
        # not contiguous(), which is no copy where only a dimension of size 1 has another stride: kernels read that stride
        return x.clone(memory_format=torch.contiguous_format)
    if x.device.type == "cuda":
        size = x.element_size()
        if x.data_ptr() % 16 or any(stride * size % 16 for stride in x.stride()[:-1]):
            return x.contiguous() if not x.is_contiguous() else x.clone(memory_format=torch.contiguous_format)
    return x


def _new_like(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _new_lse(q: torch.Tensor, value: float) -> torch.Tensor:
    return torch.full((q.shape[0], q.shape[2], q.shape[1]), value, dtype=accumulation_dtype(q.dtype), device=q.device)


@dilated_attention_op.register_fake
def _(q: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return _new_like(q), q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=accumulation_dtype(q.dtype))


@dilated_attention_backward_op.register_fake
def _(
    dout: torch.Tensor, dlse: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, ...]:
    return _new_like(q), _new_like(k), _new_like(v)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:6], *output)
    ctx.settings = inputs[6:]


def _backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    q, k, v, key_padding_mask, cu_seqlens, seed, out, lse = ctx.saved_tensors
    if dout is None:
        dout = torch.zeros_like(out)
    tensors = (dout.to(q.dtype), dlse, q, k, v, out, lse, key_padding_mask, cu_seqlens, seed)
    dq, dk, dv = dilated_attention_backward_op(*tensors, *ctx.settings)
    return dq, dk, dv, *(None,) * (3 + len(ctx.settings))


def _no_double_backward(ctx: Any, *_: Any) -> None:
    raise NotImplementedError(
        "dilated_attention has no second derivative: its backward keeps no graph. For gradients of gradients at small N, use "
        "dilated_attention.engine.reference.reference_attention, which is plain autograd"
    )


dilated_attention_op.register_autograd(_backward, setup_context=_setup_context)
dilated_attention_backward_op.register_autograd(_no_double_backward)
