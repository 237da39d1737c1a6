"""Tables and the picture of suite ``quality``, created from its rows alone."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from dilated_attention.bench.report.rows import Results, Row
from dilated_attention.bench.report.tables import Table, figure, pivot
from dilated_attention.bench.report.views import by, failures, having, labelled
from dilated_attention.files import replacing

# the name of the rows that others are compared with
DENSE = "dense"
# % over dense that the picture's logarithmic axis begins with
_LEAST = 0.01
_EQUAL = "every pattern of a column keeps the same share of dense attention's causal pairs; a pair of several branches counts in each"
_FIGURES = {
    "kept_pct": "Kept pairs, % of dense causal attention",
    "us_per_token": "Time of a forward without output layer, µs a token",
    "bits_per_byte": "Loss, bits a byte",
    "tuning_tokens": "Tuning, tokens",
}
_GUESS = "digits of a hidden key that are the likeliest token after the right ones before them; a guess at one digit finds 10 %"


def over(row: Row, base: Row) -> tuple[float, float]:
    """Returns the loss of ``row`` over that of ``base`` in %, and its standard error from the differences passage by passage.

    100 · (L / L_base − 1) of the bits a byte of all passages together; the error is that of the mean difference of n passages, in % of
    L_base: s / √n, NaN for a single passage.
    """
    keys = [key for key in row.values if key.startswith("passage_")]
    differences = [row.values[key] - base.values[key] for key in keys]
    error = statistics.stdev(differences) / math.sqrt(len(keys)) if len(keys) > 1 else math.nan
    loss = base.values["bits_per_byte"]
    return 100 * (row.values["bits_per_byte"] / loss - 1), 100 * error / loss


def dense_row(results: Results, is_tuned: bool) -> Row | None:
    return next((row for row in having(results, task="loss", tuned=is_tuned) if row.name == DENSE and row.values), None)


def tables(results: Results) -> list[Table]:
    found = []
    for is_tuned, rows in by(having(results, task="loss"), "tuned"):
        suffix = ", tuned" if is_tuned else ""
        bases = {"Loss over dense, %": dense_row(results, False)}
        bases |= {"Loss over dense that was tuned as long, %": dense_row(results, True)} if is_tuned else {}
        found += [_loss(rows, base, title + suffix) for title, base in bases.items() if base is not None]
        about = "; ".join(dict.fromkeys(f"{row.name}: {row.case['about']}" for row in rows if "about" in row.case))
        kept = labelled(rows, kept="{share:g} %")
        for value, title in _FIGURES.items():
            if any(value in row.values for row in rows):
                found.append(pivot(kept, value, across="kept", title=title + suffix, caption=about if value == "kept_pct" else ""))
        dense = {row.case["from"]: row.values["bits_per_byte"] for row in having(results, task="position", tuned=False, share=100.0)}
        positions = [
            replace(row, values={"over_pct": 100 * (row.values["bits_per_byte"] / dense[row.case["from"]] - 1)})
            for row in labelled(having(results, task="position", tuned=is_tuned), **{"positions to": "{to}"})
            if row.name != DENSE and row.case["from"] in dense
        ]
        for share, mine in by(positions, "share"):
            title = f"Loss over dense, %, by position, {share:g} % of the pairs{suffix}"
            found.append(pivot(mine, "over_pct", across="positions to", title=title))
        needles = labelled(having(results, task="needle", tuned=is_tuned), **{"length, depth": "{length:,}, {depth_pct} %"})
        for share, _ in by([row for row in needles if row.name != DENSE], "share"):
            mine = [row for row in needles if row.name == DENSE or row.case["share"] == share]
            title = f"Hidden keys: digits found, %, {share:g} % of the pairs{suffix}"
            found.append(pivot(mine, "digits_pct", across="length, depth", title=title, caption=_GUESS))
    return [*found, *failures(results)]


def _loss(rows: Sequence[Row], base: Row, title: str) -> Table:
    shares = sorted({row.case["share"] for row in rows if row.name != DENSE}, reverse=True)
    cells = {(row.name, row.case["share"]): "{:+.2f} ± {:.2f}".format(*over(row, base)) for row in rows if row.values and row is not base}
    names = dict.fromkeys(name for name, _ in cells)
    # dense attention has one figure, at every share
    body = [[name, *(cells.get((name, 100.0 if name == DENSE else share), "–") for share in shares)] for name in names]
    notes = dict.fromkeys(f"{row.name}: {row.note}" for row in rows if row.note)
    passages = sum(key.startswith("passage_") for key in base.values)
    caption = (
        f"{passages} passages of {base.case['N']:,} tokens, second half; dense {figure(base.values['bits_per_byte'])} bits/byte; "
        f"± standard error over passages; {_EQUAL}"
    )
    return Table(title, ["method", *(f"{share:g} %" for share in shares)], body, "\n".join([caption, *notes]))


def draw(results: Results, path: Path) -> None:
    """Draws the loss over dense attention by the share of the pairs, a line for each method. Needs matplotlib."""
    from matplotlib.figure import Figure

    base = dense_row(results, False)
    assert base is not None, "the caller asks dense_row first"
    # pyplot would open a window's backend and keep every figure
    picture = Figure(figsize=(9, 5), layout="constrained")
    axes = picture.add_subplot(xlabel="kept pairs, %", ylabel="loss over dense, %", xscale="log", yscale="log")
    axes.grid(True, alpha=0.25)
    rows = [row for row in having(results, task="loss", tuned=False) if row.values and row.name != DENSE]
    for mark, name in zip(itertools.cycle("osD^vP*X<>hd"), dict.fromkeys(row.name for row in rows), strict=False):
        mine = sorted((row for row in rows if row.name == name), key=lambda row: row.case["share"])
        losses = [over(row, base) for row in mine]
        y, low, high = ([max(_LEAST, x + (sign * error if sign else 0)) for x, error in losses] for sign in (0, -1, 1))
        x = [row.case["share"] for row in mine]
        (line,) = axes.plot(x, y, marker=mark, label=name)
        # the standard error over passages; a single passage has none
        axes.fill_between(x, low, high, color=line.get_color(), alpha=0.12, linewidth=0)
    picture.legend(frameon=False, loc="outside right upper")
    with replacing(path) as new:
        picture.savefig(new, format="png", dpi=110, metadata={"Software": None})
