"""Runs a Plan forward and backward on one backend.

The forward merges every problem's (out, lse) into the result. The backward runs every problem's backward with the *merged* out and
lse in place of its own, which yields exactly its share of dq, dk, dv; the shares are summed. No gradient flows through the merge and
nothing is kept per branch. Accumulation is in float32 (float64 for float64).

Internal layout: x (B, N, H, D), lse (B, N, H); P = batch × segments of a launch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from dilated_attention.backends.base import Backend, Options, placed
from dilated_attention.backends.merge import add_zero_keys, merge_onto
from dilated_attention.engine.branches.launch_views import Call, Into, Layout, copied_into, launches_of, masked, masks_of, results_like
from dilated_attention.engine.branches.plan import Plan, branch_plans

Tensors = tuple[Tensor, ...]


def forward(
    plan: Plan, q: Tensor, k: Tensor, v: Tensor, call: Call, saved: Tensor | None, into: Into | None = None
) -> tuple[Tensor, Tensor]:
    """Returns (out (B, Nq, H, D), lse (B, H, Nq)) of a whole call, contiguous; nothing is saved per branch."""
    assert saved is None
    out, lse = run_forward(plan, q, k, v, call)
    out = out if into is None else copied_into((out,), into)[0]
    return out, lse.transpose(1, 2).contiguous()


def backward(plan: Plan, tensors: Tensors, call: Call, dlse: Tensor | None, saved: Tensor | None, into: Into | None = None) -> Tensors:
    """Returns (dq, dk, dv) of a whole call. ``tensors``: dout, q, k, v, out and lse (B, H, Nq), as is ``dlse``."""
    assert saved is None
    dout, q, k, v, out, lse = tensors
    dlse = None if dlse is None else dlse.transpose(1, 2).contiguous()
    grads = run_backward(plan, dout, q, k, v, out, lse.transpose(1, 2).contiguous(), call, dlse)
    return grads if into is None else copied_into(grads, into)


def forward_at_once(
    options: Options, q: Tensor, k: Tensor, v: Tensor, call: Call, saved: Tensor | None, into: Into | None = None
) -> tuple[Tensor, Tensor]:
    """``forward`` of a call that is one dense problem: a launch's results are those of the call."""
    assert saved is None
    views = (None if into is None else into[0], None)
    out, lse = placed(call.backend.forward(q, k, v, options, out=views), views)
    return out if views[0] is not None else out.contiguous(), lse.contiguous()


def backward_at_once(
    options: Options, tensors: Tensors, call: Call, dlse: Tensor | None, saved: Tensor | None, into: Into | None = None
) -> Tensors:
    """``backward`` of a call that is one dense problem."""
    assert saved is None
    dout, q, k, v, out, lse = tensors
    can = call.backend.capabilities
    if into is not None and can.writes_views and (dlse is None or can.lse_grad):
        grads = results_like((q, k, v), into)
        return placed(call.backend.backward(dout, q, k, v, out, lse, options, dlse=dlse, grads=grads), grads)
    views = dout, q, k, v, out, lse.transpose(1, 2)
    parts = shares(call.backend, views, options, None if dlse is None else dlse.transpose(1, 2))
    parts = tuple(part.to(x.dtype).contiguous() for part, x in zip(parts, (q, k, v), strict=True))
    return parts if into is None else copied_into(parts, into)


