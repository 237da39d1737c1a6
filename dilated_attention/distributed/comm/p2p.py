"""Exchanges rows between ranks without waiting. If they do not arrive, the error names the exchange and the peer.

On NCCL an exchange is one launch; a thread of the session (``session.py``) watches whether it ends. On gloo it is one message per peer, and
``wait`` blocks until they have come."""

from __future__ import annotations

import bisect
import contextlib
import functools
import itertools
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore

from dilated_attention.backends.base import accumulation_dtype
from dilated_attention.distributed.comm.call_consistency import agree
from dilated_attention.distributed.comm.group import Members
from dilated_attention.distributed.comm.session import RingError, Session, first_line, session_of
from dilated_attention.distributed.sharding.layout import ShardSpec, Span
from dilated_attention.engine.memory import readable

# before every fourth exchange the issuing thread waits until the GPU has reached the fourth last one. So at most seven are queued, enough
# to keep the GPU busy. Otherwise, behind an exchange that never ends, the thread would fill the driver's queue and wait inside the
# driver, where even the watching thread could not query an event. (Waiting before each exchange took 25 µs of a forward of 0.6 ms)
WAIT_EVERY = 4
# of the queries and of the keys, rank by rank
Holdings = tuple[list[ShardSpec], ...]
Index = tuple[slice, ...]


@dataclass(eq=False)
class Exchange:
    """An exchange in flight. It keeps its tensors alive until ``wait``.

    Attributes:
        number: counted from 1 on the wire; 0 opens the communicator.
        what: which exchange it is, for messages.
        peers: the ranks that it exchanges rows with.
        thread: the thread that issued it.
        works: (torch's handle, peers, its action, such as "receiving 3.81 MiB from rank 1") of each message on gloo; one of all on NCCL.
        ready: an event that completes once the exchange can run; None if it can at once.
        since: time.monotonic() when the exchange was seen to be the first that is not done, and able to run; None before.
    """

    wire: Wire
    number: int
    what: str
    peers: tuple[int, ...]
    tensors: tuple[Tensor, ...] = ()
    thread: int = field(default_factory=threading.get_ident)
    works: list[tuple[Any, tuple[int, ...], str]] = field(default_factory=list)
    ready: Any = None
    since: float | None = None

    def is_done(self) -> bool:
        return bool(self.works) and all(work.is_completed() for work, _, _ in self.works)

    def wait(self) -> None:
        """Waits until received tensors may be read and sent ones reused. On a GPU only the current stream waits, the host does not.

        Raises RingError if a peer has died, stalled or made a different call; on a GPU perhaps at a later exchange."""
        wire, began, timeout = self.wire, time.monotonic(), self.wire.session.timeout
        for work, peers, action in self.works:
            limit = () if wire.on_gpu else (timedelta(seconds=max(timeout - (time.monotonic() - began), 0.001)),)
            try:
                if not work.wait(*limit):
                    raise RuntimeError("the message was aborted")
            except RuntimeError as error:
                raise wire.broken(self, action, peers, error, time.monotonic() - began) from error
        self.tensors = ()
        if wire.on_gpu:
            wire.session.raise_if_failed()


