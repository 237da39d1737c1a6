"""Arguments shared by several commands: sizes, the shape of a problem, and attention patterns."""

from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING, Any

from dilated_attention.cli.choices import PATTERN_KINDS
from dilated_attention.parsing import MAX_LENGTH, UsageError, below, shown, size

if TYPE_CHECKING:
    import torch

    from dilated_attention.pattern import BlockPattern, DilatedPattern

# options of each kind of pattern, None unless they are given
OF_KIND = {
    "dense": (),
    "dilated": ("segment_lengths", "dilation_rates", "head_offsets", "branch_heads", "tail"),
    "block_sparse": ("window", "global_tokens", "random_blocks", "density", "density_kind", "block_size", "seed"),
}
_WITH_DENSITY = ("density", "density_kind", "block_size", "seed")


def count(text: str) -> int:
    """Parses a whole number from 0, or a ``size``."""
    if text == "0":
        return 0
    try:
        return size(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(
            f"{shown(text)} is not a number of positions; expected a whole number from 0 to 2**62, or one with k, M or G"
        ) from error


def gib_of(text: str) -> float:
    """Parses a number of GiB of memory."""
    return below(text, 2**30, "not a memory size; expected GiB above 0, such as 24 or 79.1")


def gib(text: str) -> int:
    """Parses a number of GiB and returns bytes."""
    return max(1, int(gib_of(text) * 2**30))


# function arguments whose command line option has another name, and those whose option has the same
_FLAGS = {"num_positions": "--length", "num_heads": "--heads", "num_kv_heads": "--kv-heads", "batch_size": "--batch"}
_SAME = ("head_dim", "world_size", "weight_shards", "global_tokens", "random_blocks", "density_kind", "block_size", "top_p")


def dtype_of(args: argparse.Namespace) -> torch.dtype | None:
    """Returns torch's dtype of ``args.dtype``, a name of ``DTYPES``; None where it is not given."""
    import torch

    dtype: torch.dtype | None = getattr(torch, args.dtype) if args.dtype else None
    return dtype


def device_of(named: str | None) -> torch.device:
    """Returns the device that ``--device`` names; None: the GPU if there is one. Raises UsageError if torch cannot use it here."""
    import torch

    try:
        device = torch.device(named or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        why = str(error).partition("\n")[0]
        raise UsageError(f"--device is {named!r}, which torch cannot use here ({why}); expected cpu, cuda or cuda:<index>") from error
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"--device is {named!r}; expected cpu, cuda or cuda:<index>")
    return device


def as_flags(text: str) -> str:
    """Rewrites a function's error in terms of the command line's options."""
    # these are also ordinary words, so they are replaced only at the start of an error
    words = "length|heads|gpus?|batch|users|parameters|memory|window|seed|temperature"
    text = re.sub(rf"^(?:{words})(?=\b.* is )", lambda found: f"--{found[0]}", text)
    text = re.sub(r"^ratio(?= is )", "--density", text)
    text = re.sub(r"^kind(?= is .*'global_local')", "--density-kind", text)
    if found := re.match(r"((?:\w+, )*\w+)(?= given, which)", text):
        text = flags(found[0].split(", ")) + text[found.end() :]
    names = "|".join((*_FLAGS, *_SAME, *OF_KIND["dilated"][:4]))
    return re.sub(rf"(?<!-)\b({names})\b(=?)", lambda found: _FLAGS.get(found[1], flags([found[1]])) + " " * len(found[2]), text)


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="machine-readable")


def add_pattern(parser: argparse.ArgumentParser, *kinds: str) -> None:
    """Adds the arguments of these kinds of patterns, all None unless they are given; ``pattern_from`` reads them."""
    if "dilated" in kinds:
        parser.add_argument("--segment-lengths", type=size, nargs="+", metavar="W", help="positions per segment, for each branch")
        parser.add_argument("--dilation-rates", type=size, nargs="+", metavar="R", help="every R-th position is selected, for each branch")
        parser.add_argument(
            "--head-offsets",
            nargs="+",
            metavar="O",
            help="cyclic (default), blocked, zero, or one list per branch, of one offset per head: 0,1,0,1",
        )
        parser.add_argument("--branch-heads", choices=("all", "split"), help="whether every head runs every branch; default: all")
        parser.add_argument("--tail", choices=("mask", "zero_keys"), help="zero_keys: TorchScale's padding; default: mask")
    if "block_sparse" in kinds:
        parser.add_argument(
            "--window", type=_side, nargs="+", metavar="N", help="keys up to N away, or N before and N after; all: unbounded"
        )
        parser.add_argument("--global-tokens", type=count, metavar="N", help="the first N positions see all and are seen by all")
        parser.add_argument("--random-blocks", type=count, metavar="N", help="blocks drawn for each row of blocks and head")
        parser.add_argument(
            "--density", type=float, metavar="PART", help="instead of these: part of all pairs that is kept, above 0, at most 1"
        )
        parser.add_argument("--density-kind", metavar="KIND", help="random (default), local, dilated, global_local or big_bird")
        parser.add_argument("--block-size", type=int, choices=(64, 128), help="positions of a block; default: 128")
        parser.add_argument("--seed", type=count, help="of the random blocks; default: 0")


