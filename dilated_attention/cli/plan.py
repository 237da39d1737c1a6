"""``plan`` and ``recommend``: what an attention call or a model costs, and which to take; ``bench``: where measuring is."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from dilated_attention import planning
from dilated_attention.cli.common import (
    DTYPE_NAMES,
    PATTERN_OPTIONS,
    add_command,
    add_heads,
    add_pattern,
    bytes_of_gib,
    dtype_of,
    gib,
    pattern_of,
    put,
    put_json,
    refuse_others,
    width,
)
from dilated_attention.factory import MODEL_PRESETS
from dilated_attention.models.config import RING_KINDS
from dilated_attention.parsing import UsageError, below, size
from dilated_attention.planning.plans import plans_table
from dilated_attention.planning.problem import KINDS

# options for attention only, but for those of its pattern, and for models only: None unless they are given
_OF_ATTENTION = ("heads", "kv_heads", "head_dim", "layout", "exchange", "causal")
_OF_MODELS = ("checkpoint", "weight_shards")
# of the command ``recommend``, and of the function
_ADVISED = ("gpu", "memory", "parameters", "heads", "head_dim", "gpus", "batch", "users", "causal", "attention")
WHERE = """Measuring is in the source, not in the package: clone it and call there

    python -m benchmarks speed          named cases beside others, with errors against float64
    python -m benchmarks extreme        the longest sequence that fits
    python -m benchmarks train-infer    generating, training steps of slide encoders, equality with TorchScale
    torchrun --nproc-per-node 2 -m benchmarks scaling

