"""Multi-head layers of one process and of a sequence that several processes share: what happens between ``project`` and ``combine``."""

from __future__ import annotations

from typing import Any

import torch

from dilated_attention import validation as check
from dilated_attention.modules._projections import MultiheadProjections
from dilated_attention.modules._ring import RingSettings
from dilated_attention.pattern.checks import as_int


class LocalMultihead(MultiheadProjections):
    """A layer of one process. ``attention`` is an ``AttentionMaps``, whose maps the layer offers too."""

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, cu_seqlens: torch.Tensor | None, query_offset: int, **options: Any
    ) -> torch.Tensor:
        """Returns the layer's output (B, Nq, E) for what ``project`` returned. ``options`` are further arguments of ``attention``."""
        q, k, query_offset = self._rotated(q, k, cu_seqlens, query_offset)
        return self.combine(self.attention(q, k, v, cu_seqlens=cu_seqlens, query_offset=query_offset, **options))

    def _rotated(
        self, q: torch.Tensor, k: torch.Tensor, cu_seqlens: torch.Tensor | None, query_offset: int
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Returns q and k, rotated with ``rotary``, and the checked offset."""
        if not self.rotary:
            return q, k, query_offset
        query_offset = check.check_query_offset(query_offset, q.shape[1], k.shape[1])
        return *self.rotate(q, k, torch.arange(k.shape[1], device=k.device), cu_seqlens, query_offset), query_offset

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
        return self._rotated(*self._scored_heads(self.q_proj(query), self.k_proj(key)), cu_seqlens, query_offset)[:2]


class RingMultihead(MultiheadProjections):
    """A layer whose processes each hold some rows of a sequence. ``attention`` has ``ring``, which says where they are in it."""

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, cu_seqlens: torch.Tensor | None, seq_len: int | None, **options: Any
    ) -> torch.Tensor:
        """Returns the layer's output (B, n, E) for what ``project`` returned. ``options`` are further arguments of ``attention``."""
        if self.rotary:
            ring: RingSettings = self.attention.ring
            seq_len = ring.whole_length(q.shape[1]) if seq_len is None else as_int("seq_len", seq_len, minimum=0)
            # the attention refuses unequal numbers of rows, on all processes alike
            if q.shape[1] == k.shape[1]:
                q, k = self.rotate(q, k, ring.positions(k, seq_len), cu_seqlens, seq_len=seq_len)
        return self.combine(self.attention(q, k, v, cu_seqlens=cu_seqlens, seq_len=seq_len, **options))
