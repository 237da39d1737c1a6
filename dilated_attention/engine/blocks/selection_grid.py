"""Tables of a call's query blocks (rows) and key blocks (columns): their positions, and which columns each row sees, scores or owns. They
depend on shapes alone.

A row *owns* the columns that hold its positions. Packed documents follow one another; each has separate rows and columns, counted from its
first position.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

Range = tuple[int, int]
# the kernels that choose take ``TopBlocks.mass`` as an integer, in units of 2**-SHARE_BITS
SHARE_BITS = 22


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


class Grid(NamedTuple):
    """The blocks of a call.

    Args:
        documents: those that are not empty; together they have all rows in use.
        rows: (7, rows) int32, of each row

            * the queries [low, high) whose mean it is scored by;
            * ``own``: the columns [low, high) of the document that the row owns, with ``near`` also those next to them;
            * ``scored``: columns [0, scored) of the document have scores. Under causality, every query of the row sees all their keys;
            * ``seen``: columns [0, seen) of the document have a key that some query of the row sees;
            * ``missing``: how many more columns a short last row would see if it were complete. They count in its budget: it chooses
              the same blocks as in a longer sequence. 0 for complete rows, without causality, and where a row's own queries score.
        columns: (2, columns) int32: the keys [low, high) of each column, for all documents one after another.
        scored_on_host: ``scored`` again, for slices whose bounds the host has to know.
    """

    documents: tuple[Document, ...]
    rows: Tensor
    columns: Tensor
    scored_on_host: tuple[int, ...]


class Part(NamedTuple):
    """Some rows of one document: what the choice of their blocks reads besides scores. Columns are those of the document.

    Args:
        own, scored, seen: the rows of ``Grid.rows`` from the third on.
        budget: (B or 1, H or 1, rows) int32: number of blocks that a row keeps, including those it always keeps; None if ``mass`` decides.
        near: a row always keeps its ``own`` columns and the first one with a key that is not padding, even if ``always`` is given.
        always: (H or 1, rows, words) int32: blocks that are always kept; None for the ``own`` columns.
        within: (H or 1, rows, words) int32: blocks that may be chosen; None for all.
        real: (B, words) int32: blocks with at least one key that is not padding; None for all.
    """

    own: tuple[Tensor, Tensor]
    scored: Tensor
    seen: Tensor
    near: bool
    budget: Tensor | None
    always: Tensor | None
    within: Tensor | None
    real: Tensor | None


@functools.lru_cache(maxsize=64)
@torch.inference_mode(False)
def make_grid(
    num_queries: int, num_keys: int, block: tuple[int, int], documents: tuple[Range, ...] | None, is_causal: bool, query_offset: int,
    by_earlier: bool, near: bool, device: torch.device,
) -> Grid:  # fmt: skip
    """Returns the grid of a call, cached by shape, so that a repeated call copies nothing to the GPU.

    Query blocks begin at *positions* that are multiples of q_block, so the first one may lack its leading queries.

    Args:
        block: (query block, key block).
        documents: (start, end) of each non-empty document; None without packed documents.
        by_earlier: rows are scored by the q_block queries up to and including their first one, instead of by their own.
        near: rows own the columns next to theirs, too.
    """
    q_block, k_block = block
    places, tables, keys = [], [torch.zeros(7, 0, dtype=torch.int64, device="cpu")], [torch.zeros(2, 0, dtype=torch.int64, device="cpu")]
    row = column = 0
    for start, end in ((0, num_keys),) if documents is None else documents:
        queries = (0, num_queries) if documents is None else (start, end)
        last_query, num_columns = query_offset + queries[1] - queries[0], -(-(end - start) // k_block)
        first = torch.arange(query_offset // q_block * q_block, last_query, q_block, device="cpu")
        last = (first + q_block).clamp(max=last_query)
        low, high = (first - q_block + 1, first + 1) if by_earlier else (first, last)
        # from positions to queries. The first row may begin at a position below that of query 0; its range then has query 0 alone
        low, high = queries[0] + (low - query_offset).clamp(min=0), queries[0] + (high - query_offset).clamp(min=1)
        own_low, own_high = first // k_block, (last - 1) // k_block + 1
        # a row's first query sees least. That a last key block is shorter does not count: a longer sequence scores the same blocks
        scored, seen = ((first + 1) // k_block, own_high) if is_causal else (torch.full_like(first, num_columns),) * 2
        if near:
            own_low, own_high = (own_low - 1).clamp(min=0), torch.minimum(own_high + 1, seen)
        # if a row's own queries score, its choice depends on queries that a longer sequence adds anyway
        missing = (first + q_block - 1) // k_block + 1 - seen if is_causal and by_earlier else torch.zeros_like(first)
        tables.append(torch.stack([low, high, own_low, own_high, scored, seen, missing]))
        first_keys = start + torch.arange(num_columns, device="cpu") * k_block
        keys.append(torch.stack([first_keys, (first_keys + k_block).clamp(max=end)]))
        places.append(Document((row, row + len(first)), (column, column + num_columns), (start, end), queries[1] - queries[0]))
        row, column = row + len(first), column + num_columns
    rows, columns = torch.cat(tables, 1), torch.cat(keys, 1)
    return Grid(tuple(places), rows.to(device, torch.int32), columns.to(device, torch.int32), tuple(rows[4].tolist()))
