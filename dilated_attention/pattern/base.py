"""The base class of all patterns, with the dense definition, the counts and the picture of a pattern (with matplotlib, an extra)."""

from __future__ import annotations

import textwrap
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dilated_attention.files import replacing
from dilated_attention.pattern.checks import MAX_HEADS, MAX_LENGTH, MAX_MASK, as_int, check_bool


class Pattern(ABC):
    """Which keys a query attends to, and how often: the multiplicity m_h(i, j) ≥ 0 (docs/meaning.md).

    A pattern knows nothing about a model's tensors or about kernels. ``dense_mask`` *is* its definition. Every count below is derived
    from it, in closed form for large N, and tests check that both agree.
    """

    def dense_mask(self, num_queries: int, num_keys: int, num_heads: int, *, is_causal: bool = False, query_offset: int = 0) -> Tensor:
        """Returns the multiplicities, int64 or (of block patterns, for max(num_keys, query_offset + num_queries) positions) bool, of shape
        (num_heads, num_queries, num_keys). Query row i is position query_offset + i. It is O(N²), for small N."""
        sizes = {"num_queries": num_queries, "num_keys": num_keys, "query_offset": query_offset}
        num_queries, num_keys, query_offset = (as_int(name, size, minimum=0) for name, size in sizes.items())
        num_heads = as_int("num_heads", num_heads, minimum=1, maximum=MAX_HEADS)
        if num_queries * num_keys * num_heads > MAX_MASK:
            raise ValueError(
                f"num_heads × num_queries × num_keys is {num_heads:,} × {num_queries:,} × {num_keys:,}; a dense mask has all pairs, "
                f"expected at most {MAX_MASK:,} of them: .pairs() and .density() need no mask"
            )
        check_bool("is_causal", is_causal)
        rows, keys = torch.arange(query_offset, query_offset + num_queries), torch.arange(num_keys)
        mask = self._mask(rows, keys, num_heads, max(num_keys, query_offset + num_queries))
        return mask.mul_(keys <= rows[:, None]) if is_causal else mask

    @abstractmethod
    def _mask(self, rows: Tensor, keys: Tensor, num_heads: int, num_positions: int) -> Tensor:
        """Returns the multiplicities of queries and keys at these positions, a new tensor (num_heads, rows, keys)."""

    @abstractmethod
    def pairs(self, num_positions: int, num_heads: int = 1, *, is_causal: bool = False) -> int:
        """Returns the sum of all multiplicities over heads, queries and keys, which is the number of (query, key) products computed."""

    def density(self, num_positions: int, num_heads: int = 1, *, is_causal: bool = False) -> float:
        """Returns ``pairs`` divided by the pairs of dense full attention, H·N². A pair that is computed twice counts twice."""
        return self.pairs(num_positions, num_heads, is_causal=is_causal) / max(num_heads * num_positions**2, 1)

    def flops(self, num_positions: int, num_heads: int, head_dim: int, *, is_causal: bool = False) -> tuple[int, int]:
        """Returns the floating-point operations of one sequence, (forward, backward): 4·D and 10·D per pair.

        Two matrix products per pair forward (QKᵀ, PV), five backward. A multiply-add counts as two operations. The softmax is left
        out, as is usual for attention kernels.
        """
        pairs = self.pairs(num_positions, num_heads, is_causal=is_causal)
        head_dim = as_int("head_dim", head_dim, minimum=1, maximum=MAX_LENGTH)
        return 4 * head_dim * pairs, 10 * head_dim * pairs

    def show(self, num_positions: int = 64, num_heads: int = 4, *, is_causal: bool = False, path: str | None = None) -> Any:
        """Draws the pattern with matplotlib, one panel per head, and saves it to ``path`` if given. Returns the figure."""
        return draw(self, num_positions, num_heads, is_causal=is_causal, path=path)


# up to this length, the pattern's definition is evaluated for every pair
_DENSE_POSITIONS = 1024
_MOST_POSITIONS = 2**28
# letters per inch of a title, in matplotlib's default size
_LETTERS_PER_INCH = 10


