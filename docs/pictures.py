"""Draw docs/pictures/*.png from the library itself: python docs/pictures.py, or with names of pictures to draw those alone."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from dilated_attention import DilatedPattern
from dilated_attention.distributed.sharding.layout import positions_of
from dilated_attention.factory import ATTENTION_PRESETS
from dilated_attention.pattern import NOT_IN_BRANCH, BigBird, BlockPattern, GlobalLocal, LocalWindow, Pattern, RandomBlocks, Strided

FOLDER = Path(__file__).with_suffix("")
BRANCHES = ((8, 16, 32), (1, 2, 4))
COUNTS = ListedColormap(["#ffffff", "#bcd6ee", "#5b9bd0", "#12467f"])
ORANGE = "#e08a1e"
# Okabe and Ito's: people with any colour vision tell them apart
LINES = ("#0072b2", "#d55e00", "#009e73", "#000000", "#cc79a7", "#e69f00")


def branches() -> Figure:
    """The three branches of head 0, and their sum."""
    figure = Figure(figsize=(11, 3.4), layout="constrained")
    panels = figure.subplots(1, 4)
    single = [DilatedPattern((length,), (rate,)) for length, rate in zip(*BRANCHES, strict=True)]
    for panel, pattern in zip(panels, [*single, DilatedPattern(*BRANCHES)], strict=True):
        counts = pattern.dense_mask(32, 32, 4)[0]
        image = _counts(panel, counts)
        title = f"branch (w={pattern.segment_lengths[0]}, r={pattern.dilation_rates[0]})" if pattern.num_branches == 1 else "m: the sum"
        panel.set_title(f"{title}\n{int(counts.sum())} pairs", fontsize=10)
    bar = figure.colorbar(image, ax=panels[-1], ticks=[0, 1, 2, 3], shrink=0.75)
    bar.set_label("times that the pair counts")
    return figure


def offsets() -> Figure:
    """Which positions each of 8 heads takes, by convention."""
    figure = Figure(figsize=(11, 5.6), layout="constrained")
    patterns = {
        'head_offsets="cyclic": h mod r (the paper)': DilatedPattern((16,), (4,)),
        'head_offsets="blocked": h // ceil(H/r) (TorchScale)': DilatedPattern((16,), (4,), "blocked"),
        'head_offsets="zero"': DilatedPattern((16,), (4,), "zero"),
        'branch_heads="split" (fkodom), branches (8, 1), (16, 2), (32, 4)': DilatedPattern(*BRANCHES, branch_heads="split"),
    }
    colours = ["#2a6fb0", ORANGE, "#3f9b57"]
    for panel, (title, pattern) in zip(figure.subplots(2, 2).flat, patterns.items(), strict=True):
        for branch, heads in enumerate(pattern.offsets(8)):
            length, rate = pattern.branches[branch]
            for head, offset in enumerate(heads):
                if offset != NOT_IN_BRANCH:
                    taken = [n for n in range(32) if n % length % rate == offset]
                    panel.broken_barh([(n, 1) for n in taken], (head + 0.1, 0.8), color=colours[branch])
        for edge in range(0, 33, min(pattern.segment_lengths)):
            panel.axvline(edge, color="#888888", lw=0.8, ls=":" if pattern.num_branches > 1 else "-")
        panel.set(xlim=(0, 32), ylim=(8, 0), xlabel="position", ylabel="head", yticks=[h + 0.5 for h in range(8)], yticklabels=range(8))
        panel.set_title(title, fontsize=10)
    figure.suptitle("Positions that a head takes; branch (w=16, r=4) unless it says otherwise", fontsize=11)
    return figure


def tail() -> Figure:
    """The end of a sequence of 20: real keys alone, and with TorchScale's zero keys beside them."""
    figure = Figure(figsize=(9.5, 4.3), layout="constrained")
    branch_lengths, rates, length, width = (8, 16), (1, 4), 20, 8
    for panel, kind in zip(figure.subplots(1, 2), ("mask", "zero_keys"), strict=True):
        pattern = DilatedPattern(branch_lengths, rates, tail=kind)
        counts = pattern.dense_mask(length, length, 4)[0]
        for query in range(length):
            added = sum(_zero_keys(pattern, branch, query, length) for branch in range(2))
            panel.barh(query, added, left=length, height=1, color=ORANGE, edgecolor="white", lw=0.6)
            if added:
                panel.text(length + added + 0.3, query, str(added), va="center", fontsize=8)
        _counts(panel, counts)
        panel.set_xlim(-0.5, length + width + 0.5)
        panel.axvline(length - 0.5, color="#444444", lw=1)
        panel.set_title(f'tail="{kind}"', fontsize=10)
    figure.legend(
        handles=[Patch(color=ORANGE, label="zero keys, score 0 and value 0, beside the real ones")],
        loc="outside lower center",
        frameon=False,
    )
    figure.suptitle("20 positions, head 0, branches (8, 1) and (16, 4): segments 8, 8, 4 and 16, 4", fontsize=11)
    return figure


