"""Nested families of branches: every (query, key) pair is visited once, with its multiplicity folded into the row maximum of a tile.

Branches (w_i, r_i) are *nested* if r_i | r_{i+1}, w_i | w_{i+1}, r_i | w_i and, for each head, o_{i+1} ≡ o_i (mod r_i). Then branch i takes
every position that branch i+1 takes. The *level* of a position is the largest branch that takes it. A pair (p, q) occurs in
m = min(level p, level q) − s + 1 branches (none if that is < 1), where s is the smallest branch with a segment that holds both. So a query
of level l needs the keys of each exact level c < l inside its w_c segment, and all keys of level ≥ l inside its w_l segment. These key
sets are arithmetic progressions. If they are cut into tiles inside one w_0 segment, m is one number per (query tile, key tile).
LongNet's five branches have 3968 · N pairs per head, of which 3008 · N are distinct.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

# the largest number of table entries of one launch: heads × query tiles of the longest segment × key tiles of a query. Each takes 4 bytes;
# in addition, the entries of a single head take 20 bytes each.
MAX_TABLE = 2**24
# limits of the Gluon kernel: queries, or keys, of a tile, and number of branches with distinct rates
TILE_KEYS = 128
MAX_DESCRIPTORS = 6


@dataclass(frozen=True)
class NestedFamily:
    """Branches that nest, for H heads and the first ``num_positions`` positions, which are a multiple of the longest segment.

    Position p of head h belongs to progression (branch i, step u) where p ≡ o_i(h) + u·r_{i−1} (mod r_i); u = 0 is what branch i takes,
    u ≥ 1 (u < r_i / r_{i−1}) is of exact level i − 1. ``offsets[i][h]`` is o_i(h).
    """

    lengths: tuple[int, ...]
    rates: tuple[int, ...]
    offsets: tuple[tuple[int, ...], ...]
    num_positions: int

    @property
    def num_levels(self) -> int:
        return len(self.lengths)

    @property
    def num_heads(self) -> int:
        return len(self.offsets[0])

    def row_branch(self, level: int) -> int:
        """Returns the branch whose rate is the stride of a level's rows: exact level l < top is branch l without branch l+1."""
        return min(level + 1, self.num_levels - 1)

    def row_steps(self, level: int) -> tuple[int, ...]:
        """Returns the shifts u·r_l of a level's progressions relative to o of ``row_branch``; (0,) on the top level."""
        if level == self.num_levels - 1:
            return (0,)
        return tuple(range(self.rates[level], self.rates[level + 1], self.rates[level]))

    def keys_per_query(self, level: int) -> int:
        """Returns the number of distinct keys of a query at this level, without causality."""
        exact = sum(w // r - w // r_next for w, r, r_next in zip(self.lengths[:level], self.rates, self.rates[1:], strict=False))
        return exact + self.lengths[level] // self.rates[level]

    def pairs(self) -> int:
        """Returns the number of distinct (query, key) pairs of one head over ``num_positions``, without causality."""
        total = 0
        for level in range(self.num_levels):
            rows = self.num_positions // self.rates[self.row_branch(level)] * len(self.row_steps(level))
            total += rows * self.keys_per_query(level)
        return total

    def branch_pairs(self) -> int:
        """Returns the number of pairs of one head summed over branches, which is what branch-by-branch kernels compute."""
        return sum(self.num_positions // r * (w // r) for w, r in zip(self.lengths, self.rates, strict=True))

    def has_tiles(self, tile_rows: int, tile_keys: int) -> bool:
        """Whether tiles of these sizes have one multiplicity each, and their tables fit."""
        if any(self.lengths[0] % (tile * self.rates[-1]) for tile in (tile_rows, tile_keys)):
            return False
        rows = self.lengths[-1] // (tile_rows * self.rates[min(1, self.num_levels - 1)])
        keys = max(self.keys_per_query(level) for level in range(self.num_levels)) // tile_keys
        return self.num_heads * rows * keys <= MAX_TABLE


def nested_family(
    lengths: Sequence[int], rates: Sequence[int], offsets: Sequence[Sequence[int]], num_positions: int
) -> NestedFamily | None:
    """Returns the nested family of these branches (offsets[branch][head]) on the whole longest segments of ``num_positions``.

    Segments longer than the sequence are cut to it. It is None if the branches do not nest. The positions from ``family.num_positions`` on
    are in a shorter last segment and are left to the branch-by-branch engine.
    """
    lengths = tuple(min(w, num_positions) for w in lengths)
    if num_positions < 1 or any(w % r or min(row) < 0 for w, r, row in zip(lengths, rates, offsets, strict=True)):
        # also where some head takes no position of a branch
        return None
    for inner, outer in itertools.pairwise(zip(lengths, rates, offsets, strict=True)):
        if outer[0] % inner[0] or outer[1] % inner[1] or any((o - below) % inner[1] for o, below in zip(outer[2], inner[2], strict=True)):
            return None
    full = num_positions // lengths[-1] * lengths[-1]
    return NestedFamily(lengths, tuple(rates), tuple(tuple(row) for row in offsets), full)


@dataclass(frozen=True, eq=False)
class TileTable:
    """The key tiles that the query tiles of one level visit, the same for every head, longest segment and progression of rows.

    Query tile Q holds rows Q·tile … of its progression inside the longest segment. Its key tiles are ``tiles[Q, :counts[Q, 2]]``. If
    causal, the first ``counts[Q, 0]`` cross the diagonal, those up to ``counts[Q, 1]`` are before it, and the rest are hidden from the
    first half of the query tile's rows and cross the diagonal of the second half.

    tiles (Q, T, 4) int32: branch, step, first row (counted in the progression, from the start of the longest segment), rate;
    shared (Q, T) int32: the multiplicity m of every pair of the two tiles.
    """

    tiles: Tensor
    shared: Tensor
    counts: Tensor


@functools.lru_cache(maxsize=64)
def tile_table(family: NestedFamily, level: int, tile_rows: int, tile_keys: int, is_causal: bool) -> TileTable:
    """Builds the table of one level on the CPU. ``family.has_tiles`` must hold."""
    top, stride = family.lengths[-1], family.rates[family.row_branch(level)]
    span = tile_rows * stride
    query = torch.arange(top // span)[:, None] * span
    # key groups (class, branch, steps): every exact level below this one, then everything that this level takes
    groups = [(c, c + 1, family.row_steps(c)) for c in range(level)] + [(level, level, (0,))]
    columns: list[tuple[Tensor, ...]] = []
    for key_level, branch, steps in groups:
        rate, length = family.rates[branch], family.lengths[key_level]
        key_span = tile_keys * rate
        start = query // length * length + torch.arange(length // key_span)[None] * key_span
        shared = sum((start // w == query // w).int() for w in family.lengths[: key_level + 1])
        kind = torch.ones_like(start)
        if is_causal:
            kind = (start + key_span <= query).long()
            kind = torch.where(start >= query + span // 2, 2, kind)
            kind = torch.where(start >= query + span, 3, kind)
        for step in steps:
            entry = torch.stack(
                [torch.full_like(start, branch), torch.full_like(start, step), start // rate, torch.full_like(start, rate)], -1
            )
            columns.append((entry, torch.as_tensor(shared), kind))
    tiles, shared, kind = (torch.cat(parts, dim=1) for parts in zip(*columns, strict=True))
    order = kind.argsort(dim=1, stable=True)
    tiles = tiles.gather(1, order[..., None].expand(-1, -1, 4))
    counts = torch.stack([(kind == 0).sum(1), (kind < 2).sum(1), (kind < 3).sum(1)], -1)
    return TileTable(tiles.int().contiguous(), shared.gather(1, order).int().contiguous(), counts.int().contiguous())


class DeviceTable(NamedTuple):
    tiles: Tensor
    bias: Tensor
    counts: Tensor
    starts: Tensor
    width: int


@functools.lru_cache(maxsize=64)
def device_table(family: NestedFamily, level: int, tile_rows: int, tile_keys: int, is_causal: bool, device: torch.device) -> DeviceTable:
    """Returns a level's table on the device, with bias (log2 of the multiplicities) and, if causal, starts (H, Q, T).

    starts are the positions at which each head's key tiles begin, counted from the start of the longest segment. The table is padded at
    the end, since the Gluon kernel reads one entry ahead.
    """
    table = tile_table(family, level, tile_rows, tile_keys, is_causal)
    offsets = torch.tensor(family.offsets, dtype=torch.int32).T
    branch, step, first, rate = table.tiles.unbind(-1)
    starts = (offsets[:, branch] + step) % rate + first * rate if is_causal else branch
    tiles, bias, starts = (torch.nn.functional.pad(x.flatten(), (0, 8)) for x in (table.tiles, table.shared.float().log2(), starts))
    return DeviceTable(tiles.to(device), bias.to(device), table.counts.to(device), starts.to(device), table.shared.shape[1])


@functools.lru_cache(maxsize=64)
def device_offsets(family: NestedFamily, device: torch.device) -> Tensor:
    return torch.tensor(family.offsets, dtype=torch.int32, device=device)
