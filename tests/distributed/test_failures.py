"""Ranks that die, stall, raise or make another call: every survivor ends with the right message within the timeout.

Over gloo, and over NCCL where GPUs are there (pytest -m gpus), each scene in processes of its own, which are killed after it.
"""

import ctypes
import datetime
import multiprocessing as mp
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dilated_attention import ring_attention
from dilated_attention.distributed import members_of
from dilated_attention.distributed.comm import session
from dilated_attention.distributed.comm.call_consistency import agree
from dilated_attention.distributed.comm.p2p import Exchange, wire_of
from dilated_attention.distributed.comm.session import COLLECT, GRACE, POLL, RingError
from tests.helpers.machine import ON_CPU, on_gpus
from tests.helpers.pool import fresh_processes, here, on_its_gpu

# how late a rank that nothing ails may be: on a busy machine more than 2 s
TIMEOUT = 5.0
# of the timeout, until all have said why: COLLECT, and process ends on a busy machine
MARGIN = 8.0
# on a GPU the watch looks now and then, and lets a thread that is stuck in a CUDA call go after GRACE
LIMIT = TIMEOUT + COLLECT + GRACE + 4 * POLL + 3.0
SILENT = "has not reported: dead, stalled or in another call"
# the hop at which something happens, so that the ranks are under way
HOP, HOPS = 5, 200


@dataclass(frozen=True)
class Machine:
    """Where a scene is played: over gloo or NCCL, by so many ranks."""

    backend: str
    world: int


def machines(*gloo: int, gpus: tuple[int, ...] = ()) -> list[Any]:
    on_cpus = [pytest.param(Machine("gloo", world), id=f"{world} processes") for world in gloo]
    marks = [pytest.mark.alone, pytest.mark.timeout(300)]
    backend = "gloo" if ON_CPU else "nccl"
    return on_cpus + [pytest.param(Machine(backend, world), id=f"{world} GPUs", marks=[*on_gpus(world), *marks]) for world in gpus]


@dataclass
class End:
    """How a rank ended: exit code, the last error, seconds from the first exchange to it, and all that it has written."""

    code: int | None
    error: str
    seconds: float
    output: str


def play(machine: Machine, scene: Callable[..., None], *args: Any, serve_at: int | None = None, folder: Path) -> list[End]:
    """The store is served by this process, as torchrun does, or by one of the ranks."""
    world = machine.world
    store = dist.TCPStore("127.0.0.1", 0, world + 1, True, wait_for_workers=False) if serve_at is None else None
    context: Any = mp.get_context("spawn") if machine.backend == "nccl" else fresh_processes()
    port = context.Queue()
    if store is not None:
        for _ in range(world):
            port.put(store.port)
    common = (machine.backend, world, port, serve_at, str(folder), scene, args)
    processes = [context.Process(target=_act, args=(rank, *common)) for rank in range(world)]
    for process in processes:
        process.start()
    deadline = time.monotonic() + (80 if machine.backend == "gloo" else 90 + 2 * LIMIT)
    try:
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
        hanging = [rank for rank, process in enumerate(processes) if process.is_alive()]
        assert not hanging, f"ranks {hanging} hang"
    finally:
        for process in processes:
            process.kill()
    ends = []
    for rank, process in enumerate(processes):
        file, output = folder / str(rank), (folder / f"output{rank}").read_text(errors="replace")
        error, _, seconds = file.read_text().rpartition("\n") if file.exists() else ("", "", "0")
        ends.append(End(process.exitcode, error, float(seconds), output[-4000:]))
    return ends


