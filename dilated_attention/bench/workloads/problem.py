"""An attention problem, with the options of a call, and its random tensors."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from typing import Any

import torch

import dilated_attention as da
from dilated_attention.engine.branches.plan import Shape, make_plan
from dilated_attention.fork import cached_property
from dilated_attention.pattern import BlockPattern, DilatedPattern, geometric_branches

Pattern = DilatedPattern | BlockPattern
Branches = tuple[tuple[int, ...], tuple[int, ...]]
# several times the ‖found − true‖ / ‖true‖ that rounding explains; float32 products may be TF32 on a GPU
BOUNDS = {torch.float64: 1e-10, torch.float32: 2e-3, torch.float16: 6e-3, torch.bfloat16: 2e-2}
# rows drawn at a time: float32 noise for a whole large tensor would need twice its memory
_STRETCH = 2**22
_OPTIONS: dict[str, Any] = {"queries": None, "window": None, "dropout_p": 0.0, "padding": None, "bounds": None, "data": "normal"}


def geometric(num_positions: int, *, first: int = 2048) -> Branches:
    """Returns ``geometric_branches`` of the next context first · 4^i ≥ N, so that the rates of all lengths are powers of 4.

    For short sequences the first w is an eighth of the length, so that there are several branches.
    """
    length = first = min(first, max(16, num_positions // 8))
    while length < num_positions:
        length *= 4
    return geometric_branches(length, first)


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Self-attention of B sequences of N positions with H heads of dimension D, and ``num_kv_heads`` key/value heads.

    Args:
        given_branches: (segment lengths, dilation rates) in place of ``geometric(N)``.
        blocks: the pattern of contenders that attend to ``the case's blocks``.
        queries: the last so many positions alone are queries; None for all.
        window: (left, right) keys of dense attention; None in it for no limit.
        padding: which share of the keys is padding: ``("suffix", 0.1)`` of each sequence, or ``("random", 0.1)``.
        bounds: where packed documents begin, and N.
        data: ``"normal"``; ``"outliers"``, a thousandth of the rows four times as large; ``"biased"``, channels of k and v far from 0.
    """

    num_positions: int
    num_heads: int
    head_dim: int
    batch_size: int = 1
    num_kv_heads: int | None = None
    dtype: torch.dtype = torch.float32
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    is_causal: bool = False
    given_branches: Branches | None = None
    blocks: BlockPattern | None = None
    queries: int | None = None
    window: tuple[int | None, int | None] | None = None
    dropout_p: float = 0.0
    padding: tuple[str, float] | None = None
    bounds: tuple[int, ...] | None = None
    data: str = "normal"

    @property
    def kv_heads(self) -> int:
        return self.num_kv_heads or self.num_heads

    @property
    def embed_dim(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def offset(self) -> int:
        """The position of the first query."""
        return 0 if self.queries is None else self.num_positions - self.queries

    @property
    def options(self) -> dict[str, Any]:
        """Returns the options that are set, by name."""
        return {name: getattr(self, name) for name, default in _OPTIONS.items() if getattr(self, name) != default}

    @property
    def case(self) -> dict[str, Any]:
        """Returns what identifies the problem in a row."""
        case: dict[str, Any] = {"N": self.num_positions, "B": self.batch_size, "H": self.num_heads, "D": self.head_dim}
        case |= {"Hk": self.kv_heads} if self.kv_heads != self.num_heads else {}
        return case | {"dtype": str(self.dtype).removeprefix("torch."), "causal": self.is_causal}

    @property
    def label(self) -> str:
        """Returns one line, unique among problems without options on one device."""
        heads = f"{self.num_heads}" if self.kv_heads == self.num_heads else f"{self.num_heads}/{self.kv_heads}"
        mask = "causal" if self.is_causal else "full"
        return f"B={self.batch_size} N={self.num_positions} {heads}x{self.head_dim} {self.case['dtype']} {mask}"

    @property
    def bytes(self) -> int:
        """Returns the bytes of q, k and v."""
        return self.batch_size * self.num_positions * self.head_dim * (self.num_heads + 2 * self.kv_heads) * self.dtype.itemsize

    def pairs(self, pattern: DilatedPattern, rows: tuple[int, int] | None = None) -> int:
        """Returns the pairs of ``pattern`` under this problem's options, padding included; without a window also of ``rows`` alone."""
        n = self.num_positions
        if self.window is not None:
            left, right = (n if side is None else side for side in self.window)
            positions = torch.arange(self.offset, n)
            last = (positions + (0 if self.is_causal else right)).clamp(max=n - 1)
            return self.batch_size * self.num_heads * int((last - (positions - left).clamp(min=0) + 1).sum())
        documents = tuple(itertools.pairwise(self.bounds or (0, n)))
        shape = Shape(self.num_heads, self.kv_heads, rows or (self.offset, n), (0, n), documents, self.is_causal)
        return self.batch_size * make_plan(pattern, shape).pairs

    def plain(self) -> Problem:
        """Returns the same without options."""
        return replace(self, **_OPTIONS)

    def reduced(self, num_positions: int) -> Problem:
        """Returns the same with at most this many positions and two sequences: small enough for a complete check against float64."""
        return replace(self, num_positions=min(self.num_positions, num_positions), batch_size=min(self.batch_size, 2))

    def draw(self, heads: int, seed: int = 0, *, positions: int | None = None) -> torch.Tensor:
        """Draws a random normal tensor (B, N or ``positions``, heads, D)."""
        n = self.num_positions if positions is None else positions
        generator = torch.Generator(self.device).manual_seed(seed)
        x = torch.empty(self.batch_size * n, heads, self.head_dim, dtype=self.dtype, device=self.device)
        for part in x.split(max(1, _STRETCH // max(heads * self.head_dim, 1)), 0):
            part.normal_(generator=generator)
        return x.view(self.batch_size, n, heads, self.head_dim)

    def qkv(self, seed: int = 0) -> list[torch.Tensor]:
        """Returns q (B, queries, H, D), k and v (B, N, Hk, D), leaf tensors that require a gradient."""
        q = self.draw(self.num_heads, 3 * seed, positions=self.queries)
        k, v = (self.draw(self.kv_heads, 3 * seed + i) for i in (1, 2))
        if self.data == "outliers":
            for x in (q, k, v):
                x[:, ::1000] *= 4
        elif self.data == "biased":
            # what trained models show: a few channels of the keys far from 0, values that do not average out
            q[..., :4] += 1
            k[..., :4] += 8
            v += 1
        return [x.requires_grad_() for x in (q, k, v)]

    def dout(self, seed: int = 1000) -> torch.Tensor:
        return self.draw(self.num_heads, seed, positions=self.queries)

    def embedded(self, seed: int = 0) -> torch.Tensor:
        """Returns x (B, N, E), a leaf tensor that requires a gradient."""
        return self.draw(self.num_heads, seed).flatten(2).detach().requires_grad_()

    @cached_property
    def branches(self) -> Branches:
        """Returns the (segment lengths, dilation rates) of this problem."""
        return geometric(self.num_positions) if self.given_branches is None else self.given_branches

    @cached_property
    def key_padding_mask(self) -> torch.Tensor | None:
        """Returns bool (B, N), True where a key is padding."""
        if self.padding is None:
            return None
        kind, share = self.padding
        if kind == "suffix":
            row = torch.arange(self.num_positions, device=self.device) >= round((1 - share) * self.num_positions)
            return row.expand(self.batch_size, -1).contiguous()
        generator = torch.Generator(self.device).manual_seed(self.num_positions)
        return torch.rand(self.batch_size, self.num_positions, device=self.device, generator=generator) < share

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """Returns the arguments of this library's functions that state mask and options."""
        found: dict[str, Any] = {"is_causal": self.is_causal}
        found |= {name: value for name, value in self.options.items() if name in ("dropout_p", "window")}
        if self.offset:
            found["query_offset"] = self.offset
        if self.key_padding_mask is not None:
            found["key_padding_mask"] = self.key_padding_mask
        if self.bounds is not None:
            found["cu_seqlens"] = torch.tensor(self.bounds, dtype=torch.int32, device=self.device)
        return found


def our_call(problem: Problem, pattern: Pattern, *qkv: torch.Tensor, over: str = "", **options: Any) -> Any:
    """Calls this library's function of ``pattern``, with the problem's mask and options; ``over="ring_"``: on a process's part."""
    options = problem.arguments | options
    if isinstance(pattern, BlockPattern):
        return getattr(da, f"{over}block_sparse_attention")(*qkv, pattern, **options)
    if pattern.dilation_rates == (1,) and pattern.segment_lengths[0] >= problem.num_positions and options.get("mixture_grad") is None:
        return getattr(da, f"{over}attention")(*qkv, **options)
    options = {"head_offsets": pattern.head_offsets, "tail": pattern.tail} | options
    return getattr(da, f"{over}dilated_attention")(*qkv, pattern.segment_lengths, pattern.dilation_rates, **options)
