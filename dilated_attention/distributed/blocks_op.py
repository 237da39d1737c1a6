"""The custom op of block-sparse attention over a sequence that several processes share: schema, fake, autograd.

``torch.ops.dilated_attention.ring_block_sparse_attention`` is what a selective-checkpointing policy lists as must-save: then nothing
travels a second time in the recomputation. Its backward needs its own out and lse alone.
"""

from __future__ import annotations

from typing import Any

import torch

from dilated_attention.distributed.agreement import RingCall
from dilated_attention.distributed.blocks_call import BlockArguments, BlockMasks, ring_blocks_backward, ring_blocks_forward
from dilated_attention.distributed.needs import ring_blocks_need
from dilated_attention.engine.block_op import new_like, new_lse
from dilated_attention.engine.block_run import BlockSettings
from dilated_attention.engine.watched import watched
from dilated_attention.pattern import pattern_from_spec


@torch.library.custom_op("dilated_attention::ring_block_sparse_attention", mutates_args=())
@watched(ring_blocks_need)
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
    """(out (B, n, H, D), lse (B, H, n), (N, number of the call)). ``seq_len`` is −1 where the ranks have to ask each other. Arguments are checked by the caller."""
    arguments = BlockArguments(
        pattern_from_spec(spec),
        BlockSettings(is_causal, scale, dropout_p, deterministic, needs_grad, backend),
        RingCall(group_name, layout, "all_gather", seq_len, 0, timeout, lse_grad),
        head_steps,
    )
    out, lse, whole = ring_blocks_forward((q, k, v), BlockMasks(key_padding_mask, cu_seqlens, seed), arguments)
    return out, lse, torch.tensor(whole, dtype=torch.int64)


@torch.library.custom_op("dilated_attention::ring_block_sparse_attention_backward", mutates_args=())
@watched(ring_blocks_need)
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
    """(dq, dk, dv) of this rank's rows, contiguous, in the inputs' dtype."""
    N, number = whole.tolist()
    arguments = BlockArguments(
        pattern_from_spec(spec),
        BlockSettings(is_causal, scale, dropout_p, deterministic, needs_grad, backend),
        RingCall(group_name, layout, "all_gather", N, 0, timeout, lse_grad),
        head_steps,
    )
    masks = BlockMasks(key_padding_mask, cu_seqlens, seed)
    dq, dk, dv = ring_blocks_backward((dout, q, k, v, out, lse), dlse, masks, arguments, number)
    return dq, dk, dv


@ring_block_sparse_attention_op.register_fake
def _(q: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return new_like(q), new_lse(q), torch.empty((2,), dtype=torch.int64, device="cpu")


@ring_block_sparse_attention_backward_op.register_fake
def _(
    dout: torch.Tensor, dlse: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, ...]:
    return tuple(new_like(x) for x in (q, k, v))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:6], *output)
    ctx.settings = inputs[6:]
    # a pattern that holds a function lives until the backward has read its name
    ctx.pattern = pattern_from_spec(inputs[6])


def _backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None, _: Any) -> tuple[torch.Tensor | None, ...]:
    q, k, v, key_padding_mask, cu_seqlens, seed, out, lse, whole = ctx.saved_tensors
    if dout is None:
        dout = torch.zeros_like(out)
    tensors = (dout.to(q.dtype), dlse, q, k, v, out, lse, whole, key_padding_mask, cu_seqlens, seed)
    dq, dk, dv = ring_block_sparse_attention_backward_op(*tensors, *ctx.settings)
    return dq, dk, dv, *(None,) * (3 + len(ctx.settings))


def _no_double_backward(ctx: Any, *_: Any) -> None:
    raise NotImplementedError(
        "ring_block_sparse_attention has no second derivative: its backward keeps no graph. For gradients of gradients at small N, use "
        "softmax attention in plain autograd under the mask pattern.dense_mask(N, N, H), on one process"
    )


ring_block_sparse_attention_op.register_autograd(_backward, setup_context=_setup_context)
ring_block_sparse_attention_backward_op.register_autograd(_no_double_backward)
