"""Losses: cross-entropy with the output layer in chunks of positions, and of a sequence that is sharded over several processes.

In chunks the logits of 2^20 tokens × 100k words never exist all at once. Torch's own ``linear_cross_entropy`` (2.13) has chunks, too, but
not inside torch.compile.

Of a sharded sequence each process computes the loss of its own rows, and its backward gives their share of every parameter's gradient. The
gradient of the whole loss is the sum of the shares. DDP and FSDP2 compute the *mean* over their processes. Therefore the loss of a process
has W times its share as gradient here, and the mean is exact, however unequal the shards are:

    loss = Σ_r total_r / Σ_r count_r (its value, on every process),    ∂loss on process r = W · ∂total_r / Σ_r count_r

The mean of the processes' own means, ``cross_entropy`` on each shard, is the same only if every process has equally many targets that
count. With data parallelism around it (a mesh of dp × cp, DDP or FSDP2 over all of it), pass the axis that shares the sequence: the rows of
the mesh are then averaged with equal weight. For the mean over all targets of all rows pass ``group=torch.distributed.group.WORLD``.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from dilated_attention.backends.base import accumulation_dtype
from dilated_attention.distributed.comm.group import group_name_of, members_named
from dilated_attention.functional.arguments import place_in
from dilated_attention.models.text import check_integers, check_range
from dilated_attention.pattern.checks import as_int, shown

# bytes of one chunk's logits in float32; up to three such tensors exist at once (logits, their softmax, its gradient)
CHUNK_BYTES = 64 * 2**20


def sharded_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    group: Any = None,
    mesh: Any = None,
    chunk: int | None = None,
    ignore_index: int = -100,
) -> torch.Tensor:
    """Computes the mean over the targets of all processes of a group of −log softmax(hidden · weightᵀ)[target], in nats.

    All processes must call it. Several chunks are recomputed in the backward, which costs one more matrix product, so that memory only
    holds one chunk of logits.

    Args:
        hidden: (…, E), this process's rows.
        weight: (V, E).
        targets: (…) integers in 0 … V − 1, of the same rows (shift the whole sequence first, then shard it); ``ignore_index`` for
            positions that do not count.
        group, mesh: the processes, see ``ring_attention``; None for all.
        chunk: positions per chunk; None for as many as keep its logits below 64 MiB.

    Returns:
        float32 scalar, float64 for float64, equal on all processes; 0 with gradient 0 if no position counts. Its gradient is meant for DDP,
        FSDP2 or ``average_gradients``.

    Raises:
        TypeError: if targets are not integers.
        ValueError: if the numbers of targets and positions differ, weight has not two dimensions, or targets on the CPU are out of range.
    """
    check_integers("targets", targets)
    for name, tensor in (("hidden", hidden), ("weight", weight)):
        if not isinstance(tensor, torch.Tensor) or tensor.ndim < 1:
            raise TypeError(f"{name} is {shown(tensor)} ({type(tensor).__name__}); expected a tensor whose last dimension is the width")
    if weight.ndim != 2 or not weight.shape[0]:
        raise ValueError(f"weight has shape {tuple(weight.shape)}; expected (vocabulary, width)")
    chunk = max(1, CHUNK_BYTES // (4 * weight.shape[0])) if chunk is None else as_int("chunk", chunk, minimum=1)
    ignore_index = as_int("ignore_index", ignore_index)
    if targets.numel() != hidden.shape[:-1].numel():
        raise ValueError(
            f"targets has shape {tuple(targets.shape)} and hidden has {tuple(hidden.shape)}; expected one target for each of its positions"
        )
    check_range("targets", targets, weight.shape[0], ignore_index=ignore_index)
    hidden, targets = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    # nothing inside is random, so the random state need not be saved and restored
    in_parts = partial(checkpoint, cross_entropy, use_reentrant=False, preserve_rng_state=False)
    run = cross_entropy if hidden.shape[0] <= chunk else in_parts
    total, padded = hidden.new_zeros((), dtype=accumulation_dtype(hidden.dtype)), _aligned(weight)
    for rows, wanted in zip(hidden.split(chunk), targets.split(chunk), strict=True):
        total = total + run(rows, padded, wanted, weight.shape[0], ignore_index=ignore_index, reduction="sum")
    return sharded_mean(total, (targets != ignore_index).sum(), group=group, mesh=mesh)


def _aligned(weight: torch.Tensor) -> torch.Tensor:
    """The weight with rows of zeros up to the next multiple of 8, on a GPU, so that rows of logits begin at multiples of 16 bytes. For a
    common vocabulary's 100,277 words cuBLAS reads others element by element, which made two thirds of a training step of a small model."""
    missing = -weight.shape[0] % 8
    if not missing or weight.device.type != "cuda":
        return weight
    if torch.is_autocast_enabled("cuda") and weight.dtype is torch.float32:
        # once, not for each chunk: autocast keeps casts of parameters alone
        weight = weight.to(torch.get_autocast_dtype("cuda"))
    return F.pad(weight, (0, 0, 0, missing))


