"""Multi-head block-sparse attention: BlockSparseAttention between projections, called as nn.MultiheadAttention is."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from dilated_attention import validation as check
from dilated_attention.modules._maps import MultiheadMaps
from dilated_attention.modules.block_sparse import BlockSparseAttention


class MultiheadBlockSparseAttention(MultiheadMaps):
    """Block-sparse attention between MAGNETO's projections (arXiv 2210.06423), batch first.

        y = W_o · LN(concat_h(out_h)) + b_o,    out = block_sparse_attention(W_q x + b_q, W_k x + b_k, W_v x + b_v)

    Args:
        embed_dim: E, of queries, keys, values and output; a multiple of num_heads.
        num_heads: H query heads of dimension D = E/H ≤ 256.
        pattern, sparsity_ratio, sparsity, block_size, seed: which pairs are kept, as of ``BlockSparseAttention``.
        num_kv_heads: Hk key/value heads, a divisor of H; query head h reads h // (H/Hk). None for H.
        dropout: probability that an attention weight is dropped, in training mode only; [0, 1).
        bias: biases of the four projections.
        layer_norm: the sub-LayerNorm in front of ``out_proj``. False leaves nn.MultiheadAttention's layer.
        layer_norm_eps: of every norm of this layer.
        gamma_init: gain of v_proj's and out_proj's weights: MAGNETO's γ, sqrt(log 2M) for an encoder or a decoder of M layers.
        rotary: rotate queries and keys by absolute position; with ``cu_seqlens``, position in the document.
        rotary_base: θ of the rotation, > 1.
        xpos_scale_base: b of XPOS (arXiv 2212.10554; TorchScale's is 512), with ``rotary``: pair i of a score is also multiplied by
            ((2i + 0.4D)/1.4D)^(distance/b), which fades far keys of causal attention. Keys *after* a query grow by it. None: RoPE. Lengths
            whose factors overflow the dtype are refused: at 512 beyond 6,798 in float16, 70,251 in bfloat16.
        qk_norm: RMSNorm of each query and key head (``q_norm``, ``k_norm``), before the rotation.
        scale, deterministic, backend: as of ``BlockSparseAttention``.
        device, dtype: of the parameters.

    Parameters have the names of ``MultiheadDilatedAttention``'s, so either loads the other's state.

    Raises:
        ValueError, TypeError: a setting that cannot work, at construction.

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
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            embed_dim,
            num_heads,
            num_kv_heads=num_kv_heads,
            bias=bias,
            layer_norm=layer_norm,
            layer_norm_eps=layer_norm_eps,
            gamma_init=gamma_init,
            rotary=rotary,
            rotary_base=rotary_base,
            xpos_scale_base=xpos_scale_base,
            qk_norm=qk_norm,
            device=device,
            dtype=dtype,
        )
        self.attention = BlockSparseAttention(
            pattern,
            sparsity_ratio=sparsity_ratio,
            sparsity=sparsity,
            block_size=block_size,
            seed=seed,
            scale=scale,
            dropout=dropout,
            deterministic=deterministic,
            backend=backend,
        )

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
        """Attend.

        Args:
            query: (B, Nq, E), in the parameters' dtype, or any under autocast.
            key: (B, Nk, E); None for query.
            value: (B, Nk, E); None for key.
            is_causal: a query sees keys at its own position and before.
            key_padding_mask: (B, Nk) bool, True = padding.
            cu_seqlens: bounds of packed documents, int32 (documents + 1,), B = 1.
            need_weights, attn_mask: of nn.MultiheadAttention's call; only False and None are possible.
            input_norm: of the block around this layer, applied to query, key and value first: for training with less memory.
            query_offset: position of the first query among the keys, for decoding; query_offset + Nq ≤ Nk. Keys are at 0 … Nk − 1.

        Returns:
            (out (B, Nq, E) in the projections' dtype, None). The second is nn.MultiheadAttention's weights.

        Raises:
            ValueError, TypeError: inputs that do not fit.
            BackendUnavailable: no backend, or not the named one, can do this.
        """
        q, k, v = self.project_call(query, key, value, need_weights, attn_mask, input_norm)
        if self.rotary:
            query_offset = check.check_query_offset(query_offset, q.shape[1], k.shape[1])
            q, k = self.rotate(q, k, torch.arange(k.shape[1], device=k.device), cu_seqlens, query_offset)
        out = self.attention(
            q, k, v, is_causal=is_causal, key_padding_mask=key_padding_mask, cu_seqlens=cu_seqlens, query_offset=query_offset
        )
        return self.combine(out), None