class Wire:
    """What the ranks of a group, two or more, exchange rows by, on one type of device. All ranks make it together, and start exchanges in
    the same order.

    On NCCL it has a communicator of its own with high priority. Without priority an exchange would begin only when the kernel that it
    should overlap with ends, since that kernel fills all multiprocessors. (On four H200s 64 MiB from each rank slowed a kernel of 12.4 ms
    down by 0.5 ms, without priority by 1.1 ms.)"""

    def __init__(self, group: dist.ProcessGroup, session: Session, device: torch.device) -> None:
        self.session, self.device = session, device
        # ``number``: of the last exchange
        self.on_gpu, self.number = device.type == "cuda", 0
        # exchanges on a GPU in order; the issuing thread appends, the watching thread removes
        self.pending: deque[Exchange] = deque()
        # weak, since the group's owner decides how long it lives: a wire must not keep destroyed communicators alive
        self._group = weakref.ref(group)
        # NCCL's group for this wire alone
        self._own_group: Any = None
        backend = group._get_backend(device).name()
        if self.on_gpu and backend == "gloo":
            # gloo would treat GPU addresses as CPU addresses
            raise ValueError("the group's backend is gloo, which carries no CUDA tensors between ranks; initialise it with backend='nccl'")
        if self.on_gpu and backend == "nccl":
            options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
            options.global_ranks_in_group = session.global_ranks
            options.group_name = f"{group.group_name}/keys"  # type: ignore[assignment,unused-ignore]
            # built directly: ``new_group`` names a group by how many the process has, which may differ between ranks. The store is a clone,
            # which has a connection of its own, since NCCL waits inside it
            store = PrefixStore("communicator", session.store.clone())
            self._own_group = dist.ProcessGroupNCCL(store, session.rank, session.size, options)
        session.wires[device.type] = self
        # not at exit, where torch ends what is left without waiting for ranks that may be gone
        weakref.finalize(group, _close, session).atexit = False
        if not self.on_gpu:
            return
        # a first collective makes NCCL's communicator. It needs all ranks, and one may have nothing to exchange in the first exchange
        everyone, number = tuple({*range(session.size)} - {session.rank}), torch.zeros(1, device=device)
        opening = Exchange(self, 0, "opening the communicator", everyone, (number,))
        # before the call, which blocks, so that the watching thread sees it
        self.pending.append(opening)
        try:
            # not dist.all_reduce, which only accepts registered groups
            opening.works.append(((self._own_group or group).allreduce([number]), everyone, "a collective"))
            torch.cuda.synchronize(device)
        except RuntimeError as error:
            raise self.broken(opening, "a collective", everyone, error) from error

    def start(self, sent: Tensor, send_counts: list[int], came: Tensor, came_counts: list[int], what: str) -> Exchange:
        """Begins an exchange of rows. All ranks that have rows to exchange call it in the same order.

        Args:
            sent: the rows for all peers, one peer after the other; contiguous. Do not write to it before ``wait``.
            send_counts: how many of these rows each peer gets.
            came: the rows from all peers go here, one peer after the other; contiguous. On a GPU, issue its earlier uses to the current
                stream before this call.
            came_counts: how many rows come from each peer.
            what: which exchange it is, for messages, e.g. ``"forward, heads 1 of 2: K and V"``.

        Raises RingError if it cannot begin or an earlier one failed.
        """
        self.session.raise_if_failed()
        group: Any = self._group()
        peers = tuple(peer for peer, both in enumerate(zip(send_counts, came_counts, strict=True)) if any(both))
        self.number += 1
        exchange = Exchange(self, self.number, what, peers, (sent, came))
        is_watched = self.on_gpu and not torch.cuda.is_current_stream_capturing()
        if is_watched and self.number % WAIT_EVERY == 0:
            # at most one: the fourth last exchange, unless the watching thread has removed it
            for earlier in list(self.pending)[-WAIT_EVERY : 1 - WAIT_EVERY]:
                while earlier.ready is not None and not earlier.ready.query():
                    self.session.raise_if_failed()
                    time.sleep(50e-6)
        action, ranks = "starting", peers
        try:
            if self.on_gpu:
                work = (self._own_group or group).alltoall_base(came, sent, came_counts, send_counts)
                exchange.works.append((work, peers, "waiting for the GPU"))
            else:
                # the tag depends on all calls so far, so that a message of another call never matches it
                checksum = self.session.entries[self.session.count].checksum
                for action_text, move, rows, rows_of_peers in (
                    ("receiving {} from", group.recv, came, came_counts),
                    ("sending {} to", group.send, sent, send_counts),
                ):
                    for peer, part in enumerate(rows.split(rows_of_peers)):
                        if part.numel():
                            action, ranks = f"{action_text.format(readable(part.nbytes))} {self.session.ranks_text([peer])}", (peer,)
                            # as bytes, which every communication library carries
                            exchange.works.append((move([part.view(-1).view(torch.uint8)], peer, checksum & 0x3FFFFFFF), ranks, action))
        except RuntimeError as error:
            raise self.broken(exchange, action, ranks, error) from error
        if is_watched:
            exchange.ready = torch.cuda.Event()
            exchange.ready.record(torch.cuda.current_stream(sent.device))
            self.pending.append(exchange)
        return exchange

    def stalled(self) -> tuple[Exchange, str] | None:
        """Returns (exchange, what became of it) for one that failed, or that is not done although it could run for longer than the timeout;
        None if there is none. An exchange can run once those before it are done and its inputs are computed, so work that is queued on the
        GPU is not a stall. The watching thread calls this."""
        if self.pending:
            # a new thread uses GPU 0, and querying there would create a context that costs memory
            torch.cuda.set_device(self.device)
        while self.pending and (head := self.pending[0]).is_done():
            # once a communicator has failed, torch says of each of its exchanges that it is completed, and Python cannot read its exception
            if len(self.pending) == 1 and (end := head.works[0][0].get_future_result()).done() and int(end.value()):
                return head, "failed: torch logs NCCL's error"
            self.pending.popleft()
        if not self.pending:
            return None
        head, now = self.pending[0], time.monotonic()
        if head.since is None:
            head.since = now if head.ready is None or head.ready.query() else None
            return None
        return (head, f"is not done {now - head.since:.1f} s after it could run") if now - head.since > self.session.timeout else None

    def broken(self, exchange: Exchange, action: str, peers: Sequence[int], error: RuntimeError, waited: float = 0.0) -> RingError:
        """Marks the group as failed and returns the error to raise, for an exchange that torch refused or gave up."""
        trouble = f": {action} failed after {waited:.1f} s: {first_line(error)}"
        self.session.fail_waiting(exchange.what, exchange.number, peers, trouble)
        return self.session.error_to_raise()

    def abort(self) -> list[threading.Thread]:
        """Ends everything that waits for a message of this group: its work on the GPU, or threads on the CPU. Each communicator is ended
        by a thread, since that may hang, or wait for kernels that are queued behind the other's. Returns these threads."""
        group, threads = self._group(), list[threading.Thread]()
        if self.on_gpu:
            threads = [threading.Thread(target=_abort, args=(x, self.device), daemon=True) for x in (group, self._own_group)]
            for thread in threads:
                thread.start()
        elif group is not None and group._get_backend(self.device).name() == "gloo":
            # gloo ends waits only when one of them times out, here one for a tag above all others, which closes the group's connections
            with contextlib.suppress(RuntimeError):
                peer = (self.session.rank + 1) % self.session.size
                group.recv([torch.empty(1)], peer, 2**31 - 1).wait(timedelta(milliseconds=1))
        return threads


