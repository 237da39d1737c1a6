"""A model's memory at any length and depth, from runs of fake tensors at two of each.

Between two lengths the operations are the same, so every tensor's bytes lie on a straight line over the length. One block more makes the
same operations once more, so what the first and the last blocks do lies on a straight line over the depth, and nothing between is higher.
What attention has inside itself lies on no line; it is put in at the length that is asked about.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dilated_attention.planning.trace import Moment

# blocks of the runs from which more are told: a first, a last, and one or two between
DEPTHS = (3, 4)


@dataclass(frozen=True, slots=True)
class Line:
    """offset + slope · positions, in bytes, exact at both lengths it was made of."""

    offset: int
    slope: float

    def at(self, positions: int) -> int:
        return self.offset + round(self.slope * positions)


@dataclass(frozen=True, slots=True)
class Point:
    """A ``Moment`` at any length, of the forward or of the backward."""

    alive: Line
    grads: int
    inside: Line
    attention: str
    kept: int
    in_backward: bool


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Moments of a step that may be the highest, in order.

    Args:
        end_of_forward: when the forward has ended.
        moved: bytes that operations but for attention read and write.
    """

    points: tuple[Point, ...]
    end_of_forward: Point
    moved: Line

    def highest(self, positions: int, extra: Callable[[Point], int]) -> tuple[int, Point]:
        """(bytes, moment) of the highest point; ``extra`` is added to each moment's own."""
        return max(((point.alive.at(positions) + extra(point), point) for point in self.points), key=lambda pair: pair[0])


# moments, and how many of them are the forward's
Traced = tuple[list[Moment], int]


def timeline(trace: Callable[[int, int], Traced], lengths: tuple[int, int], depth: int) -> Timeline:
    """Args: trace: of so many positions and blocks."""
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
    """The moments of ``depth`` blocks; of many those of the first blocks and of the last ones, told from ``DEPTHS``."""
    if depth <= DEPTHS[1]:
        return trace(depth)
    (few, few_forward), (some, some_forward) = (trace(blocks) for blocks in DEPTHS)
    forward = _aligned(few[:few_forward], some[:some_forward], at_end=2, depth=depth)
    backward = _aligned(few[few_forward:], some[some_forward:], at_end=1, depth=depth)
    return [*forward, *backward], len(forward)


def _aligned(few: Sequence[Moment], some: Sequence[Moment], *, at_end: int, depth: int) -> list[Moment]:
    """Moments of a pass of 3 and of 4 blocks, side by side: from the start on, and of the last ``at_end`` blocks from the end."""
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
