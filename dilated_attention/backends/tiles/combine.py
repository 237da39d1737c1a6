"""Combines the branches' results, which are stored at places (``table.py``): the merge (forward) and the sum (backward), one launch each.

A position's place in a branch is computed from its document (found by bisection of the starts), its segment, and the offset of the head.
``spans`` (documents, branches, 2) int32: place of segment 0 among queries, and among keys.

Rows count over all documents. The stride ``_b`` of a result is that of batch entries. If there is one, it is that of documents: 0, or where
they are batch entries of another tensor, what lies between the last row of one and the first row of the next. With STEP > 1, programs visit
every STEP-th row: the direct branch alone takes the others, whose results are final (``table.step_of``).
"""

# mypy does not know the types of kernels
# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl

from dilated_attention.backends.tiles.rows import LN_2, LOG2_E, VARYING


@triton.jit
def _rows(pid, num_heads, num_batches, first, starts_ptr, steps, offsets_ptr, group, ROWS: tl.constexpr, STEP: tl.constexpr):
    """Returns (head, batch, rows, their documents, positions in these) of a program. Row 0 is position ``first``.

    A document is the last one of at most 2**steps that starts at or before a position. Of ``group`` query heads to a head, ``offsets_ptr``
    has the offset of the first.
    """
    head = pid % num_heads
    batch = (pid // num_heads % num_batches).to(tl.int64)
    row = (pid // (num_heads * num_batches) * ROWS + tl.arange(0, ROWS)) * STEP
    if STEP > 1:
        row += tl.load(offsets_ptr + head * group) % STEP
    positions = row + first
    documents = positions * 0
    size = 1 << steps
    for _ in range(steps):
        size = size // 2
        documents = tl.where(tl.load(starts_ptr + documents + size) <= positions, documents + size, documents)
    return head, batch, row, documents, positions - tl.load(starts_ptr + documents)


@triton.jit
def _entry(batch, documents, num_batches):
    """Returns by what the stride ``_b`` counts: batch entries, or of a single one its documents."""
    return tl.where(num_batches > 1, batch, documents)


@triton.jit
def _place(
    spans_ptr, lengths_ptr, rates_ptr, offset, row, documents, positions, branch: tl.constexpr, BRANCHES: tl.constexpr, CUT: tl.constexpr
):  # fmt: skip
    """Returns (whether selected, place) of positions in a branch. CUT: the places of a segment begin with row 0, if that is inside."""
    length, rate = tl.load(lengths_ptr + branch), tl.load(rates_ptr + branch)
    segment = positions // length
    t = positions - segment * length - offset
    index = t // rate
    taken = (offset >= 0) & (t >= 0) & (index * rate == t)
    if CUT:
        index -= (tl.maximum(positions - row - segment * length, 0) - offset + rate - 1) // rate
    # a document that is shorter than a segment has no second one
    base = tl.load(spans_ptr + (documents * BRANCHES + branch) * 2)
    return taken, base + segment * ((length - 1) // rate + 1) + index


@triton.jit(do_not_specialize=VARYING)
def merge_kernel(
    out_ptr, lse_ptr, parts_ptr, part_lse_ptr, spans_ptr, starts_ptr, lengths_ptr, rates_ptr, offsets_ptr,
    o_b, o_n, o_h, lse_b, lse_n, lse_h, num_batches, num_heads, q_first, num_queries, part_rows, steps,
    D: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, BRANCHES: tl.constexpr, CUT: tl.constexpr, STEP: tl.constexpr,
    DIRECT: tl.constexpr,
):  # fmt: skip
    """Computes out = Σ_b e^(lse_b − lse) out_b. DIRECT: the branch whose results are already in ``out`` and ``lse``, or −1.

    Weights are relative to the largest lse and divided by their sum. So empty parts (−inf), which are not read, change nothing.
    """
    head, batch, row, documents, positions = _rows(
        tl.program_id(0), num_heads, num_batches, q_first, starts_ptr, steps, offsets_ptr + (num_heads if DIRECT == 0 else 0), 1, ROWS, STEP
    )
    inside = row < num_queries
    columns = tl.arange(0, COLUMNS)
    entry, wide = _entry(batch, documents, num_batches), row.to(tl.int64)
    lse_at = lse_ptr + entry * lse_b + wide * lse_n + head.to(tl.int64) * lse_h
    out_at = out_ptr + (entry * o_b + wide * o_n)[:, None] + head.to(tl.int64) * o_h + columns[None, :]
    m = tl.full([ROWS], -float("inf"), tl.float32)
    # a row that is only in the direct branch keeps its result
    written = row < 0 if DIRECT >= 0 else inside
    lses, places = (), ()
    for b in tl.static_range(BRANCHES):
        if b == DIRECT:
            lse, place = tl.load(lse_at, mask=inside, other=-float("inf")), wide
        else:
            offset = tl.load(offsets_ptr + b * num_heads + head)
            taken, place = _place(spans_ptr, lengths_ptr, rates_ptr, offset, row, documents, positions, b, BRANCHES, CUT)
            written = written | (taken & inside)
            place += (batch * num_heads + head) * part_rows
            lse = tl.load(part_lse_ptr + place, mask=taken & inside, other=-float("inf"))
        m = tl.maximum(m, lse)
        lses += (lse,)  # type: ignore[assignment]
        places += (place,)  # type: ignore[assignment]
    shift = tl.where(m == -float("inf"), 0.0, m)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for b in tl.static_range(BRANCHES):
        weight = tl.exp2((lses[b] - shift) * LOG2_E)
        total += weight
        part_at = out_at if b == DIRECT else parts_ptr + places[b][:, None] * D + columns[None, :]
        read = (written & (weight > 0))[:, None] & (columns < D)[None, :]
        acc += weight[:, None] * tl.load(part_at, mask=read, other=0.0).to(tl.float32)
    empty = total == 0
    acc = acc / tl.where(empty, 1.0, total)[:, None]
    tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=written[:, None] & (columns < D)[None, :])
    tl.store(lse_at, tl.where(empty, -float("inf"), shift + tl.log2(tl.where(empty, 1.0, total)) * LN_2), mask=inside)


@triton.jit
def _of(kind, of_queries, of_keys, of_values):
    return tl.where(kind == 0, of_queries, tl.where(kind == 1, of_keys, of_values))


@triton.jit(do_not_specialize=VARYING)
def sum_kernel(
    dq_ptr, dk_ptr, dv_ptr, q_parts_ptr, k_parts_ptr, v_parts_ptr, spans_ptr, starts_ptr, lengths_ptr, rates_ptr, offsets_ptr,
    dq_b, dq_n, dq_h, dk_b, dk_n, dk_h, dv_b, dv_n, dv_h,
    num_batches, num_heads, q_first, num_queries, q_part_rows, steps, kv_heads, group, num_shared, num_keys, q_tiles, k_tiles, k_part_rows,
    direct, key_direct, D: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, BRANCHES: tl.constexpr, CUT: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    """Sums dq in the first ``q_tiles`` programs, dk in the next ``k_tiles``, dv in the others: over branches and, of keys, over the
    ``num_shared`` query heads of a head whose results are separate."""
    pid = tl.program_id(0)
    kind = (pid >= q_tiles).to(tl.int32) + (pid >= q_tiles + k_tiles).to(tl.int32)
    grad_ptr, parts_ptr = _of(kind, dq_ptr, dk_ptr, dv_ptr), _of(kind, q_parts_ptr, k_parts_ptr, v_parts_ptr)
    g_b, g_n, g_h = _of(kind, dq_b, dk_b, dv_b), _of(kind, dq_n, dk_n, dv_n), _of(kind, dq_h, dk_h, dv_h)
    spans_ptr, direct = spans_ptr + _of(kind, 0, 1, 1), _of(kind, direct, key_direct, key_direct)
    num_rows, part_rows = _of(kind, num_queries, num_keys, num_keys), _of(kind, q_part_rows, k_part_rows, k_part_rows)
    heads = _of(kind, num_heads, kv_heads, kv_heads)
    group, num_shared = _of(kind, 1, group, group), _of(kind, 1, num_shared, num_shared)
    head, batch, row, documents, positions = _rows(
        pid - _of(kind, 0, q_tiles, q_tiles + k_tiles), heads, num_batches, _of(kind, q_first, 0, 0), starts_ptr, steps,
        offsets_ptr + tl.where(direct == 0, num_heads, 0), group, ROWS, STEP,
    )  # fmt: skip
    columns = tl.arange(0, COLUMNS)
    grad_at = (
        grad_ptr
        + (_entry(batch, documents, num_batches) * g_b + row.to(tl.int64) * g_n)[:, None]
        + head.to(tl.int64) * g_h
        + columns[None, :]
    )
    inside = row < num_rows
    # a row that is only in the direct branch keeps its result
    written = inside & (direct < 0)
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for h in range(num_shared):
        for b in tl.static_range(BRANCHES):
            offset = tl.load(offsets_ptr + b * num_heads + head * group + h)
            taken, place = _place(spans_ptr, lengths_ptr, rates_ptr, offset, row, documents, positions, b, BRANCHES, CUT)
            taken = taken & inside & (b != direct)
            written = written | taken
            place += ((batch * heads + head) * num_shared + h) * part_rows
            read = taken[:, None] & (columns < D)[None, :]
            acc += tl.load(parts_ptr + place[:, None] * D + columns[None, :], mask=read, other=0.0).to(tl.float32)
    written = written[:, None] & (columns < D)[None, :]
    acc += tl.load(grad_at, mask=written & (direct >= 0), other=0.0).to(tl.float32)
    tl.store(grad_at, acc.to(grad_ptr.dtype.element_ty), mask=written)
