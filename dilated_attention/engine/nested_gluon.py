"""The nested walk on Hopper, written in Gluon: one warp that loads by TMA, two warpgroups that multiply and exponentiate.

A program is one CTA per SM and takes query tiles of 128 rows in turn. Its producer warp reads the tile table and keeps a ring of key and
value tiles full, across query tiles as well, so the pipeline never drains. Each consumer warpgroup owns 64 rows: it issues Q·Kᵀ of the next
key tile and P·V of the last one, and computes the softmax of the next while P·V runs. The multiplicity of a tile costs one addition per row.

Every key progression is a TMA descriptor (batch, head, row, residue · token stride + channel): the dilation is its row stride.
"""

from __future__ import annotations

import functools

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from dilated_attention.engine.nested import NestedFamily, device_offsets, device_table, level_constants
from dilated_attention.engine.nested_triton import MAX_DESCRIPTORS, TILE_KEYS, TILE_ROWS

WARPGROUP_ROWS = 64
# renamed in Triton 3.7
_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier

_EX2 = gl.constexpr("ex2.approx.ftz.f32 $0, $1;")

@gluon.jit
def _decode(index, Q_TILES: gl.constexpr, STEPS: gl.constexpr, segments, HEADS: gl.constexpr):
    """index → (query tile, progression, longest segment, head, batch), query tiles fastest: neighbours share keys in L2."""
    tile = index % Q_TILES
    index = index // Q_TILES
    step = index % STEPS
    index = index // STEPS
    segment = index % segments
    index = index // segments
    return tile, step, segment, index % HEADS, index // HEADS


@gluon.jit
def _residue(offsets_ptr, branch, step, rate, head, HEADS: gl.constexpr):
    return (gl.load(offsets_ptr + branch * HEADS + head) + step) % rate


