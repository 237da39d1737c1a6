"""``evaluate``: bits per byte or per base of a saved model on a file or a folder of files."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from dilated_attention import models
from dilated_attention.cli.arguments import add_json
from dilated_attention.cli.checkpoint import add_checkpoint, opened
from dilated_attention.cli.console import put, put_json
from dilated_attention.parsing import UsageError, size

# names of FASTA files, which may end in .gz in addition
_FASTA = (".fa", ".fasta", ".fna", ".ffn", ".frn")


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    text = "bits per byte or per base of a saved model on held-out data"
    parser = commands.add_parser("evaluate", usage="%(prog)s DIR --data PATH [options]", help=text)
    add_checkpoint(parser)
    text = "a file, or a folder of files; for bases FASTA with any number of records, plain or .gz"
    parser.add_argument("--data", type=Path, required=True, metavar="PATH", help=text)
    parser.add_argument("--context", type=size, metavar="N", help="positions of a window; default: the model's longest segment, else 8192")
    parser.add_argument("--stride", type=size, metavar="N", help="positions from window to window; default: half of the context")
    parser.add_argument("--windows", type=size, metavar="N", help="read only so many, evenly over the data; default: all")
    parser.add_argument("--by-position", action="store_true", help="also by how many positions a target could see, in powers of two")
    add_json(parser)
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    if args.context is not None and args.stride is not None and args.stride > args.context:
        raise UsageError(f"--stride is {args.stride}; expected at most --context, {args.context}")
    files = _files(args.data)
    with opened(args, autocast=True) as (model, vocabulary, folder, device, dtype):
        is_causal, unit = model.config.is_causal, vocabulary.unit
        if args.by_position and not is_causal:
            raise UsageError("--by-position is given, and this model sees both sides: each target can see all of its window; leave it out")
        if unit == "byte":
            records = [vocabulary.encode(file.read_bytes()) for file in files]
        else:
            if args.data.is_dir():
                files = [file for file in files if file.name.removesuffix(".gz").endswith(_FASTA)]
            if not files:
                known = ", ".join(_FASTA)
                raise OSError(
                    f"--data {args.data} holds no FASTA file, and the model's tokens are bases; expected names in {known}, also with .gz"
                )
            records = [bases for file in files for _, bases in models.read_fasta(file)]
        result = models.evaluate(model, records, context=args.context, stride=args.stride, num_windows=args.windows)
    answer: dict[str, Any] = {
        "checkpoint": str(folder), "parameters": model.num_parameters, "objective": "causal" if is_causal else "masked",
        "data": str(args.data), "files": len(files), "records": len(records), f"{unit}s": sum(map(len, records)), "scored": result.scored,
        f"bits_per_{unit}": result.bits, "context": result.context, "stride": result.stride, "windows": result.windows,
        f"{unit}s_per_second": result.positions / result.seconds, "seconds": result.seconds, "device": str(device), "dtype": dtype,
        "backend": args.backend,
    }  # fmt: skip
    if args.by_position:
        answer["by_position"] = [dataclasses.asdict(bucket) for bucket in result.by_position]
    if args.json:
        put_json(answer)
        return 0
    put(f"{folder}: {model.num_parameters:,} parameters, {answer['objective']}, {unit}s")
    put(f"{args.data}: {answer[f'{unit}s']:,} {unit}s, records: {len(records)}")
    put(
        f"windows of {result.context:,} {unit}s with a stride of {result.stride:,}: {result.windows:,} in {result.seconds:.1f} s, "
        f"{answer[f'{unit}s_per_second']:,.0f} {unit}s/s on {device} in {dtype}"
    )
    if args.by_position:
        # a window's positions, those that another window scores included
        put(f"{'positions seen':>20}  {'targets':>12}  bits per {unit}")
        for bucket in result.by_position:
            seen = f"{bucket.least:,}" if bucket.least == bucket.most else f"{bucket.least:,}–{bucket.most:,}"
            put(f"{seen:>20}  {bucket.targets:>12,}  {bucket.bits:.4f}")
    put(f"{result.bits:.4f} bits per {unit} over {result.scored:,}")
    return 0


def _files(path: Path) -> list[Path]:
    """Returns the files of the data in order of their names, hidden ones left out. Raises OSError if they hold nothing to score."""
    if not path.exists():
        raise FileNotFoundError(f"--data {path} does not exist; expected a file or a folder of files")
    names = sorted(file.relative_to(path) for file in path.rglob("*") if file.is_file()) if path.is_dir() else [Path()]
    files = [path / name for name in names if not any(part.startswith(".") for part in name.parts)]
    if not any(file.stat().st_size >= 2 or not file.is_file() for file in files):
        raise OSError(f"--data {path}: no file of it has 2 bytes; expected at least 2, as the second is predicted from the first")
    return files
