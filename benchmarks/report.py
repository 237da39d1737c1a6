"""Rows of measurements: one JSON file a suite, a Markdown table beside it, and what got slower since an earlier run."""

from __future__ import annotations

import datetime
import importlib.metadata
import io
import json
import os
import platform
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

import dilated_attention

SCHEMA = 1
_PACKAGES = ("triton", "flash-attn-4", "flash-attn", "transformers")
# figure → (heading, factor), in the order of the columns
FIGURES: dict[str, tuple[str, float]] = {
    "new_ms": ("new length, ms", 1.0),
    "worst_ms": ("worst, ms", 1.0),
    "again_ms": ("again, ms", 1.0),
    "called": ("called, ms", 1.0),
    "host": ("host, ms", 1.0),
    "ms": ("ms", 1.0),
    "times": ("×", 1.0),
    "kernels": ("kernels, ms", 1.0),
    "launches": ("launches", 1.0),
    "graph": ("graph, ms", 1.0),
    "tokens_per_s": ("tokens/s", 1.0),
    "tflops": ("TFLOP/s", 1.0),
    "kernel_share": ("of the kernel, %", 100.0),
    "efficiency": ("efficiency, %", 100.0),
    "imbalance": ("imbalance", 1.0),
    "sent_bytes": ("sends, MiB", 2.0**-20),
    "received_bytes": ("receives, MiB", 2.0**-20),
    "cache_bytes": ("cached, MiB", 2.0**-20),
    "scaled": ("over equal lengths", 1.0),
    "allocations": ("cudaMallocs", 1.0),
    "peak_bytes": ("peak, MiB", 2.0**-20),
    "reserved_bytes": ("reserved, MiB", 2.0**-20),
    "bytes_per_token": ("bytes a token", 1.0),
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One contender in one case.

    Args:
        case: what identifies the case in addition to the name: ``{"N": 8192, "B": 8, "pass": "forward"}``.
        values: figures by the keys of ``FIGURES``.
        errors: relative errors against float64.
        note: why figures are missing: ``"out of memory"``, ``"wrong: …"``, the reason of a refusal.
    """

    name: str
    case: dict[str, Any]
    values: dict[str, float] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    note: str = ""

    def as_dict(self) -> dict[str, Any]:
        row: dict[str, Any] = {"name": self.name, "case": self.case}
        for key in ("values", "errors"):
            if figures := getattr(self, key):
                row[key] = {name: x if isinstance(x, int) else float(f"{x:.5g}") for name, x in figures.items()}
        return row | ({"note": self.note} if self.note else {})


def machine(device: torch.device) -> dict[str, Any]:
    """Returns hardware, versions and date."""
    hardware: dict[str, Any] = {"device": platform.processor() or platform.machine(), "threads": torch.get_num_threads()}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        hardware = {
            "device": properties.name,
            "memory_bytes": properties.total_memory,
            "capability": f"{properties.major}.{properties.minor}",
        }
    elif (cpuinfo := Path("/proc/cpuinfo")).is_file():
        names = [line for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines() if line.startswith("model name")]
        hardware["device"] = names[0].split(":", 1)[1].strip() if names else hardware["device"]
    versions = {"dilated_attention": dilated_attention.__version__, "torch": torch.__version__, "python": platform.python_version()}
    versions |= {"cuda": str(torch.version.cuda), "cudnn": str(torch.backends.cudnn.version())} if device.type == "cuda" else {}
    installed = {each.metadata["Name"]: each.version for each in importlib.metadata.distributions()}
    versions |= {name: installed[name] for name in _PACKAGES if name in installed}
    today = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d")
    return {"date": today, "hardware": hardware, "versions": versions}


@dataclass
class Results:
    """Groups of rows of one suite, in ``<suite>.json`` of a run's folder. A group that is there is not measured again."""

    suite: str
    machine: dict[str, Any]
    settings: dict[str, Any] = field(default_factory=dict)
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
            return cls(stored["suite"], stored["machine"], stored["settings"], groups, path)
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is no result of a suite ({error}); --fresh replaces it, or give another --output") from error

    @classmethod
    def open(cls, folder: Path, suite: str, device: torch.device, settings: dict[str, Any], *, fresh: bool = False) -> Results:
        """Continues the file in ``folder``. Raises ValueError where it is of another machine or other settings."""
        new = cls(suite, machine(device), settings, path=folder / f"{suite}.json")
        if fresh or not (folder / f"{suite}.json").exists():
            return new
        stored = cls.load(folder / f"{suite}.json")
        for what, there, here in (
            ("hardware", stored.machine["hardware"], new.machine["hardware"]),
            ("settings", stored.settings, settings),
        ):
            if there != here:
                raise ValueError(f"{stored.path} was made with other {what}: {there}, here {here}; give --fresh or another --output")
        return stored

    @property
    def rows(self) -> list[Row]:
        return [row for rows in self.groups.values() for row in rows]

    def add(self, label: str, rows: Iterable[Row]) -> None:
        """Adds a group and writes the file, one row a line; a reader sees the old file or the new one."""
        self.groups[label] = list(rows)
        if self.path is None:
            return
        head = {"schema": SCHEMA, "suite": self.suite, "machine": self.machine, "settings": self.settings}
        lines = [f" {json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}," for key, value in head.items()]
        groups = []
        for name, group in self.groups.items():
            body = ",\n".join("   " + json.dumps(row.as_dict(), ensure_ascii=False) for row in group)
            groups.append(f"  {json.dumps(name, ensure_ascii=False)}: [\n{body}\n  ]")
        self._write(self.path, "{\n" + "\n".join(lines) + '\n "groups": {\n' + ",\n".join(groups) + "\n }\n}\n")

    def _write(self, path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}.part")
        part.write_text(text, encoding="utf-8")
        part.replace(path)

    def report(self, command: str) -> str:
        """Returns the tables as Markdown, and writes them beside the file."""
        hardware, versions = self.machine["hardware"], self.machine["versions"]
        about = [hardware["device"], *(f"{name} {version}" for name, version in versions.items() if name != "dilated_attention")]
        parts = [f"## {self.suite}", " · ".join([*about, self.machine["date"]]), f"`{command}`", *tables(self.rows)]
        text = "\n\n".join(parts) + "\n"
        if self.path is not None:
            self._write(self.path.with_suffix(".md"), text)
        return text


def tables(rows: Sequence[Row]) -> list[str]:
    """Returns a Markdown table for each pass or task: a line for each row, a column for each figure and for what differs among them."""
    found = []
    for which in dict.fromkeys(row.case.get("pass", row.case.get("task", "")) for row in rows):
        mine = [row for row in rows if row.case.get("pass", row.case.get("task", "")) == which]
        keys = dict.fromkeys(key for row in mine for key in row.case if key != "pass")
        differs = [key for key in keys if len({str(row.case.get(key)) for row in mine}) > 1]
        same = ", ".join(f"{key} {mine[0].case[key]}" for key in keys if key not in differs and key in mine[0].case and key != "task")
        figures = {key: place for key, place in FIGURES.items() if any(key in row.values for row in mine)}
        errors = dict.fromkeys(key for row in mine for key in row.errors)
        heads = ["", *differs, *(heading for heading, _ in figures.values()), *(f"error of {key}" for key in errors), "note"]
        lines = [
            [
                row.name,
                *(str(row.case.get(key, "–")) for key in differs),
                *(figure(row.values[key] * scale) if key in row.values else "–" for key, (_, scale) in figures.items()),
                *(f"{row.errors[key]:.1e}" if key in row.errors else "–" for key in errors),
                row.note,
            ]
            for row in mine
        ]
        found.append(f"**{which or 'results'}**{f' ({same})' if same else ''}\n\n{markdown(heads, lines)}")
    return found


def markdown(heads: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Returns a Markdown table, of columns in which no cell has text left out."""
    lines = list(lines)
    wanted = [i for i in range(len(heads)) if i == 0 or any(line[i] not in ("", "–") for line in lines)]
    table = Table(box=box.MARKDOWN)
    for i in wanted:
        table.add_column(heads[i], justify="left" if i in (0, len(heads) - 1) else "right", no_wrap=True)
    for line in lines:
        table.add_row(*(line[i].replace("|", "\\|") for i in wanted))
    out = io.StringIO()
    Console(file=out, width=1000, color_system=None, markup=False, highlight=False).print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines() if line.strip())


def figure(value: float) -> str:
    """Formats three digits, with thousands separators."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def slower(label: str, rows: Iterable[Row], then: Results, foreign: Collection[str], threshold: float) -> dict[tuple[str, str], str]:
    """Returns what of this library got slower by more than ``threshold`` since ``then``, or has no time any more, with the figures.

    By the time itself and relative to other people's contenders of the group and pass, since a busy machine slows both.
    """
    now, before = _times(rows), _times(then.groups.get(label, []))
    factors = {key: now[key] / ms for key, ms in before.items() if key in now}
    found = {}
    for key, ms in before.items():
        name, which = key
        if name in foreign:
            continue
        if key not in now:
            found[key] = f"{label}: {name}, {which}: {figure(ms)} ms then, none now"
            continue
        others = [factor for (other, at), factor in factors.items() if at == which and other in foreign]
        relative = factors[key] / statistics.median(others) if others else factors[key]
        if min(factors[key], relative) > 1 + threshold:
            found[key] = (
                f"{label}: {name}, {which}: {figure(ms)} ms then, {figure(now[key])} now, {100 * (relative - 1):+.0f} % beside others"
            )
    return found


def _times(rows: Iterable[Row]) -> dict[tuple[str, str], float]:
    """Returns the time as called of each contender and pass."""
    times: dict[tuple[str, str], float] = {}
    for row in rows:
        values: Mapping[str, float] = row.values
        if ms := values.get("called", values.get("ms")):
            times[row.name, row.case.get("pass", row.case.get("task", ""))] = ms
    return times