def wire_of(members: Members, timeout: float, device: torch.device) -> Wire | None:
    """Returns the group's wire for a device; None for one process. All ranks must call it together the first time."""
    if members.group is None:
        return None
    session = session_of(members, timeout)
    wire = session.wires.get(device.type)
    if wire is None:
        if device.type == "cuda":
            # otherwise NCCL would wait for absent ranks, until its own timeout and without naming them
            agree(members, {"function": "first exchange on a GPU"}, None, timeout)
        wire = Wire(members.group, session, device)
    return wire


def _abort(group: Any, device: torch.device) -> None:
    # best effort: the group may be None or half destroyed, and the process ends anyway if the GPU stays stuck
    with contextlib.suppress(RuntimeError, AttributeError):
        (group._get_backend(device) if isinstance(group, dist.ProcessGroup) else group).abort()


def _close(session: Session) -> None:
    """Shuts down the wires' own communicators, of which ``destroy_process_group`` does not know. They may be half destroyed."""
    for wire in session.wires.values():
        with contextlib.suppress(RuntimeError):
            if wire._own_group is not None:
                (wire._own_group.shutdown if session.failed is None else wire._own_group.abort)()
    session.wires.clear()


# --- from one division of rows and heads to another ---------------------------------------------------------------------------------
# A holding is (spans, heads): the rows that a rank holds, and the heads it holds of them. Rank s sends rank r what s holds under the old
# division and r needs under the new one, so an all-to-all over heads, its inverse and a change of layout are one function.


