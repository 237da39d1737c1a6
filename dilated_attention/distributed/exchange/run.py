"""Runs the steps of a call on a sharded sequence, forward and backward, while the keys of the next steps are in flight.

What the steps compute is a ``Computation`` (``computation.py``), or that of a block pattern and of branches together.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dilated_attention.distributed.comm.p2p import Wire
from dilated_attention.distributed.exchange.rows.messages import StepPlan
from dilated_attention.distributed.exchange.rows.transfer import Arrival, KeyGradients, Pair, Returning


def forward(
    computation: Any,
    steps: Sequence[StepPlan],
    k: torch.Tensor,
    v: torch.Tensor,
    wire: Wire | None,
    depth: int,
    meanwhile: Callable[[], object] | None = None,
) -> None:
    """Runs all steps.

    Args:
        depth: the number of steps whose keys are in memory at once.
        meanwhile: what else there is to compute; it runs while the first keys are in flight.
    """
    arrivals = deque([Arrival(step, k, v, wire, "forward") for step in steps[:depth]])
    if meanwhile is not None:
        meanwhile()
    for index in range(len(steps)):
        computation.forward(index, *arrivals.popleft().keys())
        if index + depth < len(steps):
            arrivals.append(Arrival(steps[index + depth], k, v, wire, "forward"))


def backward(
    computation: Any,
    steps: Sequence[StepPlan],
    k: torch.Tensor,
    v: torch.Tensor,
    wires: tuple[Wire | None, Wire | None],
    depth: int,
    meanwhile: Callable[[], Pair] | None = None,
) -> Pair:
    """Runs all steps and returns (dk, dv) of this rank's keys, in their dtype.

    Args:
        wires: for keys and for their gradients.
        meanwhile: as in ``forward``, where the steps are on sparse rows. It returns gradients of k and v, to which theirs are added.
    """
    arrivals = deque([Arrival(step, k, v, wires[0], "backward") for step in steps[:depth]])
    results: list[Pair] = [] if meanwhile is None else [meanwhile()]
    sums: dict[tuple[int, int], KeyGradients] = {}
    last = {step.kv_heads: index for index, step in enumerate(steps)}
    returning: deque[tuple[int, Returning, Pair | None]] = deque()

    def add_back() -> None:
        index, back, own = returning.popleft()
        heads = back.step.kv_heads
        if not results:
            results.append((torch.empty(k.shape, dtype=k.dtype, device=k.device), torch.empty(v.shape, dtype=v.dtype, device=v.device)))
        dk, dv = results[0]
        room = (dk, dv) if len(last) == 1 else (dk[:, :, slice(*heads)], dv[:, :, slice(*heads)])
        back.wait()
        if own is not None:
            back.write(room, own)
            return
        sums[heads].add(back)
        if last[heads] == index:
            sums.pop(heads).write(*room)

    for index, step in enumerate(steps):
        grads = computation.backward(index, *arrivals.popleft().keys())
        if len(steps) == 1 and step.in_place and not step.sends and grads is not None:
            # nothing is anyone else's
            return grads
        back = Returning(step, grads, k, wires[1])
        # where no other step has these heads, one kernel sums all contributions once they are there
        own = grads if back.sums_at_once and len(last) == len(steps) and (step.fills or step.in_place) else None
        returning.append((index, back, own))
        if own is None:
            if step.kv_heads not in sums:
                sums[step.kv_heads] = KeyGradients(step, k)
            sums[step.kv_heads].add_own(step, grads)
        # add what came back during this step before memory for the next step is allocated
        while len(returning) > 1:
            add_back()
        if index + depth < len(steps):
            arrivals.append(Arrival(steps[index + depth], k, v, wires[0], "backward"))
    while returning:
        add_back()
    return results[0]
