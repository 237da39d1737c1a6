"""Padded tables of lists hold the same blocks, however they are cut."""

from __future__ import annotations

import pytest
import torch

from dilated_attention.backends.block_kernels import block_tables
from dilated_attention.pattern.blocks.block_lists import BlockLists
from tests.helpers.block_cases import BlockCase, lists_from_dense, make


def kept_blocks(lists: BlockLists) -> tuple[torch.Tensor, torch.Tensor]:
    """(whole, partial) bool (batch, heads, rows, columns) of the lists themselves."""
    shape = (lists.num_groups, lists.num_rows, lists.num_columns)
    row, column = lists.row_of_entry, lists.columns.long()
    whole = torch.ones_like(column, dtype=torch.bool) if lists.masks is None else lists.masks < 0
    both = []
    for chosen in (whole, ~whole):
        x = torch.zeros(shape[0] * shape[1], shape[2], dtype=torch.bool)
        x[row[chosen], column[chosen]] = True
        both.append(x.view(lists.num_batch, lists.num_heads, *shape[1:]))
    return both[0], both[1]


def kept_by_tables(tables: tuple[block_tables.BlockTable, ...], like: torch.Tensor, side: str) -> torch.Tensor:
    found = torch.zeros_like(like)
    for table in tables:
        counts, indices = getattr(table, side)
        assert indices.shape[-1] <= like.shape[-1]
        for b, h, r in torch.cartesian_prod(*(torch.arange(n) for n in counts.shape)).tolist():
            found[b, table.heads[0] + h, table.start + r, indices[b, h, r, : counts[b, h, r]].long()] = True
    return found


@pytest.mark.parametrize("masks", ["none", "bits"])
@pytest.mark.parametrize("budget", [128, 2**27])
def test_tables_hold_the_lists(masks: str, budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_tables, "TABLE_BYTES", budget)
    case = BlockCase(batch=2, heads=4, kv_heads=2, num_queries=500, num_keys=700, groups=(2, 4), masks=masks, density=0.4)
    lists = make(case).lists
    whole, partial = kept_blocks(lists)
    rows, columns = block_tables.row_tables(lists, 2), block_tables.column_tables(lists, 2)
    assert all(table.heads[0] % 2 == 0 for table in rows + columns)
    assert len(rows) == (2 if budget == 128 else 1)
    assert torch.equal(kept_by_tables(rows, whole, "full"), whole) and torch.equal(kept_by_tables(rows, partial, "partial"), partial)
    turned = whole.transpose(2, 3), partial.transpose(2, 3)
    assert torch.equal(kept_by_tables(columns, turned[0], "full"), turned[0])
    assert torch.equal(kept_by_tables(columns, turned[1], "partial"), turned[1])
    assert block_tables.row_tables(lists, 2) is rows


def test_long_lists_have_tables_of_their_own() -> None:
    blocks = torch.eye(128, dtype=torch.bool)
    blocks[0] = blocks[:, 0] = True
    mask = blocks.repeat_interleave(64, 0).repeat_interleave(64, 1)[None, None]
    lists = lists_from_dense(mask, 64, 64)
    for tables in (block_tables.row_tables(lists), block_tables.column_tables(lists)):
        assert [(table.start, table.end) for table in tables] == [(0, 1), (1, 128)]
        assert sum(table.full[1].numel() for table in tables) <= 128 + 127 * 16
    assert torch.equal(kept_by_tables(block_tables.row_tables(lists), blocks[None, None], "full"), blocks[None, None])
