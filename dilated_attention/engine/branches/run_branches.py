"""Self-attention over a whole sequence in chunks with one merge each: every branch writes to its places, then one kernel merges.

``run_problems.py`` merges problem by problem and supports every call. This module covers the most common calls with the least memory
traffic. Both run the same problems on the same backends.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dilated_attention.backends.base import Options, Views, accumulation_dtype, placed
from dilated_attention.backends.hardware import Streams
from dilated_attention.backends.merge import zero_key_share
from dilated_attention.engine.branches import places
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
    narrowed,
    rows_of,
    without_padding,
)
from dilated_attention.engine.branches.places import ChunkSizes, Layout, chunk_sizes, layout_of, view_of
from dilated_attention.engine.branches.problems import Problem, Problems, Range, problems_of, whole_shape
from dilated_attention.engine.branches.run_problems import kernel_sums, run_backward
from dilated_attention.engine.plan import Plan, Tensors, Terms

Place = Callable[[Problem], View | None]
# number of launches that run concurrently where no other chunk runs
CONCURRENT_LAUNCHES = 3


class Part(NamedTuple):
    """A chunk: heads [first, last) and positions [first, last).

    Args:
        concurrent: number of chunks that run concurrently. Launches of a chunk beside another one run one by one.
    """

    heads: Range
    positions: Range
    problems: Problems
    concurrent: int

    def narrow(self, num_heads: int, *tensors: Tensor) -> Tensors:
        """See ``narrowed``."""
        if self.heads == (0, num_heads) and self.positions == (0, tensors[0].shape[1]):
            return tensors
        return narrowed(tensors, num_heads, self.heads, positions=slice(*self.positions))


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
    at_places = has_own_keys(plan) and (dlse is None or plan.backend.capabilities.lse_grad)
    some = () if dlse is None else (dlse.contiguous().transpose(1, 2),)

    def run(part: Part) -> None:
        *views, lse_ = part.narrow(H, dout, q, k, v, out, *grads, *some, lse.transpose(1, 2))
        part_masks = _masks_of(masks, part)
        if at_places:
            # a row without keys must give its scores weight 0; exp(s − (+inf)) does that in every kernel
            views.insert(5, lse_.masked_fill(lse_ == -torch.inf, torch.inf))
            _backward(plan, part, views, part_masks, saved)
        else:
            given = *views[:5], lse_
            shares = run_backward(plan, part.problems, given, part_masks, views[8] if some else None)
            for grad, share in zip(views[5:8], shares, strict=True):
                grad.copy_(share)

    _in_chunks(plan, q.device, run, at_places=at_places)
    return copied_into(grads, into)


def has_own_keys(plan: Plan) -> bool:
    """Whether no two problems of a branch contribute to the gradient of the same key, so that it has one place."""
    problems = plan.problems
    return plan.shape.num_heads == plan.shape.num_kv_heads or (len(problems.problems) == 1 and problems.covered)


def _chunk_sizes(plan: Plan, at_places: bool) -> ChunkSizes:
    shape = plan.shape
    if plan.is_saved and at_places:
        # saved outputs are those of all branches, in one part
        return ChunkSizes(shape.num_heads, shape.queries[1])
    return chunk_sizes(plan.pattern, shape, plan.size, plan.is_backward, at_places)


def _in_chunks(plan: Plan, device: torch.device, run: Callable[[Part], None], *, at_places: bool = True) -> None:
    def make() -> list[Part]:
        sizes = _chunk_sizes(plan, at_places)
        chunks = list(sizes.chunks(plan.shape.num_heads, plan.shape.queries[1]))
        return [_part_of(plan, *chunk, min(sizes.concurrent, len(chunks))) for chunk in chunks]

    parts = plan.once(("parts", at_places), make)
    with Streams(device, parts[0].concurrent if plan.backend.capabilities.concurrent else 1) as streams:
        # on alternating streams, so that one stream's merge is issued while the other stream computes
        for index, part in enumerate(parts):
            with streams.stream(index):
                run(part)


def _part_of(plan: Plan, heads: Range, positions: Range, concurrent: int = 1) -> Part:
    shape = plan.shape
    if heads != (0, shape.num_heads) or positions != shape.queries:
        whole = 0, positions[1] - positions[0]
        shape = shape._replace(queries=whole, keys=whole, documents=(whole,), heads=heads)
    return Part(heads, positions, problems_of(plan.pattern, shape), concurrent)


def _layout(plan: Plan, part: Part, keeps_parts: bool = False) -> Layout:
    """Returns where results of a chunk wait. Its batch entries are documents: a branch's segments follow those of the entry before, so that
    one launch takes all of them."""
    (B, _, _), H, (first, last) = plan.size, plan.shape.num_heads, part.positions
    documents = tuple(itertools.pairwise(range(0, B * (last - first) + 1, last - first)))
    shape = whole_shape(H, H, documents[-1][1], False)._replace(documents=documents)
    return layout_of(plan.pattern, shape, keeps_parts, part.heads)


def _masks_of(masks: Masks, part: Part) -> Masks:
    return masks if masks.padding is None else Masks(masks.padding[:, slice(*part.positions)])


def _forward(plan: Plan, part: Part, tensors: Sequence[Tensor], masks: Masks, saved: Tensor | None) -> None:
    """Writes out (B, N, H, D) and lse (B, N, H), any views, the last of ``tensors``, after q, k and v.

    Args:
        saved: the places of all branches, none of them direct, which keep the separate output of each branch.
    """
    q, k, v, out, lse = tensors
    k, v = without_padding(k, v, masks.padding)
    H, D = q.shape[2:]
    given, merged = [q, k, v, out, lse], not part.problems.single or saved is not None
    elsewhere: dict[int, Place] = {}
    if merged:
        # the merge must not overwrite the saved output of any branch
        layout = _layout(plan, part, saved is not None)
        size = H * layout.num_places
        waiting = q.new_empty(size * D) if saved is None else saved, lse.new_empty(size)
        given += waiting
        elsewhere = {3: functools.partial(view_of, layout, 5, D), 4: functools.partial(view_of, layout, 6, 0)}
    elif not part.problems.covered:
        out.zero_()
        lse.fill_(-torch.inf)

    def run(launch: Launch, views: list[Tensor]) -> None:
        q_, k_, v_, out_, lse_, *mask_views = views
        results = out_, lse_.transpose(1, 2)
        placed(_computed(plan, launch, q_, k_, v_, masked(launch, mask_views, masks, 0.0, 0), results), results)

    _on_streams(plan, part, "qkkqq", given, elsewhere, masks, run, whole=plan.backend.capabilities.writes_views)
    if merged:
        places.combine(layout, (out, lse), waiting)


def _backward(plan: Plan, part: Part, tensors: list[Tensor], masks: Masks, saved: Tensor | None) -> None:
    """Writes dq, dk, dv (B, N, H, D), any views, which ``tensors`` holds after dout, q, k, v, out and lse, and before dlse if there is one.

    Every query head must have its own key/value head, unless there is a single problem that covers everything. lse (B, N, H) is +inf for
    rows without keys.
    """
    _, q, k, v, *_ = tensors
    tensors[2:4] = without_padding(k, v, masks.padding)
    H, D = q.shape[2:]
    grads, has_dlse = tensors[6:9], len(tensors) > 9
    # a row of one branch mixes with nothing
    detached = plan.settings.detached and not part.problems.single
    waiting: list[Tensor] = []
    if not part.problems.single:
        layout = _layout(plan, part)
        waiting = [q.new_empty(H * layout.num_places * D) for _ in grads]
    elif not part.problems.covered:
        for grad in grads:
            grad.zero_()
    saved = saved if detached else None
    given = [*tensors, *waiting, *(() if saved is None else (saved,))]
    elsewhere: dict[int, Place] = {6 + i: functools.partial(view_of, layout, len(tensors) + i, D) for i in range(len(waiting))}
    if saved is not None:
        elsewhere[4] = functools.partial(view_of, _layout(plan, part, True), len(given) - 1, D)

    def run(launch: Launch, views: list[Tensor]) -> None:
        dout_, q_, k_, v_, out_, lse_, dq_, dk_, dv_, *mask_views = views
        dlse_ = mask_views.pop(0).transpose(1, 2) if has_dlse else None
        options = masked(launch, mask_views, masks, 0.0, 0)
        # the mixing weights are constants, so a branch's δ comes from its own output; its softmax weights stay exp(s − merged lse)
        if detached and saved is None:
            out_, _ = _computed(plan, launch, q_, k_, v_, options)
        shares = plan.backend.backward(dout_, q_, k_, v_, out_, lse_.transpose(1, 2), options, dlse=dlse_, grads=(dq_, dk_, dv_))
        placed(shares, (dq_, dk_, dv_))

    _on_streams(plan, part, "qqkkqqqkk" + "q" * has_dlse, given, elsewhere, masks, run)
    if waiting:
        places.combine(layout, grads, waiting)


def _computed(
    plan: Plan, launch: Launch, q: Tensor, k: Tensor, v: Tensor, options: Options, into: Views = (None, None)
) -> tuple[Tensor, Tensor]:
    """Returns a launch's (out (P, L, G, D), lse (P, G, L)), before any merge, with its zero keys."""
    out, lse = plan.backend.forward(q, k, v, options, out=into)
    if zero_keys := launch.problem.zero_keys:
        out = out.mul_(zero_key_share(lse.transpose(1, 2), zero_keys)[..., None])
        lse = torch.logaddexp(lse, lse.new_full((), math.log(zero_keys)))
    return out, lse


