"""To and from FlexAttention's BlockMask."""

from __future__ import annotations

import torch
from torch.nn.attention.flex_attention import BlockMask

from dilated_attention.pattern.block import BLOCK_SIZES, BlockPattern, MaskMod
from dilated_attention.pattern.block_function import MaskFunction
from dilated_attention.pattern.block_kept import kept_blocks
from dilated_attention.pattern.block_level import BlockTensor


def from_block_mask(block_mask: BlockMask, *, batch: int | None = None) -> BlockPattern:
    """The pattern that a BlockMask describes: its full blocks whole, its other blocks under its ``mask_mod``.

    Args:
        block_mask: of one sequence, with as many queries as keys, and blocks of multiples of 64: larger ones are cut into blocks of 128 or 64.
            A mask function that depends on the head needs a BlockMask made for all heads.
        batch: which entry of its batch; may be left out if there is one. Patterns are the same for a whole batch.

    Raises:
        ValueError: it has no such pattern.
    """
    num_queries, num_keys = block_mask.seq_lengths
    if num_queries != num_keys:
        raise ValueError(
            f"block_mask has {num_queries} queries and {num_keys} keys; expected one sequence: make it with Q_LEN = KV_LEN, "
            "and give the queries' place by query_offset"
        )
    sizes = tuple(int(size) for size in block_mask.BLOCK_SIZE)
    if any(size % BLOCK_SIZES[0] for size in sizes):
        raise ValueError(f"block_mask has BLOCK_SIZE {sizes}; expected multiples of {BLOCK_SIZES[0]}: make it with BLOCK_SIZE=128")
    entries = block_mask.kv_num_blocks.shape[0]
    if batch is None and entries > 1:
        raise ValueError(
            f"block_mask has {entries} batch entries and a pattern is for all of a batch; choose one: from_block_mask(…, batch=0)"
        )
    chosen = 0 if batch is None else batch
    if not 0 <= chosen < entries:
        raise ValueError(f"batch is {batch}; block_mask has {entries} batch entries: expected 0 to {entries - 1}")
    q_block, k_block = (BLOCK_SIZES[1] if size % BLOCK_SIZES[1] == 0 else BLOCK_SIZES[0] for size in sizes)
    block_size = (q_block, k_block)

    def table(counts: torch.Tensor, indices: torch.Tensor) -> BlockTensor:
        counts, indices = counts[chosen], indices[chosen].long()
        columns = -(-num_keys // sizes[1])
        # behind the end of each list indices may be anything
        listed = torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]
        kept = torch.zeros(*indices.shape[:-1], columns + 1, dtype=torch.bool, device=indices.device)
        kept.scatter_(-1, torch.where(listed, indices, columns), True)
        kept = kept[..., :columns].repeat_interleave(sizes[0] // q_block, 1).repeat_interleave(sizes[1] // k_block, 2)
        return BlockTensor(kept[:, : -(-num_queries // q_block), : -(-num_keys // k_block)], block_size=block_size)

    mask_mod: MaskMod = block_mask.mask_mod
    if chosen:
        # patterns know no batch: their functions are asked about entry 0
        def mask_mod(batch: torch.Tensor, head: torch.Tensor, q_idx: torch.Tensor, kv_idx: torch.Tensor) -> torch.Tensor:
            return block_mask.mask_mod(batch + chosen, head, q_idx, kv_idx)

    partial = table(block_mask.kv_num_blocks, block_mask.kv_indices)
    pattern: BlockPattern = partial & MaskFunction(mask_mod, per_head=partial.per_head, block_size=block_size)
    if block_mask.full_kv_num_blocks is not None:
        assert block_mask.full_kv_indices is not None
        pattern = table(block_mask.full_kv_num_blocks, block_mask.full_kv_indices) | pattern
    return pattern


def to_block_mask(
    pattern: BlockPattern, num_positions: int, num_heads: int, *, device: torch.device | str = "cpu", is_causal: bool = False
) -> BlockMask:
    """The BlockMask of a pattern, (1, 1 or num_heads, N, N), with the lists of both sides.

    Its index tensors are as wide as the longest list, int32: short for windows, whole for a pattern in which one row keeps everything.
    """
    kept = kept_blocks(pattern, num_positions, num_heads, is_causal=is_causal, device=device)
    grid = pattern.grid(num_positions, device=device)
    rows = torch.repeat_interleave(kept.row_starts.diff().long())
    group, row = rows // max(grid.num_rows, 1), rows % max(grid.num_rows, 1)
    column = kept.columns.long()
    is_full = torch.ones_like(column, dtype=torch.bool) if kept.masks is None else kept.masks < 0

    def lists(chosen: torch.Tensor, of: torch.Tensor, number: int, index: torch.Tensor, last: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(counts (1, G, number), indices (1, G, number, longest)) of the chosen entries, by ``of``, ascending by ``index``."""
        chosen = chosen.nonzero()[:, 0]
        place, _ = ((group[chosen] * number + of[chosen]) * last + index[chosen]).sort()
        where, what = place // last, place % last
        counts = torch.zeros(kept.num_groups * number, dtype=torch.int64, device=place.device)
        counts.index_add_(0, where, torch.ones_like(where))
        width = max(int(counts.max()), 1) if counts.numel() else 1
        indices = torch.zeros(kept.num_groups * number, width, dtype=torch.int32, device=place.device)
        indices[where, torch.arange(len(where), device=place.device) - (counts.cumsum(0) - counts)[where]] = what.to(torch.int32)
        return counts.to(torch.int32).view(1, kept.num_groups, number), indices.view(1, kept.num_groups, number, width)

    num_rows, num_columns = max(grid.num_rows, 1), max(grid.num_columns, 1)
    whole = pattern.at(num_positions)
    return BlockMask(
        (num_positions, num_positions),
        *lists(~is_full, row, num_rows, column, num_columns),
        *lists(is_full, row, num_rows, column, num_columns),
        *lists(~is_full, column, num_columns, row, num_rows),
        *lists(is_full, column, num_columns, row, num_rows),
        BLOCK_SIZE=(pattern.q_block, pattern.k_block),
        mask_mod=(whole.causal() if is_causal else whole).mask_mod(num_positions, device),
    )