def run_forward(plan: Plan, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """Returns (out (B, Nq, H, D) in q's dtype, lse (B, Nq, H) in the accumulation dtype)."""
    # that of sums: float64 for float64, else float32
    acc = torch.promote_types(q.dtype, torch.float32)
    # without a merge, the kernels' own rounding is the final one
    out_dtype = q.dtype if plan.single else acc
    if plan.covered:
        out = torch.empty(q.shape, dtype=out_dtype, device=q.device)
        lse = torch.empty(q.shape[:3], dtype=acc, device=q.device)
    else:
        out = torch.zeros(q.shape, dtype=out_dtype, device=q.device)
        lse = torch.full(q.shape[:3], -torch.inf, dtype=acc, device=q.device)
    k, v = without_padding(k, v, call.padding)
    tensors = [q, k, v, out, lse, *masks_of(call, q, k)]
    for launch in itertools.chain.from_iterable(launches_of(plan, _layout("qkkqq", call), tensors, call)):
        q_, k_, v_, out_, lse_, *masks = launch.of(tensors)
        part_out, part_lse = call.backend.forward(q_, k_, v_, masked(launch, masks, call) if masks else launch.options)
        part_lse = part_lse.transpose(1, 2)
        if launch.problem.zero_keys:
            part_out, part_lse = add_zero_keys(part_out, part_lse, launch.problem.zero_keys)
        if launch.problem.first:
            out_.copy_(part_out)
            lse_.copy_(part_lse)
        else:
            merge_onto(out_, lse_, part_out, part_lse)
    return out.to(q.dtype), lse


def run_backward(
    plan: Plan, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call, dlse: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (dq, dk, dv) in the inputs' dtype. lse and dlse are (B, Nq, H)."""
    acc = lse.dtype
    make = torch.empty if plan.covered else torch.zeros
    dq = make(q.shape, dtype=acc, device=q.device)
    dk = torch.zeros(k.shape, dtype=acc, device=k.device)
    dv = torch.zeros(v.shape, dtype=acc, device=v.device)
    k_, v_ = without_padding(k, v, call.padding)
    # a row without keys must give its (masked) scores weight 0; exp(s − (+inf)) does that in every kernel
    lse = lse.masked_fill(lse == -torch.inf, torch.inf)
    if call.detached and not plan.single:
        for separate, part in branch_plans(plan):
            # the mixing weights are constants, so each branch's δ comes from its own output; softmax weights stay exp(s − merged lse)
            branch_out, _ = run_forward(separate, q, k, v, call)
            _add_shares(part, (dq, dk, dv), (dout, q, k_, v_, branch_out, lse), call, None)
    else:
        _add_shares(plan, (dq, dk, dv), (dout, q, k_, v_, out, lse), call, dlse)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _add_shares(plan: Plan, grads: tuple[Tensor, Tensor, Tensor], tensors: tuple[Tensor, ...], call: Call, dlse: Tensor | None) -> None:
    _, q, k, *_ = tensors
    some = () if dlse is None else (dlse,)
    given = [*tensors, *grads, *some, *masks_of(call, q, k)]
    layout = _layout("qqkkqqqkk" + "q" * len(some), call)
    for launch in itertools.chain.from_iterable(launches_of(plan, layout, given, call)):
        dout_, q_, k_, v_, out_, lse_, dq_, dk_, dv_, *rest = launch.of(given)
        dlse_ = rest.pop(0) if some else None
        options = masked(launch, rest, call) if rest else launch.options
        part_dq, part_dk, part_dv = shares(call.backend, (dout_, q_, k_, v_, out_, lse_), options, dlse_)
        if launch.problem.first:
            dq_.copy_(part_dq)
        else:
            dq_.add_(part_dq)
        dk_.add_(part_dk)
        dv_.add_(part_dv)


def _layout(rows: str, call: Call) -> Layout:
    return Layout(rows, call.query_offset, call.padding is not None, call.dropout_p > 0)


def shares(backend: Backend, tensors: tuple[Tensor, ...], options: Options, dlse: Tensor | None) -> tuple[Tensor, ...]:
    """Returns a launch's shares (dq, dk, dv), including that of a gradient of lse.

    ``tensors`` are dout, q, k, v, out and lse; lse and ``dlse`` are (P, L, G).
    """
    dout, q, k, v, out, lse = tensors
    lse = lse.transpose(1, 2)
    dlse = None if dlse is None else dlse.transpose(1, 2)
    native = dlse if backend.capabilities.lse_grad else None
    dq, dk, dv = backend.backward(dout, q, k, v, out, lse, options, dlse=native)
    if dlse is not None and native is None:
        more_dq, more_dk = lse_share(backend.backward, q, k, lse, dlse, options)
        dq, dk = dq + more_dq, dk + more_dk
    return dq, dk, dv


def lse_share(
    backward: Callable[..., tuple[Tensor, ...]], q: Tensor, k: Tensor, lse: Tensor, dlse: Tensor, options: Options
) -> tuple[Tensor, Tensor]:
    """Computes what a gradient of lse adds to dq and dk, with a ``Backend.backward`` that takes none. lse and dlse are (P, G, L).

    dS = P ∘ (dout·vᵀ − rowsum(dout ∘ out)) becomes P ∘ dlse for v = 0, dout = (1, 1, 0, …), out = (−dlse, 0, …). The second
    component of out carries what the first one loses in half precision.
    """
    dlse_PLG = dlse.transpose(1, 2)
    ones = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    values = torch.zeros_like(ones)
    ones[..., 0] = 1
    values[..., 0] = -dlse_PLG
    if q.shape[-1] > 1:
        ones[..., 1] = 1
        values[..., 1] = -dlse_PLG - values[..., 0].to(dlse.dtype)
    no_v = torch.zeros(k.shape, dtype=k.dtype, device=k.device)
    dq, dk, _ = backward(ones, q, k, no_v, values, lse, options=replace(options, dropout=None))
    return dq, dk


def without_padding(k: Tensor, v: Tensor, padding: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns k and v with padded rows zeroed, so that a NaN in one of them cannot spread through 0 · NaN."""
    if padding is None:
        return k, v
    blocked = padding[:, :, None, None]
    return k.masked_fill(blocked, 0), v.masked_fill(blocked, 0)
