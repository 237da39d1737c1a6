"""Whether lengths that vary fragment torch's allocator: bytes reserved over bytes in tensors, by kind of attention and allocator setting.

    python benchmarks/fragmentation.py                               # all kinds and settings, 200 lengths each, on a GPU
    python benchmarks/fragmentation.py --save fragmentation.jsonl    # and one JSON line a row

Each row is a process of its own, as settings are read once. A step is q, k, v made anew at a random length, forward and backward; figures
are those of ``profile_memory`` over all steps. "tensors alone" makes and drops tensors of those lengths without any attention: what torch's
allocator does by itself with lengths that vary. "longest first" begins with the longest length, in torch's own setting.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from _timing import machine, save

from dilated_attention import attention, block_sparse_attention, dilated_attention
from dilated_attention.pattern import LocalWindow
from dilated_attention.profiling import MemoryProfile, profile_memory

SETTINGS = {
    "torch's own": "",
    "longest first": "",
    "expandable": "expandable_segments:True",
    "sizes to 1/4": "roundup_power2_divisions:4",
    "sizes to 1/1": "roundup_power2_divisions:1",
    "both, 1/4": "expandable_segments:True,roundup_power2_divisions:4",
}
SIZES = ("count", "shortest", "longest", "heads", "head_dim", "seed")
LONGNET = ([2048, 4096, 8192, 16384, 32768], [1, 2, 4, 8, 16])
GIGAPATH = ([1024, 5792, 32768, 185363, 1048576], [1, 2, 4, 8, 16])

Call = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
KINDS: dict[str, Call | None] = {
    "tensors alone": None,
    "dense": lambda q, k, v: attention(q, k, v, is_causal=True),
    "dilated, LongNet": lambda q, k, v: dilated_attention(q, k, v, *LONGNET, is_causal=True),
    "dilated, GigaPath": lambda q, k, v: dilated_attention(q, k, v, *GIGAPATH, head_offsets="blocked", tail="zero_keys"),
    "detached, LongNet": lambda q, k, v: dilated_attention(q, k, v, *LONGNET, mixture_grad="detached"),
    "block-sparse": lambda q, k, v: block_sparse_attention(q, k, v, LocalWindow((1023, 0)), is_causal=True),
}


def run(kind: str, lengths: list[int], heads: int, dim: int) -> MemoryProfile:
    """The profile of all steps. Kernels are loaded before, at the shortest length, as they take memory of their own."""
    call = KINDS[kind]

    def step(length: int) -> None:
        q, k, v = (torch.randn(1, length, heads, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
        if call is None:
            for _ in range(5):
                torch.empty_like(q)
            return
        out = call(q, k, v)
        torch.autograd.grad(out, (q, k, v), torch.randn_like(out))

    step(min(lengths))
    with profile_memory(ops=False) as profile:
        for length in lengths:
            step(length)
    return profile.result


def lengths_of(args: argparse.Namespace, longest_first: bool) -> list[int]:
    draw = random.Random(args.seed)
    lengths = [draw.randint(args.shortest, args.longest) for _ in range(args.count)]
    return [args.longest, *lengths] if longest_first else lengths


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kind", choices=KINDS, action="append", help="default: all")
    parser.add_argument("--setting", choices=SETTINGS, action="append", help="default: all")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--shortest", type=int, default=1024)
    parser.add_argument("--longest", type=int, default=131_072)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", help="file to append a JSON line a row to")
    parser.add_argument("--here", action="store_true", help="one kind and setting in this process, as JSON: what rows are made by")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this needs a CUDA GPU: a CPU's allocator does not tell what it keeps")
    kinds, settings = args.kind or list(KINDS), args.setting or list(SETTINGS)
    if args.here:
        profile = run(kinds[0], lengths_of(args, settings[0] == "longest first"), args.heads, args.head_dim)
        print(json.dumps(profile.as_dict()))
        return
    print(f"{machine()}\n{args.count} lengths from {args.shortest} to {args.longest}, 1 x {args.heads} heads of {args.head_dim}, bfloat16")
    print(
        f"{'kind':<20}{'setting':<16}{'in tensors':>12}{'reserved':>12}{'ratio':>8}{'unused pieces':>15}{'GPU asked':>11}{'retries':>9}"
        f"{'s':>8}"
    )
    for kind in kinds:
        for setting in settings:
            found = in_a_process(args, kind, setting)
            # the row's own kind, setting and device go before what was asked for, and before what the profile calls its device
            asked = {name: getattr(args, name) for name in SIZES}
            record = {**found, **asked, "script": "fragmentation", **machine(), "kind": kind, "setting": setting}
            sizes = "".join(f"{found[name] / 2**20:>8,.0f} MiB" for name in ("peak_allocated", "peak_reserved"))
            counts = (
                f"{found['peak_inactive_split'] / 2**20:>11,.0f} "
                f"MiB{found['device_allocs']:>11}{found['retries']:>9}{found['seconds']:>8.1f}"
            )
            print(f"{kind:<20}{setting:<16}{sizes}{found['fragmentation']:>8.2f}{counts}", flush=True)
            save(args.save, record)


def in_a_process(args: argparse.Namespace, kind: str, setting: str) -> dict[str, float]:
    """One row. The environment's own allocator settings give way to the row's."""
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    if SETTINGS[setting]:
        environment["PYTORCH_ALLOC_CONF"] = SETTINGS[setting]
    options = [word for name in SIZES for word in (f"--{name.replace('_', '-')}", str(getattr(args, name)))]
    command = [sys.executable, str(Path(__file__).resolve()), "--here", "--kind", kind, "--setting", setting, *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{kind}, {setting}: exit code {done.returncode}\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
