"""Forward in fp8 beside bf16 on a Hopper GPU: time, TFLOP/s, and error against float64 on sampled rows.

    FLASH3_FP8_LIBRARY=fa3_fwd/_C.abi3.so python benchmarks/fp8_forward.py --output fp8.jsonl     # about a minute on one H200

Asks whether short branches merged in float32 are more accurate in fp8 than one dense row of the same reach, and which scales matter:
``tensor``, ``head`` and ``segment`` have one scale a launch, a head of a launch, a head of a segment, with nothing centred and one
sum over all keys; ``flash3_fp8`` is the backend as it ships. FLASH3_LIBRARY (and FLASH3_CUDART) add flash3 to the bf16 side.
One JSON line a measurement; last line: ``speed of fp8 over the fastest bf16 …``.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
from collections.abc import Iterator
from typing import Any

import torch
from _timing import inputs, interleaved, machine, save

from dilated_attention import DilatedPattern, attention, dilated_attention
from dilated_attention.backends import AttentionRequest, detect, registry
from dilated_attention.backends.flash import flash3, flash3_fp8
from dilated_attention.backends.flash.flash3_fp8 import quantise
from dilated_attention.backends.flash.fp8 import Quantised
from dilated_attention.engine.reference_rows import sampled_rows

LENGTHS, RATES = (2048, 4096, 8192, 16384, 32768), (1, 2, 4, 8, 16)
HEADS = {64: 16, 128: 8}
CASES = (("dense", 8192), ("dense", 32768), ("dense", 131072), ("dilated", 131072), ("dilated", 1048576))
DATA = ("normal", "outliers", "biased")
SAMPLED_ROWS = 24
ALL_KEYS = 2**40


def make(data: str, n: int, dim: int) -> list[torch.Tensor]:
    """q, k, v (1, n, heads, dim) bfloat16."""
    torch.manual_seed(n + dim)
    q, k, v = inputs(n, HEADS[dim], dim)
    if data == "outliers":
        for x in (q, k, v):
            x[:, torch.randint(n, (n // 1000,), device=x.device)] *= 4
    elif data == "biased":
        # what trained models show: a few channels of the keys far from 0, values that do not average out
        k[..., :4] += 8
        q[..., :4] += 1
        v += 1
    return [q, k, v]


def per_segment(x: torch.Tensor, num_scales: int, *, centre: bool = False) -> Quantised:
    return quantise(x, num_scales)


def per_head(x: torch.Tensor, num_scales: int, *, centre: bool = False) -> Quantised:
    """One scale a head for all problems of the launch."""
    y, descale, _ = quantise(x.flatten(0, 1)[None], num_scales)
    return Quantised(y.view(x.shape), descale.expand(x.shape[0], -1).contiguous(), None)


def per_tensor(x: torch.Tensor, num_scales: int, *, centre: bool = False) -> Quantised:
    y, descale, _ = quantise(x.flatten(0, 1)[None], 1)
    return Quantised(y.view(x.shape), descale.expand(x.shape[0], num_scales).contiguous(), None)


VARIANTS = {"tensor": per_tensor, "head": per_head, "segment": per_segment}


def measure(kind: str, n: int, dim: int, data: str, bf16: list[str]) -> Iterator[dict[str, Any]]:
    """One record a backend: its error, and for normal data the time of what ships."""
    heads = HEADS[dim]
    pattern = DilatedPattern(LENGTHS, RATES) if kind == "dilated" else DilatedPattern((n,), (1,), "zero")
    q, k, v = make(data, n, dim)
    rows = torch.randint(n, (SAMPLED_ROWS,), generator=torch.Generator().manual_seed(0)).tolist()
    true = sampled_rows(pattern, q, k, v, [(row, head) for row in rows for head in range(heads)])[0].view(len(rows), heads, dim)

    def attend(name: str) -> torch.Tensor:
        settings: dict[str, Any] = {"backend": name, "precision": "native" if name in bf16 else "fp8"}
        return attention(q, k, v, **settings) if kind == "dense" else dilated_attention(q, k, v, LENGTHS, RATES, **settings)

    shipped = (*bf16, "flash3_fp8")
    times = interleaved({name: functools.partial(attend, name) for name in shipped}) if data == "normal" else {}
    for name in (*shipped, *VARIANTS):
        error = (attend(name)[0, rows].double() - true).norm() / true.norm()
        record: dict[str, Any] = {"attention": kind, "n": n, "head_dim": dim, "heads": heads, "data": data, "backend": name}
        record["relative_error"] = round(error.item(), 5)
        if name in times:
            ms, spread = times[name]
            record |= {"ms": round(ms, 3), "spread": round(spread, 3), "tflops": round(4 * dim * pattern.pairs(n, heads) / ms / 1e9)}
        yield record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output")
    args = parser.parse_args()
    if os.environ.get("FLASH3_FP8_LIBRARY"):
        flash3_fp8.load_library(os.environ["FLASH3_FP8_LIBRARY"])
    if os.environ.get("FLASH3_LIBRARY"):
        flash3.load_library(os.environ["FLASH3_LIBRARY"], os.environ.get("FLASH3_CUDART"))
    for name, function in VARIANTS.items():
        variant = flash3_fp8.Flash3Fp8Backend(function, ALL_KEYS)
        variant.name = name
        registry.register(variant)
    native = AttentionRequest(hardware=detect("cuda"), dtype=torch.bfloat16, head_dim=64)
    bf16 = [name for name in ("flash3", "sdpa_cudnn", "sdpa_flash") if not registry.get(name).reasons_against(native)][:2]
    about = machine() | {"keys_a_sum": str(flash3_fp8.KEYS_A_SUM)}
    ratios = []
    for dim in HEADS:
        for kind, n in CASES:
            for data in DATA:
                rate: dict[str, float] = {}
                for record in measure(kind, n, dim, data, bf16):
                    print(json.dumps(record | about), flush=True)
                    save(args.output, record | about)
                    rate[record["backend"]] = record.get("tflops", 0.0)
                if rate["flash3_fp8"]:
                    ratios.append(f"{kind} {n} D{dim} {rate['flash3_fp8'] / max(rate[name] for name in bf16):.2f}")
    print("speed of fp8 over the fastest bf16, quantising included:", " · ".join(ratios))


if __name__ == "__main__":
    with torch.no_grad():
        main()
