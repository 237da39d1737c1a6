"""Self-attention over a whole sequence with one merge at the end: every branch writes its results into a layer, then one kernel merges.

``sequential.py`` merges problem by problem and supports every call. This module covers the most common calls with the least memory traffic.
Both run the same Plan on the same backends.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence

import torch

from dilated_attention.backends.base import Mask, Options, accumulation_dtype
from dilated_attention.engine.branches import branch_buffers as torch_merge
from dilated_attention.engine.branches.branch_buffers import Layers, of_problem
from dilated_attention.engine.branches.launch_views import Geometry, Limits, make_geometry
from dilated_attention.engine.branches.merge import zero_key_share
from dilated_attention.engine.branches.plan import Plan, Problem
from dilated_attention.engine.branches.sequential import Call, launches_of, max_rows, without_padding
from dilated_attention.engine.branches.streams import Lanes
from dilated_attention.engine.branches.views import key_rows, query_rows

Tensors = tuple[torch.Tensor, ...]
# number of launches that run concurrently where no other chunk runs
LAUNCH_LANES = 3


def forward(
    plan: Plan,
    layers: Layers,
    tensors: Tensors,
    results: tuple[torch.Tensor, torch.Tensor],
    call: Call,
    *,
    beside: bool = False,
    direct: Callable[[torch.Tensor], None] | None = None,
    kept: torch.Tensor | None = None,
) -> None:
    """Writes out (B, N, H, D) and lse (B, N, H), any views. ``tensors`` are q, k, v of the heads and positions of ``layers``.

    Args:
        beside: another chunk runs concurrently, so launches run one by one and the merge uses only a small part of the GPU.
        direct: computes layer 0, which covers every row, into ``out`` and into the lse (B, H, N) passed to it. The plan's branches
            are then the layers from 1 on.
        kept: flat buffer of all layers, none of them direct. It is left holding the separate output of each branch.
    """
    q, k, v = tensors
    out, lse = results
    k, v = without_padding(k, v, call.padding)
    B, _, H, D = q.shape
    merged = not plan.single or layers.zero_keys or direct is not None or kept is not None
    first = 0 if direct is None else 1
    parts: list[torch.Tensor | None] = [None] * len(layers.branches)
    part_lses = parts
    if merged:
        flat = kept if kept is not None else q.new_empty(B * H * D * layers.rows(with_direct=False))
        flat_lse = torch.empty(B * H * layers.rows(with_direct=True), dtype=accumulation_dtype(q.dtype), device=q.device)
        parts = layers.split(flat, B, head_dim=D, with_direct=False)
        part_lses = layers.split(flat_lse, B, head_dim=0, with_direct=True)
    elif not plan.covered:
        out.zero_()
        lse.fill_(-torch.inf)

    if direct is not None:
        direct_lse = part_lses[0]
        assert direct_lse is not None
        direct(direct_lse[:, 0])

    def run(problem: Problem) -> None:
        part, part_lse = parts[first + problem.branch], part_lses[first + problem.branch]
        tensors = [(_QUERIES, q), (_KEYS, k), (_KEYS, v)]
        tensors.append((_QUERIES, out) if part is None else (_LAYER, part))
        tensors.append((_QUERIES, lse) if part_lse is None else (_LSE_LAYER, part_lse))
        for (q_, k_, v_, out_, lse_), options in _launches(problem, tensors, call, k.shape[:2], call.backend.facts.writes_views):
            call.backend.forward_into(q_, k_, v_, options, out_, lse_.transpose(1, 2))

    _in_lanes(plan, run, q.device, 1 if beside or not call.backend.facts.concurrent else LAUNCH_LANES)
    if merged and q.device.type == "cuda":
        from dilated_attention.engine.branches import merge_triton

        merge_triton.merge_layers(layers, out, lse, flat, flat_lse, aside=beside, own=kept is not None)
    elif merged:
        lses = [x for x in part_lses if x is not None]
        torch_merge.merge_layers(layers, out, lse, parts, lses)
        if kept is not None and layers.zero_keys:
            torch_merge.count_zero_keys(layers, [x for x in parts if x is not None], lses)


def backward(
    plan: Plan,
    layers: Layers,
    tensors: Tensors,
    grads: Tensors,
    call: Call,
    dlse: torch.Tensor | None,
    *,
    beside: bool = False,
    onto: bool = False,
    own: Sequence[torch.Tensor] | None = None,
) -> None:
    """Writes dq, dk, dv (B, N, H, D), any views. ``tensors``: dout, q, k, v, out and lse (B, N, H), +inf for rows without keys.

    Every query head must have its own key/value head, unless the plan is a single problem that covers everything.

    Args:
        beside: as in ``forward``.
        onto: layer 0 is what the gradients already hold. The plan's branches are then the layers from 1 on.
        own: with detached mixing, the separate output of each branch as the forward kept it, (B, S, L, H, D). If None, it is recomputed.
    """
    dout, q, k, v, out, lse = tensors
    k, v = without_padding(k, v, call.padding)
    B, _, H, D = q.shape
    layer_views: list[list[torch.Tensor | None]] = [[None] * len(layers.branches)] * 3
    summed = onto or not plan.single
    first = 1 if onto else 0
    if summed:
        flats = [torch.empty(B * H * D * layers.rows(with_direct=False), dtype=q.dtype, device=q.device) for _ in grads]
        layer_views = [layers.split(flat, B, head_dim=D, with_direct=False) for flat in flats]
    elif not plan.covered:
        for grad in grads:
            grad.zero_()

    def run(problem: Problem) -> None:
        # the mixing weights are constants, so a branch's δ comes from its own output; its softmax weights stay exp(s − merged lse)
        output = (_QUERIES, out) if own is None else (_LAYER, own[problem.branch])
        tensors = [(_QUERIES, dout), (_QUERIES, q), (_KEYS, k), (_KEYS, v), output, (_QUERIES, lse)]
        for grad, which, layer in zip(grads, (_QUERIES, _KEYS, _KEYS), layer_views, strict=True):
            part = layer[first + problem.branch]
            tensors.append((which, grad) if part is None else (_LAYER, part))
        if dlse is not None:
            tensors.append((_QUERIES, dlse))
        for (dout_, q_, k_, v_, out_, lse_, dq_, dk_, dv_, *rest), options in _launches(problem, tensors, call, k.shape[:2], False):
            dlse_ = rest[0].transpose(1, 2) if rest else None
            if call.detached and own is None:
                out_ = _own_output(problem, q_, k_, v_, options, call)
            call.backend.backward_into(dout_, q_, k_, v_, out_, lse_.transpose(1, 2), options, (dq_, dk_, dv_), dlse_)

    _in_lanes(plan, run, q.device, 1 if beside or not call.backend.facts.concurrent else LAUNCH_LANES)
    if summed and q.device.type == "cuda":
        from dilated_attention.engine.branches import merge_triton

        merge_triton.sum_layers(layers, grads, flats, aside=beside)
    elif summed:
        for grad, layer in zip(grads, layer_views, strict=True):
            torch_merge.sum_layers(layers, grad, layer)


def _own_output(problem: Problem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options, call: Call) -> torch.Tensor:
    """Computes a launch's own output (P, L, G, D), before any merge."""
    out, lse = call.backend.forward(q, k, v, options)
    return out.mul_(zero_key_share(lse.transpose(1, 2), problem.zero_keys)[..., None]) if problem.zero_keys else out


