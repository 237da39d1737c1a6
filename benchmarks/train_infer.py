"""Whole models: steps of generating, training steps of slide encoders, and equality with the code that they come from.

python -m benchmarks train-infer --tasks slides --tiles 45681 --gigapath PATH
python -m benchmarks train-infer --tasks slides --slides 50 --gigapath PATH          # slides of different lengths, each new
python -m benchmarks train-infer --tasks decode --models longnet-125m --contexts 64k 1M
python -m benchmarks train-infer --tasks parity --torchscale PATH --gigapath PATH

Models that decode have known shapes and random weights, which all kinds of attention share, and are timed in turns. A training step is
one of Prov-GigaPath's slide encoder on one slide: the forward in training mode, the sum of the slide's vector and its backward. The
original, from a user's copy, runs float32 weights under float16 autocast, on each kernel that can stand in for flash-attn.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch

from benchmarks import copies
from benchmarks.copies import GIGAPATH, find, imported, load
from benchmarks.report import Group, Row
from benchmarks.timing import attempt, captured, loop, peak_bytes, release
from benchmarks.truth import BOUNDS, relative, wrong
from dilated_attention.factory import MODEL_PRESETS, create_model
from dilated_attention.integrations.torchscale import from_torchscale
from dilated_attention.models import KVCache, LongNetConfig, LongNetLM
from dilated_attention.models.generation import Stepper, prefill
from dilated_attention.parsing import size
from dilated_attention.pattern import GlobalLocal, LocalWindow, geometric_branches

ABOUT = "models: steps of generating, training steps of slide encoders, equality with TorchScale"
TASKS = ("decode", "slides", "parity")
MODELS = sorted(
    name for name, config in MODEL_PRESETS.items() if isinstance(config, LongNetConfig) and config.is_causal and config.kind == "dilated"
)
KINDS = ("dense", "dilated", "block_sparse", "dilated-1M", "global-local")
# layers of the models compared with float64; each adds its own rounding
_LAYERS = 2
# turns of steps; places of the context at which a turn takes steps, and positions that these spread over
_TURNS, _PLACES, _SPREAD = 5, 4, 32768
_HALF, _AUTOCAST, _LEAN = {"dtype": torch.bfloat16}, {"autocast": torch.bfloat16}, {"checkpoint_activations": True}
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "cuda": {
        "bf16 autocast": _AUTOCAST,
        "bf16 autocast, activation checkpointing": _AUTOCAST | _LEAN,
        "bf16 weights": _HALF,
        "bf16 weights, CUDA graph": _HALF | {"graph": True},
    },
    "cpu": {"float32": {}, "float32, activation checkpointing": _LEAN},
}
_THEIRS = {"cuda": torch.float16}
KERNELS = {"cuda": ("sdpa_flash", "sdpa_cudnn"), "cpu": ("sdpa_cpu",)}
# tiles of slides that differ: log-normal, mean near 7,500, as slides of a clinic are; the first WARM of them are not counted
_MEAN, _SIGMA, _FEWEST, _MOST, WARM = 8.75, 0.6, 600, 22_000, 12
Slide = Sequence[torch.Tensor]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--tasks", nargs="+", choices=TASKS, default=["decode"], help="default: decode")
    add("--models", nargs="+", choices=MODELS, metavar="preset", default=["longnet-125m"], help="to decode; default: longnet-125m")
    add("--kinds", nargs="+", choices=KINDS, default=["dilated", "dense"], help="default: dilated dense")
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
            made.append((f"decode {preset} N={context} B={batch}", functools.partial(decode, preset, context, batch, options)))
    if "slides" in options.tasks:
        for tiles in options.tiles or [300 if small else 10001]:
            label = f"slides L={tiles}{f' and {options.slides} slides' if options.slides else ''}"
            made.append((label, functools.partial(train, tiles, options)))
    if "parity" in options.tasks:
        made.append(("parity", functools.partial(copies.measure_parity, options)))
        copies.check_parity(options)
    return made


def model_of(preset: str, kind: str, **options: Any) -> LongNetLM:
    """Creates a preset with a kind of attention."""
    lengths, rates = geometric_branches(2**20, 2048)
    kinds: dict[str, dict[str, Any]] = {
        "dense": {"attention": "dense"},
        "dilated": {},
        "dilated-1M": {"segment_lengths": lengths, "dilation_rates": rates},
        "global-local": {"attention": "block_sparse", "block_pattern": GlobalLocal((2047, 0), 128)},
        "block_sparse": {"attention": "block_sparse", "block_pattern": LocalWindow((1023, 0), block_size=128)},
    }
    # XPOS overflows bfloat16 in long contexts, and the other positions take the same time
    is_xpos = getattr(MODEL_PRESETS[preset], "positions", "") == "xpos"
    return create_model(preset, **kinds[kind] | ({"positions": "rotary"} if is_xpos else {}) | options)


def _narrow(preset: str) -> dict[str, Any]:
    """Returns the options of a model of two layers with the preset's head dim, which is compared, and timed in a small run."""
    config = cast(LongNetConfig, MODEL_PRESETS[preset])
    width = {"num_heads": 2, "embed_dim": 2 * config.head_dim, "ffn_dim": 256} | ({"num_kv_heads": 1} if config.num_kv_heads else {})
    return {"vocab_size": 256, "num_layers": _LAYERS} | width


