"""Sends rows from rank to rank without waiting, and raises an error that names the exchange and the peer if they do not arrive. On NCCL an
exchange is one launch, watched by a thread (session.py); on gloo it is one message per peer, and waiting blocks."""

from __future__ import annotations

import contextlib
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
from torch.distributed.distributed_c10d import PrefixStore

from dilated_attention.distributed.comm.call_consistency import agree
from dilated_attention.distributed.comm.group import Members
from dilated_attention.distributed.comm.session import COLLECT, RingError, Session, first_line, session_of
from dilated_attention.engine.memory import readable

# every so many exchanges the issuing thread waits for the GPU (before each: 25 µs of a forward of 0.6 ms), so that at most seven are
# queued, enough to keep it busy. Behind an exchange that never ends it would fill the driver's queue and wait inside the driver, where
# even the watching thread could not query an event
EVERY = 4


@dataclass(eq=False)
class Exchange:
    """An exchange in flight, issued by ``thread``. It keeps its tensors alive until ``wait``.

    ``works``: (torch's handle, peers, what it does, such as "receiving 3.81 MiB from rank 1"), on gloo of each message, else of all.
    ``ready``: an event that completes once the exchange can run, None if it could at once; ``since``: time.monotonic() when it was found
    to be first in line and able to run."""

    wire: Wire
    number: int
    what: str
    peers: tuple[int, ...]
    tensors: tuple[torch.Tensor, ...] = ()
    thread: int = field(default_factory=threading.get_ident)
    works: list[tuple[Any, tuple[int, ...], str]] = field(default_factory=list)
    ready: Any = None
    since: float | None = None

    def is_done(self) -> bool:
        return bool(self.works) and all(work.is_completed() for work, _, _ in self.works)

    def wait(self) -> None:
        """Waits; then received tensors may be read and sent ones reused: by anyone on a CPU, by the current stream on a GPU. Raises
        RingError if a peer has died, stalled or made a different call; on a GPU, where this does not block, perhaps later."""
        wire, pending, self.tensors = self.wire, self.tensors, ()
        if not pending:
            return
        began, wire.waits = time.monotonic(), True
        for work, peers, act in self.works:
            limit = () if wire.on_gpu else (timedelta(seconds=max(wire.timeout - (time.monotonic() - began), 0.001)),)
            try:
                if not work.wait(*limit):
                    raise RuntimeError("the message was aborted")
            except RuntimeError as error:
                raise wire.broken(self, act, peers, error, time.monotonic() - began) from error
        wire.waits = False
        if wire.on_gpu:
            wire.session.raise_if_failed()