def _on_streams(
    plan: Plan, part: Part, letters: str, tensors: list[Tensor], elsewhere: dict[int, Place], masks: Masks,
    run: Callable[[Launch, list[Tensor]], None], *, whole: bool = False,
) -> None:  # fmt: skip
    """Deals the problems out to the streams one by one, longest first, so that short problems fill the gaps that long ones leave.

    Args:
        letters: rows of queries and keys (``launches.rows_of``) of the first tensors.
        elsewhere: where rows of a tensor are instead, by its index (``view_of``).
        whole: a launch allocates nothing in addition to its results.
    """
    device, heads, positions = tensors[0].device, part.heads, part.positions
    tensors = tensors + masks_of(masks, 0.0, (0, 0), 0, device)

    def make() -> list[tuple[Launch, ...]]:
        rows = rows_of(letters, tensors, 0, masks.padding is not None, False)
        for index, place in elsewhere.items():
            rows[index] = rows[index]._replace(place=place)
        part_bytes = None if whole else PART_BYTES.get(device.type, PART_BYTES["cuda"])
        of_problems = launches_of(part.problems.problems, rows, plan.backend.capabilities, part_bytes, plan.options)
        return sorted(of_problems, key=lambda launches: -launches[0].problem.pairs)

    # equal chunks have the same launches
    launches = plan.once((letters, tuple(elsewhere), heads, positions[1] - positions[0]), make)
    count = 1 if part.concurrent > 1 or not plan.backend.capabilities.concurrent else min(CONCURRENT_LAUNCHES, len(launches))
    with Streams(device, count) as streams:
        for stream in range(len(streams)):
            with streams.stream(stream):
                for of_problem in launches[stream :: len(streams)]:
                    for launch in of_problem:
                        run(launch, launch.of(tensors))


