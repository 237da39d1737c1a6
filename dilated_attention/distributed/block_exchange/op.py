"""The custom op of block-sparse attention over a sequence sharded across processes: schema, fake, autograd.

A selective-checkpointing policy should list ``torch.ops.dilated_attention.ring_block_sparse_attention`` as must-save: then nothing is
exchanged a second time in the recomputation. Its backward needs only its own out and lse.
"""

from __future__ import annotations

from typing import Any

import torch

from dilated_attention.distributed.block_exchange.context_parallel import (
    BlockArguments,
    RingBlockMasks,
    ring_blocks_backward,
    ring_blocks_forward,
)
from dilated_attention.distributed.comm.call_consistency import RingCall
from dilated_attention.distributed.exchange.requirements import ring_blocks_requirement
from dilated_attention.engine.blocks.run import BlockSettings
from dilated_attention.engine.ops.block_sparse import new_gradients, new_like, new_lse
from dilated_attention.engine.ops.gradients import register_gradients
from dilated_attention.engine.ops.op_hooks import op_hook
from dilated_attention.pattern import pattern_from_spec


@torch.library.custom_op("dilated_attention::ring_block_sparse_attention", mutates_args=())
@op_hook(ring_blocks_requirement)
def ring_block_sparse_attention_op(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    key_padding_mask: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    seed: torch.Tensor | None,
    spec: str,
    is_causal: bool,
    scale: float,
    dropout_p: float,
    deterministic: bool,
    needs_grad: bool,
    backend: str,
    group_name: str,
    layout: str,
    seq_len: int,
    head_steps: int,
    timeout: float,
    lse_grad: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns (out (B, n, H, D), lse (B, H, n), (N, number of the call)).

    ``seq_len`` is −1 if the ranks have to ask each other. The caller checks the arguments.
    """
    arguments = BlockArguments(
        pattern_from_spec(spec),
        BlockSettings(is_causal, scale, dropout_p, deterministic, needs_grad, backend),
        RingCall(group_name, layout, "all_gather", seq_len, 0, timeout, lse_grad),
        head_steps,
    )
    out, lse, whole = ring_blocks_forward((q, k, v), RingBlockMasks(key_padding_mask, cu_seqlens, seed), arguments)
    return out, lse, torch.tensor(whole, dtype=torch.int64)


@torch.library.custom_op("dilated_attention::ring_block_sparse_attention_backward", mutates_args=())
@op_hook(ring_blocks_requirement)
def ring_block_sparse_attention_backward_op(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    whole: torch.Tensor,
    key_padding_mask: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    seed: torch.Tensor | None,
    spec: str,
    is_causal: bool,
    scale: float,
    dropout_p: float,
    deterministic: bool,
    needs_grad: bool,
    backend: str,
    group_name: str,
    layout: str,
    seq_len: int,
    head_steps: int,
    timeout: float,
    lse_grad: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns (dq, dk, dv) of this rank's rows, contiguous, in the inputs' dtype."""
    N, number = whole.tolist()
    arguments = BlockArguments(
        pattern_from_spec(spec),
        BlockSettings(is_causal, scale, dropout_p, deterministic, needs_grad, backend),
        RingCall(group_name, layout, "all_gather", N, 0, timeout, lse_grad),
        head_steps,
    )
    masks = RingBlockMasks(key_padding_mask, cu_seqlens, seed)
    dq, dk, dv = ring_blocks_backward((dout, q, k, v, out, lse), dlse, masks, arguments, number)
    return dq, dk, dv


@ring_block_sparse_attention_op.register_fake
def _(q: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return new_like(q), new_lse(q), torch.empty((2,), dtype=torch.int64, device="cpu")


ring_block_sparse_attention_backward_op.register_fake(new_gradients)
register_gradients(
    ring_block_sparse_attention_op,
    ring_block_sparse_attention_backward_op,
    "softmax attention in plain autograd under the mask pattern.dense_mask(N, N, H), on one process",
)
