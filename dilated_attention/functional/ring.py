"""Attention over a sequence sharded across processes: dense, dilated, block-sparse, and branches with blocks."""

from __future__ import annotations

from typing import Any

import torch
from typing_extensions import Unpack

from dilated_attention import validation as check
from dilated_attention.distributed.op import (
    ring_attention_op,
    ring_block_sparse_attention_op,
    ring_block_sparse_dilated_attention_op,
)
from dilated_attention.distributed.sharding.custom_layout import Layout
from dilated_attention.functional.arguments import DENSE, attend, branches_of, checked_block_layout, checked_ring_pattern
from dilated_attention.functional.block_sparse import checked_pattern
from dilated_attention.functional.options import RingBranchOptions, RingOptions, shows_options


@shows_options
def ring_dilated_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segment_lengths: Any, dilation_rates: Any, *, layout: str | Layout = "contiguous",
    exchange: str = "auto", mixture_grad: str = "exact", ranks_per_node: int | None = None, **options: Unpack[RingBranchOptions],
) -> Any:  # fmt: skip
    """Computes ``dilated_attention`` of a sequence of N positions sharded over the W processes of a group. All of them must call it.

    Each process gets the output of its own rows, and in the backward their gradients: the result of ``dilated_attention`` on the whole
    sequence, sharded the same way. With the contiguous layout, a branch whose segments are each within one process communicates nothing.
    Of a longer branch only the positions that its heads select (1/r of K and V) move, among the processes of that segment; where shards
    begin with segments, the shorter branches are computed meanwhile. Segments need not align with shards, and lengths need not divide.

    Args:
        q: this process's queries (B, n, H, D), its rows in the order of the layout: see ``shard_sequence``.
        k, v: this process's keys and values (B, n, Hk, D).
        segment_lengths, dilation_rates: the pattern of the whole sequence, as in ``dilated_attention``.
        layout: ``"contiguous"`` · ``"zigzag"`` · ``"striped"`` · a ``Layout``: which process holds which positions. A striped sequence
            needs an additional exchange to reorder it, and another to restore its order. ``balanced_layout`` returns a ``Layout`` that
            gives all processes equal work, of packed documents, too.
        exchange: ``"auto"``: chosen by a cost model (``dilated_attention.distributed.explain_exchange`` prints it) · ``"all_gather"``:
            remote keys arrive in one exchange · ``"ring"``: they arrive in W − 1 exchanges, one shard at a time, to save memory ·
            ``"all_to_all"``: each process computes some heads of the whole sequence · ``"2d"``: heads are exchanged within a node, keys
            between nodes.
        mixture_grad: see ``dilated_attention``.
        ranks_per_node: number of consecutive ranks of the group that share heads in ``"2d"``; None for LOCAL_WORLD_SIZE.
        options: group, mesh, seq_len, timeout, is_causal, scale, cu_seqlens, key_padding_mask, sinks, softcap, dropout_p, return_lse,
            deterministic, backend, head_offsets, branch_heads, tail: see ``functional.RingOptions``, ``CallOptions`` and ``BranchOptions``.

    All arguments but the tensors, ``backend`` and ``timeout`` must be equal on all processes. This is checked at the first call of a kind;
    later calls are compared while they run, or up to a second afterwards.

    Returns:
        out (B, n, H, D) in q's dtype; with ``return_lse`` (out, lse (B, H, n)).

    Raises:
        ValueError, TypeError: bad input; or arguments differ between processes: raised on each of them, naming ranks and values.
        RingError: a process died, stalled or made a different call; the message names the exchange and the peer, or the difference.
        BackendUnavailable: as in ``dilated_attention``, before anything is sent.

    Differs from LongNet's published code, which drops a process's own keys in causal attention, moves whole segments through all
    processes, and takes no gradient through the mixing weights.
    """
    return attend(
        "ring_dilated_attention", options, q, k, v, branches_of(segment_lengths, dilation_rates), None, ring_attention_op,
        layout=layout, exchange=exchange, mixture_grad=mixture_grad, ranks_per_node=ranks_per_node,
    )  # fmt: skip


