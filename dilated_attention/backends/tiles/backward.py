"""The backward over a table of tiles: one launch for dq and δ, then one for dk and dv. Exact for the merged softmax; no atomics.

With p = e^(s − lse), lse that of the whole softmax, and δ = rowsum(dout ∘ out) − dlse:

    ds = p ∘ (dout·vᵀ − δ),  dq = scale · ds·k,  dk = scale · dsᵀ·q,  dv = pᵀ·dout,  dslope = −Σ ds ∘ distances

With ``FORM`` (``rows.Form``) the same kernels walk lists of blocks in place of a table: a program has a block and visits the blocks of its
list, ``entry`` is the place of the visited one in ``lists``. Causality and windows are then in the masks of entries, and LEFT and RIGHT are
False. With dropout ``word_a``, ``word_b`` and ``word_c`` are the random words of a query and a key (``rows.kept``).
"""

# mypy does not know the types of kernels
# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl

from dilated_attention.backends.tiles.rows import (
    LOG2_E,
    VARYING,
    class_words,
    coordinates_of,
    distances,
    drop,
    hide,
    hide_listed,
    hide_pairs,
    kept,
    key_parts,
    list_steps,
    load_both,
    load_coordinates,
    load_rows,
    next_block,
    product,
    read_list,
    read_segment,
    seen,
    store_both,
    whole_sequence,
)


