"""What all commands use: functions that print, in lines wrapped to a terminal, unwrapped to a file, or as JSON; and options of calls and
patterns."""

from __future__ import annotations

import argparse
import io
import json
import os
import shutil
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch

from dilated_attention.parsing import UsageError, below, shown, size
from dilated_attention.pattern import BigBird, BlockPattern, DilatedPattern, GlobalLocal, LocalWindow, with_sparsity
from dilated_attention.validation import DTYPES

# options of each kind of pattern; their values are None unless they are given
PATTERN_OPTIONS = {
    "dense": (),
    "dilated": ("segment_lengths", "dilation_rates", "head_offsets", "branch_heads", "tail"),
    "block_sparse": ("window", "global_tokens", "random_blocks", "density", "density_kind", "block_size", "seed"),
}
DTYPE_NAMES = [str(dtype).removeprefix("torch.") for dtype in DTYPES]


def prepare_output() -> None:
    """Prints warnings as one line, without code, and makes both streams replace characters that they cannot encode."""
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def width() -> int | None:
    """Returns the number of characters of a line; None, for unwrapped lines, if the output is no terminal and ``COLUMNS`` is not set."""
    return shutil.get_terminal_size().columns if (sys.stdout is not None and sys.stdout.isatty()) or os.environ.get("COLUMNS") else None


def put(text: object, *, wrap: bool = True) -> None:
    """Prints ``text``, with ``wrap`` in lines of at most ``width()``."""
    lines, max_width = str(text).split("\n"), width() if wrap else None
    if max_width is not None:
        lines = [part for line in lines for part in textwrap.wrap(line, max_width, break_on_hyphens=False) or [""]]
    print("\n".join(lines))


def put_json(value: Any) -> None:
    """Prints ``value`` as JSON, with escapes for what is not ASCII."""
    print(json.dumps(value, indent=2))


def add_command(commands: Any, name: str, run: Callable[..., int], *, has_json: bool = True, **about: Any) -> Any:
    """Adds a command and returns its parser. ``run`` takes the parsed arguments and returns the exit code; ``about`` goes to the parser."""
    parser = commands.add_parser(name, **about)
    if has_json:
        parser.add_argument("--json", action="store_true", help="machine-readable")
    parser.set_defaults(run=run, parser=parser)
    return parser


def count(text: str) -> int:
    """Parses 0 or a ``size``."""
    return 0 if text == "0" else size(text)


def gib(text: str) -> float:
    """Parses a number of GiB of memory, and returns GiB."""
    return below(text, 2**30, "not a memory size; expected GiB above 0, such as 24 or 79.1")


def bytes_of_gib(text: str) -> int:
    """Parses a number of GiB of memory, and returns bytes."""
    return max(1, int(gib(text) * 2**30))


def dtype_of(args: argparse.Namespace) -> torch.dtype | None:
    return getattr(torch, args.dtype) if args.dtype else None


def add_heads(add: Callable[..., Any]) -> None:
    """Adds the arguments that a call of every kind of attention has, all None unless they are given."""
    add("--heads", type=size, help="query heads; default: 12")
    add("--head-dim", type=size, help="default: 64")
    add("--kv-heads", type=size, help="key/value heads; default: as many as query heads")
    add("--causal", action="store_true", default=None, help="a position sees only itself and earlier ones")


def add_pattern(add: Callable[..., Any], *kinds: str) -> None:
    """Adds the arguments of these kinds of patterns, all None unless they are given; ``pattern_of`` reads them."""
    if "dilated" in kinds:
        add("--segment-lengths", type=size, nargs="+", metavar="W", help="positions per segment, for each branch")
        add("--dilation-rates", type=size, nargs="+", metavar="R", help="every R-th position is selected, for each branch")
        text = "cyclic (default), blocked, zero, or one list per branch, of one offset per head: 0,1,0,1"
        add("--head-offsets", type=_offsets, nargs="+", metavar="O", help=text)
        add("--branch-heads", choices=("all", "split"), help="whether every head runs every branch; default: all")
        add("--tail", choices=("mask", "zero_keys"), help="zero_keys: TorchScale's padding; default: mask")
    if "block_sparse" in kinds:
        text = "keys up to N away, or N before and N after; all: unbounded"
        add("--window", type=lambda side: None if side == "all" else count(side), nargs="+", metavar="N", help=text)
        add("--global-tokens", type=count, metavar="N", help="the first N positions see all and are seen by all")
        add("--random-blocks", type=count, metavar="N", help="blocks drawn for each row of blocks and head")
        text = "instead of --window, --global-tokens and --random-blocks: part of all pairs that is kept, above 0, at most 1"
        add("--density", type=float, metavar="PART", help=text)
        add("--density-kind", metavar="KIND", help="random (default), local, dilated, global_local or big_bird")
        add("--block-size", type=int, choices=(64, 128), help="positions of a block; default: 128")
        add("--seed", type=count, help="of the random blocks; default: 0")


