"""Cross-entropy with the output layer in chunks of positions: the logits of 2^20 tokens × 100k words never exist all at once."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from dilated_attention.backends.base import accumulation_dtype
from dilated_attention.models.tokens import check_range
from dilated_attention.pattern.checks import as_int, shown
from dilated_attention.validation import not_a_tensor

# bytes of one chunk's logits in float32; up to three such tensors exist at once (logits, their softmax, its gradient)
CHUNK_BYTES = 64 * 2**20


def chunked_cross_entropy(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, *, chunk: int | None = None, ignore_index: int = -100
) -> torch.Tensor:
    """Computes the mean over the targets of −log softmax(hidden · weightᵀ)[target], in nats.

    Several chunks are recomputed in the backward, which costs one more matrix product, so that memory only holds one chunk of logits.

    Args:
        hidden: (…, E).
        weight: (V, E).
        targets: (…) integers in 0 … V − 1; ``ignore_index`` for positions that do not count.
        chunk: positions per chunk; None for as many as keep its logits below 64 MiB.

    Returns:
        float32 scalar, float64 for float64; 0 with gradient 0 if no position counts.

    Raises:
        TypeError: if targets are not integers.
        ValueError: if the numbers of targets and positions differ, or targets on the CPU are out of range.
    """
    total = summed_cross_entropy(hidden, weight, targets, chunk=chunk, ignore_index=ignore_index)
    return total / (targets != ignore_index).sum().clamp(min=1)


def summed_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    chunk: int | None = None,
    ignore_index: int = -100,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Computes the sum instead of the mean; see ``chunked_cross_entropy``. ``dtype``: in which, where it is another's loss."""
    if not isinstance(targets, torch.Tensor):
        raise not_a_tensor("targets", targets, "an integer tensor")
    if targets.is_floating_point() or targets.is_complex() or targets.dtype is torch.bool:
        raise TypeError(f"targets has dtype {targets.dtype}; expected integers, the token of each position: convert with .long()")
    for name, tensor in (("hidden", hidden), ("weight", weight)):
        if not isinstance(tensor, torch.Tensor) or tensor.ndim < 1:
            raise TypeError(f"{name} is {shown(tensor)} ({type(tensor).__name__}); expected a tensor whose last dimension is the width")
    if chunk is not None:
        chunk = as_int("chunk", chunk, minimum=1)
    ignore_index = as_int("ignore_index", ignore_index)
    if targets.numel() != hidden.shape[:-1].numel():
        raise ValueError(
            f"targets has shape {tuple(targets.shape)} and hidden has {tuple(hidden.shape)}; expected one target for each of its positions"
        )
    check_range("targets", targets, weight.shape[0], ignore_index=ignore_index)
    hidden, targets = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    if chunk is None:
        chunk = max(1, CHUNK_BYTES // (4 * weight.shape[0]))
    single = hidden.shape[0] <= chunk
    vocabulary, weight = weight.shape[0], _aligned(weight)
    dtype = accumulation_dtype(hidden.dtype) if dtype is None else dtype
    total = hidden.new_zeros((), dtype=dtype)
    for rows, wanted in zip(hidden.split(chunk), targets.split(chunk), strict=True):
        if single:
            total = total + _sum(rows, weight, wanted, vocabulary, ignore_index, dtype)
        else:
            # nothing inside is random, so the random state need not be saved and restored
            total = total + checkpoint(
                _sum, rows, weight, wanted, vocabulary, ignore_index, dtype, use_reentrant=False, preserve_rng_state=False
            )
    return total


def _aligned(weight: torch.Tensor) -> torch.Tensor:
    """The weight with rows of zeros up to the next multiple of 8, on a GPU.

    Rows of logits then begin at multiples of 16 bytes. For the 100,277 words of a common vocabulary cuBLAS uses kernels that read them
    element by element, which made two thirds of a training step of a small model.
    """
    missing = -weight.shape[0] % 8
    if not missing or weight.device.type != "cuda":
        return weight
    if torch.is_autocast_enabled("cuda") and weight.dtype is torch.float32:
        # once, not for each chunk: autocast keeps casts of parameters alone
        weight = weight.to(torch.get_autocast_dtype("cuda"))
    return F.pad(weight, (0, 0, 0, missing))


def _sum(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, vocabulary: int, ignore_index: int, dtype: torch.dtype
) -> torch.Tensor:
    """Of the first ``vocabulary`` rows of the weight."""
    logits = F.linear(hidden, weight)[:, :vocabulary]
    return F.cross_entropy(logits.to(dtype), targets.long(), ignore_index=ignore_index, reduction="sum")
