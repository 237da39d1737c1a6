"""Whole models: tokens per second in generating, training steps of slide encoders, and equality with the code that they come from."""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

from dilated_attention.bench.models import slide_encoder, torchscale
from dilated_attention.bench.models.language import KINDS, MORE_KINDS, Shape, generate
from dilated_attention.bench.report.rows import Results, Row
from dilated_attention.bench.report.tables import Table, by, compared, failures, having, labelled, listing
from dilated_attention.bench.runner import Group, Session, Suite
from dilated_attention.factory import MODEL_PRESETS
from dilated_attention.models import LongNetConfig
from dilated_attention.parsing import UsageError, size

MODELS = ("gpt2-124m", "llama-7b")
# task → contexts on a CPU, for tasks of language models; the first is the default
TASKS: dict[str, tuple[int, ...]] = {"generate": (512, 2048), "decode": (2048,), "slides": (), "parity": ()}
# on a GPU: contexts, and most tokens of several prompts; the second entry applies from this number of parameters on
_LARGE = 10**9
_CONTEXTS = ((1024, 4096, 16384, 65536, 131072), (2048, 8192, 32768))
_PROMPTS = (131072, 65536)
_COLUMNS = {"requests × positions": ("place", 1.0), "ms": ("ms", 1.0), "tokens/s": ("tokens_per_s", 1.0), "×": ("times", 1.0),
            "cached, MiB": ("cache_bytes", 2.0**-20)}  # fmt: skip
_DOING = {"prefill": "reading a prompt", "decode": "writing after a prompt", "step": "writing after random context"}


class TrainInfer(Suite):
    """Measures whole models with random weights: how much attention matters in proportion to everything else."""

    name = "train-infer"
    about = "models: tokens/s of generating by kind of attention; training steps of slide encoders; equality with TorchScale"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument
        known = sorted(name for name, config in MODEL_PRESETS.items() if isinstance(config, LongNetConfig) and config.is_causal)
        add("--models", nargs="+", choices=known, metavar="preset", default=MODELS, help=f"default: {' '.join(MODELS)}")
        add("--kinds", nargs="+", choices=(*KINDS, *MORE_KINDS), default=list(KINDS), help=f"default: {', '.join(KINDS)}")
        add("--tasks", nargs="+", choices=list(TASKS), default=["generate"], help="default: generate")
        add("--contexts", type=size, nargs="+", help="default: 1k … 128k, of large models 2k … 32k; on a CPU 512 … 2k")
        add("--batches", type=size, nargs="+", help="requests continued together; default: 1 and, where they fit, 8; on a CPU 4")
        add("--layers", type=size, help="use only this many layers; the model's name then says cut")
        add("--gigapath", type=Path, metavar="PATH", help="your own copy of Prov-GigaPath, for slides and parity")
        add("--torchscale", type=Path, metavar="PATH", help="your own copy of TorchScale, for parity")
        add("--weights", type=Path, metavar="FILE", help="Prov-GigaPath's slide_encoder.pth for parity; default: random")
        add("--tiles", type=size, nargs="+", help="of a slide; default: 5308 10001 45681; on a CPU 500; for parity 1201")
        add("--grid", type=size, help="side of the original's table of positions; default: 1000 for slides, else 100")

    def settings(self, session: Session) -> dict[str, Any]:
        return super().settings(session) | {name: getattr(session.options, name) for name in ("layers", "kinds", "grid")}

    def groups(self, session: Session) -> Sequence[Group]:
        options, groups = session.options, list[Group]()
        for preset, task in itertools.product(options.models, options.tasks):
            if TASKS[task]:
                groups += _groups(session, preset, task)
        if "slides" in options.tasks:
            changes: dict[str, Any] = {} if session.full else {"num_layers": options.layers or 2}
            grid = options.grid or (1000 if session.full else 100)
            for tiles in options.tiles or ((5308, 10001, 45681) if session.full else (500,)):
                run = functools.partial(slide_encoder.measure, tiles, options.gigapath, grid, changes, session.device, session.seconds)
                groups.append(Group(f"slides L={tiles}{' and the original' if options.gigapath else ''}", run))
        if "parity" in options.tasks:
            given = [name for name in ("torchscale", "gigapath", "weights", "tiles") if getattr(options, name)]
            groups.append(Group(f"parity {' '.join(given)}", functools.partial(_parity, options)))
        return groups

    def tables(self, results: Results) -> list[Table]:
        found: list[Table] = []
        for model, rows in by(results.rows, "model"):
            # a folder of an earlier version may hold rows of tasks that are gone
            for task, mine in ((task, mine) for task, mine in by(rows, "task") if task in _DOING):
                placed = compared(labelled(mine, place="{B} × {N:,}"), "tokens_per_s", "dense", "place", more_is_better=True)
                about = [f"{row.name}: {row.case['attention']}" for row in mine if "attention" in row.case]
                dtypes = " or ".join(dict.fromkeys(row.case["dtype"] for row in mine))
                caption = f"{dtypes}; {'; '.join(dict.fromkeys(about))}; tokens/s of all requests; ×: over dense"
                found += listing(placed, _COLUMNS, title=f"{model}: {_DOING[task]}", caption=caption)
        slides = labelled(having(results, task="slides"), "{name}, {tiles:,} tiles")
        columns = {"ms": ("ms", 1.0), "peak, GB": ("peak_bytes", 1e-9), "off float32": ("output", 1.0)}
        title = "a training step of Prov-GigaPath's slide encoder on one slide"
        found += listing(slides, columns, title=title, caption=slide_encoder.CAPTION)
        columns = {"output": ("output", 1.0), "gradient": ("gradient", 1.0)}
        title = "greatest difference from TorchScale's models over the greatest value, float32 on a CPU"
        return [*found, *listing(having(results, task="parity"), columns, title=title), *failures(results)]

    def verdict(self, results: Results) -> tuple[bool, list[Table]]:
        return any(row.note.startswith("wrong") for row in having(results, task="parity")), []


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
    return Shape(preset, {name: value for name, value in changes.items() if value != getattr(config, name)}, not session.full)


def _groups(session: Session, preset: str, task: str) -> Iterator[Group]:
    options, full, shape = session.options, session.full, _shape(preset, session)
    large = shape.model("dense", device="meta").num_parameters > _LARGE
    where: dict[str, Any] = {"device": session.device, "dtype": session.dtype, "seconds": session.seconds}
    where |= {"new_tokens": (16 if task == "decode" else 32) if full else 8, "is_random": task == "decode"}
    for context in options.contexts or (_CONTEXTS[large] if full else TASKS[task]):
        several = 8 if full else 4
        batches = options.batches or ([1] if task == "generate" and several * context > _PROMPTS[large] else [1, several])
        for batch in batches:
            run = functools.partial(generate, shape, tuple(options.kinds), context, batch, **where)
            yield Group(f"{task} {shape.name} N={context} B={batch} {str(session.dtype).removeprefix('torch.')}", run)


def _parity(options: argparse.Namespace) -> Iterator[Row]:
    tiles, grid = (options.tiles or [1201])[0], options.grid or 100
    if options.torchscale is None and options.gigapath is None:
        where = torchscale.URLS[torchscale.TORCHSCALE]
        raise UsageError(f"--tasks parity compares with nothing; expected --torchscale PATH, --gigapath PATH or both: git clone {where}")
    if tiles > grid**2:
        raise UsageError(f"--tiles {tiles} do not fit on a grid of {grid} × {grid}: raise --grid")
    return torchscale.parity(options.torchscale, options.gigapath, options.weights, tiles, grid)
