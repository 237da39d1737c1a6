"""Launches over a table of tiles: two in the forward (one if nothing is merged), three in the backward (two if nothing is summed)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dilated_attention.backends.base import HALVES, Bias
from dilated_attention.backends.dropout import Words, threshold_of
from dilated_attention.backends.hardware import capability, has_gluon, multiprocessors, on_device
from dilated_attention.backends.tiles import combine
from dilated_attention.backends.tiles.backward import key_kernel, query_kernel
from dilated_attention.backends.tiles.call import Prepared
from dilated_attention.backends.tiles.forward import forward_kernel
from dilated_attention.backends.tiles.launch import KernelLaunch, workspace
from dilated_attention.backends.tiles.table import all_aligned, sizes, step_of, strides_of

Tensors = tuple[Tensor, ...]
_LOG2_E = 1.4426950408889634
# elements that a program merges or sums
_COMBINED = 4096


# (rows per stage of the ring, stages: at least 3 in the backward, whose consumers hold two and wait for a third) of the Hopper kernels, by
# kernel and head dim rounded up, only where the Gluon kernel is faster than the Triton one on an H200 with Triton 3.6
# (benchmarks/results/2026-11-22-h200/tiles-gluon.md)
_HOPPER_SIZES = {
    ("key", 48): (64, 4),
    ("key", 64): (64, 4),
    ("key", 128): (32, 3),
    ("query", 128): (64, 3),
    ("forward", 128): (128, 2),
}


def hopper_launch(p: Prepared, which: str, tensors: Tensors, numbers: Sequence[float], flags: dict[str, Any]) -> KernelLaunch | None:
    """Returns the launch of a Hopper kernel if the device is Hopper, and that kernel is faster and takes these aligned tensors; else None.

    Args:
        which: "forward", "query" or "key".
        tensors: (B, N, H, D).
        numbers: the integer and float arguments of the kernel that this one replaces.
        flags: PADDING and DROPOUT, which only key may have; ZERO_KEYS (forward); OWN and DLSE (query); SHARED (key).
    """
    of_gpu, D = capability(p.device), p.head_dim
    size = _HOPPER_SIZES.get((which, next((width for width in (48, 64, 128) if width >= D), 0)))
    if of_gpu is None or of_gpu[0] != 9 or size is None or p.dtype not in HALVES or D <= 32 or D % 16 or not has_gluon():
        return None
    # of several query heads, the pairs of one are dropped at a time
    if flags.get("DROPOUT") and p.shared and p.group > 1:
        return None
    from dilated_attention.backends.tiles import hopper_forward, hopper_key, hopper_query
    from dilated_attention.backends.tiles.hopper_rows import ROWS, Flags

    # 16 bytes are copied at a time, and the elements of a tile are counted in 32 bits
    rate = max(rate for _, rate in p.call.walk.branches)
    if any(stride % 16 for x in tensors for stride in x.stride()[:3]) or any(ROWS.value * rate * x.stride(1) >= 2**31 for x in tensors):
        return None
    kernels = {"forward": hopper_forward.forward_kernel, "query": hopper_query.query_kernel, "key": hopper_key.key_kernel}
    of_keys, (block, stages) = which == "key", size
    total = p.tables.num_tiles[of_keys] * p.batch * (p.key_heads if of_keys else p.num_heads)
    all_flags = Flags(**{name: p.constants[name] for name in ("LEFT", "RIGHT", "CUT")}, **flags)
    constants = {name: p.constants[name] for name in ("D", "D0", "D1")}
    constants |= {"COLUMNS": p.columns, "BLOCK": block, "STAGES": stages, "FLAGS": all_flags}
    return KernelLaunch(kernels[which], min(total, multiprocessors(p.device)), (*numbers, total), constants, dtypes=p.dtype)


def _tile_launch(
    p: Prepared, which: str, kernel: Any, numbers: Sequence[float], flags: dict[str, Any], masks: dict[str, Any], tensors: Tensors | None
) -> KernelLaunch:
    """Builds one of the three launches over tiles: "forward", "query" or "key".

    Args:
        flags, masks: constants of this kernel. ``masks`` are PADDING and DROPOUT, which of Hopper's kernels only "key" has, and BIAS, which
            none has.
        tensors: the tensors that are read by rows, all aligned; None if some are not.
    """
    of_keys = which == "key"
    if tensors is not None and not masks["BIAS"] and (of_keys or not any(masks.values())):
        hopper = hopper_launch(p, which, tensors, numbers, {**flags, "PADDING": masks["PADDING"], "DROPOUT": masks["DROPOUT"]})
        if hopper is not None:
            return hopper
    size = sizes(which, p.head_dim, p.dtype, p.longest, p.device, masks["DROPOUT"])
    parts, heads = p.tables.tile // size.rows, p.batch * (p.key_heads if of_keys else p.num_heads)
    # no lists of blocks, which the same kernels take
    blocks = {"ROWS": size.rows, "PARTS": parts, "BLOCK": size.block, "STAGES": size.stages, "lists": None, "FORM": None}
    constants = {**p.constants, **flags, **masks, **blocks}
    return KernelLaunch(kernel, p.tables.num_tiles[of_keys] * parts * heads, numbers, constants, size.warps, size.stages, dtypes=p.dtype)


def _drawing(dropout_p: float) -> tuple[int, float]:
    """Returns (threshold as a signed word, factor of the kept weights) of dropout."""
    threshold = threshold_of(dropout_p)
    return threshold - 2**32 if threshold >= 2**31 else threshold, 2**32 / (2**32 - threshold)


def forward(
    p: Prepared, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    *, parts: Tensor | None = None, padding: Tensor | None = None, words: Words | None = None, dropout_p: float = 0.0,
    bias: Bias | None = None,
) -> None:  # fmt: skip
    """Writes out (B, Nq, H, D), with any strides whose last one is 1, and lse (B, H, Nq), contiguous.

    Args:
        parts: (B, H, places, D), flat. It receives the separate outputs of all branches except the direct one; None does not store them.
    """
    rows = p.batch * p.num_heads * p.part_rows
    aligned = all_aligned([x.data_ptr() for x in (q, k, v, out, lse)])
    key = q.stride(), k.stride(), v.stride(), out.stride(), None if padding is None else padding.stride(), dropout_p, aligned, bias is None
    launches = p.launches.get(key)
    if launches is None:
        B, H, call = p.batch, p.num_heads, p.call
        threshold, keep_scale = _drawing(dropout_p)
        numbers = (
            *strides_of(q, k, v, out), *_pad_strides(p, padding),
            B, H, p.group, p.q_first, call.walk.queries[1], p.num_queries, p.num_keys, p.part_rows, call.walk.direct, *p.bounds,
            call.scale * _LOG2_E, threshold, keep_scale,
        )  # fmt: skip
        masks, flags = _masks(padding, dropout_p, bias), {"ZERO_KEYS": call.zero_keys}
        tiles = _tile_launch(p, "forward", forward_kernel, numbers, flags, masks, (q, k, v, out) if aligned else None)
        strides = out.stride(), (H * p.num_queries, 1, p.num_queries)
        launches = p.launches[key] = tiles, combine_launch(p, *(_of_entries(p, x) for x in strides))
    last = p.read_with(p.packed(padding), words, packed_bias(bias))
    # results before the merge
    own, part_lse = workspace(q.device, *p.extent.forward(q.dtype, is_saved=parts is not None)) if rows else (out, lse)
    own = own if parts is None else parts
    with on_device(q.device):
        spans, queries, _ = p.tables.parts()
        launches[0]([q, k, v, out, lse, own, part_lse, queries, *last], p.index)
        if rows:
            launches[1]([out, lse, own, part_lse, spans, *p.tables.of_pattern, p.offsets], p.index)


def packed_bias(bias: Bias | None) -> Tensor | None:
    """Returns (slopes · log2(e) | coordinates of keys | coordinates of queries), float32, as kernels read them."""
    return None if bias is None else torch.cat((bias.slopes * _LOG2_E, bias.keys.flatten(), bias.queries.flatten()))


def _pad_strides(p: Prepared, padding: Tensor | None) -> tuple[int, int]:
    """Returns the batch stride and the branch stride of a packed mask."""
    return (0, 0) if padding is None else (p.call.walk.num_branches * p.words, p.words)


def _masks(padding: Tensor | None, dropout_p: float, bias: Bias | None) -> dict[str, bool]:
    return {"PADDING": padding is not None, "DROPOUT": dropout_p > 0, "BIAS": bias is not None}


def backward(
    p: Prepared, tensors: tuple[Tensor, ...], dlse: Tensor | None, grads: tuple[Tensor, ...],
    *, parts: Tensor | None = None, padding: Tensor | None = None, words: Words | None = None, dropout_p: float = 0.0,
    bias: Bias | None = None,
) -> None:  # fmt: skip
    """Writes dq, dk, dv.

    Args:
        tensors: dout, q, k, v, out and lse (B, H, Nq).
        parts: each branch's own output, for detached mixing.
        padding: (B, Nk), True for masked keys, whose rows of k and v must be zeros.
    """
    dout, q, k, v, out, lse = tensors
    shapes = (q, k, v, dout, out, *grads)
    # without dlse, lse stands in for it and is not read as such
    given = q, k, v, out if parts is None else parts, lse, dout, lse if dlse is None else dlse
    aligned = all_aligned([x.data_ptr() for x in (*given, *grads)])
    key = (
        *[x.stride() for x in shapes], None if padding is None else padding.stride(), None if dlse is None else dlse.stride(),
        parts is None, dropout_p, aligned, bias is None,
    )  # fmt: skip
    launches = p.launches.get(key)
    if launches is None:
        masks, drawing = _masks(padding, dropout_p, bias), (p.call.scale * _LOG2_E, p.call.scale, *_drawing(dropout_p))
        aligned_tensors = shapes if aligned else None
        walk, heads, range_ = p.call.walk, (p.batch, p.num_heads), (p.group, p.q_first, p.call.walk.queries[1], p.num_queries, p.num_keys)
        dlse_ = (0, 0, 0) if dlse is None else (dlse.stride(0), dlse.stride(2), dlse.stride(1))
        numbers = (
            *strides_of(q, k, v, out, dout, grads[0]), *dlse_, *_pad_strides(p, padding), *heads, *range_, p.part_rows, p.delta_rows,
            walk.direct, *p.bounds, *drawing,
        )  # fmt: skip
        flags = {"OWN": parts is not None, "DLSE": dlse is not None}
        of_queries = _tile_launch(p, "query", query_kernel, numbers, flags, masks, aligned_tensors)
        numbers = (
            *strides_of(q, k, v, dout, *grads[1:]), 0 if padding is None else padding.stride(0), *heads, p.kv_heads, *range_,
            p.key_part_rows, p.delta_rows, walk.key_direct, *p.bounds, *drawing,
        )  # fmt: skip
        of_keys = _tile_launch(p, "key", key_kernel, numbers, {"SHARED": p.shared}, masks, aligned_tensors)
        launches = p.launches[key] = of_queries, of_keys, combine_launch(p, *(_of_entries(p, x.stride()) for x in grads))
    stats, *sums = workspace(q.device, *p.extent.backward(q.dtype, dropout=words is not None, bias=bias is not None))
    # a direct branch alone writes the results themselves
    q_parts, k_parts, v_parts = (x if x.elements else grad for x, grad in zip(sums, grads, strict=True))
    if bias is not None:
        # what each query adds to the slopes' gradient in each branch; a head that is not in a branch writes nothing
        num_stats = 3 if words is None else 5
        of_slopes = stats.tensor().view(p.batch, p.num_heads, num_stats, p.delta_rows)[:, :, -1].zero_()

    packed = packed_bias(bias)
    query_last = p.read_with(p.packed(padding), words, packed)
    # the key kernel reads the queries' words from the statistics
    offsets, hidden, _, _, *others = p.read_with(padding, words, packed)
    key_last = offsets, hidden, *others
    with on_device(q.device):
        spans, queries, keys = p.tables.parts()
        launches[0]([*given, stats, grads[0], q_parts, queries, *query_last], p.index)
        launches[1]([q, k, v, dout, stats, *grads[1:], k_parts, v_parts, keys, *key_last], p.index)
        if sums[0].elements or sums[1].elements:
            launches[2]([*grads, q_parts, k_parts, v_parts, spans, *p.tables.of_pattern, p.offsets], p.index)
    if bias is not None and bias.gradient is not None:
        bias.gradient.add_(of_slopes.sum((0, 2)))


def combine_launch(p: Prepared, *strides: Sequence[int]) -> KernelLaunch:
    """Returns the launch that merges or sums the branches' results.

    Its tensors: out and lse, or dq, dk and dv; the same at their places; spans, starts, lengths, rates, offsets.

    Args:
        strides: of each result, from batch entry to batch entry (or document to document, see ``combine.py``), row to row, head to head.
    """
    walk, H, Hk, step = p.call.walk, p.num_heads, p.kv_heads, step_of(p.call.walk, p.call.offsets)
    numbers = *(stride for of_result in strides for stride in of_result[:3]), p.batch, H, p.q_first, p.num_queries, p.part_rows, walk.steps
    rows = max(8, _COMBINED // p.columns)
    q_tiles = -(-p.num_queries // (step * rows)) * p.batch * H * (p.part_rows > 0)
    constants = {"D": p.head_dim, "COLUMNS": p.columns, "ROWS": rows, "BRANCHES": walk.num_branches, "CUT": walk.is_cut, "STEP": step}
    if len(strides) == 2:
        return KernelLaunch(combine.merge_kernel, q_tiles, numbers, {**constants, "DIRECT": walk.direct}, dtypes=p.dtype)
    k_tiles = -(-p.num_keys // (step * rows)) * p.batch * Hk * (p.key_part_rows > 0)
    numbers = (
        *numbers, Hk, p.group, p.key_heads // Hk, p.num_keys, q_tiles, k_tiles, p.key_part_rows, walk.direct, walk.key_direct,
    )  # fmt: skip
    return KernelLaunch(combine.sum_kernel, q_tiles + 2 * k_tiles, numbers, constants, dtypes=p.dtype)


def _of_entries(p: Prepared, strides: Sequence[int]) -> Sequence[int]:
    """Returns strides as ``combine.py`` takes them: of one batch entry, the first is from document to document, here 0."""
    return strides if p.batch > 1 else (0, *strides[1:])
