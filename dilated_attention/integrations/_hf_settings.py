"""Settings behind ``attn_implementation="dilated"`` and the other names: those of a name, and those that a model's config adds."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from dilated_attention.distributed.comm.group import group_name_of
from dilated_attention.modules import BlockSparseAttention, DilatedAttention, RingAttention, RingDilatedAttention
from dilated_attention.pattern import BlockPattern, DilatedPattern, LocalWindow, pattern_from_spec

# the attribute of a model's config, a plain dict, with the settings of this model's layers
CONFIG_KEY = "dilated_attention"
# that under which transformers finds the implementation in what it loads
NAME_KEY = "attn_implementation"
_BRANCHES = ("segment_lengths", "dilation_rates")
_OF_BRANCHES = ("head_offsets", "branch_heads", "tail")
_RUN = ("deterministic", "backend")
# processes belong to a job, not to a model
PROCESSES = ("group", "mesh")
_RING = (*_RUN, "layout", "exchange", "seq_len", "ranks_per_node", "timeout", *PROCESSES)
# of the functions that these names stand for, what is not said by each call
OPTIONS: dict[str, tuple[str, ...]] = {
    "dilated": (*_BRANCHES, *_OF_BRANCHES, "mixture_grad", *_RUN),
    "ring_dilated": (*_BRANCHES, *_OF_BRANCHES, "mixture_grad", *_RING),
    "ring": _RING,
    "block_sparse": ("pattern", *_RUN),
}
EVERY_OPTION = {option for options in OPTIONS.values() for option in options}
# what says which pairs count, and a value for as long as it is not said; and the modules that check all of them
_USUAL: dict[str, dict[str, Any]] = {"ring": {}, "block_sparse": {"pattern": LocalWindow(0)}}
_MODULES = {"dilated": DilatedAttention, "ring_dilated": RingDilatedAttention, "ring": RingAttention, "block_sparse": BlockSparseAttention}
# models whose embeddings make positions of the tokens that they are given, or number these
_OWN_POSITIONS = {
    *("altclip_text_model", "bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "camembert", "clap_text_model", "data2vec-text"),
    *("esm", "m2m_100", "marian", "mbart", "pegasus", "pegasus_x", "plbart", "roberta", "roberta-prelayernorm", "trocr", "xlm-roberta"),
    *("xlm-roberta-xl", "xmod"),
}
# what attention within a window does not take of them
OF_PATTERNS = (*_BRANCHES, *_OF_BRANCHES, "mixture_grad", "pattern")


@dataclass(frozen=True, eq=False)
class Settings:
    """Options of ``dilated_attention``, ``ring_dilated_attention``, ``ring_attention`` or ``block_sparse_attention``, by their names. A
    model's config may add lengths or a pattern. ``pattern`` is what they say; None for dense attention, and where it is not known yet."""

    kind: str
    options: dict[str, Any]
    pattern: BlockPattern | DilatedPattern | None

    @property
    def is_shared(self) -> bool:
        """Whether processes share the sequence."""
        return self.kind in ("ring_dilated", "ring")


def checked(kind: str, options: dict[str, Any]) -> Settings:
    """Returns the settings of a kind, whose values may be plain JSON; ValueError or TypeError for others."""
    refuse_others(options, OPTIONS[kind], f"given for {kind!r}")
    if isinstance(options.get("pattern"), str):
        options = {**options, "pattern": pattern_from_spec(options["pattern"])}
    usual = _USUAL.get(kind, dict.fromkeys(_BRANCHES, (1,)))
    is_said = bool(usual.keys() & options.keys())
    given = {name: value for name, value in options.items() if name not in (*PROCESSES, "seq_len")}
    module: Any = _MODULES[kind](**{**(dict.fromkeys(usual, ()) if is_said else usual), **given})
    return Settings(kind, options, module.pattern if is_said else None)


def of_kind(kind: str, options: dict[str, Any]) -> dict[str, Any]:
    """Returns those of the options that apply to a kind."""
    return {option: value for option, value in options.items() if option in OPTIONS[kind]}


def refuse_others(options: Iterable[str], expected: Iterable[str], where: str) -> None:
    unknown = sorted(set(options) - set(expected))
    if unknown:
        raise ValueError(f"{', '.join(unknown)} {where}; expected some of {', '.join(sorted(expected))}")


REGISTERED: dict[str, Settings] = {}
# resolved settings by key: compiled code can treat the key as a constant, but not a pattern inside settings
_KNOWN: dict[str, Settings] = {}


def check_release(oldest: tuple[int, int], what: str) -> None:
    """Raises ImportError for an older transformers than ``what`` is tested with, or for none."""
    minimum = ".".join(str(part) for part in oldest)
    try:
        release = importlib.import_module("transformers").__version__
    except ImportError as error:
        raise ImportError(f'transformers {minimum} or later is needed ({error}): pip install "dilated-attention[hf]"') from error
    if tuple(int(part) for part in release.split(".")[:2]) < oldest:
        raise ImportError(f'transformers is {release}; expected {minimum} or later for {what}: pip install -U "transformers>={minimum}"')


def interfaces() -> tuple[Any, Any]:
    """Returns transformers' registries of attention and mask functions, imported on first use."""
    # pyproject's extra "hf" asks for the same release
    check_release((4, 57), "register")
    modeling, masking = importlib.import_module("transformers.modeling_utils"), importlib.import_module("transformers.masking_utils")
    return modeling.AttentionInterface, masking.AttentionMaskInterface


