"""``info``: shows the hardware, the backends, which of them a call uses, and why not the others."""

from __future__ import annotations

import argparse
import json
import platform
import sys

import torch

import dilated_attention
from dilated_attention.backends import PACKAGES, PRECISIONS, tuning_table
from dilated_attention.cli.arguments import DTYPES, UsageError, add_json, count, size
from dilated_attention.factory import EXAMPLES, Hardware, detect, explain_backend
from dilated_attention.functional import explain_decode


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("info", usage="%(prog)s [options]", help="hardware, backends, and why the rest is not usable")
    parser.add_argument(
        "--for", dest="machine", choices=sorted(EXAMPLES), help="another kind of machine, with every kernel package installed"
    )
    parser.add_argument("--dtype", choices=list(DTYPES), help="default: bfloat16 on a GPU that supports it, else float16 or float32")
    parser.add_argument("--head-dim", type=size, default=64, help="default: 64")
    parser.add_argument("--heads", "--num-heads", dest="num_heads", type=size, default=8, help="query heads; default: 8")
    parser.add_argument(
        "--kv-heads", "--num-kv-heads", dest="num_kv_heads", type=size, help=("key/value heads; default: as many as query heads")
    )
    parser.add_argument("--length", type=count, default=0, help="rows of a problem, the largest segment length / rate; default: long")
    parser.add_argument("--precision", choices=PRECISIONS, default="native")
    parser.add_argument(
        "--decode", choices=("dense", "sparse"), help="one row over a cache: of every key, or of those that a pattern keeps"
    )
    parser.add_argument("--block-size", type=int, choices=(64, 128), help="block-sparse attention, with blocks of this many positions")
    parser.add_argument("--block-masks", choices=("none", "interval", "bits"), default="none", help="pairs masked within its blocks")
    for flag in ("causal", "inference", "key-padding-mask", "window", "dropout", "deterministic"):
        parser.add_argument(f"--{flag}", action="store_true")
    add_json(parser)
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    hardware = EXAMPLES[args.machine] if args.machine else detect()
    if args.num_kv_heads is not None and args.num_heads % args.num_kv_heads:
        raise UsageError(f"--kv-heads is {args.num_kv_heads}; expected a divisor of --heads, which is {args.num_heads}")
    if args.decode:
        return _info_decode(args, hardware)
    explanation = explain_backend(
        hardware=hardware,
        dtype=DTYPES[args.dtype] if args.dtype else None,
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
    dtype = DTYPES[args.dtype] if args.dtype else torch.bfloat16 if hardware.device_type == "cuda" else torch.float32
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
    """Describes the table of measured times in use, if any."""
    here = tuning_table.measured_here(hardware)
    if here is not None:
        return f"measured here ({here.path}, {here.date})"
    shipped = tuning_table.shipped(hardware.architecture)
    text = f"shipped table ({shipped.source}, {shipped.date})" if shipped else "architecture order"
    return f"{text}; nothing measured here: {tuning_table.RERUN}" if hardware.versions else text