def _in_lanes(plan: Plan, run: Callable[[Problem], None], device: torch.device, count: int) -> None:
    """Deals the problems out to the lanes one by one, longest first, so that short problems fill the gaps that long ones leave."""
    problems = sorted(plan.problems, key=lambda problem: -problem.pairs)
    if count == 1 or len(problems) == 1:
        for problem in problems:
            run(problem)
        return
    with Lanes(device, min(count, len(problems))) as lanes:
        for lane in range(len(lanes)):
            with lanes.lane(lane):
                for problem in problems[lane :: len(lanes)]:
                    run(problem)


# which rows of a tensor a problem reads or writes
_QUERIES, _KEYS, _LAYER, _LSE_LAYER = range(4)


_NO_MASK = Mask()


def _rows(problem: Problem, which: int, x: torch.Tensor) -> torch.Tensor:
    """Returns a view (B, S, L, G, …)."""
    if which == _LAYER:
        return of_problem(problem, x)
    if which == _LSE_LAYER:
        return of_problem(problem, x).transpose(2, 3)
    return (query_rows if which == _QUERIES else key_rows)(problem, 0).of(x)


def _launches(
    problem: Problem, tensors: list[tuple[int, torch.Tensor]], call: Call, batch_and_keys: torch.Size, whole: bool
) -> Iterator[tuple[list[torch.Tensor], Options]]:
    """Yields the problem's launches: a view of every tensor, and the options."""
    if call.padding is not None:
        # every launch needs its own slice of the mask
        yield from launches_of(problem, [_rows(problem, which, x) for which, x in tensors], call, batch_and_keys, whole=whole)
        return
    facts = call.backend.facts
    q = tensors[0][1]
    limits = (facts.max_batch, facts.max_extent, None if whole else max_rows(problem, q))
    shapes = tuple((which, x.shape, x.stride()) for which, x in tensors)
    scale, deterministic = call.options.scale, call.options.deterministic
    for geometry in _geometry(problem, shapes, limits):
        # the views' alignment follows from that of the tensors, which kernel_ready and the allocator ensure
        options = Options(scale, problem.causal, _NO_MASK, None, deterministic, geometry.key)
        yield geometry.of([x for _, x in tensors]), options


@functools.lru_cache(maxsize=4096)
def _geometry(problem: Problem, shapes: tuple[tuple[int, torch.Size, tuple[int, ...]], ...], limits: Limits) -> tuple[Geometry, ...]:
    return make_geometry(
        [_rows(problem, which, torch.empty_strided(shape, stride, device="meta")) for which, shape, stride in shapes], limits
    )
