"""One block of a LongNet encoder or decoder: attention and feed-forward layer on a residual stream."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from dilated_attention.functional.arguments import RESOLVES
from dilated_attention.functional.fused_layers import Step, add_dropped, compile_block, fused_block, is_lean, linear_layers
from dilated_attention.models.config import LongNetConfig, as_config
from dilated_attention.models.kv_cache import CachePass
from dilated_attention.models.loss import first_of_group
from dilated_attention.modules import (
    BlockSparseAttention,
    DilatedAttention,
    MultiheadBlockSparseAttention,
    MultiheadDilatedAttention,
    RingMultiheadBlockSparseAttention,
    RingMultiheadDilatedAttention,
    RingSettings,
)
from dilated_attention.modules.projections import TABLES, MultiheadAttention, SharedTables, shared_tables
from dilated_attention.modules.rotary import turn
from dilated_attention.pattern import DilatedPattern
from dilated_attention.validation import check_cu_seqlens, check_factory


def magneto_gain(num_layers: int) -> float:
    """Returns MAGNETO's γ = sqrt(log 2M) for an encoder or a decoder of M layers (arXiv 2210.06423, Figure 2): the gain of the v, out and
    feed-forward weights."""
    return math.sqrt(math.log(2 * num_layers))


def make_norm(config: LongNetConfig, **factory: Any) -> nn.Module:
    """Makes a norm for the residual stream."""
    kind = nn.LayerNorm if config.norm == "layer_norm" else nn.RMSNorm
    return kind(config.embed_dim, eps=config.layer_norm_eps, **factory)


class FeedForward(nn.Module):
    """y = W_2 · LN(act(W_1 x)), or with ``"swiglu"`` W_2 · LN(SiLU(W_g x) ∘ W_1 x); (B, N, E) → (B, N, E). LN is MAGNETO's; without
    ``sub_norm`` it is left out."""

    def __init__(self, config: LongNetConfig, *, device: Any = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        factory = check_factory(device, dtype)
        width = as_config("config", config).inner_dim
        self.activation = config.ffn
        self.num_layers = config.num_layers
        self.gate = nn.Linear(config.embed_dim, width, bias=config.bias, **factory) if config.ffn == "swiglu" else None
        self.up = nn.Linear(config.embed_dim, width, bias=config.bias, **factory)
        self.norm = nn.LayerNorm(width, eps=config.layer_norm_eps, **factory) if config.sub_norm else None
        self.down = nn.Linear(width, config.embed_dim, bias=config.bias, **factory)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialises weights Xavier-normal with MAGNETO's gain; without ``sub_norm`` with gain 1, and then divides W_2 by sqrt(2M)."""
        gain = magneto_gain(self.num_layers) if self.norm is not None else 1.0
        for linear in (self.gate, self.up, self.down):
            if linear is not None:
                nn.init.xavier_normal_(linear.weight, gain=gain)
                if linear.bias is not None:
                    nn.init.zeros_(linear.bias)
        if self.norm is not None:
            self.norm.reset_parameters()
        else:
            shrink_residual(self.down, self.num_layers)

    def forward(self, x: torch.Tensor, *, input_norm: nn.Module | None = None) -> torch.Tensor:
        """Computes the layer of ``input_norm(x)``, or of x without one. If the layer applies the norm, training saves less memory."""
        inner = linear_layers(x, (self.up,) if self.gate is None else (self.up, self.gate), norm=input_norm)
        gate = None if self.gate is None else inner[1]
        return linear_layers(inner[0], (self.down,), norm=self.norm, activation=self.activation, gate=gate)[0]

    def extra_repr(self) -> str:
        return self.activation


def shrink_residual(linear: nn.Linear, num_layers: int) -> None:
    """Divides a weight that writes to the residual stream by sqrt(2M), so that 2M such layers leave its variance near 1, as in GPT-2."""
    with torch.no_grad():
        linear.weight.div_(math.sqrt(2 * num_layers))


