"""Draws patterns. matplotlib is an optional dependency: ``pip install "dilated-attention[plot]"``."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

from dilated_attention.files import replacing
from dilated_attention.pattern.base import Pattern
from dilated_attention.pattern.checks import as_int

# letters per inch of a title, in matplotlib's default size
LETTERS_PER_INCH = 10


def draw(pattern: Pattern, num_positions: int, num_heads: int, *, is_causal: bool = False, path: str | None = None) -> Any:
    """Draws one panel per head: rows are queries, columns are keys, and the color is the multiplicity (white: not attended)."""
    need_matplotlib()
    num_heads = checked_panels(num_heads)
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
    figure.suptitle(textwrap.fill(caption(pattern, num_positions, num_heads, is_causal), int(LETTERS_PER_INCH * figure.get_figwidth())))
    save(figure, path)
    return figure


def save(figure: Any, path: str | None) -> None:
    if path is not None:
        # the suffix determines the format; matplotlib adds .png if there is none
        with replacing(path if Path(path).suffix else f"{path}.png") as new:
            figure.savefig(new, dpi=120)


def checked_panels(num_heads: int) -> int:
    # an image may be at most 65,536 pixels wide
    return as_int("num_heads", num_heads, minimum=1, maximum=128)


def need_matplotlib() -> None:
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ImportError('drawing a pattern needs matplotlib: pip install "dilated-attention[plot]"') from error


def caption(pattern: Pattern, num_positions: int, num_heads: int, is_causal: bool) -> str:
    kind = "causal" if is_causal else "full"
    density = pattern.density(num_positions, num_heads, is_causal=is_causal)
    branches = getattr(pattern, "branches", ())
    listed = f"({', '.join(f'{w}/{r}' for w, r in branches)})" if branches else ""
    return f"{type(pattern).__name__}{listed} · {num_positions} positions, {kind} · {density:.1%} of dense pairs"
