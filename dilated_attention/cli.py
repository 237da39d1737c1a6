"""``python -m dilated_attention``: ``info`` on hardware and backends, ``show`` on models, ``bench --tune`` to measure what is fastest here."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

import dilated_attention
from dilated_attention.backends import PACKAGES, PRECISIONS, preference
from dilated_attention.factory import EXAMPLES, MODEL_PRESETS, Hardware, create_model, detect, explain_backend, tune
from dilated_attention.functional import explain_decode

_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit code: 0, or 1 if what was asked cannot be done; wrong usage exits with 2."""
    parser = argparse.ArgumentParser(prog="python -m dilated_attention", description="Exact long-sequence attention on PyTorch.")
    commands = parser.add_subparsers(dest="command", required=True)
    info = commands.add_parser("info", help="hardware, backends, and why the rest is not usable")
    info.add_argument(
        "--for", dest="machine", choices=sorted(EXAMPLES), help="another kind of machine, with every kernel package installed"
    )
    info.add_argument("--dtype", choices=list(_DTYPES), help="default: bfloat16 on a GPU that has it, else float16 or float32")
    info.add_argument("--head-dim", type=int, default=64)
    info.add_argument("--num-heads", type=int, default=8)
    info.add_argument("--num-kv-heads", type=int)
    info.add_argument("--length", type=int, default=0, help="rows of a problem, the largest segment length / rate; default: long")
    info.add_argument("--precision", choices=PRECISIONS, default="native")
    info.add_argument("--decode", choices=("dense", "sparse"), help="one row over a cache: of every key, or of those that a pattern keeps")
    info.add_argument("--block-size", type=int, choices=(64, 128), help="block-sparse attention, by blocks of so many positions")
    info.add_argument("--block-masks", choices=("none", "interval", "bits"), default="none", help="pairs masked within its blocks")
    for flag in ("causal", "inference", "key-padding-mask", "window", "dropout", "deterministic"):
        info.add_argument(f"--{flag}", action="store_true")
    info.add_argument("--json", action="store_true", help="machine-readable")
    show = commands.add_parser("show", help="a model preset: parameters, keys per query, memory, and what fits")
    show.add_argument("preset", choices=sorted(MODEL_PRESETS), metavar="preset", help=", ".join(MODEL_PRESETS))
    show.add_argument("--positions", type=_size, nargs="+", help="sequence lengths to tell of; default: a few orders of magnitude")
    show.add_argument("--memory", type=float, help="GiB of the device that it has to fit; default: this machine's GPU, or its RAM")
    show.add_argument("--json", action="store_true", help="machine-readable")
    bench = commands.add_parser("bench", help="measure every usable backend here; what is fastest is preferred from then on")
    bench.add_argument("--tune", action="store_true", help="write the preference table of this machine")
    bench.add_argument("--seconds", type=float, help="stop measuring after this long; default 480 on a GPU, 120 on a CPU")
    bench.add_argument("--head-dims", type=_size, nargs="+", help="default: 64 128 32 96 48 192 256 on a GPU, 32 64 on a CPU")
    bench.add_argument("--lengths", type=_size, nargs="+", help="default: powers of two from 256 to 65536 on a GPU, to 2048 on a CPU")
    bench.add_argument("--dtypes", choices=("half", "float32"), nargs="+", help="default: both")
    bench.add_argument("--backends", nargs="+", help="default: all that can; those left out come after those measured")
    bench.add_argument("--device", help="default: the GPU if there is one")
    bench.add_argument("--output", type=Path, help="file to write instead of the one that this machine reads; replaced if it is there")
    bench.add_argument("--json", action="store_true", help="print the table's rows as JSON")
    args = parser.parse_args(arguments)
    if args.command == "bench" and not args.tune:
        bench.error("without --tune there is nothing to run: other suites come in a later release; benchmarks/ has scripts")
    try:
        return {"info": _info, "show": _show, "bench": _tune}[args.command](args)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 1


