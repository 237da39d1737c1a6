"""Self-attention over a whole sequence in chunks with one merge each: every branch writes into its buffer, then one kernel merges.

``run_problems.py`` merges problem by problem and supports every call. This module covers the most common calls with the least memory
traffic. Both run the same problems on the same backends.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from dilated_attention.backends.base import Options, accumulation_dtype, placed
from dilated_attention.backends.merge import zero_key_share
from dilated_attention.backends.streams import Streams
from dilated_attention.engine.branches.branch_buffers import BranchBuffers, make_branch_buffers
from dilated_attention.engine.branches.chunking import (
    CONCURRENT_CHUNKS,
    CallSizes,
    Chunk,
    ChunkSizes,
    backward_chunk_sizes,
    forward_chunk_sizes,
    make_tiers,
)
from dilated_attention.engine.branches.launches import (
    PART_BYTES,
    Into,
    Launch,
    Masks,
    View,
    copied_into,
    launches_of,
    masked,
    masks_of,
    rows_of,
    without_padding,
)
from dilated_attention.engine.branches.problems import Problem, Problems, Shape, problems_of
from dilated_attention.engine.branches.run_problems import kernel_sums, run_backward
from dilated_attention.engine.plan import Plan, Tensors, Terms
from dilated_attention.pattern import DilatedPattern

Place = Callable[[Problem], View | None]
# number of launches that run concurrently where no other chunk runs
CONCURRENT_LAUNCHES = 3


class Part(NamedTuple):
    """Some branches of a chunk, which run in one go.

    Args:
        buffers: with ``onto``, buffer 0 is the result so far, which covers every row: the branches are then the buffers from 1 on.
        is_concurrent: another chunk runs concurrently, so launches run one by one and the merge uses only a small part of the GPU.
    """

    chunk: Chunk
    problems: Problems
    buffers: BranchBuffers
    onto: bool
    is_concurrent: bool

    def narrow(self, num_heads: int, *tensors: Tensor) -> Tensors:
        """Returns views of its positions and heads, or of the corresponding key/value heads where a tensor has only those."""
        heads, positions = self.chunk
        if heads == (0, num_heads) and positions == (0, tensors[0].shape[1]):
            return tensors
        return tuple([x[:, slice(*positions), slice(*[head * x.shape[2] // num_heads for head in heads])] for x in tensors])


def forward(
    plan: Plan, q: Tensor, k: Tensor, v: Tensor, masks: Masks, saved: Tensor | None, into: Into | None = None
) -> tuple[Tensor, Tensor]:
    B, N, H, _ = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty((B, H, N), dtype=accumulation_dtype(q.dtype), device=q.device)

    def run(part: Part) -> None:
        views = q, k, v, out, lse.transpose(1, 2)
        _forward(plan, part, part.narrow(H, *views), _masks_of(masks, part), saved)

    _in_chunks(plan, q.device, run)
    return copied_into((out,), into)[0], lse


def backward(plan: Plan, tensors: Tensors, masks: Masks, dlse: Tensor | None, saved: Tensor | None, into: Into | None = None) -> Tensors:
    dout, q, k, v, out, lse = tensors
    H = q.shape[2]
    grads = tuple([torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v)])
    in_buffers = has_own_keys(plan) and (dlse is None or plan.backend.capabilities.lse_grad)
    some = () if dlse is None else (dlse.contiguous().transpose(1, 2),)

    def run(part: Part) -> None:
        *views, lse_ = part.narrow(H, dout, q, k, v, out, *grads, *some, lse.transpose(1, 2))
        part_masks = _masks_of(masks, part)
        if in_buffers:
            # a row without keys must give its scores weight 0; exp(s − (+inf)) does that in every kernel
            views.insert(5, lse_.masked_fill(lse_ == -torch.inf, torch.inf))
            _backward(plan, part, views, part_masks, saved)
        else:
            given = *views[:5], lse_
            shares = run_backward(plan, part.problems, given, part_masks, views[8] if some else None)
            for grad, share in zip(views[5:8], shares, strict=True):
                grad.copy_(share)

    _in_chunks(plan, q.device, run, in_buffers=in_buffers)
    return copied_into(grads, into)


def has_own_keys(plan: Plan) -> bool:
    """Whether no two problems of a branch contribute to the gradient of the same key, so that a branch buffer can hold it."""
    problems = plan.problems
    return plan.shape.num_heads == plan.shape.num_kv_heads or (len(problems.problems) == 1 and problems.covered)


def _tiers(plan: Plan, in_buffers: bool) -> list[tuple[DilatedPattern, ChunkSizes]]:
    """Returns the branches that run after one another, and their chunks."""
    (B, D, e), shape = plan.size, plan.shape
    if plan.is_saved and in_buffers:
        # saved outputs are those of all branches, in one part
        return [(plan.pattern, ChunkSizes(shape.num_heads, shape.queries[1], 1, True))]
    sizes = CallSizes(B, shape.queries[1], shape.num_heads, shape.num_kv_heads, D, e)
    cut = functools.partial(backward_chunk_sizes, in_buffers=in_buffers) if plan.is_backward else forward_chunk_sizes
    tiers = make_tiers(plan.pattern, shape.num_heads, lambda tier: cut(tier, sizes)) if in_buffers else [plan.pattern]
    return [(tier, cut(tier, sizes)) for tier in tiers]


def _in_chunks(plan: Plan, device: torch.device, run: Callable[[Part], None], *, in_buffers: bool = True) -> None:
    shape, concurrent = plan.shape, plan.backend.capabilities.concurrent

    def make() -> list[list[Part]]:
        tiers = [(pattern, list(sizes.chunks(shape.num_heads, shape.queries[1]))) for pattern, sizes in _tiers(plan, in_buffers)]
        return [[_part_of(pattern, shape, c, tier > 0, len(cut) > 1) for c in cut] for tier, (pattern, cut) in enumerate(tiers)]

    for parts in plan.once(("parts", in_buffers), make):
        with Streams(device, min(CONCURRENT_CHUNKS, len(parts)) if concurrent else 1) as streams:
            # on alternating streams, so that one stream's merge is issued while the other stream computes
            for index, part in enumerate(parts):
                with streams.stream(index):
                    run(part)


def _part_of(pattern: DilatedPattern, shape: Shape, chunk: Chunk, onto: bool, is_concurrent: bool) -> Part:
    positions, H = chunk.positions[1] - chunk.positions[0], shape.num_heads
    if chunk.heads != (0, H) or chunk.positions != shape.queries:
        whole = 0, positions
        shape = shape._replace(queries=whole, keys=whole, documents=(whole,), heads=chunk.heads)
    everything = pattern.with_branches(range(pattern.num_branches), H, onto_all=True) if onto else pattern
    buffers = make_branch_buffers(everything, H, chunk.heads, positions, shape.is_causal)
    return Part(chunk, problems_of(pattern, shape), buffers, onto, is_concurrent)


def _masks_of(masks: Masks, part: Part) -> Masks:
    return masks if masks.padding is None else Masks(masks.padding[:, slice(*part.chunk.positions)])


def _forward(plan: Plan, part: Part, tensors: Sequence[Tensor], masks: Masks, saved: Tensor | None) -> None:
    """Writes out (B, N, H, D) and lse (B, N, H), any views, the last of ``tensors``, after q, k and v.

    Args:
        saved: flat buffer of all branches, none of them direct. It is left holding the separate output of each branch.
    """
    q, k, v, out, lse = tensors
    k, v = without_padding(k, v, masks.padding)
    B, _, H, D = q.shape
    problems, buffers, onto = part.problems, part.buffers, part.onto
    if saved is not None:
        # no branch is direct, since the merge must not overwrite the output of any
        buffers = replace(buffers, direct=None)
    given = [q, k, v, out, lse]
    merged = not problems.single or buffers.zero_keys or onto or saved is not None
    if merged:
        flat = saved if saved is not None else q.new_empty(B * H * D * buffers.rows(with_direct=False))
        flat_lse = torch.empty(B * H * buffers.rows(with_direct=True), dtype=lse.dtype, device=q.device)
        given += [flat, flat_lse]
    elif not problems.covered:
        out.zero_()
        lse.fill_(-torch.inf)
    if onto:
        # buffer 0 is one segment of all positions
        flat_lse[: lse.numel()].view(B, H, -1).copy_(lse.transpose(1, 2))

    def run(launch: Launch, views: list[Tensor]) -> None:
        q_, k_, v_, out_, lse_, *mask_views = views
        results = out_, lse_.transpose(1, 2)
        placed(plan.backend.forward(q_, k_, v_, masked(launch, mask_views, masks, 0.0, 0), out=results), results)

    view = functools.partial(buffers.view, batch=B, first=int(onto))
    places: dict[int, Place] = (
        {3: functools.partial(view, index=5, head_dim=D), 4: functools.partial(view, index=6, with_direct=True)} if merged else {}
    )
    _on_streams(plan, part, "qkkqq", given, places, masks, run, whole=plan.backend.capabilities.writes_views)
    if merged:
        from dilated_attention.engine.branches import merge_triton

        merge_triton.merge_buffers(buffers, out, lse, flat, flat_lse, is_concurrent=part.is_concurrent, own=saved is not None)


def _backward(plan: Plan, part: Part, tensors: list[Tensor], masks: Masks, saved: Tensor | None) -> None:
    """Writes dq, dk, dv (B, N, H, D), any views, which ``tensors`` holds after dout, q, k, v, out and lse, and before dlse if there is one.

    Every query head must have its own key/value head, unless there is a single problem that covers everything. lse (B, N, H) is +inf for
    rows without keys.
    """
    _, q, k, v, *_ = tensors
    tensors[2:4] = without_padding(k, v, masks.padding)
    (B, _, H, D), buffers = q.shape, part.buffers
    grads, has_dlse = tensors[6:9], len(tensors) > 9
    # decided for the whole pattern, since a tier may hold a single branch of several; a row of one branch mixes with nothing
    detached = plan.settings.detached and not plan.problems.single
    flats: list[Tensor] = []
    if part.onto or not part.problems.single:
        flats = [torch.empty(B * H * D * buffers.rows(with_direct=False), dtype=q.dtype, device=q.device) for _ in grads]
    elif not part.problems.covered:
        for grad in grads:
            grad.zero_()
    saved = saved if detached else None
    given = [*tensors, *flats, *(() if saved is None else (saved,))]
    view = functools.partial(buffers.view, batch=B, head_dim=D, first=int(part.onto))
    places: dict[int, Place] = {6 + i: functools.partial(view, index=len(tensors) + i) for i in range(len(flats))}
    if saved is not None:
        places[4] = functools.partial(buffers.view, index=len(given) - 1, batch=B, head_dim=D, with_direct=True)

    def run(launch: Launch, views: list[Tensor]) -> None:
        dout_, q_, k_, v_, out_, lse_, dq_, dk_, dv_, *mask_views = views
        dlse_ = mask_views.pop(0).transpose(1, 2) if has_dlse else None
        options = masked(launch, mask_views, masks, 0.0, 0)
        # the mixing weights are constants, so a branch's δ comes from its own output; its softmax weights stay exp(s − merged lse)
        if detached and saved is None:
            out_ = _own_output(plan, q_, k_, v_, options, launch.problem.zero_keys)
        shares = plan.backend.backward(dout_, q_, k_, v_, out_, lse_.transpose(1, 2), options, dlse=dlse_, grads=(dq_, dk_, dv_))
        placed(shares, (dq_, dk_, dv_))

    _on_streams(plan, part, "qqkkqqqkk" + "q" * has_dlse, given, places, masks, run)
    if flats:
        from dilated_attention.engine.branches import merge_triton

        merge_triton.sum_buffers(buffers, grads, flats, is_concurrent=part.is_concurrent)


def _own_output(plan: Plan, q: Tensor, k: Tensor, v: Tensor, options: Options, zero_keys: int) -> Tensor:
    """Computes a launch's own output (P, L, G, D), before any merge."""
    out, lse = plan.backend.forward(q, k, v, options)
    return out.mul_(zero_key_share(lse.transpose(1, 2), zero_keys)[..., None]) if zero_keys else out


