"""Backends on a dense kernel (``ContainedBackend``): NaN and infinity confined, and lists of blocks by gathering.

NaN and infinity are confined to the rows and keys that they can affect, in both passes, on a CPU. A kernel multiplies the weight 0 of a
masked pair by whatever the pair holds, and 0 · NaN is NaN. So a launch whose results are not finite is computed again without the
non-finite numbers, and that result is used wherever those have no effect. Where row i reads key j, that is, where the pair is not masked,

    a non-finite key makes out and lse of the row NaN; a non-finite value shows in its channel of out;
    a non-finite number in q, dout, out, lse, dlse of the row, or in a key or value that it reads, affects its dq and the key's dk, dv.

On a GPU the check would have to wait for the device, so the kernels' own results are kept there.

Layout: q, dout, out (P, L, G, D), k and v (P, S, K, D), lse and dlse (P, G, L), see ``Backend``.

Of lists, query blocks with equally many keys form a batch of dense problems of equal size, a *piece*. Its queries, keys and values are
gathered, a dense kernel runs, and the results are scattered back. In float32 and float64, without padding, blocks with masked pairs are
pieces of their own: a kernel with a mask is slower, and under causality every query block has one such key block. In half precision a row
stays in one piece, since merging two would round its results twice. Memory: one copy of the inputs, heads first, and one piece.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dilated_attention.backends.base import Backend, Grads, Keys, Mask, Options, Result, Views, accumulation_dtype
from dilated_attention.backends.dropout import Dropout
from dilated_attention.backends.merge import merge_
from dilated_attention.pattern.blocks.block_lists import WORD, BlockLists

# bytes of keys, values and pairs of one piece. On a CPU a piece is about as large as the caches (between 2 and 64 MiB the difference is
# below the noise of the timings); on a GPU larger pieces mean fewer launches
PIECE_BYTES = 8 * 2**20
PIECE_BYTES_GPU = 64 * 2**20
# a kernel's forward and backward; the arguments are tensors, options, dlse (backward only) and pairs
RawForward = Callable[..., Result]
RawBackward = Callable[..., Grads]


def all_finite(*tensors: Tensor) -> bool:
    """Whether every element is finite; if so, one sum per tensor usually decides it."""
    # the sum of finite numbers may overflow, so a non-finite sum needs the full check
    return all(math.isfinite(x.sum().item()) or bool(x.isfinite().all()) for x in tensors)


class ContainedBackend(Backend):
    """A backend on a dense kernel (``raw_forward`` and ``raw_backward``) whose non-finite numbers are confined.

    The dense functions take ``pairs``: bool (P, L or 1, S), True where the pair is kept; None where all are. With it they also compute
    lists of blocks, if the capabilities declare any.
    """

    # ``dense_forward`` and ``dense_backward`` for finite inputs
    raw_forward: RawForward
    raw_backward: RawBackward

    def forward(self, q: Tensor, k: Tensor, v: Tensor, options: Options, keys: Keys = None, **__: Views) -> Result:
        if keys is None:
            return self.dense_forward(q, k, v, options)
        assert isinstance(keys, BlockLists)
        (B, Nq, H, _), lists = q.shape, keys
        acc, whole = accumulation_dtype(q.dtype), (B, lists.num_rows, lists.q_block, H)
        out, lse = q.new_zeros((*whole, q.shape[3])), q.new_full((B, H, *whole[1:3]), -torch.inf, dtype=acc)
        with torch.no_grad():
            if not q.is_meta:
                masks = _Masks(lists, options, B)
                queries, of_keys, values = _Blocks(q, lists.q_block), _Blocks(k, lists.k_block), _Blocks(v, lists.k_block)
                for piece in _pieces(q, k, lists, options):
                    inputs = (queries.of_rows(piece), of_keys.of_columns(piece), values.of_columns(piece))
                    part_out, part_lse = self.dense_forward(*inputs, masks.options(piece), masks.pairs(piece))
                    batch, rows, queries_of, heads = piece.place
                    of_lse = batch, heads, rows, queries_of
                    if piece.is_second:
                        merge_(part_out, part_lse.transpose(1, 2), out[piece.place].transpose(1, 2), lse[of_lse].transpose(1, 2))
                    out[piece.place] = part_out.transpose(1, 2)
                    lse[of_lse] = part_lse
        return out.flatten(1, 2)[:, :Nq].contiguous(), lse.flatten(2)[:, :, :Nq].contiguous()

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, options: Options, keys: Keys = None, *,
        dlse: Tensor | None = None, **__: Views,
    ) -> Grads:  # fmt: skip
        """Returns (dq, dk, dv); of lists, dk and dv in float32 (float64 for float64)."""
        if keys is None:
            return self.dense_backward(dout, q, k, v, out, lse, options, dlse)
        assert isinstance(keys, BlockLists)
        (B, Nq, H, D), lists = q.shape, keys
        dq, dk, dv = q.new_zeros((B, lists.num_rows, lists.q_block, H, D)), _Sums(k, lists, options), _Sums(v, lists, options)
        with torch.no_grad():
            if not q.is_meta:
                masks = _Masks(lists, options, B)
                # the scores of a row without keys are −inf too; with an lse of +inf their difference is not NaN
                of_lse = [lse.masked_fill(lse == -torch.inf, torch.inf), *(() if dlse is None else (dlse,))]
                of_rows = [_Blocks(x, lists.q_block) for x in (dout, q, out, *(x.transpose(1, 2)[..., None] for x in of_lse))]
                of_keys, values = _Blocks(k, lists.k_block), _Blocks(v, lists.k_block)
                for piece in _pieces(q, k, lists, options):
                    part_dout, part_q, part_out, *numbers = (x.of_rows(piece) for x in of_rows)
                    part_lse, part_dlse, *_ = *(x[..., 0].transpose(1, 2) for x in numbers), None
                    inputs = part_dout, part_q, of_keys.of_columns(piece), values.of_columns(piece), part_out, part_lse
                    dq_share, dk_share, dv_share = self.dense_backward(*inputs, masks.options(piece), part_dlse, masks.pairs(piece))
                    dq_share = dq_share.transpose(1, 2)
                    dq[piece.place] = (dq_share + dq[piece.place] if piece.is_second else dq_share).to(q.dtype)
                    dk.add(dk_share, piece)
                    dv.add(dv_share, piece)
        return dq.flatten(1, 2)[:, :Nq].contiguous(), dk.result(), dv.result()

    def dense_forward(self, q: Tensor, k: Tensor, v: Tensor, options: Options, pairs: Tensor | None = None) -> Result:
        """Returns (out, lse) of P dense problems."""
        out, lse = self.raw_forward(q, k, v, options, pairs)
        # a bad value shows in out; a bad key with a score of −inf need not
        if q.device.type != "cpu" or all_finite(out, k):
            return out, lse
        bad_k, bad_v = _bad(k), ~v.isfinite()
        if not (bool(bad_k.any()) or bool(bad_v.any())):
            return out, lse
        clean_out, clean_lse = self.raw_forward(q, _without(k, bad_k), _without(v, bad_v), options, pairs)
        # a value only affects its own channel
        out = torch.where(self._readers(q, bad_v, options, pairs), out, clean_out)
        spoilt = self._readers(q, bad_k, options, pairs)
        return out.masked_fill(spoilt, torch.nan), clean_lse.masked_fill(spoilt[..., 0].transpose(1, 2), torch.nan)

    def dense_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, options: Options, dlse: Tensor | None = None,
        pairs: Tensor | None = None,
    ) -> Grads:  # fmt: skip
        """Returns (dq, dk, dv) of P dense problems."""
        slopes = None if options.bias is None else options.bias.gradient
        before = None if slopes is None else slopes.clone()
        dq, dk, dv = self.raw_backward(dout, q, k, v, out, lse, options, dlse, pairs)
        # without a mask every row reads every key, and there is nothing to confine
        masked = options.causal or pairs is not None or not options.mask.is_trivial
        if q.device.type != "cpu" or not masked or all_finite(dq, dk, dv):
            return dq, dk, dv
        bad_keys = _bad(k) | _bad(v)
        bad_rows = _bad(q) | _bad(dout) | _bad(out)
        of_lse = ~lse.isfinite() if dlse is None else ~(lse.isfinite() & dlse.isfinite())
        # +inf marks a row that takes no part, so nothing in it has an effect
        idle = (lse == torch.inf).transpose(1, 2)[..., None]
        bad_rows |= of_lse.transpose(1, 2)[..., None] | self._readers(q, bad_keys, options, pairs)
        zeroed, reached_rows = bad_rows | idle, bad_rows & ~idle
        if not (bool(zeroed.any()) or bool(bad_keys.any())):
            return dq, dk, dv
        without = zeroed[..., 0].transpose(1, 2)
        clean_dout, clean_q, clean_out = (_without(x, zeroed) for x in (dout, q, out))
        clean_k, clean_v = (_without(x, bad_keys) for x in (k, v))
        clean_lse = lse.masked_fill(without, torch.inf)
        clean_dlse = None if dlse is None else dlse.masked_fill(without, 0)
        if slopes is not None and before is not None:
            # a backward adds to the slopes' gradient in place
            slopes.copy_(before)
        grads = self.raw_backward(clean_dout, clean_q, clean_k, clean_v, clean_out, clean_lse, options, clean_dlse, pairs)
        reached_keys = self._read(k, reached_rows, options, pairs)
        # a row that reads no real key (it may read zero keys) has no dq
        reading = self._readers(q, torch.ones_like(bad_keys), options, pairs)
        if slopes is not None:
            slopes.masked_fill_((reached_rows & reading).any(-1).flatten(0, 1).any(0), torch.nan)
        return (
            torch.where(reached_rows & reading, dq, grads[0]),
            torch.where(reached_keys, dk, grads[1]),
            torch.where(reached_keys, dv, grads[2]),
        )

    def _readers(self, q: Tensor, keys: Tensor, options: Options, pairs: Tensor | None) -> Tensor:
        """Returns bool (P, L, G, E): the rows that read one of ``keys``, bool (P, S, K, E)."""
        # all scores are equal, so every key that a row reads has a nonzero weight
        value = keys.to(accumulation_dtype(q.dtype), memory_format=torch.contiguous_format, copy=True)
        zeros_q, zeros_k = value.new_zeros((*q.shape[:3], keys.shape[3])), torch.zeros_like(value)
        return self.raw_forward(zeros_q, zeros_k, value, replace(options, dropout=None, bias=None), pairs)[0] != 0

    def _read(self, k: Tensor, rows: Tensor, options: Options, pairs: Tensor | None) -> Tensor:
        """Returns bool (P, S, K, 1): the keys that one of ``rows``, bool (P, L, G, 1), reads."""
        dout = rows.to(accumulation_dtype(k.dtype), memory_format=torch.contiguous_format, copy=True)
        zeros_q, zeros_k = torch.zeros_like(dout), dout.new_zeros((*k.shape[:3], 1))
        # an lse of +inf gives the other rows the weight 0
        lse = torch.where(rows, 0.0, torch.inf).to(dout.dtype)[..., 0].transpose(1, 2)
        options = replace(options, dropout=None, bias=None)
        return self.raw_backward(dout, zeros_q, zeros_k, zeros_k, zeros_q, lse, options, None, pairs)[2] != 0


def _without(x: Tensor, where: Tensor) -> Tensor:
    """Returns a copy of x with zeros ``where``, with last stride 1, as kernels require."""
    return x.clone(memory_format=torch.contiguous_format).masked_fill_(where, 0)


def _bad(x: Tensor) -> Tensor:
    """Returns bool (…, 1): whether some element of a row is not finite."""
    return ~x.isfinite().all(-1, keepdim=True)


class GatherProblems(NamedTuple):
    """P problems of L queries and S keys: query block ``rows[p]`` of batch entry ``batch[p]`` over its key blocks ``columns[p]``.

    Args:
        heads, kv_heads: (1 or P, G) and (1 or P, K) heads of each problem.
        entries: (P, blocks) indices of ``columns`` in the lists.
        has_pairs: whether some pairs in its blocks are masked.
        is_second: whether another piece has computed the rest of these rows; the results are then merged or added.
    """

    batch: Tensor
    rows: Tensor
    heads: Tensor
    kv_heads: Tensor
    columns: Tensor
    entries: Tensor
    num_queries: int
    num_keys: int
    has_pairs: bool
    is_second: bool

    @property
    def place(self) -> tuple[Any, ...]:
        """The index of its queries (P, G, L, D) in blocks (B, R, block, H, D)."""
        return self.batch[:, None], self.rows[:, None], slice(self.num_queries), self.heads


def _pieces(q: Tensor, k: Tensor, lists: BlockLists, options: Options) -> Iterator[GatherProblems]:
    """Yields all query blocks that keep a key, grouped by their number of keys. Reads the lists' lengths, so it waits for a GPU."""
    assert not options.causal and options.mask.band is None, "block lists already include causality and the window"
    B, H, K, D, R, device = q.shape[0], q.shape[2], k.shape[2], k.shape[3], lists.num_rows, q.device
    assert lists.num_batch in (1, B) and lists.num_heads in (1, H)
    together = lists.num_heads == 1
    budget = PIECE_BYTES if device.type == "cpu" else PIECE_BYTES_GPU
    kv_row_bytes = 2 * (K if together else 1) * D * k.element_size()
    last = lists.num_queries % lists.q_block
    # rows that a piece of an earlier part holds keys of
    done = torch.zeros(lists.num_groups * R, dtype=torch.bool, device="cpu")
    for entries_of, starts, num_keys, masked in _parts(lists, options.mask.padding, splits=q.dtype in (torch.float32, torch.float64)):
        masked = masked.expand(B, -1)
        # dropout and bias by position take one set of heads for all problems of a piece
        by_head = options.dropout is not None or options.bias is not None
        for chosen in torch.arange(lists.num_heads, device="cpu").split(1 if by_head else lists.num_heads):
            batch, heads, rows = (
                x.flatten() for x in torch.meshgrid(torch.arange(B, device="cpu"), chosen, torch.arange(R, device="cpu"), indexing="ij")
            )
            index = (batch * (lists.num_batch > 1) * lists.num_heads + heads) * R + rows
            # one number encodes all that must be equal in a piece: the keys, whether another piece has the rest of the row, whether pairs
            # are masked, whether it is the ragged last block
            kind = num_keys[index] * 8 + done[index] * 4 + masked[batch, index] * 2 + ((rows == R - 1) & (last > 0))
            order = kind.argsort(stable=True)
            kinds, members = kind[order].unique_consecutive(return_counts=True)
            for value, group in zip(kinds.tolist(), order.split(members.tolist()), strict=True):
                S, is_second, has_pairs, L = value // 8, bool(value & 4), bool(value & 2), last if value & 1 else lists.q_block
                if S == 0:
                    continue
                size = S * (kv_row_bytes + has_pairs * L * (1 + q.element_size()))
                for part in group.split(max(1, budget // size)):
                    entries = entries_of[starts[index[part], None] + torch.arange(-(-S // lists.k_block), device="cpu")].to(device)
                    head = torch.arange(H, device="cpu")[None] if together else heads[part, None]
                    kv_head = torch.arange(K, device="cpu")[None] if together else head // (H // K)
                    columns = lists.columns[entries].long()
                    batches, blocks = batch[part].to(device), rows[part].to(device)
                    yield GatherProblems(batches, blocks, head.to(device), kv_head.to(device), columns, entries, L, S, has_pairs, is_second)
        done |= num_keys > 0


def _parts(lists: BlockLists, padding: Tensor | None, *, splits: bool) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Yields parts of the entries of all rows: (indices into ``lists.columns`` (E',), row after row; where each row begins among these
    (groups · rows,); keys of each row (groups · rows,); whether some of its pairs are masked (1 or B, groups · rows)).

    Args:
        splits: blocks without masked pairs are a part of their own, if padding does not mask pairs by batch entry.
    """
    num_rows, last = lists.num_groups * lists.num_rows, lists.num_columns - 1
    row, columns = lists.row_of_entry.long().cpu(), lists.columns.cpu()
    sizes = torch.where(columns == last, lists.num_keys - last * lists.k_block, lists.k_block)
    special = torch.zeros_like(columns, dtype=torch.bool) if lists.masks is None else lists.masks.cpu() >= 0
    flags, parts = special[None], [torch.ones_like(special)]
    if padding is not None:
        room = lists.num_columns * lists.k_block - lists.num_keys
        padded = F.pad(padding.cpu(), (0, room)).unflatten(1, (lists.num_columns, lists.k_block)).any(-1)
        flags = flags | padded[:, columns.long()]
    elif splits:
        parts = [~special, special]
    for part in parts:
        entries = part.nonzero()[:, 0]
        if not entries.numel():
            continue
        of_entries = row[entries]
        count = torch.bincount(of_entries, minlength=num_rows)
        keys = count.new_zeros(num_rows).index_add_(0, of_entries, sizes[entries].long())
        masked = count.new_zeros((flags.shape[0], num_rows)).index_add_(1, of_entries, flags[:, entries].long()) > 0
        yield entries, count.cumsum(0) - count, keys, masked


def _of_all(x: Tensor, batch: int) -> Tensor:
    """Views (B or 1, N) as (B, N, 1, 1)."""
    return x.expand(batch, -1)[..., None, None]


class _Blocks:
    """x (B, N, H, D) split into blocks, heads first, which kernels read fastest; what the last block lacks is 0."""

    def __init__(self, x: Tensor, block: int) -> None:
        B, N, self.heads, self.dim = x.shape
        self.count = -(-N // block)
        # padding alone may keep another order of dimensions in memory
        x = F.pad(x.transpose(1, 2), (0, 0, 0, -N % block)).contiguous()
        self.flat = x.view(B * self.heads * self.count, block * self.dim)
        # one buffer serves all pieces: on the CPU fresh pages take a third of the time of a gather
        self.scratch = self.flat.new_empty((0, self.flat.shape[1]))

    def of_rows(self, piece: GatherProblems) -> Tensor:
        return self._gather(piece.batch, piece.heads, piece.rows[:, None], piece.num_queries)

    def of_columns(self, piece: GatherProblems) -> Tensor:
        return self._gather(piece.batch, piece.kv_heads, piece.columns, piece.num_keys)

    def _gather(self, batch: Tensor, heads: Tensor, blocks: Tensor, length: int) -> Tensor:
        """Gathers (P, length, G or K, D), or one head where all heads share x."""
        heads = torch.zeros_like(heads[:1, :1]) if self.heads == 1 else heads
        index = (batch[:, None, None] * self.heads + heads[:, :, None]) * self.count + blocks[:, None]
        if index.numel() > self.scratch.shape[0]:
            self.scratch = self.flat.new_empty((index.numel(), self.flat.shape[1]))
        found = self.scratch[: index.numel()]
        torch.index_select(self.flat, 0, index.flatten(), out=found)
        return found.view(*index.shape[:2], -1, self.dim)[:, :, :length].transpose(1, 2)


class _Sums:
    """The gradient of keys or values (B, N, K, D), summed over pieces. It is heads first where each head has its own lists."""

    def __init__(self, x: Tensor, lists: BlockLists, options: Options) -> None:
        B, self.num_keys, self.heads, D = x.shape
        self.together = lists.num_heads == 1
        shape = (B, 1, lists.num_columns, lists.k_block, self.heads, D)
        if not self.together:
            shape = (B, self.heads, lists.num_columns, lists.k_block, 1, D)
        self.total = x.new_zeros(shape, dtype=accumulation_dtype(x.dtype))
        # index_put_ sorts by index, where index_add_ uses atomics
        self.sorts = options.deterministic and x.is_cuda

    def add(self, values: Tensor, piece: GatherProblems) -> None:
        """Adds (P, S, K, D) to the key blocks of ``piece``."""
        columns, block = self.total.shape[2:4]
        whole, ragged = divmod(piece.num_keys, block)
        values = values.to(self.total.dtype)
        unit = piece.batch if self.together else piece.batch * self.heads + piece.kv_heads[:, 0]
        blocks = self.total.flatten(0, 2)
        if whole:
            index = unit[:, None] * columns + piece.columns[:, :whole]
            self._add(blocks, index.flatten(), values[:, : whole * block].unflatten(1, (whole, block)).flatten(0, 1))
        if ragged:
            self._add(blocks[:, :ragged], unit * columns + columns - 1, values[:, whole * block :])

    def _add(self, total: Tensor, index: Tensor, values: Tensor) -> None:
        if self.sorts:
            total.index_put_((index,), values, accumulate=True)
        else:
            total.index_add_(0, index, values)

    def result(self) -> Tensor:
        if self.together:
            return self.total[:, 0].flatten(1, 2)[:, : self.num_keys]
        return self.total[..., 0, :].flatten(2, 3)[:, :, : self.num_keys].transpose(1, 2).contiguous()


class _Masks:
    """The masks and the dropout of single pairs in ``lists`` and ``options``, for one piece at a time."""

    def __init__(self, lists: BlockLists, options: Options, batch: int) -> None:
        self.lists, self.dropout, self.bias = lists, options.dropout, options.bias
        self.plain = replace(options, mask=Mask(), dropout=None, bias=None, geometry=None)
        padding = options.mask.padding
        self.padding = None if padding is None else _Blocks(_of_all(padding, batch), lists.k_block)
        if options.dropout is not None:
            self.queries = _Blocks(_of_all(options.dropout.queries, batch), lists.q_block)
            self.keys = _Blocks(_of_all(options.dropout.keys, batch), lists.k_block)
        if options.bias is not None:
            self.places = _Blocks(options.bias.queries[:, :, None], lists.q_block), _Blocks(options.bias.keys[:, :, None], lists.k_block)

    def pairs(self, piece: GatherProblems) -> Tensor | None:
        """Returns bool (P, L or 1, S), True where the pair is kept; None if all are."""
        if not piece.has_pairs:
            return None
        lists, kept = self.lists, None
        if lists.masks is not None:
            ids, which = lists.masks[piece.entries].unique(return_inverse=True)
            words = lists.bits[ids.clamp(min=0).long()]
            bits = (words[..., None] >> torch.arange(WORD, device=words.device, dtype=words.dtype)) & 1
            tiles = bits.bool().flatten(2) | (ids < 0)[:, None, None]
            kept = tiles[which].transpose(1, 2).flatten(2)[:, : piece.num_queries, : piece.num_keys]
        if self.padding is None:
            return kept
        real = ~self.padding.of_columns(piece)[:, None, :, 0, 0]
        return real if kept is None else kept & real

    def options(self, piece: GatherProblems) -> Options:
        """Returns the options that a dense kernel needs in addition to the pairs."""
        dropout = self.dropout
        if dropout is not None:
            batch, heads = dropout.batch[piece.batch], dropout.heads[piece.heads[0]]
            queries, keys = self.queries.of_rows(piece)[..., 0, 0], self.keys.of_columns(piece)[..., 0, 0]
            dropout = Dropout(dropout.probability, dropout.seed, batch, heads, queries, keys)
        bias = self.bias
        if bias is not None:
            queries, keys = self.places[0].of_rows(piece)[:, :, 0], self.places[1].of_columns(piece)[:, :, 0]
            some = slice(int(piece.heads[0, 0]), int(piece.heads[0, -1]) + 1)
            bias = bias._replace(queries=queries, keys=keys).part(heads=some)
        return replace(self.plain, dropout=dropout, bias=bias)