def holdings(rows: Sequence[tuple[Span, ...]], num_heads: int, num_kv_heads: int, *, by_heads: bool) -> Holdings:
    """Returns which rows and heads each rank holds. ``by_heads``: each has some heads, else all."""
    size, group = len(rows), num_heads // num_kv_heads
    heads = [(num_heads // size * rank, num_heads // size * (rank + 1)) if by_heads else (0, num_heads) for rank in range(size)]
    return tuple(
        [ShardSpec(of_rank, (first // each, -(-last // each))) for of_rank, (first, last) in zip(rows, heads, strict=True)]
        for each in (1, group)
    )


@functools.lru_cache(maxsize=4096)
def shared_rows(here: ShardSpec, there: ShardSpec) -> tuple[tuple[Index, Index], ...]:
    """Returns what both hold, in the order of ``here``'s rows: where it lies in tensors (B, rows, heads, …) of either."""
    low, high = max(here.heads[0], there.heads[0]), min(here.heads[1], there.heads[1])
    if low >= high:
        return ()
    heads, others_heads = (slice(low - holding.heads[0], high - holding.heads[0]) for holding in (here, there))
    shared, row = [], 0
    for span in itertools.starmap(range, here.spans):
        other_row = 0
        for other in itertools.starmap(range, there.spans):
            # the positions in both: their steps are equal, or one of them is 1
            fine, coarse = sorted((span, other), key=lambda x: x.step)
            both = coarse[bisect.bisect_left(coarse, fine.start) : bisect.bisect_left(coarse, fine.stop)]
            if both and both[0] in fine:
                rows = [
                    slice(first + of.index(both[0]), first + of.index(both[-1]) + 1, both.step // of.step)
                    for of, first in ((span, row), (other, other_row))
                ]
                shared.append(((slice(None), rows[0], heads), (slice(None), rows[1], others_heads)))
            other_row += len(other)
        row += len(span)
    return tuple(shared)


def reshard(
    tensors: Sequence[Tensor],
    old: Sequence[Sequence[ShardSpec]],
    new: Sequence[Sequence[ShardSpec]],
    me: int,
    wire: Wire | None,
    what: str,
    *,
    add: bool = False,
) -> list[Tensor]:
    """Returns each tensor (B, rows, heads, …) under its new division. ``old`` and ``new`` list every rank's holding for each tensor;
    ``add``: several ranks hold contributions to the same rows and heads, which are summed in the accumulation dtype."""
    if old == new:
        return list(tensors)
    results, others = list[Tensor](), [rank for rank in range(len(old[0])) if rank != me]
    # bytes, and where others' go, by peer
    outgoing, incoming = ([list[Tensor]() for _ in old[0]] for _ in range(2))
    for x, before, after in zip(tensors, old, new, strict=True):
        mine, needed, dtype = before[me], after[me], accumulation_dtype(x.dtype) if add else x.dtype
        shape = (x.shape[0], needed.rows, needed.heads[1] - needed.heads[0], *x.shape[3:])
        result = (torch.zeros if add else torch.empty)(shape, dtype=dtype, device=x.device)
        results.append(result)
        for at, to in shared_rows(mine, needed):
            result[to] = x[at]
        for rank in others:
            # a copy in any case: a contiguous tensor of one number may have any stride
            parts = (x[at].to(dtype).clone(memory_format=torch.contiguous_format) for at, _ in shared_rows(mine, after[rank]))
            outgoing[rank] += [part.view(-1).view(torch.uint8) for part in parts]
            incoming[rank] += [result[to] for _, to in shared_rows(before[rank], needed)]
    send_counts, counts = ([sum(part.nbytes for part in parts) for parts in by_peer] for by_peer in (outgoing, incoming))
    came = tensors[0].new_empty(sum(counts), dtype=torch.uint8)
    if sum(send_counts) or sum(counts):
        assert wire is not None, "one process holds everything"
        wire.start(torch.cat([came[:0], *itertools.chain(*outgoing)]), send_counts, came, counts, what).wait()
    places = list(itertools.chain(*incoming))
    for place, part in zip(places, came.split([place.nbytes for place in places]), strict=True):
        if part.storage_offset() % place.itemsize:
            # what came before it is narrower, and its bytes are no multiple
            part = part.clone()
        (place.add_ if add else place.copy_)(part.view(place.dtype).view(place.shape))
    return results
