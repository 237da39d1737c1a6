"""Forward and backward at the longest power-of-two sequence that a memory budget allows: predicted against measured peak.

    python examples/extreme_length.py                   # two fifths of the free memory; 2^22 tokens on a 24 GB machine, under a minute
    python examples/extreme_length.py --budget-gib 2.5  # 2^20 tokens

Branches grow to the whole sequence at a constant number of keys (w = 256 · 4^i, r = 4^i). The prediction is a formula from
shapes; memory is the process's peak resident set beyond what it held before the tensors, or CUDA's peak allocation.
Last line: ``N = …: predicted … measured … (…%)``; exit code 1 if they differ by more than 10 %.
"""

from __future__ import annotations

import argparse
import sys

import torch
from recipe.costs import measured
from recipe.main import run_safely
from recipe.settings import number

from dilated_attention import DilatedPattern, dilated_attention
from dilated_attention.backends import detect
from dilated_attention.engine.memory import attention_memory
from dilated_attention.parsing import size
from dilated_attention.pattern import geometric_branches

GIB = 2**30


def predicted(length: int, args: argparse.Namespace, device: str, dtype: torch.dtype) -> int:
    pattern = DilatedPattern(*geometric_branches(length, 256))
    return attention_memory(pattern, length, args.heads, args.head_dim, dtype=dtype, hardware=detect(device), is_causal=args.causal).peak


def available(device: str) -> int:
    if device == "cuda":
        return torch.cuda.mem_get_info()[0]
    with open("/proc/meminfo") as file:
        fields = dict(line.split(":") for line in file)
    return int(fields["MemAvailable"].split()[0]) * 1024


def attend(length: int, args: argparse.Namespace, device: str, dtype: torch.dtype) -> None:
    """One forward and backward; every tensor dies with it."""
    shape = (1, length, args.heads, args.head_dim)
    q, k, v = (torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    dout = torch.randn(shape, device=device, dtype=dtype)
    out = dilated_attention(q, k, v, *geometric_branches(length, 256), is_causal=args.causal)
    grads = torch.autograd.grad(out, (q, k, v), dout)
    if not all(bool(torch.isfinite(x[:, ::997]).all()) for x in (out, *grads)):
        raise SystemExit("the result is not finite")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--budget-gib", type=number(float, 0, above=True), help="memory that may be used (default: two fifths of what is free)"
    )
    parser.add_argument("--heads", type=size, default=1)
    parser.add_argument("--head-dim", type=size, default=64)
    parser.add_argument("--causal", action="store_true")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    budget = available(device) * 2 // 5 if args.budget_gib is None else int(args.budget_gib * GIB)
    length = 1024
    while predicted(length * 2, args, device, dtype) <= budget:
        length *= 2
    expected = predicted(length, args, device, dtype)
    print(
        f"budget {budget / GIB:.2f} GiB on {device}, {args.heads} × {args.head_dim} in {dtype}: "
        f"N = 2^{length.bit_length() - 1} = {length:,}"
    )

    # kernels, thread pools and plans of the same kind, so that what they hold is not counted as the tensors'
    attend(4096, args, device, dtype)
    _, seconds, before, peak = measured(lambda: attend(length, args, device, dtype), device)
    taken = peak - before
    difference = taken / expected - 1
    print(f"forward + backward in {seconds:.1f} s, {length / seconds:,.0f} tokens/s, {taken / length:.0f} bytes a token")
    print(f"N = {length:,}: predicted {expected / GIB:.3f} GiB, measured {taken / GIB:.3f} GiB ({difference:+.1%})")
    return 0 if abs(difference) <= 0.10 else 1


if __name__ == "__main__":
    sys.exit(run_safely(main))
