"""Lists of blocks on kernels that know nothing of them: query blocks with equally many keys are a batch of equal dense problems.

A *piece* is such a batch. Its queries, keys and values are gathered, a dense kernel runs, and the results go back to their places. Memory
is bounded by the size of a piece, at least one query block's keys. A dense kernel is a pair of functions of (P, L, G, D) queries and
(P, S, K, D) keys and values, and of ``pairs``: bool (P, L or 1, S), True where the pair is kept, None where all are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from dilated_attention.backends.base import Mask, Options, accumulation_dtype
from dilated_attention.backends.blocks import WORD, BlockLists

DenseForward = Callable[..., tuple[torch.Tensor, torch.Tensor]]
DenseBackward = Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]

# keys, values and pairs of one piece; more gains nothing at 100 µs a call, and less stays nearer to the caches
_PIECE_BYTES = 16 * 2**20


@dataclass(frozen=True)
class Piece:
    """P query blocks with S keys each.

    Args:
        heads, kv_heads: query and key/value heads that it is of.
        batch, rows: (P,) int64: batch entry and query block of each.
        columns, entries: (P, blocks) int64: the kept key blocks and where the lists have them.
        length, num_keys: L and S.
        has_pairs: some pairs of its blocks take no part.
    """

    heads: slice
    kv_heads: slice
    batch: torch.Tensor
    rows: torch.Tensor
    columns: torch.Tensor
    entries: torch.Tensor
    length: int
    num_keys: int
    has_pairs: bool


def forward_gathered(
    dense: DenseForward, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lists: BlockLists, options: Options
) -> tuple[torch.Tensor, torch.Tensor]:
    """``forward_blocks`` by ``dense(q, k, v, options, pairs)``."""
    B, Nq, H, _ = q.shape
    acc = accumulation_dtype(q.dtype)
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.full((B, H, Nq), -torch.inf, dtype=acc, device=q.device)
    options = _for_all(options, B)
    for piece in pieces(q, k, lists, options):
        qkv = _inputs(q, k, v, lists, piece)
        part_out, part_lse = dense(*qkv, _dense_options(options, lists, piece), _pairs(options, lists, piece))
        _put(out[:, :, piece.heads].transpose(1, 2), part_out.transpose(1, 2), lists, piece)
        _put(lse[:, piece.heads, :, None], part_lse[..., None], lists, piece)
    return out, lse


def backward_gathered(
    dense: DenseBackward,
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    lists: BlockLists,
    options: Options,
    dlse: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``backward_blocks`` by ``dense(dout, q, k, v, out, lse, options, dlse, pairs)``; dk and dv in float32 (float64 for float64)."""
    B, Nk, K, D = k.shape
    acc = accumulation_dtype(q.dtype)
    dq = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    sums = [torch.zeros((B, lists.num_columns, lists.k_block, K, D), dtype=acc, device=q.device) for _ in range(2)]
    options = _for_all(options, B)
    for piece in pieces(q, k, lists, options):
        qkv = _inputs(q, k, v, lists, piece)
        dout_, out_ = (_rows(x[:, :, piece.heads].transpose(1, 2), lists, piece).transpose(1, 2) for x in (dout, out))
        # scores of a row without keys are −inf, too: +inf keeps their difference from being NaN
        lse_ = _rows(lse[:, piece.heads, :, None], lists, piece)[..., 0]
        lse_ = lse_.masked_fill(lse_ == -torch.inf, torch.inf)
        dlse_ = None if dlse is None else _rows(dlse[:, piece.heads, :, None], lists, piece)[..., 0]
        pairs = _pairs(options, lists, piece)
        share, *key_shares = dense(dout_, *qkv, out_, lse_, _dense_options(options, lists, piece), dlse_, pairs)
        _put(dq[:, :, piece.heads].transpose(1, 2), share.transpose(1, 2).to(q.dtype), lists, piece)
        for total, key_share in zip(sums, key_shares, strict=True):
            _add(total[..., piece.kv_heads, :], key_share, lists, piece, options.deterministic)
    dk, dv = (x.flatten(1, 2)[:, :Nk] for x in sums)
    return dq, dk, dv


