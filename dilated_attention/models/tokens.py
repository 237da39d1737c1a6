"""Checks of token ids and targets: always their type and shape, and their values if reading them does not make the host wait."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def check_tokens(name: str, tokens: Any) -> None:
    if not isinstance(tokens, torch.Tensor):
        raise TypeError(f"{name} is a {type(tokens).__name__}; expected an integer tensor of shape (batch, sequence)")
    if tokens.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"{name} has dtype {tokens.dtype}; expected torch.int64 or int32: convert with .long()")
    if tokens.ndim != 2:
        raise ValueError(f"{name} has shape {tuple(tokens.shape)}; expected (batch, sequence): for one sequence use {name}[None]")


def num_ids(embedding: nn.Module) -> int | None:
    """Returns how many ids a model's embedding has; None if it is not torch's, as it may then accept ids outside the vocabulary."""
    return embedding.num_embeddings if isinstance(embedding, nn.Embedding) else None


def check_range(name: str, tokens: torch.Tensor, vocab_size: int | None, *, ignore_index: int | None = None, waits: bool = False) -> None:
    """Raises ValueError for ids that are not in 0 … vocab_size − 1 and not ``ignore_index``; never if ``vocab_size`` is None.

    Checks only on the CPU, because elsewhere the host would have to wait for the device, unless ``waits`` allows it. Compiled, mapped and
    fake tensors have no values to check.
    """
    if (
        vocab_size is None
        or torch.compiler.is_compiling()
        or type(tokens) is not torch.Tensor
        or torch._C._are_functorch_transforms_active()
    ):
        return
    if tokens.device.type == "meta" or not (waits or tokens.device.type == "cpu") or not tokens.numel():
        return
    low, high = (int(x) for x in torch.aminmax(tokens))
    if low >= 0 and high < vocab_size:
        return
    if ignore_index is not None:
        counted = tokens[tokens != ignore_index]
        if not counted.numel():
            return
        low, high = (int(x) for x in torch.aminmax(counted))
        if low >= 0 and high < vocab_size:
            return
    but = "" if ignore_index is None else f", or {ignore_index} where a position does not count".replace("-", "−")
    raise ValueError(
        f"{name} reach from {low} to {high}; expected 0 to vocab_size − 1 = {vocab_size - 1}{but}: "
        "check the tokenizer, or make the model with a larger vocab_size"
    )
