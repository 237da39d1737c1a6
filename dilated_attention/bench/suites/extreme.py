"""The longest sequence that fits, by kind of attention: the suite, its tables and its plots. ``bench/measure/max_length.py`` searches."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence
from typing import Any

from dilated_attention.bench.measure.max_length import KINDS, Limits, search
from dilated_attention.bench.report.plots import Line, Plot
from dilated_attention.bench.report.rows import Results, Row
from dilated_attention.bench.report.tables import Table, figure
from dilated_attention.bench.suite import Group, Session, Suite
from dilated_attention.bench.workloads.problem import Problem
from dilated_attention.parsing import UsageError, size

PASSES = ("forward", "both")


class Extreme(Suite):
    """Finds the longest sequence that one device can handle, by kind of attention."""

    name = "extreme"
    about = "the longest sequence that fits: tokens, bytes per token, throughput, by doubling until memory runs out"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
        parser.add_argument("--passes", nargs="+", choices=PASSES, default=list(PASSES), help="both: forward and backward")
        parser.add_argument("--heads", type=size, default=8, help="default: 8")
        parser.add_argument("--head-dim", type=size, default=64, help="default: 64")
        parser.add_argument("--causal", action="store_true")
        parser.add_argument("--first", type=size, help="length to begin with; default: 256k on a GPU, 1k on a CPU")
        parser.add_argument("--most", type=size, default=2**30, help="length to end at; default: 1G")
        parser.add_argument(
            "--memory-gib", type=float, help="memory to fill; default: the GPU's, 0.125 on a CPU, where each length runs in its own process"
        )
        parser.add_argument("--limit", type=float, help="seconds of one call beyond which a search ends; default: 10 on a GPU, 3 on a CPU")
        parser.add_argument("--steps", type=int, help="of bisection, after memory has run out; default: 4 on a GPU, 2 on a CPU")

    def settings(self, session: Session) -> dict[str, Any]:
        options, limits = session.options, self.limits(session)
        shape = {
            "heads": options.heads,
            "head_dim": options.head_dim,
            "causal": options.causal,
            "dtype": str(session.dtype).removeprefix("torch."),
        }
        ends = {
            "first": self.first(session),
            "most": options.most,
            "memory_gib": options.memory_gib,
            "limit": limits.seconds,
            "steps": limits.steps,
        }
        return super().settings(session) | shape | ends

    def first(self, session: Session) -> int:
        return session.options.first or (2**18 if session.full else 2**10)

    def limits(self, session: Session) -> Limits:
        options = session.options
        on_gpu = session.device.type == "cuda"
        gib = options.memory_gib if options.memory_gib is not None else None if on_gpu else 0.125
        if gib is not None and gib <= 0:
            raise UsageError(f"--memory-gib is {gib:g}; expected more than 0")
        seconds = options.limit if options.limit is not None else 10.0 if on_gpu else 3.0
        steps = options.steps if options.steps is not None else 4 if session.full else 2
        return Limits(None if gib is None else int(gib * 2**30), seconds, options.most, steps)

    def groups(self, session: Session) -> Sequence[Group]:
        options, limits = session.options, self.limits(session)
        segment = 2048 if session.full else 512
        return [
            Group(f"{name} {which}", functools.partial(search, KINDS[name], which, self._problem(session), segment, limits))
            for name in options.kinds
            for which in options.passes
        ]

    def _problem(self, session: Session) -> Problem:
        options = session.options
        return Problem(num_positions=self.first(session), num_heads=options.heads, head_dim=options.head_dim, dtype=session.dtype,
                       device=session.device, is_causal=options.causal)  # fmt: skip

    def tables(self, results: Results) -> list[Table]:
        columns = ("", "pass", "tokens", "bytes per token", "GiB", "seconds", "M tokens/s", "ended by")
        rows = []
        for (name, which), tried in _searches(results).items():
            fits = [row for row in tried if row.values.get("ms")]
            if not fits:
                rows.append([name, which, "–", "–", "–", "–", "–", tried[-1].note])
                continue
            longest = max(fits, key=lambda row: row.case["N"])
            v = longest.values
            cells = [f"{longest.case['N']:,}", figure(v["bytes_per_token"]), figure(v["peak_bytes"] / 2**30), figure(v["ms"] / 1000)]
            rows.append([name, which, *cells, figure(v["tokens_per_s"] / 1e6), _ending(tried, longest)])
        held = results.settings
        shape = (
            f"{held['heads']} head{'s' * (held['heads'] > 1)} of {held['head_dim']}, {held['dtype']}, "
            f"{'causal' if held['causal'] else 'full'}"
        )
        caption = (
            f"One sequence of {shape}. Bytes are the peak of the call, inputs and results included. Sampled rows of every length "
            "are checked against float64."
        )
        longest_table = Table("longest sequence", columns, rows, caption)
        return [longest_table, *self._tried(results)]

    def _tried(self, results: Results) -> list[Table]:
        """Returns tables of every length of every search, in the order tried."""
        rows = []
        for (name, which), tried in _searches(results).items():
            for row in tried:
                v = row.values
                worst = max(row.errors.values(), default=None)
                cells = [
                    figure(v[key] / by) if key in v else "–" for key, by in (("ms", 1000), ("bytes_per_token", 1), ("tokens_per_s", 1e6))
                ]
                cells += ["–" if worst is None else figure(worst), row.note or "fits"]
                rows.append([f"{name} {which}", f"{row.case['N']:,}", *cells])
        columns = ("", "tokens", "seconds", "bytes per token", "M tokens/s", "largest error", "")
        return [Table("lengths tried", columns, rows, "Errors: relative of out and gradients, absolute of lse.")]

    def plots(self, results: Results) -> list[Plot]:
        memory, speed = [], []
        for (name, which), tried in _searches(results).items():
            fits = sorted((row for row in tried if row.values.get("ms")), key=lambda row: row.case["N"])
            if fits:
                label, lengths = f"{name}, {_PASS[which]}", [row.case["N"] for row in fits]
                memory.append(Line(label, lengths, [row.values["bytes_per_token"] for row in fits]))
                speed.append(Line(label, lengths, [row.values["tokens_per_s"] for row in fits]))
        if not memory:
            return []
        return [
            Plot(name="memory", title="Peak memory of one call, to the longest that fits", x_label="tokens", y_label="bytes per token",
                 lines=memory, log_x=True),
            Plot(name="throughput", title="Throughput, to the longest that fits", x_label="tokens", y_label="tokens per second",
                 lines=speed, log_x=True, log_y=True),
        ]  # fmt: skip


_PASS = {"forward": "forward", "both": "forward and backward"}


def _searches(results: Results) -> dict[tuple[str, str], list[Row]]:
    found: dict[tuple[str, str], list[Row]] = {}
    for row in results.rows:
        if "pass" in row.case:
            found.setdefault((row.name, row.case["pass"]), []).append(row)
    return found


def _ending(tried: Sequence[Row], longest: Row) -> str:
    beyond = [row for row in tried if row.case["N"] > longest.case["N"]]
    if not beyond:
        return "--most"
    nearest = min(beyond, key=lambda row: row.case["N"])
    return f"{nearest.note} at {nearest.case['N']:,}"
