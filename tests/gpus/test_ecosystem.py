"""Ring modules and models among PyTorch's own over NCCL: FSDP2, DDP, checkpoints, compilation, autocast, meshes. Needs 2 and 4 GPUs.

The checks are those of ``test_ring_ecosystem.py``, on GPUs; here is what only a GPU has.
"""

from __future__ import annotations

import gc
import time

import pytest
import torch
import torch._dynamo

from dilated_attention import RingMultiheadDilatedAttention, shard_sequence
from dilated_attention.distributed.comm.watchdog import POLL
from tests.distributed.test_ring_ecosystem import CHECKS, mesh_of, run_check, step_of
from tests.helpers.machine import needs, pool
from tests.helpers.pool import here, patience

pytestmark = [pytest.mark.gpus, pytest.mark.timeout(600)]

SHAPES = [
    pytest.param((1, 2), marks=needs(2), id="2 of 2"),
    pytest.param((2, 2), marks=needs(4), id="2 of 4"),
    pytest.param((1, 4), marks=needs(4), id="4 of 4"),
]


@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.parametrize("shape", SHAPES)
def test_on_gpus(shape: tuple[int, int], name: str) -> None:
    pool(shape[0] * shape[1]).run(run_check, name, shape)


def compiled_by_inductor(rank: int, world: int) -> None:
    """Forward and backward in bfloat16 through generated kernels, at two lengths; the second one is a symbol."""
    mesh = mesh_of((1, world))["cp"]
    torch.manual_seed(0)
    layer = RingMultiheadDilatedAttention(256, 4, [64, 512], [1, 4], mesh=mesh, rotary=True, qk_norm=True, timeout=patience())
    layer.to(here(), torch.bfloat16)
    torch._dynamo.reset()
    # over gloo this tries the test, and generated C++ would take minutes of that
    fast = torch.compile(layer, fullgraph=True, backend="inductor" if here().type == "cuda" else "aot_eager")
    for n in (512, 384):
        whole = torch.randn(2, n, 256, generator=torch.Generator().manual_seed(n)).to(here(), torch.bfloat16)
        (x,) = shard_sequence(mesh, [whole], [1])
        results = []
        for module in (layer, fast):
            leaf = x.detach().requires_grad_()
            out = module(leaf, is_causal=True, seq_len=n)[0]
            results.append([out, *torch.autograd.grad(out.float().sin().sum(), [leaf, *layer.parameters()])])
        for want, got in zip(*results, strict=True):
            assert got.dtype is torch.bfloat16
            assert (got.float() - want.float()).norm() <= 0.03 * want.float().norm() + 1e-3


@pytest.mark.parametrize("world", [pytest.param(2, marks=needs(2), id="2 GPUs")])
def test_a_layer_compiled_by_inductor(world: int) -> None:
    pool(world).run(compiled_by_inductor)


def held_after_steps(rank: int, world: int, steps: int) -> list[int]:
    """Bytes of this GPU that tensors hold after the third step of a layer and after the last one."""
    mesh = mesh_of((1, world))["cp"]
    torch.manual_seed(0)
    layer = RingMultiheadDilatedAttention(256, 4, [64, 512], [1, 4], mesh=mesh, rotary=True, timeout=patience())
    layer.to(here(), torch.bfloat16)
    (x,) = shard_sequence(mesh, [torch.randn(2, 512, 256, generator=torch.Generator().manual_seed(0)).to(here(), torch.bfloat16)], [1])
    # what tests before this one left to the collector
    gc.collect()
    held = []
    for _ in range(steps):
        step_of(layer, x, lambda x: layer(x, is_causal=True, seq_len=512)[0])
        if here().type == "cuda":
            # an exchange under way holds what it reads, and the host may be several steps ahead
            torch.cuda.synchronize()
            if len(held) in (2, steps - 1):
                # nor do the watching threads, ours and torch's, let go of an exchange before they have looked at it
                time.sleep(4 * POLL)
        held.append(torch.cuda.memory_allocated() if here().type == "cuda" else 0)
    return [held[2], held[-1]]


@pytest.mark.parametrize("world", [pytest.param(2, marks=needs(2), id="2 GPUs"), pytest.param(4, marks=needs(4), id="4 GPUs")])
def test_steps_leave_no_memory_behind(world: int) -> None:
    for early, late in pool(world).run(held_after_steps, 50):
        assert late <= early