def _act(rank: int, backend: str, world: int, port: Any, serve_at: int | None, folder: str, scene: Callable[..., None], args: Any) -> None:
    output = os.open(os.path.join(folder, f"output{rank}"), os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    torch.set_num_threads(1)
    if backend == "nccl":
        on_its_gpu(rank)
    serve = rank == serve_at
    store = dist.TCPStore("127.0.0.1", 0 if serve else port.get(), world, serve, wait_for_workers=False)
    if serve:
        for _ in range(world - 1):
            port.put(store.port)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=datetime.timedelta(seconds=600))
    agree(members_of(None), {"scene": scene.__name__}, {}, 60.0)
    wire_of(members_of(None), 60.0, here())
    began = time.monotonic()
    try:
        scene(rank, world, *args)
    except BaseException as error:
        Path(folder, str(rank)).write_text(f"{type(error).__name__}: {error}\n{time.monotonic() - began}")
        raise


def finish() -> None:
    if here().type == "cuda":
        torch.cuda.synchronize()


def begin(world: int, send: tuple[int, torch.Tensor], receive: tuple[int, torch.Tensor], what: str) -> Exchange:
    """Begins to send a tensor to one rank and to receive one from another."""
    wire = wire_of(members_of(None), TIMEOUT, here())
    assert wire is not None
    counts = [[len(x) if peer == one else 0 for peer in range(world)] for one, x in (send, receive)]
    return wire.start(send[1], counts[0], receive[1], counts[1], what)


def ring(rank: int, world: int, hops: int, at_hop: Callable[[int], None] = lambda _: None) -> None:
    """Passes 4 MB around without waiting for a GPU, as attention does, and looks at them at the end."""
    after, before = (rank + 1) % world, (rank - 1) % world
    held, coming = torch.full((1_000_000,), float(rank), device=here()), torch.zeros(1_000_000, device=here())
    for hop in range(hops):
        at_hop(hop)
        begin(world, (after, held), (before, coming), f"ring forward, hop {hop}: K and V").wait()
        held, coming = coming, held
    assert held[0].item() == held[-1].item() == (rank - hops) % world


def ails(rank: int, world: int, victim: int, how: str) -> None:
    def at_hop(hop: int) -> None:
        if (rank, hop) != (victim, HOP):
            return
        finish()
        if how == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "raises":
            raise MemoryError("no room for the scores")
        time.sleep(TIMEOUT + (8 if here().type == "cuda" else 3.5))

    ring(rank, world, HOPS, at_hop)


def steps(rank: int, world: int, victim: int) -> None:
    """Training steps of attention itself."""
    shape, dtype = (1, 256, 4, 64), torch.bfloat16 if here().type == "cuda" else torch.float32
    q, k, v, dout = (torch.randn(shape, device=here(), dtype=dtype, requires_grad=True) for _ in range(4))
    for index in range(100):
        if (rank, index) == (victim, HOP):
            finish()
            os.kill(os.getpid(), signal.SIGKILL)
        # the first steps load libraries
        limit = 60.0 if index < 2 else TIMEOUT
        out = ring_attention(q, k, v, is_causal=True, backend="sdpa", seq_len=256 * world, timeout=limit)
        torch.autograd.grad(out, (q, k, v), dout)
    finish()


def survivors(machine: Machine, ends: list[End], victim: int) -> list[End]:
    """Those who have been told of the victim, in time; after it, torch's watchdog may end a process that uses a GPU."""
    found = [end for rank, end in enumerate(ends) if rank != victim]
    for end in found:
        assert end.error.startswith("RingError: "), end
        assert end.seconds < (TIMEOUT + MARGIN if machine.backend == "gloo" else LIMIT), end
        assert machine.backend == "nccl" or end.code == 1
    return found


def blamed(end: End) -> set[int]:
    """The ranks whose output the error says to look at."""
    way = re.search(rf"\. Look at the output of ranks? ([\d, ]+), or raise timeout= \({TIMEOUT:g} s\) if only slow$", end.error)
    assert way is not None, end
    return set(map(int, way[1].split(", ")))


