"""Tables and plots of suite ``quality``, created from its rows alone."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from dilated_attention.bench.report.plots import Line, Plot, lines_of
from dilated_attention.bench.report.rows import Results, Row
from dilated_attention.bench.report.tables import Table, figure, pivot
from dilated_attention.bench.report.views import by, failures, having, labelled, plotted

# the name of the rows that others are compared with
DENSE = "dense"
# % over dense that a logarithmic axis begins with
_LEAST = 0.01
_EQUAL = "every pattern of a column keeps the same share of dense attention's causal pairs; a pair of several branches counts in each"
_FIGURES = {
    "kept_pct": "Kept pairs, % of dense causal attention",
    "us_per_token": "Time of a forward without output layer, µs a token",
    "bits_per_byte": "Loss, bits a byte",
    "tuning_tokens": "Tuning, tokens",
}


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


def _dense(results: Results, is_tuned: bool) -> Row | None:
    return next((row for row in having(results, task="loss", tuned=is_tuned) if row.name == DENSE and row.values), None)


def tables(results: Results) -> list[Table]:
    found = []
    untuned = _dense(results, False)
    for is_tuned, rows in by(having(results, task="loss"), "tuned"):
        suffix, dense = ", tuned" if is_tuned else "", _dense(results, is_tuned)
        if untuned is not None:
            found.append(_loss(rows, untuned, f"Loss over dense, %{suffix}"))
        if is_tuned and dense is not None:
            found.append(_loss(rows, dense, "Loss over dense that was tuned as long, %, tuned"))
        about = "; ".join(dict.fromkeys(f"{row.name}: {row.case['about']}" for row in rows if "about" in row.case))
        kept = labelled(rows, kept="{share:g} %")
        for value, title in _FIGURES.items():
            if any(value in row.values for row in rows):
                found.append(pivot(kept, value, across="kept", title=title + suffix, caption=about if value == "kept_pct" else ""))
        for share, mine in by(labelled(_positions(results, is_tuned), **{"positions to": "{to}"}), "share"):
            title = f"Loss over dense, %, by position, {share:g} % of the pairs{suffix}"
            found.append(pivot(mine, "over_pct", across="positions to", title=title))
        needles = labelled(having(results, task="needle", tuned=is_tuned), **{"length, depth": "{length:,}, {depth_pct} %"})
        caption = "digits of a hidden key that are the likeliest token after the right ones before them; a guess at one digit finds 10 %"
        for share, _ in by([row for row in needles if row.name != DENSE], "share"):
            mine = [row for row in needles if row.name == DENSE or row.case["share"] == share]
            title = f"Hidden keys: digits found, %, {share:g} % of the pairs{suffix}"
            found.append(pivot(mine, "digits_pct", across="length, depth", title=title, caption=caption))
    return [*found, *failures(results)]


def _loss(rows: Sequence[Row], base: Row, title: str) -> Table:
    shares = sorted({row.case["share"] for row in rows if row.name != DENSE}, reverse=True)
    cells = {(row.name, row.case["share"]): _cell(row, base) for row in rows if row.values and row is not base}
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


def _cell(row: Row, base: Row) -> str:
    percent, error = over(row, base)
    return f"{percent:+.2f}" + ("" if math.isnan(error) else f" ± {error:.2f}")


def _positions(results: Results, is_tuned: bool) -> list[Row]:
    """Returns the rows by position with ``over_pct``: the loss over dense attention of the model as it was, at these positions."""
    dense = {row.case["from"]: row.values["bits_per_byte"] for row in having(results, task="position", tuned=False) if row.name == DENSE}
    return [
        replace(row, values={"over_pct": 100 * (row.values["bits_per_byte"] / dense[row.case["from"]] - 1)})
        for row in having(results, task="position", tuned=is_tuned)
        if row.name != DENSE and row.case["from"] in dense
    ]


def plots(results: Results) -> list[Plot]:
    found: list[Plot] = []
    untuned = _dense(results, False)
    for is_tuned, rows in by(having(results, task="loss"), "tuned"):
        slug, suffix = ("-tuned", ", tuned") if is_tuned else ("", "")
        label = f"loss over dense, %{suffix}"
        lines, times = [], []
        for name in dict.fromkeys(row.name for row in rows if row.values and row.name != DENSE and untuned is not None):
            assert untuned is not None
            mine = sorted((row for row in rows if row.name == name and row.values), key=lambda row: row.case["share"])
            figures = [over(row, untuned) for row in mine]
            y, low, high = ([max(_LEAST, x + sign * (error if sign else 0)) for x, error in figures] for sign in (0, -1, 1))
            shaded = (None, None) if any(math.isnan(error) for _, error in figures) else (low, high)
            lines.append(Line(name, [row.case["share"] for row in mine], y, *shaded))
            times.append(Line(name, [row.values["us_per_token"] for row in mine], y))
        note = f"what is below {_LEAST} % is drawn there; shaded: standard error over passages; {_EQUAL}"
        style: dict[str, Any] = {"y_label": label, "log_y": True, "note": note}
        title = f"Loss over dense by share of the pairs{suffix}"
        if lines:
            found.append(Plot(name=f"loss{slug}", title=title, x_label="kept pairs, %", lines=lines, log_x=True, **style))
            title = f"Loss over dense by time of a forward{suffix}"
            found.append(Plot(name=f"time{slug}", title=title, x_label="µs a token", lines=times, **style))
        for share, mine in by(_positions(results, is_tuned), "share"):
            bounded = [replace(row, values={"over_pct": max(_LEAST, row.values["over_pct"])}) for row in mine]
            what = {"name": f"position{slug}-{share:g}", "title": f"Loss over dense by position, {share:g} % of the pairs{suffix}"}
            found += plotted(lines_of(bounded, "over_pct", across="to"), x_label="positions to", **style, **what)
        found += _needles(results, is_tuned, slug, suffix)
    return found


def _needles(results: Results, is_tuned: bool, slug: str, suffix: str) -> list[Plot]:
    """Returns plots of the digits found by method and depth, the mean over lengths, one for each share of the pairs."""
    rows = [row for row in having(results, task="needle", tuned=is_tuned) if row.values]
    found = []
    for share, _ in by([row for row in rows if row.name != DENSE], "share"):
        chosen = [row for row in rows if row.name == DENSE or row.case["share"] == share]
        names, bars = list(dict.fromkeys(row.name for row in chosen)), []
        for depth, mine in by(chosen, "depth_pct"):
            percents = [statistics.mean([row.values["digits_pct"] for row in mine if row.name == name]) for name in names]
            bars.append(Line(f"at {depth} %", range(len(names)), percents))
        title = f"Hidden keys: digits found by depth, {share:g} % of the pairs{suffix}"
        style: dict[str, Any] = {"x_label": "", "y_label": "digits found, %", "note": "mean over lengths; a guess at one digit finds 10 %"}
        found.append(Plot(name=f"needle{slug}-{share:g}", title=title, lines=bars, bars=names, **style))
    return found
