"""``ring_dilated_attention`` and its dense special case ``ring_attention``: attention over a sequence sharded across processes."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import torch

from dilated_attention import validation as check
from dilated_attention.distributed.comm.group import group_name_of, members_named
from dilated_attention.distributed.exchange.sharding_plan import EXCHANGES, why_no_heads
from dilated_attention.distributed.op import resolve_ring, ring_attention_op
from dilated_attention.distributed.sharding.custom_layout import Layout, layout_name
from dilated_attention.functional.arguments import DENSE, Options, Ring, attend, plain_ints
from dilated_attention.pattern import HeadOffsets
from dilated_attention.pattern.checks import as_int, as_int_tuple, one_of


def ring_dilated_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    segment_lengths: Any,
    dilation_rates: Any,
    *,
    group: Any = None,
    mesh: Any = None,
    layout: str | Layout = "contiguous",
    exchange: str = "auto",
    seq_len: int | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    softcap: float | None = None,
    head_offsets: HeadOffsets = "cyclic",
    branch_heads: str = "all",
    cu_seqlens: torch.Tensor | None = None,
    key_padding_mask: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    tail: str = "mask",
    mixture_grad: str = "exact",
    dropout_p: float = 0.0,
    return_lse: bool = False,
    deterministic: bool = False,
    backend: str = "auto",
    ranks_per_node: int | None = None,
    timeout: float = 60.0,
) -> Any:
    """Computes ``dilated_attention`` of a sequence of N positions sharded over the W processes of a group. All of them must call it.

    Each process gets the output of its own rows, and in the backward their gradients: the result of ``dilated_attention`` on the whole
    sequence, sharded the same way. With the contiguous layout, a branch whose segments are each within one process communicates nothing.
    Of a longer branch only the positions that its heads select (1/r of K and V) move, among the processes of that segment; where shards
    begin with segments, the shorter branches are computed meanwhile. Segments need not align with shards, and lengths need not divide.

    Args:
        q: this process's queries (B, n, H, D), its rows in the order of the layout: see ``shard_sequence``.
        k, v: this process's keys and values (B, n, Hk, D).
        segment_lengths, dilation_rates: the pattern of the whole sequence, as in ``dilated_attention``.
        group: the ProcessGroup that shares the sequence; None for ``mesh``, or for all processes. Without torch.distributed, or with
            one process, nothing is communicated.
        mesh: a DeviceMesh of one axis, instead of a group.
        layout: ``"contiguous"`` · ``"zigzag"`` · ``"striped"`` · a ``Layout``: which process holds which positions. A striped sequence
            needs an additional exchange to reorder it, and another to restore its order. ``balanced_layout`` returns a ``Layout`` that
            gives all processes equal work, of packed documents, too.
        exchange: ``"auto"``: chosen by a cost model (``dilated_attention.distributed.explain_exchange`` prints it) · ``"all_gather"``:
            remote keys arrive in one exchange · ``"ring"``: they arrive in W − 1 exchanges, one shard at a time, to save memory ·
            ``"all_to_all"``: each process computes some heads of the whole sequence · ``"2d"``: heads are exchanged within a node, keys
            between nodes.
        seq_len: N. With None the processes ask each other in every call (0.2 ms or more). Either all processes give it, or none.
        cu_seqlens: boundaries of packed documents in the whole sequence, equal on all processes.
        key_padding_mask: (B, n) bool of this process's keys, True = padding.
        sinks: (H,), on all processes alike. A process's gradient is that of its own rows; the whole gradient is the sum over the
            group, like that of every replicated parameter.
        dropout_p: dropout is by position in the whole sequence: with equal seeds on all processes it equals that of a single process.
        ranks_per_node: number of consecutive ranks of the group that share heads in ``"2d"``; None for LOCAL_WORLD_SIZE.
        timeout: seconds that an exchange may take before an error names it and its peer.

    All other arguments are those of ``dilated_attention``. All but ``backend`` and ``timeout`` must be equal on all processes. This is
    checked at the first call of a kind; later calls are compared while they run, or up to a second afterwards.

    Returns:
        out (B, n, H, D) in q's dtype; with ``return_lse`` (out, lse (B, H, n)).

    Raises:
        ValueError, TypeError: bad input; or arguments differ between processes: raised on each of them, naming ranks and values.
        RingError: a process died, stalled or made a different call; the message names the exchange and the peer, or the difference.
        BackendUnavailable: as in ``dilated_attention``.

    Differs from LongNet's published code, which drops a process's own keys in causal attention, moves whole segments through all
    processes, and takes no gradient through the mixing weights.
    """
    lengths = plain_ints(segment_lengths) or as_int_tuple("segment_lengths", segment_lengths)
    rates = plain_ints(dilation_rates) or as_int_tuple("dilation_rates", dilation_rates)
    branches = lengths, rates, head_offsets, branch_heads, tail
    options = Options(is_causal, return_lse, deterministic, 0, dropout_p, scale, backend, mixture_grad=mixture_grad, softcap=softcap)
    per_node = _per_node(ranks_per_node) if exchange == "2d" else ranks_per_node
    layout = layout.name if isinstance(layout, Layout) else layout
    ring = RingOptions(group_name_of(group, mesh), layout, seq_len, timeout, exchange, per_node)
    return attend(q, k, v, (key_padding_mask, cu_seqlens, sinks), branches, None, (), options, Ring(ring_attention_op, *RING, ring))


def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    group: Any = None,
    mesh: Any = None,
    layout: str | Layout = "zigzag",
    exchange: str = "auto",
    seq_len: int | None = None,
    is_causal: bool = False,
    window: int | tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    cu_seqlens: torch.Tensor | None = None,
    key_padding_mask: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    return_lse: bool = False,
    deterministic: bool = False,
    backend: str = "auto",
    ranks_per_node: int | None = None,
    timeout: float = 60.0,
) -> Any:
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
    options = Options(is_causal, return_lse, deterministic, 0, dropout_p, scale, backend, softcap=softcap)
    per_node = _per_node(ranks_per_node) if exchange == "2d" else ranks_per_node
    layout = layout.name if isinstance(layout, Layout) else layout
    ring = RingOptions(group_name_of(group, mesh), layout, seq_len, timeout, exchange, per_node)
    masks, of_ring = (key_padding_mask, cu_seqlens, sinks), Ring(ring_attention_op, *RING, ring)
    return attend(q, k, v, masks, DENSE, None, check.check_window(window), options, of_ring)


class RingOptions(NamedTuple):
    """The options that a distributed call has in addition, as the caller gave them; a ``Layout`` by its name."""

    group_name: str
    layout: str
    seq_len: int | None
    timeout: float
    exchange: str = "all_gather"
    ranks_per_node: int | None = None
    head_steps: int | None = None


def place_in(group_name: str) -> tuple[int, int]:
    """Returns (rank, W) in the named group; (0, 1) for "". It is a constant to torch.compile, which cannot look up a group."""
    members = members_named(group_name)
    return members.rank, members.size


# does what torch.compiler.assume_constant_result does (a test compares them) without importing the compiler, which would be half of
# this package's import time
place_in._dynamo_marked_constant = True  # type: ignore[attr-defined]


def check_ring(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, branches: tuple[Any, ...] | None, window: tuple[int, ...], options: Options,
    ring: RingOptions,
) -> tuple[tuple[Any, ...], int]:  # fmt: skip
    """Checks the options that only distributed calls have, and returns ``sharding`` and ``seq_len`` of ``CallSettings``."""
    layout_name(ring.layout)
    one_of("exchange", ring.exchange, ("auto", *EXCHANGES))
    if ring.exchange == "2d" and ring.ranks_per_node is None:
        raise ValueError("exchange='2d' without ranks_per_node, and LOCAL_WORLD_SIZE is not set: give ranks_per_node")
    per_node = 0 if ring.ranks_per_node is None else as_int("ranks_per_node", ring.ranks_per_node, minimum=1)
    steps = 0 if ring.head_steps is None else as_int("head_steps", ring.head_steps, minimum=1)
    lse_grad = options.return_lse and options.mixture_grad == "exact"
    sharding = ring.group_name, ring.layout, ring.exchange, per_node, check.check_timeout(ring.timeout), lse_grad, steps
    seq_len = -1 if ring.seq_len is None else as_int("seq_len", ring.seq_len, minimum=0)
    if window and ring.exchange == "ring":
        raise ValueError("exchange='ring' with a window: the keys that a window reaches come in one exchange; use exchange='all_gather'")
    if ring.exchange in ("all_to_all", "2d"):
        assert branches is not None, "blocks are gathered"
        check.check_tensors(q, k, v)
        _check_heads(ring, per_node, q.shape[2], k.shape[2], branches[3])
    return sharding, seq_len


def _check_heads(ring: RingOptions, per_node: int, num_heads: int, num_kv_heads: int, branch_heads: str) -> None:
    _, size = place_in(ring.group_name)
    if ring.exchange == "2d" and size % per_node:
        raise ValueError(f"ranks_per_node is {per_node} for a group of {size} processes; expected a divisor of {size}")
    reason = why_no_heads(num_heads, num_kv_heads, per_node if ring.exchange == "2d" else size, branch_heads)
    if reason is not None:
        raise ValueError(f"exchange={ring.exchange!r}: {reason}; use exchange='all_gather', which does not divide the heads")


def _per_node(ranks_per_node: int | None) -> int | None:
    """Returns the ranks of a node that a call with ``"2d"`` names or the launcher has set."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "0")) or None if ranks_per_node is None else ranks_per_node


# what resolves a distributed call, and what checks its options
RING = resolve_ring, check_ring
