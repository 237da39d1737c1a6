"""Block-sparse attention over several GPUs beside the same work on one GPU alone: correctness first, then speed.

    torchrun --nproc-per-node 4 benchmarks/ring_blocks.py
    torchrun --nproc-per-node 4 benchmarks/ring_blocks.py --patterns random window --density 0.1 --tokens 32768 65536 --heads 16/16 --graphs

TFLOP/s per GPU of useful pairs: 4·pairs·D forward, 3.5 times that with the backward; pairs are those that the pattern keeps, of all
heads, over the number of GPUs. *alone*: one GPU's n queries, from the middle of the sequence, on all N keys at hand, so on equally
many keys for each query and without an exchange; all GPUs at once, in the same run. A time is the median of the slowest rank; ``--graphs``
times both as CUDA graphs, too. Layouts: contiguous, zigzag, or what ``balanced_layout`` makes of the pattern (balanced).
Without a GPU everything runs over gloo, for a try.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _ring_bench import _captured
from _ring_world import Failed, World, facts, freed

from dilated_attention import balanced_layout, block_sparse_attention, local_positions, ring_block_sparse_attention, shard_sequence
from dilated_attention.distributed import Layout
from dilated_attention.distributed.comm.comm_stats import traffic
from dilated_attention.engine.blocks.lists import block_lists, clear_block_lists
from dilated_attention.pattern import BlockPattern, RandomBlocks, with_sparsity
from dilated_attention.pattern.blocks.kept_blocks import unpacked

PATTERNS: dict[str, Callable[[float], BlockPattern]] = {
    "random": lambda density: RandomBlocks(density),
    "shared-random": lambda density: RandomBlocks(density, per_head=False),
    "window": lambda density: with_sparsity(density, "local"),
    "bigbird": lambda density: with_sparsity(density, "big_bird"),
}
TRAINING = 3.5
Tensors = list[torch.Tensor]


class Case:
    """A pattern on a sequence of W·n positions."""

    def __init__(self, args: argparse.Namespace, world: World, name: str, n: int, layout: str) -> None:
        self.args, self.world, self.name = args, world, name
        self.n, self.N = n, n * world.size
        self.H, self.Hk = (int(x) for x in args.heads.split("/"))
        self.pattern = PATTERNS[name](args.density).at(self.N)
        self.layout: str | Layout = layout
        if layout == "balanced":
            self.layout = balanced_layout(self.pattern, self.N, world.size, self.H, is_causal=args.causal, device=world.device)
        self.title = f"{name} {layout} {args.density:g} {args.heads}x{args.head_dim} n={n}{' causal' if args.causal else ''}"

    def tensors(self, rows: int, seed: int, dtype: torch.dtype | None = None) -> Tensors:
        """q, k, v, dout (1, rows, heads, D)."""
        device = self.world.device
        generator = torch.Generator(device).manual_seed(seed)
        dtype = dtype or getattr(torch, self.args.dtype)
        heads = (self.H, self.Hk, self.Hk, self.H)
        return [torch.randn((1, rows, h, self.args.head_dim), generator=generator, device=device).to(dtype) for h in heads]

    def ring(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return ring_block_sparse_attention(  # type: ignore[no-any-return]
            q, k, v, self.pattern, layout=self.layout, seq_len=self.N, is_causal=self.args.causal, head_steps=self.args.head_steps,
            backend=self.args.backend,
        )  # fmt: skip

    @property
    def offset(self) -> int:
        return (self.N - self.n) // 2 // 128 * 128

    def alone(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return block_sparse_attention(  # type: ignore[no-any-return]
            q, k, v, self.pattern, query_offset=self.offset, is_causal=self.args.causal, backend=self.args.backend
        )

    def pairs(self, first: int, count: int) -> int:
        """Kept pairs of some queries and all heads."""
        lists = block_lists(
            self.pattern, self.N, self.H, first_query=first, num_queries=count, is_causal=self.args.causal, device=self.world.device
        )
        whole = lists.num_entries if lists.masks is None else int((lists.masks < 0).sum())
        pairs = whole * lists.q_block * lists.k_block
        if lists.masks is not None:
            of_mask = unpacked(lists.bits).flatten(1).sum(1)
            pairs += int(of_mask[lists.masks[lists.masks >= 0].long()].sum())
        return pairs * (1 if lists.num_heads > 1 else self.H)

    def errors(self) -> dict[str, float]:
        """Relative, of this rank's rows against the whole on one process in float64."""
        whole = self.tensors(self.N, 7)
        leaves = [x.double().requires_grad_() for x in whole[:3]]
        out = block_sparse_attention(*leaves, self.pattern, is_causal=self.args.causal, backend="math")
        true = [out.detach(), *torch.autograd.grad(out, leaves, whole[3].double())]
        shards = shard_sequence(None, whole, [1] * 4, layout=self.layout)
        mine = [x.requires_grad_() for x in shards[:3]]
        found = self.ring(*mine)
        got = [found.detach(), *torch.autograd.grad(found, mine, shards[3])]
        rows = local_positions(None, self.N, layout=self.layout, device=self.world.device)
        pairs = zip(("out", "dq", "dk", "dv"), got, true, strict=True)
        return {name: float((a.double() - b[:, rows]).norm() / b[:, rows].norm().clamp(min=1e-30)) for name, a, b in pairs}

    def received(self) -> int:
        """Bytes that this rank receives forward."""
        q, k, v, _ = self.tensors(self._rows(), 1)
        with torch.no_grad(), traffic() as counted:
            self.ring(q, k, v)
        return counted.received

    def _rows(self) -> int:
        return len(local_positions(None, self.N, layout=self.layout))

    def call(self, which: str, training: bool) -> Callable[[], Any]:
        rows = (self._rows(), self._rows()) if which == "ring" else (self.n, self.N)
        q, _, _, dout = self.tensors(rows[0], 1000 + self.world.rank)
        _, k, v, _ = self.tensors(rows[1], 2000 + self.world.rank)
        function = self.ring if which == "ring" else self.alone
        leaves = [x.requires_grad_(training) for x in (q, k, v)]

        def run() -> Any:
            out = function(*leaves)
            return torch.autograd.grad(out, leaves, dout) if training else out

        return run


