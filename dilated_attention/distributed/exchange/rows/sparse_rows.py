"""Every g-th row of each head of a rank's tensors: the rows of the branches that cross ranks (``crossing.py``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dilated_attention.backends.base import accumulation_dtype
from dilated_attention.backends.hardware import has_kernels
from dilated_attention.backends.merge import merge_onto


class SparseRows:
    """Every g-th row of each head: row i of head h is row g·i + offset(h) of a tensor (B, n, heads, …)."""

    def __init__(self, step: int, offsets: tuple[int, ...], device: torch.device) -> None:
        self.step, heads = step, len(offsets)
        # of the kernels: with the launches of earlier calls
        self._rows: tuple[int, torch.Tensor, dict[Any, Any]] = step, torch.tensor(offsets, dtype=torch.int32, device=device), {}
        self._index = torch.tensor([offset * heads + head for head, offset in enumerate(offsets)], device=device)

    def of(self, tensors: Sequence[torch.Tensor], stats: Sequence[torch.Tensor] = ()) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Returns copies of the rows: of tensors (B, n, heads, D) as (B, n/g, heads, D), of ``stats`` (B, heads, n) as (B, heads, n/g)."""
        if has_kernels(tensors[0]):
            from dilated_attention.distributed.exchange.rows.sparse_rows_triton import Rows, take

            return take(Rows(*self._rows), tensors, stats)
        return [self._of(x) for x in tensors], [self._of(x.transpose(1, 2)).transpose(1, 2).contiguous() for x in stats]

    def add(self, x: torch.Tensor, part: torch.Tensor) -> None:
        """Adds (B, n/g, heads, …) to the rows of a contiguous x; each sum is rounded once."""
        if has_kernels(x):
            from dilated_attention.distributed.exchange.rows.sparse_rows_triton import Rows, add

            add(Rows(*self._rows), x, part.contiguous())
            return
        acc = accumulation_dtype(x.dtype)
        self._flat(x).index_copy_(2, self._index, (self._of(x).to(acc) + part.to(acc)).to(x.dtype))

    def merge(self, out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor) -> torch.Tensor:
        """Merges results of the rows, part (B, n/g, heads, D) and part_lse (B, heads, n/g), into contiguous out (B, n, heads, D).

        Returns the merged lse (B, heads, n), in which ``lse`` is changed or not.
        """
        if has_kernels(out):
            from dilated_attention.distributed.exchange.rows.sparse_rows_triton import Rows, merge

            merge(Rows(*self._rows), out, lse, part.contiguous(), part_lse.contiguous())
            return lse
        rows = lse.transpose(1, 2).contiguous()
        own, own_lse = self._of(out), self._of(rows)
        merge_onto(own, own_lse, part, part_lse.transpose(1, 2))
        self._flat(out).index_copy_(2, self._index, own)
        self._flat(rows).index_copy_(2, self._index, own_lse)
        return rows.transpose(1, 2)

    def _of(self, x: torch.Tensor) -> torch.Tensor:
        return self._flat(x).index_select(2, self._index)

    def _flat(self, x: torch.Tensor) -> torch.Tensor:
        """Returns (B, n/g, g · heads, …), a view of a contiguous x."""
        B, n, heads = x.shape[:3]
        return x.reshape(B, n // self.step, self.step * heads, *x.shape[3:])
