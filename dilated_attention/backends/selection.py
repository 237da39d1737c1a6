"""The registry of kernel libraries, and the choice among them.

Selection walks one ordered table and is pure Python on declared capabilities, so it can be tested on a CPU for any GPU by passing
another ``Hardware``.
"""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Hashable
from typing import Any

from dilated_attention.backends import hardware, rates
from dilated_attention.backends.base import AttentionRequest, Backend
from dilated_attention.pattern.checks import shown

logger = logging.getLogger("dilated_attention")

_MOST_ANSWERS = 4096
# work of a problem from which a plan for its shape (about 70 ms on an H100) takes less time than its kernels save in one call
_PLAN_FLOPS = 5e13


class BackendUnavailable(RuntimeError):
    """The named backend cannot compute the call, or no backend can. The message lists every reason, and the backends that could."""


class Registry:
    """The single ordered table: backends by name, and their order of preference by shipped rates, else by architecture."""

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
        names: tuple[str, ...] | None = self.cached.get(request)
        if names is None:
            names = tuple(self.ranking(request))
            self.remember(request, names)
        return names

    def ranking(self, request: AttentionRequest) -> dict[str, str]:
        """Returns every name in order of preference, with the reason for its place: the shipped table, the architecture's order, …"""
        machine, orders = request.hardware, self._orders
        family = f"sm{machine.capability[0]}x" if machine.device_type == "cuda" and machine.capability and not machine.is_rocm else ""
        of_family = orders.get((family, request.kind), ())
        groups = [(orders.get((machine.architecture, request.kind), ()), "architecture order")]
        # rows of windows lack some libraries, so they compare those that they have with tiles, and order nothing
        if (shipped := rates.table_of(machine.architecture)) is not None and not request.window:
            groups.append((rates.by_rate(shipped.tflops(request), of_family), f"shipped table ({shipped.source}, {shipped.date})"))
        groups += [(of_family, "architecture order"), (self.names(), "order of registration")]
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
        table = self.table(request)
        wanted = set(self.names()) if name == "auto" else set(self._families.get(name, (name,)))
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
        if name.startswith("_") or not inspect.isfunction(method):
            continue
        signature, names = inspect.signature(getattr(kind, name)), list(inspect.signature(method).parameters)
        by_place = [x.name for x in inspect.signature(method).parameters.values() if x.kind is x.POSITIONAL_OR_KEYWORD]
        try:
            # each name as its own value, first those that may be given by place, then all but self by name
            bound = [signature.bind(*names[:count], **{x: x for x in names[count:]}) for count in (len(by_place), 1)]
            fits = all(x == value or not isinstance(value, str) for one in bound for x, value in one.arguments.items())
        except TypeError:
            fits = False
        if not fits:
            raise TypeError(
                f"{kind.__name__}.{name} takes ({', '.join(signature.parameters)}); "
                f"expected the parameters of Backend.{name} by their names: ({', '.join(names)})"
            )


registry = Registry()


def refresh() -> None:
    """Discards the detected hardware and what was decided on it. Call this after installing or loading a kernel library."""
    # folders of modules that were listed before
    importlib.invalidate_caches()
    for detected in (hardware._detect, hardware.has_triton, hardware.has_gluon):
        detected.cache_clear()
    registry.cached.clear()
