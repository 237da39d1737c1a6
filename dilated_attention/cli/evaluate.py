"""``evaluate``: bits per byte or per base of a saved model on a file or a folder of files."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dilated_attention.cli.arguments import add_json, device_of
from dilated_attention.cli.checkpoint import add_checkpoint, computing, load
from dilated_attention.cli.console import put_answer
from dilated_attention.parsing import UsageError, size

if TYPE_CHECKING:
    import torch

    from dilated_attention.models import Evaluation, Vocabulary

# names of FASTA files, which may end in .gz in addition
_FASTA = (".fa", ".fasta", ".fna", ".ffn", ".frn")


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "evaluate", usage="%(prog)s DIR --data PATH [options]", help="bits per byte or per base of a saved model on held-out data"
    )
    add_checkpoint(parser)
    parser.add_argument(
        "--data",
        type=Path,
        required=True,
        metavar="PATH",
        help="a file, or a folder of files; for bases FASTA with any number of records, plain or .gz",
    )
    parser.add_argument("--context", type=size, metavar="N", help="positions of a window; default: the model's longest segment, else 8192")
    parser.add_argument("--stride", type=size, metavar="N", help="positions from window to window; default: half of the context")
    parser.add_argument("--windows", type=size, metavar="N", help="read only so many, evenly over the data; default: all")
    parser.add_argument("--by-position", action="store_true", help="also by how many positions a target could see, in powers of two")
    add_json(parser)
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    from dilated_attention.models import evaluate

    if args.context is not None and args.stride is not None and args.stride > args.context:
        raise UsageError(f"--stride is {args.stride}; expected at most --context, {args.context}")
    files = _files(args.data)
    device = device_of(args.device)
    model, vocabulary = load(args, device)
    if args.by_position and not model.config.is_causal:
        raise UsageError("--by-position is given, and this model sees both sides: each target can see all of its window; leave it out")
    with computing(model, args, device, autocast=True) as dtype:
        records = _records(args.data, files, vocabulary)
        found = evaluate(model, records, context=args.context, stride=args.stride, num_windows=args.windows)
    answer: dict[str, Any] = {
        "checkpoint": str(args.folder),
        "parameters": model.num_parameters,
        "objective": "causal" if model.config.is_causal else "masked",
        "data": str(args.data),
        "files": len(files),
        "records": len(records),
        f"{vocabulary.unit}s": sum(map(len, records)),
        "scored": found.scored,
        f"bits_per_{vocabulary.unit}": found.bits,
        "context": found.context,
        "stride": found.stride,
        "windows": found.windows,
        f"{vocabulary.unit}s_per_second": found.positions / found.seconds,
        "seconds": found.seconds,
        "device": str(device),
        "dtype": dtype,
        "backend": args.backend,
    }
    if args.by_position:
        answer["by_position"] = [dataclasses.asdict(bucket) for bucket in found.by_position]
    put_answer(args, answer, "\n".join(_lines(answer, found, vocabulary.unit)))
    return 0


def _lines(answer: dict[str, Any], found: Evaluation, unit: str) -> list[str]:
    lines = [
        f"{answer['checkpoint']}: {answer['parameters']:,} parameters, {answer['objective']}, {unit}s",
        f"{answer['data']}: {answer[f'{unit}s']:,} {unit}s, records: {answer['records']:,}",
        f"windows of {found.context:,} {unit}s with a stride of {found.stride:,}: {found.windows:,} in {found.seconds:.1f} s, "
        f"{answer[f'{unit}s_per_second']:,.0f} {unit}s/s on {answer['device']} in {answer['dtype']}",
    ]
    if "by_position" in answer:
        # a window's positions, those that another window scores included
        lines.append(f"{'positions seen':>20}  {'targets':>12}  bits per {unit}")
        for bucket in found.by_position:
            seen = f"{bucket.least:,}" if bucket.least == bucket.most else f"{bucket.least:,}–{bucket.most:,}"
            lines.append(f"{seen:>20}  {bucket.targets:>12,}  {bucket.bits:.4f}")
    return [*lines, f"{found.bits:.4f} bits per {unit} over {found.scored:,}"]


def _files(path: Path) -> list[Path]:
    """Returns the files of the data in order of their names, hidden ones left out. Raises OSError if they hold nothing to score."""
    if not path.exists():
        raise FileNotFoundError(f"--data {path} does not exist; expected a file or a folder of files")
    files = [path]
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file() and not _is_hidden(file.relative_to(path)))
    held = [file.stat().st_size if file.is_file() else 2 for file in files]
    if max(held, default=0) < 2:
        has = f"{len(files)} files, none of which has 2 bytes" if path.is_dir() else f"{held[0]} bytes"
        raise OSError(f"--data {path} has {has}; expected at least 2, as the second is predicted from the first")
    return files


def _is_hidden(file: Path) -> bool:
    return any(part.startswith(".") for part in file.parts)


def _records(path: Path, files: list[Path], vocabulary: Vocabulary) -> list[torch.Tensor]:
    """Returns each file's bytes, or the bases of each record of each FASTA file."""
    from dilated_attention.models import read_fasta

    if vocabulary.unit == "byte":
        return [vocabulary.encode(file.read_bytes()) for file in files]
    if path.is_dir():
        files = [file for file in files if file.name.removesuffix(".gz").endswith(_FASTA)]
        if not files:
            raise OSError(
                f"--data {path} holds no FASTA file, and the model's tokens are bases; expected names in {', '.join(_FASTA)}, also with .gz"
            )
    return [bases for file in files for _, bases in read_fasta(file)]
