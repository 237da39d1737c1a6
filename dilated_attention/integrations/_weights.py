"""Reads weights of TorchScale's models from a dict, a module or a file, without running pickled code; finds a model's configuration in them
(``stack_config``); and loads them into a model of this package (``fill_model``).

A *key* is a parameter's name in a state dict: *ours* in this package, *theirs* in TorchScale.
"""

from __future__ import annotations

import functools
import json
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dilated_attention.models import LongNetConfig
from dilated_attention.models.saving import read_safetensors
from dilated_attention.models.stack import LongNetStack
from dilated_attention.pattern.checks import as_int_tuple, one_of

# each rule: (pattern of our key, their key). All rules that match are applied, in turn
KeyRules = tuple[tuple[str, str], ...]
# rules of the layers, which follow those of each kind of model. Parameters of an attention layer have the same names in both
LAYER_RULES: KeyRules = (
    (r"blocks\.(\d+)\.attention\.", r"layers.\1.self_attn."),
    (r"blocks\.(\d+)\.attention_norm\.", r"layers.\1.self_attn_layer_norm."),
    (r"blocks\.(\d+)\.ffn_norm\.", r"layers.\1.final_layer_norm."),
    (r"blocks\.(\d+)\.ffn\.up\.", r"layers.\1.ffn.fc1."),
    (r"blocks\.(\d+)\.ffn\.down\.", r"layers.\1.ffn.fc2."),
    (r"blocks\.(\d+)\.ffn\.norm\.", r"layers.\1.ffn.ffn_layernorm."),
)
FIRST_WEIGHT = "layers.0.self_attn.q_proj.weight"
# pattern of their keys -> why a model that has such a key is refused
_REFUSED_KEYS = {
    r"\.[AB]\.(.*\.)?(weight|bias)$": "it is a multiway model, with one set of weights for each of two kinds of tokens",
    r"(^|\.)moe_layer\.": "it has mixture-of-experts layers; only dense feed-forward layers exist here",
    r"(^|\.)encoder_attn": "its decoder attends to an encoder's output; only stacks of self-attention exist here",
    r"relative_(position|attention_bias)": "it adds relative position biases to its scores; attention kernels here take none",
    r"(^|\.)layernorm_embedding\.": "it normalises embeddings (layernorm_embedding); such a norm does not exist here",
    r"(^|\.)embed_positions\.": "it adds learned or sinusoidal positions to token embeddings (embed_positions), which start at 2 "
    "as in fairseq; models here have rotary positions, XPOS or none",
    r"flat_param": "its weights are flattened by FSDP; save a full state dict first",
    r"\.ffn\.gate\.": "its feed-forward layers are gated linear units; those of LongNet are not",
}
# parts of torch.load's messages about objects that it refuses to make
_REFUSED_BY_TORCH = ("GLOBAL", "Can only create new object", "Can only build", "unrecognized function")
# under one of these keys, training programs store the weights beside other things
WRAPPERS = ("model", "module", "state_dict", "teacher", "student")
# parts of keys that torch.compile and activation checkpointing insert
_WRAPPER_PARTS = ("_orig_mod.", "_checkpoint_wrapped_module.")


def read_weights(source: Any, part: str | None = None) -> dict[str, torch.Tensor]:
    """Returns the tensors by name. ``source``: a module, a mapping, or the path of a file written by ``torch.save`` or safetensors.
    ``part``: the key of the weights, where a dict holds several things; None for the one of ``WRAPPERS`` that it has, or the dict itself.

    Raises ValueError if there are no such weights, or several, or a file is damaged or holds more than tensors; FileNotFoundError and
    PermissionError if the file cannot be read.
    """
    if isinstance(source, (str, Path)):
        path = Path(source)
        content = _load_file(path)
        if not isinstance(content, Mapping):
            raise ValueError(
                f"{path} holds a {type(content).__name__}; expected a state dict, names with tensors: save module.state_dict()"
            )
        try:
            return _checked_weights(content, part)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
    if isinstance(source, nn.Module):
        source = source.state_dict()
    if not isinstance(source, Mapping):
        raise TypeError(f"source is a {type(source).__name__}; expected a state dict, a module, or the path of a file")
    return _checked_weights(source, part)


