"""LongNet's decoder: pre-norm blocks of causal dilated attention and feed-forward layers, with MAGNETO's sub-LayerNorms."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from dilated_attention.models.config import LongNetConfig
from dilated_attention.modules import MultiheadDilatedAttention, RingMultiheadDilatedAttention, RingSettings


def decoder_gain(num_layers: int) -> float:
    """MAGNETO's γ of a decoder of M layers, sqrt(log 2M) (arXiv 2210.06423, Figure 2): gain of v, out and feed-forward weights.

    sqrt(log 2) for the one layer of M = 1, as for two: the formula's own value.
    """
    return math.sqrt(math.log(2 * num_layers))


class FeedForward(nn.Module):
    """``"gelu"``: y = W_2 · LN(GELU(W_1 x)) · ``"swiglu"``: y = W_2 · LN(SiLU(W_g x) ∘ W_1 x). LN is MAGNETO's sub-LayerNorm.

    (B, N, E) → (B, N, E).
    """

    def __init__(self, config: LongNetConfig, *, device: Any = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        width = config.inner_dim
        self.gain = decoder_gain(config.num_layers)
        self.gate = nn.Linear(config.embed_dim, width, **factory) if config.ffn == "swiglu" else None
        self.up = nn.Linear(config.embed_dim, width, **factory)
        self.norm = nn.LayerNorm(width, eps=config.layer_norm_eps, **factory)
        self.down = nn.Linear(width, config.embed_dim, **factory)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for linear in (self.gate, self.up, self.down):
            if linear is not None:
                nn.init.xavier_normal_(linear.weight, gain=self.gain)
                nn.init.zeros_(linear.bias)
        self.norm.reset_parameters()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = F.gelu(self.up(x)) if self.gate is None else F.silu(self.gate(x)) * self.up(x)
        return self.down(self.norm(inner))


class DecoderBlock(nn.Module):
    """x + attention(LN(x)), then x + feed_forward(LN(x)). (B, N, E) → (B, N, E); with ``ring`` this process's rows, (B, n, E)."""

    def __init__(
        self,
        config: LongNetConfig,
        *,
        backend: str = "auto",
        ring: RingSettings | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.attention_norm = nn.LayerNorm(config.embed_dim, eps=config.layer_norm_eps, **factory)
        shape: dict[str, Any] = {
            "embed_dim": config.embed_dim,
            "num_heads": config.num_heads,
            "segment_lengths": config.segment_lengths,
            "dilation_rates": config.dilation_rates,
            "num_kv_heads": config.num_kv_heads,
            "dropout": config.attention_dropout,
            "layer_norm_eps": config.layer_norm_eps,
            "gamma_init": decoder_gain(config.num_layers),
            "rotary": True,
            "rotary_base": config.rotary_base,
            "head_offsets": config.head_offsets,
            "backend": backend,
        }
        self.attention: nn.Module = (
            MultiheadDilatedAttention(**shape, **factory)
            if ring is None
            else RingMultiheadDilatedAttention(**shape, **ring.arguments(), **factory)
        )
        self.ffn_norm = nn.LayerNorm(config.embed_dim, eps=config.layer_norm_eps, **factory)
        self.ffn = FeedForward(config, **factory)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: torch.Tensor, *, cu_seqlens: torch.Tensor | None = None, seq_len: int | None = None) -> torch.Tensor:
        spread = {} if seq_len is None else {"seq_len": seq_len}
        attended, _ = self.attention(self.attention_norm(x), is_causal=True, cu_seqlens=cu_seqlens, **spread)
        x = x + self.dropout(attended)
        return x + self.dropout(self.ffn(self.ffn_norm(x)))


class LongNetDecoder(nn.Module):
    """A stack of M ``DecoderBlock`` and a last LayerNorm: embeddings (B, N, E) → hidden states (B, N, E), causal.

    Args:
        config: the shape.
        backend: ``"auto"`` or a name of ``list_backends()``, for every layer.
        ring: how processes share the sequence, of which this one then gets and returns its rows (B, n, E); None for one process.
        device, dtype: of the parameters.

    Differs from the paper: rotary positions (RoPE) where LongNet has XPOS.
    """

    def __init__(
        self,
        config: LongNetConfig,
        *,
        backend: str = "auto",
        ring: RingSettings | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.ring = ring
        self.blocks = nn.ModuleList(
            DecoderBlock(config, backend=backend, ring=ring, device=device, dtype=dtype) for _ in range(config.num_layers)
        )
        self.norm = nn.LayerNorm(config.embed_dim, eps=config.layer_norm_eps, device=device, dtype=dtype)

    def forward(self, x: torch.Tensor, *, cu_seqlens: torch.Tensor | None = None, seq_len: int | None = None) -> torch.Tensor:
        """Hidden states. ``seq_len`` is N where processes share the sequence; None: they ask each other, once for all blocks."""
        if self.ring is None:
            if seq_len not in (None, x.shape[1]):
                raise ValueError(f"seq_len is {seq_len} and there are {x.shape[1]} positions; on one process leave seq_len out")
            seq_len = None
        elif seq_len is None:
            seq_len = self.ring.whole_length(x.shape[1])
        for block in self.blocks:
            x = block(x, cu_seqlens=cu_seqlens, seq_len=seq_len)
        return self.norm(x)
