"""Packed documents over a ring: dense causal attention, 64 query and 8 key/value heads of 128, on layouts with and without balance.

    torchrun --nproc-per-node 4 benchmarks/ring_packed.py --tokens 131072

Lengths are drawn log-normally, most short and a few long, none above a quarter of the whole. Every case is first held to one GPU's result
on the whole sequence. *called*: calls back to back over their number, the slowest rank. TFLOP/s a GPU count the pairs of the documents; the
dense row is one causal document, whose rate is the one to compare with. Imbalance: the most pairs of a rank over the mean. FLASH3_LIBRARY
(and FLASH3_CUDART) in the environment load FlashAttention-3's library. Without a GPU everything runs over gloo, on a sequence a hundredth
as long, for a try.

--ring-flash-attention PATH compares with the llama3 form of zhuzilin's ring-flash-attention, from a copy of your own and on the same
kernel, with all key/value heads at a time and with one. torch's context_parallel has no form for packed documents.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from _ring_competitors import packed_ring_flash_attention, stand_in
from _ring_world import World, freed
from ring_called import called, step_of

import dilated_attention as da
from dilated_attention.backends.flash import flash3
from dilated_attention.distributed import balanced_layout, spans

HEADS, KV_HEADS, HEAD_DIM = 64, 8, 128


def drawn(tokens: int, seed: int) -> list[int]:
    """Boundaries of documents."""
    generator = torch.Generator().manual_seed(seed)
    bounds = [0]
    while bounds[-1] < tokens:
        length = int(torch.empty(()).log_normal_(mean=6.5, std=1.4, generator=generator))
        bounds.append(min(tokens, bounds[-1] + max(1, min(length, tokens // 4))))
    return bounds


def pairs_of(bounds: list[int], first: int, last: int) -> int:
    """Causal pairs of the queries [first, last)."""
    total = 0
    for start, end in itertools.pairwise(bounds):
        a, b = max(first, start) - start, min(last, end) - start
        total += (b * (b + 1) - a * (a + 1)) // 2 if a < b else 0
    return total


def tensors(rows: int, device: torch.device, dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator(device).manual_seed(seed)
    shapes = [(1, rows, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    made = [torch.randn(shape, generator=generator, device=device, dtype=dtype) for shape in shapes]
    return [*(x.requires_grad_() for x in made[:3]), made[3]]


def right(ring: Callable[..., Any], alone: Callable[..., Any], layout: Any, tokens: int, world: World, dtype: torch.dtype) -> list[float]:
    whole = tensors(tokens, world.device, dtype, 7)
    expected = step_of(alone, whole, True)()
    mine = da.shard_sequence(None, [x.detach() for x in whole], [1] * 4, layout=layout)
    found = step_of(ring, [*(x.requires_grad_() for x in mine[:3]), mine[3]], True)()
    wanted = da.shard_sequence(None, [x.detach() for x in expected], [1] * 4, layout=layout)
    return [float((a.detach().float() - b.float()).norm() / b.float().norm()) for a, b in zip(found, wanted, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=131072)
    parser.add_argument("--layouts", nargs="+", default=["balanced", "contiguous", "zigzag"])
    parser.add_argument("--calls", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--ring-flash-attention", metavar="PATH")
    args = parser.parse_args()
    if "FLASH3_LIBRARY" in os.environ:
        flash3.load_library(os.environ["FLASH3_LIBRARY"], os.environ.get("FLASH3_CUDART"))
    world = World(120)
    tokens, dtype = (args.tokens, torch.bfloat16) if world.is_cuda else (args.tokens // 100, torch.float32)
    packed = drawn(tokens, args.seed)
    world.say(f"{tokens} tokens in {len(packed) - 1} documents, the longest {max(b - a for a, b in itertools.pairwise(packed))}")
    cases = [("dense", [0, tokens], "zigzag"), *(("packed", packed, name) for name in args.layouts)]
    # also around the backward, which autograd calls
    stands = contextlib.ExitStack()
    if args.ring_flash_attention:
        stands.enter_context(stand_in("flash3"))
        cases += [("llama3", packed, str(heads)) for heads in (KV_HEADS, 1)]
    for what, bounds, name in cases:
        cu_seqlens = None if what == "dense" else torch.tensor(bounds, dtype=torch.int32, device=world.device)
        begun = time.perf_counter()
        layout: Any = balanced_layout(None, tokens, world.size, is_causal=True, cu_seqlens=bounds) if name == "balanced" else name
        layout = "contiguous" if what == "llama3" else layout
        dealt = time.perf_counter() - begun
        rows = [spans(tokens, rank, world.size, layout) for rank in range(world.size)]
        held = [sum(pairs_of(bounds, start, stop) for start, stop, _ in mine) for mine in rows]
        options = {"is_causal": True, "cu_seqlens": cu_seqlens, "backend": args.backend}

        def ring(*x: torch.Tensor, layout: Any = layout, options: dict[str, Any] = options) -> Any:
            return da.ring_attention(*x, layout=layout, seq_len=tokens, **options)

        if what == "llama3":
            ring = packed_ring_flash_attention(args.ring_flash_attention, cu_seqlens, int(name), None)

        def alone(*x: torch.Tensor, options: dict[str, Any] = options) -> Any:
            return da.attention(*x, **options)

        errors = [max(x) for x in zip(*world.everywhere(lambda: right(ring, alone, layout, tokens, world, dtype)), strict=True)]  # noqa: B023
        line = f"{what:<7} {name:<10} imbalance {max(held) * world.size / sum(held):.3f}"
        if name == "balanced":
            line += f", dealt in {dealt * 1e3:.0f} ms, {max(len(runs) for runs in layout.runs)} runs"
        for training in (False, True):
            local = tensors(sum(len(range(*span)) for span in rows[world.rank]), world.device, dtype, 1)
            seconds, host = called(step_of(ring, local, training), world, args.calls, None)
            flops = 4.0 * HEAD_DIM * HEADS * sum(held) * (3.5 if training else 1.0) / world.size
            tag = "f+b" if training else "f"
            line += f" | {tag} {seconds * 1e3:.2f} ms host {host * 1e3:.2f}, {flops / seconds / 1e12:.0f} TFLOP/s a GPU"
            del local
            with freed(world):
                pass
        world.say(line + " | errors " + " ".join(f"{error:.0e}" for error in errors))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
