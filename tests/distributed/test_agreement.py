"""Ranks agree on a kind of call, or all are told what differs: before its first exchange, and in later calls of kinds agreed on."""

import datetime
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from dilated_attention import ring_attention, ring_block_sparse_attention, ring_dilated_attention, shard_sequence
from dilated_attention.distributed import members_of
from dilated_attention.distributed.comm.call_consistency import agree
from dilated_attention.distributed.comm.session import RingError, session_of
from dilated_attention.pattern import BigBird, LocalWindow
from tests.helpers.pool import Pool, fresh_processes, pool_of

# seconds that others wait for a rank that never comes; on a busy machine one that does is late by more than one
LATE = 4.0
CALL = {"function": "ring_attention", "dtype": "torch.bfloat16", "heads": 8, "causal": True}
N = 256
# long enough for a stall to show as one, and far above what a disagreement may take
TIMEOUT = 20.0
CAUSAL = {"is_causal": True}


def keys_left(rank: int, world: int) -> int:
    members = members_of(None)
    agree(members, CALL, {}, 20.0)
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()
    before = store.num_keys()
    dist.barrier()
    for _ in range(50):
        agree(members, CALL, {}, 20.0)
    dist.barrier()
    return store.num_keys() - before


def test_keys_do_not_accumulate() -> None:
    # a rank's last key goes at its next call, so some of two calls may lie there
    assert max(pool_of(4).run(keys_left)) <= 4


def in_subgroups(rank: int, world: int) -> str:
    group = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])][rank % 2]
    try:
        agree(members_of(group), {"heads": rank}, {}, 20.0)
    except ValueError as error:
        return str(error)
    finally:
        dist.destroy_process_group(group)
    return "agreed"


def test_groups_agree_each_by_itself() -> None:
    told = pool_of(4).run(in_subgroups)
    assert told[0] == told[2] == "ranks disagree on heads: rank 0 has 0, rank 1 (global rank 2) has 2; all ranks must make the same call"
    assert told[1] == told[3]
    assert told[1].startswith("ranks disagree on heads: rank 0 (global rank 1) has 1, rank 1 (global rank 3) has 3;")


def never_comes(rank: int, world: int) -> tuple[str, float]:
    """Rank 1 leaves the first use of a group out, which is spoilt by it."""
    group = dist.new_group(list(range(world)))
    began = time.monotonic()
    try:
        if rank == 1:
            return "", 0.0
        with pytest.raises(RingError) as raised:
            agree(members_of(group), CALL, {}, LATE)
        return str(raised.value), time.monotonic() - began
    finally:
        dist.barrier()
        dist.destroy_process_group(group)


def test_a_rank_that_never_comes_is_named() -> None:
    for rank, (text, took) in enumerate(pool_of(4).run(never_comes)):
        if rank != 1:
            assert text.startswith(f"rank {rank}: first use of the group failed after {LATE} s: rank 1 did not join;")
            assert took < LATE + 8.0


def again(rank: int, path: str, kind: str, ports: Any) -> None:
    """Destroys everything and initialises anew on the same store, where keys of before lie."""
    world = 2
    if kind == "tcp":
        store: Any = dist.TCPStore("127.0.0.1", 0 if rank == 0 else ports.get(), world, rank == 0, wait_for_workers=False)
        if rank == 0:
            ports.put(store.port)
    else:
        store = dist.FileStore(path, world)
    for life in range(3):
        limit = datetime.timedelta(seconds=20)
        # gloo itself cannot meet twice under the same keys
        dist.init_process_group("gloo", store=dist.PrefixStore(f"gloo{life}", store), rank=rank, world_size=world, timeout=limit)
        # ours does: the keys of all lives lie in one place
        dist.distributed_c10d._world.pg_map[dist.group.WORLD] = ("gloo", store)
        members = members_of(None)
        for call in range(3 + life):
            numbers = agree(members, {"life": life, "call": call}, {"rank": rank, "life": life}, 20.0)
            assert numbers == [{"rank": r, "life": life} for r in range(world)]
        assert session_of(members, 1.0).handshakes == 3 + life
        if rank == 0 and life == 0:
            # as a rank leaves it that was killed in its call
            session_of(members, 1.0).store.set("agree/3/0", '[{"stale": "yes"}, {}]')
        dist.barrier()
        dist.destroy_process_group()


@pytest.mark.parametrize("kind", ["tcp", "file"])
def test_a_new_life_reads_nothing_of_the_old(tmp_path: Path, kind: str) -> None:
    ports = fresh_processes().SimpleQueue()
    mp.start_processes(again, args=(str(tmp_path / "store"), kind, ports), nprocs=2, start_method="forkserver")


