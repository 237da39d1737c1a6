"""The plan of a pass: everything that was decided about how one forward or one backward of a dense or dilated call runs.

``ops/prepare.py`` makes it, once for tensors of equal shapes and strides. Whatever asks how a call runs, or what it takes, asks the plan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from torch import Tensor

from dilated_attention.backends.base import AttentionRequest, Backend, Bounds, Options, Result, Views
from dilated_attention.engine.branches.launches import Masks
from dilated_attention.engine.branches.problems import Problems, Shape, problems_of
from dilated_attention.engine.ops.settings import CallSettings
from dilated_attention.pattern import DilatedPattern

Tensors = tuple[Tensor, ...]
Terms = list[tuple[str, int]]
T = TypeVar("T")


class Runner(Protocol):
    """A way to run a plan: problem by problem or in one launch (``branches/run_problems.py``), branches in chunks with one merge each
    (``branches/run_branches.py``), or a whole call on this project's kernels (``branches/run_tiles.py``)."""

    def forward(self, plan: Plan, q: Tensor, k: Tensor, v: Tensor, masks: Masks, saved: Tensor | None, into: Views | None = None) -> Result:
        """Returns (out (B, Nq, H, D) in q's dtype, lse (B, H, Nq) in the accumulation dtype), contiguous.

        Args:
            saved: a flat buffer of ``plan.saved`` elements, filled with the per-branch outputs for the backward; None if there are none.
            into: where out goes.
        """

    def backward(
        self, plan: Plan, tensors: Tensors, masks: Masks, dlse: Tensor | None, saved: Tensor | None, into: Views | None = None
    ) -> Tensors:
        """Returns (dq, dk, dv) in the inputs' dtype, contiguous where ``into`` names no place for them.

        Args:
            tensors: dout, q, k, v, out, and lse (B, H, Nq), as is ``dlse``.
            saved: as the forward left it. Without it, detached mixing recomputes the branches' outputs.
        """

    def terms(self, plan: Plan) -> Terms:
        """Returns (what, bytes) of what a pass allocates at its peak, besides inputs, results, saved outputs and copies of padded k, v."""


@dataclass(eq=False, slots=True, kw_only=True)
class Plan:
    """How a pass runs on tensors of some shapes and strides.

    Args:
        runner: runs it.
        backend: the kernels of every launch.
        options: what every launch is told; of a call in ``one_launch`` causality, too. Causality and masks are set for each problem.
        one_launch: the launch that computes everything, so that results need no copy; ``bounds`` and ``key_rows``: those of packed
            documents or a part of the queries. Bounds count from the first query and from the first of these rows of k and v.
        saved: number of elements of per-branch outputs that a forward saves for the backward.
        is_saved: they are saved, so that the backward does not recompute them.
        size: B, head dim, and bytes per element.
        position_offset, first_head: what to add to positions and heads to get those of the whole sequence and model, which decide dropout.
    """

    settings: CallSettings
    pattern: DilatedPattern
    shape: Shape
    is_backward: bool
    size: tuple[int, int, int]
    runner: Runner
    request: AttentionRequest
    backend: Backend
    options: Options
    dtype: Any
    one_launch: bool = False
    bounds: Bounds | None = None
    key_rows: slice | None = None
    saved: int = 0
    is_saved: bool = False
    position_offset: int = 0
    first_head: int = 0
    # what the runner makes once from this plan: launches, tables
    made: dict[Any, Any] = field(default_factory=dict)

    @property
    def problems(self) -> Problems:
        # looking them up by pattern and shape takes longer than a launch where there are many documents
        return self.once("problems", lambda: problems_of(self.pattern, self.shape))

    @property
    def is_detached(self) -> bool:
        """Whether to use TorchScale's gradient, which does not flow through the mixing weights of the branches."""
        return self.settings.detached and self.pattern.num_branches > 1

    def once(self, key: Any, make: Callable[[], T]) -> T:
        """Returns what ``make`` returned the first time for this key."""
        made = self.made.get(key)
        if made is None:
            # a thread that was first may have launches of what it made
            made = self.made.setdefault(key, make())
        return made  # type: ignore[no-any-return]