def pieces(q: torch.Tensor, k: torch.Tensor, lists: BlockLists, options: Options) -> Iterator[Piece]:
    """All query blocks that keep a key, those with equally many keys together. Reads the lists' lengths: waits for a GPU."""
    assert not options.causal and options.mask.band is None, "lists say themselves where they end"
    B, H, K, device = q.shape[0], q.shape[2], k.shape[2], q.device
    assert lists.num_batch in (1, B) and lists.num_heads in (1, H)
    if device.type == "meta":
        return
    masked = _rows_with_pairs(lists, options.mask.padding).expand(B, -1).cpu()
    starts = lists.row_starts.long().cpu()
    counts, num_keys = starts.diff(), _keys_of_rows(lists).cpu()
    R = lists.num_rows
    group = (torch.arange(B) if lists.num_batch > 1 else torch.zeros(B, dtype=torch.int64))[:, None] * lists.num_heads
    for head in range(lists.num_heads):
        index = (group + head) * R + torch.arange(R)
        # one number for all that must be equal in a piece: keys, whether pairs are masked, whether it is the ragged last block
        kind = num_keys[index] * 4 + masked.gather(1, index) * 2
        kind[:, -1] += int(lists.num_queries % lists.q_block != 0)
        order = kind.flatten().argsort(stable=True)
        kinds, members = kind.flatten()[order].unique_consecutive(return_counts=True)
        for value, chosen in zip(kinds.tolist(), order.split(members.tolist()), strict=True):
            S, has_pairs, ragged = value // 4, bool(value & 2), value & 1
            if S == 0:
                continue
            L = lists.num_queries % lists.q_block if ragged else lists.q_block
            heads, kv_heads = (slice(0, H), slice(0, K)) if lists.num_heads == 1 else _head(head, H // K)
            row_bytes = 2 * (kv_heads.stop - kv_heads.start) * k.shape[3] * k.element_size() + has_pairs * L * (1 + q.element_size())
            for part in chosen.split(max(1, _PIECE_BYTES // (S * row_bytes))):
                first, blocks = starts[index.flatten()[part]], int(counts[index.flatten()[part[0]]])
                entries = (first[:, None] + torch.arange(blocks)).to(device)
                batch, rows = (part // R).to(device), (part % R).to(device)
                yield Piece(heads, kv_heads, batch, rows, lists.columns[entries].long(), entries, L, S, has_pairs)


def _head(head: int, ratio: int) -> tuple[slice, slice]:
    return slice(head, head + 1), slice(head // ratio, head // ratio + 1)


def _keys_of_rows(lists: BlockLists) -> torch.Tensor:
    """(groups · rows,) int64: keys in each row's blocks; the last key block may be shorter."""
    last = lists.num_columns - 1
    sizes = torch.where(lists.columns == last, lists.num_keys - last * lists.k_block, lists.k_block)
    return _sum_rows(lists, sizes[None])[0]


def _rows_with_pairs(lists: BlockLists, padding: torch.Tensor | None) -> torch.Tensor:
    """bool (B or 1, groups · rows): whether a mask or padding lies in the row's blocks."""
    special = torch.zeros_like(lists.columns, dtype=torch.bool) if lists.masks is None else lists.masks >= 0
    special = special[None]
    if padding is not None:
        room = lists.num_columns * lists.k_block - lists.num_keys
        padded = torch.nn.functional.pad(padding, (0, room)).unflatten(1, (lists.num_columns, lists.k_block)).any(-1)
        special = special | padded[:, lists.columns.long()]
    return _sum_rows(lists, special) > 0


def _sum_rows(lists: BlockLists, values: torch.Tensor) -> torch.Tensor:
    """Sums of (…, entries) over each row's entries, int64."""
    sums = torch.nn.functional.pad(values.long().cumsum(-1), (1, 0))
    return sums[:, lists.row_starts.long()].diff()


def _inputs(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lists: BlockLists, piece: Piece) -> list[torch.Tensor]:
    rows = _rows(q[:, :, piece.heads].transpose(1, 2), lists, piece)
    keys = (_gather(x[:, :, piece.kv_heads].transpose(1, 2), piece.batch, piece.columns, lists.k_block, piece.num_keys) for x in (k, v))
    return [x.transpose(1, 2) for x in (rows, *keys)]


def _rows(x: torch.Tensor, lists: BlockLists, piece: Piece) -> torch.Tensor:
    return _gather(x, piece.batch, piece.rows[:, None], lists.q_block, piece.length)


def _gather(x: torch.Tensor, batch: torch.Tensor, blocks: torch.Tensor, block: int, length: int) -> torch.Tensor:
    """(B, H, N, D) → (P, H, length, D): the positions of each problem's blocks, the last of which may be the ragged end of x."""
    whole, ragged = x.shape[2] // block, length % block
    heads = torch.arange(x.shape[1], device=x.device)[None, :, None]
    # heads come first in memory, as kernels read them fastest
    found = x[:, :, : whole * block].unflatten(2, (whole, block))[batch[:, None, None], heads, blocks[:, None, : length // block]]
    found = found.flatten(2, 3)
    return torch.cat([found, x[:, :, whole * block :][batch]], 2) if ragged else found


def _put(x: torch.Tensor, values: torch.Tensor, lists: BlockLists, piece: Piece) -> None:
    """Writes (P, H, L, D) to the query blocks of x (B, H, N, D)."""
    whole = lists.num_queries // lists.q_block
    if piece.length == lists.q_block:
        x[:, :, : whole * lists.q_block].unflatten(2, (whole, lists.q_block))[piece.batch, :, piece.rows] = values
    else:
        x[:, :, whole * lists.q_block :][piece.batch] = values


def _add(total: torch.Tensor, values: torch.Tensor, lists: BlockLists, piece: Piece, deterministic: bool) -> None:
    """Adds (P, S, K, D) to the key blocks of total (B, columns, k_block, K, D)."""
    whole, ragged = divmod(piece.num_keys, lists.k_block)
    values = values.to(total.dtype)
    if whole:
        blocks = piece.batch[:, None] * lists.num_columns + piece.columns[:, :whole]
        shares = values[:, : whole * lists.k_block].unflatten(1, (whole, lists.k_block)).flatten(0, 1)
        _add_at(total.flatten(0, 1), blocks.flatten(), shares, deterministic)
    if ragged:
        _add_at(total[:, -1, :ragged], piece.batch, values[:, whole * lists.k_block :], deterministic)


def _add_at(total: torch.Tensor, index: torch.Tensor, values: torch.Tensor, deterministic: bool) -> None:
    if deterministic and total.is_cuda:
        # sorts by index where index_add_ uses atomics
        total.index_put_((index,), values, accumulate=True)
    else:
        total.index_add_(0, index, values)


def _pairs(options: Options, lists: BlockLists, piece: Piece) -> torch.Tensor | None:
    """bool (P, L or 1, S): the pairs of a piece that are kept; None where all are."""
    if not piece.has_pairs:
        return None
    padding, pairs = options.mask.padding, None
    if lists.masks is not None:
        ids, which = lists.masks[piece.entries].unique(return_inverse=True)
        words = lists.bits[ids.clamp(min=0).long()]
        bits = (words[..., None] >> torch.arange(WORD, device=words.device, dtype=words.dtype)) & 1
        tiles = bits.bool().flatten(2) | (ids < 0)[:, None, None]
        pairs = tiles[which].transpose(1, 2).flatten(2)[:, : piece.length, : piece.num_keys]
    if padding is None:
        return pairs
    padded = _gather(padding[:, None, :, None], piece.batch, piece.columns, lists.k_block, piece.num_keys)[:, :, :, 0]
    return ~padded if pairs is None else pairs & ~padded


def _dense_options(options: Options, lists: BlockLists, piece: Piece) -> Options:
    """What remains to be said of a piece once its pairs are said."""
    dropout = options.dropout
    if dropout is not None:
        queries = _rows(dropout.queries[:, None, :, None], lists, piece)[:, 0, :, 0]
        keys = _gather(dropout.keys[:, None, :, None], piece.batch, piece.columns, lists.k_block, piece.num_keys)[:, 0, :, 0]
        dropout = replace(dropout, batch=dropout.batch[piece.batch], heads=dropout.heads[piece.heads], queries=queries, keys=keys)
    return Options(scale=options.scale, dropout=dropout, deterministic=options.deterministic)


def _for_all(options: Options, batch: int) -> Options:
    """``options`` with padding and positions that are said once for the batch said for every entry."""
    padding, dropout = options.mask.padding, options.dropout
    if padding is not None:
        options = replace(options, mask=Mask(padding=padding.expand(batch, -1)))
    if dropout is not None:
        dropout = replace(dropout, queries=dropout.queries.expand(batch, -1), keys=dropout.keys.expand(batch, -1))
    return replace(options, dropout=dropout)