def terms(plan: Plan) -> Terms:
    """See ``Runner.terms``. Results that wait are freed as soon as a chunk's kernels are issued, so those of the chunk on the other stream
    are in the allocator's reserve."""
    (B, D, e), shape = plan.size, plan.shape
    H, Hk, N, a = shape.num_heads, shape.num_kv_heads, shape.queries[1], accumulation_dtype(plan.dtype).itemsize
    own_keys = not plan.is_backward or has_own_keys(plan)
    sizes, keeps_parts = _chunk_sizes(plan, own_keys), plan.is_saved and not plan.is_backward
    heads, positions = min(sizes.heads, H), min(sizes.positions, N)
    part = _part_of(plan, (0, heads), (0, positions))
    row_bytes = 3 * D * e if plan.is_backward else D * e * (not keeps_parts) + a
    is_merged = keeps_parts or not plan.problems.single
    waiting = "parts", heads * _layout(plan, part, keeps_parts).num_places * row_bytes * is_merged
    if not plan.is_backward:
        return [waiting]
    if not own_keys:
        share = heads * positions / (H * N)
        waiting = "dq, dk, dv of the chunks in float32", int(B * N * (H + 2 * Hk) * D * (a + e) * share)
    return [waiting, ("lse of the chunks", B * heads * positions * a), kernel_sums(plan, part.problems)]