def _on_streams(
    plan: Plan, part: Part, letters: str, tensors: list[Tensor], places: dict[int, Place], masks: Masks,
    run: Callable[[Launch, list[Tensor]], None], *, whole: bool = False,
) -> None:  # fmt: skip
    """Deals the problems out to the streams one by one, longest first, so that short problems fill the gaps that long ones leave.

    Args:
        letters: rows of queries and keys (``launches.rows_of``) of the first tensors.
        places: where rows of a tensor are instead, by its index (``BranchBuffers.view``).
        whole: a launch allocates nothing in addition to its results.
    """
    device, (heads, positions) = tensors[0].device, part.chunk
    tensors = tensors + masks_of(masks, 0.0, (0, 0), 0, device)

    def make() -> list[tuple[Launch, ...]]:
        rows = rows_of(letters, tensors, 0, masks.padding is not None, False)
        for index, place in places.items():
            rows[index] = rows[index]._replace(place=place)
        part_bytes = None if whole else PART_BYTES.get(device.type, PART_BYTES["cuda"])
        of_problems = launches_of(part.problems.problems, rows, plan.backend.capabilities, part_bytes, plan.options)
        return sorted(of_problems, key=lambda launches: -launches[0].problem.pairs)

    # equal chunks have the same launches
    launches = plan.once((letters, tuple(places), heads, positions[1] - positions[0], part.onto), make)
    count = 1 if part.is_concurrent or not plan.backend.capabilities.concurrent else min(CONCURRENT_LAUNCHES, len(launches))
    with Streams(device, count) as streams:
        for stream in range(len(streams)):
            with streams.stream(stream):
                for of_problem in launches[stream :: len(streams)]:
                    for launch in of_problem:
                        run(launch, launch.of(tensors))


