"""Ranks that make different calls of kinds they had agreed on: every rank is told what differs, and no message is taken for another."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dilated_attention import ring_attention, ring_block_sparse_attention, ring_dilated_attention, shard_sequence
from dilated_attention.distributed import members_of
from dilated_attention.distributed.comm.session import session_of
from dilated_attention.distributed.comm.watchdog import Exchange, Monitor, Queue
from dilated_attention.distributed.errors import RingError
from dilated_attention.pattern import BigBird, LocalWindow
from tests.helpers.pool import Pool, PoolError

N = 256
# long enough for a stall to show as one, and far above what a disagreement may take
TIMEOUT = 20.0
CAUSAL = {"is_causal": True}


def call(
    function: str = "dense", *, grad: bool = False, H: int = 4, D: int = 8, dtype: torch.dtype = torch.float32, **arguments: Any
) -> Any:
    arguments = {"layout": "contiguous", "seq_len": N, "timeout": TIMEOUT, **arguments}
    length = arguments["seq_len"] or N
    generator = torch.Generator().manual_seed(0)
    full = [torch.randn(1, length, H, D, generator=generator).to(dtype) for _ in range(3)]
    shards = [x.requires_grad_(grad) for x in shard_sequence(arguments.get("group"), full, [1] * 3, layout=arguments["layout"])]
    if function == "dense":
        return ring_attention(*shards, **arguments)
    if function == "dilated":
        lengths, rates = arguments.pop("w", [16, N]), arguments.pop("r", [1, 2])
        return ring_dilated_attention(*shards, lengths, rates, **arguments)
    return ring_block_sparse_attention(*shards, arguments.pop("pattern", LocalWindow(64, block_size=64)), **arguments)


# (what all call first, what the last rank calls in its place, what the message says beside which ranks)
DISAGREEMENTS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "is_causal": ({}, CAUSAL, "ring_attention: ranks disagree on is_causal: "),
    "scale": ({}, {"scale": 0.1}, "ring_attention: ranks disagree on scale: "),
    "layout": ({}, {"layout": "zigzag"}, "ring_attention: ranks disagree on layout: "),
    "dropout_p": ({"dropout_p": 0.5}, {"dropout_p": 0.25}, "ring_attention: ranks disagree on dropout_p: "),
    "window": ({"window": 8}, {"window": 9}, "ring_attention: ranks disagree on window: "),
    "exchange": ({"exchange": "ring"}, {"exchange": "all_gather"}, "ring_attention: ranks disagree on exchange: "),
    "deterministic": ({}, {"deterministic": True}, "ring_attention: ranks disagree on deterministic: "),
    "requires_grad": ({}, {"grad": True}, "ring_attention: ranks disagree on requires_grad: "),
    "return_lse": ({"grad": True}, {"grad": True, "return_lse": True}, "ring_attention: ranks disagree on return_lse: "),
    "seq_len": ({}, {"seq_len": N + 2}, "ring_attention: ranks disagree on seq_len: "),
    "seq_len asked for": ({}, {"seq_len": None}, "ring_attention: ranks disagree on seq_len: "),
    "heads of equal bytes": ({"H": 4, "D": 16}, {"H": 8, "D": 8}, "ring_attention: ranks disagree on q.shape[2]: "),
    "dtype": ({}, {"dtype": torch.bfloat16}, "ring_attention: ranks disagree on dtype: "),
    "segment_lengths": ({"function": "dilated"}, {"function": "dilated", "w": [32, N]}, "ranks disagree on segment_lengths: "),
    "dilation_rates": ({"function": "dilated"}, {"function": "dilated", "r": [1, 4]}, "ranks disagree on dilation_rates: "),
    "head_offsets": ({"function": "dilated"}, {"function": "dilated", "head_offsets": "zero"}, "ranks disagree on head_offsets: "),
    "mixture_grad": ({"function": "dilated"}, {"function": "dilated", "mixture_grad": "detached"}, "ranks disagree on mixture_grad: "),
    "function": ({}, {"function": "dilated", "w": [N], "r": [1]}, "ranks disagree on function: "),
    "pattern": (
        {"function": "blocks"},
        {"function": "blocks", "pattern": BigBird(64, 64, 1, 0, block_size=64)},
        "ring_block_sparse_attention: ranks disagree on pattern: ",
    ),
    "head_steps": ({"function": "blocks"}, {"function": "blocks", "head_steps": 4}, "ranks disagree on head_steps: "),
}


def refusal(rank: int, function: Any, **where: Any) -> str:
    """The error, which comes at the latest with the next call, in much less time than an exchange may take."""
    began = time.monotonic()
    with pytest.raises(RingError) as raised:
        function()
        while time.monotonic() - began < 5:
            time.sleep(0.1)
            call(**where)
    with pytest.raises(RingError, match="this group failed before and cannot be used again"):
        call(**where)
    assert time.monotonic() - began < TIMEOUT / 2
    # what the message offers
    group = dist.new_group()
    assert torch.isfinite(call(group=group)).all()
    return str(raised.value)


def disagree(rank: int, world: int, name: str) -> str:
    """In a group of its own, since it fails; other tests let the group of all processes fail."""
    usual, other, _ = DISAGREEMENTS[name]
    group = dist.new_group()
    call(group=group, **usual)
    call(group=group, **other)
    mine = other if rank == world - 1 else usual
    return refusal(rank, lambda: call(group=group, **mine), group=group)


@pytest.fixture(scope="module")
def two() -> Iterator[Pool]:
    """Processes in which groups fail, which other tests' processes need not have seen."""
    pool = Pool(2)
    yield pool
    pool.close()


