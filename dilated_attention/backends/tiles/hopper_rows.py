"""What the Hopper kernels over a table have in common: they read a row of the table, copy strided rows into shared memory, multiply, store.

A program has a producer of four warps and two consumer warpgroups. The producer fills a ring of shared-memory stages with cp.async. Each
consumer multiplies 64 rows with wgmma. Rows that do not exist and columns beyond the head dim are filled with zeros.
"""

# mypy does not know the types of kernels
# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma

from dilated_attention.backends.tiles.rows import read_segment

# threads of the producer; each arrives at a buffer's barrier when its copies are complete
COPIERS = gl.constexpr(128)
# consumer warpgroups of a program, and the rows of a tile: 64 for each of them
GROUPS, ROWS = gl.constexpr(2), gl.constexpr(128)
_EX2 = gl.constexpr("ex2.approx.ftz.f32 $0, $1;")


class Flags(NamedTuple):
    """The compile-time options of a launch. An option that only one of the kernels (forward, query, key) reads names it.

    Args:
        LEFT, RIGHT: the window has these bounds (causal: right = 0).
        CUT: some positions have no query or no key.
        ZERO_KEYS: positions that a segment lacks count as keys of score 0 and value 0 (forward).
        OWN: ``out_ptr`` holds each branch's output by place, not the merged output (query).
        DLSE: there is a gradient of lse (query).
        SHARED: the query heads of a key head read the same keys, so a program adds up their gradients (key).
        PADDING, DROPOUT: keys are padded; pairs are dropped (key).
    """

    LEFT: bool
    RIGHT: bool
    CUT: bool
    ZERO_KEYS: bool = False
    OWN: bool = False
    DLSE: bool = False
    SHARED: bool = False
    PADDING: bool = False
    DROPOUT: bool = False


@gluon.jit
def exp2(x):
    """Returns 2^x, with denormals flushed to 0: gl.exp2 spends three more instructions to keep them."""
    return gl.inline_asm_elementwise(_EX2, "=r,r", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """Makes COUNT barriers, each of which completes a phase after ARRIVALS arrivals."""
    made = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(made.index(i), count=ARRIVALS)
    return made


@gluon.jit
def following(stage, phase, STAGES: gl.constexpr):
    """Returns the next stage of a ring, and the phase to wait for there: it flips with every round."""
    stage += 1
    if stage == STAGES:
        stage = 0
        phase ^= 1
    return stage, phase


@gluon.constexpr_function
def product_layout(columns):
    """Returns the layout of a wgmma product of 64 rows, which one warpgroup computes."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.jit
def halves(tile, D0: gl.constexpr, D1: gl.constexpr):
    """Returns a tile's first D0 columns and the D1 columns after them; twice the first ones if D1 is 0."""
    first = tile.slice(0, D0, dim=1)
    second = first
    if D1 > 0:
        second = tile.slice(D0, D1, dim=1)
    return first, second


@gluon.jit
def hide(x, a, i0, count, bounds, FILL: gl.constexpr, FLAGS: gl.constexpr):
    """Sets x of 64 queries from i0 on and keys [a, a + BLOCK) to FILL where the query does not see the key."""
    BLOCK: gl.constexpr = x.shape[1]
    layout: gl.constexpr = x.type.layout
    left, right = bounds
    masked = a + BLOCK > count
    if FLAGS.RIGHT:
        masked = masked | (a + BLOCK - 1 > i0 + right)
    if FLAGS.LEFT:
        masked = masked | (a < i0 + 63 - left)
    if masked:
        j = gl.expand_dims(a + gl.arange(0, BLOCK, layout=gl.SliceLayout(0, layout)), 0)
        good = j < count
        if FLAGS.RIGHT or FLAGS.LEFT:
            i = gl.expand_dims(i0 + gl.arange(0, 64, layout=gl.SliceLayout(1, layout)), 1)
            if FLAGS.RIGHT:
                good = good & (j <= i + right)
            if FLAGS.LEFT:
                good = good & (j >= i - left)
        x = gl.where(good, x, FILL)
    return x


@gluon.constexpr_function
def copy_layout(columns):
    """Returns the layout of copies: a thread copies 16 bytes, neighbouring threads a whole row."""
    return gl.BlockedLayout([1, 8], [32 // (columns // 8), columns // 8], [4, 1], [1, 0])


@gluon.jit
def copy_offsets(step, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Returns the offsets of the elements of ROWS rows that are ``step`` elements apart, in 32 bits, which saves registers."""
    layout: gl.constexpr = copy_layout(COLUMNS)
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    columns = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout))
    return gl.expand_dims(rows * step.to(gl.int32), 1) + gl.expand_dims(columns, 0)


@gluon.jit
def copy_rows(smem, base, offsets, existing, D: gl.constexpr):
    """Starts the copy of a tile's first ``existing`` rows; the others become 0."""
    NUM_ROWS: gl.constexpr = smem.shape[0]
    COLUMNS: gl.constexpr = smem.shape[1]
    layout: gl.constexpr = copy_layout(COLUMNS)
    rows = gl.arange(0, NUM_ROWS, layout=gl.SliceLayout(1, layout))
    mask = gl.expand_dims(rows < existing, 1)
    if COLUMNS > D:
        columns = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout))
        mask = mask & gl.expand_dims(columns < D, 0)
    else:
        mask = mask & gl.full([NUM_ROWS, COLUMNS], True, gl.int1, layout)
    async_copy.async_copy_global_to_shared(smem, base + offsets, mask=mask)


@gluon.jit
def copy_numbers(smem, base, step, existing):
    """Starts the copy of the first ``existing`` 32-bit numbers, such as lse, that are ``step`` apart; the others become 0."""
    COUNT: gl.constexpr = smem.shape[0]
    i = gl.arange(0, COUNT, layout=gl.BlockedLayout([1], [32], [4], [0]))
    async_copy.async_copy_global_to_shared(smem, base + i.to(gl.int64) * step, mask=i < existing)


@gluon.jit
def scores(a0, a1, tile, zeros, D0: gl.constexpr, D1: gl.constexpr):
    """Starts a·tileᵀ over both blocks of the head dim."""
    x = warpgroup_mma(a0, tile.slice(0, D0, dim=1).permute((1, 0)), zeros, use_acc=False, is_async=True)
    if D1 > 0:
        x = warpgroup_mma(a1, tile.slice(D0, D1, dim=1).permute((1, 0)), x, is_async=True)
    return x


@gluon.jit
def store_tile(base, step, existing, x, D: gl.constexpr):
    """Writes the first ``existing`` rows of x in 16-byte pieces; ``step``: elements from row to row."""
    NUM_ROWS: gl.constexpr = x.shape[0]
    COLUMNS: gl.constexpr = x.shape[1]
    layout: gl.constexpr = copy_layout(COLUMNS)
    x = gl.convert_layout(x.to(base.dtype.element_ty), layout)
    rows = gl.arange(0, NUM_ROWS, layout=gl.SliceLayout(1, layout))
    columns = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout))
    mask = gl.expand_dims(rows < existing, 1) & gl.expand_dims(columns < D, 0)
    gl.store(base + copy_offsets(step, NUM_ROWS, COLUMNS), x, mask=mask)


