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
from dilated_attention.distributed.exchange.rows.transfer import Arrival, Pair, Returning

# steps whose keys are in memory at once: of one that is computed, and of the next one
AHEAD = 2


def forward(
    computation: Any,
    steps: Sequence[StepPlan],
    k: torch.Tensor,
    v: torch.Tensor,
    wire: Wire | None,
    meanwhile: Callable[[], object] | None = None,
) -> None:
    """Runs all steps.

    Args:
        meanwhile: what else there is to compute; it runs while the first keys are in flight.
    """
    arrivals = deque([Arrival(step, k, v, wire, "forward") for step in steps[:AHEAD]])
    if meanwhile is not None:
        meanwhile()
    for index in range(len(steps)):
        computation.forward(index, *arrivals.popleft().keys())
        if index + AHEAD < len(steps):
            arrivals.append(Arrival(steps[index + AHEAD], k, v, wire, "forward"))


def backward(
    computation: Any,
    steps: Sequence[StepPlan],
    k: torch.Tensor,
    v: torch.Tensor,
    wires: tuple[Wire | None, Wire | None],
    meanwhile: Callable[[], Pair] | None = None,
) -> Pair:
    """Runs all steps and returns (dk, dv) of this rank's keys, in their dtype.

    Args:
        wires: for keys and for their gradients.
        meanwhile: as in ``forward``, where the steps are on sparse rows. It returns gradients of k and v, to which theirs are added.
    """
    arrivals = deque([Arrival(step, k, v, wires[0], "backward") for step in steps[:AHEAD]])
    total: Pair | None = None if meanwhile is None else meanwhile()
    last: Returning | None = None
    for index, step in enumerate(steps):
        grads = computation.backward(index, *arrivals.popleft().keys())
        if len(steps) == 1 and step.in_place and not step.sends and grads is not None:
            # nothing is anyone else's
            return grads  # type: ignore[no-any-return]
        back = Returning(step, grads, k, wires[1])
        total = total or tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (k, v))  # type: ignore[assignment]
        assert total is not None
        # add what came back during this step before memory for the next step is allocated
        if last is not None:
            last.add_to(*total)
        last = back
        if index + AHEAD < len(steps):
            arrivals.append(Arrival(steps[index + AHEAD], k, v, wires[0], "backward"))
    assert last is not None and total is not None
    last.add_to(*total)
    return total
