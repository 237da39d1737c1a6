"""A whole batch and the part of it that one process of a sequence takes: which models and inputs can be cut, documents, checksums."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import torch

from dilated_attention.integrations._hf_settings import configs_of
from dilated_attention.integrations._hf_shards import shard_inputs

# inputs without a dimension of positions
_WHOLE = ("cu_seq_lens_q", "cu_seq_lens_k", "num_items_in_batch")
_IGNORED = -100


def check_model(model: Any, base: Any) -> None:
    """Refuses models whose loss is no sum over positions, or whose layers mix positions other than by attention.

    Raises:
        ValueError, TypeError: saying which of it.
    """
    name = type(base).__name__
    if not hasattr(base, "loss_function") or not hasattr(base, "config"):
        raise TypeError(f"model is a {name}; expected a model of transformers before it is prepared, e.g. LlamaForCausalLM")
    parameters = inspect.signature(type(base).forward).parameters.values()
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        raise ValueError(f"{name}.forward takes no **kwargs, by which its loss knows of the other parts; expected e.g. LlamaForCausalLM")
    if not base._can_set_attn_implementation():
        raise ValueError(f"{name} computes its attention itself; expected a model of transformers' attention interface")
    if base.loss_function is not importlib.import_module("transformers.loss.loss_utils").ForCausalLMLoss:
        found = getattr(base.loss_function, "__name__", base.loss_function)
        raise ValueError(f"the loss of {name} is {found}, which may be no sum over positions; expected that of causal language models")
    for config in configs_of(base.config):
        kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
        if kinds or getattr(base, "_is_stateful", False) or getattr(config, "is_encoder_decoder", False):
            what = ", ".join(sorted(kinds)) or "recurrent layers or an encoder"
            raise ValueError(f"{name} has {what}, which need all positions in one process; expected full and sliding attention only")
    mixing = next((key for key, module in base.named_modules() if isinstance(module, torch.nn.modules.conv._ConvNd)), None)
    if mixing is not None:
        raise ValueError(f"{name} has a convolution, {mixing!r}, which reads neighbouring positions; expected attention only")
    for adapter in getattr(model, "peft_config", {}).values():
        if getattr(adapter, "is_prompt_learning", False):
            raise ValueError(f"the adapter is {adapter.peft_type}, which puts tokens before each part; expected one of weights, e.g. LoRA")


def check_inputs(given: dict[str, Any], config: Any, size: int) -> None:
    """Refuses inputs that have no part of one process.

    Raises:
        ValueError, TypeError: naming the input and its shape.
    """
    first = given.get("input_ids", given.get("inputs_embeds"))
    if first is None:
        raise ValueError(f"inputs are {', '.join(given)}; expected input_ids or inputs_embeds among them")
    length = first.shape[1]
    if length < size:
        raise ValueError(f"a sequence of {length} positions for {size} processes; expected at least one for each")
    if given.get("output_router_logits", getattr(config, "output_router_logits", False)):
        raise ValueError("output_router_logits is True: the router's loss is no sum over positions; expected False")
    # transformers 5.24 calls past_key_values cache
    for name in ("past_key_values", "cache", "logits_to_keep", "output_attentions"):
        if not isinstance(given.get(name, False), int) or given.get(name):
            raise ValueError(f"{name} is given with labels; expected none where processes share a sequence")
    if given.get("return_dict") is False:
        raise ValueError("return_dict is False; expected True, by which loss and logits are found")
    mask = given.get("attention_mask")
    if mask is not None and (not isinstance(mask, torch.Tensor) or mask.ndim != 2):
        shape = tuple(mask.shape) if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise ValueError(f"attention_mask is {shape}; expected padding, (B, {length}): other pairs than the model's own cannot be cut")
    for name, x in given.items():
        if not isinstance(x, torch.Tensor) or x.ndim == 0 or name in _WHOLE:
            continue
        if x.ndim < 2 or x.shape[1] != length or (name == "position_ids" and x.ndim != 2):
            raise ValueError(f"{name} has shape {tuple(x.shape)}; expected (B, {length}, …), a value for each position, which can be cut")


def checksum(x: torch.Tensor) -> int:
    """A number that differs, but for one case in very many, where the values or their order do."""
    flat = x.detach().reshape(-1)
    if x.is_floating_point():
        # embeddings are large: no copy of them in a wider type
        return int(flat.sum(dtype=torch.float64).view(torch.int64))
    return int(((flat.to(torch.int64) + 1) * torch.arange(1, 2 * flat.numel() + 1, 2, device=x.device)).sum())


def cut(given: dict[str, Any], place: Any, layout: str) -> tuple[dict[str, Any], torch.Tensor | None]:
    """Returns the arguments of the model's forward for this process's positions, and the bounds of packed documents in the whole."""
    given = {name: x for name, x in given.items() if name not in ("max_length_q", "max_length_k")}
    if "shift_labels" in given and "num_items_in_batch" not in given:
        given["num_items_in_batch"] = int((given["shift_labels"] != _IGNORED).sum())
    mine = shard_inputs(given, group=place, layout=layout)
    if "attention_mask" not in given or bool(given["attention_mask"].all()):
        # kernels without padding are faster; jumps of the layout are no documents: the masks of these calls know the bounds
        mine.pop("attention_mask", None)
    bounds = mine.pop("cu_seq_lens_q", None)
    mine.pop("cu_seq_lens_k", None)
    # keys of a part are no cache
    return mine | {"use_cache": False}, bounds
