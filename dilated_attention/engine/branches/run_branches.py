"""The runner *branches*: self-attention over a whole sequence, in chunks. Every branch writes its results, then one kernel merges them.

Results wait for the merge at places in flat buffers (``places.py``). ``run_problems.py`` merges problem by problem and supports every call;
this runner covers the most common calls with the least memory traffic. Both run the same problems on the same backends.

Shape letters: B batch, N positions, H query heads, D head dim; of a launch P problems, L rows, G heads.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dilated_attention.backends.base import Options, Result, Views, accumulation_dtype, new_lse, placed
from dilated_attention.backends.hardware import Streams
from dilated_attention.backends.merge import zero_key_share
from dilated_attention.engine.branches import places
from dilated_attention.engine.branches.launches import (
    PART_BYTES,
    Launch,
    Masks,
    View,
    launches_of,
    masked,
    masks_of,
    narrowed,
    rows_of,
    without_padding,
)
from dilated_attention.engine.branches.places import Layout, Stage, layout_of, stages_of, view_of
from dilated_attention.engine.branches.problems import Problem, Problems, Range, problems_of, whole_shape
from dilated_attention.engine.branches.run_problems import kernel_sums, run_backward
from dilated_attention.engine.plan import Plan, Tensors, Terms

# given a problem, returns the view of its rows in a buffer; None if they are written into the result itself
BufferView = Callable[[Problem], View | None]
# number of launches that run concurrently where chunks run one by one
CONCURRENT_LAUNCHES = 3


class Part(NamedTuple):
    """A chunk of one stage: some heads × positions of a call, which run as a call on views.

    Args:
        heads, positions: the query heads [first, last) and positions [first, last) that it computes.
        problems: its dense problems, with positions counted from the chunk's first one.
        concurrent: number of chunks that run concurrently. If it is more than 1, the launches of each chunk run one by one.
    """

    stage: Stage
    heads: Range
    positions: Range
    problems: Problems
    concurrent: int

    def narrow(self, num_heads: int, *tensors: Tensor) -> Tensors:
        """Returns views of the chunk's heads and positions (``narrowed``)."""
        if self.heads == (0, num_heads) and self.positions == (0, tensors[0].shape[1]):
            return tensors
        return narrowed(tensors, num_heads, self.heads, positions=slice(*self.positions))


def forward(plan: Plan, q: Tensor, k: Tensor, v: Tensor, masks: Masks, saved: Tensor | None, into: Views | None = None) -> Result:
    """See ``Runner.forward``."""
    out, lse = q.new_empty(q.shape), new_lse(q)

    def run(part: Part) -> None:
        views = q, k, v, out, lse.transpose(1, 2)
        _forward(plan, part, part.narrow(q.shape[2], *views), _masks_of(masks, part), saved)

    _in_chunks(plan, q.device, run)
    return placed((out,), into)[0], lse


def backward(plan: Plan, tensors: Tensors, masks: Masks, dlse: Tensor | None, saved: Tensor | None, into: Views | None = None) -> Tensors:
    """See ``Runner.backward``."""
    dout, q, k, v, out, lse = tensors
    H = q.shape[2]
    grads = tuple([x.new_empty(x.shape) for x in (q, k, v)])
    at_places = has_own_keys(plan) and (dlse is None or plan.backend.capabilities.lse_grad)
    dlse_rows = () if dlse is None else (dlse.contiguous().transpose(1, 2),)

    def run(part: Part) -> None:
        dout_, q_, k_, v_, out_, lse_, *results = part.narrow(H, dout, q, k, v, out, lse.transpose(1, 2), *grads, *dlse_rows)
        # results: dq, dk and dv, which are written, then dlse if there is one
        inputs, part_masks = (dout_, q_, k_, v_, out_), _masks_of(masks, part)
        if at_places:
            # a row without keys must give its scores weight 0; exp(s − (+inf)) does that in every kernel
            _backward(plan, part, [*inputs, lse_.masked_fill(lse_ == -torch.inf, torch.inf), *results], part_masks, saved)
        else:
            computed = run_backward(plan, part.problems, (*inputs, lse_), part_masks, results[3] if dlse_rows else None)
            for grad, x in zip(results[:3], computed, strict=True):
                grad.copy_(x)

    _in_chunks(plan, q.device, run, at_places=at_places)
    return placed(grads, into)


