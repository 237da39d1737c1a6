"""The embedding of a base together with its nearest, as one code."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from dilated_attention.models.config import NUM_BASES


class KmerEmbedding(nn.Module):
    """Σ_j table_j[code mod 5^j], j = 1 … k: vectors of a base, of it with its nearest neighbour, … of all k bases.

    (B, N) codes, as ``kmers`` makes them → (B, N, E). The first table starts at std E^-1/2, the others at 0.
    """

    def __init__(self, k: int, embed_dim: int, *, device: Any = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.k = k
        first, *others = (nn.Embedding(NUM_BASES**j, embed_dim, device=device, dtype=dtype) for j in range(1, k + 1))
        nn.init.normal_(first.weight, std=embed_dim**-0.5)
        for table in others:
            # what neighbours add is learned from nothing, the longer ones where there are enough of them
            nn.init.zeros_(table.weight)
        self.tables = nn.ModuleList((first, *others))
        # no codes have been read yet; see ``models.tokens``
        self.is_new = True

    @property
    def num_embeddings(self) -> int:
        """The number of codes, 5^k."""
        return int(NUM_BASES**self.k)

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        embedded = sum(table(codes % NUM_BASES**j) for j, table in enumerate(self.tables, 1))
        assert isinstance(embedded, torch.Tensor)
        # the residual stream has the dtype of what enters it, and autocast leaves embeddings alone
        if torch.is_autocast_enabled(codes.device.type):
            return embedded.to(torch.get_autocast_dtype(codes.device.type))
        return embedded

    def extra_repr(self) -> str:
        return f"k={self.k}"


def following_codes(codes: torch.Tensor, symbols: torch.Tensor, k: int) -> torch.Tensor:
    """Returns the codes of ``symbols``, each of which comes after the base of one of ``codes``: symbol + 5·(code mod 5^(k−1))."""
    return symbols + NUM_BASES * (codes % NUM_BASES ** (k - 1))
