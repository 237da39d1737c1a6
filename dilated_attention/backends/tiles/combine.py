"""Combines the branches' results, which are stored at places (``table.py``): the merge (forward) and the sum (backward), one launch each.

A position's place in a branch is computed from its document (found by bisection of the starts), its segment, and the offset of the head.
``spans`` (documents, branches, 4) int32: segment length, places per segment, place of segment 0, unused.
"""

# mypy does not know the types of kernels
# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl

from dilated_attention.backends.tiles.rows import LN_2, LOG2_E, VARYING


@triton.jit
def _document_of(starts_ptr, positions, steps):
    """Returns the index of the last document that starts at or before each position, among at most 2**steps documents."""
    low = positions * 0
    size = 1 << steps
    for _ in range(steps):
        size = size // 2
        low = tl.where(tl.load(starts_ptr + low + size) <= positions, low + size, low)
    return low


@triton.jit
def _place(spans_ptr, starts, documents, positions, first, branch: tl.constexpr, BRANCHES: tl.constexpr, rate, offset):
    """Returns (whether selected, place) of positions in a branch; ``first`` is the first position that has a place."""
    at = spans_ptr + (documents * BRANCHES + branch) * 4
    length, places, base = tl.load(at), tl.load(at + 1), tl.load(at + 2)
    inside = positions - starts
    segment = inside // length
    t = inside - segment * length - offset
    taken = (offset >= 0) & (t >= 0) & (t % rate == 0)
    begin = tl.maximum(positions - (inside - segment * length), first)
    return taken, base + segment * places + (positions - begin) // rate


@triton.jit(do_not_specialize=VARYING)
def merge_kernel(
    out_ptr, lse_ptr, parts_ptr, part_lse_ptr, spans_ptr, starts_ptr, rates_ptr, offsets_ptr, o_b, o_n, o_h,
    num_batches, num_heads, offset_heads, q_first, num_queries, part_rows, steps,
    D: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, BRANCHES: tl.constexpr, DIRECT: tl.constexpr,
):  # fmt: skip
    """Computes out = Σ_b e^(lse_b − lse) out_b. DIRECT: the branch whose results are already in ``out`` and ``lse``, or −1."""
    pid = tl.program_id(0)
    head = pid % num_heads
    batch = (pid // num_heads % num_batches).to(tl.int64)
    row = pid // (num_heads * num_batches) * ROWS + tl.arange(0, ROWS)
    inside = row < num_queries
    positions = row + q_first
    documents = _document_of(starts_ptr, positions, steps)
    starts = tl.load(starts_ptr + documents)
    head_row = batch * num_heads + head
    lse_at = lse_ptr + head_row * num_queries + row
    m = tl.full([ROWS], -float("inf"), tl.float32)
    if DIRECT >= 0:
        m = tl.load(lse_at, mask=inside, other=-float("inf"))
    own_lse = m
    others = row < 0
    for b in tl.static_range(BRANCHES):
        if b != DIRECT:
            rate, offset = tl.load(rates_ptr + b), tl.load(offsets_ptr + b * offset_heads + head)
            taken, place = _place(spans_ptr, starts, documents, positions, q_first, b, BRANCHES, rate, offset)
            taken = taken & inside
            others = others | taken
            m = tl.maximum(m, tl.load(part_lse_ptr + head_row * part_rows + place, mask=taken, other=-float("inf")))
    shift = tl.where(m == -float("inf"), 0.0, m)
    columns = tl.arange(0, COLUMNS)
    # a row that is only in the direct branch keeps its result
    written = others if DIRECT >= 0 else inside
    out_at = out_ptr + batch * o_b + head.to(tl.int64) * o_h + row.to(tl.int64)[:, None] * o_n + columns[None, :]
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    if DIRECT >= 0:
        total = tl.exp2((own_lse - shift) * LOG2_E)
        acc = total[:, None] * tl.load(out_at, mask=written[:, None] & (columns < D)[None, :], other=0.0).to(tl.float32)
    for b in tl.static_range(BRANCHES):
        if b != DIRECT:
            rate, offset = tl.load(rates_ptr + b), tl.load(offsets_ptr + b * offset_heads + head)
            taken, place = _place(spans_ptr, starts, documents, positions, q_first, b, BRANCHES, rate, offset)
            taken = taken & inside
            at = head_row * part_rows + place
            weight = tl.exp2((tl.load(part_lse_ptr + at, mask=taken, other=-float("inf")) - shift) * LOG2_E)
            total += weight
            part_at = parts_ptr + at[:, None] * D + columns[None, :]
            acc += weight[:, None] * tl.load(part_at, mask=taken[:, None] & (columns < D)[None, :], other=0.0).to(tl.float32)
    empty = total == 0
    acc = acc / tl.where(empty, 1.0, total)[:, None]
    tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=written[:, None] & (columns < D)[None, :])
    tl.store(lse_at, tl.where(empty, -float("inf"), shift + tl.log2(tl.where(empty, 1.0, total)) * LN_2), mask=inside)


