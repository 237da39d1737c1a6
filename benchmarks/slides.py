"""Training steps of Prov-GigaPath's slide encoder, 12 layers of 768, on one slide: this library's, and the original's from a user's copy.

A step is the forward in training mode, the sum of the slide's vector and its backward; no optimiser. Weights and tiles are random. The
original runs as its authors run it, float32 weights under float16 autocast, on each kernel that can stand in for flash-attn.
"""

from __future__ import annotations

import argparse
import functools
import math
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.copies import GIGAPATH, find, imported, load
from benchmarks.report import Row
from benchmarks.timing import attempt, captured, counted, loop, release
from benchmarks.truth import BOUNDS, relative, wrong
from dilated_attention.factory import create_model
from dilated_attention.integrations.torchscale import from_torchscale

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
_MEAN, _SPREAD, _FEWEST, _MOST, WARM = 8.75, 0.6, 600, 22_000, 12
Slide = Sequence[torch.Tensor]


def slide(tiles: int, device: torch.device) -> Slide:
    """Returns (embeddings (1, L, 1536), pixels (1, L, 2)) of L tiles, row by row in a square."""
    side, place = math.isqrt(tiles - 1) + 1, torch.arange(tiles)
    coords = torch.stack((place % side, place // side), -1).float() * 256
    return torch.randn(1, tiles, 1536, generator=torch.Generator().manual_seed(tiles)).to(device), coords[None].to(device)


def lengths_of_slides(count: int, scale: float = 1.0, seed: int = 7) -> list[int]:
    """Draws the numbers of tiles of slides from a log-normal."""
    draw = random.Random(seed)
    return [max(2, int(scale * min(_MOST, max(_FEWEST, draw.lognormvariate(_MEAN, _SPREAD))))) for _ in range(count)]


def measure(tiles: int, options: argparse.Namespace) -> Iterator[Row]:
    """Yields a row for each variant, and for the original, whose output is compared first: ``called``, ``peak_bytes`` with the weights.

    With ``options.slides`` also times of so many slides whose numbers of tiles differ, each new.
    """
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
    step, dtype = _Step(autocast, **settings, device=options.device), settings.get("dtype", torch.float32)

    def make(length: int) -> Slide:
        x, coords = slide(length, options.device)
        return x.to(dtype), coords

    return _timed(step, make, tiles, options, is_graph=graph)


def _original(gigapath: Path, kernel: str, tiles: int, options: argparse.Namespace) -> dict[str, float]:
    with imported(gigapath, gigapath / "gigapath"):
        step = _Step(_THEIRS.get(options.device.type), _loaded(kernel, options).train())
        return _timed(step, functools.partial(slide, device=options.device), tiles, options)


def _loaded(kernel: str, options: argparse.Namespace) -> Any:
    return load("gigapath.slide_encoder", kernel).gigapath_slide_enc12l768d(slide_ngrids=options.grid).to(options.device)


def _difference(gigapath: Path, tiles: int, options: argparse.Namespace) -> dict[str, float]:
    """Returns how far the slide's vector of the original, as it runs, is off this library's in float32 with the same weights."""
    x = slide(min(tiles, 5308), options.device)
    with imported(gigapath, gigapath / "gigapath"), torch.no_grad():
        module = _loaded(KERNELS[options.device.type][0], options).eval()
        exact = from_torchscale(module).to(options.device).eval()(*x)
        return {"output": relative(_Step(_THEIRS.get(options.device.type), module).vector(*x), exact)}


def _timed(
    step: _Step, make: Callable[[int], Slide], tiles: int, options: argparse.Namespace, *, is_graph: bool = False
) -> dict[str, float]:
    """Returns the median of a step on equal slides, and with ``slides`` the mean of new slides and its ratio to equal ones by tiles."""
    device, vary, on_gpu = options.device, options.slides, options.device.type == "cuda"
    once = functools.partial(loop, device=device)
    equal: Callable[[], None] = functools.partial(step, make(tiles))
    equal()
    with counted(device) as peak:
        equal()
    call = captured(equal) if is_graph else equal
    count = max(3 if on_gpu else 1, min(20, int(1000 * options.seconds / once(call))))
    median = statistics.median(once(call) for _ in range(count))
    if not vary:
        # of a graph, and of what was there before: weights and gradients are part of what a step needs
        total = torch.cuda.max_memory_allocated(device) if on_gpu else peak.bytes
        return {"called": median, "tokens_per_s": 1000 * tiles / median} | ({} if is_graph else {"peak_bytes": total})
    lengths = lengths_of_slides(WARM + vary, 1.0 if on_gpu else tiles / 8000)
    for length in lengths[:WARM]:
        once(functools.partial(step, make(length)))
    before = torch.cuda.memory_stats(device)["num_device_alloc"] if on_gpu else 0
    times = [once(functools.partial(step, x)) for x in map(make, lengths[WARM:])]
    mean, mean_tiles = statistics.fmean(times), statistics.fmean(lengths[WARM:])
    values = {"called": median, "new_ms": mean, "worst_ms": max(times), "scaled": mean / (median * mean_tiles / tiles)}
    values["tokens_per_s"] = 1000 * mean_tiles / mean
    if on_gpu:
        values |= {"allocations": torch.cuda.memory_stats(device)["num_device_alloc"] - before}
        values |= {"peak_bytes": torch.cuda.max_memory_allocated(device), "reserved_bytes": torch.cuda.memory_reserved(device)}
    return values


class _Step:
    """A training step on one slide; ``module`` is by default this library's encoder of ``settings``."""

    def __init__(self, autocast: torch.dtype | None, module: Any = None, **settings: Any) -> None:
        torch.manual_seed(0)
        self.autocast, self.module = autocast, module or create_model("gigapath-12l768d", **settings).train()

    def vector(self, *x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(x[0].device.type, self.autocast, enabled=self.autocast is not None):
            out = self.module(*x)
        # the original returns a list of one
        return (out if isinstance(out, torch.Tensor) else out[0]).float()

    def __call__(self, x: Slide) -> None:
        self.module.zero_grad(set_to_none=True)
        self.vector(*x).sum().backward()
