"""``show``: a model preset in figures, or a pattern: drawn with characters, as a picture, or in figures. In a drawing rows are queries and
columns keys, with one panel for the heads that attend alike."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from dilated_attention.cli.common import add_command, add_pattern, bytes_of_gib, pattern_of, put, put_json, width
from dilated_attention.factory import MODEL_PRESETS, create_model
from dilated_attention.parsing import size
from dilated_attention.pattern import NOT_IN_BRANCH, BlockPattern, DilatedPattern, Pattern
from dilated_attention.pattern.base import cell_pairs, cell_size, cell_sizes, draw, picture_file
from dilated_attention.pattern.checks import as_int

# approximate number of pixels per side of a picture's panel
_PIXELS = 256
# characters across a drawing where the output is no terminal
_WIDTH = 100
# limits, because every position and every head is examined
_MOST_LENGTH, _MOST_HEADS = 2**24, 512
# shades for multiplicities 0, 1, 2, …, by the pattern's highest multiplicity: the last entry for 4 or more, and for cells of several pairs
_SHADES = ("·█", "·█", "·▒█", "·░▒█", "·░▒▓█")
# lower limits of a cell's mean multiplicity for each shade but the first
_LEVELS = (1e-30, 1 / 8, 1 / 2, 1.0)
# characters of a panel: one of fewer columns shows nothing useful
_NARROW_PANEL, _WIDE_PANEL = 16, 128


def add(commands: Any) -> None:
    text = "a pattern, drawn and counted; or a model preset: parameters, keys per query, memory, what fits"
    things = commands.add_parser("show", help=text).add_subparsers(
        dest="what", required=True, metavar="what", help="dilated, block_sparse, or a preset:"
    )
    for kind, length, usage, text in (
        ("dilated", 64, "--segment-lengths W [W ...] --dilation-rates R [R ...]", "dilated attention, by its branches"),
        ("block_sparse", 1024, "(--window N [N] | --density PART)", "block-sparse attention, by its window or its density"),
    ):
        add = add_command(things, kind, _pattern, usage=f"%(prog)s {usage} [options]", help=text).add_argument
        add_pattern(add, kind)
        add("--length", type=size, default=length, help=f"positions of the sequence: 65536, 64k, 1M; default: {length}")
        add("--heads", type=size, default=4, help="query heads; default: 4")
        add("--causal", action="store_true", help="a position sees only itself and earlier ones")
        add("--image", type=Path, metavar="FILE.png", help="write a picture instead of drawing here; needs the extra plot")
    for preset in MODEL_PRESETS:
        add = add_command(things, preset, _model, help="a model").add_argument
        add("--positions", type=size, nargs="+", help="sequence lengths to report; default: a few orders of magnitude")
        add("--memory", type=bytes_of_gib, metavar="GIB", help="of the device that it must fit in; default: this machine's GPU, or its RAM")


def _model(args: argparse.Namespace) -> int:
    summary = create_model(args.what, device="meta").summary(tuple(args.positions) if args.positions else None, memory=args.memory)
    if args.json:
        put_json(summary.as_dict())
    else:
        put(summary)
    return 0


def _pattern(args: argparse.Namespace) -> int:
    as_int("--length", args.length, maximum=_MOST_LENGTH)
    as_int("--heads", args.heads, maximum=_MOST_HEADS)
    pattern = pattern_of(args, args.what)
    assert pattern is not None
    image = None if args.image is None else picture_file("--image", args.image)
    told = figures(pattern, args.length, args.heads, is_causal=args.causal)
    if image is not None:
        cell = cell_size(pattern, args.length, _PIXELS)
        draw(pattern, args.length, args.heads, cell=cell, is_causal=args.causal, path=str(image))
        told["image"] = str(image)
    if args.json:
        put_json(told)
        return 0
    if image is None:
        put("\n".join(drawing(pattern, args.length, args.heads, is_causal=args.causal, width=width() or _WIDTH)))
    put(_text(told))
    return 0


def figures(pattern: DilatedPattern | BlockPattern, num_positions: int, num_heads: int, *, is_causal: bool = False) -> dict[str, Any]:
    """Returns the figures of a pattern that ``show`` prints. Pairs are counted over all heads; ``density`` is relative to dense
    attention with the same causality; ``keys_per_query`` is the mean over heads and queries."""
    pairs = pattern.pairs(num_positions, num_heads, is_causal=is_causal)
    rows = num_positions * num_heads
    dense = num_heads * (num_positions * (num_positions + 1) // 2 if is_causal else num_positions**2)
    told: dict[str, Any] = {
        "pattern": repr(pattern), "positions": num_positions, "heads": num_heads, "causal": is_causal, "pairs": pairs,
        "dense_pairs": dense, "density": pairs / dense, "keys_per_query": pairs / rows,
    }  # fmt: skip
    if isinstance(pattern, DilatedPattern):
        branch_pairs = pattern.branch_pairs(num_positions, num_heads, is_causal=is_causal)
        told["branches"] = [
            {
                "segment_length": w,
                "dilation_rate": r,
                "pairs": n,
                "keys_per_query": n / rows,
                "taken": len(set(offsets) - {NOT_IN_BRANCH}),
            }
            for (w, r), n, offsets in zip(pattern.branches, branch_pairs, pattern.offsets(num_heads), strict=True)
        ]
    return told


def _text(told: dict[str, Any]) -> str:
    heads = f"{told['heads']} head{'s' if told['heads'] > 1 else ''}{', causal' if told['causal'] else ''}"
    lines = [
        told["pattern"],
        "{positions:,} positions, {called}: {pairs:,} pairs, {density:.3%} of the {dense_pairs:,} of {dense} attention; "
        "{keys_per_query:,.1f} keys per query and head".format(called=heads, dense="causal" if told["causal"] else "dense", **told),
    ]
    branch = "  segments of {segment_length:,}, rate {dilation_rate}: {pairs:,} pairs, {keys_per_query:,.1f} keys per query and head"
    some = "; the heads take {taken} of every {dilation_rate} positions"
    lines += [(branch + some * (row["taken"] < row["dilation_rate"])).format(**row) for row in told.get("branches", ())]
    return "\n".join([*lines, *([f"picture written to {told['image']}"] if "image" in told else [])])


def drawing(pattern: Pattern, num_positions: int, num_heads: int, *, is_causal: bool, width: int) -> list[str]:
    """Returns lines of at most ``width`` characters (or as many as the smallest panel needs), with a legend at the end. A character is one
    pair if a row of them fits, else the smallest square of positions for which it does."""
    margin = len(f"{num_positions - 1} ")
    cell = cell_size(pattern, num_positions, min(_WIDE_PANEL, max(_NARROW_PANEL, width - margin)))
    pairs = cell_pairs(pattern, num_positions, num_heads, cell, is_causal=is_causal)
    highest = int(pairs.max()) if pairs.numel() else 0
    shades = _SHADES[-1 if cell > 1 else min(highest, len(_SHADES) - 1)]
    if cell == 1:
        levels = pairs.clamp(max=len(shades) - 1)
    else:
        levels = torch.bucketize(pairs / cell_sizes(num_positions, cell), torch.tensor(_LEVELS), right=True)
    alike: dict[bytes, list[int]] = {}
    for head in range(num_heads):
        alike.setdefault(pairs[head].numpy().tobytes(), []).append(head)
    lines = []
    for same in alike.values():
        title = f"{' ' * margin}head {', '.join(map(str, same))}"
        # the query's position, on every eighth line
        rows = ["".join(shades[level] for level in row) for row in levels[same[0]].tolist()]
        lines += [title[: margin + len(rows)], *(f"{i * cell if i % 8 == 0 else '':>{margin - 1}} {row}" for i, row in enumerate(rows)), ""]
    return [*lines, *_legend(shades, highest, cell, isinstance(pattern, BlockPattern))]


def _legend(shades: str, highest: int, cell: int, is_kept: bool) -> list[str]:
    """``is_kept``: a pair is either kept or not, so there is no multiplicity to explain."""
    axes = "rows are queries, columns keys;"
    if cell > 1:
        several, most = ("", "all") if is_kept else (", each as often as branches reach it", "1 or more")
        return [
            f"{axes} a character stands for {cell:,} × {cell:,} positions",
            f"part of its pairs{several}: · none  ░ below 1/8  ▒ below 1/2  ▓ below 1  █ {most}",
        ]
    if is_kept:
        return [f"{axes} {shades[0]} dropped  {shades[1]} kept"]
    named = "  ".join(f"{shade} {m}" for m, shade in enumerate(shades)) + (" or more" if highest >= len(shades) else "")
    return [f"{axes} branches that reach the pair: {named}"]