What a call or a model will take here, without running it: plan. Which kernel runs and why: info."""


def add(commands: Any) -> None:
    parser = add_command(
        commands, "plan", _plan, usage="%(prog)s what --length N [N ...] [options]",
        help="what a kind of attention, or a model, costs: pairs, FLOPs, memory, bytes on the wire, time, and the longest that fits",
        description="Formulas: nothing is allocated. Times are estimates, each with its source.",
    )  # fmt: skip
    names, add = [*KINDS, *MODEL_PRESETS], parser.add_argument
    add("what", choices=names, metavar="what", help=f"a kind of attention, or a model preset: {', '.join(names)}")
    add("--length", type=size, nargs="+", required=True, metavar="N", help="positions: 65536, 64k, 1M; several give a table")
    add("--batch", type=size, default=1, help="sequences at a time; default: 1")
    add("--dtype", choices=DTYPE_NAMES, help="default: bfloat16 on a GPU that supports it, float16 on an older one, else float32")
    passes = parser.add_mutually_exclusive_group()
    passes.add_argument("--train", action="store_true", help="forward and backward; the default")
    passes.add_argument("--infer", action="store_true", help="forward only; a language model generates")
    add("--gpu", help="H200, a100-80gb, …; cpu; default: this machine's, or its CPU")
    add("--memory", type=bytes_of_gib, metavar="GIB", help="of the device, instead of its own")
    add("--world-size", type=size, default=1, help="processes that share a sequence, one GPU each; default: 1")
    add = parser.add_argument_group("of a kind of attention").add_argument
    add_heads(add)
    add("--layout", choices=("contiguous", "zigzag", "striped"), help="which rank holds what; default: the kind's usual one")
    add("--exchange", choices=("auto", "all_gather", "ring", "all_to_all"), help="of ring and ring_dilated; default: auto")
    add_pattern(add, "dilated", "block_sparse")
    add = parser.add_argument_group("of a model").add_argument
    add("--checkpoint", action="store_true", default=None, help="save only each block's input, and recompute the block")
    add("--weight-shards", type=size, help="processes over which FSDP shards weights; default: 1")

    listed = "\n".join(f"  {name:<18}{text}" for name, text in planning.USE_CASES.items())
    add = add_command(
        commands, "recommend", _recommend, usage="%(prog)s use-case --length N [options]",
        help="which attention, branches, backend and settings for a use case, with the reason for each",
        description=f"Which attention, branches, backend and settings to take, with the reason for each.\n\nuse cases:\n{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    ).add_argument  # fmt: skip
    add("use_case", choices=list(planning.USE_CASES), metavar="use-case", help=", ".join(planning.USE_CASES))
    add("--length", type=size, required=True, help="positions of a sequence, tiles of a slide: 65536, 64k, 1M")
    add("--gpu", help="H200, A100, …, with flash-attn-4 and triton; cpu; default: this machine")
    add("--memory", type=gib, metavar="GIB", help="of each device; default: what it has")
    add("--parameters", type=_parameters, help="of the model: 125M, 7B; default: one layer, for decoding llama-1b")
    add("--heads", type=size, help="query heads; default: as usual for this number of parameters")
    add("--head-dim", type=size, help="default: as usual for this number of parameters")
    add("--gpus", type=size, help="default: 1")
    add("--batch", type=size, help="sequences of a training step over all GPUs; default: 1")
    add("--users", type=size, help="requests at a time over all GPUs; default: 32")
    add("--causal", action=argparse.BooleanOptionalAction, help="default: causal, except for encoders")
    add("--attention", choices=tuple(RING_KINDS.values()), help="which the model has or must have; default: chosen by rules")

    parser = add_command(commands, "bench", _bench, has_json=False, help="where measuring is")
    parser.add_argument("suite", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def _bench(args: argparse.Namespace) -> int:
    put(WHERE)
    return 0


def _plan(args: argparse.Namespace) -> int:
    computes = KINDS.get(args.what)
    taken = _OF_MODELS if computes is None else (*_OF_ATTENTION, *PATTERN_OPTIONS[computes])
    refuse_others(args, taken, *_OF_ATTENTION, *_OF_MODELS)
    if args.infer and args.checkpoint:
        raise UsageError("--checkpoint and --infer are given, and inference keeps nothing for a backward: drop either")
    shared: dict[str, Any] = {"dtype": dtype_of(args), "training": not args.infer, "batch_size": args.batch}
    shared |= {name: getattr(args, name) for name in ("world_size", "gpu", "memory")}
    planned: Callable[..., Any] = planning.plan_model
    if computes is None:
        shared |= {"checkpoint_activations": bool(args.checkpoint), "weight_shards": args.weight_shards or 1}
    else:
        planned, pattern = planning.plan_attention, pattern_of(args, computes)
        shared |= {"num_heads": args.heads or 12, "head_dim": args.head_dim or 64, "num_kv_heads": args.kv_heads, "layout": args.layout}
        shared |= {"exchange": args.exchange or "auto", "is_causal": bool(args.causal), "pattern": pattern}
    # the longest that fits does not depend on the length: one search is enough
    plans = [planned(args.what, num_positions=n, find_longest=n == args.length[-1], **shared) for n in args.length]
    if args.json:
        answers = [plan.as_dict() for plan in plans]
        put_json(answers if len(answers) > 1 else answers[0])
    else:
        put(plans_table(plans) if len(plans) > 1 else plans[0])
    return 0


def _parameters(text: str) -> float:
    """Parses a number of parameters, with suffixes as powers of ten: ``7B`` is 7 · 10⁹."""
    unit = {"k": "e3", "m": "e6", "b": "e9", "t": "e12"}.get(text[-1:].lower())
    return below(text[:-1] + unit if unit else text, 1e16, "not a number of parameters; expected e.g. 125M, 7B or 1240000000")


def _recommend(args: argparse.Namespace) -> int:
    answer = planning.recommend(args.use_case, args.length, **{name: getattr(args, name) for name in _ADVISED})
    if args.json:
        put_json(answer.as_dict())
    else:
        # the code is not wrapped
        put(answer.text(*filter(None, [width()])), wrap=False)
    return 0 if answer.forward is not None else 1
