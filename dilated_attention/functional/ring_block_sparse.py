"""A block pattern, alone or with dilated branches, on a sequence sharded across processes."""

from __future__ import annotations

from typing import Any

import torch

from dilated_attention.distributed.comm.group import group_name_of
from dilated_attention.distributed.op import ring_block_sparse_attention_op, ring_block_sparse_dilated_attention_op
from dilated_attention.distributed.sharding.custom_layout import Layout, layout_name
from dilated_attention.functional.arguments import Options, Ring, attend, plain_ints
from dilated_attention.functional.block_sparse import checked_pattern
from dilated_attention.functional.ring import RING, RingOptions
from dilated_attention.pattern import BlockPattern, HeadOffsets
from dilated_attention.pattern.checks import as_int_tuple

# the layouts with a one-word name
BLOCK_LAYOUTS = ("contiguous", "zigzag")


def ring_block_sparse_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    pattern: Any,
    *,
    group: Any = None,
    mesh: Any = None,
    layout: str | Layout = "contiguous",
    seq_len: int | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    softcap: float | None = None,
    cu_seqlens: torch.Tensor | None = None,
    key_padding_mask: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    return_lse: bool = False,
    deterministic: bool = False,
    backend: str = "auto",
    head_steps: int | None = None,
    timeout: float = 60.0,
) -> Any:
    """Computes ``block_sparse_attention`` of a sequence of N positions sharded over the W processes of a group. All of them must call it.

    Each process gets the output of its own rows, and in the backward their gradients: the result of ``block_sparse_attention`` on the
    whole sequence, sharded the same way. A process receives only the key blocks that its queries keep, and sends only those that other
    processes' queries keep. Every process computes both from the pattern alone, and processes that need nothing from each other exchange
    nothing. All keys of a group of heads are gathered before these heads are computed, so nothing is merged; the next heads' keys are
    in transit meanwhile.

    Args:
        q: this process's queries (B, n, H, D), its rows in the order of the layout: see ``shard_sequence``.
        k, v: this process's keys and values (B, n, Hk, D).
        pattern: as in ``block_sparse_attention``, of the whole sequence and equal on all processes. A pattern that holds a function must
            hold the same function everywhere: its kept blocks are compared, not its masks inside blocks. Patterns chosen by content
            are refused.
        group: the ProcessGroup that shares the sequence; None for ``mesh``, or for all processes. Without torch.distributed, or with
            one process, nothing is communicated.
        mesh: a DeviceMesh of one axis, instead of a group.
        layout: ``"contiguous"`` · ``"zigzag"`` · a ``Layout``: which process holds which positions. ``balanced_layout(pattern, …)``
            returns one that gives all processes equal work. Shards that begin and end at block boundaries are the fastest.
        seq_len: N. With None the processes ask each other in every call (0.2 ms or more). Either all processes give it, or none.
        cu_seqlens: boundaries of packed documents in the whole sequence, equal on all processes; each document has its own blocks.
        key_padding_mask: (B, n) bool of this process's keys, True = padding.
        sinks: (H,), on all processes alike; a process's gradient is that of its own rows: see ``ring_dilated_attention``.
        dropout_p: dropout is by position in the whole sequence: with equal seeds on all processes it equals that of a single process.
        head_steps: number of groups of key/value heads whose keys are sent one group after the other; None: chosen by a cost model.
        timeout: seconds that an exchange may take before an error names it and its peer.

    All other arguments are those of ``block_sparse_attention``. All but ``backend`` and ``timeout`` must be equal on all processes. This
    is checked at the first call of a kind; later calls are compared while they run, or up to a second afterwards.

    Returns:
        out (B, n, H, D) in q's dtype; with ``return_lse`` (out, lse (B, H, n)).

    Raises:
        ValueError, TypeError: bad input; or arguments differ between processes: raised on each of them, naming ranks and values.
        RingError: a process died, stalled or made a different call; the message names the exchange and the peer, or the difference.
        BackendUnavailable: as in ``block_sparse_attention``, before anything is sent.

    >>> layout = balanced_layout(pattern, seq_len, world_size, is_causal=True)
    >>> q, k, v = shard_sequence(group, [q, k, v], [1, 1, 1], layout=layout)
    >>> out = ring_block_sparse_attention(
    ...     q, k, v, pattern, group=group, layout=layout, seq_len=seq_len,
    ...     is_causal=True)
    """
    options = Options(is_causal, return_lse, deterministic, 0, dropout_p, scale, backend, softcap=softcap)
    pattern, layout = checked_ring_pattern(pattern), checked_block_layout(layout)
    ring = RingOptions(group_name_of(group, mesh), layout, seq_len, timeout, head_steps=head_steps)
    of_ring = Ring(ring_block_sparse_attention_op, *RING, ring)
    return attend(q, k, v, (key_padding_mask, cu_seqlens, sinks), None, pattern, (), options, of_ring)


