"""Cut calls and packed documents on a library that takes boundaries in place of a batch (FlashAttention's "varlen" form).

A call whose queries are a range of the sequence, as on a rank of a ring, has segments of unequal lengths, and so has a call over documents.
The library computes all of them at once:

- the *direct* branch, of rate 1, whose segments follow each other in q, k and v, in one launch on these tensors;
- all segments and heads of the other branches in one launch, on rows gathered in this order (``kernels/packed_rows.py``). Their results
  are merged into those of the direct branch, or summed, by the kernels of the tiles.

If a call is causal, a segment's keys end with its last query: that is how these libraries align causality where there are more keys.
The zero keys of ``tail="zero_keys"`` are not there: they are added to the merged log-sum-exp, or to a branch's own with detached mixing.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dilated_attention.backends.base import Bounds, Capabilities, Options, placed
from dilated_attention.backends.hardware import has_kernels
from dilated_attention.backends.merge import scale_by_zero_keys
from dilated_attention.backends.tiles.table import Walk, make_spans
from dilated_attention.engine.attention_rows import zero_keys
from dilated_attention.engine.branches import sequential
from dilated_attention.engine.branches.chunking import transient_budget
from dilated_attention.engine.branches.launch_views import Call, Into, results_like
from dilated_attention.engine.branches.plan import Range, Shape, make_plan
from dilated_attention.engine.kernels.tiles_layout import layout_of
from dilated_attention.pattern import DilatedPattern

if TYPE_CHECKING:
    # this module needs Triton
    from dilated_attention.engine.kernels.packed_rows import GatheredHeads

Tensors = tuple[Tensor, ...]
# the library finds a tile's segment by a search through the boundaries
MOST_SEQUENCES = 2**14


@dataclass(frozen=True, eq=False)
class Direct:
    """The direct branch. ``bounds`` count from the first query and from the first of ``rows``, the rows of k and v that it reads."""

    bounds: Bounds
    rows: slice


@dataclass(frozen=True, eq=False)
class PackedLaunches:
    """What the launches of calls alike have in common: of the direct branch, and of groups of heads of the others, if any.

    Args:
        zeros: (1, H, Nq), the logarithm of each query's number of zero keys, in a forward those of all branches, in a backward those of
            the direct one, whose own output detached mixing asks for; None if there are none.
    """

    pattern: DilatedPattern
    shape: Shape
    options: Options
    direct: Direct | None
    gathered: tuple[GatheredHeads, ...]
    zeros: Tensor | None = None


def reads_in_place(pattern: DilatedPattern, shape: Shape) -> bool:
    """Whether the direct branch is the only one."""
    return pattern.num_branches == 1 and _walk(pattern, shape).direct == 0


def is_packed(
    pattern: DilatedPattern, shape: Shape, capabilities: Capabilities, batch: int, head_dim: int, dtype: torch.dtype, is_backward: bool
) -> bool:
    """Whether a call runs here if it has no mask by position, no saved outputs of its branches, and its backward no gradient of lse."""
    if not capabilities.documents or batch != 1 or shape.window is not None or shape.heads is not None:
        return False
    if pattern.tail != "mask" and not shape.is_causal and len(shape.documents) > 1:
        return False
    # keys of a part of the sequence, like those of one rank, have other positions; self-attention of one document is folded into a batch
    if shape.keys != (0, shape.documents[-1][1]) or shape.queries[1] > shape.keys[1] or (len(shape.documents) < 2 and not shape.is_cut):
        return False
    if reads_in_place(pattern, shape):
        return True
    if len(shape.documents) > 1 or shape.num_heads != shape.num_kv_heads:
        return False
    walk = _walk(pattern, shape)
    sequences = sum(int(make_spans(walk, False).counts[:, b].sum()) for b in range(walk.num_branches) if b != walk.direct)
    return sequences * shape.num_heads <= MOST_SEQUENCES and _heads_at_once(walk, shape, head_dim, dtype, is_backward) > 0


def packed_launches(pattern: DilatedPattern, shape: Shape, q: Tensor, call: Call, is_backward: bool) -> PackedLaunches | None:
    """Returns how a call on queries like q runs; None if it does not run here."""
    B, _, H, D = q.shape
    if call.padding is not None or call.dropout_p:
        return None
    if not is_packed(pattern, shape, call.backend.capabilities, B, D, q.dtype, is_backward):
        return None
    options = replace(call.options, causal=shape.is_causal)
    walk = _walk(pattern, shape)
    direct = _direct_of(shape, pattern.segment_lengths[walk.direct], q.device) if walk.direct >= 0 else None
    zeros = None
    if not is_backward:
        zeros = _zeros_of(pattern, shape, q.device)
    elif walk.direct >= 0 and call.detached and pattern.num_branches > 1:
        zeros = _zeros_of(pattern.with_branches([walk.direct], H), shape, q.device)
    if reads_in_place(pattern, shape):
        return None if direct is None else PackedLaunches(pattern, shape, options, direct, (), zeros)
    if not has_kernels(q):
        return None
    from dilated_attention.engine.kernels.packed_rows import gathered_heads

    count = _heads_at_once(walk, shape, D, q.dtype, is_backward)
    groups = [(first, min(first + count, H)) for first in range(0, H, count)]
    gathered = [gathered_heads(pattern, shape, options.scale, heads, D, q.dtype, q.device) for heads in groups]
    some = tuple(x for x in gathered if x is not None)
    # rows of heads without a sequence are written by nothing here, unless the direct branch has them
    every = direct is not None or len(some) == len(gathered)
    return PackedLaunches(pattern, shape, options, direct, some, zeros) if every else None


def _zeros_of(pattern: DilatedPattern, shape: Shape, device: torch.device) -> Tensor | None:
    """Returns (1, H, Nq), the logarithm of each query's number of zero keys in these branches; None if there are none."""
    if pattern.tail == "mask" or shape.is_causal:
        return None
    (start, num_positions), queries = shape.documents[0], torch.arange(*shape.queries, device=device)
    assert start == 0
    found = zero_keys(pattern, queries, shape.num_heads, num_positions)
    return found.log()[None].float() if found.any() else None


