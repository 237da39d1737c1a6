"""Draws a pattern with characters: rows are queries, columns keys, with one panel for the heads that attend alike."""

from __future__ import annotations

import math

import torch

from dilated_attention.pattern import BlockPattern, Pattern
from dilated_attention.pattern.cells import cell_pairs, cell_size, cell_sizes

_NOTHING = "·"
# shades for multiplicities 1, 2, … of a pattern whose highest multiplicity is 1, 2, 3; beyond that the last one covers all higher ones
_SHADES = {1: "█", 2: "▒█", 3: "░▒█", 4: "░▒▓█"}
# upper limit of a cell's mean multiplicity for each shade
_LEVELS = ((1 / 8, "░"), (1 / 2, "▒"), (1.0, "▓"), (math.inf, "█"))
_BETWEEN = "   "
# a panel of fewer columns shows nothing useful
_NARROWEST = 16
_WIDEST = 128


def drawing(
    pattern: Pattern, num_positions: int, num_heads: int, *, is_causal: bool = False, heads: tuple[int, ...], width: int
) -> list[str]:
    """Returns lines of at most ``width`` characters, with a legend at the end.

    A character represents one pair if a row of them fits, else the smallest square of positions for which it does.

    Args:
        heads: those to draw, of ``num_heads``.
        width: of the terminal, in characters; at least 24.
    """
    margin = len(f"{num_positions - 1} ")
    columns = min(_WIDEST, max(_NARROWEST, width - margin))
    cell = cell_size(pattern, num_positions, columns)
    pairs = cell_pairs(pattern, num_positions, num_heads, cell, is_causal=is_causal)
    symbols = _shaded(pairs, num_positions, cell)
    panels: list[tuple[str, torch.Tensor, list[str]]] = []
    for head in heads:
        alike = next((i for i, (_, other, _) in enumerate(panels) if torch.equal(other, pairs[head])), None)
        if alike is None:
            panels.append((f"head {head}", pairs[head], symbols[head]))
        else:
            title, attended, drawn = panels[alike]
            panels[alike] = (f"{title}, {head}", attended, drawn)
    lines = []
    across = pairs.shape[-1]
    beside = max(1, (width - margin + len(_BETWEEN)) // (across + len(_BETWEEN)))
    for first in range(0, len(panels), beside):
        row = panels[first : first + beside]
        lines += [*_row([(title, drawn) for title, _, drawn in row], across, cell, num_positions, margin), ""]
    return [*lines, *_legend(pairs, cell, isinstance(pattern, BlockPattern))]


def _shaded(pairs: torch.Tensor, num_positions: int, cell: int) -> list[list[str]]:
    if cell == 1:
        highest = int(pairs.max()) if pairs.numel() else 0
        shades = _NOTHING + _SHADES.get(max(1, highest), _SHADES[4])
        return [["".join(shades[min(m, len(shades) - 1)] for m in row) for row in head] for head in pairs.tolist()]
    mean = pairs / cell_sizes(num_positions, cell)
    return [["".join(_shade(m) for m in row) for row in head] for head in mean.tolist()]


def _shade(mean: float) -> str:
    return _NOTHING if mean == 0 else next(shade for below, shade in _LEVELS if mean < below)


def _row(panels: list[tuple[str, list[str]]], across: int, cell: int, num_positions: int, margin: int) -> list[str]:
    """Draws panels side by side: titles, an axis of key positions, and lines labelled with the query's position every eighth line."""
    gap = " " * margin
    axis = _axis(across, num_positions)
    lines = [
        gap + _BETWEEN.join(title[:across].ljust(across) for title, _ in panels).rstrip(),
        gap + _BETWEEN.join([axis] * len(panels)).rstrip(),
    ]
    for i in range(across):
        label = f"{i * cell} ".rjust(margin) if i % 8 == 0 else gap
        lines.append(label + _BETWEEN.join(drawn[i] for _, drawn in panels))
    return lines


def _axis(across: int, num_positions: int) -> str:
    last = str(num_positions - 1)
    name = "keys"
    if across < len(last) + len(name) + 4:
        return "0".ljust(across - len(last)) + last if across > len(last) + 1 else "0".ljust(across)
    return "0" + name.center(across - 1 - len(last)) + last


def _legend(pairs: torch.Tensor, cell: int, is_kept: bool) -> list[str]:
    """``is_kept``: a pair is either kept or not, so there is no multiplicity to explain."""
    if cell == 1:
        highest = int(pairs.max()) if pairs.numel() else 0
        shades = _SHADES.get(max(1, highest), _SHADES[4])
        named = [f"{shade} {m}" for m, shade in enumerate(shades, 1)]
        if highest > len(shades):
            named[-1] += " or more"
        named = [f"{_NOTHING} dropped", f"{shades[0]} kept"] if is_kept else [f"branches that reach the pair: {_NOTHING} 0", *named]
        return [f"rows are queries, columns keys; {'  '.join(named)}"]
    several = "" if is_kept else ", each as often as branches reach it"
    return [
        f"rows are queries, columns keys; a character stands for {cell:,} × {cell:,} positions",
        f"part of its pairs{several}: {_NOTHING} none  ░ below 1/8  ▒ below 1/2  ▓ below 1  █ {'all' if is_kept else '1 or more'}",
    ]
