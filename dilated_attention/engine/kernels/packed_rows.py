"""Branches with dilation in a cut call: the rows of all segments and heads one after the other, for one launch of a library.

A *sequence* is a segment of one head of a branch: its rows are stored at the places where the tiles keep a branch's results
(``backends/tiles/table.py``), so the library's results are what ``combine.py`` merges and sums.
"""

# mypy does not know the types of kernels
# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import functools
from collections.abc import Callable, Hashable

import torch
import triton
import triton.language as tl
from torch import Tensor

from dilated_attention.backends.base import Backend, Bounds, Options, placed
from dilated_attention.backends.hardware import on_device
from dilated_attention.backends.merge import scale_by_zero_keys
from dilated_attention.backends.tiles.call import Prepared, prepared
from dilated_attention.backends.tiles.launch import KernelLaunch
from dilated_attention.backends.tiles.run import merge_launch, sum_launch
from dilated_attention.backends.tiles.table import make_spans
from dilated_attention.engine.branches.plan import Range, Shape
from dilated_attention.engine.kernels.tiles import tile_call
from dilated_attention.pattern import NOT_IN_BRANCH, DilatedPattern
from dilated_attention.pattern.blocks.base import expand

# rows that a program copies
_ROWS = 64


@triton.jit
def gather_kernel(x_ptr, rows_ptr, table_ptr, x_n, x_h, D: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr):
    """Copies rows first, first + rate, … of a head to consecutive places, and fills the places after them with zeros.

    A row of the table is (head, first, rate, place, rows, places).
    """
    at = table_ptr + tl.program_id(0) * 6
    head, first, rate, place, count = tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3), tl.load(at + 4)
    row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    inside = (row < count)[:, None] & (column < D)[None, :]
    kept = (row < tl.load(at + 5))[:, None] & (column < D)[None, :]
    read = x_ptr + (first + row * rate).to(tl.int64)[:, None] * x_n + head.to(tl.int64) * x_h + column[None, :]
    written = rows_ptr + (place + row).to(tl.int64)[:, None] * D + column[None, :]
    tl.store(written, tl.load(read, mask=inside, other=0.0), mask=kept)


