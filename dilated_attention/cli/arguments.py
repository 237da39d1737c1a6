"""Arguments shared by several commands: sizes, a device and a dtype, and attention patterns."""

from __future__ import annotations

import argparse
from typing import Any

import torch

from dilated_attention.parsing import UsageError, below, shown, size
from dilated_attention.pattern import BigBird, BlockPattern, DilatedPattern, GlobalLocal, LocalWindow, with_sparsity
from dilated_attention.validation import DTYPES

# options of each kind of pattern, None unless they are given
OF_KIND = {
    "dense": (),
    "dilated": ("segment_lengths", "dilation_rates", "head_offsets", "branch_heads", "tail"),
    "block_sparse": ("window", "global_tokens", "random_blocks", "density", "density_kind", "block_size", "seed"),
}
DTYPE_NAMES = [str(dtype).removeprefix("torch.") for dtype in DTYPES]


def count(text: str) -> int:
    """Parses 0 or a ``size``."""
    return 0 if text == "0" else size(text)


def gib_of(text: str) -> float:
    """Parses a number of GiB of memory."""
    return below(text, 2**30, "not a memory size; expected GiB above 0, such as 24 or 79.1")


def gib(text: str) -> int:
    """Parses a number of GiB and returns bytes."""
    return max(1, int(gib_of(text) * 2**30))


def dtype_of(args: argparse.Namespace) -> torch.dtype | None:
    return getattr(torch, args.dtype) if args.dtype else None


def device_of(name: str | None) -> torch.device:
    """Returns the device that ``--device`` names; None: the GPU if there is one. Raises UsageError if torch cannot use it here."""
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        why = str(error).partition("\n")[0]
        raise UsageError(f"--device is {name!r}, which torch cannot use here ({why}); expected cpu, cuda or cuda:<index>") from error
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"--device is {name!r}; expected cpu, cuda or cuda:<index>")
    return device


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="machine-readable")


def add_pattern(parser: argparse._ActionsContainer, *kinds: str) -> None:
    """Adds the arguments of these kinds of patterns, all None unless they are given; ``pattern_of`` reads them."""
    add = parser.add_argument
    if "dilated" in kinds:
        add("--segment-lengths", type=size, nargs="+", metavar="W", help="positions per segment, for each branch")
        add("--dilation-rates", type=size, nargs="+", metavar="R", help="every R-th position is selected, for each branch")
        text = "cyclic (default), blocked, zero, or one list per branch, of one offset per head: 0,1,0,1"
        add("--head-offsets", type=_offsets, nargs="+", metavar="O", help=text)
        add("--branch-heads", choices=("all", "split"), help="whether every head runs every branch; default: all")
        add("--tail", choices=("mask", "zero_keys"), help="zero_keys: TorchScale's padding; default: mask")
    if "block_sparse" in kinds:
        add("--window", type=_side, nargs="+", metavar="N", help="keys up to N away, or N before and N after; all: unbounded")
        add("--global-tokens", type=count, metavar="N", help="the first N positions see all and are seen by all")
        add("--random-blocks", type=count, metavar="N", help="blocks drawn for each row of blocks and head")
        add("--density", type=float, metavar="PART", help="instead of these: part of all pairs that is kept, above 0, at most 1")
        add("--density-kind", metavar="KIND", help="random (default), local, dilated, global_local or big_bird")
        add("--block-size", type=int, choices=(64, 128), help="positions of a block; default: 128")
        add("--seed", type=count, help="of the random blocks; default: 0")


def _offsets(text: str) -> str | tuple[int, ...]:
    try:
        return text if text.isalpha() else tuple(int(number) for number in text.split(","))
    except ValueError as error:
        expected = "cyclic, blocked, zero, or for each branch one offset per head: 0,1,0,1 0,1,2,3"
        raise argparse.ArgumentTypeError(f"{shown(text)} is no offsets; expected {expected}") from error


def _side(text: str) -> int | None:
    return None if text == "all" else count(text)


def pattern_of(args: argparse.Namespace, kind: str) -> DilatedPattern | BlockPattern | None:
    """Returns the pattern of the arguments of ``add_pattern``; None for ``"dense"``."""
    given = given_of(args, *OF_KIND[kind])
    if kind == "dense":
        return None
    if kind == "dilated":
        if not {"segment_lengths", "dilation_rates"} <= given.keys():
            raise UsageError(
                "a dilated pattern needs --segment-lengths and --dilation-rates; e.g. --segment-lengths 2048 8192 --dilation-rates 1 4"
            )
        offsets = given.pop("head_offsets", ["cyclic"])
        return DilatedPattern(**given, head_offsets=offsets[0] if isinstance(offsets[0], str) else tuple(offsets))
    return _block_pattern(**given)


def _block_pattern(
    window: list[int | None] | None = None, density: float | None = None, density_kind: str | None = None, **given: Any
) -> BlockPattern:
    if (window is None) == (density is None):
        raise UsageError("a block-sparse pattern needs either --window or --density; e.g. --window 256 --global-tokens 64")
    given |= {} if density_kind is None else {"kind": density_kind}
    # what does not go together is refused by the patterns themselves
    if density is not None:
        return with_sparsity(density, **given)
    assert window is not None
    sides: Any = window[0] if len(window) == 1 and window[0] is not None else tuple(window * 2 if len(window) == 1 else window)
    if "random_blocks" in given:
        return BigBird(sides, given.pop("global_tokens", 0), **given)
    return GlobalLocal(sides, **given) if "global_tokens" in given else LocalWindow(sides, **given)


def given_of(args: argparse.Namespace, *names: str) -> dict[str, Any]:
    return {name: getattr(args, name) for name in names if getattr(args, name, None) is not None}


def flags(names: Any) -> str:
    return ", ".join("--" + name.replace("_", "-") for name in sorted(names))