def has_own_keys(plan: Plan) -> bool:
    """Whether no two problems of a branch contribute to the gradient of the same key, so that one place per branch can hold it."""
    problems = plan.problems
    return plan.shape.num_heads == plan.shape.num_kv_heads or (len(problems.problems) == 1 and problems.covered)


def _stages(plan: Plan, at_places: bool) -> tuple[Stage, ...]:
    """Returns the stages of a pass. ``at_places``: its results wait at places (see ``places.stages_of``)."""
    shape = plan.shape
    if plan.is_saved and at_places:
        # the saved outputs of all branches are one buffer for the whole call
        return (Stage(plan.pattern, shape.num_heads, shape.queries[1]),)
    return stages_of(plan.pattern, shape, plan.size, plan.is_backward, at_places)


def _in_chunks(plan: Plan, device: torch.device, run: Callable[[Part], None], *, at_places: bool = True) -> None:
    """Calls ``run`` with every chunk of a pass, stage by stage."""

    def make() -> list[list[Part]]:
        stages = []
        for stage in _stages(plan, at_places):
            chunks = list(stage.chunks(plan.shape.num_heads, plan.shape.queries[1]))
            stages.append([_part_of(plan, stage, *chunk, min(stage.concurrent, len(chunks))) for chunk in chunks])
        return stages

    for parts in plan.once(("parts", at_places), make):
        with Streams(device, parts[0].concurrent if plan.backend.capabilities.concurrent else 1) as streams:
            # on alternating streams, so that one chunk is merged while the next one is computed
            for index, part in enumerate(parts):
                with streams.stream(index):
                    run(part)


def _part_of(plan: Plan, stage: Stage, heads: Range, positions: Range, concurrent: int = 1) -> Part:
    """Returns a chunk. Its problems are those of a call on views of its heads and positions."""
    shape = plan.shape
    if heads != (0, shape.num_heads) or positions != shape.queries:
        whole = 0, positions[1] - positions[0]
        shape = shape._replace(queries=whole, keys=whole, documents=(whole,), heads=heads)
    problems = problems_of(stage.pattern, shape)
    if stage.merged is not None:
        # this branch only stands for the result of the earlier stages, and is not computed again. ``single`` and ``covered`` still count
        # it: there is a result to merge onto
        problems = problems._replace(problems=tuple([problem for problem in problems.problems if problem.branch != stage.merged]))
    return Part(stage, heads, positions, problems, concurrent)


def _layout(plan: Plan, part: Part, keeps_parts: bool = False, batch_size: int | None = None) -> Layout:
    """Returns the layout of the places where results of a chunk wait: those of all branches with ``keeps_parts``, else of all but the
    direct branch, which is written into the result itself. ``batch_size``: None for the plan's.

    Batch entries count as documents: a branch's segments follow those of the previous batch entry, so that one launch takes all of them.
    """
    B, H, (first, last) = plan.size[0] if batch_size is None else batch_size, plan.shape.num_heads, part.positions
    documents = tuple(itertools.pairwise(range(0, B * (last - first) + 1, last - first)))
    shape = whole_shape(H, H, documents[-1][1], False)._replace(documents=documents)
    return layout_of(part.stage.pattern, shape, keeps_parts, part.heads)


def _masks_of(masks: Masks, part: Part) -> Masks:
    """Returns the masks of a chunk's positions; this runner has padding only."""
    return masks if masks.padding is None else Masks(masks.padding[:, slice(*part.positions)])


