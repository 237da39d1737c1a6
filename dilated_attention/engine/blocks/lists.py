"""The lists of blocks that kernels read: built from a pattern and cached, or built from the bits of blocks chosen by content.

Rows are query blocks, columns key blocks. Blocks chosen by content come as ``kept`` (B, H, R, W) int32: bit c % 32 of word c // 32 of row r
is set if row r keeps column c. These bits are saved for the backward and sent between processes; lists are built from them when a kernel is
launched. They take N² / (8 · q_block · k_block) bytes per head, 8 MiB at N = 2^20 with blocks of 128.
"""

from __future__ import annotations

import functools
import math
import threading
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dilated_attention.pattern.blocks.base import BlockPattern
from dilated_attention.pattern.blocks.block_lists import WORD, BlockLists, checked_total, kept_blocks, packed, unpacked

# limits of the cache, over all devices; lists take about 1 % of the bytes of one q
MAX_CACHED_BYTES = 2**30
MAX_CACHED_LISTS = 128
# lists are built on the host if they are of at most this many (query block, key block) pairs, times the heads if lists differ between them
_MOST_ON_HOST = 2**18

_cache: OrderedDict[Hashable, BlockLists] = OrderedDict()
_lock = threading.Lock()


def block_lists(
    pattern: BlockPattern, num_keys: int, num_heads: int, *, first_query: int = 0, num_queries: int | None = None, is_causal: bool = False,
    device: torch.device | str,
) -> BlockLists:  # fmt: skip
    """Returns the lists of ``pattern`` for queries at positions [first_query, first_query + num_queries), built on ``device``.

    Args:
        num_keys: N, the number of positions of the key sequence, which starts at 0.
        first_query: a multiple of the query block.
        num_queries: number of queries; None for all up to N.

    Returns:
        Lists, cached by all arguments. For patterns with ``shares_lists``, lengths with equally many blocks share them. One list serves all
        heads (``num_heads`` of the result is 1) unless the pattern differs between heads. ``interval`` is set if the pairs that masks keep
        form one range [low, high) per query, the same for all heads.

    Raises:
        ValueError: the pattern does not exist at N, or queries are beyond N.
    """
    num_queries = num_keys - first_query if num_queries is None else num_queries
    if first_query < 0 or first_query % pattern.q_block:
        raise ValueError(f"first_query is {first_query}; expected a multiple of the query block, {pattern.q_block}")
    if num_queries < 0 or first_query + num_queries > num_keys:
        raise ValueError(
            f"queries [{first_query}, {first_query + num_queries}) reach beyond the {num_keys} keys; "
            "queries and keys of a block pattern are one sequence: give at least as many keys as the last query's position + 1"
        )
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    # the lengths that lists are built for: whole blocks if the pattern shares lists
    unit = pattern.q_block if pattern.shares_lists and pattern.q_block == pattern.k_block else 1
    queries, keys = (-(-count // unit) * unit for count in (num_queries, num_keys))
    cache_key = (pattern, keys, num_heads, first_query, queries, is_causal, device)
    with _lock:
        lists = _cache.get(cache_key)
        if lists is not None:
            _cache.move_to_end(cache_key)
    if lists is None:
        # checked here, so that an error names the caller's length
        pattern.check(num_keys, num_heads)
        where = building_device(pattern, queries, keys, num_heads, device)
        # cached lists serve training too, so they must not be inference tensors
        with torch.inference_mode(False), torch.no_grad():
            lists = kept_blocks(
                pattern, keys, num_heads, first_query=first_query, num_queries=queries, is_causal=is_causal, device=where
            )  # fmt: skip
            checked_total(lists.num_entries)
            lists = _marked(lists if where == device else lists.on(device))
        with _lock:
            _cache[cache_key] = lists
            while len(_cache) > 1 and (len(_cache) > MAX_CACHED_LISTS or sum(x.nbytes for x in _cache.values()) > MAX_CACHED_BYTES):
                _cache.popitem(last=False)
    else:
        _wait_for(lists)
    if (queries, keys) == (num_queries, num_keys):
        return lists
    # the lists of the caller's length, kept in the cache of the lists that they are cut from
    lists = lists.derived((num_queries, num_keys), lambda uncut: _marked(uncut.of_length(num_queries, num_keys)), by_length=True)
    _wait_for(lists)
    return lists


def clear_block_lists() -> None:
    """Clears the cache of lists."""
    with _lock:
        _cache.clear()


def building_device(pattern: BlockPattern, num_queries: int, num_keys: int, num_heads: int, device: torch.device) -> torch.device:
    """Returns the device on which to build lists for ``device``: the CPU if they are small, as building takes hundreds of operations, and
    a GPU's launches would take longer than a CPU's work."""
    blocks = -(-num_queries // pattern.q_block) * -(-num_keys // pattern.k_block) * (num_heads if pattern.per_head else 1)
    return torch.device("cpu") if blocks <= _MOST_ON_HOST and not pattern.is_bound_to_process else device


def _marked(lists: BlockLists) -> BlockLists:
    """Keeps in the cache of the lists the stream that makes them, and an event at which they are made. Returns the lists."""
    if lists.row_starts.is_cuda:
        stream = torch.cuda.current_stream(lists.row_starts.device)
        lists.cache["made"] = stream, stream.record_event()
    return lists


def _wait_for(lists: BlockLists) -> None:
    """Lets the current stream wait until the lists are made. A CUDA graph's capture need not: its work ran once before, which made them."""
    if "made" in lists.cache and not torch.cuda.is_current_stream_capturing():
        stream, event = lists.cache["made"]
        if (current := torch.cuda.current_stream(stream.device)) != stream:
            current.wait_event(event)


def select_groups(lists: BlockLists, first: int, last: int, **sizes: int) -> BlockLists:
    """Returns the lists of groups [first, last); a group is a (batch entry, head). It waits for the GPU.

    Args:
        sizes: ``num_batch`` or ``num_heads`` of the result, where it differs.
    """
    return _selected(lists, torch.arange(first * lists.num_rows, last * lists.num_rows, device=lists.columns.device), **sizes)


def select_rows(lists: BlockLists, rows: Tensor) -> BlockLists:
    """Returns the lists of some query blocks, in the given order, as needed by a process that holds these queries.

    Args:
        rows: (R,) int64 query blocks of ``lists``. If the last block of the sequence is short, it may only come last.
    """
    last_row = lists.num_rows - 1
    # by how many queries the last block is short
    num_missing = lists.num_rows * lists.q_block - lists.num_queries
    if num_missing and last_row in rows[:-1]:
        raise ValueError(f"rows selects the short last query block, {last_row}, before its end; select it last")
    num_queries = len(rows) * lists.q_block - (num_missing if [last_row] == rows[-1:].tolist() else 0)
    interval, rows = lists.interval, rows.to(lists.columns.device)
    if interval is not None:
        blocks = (torch.nn.functional.pad(x, (0, num_missing)).view(-1, lists.q_block) for x in interval)
        low, high = (x.index_select(0, rows).flatten()[:num_queries] for x in blocks)
        interval = low, high
    list_index = (torch.arange(lists.num_groups, device=rows.device)[:, None] * lists.num_rows + rows).flatten()
    return _selected(lists, list_index, num_queries=num_queries, interval=interval)


def _selected(lists: BlockLists, list_index: Tensor, **changes: Any) -> BlockLists:
    """Returns the lists with these indices, in their order."""
    # indexing by [] takes twice the time on a host
    counts = lists.row_starts.diff().index_select(0, list_index)
    row_starts = torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
    num_entries = int(row_starts[-1])
    # for each entry (kept block) of the result, which entry of ``lists`` it is: all entries of a list move by the same number
    shift = lists.row_starts.index_select(0, list_index) - row_starts[:-1]
    source_entry = shift.repeat_interleave(counts, output_size=num_entries) + torch.arange(num_entries, device=list_index.device)
    columns = lists.columns.index_select(0, source_entry)
    masks = None if lists.masks is None else lists.masks.index_select(0, source_entry)
    return replace(lists, row_starts=row_starts, columns=columns, masks=masks, **changes)


# this many blocks' bits are unpacked at a time, which takes 9 bytes per block
_CHUNK = 2**24


def bits_of_lists(lists: BlockLists) -> Tensor:
    """Returns the bits of all listed blocks, (groups, rows, words) int32, in the form of ``kept``; masks are ignored."""
    words = -(-lists.num_columns // WORD)
    bits = lists.columns.new_zeros(lists.num_groups * lists.num_rows * words)
    # no block occurs twice, so adding its bit sets it
    bits.index_add_(0, lists.row_of_entry * words + lists.columns // WORD, torch.ones_like(lists.columns) << lists.columns % WORD)
    return bits.view(lists.num_groups, lists.num_rows, words)


def lists_of_kept(
    kept: Tensor, pattern: BlockPattern, num_queries: int, num_keys: int, *, is_causal: bool, query_offset: int = 0
) -> BlockLists:
    """Returns lists of the kept blocks of one document, for each batch entry and head in ``kept``.

    It waits for the GPU, to get the lengths of the lists.

    Args:
        kept: (B, H, rows, words) int32, of any strides, with at least the rows and words of the document.
        num_queries: number of queries, counted from the start of the first query block.
        is_causal: causality cuts the blocks that it crosses: the result has both an interval and bit masks. Blocks entirely in the future
            must not be kept.
        query_offset: position of the first query block, a multiple of its length.
    """
    q_block, k_block = pattern.q_block, pattern.k_block
    assert query_offset % q_block == 0
    B, H = kept.shape[:2]
    num_rows, num_columns = -(-num_queries // q_block), -(-num_keys // k_block)
    kept = kept[:, :, :num_rows, : -(-num_columns // WORD)]
    # delta: a block's first query − its first key, a multiple of the gcd of both lengths. Causality leaves no pair if delta ≤ −q_block, and
    # every pair if delta ≥ k_block − 1. ``deltas`` are those between, and the mask of a block is the index of its delta
    step = math.gcd(q_block, k_block)
    deltas = range(step - q_block, k_block - 1, step) if is_causal else range(0)
    num_lists, part_rows = B * H * num_rows, max(1, _CHUNK // max(1, num_columns))
    parts = kept.reshape(num_lists, kept.shape[3]).split(part_rows)
    listed = [unpacked(part, num_columns).nonzero().to(torch.int32).unbind(1) for part in parts]
    # the index group · num_rows + row of each entry
    row = torch.cat([row + index * part_rows for index, (row, _) in enumerate(listed)])
    column = torch.cat([column for _, column in listed])
    checked_total(len(column))
    masks, interval = None, None
    if deltas:
        delta = row % num_rows * q_block + query_offset - column * k_block
        # −1: every pair of the block is kept
        masks = torch.where(delta < k_block - 1, (delta - deltas.start) // deltas.step, -1)
    if masks is not None and bool((masks >= 0).any()):
        # each query sees the keys up to its own position
        high = torch.arange(query_offset + 1, query_offset + num_queries + 1, dtype=torch.int32, device=kept.device).clamp(max=num_keys)
        interval = torch.zeros_like(high), high
    else:
        # causality cuts no block, so kernels need not read masks
        masks, deltas = None, range(0)
    row_starts = torch.searchsorted(row, torch.arange(num_lists + 1, dtype=torch.int32, device=row.device), out_int32=True)
    return BlockLists(
        num_queries, num_keys, q_block, k_block, B, H, row_starts, column, masks,
        _causal_bits(q_block, k_block, deltas, kept.device), interval,
    )  # fmt: skip


@functools.lru_cache(maxsize=16)
@torch.inference_mode(False)
def _causal_bits(q_block: int, k_block: int, deltas: range, device: torch.device) -> Tensor:
    """Returns the causal mask for each delta, (deltas, q_block, k_block / 32) int32: query m keeps key n of the block if n ≤ m + delta."""
    delta = torch.tensor(list(deltas), dtype=torch.int64, device="cpu").reshape(-1, 1, 1)
    queries, keys = torch.arange(q_block, device="cpu")[:, None], torch.arange(k_block, device="cpu")
    return packed(keys <= queries + delta).to(device)
