"""A pattern defined by a Python function of single pairs, like FlexAttention's ``mask_mod``."""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dilated_attention.pattern.blocks.base import BlockPattern, Blocks, Grid, MaskMod
from dilated_attention.pattern.checks import check_bool

# functions whose result does not depend on the values of their tensor arguments
_VALUE_FREE = {
    getattr(torch.ops.aten, name).default
    for name in ("new_ones", "new_zeros", "new_full", "new_empty", "ones_like", "zeros_like", "full_like", "empty_like")
}


@dataclass(frozen=True)
class MaskFunction(BlockPattern):
    """The pairs for which a function returns True. It is evaluated once for every pair, in O(N²) time, in chunks of blocks.

    In an intersection with a cheaper pattern (``LocalWindow(4096) & MaskFunction(fn)``, or ``is_causal``), it is evaluated only on the
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
        if self.per_head is not None:
            check_bool("per_head", self.per_head)
        # a pattern that is made inside a compiled function is refused
        reads_batch, reads_head = (False, False) if torch.compiler.is_compiling() else reads_of(self.fn)
        self._set(reads_batch=reads_batch, per_head=reads_head if self.per_head is None else self.per_head)

    is_prefix_stable = True

    def allowed(self, queries: Tensor, keys: Tensor, heads: Tensor, num_positions: int) -> Tensor:
        return self.mask_mod(num_positions, 0)(torch.zeros_like(heads), heads, queries, keys)

    def _of_entry(self, batch: Tensor, heads: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
        try:
            kept = self.fn(batch, heads if self.per_head else torch.zeros_like(heads), queries, keys)
        except IndexError as error:
            raise ValueError(
                f"fn reads a tensor behind its end ({error}); expected tensors with an entry for each query head and each position of q: "
                "make them longer, or let fn take the indices modulo their length"
            ) from error
        if not isinstance(kept, Tensor) or kept.dtype is not torch.bool:
            found = kept.dtype if isinstance(kept, Tensor) else type(kept).__name__
            raise TypeError(f"fn returned {found}; expected a bool tensor, True where query q_idx attends to key kv_idx")
        return kept

    def mask_mod(self, num_positions: int, num_heads: int, device: torch.device | str = "cpu") -> MaskMod:
        # a function may index tables of N entries with positions
        last = num_positions - 1
        return lambda batch, head, q_idx, kv_idx: self._of_entry(batch, head, q_idx.clamp(max=last), kv_idx.clamp(max=last))

    def columns(self, grid: Grid, heads: tuple[int, ...]) -> Blocks:
        return grid.listed(grid.range(0, len(heads) * grid.num_rows * grid.num_columns))

    def cost(self, grid: Grid) -> float:
        # more expensive than any list
        return 4.0 * grid.num_columns


class _Sources(TorchDispatchMode):
    """Follows, storage by storage, which of a function's arguments a tensor may depend on: bit i is set for argument i."""

    def __init__(self, arguments: list[Tensor]) -> None:
        super().__init__()
        self.bits = {x.untyped_storage()._cdata: 1 << i for i, x in enumerate(arguments)}
        self.alive = [*arguments]  # no address serves a second storage

    def of(self, values: Any) -> int:
        each = (self.bits.get(x.untyped_storage()._cdata, 0) for x in tree_leaves(values) if isinstance(x, Tensor))
        return functools.reduce(operator.or_, each, 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        bits = 0 if func in _VALUE_FREE else self.of((args, kwargs))
        made = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        if bits and not made:
            raise TypeError(f"{func} takes a number out of a tensor, on which the rest of the function may depend")
        self.alive += made
        for x in made:
            self.bits[x.untyped_storage()._cdata] = self.of(x) | bits
        return out


def reads_of(fn: MaskMod) -> tuple[bool, bool]:
    """Returns whether the result of ``fn`` may depend on the batch entry, and on the head: followed through one call for one pair."""
    # a function may hold tensors of a GPU
    for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        arguments = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(4)]
        try:
            with _Sources(arguments) as sources:
                bits = sources.of(fn(*arguments))
            return bool(bits & 1), bool(bits & 2)
        except Exception:  # noqa: BLE001  whatever a user's function raises
            continue
    # no call for one pair works, so nothing is known
    return True, True