def bench(case: Case, args: argparse.Namespace, write: Callable[[dict[str, Any]], None]) -> None:
    world = case.world
    flops = {
        "ring": 4 * case.args.head_dim * case.pairs(0, case.N) / world.size,
        "alone": 4 * args.head_dim * case.pairs(case.offset, case.n),
    }
    received = world.everywhere(case.received)
    imbalance = f" imbalance {case.layout.imbalance:.3f}" if isinstance(case.layout, Layout) else ""
    world.say(f"{case.title:<52} | receives up to {max(received) / 2**20:.1f} MiB a GPU forward{imbalance}")
    for training in (False, True):
        for graphs in (False, True) if args.graphs and world.is_cuda else (False,):
            rates = {}
            for which in ("alone", "ring"):
                with freed(world):
                    world.everywhere(functools.partial(_ready, case, which, training, graphs))
                    record = world.measure(lambda: _made[-1](), seconds=args.seconds)
                    _made.clear()
                rates[which] = flops[which] * (TRAINING if training else 1.0) / record["seconds"] / 1e12
                how = ("training" if training else "forward") + (" graph" if graphs else "")
                share = f" | {rates['ring'] / rates['alone']:.3f} of alone" if which == "ring" else ""
                times = f"{1e3 * record['seconds']:9.3f} ms ±{100 * record['spread']:5.1f} %"
                world.say(f"{case.title:<52} | {how:<14} | {which:<5} | {times} | {rates[which]:6.1f} TFLOP/s{share}")
                write({"key": f"{case.title} | {how} | {which}", "tflops": rates[which], "received": max(received)} | record)


_made: list[Callable[[], Any]] = []


def _ready(case: Case, which: str, training: bool, graphs: bool) -> None:
    call = case.call(which, training)
    # a graph is captured on all ranks together, after plain calls that open communicators and choose kernels
    for _ in range(2):
        call()
    _made.append(_captured(call) if graphs else call)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--patterns", nargs="+", default=["window", "bigbird", "random"], choices=list(PATTERNS))
    parser.add_argument("--layouts", nargs="+", default=["balanced"], choices=["balanced", "contiguous", "zigzag"])
    parser.add_argument("--density", type=float, default=0.1)
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--tokens", nargs="+", type=int, default=[32768], help="per GPU, n")
    parser.add_argument("--heads", default="16/16", help="query/kv")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--head-steps", type=int, help="steps of heads; default: the model's choice")
    parser.add_argument("--check-tokens", type=int, default=1024, help="per GPU, before timing; 0 for no check")
    parser.add_argument("--graphs", action="store_true", help="time both as CUDA graphs, too")
    parser.add_argument("--seconds", type=float, default=0.4, help="of one measurement, beside its warm-up")
    parser.add_argument("--timeout", type=float, default=120, help="seconds after which a collective that hangs ends the process")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--commit", help="what the results are of, where there is no git")
    return parser.parse_args()


def main() -> None:
    args = parse()
    world = World(args.timeout)
    about = facts(world, args.commit) | {"dtype": args.dtype}
    world.say(f"# {' '.join(f'{key} {value}' for key, value in about.items())}")

    def write(record: dict[str, Any]) -> None:
        if args.json is not None and world.rank == 0:
            with args.json.open("a") as file:
                file.write(json.dumps(record | about) + "\n")

    for name in args.patterns:
        for layout in args.layouts:
            try:
                if args.check_tokens:
                    small = Case(args, world, name, args.check_tokens, layout)
                    found = world.everywhere(small.errors)
                    worst = {key: max(errors[key] for errors in found) for key in found[0]}
                    world.say(f"{small.title:<52} | " + "  ".join(f"{key} {error:.2e}" for key, error in worst.items()))
                for n in args.tokens:
                    clear_block_lists()
                    bench(Case(args, world, name, n, layout), args, write)
            except Failed as failed:
                world.say(f"{name} {layout}: FAILED: {failed}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
