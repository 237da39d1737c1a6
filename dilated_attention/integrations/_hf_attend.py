"""``attend``: the function that transformers calls for the attention of a layer, once a name is registered. It reads what the layer asks
for, refuses what is not supported, and calls one of this package's functions. Nothing is silently ignored.

Settings of a registered name have a ``kind`` (``"dilated"``, ``"block_sparse"``, ``"ring"``, ``"ring_dilated"``), see ``Settings``. In all
messages ``name`` is the registered name.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import torch

from dilated_attention.functional import attention, block_sparse_attention, dilated_attention, ring_attention, ring_dilated_attention
from dilated_attention.functional.arguments import autocast, needs_grad, place_in
from dilated_attention.functional.decode import decode_attention
from dilated_attention.integrations._hf_mask import OF_TRANSFORMERS, KeyMask, document_starts, mask_of_tensor, packed_bounds
from dilated_attention.integrations._hf_settings import CONFIG_KEY, NAME_KEY, OF_PATTERNS, Settings, check_shared, group_of, settings_of
from dilated_attention.pattern import DilatedPattern, LocalWindow
from dilated_attention.pattern.checks import shown
from dilated_attention.validation import refuse_where

# arguments that models pass to every layer and that have no effect on attention, or repeat what the mask says
_WITHOUT_EFFECT = {
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
# arguments that change scores or keys in a way that no kernel here supports: name -> what it is
_REFUSED = {
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


def attend(
    name: str,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: torch.Tensor | None = None,
    s_aux: torch.Tensor | None = None,
    softcap: float | None = None,
    deterministic: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Computes one layer's attention, with the signature that ``AttentionInterface`` calls; returns (out (B, Nq, H, D), None).

    Args:
        name: the registered name; its settings apply, together with those of the config.
        module: the layer; its ``config``, ``training`` and ``is_causal`` are read.
        query, key, value: (B, H, Nq, D), (B, Hk, Nk, D), not repeated. Values may have a smaller head dim than keys.
        attention_mask: a ``KeyMask``, None, or a tensor that ``mask_of_tensor`` reads. A tensor of four dimensions replaces the layer's own
            causality and window.
        dropout: of attention weights, in training only.
        is_causal: None to follow the mask or, without a mask, ``module.is_causal``.
        sliding_window: the number of keys that a query sees, itself included, on both sides if not causal. The layer is then dense within
            this window, and branches or patterns of the settings do not apply to it.
        cu_seq_lens_q, cu_seq_lens_k: bounds of packed documents; they must be equal.
        s_aux: (H,), the learned sinks of the layer (gpt-oss).
        softcap: c of scores c·tanh(s/c) (Gemma 2).

    Raises ValueError if the layer asks for something that is not supported.
    """
    config = getattr(module, "config", None)
    _check_arguments(name, module, config, kwargs)
    settings = settings_of(name, config)
    rank, world = place_in(group_of(name)) if settings.is_shared else (0, 1)
    mask = _layer_mask(name, settings, module, attention_mask, query, key.shape[2], is_causal)
    if module.training and torch.is_grad_enabled() and config is not None and mask.seq_len is None:
        warn_of_saving(name, config)
    is_tensor = isinstance(attention_mask, torch.Tensor)
    mask_decides = is_tensor and attention_mask.ndim == 4
    if is_tensor and sliding_window is None:
        _check_tensor_mask(name, settings, mask)
    # a query sees keys that both the mask's window and the layer's allow. If the mask replaces the layer's window, the layer is still dense
    window = mask.window
    if sliding_window is not None and mask_decides:
        window = window or (None, None)
    elif sliding_window is not None:
        size = int(sliding_window) - 1
        left, right = (size if side is None else min(side, size) for side in window or (size, size))
        window = left, 0 if mask.is_causal else right
    bounds = mask.cu_seqlens
    if cu_seq_lens_q is not None or cu_seq_lens_k is not None:
        bounds = packed_bounds(cu_seq_lens_q, cu_seq_lens_k)
    elif bounds is None and mask.seq_len is None:
        _check_documents(name, mask, kwargs.get("position_ids"), kwargs.get("seq_idx"), query.shape[2], rank)
    if window is not None and settings.kind != "ring" and (sliding_window is not None or not mask_decides):
        _warn_of_windows_only(config)
    if settings.kind == "block_sparse" and window is None:
        # checked here, while the rows of a packed batch are still apart
        pattern: Any = settings.pattern
        pattern.check_batch(query.shape[0])
        if mask.query_offset and not pattern.is_prefix_stable:
            raise ValueError(
                f"attention {name!r}: {type(pattern).__name__} keeps other pairs in a longer sequence, so that cached keys are not those "
                "of a full forward; expected a pattern with is_prefix_stable, e.g. GlobalLocal(256, 64). Or call generate(use_cache=False)"
            )
    dropout_p = float(dropout) if module.training else 0.0
    # one new token after cached keys. ``decode_attention`` reads the needed keys alone, but has no gradients, and compiled code would make
    # a graph for each position
    is_decode_step = query.shape[2] == 1 and mask.is_causal and mask.padding is None and bounds is None and not settings.is_shared
    if (
        is_decode_step
        and (softcap, dropout_p, value.shape[3], settings.options.get("backend", "auto")) == (None, 0, key.shape[3], "auto")
        and not (torch.compiler.is_compiling() or needs_grad(query, key, value, s_aux))
    ):
        q, k, v = autocast(*(x.transpose(1, 2) for x in (query, key, value)))
        positions = torch.full((q.shape[0],), mask.query_offset, dtype=torch.int64, device=q.device)
        decode_options: dict[str, Any] = {"pattern": settings.pattern} if window is None else {"window": window[0]}
        return decode_attention(q, k, v, positions, **decode_options, scale=scaling, sinks=s_aux), None
    q, k, v = query.transpose(1, 2), *(x[:, :, : mask.num_filled].transpose(1, 2) for x in (key, value))
    rows, value_dim = q.shape[:2], v.shape[3]
    if value_dim < q.shape[3]:
        # values with a smaller head dim than keys (DeepSeek's latent attention) get zeros appended, which come out as zeros and are cut off
        v = torch.nn.functional.pad(v, (0, q.shape[3] - value_dim))
    if bounds is not None and bounds is mask.cu_seqlens and rows[0] > 1 and not settings.is_shared:
        q, k, v = (x.reshape(1, -1, *x.shape[2:]) for x in (q, k, v))
    # branches and patterns apply only to layers without a window
    is_dense = window is not None or settings.kind == "ring"
    options = {
        **{name: value for name, value in settings.options.items() if not (is_dense and name in OF_PATTERNS)},
        "is_causal": mask.is_causal,
        "scale": scaling,
        "cu_seqlens": bounds,
        "key_padding_mask": mask.padding,
        "sinks": s_aux,
        "softcap": softcap,
        "dropout_p": dropout_p,
        "deterministic": settings.options.get("deterministic", False) or bool(deterministic),
    }
    if is_dense:
        options["window"] = window
    if settings.is_shared:
        if config is not None and world > 1 and all(config is not other for other in mask.checked):
            mask.checked.append(config)
            check_shared(name, config, mask.padding, mask.seq_len is not None)
            # context_parallel looks at each call
            if mask.seq_len is None and module.training and getattr(config, "output_router_logits", False):
                raise ValueError(
                    f"attention {name!r}: config.output_router_logits is True, and the router's loss is no sum over the processes' parts; "
                    "expected False"
                )
        _check_shards(name, settings, mask, rows[1], cu_seq_lens_q is not None)
        # all layers need one layout, and the two functions have different defaults
        options = {"layout": "contiguous", **options, "group": group_of(name), "mesh": None}
        if mask.seq_len is not None:
            options["seq_len"] = mask.seq_len
        out = (ring_attention if is_dense else ring_dilated_attention)(q, k, v, **options)
    else:
        options["query_offset"] = mask.query_offset
        function = attention if is_dense else block_sparse_attention if settings.kind == "block_sparse" else dilated_attention
        out = function(q, k, v, **options).reshape(*rows, q.shape[2], q.shape[3])
    if mask.empty is not None:
        out = out.masked_fill(mask.empty[:, :, None, None], 0)
    return out[..., :value_dim], None


