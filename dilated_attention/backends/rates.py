"""Rates of backends that were measured on one GPU of an architecture and are shipped with the package: ``shipped/*.json``.

A row holds the rates of one kind of call (``RateKind``) at one head dim and one length. Which rows apply to a request:

* Its kind is that of the rows. Rows were timed without padding masks, dropout and deterministic gradients, so a request with any of these
  has no kind. Those of windows were timed with 1,024 keys a query, on some backends alone: they do not order backends.
* Kernels round head dims up. So the head dim is the smallest measured one that is not below the request's; the largest if all are below.
* Of these rows each backend takes, among those that have it, the one whose length is nearest by ratio; of two equally near ones the longer.
  An unknown length takes the longest.

Rates only order backends; whether a backend can compute a request is decided by its ``reasons_against``.
"""

from __future__ import annotations

import functools
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from dilated_attention.backends.base import AttentionRequest

_FOLDER = Path(__file__).parent / "shipped"
_DTYPE_CLASSES = {torch.float16: "half", torch.bfloat16: "half", torch.float32: "float32"}
# rates that differ by less than this fraction say nothing about another machine
_SAME_RATE = 0.03


class RateKind(NamedTuple):
    """A kind of call. ``dtype_class``: ``"half"`` or ``"float32"``; ``blocks``: a call on lists of blocks; ``window``: a dense one with a
    window."""

    pass_name: str
    dtype_class: str
    causal: bool
    blocks: bool
    window: bool = False


class RateRow(NamedTuple):
    """TFLOP/s by backend. ``length``: rows of a problem, or for lists of 128x128 blocks the mean number of keys per query."""

    head_dim: int
    length: int
    tflops: dict[str, float]


@dataclass(frozen=True)
class RateTable:
    """The rates of one GPU. ``source``: what was measured and how."""

    device: str
    date: str
    source: str
    rows: dict[RateKind, list[RateRow]]

    def tflops(self, request: AttentionRequest) -> dict[str, float]:
        """Returns the rates that apply to ``request`` (by the rule in the module docstring); empty if none do."""
        dtype_class, blocks = _DTYPE_CLASSES.get(request.dtype), request.blocks is not None
        unmeasured = request.key_mask or request.dropout or (request.deterministic and request.needs_grad)
        # block lists were timed with whole 128x128 blocks; the rows also apply to lists with some masked blocks
        unmeasured |= request.blocks not in (None, (128, 128)) or request.precision != "native"
        if dtype_class is None or unmeasured:
            return {}
        # lists contain the causal mask and windows nearly all of it, so their rows are not causal, whatever the request says
        causal = request.causal and not blocks and not request.window
        rows = self.rows.get(RateKind("backward" if request.needs_grad else "forward", dtype_class, causal, blocks, request.window))
        if not rows:
            return {}
        dims = {row.head_dim for row in rows}
        head_dim = min((dim for dim in dims if dim >= request.head_dim), default=max(dims))
        nearest_first = sorted(
            (row for row in rows if row.head_dim == head_dim),
            key=lambda row: (abs(math.log2(row.length / request.length)) if request.length > 0 else 0.0, -row.length),
        )
        # a later entry of a dict replaces an earlier one, so each backend keeps the rate of its nearest row
        return {name: rate for row in reversed(nearest_first) for name, rate in row.tflops.items()}


@functools.cache
def table_of(architecture: str) -> RateTable | None:
    """Returns the table shipped for this architecture (see ``Hardware.architecture``); None if nothing was measured on it."""
    path = _FOLDER / f"{architecture}.json"
    if not path.is_file():
        return None
    content = json.loads(path.read_text(encoding="utf-8"))
    rows: dict[RateKind, list[RateRow]] = {}
    for row in content["rows"]:
        kind = RateKind(row["pass"], row["dtype"], row["causal"], row.get("blocks", False), row.get("window", False))
        rows.setdefault(kind, []).append(RateRow(row["head_dim"], row["length"], row["tflops"]))
    return RateTable(content["device"], content["date"], content["source"], rows)


def rate_of(backend: str, request: AttentionRequest) -> float | None:
    """Returns the TFLOP/s of a backend for such a request on the measured GPU of this architecture; None if it was not measured."""
    table = table_of(request.hardware.architecture)
    return None if table is None else table.tflops(request).get(backend)


def by_rate(tflops: dict[str, float], architecture_order: tuple[str, ...]) -> tuple[str, ...]:
    """Orders backends by rate, the fastest first. Rates so close that another machine might reverse them follow the architecture's order:
    of the backends as fast as the fastest one that is left, the one that the architecture prefers goes next."""
    place = {name: index for index, name in enumerate(architecture_order)}
    remaining = sorted(tflops, key=lambda name: -tflops[name])
    ordered = []
    while remaining:
        as_fast = [name for name in remaining if tflops[name] >= tflops[remaining[0]] * (1 - _SAME_RATE)]
        ordered.append(min(as_fast, key=lambda name: place.get(name, len(place))))
        remaining.remove(ordered[-1])
    return tuple(ordered)
