"""Multi-head attention layers, dilated and block-sparse, for a sequence sharded across processes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from dilated_attention.distributed.sharding.custom_layout import Layout
from dilated_attention.modules._projections import MultiheadProjections
from dilated_attention.modules._ring import RingSettings
from dilated_attention.modules.ring import RingBlockSparseAttention, RingBlockSparseDilatedAttention, RingDilatedAttention
from dilated_attention.pattern import HeadOffsets
from dilated_attention.pattern.checks import as_int


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
            key_padding_mask: (B, n) bool of this process's keys, True = padding; or floats, -inf = padding and 0 elsewhere.
            cu_seqlens: boundaries of packed documents in the whole sequence, int32 (documents + 1,), B = 1; equal on all processes.
            is_causal, need_weights, attn_mask, input_norm: see ``MultiheadDilatedAttention.forward``.

        Returns:
            (out (B, n, E) in the projections' dtype, None).

        Raises:
            ValueError, TypeError: as there, or the calls differ between processes.
            RingError: a process died, stalled or made a different call.
        """
        q, k, v, padding = self.project_call(query, key, value, key_padding_mask, need_weights, attn_mask, input_norm)
        out = self.attend(q, k, v, is_causal=is_causal, key_padding_mask=padding, cu_seqlens=cu_seqlens, seq_len=seq_len)
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


class RingMultiheadDilatedAttention(RingMultihead):
    """``MultiheadDilatedAttention`` of a sequence sharded over the processes of a group. All of them must call it.

        y = W_o · LN(concat_h(out_h)) + b_o,    out = ring_dilated_attention(W_q x + b_q, W_k x + b_k, W_v x + b_v)

    Projections and norms are per position, so only the attention between them communicates. Parameters have the names and shapes
    of those of ``MultiheadDilatedAttention``, so ``load_state_dict`` transfers weights in both directions.

    Every process holds all parameters, and its backward computes the part of their gradients that comes from its own rows: the
    gradient of the loss is the *sum* over the group. DDP and FSDP2 *average* over their processes, so with them each process's loss
    must be W times its share of the total loss; ``models.sharded_cross_entropy`` does that. Without either, sum (or average) the
    gradients over the group yourself.

    Args:
        embed_dim, num_heads, segment_lengths, dilation_rates, num_kv_heads, head_offsets, branch_heads: see ``MultiheadDilatedAttention``.
        dropout, bias, layer_norm, layer_norm_eps, gamma_init, rotary_base, xpos_scale_base, qk_norm: see there.
        tail, mixture_grad, scale, deterministic, backend, sinks, device, dtype: see there.
        rotary: rotate queries and keys by their position in the whole sequence, or with ``cu_seqlens`` in the document.
        group, mesh, layout, exchange, ranks_per_node, timeout: see ``RingDilatedAttention``.

    Raises:
        ValueError, TypeError: invalid settings, at construction.
        RuntimeError: at a call, if the module was built without a group before torch.distributed was initialised.

    Differs from ``MultiheadDilatedAttention``: no ``query_offset``, no ``precision="fp8"``.

    >>> layer = RingMultiheadDilatedAttention(
    ...     768, 12, [2048, 65536], [1, 32], mesh=mesh["cp"], rotary=True)
    >>> y, _ = layer(x, is_causal=True, seq_len=1_000_000)
    """

    attention: RingDilatedAttention

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        segment_lengths: Any,
        dilation_rates: Any,
        *,
        group: Any = None,
        mesh: Any = None,
        layout: str | Layout = "contiguous",
        exchange: str = "auto",
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
        ranks_per_node: int | None = None,
        timeout: float = 60.0,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(RingDilatedAttention, locals())


class RingMultiheadBlockSparseAttention(RingMultihead):
    """``MultiheadBlockSparseAttention`` of a sequence sharded over the processes of a group. All of them must call it.

        y = W_o · LN(concat_h(out_h)) + b_o,    out = ring_block_sparse_attention(W_q x + b_q, W_k x + b_k, W_v x + b_v)

    Projections and norms are per position, so only the attention between them communicates, and it sends only the key blocks that other
    processes' queries keep. Parameters have the names and shapes of those of ``MultiheadBlockSparseAttention``, so ``load_state_dict``
    transfers weights in both directions.

    Every process holds all parameters, and its backward computes the part of their gradients that comes from its own rows: see
    ``RingMultiheadDilatedAttention`` for what this means with DDP, with FSDP2 and without either.

    Args:
        embed_dim, num_heads, num_kv_heads, dropout, bias, layer_norm, layer_norm_eps: see ``MultiheadBlockSparseAttention``.
        gamma_init, rotary_base, xpos_scale_base, qk_norm, device, dtype: see there.
        pattern, sparsity_ratio, sparsity, block_size, seed: which pairs of the whole sequence are kept: see ``RingBlockSparseAttention``.
        rotary: rotate queries and keys by their position in the whole sequence, or with ``cu_seqlens`` in the document.
        group, mesh, layout, scale, deterministic, backend, sinks, head_steps, timeout: see ``RingBlockSparseAttention``.

    Raises:
        ValueError, TypeError: invalid settings, at construction.
        RuntimeError: at a call, if the module was built without a group before torch.distributed was initialised.

    Differs from ``MultiheadBlockSparseAttention``: no ``query_offset``, and no pattern that is chosen by content.

    >>> layer = RingMultiheadBlockSparseAttention(
    ...     768, 12, LocalWindow(1024), mesh=mesh["cp"], rotary=True)
    >>> y, _ = layer(x, is_causal=True, seq_len=1_000_000)
    """

    attention: RingBlockSparseAttention

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
        group: Any = None,
        mesh: Any = None,
        layout: str | Layout = "contiguous",
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
        head_steps: int | None = None,
        timeout: float = 60.0,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(RingBlockSparseAttention, locals())


class RingMultiheadBlockSparseDilatedAttention(RingMultihead):
    """``MultiheadBlockSparseDilatedAttention`` of a sequence sharded over the processes of a group. All of them must call it.

        y = W_o · LN(concat_h(out_h)) + b_o,    out = ring_block_sparse_dilated_attention(W_q x + b_q, W_k x + b_k, W_v x + b_v)

    Args:
        segment_lengths, dilation_rates, head_offsets, branch_heads, tail: see ``DilatedAttention``.

    All other arguments, what is said of parameters and their gradients, and the errors are those of ``RingMultiheadBlockSparseAttention``.

    >>> layer = RingMultiheadBlockSparseDilatedAttention(
    ...     768, 12, [2048, 65536], [1, 32], LocalWindow(1024),
    ...     mesh=mesh["cp"])
    >>> y, _ = layer(x, is_causal=True, seq_len=1_000_000)
    """

    attention: RingBlockSparseDilatedAttention

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
        group: Any = None,
        mesh: Any = None,
        layout: str | Layout = "contiguous",
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
        head_steps: int | None = None,
        timeout: float = 60.0,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(RingBlockSparseDilatedAttention, locals())
