"""A call on the tiles without its tensors (``TileCall``), and what all its launches on a device share (``Prepared``)."""

from __future__ import annotations

import functools
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dilated_attention.backends.dropout import Words
from dilated_attention.backends.hardware import on_device
from dilated_attention.backends.tiles import padding as pad
from dilated_attention.backends.tiles.launch import KernelLaunch
from dilated_attention.backends.tiles.scratch import Extent
from dilated_attention.backends.tiles.sizes import head_blocks
from dilated_attention.backends.tiles.table import MAX_PLACES, Run, Walk, constants_of, make_spans, num_rows, runs_of, to_device

# compute capabilities with 163 KiB of shared memory per program, or more
_LARGE = ((8, 0), (8, 7), (9, 0), (10, 0), (10, 3))


@dataclass(frozen=True)
class TileCall:
    """Everything about a call except its tensors.

    Args:
        walk: branches, documents, and positions of the queries.
        offsets: the offset of each branch and head; −1 if the head does not run the branch.
        left, right: query i sees keys i − left … i + right; None if unbounded. Causal is right = 0. Windows need one branch of rate 1.
        zero_keys: whether each segment has the zero keys of ``tail="zero_keys"``.
    """

    walk: Walk
    offsets: tuple[tuple[int, ...], ...]
    scale: float
    left: int | None = None
    right: int | None = None
    zero_keys: bool = False
    precision: str = "ieee"

    @property
    def num_heads(self) -> int:
        return len(self.offsets[0])


