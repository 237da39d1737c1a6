"""Refusals: what a transformers model may ask of its attention but is not supported here raises an error and is never ignored."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import torch

from dilated_attention.integrations._hf_mask import KeyMask, document_starts
from dilated_attention.integrations._hf_settings import CONFIG_KEY, NAME_KEY, Settings
from dilated_attention.validation import refuse_where

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


def refuse(name: str, module: torch.nn.Module, config: Any, kwargs: dict[str, Any]) -> None:
    """Refuses arguments that may change attention, and cross-attention."""
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
    is_cross = "Cross" in type(module).__name__ or getattr(module, "is_cross_attention", False)
    if is_cross or any(getattr(config, flag, False) for flag in ("is_encoder_decoder", "add_cross_attention")):
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


def check_shards(name: str, settings: Settings, mask: KeyMask, rows: int, is_packed: bool) -> None:
    """Refuses what needs the whole sequence on one process."""
    if mask.query_offset or mask.num_filled != rows:
        raise ValueError(
            f"attention {name!r}: {rows} queries at position {mask.query_offset} of {mask.num_filled} keys, from a cache, "
            "which a sequence sharded over processes does not have; expected the whole sequence in one forward. "
            f"Decode with model.set_attn_implementation({'sdpa' if settings.kind == 'ring' else 'dilated'!r}) on one process"
        )
    # those that context_parallel has cut have positions and bounds of the whole sequence
    if mask.seq_len is None and mask.cu_seqlens is not None and not is_packed:
        told = "may be packed, which a compiled model cannot rule out" if mask.is_guess else "restart within the shard"
        raise ValueError(
            f"attention {name!r}: position_ids {told}; expected the inputs that shard_inputs makes of the whole position_ids. "
            "Positions of the layouts 'zigzag' and 'striped' jump: give them an attention_mask of ones"
        )


def check_untold_documents(name: str, mask: KeyMask, position_ids: Any, seq_idx: Any, num_queries: int, rank: int) -> None:
    """Refuses documents that neither the mask nor bounds keep apart, and positions that do not belong to this process's shard.

    Transformers looks for documents in positions only where there is neither an attention_mask nor a cache, and not in all models. They are
    read once a forward, in the first layer that has the mask; a step of one token is not looked at. ``rank``: the process's, 0 of one.
    """
    if num_queries == 0 or (num_queries == 1 and rank == 0):
        return
    # positions of images have three dimensions, and repeat; those of another length are not of these queries
    positions, numbers = (
        x if isinstance(x, torch.Tensor) and not x.is_meta and x.ndim == 2 and x.shape[1] == num_queries else None
        for x in (position_ids, seq_idx)
    )
    is_compiling = torch.compiler.is_compiling()
    unread = [x for x in (positions, numbers) if x is not None and (is_compiling or all(x is not other for other in mask.checked))]
    if not unread:
        return
    real = None if mask.padding is None else ~mask.padding[:, mask.query_offset : mask.query_offset + num_queries]
    starts = document_starts(positions, numbers, real)
    if positions is not None and (rank > 0 or mask.query_offset > 0):
        begins = positions[:, :1] == 0
        if real is not None:
            begins = begins & real[:, :1]
        if rank > 0:
            refuse_where(
                begins,
                f"attention {name!r}: position_ids of rank {rank} begin at 0, where rank 0's do; expected positions of this shard in the "
                "whole sequence: take the model's inputs from shard_inputs, with padding on the right",
            )
        else:
            # after keys of a cache that are no padding
            starts = starts | (begins if mask.padding is None else begins & ~mask.padding[:, : mask.query_offset].all(1, keepdim=True))
    refuse_where(
        starts,
        f"attention {name!r}: position_ids begin again or seq_idx changes, which tells packed documents, and neither the mask nor bounds "
        "keep them apart; expected their bounds as cu_seq_lens_q and cu_seq_lens_k, int32 (documents + 1,), or one document a row. Without "
        "attention_mask and with use_cache=False, most decoders find them in position_ids; shard_inputs finds them in those of the whole",
    )
    if not is_compiling:
        mask.checked.extend(unread)


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


def warn_of_saving(name: str, config: Any) -> None:
    """Warns, once, that what is trained with this attention loads as a dense model, since transformers saves no implementation."""
    if not torch.compiler.is_compiling() and not hasattr(config, NAME_KEY):
        warnings.warn(
            f"a model is trained with attention {name!r}, which its config does not name: saved so, it loads with transformers' own. "
            f"configure(model) writes the name and the settings to the config; of an adapter, load the base model with {NAME_KEY}={name!r}",
            stacklevel=3,
        )