@gluon.jit
def query_row(
    index, rows_ptr, offsets_ptr, shape, bounds, BLOCK: gl.constexpr, FLAGS: gl.constexpr
):  # fmt: skip
    """Returns what producer and consumers need of tile ``index``: a row of the table of queries, for one batch entry and head.

    That is (batch, head, branch, rate in 64 bits, position of the segment's index 0, number of keys, index i0 of the tile's first query,
    end of the segment's query indices, row of query i0 in q, index of the first key that the tile sees, number of blocks of keys, place of
    query i0, places per segment). Indices count the selected positions of a segment.
    """
    num_batches, num_heads, _group, q_first, q_last, num_keys = shape
    left, right = bounds
    head = index % num_heads
    batch = (index // num_heads % num_batches).to(gl.int64)
    branch, rate, first, count, low, high, tile, place, places, _ = read_segment(
        rows_ptr, index // (num_heads * num_batches), offsets_ptr, num_heads, head, q_first, q_last, num_keys, FLAGS.CUT
    )
    i0 = low + tile * ROWS
    last = gl.minimum(i0 + ROWS, high) - 1
    begin = 0
    end = count
    if FLAGS.RIGHT:
        end = gl.maximum(gl.minimum(count, last + right + 1), 0)
    if FLAGS.LEFT:
        begin = gl.minimum(gl.maximum(i0 - left, 0), end)
    # a tile that sees no key, or has no query, takes one step too: consumers always wait for a first block
    steps = gl.maximum((end - begin + BLOCK - 1) // BLOCK, 1)
    wide_rate = rate.to(gl.int64)
    row = (first - q_first).to(gl.int64) + i0 * wide_rate
    return batch, head, branch, wide_rate, first, count, i0, high, row, begin, gl.where(i0 < high, steps, 1), place + tile * ROWS, places
