"""Dilated attention as a module without parameters, whose settings are fixed at construction."""

from __future__ import annotations

from typing import Any

import torch

from dilated_attention.backends import PRECISIONS
from dilated_attention.functional import dilated_attention
from dilated_attention.modules._settings import DilatedSettings, LocalAttention
from dilated_attention.pattern import HeadOffsets
from dilated_attention.pattern.checks import one_of


class DilatedAttention(LocalAttention, DilatedSettings):
    """Dilated attention of LongNet (arXiv 2307.02486, Eq. 3-15) on projected queries, keys and values.

        out_h(i) = Σ_j m_h(i,j) e^{s_ij} v_j / Σ_j m_h(i,j) e^{s_ij},    s_ij = scale · q_i·k_j

    m_h(i, j) counts the branches (segment length w, dilation rate r) in which head h pairs positions i and j. See
    ``dilated_attention`` for the arguments and for the differences from the paper.

    Args:
        segment_lengths: w of each branch, in positions.
        dilation_rates: r of each branch, 1 ≤ r ≤ w.
        scale: factor of q·k, from 1.18e-38 to 2.36e38; None for 1/sqrt(D).
        dropout: probability that an attention weight is dropped, in training mode only; [0, 1).
        head_offsets: ``"cyclic"`` (the paper) · ``"blocked"`` (TorchScale) · ``"zero"`` · one list of H integers per branch.
        branch_heads: ``"all"``: every head runs every branch · ``"split"``: the heads are split among the branches.
        tail: ``"mask"``: only real keys take part · ``"zero_keys"``: TorchScale's zero padding takes part.
        mixture_grad: ``"exact"`` · ``"detached"``: no gradient through the mixing weights of the branches (as in TorchScale).
        deterministic: use only kernels whose gradients repeat bit for bit.
        backend: ``"auto"``, or a backend's name. A named backend is used or the call is refused; it is never replaced.
        sinks: learn a score per head that the denominator gets in addition: the parameter ``sinks`` (num_heads,), zeros at first.
        num_heads: H, with ``sinks``; None: the first call says it, as in torch's lazy modules. Optimizers need it before.
        precision: ``"native"`` · ``"fp8"``: 8-bit products, without gradients, on Hopper.

    Raises:
        ValueError, TypeError: invalid settings, at construction.

    >>> layer = DilatedAttention([2048, 4096], [1, 2])
    >>> out = layer(q, k, v, is_causal=True)
    """

    function = staticmethod(dilated_attention)

    def __init__(
        self,
        segment_lengths: Any,
        dilation_rates: Any,
        *,
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
        precision: str = "native",
    ) -> None:
        super().__init__(locals())
        one_of("precision", precision, PRECISIONS)
        self.precision = precision

    def _arguments(self, query: torch.Tensor) -> dict[str, Any]:
        return super()._arguments(query) | {"precision": self.precision}
