"""The registry of kernel libraries, and the choice among them.

Selection walks one ordered table and is pure Python on declared capabilities, so it can be tested on a CPU for any GPU by passing
another ``Hardware``.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable
from typing import Any

from dilated_attention.backends import hardware, tuning_table
from dilated_attention.backends.base import HALVES, AttentionRequest, Backend, Capabilities
from dilated_attention.pattern.checks import shown

logger = logging.getLogger("dilated_attention")

_MOST_ANSWERS = 4096
# a name that ``backend=`` accepts in addition to those of kernel libraries: an engine kernel visits the pairs that nested branches share
# once; the preferred library computes the rest
NESTED = "nested"
# the capabilities of that kernel, declared as for a kernel library
NESTED_CAPABILITIES = Capabilities(
    devices=frozenset({"cuda"}),
    dtypes=HALVES,
    package="triton",
    install="pip install triton",
    compute_capabilities=((9, 0), (9, 0)),
    head_dims=frozenset({64, 128}),
    backward=False,
    source="H200, Triton 3.6: 424/569 TFLOP/s on pairs that differ at D = 64/128",
)


class BackendUnavailable(RuntimeError):
    """The named backend cannot compute the call, or no backend can. The message lists every reason, and the backends that could."""


class Registry:
    """The single ordered table: backends by name, and their order of preference by measurement, else by architecture."""

    def __init__(self) -> None:
        self._backends: dict[str, Backend] = {}
        self._families: dict[str, tuple[str, ...]] = {}
        # the orders, by architecture and kind of request
        self._orders: dict[tuple[str, str], tuple[str, ...]] = {}
        self._told: set[str] = set()
        # caches answers, since a training step repeats the same few requests
        self.cached: dict[Hashable, Any] = {}
        self._generation = _generation()

    def register(self, backend: Backend, *, family: str | None = None) -> None:
        """Adds a backend; ``family`` is a name that stands for the first usable of several backends (``"sdpa"``)."""
        if backend.name in self._backends or backend.name in self._families or backend.name == "auto":
            raise ValueError(f"a backend named {backend.name!r} is already registered; choose another name")
        self._backends[backend.name] = backend
        self.cached.clear()
        if family is not None:
            self._families[family] = (*self._families.get(family, ()), backend.name)

    def set_order(self, architecture: str, names: tuple[str, ...], *, kind: str = "dense") -> None:
        """Sets the order of an architecture for requests of ``kind``, ``"dense"`` or ``"blocks"`` (see ``AttentionRequest.kind``)."""
        self._orders[architecture, kind] = names
        self.cached.clear()

    def names(self) -> tuple[str, ...]:
        return tuple(self._backends)

    def choices(self) -> tuple[str, ...]:
        """Returns the names that ``backend=`` accepts."""
        return ("auto", *self._families, *self._backends, NESTED)

    def get(self, name: str) -> Backend:
        return self._backends[name]

    def order(self, request: AttentionRequest) -> tuple[str, ...]:
        """Returns all names in order of preference for this request."""
        return self.ranking(request).names

    def ranking(self, request: AttentionRequest) -> tuning_table.Ranking:
        """Returns ``order`` with the reason for each name's place: a table measured here, the shipped one, or the architecture's order."""
        hardware = request.hardware
        places = [hardware.architecture]
        if hardware.device_type == "cuda" and not hardware.is_rocm and hardware.capability:
            places.append(f"sm{hardware.capability[0]}x")
        places.append(hardware.device_type)
        first = next((self._orders[place, request.kind] for place in places if (place, request.kind) in self._orders), ())
        return tuning_table.rank(request, first, self.names())

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
        known: Backend | None = self.answers().get((request, name))
        if known is not None:
            return known
        self.check_name(name)
        table = self.table(request)
        wanted = set(self.names()) if name in ("auto", NESTED) else set(self._families.get(name, (name,)))
        for candidate, reasons in table:
            if candidate in wanted and not reasons:
                how = "chosen" if name == "auto" else f"asked for as {name!r}"
                self.tell_once(f"backend {candidate} ({how}) for {request.describe()}")
                self.remember((request, name), self._backends[candidate])
                return self._backends[candidate]
        refused = "\n".join(f"  {n}: {'; '.join(reasons)}" for n, reasons in table if n in wanted)
        able = [n for n, reasons in table if not reasons]
        out = f"could: {', '.join(able)} (backend={able[0]!r} or 'auto')" if able else "no other backend could either"
        raise BackendUnavailable(f"backend={name!r} cannot compute {request.describe()}\n{refused}\n  {out}")

    def answers(self) -> dict[Hashable, Any]:
        """Returns the cache of decisions made from this table: those of ``select``, and whole calls of the engine.

        It is emptied when this table, the measured tables or the detected hardware change.
        """
        if self._generation != (generation := _generation()):
            self.cached.clear()
            self._generation = generation
        return self.cached

    def remember(self, asked: Hashable, answer: Any) -> None:
        answers = self.answers()
        if len(answers) >= _MOST_ANSWERS:
            answers.clear()
        answers[asked] = answer

    def tell_once(self, line: str) -> None:
        """Logs a choice the first time it is made."""
        if line not in self._told:
            self._told.add(line)
            logger.info(line)


def _generation() -> int:
    # both numbers only grow, so their sum changes with either
    return tuning_table.generation + hardware.generation


registry = Registry()