@functools.cache
def errors_of(preset: str, kind: str, device: torch.device, dtype: torch.dtype, length: int = 2560) -> dict[str, float]:
    """Returns relative errors against float64 on plain PyTorch, of two narrow layers with the preset's head dim. ``"logits"``;
    ``"decoded"``: logits of tokens decoded with a cache, against those of the whole sequence. The context is longer than the window and the
    first segment."""
    narrow, new = _narrow(preset), 4
    torch.manual_seed(1)
    model = model_of(preset, kind, **narrow, device=device, dtype=dtype).eval()
    exact = model_of(preset, kind, **narrow, device="cpu", dtype=torch.float64, backend="math")
    exact.load_state_dict(model.state_dict())
    tokens = torch.randint(256, (1, length), generator=torch.Generator().manual_seed(2))
    here = tokens.to(device)
    with torch.no_grad():
        logits, true = model(here).cpu(), exact.eval()(tokens)
        cache = KVCache(model.config, 1, length, device=device, dtype=dtype)
        decoded = [prefill(model, here[:, : length - new], cache)]
        step = Stepper(model, cache)
        decoded += [step(here[:, i : i + 1]).clone() for i in range(length - new, length)]
    return {"logits": relative(logits, true), "decoded": relative(torch.stack(decoded, 1).cpu(), true[:, length - new - 1 :])}


