"""The forward over a table of tiles: one launch computes every tile's softmax over its keys."""

# mypy does not know the types of kernels
# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl

from dilated_attention.backends.tiles.rows import (
    LN_2,
    VARYING,
    class_words,
    coordinates_of,
    distances,
    drop,
    hide,
    hide_listed,
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
def _step(
    a, q0, q1, i, m, total, acc0, acc1, k_base, v_base, k_offsets, v_offsets, k_step, v_step, count, left, right,
    padding_ptr, pad_first, words_ptr, rate, word_steps, word_a, word_c, threshold, scale, bias, lists, entry, i0, num_queries,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, PADDING: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
    FORM: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Processes keys [a, a + BLOCK) of the segment; MASKED: some row does not see all of them, with FORM: some lie behind the last key."""
    j = a + tl.arange(0, BLOCK)
    valid = j < count
    CHECK: tl.constexpr = MASKED or PADDING or FORM is not None
    k_at, v_at = k_base + a * k_step, v_base + a * v_step
    k0 = load_rows(k_at, k_offsets, valid, 0, D0, D, MASKED)
    k1 = k0
    if D1 > 0:
        k1 = load_rows(k_at, k_offsets, valid, D0, D1, D, MASKED)
    x = product(q0, q1, k0, k1, D1, PRECISION)
    factor = scale
    if BIAS:
        coordinates, _, q_x, q_y, slope = bias
        k_x, k_y = load_coordinates(coordinates, j * rate, valid, MASKED)
        x = x * scale - slope * distances(q_x, q_y, k_x, k_y)
        factor = 1.0
    if FORM is not None:
        x = hide_listed(x, -float("inf"), lists, entry, i0, a, num_queries, count, padding_ptr, i.shape[0], BLOCK, PADDING, FORM)
    elif MASKED:
        x = tl.where(valid[None, :] & seen(i[:, None], j[None, :], left, right, LEFT, RIGHT), x, -float("inf"))
    if PADDING and FORM is None:
        x = hide(x, padding_ptr, pad_first + a, -float("inf"), BLOCK)
    highest = tl.maximum(m, tl.max(x, 1) * factor)
    shift = highest
    if CHECK:
        # a row that has seen no key yet
        shift = tl.where(highest == -float("inf"), 0.0, highest)
    p = tl.exp2(x * factor - shift[:, None])
    alpha = tl.exp2(m - shift)
    total = total * alpha + tl.sum(p, 1)
    if DROPOUT:
        word_at = words_ptr + rate.to(tl.int64) * a + word_steps
        word_b = tl.load(word_at, mask=valid, other=0) if MASKED else tl.load(word_at)
        p = drop(p, kept(word_a[:, None], word_c[:, None], word_b[None, :], threshold), scale)
    v0 = load_rows(v_at, v_offsets, valid, 0, D0, D, MASKED)
    p = p.to(v0.dtype)
    acc0 = tl.dot(p, v0, acc0 * alpha[:, None], input_precision=PRECISION)
    if D1 > 0:
        v1 = load_rows(v_at, v_offsets, valid, D0, D1, D, MASKED)
        acc1 = tl.dot(p, v1, acc1 * alpha[:, None], input_precision=PRECISION)
    return highest, total, acc0, acc1


@triton.jit(do_not_specialize=VARYING)
def forward_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, parts_ptr, part_lse_ptr, rows_ptr, offsets_ptr, padding_ptr, words_a_ptr, words_c_ptr,
    words_b_ptr, bias_ptr, q_b, q_n, q_h, k_b, k_n, k_h, v_b, v_n, v_h, o_b, o_n, o_h, pad_b, pad_branch,
    num_batches, num_heads, group, q_first, q_last, num_queries, num_keys, part_rows, direct, left, right, scale, threshold,
    keep_scale, D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, CUT: tl.constexpr, ZERO_KEYS: tl.constexpr, PADDING: tl.constexpr, DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr, lists, FORM: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Computes ROWS queries of one head, one of PARTS parts of a tile of a table (FORM is None) or of a block of ``lists``.

    i, j, low, high and count are indices into a segment's selected positions, of which ``first`` is the first one's position and ``place``
    the place of index ``low``. scale contains log2(e). ``direct`` is the branch whose outputs go to out; the others' go to parts.
    """
    pid = tl.program_id(0)
    if FORM is None:
        head = pid % num_heads
        batch = (pid // num_heads % num_batches).to(tl.int64)
        branch, rate, first, count, low, high, tile, place, num_places, _ = read_segment(
            rows_ptr, pid // (num_heads * num_batches * PARTS), offsets_ptr, num_heads, head, q_first, q_last, num_keys, CUT
        )
        tile = tile * PARTS + pid // (num_heads * num_batches) % PARTS
    else:
        batch, head, block_row, tile = read_list(lists, pid, num_batches, num_heads, num_queries, PARTS, FORM)
        branch, rate, first, count, low, high, place = whole_sequence(pid, num_queries, num_keys)
    i0 = low + tile * ROWS
    if i0 < high:
        i = i0 + tl.arange(0, ROWS)
        inside = i < high
        local = tl.arange(0, ROWS)
        q_step, k_step, v_step = rate.to(tl.int64) * q_n, rate.to(tl.int64) * k_n, rate.to(tl.int64) * v_n
        q_base = q_ptr + batch * q_b + head.to(tl.int64) * q_h + (first - q_first).to(tl.int64) * q_n + i0 * q_step
        kv_head = (head // group).to(tl.int64)
        k_base = k_ptr + batch * k_b + kv_head * k_h + first.to(tl.int64) * k_n
        v_base = v_ptr + batch * v_b + kv_head * v_h + first.to(tl.int64) * v_n
        q_offsets = local.to(tl.int64) * q_step
        q0, q1 = load_both(q_base, q_offsets, inside, D0, D1, D)
        block = tl.arange(0, BLOCK).to(tl.int64)
        k_offsets, v_offsets = block * k_step, block * v_step
        pad_base, words_base = padding_ptr, words_b_ptr
        word_a, word_c, pad_first = local, local, first
        word_steps = tl.arange(0, BLOCK) * rate
        if PADDING and FORM is not None:
            pad_base = padding_ptr + batch * pad_b
        elif PADDING:
            pad_base, pad_first = class_words(padding_ptr + batch * pad_b, branch, rate, first, num_keys, pad_branch)
        if DROPOUT:
            word_row = (batch * num_heads + head) * num_queries + first - q_first + i.to(tl.int64) * rate
            word_a = tl.load(words_a_ptr + word_row, mask=inside, other=0)
            word_c = tl.load(words_c_ptr + word_row, mask=inside, other=1)
            words_base = words_b_ptr + (batch * num_heads + head) * num_keys + first
        bias = None
        if BIAS:
            k_coordinates, q_coordinates = coordinates_of(
                bias_ptr, batch, num_batches, num_heads, first, num_keys, first - q_first, num_queries
            )
            q_x, q_y = load_coordinates(q_coordinates, i * rate, inside, True)
            bias = (k_coordinates, rate, q_x, q_y, tl.load(bias_ptr + head))
        m = tl.full([ROWS], -float("inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc0 = tl.zeros([ROWS, D0], tl.float32)
        acc1 = tl.zeros([ROWS, D1 if D1 > 0 else 1], tl.float32)
        last = tl.minimum(i0 + ROWS, high) - 1
        if FORM is None:
            key_ends = key_parts(i0, last, count, left, right, BLOCK, LEFT, RIGHT)
        else:
            SUBS: tl.constexpr = FORM.visited_block // BLOCK
            start, end, block_column = list_steps(lists, batch, head, block_row, num_heads, num_queries, SUBS, FORM)
            # one range, the second: lists say for each block which of its pairs count
            key_ends = (start, start, end)
        # only the second range has no masked pair; the first is that of a window's left side
        for index in tl.static_range(0 if LEFT else 1, 3 if FORM is None else 2):
            for step in tl.range(key_ends[index], key_ends[index + 1], BLOCK if FORM is None else 1, num_stages=STAGES):
                a = step
                if FORM is not None:
                    a = block_column * FORM.visited_block + step % SUBS * BLOCK
                    block_column = next_block(lists, step, end, SUBS)
                m, total, acc0, acc1 = _step(
                    a, q0, q1, i, m, total, acc0, acc1, k_base, v_base, k_offsets, v_offsets, k_step, v_step, count, left, right,
                    pad_base, pad_first, words_base, rate, word_steps, word_a, word_c, threshold, scale,
                    bias, lists, step // SUBS if FORM is not None else 0, i0, num_queries,
                    D, D0, D1, BLOCK, index != 1 if FORM is None else not FORM.even, LEFT, RIGHT, PADDING, DROPOUT, PRECISION, FORM, BIAS,
                )  # fmt: skip
        if ZERO_KEYS:
            # keys of score 0 and value 0
            zeros = (num_places - count).to(tl.float32)
            higher = tl.where(zeros > 0, tl.maximum(m, 0.0), m)
            alpha = tl.where(higher == -float("inf"), 0.0, tl.exp2(m - tl.where(higher == -float("inf"), 0.0, higher)))
            total = total * alpha + tl.where(zeros > 0, zeros * tl.exp2(-higher), 0.0)
            acc0 = acc0 * alpha[:, None]
            acc1 = acc1 * alpha[:, None]
            m = higher
        empty = total == 0
        share = 1 / tl.where(empty, 1.0, total)
        if DROPOUT:
            share = share * keep_scale
        row_lse = tl.where(empty, -float("inf"), (m + tl.log2(tl.where(empty, 1.0, total))) * LN_2)
        if FORM is not None or branch == direct:
            row = (first - q_first + i0).to(tl.int64)
            out_base = out_ptr + batch * o_b + head.to(tl.int64) * o_h + row * o_n
            out_steps = local.to(tl.int64) * o_n
            lse_base = lse_ptr + (batch * num_heads + head) * num_queries + row
        else:
            row = (batch * num_heads + head) * part_rows + place + tile * ROWS
            out_base = parts_ptr + row * D
            out_steps = local.to(tl.int64) * D
            lse_base = part_lse_ptr + row
        tl.store(lse_base + local, row_lse, mask=inside)
        store_both(out_base, out_steps, inside, acc0 * share[:, None], acc1 * share[:, None], D0, D1, D)
