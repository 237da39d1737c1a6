"""The registry of kernel libraries, and the choice among them.

Selection walks one ordered table and is pure Python on declared capabilities, so it can be tested on a CPU for any GPU by passing
another ``Hardware``.

Shipped rates (``RateTable``) only order backends; whether a backend can compute a request is decided by its ``reasons_against``.
"""

from __future__ import annotations

import functools
import inspect
import json
import logging
import math
from collections.abc import Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dilated_attention.backends import hardware
from dilated_attention.backends.base import AttentionRequest, Backend
from dilated_attention.pattern.checks import shown

_FOLDER = Path(__file__).parent / "shipped"
_DTYPE_CLASSES = {torch.float16: "half", torch.bfloat16: "half", torch.float32: "float32"}
# rates that differ by less than this fraction say nothing about another machine
_SAME_RATE = 0.03


class RateRow(NamedTuple):
    """TFLOP/s by backend. ``length``: rows of a problem, or for lists of 128x128 blocks the mean number of keys per query."""

    head_dim: int
    length: int
    tflops: dict[str, float]


@dataclass(frozen=True)
class RateTable:
    """Rates of backends that were measured on one GPU of an architecture and are shipped with the package: ``shipped/*.json``.

    A row holds the rates of one kind of call: pass, dtype class, head dim, rows of a problem, causal. A request uses the row whose head dim
    is the smallest measured one not below the request's (kernels round up), else the largest; among those, the row whose length is nearest
    by ratio, with ties going to the longer one. An unknown length uses the longest. Pass, dtype class and causal must be equal. Block lists
    have separate rows. Rows were timed without padding masks, windows, dropout and deterministic gradients, so a request with any of these
    has no row.

    Args:
        source: what was measured and how.
        rows: by (pass, dtype class, causal, lists of blocks).
    """

    device: str
    date: str
    source: str
    rows: dict[tuple[str, str, bool, bool], list[RateRow]]

    def tflops(self, request: AttentionRequest) -> dict[str, float]:
        """Returns the rates that apply to ``request`` by the rule above; empty if none do."""
        dtype, blocks = _DTYPE_CLASSES.get(request.dtype), request.blocks is not None
        unmeasured = request.key_mask or request.window or request.dropout or (request.deterministic and request.needs_grad)
        # block lists were timed with whole 128x128 blocks; the rows also apply to lists with some masked blocks. The lists contain the
        # causal mask, so causal rows are not distinguished
        unmeasured |= request.blocks not in (None, (128, 128)) or request.precision != "native"
        which = "backward" if request.needs_grad else "forward"
        rows = [] if dtype is None or unmeasured else self.rows.get((which, dtype, request.causal and not blocks, blocks), [])
        if not rows:
            return {}
        dims = {row.head_dim for row in rows}
        head_dim = min((dim for dim in dims if dim >= request.head_dim), default=max(dims))
        same = [row for row in rows if row.head_dim == head_dim]
        if request.length <= 0:
            return max(same, key=lambda row: row.length).tflops
        return min(same, key=lambda row: (abs(math.log2(row.length / request.length)), -row.length)).tflops


@functools.cache
def table_of(architecture: str) -> RateTable | None:
    """Returns the table shipped for this architecture (see ``Hardware.architecture``); None if nothing was measured on it."""
    path = _FOLDER / f"{architecture}.json"
    if not path.is_file():
        return None
    content = json.loads(path.read_text(encoding="utf-8"))
    rows: dict[tuple[str, str, bool, bool], list[RateRow]] = {}
    for row in content["rows"]:
        kind = (row["pass"], row["dtype"], row["causal"], row.get("blocks", False))
        rows.setdefault(kind, []).append(RateRow(row["head_dim"], row["length"], row["tflops"]))
    return RateTable(content["device"], content["date"], content["source"], rows)


def rate_of(backend: str, request: AttentionRequest) -> float | None:
    """Returns the TFLOP/s of a backend for such a request on the measured GPU of this architecture; None if it was not measured."""
    table = table_of(request.hardware.architecture)
    return None if table is None else table.tflops(request).get(backend)


