"""Runs a block-sparse call on a sharded sequence, from its tensors to its results: agreement of the ranks, plan, backends, execution."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from dilated_attention.backends import NESTED, Backend, BackendUnavailable
from dilated_attention.distributed.block_exchange import cost
from dilated_attention.distributed.block_exchange.parts import BlockOptions, BlockPart, Blocks, BlocksAndBranches, make_block_steps
from dilated_attention.distributed.block_exchange.plan import RingBlockProblem, ascending_runs, needs_of
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
from dilated_attention.distributed.exchange import run
from dilated_attention.distributed.exchange.cost import device_memory
from dilated_attention.distributed.exchange.parts import Branches, Masks, QueryPart, parts_of
from dilated_attention.distributed.exchange.plan import RingProblem
from dilated_attention.distributed.exchange.rows.messages import StepPlan
from dilated_attention.distributed.exchange.setup import make_room
from dilated_attention.distributed.sharding.custom_layout import short_name
from dilated_attention.distributed.sharding.layout import spans
from dilated_attention.distributed.sharding.reshard import ShardSpec, reshard
from dilated_attention.engine.blocks.run import request_of, select_backend
from dilated_attention.engine.branches.plan import Range
from dilated_attention.engine.branches.sequential import without_padding
from dilated_attention.engine.ops.prepare import document_ranges, kernel_ready, new_like, new_lse, prepare
from dilated_attention.engine.ops.settings import CallSettings
from dilated_attention.pattern import BlockPattern

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

    @property
    def function(self) -> str:
        return "ring_block_sparse_attention" if self.settings.branches is None else "ring_block_sparse_dilated_attention"


class RingBlockMasks(NamedTuple):
    """The mask tensors and the dropout seed of a call. ``padding`` is (B, n) bool, the padding mask of this rank's keys."""

    padding: torch.Tensor | None
    cu_seqlens: torch.Tensor | None
    seed: torch.Tensor | None


@dataclass(frozen=True, eq=False)
class _BlockSetup:
    """What calls of the same kind have in common. It is computed once, because the CPU time delays short calls.

    Args:
        steps: the steps of the exchange on this rank.
        parts, branches: what is computed in each step, of the blocks and of dilated branches.
        exchanges: whether any rank sends anything.
        lanes: the lanes of keys and of their gradients, and how many multiprocessors they may use.
        depth: the number of steps whose keys are in memory at once.
        nbytes: bytes of the lists.
    """

    steps: tuple[StepPlan, ...]
    parts: tuple[tuple[BlockPart, ...], ...]
    branches: tuple[tuple[QueryPart, ...], ...] | None
    exchanges: bool
    lanes: tuple[str, str, int | None]
    depth: int
    nbytes: int
    digest: str


# the maximum bytes of the lists of all cached setups, in addition to those cached by ``block_lists``, from which they are made
MAX_CACHED_BYTES = 2**30
MOST_SETUPS = 256

_setups: OrderedDict[object, _BlockSetup] = OrderedDict()


def ring_blocks_forward(
    tensors: Tensors, masks: RingBlockMasks, arguments: BlockArguments
) -> tuple[torch.Tensor, torch.Tensor, tuple[int, int]]:
    """Returns (out (B, n, H, D), lse (B, H, n), (N, number of the call on its group))."""
    members = members_named(arguments.ring.group_name)
    kind, seq_len, number = _agreed_length(members, tensors, masks, arguments)
    arguments = arguments._replace(ring=replace(arguments.ring, seq_len=seq_len))
    work = _BlockPass(members, tensors, masks, arguments)
    work.agree(kind)
    if not tensors[0].shape[0]:
        return new_like(tensors[0]), new_lse(tensors[0]), (seq_len, number)
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
    if not q.shape[0]:
        return tuple(new_like(x) for x in (q, k, v))
    work = _BlockPass(members, (q, k, v), masks, arguments)
    return tuple(x.contiguous() for x in work.backward(dout, out, lse, dlse))


