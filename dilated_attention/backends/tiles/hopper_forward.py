"""The forward over a table of tiles on Hopper: computes what ``tiles/forward.py`` computes, with a producer and two consumers.

A program takes tiles of 128 queries of one head, one after another. The producer copies a tile's queries, then its keys and values block by
block into a ring of stages. Each consumer is a warpgroup with 64 of the queries. It starts the scores of the next block of keys together
with p·v of the last one, and computes the exponentials while p·v runs.

The kernel has the arguments of the one in ``tiles/forward.py`` and the number of tiles. It has no padding, dropout or bias (``run.py``) and
does not read their arguments. ``scale`` includes log2(e), so exponentials and maxima are in base 2.
"""

# mypy does not know the types of kernels
# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from dilated_attention.backends.tiles.hopper_rows import (
    COPIERS,
    GROUPS,
    barriers,
    copy_offsets,
    copy_rows,
    exp2,
    following,
    halves,
    hide,
    product_layout,
    query_row,
    scores,
    store_tile,
)
from dilated_attention.backends.tiles.rows import LN_2, VARYING


@gluon.jit
def _produce(inputs, strides, shape, bounds, buffers, signals, total_tiles, D: gl.constexpr, FLAGS: gl.constexpr):
    """The producer: loads the queries of each tile, then blocks of keys and values.

    ``signals`` are barriers. *full* ones open when the producer's copies are complete, *empty* ones when both consumers have read them.
    """
    q_ptr, k_ptr, v_ptr, rows_ptr, offsets_ptr = inputs
    q_b, q_n, q_h, k_b, k_n, k_h, v_b, v_n, v_h = strides
    q_smem, k_smem, v_smem = buffers
    tile_full, tile_empty, k_full, v_full, k_empty, v_empty = signals
    group = shape[2]
    STAGES: gl.constexpr = k_smem.shape[0]
    BLOCK: gl.constexpr = k_smem.shape[1]
    COLUMNS: gl.constexpr = k_smem.shape[2]
    stage = 0
    # all buffers are empty at first: a new barrier counts as past phase 1, so the first waits for empty buffers pass
    phase = 1
    tile_phase = 1
    for index in range(gl.program_id(0), total_tiles, gl.num_programs(0)):
        batch, head, _branch, rate, first, count, i0, high, row, begin, steps, _place, _num_places = query_row(
            index, rows_ptr, offsets_ptr, shape, bounds, BLOCK, FLAGS
        )
        mbarrier.wait(tile_empty, tile_phase)
        tile_phase ^= 1
        q_base = q_ptr + batch * q_b + head.to(gl.int64) * q_h + row * q_n
        q_offsets = copy_offsets(rate * q_n, 64, COLUMNS)
        for g in gl.static_range(GROUPS):
            copy_rows(q_smem.index(g), q_base + 64 * g * rate * q_n, q_offsets, high - i0 - 64 * g, D)
        async_copy.mbarrier_arrive(tile_full, increment_count=False)
        kv_head = (head // group).to(gl.int64)
        position = first.to(gl.int64) + begin * rate
        k_at = k_ptr + batch * k_b + kv_head * k_h + position * k_n
        v_at = v_ptr + batch * v_b + kv_head * v_h + position * v_n
        k_offsets = copy_offsets(rate * k_n, BLOCK, COLUMNS)
        v_offsets = copy_offsets(rate * v_n, BLOCK, COLUMNS)
        rest = count - begin
        for _ in range(steps):
            mbarrier.wait(k_empty.index(stage), phase)
            copy_rows(k_smem.index(stage), k_at, k_offsets, rest, D)
            async_copy.mbarrier_arrive(k_full.index(stage), increment_count=False)
            mbarrier.wait(v_empty.index(stage), phase)
            copy_rows(v_smem.index(stage), v_at, v_offsets, rest, D)
            async_copy.mbarrier_arrive(v_full.index(stage), increment_count=False)
            k_at += BLOCK * rate * k_n
            v_at += BLOCK * rate * v_n
            rest -= BLOCK
            stage, phase = following(stage, phase, STAGES)


@gluon.jit
def _softmax_step(s, first_key, i0, count, bounds, scale, row_max, row_sum, FLAGS: gl.constexpr):
    """Adds keys [first_key, first_key + BLOCK) to the online softmax of 64 queries from i0 on.

    Returns (weights p, factor alpha of what was summed before, new row maximum, new row sum).
    """
    s = hide(s, first_key, i0, count, bounds, -float("inf"), FLAGS)
    new_max = gl.maximum(row_max, gl.max(s, 1) * scale)
    # in a row that has seen no key yet, −inf − (−inf) would be NaN
    shift = gl.where(new_max == -float("inf"), 0.0, new_max)
    p = exp2(s * scale - gl.expand_dims(shift, 1))
    alpha = exp2(row_max - shift)
    return p, alpha, new_max, row_sum * alpha + gl.sum(p, 1)


@gluon.jit
def _consume(
    PART: gl.constexpr, FLAGS: gl.constexpr, inputs, outputs, strides, shape, bounds,
    buffers, signals, total_tiles, num_queries, part_rows, direct, scale,
    D: gl.constexpr, D0: gl.constexpr, D1: gl.constexpr,
):  # fmt: skip
    """Consumer warpgroup PART: computes 64 queries of each tile.

    The branch numbered ``direct`` writes into out and lse. Other branches write results that are merged later into parts and part_lse, from
    row ``place`` on.
    """
    rows_ptr, offsets_ptr = inputs
    out_ptr, lse_ptr, parts_ptr, part_lse_ptr = outputs
    o_b, o_n, o_h = strides
    q_smem, k_smem, v_smem = buffers
    tile_full, tile_empty, k_full, v_full, k_empty, v_empty = signals
    num_heads = shape[1]
    STAGES: gl.constexpr = k_smem.shape[0]
    BLOCK: gl.constexpr = k_smem.shape[1]
    COLUMNS: gl.constexpr = k_smem.shape[2]
    dtype: gl.constexpr = q_smem.dtype
    s_layout: gl.constexpr = product_layout(BLOCK)
    o_layout: gl.constexpr = product_layout(COLUMNS)
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    by_row: gl.constexpr = gl.SliceLayout(1, s_layout)
    o_row: gl.constexpr = gl.SliceLayout(1, o_layout)
    zeros = gl.zeros([64, BLOCK], gl.float32, s_layout)
    stage = 0
    phase = 0
    tile_phase = 0
    for index in range(gl.program_id(0), total_tiles, gl.num_programs(0)):
        batch, head, branch, rate, _first, count, i0, high, row, begin, steps, place, num_places = query_row(
            index, rows_ptr, offsets_ptr, shape, bounds, BLOCK, FLAGS
        )
        i0 += PART * 64
        row += PART * 64 * rate
        place += PART * 64
        mbarrier.wait(tile_full, tile_phase)
        tile_phase ^= 1
        fence_async_shared()
        q0, q1 = halves(q_smem.index(PART), D0, D1)
        first_key = begin
        # the first block: scores and softmax alone
        mbarrier.wait(k_full.index(stage), phase)
        fence_async_shared()
        s_running = scores(q0, q1, k_smem.index(stage), zeros, D0, D1)
        o = gl.zeros([64, COLUMNS], gl.float32, o_layout)
        row_max = gl.full([64], -float("inf"), gl.float32, by_row)
        row_sum = gl.zeros([64], gl.float32, by_row)
        s = warpgroup_mma_wait(0, deps=(s_running,))
        mbarrier.arrive(k_empty.index(stage), count=1)
        p, alpha, row_max, row_sum = _softmax_step(s, first_key, i0, count, bounds, scale, row_max, row_sum, FLAGS)
        weights = gl.convert_layout(p.to(dtype), p_layout)
        last_stage = stage
        last_phase = phase
        stage, phase = following(stage, phase, STAGES)
        mbarrier.wait(k_full.index(stage), phase, pred=steps > 1)
        # block t: its scores begin, then p·v of block t − 1, which was in ``last_stage``; its softmax runs beside them
        for t in range(1, steps):
            first_key += BLOCK
            fence_async_shared()
            s_running = scores(q0, q1, k_smem.index(stage), zeros, D0, D1)
            mbarrier.wait(v_full.index(last_stage), last_phase)
            fence_async_shared()
            o_running = warpgroup_mma(weights, v_smem.index(last_stage), o, is_async=True)
            s = warpgroup_mma_wait(1, deps=(s_running,))
            mbarrier.arrive(k_empty.index(stage), count=1)
            p, alpha, row_max, row_sum = _softmax_step(s, first_key, i0, count, bounds, scale, row_max, row_sum, FLAGS)
            this_stage = stage
            this_phase = phase
            stage, phase = following(stage, phase, STAGES)
            # This wait's branch keeps ptxas from moving the softmax below the next wait. So does passing p through the next wait.
            mbarrier.wait(k_full.index(stage), phase, pred=t + 1 < steps)
            o, p, weights = warpgroup_mma_wait(0, deps=(o_running, p, weights))
            mbarrier.arrive(v_empty.index(last_stage), count=1)
            o = o * gl.expand_dims(gl.convert_layout(alpha, o_row), 1)
            weights = gl.convert_layout(p.to(dtype), p_layout)
            last_stage = this_stage
            last_phase = this_phase
        mbarrier.arrive(tile_empty, count=1)
        # p·v of the last block
        mbarrier.wait(v_full.index(last_stage), last_phase)
        fence_async_shared()
        o_running = warpgroup_mma(weights, v_smem.index(last_stage), o, is_async=True)
        if FLAGS.ZERO_KEYS:
            # keys of score 0 and value 0, in place of the positions that the segment lacks; they add to the row sum, not to o
            num_zeros = (num_places - count).to(gl.float32)
            new_max = gl.where(num_zeros > 0, gl.maximum(row_max, 0.0), row_max)
            alpha = gl.where(new_max == -float("inf"), 0.0, exp2(row_max - gl.where(new_max == -float("inf"), 0.0, new_max)))
            row_sum = row_sum * alpha + gl.where(num_zeros > 0, num_zeros * exp2(-new_max), 0.0)
            row_max = new_max
        empty = row_sum == 0
        inverse = 1 / gl.where(empty, 1.0, row_sum)
        if FLAGS.ZERO_KEYS:
            inverse = inverse * alpha
        row_lse = gl.where(empty, -float("inf"), (row_max + gl.log2(gl.where(empty, 1.0, row_sum))) * LN_2)
        head_row = batch * num_heads + head
        out_base = parts_ptr + (head_row * part_rows + place) * D
        out_step = rate * 0 + D
        lse_base = part_lse_ptr + head_row * part_rows + place
        if branch == direct:
            out_base = out_ptr + batch * o_b + head.to(gl.int64) * o_h + row * o_n
            out_step = rate * o_n
            lse_base = lse_ptr + head_row * num_queries + row
        local = gl.arange(0, 64, layout=by_row)
        gl.store(lse_base + local, row_lse, mask=local < high - i0)
        o = warpgroup_mma_wait(0, deps=(o_running,))
        mbarrier.arrive(v_empty.index(last_stage), count=1)
        store_tile(out_base, out_step, high - i0, o * gl.expand_dims(gl.convert_layout(inverse, o_row), 1), D)


@gluon.jit(do_not_specialize=[*VARYING, "total"])
def forward_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, parts_ptr, part_lse_ptr, rows_ptr, offsets_ptr, padding_ptr, words_a_ptr, words_c_ptr,
    words_b_ptr, bias_ptr, q_b, q_n, q_h, k_b, k_n, k_h, v_b, v_n, v_h, o_b, o_n, o_h, pad_b, pad_branch,
    num_batches, num_heads, group, q_first, q_last, num_queries, num_keys, part_rows, direct, left, right, scale, threshold,
    keep_scale, total,
    D: gl.constexpr, D0: gl.constexpr, D1: gl.constexpr, COLUMNS: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr,
    FLAGS: gl.constexpr,
):  # fmt: skip
    """Computes out and lse of ``total`` tiles, of 64 queries per consumer."""
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    tile_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, COLUMNS], dtype)
    q_smem = gl.allocate_shared_memory(dtype, [GROUPS, 64, COLUMNS], tile_layout)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK, COLUMNS], tile_layout)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK, COLUMNS], tile_layout)
    tile_full, tile_empty = barriers(1, COPIERS).index(0), barriers(1, GROUPS).index(0)
    k_full, v_full = barriers(STAGES, COPIERS), barriers(STAGES, COPIERS)
    k_empty, v_empty = barriers(STAGES, GROUPS), barriers(STAGES, GROUPS)
    fence_async_shared()
    part0: gl.constexpr = 0
    part1: gl.constexpr = 1
    buffers = (q_smem, k_smem, v_smem)
    signals = (tile_full, tile_empty, k_full, v_full, k_empty, v_empty)
    shape = (num_batches, num_heads, group, q_first, q_last, num_keys)
    bounds = (left, right)
    strides = (q_b, q_n, q_h, k_b, k_n, k_h, v_b, v_n, v_h)
    out_strides = (o_b, o_n, o_h)
    inputs = (q_ptr, k_ptr, v_ptr, rows_ptr, offsets_ptr)
    outputs = (out_ptr, lse_ptr, parts_ptr, part_lse_ptr)
    tables = (rows_ptr, offsets_ptr)
    gl.warp_specialize(
        [
            (_consume, (part0, FLAGS, tables, outputs, out_strides, shape, bounds, buffers, signals, total,
                       num_queries, part_rows, direct, scale, D, D0, D1)),
            (_consume, (part1, FLAGS, tables, outputs, out_strides, shape, bounds, buffers, signals, total,
                       num_queries, part_rows, direct, scale, D, D0, D1)),
            (_produce, (inputs, strides, shape, bounds, buffers, signals, total, D, FLAGS)),
        ],
        # of the second consumer and the producer: warps, then registers of a thread; the first consumer has the program's own
        [4, 4],
        [224, 56],
    )  # fmt: skip
