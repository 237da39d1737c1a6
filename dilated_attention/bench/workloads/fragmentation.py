"""Whether lengths that vary fragment torch's allocator: bytes reserved over bytes in tensors, by kind of attention and setting.

Each setting is measured in a process of its own, as torch reads it once. A step is q, k, v made anew at a random length, forward and
backward.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dilated_attention.bench.measure.skip import Refused
from dilated_attention.bench.report.rows import Row
from dilated_attention.functional import attention, block_sparse_attention, dilated_attention
from dilated_attention.pattern import LocalWindow
from dilated_attention.profiling import profile_memory

LONGEST_FIRST = "longest first"
# name → PYTORCH_ALLOC_CONF
SETTINGS = {
    "torch's own": "",
    LONGEST_FIRST: "",
    "expandable": "expandable_segments:True",
    "sizes to 1/4": "roundup_power2_divisions:4",
    "sizes to 1/1": "roundup_power2_divisions:1",
    "both, 1/4": "expandable_segments:True,roundup_power2_divisions:4",
}
_LONGNET = ([2048, 4096, 8192, 16384, 32768], [1, 2, 4, 8, 16])
_GIGAPATH = ([1024, 5792, 32768, 185363, 1048576], [1, 2, 4, 8, 16])
# "tensors alone": what the allocator does by itself with tensors of those lengths
KINDS: dict[str, Callable[..., torch.Tensor] | None] = {
    "tensors alone": None,
    "dense": lambda q, k, v: attention(q, k, v, is_causal=True),
    "dilated, LongNet": lambda q, k, v: dilated_attention(q, k, v, *_LONGNET, is_causal=True),
    "dilated, GigaPath": lambda q, k, v: dilated_attention(q, k, v, *_GIGAPATH, head_offsets="blocked", tail="zero_keys"),
    "detached, LongNet": lambda q, k, v: dilated_attention(q, k, v, *_LONGNET, mixture_grad="detached"),
    "block-sparse": lambda q, k, v: block_sparse_attention(q, k, v, LocalWindow((1023, 0)), is_causal=True),
}
# 16 heads of 64 in bfloat16
_HEADS, _HEAD_DIM = 16, 64


def measure(kind: str, settings: Sequence[str], count: int, longest: int, device: torch.device) -> list[Row]:
    """Returns a row for each setting. On a CPU, whose allocator reports nothing reserved, a row has the bytes in tensors and a note."""
    draw = random.Random(0)
    shortest = longest // 128
    lengths = [draw.randint(shortest, longest) for _ in range(count)]
    what = f"{count} lengths from {shortest:,} to {longest:,}, {_HEADS} heads of {_HEAD_DIM}, bfloat16"
    rows = []
    for setting in settings:
        found = profile(kind, setting, [longest, *lengths] if setting == LONGEST_FIRST else lengths, device)
        values = {key: found[key] for key in _FIGURES if found[key] is not None}
        note = "" if "fragmentation" in values else "a CPU's allocator does not report what it reserves"
        rows.append(Row(name=kind, case={"part": "fragmentation", "setting": setting, "lengths": what}, values=values, note=note))
    return rows


_FIGURES = ("peak_allocated", "peak_reserved", "fragmentation", "peak_inactive_split", "device_allocs", "retries", "refused", "seconds")


def profile(kind: str, setting: str, lengths: list[int], device: torch.device) -> dict[str, Any]:
    """Returns ``MemoryProfile.as_dict`` of all steps in a new process. The environment's own settings give way to ``setting``."""
    environment = {name: value for name, value in os.environ.items() if "ALLOC_CONF" not in name}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    environment |= {"PYTORCH_ALLOC_CONF": SETTINGS[setting]} if SETTINGS[setting] else {}
    command = [sys.executable, "-c", f"from {__name__} import serve; serve()"]
    asked = json.dumps([kind, lengths, str(device)])
    done = subprocess.run(command, input=asked, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Refused(f"exit code {done.returncode}: {done.stderr.strip().splitlines()[-1:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def serve() -> None:
    """Reads kind, lengths and device from stdin, and prints the profile. Kernels are loaded before, as they take memory of their own."""
    kind, lengths, device = json.load(sys.stdin)
    call = KINDS[kind]

    def step(length: int) -> None:
        q, k, v = (torch.randn(1, length, _HEADS, _HEAD_DIM, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
        if call is None:
            for _ in range(5):
                torch.empty_like(q)
            return
        out = call(q, k, v)
        torch.autograd.grad(out, (q, k, v), torch.randn_like(out))

    step(min(lengths))
    with profile_memory(ops=device == "cpu") as found:
        for length in lengths:
            step(length)
    sys.stdout.write(json.dumps(found.result.as_dict()) + "\n")
