"""200 random lengths, forward and backward, do not fragment torch's allocator with expandable segments: reserved ≤ 1.2 × peak in tensors.

Each kind in a process of its own, as the allocator reads its settings once. In torch's own setting tensors of varied lengths alone fragment
it, without any attention: docs/memory.md has the figures of other settings, which ``profile`` takes, too.
"""

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dilated_attention import attention, block_sparse_attention, dilated_attention
from dilated_attention.pattern import LocalWindow
from dilated_attention.profiling import profile_memory

pytestmark = pytest.mark.gpu

_LONGNET = ([2048, 4096, 8192, 16384, 32768], [1, 2, 4, 8, 16])
_GIGAPATH = ([1024, 5792, 32768, 185363, 1048576], [1, 2, 4, 8, 16])
KINDS: dict[str, Callable[..., torch.Tensor]] = {
    "dense": lambda q, k, v: attention(q, k, v, is_causal=True),
    "dilated, LongNet": lambda q, k, v: dilated_attention(q, k, v, *_LONGNET, is_causal=True),
    "dilated, GigaPath": lambda q, k, v: dilated_attention(q, k, v, *_GIGAPATH, head_offsets="blocked", tail="zero_keys"),
    "detached, LongNet": lambda q, k, v: dilated_attention(q, k, v, *_LONGNET, mixture_grad="detached"),
    "block-sparse": lambda q, k, v: block_sparse_attention(q, k, v, LocalWindow((1023, 0)), is_causal=True),
}
# 16 heads of 64 in bfloat16
_HEADS, _HEAD_DIM = 16, 64
BOUND = 1.2


def profile(kind: str, setting: str, lengths: list[int], device: str) -> dict[str, Any]:
    """``MemoryProfile.as_dict`` of all steps in a new process with PYTORCH_ALLOC_CONF=``setting``."""
    environment = {name: value for name, value in os.environ.items() if "ALLOC_CONF" not in name}
    environment |= {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "PYTORCH_ALLOC_CONF": setting}
    command = [sys.executable, "-c", f"from {__name__} import serve; serve()"]
    asked = json.dumps([kind, lengths, device])
    done = subprocess.run(command, input=asked, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def serve() -> None:
    """Reads kind, lengths and device from stdin, and prints the profile. Kernels are loaded before, as they take memory of their own."""
    kind, lengths, device = json.load(sys.stdin)

    def step(length: int) -> None:
        q, k, v = (torch.randn(1, length, _HEADS, _HEAD_DIM, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
        out = KINDS[kind](q, k, v)
        torch.autograd.grad(out, (q, k, v), torch.randn_like(out))

    step(min(lengths))
    with profile_memory(ops=device == "cpu") as found:
        for length in lengths:
            step(length)
    sys.stdout.write(json.dumps(found.as_dict()) + "\n")


@pytest.mark.parametrize("kind", KINDS)
def test_varied_lengths_do_not_fragment_expandable_segments(kind: str) -> None:
    draw = random.Random(0)
    found = profile(kind, "expandable_segments:True", [draw.randint(1024, 131_072) for _ in range(200)], "cuda")
    # of tensors that matter, so that the allocator's pages of 20 MiB for each stream do not
    assert found["peak_allocated"] > 2**30
    assert found["peak_reserved"] <= BOUND * found["peak_allocated"]
    assert found["stats"]["retries"] == 0 and found["stats"]["refused"] == 0