def _zero_keys(pattern: DilatedPattern, branch: int, query: int, num_positions: int) -> int:
    """Zero keys that head 0's query attends to in a branch: none where the branch does not take it."""
    length, rate = pattern.branches[branch]
    start = query // length * length
    if (query - start) % rate:
        return 0
    real = len(range(start, min(start + length, num_positions), rate))
    return pattern.zero_keys(branch, num_positions, real)


def layouts() -> Figure:
    """Who holds which of 32 positions among 4 processes, and how many causal pairs that gives each."""
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    colours = ["#2a6fb0", ORANGE, "#3f9b57", "#8d5fb0"]
    kinds = ("contiguous", "zigzag", "striped")
    for row, kind in enumerate(kinds):
        for rank, colour in enumerate(colours):
            held = [int(n) for n in positions_of(32, rank, 4, kind, None)]
            left.broken_barh([(n, 1) for n in held], (row + 0.1, 0.8), color=colour, edgecolor="white", lw=0.4)
            right.bar(row + (rank - 1.5) * 0.2, sum(n + 1 for n in held), width=0.18, color=colour)
    left.set(xlim=(0, 32), ylim=(3, 0), xlabel="position", yticks=[0.5, 1.5, 2.5], yticklabels=kinds)
    left.set_title("Who holds which position", fontsize=10)
    right.set(xticks=range(3), xticklabels=kinds, ylabel="(query, key) pairs")
    right.set_title("Pairs of each process, dense causal attention", fontsize=10)
    figure.legend(
        handles=[Patch(color=c, label=f"process {r}") for r, c in enumerate(colours)], loc="outside lower center", ncols=4, frameon=False
    )
    return figure


def keys() -> Figure:
    """Keys that a query reads on the mean, by length."""
    figure = Figure(figsize=(8.5, 4.2), layout="constrained")
    panel = figure.subplots()
    lengths = [2**i for i in range(10, 21)]
    longnet = ATTENTION_PRESETS["longnet"].pattern
    growing = [DilatedPattern(tuple(2048 * 4**i for i in range(6)), tuple(4**i for i in range(6))).keys_per_query(n, 16) for n in lengths]
    series = {
        "dense": [float(n) for n in lengths],
        "a tenth of all pairs (block-sparse)": [0.1 * n for n in lengths],
        "Prov-GigaPath's branches": [ATTENTION_PRESETS["gigapath"].pattern.keys_per_query(n, 16) for n in lengths],
        "six branches w = 2048·4^i, r = 4^i": growing,
        "LongNet's branches (w to 32,768)": [longnet.keys_per_query(n, 12) for n in lengths],
        "window of 1,024 on either side": [LocalWindow(1024).pairs(n, 1) / n for n in lengths],
    }
    ends = []
    for (name, values), style, colour in zip(series.items(), ("o-", "s--", "^-", "v-.", "d-", "x:"), LINES, strict=True):
        panel.plot(lengths, values, style, color=colour, ms=4)
        ends.append((values[-1], name, colour))
    place = 0.0
    for value, name, colour in sorted(ends):
        # next to its line, or above the label below
        place = max(value, 1.6 * place)
        panel.text(1.015, place, name, transform=panel.get_yaxis_transform(), color=colour, va="center", fontsize=9)
    panel.set_xscale("log", base=2)
    panel.set_yscale("log", base=2)
    panel.set(xlabel="positions N", ylabel="keys a query reads, mean")
    panel.grid(alpha=0.3)
    panel.set_title("Not causal; keys count as often as branches name them", fontsize=10)
    return figure