@gluon.jit
def _produce(
    q_desc, k_descs, v_descs, q_smem, k_smem, v_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty,
    tiles_ptr, counts_ptr, offsets_ptr, shape, strides,
    FIRST: gl.constexpr, RATES: gl.constexpr, ROW: gl.constexpr, FAMILY: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    segments, total = shape
    q_token, k_token, v_token = strides
    row_branch: gl.constexpr = ROW[0]
    row_rate: gl.constexpr = ROW[1]
    row_step: gl.constexpr = ROW[2]
    Q_TILES: gl.constexpr = FAMILY[0]
    T: gl.constexpr = FAMILY[1]
    STEPS: gl.constexpr = FAMILY[2]
    HEADS: gl.constexpr = FAMILY[3]
    GROUP: gl.constexpr = FAMILY[4]
    TOP: gl.constexpr = FAMILY[5]
    done = 0
    round_ = 0
    for index in range(gl.program_id(0), total, gl.num_programs(0)):
        tile, u, segment, head, batch = _decode(index, Q_TILES, STEPS, segments, HEADS)
        residue = _residue(offsets_ptr, row_branch, (u + 1) * row_step, row_rate, head, HEADS)
        mbarrier.wait(q_empty, (round_ & 1) ^ 1)
        mbarrier.expect(q_full, 2 * q_desc.block_type.nbytes)
        for half in gl.static_range(2):
            row = segment * (TOP // row_rate) + tile * 128 + half * 64
            tma.async_copy_global_to_shared(q_desc, [batch, head, row, residue * q_token], q_full, q_smem.index(half))
        count = gl.load(counts_ptr + tile * 3 + 2)
        for j in range(count):
            entry = tiles_ptr + (tile * T + j) * 4
            branch = gl.load(entry)
            first = gl.load(entry + 2)
            kept = _residue(offsets_ptr, branch, gl.load(entry + 1), gl.load(entry + 3), head, HEADS)
            stage = done % STAGES
            phase = ((done // STAGES) & 1) ^ 1
            mbarrier.wait(k_empty.index(stage), phase)
            mbarrier.expect(k_full.index(stage), k_descs[0].block_type.nbytes)
            for d in gl.static_range(len(RATES)):
                row = first + segment * (TOP // RATES[d])
                tma.async_copy_global_to_shared(
                    k_descs[d], [batch, head // GROUP, row, kept * k_token], k_full.index(stage), k_smem.index(stage), pred=branch == FIRST + d
                )
            mbarrier.wait(v_empty.index(stage), phase)
            mbarrier.expect(v_full.index(stage), v_descs[0].block_type.nbytes)
            for d in gl.static_range(len(RATES)):
                row = first + segment * (TOP // RATES[d])
                tma.async_copy_global_to_shared(
                    v_descs[d], [batch, head // GROUP, row, kept * v_token], v_full.index(stage), v_smem.index(stage), pred=branch == FIRST + d
                )
            done += 1
        round_ += 1


@gluon.jit
def _exp2(x):
    # the instruction that flushes denormals: gl.exp2 spends three more to keep them
    return gl.inline_asm_elementwise(_EX2, "=r,r", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _hide_later(s, start, rate, rows, TILE_KEYS: gl.constexpr):
    """−inf where the key's position, start + column · rate, is after the query's."""
    ahead = rows - start
    last = gl.where(ahead < 0, -1, ahead // rate)
    columns = gl.arange(0, TILE_KEYS, layout=gl.SliceLayout(0, s.type.layout))
    return gl.where(gl.expand_dims(columns, 0) <= gl.expand_dims(last, 1), s, float("-inf"))


@gluon.jit
def _weights(s, highest, total, shared, scale_log2):
    """One step of the online softmax: (weights, rescaling of what was summed, new row maximum, new row sum)."""
    new = gl.maximum(highest, gl.max(s, 1))
    # the maximum is one of raw scores: weights reach m, not 1, which costs nothing
    offset = new * scale_log2 - shared
    p = _exp2(s * scale_log2 - gl.expand_dims(offset, 1))
    rescale = _exp2((highest - new) * scale_log2)
    return p, rescale, new, total * rescale + gl.sum(p, 1)


@gluon.jit
def _consume(
    PART: gl.constexpr, o_desc, q_smem, k_smem, v_smem, o_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty,
    tiles_ptr, bias_ptr, counts_ptr, starts_ptr, offsets_ptr, lse_ptr, shape, o_token, lse_strides, scale,
    ROW: gl.constexpr, FAMILY: gl.constexpr, STAGES: gl.constexpr,
    D: gl.constexpr, TILE_KEYS: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    segments, total_tiles = shape
    lse_batch, lse_head, lse_token = lse_strides
    row_branch: gl.constexpr = ROW[0]
    row_rate: gl.constexpr = ROW[1]
    row_step: gl.constexpr = ROW[2]
    Q_TILES: gl.constexpr = FAMILY[0]
    T: gl.constexpr = FAMILY[1]
    STEPS: gl.constexpr = FAMILY[2]
    HEADS: gl.constexpr = FAMILY[3]
    TOP: gl.constexpr = FAMILY[5]
    dtype: gl.constexpr = k_smem.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE_KEYS, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    q_layout: gl.constexpr = gl.DotOperandLayout(0, s_layout, 2)
    q_shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, D], dtype)
    k_shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE_KEYS, D], dtype)
    scale_log2 = scale * 1.4426950408889634
    zeros = gl.zeros([64, TILE_KEYS], gl.float32, s_layout)
    done = 0
    round_ = 0
    for index in range(gl.program_id(0), total_tiles, gl.num_programs(0)):
        tile, u, segment, head, batch = _decode(index, Q_TILES, STEPS, segments, HEADS)
        residue = _residue(offsets_ptr, row_branch, (u + 1) * row_step, row_rate, head, HEADS)
        # The second half of the rows sees more keys: the consumers take it in turn.
        half = PART ^ (round_ & 1)
        first_row = tile * 128 + half * 64
        rows = gl.arange(0, 64, layout=gl.SliceLayout(1, s_layout))
        rows = segment * TOP + residue + (first_row + rows) * row_rate
        masked = gl.load(counts_ptr + tile * 3)
        first_half = gl.load(counts_ptr + tile * 3 + 1)
        both = gl.load(counts_ptr + tile * 3 + 2)
        count = first_half if half == 0 else both
        bias = bias_ptr + tile * T
        # positions are counted from the start of the longest segment where keys are compared with queries
        inside = rows - segment * TOP
        starts = starts_ptr + (head * Q_TILES + tile) * T
        rates = tiles_ptr + tile * T * 4 + 3

        mbarrier.wait(q_full, round_ & 1)
        q = q_smem.index(half)._reinterpret(dtype, [64, D], q_shared).load(q_layout)
        mbarrier.arrive(q_empty, count=1)
        stage = done % STAGES
        phase = (done // STAGES) & 1
        mbarrier.wait(k_full.index(stage), phase)
        k = k_smem.index(stage)._reinterpret(dtype, [TILE_KEYS, D], k_shared)
        s = warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
        shared = gl.load(bias)
        following = gl.load(bias + 1)
        if CAUSAL:
            start = gl.load(starts)
            rate = gl.load(rates)
            next_start = gl.load(starts + 1)
            next_rate = gl.load(rates + 4)
        s = warpgroup_mma_wait(0, deps=(s,))
        mbarrier.arrive(k_empty.index(stage), count=1)
        if CAUSAL:
            s = _hide_later(s, start, rate, inside, TILE_KEYS)
        highest = gl.full([64], -1e30, gl.float32, gl.SliceLayout(1, s_layout))
        total = gl.zeros([64], gl.float32, gl.SliceLayout(1, s_layout))
        weights, rescale, highest, total = _weights(s, highest, total, shared, scale_log2)
        p = gl.convert_layout(weights.to(dtype), p_layout)
        o = gl.zeros([64, D], gl.float32, o_layout)
        next_stage = (done + 1) % STAGES
        mbarrier.wait(k_full.index(next_stage), ((done + 1) // STAGES) & 1, pred=count > 1)

        for j in range(1, count):
            shared = following
            following = gl.load(bias + j + 1)
            if CAUSAL:
                start = next_start
                rate = next_rate
                next_start = gl.load(starts + j + 1)
                next_rate = gl.load(rates + (j + 1) * 4)
            k = k_smem.index(next_stage)._reinterpret(dtype, [TILE_KEYS, D], k_shared)
            s_running = warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
            mbarrier.wait(v_full.index(stage), phase)
            v = v_smem.index(stage)._reinterpret(dtype, [TILE_KEYS, D], k_shared)
            o_running = warpgroup_mma(p, v, o, is_async=True)
            s = warpgroup_mma_wait(1, deps=(s_running,))
            mbarrier.arrive(k_empty.index(next_stage), count=1)
            if CAUSAL:
                if (j < masked) | (j >= first_half):
                    s = _hide_later(s, start, rate, inside, TILE_KEYS)
            weights, rescale, highest, total = _weights(s, highest, total, shared, scale_log2)
            # Waiting for the key tile after the next belongs here: its branch, and the new weights passing through the wait for P·V, keep
            # LLVM and ptxas from sinking the softmax below that wait, where it would overlap with nothing.
            done += 1
            after = (done + 1) % STAGES
            mbarrier.wait(k_full.index(after), ((done + 1) // STAGES) & 1, pred=j + 1 < count)
            o, p, weights = warpgroup_mma_wait(0, deps=(o_running, p, weights))
            mbarrier.arrive(v_empty.index(stage), count=1)
            o = o * gl.expand_dims(gl.convert_layout(rescale, gl.SliceLayout(1, o_layout)), 1)
            p = gl.convert_layout(weights.to(dtype), p_layout)
            phase = (done // STAGES) & 1
            stage = next_stage
            next_stage = after

        mbarrier.wait(v_full.index(stage), phase)
        v = v_smem.index(stage)._reinterpret(dtype, [TILE_KEYS, D], k_shared)
        o_running = warpgroup_mma(p, v, o, is_async=True)
        lse = highest * scale + gl.log2(total) * 0.6931471805599453
        where = lse_ptr + batch.to(gl.int64) * lse_batch + head.to(gl.int64) * lse_head + rows.to(gl.int64) * lse_token
        gl.store(where, lse)
        o = warpgroup_mma_wait(0, deps=(o_running,))
        mbarrier.arrive(v_empty.index(stage), count=1)
        done += 1
        o = o * gl.expand_dims(gl.convert_layout(1.0 / total, gl.SliceLayout(1, o_layout)), 1)
        # the store of the query tile before must have read its buffer
        tma.store_wait(0)
        _barrier()
        o_smem.index(PART)._reinterpret(dtype, [64, D], q_shared).store(o.to(dtype))
        fence_async_shared()
        _barrier()
        row = segment * (TOP // row_rate) + first_row
        tma.async_copy_shared_to_global(o_desc, [batch, head, row, residue * o_token], o_smem.index(PART))
        if CAUSAL:
            # key tiles that only the other half sees: let them go as they come
            for _ in range(count, both):
                stage = done % STAGES
                phase = (done // STAGES) & 1
                mbarrier.wait(k_full.index(stage), phase)
                mbarrier.arrive(k_empty.index(stage), count=1)
                mbarrier.wait(v_full.index(stage), phase)
                mbarrier.arrive(v_empty.index(stage), count=1)
                done += 1
        round_ += 1
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["segments", "total"])
def nested_kernel(
    q_desc, o_desc, k0, k1, k2, k3, k4, k5, v0, v1, v2, v3, v4, v5,
    tiles_ptr, bias_ptr, counts_ptr, starts_ptr, offsets_ptr, lse_ptr, segments, total,
    q_token, k_token, v_token, o_token, lse_batch, lse_head, lse_token, scale,
    FIRST: gl.constexpr, RATES: gl.constexpr, ROW: gl.constexpr, FAMILY: gl.constexpr,
    D: gl.constexpr, TILE_KEYS: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """RATES: the rates of branches FIRST …, one descriptor each. ROW: (row_branch, its rate, r_level or 0 at the top).
    FAMILY: (query tiles, table width, progressions of rows, query heads, query heads per key head, longest segment)."""
    q_smem = gl.allocate_shared_memory(q_desc.dtype, [2, 1, 1, 64, D], q_desc.layout)
    o_smem = gl.allocate_shared_memory(q_desc.dtype, [2, 1, 1, 64, D], o_desc.layout)
    k_smem = gl.allocate_shared_memory(q_desc.dtype, [STAGES, 1, 1, TILE_KEYS, D], k0.layout)
    v_smem = gl.allocate_shared_memory(q_desc.dtype, [STAGES, 1, 1, TILE_KEYS, D], v0.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_empty, count=2)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_empty.index(i), count=2)
    fence_async_shared()
    shape = (segments, total)
    k_descs = (k0, k1, k2, k3, k4, k5)
    v_descs = (v0, v1, v2, v3, v4, v5)
    lse_strides = (lse_batch, lse_head, lse_token)
    zero: gl.constexpr = 0
    one: gl.constexpr = 1
    gl.warp_specialize(
        [
            (_consume, (
                zero, o_desc, q_smem, k_smem, v_smem, o_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty,
                tiles_ptr, bias_ptr, counts_ptr, starts_ptr, offsets_ptr, lse_ptr, shape, o_token, lse_strides, scale,
                ROW, FAMILY, STAGES, D, TILE_KEYS, CAUSAL)),
            (_consume, (
                one, o_desc, q_smem, k_smem, v_smem, o_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty,
                tiles_ptr, bias_ptr, counts_ptr, starts_ptr, offsets_ptr, lse_ptr, shape, o_token, lse_strides, scale,
                ROW, FAMILY, STAGES, D, TILE_KEYS, CAUSAL)),
            (_produce, (
                q_desc, k_descs, v_descs, q_smem, k_smem, v_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty,
                tiles_ptr, counts_ptr, offsets_ptr, shape, (q_token, k_token, v_token),
                FIRST, RATES, ROW, FAMILY, STAGES)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


def _descriptor(x: torch.Tensor, rows: int, rate: int, tile: int) -> TensorDescriptor:
    """x (B, N, H, D) as (batch, head, row, residue · token stride + channel): row t of residue a is position t·rate + a."""
    layout = gl.NVMMASharedLayout.get_default_for([1, 1, tile, x.shape[3]], gl.bfloat16)
    shape = [x.shape[0], x.shape[2], rows // rate, rate * x.stride(1)]
    return TensorDescriptor(x, shape, [x.stride(0), x.stride(2), rate * x.stride(1), 1], [1, 1, tile, x.shape[3]], layout)


def gluon_forward(
    family: NestedFamily, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool, scale: float, out: torch.Tensor, lse: torch.Tensor,
    *, tile_keys: int = TILE_KEYS, stages: int | None = None, programs: int | None = None,
) -> None:  # fmt: skip
    """The Gluon kernel, one launch per level; arguments as for ``nested_forward``, whose rule must have passed."""
    B, _, H, D = q.shape
    stages = (256 if D == 128 else 512) // tile_keys if stages is None else stages
    if programs is None:
        # Programs take every programs-th query tile, and costs of causal tiles repeat in powers of two: with an odd number each gets all kinds.
        programs = _multiprocessors(q.device) - (1 if is_causal and _multiprocessors(q.device) % 2 == 0 else 0)
    segments = family.num_positions // family.lengths[-1]
    offsets = device_offsets(family, q.device)
    for level in range(family.num_levels):
        if not family.row_steps(level):
            continue
        table = device_table(family, level, TILE_ROWS, tile_keys, is_causal, q.device)
        row, constants = level_constants(family, level, TILE_ROWS, table.width, H // k.shape[2])
        first = min(level, 1)
        rates = family.rates[first : level + 1]
        used = [*rates, *rates[-1:] * (MAX_DESCRIPTORS - len(rates))]
        total = constants[0] * constants[2] * segments * H * B
        nested_kernel[(min(total, programs),)](
            _descriptor(q, family.num_positions, row[1], WARPGROUP_ROWS), _descriptor(out, family.num_positions, row[1], WARPGROUP_ROWS),
            *(_descriptor(k, family.num_positions, r, tile_keys) for r in used), *(_descriptor(v, family.num_positions, r, tile_keys) for r in used),
            table.tiles, table.bias, table.counts, table.starts, offsets, lse, segments, total,
            q.stride(1), k.stride(1), v.stride(1), out.stride(1), lse.stride(0), lse.stride(1), lse.stride(2), scale,
            first, rates, row, constants, D, tile_keys, stages, is_causal, num_warps=4, maxnreg=168,
        )  # fmt: skip


@functools.lru_cache(maxsize=16)
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
