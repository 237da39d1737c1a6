"""Draws patterns. matplotlib is an optional dependency: ``pip install "dilated-attention[plot]"``."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

from dilated_attention.files import replacing
from dilated_attention.pattern.base import Pattern
from dilated_attention.pattern.cells import cell_pairs, cell_sizes
from dilated_attention.pattern.checks import as_int

# letters per inch of a title, in matplotlib's default size
_LETTERS_PER_INCH = 10


def draw(pattern: Pattern, num_positions: int, num_heads: int, *, is_causal: bool = False, path: str | None = None) -> Any:
    """Draws one panel per head: rows are queries, columns are keys, and the color is the multiplicity (white: not attended)."""
    _need_matplotlib()
    num_heads = _checked_panels(num_heads)
    from matplotlib.colors import BoundaryNorm, ListedColormap
    from matplotlib.figure import Figure

    mask = pattern.dense_mask(num_positions, num_positions, num_heads, is_causal=is_causal)
    highest = max(1, int(mask.max())) if mask.numel() else 1
    shades = ["#ffffff", "#9ecae1", "#4292c6", "#2171b5", "#08519c", "#08306b"]
    colours = [shades[min(level, len(shades) - 1)] for level in range(highest + 1)]
    norm = BoundaryNorm([level - 0.5 for level in range(highest + 2)], highest + 1)

    # Figure without pyplot: drawing from a library must not touch the user's backend or open a window
    figure = Figure(figsize=(3.2 * num_heads + 1.0, 3.9), layout="constrained")
    panels = figure.subplots(1, num_heads, squeeze=False, sharey=True)[0]
    for head, panel in enumerate(panels):
        image = panel.imshow(mask[head].numpy(), cmap=ListedColormap(colours), norm=norm, interpolation="nearest")
        panel.set_title(f"head {head}")
        panel.set_xlabel("key position")
    panels[0].set_ylabel("query position")
    figure.colorbar(image, ax=list(panels), ticks=range(highest + 1), label="multiplicity m(i, j)", shrink=0.8)
    figure.suptitle(textwrap.fill(_caption(pattern, num_positions, num_heads, is_causal), int(_LETTERS_PER_INCH * figure.get_figwidth())))
    _save(figure, path)
    return figure


def draw_cells(pattern: Pattern, num_positions: int, num_heads: int, cell: int, *, is_causal: bool = False, path: str | None = None) -> Any:
    """Same as ``draw``, for longer sequences: the color is the mean multiplicity of the pairs of ``cell`` × ``cell`` positions."""
    _need_matplotlib()
    num_heads = _checked_panels(num_heads)
    from matplotlib.colors import PowerNorm
    from matplotlib.figure import Figure

    pairs = cell_pairs(pattern, num_positions, num_heads, cell, is_causal=is_causal)
    mean = pairs / cell_sizes(num_positions, cell)
    # the square root makes cells with few pairs visible
    norm = PowerNorm(0.5, vmin=0.0, vmax=max(1.0, float(mean.max()) if mean.numel() else 1.0))
    figure = Figure(figsize=(3.2 * num_heads + 1.4, 3.9), layout="constrained")
    panels = figure.subplots(1, num_heads, squeeze=False, sharey=True)[0]
    edge = pairs.shape[-1] * cell
    for head, panel in enumerate(panels):
        image = panel.imshow(mean[head].numpy(), cmap="Blues", norm=norm, interpolation="nearest", extent=(0, edge, edge, 0))
        panel.set_title(f"head {head}")
        panel.set_xlabel("key position")
        panel.set_xlim(0, num_positions)
        panel.set_ylim(num_positions, 0)
        ticks = [0, num_positions // 4, num_positions // 2, 3 * num_positions // 4, num_positions]
        panel.set_xticks(ticks[::2], [f"{tick:,}" for tick in ticks[::2]])
        panel.set_yticks(ticks, [f"{tick:,}" for tick in ticks])
    panels[0].set_ylabel("query position")
    figure.colorbar(image, ax=list(panels), label=f"mean multiplicity of {cell} × {cell} positions", shrink=0.8)
    figure.suptitle(textwrap.fill(_caption(pattern, num_positions, num_heads, is_causal), int(_LETTERS_PER_INCH * figure.get_figwidth())))
    _save(figure, path)
    return figure


def _save(figure: Any, path: str | None) -> None:
    if path is not None:
        # the suffix determines the format; matplotlib adds .png if there is none
        with replacing(path if Path(path).suffix else f"{path}.png") as new:
            figure.savefig(new, dpi=120)


def _checked_panels(num_heads: int) -> int:
    # an image may be at most 65,536 pixels wide
    return as_int("num_heads", num_heads, minimum=1, maximum=128)


def _need_matplotlib() -> None:
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ImportError('drawing a pattern needs matplotlib: pip install "dilated-attention[plot]"') from error


def _caption(pattern: Pattern, num_positions: int, num_heads: int, is_causal: bool) -> str:
    kind = "causal" if is_causal else "full"
    density = pattern.density(num_positions, num_heads, is_causal=is_causal)
    branches = getattr(pattern, "branches", ())
    listed = f"({', '.join(f'{w}/{r}' for w, r in branches)})" if branches else ""
    return f"{type(pattern).__name__}{listed} · {num_positions} positions, {kind} · {density:.1%} of dense pairs"