@shows_options
def ring_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, layout: str | Layout = "zigzag", exchange: str = "auto",
    window: int | tuple[int | None, int | None] | None = None, ranks_per_node: int | None = None, **options: Unpack[RingOptions],
) -> Any:  # fmt: skip
    """Computes dense softmax attention of a sequence sharded over the processes of a group: the distributed ``attention``.

    Args:
        layout: ``"zigzag"``: two runs per process, which balances causal attention · ``"contiguous"`` · ``"striped"`` · a ``Layout``,
            e.g. of ``balanced_layout``, which balances packed documents.
        exchange: as in ``ring_dilated_attention``. ``"all_gather"`` gathers the keys head by head: one group of heads is computed
            while the next group's keys are in transit, and nothing is merged. A process receives only the keys that its queries see.
            A window's keys arrive in one exchange, so ``"ring"`` accepts no window.
        window: (left, right) as in ``attention``.

    All other arguments, results and errors are those of ``ring_dilated_attention``.
    """
    return attend(
        "ring_attention", options, q, k, v, DENSE, None, ring_attention_op,
        layout=layout, exchange=exchange, window=check.check_window(window), ranks_per_node=ranks_per_node, head_offsets="zero",
    )  # fmt: skip


@shows_options
def ring_block_sparse_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pattern: Any, *, layout: str | Layout = "contiguous",
    head_steps: int | None = None, **options: Unpack[RingOptions],
) -> Any:  # fmt: skip
    """Computes ``block_sparse_attention`` of a sequence of N positions sharded over the W processes of a group. All of them must call it.

    Each process gets the output of its own rows, and in the backward their gradients: the result of ``block_sparse_attention`` on the
    whole sequence, sharded the same way. A process receives only the key blocks that its queries keep, and sends only those that other
    processes' queries keep. Every process computes both from the pattern alone, and processes that need nothing from each other exchange
    nothing. All keys of a group of heads are gathered before these heads are computed, so nothing is merged; the next heads' keys are
    in transit meanwhile.

    Args:
        pattern: as in ``block_sparse_attention``, of the whole sequence and equal on all processes. A pattern that holds a function must
            hold the same function everywhere: its kept blocks are compared, not its masks inside blocks. Patterns chosen by content
            are refused.
        layout: ``"contiguous"`` · ``"zigzag"`` · a ``Layout``: which process holds which positions. ``balanced_layout(pattern, …)``
            returns one that gives all processes equal work. Shards that begin and end at block boundaries are the fastest.
        head_steps: number of groups of key/value heads whose keys are sent one group after the other; None: chosen by a cost model.

    All other arguments, results and errors are those of ``ring_dilated_attention``.

    >>> layout = balanced_layout(pattern, seq_len, world_size, is_causal=True)
    >>> q, k, v = shard_sequence(group, [q, k, v], [1, 1, 1], layout=layout)
    >>> out = ring_block_sparse_attention(
    ...     q, k, v, pattern, group=group, layout=layout, seq_len=seq_len,
    ...     is_causal=True)
    """
    layout, pattern = checked_block_layout(layout), checked_ring_pattern(checked_pattern(pattern))
    return attend(
        "ring_block_sparse_attention", options, q, k, v, None, pattern, ring_block_sparse_attention_op,
        layout=layout, exchange="all_gather", head_steps=head_steps,
    )  # fmt: skip


@shows_options
def ring_block_sparse_dilated_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segment_lengths: Any, dilation_rates: Any, pattern: Any, *,
    layout: str | Layout = "contiguous", head_steps: int | None = None, **options: Unpack[RingBranchOptions],
) -> Any:  # fmt: skip
    """Computes ``block_sparse_dilated_attention`` of a sequence of N positions sharded over the W processes of a group.

    All of them must call it. Each process gets the output of its own rows, and in the backward their gradients. It receives every key once
    that its queries keep, in a branch or in a block; both parts are computed on these keys and merged by their log-sum-exps. A named
    backend computes both parts or is refused.

    Args:
        segment_lengths, dilation_rates: see ``dilated_attention``; segments are counted in the whole sequence.
        pattern, layout, head_steps: see ``ring_block_sparse_attention``. With ``branch_heads="split"`` all heads go in one step.

    All other arguments, results and errors are those of ``ring_dilated_attention``.

    >>> out = ring_block_sparse_dilated_attention(
    ...     q, k, v, [2048, 8192], [1, 4], BigBird(256, 64, 3),
    ...     mesh=mesh["cp"], seq_len=N)
    """
    layout, pattern = checked_block_layout(layout), checked_ring_pattern(checked_pattern(pattern))
    return attend(
        "ring_block_sparse_dilated_attention", options, q, k, v, branches_of(segment_lengths, dilation_rates), pattern,
        ring_block_sparse_dilated_attention_op, layout=layout, exchange="all_gather", head_steps=head_steps,
    )  # fmt: skip