class DropPath(nn.Module):
    """Stochastic depth (arXiv 1603.09382): x/(1 − p) or, with probability p, 0, with one draw per sample or packed document. x (B, N, E)
    is, with ``ring``, this process's rows (B, n, E), and the first process draws for all of them."""

    def __init__(self, p: float, ring: RingSettings | None = None) -> None:
        super().__init__()
        self.p = p
        self.ring = ring

    def forward(self, x: torch.Tensor, cu_seqlens: torch.Tensor | None = None, seq_len: int | None = None) -> torch.Tensor:
        factors = self.factors(x, cu_seqlens, seq_len)
        return x if factors is None else x * factors.to(x.dtype).view(*factors.shape, *(1,) * (3 - factors.ndim))

    def factors(self, x: torch.Tensor, cu_seqlens: torch.Tensor | None = None, seq_len: int | None = None) -> torch.Tensor | None:
        """Returns what x is multiplied by, in float32: one factor per sample (B,), or one per row (1, N) if documents are packed; None if
        all are 1.

        Args:
            cu_seqlens: boundaries of packed documents in the whole sequence.
            seq_len: positions of the whole sequence of a ring; None takes them from ``cu_seqlens``, which waits for the device.
        """
        if self.p == 0 or not self.training:
            return None
        samples = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        drawn = nn.functional.dropout(torch.ones(samples, device=x.device), self.p)
        if self.ring is not None:
            drawn = first_of_group(drawn, self.ring.group_name)
        if cu_seqlens is None:
            return drawn
        if self.ring is None:
            rows = torch.arange(x.shape[1], device=x.device)
        else:
            rows = self.ring.positions(x, int(cu_seqlens[-1]) if seq_len is None else seq_len)
        bounds = cu_seqlens.to(rows.device)
        return drawn[torch.searchsorted(bounds, rows.to(bounds.dtype), right=True) - 1][None]

    def extra_repr(self) -> str:
        return f"p={self.p:g}"


def make_attention(config: LongNetConfig, *, backend: str, ring: RingSettings | None, **factory: Any) -> MultiheadAttention:
    """Makes the attention of one block, on one process or, with ``ring``, on several."""
    options: dict[str, Any] = {
        "dropout": config.attention_dropout,
        "layer_norm": config.sub_norm,
        "gamma_init": magneto_gain(config.num_layers) if config.sub_norm else 1.0,
        "rotary": config.positions != "none",
        "xpos_scale_base": config.xpos_scale_base if config.positions == "xpos" else None,
        "backend": backend,
        **factory,
    }
    # what the configuration and the attention call by the same name
    copied = ["embed_dim", "num_heads", "num_kv_heads", "bias", "layer_norm_eps", "rotary_base", "qk_norm"]
    of_ring = {} if ring is None else ring.arguments()
    pattern = config.pattern
    if isinstance(pattern, DilatedPattern):
        options |= {name: getattr(pattern, name) for name in ("segment_lengths", "dilation_rates", "head_offsets", "tail")}
        classes: Any = MultiheadDilatedAttention, RingMultiheadDilatedAttention
        copied.append("mixture_grad")
    else:
        options["pattern"] = pattern
        classes = MultiheadBlockSparseAttention, RingMultiheadBlockSparseAttention
        if ring is not None and (ring.exchange, ring.ranks_per_node) != ("auto", None):
            raise ValueError(
                f"exchange is {ring.exchange!r} and ranks_per_node is {ring.ranks_per_node}; block-sparse rings send single blocks from "
                "process to process and have neither: leave them out"
            )
    layer: MultiheadAttention = classes[ring is not None](**options, **of_ring, **{name: getattr(config, name) for name in copied})
    return layer


# layers whose forward can apply the norm of its input (``input_norm``)
_TAKE_NORM = (
    FeedForward,
    MultiheadBlockSparseAttention,
    MultiheadDilatedAttention,
    RingMultiheadBlockSparseAttention,
    RingMultiheadDilatedAttention,
)


