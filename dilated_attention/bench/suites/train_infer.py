"""Samples per second in training and tokens per second in generation, of models of known shapes, by kind of attention and context."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, cast

from dilated_attention.bench.report.plots import Plot
from dilated_attention.bench.report.rows import Results, Row
from dilated_attention.bench.report.tables import Table
from dilated_attention.bench.suite import Group, Session, Suite
from dilated_attention.bench.suites import train_infer_report as report
from dilated_attention.bench.workloads import generating, training
from dilated_attention.bench.workloads.language import KINDS, Shape
from dilated_attention.factory import MODEL_PRESETS
from dilated_attention.models import LongNetConfig
from dilated_attention.parsing import size

MODELS = ("gpt2-124m", "llama-7b")
TASKS = ("train", "generate")
# contexts for training, and the number of tokens per step unless the context is longer; the second entry applies to models above a
# certain number of parameters
_CONTEXTS = ((1024, 4096, 16384, 65536, 131072), (2048, 8192, 32768))
_TOKENS = (32768, 8192)
# total tokens of all prompts, limited so that a run takes minutes
_PROMPTS = (131072, 65536)
_LARGE = 10**9
# on a CPU: contexts for training and for generation, concurrent requests, and tokens generated per turn
_SMALL_CONTEXTS = {"train": (512, 1024, 2048), "generate": (512, 2048)}
_SMALL_BATCHES, _SMALL_NEW = (1, 4), 8


class TrainInfer(Suite):
    """Measures whole models with random weights: how much attention matters in proportion to everything else."""

    name = "train-infer"
    about = "samples/s of training and tokens/s of generating: GPT-2-124M- and Llama-7B-shaped models, dense, dilated, block-sparse"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        known = sorted(name for name, config in MODEL_PRESETS.items() if isinstance(config, LongNetConfig) and config.is_causal)
        parser.add_argument(
            "--models", nargs="+", choices=known, metavar="preset", default=list(MODELS), help=f"default: {', '.join(MODELS)}"
        )
        parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="of attention; default: all")
        parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS), help="default: both")
        parser.add_argument(
            "--contexts", type=size, nargs="+", help="default: 1k … 128k, from 1G parameters on 2k … 32k; on a CPU 512 … 2k"
        )
        parser.add_argument("--batches", type=size, nargs="+", help="requests that are continued together; default: 1 8; on a CPU 1 4")
        parser.add_argument(
            "--prompts", type=size, help="maximum tokens of all requests together; default: 128k, from 1G parameters on 64k"
        )
        parser.add_argument(
            "--tokens", type=size, help="of a training step, at least one sequence; default: 32k, from 1G parameters on 8k; on a CPU 2k"
        )
        parser.add_argument("--layers", type=size, help="use only this many layers; the model's name then says cut")

    def settings(self, session: Session) -> dict[str, Any]:
        options = session.options
        return super().settings(session) | {
            "layers": options.layers,
            "tokens": options.tokens,
            "prompts": options.prompts,
            "kinds": list(options.kinds),
        }

    def groups(self, session: Session) -> Sequence[Group]:
        groups = []
        for preset in session.options.models:
            shape = _shape(preset, session)
            large = shape.parameters > _LARGE
            for task in session.options.tasks:
                contexts = session.options.contexts or (_CONTEXTS[large] if session.full else _SMALL_CONTEXTS[task])
                for context in contexts:
                    groups += _groups(session, shape, task, context, large)
        return groups

    def tables(self, results: Results) -> list[Table]:
        return report.tables(results)

    def plots(self, results: Results) -> list[Plot]:
        return report.plots(results)


def _shape(preset: str, session: Session) -> Shape:
    """Returns the preset, or a similar model of two narrow layers for a CPU."""
    config = cast(LongNetConfig, MODEL_PRESETS[preset])
    changes: dict[str, Any] = {}
    if not session.full:
        heads = 2 if config.head_dim > 64 else 4
        changes = {"vocab_size": 1024, "num_layers": 2, "num_heads": heads, "embed_dim": 128, "ffn_dim": None}
        changes |= {"num_kv_heads": 1} if config.num_kv_heads else {}
    if session.options.layers:
        changes["num_layers"] = session.options.layers
    changed = {
        field.name: changes[field.name]
        for field in fields(config)
        if field.name in changes and changes[field.name] != getattr(config, field.name)
    }
    return Shape(preset, changed, not session.full)


def _groups(session: Session, shape: Shape, task: str, context: int, large: bool) -> list[Group]:
    where: dict[str, Any] = {"device": session.device, "dtype": session.dtype, "seconds": session.seconds}
    dtype = str(session.dtype).removeprefix("torch.")
    kinds = tuple(session.options.kinds)
    if task == "train":
        tokens = session.options.tokens or (_TOKENS[large] if session.full else 2048)
        batch = max(1, tokens // context)
        run = functools.partial(training.measure, shape, kinds, context, batch, **where)
        return [Group(f"train {shape.name} N={context} B={batch} {dtype}", run)]
    most = session.options.prompts or _PROMPTS[large]
    where["new_tokens"] = 32 if session.full else _SMALL_NEW
    groups = []
    for batch in session.options.batches or ((1, 8) if session.full else _SMALL_BATCHES):
        run = functools.partial(generating.measure, shape, kinds, context, batch, **where)
        if batch > 1 and batch * context > most:
            run = functools.partial(_left_out, shape, kinds, context, batch, dtype, most)
        groups.append(Group(f"generate {shape.name} N={context} B={batch} {dtype}", run))
    return groups


def _left_out(shape: Shape, kinds: Sequence[str], context: int, batch: int, dtype: str, most: int) -> list[Row]:
    case = {"task": "prefill", "model": shape.name, "N": context, "B": batch, "dtype": dtype}
    return [
        Row(name=kind, case=case, note=f"prompts of more than {most:,} tokens in total are left out; --prompts raises that")
        for kind in kinds
    ]
