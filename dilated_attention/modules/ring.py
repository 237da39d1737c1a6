"""Attention as modules whose sequence is spread over processes: dense and dilated."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from dilated_attention import validation as check
from dilated_attention.backends import registry
from dilated_attention.functional import dilated_attention, ring_attention, ring_dilated_attention
from dilated_attention.modules._ring import RingSettings
from dilated_attention.modules._settings import DilatedSettings
from dilated_attention.pattern import HeadOffsets


class RingAttention(nn.Module):
    """Dense softmax attention of a sequence of N positions that the W processes of a group hold in shards. All of them call it.

        out(i) = Σ_j e^{s_ij} v_j / Σ_j e^{s_ij},    s_ij = scale · q_i·k_j,    i on this process, j on any

    Args:
        group: the ProcessGroup that shares the sequence, looked up here and kept by its name; None for ``mesh``, or for all processes.
        mesh: a DeviceMesh of one axis, instead of a group.
        layout: ``"zigzag"``: two runs to a process, which balances causal attention · ``"contiguous"`` · ``"striped"``.
        exchange, ranks_per_node, timeout: as of ``ring_attention``.
        window: (left, right) positions that a query sees, one integer for both; None for all.
        scale: factor of q·k, from 1.18e-38 to 2.36e38; None for 1/sqrt(D).
        dropout: probability that an attention weight is dropped, in training mode only; [0, 1).
        deterministic: only kernels whose gradients repeat bit for bit.
        backend: ``"auto"``, or a name, which is then used or refused, never replaced.

    Raises:
        ValueError, TypeError: a setting that cannot work, at construction.
        RuntimeError: at a call, where it was built without a group before torch.distributed was initialised.

    >>> layer = RingAttention(mesh=mesh["cp"])
    >>> out = layer(q, k, v, is_causal=True)
    """

    def __init__(
        self,
        *,
        group: Any = None,
        mesh: Any = None,
        layout: str = "zigzag",
        exchange: str = "auto",
        window: int | tuple[int | None, int | None] | None = None,
        scale: float | None = None,
        dropout: float = 0.0,
        deterministic: bool = False,
        backend: str = "auto",
        ranks_per_node: int | None = None,
        timeout: float = 60.0,
    ) -> None:
        super().__init__()
        self.ring = RingSettings.of(group, mesh, layout, exchange, ranks_per_node, timeout)
        check.check_window(window)
        self.window = window
        self.scale = None if scale is None else check.check_scale(scale, 1)
        self.dropout = check.check_probability("dropout", dropout)
        self.deterministic = check.check_bool("deterministic", deterministic)
        registry.check_name(backend)
        self.backend = backend

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
        """Attend: see ``RingDilatedAttention.forward``, whose arguments, results and errors these are."""
        return ring_attention(
            query,
            key,
            value,
            **self.ring.arguments(),
            seq_len=seq_len,
            is_causal=is_causal,
            window=self.window,
            scale=self.scale,
            cu_seqlens=cu_seqlens,
            key_padding_mask=key_padding_mask,
            dropout_p=self.dropout if self.training else 0.0,
            return_lse=return_lse,
            deterministic=self.deterministic,
            backend=self.backend,
        )

    def extra_repr(self) -> str:
        """Where the sequence lies, and every setting that is not its default."""
        settings = (
            ("window", self.window, None),
            ("scale", self.scale, None),
            ("dropout", self.dropout, 0.0),
            ("deterministic", self.deterministic, False),
            ("backend", self.backend, "auto"),
        )
        return ", ".join([self.ring.extra_repr(), *(f"{name}={value!r}" for name, value, default in settings if value != default)])


class RingDilatedAttention(DilatedSettings):
    """``DilatedAttention`` of a sequence of N positions that the W processes of a group hold in shards. All of them call it.

    The formula is ``DilatedAttention``'s, over the whole sequence: segments are its, whatever the shards.

    Args:
        segment_lengths, dilation_rates, scale, dropout, head_offsets, branch_heads, tail, mixture_grad, deterministic, backend: as of
            ``DilatedAttention``.
        group: the ProcessGroup that shares the sequence, looked up here and kept by its name; None for ``mesh``, or for all processes.
        mesh: a DeviceMesh of one axis, instead of a group.
        layout: ``"contiguous"`` · ``"zigzag"`` · ``"striped"``: who holds which positions.
        exchange, ranks_per_node, timeout: as of ``ring_dilated_attention``.

    Raises:
        ValueError, TypeError: a setting that cannot work, at construction.
        RuntimeError: at a call, where it was built without a group before torch.distributed was initialised.

    Differs from ``DilatedAttention``: no ``query_offset``, no ``precision="fp8"``.

    >>> layer = RingDilatedAttention([2048, 65536], [1, 32], mesh=mesh["cp"])
    >>> out = layer(q, k, v, is_causal=True)
    """

    def __init__(
        self,
        segment_lengths: Any,
        dilation_rates: Any,
        *,
        group: Any = None,
        mesh: Any = None,
        layout: str = "contiguous",
        exchange: str = "auto",
        scale: float | None = None,
        dropout: float = 0.0,
        head_offsets: HeadOffsets = "cyclic",
        branch_heads: str = "all",
        tail: str = "mask",
        mixture_grad: str = "exact",
        deterministic: bool = False,
        backend: str = "auto",
        ranks_per_node: int | None = None,
        timeout: float = 60.0,
    ) -> None:
        super().__init__(
            segment_lengths,
            dilation_rates,
            scale=scale,
            dropout=dropout,
            head_offsets=head_offsets,
            branch_heads=branch_heads,
            tail=tail,
            mixture_grad=mixture_grad,
            deterministic=deterministic,
            backend=backend,
        )
        self.ring = RingSettings.of(group, mesh, layout, exchange, ranks_per_node, timeout)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        is_causal: bool = False,
        seq_len: int | None = None,
        key_padding_mask: torch.Tensor | None = None,
        cu_seqlens: torch.Tensor | None = None,
        return_lse: bool = False,
    ) -> Any:
        """Attend.

        Args:
            query: (B, n, H, D), this process's rows in the order of the layout; float16, bfloat16, float32 or float64.
            key, value: (B, n, Hk, D), of the same positions; Hk a divisor of H.
            is_causal: a query sees keys at its own position and before.
            seq_len: N. None: the processes ask each other in every call; all must give it, or none.
            key_padding_mask: (B, n) bool of this process's keys, True = padding.
            cu_seqlens: bounds of packed documents in the whole sequence, int32 (documents + 1,), B = 1; equal on all processes.
            return_lse: also return the log-sum-exp of the scores.

        Returns:
            out (B, n, H, D) in query's dtype; with ``return_lse`` (out, lse (B, H, n)), lse in float32 (float64 for float64).

        Raises:
            ValueError, TypeError: tensors that do not fit, or calls that differ between processes.
            RingError: a process died, stalled or made another call.
            BackendUnavailable: no backend, or not the named one, can do this.
        """
        return ring_dilated_attention(
            query,
            key,
            value,
            **self._arguments(),
            **self.ring.arguments(),
            seq_len=seq_len,
            is_causal=is_causal,
            cu_seqlens=cu_seqlens,
            key_padding_mask=key_padding_mask,
            return_lse=return_lse,
        )

    def alone(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, is_causal: bool = False, query_offset: int = 0
    ) -> torch.Tensor:
        """The same attention over a sequence that lies here as a whole, as a chunk of a cached one does: ``DilatedAttention.forward``."""
        out: torch.Tensor = dilated_attention(query, key, value, **self._arguments(), is_causal=is_causal, query_offset=query_offset)
        return out

    def extra_repr(self) -> str:
        """The branches, where the sequence lies, and every setting that is not its default."""
        return f"{super().extra_repr()}, {self.ring.extra_repr()}"
