"""Multi-head attention layers, dilated and block-sparse, with the call signature of nn.MultiheadAttention."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from dilated_attention import validation as check
from dilated_attention.modules._projections import MultiheadProjections
from dilated_attention.modules.block_sparse import BlockSparseAttention, BlockSparseDilatedAttention
from dilated_attention.modules.dilated import DilatedAttention
from dilated_attention.pattern import HeadOffsets


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
            key_padding_mask: (B, Nk) bool, True = padding; or floats, -inf = padding and 0 elsewhere, as torch's layers pass it.
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
        q, k, v, padding = self.project_call(query, key, value, key_padding_mask, need_weights, attn_mask, input_norm)
        out = self.attend(q, k, v, is_causal=is_causal, key_padding_mask=padding, cu_seqlens=cu_seqlens, query_offset=query_offset)
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


class MultiheadDilatedAttention(LocalMultihead):
    """Dilated attention (LongNet, arXiv 2307.02486) between MAGNETO's projections (arXiv 2210.06423), batch first.

        y = W_o · LN(concat_h(out_h)) + b_o,    out = dilated_attention(W_q x + b_q, W_k x + b_k, W_v x + b_v)

    LN is MAGNETO's sub-LayerNorm (``inner_attn_ln``); its other LayerNorm, before the projections, is left to the surrounding
    block. Weights are initialised Xavier-normal, with gain ``gamma_init`` for v and out and 1 for q and k; biases start at 0.

    Args:
        embed_dim: E, the width of queries, keys, values and output; a multiple of num_heads.
        num_heads: H query heads of dimension D = E/H ≤ 256.
        segment_lengths: w of each branch, in positions; one entry per branch.
        dilation_rates: r of each branch, 1 ≤ r ≤ w.
        num_kv_heads: Hk key/value heads, a divisor of H; query head h reads h // (H/Hk). None for H.
        dropout: probability that an attention weight is dropped, in training mode only; [0, 1).
        bias: whether the four projections have biases.
        layer_norm: whether to use the sub-LayerNorm before ``out_proj``; nn.MultiheadAttention has none.
        layer_norm_eps: eps of every norm of this layer.
        gamma_init: gain of the weights of v_proj and out_proj: MAGNETO's γ, sqrt(log 2M) for an encoder or a decoder of M layers.
        rotary: rotate queries and keys before dilation, by absolute position, or with ``cu_seqlens`` by position in the document.
        rotary_base: θ of the rotation, > 1.
        xpos_scale_base: b of XPOS (arXiv 2212.10554; TorchScale uses 512), with ``rotary``: pair i of a score is also multiplied by
            ((2i + 0.4D)/1.4D)^(distance/b). This attenuates far keys in causal attention; keys *after* a query are amplified. None for
            RoPE. Lengths whose factors overflow the dtype are refused: with b = 512 beyond 6,798 in float16, 70,251 in bfloat16.
        qk_norm: apply RMSNorm to each query and key head (``q_norm``, ``k_norm``) before the rotation.
        head_offsets, branch_heads, tail, mixture_grad, scale, deterministic, backend, precision: see ``DilatedAttention``.
        sinks: learn a score per head that the denominator gets in addition: the parameter ``attention.sinks`` (H,), zeros at first.
        device, dtype: device and dtype of the parameters.

    Raises:
        ValueError, TypeError: invalid settings, at construction.

    Differs from LongNet as ``dilated_attention`` does. Differs from nn.MultiheadAttention: it is batch first, has the sub-LayerNorm
    and separate q, k and v projections, returns no attention weights and takes no additive masks.

    >>> layer = MultiheadDilatedAttention(768, 12, [2048, 4096, 8192], [1, 2, 4])
    >>> y, _ = layer(x, is_causal=True)
    """

    attention: DilatedAttention

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        segment_lengths: Any,
        dilation_rates: Any,
        *,
        num_kv_heads: int | None = None,
        dropout: float = 0.0,
        bias: bool = True,
        layer_norm: bool = True,
        layer_norm_eps: float = 1e-5,
        gamma_init: float = 1.0,
        rotary: bool = False,
        rotary_base: float = 10000.0,
        xpos_scale_base: float | None = None,
        qk_norm: bool = False,
        head_offsets: HeadOffsets = "cyclic",
        branch_heads: str = "all",
        tail: str = "mask",
        mixture_grad: str = "exact",
        scale: float | None = None,
        deterministic: bool = False,
        backend: str = "auto",
        sinks: bool = False,
        precision: str = "native",
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(DilatedAttention, locals())


class MultiheadBlockSparseAttention(LocalMultihead):
    """Block-sparse attention between MAGNETO's projections (arXiv 2210.06423), batch first.

        y = W_o · LN(concat_h(out_h)) + b_o,    out = block_sparse_attention(W_q x + b_q, W_k x + b_k, W_v x + b_v)

    Args:
        embed_dim, num_heads, num_kv_heads, dropout, bias, layer_norm, layer_norm_eps, gamma_init: see ``MultiheadDilatedAttention``.
        rotary, rotary_base, xpos_scale_base, qk_norm, device, dtype: see there.
        pattern, sparsity_ratio, sparsity, block_size, seed: which pairs are kept: see ``BlockSparseAttention``.
        scale, deterministic, backend, sinks: see ``BlockSparseAttention``.

    Parameters have the same names as those of ``MultiheadDilatedAttention``, so either module can load the other's state.

    Raises:
        ValueError, TypeError: invalid settings, at construction.

    >>> layer = MultiheadBlockSparseAttention(768, 12, sparsity_ratio=0.1)
    >>> y, _ = layer(x, is_causal=True)
    """

    attention: BlockSparseAttention

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        pattern: Any = None,
        *,
        sparsity_ratio: float | None = None,
        sparsity: str = "random",
        block_size: Any = 128,
        seed: int = 0,
        num_kv_heads: int | None = None,
        dropout: float = 0.0,
        bias: bool = True,
        layer_norm: bool = True,
        layer_norm_eps: float = 1e-5,
        gamma_init: float = 1.0,
        rotary: bool = False,
        rotary_base: float = 10000.0,
        xpos_scale_base: float | None = None,
        qk_norm: bool = False,
        scale: float | None = None,
        deterministic: bool = False,
        backend: str = "auto",
        sinks: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(BlockSparseAttention, locals())


class MultiheadBlockSparseDilatedAttention(LocalMultihead):
    """Dilated branches and blocks in one softmax between the projections of ``MultiheadBlockSparseAttention``, batch first.

        y = W_o · LN(concat_h(out_h)) + b_o,    out = block_sparse_dilated_attention(W_q x + b_q, W_k x + b_k, W_v x + b_v)

    Args:
        segment_lengths, dilation_rates, head_offsets, branch_heads, tail: see ``DilatedAttention``.

    All other arguments, the parameters' names and the errors are those of ``MultiheadBlockSparseAttention``.

    >>> layer = MultiheadBlockSparseDilatedAttention(
    ...     768, 12, [2048, 8192], [1, 4], sparsity_ratio=0.05)
    >>> y, _ = layer(x, is_causal=True)
    """

    attention: BlockSparseDilatedAttention

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        segment_lengths: Any,
        dilation_rates: Any,
        pattern: Any = None,
        *,
        sparsity_ratio: float | None = None,
        sparsity: str = "random",
        block_size: Any = 128,
        seed: int = 0,
        num_kv_heads: int | None = None,
        dropout: float = 0.0,
        bias: bool = True,
        layer_norm: bool = True,
        layer_norm_eps: float = 1e-5,
        gamma_init: float = 1.0,
        rotary: bool = False,
        rotary_base: float = 10000.0,
        xpos_scale_base: float | None = None,
        qk_norm: bool = False,
        head_offsets: HeadOffsets = "cyclic",
        branch_heads: str = "all",
        tail: str = "mask",
        scale: float | None = None,
        deterministic: bool = False,
        backend: str = "auto",
        sinks: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(BlockSparseDilatedAttention, locals())
