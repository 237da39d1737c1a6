"""An attention problem and its random tensors."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from dilated_attention.fork import cached_property
from dilated_attention.pattern import geometric_branches

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}
# rows drawn at a time: float32 noise for a whole large tensor would need twice its memory
_STRETCH = 2**22


def geometric(num_positions: int, *, first: int = 2048) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns ``geometric_branches`` of the next context first · 4^i ≥ N, so that the rates of all lengths are powers of 4.

    For short sequences the first w is an eighth of the length, so that there are several branches.
    """
    length = first = min(first, max(16, num_positions // 8))
    while length < num_positions:
        length *= 4
    return geometric_branches(length, first)


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Self-attention of B sequences of N positions with H heads of dimension D, and ``num_kv_heads`` key/value heads."""

    num_positions: int
    num_heads: int
    head_dim: int
    batch_size: int = 1
    num_kv_heads: int | None = None
    dtype: torch.dtype = torch.float32
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    is_causal: bool = False

    @property
    def kv_heads(self) -> int:
        return self.num_kv_heads or self.num_heads

    @property
    def embed_dim(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def case(self) -> dict[str, Any]:
        """Returns what identifies the problem in a row."""
        case: dict[str, Any] = {"N": self.num_positions, "B": self.batch_size, "H": self.num_heads, "D": self.head_dim}
        case |= {"Hk": self.kv_heads} if self.kv_heads != self.num_heads else {}
        return case | {"dtype": str(self.dtype).removeprefix("torch."), "causal": self.is_causal}

    @property
    def label(self) -> str:
        """Returns one line, unique among problems on one device."""
        heads = f"{self.num_heads}" if self.kv_heads == self.num_heads else f"{self.num_heads}/{self.kv_heads}"
        mask = "causal" if self.is_causal else "full"
        return f"B={self.batch_size} N={self.num_positions} {heads}x{self.head_dim} {self.case['dtype']} {mask}"

    @property
    def bytes(self) -> int:
        """Returns the bytes of q, k and v."""
        return self.batch_size * self.num_positions * self.head_dim * (self.num_heads + 2 * self.kv_heads) * self.dtype.itemsize

    @property
    def dense_pairs(self) -> int:
        """Returns the (query, key) pairs of dense attention, over heads and batch."""
        n = self.num_positions
        return self.batch_size * self.num_heads * (n * (n + 1) // 2 if self.is_causal else n * n)

    def reduced(self, num_positions: int) -> Problem:
        """Returns the same with at most this many positions and two sequences: small enough for a complete check against float64."""
        return replace(self, num_positions=min(self.num_positions, num_positions), batch_size=min(self.batch_size, 2))

    def draw(self, heads: int, seed: int = 0) -> torch.Tensor:
        """Draws a random normal tensor (B, N, heads, D)."""
        generator = torch.Generator(self.device).manual_seed(seed)
        x = torch.empty(self.batch_size * self.num_positions, heads, self.head_dim, dtype=self.dtype, device=self.device)
        for part in x.split(max(1, _STRETCH // max(heads * self.head_dim, 1)), 0):
            part.normal_(generator=generator)
        return x.view(self.batch_size, self.num_positions, heads, self.head_dim)

    def qkv(self, seed: int = 0) -> list[torch.Tensor]:
        """Returns q (B, N, H, D), k and v (B, N, Hk, D), leaf tensors that require a gradient."""
        heads = (self.num_heads, self.kv_heads, self.kv_heads)
        return [self.draw(h, 3 * seed + i).requires_grad_() for i, h in enumerate(heads)]

    def embedded(self, seed: int = 0) -> torch.Tensor:
        """Returns x (B, N, E), a leaf tensor that requires a gradient."""
        return self.draw(self.num_heads, seed).flatten(2).detach().requires_grad_()

    @cached_property
    def branches(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the (segment lengths, dilation rates) that suites use for this length."""
        return geometric(self.num_positions)