def _forward(plan: Plan, part: Part, tensors: Sequence[Tensor], masks: Masks, saved: Tensor | None) -> None:
    """Computes out and lse of a chunk.

    Args:
        tensors: q, k, v, then out (B, N, H, D) and lse (B, N, H), which are written; views of any strides.
        saved: a buffer with places for all branches, which keeps the output of each one; None if the call saves none.
    """
    q, k, v, out, lse = tensors
    k, v = without_padding(k, v, masks.padding)
    H, D = q.shape[2:]
    all_tensors, is_merged = [q, k, v, out, lse], not part.problems.single or saved is not None
    in_buffers: dict[int, BufferView] = {}
    if is_merged:
        # if outputs are saved, no branch is direct, since the merge would overwrite its output
        layout = _layout(plan, part, saved is not None)
        size = H * layout.num_places
        buffers = q.new_empty(size * D) if saved is None else saved, lse.new_empty(size)
        all_tensors += buffers
        # out is tensor 3, lse tensor 4; their buffers are tensors 5 and 6
        in_buffers = {3: functools.partial(view_of, layout, 5, D), 4: functools.partial(view_of, layout, 6, 0)}
    elif not part.problems.covered:
        out.zero_()
        lse.fill_(-torch.inf)

    def run(launch: Launch, views: list[Tensor]) -> None:
        q_, k_, v_, out_, lse_, *mask_views = views
        results = out_, lse_.transpose(1, 2)
        placed(_launch_forward(plan, launch, q_, k_, v_, masked(launch, mask_views, masks, 0.0, 0), results), results)

    _on_streams(plan, part, "qkkqq", all_tensors, in_buffers, masks, run, is_split=not plan.backend.capabilities.writes_views)
    if is_merged:
        places.combine(layout, (out, lse), buffers)


def _backward(plan: Plan, part: Part, tensors: list[Tensor], masks: Masks, saved: Tensor | None) -> None:
    """Computes dq, dk and dv of a chunk of a call that ``has_own_keys``.

    Args:
        tensors: dout, q, k, v, out, lse, then dq, dk and dv, which are written, then dlse if there is one; views of any strides. lse and
            dlse are (B, N, H). lse is +inf for rows without keys.
        saved: the branches' own outputs from the forward; None if it saved none.
    """
    _, q, k, v, *_ = tensors
    tensors[2:4] = without_padding(k, v, masks.padding)
    H, D = q.shape[2:]
    grads, has_dlse = tensors[6:9], len(tensors) > 9
    # the output of a single problem is the merged output, so both gradients are the same
    is_detached = plan.settings.detached and not plan.problems.single
    buffers: list[Tensor] = []
    if not part.problems.single:
        layout = _layout(plan, part)
        buffers = [q.new_empty(H * layout.num_places * D) for _ in grads]
    elif not part.problems.covered:
        for grad in grads:
            grad.zero_()
    saved = saved if is_detached else None
    all_tensors = [*tensors, *buffers, *(() if saved is None else (saved,))]
    # dq, dk and dv are tensors 6 to 8; their buffers follow all tensors
    in_buffers: dict[int, BufferView] = {6 + i: functools.partial(view_of, layout, len(tensors) + i, D) for i in range(len(buffers))}
    if saved is not None:
        # instead of out, tensor 4, kernels read the saved output of their branch
        in_buffers[4] = functools.partial(view_of, _layout(plan, part, True), len(all_tensors) - 1, D)

    def run(launch: Launch, views: list[Tensor]) -> None:
        dout_, q_, k_, v_, out_, lse_, dq_, dk_, dv_, *mask_views = views
        dlse_ = mask_views.pop(0).transpose(1, 2) if has_dlse else None
        options = masked(launch, mask_views, masks, 0.0, 0)
        # the mixing weights count as constants, so δ = Σ dout·out of a branch takes that branch's output; its weights stay
        # exp(s − merged lse)
        if is_detached and saved is None:
            out_, _ = _launch_forward(plan, launch, q_, k_, v_, options)
        shares = plan.backend.backward(dout_, q_, k_, v_, out_, lse_.transpose(1, 2), options, dlse=dlse_, grads=(dq_, dk_, dv_))
        placed(shares, (dq_, dk_, dv_))

    _on_streams(plan, part, "qqkkqqqkk" + "q" * has_dlse, all_tensors, in_buffers, masks, run)
    if buffers:
        places.combine(layout, grads, buffers)


