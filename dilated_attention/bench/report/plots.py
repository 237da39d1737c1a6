"""Plots of results: the content is data, the style is the same everywhere."""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dilated_attention.bench.report.rows import Row
from dilated_attention.files import replacing

# Okabe and Ito's colours without yellow, which people with any colour vision tell apart; a colour that comes again gets another dash
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#000000", "#cc79a7", "#56b4e9", "#e69f00")
_SOLID, _DASHED = ("-", "-."), ("--", ":")
_MARKS = "osD^vP*X<>hd"
# characters that fit below a picture
_DPI, _SHADES = 110, 128
_NOTE = 135


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
            import matplotlib
        except ModuleNotFoundError as missing:
            raise ModuleNotFoundError('plots need matplotlib: pip install "dilated-attention[plot]"') from missing
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from PIL import Image

        with matplotlib.rc_context({"font.size": 10, "axes.titlesize": 12, "axes.spines.top": False, "axes.spines.right": False}):
            # pyplot would open a window's backend and keep every figure
            figure = Figure(figsize=(9, 5), layout="constrained")
            FigureCanvasAgg(figure)
            axes = figure.add_subplot()
            axes.set_title(self.title, loc="left")
            axes.set_xlabel(self.x_label)
            axes.set_ylabel(self.y_label)
            axes.grid(True, which="major", alpha=0.25)
            self._bars(axes) if self.bars is not None else self._lines(axes)
            axes.set_axisbelow(True)
            if len(self.lines) > 1:
                # outside the axes: there are many contenders, and no corner is free in all plots
                handles, labels = axes.get_legend_handles_labels()
                # lines in the order in which they end, the highest first
                ends = [-line.y[-1] if self.bars is None and len(line.y) else math.inf for line in self.lines]
                order = sorted(range(len(ends)), key=ends.__getitem__)
                axes.legend(
                    [handles[i] for i in order],
                    [labels[i] for i in order],
                    frameon=False,
                    loc="upper left",
                    bbox_to_anchor=(1.0, 1.0),
                    fontsize=9,
                    handlelength=3.4,
                )
            if self.note:
                figure.supxlabel(textwrap.fill(self.note, _NOTE), fontsize=8, x=0.01, ha="left", color="#555555")
            path.parent.mkdir(parents=True, exist_ok=True)
            with io.BytesIO() as drawn:
                figure.savefig(drawn, dpi=_DPI, metadata={"Software": None})
                # results are stored in repositories: with few colours a plot takes a third of the bytes
                picture = Image.open(drawn).convert("RGB").quantize(_SHADES)
                with replacing(path) as new:
                    picture.save(new, "PNG", optimize=True, dpi=(_DPI, _DPI))

    def _lines(self, axes: Any) -> None:
        for i, line in enumerate(self.lines):
            colour, again = _COLOURS[i % len(_COLOURS)], i // len(_COLOURS) % 2
            style = _DASHED[again] if line.dashed else _SOLID[again] if line.joined else "none"
            mark = _MARKS[i % len(_MARKS)] if line.marked else None
            # the first is the widest: of lines that coincide, each shows below the next
            width = 3.0 - 1.8 * i / max(1, len(self.lines) - 1)
            look = {"linestyle": style, "color": colour, "marker": mark, "markersize": 3 + 1.6 * width, "linewidth": width}
            axes.plot(line.x, line.y, label=line.label, **look)
            if line.low is not None and line.high is not None:
                axes.fill_between(line.x, line.low, line.high, color=colour, alpha=0.12, linewidth=0)
        if self.log_x:
            self._log_ticks(axes)
        if self.log_y:
            self._log_y(axes)
        else:
            axes.set_ylim(bottom=0)

    def _log_y(self, axes: Any) -> None:
        """Writes plain numbers, such as 0.5 and 20, where they are short; labels minor ticks where there are few powers of ten."""
        from matplotlib.ticker import LogLocator, NullFormatter

        axes.set_yscale("log")
        low, high = axes.get_ylim()
        if low < 1e-3 or high > 1e6:
            return
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
        if high / low < 100:
            axes.yaxis.set_minor_locator(LogLocator(subs=(2.0, 5.0) if high / low > 10 else (2.0, 3.0, 5.0)))
            axes.yaxis.set_minor_formatter(lambda value, _: f"{value:,.10g}")
        else:
            axes.yaxis.set_minor_formatter(NullFormatter())

    def _log_ticks(self, axes: Any) -> None:
        """Makes every measured x a tick where there are few, written as 4k or 1M; where labels would overlap, powers of two come first."""
        axes.set_xscale("log", base=2)
        ticks = {x for line in self.lines if line.marked for x in line.x}
        if not 0 < len(ticks) <= 32 or any(x != int(x) or x <= 0 for x in ticks):
            return
        apart = math.log2(max(ticks) / min(ticks)) / 16
        kept: list[float] = []
        for x in sorted(ticks, key=lambda x: (int(x) & (int(x) - 1) != 0, x)):
            if all(abs(math.log2(x / other)) >= apart for other in kept):
                kept.append(x)
        kept.sort()
        axes.set_xticks(kept, [short(int(x)) for x in kept])
        axes.minorticks_off()

    def _bars(self, axes: Any) -> None:
        """Draws horizontal bars, whose labels never overlap."""
        assert self.bars is not None
        width = 0.8 / max(1, len(self.lines))
        for i, line in enumerate(self.lines):
            places = [at - 0.4 + width * (i + 0.5) for at in range(len(self.bars))]
            axes.barh(places, line.y, width * 0.92, color=_COLOURS[i % len(_COLOURS)], label=line.label)
        axes.set_yticks(range(len(self.bars)), [name.replace("\n", " ") for name in self.bars])
        axes.invert_yaxis()
        axes.set_xlabel(self.y_label)
        axes.set_ylabel(self.x_label)
        axes.grid(False, axis="y")
        if self.log_y:
            axes.set_xscale("log")


def lines_of(
    rows: Iterable[Row], key: str, *, across: str = "N", scale: float = 1.0, of: str = "values", rate: bool = False
) -> list[Line]:
    """Returns a line for each name that has figures ``key`` over the case's ``across``; times with their spread.

    Args:
        rate: whether the figures are numbers per second, which are shaded by the percentiles of the time.
    """
    points: dict[str, list[tuple[Any, ...]]] = {}
    for row in rows:
        found = getattr(row, of)
        if math.isfinite(y := scale * found.get(key, math.nan)):
            ends = (y, y)
            if key == "ms":
                ends = scale * found.get("low_ms", found[key]), scale * found.get("high_ms", found[key])
            elif rate:
                # a rate is highest where the time is lowest
                ends = y * found["ms"] / found["high_ms"], y * found["ms"] / found["low_ms"]
            points.setdefault(row.name, []).append((row.case[across], y, *ends))
    lines = []
    for name, mine in points.items():
        x, y, low, high = zip(*sorted(mine), strict=True)
        lines.append(Line(name, x, y, low, high) if key == "ms" or rate else Line(name, x, y))
    return lines


def short(size: int) -> str:
    """Formats a size: 65536 → 64k, 1048576 → 1M, 1000 → 1,000."""
    for unit, power in (("G", 30), ("M", 20), ("k", 10)):
        if size >= 2**power and size % 2 ** (power - 2) == 0:
            return f"{size / 2**power:g}{unit}"
    return f"{size:,}"
