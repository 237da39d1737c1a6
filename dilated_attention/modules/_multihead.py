"""Multi-head layers of one process and of a sequence that several processes share: what happens between ``project`` and ``combine``."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from dilated_attention import validation as check
from dilated_attention.modules._projections import MultiheadProjections
from dilated_attention.modules._ring import RingSettings
from dilated_attention.pattern.checks import as_int


class LocalMultihead(MultiheadProjections):
    """A layer of one process. ``attention`` is a ``LocalAttention``, whose maps the layer offers too."""

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None = None,
        value: torch.Tensor | None = None,
        *,
        is_causal: bool = False,
        key_padding_mask: torch.Tensor | None = None,
        cu_seqlens: torch.Tensor | None = None,
        need_weights: bool = False,
        attn_mask: None = None,
        input_norm: nn.Module | None = None,
        query_offset: int = 0,
    ) -> tuple[torch.Tensor, None]:
        """Computes the attention.

        Args:
            query: (B, Nq, E), in the parameters' dtype, or any under autocast.
            key: (B, Nk, E); None for query.
            value: (B, Nk, E); None for key.
            is_causal: a query sees keys at its own position and before.
            key_padding_mask: (B, Nk) bool, True = padding.
            cu_seqlens: boundaries of packed documents, int32 (documents + 1,), B = 1.
            need_weights, attn_mask: for nn.MultiheadAttention's signature; only False and None are accepted.
            input_norm: a norm of the surrounding block, applied here to query, key and value first. Passing it saves memory in training.
            query_offset: position of the first query among the keys, for decoding; query_offset + Nq ≤ Nk. Keys are at 0 … Nk − 1.

        Returns:
            (out (B, Nq, E) in the projections' dtype, None). The None stands where nn.MultiheadAttention returns its weights.

        Raises:
            ValueError, TypeError: the inputs do not fit together.
            BackendUnavailable: no backend can compute this, or the named one cannot.
        """
        q, k, v = self.project_call(query, key, value, need_weights, attn_mask, input_norm)
        out = self.attend(q, k, v, is_causal=is_causal, key_padding_mask=key_padding_mask, cu_seqlens=cu_seqlens, query_offset=query_offset)
        return out, None

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
        self, query: torch.Tensor, key: torch.Tensor | None = None, *, query_rows: Any, cu_seqlens: torch.Tensor | None = None,
        query_offset: int = 0, **options: Any,
    ) -> torch.Tensor:  # fmt: skip
        """Returns the attention weights (B, H, R, Nk) of chosen queries in a ``forward`` without dropout.

        They weight the projected values, before ``inner_attn_ln`` and ``out_proj``.

        Args:
            query, key, cu_seqlens, query_offset: see ``forward``.
            query_rows: see ``dilated_attention.functional.attention_map``.
            options: is_causal and key_padding_mask of ``forward``; average_heads and chunk of that function.

        >>> weights = layer.attention_map(x, query_rows="cls", average_heads=True)
        >>> weights[:, 0]  # (B, N)
        """
        places: dict[str, Any] = {"cu_seqlens": cu_seqlens, "query_offset": query_offset}
        return self.attention.attention_map(*self._scored(query, key, **places), query_rows, **places, **options)

    @torch.no_grad()
    def attention_received(
        self, query: torch.Tensor, key: torch.Tensor | None = None, *, cu_seqlens: torch.Tensor | None = None, query_offset: int = 0,
        **options: Any,
    ) -> torch.Tensor:  # fmt: skip
        """Returns the attention (B, H, Nk) that every key receives from all queries.

        Args:
            query, key, cu_seqlens, query_offset: see ``forward``.
            options: is_causal and key_padding_mask of ``forward``; query_weights, average_heads, dtype and backend of
                ``dilated_attention.functional.attention_received``.
        """
        places: dict[str, Any] = {"cu_seqlens": cu_seqlens, "query_offset": query_offset}
        return self.attention.attention_received(*self._scored(query, key, **places), **places, **options)

    def _scored(
        self, query: torch.Tensor, key: torch.Tensor | None, cu_seqlens: torch.Tensor | None, query_offset: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns q and k as ``forward`` passes them to the attention, without computing values as ``project`` does."""
        key = query if key is None else key
        self._check_inputs(query, key, key)
        return self._rotated(*self._scored_heads(self.q_proj(query), self.k_proj(key)), cu_seqlens, query_offset)[:2]


class RingMultihead(MultiheadProjections):
    """A layer whose processes each hold some rows of a sequence. ``attention`` has ``ring``, which says where they are in it."""

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None = None,
        value: torch.Tensor | None = None,
        *,
        is_causal: bool = False,
        seq_len: int | None = None,
        key_padding_mask: torch.Tensor | None = None,
        cu_seqlens: torch.Tensor | None = None,
        need_weights: bool = False,
        attn_mask: None = None,
        input_norm: nn.Module | None = None,
    ) -> tuple[torch.Tensor, None]:
        """Computes the attention.

        Args:
            query: (B, n, E), this process's rows in the order of the layout, in the parameters' dtype, or any under autocast.
            key: (B, n, E) of the same positions; None for query.
            value: (B, n, E); None for key.
            seq_len: N. With None the processes ask each other in every call. Either all processes give it, or none. With ``rotary`` under
                torch.compile it must be given.
            key_padding_mask: (B, n) bool of this process's keys, True = padding.
            cu_seqlens: boundaries of packed documents in the whole sequence, int32 (documents + 1,), B = 1; equal on all processes.
            is_causal, need_weights, attn_mask, input_norm: see ``MultiheadDilatedAttention.forward``.

        Returns:
            (out (B, n, E) in the projections' dtype, None).

        Raises:
            ValueError, TypeError: as there, or the calls differ between processes.
            RingError: a process died, stalled or made a different call.
        """
        q, k, v = self.project_call(query, key, value, need_weights, attn_mask, input_norm)
        out = self.attend(q, k, v, is_causal=is_causal, key_padding_mask=key_padding_mask, cu_seqlens=cu_seqlens, seq_len=seq_len)
        return out, None

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
