"""``show``: a model preset in figures, or a pattern: drawn in the terminal, as a picture, or in figures."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from dilated_attention.cli.arguments import add_json, add_pattern, count, gib, pattern_of
from dilated_attention.cli.console import put, put_json, width
from dilated_attention.cli.terminal import NARROWEST, drawing
from dilated_attention.factory import MODEL_PRESETS, create_model
from dilated_attention.parsing import UsageError, size
from dilated_attention.pattern import BlockPattern, DilatedPattern
from dilated_attention.pattern.checks import as_int
from dilated_attention.pattern.dilated import distinct_pairs
from dilated_attention.pattern.drawing import cell_size, draw

# approximate number of pixels per side of a picture's panel
_PIXELS = 256
# of a drawing where the output is no terminal
_WIDTH = 100
# limits, because every position and every head is examined
_MOST_LENGTH, _MOST_HEADS = 2**24, 512


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    text = "a pattern, drawn and counted; or a model preset: parameters, keys per query, memory, what fits"
    things = commands.add_parser("show", help=text).add_subparsers(
        dest="what", required=True, metavar="what", help="dilated, block_sparse, or a preset:"
    )
    for kind, length, usage, text in (
        ("dilated", 64, "--segment-lengths W [W ...] --dilation-rates R [R ...]", "dilated attention, by its branches"),
        ("block_sparse", 1024, "(--window N [N] | --density PART)", "block-sparse attention, by its window or its density"),
    ):
        parser = things.add_parser(kind, usage=f"%(prog)s {usage} [options]", help=text)
        add_pattern(parser, kind)
        parser.add_argument("--length", type=size, default=length, help=f"positions of the sequence: 65536, 64k, 1M; default: {length}")
        parser.add_argument("--heads", type=size, default=4, help="query heads; default: 4")
        parser.add_argument("--causal", action="store_true", help="a position sees only itself and earlier ones")
        parser.add_argument("--head", type=count, nargs="+", metavar="H", help="draw these heads only")
        parser.add_argument("--width", type=size, help="characters across; default: the terminal's width")
        parser.add_argument("--image", type=Path, metavar="FILE.png", help="write a picture instead of drawing here; needs the extra plot")
        add_json(parser)
        parser.set_defaults(run=_pattern, parser=parser)
    for preset in MODEL_PRESETS:
        model = things.add_parser(preset, help="a model")
        model.add_argument("--positions", type=size, nargs="+", help="sequence lengths to report; default: a few orders of magnitude")
        text = "of the device that it must fit in; default: this machine's GPU, or its RAM"
        model.add_argument("--memory", type=gib, metavar="GIB", help=text)
        add_json(model)
        model.set_defaults(run=_model, parser=model)


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
    heads = tuple(range(args.heads)) if args.head is None else tuple(args.head)
    if any(head >= args.heads for head in heads):
        raise UsageError(f"--head is {' '.join(map(str, heads))}; expected heads below --heads, which is {args.heads}")
    if args.width is not None:
        as_int("--width", args.width, minimum=NARROWEST)
    if args.image is not None and (args.head is not None or args.width is not None):
        raise UsageError("--head and --width are for the drawing in the terminal; a picture shows every head: drop them or --image")
    pattern = pattern_of(args, args.what)
    assert pattern is not None
    told = figures(pattern, args.length, args.heads, is_causal=args.causal)
    if args.image is not None:
        cell = 1 if args.length <= _PIXELS else cell_size(pattern, args.length, _PIXELS)
        draw(pattern, args.length, args.heads, cell=cell, is_causal=args.causal, path=str(args.image))
        told["image"] = str(args.image)
    if args.json:
        put_json(told)
        return 0
    if args.image is None:
        columns = args.width or width() or _WIDTH
        put(
            "\n".join(drawing(pattern, args.length, args.heads, is_causal=args.causal, heads=heads, width=columns)), wrap=args.width is None
        )
        put("")
    put(_text(told))
    return 0


def figures(pattern: DilatedPattern | BlockPattern, num_positions: int, num_heads: int, *, is_causal: bool = False) -> dict[str, Any]:
    """Returns the figures of a pattern that ``show`` prints.

    Pairs are counted over all heads. ``density`` and ``coverage`` are relative to dense attention with the same causality;
    ``keys_per_query`` is the mean over heads and queries.
    """
    pairs = pattern.pairs(num_positions, num_heads, is_causal=is_causal)
    rows = num_positions * num_heads
    dense = num_heads * (num_positions * (num_positions + 1) // 2 if is_causal else num_positions**2)
    told: dict[str, Any] = {
        "pattern": repr(pattern), "positions": num_positions, "heads": num_heads, "causal": is_causal, "pairs": pairs,
        "dense_pairs": dense, "density": pairs / dense, "keys_per_query": pairs / rows,
    }  # fmt: skip
    if isinstance(pattern, DilatedPattern):
        distinct, several = distinct_pairs(pattern, num_positions, num_heads, is_causal=is_causal)
        branch_pairs = pattern.branch_pairs(num_positions, num_heads, is_causal=is_causal)
        told |= {
            "distinct_pairs": distinct, "coverage": distinct / dense, "pairs_of_several_branches": several,
            "branches": [
                {"segment_length": w, "dilation_rate": r, "pairs": n, "keys_per_query": n / rows}
                for (w, r), n in zip(pattern.branches, branch_pairs, strict=True)
            ],
        }  # fmt: skip
    return told


def _text(told: dict[str, Any]) -> str:
    heads = f"{told['heads']} head{'s' if told['heads'] > 1 else ''}"
    dense = "causal attention" if told["causal"] else "dense attention"
    lines = [
        told["pattern"],
        f"{told['positions']:,} positions, {heads}{', causal' if told['causal'] else ''}: {told['pairs']:,} pairs, "
        f"{told['density']:.3%} of the {told['dense_pairs']:,} of {dense}; {told['keys_per_query']:,.1f} keys per query and head",
    ]
    if "branches" in told:
        lines.append(
            f"{told['distinct_pairs']:,} different pairs ({told['coverage']:.3%}), of which {told['pairs_of_several_branches']:,} "
            "are reached by several branches"
        )
        lines += [
            f"  segments of {row['segment_length']:,}, rate {row['dilation_rate']}: {row['pairs']:,} pairs, "
            f"{row['keys_per_query']:,.1f} keys per query and head"
            for row in told["branches"]
        ]
    if "image" in told:
        lines.append(f"picture written to {told['image']}")
    return "\n".join(lines)