def cross_entropy(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, vocabulary: int | None = None, **options: Any
) -> torch.Tensor:
    """torch's, of the logits of the first ``vocabulary`` rows of the weight, in float32 or float64."""
    logits = F.linear(hidden, weight)[:, :vocabulary]
    return F.cross_entropy(logits.to(accumulation_dtype(logits.dtype)), targets.long(), **options)


def sharded_mean(total: torch.Tensor, count: torch.Tensor, *, group: Any = None, mesh: Any = None) -> torch.Tensor:
    """Computes Σ total / Σ count over the processes of a group, for any loss that is a sum over rows; all of them must call it.

    Args:
        total: scalar with an autograd graph, the sum over this process's rows.
        count: scalar, how many of its rows count.
        group, mesh: the processes, see ``ring_attention``; None for all.

    Returns:
        Scalar in total's dtype, equal on all processes; 0 with gradient 0 if no row counts. Its gradient on a process is W times that
        process's share.
    """
    for name, scalar in (("total", total), ("count", count)):
        if not isinstance(scalar, torch.Tensor):
            raise TypeError(f"{name} is {shown(scalar)} ({type(scalar).__name__}); expected a scalar tensor")
    group_name = group_name_of(group, mesh)
    if not group_name:
        return total / count.clamp(min=1)
    # float64 represents any count exactly
    sums = sum_over_group(torch.stack([total.detach().double(), count.double()]), group_name)
    whole = sums[1].clamp(min=1)
    share = total * (place_in(group_name)[1] / whole).to(total.dtype)
    # exactly the value of the whole loss, but the gradient of the share
    return (sums[0] / whole).to(total.dtype) + (share - share.detach())


@torch.library.custom_op("dilated_attention::sum_over_group", mutates_args=())
def sum_over_group(x: torch.Tensor, group_name: str) -> torch.Tensor:
    """Sums x over the processes of a group. It is an op that takes the group's name, so torch.compile need not look up the group."""
    total = x.clone()
    dist.all_reduce(total, group=members_named(group_name).group)
    return total


@sum_over_group.register_fake
def _(x: torch.Tensor, group_name: str) -> torch.Tensor:
    return torch.empty_like(x)


def _keep_group(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.group_name = inputs[1]


def _sum_gradients(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
    return sum_over_group(grad.contiguous(), ctx.group_name), None


# every process's loss depends on x of all: the gradient is that of the sum of their losses
sum_over_group.register_autograd(_sum_gradients, setup_context=_keep_group)


def first_of_group(x: torch.Tensor, group_name: str) -> torch.Tensor:
    """Returns the first process's x on every process of a group, e.g. a random draw; x has equal shapes."""
    if not group_name:
        return x
    return sum_over_group(x if place_in(group_name)[0] == 0 else torch.zeros_like(x), group_name)


def average_gradients(module: nn.Module, *, group: Any = None, mesh: Any = None) -> None:
    """Replaces every parameter's gradient with its mean over the processes of a group, for a model in neither DDP nor FSDP2.

    Args:
        module: a model with equal parameters on all processes; the same parameters must lack a gradient on each.
        group, mesh: the processes, see ``ring_attention``; None for all.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module is {shown(module)} ({type(module).__name__}); expected a torch.nn.Module")
    members = members_named(group_name_of(group, mesh))
    if members.size == 1:
        return
    grads = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    for work in [dist.all_reduce(grad, group=members.group, async_op=True) for grad in grads]:
        work.wait()
    for grad in grads:
        grad.div_(members.size)
