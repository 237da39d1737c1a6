"""Runs a Plan forward and backward on one backend.

The forward merges every problem's (out, lse) into the result. The backward runs every problem's backward with the *merged* out and
lse in place of its own, which yields exactly its share of dq, dk, dv; the shares are summed. No gradient flows through the merge and
nothing is kept per branch. Accumulation is in float32 (float64 for float64).

Internal layout: x (B, N, H, D), lse (B, N, H); P = batch × segments of a launch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from dilated_attention.backends.base import Backend, Mask, Options, Request, accumulation_dtype
from dilated_attention.backends.dropout import Dropout
from dilated_attention.engine.branches.merge import add_zero_keys, merge_onto
from dilated_attention.engine.branches.plan import Plan, Problem
from dilated_attention.engine.branches.views import Rows, key_rows, launches, query_rows

# limit on one launch's results, which briefly exist twice (the kernel's own and merged); longer branches run in chunks of segments
PART_BYTES = {"cpu": 32 * 2**20, "cuda": 64 * 2**20}


@dataclass(frozen=True)
class Call:
    """What a run needs in addition to the plan and the tensors.

    Args:
        backend: runs every problem.
        options: scale and determinism; causality and masks are set for each problem.
        query_offset: position of the first query row.
        padding: (B, Nk) bool, True = the key is ignored.
        dropout_p, seed: probability and seed of position-based dropout.
        detached: whether to use TorchScale's gradient, which does not flow through the mixing weights of the branches.
        is_causal: causality of the whole call; that of a problem is in its ``options``.
        nested: the forward visits the pairs of nested branches once.
        request: what the backend was chosen for; ``named``: the caller named the backend.
        needs_grad: a backward will follow, or this is one.
        origin, first_head: what to add to positions and heads to get those of the whole sequence and model, which decide dropout.
    """

    backend: Backend
    options: Options
    query_offset: int = 0
    padding: torch.Tensor | None = None
    dropout_p: float = 0.0
    seed: int = 0
    detached: bool = False
    is_causal: bool = False
    nested: bool = False
    request: Request | None = None
    named: bool = False
    needs_grad: bool = False
    origin: int = 0
    first_head: int = 0


def run_forward(plan: Plan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (out (B, Nq, H, D) in q's dtype, lse (B, Nq, H) in the accumulation dtype)."""
    acc = accumulation_dtype(q.dtype)
    # without a merge, the kernels' own rounding is the final one
    out_dtype = q.dtype if plan.single else acc
    if plan.covered:
        out = torch.empty(q.shape, dtype=out_dtype, device=q.device)
        lse = torch.empty(q.shape[:3], dtype=acc, device=q.device)
    else:
        out = torch.zeros(q.shape, dtype=out_dtype, device=q.device)
        lse = torch.full(q.shape[:3], -torch.inf, dtype=acc, device=q.device)
    k, v = without_padding(k, v, call.padding)
    for problem in plan.problems:
        queries, keys = query_rows(problem, call.query_offset), key_rows(problem, 0)
        views = [queries.of(q), keys.of(k), keys.of(v), queries.of(out), queries.of(lse)]
        for (q_, k_, v_, out_, lse_), options in launches_of(problem, views, call, k.shape[:2]):
            part_out, part_lse = call.backend.forward(q_, k_, v_, options)
            part_lse = part_lse.transpose(1, 2)
            if problem.zero_keys:
                part_out, part_lse = add_zero_keys(part_out, part_lse, problem.zero_keys)
            if problem.first:
                out_.copy_(part_out)
                lse_.copy_(part_lse)
            else:
                merge_onto(out_, lse_, part_out, part_lse)
    return out.to(q.dtype), lse