class Wire:
    """Exchanges among the two or more ranks of a group, in the same order on all of them; all must make the wire together.

    On NCCL it has a communicator of its own, of high priority; otherwise an exchange would only begin when the kernel that it should
    overlap with, which fills all multiprocessors, ends. (On four H200s 64 MiB from each rank slowed a kernel of 12.4 ms down by 0.5 ms,
    without priority by 1.1 ms.) ``timeout``: seconds that an exchange may take once it can run."""

    def __init__(self, group: dist.ProcessGroup, session: Session, device: torch.device, timeout: float) -> None:
        self.session, self.device, self.timeout = session, device, timeout
        self.on_gpu, self.waits, self.number = device.type == "cuda", False, 0
        # in order; the issuing thread appends, the watching thread removes
        self.pending: deque[Exchange] = deque()
        # the group's owner decides how long it lives: a wire must not keep destroyed communicators alive
        self._shared = weakref.ref(group)
        self.own: Any = None
        backend = group._get_backend(device).name()
        if self.on_gpu and backend == "gloo":
            # gloo would treat GPU addresses as CPU addresses
            raise ValueError("the group's backend is gloo, which carries no CUDA tensors between ranks; initialise it with backend='nccl'")
        if self.on_gpu and backend == "nccl":
            options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
            options.global_ranks_in_group = session.global_ranks
            options.group_name = f"{group.group_name}/keys"  # type: ignore[assignment,unused-ignore]
            # built directly: ``new_group`` names groups by how many the process has, and ranks may have different numbers of them. With a
            # connection of its own, since NCCL waits inside it
            store = PrefixStore("communicator", session.store.clone())
            self.own = dist.ProcessGroupNCCL(store, session.rank, session.size, options)
        session.wires[device.type] = self
        # at exit, torch ends what is left without waiting for ranks that may be gone
        weakref.finalize(group, _close, session).atexit = False
        if not self.on_gpu:
            return
        # NCCL's communicator, which needs all ranks: one without a first exchange would be missing when the others make it
        everyone, number = tuple({*range(session.size)} - {session.rank}), torch.zeros(1, device=device)
        opening = Exchange(self, 0, "opening the communicator", everyone, (number,))
        # before the call, which blocks
        self.pending.append(opening)
        try:
            # not dist.all_reduce, which only accepts registered groups
            opening.works.append(((self.own or group).allreduce([number]), everyone, "a collective"))
            torch.cuda.synchronize(device)
        except RuntimeError as error:
            raise self.broken(opening, "a collective", everyone, error) from error

    def start(self, sent: torch.Tensor, send_counts: list[int], came: torch.Tensor, counts: list[int], what: str) -> Exchange:
        """Begins an exchange of rows, by peer one after the other: so many of ``sent`` to each, so many into ``came`` from each. All ranks
        that have rows to exchange call it in the same order. Raises RingError if it cannot begin or an earlier one failed.

        Both are contiguous. Do not write to ``sent`` before ``wait``; on a GPU, issue all uses of ``came`` to the current stream before.
        ``what`` describes the exchange in messages, e.g. ``"forward, heads 1 of 2: K and V"``.
        """
        self.session.raise_if_failed()
        group: Any = self._shared()
        peers = tuple(peer for peer, both in enumerate(zip(send_counts, counts, strict=True)) if any(both))
        self.number += 1
        exchange = Exchange(self, self.number, what, peers, (sent, came))
        is_watched = self.on_gpu and not torch.cuda.is_current_stream_capturing()
        if is_watched and self.number % EVERY == 0:
            # until the GPU has reached the exchange four before this one; the watching thread has removed those that it has seen end
            for before in list(self.pending)[-EVERY : 1 - EVERY]:
                while before.ready is not None and not before.ready.query():
                    self.session.raise_if_failed()
                    time.sleep(50e-6)
        act, ranks = "starting", peers
        try:
            if self.on_gpu:
                work = (self.own or group).alltoall_base(came, sent, counts, send_counts)
                exchange.works.append((work, peers, "waiting for the GPU"))
            else:
                # a tag that depends on all calls so far: a message of another call never matches it
                tag = self.session.checksum & 0x3FFFFFFF
                for verb, move, rows, of in (
                    ("receiving {} from", group.recv, came, counts),
                    ("sending {} to", group.send, sent, send_counts),
                ):
                    for peer, part in enumerate(rows.split(of)):
                        if part.numel():
                            act, ranks = f"{verb.format(readable(part.nbytes))} {self.session.ranks_text([peer])}", (peer,)
                            # as bytes, which every communication library carries
                            exchange.works.append((move([part.view(-1).view(torch.uint8)], peer, tag), ranks, act))
        except RuntimeError as error:
            raise self.broken(exchange, act, ranks, error) from error
        if is_watched:
            exchange.ready = torch.cuda.Event()
            exchange.ready.record(torch.cuda.current_stream(sent.device))
            self.pending.append(exchange)
        return exchange

    def stalled(self) -> tuple[Exchange, str] | None:
        """Returns the exchange that failed, or could run for longer than the timeout, and what became of it; None if none. One can run once
        those before it have finished and its inputs are computed, so work queued on the GPU is not a stall. For the watching thread."""
        if self.pending:
            # a new thread uses GPU 0, and querying there would create a context that costs memory
            torch.cuda.set_device(self.device)
        while self.pending and (head := self.pending[0]).is_done():
            # torch calls every exchange of a communicator that has failed completed, and does not let Python read its exception
            if len(self.pending) == 1 and (end := head.works[0][0].get_future_result()).done() and int(end.value()):
                return head, "failed: torch logs NCCL's error"
            self.pending.popleft()
        if not self.pending:
            return None
        head, now = self.pending[0], time.monotonic()
        if head.since is None:
            head.since = now if head.ready is None or head.ready.query() else None
            return None
        return (head, f"is not done {now - head.since:.1f} s after it could run") if now - head.since > self.timeout else None

    def broken(self, exchange: Exchange, act: str, peers: Sequence[int], error: RuntimeError, waited: float = 0.0) -> RingError:
        """Returns the error of an exchange that torch refused or gave up; the group has failed by then."""
        # after a timeout the other ranks report soon, too; after a lost connection the peer is known
        collect = COLLECT if waited >= self.timeout else 0.0
        trouble = f": {act} failed after {waited:.1f} s: {first_line(error)}"
        self.session.fail_waiting(exchange.what, exchange.number, peers, trouble, self.timeout, collect)
        return self.session.error()

    def abort(self) -> list[threading.Thread]:
        """Ends everything that waits for a message of this group: its work on the GPU, or a thread on the CPU. Returns the threads that do,
        because a communicator may not shut down; and one waits for its own kernels, which may be queued behind another's."""
        group, threads = self._shared(), list[threading.Thread]()
        if self.on_gpu:
            threads = [threading.Thread(target=_abort, args=(one, self.device), daemon=True) for one in (group, self.own)]
            for thread in threads:
                thread.start()
        elif self.waits and group is not None and group._get_backend(self.device).name() == "gloo":
            # gloo ends waits only when one of them times out, here for a tag above all others, which closes the group's connections
            with contextlib.suppress(RuntimeError):
                peer = (self.session.rank + 1) % self.session.size
                group.recv([torch.empty(1)], peer, 2**31 - 1).wait(timedelta(milliseconds=1))
        return threads


def wire_of(members: Members, timeout: float, device: torch.device) -> Wire | None:
    """Returns the group's wire for a device; None in one process. All ranks make it together at its first use."""
    if members.group is None:
        return None
    session = session_of(members, timeout)
    wire = session.wires.get(device.type)
    if wire is None:
        if device.type == "cuda":
            # otherwise the first exchange would wait for absent ranks, in NCCL with its own timeout and without naming them
            agree(members, {"function": "first exchange on a GPU"}, None, timeout)
        wire = Wire(members.group, session, device, timeout)
    wire.timeout = timeout
    return wire


def _abort(group: Any, device: torch.device) -> None:
    # best effort: it may be None or half destroyed, and the process ends anyway if the GPU stays stuck
    with contextlib.suppress(RuntimeError, AttributeError):
        (group._get_backend(device) if isinstance(group, dist.ProcessGroup) else group).abort()


def _close(session: Session) -> None:
    """Shuts down communicators along with their group, which may be half destroyed: ``destroy_process_group`` does not know about them."""
    for wire in session.wires.values():
        with contextlib.suppress(RuntimeError):
            if wire.own is not None:
                (wire.own.shutdown if session.failed is None else wire.own.abort)()
    session.wires.clear()
