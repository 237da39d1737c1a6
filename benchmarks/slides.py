"""Training steps of Prov-GigaPath's slide encoder, 12 layers of 768, on one slide: this library's, and the original's from a user's copy.

A step is the forward in training mode, the sum of the slide's vector and its backward; no optimiser. Weights and tiles are random. The
original runs as its authors run it, float32 weights under float16 autocast, on each kernel that can stand in for flash-attn.
"""

from __future__ import annotations

import functools
import math
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.copies import GIGAPATH, find, imported, load
from benchmarks.report import Row
from benchmarks.timing import Refused, attempt, captured, counted, loop, release
from benchmarks.truth import BOUNDS, relative, wrong
from dilated_attention.distributed import shard_sequence
from dilated_attention.factory import create_model
from dilated_attention.integrations.torchscale import from_torchscale
from dilated_attention.models.sharded import average_gradients

_AUTOCAST, _HALF = {"autocast": torch.bfloat16}, {"dtype": torch.bfloat16}
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "cuda": {
        "bf16 autocast": _AUTOCAST,
        "bf16 autocast, activation checkpointing": _AUTOCAST | {"checkpoint_activations": True},
        "bf16 weights": _HALF,
        "bf16 weights, CUDA graph": _HALF | {"graph": True},
    },
    "cpu": {"float32": {}, "float32, activation checkpointing": {"checkpoint_activations": True}},
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


def measure(
    tiles: int, gigapath: Path | None, grid: int, changes: dict[str, Any], device: torch.device, seconds: float, vary: int = 0
) -> Iterator[Row]:
    """Yields a row for each variant, and for the original, whose output is compared first: ``called``, ``peak_bytes`` with the weights.

    Args:
        gigapath: folder of the user's copy of Prov-GigaPath.
        grid: side of the original's table of positions: theirs is 1000, which takes 3 GB.
        changes: fields of the preset, for a smaller model of this library's.
        vary: number of slides whose numbers of tiles differ, each new, in addition to equal slides of ``tiles``.
    """
    case = {"task": "slides", "tiles": tiles}
    runs: dict[str, Callable[[], dict[str, float]]] = {}
    errors, note = dict[str, float](), ""
    how: dict[str, Any] = {"tiles": tiles, "device": device, "seconds": seconds, "vary": vary}
    if gigapath is not None:
        gigapath = find(gigapath, GIGAPATH)
        # at lengths that change, the kernel that its authors run
        for kernel in KERNELS[device.type][: 1 if vary else None]:
            runs[f"original, {kernel} in place of flash-attn"] = functools.partial(_original, gigapath, grid, kernel, **how)
        release()
        difference, note = attempt(functools.partial(_difference, gigapath, grid, tiles, device))
        errors = difference or {}
        note = note or wrong(errors, BOUNDS[_THEIRS.get(device.type, torch.float32)])
    for label, settings in VARIANTS[device.type].items():
        if not (vary and len(settings) > 1):
            runs[f"ours, {label}"] = functools.partial(_ours, **how, **changes | settings)
    for name, run in runs.items():
        is_original = name.startswith("original")
        release()
        # a speed-up on another result would be none
        values, why = (None, note) if is_original and note else attempt(run)
        yield Row(
            name=name, case=case | ({"slides": vary} if vary else {}), values=values or {}, note=why, errors=errors if is_original else {}
        )


def _ours(
    tiles: int, device: torch.device, seconds: float, vary: int, *, autocast: torch.dtype | None = None, graph: bool = False, **options: Any
) -> dict[str, float]:
    torch.manual_seed(0)
    model: Any = create_model("gigapath-12l768d", **options, device=device).train()
    dtype = options.get("dtype", torch.float32)

    def make(length: int) -> Slide:
        x, coords = slide(length, device)
        return x.to(dtype), coords

    return _timed(model, model, make, autocast, tiles, device, seconds, vary, is_graph=graph)


def _original(gigapath: Path, grid: int, kernel: str, tiles: int, device: torch.device, seconds: float, vary: int) -> dict[str, float]:
    with imported(gigapath, gigapath / "gigapath"):
        module = _loaded(grid, kernel, device).train()
        make = functools.partial(slide, device=device)
        return _timed(module, lambda *x: module(*x)[0], make, _THEIRS.get(device.type), tiles, device, seconds, vary)


def _loaded(grid: int, kernel: str, device: torch.device) -> nn.Module:
    return load("gigapath.slide_encoder", kernel).gigapath_slide_enc12l768d(slide_ngrids=grid).to(device)  # type: ignore[no-any-return]


