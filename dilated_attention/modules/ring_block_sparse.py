"""Block-sparse attention modules, alone and with dilated branches, for a sequence sharded across processes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dilated_attention.distributed.sharding.custom_layout import Layout
from dilated_attention.functional import (
    block_sparse_attention,
    block_sparse_dilated_attention,
    ring_block_sparse_attention,
    ring_block_sparse_dilated_attention,
)
from dilated_attention.functional.ring_block_sparse import checked_block_layout, checked_ring_pattern
from dilated_attention.modules._ring import RingModule
from dilated_attention.modules.block_sparse import BlockSettings, UnionSettings
from dilated_attention.pattern import HeadOffsets
from dilated_attention.pattern.checks import as_int


class RingBlockModule(RingModule):
    """What both modules of this file have in common."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        super().__init__({**given, "layout": checked_block_layout(given["layout"])})
        checked_ring_pattern(self._blocks)
        self.head_steps = None if given["head_steps"] is None else as_int("head_steps", given["head_steps"], minimum=1)

    def _ring_arguments(self) -> dict[str, Any]:
        ring = self.ring.arguments()
        return {name: ring[name] for name in ("group", "layout", "timeout")} | {"head_steps": self.head_steps}


class RingBlockSparseAttention(RingBlockModule, BlockSettings):
    """``BlockSparseAttention`` of a sequence of N positions sharded over the W processes of a group. All of them must call it.

        out_h(i) = Σ_j m_h(i,j) e^{s_ij} v_j / Σ_j m_h(i,j) e^{s_ij},    i on this process, j on any

    m is the pattern's mask over the whole sequence. A process receives only the key blocks that its queries keep.

    Args:
        sinks, num_heads: see ``BlockSparseAttention``.
        pattern, sparsity_ratio, sparsity, block_size, seed, scale, dropout, deterministic, backend: see ``BlockSparseAttention``;
            content-chosen patterns are refused.
        group, mesh: see ``RingAttention``.
        layout: which process holds which positions: ``"contiguous"`` · ``"zigzag"`` · a ``Layout``, which is for a single length: see
            ``balanced_layout``.
        head_steps, timeout: see ``ring_block_sparse_attention``.

    Raises:
        ValueError, TypeError: invalid settings, at construction.
        RuntimeError: at a call, if the module was built without a group before torch.distributed was initialised.

    >>> layer = RingBlockSparseAttention(LocalWindow(1024), mesh=mesh["cp"])
    >>> out = layer(q, k, v, is_causal=True)
    """

    function = staticmethod(ring_block_sparse_attention)
    unsharded = staticmethod(block_sparse_attention)

    def __init__(
        self,
        pattern: Any = None,
        *,
        sparsity_ratio: float | None = None,
        sparsity: str = "random",
        block_size: Any = 128,
        seed: int = 0,
        group: Any = None,
        mesh: Any = None,
        layout: str | Layout = "contiguous",
        scale: float | None = None,
        dropout: float = 0.0,
        deterministic: bool = False,
        backend: str = "auto",
        sinks: bool = False,
        num_heads: int | None = None,
        head_steps: int | None = None,
        timeout: float = 60.0,
    ) -> None:
        super().__init__(locals())


class RingBlockSparseDilatedAttention(RingBlockModule, UnionSettings):
    """``BlockSparseDilatedAttention`` of a sequence sharded over the processes of a group. All of them must call it.

    m = m_dilated + m_blocks over the whole sequence. A process receives every key once that its queries keep, in a branch or in a block.

    Args:
        segment_lengths, dilation_rates, scale, dropout, head_offsets, branch_heads, tail, deterministic: see ``DilatedAttention``.
        backend, sinks, num_heads: see there.
        pattern, sparsity_ratio, sparsity, block_size, seed, group, mesh, layout, head_steps, timeout: see ``RingBlockSparseAttention``.

    Raises:
        ValueError, TypeError: invalid settings, at construction.
        RuntimeError: at a call, if the module was built without a group before torch.distributed was initialised.

    >>> layer = RingBlockSparseDilatedAttention(
    ...     [2048, 65536], [1, 32], LocalWindow(1024), mesh=mesh["cp"])
    >>> out = layer(q, k, v, is_causal=True)
    """

    function = staticmethod(ring_block_sparse_dilated_attention)
    unsharded = staticmethod(block_sparse_dilated_attention)

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
        group: Any = None,
        mesh: Any = None,
        layout: str | Layout = "contiguous",
        scale: float | None = None,
        dropout: float = 0.0,
        head_offsets: HeadOffsets = "cyclic",
        branch_heads: str = "all",
        tail: str = "mask",
        deterministic: bool = False,
        backend: str = "auto",
        sinks: bool = False,
        num_heads: int | None = None,
        head_steps: int | None = None,
        timeout: float = 60.0,
    ) -> None:
        super().__init__(locals())
