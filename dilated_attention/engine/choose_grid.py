"""Where the query and key blocks of one call lie, and which of them a row sees, scores or keeps for itself: tables that depend on shapes alone.

Packed documents lie one after another: each has rows and columns of its own, counted from its own beginning.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch

from dilated_attention.backends.blocks import WORD

Range = tuple[int, int]


class Document(NamedTuple):
    """Rows (query blocks) and columns (key blocks) [first, last) of one document, its positions, and its number of queries."""

    rows: Range
    columns: Range
    keys: Range
    num_queries: int


@dataclass(frozen=True, eq=False)
class Grid:
    """Blocks of a call.

    Args:
        documents: their places; together they are all rows that are used.
        num_rows: R of ``kept``, at least the rows that are used.
        words: W of ``kept``.
        queries: (2, rows) int32: the queries [low, high) whose mean a row is scored by.
        keys: (2, columns) int32: the keys [low, high) of a column, of all documents one after another.
        own: (2, rows) int32: columns [low, high) of the document that hold the row's own positions.
        scored: (rows,) int32: columns before this one are scored; under causality those that every query of the row sees whole.
        seen: (rows,) int32: columns before this one exist for the row.
        missing: (rows,) int32: columns that a causal row would see, too, if the sequence did not end before it does. They count as kept
            wherever blocks are counted, or further keys would change what a query does.
        last_scored: the same as ``scored``, on the host.
    """

    documents: tuple[Document, ...]
    num_rows: int
    words: int
    queries: torch.Tensor
    keys: torch.Tensor
    own: torch.Tensor
    scored: torch.Tensor
    seen: torch.Tensor
    missing: torch.Tensor
    last_scored: tuple[int, ...]


def num_rows_of(num_queries: int, q_block: int, query_offset: int, num_documents: int | None) -> int:
    """R of ``kept``: with packed documents a bound that their lengths do not change."""
    if num_documents is None:
        return -(-(query_offset % q_block + num_queries) // q_block)
    return num_queries // q_block + num_documents


def num_words_of(num_keys: int, k_block: int) -> int:
    return -(-num_keys // (k_block * WORD))


@functools.lru_cache(maxsize=64)
@torch.inference_mode(False)
def make_grid(
    num_queries: int,
    num_keys: int,
    block: tuple[int, int],
    documents: tuple[Range, ...] | None,
    num_documents: int | None,
    is_causal: bool,
    query_offset: int,
    before: bool,
    device: torch.device,
) -> Grid:
    """Kept by shape, so that a call copies nothing to the GPU.

    Args:
        block: (query block, key block).
        documents: (start, end) of each that is not empty; None for one.
        num_documents: with the empty ones; None for one.
        before: rows are scored by the queries up to their first one, not by their own.
    """
    q_block, k_block = block
    places, tables, keys = [], [], []
    row = column = 0
    for start, end in ((0, num_keys),) if documents is None else documents:
        queries = (0, num_queries) if documents is None else (start, end)
        table = _rows(queries, end - start, block, is_causal, query_offset, before)
        columns = start + torch.arange(-(-(end - start) // k_block)) * k_block
        keys.append(torch.stack([columns, (columns + k_block).clamp(max=end)]))
        places.append(Document((row, row + table.shape[1]), (column, column + columns.shape[0]), (start, end), queries[1] - queries[0]))
        tables.append(table)
        row, column = row + table.shape[1], column + columns.shape[0]
    table = torch.cat(tables, 1) if tables else torch.zeros(7, 0, dtype=torch.int64)
    on_device = table.to(device, torch.int32)
    return Grid(
        documents=tuple(places),
        num_rows=num_rows_of(num_queries, q_block, query_offset, num_documents),
        words=num_words_of(num_keys, k_block),
        queries=on_device[0:2],
        keys=(torch.cat(keys, 1) if keys else torch.zeros(2, 0)).to(device, torch.int32),
        own=on_device[2:4],
        scored=on_device[4],
        seen=on_device[5],
        missing=on_device[6],
        last_scored=tuple(table[4].tolist()),
    )


def _rows(queries: Range, num_keys: int, block: tuple[int, int], is_causal: bool, query_offset: int, before: bool) -> torch.Tensor:
    """(queries low, high, own low, high, scored, seen, missing) of each row of one document, (7, rows) int64.

    Query blocks begin at multiples of q_block *positions*, so the first one may lack queries in front.
    """
    q_block, k_block = block
    end = query_offset + queries[1] - queries[0]
    first = torch.arange(query_offset // q_block * q_block, end, q_block)
    last = (first + q_block).clamp(max=end)
    low, high = (first - q_block + 1, first + 1) if before else (first, last)
    # of the queries that are there, at least the first
    low, high = (low - query_offset).clamp(min=0), (high - query_offset).clamp(min=1)
    columns = torch.full_like(first, -(-num_keys // k_block))
    own_low, own_high = first // k_block, (last - 1) // k_block + 1
    # a shorter last block, too, is seen whole only by queries behind where a whole one would end
    scored, seen = ((first + 1) // k_block, own_high) if is_causal else (columns, columns)
    missing = (first + q_block - 1) // k_block + 1 - seen if is_causal else torch.zeros_like(first)
    return torch.stack([queries[0] + low, queries[0] + high, own_low, own_high, scored, seen, missing])
