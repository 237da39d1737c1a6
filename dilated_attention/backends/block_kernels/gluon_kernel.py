"""The block-sparse forward on Hopper, written in Gluon: one warp loads by TMA, and two warpgroups multiply and exponentiate.

A program processes query blocks of 128 rows in turn. Its loading warp walks their lists of key blocks and keeps a ring of key and value
tiles full *across query blocks*. So a query block with five key blocks costs five steps, and no time to fill a pipeline. Kernels with one
query block per program lose that time below 10 % density. Each consumer warpgroup owns 64 rows: it issues Q·Kᵀ of the next key tile and P·V
of the last one, and computes the softmax of the next tile while P·V runs.
"""

# mypy does not know the types of kernels
# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from dilated_attention.backends.tiles.hopper.kernel_rows import barriers, exp2

# renamed in Triton 3.7
_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier


@gluon.jit
def _decode(index, lists, SHAPE: gl.constexpr):
    """index → (query block, head, batch entry, first entry of its list, one past its last entry)."""
    starts_ptr, _, _, _, order_ptr, num_rows, _ = lists
    HEADS: gl.constexpr = SHAPE[0]
    GROUP_BATCH: gl.constexpr = SHAPE[2]
    GROUP_HEAD: gl.constexpr = SHAPE[3]
    if SHAPE[4]:
        index = gl.load(order_ptr + index)
    row = index % num_rows
    head = index // num_rows % HEADS
    batch = index // num_rows // HEADS
    at = starts_ptr + (batch * GROUP_BATCH + head * GROUP_HEAD) * num_rows + row
    return row, head, batch, gl.load(at), gl.load(at + 1)


