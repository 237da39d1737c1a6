"""Block-sparse attention over a sharded sequence: its setup, its backends, and the work of a pass."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from dilated_attention.backends import NESTED, Backend, BackendUnavailable
from dilated_attention.distributed.block_exchange import cost
from dilated_attention.distributed.block_exchange.parts import BlockOptions, BlockPart, Blocks, BlocksAndBranches, make_block_steps
from dilated_attention.distributed.block_exchange.plan import RingBlockProblem, ascending_runs, needs_of
from dilated_attention.distributed.comm.call_consistency import Agreement, RingCall, agree_on_kernels, agreed_call
from dilated_attention.distributed.comm.group import Members
from dilated_attention.distributed.exchange import run
from dilated_attention.distributed.exchange.cost import choose_prefetch_depth, device_memory
from dilated_attention.distributed.exchange.parts import Branches, Masks, QueryPart, parts_of
from dilated_attention.distributed.exchange.plan import RingProblem
from dilated_attention.distributed.exchange.ring_pass import PassSetup, RingPass, Tensors, of_length
from dilated_attention.distributed.exchange.rows.messages import StepPlan
from dilated_attention.distributed.sharding.layout import spans
from dilated_attention.engine.blocks.run import request_of, select_backend
from dilated_attention.engine.branches.plan import Range
from dilated_attention.engine.ops.prepare import kernel_ready, prepare
from dilated_attention.engine.ops.settings import CallSettings
from dilated_attention.fork import cached_property
from dilated_attention.pattern import pattern_from_spec


@dataclass(frozen=True, eq=False, kw_only=True)
class BlockSetup(PassSetup):
    """What calls of block-sparse attention have in common.

    Args:
        parts, branches: what is computed in each step, of the blocks and of dilated branches.
        digest: see ``NeededBlocks``.
    """

    parts: tuple[tuple[BlockPart, ...], ...]
    branches: tuple[tuple[QueryPart, ...], ...] | None
    digest: str


class BlockPass(RingPass):
    """A pass of block-sparse attention, alone or with dilated branches."""

    def __init__(self, members: Members, inputs: tuple[Any, ...], settings: CallSettings, ring: RingCall, known: dict[Any, Any]) -> None:
        super().__init__(members, inputs, settings, ring, known)
        self.tensors = tuple(kernel_ready(x) for x in self.tensors)
        self.pattern = pattern_from_spec(settings.blocks)

    @classmethod
    def agree(
        cls, members: Members, inputs: tuple[Any, ...], settings: CallSettings, ring: RingCall, known: dict[Any, Any]
    ) -> tuple[Agreement, RingPass | None]:
        agreement = agreed_call(members, inputs, settings, ring, known, None)
        work = cls(members, inputs, settings, of_length(ring, agreement.seq_len), known)
        kernels = {"kernels": "available"}
        unavailable: BackendUnavailable | None = None
        try:
            if work.setup.digest:
                kernels["pattern (the blocks that its function keeps)"] = work.setup.digest
        except BackendUnavailable as error:
            # raising here would leave the other ranks waiting
            kernels["kernels"], unavailable = f"unavailable: {str(error).splitlines()[0]}", error
        agree_on_kernels(members, inputs, settings, ring, known, agreement, kernels)
        if unavailable is not None:
            raise unavailable
        return agreement, work if inputs[0].shape[0] else None

    @cached_property
    def setup(self) -> BlockSetup:
        return self.find_setup(self.pattern, *((x.shape, x.stride(), x.dtype, x.device) for x in self.tensors))  # type: ignore[no-any-return]

    def gather_padding(self) -> None:
        # backends are chosen by strides, which this changes
        _ = self.setup
        super().gather_padding()

    def make_setup(self) -> BlockSetup:
        settings, ring, forced = self.settings, self.ring, self.settings.sharding[-1]
        q, k, _ = self.tensors
        me, device = self.members.rank, q.device
        held = tuple(ascending_runs(spans(ring.seq_len, rank, self.members.size, ring.layout)) for rank in range(self.members.size))
        ring_problem = RingBlockProblem(self.pattern, self.documents, held, q.shape[2], k.shape[2], settings.is_causal)
        needs = needs_of(ring_problem, device)
        branches = self._branches(held) if settings.branches is not None else None
        load = cost.load_of(ring_problem, needs, k.shape[0], k.shape[3], k.element_size(), branches)
        # heads that run different branches are not divided
        way = cost.choose(load, device_memory(device), 1 if branches is not None and branches.pattern.branch_heads != "all" else forced)
        steps, plain, span = make_block_steps(ring_problem, me, way.steps, device, branches)
        exchanges = load.brought > 0
        parts = tuple(tuple(self._with_backends(part, step, exchanges) for part in some) for step, some in zip(steps, plain, strict=True))
        few = way.lane.most_ctas
        lanes = ("keys", "gradients", None) if few is None else ("few keys", "few gradients", few)
        return BlockSetup(
            steps=steps,
            depth=choose_prefetch_depth(load.held * max(way.steps)),
            nbytes=sum({id(part.lists): part.lists.nbytes for some in parts for part in some}.values()),
            lanes=lanes if exchanges else None,
            parts=parts,
            branches=None if branches is None else tuple(parts_of(branches, settings, step, me, span) for step in steps),
            digest=needs.digest,
        )

    def _branches(self, held: tuple[tuple[Range, ...], ...]) -> RingProblem:
        """Returns the dilated branches of the call, for which every pass has a kernel.

        Raises:
            BackendUnavailable: if one has none.
        """
        settings, (q, k, _), N = self.settings, self.tensors, self.ring.seq_len
        for is_backward in (False, True) if settings.needs_grad else (False,):
            views = (*self.tensors, q) if is_backward else self.tensors
            prepare(is_backward, views, settings.pattern, settings, self.own_padding, num_keys=N)
        return RingProblem(
            settings.pattern, self.documents, held, q.shape[2], k.shape[2], settings.is_causal, None, "all_gather", (k.shape[2],)
        )

    def _with_backends(self, part: BlockPart, step: StepPlan, exchanges: bool) -> BlockPart:
        if not part.lists.num_entries or not self.tensors[0].shape[0]:
            return part
        settings = self.settings
        q, k, _ = self.tensors
        keys = k[:, :, slice(*step.kv_heads)]
        if not step.in_place:
            memory = torch.empty((step.rows, step.num_kv_heads, k.shape[0], 2 * k.shape[3]), dtype=k.dtype, device="meta")
            keys = memory.permute(2, 0, 1, 3)[..., : k.shape[3]]
        views = (q[:, :, slice(*part.heads)], keys[:, part.keys])
        found: list[Backend | None] = []
        for is_backward in (False, True):
            request = request_of(part.lists, views, _of_blocks(settings), self.own_padding is not None, is_backward)
            # meanwhile the next step's keys, or the last one's gradients, are transferred
            request = replace(request, beside_exchange=exchanges)
            found.append(select_backend(request, _of_blocks(settings)) if settings.needs_grad or not is_backward else None)
        return replace(part, forward_backend=found[0], backward_backend=found[1])

    def _work(self, rest: Any = None) -> Blocks | BlocksAndBranches:
        settings, q = self.settings, self.tensors[0]
        deterministic = settings.deterministic or torch.are_deterministic_algorithms_enabled()
        options = BlockOptions(settings.scale, deterministic, settings.dropout_p, settings.softcap, self.padding, self.seed)
        blocks = Blocks(self.setup.parts, options, q, rest)
        if self.setup.branches is None:
            return blocks
        return BlocksAndBranches(blocks, Branches(self.setup.branches, False, Masks(self.padding, self.seed, 0), q, rest))

    def forward(self) -> tuple[torch.Tensor, torch.Tensor]:
        (_, k, v), setup, work = self.tensors, self.setup, self._work()
        run.forward(work, setup.steps, k, v, self.wires(setup)[0], setup.depth)
        out, lse = work.results()
        return out.contiguous(), lse.contiguous()

    def backward(self, dout: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, dlse: torch.Tensor | None) -> Tensors:
        (_, k, v), setup = self.tensors, self.setup
        work = self._work((kernel_ready(dout), kernel_ready(out), lse, dlse))
        dk, dv = run.backward(work, setup.steps, k, v, self.wires(setup), setup.depth)
        return work.dq().contiguous(), dk.to(k.dtype).contiguous(), dv.to(v.dtype).contiguous()


def _of_blocks(settings: CallSettings) -> CallSettings:
    """Returns the settings of the blocks' part. ``"nested"`` concerns only pairs that branches share, so the blocks use "auto"."""
    return settings._replace(backend="auto") if settings.branches is not None and settings.backend == NESTED else settings
