"""Runs a block-sparse call on a sharded sequence, from its tensors to its results: agreement of the ranks, plan, backends, execution."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from dilated_attention.backends import Backend, BackendUnavailable
from dilated_attention.distributed.block_exchange import cost, run
from dilated_attention.distributed.block_exchange.comm_schedule import BlockLaunch, BlockSchedule, BlockStep, make_block_schedule
from dilated_attention.distributed.block_exchange.plan import RingBlockProblem, joined, needs_of
from dilated_attention.distributed.block_exchange.run import BlockCall
from dilated_attention.distributed.comm.call_consistency import (
    RingCall,
    agreed_form,
    begin_backward,
    begin_forward,
    documents_of,
    remember,
    same_of_tensors,
)
from dilated_attention.distributed.comm.call_order import CallForm
from dilated_attention.distributed.comm.group import Members, members_named
from dilated_attention.distributed.comm.handshake import agree
from dilated_attention.distributed.comm.p2p import Wire, wire_of
from dilated_attention.distributed.exchange.cost import device_memory
from dilated_attention.distributed.sharding.custom_layout import short_name
from dilated_attention.distributed.sharding.layout import spans
from dilated_attention.distributed.sharding.reshard import ShardSpec, reshard
from dilated_attention.engine.blocks.run import request_of, select_backend
from dilated_attention.engine.branches.sequential import without_padding
from dilated_attention.engine.ops.prepare import document_ranges, kernel_ready
from dilated_attention.engine.ops.settings import CallSettings
from dilated_attention.pattern import BlockPattern

FUNCTION = "ring_block_sparse_attention"
Tensors = tuple[torch.Tensor, ...]


class BlockArguments(NamedTuple):
    """The arguments of a call other than tensors: the pattern, the plain arguments, how the sequence is sharded, the steps of the exchange.

    Args:
        head_steps: the number of steps in which keys are sent; 0 to let the time model choose.
    """

    pattern: BlockPattern
    settings: CallSettings
    ring: RingCall
    head_steps: int


class RingBlockMasks(NamedTuple):
    """The mask tensors and the dropout seed of a call. ``padding`` is (B, n) bool, the padding mask of this rank's keys."""

    padding: torch.Tensor | None
    cu_seqlens: torch.Tensor | None
    seed: torch.Tensor | None


@dataclass(frozen=True, eq=False)
class _BlockSetup:
    """What calls of the same kind have in common. It is computed once, because the CPU time delays short calls.

    Args:
        calls: the calls by ``is_backward``, without masks and seed, which differ from call to call.
        lanes: the lanes of keys and of their gradients, and how many multiprocessors they may use.
    """

    schedule: BlockSchedule
    calls: dict[bool, BlockCall]
    lanes: tuple[str, str, int | None]
    digest: str


# the maximum bytes of the lists of all cached schedules, in addition to those cached by ``block_lists``, from which they are made
MAX_CACHED_BYTES = 2**30
MOST_SETUPS = 256

_setups: dict[object, _BlockSetup] = {}
_scripts: OrderedDict[object, BlockSchedule] = OrderedDict()


def ring_blocks_forward(
    tensors: Tensors, masks: RingBlockMasks, arguments: BlockArguments
) -> tuple[torch.Tensor, torch.Tensor, tuple[int, int]]:
    """Returns (out (B, n, H, D), lse (B, H, n), (N, number of the call on its group))."""
    members = members_named(arguments.ring.group_name)
    kind, seq_len, number = _agreed_length(members, tensors, masks, arguments)
    arguments = arguments._replace(ring=replace(arguments.ring, seq_len=seq_len))
    work = _BlockPass(members, tensors, masks, arguments)
    work.agree(kind)
    out, lse = work.forward()
    return out.contiguous(), lse.contiguous(), (seq_len, number)


def ring_blocks_backward(
    tensors: Tensors, dlse: torch.Tensor | None, masks: RingBlockMasks, arguments: BlockArguments, number: int
) -> Tensors:
    """Returns (dq, dk, dv), contiguous.

    Args:
        tensors: dout, q, k, v, out, and lse (B, H, n).
        number: the number of the call on its group.
    """
    dout, q, k, v, out, lse = tensors
    members = members_named(arguments.ring.group_name)
    begin_backward(members, number, arguments.ring.timeout)
    work = _BlockPass(members, (q, k, v), masks, arguments)
    return tuple(x.contiguous() for x in work.backward(dout, out, lse, dlse))