def lead_to(ends: list[End], victim: int) -> None:
    """Whoever looks where the errors say ends at the victim alone. On a busy machine a rank that waits for it may itself report later than
    COLLECT, or leave before it has said why: then it is blamed, and its own error says for whom it waited."""
    for rank in {*range(len(ends))} - {victim}:
        looked_at, next_ranks = set[int](), {rank}
        while victims := next_ranks - {victim}:
            assert not victims & looked_at, ends
            looked_at |= victims
            next_ranks = (next_ranks & {victim}).union(*(blamed(ends[one]) for one in victims))
        assert next_ranks == {victim}, ends


@pytest.mark.parametrize("how", ["is killed", "raises", "stalls"])
@pytest.mark.parametrize("machine", machines(4, gpus=(2, 4)))
def test_a_rank_that_fails_is_named_by_all_in_time(machine: Machine, how: str, tmp_path: Path) -> None:
    victim = machine.world // 2
    ends = play(machine, ails, victim, how, folder=tmp_path)
    own, others = ends[victim], survivors(machine, ends, victim)
    if how == "stalls" and machine.backend == "nccl":
        # ended by its own error or by torch's watchdog; and the others hear of it while it wakes up
        words = f"rank {victim} {SILENT}|all ranks report|gave up waiting|store of torch.distributed"
        assert all(re.search(words, end.error) for end in others), ends
        return
    way = "(sending 3.81 MiB to|receiving 3.81 MiB from)"
    for end in others:
        assert "not reported: dead, stalled or in another call" in end.error, end
        if machine.backend == "gloo":
            assert re.match(rf"RingError: rank \d: ring forward, hop \d: K and V: {way} rank \d failed after ", end.error), end
    lead_to(ends, victim)
    # the first to fail is one that exchanges with the victim, in the hop that the victim left out
    direct = rf"hop {HOP}: K and V: {way} rank {victim} failed after "
    assert machine.backend == "nccl" or any(re.search(direct, end.error) for end in ends), ends
    if how == "is killed":
        assert own.code == -signal.SIGKILL
    if how == "raises":
        assert own.error == "MemoryError: no room for the scores"
    if machine.backend == "gloo":
        # a lost connection is seen at once
        assert all(end.seconds >= TIMEOUT for end in ends) if how == "stalls" else min(end.seconds for end in others) < TIMEOUT
    if how == "stalls" and machine.backend == "gloo":
        # when it wakes up it finds the others gone, and why
        assert own.code == 1 and own.seconds < TIMEOUT + MARGIN + 3.5
        assert "all ranks report that they wait or have given up: rank 0 gave up waiting for rank " in own.error
        assert f"gave up waiting for rank {victim} in 'ring forward, hop {HOP}: K and V' (exchange {HOP + 1})" in own.error


@pytest.mark.parametrize("machine", machines(3, gpus=(2, 4)))
def test_a_rank_that_is_killed_between_training_steps(machine: Machine, tmp_path: Path) -> None:
    victim = machine.world - 1
    ends = play(machine, steps, victim, folder=tmp_path)
    for end in survivors(machine, ends, victim):
        assert "not reported: dead" in end.error and re.search("(for|back)ward, ", end.error)
    lead_to(ends, victim)


@pytest.mark.parametrize("machine", machines(3, gpus=(2, 4)))
def test_the_rank_that_serves_the_store_is_killed(machine: Machine, tmp_path: Path) -> None:
    ends = play(machine, ails, 0, "is killed", serve_at=0, folder=tmp_path)
    assert ends[0].code == -signal.SIGKILL
    for end in survivors(machine, ends, 0):
        assert "its server, usually global rank 0, has ended" in end.error or "store of torch.distributed" in end.error


