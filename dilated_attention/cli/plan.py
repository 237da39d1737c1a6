"""``plan``: what an attention call or a model costs at given lengths, on this machine or a GPU by name, without allocating tensors."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Any

from dilated_attention.cli.arguments import DTYPE_NAMES, OF_KIND, add_json, add_pattern, dtype_of, flags, gib, given_of, pattern_of
from dilated_attention.cli.console import put, put_json
from dilated_attention.factory import MODEL_PRESETS
from dilated_attention.parsing import UsageError, size
from dilated_attention.planning import AttentionPlan, ModelPlan, plan_attention, plan_model
from dilated_attention.planning.plans import plans_table
from dilated_attention.planning.problem import KINDS

# options for attention only, but for those of its pattern, and for models only: None unless they are given
_OF_ATTENTION = ("heads", "kv_heads", "head_dim", "layout", "exchange", "causal")
_OF_MODELS = ("checkpoint", "weight_shards")


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "plan",
        usage="%(prog)s what --length N [N ...] [options]",
        help="what a kind of attention, or a model, costs: pairs, FLOPs, memory, bytes on the wire, time, and the longest that fits",
        description="Formulas and fake tensors: nothing is allocated. Times are estimates, each with its source.",
    )
    names = [*KINDS, *MODEL_PRESETS]
    parser.add_argument("what", choices=names, metavar="what", help=f"a kind of attention, or a model preset: {', '.join(names)}")
    text = "positions: 65536, 64k, 1M; several give a table"
    parser.add_argument("--length", type=size, nargs="+", required=True, metavar="N", help=text)
    parser.add_argument("--batch", type=size, default=1, help="sequences at a time; default: 1")
    text = "default: bfloat16 on a GPU that supports it, float16 on an older one, else float32"
    parser.add_argument("--dtype", choices=DTYPE_NAMES, help=text)
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
    add_pattern(shape, "dilated", "block_sparse")
    model = parser.add_argument_group("of a model")
    model.add_argument("--checkpoint", action="store_true", default=None, help="save only each block's input, and recompute the block")
    model.add_argument("--weight-shards", type=size, help="processes over which FSDP shards weights; default: 1")
    add_json(parser)
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    planned = _planned(args)
    # the longest that fits does not depend on the length: one search is enough
    plans = [planned(num_positions=n, find_longest=n == args.length[-1]) for n in args.length]
    if args.json:
        answers = [plan.as_dict() for plan in plans]
        put_json(answers[0] if len(answers) == 1 else answers)
    else:
        put(plans[0] if len(plans) == 1 else plans_table(plans))
    return 0


def _planned(args: argparse.Namespace) -> Callable[..., AttentionPlan | ModelPlan]:
    """Returns the function of a length that plans. Raises UsageError for options that the planned thing does not take."""
    computes = KINDS.get(args.what)
    taken = _OF_MODELS if computes is None else (*_OF_ATTENTION, *OF_KIND[computes])
    given = given_of(args, *_OF_ATTENTION, *_OF_MODELS, *OF_KIND["dilated"], *OF_KIND["block_sparse"])
    if wrong := given.keys() - set(taken):
        raise UsageError(f"{flags(wrong)} given, which {args.what} does not take; it takes {flags(taken)}: drop {flags(wrong)}")
    shared: dict[str, Any] = {
        "batch_size": args.batch, "dtype": dtype_of(args), "world_size": args.world_size, "training": not args.infer, "gpu": args.gpu,
        "memory": args.memory,
    }  # fmt: skip
    if computes is None:
        checkpoint, shards = bool(args.checkpoint), args.weight_shards or 1
        return functools.partial(plan_model, args.what, checkpoint_activations=checkpoint, weight_shards=shards, **shared)
    return functools.partial(
        plan_attention, args.what, num_heads=args.heads or 12, head_dim=args.head_dim or 64, num_kv_heads=args.kv_heads,
        layout=args.layout, exchange=args.exchange or "auto", is_causal=bool(args.causal), pattern=pattern_of(args, computes), **shared,
    )  # fmt: skip
