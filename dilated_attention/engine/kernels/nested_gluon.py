"""The nested walk on Hopper in Gluon: one warp loads by TMA, and two or four warpgroups multiply and exponentiate.

A program is one CTA per SM and takes query tiles of 128 (256) rows in turn. Its loading warp reads the tile table and keeps a ring of key
and value tiles full, across query tiles as well, so the pipeline never drains. Each consumer warpgroup owns 64 rows: it issues Q·Kᵀ of
the next key tile and P·V of the last one, and computes the softmax of the next while P·V runs. The multiplicity of a tile costs one
addition per row.

Every key progression is a TMA descriptor (batch, head, row, residue · token stride + channel): the dilation is its row stride.

Tried on an H200 and left out because they had no effect or were slower: warpgroups that take turns with named barriers (±0.5 %), one
barrier for a key tile and its value tile (−3 %), a cubic polynomial for a quarter of the exponentials (−2 % at head dim 64, −4 % at 128),
key tiles of 64 with two warpgroups (−14 %).
"""

# kernels have no types that mypy knows
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
def _decode(index, Q_TILES: gl.constexpr, STEPS: gl.constexpr, segments, HEADS: gl.constexpr):
    """Maps index to (query tile, progression, longest segment, head, batch). Query tiles vary fastest: neighbors share keys in L2."""
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
def _load(
    descs, smem, full, empty, done, STAGES: gl.constexpr, FIRST: gl.constexpr, RATES: gl.constexpr, TOP: gl.constexpr, branch, first, at
):
    """Loads the done-th key or value tile of this program into its stage of the ring. at: (batch, key head, segment, channel)."""
    batch, head, segment, channel = at
    stage = done % STAGES
    mbarrier.wait(empty.index(stage), ((done // STAGES) & 1) ^ 1)
    mbarrier.expect(full.index(stage), descs[0].block_type.nbytes)
    for d in gl.static_range(len(RATES)):
        row = first + segment * (TOP // RATES[d])
        tma.async_copy_global_to_shared(
            descs[d], [batch, head, row, channel], full.index(stage), smem.index(stage), pred=branch == FIRST + d
        )


@gluon.jit
def _produce(
    q_desc, k_descs, v_descs, shared_memory, tables, shape, tokens,
    FIRST: gl.constexpr, RATES: gl.constexpr, ROW: gl.constexpr, FAMILY: gl.constexpr, STAGES: gl.constexpr, GROUPS: gl.constexpr,
):  # fmt: skip
    """The loading warp: loads the queries of each of the program's tiles, and their key and value tiles as listed in the table."""
    _, q_smem, k_smem, v_smem, _, q_full, q_empty, k_full, k_empty, v_full, v_empty = shared_memory
    tiles_ptr, _, counts_ptr, _, offsets_ptr, _ = tables
    segments, total = shape
    q_token, k_token, v_token = tokens
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
        count = gl.load(counts_ptr + tile * 3 + 2)
        last_branch = 0
        last_first = 0
        last_kept = 0
        # keys are loaded one tile ahead of values, in the order in which they are consumed
        for j in range(count + 1):
            # four warpgroups keep their queries in shared memory to the end: load the next tile's queries after its first keys
            if j == (0 if GROUPS == 2 else 2):
                mbarrier.wait(q_empty, (round_ & 1) ^ 1)
                mbarrier.expect(q_full, GROUPS * q_desc.block_type.nbytes)
                for part in gl.static_range(GROUPS):
                    row = segment * (TOP // row_rate) + (tile * GROUPS + part) * 64
                    tma.async_copy_global_to_shared(q_desc, [batch, head, row, residue * q_token], q_full, q_smem.index(part))
            branch = last_branch
            first = last_first
            kept = last_kept
            if j < count:
                entry = tiles_ptr + (tile * T + j) * 4
                branch = gl.load(entry)
                first = gl.load(entry + 2)
                kept = _residue(offsets_ptr, branch, gl.load(entry + 1), gl.load(entry + 3), head, HEADS)
                at = (batch, head // GROUP, segment, kept * k_token)
                _load(k_descs, k_smem, k_full, k_empty, done + j, STAGES[0], FIRST, RATES, TOP, branch, first, at)
            if j > 0:
                at = (batch, head // GROUP, segment, last_kept * v_token)
                _load(v_descs, v_smem, v_full, v_empty, done + j - 1, STAGES[1], FIRST, RATES, TOP, last_branch, last_first, at)
            last_branch = branch
            last_first = first
            last_kept = kept
        done += count
        round_ += 1  # noqa: SIM113


@gluon.jit
def _hide_later(s, start, rate, rows, TILE_KEYS: gl.constexpr):
    """Sets scores to −inf where the key's position, start + column · rate, is after the query's."""
    ahead = rows - start
    last = gl.where(ahead < 0, -1, ahead // rate)
    columns = gl.arange(0, TILE_KEYS, layout=gl.SliceLayout(0, s.type.layout))
    return gl.where(gl.expand_dims(columns, 0) <= gl.expand_dims(last, 1), s, float("-inf"))


@gluon.jit
def _weights(s, highest, total, shared, scale_log2):
    """Does one step of the online softmax. Returns (weights, rescaling factor of the sums so far, new row maximum, new row sum)."""
    new = gl.maximum(highest, gl.max(s, 1))
    # the maximum is that of raw scores, so weights reach m instead of 1, which costs nothing
    offset = new * scale_log2 - shared
    p = exp2(s * scale_log2 - gl.expand_dims(offset, 1))
    rescale = exp2((highest - new) * scale_log2)
    return p, rescale, new, total * rescale + gl.sum(p, 1)


@gluon.jit
def _consume(
    PART: gl.constexpr, shared_memory, tables, shape, o_token, lse_strides, scale, ROW: gl.constexpr, FAMILY: gl.constexpr,
    STAGES: gl.constexpr, D: gl.constexpr, TILE_KEYS: gl.constexpr, CAUSAL: gl.constexpr, GROUPS: gl.constexpr,
):  # fmt: skip
    """Warpgroup PART: computes 64 rows of each of the program's query tiles."""
    o_desc, q_smem, k_smem, v_smem, o_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty = shared_memory
    tiles_ptr, bias_ptr, counts_ptr, starts_ptr, offsets_ptr, lse_ptr = tables
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
    K_STAGES: gl.constexpr = STAGES[0]
    V_STAGES: gl.constexpr = STAGES[1]
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
        # The second half of the rows sees more keys, so the warpgroups alternate in taking it.
        part = PART ^ ((round_ & 1) * (GROUPS // 2))
        first_row = (tile * GROUPS + part) * 64
        rows = gl.arange(0, 64, layout=gl.SliceLayout(1, s_layout))
        rows = segment * TOP + residue + (first_row + rows) * row_rate
        masked = gl.load(counts_ptr + tile * 3)
        first_half = gl.load(counts_ptr + tile * 3 + 1)
        both = gl.load(counts_ptr + tile * 3 + 2)
        count = first_half if part < GROUPS // 2 else both
        bias = bias_ptr + tile * T
        # positions are counted from the start of the longest segment where keys are compared with queries
        inside = rows - segment * TOP
        starts = starts_ptr + (head * Q_TILES + tile) * T
        rates = tiles_ptr + tile * T * 4 + 3

        mbarrier.wait(q_full, round_ & 1)
        q = q_smem.index(part)._reinterpret(dtype, [64, D], q_shared)
        if GROUPS == 2:
            # with two warpgroups there are enough registers to hold q, which saves reading it again for every key tile
            q = q.load(q_layout)
            fence_async_shared()
            mbarrier.arrive(q_empty, count=1)
        k_stage = done % K_STAGES
        mbarrier.wait(k_full.index(k_stage), (done // K_STAGES) & 1)
        k = k_smem.index(k_stage)._reinterpret(dtype, [TILE_KEYS, D], k_shared)
        s = warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
        shared = gl.load(bias)
        following = gl.load(bias + 1)
        if CAUSAL:
            start = gl.load(starts)
            rate = gl.load(rates)
            next_start = gl.load(starts + 1)
            next_rate = gl.load(rates + 4)
        s = warpgroup_mma_wait(0, deps=(s,))
        mbarrier.arrive(k_empty.index(k_stage), count=1)
        if CAUSAL:
            s = _hide_later(s, start, rate, inside, TILE_KEYS)
        highest = gl.full([64], -1e30, gl.float32, gl.SliceLayout(1, s_layout))
        total = gl.zeros([64], gl.float32, gl.SliceLayout(1, s_layout))
        weights, rescale, highest, total = _weights(s, highest, total, shared, scale_log2)
        p = gl.convert_layout(weights.to(dtype), p_layout)
        o = gl.zeros([64, D], gl.float32, o_layout)
        k_stage = (done + 1) % K_STAGES
        mbarrier.wait(k_full.index(k_stage), ((done + 1) // K_STAGES) & 1, pred=count > 1)

        for j in range(1, count):
            shared = following
            following = gl.load(bias + j + 1)
            if CAUSAL:
                start = next_start
                rate = next_rate
                next_start = gl.load(starts + j + 1)
                next_rate = gl.load(rates + (j + 1) * 4)
            k = k_smem.index(k_stage)._reinterpret(dtype, [TILE_KEYS, D], k_shared)
            s_running = warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
            v_stage = done % V_STAGES
            mbarrier.wait(v_full.index(v_stage), (done // V_STAGES) & 1)
            v = v_smem.index(v_stage)._reinterpret(dtype, [TILE_KEYS, D], k_shared)
            o_running = warpgroup_mma(p, v, o, is_async=True)
            s = warpgroup_mma_wait(1, deps=(s_running,))
            mbarrier.arrive(k_empty.index(k_stage), count=1)
            if CAUSAL:  # noqa: SIM102
                if (j < masked) | (j >= first_half):
                    s = _hide_later(s, start, rate, inside, TILE_KEYS)
            weights, rescale, highest, total = _weights(s, highest, total, shared, scale_log2)
            # The wait for the key tile after the next must be here: its branch, and the new weights passing through the wait for P·V, keep
            # LLVM and ptxas from moving the softmax below that wait, where it would overlap with nothing.
            done += 1
            k_stage = (done + 1) % K_STAGES
            mbarrier.wait(k_full.index(k_stage), ((done + 1) // K_STAGES) & 1, pred=j + 1 < count)
            o, p, weights = warpgroup_mma_wait(0, deps=(o_running, p, weights))
            mbarrier.arrive(v_empty.index(v_stage), count=1)
            o = o * gl.expand_dims(gl.convert_layout(rescale, gl.SliceLayout(1, o_layout)), 1)
            p = gl.convert_layout(weights.to(dtype), p_layout)

        if GROUPS > 2:
            mbarrier.arrive(q_empty, count=1)
        v_stage = done % V_STAGES
        mbarrier.wait(v_full.index(v_stage), (done // V_STAGES) & 1)
        v = v_smem.index(v_stage)._reinterpret(dtype, [TILE_KEYS, D], k_shared)
        o_running = warpgroup_mma(p, v, o, is_async=True)
        lse = highest * scale + gl.log2(total) * 0.6931471805599453
        where = lse_ptr + batch.to(gl.int64) * lse_batch + head.to(gl.int64) * lse_head + rows.to(gl.int64) * lse_token
        gl.store(where, lse)
        o = warpgroup_mma_wait(0, deps=(o_running,))
        mbarrier.arrive(v_empty.index(v_stage), count=1)
        done += 1
        o = o * gl.expand_dims(gl.convert_layout(1.0 / total, gl.SliceLayout(1, o_layout)), 1)
        # the store of the previous query tile must have finished reading its buffer
        tma.store_wait(0)
        _barrier()
        o_smem.index(PART)._reinterpret(dtype, [64, D], q_shared).store(o.to(dtype))
        fence_async_shared()
        _barrier()
        row = segment * (TOP // row_rate) + first_row
        tma.async_copy_shared_to_global(o_desc, [batch, head, row, residue * o_token], o_smem.index(PART))
        if CAUSAL:
            # key tiles that only the other half sees: release them as they arrive
            for _ in range(count, both):
                mbarrier.wait(k_full.index(done % K_STAGES), (done // K_STAGES) & 1)
                mbarrier.arrive(k_empty.index(done % K_STAGES), count=1)
                mbarrier.wait(v_full.index(done % V_STAGES), (done // V_STAGES) & 1)
                mbarrier.arrive(v_empty.index(done % V_STAGES), count=1)
                done += 1
        round_ += 1  # noqa: SIM113
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["segments", "total"])
def nested_kernel(
    q_desc, o_desc, k0, k1, k2, k3, k4, k5, v0, v1, v2, v3, v4, v5,
    tiles_ptr, bias_ptr, counts_ptr, starts_ptr, offsets_ptr, lse_ptr, segments, total,
    q_token, k_token, v_token, o_token, lse_batch, lse_head, lse_token, scale,
    FIRST: gl.constexpr, RATES: gl.constexpr, ROW: gl.constexpr, FAMILY: gl.constexpr,
    D: gl.constexpr, TILE_KEYS: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr, GROUPS: gl.constexpr,
):  # fmt: skip
    """RATES: the rates of branches FIRST …, one descriptor each. ROW: (row_branch, its rate, r_level or 0 at the top).
    FAMILY: (query tiles, table width, progressions of rows, query heads, query heads per key head, longest segment).
    STAGES: (of keys, of values). GROUPS: consumer warpgroups, 2 or 4, of 64 rows."""
    K_STAGES: gl.constexpr = STAGES[0]
    V_STAGES: gl.constexpr = STAGES[1]
    q_smem = gl.allocate_shared_memory(q_desc.dtype, [GROUPS, 1, 1, 64, D], q_desc.layout)
    o_smem = gl.allocate_shared_memory(q_desc.dtype, [GROUPS, 1, 1, 64, D], o_desc.layout)
    k_smem = gl.allocate_shared_memory(q_desc.dtype, [K_STAGES, 1, 1, TILE_KEYS, D], k0.layout)
    v_smem = gl.allocate_shared_memory(q_desc.dtype, [V_STAGES, 1, 1, TILE_KEYS, D], v0.layout)
    q_full, q_empty = barriers(1, 1).index(0), barriers(1, GROUPS).index(0)
    k_full, k_empty = barriers(K_STAGES, 1), barriers(K_STAGES, GROUPS)
    v_full, v_empty = barriers(V_STAGES, 1), barriers(V_STAGES, GROUPS)
    fence_async_shared()
    shape = (segments, total)
    k_descs = (k0, k1, k2, k3, k4, k5)
    v_descs = (v0, v1, v2, v3, v4, v5)
    tokens = (q_token, k_token, v_token)
    lse_strides = (lse_batch, lse_head, lse_token)
    part0: gl.constexpr = 0
    part1: gl.constexpr = 1
    part2: gl.constexpr = 2
    part3: gl.constexpr = 3
    shared = (o_desc, q_smem, k_smem, v_smem, o_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty)
    tables = (tiles_ptr, bias_ptr, counts_ptr, starts_ptr, offsets_ptr, lse_ptr)
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (_consume, (part0, shared, tables, shape, o_token, lse_strides, scale, ROW, FAMILY, STAGES, D, TILE_KEYS, CAUSAL, GROUPS)),
                (_consume, (part1, shared, tables, shape, o_token, lse_strides, scale, ROW, FAMILY, STAGES, D, TILE_KEYS, CAUSAL, GROUPS)),
                (_produce, (q_desc, k_descs, v_descs, shared, tables, shape, tokens, FIRST, RATES, ROW, FAMILY, STAGES, GROUPS)),
            ],
            [4, 1],
            [232, 40],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (part0, shared, tables, shape, o_token, lse_strides, scale, ROW, FAMILY, STAGES, D, TILE_KEYS, CAUSAL, GROUPS)),
                (_consume, (part1, shared, tables, shape, o_token, lse_strides, scale, ROW, FAMILY, STAGES, D, TILE_KEYS, CAUSAL, GROUPS)),
                (_consume, (part2, shared, tables, shape, o_token, lse_strides, scale, ROW, FAMILY, STAGES, D, TILE_KEYS, CAUSAL, GROUPS)),
                (_consume, (part3, shared, tables, shape, o_token, lse_strides, scale, ROW, FAMILY, STAGES, D, TILE_KEYS, CAUSAL, GROUPS)),
                (_produce, (q_desc, k_descs, v_descs, shared, tables, shape, tokens, FIRST, RATES, ROW, FAMILY, STAGES, GROUPS)),
            ],
            [4, 4, 4, 1],
            [112, 112, 112, 32],
        )
