"""Transformers models with this library's attention: ``"dilated"``, ``"ring_dilated"``, ``"ring"``, ``"block_sparse"``.

    from dilated_attention.integrations.huggingface import register
    register(segment_lengths=[2048, 8192, 32768], dilation_rates=[1, 4, 12])
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="dilated")

Needs transformers 4.57 or later: ``pip install "dilated-attention[hf]"``. What a model requests and is not supported here is refused,
never ignored; see the table in docs/huggingface.md.

Segments are counted in positions of the tensor. In a batch padded on the left, a row that begins with p padded positions has its first
token at position p, and its segments begin where those of the longest row do: the same tokens may see other keys than without padding.
This does not happen with one segment over everything and rate 1. Where it matters, pad on the right, or run rows of unequal length one
by one.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable
from typing import Any

from dilated_attention.integrations._hf_attend import attend, ignore
from dilated_attention.integrations._hf_mask import KeyMask, key_mask, shard_inputs
from dilated_attention.integrations._hf_settings import (
    CONFIG_KEY,
    EVERY_OPTION,
    NAME_KEY,
    OPTIONS,
    PROCESSES,
    REGISTERED,
    checked,
    configs_of,
    interfaces,
    of_kind,
    refuse_others,
    remember,
)
from dilated_attention.integrations.context_parallel import ContextParallel, context_parallel
from dilated_attention.pattern.checks import one_of

__all__ = ["CONFIG_KEY", "ContextParallel", "KeyMask", "configure", "context_parallel", "register", "shard_inputs"]

# transformers uses names with these parts for its own implementations
_TAKEN = ("eager", "sdpa", "flash", "flex_attention", "paged", "/", "|", ":", "@")


def register(name: str | None = None, *, kind: str | None = None, ignored: Iterable[str] = (), **options: Any) -> None:
    """Registers names with transformers as values of ``attn_implementation``. Calling it again replaces what was registered.

    Args:
        name: a name of your own, for several settings in one process: ``register("wide", segment_lengths=…)``. None: ``"dilated"``,
            ``"ring_dilated"``, ``"ring"`` and ``"block_sparse"``, each with those of the options that apply to it.
        kind: which of these four ``name`` stands for. None: ``"block_sparse"`` if a pattern is given, otherwise ``"dilated"``.
        ignored: arguments of the model's own layers that do not affect attention, if one is refused as unknown.
        options: the defaults for models whose config does not say otherwise (see ``configure``):
            for dilated: ``segment_lengths, dilation_rates, head_offsets, branch_heads, tail, mixture_grad``, see ``dilated_attention``;
            for ring_dilated also, and for ring, which is dense, nothing else: ``group, mesh, layout, exchange, seq_len, ranks_per_node,
            timeout``, see ``ring_dilated_attention`` and ``ring_attention``;
            for block_sparse: ``pattern``, see ``block_sparse_attention``, or the string of its ``spec()``;
            for all: ``deterministic, backend``.

    Raises:
        ImportError: if transformers is not installed, or is older than 4.57.
        ValueError, TypeError: if none of the names has an option, or its value is not accepted.
    """
    attention_interface, mask_interface = interfaces()
    if name is None:
        if kind is not None:
            raise ValueError(f"kind is {kind!r} without a name; expected register({kind!r}, …) or register(name, kind={kind!r}, …)")
        refuse_others(options, EVERY_OPTION, "given")
        found = {each: checked(each, of_kind(each, options)) for each in OPTIONS}
    else:
        if not isinstance(name, str):
            raise TypeError(f"name is {name!r} ({type(name).__name__}); expected a string")
        if any(taken in name for taken in _TAKEN) or not name:
            raise ValueError(
                f"name is {name!r}; expected one without {', '.join(_TAKEN)}, by which transformers knows its own, e.g. 'dilated_wide'"
            )
        if kind is None:
            kind = name if name in OPTIONS else "block_sparse" if "pattern" in options else "dilated"
        one_of("kind", kind, tuple(OPTIONS))
        if name in OPTIONS and name != kind:
            raise ValueError(f"name is {name!r} with kind={kind!r}; expected another name for it")
        found = {name: checked(kind, options)}
    ignore(ignored)
    for each, settings in found.items():
        remember(each, settings)
        attention_interface.register(each, functools.partial(attend, each))
        mask_interface.register(each, functools.partial(key_mask, is_shared=settings.is_shared))


def configure(model_or_config: Any, **options: Any) -> None:
    """Writes a model's attention to its config, with which transformers saves it: ``config.dilated_attention = {…}``, and its name.

    Without options it writes what the model computes with now. A later call adds to the dict and replaces what it names. Configs within
    the config, e.g. of a model of text and images, are set, too. transformers reads the name, ``config.attn_implementation``, and does not
    keep it: call this again after ``from_pretrained`` or ``set_attn_implementation``, before the model is saved.

    Args:
        model_or_config: a transformers model, or its config.
        options: those of ``register`` except ``group`` and ``mesh``, of any kind. ``None`` removes an option.

    Raises:
        ValueError, TypeError: if an option does not exist, its value is not accepted or cannot be saved as JSON, or the model computes its
            attention itself and never asks for an implementation.
    """
    can_set = getattr(model_or_config, "_can_set_attn_implementation", None)
    if can_set is not None and not can_set():
        raise ValueError(
            f"{type(model_or_config).__name__} computes its attention itself, whatever attn_implementation says; "
            "expected a model of transformers' attention interface, e.g. LlamaForCausalLM"
        )
    config = getattr(model_or_config, "config", model_or_config)
    if not hasattr(config, "_attn_implementation"):
        raise TypeError(f"model_or_config is a {type(model_or_config).__name__}; expected a model of transformers, or its config")
    configs = configs_of(config)
    names = [each._attn_implementation for each in configs]
    if any(str(name).startswith("context_parallel_") for name in names):
        raise ValueError(
            "the model is under context_parallel, whose attention no config can name; expected configure before, or after remove()"
        )
    ours = next((REGISTERED[name] for name in names if name in REGISTERED), None)
    told = {**(getattr(config, CONFIG_KEY, None) or {}), **options}
    if not options and ours is not None:
        # without what no config can save
        cannot = (*PROCESSES, "pattern") if getattr(ours.pattern, "is_bound_to_process", False) else PROCESSES
        told = {**{option: value for option, value in ours.options.items() if option not in cannot}, **told}
    told = {option: value for option, value in told.items() if value is not None}
    refuse_others(told, EVERY_OPTION, "given")
    for option in PROCESSES:
        if option in told:
            raise ValueError(f"{option} in a model's config, which is saved with the model; give it to register({option}=…)")
    patterns = {kind: checked(kind, of_kind(kind, told)).pattern for kind in OPTIONS}
    if "pattern" in told:
        pattern: Any = patterns["block_sparse"]
        if pattern.is_bound_to_process:
            raise ValueError(
                f"pattern {pattern!r} holds a Python function or a tensor, which no config can save; give it to register(pattern=…)"
            )
        told["pattern"] = pattern.spec()
    plain = json.dumps(told)
    for each, name in zip(configs, names, strict=True):
        setattr(each, CONFIG_KEY, json.loads(plain))
        vars(each).pop(NAME_KEY, None)
        if ours is not None:
            # a string would hold for the configs within this one, too
            setattr(each, NAME_KEY, name if configs_of(each) == [each] else {"": name})
