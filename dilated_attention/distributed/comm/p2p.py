"""Sends tensors from rank to rank without waiting, counts them, and raises an error that names the hop and the peer if one does not arrive.

On NCCL an exchange is one launch, watched by a thread (watchdog.py); on gloo it is one message per tensor, and waiting blocks.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from dilated_attention.distributed.comm.group import Members
from dilated_attention.distributed.comm.handshake import Wait, explain, gather
from dilated_attention.distributed.comm.session import Session, name, names, session_of
from dilated_attention.distributed.comm.watchdog import COLLECT, Exchange, Queue, watch
from dilated_attention.distributed.errors import RingError, first_line


@dataclass
class Traffic:
    """What this process has exchanged, for tests and documentation, in bytes; ``sent_to`` by the peer's rank within the group."""

    sent: int = 0
    received: int = 0
    sent_to: Counter[int] = field(default_factory=Counter)


counting: list[Traffic] = []


@contextlib.contextmanager
def traffic() -> Iterator[Traffic]:
    """Counts what this process exchanges inside the ``with`` block, over all groups."""
    mine = Traffic()
    counting.append(mine)
    try:
        yield mine
    finally:
        # compared by identity, because dataclasses with equal counts are equal
        counting[:] = [other for other in counting if other is not mine]


def count(outgoing: Sequence[tuple[int, torch.Tensor]], incoming: Sequence[tuple[int, torch.Tensor]]) -> None:
    for one in counting:
        one.received += sum(tensor.nbytes for _, tensor in incoming)
        for peer, tensor in outgoing:
            one.sent += tensor.nbytes
            one.sent_to[peer] += tensor.nbytes


# (rank within the group, contiguous tensor), one for each peer; an empty one is skipped on both sides
Message = tuple[int, torch.Tensor]
LANE = "keys"

_CPU, _CUDA = torch.device("cpu"), torch.device("cuda")
# a tag above all tags of messages
_NEVER_SENT = 2**31 - 1