def _layer_mask(
    name: str, settings: Settings, module: torch.nn.Module, attention_mask: Any, query: torch.Tensor, num_keys: int, is_causal: bool | None
) -> KeyMask:
    """Returns what ``attend`` was given as a mask, as a ``KeyMask``; raises ValueError if it does not fit the layer."""
    num_queries = query.shape[2]
    module_is_causal = getattr(module, "is_causal", None)
    if isinstance(attention_mask, KeyMask):
        mask = attention_mask
        causal = mask.is_causal
        if mask.num_keys != num_keys:
            raise ValueError(
                f"attention {name!r}: the layer passes {num_keys} keys, and its mask was made for {mask.num_keys}; "
                f"expected one cache whose layers are equally long. Load this model with {OF_TRANSFORMERS}"
            )
        # a layer that is not causal itself may leave causality to its mask
        if is_causal is not None and is_causal != mask.is_causal and (is_causal or module_is_causal):
            raise ValueError(
                f"attention {name!r}: is_causal={is_causal} is given to a layer whose mask is "
                f"{'causal' if mask.is_causal else 'not causal'}; "
                f"set config.is_causal = {is_causal}, from which later releases of 5.x make the mask, or load this model with "
                + OF_TRANSFORMERS
            )
    else:
        layer_is_causal = module_is_causal if is_causal is None else is_causal
        if layer_is_causal is None:
            raise ValueError(
                f"attention {name!r}: {type(module).__name__} does not say whether it is causal; "
                "expected is_causal=True or False, as an argument or an attribute of the module"
            )
        causal = bool(layer_is_causal)
        if attention_mask is None:
            mask = KeyMask(num_keys, num_keys, num_keys - num_queries if causal else 0, 0, causal)
        elif isinstance(attention_mask, torch.Tensor):
            size = place_in(group_of(name))[1] if settings.is_shared else 1
            if size > 1 and attention_mask.ndim == 4 and (causal or attention_mask.shape[2] > 1):
                raise ValueError(
                    f"attention {name!r}: attention_mask {tuple(attention_mask.shape)} holds pairs of positions of one of {size} "
                    "processes, which does not say what its queries see of the others; expected padding (B, N) in shard_inputs, or no mask"
                )
            mask = mask_of_tensor(attention_mask, query.shape[0], num_queries, num_keys, causal, is_shared=settings.is_shared)
        else:
            raise TypeError(
                f"attention_mask is a {type(attention_mask).__name__}; expected a tensor or None. "
                'A BlockMask is a pattern: register(pattern=…) for attn_implementation="block_sparse"'
            )
    if not causal and num_queries != num_keys:
        raise ValueError(
            f"attention {name!r}: {num_queries} queries and {num_keys} keys in a layer that is not causal; "
            "expected self-attention, whose queries and keys are the same positions. "
            f"Load a model with cross-attention, or one that is not causal and has a cache, with {OF_TRANSFORMERS}"
        )
    return mask


