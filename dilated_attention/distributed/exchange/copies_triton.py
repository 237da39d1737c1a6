"""The copies of an exchange, one launch each: lines into what is sent or into a step's memory, and the sums of gradients.

Tensors of keys are pairs, K and V or their gradients, (B, rows, heads, D) of stride 1 in D, with three strides each (kb, kn, kh). A line is
some heads of a row (``Step``), of all batch entries.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from dilated_attention.backends.tiles.call import index_of
from dilated_attention.backends.tiles.launch import KernelLaunch

Pair = tuple[torch.Tensor, torch.Tensor]
# numbers of one program
_BLOCK = 4096
# integers that follow the length are not specialised: one compiled kernel serves all lengths
_VARYING = ["total", "own", "arrived", "peers"]


@triton.jit
def _rows(line, at, k_strides, v_strides, heads, width, batch, column):  # type: ignore[no-untyped-def]
    """Returns where row ``at`` of a line has its numbers of both tensors."""
    unit, entry = line * width + at // batch % width, at % batch
    row, head = unit // heads, unit % heads
    k = entry * k_strides[0] + row * k_strides[1] + head * k_strides[2]
    v = entry * v_strides[0] + row * v_strides[1] + head * v_strides[2]
    return k[:, None] + column, v[:, None] + column


@triton.jit(do_not_specialize=_VARYING)
def _gather_kernel(  # type: ignore[no-untyped-def]
    to, k, v, came, sources, kb, kn, kh, vb, vn, vh, total, own, arrived, heads, width, batch, D: tl.constexpr,
    D_BLOCK: tl.constexpr, U: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * U + tl.arange(0, U)
    column = tl.arange(0, D_BLOCK)[None]
    inside = at < total
    line = tl.load(sources + at // (batch * width), mask=inside, other=own + arrived)
    is_own, has_come = line < own, (line >= own) & (line < own + arrived)
    there = came + ((line - own) * (batch * width) + at % (batch * width))[:, None] * (2 * D) + column
    from_k, from_v = _rows(line, at, (kb, kn, kh), (vb, vn, vh), heads, width, batch, column)
    mask = (column < D) & is_own[:, None]
    other = (column < D) & has_come[:, None]
    keys = tl.load(k + from_k, mask=mask, other=0.0) + tl.load(there, mask=other, other=0.0)
    values = tl.load(v + from_v, mask=mask, other=0.0) + tl.load(there + D, mask=other, other=0.0)
    place = to + at[:, None] * (2 * D) + column
    tl.store(place, keys.to(to.dtype.element_ty), mask=inside[:, None] & (column < D))
    tl.store(place + D, values.to(to.dtype.element_ty), mask=inside[:, None] & (column < D))


@triton.jit(do_not_specialize=_VARYING)
def _add_kernel(  # type: ignore[no-untyped-def]
    to_k, to_v, k, v, came, places, returned, tkb, tkn, tkh, tvb, tvn, tvh, kb, kn, kh, vb, vn, vh, total, peers, heads, width,
    batch, D: tl.constexpr, D_BLOCK: tl.constexpr, U: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * U + tl.arange(0, U)
    column = tl.arange(0, D_BLOCK)[None]
    inside = at < total
    mask = inside[:, None] & (column < D)
    line = at // (batch * width)
    place = tl.load(places + line, mask=inside, other=0)
    from_k, from_v = _rows(place, at, (kb, kn, kh), (vb, vn, vh), heads, width, batch, column)
    keys = tl.load(k + from_k, mask=mask, other=0.0).to(tl.float32)
    values = tl.load(v + from_v, mask=mask, other=0.0).to(tl.float32)
    lines = (total // (batch * width)).to(tl.int64)
    for peer in range(peers):
        other = tl.load(returned + peer * lines + line, mask=inside, other=-1)
        there = came + (other * (batch * width) + at % (batch * width))[:, None] * (2 * D) + column
        some = mask & (other >= 0)[:, None]
        keys += tl.load(there, mask=some, other=0.0).to(tl.float32)
        values += tl.load(there + D, mask=some, other=0.0).to(tl.float32)
    at_k, at_v = _rows(line, at, (tkb, tkn, tkh), (tvb, tvn, tvh), heads, width, batch, column)
    tl.store(to_k + at_k, keys.to(to_k.dtype.element_ty), mask=mask)
    tl.store(to_v + at_v, values.to(to_v.dtype.element_ty), mask=mask)


def compile_ahead(step: Any, k: torch.Tensor, v: torch.Tensor, to: torch.dtype | None) -> None:
    """Starts compiling what the copies of steps like this one need: calls on meta tensors do. ``to``: of the sums of gradients, if any."""
    B, _, _, D = k.shape
    width = step.width * B * 2 * D
    sent, came = (torch.empty((len(x.numbers), width), dtype=k.dtype, device="meta") for x in (step.send, step.place))
    own_k, own_v = (step.of_heads(torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")) for x in (k, v))
    gather(sent, (own_k, own_v), None, step.send.numbers, step)
    gather(came.new_empty((step.rows, step.num_kv_heads, B, 2 * D)), (own_k, own_v), came, step.sources, step)
    if to is not None:
        grads, sums = came.new_empty((B, step.rows, step.num_kv_heads, D)), step.of_heads(torch.empty(k.shape, dtype=to, device="meta"))
        gather(came, (grads, grads), None, step.place.numbers, step)
        add((sums, sums), (grads, grads), sent, step)


def gather(to: torch.Tensor, of: Pair, came: torch.Tensor | None, lines: torch.Tensor, step: Any) -> None:
    """See ``run.gather``."""
    counts = (of[0].shape[1] * step.num_kv_heads // step.width, 0 if came is None else len(came))
    _launch(_gather_kernel, step, (to, *of, to if came is None else came, lines), (of,), counts, to.numel() // (2 * of[0].shape[3]))


def add(to: Pair, grads: Pair, came: torch.Tensor, step: Any) -> None:
    """See ``run.add``."""
    tensors = *to, *grads, came, step.own_places, step.returned
    total = len(step.own_places) * step.width * to[0].shape[0]
    _launch(_add_kernel, step, tensors, (to, grads), (step.returned.shape[0],), total)


def _launch(
    kernel: Any, step: Any, tensors: tuple[torch.Tensor, ...], pairs: tuple[Pair, ...], counts: tuple[int, ...], total: int
) -> None:
    """Launches a kernel over ``total`` rows of one head and batch entry. The launch is remembered for calls of the same strides."""
    B, _, heads, D = pairs[0][0].shape
    if not total:
        return
    numbers = (*(stride for pair in pairs for x in pair for stride in x.stride()[:3]), total, *counts, heads, step.width, B)
    dtypes = tuple([x.dtype for x in tensors])
    key = kernel, numbers, D, dtypes
    launch = step.made.get(key)
    if launch is None:
        width = triton.next_power_of_2(D)
        rows = max(1, _BLOCK // (2 * width))
        constants = {"D": D, "D_BLOCK": width, "U": rows}
        launch = step.made[key] = KernelLaunch(kernel, triton.cdiv(total, rows), numbers, constants, dtypes=dtypes)
    launch(tensors, index_of(pairs[0][0].device))
