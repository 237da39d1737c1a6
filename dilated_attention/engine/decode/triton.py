"""One row of attention per request over a cache, as Triton kernels: the keys of a row are split among programs, whose parts are merged.

The keys of all runs of a row are concatenated and cut into equal chunks, so that programs have equal work whatever the runs are. Each
program reads its keys and values in place from the cache, once for all query heads that share them. Scores and sums are in float32.

A program multiplies tiles even for a single query head, whose tile is padded: the tensor cores have time to spare, and loads run ahead.
Tensor cores do not multiply float32, so in float32 a program for one head keeps a separate softmax for each of its KEYS lanes and
combines them at the end.
"""

# kernels have no types that mypy knows
# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dilated_attention.backends.hardware import multiprocessors, on_device
from dilated_attention.engine.decode.keys import Cached, Runs

Table = tuple[Tensor, Tensor]

LOG2_E = 1.4426950408889634
LN_2 = tl.constexpr(0.6931471805599453)
# programs per multiprocessor: enough loads in flight to hide memory latency. Many rows are cut into more programs, so that the last ones
# to finish leave little of the GPU idle. Few rows are not, since one program has to merge the parts of a row (H200: 32 requests take 98 µs
# with 32, 127 µs with 8; one request takes 11 µs with 8, 14.5 µs with 32).
_PROGRAMS, _PROGRAMS_OF_MANY_ROWS = 8, 32
_MOST_SPLITS = 512
# elements of a tile of keys, for one query head and for several query heads
_TILE, _DOT_TILE = 4096, 8192
_MERGED_AT_ONCE = 16

# arguments that vary from call to call; without this list, Triton would compile a value of 1 into the kernel. Strides of keys and values
# are not in it: the kernel must be compiled for multiples of 16 to use 16-byte loads.
_VARYING = ["runs_batch", "runs_group", "kept_batch", "kept_group", "table_batch", "num_runs", "slots", "fixed", "num_splits", "num_heads"]


@triton.jit
def _places(positions, block, table, slots, fixed, inside, PAGED: tl.constexpr, WRAPS: tl.constexpr):
    """Returns (block, slot) of positions, int64; a block is a page or the request's stretch."""
    # a single return: the compiler also visits the code after an early return and expects equal shapes
    if PAGED:
        page = positions // slots
        block = tl.load(table + page, mask=inside, other=0)
        positions = positions - page * slots
    elif WRAPS:
        positions = tl.where(positions < fixed, positions, fixed + (positions - fixed) % (slots - fixed))
    return block.to(tl.int64), positions.to(tl.int64)


