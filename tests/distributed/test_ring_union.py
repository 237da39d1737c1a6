"""Dilated branches and blocks in one softmax over a spread sequence: what one process gives, in float64, to 1e-10."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from dilated_attention import (
    RingBlockSparseDilatedAttention,
    balanced_layout,
    block_sparse_dilated_attention,
    create_attention,
    ring_block_sparse_dilated_attention,
    shard_sequence,
)
from dilated_attention.distributed import Layout
from dilated_attention.distributed.comm.comm_stats import traffic
from dilated_attention.pattern import BigBird, BlockPattern, LocalWindow, PerHead, RandomBlocks
from tests.helpers.pool import here, patience, pool_of

NAMES = ("out", "lse", "dq", "dk", "dv")


@dataclass(frozen=True, kw_only=True)
class Union:
    """A call. ``layout``: also ``"balanced"``, of the blocks."""

    pattern: BlockPattern
    lengths: tuple[int, ...]
    rates: tuple[int, ...]
    N: int
    heads: int = 4
    kv_heads: int = 4
    batch: int = 1
    layout: str = "contiguous"
    head_steps: int | None = None
    bounds: tuple[int, ...] | None = None
    padding: bool = False
    options: tuple[tuple[str, Any], ...] = ()


def errors(rank: int, world: int, union: Union) -> dict[str, float]:
    """Largest error of this rank's rows, forward and backward."""
    generator = torch.Generator().manual_seed(union.N)
    shapes = [(union.batch, union.N, heads, 8) for heads in (union.heads, union.kv_heads, union.kv_heads, union.heads)]
    q, k, v, dout = (torch.randn(shape, generator=generator, dtype=torch.float64).to(here()) for shape in shapes)
    dlse = torch.randn(union.batch, union.heads, union.N, generator=generator, dtype=torch.float64).to(here())
    layout: str | Layout = union.layout
    if layout == "balanced":
        layout = balanced_layout(union.pattern, union.N, world, union.heads)
    options: dict[str, Any] = dict(union.options) | {"return_lse": True}
    options["cu_seqlens"] = None if union.bounds is None else torch.tensor(union.bounds, dtype=torch.int32, device=here())
    padding = torch.rand(union.batch, union.N, generator=generator).to(here()) < 0.2 if union.padding else None
    parts = shard_sequence(None, [q, k, v, dout, dlse.transpose(1, 2)], [1] * 5, layout=layout)
    mask = None if padding is None else shard_sequence(None, [padding], [1], layout=layout)[0]

    def results(function: Any, tensors: list[torch.Tensor], gradients: list[torch.Tensor], **more: Any) -> list[torch.Tensor]:
        # all ranks draw the same seed of dropout
        torch.manual_seed(0)
        leaves = [x.detach().requires_grad_() for x in tensors]
        out, lse = function(*leaves, union.lengths, union.rates, union.pattern, **options, **more)
        return [out.detach(), lse.detach().transpose(1, 2), *torch.autograd.grad([out, lse], leaves, gradients)]

    whole = results(block_sparse_dilated_attention, [q, k, v], [dout, dlse], key_padding_mask=padding)
    wanted = shard_sequence(None, whole, [1] * 5, layout=layout)
    ring = {"layout": layout, "seq_len": union.N, "head_steps": union.head_steps, "timeout": patience(), "key_padding_mask": mask}
    found = results(ring_block_sparse_dilated_attention, parts[:3], [parts[3], parts[4].transpose(1, 2)], **ring)
    same = [torch.where(a == b, 0.0, (a - b).abs()) for a, b in zip(found, wanted, strict=True)]
    return {name: float(x.max()) if x.numel() else 0.0 for name, x in zip(NAMES, same, strict=True)}


