"""``ring_block_sparse_attention``: a pattern of blocks on a sequence that several processes share."""

from __future__ import annotations

from typing import Any

import torch

from dilated_attention import validation as check
from dilated_attention.distributed.blocks_op import ring_block_sparse_attention_op
from dilated_attention.distributed.dealt import Layout, layout_name
from dilated_attention.functional.block_sparse import checked_pattern
from dilated_attention.functional.ring import group_name_of
from dilated_attention.functional.single import autocast, checked_options
from dilated_attention.pattern import BlockPattern
from dilated_attention.pattern.checks import as_int

# of one word
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
    cu_seqlens: torch.Tensor | None = None,
    key_padding_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    return_lse: bool = False,
    deterministic: bool = False,
    backend: str = "auto",
    head_steps: int | None = None,
    timeout: float = 60.0,
) -> Any:
    """``block_sparse_attention`` of a sequence of N positions that the W processes of a group hold in shards. All of them call it.

    Each process gets out for its own rows, and in the backward the gradients of its own rows: what ``block_sparse_attention`` gives for
    the whole, cut the same way. It receives only the key blocks that its queries keep, and sends only those that others' do, which
    every process finds from the pattern alone; processes that need nothing of each other exchange nothing. All keys of a group of heads
    are brought together before these heads are computed, so nothing is merged; the next heads' keys travel meanwhile.

    Args:
        q: this process's queries (B, n, H, D), its rows in the order of the layout: see ``shard_sequence``.
        k, v: its keys and values (B, n, Hk, D).
        pattern: as of ``block_sparse_attention``, of the whole sequence and equal on all processes. One that holds a function must hold
            the same one everywhere: its kept blocks are compared, not its masks inside blocks. Chosen by content: not here.
        group: the ProcessGroup that shares the sequence; None for ``mesh``, or for all processes. Without torch.distributed, or with
            one process, nothing is communicated.
        mesh: a DeviceMesh of one axis, instead of a group.
        layout: ``"contiguous"`` · ``"zigzag"`` · a ``Layout``: who holds which positions. ``balanced_layout(pattern, …)`` gives one in
            which all have equally much to compute. Shards that begin and end with blocks are the fastest.
        seq_len: N. None: the processes ask each other in every call (0.2 ms or more); all must give it, or none.
        cu_seqlens: bounds of packed documents in the whole sequence, equal on all processes; each has its own blocks.
        key_padding_mask: (B, n) bool of this process's keys, True = padding.
        dropout_p: dropped by position in the whole sequence: with equal seeds on all processes, as on one.
        head_steps: groups of key/value heads whose keys travel one after the other; None: as many as a model of time says.
        timeout: seconds that an exchange may take before an error names it and its peer.

    All other arguments are those of ``block_sparse_attention``. All but ``backend`` and ``timeout`` are equal on all processes, which is
    checked at the first call of a kind; later calls are compared while they run, or up to a second afterwards.

    Returns:
        out (B, n, H, D) in q's dtype; with ``return_lse`` (out, lse (B, H, n)).

    Raises:
        ValueError, TypeError: bad input; arguments that differ between processes, on each of them, naming ranks and values.
        RingError: a process died, stalled or made another call; with the exchange and the peer, or with what differs.
        BackendUnavailable: as of ``block_sparse_attention``, before anything is sent.

    >>> layout = balanced_layout(pattern, seq_len, world_size, is_causal=True)
    >>> q, k, v = shard_sequence(group, [q, k, v], [1, 1, 1], layout=layout)
    >>> out = ring_block_sparse_attention(q, k, v, pattern, group=group, layout=layout, seq_len=seq_len, is_causal=True)
    """
    q, k, v = autocast(q, k, v)
    check.check_tensors(q, k, v)
    if q.shape[1] != k.shape[1]:
        raise ValueError(f"q has {q.shape[1]} rows and k has {k.shape[1]}; a process holds queries and keys of the same positions")
    pattern = checked_ring_pattern(pattern)
    name = checked_block_layout(layout)
    scale, dropout_p, _, seed, needs_grad = checked_options(
        q,
        k,
        v,
        is_causal=is_causal,
        scale=scale,
        cu_seqlens=cu_seqlens,
        key_padding_mask=key_padding_mask,
        dropout_p=dropout_p,
        query_offset=0,
        return_lse=return_lse,
        deterministic=deterministic,
        backend=backend,
    )
    out, lse, _ = ring_block_sparse_attention_op(
        q,
        k,
        v,
        key_padding_mask,
        cu_seqlens,
        seed,
        pattern.spec(),
        is_causal,
        scale,
        dropout_p,
        deterministic,
        needs_grad,
        backend,
        group_name_of(group, mesh),
        name,
        -1 if seq_len is None else as_int("seq_len", seq_len, minimum=0),
        0 if head_steps is None else as_int("head_steps", head_steps, minimum=1),
        check.check_timeout(timeout),
        return_lse,
    )
    return (out, lse) if return_lse else out


def checked_ring_pattern(pattern: Any) -> BlockPattern:
    """A block pattern that shapes alone determine."""
    pattern = checked_pattern(pattern)
    if pattern.is_chosen:
        raise ValueError(
            f"pattern is {pattern!r}, which is chosen by content; the processes of a ring find what to exchange from the pattern alone: use a "
            "pattern that shapes determine, or block_sparse_attention on one process"
        )
    return pattern


def checked_block_layout(layout: Any) -> str:
    """The name of a layout whose processes hold runs of positions."""
    if isinstance(layout, str) and layout == "striped":
        raise ValueError(
            "layout is 'striped', which spreads every block over all processes, so that each would need all keys; use 'contiguous', "
            "'zigzag' or balanced_layout(pattern, seq_len, world_size)"
        )
    return layout_name(layout, BLOCK_LAYOUTS)
