"""Rings on many groups at once: first uses from threads leave torch as it was, and results exact; a forked child is refused."""

import datetime
import os
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dilated_attention import (
    RingDilatedAttention,
    attention,
    block_sparse_attention,
    dilated_attention,
    ring_attention,
    ring_block_sparse_attention,
    ring_dilated_attention,
    shard_sequence,
)
from dilated_attention.pattern import LocalWindow
from tests.helpers.pool import Pool
from tests.helpers.scripts import run_script

N = 256
KINDS = ("dense", "dilated", "blocks")
SOON = datetime.timedelta(seconds=10)


def whole(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1, N, 2, 8, generator=generator, dtype=torch.float64) for _ in range(3)]


def attend(kind: str, tensors: list[torch.Tensor], group: Any, is_causal: bool) -> list[torch.Tensor]:
    """(out, dq, dk, dv), on one process where ``group`` is None."""
    alone, spread, arguments = {
        "dense": (attention, ring_attention, ()),
        "dilated": (dilated_attention, ring_dilated_attention, ([64, N], [1, 2])),
        "blocks": (block_sparse_attention, ring_block_sparse_attention, (LocalWindow(64, block_size=64),)),
    }[kind]
    options: dict[str, Any] = {} if group is None else {"group": group, "seq_len": N, "timeout": 20.0, "layout": "contiguous"}
    leaves = [x.clone().requires_grad_() for x in tensors]
    out = (alone if group is None else spread)(*leaves, *arguments, is_causal=is_causal, **options)  # type: ignore[operator]
    return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]


def made(rank: int, world: int, how: str, count: int) -> list[Any]:
    """This rank's groups, one for each thread."""
    if how == "whole":
        return [dist.new_group(list(range(world))) for _ in range(count)]
    # members alone, and not equally many groups on all ranks
    if rank == 0:
        return []
    return [dist.new_group(list(range(1, world)), use_local_synchronization=True) for _ in range(count)]


def first_uses(rank: int, world: int, how: str, count: int) -> tuple[int, list[str], int]:
    """(results compared, errors, groups that could be made afterwards)."""
    usual = dist.distributed_c10d._process_group_name  # type: ignore[attr-defined,unused-ignore]
    groups = made(rank, world, how, count)
    known = len(dist.distributed_c10d._world.pg_names)
    errors: list[str] = []
    compared = [0] * count
    start = threading.Barrier(max(1, len(groups)))

    def use(index: int) -> None:
        try:
            start.wait()
            for turn in range(2):
                kind, full = KINDS[(index + turn) % 3], whole(index)
                parts = shard_sequence(groups[index], full, [1] * 3)
                found = attend(kind, parts, groups[index], bool(index % 2))
                expected = shard_sequence(groups[index], attend(kind, full, None, bool(index % 2)), [1] * 4)
                for a, b in zip(found, expected, strict=True):
                    torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
                    compared[index] += 1
        except Exception as error:  # noqa: BLE001 - whatever it is, the test shows it
            errors.append(f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=use, args=(index,)) for index in range(len(groups))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40)
    assert not errors and not any(thread.is_alive() for thread in threads), errors
    assert dist.distributed_c10d._process_group_name is usual  # type: ignore[attr-defined,unused-ignore]
    # by this number torch names groups that members make by themselves: ranks in other rings have to come to the same
    assert len(dist.distributed_c10d._world.pg_names) == known
    after = [dist.new_group([world - 2, world - 1], timeout=SOON, use_local_synchronization=True)] if rank >= world - 2 > 0 else []
    after += [dist.new_group(list(range(world)), timeout=SOON) for _ in range(2)]
    for group in after:
        total = torch.ones(1)
        dist.all_reduce(total, group=group)
        assert total.item() == dist.get_world_size(group)
    return sum(compared), errors, len(after)


