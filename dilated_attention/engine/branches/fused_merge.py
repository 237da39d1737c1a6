"""Self-attention over a whole sequence with one merge at the end: every branch writes into its buffer, then one kernel merges.

``sequential.py`` merges problem by problem and supports every call. This module covers the most common calls with the least memory traffic.
Both run the same Plan on the same backends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dilated_attention.backends.base import Options, accumulation_dtype
from dilated_attention.engine.branches import branch_buffers as torch_merge
from dilated_attention.engine.branches.branch_buffers import BranchBuffers, of_problem
from dilated_attention.engine.branches.launch_views import Call, View, launches_of, rows_of
from dilated_attention.engine.branches.merge import zero_key_share
from dilated_attention.engine.branches.plan import Plan, Problem
from dilated_attention.engine.branches.sequential import without_padding
from dilated_attention.engine.branches.streams import Streams

Tensors = tuple[Tensor, ...]
# number of launches that run concurrently where no other chunk runs
CONCURRENT_LAUNCHES = 3


def forward(
    plan: Plan, buffers: BranchBuffers, tensors: Tensors, results: tuple[Tensor, Tensor], call: Call, *, is_concurrent: bool = False,
    direct: Callable[[Tensor], None] | None = None, saved_branch_outputs: Tensor | None = None,
) -> None:  # fmt: skip
    """Writes out (B, N, H, D) and lse (B, N, H), any views. ``tensors`` are q, k, v of the heads and positions of ``buffers``.

    Args:
        is_concurrent: another chunk runs concurrently, so launches run one by one and the merge uses only a small part of the GPU.
        direct: computes buffer 0, which covers every row, into ``out`` and into the lse (B, H, N) passed to it. The plan's branches
            are then the buffers from 1 on.
        saved_branch_outputs: flat buffer of all branches, none of them direct. It is left holding the separate output of each branch.
    """
    q, k, v = tensors
    out, lse = results
    k, v = without_padding(k, v, call.padding)
    B, _, H, D = q.shape
    merged = not plan.single or buffers.zero_keys or direct is not None or saved_branch_outputs is not None
    first = 0 if direct is None else 1
    parts: list[Tensor | None] = [None] * len(buffers.branches)
    part_lses = parts
    if merged:
        flat = saved_branch_outputs if saved_branch_outputs is not None else q.new_empty(B * H * D * buffers.rows(with_direct=False))
        flat_lse = torch.empty(B * H * buffers.rows(with_direct=True), dtype=accumulation_dtype(q.dtype), device=q.device)
        parts = buffers.split(flat, B, head_dim=D, with_direct=False)
        part_lses = buffers.split(flat_lse, B, head_dim=0, with_direct=True)
    elif not plan.covered:
        out.zero_()
        lse.fill_(-torch.inf)

    if direct is not None:
        direct_lse = part_lses[0]
        assert direct_lse is not None
        direct(direct_lse[:, 0])

    def run(problem: Problem) -> None:
        part, part_lse = parts[first + problem.branch], part_lses[first + problem.branch]
        queries, keys = rows_of(problem, 0, 0)
        tensors: list[tuple[View, Tensor]] = [(queries, q), (keys, k), (keys, v)]
        tensors += [(queries, x) if y is None else (_BufferRows(problem), y) for x, y in ((out, part), (lse, part_lse))]
        for (q_, k_, v_, out_, lse_), options in launches_of(
            problem, tensors, call, k.shape[:2], whole=call.backend.capabilities.writes_views
        ):
            call.backend.forward_into(q_, k_, v_, options, out_, lse_.transpose(1, 2))

    _on_streams(plan, run, q.device, 1 if is_concurrent or not call.backend.capabilities.concurrent else CONCURRENT_LAUNCHES)
    if merged and q.device.type == "cuda":
        from dilated_attention.engine.branches import merge_triton

        merge_triton.merge_buffers(buffers, out, lse, flat, flat_lse, is_concurrent=is_concurrent, own=saved_branch_outputs is not None)
    elif merged:
        lses = [x for x in part_lses if x is not None]
        torch_merge.merge_buffers(buffers, out, lse, parts, lses)
        if saved_branch_outputs is not None and buffers.zero_keys:
            torch_merge.count_zero_keys(buffers, [x for x in parts if x is not None], lses)


def backward(
    plan: Plan, buffers: BranchBuffers, tensors: Tensors, grads: Tensors, call: Call, dlse: Tensor | None, *, is_concurrent: bool = False,
    onto: bool = False, own: Sequence[Tensor] | None = None,
) -> None:  # fmt: skip
    """Writes dq, dk, dv (B, N, H, D), any views. ``tensors``: dout, q, k, v, out and lse (B, N, H), +inf for rows without keys.

    Every query head must have its own key/value head, unless the plan is a single problem that covers everything.

    Args:
        is_concurrent: as in ``forward``.
        onto: buffer 0 is what the gradients already hold. The plan's branches are then the buffers from 1 on.
        own: with detached mixing, the separate output of each branch as the forward saved it, (B, S, L, H, D). If None, it is recomputed.
    """
    dout, q, k, v, out, lse = tensors
    k, v = without_padding(k, v, call.padding)
    B, _, H, D = q.shape
    layer_views: list[list[Tensor | None]] = [[None] * len(buffers.branches)] * 3
    summed = onto or not plan.single
    first = 1 if onto else 0
    if summed:
        flats = [torch.empty(B * H * D * buffers.rows(with_direct=False), dtype=q.dtype, device=q.device) for _ in grads]
        layer_views = [buffers.split(flat, B, head_dim=D, with_direct=False) for flat in flats]
    elif not plan.covered:
        for grad in grads:
            grad.zero_()

    def run(problem: Problem) -> None:
        # the mixing weights are constants, so a branch's δ comes from its own output; its softmax weights stay exp(s − merged lse)
        queries, keys = rows_of(problem, 0, 0)
        buffer = _BufferRows(problem)
        tensors: list[tuple[View, Tensor]] = [(queries, dout), (queries, q), (keys, k), (keys, v)]
        tensors += [(queries, out) if own is None else (buffer, own[problem.branch]), (queries, lse)]
        for grad, rows, layer in zip(grads, (queries, keys, keys), layer_views, strict=True):
            part = layer[first + problem.branch]
            tensors.append((rows, grad) if part is None else (buffer, part))
        if dlse is not None:
            tensors.append((queries, dlse))
        for (dout_, q_, k_, v_, out_, lse_, dq_, dk_, dv_, *rest), options in launches_of(problem, tensors, call, k.shape[:2]):
            dlse_ = rest[0].transpose(1, 2) if rest else None
            if call.detached and own is None:
                out_ = _own_output(problem, q_, k_, v_, options, call)
            call.backend.backward_into(dout_, q_, k_, v_, out_, lse_.transpose(1, 2), options, (dq_, dk_, dv_), dlse_)

    _on_streams(plan, run, q.device, 1 if is_concurrent or not call.backend.capabilities.concurrent else CONCURRENT_LAUNCHES)
    if summed and q.device.type == "cuda":
        from dilated_attention.engine.branches import merge_triton

        merge_triton.sum_buffers(buffers, grads, flats, is_concurrent=is_concurrent)
    elif summed:
        for grad, layer in zip(grads, layer_views, strict=True):
            torch_merge.sum_buffers(buffers, grad, layer)


def _own_output(problem: Problem, q: Tensor, k: Tensor, v: Tensor, options: Options, call: Call) -> Tensor:
    """Computes a launch's own output (P, L, G, D), before any merge."""
    out, lse = call.backend.forward(q, k, v, options)
    return out.mul_(zero_key_share(lse.transpose(1, 2), problem.zero_keys)[..., None]) if problem.zero_keys else out


def _on_streams(plan: Plan, run: Callable[[Problem], None], device: torch.device, count: int) -> None:
    """Deals the problems out to the streams one by one, longest first, so that short problems fill the gaps that long ones leave."""
    problems = sorted(plan.problems, key=lambda problem: -problem.pairs)
    if count == 1 or len(problems) == 1:
        for problem in problems:
            run(problem)
        return
    with Streams(device, min(count, len(problems))) as streams:
        for stream in range(len(streams)):
            with streams.stream(stream):
                for problem in problems[stream :: len(streams)]:
                    run(problem)


@dataclass(frozen=True, slots=True)
class _BufferRows:
    """The problem's rows of its branch's buffer, of out or gradients, or of lse."""

    problem: Problem

    def of(self, x: Tensor) -> Tensor:
        view = of_problem(self.problem, x)
        return view if x.dim() == 5 else view.transpose(2, 3)
