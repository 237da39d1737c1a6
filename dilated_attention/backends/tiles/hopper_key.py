"""dk and dv over a table of tiles on Hopper: ``key_kernel`` of ``tiles/backward.py`` with the same arguments and formulas.

A program has a producer and two consumer warpgroups, and with P programs processes every P-th row of the table. Its producer continues with
the next row while the consumers finish the last, so the ring of stages never drains. Each consumer starts the scores of the next block
together with the last block's contribution to dk, and computes the exponentials meanwhile.

No product is in flight from one iteration to the next, and tiles stay in shared memory. With accumulators in flight ptxas serialises the
products (C7512), and in some forms of the loop it let factors computed in an iteration overwrite those held in registers across iterations.

Tried on an H200 and not adopted, since the time did not change or increased: three warpgroups with blocks of 32 queries (+18 %), a program
for each row of the table (−5 to +2 %), six stages (±2 %), head dim 48 multiplied as 64 (+7 %).
"""

# mypy does not know the types of kernels
# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from dilated_attention.backends.tiles.hopper_rows import (
    COPIERS,
    GROUPS,
    ROWS,
    barriers,
    copy_numbers,
    copy_offsets,
    copy_rows,
    exp2,
    following,
    halves,
    product_layout,
    scores,
    store_tile,
)
from dilated_attention.backends.tiles.rows import VARYING, read_segment


@gluon.jit
def _key_range(j0, count, low, high, bounds, BLOCK: gl.constexpr, FLAGS: gl.constexpr):
    """Returns (first query that sees some of the tile's keys, number of blocks of such queries)."""
    left, right = bounds
    begin = low
    end = high
    if FLAGS.RIGHT:
        begin = gl.minimum(gl.maximum(j0 - right, low), high)
    if FLAGS.LEFT:
        end = gl.maximum(gl.minimum(high, gl.minimum(j0 + ROWS, count) + left), begin)
    steps = (gl.maximum(end - begin, 0) + BLOCK - 1) // BLOCK
    # a tile without queries also processes one block, which is fully masked
    return begin, gl.where(j0 < count, gl.maximum(steps, 1), 1)