def _walk(pattern: DilatedPattern, shape: Shape) -> Walk:
    return layout_of(pattern, shape, False, (0, shape.num_heads)).walk


def _heads_at_once(walk: Walk, shape: Shape, head_dim: int, dtype: torch.dtype, is_backward: bool) -> int:
    """Returns the number of heads whose gathered rows and waiting results fit the budget of transient memory."""
    queries, keys, width = make_spans(walk, False).num_places, make_spans(walk, True).num_places, head_dim * dtype.itemsize
    # q and out, or dout, q, out, dq and the library's sum of dq in float32; k and v, and their gradients; lse
    of_head = (4 * width + 4 * head_dim if is_backward else 2 * width) * queries + (4 if is_backward else 2) * width * keys + 4 * queries
    inputs = (shape.queries[1] - shape.queries[0] + 2 * shape.keys[1]) * shape.num_heads * width
    return min(shape.num_heads, transient_budget(inputs) // max(1, of_head))


def _direct_of(shape: Shape, length: int, device: torch.device) -> Direct | None:
    """Returns the boundaries of the segments that hold queries; None if there is none."""
    first, last = shape.queries
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
    of_queries, of_keys = (torch.tensor(x, dtype=torch.int32, device=device) for x in (queries, keys))
    return Direct(Bounds(of_queries, of_keys, *longest), slice(low, seen[-1]))


def forward(
    launches: PackedLaunches, q: Tensor, k: Tensor, v: Tensor, call: Call, saved: Tensor | None, into: Into | None = None
) -> tuple[Tensor, Tensor]:
    """Returns (out (1, Nq, H, D), lse (1, H, Nq)), contiguous."""
    assert saved is None
    _, n, H, _ = q.shape
    (out,) = results_like((q,), into)
    if launches.direct is None:
        lse = torch.empty((1, H, n), dtype=torch.float32, device=q.device)
    else:
        bounds, rows = launches.direct.bounds, launches.direct.rows
        results = call.backend.forward(q, k[:, rows], v[:, rows], launches.options, bounds, out=(out, None))
        lse = placed(results, (out, None))[1].contiguous()
    for heads in launches.gathered:
        heads.forward(call.backend, launches.options, q, k, v, out, lse)
    if launches.zeros is not None:
        scale_by_zero_keys(out, lse, launches.zeros)
        lse = lse.logaddexp(launches.zeros)
    return out, lse


def backward(
    launches: PackedLaunches, tensors: Tensors, call: Call, dlse: Tensor | None, saved: Tensor | None, into: Into | None = None
) -> tuple[Tensor, ...]:
    """Returns (dq, dk, dv). ``tensors``: dout, q, k, v, out and lse (1, H, Nq), as is ``dlse``.

    With detached mixing each branch has its own output in place of the merged one, which is recomputed.
    """
    if dlse is not None:
        # its share of the gradients is computed problem by problem
        return sequential.backward(make_plan(launches.pattern, launches.shape), tensors, call, dlse, saved, into)
    assert saved is None
    dout, q, k, v, out, lse = tensors
    direct, own = launches.direct, call.detached and launches.pattern.num_branches > 1
    dq, dk, dv = results_like((q, k, v), into)
    if direct is not None:
        if (direct.rows.start, direct.rows.stop) != (0, k.shape[1]):
            # rows that no query of the direct branch sees
            dk.zero_(), dv.zero_()
        k_, v_, dk_, dv_ = (x[:, direct.rows] for x in (k, v, dk, dv))
        if own:
            out, own_lse = call.backend.forward(q, k_, v_, launches.options, direct.bounds)
            if launches.zeros is not None:
                scale_by_zero_keys(out, own_lse, launches.zeros)
        grads = dq, dk_, dv_
        placed(call.backend.backward(dout, q, k_, v_, out, lse, launches.options, direct.bounds, grads=grads), grads)
    for heads in launches.gathered:
        heads.backward(call.backend, launches.options, tensors, (dq, dk, dv), own)
    return dq, dk, dv
