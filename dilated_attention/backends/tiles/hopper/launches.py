"""Launches of the Hopper kernels over a table of tiles, which replace those of ``tiles/run.py`` if ``can_compute`` says so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from dilated_attention.backends.base import HALVES
from dilated_attention.backends.hardware import multiprocessors
from dilated_attention.backends.tiles.call import Prepared
from dilated_attention.backends.tiles.hopper import forward_kernel, key_kernel, query_kernel
from dilated_attention.backends.tiles.hopper.kernel_rows import ROWS, Flags
from dilated_attention.backends.tiles.launch import KernelLaunch

_KERNELS = {"forward": forward_kernel.forward_kernel, "query": query_kernel.query_kernel, "key": key_kernel.key_kernel}


class HopperSizes(NamedTuple):
    """Rows per stage of the ring, and stages (at least 3 in the backward, whose consumers hold two and wait for a third)."""

    block: int
    stages: int


# By kernel and head dim rounded up, only where the Gluon kernel is faster than the Triton one on an H200 with Triton 3.6
# (benchmarks/results/2026-11-22-h200/tiles-gluon.md)
_SIZES = {
    ("key", 48): HopperSizes(64, 4),
    ("key", 64): HopperSizes(64, 4),
    ("key", 128): HopperSizes(32, 3),
    ("query", 128): HopperSizes(64, 3),
    ("forward", 128): HopperSizes(128, 2),
}


def launch(p: Prepared, which: str, size: HopperSizes, numbers: Sequence[float], flags: dict[str, Any]) -> KernelLaunch:
    """Builds the launch of a Hopper kernel.

    Args:
        numbers: the integer and float arguments of the kernel that this one replaces.
        flags: ZERO_KEYS (forward); OWN and DLSE (query); SHARED, PADDING and DROPOUT (key).
    """
    of_keys = which == "key"
    total = p.tables.num_tiles[of_keys] * p.batch * (p.key_heads if of_keys else p.num_heads)
    sizes_of = {name: p.constants[name] for name in ("D", "D0", "D1")}
    all_flags = Flags(**{name: p.constants[name] for name in ("LEFT", "RIGHT", "CUT")}, **flags)
    constants = {**sizes_of, "COLUMNS": p.columns, "BLOCK": size.block, "STAGES": size.stages, "FLAGS": all_flags}
    return KernelLaunch(_KERNELS[which], min(total, multiprocessors(p.device)), (*numbers, total), constants, dtypes=p.dtype)


def sizes(which: str, head_dim: int) -> HopperSizes | None:
    """Returns the sizes for kernel ``which`` ("forward", "query", "key"), or None if Triton's is faster or nothing was measured."""
    return None if head_dim <= 32 else _SIZES.get((which, next((width for width in (48, 64) if head_dim <= width), 128)))


def can_compute(p: Prepared, tensors: Sequence[Tensor], flags: dict[str, Any]) -> bool:
    """Whether the Hopper kernels, on Hopper, compute a call on these aligned tensors (B, N, H, D)."""
    if flags.get("DROPOUT") and p.shared and p.group > 1:
        # the pairs of one query head are dropped at a time
        return False
    if p.dtype not in HALVES or p.head_dim % 16 or p.head_dim > 128:
        return False
    # 16 bytes are copied at a time, and the elements of a tile are counted in 32 bits
    rate = max(rate for _, rate in p.call.walk.branches)
    return not any(stride % 16 for x in tensors for stride in x.stride()[:3]) and all(
        ROWS.value * rate * x.stride(1) < 2**31 for x in tensors
    )
