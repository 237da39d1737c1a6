"""Ranks that die, stall, raise or make another call: every survivor ends with the right message within the timeout."""

from __future__ import annotations

import datetime
import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dilated_attention.distributed import members_of
from dilated_attention.distributed.comm import p2p
from dilated_attention.distributed.comm.handshake import agree
from dilated_attention.distributed.comm.p2p import wire_of
from dilated_attention.distributed.comm.watchdog import watch
from dilated_attention.distributed.errors import RingError
from tests.helpers.pool import fresh_processes

# how late a rank that nothing ails may be: on a busy machine more than 2 s
TIMEOUT = 4.0
# of the timeout, until all have said why: COLLECT, and process ends on a busy machine
MARGIN = 8.0
# where no rank fails to come
PATIENT = 30.0
SILENT = "has not reported: dead, stalled or in another call"


@dataclass
class End:
    """How a rank ended: exit code, the last error, and seconds from the first exchange to it."""

    code: int | None
    error: str
    seconds: float


def play(world: int, scene: Callable[..., None], *args: Any, serve_at: int | None = None, folder: Path) -> list[End]:
    """Plays a scene in processes of its own. The store is served by this process, as torchrun does, or by one of the ranks."""
    store = dist.TCPStore("127.0.0.1", 0, world + 1, True, wait_for_workers=False) if serve_at is None else None
    context = fresh_processes()
    port = context.Queue()
    if store is not None:
        for _ in range(world):
            port.put(store.port)
    processes = [context.Process(target=_act, args=(r, world, port, serve_at, str(folder), scene, args)) for r in range(world)]
    for process in processes:
        process.start()
    deadline = time.monotonic() + 80
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
        file = folder / str(rank)
        error, _, seconds = file.read_text().rpartition("\n") if file.exists() else ("", "", "0")
        ends.append(End(process.exitcode, error, float(seconds)))
    return ends


def _act(rank: int, world: int, port: Any, serve_at: int | None, folder: str, scene: Callable[..., None], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    serve = rank == serve_at
    store = dist.TCPStore("127.0.0.1", 0 if serve else port.get(), world, serve, wait_for_workers=False)
    if serve:
        for _ in range(world - 1):
            port.put(store.port)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=datetime.timedelta(seconds=60))
    wire_of(members_of(None), 20.0)
    began = time.monotonic()
    try:
        scene(rank, world, *args)
    except Exception as error:
        Path(folder, str(rank)).write_text(f"{type(error).__name__}: {error}\n{time.monotonic() - began}")
        raise


def ring(rank: int, world: int, hops: int, at_hop: Callable[[int], None]) -> None:
    """Passes 4 MB around, hop by hop."""
    wire = wire_of(members_of(None), TIMEOUT)
    after, before = (rank + 1) % world, (rank - 1) % world
    held, coming = torch.full((1_000_000,), float(rank)), torch.zeros(1_000_000)
    for hop in range(hops):
        at_hop(hop)
        wire.start([(after, held)], [(before, coming)], f"ring forward, hop {hop}: K and V").wait()
        held, coming = coming, held
        assert held[0] == held[-1] == (rank - 1 - hop) % world


def dies(rank: int, world: int, victim: int) -> None:
    ring(rank, world, 4, lambda hop: os.kill(os.getpid(), signal.SIGKILL) if (rank, hop) == (victim, 1) else None)


def stalls(rank: int, world: int, victim: int) -> None:
    ring(rank, world, 4, lambda hop: time.sleep(TIMEOUT + 3.5) if (rank, hop) == (victim, 1) else None)


def runs_out_of_memory(rank: int, world: int, victim: int) -> None:
    def at_hop(hop: int) -> None:
        if (rank, hop) == (victim, 1):
            raise MemoryError("no room for the scores")

    ring(rank, world, 4, at_hop)


def leaves_early(rank: int, world: int, victim: int) -> None:
    ring(rank, world, 1 if rank == victim else 4, lambda _: None)
    # another call, which the others do not make
    dist.barrier()


