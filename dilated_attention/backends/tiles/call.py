"""A call on the tiles without its tensors (``TileCall``), and what all its launches on a device share (``Prepared``)."""

from __future__ import annotations

import functools
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dilated_attention.backends.dropout import Words
from dilated_attention.backends.hardware import capability, on_device
from dilated_attention.backends.tiles import padding as pad
from dilated_attention.backends.tiles.launch import NO_DEVICE, KernelLaunch, Workspace
from dilated_attention.backends.tiles.scratch import LARGE_MEMORY, Extent
from dilated_attention.backends.tiles.sizes import head_blocks
from dilated_attention.backends.tiles.table import MAX_PLACES, Walk, counts_of, share_keys
from dilated_attention.backends.tiles.table_kernels import spans_kernel, table_kernel

Tensors = tuple[Tensor, ...]
# documents that a program takes at a time
_DOCUMENTS = 512


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


class Tables:
    """What the launches of both passes read, int32 on the device, flat: spans, the table of queries and the table of keys.

    spans: (documents, branches, 2): place of segment 0 of queries, and of keys. The tables: (tiles, 8). Views of them are made where a
    launch asks for tensors, since making one takes longer than a launch.
    """

    def __init__(self, space: Workspace, num_tiles: tuple[int, int]) -> None:
        self.space, self.sizes = space, [8 * count for count in num_tiles]
        spans, _, rows = space.pointers
        self.pointers = spans, rows, rows + 4 * self.sizes[0]

    def tensors(self) -> Tensors:
        spans, _, rows = self.space.tensors()
        return spans, *rows.split(self.sizes)


class Constants(NamedTuple):
    """What does not depend on the length: offset of each branch and head (branches, H), segment length and rate of each branch, int32."""

    offsets: Tensor
    lengths: Tensor
    rates: Tensor


@functools.lru_cache(maxsize=64)
def constants_of(branches: tuple[tuple[int, int], ...], offsets: tuple[tuple[int, ...], ...], device: torch.device) -> Constants:
    lengths, rates = zip(*branches, strict=True)
    parts = offsets, [min(w, 2**31 - 1) for w in lengths], rates
    return Constants(*(torch.tensor(part, dtype=torch.int32, device=device) for part in parts))


