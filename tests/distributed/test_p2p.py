"""Exchanges over gloo, and the policy of the watchdog over exchanges on a GPU, with works that pretend."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dilated_attention.distributed import members_of
from dilated_attention.distributed.comm import watchdog
from dilated_attention.distributed.comm.handshake import agree
from dilated_attention.distributed.comm.p2p import Traffic, Wire, traffic, wire_of
from dilated_attention.distributed.comm.session import Session, name, names, session_of
from dilated_attention.distributed.comm.stall_diagnosis import Wait, culprits, explain
from dilated_attention.distributed.comm.watchdog import AHEAD, Exchange, Monitor, Queue, raise_in
from dilated_attention.distributed.errors import RingError
from tests.helpers.pool import Pool, PoolError, pool_of

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.bool, torch.int64, torch.int16, torch.complex64, torch.float8_e4m3fn)


def of(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """What this rank sends: bits of its own."""
    generator = torch.Generator().manual_seed(rank)
    bits = torch.randint(0, 2 if dtype is torch.bool else 100, (*shape, dtype.itemsize), generator=generator, dtype=torch.uint8)
    return bits.view(dtype).squeeze(-1).contiguous()


def ring(rank: int, world: int, lane: str, dtype: torch.dtype) -> dict[str, Any]:
    wire = wire_of(members_of(None), 20.0, lane)
    assert wire is wire_of(members_of(None), 20.0, lane)
    after, before = (rank + 1) % world, (rank - 1) % world
    with traffic() as count:
        # several to one peer, of different sizes, and both ways at once
        mine, short, nothing = of(rank, (3, 5), dtype), of(rank, (2,), dtype), of(rank, (0, 4), dtype)
        got, got_short, back = torch.zeros_like(mine), torch.zeros_like(short), torch.zeros_like(mine)
        hop = wire.start(
            [(after, mine), (after, nothing), (after, short), (before, mine)],
            [(before, got), (before, nothing), (before, got_short), (after, back)],
            "ring, hop 0",
        )
        hop.wait()
        hop.wait()
        wire.start([(after, nothing)], [], "nothing").wait()
        wire.start([], [], "nothing at all").wait()
    same = torch.equal if dtype is not torch.float8_e4m3fn else lambda a, b: torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    assert same(got, of(before, (3, 5), dtype)) and same(got_short, of(before, (2,), dtype)) and same(back, of(after, (3, 5), dtype))
    return {"sent": count.sent, "received": count.received, "exchanges": count.exchanges, "to": dict(count.sent_to)}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_arrive_in_order_and_are_counted(dtype: torch.dtype) -> None:
    for lane in ("keys", "gradients"):
        counts = pool_of(4).run(ring, lane, dtype)
        size = dtype.itemsize
        for rank, count in enumerate(counts):
            to = {(rank + 1) % 4: 17 * size, (rank - 1) % 4: 15 * size}
            assert count == {"sent": 32 * size, "received": 32 * size, "exchanges": 1, "to": to}


def two_lanes(rank: int, world: int) -> None:
    """Exchanges of two lanes may be started in one order and waited for in another."""
    members = members_of(None)
    keys, gradients = wire_of(members, 20.0), wire_of(members, 20.0, "gradients")
    peer = 1 - rank
    a, b = torch.full((100_000,), float(rank)), torch.full((7,), 10.0 + rank)
    got_a, got_b = torch.empty_like(a), torch.empty_like(b)
    if rank == 0:
        one = keys.start([(peer, a)], [(peer, got_a)], "K and V")
        two = gradients.start([(peer, b)], [(peer, got_b)], "dK and dV")
    else:
        two = gradients.start([(peer, b)], [(peer, got_b)], "dK and dV")
        one = keys.start([(peer, a)], [(peer, got_a)], "K and V")
    two.wait()
    one.wait()
    assert torch.equal(got_a, torch.full_like(a, float(peer))) and torch.equal(got_b, torch.full_like(b, 10.0 + peer))


def test_lanes_do_not_wait_for_each_other() -> None:
    pool_of(2).run(two_lanes)


def subgroups(rank: int, world: int) -> list[str]:
    """Groups [0, 2] and [1, 3]: a rank of the group is not the global rank."""
    group = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])][rank % 2]
    members = members_of(group)
    told = []
    for lane in ("keys", "gradients"):
        wire = wire_of(members, 20.0, lane)
        got = torch.zeros(3)
        peer = 1 - members.rank
        wire.start([(peer, torch.full((3,), float(rank)))], [(peer, got)], "swap").wait()
        assert got.tolist() == [float((rank + 2) % 4)] * 3
        told.append(name(wire.session, peer))
    session = session_of(members, 1.0)
    told.append(names(session, [0, 1]))
    dist.destroy_process_group(group)
    return told


def test_ranks_of_a_group_are_not_global_ranks() -> None:
    told = pool_of(4).run(subgroups)
    assert told[1] == ["rank 1 (global rank 3)"] * 2 + ["ranks 0, 1 (global ranks 1, 3)"]
    assert told[2] == ["rank 0"] * 2 + ["ranks 0, 1 (global ranks 0, 2)"]


def dropped(rank: int, world: int) -> None:
    group = dist.new_group([0, 1])
    wire = wire_of(members_of(group), 20.0)
    held = weakref.ref(group)
    dist.destroy_process_group(group)
    del group
    gc.collect()
    assert held() is None, "a wire keeps a destroyed group alive"
    with pytest.raises(RingError, match="the group of ranks 0, 1 was destroyed"):
        wire.start([], [], "too late")
    # a group of the same ranks has a wire of its own, and does not read what the old one left
    again = dist.new_group([0, 1])
    assert wire_of(members_of(again), 20.0) is not wire
    dist.destroy_process_group(again)


def test_a_wire_ends_with_its_group() -> None:
    pool_of(2).run(dropped)


def fails(rank: int, world: int) -> None:
    if rank == 0:
        raise KeyError("of rank 0")
    time.sleep(100)


def poisoned(rank: int, world: int) -> bool:
    return bool(torch.empty(3).isnan().all() and torch.zeros(2).new_empty(2).isnan().all())


def test_pool_names_ranks_that_raise_and_ranks_that_hang() -> None:
    pool = Pool(2)
    try:
        began = time.monotonic()
        with pytest.raises(PoolError, match=r"ranks \[0, 1\] of 2 failed(.|\n)*KeyError: 'of rank 0'(.|\n)*did not return(.|\n)*in fails"):
            pool.run(fails, timeout=60.0)
        # the hanging one is not given all its time once another has failed
        assert time.monotonic() - began < 30
        # new processes, which work
        assert pool.run(poisoned) == [True] * 2
    finally:
        pool.close()


def test_traffic_nests() -> None:
    with traffic() as outer:
        with traffic() as inner:
            assert outer == inner == Traffic() and outer is not inner
        assert inner == outer


# the watchdog


@dataclass
class Pretended:
    done: bool = False
    asked: int = 0
    failed: bool = False

    def is_completed(self) -> bool:
        self.asked += 1
        return self.done or self.failed

    def get_future_result(self) -> torch.futures.Future[int]:
        result: torch.futures.Future[int] = torch.futures.Future()
        if self.is_completed():
            result.set_result(2 * self.failed)
        return result

    def query(self) -> bool:
        return self.done


def exchange(number: int, work: Pretended, ready: Pretended | None = None, thread: int = 0) -> Exchange:
    return Exchange(number, f"hop {number}", (1,), work, ready, thread)


def test_clock_starts_when_the_exchange_can_run() -> None:
    queue = Queue()
    first, second, inputs = Pretended(), Pretended(), Pretended()
    queue.pending += [exchange(1, first), exchange(2, second, inputs)]
    assert queue.stuck(0.0, 5.0) is None
    assert queue.stuck(5.0, 5.0) is None
    found = queue.stuck(5.5, 5.0)
    assert found is not None and found[0].number == 1 and found[1] == "is not done 5.5 s after it could run"
    # the first is through: the second waits for its inputs, however long they take
    first.done = True
    for now in (6.0, 100.0, 1000.0):
        assert queue.stuck(now, 5.0) is None
    inputs.done = True
    assert queue.stuck(1001.0, 5.0) is None
    assert queue.stuck(1006.0, 5.0) is None
    found = queue.stuck(1006.5, 5.0)
    assert found is not None and found[0].number == 2 and found[1] == "is not done 5.5 s after it could run"
    second.done = True
    assert queue.stuck(2000.0, 5.0) is None and not queue.pending


def test_the_thread_that_issues_stays_near_the_gpu() -> None:
    queue, events = Queue(), [Pretended() for _ in range(2 * AHEAD)]
    asked = 0

    def has_failed() -> bool:
        nonlocal asked
        asked += 1
        # the GPU comes to the first exchange while the thread waits for the third time
        events[0].done |= asked == 3
        return asked == 9

    issued = 0
    while queue.wait_for_gpu(has_failed):
        queue.append(exchange(issued, Pretended(), events[issued]))
        issued += 1
    # it waited for the first exchange, then in vain for the fifth, and never was further ahead than it may
    assert asked == 9 and issued == AHEAD
    for event in events[:issued]:
        event.done = True
    assert queue.wait_for_gpu(has_failed) and asked == 9


def test_exchanges_that_torch_calls_completed_because_they_failed() -> None:
    queue, works = Queue(), [Pretended(done=True), Pretended(), Pretended()]
    queue.pending += [exchange(n, work) for n, work in enumerate(works)]
    assert queue.stuck(0.0, 5.0) is None
    # an error of the communicator is one of every exchange that has not ended
    for work in works[1:]:
        work.failed = True
    found = queue.stuck(1.0, 5.0)
    assert found is not None and found[0].number == 1 and found[1] == "failed: torch logs NCCL's error"


def test_completed_exchanges_are_let_go_with_few_questions() -> None:
    for done in (0, 1, 499, 999, 1000):
        queue, works = Queue(), [Pretended() for _ in range(1000)]
        queue.pending += [exchange(n, work) for n, work in enumerate(works)]
        for work in works[:done]:
            work.done = True
        queue.stuck(0.0, 1.0)
        assert [e.number for e in queue.pending] == list(range(done, 1000))
        assert sum(work.asked for work in works) <= 13


@pytest.mark.parametrize(
    ("waits", "silent", "behind"),
    [
        # 0 waits for 1, that waits for 2, that says nothing
        ({0: (1, 5), 1: (2, 5)}, [2], []),
        # 3 says nothing, but nobody waits for it
        ({0: (1, 5), 1: (2, 5), 2: (0, 5)}, [], []),
        # a circle, with one that is behind
        ({0: (1, 5), 1: (2, 5), 2: (0, 4)}, [], [2]),
        # nor does it matter what 2, for whom nobody waits, is waiting for
        ({0: (1, 5), 1: (0, 5), 2: (3, 5)}, [], []),
        ({0: (1, 5)}, [1], []),
    ],
)
def test_blame_follows_who_waits_for_whom(waits: dict[int, tuple[int, int]], silent: list[int], behind: list[int]) -> None:
    posts = {rank: Wait("keys", number, "hop", (peer,)) for rank, (peer, number) in waits.items()}
    assert culprits(posts, 0) == (silent, behind)


def session(rank: int, size: int, store: dist.HashStore) -> Session:
    return Session(rank, size, tuple(range(size)), store)


def test_ranks_that_time_out_together_name_the_silent_one() -> None:
    store = dist.HashStore()
    told: dict[int, str] = {}
    who: dict[int, list[int]] = {}

    def rank(mine: int) -> None:
        time.sleep(0.1 * mine)
        told[mine], who[mine] = explain(session(mine, 4, store), Wait("keys", 7, "ring forward, hop 2", ((mine + 1) % 4,)), collect=1.0)

    threads = [threading.Thread(target=rank, args=(mine,)) for mine in (0, 1, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(text.endswith("rank 2 has not reported: dead, stalled or in another call") for text in told.values()), told
    assert who == {0: [2], 1: [2], 3: [2]}
    assert told[0].startswith("rank 1 gave up waiting for rank 2 in 'ring forward, hop 2' (keys, exchange 7)")
    # the silent one comes later, and hears that all have given up
    late, _ = explain(session(2, 4, store), Wait("keys", 7, "ring forward, hop 2", (3,)), collect=0.0)
    assert late.startswith("all ranks report that they wait or have given up: rank 0 gave up waiting for rank 1 in")
    behind, _ = explain(session(2, 4, store), Wait("keys", 6, "ring forward, hop 1", (3,)), collect=0.0)
    assert behind.startswith("all ranks")
    ahead, _ = explain(session(3, 4, store), Wait("keys", 7, "ring forward, hop 2", (0,)), collect=0.0)
    assert "rank 2 gave up waiting for rank 3 in 'ring forward, hop 1' (keys, exchange 6), which comes earlier" in ahead


class Taken:
    """A connection in which another thread waits, to a server that has ended."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} would wait forever")


