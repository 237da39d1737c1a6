"""Measured preference: tables of backends ordered by time, from this machine's own file or shipped with the package.

A row holds the times of one kind of call: pass, dtype class, head dim, rows of a problem, causal. A request uses the row whose head dim
is the smallest measured one not below the request's (kernels round up), else the largest; among those, the row whose length is nearest
by ratio, with ties going to the longer one. An unknown length uses the longest. Pass, dtype class and causal must be equal. Block lists
have separate rows. Rows were timed without padding masks, windows, dropout and deterministic gradients, so a request with any of these
has no row.

A table only orders backends; whether a backend can compute a request is decided by its ``reasons_against``.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import math
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dilated_attention.backends.hardware import Hardware
from dilated_attention.files import read_json, write_text
from dilated_attention.pattern.checks import shown

if TYPE_CHECKING:
    from dilated_attention.backends.base import AttentionRequest

logger = logging.getLogger("dilated_attention")

FORMAT = 1
# rates in a shipped table that differ by less than this fraction say nothing about another machine
_SAME_RATE = 0.03
RERUN = "python -m dilated_attention bench --tune"
_DTYPE_CLASSES = {torch.float16: "half", torch.bfloat16: "half", torch.float32: "float32"}
_PASSES = ("forward", "backward")
# what a file says about its rows, and of which type
_HEAD: tuple[tuple[str, type], ...] = (("architecture", str), ("environment", dict), ("date", str), ("source", str))
_SHIPPED = Path(__file__).parent / "shipped"
# the largest number allowed in a table, and the largest size of its file in bytes
_MOST, _MOST_BYTES = 2**62, 2**26
# how often tables were discarded; caches built from them compare this number
generation = 0


class PreferenceError(ValueError):
    """A file is not a preference table. The message names the file, the fault and the way out."""


@dataclass(frozen=True)
class Timing:
    """One backend's time for a row's problem; ``ms`` is None where only a rate was published."""

    backend: str
    ms: float | None
    tflops: float


@dataclass(frozen=True, kw_only=True)
class TuningRow:
    """One kind of call and the backends that computed it correctly, fastest first."""

    which: str
    dtype: str
    head_dim: int
    length: int
    causal: bool
    timings: tuple[Timing, ...]
    # True: lists of 128x128 blocks, where ``length`` is the mean number of keys per query; False: dense problems
    blocks: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(timing.backend for timing in self.timings)


@dataclass(frozen=True, kw_only=True)
class TuningTable:
    """Rows and their origin.

    Args:
        architecture: see ``Hardware.architecture``.
        environment: the environment for which a measured table is valid: see the function ``environment``.
        date: date of the measurement, ISO.
        source: a description of what was measured and how.
        path: the file the table was read from, if any.
    """

    architecture: str
    environment: dict[str, Any] = field(hash=False)
    date: str
    source: str
    rows: tuple[TuningRow, ...]
    path: Path | None = field(default=None, compare=False)

    def row_for(self, request: AttentionRequest) -> TuningRow | None:
        """Returns the row that applies to ``request`` (by the rule in the module docstring), or None."""
        dtype = _DTYPE_CLASSES.get(request.dtype)
        unmeasured = request.key_mask or request.window or request.dropout or (request.deterministic and request.needs_grad)
        # block lists were timed with whole 128x128 blocks; the rows also apply to lists with some masked blocks. The lists contain the
        # causal mask, so causal rows are not distinguished
        unmeasured |= request.blocks not in (None, (128, 128)) or request.beside_exchange
        if dtype is None or unmeasured or request.precision != "native":
            return None
        blocks = request.blocks is not None
        rows = self._by_kind.get((_PASSES[request.needs_grad], dtype, request.causal and not blocks, blocks), ())
        if not rows:
            return None
        dims = {row.head_dim for row in rows}
        head_dim = min((dim for dim in dims if dim >= request.head_dim), default=max(dims))
        same = [row for row in rows if row.head_dim == head_dim]
        if request.length <= 0:
            return max(same, key=lambda row: row.length)
        return min(same, key=lambda row: (abs(math.log2(row.length / request.length)), -row.length))

    @functools.cached_property
    def _by_kind(self) -> dict[tuple[str, str, bool, bool], list[TuningRow]]:
        kinds: dict[tuple[str, str, bool, bool], list[TuningRow]] = {}
        for row in self.rows:
            kinds.setdefault((row.which, row.dtype, row.causal, row.blocks), []).append(row)
        return kinds


@dataclass(frozen=True)
class Ranking:
    """Backends in order of preference for one request; ``bases`` are (names, the reason for their place), in the same order."""

    bases: tuple[tuple[tuple[str, ...], str], ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for names, _ in self.bases for name in names)

    def basis_of(self, name: str) -> str:
        return next((basis for names, basis in self.bases if name in names), "")


def environment(hardware: Hardware) -> dict[str, Any]:
    """Returns everything that a measurement on this machine depends on. Other values give another fingerprint, and so another file."""
    return {
        "architecture": hardware.architecture,
        "device": hardware.name or hardware.device_type,
        "cudnn": hardware.cudnn_version,
        "packages": sorted(hardware.packages),
        "versions": list(hardware.versions),
    }


def fingerprint(hardware: Hardware) -> str:
    """Returns a short string that is safe in a file name: the architecture and a hash of ``environment``."""
    text = json.dumps(environment(hardware), sort_keys=True)
    return f"{hardware.architecture}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def cache_path(hardware: Hardware) -> Path:
    """Returns the path of this hardware's own table: ``$DILATED_ATTENTION_CACHE`` (a folder or a ``.json`` file), else the user's cache."""
    named = os.environ.get("DILATED_ATTENTION_CACHE")
    if named and named.endswith(".json"):
        return Path(named).expanduser()
    folder = Path(named).expanduser() if named else _user_cache() / "dilated_attention"
    return folder / f"preference-{fingerprint(hardware)}.json"


def _user_cache() -> Path:
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg)
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or "~/AppData/Local").expanduser()
    return Path("~/Library/Caches" if sys.platform == "darwin" else "~/.cache").expanduser()


def refresh() -> None:
    """Discards all tables; the next choice reads them again."""
    global generation
    generation += 1
    measured_here.cache_clear()
    shipped.cache_clear()


@functools.lru_cache(maxsize=32)
def measured_here(hardware: Hardware) -> TuningTable | None:
    """Returns the table measured on exactly this hardware with these versions, read once; None if there is none.

    A record built by hand (without ``versions``) describes another machine, so no file is looked up.

    Raises:
        PreferenceError: the file exists and is not a table.
    """
    if not hardware.versions:
        return None
    try:
        path = cache_path(hardware)
        is_there = path.exists()
        if not is_there:
            _tell_of_others(path)
    except (OSError, RuntimeError) as error:
        # an unreadable folder or an unknown home must not stop a training run
        logger.info("no measured preference: %s", error)
        return None
    table = load(path) if is_there else None
    if table is None:
        return None
    here = environment(hardware)
    other = [f"{key} {table.environment.get(key)!r}, here {value!r}" for key, value in here.items() if table.environment.get(key) != value]
    if other:
        logger.info("measured preference in %s ignored, it was measured elsewhere: %s. To measure here: %s", path, "; ".join(other), RERUN)
        return None
    logger.info("preference measured here on %s, from %s", table.date, path)
    return table


def _tell_of_others(path: Path) -> None:
    others = sorted(other.name for other in path.parent.glob("preference-*.json"))
    if others:
        text = "measured preference in %s ignored, of other hardware or versions: %s. To measure here: %s"
        logger.info(text, path.parent, ", ".join(others), RERUN)


@functools.lru_cache(maxsize=32)
def shipped(architecture: str) -> TuningTable | None:
    """Returns the table shipped with the package for this architecture; None if none was measured."""
    path = _SHIPPED / f"{architecture}.json"
    return load(path) if path.is_file() else None


def timing_of(backend: str, request: AttentionRequest) -> tuple[TuningTable, Timing] | None:
    """Returns how fast a backend computes such a request, and the table that says so: this machine's own, else the shipped one."""
    for table in (measured_here(request.hardware), shipped(request.hardware.architecture)):
        row = None if table is None else table.row_for(request)
        timing = None if row is None else next((timing for timing in row.timings if timing.backend == backend), None)
        if table is not None and timing is not None:
            return table, timing
    return None


