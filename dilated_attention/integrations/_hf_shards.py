"""``shard_inputs``: the part of a model's inputs that one of the processes of a sequence takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dilated_attention.distributed.sharding.layout import local_positions, shard_sequence


def shard_inputs(
    inputs: Mapping[str, Any], *, group: Any = None, mesh: Any = None, layout: str = "contiguous", ignore_index: int = -100
) -> dict[str, Any]:
    """Returns this process's shard of a model's inputs, for ``"ring_dilated"`` and ``"ring"``. Needs no communication.

    Every tensor whose second dimension is the sequence length N is sharded; ``position_ids`` are those in the whole sequence. With
    ``labels``, the targets are shifted before they are sharded, so that no process needs its neighbour's. The result then contains
    ``shift_labels`` and ``num_items_in_batch``, the number of targets of the whole sequence. The processes' losses then sum to the loss of
    the whole sequence, and so do their gradients.

    Args:
        inputs: inputs of the whole sequence, equal on all processes; they must include ``input_ids`` or ``inputs_embeds`` (B, N, …).
        group, mesh, layout: the same as given to ``register``.
        ignore_index: the label of positions that do not count.

    Returns:
        A new dict to call the model with: ``model(**shard_inputs(inputs))``, (B, n, …).

    Raises:
        ValueError: if neither ``input_ids`` nor ``inputs_embeds`` is given.
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
