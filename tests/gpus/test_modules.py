"""Ring modules over NCCL in bfloat16 against the modules of one GPU, forward and backward. Needs 2, 3 and 4 GPUs.

E(x) ≤ 2·E(one GPU's module in bfloat16) + roundings, both against one GPU's module in float64 from the same weights.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dilated_attention import (
    BlockSparseAttention,
    BlockSparseDilatedAttention,
    DilatedAttention,
    MultiheadBlockSparseAttention,
    MultiheadBlockSparseDilatedAttention,
    MultiheadDilatedAttention,
    RingAttention,
    RingBlockSparseAttention,
    RingBlockSparseDilatedAttention,
    RingDilatedAttention,
    RingMultiheadBlockSparseAttention,
    RingMultiheadBlockSparseDilatedAttention,
    RingMultiheadDilatedAttention,
    shard_sequence,
)
from dilated_attention.pattern import LocalWindow
from dilated_attention.testing import largest, max_error
from tests.distributed.test_ring_block_multihead import KINDS as BLOCK_KINDS
from tests.distributed.test_ring_block_multihead import SETTINGS, equal_to_one_process, in_the_ecosystem
from tests.helpers.machine import pool, worlds
from tests.helpers.pool import here, patience

pytestmark = [pytest.mark.gpus, pytest.mark.timeout(600)]

N = 700
BRANCHES: dict[str, Any] = {"segment_lengths": [128, 700], "dilation_rates": [1, 4]}
WINDOW = LocalWindow(100)
# of one GPU, of several, and the layouts that the latter takes
KINDS: dict[str, tuple[Callable[..., nn.Module], Callable[..., nn.Module], tuple[str, ...]]] = {
    "ring": (lambda: DilatedAttention([2**62], [1], head_offsets="zero"), RingAttention, ("zigzag", "striped")),
    "ring_dilated": (lambda: DilatedAttention(**BRANCHES), lambda **o: RingDilatedAttention(**BRANCHES, **o), ("contiguous", "zigzag")),
    "ring_block_sparse": (
        lambda: BlockSparseAttention(WINDOW),
        lambda **o: RingBlockSparseAttention(WINDOW, **o),
        ("contiguous", "zigzag"),
    ),
    "ring_multihead_dilated": (
        lambda: MultiheadDilatedAttention(256, 4, **BRANCHES, rotary=True, qk_norm=True),
        lambda **o: RingMultiheadDilatedAttention(256, 4, **BRANCHES, rotary=True, qk_norm=True, **o),
        ("contiguous", "striped"),
    ),
    "ring_multihead_block_sparse": (
        lambda: MultiheadBlockSparseAttention(256, 4, WINDOW, rotary=True),
        lambda **o: RingMultiheadBlockSparseAttention(256, 4, WINDOW, rotary=True, **o),
        ("contiguous", "zigzag"),
    ),
    "ring_block_sparse_dilated": (
        lambda: BlockSparseDilatedAttention(**BRANCHES, pattern=WINDOW),
        lambda **o: RingBlockSparseDilatedAttention(**BRANCHES, pattern=WINDOW, **o),
        ("contiguous", "zigzag"),
    ),
    "ring_multihead_block_sparse_dilated": (
        lambda: MultiheadBlockSparseDilatedAttention(256, 4, **BRANCHES, pattern=WINDOW, rotary=True),
        lambda **o: RingMultiheadBlockSparseDilatedAttention(256, 4, **BRANCHES, pattern=WINDOW, rotary=True, **o),
        ("contiguous", "zigzag"),
    ),
}


def step(module: nn.Module, inputs: list[torch.Tensor], dout: torch.Tensor, is_causal: bool) -> list[torch.Tensor]:
    """(out, gradients of the inputs, gradients of the parameters)."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = module(*leaves, is_causal=is_causal)
    out = out[0] if isinstance(out, tuple) else out
    return [out.detach(), *torch.autograd.grad(out, [*leaves, *module.parameters()], dout)]


def errors(rank: int, world: int, kind: str, layout: str, is_causal: bool) -> list[tuple[str, float, float]]:
    """(what, error, bound) of this rank's rows and of the parameters."""
    make_alone, make_ring, _ = KINDS[kind]
    torch.manual_seed(0)
    alone = make_alone().to(here(), torch.bfloat16)
    ring = make_ring(layout=layout, timeout=patience()).to(here(), torch.bfloat16)
    ring.load_state_dict(alone.state_dict())
    wide = copy.deepcopy(alone).double()
    rng = torch.Generator().manual_seed(1)
    shapes = [(2, N, 256)] * 2 if list(alone.parameters()) else [(2, N, 4, 64)] * 4
    *inputs, dout = (torch.randn(shape, generator=rng).to(here(), torch.bfloat16) for shape in shapes)
    truth = step(wide, [x.double() for x in inputs], dout.double(), is_causal)
    narrow = step(alone, inputs, dout, is_causal)
    parts = shard_sequence(None, [*inputs, dout], [1] * len(shapes), layout=layout)
    found = step(ring, parts[:-1], parts[-1], is_causal)
    rows = 1 + len(inputs)
    report = []
    for index, (x, same, true) in enumerate(zip(found, narrow, truth, strict=True)):
        # each rank's share of a gradient is rounded once
        bound = 2 * max_error(same, true) + (1 + world / 2) * torch.finfo(torch.bfloat16).eps * largest(true)
        if index < rows:
            (true,) = shard_sequence(None, [true], [1], layout=layout)
        else:
            x = x.float().contiguous()
            dist.all_reduce(x)
        report.append((f"result {index}", max_error(x, true), bound))
    return report


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world", worlds(2, 3, 4))
def test_modules_are_those_of_one_gpu(world: int, kind: str, is_causal: bool) -> None:
    layout = KINDS[kind][2][(world + is_causal) % 2]
    for rank, report in enumerate(pool(world).run(errors, kind, layout, is_causal)):
        for what, error, bound in report:
            assert error <= bound, f"rank {rank} of {world}, {layout}: E({what}) = {error:.3g} > {bound:.3g}"


@pytest.mark.parametrize("kind", BLOCK_KINDS)
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("world", worlds(2, 3))
def test_block_sparse_multihead_module_in_float64(world: int, setting: str, kind: str) -> None:
    pool(world).run(equal_to_one_process, setting, kind)


@pytest.mark.parametrize("kind", BLOCK_KINDS)
@pytest.mark.parametrize("world", worlds(2))
def test_its_weights_copies_compilation_and_refusals(world: int, kind: str) -> None:
    pool(world).run(in_the_ecosystem, kind)
