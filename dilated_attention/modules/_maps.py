"""``attention_map`` and ``attention_received`` as methods of modules, with the settings of the module's forward."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch

from dilated_attention import validation as check
from dilated_attention.functional import attention_map, attention_received
from dilated_attention.modules._projections import MultiheadProjections


class AttentionMaps(ABC):
    """Adds the maps to a module that takes projected queries and keys."""

    @abstractmethod
    def _map_arguments(self) -> dict[str, Any]:
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
            **self._map_arguments(),
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
            **self._map_arguments(),
            query_weights=query_weights,
            is_causal=is_causal,
            key_padding_mask=key_padding_mask,
            cu_seqlens=cu_seqlens,
            query_offset=query_offset,
            average_heads=average_heads,
            dtype=dtype,
            backend=backend,
        )


class MultiheadMaps(MultiheadProjections):
    """Adds the maps to a multi-head module whose ``attention`` is an ``AttentionMaps``."""

    attention: AttentionMaps

    @torch.no_grad()
    def attention_map(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None = None,
        *,
        query_rows: Any,
        is_causal: bool = False,
        key_padding_mask: torch.Tensor | None = None,
        cu_seqlens: torch.Tensor | None = None,
        query_offset: int = 0,
        average_heads: bool = False,
        chunk: int | None = None,
    ) -> torch.Tensor:
        """Returns the attention weights (B, H, R, Nk) of chosen queries in a ``forward`` without dropout: see ``attention_map``.

        They weight the projected values, before ``inner_attn_ln`` and ``out_proj``.

        Args:
            query, key, is_causal, key_padding_mask, cu_seqlens, query_offset: see ``forward``.
            query_rows, average_heads, chunk: see ``dilated_attention.functional.attention_map``.

        >>> weights = layer.attention_map(x, query_rows="cls", average_heads=True)[:, 0]  # (B, N)
        """
        q, k = self._scored(query, key, cu_seqlens, query_offset)
        return self.attention.attention_map(
            q,
            k,
            query_rows,
            is_causal=is_causal,
            key_padding_mask=key_padding_mask,
            cu_seqlens=cu_seqlens,
            query_offset=query_offset,
            average_heads=average_heads,
            chunk=chunk,
        )

    @torch.no_grad()
    def attention_received(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None = None,
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
            query_weights, average_heads, dtype, backend: see ``dilated_attention.functional.attention_received``.
        """
        q, k = self._scored(query, key, cu_seqlens, query_offset)
        return self.attention.attention_received(
            q,
            k,
            query_weights=query_weights,
            is_causal=is_causal,
            key_padding_mask=key_padding_mask,
            cu_seqlens=cu_seqlens,
            query_offset=query_offset,
            average_heads=average_heads,
            dtype=dtype,
            backend=backend,
        )

    def _scored(
        self, query: torch.Tensor, key: torch.Tensor | None, cu_seqlens: torch.Tensor | None, query_offset: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns q and k as ``forward`` passes them to the attention, without computing values as ``project`` does."""
        key = query if key is None else key
        self._check_inputs(query, key, key)
        q = self.q_proj(query).unflatten(-1, (self.num_heads, self.head_dim))
        k = self.k_proj(key).unflatten(-1, (self.num_kv_heads, self.head_dim))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rotary:
            query_offset = check.check_query_offset(query_offset, q.shape[1], k.shape[1])
            q, k = self.rotate(q, k, torch.arange(k.shape[1], device=k.device), cu_seqlens, query_offset)
        return q, k
