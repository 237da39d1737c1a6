"""Checks that all ranks make the same call, and determines the length of the shared sequence."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from dilated_attention.backends import registry
from dilated_attention.distributed.comm.group import Members
from dilated_attention.distributed.comm.handshake import agree
from dilated_attention.distributed.comm.session import CallForm, session_of
from dilated_attention.distributed.sharding.custom_layout import is_dealt, short_name
from dilated_attention.distributed.sharding.layout import local_length
from dilated_attention.engine.ops.settings import CallSettings
from dilated_attention.pattern import MAX_LENGTH, BlockPattern, pattern_from_spec


@dataclass(frozen=True)
class RingCall:
    """The arguments of a distributed call that a single-process call does not have. ``seq_len``: of the whole sequence, −1 if the ranks ask
    each other; ``lse_grad``: whether lse may get a gradient on any rank."""

    group_name: str
    layout: str
    exchange: str
    seq_len: int
    timeout: float
    lse_grad: bool


def ring_call(settings: CallSettings) -> RingCall:
    """Returns the distributed part of a record."""
    group_name, layout, exchange, timeout, lse_grad, _ = settings.sharding
    if exchange in ("ring", "2d"):
        registry.tell_once(
            f"ring: exchange={exchange!r} runs as 'auto', which moves the same keys in one exchange for some heads at a time"
        )
        exchange = "auto"
    return RingCall(group_name, layout, exchange, settings.seq_len, timeout, lse_grad)


class Agreed(NamedTuple):
    """What all ranks agree on before a call sends anything. ``seq_len``: N; ``among``: what the group's ranks have agreed on, while they
    remember it (``Session.agreed``), and ``form``: the call as agreed on, both None in one process; ``kind``: its key in ``among``."""

    seq_len: int
    among: object
    form: CallForm | None
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
    bounds: tuple[int, ...] | None,
    kernels: Callable[[], str] | None,
) -> tuple[Agreed, int]:
    """Returns what the ranks agree on and the number of this call on the group, once all are known to make the same kind of call.

    The ranks perform a handshake at the first call of a kind, whatever its length, or at every call if N is not given. If ranks make
    different calls of kinds they agreed on earlier, or of different lengths, ``handshake.py`` finds out during these calls or soon after.
    ``inputs``: q, k, v, key_padding_mask, …; ``bounds``: of packed documents. ``kernels`` returns, as text, what must be equal in the
    ranks' choices of kernels; None if the choice needs N, and ``agree_on_kernels`` follows.
    """
    q, k, _, padding = inputs[:4]
    if members.group is None:
        return Agreed(_checked_length(ring, [q.shape[1]]), None, None, None), 0
    session = session_of(members, ring.timeout)
    session.check()
    pattern = pattern_from_spec(settings.blocks) if settings.blocks else None
    # leave out what each rank may choose for itself, else some ranks would start a handshake and others would not; and what follows the
    # length. The name of a pattern that holds a function may be given again once it is gone
    kind = (
        replace(ring, timeout=0.0, seq_len=min(ring.seq_len, 0), layout="" if is_dealt(ring.layout) else ring.layout),
        settings._replace(backend="", precision="", seq_len=0, sharding=settings.sharding[-1:]),
        *(q.shape[0], q.shape[2:], k.shape[2:], q.dtype, q.device.type, padding is None, bounds is None),
        pattern if pattern is not None and pattern.lives_here else None,
    )
    of_length = {
        "layout": short_name(ring.layout),
        "cu_seqlens": "None" if bounds is None else _shortened(bounds),
        "seq_len": str(ring.seq_len) if ring.seq_len >= 0 else "None",
    }
    form, seq_len = session.agreed.get(kind) if ring.seq_len >= 0 else None, ring.seq_len
    if form is None:
        number = session.calls
        same = {
            "function": function_of(settings),
            **_same_of_tensors(q, k, padding),
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
            "exchange": ring.exchange,
            "head_steps": settings.sharding[-1] or "None",
            "return_lse": ring.lse_grad,
            **({} if kernels is None else {"kernels": kernels()}),
            **of_length,
        }
        arguments = {name: str(value) for name, value in same.items()}
        held = [own["rows"] for own in agree(members, arguments, {"rows": q.shape[1]}, ring.timeout)]
        seq_len, form = _checked_length(ring, held), CallForm(number, arguments)
        if ring.seq_len >= 0:
            session.remember(kind, form)
    elif q.shape[1] != (expected := local_length(seq_len, members.rank, members.size, ring.layout)):
        raise ValueError(
            f"rank {members.rank} holds {q.shape[1]} positions; of a {short_name(ring.layout)} sequence of {seq_len} it has {expected}: "
            "cut it by shard_sequence with the same layout and seq_len"
        )
    # a number of the kind and the length, which the tags of messages contain
    number = zlib.crc32(f"{form.number} {seq_len} {ring.layout} {bounds}".encode())
    form = CallForm(number, {**form.arguments, **of_length})
    return Agreed(seq_len, session.agreed, form, kind), session.order.enter_forward(form)


def agree_on_kernels(members: Members, settings: CallSettings, ring: RingCall, agreed: Agreed, kernels: Mapping[str, str]) -> None:
    """Checks, before any rank sends anything, that all have kernels and what else ``kernels`` says of them is equal; else ValueError. Once
    for a kind, or for a length where the blocks are those of a function."""
    if members.group is None:
        return
    session, of_function = session_of(members, ring.timeout), pattern_from_spec(settings.blocks).lives_here
    settled = (agreed.kind, "kernels", agreed.seq_len if of_function else None)
    if settled not in session.agreed:
        same = {"function": function_of(settings), **kernels}
        agree(members, same, {}, ring.timeout)
        session.remember(settled, CallForm(0, same))


def _same_of_tensors(q: torch.Tensor, k: torch.Tensor, padding: torch.Tensor | None) -> dict[str, object]:
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


def _shortened(bounds: tuple[int, ...]) -> str:
    text = str(list(bounds))
    return text if len(text) <= 200 else f"{text[:160]} … ({len(bounds) - 1} documents, hash {hash(bounds) & 0xFFFFFFFF:08x})"


def _checked_length(ring: RingCall, rows: list[int]) -> int:
    seq_len = ring.seq_len if ring.seq_len >= 0 else sum(rows)
    expected = [local_length(seq_len, rank, len(rows), ring.layout) for rank in range(len(rows))]
    if rows != expected:
        raise ValueError(
            f"the group's ranks hold {rows} positions; a {short_name(ring.layout)} sequence of {seq_len} has {expected}: "
            "cut it by shard_sequence with the same layout and seq_len"
        )
    return seq_len


@functools.lru_cache(maxsize=8)
def device_memory(device: torch.device) -> int:
    """Returns the bytes that steps are chosen for, alike on all ranks."""
    # on a CPU all processes of the machine share the memory, and no two see the same amount free, so a fixed value is used
    # in whole GiB, because ranks compare it
    return torch.cuda.get_device_properties(device).total_memory >> 30 << 30 if device.type == "cuda" else 2**36
