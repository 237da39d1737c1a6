"""The results of compare_attention.py as a Markdown table and as pictures."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

# data, context, the length of the training, tokens a step, and layers
Group = tuple[str, int, str, int, int]
Results = dict[Group, list[dict[str, Any]]]


def results(folder: Path) -> Results:
    """The runs of a folder that can be compared, the best first."""
    groups: Results = defaultdict(list)
    for path in sorted(folder.glob("*.json")):
        run = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(run, dict) and "curve" in run:
            flags = run["settings"]
            length = next((f"{flags[name]:g} {name}" for name in ("steps", "seconds", "minutes") if name in flags), "")
            groups[flags["data"], flags["context"], length, flags["tokens"], flags["layers"]].append(run)
    if not groups:
        raise ValueError(f"--table {folder} holds no results; give the folder in which --out's .json files are")
    return {key: sorted(runs, key=lambda run: float(run["bits"])) for key, runs in sorted(groups.items())}


def name_of(run: dict[str, Any]) -> str:
    """The attention, where sequences began shorter, and a base of the rotation that is not 500,000."""
    first, base = run["settings"].get("first_context"), run.get("rotary_base", 500_000)
    name = run["settings"]["attention"] + (f", from {first:,}" if first else "")
    return name if base == 500_000 else f"{name}, base {base / 1e6:g}M"


def at_tokens(run: dict[str, Any], tokens: float) -> float:
    """Held-out bits after so many tokens, by a straight line between two evaluations."""
    before = None
    for _, count, bits in run["curve"]:
        if count >= tokens:
            if before is None or count == before[0]:
                return float(bits)
            share = (tokens - before[0]) / (count - before[0])
            return float(before[1] + share * (bits - before[1]))
        before = count, bits
    return math.nan


def mean_beyond(rows: list[list[float]], low: float) -> float:
    """Mean bits of the bins from ``low`` on."""
    chosen = [row for row in rows if row[0] >= low]
    return sum(row[2] * row[3] for row in chosen) / max(1, sum(row[2] for row in chosen)) if chosen else math.nan


def table(folder: Path) -> str:
    lines = []
    for (data, context, length, tokens, _), runs in results(folder).items():
        fewest = min(run["tokens"] for run in runs)
        far = context // 4
        lines += [
            f"{data}, context {context:,}, {length} of training each, {', '.join(sorted({run['device'] for run in runs}))}, "
            f"{tokens:,} tokens a step.",
            f"At {fewest:,} tokens a run that has more is in the midst of its schedule, at a high learning rate.",
            "",
            f"| attention | lr | seed | bits | bits at {fewest / 1e6:,.0f} M tokens | copied ≥ {far:,} back | needle | tokens/s | GiB |",
            "|---|---|---|---|---|---|---|---|---|",
        ]
        for run in runs:
            flags, needle = run["settings"], run.get("needle", [[0, 0, math.nan]])[-1][2]
            lines.append(
                f"| {name_of(run)} | {flags['lr']:g} | {flags['seed']} | {run['bits']:.4f} | {at_tokens(run, fewest):.4f} | "
                f"{mean_beyond(run['by_copy'], far):.3f} | {needle:.2f} | {run['tokens_per_second']:,.0f} | {run['peak_gib']:.1f} |"
            )
        lines.append("")
    return "\n".join(lines)


def frequent_bins(rows: list[list[float]]) -> list[tuple[float, float]]:
    """(lower end, bits) of the bins that have one token in 500 or more: fewer are noise."""
    total = sum(row[2] for row in rows)
    return [(row[0], row[3]) for row in rows if row[0] and row[2] * 500 >= total]


def pictures(folder: Path, into: Path) -> int:
    """Draws loss over time, loss by position and loss by distance of a copy, of the best run of each attention."""
    from matplotlib.figure import Figure

    into.mkdir(parents=True, exist_ok=True)
    for (data, context, duration, tokens, layers), runs in results(folder).items():
        best = list({name_of(run): run for run in reversed(runs)}.values())[::-1]
        curves = {
            "time": ("seconds of training", lambda run: [(seconds, bits) for seconds, _, bits in run["curve"]]),
            "position": ("position in the context", lambda run: frequent_bins(run["by_position"])),
            "copy": ("how far back the 24 symbols before stand last", lambda run: frequent_bins(run["by_copy"])),
        }
        for name, (label, points) in curves.items():
            if not any(map(points, best)):
                continue
            figure = Figure(figsize=(7, 4.5), layout="constrained")
            axes = figure.subplots()
            for i, run in enumerate(run for run in best if points(run)):
                axes.plot(*zip(*points(run), strict=True), ("o-", "s--", "^:")[i // 10 % 3], ms=3, lw=1, label=name_of(run))
            if name == "time":
                last = [run["curve"][-1][2] for run in best]
                # the first evaluations are far above the rest, and would press it together
                axes.set_ylim(min(last) * 0.98, min(last) * 1.5)
            else:
                axes.set_xscale("log", base=2)
            axes.set(xlabel=label, ylabel="held-out bits", title=f"{data}, context {context:,}")
            axes.legend(fontsize="small")
            path = into / f"compare-{data}-{context}-{duration.replace(' ', '-')}-{tokens}-{layers}-{name}.png"
            figure.savefig(path, dpi=110)
            print(path)
    return 0