def cell_pairs(pattern: Any, num_positions: int, num_heads: int, cell: int, *, is_causal: bool = False) -> Tensor:
    """Counts the pairs, with multiplicity, in every square of ``cell`` × ``cell`` positions (the last may be smaller; of a block pattern
    beyond 1,024 positions a multiple of both block sizes): int64 (num_heads, cells of the queries, cells of the keys), in sum ``pairs``."""
    num_positions, cell = as_int("num_positions", num_positions, minimum=0), as_int("cell", cell, minimum=1)
    num_heads, cells = as_int("num_heads", num_heads, minimum=1, maximum=MAX_HEADS), -(-num_positions // cell)
    if num_heads * cells**2 > MAX_MASK:
        raise ValueError(
            f"num_heads is {num_heads:,} and cell {cell:,}, which makes {cells:,} × {cells:,} cells for each; take larger "
            "cells or fewer heads"
        )
    if num_positions > _MOST_POSITIONS:
        raise ValueError(f"num_positions is {num_positions:,}; each one is examined, expected at most {_MOST_POSITIONS:,}")
    if num_positions <= _DENSE_POSITIONS or cell == 1:
        mask = pattern.dense_mask(num_positions, num_positions, num_heads, is_causal=is_causal).long()
        mask = torch.nn.functional.pad(mask, (0, cells * cell - num_positions) * 2)
        return mask.view(num_heads, cells, cell, cells, cell).sum((2, 4))
    q_block, k_block = getattr(pattern, "block_size", (1, 1))
    if cell % q_block or cell % k_block:
        raise ValueError(f"cell is {cell}; expected a multiple of the pattern's blocks, {q_block} × {k_block} positions")
    return pattern.long_cell_pairs(num_positions, num_heads, cell, is_causal)  # type: ignore[no-any-return]


def cell_size(pattern: Any, num_positions: int, at_most: int) -> int:
    """Returns the smallest cell size that ``cell_pairs`` takes, a power of two, such that at most ``at_most`` cells cover the sequence."""
    cell = 1 << max(0, -(-num_positions // at_most) - 1).bit_length()
    return max(cell, *getattr(pattern, "block_size", (1,))) if num_positions > _DENSE_POSITIONS else cell


def cell_sizes(num_positions: int, cell: int) -> Tensor:
    """Returns the number of all pairs in every square, int64 (cells, cells): the ``cell_pairs`` of dense attention."""
    lengths = torch.arange(0, num_positions + cell, cell).clamp(max=num_positions).diff()
    return lengths[:, None] * lengths


def draw(pattern: Any, num_positions: int, num_heads: int, *, cell: int = 1, is_causal: bool = False, path: str | None = None) -> Any:
    """Returns a figure, saved to ``path`` if given, with one panel per head: rows are queries, columns are keys, the color is the
    multiplicity, its mean over a cell; white is none."""
    try:
        # Figure without pyplot: drawing from a library must not touch the user's backend or open a window
        from matplotlib.colors import PowerNorm
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError('drawing a pattern needs matplotlib: pip install "dilated-attention[plot]"') from error
    # an image may be at most 65,536 pixels wide
    num_heads = as_int("num_heads", num_heads, minimum=1, maximum=128)
    num_positions = as_int("num_positions", num_positions, minimum=0)
    mean = cell_pairs(pattern, num_positions, num_heads, cell, is_causal=is_causal) / cell_sizes(num_positions, cell)
    figure = Figure(figsize=(3.2 * num_heads + (1.4 if cell > 1 else 1.0), 3.9), layout="constrained")
    axes = figure.subplots(1, num_heads, squeeze=False, sharey=True)[0]
    edge = mean.shape[-1] * cell
    # the square root makes cells with few pairs visible
    norm = PowerNorm(0.5, vmin=0.0, vmax=max(1.0, float(mean.max()) if mean.numel() else 1.0))
    for head, panel in enumerate(axes):
        image = panel.imshow(mean[head].numpy(), interpolation="nearest", cmap="Blues", norm=norm, extent=(0, edge, edge, 0))
        panel.set(title=f"head {head}", xlabel="key position", xlim=(0, num_positions), ylim=(num_positions, 0))
    axes[0].set_ylabel("query position")
    label = f"mean multiplicity of {cell} × {cell} positions" if cell > 1 else "multiplicity"
    figure.colorbar(image, ax=list(axes), label=label, shrink=0.8)
    listed = ", ".join(f"{w}/{r}" for w, r in getattr(pattern, "branches", ()))
    density = pattern.density(num_positions, num_heads, is_causal=is_causal)
    title = f"{type(pattern).__name__}{listed and f'({listed})'} · {num_positions} positions, {'causal' if is_causal else 'full'}"
    figure.suptitle(textwrap.fill(f"{title} · {density:.1%} of dense pairs", int(_LETTERS_PER_INCH * figure.get_figwidth())))
    if path is not None:
        with replacing(picture_file("path", path)) as new:
            figure.savefig(new, dpi=120)
    return figure


def picture_file(name: str, path: str | Path) -> Path:
    """Returns the file that a picture is written to: its suffix determines the format, .png if there is none. Raises ValueError for a
    folder."""
    file = Path(path)
    if not file.name or file.is_dir():
        raise ValueError(f"{name} is {str(path)!r}, a folder; expected a file, such as pattern.png")
    return file if file.suffix else file.with_name(f"{file.name}.png")
