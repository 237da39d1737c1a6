"""``bench tune``, also ``bench --tune``: measures every usable backend on this machine; later calls prefer the fastest."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from dilated_attention.cli.arguments import device_of
from dilated_attention.cli.console import put, put_json
from dilated_attention.parsing import UsageError, positive, size


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``bench tune``."""
    parser.add_argument("--seconds", type=positive, help="stop measuring after this long; default 480 on a GPU, 120 on a CPU")
    parser.add_argument("--head-dims", type=size, nargs="+", help="default: 64 128 32 96 48 192 256 on a GPU, 32 64 on a CPU")
    parser.add_argument("--lengths", type=size, nargs="+", help="default: powers of two from 256 to 65536 on a GPU, to 2048 on a CPU")
    parser.add_argument("--dtypes", choices=("half", "float32"), nargs="+", help="default: both")
    parser.add_argument("--backends", nargs="+", help="default: all usable ones; those left out come after those measured")
    parser.add_argument("--device", help="default: the GPU if there is one")
    parser.add_argument("--output", type=Path, help="file to write instead of the one that this machine reads; replaced if it exists")
    parser.add_argument("--json", action="store_true", help="print the table's rows as JSON")


def run(args: argparse.Namespace) -> int:
    from dilated_attention.backends import tuning_table
    from dilated_attention.factory import detect, list_backends, tune

    hardware = detect(device_of(args.device) if args.device else None)
    unknown = [name for name in args.backends or () if name not in list_backends()]
    if unknown:
        raise UsageError(f"--backends has {', '.join(unknown)}; expected some of {', '.join(list_backends())}")
    path = args.output or tuning_table.cache_path(hardware)
    default = tune.default_sweep(hardware)
    sweep = replace(
        default,
        head_dims=tuple(args.head_dims or default.head_dims),
        lengths=tuple(args.lengths or default.lengths),
        dtypes=tuple(args.dtypes or default.dtypes),
        backends=tuple(args.backends or default.backends),
        seconds=default.seconds if args.seconds is None else args.seconds,
    )
    table = tune.measure(sweep, device=args.device, progress=lambda line: print(line, file=sys.stderr, flush=True))
    tuning_table.save(table, path)
    tuning_table.refresh()
    if args.json:
        rows = [tuning_table.as_dict(row) for row in table.rows]
        put_json({"file": str(path), "source": table.source, "date": table.date, "rows": rows})
        return 0
    put(tune.winners(table))
    put(f"written to {path}")
    if path != tuning_table.cache_path(hardware):
        put(f"to use it: DILATED_ATTENTION_CACHE={path}, or move it to {tuning_table.cache_path(hardware)}")
    return 0
