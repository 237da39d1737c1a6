"""Block-sparse attention as modules without parameters: alone, and together with dilated branches in one softmax."""

from __future__ import annotations

from typing import Any

import torch

from dilated_attention.functional import block_sparse_attention, block_sparse_dilated_attention
from dilated_attention.functional.block_sparse import checked_pattern
from dilated_attention.modules._maps import AttentionMaps
from dilated_attention.modules._settings import DilatedSettings, KernelSettings, keyword_is_causal
from dilated_attention.pattern import BlockPattern, HeadOffsets, with_sparsity
from dilated_attention.pattern.blocks.density import KINDS
from dilated_attention.pattern.checks import one_of, shown


class BlockSparseAttention(AttentionMaps, KernelSettings):
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
        scale: factor of q·k, from 1.18e-38 to 2.36e38; None for 1/sqrt(D).
        dropout: probability that an attention weight is dropped, in training mode only; [0, 1).
        deterministic: use only kernels whose gradients repeat bit for bit.
        backend: ``"auto"``, or a backend's name. A named backend is used or the call is refused; it is never replaced.
        sinks: learn a score per head that the denominator gets in addition: the parameter ``sinks`` (num_heads,), zeros at first.
        num_heads: H, with ``sinks``; None: the first call says it, as in torch's lazy modules. Optimizers need it before.

    Raises:
        ValueError, TypeError: invalid settings, at construction.

    Differs from modules of this name in earlier libraries: ``sparsity_ratio=0.1`` computes a tenth of the pairs, with one softmax
    over them.

    >>> layer = BlockSparseAttention(sparsity_ratio=0.1)
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
        scale: float | None = None,
        dropout: float = 0.0,
        deterministic: bool = False,
        backend: str = "auto",
        sinks: bool = False,
        num_heads: int | None = None,
    ) -> None:
        super().__init__(scale, dropout, deterministic, backend, sinks, num_heads)
        self._pattern = chosen_pattern(pattern, sparsity_ratio, sparsity, block_size, seed)

    @property
    def pattern(self) -> BlockPattern:
        """The pattern: which positions attend to which. It can count its pairs and FLOPs and draw itself."""
        return self._pattern

    @keyword_is_causal
    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        is_causal: bool = False,
        key_padding_mask: torch.Tensor | None = None,
        cu_seqlens: torch.Tensor | None = None,
        query_offset: int = 0,
        return_lse: bool = False,
    ) -> Any:
        """Computes the attention.

        Args:
            query: (B, Nq, H, D), float16, bfloat16, float32 or float64.
            key, value: (B, Nk, Hk, D), Hk a divisor of H.
            is_causal: a query sees keys at its own position and before.
            key_padding_mask: (B, Nk) bool, True = padding.
            cu_seqlens: boundaries of packed documents, int32 (documents + 1,), B = 1.
            query_offset: position of the first query among the keys, for decoding; query_offset + Nq ≤ Nk.
            return_lse: also return the log-sum-exp of the scores.

        Returns:
            out (B, Nq, H, D) in query's dtype; with ``return_lse`` (out, lse (B, H, Nq)), lse in float32 (float64 for float64).

        Raises:
            ValueError, TypeError: the tensors do not fit together; messages call query, key and value q, k and v.
            BackendUnavailable: no backend can compute this, or the named one cannot.
        """
        return block_sparse_attention(
            query,
            key,
            value,
            self._pattern,
            **self._arguments(query),
            is_causal=is_causal,
            cu_seqlens=cu_seqlens,
            key_padding_mask=key_padding_mask,
            query_offset=query_offset,
            return_lse=return_lse,
        )

    def _map_arguments(self, query: torch.Tensor) -> dict[str, Any]:
        return {"pattern": self._pattern, "scale": self.scale, "sinks": self._sinks_for(query)}

    def extra_repr(self) -> str:
        """The pattern, and every setting that differs from its default."""
        return ", ".join([repr(self._pattern), *self._changed()])


class BlockSparseDilatedAttention(AttentionMaps, DilatedSettings):
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
        super().__init__(
            segment_lengths,
            dilation_rates,
            scale=scale,
            dropout=dropout,
            head_offsets=head_offsets,
            branch_heads=branch_heads,
            tail=tail,
            mixture_grad="exact",
            deterministic=deterministic,
            backend=backend,
            sinks=sinks,
            num_heads=num_heads,
        )
        self._block_pattern = chosen_pattern(pattern, sparsity_ratio, sparsity, block_size, seed)

    @property
    def block_pattern(self) -> BlockPattern:
        """The pattern of the kept blocks; ``pattern`` is that of the branches."""
        return self._block_pattern

    @keyword_is_causal
    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        is_causal: bool = False,
        key_padding_mask: torch.Tensor | None = None,
        cu_seqlens: torch.Tensor | None = None,
        query_offset: int = 0,
        return_lse: bool = False,
    ) -> Any:
        """Computes the attention. Arguments, results and errors are those of ``BlockSparseAttention``."""
        settings = self._arguments(query)
        del settings["mixture_grad"]
        return block_sparse_dilated_attention(
            query,
            key,
            value,
            **settings,
            pattern=self._block_pattern,
            is_causal=is_causal,
            cu_seqlens=cu_seqlens,
            key_padding_mask=key_padding_mask,
            query_offset=query_offset,
            return_lse=return_lse,
        )

    def _map_arguments(self, query: torch.Tensor) -> dict[str, Any]:
        return {**self._branch_arguments(query), "pattern": self._block_pattern}

    def extra_repr(self) -> str:
        """The branches, the blocks, and every setting that differs from its default."""
        return f"{super().extra_repr()}, block_pattern={self._block_pattern!r}"


def chosen_pattern(pattern: Any, sparsity_ratio: float | None, sparsity: str, block_size: Any, seed: int) -> BlockPattern:
    """Returns the given pattern, or the pattern of a sparsity ratio; exactly one of the two must be given."""
    if (pattern is None) == (sparsity_ratio is None):
        given = "neither" if pattern is None else f"both (pattern {shown(pattern)}, sparsity_ratio {shown(sparsity_ratio)})"
        raise ValueError(
            f"pattern and sparsity_ratio: {given} given; expected exactly one: give a pattern, e.g. LocalWindow(512), or a fraction "
            "of dense attention's pairs, e.g. sparsity_ratio=0.1"
        )
    if sparsity_ratio is not None:
        one_of("sparsity", sparsity, KINDS)
        if isinstance(sparsity_ratio, bool) or not isinstance(sparsity_ratio, (int, float)):
            raise TypeError(
                f"sparsity_ratio is {shown(sparsity_ratio)} ({type(sparsity_ratio).__name__}); expected a number above 0 and at most 1"
            )
        if not 0 < sparsity_ratio <= 1:
            raise ValueError(f"sparsity_ratio is {sparsity_ratio}; expected the fraction of all pairs to compute, above 0 and at most 1")
        return with_sparsity(sparsity_ratio, sparsity, block_size=block_size, seed=seed)
    for name, value, default in (("sparsity", sparsity, "random"), ("block_size", block_size, 128), ("seed", seed, 0)):
        if value != default:
            raise ValueError(
                f"{name} is {shown(value)} with a pattern, which has its own; leave {name} at its default, or use sparsity_ratio "
                "instead of pattern"
            )
    return checked_pattern(pattern)