def _checked_weights(source: Mapping[Any, Any], part: str | None) -> dict[str, torch.Tensor]:
    """Returns the weights of a dict, or of a part of it, without what wrappers add to their names."""
    dict_keys = [name for name, value in source.items() if isinstance(value, Mapping)]
    if part is None:
        wrappers = [name for name in WRAPPERS if name in dict_keys]
        if len(wrappers) > 1:
            raise ValueError(f"this file has the weights of {' and '.join(wrappers)}; say which with part={wrappers[0]!r}")
        loose = [str(name) for name, value in source.items() if isinstance(value, torch.Tensor)]
        if wrappers and loose:
            raise ValueError(
                f"this file has weights under {wrappers[0]!r} and also others ({short_list(loose)}); pass the dict that is meant, or "
                f"part={wrappers[0]!r}"
            )
        source = source[wrappers[0]] if wrappers else source
    elif part in dict_keys:
        source = source[part]
    else:
        raise ValueError(f"part is {part!r}; this file has {', '.join(map(repr, dict_keys)) or 'weights and no parts'}")
    weights: dict[str, torch.Tensor] = {}
    for name, value in source.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor):
            raise ValueError(
                f"{name!r} is a {type(value).__name__}; expected names with tensors, or such a dict under one of {', '.join(WRAPPERS)}"
            )
        for wrapper in _WRAPPER_PARTS:
            name = name.replace(wrapper, "")
        if name in weights:
            raise ValueError(f"{name} occurs twice, with and without the names of wrappers such as {_WRAPPER_PARTS[0]!r}; remove one")
        weights[name] = value.detach()
    if not weights:
        raise ValueError("source holds no tensors; expected the weights of a model")
    while all(name.startswith("module.") for name in weights):
        weights = {name.removeprefix("module."): value for name, value in weights.items()}
    return weights


def _load_file(path: Path) -> Any:
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not a file; expected one with weights, .safetensors or written by torch.save")
    if path.suffix == ".safetensors":
        return read_safetensors(path)[0]
    # without read permission this raises PermissionError; torch.load's error would depend on the file's format
    with path.open("rb"):
        pass
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        # bytes that are not a pickle raise any kind of error: KeyError, IndexError, struct.error, OSError, RuntimeError …
        reason = " ".join(str(error).split("WeightsUnpickler error:")[-1].split())
        # without torch's advice, which is to unpickle the file anyway
        reason = reason.split(" In PyTorch 2.6")[0].split(" Check the documentation")[0][:300]
        # compared by name, because this package does not import pickle
        if type(error).__name__ == "UnpicklingError" and any(word in reason for word in _REFUSED_BY_TORCH):
            raise ValueError(
                f"{path} holds more than tensors, and unpickling it could run any code in it: {reason}. If you trust where it comes from, "
                "write its weights alone once, torch.save(torch.load(path, weights_only=False)['model'], 'weights.pt'), and load that file"
            ) from error
        raise ValueError(
            f"{path} cannot be read as a file of torch.save with only weights ({type(error).__name__}: {reason}); it is empty, damaged, "
            "cut off or of another format: copy or download it again, or give it the suffix .safetensors if that is what it is"
        ) from error


def short_list(names: Iterable[str]) -> str:
    """Returns the first eight names in alphabetical order, and how many more there are, for messages."""
    ordered = sorted(names)
    return ", ".join(ordered[:8]) + (f" and {len(ordered) - 8} more" if len(ordered) > 8 else "")


def read_supported(source: Any, ignore: Sequence[str] = ()) -> dict[str, torch.Tensor]:
    """Returns the weights of a supported model, see ``read_weights`` and ``_REFUSED_KEYS``. Left out are those whose names start with a
    prefix in ``ignore``; each prefix must match some name."""
    weights = read_weights(source)
    if isinstance(ignore, str):
        raise TypeError(f"ignore is {ignore!r}; expected a list of prefixes, such as [{ignore!r}]")
    for prefix in ignore:
        if not any(name.startswith(prefix) for name in weights):
            raise ValueError(f"ignore has {prefix!r}, and no weight's name starts with it")
    weights = {name: value for name, value in weights.items() if not name.startswith(tuple(ignore))}
    refuse_unsupported(weights)
    return weights


def refuse_unsupported(names: Iterable[str]) -> None:
    """Raises ValueError if these names are those of a model that this package does not have."""
    for name in names:
        for pattern, reason in _REFUSED_KEYS.items():
            if re.search(pattern, name):
                raise ValueError(f"{name}: this model cannot be loaded; {reason}")