class Prepared:
    """What all launches of a call on one device share: tables, constants and grids. It is built once.

    That of meta tensors only starts compiling what the current GPU will need.
    """

    def __init__(self, call: TileCall, batch: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        walk = call.walk
        self.call, self.batch, self.kv_heads = call, batch, kv_heads
        self.head_dim, self.dtype, self.device = head_dim, dtype, device
        self.num_heads, self.group = call.num_heads, call.num_heads // kv_heads
        self.q_first, q_last = walk.queries
        self.num_queries, self.num_keys = q_last - self.q_first, walk.keys[1]
        self.shared = share_keys(call.offsets, self.group)
        assert self.shared or walk.key_direct < 0
        self.key_heads = kv_heads if self.shared else self.num_heads
        # numbers of places: those that the merge and the sum read, and those of all branches, for δ
        self.longest, self.tile = walk.longest, walk.tile
        (self.part_rows, self.delta_rows, query_tiles), of_keys = counts_of(walk, False), counts_of(walk, True)
        self.key_part_rows, self.num_tiles = of_keys.num_places, (query_tiles, of_keys.num_tiles)
        if (most := max(self.delta_rows, of_keys.all_places)) > MAX_PLACES:
            raise ValueError(
                f'branches take {most:,} positions per head; tiles can count up to {MAX_PLACES:,}: use backend="auto", or shorter sequences'
            )
        self.extent = Extent(batch, self.num_heads, self.key_heads, head_dim, self.part_rows, self.delta_rows, self.key_part_rows)
        self.offsets, self.lengths, self.rates = constants_of(walk.branches, call.offsets, device)
        self._tables: Tables | None = None
        self._starts: Tensor | None = None
        self._stream, self._copied = -1, torch.cuda.Event() if device.type == "cuda" else None
        D0, D1 = head_blocks(head_dim)
        self.bounds = (call.left or 0, call.right or 0)
        self.constants: dict[str, Any] = {
            "D": head_dim, "D0": D0, "D1": D1, "LEFT": call.left is not None, "RIGHT": call.right is not None, "CUT": walk.is_cut,
            "PRECISION": call.precision,
        }  # fmt: skip
        # words per branch in a packed mask
        self.words = max([pad.words_of(rate, self.num_keys) for _, rate in walk.branches])
        self.columns = 1 << (head_dim - 1).bit_length()
        self.index = NO_DEVICE if device.type == "meta" else device.index or 0
        # whether a program has only 99 KiB of shared memory, instead of 163 or 227
        self.small = (of_gpu := capability(device)) is not None and of_gpu not in LARGE_MEMORY
        self.launches: dict[Hashable, tuple[KernelLaunch, ...]] = {}

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
        tensors = padding, self.rates, words
        with on_device(self.device):
            self.launches[key][0]([x.data_ptr() for x in tensors], lambda: tensors, self.index)
        return words

    def read_with(self, padding: Tensor | None, words: Words | None, bias: Tensor | None) -> Tensors:
        """Returns the tensors that a kernel reads after q, k, v and a table; a missing mask is replaced by a tensor that is never read.

        Args:
            padding: packed for kernels over the table of queries, unpacked for the kernel over the table of keys.
            bias: slopes and places (``run.packed_bias``).
        """
        nothing = self.offsets
        drawn = words or (nothing, nothing, nothing)
        return nothing, nothing if padding is None else padding, *drawn, nothing if bias is None else bias

    @property
    def tables(self) -> Tables:
        """The tables of both passes, which are made once. The current device is theirs.

        If another stream made them, the current one waits for it, and their memory is marked as used by this stream.
        """
        if self._copied is None:
            self._tables = self._tables or self._make()
            return self._tables
        stream = torch._C._cuda_getCurrentRawStream(self.index)
        if self._tables is None:
            self._tables, self._stream = self._make(), stream
            self._copied.record(torch.cuda.current_stream(self.device))
        elif stream != self._stream and not torch.cuda.is_current_stream_capturing():
            # a graph cannot wait for events outside it; the call was run before its capture, and the tables made with it
            current = torch.cuda.current_stream(self.device)
            current.wait_event(self._copied)
            # one allocation holds all of it
            self._tables.space.memory.record_stream(current)
        return self._tables

    @property
    def starts(self) -> Tensor:
        """The documents' starts, then the last one's end, up to a power of two and one more, int32; of one document a 0.

        The documents from the longest to the shortest follow, for the order of tiles.
        """
        walk = self.call.walk
        if self._starts is None:
            if len(walk.documents) == 1:
                self._starts = _zero(self.device)
            else:
                starts = [start for start, _ in walk.documents]
                starts += [walk.documents[-1][1]] * (2**walk.steps + 1 - len(starts))
                starts += sorted(range(len(walk.documents)), key=lambda i: walk.documents[i][0] - walk.documents[i][1])
                # from pinned memory, so that nothing waits for the copy
                pinned = torch.tensor(starts, dtype=torch.int32, device="cpu", pin_memory=self.device.type == "cuda")
                self._starts = pinned.to(self.device, non_blocking=True)
        return self._starts

    def _make(self) -> Tables:
        walk, of_pattern = self.call.walk, (self.starts, self.lengths, self.rates)
        documents, branches, is_one = len(walk.documents), walk.num_branches, len(walk.documents) == 1
        num_rows = sum(self.num_tiles)
        # the spans; the tiles before each document; the rows
        space = Workspace(
            self.device, *((n, torch.int32) for n in (2 * documents * branches, 2 * branches * (documents + 1), 8 * num_rows))
        )
        ends = documents, walk.documents[-1][1], *walk.queries, walk.keys[1]
        sizes, order = {"BRANCHES": branches, "ONE": is_one}, 2**walk.steps + 1
        make_spans = KernelLaunch(
            spans_kernel, (branches, 2), (*ends, walk.direct, walk.key_direct, self.tile, order),
            {**sizes, "BLOCK": 1 if is_one else _DOCUMENTS}, dtypes=(),
        )  # fmt: skip
        make_rows = KernelLaunch(
            table_kernel, num_rows, (*ends, self.tile, order, self.num_tiles[0], walk.longest_document, walk.steps),
            {"BRANCHES": branches, "CAUSAL": self.call.right == 0, "ONE": is_one}, warps=1, dtypes=(),
        )  # fmt: skip
        spans, before, rows = space.pointers
        pointers = [spans, before, *(x.data_ptr() for x in of_pattern)]
        make_spans(pointers, lambda: (*space.tensors()[:2], *of_pattern), self.index)
        if num_rows:
            make_rows([rows, *pointers], lambda: (space.tensors()[2], *space.tensors()[:2], *of_pattern), self.index)
        return Tables(space, self.num_tiles)

    def tiles(self, elements: int, rows: int, heads: int) -> tuple[int, int]:
        """Returns (rows per program, programs) of a launch over all rows."""
        size = max(8, elements // self.columns)
        return size, -(-rows // size) * heads * self.batch


@functools.lru_cache(maxsize=8)
def _zero(device: torch.device) -> Tensor:
    return torch.zeros(1, dtype=torch.int32, device=device)


# both passes, and the layers of a model, share what is made for a length or for documents
@functools.lru_cache(maxsize=64)
def prepared(call: TileCall, batch: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> Prepared:
    """Returns a cached ``Prepared``."""
    return Prepared(call, batch, kv_heads, head_dim, dtype, device)
