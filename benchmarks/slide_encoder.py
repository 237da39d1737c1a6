"""Training of Prov-GigaPath's slide encoder, 12 layers of 768, on one slide: time and peak memory of a forward and a backward.

    python benchmarks/slide_encoder.py --save slides.jsonl                        # this library on a GPU
    python benchmarks/slide_encoder.py --gigapath ~/prov-gigapath                 # beside the original, from your own copy of its source
    python benchmarks/slide_encoder.py --device cpu --tiles 5308 --warmup 0 --rounds 1    # in float32

Weights are random; tiles are random vectors on a square of the slide's grid. A step is the forward in training mode, the sum of the
slide's vector and its backward; no optimiser. Columns: median time, peak of allocated memory (weights and gradients included; on a
CPU the process's resident memory) and that of reserved memory. The original runs as its authors run it, float32 weights
under float16 autocast, in fp16 on each kernel that can stand in for flash-attn; its faster kernel counts. First its output in evaluation
is set beside this library's with the same weights: a speed-up on another result would be none. FLASH3_LIBRARY (and FLASH3_CUDART) in the
environment load FlashAttention-3's library for this library's backends.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from _gigapath import KERNELS, Original
from _timing import machine, save
from _torchscale_sources import GIGAPATH, find
from torch import nn

from dilated_attention import create_model
from dilated_attention.backends.flash import flash3
from dilated_attention.functional.fused_layers import plain_layers

TILES = (5308, 10001, 45681)
Step = Callable[[], Any]


def slide(tiles: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(embeddings (1, L, 1536), pixels (1, L, 2)) of L tiles, row by row in a square."""
    generator = torch.Generator().manual_seed(tiles)
    side = math.isqrt(tiles - 1) + 1
    place = torch.arange(tiles)
    coords = torch.stack((place // side, place % side), -1).float() * 256
    return torch.randn(1, tiles, 1536, generator=generator).to(device), coords[None].to(device)


def ours(dropout: bool, device: str, dtype: torch.dtype, **options: Any) -> nn.Module:
    rates = {} if dropout else {"dropout": 0.0, "drop_path": 0.0}
    torch.manual_seed(0)
    return create_model("gigapath-12l768d", **rates, **options, device=device, dtype=dtype).train()


def step_of(model: Callable[..., torch.Tensor], module: nn.Module, x: tuple[torch.Tensor, ...], autocast: torch.dtype | None) -> Step:
    def step() -> None:
        module.zero_grad(set_to_none=True)
        with torch.autocast(x[0].device.type, autocast, enabled=autocast is not None):
            loss = model(*x).float().sum()
        loss.backward()

    return step


class Memory:
    """Peak bytes of what runs between ``start`` and ``peak``."""

    def __init__(self, device: str) -> None:
        self.on_gpu = device == "cuda"

    def wait(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    def start(self) -> None:
        gc.collect()
        self.wait()
        if self.on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        else:
            with contextlib.suppress(OSError):
                # resets the peak of the resident memory, on Linux
                Path("/proc/self/clear_refs").write_text("5")

    def peak(self) -> tuple[int, int]:
        """(allocated, reserved); on a CPU the resident memory twice, 0 where the system does not tell."""
        self.wait()
        if self.on_gpu:
            return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        status = Path("/proc/self/status")
        lines = status.read_text().splitlines() if status.exists() else []
        resident = next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM")), 0)
        return resident, resident


def timed(step: Step, memory: Memory) -> float:
    memory.wait()
    start = time.perf_counter()
    step()
    memory.wait()
    return time.perf_counter() - start


def measure(label: str, tiles: int, step: Step, args: argparse.Namespace, **facts: Any) -> dict[str, Any]:
    """Run, print and save one row."""
    memory = Memory(args.device)
    record = {"what": label, "tiles": tiles, **facts}
    try:
        # kernels are chosen and compiled
        for _ in range(args.warmup):
            step()
        memory.start()
        times = [timed(step, memory)]
        record["peak_bytes"], record["reserved_bytes"] = memory.peak()
        times += [timed(step, memory) for _ in range(args.rounds - 1)]
        record["seconds"] = statistics.median(times)
        figures = f"{1e3 * record['seconds']:10.1f} ms {record['peak_bytes'] / 1e9:8.2f} GB {record['reserved_bytes'] / 1e9:8.2f} GB"
    except torch.OutOfMemoryError:
        record["peak_bytes"] = record["seconds"] = math.inf
        figures = "out of memory"
    print(f"{tiles:>8} {label:<62} {figures}", flush=True)
    save(args.save, {**record, **machine()})
    return record


def variants(args: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    """(label, settings of ``run_ours``): the first is set beside the original."""
    if args.device == "cpu":
        yield "float32", {}
        yield "float32, activation checkpointing", {"checkpoint_activations": True}
        yield "float32, plain layers", {"plain": True}
        return
    low = {"autocast": torch.bfloat16}
    yield "bf16 autocast", low
    yield "bf16 autocast, no dropout", low | {"dropout": False}
    yield "bf16 autocast, activation checkpointing", low | {"checkpoint_activations": True}
    yield "bf16 autocast, plain layers", low | {"plain": True}
    yield "bf16 weights", {"dtype": torch.bfloat16}
    yield "bf16 weights, no dropout", {"dtype": torch.bfloat16, "dropout": False}
    yield "bf16 weights, CUDA graph", {"dtype": torch.bfloat16, "graph": True}
    if not args.no_compile:
        yield "bf16 weights, torch.compile", {"dtype": torch.bfloat16, "compiled": True}
        yield "bf16 autocast, plain layers, torch.compile", low | {"plain": True, "compiled": True}


def run_ours(
    label: str,
    tiles: int,
    args: argparse.Namespace,
    *,
    dtype: torch.dtype = torch.float32,
    autocast: torch.dtype | None = None,
    dropout: bool = True,
    plain: bool = False,
    compiled: bool = False,
    graph: bool = False,
    **options: Any,
) -> dict[str, Any]:
    model = ours(dropout, args.device, dtype, **options)
    if compiled:
        model.encoder.compile()
    tiles_in, coords = slide(tiles, args.device)
    step = step_of(model, model, (tiles_in.to(dtype), coords), autocast)
    if graph:
        step = captured(step)
    with plain_layers() if plain else contextlib.nullcontext():
        facts = {"dtype": str(dtype), "autocast": str(autocast), "dropout": dropout, "plain": plain, "compiled": compiled, "graph": graph}
        facts |= options
        return measure(f"ours, {label}", tiles, step, args, **facts)


def captured(step: Step) -> Step:
    """The step as a CUDA graph: what a GPU takes where the host does not hold it up."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def check(original: Original, args: argparse.Namespace) -> None:
    """Both in evaluation with the same weights, on a GPU under float16 autocast; ours in float32, too."""
    from dilated_attention.integrations.torchscale import from_torchscale

    x = slide(min(args.tiles), args.device)
    original.use(KERNELS[args.device][0])
    mine = from_torchscale(original.module).to(args.device).eval()
    original.module.eval()
    with torch.no_grad():
        exact = mine(*x)
        with torch.autocast(args.device, torch.float16, enabled=args.device == "cuda"):
            theirs, half = original(*x).float(), mine(*x).float()
    errors = [float((y - exact).norm() / exact.norm()) for y in (theirs, half)]
    print(
        f"slide's vector of {min(args.tiles)} tiles, off ours in float32: the original {errors[0]:.1e}, ours as the original ran "
        f"{errors[1]:.1e}"
    )
    save(args.save, {"what": "parity", "tiles": min(args.tiles), "original": errors[0], "ours": errors[1], **machine()})


def run_original(folder: Path, args: argparse.Namespace) -> dict[tuple[int, bool], dict[str, Any]]:
    """{(tiles, with dropout): the row of its faster kernel}."""
    best: dict[tuple[int, bool], dict[str, Any]] = {}
    autocast = torch.float16 if args.device == "cuda" else None
    original = Original(folder, grid=args.grid, device=args.device)
    check(original, args)
    original.module.train()
    for dropout in (True, False):
        if not dropout:
            original.drop_nothing()
        for tiles in args.tiles:
            step = step_of(original, original.module, slide(tiles, args.device), autocast)
            for kernel in KERNELS[args.device]:
                original.use(kernel)
                label = f"original, {'fp16 autocast' if autocast else 'float32'}, {kernel}{'' if dropout else ', no dropout'}"
                row = measure(label, tiles, step, args, dropout=dropout, kernel=kernel)
                if row["seconds"] <= best.get((tiles, dropout), row)["seconds"]:
                    best[tiles, dropout] = row
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiles", type=int, nargs="+", default=TILES)
    parser.add_argument("--gigapath", help="folder of your own copy of Prov-GigaPath's source, which is not part of this repository")
    parser.add_argument("--grid", type=int, default=1000, help="side of the original's table of positions")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--only", nargs="+", help="labels of this library's rows to run, such as 'bf16 autocast'; None for all")
    parser.add_argument("--save", help="append results to this file, a JSON object a line")
    args = parser.parse_args()
    if os.environ.get("FLASH3_LIBRARY"):
        flash3.load_library(os.environ["FLASH3_LIBRARY"], os.environ.get("FLASH3_CUDART"))
    folder = find(args.gigapath, GIGAPATH) if args.gigapath else None
    print(f"{'tiles':>8} {'':<62} {'time':>13} {'peak':>11} {'reserved':>11}")
    chosen = [variant for variant in variants(args) if variant[0] in (args.only or [variant[0]])]
    if not chosen:
        raise SystemExit(f"--only {args.only}: expected one of {[label for label, _ in variants(args)]}")
    (label, settings), *others = chosen
    first = {tiles: run_ours(label, tiles, args, **settings) for tiles in args.tiles}
    if folder is not None:
        for (tiles, dropout), row in run_original(folder, args).items():
            if dropout:
                compare(first[tiles], row, args)
    for label, settings in others:
        # one length is enough of the compiler's time
        for tiles in [max(args.tiles)] if settings.get("compiled") else args.tiles:
            run_ours(label, tiles, args, **settings)


def compare(mine: dict[str, Any], theirs: dict[str, Any], args: argparse.Namespace) -> None:
    speed, memory = (theirs[key] / mine[key] for key in ("seconds", "peak_bytes"))
    print(f"{mine['tiles']:>8} {mine['what']}: {speed:.2f} times as fast as the original, at 1/{memory:.2f} of its memory", flush=True)
    save(args.save, {"what": "ratio", "tiles": mine["tiles"], "speed": speed, "memory": memory, **machine()})


if __name__ == "__main__":
    main()