def _missing(name: str, weights: dict[str, torch.Tensor]) -> ValueError:
    return ValueError(f"there is no {name} among the weights; they are {short_list(weights)}")


def shape_of(weights: dict[str, torch.Tensor], name: str, ndim: int) -> torch.Size:
    if name not in weights:
        raise _missing(name, weights)
    if weights[name].ndim != ndim:
        raise ValueError(f"{name} has shape {tuple(weights[name].shape)}; expected {ndim} dimensions")
    return weights[name].shape


def required_setting(name: str, value: Any) -> Any:
    """Returns a setting that weights do not determine; raises ValueError if the caller has not given it."""
    theirs = {"segment_lengths": "segment_length", "dilation_rates": "dilated_ratio", "num_heads": "encoder_attention_heads"}
    if value is None:
        raise ValueError(
            f"{name} is not given, and the weights do not determine it: give what the model was trained with, TorchScale's "
            f"args.{theirs[name]}"
        )
    return value


def _integers(name: str, value: Any) -> tuple[int, ...]:
    """Returns integers, which TorchScale may have as text: ``"[1024,2048]"``. Text is read as JSON, never evaluated."""
    if isinstance(required_setting(name, value), str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{name} is {value[:200]!r}; expected integers in brackets, such as '[1024, 2048]'") from error
    return as_int_tuple(name, value)


def attention_fields(attention: str, segment_lengths: Any, dilation_rates: Any, mixture_grad: str) -> dict[str, Any]:
    """Returns settings of a module or a ``LongNetConfig`` with which it attends as TorchScale does: dilated, or dense."""
    one_of("attention", attention, ("dilated", "dense"))
    if attention == "dilated":
        lengths, rates = _integers("segment_lengths", segment_lengths), _integers("dilation_rates", dilation_rates)
        semantics = {"head_offsets": "blocked", "tail": "zero_keys", "mixture_grad": mixture_grad}
        return {"segment_lengths": lengths, "dilation_rates": rates, **semantics}
    if segment_lengths is not None or dilation_rates is not None:
        raise ValueError("attention is 'dense', which has no segments; leave segment_lengths and dilation_rates out")
    return {"attention": "dense"}


def stack_config(
    weights: dict[str, torch.Tensor], prefix: str, *, is_causal: bool, num_heads: Any = None, is_pre_norm: bool = False, **fields: Any
) -> LongNetConfig:
    """Returns the configuration of the layers in ``weights``, read from their shapes and names; ``fields`` are the other settings."""
    has_inner_norm = {f"{prefix}layers.0.{name}.weight" in weights for name in ("self_attn.inner_attn_ln", "ffn.ffn_layernorm")}
    if len(has_inner_norm) > 1:
        raise ValueError("there is only one of the two inner norms (self_attn.inner_attn_ln, ffn.ffn_layernorm); expected both or none")
    has_sub_norm, has_last_norm = has_inner_norm.pop(), f"{prefix}layer_norm.weight" in weights
    embed_dim = shape_of(weights, f"{prefix}{FIRST_WEIGHT}", 2)[1]
    if not (has_last_norm or (not is_causal and (has_sub_norm or is_pre_norm))):
        way_out = "" if is_causal else ". If norms come first in this model, say is_pre_norm=True"
        raise ValueError(
            f"there is no {prefix}layer_norm, as in models that normalise after each layer (post-norm, deepnorm), whose residual "
            f"connections differ; those do not exist here{way_out}"
        )
    return LongNetConfig(
        embed_dim=embed_dim,
        num_heads=required_setting("num_heads", num_heads),
        num_layers=sum(re.fullmatch(rf"{prefix}layers\.\d+\.self_attn\.q_proj\.weight", name) is not None for name in weights),
        ffn_dim=shape_of(weights, f"{prefix}layers.0.ffn.fc1.weight", 2)[0],
        sub_norm=has_sub_norm,
        positions="xpos" if f"{prefix}layers.0.self_attn.xpos.scale" in weights else "none",
        final_norm=has_last_norm,
        is_causal=is_causal,
        **fields,
    )


def fill_model(
    model: Any,
    weights: dict[str, torch.Tensor],
    rules: KeyRules,
    head_dim: int,
    device: Any,
    dtype: torch.dtype | None,
    fresh: dict[str, torch.Tensor] | None = None,
) -> Any:
    """Loads copies of the weights into ``model``, which is on the meta device, and returns it in eval mode.

    No weight may be missing or left over. ``rules``: of this kind of model, see ``KeyRules``; ``fresh``: values of new parameters by our
    keys, which TorchScale's model does not have.
    """
    fresh = fresh or {}
    scales = {name: weights[name] for name in weights if re.search(r"(^|\.)xpos\.scale$", name)}
    for name, scale in scales.items():
        expected = (torch.arange(0, head_dim, 2, dtype=torch.float64) + 0.4 * head_dim) / (1.4 * head_dim)
        rounding = 1e-2 if scale.element_size() < 4 else 1e-6
        if scale.shape != expected.shape or not torch.allclose(scale.double().cpu(), expected, atol=rounding):
            raise ValueError(f"{name} is not XPOS's for head_dim {head_dim}; check num_heads")

    loaded: dict[str, torch.Tensor] = {}
    unused = weights.keys() - scales.keys()
    for ours, parameter in model.state_dict().items():
        if ours in fresh:
            continue
        theirs = ours
        for pattern, their_key in (*rules, *LAYER_RULES):
            theirs = re.sub(pattern, their_key, theirs)
        if theirs not in weights:
            raise _missing(theirs, weights)
        value = weights[theirs]
        if scales and re.search("[qk]_proj", ours) and value.shape[0] % head_dim == 0:
            # XPOS rotates pairs of neighbouring dimensions in TorchScale; here it rotates the first half of a head's with the second
            value = value.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)
        if value.shape != parameter.shape:
            raise ValueError(
                f"{theirs} has shape {tuple(weights[theirs].shape)}, for {tuple(parameter.shape)} here; expected that of the other weights"
            )
        unused.discard(theirs)
        loaded[ours] = value
    if unused:
        raise ValueError(
            f"{len(unused)} of {len(weights)} weights have no place in this model: {short_list(unused)}; "
            "leave them out with ignore=(…), prefixes of their names, if that is right"
        )
    integer_names = [name for name, value in loaded.items() if not value.is_floating_point()]
    if integer_names:
        raise ValueError(
            f"{short_list(integer_names)} hold integers; expected weights of a floating dtype: quantised ones have to be dequantised first"
        )
    dtypes = {value.dtype for value in loaded.values()}
    if dtype is None and len(dtypes) > 1:
        raise ValueError(f"these weights have the dtypes {', '.join(sorted(map(str, dtypes)))}; say which with dtype=")
    loaded = {name: value.to(device=device, dtype=dtype, copy=True) for name, value in loaded.items()}
    example = next(iter(loaded.values()))
    model.load_state_dict(loaded | {name: value.to(example) for name, value in fresh.items()}, assign=True)
    model.requires_grad_()
    # one hook on the stack warns for all layers; layers without hooks need less memory
    stack = next((module for module in model.modules() if isinstance(module, LongNetStack)), None)
    branches = getattr(model.attention.pattern if stack is None else stack.config.pattern, "branches", ())
    shifted = [(w, r) for w, r in branches if w % r]
    if shifted:
        (stack or model).register_forward_pre_hook(functools.partial(_warn_if_shifted, shifted), with_kwargs=True)
    return model.eval()


def _warn_if_shifted(shifted: list[tuple[int, int]], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A forward pre-hook: warns once a forward, if for one (w, r) TorchScale would shift all segments after the first.

    This is so if r does not divide w and the sequence, or the longest packed document, has more than w positions.
    """
    x, bounds = args[0] if args else kwargs.get("x", kwargs.get("query")), kwargs.get("cu_seqlens")
    if torch.compiler.is_compiling() or not isinstance(x, torch.Tensor) or x.ndim != 3:
        return
    length = x.shape[1]
    # reading the bounds waits for the device, so they are read only if the whole row is long enough
    if bounds is not None and any(length > w for w, _ in shifted):
        length = int(bounds.diff().max())
    for w, r in shifted:
        if length > w:
            warnings.warn(
                f"{length} positions in segments of {w} with dilation rate {r}, which does not divide {w}: TorchScale's own output is "
                "shifted from the second segment on, an error that is not reproduced here, so these weights give a different result there",
                stacklevel=3,
            )
            return
