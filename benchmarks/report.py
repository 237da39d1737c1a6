"""Rows of measurements: one JSON file a suite, a Markdown table beside it, and what got slower since an earlier run."""

from __future__ import annotations

import datetime
import functools
import importlib.metadata
import io
import json
import platform
import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

import dilated_attention
from dilated_attention.files import replacing

SCHEMA = 1
# contenders of other people by the first word of their names: a busy machine slows them, too
FOREIGN = ("torch", "torchscale", "fa4", "flex")
_PACKAGES = ("triton", "flash-attn-4", "flash-attn", "transformers")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One contender in one case."""

    name: str
    # what identifies the case in addition to the name: {"N": 8192, "B": 8, "pass": "forward"}
    case: dict[str, Any]
    # times in milliseconds, "…_bytes", "tflops", "tokens_per_s"
    values: dict[str, float] = field(default_factory=dict)
    # relative, against float64
    errors: dict[str, float] = field(default_factory=dict)
    # why figures are missing: "out of memory", "wrong: …", the reason of a refusal
    note: str = ""

    def as_dict(self) -> dict[str, Any]:
        row: dict[str, Any] = {"name": self.name, "case": self.case}
        for key in ("values", "errors"):
            if figures := getattr(self, key):
                row[key] = {name: x if isinstance(x, int) else float(f"{x:.5g}") for name, x in figures.items()}
        return row | ({"note": self.note} if self.note else {})


# rows that are measured together, in turns, under a label
Group = tuple[str, Callable[[], Iterable[Row]]]


def machine(device: torch.device) -> dict[str, Any]:
    """Returns hardware, versions and date."""
    hardware: dict[str, Any] = {"device": platform.processor() or platform.machine(), "threads": torch.get_num_threads()}
    if device.type == "cuda":
        card = torch.cuda.get_device_properties(device)
        hardware = {"device": card.name, "memory_bytes": card.total_memory, "capability": f"{card.major}.{card.minor}"}
    elif (cpuinfo := Path("/proc/cpuinfo")).is_file() and (name := re.search(r"model name\s*: (.+)", cpuinfo.read_text(encoding="utf-8"))):
        hardware["device"] = name[1]
    versions = {"dilated_attention": dilated_attention.__version__, "torch": torch.__version__, "python": platform.python_version()}
    versions |= {"cuda": str(torch.version.cuda), "cudnn": str(torch.backends.cudnn.version())} if device.type == "cuda" else {}
    installed = {each.metadata["Name"]: each.version for each in importlib.metadata.distributions()}
    versions |= {name: installed[name] for name in _PACKAGES if name in installed}
    today = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d")
    return {"date": today, "hardware": hardware, "versions": versions}


@dataclass
class Results:
    """Groups of rows of one suite, in ``<suite>.json`` of a run's folder."""

    suite: str
    machine: dict[str, Any]
    groups: dict[str, list[Row]] = field(default_factory=dict)
    path: Path | None = None

    @classmethod
    def load(cls, path: Path) -> Results:
        """Reads a file. Raises ValueError where it is not a result of this schema."""
        try:
            stored = json.loads(path.read_text(encoding="utf-8"))
            if stored["schema"] != SCHEMA:
                raise ValueError(f"schema {stored['schema']}")
            groups = {label: [Row(**row) for row in rows] for label, rows in stored["groups"].items()}
            return cls(stored["suite"], stored["machine"], groups, path)
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is no result of a suite ({error}); give the folder of an earlier run") from error

    @property
    def rows(self) -> list[Row]:
        return [row for rows in self.groups.values() for row in rows]

    def add(self, label: str, rows: Iterable[Row]) -> None:
        """Adds a group and writes the file, one row a line; a reader sees the old file or the new one."""
        self.groups[label] = list(rows)
        if self.path is None:
            return
        head = {"schema": SCHEMA, "suite": self.suite, "machine": self.machine}
        write = functools.partial(json.dumps, ensure_ascii=False)
        lines = "\n".join(f" {write(key)}: {write(value)}," for key, value in head.items())
        bodies = {name: ",\n".join("   " + write(row.as_dict()) for row in group) for name, group in self.groups.items()}
        groups = ",\n".join(f"  {write(name)}: [\n{body}\n  ]" for name, body in bodies.items())
        self._write(self.path, f'{{\n{lines}\n "groups": {{\n{groups}\n }}\n}}\n')

    def _write(self, path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as new:
            new.write_text(text, encoding="utf-8")

    def report(self, command: str) -> str:
        """Returns the tables as Markdown, and writes them beside the file."""
        hardware, versions = self.machine["hardware"], self.machine["versions"]
        about = [hardware["device"], *(f"{name} {version}" for name, version in versions.items() if name != "dilated_attention")]
        parts = [f"## {self.suite}", " · ".join([*about, self.machine["date"]]), f"`{command}`", *tables(self.rows)]
        text = "\n\n".join(parts) + "\n"
        if self.path is not None:
            self._write(self.path.with_suffix(".md"), text)
        return text


def tables(rows: Sequence[Row]) -> Iterator[str]:
    """Yields a Markdown table for each pass or task: a line for each row, a column for each figure and for what differs among them."""
    by_pass: dict[str, list[Row]] = {}
    for row in rows:
        by_pass.setdefault(row.case.get("pass", row.case.get("task", "")), []).append(row)
    for which, mine in by_pass.items():
        keys = dict.fromkeys(key for row in mine for key in row.case if key not in ("pass", "task"))
        differs = [key for key in keys if len({str(row.case.get(key)) for row in mine}) > 1]
        same = ", ".join(f"{key} {mine[0].case[key]}" for key in keys if key not in differs)
        lines = []
        for row in mine:
            line = {"": row.name} | {key: str(row.case.get(key, "–")) for key in differs}
            for key, value in row.values.items():
                name, of, _ = key.partition("_bytes")
                line |= {f"{name}, MiB": figure(value / 2**20)} if of else {key: figure(value)}
            lines.append(line | {f"error of {key}": f"{error:.1e}" for key, error in row.errors.items()})
        heads = list(dict.fromkeys(head for line in sorted(lines, key=len, reverse=True) for head in line))
        heads += ["note"] * any(row.note for row in mine)
        table = Table(box=box.MARKDOWN)
        for i, head in enumerate(heads):
            table.add_column(head, justify="left" if i in (0, len(heads) - 1) else "right", no_wrap=True)
        for line, row in zip(lines, mine, strict=True):
            cells = line | {"note": row.note}
            table.add_row(*(cells.get(head, "–").replace("|", "\\|") for head in heads))
        out = io.StringIO()
        Console(file=out, width=1000, color_system=None, markup=False, highlight=False).print(table)
        text = "\n".join(line.rstrip() for line in out.getvalue().splitlines() if line.strip())
        yield f"**{which or 'results'}**{f' ({same})' if same else ''}\n\n{text}"


def figure(value: float) -> str:
    """Formats three digits, with thousands separators."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def slower(label: str, rows: Iterable[Row], then: Results, threshold: float) -> list[str]:
    """Returns what of this library got slower by more than ``threshold`` since ``then``, or has no time any more, with the figures. By the
    time itself and relative to other people's contenders of the group and pass, since a busy machine slows both."""
    now, before = (
        {(row.name, row.case.get("pass", "")): ms for row in some if (ms := row.values.get("called", row.values.get("ms")))}
        for some in (rows, then.groups.get(label, []))
    )
    factors = {key: now[key] / ms for key, ms in before.items() if key in now}
    lines = []
    for (name, which), ms in before.items():
        if name.split()[0] in FOREIGN:
            continue
        text = f"{label}: {name}, {which}: {figure(ms)} ms then"
        if (factor := factors.get((name, which))) is None:
            lines.append(f"{text}, none now")
            continue
        others = [factor for (other, at), factor in factors.items() if at == which and other.split()[0] in FOREIGN]
        relative = factor / statistics.median(others or [1.0])
        if min(factor, relative) > 1 + threshold:
            lines.append(f"{text}, {figure(now[name, which])} now, {100 * (relative - 1):+.0f} % beside others")
    return lines