def ignore(arguments: Iterable[str]) -> None:
    """Adds to the names of arguments that have no effect on attention."""
    names = (arguments,) if isinstance(arguments, str) else tuple(arguments) if isinstance(arguments, Iterable) else (None,)
    if not all(isinstance(name, str) for name in names):
        raise TypeError(f"ignored is {shown(arguments)} ({type(arguments).__name__}); expected names of arguments, such as ['my_bias']")
    for name in names:
        if name in _REFUSED:
            raise ValueError(
                f'ignored holds {name!r} ({_REFUSED[name]}), which changes attention; load the model with attn_implementation="eager"'
            )
    _WITHOUT_EFFECT.update(names)


def _check_arguments(name: str, module: torch.nn.Module, config: Any, kwargs: dict[str, Any]) -> None:
    """Raises ValueError for arguments that change attention or may do so, and for cross-attention."""
    for argument, value in kwargs.items():
        if value is None or value is False or argument in _WITHOUT_EFFECT:
            continue
        if argument in _REFUSED:
            raise ValueError(
                f"attention {name!r}: the model asks for {argument} ({_REFUSED[argument]}), which no kernel here computes; expected None. "
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
            f"expected an encoder or a decoder alone. Load it with {OF_TRANSFORMERS}"
        )


def _check_tensor_mask(name: str, settings: Settings, mask: KeyMask) -> None:
    """Raises ValueError for a tensor as the mask of branches or a pattern, if it holds more than causality and padding, which these narrow
    down further."""
    pattern = settings.pattern
    sees_all = isinstance(pattern, LocalWindow) and pattern.window == (None, None)
    if isinstance(pattern, DilatedPattern):
        sees_all = [w >= mask.num_keys and r == 1 for w, r in pattern.branches] == [True]
    if pattern is None or sees_all:
        return
    dense = "pattern=LocalWindow((None, None))" if settings.kind == "block_sparse" else "one segment over everything and rate 1"
    way_out = f"expected causality and padding alone, or dense settings: {dense}. Or {OF_TRANSFORMERS}"
    if mask.window is not None:
        raise ValueError(
            f"attention {name!r}: attention_mask keeps keys within {mask.window} of a query, in a layer that has no window of its own and "
            f"sees other keys by its {'pattern' if settings.kind == 'block_sparse' else 'branches'}; {way_out}"
        )
    if mask.num_filled < mask.num_keys or (mask.query_offset and torch.compiler.is_compiling()):
        raise ValueError(f"attention {name!r}: attention_mask does not say where in the cache the queries are; {way_out}")