def pattern_from(args: argparse.Namespace, kind: str, asked: str | None = None) -> DilatedPattern | BlockPattern:
    """Returns the pattern of ``kind``, one of ``PATTERN_KINDS``, from the arguments of ``add_pattern``. ``asked`` is its name in errors.

    Raises:
        UsageError: an argument is missing, belongs to another kind, or has a value that the pattern refuses.
    """
    from dilated_attention.pattern import DilatedPattern

    given = given_of(args, *OF_KIND[kind])
    wrong = [name for other in PATTERN_KINDS if other != kind for name in given_of(args, *OF_KIND[other])]
    if wrong:
        raise UsageError(
            f"{flags(wrong)} given, which {asked or kind} does not take; "
            f"it takes {flags(OF_KIND[kind]) or 'no pattern'}: drop what it does not take"
        )
    try:
        if kind == "dense":
            return DilatedPattern((MAX_LENGTH,), (1,))
        return _dilated(given, asked or kind) if kind == "dilated" else _block_sparse(given, asked or kind)
    except (ValueError, TypeError) as error:
        raise error if isinstance(error, UsageError) else UsageError(str(error)) from error


def _dilated(given: dict[str, Any], asked: str) -> DilatedPattern:
    from dilated_attention.pattern import DilatedPattern

    missing = [name for name in ("segment_lengths", "dilation_rates") if name not in given]
    if missing:
        raise UsageError(f"{asked} needs {flags(missing)}; e.g. --segment-lengths 2048 8192 --dilation-rates 1 4")
    if "head_offsets" in given:
        given["head_offsets"] = _offsets(given["head_offsets"])
    return DilatedPattern(**given)


def _offsets(words: list[str]) -> str | tuple[tuple[int, ...], ...]:
    if len(words) == 1 and words[0].isalpha():
        return words[0]
    try:
        return tuple(tuple(int(number) for number in word.split(",")) for word in words)
    except ValueError as error:
        raise UsageError(
            f"--head-offsets is {shown(' '.join(words))}; "
            "expected cyclic, blocked, zero, or for each branch one offset per head: 0,1,0,1 0,1,2,3"
        ) from error


def _block_sparse(given: dict[str, Any], asked: str) -> BlockPattern:
    from dilated_attention.pattern import BigBird, GlobalLocal, LocalWindow, with_sparsity

    if "density" in given:
        wrong = [name for name in given if name not in _WITH_DENSITY]
        if wrong:
            raise UsageError(f"--density and {flags(wrong)} are given; expected one way to say what is kept: drop either")
        kind = {"kind": given.pop("density_kind")} if "density_kind" in given else {}
        return with_sparsity(given.pop("density"), **kind, **given)
    if "density_kind" in given:
        raise UsageError("--density-kind is given without --density; e.g. --density 0.1")
    if "window" not in given:
        raise UsageError(f"{asked} needs --window or --density; e.g. --window 256 --global-tokens 64")
    window = given.pop("window")
    if len(window) > 2:
        raise UsageError(f"--window has {len(window)} values; expected one, or one before and one after")
    given["window"] = window[0] if len(window) == 1 and window[0] is not None else (window[0], window[-1])
    if "seed" in given and "random_blocks" not in given:
        raise UsageError("--seed is given and nothing is drawn; add --random-blocks, or drop it")
    if "random_blocks" in given:
        return BigBird(**{"global_tokens": 0, **given})
    return GlobalLocal(**given) if "global_tokens" in given else LocalWindow(**given)


def _side(text: str) -> int | None:
    return None if text == "all" else count(text)


def given_of(args: argparse.Namespace, *names: str) -> dict[str, Any]:
    return {name: getattr(args, name) for name in names if getattr(args, name, None) is not None}


def flags(names: Any) -> str:
    return ", ".join("--" + name.replace("_", "-") for name in names)
