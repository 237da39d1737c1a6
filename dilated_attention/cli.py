"""``python -m dilated_attention info``: the hardware, the backends, and why the rest is not usable."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Sequence

import torch

import dilated_attention
from dilated_attention.backends import PACKAGES, PRECISIONS
from dilated_attention.factory import EXAMPLES, Hardware, detect, explain_backend

_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit code: 0, or 1 if no backend can do what was asked."""
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
    info.add_argument("--precision", choices=PRECISIONS, default="native")
    for flag in ("causal", "inference", "key-padding-mask", "window", "dropout", "deterministic"):
        info.add_argument(f"--{flag}", action="store_true")
    info.add_argument("--json", action="store_true", help="machine-readable")
    return _info(parser.parse_args(arguments))


def _info(args: argparse.Namespace) -> int:
    hardware = EXAMPLES[args.machine] if args.machine else detect()
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
    )
    versions = {"dilated_attention": dilated_attention.__version__, "torch": torch.__version__, "python": platform.python_version()}
    if args.json:
        print(json.dumps({"versions": versions, **explanation.as_dict()}, indent=2, ensure_ascii=False))
    else:
        print(" · ".join(f"{name} {version}" for name, version in versions.items()))
        print(_described(hardware))
        print()
        print(explanation)
    if explanation.forward is None or (explanation.request.needs_grad and explanation.backward is None):
        print(f"no backend can compute {explanation.request.describe()}", file=sys.stderr)
        return 1
    return 0


def _described(hardware: Hardware) -> str:
    parts = [f"{hardware.name or hardware.device_type}: {hardware.architecture}"]
    if hardware.cudnn_version is not None:
        parts.append(f"cuDNN {hardware.cudnn_version}")
    known = (*PACKAGES, "flash-attn-3", "flash-attn-3-fp8")
    parts += [f"{package} {'installed' if package in hardware.packages else 'not installed'}" for package in known]
    return ", ".join(parts)
