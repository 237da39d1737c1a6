"""``plan``: what an attention call or a model costs at given lengths, on this machine or a GPU by name, without allocating tensors."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from dilated_attention.cli.arguments import OF_KIND, add_json, add_pattern, dtype_of, flags, gib, given_of, pattern_from
from dilated_attention.cli.choices import DTYPES, MODEL_PRESETS, PLAN_KINDS
from dilated_attention.cli.console import put, put_json
from dilated_attention.parsing import UsageError, shown, size

if TYPE_CHECKING:
    from dilated_attention.planning import AttentionPlan, ModelPlan

_Commands = argparse._SubParsersAction
# options for attention only, and for models only: None unless they are given
_OF_ATTENTION = (*OF_KIND["dilated"], *OF_KIND["block_sparse"], "heads", "kv_heads", "head_dim", "layout", "exchange", "causal")
_OF_MODELS = ("checkpoint", "weight_shards")


def add(commands: _Commands[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "plan",
        usage="%(prog)s what --length N [N ...] [options]",
        help=(
            "what a kind of attention, or a model, costs: pairs, FLOPs, memory, bytes on the wire, time, and the longest sequence that fits"
        ),
        description="Formulas and fake tensors: nothing is allocated. Times are estimates, each with its source.",
    )
    names = ", ".join((*PLAN_KINDS, *MODEL_PRESETS))
    parser.add_argument("what", help=f"a kind of attention, or a model preset: {names}")
    parser.add_argument(
        "--length", type=size, nargs="+", required=True, metavar="N", help="positions: 65536, 64k, 1M; several give a table"
    )
    parser.add_argument("--batch", type=size, default=1, help="sequences at a time; default: 1")
    parser.add_argument(
        "--dtype", choices=DTYPES, help="default: bfloat16 on a GPU that supports it, float16 on an older one, else float32"
    )
    passes = parser.add_mutually_exclusive_group()
    passes.add_argument("--train", action="store_true", help="forward and backward; the default")
    passes.add_argument("--infer", action="store_true", help="forward only; a language model generates")
    parser.add_argument("--gpu", help="H200, a100-80gb, …; cpu; default: this machine's, or its CPU")
    parser.add_argument("--memory", type=gib, metavar="GIB", help="of the device, instead of its own")
    parser.add_argument("--world-size", type=size, default=1, help="processes that share a sequence, one GPU each; default: 1")
    shape = parser.add_argument_group("of a kind of attention")
    shape.add_argument("--heads", type=size, help="query heads; default: 12")
    shape.add_argument("--head-dim", type=size, help="default: 64")
    shape.add_argument("--kv-heads", type=size, help="key/value heads; default: as many as query heads")
    shape.add_argument("--causal", action="store_true", default=None, help="a position sees only itself and earlier ones")
    shape.add_argument("--layout", choices=("contiguous", "zigzag", "striped"), help="which rank holds what; default: the kind's usual one")
    shape.add_argument("--exchange", choices=("auto", "all_gather", "ring", "all_to_all"), help="of ring and ring_dilated; default: auto")
    add_pattern(shape, "dilated", "block_sparse")  # type: ignore[arg-type]
    model = parser.add_argument_group("of a model")
    model.add_argument("--checkpoint", action="store_true", default=None, help="save only each block's input, and recompute the block")
    model.add_argument("--weight-shards", type=size, help="processes over which FSDP shards weights; default: 1")
    add_json(parser)
    parser.set_defaults(run=_plan, parser=parser)


def _plan(args: argparse.Namespace) -> int:
    from dilated_attention.planning.plans import plans_table

    planned = _attention(args) if args.what in PLAN_KINDS else _model(args)
    # the longest that fits does not depend on the length: one search is enough
    plans = [planned(num_positions=n, find_longest=n == args.length[-1]) for n in args.length]
    if args.json:
        found = [plan.as_dict() for plan in plans]
        put_json(found[0] if len(found) == 1 else found)
        return 0
    put(plans[0] if len(plans) == 1 else plans_table(plans))
    return 0


def _attention(args: argparse.Namespace) -> Callable[..., AttentionPlan | ModelPlan]:
    from dilated_attention.planning import plan_attention
    from dilated_attention.planning.estimate.problem import KINDS

    _refuse(args, _OF_MODELS, "of models")
    computes = KINDS[args.what]
    pattern = pattern_from(args, computes, args.what)
    return functools.partial(
        plan_attention, args.what, num_heads=args.heads or 12, head_dim=args.head_dim or 64, num_kv_heads=args.kv_heads,
        layout=args.layout, exchange=args.exchange or "auto", is_causal=bool(args.causal),
        pattern=None if computes == "dense" else pattern, **_shared(args),
    )  # fmt: skip


def _model(args: argparse.Namespace) -> Callable[..., AttentionPlan | ModelPlan]:
    from dilated_attention.planning import plan_model

    if args.what not in MODEL_PRESETS:
        raise UsageError(
            f"what is {shown(args.what)}; expected a kind of attention ({', '.join(PLAN_KINDS)}) or a preset ({', '.join(MODEL_PRESETS)})"
        )
    _refuse(args, _OF_ATTENTION, "of a kind of attention")
    return functools.partial(
        plan_model, args.what, checkpoint_activations=bool(args.checkpoint), weight_shards=args.weight_shards or 1, **_shared(args)
    )


def _shared(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "batch_size": args.batch, "dtype": dtype_of(args), "world_size": args.world_size, "training": not args.infer, "gpu": args.gpu,
        "memory": args.memory,
    }  # fmt: skip


def _refuse(args: argparse.Namespace, names: Sequence[str], whose: str) -> None:
    if given := given_of(args, *names):
        options = "an option" if len(given) == 1 else "options"
        raise UsageError(f"{flags(given)} given, {options} {whose}, but the plan is for {args.what}: drop it")
