"""Random test cases. A ``Case`` is one call with all its options. ``random_case`` draws one; ``inputs`` makes its tensors from its seed.

A seed stands for the same case and the same numbers only while the order of the draws stays, here and in ``inputs``.

Shape letters: B batch, N positions, H query heads, D head dim.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import torch

from dilated_attention import pattern as patterns
from dilated_attention.backends import registry
from dilated_attention.backends.base import accumulation_dtype
from dilated_attention.pattern import (
    BlockPattern,
    DilatedPattern,
    PerHead,
    TopBlocks,
)
from dilated_attention.pattern.blocks.base import kinds

T = TypeVar("T")

# block patterns that are not drawn alone: those made of others, and of what tensors hold
_OF_OTHERS = ("ChosenBlocks", "Intersection", "PerHead", "TopBlocks", "Union")
HEAD_DIMS = (1, 3, 8, 16, 24, 48, 59, 64)
# how a tensor (B, N, H, D) lies in memory, see ``make_tensor``
LAYOUTS = (
    "contiguous",
    "heads_first",
    "packed",
    "offset",
    "strided_dim",
    "transposed_dim",
    "expanded_batch",
    "expanded_heads",
    "expanded_rows",
)


class Chooser(Protocol):
    """What a case is drawn with: a ``random.Random``, or an adapter of hypothesis, which shrinks towards the first choice."""

    def randint(self, a: int, b: int, /) -> int: ...

    def choice(self, options: Sequence[T], /) -> T: ...


@dataclass(frozen=True, kw_only=True)
class Space:
    """What ``random_case`` may draw; each flag allows an option. Plain torch can compute what the defaults allow."""

    head_dims: tuple[int, ...] = HEAD_DIMS
    max_length: int = 70
    max_segment: int | None = None
    heads_per_kv: tuple[int, ...] = (1, 2, 3)
    layouts: tuple[str, ...] = LAYOUTS
    padding: bool = True
    window: bool = True
    dropout: bool = True
    softcap: bool = False
    bias: bool = False
    lse_grad: bool = True
    # every case has a block pattern; since blocks have 64 positions or more, ``max_length`` should be a few hundred
    blocks: bool = False

    @classmethod
    def of_backend(cls, name: str, **changes: Any) -> Space:
        """Returns the space of what a backend says that it supports. ``changes``: fields with other values."""
        capabilities = registry.get(name).capabilities
        dims = tuple(d for d in HEAD_DIMS if d <= capabilities.max_head_dim and d % capabilities.head_dim_multiple == 0)
        # a backend that takes none of these takes at least its multiple
        dims = dims or (capabilities.head_dim_multiple,)
        supported = {option: getattr(capabilities, option) for option in ("window", "dropout", "softcap", "bias")}
        return replace(cls(head_dims=dims, padding=capabilities.key_mask, **supported), **changes)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call with all its options. Its repr rebuilds it; ``inputs`` makes its tensors from ``seed``.

    Args:
        pattern: dilated branches, for ``dilated_attention``; or a block pattern, for ``block_sparse_attention``.
        branches: dilated branches beside a block pattern, for ``block_sparse_dilated_attention``.
        query_offset: position of the first query; that of the first key is 0.
        window: a window (left, right), None for unbounded, for ``attention``; the pattern is then one segment of rate 1.
        padding: which keys are padding: ``"none"`` · ``"some"`` · ``"row"``: some, and all of the first sequence · ``"all"``.
        bounds: bounds of packed documents, as in ``cu_seqlens``.
        lse_grad: whether the loss depends on lse as well as on out.
        sinks: whether the heads have learned sinks.
        softcap: scores are softcap · tanh(s / softcap); None for s.
        bias: ``"none"`` · ``"alibi"`` · distances of random coordinates in one (``"line"``) or two (``"plane"``) dimensions.
        layouts: memory layouts of q, k, v and dout, from ``LAYOUTS``.
        seed: of the tensors' numbers, and of some of their dtypes and shapes (``inputs``).
    """

    pattern: DilatedPattern | BlockPattern
    batch: int = 1
    num_queries: int = 1
    num_keys: int = 1
    heads: int = 1
    kv_heads: int = 1
    head_dim: int = 8
    is_causal: bool = False
    query_offset: int = 0
    scale: float | None = None
    window: tuple[int | None, int | None] | None = None
    mixture_grad: str = "exact"
    dropout_p: float = 0.0
    padding: str = "none"
    bounds: tuple[int, ...] | None = None
    lse_grad: bool = False
    layouts: tuple[str, str, str, str] = ("contiguous",) * 4
    seed: int = 0
    sinks: bool = False
    softcap: float | None = None
    bias: str = "none"
    branches: DilatedPattern | None = None

    @property
    def dilated(self) -> DilatedPattern | None:
        """The dilated branches, whether alone or beside a block pattern; None without."""
        return self.pattern if isinstance(self.pattern, DilatedPattern) else self.branches