def described(rank: int, world: int) -> str:
    members = members_of(None)
    agree(members, {"function": "a test"}, {}, 30.0)
    wire = wire_of(members, 30.0)
    store, wire.session.store = wire.session.store, Taken()  # type: ignore[assignment]
    try:
        return wire.describe(Exchange(3, "hop 3", (1 - rank,), Pretended(), None, 0), "failed: torch logs NCCL's error")
    finally:
        wire.session.store = store


def test_the_watching_thread_has_a_connection_of_its_own() -> None:
    pool = Pool(2)
    try:
        message = pool.run(described)[0]
    finally:
        # what the ranks reported stays in the store
        pool.close()
    assert message.startswith("rank 0: hop 3: exchange 3 with rank 1 failed: torch logs NCCL's error; all ranks report that they wait")


class Stalled:
    """A wire whose exchange never ends."""

    def __init__(self, thread: int) -> None:
        self.queue, self.timeout = Queue(), 0.2
        self.queue.pending.append(exchange(3, Pretended(), None, thread))
        self.failed: str | None = None
        self.entered, self.aborted = False, threading.Event()

    def enter(self) -> None:
        self.entered = True

    def describe(self, exchange: Exchange, trouble: str) -> str:
        assert self.entered
        return f"rank 0: {exchange.what} stalled"

    def fail(self, message: str) -> None:
        self.failed = message

    def abort(self) -> None:
        self.aborted.set()

    def has_raised(self) -> bool:
        return False