@pytest.mark.parametrize("name", DISAGREEMENTS)
def test_ranks_that_disagree_after_an_agreement(two: Pool, name: str) -> None:
    for text in two.run(disagree, name):
        assert DISAGREEMENTS[name][2] in text and "rank 0 has " in text and "rank 1 has " in text
        assert text.endswith("end the process, or make a new group on all ranks (torch.distributed.new_group)")


def test_all_of_four_ranks_are_told() -> None:
    pool = Pool(4)
    try:
        for name in ("is_causal", "layout", "function"):
            for text in pool.run(disagree, name):
                assert DISAGREEMENTS[name][2] in text and "ranks 0, 1, 2 have " in text and "rank 3 has " in text
    finally:
        pool.close()


def other_backward(rank: int, world: int, other: dict[str, Any]) -> str:
    outs = [call(grad=True), call(grad=True, **other)]
    return refusal(rank, lambda: [out.sum().backward() for out in (outs[::-1] if rank else outs)])


@pytest.mark.parametrize("other", [{}, CAUSAL], ids=str)
def test_the_backward_of_another_call(other: dict[str, Any]) -> None:
    """Of the same kind too, whose gradients would be mixed in silence."""
    pool = Pool(2)
    try:
        for text in pool.run(other_backward, other):
            assert text.startswith(
                "ranks disagree on what they call: rank 0 has the backward of call 1, rank 1 has the backward of call 2;"
            )
    finally:
        pool.close()


def a_step_too_many(rank: int, world: int) -> str:
    call()
    out = call(grad=True)
    return refusal(rank, (lambda: call(grad=True)) if rank else (lambda: out.sum().backward()))


def test_a_forward_for_a_backward() -> None:
    pool = Pool(2)
    try:
        for text in pool.run(a_step_too_many):
            assert "rank 0 has the backward of call 2, rank 1 has call 3 (ring_attention)" in text
    finally:
        pool.close()