@dataclass(frozen=True)
class Inputs:
    """The tensors of a case. The loss is the sum of out · ``dout`` and lse · ``dlse``; ``dlse`` is zero without ``lse_grad``."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    dlse: torch.Tensor
    key_padding_mask: torch.Tensor | None
    cu_seqlens: torch.Tensor | None
    sinks: torch.Tensor | None = None
    coordinates: torch.Tensor | None = None
    slopes: torch.Tensor | None = None

    def reach(self, name: str) -> float:
        """Returns the factor by which the error bound of a result (``"dq"``, …) grows: 1 for all but ``"dslopes"``.

        ``dslopes`` sums terms as large as distances, which cancel. Its factor is the largest distance times a tenth of the root of the
        number of rows, whose rounding errors are independent.
        """
        if name != "dslopes" or self.coordinates is None or not self.coordinates.numel():
            return 1.0
        return max(1.0, float(self.coordinates.max())) * max(1.0, 0.1 * (self.q.shape[0] * self.q.shape[1]) ** 0.5)


def random_case(source: Chooser | int, space: Space | None = None) -> Case:
    """Draws a case; ``source`` is a seed, a ``random.Random``, or anything with its ``randint`` and ``choice``."""
    draw: Chooser = random.Random(source) if isinstance(source, int) else source
    space = space or Space()

    def chance(percent: int) -> bool:
        return draw.randint(0, 99) >= 100 - percent

    kv_heads = draw.randint(1, 3)
    heads = kv_heads * draw.choice(space.heads_per_kv)
    num_keys = draw.randint(0, 9) if chance(20) else draw.randint(0, space.max_length)
    window = None
    if space.window and chance(8):
        window = (draw.choice([None, draw.randint(0, num_keys)]), draw.choice([None, draw.randint(0, num_keys)]))
        # a segment longer than every sequence: dense attention
        pattern = DilatedPattern((2**62,), (1,), "zero")
    else:
        pattern = random_branches(draw, heads, num_keys, space.max_segment)
    bounds, query_offset, num_queries = None, 0, num_keys
    # packed documents, or fewer queries than keys, or neither
    if chance(25):
        bounds = (0, *sorted(draw.randint(0, num_keys) for _ in range(draw.randint(0, 4))), num_keys)
    elif num_keys and chance(30):
        query_offset = draw.randint(0, num_keys - 1)
        num_queries = draw.randint(0 if chance(5) else 1, num_keys - query_offset)
    mixture_grad = "detached" if chance(30) else "exact"
    layouts = [draw.choice(space.layouts) if chance(25) else "contiguous" for _ in range(4)]
    case = Case(
        pattern=pattern,
        batch=1 if bounds else draw.randint(1, 3),
        num_queries=num_queries,
        num_keys=num_keys,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=draw.choice(space.head_dims),
        is_causal=chance(50),
        query_offset=query_offset,
        scale=draw.choice([0.01, 0.1, 0.3]) if chance(25) else None,
        window=window,
        mixture_grad=mixture_grad,
        dropout_p=draw.choice([0.1, 0.5, 0.9]) if space.dropout and chance(20) else 0.0,
        padding=draw.choice(["some", "some", "row", "all"]) if space.padding and chance(30) else "none",
        bounds=bounds,
        # with detached mixing, lse has no gradient
        lse_grad=space.lse_grad and mixture_grad == "exact" and chance(30),
        layouts=(layouts[0], layouts[1], layouts[2], layouts[3]),
        seed=draw.randint(0, 2**16),
        sinks=mixture_grad == "exact" and chance(25),
        softcap=draw.choice([0.5, 2.0, 30.0]) if space.softcap and chance(25) else None,
    )
    if space.bias and case.softcap is None and chance(30):
        case = replace(case, bias=draw.choice(["alibi", "line", "plane"]))
    if not space.blocks:
        return case
    block = (draw.choice([64, 128]), draw.choice([64, 128]))
    blocks = random_blocks(draw, heads, num_keys, block, any_length=bounds is not None)
    if chance(25):
        # chosen by content, besides (always) or among (within) the blocks of a pattern that is not
        amount: Any = draw.choice([{"blocks": 1}, {"blocks": 2}, {"density": 0.4}, {"mass": 0.6}])
        static_pattern: Any = random_blocks(draw, heads, num_keys, block, any_length=bounds is not None, depth=1) if chance(50) else None
        blocks = TopBlocks(**amount, **{draw.choice(["always", "within"]): static_pattern}, block_size=block)
    # functions of block patterns take neither a window nor detached mixing
    return replace(case, pattern=blocks, branches=pattern if chance(25) else None, window=None, mixture_grad="exact")


def scattered(batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """A mask function, for ``MaskFunction``, that keeps two in five pairs, spread out."""
    return (query * 7 + key * 3 + head) % 5 < 2


def random_blocks(
    draw: Chooser, heads: int, num_positions: int, block_size: tuple[int, int], *, any_length: bool, depth: int = 2
) -> BlockPattern:
    """Draws a block pattern, or several of them joined by |, & or by head.

    Args:
        any_length: only kinds that exist at every length, as packed documents need; else also those made for ``num_positions``.
        depth: how often joined patterns may be joined again.
    """
    if depth and draw.randint(0, 2) == 2:
        parts = [
            random_blocks(draw, heads, num_positions, block_size, any_length=any_length, depth=depth - 1) for _ in range(draw.randint(2, 3))
        ]
        operation = draw.choice(["or", "and", "heads"])
        if operation == "heads":
            return PerHead(tuple(parts[h % len(parts)] for h in range(heads)))
        return parts[0] | parts[1] if operation == "or" else parts[0] & parts[1]

    # for Document and BlockTensor: where the second document begins, which also seeds the kept blocks
    cut, grid = draw.randint(0, num_positions), [-(-num_positions // size) for size in block_size]
    kept = torch.rand(heads, *grid, generator=torch.Generator().manual_seed(cut)) < 0.5
    # fields of other types than integers
    fields: dict[str, Any] = {
        **dict.fromkeys(
            ["LocalWindow", "GlobalLocal", "BigBird"], lambda: {"window": [draw.choice([None, draw.randint(0, 150)]) for _ in range(2)]}
        ),
        "RandomBlocks": lambda: {"ratio": draw.choice([0.0, 0.2, 0.5, 1.0])},
        "Sparsity": lambda: {"ratio": draw.choice([0.1, 0.6]), "kind": draw.choice(["random", "local", "global_local"]), "seed": 0},
        "MaskFunction": lambda: {"fn": scattered, "per_head": draw.choice([False, True])},
        "Document": lambda: {"lengths": (cut, num_positions - cut)},
        "BlockTensor": lambda: {"mask": kept},
    }
    excluded = _OF_OTHERS + (("BlockTensor", "Document") if any_length or not num_positions else ())
    name = draw.choice([name for name in kinds() if name in patterns.__all__ and name not in excluded])
    return kinds()[name].random(draw, **fields.get(name, dict)(), block_size=block_size)


def random_branches(draw: Chooser, heads: int, num_keys: int, max_segment: int | None) -> DilatedPattern:
    """Draws a dilated pattern of one to four branches."""
    longest = min(2 * num_keys + 2, max_segment or 2 * num_keys + 2)
    lengths = [draw.randint(1, draw.choice([min(8, longest), longest])) for _ in range(draw.randint(1, 4))]
    if max_segment is None and draw.randint(0, 9) == 9:
        # longer than any sequence
        lengths[-1] = 2**40
    rates = [draw.randint(1, min(length, draw.choice([3, 11]))) for length in lengths]
    # of head offsets; "split": every head runs one branch
    kind = draw.choice(["cyclic", "blocked", "zero", "lists", "split"])
    offsets: Any = "cyclic" if kind == "split" else kind
    if kind == "lists":
        offsets = tuple(tuple(draw.randint(0, rate - 1) for _ in range(heads)) for rate in rates)
    tail = "zero_keys" if draw.randint(0, 99) >= 75 else "mask"
    return DilatedPattern(tuple(lengths), tuple(rates), offsets, "split" if kind == "split" else "all", tail)


def make_tensor(
    shape: Sequence[int], layout: str, dtype: torch.dtype, device: torch.device | str, generator: torch.Generator
) -> torch.Tensor:
    """Returns normally distributed numbers of shape (B, N, H, D), the same on every device, that lie in memory as ``layout`` says."""
    B, N, H, D = shape

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64).to(dtype).to(device)

    makers = {
        "contiguous": lambda: normal(B, N, H, D),
        "heads_first": lambda: normal(B, H, N, D).transpose(1, 2),
        "packed": lambda: normal(B, N, 3, H, D)[:, :, 1],
        "offset": lambda: normal(B * N * H * D + 3)[3:].view(B, N, H, D),
        "strided_dim": lambda: normal(B, N, H, 2 * D)[..., ::2],
        "transposed_dim": lambda: normal(B, N, D, H).transpose(2, 3),
        "expanded_batch": lambda: normal(1, N, H, D).expand(B, N, H, D),
        "expanded_heads": lambda: normal(B, N, 1, D).expand(B, N, H, D),
        "expanded_rows": lambda: normal(B, 1, H, D).expand(B, N, H, D),
    }
    if layout not in makers:
        raise ValueError(f"layout is {layout!r}; expected one of {', '.join(map(repr, makers))}")
    return makers[layout]()


def inputs(case: Case, dtype: torch.dtype, device: torch.device | str = "cpu") -> Inputs:
    """Returns the case's tensors. Equal cases have equal ones on all devices, up to their rounding to ``dtype``.

    By the seed, sinks and slopes have the inputs' dtype or that of lse, and coordinates are those of each batch entry or the same for all.
    """
    generator = torch.Generator().manual_seed(case.seed)
    queries = (case.batch, case.num_queries, case.heads, case.head_dim)
    keys = (case.batch, case.num_keys, case.kv_heads, case.head_dim)
    shapes = (queries, keys, keys, queries)
    q, k, v, dout = (make_tensor(shape, layout, dtype, device, generator) for shape, layout in zip(shapes, case.layouts, strict=True))
    accumulation = accumulation_dtype(dtype)
    dlse = torch.randn(case.batch, case.heads, case.num_queries, generator=generator, dtype=torch.float64) * case.lse_grad
    padding = None
    if case.padding != "none":
        padding = torch.rand(case.batch, case.num_keys, generator=generator) < 0.4
        # of so many batch entries every key is padding
        padding[: {"some": 0, "row": 1, "all": case.batch}[case.padding]] = True
        padding = padding.to(device)
    cu_seqlens = None if case.bounds is None else torch.tensor(case.bounds, dtype=torch.int32, device=device)
    dtype_of_heads = dtype if case.seed % 2 else accumulation
    # drawn also for a case without sinks, so that slopes and coordinates do not depend on that
    sinks = torch.randn(case.heads, generator=generator, dtype=torch.float64).mul_(2).to(dtype_of_heads)
    coordinates = slopes = None
    if case.bias != "none":
        slopes = torch.randn(case.heads, generator=generator, dtype=torch.float64).to(dtype_of_heads).to(device)
        width, batch = 2 if case.bias == "plane" else 1, case.batch if case.seed % 3 else 1
        coordinates = torch.rand(batch, case.num_keys, width, generator=generator).mul_(8).to(device)
        if case.bias == "alibi":
            # slopes are small, so that distant keys keep weights above 0
            slopes, coordinates = slopes / 8, torch.arange(case.num_keys, device=device, dtype=torch.float32)[None, :, None]
    options = padding, cu_seqlens, sinks.to(device) if case.sinks else None
    return Inputs(q, k, v, dout, dlse.to(accumulation).to(device), *options, coordinates, slopes)
