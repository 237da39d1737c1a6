"""Triton kernels of attention over block lists: the forward, the row statistics for the backward, dq, and dk with dv.

    out_i = Σ_j exp(s_ij) v_j / Σ_j exp(s_ij)        s_ij = scale · q_i·k_j, j over the kept pairs of row i
    p_ij = exp(s_ij − lse_i)        ds_ij = p_ij (dout_i·v_j − δ_i)        δ_i = dout_i·out_i − dlse_i
    dq_i = scale Σ_j ds_ij k_j        dk_j = scale Σ_i ds_ij q_i        dv_j = Σ_i p_ij dout_i

A program computes a tile of ROWS queries (or KEYS keys) inside one block and loops over the blocks in its list, KEYS keys (ROWS
queries) at a time. No two programs write the same element, so results are the same in every run.

A single loop visits full and masked blocks in the order of the list. The test for a mask is a branch that is uniform over the program;
two loops would drain and refill the pipeline of loads in between, which is too expensive for rows with few blocks.

``WALK`` is (query block, key block, ROWS, KEYS); ``MASKS`` is 0 none · 1 interval · 2 bits. Strides are in units of ``ALIGN`` elements;
offsets within a tile use 64 bits if ``WIDE``. Positions use 32 bits, addresses of blocks 64.
"""

# mypy does not know the types of kernels
# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
# below every score but finite, so that differences are not NaN in a row without keys so far
LOWEST = tl.constexpr(-1e30)

# sizes and strides vary between calls; Triton would otherwise specialise the kernel for a value of 1
_VARYING = [
    *(f"{x}_{stride}" for x in ("q", "k", "v", "out", "dout", "lse", "dlse") for stride in ("batch", "token", "head")),
    *("num_queries", "num_keys", "num_lists", "num_pairs", "num_heads", "list_batch", "list_head", "order_batch", "order_head"),
    *("padding_batch", "padding_key"),
]


