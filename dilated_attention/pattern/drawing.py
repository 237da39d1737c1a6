"""Draws patterns. matplotlib is an optional dependency: ``pip install "dilated-attention[plot]"``."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

from torch import Tensor

from dilated_attention.files import replacing
from dilated_attention.pattern.base import Pattern
from dilated_attention.pattern.checks import as_int

# letters per inch of a title, in matplotlib's default size
_LETTERS_PER_INCH = 10


def draw(pattern: Pattern, num_positions: int, num_heads: int, *, is_causal: bool = False, path: str | None = None) -> Any:
    """Draws one panel per head: rows are queries, columns are keys, and the color is the multiplicity (white: not attended)."""
    num_heads = checked_panels(num_heads)
    from matplotlib.colors import BoundaryNorm, ListedColormap

    mask = pattern.dense_mask(num_positions, num_positions, num_heads, is_causal=is_causal)
    highest = max(1, int(mask.max())) if mask.numel() else 1
    shades = ["#ffffff", "#9ecae1", "#4292c6", "#2171b5", "#08519c", "#08306b"]
    colours = [shades[min(level, len(shades) - 1)] for level in range(highest + 1)]
    norm = BoundaryNorm([level - 0.5 for level in range(highest + 2)], highest + 1)
    figure = panels(mask, 1.0, "multiplicity m(i, j)", range(highest + 1), cmap=ListedColormap(colours), norm=norm)
    return finished(figure, pattern, num_positions, num_heads, is_causal, path)


def panels(values: Tensor, bar_width: float, label: str, ticks: Any = None, **options: Any) -> Any:
    """Returns a figure with a panel for each head of ``values`` (heads, queries, keys), and a colour bar in inches ``bar_width``."""
    # Figure without pyplot: drawing from a library must not touch the user's backend or open a window
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.2 * len(values) + bar_width, 3.9), layout="constrained")
    axes = figure.subplots(1, len(values), squeeze=False, sharey=True)[0]
    for head, panel in enumerate(axes):
        image = panel.imshow(values[head].numpy(), interpolation="nearest", **options)
        panel.set_title(f"head {head}")
        panel.set_xlabel("key position")
    axes[0].set_ylabel("query position")
    figure.colorbar(image, ax=list(axes), ticks=ticks, label=label, shrink=0.8)
    return figure


def finished(figure: Any, pattern: Pattern, num_positions: int, num_heads: int, is_causal: bool, path: str | None) -> Any:
    """Returns the figure with a title, and saves it to ``path`` if given."""
    kind = "causal" if is_causal else "full"
    density = pattern.density(num_positions, num_heads, is_causal=is_causal)
    branches = getattr(pattern, "branches", ())
    listed = f"({', '.join(f'{w}/{r}' for w, r in branches)})" if branches else ""
    title = f"{type(pattern).__name__}{listed} · {num_positions} positions, {kind} · {density:.1%} of dense pairs"
    figure.suptitle(textwrap.fill(title, int(_LETTERS_PER_INCH * figure.get_figwidth())))
    if path is not None:
        # the suffix determines the format; matplotlib adds .png if there is none
        with replacing(path if Path(path).suffix else f"{path}.png") as new:
            figure.savefig(new, dpi=120)
    return figure


def checked_panels(num_heads: int) -> int:
    """Returns the number of panels of a picture. Raises ImportError if matplotlib is missing."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ImportError('drawing a pattern needs matplotlib: pip install "dilated-attention[plot]"') from error
    # an image may be at most 65,536 pixels wide
    return as_int("num_heads", num_heads, minimum=1, maximum=128)
