"""Tables of a call's query blocks (rows) and key blocks (columns): their positions, and which columns each row sees, scores or owns. They
depend on shapes alone.

A row *owns* the columns that hold its positions. Packed documents follow one another; each has separate rows and columns, counted from its
first position.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dilated_attention.pattern.blocks.block_lists import WORD

Range = tuple[int, int]
# the kernels that choose take ``TopBlocks.mass`` as an integer, in units of 2**-SHARE_BITS
SHARE_BITS = 22
# where the result of ``_rows`` has each field of ``Grid``
_QUERIES, _OWN, _SCORED, _SEEN, _MISSING = slice(0, 2), slice(2, 4), 4, 5, 6


class Document(NamedTuple):
    """The part of a grid that is one document.

    Args:
        rows, columns: [first, last) of the grid's rows and columns.
        keys: [start, end) in the positions of the keys.
        num_queries: number of queries, fewer than keys if the call continues a sequence.
    """

    rows: Range
    columns: Range
    keys: Range
    num_queries: int


@dataclass(frozen=True, eq=False)
class Grid:
    """The blocks of a call.

    Args:
        documents: those that are not empty; together they have all rows in use.
        num_rows: R of ``kept``, at least the number of rows in use.
        words: W of ``kept``.
        queries: (2, rows) int32: the queries [low, high) whose mean scores the columns for a row.
        keys: (2, columns) int32: the keys [low, high) of each column, for all documents one after another.
        own: (2, rows) int32: the columns [low, high) of the document that the row owns, with ``near`` also those next to them.
        scored: (rows,) int32: columns [0, scored) of the document have scores. Under causality, every query of the row sees all their keys.
        seen: (rows,) int32: columns [0, seen) of the document have a key that some query of the row sees.
        missing: (rows,) int32: how many more columns a short last row would see if it were complete. They count in its budget, so that it
            chooses the same blocks as in a longer sequence. 0 for complete rows, without causality, and where a row's own queries score.
        scored_on_host: ``scored`` again, for slices whose bounds the host has to know.
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
    scored_on_host: tuple[int, ...]


class Part(NamedTuple):
    """Some rows of one document: what the choice of their blocks reads besides scores. Columns are those of the document.

    Args:
        own, scored, seen: as in ``Grid``, of these rows.
        budget: (B or 1, H or 1, rows) int32: number of blocks that a row keeps, including those it always keeps; None if ``mass`` decides.
        near: a row always keeps its ``own`` columns and the first one with a key that is not padding, even if ``always`` is given.
        always: (H or 1, rows, words) int32: blocks that are always kept; None for the ``own`` columns.
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
    is_causal: bool, query_offset: int, by_earlier: bool, near: bool, device: torch.device,
) -> Grid:  # fmt: skip
    """Returns the grid of a call, cached by shape, so that a repeated call copies nothing to the GPU.

    Args:
        block: (query block, key block).
        documents: (start, end) of each non-empty document; None without packed documents.
        num_documents: number of documents, including empty ones; None without packed documents.
        by_earlier: rows are scored by the q_block queries up to and including their first one, instead of by their own.
        near: rows own the columns next to theirs, too.
    """
    q_block, k_block = block
    placed, tables, keys = [], [], []
    row = column = 0
    for start, end in ((0, num_keys),) if documents is None else documents:
        queries = (0, num_queries) if documents is None else (start, end)
        table = _rows(queries, end - start, block, is_causal, query_offset, by_earlier, near)
        first_keys = start + torch.arange(-(-(end - start) // k_block), device="cpu") * k_block
        keys.append(torch.stack([first_keys, (first_keys + k_block).clamp(max=end)]))
        placed.append(Document((row, row + table.shape[1]), (column, column + first_keys.shape[0]), (start, end), queries[1] - queries[0]))
        tables.append(table)
        row, column = row + table.shape[1], column + first_keys.shape[0]
    table = torch.cat(tables, 1) if tables else torch.zeros(7, 0, dtype=torch.int64, device="cpu")
    on_device = table.to(device, torch.int32)
    return Grid(
        documents=tuple(placed),
        num_rows=num_rows_of(num_queries, q_block, query_offset, num_documents),
        words=num_words_of(num_keys, k_block),
        queries=on_device[_QUERIES],
        keys=(torch.cat(keys, 1) if keys else torch.zeros(2, 0, device="cpu")).to(device, torch.int32),
        own=on_device[_OWN],
        scored=on_device[_SCORED],
        seen=on_device[_SEEN],
        missing=on_device[_MISSING],
        scored_on_host=tuple(table[_SCORED].tolist()),
    )


def _rows(
    queries: Range, num_keys: int, block: tuple[int, int], is_causal: bool, query_offset: int, by_earlier: bool, near: bool
) -> Tensor:
    """Returns (queries low, high, own low, high, scored, seen, missing) of each row of one document, (7, rows) int64: see ``Grid``.

    Query blocks begin at *positions* that are multiples of q_block, so the first one may lack its leading queries.

    Args:
        queries: [start, end) of the document's queries; the first one is at position ``query_offset`` of the document.
    """
    q_block, k_block = block
    end = query_offset + queries[1] - queries[0]
    first = torch.arange(query_offset // q_block * q_block, end, q_block, device="cpu")
    last = (first + q_block).clamp(max=end)
    low, high = (first - q_block + 1, first + 1) if by_earlier else (first, last)
    # from positions to queries. The first row may begin at a position below that of query 0; its range then has query 0 alone
    low, high = (low - query_offset).clamp(min=0), (high - query_offset).clamp(min=1)
    # all columns, for each row
    columns = torch.full_like(first, -(-num_keys // k_block))
    own_low, own_high = first // k_block, (last - 1) // k_block + 1
    # a row's first query sees least. It does not count that a last key block is shorter, so that a longer sequence scores the same blocks
    scored, seen = ((first + 1) // k_block, own_high) if is_causal else (columns, columns)
    if near:
        own_low, own_high = (own_low - 1).clamp(min=0), torch.minimum(own_high + 1, seen)
    # if a row's own queries score, its choice depends on queries that a longer sequence adds anyway
    missing = (first + q_block - 1) // k_block + 1 - seen if is_causal and by_earlier else torch.zeros_like(first)
    return torch.stack([queries[0] + low, queries[0] + high, own_low, own_high, scored, seen, missing])
