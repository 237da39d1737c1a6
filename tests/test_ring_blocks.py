"""Block-sparse attention of a sequence spread over processes: what every rank gets is what the whole gives, in float64, to 1e-10."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dilated_attention import balanced_layout, ring_block_sparse_attention, shard_sequence
from dilated_attention.distributed import Layout, spans
from dilated_attention.pattern import (
    Axial,
    BigBird,
    BlockPattern,
    GlobalLocal,
    LocalWindow,
    MaskFunction,
    PerHead,
    RandomBlocks,
)
from tests.pool import pool_of
from tests.test_block_sparse import PATTERNS, RESULTS, TOLERANCE, Case, Inputs, by_table, errors, inputs, plain, results, some_patterns

WORLDS = (1, 2, 3, 4, 5)
SEQUENCE_DIM = {"out": 1, "lse": 2, "dq": 1, "dk": 1, "dv": 1}


@dataclass(frozen=True, kw_only=True)
class Spread:
    """One call of all ranks. ``layout``: also ``"balanced"`` and ``"dealt"``, blocks dealt at random."""

    case: Case
    layout: str = "contiguous"
    head_steps: int | None = None
    seq_len_given: bool = True


def layout_of(spread: Spread, world: int) -> str | Layout:
    case = spread.case
    N = case.num_keys
    if spread.layout == "balanced":
        return balanced_layout(case.pattern, N, world, case.heads, is_causal=case.is_causal)
    if spread.layout != "dealt":
        return spread.layout
    size = max(case.pattern.block_size)
    blocks = [(start, min(start + size, N)) for start in range(0, N, size)]
    owners = random.Random(case.seed).choices(range(world), k=len(blocks))
    return Layout(N, tuple(tuple(block for block, owner in zip(blocks, owners, strict=True) if owner == rank) for rank in range(world)))


def positions(N: int, rank: int, world: int, layout: str | Layout) -> torch.Tensor:
    return torch.cat([torch.arange(*span) for span in spans(N, rank, world, layout)])


def ring(case: Case, x: Inputs, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
    # all ranks are seeded alike, and as the one process is that the results are compared with
    torch.manual_seed(case.seed)
    return ring_block_sparse_attention(
        q,
        k,
        v,
        case.pattern,
        is_causal=case.is_causal,
        scale=case.scale,
        cu_seqlens=x.cu_seqlens,
        key_padding_mask=x.key_padding_mask,
        dropout_p=case.dropout_p,
        return_lse=True,
        timeout=30.0,
        **options,
    )


def local_inputs(x: Inputs, rows: torch.Tensor) -> Inputs:
    q, k, v, dout = (y[:, rows] for y in (x.q, x.k, x.v, x.dout))
    padding = None if x.key_padding_mask is None else x.key_padding_mask[:, rows]
    return Inputs(q, k, v, dout, x.dlse[..., rows], padding, x.cu_seqlens)


def run(rank: int, world: int, spreads: Sequence[Spread]) -> list[dict[str, torch.Tensor]]:
    found = []
    for spread in spreads:
        case, layout = spread.case, layout_of(spread, world)
        x = local_inputs(inputs(case), positions(case.num_keys, rank, world, layout))
        length = case.num_keys if spread.seq_len_given else None
        found.append(results(ring, case, x, layout=layout, seq_len=length, head_steps=spread.head_steps))
    return found


def check(world: int, spreads: Sequence[Spread]) -> None:
    ranks = pool_of(world).run(run, list(spreads), timeout=120)
    for index, spread in enumerate(spreads):
        case, layout = spread.case, layout_of(spread, world)
        rows = [positions(case.num_keys, rank, world, layout) for rank in range(world)]
        whole = {}
        for name in RESULTS:
            parts = torch.cat([found[index][name] for found in ranks], SEQUENCE_DIM[name])
            whole[name] = torch.empty_like(parts).index_copy_(SEQUENCE_DIM[name], torch.cat(rows), parts)
        x = inputs(case)
        for name, error in errors(whole, results(plain, case, x)).items():
            assert error <= TOLERANCE, f"E({name}) = {error:.3g} on {world} ranks: {spread}"


def case_of(pattern: BlockPattern, N: int, **changes: Any) -> Case:
    options: dict[str, Any] = {"heads": 4, "kv_heads": 2} | changes
    return Case(pattern=pattern, num_queries=N, num_keys=N, **options)


# of the patterns that content does not choose
NAMES = [name for name in PATTERNS if not name.startswith("top")]


@pytest.mark.parametrize("world", WORLDS)
def test_every_pattern(world: int) -> None:
    N = 64 * world + 150
    spreads = []
    for index, name in enumerate(NAMES):
        for is_causal in (False, True):
            block = [(64, 64), (128, 64), (64, 128), (128, 128)][(index + is_causal) % 4]
            layout = ["contiguous", "zigzag", "balanced", "dealt"][(index // 2 + is_causal) % 4]
            case = case_of(PATTERNS[name](N, block), N, heads=2, kv_heads=1 + index % 2, is_causal=is_causal, seed=index)
            spreads.append(Spread(case=case, layout=layout, head_steps=1 + index % 2))
    check(world, spreads)
