"""Tables and plots of suite ``quality``, created from its rows alone."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import replace

from dilated_attention.bench.report.plots import Line, Plot
from dilated_attention.bench.report.rows import Results, Row
from dilated_attention.bench.report.tables import Table, figure, pivot

# the name of the rows that others are compared with
DENSE = "dense"
# % over dense that a logarithmic axis begins with
_LEAST = 0.01
_EQUAL = "every pattern of a column keeps the same share of dense attention's causal pairs; a pair of several branches counts in each"


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


def _of(results: Results, task: str, is_tuned: bool) -> list[Row]:
    return [row for row in results.rows if row.case.get("task") == task and row.case["tuned"] == is_tuned]


def _dense(rows: Iterable[Row]) -> Row | None:
    return next((row for row in rows if row.name == DENSE and row.values), None)


def _kept(row: Row) -> Row:
    return replace(row, case=row.case | {"kept": f"{row.case['share']:g} %"})


def _shares(rows: Iterable[Row]) -> list[float]:
    return sorted({row.case["share"] for row in rows if row.name != DENSE}, reverse=True)


def _tunings(results: Results) -> list[bool]:
    return sorted({row.case["tuned"] for row in results.rows if "tuned" in row.case})


def _lengths(rows: Iterable[Row]) -> str:
    return ", ".join(f"{n:,}" for n in dict.fromkeys(row.case["N"] for row in rows))


def tables(results: Results) -> list[Table]:
    found = []
    untuned = _dense(_of(results, "loss", False))
    for is_tuned in _tunings(results):
        rows, suffix = _of(results, "loss", is_tuned), ", tuned" if is_tuned else ""
        dense = _dense(rows)
        if untuned is not None:
            found.append(_loss(rows, untuned, f"Loss over dense, %{suffix}"))
        if is_tuned and dense is not None:
            found.append(_loss(rows, dense, "Loss over dense that was tuned as long, %, tuned"))
        about = "; ".join(dict.fromkeys(f"{row.name}: {row.case['about']}" for row in rows if "about" in row.case))
        kept = [_kept(row) for row in rows]
        found.append(pivot(kept, "kept_pct", across="kept", title=f"Kept pairs, % of dense causal attention{suffix}", caption=about))
        found.append(pivot(kept, "us_per_token", across="kept", title=f"Time of a forward without output layer, µs a token{suffix}"))
        found.append(pivot(kept, "bits_per_byte", across="kept", title=f"Loss, bits a byte{suffix}"))
        if is_tuned:
            found.append(pivot(kept, "tuning_tokens", across="kept", title="Tuning, million tokens", scale=1e-6))
        found += _by_position(results, is_tuned, suffix) + _needles(results, is_tuned, suffix)
    failed = [row for row in results.rows if "tuned" not in row.case]
    if failed:
        found.append(Table("Groups that failed", ("group", "why"), [(row.case.get("group", row.name), row.note) for row in failed]))
    return found


def _loss(rows: Sequence[Row], base: Row, title: str) -> Table:
    shares, by_place = _shares(rows), {(row.name, row.case["share"]): row for row in rows}
    body = []
    dense = _dense(rows)
    for name in dict.fromkeys(row.name for row in rows if row.name != DENSE):
        cells = [by_place.get((name, share)) for share in shares]
        body.append([name, *("–" if row is None or not row.values else _cell(row, base) for row in cells)])
    if dense is not None and dense is not base:
        body.insert(0, [DENSE, *[_cell(dense, base)] * len(shares)])
    notes = dict.fromkeys(f"{row.name}: {row.note}" for row in rows if row.note)
    passages = sum(key.startswith("passage_") for key in base.values)
    caption = (
        f"{passages} passages of {_lengths(rows)} tokens, second half; dense {figure(base.values['bits_per_byte'])} bits/byte; "
        f"± standard error over passages; {_EQUAL}"
    )
    return Table(title, ["method", *(f"{share:g} %" for share in shares)], body, "\n".join([caption, *notes]))


def _cell(row: Row, base: Row) -> str:
    percent, error = over(row, base)
    return f"{percent:+.2f}" + ("" if math.isnan(error) else f" ± {error:.2f}")


def _positions(results: Results, is_tuned: bool, share: float) -> list[Row]:
    """Returns the rows by position with ``over_pct``: the loss over dense attention of the model as it was, at these positions."""
    dense = {row.case["from"]: row.values["bits_per_byte"] for row in _of(results, "position", False) if row.name == DENSE}
    return [
        replace(row, values=row.values | {"over_pct": 100 * (row.values["bits_per_byte"] / dense[row.case["from"]] - 1)})
        for row in _of(results, "position", is_tuned)
        if row.case["share"] == share and row.case["from"] in dense
    ]


def _by_position(results: Results, is_tuned: bool, suffix: str) -> list[Table]:
    found = []
    for share in _shares(_of(results, "position", is_tuned)):
        rows = [replace(row, case=row.case | {"positions to": row.case["to"]}) for row in _positions(results, is_tuned, share)]
        title = f"Loss over dense, %, by position, {share:g} % of the pairs{suffix}"
        found.append(pivot(rows, "over_pct", across="positions to", title=title))
    return found


def _needles(results: Results, is_tuned: bool, suffix: str) -> list[Table]:
    # a method that was refused at a length has no depth, and its note comes below the table
    rows = [
        replace(row, case=row.case | {"length, depth": f"{row.case['length']:,}, {row.case['depth_pct']} %"}) if row.values else row
        for row in _of(results, "needle", is_tuned)
    ]
    found = []
    caption = "digits of a hidden key that are the likeliest token after the right ones before them; a guess at one digit finds 10 %"
    for share in _shares(rows):
        title = f"Hidden keys: digits found, %, {share:g} % of the pairs{suffix}"
        chosen = [row for row in rows if row.name == DENSE or row.case["share"] == share]
        found.append(pivot(chosen, "digits_pct", across="length, depth", title=title, caption=caption))
    return found


def plots(results: Results) -> list[Plot]:
    found: list[Plot] = []
    untuned = _dense(_of(results, "loss", False))
    for is_tuned in _tunings(results):
        rows = [row for row in _of(results, "loss", is_tuned) if row.values and row.name != DENSE]
        slug, suffix = ("-tuned", ", tuned") if is_tuned else ("", "")
        if untuned is not None and rows:
            found += _by_share(rows, untuned, slug, suffix)
        for share in _shares(rows):
            found += _of_share(results, is_tuned, share, f"{slug}-{share:g}", f"{share:g} % of the pairs{suffix}")
    return found


def _by_share(rows: Sequence[Row], dense: Row, slug: str, suffix: str) -> list[Plot]:
    """Plots the loss over the share of pairs, and over the time."""
    lines, times = [], []
    for name in dict.fromkeys(row.name for row in rows):
        mine = sorted((row for row in rows if row.name == name), key=lambda row: row.case["share"])
        figures = [over(row, dense) for row in mine]
        y, low, high = ([max(_LEAST, x + sign * (error if sign else 0)) for x, error in figures] for sign in (0, -1, 1))
        spread = (None, None) if any(math.isnan(error) for _, error in figures) else (low, high)
        lines.append(Line(name, [row.case["share"] for row in mine], y, *spread))
        times.append(Line(name, [row.values["us_per_token"] for row in mine], y))
    note = f"{_lengths(rows)} tokens; what is below {_LEAST} % is drawn there; shaded: standard error over passages; {_EQUAL}"
    label = f"loss over dense, %{suffix}"
    title = f"Loss over dense by share of the pairs{suffix}"
    shares = Plot(name=f"loss{slug}", title=title, x_label="kept pairs, %", y_label=label, lines=lines, log_x=True, log_y=True, note=note)
    note = f"dense: {figure(dense.values['us_per_token'])} µs a token; each line is a method, its points the shares of the pairs"
    title = f"Loss over dense by time of a forward{suffix}"
    time = Plot(name=f"time{slug}", title=title, x_label="µs a token", y_label=label, lines=times, log_y=True, note=note)
    return [shares, time]


def _of_share(results: Results, is_tuned: bool, share: float, slug: str, what: str) -> list[Plot]:
    """Plots the loss by position and the found keys of all methods that keep one share of the pairs."""
    rows = _positions(results, is_tuned, share)
    lines = []
    for name in dict.fromkeys(row.name for row in rows):
        mine = [row for row in rows if row.name == name]
        lines.append(Line(name, [row.case["to"] for row in mine], [max(_LEAST, row.values["over_pct"]) for row in mine]))
    found = []
    if lines:
        title = f"Loss over dense by position, {what}"
        found.append(
            Plot(name=f"position{slug}", title=title, x_label="positions to", y_label="loss over dense, %", lines=lines, log_y=True)
        )
    needles = [row for row in _of(results, "needle", is_tuned) if row.values and (row.name == DENSE or row.case["share"] == share)]
    names, bars = list(dict.fromkeys(row.name for row in needles)), []
    for depth in dict.fromkeys(row.case["depth_pct"] for row in needles):
        percents = [
            statistics.mean([row.values["digits_pct"] for row in needles if (row.name, row.case["depth_pct"]) == (name, depth)])
            for name in names
        ]
        bars.append(Line(f"at {depth} %", list(range(len(names))), percents))
    if bars:
        note = "mean over lengths; a guess at one digit finds 10 %"
        title = f"Hidden keys: digits found by depth, {what}"
        found.append(Plot(name=f"needle{slug}", title=title, x_label="", y_label="digits found, %", lines=bars, bars=names, note=note))
    return found