def _size(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; expected a whole number from 1")
    return int(text)


def _tune(args: argparse.Namespace) -> int:
    try:
        hardware = detect(args.device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(
            f"--device is {args.device!r}, which torch cannot use here ({error}); expected cpu, cuda or cuda:<index>"
        ) from error
    path = args.output or preference.cache_path(hardware)
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
    preference.save(table, path)
    preference.refresh()
    if args.json:
        rows = [preference.as_dict(row) for row in table.rows]
        print(json.dumps({"file": str(path), "source": table.source, "date": table.date, "rows": rows}, indent=2, ensure_ascii=False))
        return 0
    print(tune.winners(table))
    print(f"written to {path}")
    if path != preference.cache_path(hardware):
        print(f"to use it: DILATED_ATTENTION_CACHE={path}, or move it to {preference.cache_path(hardware)}")
    return 0


def _show(args: argparse.Namespace) -> int:
    memory = None if args.memory is None else int(args.memory * 2**30)
    summary = create_model(args.preset, device="meta").summary(tuple(args.positions) if args.positions else None, memory=memory)
    print(json.dumps(summary.as_dict(), indent=2) if args.json else summary)
    return 0


def _info(args: argparse.Namespace) -> int:
    hardware = EXAMPLES[args.machine] if args.machine else detect()
    if args.decode:
        return _info_decode(args, hardware)
    explanation = explain_backend(
        hardware=hardware,
        dtype=_DTYPES[args.dtype] if args.dtype else None,
        head_dim=args.head_dim,
        num_heads=args.num_heads,
        num_kv_heads=args.num_kv_heads,
        is_causal=args.causal,
        needs_grad=not args.inference,
        key_padding_mask=args.key_padding_mask,
        window=args.window,
        dropout_p=0.1 if args.dropout else 0.0,
        deterministic=args.deterministic,
        precision=args.precision,
        length=args.length,
        block_size=args.block_size,
        block_masks=args.block_masks,
    )
    versions = {"dilated_attention": dilated_attention.__version__, "torch": torch.__version__, "python": platform.python_version()}
    if args.json:
        print(
            json.dumps({"versions": versions, "preference": _preference(hardware), **explanation.as_dict()}, indent=2, ensure_ascii=False)
        )
    else:
        print(" · ".join(f"{name} {version}" for name, version in versions.items()))
        print(_described(hardware))
        print(f"preference: {_preference(hardware)}")
        print()
        print(explanation)
    if explanation.forward is None or (explanation.request.needs_grad and explanation.backward is None):
        print(f"no backend can compute {explanation.request.describe()}", file=sys.stderr)
        return 1
    return 0


def _info_decode(args: argparse.Namespace, hardware: Hardware) -> int:
    dtype = _DTYPES[args.dtype] if args.dtype else torch.bfloat16 if hardware.device_type == "cuda" else torch.float32
    shape = {"head_dim": args.head_dim, "num_heads": args.num_heads, "num_kv_heads": args.num_kv_heads}
    explained = explain_decode(hardware=hardware, dtype=dtype, dense=args.decode == "dense", **shape)
    if args.json:
        rows = [
            {"name": name, "usable": not reasons, "reasons": list(reasons), "source": source} for name, reasons, source in explained.rows
        ]
        print(json.dumps({"request": explained.what, "chosen": explained.chosen, "decoders": rows}, indent=2, ensure_ascii=False))
    else:
        print(explained)
    return 0 if explained.chosen else 1


def _described(hardware: Hardware) -> str:
    parts = [f"{hardware.name or hardware.device_type}: {hardware.architecture}"]
    if hardware.cudnn_version is not None:
        parts.append(f"cuDNN {hardware.cudnn_version}")
    known = (*PACKAGES, "flash-attn-3", "flash-attn-3-fp8", "nvidia-cudnn-frontend")
    parts += [f"{package} {'installed' if package in hardware.packages else 'not installed'}" for package in known]
    return ", ".join(parts)


def _preference(hardware: Hardware) -> str:
    """The table of measured times in use, if any."""
    here = preference.measured_here(hardware)
    if here is not None:
        return f"measured here ({here.path}, {here.date})"
    shipped = preference.shipped(hardware.architecture)
    text = f"shipped table ({shipped.source}, {shipped.date})" if shipped else "architecture order"
    return f"{text}; nothing measured here: {preference.RERUN}" if hardware.versions else text
