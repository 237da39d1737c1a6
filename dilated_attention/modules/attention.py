"""Attention as modules without projections, whose pattern is fixed at construction: in one process, and over several."""

from __future__ import annotations

from typing import Any

from typing_extensions import Unpack

from dilated_attention import functional
from dilated_attention import validation as check
from dilated_attention.distributed.sharding.layout import Layout
from dilated_attention.functional.options import shows_options
from dilated_attention.modules.core import LocalAttention, RingModule
from dilated_attention.modules.options import (
    BlockSparseOptions,
    DilatedOptions,
    RingBlockSparseOptions,
    RingDilatedOptions,
    RingOptions,
    RingUnionOptions,
    UnionOptions,
)
from dilated_attention.pattern import BlockPattern, DilatedPattern


class DilatedAttention(LocalAttention):
    """Dilated attention of LongNet (arXiv 2307.02486, Eq. 3-15) on projected queries, keys and values.

        out_h(i) = Σ_j m_h(i,j) e^{s_ij} v_j / Σ_j m_h(i,j) e^{s_ij},    s_ij = scale · q_i·k_j

    m_h(i, j) counts the branches (segment length w, dilation rate r) in which head h pairs positions i and j. See
    ``dilated_attention`` for the arguments and for the differences from the paper.

    Args:
        segment_lengths: w of each branch, in positions.
        dilation_rates: r of each branch, 1 ≤ r ≤ w.
        mixture_grad: ``"exact"`` · ``"detached"``: no gradient through the mixing weights of the branches (as in TorchScale).
        precision: ``"native"`` · ``"fp8"``: 8-bit products, without gradients, on Hopper.
        options: scale, dropout, deterministic, backend, sinks, num_heads, head_offsets, branch_heads, tail: see
            ``modules.CoreOptions`` and ``functional.BranchOptions``.

    Raises:
        ValueError, TypeError: invalid settings, at construction.

    >>> layer = DilatedAttention([2048, 4096], [1, 2])
    >>> out = layer(q, k, v, is_causal=True)
    """

    pattern: DilatedPattern
    function = staticmethod(functional.dilated_attention)

    @shows_options
    def __init__(self, segment_lengths: Any, dilation_rates: Any, **options: Unpack[DilatedOptions]) -> None:
        super().__init__("DilatedAttention", options, branches=(segment_lengths, dilation_rates))


class BlockSparseAttention(LocalAttention):
    """Attention over the pairs that a block pattern keeps, as one softmax over each query's kept keys.

        out_h(i) = Σ_j m_h(i,j) e^{s_ij} v_j / Σ_j m_h(i,j) e^{s_ij},    s_ij = scale · q_i·k_j,    m_h(i,j) ∈ {0, 1}

    See ``block_sparse_attention`` for the arguments.

    Args:
        pattern: a block pattern of ``dilated_attention.pattern``, or a ``BlockMask`` of flex attention; None with ``sparsity_ratio``.
        options: sparsity_ratio, sparsity, block_size, seed: see ``modules.BlockOptions``; scale, dropout, deterministic, backend, sinks,
            num_heads: see ``modules.CoreOptions``.

    Raises:
        ValueError, TypeError: invalid settings, at construction.

    Differs from modules of this name in earlier libraries: ``sparsity_ratio=0.1`` computes a tenth of the pairs, with one softmax
    over them.

    >>> layer = BlockSparseAttention(sparsity_ratio=0.1)
    >>> out = layer(q, k, v, is_causal=True)
    """

    pattern: BlockPattern
    function = staticmethod(functional.block_sparse_attention)

    @shows_options
    def __init__(self, pattern: Any = None, **options: Unpack[BlockSparseOptions]) -> None:
        super().__init__("BlockSparseAttention", options, blocks=(pattern,))


class BlockSparseDilatedAttention(LocalAttention):
    """Dilated branches and a block pattern in one softmax: m = m_dilated + m_blocks.

    A pair that two branches keep, or a branch and a block, counts twice, as a pair in two branches does in LongNet (arXiv 2307.02486).
    See ``block_sparse_dilated_attention`` for the arguments.

    Args:
        segment_lengths, dilation_rates: see ``DilatedAttention``.
        pattern: of the blocks: see ``BlockSparseAttention``.
        options: those of both.

    Raises:
        ValueError, TypeError: invalid settings, at construction.

    >>> layer = BlockSparseDilatedAttention(
    ...     [2048, 8192], [1, 4], sparsity_ratio=0.05)
    >>> out = layer(q, k, v, is_causal=True)
    """

    pattern: DilatedPattern
    function = staticmethod(functional.block_sparse_dilated_attention)

    @shows_options
    def __init__(self, segment_lengths: Any, dilation_rates: Any, pattern: Any = None, **options: Unpack[UnionOptions]) -> None:
        super().__init__("BlockSparseDilatedAttention", options, branches=(segment_lengths, dilation_rates), blocks=(pattern,))