def ring_block_sparse_dilated_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    segment_lengths: Any,
    dilation_rates: Any,
    pattern: Any,
    *,
    group: Any = None,
    mesh: Any = None,
    layout: str | Layout = "contiguous",
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
    dropout_p: float = 0.0,
    return_lse: bool = False,
    deterministic: bool = False,
    backend: str = "auto",
    head_steps: int | None = None,
    timeout: float = 60.0,
) -> Any:
    """Computes ``block_sparse_dilated_attention`` of a sequence of N positions sharded over the W processes of a group.

    All of them must call it. Each process gets the output of its own rows, and in the backward their gradients. It receives every key once
    that its queries keep, in a branch or in a block; both parts are computed on these keys and merged by their log-sum-exps.

    Args:
        segment_lengths, dilation_rates, head_offsets, branch_heads, tail: see ``dilated_attention``; segments are counted in the whole
            sequence.
        pattern, layout, head_steps: see ``ring_block_sparse_attention``. With ``branch_heads="split"`` all heads go in one step.
        backend: ``"auto"``, or a name that computes both parts or is refused; ``"nested"`` applies to the branches alone.

    All other arguments, results and errors are those of ``ring_block_sparse_attention``.

    >>> out = ring_block_sparse_dilated_attention(
    ...     q, k, v, [2048, 8192], [1, 4], BigBird(256, 64, 3),
    ...     mesh=mesh["cp"], seq_len=N)
    """
    lengths = plain_ints(segment_lengths) or as_int_tuple("segment_lengths", segment_lengths)
    rates = plain_ints(dilation_rates) or as_int_tuple("dilation_rates", dilation_rates)
    options = Options(is_causal, return_lse, deterministic, 0, dropout_p, scale, backend, softcap=softcap)
    branches = lengths, rates, head_offsets, branch_heads, tail
    pattern, layout = checked_ring_pattern(pattern), checked_block_layout(layout)
    ring = RingOptions(group_name_of(group, mesh), layout, seq_len, timeout, head_steps=head_steps)
    of_ring = Ring(ring_block_sparse_dilated_attention_op, *RING, ring)
    return attend(q, k, v, (key_padding_mask, cu_seqlens, sinks), branches, pattern, (), options, of_ring)


def checked_ring_pattern(pattern: Any) -> BlockPattern:
    """Returns the block pattern if shapes alone determine it; raises otherwise."""
    pattern = checked_pattern(pattern)
    if pattern.is_chosen:
        raise ValueError(
            f"pattern is {pattern!r}, which is chosen by content; the processes of a ring find what to exchange from the pattern alone: "
            "use a pattern that is determined by shapes, or block_sparse_attention on one process"
        )
    return pattern


def checked_block_layout(layout: Any) -> str:
    """Returns the name of a layout whose processes hold runs of positions; raises for other layouts."""
    if isinstance(layout, str) and layout == "striped":
        raise ValueError(
            "layout is 'striped', which spreads every block over all processes, so that each would need all keys; use 'contiguous', "
            "'zigzag' or balanced_layout(pattern, seq_len, world_size)"
        )
    return layout_name(layout, BLOCK_LAYOUTS)
