"""A model's memory at any length and depth, from runs with fake tensors at two lengths and two depths.

Between two lengths the operations are the same, so the bytes of every tensor are linear in the length. Each additional block repeats the
same operations, so the memory of the first and last blocks is linear in the depth, and no block in between has a higher peak.
The memory inside attention is not linear; it is added at the requested length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dilated_attention.planning.whole_models.trace import Moment

# numbers of blocks in the runs that are extrapolated: a first, a last, and one or two in between
DEPTHS = (3, 4)


@dataclass(frozen=True, slots=True)
class Line:
    """offset + slope · positions, in bytes, exact at both lengths that it was fitted to."""

    offset: int
    slope: float

    def at(self, positions: int) -> int:
        return self.offset + round(self.slope * positions)


@dataclass(frozen=True, slots=True)
class Point:
    """A ``Moment`` at any length, in the forward or in the backward."""

    alive: Line
    grads: int
    inside: Line
    attention: str
    kept: int
    in_backward: bool


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """The moments of a step that may be the highest, in order.

    Args:
        end_of_forward: the moment at which the forward ends.
        moved: bytes that all operations except attention read and write.
    """

    points: tuple[Point, ...]
    end_of_forward: Point
    moved: Line

    def highest(self, positions: int, extra: Callable[[Point], int]) -> tuple[int, Point]:
        """Returns (bytes, moment) of the highest point; ``extra`` is added to each moment's own bytes."""
        return max(((point.alive.at(positions) + extra(point), point) for point in self.points), key=lambda pair: pair[0])


# moments, and how many of them belong to the forward
Traced = tuple[list[Moment], int]


def timeline(trace: Callable[[int, int], Traced], lengths: tuple[int, int], depth: int) -> Timeline:
    """Args: trace: returns the moments for a number of positions and a number of blocks."""
    runs = [deepened(lambda blocks, n=n: trace(n, blocks), depth) for n in lengths]  # type: ignore[misc]
    (first, num_forward), (second, _) = runs
    assert len(first) == len(second), f"{len(first)} operations at {lengths[0]} positions and {len(second)} at {lengths[1]}"

    def line(a: int, b: int) -> Line:
        slope = (b - a) / (lengths[1] - lengths[0])
        return Line(round(a - slope * lengths[0]), slope)

    points = tuple(
        Point(line(a.alive, b.alive), a.grads, line(a.inside, b.inside), a.attention, a.kept, index >= num_forward)
        for index, (a, b) in enumerate(zip(first, second, strict=True))
    )
    return Timeline(points=points, end_of_forward=points[num_forward - 1], moved=line(first[-1].moved, second[-1].moved))


def deepened(trace: Callable[[int], Traced], depth: int) -> Traced:
    """Returns the moments of ``depth`` blocks; for many blocks, those of the first and last ones, extrapolated from ``DEPTHS``."""
    if depth <= DEPTHS[1]:
        return trace(depth)
    (few, few_forward), (some, some_forward) = (trace(blocks) for blocks in DEPTHS)
    forward = _aligned(few[:few_forward], some[:some_forward], at_end=2, depth=depth)
    backward = _aligned(few[few_forward:], some[some_forward:], at_end=1, depth=depth)
    return [*forward, *backward], len(forward)


def _aligned(few: Sequence[Moment], some: Sequence[Moment], *, at_end: int, depth: int) -> list[Moment]:
    """Extrapolates from a pass of 3 and of 4 blocks, aligned at the start, and at the end for the last ``at_end`` blocks."""
    block = len(some) - len(few)
    cut = len(few) - at_end * block
    pairs = [*zip(few[:cut], some[:cut], strict=True), *zip(few[cut:], some[cut + block :], strict=True)]
    assert all(a.attention == b.attention for a, b in pairs), "one block more makes the same operations once more"
    times = depth - DEPTHS[0]

    def told(a: int, b: int) -> int:
        return a + times * (b - a)

    return [
        Moment(
            alive=told(a.alive, b.alive),
            grads=told(a.grads, b.grads),
            inside=told(a.inside, b.inside),
            attention=a.attention,
            kept=told(a.kept, b.kept),
            moved=told(a.moved, b.moved),
        )
        for a, b in pairs
    ]