def without_exchange(rank: int, world: int) -> str:
    """Nothing travels in either call, so nobody waits: the watchdog finds it all the same."""
    forms = [{"function": "dilated", "w": [16], "r": [1]}, {"function": "dilated", "w": [32], "r": [1]}]
    for form in forms:
        call(**form)
    call(**forms[rank])
    session = session_of(members_of(None), TIMEOUT)
    until = time.monotonic() + 5
    while session.failed is None and time.monotonic() < until:
        time.sleep(0.05)
    with pytest.raises(RingError, match="cannot be used again") as raised:
        call(**forms[0])
    return str(raised.value)


def test_calls_that_exchange_nothing_are_compared() -> None:
    pool = Pool(2)
    try:
        for text in pool.run(without_exchange):
            assert "ring_dilated_attention: ranks disagree on segment_lengths: rank 0 has [16], rank 1 has [32]" in text
    finally:
        pool.close()


def many_alike(rank: int, world: int) -> int:
    """The watch finds nothing to refuse where calls are alike, and then asks no more."""
    session = session_of(members_of(None), TIMEOUT)
    for turn in range(200):
        out = call(grad=True, is_causal=bool(turn % 3))
        if turn % 2:
            out.sum().backward()
    assert session.comparison is not None
    until = time.monotonic() + TIMEOUT
    while session.comparison._equal < session.order.count and time.monotonic() < until:
        time.sleep(0.05)
    assert session.failed is None and session.comparison._equal == session.order.count
    return session.order.count


def test_calls_that_are_alike_stay_unmolested() -> None:
    pool = Pool(2)
    try:
        # two handshakes, and a backward for every other call
        assert pool.run(many_alike) == [302] * 2
    finally:
        pool.close()


class OnGpu:
    """A wire as the watchdog knows it, on whose group ranks have made different calls."""

    on_gpu = True

    def __init__(self, pending: bool) -> None:
        self.queue = Queue()
        if pending:
            self.queue.pending.append(Exchange(7, "hop 1", (1,), Never(), None, threading.get_ident()))
        self.timeout, self.failed = TIMEOUT, None
        self.aborted = threading.Event()

    def abort(self) -> None:
        self.aborted.set()

    def has_raised(self) -> bool:
        return False


class Never:
    def is_completed(self) -> bool:
        return False


class Differs:
    """A group whose comparison finds a difference once."""

    def __init__(self, wire: OnGpu) -> None:
        self._wires, self._found = [wire], ["ranks disagree on is_causal"]

    def look(self) -> str | None:
        return self._found.pop() if self._found else None

    def wires(self) -> list[Any]:
        return self._wires


@pytest.mark.parametrize("pending", [False, True])
def test_the_watch_raises_where_a_gpu_went_on(pending: bool, capfd: pytest.CaptureFixture[str]) -> None:
    """Waiting for a GPU does not block, and so the error has to come to a thread that computes."""
    left: list[int] = []
    monitor, wire = Monitor(leave=left.append), OnGpu(pending)
    group = Differs(wire)
    monitor.add_calls(group)
    thread = threading.Thread(target=monitor.look)
    with pytest.raises(RingError, match=r"^ranks disagree on is_causal$"):
        thread.start()
        for _ in range(500):
            time.sleep(0.01)
    thread.join()
    assert wire.aborted.wait(1.0) and not left and not wire.queue.pending
    assert "dilated_attention: ranks disagree on is_causal" in capfd.readouterr().err


def dies(rank: int, world: int, victim: int) -> str:
    """The comparison asks a store whose server, rank 0, may be the one that has died."""
    for _ in range(3):
        call(timeout=4.0)
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(RingError) as raised:
        call(timeout=4.0)
    assert time.monotonic() - began < 8
    raise raised.value


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_dies_is_no_disagreement(victim: int) -> None:
    pool = Pool(3)
    try:
        with pytest.raises(PoolError) as raised:
            pool.run(dies, victim)
    finally:
        pool.close()
    text = str(raised.value)
    assert f"--- rank {victim} of 3: died with exit code -9" in text and text.count("RingError: rank") >= 2
    assert "ranks disagree" not in text
