"""Results of a benchmark: rows of figures, the machine they were measured on, and the file that holds them, written after every group."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

import dilated_attention
from dilated_attention.files import locked, parse_json, remove_leftovers, write_text

SCHEMA = 1
# of a group that several processes are measuring; it stays where one of them dies or hangs, and the next run leaves the group out
UNDER_WAY = "a process died of it, or it hung"
_PACKAGES = ("triton", "flash-attn-4", "flash-attn", "nvidia-cudnn-frontend", "transformers")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One contender in one case.

    Args:
        name: of the contender: ``"flash4"``, ``"DilatedAttention"``.
        case: what identifies the case in addition to the name: ``{"N": 8192, "B": 8, "pass": "forward"}``.
        values: figures; each key ends in its unit: ``ms``, ``spread`` (share of the median), ``tflops``, ``peak_bytes``.
        errors: relative errors against float64.
        note: why figures are missing: ``"out of memory"``, ``"wrong: …"``, the reason of a refusal.
    """

    name: str
    case: dict[str, Any]
    values: dict[str, float] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    note: str = ""

    @property
    def key(self) -> str:
        return json.dumps([self.name, dict(sorted(self.case.items()))])

    def as_dict(self) -> dict[str, Any]:
        whole: dict[str, Any] = {"name": self.name, "case": self.case}
        whole |= {key: _rounded(getattr(self, key)) for key in ("values", "errors") if getattr(self, key)}
        return whole | ({"note": self.note} if self.note else {})

    @classmethod
    def from_dict(cls, stored: dict[str, Any]) -> Row:
        """Creates a row from ``stored``. Raises TypeError where it is not a row."""
        row = cls(**stored)
        if not all(isinstance(x, kind) for x, kind in zip(vars(row).values(), (str, dict, dict, dict, str), strict=True)):
            raise TypeError(f"{str(stored)[:200]} is not a row")
        return row


def _rounded(figures: dict[str, float]) -> dict[str, float]:
    """Rounds to five digits, more than any measurement has. Whole numbers stay whole."""
    return {key: value if isinstance(value, int) else float(f"{value:.5g}") for key, value in figures.items()}


def machine(device: torch.device) -> dict[str, Any]:
    """Returns hardware of a process, versions and date. Only ``hardware`` decides whether two results may be compared."""
    hardware: dict[str, Any]
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        hardware = {"device": found.name, "devices": 1, "memory_bytes": found.total_memory}
        hardware["capability"] = f"{found.major}.{found.minor}"
    else:
        # the number of threads affects a CPU's figures like a different CPU would
        hardware = {"device": _processor(), "devices": 1, "cores": os.cpu_count(), "threads": torch.get_num_threads()}
    versions = {"dilated_attention": dilated_attention.__version__, "torch": torch.__version__, "python": platform.python_version()}
    if device.type == "cuda":
        versions |= {"cuda": str(torch.version.cuda), "cudnn": str(torch.backends.cudnn.version())}
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return {"date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"), "hardware": hardware, "versions": versions}


def _processor() -> str:
    """Returns the model's name where Linux gives it."""
    cpuinfo = Path("/proc/cpuinfo")
    for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines() if cpuinfo.is_file() else ():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


@dataclass
class Results:
    """Groups of rows of one suite, and the file they are stored in. A group that is already in the file is not measured again.

    Several runs may add to one file at the same time: each also writes what the others have written since it began.

    Args:
        groups: those found in the file when this run began, and those measured by it.
        replaced: content of the file that the first group replaces.
    """

    suite: str
    machine: dict[str, Any]
    settings: dict[str, Any] = field(default_factory=dict)
    groups: dict[str, list[Row]] = field(default_factory=dict)
    path: Path | None = None
    replaced: bytes = b""

    @classmethod
    def open(cls, path: Path | None, suite: str, here: dict[str, Any], settings: dict[str, Any], *, fresh: bool = False) -> Results:
        """Continues the file at ``path`` if there is one of this hardware, these versions and these settings.

        Raises:
            ValueError: the file belongs to another suite, machine or version, or was made with other settings.
        """
        new = cls(suite, here, settings, path=path)
        if path is not None and path.exists() and fresh:
            new.replaced = path.read_bytes()
        return new.stored()

    def differs(self, found: Results, *, but: Sequence[str] = ()) -> str:
        """Returns in what ``found`` is of another suite, hardware, versions or settings; ``but``: what may differ, or entries of it."""
        a, b = ({"suite": {"name": of.suite}, **of.machine, "settings": of.settings} for of in (found, self))
        other = [
            f"other {what}: {key} {a[what].get(key)!r} there, {b[what].get(key)!r} here"
            for what in ("suite", "hardware", "versions", "settings")
            for key in {**a[what], **b[what]}
            if a[what].get(key) != b[what].get(key) and what not in but and key not in but
        ]
        return f"made with {', '.join(other)}" if other else ""

    @classmethod
    def load(cls, path: Path) -> Results:
        """Reads a file. Raises ValueError where it is not a result of this schema."""
        try:
            whole = parse_json(path.read_bytes(), "the file")
            if whole["schema"] != SCHEMA:
                raise ValueError(f"schema {whole['schema']}")
            groups = {label: [Row.from_dict(row) for row in rows] for label, rows in whole["groups"].items()}
            hardware, versions = whole["machine"]["hardware"], whole["machine"]["versions"]
            if not all(isinstance(x, dict) for x in (hardware, versions, whole["settings"])) or "device" not in hardware:
                raise TypeError("hardware, versions or settings have another form")
            return cls(whole["suite"], whole["machine"], whole["settings"], groups, path)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is not a benchmark result of schema {SCHEMA} ({error}); --fresh replaces it") from error

    @property
    def rows(self) -> list[Row]:
        return [row for rows in self.groups.values() for row in rows]

    def add(self, label: str, rows: Iterable[Row]) -> None:
        """Adds a group, and writes it to the file next to rows of other runs."""
        self.groups[label] = own = list(rows)
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with locked(self.path.parent / f".{self.suite}.lock"):
            remove_leftovers(self.path)
            whole, keys = self.stored(), {row.key for row in own}
            others = [] if whole is self else [row for row in whole.groups.get(label, []) if row.key not in keys and row.note != UNDER_WAY]
            replace(whole, groups=whole.groups | {label: others + own}).save()

    def stored(self) -> Results:
        """Returns what the file holds, groups that other runs have added included; these results where there is none to continue.

        Raises:
            ValueError: the file belongs to another suite, machine or version, or was made with other settings.
        """
        if self.path is None or not self.path.exists() or self.path.read_bytes() == self.replaced:
            return self
        found = self.load(self.path)
        if differs := self.differs(found):
            raise ValueError(f"{found.path} was {differs}; --fresh replaces the file, or choose another --output")
        return found

    def save(self) -> None:
        """Writes the file; a reader sees the old one or the new one."""
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_text(self.path, self.text())

    def text(self) -> str:
        """Returns JSON with one row per line: readable, and a change of one row is one line of a diff."""
        head = {"schema": SCHEMA, "suite": self.suite, "machine": self.machine, "settings": self.settings}
        lines = [f" {json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}," for key, value in head.items()]
        groups = []
        for label, rows in self.groups.items():
            inside = ",\n".join("   " + json.dumps(row.as_dict(), ensure_ascii=False) for row in rows)
            groups.append(f"  {json.dumps(label, ensure_ascii=False)}: [" + (f"\n{inside}\n  ]" if rows else "]"))
        return "{\n" + "\n".join(lines) + '\n "groups": {\n' + ",\n".join(groups) + "\n }\n}\n"
