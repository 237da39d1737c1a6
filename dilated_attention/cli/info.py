"""``info``: says which backends a call uses and why, which others can be used, and with ``--all`` every reason against the rest."""

from __future__ import annotations

import argparse
import platform
import sys
from dataclasses import replace
from typing import Any

import torch

import dilated_attention
from dilated_attention import factory
from dilated_attention.backends import PRECISIONS, rates
from dilated_attention.cli.common import DTYPE_NAMES, add_command, count, dtype_of, given_of, put, put_json, refuse_others
from dilated_attention.factory import EXAMPLES, Explanation, explain_backend
from dilated_attention.factory.presets import SEARCHED
from dilated_attention.functional import explain_decode
from dilated_attention.parsing import size

# options that a row over a cache takes, too, and those that calls alone take as they are named, or by another name
_OF_ROWS = ("head_dim", "num_heads", "num_kv_heads")
_OF_CALLS = ("key_padding_mask", "window", "deterministic", "precision", "length", "block_size", "block_masks")
_RENAMED = ("causal", "inference", "dropout")


def add(commands: Any) -> None:
    text = "which backends this machine uses, why, and what would be faster"
    add = add_command(commands, "info", _info, usage="%(prog)s [name] [options]", help=text).add_argument
    add("name", choices=SEARCHED, nargs="?", help="say what to use for this instead")
    add("--for", choices=sorted(EXAMPLES), help="another kind of machine, with every kernel package but xformers")
    add("--dtype", choices=DTYPE_NAMES, help="default: bfloat16 on a GPU that supports it, else float16 or float32")
    add("--head-dim", type=size, help="default: 64")
    add("--heads", "--num-heads", dest="num_heads", type=size, help="query heads; default: 8")
    add("--kv-heads", "--num-kv-heads", dest="num_kv_heads", type=size, help="key/value heads; default: as many as query heads")
    add("--length", type=count, help="rows of a problem, the largest segment length / rate; default: long")
    add("--precision", choices=PRECISIONS, help="default: native")
    add("--decode", choices=("dense", "sparse"), help="one row over a cache: of every key, or of those that a pattern keeps")
    add("--block-size", type=int, choices=(64, 128), help="block-sparse attention, with blocks of this many positions")
    add("--block-masks", choices=("none", "interval", "bits"), help="pairs masked within its blocks; default: none")
    for flag in ("causal", "inference", "key-padding-mask", "window", "dropout", "deterministic"):
        add(f"--{flag}", action="store_true", default=None)
    add("--all", action="store_true", default=None, help="every backend, with every reason against those that cannot be used")


def _info(args: argparse.Namespace) -> int:
    args.what = args.name or "--decode"
    if args.name:
        refuse_others(args, (), "for", "dtype", "decode", "all", *_OF_ROWS, *_OF_CALLS, *_RENAMED)
        put_json({args.name: SEARCHED[args.name]}) if args.json else put(f"{args.name}: {SEARCHED[args.name]}")
        return 0
    machine, asked = getattr(args, "for"), given_of(args, *_OF_ROWS)
    hardware = EXAMPLES[machine] if machine else factory.detect()
    if args.decode:
        refuse_others(args, ("for", "dtype", *_OF_ROWS), *_OF_CALLS, *_RENAMED)
        dtype = dtype_of(args) or (torch.bfloat16 if hardware.device_type == "cuda" else torch.float32)
        decoders = explain_decode(hardware=hardware, dtype=dtype, dense=args.decode == "dense", **asked)
        if args.json:
            rows = [{"name": name, "usable": not why, "reasons": list(why), "source": source} for name, why, source in decoders.rows]
            put_json({"request": decoders.what, "chosen": decoders.chosen, "decoders": rows})
        else:
            put(decoders)
        return 0 if decoders.chosen else 1
    asked |= given_of(args, *_OF_CALLS) | {"dtype": dtype_of(args), "is_causal": bool(args.causal)}
    asked |= {"needs_grad": not args.inference, "dropout_p": 0.1 * bool(args.dropout)}
    explanation = explain_backend(hardware=hardware, **asked)
    versions = {"dilated_attention": dilated_attention.__version__, "torch": torch.__version__, "python": platform.python_version()}
    is_possible = explanation.forward is not None and (explanation.backward is not None or args.inference)
    table = rates.table_of(hardware.architecture)
    preference = f"shipped table ({table.source}, {table.date})" if table else "architecture order"
    if args.json:
        put_json({"versions": versions, "preference": preference, **explanation.as_dict()})
    else:
        packages = [f"cuDNN {hardware.cudnn_version}"] if hardware.cudnn_version else []
        packages += [f"{name} installed" for name in sorted(hardware.packages)]
        packages += [f"{name} installed, not usable" for name in dict(hardware.unusable)]
        machine = ", ".join([f"{hardware.name or hardware.device_type}: {hardware.architecture}", *packages])
        lines = [str(explanation)] if args.all or not is_possible else _verdict(explanation, asked)
        named = f"what to use for {', '.join(SEARCHED)}: info NAME"
        put("\n".join([*lines, "", " · ".join(map(" ".join, versions.items())), machine, f"preference: {preference}", named]))
    if not is_possible:
        print(f"no backend can compute {explanation.request.describe()}", file=sys.stderr)
    return 0 if is_possible else 1


def _verdict(explanation: Explanation, asked: dict[str, Any]) -> list[str]:
    """Returns lines: what is taken and by which order, what would be faster, and what can be used."""
    forward, backward, hardware = explanation.forward, explanation.backward, explanation.request.hardware
    taken = f"forward runs on {forward}" + (f", backward on {backward}" if backward else "")
    taken = f"forward and backward run on {forward}" if forward == backward else taken
    orders = dict.fromkeys(_order(basis) for basis in (explanation.forward_basis, explanation.backward_basis) if basis)
    lines = [f"{explanation.what}: {taken}, the first that can by {' and by '.join(orders)}."]
    if hardware.device_type != "cuda":
        lines.append("faster: a CUDA GPU; info --for hopper shows what runs there.")
    else:
        # what the order prefers and this machine lacks
        everything = hardware.packages.union(["xformers"], *(machine.packages for machine in EXAMPLES.values()))
        then = explain_backend(hardware=replace(hardware, packages=everything), **asked)
        reasons = {row.name: "; ".join(x for x in row.reasons if "is not installed: " in x) for row in explanation.rows}
        better = [name for name in dict.fromkeys((then.forward, then.backward)) if name and reasons[name]]
        lines += [f"faster by {_order(then.forward_basis)}: {name}; {reasons[name]}" for name in better]
    lines += ["", *(line.text for line in explanation.lines() if line.mark != "✗")]
    lines += [f"tiles: {explanation.tiles}"] if explanation.tiles else []
    refused = ", ".join(row.name for row in explanation.rows if not row.usable and row.name not in (forward, backward))
    return [*lines, *([f"cannot: {refused}; --all shows every reason."] if refused else [])]


def _order(basis: str) -> str:
    """Returns "the shipped table", "the architecture's order" and so on, without a source."""
    return f"the {basis.split(' (')[0]}".replace("the architecture ", "the architecture's ")
