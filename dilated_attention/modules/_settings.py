"""What single-process and distributed dilated attention share: the pattern, the settings, their checks and their repr."""

from __future__ import annotations

from typing import Any

from torch import nn

from dilated_attention import validation as check
from dilated_attention.backends import registry
from dilated_attention.pattern import DilatedPattern, HeadOffsets
from dilated_attention.pattern.checks import one_of


class DilatedSettings(nn.Module):
    """Holds the arguments of ``dilated_attention`` that are fixed at construction; see ``DilatedAttention``. Subclasses add ``forward``."""

    def __init__(
        self,
        segment_lengths: Any,
        dilation_rates: Any,
        *,
        scale: float | None,
        dropout: float,
        head_offsets: HeadOffsets,
        branch_heads: str,
        tail: str,
        mixture_grad: str,
        deterministic: bool,
        backend: str,
    ) -> None:
        super().__init__()
        self._pattern = DilatedPattern(segment_lengths, dilation_rates, head_offsets, branch_heads, tail)  # type: ignore[arg-type]
        # the head dimension is not known yet; only scale=None would need it
        self.scale = None if scale is None else check.check_scale(scale, 1)
        self.dropout = check.check_probability("dropout", dropout)
        one_of("mixture_grad", mixture_grad, ("exact", "detached"))
        self.mixture_grad = mixture_grad
        self.deterministic = check.check_bool("deterministic", deterministic)
        registry.check_name(backend)
        self.backend = backend

    @property
    def pattern(self) -> DilatedPattern:
        """The pattern: which positions attend to which. It can count its pairs and FLOPs and draw itself."""
        return self._pattern

    def _branch_arguments(self) -> dict[str, Any]:
        """Returns the arguments that determine the attention weights: the pattern and the scale."""
        pattern = self._pattern
        return {
            "segment_lengths": pattern.segment_lengths,
            "dilation_rates": pattern.dilation_rates,
            "scale": self.scale,
            "head_offsets": pattern.head_offsets,
            "branch_heads": pattern.branch_heads,
            "tail": pattern.tail,
        }

    def _arguments(self) -> dict[str, Any]:
        return self._branch_arguments() | {
            "mixture_grad": self.mixture_grad,
            "dropout_p": self.dropout if self.training else 0.0,
            "deterministic": self.deterministic,
            "backend": self.backend,
        }

    def extra_repr(self) -> str:
        """The branches, and every setting that differs from its default."""
        pattern = self._pattern
        parts = [f"segment_lengths={list(pattern.segment_lengths)}", f"dilation_rates={list(pattern.dilation_rates)}"]
        settings = (
            ("scale", self.scale, None),
            ("dropout", self.dropout, 0.0),
            ("head_offsets", pattern.head_offsets, "cyclic"),
            ("branch_heads", pattern.branch_heads, "all"),
            ("tail", pattern.tail, "mask"),
            ("mixture_grad", self.mixture_grad, "exact"),
            ("deterministic", self.deterministic, False),
            ("backend", self.backend, "auto"),
        )
        return ", ".join(parts + [f"{name}={value!r}" for name, value, default in settings if value != default])
