"""Draw the patterns of docs/block_sparse.md: python docs/block_sparse_patterns.py, which writes docs/block_sparse_patterns.png."""

from __future__ import annotations

from pathlib import Path

import torch
from matplotlib.figure import Figure

from dilated_attention.pattern import (
    Axial,
    BigBird,
    BlockPattern,
    DilatedBlocks,
    Document,
    GlobalLocal,
    LocalWindow,
    MaskFunction,
    RandomBlocks,
    Strided,
    TopBlocks,
    with_sparsity,
)

LENGTH, BLOCK = 1024, 64
# every stretch of 128 positions has one of four subjects, which its queries and keys share
SUBJECTS = torch.tensor([0, 1, 2, 0, 3, 1, 0, 2]).repeat_interleave(128)
QUERY = torch.nn.functional.one_hot(SUBJECTS).float()[None, :, None] * torch.linspace(1.0, 1.1, LENGTH)[None, :, None, None]
KEY = QUERY


def chosen(pattern: TopBlocks, *, is_causal: bool) -> BlockPattern:
    return pattern.choose(QUERY, KEY, is_causal=is_causal)


def prefix(batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return (key < 300) | (key <= query)


# title, pattern, causal
PANELS: list[tuple[str, BlockPattern, bool]] = [
    ("LocalWindow(160)", LocalWindow(160, block_size=BLOCK), False),
    ("GlobalLocal(96, 64)", GlobalLocal(96, 64, block_size=BLOCK), False),
    ("BigBird(96, 64, 2)", BigBird(96, 64, 2, block_size=BLOCK), False),
    ("Strided(5, 2)", Strided(5, 2, block_size=BLOCK), False),
    ("DilatedBlocks(3, 4)", DilatedBlocks(3, 4, block_size=BLOCK), False),
    ("Axial(256)", Axial(256, block_size=BLOCK), False),
    ("RandomBlocks(0.15)", RandomBlocks(0.15, block_size=BLOCK), False),
    ("with_sparsity(0.2, 'global_local')", with_sparsity(0.2, "global_local", block_size=BLOCK), False),
    ("Document((300, 212, 512))", Document((300, 212, 512), block_size=BLOCK), False),
    ("MaskFunction(prefix)", MaskFunction(prefix, block_size=BLOCK), False),
    ("LocalWindow(300) & Strided(3)", LocalWindow(300, block_size=BLOCK) & Strided(3, block_size=BLOCK), False),
    ("TopBlocks(density=0.25), causal", chosen(TopBlocks(density=0.25, block_size=BLOCK), is_causal=True), True),
]


def main() -> None:
    figure = Figure(figsize=(10, 8), layout="constrained")
    for panel, (title, pattern, is_causal) in zip(figure.subplots(3, 4).flat, PANELS, strict=True):
        mask = pattern.dense_mask(LENGTH, LENGTH, 1, is_causal=is_causal)[0]
        panel.imshow(mask.numpy(), cmap="Blues", vmin=0, vmax=1.4, interpolation="nearest")
        panel.set_title(f"{title}\n{mask.float().mean():.0%} of the pairs", fontsize=9)
        panel.set_xticks([i - 0.5 for i in range(0, LENGTH, BLOCK)], [])
        panel.set_yticks([i - 0.5 for i in range(0, LENGTH, BLOCK)], [])
        panel.grid(color="#dddddd", lw=0.4)
        panel.tick_params(length=0)
    figure.savefig(Path(__file__).with_suffix(".png"), dpi=90)


if __name__ == "__main__":
    main()
