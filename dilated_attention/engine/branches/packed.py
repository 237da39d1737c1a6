"""Dense attention over packed documents as one launch of a library that takes their boundaries (FlashAttention's "varlen" form).

The queries may be a range of the sequence, as on a rank of a ring: a document's part of them sees the document's keys from the first one
on, if causal up to the part's last query. That is how these libraries align causality where a document has more keys than queries.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import torch

from dilated_attention.backends.base import Bounds, Capabilities, Options
from dilated_attention.engine.branches import sequential
from dilated_attention.engine.branches.launch_views import Call
from dilated_attention.engine.branches.plan import Shape, make_plan
from dilated_attention.pattern import DilatedPattern

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True, eq=False)
class PackedLaunch:
    """What the launches of calls alike have in common.

    Args:
        bounds: of the documents, counted from the first query and from the first of ``rows``.
        rows: the rows of k and v that some query sees.
    """

    pattern: DilatedPattern
    shape: Shape
    options: Options
    bounds: Bounds
    rows: slice


def is_one_launch(pattern: DilatedPattern, shape: Shape, capabilities: Capabilities) -> bool:
    """Whether a call without masks by position is dense attention over several documents, and the backend takes their boundaries."""
    if not capabilities.documents or len(shape.documents) < 2 or shape.window is not None or shape.heads is not None:
        return False
    if pattern.num_branches > 1 or pattern.dilation_rates != (1,) or pattern.branch_heads != "all" or pattern.tail != "mask":
        return False
    # a table of all keys: a ring's part with the keys of one rank has others
    whole = shape.keys == (0, shape.documents[-1][1])
    return whole and pattern.segment_lengths[0] >= max(end - start for start, end in shape.documents)


def packed_launch(pattern: DilatedPattern, shape: Shape, tensors: Tensors, call: Call) -> PackedLaunch | None:
    """Returns the launch that computes a call on tensors like these, or None if it takes more than one."""
    if (
        call.padding is not None
        or call.dropout_p
        or tensors[0].shape[0] != 1
        or not is_one_launch(pattern, shape, call.backend.capabilities)
    ):
        return None
    first, last = shape.queries
    touched = [(start, end) for start, end in shape.documents if max(start, first) < min(end, last)]
    if not touched:
        return None
    seen = [min(end, last) if shape.is_causal else end for _, end in touched]
    low, device = touched[0][0], tensors[0].device
    queries, keys = [0, *(min(end, last) - first for _, end in touched)], [0, *(end - low for end in seen)]
    longest = max(b - a for a, b in itertools.pairwise(queries)), max(b - a for a, b in itertools.pairwise(keys))
    of_queries, of_keys = (torch.tensor(x, dtype=torch.int32, device=device) for x in (queries, keys))
    bounds = Bounds(of_queries, of_keys, *longest)
    return PackedLaunch(pattern, shape, replace(call.options, causal=shape.is_causal), bounds, slice(low, seen[-1]))


def forward(
    launch: PackedLaunch, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call, saved: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (out (1, Nq, H, D), lse (1, H, Nq)), contiguous."""
    assert saved is None
    out, lse = call.backend.forward_packed(q, k[:, launch.rows], v[:, launch.rows], launch.bounds, launch.options)
    return out.contiguous(), lse.contiguous()


def backward(
    launch: PackedLaunch, tensors: Tensors, call: Call, dlse: torch.Tensor | None, saved: torch.Tensor | None
) -> tuple[torch.Tensor, ...]:
    """Returns (dq, dk, dv). ``tensors``: dout, q, k, v, out and lse (1, H, Nq), as is ``dlse``."""
    if dlse is not None:
        # its share of the gradients is computed problem by problem
        return sequential.backward(make_plan(launch.pattern, launch.shape), tensors, call, dlse, saved)
    assert saved is None
    dout, q, k, v, out, lse = tensors
    # rows that no query sees have gradient 0
    make = torch.empty if (launch.rows.start, launch.rows.stop) == (0, k.shape[1]) else torch.zeros
    dk, dv = (make(x.shape, dtype=x.dtype, device=x.device) for x in (k, v))
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    k, v, some_dk, some_dv = (x[:, launch.rows] for x in (k, v, dk, dv))
    call.backend.backward_packed(dout, q, k, v, out, lse, launch.bounds, launch.options, (dq, some_dk, some_dv))
    return dq, dk, dv