class RingAttention(RingModule):
    """Dense softmax attention of a sequence of N positions sharded over the W processes of a group. All of them must call it.

        out(i) = Σ_j e^{s_ij} v_j / Σ_j e^{s_ij},    s_ij = scale · q_i·k_j,    i on this process, j on any

    Args:
        layout: ``"zigzag"`` (default): two runs per process, which balances causal attention · ``"contiguous"`` · ``"striped"`` · a
            ``Layout``.
        exchange, ranks_per_node: see ``ring_attention``.
        window: (left, right) positions that a query sees, one integer for both; None for all.
        options: group, mesh, timeout: see ``modules.GroupOptions``; scale, dropout, deterministic, backend, sinks, num_heads: see
            ``modules.CoreOptions``.

    Raises:
        ValueError, TypeError: invalid settings, at construction.
        RuntimeError: at a call, if the module was built without a group before torch.distributed was initialised.

    >>> layer = RingAttention(mesh=mesh["cp"])
    >>> out = layer(q, k, v, is_causal=True)
    """

    function = staticmethod(functional.ring_attention)
    unsharded = staticmethod(functional.attention)

    @shows_options
    def __init__(self, *, layout: str | Layout = "zigzag", **options: Unpack[RingOptions]) -> None:
        check.check_window(options.get("window"))
        super().__init__("RingAttention", {**options, "layout": layout})


class RingDilatedAttention(RingModule):
    """``DilatedAttention`` of a sequence of N positions sharded over the W processes of a group. All of them must call it.

    The formula is that of ``DilatedAttention`` over the whole sequence: segments are counted in the whole sequence, whatever the shards.

    Args:
        segment_lengths, dilation_rates, mixture_grad: see ``DilatedAttention``.
        layout: ``"contiguous"`` (default) · ``"zigzag"`` · ``"striped"`` · a ``Layout``: which process holds which positions.
        exchange, ranks_per_node: see ``ring_dilated_attention``.
        options: those of ``DilatedAttention`` and ``RingAttention``.

    Raises:
        ValueError, TypeError: invalid settings, at construction.
        RuntimeError: at a call, if the module was built without a group before torch.distributed was initialised.

    Differs from ``DilatedAttention``: no ``query_offset``, no ``precision="fp8"``.

    >>> layer = RingDilatedAttention([2048, 65536], [1, 32], mesh=mesh["cp"])
    >>> out = layer(q, k, v, is_causal=True)
    """

    pattern: DilatedPattern
    function = staticmethod(functional.ring_dilated_attention)
    unsharded = staticmethod(functional.dilated_attention)

    @shows_options
    def __init__(self, segment_lengths: Any, dilation_rates: Any, **options: Unpack[RingDilatedOptions]) -> None:
        super().__init__("RingDilatedAttention", options, branches=(segment_lengths, dilation_rates))


class RingBlockSparseAttention(RingModule):
    """``BlockSparseAttention`` of a sequence of N positions sharded over the W processes of a group. All of them must call it.

        out_h(i) = Σ_j m_h(i,j) e^{s_ij} v_j / Σ_j m_h(i,j) e^{s_ij},    i on this process, j on any

    m is the pattern's mask over the whole sequence. A process receives only the key blocks that its queries keep.

    Args:
        pattern: see ``BlockSparseAttention``; content-chosen patterns are refused.
        layout: which process holds which positions: ``"contiguous"`` (default) · ``"zigzag"`` · a ``Layout``, which is for a single
            length: see ``balanced_layout``.
        head_steps: see ``ring_block_sparse_attention``.
        options: those of ``BlockSparseAttention`` and ``RingAttention``.

    Raises:
        ValueError, TypeError: invalid settings, at construction.
        RuntimeError: at a call, if the module was built without a group before torch.distributed was initialised.

    >>> layer = RingBlockSparseAttention(LocalWindow(1024), mesh=mesh["cp"])
    >>> out = layer(q, k, v, is_causal=True)
    """

    pattern: BlockPattern
    function = staticmethod(functional.ring_block_sparse_attention)
    unsharded = staticmethod(functional.block_sparse_attention)

    @shows_options
    def __init__(self, pattern: Any = None, **options: Unpack[RingBlockSparseOptions]) -> None:
        super().__init__("RingBlockSparseAttention", options, blocks=(pattern,))


class RingBlockSparseDilatedAttention(RingModule):
    """``BlockSparseDilatedAttention`` of a sequence sharded over the processes of a group. All of them must call it.

    m = m_dilated + m_blocks over the whole sequence. A process receives every key once that its queries keep, in a branch or in a block.

    Args:
        segment_lengths, dilation_rates: see ``DilatedAttention``.
        pattern, layout, head_steps: see ``RingBlockSparseAttention``.
        options: those of ``BlockSparseDilatedAttention`` and ``RingAttention``.

    Raises:
        ValueError, TypeError: invalid settings, at construction.
        RuntimeError: at a call, if the module was built without a group before torch.distributed was initialised.

    >>> layer = RingBlockSparseDilatedAttention(
    ...     [2048, 65536], [1, 32], LocalWindow(1024), mesh=mesh["cp"])
    >>> out = layer(q, k, v, is_causal=True)
    """

    pattern: DilatedPattern
    function = staticmethod(functional.ring_block_sparse_dilated_attention)
    unsharded = staticmethod(functional.block_sparse_dilated_attention)

    @shows_options
    def __init__(self, segment_lengths: Any, dilation_rates: Any, pattern: Any = None, **options: Unpack[RingUnionOptions]) -> None:
        super().__init__("RingBlockSparseDilatedAttention", options, branches=(segment_lengths, dilation_rates), blocks=(pattern,))
