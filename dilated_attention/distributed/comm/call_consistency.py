"""Checks that all ranks make the same call: else they would hang in a collective, or interpret one tensor as another."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from dilated_attention.backends import registry
from dilated_attention.distributed.comm.group import Members
from dilated_attention.distributed.comm.session import differences, first_line, session_of
from dilated_attention.distributed.sharding.layout import ShardSpec, is_dealt, local_lengths, short_name, spans_of
from dilated_attention.engine.ops.settings import CallSettings, as_dense
from dilated_attention.pattern import MAX_LENGTH, BlockPattern, pattern_from_spec

# kinds of calls that a rank remembers, before it forgets all of them
MOST_KINDS = 4096
# calls that a rank remembers, such as those of a step's layers
_MOST_CALLS = 64
# settings that may differ between ranks, or that messages name or show otherwise; every other one is compared as it is
_NAMED_OTHERWISE = {
    "branches", "blocks", "detached", "needs_grad", "backend", "precision", "has_sinks", "bias", "sharding", "scale", "dropout_p",
    "query_offset", "seq_len",
}  # fmt: skip


def agree(members: Members, same: Mapping[str, object], own: Any, timeout: float) -> list[Any]:
    """Returns every rank's ``own``, such as its rows, in order of rank, once ``same``, all that must be equal, by name, is found equal on
    all ranks; its ``"function"`` names the call in messages. All ranks of the group must call it.

    Raises ValueError if values differ, with the same message on every rank: which ranks have which; RingError that names the ranks that
    have posted nothing within the timeout."""
    if members.group is None:
        return [own]
    session = session_of(members, timeout)
    number = session.handshakes
    session.handshakes += 1
    session.enter("a handshake", same)
    with session.asking():
        posts = session.post_and_collect(f"agree/{number}", [same, own])
        # all ranks have posted the previous handshake, so all have read the one before it
        session.store.delete_key(f"agree/{number - 2}/{session.rank}")
    if len(posts) < session.size:
        absent = [rank for rank in range(session.size) if rank not in posts]
        what = f"{same.get('function', 'first use')}: check that all ranks make the same call"
        session.fail_waiting(what, number, absent, f" failed after {timeout:.1f} s: {session.ranks_text(absent)} posted nothing")
    if session.failed is not None:
        raise session.error_to_raise()
    if text := differences(session, {rank: arguments for rank, (arguments, _) in posts.items()}):
        raise ValueError(f"{text}; all ranks must make the same call")
    return [posts[rank][1] for rank in range(session.size)]


class RingCall(NamedTuple):
    """The arguments of a distributed call alone. ``lse_grad``: whether lse may get a gradient on any rank; ``head_steps``: 0 for any."""

    group_name: str
    layout: str
    exchange: str
    timeout: float
    lse_grad: bool
    head_steps: int


def op_name(settings: CallSettings) -> str:
    if not settings.blocks:
        return "ring_attention"
    return "ring_block_sparse_attention" if settings.branches is None else "ring_block_sparse_dilated_attention"


def ring_call(settings: CallSettings) -> RingCall:
    """Returns the distributed part of a record."""
    ring = RingCall._make(settings.sharding)
    if ring.exchange in ("ring", "2d"):
        registry.tell_once(f"ring: exchange={ring.exchange!r} runs as 'auto': the same keys in one exchange for some heads at a time")
        return ring._replace(exchange="auto")
    return ring


def agreed_call(
    members: Members,
    inputs: tuple[Any, ...],
    settings: CallSettings,
    ring: RingCall,
    bounds: tuple[int, ...] | None,
    live_pattern: BlockPattern | None,
    check_kernels: Callable[[int], str],
) -> tuple[int, int]:
    """Returns N and the number of this call on the group, counted from 1, 0 in one process, once all ranks are known to make the same kind
    of call and to have kernels for it: by a handshake at the first call of a kind, whatever its length, or at every call if N is not
    given. Nothing has been sent by then. If they make different calls of kinds they agreed on earlier, or of different lengths,
    ``session.compare`` finds out in these calls or soon after.

    ``inputs``: q, k, v, key_padding_mask, …; ``bounds``: of packed documents; ``live_pattern``: one that holds a function or a tensor;
    ``check_kernels``: of N; raises if this rank cannot compute the call, and returns a digest that must be equal on all ranks.
    """
    q, k, _, padding = inputs[:4]
    (B, n, H, D), seq_len = q.shape, settings.seq_len
    if members.group is None:
        return checked_length(ring.layout, seq_len, [n]), 0
    session = session_of(members, ring.timeout)
    # of a call like an earlier one nothing is told or made anew
    call_key = settings, q.shape, k.shape[2], q.dtype, q.device.type, padding is None, bounds
    if (agreed := session.agreed_calls.get(call_key)) is None:
        documents, asks, lives = hash(bounds or ()), seq_len < 0, live_pattern is not None
        # without what each rank may choose for itself, else some ranks would start a handshake and others would not; with a live pattern
        # and not its name, which may be given again
        alike = settings._replace(
            backend="",
            precision="",
            seq_len=0,
            sharding=("dealt" if is_dealt(ring.layout) else ring.layout, ring.exchange, ring.lse_grad, ring.head_steps),
            blocks="" if lives else settings.blocks,
        )
        call_kind = alike, not as_dense(settings, q).blocks, B, H, D, k.shape[2], q.dtype, q.device.type, padding is None, bounds is None
        # which blocks a function keeps may differ at each length
        kind = *call_kind, live_pattern, seq_len if lives else 0
        known = None if asks and lives else session.agreed.get(kind)
        number, arguments = known or (session.handshakes, _arguments(q, k, padding, settings, ring))
        arguments = {**arguments, "layout": short_name(ring.layout), "seq_len": None if asks else seq_len, "cu_seqlens": None}
        if bounds is not None:
            more = f" … ({len(bounds) - 1} documents, hash {documents & 0xFFFFFFFF:08x})" if len(bounds) > 24 else ""
            arguments["cu_seqlens"] = f"{list(bounds[:24])}{more}"
        if known is None or asks:
            seq_len = checked_length(ring.layout, seq_len, agree(members, arguments, n, ring.timeout))
        elif n != (expected := ShardSpec(spans_of(seq_len, members.rank, members.size, ring.layout), (0, H)).rows):
            raise ValueError(
                f"rank {members.rank} holds {n} positions; of a {short_name(ring.layout)} sequence of {seq_len} it has {expected}: "
                "cut it by shard_sequence with the same layout and seq_len"
            )
        if known is None:
            unavailable: Exception | None = None
            has = {"kernels": "available"}
            try:
                if digest := check_kernels(seq_len):
                    has["pattern (the blocks that its function keeps)"] = digest
            except Exception as error:  # noqa: BLE001  raising here would leave the other ranks waiting
                unavailable, has = error, {"kernels": f"unavailable: {first_line(error)}"}
            agree(members, {"function": arguments["function"], **has}, None, ring.timeout)
            if unavailable is not None:
                raise unavailable
            if len(session.agreed) >= MOST_KINDS:
                # together: else a rank that remembers a call would not hear the others' handshake
                session.agreed.clear()
                session.agreed_calls.clear()
            session.agreed[kind] = number, arguments
        # the tags of messages contain the kind and the length
        agreed = seq_len, arguments, f"{zlib.crc32(f'{number} {seq_len} {ring.layout} {documents}'.encode())}"
        if not (asks or lives):
            if len(session.agreed_calls) >= _MOST_CALLS:
                session.agreed_calls.clear()
            session.agreed_calls[call_key] = agreed
    seq_len, arguments, shared = agreed
    session.forwards += 1
    session.enter(f"call {session.forwards} ({arguments['function']})", arguments, shared)
    return seq_len, session.forwards


def _arguments(q: torch.Tensor, k: torch.Tensor, padding: torch.Tensor | None, settings: CallSettings, ring: RingCall) -> dict[str, object]:
    """Returns what must be equal on all ranks, by the names that messages have."""
    function = op_name(settings)
    # dense attention is one segment of that length
    if not settings.blocks and settings.pattern.segment_lengths[0] < MAX_LENGTH:
        function = "ring_dilated_attention"
    same = {
        "function": function,
        "q.shape[0]": q.shape[0],
        "q.shape[2]": q.shape[2],
        "k.shape[2]": k.shape[2],
        "q.shape[3]": q.shape[3],
        "dtype": q.dtype,
        "device": q.device.type,
        # it limits how much may be received at once, which must be the same on all ranks
        "device memory, GiB": device_memory(q.device) >> 30,
        "key_padding_mask": None if padding is None else "given",
        **{
            name: value if isinstance(value, bool) else value or None
            for name, value in settings._asdict().items()
            if name not in _NAMED_OTHERWISE
        },
        "scale": settings.scale,
        "sinks": "given" if settings.has_sinks else None,
        "bias": f"by {settings.bias}" if settings.bias else None,
        "dropout_p": settings.dropout_p,
        "mixture_grad": "detached" if settings.detached else "exact",
        "requires_grad": settings.needs_grad,
        "exchange": ring.exchange,
        "head_steps": ring.head_steps or None,
        "return_lse": ring.lse_grad,
    }
    if settings.blocks:
        pattern = pattern_from_spec(settings.blocks)
        # a pattern that holds a function cannot be compared by name; the digest of its lists is compared once they are made
        name = type(pattern).__name__ if pattern.is_bound_to_process else settings.blocks
        same |= {"branches": settings.branches, "pattern": name, "block_size": str(pattern.block_size)}
        if pattern.dense_window is not None:
            # dense attention needs other rows than lists of blocks
            same["backend of a window"] = "one of lists of blocks" if as_dense(settings, q).blocks else "auto"
    elif settings.branches is not None:
        names = "segment_lengths", "dilation_rates", "head_offsets", "branch_heads", "tail"
        same |= zip(names, settings.branches, strict=True)
    return same


def checked_length(layout: str, seq_len: int, rows: list[int]) -> int:
    """Returns N, where it is negative the sum of all ranks' rows; ValueError if these are no shards of a sequence in the layout."""
    seq_len = seq_len if seq_len >= 0 else sum(rows)
    expected = local_lengths(seq_len, len(rows), layout)
    if rows != expected:
        raise ValueError(
            f"the group's ranks hold {rows} positions; a {short_name(layout)} sequence of {seq_len} has {expected}: "
            "cut it by shard_sequence with the same layout and seq_len"
        )
    return seq_len


def device_memory(device: torch.device) -> int:
    """Returns the bytes that steps are chosen for, in whole GiB, because ranks compare them. On a CPU a fixed number: all processes of the
    machine share the memory, and no two see the same amount free."""
    return torch.cuda.get_device_properties(device).total_memory >> 30 << 30 if device.type == "cuda" else 2**36
