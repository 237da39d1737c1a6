"""Named cases of attention: problems with options, and who is compared on each by default.

A name is ``FAMILY-LENGTH[-full | -causal][-xBATCH][-dD]``, of which option-… may leave out the length: ``gigapath-10001``,
``longnet-32768-full``, ``blocks10-32768-d64``. D is the head dim.
"""

from __future__ import annotations

import fnmatch
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from dilated_attention.bench.workloads.problem import Problem
from dilated_attention.pattern import BigBird, GlobalLocal, LocalWindow, RandomBlocks, TopBlocks

_LONGNET = (2048, 4096, 8192, 16384, 32768)
_GEOMETRIC = (1, 2, 4, 8, 16)
_LIBRARIES = ("torch cudnn", "torch flash", "fa4")
_DILATED = ("ours", "equal", "torchscale", "floor", *_LIBRARIES)
_BLOCKS = ("attention", "blocks", "flex blocks", *(f"blocks {name}" for name in ("gluon", "cudnn_fe", "flash4", "triton")))
Change = Callable[[Problem, int], Problem]


@dataclass(frozen=True)
class Family:
    """Heads, head dim, branches, contenders of which the first is the baseline, lengths, and what else differs (problem, divisor)."""

    heads: int
    head_dim: int
    branches: tuple[tuple[int, ...], tuple[int, ...]]
    contenders: tuple[str, ...]
    lengths: tuple[int, ...]
    is_causal: bool = False
    change: Change = lambda problem, divisor: problem
    dtype: torch.dtype | None = None
    # False: only by name
    by_default: bool = True


def _blocks(make: Callable[[int], Any]) -> Change:
    return lambda problem, divisor: replace(problem, blocks=make(divisor))


def _random(percent: int) -> Change:
    return _blocks(lambda divisor: RandomBlocks(percent / 100, own_block=True, block_size=128 if divisor == 1 else 64))


def _set(**options: Any) -> Change:
    return lambda problem, divisor: replace(problem, **options)