def _difference(gigapath: Path, grid: int, tiles: int, device: torch.device) -> dict[str, float]:
    """Returns how far the slide's vector of the original, as it runs, is off this library's in float32 with the same weights."""
    x, dtype = slide(min(tiles, 5308), device), _THEIRS.get(device.type)
    with imported(gigapath, gigapath / "gigapath"), torch.no_grad():
        module = _loaded(grid, KERNELS[device.type][0], device).eval()
        exact = from_torchscale(module).to(device).eval()(*x)
        return {"output": relative(_vector(dtype, lambda *x: module(*x)[0], *x), exact)}


def _timed(
    module: nn.Module, model: Callable[..., torch.Tensor], make: Callable[[int], Slide], autocast: torch.dtype | None, tiles: int,
    device: torch.device, seconds: float, vary: int, *, is_graph: bool = False,
) -> dict[str, float]:  # fmt: skip
    """Returns the median of a step on equal slides, and with ``vary`` the mean of new slides and its ratio to equal ones by tiles."""
    step, on_gpu = functools.partial(_step, autocast, module, model), device.type == "cuda"
    equal: Callable[[], None] = functools.partial(step, make(tiles))
    equal()
    with counted(device) as peak:
        equal()
    call = captured(equal) if is_graph else equal
    once = loop(call, device)
    median = statistics.median(loop(call, device) for _ in range(max(3 if on_gpu else 1, min(20, int(1000 * seconds / once)))))
    if not vary:
        # of a graph, and of what was there before: weights and gradients are part of what a step needs
        total = torch.cuda.max_memory_allocated(device) if on_gpu else peak.bytes
        return {"called": median, "tokens_per_s": 1000 * tiles / median} | ({} if is_graph else {"peak_bytes": total})
    lengths = lengths_of_slides(WARM + vary, tiles / 8000 if not on_gpu else 1.0)
    times = [loop(functools.partial(step, make(n)), device) for n in lengths[:WARM]]
    before = torch.cuda.memory_stats(device)["num_device_alloc"] if on_gpu else 0
    times = [loop(functools.partial(step, x), device) for x in map(make, lengths[WARM:])]
    mean, mean_tiles = statistics.fmean(times), statistics.fmean(lengths[WARM:])
    values = {"called": median, "new_ms": mean, "worst_ms": max(times), "scaled": mean / (median * mean_tiles / tiles)}
    values["tokens_per_s"] = 1000 * mean_tiles / mean
    if on_gpu:
        values |= {"allocations": torch.cuda.memory_stats(device)["num_device_alloc"] - before}
        values |= {"peak_bytes": torch.cuda.max_memory_allocated(device), "reserved_bytes": torch.cuda.memory_reserved(device)}
    return values


def _step(autocast: torch.dtype | None, module: nn.Module, model: Callable[..., torch.Tensor], x: Slide) -> None:
    module.zero_grad(set_to_none=True)
    _vector(autocast, model, *x).sum().backward()


def _vector(autocast: torch.dtype | None, model: Callable[..., torch.Tensor], *x: torch.Tensor) -> torch.Tensor:
    with torch.autocast(x[0].device.type, autocast, enabled=autocast is not None):
        return model(*x).float()


def sharded_step(is_shared: bool, tiles: int, device: torch.device) -> Callable[[], None]:
    """Returns a training step on one slide over all processes, or on one: without dropout, under bf16 autocast on a GPU.

    The gradients' mean over the processes is part of it. The slide's vector of shared tiles is compared with one process's first.

    Raises:
        Refused: that vector is off.
    """
    is_shared = is_shared and dist.is_initialized()
    options: dict[str, Any] = {"dropout": 0.0, "drop_path": 0.0, "device": device}
    # one layer for a try
    options |= {"num_layers": 1} if device.type == "cpu" else {}
    x: Slide = slide(tiles, device)

    def made(**group: Any) -> Any:
        torch.manual_seed(0)
        return create_model("gigapath-12l768d", **options, **group).train()

    autocast, model = torch.bfloat16 if device.type == "cuda" else None, made(group=dist.group.WORLD) if is_shared else made()
    if is_shared:
        shards = shard_sequence(None, x, [1, 1])
        with torch.no_grad():
            error = relative(_vector(autocast, model, *shards), _vector(autocast, made(), *x).double())
        if note := wrong({"vector": error}, BOUNDS[autocast or torch.float32]):
            raise Refused(note)
        x = shards

    def step() -> None:
        _step(autocast, model, model, x)
        if is_shared:
            average_gradients(model)

    return step
