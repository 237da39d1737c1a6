"""Forward of a nested family, every pair once, against the arithmetic floor of branch-by-branch dilated attention. Needs an H200 or H100.

    python benchmarks/nested_forward.py [--positions 524288 1048576] [--shapes 12x64 16x128] [--warm]

Floor: the pairs of all branches at the rate that FlashAttention-4 reaches, in the same run, on independent dense problems of length 2048
(without flash-attn-4 only times are printed). Correctness comes first: sampled rows against float64, and no element left unwritten.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import triton

from dilated_attention.engine.kernels.nested import NestedFamily, nested_family
from dilated_attention.engine.kernels.nested_hopper import gluon_forward
from dilated_attention.engine.kernels.nested_triton import reasons_against, triton_forward

LENGTHS, RATES = [2048 * 2**i for i in range(5)], [2**i for i in range(5)]
# (name, launcher, options), of which the first is what nested_forward runs
VARIANTS: list[tuple[str, Any, dict[str, Any]]] = [
    ("gluon", gluon_forward, {}),
    ("gluon, 128 rows", gluon_forward, {"wide": False}),
    ("gluon, 256 rows", gluon_forward, {"wide": True}),
    ("gluon, 2+2 stages", gluon_forward, {"wide": False, "stages": (2, 2)}),
    ("triton", triton_forward, {}),
]
START = time.time()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--positions", type=int, nargs="+", default=[2**19, 2**20])
    parser.add_argument("--shapes", nargs="+", default=["12x64", "16x128"])
    parser.add_argument("--warm", choices=["full", "causal"], help="only compile these kernels, for a run that measures later")
    parser.add_argument("--skip", nargs="+", default=[], help="names of variants to leave out")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no measurement after this time")
    args = parser.parse_args()
    variants = [variant for variant in VARIANTS if variant[0] not in args.skip]
    shapes = [tuple(int(x) for x in shape.split("x")) for shape in args.shapes]
    if args.warm:
        for heads, head_dim in shapes:
            for _, run, options in variants:
                inputs = tensors(2**15, heads, head_dim)
                run(family_of(heads, 2**15), *inputs[:3], args.warm == "causal", head_dim**-0.5, *inputs[3:], **options)
        torch.cuda.synchronize()
        return
    rows: list[dict[str, Any]] = []
    for heads, head_dim in shapes:
        for is_causal in (False, True):
            for positions in (2**16 + 100, max(args.positions)):
                say(
                    f"check {heads}x{head_dim} causal={is_causal} N={positions}: "
                    f"{check(variants[0][2], positions, heads, head_dim, is_causal)}"
                )
    for positions in args.positions:
        for heads, head_dim in shapes:
            inputs = tensors(positions, heads, head_dim)
            for is_causal in (False, True):
                floor = floor_ms(inputs, is_causal)
                for name, run, options in variants if positions == args.positions[0] else variants[:1]:
                    if not worth_measuring(options, head_dim, is_causal) or time.time() - START > args.seconds:
                        continue
                    row = measure(name, run, options, inputs, is_causal, floor)
                    rows.append(row)
                    say("  ".join(f"{key} {value}" for key, value in row.items()))
    Path(os.environ.get("OUT", ".")).joinpath("nested_forward.json").write_text(json.dumps(rows, indent=1))


def worth_measuring(options: dict[str, Any], head_dim: int, is_causal: bool) -> bool:
    """Not twice what is the default anyway."""
    if options.keys() == {"wide"}:
        return head_dim == 64 and options["wide"] == is_causal
    return True


def say(text: str) -> None:
    print(f"{time.time() - START:5.0f} s  {text}", flush=True)


def family_of(heads: int, positions: int) -> NestedFamily:
    family = nested_family(LENGTHS, RATES, [[h % r for h in range(heads)] for r in RATES], positions)
    assert family is not None
    return family


def tensors(positions: int, heads: int, head_dim: int) -> tuple[torch.Tensor, ...]:
    """q, k, v (1, N, H, D), out filled with NaN, lse."""
    q, k, v = (torch.randn(1, positions, heads, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    return q, k, v, torch.full_like(q, torch.nan), torch.full((1, heads, positions), torch.nan, device="cuda")


def check(options: dict[str, Any], positions: int, heads: int, head_dim: int, is_causal: bool, samples: int = 60) -> str:
    torch.manual_seed(int(time.time()))
    q, k, v, out, lse = tensors(positions, heads, head_dim)
    family, scale = family_of(heads, positions), head_dim**-0.5
    if reasons := reasons_against(family, q, k, v, scale):
        raise SystemExit("; ".join(reasons))
    gluon_forward(family, q, k, v, is_causal, scale, out, lse, **options)
    full = family.num_positions
    unwritten = int((~out[:, :full].isfinite()).sum() + (~lse[:, :, :full].isfinite()).sum())
    got, expected, worst_lse = [], [], 0.0
    keys = torch.arange(full, device="cuda")
    for number in range(samples):
        h, p = number % heads, int(torch.randint(full, ()))
        # a fifth of the rows on each level
        wanted = RATES[number % 5]
        p = min(p // wanted * wanted + h % wanted, full - 1)
        m = sum(((keys // w == p // w) & (keys % r == h % r)).double() * float(p % r == h % r) for w, r in zip(LENGTHS, RATES, strict=True))
        taken = (m * (keys <= p) if is_causal else m).nonzero()[:, 0]  # type: ignore[union-attr, operator]
        scores = k[0, taken, h].double() @ q[0, p, h].double() * scale + m[taken].log()  # type: ignore[index]
        worst_lse = max(worst_lse, float((lse[0, h, p] - scores.logsumexp(0)).abs()))
        got.append(out[0, p, h].double())
        expected.append(scores.softmax(0) @ v[0, taken, h].double())
    error = float((torch.stack(got) - torch.stack(expected)).norm() / torch.stack(expected).norm())
    return f"relative error {error:.2e}, lse {worst_lse:.1e}, unwritten {unwritten}"


def floor_ms(inputs: tuple[torch.Tensor, ...], is_causal: bool) -> float:
    """The branches' FLOPs at FlashAttention-4's rate on dense problems of length 2048, in ms; NaN without it."""
    try:
        from flash_attn.cute.interface import _flash_attn_fwd
    except ImportError:
        return float("nan")
    positions, heads, head_dim = inputs[0].shape[1:]
    q, k, v = (x[0].view(-1, 2048, heads, head_dim) for x in inputs[:3])
    once = time_ms(lambda: _flash_attn_fwd(q, k, v, softmax_scale=head_dim**-0.5, causal=is_causal, return_lse=True))
    return once * family_of(heads, positions).branch_pairs() / (positions * 2048)


def measure(
    name: str, run: Any, options: dict[str, Any], inputs: tuple[torch.Tensor, ...], is_causal: bool, floor: float
) -> dict[str, Any]:
    q, k, v, out, lse = inputs
    _, positions, heads, head_dim = q.shape
    family = family_of(heads, positions)
    ms = time_ms(lambda: run(family, q, k, v, is_causal, head_dim**-0.5, out, lse, **options))
    flops = 4 * head_dim * heads * family.pairs() / (2 if is_causal else 1)
    return {
        "variant": name, "N": positions, "heads": f"{heads}x{head_dim}", "causal": is_causal, "ms": round(ms, 2),
        "floor_ms": round(floor, 2),
        "floor/ms": round(floor / ms, 3), "TFLOP/s": round(flops / ms / 1e9), "levels_ms": levels_ms(run, options, inputs, is_causal),
    }  # fmt: skip


def levels_ms(run: Any, options: dict[str, Any], inputs: tuple[torch.Tensor, ...], is_causal: bool) -> list[float]:
    q, k, v, out, lse = inputs
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled:
        run(family_of(q.shape[2], q.shape[1]), q, k, v, is_causal, q.shape[3] ** -0.5, out, lse, **options)
        torch.cuda.synchronize()
    events = sorted((e for e in profiled.events() if "nested" in e.name), key=lambda e: e.time_range.start)
    return [round(e.device_time / 1e3, 2) for e in events]


def time_ms(run: Any) -> float:
    return float(triton.testing.do_bench(run, warmup=40, rep=150, return_mode="median"))


if __name__ == "__main__":
    main()
