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
from dilated_attention.backends.tiles.launch import NO_DEVICE, KernelLaunch, Scratch, workspace
from dilated_attention.backends.tiles.rows import PACKED_WORDS, pack_kernel, words_of
from dilated_attention.backends.tiles.table import MAX_PLACES, Extent, Walk, counts_of, head_blocks, share_keys
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
    """What the launches of both passes read of a walk, int32 on a device: spans, the table of queries and the table of keys, flat.

    spans: (documents, branches, 2): place of segment 0 of queries, and of keys. The tables: (tiles, 8). They are the same for all heads.

    Args:
        is_causal: tiles are in the order that suits causality.
        tile: positions of a tile.

    ``num_tiles``: of queries, and of keys. ``lengths``, ``rates``: of each branch. ``starts``, made by the first ``parts``: those of
    documents, then the last one's end, up to 2**walk.steps + 1 numbers, then the documents' indices, longest first; of one document a 0.
    """

    def __init__(self, walk: Walk, is_causal: bool, tile: int, device: torch.device) -> None:
        self.walk, self.is_causal, self.tile, self.device = walk, is_causal, tile, device
        self.num_tiles = counts_of(walk, False, tile).num_tiles, counts_of(walk, True, tile).num_tiles
        lengths, rates = zip(*walk.branches, strict=True)
        self.lengths, self.rates = int_tensors((tuple([min(w, 2**31 - 1) for w in lengths]), rates), device)
        self.index = index_of(device)
        self._made: tuple[Scratch, ...] = ()
        self._stream, self._copied = -1, torch.cuda.Event() if device.type == "cuda" else None

    def parts(self) -> tuple[Scratch, ...]:
        """Returns the spans and both tables, which the first call makes. The current device must be theirs.

        If another stream made them, the current one waits for it, and their memory is marked as used by this stream.

        Raises:
            RuntimeError: a CUDA graph captures the call, and it has not run before; or other calls have taken its tables' place since.
        """
        if self._copied is not None and (stream := torch._C._cuda_getCurrentRawStream(self.index)) != self._stream:
            is_captured, current = torch.cuda.is_current_stream_capturing(), torch.cuda.current_stream(self.device)
            if not self._made and is_captured:
                # tables made by its replays would be read by other calls before them
                raise RuntimeError(
                    "a CUDA graph captures a call that has not run before, or not lately: run it once right before the capture"
                )
            if not self._made:
                self._made, self._stream = self._make(), stream
                self._copied.record(current)
            elif not is_captured:
                # a graph cannot wait for events outside it
                current.wait_event(self._copied)
                for made in (self._made[0].memory, self.starts):
                    made.record_stream(current)
        elif not self._made:
            self._made = self._make()
        return self._made

    @property
    def of_pattern(self) -> Tensors:
        """What the launch that combines branches reads in addition."""
        return self.starts, self.lengths, self.rates

    def _make(self) -> tuple[Scratch, ...]:
        walk = self.walk
        # on the stream of the kernels that read them
        self.starts = _starts_of(walk, self.device)
        documents, branches, num_rows = len(walk.documents), walk.num_branches, sum(self.num_tiles)
        # the spans; the tiles before each document; the rows
        sizes = 2 * documents * branches, 2 * branches * (documents + 1), 8 * num_rows
        spans, before, rows = workspace(self.device, *((size, torch.int32) for size in sizes))
        ranges, is_one = (documents, walk.documents[-1][1], *walk.queries, walk.keys[1]), documents == 1
        # where the order of the documents begins in ``starts``
        order = 2**walk.steps + 1
        make_spans = KernelLaunch(
            spans_kernel, (branches, 2), (*ranges, walk.direct, walk.key_direct, self.tile, order),
            {"BRANCHES": branches, "ONE": is_one, "BLOCK": 1 if is_one else _DOCUMENTS}, dtypes=(),
        )  # fmt: skip
        make_rows = KernelLaunch(
            table_kernel, num_rows, (*ranges, self.tile, order, self.num_tiles[0], walk.longest_document, walk.steps),
            {"BRANCHES": branches, "CAUSAL": self.is_causal, "ONE": is_one}, warps=1, dtypes=(),
        )  # fmt: skip
        make_spans([spans, before, *self.of_pattern], self.index)
        if num_rows:
            make_rows([rows, spans, before, *self.of_pattern], self.index)
        return spans, rows, rows.after(8 * self.num_tiles[0])


