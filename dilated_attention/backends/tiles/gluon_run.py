"""Launches of the Hopper kernels of a table of tiles, in place of those of ``run.py`` where ``why_not`` gives no reason."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from dilated_attention.backends.tiles import gluon_backward, gluon_forward
from dilated_attention.backends.tiles.launch import Launch
from dilated_attention.backends.tiles.table import table_on

if TYPE_CHECKING:
    from dilated_attention.backends.tiles.run import Prepared

_KERNELS = {"forward": gluon_forward.forward_kernel, "query": gluon_backward.query_kernel, "key": gluon_backward.key_kernel}


class HopperSizes(NamedTuple):
    """Rows that the ring takes at a time, its stages, tiles in registers; warpgroups of 64 rows."""

    block: int
    stages: int
    resident: int
    groups: int = 2
    fence: bool = False


@functools.lru_cache(maxsize=16)
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def table_of(p: Prepared, of_keys: bool, size: HopperSizes) -> torch.Tensor:
    return table_on(p.device, p.call.walk, of_keys, 64 * size.groups, p.call.right == 0)


def launch(p: Prepared, which: str, size: HopperSizes, numbers: Sequence[float], flags: dict[str, Any]) -> Launch:
    """``numbers``: those of the kernel that this one replaces; ``flags``: ZERO_KEYS; OWN and DLSE; SHARED."""
    of_keys = which == "key"
    total = len(table_of(p, of_keys, size)) * p.batch * (p.key_heads if of_keys else p.num_heads)
    kept = {name: p.constants[name] for name in ("D", "D0", "D1", "LEFT", "RIGHT", "CUT")}
    constants = {
        **kept, **flags, "COLUMNS": p.columns, "BLOCK": size.block, "STAGES": size.stages, "GROUPS": size.groups,
        "RESIDENT": size.resident, "FENCE": size.fence,
    }  # fmt: skip
    return Launch(_KERNELS[which], min(total, _multiprocessors(p.device)), (*numbers, total), constants)
