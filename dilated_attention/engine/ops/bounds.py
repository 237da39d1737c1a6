"""The bounds of packed documents. The host reads them, since plans depend on their values and not on the tensor that holds them.

A caller may fill its tensor anew where torch does not see it: through a numpy array, ``.data``, dlpack. So a tensor on the CPU is read at
every call, and a call keeps the values that its forward has read for its backward.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import torch
from torch import Tensor

from dilated_attention.engine.branches.problems import Range
from dilated_attention.engine.ops.transforms import each

# tensors on a GPU whose bounds are remembered; at this many, all are forgotten
_MOST_READ = 64


# a tensor on a GPU, and copies of its values there and on the CPU
_reads: dict[tuple[int, ...], tuple[weakref.ref[Tensor], Tensor, Tensor]] = {}


def own_bounds(cu_seqlens: Tensor, *, eager: bool, on_host: bool = True) -> Tensor:
    """Returns the bounds in a tensor that the caller cannot write, for a forward and its backward.

    Args:
        eager: see ``is_eager``. If not, an op copies them: compiled code may read its inputs again in the backward.
        on_host: return an int64 tensor on the CPU; if not, one like ``cu_seqlens``.
    """
    # without values
    if cu_seqlens.is_meta:
        return cu_seqlens
    if not eager:
        return copy_bounds_op(cu_seqlens, on_host)
    return _on_host(cu_seqlens) if on_host else cu_seqlens.clone()


def bounds_of(cu_seqlens: Tensor) -> tuple[int, ...]:
    """Returns the values of ``cu_seqlens``."""
    return tuple((remembered(cu_seqlens) if cu_seqlens.is_cuda else cu_seqlens).tolist())


def document_ranges(bounds: tuple[int, ...], num_keys: int) -> tuple[Range, ...]:
    """Returns (start, end) of each document that is not empty."""
    if bounds[0] != 0 or bounds[-1] != num_keys or any(b < a for a, b in itertools.pairwise(bounds)):
        shown = list(bounds) if len(bounds) <= 12 else [*bounds[:6], "…", *bounds[-5:]]
        raise ValueError(f"cu_seqlens is {shown}; expected bounds that start at 0, never decrease and end at N = {num_keys}")
    return tuple((a, b) for a, b in itertools.pairwise(bounds) if a < b)


def _on_host(cu_seqlens: Tensor) -> Tensor:
    return remembered(cu_seqlens) if cu_seqlens.is_cuda else cu_seqlens.to("cpu", torch.int64, copy=True)


def remembered(cu_seqlens: Tensor) -> Tensor:
    """Returns the values of a tensor on a GPU, for which the host waits once for each version of this tensor.

    Later calls compare them on the GPU without waiting. If they differ, the tensor was written where torch does not see it, and an
    assertion fails there, which ends the process's use of the GPU: no result of the old bounds can be read.
    """
    # a tensor made in inference mode has no version counter
    key = () if cu_seqlens.is_inference() else (id(cu_seqlens), cu_seqlens._version, cu_seqlens.data_ptr(), cu_seqlens.numel())
    read = _reads.get(key)
    if read is not None and read[0]() is cu_seqlens:
        torch._assert_async(
            (cu_seqlens == read[1]).all(),
            "cu_seqlens was written where torch does not see it (.data, dlpack, another library or a replayed graph) after a call had read "
            "it; write it by an operation of torch, cu_seqlens.copy_(…), or give a new tensor",
        )
        return read[2]
    there = cu_seqlens.detach().clone()
    here = there.to("cpu", torch.int64)
    if key:
        if len(_reads) >= _MOST_READ:
            _reads.clear()
        _reads[key] = weakref.ref(cu_seqlens), there, here
    return here


@torch.library.custom_op("dilated_attention::copy_bounds", mutates_args=())
def copy_bounds_op(cu_seqlens: torch.Tensor, on_host: bool) -> torch.Tensor:
    """Copies ``cu_seqlens``: see ``own_bounds``."""
    return (_on_host(cu_seqlens) if on_host else cu_seqlens).clone()


@copy_bounds_op.register_fake
def _(cu_seqlens: Tensor, on_host: bool) -> Tensor:
    return torch.empty(cu_seqlens.shape, dtype=torch.int64, device="cpu") if on_host else torch.empty_like(cu_seqlens)


@copy_bounds_op.register_vmap
def _(info: Any, in_dims: tuple[Any, ...], *given: Any) -> tuple[Tensor, int]:
    return each(copy_bounds_op, info.batch_size, in_dims, given)
