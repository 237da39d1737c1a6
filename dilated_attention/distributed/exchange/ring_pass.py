"""Runs a call on a sharded sequence, from its tensors to its results: agreement of the ranks, setup, padding, and wires.

Dilated and dense attention (``context_parallel.py``) and block-sparse attention (``block_exchange/context_parallel.py``) are the two kinds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any

import torch

from dilated_attention.distributed.comm.call_consistency import Agreement, RingCall, begin_backward
from dilated_attention.distributed.comm.group import Members, members_named
from dilated_attention.distributed.comm.p2p import Wire, wire_of
from dilated_attention.distributed.exchange.rows.messages import StepPlan
from dilated_attention.distributed.sharding.layout import spans
from dilated_attention.distributed.sharding.reshard import ShardSpec, reshard
from dilated_attention.engine.branches.sequential import without_padding
from dilated_attention.engine.ops.prepare import document_ranges, new_like, new_lse
from dilated_attention.engine.ops.settings import CallSettings

Tensors = tuple[torch.Tensor, ...]
# the maximum bytes of the tables and lists of all cached setups; those that ``block_lists`` caches are not counted
MAX_CACHED_BYTES = 2**30
MOST_SETUPS = 512


@dataclass(frozen=True, eq=False, kw_only=True)
class PassSetup:
    """What calls of the same kind have in common. It is computed once, because the CPU time delays short calls.

    Args:
        steps: the steps of the exchange on this rank.
        depth: the number of steps whose keys are in memory at once.
        nbytes: bytes of its tables and lists.
        lanes: of keys and of their gradients, and how many multiprocessors an exchange may use: few if it is small next to the
            computation. None if no rank sends anything. All ranks must choose the same, so it does not depend on what this rank receives.
    """

    steps: tuple[StepPlan, ...]
    depth: int
    lanes: tuple[str, str, int | None] | None
    nbytes: int


# in order of use
_setups: dict[Hashable, PassSetup] = {}


def _make_room(new: PassSetup) -> None:
    """Forgets the oldest of the cached setups until another one fits. Packed batches differ, so theirs are not used again."""
    # a copy, since threads of other groups may add theirs meanwhile: a dictionary's is made at once, a list of its items is not
    kept = list(_setups.copy().items())
    count, nbytes = len(kept), new.nbytes + sum(one.nbytes for _, one in kept)
    for kind, one in kept:
        if count < MOST_SETUPS and nbytes <= MAX_CACHED_BYTES:
            return
        _setups.pop(kind, None)
        count, nbytes = count - 1, nbytes - one.nbytes


class RingPass(ABC):
    """One pass on one rank: its tensors, and its part of the results.

    Args:
        inputs: see ``ResolvedCall``.
        known: what calls of the same record have found: what the ranks agreed on, and setups.
    """

    def __init__(self, members: Members, inputs: tuple[Any, ...], settings: CallSettings, ring: RingCall, known: dict[Any, Any]) -> None:
        self.members, self.settings, self.ring, self.known = members, settings, ring, known
        self.tensors: Tensors = inputs[:3]
        self.own_padding, cu_seqlens, seed = inputs[3:6]
        whole = ((0, ring.seq_len),) if ring.seq_len else ()
        self.documents = whole if cu_seqlens is None else document_ranges(cu_seqlens, ring.seq_len)
        self.seed = 0 if seed is None else int(seed.item())
        # (B, N) bool, of all ranks' keys
        self.padding: torch.Tensor | None = None

    @classmethod
    @abstractmethod
    def agree(
        cls, members: Members, inputs: tuple[Any, ...], settings: CallSettings, ring: RingCall, known: dict[Any, Any]
    ) -> tuple[Agreement, RingPass | None]:
        """Returns the pass of a call that all ranks make alike, and for which all have kernels; None if there is nothing to compute.

        Nothing has been sent by then.

        Raises:
            BackendUnavailable: if no rank has kernels.
            ValueError: if calls differ.
        """

    @abstractmethod
    def forward(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (out (B, n, H, D), lse (B, H, n)), contiguous, in the caller's layout."""

    @abstractmethod
    def backward(self, dout: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, dlse: torch.Tensor | None) -> Tensors:
        """Returns (dq, dk, dv), contiguous, in the caller's layout. lse and dlse are (B, H, n)."""

    @abstractmethod
    def make_setup(self) -> PassSetup:
        """Makes the setup of calls like this one."""

    def find_setup(self, *kind: Hashable) -> Any:
        """Returns the setup of calls like this one: of the same record, group and documents, and of this ``kind``."""
        place = (type(self), self.members.rank, self.members.size, self.ring, self.documents)
        options = (self.settings, self.own_padding is None, torch.are_deterministic_algorithms_enabled())
        key = (*place, *options, *kind)
        setup = _setups.pop(key, None)
        if setup is None:
            setup = self.make_setup()
            _make_room(setup)
        _setups[key] = setup
        return setup

    def gather_padding(self) -> None:
        """Gathers the padding mask of all ranks' keys, and takes the padding out of this rank's, which could spread NaN through sums."""
        if self.own_padding is None:
            return
        ring, size = self.ring, self.members.size
        rows = [ShardSpec(spans(ring.seq_len, rank, size, ring.layout), (0, 1)) for rank in range(size)]
        whole = [ShardSpec(((0, ring.seq_len, 1),), (0, 1))] * size
        mine = self.own_padding.to(torch.uint8)[..., None]
        (mask,) = reshard([mine], [rows], [whole], self.members.rank, self.wire(), "padding masks")
        self.padding = mask[..., 0].bool()
        q, k, v = self.tensors
        self.tensors = (q, *without_padding(k, v, self.own_padding))

    def wire(self, lane: str = "keys", most_ctas: int | None = None) -> Wire | None:
        """Returns the wire of a lane; None in one process. Every rank opens it, even one that has nothing to exchange."""
        if self.members.size == 1:
            return None
        wire = wire_of(self.members, self.ring.timeout, lane, most_ctas)
        wire.open(self.tensors[0].device)
        return wire

    def wires(self, setup: PassSetup) -> tuple[Wire | None, Wire | None]:
        """Returns the wires for keys and for their gradients."""
        if setup.lanes is None:
            return None, None
        keys, gradients, most_ctas = setup.lanes
        wire = self.wire(keys, most_ctas)
        # a forward does not need the gradients' wire, but in a training step it is the moment when no exchange is in flight
        return wire, self.wire(gradients, most_ctas) if self.settings.needs_grad else wire