def _documents(problem: Problem, divisor: int) -> Problem:
    """The length is that of 64 packed documents, of two in a smoke run."""
    draw = random.Random(0)
    bounds = [0]
    for _ in range(64 if divisor == 1 else 2):
        bounds.append(bounds[-1] + draw.randint(500, 20_000) // divisor)
    return replace(problem, num_positions=bounds[-1], bounds=tuple(bounds))


_LONG = (12, 64, (_LONGNET, (1, 2, 4, 6, 12)))
_OWN = ("ours", "without")
FAMILIES: dict[str, Family] = {
    "gigapath": Family(16, 48, ((1024, 5792, 32768, 185_363, 1_048_576), _GEOMETRIC), _DILATED, (5308, 10_001, 45_681, 200_000)),
    "longvit": Family(16, 24, ((1024, 4096, 32768, 262_144, 1_048_576), _GEOMETRIC), _DILATED, (2**20,), by_default=False),
    "longnet": Family(*_LONG, _DILATED, (4096, 8192, 32768, 131_072), True),
    "longnet128": Family(16, 128, (_LONGNET, _GEOMETRIC), _DILATED, (32768, 2**20), by_default=False),
    "geometric": Family(16, 64, (_LONGNET, _GEOMETRIC), _DILATED, (32768, 2**20), by_default=False),
    "dense": Family(*_LONG, ("attention", *_LIBRARIES), (4096,), True),
    "module": Family(*_LONG, ("DilatedAttention", "ours", *_LIBRARIES), (512,), True, _set(batch_size=8)),
    "cpu": Family(8, 64, ((1024, 2048, 4096, 8192), (1, 2, 4, 8)), ("ours", "floor", "torch sdpa", "attention"), (16384,),
                  dtype=torch.float32, by_default=False),
    "flex": Family(*_LONG, ("ours", "flex dilated", "flex"), (32768,), by_default=False),
    "fp8": Family(16, 64, (_LONGNET, _GEOMETRIC), ("attention", "flash3_fp8", "flash3", "sdpa_cudnn", "ours", "ours fp8"),
                  (8192, 32768, 131_072, 2**20), by_default=False),
    "fp8-biased": Family(16, 64, (_LONGNET, _GEOMETRIC), ("attention", "flash3_fp8", "ours", "ours fp8"), (131_072,),
                         change=_set(data="biased"), by_default=False),
    "fp8-outliers": Family(16, 64, (_LONGNET, _GEOMETRIC), ("attention", "flash3_fp8", "ours", "ours fp8"), (131_072,),
                           change=_set(data="outliers"), by_default=False),
    **{f"blocks{percent}": Family(16, 128, _LONG[2], _BLOCKS, (32768,), change=_random(percent), by_default=percent == 10)
       for percent in (50, 10, 5, 2)},
    **{name: Family(16, 128, _LONG[2], ("blocks", "lists"), (131_072, 2**20), change=_blocks(make), by_default=False)
       for name, make in {
           "window": lambda divisor: LocalWindow(2048 // divisor),
           "global": lambda divisor: GlobalLocal(1024 // divisor, 128),
           "bigbird": lambda divisor: BigBird(512 // divisor, 128, 8, 0)}.items()},
    "chosen": Family(16, 128, _LONG[2], ("blocks", "choice", "attention"), (131_072, 2**20),
                     change=_blocks(lambda divisor: TopBlocks(density=0.1, block_size=128 if divisor == 1 else 64)), by_default=False),
    "option-padding-suffix": Family(*_LONG, _OWN, (32768,), change=_set(padding=("suffix", 0.1))),
    "option-padding-random": Family(*_LONG, _OWN, (32768,), change=_set(padding=("random", 0.1))),
    "option-dropout": Family(*_LONG, _OWN, (8192,), True, _set(dropout_p=0.1)),
    "option-documents": Family(*_LONG, ("ours", "single calls", "without"), (64,), True, _documents),
    "option-float32": Family(*_LONG, ("ours", "attention", "torch efficient"), (8192,), True, dtype=torch.float32),
    "option-window": Family(*_LONG, ("attention", "fa4", "dense without"), (32768,), True,
                            lambda problem, divisor: replace(problem, window=(4096 // divisor, 0))),
    "option-query-offset": Family(*_LONG, ("ours", "without", "attention"), (65536,), True,
                                  lambda problem, divisor: replace(problem, queries=problem.num_positions // 16)),
    "option-grouped": Family(*_LONG, ("ours", "ungrouped"), (32768,), True, _set(num_kv_heads=4)),
    "option-deterministic": Family(*_LONG, ("ours deterministic", "ours"), (32768,), True),
}  # fmt: skip
_NAMES = [(name if name.startswith("option-") else f"{name}-{n}", family) for name, family in FAMILIES.items() for n in family.lengths]
NAMES, DEFAULTS = [name for name, _ in _NAMES], [name for name, family in _NAMES if family.by_default]
_NAME = re.compile(r"(?P<family>[a-z][a-z0-9-]*?)(-(?P<length>\d+))?(-(?P<mask>full|causal))?(-x(?P<batch>\d+))?(-d(?P<dim>\d+))?")


@dataclass(frozen=True)
class Case:
    """``problem`` under a name, and the names of those compared by default."""

    name: str
    family: str
    problem: Problem
    contenders: tuple[str, ...]


def names_of(patterns: Sequence[str]) -> list[str]:
    """Returns the names that shell wildcards match, and others of known families as they are. Raises ValueError: no such case."""
    found: dict[str, None] = {}
    for pattern in patterns:
        names = fnmatch.filter(NAMES, pattern) or [pattern]
        for name in names:
            _parsed(name)
        found |= dict.fromkeys(names)
    return list(found)


def _parsed(name: str) -> tuple[str, Family, int, dict[str, Any]]:
    match = _NAME.fullmatch(name)
    family = None if match is None else FAMILIES.get(match["family"])
    if match is None or family is None or not (match["length"] or match["family"].startswith("option-")):
        families = ", ".join(FAMILIES)
        raise ValueError(f"there is no case {name!r}; expected FAMILY-LENGTH[-full | -causal][-xBATCH][-dD], FAMILY one of {families}")
    changes: dict[str, Any] = {} if match["mask"] is None else {"is_causal": match["mask"] == "causal"}
    changes |= {key: int(match[part]) for key, part in (("batch_size", "batch"), ("head_dim", "dim")) if match[part]}
    return match["family"], family, int(match["length"] or family.lengths[0]), changes


def make_case(name: str, device: torch.device, dtype: torch.dtype, *, full: bool = True) -> Case:
    """Creates a case; without ``full`` every length is divided by 64, and N is at most 512: a smoke run on a CPU core."""
    kind, family, length, changes = _parsed(name)
    divisor = 1 if full else 64
    lengths, rates = family.branches
    branches = tuple(w // divisor for w in lengths), rates
    shape: dict[str, Any] = {"num_heads": family.heads, "head_dim": family.head_dim, "is_causal": family.is_causal, "device": device}
    n = length if full else max(64, min(length // divisor, 512))
    problem = Problem(num_positions=n, dtype=family.dtype or dtype, given_branches=branches, **shape)
    return Case(name, kind, replace(family.change(problem, divisor), **changes), family.contenders)
