"""What the Hopper kernels over a table share: the row of a program, copies of strided rows into shared memory, products, stores.

A program has one producer of four warps, which fills a ring of shared-memory stages with cp.async, and consumer warpgroups with 64 rows
each, which multiply with wgmma. Rows that are not valid and columns beyond the head dim are filled with zeros.
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

# threads of the producer; each arrives at a stage's barrier when its copies are complete
COPIERS = gl.constexpr(128)
# consumer warpgroups, and rows of a program
GROUPS, ROWS = gl.constexpr(2), gl.constexpr(128)
_EX2 = gl.constexpr("ex2.approx.ftz.f32 $0, $1;")


class Flags(NamedTuple):
    """The compile-time options of a call. Not every kernel has all of them."""

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
    # this instruction flushes denormals; gl.exp2 spends three more instructions to keep them
    return gl.inline_asm_elementwise(_EX2, "=r,r", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """Returns COUNT barriers that open after ARRIVALS arrivals."""
    made = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(made.index(i), count=ARRIVALS)
    return made


@gluon.jit
def following(stage, phase, STAGES: gl.constexpr):
    """Returns the next stage of a ring, and its phase."""
    stage += 1
    if stage == STAGES:
        stage = 0
        phase ^= 1
    return stage, phase


@gluon.constexpr_function
def product_layout(columns):
    """Returns the layout of a product with 64 rows of one warpgroup."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.jit
def halves(tile, D0: gl.constexpr, D1: gl.constexpr):
    """Returns the two blocks of a tile's columns; twice the first one if there is no second."""
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
    """Returns the layout of copies: 16 bytes per thread, with whole rows copied by neighbouring threads."""
    return gl.BlockedLayout([1, 8], [32 // (columns // 8), columns // 8], [4, 1], [1, 0])


@gluon.jit
def copy_offsets(step, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Returns the offsets of the elements of ROWS rows that are ``step`` apart, in 32 bits, which saves registers."""
    layout: gl.constexpr = copy_layout(COLUMNS)
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    columns = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout))
    return gl.expand_dims(rows * step.to(gl.int32), 1) + gl.expand_dims(columns, 0)


@gluon.jit
def copy_rows(smem, base, offsets, left, D: gl.constexpr):
    """Starts the copy of a tile's first ``left`` rows; the others become 0."""
    ROWS: gl.constexpr = smem.shape[0]
    COLUMNS: gl.constexpr = smem.shape[1]
    layout: gl.constexpr = copy_layout(COLUMNS)
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    mask = gl.expand_dims(rows < left, 1)
    if COLUMNS > D:
        columns = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout))
        mask = mask & gl.expand_dims(columns < D, 0)
    else:
        mask = mask & gl.full([ROWS, COLUMNS], True, gl.int1, layout)
    async_copy.async_copy_global_to_shared(smem, base + offsets, mask=mask)


@gluon.jit
def copy_numbers(smem, base, step, left):
    """Starts the copy of a row of 32-bit numbers that are ``step`` apart; those from ``left`` on become 0."""
    COUNT: gl.constexpr = smem.shape[0]
    i = gl.arange(0, COUNT, layout=gl.BlockedLayout([1], [32], [4], [0]))
    async_copy.async_copy_global_to_shared(smem, base + i.to(gl.int64) * step, mask=i < left)


@gluon.jit
def scores(a0, a1, tile, zeros, D0: gl.constexpr, D1: gl.constexpr):
    """Starts a·tileᵀ over the columns that hold data."""
    x = warpgroup_mma(a0, tile.slice(0, D0, dim=1).permute((1, 0)), zeros, use_acc=False, is_async=True)
    if D1 > 0:
        x = warpgroup_mma(a1, tile.slice(D0, D1, dim=1).permute((1, 0)), x, is_async=True)
    return x


@gluon.jit
def store_tile(base, step, left, x, D: gl.constexpr):
    """Writes the first ``left`` rows of x in 16-byte pieces."""
    ROWS: gl.constexpr = x.shape[0]
    COLUMNS: gl.constexpr = x.shape[1]
    layout: gl.constexpr = copy_layout(COLUMNS)
    x = gl.convert_layout(x.to(base.dtype.element_ty), layout)
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    columns = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout))
    mask = gl.expand_dims(rows < left, 1) & gl.expand_dims(columns < D, 0)
    gl.store(base + copy_offsets(step, ROWS, COLUMNS), x, mask=mask)


@gluon.jit
def query_row(
    index, rows_ptr, offsets_ptr, shape, bounds, BLOCK: gl.constexpr, FLAGS: gl.constexpr
):  # fmt: skip
    """Returns what producer and consumers need from a row of the table of queries; ``begin`` is the first key that its tile sees."""
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
    # a tile without queries also processes one block, which is fully masked
    steps = gl.maximum((end - begin + BLOCK - 1) // BLOCK, 1)
    wide_rate = rate.to(gl.int64)
    row = (first - q_first).to(gl.int64) + i0 * wide_rate
    return batch, head, branch, wide_rate, first, count, i0, high, row, begin, gl.where(i0 < high, steps, 1), place + tile * ROWS, places