class _Rows:
    """Where the rows of the sequences come from and where they go, for queries or for keys.

    Args:
        columns: of each sequence: head, first row in the tensor, rate, first place, number of rows.
        places: the number of places of all heads.
    """

    def __init__(self, columns: tuple[Tensor, ...], places: int, device: torch.device) -> None:
        head, first, rate, place, count = columns
        self.bounds = torch.cat([place, torch.tensor([places])]).int().to(device)
        self.used, self.most, self.places = count.int().to(device), int(count.max()), places
        self.has_gaps = int(count.sum()) < places
        # a kernel reads whole tiles, so places that belong to no sequence must be finite. Those before the first are one without rows
        if int(place.min()) > 0:
            head, first, rate, place, count = (torch.cat([x.new_tensor([y]), x]) for x, y in zip(columns, (0, 0, 1, 0, 0), strict=True))
        order = place.argsort()
        filled = torch.empty_like(place)
        filled[order] = torch.cat([place[order], place.new_tensor([places])]).diff()
        owner, tile = expand(torch.zeros_like(count), -(-filled // _ROWS))
        done = tile * _ROWS
        ends = (place[owner] + done, count[owner] - done, filled[owner] - done)
        made = (head[owner], first[owner] + done * rate[owner], rate[owner], *ends)
        self.table = torch.stack(made, -1).int().contiguous().to(device)
        self._launches: dict[Hashable, KernelLaunch] = {}

    def gather(self, x: Tensor, index: int) -> Tensor:
        """Returns the rows (1, places, 1, D) of x (1, N, H, D), of any strides whose last one is 1."""
        D = x.shape[3]
        rows = torch.empty((1, self.places, 1, D), dtype=x.dtype, device=x.device)
        key = x.stride(), x.dtype
        if key not in self._launches:
            constants = {"D": D, "COLUMNS": triton.next_power_of_2(D), "ROWS": _ROWS}
            self._launches[key] = KernelLaunch(gather_kernel, len(self.table), x.stride()[1:3], constants)
        tensors = x, rows, self.table
        self._launches[key]([y.data_ptr() for y in tensors], lambda: tensors, index)
        return rows


class GatheredHeads:
    """Query heads [first, last) of a pattern whose gathered rows are in memory at the same time; it is built once for calls alike."""

    def __init__(self, heads: Range, prepared_call: Prepared, sequences: tuple[Tensor, ...]) -> None:
        self.prepared, self.heads = prepared_call, heads
        head, first, rate, place, count, first_key, key_place, seen, zeros = sequences
        num_heads, device = prepared_call.num_heads, prepared_call.device
        self.queries = _Rows((head, first, rate, place, count), prepared_call.part_rows * num_heads, device)
        self.keys = _Rows((head, first_key, rate, key_place, seen), prepared_call.key_part_rows * num_heads, device)
        of_queries, of_keys = self.queries, self.keys
        self.bounds = Bounds(of_queries.bounds, of_keys.bounds, of_queries.most, of_keys.most, of_queries.used, of_keys.used)
        # (1, 1, places): the logarithm of the number of zero keys that a place's query sees in its branch; None if there are none
        self.zeros: Tensor | None = None
        if bool(zeros.any()):
            place, count, zeros = place.to(device), count.to(device), zeros.to(device)
            of_places = torch.zeros(self.queries.places, device=device)
            owner, row = expand(torch.zeros_like(count), count)
            of_places[place[owner] + row] = zeros[owner].float()
            self.zeros = of_places.log()[None, None]
        self._launches: dict[Hashable, KernelLaunch] = {}

    def _narrow(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        first, last = self.heads
        return tensors if last - first == tensors[0].shape[2] else tuple(x[:, :, first:last] for x in tensors)

    def _combine(self, key: Hashable, make: Callable[[], KernelLaunch], tensors: tuple[Tensor, ...]) -> None:
        if key not in self._launches:
            self._launches[key] = make()
        self._launches[key]([x.data_ptr() for x in tensors], lambda: tensors, self.prepared.index)

    def forward(self, backend: Backend, options: Options, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> None:
        """Merges the branches' results into out (1, n, H, D) and lse (1, H, n), which hold those of the direct branch, if any."""
        p = self.prepared
        q, k, v, out = self._narrow(q, k, v, out)
        lse = lse[:, slice(*self.heads)]
        with on_device(q.device):
            p.here()
            rows, keys, values = self.queries.gather(q, p.index), self.keys.gather(k, p.index), self.keys.gather(v, p.index)
            # overwriting the queries would save memory, but a kernel may read them again
            parts = torch.empty_like(rows)
            parts, part_lse = placed(backend.forward(rows, keys, values, options, self.bounds, out=(parts, None)), (parts, None))
            tensors = out, lse, parts, part_lse, p.spans, p.starts, p.rates, p.offsets
            self._combine(("merge", out.stride()), lambda: merge_launch(p, out), tensors)

    def backward(self, backend: Backend, options: Options, tensors: tuple[Tensor, ...], grads: tuple[Tensor, ...], own: bool) -> None:
        """Adds the branches' shares to dq, dk, dv, which hold those of the direct branch, if any.

        Args:
            tensors: dout, q, k, v, out, lse.
            own: each branch has its own output in place of ``out`` (detached mixing).
        """
        p = self.prepared
        *given, lse = tensors
        dout, q, k, v, out, *grads_ = self._narrow(*given, *grads)
        with on_device(q.device):
            p.here()
            dout, q = (self.queries.gather(x, p.index) for x in (dout, q))
            k, v = (self.keys.gather(x, p.index) for x in (k, v))
            if own:
                # a kernel reads whole tiles, as in _Rows
                out = torch.zeros_like(q)
                _, own_lse = placed(backend.forward(q, k, v, options, self.bounds, out=(out, None)), (out, None))
                if self.zeros is not None:
                    scale_by_zero_keys(out, own_lse, self.zeros)
            else:
                out = self.queries.gather(out, p.index)
            # (1, H, n) → (1, n, H, 1)
            lse = self.queries.gather(lse[:, slice(*self.heads), :, None].transpose(1, 2), p.index)
            # the sum reads every place of a key
            dq, make = torch.empty_like(q), torch.zeros_like if self.keys.has_gaps else torch.empty_like
            dk, dv = make(k), make(v)
            shares = dq, dk, dv
            placed(backend.backward(dout, q, k, v, out, lse.view(1, 1, -1), options, self.bounds, grads=shares), shares)
            sums = *grads_, dq, dk, dv, p.spans, p.key_spans, p.starts, p.rates, p.offsets
            strides = tuple(x.stride()[:3] for x in grads_)
            self._combine(("sum", *strides), lambda: sum_launch(p, strides), sums)


def _sequences(pattern: DilatedPattern, shape: Shape, p: Prepared) -> tuple[Tensor, ...]:
    """Returns of each sequence, ordered by place.

    They are its head, first query row, rate, place, queries; first key row, place, keys that are seen, and zero keys.
    """
    walk, (first, last) = p.call.walk, shape.queries
    queries, keys = make_spans(walk, False), make_spans(walk, True)
    document = shape.documents[0]
    found: list[tuple[Tensor, ...]] = []
    for branch, (_, rate) in enumerate(pattern.branches):
        if branch == walk.direct:
            continue
        offsets = torch.tensor(p.call.offsets[branch])[:, None]
        length = queries.lengths[0, branch]
        segment = queries.first[0, branch] + torch.arange(int(queries.counts[0, branch]))
        start = document[0] + segment * length
        end = (start + length).clamp(max=document[1])
        begin, stop = start.clamp(min=first), end.clamp(max=last)
        # the first position of the head that has a query
        low = start + offsets
        low = low + (begin - low + rate - 1).clamp(min=0) // rate * rate
        count = ((stop - low + rate - 1) // rate).clamp(min=0) * (offsets != NOT_IN_BRANCH)
        seen_to = low + (count - 1) * rate + 1 if shape.is_causal else end
        seen = (seen_to - start - offsets + rate - 1) // rate
        place = queries.bases[0, branch] + segment * queries.places[0, branch] + (low - begin) // rate
        key_place = keys.bases[0, branch] + segment * keys.places[0, branch] + offsets // rate
        head = torch.arange(len(offsets))[:, None]
        columns = (head, low - first, torch.tensor(rate), place + head * p.part_rows, count)
        zeros = (pattern.zero_keys(branch, document[1], 0) - seen) * p.call.zero_keys
        more = (start + offsets, key_place + head * p.key_part_rows, seen, zeros)
        found.append(torch.broadcast_tensors(*columns, *more))
    together = [torch.cat(columns, 1).flatten() for columns in zip(*found, strict=True)]
    kept = together[4] > 0
    together = [x[kept] for x in together]
    order = together[3].argsort()
    return tuple(x[order] for x in together)


@functools.lru_cache(maxsize=32)
def gathered_heads(
    pattern: DilatedPattern, shape: Shape, scale: float, heads: Range, head_dim: int, dtype: torch.dtype, device: torch.device
) -> GatheredHeads | None:
    """Returns what the launches of some heads have in common; None if these heads have no query in any of the branches."""
    made = prepared(tile_call(pattern, shape, scale, False, "ieee", heads), 1, heads[1] - heads[0], head_dim, dtype, device)
    sequences = _sequences(pattern, shape, made)
    return GatheredHeads(heads, made, sequences) if len(sequences[0]) else None
