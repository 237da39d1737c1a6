"""Training steps of Prov-GigaPath's slide encoder, 12 layers of 768, on one slide: this library's, and the original's from a user's copy.

A step is the forward in training mode, the sum of the slide's vector and its backward; no optimiser. Weights and tiles are random. The
original runs as its authors run it, float32 weights under float16 autocast, on each kernel that can stand in for flash-attn.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dilated_attention.bench import accuracy
from dilated_attention.bench.measure.limits import Refused, counted, within
from dilated_attention.bench.measure.timing import captured, in_turns
from dilated_attention.bench.models.torchscale import GIGAPATH, find, imported, load
from dilated_attention.bench.report.rows import Row
from dilated_attention.distributed import shard_sequence
from dilated_attention.factory import create_model
from dilated_attention.functional.fused_layers import plain_layers
from dilated_attention.integrations.torchscale import from_torchscale
from dilated_attention.models.sharded import average_gradients

_AUTOCAST, _HALF = {"autocast": torch.bfloat16}, {"dtype": torch.bfloat16}
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "cuda": {
        "bf16 autocast": _AUTOCAST,
        "bf16 autocast, activation checkpointing": _AUTOCAST | {"checkpoint_activations": True},
        "bf16 autocast, plain layers": _AUTOCAST | {"plain": True},
        "bf16 weights": _HALF,
        "bf16 weights, CUDA graph": _HALF | {"graph": True},
    },
    "cpu": {"float32": {}, "float32, activation checkpointing": {"checkpoint_activations": True}, "float32, plain layers": {"plain": True}},
}
# the module, what is called, and its inputs
Built = tuple[nn.Module, Callable[..., torch.Tensor], tuple[torch.Tensor, ...]]
_THEIRS = {"cuda": torch.float16}
KERNELS = {"cuda": ("sdpa_flash", "sdpa_cudnn"), "cpu": ("sdpa_cpu",)}
CAPTION = "forward in training mode and backward, no optimiser; peaks include weights and gradients; original: float16 autocast on a GPU"


def slide(tiles: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (embeddings (1, L, 1536), pixels x, y (1, L, 2)) of L tiles, row by row in a square."""
    side, place = math.isqrt(tiles - 1) + 1, torch.arange(tiles)
    coords = torch.stack((place % side, place // side), -1).float() * 256
    return torch.randn(1, tiles, 1536, generator=torch.Generator().manual_seed(tiles)).to(device), coords[None].to(device)


def measure(tiles: int, gigapath: Path | None, grid: int, changes: dict[str, Any], device: torch.device, seconds: float) -> Iterator[Row]:
    """Yields a row for each variant, and for the original, whose output is compared first: ``ms``, ``peak_bytes`` with the weights.

    Args:
        gigapath: folder of the user's copy of Prov-GigaPath.
        grid: side of the original's table of positions: theirs is 1000, which takes 3 GB.
        changes: fields of the preset, for a smaller model of this library's.
    """
    case = {"task": "slides", "tiles": tiles}
    runs: dict[str, Callable[[], dict[str, float]]] = {}
    errors, note = dict[str, float](), ""
    if gigapath is not None:
        gigapath = find(gigapath, GIGAPATH)
        for kernel in KERNELS[device.type]:
            name = f"original, {kernel} in place of flash-attn"
            runs[name] = functools.partial(_original, gigapath, grid, kernel, tiles, device, seconds)
        found, note = within(functools.partial(_difference, gigapath, grid, tiles, device), device)
        errors = found or {}
        note = note or accuracy.wrong(errors, accuracy.BOUNDS[_THEIRS.get(device.type, torch.float32)])
    for label, settings in VARIANTS[device.type].items():
        runs[f"ours, {label}"] = functools.partial(_ours, tiles, device, seconds, **changes | settings)
    for name, run in runs.items():
        # a speed-up on another result would be none
        values, why = (None, note) if note else within(run, device)
        yield Row(name=name, case=case, values=values or {}, errors=errors if name.startswith("original") else {}, note=why)


def _ours(
    tiles: int, device: torch.device, seconds: float, *, autocast: torch.dtype | None = None, plain: bool = False, graph: bool = False,
    **options: Any,
) -> dict[str, float]:  # fmt: skip
    def build() -> Built:
        torch.manual_seed(0)
        model: Any = create_model("gigapath-12l768d", **options, device=device).train()
        x, coords = slide(tiles, device)
        return model, model, (x.to(options.get("dtype", x.dtype)), coords)

    with plain_layers() if plain else contextlib.nullcontext():
        return _timed(build, autocast, device, seconds, is_graph=graph)


def _original(gigapath: Path, grid: int, kernel: str, tiles: int, device: torch.device, seconds: float) -> dict[str, float]:
    def build() -> Built:
        module = _loaded(grid, kernel, device).train()
        return module, lambda *x: module(*x)[0], slide(tiles, device)

    with imported(gigapath, gigapath / "gigapath"):
        return _timed(build, _THEIRS.get(device.type), device, seconds)


def _loaded(grid: int, kernel: str, device: torch.device) -> nn.Module:
    return load("gigapath.slide_encoder", kernel).gigapath_slide_enc12l768d(slide_ngrids=grid).to(device)  # type: ignore[no-any-return]


def _difference(gigapath: Path, grid: int, tiles: int, device: torch.device) -> dict[str, float]:
    """Returns how far the slide's vector of the original, as it runs, is off this library's in float32 with the same weights."""
    x, dtype = slide(min(tiles, 5308), device), _THEIRS.get(device.type)
    with imported(gigapath, gigapath / "gigapath"), torch.no_grad():
        module = _loaded(grid, KERNELS[device.type][0], device).eval()
        exact = from_torchscale(module).to(device).eval()(*x)
        return {"output": accuracy.relative(_vector(dtype, lambda *x: module(*x)[0], *x), exact)}


def _timed(
    build: Callable[[], Built], autocast: torch.dtype | None, device: torch.device, seconds: float, *, is_graph: bool = False
) -> dict[str, float]:
    on_gpu = device.type == "cuda"
    with counted(device) as peak:
        step = functools.partial(_step, autocast, *build())
        step()
        if on_gpu:
            # kernels are chosen and compiled, which does not count
            step()
            torch.cuda.reset_peak_memory_stats(device)
            step()
    call = captured(step) if is_graph else step
    values = in_turns({"step": call}, device, seconds=seconds, least=5 if on_gpu else 1)["step"]
    # a graph's memory is its own, and not counted
    return values if is_graph else values | {"peak_bytes": peak.bytes}


def _step(autocast: torch.dtype | None, module: nn.Module, model: Callable[..., torch.Tensor], x: Sequence[torch.Tensor]) -> None:
    module.zero_grad(set_to_none=True)
    _vector(autocast, model, *x).sum().backward()


def _vector(autocast: torch.dtype | None, model: Callable[..., torch.Tensor], *x: torch.Tensor) -> torch.Tensor:
    with torch.autocast(x[0].device.type, autocast, enabled=autocast is not None):
        return model(*x).float()


def sharded_step(is_shared: bool, tiles: int, device: torch.device, bound: float) -> Callable[[], None]:
    """Returns a training step on one slide over all processes, or on one: without dropout, under bf16 autocast on a GPU.

    The gradients' mean over the processes is part of it. The slide's vector of shared tiles is compared with one process's first.

    Raises:
        Refused: that vector is off by more than ``bound``.
    """
    is_shared = is_shared and dist.is_initialized()
    options: dict[str, Any] = {"dropout": 0.0, "drop_path": 0.0, "device": device}
    # one layer for a try
    options |= {"num_layers": 1} if device.type == "cpu" else {}
    x: Sequence[torch.Tensor] = slide(tiles, device)

    def made(**group: Any) -> Any:
        torch.manual_seed(0)
        return create_model("gigapath-12l768d", **options, **group).train()

    autocast, model = torch.bfloat16 if device.type == "cuda" else None, made(group=dist.group.WORLD) if is_shared else made()
    if is_shared:
        shards = shard_sequence(None, x, [1, 1])
        with torch.no_grad():
            error = accuracy.relative(_vector(autocast, model, *shards), _vector(autocast, made(), *x).double())
        if note := accuracy.wrong({"vector": error}, bound):
            raise Refused(note)
        x = shards

    def step() -> None:
        _step(autocast, model, model, x)
        if is_shared:
            average_gradients(model)

    return step