def _starts_of(walk: Walk, device: torch.device) -> Tensor:
    if len(walk.documents) == 1:
        return int_tensors(((0,),), device)[0]
    starts = [start for start, _ in walk.documents]
    starts += [walk.documents[-1][1]] * (2**walk.steps + 1 - len(starts))
    starts += sorted(range(len(walk.documents)), key=lambda i: walk.documents[i][0] - walk.documents[i][1])
    # from pinned memory, so that nothing waits for the copy
    pinned = torch.tensor(starts, dtype=torch.int32, device="cpu", pin_memory=device.type == "cuda")
    return pinned.to(device, non_blocking=True)


# kept longer than tables, since lengths of segments, rates and offsets do not depend on the length of the sequence
@functools.lru_cache(maxsize=128)
def int_tensors(numbers: tuple[Any, ...], device: torch.device) -> tuple[Tensor, ...]:
    """Returns int32 tensors of these numbers."""
    return tuple([torch.tensor(x, dtype=torch.int32, device=device) for x in numbers])


def index_of(device: torch.device) -> int:
    return NO_DEVICE if device.type == "meta" else device.index or 0


# what is made for a length or for documents serves both passes, all layers of a model, and heads that run in turn
tables_of = functools.lru_cache(maxsize=32)(Tables)


class Prepared:
    """What all launches of a call on one device share: tables, offsets, constants and grids. It is built once.

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
        extent = self.extent = Extent.of(walk, self.shared, batch, self.num_heads, kv_heads, head_dim)
        # numbers of places: part rows, which the merge and the sum read, and δ's, of all branches
        self.part_rows, self.delta_rows, self.key_part_rows = extent.part_rows, extent.delta_rows, extent.key_part_rows
        self.key_heads, self.longest = extent.key_heads, walk.longest
        if (most := max([counts_of(walk, of_keys).all_places for of_keys in (False, True)])) > MAX_PLACES:
            raise ValueError(
                f'branches take {most:,} positions per head; tiles can count up to {MAX_PLACES:,}: use backend="auto", or shorter sequences'
            )
        self.tables, (self.offsets,) = tables_of(walk, call.right == 0, walk.tile, device), int_tensors((call.offsets,), device)
        D0, D1 = head_blocks(head_dim)
        self.bounds = (call.left or 0, call.right or 0)
        self.constants: dict[str, Any] = {
            "D": head_dim, "D0": D0, "D1": D1, "LEFT": call.left is not None, "RIGHT": call.right is not None, "CUT": walk.is_cut,
            "PRECISION": call.precision,
        }  # fmt: skip
        # words per branch in a packed mask
        self.words = max([words_of(rate, self.num_keys) for _, rate in walk.branches])
        self.columns = 1 << (head_dim - 1).bit_length()
        self.index = index_of(device)
        self.launches: dict[Hashable, tuple[KernelLaunch, ...]] = {}

    def packed(self, padding: Tensor | None) -> Tensor | None:
        """Returns the packed mask (B, branches, words) int32 that kernels over the table of queries read: see ``rows.py``."""
        if padding is None:
            return None
        branches = self.call.walk.num_branches
        words = torch.empty((self.batch, branches, self.words), dtype=torch.int32, device=self.device)
        key = "pack", padding.stride(0)
        if key not in self.launches:
            blocks = -(-self.words // PACKED_WORDS)
            numbers = padding.stride(0), branches, self.num_keys, self.words, blocks
            self.launches[key] = (KernelLaunch(pack_kernel, blocks * branches * self.batch, numbers, {"WORDS": PACKED_WORDS}, dtypes=()),)
        with on_device(self.device):
            self.launches[key][0]([padding, self.tables.rates, words], self.index)
        return words

    def read_with(self, padding: Tensor | None, words: Words | None, bias: Tensor | None) -> Tensors:
        """Returns (offsets, padding, a, c, b, bias), which a kernel takes last; for a missing one it takes a tensor that it never reads.

        Args:
            padding: packed for kernels over the table of queries, unpacked for the kernel over the table of keys.
            bias: slopes and places (``run.packed_bias``).
        """
        unread = self.offsets
        drawn = words or (unread, unread, unread)
        return self.offsets, unread if padding is None else padding, *drawn, unread if bias is None else bias


prepared = functools.lru_cache(maxsize=64)(Prepared)
