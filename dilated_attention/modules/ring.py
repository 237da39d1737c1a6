"""Dense, dilated and block-sparse attention modules for a sequence sharded across processes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dilated_attention import functional
from dilated_attention import validation as check
from dilated_attention.distributed.sharding.custom_layout import Layout
from dilated_attention.functional.arguments import checked_block_layout, checked_ring_pattern
from dilated_attention.modules._ring import RingModule
from dilated_attention.modules._settings import DilatedSettings
from dilated_attention.modules.block_sparse import BlockSettings, UnionSettings
from dilated_attention.pattern import HeadOffsets
from dilated_attention.pattern.checks import as_int


class RingAttention(RingModule):
    """Dense softmax attention of a sequence of N positions sharded over the W processes of a group. All of them must call it.

        out(i) = Σ_j e^{s_ij} v_j / Σ_j e^{s_ij},    s_ij = scale · q_i·k_j,    i on this process, j on any

    Args:
        group: the ProcessGroup that shares the sequence, looked up here and stored by name; None for ``mesh``, or for all processes.
        mesh: a DeviceMesh of one axis, instead of a group.
        layout: ``"zigzag"``: two runs per process, which balances causal attention · ``"contiguous"`` · ``"striped"`` · a ``Layout``.
        exchange, ranks_per_node, timeout: see ``ring_attention``.
        window: (left, right) positions that a query sees, one integer for both; None for all.
        scale, dropout, deterministic, backend, sinks, num_heads: see ``DilatedAttention``.

    Raises:
        ValueError, TypeError: invalid settings, at construction.
        RuntimeError: at a call, if the module was built without a group before torch.distributed was initialised.

    >>> layer = RingAttention(mesh=mesh["cp"])
    >>> out = layer(q, k, v, is_causal=True)
    """

    function = staticmethod(functional.ring_attention)
    unsharded = staticmethod(functional.attention)

    def __init__(
        self,
        *,
        group: Any = None,
        mesh: Any = None,
        layout: str | Layout = "zigzag",
        exchange: str = "auto",
        window: int | tuple[int | None, int | None] | None = None,
        scale: float | None = None,
        dropout: float = 0.0,
        deterministic: bool = False,
        backend: str = "auto",
        sinks: bool = False,
        num_heads: int | None = None,
        ranks_per_node: int | None = None,
        timeout: float = 60.0,
    ) -> None:
        super().__init__(locals())
        check.check_window(window)
        self.window = window

    def _arguments(self, query: torch.Tensor) -> dict[str, Any]:
        return super()._arguments(query) | {"window": self.window}


class RingDilatedAttention(RingModule, DilatedSettings):
    """``DilatedAttention`` of a sequence of N positions sharded over the W processes of a group. All of them must call it.

    The formula is that of ``DilatedAttention`` over the whole sequence: segments are counted in the whole sequence, whatever the shards.

    Args:
        segment_lengths, dilation_rates, scale, dropout, head_offsets, branch_heads, tail, mixture_grad: see ``DilatedAttention``.
        deterministic, backend, sinks, num_heads: see there.
        group, mesh, exchange, ranks_per_node, timeout: see ``RingAttention``.
        layout: ``"contiguous"`` · ``"zigzag"`` · ``"striped"`` · a ``Layout``: which process holds which positions.

    Raises:
        ValueError, TypeError: invalid settings, at construction.
        RuntimeError: at a call, if the module was built without a group before torch.distributed was initialised.

    Differs from ``DilatedAttention``: no ``query_offset``, no ``precision="fp8"``.

    >>> layer = RingDilatedAttention([2048, 65536], [1, 32], mesh=mesh["cp"])
    >>> out = layer(q, k, v, is_causal=True)
    """

    function = staticmethod(functional.ring_dilated_attention)
    unsharded = staticmethod(functional.dilated_attention)

    def __init__(
        self,
        segment_lengths: Any,
        dilation_rates: Any,
        *,
        group: Any = None,
        mesh: Any = None,
        layout: str | Layout = "contiguous",
        exchange: str = "auto",
        scale: float | None = None,
        dropout: float = 0.0,
        head_offsets: HeadOffsets = "cyclic",
        branch_heads: str = "all",
        tail: str = "mask",
        mixture_grad: str = "exact",
        deterministic: bool = False,
        backend: str = "auto",
        sinks: bool = False,
        num_heads: int | None = None,
        ranks_per_node: int | None = None,
        timeout: float = 60.0,
    ) -> None:
        super().__init__(locals())


class RingBlockModule(RingModule):
    """What both modules with blocks have in common."""

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

    function = staticmethod(functional.ring_block_sparse_attention)
    unsharded = staticmethod(functional.block_sparse_attention)

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

    function = staticmethod(functional.ring_block_sparse_dilated_attention)
    unsharded = staticmethod(functional.block_sparse_dilated_attention)

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