def _agreed_length(members: Members, tensors: Tensors, masks: RingBlockMasks, arguments: BlockArguments) -> tuple[object, int, int]:
    """Returns the kind of this call (the key under which the ranks remember that they agree on it), N, and the call's number."""
    pattern, settings, ring, head_steps = arguments
    q, k, _ = tensors
    documents = documents_of(members, masks.cu_seqlens)
    shared = (arguments.function, replace(ring, timeout=0.0), settings._replace(backend="", sharding=()), head_steps)
    kind = (*shared, q.shape, k.shape, q.dtype, q.device.type, masks.padding is not None, documents, pattern)

    def same() -> dict[str, object]:
        return {
            "function": arguments.function,
            **same_of_tensors(tensors, masks.padding, documents),
            "branches": settings.branches,
            # a pattern that holds a function cannot be compared by name; the digest of its lists is compared once they are made
            "pattern": type(pattern).__name__ if pattern.lives_here else pattern.spec(),
            "block_size": str(pattern.block_size),
            "is_causal": settings.is_causal,
            "scale": settings.scale,
            "softcap": settings.softcap or "None",
            "sinks": "given" if settings.has_sinks else "None",
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
            same = {"function": self.arguments.function, "kernels": text}
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
        setup = _setups.pop(kind, None)
        if setup is None:
            setup = self._make_setup()
            make_room(_setups, setup, MOST_SETUPS, MAX_CACHED_BYTES)
        _setups[kind] = setup
        return setup

    def _make_setup(self) -> _BlockSetup:
        pattern, settings, ring, forced = self.arguments
        q, k, _ = self.tensors
        me, device = self.members.rank, q.device
        held = tuple(ascending_runs(spans(ring.seq_len, rank, self.members.size, ring.layout)) for rank in range(self.members.size))
        ring_problem = RingBlockProblem(pattern, self.documents, held, q.shape[2], k.shape[2], settings.is_causal)
        needs = needs_of(ring_problem, device)
        branches = self._branches(held) if settings.branches is not None else None
        load = cost.load_of(ring_problem, needs, k.shape[0], k.shape[3], k.element_size(), branches)
        # heads that run different branches are not divided
        way = cost.choose(load, device_memory(device), 1 if branches is not None and branches.pattern.branch_heads != "all" else forced)
        steps, plain, span = make_block_steps(ring_problem, me, way.steps, device, branches)
        exchanges = load.brought > 0
        parts = tuple(tuple(self._with_backends(part, step, exchanges) for part in some) for step, some in zip(steps, plain, strict=True))
        of_branches = None if branches is None else tuple(parts_of(branches, settings, step, me, span) for step in steps)
        most_ctas = way.lane.most_ctas
        lanes = ("keys", "gradients", None) if most_ctas is None else ("few keys", "few gradients", most_ctas)
        nbytes = sum({id(part.lists): part.lists.nbytes for some in parts for part in some}.values())
        depth = cost.choose_prefetch_depth(load, way.steps)
        return _BlockSetup(steps, parts, of_branches, exchanges, lanes, depth, nbytes, needs.digest)

    def _branches(self, held: tuple[tuple[Range, ...], ...]) -> RingProblem:
        """Returns the dilated branches of the call, for which every pass has a kernel.

        Raises:
            BackendUnavailable: if one has none.
        """
        settings, (q, k, _), N = self.arguments.settings, self.tensors, self.arguments.ring.seq_len
        for is_backward in (False, True) if settings.needs_grad else (False,):
            views = (*self.tensors, q) if is_backward else self.tensors
            prepare(is_backward, views, settings.pattern, settings, self.masks.padding, num_keys=N)
        return RingProblem(
            settings.pattern, self.documents, held, q.shape[2], k.shape[2], settings.is_causal, None, "all_gather", (k.shape[2],)
        )

    def _with_backends(self, part: BlockPart, step: StepPlan, exchanges: bool) -> BlockPart:
        if not part.lists.num_entries or not self.tensors[0].shape[0]:
            return part
        settings = self.arguments.settings
        q, k, _ = self.tensors
        keys = k[:, :, slice(*step.kv_heads)]
        if not step.in_place:
            memory = torch.empty((step.rows, step.num_kv_heads, k.shape[0], 2 * k.shape[3]), dtype=k.dtype, device="meta")
            keys = memory.permute(2, 0, 1, 3)[..., : k.shape[3]]
        views = (q[:, :, slice(*part.heads)], keys[:, part.keys])
        found: list[Backend | None] = []
        for is_backward in (False, True):
            request = request_of(part.lists, views, _of_blocks(settings), self.masks.padding is not None, is_backward)
            # meanwhile the next step's keys, or the last one's gradients, are transferred
            request = replace(request, beside_exchange=exchanges)
            found.append(select_backend(request, _of_blocks(settings)) if settings.needs_grad or not is_backward else None)
        return replace(part, forward_backend=found[0], backward_backend=found[1])

    def _wires(self, setup: _BlockSetup) -> tuple[Wire | None, Wire | None]:
        """Returns the wires for keys and for their gradients; all ranks open them, even those that have nothing to exchange."""
        if not setup.exchanges:
            return None, None
        *names, most_ctas = setup.lanes
        keys = wire_of(self.members, self.arguments.ring.timeout, names[0], most_ctas)
        # a forward does not need the gradients' wire, but in a training step it is the moment when no exchange is in flight
        needs_grad = self.arguments.settings.needs_grad
        gradients = wire_of(self.members, self.arguments.ring.timeout, names[1], most_ctas) if needs_grad else keys
        for wire in (keys, gradients):
            wire.open(self.tensors[0].device)
        return keys, gradients

    def _prepared(self) -> tuple[_BlockSetup, BlockOptions, Tensors]:
        setup, (q, k, v), settings = self._setup(), self.tensors, self.arguments.settings
        padding = None
        if self.masks.padding is not None:
            padding = self._whole_padding(self.masks.padding)
            k, v = without_padding(k, v, self.masks.padding)
        deterministic = settings.deterministic or torch.are_deterministic_algorithms_enabled()
        seed = 0 if self.masks.seed is None else int(self.masks.seed.item())
        return setup, BlockOptions(settings.scale, deterministic, settings.dropout_p, settings.softcap, padding, seed), (q, k, v)

    def _whole_padding(self, padding: torch.Tensor) -> torch.Tensor:
        """Returns the padding mask of all ranks' keys, (B, N) bool."""
        ring, size, wire = self.arguments.ring, self.members.size, None
        if size > 1:
            wire = wire_of(self.members, ring.timeout)
            wire.open(padding.device)
        rows = [ShardSpec(spans(ring.seq_len, rank, size, ring.layout), (0, 1)) for rank in range(size)]
        whole = [ShardSpec(((0, ring.seq_len, 1),), (0, 1))] * size
        (mask,) = reshard([padding.to(torch.uint8)[..., None]], [rows], [whole], self.members.rank, wire, "padding masks")
        return mask[..., 0].bool()

    def _work(self, setup: _BlockSetup, options: BlockOptions, q: torch.Tensor, rest: Any = None) -> Blocks | BlocksAndBranches:
        blocks = Blocks(setup.parts, options, q, rest)
        if setup.branches is None:
            return blocks
        return BlocksAndBranches(blocks, Branches(setup.branches, False, Masks(options.padding, options.seed, 0), q, rest))

    def forward(self) -> tuple[torch.Tensor, torch.Tensor]:
        setup, options, (q, k, v) = self._prepared()
        work = self._work(setup, options, q)
        run.forward(work, setup.steps, k, v, self._wires(setup)[0], setup.depth)
        return work.results()

    def backward(self, dout: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, dlse: torch.Tensor | None) -> Tensors:
        setup, options, (q, k, v) = self._prepared()
        work = self._work(setup, options, q, (kernel_ready(dout), kernel_ready(out), lse, dlse))
        dk, dv = run.backward(work, setup.steps, k, v, self._wires(setup), setup.depth)
        return work.dq(), dk.to(k.dtype), dv.to(v.dtype)


def _of_blocks(settings: CallSettings) -> CallSettings:
    """Returns the settings of the blocks' part. ``"nested"`` concerns only pairs that branches share, so the blocks use "auto"."""
    return settings._replace(backend="auto") if settings.branches is not None and settings.backend == NESTED else settings
