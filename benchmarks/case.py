"""One call of attention with its options, families of cases that differ in length, and how this library is called for them.

A case's name is ``FAMILY-LENGTH[-full | -causal][-xBATCH][-dD]``, of which option-… may leave out the length: ``gigapath-10001``,
``longnet-32768-full``, ``blocks10-32768-d64``. D is the head dim.
"""

from __future__ import annotations

import fnmatch
import functools
import itertools
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

import dilated_attention as da
from dilated_attention.pattern import BigBird, BlockPattern, DilatedPattern, GlobalLocal, LocalWindow, RandomBlocks, TopBlocks
from dilated_attention.pattern.blocks.block_lists import count_pairs

Pattern = DilatedPattern | BlockPattern
# rows drawn at a time: float32 noise for a whole large tensor would need twice its memory
_STRETCH = 2**22
_PLAIN: dict[str, Any] = {"queries": None, "window": None, "dropout_p": 0.0, "padding": None, "bounds": None}


@dataclass(frozen=True, kw_only=True)
class Case:
    """Self-attention of B sequences of N positions."""

    name: str
    num_positions: int
    num_heads: int
    head_dim: int
    batch_size: int = 1
    num_kv_heads: int | None = None
    dtype: torch.dtype = torch.float32
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    is_causal: bool = False
    # None for dense attention
    pattern: Pattern | None = None
    # the last so many positions alone are queries
    queries: int | None = None
    # (left, right) keys of dense attention; None in it for no limit
    window: tuple[int | None, int | None] | None = None
    dropout_p: float = 0.0
    # which share of the keys is padding: ("suffix", 0.1) of each sequence, or ("random", 0.1)
    padding: tuple[str, float] | None = None
    # where packed documents begin, and N
    bounds: tuple[int, ...] | None = None

    @property
    def kv_heads(self) -> int:
        return self.num_kv_heads or self.num_heads

    @property
    def offset(self) -> int:
        """The position of the first query."""
        return 0 if self.queries is None else self.num_positions - self.queries

    @property
    def options(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name, default in _PLAIN.items() if getattr(self, name) != default}

    @property
    def branches(self) -> DilatedPattern:
        """Returns the case's branches, or dense attention as one."""
        return self.pattern if isinstance(self.pattern, DilatedPattern) else dense_pattern(self)

    def row(self) -> dict[str, Any]:
        """Returns what identifies the case in a row of results."""
        row: dict[str, Any] = {"case": self.name, "N": self.num_positions, "B": self.batch_size, "H": self.num_heads, "D": self.head_dim}
        row |= {"Hk": self.kv_heads} if self.kv_heads != self.num_heads else {}
        return row | {"dtype": str(self.dtype).removeprefix("torch."), "causal": self.is_causal}

    def plain(self) -> Case:
        """Returns the same without options."""
        return replace(self, **_PLAIN)

    def draw(self, heads: int, seed: int = 0, *, positions: int | None = None) -> torch.Tensor:
        """Draws a random normal tensor (B, N or ``positions``, heads, D)."""
        n = self.num_positions if positions is None else positions
        generator = torch.Generator(self.device).manual_seed(seed)
        x = torch.empty(self.batch_size * n, heads, self.head_dim, dtype=self.dtype, device=self.device)
        for part in x.split(max(1, _STRETCH // (heads * self.head_dim)), 0):
            part.normal_(generator=generator)
        return x.view(self.batch_size, n, heads, self.head_dim)

    def qkv(self, seed: int = 0) -> list[torch.Tensor]:
        """Returns q (B, queries, H, D), k and v (B, N, Hk, D), leaf tensors that require a gradient."""
        q = self.draw(self.num_heads, 3 * seed, positions=self.queries)
        k, v = (self.draw(self.kv_heads, 3 * seed + i) for i in (1, 2))
        return [x.requires_grad_() for x in (q, k, v)]

    def dout(self, seed: int = 1000) -> torch.Tensor:
        return self.draw(self.num_heads, seed, positions=self.queries)


@functools.lru_cache(maxsize=8)
def padding_mask(case: Case) -> torch.Tensor | None:
    """Returns bool (B, N), True where a key is padding."""
    if case.padding is None:
        return None
    kind, share = case.padding
    if kind == "suffix":
        row = torch.arange(case.num_positions, device=case.device) >= round((1 - share) * case.num_positions)
        return row.expand(case.batch_size, -1).contiguous()
    generator = torch.Generator(case.device).manual_seed(case.num_positions)
    return torch.rand(case.batch_size, case.num_positions, device=case.device, generator=generator) < share


@functools.lru_cache(maxsize=8)
def _arguments(case: Case) -> dict[str, Any]:
    options = {"is_causal": case.is_causal} | {name: value for name, value in case.options.items() if name in ("dropout_p", "window")}
    options |= {"query_offset": case.offset} if case.offset else {}
    options |= {} if case.padding is None else {"key_padding_mask": padding_mask(case)}
    if case.bounds is not None:
        options["cu_seqlens"] = torch.tensor(case.bounds, dtype=torch.int32, device=case.device)
    return options


def our_call(case: Case, pattern: Pattern | None, *qkv: torch.Tensor, over: str = "", **options: Any) -> Any:
    """Calls this library's function of ``pattern`` with the case's mask and options; ``over="ring_"``: on a process's part."""
    options = _arguments(case) | options
    if isinstance(pattern, BlockPattern):
        return getattr(da, f"{over}block_sparse_attention")(*qkv, pattern, **options)
    if pattern is None:
        return getattr(da, f"{over}attention")(*qkv, **options)
    options = {"head_offsets": pattern.head_offsets, "tail": pattern.tail} | options
    return getattr(da, f"{over}dilated_attention")(*qkv, pattern.segment_lengths, pattern.dilation_rates, **options)


def dense_pattern(case: Case) -> DilatedPattern:
    return DilatedPattern((case.num_positions,), (1,), "zero")


@functools.lru_cache(maxsize=512)
def pairs(case: Case, pattern: Pattern) -> int | None:
    """Returns the (query, key) pairs of a pattern under the case's options, with multiplicity, over heads and batch. None where the data
    decides, and of a part of the queries without a causal mask."""
    n, heads = case.num_positions, case.batch_size * case.num_heads
    if isinstance(pattern, TopBlocks):
        return None
    if isinstance(pattern, BlockPattern):
        # block lists of a million positions take minutes on a CPU
        on_gpu = case.device.type == "cuda" and not pattern.is_bound_to_process
        count = functools.partial(count_pairs, pattern, device=case.device) if on_gpu else pattern.pairs
        return case.batch_size * count(n, case.num_heads, is_causal=case.is_causal)
    if case.window is not None:
        left, right = (n if side is None else side for side in case.window)
        positions = torch.arange(case.offset, n)
        last = (positions + (0 if case.is_causal else right)).clamp(max=n - 1)
        return heads * int((last - (positions - left).clamp(min=0) + 1).sum())

    if case.offset and not case.is_causal:
        return None
    # rows before the first query are as those of a causal sequence that ends there
    sizes = [stop - start for start, stop in itertools.pairwise(case.bounds or (0, n))]
    total, before = (sum(pattern.pairs(size, case.num_heads, is_causal=case.is_causal) for size in x) for x in (sizes, [case.offset]))
    return case.batch_size * (total - before)


@dataclass(frozen=True, kw_only=True)
class Family:
    """Cases that differ in length, on one process or over several."""

    # query and key/value heads, head dim
    heads: tuple[int, int, int] = (12, 12, 64)
    # of named cases; over processes, of each one's part
    lengths: tuple[int, ...] = ()
    # of whole sequences over processes
    totals: tuple[int, ...] = ()
    pattern: Callable[[int], Pattern | None] = lambda n: None
    # compared by default
    contenders: tuple[str, ...] = ()
    is_causal: bool = False
    # N → other fields of Case
    options: Callable[[int], dict[str, Any]] = lambda n: {}
    by_default: bool = True
    layouts: tuple[str, ...] = ("contiguous",)
    passes: tuple[str, ...] = ("forward", "both")
    # whether one process can compute the whole sequence, to compare with
    fits: bool = True

    def case(self, name: str, n: int, *, is_small: bool = False, **fields: Any) -> Case:
        """Returns a case; the pattern of a small one is for a few hundred positions."""
        heads, kv_heads, head_dim = self.heads
        pattern = self.pattern(n)
        shape = {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": head_dim, "is_causal": self.is_causal}
        return Case(name=name, num_positions=n, pattern=small(pattern) if is_small else pattern, **shape | fields | self.options(n))


def documents(n: int) -> tuple[int, ...]:
    """Returns where documents begin, and N; their lengths are log-normal, none above a quarter of the whole."""
    draw, bounds = random.Random(0), [0]
    while bounds[-1] < n:
        length = int(draw.lognormvariate(6.5 if n >= 2**14 else 3.0, 1.4))
        bounds.append(min(n, bounds[-1] + max(1, min(length, n // 4))))
    return tuple(bounds)


def geometric(num_positions: int, first: int = 2048, growth: int = 4) -> DilatedPattern:
    """Returns branches of w = first · growth^i, r = growth^i up to the whole sequence; of short ones ``first`` is an eighth."""
    first = min(first, max(16, num_positions // 8))
    lengths = [first]
    while lengths[-1] < num_positions:
        lengths.append(lengths[-1] * growth)
    return DilatedPattern(tuple(lengths), tuple(growth**i for i in range(len(lengths))))


_TWOS, _BY_TWOS = (1, 2, 4, 8, 16), (2048, 4096, 8192, 16384, 32768)
LONGNET, _GEOMETRIC = DilatedPattern(_BY_TWOS, (1, 2, 4, 6, 12)), DilatedPattern(_BY_TWOS, _TWOS)
GIGAPATH = DilatedPattern((1024, 5792, 32768, 185_363, 1_048_576), _TWOS)
_LONGVIT = DilatedPattern((1024, 4096, 32768, 262_144, 1_048_576), _TWOS)
_CPU = DilatedPattern((1024, 2048, 4096, 8192), (1, 2, 4, 8))
_LIBRARIES = ("torch cudnn", "torch flash", "fa4")
_DILATED = ("ours", "equal", "torchscale", "floor", *_LIBRARIES)
_BLOCKS = ("attention", "ours", "flex", "ours flash4", "ours triton")


def _branches(pattern: DilatedPattern, *lengths: int, contenders: tuple[str, ...] = _DILATED, **fields: Any) -> Family:
    return Family(pattern=lambda n: pattern, lengths=lengths, contenders=contenders, **fields)


def _blocks(pattern: BlockPattern, *lengths: int, contenders: tuple[str, ...] = ("ours", "attention"), by_default: bool = False) -> Family:
    heads = (16, 16, 128)
    return Family(heads=heads, pattern=lambda n: pattern, lengths=lengths, contenders=contenders, by_default=by_default)


def _option(length: int, *contenders: str, pattern: Pattern | None = LONGNET, is_causal: bool = True, **fields: Any) -> Family:
    """Options that do not follow from N are given as they are."""
    options = fields.pop("options", lambda n: dict(fields))
    return Family(pattern=lambda n: pattern, lengths=(length,), contenders=contenders, is_causal=is_causal, options=options)


_without = functools.partial(_option, 32768, "ours", "without", is_causal=False)
FAMILIES: dict[str, Family] = {
    "gigapath": _branches(GIGAPATH, 5308, 10_001, 45_681, 200_000, heads=(16, 16, 48)),
    "longvit": _branches(_LONGVIT, 2**20, heads=(16, 16, 24), by_default=False),
    "longnet": _branches(LONGNET, 4096, 8192, 32768, 131_072, is_causal=True),
    "longnet128": _branches(_GEOMETRIC, 32768, 2**20, heads=(16, 16, 128), by_default=False),
    "geometric": _branches(_GEOMETRIC, 32768, 2**20, heads=(16, 16, 64), by_default=False),
    "dense": Family(contenders=("attention", "torch sdpa", *_LIBRARIES), lengths=(4096, 8192), is_causal=True),
    "cpu": _branches(_CPU, 16384, heads=(8, 8, 64), contenders=("ours", "floor", "torch sdpa", "attention"), by_default=False),
    "fp8": _branches(
        _GEOMETRIC, 8192, 32768, 131_072, 2**20, heads=(16, 16, 64), by_default=False,
        contenders=("attention", "attention flash3", "attention fp8", "ours", "ours fp8"),
    ),
    **{f"blocks{share}": _blocks(RandomBlocks(share / 100, own_block=True, block_size=128), 32768, contenders=_BLOCKS,
                                 by_default=share == 10) for share in (50, 10, 5, 2)},
    "window": _blocks(LocalWindow(2048), 131_072, 2**20),
    "global": _blocks(GlobalLocal(1024, 128), 131_072, 2**20),
    "bigbird": _blocks(BigBird(512, 128, 8, 0), 131_072, 2**20),
    "chosen": _blocks(TopBlocks(density=0.1), 131_072, 2**20),
    "option-padding-suffix": _without(padding=("suffix", 0.1)),
    "option-padding-random": _without(padding=("random", 0.1)),
    "option-dropout": _option(8192, "ours", "without", dropout_p=0.1),
    "option-documents": _option(131_072, "ours", "without", options=lambda n: {"bounds": documents(n)}),
    "option-float32": _option(8192, "ours", "attention", "torch efficient", dtype=torch.float32),
    "option-window": _option(32768, "attention", "fa4", "without", pattern=None, options=lambda n: {"window": (n // 8, 0)}),
    "option-query-offset": _option(65536, "ours", "without", "attention", options=lambda n: {"queries": n // 16}),
    "option-grouped": _option(32768, "ours", "attention", num_kv_heads=4),
    "option-deterministic": _option(32768, "ours deterministic", "ours"),
}  # fmt: skip
_NAME = re.compile(
    r"(?P<family>[a-z][a-z0-9-]*?)(-(?P<length>\d+))?(-(?P<mask>full|causal))?(-x(?P<batch>[1-9]\d*))?(-d(?P<dim>[1-9]\d*))?"
)


def case_names(globs: Sequence[str] = (), lengths: Sequence[int] | None = None) -> list[str]:
    """Returns the names that shell wildcards match, by default those of every table; ``lengths`` in place of the families' own."""
    named = [
        (name if name.startswith("option-") else f"{name}-{length}", family)
        for name, family in FAMILIES.items()
        for length in lengths or family.lengths
    ]
    names = dict[str, None]()
    for glob in globs:
        names |= dict.fromkeys(fnmatch.filter([name for name, _ in named], glob) or [glob])
    return list(names) if globs else [name for name, family in named if family.by_default]


def family_of(name: str) -> tuple[Family, re.Match[str]]:
    """Returns the family of a case's name. Raises ValueError where there is none."""
    match = _NAME.fullmatch(name)
    family = None if match is None else FAMILIES.get(match["family"])
    if match is None or family is None or not (match["length"] or name.startswith("option-")):
        raise ValueError(
            f"there is no case {name!r}; expected FAMILY-LENGTH[-full | -causal][-xBATCH][-dD], FAMILY one of {', '.join(FAMILIES)}"
        )
    return family, match


def make_case(name: str, device: torch.device, dtype: torch.dtype, *, is_small: bool = False) -> Case:
    """Creates the case of a name; a small one has at most 512 positions, its pattern in proportion."""
    family, match = family_of(name)
    n = int(match["length"] or family.lengths[0])
    fields: dict[str, Any] = {key: int(match[part]) for key, part in (("batch_size", "batch"), ("head_dim", "dim")) if match[part]}
    fields |= {"is_causal": match["mask"] == "causal"} if match["mask"] else {}
    return family.case(name, min(n, 512) if is_small else n, is_small=is_small, dtype=dtype, device=device, **fields)


def small(pattern: Pattern | None) -> Pattern | None:
    """Returns a pattern for a few hundred positions, for a try on a CPU."""
    if isinstance(pattern, DilatedPattern):
        lengths = tuple(max(rate, w // 64) for w, rate in pattern.branches)
        return DilatedPattern(lengths, pattern.dilation_rates, pattern.head_offsets, tail=pattern.tail)
    if isinstance(pattern, TopBlocks):
        return TopBlocks(density=0.1, block_size=64)
    if isinstance(pattern, RandomBlocks):
        return RandomBlocks(0.25, own_block=True, block_size=64)
    return None if pattern is None else BigBird(64, 16, 1, 0, block_size=64)


def new_lengths(case: Case, count: int, seed: int = 3) -> Iterator[int]:
    """Yields lengths that were not before, from two fifths to eight fifths of the case's."""
    draw, seen = random.Random(seed), {case.num_positions}
    while len(seen) <= count:
        length = draw.randrange(max(2, 2 * case.num_positions // 5), max(8 * case.num_positions // 5, 4 * count))
        if length not in seen:
            seen.add(length)
            yield length
