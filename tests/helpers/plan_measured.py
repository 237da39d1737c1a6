"""Peak memory of one process, case by case, for ``tests/planning/test_plan_memory.py``.

``python -m tests.helpers.plan_measured`` prints one JSON line a case.

Resident memory is that of the process, and its highest value can be set back, on Linux; cases are large beside what a process has anyway.
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dilated_attention import attention, block_sparse_attention, dilated_attention
from dilated_attention.factory import create_model
from dilated_attention.pattern import LocalWindow

BRANCHES = {"segment_lengths": (256, 1024, 8192), "dilation_rates": (1, 4, 16)}
WINDOW = LocalWindow((255, 0))
Tensors = tuple[torch.Tensor, ...]


def qkv(num_positions: int, heads: int, head_dim: int, dtype: torch.dtype, count: int) -> Tensors:
    torch.manual_seed(0)
    return tuple(torch.randn(1, num_positions, heads, head_dim).to(dtype) for _ in range(count))


def call(function: Callable[..., torch.Tensor], shape: tuple[int, int, int], dtype: torch.dtype, training: bool) -> None:
    """Inputs, forward and backward: all that a plan counts."""
    q, k, v, *rest = qkv(*shape, dtype, 4 if training else 3)
    if training:
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out = function(*leaves)
        grads = torch.autograd.grad(out, leaves, rest[0])
        assert all(bool(x[0, -1, 0, 0].isfinite()) for x in grads)
    else:
        with torch.no_grad():
            assert bool(function(q, k, v)[0, -1, 0, 0].isfinite())


def step(preset: str, num_positions: int, overrides: dict[str, Any]) -> None:
    """A second step, which has the optimizer's moments."""
    model = create_model(preset, **overrides)
    optimizer = torch.optim.AdamW(model.parameters())
    for n in (256, num_positions):
        tokens = torch.randint(256, (1, n))
        optimizer.zero_grad()
        model(tokens, targets=tokens).backward()
        optimizer.step()


CASES: dict[str, Callable[[int], None]] = {
    "dilated forward": lambda n: call(lambda q, k, v: dilated_attention(q, k, v, **BRANCHES), (n, 4, 64), torch.float32, False),
    "dilated training": lambda n: call(lambda q, k, v: dilated_attention(q, k, v, **BRANCHES), (n, 4, 64), torch.float32, True),
    "dilated bfloat16": lambda n: call(lambda q, k, v: dilated_attention(q, k, v, **BRANCHES), (n, 4, 64), torch.bfloat16, True),
    "dense training": lambda n: call(attention, (n, 256, 64), torch.float32, True),
    "block_sparse forward": lambda n: call(lambda q, k, v: block_sparse_attention(q, k, v, WINDOW), (n, 4, 64), torch.float32, False),
    "block_sparse training": lambda n: call(lambda q, k, v: block_sparse_attention(q, k, v, WINDOW), (n, 4, 64), torch.float32, True),
    "model": lambda n: step("longnet-tiny", n, {}),
    "model, checkpointed": lambda n: step("longnet-tiny", n, {"checkpoint_activations": True, "num_layers": 4}),
}


def resident(field: str) -> int:
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields[field].split()[0]) * 1024


def measured(run: Callable[[int], None], num_positions: int) -> int:
    # kernels, thread pools and plans of the same kind, so that what they hold is not counted as the tensors'
    run(min(1024, num_positions // 4))
    gc.collect()
    # what was freed goes back to the system
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    run(num_positions)
    return resident("VmHWM") - before


def main() -> None:
    torch.set_num_threads(1)
    for name, n in json.loads(sys.argv[1]).items():
        print(json.dumps({"case": name, "bytes": measured(CASES[name], n)}), flush=True)


if __name__ == "__main__":
    main()
