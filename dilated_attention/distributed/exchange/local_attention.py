"""The local part: a rank's queries on the keys of the same ranges, computed by the single-device engine without communication."""

from __future__ import annotations

from dataclasses import replace

import torch

from dilated_attention.distributed.exchange.plan import RingProblem, row_of
from dilated_attention.engine.branches import strategy
from dilated_attention.engine.branches.launch_views import Call
from dilated_attention.engine.branches.plan import Range, Shape

Tensors = tuple[torch.Tensor, ...]


def local_shape(ring_problem: RingProblem, span: Range) -> Shape:
    """Returns the positions of ``span`` as a sequence of its own; positions and documents are counted from its first position."""
    start, end = span
    inside = (0, end - start)
    documents = tuple((a - start, b - start) for a, b in ring_problem.shape.documents if a < end and b > start)
    if _is_a_sequence(ring_problem, span):
        documents = (inside,)
    return replace(ring_problem.shape, queries=inside, keys=inside, documents=documents)


def _is_a_sequence(ring_problem: RingProblem, span: Range) -> bool:
    """Whether the pattern restricted to ``span`` is the same pattern on a sequence of that length.

    It is the same if every branch either begins a segment at the first position of the span, or has the whole span in one segment and
    counts its offsets from that position.
    """
    start, end = span
    if ring_problem.pattern.tail != "mask":
        # the number of zero keys of a segment depends on what comes after the span
        return span == ring_problem.shape.keys
    first = next((a for a, b in ring_problem.shape.documents if a <= start and end <= b), None)
    if first is None:
        return False
    start, end = start - first, end - first
    return all(
        start % length == 0 or (start // length == (end - 1) // length and (start % length) % rate == 0)
        for length, rate in ring_problem.pattern.branches
    )


def local_forward(ring_problem: RingProblem, spans: tuple[Range, ...], tensors: Tensors, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (out (B, n, H, D) in q's dtype, lse (B, n, H)) of the ranges, one after the other."""
    q, k, v = tensors
    outs, lses = [], []
    for span in spans:
        rows = _rows(spans, span)
        out, lse = strategy.forward(
            ring_problem.pattern, local_shape(ring_problem, span), q[:, rows], k[:, rows], v[:, rows], _call_of(call, span)
        )
        outs.append(out)
        lses.append(lse.transpose(1, 2))
    return (outs[0], lses[0]) if len(spans) == 1 else (torch.cat(outs, 1), torch.cat(lses, 1))


def local_backward(ring_problem: RingProblem, spans: tuple[Range, ...], tensors: Tensors, call: Call, dlse: torch.Tensor | None) -> Tensors:
    """Returns (dq, dk, dv) in the inputs' dtype. ``tensors``: dout, q, k, v, out (B, n, H, D), and lse (B, n, H) merged over all keys."""
    shares = []
    for span in spans:
        rows = _rows(spans, span)
        dout, q, k, v, out, lse = (x[:, rows] for x in tensors)
        dlse_ = None if dlse is None else dlse[:, rows].transpose(1, 2)
        shape = local_shape(ring_problem, span)
        shares.append(
            strategy.backward(ring_problem.pattern, shape, (dout, q, k, v, out, lse.transpose(1, 2)), _call_of(call, span), dlse_)
        )
    return tuple(shares[0]) if len(spans) == 1 else tuple(torch.cat(grads, 1) for grads in zip(*shares, strict=True))


def _rows(spans: tuple[Range, ...], span: Range) -> slice:
    start = row_of(spans, span[0])
    return slice(start, start + span[1] - span[0])


def _call_of(call: Call, span: Range) -> Call:
    padding = None if call.padding is None else call.padding[:, slice(*span)]
    return replace(call, padding=padding, position_offset=span[0])
