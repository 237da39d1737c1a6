"""The copies of an exchange, one launch each: lines into what is sent or into a step's memory, and sums of gradients.

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


@triton.jit
def _rows(line, at, k_strides, v_strides, heads, width, batch, column):  # type: ignore[no-untyped-def]
    """Returns where row ``at`` of a line has its numbers of both tensors."""
    unit, entry = line * width + at // batch % width, at % batch
    row, head = unit // heads, unit % heads
    k = entry * k_strides[0] + row * k_strides[1] + head * k_strides[2]
    v = entry * v_strides[0] + row * v_strides[1] + head * v_strides[2]
    return k[:, None] + column, v[:, None] + column


# integers that follow the length are not specialised: one compiled kernel serves all lengths
@triton.jit(do_not_specialize=["total", "peers"])
def _copy_kernel(  # type: ignore[no-untyped-def]
    to_k, to_v, k, v, came, places, arrivals, tkb, tkn, tkh, tvb, tvn, tvh, kb, kn, kh, vb, vn, vh, total, peers, to_heads, heads, width,
    batch, D: tl.constexpr, D_BLOCK: tl.constexpr, U: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * U + tl.arange(0, U)
    column = tl.arange(0, D_BLOCK)[None]
    inside = at < total
    line = at // (batch * width)
    place = tl.load(places + line, mask=inside, other=-1)
    from_k, from_v = _rows(place, at, (kb, kn, kh), (vb, vn, vh), heads, width, batch, column)
    mask = (column < D) & (place >= 0)[:, None]
    keys = tl.load(k + from_k, mask=mask, other=0.0).to(tl.float32)
    values = tl.load(v + from_v, mask=mask, other=0.0).to(tl.float32)
    lines = (total // (batch * width)).to(tl.int64)
    for peer in range(peers):
        other = -2 - tl.load(arrivals + peer * lines + line, mask=inside, other=-1)
        there = came + (other * (batch * width) + at % (batch * width))[:, None] * (2 * D) + column
        mask = (column < D) & (other >= 0)[:, None]
        keys += tl.load(there, mask=mask, other=0.0).to(tl.float32)
        values += tl.load(there + D, mask=mask, other=0.0).to(tl.float32)
    at_k, at_v = _rows(line, at, (tkb, tkn, tkh), (tvb, tvn, tvh), to_heads, width, batch, column)
    mask = inside[:, None] & (column < D)
    tl.store(to_k + at_k, keys.to(to_k.dtype.element_ty), mask=mask)
    tl.store(to_v + at_v, values.to(to_v.dtype.element_ty), mask=mask)


def copy(to: Pair, of: Pair, places: torch.Tensor, step: Any, arrived: Pair | None = None) -> None:
    """See ``run.copy``. The launch is remembered for calls of the same strides."""
    B, _, heads, D = of[0].shape
    if not len(places):
        return
    came, arrivals = arrived or (of[0], places[:0])
    tensors = *to, *of, came, places, arrivals
    total, peers = len(places) * step.width * B, len(arrivals)
    strides = [stride for x in tensors[:4] for stride in x.stride()[:3]]
    numbers, dtypes = (*strides, total, peers, to[0].shape[2], heads, step.width, B), tuple([x.dtype for x in tensors])
    key = numbers, D, dtypes
    launch = step.made.get(key)
    if launch is None:
        width = triton.next_power_of_2(D)
        rows = max(1, _BLOCK // (2 * width))
        constants = {"D": D, "D_BLOCK": width, "U": rows}
        launch = step.made[key] = KernelLaunch(_copy_kernel, triton.cdiv(total, rows), numbers, constants, dtypes=dtypes)
    launch(tensors, index_of(of[0].device))