def _offsets(text: str) -> str | tuple[int, ...]:
    try:
        return text if text.isalpha() else tuple(int(number) for number in text.split(","))
    except ValueError as error:
        expected = "cyclic, blocked, zero, or for each branch one offset per head: 0,1,0,1 0,1,2,3"
        raise argparse.ArgumentTypeError(f"{shown(text)} is no offsets; expected {expected}") from error


def pattern_of(args: argparse.Namespace, kind: str) -> DilatedPattern | BlockPattern | None:
    """Returns the pattern of the arguments of ``add_pattern``; None for ``"dense"``.

    Refuses missing options and options that do not go together; patterns refuse values.
    """
    given = given_of(args, *PATTERN_OPTIONS[kind])
    if kind == "dense":
        return None
    if kind == "dilated":
        if not {"segment_lengths", "dilation_rates"} <= given.keys():
            raise UsageError(
                "a dilated pattern needs --segment-lengths and --dilation-rates; e.g. --segment-lengths 2048 8192 --dilation-rates 1 4"
            )
        offsets = given.pop("head_offsets", ["cyclic"])
        return DilatedPattern(**given, head_offsets=offsets[0] if len(offsets) == 1 and isinstance(offsets[0], str) else tuple(offsets))
    if ("window" in given) == ("density" in given):
        raise UsageError("a block-sparse pattern needs either --window or --density; e.g. --window 256 --global-tokens 64")
    if "density" in given:
        _refuse(given.keys() & {"global_tokens", "random_blocks"}, "which --density replaces")
        if "density_kind" in given:
            given["kind"] = given.pop("density_kind")
        return with_sparsity(given.pop("density"), **given)
    _refuse(given.keys() & {"density_kind"}, "which needs --density")
    if "random_blocks" not in given:
        _refuse(given.keys() & {"seed"}, "which needs --random-blocks or --density")
    sides = given.pop("window")
    # one number stands for both sides, None (all) for an unbounded one
    window = tuple(sides) if len(sides) > 1 else sides[0] if sides[0] is not None else (None, None)
    if "random_blocks" in given:
        return BigBird(window, given.pop("global_tokens", 0), **given)
    return GlobalLocal(window, **given) if "global_tokens" in given else LocalWindow(window, **given)


def given_of(args: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Returns the values of those options in ``names`` that are given, by name."""
    return {name: getattr(args, name) for name in names if getattr(args, name, None) is not None}


def refuse_others(args: argparse.Namespace, taken: Iterable[str], *names: str) -> None:
    """Raises UsageError if an option of a pattern or of ``names`` is given that is not among ``taken``, those of ``args.what``."""
    given = given_of(args, *names, *PATTERN_OPTIONS["dilated"], *PATTERN_OPTIONS["block_sparse"])
    _refuse(given.keys() - set(taken), f"which {args.what} does not take; it takes {_flags(taken) or 'none of these'}")


def _refuse(names: Iterable[str], why: str) -> None:
    """Raises UsageError if there are any ``names``; ``why`` is a clause about them, such as "which --density replaces"."""
    if wrong := _flags(names):
        raise UsageError(f"{wrong} given, {why}: drop {wrong}")


def _flags(names: Iterable[str]) -> str:
    """Formats names of options as they are typed: "--density, --seed"."""
    return ", ".join("--" + name.replace("_", "-") for name in sorted(names))
