"""The kernels' walk over the tables of nested branches in plain torch, which shows that the tables are right."""

from __future__ import annotations

import torch
from torch import Tensor

from dilated_attention.engine.kernels.nested import NestedFamily, TileTable, tile_table


def nested_attention_twin(
    family: NestedFamily,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    tile_rows: int = 128,
    tile_keys: int = 128,
) -> tuple[Tensor, Tensor]:
    """Runs the kernels' walk over tile tables in plain torch, in q's dtype, one query tile of one head at a time. It is slow, for tests.

    q (B, N, H, D), k, v (B, N, Hk, D), N ≥ family.num_positions → out (B, N_full, H, D), lse (B, H, N_full).
    """
    B, _, H, D = q.shape
    scale = D**-0.5 if scale is None else scale
    out = q.new_zeros(B, family.num_positions, H, D)
    lse = q.new_full((B, H, family.num_positions), -torch.inf)
    for level in range(family.num_levels):
        table = tile_table(family, level, tile_rows, tile_keys, is_causal)
        branch = family.row_branch(level)
        stride = family.rates[branch]
        for head in range(H):
            kv_head = head // (H // k.shape[2])
            for step in family.row_steps(level):
                for segment in range(0, family.num_positions, family.lengths[-1]):
                    for tile in range(len(table.counts)):
                        rows = segment + residue(family, branch, step, head) + (tile * tile_rows + torch.arange(tile_rows)) * stride
                        keys, shared = _keys_of(family, table, tile, head, segment, tile_keys)
                        scores = torch.einsum("bid,bjd->bij", q[:, rows, head], k[:, keys, kv_head]) * scale + shared.to(q.dtype).log()
                        if is_causal:
                            scores = scores.masked_fill(keys[None] > rows[:, None], -torch.inf)
                        lse[:, head, rows] = scores.logsumexp(-1)
                        out[:, rows, head] = scores.softmax(-1) @ v[:, keys, kv_head]
    return out, lse


def residue(family: NestedFamily, branch: int, step: int, head: int) -> int:
    return (family.offsets[branch][head] + step) % family.rates[branch]


def _keys_of(family: NestedFamily, table: TileTable, tile: int, head: int, segment: int, tile_keys: int) -> tuple[Tensor, Tensor]:
    """Returns (positions, multiplicities) of all keys that a query tile visits, one tile after another."""
    count = int(table.counts[tile, 2])
    positions = []
    for branch, step, first, rate in table.tiles[tile, :count].tolist():
        positions.append(segment + residue(family, branch, step, head) + (first + torch.arange(tile_keys)) * rate)
    return torch.cat(positions), table.shared[tile, :count].repeat_interleave(tile_keys)