@triton.jit
def _position(heavy_ptr, num_lists, num_pairs, PARTS: tl.constexpr):
    """Returns (part of a block, (batch, head) pair, place in the order of its lists).

    The longest lists of all pairs come first, then one pair after the other, since the programs of a pair share keys in the cache.
    """
    item = tl.program_id(0) // PARTS
    heavy = tl.load(heavy_ptr)
    late = item - heavy * num_pairs
    light = tl.maximum(num_lists - heavy, 1)
    pair = tl.where(late < 0, item % num_pairs, late // light)
    place = tl.where(late < 0, item // num_pairs, heavy + late % light)
    return tl.program_id(0) % PARTS, pair, place


@triton.jit
def _rows(x_ptr, first, token, end, COUNT: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, EVEN: tl.constexpr,
          ALIGN: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    """Loads rows first … first + COUNT − 1 of x, (COUNT, BLOCK_D), with zeros from row ``end`` and channel D on."""
    n = tl.arange(0, COUNT)
    d = tl.arange(0, BLOCK_D)
    n_far = n.to(tl.int64) if WIDE else n
    pointers = x_ptr + first.to(tl.int64) * token * ALIGN + n_far[:, None] * (token * ALIGN) + d[None, :]
    if EVEN and BLOCK_D == D:
        return tl.load(pointers)
    if EVEN:
        return tl.load(pointers, mask=(d < D)[None, :], other=0.0)
    if BLOCK_D == D:
        return tl.load(pointers, mask=(first + n < end)[:, None], other=0.0)
    return tl.load(pointers, mask=(first + n < end)[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def _base(x_ptr, batch, head, x_batch, x_head, ALIGN: tl.constexpr):
    return x_ptr + batch.to(tl.int64) * x_batch * ALIGN + head.to(tl.int64) * x_head * ALIGN


@triton.jit
def _first(list_ptr, start, end):
    return tl.load(list_ptr + start, mask=start < end, other=0)


@triton.jit
def _next(list_ptr, step, end, SUBS: tl.constexpr):
    """Loads the block of step + 1 one step ahead; otherwise loads of tiles would wait for it and the pipeline would lose a stage."""
    return tl.load(list_ptr + tl.minimum((step + 1) // SUBS, end - 1))


@triton.jit
def _kept(mask, part, sub, first_query, first_key, bits_ptr, low_ptr, high_ptr, num_queries, num_keys,
          WALK: tl.constexpr, MASKS: tl.constexpr, TRANSPOSED: tl.constexpr):  # fmt: skip
    """Returns which pairs of tile (part, sub) of a block are kept, (ROWS, KEYS) or transposed. A negative ``mask`` index means no mask."""
    ROWS: tl.constexpr = WALK[2]
    KEYS: tl.constexpr = WALK[3]
    # positions along the tile's two dimensions, broadcastable to the tile
    row = tl.arange(0, ROWS)[None, :] if TRANSPOSED else tl.arange(0, ROWS)[:, None]
    key = tl.arange(0, KEYS)[:, None] if TRANSPOSED else tl.arange(0, KEYS)[None, :]
    kept = first_key + key < num_keys
    if MASKS == 1:
        inside = first_query + row < num_queries
        low = tl.load(low_ptr + first_query + row, mask=inside, other=0)
        high = tl.load(high_ptr + first_query + row, mask=inside, other=0)
        kept = kept & ((mask < 0) | ((first_key + key >= low) & (first_key + key < high)))
    if MASKS == 2:
        WORDS: tl.constexpr = WALK[1] // 32
        word = tl.arange(0, KEYS // 32)[:, None] if TRANSPOSED else tl.arange(0, KEYS // 32)[None, :]
        tile = bits_ptr + tl.maximum(mask, 0).to(tl.int64) * (WALK[0] * WORDS)
        words = tl.load(
            tile + (part * ROWS + row) * WORDS + sub * (KEYS // 32) + word, mask=(row >= 0) & (word >= 0) & (mask >= 0), other=-1
        )
        if TRANSPOSED:
            bits = tl.reshape((words[:, None, :] >> tl.arange(0, 32)[None, :, None]) & 1, (KEYS, ROWS))
        else:
            bits = tl.reshape((words[:, :, None] >> tl.arange(0, 32)[None, None, :]) & 1, (ROWS, KEYS))
        kept = kept & (bits != 0)
    return kept


@triton.jit
def _hide(x, FILL: tl.constexpr, masks_ptr, entry, part, sub, first_query, first_key, bits_ptr, low_ptr, high_ptr, padding_ptr,
          padding_key, num_queries, num_keys,
          WALK: tl.constexpr, MASKS: tl.constexpr, PADDED: tl.constexpr, EVEN: tl.constexpr):  # fmt: skip
    """Sets x (ROWS, KEYS) to FILL where the pair is not kept."""
    KEYS: tl.constexpr = WALK[3]
    if MASKS:
        mask = tl.load(masks_ptr + entry)
        if (mask >= 0) | (first_key + KEYS > num_keys):
            kept = _kept(mask, part, sub, first_query, first_key, bits_ptr, low_ptr, high_ptr, num_queries, num_keys, WALK, MASKS, False)
            x = tl.where(kept, x, FILL)
    elif not EVEN:  # noqa: SIM102 - the compiler knows one of the two, the program the other
        if first_key + KEYS > num_keys:
            x = tl.where((first_key + tl.arange(0, KEYS) < num_keys)[None, :], x, FILL)
    if PADDED:
        keys = first_key + tl.arange(0, KEYS)
        padded = tl.load(padding_ptr + keys.to(tl.int64) * padding_key, mask=keys < num_keys, other=1)
        x = tl.where((padded == 0)[None, :], x, FILL)
    return x


@triton.jit(do_not_specialize=_VARYING)
def forward_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, starts_ptr, columns_ptr, masks_ptr, bits_ptr, low_ptr, high_ptr, padding_ptr, order_ptr,
    heavy_ptr,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head, padding_batch, padding_key,
    num_queries, num_keys, num_lists, num_pairs, num_heads, list_batch, list_head, order_batch, order_head, scale,
    WALK: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, MASKS: tl.constexpr, NEGATIVE: tl.constexpr,
    PADDED: tl.constexpr, EVEN: tl.constexpr, ALIGN: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Writes out (B, Nq, H, D), dense, and lse (B, H, Nq). Each program computes ROWS queries of a (batch, head).

    ``scale`` ≥ 0; with NEGATIVE it multiplies −q·k.
    """
    ROWS: tl.constexpr = WALK[2]
    KEYS: tl.constexpr = WALK[3]
    SUBS: tl.constexpr = WALK[1] // KEYS
    part, pair, place = _position(heavy_ptr, num_lists, num_pairs, WALK[0] // ROWS)
    batch = pair // num_heads
    head = pair % num_heads
    block = tl.load(order_ptr + (batch * order_batch + head * order_head) * num_lists + place)
    index = (batch * list_batch + head * list_head) * num_lists + block
    start = tl.load(starts_ptr + index)
    end = tl.load(starts_ptr + index + 1)
    first_query = block * WALK[0] + part * ROWS
    q = _rows(_base(q_ptr, batch, head, q_batch, q_head, ALIGN), first_query, q_token, num_queries, ROWS, D, BLOCK_D, False, ALIGN, WIDE)
    k_ptr = _base(k_ptr, batch, head // GROUP, k_batch, k_head, ALIGN)
    v_ptr = _base(v_ptr, batch, head // GROUP, v_batch, v_head, ALIGN)
    if PADDED:
        padding_ptr += batch.to(tl.int64) * padding_batch
    scale_log2 = scale * LOG2_E
    highest = tl.full([ROWS], LOWEST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    column = _first(columns_ptr, start, end)
    for step in range(start * SUBS, end * SUBS):
        entry = step // SUBS
        sub = step % SUBS
        first_key = column * WALK[1] + sub * KEYS
        column = _next(columns_ptr, step, end, SUBS)
        k = _rows(k_ptr, first_key, k_token, num_keys, KEYS, D, BLOCK_D, EVEN, ALIGN, WIDE)
        s = tl.dot(q, tl.trans(k), input_precision="ieee")
        if NEGATIVE:
            s = -s
        s = _hide(
            s, float("-inf"), masks_ptr, entry, part, sub, first_query, first_key, bits_ptr, low_ptr, high_ptr, padding_ptr, padding_key,
            num_queries, num_keys, WALK, MASKS, PADDED, EVEN,
        )  # fmt: skip
        new = tl.maximum(highest, tl.max(s, 1))
        p = tl.exp2(s * scale_log2 - (new * scale_log2)[:, None])
        rescale = tl.exp2((highest - new) * scale_log2)
        v = _rows(v_ptr, first_key, v_token, num_keys, KEYS, D, BLOCK_D, EVEN, ALIGN, WIDE)
        acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision="ieee")
        total = total * rescale + tl.sum(p, 1)
        highest = new
    rows = first_query + tl.arange(0, ROWS)
    d = tl.arange(0, BLOCK_D)
    inside = rows < num_queries
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    lse = tl.where(empty, float("-inf"), highest * scale + tl.log2(total) * LN_2)
    tl.store(lse_ptr + pair.to(tl.int64) * num_queries + rows, lse, mask=inside)
    acc = acc / total[:, None]
    far = (batch.to(tl.int64) * num_queries + rows) * num_heads + head
    tl.store(out_ptr + far[:, None] * D + d[None, :], acc.to(out_ptr.dtype.element_ty), mask=inside[:, None] & (d < D)[None, :])


@triton.jit(do_not_specialize=_VARYING)
def rows_kernel(
    dout_ptr, out_ptr, lse_ptr, dlse_ptr, offset_ptr, delta_ptr,
    dout_batch, dout_token, dout_head, out_batch, out_token, out_head, lse_batch, lse_token, lse_head, dlse_batch, dlse_token, dlse_head,
    num_queries, num_lists, num_heads,
    ROWS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, HAS_DLSE: tl.constexpr, ALIGN: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Writes offset = lse · log2 e and delta = δ, (B, H, num_lists · ROWS); +inf and 0 for rows that take no part or are past the end."""
    block = tl.program_id(0) % num_lists
    pair = tl.program_id(0) // num_lists
    batch = pair // num_heads
    head = pair % num_heads
    first = block * ROWS
    dout = _rows(
        _base(dout_ptr, batch, head, dout_batch, dout_head, ALIGN), first, dout_token, num_queries, ROWS, D, BLOCK_D, False, ALIGN, WIDE
    )
    out = _rows(
        _base(out_ptr, batch, head, out_batch, out_head, ALIGN), first, out_token, num_queries, ROWS, D, BLOCK_D, False, ALIGN, WIDE
    )
    delta = tl.sum(dout.to(tl.float32) * out.to(tl.float32), 1)
    rows = first + tl.arange(0, ROWS)
    far = rows.to(tl.int64)
    inside = rows < num_queries
    lse_ptr += batch.to(tl.int64) * lse_batch + head.to(tl.int64) * lse_head
    lse = tl.load(lse_ptr + far * lse_token, mask=inside, other=float("inf"))
    if HAS_DLSE:
        dlse_ptr += batch.to(tl.int64) * dlse_batch + head.to(tl.int64) * dlse_head
        delta -= tl.load(dlse_ptr + far * dlse_token, mask=inside, other=0.0)
    outside = tl.abs(lse) == float("inf")
    target = pair.to(tl.int64) * num_lists * ROWS + rows
    tl.store(offset_ptr + target, tl.where(outside, float("inf"), lse * LOG2_E))
    tl.store(delta_ptr + target, tl.where(outside, 0.0, delta))


@triton.jit(do_not_specialize=_VARYING)
def dq_kernel(
    dout_ptr, q_ptr, k_ptr, v_ptr, dq_ptr, offset_ptr, delta_ptr,
    starts_ptr, columns_ptr, masks_ptr, bits_ptr, low_ptr, high_ptr, padding_ptr, order_ptr, heavy_ptr,
    dout_batch, dout_token, dout_head, q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head, padding_batch,
    padding_key, num_queries, num_keys, num_lists, num_pairs, num_heads, list_batch, list_head, order_batch, order_head, scale,
    WALK: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, MASKS: tl.constexpr,
    PADDED: tl.constexpr, EVEN: tl.constexpr, ALIGN: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip  # fmt: skip
    """Writes dq (B, Nq, H, D), dense; programs are assigned as in ``forward_kernel``."""
    ROWS: tl.constexpr = WALK[2]
    KEYS: tl.constexpr = WALK[3]
    SUBS: tl.constexpr = WALK[1] // KEYS
    part, pair, place = _position(heavy_ptr, num_lists, num_pairs, WALK[0] // ROWS)
    batch = pair // num_heads
    head = pair % num_heads
    block = tl.load(order_ptr + (batch * order_batch + head * order_head) * num_lists + place)
    index = (batch * list_batch + head * list_head) * num_lists + block
    start = tl.load(starts_ptr + index)
    end = tl.load(starts_ptr + index + 1)
    first_query = block * WALK[0] + part * ROWS
    q = _rows(_base(q_ptr, batch, head, q_batch, q_head, ALIGN), first_query, q_token, num_queries, ROWS, D, BLOCK_D, False, ALIGN, WIDE)
    dout = _base(dout_ptr, batch, head, dout_batch, dout_head, ALIGN)
    dout = _rows(dout, first_query, dout_token, num_queries, ROWS, D, BLOCK_D, False, ALIGN, WIDE)
    rows = first_query + tl.arange(0, ROWS)
    padded_rows = pair.to(tl.int64) * num_lists * WALK[0] + rows
    offset = tl.load(offset_ptr + padded_rows)
    delta = tl.load(delta_ptr + padded_rows)
    k_ptr = _base(k_ptr, batch, head // GROUP, k_batch, k_head, ALIGN)
    v_ptr = _base(v_ptr, batch, head // GROUP, v_batch, v_head, ALIGN)
    if PADDED:
        padding_ptr += batch.to(tl.int64) * padding_batch
    scale_log2 = scale * LOG2_E
    dq = tl.zeros([ROWS, BLOCK_D], tl.float32)
    column = _first(columns_ptr, start, end)
    for step in range(start * SUBS, end * SUBS):
        entry = step // SUBS
        sub = step % SUBS
        first_key = column * WALK[1] + sub * KEYS
        column = _next(columns_ptr, step, end, SUBS)
        k = _rows(k_ptr, first_key, k_token, num_keys, KEYS, D, BLOCK_D, EVEN, ALIGN, WIDE)
        v = _rows(v_ptr, first_key, v_token, num_keys, KEYS, D, BLOCK_D, EVEN, ALIGN, WIDE)
        s = tl.dot(q, tl.trans(k), input_precision="ieee")
        p = tl.exp2(s * scale_log2 - offset[:, None])
        p = _hide(
            p, 0.0, masks_ptr, entry, part, sub, first_query, first_key, bits_ptr, low_ptr, high_ptr, padding_ptr, padding_key,
            num_queries, num_keys, WALK, MASKS, PADDED, EVEN,
        )  # fmt: skip
        dp = tl.dot(dout, tl.trans(v), input_precision="ieee")
        ds = p * (dp - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")
    d = tl.arange(0, BLOCK_D)
    far = (batch.to(tl.int64) * num_queries + rows) * num_heads + head
    inside = (rows < num_queries)[:, None] & (d < D)[None, :]
    tl.store(dq_ptr + far[:, None] * D + d[None, :], (dq * scale).to(dq_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=_VARYING)
def dkdv_kernel(
    dout_ptr, q_ptr, k_ptr, v_ptr, dk_ptr, dv_ptr, offset_ptr, delta_ptr,
    starts_ptr, rows_ptr, masks_ptr, bits_ptr, low_ptr, high_ptr, padding_ptr, order_ptr, heavy_ptr,
    dout_batch, dout_token, dout_head, q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head, padding_batch,
    padding_key, num_queries, num_keys, num_lists, num_pairs, num_heads, list_batch, list_head, order_batch, order_head, num_rows, scale,
    WALK: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, MASKS: tl.constexpr,
    PADDED: tl.constexpr, EVEN: tl.constexpr, ALIGN: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip  # fmt: skip
    """Writes dk and dv (B, Nk, K, D), dense.

    Each program computes KEYS keys of a (batch, key head) over all its query heads, ROWS queries at a time. ``num_heads``, pairs, lists and
    order are those of key heads and key blocks; ``num_rows`` is the number of query blocks. Scores are transposed.
    """
    ROWS: tl.constexpr = WALK[2]
    KEYS: tl.constexpr = WALK[3]
    SUBS: tl.constexpr = WALK[0] // ROWS
    part, pair, place = _position(heavy_ptr, num_lists, num_pairs, WALK[1] // KEYS)
    batch = pair // num_heads
    key_head = pair % num_heads
    block = tl.load(order_ptr + (batch * order_batch + key_head * order_head) * num_lists + place)
    first_key = block * WALK[1] + part * KEYS
    k = _rows(_base(k_ptr, batch, key_head, k_batch, k_head, ALIGN), first_key, k_token, num_keys, KEYS, D, BLOCK_D, False, ALIGN, WIDE)
    v = _rows(_base(v_ptr, batch, key_head, v_batch, v_head, ALIGN), first_key, v_token, num_keys, KEYS, D, BLOCK_D, False, ALIGN, WIDE)
    scale_log2 = scale * LOG2_E
    dk = tl.zeros([KEYS, BLOCK_D], tl.float32)
    dv = tl.zeros([KEYS, BLOCK_D], tl.float32)
    for member in range(GROUP):
        head = key_head * GROUP + member
        index = (batch * list_batch + head * list_head) * num_lists + block
        start = tl.load(starts_ptr + index)
        end = tl.load(starts_ptr + index + 1)
        q_of_head = _base(q_ptr, batch, head, q_batch, q_head, ALIGN)
        dout_of_head = _base(dout_ptr, batch, head, dout_batch, dout_head, ALIGN)
        first_row = (batch * (num_heads * GROUP) + head).to(tl.int64) * num_rows * WALK[0]
        row = _first(rows_ptr, start, end)
        for step in range(start * SUBS, end * SUBS):
            entry = step // SUBS
            sub = step % SUBS
            first_query = row * WALK[0] + sub * ROWS
            row = _next(rows_ptr, step, end, SUBS)
            q = _rows(q_of_head, first_query, q_token, num_queries, ROWS, D, BLOCK_D, EVEN, ALIGN, WIDE)
            dout = _rows(dout_of_head, first_query, dout_token, num_queries, ROWS, D, BLOCK_D, EVEN, ALIGN, WIDE)
            at = first_row + first_query + tl.arange(0, ROWS)
            offset = tl.load(offset_ptr + at)
            delta = tl.load(delta_ptr + at)
            s = tl.dot(k, tl.trans(q), input_precision="ieee")
            p = tl.exp2(s * scale_log2 - offset[None, :])
            if MASKS:
                mask = tl.load(masks_ptr + entry)
                if mask >= 0:
                    kept = _kept(
                        mask, sub, part, first_query, first_key, bits_ptr, low_ptr, high_ptr, num_queries, num_keys, WALK, MASKS, True
                    )
                    p = tl.where(kept, p, 0.0)
            dv = tl.dot(p.to(dout.dtype), dout, dv, input_precision="ieee")
            dp = tl.dot(v, tl.trans(dout), input_precision="ieee")
            ds = p * (dp - delta[None, :])
            dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")
    keys = first_key + tl.arange(0, KEYS)
    d = tl.arange(0, BLOCK_D)
    inside = keys < num_keys
    if PADDED:
        padded = tl.load(padding_ptr + batch.to(tl.int64) * padding_batch + keys.to(tl.int64) * padding_key, mask=inside, other=1)
        dk = tl.where((padded == 0)[:, None], dk, 0.0)
        dv = tl.where((padded == 0)[:, None], dv, 0.0)
    far = (batch.to(tl.int64) * num_keys + keys) * num_heads + key_head
    inside = inside[:, None] & (d < D)[None, :]
    tl.store(dk_ptr + far[:, None] * D + d[None, :], (dk * scale).to(dk_ptr.dtype.element_ty), mask=inside)
    tl.store(dv_ptr + far[:, None] * D + d[None, :], dv.to(dv_ptr.dtype.element_ty), mask=inside)
