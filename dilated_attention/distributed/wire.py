"""TEMPORARY minimal wire."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from dilated_attention.distributed.group import Members

Slab = tuple[int, torch.Tensor]


class Transfer:
    def __init__(self, works, keep):
        self.works, self.keep = works, keep

    def wait(self) -> None:
        for w in self.works:
            w.wait()
        self.keep = None


class Wire:
    def __init__(self, members: Members, timeout: float) -> None:
        self.members = members
        self.ranks = [dist.get_global_rank(members.group, r) for r in range(members.size)]

    def start(self, sends: Sequence[Slab], receives: Sequence[Slab], what: str) -> Transfer:
        ops = [dist.P2POp(dist.isend, t, self.ranks[p], self.members.group) for p, t in sends if t.numel()]
        ops += [dist.P2POp(dist.irecv, t, self.ranks[p], self.members.group) for p, t in receives if t.numel()]
        return Transfer(dist.batch_isend_irecv(ops) if ops else [], (sends, receives))


_wires: dict = {}


def wire_of(members: Members, timeout: float, lane: str = "keys") -> Wire:
    key = (members.group, lane)
    if key not in _wires:
        m = members
        if lane != "keys" and dist.get_backend(members.group) == "nccl":
            ranks = [dist.get_global_rank(members.group, r) for r in range(members.size)]
            m = Members(dist.new_group(ranks, use_local_synchronization=True), members.rank, members.size)
        _wires[key] = Wire(m, timeout)
    return _wires[key]


class RingError(RuntimeError):
    pass