@triton.jit(do_not_specialize=_VARYING)
def rows_kernel(
    q_ptr, k_ptr, v_ptr, part_ptr, part_lse_ptr, first_ptr, ends_ptr, stride_ptr, kept_ptr, table_ptr,
    q_batch, q_head, k_block, k_slot, k_head, v_block, v_slot, v_head, runs_batch, runs_group, kept_batch, kept_group, table_batch,
    num_runs, slots, fixed, scale_log2,
    HEADS: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, KEYS: tl.constexpr,
    RUNS: tl.constexpr, PAGED: tl.constexpr, WRAPS: tl.constexpr, KEPT: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Writes parts (B, H, splits, D) and their log-sum-exps (B, H, splits) to base 2.

    A part without keys has −inf and may hold arbitrary values. HEADS query heads per program, padded to ROWS; GROUP query heads per
    key/value head; KEPT: keys per run in the mask, 0 without one; DOT: multiply tiles, else HEADS is 1.
    """
    split = tl.program_id(0)
    num_splits = tl.num_programs(0)
    batch = tl.program_id(2)
    head = tl.program_id(1) * HEADS
    num_heads = tl.num_programs(1) * HEADS
    kv_head = head // GROUP
    # the group of the program's first head; if all heads are one group, its stride is 0
    runs = batch.to(tl.int64) * runs_batch + tl.program_id(1) * runs_group
    i = tl.arange(0, RUNS)
    ends = tl.load(ends_ptr + runs + i, mask=i < num_runs, other=0)
    begins = tl.load(ends_ptr + runs + i - 1, mask=(i > 0) & (i < num_runs), other=0)
    total = tl.max(ends, 0)
    chunk = tl.cdiv(tl.cdiv(total, num_splits), KEYS) * KEYS
    low = split * chunk
    high = tl.minimum(low + chunk, total)
    first_run = tl.sum(((ends <= low) & (i < num_runs)).to(tl.int32), 0)
    last_run = tl.sum(((begins < high) & (i < num_runs)).to(tl.int32), 0)
    d = tl.arange(0, BLOCK_D)
    inside_d = d < D
    lane = tl.arange(0, KEYS)
    k_ptr += kv_head.to(tl.int64) * k_head
    v_ptr += kv_head.to(tl.int64) * v_head
    table = table_ptr + batch.to(tl.int64) * table_batch
    q_ptr += batch.to(tl.int64) * q_batch
    part = (batch.to(tl.int64) * num_heads + head) * num_splits + split
    if not DOT:
        q = tl.load(q_ptr + head.to(tl.int64) * q_head + d, mask=inside_d, other=0.0).to(tl.float32) * scale_log2
        highest = tl.full([KEYS], -float("inf"), tl.float32)
        sums = tl.zeros([KEYS], tl.float32)
        acc = tl.zeros([KEYS, BLOCK_D], tl.float32)
    else:
        m = tl.arange(0, ROWS)
        q = tl.load(
            q_ptr + (head + m).to(tl.int64)[:, None] * q_head + d[None, :], mask=(m < HEADS)[:, None] & inside_d[None, :], other=0.0
        )
        highest = tl.full([ROWS], -float("inf"), tl.float32)
        sums = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for run in range(first_run, last_run):
        end = tl.load(ends_ptr + runs + run)
        begin = tl.load(ends_ptr + runs + run - 1, mask=run > 0, other=0)
        first = tl.load(first_ptr + runs + run)
        stride = tl.load(stride_ptr + run)
        stop = tl.minimum(high, end) - begin
        for start in tl.range(tl.maximum(low, begin) - begin, stop, KEYS, num_stages=2):
            index = start + lane
            inside = index < stop
            block, slot = _places(first + index * stride, batch, table, slots, fixed, inside, PAGED, WRAPS)
            taken = inside
            if KEPT:
                at = kept_ptr + batch.to(tl.int64) * kept_batch + tl.program_id(1) * kept_group + run * KEPT + index
                taken = taken & (tl.load(at, mask=inside, other=0) != 0)
            mask = inside[:, None] & inside_d[None, :]
            k = tl.load(k_ptr + (block * k_block + slot * k_slot)[:, None] + d[None, :], mask=mask, other=0.0)
            v = tl.load(v_ptr + (block * v_block + slot * v_slot)[:, None] + d[None, :], mask=mask, other=0.0)
            if not DOT:
                s = tl.where(taken, tl.sum(k.to(tl.float32) * q[None, :], 1), -float("inf"))
                new = tl.maximum(highest, s)
                base = tl.where(new == -float("inf"), 0.0, new)
                p = tl.exp2(s - base)
                again = tl.exp2(highest - base)
                acc = acc * again[:, None] + p[:, None] * v.to(tl.float32)
                sums = sums * again + p
            else:
                s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
                s = tl.where(taken[None, :], s, -float("inf"))
                new = tl.maximum(highest, tl.max(s, 1))
                base = tl.where(new == -float("inf"), 0.0, new)
                p = tl.exp2(s - base[:, None])
                again = tl.exp2(highest - base)
                acc = tl.dot(p.to(v.dtype), v, acc * again[:, None], input_precision="ieee")
                sums = sums * again + tl.sum(p, 1)
            highest = new
    if not DOT:
        top = tl.max(highest, 0)
        base = tl.where(top == -float("inf"), 0.0, top)
        weight = tl.exp2(highest - base)
        total_sum = tl.sum(sums * weight, 0)
        out = tl.sum(acc * weight[:, None], 0) / tl.where(total_sum > 0, total_sum, 1.0)
        lse = tl.where(total_sum > 0, base + tl.log2(tl.where(total_sum > 0, total_sum, 1.0)), -float("inf"))
        tl.store(part_lse_ptr + part, lse)
        tl.store(part_ptr + part * D + d, out, mask=inside_d)
    else:
        some = sums > 0
        safe = tl.where(some, sums, 1.0)
        lse = tl.where(some, highest + tl.log2(safe), -float("inf"))
        places = part + m * num_splits
        tl.store(part_lse_ptr + places, lse, mask=m < HEADS)
        tl.store(part_ptr + places[:, None] * D + d[None, :], acc / safe[:, None], mask=((m < HEADS) & some)[:, None] & inside_d[None, :])


@triton.jit(do_not_specialize=_VARYING)
def merge_kernel(
    part_ptr, part_lse_ptr, out_ptr, lse_ptr, out_batch, out_head, num_splits,
    D: tl.constexpr, BLOCK_D: tl.constexpr, SPLITS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Merges the parts of each (request, head) into out (B, H, D) and lse (B, H), natural logarithm."""
    head = tl.program_id(0)
    batch = tl.program_id(1).to(tl.int64)
    pair = batch * tl.num_programs(0) + head
    i = tl.arange(0, SPLITS)
    lses = tl.load(part_lse_ptr + pair * num_splits + i, mask=i < num_splits, other=-float("inf"))
    top = tl.max(lses, 0)
    base = tl.where(top == -float("inf"), 0.0, top)
    total = tl.sum(tl.exp2(lses - base), 0)
    d = tl.arange(0, BLOCK_D)
    step = tl.arange(0, STEP)
    acc = tl.zeros([STEP, BLOCK_D], tl.float32)
    for first in range(0, num_splits, STEP):
        at = first + step
        weight = tl.exp2(tl.load(part_lse_ptr + pair * num_splits + at, mask=at < num_splits, other=-float("inf")) - base)
        rows = part_ptr + (pair * num_splits + at)[:, None] * D + d[None, :]
        # a part without keys may hold arbitrary values
        acc += tl.load(rows, mask=(weight > 0)[:, None] & (d < D)[None, :], other=0.0) * weight[:, None]
    safe = tl.where(total > 0, total, 1.0)
    out = tl.sum(acc, 0) / safe
    tl.store(out_ptr + batch * out_batch + head.to(tl.int64) * out_head + d, out.to(out_ptr.dtype.element_ty), mask=d < D)
    tl.store(lse_ptr + pair, tl.where(total > 0, (base + tl.log2(safe)) * LN_2, -float("inf")))


@triton.jit(do_not_specialize=_VARYING)
def append_kernel(
    q_ptr, k_ptr, v_ptr, q_cos_ptr, q_sin_ptr, k_cos_ptr, k_sin_ptr, positions_ptr, out_ptr, to_k_ptr, to_v_ptr, table_ptr,
    q_batch, q_head, k_batch, k_head, v_batch, v_head, out_batch, out_head, to_k_block, to_k_slot, to_k_head, to_v_block, to_v_slot,
    to_v_head,
    table_batch, slots, fixed, num_heads, num_kv_heads,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROTATED: tl.constexpr, PAGED: tl.constexpr, WRAPS: tl.constexpr,
):  # fmt: skip
    """One program per head: rotates query heads into out, and key heads into the cache at each request's position; copies value heads."""
    batch = tl.program_id(0)
    program = tl.program_id(1)
    HALF: tl.constexpr = D // 2
    d = tl.arange(0, BLOCK_D)
    inside = d < D
    far = batch.to(tl.int64)
    if program < num_heads:
        source = q_ptr + far * q_batch + program * q_head
        x = _turned(source, q_cos_ptr, q_sin_ptr, batch, d, inside, HALF, ROTATED)
        tl.store(out_ptr + far * out_batch + program * out_head + d, x.to(out_ptr.dtype.element_ty), mask=inside)
    else:
        position = tl.load(positions_ptr + batch).to(tl.int32)
        block, slot = _places(position, batch, table_ptr + far * table_batch, slots, fixed, position >= 0, PAGED, WRAPS)
        head = (program - num_heads) % num_kv_heads
        if program < num_heads + num_kv_heads:
            x = _turned(k_ptr + far * k_batch + head * k_head, k_cos_ptr, k_sin_ptr, batch, d, inside, HALF, ROTATED)
            target = to_k_ptr + block * to_k_block + slot * to_k_slot + head * to_k_head
            tl.store(target + d, x.to(to_k_ptr.dtype.element_ty), mask=inside)
        else:
            value = tl.load(v_ptr + far * v_batch + head * v_head + d, mask=inside)
            tl.store(to_v_ptr + block * to_v_block + slot * to_v_slot + head * to_v_head + d, value, mask=inside)


@triton.jit
def _turned(x_ptr, cos_ptr, sin_ptr, batch, d, inside, HALF: tl.constexpr, ROTATED: tl.constexpr):
    """Returns a head with each pair (x_i, x_{i + D/2}) rotated by the request's table (B, D/2), in float32."""
    x = tl.load(x_ptr + d, mask=inside, other=0.0).to(tl.float32)
    if ROTATED:
        second = d >= HALF
        pair = tl.where(second, d - HALF, d)
        other = tl.load(x_ptr + tl.where(second, d - HALF, d + HALF), mask=inside, other=0.0).to(tl.float32)
        cos = tl.load(cos_ptr + batch * HALF + pair, mask=inside, other=0.0)
        sin = tl.load(sin_ptr + batch * HALF + pair, mask=inside, other=0.0)
        x = x * cos + tl.where(second, other, -other) * sin
    return x


def rotate_and_append(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, cached: Cached, tables: tuple[Table, Table] | None) -> Tensor:
    """Returns q (B, H, D) rotated, and writes rotated k and v (B, K, D) into the cache at positions (B,).

    One kernel replaces about twenty torch kernels.

    Args:
        tables: ((cos, sin) of queries, (cos, sin) of keys), each B · D/2 float32 numbers; None to rotate nothing.
    """
    (B, H, D), K = q.shape, k.shape[1]
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == cached.k.stride(-1) == cached.v.stride(-1) == 1
    (q_cos, q_sin), (k_cos, k_sin) = tables if tables is not None else ((q, q), (q, q))
    assert tables is None or all(x.is_contiguous() and x.numel() == B * (D // 2) and x.dtype is torch.float32 for x in (q_cos, k_sin))
    out = q.new_empty((B, H, D))
    table = cached.table
    with on_device(q.device):
        append_kernel[(B, H + 2 * K)](
            q, k, v, q_cos, q_sin, k_cos, k_sin, positions, out, cached.k, cached.v, positions if table is None else table,
            *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *out.stride()[:2], *cached.k.stride()[:3], *cached.v.stride()[:3],
            0 if table is None else table.stride(0), cached.slots, cached.fixed, H, K,
            D=D, BLOCK_D=triton.next_power_of_2(D), ROTATED=tables is not None, PAGED=table is not None, WRAPS=cached.wraps, num_warps=1,
        )  # fmt: skip
    return out


def decode(q: Tensor, cached: Cached, runs: Runs, scale: float, *, num_splits: int | None = None) -> tuple[Tensor, Tensor]:
    """Same as ``engine.decode.dispatch.torch_decode``, without a host synchronization.

    Args:
        num_splits: number of programs that share a row; None for as many as keep the GPU busy.
    """
    B, H, D = q.shape
    K = cached.k.shape[2]
    k, v, table = cached.k, cached.v, cached.table
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1 and q.dtype is k.dtype is v.dtype
    G = runs.num_groups
    # number of query heads that read the same keys of one key/value head
    heads = H // max(G, K)
    block_d = max(16, triton.next_power_of_2(D))
    dot = heads > 1 or q.dtype is not torch.float32
    keys = min(128, max(16, (_TILE if heads == 1 else _DOT_TILE) // block_d))
    if q.dtype is torch.float32:
        keys = max(16, keys // 2)
    if num_splits is None:
        rows, processors = B * (H // heads), multiprocessors(q.device)
        wanted = triton.cdiv((_PROGRAMS if rows < processors else _PROGRAMS_OF_MANY_ROWS) * processors, max(1, rows))
        num_splits = max(1, min(wanted, triton.cdiv(runs.max_keys, keys), _MOST_SPLITS))
    out, lse = q.new_empty((B, H, D)), q.new_empty((B, H), dtype=torch.float32)
    parts, part_lses = lse.new_empty((B, H, num_splits, D)), lse.new_empty((B, H, num_splits))
    kept = runs.kept
    assert runs.first.is_contiguous() and runs.ends.is_contiguous() and (kept is None or kept.is_contiguous())
    with on_device(q.device):
        rows_kernel[(num_splits, H // heads, B)](
            q, k, v, parts, part_lses, runs.first, runs.ends, runs.stride,
            q if kept is None else kept.view(torch.uint8), q if table is None else table,
            *q.stride()[:2], *k.stride()[:3], *v.stride()[:3],
            runs.first.stride(0), 0 if G == 1 else runs.first.stride(1),
            *((0, 0) if kept is None else (kept.stride(0), 0 if G == 1 else kept.stride(1))),
            0 if table is None else table.stride(0), runs.first.shape[2], cached.slots, cached.fixed, scale * LOG2_E,
            HEADS=heads, ROWS=max(16, triton.next_power_of_2(heads)), GROUP=H // K, D=D, BLOCK_D=block_d, KEYS=keys,
            RUNS=triton.next_power_of_2(runs.first.shape[2]), PAGED=table is not None, WRAPS=cached.wraps,
            KEPT=0 if kept is None else kept.shape[3], DOT=dot, num_warps=4,
        )  # fmt: skip
        merge_kernel[(H, B)](
            parts, part_lses, out, lse, *out.stride()[:2], num_splits,
            D=D, BLOCK_D=block_d, SPLITS=triton.next_power_of_2(num_splits), STEP=min(_MERGED_AT_ONCE, triton.next_power_of_2(num_splits)),
        )  # fmt: skip
    return out, lse