# --- calls of kinds that were agreed on -------------------------------------------------------------------------------------------


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
    "another length": ({}, {"seq_len": N + 2}, "ring_attention: ranks disagree on seq_len: "),
    "heads of equal bytes": ({"H": 4, "D": 16}, {"H": 8, "D": 8}, "ring_attention: ranks disagree on q.shape[2]: "),
    "pattern": (
        {"function": "blocks"},
        {"function": "blocks", "pattern": BigBird(64, 64, 1, 0, block_size=64)},
        "ring_block_sparse_attention: ranks disagree on pattern: ",
    ),
    "other documents": (
        {"cu_seqlens": torch.tensor([0, 100, N], dtype=torch.int32)},
        {"cu_seqlens": torch.tensor([0, 101, N], dtype=torch.int32)},
        "ring_attention: ranks disagree on cu_seqlens: ",
    ),
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
def own_pools() -> Iterator[dict[int, Pool]]:
    """Processes in which groups fail, which other tests' processes need not have seen."""
    pools = {world: Pool(world) for world in (2, 4)}
    yield pools
    for pool in pools.values():
        pool.close()


@pytest.mark.parametrize(("world", "name"), [*((2, name) for name in DISAGREEMENTS), (4, "is_causal")])
def test_ranks_that_disagree_after_an_agreement(own_pools: dict[int, Pool], world: int, name: str) -> None:
    others = "rank 0 has " if world == 2 else "ranks 0, 1, 2 have "
    for text in own_pools[world].run(disagree, name):
        assert DISAGREEMENTS[name][2] in text and others in text and f"rank {world - 1} has " in text
        assert text.endswith("end the process, or make a new group on all ranks (torch.distributed.new_group)")


def of_many_lengths(rank: int, world: int) -> list[int]:
    """The number of handshakes after the first call of each kind, and after calls of other lengths and documents."""
    session, found = session_of(members_of(None), TIMEOUT), []
    for lengths in ((N,), (N + 1, N + 3, 40)):
        for length in lengths:
            for kind in ({}, {"function": "dilated", "w": [16, 64]}, {"function": "blocks"}):
                call(grad=True, seq_len=length, **kind)
            call(seq_len=length, cu_seqlens=torch.tensor([0, length // 3, length], dtype=torch.int32))
        found.append(session.handshakes)
    return found


def test_ranks_agree_once_on_a_kind_of_call_of_any_length(own_pools: dict[int, Pool]) -> None:
    for before, after in own_pools[2].run(of_many_lengths):
        assert before == after


def other_backward(rank: int, world: int, other: dict[str, Any]) -> str:
    group = dist.new_group()
    outs = [call(grad=True, group=group), call(grad=True, group=group, **other)]
    return refusal(rank, lambda: [out.sum().backward() for out in (outs[::-1] if rank else outs)], group=group)


@pytest.mark.parametrize("other", [{}, CAUSAL], ids=str)
def test_the_backward_of_another_call(own_pools: dict[int, Pool], other: dict[str, Any]) -> None:
    """Of the same kind too, whose gradients would be mixed in silence."""
    for text in own_pools[2].run(other_backward, other):
        assert text.startswith("ranks disagree on what they call: rank 0 has the backward of call 1, rank 1 has the backward of call 2;")


def a_step_too_many(rank: int, world: int) -> str:
    group = dist.new_group()
    call(group=group)
    out = call(grad=True, group=group)
    return refusal(rank, (lambda: call(grad=True, group=group)) if rank else (lambda: out.sum().backward()), group=group)


def test_a_forward_for_a_backward(own_pools: dict[int, Pool]) -> None:
    for text in own_pools[2].run(a_step_too_many):
        assert "rank 0 has the backward of call 2, rank 1 has call 3 (ring_attention)" in text


def without_exchange(rank: int, world: int) -> str:
    """Nothing travels in either call, so nobody waits: the watching thread finds it all the same."""
    forms: list[dict[str, Any]] = [{"function": "dilated", "w": [16], "r": [1]}, {"function": "dilated", "w": [32], "r": [1]}]
    group = dist.new_group()
    for form in forms:
        call(group=group, **form)
    call(group=group, **forms[rank])
    session = session_of(members_of(group), TIMEOUT)
    until = time.monotonic() + 5
    while session.failed is None and time.monotonic() < until:
        time.sleep(0.05)
    with pytest.raises(RingError, match="cannot be used again") as raised:
        call(group=group, **forms[0])
    return str(raised.value)


def test_calls_that_exchange_nothing_are_compared(own_pools: dict[int, Pool]) -> None:
    for text in own_pools[2].run(without_exchange):
        assert "ring_dilated_attention: ranks disagree on segment_lengths: rank 0 has [16], rank 1 has [32]" in text