class Prepared:
    """What all launches of a call on one device share: tables, constants and grids. It is built once."""

    def __init__(self, call: TileCall, batch: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        walk = call.walk
        self.call, self.batch, self.kv_heads = call, batch, kv_heads
        self.head_dim, self.dtype, self.device = head_dim, dtype, device
        self.num_heads, self.group = call.num_heads, call.num_heads // kv_heads
        self.q_first, q_last = walk.queries
        self.num_queries, self.num_keys = q_last - self.q_first, walk.keys[1]
        heads = range(0, self.num_heads, self.group)
        self.shared = all(len(set(row[h : h + self.group])) == 1 for row in call.offsets for h in heads)
        assert self.shared or walk.key_direct < 0
        self.key_heads = kv_heads if self.shared else self.num_heads
        # numbers of places: those that the merge and the sum read, and those of all branches, for δ
        query_spans, key_spans = make_spans(walk, False), make_spans(walk, True)
        self.part_rows, self.delta_rows = query_spans.num_places, query_spans.all_places
        if max(query_spans.all_places, key_spans.all_places) > MAX_PLACES:
            raise ValueError(
                f"branches take {max(query_spans.all_places, key_spans.all_places):,} positions per head; "
                f'tiles can count up to {MAX_PLACES:,}: use backend="auto", or shorter sequences'
            )
        self.key_part_rows = key_spans.num_places
        self.extent = Extent(batch, self.num_heads, self.key_heads, head_dim, self.part_rows, self.delta_rows, self.key_part_rows)
        self._tables: dict[Hashable, Tensor] = {}
        # runs of tables that are not yet on the device
        self._waiting: dict[Hashable, list[Run]] = {}
        self._constants: tuple[Tensor, ...] = ()
        self._shared: list[Tensor] = []
        self._stream, self._copied = -1, None if device.type == "cpu" else torch.cuda.Event()
        D0, D1 = head_blocks(head_dim)
        self.longest = max((min(w, end - start) + r - 1) // r for w, r in walk.branches for start, end in walk.documents)
        self.bounds = (call.left or 0, call.right or 0)
        self.constants: dict[str, Any] = {
            "D": head_dim, "D0": D0, "D1": D1, "LEFT": call.left is not None, "RIGHT": call.right is not None, "CUT": walk.is_cut,
        }  # fmt: skip
        # words per branch in a packed mask
        self.words = max(pad.words_of(rate, self.num_keys) for _, rate in walk.branches)
        self.columns = 1 << (head_dim - 1).bit_length()
        self.index = device.index or 0
        # whether a program has only 99 KiB of shared memory, instead of 163 or 227
        self.small = device.type == "cuda" and torch.cuda.get_device_capability(device) not in _LARGE
        self.launches: dict[Hashable, tuple[KernelLaunch, ...]] = {}

    @property
    def offsets(self) -> Tensor:
        return self._constants[0]

    @property
    def rates(self) -> Tensor:
        return self._constants[1]

    @property
    def starts(self) -> Tensor:
        return self._constants[2]

    @property
    def spans(self) -> Tensor:
        return self._constants[3]

    @property
    def key_spans(self) -> Tensor:
        return self._constants[4]

    def packed(self, padding: Tensor | None) -> Tensor | None:
        """Returns the packed mask (B, branches, words) int32 that kernels over the table of queries read: see ``padding.py``."""
        if padding is None:
            return None
        branches = self.call.walk.num_branches
        words = torch.empty((self.batch, branches, self.words), dtype=torch.int32, device=self.device)
        key = "pack", padding.stride(0)
        if key not in self.launches:
            blocks = -(-self.words // pad.WORDS)
            numbers = padding.stride(0), branches, self.num_keys, self.words, blocks
            self.launches[key] = (KernelLaunch(pad.pack_kernel, blocks * branches * self.batch, numbers, {"WORDS": pad.WORDS}, dtypes=()),)
        with on_device(self.device):
            self.here()
            tensors = padding, self.rates, words
            self.launches[key][0]([x.data_ptr() for x in tensors], lambda: tensors, self.index)
        return words

    def tables(self, table: Hashable, padding: Tensor | None, words: Words | None) -> tuple[Tensor, ...]:
        """Returns the tensors that a kernel reads in addition to q, k and v; a missing mask is replaced by a tensor that is never read.

        Args:
            table: which tiles, as ``num_tiles`` was asked for them.
            padding: packed for kernels over the table of queries, unpacked for the kernel over the table of keys.
        """
        nothing = self.offsets
        return self._tables[table], nothing, nothing if padding is None else padding, *(words or (nothing, nothing, nothing))

    def here(self) -> None:
        """Prepares the current stream for launches: makes tables that are not yet on the device, all at once.

        If another stream made the ones that are there, it waits for them, and their memory is marked as used by it.
        """
        is_missing = bool(self._waiting) or not self._constants
        if self._copied is not None and (stream := torch._C._cuda_getCurrentRawStream(self.index)) != self._stream:
            if torch.cuda.is_current_stream_capturing() and not is_missing:
                # a graph cannot wait for events outside it; the call was run before its capture, and the copies with it
                return
            current = torch.cuda.current_stream(self.device)
            current.wait_event(self._copied)
            for table in self._shared:
                table.record_stream(current)
        if is_missing:
            parts = () if self._constants else constants_of(self.call.walk, self.call.offsets)
            constants, tables = to_device(parts, list(self._waiting.values()), self.device)
            self._constants = self._constants or constants
            self._tables |= zip(self._waiting, tables, strict=True)
            self._shared += [*constants[:1], *tables[:1]]
            self._waiting.clear()
            if self._copied is not None:
                self._stream = stream
                self._copied.record(torch.cuda.current_stream(self.device))

    def num_tiles(self, of_keys: bool, rows: int) -> int:
        """Returns the number of tiles of ``rows`` queries, or keys, whose table will be there after ``here``."""
        key = of_keys, rows
        if key in self._tables:
            return len(self._tables[key])
        if key not in self._waiting:
            self._waiting[key] = runs_of(self.call.walk, of_keys, rows, self.call.right == 0)
        return num_rows(self._waiting[key])

    def tiles(self, elements: int, rows: int, heads: int) -> tuple[int, int]:
        """Returns (rows per program, programs) of a launch over all rows."""
        size = max(8, elements // self.columns)
        return size, -(-rows // size) * heads * self.batch


@functools.lru_cache(maxsize=512)
def prepared(call: TileCall, batch: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> Prepared:
    """Returns a cached ``Prepared``. For packed documents, whose boundaries change, use the class directly."""
    return Prepared(call, batch, kv_heads, head_dim, dtype, device)