class Wire:
    """Exchanges among the two or more ranks of a group, in the same order on all of them; all must make the wire together.

    On NCCL it has a communicator of its own, of high priority; otherwise an exchange would only begin when the kernel that it should
    overlap with, which fills all multiprocessors, ends. On four H200s, 64 MiB from each rank during a 12.4 ms kernel slowed the kernel
    down by 1.1 ms, and by 0.5 ms with high priority.

    Args:
        timeout: seconds that an exchange may take once it can run.
    """

    def __init__(self, members: Members, timeout: float) -> None:
        assert members.group is not None, "one process has nobody to exchange with"
        self.timeout = timeout
        self.queue = Queue()
        self.session = session_of(members, timeout)
        self.session.check()
        # the group's owner decides how long it lives: a wire must not keep destroyed communicators alive
        self._shared = weakref.ref(members.group)
        self._own = None
        if _has_nccl(members.group):
            # otherwise the first exchange would wait for absent ranks, in NCCL with its own timeout and without naming them
            gather(self.session, f"lane/{LANE}", f"first use of the communicator for {LANE}", timeout)
            self._own = _communicator(members.group, self.session)
            # at exit, torch ends what is left without waiting for ranks that may be gone
            weakref.finalize(self, _close, self._own, self.session).atexit = False
        self.session.wire = weakref.ref(self)
        self._device: Any = None
        self._waits = False
        self._opened: set[torch.device] = set()
        self._on_gpu = self._is_one_launch = False
        self._number = 0

    def start(self, sends: Sequence[Message], receives: Sequence[Message], what: str) -> Transfer:
        """Begins an exchange; all ranks must call it in the same order. Raises RingError if it cannot or an earlier one failed.

        Args:
            sends: a tensor for each peer that gets one. Do not write to them before ``wait``.
            receives: tensors to fill. On a GPU, all their uses must have been issued to the current stream before this call.
                A rank that takes no part in the first exchange still passes an empty tensor, which determines the device.
            what: description for error messages, e.g. ``"ring forward, hop 2: K and V"``.
        """
        first = receives[0][1] if receives else sends[0][1] if sends else None
        group = self._begin(None if first is None else first.device)
        incoming = [message for message in receives if message[1].numel()]
        outgoing = [message for message in sends if message[1].numel()]
        if counting:
            count(outgoing, incoming)
        if not incoming and not outgoing:
            return Transfer(self, what, self._number, [], [], [])
        message: Message | None = None
        coming = True
        works: list[Any] = []
        try:
            if self._is_one_launch:
                works = [self._all_to_all(group, incoming, outgoing)]
            else:
                for message in incoming:
                    works.append(group.recv([_as_carried(message[1])], message[0], self._tag()))
                coming = False
                for message in outgoing:
                    works.append(group.send([_as_carried(message[1])], message[0], self._tag()))
        except RuntimeError as error:
            peers = _peers(incoming + outgoing) if message is None else (message[0],)
            act = "starting" if message is None else self._act(message, coming)
            raise self.broken(what, self._number, act, peers, 0.0, error) from error
        return self._started(what, works, incoming, outgoing)

    def start_lines(self, sent: torch.Tensor, send_counts: list[int], came: torch.Tensor, counts: list[int], what: str) -> Transfer:
        """Begins an exchange of rows, by peer one after the other: so many of ``sent`` to each, so many into ``came`` from each."""
        if not sent.is_cuda or counting:
            return self.start(_by_peer(sent, send_counts), _by_peer(came, counts), what)
        group = self._begin(sent.device)
        peers = [(peer, sent) for peer, (one, other) in enumerate(zip(send_counts, counts, strict=True)) if one or other]
        try:
            work = group.alltoall_base(came, sent, counts, send_counts)
        except RuntimeError as error:
            raise self.broken(what, self._number, "starting", _peers(peers), 0.0, error) from error
        return self._started(what, [work], [(peer, came) for peer, _ in peers], peers)

    def _begin(self, device: torch.device | None) -> Any:
        """Counts an exchange and opens the wire; returns the group that carries it."""
        group = self._check()
        self._number += 1
        if self._device is None or (device is not None and device != self._device):
            self._open(group, device)
        if self._is_watched() and not self.queue.wait_for_gpu(lambda: self.session.failed is not None):
            raise self._told()
        return group

    def _is_watched(self) -> bool:
        return self._on_gpu and not torch.cuda.is_current_stream_capturing()

    def _started(self, what: str, works: list[Any], incoming: list[Message], outgoing: list[Message]) -> Transfer:
        if self._is_watched():
            self._watch(incoming, outgoing, what, works)
        return Transfer(self, what, self._number, works, incoming, outgoing)

    def _all_to_all(self, group: Any, incoming: list[Message], outgoing: list[Message]) -> Any:
        """Issues all messages as one launch. Ranks without messages need not call it: NCCL sees sends and receives."""
        none = _as_carried((incoming or outgoing)[0][1]).new_empty(0)
        into, given = ([none] * self.session.size for _ in range(2))
        for tensors, messages in ((into, incoming), (given, outgoing)):
            for peer, tensor in messages:
                tensors[peer] = _as_carried(tensor)
        return group.alltoall(into, given)

    def _check(self) -> dist.ProcessGroup:
        if self.session.failed is not None:
            self.session.check()
        group = self._shared()
        if group is None:
            raise RingError(
                f"the group of {names(self.session, range(self.session.size))} was destroyed; initialise a new one and call again"
            )
        return self._own or group

    def _tag(self) -> int:
        """Returns a tag that depends on all calls so far: a message of another call never matches it."""
        return self.session.order.checksum & 0x3FFFFFFF

    def open(self, device: torch.device) -> None:
        """Makes NCCL's communicator now, on all ranks together, else the first exchange does."""
        if self._device != device:
            self._open(self._check(), device)

    def _open(self, group: dist.ProcessGroup, device: torch.device | None) -> None:
        """Decides once whether waiting blocks and whether an exchange is one launch; makes NCCL's communicator, which needs all ranks."""
        if device is not None:
            self._device = device
        elif _CPU in group._device_types:
            # nothing to exchange, and nothing that indicates a GPU
            return
        else:
            self._device = torch.device("cuda", torch.cuda.current_device())
        self._on_gpu = self._device.type == "cuda"
        backend: Any = group._get_backend(self._device)
        if self._on_gpu and dist.is_gloo_available() and isinstance(backend, dist.distributed_c10d.ProcessGroupGloo):
            # gloo would treat GPU addresses as CPU addresses
            raise ValueError("the group's backend is gloo, which carries no CUDA tensors between ranks; initialise it with backend='nccl'")
        # gloo has none that ends without taking the process along when counts differ
        self._is_one_launch = self._on_gpu
        if not self._on_gpu or self._device in self._opened:
            return
        self._opened.add(self._device)
        watch(self)
        # otherwise a rank without a first exchange would be missing when the others make the communicator
        opening = _Opening()
        everyone = tuple(rank for rank in range(self.session.size) if rank != self.session.rank)
        self.queue.pending.append(Exchange(0, "opening the communicator", everyone, opening, None, threading.get_ident()))
        try:
            # not dist.all_reduce, which only accepts registered groups
            group.allreduce([torch.zeros(1, device=self._device)]).wait()
            torch.cuda.synchronize(self._device)
        except RuntimeError as error:
            raise self.broken("opening the communicator", 0, "a collective", everyone, 0.0, error) from error
        finally:
            opening.done = True

    def _watch(self, incoming: list[Message], outgoing: list[Message], what: str, works: list[Any]) -> None:
        ready = torch.cuda.Event()
        ready.record(_current_stream(self._device))
        peers = _peers(incoming + outgoing)
        self.queue.append(Exchange(self._number, what, peers, works[-1], ready, threading.get_ident()))

    def finish(self, works: list[Any], messages: list[Message], received: int, what: str, number: int) -> None:
        """Blocks until the messages of an exchange on the CPU are done; the first ``received`` of them are the incoming ones."""
        began = time.monotonic()
        self._waits = True
        try:
            for index, work in enumerate(works):
                left = self.timeout - (time.monotonic() - began)
                try:
                    if not work.wait(timedelta(seconds=max(left, 0.001))):
                        raise RuntimeError("the message was aborted")
                except RuntimeError as error:
                    act = self._act(messages[index], index < received)
                    raise self.broken(what, number, act, (messages[index][0],), time.monotonic() - began, error) from error
        finally:
            self._waits = False

    def _act(self, message: Message, coming: bool) -> str:
        peer = name(self.session, message[0])
        return f"receiving {_size(message[1].nbytes)} from {peer}" if coming else f"sending {_size(message[1].nbytes)} to {peer}"

    def broken(self, what: str, number: int, act: str, peers: tuple[int, ...], waited: float, error: RuntimeError) -> RingError:
        """Returns the error of an exchange that torch refused or gave up; the group cannot be used afterwards."""
        if self.session.disagreement() is None and self.session.failed is None:
            # after a timeout the other ranks report soon, too; after a lost connection the peer is known
            blame, who = explain(self.session, Wait(LANE, number, what, peers), COLLECT if waited >= self.timeout else 0.0)
            self.fail(
                f"{name(self.session, self.session.rank)}: {what}: {act} failed after {waited:.1f} s: {first_line(error)}; {blame}. "
                f"Look at the output of {names(self.session, who)}, or raise timeout= ({self.timeout:g} s) if only slow"
            )
        return self._told()

    def _told(self) -> RingError:
        self.session.told = True
        return RingError(self.session.failed)

    @property
    def failed(self) -> str | None:
        return self.session.failed

    @property
    def on_gpu(self) -> bool:
        return self._on_gpu

    def enter(self) -> None:
        torch.cuda.set_device(self._device)

    def describe(self, exchange: Exchange, trouble: str) -> str:
        session = self.session
        if session.comparison is not None:
            # the issuing thread may be waiting inside the other connection, and a new one would wait for a server that has ended
            session = replace(session, store=session.comparison.store)
        blame, who = explain(session, Wait(LANE, exchange.number, exchange.what, exchange.peers), COLLECT)
        peers = names(self.session, exchange.peers)
        return (
            f"{name(session, session.rank)}: {exchange.what}: exchange {exchange.number} with {peers} {trouble}; "
            f"{blame}. Look at the output of {names(self.session, who)}, or raise timeout= ({self.timeout:g} s) if only slow"
        )

    def fail(self, message: str) -> None:
        if self.session.failed is None:
            self.session.failed = message

    def has_raised(self) -> bool:
        return self.session.told

    def abort(self) -> None:
        """Ends everything that waits for a message of this group: its work on the GPU, or a thread on the CPU."""
        group = self._shared()
        if self._on_gpu:
            # both at once: one waits for its own kernels, which may be queued behind another's that waits for a dead rank
            threads = [threading.Thread(target=_abort, args=(one,), daemon=True) for one in (group, self._own) if one is not None]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        elif self._waits and group is not None and group._get_backend(_CPU).name() == "gloo":
            # gloo ends waits only when one of them times out, which closes the group's connections
            with contextlib.suppress(RuntimeError):
                peer = (self.session.rank + 1) % self.session.size
                group.recv([torch.empty(1)], peer, _NEVER_SENT).wait(timedelta(milliseconds=1))


