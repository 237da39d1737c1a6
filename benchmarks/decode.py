"""Decoding with a cache: tokens a second by context, LongNet's branches and windows beside dense attention.

    python benchmarks/decode.py --check --save decode.json        # everything, under three minutes on one H200
    python benchmarks/decode.py --contexts 65536 1048576 --batches 1

A *step* is a whole model (12 layers, 12 heads of 64, 768 wide) through ``models.Stepper``: replay of a CUDA graph, the likeliest token, the
next step, Python's part included. Steps are taken 16 at a time at 16 places spread over the last 32,768 positions before the context,
since what a row reads depends on its place in its segments; caches hold random numbers. *Attention* is one layer's alone, from a graph of
its own, with the bytes that its rows read over the time. FlashAttention-3 takes part where its library is loaded: FLASH3_LIBRARY,
FLASH3_CUDART.

``--check`` first sets single rows beside float64 over the keys that the definition names, and steps beside the full forward.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from _timing import machine

from dilated_attention.backends.flash import flash3
from dilated_attention.engine.decode import dispatch
from dilated_attention.engine.decode.keys import Runs, row_keys
from dilated_attention.engine.decode.row import Cached
from dilated_attention.engine.reference_rows import partners
from dilated_attention.functional import decode_attention, explain_decode
from dilated_attention.models import KVCache, LongNetConfig, LongNetLM, PagedKVCache, Stepper, prefill
from dilated_attention.models.summary import readable
from dilated_attention.pattern import DilatedPattern, GlobalLocal, LocalWindow

H, D, LAYERS, VOCABULARY = 12, 64, 12, 32768
PLACES, STEPS, SPREAD, PAGE = 16, 16, 32768, 128
PAPER: dict[str, Any] = {"segment_lengths": (2048, 4096, 8192, 16384, 32768), "dilation_rates": (1, 2, 4, 6, 12)}
# every branch keeps 2048 positions of a segment, up to the whole of 1M
GEOMETRIC: dict[str, Any] = {
    "segment_lengths": (2048, 8192, 32768, 131072, 524288, 1048576),
    "dilation_rates": (1, 4, 16, 64, 256, 512),
}
MODELS: dict[str, dict[str, Any]] = {
    "longnet 2K–32K": PAPER,
    "longnet 2K–1M": GEOMETRIC,
    "block-sparse window 4K": {"attention": "block_sparse", "block_pattern": LocalWindow((4095, 0))},
    "block-sparse 2K + 128 global": {"attention": "block_sparse", "block_pattern": GlobalLocal((2047, 0), 128)},
    "dense": {"attention": "dense"},
}


def config_of(name: str) -> LongNetConfig:
    return LongNetConfig(vocab_size=VOCABULARY, embed_dim=H * D, num_layers=LAYERS, num_heads=H, **MODELS[name])


def fits(needed: int) -> bool:
    free, _ = torch.cuda.mem_get_info()
    return needed < 0.9 * (free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated())


def make_cache(config: LongNetConfig, batch: int, context: int, decoder: str, paged: bool) -> KVCache | PagedKVCache | str:
    """A cache full of random numbers, or how large it would be."""
    kv = config.num_kv_heads or config.num_heads
    span = row_keys(config.pattern, config.num_heads, kv, context, "cpu").num_needed
    needed = batch * span * 2 * config.num_layers * kv * config.head_dim * 2
    if not fits(needed):
        return readable(needed)
    place: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16, "backend": decoder}
    cache = PagedKVCache(config, batch, context, **place) if paged else KVCache(config, batch, context, **place)
    for x in (*cache.keys, *cache.values):
        for part in x.flatten(0, 1).split(2**20):
            part.normal_()
    if isinstance(cache, PagedKVCache):
        for request in range(batch):
            cache.reserve(request, context)
    return cache


def time_steps(model: LongNetLM, cache: KVCache | PagedKVCache, context: int) -> float:
    """Seconds a step, over ``PLACES`` places."""
    step = Stepper(model, cache)
    tokens = torch.zeros(cache.num_requests, 1, dtype=torch.int64, device="cuda")
    spread = min(SPREAD, context // 2)
    places = [context - STEPS - i * (spread // PLACES) for i in range(PLACES)]

    def run(places: list[int]) -> None:
        nonlocal tokens
        for place in places:
            cache.lengths = [place] * cache.num_requests
            cache.positions.fill_(place)
            for _ in range(STEPS):
                tokens = step(tokens).argmax(-1, keepdim=True)

    run(places[:2])
    found = []
    for _ in range(2):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run(places)
        torch.cuda.synchronize()
        found.append((time.perf_counter() - start) / (PLACES * STEPS))
    return min(found)


def steps_part(args: argparse.Namespace, decoders: list[str]) -> list[dict[str, Any]]:
    records = []
    for name in MODELS:
        config = config_of(name)
        model = LongNetLM(config, device="cuda", dtype=torch.bfloat16).eval().requires_grad_(False)
        for batch in args.batches:
            for decoder, paged in [(d, d == "flash3") for d in decoders] if name == "dense" else [("triton", False)]:
                base = None
                for context in args.contexts:
                    cache = make_cache(config, batch, context, decoder, paged)
                    label = f"{name}{f' ({decoder}, pages)' if paged else f' ({decoder})' if name == 'dense' else ''}"
                    if isinstance(cache, str):
                        print(f"{label:<32} batch {batch:>2} context {context:>8,}: its cache would take {cache}", flush=True)
                        records.append({"part": "step", "model": label, "batch": batch, "context": context, "cache_would_be": cache})
                        continue
                    seconds = time_steps(model, cache, context)
                    rate = batch / seconds
                    base = base or rate
                    records.append(
                        {"part": "step", "model": label, "batch": batch, "context": context, "ms": 1000 * seconds, "tokens_per_s": rate,
                         "of_first": rate / base, "cache_bytes": cache.nbytes}
                    )  # fmt: skip
                    print(
                        f"{label:<32} batch {batch:>2} context {context:>8,}: {1000 * seconds:7.3f} ms a step, {rate:9,.0f} tokens/s, "
                        f"{rate / base:.3f} of the first, cache {readable(cache.nbytes)}",
                        flush=True,
                    )
                    if context == args.contexts[-1]:
                        print("   ", cache, flush=True)
                    del cache
                    free_memory()
        del model
        free_memory()
    return records


def graph_seconds(call: Callable[[], Any], *, calls: int = 20, rounds: int = 5) -> float:
    """Seconds of one call, ``calls`` of them in a graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    graph.replay()
    found = []
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) / 1000 / calls)
    return sorted(found)[rounds // 2]


def attention_part(args: argparse.Namespace, decoders: list[str]) -> list[dict[str, Any]]:
    """One layer, heads each with keys of their own and grouped, at the last position of the context."""
    records = []
    for batch in args.batches:
        for heads, kv_heads, dim in ((H, H, D), (32, 8, 128)):
            for context in args.contexts:
                if not fits(int(4.2 * batch * context * kv_heads * dim)):
                    continue
                shape = {"batch": batch, "heads": [heads, kv_heads], "D": dim, "context": context}
                for name, (call, read) in attention_calls(batch, heads, kv_heads, dim, context, decoders).items():
                    try:
                        seconds = graph_seconds(call)
                    except RuntimeError as error:
                        print(f"  {name}: {str(error).splitlines()[0][:120]}", flush=True)
                        continue
                    rate = read / seconds / 1e9
                    records.append({"part": "attention", "what": name, **shape, "us": 1e6 * seconds, "GB_per_s": rate})
                    print(
                        f"  attention {heads}/{kv_heads}×{dim} batch {batch:>2} context {context:>9,} {name:<31} {1e6 * seconds:9.1f} µs "
                        f"{rate:6.0f} GB/s",
                        flush=True,
                    )
                free_memory()
    return records


def attention_calls(
    batch: int, heads: int, kv_heads: int, dim: int, context: int, decoders: list[str]
) -> dict[str, tuple[Callable[[], Any], int]]:
    """{name: (function, bytes of keys and values that its rows read)}."""
    k, v = (torch.empty(batch, context, kv_heads, dim, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    for x in (k, v):
        for part in x.flatten(0, 1).split(2**20):
            part.normal_()
    q = torch.randn(batch, heads, dim, dtype=torch.bfloat16, device="cuda")
    positions = torch.full((batch,), context - 1, device="cuda")
    pages = torch.arange(batch * context // PAGE, dtype=torch.int32, device="cuda").view(batch, -1)
    layouts = {"": Cached(k, v), ", pages": Cached(*(x.view(-1, PAGE, kv_heads, dim) for x in (k, v)), pages)}
    calls: dict[str, tuple[Callable[[], Any], int]] = {"dense (torch sdpa)": (lambda: sdpa(q, k, v), 4 * k.numel())}
    sparse = {"longnet 2K–32K": DilatedPattern(**PAPER)} if heads == kv_heads else {"window 4K": LocalWindow((4095, 0))}
    for name, pattern in {"dense": None, **sparse}.items():
        runs = row_keys(pattern, heads, kv_heads, context, "cuda").runs(positions)
        # keys of heads that share them are read once
        read = int(runs.ends[..., -1].sum()) * (kv_heads if runs.num_groups == 1 else 1) * 4 * dim
        for decoder in decoders if pattern is None else ["triton"]:
            for layout, cached in layouts.items():

                def call(cached: Cached = cached, runs: Runs = runs, decoder: str = decoder) -> Any:
                    return dispatch.decode(q, cached, runs, dim**-0.5, decoder)

                calls[f"{name} ({decoder}{layout})"] = (call, read)
    return calls


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q[:, :, None], k.transpose(1, 2), v.transpose(1, 2), enable_gqa=q.shape[1] != k.shape[2])


def prefill_part(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Chunks of 8,192 positions into LongNet's cache, which stays as small as it is."""
    config = config_of("longnet 2K–32K")
    model = LongNetLM(config, device="cuda", dtype=torch.bfloat16).eval().requires_grad_(False)
    length = min(262144, max(args.contexts))
    tokens = torch.randint(VOCABULARY, (1, length), device="cuda")
    for _ in range(2):
        cache = KVCache(config, 1, length, device="cuda", dtype=torch.bfloat16)
        torch.cuda.synchronize()
        start = time.perf_counter()
        prefill(model, tokens, cache)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
    print(f"prefill of {length:,} positions in chunks of 8,192: {seconds:.2f} s, {length / seconds:,.0f} tokens/s; {cache}", flush=True)
    return [{"part": "prefill", "length": length, "seconds": seconds, "cache_bytes": cache.nbytes}]


def check_part() -> None:
    """Raise if a row differs from float64 over the keys that the definition names, or a replayed step from the forward."""
    torch.manual_seed(0)
    N = 65536
    patterns: dict[str, Any] = {
        "dense": None, "paper": DilatedPattern(**PAPER), "geometric": DilatedPattern(**GEOMETRIC),
        "window": LocalWindow((4095, 0)), "global": GlobalLocal((2047, 0), 128),
    }  # fmt: skip
    for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        q = torch.randn(1, 1, H, D, device="cuda").to(dtype)
        k, v = (torch.randn(1, N, H, D, device="cuda").to(dtype) for _ in range(2))
        for name, pattern in patterns.items():
            worst = 0.0
            for position in (0, 2047, 2048, 32767, 32768, 60000, N - 4, N - 1):
                out = decode_attention(q, k, v, torch.tensor([position], device="cuda"), pattern, backend="triton")
                for head in range(0, H, 5):
                    if isinstance(pattern, DilatedPattern):
                        keys = partners(pattern, position, head, H, N).cuda()
                    else:
                        keys = torch.arange(N, device="cuda")
                        if pattern is not None:
                            keys = keys[pattern.allowed(torch.tensor(position, device="cuda"), keys, torch.zeros_like(keys), N)]
                    keys = keys[keys <= position]
                    weights = (k[0, keys, head].double() @ q[0, 0, head].double() * D**-0.5).softmax(0)
                    worst = max(worst, float((out[0, 0, head].double() - weights @ v[0, keys, head].double()).abs().max()))
            print(f"check {name:<10} {dtype!s:<15} {worst:.1e}", flush=True)
            if worst > bound:
                raise SystemExit(f"rows of {name} in {dtype} are off by {worst}")
    config = LongNetConfig(vocab_size=100, embed_dim=H * D, num_layers=3, num_heads=H, **PAPER)
    model = LongNetLM(config, device="cuda").eval().requires_grad_(False)
    tokens = torch.randint(100, (1, 6000), device="cuda")
    full = model.double()(tokens)
    model.float()
    cache = KVCache(config, 1, 6000, device="cuda")
    prefill(model, tokens[:, :5000], cache, chunk=2000)
    step = Stepper(model, cache)
    worst = max(float((step(tokens[:, t : t + 1]).double() - full[:, t]).abs().max()) for t in range(5000, 6000))
    print(f"check 1,000 replayed steps of a model in float32 against its forward in float64: {worst:.1e}", flush=True)
    if worst > 1e-5 * max(1.0, float(full.abs().max())):
        raise SystemExit(f"logits of replayed steps are off by {worst}")


def free_memory() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", nargs="+", type=int, default=[65536, 262144, 1048576])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 32])
    parser.add_argument("--parts", nargs="+", default=["steps", "attention", "prefill"], choices=["steps", "attention", "prefill"])
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--save", help="a file for the results as JSON")
    args = parser.parse_args()
    if os.environ.get("FLASH3_LIBRARY"):
        flash3.load_library(os.environ["FLASH3_LIBRARY"], os.environ.get("FLASH3_CUDART"))
    print(explain_decode(head_dim=D, num_heads=H, dense=True), flush=True)
    decoders = [x for x in ("triton", "flash3") if explain_decode(head_dim=D, num_heads=H, dense=True, backend=x).chosen]
    started = time.perf_counter()
    if args.check:
        check_part()
    records: list[dict[str, Any]] = []
    if "steps" in args.parts:
        records += steps_part(args, decoders)
    if "attention" in args.parts:
        records += attention_part(args, decoders)
    if "prefill" in args.parts:
        records += prefill_part(args)
    print(f"{time.perf_counter() - started:.0f} s in all")
    if args.save:
        Path(args.save).write_text(json.dumps({"machine": machine(), "results": records}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
