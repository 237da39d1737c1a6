"""Runs a whole call: in chunks with one merge each if it is self-attention of one sequence on a GPU, otherwise problem by problem."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dilated_attention.backends.base import Options, accumulation_dtype
from dilated_attention.backends.hardware import has_kernels
from dilated_attention.backends.streams import Streams
from dilated_attention.engine.branches import chunking, fused_merge, packed, sequential
from dilated_attention.engine.branches.branch_buffers import BranchBuffers, make_branch_buffers
from dilated_attention.engine.branches.chunking import (
    Chunk,
    ChunkSizes,
    backward_chunk_sizes,
    forward_chunk_sizes,
    make_tiers,
    sizes_of,
)
from dilated_attention.engine.branches.launch_views import Call, Into, copied_into
from dilated_attention.engine.branches.plan import Shape, make_plan
from dilated_attention.engine.branches.sequential import run_backward
from dilated_attention.engine.branches.views import extent
from dilated_attention.engine.kernels.tiles_choice import runs_on_tiles
from dilated_attention.engine.kernels.tiles_layout import num_places
from dilated_attention.pattern import DilatedPattern

Tensors = tuple[Tensor, ...]


# how a whole pass runs: (q, k, v, call, saved, into) -> (out (B, Nq, H, D) in q's dtype, lse (B, H, Nq) in the accumulation dtype)
Forward = Callable[..., tuple[Tensor, Tensor]]
# (dout, q, k, v, out and lse, call, dlse (B, H, Nq), saved, into) -> (dq, dk, dv) in the inputs' dtype. Results that ``into`` names no
# place for are contiguous
Backward = Callable[..., Tensors]


def choose_forward(pattern: DilatedPattern, shape: Shape, tensors: Tensors, call: Call, *, saves: bool = False) -> Forward:
    """Decides how a forward runs on q, k, v like these ``tensors``: the result is a function for all such calls.

    Its argument ``saved`` is a flat buffer of ``prepare.saved_elements`` elements that it fills with the per-branch outputs for the
    backward, given if ``saves``, else None.
    """
    return _choose(pattern, shape, tensors, call, False, saves)


def choose_backward(pattern: DilatedPattern, shape: Shape, tensors: Tensors, call: Call, *, saved: bool = False) -> Backward:
    """Decides how a backward runs on dout, q, k, v, out like these ``tensors``.

    Args:
        saved: the forward has saved the branches' outputs. Without them, detached mixing recomputes them.
    """
    return _choose(pattern, shape, tensors, call, True, saved)


def _choose(pattern: DilatedPattern, shape: Shape, tensors: Tensors, call: Call, is_backward: bool, is_saved: bool) -> Callable[..., Any]:
    q, k = tensors[is_backward:][:2]
    if runs_on_tiles(pattern, shape, q, call, is_backward):
        # this module needs Triton
        from dilated_attention.engine.kernels import tiles

        shares = tiles.make_shares(pattern, shape, q, k, call, is_backward=is_backward, is_saved=is_saved)
        tiles.compile_ahead(pattern, shape, tensors, call, is_backward=is_backward, is_saved=is_saved)
        return functools.partial(tiles.backward if is_backward else tiles.forward, shares)
    if not is_saved and (options := _one_launch(pattern, shape, tensors, call)) is not None:
        return functools.partial(sequential.backward_at_once if is_backward else sequential.forward_at_once, options)
    if not is_saved and (launch := packed.packed_launch(pattern, shape, q, call)) is not None:
        return functools.partial(packed.backward if is_backward else packed.forward, launch)
    if not _is_fused(shape, q, call):
        return functools.partial(sequential.backward if is_backward else sequential.forward, make_plan(pattern, shape))
    return functools.partial(_fused_backward if is_backward else _fused_forward, pattern, shape)


def _fused_forward(
    pattern: DilatedPattern, shape: Shape, q: Tensor, k: Tensor, v: Tensor, call: Call, saved_branch_outputs: Tensor | None,
    into: Into | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    B, N, H, _ = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty((B, H, N), dtype=accumulation_dtype(q.dtype), device=q.device)
    if saved_branch_outputs is not None:
        fused_merge.forward(
            make_plan(pattern, shape),
            _saved_buffers(pattern, shape),
            (q, k, v),
            (out, lse.transpose(1, 2)),
            call,
            saved_branch_outputs=saved_branch_outputs,
        )
        return out if into is None else copied_into((out,), into)[0], lse
    sizes = sizes_of(q, k)

    def run(chunk: Chunk, is_concurrent: bool, branches: DilatedPattern, onto: bool) -> None:
        part = _shape_of(shape, chunk)
        views, (out_, lse_) = _narrow(shape, chunk, q, k, v), _narrow(shape, chunk, out, lse.transpose(1, 2))
        buffers = _buffers_of(branches, part, chunk, onto)
        fused_merge.forward(
            make_plan(branches, part), buffers, views, (out_, lse_), _call_of(call, chunk), is_concurrent=is_concurrent, onto=onto
        )

    for tier, branches in enumerate(make_tiers(pattern, H, lambda tier: forward_chunk_sizes(tier, sizes))):
        run_tier = functools.partial(run, branches=branches, onto=tier > 0)
        _in_chunks(forward_chunk_sizes(branches, sizes), shape, q.device, call, run_tier)
    return out if into is None else copied_into((out,), into)[0], lse


def _one_launch(pattern: DilatedPattern, shape: Shape, tensors: Tensors, call: Call) -> Options | None:
    """Returns the options of the launch that computes a dense call, so that its results need no copy; None for any other call."""
    capabilities = call.backend.capabilities
    # backends that write into views given to them copy nothing where the call is fused
    fused = capabilities.writes_views and _is_fused(shape, tensors[0], call)
    if fused or call.padding is not None or call.dropout_p or not is_one_problem(pattern, shape):
        return None
    if capabilities.max_batch is not None and tensors[0].shape[0] > capabilities.max_batch:
        return None
    if capabilities.max_extent is not None and any(extent(x) > capabilities.max_extent for x in tensors):
        return None
    return replace(call.options, causal=make_plan(pattern, shape).problems[0].causal)


def is_one_problem(pattern: DilatedPattern, shape: Shape) -> bool:
    """Whether the call is one dense problem of all queries, keys and heads."""
    if pattern.num_branches > 1:
        return False
    plan = make_plan(pattern, shape)
    problem = plan.problems[0] if len(plan.problems) == 1 and plan.covered else None
    if problem is None or problem.segments > 1 or problem.step > 1 or problem.zero_keys or problem.band is not None:
        return False
    return (problem.k_start, problem.k_start + problem.k_len) == shape.keys


def saved_elements_of_documents(pattern: DilatedPattern, shape: Shape, q: Tensor, call: Call) -> int:
    """Number of elements of per-branch outputs that a forward over packed documents saves; 0 where its backward recomputes them."""
    if pattern.num_branches == 1 or not runs_on_tiles(pattern, shape, q, call, False):
        return 0
    elements = num_places(pattern, shape) * q.shape[0] * q.shape[2] * q.shape[3]
    return elements if elements * q.element_size() <= saved_budget() else 0


def _buffers_of(branches: DilatedPattern, part: Shape, chunk: Chunk, onto: bool) -> BranchBuffers:
    """Returns the branch buffers of a chunk. With ``onto``, buffer 0 is the result so far, which covers every row."""
    if onto:
        branches = branches.with_branches(range(branches.num_branches), part.num_heads, onto_all=True)
    return make_branch_buffers(branches, part.num_heads, chunk.heads, part.queries[1], part.is_causal)


def _saved_buffers(pattern: DilatedPattern, shape: Shape) -> BranchBuffers:
    """Returns the buffers of the whole call without a direct branch, since the merge must not overwrite the output of any branch."""
    return replace(make_branch_buffers(pattern, shape.num_heads, (0, shape.num_heads), shape.queries[1], shape.is_causal), direct=None)


def _fused_backward(
    pattern: DilatedPattern, shape: Shape, tensors: Tensors, call: Call, dlse: Tensor | None, saved_branch_outputs: Tensor | None,
    into: Into | None = None,
) -> Tensors:  # fmt: skip
    dout, q, k, v, out, lse = tensors
    grads = tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    in_buffers = has_own_keys(pattern, shape) and (dlse is None or call.backend.capabilities.lse_grad)
    # decided for the whole pattern, since a tier may hold a single branch of several; a row of one branch mixes with nothing
    call = replace(call, detached=call.detached and not make_plan(pattern, shape).single)
    saved_buffers: list[Tensor | None] = []
    sizes = sizes_of(q, k)
    if saved_branch_outputs is not None and call.detached:
        saved_buffers = _saved_buffers(pattern, shape).split(saved_branch_outputs, q.shape[0], head_dim=q.shape[3], with_direct=True)

    def run_tier(branches: DilatedPattern, onto: bool) -> None:
        def run(chunk: Chunk, is_concurrent: bool) -> None:
            part = _shape_of(shape, chunk)
            dout_, q_, k_, v_, out_, lse_ = _narrow(shape, chunk, dout, q, k, v, out, lse.transpose(1, 2))
            dlse_ = None if dlse is None else _narrow(shape, chunk, dlse.transpose(1, 2))[0]
            grads_ = _narrow(shape, chunk, *grads)
            plan, part_call = make_plan(branches, part), _call_of(call, chunk)
            if in_buffers:
                # a row without keys must give its scores weight 0; exp(s − (+inf)) does that in every kernel
                lse_ = lse_.masked_fill(lse_ == -torch.inf, torch.inf)
                buffers = _buffers_of(branches, part, chunk, onto)
                own = _own_of(pattern, branches, shape, chunk, saved_buffers)
                views = dout_, q_, k_, v_, out_, lse_
                fused_merge.backward(plan, buffers, views, grads_, part_call, dlse_, is_concurrent=is_concurrent, onto=onto, own=own)
            else:
                for grad, share in zip(grads_, run_backward(plan, dout_, q_, k_, v_, out_, lse_, part_call, dlse_), strict=True):
                    grad.copy_(share)

        _in_chunks(backward_chunk_sizes(branches, sizes, in_buffers), shape, q.device, call, run)

    tiers = make_tiers(pattern, shape.num_heads, lambda tier: backward_chunk_sizes(tier, sizes)) if in_buffers else [pattern]
    for tier, branches in enumerate(tiers):
        run_tier(branches, onto=tier > 0)
    return grads if into is None else copied_into(grads, into)


def _own_of(
    pattern: DilatedPattern, branches: DilatedPattern, shape: Shape, chunk: Chunk, saved_branch_outputs: list[Tensor | None]
) -> list[Tensor] | None:
    """Selects the saved outputs of ``pattern`` for one chunk and some branches, which are matched by (w, r) and head offsets."""
    if not saved_branch_outputs:
        return None
    layer_of = dict(zip(zip(pattern.branches, pattern.offsets(shape.num_heads), strict=True), saved_branch_outputs, strict=True))
    own = []
    for (length, rate), offsets in zip(branches.branches, branches.offsets(shape.num_heads), strict=True):
        buffer = layer_of[(length, rate), offsets]
        assert buffer is not None
        own.append(buffer[:, chunk.positions[0] // length :, :, slice(*chunk.heads)])
    return own


def has_own_keys(pattern: DilatedPattern, shape: Shape) -> bool:
    """Whether no two problems of a branch contribute to the gradient of the same key, so that a branch buffer can hold it."""
    plan = make_plan(pattern, shape)
    return shape.num_heads == shape.num_kv_heads or (len(plan.problems) == 1 and plan.covered)


def saved_budget() -> int:
    """Limit in bytes of the per-branch outputs that a call saves for its backward: the budget of a chunk, whatever the inputs' size."""
    return chunking.transient_budget(0)