@gluon.jit
def _key_row(
    index, rows_ptr, offsets_ptr, shape, bounds, BLOCK: gl.constexpr, FLAGS: gl.constexpr
):  # fmt: skip
    """Returns what the producer and the consumers need from a row of the table of keys."""
    num_batches, num_heads, kv_heads, group, q_first, q_last, num_keys = shape
    heads = kv_heads if FLAGS.SHARED else num_heads
    result_head = index % heads
    batch = (index // heads % num_batches).to(gl.int64)
    first_head = result_head * group if FLAGS.SHARED else result_head
    branch, rate, first, count, low, high, tile, place, _places, delta_place = read_segment(
        rows_ptr, index // (heads * num_batches), offsets_ptr, num_heads, first_head, q_first, q_last, num_keys, FLAGS.CUT
    )
    j0 = tile * ROWS
    begin, steps = _key_range(j0, count, low, high, bounds, BLOCK, FLAGS)
    return batch, result_head, first_head, branch, rate.to(gl.int64), first, count, j0, low, high, begin, steps, place, delta_place


@gluon.jit
def _key_produce(inputs, strides, shape, bounds, buffers, signals, total, delta_rows, D: gl.constexpr, FLAGS: gl.constexpr):
    """The producer of ``key_kernel``: loads keys and values of each row's tile, then blocks of queries with their dout and statistics."""
    q_ptr, k_ptr, v_ptr, dout_ptr, stats_ptr, rows_ptr, offsets_ptr = inputs
    q_b, q_n, q_h, k_b, k_n, k_h, v_b, v_n, v_h, do_b, do_n, do_h = strides
    k_smem, v_smem, q_smem, do_smem, lse_smem, delta_smem, a_smem, c_smem = buffers
    tile_full, tile_empty, full, empty = signals
    num_heads = shape[1]
    group = shape[3]
    q_first = shape[4]
    STATS: gl.constexpr = 4 if FLAGS.DROPOUT else 2
    STAGES: gl.constexpr = q_smem.shape[0]
    BLOCK: gl.constexpr = q_smem.shape[1]
    COLUMNS: gl.constexpr = q_smem.shape[2]
    stage = 0
    phase = 1
    tile_phase = 1
    for index in range(gl.program_id(0), total, gl.num_programs(0)):
        batch, _result_head, first_head, _branch, rate, first, count, j0, low, high, begin, steps, _place, delta_place = _key_row(
            index, rows_ptr, offsets_ptr, shape, bounds, BLOCK, FLAGS
        )
        kv_head = (first_head // group).to(gl.int64)
        row = first.to(gl.int64) + j0 * rate
        k_base = k_ptr + batch * k_b + kv_head * k_h + row * k_n
        v_base = v_ptr + batch * v_b + kv_head * v_h + row * v_n
        k_offsets = copy_offsets(rate * k_n, 64, COLUMNS)
        v_offsets = copy_offsets(rate * v_n, 64, COLUMNS)
        mbarrier.wait(tile_empty, tile_phase)
        tile_phase ^= 1
        for part in gl.static_range(GROUPS):
            copy_rows(k_smem.index(part), k_base + 64 * part * rate * k_n, k_offsets, count - j0 - 64 * part, D)
            copy_rows(v_smem.index(part), v_base + 64 * part * rate * v_n, v_offsets, count - j0 - 64 * part, D)
        async_copy.mbarrier_arrive(tile_full, increment_count=False)
        q_offsets = copy_offsets(rate * q_n, BLOCK, COLUMNS)
        do_offsets = copy_offsets(rate * do_n, BLOCK, COLUMNS)
        q_row = (first - q_first).to(gl.int64) + begin * rate
        for h in range(group if FLAGS.SHARED else 1):
            head = (first_head + h).to(gl.int64)
            q_at = q_ptr + batch * q_b + head * q_h + q_row * q_n
            do_at = dout_ptr + batch * do_b + head * do_h + q_row * do_n
            delta_at = stats_ptr + STATS * ((batch * num_heads + head) * delta_rows) + delta_place - low + begin
            rest = high - begin
            for _ in range(steps):
                mbarrier.wait(empty.index(stage), phase)
                copy_rows(q_smem.index(stage), q_at, q_offsets, rest, D)
                copy_numbers(lse_smem.index(stage), delta_at + delta_rows, 1, rest)
                copy_rows(do_smem.index(stage), do_at, do_offsets, rest, D)
                copy_numbers(delta_smem.index(stage), delta_at, 1, rest)
                if FLAGS.DROPOUT:
                    copy_numbers(a_smem.index(stage), delta_at + 2 * delta_rows, 1, rest)
                    copy_numbers(c_smem.index(stage), delta_at + 3 * delta_rows, 1, rest)
                async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
                q_at += BLOCK * rate * q_n
                do_at += BLOCK * rate * do_n
                delta_at += BLOCK
                rest -= BLOCK
                stage, phase = following(stage, phase, STAGES)


@gluon.jit
def _key_weights(s, a, j0, high, bounds, scale, lse, FLAGS: gl.constexpr):
    """Computes p of 64 keys by queries [a, a + BLOCK)."""
    BLOCK: gl.constexpr = s.shape[1]
    layout: gl.constexpr = s.type.layout
    by_query: gl.constexpr = gl.SliceLayout(0, layout)
    left, right = bounds
    p = exp2(s * scale - gl.expand_dims(lse, 0))
    masked = a + BLOCK > high
    if FLAGS.RIGHT:
        masked = masked | (a + right < j0 + 63)
    if FLAGS.LEFT:
        masked = masked | (a + BLOCK - 1 > j0 + left)
    if masked:
        i = gl.expand_dims(a + gl.arange(0, BLOCK, layout=by_query), 0)
        good = i < high
        if FLAGS.RIGHT or FLAGS.LEFT:
            j = gl.expand_dims(j0 + gl.arange(0, 64, layout=gl.SliceLayout(1, layout)), 1)
            if FLAGS.RIGHT:
                good = good & (j <= i + right)
            if FLAGS.LEFT:
                good = good & (j >= i - left)
        p = gl.where(good, p, 0.0)
    return p


@gluon.jit
def _kept(a_smem, c_smem, word_b, threshold, layout: gl.constexpr):
    """Whether dropout keeps each pair of 64 keys and a block of queries: see ``rows.kept``."""
    by_query: gl.constexpr = gl.SliceLayout(0, layout)
    word_a = gl.expand_dims(a_smem.load(by_query).to(gl.int32, bitcast=True), 0)
    word_c = gl.expand_dims(c_smem.load(by_query).to(gl.int32, bitcast=True), 0)
    x = (word_a ^ gl.expand_dims(word_b, 1)) * word_c
    return x.to(gl.uint32, bitcast=True) >= threshold.to(gl.uint32, bitcast=True)


@gluon.jit
def _key_consume(
    PART: gl.constexpr, FLAGS: gl.constexpr, inputs, outputs, strides, shape, bounds,
    buffers, signals, total, part_rows, direct, scale, natural_scale, threshold, keep_scale,
    D: gl.constexpr, D0: gl.constexpr, D1: gl.constexpr,
):  # fmt: skip
    """Consumer warpgroup PART of ``key_kernel``: computes dk and dv of 64 keys; scores are (keys, queries)."""
    rows_ptr, offsets_ptr, padding_ptr, words_ptr = inputs
    dk_ptr, dv_ptr, dk_parts_ptr, dv_parts_ptr = outputs
    dk_b, dk_n, dk_h, dv_b, dv_n, dv_h, pad_b = strides
    k_smem, v_smem, q_smem, do_smem, lse_smem, delta_smem, a_smem, c_smem = buffers
    tile_full, tile_empty, full, empty = signals
    kv_heads = shape[2]
    group = shape[3]
    STAGES: gl.constexpr = q_smem.shape[0]
    BLOCK: gl.constexpr = q_smem.shape[1]
    COLUMNS: gl.constexpr = q_smem.shape[2]
    dtype: gl.constexpr = q_smem.dtype
    s_layout: gl.constexpr = product_layout(BLOCK)
    o_layout: gl.constexpr = product_layout(COLUMNS)
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    by_query: gl.constexpr = gl.SliceLayout(0, s_layout)
    by_key: gl.constexpr = gl.SliceLayout(1, s_layout)
    PIECES: gl.constexpr = 2 if D1 > 0 else 1
    zeros = gl.zeros([64, BLOCK], gl.float32, s_layout)
    local = gl.arange(0, 64, layout=by_key)
    word_b = local
    # a zero that is not a compile-time constant: see rows.drop
    nothing = scale * 0.0
    stage = 0
    phase = 0
    tile_phase = 0
    for index in range(gl.program_id(0), total, gl.num_programs(0)):
        batch, result_head, first_head, branch, rate, first, count, j0, _low, high, begin, steps, place, _delta_place = _key_row(
            index, rows_ptr, offsets_ptr, shape, bounds, BLOCK, FLAGS
        )
        j0 += PART * 64
        if FLAGS.DROPOUT:
            # with dropout there is one query head, so these are its words
            word_at = words_ptr + (batch * shape[1] + first_head) * shape[6] + first + (j0 + local).to(gl.int64) * rate
            word_b = gl.load(word_at, mask=local < count - j0, other=0)
        mbarrier.wait(tile_full, tile_phase)
        tile_phase ^= 1
        fence_async_shared()
        k0, k1 = halves(k_smem.index(PART), D0, D1)
        v0, v1 = halves(v_smem.index(PART), D0, D1)
        dk = gl.zeros([64, COLUMNS], gl.float32, o_layout)
        dv = gl.zeros([64, COLUMNS], gl.float32, o_layout)
        a = begin
        total_steps = steps * group if FLAGS.SHARED else steps
        mbarrier.wait(full.index(stage), phase)
        fence_async_shared()
        s_running = scores(k0, k1, q_smem.index(stage), zeros, D0, D1)
        dp_running = scores(v0, v1, do_smem.index(stage), zeros, D0, D1)
        lse = lse_smem.index(stage).load(by_query)
        delta = gl.expand_dims(delta_smem.index(stage).load(by_query), 0)
        s = warpgroup_mma_wait(PIECES, deps=(s_running,))
        p = _key_weights(s, a, j0, high, bounds, scale, lse, FLAGS)
        weights = p
        if FLAGS.DROPOUT:
            keep = _kept(a_smem.index(stage), c_smem.index(stage), word_b, threshold, s_layout)
            weights = gl.where(keep, p, nothing)
        weights = gl.convert_layout(weights.to(dtype), p_layout)
        dv_running = warpgroup_mma(weights, do_smem.index(stage), dv, is_async=True)
        dp = warpgroup_mma_wait(1, deps=(dp_running,))
        if FLAGS.DROPOUT:
            dp = gl.where(keep, dp, 0.0)
        ds = gl.convert_layout((p * (dp - delta)).to(dtype), p_layout)
        last = stage
        stage, phase = following(stage, phase, STAGES)
        mbarrier.wait(full.index(stage), phase, pred=total_steps > 1)
        dv, ds = warpgroup_mma_wait(0, deps=(dv_running, ds))
        for t in range(1, total_steps):
            a += BLOCK
            if FLAGS.SHARED:
                # starts the next query head
                a = gl.where(t % steps == 0, begin, a)
            fence_async_shared()
            s_running = scores(k0, k1, q_smem.index(stage), zeros, D0, D1)
            dp_running = scores(v0, v1, do_smem.index(stage), zeros, D0, D1)
            dk_running = warpgroup_mma(ds, q_smem.index(last), dk, is_async=True)
            s = warpgroup_mma_wait(PIECES + 1, deps=(s_running,))
            lse = lse_smem.index(stage).load(by_query)
            p = _key_weights(s, a, j0, high, bounds, scale, lse, FLAGS)
            weights = p
            if FLAGS.DROPOUT:
                keep = _kept(a_smem.index(stage), c_smem.index(stage), word_b, threshold, s_layout)
                weights = gl.where(keep, p, nothing)
            weights = gl.convert_layout(weights.to(dtype), p_layout)
            dv_running = warpgroup_mma(weights, do_smem.index(stage), dv, is_async=True)
            delta = gl.expand_dims(delta_smem.index(stage).load(by_query), 0)
            dp = warpgroup_mma_wait(2, deps=(dp_running,))
            if FLAGS.DROPOUT:
                dp = gl.where(keep, dp, 0.0)
            new_ds = gl.convert_layout((p * (dp - delta)).to(dtype), p_layout)
            now = stage
            stage, phase = following(stage, phase, STAGES)
            # The branch of this wait, and passing new_ds through the next wait, keep ptxas from sinking its computation below that wait.
            mbarrier.wait(full.index(stage), phase, pred=t + 1 < total_steps)
            dv, dk, ds = warpgroup_mma_wait(0, deps=(dv_running, dk_running, new_ds))
            mbarrier.arrive(empty.index(last), count=1)
            last = now
        dk_running = warpgroup_mma(ds, q_smem.index(last), dk, is_async=True)
        dk = warpgroup_mma_wait(0, deps=(dk_running,))
        mbarrier.arrive(empty.index(last), count=1)
        mbarrier.arrive(tile_empty, count=1)
        dk *= natural_scale
        if FLAGS.DROPOUT:
            dk *= keep_scale
            dv *= keep_scale
        row = first.to(gl.int64) + j0 * rate
        if FLAGS.PADDING:
            # the gradient accumulated for a padded key may be any number or NaN; it affects no other key
            own: gl.constexpr = gl.SliceLayout(1, o_layout)
            mine = gl.arange(0, 64, layout=own)
            shown = gl.load(padding_ptr + batch * pad_b + row + mine.to(gl.int64) * rate, mask=mine < count - j0, other=1) == 0
            dk = gl.where(gl.expand_dims(shown, 1), dk, 0.0)
            dv = gl.where(gl.expand_dims(shown, 1), dv, 0.0)
        kv_head = (first_head // group).to(gl.int64)
        heads = kv_heads if FLAGS.SHARED else shape[1]
        if branch == direct:
            dk_base = dk_ptr + batch * dk_b + kv_head * dk_h + row * dk_n
            dv_base = dv_ptr + batch * dv_b + kv_head * dv_h + row * dv_n
            dk_step = rate * dk_n
            dv_step = rate * dv_n
        else:
            part = ((batch * heads + result_head) * part_rows + place + j0) * D
            dk_base = dk_parts_ptr + part
            dv_base = dv_parts_ptr + part
            dk_step = rate * 0 + D
            dv_step = rate * 0 + D
        store_tile(dk_base, dk_step, count - j0, dk, D)
        store_tile(dv_base, dv_step, count - j0, dv, D)


@gluon.jit(do_not_specialize=[*VARYING, "total"])
def key_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, stats_ptr, dk_ptr, dv_ptr, dk_parts_ptr, dv_parts_ptr, rows_ptr, offsets_ptr, padding_ptr, words_b_ptr,
    bias_ptr, q_b, q_n, q_h, k_b, k_n, k_h, v_b, v_n, v_h, do_b, do_n, do_h, dk_b, dk_n, dk_h, dv_b, dv_n, dv_h, pad_b,
    num_batches, num_heads, kv_heads, group, q_first, q_last, num_queries, num_keys, part_rows, delta_rows, direct, left,
    right, scale, natural_scale, threshold, keep_scale, total,
    D: gl.constexpr, D0: gl.constexpr, D1: gl.constexpr, COLUMNS: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr,
    FLAGS: gl.constexpr,
):  # fmt: skip
    """Computes dk and dv of 64 keys per warpgroup. With DROPOUT a key/value head must have one query head."""
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    tile_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, COLUMNS], dtype)
    block_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK, COLUMNS], dtype)
    number_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    k_smem = gl.allocate_shared_memory(dtype, [GROUPS, 64, COLUMNS], tile_layout)
    v_smem = gl.allocate_shared_memory(dtype, [GROUPS, 64, COLUMNS], tile_layout)
    q_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK, COLUMNS], block_layout)
    do_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK, COLUMNS], block_layout)
    lse_smem = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK], number_layout)
    delta_smem = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK], number_layout)
    a_smem = lse_smem
    c_smem = lse_smem
    if FLAGS.DROPOUT:
        a_smem = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK], number_layout)
        c_smem = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK], number_layout)
    tile_full, tile_empty = barriers(1, COPIERS).index(0), barriers(1, GROUPS).index(0)
    full, empty = barriers(STAGES, COPIERS), barriers(STAGES, GROUPS)
    fence_async_shared()
    part0: gl.constexpr = 0
    part1: gl.constexpr = 1
    buffers = (k_smem, v_smem, q_smem, do_smem, lse_smem, delta_smem, a_smem, c_smem)
    signals = (tile_full, tile_empty, full, empty)
    shape = (num_batches, num_heads, kv_heads, group, q_first, q_last, num_keys)
    bounds = (left, right)
    strides = (q_b, q_n, q_h, k_b, k_n, k_h, v_b, v_n, v_h, do_b, do_n, do_h)
    out_strides = (dk_b, dk_n, dk_h, dv_b, dv_n, dv_h, pad_b)
    inputs = (q_ptr, k_ptr, v_ptr, dout_ptr, stats_ptr, rows_ptr, offsets_ptr)
    outputs = (dk_ptr, dv_ptr, dk_parts_ptr, dv_parts_ptr)
    tables = (rows_ptr, offsets_ptr, padding_ptr, words_b_ptr)
    gl.warp_specialize(
        [
            (_key_consume, (part0, FLAGS, tables, outputs, out_strides, shape, bounds, buffers, signals, total,
                       part_rows, direct, scale, natural_scale, threshold, keep_scale, D, D0, D1)),
            (_key_consume, (part1, FLAGS, tables, outputs, out_strides, shape, bounds, buffers, signals, total,
                       part_rows, direct, scale, natural_scale, threshold, keep_scale, D, D0, D1)),
            (_key_produce, (inputs, strides, shape, bounds, buffers, signals, total, delta_rows, D, FLAGS)),
        ],
        [4, 4],
        [232, 40],
    )  # fmt: skip
