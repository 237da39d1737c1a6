"""All attentions: dense, dilated, block-sparse, and branches with blocks; in one process, and over a sequence sharded across processes."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask
from typing_extensions import Unpack

from dilated_attention import validation as check
from dilated_attention.distributed.ring_pass import (
    ring_attention_op,
    ring_block_sparse_attention_op,
    ring_block_sparse_dilated_attention_op,
)
from dilated_attention.distributed.sharding.layout import Layout
from dilated_attention.engine.ops.settings import DENSE
from dilated_attention.functional.arguments import attend, branches_of
from dilated_attention.functional.options import LocalBranchOptions, LocalOptions, RingBranchOptions, RingOptions, shows_options
from dilated_attention.pattern import BlockPattern, from_block_mask
from dilated_attention.pattern.checks import shown

# each with what tells that it was written since
_converted: weakref.WeakKeyDictionary[BlockMask, tuple[list[Any], BlockPattern]] = weakref.WeakKeyDictionary()


@shows_options
def dilated_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segment_lengths: Any, dilation_rates: Any, *, mixture_grad: str = "exact",
    precision: str = "native", **options: Unpack[LocalBranchOptions],
) -> Any:  # fmt: skip
    """Computes LongNet's dilated attention (arXiv 2307.02486) exactly, as one softmax over the multiset of all branches' keys.

        out_h(i) = Σ_j m_h(i,j) e^{s_ij} v_j / Σ_j m_h(i,j) e^{s_ij},    s_ij = scale · q_i·k_j

    m_h(i, j) counts the branches (w, r) in which positions i and j are in the same segment of w positions and both have an index
    ≡ o_h (mod r) inside it. This is the paper's mixing of branches by their softmax denominators (Eq. 8–11). A row that no
    branch of its head selects, or whose keys are all masked, is 0 with lse −inf (with sinks sink_h) and gradient 0.

    Args:
        q: queries (B, Nq, H, D), float16, bfloat16, float32 or float64; D from 1 to 256.
        k, v: keys and values (B, Nk, Hk, D); Hk divides H, and query head h reads key/value head h // (H/Hk).
        segment_lengths: w of each branch, in positions; any w ≥ 1, which need not divide N and may exceed it.
        dilation_rates: r of each branch, 1 ≤ r ≤ w; r need not divide w.
        mixture_grad: ``"exact"`` · ``"detached"``: no gradient through the mixing weights of the branches (as in TorchScale).
        precision: ``"native"``: products in the inputs' dtype · ``"fp8"``: products in 8-bit floats (e4m3), summed in float32 over at most
            8192 keys at a time. It runs on Hopper, forward only, without gradients; out is in q's dtype, with an error of about 5 % where
            values average out.
        options: see ``functional.CallOptions``, ``LocalOptions`` and ``BranchOptions``; ``help`` shows each.

    Returns:
        out (B, Nq, H, D) in q's dtype; with ``return_lse`` (out, lse (B, H, Nq)), natural logarithm, float32 (float64 for
        float64 inputs). lse is differentiable; with ``mixture_grad="detached"`` it is returned without a gradient.

    Raises:
        ValueError, TypeError: bad input, before anything is allocated.
        BackendUnavailable: no backend can compute this, or the named one cannot; the message lists every reason.
        NotImplementedError: a second derivative or a forward-mode tangent (torch.func.jvp) is asked for; grad, vjp, jacrev and vmap work.

    Equals the paper where r divides w and w divides N. Differs from TorchScale in its exact gradients, in having no zero keys, and in
    its offsets h mod r; ``head_offsets="blocked", tail="zero_keys", mixture_grad="detached"`` gives TorchScale's semantics.
    """
    branches = branches_of(segment_lengths, dilation_rates)
    return attend("dilated_attention", options, q, k, v, branches, mixture_grad=mixture_grad, precision=precision)


@shows_options
def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, window: int | tuple[int | None, int | None] | None = None,
    precision: str = "native", **options: Unpack[LocalOptions],
) -> Any:  # fmt: skip
    """Computes dense softmax attention (m = 1) on the same engine and backends: ``dilated_attention`` with one segment and rate 1.

    Args:
        window: (left, right): a query at position i sees keys i − left … i + right; None, or −1 in a pair, is unbounded, and
            one integer stands for both sides. Together with ``is_causal``, right is at most 0.

    All other arguments, results and errors are those of ``dilated_attention``.
    """
    return attend("attention", options, q, k, v, DENSE[:2], window=check.check_window(window), head_offsets="zero", precision=precision)


@shows_options
def block_sparse_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pattern: Any, **options: Unpack[LocalOptions]) -> Any:
    """Computes attention over the pairs that a block pattern keeps, exactly, as one softmax over each query's kept keys.

        out_h(i) = Σ_j m_h(i,j) e^{s_ij} v_j / Σ_j m_h(i,j) e^{s_ij},    s_ij = scale · q_i·k_j,    m_h(i,j) ∈ {0, 1}

    m is ``pattern.dense_mask``. Time and memory grow with the number of kept blocks, not with N². A row without kept keys is 0 with
    lse −inf and gradient 0.

    Args:
        pattern: a block pattern of ``dilated_attention.pattern``, or several joined by | and &, for all heads or per head; or a
            ``BlockMask`` of torch.nn.attention.flex_attention, read by ``from_block_mask``.

    All other arguments, results and errors are those of ``dilated_attention``, without ``mixture_grad`` and ``precision``. Each packed
    document has its own blocks.

    The patterns are those of Longformer (arXiv 2004.05150), BigBird (arXiv 2007.14062) and Sparse Transformers (arXiv 1904.10509), in
    whole blocks. Some libraries take a softmax per block, so that a query's weights do not sum to 1; this function does not.

    >>> pattern = LocalWindow(512) | GlobalLocal(128, 16)
    >>> out = block_sparse_attention(q, k, v, pattern, is_causal=True)
    """
    return attend("block_sparse_attention", options, q, k, v, blocks=checked_pattern(pattern))


@shows_options
def block_sparse_dilated_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segment_lengths: Any, dilation_rates: Any, pattern: Any,
    **options: Unpack[LocalBranchOptions],
) -> Any:  # fmt: skip
    """Computes dilated branches and a block pattern together, exactly, as one softmax over the multiset of all their keys.

        m_h(i, j) = m_h(i, j) of ``dilated_attention`` + m_h(i, j) of ``block_sparse_attention``

    A pair that two branches keep, or a branch and a block, counts twice, as a pair in two branches does in LongNet. The two parts are
    computed by separate kernels and merged by their log-sum-exps. The backward of each part uses the merged log-sum-exps; no gradient
    flows through the merge. A named backend computes both parts or is refused.

    Args:
        segment_lengths, dilation_rates: see ``dilated_attention``.
        pattern: see ``block_sparse_attention``.

    All other arguments, results and errors are those of ``dilated_attention``, without ``mixture_grad`` and ``precision``.

    >>> out = block_sparse_dilated_attention(
    ...     q, k, v, [2048, 8192], [1, 4], BigBird(256, 64, 3), is_causal=True)
    """
    branches = branches_of(segment_lengths, dilation_rates)
    return attend("block_sparse_dilated_attention", options, q, k, v, branches, checked_pattern(pattern))


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
        exchange: ``"auto"``: ``"all_to_all"`` for contiguous causal dense shards, but for short windows · ``"all_gather"``:
            remote keys arrive in one exchange, or of some heads at a time · ``"all_to_all"``: each process computes some heads of the
            whole sequence · ``"ring"``, ``"2d"``: run as ``"auto"``, and the log says so once.
        mixture_grad: see ``dilated_attention``.
        ranks_per_node: accepted and not used any more: of ``"2d"``.
        options: see ``functional.RingOptions``, ``CallOptions`` and ``BranchOptions``; ``help`` shows each.

    All arguments but q, k, v, ``key_padding_mask``, ``sinks``, ``bias``, ``backend`` and ``timeout`` must be equal on all processes. This
    is checked at the first call of a kind; later calls are compared while they run, or up to a second afterwards.

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
        window: (left, right) as in ``attention``.

    All other arguments, results and errors are those of ``ring_dilated_attention``.
    """
    return attend(
        "ring_attention", options, q, k, v, DENSE[:2], None, ring_attention_op,
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
        head_steps: number of groups of key/value heads whose keys are sent one group after the other; None: as many as pay.

    All other arguments, results and errors are those of ``ring_dilated_attention``, without ``exchange`` and ``mixture_grad``.

    >>> layout = balanced_layout(pattern, seq_len, world_size, is_causal=True)
    >>> q, k, v = shard_sequence(group, [q, k, v], [1, 1, 1], layout=layout)
    >>> out = ring_block_sparse_attention(
    ...     q, k, v, pattern, group=group, layout=layout, seq_len=seq_len,
    ...     is_causal=True)
    """
    return attend(
        "ring_block_sparse_attention", options, q, k, v, None, checked_pattern(pattern), ring_block_sparse_attention_op,
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

    All other arguments, results and errors are those of ``ring_dilated_attention``, without ``exchange`` and ``mixture_grad``.

    >>> out = ring_block_sparse_dilated_attention(
    ...     q, k, v, [2048, 8192], [1, 4], BigBird(256, 64, 3),
    ...     mesh=mesh["cp"], seq_len=N)
    """
    return attend(
        "ring_block_sparse_dilated_attention", options, q, k, v, branches_of(segment_lengths, dilation_rates), checked_pattern(pattern),
        ring_block_sparse_dilated_attention_op, layout=layout, exchange="all_gather", head_steps=head_steps,
    )  # fmt: skip


def checked_pattern(pattern: Any) -> BlockPattern:
    """Returns the block pattern; a ``BlockMask`` is converted, once as long as nobody writes it."""
    if isinstance(pattern, BlockPattern):
        return pattern
    if not isinstance(pattern, BlockMask):
        raise TypeError(
            f"pattern is {shown(pattern)} ({type(pattern).__name__}); expected a block pattern of dilated_attention.pattern, e.g. "
            "LocalWindow(512), or a BlockMask of torch.nn.attention.flex_attention"
        )
    if torch.compiler.is_compiling():
        raise TypeError(
            "pattern is a BlockMask inside a compiled function, where its lists cannot be read; convert it outside: "
            "dilated_attention.pattern.from_block_mask(block_mask)"
        )
    tables = pattern.kv_num_blocks, pattern.kv_indices, pattern.full_kv_num_blocks, pattern.full_kv_indices
    now = [pattern.mask_mod, *map(_state, tables)]
    before, known = _converted.get(pattern, (None, None))
    if known is None or before != now:
        known = from_block_mask(pattern)
        _converted[pattern] = now, known
    return known


def _state(table: torch.Tensor | None) -> Any:
    """Returns what tells that a table was written: on the CPU its values; on a GPU, for which the host would wait, place and version."""
    if table is None or table.device.type == "cpu":
        return None if table is None else table.numpy().tobytes()
    return table.data_ptr(), 0 if table.is_inference() else table._version