def watched(monitor: Monitor, wire: Stalled) -> threading.Thread:
    monitor.add(wire)

    def look() -> None:
        while not wire.failed:
            monitor.look()
            time.sleep(0.05)

    thread = threading.Thread(target=look)
    thread.start()
    return thread


def test_stall_raises_in_the_thread_that_issued_the_exchange(capfd: pytest.CaptureFixture[str]) -> None:
    left: list[int] = []
    wire = Stalled(threading.get_ident())
    thread = watched(Monitor(leave=left.append), wire)
    with pytest.raises(RingError, match=r"^rank 0: hop 3 stalled$"):
        for _ in range(1000):
            time.sleep(0.01)
    thread.join()
    assert not left and wire.aborted.wait(1.0) and wire.failed == "rank 0: hop 3 stalled"
    assert "rank 0: hop 3 stalled" in capfd.readouterr().err


def test_stall_raises_in_the_main_thread_if_the_issuing_one_does_nothing_more() -> None:
    left: list[int] = []
    idle = threading.Event()
    worker = threading.Thread(target=idle.wait)
    worker.start()
    thread = watched(Monitor(leave=left.append), Stalled(worker.ident or 0))
    with pytest.raises(RingError, match="hop 3 stalled"):
        for _ in range(1000):
            time.sleep(0.01)
    thread.join()
    assert not left
    # the one that idled raises as well, when it goes on; its traceback is not of this test
    threading.excepthook, hook = lambda _: None, threading.excepthook
    idle.set()
    worker.join()
    threading.excepthook = hook