def _agreed_length(members: Members, tensors: Tensors, masks: RingBlockMasks, arguments: BlockArguments) -> tuple[object, int, int]:
    """Returns the kind of this call (the key under which the ranks remember that they agree on it), N, and the call's number."""
    pattern, settings, ring, head_steps = arguments
    q, k, _ = tensors
    documents = documents_of(members, masks.cu_seqlens)
    shared = (FUNCTION, replace(ring, timeout=0.0), settings._replace(backend="", sharding=()), head_steps)
    kind = (*shared, q.shape, k.shape, q.dtype, q.device.type, masks.padding is not None, documents, pattern)

    def same() -> dict[str, object]:
        return {
            "function": FUNCTION,
            **same_of_tensors(tensors, masks.padding, documents),
            # a pattern that holds a function cannot be compared by name; the digest of its lists is compared once they are made
            "pattern": type(pattern).__name__ if pattern.lives_here else pattern.spec(),
            "block_size": str(pattern.block_size),
            "is_causal": settings.is_causal,
            "scale": settings.scale,
            "dropout_p": settings.dropout_p,
            "deterministic": settings.deterministic,
            "requires_grad": settings.needs_grad,
            "layout": short_name(ring.layout),
            "head_steps": head_steps or "None",
            "return_lse": ring.lse_grad,
            "seq_len": ring.seq_len if ring.seq_len >= 0 else "None",
        }

    return kind, *begin_forward(members, kind, same, q.shape[1], ring)


