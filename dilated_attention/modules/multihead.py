"""Multi-head attention layers, with the call signature of nn.MultiheadAttention: in one process, and over several."""

from __future__ import annotations

from typing import Any

from typing_extensions import Unpack

from dilated_attention.functional.options import shows_options
from dilated_attention.modules.attention import (
    BlockSparseAttention,
    BlockSparseDilatedAttention,
    DilatedAttention,
    RingBlockSparseAttention,
    RingBlockSparseDilatedAttention,
    RingDilatedAttention,
)
from dilated_attention.modules.options import (
    MultiheadBlockSparseOptions,
    MultiheadDilatedOptions,
    MultiheadUnionOptions,
    RingMultiheadBlockSparseOptions,
    RingMultiheadDilatedOptions,
    RingMultiheadUnionOptions,
)
from dilated_attention.modules.projections import LocalMultihead, RingMultihead


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
        mixture_grad, precision: see ``DilatedAttention``.
        options: num_kv_heads, bias, layer_norm, layer_norm_eps, gamma_init, rotary, rotary_base, xpos_scale_base, qk_norm, device, dtype:
            see ``modules.ProjectionOptions``; dropout, scale, deterministic, backend, sinks: see ``modules.AttentionOptions``;
            head_offsets, branch_heads, tail: see ``functional.BranchOptions``.

    Raises:
        ValueError, TypeError: invalid settings, at construction.

    Differs from LongNet as ``dilated_attention`` does. Differs from nn.MultiheadAttention: it is batch first, has the sub-LayerNorm
    and separate q, k and v projections, returns no attention weights and takes no additive masks.

    >>> layer = MultiheadDilatedAttention(768, 12, [2048, 4096, 8192], [1, 2, 4])
    >>> y, _ = layer(x, is_causal=True)
    """

    attention: DilatedAttention

    @shows_options
    def __init__(
        self, embed_dim: int, num_heads: int, segment_lengths: Any, dilation_rates: Any,
        **options: Unpack[MultiheadDilatedOptions],
    ) -> None:  # fmt: skip
        super().__init__("MultiheadDilatedAttention", DilatedAttention, embed_dim, num_heads, (segment_lengths, dilation_rates), options)


class MultiheadBlockSparseAttention(LocalMultihead):
    """Block-sparse attention between MAGNETO's projections (arXiv 2210.06423), batch first.

        y = W_o · LN(concat_h(out_h)) + b_o,    out = block_sparse_attention(W_q x + b_q, W_k x + b_k, W_v x + b_v)

    Args:
        embed_dim, num_heads: see ``MultiheadDilatedAttention``.
        pattern: see ``BlockSparseAttention``.
        options: those of ``MultiheadDilatedAttention`` without the branches'; sparsity_ratio, sparsity, block_size, seed: see
            ``modules.BlockOptions``.

    Parameters have the same names as those of ``MultiheadDilatedAttention``, so either module can load the other's state.

    Raises:
        ValueError, TypeError: invalid settings, at construction.

    >>> layer = MultiheadBlockSparseAttention(768, 12, sparsity_ratio=0.1)
    >>> y, _ = layer(x, is_causal=True)
    """

    attention: BlockSparseAttention

    @shows_options
    def __init__(self, embed_dim: int, num_heads: int, pattern: Any = None, **options: Unpack[MultiheadBlockSparseOptions]) -> None:
        super().__init__("MultiheadBlockSparseAttention", BlockSparseAttention, embed_dim, num_heads, (pattern,), options)


class MultiheadBlockSparseDilatedAttention(LocalMultihead):
    """Dilated branches and blocks in one softmax between the projections of ``MultiheadBlockSparseAttention``, batch first.

        y = W_o · LN(concat_h(out_h)) + b_o,    out = block_sparse_dilated_attention(W_q x + b_q, W_k x + b_k, W_v x + b_v)

    Args:
        segment_lengths, dilation_rates: see ``DilatedAttention``.
        options: those of ``MultiheadBlockSparseAttention``; head_offsets, branch_heads, tail: see ``functional.BranchOptions``.

    All other arguments, the parameters' names and the errors are those of ``MultiheadBlockSparseAttention``.

    >>> layer = MultiheadBlockSparseDilatedAttention(
    ...     768, 12, [2048, 8192], [1, 4], sparsity_ratio=0.05)
    >>> y, _ = layer(x, is_causal=True)
    """

    attention: BlockSparseDilatedAttention

    @shows_options
    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        segment_lengths: Any,
        dilation_rates: Any,
        pattern: Any = None,
        **options: Unpack[MultiheadUnionOptions],
    ) -> None:
        super().__init__(
            "MultiheadBlockSparseDilatedAttention",
            BlockSparseDilatedAttention,
            embed_dim,
            num_heads,
            (segment_lengths, dilation_rates, pattern),
            options,
        )


class RingMultiheadDilatedAttention(RingMultihead):
    """``MultiheadDilatedAttention`` of a sequence sharded over the processes of a group. All of them must call it.

        y = W_o · LN(concat_h(out_h)) + b_o,    out = ring_dilated_attention(W_q x + b_q, W_k x + b_k, W_v x + b_v)

    Projections and norms are per position, so only the attention between them communicates. Parameters have the names and shapes
    of those of ``MultiheadDilatedAttention``, so ``load_state_dict`` transfers weights in both directions.

    Every process holds all parameters, and its backward computes the part of their gradients that comes from its own rows: the
    gradient of the loss is the *sum* over the group. DDP and FSDP2 *average* over their processes, so with them each process's loss
    must be W times its part of the total loss, for W processes; ``models.sharded_cross_entropy`` does that. Without either, sum (or
    average) the gradients over the group yourself.

    Args:
        embed_dim, num_heads, segment_lengths, dilation_rates, mixture_grad: see ``MultiheadDilatedAttention``.
        layout, exchange, ranks_per_node: see ``RingDilatedAttention``.
        options: those of ``MultiheadDilatedAttention``; group, mesh, timeout: see ``modules.GroupOptions``.

    Raises:
        ValueError, TypeError: invalid settings, at construction.
        RuntimeError: at a call, if the module was built without a group before torch.distributed was initialised.

    Differs from ``MultiheadDilatedAttention``: no ``query_offset``, no ``precision="fp8"``.

    >>> layer = RingMultiheadDilatedAttention(
    ...     768, 12, [2048, 65536], [1, 32], mesh=mesh["cp"], rotary=True)
    >>> y, _ = layer(x, is_causal=True, seq_len=1_000_000)
    """

    attention: RingDilatedAttention

    @shows_options
    def __init__(
        self, embed_dim: int, num_heads: int, segment_lengths: Any, dilation_rates: Any, **options: Unpack[RingMultiheadDilatedOptions]
    ) -> None:
        super().__init__(
            "RingMultiheadDilatedAttention", RingDilatedAttention, embed_dim, num_heads, (segment_lengths, dilation_rates), options
        )


class RingMultiheadBlockSparseAttention(RingMultihead):
    """``MultiheadBlockSparseAttention`` of a sequence sharded over the processes of a group. All of them must call it.

        y = W_o · LN(concat_h(out_h)) + b_o,    out = ring_block_sparse_attention(W_q x + b_q, W_k x + b_k, W_v x + b_v)

    Projections and norms are per position, so only the attention between them communicates, and it sends only the key blocks that other
    processes' queries keep. Parameters have the names and shapes of those of ``MultiheadBlockSparseAttention``, so ``load_state_dict``
    transfers weights in both directions.

    Every process holds all parameters, and its backward computes the part of their gradients that comes from its own rows: see
    ``RingMultiheadDilatedAttention`` for what this means with DDP, with FSDP2 and without either.

    Args:
        embed_dim, num_heads, pattern: see ``MultiheadBlockSparseAttention``.
        layout, head_steps: see ``RingBlockSparseAttention``.
        options: those of ``MultiheadBlockSparseAttention``; group, mesh, timeout: see ``modules.GroupOptions``.

    Raises:
        ValueError, TypeError: invalid settings, at construction.
        RuntimeError: at a call, if the module was built without a group before torch.distributed was initialised.

    Differs from ``MultiheadBlockSparseAttention``: no ``query_offset``, and no pattern that is chosen by content.

    >>> layer = RingMultiheadBlockSparseAttention(
    ...     768, 12, LocalWindow(1024), mesh=mesh["cp"], rotary=True)
    >>> y, _ = layer(x, is_causal=True, seq_len=1_000_000)
    """

    attention: RingBlockSparseAttention

    @shows_options
    def __init__(self, embed_dim: int, num_heads: int, pattern: Any = None, **options: Unpack[RingMultiheadBlockSparseOptions]) -> None:
        super().__init__("RingMultiheadBlockSparseAttention", RingBlockSparseAttention, embed_dim, num_heads, (pattern,), options)


class RingMultiheadBlockSparseDilatedAttention(RingMultihead):
    """``MultiheadBlockSparseDilatedAttention`` of a sequence sharded over the processes of a group. All of them must call it.

        y = W_o · LN(concat_h(out_h)) + b_o,    out = ring_block_sparse_dilated_attention(W_q x + b_q, W_k x + b_k, W_v x + b_v)

    Args:
        segment_lengths, dilation_rates: see ``DilatedAttention``.
        options: those of ``RingMultiheadBlockSparseAttention``; head_offsets, branch_heads, tail: see ``functional.BranchOptions``.

    All other arguments, the errors, and what holds of parameters and their gradients are as in ``RingMultiheadBlockSparseAttention``.

    >>> layer = RingMultiheadBlockSparseDilatedAttention(
    ...     768, 12, [2048, 65536], [1, 32], LocalWindow(1024),
    ...     mesh=mesh["cp"])
    >>> y, _ = layer(x, is_causal=True, seq_len=1_000_000)
    """

    attention: RingBlockSparseDilatedAttention

    @shows_options
    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        segment_lengths: Any,
        dilation_rates: Any,
        pattern: Any = None,
        **options: Unpack[RingMultiheadUnionOptions],
    ) -> None:
        super().__init__(
            "RingMultiheadBlockSparseDilatedAttention",
            RingBlockSparseDilatedAttention,
            embed_dim,
            num_heads,
            (segment_lengths, dilation_rates, pattern),
            options,
        )
