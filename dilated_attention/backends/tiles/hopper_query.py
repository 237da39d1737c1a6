"""dq and δ over a table of tiles on Hopper: ``query_kernel`` of ``tiles/backward.py`` with the same arguments and formulas. It
cannot do padding, dropout or bias, so it does not read their arguments; calls that have them run the other kernel (``run.py``).

It is built like ``hopper_key.py``. Tried on an H200 and not adopted, with the change in time: three warpgroups of 64 queries (−3 to +4 %),
queries and dout in registers (−3 to −5 %, but ``hopper_key.py`` says why tiles stay in shared memory), warpgroups that take turns (0 %), a
program for each row of the table (+3 to +20 %).
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
    barriers,
    copy_numbers,
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
from dilated_attention.backends.tiles.rows import LOG2_E, VARYING


@gluon.jit
def _query_produce(inputs, strides, shape, bounds, buffers, signals, total, num_queries, delta_rows, D: gl.constexpr, FLAGS: gl.constexpr):
    """The producer of ``query_kernel``.

    It loads each tile's queries, dout and lse. Then it fills stages of the ring: the first one of a tile with its out, of which δ is made
    once, the others with blocks of keys and values.
    """
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, dout_ptr, rows_ptr, offsets_ptr = inputs
    q_b, q_n, q_h, k_b, k_n, k_h, v_b, v_n, v_h, o_b, o_n, o_h, do_b, do_n, do_h = strides
    q_smem, do_smem, lse_smem, k_smem, v_smem = buffers
    tile_full, tile_empty, full, empty = signals
    num_heads = shape[1]
    group = shape[2]
    STAGES: gl.constexpr = k_smem.shape[0]
    BLOCK: gl.constexpr = k_smem.shape[1]
    COLUMNS: gl.constexpr = k_smem.shape[2]
    stage = 0
    # all stages are empty at first, so that the first waits pass
    phase = 1
    tile_phase = 1
    for index in range(gl.program_id(0), total, gl.num_programs(0)):
        batch, head, _branch, rate, first, count, i0, high, row, begin, steps, place, _places = query_row(
            index, rows_ptr, offsets_ptr, shape, bounds, BLOCK, FLAGS
        )
        head64 = head.to(gl.int64)
        head_row = batch * num_heads + head
        mbarrier.wait(tile_empty, tile_phase)
        tile_phase ^= 1
        q_base = q_ptr + batch * q_b + head64 * q_h + row * q_n
        do_base = dout_ptr + batch * do_b + head64 * do_h + row * do_n
        q_offsets = copy_offsets(rate * q_n, 64, COLUMNS)
        do_offsets = copy_offsets(rate * do_n, 64, COLUMNS)
        for g in gl.static_range(GROUPS):
            rest = high - i0 - 64 * g
            copy_rows(q_smem.index(g), q_base + 64 * g * rate * q_n, q_offsets, rest, D)
            copy_rows(do_smem.index(g), do_base + 64 * g * rate * do_n, do_offsets, rest, D)
            copy_numbers(lse_smem.index(g), lse_ptr + head_row * num_queries + row + 64 * g * rate, rate, rest)
        async_copy.mbarrier_arrive(tile_full, increment_count=False)
        out_base = out_ptr + batch * o_b + head64 * o_h + row * o_n
        out_step = rate * o_n
        if FLAGS.OWN:
            out_base = out_ptr + (head_row * delta_rows + place) * D
            out_step = rate * 0 + D
        out_offsets = copy_offsets(out_step, 64, COLUMNS)
        mbarrier.wait(empty.index(stage), phase)
        copy_rows(k_smem.index(stage).slice(0, 64), out_base, out_offsets, high - i0, D)
        copy_rows(v_smem.index(stage).slice(0, 64), out_base + 64 * out_step, out_offsets, high - i0 - 64, D)
        async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
        stage, phase = following(stage, phase, STAGES)
        kv_head = (head // group).to(gl.int64)
        position = first.to(gl.int64) + begin * rate
        k_at = k_ptr + batch * k_b + kv_head * k_h + position * k_n
        v_at = v_ptr + batch * v_b + kv_head * v_h + position * v_n
        k_offsets = copy_offsets(rate * k_n, BLOCK, COLUMNS)
        v_offsets = copy_offsets(rate * v_n, BLOCK, COLUMNS)
        rest = count - begin
        for _ in range(steps):
            mbarrier.wait(empty.index(stage), phase)
            copy_rows(k_smem.index(stage), k_at, k_offsets, rest, D)
            copy_rows(v_smem.index(stage), v_at, v_offsets, rest, D)
            async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
            k_at += BLOCK * rate * k_n
            v_at += BLOCK * rate * v_n
            rest -= BLOCK
            stage, phase = following(stage, phase, STAGES)


@gluon.jit
def _query_weights(s, a, i0, count, bounds, scale, lse, FLAGS: gl.constexpr):
    """Returns p (64, BLOCK) of 64 queries from i0 on and keys [a, a + BLOCK); ``lse`` is in base 2."""
    p = exp2(s * scale - gl.expand_dims(lse, 1))
    return hide(p, a, i0, count, bounds, 0.0, FLAGS)


@gluon.jit
def _query_consume(
    PART: gl.constexpr, FLAGS: gl.constexpr, tables, outputs, strides, shape, bounds,
    buffers, signals, total, part_rows, delta_rows, direct, scale, natural_scale,
    D: gl.constexpr, D0: gl.constexpr, D1: gl.constexpr,
):  # fmt: skip
    """Consumer warpgroup PART of ``query_kernel``: computes δ and dq of 64 queries of each tile."""
    rows_ptr, offsets_ptr, dlse_ptr = tables
    stats_ptr, dq_ptr, parts_ptr = outputs
    dq_b, dq_n, dq_h, dlse_b, dlse_n, dlse_h = strides
    q_smem, do_smem, lse_smem, k_smem, v_smem = buffers
    tile_full, tile_empty, full, empty = signals
    num_heads = shape[1]
    STAGES: gl.constexpr = k_smem.shape[0]
    BLOCK: gl.constexpr = k_smem.shape[1]
    COLUMNS: gl.constexpr = k_smem.shape[2]
    dtype: gl.constexpr = q_smem.dtype
    s_layout: gl.constexpr = product_layout(BLOCK)
    o_layout: gl.constexpr = product_layout(COLUMNS)
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    by_row: gl.constexpr = gl.SliceLayout(1, s_layout)
    PIECES: gl.constexpr = 2 if D1 > 0 else 1
    zeros = gl.zeros([64, BLOCK], gl.float32, s_layout)
    stage = 0
    phase = 0
    tile_phase = 0
    for index in range(gl.program_id(0), total, gl.num_programs(0)):
        batch, head, branch, rate, _first, count, i0, high, row, begin, steps, place, _places = query_row(
            index, rows_ptr, offsets_ptr, shape, bounds, BLOCK, FLAGS
        )
        i0 += PART * 64
        row += PART * 64 * rate
        place += PART * 64
        head64 = head.to(gl.int64)
        head_row = batch * num_heads + head
        local = gl.arange(0, 64, layout=by_row)
        inside = local < high - i0
        mbarrier.wait(tile_full, tile_phase)
        tile_phase ^= 1
        mbarrier.wait(full.index(stage), phase)
        # in this stage the producer stored the rows of ``out``: those of warpgroup 0 in the buffer of keys, those of 1 in that of values
        out = (k_smem if PART == 0 else v_smem).index(stage).slice(0, 64).load(o_layout).to(gl.float32)
        delta = gl.convert_layout(gl.sum(do_smem.index(PART).load(o_layout).to(gl.float32) * out, 1), by_row)
        mbarrier.arrive(empty.index(stage), count=1)
        stage, phase = following(stage, phase, STAGES)
        if FLAGS.DLSE:
            dlse = dlse_ptr + batch * dlse_b + head64 * dlse_h + (row + local * rate) * dlse_n
            delta -= gl.load(dlse, mask=inside, other=0.0)
        lse = lse_smem.index(PART).load(by_row)
        # a row without keys gets an lse of +inf, so its weights are 0
        lse = gl.where(lse == -float("inf"), float("inf"), lse) * LOG2_E
        # stats_ptr is (B, H, 2, places): δ, then lse in base 2
        row_at = stats_ptr + 2 * (head_row * delta_rows) + place + local
        gl.store(row_at, delta, mask=inside)
        gl.store(row_at + delta_rows, lse, mask=inside)
        fence_async_shared()
        q0, q1 = halves(q_smem.index(PART), D0, D1)
        d0, d1 = halves(do_smem.index(PART), D0, D1)
        a = begin
        mbarrier.wait(full.index(stage), phase)
        fence_async_shared()
        s_running = scores(q0, q1, k_smem.index(stage), zeros, D0, D1)
        dp_running = scores(d0, d1, v_smem.index(stage), zeros, D0, D1)
        dq = gl.zeros([64, COLUMNS], gl.float32, o_layout)
        s = warpgroup_mma_wait(PIECES, deps=(s_running,))
        p = _query_weights(s, a, i0, count, bounds, scale, lse, FLAGS)
        dp = warpgroup_mma_wait(0, deps=(dp_running,))
        ds = gl.convert_layout((p * (dp - gl.expand_dims(delta, 1))).to(dtype), p_layout)
        last = stage
        stage, phase = following(stage, phase, STAGES)
        mbarrier.wait(full.index(stage), phase, pred=steps > 1)
        for t in range(1, steps):
            a += BLOCK
            fence_async_shared()
            s_running = scores(q0, q1, k_smem.index(stage), zeros, D0, D1)
            dp_running = scores(d0, d1, v_smem.index(stage), zeros, D0, D1)
            dq_running = warpgroup_mma(ds, k_smem.index(last), dq, is_async=True)
            s = warpgroup_mma_wait(PIECES + 1, deps=(s_running,))
            p = _query_weights(s, a, i0, count, bounds, scale, lse, FLAGS)
            dp = warpgroup_mma_wait(1, deps=(dp_running,))
            new_ds = gl.convert_layout((p * (dp - gl.expand_dims(delta, 1))).to(dtype), p_layout)
            now = stage
            stage, phase = following(stage, phase, STAGES)
            # where this wait stands, ptxas does not sink the softmax below it: see _key_consume
            mbarrier.wait(full.index(stage), phase, pred=t + 1 < steps)
            dq, ds = warpgroup_mma_wait(0, deps=(dq_running, new_ds))
            mbarrier.arrive(empty.index(last), count=1)
            last = now
        # queries and dout are not read any more: the last product is of ds and keys
        mbarrier.arrive(tile_empty, count=1)
        dq_running = warpgroup_mma(ds, k_smem.index(last), dq, is_async=True)
        dq = warpgroup_mma_wait(0, deps=(dq_running,))
        mbarrier.arrive(empty.index(last), count=1)
        dq_base = parts_ptr + (head_row * part_rows + place) * D
        dq_step = rate * 0 + D
        if branch == direct:
            # this branch writes into dq itself, the others at their places
            dq_base = dq_ptr + batch * dq_b + head64 * dq_h + row * dq_n
            dq_step = rate * dq_n
        store_tile(dq_base, dq_step, high - i0, dq * natural_scale, D)


@gluon.jit(do_not_specialize=[*VARYING, "total"])
def query_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, dout_ptr, dlse_ptr, stats_ptr, dq_ptr, parts_ptr, rows_ptr, offsets_ptr, padding_ptr,
    words_a_ptr, words_c_ptr, words_b_ptr, bias_ptr,
    q_b, q_n, q_h, k_b, k_n, k_h, v_b, v_n, v_h, o_b, o_n, o_h, do_b, do_n, do_h, dq_b, dq_n, dq_h, dlse_b, dlse_n, dlse_h, pad_b,
    pad_branch,
    num_batches, num_heads, group, q_first, q_last, num_queries, num_keys, part_rows, delta_rows, direct, left, right,
    scale, natural_scale, threshold, keep_scale, total,
    D: gl.constexpr, D0: gl.constexpr, D1: gl.constexpr, COLUMNS: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr,
    FLAGS: gl.constexpr,
):  # fmt: skip
    """Computes δ and dq of ``total`` tiles, of 64 queries per consumer warpgroup."""
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    tile_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, COLUMNS], dtype)
    number_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_smem = gl.allocate_shared_memory(dtype, [GROUPS, 64, COLUMNS], tile_layout)
    do_smem = gl.allocate_shared_memory(dtype, [GROUPS, 64, COLUMNS], tile_layout)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK, COLUMNS], tile_layout)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK, COLUMNS], tile_layout)
    lse_smem = gl.allocate_shared_memory(gl.float32, [GROUPS, 64], number_layout)
    tile_full, tile_empty = barriers(1, COPIERS).index(0), barriers(1, GROUPS).index(0)
    full, empty = barriers(STAGES, COPIERS), barriers(STAGES, GROUPS)
    fence_async_shared()
    part0: gl.constexpr = 0
    part1: gl.constexpr = 1
    buffers = (q_smem, do_smem, lse_smem, k_smem, v_smem)
    signals = (tile_full, tile_empty, full, empty)
    shape = (num_batches, num_heads, group, q_first, q_last, num_keys)
    bounds = (left, right)
    strides = (q_b, q_n, q_h, k_b, k_n, k_h, v_b, v_n, v_h, o_b, o_n, o_h, do_b, do_n, do_h)
    out_strides = (dq_b, dq_n, dq_h, dlse_b, dlse_n, dlse_h)
    inputs = (q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, dout_ptr, rows_ptr, offsets_ptr)
    outputs = (stats_ptr, dq_ptr, parts_ptr)
    tables = (rows_ptr, offsets_ptr, dlse_ptr)
    gl.warp_specialize(
        [
            (_query_consume, (part0, FLAGS, tables, outputs, out_strides, shape, bounds, buffers, signals, total,
                       part_rows, delta_rows, direct, scale, natural_scale, D, D0, D1)),
            (_query_consume, (part1, FLAGS, tables, outputs, out_strides, shape, bounds, buffers, signals, total,
                       part_rows, delta_rows, direct, scale, natural_scale, D, D0, D1)),
            (_query_produce, (inputs, strides, shape, bounds, buffers, signals, total, num_queries, delta_rows, D, FLAGS)),
        ],
        # warps, and registers of a thread, of the second consumer and of the producer
        [4, 4],
        [224, 56],
    )  # fmt: skip
