"""Memory requirements of attention over a sharded sequence on each rank, and over how many ranks a single-process call would fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from dilated_attention.backends.base import accumulation_dtype
from dilated_attention.distributed.comm.group import members_named
from dilated_attention.distributed.exchange import cost
from dilated_attention.distributed.sharding.custom_layout import short_name
from dilated_attention.engine.memory import attention_memory
from dilated_attention.engine.oom.device_memory import size_text
from dilated_attention.engine.oom.requirement import AdjustableSetting, MemoryRequirement, Terms, held_bytes, of_training, shapes_text
from dilated_attention.engine.oom.requirements import block_terms, results, setting_of
from dilated_attention.engine.ops.settings import pattern_of
from dilated_attention.pattern import DilatedPattern

# no suggestion is made for a call that would need more GPUs than this
MOST_GPUS = 1024


def ring_requirement(arguments: Mapping[str, Any]) -> MemoryRequirement:
    """Returns what ``ring_attention`` and ``ring_dilated_attention`` need on one rank: its own rows, their results, and received keys."""
    x = arguments
    q, k = x["q"], x["k"]
    pattern = pattern_of(x["branches"])
    group_name, layout, exchange, *_ = x["sharding"]
    members = members_named(group_name)
    needs_grad = x["needs_grad"] or "dout" in x
    is_dense = _is_dense(pattern, k.shape[1] * members.size)

    def terms(setting: AdjustableSetting) -> Terms:
        brought = brought_bytes(x, pattern, setting, members.size, exchange)
        return (*results(setting, q, k, needs_grad), ("keys of other ranks, shares of their gradients", brought))

    def more_ranks(there: int) -> Iterator[str]:
        whole = k.shape[1] * members.size
        now = setting_of(x)
        for size in _sizes(members.size + 1):
            setting = AdjustableSetting(batch=now.batch, length=-(-whole // size), dtype=now.dtype, detached=now.detached)
            brought = brought_bytes(x, pattern, setting, size, exchange)
            total = brought + sum(count for _, count in results(setting, q, k, needs_grad))
            if total <= there:
                yield f"the same sequence over {size} ranks in place of {members.size}: at least {size_text(total)} on each"
                return

    return MemoryRequirement(
        op="ring_attention" if is_dense else "ring_dilated_attention",
        **of_training(x),
        device=q.device,
        shapes=f"{shapes_text(x)} on rank {members.rank} of {members.size}, layout={short_name(layout)!r}, exchange={exchange!r}",
        held=held_bytes(x, q.device),
        setting=setting_of(x),
        terms=terms,
        least=True,
        suggestions=(more_ranks,),
    )


def ring_blocks_requirement(arguments: Mapping[str, Any]) -> MemoryRequirement:
    """Returns what ``ring_block_sparse_attention`` needs on one rank, with or without dilated branches: its own rows and their results.

    Received keys are not included, because they depend on the pattern.
    """
    x, q = arguments, arguments["q"]
    members = members_named(x["sharding"][0])
    return MemoryRequirement(
        op="ring_block_sparse_attention" if x["branches"] is None else "ring_block_sparse_dilated_attention",
        **of_training(x),
        device=q.device,
        shapes=f"{shapes_text(x)} on rank {members.rank} of {members.size}",
        held=held_bytes(x, q.device),
        setting=setting_of(x),
        terms=block_terms(x),
        least=True,
    )


def brought_bytes(x: Mapping[str, Any], pattern: DilatedPattern, setting: AdjustableSetting, size: int, exchange: str = "auto") -> int:
    """Returns the bytes of received keys on a rank of ``size``, and in training of the gradient contributions that it sends back.

    Args:
        x: an op's arguments; only the heads and the head dim of q and k are used.
        setting: the setting, with the length of one rank.
    """
    q, k = x["q"], x["k"]
    needs_grad = bool(x["needs_grad"] or "dout" in x)
    n, e = setting.length, setting.dtype.itemsize
    if not _is_dense(pattern, n * size):
        # for a branch whose segments extend beyond the rank: the rows at the offsets of the query heads of a key head
        H, Hk, D = q.shape[2], k.shape[2], q.shape[3]
        rows = sum(min(H // Hk, r) * -(-(min(w, n * size) - n) // r) for w, r in pattern.branches if w > n)
        share = e if q.device.type == "cuda" else accumulation_dtype(setting.dtype).itemsize
        return 2 * setting.batch * Hk * D * rows * (e + (share if needs_grad else 0))
    rows_q, rows_k = (torch.empty((setting.batch, n, *x.shape[2:]), dtype=setting.dtype, device="meta") for x in (q, k))
    question = cost.exchange_request(
        rows_q, rows_k, pattern, size=size, layout=x["sharding"][1] if x["sharding"] else "zigzag", seq_len=n * size,
        is_causal=x["is_causal"],
        has_window=bool(x["window"]), needs_grad=needs_grad,
    )  # fmt: skip
    offers = cost.exchange_estimates(question)
    return next((offer.bytes_held for offer in offers if offer.exchange == exchange), offers[0].bytes_held)


def over_gpus(arguments: Mapping[str, Any]) -> Callable[[int], Iterator[str]]:
    """Suggests the fewest GPUs over which the sequence of a single-process call fits, each with the memory available to the call now."""
    x = arguments
    q, k = x["q"], x["k"]

    def suggestions(there: int) -> Iterator[str]:
        if q.device.type != "cuda" or q.shape[1] != k.shape[1] or x["query_offset"]:
            return
        pattern, now, needs_grad = pattern_of(x["branches"]), setting_of(x), x["needs_grad"] or "dout" in x
        for size in _sizes(2):
            n = -(-now.length // size)
            estimate = attention_memory(
                pattern, n, q.shape[2], q.shape[3], batch_size=now.batch, num_kv_heads=k.shape[2], dtype=now.dtype, device_type="cuda",
                is_causal=x["is_causal"], needs_grad=needs_grad,
            )  # fmt: skip
            setting = AdjustableSetting(batch=now.batch, length=n, dtype=now.dtype)
            total = estimate.peak + brought_bytes(x, pattern, setting, size)
            if total <= there:
                name = "ring_attention" if _is_dense(pattern, now.length) else "ring_dilated_attention"
                yield f"{name} over {size} GPUs: about {size_text(total)} on each"
                return

    return suggestions


def _is_dense(pattern: DilatedPattern, seq_len: int) -> bool:
    return pattern.dilation_rates == (1,) and pattern.segment_lengths[0] >= seq_len


def _sizes(least: int) -> Iterator[int]:
    """Yields the powers of two from ``least`` to ``MOST_GPUS``."""
    size = 2
    while size <= MOST_GPUS:
        if size >= least:
            yield size
        size *= 2
