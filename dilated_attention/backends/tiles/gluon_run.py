"""Launches of the Hopper kernels of a table of tiles, in place of those of ``run.py`` where ``can`` allows it."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from dilated_attention.backends.tiles import gluon_backward
from dilated_attention.backends.tiles.sizes import head_blocks
from dilated_attention.backends.tiles.table import table_on

if TYPE_CHECKING:
    from dilated_attention.backends.tiles.run import Prepared

_LOG2_E = 1.4426950408889634
ROWS = 128


class HopperSizes(NamedTuple):
    """Keys (queries) of a stage, stages of the ring, how many of the two tiles a consumer keeps in registers."""

    block: int
    stages: int
    in_registers: int
    fence: bool = False
    is_split: bool = True
    is_persistent: bool = True
    groups: int = 2
    takes_turns: bool = False


@functools.lru_cache(maxsize=16)
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def can(p: Prepared, tensors: tuple[torch.Tensor, ...]) -> bool:
    """Whether the Hopper kernels compute this call, without padding and dropout: 16-bit numbers, rows that 16-byte copies can read."""
    if p.dtype not in (torch.bfloat16, torch.float16) or p.head_dim % 16 or p.head_dim > 128:
        return False
    if p.device.type != "cuda" or torch.cuda.get_device_capability(p.device)[0] != 9:
        return False
    rates = max(rate for _, rate in p.call.walk.branches)
    return all(
        x.data_ptr() % 16 == 0 and all(s % 16 == 0 for s in x.stride()[:3]) and ROWS * rates * x.stride(1) < 2**31 for x in tensors
    )


def _launch_sizes(p: Prepared, of_keys: bool, size: HopperSizes) -> tuple[torch.Tensor, int, int, dict[str, Any]]:
    walk = p.key_walk if of_keys else p.call.walk
    table = table_on(p.device, walk, of_keys, 64 * size.groups, p.call.right == 0)
    total = len(table) * p.batch * (p.key_heads if of_keys else p.num_heads)
    programs = min(total, _multiprocessors(p.device)) if size.is_persistent else total
    columns = 1 << (p.head_dim - 1).bit_length()
    D0, D1 = head_blocks(p.head_dim) if size.is_split else (columns, 0)
    return table, total, programs, {
        "D": p.head_dim, "D0": D0, "D1": D1, "COLUMNS": columns, "BLOCK": size.block, "STAGES": size.stages,
        "GROUPS": size.groups, "TURNS": size.takes_turns,
    }  # fmt: skip


def query_backward(
    p: Prepared, dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    dlse: torch.Tensor | None, parts: torch.Tensor | None, stats: torch.Tensor, dq: torch.Tensor, q_parts: torch.Tensor, size: HopperSizes,
) -> None:  # fmt: skip
    call, walk = p.call, p.call.walk
    table, total, programs, constants = _launch_sizes(p, False, size)
    flags = (call.left is not None, call.right is not None, p.constants["CUT"], parts is not None, dlse is not None, size.in_registers, size.fence)
    gluon_backward.query_kernel[(programs,)](
        q, k, v, out if parts is None else parts, lse, dout, lse if dlse is None else dlse, stats, dq, q_parts, table, p.offsets,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3], *dout.stride()[:3], *dq.stride()[:3],
        *((0, 0, 0) if dlse is None else (dlse.stride(0), dlse.stride(2), dlse.stride(1))),
        p.batch, p.num_heads, p.num_heads, p.group, p.q_first, walk.queries[1], p.num_queries, p.num_keys, p.part_rows, p.delta_rows,
        walk.direct, *p.bounds, call.scale * _LOG2_E, call.scale, total,
        **constants, FLAGS=flags, num_warps=4,
    )  # fmt: skip


def key_backward(
    p: Prepared, dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, stats: torch.Tensor,
    dk: torch.Tensor, dv: torch.Tensor, k_parts: torch.Tensor, v_parts: torch.Tensor, size: HopperSizes,
) -> None:  # fmt: skip
    call, walk = p.call, p.call.walk
    table, total, programs, constants = _launch_sizes(p, True, size)
    flags = (call.left is not None, call.right is not None, p.constants["CUT"], p.shared, size.in_registers, size.fence)
    gluon_backward.key_kernel[(programs,)](
        q, k, v, dout, stats, dk, dv, k_parts, v_parts, table, p.offsets,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *dout.stride()[:3], *dk.stride()[:3], *dv.stride()[:3],
        p.batch, p.num_heads, p.kv_heads, p.num_heads, p.group, p.q_first, walk.queries[1], p.num_queries, p.num_keys, p.key_part_rows,
        p.delta_rows, p.key_walk.direct, *p.bounds, call.scale * _LOG2_E, call.scale, total,
        **constants, FLAGS=flags, num_warps=4,
    )  # fmt: skip
