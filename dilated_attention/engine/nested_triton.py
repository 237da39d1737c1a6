"""Forward of nested families on GPUs: ``nested_forward`` and its rule, and the tile walk as a plain Triton kernel.

On Hopper the Gluon kernel of ``nested_gluon`` runs; this Triton kernel walks the same tables with ordinary loads on any other CUDA GPU, and
under TRITON_INTERPRET=1 on the CPU, where it is what the tests compare with the twin.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from dilated_attention.engine.nested import NestedFamily, tile_table

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _residue(offsets_ptr, branch, step, rate, head, HEADS: tl.constexpr):
    return (tl.load(offsets_ptr + branch * HEADS + head) + step) % rate


@triton.jit
def _step(
    j, masked, q, rows, highest, total, acc, k_ptr, v_ptr, tiles_ptr, bias_ptr, offsets_ptr, start, head, k_token, v_token, scale_log2,
    HEADS: tl.constexpr, D: tl.constexpr, TILE_KEYS: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """One key tile: online softmax with the tile's multiplicity in the offset of its exponents."""
    entry = tiles_ptr + j * 4
    rate = tl.load(entry + 3)
    keys = _residue(offsets_ptr, tl.load(entry), tl.load(entry + 1), rate, head, HEADS)
    keys = start + keys + (tl.load(entry + 2) + tl.arange(0, TILE_KEYS)) * rate
    channels = tl.arange(0, D)
    k = tl.load(k_ptr + keys.to(tl.int64)[None, :] * k_token + channels[:, None])
    s = tl.dot(q, k, input_precision="ieee")
    if CAUSAL:
        if j < masked:
            s = tl.where(keys[None, :] <= rows[:, None], s, float("-inf"))
    new = tl.maximum(highest, tl.max(s, 1))
    p = tl.exp2(s * scale_log2 - (new * scale_log2 - tl.load(bias_ptr + j))[:, None])
    rescale = tl.exp2((highest - new) * scale_log2)
    v = tl.load(v_ptr + keys.to(tl.int64)[:, None] * v_token + channels[None, :])
    acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision="ieee")
    return new, total * rescale + tl.sum(p, 1), acc