def _check_shards(name: str, settings: Settings, mask: KeyMask, rows: int, is_packed: bool) -> None:
    """Raises ValueError for a cache, or for documents of a shard, where processes share the sequence. ``rows``: queries on this process;
    ``is_packed``: the layer was given bounds of documents."""
    if mask.query_offset or mask.num_filled != rows:
        # "dilated" has the settings of "ring_dilated", not those of a name of one's own
        dilated = 'attn_implementation="dilated"' if name == "ring_dilated" else "a name that has kind='dilated' and the same branches"
        raise ValueError(
            f"attention {name!r}: {rows} queries at position {mask.query_offset} of {mask.num_filled} keys, from a cache, "
            "which a sequence sharded over processes does not have; expected the whole sequence in one forward. "
            f"Decode on one process with {OF_TRANSFORMERS if settings.kind == 'ring' else dilated}"
        )
    # with seq_len, context_parallel has cut the inputs, and bounds are those of the whole sequence
    if mask.seq_len is None and mask.cu_seqlens is not None and not is_packed:
        told = "may be packed, which a compiled model cannot rule out" if mask.is_guess else "restart within the shard"
        raise ValueError(
            f"attention {name!r}: position_ids {told}; expected the inputs that shard_inputs makes of the whole position_ids. "
            "Positions of the layouts 'zigzag' and 'striped' jump: give them an attention_mask of ones"
        )


def _check_documents(name: str, mask: KeyMask, position_ids: Any, seq_idx: Any, num_queries: int, rank: int) -> None:
    """Raises ValueError for packed documents that neither the mask nor bounds keep apart, and for positions of another process's shard.

    Documents are seen where ``position_ids`` begin again or ``seq_idx`` changes. Transformers itself looks for them only without an
    attention_mask and a cache, and not in all models. Each tensor is read once a forward, in the first layer that has the mask; a step of
    one token is not looked at. ``rank``: this process's, 0 if there is only one.
    """
    if num_queries == 0 or (num_queries == 1 and rank == 0):
        return
    # positions of images are left out: they have three dimensions, and repeat. So are tensors of another length than these queries
    positions, document_ids = (
        x if isinstance(x, torch.Tensor) and not x.is_meta and x.ndim == 2 and x.shape[1] == num_queries else None
        for x in (position_ids, seq_idx)
    )
    is_compiling = torch.compiler.is_compiling()
    unread = [x for x in (positions, document_ids) if x is not None and (is_compiling or all(x is not other for other in mask.checked))]
    if not unread:
        return
    real = None if mask.padding is None else ~mask.padding[:, mask.query_offset : mask.query_offset + num_queries]
    starts = document_starts(positions, document_ids, real)
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
            # a row that begins at 0 is a second document, if the cached keys before it are not all padding
            starts = starts | (begins if mask.padding is None else begins & ~mask.padding[:, : mask.query_offset].all(1, keepdim=True))
    refuse_where(
        starts,
        f"attention {name!r}: position_ids begin again or seq_idx changes, which tells packed documents, and neither the mask nor bounds "
        "keep them apart; expected their bounds as cu_seq_lens_q and cu_seq_lens_k, int32 (documents + 1,), or one document a row. Without "
        "attention_mask and with use_cache=False, most decoders find them in position_ids; shard_inputs finds them in those of the whole; "
        "DataCollatorWithFlattening(return_flash_attn_kwargs=True) gives the bounds",
    )
    if not is_compiling:
        mask.checked.extend(unread)


def _warn_of_windows_only(config: Any) -> None:
    """Warns that a registered pattern has no effect, if every layer of the model has a sliding window."""
    if torch.compiler.is_compiling():
        return
    kinds = getattr(config, "layer_types", None)
    if kinds is None or all(kind == "sliding_attention" for kind in kinds):
        warnings.warn(
            f"the registered pattern changes nothing in {type(config).__name__}: "
            "all its layers have sliding windows, which stay as the model was trained. "
            "To spread the layers over the whole sequence, "
            + ("set config.sliding_window = None" if kinds is None else 'build the model with layer_types=["full_attention", …]')
            + f"; config.{CONFIG_KEY} says what they then see",
            stacklevel=3,
        )


def warn_of_saving(name: str, config: Any) -> None:
    """Warns that a model trained with this attention will load as a dense one: transformers does not save which attention it had."""
    if not torch.compiler.is_compiling() and not hasattr(config, NAME_KEY):
        warnings.warn(
            f"a model is trained with attention {name!r}, which its config does not name: saved so, it loads with transformers' own. "
            f"configure(model) writes the name and the settings to the config; of an adapter, load the base model with {NAME_KEY}={name!r}",
            stacklevel=3,
        )
