"""CPU speed of dilated attention beside its own arithmetic and beside dense attention, forward + backward, float32.

    python benchmarks/cpu_speed.py            # N = 16,384, 8 heads of 64, w = 1024 … 8192, r = 1 … 8; about 2 minutes on 2 cores

The floor is the same FLOPs in plain torch SDPA calls: one call a branch on contiguous (segments, heads / r, w / r, 64) tensors.
Correctness is checked first; a wrong result prints no time. Last line: ``ratio to floor …, speed-up over dense …``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

from dilated_attention import DilatedPattern, attention, dilated_attention

SEGMENTS, RATES = (1024, 2048, 4096, 8192), (1, 2, 4, 8)


def seconds(function: Callable[[], None]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def forward_backward(function: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> Callable[[], None]:
    leaves = [x.detach().requires_grad_() for x in tensors]
    dout = torch.randn_like(function(*leaves))

    def run() -> None:
        torch.autograd.grad(function(*leaves), leaves, dout)

    return run


def check(num_heads: int, head_dim: int) -> float:
    """Largest relative error of out, dq, dk, dv against dense attention with log-multiplicities in float64, at N = 512."""
    n, lengths = 512, [w // 32 for w in SEGMENTS]
    pattern = DilatedPattern(lengths, list(RATES))
    bias = pattern.dense_mask(n, n, num_heads).double().log()
    q, k, v, dout = (torch.randn(1, n, num_heads, head_dim) for _ in range(4))

    def grads(function: Callable[..., torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
        leaves = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        out = function(*leaves)
        return [out, *torch.autograd.grad(out, leaves, dout.to(dtype))]

    def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        weights = (q @ k.transpose(-1, -2) * head_dim**-0.5 + bias).softmax(-1)
        return (weights @ v).transpose(1, 2)

    ours = grads(lambda q, k, v: dilated_attention(q, k, v, lengths, RATES), torch.float32)
    exact = grads(dense, torch.float64)
    return max(((a - b).norm() / b.norm()).item() for a, b in zip(ours, exact, strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=16_384)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--no-dense", action="store_true", help="skip dense attention, which takes most of the time")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    torch.manual_seed(0)
    error = check(args.heads, args.head_dim)
    if not error < 1e-5:
        print(f"wrong result: relative error {error:.1e} against float64; no times", file=sys.stderr)
        return 1
    print(f"relative error against float64: {error:.1e} (float32); {torch.get_num_threads()} threads, torch {torch.__version__}")

    n, heads, dim = args.length, args.heads, args.head_dim
    q, k, v = (torch.randn(1, n, heads, dim) for _ in range(3))
    ours = forward_backward(lambda q, k, v: dilated_attention(q, k, v, SEGMENTS, RATES), q, k, v)
    floor = []
    for w, r in zip(SEGMENTS, RATES, strict=True):
        # every offset holds heads / r heads; their problems stand side by side in the batch
        parts = [torch.randn(n // w * r, heads // r, w // r, dim) for _ in range(3)]
        floor.append(forward_backward(F.scaled_dot_product_attention, *parts))
    ours_s, floor_s = [], []
    for _ in range(args.repeats):
        ours_s.append(seconds(ours))
        floor_s.append(sum(seconds(part) for part in floor))
    forward, backward = DilatedPattern(SEGMENTS, RATES).flops(n, heads, dim)
    result = {
        "ours_s": statistics.median(ours_s),
        "floor_s": statistics.median(floor_s),
        "spread": (max(ours_s) - min(ours_s)) / statistics.median(ours_s),
        "gflops": (forward + backward) / statistics.median(ours_s) / 1e9,
    }
    result["ratio_to_floor"] = result["ours_s"] / result["floor_s"]
    print(f"N = {n}, {heads} heads of {dim}, {(forward + backward) / 1e9:.0f} GFLOP forward + backward")
    print(f"  dilated_attention   {result['ours_s'] * 1e3:8.0f} ms   {result['gflops']:.0f} GFLOP/s   spread {result['spread']:.0%}")
    print(f"  plain SDPA calls    {result['floor_s'] * 1e3:8.0f} ms")
    last = f"ratio to floor {result['ratio_to_floor']:.2f}"
    if not args.no_dense:
        dense = forward_backward(F.scaled_dot_product_attention, *(x.transpose(1, 2).contiguous() for x in (q, k, v)))
        result["dense_s"] = seconds(dense)
        result["dense_ours_s"] = seconds(forward_backward(lambda q, k, v: attention(q, k, v), q, k, v))
        result["speed_up"] = result["dense_s"] / result["ours_s"]
        print(f"  dense SDPA          {result['dense_s'] * 1e3:8.0f} ms")
        print(f"  attention (ours)    {result['dense_ours_s'] * 1e3:8.0f} ms")
        last += f", speed-up over dense {result['speed_up']:.1f}"
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))
    print(last)
    return 0


if __name__ == "__main__":
    sys.exit(main())
