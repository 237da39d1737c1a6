"""Launches the Gluon kernel of ``nested_gluon``: tensor maps, tile tables and tile sizes per level."""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from dilated_attention.backends.hardware import multiprocessors, on_device
from dilated_attention.engine.kernels.nested import MAX_DESCRIPTORS, TILE_KEYS, NestedFamily, device_offsets, device_table
from dilated_attention.engine.kernels.nested_gluon import nested_kernel

WARPGROUP_ROWS = 64


def _descriptor(x: Tensor, rows: int, rate: int, tile: int) -> TensorDescriptor:
    """Describes x (B, N, H, D) as (batch, head, row, residue · token stride + channel): row t of residue a is position t·rate + a."""
    layout = gl.NVMMASharedLayout.get_default_for([1, 1, tile, x.shape[3]], gl.bfloat16)
    shape = [x.shape[0], x.shape[2], rows // rate, rate * x.stride(1)]
    return TensorDescriptor(x, shape, [x.stride(0), x.stride(2), rate * x.stride(1), 1], [1, 1, tile, x.shape[3]], layout)


def nested_forward(family: NestedFamily, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float, out: Tensor, lse: Tensor) -> None:
    """Computes attention over the whole longest segments, each pair once, in one launch per level.

    ``nested_selection.reasons_against_tensors`` must be empty, also for ``out`` as q.

    Args:
        q, k, v: (B, N, H, D), (B, N, Hk, D) twice.
        out, lse: (B, N, H, D) in q's dtype and (B, H, N) float32 (natural log); only the family's positions are written.
    """
    if family.rates[0] > 1:
        # there are positions that no branch takes
        out[:, : family.num_positions].zero_()
        lse[:, :, : family.num_positions].fill_(-torch.inf)
    B, _, H, D = q.shape
    # A program takes every programs-th query tile, and the cost of causal tiles is periodic in powers of two. With an odd number of
    # programs, each of them gets tiles of all costs.
    processors = multiprocessors(q.device)
    programs = processors - (1 if is_causal and processors % 2 == 0 else 0)
    segments = family.num_positions // family.lengths[-1]
    offsets = device_offsets(family, q.device)
    made: dict[tuple[str, int, int], TensorDescriptor] = {}

    def descriptor(name: str, x: Tensor, rate: int, tile: int) -> TensorDescriptor:
        # levels share most descriptors, and making one takes as long as a launch
        if (name, rate, tile) not in made:
            made[name, rate, tile] = _descriptor(x, family.num_positions, rate, tile)
        return made[name, rate, tile]

    for level in range(family.num_levels):
        if not family.row_steps(level):
            continue
        # Query tiles of 256 rows where they fit, at head dim 64. On an H200 with 12 heads, N = 512k they take 11.43 ms against 11.60 ms;
        # causal 8.80 against 7.54, since wider tiles have more of the diagonal.
        groups = 4 if not is_causal and D == 64 and family.lengths[0] % (256 * family.rates[family.row_branch(level)]) == 0 else 2
        tile_rows, tile_keys = groups * WARPGROUP_ROWS, 64 if groups == 4 else TILE_KEYS
        # stages of keys and of values: (2, 2) and (3, 2) are equally fast at head dim 128 (22.60 and 22.71 ms), and (4, 4) is 4 % faster
        # than (2, 2) at 64
        ring = (8, 8) if groups == 4 else (3, 2) if D == 128 else (4, 4)
        table = device_table(family, level, tile_rows, tile_keys, is_causal, q.device)
        # ROW and FAMILY, see the kernel
        branch, steps, longest = family.row_branch(level), family.row_steps(level), family.lengths[-1]
        row = (branch, family.rates[branch], family.rates[level] if steps != (0,) else 0)
        constants = (longest // (tile_rows * row[1]), table.width, len(steps), family.num_heads, H // k.shape[2], longest)
        first = min(level, 1)
        rates = family.rates[first : level + 1]
        used = [*rates, *rates[-1:] * (MAX_DESCRIPTORS - len(rates))]
        total = constants[0] * constants[2] * segments * H * B
        with on_device(q.device):
            nested_kernel[(min(total, programs),)](
                descriptor("q", q, row[1], WARPGROUP_ROWS), descriptor("out", out, row[1], WARPGROUP_ROWS),
                *(descriptor("k", k, r, tile_keys) for r in used), *(descriptor("v", v, r, tile_keys) for r in used),
                table.tiles, table.bias, table.counts, table.starts, offsets, lse, segments, total,
                q.stride(1), k.stride(1), v.stride(1), out.stride(1), lse.stride(0), lse.stride(1), lse.stride(2), scale,
                first, rates, row, constants, D, tile_keys, ring, is_causal, groups, num_warps=4, maxnreg=168 if groups == 2 else 96,
            )  # fmt: skip
