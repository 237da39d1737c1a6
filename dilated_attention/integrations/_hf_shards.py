"""``shard_inputs``: the part of a model's inputs that one of the processes of a sequence takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dilated_attention.distributed.sharding.layout import local_positions, shard_sequence
from dilated_attention.integrations._hf_attend import packed_bounds
from dilated_attention.integrations._hf_mask import document_starts


def shard_inputs(
    inputs: Mapping[str, Any], *, group: Any = None, mesh: Any = None, layout: str = "contiguous", ignore_index: int = -100
) -> dict[str, Any]:
    """Returns this process's shard of a model's inputs, for ``"ring_dilated"`` and ``"ring"``. Needs no communication.

    Every tensor whose second dimension is the sequence length N is sharded; ``position_ids`` are those in the whole sequence. With
    ``labels``, the targets are shifted before they are sharded, so that no process needs its neighbour's. The result then contains
    ``shift_labels`` and ``num_items_in_batch``, the number of targets of the whole sequence. The processes' losses then sum to the loss of
    the whole sequence, and so do their gradients.

    Packed documents of one row are told by ``cu_seq_lens_q`` and ``cu_seq_lens_k``, by ``position_ids`` that begin again or by another
    ``seq_idx``, whatever mask stands beside them. The result has their bounds in the whole sequence as ``cu_seq_lens_q`` and ``_k``.

    Args:
        inputs: inputs of the whole sequence, equal on all processes; they must include ``input_ids`` or ``inputs_embeds`` (B, N, …).
        group, mesh, layout: the same as given to ``register``.
        ignore_index: the label of positions that do not count.

    Returns:
        A new dict to call the model with: ``model(**shard_inputs(inputs))``, (B, n, …).

    Raises:
        ValueError: if neither ``input_ids`` nor ``inputs_embeds`` is given, several rows hold packed documents, or the mask holds other
            numbers than 0 and 1.
    """
    if group is not None and mesh is not None:
        raise ValueError("group and mesh are both given; a sequence is spread over one of them: pass group= or mesh=")
    place = mesh if group is None else group
    first = inputs.get("input_ids", inputs.get("inputs_embeds"))
    if first is None:
        raise ValueError(
            f"inputs are {', '.join(inputs) or 'none'}; expected input_ids or inputs_embeds among them, whose length is the sequence's"
        )
    batch, length = first.shape[:2]
    whole = dict(inputs)
    if whole.get("labels") is not None and "shift_labels" not in whole:
        labels = whole["labels"]
        whole["shift_labels"] = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=ignore_index)
        whole.setdefault("num_items_in_batch", int((whole["shift_labels"] != ignore_index).sum()))
    if whole.get("position_ids") is None:
        whole.pop("position_ids", None)
    bounds = _bounds_of(whole, length)
    if bounds is not None:
        whole |= {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
    names = [name for name, x in whole.items() if isinstance(x, torch.Tensor) and x.ndim >= 2 and x.shape[1] == length]
    parts = shard_sequence(place, [whole[name] for name in names], [1] * len(names), layout=layout)
    whole |= dict(zip(names, parts, strict=True))
    if "position_ids" not in whole:
        positions = local_positions(place, length, layout=layout, device=first.device)
        whole["position_ids"] = positions.expand(batch, -1)
    if layout != "contiguous" and whole.get("attention_mask") is None:
        # otherwise transformers would interpret jumps of positions as packed documents
        whole["attention_mask"] = torch.ones_like(whole["position_ids"], dtype=torch.bool)
    return whole


def _bounds_of(whole: Mapping[str, Any], length: int) -> torch.Tensor | None:
    """Returns the bounds of packed documents, int32 (documents + 1,); None for one document a row."""
    mask = whole.get("attention_mask")
    key_mask = mask if isinstance(mask, torch.Tensor) and mask.ndim == 2 else None
    if key_mask is not None and bool(((key_mask != 0) & (key_mask != 1)).any()):
        raise ValueError(
            f"attention_mask {tuple(key_mask.shape)} holds other numbers than 0 and 1, of which transformers makes ones; expected 0 for "
            "padding, 1 for tokens, and packed documents told by position_ids that begin again, or by cu_seq_lens_q and cu_seq_lens_k"
        )
    if whole.get("cu_seq_lens_q") is not None or whole.get("cu_seq_lens_k") is not None:
        return packed_bounds(whole.get("cu_seq_lens_q"), whole.get("cu_seq_lens_k"))
    # positions of images have three dimensions, and repeat
    inputs = (whole.get("position_ids"), whole.get("seq_idx"))
    position_ids, seq_idx = (x if isinstance(x, torch.Tensor) and x.ndim == 2 else None for x in inputs)
    if position_ids is None and seq_idx is None:
        return None
    real = None if key_mask is None else key_mask.bool()
    starts = document_starts(position_ids, seq_idx, real)
    if mask is None and position_ids is not None:
        # as transformers finds documents where there is no mask: positions that leave numbers out begin one, too
        starts[:, 1:] |= position_ids.diff(dim=1) != 1
    if not bool(starts.any()):
        return None
    if starts.shape[0] > 1:
        raise ValueError(
            f"position_ids or seq_idx begin anew in {starts.shape[0]} rows: packed documents are one row; expected (1, sum of lengths)"
        )
    # padding before the first token is no part of its document, whose segments begin there
    starts[0, 0 if real is None else real[0].int().argmax()] = True
    where = starts[0].nonzero()[:, 0]
    return torch.cat([where.new_zeros(1), where[where > 0], where.new_full((1,), length)]).to(torch.int32)
