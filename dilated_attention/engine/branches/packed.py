"""Dense calls over packed documents, or with a part of the queries, in one launch of a library that takes boundaries ("varlen" form).

Segments that follow each other in q, k and v become sequences of the launch. If a call is causal, a segment's keys end with its last
query: that is how these libraries align causality where there are more keys.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dilated_attention.backends.base import Bounds, Capabilities, Options, placed
from dilated_attention.engine.branches import sequential
from dilated_attention.engine.branches.launch_views import Call, Into, results_like
from dilated_attention.engine.branches.plan import Range, Shape, make_plan
from dilated_attention.pattern import DilatedPattern

Tensors = tuple[Tensor, ...]


@dataclass(frozen=True, eq=False)
class PackedLaunch:
    """The launch of calls alike. It reads ``rows`` of k and v; ``bounds`` count from the first query and from the first of these rows."""

    pattern: DilatedPattern
    shape: Shape
    options: Options
    bounds: Bounds
    rows: slice


def is_packed(pattern: DilatedPattern, shape: Shape, capabilities: Capabilities, batch: int) -> bool:
    """Whether a call is one launch here if it has no mask by position, and its backward no gradient of lse."""
    if not capabilities.documents or batch != 1 or shape.window is not None or shape.heads is not None:
        return False
    if pattern.branches[0][1] != 1 or pattern.num_branches > 1 or pattern.branch_heads != "all":
        return False
    # a segment at the end has zero keys
    if pattern.tail != "mask" and not shape.is_causal:
        return False
    # keys of a part of the sequence, like those of one rank, have other positions; self-attention of one document is folded into a batch
    if shape.keys != (0, shape.documents[-1][1]) or shape.queries[1] > shape.keys[1]:
        return False
    return len(shape.documents) > 1 or shape.is_cut


def packed_launch(pattern: DilatedPattern, shape: Shape, q: Tensor, call: Call) -> PackedLaunch | None:
    """Returns the launch of a call on queries like q; None if the call is not one launch, or no segment holds a query."""
    if call.padding is not None or call.dropout_p or not is_packed(pattern, shape, call.backend.capabilities, q.shape[0]):
        return None
    first, last = shape.queries
    length = pattern.segment_lengths[0]
    touched: list[Range] = []
    for start, end in shape.documents:
        low = start + max(0, first - start) // length * length
        touched += [(a, min(a + length, end)) for a in range(low, min(end, last), length) if min(a + length, end) > first]
    if not touched:
        return None
    seen = [min(end, last) if shape.is_causal else end for _, end in touched]
    low = touched[0][0]
    queries, keys = [0, *(min(end, last) - first for _, end in touched)], [0, *(end - low for end in seen)]
    longest = max(b - a for a, b in itertools.pairwise(queries)), max(b - a for a, b in itertools.pairwise(keys))
    of_queries, of_keys = (torch.tensor(x, dtype=torch.int32, device=q.device) for x in (queries, keys))
    options = replace(call.options, causal=shape.is_causal)
    return PackedLaunch(pattern, shape, options, Bounds(of_queries, of_keys, *longest), slice(low, seen[-1]))


def forward(
    launch: PackedLaunch, q: Tensor, k: Tensor, v: Tensor, call: Call, saved: Tensor | None, into: Into | None = None
) -> tuple[Tensor, Tensor]:
    """Returns (out (1, Nq, H, D), lse (1, H, Nq)), contiguous."""
    assert saved is None
    (out,) = results_like((q,), into)
    results = call.backend.forward(q, k[:, launch.rows], v[:, launch.rows], launch.options, launch.bounds, out=(out, None))
    return out, placed(results, (out, None))[1].contiguous()


def backward(
    launch: PackedLaunch, tensors: Tensors, call: Call, dlse: Tensor | None, saved: Tensor | None, into: Into | None = None
) -> tuple[Tensor, ...]:
    """Returns (dq, dk, dv). ``tensors``: dout, q, k, v, out and lse (1, H, Nq), as is ``dlse``."""
    if dlse is not None:
        # its share of the gradients is computed problem by problem
        return sequential.backward(make_plan(launch.pattern, launch.shape), tensors, call, dlse, saved, into)
    assert saved is None
    dout, q, k, v, out, lse = tensors
    dq, dk, dv = results_like((q, k, v), into)
    if (launch.rows.start, launch.rows.stop) != (0, k.shape[1]):
        # rows that no query sees
        dk.zero_(), dv.zero_()
    k_, v_, dk_, dv_ = (x[:, launch.rows] for x in (k, v, dk, dv))
    grads = dq, dk_, dv_
    placed(call.backend.backward(dout, q, k_, v_, out, lse, launch.options, launch.bounds, grads=grads), grads)
    return dq, dk, dv