@triton.jit(do_not_specialize=["segments"])
def nested_pointer_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, tiles_ptr, bias_ptr, counts_ptr, offsets_ptr, segments,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head, o_batch, o_token, o_head,
    lse_batch, lse_head, lse_token, scale,
    ROW: tl.constexpr, FAMILY: tl.constexpr, D: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_KEYS: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """A query tile per program. ROW: (row_branch, its rate, r_level or 0 at the top).
    FAMILY: (query tiles, table width, progressions of rows, query heads, query heads per key head, longest segment)."""
    Q_TILES: tl.constexpr = FAMILY[0]
    T: tl.constexpr = FAMILY[1]
    STEPS: tl.constexpr = FAMILY[2]
    HEADS: tl.constexpr = FAMILY[3]
    GROUP: tl.constexpr = FAMILY[4]
    TOP: tl.constexpr = FAMILY[5]
    row_branch: tl.constexpr = ROW[0]
    row_rate: tl.constexpr = ROW[1]
    row_step: tl.constexpr = ROW[2]
    index = tl.program_id(0)
    tile = index % Q_TILES
    index = index // Q_TILES
    u = index % STEPS
    index = index // STEPS
    segment = index % segments
    index = index // segments
    head = index % HEADS
    batch = (index // HEADS).to(tl.int64)
    start = segment * TOP
    rows = _residue(offsets_ptr, row_branch, (u + 1) * row_step, row_rate, head, HEADS)
    rows = start + rows + (tile * TILE_ROWS + tl.arange(0, TILE_ROWS)) * row_rate
    far = rows.to(tl.int64)
    channels = tl.arange(0, D)
    q = tl.load(q_ptr + batch * q_batch + head.to(tl.int64) * q_head + far[:, None] * q_token + channels[None, :])
    k_ptr += batch * k_batch + (head // GROUP).to(tl.int64) * k_head
    v_ptr += batch * v_batch + (head // GROUP).to(tl.int64) * v_head
    tiles_ptr += tile * T * 4
    bias_ptr += tile * T
    masked = tl.load(counts_ptr + tile * 2)
    count = tl.load(counts_ptr + tile * 2 + 1)
    scale_log2 = scale * LOG2_E
    highest = tl.full([TILE_ROWS], -1e30, tl.float32)
    total = tl.zeros([TILE_ROWS], tl.float32)
    acc = tl.zeros([TILE_ROWS, D], tl.float32)
    if CAUSAL:
        for j in range(masked):
            highest, total, acc = _step(
                j, masked, q, rows, highest, total, acc, k_ptr, v_ptr, tiles_ptr, bias_ptr, offsets_ptr, start, head, k_token, v_token,
                scale_log2, HEADS, D, TILE_KEYS, True)  # fmt: skip
    else:
        masked = 0
    for j in range(masked, count):
        highest, total, acc = _step(
            j, masked, q, rows, highest, total, acc, k_ptr, v_ptr, tiles_ptr, bias_ptr, offsets_ptr, start, head, k_token, v_token,
            scale_log2, HEADS, D, TILE_KEYS, False)  # fmt: skip
    lse = highest * scale + tl.log2(total) * LN_2
    tl.store(lse_ptr + batch * lse_batch + head.to(tl.int64) * lse_head + far * lse_token, lse)
    out = (acc / total[:, None]).to(q.dtype)
    tl.store(out_ptr + batch * o_batch + head.to(tl.int64) * o_head + far[:, None] * o_token + channels[None, :], out)


@functools.lru_cache(maxsize=64)
def device_table(
    family: NestedFamily, level: int, tile_rows: int, tile_keys: int, is_causal: bool, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(tiles, log2 of the multiplicities, counts) of a level on the device; two entries of padding, as kernels read one ahead."""
    table = tile_table(family, level, tile_rows, tile_keys, is_causal)
    bias = torch.nn.functional.pad(table.shared.float().log2().flatten(), (0, 2))
    return table.tiles.to(device), bias.to(device), table.counts.to(device)


@functools.lru_cache(maxsize=64)
def device_offsets(family: NestedFamily, device: torch.device) -> torch.Tensor:
    return torch.tensor(family.offsets, dtype=torch.int32, device=device)


def level_constants(family: NestedFamily, level: int, tile_rows: int, table_width: int, group: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """ROW and FAMILY of a level's launch: see the kernels."""
    branch = family.row_branch(level)
    rate, steps = family.rates[branch], family.row_steps(level)
    row = (branch, rate, family.rates[level] if steps != (0,) else 0)
    return row, (family.lengths[-1] // (tile_rows * rate), table_width, len(steps), family.num_heads, group, family.lengths[-1])


def triton_forward(
    family: NestedFamily, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool, scale: float, out: torch.Tensor, lse: torch.Tensor,
    *, tile_rows: int = 128, tile_keys: int = 64, num_warps: int = 8, num_stages: int = 2,
) -> None:  # fmt: skip
    """The Triton kernel; arguments as for ``nested_forward``."""
    segments = family.num_positions // family.lengths[-1]
    for level in range(family.num_levels):
        if not family.row_steps(level):
            continue
        tiles, bias, counts = device_table(family, level, tile_rows, tile_keys, is_causal, q.device)
        row, constants = level_constants(family, level, tile_rows, tiles.shape[1], q.shape[2] // k.shape[2])
        grid = (constants[0] * constants[2] * segments * q.shape[2] * q.shape[0],)
        nested_pointer_kernel[grid](
            q, k, v, out, lse, tiles, bias, counts, device_offsets(family, q.device), segments,
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3], lse.stride(0), lse.stride(1), lse.stride(2), scale,
            row, constants, q.shape[3], tile_rows, tile_keys, is_causal, num_warps=num_warps, num_stages=num_stages,
        )  # fmt: skip
