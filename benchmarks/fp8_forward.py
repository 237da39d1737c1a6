"""Forward in fp8 beside bf16 on a Hopper GPU: time, TFLOP/s, and error against float64 on sampled rows.

    FLASH3_FP8_LIBRARY=fa3_fwd/_C.abi3.so python benchmarks/fp8_forward.py --output fp8.jsonl     # about a minute on one H200

Asks whether short branches merged in float32 are more accurate in fp8 than one dense row of the same reach, and which scales matter:
``tensor``, ``head`` and ``segment`` have one scale a launch, a head of a launch, a head of a segment, with nothing centred and one
sum over all keys; ``flash3_fp8`` is the backend as it ships. One JSON line a measurement; last line: ``speed of fp8 over the fastest bf16 …``.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import os
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import triton

from dilated_attention import attention, dilated_attention
from dilated_attention.backends import Request, detect, flash3, flash3_fp8, registry
from dilated_attention.backends.quantise import Quantised, quantise
from dilated_attention.pattern import DilatedPattern

LENGTHS, RATES = (2048, 4096, 8192, 16384, 32768), (1, 2, 4, 8, 16)
HEADS = {64: 16, 128: 8}
DENSE, DILATED = (8192, 32768, 131072), (131072, 1048576)
SAMPLED_ROWS = 24
ALL_KEYS = 2**40


def make(kind: str, n: int, heads: int, dim: int) -> list[torch.Tensor]:
    """q, k, v (1, n, heads, dim) bfloat16."""
    generator = torch.Generator("cuda").manual_seed(n + dim)
    q, k, v = (torch.randn(1, n, heads, dim, device="cuda", generator=generator, dtype=torch.bfloat16) for _ in range(3))
    if kind == "outliers":
        for x in (q, k, v):
            x[:, torch.randint(n, (n // 1000,), device="cuda", generator=generator)] *= 4
    elif kind == "biased":
        # what trained models show: a few channels of the keys far from 0, values that do not average out
        k[..., :4] += 8
        q[..., :4] += 1
        v += 1
    return [q, k, v]


def per_head(x: torch.Tensor, num_scales: int, *, centre: bool = False) -> Quantised:
    """One scale a head for all problems of the launch."""
    P, L, _, _ = x.shape
    y, descale, _ = quantise(x.flatten(0, 1)[None], num_scales)
    return Quantised(y.view(P, L, *y.shape[2:]), descale.expand(P, -1).contiguous(), None)


def per_tensor(x: torch.Tensor, num_scales: int, *, centre: bool = False) -> Quantised:
    y, descale, _ = quantise(x.flatten(0, 1)[None], 1)
    return Quantised(y.view(x.shape), descale.expand(x.shape[0], num_scales).contiguous(), None)


def per_segment(x: torch.Tensor, num_scales: int, *, centre: bool = False) -> Quantised:
    return quantise(x, num_scales)


VARIANTS = {"tensor": per_tensor, "head": per_head, "segment": per_segment}


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: list[int], pattern: DilatedPattern | None) -> torch.Tensor:
    """float64 out (rows, heads, dim) over the multiset of keys that each row attends to, straight from the definition."""
    n, heads, dim = q.shape[1:]
    if pattern is None:
        parts = []
        for head in range(heads):
            scores = q[0, rows, head].double() @ k[0, :, head].double().T * dim**-0.5
            parts.append(scores.softmax(-1) @ v[0, :, head].double())
        return torch.stack(parts, 1)
    out = torch.empty(len(rows), heads, dim, dtype=torch.float64, device=q.device)
    for index, row in enumerate(rows):
        for head in range(heads):
            taken = []
            for w, r in pattern.branches:
                start, offset = row // w * w, head % r
                if (row - start - offset) % r == 0:
                    taken.append(torch.arange(start + offset, min(start + w, n), r, device=q.device))
            keys = torch.cat(taken)
            scores = k[0, keys, head].double() @ q[0, row, head].double() * dim**-0.5
            out[index, head] = scores.softmax(0) @ v[0, keys, head].double()
    return out


def milliseconds(function: Callable[[], object], repeats: int) -> float:
    function()
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, end in pairs:
        start.record()
        function()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in pairs)


def kernel_milliseconds(backend: Any, function: Callable[[], object]) -> float:
    """Time inside the backend's forward (fp8: quantising too), without the engine's merge."""
    events, forward = [], backend.forward

    def timed(*arguments: Any) -> Any:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        result = forward(*arguments)
        end.record()
        events.append((start, end))
        return result

    backend.forward = timed
    try:
        function()
    finally:
        del backend.forward
    torch.cuda.synchronize()
    return sum(start.elapsed_time(end) for start, end in events)


def measure(kind: str, n: int, dim: int, data: str, bf16: list[str], repeats: int) -> Iterator[dict[str, Any]]:
    """One record a backend: error, and time for normal data where the backend is one that ships."""
    heads = HEADS[dim]
    pattern = DilatedPattern(LENGTHS, RATES) if kind == "dilated" else None
    pairs = n * n * heads if pattern is None else pattern.pairs(n, heads)
    q, k, v = make(data, n, heads, dim)
    rows = torch.randint(n, (SAMPLED_ROWS,), generator=torch.Generator().manual_seed(0)).tolist()
    true = exact(q, k, v, rows, pattern)

    def attend(name: str) -> torch.Tensor:
        settings: dict[str, Any] = {"backend": name, "precision": "native" if name in bf16 else "fp8"}
        return attention(q, k, v, **settings) if pattern is None else dilated_attention(q, k, v, LENGTHS, RATES, **settings)

    for name in (*bf16, "flash3_fp8", *VARIANTS):
        error = (attend(name)[0, rows].double() - true).norm() / true.norm()
        record: dict[str, Any] = {"attention": kind, "n": n, "head_dim": dim, "heads": heads, "data": data, "backend": name}
        record["relative_error"] = round(error.item(), 5)
        if data == "normal" and name not in VARIANTS:
            run = functools.partial(attend, name)
            inside = kernel_milliseconds(registry.get(name), run)
            record |= {"ms": round(milliseconds(run, repeats), 3), "kernels_ms": round(inside, 3)}
            record["tflops"] = round(4 * dim * pairs / inside / 1e9)
        yield record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    flash3_fp8.load_library(os.environ["FLASH3_FP8_LIBRARY"])
    if os.environ.get("FLASH3_LIBRARY"):
        flash3.load_library(os.environ["FLASH3_LIBRARY"], os.environ.get("FLASH3_CUDART"))
    for name, function in VARIANTS.items():
        variant = flash3_fp8.Flash3Fp8Backend(function, ALL_KEYS)
        variant.name = name
        registry.register(variant)
    native = Request(hardware=detect("cuda"), dtype=torch.bfloat16, head_dim=64)
    bf16 = [name for name in ("flash3", "sdpa_cudnn", "sdpa_flash") if not registry.get(name).why_not(native)][:2]
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    machine = {"date": today, "device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    machine |= {"fp8_library": "fa3-fwd 0.0.3", "keys_a_sum": str(flash3_fp8.KEYS_A_SUM)}
    ratios = []
    for dim in HEADS:
        for kind, n in (*(("dense", n) for n in DENSE), *(("dilated", n) for n in DILATED)):
            for data in ("normal", "outliers", "biased"):
                rate: dict[str, float] = {}
                for record in measure(kind, n, dim, data, bf16, args.repeats):
                    line = json.dumps(record | machine)
                    print(line, flush=True)
                    rate[record["backend"]] = record.get("tflops", 0.0)
                    if args.output:
                        with args.output.open("a") as file:
                            file.write(line + "\n")
                if rate["flash3_fp8"]:
                    ratios.append(f"{kind} {n} D{dim} {rate['flash3_fp8'] / max(rate[name] for name in bf16):.2f}")
    print("speed of fp8 over the fastest bf16, quantising included:", " · ".join(ratios))


if __name__ == "__main__":
    with torch.no_grad():
        main()
