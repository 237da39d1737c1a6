"""Refusals: what a transformers model may ask of its attention but is not supported here raises an error and is never ignored."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import torch

from dilated_attention.functional.ring import place_in
from dilated_attention.integrations._hf_mask import KeyMask
from dilated_attention.integrations._hf_settings import CONFIG_KEY, Settings, group_of

# arguments that models pass to every layer and that do not affect which keys a query sees, or that repeat what the mask says
WITHOUT_EFFECT = {
    "cache_position",
    "input_ids",
    "inputs_embeds",
    "is_first_iteration",
    "labels",
    "layer_idx",
    "logits_to_keep",
    "max_length_k",
    "max_length_q",
    "mm_token_type_ids",
    "num_items_in_batch",
    "output_hidden_states",
    "output_router_logits",
    "position_embeddings",
    "position_ids",
    "return_dict",
    "seq_idx",
    "shift_labels",
    "token_type_ids",
    "use_cache",
}
# arguments that change scores or keys in a way that no kernel here supports
_CANNOT = {
    "position_bias": "a bias added to the scores",
    "score_mod": "a function of the scores",
    "alibi": "a bias added to the scores",
    "sinks": "sinks that the model computes for each query",
    "head_mask": "a factor on every head",
    "indices": "keys chosen by the model itself",
    "block_indices": "keys chosen by the model itself",
    "block_table": "a paged cache",
    "cache": "a paged cache",
    "output_attentions": "the attention weights, which are never held all at once",
}


def ignore(arguments: Iterable[str]) -> None:
    """Adds arguments of layers to those that have no effect on attention."""
    names = (arguments,) if isinstance(arguments, str) else tuple(arguments)
    for name in names:
        if name in _CANNOT:
            raise ValueError(
                f'ignored holds {name!r} ({_CANNOT[name]}), which changes attention; load the model with attn_implementation="eager"'
            )
    WITHOUT_EFFECT.update(names)


def refuse_unknown(name: str, kwargs: dict[str, Any]) -> None:
    for argument, value in kwargs.items():
        if value is None or value is False or argument in WITHOUT_EFFECT:
            continue
        if argument in _CANNOT:
            raise ValueError(
                f"attention {name!r}: the model asks for {argument} ({_CANNOT[argument]}), which no kernel here computes; expected None. "
                'Load it with attn_implementation="eager"'
            )
        raise ValueError(
            f"attention {name!r}: the layer is given {argument}, of which it is not known whether it changes attention; expected None. "
            f"If it does not, say so with register(ignored=({argument!r},))"
        )


def refuse_cross_attention(name: str, module: torch.nn.Module, config: Any) -> None:
    if (
        getattr(config, "is_encoder_decoder", False)
        or getattr(config, "add_cross_attention", False)
        or "Cross" in type(module).__name__
        or getattr(module, "is_cross_attention", False)
    ):
        raise ValueError(
            f"attention {name!r} in a model with cross-attention ({type(module).__name__}), "
            "whose queries and keys are positions of two sequences; "
            'expected an encoder or a decoder alone. Load it with attn_implementation="sdpa"'
        )


def check_pairs(name: str, settings: Settings, mask: KeyMask) -> None:
    """Refuses what a mask that is a tensor cannot say of branches or a pattern, which narrow its causality and padding."""
    if settings.is_dense(mask.num_keys):
        return
    dense = "pattern=LocalWindow((None, None))" if settings.kind == "block_sparse" else "one segment over everything and rate 1"
    way_out = f'expected causality and padding alone, or dense settings: {dense}. Or attn_implementation="sdpa"'
    if mask.window is not None:
        raise ValueError(
            f"attention {name!r}: attention_mask keeps keys within {mask.window} of a query, in a layer that has no window of its own and "
            f"sees other keys by its {'pattern' if settings.kind == 'block_sparse' else 'branches'}; {way_out}"
        )
    if mask.num_filled < mask.num_keys or (mask.query_offset and torch.compiler.is_compiling()):
        raise ValueError(f"attention {name!r}: attention_mask does not say where in the cache the queries are; {way_out}")


def check_part(name: str, attention_mask: torch.Tensor, is_causal: bool) -> None:
    """Refuses a mask of pairs where a process holds only a part of them."""
    size = place_in(group_of(name))[1]
    if size > 1 and attention_mask.ndim == 4 and (is_causal or attention_mask.shape[2] > 1):
        raise ValueError(
            f"attention {name!r}: attention_mask {tuple(attention_mask.shape)} holds pairs of positions of one of {size} processes, which "
            "does not say what its queries see of the others; expected padding (B, N) in shard_inputs, or no mask"
        )


def check_stable(name: str, settings: Settings, mask: KeyMask) -> None:
    pattern = settings.pattern
    assert pattern is not None
    if mask.query_offset == 0 or pattern.is_prefix_stable:
        return
    raise ValueError(
        f"attention {name!r}: {type(pattern).__name__} keeps other pairs in a longer sequence, so that cached keys are not those "
        "of a full forward; expected a pattern with is_prefix_stable, e.g. GlobalLocal(256, 64). Or call generate(use_cache=False)"
    )


def check_shards(
    name: str, settings: Settings, module: torch.nn.Module, mask: KeyMask, rows: int, is_guess: bool, position_ids: Any, is_packed: bool
) -> None:
    """Refuses what needs the whole sequence on one process, and positions that do not belong to a shard."""
    if mask.query_offset or mask.num_filled != rows:
        raise ValueError(
            f"attention {name!r}: {rows} queries at position {mask.query_offset} of {mask.num_filled} keys, from a cache, "
            "which a sequence sharded over processes does not have; expected the whole sequence in one forward. "
            f"Decode with model.set_attn_implementation({'sdpa' if settings.kind == 'ring' else 'dilated'!r}) on one process"
        )
    if mask.seq_len is not None:
        # cut, with positions and bounds of the whole sequence
        return
    if mask.cu_seqlens is not None and not is_packed:
        told = "may be packed, which a compiled model cannot rule out" if is_guess else "restart within the shard"
        raise ValueError(
            f"attention {name!r}: position_ids {told}; expected those of shard_inputs and, of packed documents, "
            "their bounds in the whole sequence as cu_seq_lens_q and cu_seq_lens_k. "
            "Positions of the layouts 'zigzag' and 'striped' jump: give them an attention_mask of ones"
        )
    if position_ids is None or is_packed or torch.compiler.is_compiling() or getattr(module, "layer_idx", None) not in (None, 0):
        return
    rank, size = place_in(group_of(name))
    if rank > 0 and rows > 0 and size > 1 and int(position_ids.flatten()[0]) == 0:
        raise ValueError(
            f"attention {name!r}: position_ids of rank {rank} of {size} begin at 0, where rank 0's do; "
            "expected the positions of this shard in the whole sequence: take the model's inputs from shard_inputs"
        )


def check_untold_packing(name: str, module: torch.nn.Module, mask: KeyMask, position_ids: Any) -> None:
    """Refuses positions that begin again where neither the mask nor bounds say so; gpt-oss makes its masks without positions.

    It reads the positions once a forward, in the first layer.
    """
    if getattr(module, "layer_idx", None) not in (None, 0) or torch.compiler.is_compiling():
        return
    if mask.padding is not None or mask.query_offset:
        return
    # positions of images have three dimensions, and repeat
    if not isinstance(position_ids, torch.Tensor) or position_ids.ndim != 2 or position_ids.is_meta:
        return
    if bool((position_ids[:, 1:] == 0).any()):
        raise ValueError(
            f"attention {name!r}: position_ids begin again, and the masks that this model makes do not keep its documents apart; "
            "expected their bounds as cu_seq_lens_q and cu_seq_lens_k, int32 (documents + 1,), or one document a row"
        )


def warn_of_windows_only(name: str, config: Any) -> None:
    """Warns, once, that the setting has no effect because every layer has a sliding window."""
    if torch.compiler.is_compiling():
        return
    kinds = getattr(config, "layer_types", None)
    if kinds is None or all(kind == "sliding_attention" for kind in kinds):
        warnings.warn(
            f'attn_implementation="{name}" changes nothing in {type(config).__name__}: '
            "all its layers have sliding windows, which stay as the model was trained. "
            f"To spread the layers over the whole sequence, set config.sliding_window = None; config.{CONFIG_KEY} says what they then see",
            stacklevel=3,
        )
