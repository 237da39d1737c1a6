"""Checks of token ids and targets: always their type and shape, and their values if reading them does not make the host wait."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from dilated_attention.models.config import NUM_BASES
from dilated_attention.models.text.kmer_embedding import KmerEmbedding
from dilated_attention.validation import not_a_tensor


def check_tokens(name: str, tokens: Any) -> None:
    if not isinstance(tokens, torch.Tensor):
        raise not_a_tensor(name, tokens, "an integer tensor of shape (batch, sequence)")
    if tokens.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"{name} has dtype {tokens.dtype}; expected torch.int64 or int32: convert with .long()")
    if tokens.ndim != 2:
        raise ValueError(f"{name} has shape {tuple(tokens.shape)}; expected (batch, sequence): for one sequence use {name}[None]")


def check_ids(name: str, tokens: torch.Tensor, embedding: nn.Module, *, waits: bool = False, is_shard: bool = False) -> None:
    """Raises ValueError for tokens that a model's embedding does not have, like ``check_range``, and for bases in place of k-mer codes.

    Never for an embedding that is not of this library or torch, as it may accept ids outside the vocabulary.

    Args:
        is_shard: neighbouring tokens need not be neighbours in the sequence.
    """
    if isinstance(embedding, KmerEmbedding):
        if not has_values(tokens, waits=True) or not tokens.numel():
            return
        # a GPU is waited for once in the life of a model: bases in place of codes end in no error there
        if not has_values(tokens, waits=waits or embedding.is_new):
            return
        embedding.is_new, waits = False, True
        way_out = f"tokens of this model are codes of {embedding.k} bases: use model.encode(text or bases)"
        check_range(name, tokens, embedding.num_embeddings, waits=waits, limit=f"5^{embedding.k} − 1", way_out=way_out)
        # the code of a base after any but A is at least 5
        if not is_shard and bool((tokens < NUM_BASES).all()) and bool(tokens[..., :-1].any()):
            raise ValueError(f"{name} are bases, 0 to 4; expected codes below {embedding.num_embeddings}: {way_out}")
    elif isinstance(embedding, nn.Embedding):
        check_range(name, tokens, embedding.num_embeddings, waits=waits)


def has_values(tensor: torch.Tensor, *, waits: bool = False) -> bool:
    """Whether the host can read a tensor's values: on the CPU, or on any device if ``waits`` allows waiting for it.

    Compiled, mapped and fake tensors have no values to read, nor have those of a CUDA graph that is being captured.
    """
    if torch.compiler.is_compiling() or type(tensor) is not torch.Tensor or torch._C._are_functorch_transforms_active():
        return False
    if tensor.device.type == "cpu":
        return True
    return waits and tensor.device.type != "meta" and not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def check_range(
    name: str,
    tokens: torch.Tensor,
    vocab_size: int | None,
    *,
    ignore_index: int | None = None,
    waits: bool = False,
    limit: str = "vocab_size − 1",
    way_out: str = "check the tokenizer, or make the model with a larger vocab_size",
) -> None:
    """Raises ValueError for ids that are not in 0 … vocab_size − 1 and not ``ignore_index``; never if ``vocab_size`` is None.

    Checks only on the CPU, because elsewhere the host would have to wait for the device, unless ``waits`` allows it; see ``has_values``.
    ``limit`` and ``way_out`` are parts of the message.
    """
    if vocab_size is None or not has_values(tokens, waits=waits) or not tokens.numel():
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
    raise ValueError(f"{name} reach from {low} to {high}; expected 0 to {limit} = {vocab_size - 1}{but}: {way_out}")
