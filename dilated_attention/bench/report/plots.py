"""Plots of results: the content is data, the style is the same everywhere."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dilated_attention.bench.report.rows import Row
from dilated_attention.files import replacing

NO_MATPLOTLIB = 'plots need matplotlib: pip install "dilated-attention[plot]", or leave them out with --no-plots'
# each line has a marker of its own, so that ten colours are enough
_MARKS = "osD^vP*X<>hd"


@dataclass(frozen=True)
class Line:
    """y over x; ``low`` and ``high`` shade the spread where given. ``dashed`` is for bounds and estimates."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    dashed: bool = False
    marked: bool = True
    # False: points without a connecting line
    joined: bool = True


@dataclass(frozen=True, kw_only=True)
class Plot:
    """A picture named ``<suite>-<name>.png``. Axis labels include the unit."""

    name: str
    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line] = field(default_factory=tuple)
    # for a bar plot: labels that x refers to; each line is one colour of bars
    bars: Sequence[str] | None = None
    log_x: bool = False
    log_y: bool = False
    note: str = ""

    def draw(self, path: Path) -> None:
        """Draws the plot to a file. Raises ModuleNotFoundError, with the extra to install, where matplotlib is missing."""
        try:
            from matplotlib.figure import Figure
        except ModuleNotFoundError as missing:
            raise ModuleNotFoundError(NO_MATPLOTLIB) from missing
        # pyplot would open a window's backend and keep every figure
        figure = Figure(figsize=(9, 5), layout="constrained")
        axes = figure.add_subplot(xlabel=self.x_label, ylabel=self.y_label)
        axes.set_title(self.title, loc="left")
        axes.grid(True, alpha=0.25)
        axes.set_axisbelow(True)
        self._bars(axes, self.bars) if self.bars is not None else self._lines(axes)
        if len(self.lines) > 1:
            # outside the axes: there are many contenders, and no corner is free in all plots
            axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=9)
        if self.note:
            figure.supxlabel(textwrap.fill(self.note, 135), fontsize=8, x=0.01, ha="left")
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as new:
            figure.savefig(new, format="png", dpi=110, metadata={"Software": None})

    def _lines(self, axes: Any) -> None:
        for i, line in enumerate(self.lines):
            style = "--" if line.dashed else "-" if line.joined else "none"
            mark = _MARKS[i % len(_MARKS)] if line.marked else None
            (drawn,) = axes.plot(line.x, line.y, label=line.label, linestyle=style, marker=mark, markersize=5)
            if line.low is not None and line.high is not None:
                axes.fill_between(line.x, line.low, line.high, color=drawn.get_color(), alpha=0.12, linewidth=0)
        if self.log_x:
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter(lambda x, _: short(int(x)) if x == int(x) else f"{x:g}")
        if self.log_y:
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
        else:
            axes.set_ylim(bottom=0)

    def _bars(self, axes: Any, names: Sequence[str]) -> None:
        """Draws horizontal bars, whose labels never overlap."""
        width = 0.8 / max(1, len(self.lines))
        for i, line in enumerate(self.lines):
            axes.barh([at - 0.4 + width * (i + 0.5) for at in range(len(names))], line.y, width * 0.92, label=line.label)
        axes.set(yticks=range(len(names)), yticklabels=names, xlabel=self.y_label, ylabel=self.x_label)
        axes.invert_yaxis()
        if self.log_y:
            axes.set_xscale("log")


def lines_of(rows: Iterable[Row], key: str, *, across: str = "N", scale: float = 1.0, rate: bool = False) -> list[Line]:
    """Returns a line for each name that has figures ``key`` over the case's ``across``; times with their spread.

    Args:
        rate: whether the figures are numbers per second, which are shaded by the percentiles of the time.
    """
    points: dict[str, list[tuple[Any, ...]]] = {}
    for row in rows:
        found = row.values
        if math.isfinite(y := scale * found.get(key, math.nan)):
            ends = (y, y)
            if key == "ms":
                ends = (scale * found.get("low_ms", found[key]), scale * found.get("high_ms", found[key]))
            elif rate:
                # a rate is highest where the time is lowest
                ends = (y * found["ms"] / found["high_ms"], y * found["ms"] / found["low_ms"])
            points.setdefault(row.name, []).append((row.case[across], y, *ends))
    lines = []
    for name, mine in points.items():
        xs, ys, low, high = zip(*sorted(mine), strict=True)
        lines.append(Line(name, xs, ys, low, high))
    return lines


def short(size: int) -> str:
    """Formats a size: 65536 → 64k, 1048576 → 1M, 1000 → 1,000."""
    for unit, power in (("G", 30), ("M", 20), ("k", 10)):
        if size >= 2**power and size % 2 ** (power - 2) == 0:
            return f"{size / 2**power:g}{unit}"
    return f"{size:,}"
