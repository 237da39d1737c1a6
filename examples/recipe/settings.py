"""Settings of a run: typed and bounded flags, a file of the same names, and which of them a resumed run keeps."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from dilated_attention.parsing import size
from recipe import checkpoints
from recipe.main import interrupted

if sys.version_info >= (3, 11):
    import tomllib
else:
    try:
        import tomli as tomllib
    except ImportError as error:
        raise SystemExit(f'{error}: pip install "dilated-attention[train]"') from None

FILE = "settings.json"
# these say what the processes of one start are, so that a resumed run does not keep them
OF_ONE_START = {"context_parallel", "layout", "fsdp"}
# ways to give the length, the one that counts first; a script may have epochs, from which it computes the steps
LENGTHS = ("epochs", "steps", "seconds", "minutes")
# a resumed run may change these: they say how long, where and how fast it trains, and not what. Scripts add theirs, such as data that
# may have moved; a fingerprint shows whether they are the same
FREE = {"out", "resume", "config", "lr", "save_minutes", "keep", "backend", *LENGTHS, *OF_ONE_START}


def number(kind: type, low: float, high: float = float("inf"), *, above: bool = False) -> Callable[[str], Any]:
    """Returns an argparse type: a number of ``kind`` from ``low`` to ``high``; ``above`` leaves ``low`` itself out. NaN is outside.

    Whole numbers may be sizes, too: 32k is 32768.
    """

    def parse(text: str) -> Any:
        value = size(text) if kind is int and not text.lstrip("-").isdecimal() else kind(text)
        if not (low < value if above else low <= value) or not value <= high or value == float("inf"):
            limits = f"{'>' if above else '>='} {low:g}" + (f" and <= {high:g}" if high < float("inf") else "")
            raise argparse.ArgumentTypeError(f"got {text}; expected a number {limits}")
        return value

    # argparse names it in "invalid … value"
    parse.__name__ = {int: "whole number", float: "number"}[kind]
    return parse


def rotary_base(context: int) -> float:
    """The base of rotary positions for training at ``context``: a base bounds the context in which equal contents still attract (arXiv
    2405.14591, Fig. 1), and this is near its bound."""
    return 500_000.0 * max(1.0, context / 32_768) ** 2


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that reports wrong usage on one process of several, and keeps the line breaks of its description.

    Args:
        description: of the script.
        free: flags of the script, by their names in the namespace, that a resumed run may change; those of FREE it may in any case.
    """

    def __init__(self, description: str | None, free: Collection[str] = ()) -> None:
        self.free = {*FREE, *free}
        super().__init__(description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        _before_refusing()
        # without the usage, which is a screen of flags
        self.exit(2, f"{self.prog}: error: {message}\n")

    def refuse(self, message: str) -> NoReturn:
        """Ends like ``error``: for input that no other flag would repair."""
        _before_refusing()
        self.exit(2, f"{self.prog}: {message}\n")


def _before_refusing() -> None:
    """The first process reports, and torchrun ends the others once it has; what is wrong with this one alone shows after that.

    After a Ctrl-C nothing is wrong but that: a library may have made an error of its own of it.
    """
    if interrupted():
        raise KeyboardInterrupt
    if os.environ.get("RANK", "0") != "0":
        time.sleep(10.0)


def add_common(
    parser: Parser, *, out: str, lr: float | None, minutes: float | None, processes: bool = True
) -> argparse._MutuallyExclusiveGroup:
    """Adds the flags that every run has, and returns the group of those of the length.

    Args:
        out, lr, minutes: defaults; one that is None the script sets itself.
        processes: whether a run may have several.
    """
    lr_help, minutes_help = ("" if value is None else f" (default: {value:g})" for value in (lr, minutes))
    positive, whole = number(float, 0, above=True), number(int, 1)
    parser.add_argument("--config", type=Path, help="a .toml or .json file of these flags' names; those on the command line win")
    parser.add_argument("--out", type=Path, default=Path(out), help=f"the run's folder (default: {out})")
    parser.add_argument("--resume", help='"auto": go on with the run in --out if there is one; or the folder of a run')
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--steps", type=whole, help="length of the training")
    length.add_argument("--minutes", type=positive, default=minutes, help=f"the same by the clock{minutes_help}")
    length.add_argument("--seconds", type=positive, help="the same")
    parser.add_argument("--lr", type=positive, default=lr, help=f"highest learning rate{lr_help}")
    parser.add_argument("--seed", type=number(int, 0, 2**63 - 1), default=0)
    parser.add_argument("--save-minutes", type=positive, default=10.0, help="time between checkpoints (default: 10)")
    parser.add_argument("--keep", type=whole, default=2, help="checkpoints to keep (default: 2)")
    parser.add_argument("--backend", default="auto", help="of attention, see python -m dilated_attention info")
    if processes:
        parser.add_argument("--context-parallel", type=whole, default=1, metavar="N", help="processes that share each sequence")
        parser.add_argument("--layout", choices=("contiguous", "zigzag", "striped"), default="contiguous", help="how they share it")
        parser.add_argument("--fsdp", action="store_true", help="shard parameters over all processes (FSDP2) instead of copying them (DDP)")
    return length


def parse(parser: Parser, arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses flags, those of ``--config``, and those of the run that ``--resume`` goes on with.

    A flag on the command line wins over the file. A resumed run keeps its settings; one that would train something else is refused.
    ``resume`` is afterwards the folder of the run to go on with, or None.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for flag in ("--config", "--resume", "--out"):
        first.add_argument(flag)
    known, _ = first.parse_known_args(given)
    for flag in ("config", "resume", "out"):
        if getattr(known, flag) == "":
            parser.error(f"--{flag} is empty; expected a path, or leave it out")
    words = _words(parser, _read(parser, Path(known.config)), given) if known.config else []
    args = parser.parse_args([*words, *given])
    folder = args.out if args.resume == "auto" else Path(args.resume) if args.resume else None
    saved = folder / FILE if folder else None
    if saved is None or not saved.is_file():
        if args.resume and args.resume != "auto":
            parser.error(f"--resume {folder} holds no run: {saved} does not exist; give the --out of a run, or auto")
        if args.resume and checkpoints.newest(args.out) is not None:
            parser.error(f"{args.out} holds a run without its {FILE}; put that file back, or use another --out")
        args.resume = None
        return args
    kept = {name: value for name, value in _read(parser, saved).items() if name not in OF_ONE_START}
    resumed = parser.parse_args([*_words(parser, kept, [*words, *given]), *words, *given])
    defaults = vars(parser.parse_args(_words(parser, kept, [])))
    for name, value in vars(resumed).items():
        if name not in parser.free and value != defaults[name]:
            flag = "--" + name.replace("_", "-")
            parser.error(
                f"{flag} is {value}, and the run in {folder} has {defaults[name]}; leave {flag} out to go on with it, or use another --out"
            )
    resumed.resume = folder
    if args.resume != "auto" and known.out is None and "--out" not in words:
        resumed.out = folder
    return resumed


def save(args: argparse.Namespace) -> str:
    """Returns the text of ``settings.json``, which ``--config`` reads, too."""
    values = {name: value for name, value in vars(args).items() if value is not None and name not in ("config", "resume", "out")}
    # of the ways to give the length, the one that counts
    counts = next((name for name in LENGTHS if name in values), None)
    values = {key: value for key, value in values.items() if key == counts or key not in LENGTHS}
    return json.dumps({key: str(value) if isinstance(value, Path) else value for key, value in values.items()}, indent=2) + "\n"


@contextlib.contextmanager
def wrong_usage(parser: Parser) -> Iterator[None]:
    """Around what is made from the settings: a value that it refuses ends in one line and exit code 2, as a wrong flag does."""
    try:
        yield
    except (ValueError, TypeError, OSError) as error:
        parser.error(str(error))


def duration(args: argparse.Namespace) -> float:
    """Seconds of a training by the clock."""
    return float(args.seconds if args.seconds is not None else 60 * args.minutes)


def _read(parser: Parser, path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        values = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (OSError, ValueError) as error:
        parser.error(f"{path} cannot be read: {error}")
    if not isinstance(values, dict):
        parser.error(f"{path} holds a {type(values).__name__}; expected a table of flags, such as context = 8192")
    return values


def _words(parser: Parser, values: dict[str, Any], given: Sequence[str]) -> list[str]:
    """The flags of a file as words of a command line, so that they are typed, bounded and refused like those.

    Of the flags that exclude one another, those of the length, a file has none where ``given`` has one.
    """
    actions = {action.dest: action for action in parser._actions if action.option_strings}
    if any(word.partition("=")[0] in {f"--{name}" for name in LENGTHS} for word in given):
        values = {key: value for key, value in values.items() if key not in LENGTHS}
    words = []
    for key, value in values.items():
        action = actions.get(key.replace("-", "_"))
        if action is None or action.dest in ("help", "config"):
            names = ", ".join(sorted(set(actions) - {"help", "config"}))
            parser.error(f"the file of settings has {key!r}; expected one of {names}")
        flag = action.option_strings[0]
        if isinstance(value, bool):
            if action.nargs != 0:
                parser.error(f"{key} is {str(value).lower()} in the file of settings; expected a value as {flag} takes it")
            no = [option for option in action.option_strings if option.startswith("--no-")]
            words += [flag] if value else no[:1]
        else:
            words += [flag, *map(str, value if isinstance(value, list) else [value])]
    return words
