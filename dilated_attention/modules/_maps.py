"""``attention_map`` and ``attention_received`` as methods of attention modules, with the settings of the module's forward."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch

from dilated_attention.functional import attention_map, attention_received


class AttentionMaps(ABC):
    """Adds the maps to a module that takes projected queries and keys."""

    @abstractmethod
    def _map_arguments(self, query: torch.Tensor) -> dict[str, Any]:
        """Returns the module's settings as arguments of both functions."""

    def attention_map(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        query_rows: Any,
        *,
        is_causal: bool = False,
        key_padding_mask: torch.Tensor | None = None,
        cu_seqlens: torch.Tensor | None = None,
        query_offset: int = 0,
        average_heads: bool = False,
        lse: torch.Tensor | None = None,
        chunk: int | None = None,
    ) -> torch.Tensor:
        """Returns the attention weights (B, H, R, Nk) of chosen queries in a ``forward`` without dropout: see ``attention_map``.

        Args:
            query, key, is_causal, key_padding_mask, cu_seqlens, query_offset: see ``forward``.
            query_rows, average_heads, lse, chunk: see ``dilated_attention.functional.attention_map``.
        """
        return attention_map(
            query,
            key,
            **self._map_arguments(query),
            query_rows=query_rows,
            is_causal=is_causal,
            key_padding_mask=key_padding_mask,
            cu_seqlens=cu_seqlens,
            query_offset=query_offset,
            average_heads=average_heads,
            lse=lse,
            chunk=chunk,
        )

    def attention_received(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        *,
        query_weights: torch.Tensor | None = None,
        is_causal: bool = False,
        key_padding_mask: torch.Tensor | None = None,
        cu_seqlens: torch.Tensor | None = None,
        query_offset: int = 0,
        average_heads: bool = False,
        dtype: torch.dtype | None = None,
        backend: str = "auto",
    ) -> torch.Tensor:
        """Returns the attention (B, H, Nk) that every key receives from all queries: see ``attention_received``.

        Args:
            query, key, is_causal, key_padding_mask, cu_seqlens, query_offset: see ``forward``.
            query_weights, average_heads, dtype, backend: see ``dilated_attention.functional.attention_received``. The module's own
                backend is not used, since it may not support ``dtype``.
        """
        return attention_received(
            query,
            key,
            **self._map_arguments(query),
            query_weights=query_weights,
            is_causal=is_causal,
            key_padding_mask=key_padding_mask,
            cu_seqlens=cu_seqlens,
            query_offset=query_offset,
            average_heads=average_heads,
            dtype=dtype,
            backend=backend,
        )