class _Writer:
    """One kind's model with its cache full of random numbers. A turn writes again at the same places."""

    def __init__(self, context: int, new_tokens: int, batch: int, model: LongNetLM) -> None:
        parameter = next(model.parameters())
        # what a row reads depends on its place in its segments
        spread = min(_SPREAD, context // 2) // _PLACES
        self.places = [context - new_tokens - i * spread for i in range(_PLACES)]
        self.model, self.new_tokens = model.eval(), new_tokens
        self.cache = KVCache(model.config, batch, context, device=parameter.device, dtype=parameter.dtype)
        self.last = torch.zeros(batch, 1, dtype=torch.int64, device=parameter.device)
        for x in (*self.cache.keys, *self.cache.values):
            # a piece at a time: float32 noise for all of a cache would need its memory twice
            for part in x.flatten(0, 1).split(2**20):
                part.normal_()
        self.step = Stepper(self.model, self.cache)
        # captures the step
        self.turn()

    @torch.no_grad()
    def turn(self) -> None:
        """Writes the likeliest tokens after each place."""
        for place in self.places:
            self.cache.lengths = [place] * self.cache.num_requests
            self.cache.positions.fill_(place)
            for _ in range(self.new_tokens):
                self.last = self.step(self.last).argmax(-1, keepdim=True)


def decode(preset: str, context: int, batch: int, options: argparse.Namespace) -> list[Row]:
    """Returns a row for each kind: ``called``, a step of all requests, ``tokens_per_s`` of all, ``cache_bytes``."""
    device, dtype = options.device, options.dtype
    case = {"task": "decode", "model": preset, "N": context, "B": batch, "dtype": str(dtype).removeprefix("torch.")}
    rows, writers, new_tokens = dict[str, Row](), dict[str, _Writer](), 8 if options.is_small else 16
    sizes = _narrow(preset) if options.is_small else {}
    torch.manual_seed(0)
    weights = model_of(preset, "dense", **sizes, device=device, dtype=dtype).state_dict(keep_vars=True)
    for kind in options.kinds:
        errors, note = attempt(errors_of, preset, kind, device, dtype)
        note = note or wrong(errors or {}, _LAYERS * BOUNDS[dtype])
        release()
        if not note:
            model = model_of(preset, kind, **sizes, device="meta", dtype=dtype)
            model.load_state_dict(weights, assign=True)
            writer, note = attempt(_Writer, context, new_tokens, batch, model)
            writers |= {} if writer is None else {kind: writer}
        rows[kind] = Row(name=kind, case=case, errors=errors or {}, note=note)
    samples = [{kind: loop(writer.turn, device) for kind, writer in writers.items()} for _ in range(_TURNS)]
    for kind, writer in writers.items():
        ms = statistics.median(took[kind] for took in samples) / new_tokens / len(writer.places)
        values = {"called": ms, "tokens_per_s": 1000 * batch / ms, "cache_bytes": writer.cache.nbytes}
        rows[kind] = replace(rows[kind], values=values)
    return list(rows.values())


def slide(tiles: int, device: torch.device, dtype: torch.dtype | None = None) -> Slide:
    """Returns (embeddings (1, L, 1536), pixels (1, L, 2)) of L tiles, row by row in a square."""
    side, place = math.isqrt(tiles - 1) + 1, torch.arange(tiles)
    coords = torch.stack((place % side, place // side), -1).float() * 256
    return torch.randn(1, tiles, 1536, generator=torch.Generator().manual_seed(tiles)).to(device, dtype), coords[None].to(device)


def lengths_of_slides(count: int, scale: float = 1.0, seed: int = 7) -> list[int]:
    """Draws the numbers of tiles of slides from a log-normal."""
    draw = random.Random(seed)
    return [max(2, int(scale * min(_MOST, max(_FEWEST, draw.lognormvariate(_MEAN, _SIGMA))))) for _ in range(count)]


def train(tiles: int, options: argparse.Namespace) -> Iterator[Row]:
    """Yields a row for each variant, and for the original, whose output is compared first: ``called``, ``peak_bytes`` with the weights.
    With ``options.slides`` also times of so many slides whose numbers of tiles differ, each new."""
    device, vary = options.device, options.slides
    case = {"task": "slides", "tiles": tiles} | ({"slides": vary} if vary else {})
    runs, errors, why = dict[str, Callable[[], dict[str, float]]](), dict[str, float](), ""
    if options.gigapath is not None:
        gigapath = find(options.gigapath, GIGAPATH)
        # at lengths that change, the kernel that its authors run
        for kernel in KERNELS[device.type][: 1 if vary else None]:
            runs[f"original, {kernel} in place of flash-attn"] = functools.partial(_original, gigapath, kernel, tiles, options)
        release()
        difference, why = attempt(functools.partial(_difference, gigapath, tiles, options))
        errors = difference or {}
        why = why or wrong(errors, BOUNDS[_THEIRS.get(device.type, torch.float32)])
    for label, settings in VARIANTS[device.type].items():
        if not (vary and len(settings) > 1):
            runs[f"ours, {label}"] = functools.partial(_ours, tiles, options, **settings)
    for name, run in runs.items():
        release()
        is_original = name.startswith("original")
        # a speed-up on another result would be none
        values, note = (None, why) if is_original and why else attempt(run)
        yield Row(name=name, case=case, values=values or {}, note=note, errors=errors if is_original else {})


def _ours(
    tiles: int, options: argparse.Namespace, *, autocast: torch.dtype | None = None, graph: bool = False, **settings: Any
) -> dict[str, float]:
    settings |= {"num_layers": 1} if options.is_small else {}
    torch.manual_seed(0)
    model = create_model("gigapath-12l768d", **settings, device=options.device).train()
    return _timed(_Step(model, autocast, settings.get("dtype")), tiles, options, is_graph=graph)


def _original(gigapath: Path, kernel: str, tiles: int, options: argparse.Namespace) -> dict[str, float]:
    with imported(gigapath, gigapath / "gigapath"):
        return _timed(_Step(_loaded(kernel, options).train(), _THEIRS.get(options.device.type)), tiles, options)


def _loaded(kernel: str, options: argparse.Namespace) -> Any:
    return load("gigapath.slide_encoder", kernel).gigapath_slide_enc12l768d(slide_ngrids=options.grid).to(options.device)


def _difference(gigapath: Path, tiles: int, options: argparse.Namespace) -> dict[str, float]:
    """Returns how far the slide's vector of the original, as it runs, is off this library's in float32 with the same weights."""
    x = slide(min(tiles, 5308), options.device)
    with imported(gigapath, gigapath / "gigapath"), torch.no_grad():
        module = _loaded(KERNELS[options.device.type][0], options).eval()
        exact = from_torchscale(module).to(options.device).eval()(*x)
        return {"output": relative(_Step(module, _THEIRS.get(options.device.type)).vector(*x), exact)}


def _timed(step: _Step, tiles: int, options: argparse.Namespace, *, is_graph: bool = False) -> dict[str, float]:
    """Returns the median of a step on equal slides, and with ``slides`` the mean of new slides and its ratio to equal ones by tiles."""
    device, vary, on_gpu = options.device, options.slides, options.device.type == "cuda"
    once = functools.partial(loop, device=device)
    make = functools.partial(slide, device=device, dtype=step.dtype)
    equal: Callable[[], None] = functools.partial(step, make(tiles))
    # compiles kernels; of the first variant, if no original came before it, it is the first step of the process
    first = {"first_ms": once(equal)}
    peak = peak_bytes(equal, device)
    call = captured(equal) if is_graph else equal
    count = max(3 if on_gpu else 1, min(20, int(1000 * options.seconds / once(call))))
    median = statistics.median(once(call) for _ in range(count))
    if not vary:
        # of a graph, and of what was there before: weights and gradients are part of what a step needs
        total = torch.cuda.max_memory_allocated(device) if on_gpu else peak
        return {"called": median, "tokens_per_s": 1000 * tiles / median} | ({} if is_graph else first | {"peak_bytes": total})
    lengths = lengths_of_slides(WARM + vary, 1.0 if on_gpu else tiles / 8000)
    for length in lengths[:WARM]:
        once(functools.partial(step, make(length)))
    times = [once(functools.partial(step, x)) for x in map(make, lengths[WARM:])]
    mean, mean_tiles = statistics.fmean(times), statistics.fmean(lengths[WARM:])
    values = {"called": median, "new_ms": mean, "worst_ms": max(times), "scaled": mean / (median * mean_tiles / tiles)}
    values["tokens_per_s"] = 1000 * mean_tiles / mean
    return values | first | ({"peak_bytes": torch.cuda.max_memory_allocated(device)} if on_gpu else {})


@dataclass
class _Step:
    """A training step on one slide."""

    module: Any
    autocast: torch.dtype | None
    dtype: torch.dtype | None = None

    def vector(self, *x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(x[0].device.type, self.autocast, enabled=self.autocast is not None):
            out = self.module(*x)
        # the original returns a list of one
        return (out if isinstance(out, torch.Tensor) else out[0]).float()

    def __call__(self, x: Slide) -> None:
        self.module.zero_grad(set_to_none=True)
        self.vector(*x).sum().backward()
