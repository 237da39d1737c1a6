"""Prepares a call: chooses its backend and the shape of its plan, and puts tensors into a form that kernels accept.

Both the single-process op and the distributed op use it.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace
from typing import Any

import torch

from dilated_attention.backends import AttentionRequest, Backend, Options, detect, registry
from dilated_attention.backends.hardware import has_kernels
from dilated_attention.engine.branches import strategy
from dilated_attention.engine.branches.launch_views import Call
from dilated_attention.engine.branches.plan import Range, Shape
from dilated_attention.engine.kernels.tiles_choice import packed_library
from dilated_attention.engine.ops.settings import CallSettings
from dilated_attention.pattern import DilatedPattern

# queries per windowed problem on a backend that masks keys instead of skipping them
WINDOW_BLOCK = 512
_AS_IT_IS = contextlib.nullcontext()


def prepare(
    is_backward: bool, views: tuple[torch.Tensor, ...], pattern: DilatedPattern, settings: CallSettings,
    padding: torch.Tensor | None = None, documents: tuple[Range, ...] | None = None, seed: torch.Tensor | None = None,
    num_keys: int | None = None,
) -> tuple[Shape, Call]:  # fmt: skip
    """Chooses the backend of this pass and returns the plan's shape and the call for ``views`` (q, k and the other tensors kernels read).

    The forward of a call that needs gradients checks both passes, so BackendUnavailable is raised before anything is allocated.

    Args:
        documents: (start, end) pairs that partition the keys; None for a single document.
        num_keys: number of keys of the whole sequence, where k holds only a part of it.
    """
    q, k = views[:2]
    _, Nq, H, _ = q.shape
    Nk, Hk = num_keys if num_keys is not None else k.shape[1], k.shape[2]
    documents = ((0, Nk),) if documents is None else documents
    longest = min(max(pattern.segment_lengths), max((end - start for start, end in documents), default=0))
    request = request_of(
        views,
        settings,
        is_backward,
        longest,
        key_mask=padding is not None,
        window=bool(settings.window),
        precision=settings.precision,
        length=max(-(-min(w, longest) // r) for w, r in pattern.branches),
    )
    chosen = select_backend(request, settings)
    shape = Shape(
        num_heads=H,
        num_kv_heads=Hk,
        queries=(settings.query_offset, settings.query_offset + Nq),
        keys=(0, Nk),
        documents=documents,
        is_causal=settings.is_causal,
        window=settings.window_sides,
        shifted_heads=padding is None and settings.dropout_p == 0,
    )
    if settings.backend == "auto":
        chosen = registry.get(packed_library(pattern, shape, request, q.shape[0], chosen.name))
    can = chosen.capabilities
    shape = replace(shape, window_block=None if can.native_window else WINDOW_BLOCK, aligned_last=can.aligned_last)
    call = Call(
        backend=chosen,
        options=Options(scale=settings.scale, deterministic=request.deterministic, softcap=settings.softcap),
        query_offset=settings.query_offset,
        padding=padding,
        dropout_p=settings.dropout_p,
        seed=int(seed.item()) if seed is not None else 0,
        detached=settings.detached,
        is_causal=settings.is_causal,
        request=request,
        named=settings.backend != "auto",
        needs_grad=settings.needs_grad or is_backward,
        strategy=settings.strategy,
    )
    return shape, call


def request_of(
    views: tuple[torch.Tensor, ...], settings: CallSettings, is_backward: bool, span: int, length: int, **more: Any
) -> AttentionRequest:
    """Builds the request to a backend for ``views`` (q, k and the other tensors it reads), whose problems span up to ``span`` positions.

    Lengths are rounded, so that the answer to one request holds for calls of nearly all lengths.
    """
    q, k = views[:2]
    extent = max(segment_extent(x, span) for x in views)
    torch_deterministic = torch.are_deterministic_algorithms_enabled()
    return AttentionRequest(
        hardware=detect(q.device),
        dtype=q.dtype,
        head_dim=q.shape[3],
        num_heads=q.shape[2],
        num_kv_heads=k.shape[2],
        causal=settings.is_causal,
        needs_grad=is_backward,
        dropout=settings.dropout_p > 0,
        softcap=settings.softcap > 0,
        deterministic=settings.deterministic or torch_deterministic,
        torch_deterministic=torch_deterministic,
        shapes_repeat=torch.backends.cudnn.benchmark,
        # spans within 32 bits suit every backend
        extent=extent if extent >= 2**31 else 0,
        length=2 ** round(math.log2(max(1, length))),
        **more,
    )


def select_backend(request: AttentionRequest, settings: CallSettings) -> Backend:
    """Selects the backend of this pass; each pass has its own, since every backward accepts any other's out and lse.

    A forward that needs gradients checks both passes, so BackendUnavailable comes before any work.
    """
    chosen = registry.select(request, settings.backend)
    if settings.needs_grad and not request.needs_grad:
        registry.select(replace(request, needs_grad=True), settings.backend)
    return chosen


def saved_elements(q: torch.Tensor, k: torch.Tensor, settings: CallSettings, cu_seqlens: torch.Tensor | None) -> Any:
    """Number of elements of per-branch outputs that the forward saves for a detached backward; 0 where the backward recomputes them.

    They are saved where all of them are in memory at once anyway: in the fused forward of a call that is one chunk. The result depends
    only on shapes, so fake tensors work too, and a symbolic length stays symbolic.
    """
    if not (settings.detached and settings.needs_grad):
        return 0
    if not strategy.is_fused(q.device.type, settings.strategy) or (q.device.type == "cuda" and not has_kernels(q)):
        return 0
    if cu_seqlens is not None or settings.dropout_p or settings.window:
        return 0
    if settings.query_offset != 0 or k.shape[1] != q.shape[1]:
        return 0
    return saved_elements_of_sequence(settings.pattern, q.shape, k.shape[2], q.element_size())


def saved_elements_of_sequence(pattern: DilatedPattern, shape: tuple[int, ...], num_kv_heads: int, itemsize: int) -> Any:
    """The same for a detached call on one whole sequence that is fused, from the shape of q, (B, N, H, D)."""
    B, N, H, D = shape
    if pattern.num_branches == 1 or pattern.branch_heads == "split" or num_kv_heads != H:
        return 0
    rows = sum(((N + w - 1) // w) * ((torch.sym_min(N, w) + r - 1) // r) for w, r in pattern.branches)
    elements = B * H * D * rows
    return elements if elements * itemsize <= strategy.saved_budget() else 0


def segment_extent(x: torch.Tensor, length: int) -> int:
    """Number of elements that ``length`` positions of all heads span in memory; in a heads-first layout, heads are far apart."""
    return 1 + (length - 1) * x.stride(1) + (x.shape[2] - 1) * x.stride(2) + x.shape[3] - 1


def kernel_ready(x: torch.Tensor) -> torch.Tensor:
    """Returns x if kernels accept it (last stride 1 and, on a GPU, 16-byte aligned rows), otherwise a contiguous copy."""
    if x.stride(-1) != 1 and x.shape[-1] > 0:
        # contiguous() would not copy where only a dimension of size 1 has another stride, but kernels read that stride
        return x.clone(memory_format=torch.contiguous_format)
    if x.device.type == "cuda":
        size = x.element_size()
        if x.data_ptr() % 16 or any(stride * size % 16 for stride in x.stride()[:-1]):
            return x.contiguous() if not x.is_contiguous() else x.clone(memory_format=torch.contiguous_format)
    return x


def without_autocast(x: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
    """Disables autocast, which stays on inside an op and would round a backend's float32 arithmetic to half precision."""
    device_type = x.device.type
    return torch.autocast(device_type, enabled=False) if torch.is_autocast_enabled(device_type) else _AS_IT_IS


def new_like(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)
