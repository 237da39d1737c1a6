"""A module's or a model's memory at any length, from runs of fake tensors at two lengths.

Between two lengths the operations are the same, so every tensor's bytes lie on a straight line over the length; what attention has inside
itself does not, and is put in at the length that is asked about.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dilated_attention.planning.trace import Moment


@dataclass(frozen=True, slots=True)
class Line:
    """offset + slope · positions, in bytes, exact at both lengths it was made of."""

    offset: int
    slope: float

    def at(self, positions: int) -> int:
        return self.offset + round(self.slope * positions)


@dataclass(frozen=True, slots=True)
class Point:
    """A ``Moment`` at any length."""

    alive: Line
    grads: int
    inside: Line
    attention: str
    kept: int


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Moments of a step, in order.

    Args:
        points: those that may be the highest.
        end_of_forward: what lives when the forward has ended.
        moved: bytes that operations but for attention read and write.
    """

    points: tuple[Point, ...]
    end_of_forward: Line
    moved: Line

    def highest(self, positions: int, extra: Callable[[Point], int]) -> tuple[int, Point]:
        """(bytes, moment) of the highest point; ``extra`` is added to each moment's own."""
        return max(((point.alive.at(positions) + extra(point), point) for point in self.points), key=lambda pair: pair[0])


def timeline(trace: Callable[[int], tuple[list[Moment], int]], lengths: tuple[int, int]) -> Timeline:
    """Args: trace: (moments, how many of them are the forward's) of a run at a length."""
    (first, num_forward), (second, _) = (trace(n) for n in lengths)
    assert len(first) == len(second), f"{len(first)} operations at {lengths[0]} positions and {len(second)} at {lengths[1]}"

    def line(a: int, b: int) -> Line:
        slope = (b - a) / (lengths[1] - lengths[0])
        return Line(round(a - slope * lengths[0]), slope)

    points = []
    for index, (a, b) in enumerate(zip(first, second, strict=True)):
        point = Point(line(a.alive, b.alive), a.grads, line(a.inside, b.inside), a.attention, a.kept)
        # between two allocations nothing is higher
        is_low = (
            index + 1 < len(first)
            and not a.inside
            and not a.attention
            and first[index + 1].alive >= a.alive
            and second[index + 1].alive >= b.alive
        )
        if not is_low or a.grads != first[index + 1].grads:
            points.append(point)
    end = num_forward - 1
    return Timeline(
        points=tuple(points),
        end_of_forward=line(first[end].alive, second[end].alive),
        moved=line(first[-1].moved, second[-1].moved),
    )
