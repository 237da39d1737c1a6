"""The runner *problems*: runs a call problem by problem on one backend, or in one launch where that computes everything.

The forward merges every problem's (out, lse) into the result. The backward runs every problem's backward with the *merged* out and
lse instead of its own, which yields exactly its share of dq, dk, dv; the shares are summed. No gradient flows through the merge and
nothing is kept per branch. Accumulation is in float32 (float64 for float64).

One launch computes a plain dense call. A library that takes boundaries of documents ("varlen" form) also computes dense calls over packed
documents, or with a part of the queries, in one launch: segments that follow each other in q, k and v become its sequences. If such a call
is causal, a segment's keys end with its last query: that is how these libraries align causality where there are more keys.

Internal layout: x (B, N, H, D), lse (B, N, H). Of a launch: P = batch × segments, L rows of a segment, G heads.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from dilated_attention.backends.base import Backend, Options, Result, Views, accumulation_dtype, new_results, placed
from dilated_attention.backends.merge import add_zero_keys, merge_onto
from dilated_attention.engine.branches.launches import (
    PART_BYTES,
    Launch,
    Masks,
    launches_of,
    masked,
    masks_of,
    rows_of,
    without_padding,
)
from dilated_attention.engine.branches.problems import Problems
from dilated_attention.engine.plan import Plan, Tensors, Terms
from dilated_attention.pattern.blocks.block_lists import BlockLists

# kernels pad the rows of their sums to a multiple of this
_TILE = 128


def forward(plan: Plan, q: Tensor, k: Tensor, v: Tensor, masks: Masks, saved: Tensor | None, into: Views | None = None) -> Result:
    """See ``Runner.forward``."""
    if not plan.one_launch:
        out, lse = run_forward(plan, plan.problems, q, k, v, masks)
        return placed((out,), into)[0], lse.transpose(1, 2).contiguous()
    out_view = None if into is None else into[0]
    if plan.key_rows is not None:
        k, v = k[:, plan.key_rows], v[:, plan.key_rows]
        (out_view,) = new_results(into, (q,))
    out, lse = placed(plan.backend.forward(q, k, v, plan.options, plan.bounds, out=(out_view, None)), (out_view, None))
    return out if out_view is not None else out.contiguous(), lse.contiguous()


def backward(plan: Plan, tensors: Tensors, masks: Masks, dlse: Tensor | None, saved: Tensor | None, into: Views | None = None) -> Tensors:
    """See ``Runner.backward``."""
    dout, q, k, v, out, lse = tensors
    can = plan.backend.capabilities
    if not plan.one_launch or (plan.bounds is not None and dlse is not None):
        # what dlse adds is computed problem by problem, even if one launch takes all documents
        dlse = None if dlse is None else dlse.transpose(1, 2).contiguous()
        tensors = dout, q, k, v, out, lse.transpose(1, 2).contiguous()
        return placed(run_backward(plan, plan.problems, tensors, masks, dlse), into)
    # the kernel's own results are rounded or copied where nobody gives tensors for them, or it cannot write these, or lacks the gradient of
    # lse, which ``shares`` computes by a second launch
    if plan.bounds is None and (into is None or not can.writes_views or (dlse is not None and not can.lse_grad)):
        parts = shares(plan.backend, tensors, plan.options, dlse)
        return placed(tuple([part.to(x.dtype).contiguous() for part, x in zip(parts, (q, k, v), strict=True)]), into)
    grads = dq, dk, dv = new_results(into, (q, k, v))
    if plan.key_rows is not None:
        if (plan.key_rows.start, plan.key_rows.stop) != (0, k.shape[1]):
            # the launch does not write the rows that no query sees
            dk.zero_(), dv.zero_()
        k, v, dk, dv = (x[:, plan.key_rows] for x in (k, v, dk, dv))
    views = dq, dk, dv
    placed(plan.backend.backward(dout, q, k, v, out, lse, plan.options, plan.bounds, dlse=dlse, grads=views), views)
    return grads


def run_forward(plan: Plan, problems: Problems, q: Tensor, k: Tensor, v: Tensor, masks: Masks) -> Result:
    """Returns (out (B, Nq, H, D) in q's dtype, lse (B, Nq, H) in the accumulation dtype)."""
    acc = accumulation_dtype(q.dtype)
    # if nothing is merged, the kernels round to the final dtype
    out_dtype = q.dtype if problems.single else acc
    if problems.covered:
        out, lse = q.new_empty(q.shape, dtype=out_dtype), q.new_empty(q.shape[:3], dtype=acc)
    else:
        out, lse = q.new_zeros(q.shape, dtype=out_dtype), q.new_full(q.shape[:3], -torch.inf, dtype=acc)
    if masks.padding is not None:
        k, v = without_padding(k, v, masks.padding)
    tensors, launches = _launches(plan, problems, "qkkqq", [q, k, v, out, lse], masks)
    run, dropout_p, starts = plan.backend.forward, plan.settings.dropout_p, [x.storage_offset() for x in tensors]
    for launch in launches:
        # the same as launch.of(tensors), but faster, which short calls need
        views = [tensors[i].as_strided(size, stride, starts[i] + at) for i, size, stride, at in launch.views]
        q_, k_, v_, out_, lse_, *views = views
        options = masked(launch, views, masks, dropout_p, plan.first_head) if views else launch.options
        part_out, part_lse = run(q_, k_, v_, options)
        part_lse = part_lse.transpose(1, 2)
        if launch.problem.zero_keys:
            part_out, part_lse = add_zero_keys(part_out, part_lse, launch.problem.zero_keys)
        if launch.problem.first:
            out_.copy_(part_out)
            lse_.copy_(part_lse)
        else:
            merge_onto(out_, lse_, part_out, part_lse)
    return out.to(q.dtype), lse


def run_backward(plan: Plan, problems: Problems, tensors: Tensors, masks: Masks, dlse: Tensor | None = None) -> tuple[Tensor, ...]:
    """Returns (dq, dk, dv) in the inputs' dtype. ``tensors``: as in ``backward``, but lse and dlse are (B, Nq, H)."""
    dout, q, k, v, out, lse = tensors
    dq = (lse.new_empty if problems.covered else lse.new_zeros)(q.shape)
    dk, dv = lse.new_zeros(k.shape), lse.new_zeros(v.shape)
    k_, v_ = without_padding(k, v, masks.padding)
    # a row without keys must give its (masked) scores weight 0; exp(s − (+inf)) does that in every kernel
    lse = lse.masked_fill(lse == -torch.inf, torch.inf)
    if plan.settings.detached and not problems.single:
        for separate, part in plan.once(("branches", id(problems)), lambda: list(problems.branches())):
            # the mixing weights count as constants, so δ of a branch takes that branch's output; its weights stay exp(s − merged lse)
            branch_out, _ = run_forward(plan, separate, q, k, v, masks)
            _add_shares(plan, part, (dq, dk, dv), (dout, q, k_, v_, branch_out, lse), masks, None)
    else:
        _add_shares(plan, problems, (dq, dk, dv), (dout, q, k_, v_, out, lse), masks, dlse)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _add_shares(plan: Plan, problems: Problems, grads: Tensors, tensors: Tensors, masks: Masks, dlse: Tensor | None) -> None:
    """Adds the shares of problems to ``grads`` (dq, dk, dv). ``tensors``: dout, q, k, v, out, lse; lse and dlse are (B, Nq, H)."""
    dlse_rows = () if dlse is None else (dlse,)
    given, launches = _launches(plan, problems, "qqkkqqqkk" + "q" * len(dlse_rows), [*tensors, *grads, *dlse_rows], masks)
    for launch in launches:
        dout, q, k, v, out, lse, dq, dk, dv, *views = launch.of(given)
        dlse = views.pop(0).transpose(1, 2) if dlse_rows else None
        options = masked(launch, views, masks, plan.settings.dropout_p, plan.first_head) if views else launch.options
        part_dq, part_dk, part_dv = shares(plan.backend, (dout, q, k, v, out, lse.transpose(1, 2)), options, dlse)
        if launch.problem.first:
            dq.copy_(part_dq)
        else:
            dq.add_(part_dq)
        dk.add_(part_dk)
        dv.add_(part_dv)


def _launches(plan: Plan, problems: Problems, letters: str, tensors: list[Tensor], masks: Masks) -> tuple[list[Tensor], Sequence[Launch]]:
    """Returns the tensors, followed by those that masks are cut from, and the launches on them. ``letters``: see ``rows_of``."""
    q, k = tensors[letters.index("q")], tensors[letters.index("k")]
    settings = plan.settings
    if masks.padding is not None or settings.dropout_p or masks.bias is not None:
        # positions in the whole sequence, so that a cut does not change the position of a query row
        first, last = plan.position_offset, plan.position_offset + max(settings.query_offset + q.shape[1], k.shape[1])
        tensors += masks_of(masks, settings.dropout_p, (first, last), k.shape[0], q.device)
    # the plan keeps the launches of every chunk and, in a detached backward, of every branch
    key = letters, id(problems)
    launches: Sequence[Launch] | None = plan.made.get(key)
    if launches is None:
        rows = rows_of(letters, tensors, settings.query_offset, masks, settings.dropout_p)
        part_bytes = PART_BYTES.get(q.device.type, PART_BYTES["cuda"])
        of_problems = launches_of(problems.problems, rows, plan.backend.capabilities, part_bytes, plan.options)
        launches = plan.made[key] = tuple(itertools.chain.from_iterable(of_problems))
    return tensors, launches


def shares(backend: Backend, tensors: Tensors, options: Options, dlse: Tensor | None, keys: BlockLists | None = None) -> tuple[Tensor, ...]:
    """Returns what a launch adds to (dq, dk, dv), in the inputs' dtype or float32 (float64), including what a gradient of lse adds.

    ``tensors`` are dout, q, k, v, out (P, L, G, D) and lse (P, G, L), as is ``dlse``. ``keys``: the lists of a block pattern.

    dS = P ∘ (dout·vᵀ − rowsum(dout ∘ out)) becomes P ∘ dlse for v = 0, dout = (1, 1, 0, …), out = (−dlse, 0, …): so a backend that takes no
    gradient of lse computes what it adds to dq and dk. The second component of out carries what the first one loses in half precision.
    """
    dout, q, k, v, out, lse = tensors
    dlse_of_backend = dlse if backend.capabilities.lse_grad else None
    dq, dk, dv = backend.backward(dout, q, k, v, out, lse, options, keys, dlse=dlse_of_backend)
    if dlse is dlse_of_backend:
        return dq, dk, dv
    assert dlse is not None
    dlse_PLG = dlse.transpose(1, 2)
    ones, values = q.new_zeros(q.shape), q.new_zeros(q.shape)
    ones[..., 0] = 1
    values[..., 0] = -dlse_PLG
    if q.shape[-1] > 1:
        ones[..., 1] = 1
        values[..., 1] = -dlse_PLG - values[..., 0].to(dlse.dtype)
    more_dq, more_dk, _ = backend.backward(ones, q, k, k.new_zeros(k.shape), values, lse, replace(options, dropout=None), keys)
    if keys is not None:
        # lists are long: their shares are summed once more
        dq, dk = (x.to(accumulation_dtype(q.dtype)) for x in (dq, dk))
    return dq + more_dq, dk + more_dk, dv


def terms(plan: Plan) -> Terms:
    """See ``Runner.terms``."""
    # e and a: bytes of an element, and of one in the accumulation dtype; Q, K, R: elements of q, k and lse
    (B, D, e), shape, problems = plan.size, plan.shape, plan.problems
    a, H, Hk = accumulation_dtype(plan.dtype).itemsize, shape.num_heads, shape.num_kv_heads
    if plan.one_launch:
        # the kernel's results are those of the call
        is_on_gpu = plan.request.hardware.device_type == "cuda"
        return [kernel_sums(plan, problems)] if plan.is_backward and is_on_gpu else []
    queries, keys = (B * (last - first) for first, last in (shape.queries, shape.keys))
    Q, K, R = queries * H * D, keys * Hk * D, queries * H
    if not plan.is_backward:
        more = 0 if problems.single else a - e
        return [("out in float32", Q * more), ("launch results, rounded out", _launch_bytes(plan, Q * e * (more > 0)))]
    return [
        # two copies: lse (B, Nq, H), which with one head is the given lse itself, and that with +inf for rows without keys
        ("lse of the launches", R * a * (2 if H > 1 else 1)),
        ("dq, dk, dv in float32", (Q + 2 * K) * (a - e)),
        ("launch results, rounded dq, dk, dv", _launch_bytes(plan, (Q + 2 * K) * e * (a != e))),
    ]


def kernel_sums(plan: Plan, problems: Problems) -> tuple[str, int]:
    """Returns the term of what a library's backward on a GPU sums in float32 in its largest launch.

    It sums dq and two numbers per row, and where query heads share a key/value head, dk and dv. Launches are those of ``launches_of``,
    counted without its views: where that splits otherwise, this has to follow, and so has ``_launch_bytes``.
    """
    (B, D, e), shape = plan.size, plan.shape
    sums = total = 0
    for problem in problems.problems:
        rows, keys = (-(-length // _TILE) * _TILE for length in (problem.q_len, problem.k_len))
        launch_rows = PART_BYTES["cuda"] // (4 * D * problem.heads.size)
        segments = min(B * problem.segments, max(1, launch_rows // max(rows, keys)))
        # torch's kernels write dk and dv of each query head before they sum them, other kernels only the sum of each key head
        expanded = problem.heads.size * e if plan.backend.name.startswith("sdpa") else 4 * problem.heads.kv_count
        of_problem = 4 * rows * problem.heads.size * (D + 2) + 2 * keys * D * expanded * (shape.num_kv_heads < shape.num_heads)
        sums, total = max(sums, segments * of_problem), total + B * problem.segments * of_problem
    return "sums of kernels in float32", total if plan.one_launch else sums


def _launch_bytes(plan: Plan, rounded: int) -> int:
    """Returns the most bytes alive at once: a launch's results and either the previous launch's or their temporaries; or, at the end, the
    last launch's results and the rounded ones.

    Args:
        rounded: bytes of the results in the inputs' dtype.
    """
    B, D, e = plan.size
    a, device_type = accumulation_dtype(plan.dtype).itemsize, plan.request.hardware.device_type
    most = previous = 0
    for problem in plan.problems.problems:
        heads, count = problem.heads, B * problem.segments
        max_rows = PART_BYTES.get(device_type, PART_BYTES["cuda"]) // (4 * D * heads.size)
        size = min(count, max(1, max_rows // max(problem.q_len, problem.k_len)))
        num_full, rest = divmod(count, size)
        # of many equal launches only the first two have to be looked at
        for segments in [size] * min(num_full, 2) + [rest] * (rest > 0):
            rows, keys = segments * problem.q_len * heads.size, segments * problem.k_len * heads.kv_count * D
            if plan.is_backward:
                results = (rows * D + 2 * keys) * e
                # torch's CPU kernels convert a whole operand before they add it to a tensor of another dtype
                temporaries = max(rows * D, keys) * a if device_type == "cpu" and e != a else 0
            else:
                results = rows * (D * e + a)
                # a copy of the part in the accumulation dtype, and four tensors and one mask of lse's shape
                temporaries = 0 if problem.first else rows * ((D * a if e != a else 0) + 4 * a + 1)
            most = max(most, previous + results, results + temporaries)
            previous = results
    return max(most, rounded + previous)