def test_a_thread_that_raises_by_itself_is_not_made_to_raise_again() -> None:
    class Noticed(Stalled):
        def has_raised(self) -> bool:
            return self.failed is not None

    left: list[int] = []
    watched(Monitor(leave=left.append), Noticed(threading.get_ident())).join()
    # an error sent to this thread would come here
    for _ in range(2 * int(1 / 0.01)):
        time.sleep(0.01)
    assert not left


def test_process_ends_if_nothing_raises(capfd: pytest.CaptureFixture[str]) -> None:
    left: list[int] = []
    # no such thread: like one that never comes back from a CUDA call
    wire = Stalled(1)
    # grace shorter than the second after which the main thread would be made to raise
    watched(Monitor(leave=left.append, grace=0.5), wire).join()
    assert left == [1] and wire.aborted.is_set()
    assert "nothing raised within 0.5 s of this error, so this process ends now: rank 0: hop 3 stalled" in capfd.readouterr().err


def test_monitor_holds_no_wire_and_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    # a stop that waited for the next look would take as long
    monkeypatch.setattr(watchdog, "POLL", 60.0)
    monitor = Monitor()
    wire = Stalled(0)
    monitor.add(wire)
    held = weakref.ref(wire)
    del wire
    gc.collect()
    assert held() is None
    monitor.start()
    began = time.monotonic()
    monitor.stop()
    assert time.monotonic() - began < 20


def test_error_of_a_thread_is_one_class_that_knows_its_message() -> None:
    raised = raise_in([], "nobody")
    assert not raised.is_set()


def test_a_wire_needs_two() -> None:
    with pytest.raises(AssertionError, match="nobody to exchange with"):
        Wire(members_of(None), 1.0)


def other_groups(rank: int, world: int) -> float:
    """A group that only some ranks have been in: torch would name what comes next differently on them."""
    if rank < 2:
        dist.new_group([0, 1], use_local_synchronization=True)
    members = members_of(None)
    wire = wire_of(members, 20.0, "a lane of its own")
    got = torch.zeros(1)
    peer, source = (rank + 1) % world, (rank - 1) % world
    wire.start([(peer, torch.full((1,), float(rank)))], [(source, got)], "round").wait()
    assert got.item() == source
    return got.item()


def test_a_lane_opens_whatever_groups_its_ranks_were_in_before() -> None:
    pool = Pool(4)
    try:
        assert sorted(pool.run(other_groups, timeout=60.0)) == [0.0, 1.0, 2.0, 3.0]
    finally:
        pool.close()
