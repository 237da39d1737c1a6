"""Checks that all ranks make the same call, and determines the length of the shared sequence."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from dilated_attention.distributed.comm.call_order import CallForm
from dilated_attention.distributed.comm.group import Members
from dilated_attention.distributed.comm.handshake import agree
from dilated_attention.distributed.comm.session import session_of
from dilated_attention.distributed.exchange.cost import device_memory
from dilated_attention.distributed.sharding.custom_layout import short_name
from dilated_attention.distributed.sharding.layout import local_length
from dilated_attention.engine.ops.prepare import bounds_of
from dilated_attention.engine.ops.settings import CallSettings
from dilated_attention.pattern import MAX_LENGTH, BlockPattern, pattern_from_spec

# what the calls of one record have found, over the last batches of packed documents; at this many, all of it is forgotten
MOST_KNOWN = 8
# kinds of calls remembered per group as agreed on by its ranks; at this many, all of them are forgotten
MOST_KINDS = 4096


@dataclass(frozen=True)
class RingCall:
    """The arguments of a distributed call that a single-process call does not have.

    Args:
        seq_len: the length of the whole sequence; −1 if the ranks have to ask each other.
        lse_grad: whether lse may get a gradient, on some ranks or all.
    """

    group_name: str
    layout: str
    exchange: str
    seq_len: int
    ranks_per_node: int
    timeout: float
    lse_grad: bool


def ring_call(settings: CallSettings, seq_len: int | None = None) -> RingCall:
    """Returns the distributed part of a record; ``seq_len``: N, where it is known by now."""
    group_name, layout, exchange, ranks_per_node, timeout, lse_grad, _ = settings.sharding
    return RingCall(group_name, layout, exchange, settings.seq_len if seq_len is None else seq_len, ranks_per_node, timeout, lse_grad)


class Agreement(NamedTuple):
    """What all ranks agree on before a call sends anything.

    Args:
        seq_len: N.
        number: the number of the call on its group, counted from 1; 0 in one process.
        kind: the key under which the ranks remember that they agree; None where the record already knows that nothing is open.
    """

    seq_len: int
    number: int
    kind: object


def function_of(settings: CallSettings) -> str:
    """Returns the name of the public function of a distributed call."""
    if settings.blocks:
        return "ring_block_sparse_attention" if settings.branches is None else "ring_block_sparse_dilated_attention"
    return "ring_attention" if settings.pattern.segment_lengths[0] >= MAX_LENGTH else "ring_dilated_attention"


def agreed_call(
    members: Members,
    inputs: tuple[Any, ...],
    settings: CallSettings,
    ring: RingCall,
    known: dict[Any, Any],
    kernels: Callable[[], str] | None,
) -> Agreement:
    """Returns N and the number of this call once all ranks are known to make the same call; see ``begin_forward``.

    Args:
        inputs: q, k, v, key_padding_mask, cu_seqlens, …
        known: what calls with the same arguments have found, except documents and the group's ranks, which may differ.
        kernels: returns the part of this rank's choice of kernels that must be the same on all ranks, as text; None if the choice needs
            N, and ``agree_on_kernels`` follows.
    """
    q, k, _, padding, cu_seqlens = inputs[:5]
    documents = documents_of(members, cu_seqlens)
    agreed = None if members.group is None else _agreed.get(members.group)
    found = known.get(("form", documents))
    # the group's dictionary is another one after its ranks have forgotten what they agreed on
    if found is not None and found[0] is agreed and members.group is not None:
        session = session_of(members, ring.timeout)
        session.check()
        return Agreement(ring.seq_len, session.order.enter_forward(found[1]), None)
    # leave out what each rank may choose for itself; otherwise some ranks would start a handshake and others would not
    shared = (replace(ring, timeout=0.0), settings._replace(backend="", precision="", sharding=settings.sharding[-1:]))
    pattern = pattern_from_spec(settings.blocks) if settings.blocks else None
    # the name of a pattern that holds a function may be given again once it is gone
    alive = pattern if pattern is not None and pattern.lives_here else None
    kind = (*shared, q.shape, k.shape, q.dtype, q.device.type, padding is not None, documents, alive)

    def same() -> dict[str, object]:
        return {
            "function": function_of(settings),
            **_same_of_tensors(q, k, padding, documents),
            **_same_of_patterns(settings, pattern),
            "window": str(list(settings.window) or None),
            "is_causal": settings.is_causal,
            "scale": settings.scale,
            "softcap": settings.softcap or "None",
            "sinks": "given" if settings.has_sinks else "None",
            "dropout_p": settings.dropout_p,
            "mixture_grad": "detached" if settings.detached else "exact",
            "deterministic": settings.deterministic,
            "requires_grad": settings.needs_grad,
            "layout": short_name(ring.layout),
            "exchange": ring.exchange,
            "ranks_per_node": ring.ranks_per_node or "None",
            "head_steps": settings.sharding[-1] or "None",
            "return_lse": ring.lse_grad,
            **({} if kernels is None else {"kernels": kernels()}),
            "seq_len": ring.seq_len if ring.seq_len >= 0 else "None",
        }

    seq_len, number = begin_forward(members, kind, same, q.shape[1], ring)
    if kernels is not None:
        _keep_form(members, ring, known, documents, kind)
    return Agreement(seq_len, number, kind)


def agree_on_kernels(
    members: Members,
    inputs: tuple[Any, ...],
    settings: CallSettings,
    ring: RingCall,
    known: dict[Any, Any],
    agreement: Agreement,
    kernels: Mapping[str, str],
) -> None:
    """Checks that all ranks have kernels, and that whatever else ``kernels`` says of their choice is equal, before any rank sends anything.

    Raises:
        ValueError: if it is not.
    """
    settled = (agreement.kind, "kernels", agreement.seq_len)
    if members.group is None or agreement.kind is None:
        return
    if agreed_form(members, settled) is None:
        same = {"function": function_of(settings), **kernels}
        agree(members, same, {}, ring.timeout)
        remember(members, settled, CallForm(0, same))
    _keep_form(members, ring, known, documents_of(members, inputs[4]), agreement.kind)


def _keep_form(members: Members, ring: RingCall, known: dict[Any, Any], documents: tuple[int, ...] | None, kind: object) -> None:
    """Makes later calls of a record skip all of this; not where the ranks have to ask each other for N."""
    form = agreed_form(members, kind) if members.group is not None and ring.seq_len >= 0 else None
    if form is not None and members.group is not None:
        keep(known, ("form", documents), (_agreed[members.group], form))


def keep(known: dict[Any, Any], key: object, found: Any) -> None:
    """Adds to what the calls of a record have found. Documents differ from batch to batch, so only the last ones are kept."""
    if len(known) >= MOST_KNOWN:
        known.clear()
    known[key] = found


def documents_of(members: Members, cu_seqlens: torch.Tensor | None) -> tuple[int, ...] | None:
    """Returns the bounds of the packed documents, for comparison between ranks.

    A single process compares nothing, so it returns None and does not read ``cu_seqlens``.
    """
    return None if cu_seqlens is None or members.size == 1 else bounds_of(cu_seqlens)


def _same_of_tensors(
    q: torch.Tensor, k: torch.Tensor, padding: torch.Tensor | None, documents: tuple[int, ...] | None
) -> dict[str, object]:
    """Returns the properties of the tensors that must be equal on all ranks, by name."""
    return {
        "q.shape[0]": q.shape[0],
        "q.shape[2]": q.shape[2],
        "k.shape[2]": k.shape[2],
        "q.shape[3]": q.shape[3],
        "dtype": str(q.dtype),
        "device": q.device.type,
        # it limits how much may be received at once, which must be the same on all ranks
        "device memory, GiB": device_memory(q.device) >> 30,
        "key_padding_mask": "given" if padding is not None else "None",
        "cu_seqlens": "None" if documents is None else _shortened(documents),
    }


def _same_of_patterns(settings: CallSettings, blocks: BlockPattern | None) -> dict[str, object]:
    if blocks is not None:
        return {
            "branches": settings.branches,
            # a pattern that holds a function cannot be compared by name; the digest of its lists is compared once they are made
            "pattern": type(blocks).__name__ if blocks.lives_here else blocks.spec(),
            "block_size": str(blocks.block_size),
        }
    pattern = settings.pattern
    return {
        "segment_lengths": str(list(pattern.segment_lengths)),
        "dilation_rates": str(list(pattern.dilation_rates)),
        "head_offsets": str(pattern.head_offsets),
        "branch_heads": pattern.branch_heads,
        "tail": pattern.tail,
    }


def begin_forward(members: Members, kind: object, same: Callable[[], Mapping[str, object]], rows: int, ring: RingCall) -> tuple[int, int]:
    """Returns (N, number of this call on the group) once ``same`` is known to be equal on all ranks.

    The ranks perform a handshake at the first call of a ``kind``, or at every call if N is not given. If ranks make different calls of
    kinds they agreed on earlier, ``compare_calls.py`` finds out during these calls or soon after.

    Args:
        rows: number of rows that this rank holds.
    """
    if members.group is None:
        return _checked_length(ring, [rows]), 0
    session = session_of(members, ring.timeout)
    session.check()
    form = agreed_form(members, kind) if ring.seq_len >= 0 else None
    seq_len = ring.seq_len
    if form is None:
        number, arguments = session.calls, {name: str(value) for name, value in same().items()}
        held = [own["rows"] for own in agree(members, arguments, {"rows": rows}, ring.timeout)]
        seq_len = _checked_length(ring, held)
        form = CallForm(number, arguments)
        if ring.seq_len >= 0:
            remember(members, kind, form)
    return seq_len, session.order.enter_forward(form)


def begin_backward(members: Members, number: int, timeout: float) -> None:
    """Records that this rank runs the backward of call ``number``, for comparison with the other ranks.

    Raises:
        RingError: if the group has failed.
    """
    if members.group is not None:
        session = session_of(members, timeout)
        session.check()
        session.order.enter_backward(number)


def agreed_form(members: Members, kind: object) -> CallForm | None:
    """Returns what the group's ranks agreed on at their first call of this kind; None if they have not made one."""
    assert members.group is not None, "one process agrees with itself"
    return _agreed.get(members.group, {}).get(kind)


