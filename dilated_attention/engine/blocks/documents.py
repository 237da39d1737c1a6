"""The documents of a call of block-sparse attention, each with its lists of kept blocks, and the choice of a backend for lists."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from dilated_attention.backends import AttentionRequest
from dilated_attention.engine.blocks.bitmask import lists_of_kept
from dilated_attention.engine.blocks.lists import block_lists
from dilated_attention.engine.branches.problems import Range
from dilated_attention.engine.ops import prepare
from dilated_attention.engine.ops.settings import CallSettings
from dilated_attention.pattern import BlockPattern
from dilated_attention.pattern.blocks.block_lists import BlockLists


class DocumentRows(NamedTuple):
    """A document: its keys, its rows of q, which begin ``front`` rows inside a query block, and its lists, which include those rows."""

    keys: slice
    rows: slice
    front: int
    lists: BlockLists


def pieces_of(
    pattern: BlockPattern, sizes: tuple[int, int, int], settings: CallSettings, documents: tuple[Range, ...] | None, kept: Tensor | None,
    device: torch.device,
) -> Iterator[DocumentRows]:  # fmt: skip
    """Yields the documents, or the whole sequence as one.

    Args:
        sizes: the numbers of queries, keys and heads.
        documents: (start, end) of packed documents, each with a grid of blocks that starts at its first position; None for one document.
        kept: the blocks that a content-chosen pattern keeps, as ``choose_blocks`` packs them.
    """
    num_queries, num_keys, num_heads = sizes
    # query blocks begin on the pattern's grid: the rows before the first query are computed, too, and cut off afterwards
    front = settings.query_offset % pattern.q_block
    first_query = settings.query_offset - front
    # first row of the document in ``kept``, where the rows of documents follow one another
    first_row = 0
    for start, end in documents or ((0, num_keys),):
        keys = slice(start, end)
        # packed documents attend to themselves, without query_offset
        rows = slice(0, num_queries) if documents is None else keys
        length = front + rows.stop - rows.start
        if kept is None:
            lists = block_lists(
                pattern, end - start, num_heads, first_query=first_query, num_queries=length, is_causal=settings.is_causal, device=device
            )
        else:
            # what follows the document's rows is not read
            of_document = kept[:, :, first_row:]
            lists = lists_of_kept(of_document, pattern, length, end - start, is_causal=settings.is_causal, query_offset=first_query)
            first_row += lists.num_rows
        yield DocumentRows(keys, rows, front, lists)


def request_of(lists: BlockLists, views: tuple[Tensor, ...], settings: CallSettings, key_mask: bool, is_backward: bool) -> AttentionRequest:
    """Builds the request to a backend for these lists. ``views`` are q, k and the other tensors that it reads."""
    return prepare.request_of(
        views,
        settings,
        is_backward,
        # the positions that they span
        max(lists.num_queries, lists.num_keys),
        key_mask=key_mask,
        # mean number of keys that a row keeps
        length=max(1, lists.num_entries * lists.k_block // max(1, lists.num_groups * lists.num_rows)),
        blocks=(lists.q_block, lists.k_block),
        block_masks=lists.mask_kind,
    )
