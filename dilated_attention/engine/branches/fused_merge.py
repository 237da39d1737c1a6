"""Self-attention over a whole sequence with one merge at the end: every branch writes into its buffer, then one kernel merges.

``sequential.py`` merges problem by problem and supports every call. This module covers the most common calls with the least memory traffic.
Both run the same Plan on the same backends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dilated_attention.backends.base import Options, accumulation_dtype, placed
from dilated_attention.backends.merge import zero_key_share
from dilated_attention.backends.streams import Streams
from dilated_attention.engine.branches.branch_buffers import BranchBuffers
from dilated_attention.engine.branches.launch_views import Call, Launch, Layout, launches_of, masked, masks_of
from dilated_attention.engine.branches.plan import Plan
from dilated_attention.engine.branches.sequential import without_padding

Tensors = tuple[Tensor, ...]
# number of launches that run concurrently where no other chunk runs
CONCURRENT_LAUNCHES = 3


def forward(
    plan: Plan, buffers: BranchBuffers, tensors: Tensors, results: tuple[Tensor, Tensor], call: Call, *, is_concurrent: bool = False,
    onto: bool = False, saved_branch_outputs: Tensor | None = None,
) -> None:  # fmt: skip
    """Writes out (B, N, H, D) and lse (B, N, H), any views. ``tensors`` are q, k, v of the heads and positions of ``buffers``.

    Args:
        is_concurrent: another chunk runs concurrently, so launches run one by one and the merge uses only a small part of the GPU.
        onto: buffer 0 is what ``out`` and ``lse`` already hold. The plan's branches are then the buffers from 1 on.
        saved_branch_outputs: flat buffer of all branches, none of them direct. It is left holding the separate output of each branch.
    """
    q, k, v = tensors
    out, lse = results
    k, v = without_padding(k, v, call.padding)
    B, _, H, D = q.shape
    merged = not plan.single or buffers.zero_keys or onto or saved_branch_outputs is not None
    first = 1 if onto else 0
    if merged:
        flat = saved_branch_outputs if saved_branch_outputs is not None else q.new_empty(B * H * D * buffers.rows(with_direct=False))
        flat_lse = torch.empty(B * H * buffers.rows(with_direct=True), dtype=accumulation_dtype(q.dtype), device=q.device)
    elif not plan.covered:
        out.zero_()
        lse.fill_(-torch.inf)

    if onto:
        former_lse = buffers.split(flat_lse, B, head_dim=0, with_direct=True)[0]
        assert former_lse is not None
        former_lse[:, 0].copy_(lse.transpose(1, 2))

    layout = Layout("qkkQQ" if merged else "qkkqq", padding=call.padding is not None, buffers=buffers, first=first)
    given = [q, k, v, out, lse, *((flat, flat_lse) if merged else ()), *masks_of(call, q, k)]

    def run(launch: Launch, views: list[Tensor]) -> None:
        q_, k_, v_, out_, lse_, *masks = views
        results = out_, lse_.transpose(1, 2)
        placed(call.backend.forward(q_, k_, v_, masked(launch, masks, call) if masks else launch.options, out=results), results)

    _on_streams(plan, layout, given, call, run, is_concurrent, whole=call.backend.capabilities.writes_views)
    if merged:
        from dilated_attention.engine.branches import merge_triton

        merge_triton.merge_buffers(buffers, out, lse, flat, flat_lse, is_concurrent=is_concurrent, own=saved_branch_outputs is not None)


def backward(
    plan: Plan, buffers: BranchBuffers, tensors: Tensors, grads: Tensors, call: Call, dlse: Tensor | None, *, is_concurrent: bool = False,
    onto: bool = False, own: Sequence[Tensor] | None = None,
) -> None:  # fmt: skip
    """Writes dq, dk, dv (B, N, H, D), any views. ``tensors``: dout, q, k, v, out and lse (B, N, H), +inf for rows without keys.

    Every query head must have its own key/value head, unless the plan is a single problem that covers everything.

    Args:
        is_concurrent: as in ``forward``.
        onto: buffer 0 is what the gradients already hold, as in ``forward``.
        own: with detached mixing, the separate output of each branch as the forward saved it, (B, S, L, H, D). If None, it is recomputed.
    """
    dout, q, k, v, out, lse = tensors
    k, v = without_padding(k, v, call.padding)
    B, _, H, D = q.shape
    flats: list[Tensor] = []
    summed = onto or not plan.single
    first = 1 if onto else 0
    if summed:
        flats = [torch.empty(B * H * D * buffers.rows(with_direct=False), dtype=q.dtype, device=q.device) for _ in grads]
    elif not plan.covered:
        for grad in grads:
            grad.zero_()

    some = () if dlse is None else (dlse,)
    given = [dout, q, k, v, out, lse, *grads, *some, *flats, *(own or ()), *masks_of(call, q, k)]
    rows = "qqkk" + ("q" if own is None else "p") + "q" + ("QKK" if summed else "qkk") + "q" * len(some)
    layout = Layout(rows, padding=call.padding is not None, buffers=buffers, first=first)

    def run(launch: Launch, views: list[Tensor]) -> None:
        dout_, q_, k_, v_, out_, lse_, dq_, dk_, dv_, *rest = views
        dlse_ = None if dlse is None else rest.pop(0).transpose(1, 2)
        options = masked(launch, rest, call) if rest else launch.options
        # the mixing weights are constants, so a branch's δ comes from its own output; its softmax weights stay exp(s − merged lse)
        if call.detached and own is None:
            out_ = _own_output(q_, k_, v_, options, call, launch.problem.zero_keys)
        shares = call.backend.backward(dout_, q_, k_, v_, out_, lse_.transpose(1, 2), options, dlse=dlse_, grads=(dq_, dk_, dv_))
        placed(shares, (dq_, dk_, dv_))

    _on_streams(plan, layout, given, call, run, is_concurrent)
    if summed:
        from dilated_attention.engine.branches import merge_triton

        merge_triton.sum_buffers(buffers, grads, flats, is_concurrent=is_concurrent)


def _own_output(q: Tensor, k: Tensor, v: Tensor, options: Options, call: Call, zero_keys: int) -> Tensor:
    """Computes a launch's own output (P, L, G, D), before any merge."""
    out, lse = call.backend.forward(q, k, v, options)
    return out.mul_(zero_key_share(lse.transpose(1, 2), zero_keys)[..., None]) if zero_keys else out


def _on_streams(
    plan: Plan, layout: Layout, tensors: Sequence[Tensor], call: Call, run: Callable[[Launch, list[Tensor]], None],
    is_concurrent: bool, *, whole: bool = False,
) -> None:  # fmt: skip
    """Deals the problems out to the streams one by one, longest first, so that short problems fill the gaps that long ones leave."""
    problems = sorted(zip(plan.problems, launches_of(plan, layout, tensors, call, whole=whole), strict=True), key=lambda x: -x[0].pairs)
    count = 1 if is_concurrent or not call.backend.capabilities.concurrent else min(CONCURRENT_LAUNCHES, len(problems))
    with Streams(tensors[0].device, count) as streams:
        for stream in range(len(streams)):
            with streams.stream(stream):
                for _, launches in problems[stream :: len(streams)]:
                    for launch in launches:
                        run(launch, launch.of(tensors))