def terms(plan: Plan) -> Terms:
    """See ``Runner.terms``. Buffers are freed as soon as a chunk's kernels are issued, so those of the chunk on the other stream are in the
    allocator's reserve."""
    (B, D, e), shape = plan.size, plan.shape
    H, Hk, N, a = shape.num_heads, shape.num_kv_heads, shape.queries[1], accumulation_dtype(plan.dtype).itemsize
    own_keys = not plan.is_backward or has_own_keys(plan)
    tiers = _tiers(plan, own_keys)
    row_bytes, lse_bytes = (3 * D * e, 0) if plan.is_backward else (D * e, a)

    def buffer_bytes(pattern: DilatedPattern, sizes: ChunkSizes) -> int:
        buffers = make_branch_buffers(pattern, H, (0, min(sizes.heads, H)), min(sizes.positions, N), shape.is_causal)
        rows = buffers.rows(with_direct=False) * row_bytes + buffers.rows(with_direct=True) * lse_bytes
        return B * buffers.heads * rows

    is_merged = not plan.problems.single or (plan.pattern.tail == "zero_keys" and not shape.is_causal)
    parts = max([buffer_bytes(*tier) for tier in tiers]) if is_merged else 0
    if not plan.is_backward:
        return [("parts", parts)]
    sizes = backward_chunk_sizes(plan.pattern, CallSizes(B, N, H, Hk, D, e), own_keys)
    found: Terms = [("parts", parts)]
    if not own_keys:
        share = sizes.heads * sizes.positions / (H * N)
        found = [("dq, dk, dv of the chunks in float32", int(B * N * (H + 2 * Hk) * D * (a + e) * share))]
    found.append(("lse of the chunks", B * sizes.heads * sizes.positions * a))
    part = _part_of(plan.pattern, shape, Chunk((0, min(sizes.heads, H)), (0, min(sizes.positions, N))), False, False)
    return [*found, kernel_sums(plan, part.problems)]
