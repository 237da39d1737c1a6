"""A block-sparse attention module for a sequence sharded across processes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from dilated_attention import validation as check
from dilated_attention.backends import registry
from dilated_attention.distributed.sharding.custom_layout import Layout, short_name
from dilated_attention.functional import block_sparse_attention, ring_block_sparse_attention
from dilated_attention.functional.ring_block_sparse import checked_block_layout, checked_ring_pattern
from dilated_attention.modules._ring import RingSettings
from dilated_attention.modules.block_sparse import chosen_pattern
from dilated_attention.pattern import BlockPattern
from dilated_attention.pattern.checks import as_int


class RingBlockSparseAttention(nn.Module):
    """``BlockSparseAttention`` of a sequence of N positions sharded over the W processes of a group. All of them must call it.

        out_h(i) = Σ_j m_h(i,j) e^{s_ij} v_j / Σ_j m_h(i,j) e^{s_ij},    i on this process, j on any

    m is the pattern's mask over the whole sequence. A process receives only the key blocks that its queries keep.

    Args:
        pattern, sparsity_ratio, sparsity, block_size, seed, scale, dropout, deterministic, backend: see ``BlockSparseAttention``;
            content-chosen patterns are refused.
        group: the ProcessGroup that shares the sequence, looked up here and stored by name; None for ``mesh``, or for all processes.
        mesh: a DeviceMesh of one axis, instead of a group.
        layout: ``"contiguous"`` · ``"zigzag"`` · a ``Layout``: see ``balanced_layout``: who holds which positions. A ``Layout`` is of one
            length.
        head_steps, timeout: see ``ring_block_sparse_attention``.

    Raises:
        ValueError, TypeError: invalid settings, at construction.
        RuntimeError: at a call, if the module was built without a group before torch.distributed was initialised.

    >>> layer = RingBlockSparseAttention(LocalWindow(1024), mesh=mesh["cp"])
    >>> out = layer(q, k, v, is_causal=True)
    """

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
        head_steps: int | None = None,
        timeout: float = 60.0,
    ) -> None:
        super().__init__()
        self._pattern = checked_ring_pattern(chosen_pattern(pattern, sparsity_ratio, sparsity, block_size, seed))
        self.ring = replace(RingSettings.of(group, mesh, "contiguous", "auto", None, timeout), layout=checked_block_layout(layout))
        # the head dimension is not known yet; only scale=None would need it
        self.scale = None if scale is None else check.check_scale(scale, 1)
        self.dropout = check.check_probability("dropout", dropout)
        self.deterministic = check.check_bool("deterministic", deterministic)
        registry.check_name(backend)
        self.backend = backend
        self.head_steps = None if head_steps is None else as_int("head_steps", head_steps, minimum=1)

    @property
    def pattern(self) -> BlockPattern:
        """The pattern: which positions attend to which. It can count its pairs and FLOPs and draw itself."""
        return self._pattern

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        is_causal: bool = False,
        *,
        seq_len: int | None = None,
        key_padding_mask: torch.Tensor | None = None,
        cu_seqlens: torch.Tensor | None = None,
        return_lse: bool = False,
    ) -> Any:
        """Computes the attention; arguments, results and errors are those of ``RingDilatedAttention.forward``."""
        ring = self.ring.arguments()
        return ring_block_sparse_attention(
            query,
            key,
            value,
            self._pattern,
            group=ring["group"],
            layout=ring["layout"],
            timeout=ring["timeout"],
            seq_len=seq_len,
            is_causal=is_causal,
            scale=self.scale,
            cu_seqlens=cu_seqlens,
            key_padding_mask=key_padding_mask,
            dropout_p=self.dropout if self.training else 0.0,
            return_lse=return_lse,
            deterministic=self.deterministic,
            backend=self.backend,
            head_steps=self.head_steps,
        )

    def alone(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, is_causal: bool = False, query_offset: int = 0
    ) -> torch.Tensor:
        """Computes the same attention over a sequence held whole by this process: see ``RingDilatedAttention.alone``."""
        out: torch.Tensor = block_sparse_attention(
            query,
            key,
            value,
            self._pattern,
            is_causal=is_causal,
            scale=self.scale,
            dropout_p=self.dropout if self.training else 0.0,
            query_offset=query_offset,
            deterministic=self.deterministic,
            backend=self.backend,
        )
        return out

    def extra_repr(self) -> str:
        """The pattern, how the sequence is sharded, and every setting that differs from its default."""
        settings = (
            ("scale", self.scale, None),
            ("dropout", self.dropout, 0.0),
            ("deterministic", self.deterministic, False),
            ("backend", self.backend, "auto"),
            ("head_steps", self.head_steps, None),
        )
        parts = [repr(self._pattern), f"layout={short_name(self.ring.layout)!r}", *([] if self.ring.group_name else ["one process"])]
        return ", ".join(parts + [f"{name}={value!r}" for name, value, default in settings if value != default])