def by_rate(tflops: dict[str, float], architecture_order: tuple[str, ...]) -> tuple[str, ...]:
    """Orders backends by rate; rates so close that another machine might reverse them follow the architecture's order."""
    place = {name: index for index, name in enumerate(architecture_order)}
    left = sorted(tflops, key=lambda name: -tflops[name])
    names = []
    while left:
        close = [name for name in left if tflops[name] >= tflops[left[0]] * (1 - _SAME_RATE)]
        names.append(min(close, key=lambda name: place.get(name, len(place))))
        left.remove(names[-1])
    return tuple(names)


logger = logging.getLogger("dilated_attention")

_MOST_ANSWERS = 4096
# work of a problem from which a plan for its shape (about 70 ms on an H100) takes less time than its kernels save in one call
_PLAN_FLOPS = 5e13


class BackendUnavailable(RuntimeError):
    """The named backend cannot compute the call, or no backend can. The message lists every reason, and the backends that could."""


class Registry:
    """The single ordered table: backends by name, and their order of preference by shipped selection, else by architecture."""

    def __init__(self) -> None:
        self._backends: dict[str, Backend] = {}
        self._families: dict[str, tuple[str, ...]] = {}
        # the orders, by architecture and kind of request
        self._orders: dict[tuple[str, str], tuple[str, ...]] = {}
        self._told: set[str] = set()
        # decisions made from this table, those of ``select`` and whole calls of the engine, since a training step repeats the same few;
        # emptied when this table or the detected hardware changes
        self.cached: dict[Hashable, Any] = {}

    def register(self, backend: Backend, *, family: str | None = None) -> None:
        """Adds a backend; ``family`` is a name that stands for the first usable of several backends (``"sdpa"``)."""
        if backend.name in self._backends or backend.name in self._families or backend.name == "auto":
            raise ValueError(f"a backend named {backend.name!r} is already registered; choose another name")
        _check_methods(type(backend))
        self._backends[backend.name] = backend
        self.cached.clear()
        if family is not None:
            self._families[family] = (*self._families.get(family, ()), backend.name)

    def set_order(self, architecture: str, names: tuple[str, ...], *, kind: str = "dense") -> None:
        """Sets the order of preference of an architecture for requests of ``kind``, ``"dense"`` or ``"blocks"``.

        Args:
            architecture: one of ``Hardware.architecture`` (``"sm86"``), whose order goes before all else, or a family of GPUs (``"sm8x"``),
                whose order follows the shipped rates.
            names: the preferred backends; the others follow in the order that applied before.
        """
        if kind not in ("dense", "blocks"):
            raise ValueError(f'kind is {shown(kind)}; expected "dense" or "blocks"')
        if unknown := [name for name in names if name not in self._backends]:
            raise ValueError(f"names has {shown(unknown)}; expected names of {', '.join(self._backends)}")
        self._orders[architecture, kind] = tuple(names)
        self.cached.clear()

    def names(self) -> tuple[str, ...]:
        return tuple(self._backends)

    def choices(self) -> tuple[str, ...]:
        """Returns the names that ``backend=`` accepts."""
        return ("auto", *self._families, *self._backends)

    def get(self, name: str) -> Backend:
        return self._backends[name]

    def order(self, request: AttentionRequest) -> tuple[str, ...]:
        """Returns all names in order of preference for this request."""
        return tuple(self.ranking(request))

    def ranking(self, request: AttentionRequest) -> dict[str, str]:
        """Returns every name in order of preference, with the reason for its place: the shipped table, the architecture's order, …"""
        machine, orders = request.hardware, self._orders
        family = f"sm{machine.capability[0]}x" if machine.device_type == "cuda" and machine.capability and not machine.is_rocm else ""
        names = orders.get((family, request.kind), ())
        groups = [(orders.get((machine.architecture, request.kind), ()), "architecture order")]
        if (shipped := table_of(machine.architecture)) is not None:
            groups.append((by_rate(shipped.tflops(request), names), f"shipped table ({shipped.source}, {shipped.date})"))
        groups += [(names, "architecture order"), (self.names(), "order of registration")]
        reasons: dict[str, str] = {}
        for listed, reason in groups:
            # a shipped table may name backends that a custom registry does not have
            reasons |= {name: reason for name in listed if name in self._backends and name not in reasons}
        if request.shapes_repeat or request.flops >= _PLAN_FLOPS:
            return reasons
        planners = [name for name in reasons if self._backends[name].capabilities.plans_shapes]
        return {name: reasons[name] for name in reasons if name not in planners} | dict.fromkeys(planners, "plans every new shape")

    def table(self, request: AttentionRequest) -> list[tuple[str, list[str]]]:
        """Returns (name, reasons against it) in order of preference."""
        return [(name, self._backends[name].reasons_against(request)) for name in self.order(request)]

    def check_name(self, name: object) -> None:
        if not isinstance(name, str):
            raise TypeError(f"backend is {shown(name)} ({type(name).__name__}); expected a name, one of {', '.join(self.choices())}")
        if name not in self.choices():
            raise ValueError(f"backend is {shown(name)}; expected one of {', '.join(self.choices())}")

    def select(self, request: AttentionRequest, name: str = "auto") -> Backend:
        """Returns the preferred backend that can compute the request, or the named backend; it never replaces a named one.

        Raises:
            BackendUnavailable: the named backend (for ``"auto"``: every backend) cannot; the message lists all reasons.
        """
        known: Backend | None = self.cached.get((request, name))
        if known is not None:
            return known
        self.check_name(name)
        wanted = self.names() if name == "auto" else self._families.get(name, (name,))
        # only the preferred ones are asked, until one can
        for candidate in self.ranking(request):
            if candidate in wanted and not self._backends[candidate].reasons_against(request):
                how = "chosen" if name == "auto" else f"asked for as {name!r}"
                self.tell_once(f"backend {candidate} ({how}) for {request.describe()}")
                self.remember((request, name), self._backends[candidate])
                return self._backends[candidate]
        table = self.table(request)
        refused = "\n".join(f"  {n}: {'; '.join(reasons)}" for n, reasons in table if n in wanted)
        able = [n for n, reasons in table if not reasons]
        out = f"could: {', '.join(able)} (backend={able[0]!r} or 'auto')" if able else "no other backend could either"
        raise BackendUnavailable(f"backend={name!r} cannot compute {request.describe()}\n{refused}\n  {out}")

    def remember(self, asked: Hashable, answer: Any) -> None:
        if len(self.cached) >= _MOST_ANSWERS:
            self.cached.clear()
        self.cached[asked] = answer

    def tell_once(self, line: str) -> None:
        """Logs a choice the first time it is made."""
        if line not in self._told:
            self._told.add(line)
            logger.info(line)


def _check_methods(kind: type[Backend]) -> None:
    """Refuses a backend whose methods do not take the arguments of ``Backend``'s, which the engine passes by place and by name."""
    for name, method in vars(Backend).items():
        if name.startswith("_") or not inspect.isfunction(method) or (own := getattr(kind, name)) is method:
            continue
        expected, found = (inspect.signature(x) for x in (method, own))
        by_place, names = ([x.name for x in each.parameters.values() if x.kind is x.POSITIONAL_OR_KEYWORD] for each in (expected, found))
        try:
            # more parameters are a backend's own, with defaults
            found.bind(*by_place, **{x: None for x in expected.parameters if x not in by_place})
            takes = all(mine == other for mine, other in zip(names, by_place, strict=False))
        except TypeError:
            takes = False
        if not takes:
            raise TypeError(
                f"{kind.__name__}.{name} takes ({', '.join(found.parameters)}); "
                f"expected the parameters of Backend.{name} by their names: ({', '.join(expected.parameters)})"
            )


registry = Registry()


def refresh() -> None:
    """Discards the detected hardware and what was decided on it. Call this after installing or loading a kernel library."""
    hardware._detect.cache_clear()
    registry.cached.clear()