class Block(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x)). (B, N, E) → (B, N, E); with ``ring``, x is this process's rows (B, n, E).

    Args:
        config: the model configuration.
        depth: index in the stack, from 0, for ``drop_path`` and caches.
        backend, ring, device, dtype: see ``LongNetDecoder``.
    """

    def __init__(
        self, config: LongNetConfig, *, depth: int = 0, backend: str = "auto", ring: RingSettings | None = None, device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        factory = check_factory(device, dtype)
        self.is_causal, self.depth = as_config("config", config).is_causal, depth
        self.attention_norm = make_norm(config, **factory)
        self.attention = make_attention(config, backend=backend, ring=ring, **factory)
        self.ffn_norm = make_norm(config, **factory)
        self.ffn = FeedForward(config, **factory)
        self.dropout = nn.Dropout(config.dropout)
        self.drop_path = DropPath(config.drop_path * depth / max(1, config.num_layers - 1), ring)
        if not config.sub_norm:
            shrink_residual(self.attention.out_proj, config.num_layers)

    def forward(
        self, x: torch.Tensor, *, cu_seqlens: torch.Tensor | None = None, seq_len: int | None = None, cache: CachePass | None = None,
        tables: SharedTables | None = None,
    ) -> torch.Tensor:  # fmt: skip
        if cache is not None:
            attention, normed = self.attention, self.attention_norm(x)
            attended = attention.combine(cache.attend(self.depth, *attention.project(normed, normed, normed), attention.attention))
        else:
            if seq_len is None and (y := self._fused(x, cu_seqlens, tables)) is not None:
                return y
            # only the attention of a ring has this argument
            of_ring = {} if seq_len is None else {"seq_len": seq_len}
            options: dict[str, Any] = {"is_causal": self.is_causal, "cu_seqlens": cu_seqlens, **of_ring}
            # a layer in its place may not have this option
            if tables is not None and is_lean(self.attention, *_TAKE_NORM):
                options[TABLES] = tables
            attended, _ = _after_norm(self.attention, self.attention_norm, x, **options)
        x = self._add(x, attended, cu_seqlens, seq_len)
        return self._add(x, _after_norm(self.ffn, self.ffn_norm, x), cu_seqlens, seq_len)

    def _steps(self) -> list[Step]:
        """Returns the linear layers of the block, each with the norm and the activation of its input, for the fused functions."""
        attention, ffn = self.attention, self.ffn
        return [
            Step((attention.q_proj, attention.k_proj, attention.v_proj), self.attention_norm),
            Step((attention.out_proj,), attention.inner_attn_ln),
            Step((ffn.up,) if ffn.gate is None else (ffn.up, ffn.gate), self.ffn_norm),
            Step((ffn.down,), ffn.norm, ffn.activation),
        ]

    def _fused(self, x: torch.Tensor, cu_seqlens: torch.Tensor | None, shared: SharedTables | None) -> torch.Tensor | None:
        """Returns the output, or None if ``fused_block`` cannot compute it. It calls no module, so none may be replaced or have hooks."""
        attention = self.attention
        is_lean_block = type(self) is Block and self._has_lean_layers() and self._has_lean_dropout()
        if not (is_lean_block and is_lean(attention.attention, DilatedAttention, BlockSparseAttention) and x.ndim == 3):
            return None
        if attention.q_norm is not None or attention.sinks is not None:
            return None
        # what the backward keeps must not hold x
        shape = x.shape[:2]

        def heads(qkv: torch.Tensor, tables: Sequence[torch.Tensor], sign: float) -> Any:
            """Returns q, k and v, of which q and k are turned in place. ``tables``: (cos, sin) of both, or of each in turn; or empty."""
            H, Hk = attention.num_heads, attention.num_kv_heads
            qkv = qkv.view(*shape, H + 2 * Hk, attention.head_dim)
            q, k, v = qkv.split((H, Hk, Hk), 2)
            parts = (qkv[:, :, : H + Hk],) if len(tables) == 2 else (q, k)
            for part, cos, sin in zip(parts, tables[::2], tables[1::2], strict=False):
                turn(part, (cos, sin), part, sign)
            return q, k, v

        def attend(qkv: torch.Tensor, needs_grad: bool) -> Any:
            tables: Any = ()
            if attention.rotary:
                check_cu_seqlens(cu_seqlens, x, x)
                of_q, of_k = (shared or shared_tables(cu_seqlens))(attention, qkv, shape[1])
                # without XPOS queries and keys have one table
                tables = of_q if of_q is of_k else of_q + of_k
            q, k, v = heads(qkv, tables, 1.0)
            # with RESOLVES the function returns the call that it would run, and its inputs
            options = {"is_causal": self.is_causal, "cu_seqlens": cu_seqlens, RESOLVES: needs_grad}
            call, inputs = attention.attention.function(q, k, v, **attention.attention._arguments(q), **options)
            return call, inputs, tables, lambda grads, tables: heads(grads, tables, -1.0)

        dropout = self.dropout.p if self.dropout.training else 0.0
        return fused_block(x, self._steps(), attend, dropout, lambda: self.drop_path.factors(x, cu_seqlens))

    def compile_ahead(self, x: torch.Tensor) -> None:
        """Starts compiling the kernels of all layers for x on a GPU, except the attention's, which compile only once it is called."""
        if self._has_lean_layers():
            compile_block(x, self._steps(), self.training * self.dropout.p, self.training and self.drop_path.p > 0)

    def _has_lean_layers(self) -> bool:
        return is_lean(self.attention, *_TAKE_NORM) and is_lean(self.ffn, FeedForward)

    def _has_lean_dropout(self) -> bool:
        return is_lean(self.dropout, nn.Dropout) and is_lean(self.drop_path, DropPath) and self.dropout.p < 1

    def _add(self, x: torch.Tensor, y: torch.Tensor, cu_seqlens: torch.Tensor | None, seq_len: int | None) -> torch.Tensor:
        """Returns x + drop_path(dropout(y))."""
        if not self._has_lean_dropout():
            return x + self.drop_path(self.dropout(y), cu_seqlens, seq_len)
        dropout = self.dropout.p if self.dropout.training else 0.0
        return add_dropped(x, y, dropout=dropout, path=self.drop_path.factors(y, cu_seqlens, seq_len))


def _after_norm(layer: nn.Module, norm: nn.Module, x: torch.Tensor, **options: Any) -> Any:
    """Returns layer(norm(x)). A layer of this library applies the norm in its forward, unless it was replaced or has hooks."""
    return layer(x, input_norm=norm, **options) if is_lean(layer, *_TAKE_NORM) else layer(norm(x), **options)