class _BlockPass:
    """One forward or backward pass on one rank."""

    def __init__(self, members: Members, tensors: Tensors, masks: RingBlockMasks, arguments: BlockArguments) -> None:
        self.members, self.masks, self.arguments = members, masks, arguments
        self.tensors = tuple(kernel_ready(x) for x in tensors)
        N = arguments.ring.seq_len
        whole = ((0, N),) if N else ()
        self.documents = whole if masks.cu_seqlens is None else document_ranges(masks.cu_seqlens, N)

    def agree(self, kind: object) -> None:
        """Checks that all ranks have kernels before any of them sends anything.

        Raises:
            BackendUnavailable: if no rank has kernels.
            ValueError: if only some ranks have kernels, or if patterns that hold functions keep different blocks.
        """
        unavailable: BackendUnavailable | None = None
        setup = None
        try:
            setup = self._setup()
        except BackendUnavailable as error:
            # raising here would leave the other ranks waiting
            unavailable = error
        settled = (kind, "kernels", self.arguments.ring.seq_len)
        if self.members.group is not None and agreed_form(self.members, settled) is None:
            text = "available" if unavailable is None else f"unavailable: {str(unavailable).splitlines()[0]}"
            same = {"function": FUNCTION, "kernels": text}
            if setup is not None and setup.digest:
                same["pattern (the blocks that its function keeps)"] = setup.digest
            agree(self.members, same, {}, self.arguments.ring.timeout)
            remember(self.members, settled, CallForm(0, same))
        if unavailable is not None:
            raise unavailable

    def _setup(self) -> _BlockSetup:
        pattern, settings, ring, head_steps = self.arguments
        kind = (
            *(self.members.rank, self.members.size, ring.layout, ring.seq_len, pattern, head_steps, self.documents),
            *(settings, self.masks.padding is None, torch.are_deterministic_algorithms_enabled()),
            *((x.shape, x.stride(), x.dtype, x.device) for x in self.tensors),
        )
        setup = _setups.get(kind)
        if setup is None:
            if len(_setups) >= MOST_SETUPS:
                _setups.clear()
            setup = _setups[kind] = self._make_setup()
        return setup

    def _make_setup(self) -> _BlockSetup:
        pattern, settings, ring, forced = self.arguments
        q, k, _ = self.tensors
        held = tuple(joined(spans(ring.seq_len, rank, self.members.size, ring.layout)) for rank in range(self.members.size))
        ring_problem = RingBlockProblem(pattern, self.documents, held, q.shape[2], k.shape[2], settings.is_causal)
        needs = needs_of(ring_problem, q.device)
        load = cost.load_of(ring_problem, needs, k.shape[0], k.shape[3], k.element_size())
        way = cost.choose(load, device_memory(q.device), forced)
        schedule = _script_of(ring_problem, self.members.rank, way.steps, q.device)
        prefetch_depth = cost.choose_prefetch_depth(load, way.steps)
        deterministic = settings.deterministic or torch.are_deterministic_algorithms_enabled()
        calls = {
            is_backward: BlockCall(
                self._backends(schedule, is_backward), settings.scale, prefetch_depth, deterministic, dropout_p=settings.dropout_p
            )
            for is_backward in ((False, True) if settings.needs_grad else (False,))
        }
        most_ctas = way.lane.most_ctas
        lanes = ("keys", "gradients", None) if most_ctas is None else ("few keys", "few gradients", most_ctas)
        return _BlockSetup(schedule, calls, lanes, needs.digest)

    def _backends(self, schedule: BlockSchedule, is_backward: bool) -> tuple[tuple[Backend | None, ...], ...]:
        return tuple(
            tuple(self._backend(step, launch, is_backward, schedule.exchanges) for launch in step.launches) for step in schedule.steps
        )

    def _backend(self, step: BlockStep, launch: BlockLaunch, is_backward: bool, exchanges: bool) -> Backend | None:
        if not launch.lists.num_entries or not self.tensors[0].shape[0]:
            return None
        settings = self.arguments.settings
        q, k, _ = self.tensors
        B, _, _, D = k.shape
        kv_heads = slice(*step.kv_heads)
        if step.in_place:
            keys = k[:, :, kv_heads]
        else:
            count = step.kv_heads[1] - step.kv_heads[0]
            keys = torch.empty((step.buffer_rows, 2, B, count, D), dtype=k.dtype, device="meta")[:, 0].transpose(0, 1)
        views = (q[:, :, slice(*step.heads)], keys)
        request = request_of(launch.lists, views, settings, self.masks.padding is not None, is_backward)
        # meanwhile the next step's keys, or the last one's gradients, are transferred
        return select_backend(replace(request, beside_exchange=exchanges), settings)

    def _wires(self, setup: _BlockSetup) -> tuple[Wire, Wire] | None:
        """Returns the wires for keys and for their gradients; all ranks open them, even those that have nothing to exchange."""
        if not setup.schedule.exchanges:
            return None
        *names, most_ctas = setup.lanes
        keys = wire_of(self.members, self.arguments.ring.timeout, names[0], most_ctas)
        # a forward does not need the gradients' wire, but in a training step it is the moment when no exchange is in flight
        needs_grad = self.arguments.settings.needs_grad
        gradients = wire_of(self.members, self.arguments.ring.timeout, names[1], most_ctas) if needs_grad else keys
        for wire in (keys, gradients):
            wire.open(self.tensors[0].device)
        return keys, gradients

    def _prepared(self, is_backward: bool) -> tuple[BlockSchedule, BlockCall, Tensors, tuple[Wire, Wire] | None]:
        setup = self._setup()
        call, (q, k, v) = setup.calls[is_backward], self.tensors
        if self.masks.seed is not None:
            call = replace(call, seed=int(self.masks.seed.item()))
        if self.masks.padding is not None:
            call = replace(call, padding=self._whole_padding(setup.schedule.ring_problem, self.masks.padding))
            k, v = without_padding(k, v, self.masks.padding)
        return setup.schedule, call, (q, k, v), self._wires(setup)

    def _whole_padding(self, ring_problem: RingBlockProblem, padding: torch.Tensor) -> torch.Tensor:
        """Returns the padding mask of all ranks' keys, (B, N) bool."""
        wire = None
        if self.members.size > 1:
            wire = wire_of(self.members, self.arguments.ring.timeout)
            wire.open(padding.device)
        rows = [ShardSpec(tuple((start, stop, 1) for start, stop in held), (0, 1)) for held in ring_problem.shards]
        whole = [ShardSpec(((0, ring_problem.seq_len, 1),), (0, 1))] * self.members.size
        (mask,) = reshard([padding.to(torch.uint8)[..., None]], [rows], [whole], self.members.rank, wire, "padding masks")
        return mask[..., 0].bool()

    def forward(self) -> tuple[torch.Tensor, torch.Tensor]:
        schedule, call, tensors, wires = self._prepared(False)
        return run.forward(schedule, tensors, call, None if wires is None else wires[0])

    def backward(self, dout: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, dlse: torch.Tensor | None) -> Tensors:
        schedule, call, tensors, wires = self._prepared(True)
        return run.backward(schedule, (kernel_ready(dout), *tensors, kernel_ready(out), lse), call, wires, dlse)


def _script_of(ring_problem: RingBlockProblem, rank: int, steps: tuple[int, ...], device: torch.device) -> BlockSchedule:
    key = (ring_problem, rank, steps, device)
    schedule = _scripts.pop(key, None)
    if schedule is None:
        schedule = make_block_schedule(ring_problem, rank, steps, device)
        while _scripts and schedule.nbytes + sum(other.nbytes for other in list(_scripts.values())) > MAX_CACHED_BYTES:
            _scripts.popitem(last=False)
            # setups keep schedules alive
            _setups.clear()
    _scripts[key] = schedule
    return schedule