@triton.jit
def _query_step(
    a, q0, q1, d0, d1, i, lse, delta, acc0, acc1, total, k_base, v_base, k_steps, v_steps, k_step, v_step, count, left, right,
    padding_ptr, pad_first, words_ptr, rate, word_steps, word_a, word_c, threshold, scale, bias, lists, entry, i0, num_queries,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, PADDING: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
    FORM: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Adds the contribution of keys [a, a + BLOCK) to dq (acc0, acc1), and with BIAS to each row's ``total`` of ds ∘ distances."""
    j = a + tl.arange(0, BLOCK)
    valid = j < count
    k_at, v_at = k_base + a * k_step, v_base + a * v_step
    k0, v0 = load_rows(k_at, k_steps, valid, 0, D0, D, MASKED), load_rows(v_at, v_steps, valid, 0, D0, D, MASKED)
    k1, v1 = k0, v0
    if D1 > 0:
        k1, v1 = load_rows(k_at, k_steps, valid, D0, D1, D, MASKED), load_rows(v_at, v_steps, valid, D0, D1, D, MASKED)
    # Padded keys are all zeros, so any finite ds adds nothing to dq. If weights are at most 1, ds is finite where dq is, except in float16,
    # whose range is too small. With BIAS this does not hold, since the coordinates of a padded key are not zeros.
    BOUNDED: tl.constexpr = PADDING and FORM is None and k0.dtype != tl.float16 and not BIAS
    x = product(q0, q1, k0, k1, D1, PRECISION) * scale - lse[:, None]
    if BIAS:
        coordinates, coordinate_rate, q_x, q_y, slope = bias
        k_x, k_y = load_coordinates(coordinates, j * coordinate_rate, valid, MASKED)
        distance = distances(q_x, q_y, k_x, k_y)
        x -= slope * distance
    if BOUNDED:
        x = tl.minimum(x, 0.0)
    p = tl.exp2(x)
    if FORM is not None:
        p = hide_listed(p, 0.0, lists, entry, i0, a, num_queries, count, padding_ptr, i.shape[0], BLOCK, PADDING, FORM)
    elif MASKED:
        p = tl.where(valid[None, :] & seen(i[:, None], j[None, :], left, right, LEFT, RIGHT), p, 0.0)
    if PADDING and FORM is None and not BOUNDED:
        p = hide(p, padding_ptr, pad_first + a, 0.0, BLOCK)
    dp = product(d0, d1, v0, v1, D1, PRECISION)
    if DROPOUT:
        word_at = words_ptr + rate.to(tl.int64) * a + word_steps
        word_b = tl.load(word_at, mask=valid, other=0) if MASKED else tl.load(word_at)
        dp = tl.where(kept(word_a[:, None], word_c[:, None], word_b[None, :], threshold), dp, 0.0)
    ds = p * (dp - delta[:, None])
    if BIAS:
        total += tl.sum(ds * distance, 1)
    ds = ds.to(k0.dtype)
    acc0 = tl.dot(ds, k0, acc0, input_precision=PRECISION)
    if D1 > 0:
        acc1 = tl.dot(ds, k1, acc1, input_precision=PRECISION)
    return acc0, acc1, total


@triton.jit(do_not_specialize=VARYING)
def query_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, dout_ptr, dlse_ptr, stats_ptr, dq_ptr, parts_ptr, rows_ptr, offsets_ptr, padding_ptr,
    words_a_ptr, words_c_ptr, words_b_ptr, bias_ptr,
    q_b, q_n, q_h, k_b, k_n, k_h, v_b, v_n, v_h, o_b, o_n, o_h, do_b, do_n, do_h, dq_b, dq_n, dq_h, dlse_b, dlse_n, dlse_h, pad_b,
    pad_branch,
    num_batches, num_heads, group, q_first, q_last, num_queries, num_keys, part_rows, delta_rows, direct, left, right,
    scale, natural_scale, threshold, keep_scale,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, CUT: tl.constexpr, PADDING: tl.constexpr, DROPOUT: tl.constexpr, OWN: tl.constexpr,
    DLSE: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, lists, FORM: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Computes dq of ROWS queries of one head, one of PARTS parts of a tile of a table (FORM is None) or of a block of ``lists``.

    It also stores in ``stats_ptr`` (B, H, STATS, places), by the query's place, what ``key_kernel`` needs: δ, lse · log2(e) and with
    DROPOUT two words; then, with BIAS, what the query adds to the slope's gradient. OWN: ``out_ptr`` holds each branch's out by place.
    """
    pid = tl.program_id(0)
    if FORM is None:
        head = pid % num_heads
        batch = (pid // num_heads % num_batches).to(tl.int64)
        branch, rate, first, count, low, high, tile, place, _places, _ = read_segment(
            rows_ptr, pid // (num_heads * num_batches * PARTS), offsets_ptr, num_heads, head, q_first, q_last, num_keys, CUT
        )
        tile = tile * PARTS + pid // (num_heads * num_batches) % PARTS
    else:
        batch, head, block_row, tile = read_list(lists, pid, num_batches, num_heads, num_queries, PARTS, FORM)
        branch, rate, first, count, low, high, place = whole_sequence(pid, num_queries, num_keys)
    i0 = low + tile * ROWS
    if i0 < high:
        local = tl.arange(0, ROWS)
        i = i0 + local
        inside = i < high
        head64, head_row = head.to(tl.int64), batch * num_heads + head
        wide_rate = rate.to(tl.int64)
        # the row of the first query, and the offsets of the others from it
        row = (first - q_first).to(tl.int64) + i0 * wide_rate
        rows = local.to(tl.int64) * wide_rate
        k_step, v_step = wide_rate * k_n, wide_rate * v_n
        kv_head = (head // group).to(tl.int64)
        k_base = k_ptr + batch * k_b + kv_head * k_h + first.to(tl.int64) * k_n
        v_base = v_ptr + batch * v_b + kv_head * v_h + first.to(tl.int64) * v_n
        q_base = q_ptr + batch * q_b + head64 * q_h + row * q_n
        do_base = dout_ptr + batch * do_b + head64 * do_h + row * do_n
        q0, q1 = load_both(q_base, rows * q_n, inside, D0, D1, D)
        d0, d1 = load_both(do_base, rows * do_n, inside, D0, D1, D)
        tile_place = place + tile * ROWS
        if OWN:
            out_base, out_rows = out_ptr + (head_row * delta_rows + tile_place) * D, local.to(tl.int64) * D
        else:
            out_base, out_rows = out_ptr + batch * o_b + head64 * o_h + row * o_n, rows * o_n
        out0, out1 = load_both(out_base, out_rows, inside, D0, D1, D)
        delta = tl.sum(d0.to(tl.float32) * out0.to(tl.float32), 1)
        if D1 > 0:
            delta += tl.sum(d1.to(tl.float32) * out1.to(tl.float32), 1)
        if DLSE:
            delta -= tl.load(dlse_ptr + batch * dlse_b + head64 * dlse_h + (row + rows) * dlse_n, mask=inside, other=0.0)
        lse = tl.load(lse_ptr + head_row * num_queries + row + rows, mask=inside, other=float("inf"))
        word_a, word_c = local, local
        if DROPOUT:
            word_row = head_row * num_queries + row + rows
            word_a = tl.load(words_a_ptr + word_row, mask=inside, other=0)
            word_c = tl.load(words_c_ptr + word_row, mask=inside, other=1)
        STATS: tl.constexpr = (4 if DROPOUT else 2) + (1 if BIAS else 0)
        # a row without keys gets an lse of +inf, so its weights are 0
        lse = tl.where(lse == -float("inf"), float("inf"), lse) * LOG2_E
        if FORM is not None:
            # and its δ is 0, whatever its dlse is
            delta = tl.where(lse == float("inf"), 0.0, delta)
        row_at = stats_ptr + STATS * (head_row * delta_rows) + tile_place + local
        if DROPOUT:
            # the factor of the kept weights is applied at the end, so ds is computed without it
            delta = delta / keep_scale
            natural_scale = natural_scale * keep_scale
        tl.store(row_at, delta, mask=inside)
        tl.store(row_at + delta_rows, lse, mask=inside)
        if DROPOUT:
            tl.store(row_at + 2 * delta_rows, word_a.to(tl.float32, bitcast=True), mask=inside)
            tl.store(row_at + 3 * delta_rows, word_c.to(tl.float32, bitcast=True), mask=inside)
        block = tl.arange(0, BLOCK).to(tl.int64)
        k_steps, v_steps = block * k_step, block * v_step
        pad_base, pad_first, words_base = padding_ptr, first, words_b_ptr
        word_steps = tl.arange(0, BLOCK) * rate
        if PADDING and FORM is not None:
            pad_base = padding_ptr + batch * pad_b
        elif PADDING:
            pad_base, pad_first = class_words(padding_ptr + batch * pad_b, branch, rate, first, num_keys, pad_branch)
        if DROPOUT:
            words_base = words_b_ptr + head_row * num_keys + first
        # ``total`` of a loop without BIAS: any row, which is not read
        bias, total = None, delta
        if BIAS:
            k_coordinates, q_coordinates = coordinates_of(
                bias_ptr, batch, num_batches, num_heads, first, num_keys, first - q_first, num_queries
            )
            q_x, q_y = load_coordinates(q_coordinates, i * rate, inside, True)
            bias, total = (k_coordinates, rate, q_x, q_y, tl.load(bias_ptr + head)), tl.zeros([ROWS], tl.float32)
        acc0 = tl.zeros([ROWS, D0], tl.float32)
        acc1 = tl.zeros([ROWS, D1 if D1 > 0 else 1], tl.float32)
        last = tl.minimum(i0 + ROWS, high) - 1
        if FORM is None:
            parts = key_parts(i0, last, count, left, right, BLOCK, LEFT, RIGHT)
        else:
            SUBS: tl.constexpr = FORM.visited_block // BLOCK
            start, end, block_column = list_steps(lists, batch, head, block_row, num_heads, num_queries, SUBS, FORM)
            parts = (start, start, end)
        # part 0 of the keys needs masks (the window's left end), part 1 needs none, part 2 does (its right end); lists have part 1 only
        for x in tl.static_range(0 if LEFT else 1, 3 if FORM is None else 2):
            for step in tl.range(parts[x], parts[x + 1], BLOCK if FORM is None else 1, num_stages=STAGES):
                a = step
                if FORM is not None:
                    a = block_column * FORM.visited_block + step % SUBS * BLOCK
                    block_column = next_block(lists, step, end, SUBS)
                acc0, acc1, total = _query_step(
                    a, q0, q1, d0, d1, i, lse, delta, acc0, acc1, total, k_base, v_base, k_steps, v_steps, k_step, v_step, count,
                    left, right, pad_base, pad_first, words_base, rate, word_steps, word_a, word_c, threshold, scale,
                    bias, lists, step // SUBS if FORM is not None else 0, i0, num_queries,
                    D, D0, D1, BLOCK, x != 1 if FORM is None else not FORM.even, LEFT, RIGHT, PADDING, DROPOUT, PRECISION, FORM, BIAS,
                )  # fmt: skip
        if BIAS:
            if DROPOUT:
                total = total * keep_scale
            tl.store(row_at + (STATS - 1) * delta_rows, -total, mask=inside)
        if FORM is not None or branch == direct:
            dq_base = dq_ptr + batch * dq_b + head64 * dq_h + row * dq_n
            dq_steps = local.to(tl.int64) * dq_n
        else:
            dq_base = parts_ptr + (head_row * part_rows + tile_place) * D
            dq_steps = local.to(tl.int64) * D
        store_both(dq_base, dq_steps, inside, acc0 * natural_scale, acc1 * natural_scale, D0, D1, D)


@triton.jit
def _key_step(
    a, k0, k1, v0, v1, j, dk0, dk1, dv0, dv1, q_base, do_base, delta_base, lse_base, q_steps, do_steps, q_step, do_step, high, left, right,
    words_base, delta_rows, word_b, threshold, scale, bias, lists, entry, j0, count,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr, FORM: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Adds the contributions of queries [a, a + BLOCK) to dk (dk0, dk1) and dv (dv0, dv1); scores are (keys, queries)."""
    i = a + tl.arange(0, BLOCK)
    inside = i < high
    q_at, do_at = q_base + a * q_step, do_base + a * do_step
    q0, d0 = load_rows(q_at, q_steps, inside, 0, D0, D, MASKED), load_rows(do_at, do_steps, inside, 0, D0, D, MASKED)
    q1, d1 = q0, d0
    if D1 > 0:
        q1, d1 = load_rows(q_at, q_steps, inside, D0, D1, D, MASKED), load_rows(do_at, do_steps, inside, D0, D1, D, MASKED)
    if MASKED:
        lse = tl.load(lse_base + i, mask=inside, other=float("inf"))
        delta = tl.load(delta_base + i, mask=inside, other=0.0)
    else:
        lse = tl.load(lse_base + i)
        delta = tl.load(delta_base + i)
    x = product(k0, k1, q0, q1, D1, PRECISION) * scale - lse[None, :]
    if BIAS:
        coordinates, rate, k_x, k_y, slope = bias
        q_x, q_y = load_coordinates(coordinates, i * rate, inside, MASKED)
        x -= slope * distances(k_x, k_y, q_x, q_y)
    p = tl.exp2(x)
    if MASKED and (LEFT or RIGHT):
        p = tl.where(seen(i[None, :], j[:, None], left, right, LEFT, RIGHT), p, 0.0)
    if FORM is not None and FORM.masks > 0:
        p = hide_pairs(
            p, 0.0, lists, entry, a, j0, high, count, BLOCK, j.shape[0], FORM.visited_block, FORM.tile_block, FORM.masks, True
        )  # fmt: skip
    dp = product(v0, v1, d0, d1, D1, PRECISION)
    weights = p
    if DROPOUT:
        if MASKED:
            word_a = tl.load(words_base + i, mask=inside, other=0)
            word_c = tl.load(words_base + delta_rows + i, mask=inside, other=1)
        else:
            word_a = tl.load(words_base + i)
            word_c = tl.load(words_base + delta_rows + i)
        keep = kept(word_a[None, :], word_c[None, :], word_b[:, None], threshold)
        weights = drop(p, keep, scale)
        dp = tl.where(keep, dp, 0.0)
    weights = weights.to(d0.dtype)
    dv0 = tl.dot(weights, d0, dv0, input_precision=PRECISION)
    ds = (p * (dp - delta[None, :])).to(q0.dtype)
    dk0 = tl.dot(ds, q0, dk0, input_precision=PRECISION)
    if D1 > 0:
        dv1 = tl.dot(weights, d1, dv1, input_precision=PRECISION)
        dk1 = tl.dot(ds, q1, dk1, input_precision=PRECISION)
    return dk0, dk1, dv0, dv1


@triton.jit(do_not_specialize=VARYING)
def key_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, stats_ptr, dk_ptr, dv_ptr, dk_parts_ptr, dv_parts_ptr, rows_ptr, offsets_ptr, padding_ptr, words_b_ptr,
    bias_ptr, q_b, q_n, q_h, k_b, k_n, k_h, v_b, v_n, v_h, do_b, do_n, do_h, dk_b, dk_n, dk_h, dv_b, dv_n, dv_h, pad_b,
    num_batches, num_heads, kv_heads, group, q_first, q_last, num_queries, num_keys, part_rows, delta_rows, direct, left,
    right, scale, natural_scale, threshold, keep_scale,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, CUT: tl.constexpr, PADDING: tl.constexpr, DROPOUT: tl.constexpr, SHARED: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr, lists, FORM: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Computes dk and dv of ROWS keys, one of PARTS parts of a tile of a table (FORM is None) or of a block of ``lists``.

    SHARED: of one key/value head, summed over its query heads, which have equal offsets; otherwise what one query head adds to them.
    """
    pid = tl.program_id(0)
    # programs compute results of key/value heads if SHARED, else of query heads
    heads = kv_heads if SHARED else num_heads
    if FORM is None:
        result_head = pid % heads
        batch = (pid // heads % num_batches).to(tl.int64)
        first_head = result_head * group if SHARED else result_head
        branch, rate, first, count, low, high, tile, place, _places, delta_place = read_segment(
            rows_ptr, pid // (heads * num_batches * PARTS), offsets_ptr, num_heads, first_head, q_first, q_last, num_keys, CUT
        )
        tile = tile * PARTS + pid // (heads * num_batches) % PARTS
    else:
        batch, result_head, block_column, tile = read_list(lists, pid, num_batches, heads, num_keys, PARTS, FORM)
        first_head = result_head * group
        branch, rate, first, count, low, high, place = whole_sequence(pid, num_queries, num_keys)
        delta_place = place
    kv_head = (first_head // group).to(tl.int64)
    j0 = tile * ROWS
    if j0 < count:
        local = tl.arange(0, ROWS)
        j = j0 + local
        valid = j < count
        wide_rate = rate.to(tl.int64)
        row = first.to(tl.int64) + j0 * wide_rate
        rows = local.to(tl.int64) * wide_rate
        word_b = local
        k_base, v_base = k_ptr + batch * k_b + kv_head * k_h + row * k_n, v_ptr + batch * v_b + kv_head * v_h + row * v_n
        k0, k1 = load_both(k_base, rows * k_n, valid, D0, D1, D)
        v0, v1 = load_both(v_base, rows * v_n, valid, D0, D1, D)
        q_step, do_step = wide_rate * q_n, wide_rate * do_n
        block = tl.arange(0, BLOCK).to(tl.int64)
        q_steps, do_steps = block * q_step, block * do_step
        dk0, dv0 = tl.zeros([ROWS, D0], tl.float32), tl.zeros([ROWS, D0], tl.float32)
        dk1, dv1 = tl.zeros([ROWS, D1 if D1 > 0 else 1], tl.float32), tl.zeros([ROWS, D1 if D1 > 0 else 1], tl.float32)
        last = tl.minimum(j0 + ROWS, count) - 1
        if FORM is None:
            # queries [begin, end) see some key of the tile; queries [full_begin, full_end) see all of them
            begin, end, full_begin, full_end = low, high, low, high
            if RIGHT:
                begin = tl.minimum(tl.maximum(j0 - right, low), high)
                full_begin = tl.maximum(last - right, begin)
            if LEFT:
                end = tl.maximum(tl.minimum(high, last + left + 1), begin)
                full_end = tl.maximum(tl.minimum(high, j0 + left + 1), begin)
            full_begin = tl.minimum(begin + (full_begin - begin + BLOCK - 1) // BLOCK * BLOCK, end)
            full_end = full_begin + tl.maximum(full_end - full_begin, 0) // BLOCK * BLOCK
            parts = (begin, full_begin, full_end, end)
        for h in range(group if SHARED else 1):
            head = first_head + h
            head64, head_row = head.to(tl.int64), batch * num_heads + head
            q_row = (first - q_first).to(tl.int64)
            q_base = q_ptr + batch * q_b + head64 * q_h + q_row * q_n
            do_base = dout_ptr + batch * do_b + head64 * do_h + q_row * do_n
            STATS: tl.constexpr = (4 if DROPOUT else 2) + (1 if BIAS else 0)
            delta_base = stats_ptr + STATS * (head_row * delta_rows) + delta_place - low
            lse_base = delta_base + delta_rows
            bias = None
            if BIAS:
                k_coordinates, q_coordinates = coordinates_of(bias_ptr, batch, num_batches, num_heads, first, num_keys, q_row, num_queries)
                k_x, k_y = load_coordinates(k_coordinates, j * rate, valid, True)
                bias = (q_coordinates, rate, k_x, k_y, tl.load(bias_ptr + head))
            words_base = (delta_base + 2 * delta_rows).to(tl.pointer_type(tl.int32), bitcast=True)
            if DROPOUT:
                word_b = tl.load(words_b_ptr + head_row * num_keys + row + rows, mask=valid, other=0)
            if FORM is not None:
                SUBS: tl.constexpr = FORM.visited_block // BLOCK
                start, stop, block_row = list_steps(lists, batch, head, block_column, num_heads, num_keys, SUBS, FORM)
                parts = (start, start, stop, stop)
            # part 0 of the queries needs masks, part 1 needs none, part 2 does; lists have part 1 only
            for x in tl.static_range(0 if RIGHT else 1, 3 if FORM is None else 2):
                for step in tl.range(parts[x], parts[x + 1], BLOCK if FORM is None else 1, num_stages=STAGES):
                    a = step
                    if FORM is not None:
                        a = block_row * FORM.visited_block + step % SUBS * BLOCK
                        block_row = next_block(lists, step, stop, SUBS)
                    dk0, dk1, dv0, dv1 = _key_step(
                        a, k0, k1, v0, v1, j, dk0, dk1, dv0, dv1, q_base, do_base, delta_base, lse_base, q_steps, do_steps, q_step, do_step,
                        high, left, right, words_base, delta_rows, word_b, threshold, scale,
                        bias, lists, step // SUBS if FORM is not None else 0, j0, count,
                        D, D0, D1, BLOCK, x != 1 if FORM is None else not FORM.even, LEFT, RIGHT, DROPOUT, PRECISION, FORM, BIAS,
                    )  # fmt: skip
        if DROPOUT:
            natural_scale = natural_scale * keep_scale
            dv0, dv1 = dv0 * keep_scale, dv1 * keep_scale
        if PADDING:
            # the gradient accumulated for a padded key may be any number or NaN; it affects no other key
            shown = tl.load(padding_ptr + batch * pad_b + row + rows, mask=valid, other=1) == 0
            dk0, dv0 = tl.where(shown[:, None], dk0, 0.0), tl.where(shown[:, None], dv0, 0.0)
            dk1, dv1 = tl.where(shown[:, None], dk1, 0.0), tl.where(shown[:, None], dv1, 0.0)
        if FORM is not None or branch == direct:
            dk_base, dk_steps = dk_ptr + batch * dk_b + kv_head * dk_h + row * dk_n, local.to(tl.int64) * dk_n
            dv_base, dv_steps = dv_ptr + batch * dv_b + kv_head * dv_h + row * dv_n, local.to(tl.int64) * dv_n
        else:
            at_place = ((batch * heads + result_head) * part_rows + place + j0) * D
            dk_base, dk_steps = dk_parts_ptr + at_place, local.to(tl.int64) * D
            dv_base, dv_steps = dv_parts_ptr + at_place, local.to(tl.int64) * D
        store_both(dk_base, dk_steps, valid, dk0 * natural_scale, dk1 * natural_scale, D0, D1, D)
        store_both(dv_base, dv_steps, valid, dv0, dv1, D0, D1, D)