def remember(members: Members, kind: object, form: CallForm) -> None:
    assert members.group is not None, "one process agrees with itself"
    agreed = _agreed.setdefault(members.group, {})
    if len(agreed) >= MOST_KINDS:
        agreed = _agreed[members.group] = {}
    agreed[kind] = form


# one dictionary per group: its ranks make the same calls, so they clear it at the same call; in a dictionary shared between groups,
# calls of another group would shift that moment on some ranks
_agreed: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[object, CallForm]] = weakref.WeakKeyDictionary()


def _shortened(documents: tuple[int, ...]) -> str:
    text = str(list(documents))
    return text if len(text) <= 200 else f"{text[:160]} … ({len(documents) - 1} documents, hash {hash(documents) & 0xFFFFFFFF:08x})"


def _checked_length(ring: RingCall, rows: list[int]) -> int:
    seq_len = ring.seq_len if ring.seq_len >= 0 else sum(rows)
    expected = [local_length(seq_len, rank, len(rows), ring.layout) for rank in range(len(rows))]
    if rows != expected:
        raise ValueError(
            f"the group's ranks hold {rows} positions; a {short_name(ring.layout)} sequence of {seq_len} has {expected}: "
            "cut it by shard_sequence with the same layout and seq_len"
        )
    return seq_len
