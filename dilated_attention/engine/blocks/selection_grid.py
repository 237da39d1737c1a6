"""Tables of a call's query and key blocks: where they are, and which key blocks a row sees, scores or owns. They depend on shapes alone.

Packed documents follow one another. Each has separate rows and columns, counted from its first position.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dilated_attention.pattern.blocks.block_lists import WORD

Range = tuple[int, int]
# ``mass`` is in units of 2**-SHARE_BITS
SHARE_BITS = 22


class Document(NamedTuple):
    """Rows (query blocks) and columns (key blocks) [first, last) of one document, its positions, and its number of queries."""

    rows: Range
    columns: Range
    keys: Range
    num_queries: int


@dataclass(frozen=True, eq=False)
class Grid:
    """The blocks of a call.

    Args:
        documents: rows and columns of each document; together they are all rows in use.
        num_rows: R of ``kept``, at least the number of rows in use.
        words: W of ``kept``.
        queries: (2, rows) int32: the queries [low, high) whose mean a row is scored by.
        keys: (2, columns) int32: the keys [low, high) of each column, for all documents one after another.
        own: (2, rows) int32: columns [low, high) of the document that hold the row's own positions, and with ``near`` those next to them.
        scored: (rows,) int32: columns before this one are scored. Under causality, these are the ones that every query of the row sees
            entirely.
        seen: (rows,) int32: columns before this one exist for the row.
        missing: (rows,) int32: how many columns the last row would see in addition if it were complete, so that a longer sequence makes
            the same choice; 0 without causality, and where rows are scored by their own queries.
        last_scored: the same as ``scored``, on the host.
    """

    documents: tuple[Document, ...]
    num_rows: int
    words: int
    queries: Tensor
    keys: Tensor
    own: Tensor
    scored: Tensor
    seen: Tensor
    missing: Tensor
    last_scored: tuple[int, ...]


class Part(NamedTuple):
    """The data of some rows of one document that the choice reads. Columns are those of the document.

    Args:
        own, scored, seen: the entries of these rows, see ``Grid``.
        budget: (B or 1, H or 1, rows) int32: number of blocks that a row keeps, including those it always keeps; None if ``mass`` decides.
        near: a row always keeps its ``own`` columns and the first one with a key that is not padding, even if ``always`` is given.
        always: (H or 1, rows, words) int32: blocks that are always kept; None for the row's own blocks.
        within: (H or 1, rows, words) int32: blocks that may be chosen; None for all.
        real: (B, words) int32: blocks with at least one key that is not padding; None for all.
    """

    own: Tensor
    scored: Tensor
    seen: Tensor
    near: bool
    budget: Tensor | None
    always: Tensor | None
    within: Tensor | None
    real: Tensor | None


def num_rows_of(num_queries: int, q_block: int, query_offset: int, num_documents: int | None) -> int:
    """Returns R of ``kept``. With packed documents, it is an upper bound that does not depend on their lengths."""
    if num_documents is None:
        return -(-(query_offset % q_block + num_queries) // q_block)
    return num_queries // q_block + num_documents


def num_words_of(num_keys: int, k_block: int) -> int:
    return -(-num_keys // (k_block * WORD))


@functools.lru_cache(maxsize=64)
@torch.inference_mode(False)
def make_grid(
    num_queries: int, num_keys: int, block: tuple[int, int], documents: tuple[Range, ...] | None, num_documents: int | None,
    is_causal: bool, query_offset: int, before: bool, near: bool, device: torch.device,
) -> Grid:  # fmt: skip
    """Returns the grid of a call, cached by shape, so that a repeated call copies nothing to the GPU.

    Args:
        block: (query block, key block).
        documents: (start, end) of each non-empty document; None without packed documents.
        num_documents: number of documents, including empty ones; None without packed documents.
        before: rows are scored by the queries up to and including their first one, not by their own queries.
        near: rows own the columns next to theirs, too.
    """
    q_block, k_block = block
    places, tables, keys = [], [], []
    row = column = 0
    for start, end in ((0, num_keys),) if documents is None else documents:
        queries = (0, num_queries) if documents is None else (start, end)
        table = _rows(queries, end - start, block, is_causal, query_offset, before, near)
        columns = start + torch.arange(-(-(end - start) // k_block), device="cpu") * k_block
        keys.append(torch.stack([columns, (columns + k_block).clamp(max=end)]))
        places.append(Document((row, row + table.shape[1]), (column, column + columns.shape[0]), (start, end), queries[1] - queries[0]))
        tables.append(table)
        row, column = row + table.shape[1], column + columns.shape[0]
    table = torch.cat(tables, 1) if tables else torch.zeros(7, 0, dtype=torch.int64, device="cpu")
    # the rows of ``_rows``
    on_device = table.to(device, torch.int32)
    return Grid(
        documents=tuple(places),
        num_rows=num_rows_of(num_queries, q_block, query_offset, num_documents),
        words=num_words_of(num_keys, k_block),
        queries=on_device[0:2],
        keys=(torch.cat(keys, 1) if keys else torch.zeros(2, 0, device="cpu")).to(device, torch.int32),
        own=on_device[2:4],
        scored=on_device[4],
        seen=on_device[5],
        missing=on_device[6],
        last_scored=tuple(table[4].tolist()),
    )


def _rows(queries: Range, num_keys: int, block: tuple[int, int], is_causal: bool, query_offset: int, before: bool, near: bool) -> Tensor:
    """Returns (queries low, high, own low, high, scored, seen, missing) of each row of one document, (7, rows) int64.

    Query blocks begin at *positions* that are multiples of q_block, so the first one may lack its leading queries.
    """
    q_block, k_block = block
    end = query_offset + queries[1] - queries[0]
    first = torch.arange(query_offset // q_block * q_block, end, q_block, device="cpu")
    last = (first + q_block).clamp(max=end)
    low, high = (first - q_block + 1, first + 1) if before else (first, last)
    # of positions the queries. The first row may begin before query 0; its range has at least that one
    low, high = (low - query_offset).clamp(min=0), (high - query_offset).clamp(min=1)
    columns = torch.full_like(first, -(-num_keys // k_block))
    own_low, own_high = first // k_block, (last - 1) // k_block + 1
    # a shorter last block counts with its full length, so that a longer sequence scores the same blocks
    scored, seen = ((first + 1) // k_block, own_high) if is_causal else (columns, columns)
    if near:
        own_low, own_high = (own_low - 1).clamp(min=0), torch.minimum(own_high + 1, seen)
    # a row that is scored by its own queries depends on what follows them anyway
    missing = (first + q_block - 1) // k_block + 1 - seen if is_causal and before else torch.zeros_like(first)
    return torch.stack([queries[0] + low, queries[0] + high, own_low, own_high, scored, seen, missing])
