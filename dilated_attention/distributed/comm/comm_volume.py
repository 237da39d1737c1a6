"""Communication volume in closed form: what a rank exchanges, and the bytes of all_to_all.

With n of N positions on a rank, W ranks, H heads, K key/value heads, head dim D, batch B, s bytes per element and f bytes per element of a
sum (8 for float64, else 4), a rank of an all_to_all receives

    q, k, v: (N − n)·(H/W + 2·max(K/W, 1))·D·B·s; out and lse back: n·(H − H/W)·(D·s + f)·B

The other exchanges move what their plans say; tests compare measured bytes with formulas of ``tests/helpers/comm_volume.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

from dilated_attention.distributed.sharding.custom_layout import Layout
from dilated_attention.distributed.sharding.layout import spans


@dataclass(frozen=True)
class Bytes:
    """The bytes that one rank exchanges."""

    forward_sent: int
    forward_received: int
    backward_sent: int
    backward_received: int


@dataclass(frozen=True)
class CommSizes:
    """The sizes that bytes depend on. ``itemsize`` and ``sum_itemsize`` are the bytes of an element and of an element of a sum."""

    heads: int
    kv_heads: int
    head_dim: int
    batch: int
    itemsize: int
    sum_itemsize: int


def heads_bytes(seq_len: int, size: int, rank: int, layout: str | Layout, sizes: CommSizes, *, lse_grad: bool = False) -> Bytes:
    """Returns the bytes of all_to_all: each rank gets some heads of the whole sequence, and the results go back.

    A striped sequence is exchanged like any other.

    Args:
        lse_grad: whether the call returned lse; then its gradient is exchanged, as zeros where a rank has none.
    """
    held = sum(len(range(*span)) for span in spans(seq_len, rank, size, layout))
    others = seq_len - held
    heads, kv_heads = sizes.heads // size, max(1, sizes.kv_heads // size)
    element, sums = sizes.head_dim * sizes.itemsize, sizes.head_dim * sizes.sum_itemsize
    # bytes per row of one rank that another rank computes
    inputs = (heads + 2 * kv_heads) * element
    outputs = heads * (element + sizes.sum_itemsize)
    # dout, out, lse, and the gradient of lse
    more = heads * (2 * element + (1 + lse_grad) * sizes.sum_itemsize)
    # ranks that share a key/value head each return a contribution to its gradients
    back = heads * element + 2 * kv_heads * (sums if sizes.kv_heads < size else element)
    away, here = held * (size - 1) * sizes.batch, others * sizes.batch
    return Bytes(
        forward_sent=away * inputs + here * outputs,
        forward_received=here * inputs + away * outputs,
        backward_sent=away * (inputs + more) + here * back,
        backward_received=here * (inputs + more) + away * back,
    )