def rank(request: AttentionRequest, by_architecture: tuple[str, ...], registered: tuple[str, ...]) -> Ranking:
    """Ranks each name once: by this machine's table, then the shipped table, the architecture's order and the order of registration."""
    groups: list[tuple[tuple[str, ...], str]] = []
    here = measured_here(request.hardware)
    if here is not None and (row := here.row_for(request)) is not None:
        groups.append((row.names, f"measured here ({here.path}, {here.date})"))
    general = shipped(request.hardware.architecture)
    if general is not None and (row := general.row_for(request)) is not None:
        groups.append((_ranked(row, by_architecture), f"shipped table ({general.source}, {general.date})"))
    groups += [(by_architecture, "architecture order"), (registered, "order of registration")]
    seen: set[str] = set()
    bases = []
    for names, basis in groups:
        # a table may name backends that this release, or a custom registry, does not have
        new = tuple(name for name in names if name in registered and name not in seen)
        seen.update(new)
        bases.append((new, basis))
    return Ranking(tuple(bases))


def _ranked(row: TuningRow, by_architecture: tuple[str, ...]) -> tuple[str, ...]:
    """Orders the row's names by rate; rates so close that another machine might reverse them follow the architecture's order."""
    left = sorted(row.timings, key=lambda timing: -timing.tflops)
    names = []
    while left:
        close = [timing for timing in left if timing.tflops >= left[0].tflops * (1 - _SAME_RATE)]
        place = {name: index for index, name in enumerate(by_architecture)}
        first = min(close, key=lambda timing: place.get(timing.backend, len(place)))
        left.remove(first)
        names.append(first.backend)
    return tuple(names)