class Transfer:
    """An exchange in flight. It keeps its tensors alive until ``wait``."""

    __slots__ = ("_messages", "_number", "_received", "_what", "_wire", "_works")

    def __init__(self, wire: Wire, what: str, number: int, works: list[Any], incoming: list[Message], outgoing: list[Message]) -> None:
        self._wire, self._what, self._number, self._works = wire, what, number, works
        self._messages = incoming + outgoing
        self._received = len(incoming)

    def wait(self) -> None:
        """Waits; then received tensors may be read and sent ones reused: by anyone on a CPU, by the current stream on a GPU. Raises
        RingError if a peer has died, stalled or made a different call; on a GPU, where this does not block, perhaps later."""
        works, self._works = self._works, []
        wire = self._wire
        if not works:
            return
        if self._messages[0][1].is_cuda:
            try:
                for work in works:
                    work.wait()
            except RuntimeError as error:
                raise wire.broken(self._what, self._number, "waiting for the GPU", _peers(self._messages), 0.0, error) from error
            wire.session.check()
        else:
            wire.finish(works, self._messages, self._received, self._what, self._number)
        self._messages = []


_wires: weakref.WeakKeyDictionary[dist.ProcessGroup, Wire] = weakref.WeakKeyDictionary()


def wire_of(members: Members, timeout: float, device: torch.device | None = None) -> Wire | None:
    """Returns the group's wire, which lives as long as the group, open for a device; None in one process. All ranks make it together at its
    first use."""
    if members.group is None:
        return None
    wire = _wires.get(members.group)
    if wire is None:
        wire = _wires[members.group] = Wire(members, timeout)
    wire.timeout = timeout
    if device is not None:
        wire.open(device)
    return wire


