"""Tables and the picture of suite ``quality``, created from its rows alone."""

from __future__ import annotations

import itertools
import math
import statistics
from dataclasses import replace
from pathlib import Path

from dilated_attention.bench.report.rows import Results, Row
from dilated_attention.bench.report.tables import Table, across, by, failures, having, labelled, listing
from dilated_attention.files import replacing

# the name of the rows that others are compared with
DENSE = "dense"
# % over dense that the picture's logarithmic axis begins with
_LEAST = 0.01
_EQUAL = "every pattern of a column keeps the same share of dense attention's causal pairs; a pair of several branches counts in each"
_COLUMNS = {"over dense, %": ("over", 1.0), "±": ("over_error", 1.0),
            "over dense that was tuned as long, %": ("over_tuned", 1.0), "± tuned": ("over_tuned_error", 1.0),
            "kept pairs, %": ("kept_pct", 1.0), "bits a byte": ("bits_per_byte", 1.0), "forward, µs a token": ("us_per_token", 1.0),
            "tuning, tokens": ("tuning_tokens", 1.0)}  # fmt: skip
_NAME = "{name}, {share:g} %"
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
    found = list[Table]()
    for is_tuned, rows in by(having(results, task="loss"), "tuned"):
        suffix, bases = ", tuned" if is_tuned else "", {"over": dense_row(results, False), "over_tuned": dense_row(results, is_tuned)}
        shown = []
        for row in rows:
            figures = {}
            for key, base in bases.items():
                if base is not None and row.values and row is not base:
                    figures[key], figures[f"{key}_error"] = over(row, base)
            shown.append(replace(row, values=row.values | figures))
        about = "; ".join(dict.fromkeys(f"{row.name}: {row.case['about']}" for row in rows if "about" in row.case))
        passages = sum(key.startswith("passage_") for row in rows[:1] for key in row.values)
        caption = f"{passages} passages of {rows[0].case['N']:,} tokens, second half; ± standard error over passages; {_EQUAL}; {about}"
        columns = {head: place for head, place in _COLUMNS.items() if is_tuned or "tuned" not in head}
        found += listing(labelled(shown, _NAME), columns, title=f"Loss over dense{suffix}", caption=caption)
        dense = {row.case["from"]: row.values["bits_per_byte"] for row in having(results, task="position", tuned=False, share=100.0)}
        positions = [
            replace(row, values={"over": 100 * (row.values["bits_per_byte"] / dense[row.case["from"]] - 1)})
            for row in labelled(having(results, task="position", tuned=is_tuned), **{"positions to": "{to}"})
            if row.case["from"] in dense
        ]
        found += across(labelled(positions, _NAME), "positions to", "over", title=f"Loss over dense, %, by position{suffix}")
        needles = labelled(having(results, task="needle", tuned=is_tuned), _NAME, **{"length, depth": "{length:,}, {depth_pct} %"})
        title = f"Hidden keys: digits found, %{suffix}"
        found += across(needles, "length, depth", "digits_pct", title=title, caption=_GUESS)
    return [*found, *failures(results)]


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