def test_the_messages_of_an_exchange_share_its_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three peers that are each 4 s late have 10 s together."""
    clock, limits = [0.0], list[float]()

    class Late:
        def wait(self, limit: datetime.timedelta) -> bool:
            limits.append(limit.total_seconds())
            clock[0] += 4.0
            return True

    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    wire: Any = SimpleNamespace(session=SimpleNamespace(timeout=10.0), on_gpu=False)
    Exchange(wire, 1, "K and V", (0, 1, 2), (torch.zeros(1),), works=[(Late(), (peer,), "receiving") for peer in range(3)]).wait()
    assert limits == [10.0, 6.0, 2.0]


def dies_before(rank: int, world: int, victim: int) -> None:
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    agree(members_of(None), {"function": "ring_attention", "heads": 8}, {}, TIMEOUT)


def test_a_rank_dies_before_the_others_need_it(tmp_path: Path) -> None:
    machine, text = Machine("gloo", 3), "ring_attention: check that all ranks make the same call failed after 5.0 s"
    for end in survivors(machine, play(machine, dies_before, 1, folder=tmp_path), 1):
        assert re.match(rf"RingError: rank \d: {text}: rank 1 posted nothing; ", end.error) and f"rank 1 {SILENT}" in end.error


# --- where waiting does not block -------------------------------------------------------------------------------------------------


class Ready:
    """An event of a GPU that has nothing to do."""

    def record(self, stream: None) -> None:
        pass

    def query(self) -> bool:
        return True


def watched(rank: int, world: int) -> None:
    """As on a GPU: nobody blocks in the exchange, and the watchdog must find it. Rank 1 never comes. Whoever goes on after the error hears
    of it at once."""
    if rank == 1:
        time.sleep(TIMEOUT + 3.5)
        return
    x = torch.zeros(1000)
    wire = wire_of(members_of(None), TIMEOUT, here())
    going = begin(world, ((rank + 1) % world, x), ((rank - 1) % world, x.clone()), "ring backward, hop 0: dK and dV")
    going.ready = Ready()
    torch.cuda.set_device = lambda _: None
    wire.pending.append(going)
    wire.session.wires["cuda"] = wire
    try:
        while True:
            time.sleep(0.01)
    except RingError as first:
        began, nothing = time.monotonic(), (1, torch.zeros(0))
        for again in (lambda: begin(world, nothing, nothing, "next"), lambda: agree(members_of(None), {}, {}, TIMEOUT)):
            with pytest.raises(RingError, match="this group failed before and cannot be used again; it failed with: ") as second:
                again()
            assert str(first) in str(second.value)
        assert time.monotonic() - began < TIMEOUT
        raise


def test_the_watch_ends_ranks_that_wait_without_blocking(tmp_path: Path) -> None:
    ends = play(Machine("gloo", 4), watched, folder=tmp_path)
    for rank in (0, 2):
        assert ends[rank].code == 1 and TIMEOUT <= ends[rank].seconds < TIMEOUT + MARGIN
        peers = "ranks 1, 3"
        assert ends[rank].error.startswith(f"RingError: rank {rank}: ring backward, hop 0: dK and dV: exchange 1 with {peers} is not done ")
        assert f"rank 1 {SILENT}" in ends[rank].error
        assert ends[rank].error.endswith(f". Look at the output of rank 1, or raise timeout= ({TIMEOUT:g} s) if only slow")


class Stalled:
    """A session and its wire, whose exchange never ends, issued by a thread."""

    def __init__(self, thread: int) -> None:
        self.exchange = Exchange(self, 3, "hop 3", (1,), thread=thread)  # type: ignore[arg-type]
        self.pending = [self.exchange]
        self.count = self.count_when_equal = 0
        self.failed: str | None = None
        self.has_raised, self.wires = False, {"cuda": self}
        self.aborted = threading.Event()

    def ranks_text(self, ranks: tuple[int, ...]) -> str:
        return "rank 1"

    def stalled(self) -> tuple[Exchange, str]:
        return self.exchange, "stalled"

    def fail_waiting(self, what: str, number: int, peers: tuple[int, ...], trouble: str) -> None:
        self.failed = f"rank 0: {what}{trouble}"

    def abort(self) -> list[threading.Thread]:
        self.aborted.set()
        return []


@pytest.mark.parametrize("issued_by", ["this thread", "one that does nothing more", "none that is there"])
def test_a_stall_raises_in_some_thread_or_ends_the_process(
    issued_by: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[int] = []
    idle = threading.Event()
    worker = threading.Thread(target=idle.wait, daemon=True)
    worker.start()
    nobody = issued_by == "none that is there"
    monkeypatch.setattr(os, "_exit", left.append)
    if nobody:
        # nor is the main thread, which would be made to raise after a second
        monkeypatch.setattr(threading, "main_thread", threading.Thread)
        monkeypatch.setattr(session, "GRACE", 1.5)
    wire = Stalled({"this thread": threading.get_ident(), "one that does nothing more": worker.ident or 0}.get(issued_by, 1))
    thread = threading.Thread(target=session.look, args=(wire,))
    thread.start()
    if nobody:
        thread.join()
        # like a thread that never comes back from a CUDA call
        assert left == [1]
    else:
        with pytest.raises(RingError, match=r"^rank 0: hop 3: exchange 3 with rank 1 stalled$"):
            for _ in range(1000):
                time.sleep(0.01)
        thread.join()
        assert not left
    assert wire.aborted.wait(1.0) and wire.failed == "rank 0: hop 3: exchange 3 with rank 1 stalled"
    assert "rank 0: hop 3: exchange 3 with rank 1 stalled" in capfd.readouterr().err
    # the one that idled raises as well, when it goes on; its traceback is not of this test
    threading.excepthook, hook = lambda _: None, threading.excepthook
    idle.set()
    worker.join()
    threading.excepthook = hook


# --- what only a GPU has ----------------------------------------------------------------------------------------------------------


def computes(rank: int, world: int) -> None:
    """Work queued on the GPU for longer than the timeout, before an exchange, is no stall."""
    ring(rank, world, 2)
    began = time.monotonic()
    if here().type == "cuda":
        ring(rank, world, 3, lambda hop: torch.cuda._sleep(int(2.5e9 * TIMEOUT * 2)) if hop == 1 else None)
        took = time.monotonic() - began
        assert took > TIMEOUT + 1, f"the GPU was busy for {took:.1f} s only; the test shows nothing"
    dist.destroy_process_group()


def captures(rank: int, world: int) -> None:
    """The watch asks about exchanges while another thread captures a CUDA graph, which must survive it."""
    ring(rank, world, 2)
    if here().type == "cuda":
        x, got = torch.ones(64, device=here()), torch.zeros(64, device=here())
        torch.cuda._sleep(int(2e9 * 4))
        going = begin(world, ((rank + 1) % world, x), ((rank - 1) % world, got), "under way")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = x + 1
            time.sleep(4 * POLL)
        going.wait()
        graph.replay()
        finish()
        assert y[0].item() == 2 and got[0].item() == 1
    dist.destroy_process_group()


@pytest.mark.parametrize("scene", [computes, captures])
@pytest.mark.parametrize("machine", machines(gpus=(2, 4)))
def test_the_watch_leaves_alone_what_goes_well(machine: Machine, scene: Callable[..., None], tmp_path: Path) -> None:
    for end in play(machine, scene, folder=tmp_path):
        assert end.code == 0, end


def stuck(rank: int, world: int) -> None:
    """Rank 0 is in a C call that never returns when rank 1 leaves it: only the end of the process helps."""
    ring(rank, world, 2)
    if rank == 0:
        x = torch.ones(8, device=here())
        begin(world, (1, x), (1, x.clone()), "ring forward, hop 0: K and V")
        ctypes.CDLL(None).sleep(1000)
    elif rank == 1:
        time.sleep(LIMIT)
    os._exit(0)


@pytest.mark.skipif(ON_CPU, reason="on a CPU the exchange itself waits")
@pytest.mark.parametrize("machine", machines(gpus=(2, 4)))
def test_a_process_that_is_stuck_ends(machine: Machine, tmp_path: Path) -> None:
    ends = play(machine, stuck, folder=tmp_path)
    assert ends[0].code == 1 and "so this process ends now" in ends[0].output, ends[0]
