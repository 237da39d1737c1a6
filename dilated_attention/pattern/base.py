"""The base class of all patterns, with the dense definition, the counts and the picture of a pattern."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from torch import Tensor

from dilated_attention.pattern.checks import MAX_HEADS, MAX_LENGTH, as_int
from dilated_attention.pattern.drawing import draw


class Pattern(ABC):
    """Which keys a query attends to, and how often: the multiplicity m_h(i, j) ≥ 0 (docs/meaning.md).

    A pattern knows nothing about a model's tensors or about kernels. ``dense_mask`` *is* its definition. Every count below is derived
    from it, in closed form for large N, and tests check that both agree.
    """

    @abstractmethod
    def dense_mask(self, num_queries: int, num_keys: int, num_heads: int, *, is_causal: bool = False, query_offset: int = 0) -> Tensor:
        """Returns the multiplicities, integer or bool, of shape (num_heads, num_queries, num_keys). It is O(N²), for small N."""

    @abstractmethod
    def pairs(self, num_positions: int, num_heads: int = 1, *, is_causal: bool = False) -> int:
        """Returns the sum of all multiplicities over heads, queries and keys, which is the number of (query, key) products computed."""

    def density(self, num_positions: int, num_heads: int = 1, *, is_causal: bool = False) -> float:
        """Returns ``pairs`` divided by the pairs of dense full attention, H·N². A pair that is computed twice counts twice."""
        num_positions = as_int("num_positions", num_positions, minimum=0, maximum=MAX_LENGTH)
        num_heads = as_int("num_heads", num_heads, minimum=1, maximum=MAX_HEADS)
        if not num_positions:
            return 0.0
        return self.pairs(num_positions, num_heads, is_causal=is_causal) / (num_heads * num_positions**2)

    def flops(self, num_positions: int, num_heads: int, head_dim: int, *, is_causal: bool = False) -> tuple[int, int]:
        """Returns the floating-point operations of one sequence, (forward, backward): 4·D and 10·D per pair.

        Two matrix products per pair forward (QKᵀ, PV), five backward. A multiply-add counts as two operations. The softmax is left
        out, as is usual for attention kernels.
        """
        pairs = self.pairs(num_positions, num_heads, is_causal=is_causal)
        head_dim = as_int("head_dim", head_dim, minimum=1, maximum=MAX_LENGTH)
        return 4 * head_dim * pairs, 10 * head_dim * pairs

    def show(self, num_positions: int = 64, num_heads: int = 4, *, is_causal: bool = False, path: str | None = None) -> Any:
        """Draws the pattern with matplotlib, one panel per head, and saves it to ``path`` if given. Returns the figure."""
        return draw(self, num_positions, num_heads, is_causal=is_causal, path=path)
