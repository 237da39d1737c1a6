"""Outcomes of a GPU run as JSON and Markdown: passed, failed and skipped by feature and by backend, with reasons."""

from __future__ import annotations

import json
import platform
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.gpu_suite.skips import named


@dataclass(frozen=True)
class Outcome:
    test: str
    outcome: str
    seconds: float
    reason: str = ""
    backend: str = ""

    @property
    def feature(self) -> str:
        return Path(self.test.split("::")[0]).stem.removeprefix("test_").removeprefix("gpu_").replace("_", " ")

    @property
    def problem(self) -> str:
        if self.outcome == "failed":
            return f"failed: {self.test}: {self.reason.splitlines()[0] if self.reason else ''}"
        if self.outcome == "skipped" and named(self.test, self.reason) is None:
            return f"skipped without a named reason: {self.test}: {self.reason}; name it in tests/gpu_suite/skips.py or make it run"
        return ""


def read(log: Path) -> tuple[list[Outcome], list[str]]:
    """(one outcome for each test, tests that were collected and have none)."""
    lines: list[dict[str, Any]] = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    collected = {line["collected"].split("@")[0] for line in lines if "collected" in line}
    reports: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in lines:
        if "test" in line:
            reports[line["test"]].append(line)
    # torn down, or never collected: else it was under way when the run was stopped
    ended = {test: parts for test, parts in reports.items() if parts[-1]["when"] in ("teardown", "collect") or _failed(parts)}
    return [_one(test, parts) for test, parts in ended.items()], sorted((collected | reports.keys()) - ended.keys())


def _failed(reports: Sequence[dict[str, Any]]) -> bool:
    return any(report["outcome"] == "failed" for report in reports)


def _one(test: str, reports: Sequence[dict[str, Any]]) -> Outcome:
    """Setting up, the call and tearing down together: the worst of them, and the time of all."""
    worst = max(reports, key=lambda report: ("passed", "skipped", "failed").index(report["outcome"]))
    about = reports[-1].get("about", {})
    backend = about.get("backend") or about.get("name", "")
    return Outcome(
        test, worst["outcome"], sum(report["seconds"] for report in reports), worst["reason"], backend if backend in _backends() else ""
    )


def _backends() -> frozenset[str]:
    from dilated_attention.backends import registry

    return frozenset(registry.names())


def write(path: Path, outcomes: Sequence[Outcome], troubles: Sequence[str], seconds: dict[str, float]) -> list[str]:
    """The files ``path``.json and ``path``.md; returns what makes the run a failure."""
    problems = [*troubles, *filter(None, (outcome.problem for outcome in outcomes))]
    if not outcomes:
        problems.append("no test was run")
    machine = _machine()
    record = {
        "machine": machine,
        "seconds": {phase: round(value, 1) for phase, value in seconds.items()},
        "counts": Counter(outcome.outcome for outcome in outcomes),
        "problems": problems,
        "tests": [asdict(outcome) for outcome in outcomes],
    }
    path.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")
    lines = [
        f"# GPU tests on {machine['device']}",
        "",
        ", ".join(f"{key} {value}" for key, value in machine.items() if key != "device"),
        "",
    ]
    lines += [summary(outcomes, seconds), ""]
    if problems:
        lines += ["## Problems", "", *(f"- {problem}" for problem in problems), ""]
    path.with_suffix(".md").write_text("\n".join(lines))
    return problems


def _machine() -> dict[str, str]:
    import torch

    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    device = f"{len(names)} × {names[0]}" if names else "no GPU"
    return {"device": device, "torch": torch.__version__, "python": platform.python_version()}


def summary(outcomes: Sequence[Outcome], seconds: dict[str, float]) -> str:
    """Tables in Markdown: by feature, by backend, and the reasons of skips."""
    total = ", ".join(f"{phase} {value:.0f} s" for phase, value in seconds.items())
    parts = [f"{_counts(outcomes)}; {total}", "", *_table("feature", outcomes, lambda outcome: outcome.feature)]
    with_backend = [outcome for outcome in outcomes if outcome.backend]
    if with_backend:
        parts += ["", *_table("backend", with_backend, lambda outcome: outcome.backend)]
    reasons = Counter(
        (outcome.reason, (skip := named(outcome.test, outcome.reason)) and skip.why) for outcome in outcomes if outcome.outcome == "skipped"
    )
    if reasons:
        parts += ["", "| skipped | reason | named as |", "| ---: | --- | --- |"]
        parts += [
            f"| {count} | {reason.splitlines()[0] if reason else ''} | {why or '**not named**'} |"
            for (reason, why), count in reasons.most_common()
        ]
    return "\n".join(parts)


def _counts(outcomes: Sequence[Outcome]) -> str:
    counts = Counter(outcome.outcome for outcome in outcomes)
    return f"{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped"


def _table(title: str, outcomes: Sequence[Outcome], key: Callable[[Outcome], str]) -> list[str]:
    groups: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        groups[key(outcome)].append(outcome)
    lines = [f"| {title} | passed | failed | skipped | seconds |", "| --- | ---: | ---: | ---: | ---: |"]
    for name, group in sorted(groups.items()):
        counts = Counter(outcome.outcome for outcome in group)
        lines.append(
            f"| {name} | {counts['passed']} | {counts['failed']} | {counts['skipped']} | {sum(outcome.seconds for outcome in group):.0f} |"
        )
    return lines
