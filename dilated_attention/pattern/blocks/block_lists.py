"""Lists of key blocks, in the form that block-sparse kernels read.

The sequence is split into query blocks of ``q_block`` and key blocks of ``k_block`` positions. Each query block keeps some key blocks
whole and some under a mask of single pairs. The lists are in CSR form: a group's row holds ``columns[row_starts[i] : row_starts[i + 1]]``,
ascending, with i = group · num_rows + row. A *group* is a (batch entry, head) with its own lists; one list may serve all.

Memory: 4 bytes per row, 4 (8 with masks) per kept block, and q_block · k_block / 8 bytes per *distinct* mask of pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from dilated_attention.pattern.blocks.base import divided

T = TypeVar("T")
WORD = 32
# the block sizes that lists may have: (query block, key block)
BLOCK_SIZES = frozenset((q, k) for q in (64, 128) for k in (64, 128))


@dataclass(frozen=True, eq=False)
class BlockLists:
    """Which key blocks every query block keeps; m = 1 on the kept pairs.

    Args:
        num_queries, num_keys: positions; the last block of each may be shorter.
        num_batch, num_heads: 1 where all batch entries (heads) share one list, else their number; their product is the number of groups.
        row_starts: (num_batch · num_heads · num_rows + 1,) int32.
        columns: (entries,) int32 key blocks, ascending in each row.
        masks: (entries,) int32, −1 where every pair of the block is kept, else the index of its mask in ``bits``; None if all are −1.
        bits: (distinct masks, q_block, k_block / 32) int32: bit n % 32 of word n // 32 of row m is set where query m of the block keeps
            key n. Pairs beyond the end of the sequence may have any bit: kernels check the end themselves. Empty if ``masks`` is None.
        interval: (low, high), each (num_queries,) int32, if all masks have the form low[i] ≤ j < high[i] for key position j, which some
            kernels accept instead of bits; else None.
    """

    num_queries: int
    num_keys: int
    q_block: int
    k_block: int
    num_batch: int
    num_heads: int
    row_starts: Tensor
    columns: Tensor
    masks: Tensor | None
    bits: Tensor
    interval: tuple[Tensor, Tensor] | None = None
    # what backends derive from the lists once, in their own form; under "source" the lists that these have their blocks from: those that
    # were built on the host, or of a sequence that fills its last block
    cache: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)

    @cached_property
    def num_rows(self) -> int:
        return -(-self.num_queries // self.q_block)

    @cached_property
    def num_columns(self) -> int:
        return -(-self.num_keys // self.k_block)

    @cached_property
    def num_groups(self) -> int:
        return self.num_batch * self.num_heads

    @cached_property
    def num_entries(self) -> int:
        return self.columns.shape[0]

    def derived(self, key: Hashable, make: Callable[[BlockLists], T], *, by_length: bool = False) -> T:
        """Returns what ``make`` returns for these lists, which is called once: for their source if they have one, unless it depends on the
        numbers of positions (``by_length``)."""
        if key not in self.cache:
            source = None if by_length else self.cache.get("source")
            self.cache[key] = make(self) if source is None else moved(source.derived(key, make), self.row_starts.device)
        found: T = self.cache[key]
        return found

    def of_length(self, num_queries: int, num_keys: int) -> BlockLists:
        """Returns these lists for fewer positions in as many blocks. Blocks may be listed of which no pair is left."""
        interval = None if self.interval is None else (self.interval[0][:num_queries], self.interval[1][:num_queries].clamp(max=num_keys))
        shorter = replace(self, num_queries=num_queries, num_keys=num_keys, interval=interval)
        shorter.cache["source"] = self
        return shorter

    def on(self, device: torch.device) -> BlockLists:
        """Returns these lists of the host on a GPU, without waiting for it."""
        names = ("row_starts", "columns", "masks", "bits", "interval")
        there = replace(self, **dict(zip(names, moved(tuple(getattr(self, name) for name in names), device), strict=True)))
        there.cache["source"] = self
        return there

    @property
    def mask_kind(self) -> str:
        """``"none"`` · ``"interval"`` · ``"bits"``: the simplest form of masks that a kernel must support."""
        if self.masks is None:
            return "none"
        return "interval" if self.interval is not None else "bits"

    @cached_property
    def nbytes(self) -> int:
        tensors = [self.row_starts, self.columns, self.bits, *(() if self.masks is None else (self.masks,)), *(self.interval or ())]
        return sum(x.numel() * x.element_size() for x in tensors)

    @cached_property
    def fills_every_row(self) -> bool:
        """Whether every query certainly keeps a key. Waits for the GPU once."""
        source: BlockLists | None = self.cache.get("source")
        return source.fills_every_row if source is not None else self.masks is None and bool((self.row_starts.diff() > 0).all())

    @cached_property
    @torch.inference_mode(False)
    def row_of_entry(self) -> Tensor:
        """The index group · num_rows + row of each entry, (entries,) int64."""
        counts = self.row_starts.diff().long()
        rows = torch.arange(counts.shape[0], device=counts.device)
        return torch.repeat_interleave(rows, counts, output_size=self.num_entries)

    @property
    def by_column(self) -> ColumnLists:
        """The same entries by key block, for the gradients of k and v."""
        return self.derived("by_column", _by_column)


class ColumnLists(NamedTuple):
    """Query blocks of every key block: rows ``rows[starts[i] : starts[i + 1]]``, ascending, i = group · num_columns + column."""

    starts: Tensor
    rows: Tensor
    masks: Tensor | None


@torch.inference_mode(False)
def _by_column(lists: BlockLists) -> ColumnLists:
    group, row = divided(lists.row_of_entry.to(torch.int32), max(lists.num_rows, 1))
    column, count = group * lists.num_columns + lists.columns, lists.num_groups * lists.num_columns
    ordered, order = column.sort(stable=True)
    starts = torch.searchsorted(ordered, torch.arange(count + 1, dtype=torch.int32, device=column.device), out_int32=True)
    return ColumnLists(starts, row[order], None if lists.masks is None else lists.masks[order])


def moved(x: Any, device: torch.device) -> Any:
    """Returns int32 tensors of the host, in tuples, on a GPU: in one copy, from pinned memory, so that nothing waits for it."""
    leaves, form = tree_flatten(x, is_leaf=lambda part: not isinstance(part, tuple))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if not tensors:
        return x
    if tensors[0].device == device:
        return x
    assert all(tensor.dtype is torch.int32 for tensor in tensors)
    # kernels are compiled for pointers that are multiples of 16
    buffer = torch.cat([torch.nn.functional.pad(tensor.flatten(), (0, -tensor.numel() % WORD)) for tensor in tensors])
    buffer = (buffer.pin_memory() if device.type == "cuda" else buffer).to(device, non_blocking=True)
    parts = iter(buffer.split([-(-tensor.numel() // WORD) * WORD for tensor in tensors]))
    there = [next(parts)[: leaf.numel()].view(leaf.shape) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return tree_unflatten(there, form)


def checked_total(total: int) -> int:
    """Returns ``total`` entries if kernels can count them (in 32 bits, in quarters of a block); raises otherwise."""
    if total >= 2**29:
        raise ValueError(
            f"{total} kept blocks over all batch entries and heads; lists count to 2**29 − 1: "
            "keep less, use larger blocks, or give one list to all heads"
        )
    return total
