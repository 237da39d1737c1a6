"""Block-sparse attention as modules without parameters: alone, and together with dilated branches in one softmax."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dilated_attention.functional import block_sparse_attention, block_sparse_dilated_attention
from dilated_attention.functional.block_sparse import checked_pattern
from dilated_attention.modules._settings import DilatedSettings, KernelSettings, LocalAttention
from dilated_attention.pattern import BlockPattern, HeadOffsets, with_sparsity
from dilated_attention.pattern.blocks.density import KINDS
from dilated_attention.pattern.checks import check_number, one_of, shown


class BlockSettings(KernelSettings):
    """Holds the arguments of ``block_sparse_attention`` that are fixed at construction; see ``BlockSparseAttention``."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        super().__init__(given)
        self._blocks = _chosen_pattern(given)

    def _map_arguments(self, query: torch.Tensor) -> dict[str, Any]:
        return super()._map_arguments(query) | {"pattern": self._blocks}

    @property
    def pattern(self) -> BlockPattern:
        """The pattern: which positions attend to which. It can count its pairs and FLOPs and draw itself."""
        return self._blocks

    def _shown(self) -> list[str]:
        return [repr(self._blocks)]


class UnionSettings(DilatedSettings):
    """Holds the arguments of ``block_sparse_dilated_attention`` that are fixed at construction; see ``BlockSparseDilatedAttention``."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        super().__init__(given)
        self._blocks = _chosen_pattern(given)

    @property
    def block_pattern(self) -> BlockPattern:
        """The pattern of the kept blocks; ``pattern`` is that of the branches."""
        return self._blocks

    def _map_arguments(self, query: torch.Tensor) -> dict[str, Any]:
        return super()._map_arguments(query) | {"pattern": self._blocks}

    def _arguments(self, query: torch.Tensor) -> dict[str, Any]:
        settings = super()._arguments(query)
        # always exact, and no argument of the function
        del settings["mixture_grad"]
        return settings

    def _shown(self) -> list[str]:
        return [*super()._shown(), f"block_pattern={self._blocks!r}"]


def _chosen_pattern(given: Mapping[str, Any]) -> BlockPattern:
    """Returns the given pattern, or the pattern of a sparsity ratio; exactly one of the two must be given."""
    pattern, sparsity_ratio = given["pattern"], given["sparsity_ratio"]
    sparsity, block_size, seed = given["sparsity"], given["block_size"], given["seed"]
    if (pattern is None) == (sparsity_ratio is None):
        which = "neither" if pattern is None else f"both (pattern {shown(pattern)}, sparsity_ratio {shown(sparsity_ratio)})"
        raise ValueError(
            f"pattern and sparsity_ratio: {which} given; expected exactly one: give a pattern, e.g. LocalWindow(512), or a fraction "
            "of dense attention's pairs, e.g. sparsity_ratio=0.1"
        )
    if sparsity_ratio is not None:
        one_of("sparsity", sparsity, KINDS)
        check_number("sparsity_ratio", sparsity_ratio, "a number above 0 and at most 1")
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


class BlockSparseAttention(LocalAttention, BlockSettings):
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
        scale, dropout, deterministic, backend, sinks, num_heads: see ``DilatedAttention``.

    Raises:
        ValueError, TypeError: invalid settings, at construction.

    Differs from modules of this name in earlier libraries: ``sparsity_ratio=0.1`` computes a tenth of the pairs, with one softmax
    over them.

    >>> layer = BlockSparseAttention(sparsity_ratio=0.1)
    >>> out = layer(q, k, v, is_causal=True)
    """

    function = staticmethod(block_sparse_attention)

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
        super().__init__(locals())


class BlockSparseDilatedAttention(LocalAttention, UnionSettings):
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

    function = staticmethod(block_sparse_dilated_attention)

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
        super().__init__(locals())
