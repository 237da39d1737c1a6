"""Block patterns over several ranks: which key rows each rank needs, and how it computes its query blocks on the keys of a step, with the
lists of a single process. Every rank works out the needs of all ranks from the same lists, so none asks another.

A rank needs all rows of a key block if one of its query blocks keeps it for one of a step's heads. Blocks are counted from the first
position of each document; they need not end where a rank's rows end. Where a rank holds a part of a query block, the launch has the whole
block, and rows that the rank does not hold count for nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dilated_attention.backends import Backend, Dropout, Mask, Options
from dilated_attention.distributed.exchange.plan import KeySpan, RingProblem, on_device
from dilated_attention.distributed.exchange.run import Part, Tensors, masks_at
from dilated_attention.engine.blocks.lists import select_groups, select_rows
from dilated_attention.engine.branches.launches import Masks
from dilated_attention.engine.branches.problems import Range
from dilated_attention.engine.ops.resolve_blocks import blocks_backend, run_lists
from dilated_attention.engine.ops.settings import CallSettings
from dilated_attention.pattern.blocks.block_lists import BlockLists


def _without_unused_masks(lists: BlockLists) -> BlockLists:
    """Drops masks that only other rows or heads have, because more kernels support lists without masks."""
    if lists.masks is None or bool((lists.masks >= 0).any()):
        return lists
    return replace(lists, masks=None, bits=lists.bits[:0], interval=None)


@dataclass(frozen=True, eq=False, kw_only=True)
class BlockPart(Part):
    """One document's query blocks and some heads of them, on rows of a step's memory that begin at position ``first_key``. ``place``: of
    the launch's rows (whole blocks) those that the rank holds; ``positions``: (L,) of the launch's rows, in the whole."""

    settings: CallSettings
    place: Tensor
    positions: Tensor
    first_key: int
    lists: BlockLists

    def compute(self, tensors: Tensors, dlse: Tensor | None, masks: Masks, into: Tensor | None) -> Tensors:
        is_forward = len(tensors) == 3
        q, k = tensors[:2] if is_forward else tensors[1:3]
        backend, options = self.backend(q, k, masks.padding is not None, not is_forward), self._options(q, masks)
        return run_lists(backend, self.lists, tensors, options, dlse, place=self.place, into=into)  # type: ignore[arg-type]

    def _options(self, q: Tensor, masks: Masks) -> Options:
        settings, keys = self.settings, (self.first_key, self.first_key + self.key_rows.stop - self.key_rows.start)
        masks = masks_at(masks, self.positions, slice(*keys), self.heads)
        dropout = None
        if settings.dropout_p:
            batch, heads, key_positions = (torch.arange(*span, device=q.device) for span in ((0, q.shape[0]), self.heads, keys))
            positions = (x.expand(q.shape[0], -1) for x in (self.positions, key_positions))
            dropout = Dropout(settings.dropout_p, masks.seed, batch, heads, *positions)
        return settings.kernel_options(mask=Mask(masks.padding), dropout=dropout, bias=masks.bias)

    def backend(self, q: Tensor, k: Tensor, has_padding: bool, is_backward: bool) -> Backend | None:
        """Returns the backend of a pass on tensors like these, or raises BackendUnavailable; None if no key is kept."""
        if not self.lists.num_entries or not q.shape[0]:
            return None
        kind = (is_backward, has_padding, q.stride(), k.stride())
        if kind not in self.passes:
            self.passes[kind] = blocks_backend(self.lists, (q, k), self.settings, has_padding, is_backward)
        return self.passes[kind]  # type: ignore[no-any-return]


def held_documents(problem: RingProblem, rank: int, span: KeySpan, settings: CallSettings, device: torch.device) -> list[BlockPart]:
    """Returns what a rank computes of each document, for all heads, with lists where they were built. ``span``: of the memory's keys."""
    assert problem.blocks is not None
    block, row, is_own, parts = problem.blocks.q_block, 0, np.zeros(problem.seq_len, dtype=bool), list[BlockPart]()
    for run in problem.shards[rank]:
        is_own[slice(*run)] = True
    for document in problem.documents:
        if not (runs := problem.query_blocks(rank, document)):
            continue
        lists, (start, end) = problem.lists_of(document), document
        if runs != ((0, lists.num_rows),):
            lists = select_rows(lists, torch.cat([torch.arange(*run) for run in runs]))
        keys = max(start, span.start), min(end, span.end)
        if keys != document:
            # the lists over these keys alone, which hold all blocks that the lists name
            low, high = keys[0] - start, keys[1] - start
            interval: Any = None if lists.interval is None else tuple([(x - low).clamp(0, high - low) for x in lists.interval])
            lists = replace(lists, num_keys=high - low, columns=lists.columns - low // lists.k_block, interval=interval)
            lists = _without_unused_masks(lists)
        positions = np.concatenate([np.arange(start + low * block, min(start + high * block, end)) for low, high in runs])
        place = is_own[positions].nonzero()[0]
        # a rank's rows of one document lie side by side
        first, row, rows = row, row + len(place), on_device([place, positions], device)
        parts.append(
            BlockPart(
                rows=slice(first, row),
                heads=(0, problem.num_heads),
                key_rows=slice(keys[0] - span.start, keys[1] - span.start),
                settings=settings,
                place=rows[0],
                positions=rows[1],
                first_key=keys[0],
                lists=lists,
            )
        )
    return parts


def block_parts(held: list[BlockPart], heads: Range, device: torch.device) -> tuple[BlockPart, ...]:
    """Returns what a rank computes in a step for some query heads."""
    parts = list[BlockPart]()
    for part in held:
        lists = part.lists
        if lists.num_heads > 1:
            lists = _without_unused_masks(select_groups(lists, *heads, num_heads=heads[1] - heads[0]))
        lists = lists if lists.columns.device == device else lists.on(device)
        parts.append(replace(part, heads=heads, passes={}, lists=lists))
    return tuple(parts)