def save(table: TuningTable, path: Path) -> None:
    """Writes ``table`` as JSON, one row per line; a reader sees either the old file or the new one, never a partial one."""
    head = {
        "format": FORMAT,
        **{key: getattr(table, key) for key, _ in _HEAD},
        "timings": "each: backend, milliseconds, TFLOP/s; fastest first",
    }
    rows = [json.dumps(as_dict(row), ensure_ascii=False) for row in table.rows]
    text = json.dumps(head, indent=2, ensure_ascii=False)[:-2] + ',\n  "rows": [\n    ' + ",\n    ".join(rows) + "\n  ]\n}\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, text)


def as_dict(row: TuningRow) -> dict[str, Any]:
    sizes = {key: getattr(row, key) for key in ("dtype", "head_dim", "length", "causal")}
    timings = [[timing.backend, timing.ms, timing.tflops] for timing in row.timings]
    return {"pass": row.which, **sizes, "timings": timings} | ({"blocks": True} if row.blocks else {})


def load(path: Path) -> TuningTable | None:
    """Returns the table in ``path``; None, with a log line, if a release with another format wrote it.

    Raises:
        PreferenceError: the file cannot be read, or does not hold a table.
    """
    try:
        # reading a pipe would block
        if not path.is_file():
            raise ValueError("it is not a regular file")
        if (size := path.stat().st_size) > _MOST_BYTES:
            raise ValueError(f"it has {size:,} bytes, expected at most {_MOST_BYTES:,}")
        content = read_json(path)
        if not isinstance(content, dict):
            raise ValueError(f"it holds a {type(content).__name__}, expected an object")
        if type(content.get("format")) is int and content["format"] != FORMAT:
            logger.info("measured preference in %s ignored: format %s, this release reads %s", path, shown(content["format"]), FORMAT)
            return None
        for key, kind in (("format", int), *_HEAD, ("rows", list)):
            # isinstance would accept true as an int
            if type(content.get(key)) is not kind:
                raise ValueError(f"{key} is {shown(content.get(key))}, expected {kind.__name__}")
        rows = tuple(_row(number, row) for number, row in enumerate(content["rows"]))
    except (OSError, ValueError) as error:
        what = f"it cannot be read ({error})" if isinstance(error, OSError) else str(error)[:600]
        raise PreferenceError(f"{path} is not a preference table: {what}; delete it, or replace it with {RERUN}") from error
    return TuningTable(**{key: content[key] for key, _ in _HEAD}, rows=rows, path=path)


def _row(number: int, row: Any) -> TuningRow:
    try:
        timings = tuple(_timing(*timing) for timing in row["timings"])
        sizes = {key: row[key] for key in ("dtype", "head_dim", "length", "causal")}
        made = TuningRow(which=row["pass"], **sizes, timings=timings, blocks=row.get("blocks", False))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"row {number} is {shown(row)}, which lacks or mistypes {str(error)[:200]}") from error
    is_right = (
        all(type(size) is int and 1 <= size <= _MOST for size in (made.head_dim, made.length))
        and (type(made.causal) is type(made.blocks) is bool and isinstance(row["timings"], list))
        and (made.which in _PASSES and made.dtype in _DTYPE_CLASSES.values())
    )
    if not is_right:
        raise ValueError(f"row {number} is {shown(row)}, expected pass, dtype, head_dim ≥ 1, length ≥ 1, causal and timings")
    return made


def _timing(backend: Any, ms: Any, tflops: Any) -> Timing:
    if type(backend) is not str:
        raise TypeError(f"the backend's name: {shown(backend)}")
    for figure in (tflops,) if ms is None else (ms, tflops):
        if type(figure) not in (int, float) or not 0 < figure <= _MOST:
            raise ValueError(f"the figure of {backend[:80]}: {shown(figure)}")
    return Timing(backend, None if ms is None else float(ms), float(tflops))