def run_backward(
    plan: Plan,
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    call: Call,
    dlse: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns (dq, dk, dv) in the inputs' dtype. lse and dlse are (B, Nq, H)."""
    acc = accumulation_dtype(q.dtype)
    make = torch.empty if plan.covered else torch.zeros
    dq = make(q.shape, dtype=acc, device=q.device)
    dk = torch.zeros(k.shape, dtype=acc, device=k.device)
    dv = torch.zeros(v.shape, dtype=acc, device=v.device)
    k_, v_ = without_padding(k, v, call.padding)
    # a row without keys must give its (masked) scores weight 0; exp(s − (+inf)) does that in every kernel
    lse = lse.masked_fill(lse == -torch.inf, torch.inf)
    if call.detached and not plan.single:
        for branch in sorted({problem.branch for problem in plan.problems}):
            part = plan.branch(branch)
            # the mixing weights are constants, so each branch's δ comes from its own output; softmax weights stay exp(s − merged lse)
            branch_out, _ = run_forward(part, q, k, v, call)
            problems = tuple(problem for problem in plan.problems if problem.branch == branch)
            _add_shares(problems, (dq, dk, dv), (dout, q, k_, v_, branch_out, lse), call, None)
    else:
        _add_shares(plan.problems, (dq, dk, dv), (dout, q, k_, v_, out, lse), call, dlse)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _add_shares(
    problems: tuple[Problem, ...],
    grads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    tensors: tuple[torch.Tensor, ...],
    call: Call,
    dlse: torch.Tensor | None,
) -> None:
    dout, q, k, v, out, lse = tensors
    dq, dk, dv = grads
    for problem in problems:
        queries, keys = query_rows(problem, call.query_offset), key_rows(problem, 0)
        views = [queries.of(dout), queries.of(q), keys.of(k), keys.of(v), queries.of(out), queries.of(lse)]
        views += [queries.of(dq), keys.of(dk), keys.of(dv)]
        if dlse is not None:
            views.append(queries.of(dlse))
        for (dout_, q_, k_, v_, out_, lse_, dq_, dk_, dv_, *rest), options in launches_of(problem, views, call, k.shape[:2]):
            part_dq, part_dk, part_dv = shares(call.backend, (dout_, q_, k_, v_, out_, lse_), options, rest[0] if rest else None)
            if problem.first:
                dq_.copy_(part_dq)
            else:
                dq_.add_(part_dq)
            dk_.add_(part_dk)
            dv_.add_(part_dv)


def shares(backend: Backend, tensors: tuple[torch.Tensor, ...], options: Options, dlse: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """Returns a launch's shares (dq, dk, dv), including that of a gradient of lse.

    ``tensors`` are dout, q, k, v, out and lse; lse and ``dlse`` are (P, L, G).
    """
    dout, q, k, v, out, lse = tensors
    lse = lse.transpose(1, 2)
    dlse = None if dlse is None else dlse.transpose(1, 2)
    native = dlse if backend.facts.lse_grad else None
    dq, dk, dv = backend.backward(dout, q, k, v, out, lse, options, native)
    if dlse is not None and native is None:
        more_dq, more_dk = lse_share(backend.backward, q, k, lse, dlse, options)
        dq, dk = dq + more_dq, dk + more_dk
    return dq, dk, dv


def lse_share(
    backward: Callable[..., tuple[torch.Tensor, ...]],
    q: torch.Tensor,
    k: torch.Tensor,
    lse: torch.Tensor,
    dlse: torch.Tensor,
    options: Options,
) -> tuple[torch.Tensor, torch.Tensor]:
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


def launches_of(
    problem: Problem, views: list[torch.Tensor], call: Call, batch_and_keys: torch.Size, *, whole: bool = False
) -> Iterator[tuple[list[torch.Tensor], Options]]:
    """Yields the problem's launches, each with its options: its causality and its slice of the masks and of the positions.

    Args:
        whole: a launch allocates nothing in addition to its results, so only the kernel limits its length.
    """
    num_views = len(views)
    views = list(views)
    if call.padding is not None:
        views.append(_of_positions(key_rows(problem, 0), call.padding))
    if call.dropout_p:
        B, num_keys = batch_and_keys
        device = views[0].device
        # positions in the whole sequence, so that a cut does not change the position of a query row
        positions = torch.arange(call.origin, call.origin + num_keys, device=device).repeat(B, 1)
        batch = torch.arange(B, device=device)[:, None].repeat(1, num_keys)
        views += [_of_positions(query_rows(problem, 0), positions), _of_positions(key_rows(problem, 0), positions)]
        views.append(_of_positions(key_rows(problem, 0), batch))
    facts = call.backend.facts
    rows = None if whole else max_rows(problem, views[0])
    base = replace(call.options, causal=problem.causal)
    for group in launches(views, max_batch=facts.max_batch, max_extent=facts.max_extent, max_rows=rows):
        extra = group[num_views:]
        padding = extra.pop(0) if call.padding is not None else None
        options = replace(base, mask=Mask(padding, problem.band))
        if call.dropout_p:
            heads = torch.arange(problem.heads.count, device=views[0].device) * problem.heads.step + problem.heads.start + call.first_head
            options = replace(options, dropout=Dropout(call.dropout_p, call.seed, extra[2][:, 0], heads, extra[0], extra[1]))
        yield group[:num_views], options


def max_rows(problem: Problem, q: torch.Tensor) -> int:
    """Returns the most rows that a launch may return or accumulate in float32."""
    return PART_BYTES.get(q.device.type, PART_BYTES["cuda"]) // (4 * q.shape[-1] * problem.heads.count)


def _of_positions(rows: Rows, x: torch.Tensor) -> torch.Tensor:
    """Returns the view (B, S, L) of a (B, N) tensor."""
    return replace(rows, head_start=0, head_step=1, heads=1).of(x[..., None]).squeeze(-1)


def without_padding(k: torch.Tensor, v: torch.Tensor, padding: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns k and v with padded rows zeroed, so that a NaN in one of them cannot spread through 0 · NaN."""
    if padding is None:
        return k, v
    blocked = padding[:, :, None, None]
    return k.masked_fill(blocked, 0), v.masked_fill(blocked, 0)