@pytest.mark.parametrize(("how", "world", "count"), [("whole", 2, 8), ("members", 3, 4)])
def test_first_uses_of_many_groups_at_once(how: str, world: int, count: int) -> None:
    with closing(Pool(world)) as pool:
        for rank, (compared, errors, after) in enumerate(pool.run(first_uses, how, count, timeout=100.0)):
            assert not errors
            assert compared == (0 if how == "members" and rank == 0 else 8 * count)
            assert after >= 2


def two_groups(rank: int, world: int) -> None:
    """Calls on two groups in turn, the backward of one after the forward of the other; then groups are destroyed and made again."""
    for life in range(3):
        groups = [dist.new_group([0, 1]) for _ in range(2)]
        parts = [[x.requires_grad_() for x in shard_sequence(group, whole(life), [1] * 3)] for group in groups]
        outs = [ring_attention(*mine, group=group, seq_len=N, layout="contiguous") for mine, group in zip(parts, groups, strict=True)]
        for out in outs[::-1] if life % 2 else outs:
            out.square().sum().backward()
        expected = shard_sequence(groups[0], attend("dense", whole(life), None, False), [1] * 4)
        for out, mine in zip(outs, parts, strict=True):
            for a, b in zip([out, *(x.grad for x in mine)], expected, strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
        for group in groups:
            dist.destroy_process_group(group)


def test_two_groups_in_turn_and_anew() -> None:
    with closing(Pool(2)) as pool:
        pool.run(two_groups)


def refused(call: Callable[[], Any]) -> None:
    with pytest.raises(
        ValueError, match=r"the group '\d+' is not known here any more: destroy_process_group has ended it; make a new group"
    ):
        call()


def ended_groups(rank: int, world: int) -> None:
    """A group that was destroyed, and one of an earlier ``init_process_group``, whose name another group has by now."""
    q = torch.zeros(1, 4, 2, 8)
    first, store = dist.new_group([0, 1]), dist.PrefixStore("again", dist.distributed_c10d._get_default_store())  # type: ignore[attr-defined,unused-ignore]
    before = dist.group.WORLD
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    second = dist.new_group([1, 0])
    assert second.group_name == first.group_name
    for ended in (first, before):
        refused(lambda group=ended: ring_attention(q, q, q, group=group, seq_len=8))  # type: ignore[misc]
        refused(lambda group=ended: shard_sequence(group, [q], [1]))  # type: ignore[misc]
    ring = RingDilatedAttention([8], [1], group=second)
    assert ring(q, q, q).shape == q.shape
    dist.destroy_process_group(second)
    refused(lambda: ring(q, q, q))
    refused(lambda: ring_attention(q, q, q, group=second, seq_len=8))


def test_a_destroyed_group_is_refused() -> None:
    with closing(Pool(2)) as pool:
        pool.run(ended_groups)


GROUP = """
import os, sys, time
import torch, torch.distributed as dist
import dilated_attention
from dilated_attention.distributed import RingError
dist.init_process_group("gloo")
q = torch.randn(1, 8, 2, 8)
codes = []
# a group that no call has met yet, then the same after one has
for met in ("new", "met"):
    began = time.monotonic()
    pid = os.fork()
    if pid == 0:
        try:
            dilated_attention.ring_attention(q, q, q, timeout=20.0)
        except RingError as error:
            print(met, error)
            ok = "forked" in str(error) and "spawn" in str(error) and time.monotonic() - began < 15
            sys.stdout.flush()
            os._exit(0 if ok else 3)
        except BaseException as error:
            print(met, type(error), error, flush=True)
        os._exit(4)
    codes.append(os.waitpid(pid, 0)[1])
    # the parents' own group works as before
    dilated_attention.ring_attention(q, q, q, timeout=20.0)
dist.destroy_process_group()
sys.exit(1 if any(codes) else 0)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_group_of_the_parent_is_refused_in_the_child_at_once(tmp_path: Path) -> None:
    (tmp_path / "group.py").write_text(GROUP)
    # a child that does not end is killed
    result = run_script(tmp_path / "group.py", processes=2, timeout=90)
    assert result.returncode == 0, result.stdout + result.stderr
