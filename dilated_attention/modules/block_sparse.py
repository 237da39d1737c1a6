"""Block-sparse attention as modules without parameters: alone, and together with dilated branches in one softmax."""

from __future__ import annotations

from typing import Any

from dilated_attention.functional import block_sparse_attention, block_sparse_dilated_attention
from dilated_attention.modules._block_settings import BlockSettings, UnionSettings
from dilated_attention.modules._local import LocalAttention
from dilated_attention.pattern import HeadOffsets


class BlockSparseAttention(LocalAttention, BlockSettings):
    """Attention over the pairs that a block pattern keeps, as one softmax over each query's kept keys.

        out_h(i) = Σ_j m_h(i,j) e^{s_ij} v_j / Σ_j m_h(i,j) e^{s_ij},    s_ij = scale · q_i·k_j,    m_h(i,j) ∈ {0, 1}

    See ``block_sparse_attention`` for the arguments.

    Args:
        pattern: a block pattern of ``dilated_attention.pattern``, or a ``BlockMask`` of flex attention; None with ``sparsity_ratio``.
        sparsity_ratio: instead of a pattern, the fraction of dense attention's pairs to compute; (0, 1].
        sparsity: how these pairs are chosen: ``"random"`` blocks · ``"local"`` · ``"dilated"`` · ``"global_local"`` · ``"big_bird"``; see
            ``dilated_attention.pattern.Sparsity``.
        block_size: block size of that pattern: 64 or 128, or (query block, key block).
        seed: seed of that pattern, if it draws random blocks.
        scale, dropout, deterministic, backend, sinks, num_heads: see ``DilatedAttention``.

    Raises:
        ValueError, TypeError: invalid settings, at construction.

    Differs from modules of this name in earlier libraries: ``sparsity_ratio=0.1`` computes a tenth of the pairs, with one softmax
    over them.

    >>> layer = BlockSparseAttention(sparsity_ratio=0.1)
    >>> out = layer(q, k, v, is_causal=True)
    """

    function = staticmethod(block_sparse_attention)

    def __init__(
        self,
        pattern: Any = None,
        *,
        sparsity_ratio: float | None = None,
        sparsity: str = "random",
        block_size: Any = 128,
        seed: int = 0,
        scale: float | None = None,
        dropout: float = 0.0,
        deterministic: bool = False,
        backend: str = "auto",
        sinks: bool = False,
        num_heads: int | None = None,
    ) -> None:
        super().__init__(locals())


class BlockSparseDilatedAttention(LocalAttention, UnionSettings):
    """Dilated branches and a block pattern in one softmax: m = m_dilated + m_blocks.

    A pair that two branches keep, or a branch and a block, counts twice, as a pair in two branches does in LongNet (arXiv 2307.02486).
    See ``block_sparse_dilated_attention`` for the arguments.

    Args:
        segment_lengths: w of each branch, in positions.
        dilation_rates: r of each branch, 1 ≤ r ≤ w.
        pattern, sparsity_ratio, sparsity, block_size, seed: of the blocks: see ``BlockSparseAttention``.
        scale, dropout, head_offsets, branch_heads, tail, deterministic, backend, sinks, num_heads: see ``DilatedAttention``.

    Raises:
        ValueError, TypeError: invalid settings, at construction.

    >>> layer = BlockSparseDilatedAttention(
    ...     [2048, 8192], [1, 4], sparsity_ratio=0.05)
    >>> out = layer(q, k, v, is_causal=True)
    """

    function = staticmethod(block_sparse_dilated_attention)

    def __init__(
        self,
        segment_lengths: Any,
        dilation_rates: Any,
        pattern: Any = None,
        *,
        sparsity_ratio: float | None = None,
        sparsity: str = "random",
        block_size: Any = 128,
        seed: int = 0,
        scale: float | None = None,
        dropout: float = 0.0,
        head_offsets: HeadOffsets = "cyclic",
        branch_heads: str = "all",
        tail: str = "mask",
        deterministic: bool = False,
        backend: str = "auto",
        sinks: bool = False,
        num_heads: int | None = None,
    ) -> None:
        super().__init__(locals())
