"""Whole models: steps of generating, training steps of slide encoders, and equality with the code that they come from.

python -m benchmarks train-infer --tasks slides --tiles 45681 --gigapath PATH
python -m benchmarks train-infer --tasks slides --slides 50 --gigapath PATH          # slides of different lengths, each new
python -m benchmarks train-infer --tasks decode --models longnet-125m --contexts 64k 1M
python -m benchmarks train-infer --tasks parity --torchscale PATH --gigapath PATH
"""

from __future__ import annotations

import argparse
import functools
import itertools
from pathlib import Path

from benchmarks import decode, parity, slides
from benchmarks.report import Group
from dilated_attention.factory import MODEL_PRESETS
from dilated_attention.models import LongNetConfig
from dilated_attention.parsing import size

ABOUT = "models: steps of generating, training steps of slide encoders, equality with TorchScale"
TASKS = ("decode", "slides", "parity")
MODELS = sorted(name for name, config in MODEL_PRESETS.items() if isinstance(config, LongNetConfig) and config.is_causal)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--tasks", nargs="+", choices=TASKS, default=["decode"], help="default: decode")
    add("--models", nargs="+", choices=MODELS, metavar="preset", default=["longnet-125m"], help="to decode; default: longnet-125m")
    add("--kinds", nargs="+", choices=decode.KINDS, default=["dilated", "dense"], help="default: dilated dense")
    add("--contexts", type=size, nargs="+", help="default: 64k 1M; small 2k")
    add("--batches", type=size, nargs="+", default=[1], help="requests continued together; default: 1")
    add("--tiles", type=size, nargs="+", help="of a slide; default: 10001; small 300")
    add("--slides", type=size, default=0, help="also so many slides of different numbers of tiles, each new")
    add("--grid", type=size, help="side of the original's table of positions; default: 1000; small 100")
    add("--gigapath", type=Path, metavar="PATH", help="your own copy of Prov-GigaPath, for slides and parity")
    add("--torchscale", type=Path, metavar="PATH", help="your own copy of TorchScale, for parity")
    add("--weights", type=Path, metavar="FILE", help="Prov-GigaPath's slide_encoder.pth for parity; default: random")


def groups(options: argparse.Namespace) -> list[Group]:
    small, made = options.is_small, list[Group]()
    options.grid = options.grid or (100 if small or "parity" in options.tasks else 1000)
    if "decode" in options.tasks:
        contexts = options.contexts or ([2048] if small else [65536, 2**20])
        for preset, context, batch in itertools.product(options.models, contexts, options.batches):
            made.append((f"decode {preset} N={context} B={batch}", functools.partial(decode.measure, preset, context, batch, options)))
    if "slides" in options.tasks:
        for tiles in options.tiles or [300 if small else 10001]:
            label = f"slides L={tiles}{f' and {options.slides} slides' if options.slides else ''}"
            made.append((label, functools.partial(slides.measure, tiles, options)))
    if "parity" in options.tasks:
        made.append(("parity", functools.partial(parity.measure, options)))
        parity.check(options)
    return made
