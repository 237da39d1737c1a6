"""A layout that lists explicitly which runs of positions each process holds, and its name, by which ops and processes pass it on."""

from __future__ import annotations

import functools
import hashlib
import itertools
from dataclasses import dataclass, field
from typing import Any

from dilated_attention.pattern.checks import one_of

_PREFIX = "runs:"
LAYOUTS = ("contiguous", "zigzag", "striped")
Runs = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Layout:
    """An explicit layout: which positions of a sequence of N each of W processes holds.

    It is accepted wherever a layout is: by ``shard_sequence``, ``unshard_sequence``, ``local_positions`` and attention over sharded
    sequences. ``balanced_layout`` makes one.

    Args:
        seq_len: N.
        runs: for each process its runs [start, end), ascending; together they hold every position once.
        imbalance: maximum over mean work of a process, if the layout was made for a given workload; 1 is even.

    Raises:
        ValueError: if the runs leave out a position or hold it twice.
    """

    seq_len: int
    runs: tuple[Runs, ...]
    imbalance: float = 1.0
    # the layout's name where only strings can be passed; not ``str()``, which torch.compile cannot trace
    name: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        runs = tuple(tuple((int(start), int(end)) for start, end in mine) for mine in self.runs)
        object.__setattr__(self, "runs", runs)
        if not runs:
            raise ValueError("runs is empty; expected the runs of at least one process")
        for rank, mine in enumerate(runs):
            if any(start >= end for start, end in mine) or any(a[1] > b[0] for a, b in itertools.pairwise(mine)):
                raise ValueError(f"runs[{rank}] is {_shown(mine)}; expected runs (start, end) with start < end, ascending, without overlap")
        end = 0
        for start, stop in sorted(run for mine in runs for run in mine):
            if start != end:
                raise ValueError(f"runs {'leave out' if start > end else 'hold twice'} position {min(start, end)}; each must be held once")
            end = stop
        if end != self.seq_len:
            raise ValueError(f"runs end at position {end} of a sequence of {self.seq_len}; they must hold all of it")
        text = ";".join(",".join(f"{start}-{stop}" for start, stop in mine) for mine in runs)
        object.__setattr__(self, "name", f"{_PREFIX}{self.seq_len}:{text}")

    @property
    def size(self) -> int:
        """W, the number of processes."""
        return len(self.runs)


def layout_name(layout: Any, known: tuple[str, ...] = LAYOUTS) -> str:
    """Returns a layout as the string that names it. ``known``: the layouts of one word that are accepted here; ValueError or TypeError for
    anything else but a ``Layout``."""
    if isinstance(layout, Layout):
        return layout.name
    if not (isinstance(layout, str) and layout.startswith(_PREFIX)):
        one_of("layout", layout, known, also="or a Layout, e.g. from balanced_layout")
    return str(layout)


def is_dealt(layout: str) -> bool:
    """Whether the name is that of a ``Layout``."""
    return layout.startswith(_PREFIX)


def short_name(layout: str) -> str:
    """Returns the name in the form shown in messages."""
    return (
        layout
        if len(layout) <= 60
        else f"{layout[:40]} … ({layout.count('-')} runs, hash {hashlib.sha256(layout.encode()).hexdigest()[:8]})"
    )


def runs_of(layout: str, seq_len: int, size: int) -> tuple[Runs, ...]:
    """Returns every process's runs from the name of a ``Layout``; ValueError if it was made for another length or number of processes."""
    found, runs = _parsed(layout)
    if (found, len(runs)) != (seq_len, size):
        raise ValueError(
            f"layout is for {found} positions on {len(runs)} processes, the sequence has {seq_len} on {size}; make one for them with "
            f"balanced_layout(pattern, {seq_len}, {size})"
        )
    return runs


@functools.lru_cache(maxsize=64)
def _parsed(layout: str) -> tuple[int, tuple[Runs, ...]]:
    length, _, text = layout.removeprefix(_PREFIX).partition(":")
    runs = []
    for mine in text.split(";"):
        pairs = (run.split("-") for run in mine.split(",") if run)
        runs.append(tuple((int(start), int(end)) for start, end in pairs))
    return int(length), tuple(runs)


def _shown(runs: Runs) -> str:
    return str(runs) if len(runs) <= 6 else f"{runs[:6]} …"