def is_fused(device_type: str, strategy: str = "auto") -> bool:
    """Whether branches run in chunks with one merge each. On a CPU a launch costs little, and merging each problem stays in the cache."""
    return device_type == "cuda" or strategy == "fused"


def _is_fused(shape: Shape, q: Tensor, call: Call) -> bool:
    """Whether the call is self-attention over a single document: each row of a branch is in one problem, which begins with its segment."""
    start, end = shape.queries
    whole = shape.queries == shape.keys and start == 0 and shape.documents == ((start, end),)
    if not whole or shape.window is not None or call.dropout_p or not is_fused(q.device.type, call.strategy):
        return False
    return q.device.type != "cuda" or has_kernels(q)


def _in_chunks(chunk_sizes: ChunkSizes, shape: Shape, device: torch.device, call: Call, run: Callable[[Chunk, bool], None]) -> None:
    pieces = list(chunk_sizes.chunks(shape.num_heads, shape.queries[1]))
    if len(pieces) == 1:
        run(pieces[0], False)
        return
    with Streams(device, min(chunk_sizes.concurrent, len(pieces)) if call.backend.capabilities.concurrent else 1) as streams:
        # on alternating streams, so that one stream's merge is issued while the other stream computes
        for index, chunk in enumerate(pieces):
            with streams.stream(index):
                run(chunk, True)


def _shape_of(shape: Shape, chunk: Chunk) -> Shape:
    if chunk.heads == (0, shape.num_heads) and chunk.positions == shape.queries:
        return shape
    positions = (0, chunk.positions[1] - chunk.positions[0])
    return replace(shape, queries=positions, keys=positions, documents=(positions,), heads=chunk.heads)


def _narrow(shape: Shape, chunk: Chunk, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Returns views of the chunk's positions and heads, or of the corresponding key/value heads where a tensor has only those."""
    positions = slice(*chunk.positions)
    return tuple(x[:, positions, slice(*(head * x.shape[2] // shape.num_heads for head in chunk.heads))] for x in tensors)


def _call_of(call: Call, chunk: Chunk) -> Call:
    return call if call.padding is None else replace(call, padding=call.padding[:, slice(*chunk.positions)])
