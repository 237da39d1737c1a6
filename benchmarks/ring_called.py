"""Rings as people call them: a loop that never synchronises, host time beside it, one GPU alone on the whole sequence in the same run.

    torchrun --nproc-per-node 4 benchmarks/ring_called.py --cases dense-4096 gigapath-25000
    torchrun --nproc-per-node 4 benchmarks/ring_called.py --graphs --json $OUT/called.jsonl

Cases are named by tokens a GPU, n: dense causal 32/8 heads of 128; longnet 12 heads of 64, causal, w = 2048·4^i, r = 4^i; gigapath
Prov-GigaPath's segments, 16 heads of 48; random, window and bigbird keep a tenth of the blocks, 16 heads of 64. Every case is first held
to one GPU's result on the whole sequence. *called*: ``--calls`` calls back to back over their number, the slowest rank. *host*: the time
until those calls return. *graph*: the same call as a CUDA graph. Efficiency: one GPU on all W·n tokens, over W times ours.
FLASH3_LIBRARY (and FLASH3_CUDART) in the environment load FlashAttention-3's library. Without a GPU everything runs over gloo, on
sequences a hundredth as long, for a try.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _ring_bench import _captured
from _ring_world import Failed, World, facts, freed

import dilated_attention as da
from dilated_attention.backends.flash import flash3
from dilated_attention.pattern import RandomBlocks, with_sparsity

GIGAPATH = ([1024, 5792, 32768, 185363, 1048576], [1, 2, 4, 8, 16])
LONGNET = ([2048 * 4**i for i in range(6)], [4**i for i in range(6)])
BLOCKS = {
    "random": lambda: RandomBlocks(0.1),
    "window": lambda: with_sparsity(0.1, "local"),
    "bigbird": lambda: with_sparsity(0.1, "big_bird"),
}
LENGTHS = {"dense": (16384, 4096), "longnet": (131072, 32768), "gigapath": (25000, 100000), "random": (32768,), "window": (32768,)}
LENGTHS["bigbird"] = (32768,)
Attend = Callable[..., torch.Tensor]


class Case:
    """A ring and the same attention on one process."""

    def __init__(self, name: str, n: int, world: int, scale: int, backend: str = "auto") -> None:
        self.name, self.n, self.N = name, n, n * world
        self.heads = {"dense": (32, 8, 128), "longnet": (12, 12, 64), "gigapath": (16, 16, 48)}.get(name, (16, 16, 64))
        self.layout = "zigzag" if name == "dense" else "contiguous"
        self.causal = name in ("dense", "longnet")
        if name == "dense":
            self.ring: Attend = lambda *x: da.ring_attention(*x, is_causal=True, layout="zigzag", seq_len=self.N, backend=backend)
            self.alone: Attend = lambda *x: da.attention(*x, is_causal=True, backend=backend)
        elif name in BLOCKS:
            pattern = BLOCKS[name]().at(self.N)
            self.ring = lambda *x: da.ring_block_sparse_attention(*x, pattern, seq_len=self.N, backend=backend)
            self.alone = lambda *x: da.block_sparse_attention(*x, pattern, backend=backend)
        else:
            lengths, rates = LONGNET if name == "longnet" else GIGAPATH
            kept = [i for i, w in enumerate(lengths) if name == "gigapath" or w // scale <= self.N]
            branches = [max(1, lengths[i] // scale) for i in kept], [rates[i] for i in kept]
            options = {"is_causal": self.causal, "backend": backend}
            self.ring = lambda *x: da.ring_dilated_attention(*x, *branches, seq_len=self.N, **options)
            self.alone = lambda *x: da.dilated_attention(*x, *branches, **options)

    def flops(self, training: bool) -> float:
        H, _, D = self.heads
        return 4.0 * D * H * self.N * (self.N + 1) / 2 * (3.5 if training else 1.0)

    def tensors(self, rows: int, device: torch.device, dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
        H, Hk, D = self.heads
        generator = torch.Generator(device).manual_seed(seed)
        shapes = [(1, rows, heads, D) for heads in (H, Hk, Hk, H)]
        made = [torch.randn(shape, generator=generator, device=device, dtype=dtype) for shape in shapes]
        return [*(x.requires_grad_() for x in made[:3]), made[3]]


def step_of(attend: Attend, x: list[torch.Tensor], training: bool) -> Callable[[], Any]:
    def forward() -> Any:
        with torch.no_grad():
            return attend(*x[:3])

    def both() -> Any:
        out = attend(*x[:3])
        return (out, *torch.autograd.grad(out, x[:3], x[3]))

    return both if training else forward


def right(case: Case, world: World, dtype: torch.dtype) -> dict[str, float]:
    """Largest relative error, on any rank, of out, dq, dk, dv against one GPU on the whole sequence."""
    whole = case.tensors(case.N, world.device, dtype, 7)
    expected = step_of(case.alone, whole, True)()
    mine = da.shard_sequence(None, [x.detach() for x in whole], [1] * 4, layout=case.layout)
    mine = [*(x.requires_grad_() for x in mine[:3]), mine[3]]
    found = step_of(case.ring, mine, True)()
    wanted = da.shard_sequence(None, [x.detach() for x in expected], [1] * 4, layout=case.layout)
    errors = [float((a.detach().float() - b.float()).norm() / b.float().norm()) for a, b in zip(found, wanted, strict=True)]
    return dict(zip(("out", "dq", "dk", "dv"), errors, strict=True))


def called(step: Callable[[], Any], world: World, calls: int, ranks: int | None) -> tuple[float, float]:
    """(seconds of one call as called, seconds until the host has issued one), of the slowest rank."""

    def run() -> tuple[float, float]:
        for _ in range(3):
            step()
        best = []
        for _ in range(3):
            world.synchronize()
            if ranks is None:
                dist.barrier()
                world.synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                step()
            issued = time.perf_counter()
            world.synchronize()
            best.append((time.perf_counter() - start, issued - start))
        total, host = sorted(best)[1]
        return total / calls, host / calls

    found = world.everywhere(run, ranks)
    return max(total for total, _ in found), max(host for _, host in found)


def measure(case: Case, world: World, args: argparse.Namespace, dtype: torch.dtype) -> dict[str, Any]:
    record: dict[str, Any] = {"case": f"{case.name}-{case.n}", "ranks": world.size}
    if not args.no_check:
        by_rank = world.everywhere(lambda: right(case, world, dtype))
        record["errors"] = {name: max(errors[name] for errors in by_rank) for name in by_rank[0]}
    for training in (False, True):
        tag = "f+b" if training else "f"
        local = case.tensors(case.n, world.device, dtype, world.rank)
        step = step_of(case.ring, local, training)
        ours, host = called(step, world, args.calls, None)
        row = {"called": ours, "host": host}
        if args.graphs and world.is_cuda:
            made: list[Callable[[], Any]] = []
            world.everywhere(lambda made=made, step=step: made.append(_captured(step)))
            row["graph"] = called(made[0], world, args.calls, None)[0]
        del step, local
        with freed(world):
            pass
        if not args.no_alone:
            # every process computes the whole, on its own GPU
            whole = case.tensors(case.N, world.device, dtype, 7)
            row["alone"], row["alone_host"] = called(step_of(case.alone, whole, training), world, args.calls, 1)
            row["efficiency"] = row["alone"] / world.size / ours
            del whole
        if case.name == "dense":
            row["tflops"] = case.flops(training) / world.size / ours / 1e12
        record[tag] = row
        with freed(world):
            pass
    return record


def line_of(record: dict[str, Any]) -> str:
    parts = [f"{record['case']:<16}"]
    for tag in ("f", "f+b"):
        row = record[tag]
        text = f"{tag} {row['called'] * 1e3:7.3f} ms host {row['host'] * 1e3:6.3f}"
        text += f" graph {row['graph'] * 1e3:7.3f}" if "graph" in row else ""
        text += f" alone {row['alone'] * 1e3:7.3f} eff {row['efficiency']:.2f}" if "alone" in row else ""
        text += f" {row['tflops']:.0f} TFLOP/s" if "tflops" in row else ""
        parts.append(text)
    if "errors" in record:
        parts.append("errors " + " ".join(f"{error:.1e}" for error in record["errors"].values()))
    return " | ".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [f"{name}-{n}" for name, lengths in LENGTHS.items() for n in lengths]
    parser.add_argument("--cases", nargs="+", default=names, help="name-n, of " + ", ".join(LENGTHS))
    parser.add_argument("--calls", type=int, default=20)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--graphs", action="store_true")
    parser.add_argument("--no-alone", action="store_true")
    parser.add_argument("--no-check", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--timeout", type=float, default=120)
    args = parser.parse_args()
    if "FLASH3_LIBRARY" in os.environ:
        flash3.load_library(os.environ["FLASH3_LIBRARY"], os.environ.get("FLASH3_CUDART"))
    world = World(args.timeout)
    scale, dtype = (1, torch.bfloat16) if world.is_cuda else (100, torch.float32)
    for text in args.cases:
        name, n = text.rsplit("-", 1)
        case = Case(name, int(n) // scale, world.size, scale, args.backend)
        try:
            record = measure(case, world, args, dtype) | facts(world, None)
        except Failed as failed:
            world.say(f"{text}: FAILED: {failed}")
            continue
        world.say(line_of(record))
        if args.json and world.rank == 0:
            with args.json.open("a") as file:
                file.write(json.dumps(record) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