def unions(world: int) -> list[Union]:
    N = 64 * world + 37
    causal = (("is_causal", True),)
    return [
        Union(pattern=LocalWindow(40, block_size=64), lengths=(16, 64), rates=(1, 4), N=N),
        Union(pattern=LocalWindow(40, block_size=64), lengths=(64, 64 * world), rates=(1, 4), N=64 * world, options=causal),
        Union(pattern=BigBird(30, 3, 1, block_size=64), lengths=(50, 10**9), rates=(3, 2), N=N, kv_heads=2, batch=2, head_steps=2),
        Union(pattern=RandomBlocks(0.3, block_size=64), lengths=(32,), rates=(2,), N=N, layout="zigzag", options=causal),
        Union(pattern=RandomBlocks(0.3, block_size=64), lengths=(48, 100), rates=(1, 5), N=N, layout="balanced", kv_heads=1),
        Union(pattern=LocalWindow(20, block_size=64), lengths=(16, 70), rates=(1, 2), N=N, bounds=(0, 30, 31, N), options=causal),
        Union(pattern=LocalWindow(20, block_size=64), lengths=(16, 70), rates=(1, 2), N=N, padding=True, batch=2),
        Union(pattern=RandomBlocks(0.4, block_size=64), lengths=(30, 70), rates=(2, 3), N=N, options=(("dropout_p", 0.5), *causal)),
        Union(
            pattern=PerHead((LocalWindow(1), LocalWindow(150), RandomBlocks(0.2, seed=1), RandomBlocks(0.4, seed=2))),
            lengths=(40, 90),
            rates=(2, 2),
            N=2 * N,
            head_steps=4,
            options=(("tail", "zero_keys"), ("head_offsets", "zero")),
        ),
        Union(pattern=LocalWindow(9, block_size=64), lengths=(16, 64), rates=(1, 2), N=N, options=(("branch_heads", "split"),)),
        Union(pattern=LocalWindow(9, block_size=64), lengths=(8,), rates=(2,), N=world - 1),
    ]


@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
def test_every_rank_gets_what_one_process_gets(world: int) -> None:
    for union in unions(world):
        found = pool_of(world).run(errors, union, timeout=120)
        worst = {name: max(rank[name] for rank in found) for name in NAMES}
        assert max(worst.values()) <= 1e-10, f"{worst} on {world} ranks: {union}"


def moved(rank: int, world: int) -> tuple[int, int]:
    """Bytes that a call receives, with a branch whose keys the window has already, and with one that has others."""
    found = []
    for rates in ((1,), (4,)):
        x = torch.randn(1, 64, 2, 8)
        with traffic() as counted:
            ring_block_sparse_dilated_attention(x, x, x, [64 * world], rates, LocalWindow(64, block_size=64), seq_len=64 * world)
        found.append(counted.received)
    return found[0], found[1]


def test_a_key_that_both_parts_need_travels_once() -> None:
    """Two ranks of one block: the window needs the whole other block, and so does the branch; K and V of 2 heads of 8 floats."""
    block = 2 * 64 * 2 * 8 * 4
    assert pool_of(2).run(moved) == [(block, block)] * 2


def of_module(rank: int, world: int) -> float:
    torch.manual_seed(0)
    layer = create_attention(
        "ring_block_sparse_dilated", segment_lengths=[16, 48], dilation_rates=[1, 3], pattern=LocalWindow(20, block_size=64)
    )
    assert isinstance(layer, RingBlockSparseDilatedAttention) and "layout='contiguous'" in repr(layer)
    q, k, v = torch.randn(3, 1, 48 * world, 2, 8, dtype=torch.float64)
    wanted = block_sparse_dilated_attention(q, k, v, [16, 48], [1, 3], layer.block_pattern, is_causal=True)
    rows = slice(48 * rank, 48 * rank + 48)
    return float((layer(q[:, rows], k[:, rows], v[:, rows], is_causal=True) - wanted[:, rows]).abs().max())


@pytest.mark.parametrize("world", [1, 2])
def test_the_module(world: int) -> None:
    assert max(pool_of(world).run(of_module)) <= 1e-12
