"""Draw docs/pictures/*.png from the library itself: python docs/pictures.py, or with names of pictures to draw those alone."""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Patch

from dilated_attention import DilatedPattern, dilated_attention
from dilated_attention.distributed.sharding.layout import positions_of
from dilated_attention.factory import ATTENTION_PRESETS
from dilated_attention.pattern import NOT_IN_BRANCH, BigBird, BlockPattern, GlobalLocal, LocalWindow, Pattern, RandomBlocks, Strided

FOLDER = Path(__file__).with_suffix("")
BRANCHES = ((8, 16, 32), (1, 2, 4))
COUNTS = ListedColormap(["#ffffff", "#bcd6ee", "#5b9bd0", "#12467f"])
ORANGE = "#e08a1e"
# Okabe and Ito's: people with any colour vision tell them apart
LINES = ("#0072b2", "#d55e00", "#009e73", "#000000", "#cc79a7", "#e69f00")
PACKAGE = FOLDER.parents[1] / "dilated_attention"


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


def overlap() -> Figure:
    """How often one query counts each key, and what share of the pairs are repetitions in settings that are used."""
    figure = Figure(figsize=(11, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    counts = DilatedPattern(*BRANCHES).dense_mask(32, 32, 4, is_causal=True)[0, 28]
    left.bar(range(32), counts.tolist(), color=[COUNTS(int(c)) for c in counts], edgecolor="#33557a", lw=0.5)
    left.set(xlabel="key j", ylabel="m(28, j)", yticks=[0, 1, 2, 3], xlim=(-0.6, 31.6))
    left.set_title("Query 28 of head 0, causal: keys of its own segments count up to 3 times", fontsize=10)
    length = 65536
    names, repeated = [], []
    for name, pattern in {
        "LongNet\nr 1, 2, 4, 6, 12": ATTENTION_PRESETS["longnet"].pattern,
        "geometric\nr 1, 2, 4, 8, 16": DilatedPattern((2048, 4096, 8192, 16384, 32768), (1, 2, 4, 8, 16)),
        "Prov-GigaPath\nr 1, 2, 4, 8, 16": ATTENTION_PRESETS["gigapath"].pattern,
    }.items():
        distinct = pattern.coverage(length, 16) * length**2 * 16
        names.append(name)
        repeated.append(1 - distinct / pattern.pairs(length, 16))
    right.bar(names, [100 * share for share in repeated], color="#5b9bd0")
    for i, share in enumerate(repeated):
        right.text(i, 100 * share + 0.5, f"{share:.1%}", ha="center", fontsize=9)
    right.set(ylabel="% of the pairs", ylim=(0, 100 * max(repeated) + 5))
    right.set_title(f"Pairs that an earlier branch has, N = {length:,}", fontsize=10)
    right.tick_params(axis="x", labelsize=8)
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


def gradient() -> Figure:
    """How far the gradient without the mixing weights is from the true one, by the spread of the scores."""
    figure = Figure(figsize=(7.5, 3.6), layout="constrained")
    panel = figure.subplots()
    spreads = [0.125, 0.25, 0.5, 1.0, 2.0, 4.0]
    found: dict[str, list[float]] = {"dq": [], "dk": [], "dv": []}
    for spread in spreads:
        torch.manual_seed(0)
        q, k, v = (torch.randn(1, 512, 4, 32, dtype=torch.float64).requires_grad_() for _ in range(3))
        dout = torch.randn(1, 512, 4, 32, dtype=torch.float64)
        gradients = []
        for kind in ("exact", "detached"):
            out = dilated_attention(q, k, v, [64, 128, 512], [1, 2, 8], scale=spread / 32**0.5, mixture_grad=kind, backend="math")
            gradients.append(torch.autograd.grad(out, (q, k, v), dout))
        for name, exact, detached in zip(found, *gradients, strict=True):
            found[name].append(float((detached - exact).norm() / exact.norm()))
    # dq and dk nearly coincide: the wider line shows below
    for name, style, colour, width in zip(found, ("o-", "s--", "d-"), LINES, (4, 1.5, 1.5), strict=False):
        panel.plot(spreads, [100 * x for x in found[name]], style, color=colour, lw=width, ms=3 + 1.5 * width, label=name)
    panel.set_xscale("log", base=2)
    panel.set(xlabel="standard deviation of the scores s", ylabel="‖detached − exact‖ / ‖exact‖, %", xticks=spreads, xticklabels=spreads)
    panel.set_ylim(bottom=-1)
    panel.grid(alpha=0.3)
    panel.legend()
    panel.set_title('mixture_grad="detached" against the gradient of the formula, random inputs', fontsize=10)
    return figure


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


def architecture() -> Figure:
    """The package's folders, each above those that it imports. An arrow is drawn only where no longer way of imports implies it."""
    files = {file.relative_to(PACKAGE): file.read_text(encoding="utf-8") for file in PACKAGE.rglob("*.py")}
    sizes = {folder: Counter[str]() for folder in sorted({file.parts[0] for file in files if len(file.parts) > 1})}
    imports: dict[str, set[str]] = {folder: set() for folder in sizes}
    for file, text in files.items():
        if file.parts[0] in sizes:
            sizes[file.parts[0]]["/".join(file.parts[1:-1][:1])] += text.count("\n")
            imports[file.parts[0]] |= _imported_folders(text) & sizes.keys() - {file.parts[0]}

    @cache
    def beneath(folder: str) -> frozenset[str]:
        return frozenset(imports[folder]).union(*(beneath(other) for other in imports[folder]))

    @cache
    def level(folder: str) -> int:
        return max((level(other) + 1 for other in imports[folder]), default=0)

    arrows = [(a, b) for a in imports for b in imports[a] if not any(b in beneath(c) for c in imports[a])]
    # of the folders of one level, the one that most others import stands in the column
    column = {level(folder): folder for folder in sorted(imports, key=lambda folder: sum(folder in others for others in imports.values()))}
    aside = imports.keys() - set(column.values())
    left, right, edge = (0.0, 8.95), (9.4, 11.0), 11.25
    figure = Figure(figsize=(11, 7.4), layout="constrained")
    panel = figure.subplots()
    panel.set(xlim=(-0.05, 11.4), ylim=(-0.45, max(column) + 0.45))
    panel.axis("off")
    for folder, lines in sizes.items():
        start, end = right if folder in aside else left
        _box(panel, start, level(folder), end - start, 0.62, "#e4eef8" if folder not in aside else "#fbeedb")
        panel.text(start + 0.12, level(folder) + 0.11, folder, va="center", fontsize=11, weight="bold")
        panel.text(start + 0.12, level(folder) - 0.16, f"{lines.total() / 1000:.1f}k lines", va="center", fontsize=8, color="#444444")
        for index, name in enumerate(sorted(lines.keys() - {""})):
            place = start + 1.5 + 1.235 * index
            _box(panel, place, level(folder), 1.175, 0.44, "#ffffff")
            panel.text(place + 0.585, level(folder) + 0.08, name, va="center", ha="center", fontsize=8)
            panel.text(
                place + 0.585, level(folder) - 0.12, f"{lines[name] / 1000:.1f}k", va="center", ha="center", fontsize=7, color="#444444"
            )
    line = {"color": "#33557a", "lw": 1.3}
    for upper, lower in arrows:
        top, bottom = level(upper), level(lower)
        if lower in aside:
            # down the right edge, since other boxes stand between
            panel.plot([left[1], edge, edge], [top, top, bottom], **line)
            ends = (edge, bottom), (right[1], bottom)
        elif upper in aside:
            middle = sum(right) / 2
            panel.plot([middle, middle], [top - 0.31, bottom], **line)
            ends = (middle, bottom), (left[1], bottom)
        else:
            ends = (left[0] + 0.75, top - 0.31), (left[0] + 0.75, bottom + 0.31)
        panel.annotate("", ends[1], ends[0], arrowprops={"arrowstyle": "-|>", "shrinkA": 0, "shrinkB": 0, **line})
    return figure


def _imported_folders(text: str) -> set[str]:
    """Top-level names of the package that a file imports, inside functions too."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        names = [f"{node.module}.{name.name}" for name in node.names] if isinstance(node, ast.ImportFrom) else []
        names += [name.name for name in node.names] if isinstance(node, ast.Import) else []
        found |= {name.split(".")[1] for name in names if name.startswith(f"{PACKAGE.name}.")}
    return found


def _box(panel: Any, left: float, middle: float, width: float, height: float, colour: str) -> None:
    style = "round,pad=0,rounding_size=0.06"
    panel.add_patch(FancyBboxPatch((left, middle - height / 2), width, height, style, facecolor=colour, edgecolor="#8aa5bf", lw=0.8))


def _counts(panel: Any, counts: torch.Tensor) -> Any:
    size = len(counts)
    image = panel.imshow(counts.numpy(), cmap=COUNTS, norm=BoundaryNorm([-0.5, 0.5, 1.5, 2.5, 3.5], 4), interpolation="nearest")
    panel.set_xticks([i - 0.5 for i in range(0, size, 4)], range(0, size, 4), fontsize=8)
    panel.set_yticks([i - 0.5 for i in range(0, size, 4)], range(0, size, 4), fontsize=8)
    panel.grid(color="#dddddd", lw=0.4)
    panel.set(xlabel="key j", ylabel="query i")
    panel.tick_params(length=0)
    return image


PICTURES: tuple[Callable[[], Figure], ...] = (branches, offsets, overlap, tail, gradient, layouts, keys, reach, architecture)


def main(names: list[str]) -> None:
    known = {picture.__name__: picture for picture in PICTURES}
    if unknown := [name for name in names if name not in known]:
        raise SystemExit(f"no picture {', '.join(unknown)}; there are {', '.join(known)}")
    FOLDER.mkdir(exist_ok=True)
    for name in names or known:
        known[name]().savefig(FOLDER / f"{name}.png", dpi=90)


if __name__ == "__main__":
    main(sys.argv[1:])