def reach() -> Figure:
    """After how many layers a position can depend on how many others: 1,024 positions, all heads together."""
    figure = Figure(figsize=(8.5, 5), layout="constrained")
    panel = figure.subplots()
    length, heads, layers = 1024, 8, 12
    patterns: dict[str, Pattern] = {
        "dilated, w 64, 256, 1024, r 1, 4, 16": DilatedPattern((64, 256, 1024), (1, 4, 16)),
        "GlobalLocal(48, 64)": GlobalLocal(48, 64, block_size=64),
        "BigBird(32, 64, 1)": BigBird(32, 64, 1, block_size=64),
        "Strided(4, 1)": Strided(4, 1, block_size=64),
        "RandomBlocks(0.15)": RandomBlocks(0.15, block_size=64),
        "LocalWindow(80)": LocalWindow(80, block_size=64),
    }
    styles = ("o-", "s--", "^-.", "d-", "v--", "x:")
    for (name, pattern), style, colour, width in zip(patterns.items(), styles, LINES, (4.5, 3.6, 2.7, 1.8, 1.4, 1.4), strict=True):
        kept = pattern.dense_mask(length, length, heads).bool()
        step = kept.any(0).float() + torch.eye(length)
        seen, shares = torch.eye(length), [1 / length]
        for _ in range(layers):
            seen = ((step @ seen) > 0).float()
            shares.append(float(seen.mean()))
        panel.plot(
            range(layers + 1),
            [100 * share for share in shares],
            style,
            color=colour,
            # several reach 100 %: of lines that coincide, each shows below the next
            lw=width,
            ms=3 + 1.2 * width,
            label=f"{name}: {_share(pattern, length, heads):.0%} of the pairs",
        )
    panel.set(xlabel="layers", ylabel="% of positions that a position can see, mean", xticks=range(layers + 1))
    panel.grid(alpha=0.3)
    figure.legend(fontsize=9, loc="outside lower center", ncols=2, frameon=False)
    panel.set_title(f"{length:,} positions, {heads} heads, not causal", fontsize=10)
    return figure


def _share(pattern: Pattern, length: int, heads: int) -> float:
    """Kept (query, key) pairs of a head; a pair that several branches name once."""
    return (
        pattern.density(length, heads)
        if isinstance(pattern, BlockPattern)
        else float(pattern.dense_mask(length, length, heads).bool().float().mean())
    )


def _counts(panel: Any, counts: torch.Tensor) -> Any:
    size = len(counts)
    image = panel.imshow(counts.numpy(), cmap=COUNTS, norm=BoundaryNorm([-0.5, 0.5, 1.5, 2.5, 3.5], 4), interpolation="nearest")
    panel.set_xticks([i - 0.5 for i in range(0, size, 4)], range(0, size, 4), fontsize=8)
    panel.set_yticks([i - 0.5 for i in range(0, size, 4)], range(0, size, 4), fontsize=8)
    panel.grid(color="#dddddd", lw=0.4)
    panel.set(xlabel="key j", ylabel="query i")
    panel.tick_params(length=0)
    return image


PICTURES: tuple[Callable[[], Figure], ...] = (branches, offsets, tail, layouts, keys, reach)


def main(names: list[str]) -> None:
    known = {picture.__name__: picture for picture in PICTURES}
    if unknown := [name for name in names if name not in known]:
        raise SystemExit(f"no picture {', '.join(unknown)}; there are {', '.join(known)}")
    FOLDER.mkdir(exist_ok=True)
    for name in names or known:
        known[name]().savefig(FOLDER / f"{name}.png", dpi=90)


if __name__ == "__main__":
    main(sys.argv[1:])
