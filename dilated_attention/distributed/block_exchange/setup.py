"""The setup of block-sparse attention over a sharded sequence, alone or with dilated branches: steps, parts and their backends."""

from __future__ import annotations

import functools
from typing import Any

import torch

from dilated_attention.distributed.block_exchange import cost
from dilated_attention.distributed.block_exchange.parts import BlockPart, BlocksAndBranches, make_block_steps
from dilated_attention.distributed.block_exchange.plan import ascending_runs, needs_of
from dilated_attention.distributed.comm.call_consistency import RingCall
from dilated_attention.distributed.comm.group import Members
from dilated_attention.distributed.exchange.computation import Computation, StepParts
from dilated_attention.distributed.exchange.cost import FEW_CTAS, device_memory
from dilated_attention.distributed.exchange.parts import Tensors, parts_of
from dilated_attention.distributed.exchange.plan import RingBlockProblem, RingProblem
from dilated_attention.distributed.exchange.rows.messages import StepPlan
from dilated_attention.distributed.exchange.setup import LANES, RingSetup
from dilated_attention.distributed.sharding.layout import spans
from dilated_attention.engine.branches.plan import Range
from dilated_attention.engine.ops.prepare import prepare
from dilated_attention.engine.ops.settings import CallSettings
from dilated_attention.pattern import pattern_from_spec


def make_block_setup(
    members: Members, tensors: Tensors, documents: tuple[Range, ...], settings: CallSettings, ring: RingCall, padding: torch.Tensor | None
) -> RingSetup:
    """Makes the setup of calls like this one.

    Raises:
        BackendUnavailable: if this rank has no kernels for some pass.
    """
    q, k, _ = tensors
    me, device = members.rank, q.device
    held = tuple(ascending_runs(spans(ring.seq_len, rank, members.size, ring.layout)) for rank in range(members.size))
    heads = q.shape[2], k.shape[2]
    ring_problem = RingBlockProblem(pattern_from_spec(settings.blocks), documents, held, *heads, settings.is_causal)
    needs = needs_of(ring_problem, device)
    branches: RingProblem | None = None
    if settings.branches is not None:
        for is_backward in (False, True) if settings.needs_grad else (False,):
            prepare(is_backward, (*tensors, q) if is_backward else tensors, settings.pattern, settings, padding, num_keys=ring.seq_len)
        branches = RingProblem(settings.pattern, documents, held, *heads, settings.is_causal)
    load = cost.load_of(ring_problem, needs, k.shape[0], k.shape[3], k.element_size(), branches)
    # heads that run different branches are not divided
    forced = 1 if branches is not None and branches.pattern.branch_heads != "all" else settings.sharding[-1]
    way = cost.choose(load, device_memory(device), forced)
    steps, parts, span = make_block_steps(ring_problem, me, way.steps, device, branches, settings)
    for step, some in zip(steps, parts, strict=True):
        for part in some:
            _check_backends(part, step, q, k, padding is not None)
    compute: Any = functools.partial(Computation, StepParts(parts, q))
    if branches is not None:
        of_branches = tuple(parts_of(branches, settings, step, me, span) for step in steps)
        compute = functools.partial(BlocksAndBranches, StepParts(parts, q), StepParts(of_branches, q))
    return RingSetup(
        steps=steps,
        nbytes=sum({id(part.lists): part.lists.nbytes for some in parts for part in some}.values()),
        lanes=LANES[way.lane.most_ctas == FEW_CTAS] if load.brought else None,
        compute=compute,
        digest=needs.digest,
    )


def _check_backends(part: BlockPart, step: StepPlan, q: torch.Tensor, k: torch.Tensor, has_padding: bool) -> None:
    """Chooses the backends of a part before any rank sends anything."""
    keys, (B, _, _, D) = k[:, :, slice(*step.kv_heads)], k.shape
    if not step.in_place:
        memory = torch.empty((step.rows, step.num_kv_heads, B, 2 * D), dtype=k.dtype, device="meta")
        keys = memory.permute(2, 0, 1, 3)[..., :D]
    for is_backward in (False, True) if part.settings.needs_grad else (False,):
        part.backend(q[:, :, slice(*part.heads)], keys[:, part.key_rows], has_padding, is_backward)
