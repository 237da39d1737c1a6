"""Block patterns and lists for tests: what there is to try, and lists written out as dense masks."""

import torch
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import BlockMask

from dilated_attention.pattern import BigBird, BlockPattern, LocalWindow, PerHead, RandomBlocks, Sparsity
from dilated_attention.pattern.blocks.block_lists import BlockLists, unpacked
from dilated_attention.pattern.blocks.compose import KINDS
from tests.helpers.strategies import some_patterns

BLOCK_SIZES = (64, 128, (64, 128), (128, 64))
HEADS = 2


def lattice(batch: torch.Tensor, head: torch.Tensor, q_idx: torch.Tensor, kv_idx: torch.Tensor) -> torch.Tensor:
    """A function of single pairs with full, empty and partial blocks, and rows without keys."""
    return ((q_idx // 50 + kv_idx // 70 + head) % 3 == 0) & (q_idx % 200 != 17)


def compositions(num_positions: int, block_size: int | tuple[int, int]) -> st.SearchStrategy[BlockPattern]:
    """Of every kind, alone and in unions, intersections and patterns per head, nested."""
    block = block_size if isinstance(block_size, tuple) else (block_size, block_size)
    # what no random one is
    shared = RandomBlocks(0.6, 1, per_head=False, own_block=True, block_size=block)
    # partial blocks beyond its window
    drawn = BigBird(3, 0, 2, block_size=block) & LocalWindow(150, block_size=block)
    # of each head masks of its own, at equal distances
    heads = PerHead([LocalWindow(3 + 17 * head, block_size=block) for head in range(HEADS)])
    others = shared, drawn, heads, *(Sparsity(0.3, kind, block_size=block) for kind in KINDS)
    return some_patterns(HEADS, num_positions, block, any_length=False) | st.sampled_from(others)


def listed(pattern: BlockPattern, num_positions: int, num_heads: int = HEADS, is_causal: bool = False) -> tuple[torch.Tensor, ...]:
    """Heads, rows and columns of the kept blocks, and which of them are kept whole."""
    resolved, heads = pattern.resolved(num_positions, num_heads, is_causal)
    blocks, full, _ = resolved.entries(resolved.grid(num_positions), heads)
    return *blocks, full


def expanded(lists: BlockLists, num_heads: int) -> torch.Tensor:
    """bool (num_heads, num_queries, num_keys): the pairs that lists keep."""
    tiles = torch.ones(lists.num_entries, lists.q_block, lists.k_block, dtype=torch.bool)
    if lists.masks is not None:
        masked = lists.masks >= 0
        tiles[masked] = unpacked(lists.bits)[lists.masks[masked].long()]
    return _written_out(lists, tiles, num_heads)


def expanded_by_interval(lists: BlockLists, num_heads: int) -> torch.Tensor:
    """The same from the interval instead of the bits."""
    assert lists.interval is not None and lists.masks is not None
    missing = lists.num_rows * lists.q_block - lists.num_queries
    low, high = (torch.nn.functional.pad(x, (0, missing)).view(lists.num_rows, lists.q_block, 1) for x in lists.interval)
    row = lists.row_of_entry % max(lists.num_rows, 1)
    keys = (lists.columns.long()[:, None] * lists.k_block + torch.arange(lists.k_block))[:, None]
    return _written_out(lists, ((keys >= low[row]) & (keys < high[row])) | (lists.masks < 0)[:, None, None], num_heads)


def _written_out(lists: BlockLists, tiles: torch.Tensor, num_heads: int) -> torch.Tensor:
    shape = (lists.num_groups * lists.num_rows, lists.num_columns)
    blocks = torch.zeros(*shape, lists.q_block, lists.k_block, dtype=torch.bool)
    where = (lists.row_of_entry, lists.columns.long())
    times = torch.zeros(shape, dtype=torch.int64).index_put(where, torch.ones(lists.num_entries, dtype=torch.int64), accumulate=True)
    assert not times.numel() or times.max() <= 1, "a block is listed twice"
    blocks[where] = tiles
    mask = blocks.transpose(1, 2).reshape(lists.num_groups, lists.num_rows * lists.q_block, lists.num_columns * lists.k_block)
    return mask[:, : lists.num_queries, : lists.num_keys].expand(num_heads, -1, -1)


def pairs_of(blocks: BlockMask, num_heads: int = 1) -> torch.Tensor:
    """bool (batch, heads, num_queries, num_keys): the pairs that both directions of a BlockMask's tables keep."""
    (Nq, Nk), (q_block, k_block) = blocks.seq_lengths, blocks.BLOCK_SIZE
    kept = []
    for kind in ("", "full_"):
        by_row, by_column = (
            _counted(*(getattr(blocks, f"{kind}{side}_{what}") for what in ("num_blocks", "indices")), -(-n // block))
            for side, n, block in (("kv", Nk, k_block), ("q", Nq, q_block))
        )
        assert torch.equal(by_row, by_column.transpose(-1, -2) if by_column.dim() else by_column) and (by_row <= 1).all()
        kept.append(by_row.bool())
    zero, heads, i, j = torch.tensor(0), torch.arange(num_heads).view(-1, 1, 1), torch.arange(Nq)[:, None], torch.arange(Nk)[None]
    some, whole = (x.expand(kept[0].shape).repeat_interleave(q_block, -2).repeat_interleave(k_block, -1)[..., :Nq, :Nk] for x in kept)
    assert not (some & whole).any()
    return (some & blocks.mask_mod(zero, heads, i, j)) | whole


def _counted(counts: torch.Tensor | None, table: torch.Tensor | None, num_values: int) -> torch.Tensor:
    """How often each value stands in each row of a padded table."""
    if counts is None or table is None:
        return torch.zeros(())
    assert counts.dtype is table.dtype is torch.int32 and table.shape[:-1] == counts.shape and table.is_contiguous()
    taken = (torch.arange(table.shape[-1]) < counts[..., None]).float()
    return torch.zeros(*counts.shape, num_values).scatter_add_(-1, table.long(), taken)
