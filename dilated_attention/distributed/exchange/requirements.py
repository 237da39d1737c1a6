"""Memory requirements of attention over a sharded sequence, on each rank: its own rows, their results, and received keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from dilated_attention.backends.base import accumulation_dtype
from dilated_attention.distributed.comm.group import members_named
from dilated_attention.distributed.exchange import cost
from dilated_attention.distributed.sharding.custom_layout import short_name
from dilated_attention.engine.oom.requirement import MemoryRequirement, Setting, Terms, requirement, results, trains
from dilated_attention.engine.ops.settings import pattern_of


def ring_requirement(x: Mapping[str, Any]) -> MemoryRequirement:
    """Returns what ``ring_attention`` and ``ring_dilated_attention`` need on one rank."""
    group_name, layout, exchange, *_ = x["sharding"]
    members = members_named(group_name)
    pattern = pattern_of(x["branches"])
    is_dense = pattern.dilation_rates == (1,) and pattern.segment_lengths[0] >= x["k"].shape[1] * members.size

    of_rank, received = results(x), _received_bytes(x, members.size)

    def terms(setting: Setting) -> Terms:
        return (*of_rank(setting), ("keys of other ranks, shares of their gradients", received(setting)))

    op = "ring_attention" if is_dense else "ring_dilated_attention"
    shapes = f" on rank {members.rank} of {members.size}, layout={short_name(layout)!r}, exchange={exchange!r}"
    return requirement(op, x, shapes, terms=terms, least=True, positions="positions on each rank")


def ring_blocks_requirement(x: Mapping[str, Any]) -> MemoryRequirement:
    """Returns what ``ring_block_sparse_attention`` needs on one rank, with or without dilated branches.

    Received keys are not included, because they depend on the pattern.
    """
    members = members_named(x["sharding"][0])
    op = "ring_block_sparse_attention" if x["branches"] is None else "ring_block_sparse_dilated_attention"
    shapes = f" on rank {members.rank} of {members.size}"
    return requirement(op, x, shapes, terms=results(x), least=True, positions="positions on each rank")


def _received_bytes(x: Mapping[str, Any], size: int) -> Callable[[Setting], int]:
    """Returns the bytes of received keys on a rank of ``size``, and in training of the gradient contributions that it sends back."""
    (_, _, H, D), Hk, on_gpu, needs_grad = x["q"].shape, x["k"].shape[2], x["q"].device.type == "cuda", trains(x)
    pattern, is_causal, has_window = pattern_of(x["branches"]), x["is_causal"], bool(x["window"])
    _, layout, exchange, *_ = x["sharding"]

    def received(setting: Setting) -> int:
        n, e = setting.length, setting.dtype.itemsize
        if pattern.dilation_rates != (1,) or pattern.segment_lengths[0] < n * size:
            # for a branch whose segments extend beyond the rank: the rows at the offsets of the query heads of a key head
            rows = sum(min(H // Hk, r) * -(-(min(w, n * size) - n) // r) for w, r in pattern.branches if w > n)
            share = e if on_gpu else accumulation_dtype(setting.dtype).itemsize
            return 2 * setting.batch * Hk * D * rows * (e + (share if needs_grad else 0))
        q, k = (torch.empty((setting.batch, n, heads, D), dtype=setting.dtype, device="meta") for heads in (H, Hk))
        offers = cost.exchange_estimates(
            cost.exchange_request(
                q, k, pattern, size=size, layout=layout, seq_len=n * size, is_causal=is_causal, has_window=has_window, needs_grad=needs_grad
            )
        )
        return next((offer.bytes_held for offer in offers if offer.exchange == exchange), offers[0].bytes_held)

    return received
