"""Tables and plots of ``train-infer``, created from its rows alone."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import replace

from dilated_attention.bench.report.plots import Line, Plot
from dilated_attention.bench.report.rows import Results, Row
from dilated_attention.bench.report.tables import Table, pivot

PLACE = "requests × positions"
GENERATING = {"prefill": "reading a prompt", "decode": "writing after a prompt"}


def models(rows: Iterable[Row]) -> list[str]:
    return list(dict.fromkeys(row.case["model"] for row in rows if "model" in row.case))


def tables(results: Results) -> list[Table]:
    found = []
    for model in models(results.rows):
        rows = _of(results, model, "train")
        if rows:
            rate = functools.partial(pivot, rows, across="N", baseline="dense", more_is_better=True)
            found.append(
                rate(
                    "samples_per_s", title=f"{model}: training, sequences per second by positions", caption=f"{_how(rows)}; {_kinds(rows)}"
                )
            )
            what = "counts what the model needs, not what is recomputed for the backward"
            found.append(rate("tflops", title=f"{model}: training, TFLOP/s by positions", caption=what, baseline=None))
        if any("peak_bytes" in row.values for row in rows):
            what = "weights, gradients, the optimiser's moments and activations"
            title = f"{model}: training, peak memory in GiB by positions"
            found.append(pivot(rows, "peak_bytes", across="N", title=title, scale=2.0**-30, caption=what))
        for task, doing in GENERATING.items():
            rows = [_placed(row) for row in _of(results, model, task)]
            if rows:
                title = f"{model}: {doing}, tokens per second over all requests"
                found.append(
                    pivot(
                        rows,
                        "tokens_per_s",
                        across=PLACE,
                        title=title,
                        caption=f"{_where(rows)}; {_kinds(rows)}",
                        baseline="dense",
                        more_is_better=True,
                    )
                )
            if task == "decode" and rows:
                title = f"{model}: keys and values cached, MiB"
                found.append(pivot(rows, "cache_bytes", across=PLACE, title=title, scale=2.0**-20))
    return found


def _placed(row: Row) -> Row:
    """Combines batch and context, for a column heading."""
    if "N" not in row.case:
        return row
    return replace(row, case=row.case | {PLACE: f"{row.case['B']} × {row.case['N']:,}"})


def _of(results: Results, model: str, task: str) -> list[Row]:
    """Returns the rows of a model and task.

    Failures before anything is generated are reported with the prompt, and so is a group that failed as a whole.
    """
    group = f"{'train' if task == 'train' else 'generate'} {model} N="
    with_groups = task != "decode"
    return [
        row
        for row in results.rows
        if (row.case.get("model"), row.case.get("task")) == (model, task) or (with_groups and row.case.get("group", "").startswith(group))
    ]


def _batches(rows: Iterable[Row]) -> list[int]:
    return sorted({row.case["B"] for row in rows if "B" in row.case})


def _where(rows: Iterable[Row]) -> str:
    return ", ".join(dict.fromkeys(row.case["dtype"] for row in rows if "dtype" in row.case))


def _how(rows: Sequence[Row]) -> str:
    """Describes batch, optimiser and what is recomputed, by context."""
    settings = dict.fromkeys(
        (row.case["N"], row.case["B"], row.case["optimizer"], row.case["checkpointed"]) for row in rows if "optimizer" in row.case
    )
    optimisers = list(dict.fromkeys(optimizer for _, _, optimizer, _ in settings))
    batches = ", ".join(f"{batch} × {context:,}" for context, batch, _, _ in sorted(settings))
    again = [f"{context:,}" for context, _, _, checkpointed in sorted(settings) if checkpointed]
    sentences = [
        f"forward, backward and step of {' or '.join(optimisers)}, all in {_where(rows)}; sequences × positions: {batches}",
        f"activations recomputed at {', '.join(again)}" if again else "",
    ]
    return "; ".join(filter(None, sentences))


def _kinds(rows: Sequence[Row]) -> str:
    """Describes the kinds of attention, and the meaning of the figures in brackets."""
    known = dict.fromkeys((row.name, row.case["attention"]) for row in rows if "attention" in row.case)
    return "; ".join([*(f"{name}: {what}" for name, what in known), "(…): over dense"])


def plots(results: Results) -> list[Plot]:
    found = []
    for model in models(results.rows):
        short = model.split(" ")[0]
        rows = _of(results, model, "train")
        found += _plot(f"train-{short}", f"Training {model}", "tokens per second", _lines(rows, "tokens_per_s", spread=True), _how(rows))
        found += _plot(f"train-memory-{short}", f"Peak memory of training {model}", "GiB", _lines(rows, "peak_bytes", 2.0**-30), _how(rows))
        for task, what in GENERATING.items():
            rows = _of(results, model, task)
            lines = [
                line
                for batch in _batches(rows)
                for line in _lines(
                    [row for row in rows if row.case.get("B") == batch], "tokens_per_s", suffix=f", batch {batch}", dashed=batch > 1
                )
            ]
            found += _plot(f"{task}-{short}", f"{model}: {what}", "tokens per second, all requests", lines, "")
    return found


def _plot(name: str, title: str, unit: str, lines: list[Line], note: str) -> list[Plot]:
    if not any(len(line.x) > 1 for line in lines):
        return []
    return [
        Plot(
            name=name,
            title=title,
            x_label="positions of the context",
            y_label=unit,
            lines=lines,
            log_x=True,
            log_y=unit != "GiB",
            note=note,
        )
    ]


def _lines(
    rows: Iterable[Row], value: str, scale: float = 1.0, *, suffix: str = "", dashed: bool = False, spread: bool = False
) -> list[Line]:
    rows = [row for row in rows if value in row.values]
    lines = []
    for name in dict.fromkeys(row.name for row in rows):
        mine = sorted((row for row in rows if row.name == name), key=lambda row: row.case["N"])
        y = [scale * row.values[value] for row in mine]
        # a rate is highest where the time is lowest
        low, high = (
            [rate * row.values["ms"] / row.values[key] for rate, row in zip(y, mine, strict=True)] if spread else None
            for key in ("high_ms", "low_ms")
        )
        lines.append(Line(name + suffix, [row.case["N"] for row in mine], y, low, high, dashed=dashed))
    return lines
