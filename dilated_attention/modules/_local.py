"""Attention modules of one process: ``forward``, and ``attention_map`` and ``attention_received`` with the same settings."""

from __future__ import annotations

from typing import Any

import torch

from dilated_attention.functional import attention_map, attention_received
from dilated_attention.modules._settings import KernelSettings


class LocalAttention(KernelSettings):
    """A module that takes projected queries, keys and values of whole sequences."""

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        is_causal: bool = False,
        key_padding_mask: torch.Tensor | None = None,
        cu_seqlens: torch.Tensor | None = None,
        query_offset: int = 0,
        return_lse: bool = False,
    ) -> Any:
        """Computes the attention.

        Args:
            query: (B, Nq, H, D), float16, bfloat16, float32 or float64.
            key, value: (B, Nk, Hk, D), Hk a divisor of H.
            is_causal: a query sees keys at its own position and before.
            key_padding_mask: (B, Nk) bool, True = padding.
            cu_seqlens: boundaries of packed documents, int32 (documents + 1,), B = 1.
            query_offset: position of the first query among the keys, for decoding; query_offset + Nq ≤ Nk.
            return_lse: also return the log-sum-exp of the scores.

        Returns:
            out (B, Nq, H, D) in query's dtype; with ``return_lse`` (out, lse (B, H, Nq)), lse in float32 (float64 for float64).

        Raises:
            ValueError, TypeError: the tensors do not fit together; messages call query, key and value q, k and v.
            BackendUnavailable: no backend can compute this, or the named one cannot.
        """
        return self.function(
            query,
            key,
            value,
            **self._arguments(query),
            is_causal=is_causal,
            cu_seqlens=cu_seqlens,
            key_padding_mask=key_padding_mask,
            query_offset=query_offset,
            return_lse=return_lse,
        )

    def attention_map(self, query: torch.Tensor, key: torch.Tensor, query_rows: Any, **options: Any) -> torch.Tensor:
        """Returns the attention weights (B, H, R, Nk) of chosen queries in a ``forward`` without dropout.

        Args:
            query, key: see ``forward``.
            query_rows: see ``dilated_attention.functional.attention_map``.
            options: of ``forward``: is_causal, key_padding_mask, cu_seqlens, query_offset; of that function: average_heads, lse, chunk.
        """
        return attention_map(query, key, query_rows=query_rows, **self._map_arguments(query), **options)

    def attention_received(self, query: torch.Tensor, key: torch.Tensor, **options: Any) -> torch.Tensor:
        """Returns the attention (B, H, Nk) that every key receives from all queries.

        Args:
            query, key: see ``forward``.
            options: of ``forward``: is_causal, key_padding_mask, cu_seqlens, query_offset; of
                ``dilated_attention.functional.attention_received``: query_weights, average_heads, dtype, backend. The module's own
                backend is not used, since it may not support ``dtype``.
        """
        return attention_received(query, key, **self._map_arguments(query), **options)
