"""``info``: says which backends a call uses and why, which others can be used, and with ``--all`` every reason against the rest."""

from __future__ import annotations

import argparse
import platform
import re
import sys
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import dilated_attention
from dilated_attention.cli.arguments import add_json, count, dtype_of
from dilated_attention.cli.choices import DTYPES, MACHINES, PRECISIONS
from dilated_attention.cli.console import put, put_answer, put_json
from dilated_attention.parsing import UsageError, size

if TYPE_CHECKING:
    from dilated_attention.factory import Explanation, Hardware

# how a reason begins, and what is said of one backend and of several that have it
_REASONS = (
    ("runs on cuda, not on ", "needs a CUDA GPU", "need a CUDA GPU"),
    ("runs on cpu, not on ", "runs on a CPU only", "run on a CPU only"),
    ("\\S+ is not installed: ", "is not installed", "are not installed"),
    ("computes lists of blocks only", "computes block-sparse attention only", "compute block-sparse attention only"),
    ("takes no lists of blocks", "computes no block-sparse attention", "compute no block-sparse attention"),
    ("needs compute capability ", "needs a GPU of another compute capability", "need a GPU of another compute capability"),
)
# of the reasons against those that cannot be used; the others are counted together
_NAMED_REASONS = 3


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("info", usage="%(prog)s [options]", help="which backends this machine uses, why, and what would be faster")
    parser.add_argument("--for", dest="machine", choices=MACHINES, help="another kind of machine, with every kernel package installed")
    parser.add_argument("--dtype", choices=DTYPES, help="default: bfloat16 on a GPU that supports it, else float16 or float32")
    parser.add_argument("--head-dim", type=size, default=64, help="default: 64")
    parser.add_argument("--heads", "--num-heads", dest="num_heads", type=size, default=8, help="query heads; default: 8")
    text = "key/value heads; default: as many as query heads"
    parser.add_argument("--kv-heads", "--num-kv-heads", dest="num_kv_heads", type=size, help=text)
    parser.add_argument("--length", type=count, default=0, help="rows of a problem, the largest segment length / rate; default: long")
    parser.add_argument("--precision", choices=PRECISIONS, default="native")
    parser.add_argument(
        "--decode", choices=("dense", "sparse"), help="one row over a cache: of every key, or of those that a pattern keeps"
    )
    parser.add_argument("--block-size", type=int, choices=(64, 128), help="block-sparse attention, with blocks of this many positions")
    parser.add_argument("--block-masks", choices=("none", "interval", "bits"), default="none", help="pairs masked within its blocks")
    for flag in ("causal", "inference", "key-padding-mask", "window", "dropout", "deterministic"):
        parser.add_argument(f"--{flag}", action="store_true")
    parser.add_argument("--all", action="store_true", help="every backend, with every reason against those that cannot be used")
    add_json(parser)
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    import torch

    from dilated_attention.factory import EXAMPLES, detect, explain_backend

    hardware = EXAMPLES[args.machine] if args.machine else detect()
    if args.num_kv_heads is not None and args.num_heads % args.num_kv_heads:
        raise UsageError(f"--kv-heads is {args.num_kv_heads}; expected a divisor of --heads, which is {args.num_heads}")
    if args.decode:
        return _info_decode(args, hardware)
    same = ("head_dim", "num_heads", "num_kv_heads", "key_padding_mask", "window", "deterministic", "precision", "length")
    asked: dict[str, Any] = {name: getattr(args, name) for name in (*same, "block_size", "block_masks")}
    asked |= {"dtype": dtype_of(args), "is_causal": args.causal, "needs_grad": not args.inference, "dropout_p": 0.1 * args.dropout}
    explanation = explain_backend(hardware=hardware, **asked)
    versions = {"dilated_attention": dilated_attention.__version__, "torch": torch.__version__, "python": platform.python_version()}
    found = explanation.forward is not None and (explanation.backward is not None or not explanation.request.needs_grad)
    machine = [
        " · ".join(f"{name} {version}" for name, version in versions.items()),
        _described(hardware, whole=args.all),
        f"preference: {_preference(hardware)}",
    ]
    if args.json:
        put_json({"versions": versions, "preference": _preference(hardware), **explanation.as_dict()})
    elif args.all or not found:
        put("\n".join([*machine, "", str(explanation)]))
    else:
        put("\n".join([*_verdict(explanation), *_faster(explanation, asked), "", *_usable(explanation), "", *machine]))
    if not found:
        print(f"no backend can compute {explanation.request.describe()}", file=sys.stderr)
        return 1
    return 0


def _verdict(explanation: Explanation) -> list[str]:
    """Returns a sentence: which backends are taken, and by which order."""
    forward, backward = explanation.forward, explanation.backward
    if backward is None:
        taken = f"the forward runs on {forward}"
    else:
        taken = f"forward and backward run on {forward}" if forward == backward else f"forward runs on {forward}, backward on {backward}"
    orders = dict.fromkeys(_order(basis) for basis in (explanation.forward_basis, explanation.backward_basis) if basis)
    return [f"{explanation.what}: {taken}, the first that can by {' and by '.join(orders)}."]