def ring_forward(
    kind: type[RingPass], inputs: tuple[Any, ...], settings: CallSettings, ring: RingCall, known: dict[Any, Any]
) -> tuple[torch.Tensor, torch.Tensor, tuple[int, int]]:
    """Returns (out (B, n, H, D), lse (B, H, n), (N, number of the call on its group)). For the arguments see ``RingPass``."""
    agreement, work = kind.agree(members_named(ring.group_name), inputs, settings, ring, known)
    whole = agreement.seq_len, agreement.number
    if work is None:
        return new_like(inputs[0]), new_lse(inputs[0]), whole
    work.gather_padding()
    return *work.forward(), whole


def ring_backward(
    kind: type[RingPass],
    inputs: tuple[Any, ...],
    gradients: tuple[Any, ...],
    settings: CallSettings,
    ring: RingCall,
    number: int,
    known: dict[Any, Any],
) -> Tensors:
    """Returns (dq, dk, dv).

    Args:
        gradients: dout, out, lse (B, H, n), and dlse or None.
        number: the number of the call on its group.
    """
    members = members_named(ring.group_name)
    begin_backward(members, number, ring.timeout)
    if not inputs[0].shape[0]:
        return tuple(new_like(x) for x in inputs[:3])
    work = kind(members, inputs, settings, ring, known)
    work.gather_padding()
    return work.backward(*gradients)


def of_length(ring: RingCall, seq_len: int) -> RingCall:
    """Returns the call with N, which the ranks know by now."""
    return ring if ring.seq_len == seq_len else replace(ring, seq_len=seq_len)