def _current_stream(device: torch.device) -> torch.cuda.Stream:
    return _stream(*torch._C._cuda_getCurrentStream(device.index))


@functools.lru_cache(maxsize=64)
def _stream(stream_id: int, device_index: int, device_type: int) -> torch.cuda.Stream:
    # torch.cuda.current_stream() makes a new object in every call
    return torch.cuda.Stream(stream_id=stream_id, device_index=device_index, device_type=device_type)


@dataclass
class _Opening:
    """Stands for a blocking call: completed when the call has returned."""

    done: bool = False

    def is_completed(self) -> bool:
        return self.done

    def get_future_result(self) -> torch.futures.Future[int]:
        return torch.futures.Future()


def _abort(group: dist.ProcessGroup) -> None:
    # best effort: the group may be half destroyed, and the process ends anyway if the GPU stays stuck
    with contextlib.suppress(RuntimeError):
        group._get_backend(torch.device("cuda")).abort()  # type: ignore[attr-defined]


def _as_carried(tensor: torch.Tensor) -> torch.Tensor:
    # as bytes, which every communication library carries
    return tensor.view(-1).view(torch.uint8)


def _by_peer(lines: torch.Tensor, counts: Sequence[int]) -> list[Message]:
    return [(peer, some) for peer, some in enumerate(lines.split(counts)) if len(some)]


def _peers(messages: list[Message]) -> tuple[int, ...]:
    return tuple(dict.fromkeys([peer for peer, _ in messages]))


def _size(count: int) -> str:
    for unit, scale in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count} bytes"


def _has_nccl(group: dist.ProcessGroup) -> bool:
    """Whether the group sends GPU tensors through NCCL."""
    return _CUDA in group._device_types and group._get_backend(_CUDA).name() == "nccl"


def _communicator(group: dist.ProcessGroup, session: Session) -> dist.ProcessGroup:
    """Makes a communicator of high priority of the group's ranks for GPU tensors; CPU tensors use the group's own backend. All ranks must
    call it; RingError if torch could not make it.

    It is built directly, on keys of the group's session in the store: ``new_group`` names groups by how many the process has, so ranks with
    different numbers of groups would look for each other under different names.
    """
    store = PrefixStore(f"communicator/{LANE}", session.store)
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.global_ranks_in_group = list(session.global_ranks)
    options.group_name = group_name = f"{group.group_name}/{LANE}"  # type: ignore[assignment,unused-ignore]
    try:
        backend = dist.ProcessGroupNCCL(store, session.rank, session.size, options)
        backend._set_sequence_number_for_group()
        other = dist.ProcessGroup(store, session.rank, session.size)
        other._set_default_backend(dist.ProcessGroup.BackendType.NCCL)
        other._register_backend(_CUDA, dist.ProcessGroup.BackendType.NCCL, backend)
        # set the name before adding the group's own backend, which keeps its own name
        other._set_group_name(group_name)  # type: ignore[arg-type,unused-ignore]
        if _CPU in group._device_types:
            other._register_backend(_CPU, dist.ProcessGroup.BackendType.GLOO, group._get_backend(_CPU))
    except RuntimeError as error:
        session.failed = f"{name(session, session.rank)}: a communicator for {LANE} could not be made: {first_line(error)}"
        session.told = True
        raise RingError(f"{session.failed}; look at the output of the group's other ranks") from error
    return other


def _close(other: dist.ProcessGroup, session: Session) -> None:
    """Shuts down the communicator along with its group: ``destroy_process_group`` does not know about it."""
    backend = other._get_backend(_CUDA)
    # the group may be half destroyed, and there is no one left to report an error to
    with contextlib.suppress(RuntimeError):
        (backend.shutdown if session.failed is None else backend.abort)()