def _order(basis: str) -> str:
    """Returns "the times measured here", "the shipped table" and so on, without their file or source."""
    begin = basis.split(" (")[0]
    return "the times measured here" if begin == "measured here" else f"the {begin}".replace("the architecture ", "the architecture's ")


def _faster(explanation: Explanation, asked: dict[str, Any]) -> list[str]:
    """Returns a line on what the order prefers and this machine lacks: kernel packages to install, or a GPU."""
    from dilated_attention.factory import EXAMPLES, explain_backend

    hardware = explanation.request.hardware
    if hardware.device_type != "cuda":
        number = sum("runs on cuda, not on" in " ".join(reasons) for _, reasons, _ in explanation.lines())
        return [f"faster: a CUDA GPU, which {number} of the others need; info --for hopper shows what they do there."]
    everything = frozenset().union(hardware.packages, *(machine.packages for machine in EXAMPLES.values()), {"xformers"})
    then = explain_backend(hardware=replace(hardware, packages=everything, versions=()), **asked)
    reasons = {row.name: row.reasons for row in explanation.rows}
    better = {name: [x for x in reasons[name] if "is not installed: " in x] for name in (then.forward, then.backward) if name}
    return [f"faster by {_order(then.forward_basis)}: {name}; {'; '.join(missing)}" for name, missing in better.items() if missing]


def _usable(explanation: Explanation) -> list[str]:
    """Returns the lines of the backends that can be used, and one that counts the others by the reasons that most of them have."""
    lines = explanation.lines()
    refused = [set(map(_kind, reasons)) for mark, reasons, _ in lines if mark == "✗"]
    shown = [line for mark, _, line in lines if mark != "✗"]
    if explanation.tiles:
        shown.append(f"tiles: {explanation.tiles}")
    if not refused:
        return shown
    parts: list[str] = []
    left = refused
    while left and len(parts) < _NAMED_REASONS:
        (one, several), number = max(Counter(kind for kinds in left for kind in kinds).items(), key=lambda item: (item[1], item[0]))
        parts.append(f"{number} {one if number == 1 else several}")
        left = [kinds for kinds in left if (one, several) not in kinds]
    if left:
        parts.append(f"{len(left)} for other reasons")
    others = "1 other" if len(refused) == 1 else f"{len(refused)} others"
    return [*shown, f"{others} cannot: {', '.join(parts)}; --all shows every reason."]


def _kind(reason: str) -> tuple[str, str]:
    """Returns what is said of one backend and of several that have this reason against them."""
    return next(((one, several) for begin, one, several in _REASONS if re.match(begin, reason)), (reason, f'"{reason}"'))


def _info_decode(args: argparse.Namespace, hardware: Hardware) -> int:
    import torch

    from dilated_attention.functional import explain_decode

    dtype = dtype_of(args) or (torch.bfloat16 if hardware.device_type == "cuda" else torch.float32)
    shape = {"head_dim": args.head_dim, "num_heads": args.num_heads, "num_kv_heads": args.num_kv_heads}
    explained = explain_decode(hardware=hardware, dtype=dtype, dense=args.decode == "dense", **shape)
    rows = [{"name": name, "usable": not reasons, "reasons": list(reasons), "source": source} for name, reasons, source in explained.rows]
    put_answer(args, {"request": explained.what, "chosen": explained.chosen, "decoders": rows}, explained)
    return 0 if explained.chosen else 1


def _described(hardware: Hardware, *, whole: bool) -> str:
    """``whole``: with the kernel packages that are not installed."""
    from dilated_attention.backends import PACKAGES

    parts = [f"{hardware.name or hardware.device_type}: {hardware.architecture}"]
    if hardware.cudnn_version is not None:
        parts.append(f"cuDNN {hardware.cudnn_version}")
    for package in (*PACKAGES, "flash-attn-3", "flash-attn-3-fp8", "nvidia-cudnn-frontend"):
        if package in hardware.packages:
            parts.append(f"{package} installed")
        elif package in dict(hardware.unusable):
            parts.append(f"{package} installed, not usable")
        elif whole:
            parts.append(f"{package} not installed")
    return ", ".join(parts)


def _preference(hardware: Hardware) -> str:
    """Describes the table of measured times in use, if any."""
    from dilated_attention.backends import tuning_table

    here = tuning_table.measured_here(hardware)
    if here is not None:
        return f"measured here ({here.path}, {here.date})"
    shipped = tuning_table.shipped(hardware.architecture)
    text = f"shipped table ({shipped.source}, {shipped.date})" if shipped else "architecture order"
    return f"{text}; nothing measured here: {tuning_table.RERUN}" if hardware.versions else text
