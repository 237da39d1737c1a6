"""The cached keys that a row of attention reads, as a few runs of evenly spaced keys, computed on the device from the row's position alone.

A branch of a dilated pattern, a window, dense attention and a kept block are each one run: keys first, first + stride, … up to some count.
A key in several runs counts once for each, like the multiplicity m of docs/meaning.md. Tables have static shapes, so a captured
CUDA graph can be replayed with the positions in a device tensor. Only block patterns look up their block row on the host, once every
``q_block`` steps.

Shape letters: B requests, H query heads, K key/value heads, G groups of heads that read the same keys (1, K or H), R runs, S keys of a run.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dilated_attention.pattern import NOT_IN_BRANCH, BlockPattern, DilatedPattern, GlobalLocal
from dilated_attention.pattern.checks import as_int, shown

# [low, high) of positions
Stretches = tuple[tuple[int, int], ...]


@dataclass(frozen=True, eq=False)
class Runs:
    """The keys of one row of each request and head.

    Args:
        first: (B, G, R) int32, the first key of each run; arbitrary if the run is empty.
        ends: (B, G, R) int32, cumulative number of keys up to and including each run: run i holds ends[i] − ends[i − 1] keys.
        stride: (R,) int32, distance between consecutive keys of a run.
        max_keys: upper bound of the number of keys of a row, at any position.
        kept: (B, G, R, S) bool: whether key i of run j is used; None if all are.
        dense: (B,) int32: set if each row reads exactly the first ``dense`` positions; None for other sets of keys.
    """

    first: Tensor
    ends: Tensor
    stride: Tensor
    max_keys: int
    kept: Tensor | None = None
    dense: Tensor | None = None

    @classmethod
    def of(cls, first: Tensor, count: Tensor, stride: Tensor, max_keys: int, **more: Tensor | None) -> Runs:
        ends = count.clamp(min=0).cumsum(-1, dtype=torch.int32)
        return cls(first.to(torch.int32).contiguous(), ends.contiguous(), stride, max_keys, **more)

    @property
    def num_groups(self) -> int:
        return self.first.shape[1]

    def keys(self, is_captured: bool = False) -> tuple[Tensor, Tensor]:
        """Returns (positions (B, G, L) int64, bool mask of those that are used), where L is the most keys of any of these rows.

        On devices other than the CPU, this synchronizes with the host; with ``is_captured``, L is ``max_keys`` instead, since a graph is
        replayed for rows of more keys.
        """
        length = self.max_keys
        if not is_captured:
            length = int(self.ends[..., -1].max()) if self.ends.numel() else 0
        index = torch.arange(length, dtype=torch.int32, device=self.first.device).expand(*self.first.shape[:2], length).contiguous()
        inside = index < self.ends[..., -1:]
        run = torch.searchsorted(self.ends.contiguous(), index, right=True).clamp(max=self.first.shape[2] - 1)
        begins = torch.cat([torch.zeros_like(self.ends[..., :1]), self.ends[..., :-1]], -1)
        of_run = index - begins.gather(-1, run)
        positions = self.first.gather(-1, run) + of_run * self.stride[run]
        if self.kept is not None:
            size = self.kept.shape[-1]
            inside = inside & self.kept.flatten(2).gather(-1, run * size + of_run.clamp(0, size - 1))
        return torch.where(inside, positions, 0).long(), inside


class RowKeys(ABC):
    """Computes which keys a row reads, for sequences of up to ``max_length`` positions.

    Args:
        num_groups: G of its tables.
        max_keys: upper bound of the number of keys that a row reads.
        span: rows read only the last ``span`` positions up to their own; ``max_length`` if nothing smaller is known.
        num_needed: upper bound of the number of positions that ``needed`` returns, including the row's own.
        fixed: number of first positions that rows read wherever they are.
        closes_up: rows read the same keys if the stretches of ``needed`` are moved next to each other, followed by their own positions.
        generation: generation of the tables that ``runs`` reads. The next generation has other tensors, so graphs captured before it
            are invalid.
    """

    num_groups: int
    max_keys: int
    span: int

    fixed: int = 0
    generation: int = 0
    closes_up: bool = False

    @property
    def num_needed(self) -> int:
        return self.span

    def __init__(self, max_length: int, device: torch.device) -> None:
        self.max_length = as_int("max_length", max_length, minimum=1)
        self.device = device

    @abstractmethod
    def runs(self, positions: Tensor) -> Runs:
        """Returns the runs of rows at ``positions`` (B,) int64, computed elementwise on the device."""

    def prepare(self, positions: Sequence[int]) -> int:
        """Looks up what rows at these positions need and returns the generation of the tables that hold it."""
        return self.generation

    def needed(self, position: int) -> Stretches:
        """Returns stretches [low, high) of positions before ``position`` that it or later rows may read. All others can be evicted."""
        return ((max(0, position - self.span + 1), position),)

    def align(self, position: int) -> int:
        """Returns the last position ≤ ``position`` at which numbering may restart from 0 without changing what later rows read."""
        return 0

    def before(self, position: int) -> tuple[Stretches, list[int], int]:
        """Returns what several rows from ``position`` on find before their own keys: (stretches of ``needed``, where each begins, length).

        The length counts keys that no row needs as well, where the pattern is only the same with them in between.
        """
        needed = self.needed(position)
        if self.closes_up:
            places = [0, *itertools.accumulate(high - low for low, high in needed)]
            return needed, places[:-1], places[-1]
        origin = min([self.align(position), *(low for low, _ in needed)])
        return needed, [low - origin for low, _ in needed], position - origin


class DilatedKeys(RowKeys):
    """Each branch (w, r) is one run: the keys ≡ o_h (mod r) of the row's segment up to the row, if the row itself is one of them."""

    def __init__(self, pattern: DilatedPattern, num_heads: int, num_kv_heads: int, max_length: int, device: torch.device) -> None:
        super().__init__(max_length, device)
        branches = [(min(w, max_length), r) for w, r in pattern.branches]
        offsets = torch.tensor(pattern.offsets(num_heads), dtype=torch.int64, device="cpu").T
        # heads that share a key/value head form one group if they read the same keys
        of_kv = offsets.view(num_kv_heads, num_heads // num_kv_heads, -1)
        if bool((offsets == offsets[0]).all()):
            offsets = offsets[:1]
        elif bool((of_kv == of_kv[:, :1]).all()):
            offsets = of_kv[:, 0]
        self.pattern = pattern
        self.num_groups = offsets.shape[0]
        self.max_keys = sum(-(-w // r) for w, r in branches)
        self.span = max(w for w, _ in branches)
        self._offsets = offsets.to(device)
        self._lengths = torch.tensor([w for w, _ in branches], device=device)
        self._rates = torch.tensor([r for _, r in branches], device=device)
        self._stride = self._rates.to(torch.int32)

    def runs(self, positions: Tensor) -> Runs:
        at = positions[:, None, None]
        inside = at % self._lengths
        # never negative where the branch takes the row, since offsets are below the rate
        index = (inside - self._offsets) // self._rates
        taken = (self._offsets != NOT_IN_BRANCH) & (index * self._rates == inside - self._offsets)
        return Runs.of(at - inside + self._offsets, torch.where(taken, index + 1, 0), self._stride, self.max_keys)

    def needed(self, position: int) -> Stretches:
        return ((min(position // w * w for w in self.pattern.segment_lengths), position),)

    def align(self, position: int) -> int:
        whole = math.lcm(*self.pattern.segment_lengths)
        return position // whole * whole


class WindowKeys(RowKeys):
    """The row's own key and the ``left`` keys before it, in one run. With ``left`` None it is dense attention: all keys before the row.

    The window moves with its row, while ``first_keys`` are always the first positions.

    Args:
        first_keys: number of first positions that rows read in addition (global tokens), in a separate run.
    """

    closes_up = True

    def __init__(self, left: int | None, max_length: int, device: torch.device, *, first_keys: int = 0) -> None:
        super().__init__(max_length, device)
        self.left = max_length - 1 if left is None else min(left, max_length - 1)
        self.first_keys = self.fixed = min(first_keys, max_length)
        self.num_groups = 1
        self.max_keys = min(self.left + 1 + self.first_keys, max_length)
        self.span = self.left + 1 if not self.first_keys else max_length
        self._stride = torch.ones(2 if self.first_keys else 1, dtype=torch.int32, device=device)

    @property
    def num_needed(self) -> int:
        return self.max_keys

    def runs(self, positions: Tensor) -> Runs:
        low = (positions - self.left).clamp(min=self.first_keys)
        near = positions + 1 - low
        if self.first_keys:
            globals_ = (positions + 1).clamp(max=self.first_keys)
            first, count = torch.stack([torch.zeros_like(low), low], -1), torch.stack([globals_, near], -1)
            return Runs.of(first[:, None], count[:, None], self._stride, self.max_keys)
        dense = (positions + 1).to(torch.int32) if self.left + 1 == self.max_length else None
        return Runs.of(low[:, None, None], near[:, None, None], self._stride, self.max_keys, dense=dense)

    def needed(self, position: int) -> Stretches:
        low = max(0, position - self.left)
        if low <= self.first_keys:
            return ((0, position),)
        return ((0, self.first_keys), (low, position)) if self.first_keys else ((low, position),)


class BlockKeys(RowKeys):
    """The kept blocks of the row's query block, one run each, masked by what the pattern keeps for this row.

    Args:
        pattern: must be prefix-stable, so that the pattern of ``max_length`` positions is also that of every shorter sequence.
    """

    def __init__(self, pattern: BlockPattern, num_heads: int, max_length: int, device: torch.device) -> None:
        super().__init__(max_length, device)
        pattern.check(max_length, num_heads)
        self.pattern = pattern.at(max_length).causal()
        self.num_groups = num_heads if self.pattern.per_head else 1
        self.span = max_length
        self.max_keys = max_length
        self._heads = torch.arange(self.num_groups, device=device)[None, :, None, None]
        self._in_block = torch.arange(pattern.k_block, device=device)
        self._rows: list[int] = []
        self._columns = torch.zeros(0, self.num_groups, 1, dtype=torch.int64, device=device)
        self._stride = torch.ones(1, dtype=torch.int32, device=device)

    def prepare(self, positions: Sequence[int]) -> int:
        self.pattern.check_batch(len(positions))
        rows = [position // self.pattern.q_block for position in positions]
        if rows == self._rows:
            return self.generation
        listed = {row: self._columns_of(row) for row in set(rows)}
        width = max(x.shape[1] for x in listed.values())
        if self._columns.shape[0] != len(rows) or width > self._columns.shape[2]:
            # with spare capacity, since every growth invalidates captured graphs
            wide = min(2 ** math.ceil(math.log2(width)), -(-self.max_length // self.pattern.k_block))
            columns = torch.full((len(rows), self.num_groups, max(wide, width)), -1, device=self.device)
            stride = torch.ones(columns.shape[2], dtype=torch.int32, device=self.device)
            self._rows = [-1] * len(rows)
            self._columns, self._stride = columns, stride
            self.generation += 1
        for request, row in enumerate(rows):
            if self._rows[request] != row:
                columns = listed[row]
                # invalid while it is written: after an error in between, the columns must not be taken for those of another row
                self._rows[request] = -1
                self._columns[request, :, : columns.shape[1]] = columns
                self._columns[request, :, columns.shape[1] :] = -1
                self._rows[request] = row
        return self.generation

    def _columns_of(self, row: int) -> Tensor:
        """Returns (G, width), the kept columns of a row of blocks, with −1 after the last."""
        grid = self.pattern.grid(self.max_length, (row, row + 1), self.device)
        (group, _, column), *_ = self.pattern.entries(grid, tuple(range(self.num_groups)))
        counts = torch.bincount(group, minlength=self.num_groups)
        starts = counts.cumsum(0) - counts
        place = torch.arange(len(group), device=self.device) - starts[group]
        columns = torch.full((self.num_groups, max(1, int(counts.max()))), -1, device=self.device)
        columns[group, place] = column
        return columns

    def runs(self, positions: Tensor) -> Runs:
        assert len(self._rows) == positions.shape[0], "prepare() first"
        size = self.pattern.k_block
        at = positions[:, None, None]
        first = self._columns * size
        interval = self.pattern.interval(positions, self.max_length)
        low, high = (torch.zeros_like(at), at + 1) if interval is None else (x[:, None, None] for x in interval)
        start = torch.maximum(first, low)
        # the pattern is causal, so that no interval goes beyond the row
        count = torch.where(self._columns < 0, 0, torch.minimum(first + size, high) - start)
        kept = None
        if interval is None:
            kept = self.pattern.allowed(at[..., None], (first[..., None] + self._in_block).clamp(min=0), self._heads, self.max_length)
            kept = kept.expand(*first.shape, size).contiguous()
        most = min(self.max_length, first.shape[2] * size)
        return Runs.of(start.clamp(min=0), count, self._stride, most, kept=kept)


def row_keys(
    pattern: DilatedPattern | BlockPattern | None, num_heads: int, num_kv_heads: int, max_length: int, device: torch.device | str, *,
    window: int | None = None,
) -> RowKeys:  # fmt: skip
    """Returns the keys that rows of a causal pattern read. None is dense attention, or with ``window`` over that many keys before each row.

    Raises:
        ValueError: a block pattern's rows depend on what follows them, so that a cache of keys cannot reproduce the forward's result.
    """
    device = torch.device(device)
    if pattern is None:
        return WindowKeys(window, max_length, device)
    assert window is None
    if isinstance(pattern, DilatedPattern):
        if pattern.branches[0][0] >= max_length and pattern.dilation_rates == (1,):
            return WindowKeys(None, max_length, device)
        return DilatedKeys(pattern, num_heads, num_kv_heads, max_length, device)
    if not isinstance(pattern, BlockPattern):
        raise TypeError(
            f"pattern is {shown(pattern)} ({type(pattern).__name__}); expected a DilatedPattern, a block pattern, or None for dense"
        )
    if not pattern.is_prefix_stable:
        raise ValueError(
            f"pattern is {shown(pattern)}, in which the keys of a position depend on the length of the sequence "
            "(or may depend on it): decoded tokens would differ from the forward's. "
            "Use one whose is_prefix_stable is True, such as LocalWindow, GlobalLocal or Strided with square blocks"
        )
    if pattern.dense_window is not None:
        return WindowKeys(pattern.dense_window[0], max_length, device)
    if type(pattern) is GlobalLocal:
        return WindowKeys(pattern.window[0], max_length, device, first_keys=pattern.global_tokens)  # type: ignore[index]
    return BlockKeys(pattern, num_heads, max_length, device)


@dataclass(frozen=True, eq=False)
class Cached:
    """The cached keys and values of one layer.

    Position p of request b is stored at slot p mod capacity of the request's stretch of the cache. In a paged cache, it is at slot
    p mod page_size of page ``table[b, p // page_size]``. A stretch may keep its first slots permanently, as global tokens need, and use
    the rest as a ring buffer. C: slots of a stretch or a page.

    Args:
        k, v: (B, C, K, D), or with a table (pages, C, K, D); any strides, the last one 1.
        table: (B, pages of a request) int32; None if each request has one stretch, in which positions wrap around.
        wraps: whether positions reach C, so that slots are reused. Only without a table.
        fixed: number of first positions whose slots are never reused.
    """

    k: Tensor
    v: Tensor
    table: Tensor | None = None
    wraps: bool = False
    fixed: int = 0

    @property
    def slots(self) -> int:
        return self.k.shape[1]

    def places(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (first index, second index) into k and v for positions (B, …) int64."""
        batch = torch.arange(positions.shape[0], device=positions.device).view(-1, *(1,) * (positions.ndim - 1))
        if self.table is not None:
            return self.table[batch, positions // self.slots].long(), positions % self.slots
        slot = positions
        if self.wraps:
            slot = torch.where(positions < self.fixed, positions, self.fixed + (positions - self.fixed) % (self.slots - self.fixed))
        return batch.expand_as(slot), slot

    def write(self, positions: Tensor, k: Tensor, v: Tensor) -> None:
        """Stores k, v (B, n, K, D) at positions (B, n)."""
        at = self.places(positions)
        self.k[at], self.v[at] = k, v

    def read(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Returns copies (B, n, K, D) of the keys and values at positions (B, n)."""
        at = self.places(positions)
        return self.k[at], self.v[at]
