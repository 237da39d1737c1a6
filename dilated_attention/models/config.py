"""The shape of a LongNet model as a frozen record: validated once, written as JSON beside the weights."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from dilated_attention.pattern import DilatedPattern
from dilated_attention.pattern.checks import as_int, one_of
from dilated_attention.validation import MAX_HEAD_DIM, check_probability


@dataclass(frozen=True, kw_only=True, slots=True)
class LongNetConfig:
    """Everything that shapes a LongNet decoder. Which kernels run it is no part of it: see ``LongNetLM(backend=…)``.

    Args:
        vocab_size: tokens; 256 for bytes.
        embed_dim: E, width of the residual stream; a multiple of 2·num_heads (rotary turns pairs of head dimensions).
        num_layers: M blocks.
        num_heads: H query heads.
        num_kv_heads: key/value heads, a divisor of num_heads; None for num_heads.
        ffn_dim: width of the feed-forward layer; None for 4·E (``"gelu"``), or 8/3·E rounded up to 32 (``"swiglu"``), which
            has as many parameters.
        ffn: ``"gelu"`` (the paper's, with MAGNETO's sub-LayerNorm) · ``"swiglu"``.
        segment_lengths: w of each branch, in positions.
        dilation_rates: r of each branch.
        head_offsets: as of ``dilated_attention``.
        rotary_base: θ of the rotary embedding.
        dropout: of the embedding and of each residual branch, in training; [0, 1).
        attention_dropout: of attention weights, in training; [0, 1). Flash kernels have none: it is slow.
        layer_norm_eps: of every LayerNorm.

    Raises:
        ValueError, TypeError: a model that cannot be built; the text names the field, its value and what is allowed.
    """

    vocab_size: int
    embed_dim: int
    num_layers: int
    num_heads: int
    segment_lengths: tuple[int, ...]
    dilation_rates: tuple[int, ...]
    num_kv_heads: int | None = None
    ffn_dim: int | None = None
    ffn: str = "gelu"
    head_offsets: str | tuple[tuple[int, ...], ...] = "cyclic"
    rotary_base: float = 10000.0
    dropout: float = 0.0
    attention_dropout: float = 0.0
    layer_norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        for name in ("vocab_size", "embed_dim", "num_layers", "num_heads"):
            object.__setattr__(self, name, as_int(name, getattr(self, name), minimum=1))
        for name in ("num_kv_heads", "ffn_dim"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, as_int(name, getattr(self, name), minimum=1))
        one_of("ffn", self.ffn, ("gelu", "swiglu"))
        if self.embed_dim % (2 * self.num_heads):
            raise ValueError(
                f"embed_dim is {self.embed_dim} and num_heads is {self.num_heads}; rotary positions need an even head_dim: "
                f"use a multiple of {2 * self.num_heads}"
            )
        if self.head_dim > MAX_HEAD_DIM:
            raise ValueError(
                f"embed_dim {self.embed_dim} over {self.num_heads} heads makes head_dim {self.head_dim}; at most {MAX_HEAD_DIM}: use more heads"
            )
        if self.num_heads % (self.num_kv_heads or 1):
            raise ValueError(f"num_kv_heads is {self.num_kv_heads}; expected a divisor of num_heads = {self.num_heads}")
        for name, above in (("rotary_base", 1.0), ("layer_norm_eps", 0.0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise TypeError(f"{name} is {value!r} ({type(value).__name__}); expected a number > {above:g}")
            if not (math.isfinite(value) and value > above):
                raise ValueError(f"{name} is {value}; expected a finite number > {above:g}")
        for name in ("dropout", "attention_dropout"):
            object.__setattr__(self, name, check_probability(name, getattr(self, name)))
        pattern = self.pattern
        pattern.offsets(self.num_heads)
        # the pattern has turned lists into tuples of plain integers, so that equal configurations compare equal
        for name in ("segment_lengths", "dilation_rates", "head_offsets"):
            object.__setattr__(self, name, getattr(pattern, name))

    @property
    def pattern(self) -> DilatedPattern:
        return DilatedPattern(self.segment_lengths, self.dilation_rates, self.head_offsets)

    @property
    def head_dim(self) -> int:
        return self.embed_dim // self.num_heads

    @property
    def inner_dim(self) -> int:
        """Width of the feed-forward layer, with its default filled in."""
        if self.ffn_dim is not None:
            return self.ffn_dim
        return 4 * self.embed_dim if self.ffn == "gelu" else -(-8 * self.embed_dim // 3 // 32) * 32

    @property
    def reach(self) -> int:
        """Least common multiple of the segment lengths: no token sees anything before the last multiple of it, in any layer."""
        return math.lcm(*self.segment_lengths)

    def to_dict(self) -> dict[str, Any]:
        """Plain values that JSON knows: tuples as lists."""
        return json.loads(json.dumps(asdict(self)))

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> LongNetConfig:
        """The inverse of ``to_dict``. A key that this version does not know is refused: the model it shaped is another one."""
        known = [field.name for field in fields(cls)]
        unknown = sorted(set(values) - set(known))
        if unknown:
            raise ValueError(f"configuration has unknown keys {', '.join(unknown)}; known are {', '.join(known)}")
        return cls(**values)

    def save(self, path: str | Path) -> None:
        Path(path).write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> LongNetConfig:
        return cls.from_dict(json.loads(Path(path).read_text(encoding="utf-8")))