@gluon.jit
def _load(desc, smem, full, empty, done, STAGES: gl.constexpr, batch, head, row):
    """Starts to load this program's key or value tile number ``done`` into its stage of the ring."""
    stage = done % STAGES
    mbarrier.wait(empty.index(stage), ((done // STAGES) & 1) ^ 1)
    mbarrier.expect(full.index(stage), desc.block_type.nbytes)
    tma.async_copy_global_to_shared(desc, [batch, head, row, 0], full.index(stage), smem.index(stage))


@gluon.jit
def _produce(descs, shared_memory, lists, total, SHAPE: gl.constexpr, STAGES: gl.constexpr, TILE_KEYS: gl.constexpr, SPLIT: gl.constexpr):
    """The loading warp: loads the queries of each of the program's blocks, and the key and value tiles of their lists.

    SPLIT: key tiles per block.
    """
    q_desc, k_desc, v_desc, _ = descs
    q_smem, k_smem, v_smem, _, q_full, q_empty, k_full, k_empty, v_full, v_empty = shared_memory
    columns_ptr = lists[1]
    num_entries = lists[6]
    GROUP: gl.constexpr = SHAPE[1]
    done = 0
    round_ = 0
    for index in range(gl.program_id(0), total, gl.num_programs(0)):
        row, head, batch, first, last = _decode(index, lists, SHAPE)
        # a block with an empty list still loads one tile, which its consumers mask
        count = gl.maximum(last - first, 1) * SPLIT
        kv_head = head // GROUP
        last_row = 0
        # keys are loaded one tile ahead of values, in the order of consumption
        for j in range(count + 1):
            if j == 0:
                mbarrier.wait(q_empty, (round_ & 1) ^ 1)
                mbarrier.expect(q_full, 2 * q_desc.block_type.nbytes)
                for part in gl.static_range(2):
                    tma.async_copy_global_to_shared(q_desc, [batch, head, row * 128 + part * 64, 0], q_full, q_smem.index(part))
            key_row = last_row
            if j < count:
                entry = gl.minimum(first + j // SPLIT, num_entries - 1)
                key_row = (gl.load(columns_ptr + entry) * SPLIT + j % SPLIT) * TILE_KEYS
                _load(k_desc, k_smem, k_full, k_empty, done + j, STAGES[0], batch, kv_head, key_row)
            if j > 0:
                _load(v_desc, v_smem, v_full, v_empty, done + j - 1, STAGES[1], batch, kv_head, last_row)
            last_row = key_row
        done += count
        round_ += 1  # noqa: SIM113


@gluon.jit
def _hide(
    s, j, first, last, lists, first_row, num_keys, TILE_KEYS: gl.constexpr, SPLIT: gl.constexpr, MASKED: gl.constexpr, RAGGED: gl.constexpr
):
    """Sets s to −inf at pairs that the j-th tile of the list does not keep. first_row: this warpgroup's first row in the query block."""
    _, columns_ptr, masks_ptr, bits_ptr, _, _, num_entries = lists
    entry = gl.minimum(first + j // SPLIT, num_entries - 1)
    part = j % SPLIT
    columns = gl.arange(0, TILE_KEYS, layout=gl.SliceLayout(0, s.type.layout))
    if last == first:
        s = gl.full(s.shape, float("-inf"), gl.float32, s.type.layout)
    if MASKED:
        mask = gl.load(masks_ptr + entry)
        if mask >= 0:
            rows = gl.arange(0, 64, layout=gl.SliceLayout(1, s.type.layout)) + first_row
            WORDS: gl.constexpr = TILE_KEYS * SPLIT // 32
            word = (
                bits_ptr
                + mask.to(gl.int64) * (128 * WORDS)
                + gl.expand_dims(rows * WORDS, 1)
                + gl.expand_dims((part * TILE_KEYS + columns) // 32, 0)
            )
            kept = (gl.load(word) >> gl.expand_dims(columns % 32, 0)) & 1
            s = gl.where(kept != 0, s, float("-inf"))
    if RAGGED:
        left = num_keys - (gl.load(columns_ptr + entry) * SPLIT + part) * TILE_KEYS
        if left < TILE_KEYS:
            s = gl.where(gl.expand_dims(columns, 0) < left, s, float("-inf"))
    return s


@gluon.jit
def _weights(s, highest, scale_log2):
    """Computes one step of the online softmax: (weights, new row maximum)."""
    new = gl.maximum(highest, gl.max(s, 1))
    return exp2(s * scale_log2 - gl.expand_dims(new * scale_log2, 1)), new


@gluon.jit
def _times(x, factor_of_row):
    return x * gl.expand_dims(gl.convert_layout(factor_of_row, gl.SliceLayout(1, x.type.layout)), 1)


@gluon.jit
def _consume(
    PART: gl.constexpr, descs, shared_memory, lists, total_blocks, lse_ptr, lse_strides, sizes, scale,
    SHAPE: gl.constexpr, STAGES: gl.constexpr, D: gl.constexpr, TILE_KEYS: gl.constexpr, SPLIT: gl.constexpr,
    MASKED: gl.constexpr, RAGGED: gl.constexpr,
):  # fmt: skip
    """Consumer warpgroup PART: computes 64 rows of each of the program's query blocks.

    All their key tiles form one pipeline: P·V of the last tile of a block overlaps with Q·Kᵀ and the softmax of the next block's first
    tile, just as inside a block.
    """
    q_smem, k_smem, v_smem, o_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty = shared_memory
    o_desc = descs[3]
    lse_batch, lse_head, lse_token = lse_strides
    num_queries, num_keys = sizes
    K_STAGES: gl.constexpr = STAGES[0]
    V_STAGES: gl.constexpr = STAGES[1]
    dtype: gl.constexpr = k_smem.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE_KEYS, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    q_layout: gl.constexpr = gl.DotOperandLayout(0, s_layout, 2)
    q_shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, D], dtype)
    k_shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE_KEYS, D], dtype)
    first_row: gl.constexpr = PART * 64
    scale_log2 = scale * 1.4426950408889634
    zeros = gl.zeros([64, TILE_KEYS], gl.float32, s_layout)
    lowest = gl.full([64], -1e30, gl.float32, row_layout)

    row, head, batch, first, last = _decode(gl.program_id(0), lists, SHAPE)
    mbarrier.wait(q_full, 0)
    # the queries are held in registers, so that the next ones can load while these are used
    q = q_smem.index(PART)._reinterpret(dtype, [64, D], q_shared).load(q_layout)
    fence_async_shared()
    mbarrier.arrive(q_empty, count=1)
    mbarrier.wait(k_full.index(0), 0)
    k = k_smem.index(0)._reinterpret(dtype, [TILE_KEYS, D], k_shared)
    s = warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=(s,))
    mbarrier.arrive(k_empty.index(0), count=1)
    s = _hide(s, 0, first, last, lists, first_row, num_keys, TILE_KEYS, SPLIT, MASKED, RAGGED)
    weights, highest = _weights(s, lowest, scale_log2)
    total = gl.sum(weights, 1)
    p = gl.convert_layout(weights.to(dtype), p_layout)
    done = 0
    round_ = 0
    for index in range(gl.program_id(0), total_blocks, gl.num_programs(0)):
        count = gl.maximum(last - first, 1) * SPLIT
        has_next = index + gl.num_programs(0) < total_blocks
        # loaded here, long before it is needed, to hide the latency
        next_index = gl.minimum(index + gl.num_programs(0), total_blocks - 1)
        next_row, next_head, next_batch, next_first, next_last = _decode(next_index, lists, SHAPE)
        o = gl.zeros([64, D], gl.float32, o_layout)
        k_stage = (done + 1) % K_STAGES
        mbarrier.wait(k_full.index(k_stage), ((done + 1) // K_STAGES) & 1, pred=count > 1)

        for j in range(1, count):
            k = k_smem.index(k_stage)._reinterpret(dtype, [TILE_KEYS, D], k_shared)
            s_running = warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
            v_stage = done % V_STAGES
            mbarrier.wait(v_full.index(v_stage), (done // V_STAGES) & 1)
            v = v_smem.index(v_stage)._reinterpret(dtype, [TILE_KEYS, D], k_shared)
            o_running = warpgroup_mma(p, v, o, is_async=True)
            s = warpgroup_mma_wait(1, deps=(s_running,))
            mbarrier.arrive(k_empty.index(k_stage), count=1)
            if MASKED or RAGGED:
                s = _hide(s, j, first, last, lists, first_row, num_keys, TILE_KEYS, SPLIT, MASKED, RAGGED)
            before = highest
            weights, highest = _weights(s, highest, scale_log2)
            rescale = exp2((before - highest) * scale_log2)
            total = total * rescale + gl.sum(weights, 1)
            # The wait for the key tile after the next must be here: its branch, and passing the new weights through the wait for P·V, keep
            # LLVM and ptxas from sinking the softmax below that wait, where it would overlap with nothing.
            done += 1
            k_stage = (done + 1) % K_STAGES
            mbarrier.wait(k_full.index(k_stage), ((done + 1) // K_STAGES) & 1, pred=j + 1 < count)
            o, p, weights = warpgroup_mma_wait(0, deps=(o_running, p, weights))
            mbarrier.arrive(v_empty.index(v_stage), count=1)
            o = _times(o, rescale)
            p = gl.convert_layout(weights.to(dtype), p_layout)

        # After the program's last block, the product for the next block uses arbitrary data, and its result is never read.
        mbarrier.wait(q_full, (round_ + 1) & 1, pred=has_next)
        q = q_smem.index(PART)._reinterpret(dtype, [64, D], q_shared).load(q_layout)
        fence_async_shared()
        mbarrier.arrive(q_empty, count=1, pred=has_next)
        mbarrier.wait(k_full.index(k_stage), ((done + 1) // K_STAGES) & 1, pred=has_next)
        k = k_smem.index(k_stage)._reinterpret(dtype, [TILE_KEYS, D], k_shared)
        s_running = warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
        v_stage = done % V_STAGES
        mbarrier.wait(v_full.index(v_stage), (done // V_STAGES) & 1)
        v = v_smem.index(v_stage)._reinterpret(dtype, [TILE_KEYS, D], k_shared)
        o_running = warpgroup_mma(p, v, o, is_async=True)
        s = warpgroup_mma_wait(1, deps=(s_running,))
        mbarrier.arrive(k_empty.index(k_stage), count=1, pred=has_next)
        s = _hide(s, 0, next_first, next_last, lists, first_row, num_keys, TILE_KEYS, SPLIT, MASKED, RAGGED)
        weights, next_highest = _weights(s, lowest, scale_log2)
        # a row without kept keys is 0 with lse −inf
        some = total > 0
        lse = gl.where(some, highest * scale + gl.log2(total) * 0.6931471805599453, float("-inf"))
        rows = row * 128 + first_row + gl.arange(0, 64, layout=row_layout)
        where = lse_ptr + batch.to(gl.int64) * lse_batch + head.to(gl.int64) * lse_head + rows.to(gl.int64) * lse_token
        gl.store(where, lse, mask=rows < num_queries)
        inverse = gl.where(some, 1.0 / total, 0.0)
        done += 1
        # the store of the previous query block must have finished reading its buffer
        tma.store_wait(0)
        o, p, weights = warpgroup_mma_wait(0, deps=(o_running, p, weights))
        mbarrier.arrive(v_empty.index(v_stage), count=1)
        _barrier()
        o_smem.index(PART)._reinterpret(dtype, [64, D], q_shared).store(_times(o, inverse).to(dtype))
        fence_async_shared()
        _barrier()
        tma.async_copy_shared_to_global(o_desc, [batch, head, row * 128 + first_row, 0], o_smem.index(PART))
        total = gl.sum(weights, 1)
        p = gl.convert_layout(weights.to(dtype), p_layout)
        highest = next_highest
        row = next_row
        head = next_head
        batch = next_batch
        first = next_first
        last = next_last
        round_ += 1  # noqa: SIM113
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["num_rows", "num_entries", "total", "num_queries", "num_keys"])
def blocks_kernel(
    q_desc, k_desc, v_desc, o_desc, starts_ptr, columns_ptr, masks_ptr, bits_ptr, order_ptr, lse_ptr,
    num_rows, num_entries, total, num_queries, num_keys, lse_batch, lse_head, lse_token, scale,
    SHAPE: gl.constexpr, D: gl.constexpr, TILE_KEYS: gl.constexpr, SPLIT: gl.constexpr, STAGES: gl.constexpr,
    MASKED: gl.constexpr, RAGGED: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """Writes out through ``o_desc`` and lse.

    SHAPE: (query heads, query heads per key head, list groups per batch entry, per head, whether to read order_ptr).
    STAGES: (key stages, value stages). REGISTERS: registers of a consumer thread and of a thread of the loading warp.
    """
    K_STAGES: gl.constexpr = STAGES[0]
    V_STAGES: gl.constexpr = STAGES[1]
    q_smem = gl.allocate_shared_memory(q_desc.dtype, [2, 1, 1, 64, D], q_desc.layout)
    o_smem = gl.allocate_shared_memory(q_desc.dtype, [2, 1, 1, 64, D], o_desc.layout)
    k_smem = gl.allocate_shared_memory(q_desc.dtype, [K_STAGES, 1, 1, TILE_KEYS, D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(q_desc.dtype, [V_STAGES, 1, 1, TILE_KEYS, D], v_desc.layout)
    q_full, q_empty = barriers(1, 1).index(0), barriers(1, 2).index(0)
    k_full, k_empty = barriers(K_STAGES, 1), barriers(K_STAGES, 2)
    v_full, v_empty = barriers(V_STAGES, 1), barriers(V_STAGES, 2)
    fence_async_shared()
    descs = (q_desc, k_desc, v_desc, o_desc)
    shared = (q_smem, k_smem, v_smem, o_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty)
    lists = (starts_ptr, columns_ptr, masks_ptr, bits_ptr, order_ptr, num_rows, num_entries)
    strides = (lse_batch, lse_head, lse_token)
    sizes = (num_queries, num_keys)
    part0: gl.constexpr = 0
    part1: gl.constexpr = 1
    gl.warp_specialize(
        [
            (
                _consume,
                (part0, descs, shared, lists, total, lse_ptr, strides, sizes, scale, SHAPE, STAGES, D, TILE_KEYS, SPLIT, MASKED, RAGGED),
            ),
            (
                _consume,
                (part1, descs, shared, lists, total, lse_ptr, strides, sizes, scale, SHAPE, STAGES, D, TILE_KEYS, SPLIT, MASKED, RAGGED),
            ),
            (_produce, (descs, shared, lists, total, SHAPE, STAGES, TILE_KEYS, SPLIT)),
        ],
        [4, 1],
        REGISTERS,
    )