def survivors_name(ends: list[End], victim: int) -> None:
    for rank, end in enumerate(ends):
        if rank == victim:
            continue
        assert end.code == 1 and end.seconds < TIMEOUT + MARGIN, end
        assert re.match(
            rf"RingError: rank {rank}: ring forward, hop [1-3]: K and V: (sending 4.0 MB to|receiving 4.0 MB from) rank \d failed after ",
            end.error,
        )
        assert f"rank {victim} {SILENT}" in end.error, end.error
        assert end.error.endswith(f". Look at the output of rank {victim}, or raise timeout= ({TIMEOUT:g} s) if only slow")
    # the first to fail is one that exchanges with the victim, in the hop that the victim left out
    direct = rf"hop 1: K and V: (sending 4.0 MB to|receiving 4.0 MB from) rank {victim} failed after "
    assert any(re.search(direct, end.error) for end in ends), ends


@pytest.mark.parametrize("victim", [0, 2])
def test_a_killed_rank_is_named_by_all(tmp_path: Path, victim: int) -> None:
    ends = play(4, dies, victim, folder=tmp_path)
    assert ends[victim].code == -signal.SIGKILL
    survivors_name(ends, victim)
    # a lost connection is seen at once
    assert min(end.seconds for rank, end in enumerate(ends) if rank != victim) < TIMEOUT


def test_the_rank_that_serves_the_store_is_killed(tmp_path: Path) -> None:
    ends = play(3, dies, 0, serve_at=0, folder=tmp_path)
    assert ends[0].code == -signal.SIGKILL
    for end in ends[1:]:
        assert end.code == 1 and end.seconds < TIMEOUT + MARGIN
        assert "the store of torch.distributed does not answer either" in end.error
        assert "its server, usually global rank 0, has ended" in end.error


def test_a_stalled_rank_is_named_by_all(tmp_path: Path) -> None:
    ends = play(4, stalls, 1, folder=tmp_path)
    survivors_name(ends, 1)
    assert all(end.seconds >= TIMEOUT for end in ends)
    # when it wakes up it finds the others gone, and why
    assert ends[1].code == 1 and ends[1].seconds < TIMEOUT + MARGIN + 3.5
    assert "all ranks report that they wait or have given up: rank 0 gave up waiting for rank " in ends[1].error
    assert "rank 2 gave up waiting for rank 1 in 'ring forward, hop 1: K and V' (keys, exchange 2)" in ends[1].error


def test_a_rank_that_raises_by_itself(tmp_path: Path) -> None:
    ends = play(3, runs_out_of_memory, 1, folder=tmp_path)
    assert ends[1].code == 1 and ends[1].error == "MemoryError: no room for the scores"
    survivors_name(ends, 1)
    assert min(ends[0].seconds, ends[2].seconds) < TIMEOUT


def test_a_rank_that_makes_another_call(tmp_path: Path) -> None:
    ends = play(3, leaves_early, 2, folder=tmp_path)
    survivors_name(ends, 2)
    # its own call is torch's, and ends once the others have
    assert ends[2].code == 1


def two_failures(rank: int, world: int) -> None:
    """Whoever goes on after the first error hears of it at once."""
    if rank == 1:
        time.sleep(TIMEOUT + 3)
        return
    with pytest.raises(RingError) as first:
        ring(rank, world, 2, lambda _: None)
    began = time.monotonic()
    for again in (
        lambda: wire_of(members_of(None), TIMEOUT).start([], [], "ring backward, hop 0"),
        lambda: wire_of(members_of(None), TIMEOUT, "gradients"),
        lambda: agree(members_of(None), {}, {}, TIMEOUT),
    ):
        with pytest.raises(RingError, match="this group failed before and cannot be used again; it failed with: ") as second:
            again()
        assert str(first.value) in str(second.value)
    assert time.monotonic() - began < TIMEOUT
    raise first.value


def test_a_group_that_failed_is_refused_at_once(tmp_path: Path) -> None:
    ends = play(2, two_failures, folder=tmp_path)
    assert ends[0].error.startswith("RingError: rank 0: ring forward, hop 0: K and V: receiving 4.0 MB from rank 1 failed after ")
    assert ends[0].seconds >= TIMEOUT
    assert ends[1].code == 0