def _launch_forward(plan: Plan, launch: Launch, q: Tensor, k: Tensor, v: Tensor, options: Options, into: Views = (None, None)) -> Result:
    """Returns (out (P, L, G, D), lse (P, G, L)) of a launch alone, before any merge; its zero keys are included."""
    out, lse = plan.backend.forward(q, k, v, options, out=into)
    if zero_keys := launch.problem.zero_keys:
        out = out.mul_(zero_key_share(lse.transpose(1, 2), zero_keys)[..., None])
        lse = torch.logaddexp(lse, lse.new_full((), math.log(zero_keys)))
    return out, lse


def _on_streams(
    plan: Plan, part: Part, letters: str, tensors: list[Tensor], in_buffers: dict[int, BufferView], masks: Masks,
    run: Callable[[Launch, list[Tensor]], None], *, is_split: bool = True,
) -> None:  # fmt: skip
    """Calls ``run`` with each launch of a chunk's problems and that launch's views of the tensors.

    Problems are dealt out to the streams one by one, longest first, so that short problems fill the gaps that long ones leave.

    Args:
        letters: for each of the first tensors, "q" if its rows are those of queries, "k" if those of keys (``launches.rows_of``).
        in_buffers: by the index of a tensor, the function that returns the view of a problem's rows in a buffer instead.
        is_split: large problems are split into several launches, so that what a launch allocates stays small.
    """
    device, heads, positions = tensors[0].device, part.heads, part.positions
    tensors = tensors + masks_of(masks, 0.0, (0, 0), 0, device)

    def make() -> list[tuple[Launch, ...]]:
        rows = rows_of(letters, tensors, 0, masks, 0.0)
        for index, view in in_buffers.items():
            rows[index] = rows[index]._replace(place=view)
        part_bytes = PART_BYTES.get(device.type, PART_BYTES["cuda"]) if is_split else None
        all_launches = launches_of(part.problems.problems, rows, plan.backend.capabilities, part_bytes, plan.options)
        return sorted(all_launches, key=lambda launches: -launches[0].problem.pairs)

    # equal chunks have the same launches
    launches = plan.once((letters, tuple(in_buffers), part.stage.merged, heads, positions[1] - positions[0]), make)
    num_streams = 1 if part.concurrent > 1 or not plan.backend.capabilities.concurrent else min(CONCURRENT_LAUNCHES, len(launches))
    with Streams(device, num_streams) as streams:
        for stream in range(len(streams)):
            with streams.stream(stream):
                for problem_launches in launches[stream :: len(streams)]:
                    for launch in problem_launches:
                        run(launch, launch.of(tensors))


def terms(plan: Plan) -> Terms:
    """See ``Runner.terms``.

    A chunk's waiting results are freed as soon as its kernels are issued. So those of a chunk on another stream do not count: the allocator
    only holds their memory in reserve.
    """
    # e and a: bytes of an element, and of one in the accumulation dtype
    (B, D, e), shape = plan.size, plan.shape
    H, Hk, N, a = shape.num_heads, shape.num_kv_heads, shape.queries[1], accumulation_dtype(plan.dtype).itemsize
    own_keys, keeps_parts = not plan.is_backward or has_own_keys(plan), plan.is_saved and not plan.is_backward
    row_bytes = 3 * D * e if plan.is_backward else D * e * (not keeps_parts) + a

    def of_stage(stage: Stage) -> Terms:
        heads, positions = min(stage.heads, H), min(stage.positions, N)
        part = _part_of(plan, stage, (0, heads), (0, positions))
        is_merged = keeps_parts or not part.problems.single
        # each batch entry has as many places
        waiting = "parts", heads * B * _layout(plan, part, keeps_parts, 1).num_places * row_bytes * is_merged
        if not plan.is_backward:
            return [waiting]
        if not own_keys:
            fraction = heads * positions / (H * N)
            waiting = "dq, dk, dv of the chunks in float32", int(B * N * (H + 2 * Hk) * D * (a + e) * fraction)
        return [waiting, ("lse of the chunks", B * heads * positions * a), kernel_sums(plan, part.problems)]

    return max([of_stage(stage) for stage in _stages(plan, own_keys)], key=lambda terms: sum(size for _, size in terms))
