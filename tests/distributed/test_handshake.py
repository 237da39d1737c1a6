"""The check that all ranks make the same call, over gloo processes and over threads that share a store."""

from __future__ import annotations

import datetime
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import torch.multiprocessing as mp

from dilated_attention.distributed import Members, members_of
from dilated_attention.distributed.comm.handshake import agree
from dilated_attention.distributed.comm.session import session_of
from dilated_attention.distributed.errors import RingError
from tests.helpers.pool import fresh_processes, pool_of

# seconds that others wait for a rank that never comes; on a busy machine one that does is late by more than one
LATE = 4.0
CALL = {"function": "ring_attention", "dtype": "torch.bfloat16", "heads": 8, "causal": True}
OTHERS: dict[str, Any] = {"dtype": "torch.float32", "heads": 4, "causal": False}


def test_one_process_agrees_with_itself() -> None:
    assert agree(members_of(None), CALL, {"rows": 26}, 1.0) == [{"rows": 26}]


def own_numbers(rank: int, world: int) -> list[list[dict[str, int]]]:
    members = members_of(None)
    return [agree(members, CALL, {"rows": 26 + rank, "call": call}, 20.0) for call in range(20)]


@pytest.mark.parametrize("world", [2, 4])
def test_own_numbers_come_in_the_order_of_ranks(world: int) -> None:
    expected = [[{"rows": 26 + rank, "call": call} for rank in range(world)] for call in range(20)]
    assert pool_of(world).run(own_numbers) == [expected] * world


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


def refused(rank: int, world: int, odd: dict[int, dict[str, Any]], missing: dict[int, str]) -> str:
    members = members_of(None)
    call = {key: value for key, value in {**CALL, **odd.get(rank, {})}.items() if key != missing.get(rank)}
    try:
        agree(members, call, {}, 20.0)
    except ValueError as error:
        # the next call finds all ranks in step
        assert len(agree(members, CALL, {}, 20.0)) == world
        return str(error)
    return "agreed"


@pytest.mark.parametrize("argument", list(OTHERS))
@pytest.mark.parametrize("rank", [0, 2])
def test_an_odd_rank_is_named_on_all(argument: str, rank: int) -> None:
    told = pool_of(4).run(refused, {rank: {argument: OTHERS[argument]}}, {})
    rest = ", ".join(str(r) for r in range(4) if r != rank)
    assert (
        told
        == [
            f"ring_attention: ranks disagree on {argument}: "
            f"ranks {rest} have {CALL[argument]}, rank {rank} has {OTHERS[argument]}; all ranks must make the same call"
        ]
        * 4
    )


def test_several_differences_and_a_missing_argument() -> None:
    told = pool_of(4).run(refused, {1: OTHERS, 3: {"heads": 2}}, {0: "causal"})
    assert (
        told
        == [
            "ring_attention: ranks disagree on dtype: ranks 0, 2, 3 have torch.bfloat16, rank 1 has torch.float32; on heads: "
            "ranks 0, 2 have 8, rank 1 has 4, rank 3 has 2; on causal: "
            "ranks 2, 3 have True, rank 0 has no such argument, rank 1 has False; all ranks must make the same call"
        ]
        * 4
    )


def test_another_function_is_all_that_is_told_of_it() -> None:
    told = pool_of(4).run(refused, {3: {"function": "sequence_attention", "heads": 3}}, {})
    assert (
        told
        == [
            "ranks disagree on function: ranks 0, 1, 2 have ring_attention, rank 3 has sequence_attention; "
            "all ranks must make the same call"
        ]
        * 4
    )


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


def skips(rank: int, world: int, first: bool) -> tuple[str, float]:
    """Rank 1 leaves one handshake out, on a group of its own that is spoilt by it."""
    group = dist.new_group(list(range(world)))
    members = members_of(group)
    if not first:
        agree(members, CALL, {}, 20.0)
    began = time.monotonic()
    try:
        if rank != 1:
            with pytest.raises(RingError) as raised:
                agree(members, CALL, {}, LATE)
            took = time.monotonic() - began
            if not first:
                # and the group stays refused
                with pytest.raises(RingError, match="this group failed before and cannot be used again"):
                    agree(members, CALL, {}, LATE)
            return str(raised.value), took
        return "", 0.0
    finally:
        dist.barrier()
        dist.destroy_process_group(group)


def test_a_rank_that_skips_the_handshake_is_named() -> None:
    for rank, (text, took) in enumerate(pool_of(4).run(skips, False)):
        if rank != 1:
            assert text.startswith(
                f"rank {rank}: ring_attention: check that all ranks make the same call failed after {LATE} s: rank 1 posted nothing; "
                f"rank 1 has not reported: dead, stalled or in another call."
            )
            assert text.endswith(f"look at the output of rank 1, or raise timeout= ({LATE:g} s) if only late")
            assert took < LATE + 8.0


def test_a_rank_that_never_comes_is_named() -> None:
    for rank, (text, took) in enumerate(pool_of(4).run(skips, True)):
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
        assert session_of(members, 1.0).calls == 3 + life
        if rank == 0 and life == 0:
            # as a rank leaves it that was killed in its call
            session_of(members, 1.0).store.set("agree/3/0", '[{"stale": "yes"}, {}]')
        dist.barrier()
        dist.destroy_process_group()


@pytest.mark.parametrize("kind", ["tcp", "file"])
def test_a_new_life_reads_nothing_of_the_old(tmp_path: Path, kind: str) -> None:
    ports = fresh_processes().SimpleQueue()
    mp.start_processes(again, args=(str(tmp_path / "store"), kind, ports), nprocs=2, start_method="forkserver")


def test_a_group_of_one_needs_no_session() -> None:
    with pytest.raises(AssertionError, match="nobody to tell"):
        session_of(Members(None, 0, 1), 1.0)