class Ready:
    """An event of a GPU that has nothing to do."""

    def record(self, stream: None) -> None:
        pass

    def query(self) -> bool:
        return True


def watched(rank: int, world: int) -> None:
    """As on a GPU: nobody blocks in the exchange, and the watchdog must find it. Rank 1 never comes."""
    if rank == 1:
        time.sleep(TIMEOUT + 3.5)
        return
    wire = wire_of(members_of(None), TIMEOUT)
    x = torch.zeros(1000)
    wire.start([], [], "learns its device").wait()
    wire._on_gpu, wire._device = True, x.device
    cuda: Any = torch.cuda
    cuda.Event, cuda.is_current_stream_capturing, cuda.set_device = Ready, lambda: False, lambda _: None
    p2p._current_stream = lambda _: None  # type: ignore[assignment]
    watch(wire)
    going = wire.start([((rank + 1) % world, x)], [((rank - 1) % world, x.clone())], "ring backward, hop 0: dK and dV")
    try:
        while True:
            time.sleep(0.01)
    except RingError:
        with pytest.raises(RingError, match="this group failed before"):
            wire.start([], [], "one more")
        assert going is not None
        raise


def test_the_watch_ends_ranks_that_wait_without_blocking(tmp_path: Path) -> None:
    ends = play(4, watched, folder=tmp_path)
    for rank in (0, 2):
        assert ends[rank].code == 1 and TIMEOUT <= ends[rank].seconds < TIMEOUT + MARGIN
        text = (
            f"RingError: rank {rank}: ring backward, hop 0: dK and dV: "
            f"exchange 2 with ranks {(rank - 1) % 4}, {(rank + 1) % 4} is not done "
        )
        assert ends[rank].error.startswith(text), ends[rank]
        assert f"rank 1 {SILENT}" in ends[rank].error
        assert ends[rank].error.endswith(f". Look at the output of rank 1, or raise timeout= ({TIMEOUT:g} s) if only slow")


def dies_before(rank: int, world: int, victim: int, what: str) -> None:
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "lane":
        wire_of(members_of(None), TIMEOUT, "gradients")
    else:
        agree(members_of(None), {"function": "ring_attention", "heads": 8}, {}, TIMEOUT)


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("lane", "first use of the communicator for gradients failed after 4.0 s"),
        ("handshake", "ring_attention: check that all ranks make the same call failed after 4.0 s"),
    ],
)
def test_a_rank_dies_before_the_others_need_it(tmp_path: Path, what: str, text: str) -> None:
    ends = play(3, dies_before, 1, what, folder=tmp_path)
    for rank in (0, 2):
        assert ends[rank].code == 1 and ends[rank].seconds < TIMEOUT + MARGIN
        assert ends[rank].error.startswith(f"RingError: rank {rank}: {text}: rank 1 posted nothing; ")
        assert f"rank 1 {SILENT}" in ends[rank].error


def disagrees(rank: int, world: int, argument: str, value: Any) -> None:
    same: dict[str, Any] = {"function": "ring_attention", "dtype": torch.bfloat16, "heads": 8, "pattern": "dilated(64, 1)", "causal": True}
    if rank == 1:
        same[argument] = value
    agree(members_of(None), same, {"rows": rank}, PATIENT)
    ring(rank, world, 1, lambda _: None)


@pytest.mark.parametrize(
    ("argument", "value", "usual"),
    [
        ("dtype", torch.float32, "torch.bfloat16"),
        ("heads", 4, "8"),
        ("pattern", "dilated(64, 2)", "dilated(64, 1)"),
        ("causal", False, "True"),
        ("scale", 0.5, "no such argument"),
    ],
)
def test_every_rank_ends_with_the_same_refusal(tmp_path: Path, argument: str, value: object, usual: str) -> None:
    ends = play(3, disagrees, argument, value, folder=tmp_path)
    text = (
        f"ValueError: ring_attention: ranks disagree on {argument}: "
        f"ranks 0, 2 have {usual}, rank 1 has {value}; all ranks must make the same call"
    )
    for end in ends:
        assert end.code == 1 and end.error == text and end.seconds < PATIENT