def forget(name: str) -> None:
    """Removes a name from transformers' registries and from those here."""
    for mapping in (REGISTERED, *(registry._global_mapping for registry in interfaces())):
        mapping.pop(name, None)
    _forget_known(name)


def remember(name: str, settings: Settings) -> None:
    REGISTERED[name] = settings
    _forget_known(name)


def _forget_known(name: str) -> None:
    # compiled models check here whether what they were compiled for is still valid
    for key in [key for key in _KNOWN if key.startswith(f"{name} ")]:
        del _KNOWN[key]


@torch.compiler.assume_constant_result
def group_of(name: str) -> str:
    """Returns the name of the group that shares the sequences of a registered name; "" for one process. A constant in compiled code."""
    options = REGISTERED[name].options
    return group_name_of(options.get("group"), options.get("mesh"))


def settings_of(name: str, config: Any) -> Settings:
    """Returns the settings of a name for the model of a config, which takes precedence over what was registered; ValueError or TypeError if
    the config's settings are invalid, or lengths or a pattern are given nowhere."""
    told = getattr(config, CONFIG_KEY, None)
    if told is not None and not isinstance(told, dict):
        raise TypeError(
            f"config.{CONFIG_KEY} is {told!r}; expected a dict, e.g. {{'segment_lengths': [2048, 8192], 'dilation_rates': [1, 4]}}"
        )
    # compiled code looks again where the items of a dict differ
    return _KNOWN[_resolved(name, tuple((told or {}).items()))]


@torch.compiler.assume_constant_result
def _resolved(name: str, told: tuple[tuple[str, Any], ...]) -> str:
    key = f"{name} {told}"
    if key in _KNOWN:
        return key
    settings = REGISTERED[name]
    # a config may have settings of several kinds: a model trained with dilated attention is also run with ring_dilated
    refuse_others(dict(told), EVERY_OPTION - set(PROCESSES), f"in config.{CONFIG_KEY}")
    settings = checked(settings.kind, settings.options | of_kind(settings.kind, dict(told)))
    if settings.pattern is None and settings.kind != "ring":
        is_sparse = settings.kind == "block_sparse"
        missing = "pattern" if is_sparse else "segment_lengths"
        example = "BigBird(256, 64, 3)" if is_sparse else "[2048, 8192], dilation_rates=[1, 4]"
        raise ValueError(
            f"attention {settings.kind!r} without {missing}: give them to all models by register({missing}={example}), or to this one by "
            f"configure(model, {missing}={example})"
        )
    _KNOWN[key] = settings
    return key


def configs_of(config: Any) -> list[Any]:
    """Returns a config and those nested in it."""
    found = [config]
    for name in getattr(config, "sub_configs", None) or ():
        if getattr(config, name, None) is not None:
            found += configs_of(getattr(config, name))
    return found


def ropes_of_length(config: Any) -> set[str]:
    """Returns the kinds of a model's RoPE whose frequencies follow from the last position that it is given."""
    ropes: Any = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    # one rotation, or one for each kind of layer. With alpha (HunYuan) the frequencies are fixed
    each = [rope for rope in (ropes, *ropes.values()) if isinstance(rope, Mapping) and "alpha" not in rope]
    return {rope.get("rope_type", rope.get("type")) for rope in each} & {"dynamic", "longrope"}


def other_layers(config: Any) -> set[str]:
    """Returns the kinds of a model's layers that see other positions otherwise than by full or sliding attention."""
    kinds = {*(getattr(config, "layer_types", None) or ()), *(getattr(config, "layers_block_type", None) or ())}
    return kinds - {"full_attention", "sliding_attention", "attention"}


def check_shared(name: str, config: Any, padding: torch.Tensor | None, knows_length: bool) -> None:
    """Raises ValueError for a model whose layers compute something else from a part of a sequence, which no attention can mend.

    Args:
        name: of the attention.
        config: of the layer.
        padding: the layer's padding mask.
        knows_length: whether the model's rotations are told the last position of the whole sequence.
    """
    model, why = getattr(config, "model_type", type(config).__name__), ""
    # in context_parallel rotations are told the last position
    found, layers = set() if knows_length else ropes_of_length(config), other_layers(config)
    if found:
        why = f"turns queries and keys by the last position in sight (rope_type {min(found)!r}): expected context_parallel, or llama3, yarn"
    elif layers or any(option.startswith("mamba") for option in vars(config)):
        why = f"has layers that carry a state from position to position ({', '.join(sorted(layers)) or 'mamba'}): expected attention alone"
    elif model in _OWN_POSITIONS and getattr(config, "position_embedding_type", "absolute") == "absolute":
        why = "numbers its positions by the tokens in sight, whatever position_ids say: expected a model that goes by these"
    elif model == "esm" and getattr(config, "token_dropout", False):
        why = "scales embeddings by the share of masks in sight (token_dropout=True): expected False"
    elif model == "opt" and padding is not None and bool(padding.any()):
        why = "counts positions from the padding mask in sight: expected rows without padding, e.g. packed"
    if why:
        raise ValueError(f"attention {name!r} of a sequence that processes share: {model} {why}. Or run it on one process")
