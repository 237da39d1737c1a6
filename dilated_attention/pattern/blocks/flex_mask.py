"""Patterns in FlexAttention's form: from and to its BlockMask (``from_block_mask``, ``to_block_mask``), and defined by a function of single
pairs (``MaskFunction``)."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from dilated_attention.pattern.blocks.base import BlockPattern, Grid, MaskMod
from dilated_attention.pattern.blocks.block_lists import BlockLists, kept_blocks
from dilated_attention.pattern.blocks.whole_blocks import BlockTensor
from dilated_attention.pattern.checks import BLOCK_SIZES, check_bool, shown
from dilated_attention.pattern.reads import reads_of


def from_block_mask(block_mask: BlockMask, *, batch: int | None = None) -> BlockPattern:
    """Returns the pattern that a BlockMask describes: its full blocks entirely, and its other blocks masked by its ``mask_mod``.

    Args:
        block_mask: must be for a single sequence with as many queries as keys, and with block sizes that are multiples of 64. Larger
            blocks are cut into blocks of 128 or 64. It may have one list for all heads and a ``mask_mod`` that reads the head: if the list
            is that of head 0, as ``create_block_mask(mask_mod, None, None, …)`` makes it, ``mask_mod`` alone says what every head keeps;
            any other list holds for all heads. Tensors that ``mask_mod`` reads must not change afterwards, nor, on a GPU, the BlockMask's
            tables where torch does not see it (``.data``, dlpack).
        batch: index of the batch entry, which the pattern then keeps for a whole batch; may be omitted if there is only one. If
            ``mask_mod`` then reads the batch entry, attention takes one entry only.

    Raises:
        ValueError: no pattern describes the BlockMask.
    """
    if not isinstance(block_mask, BlockMask):
        raise TypeError(f"block_mask is {shown(block_mask)} ({type(block_mask).__name__}); expected a BlockMask of flex_attention")
    num_queries, num_keys = block_mask.seq_lengths
    if num_queries != num_keys:
        raise ValueError(
            f"block_mask has {num_queries} queries and {num_keys} keys; expected one sequence: make it with Q_LEN = KV_LEN, "
            "and pass the queries' first position as query_offset"
        )
    sizes = tuple(int(size) for size in block_mask.BLOCK_SIZE)
    if any(size % BLOCK_SIZES[0] for size in sizes):
        raise ValueError(f"block_mask has BLOCK_SIZE {sizes}; expected multiples of {BLOCK_SIZES[0]}: make it with BLOCK_SIZE=128")
    _check_whole(block_mask, -(-num_queries // sizes[0]), -(-num_keys // sizes[1]))
    entries = block_mask.kv_num_blocks.shape[0]
    if batch is None and entries > 1:
        raise ValueError(
            f"block_mask has {entries} batch entries and a pattern holds for the whole batch; choose one: from_block_mask(…, batch=0)"
        )
    chosen = 0 if batch is None else batch
    if not 0 <= chosen < entries:
        raise ValueError(f"batch is {batch}; block_mask has {entries} batch entries: expected 0 to {entries - 1}")
    q_block, k_block = (next(block for block in reversed(BLOCK_SIZES) if size % block == 0) for size in sizes)

    def table(counts: Tensor, indices: Tensor) -> BlockTensor:
        counts, indices, columns = counts[chosen], indices[chosen].long(), -(-num_keys // sizes[1])
        kept = indices.new_zeros((*indices.shape[:-1], columns + 1), dtype=torch.bool)
        kept = kept.scatter_(-1, torch.where(_is_listed(counts, indices), indices, columns), True)[..., :columns]
        kept = kept.repeat_interleave(sizes[0] // q_block, 1).repeat_interleave(sizes[1] // k_block, 2)
        return BlockTensor(kept[:, : -(-num_queries // q_block), : -(-num_keys // k_block)], block_size=(q_block, k_block))

    mask_mod: MaskMod = block_mask.mask_mod
    if batch is not None:
        # patterns have no batch dimension and call their functions with entry 0
        def mask_mod(batch: Tensor, head: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return block_mask.mask_mod(torch.full_like(batch, chosen), head, q_idx, kv_idx)

    masked = MaskFunction(mask_mod, block_size=(q_block, k_block))
    partial, full = table(block_mask.kv_num_blocks, block_mask.kv_indices), None
    if block_mask.full_kv_num_blocks is not None:
        assert block_mask.full_kv_indices is not None
        full = table(block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
    if masked.per_head and not partial.per_head and _are_of_head_0(masked, partial, full, num_keys, sizes):
        # the table lists every block, so mask_mod alone decides; it is kept because it fixes the number of positions
        partial, full = replace(partial, mask=torch.ones_like(partial.mask)), None
    pattern = partial & masked
    return pattern if full is None else full | pattern


def _check_whole(block_mask: BlockMask, rows: int, columns: int) -> None:
    """Refuses a BlockMask whose lists are not those of its whole sequence, such as a slice of one."""
    shape = tuple(block_mask.kv_num_blocks.shape)
    # recognised by the name of torch's function, which no version promises to keep
    is_slice = getattr(block_mask.mask_mod, "__name__", "") == "_sliced_mask_mod_error"
    if is_slice or len(shape) != 3 or shape[2] != rows:
        raise ValueError(
            f"block_mask lists blocks for {shape} (batch entries, heads, rows of queries) and its {block_mask.seq_lengths[0]} queries have "
            f"{rows} rows: it is a slice of a BlockMask, such as mask[:, :, 0], {'without mask_mod' if is_slice else 'without some rows'}; "
            "convert the whole one, as a slice does not say which rows it has: from_block_mask(mask, batch=0) takes one batch entry; the "
            f"queries of mask[:, :, i] are query_offset=i * {block_mask.BLOCK_SIZE[0]} of the attention call, with as many rows in q; for "
            "some heads make a BlockMask of these"
        )
    for counts, indices in ((block_mask.kv_num_blocks, block_mask.kv_indices), (block_mask.full_kv_num_blocks, block_mask.full_kv_indices)):
        listed = torch.zeros(0) if counts is None or indices is None else indices[_is_listed(counts, indices)]
        if bool(((listed < 0) | (listed >= columns)).any()):
            raise ValueError(
                f"block_mask lists blocks of keys up to {int(listed.max())} and its {block_mask.seq_lengths[1]} keys have "
                f"{columns}, numbered from 0; expected indices of these: check BLOCK_SIZE and seq_lengths"
            )


def _is_listed(counts: Tensor, indices: Tensor) -> Tensor:
    """Returns which entries of ``indices`` are in the lists: a list has the first ``counts`` of its row, the others may be anything."""
    return torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]


def _are_of_head_0(
    masked: MaskFunction, partial: BlockTensor, full: BlockTensor | None, num_positions: int, sizes: tuple[int, ...]
) -> bool:
    """Whether the lists are those of head 0: they have just the blocks of which ``masked`` keeps a pair for head 0, and as full ones only
    blocks that it keeps whole."""
    grid = masked.grid(num_positions, device=partial.mask.device)
    (_, row, column), is_full, _ = replace(masked, per_head=False).entries(grid, (0,))
    # the blocks of which it keeps some pair, and those of which it keeps every pair
    kept, whole = partial.mask.new_zeros((2, *partial.mask.shape[1:]))
    kept[row, column] = True
    whole[row, column] = is_full
    # a large block is listed where any block that it was cut into keeps a pair
    for dim, (size, block) in enumerate(zip(sizes, (masked.q_block, masked.k_block), strict=True)):
        parts = kept.split(size // block, dim)
        kept = torch.cat([part.any(dim, keepdim=True).expand_as(part) for part in parts], dim)
    if full is None:
        return torch.equal(kept, partial.mask[0])
    return torch.equal(kept, partial.mask[0] | full.mask[0]) and not bool((full.mask[0] & ~whole).any())


def to_block_mask(
    pattern: BlockPattern, num_positions: int, num_heads: int, *, device: torch.device | str = "cpu", is_causal: bool = False
) -> BlockMask:
    """Returns the BlockMask of a pattern, (1, 1 or num_heads, N, N), with the lists of rows and of columns.

    Its int32 index tables are as wide as the longest list: narrow for windows, of full width if one row keeps everything. On the CPU,
    FlexAttention takes the width as the number of key blocks, so there the tables of rows always have full width.
    """
    if not isinstance(pattern, BlockPattern):
        raise TypeError(f"pattern is {shown(pattern)} ({type(pattern).__name__}); expected a block pattern such as LocalWindow(512)")
    lists = kept_blocks(pattern, num_positions, num_heads, is_causal=is_causal, device=device)
    mask_mod = pattern.resolved(num_positions, num_heads, is_causal)[0].mask_mod(num_positions, num_heads, device)
    return block_mask_of(lists, mask_mod, lists.num_columns if lists.columns.device.type == "cpu" else 1)


def block_mask_of(lists: BlockLists, mask_mod: MaskMod, width: int = 1, *, asks_all: bool = False) -> BlockMask:
    """Returns the BlockMask of lists; batch and head dimensions are 1 where all share a list.

    Memory: 4 bytes · rows · the longest row, and the same for columns; masked and whole blocks have separate tables.

    Args:
        width: the least width of the rows' tables.
        asks_all: ``mask_mod`` is asked about whole blocks, too, if no block has a mask; there is then no table of whole blocks.
    """
    by_column = lists.by_column
    sides = (lists.row_starts, lists.columns, lists.masks, width), (by_column.starts, by_column.rows, by_column.masks, 1)
    tables: list[Tensor | None] = []
    for starts, values, masks, least in sides:
        masked = torch.full_like(values, asks_all, dtype=torch.bool) if masks is None else masks >= 0
        has_whole = masks is not None or not asks_all
        tables += _padded_tables(lists, starts, values, [masked, ~masked] if has_whole else [masked], least)
        tables += [] if has_whole else [None, None]
    return BlockMask(
        (lists.num_queries, lists.num_keys), *tables, BLOCK_SIZE=(lists.q_block, lists.k_block), mask_mod=mask_mod  # type: ignore[misc, arg-type]
    )  # fmt: skip


def _padded_tables(lists: BlockLists, starts: Tensor, values: Tensor, kinds: Sequence[Tensor], width: int) -> list[Tensor]:
    """Returns lists in FlexAttention's form, all int32: for each kind of entries counts (batch, heads, lists) and a table (batch, heads,
    lists, width).

    All tables are as wide as the longest list, since some of torch's kernels read them with one stride, and at least ``width`` and 1, since
    some read a list's first entry before its count.

    Args:
        starts, values: lists in CSR form, those of the rows or of the columns of ``lists``.
        kinds: for each table (entries,) bool, which entries it has.
    """
    starts = starts.long()
    row = torch.repeat_interleave(torch.arange(starts.shape[0] - 1, device=starts.device), starts.diff(), output_size=values.shape[0])
    before = [torch.nn.functional.pad(chosen.long().cumsum(0), (1, 0))[starts] for chosen in kinds]
    width = max(1, width, *(int(x.diff().max()) for x in before if x.shape[0] > 1))
    shape = (lists.num_batch, lists.num_heads, (starts.shape[0] - 1) // lists.num_groups)
    tables: list[Tensor] = []
    for chosen, first in zip(kinds, before, strict=True):
        table = values.new_zeros((starts.shape[0] - 1, width))
        place = torch.arange(int(first[-1]), device=starts.device) - first[row[chosen]]
        table[row[chosen], place] = values[chosen]
        tables += [first.diff().to(torch.int32).view(shape), table.view(*shape, width)]
    return tables


@dataclass(frozen=True)
class MaskFunction(BlockPattern):
    """The pairs for which a function returns True. The function is evaluated once for every pair, in O(N²) time, in chunks of blocks.

    In an intersection with a cheaper pattern (``LocalWindow(4096) & MaskFunction(fn)``, or ``is_causal``) it is evaluated only on the
    blocks of that pattern.

    Args:
        fn: fn(batch, head, q_idx, kv_idx) -> bool, elementwise on int64 tensors that broadcast, on the device on which lists are built. Any
            function works that FlexAttention takes and that has no Python branches. ``batch`` is 0: of a function that reads it,
            attention takes one batch entry only. It must not change afterwards.
        per_head: whether the result depends on ``head``; if not, ``head`` is 0. None: whether ``fn`` reads it.
    """

    fn: MaskMod
    per_head: bool | None = None  # type: ignore[assignment]
    reads_batch: bool = field(default=False, init=False, repr=False, compare=False)  # type: ignore[assignment]

    holds_objects: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not callable(self.fn):
            raise TypeError(f"fn is {self.fn!r} ({type(self.fn).__name__}); expected a function fn(batch, head, q_idx, kv_idx) -> bool")
        is_given, is_compiling = self.per_head is not None, torch.compiler.is_compiling()
        if not is_compiling:
            # some callables have no signature
            with contextlib.suppress(ValueError):
                signature = inspect.signature(self.fn)
                try:
                    signature.bind(*range(4))
                except TypeError as error:
                    raise TypeError(f"fn takes {signature}: {error}; expected a function fn(batch, head, q_idx, kv_idx) -> bool") from None
        if is_given:
            check_bool("per_head", self.per_head)
        # under torch.compile it does not matter: a pattern that is made inside a compiled function is refused later
        reads_batch, reads_head = (False, False) if is_compiling else reads_of(self.fn)
        self._set(reads_batch=reads_batch, per_head=self.per_head if is_given else reads_head)
        if not is_given and not self.per_head:
            # a derived class may read heads itself
            self._set(per_head=BlockPattern.per_head.__get__(self))

    is_prefix_stable = True

    def allowed(self, queries: Tensor, keys: Tensor, heads: Tensor, num_positions: int) -> Tensor:
        # a derived class with an ``allowed`` of its own has the general mask_mod, which asks that
        has_own = type(self).mask_mod is not BlockPattern.mask_mod
        mask_mod = self.mask_mod(num_positions, 0) if has_own else MaskFunction.mask_mod(self, num_positions, 0)
        return mask_mod(torch.zeros_like(heads), heads, queries, keys)

    def mask_mod(self, num_positions: int, num_heads: int, device: torch.device | str = "cpu") -> MaskMod:
        # a function may index tables of N entries with positions
        last = num_positions - 1

        def mask_mod(batch: Tensor, head: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            try:
                kept = self.fn(batch, head if self.per_head else torch.zeros_like(head), q_idx.clamp(max=last), kv_idx.clamp(max=last))
            except IndexError as error:
                raise ValueError(
                    f"fn reads a tensor behind its end ({error}); expected tensors with an entry for each query head and each position of "
                    "q: make them longer, or let fn take the indices modulo their length"
                ) from error
            except RuntimeError as error:
                if "Boolean value of Tensor" not in str(error):
                    raise
                raise TypeError(
                    "fn takes a tensor of pairs for True or False (if, and, or, not, a < b < c); expected operations on whole tensors: "
                    "&, |, ~, torch.where"
                ) from error
            if not isinstance(kept, Tensor) or kept.dtype is not torch.bool:
                found = kept.dtype if isinstance(kept, Tensor) else type(kept).__name__
                raise TypeError(f"fn returned {found}; expected a bool tensor, True where query q_idx attends to key kv_idx")
            return kept

        return mask_mod

    def cost(self, grid: Grid) -> float:
        # more expensive than any list
        return 4.0 * grid.num_columns