@triton.jit
def _sum(
    grad_at, parts_ptr, spans_ptr, starts_ptr, rates_ptr, offsets_ptr, batch, first_head, part_head, part_heads, positions, documents,
    starts, inside,
    first, offset_heads, part_rows, num_shared,
    D: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, BRANCHES: tl.constexpr, DIRECT: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, COLUMNS)
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    others = positions < 0
    for h in range(num_shared):
        for b in tl.static_range(BRANCHES):
            if b != DIRECT:
                rate, offset = tl.load(rates_ptr + b), tl.load(offsets_ptr + b * offset_heads + first_head + h)
                taken, place = _place(spans_ptr, starts, documents, positions, first, b, BRANCHES, rate, offset)
                taken = taken & inside
                others = others | taken
                at = (batch * part_heads + part_head + h) * part_rows + place
                acc += tl.load(
                    parts_ptr + at[:, None] * D + columns[None, :], mask=taken[:, None] & (columns < D)[None, :], other=0.0
                ).to(tl.float32)  # fmt: skip
    written = inside
    if DIRECT >= 0:
        written = others
        acc += tl.load(grad_at, mask=written[:, None] & (columns < D)[None, :], other=0.0).to(tl.float32)
    tl.store(grad_at, acc.to(grad_at.dtype.element_ty), mask=written[:, None] & (columns < D)[None, :])


@triton.jit(do_not_specialize=VARYING)
def sum_kernel(
    dq_ptr, dk_ptr, dv_ptr, q_parts_ptr, k_parts_ptr, v_parts_ptr, q_spans_ptr, k_spans_ptr, starts_ptr, rates_ptr, offsets_ptr,
    dq_b, dq_n, dq_h, dk_b, dk_n, dk_h, dv_b, dv_n, dv_h,
    num_batches, num_heads, kv_heads, offset_heads, group, q_first, num_queries, num_keys, q_tiles, q_part_rows, k_part_rows, steps,
    D: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, BRANCHES: tl.constexpr, Q_DIRECT: tl.constexpr, K_DIRECT: tl.constexpr,
    SHARED: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Sums dq in the first ``q_tiles`` programs, dk and dv in the others, over branches and, unless SHARED, a key head's query heads."""
    pid = tl.program_id(0)
    if QUERIES and pid < q_tiles:
        head = pid % num_heads
        batch = (pid // num_heads % num_batches).to(tl.int64)
        row = pid // (num_heads * num_batches) * ROWS + tl.arange(0, ROWS)
        documents = _document_of(starts_ptr, row + q_first, steps)
        grad_at = dq_ptr + batch * dq_b + head.to(tl.int64) * dq_h + row.to(tl.int64)[:, None] * dq_n + tl.arange(0, COLUMNS)[None, :]
        _sum(
            grad_at, q_parts_ptr, q_spans_ptr, starts_ptr, rates_ptr, offsets_ptr, batch, head, head, num_heads, row + q_first, documents,
            tl.load(starts_ptr + documents), row < num_queries, q_first, offset_heads, q_part_rows, 1, D, COLUMNS, ROWS, BRANCHES, Q_DIRECT,
        )  # fmt: skip
    elif KEYS:
        pid -= q_tiles
        head = pid % kv_heads
        batch = (pid // kv_heads % num_batches).to(tl.int64)
        row = pid // (kv_heads * num_batches) * ROWS + tl.arange(0, ROWS)
        documents = _document_of(starts_ptr, row, steps)
        starts = tl.load(starts_ptr + documents)
        row64, columns = row.to(tl.int64)[:, None], tl.arange(0, COLUMNS)[None, :]
        dk_at = dk_ptr + batch * dk_b + head.to(tl.int64) * dk_h + row64 * dk_n + columns
        dv_at = dv_ptr + batch * dv_b + head.to(tl.int64) * dv_h + row64 * dv_n + columns
        part_heads = kv_heads if SHARED else num_heads
        part_head = head if SHARED else head * group
        shared = 1 if SHARED else group
        _sum(
            dk_at, k_parts_ptr, k_spans_ptr, starts_ptr, rates_ptr, offsets_ptr, batch, head * group, part_head, part_heads, row, documents,
            starts, row < num_keys, 0, offset_heads, k_part_rows, shared, D, COLUMNS, ROWS, BRANCHES, K_DIRECT,
        )  # fmt: skip
        _sum(
            dv_at, v_parts_ptr, k_spans_ptr, starts_ptr, rates_ptr, offsets_ptr, batch, head * group, part_head, part_heads, row, documents,
            starts, row < num_keys, 0, offset_heads, k_part_rows, shared, D, COLUMNS, ROWS, BRANCHES, K_DIRECT,
        )  # fmt: skip
