"""Settings behind ``attn_implementation="dilated"`` and the other names: those of a name, and those that a model's config adds."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
from dataclasses import dataclass
from typing import Any

import torch

from dilated_attention import validation as check
from dilated_attention.backends import registry
from dilated_attention.distributed.comm.group import group_name_of
from dilated_attention.distributed.exchange.sharding_plan import EXCHANGES
from dilated_attention.distributed.sharding.layout import LAYOUTS
from dilated_attention.pattern import BlockPattern, DilatedPattern, LocalWindow, pattern_from_spec
from dilated_attention.pattern.checks import as_int, as_int_tuple, one_of

KINDS = ("dilated", "ring_dilated", "ring", "block_sparse")
# the attribute of a model's config, a plain dict, with the settings of this model's layers
CONFIG_KEY = "dilated_attention"
BRANCH_OPTIONS = ("segment_lengths", "dilation_rates", "head_offsets", "branch_heads", "tail", "mixture_grad")
_RUN = ("deterministic", "backend")
_RING = ("layout", "exchange", "seq_len", "ranks_per_node", "timeout")
# processes belong to a job, not to a model
_PROCESSES = ("group", "mesh")
OPTIONS: dict[str, tuple[str, ...]] = {
    "dilated": (*BRANCH_OPTIONS, *_RUN),
    "ring_dilated": (*BRANCH_OPTIONS, *_RUN, *_RING, *_PROCESSES),
    "ring": (*_RUN, *_RING, *_PROCESSES),
    "block_sparse": ("pattern", *_RUN),
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The arguments of ``dilated_attention``, ``ring_dilated_attention``, ``ring_attention`` or ``block_sparse_attention``.

    Checked is what needs no tensors. Neither lengths nor a pattern need be known yet: a model's config may provide them.
    """

    kind: str
    segment_lengths: tuple[int, ...] = ()
    dilation_rates: tuple[int, ...] = ()
    head_offsets: Any = "cyclic"
    branch_heads: str = "all"
    tail: str = "mask"
    mixture_grad: str = "exact"
    pattern: BlockPattern | None = None
    deterministic: bool = False
    backend: str = "auto"
    layout: str = "contiguous"
    exchange: str = "auto"
    seq_len: int | None = None
    ranks_per_node: int | None = None
    timeout: float = 60.0
    group: Any = None
    mesh: Any = None

    @property
    def is_complete(self) -> bool:
        # "ring" is dense, and dense has no settings of its own
        return self.pattern is not None if self.kind == "block_sparse" else bool(self.segment_lengths) or self.kind == "ring"

    @property
    def is_shared(self) -> bool:
        """Whether processes share the sequence."""
        return self.kind in ("ring_dilated", "ring")

    def is_dense(self, num_keys: int) -> bool:
        """Whether a query sees each of so many keys once."""
        if self.kind == "block_sparse":
            return isinstance(self.pattern, LocalWindow) and self.pattern.window == (None, None)
        return len(self.segment_lengths) <= 1 and all(w >= num_keys for w in self.segment_lengths) and set(self.dilation_rates) <= {1}

    def branches(self) -> DilatedPattern:
        return _pattern_of(self.segment_lengths, self.dilation_rates, self.head_offsets, self.branch_heads, self.tail)

    def with_options(self, options: dict[str, Any]) -> Settings:
        """Returns these settings, overridden by ``options``, whose values may be plain JSON.

        Raises:
            ValueError, TypeError: if this kind does not have an option, or does not accept its value.
        """
        unknown = sorted(set(options) - set(OPTIONS[self.kind]))
        if unknown:
            raise ValueError(f"{', '.join(unknown)} given for {self.kind!r}; expected some of {', '.join(OPTIONS[self.kind])}")
        new = {**options}
        for name in ("segment_lengths", "dilation_rates"):
            if name in new:
                new[name] = as_int_tuple(name, new[name])
        if isinstance(new.get("head_offsets"), (list, tuple)):
            new["head_offsets"] = tuple(tuple(row) for row in new["head_offsets"])
        if isinstance(new.get("pattern"), str):
            new["pattern"] = pattern_from_spec(new["pattern"])
        settings = dataclasses.replace(self, **new)
        settings._check()
        return settings

    def _check(self) -> None:
        if self.segment_lengths or self.dilation_rates:
            self.branches()
        one_of("mixture_grad", self.mixture_grad, ("exact", "detached"))
        if self.pattern is not None and not isinstance(self.pattern, BlockPattern):
            raise TypeError(
                f"pattern is {self.pattern!r} ({type(self.pattern).__name__}); expected a block pattern of dilated_attention.pattern, e.g. "
                "LocalWindow(512), or the string of its spec()"
            )
        check.check_bool("deterministic", self.deterministic)
        registry.check_name(self.backend)
        one_of("layout", self.layout, LAYOUTS)
        one_of("exchange", self.exchange, ("auto", *EXCHANGES))
        for name in ("seq_len", "ranks_per_node"):
            if getattr(self, name) is not None:
                as_int(name, getattr(self, name), minimum=1)
        check.check_timeout(self.timeout)

    def plain(self, options: dict[str, Any]) -> dict[str, Any]:
        """Returns the settings named in ``options`` as JSON values: lists, numbers and strings.

        Raises:
            ValueError: if a pattern holds a Python function or a tensor, or a group or mesh is among them.
        """
        plain: dict[str, Any] = {}
        for name in options:
            value = getattr(self, name)
            if name in _PROCESSES:
                raise ValueError(f"{name} in a model's config, which is saved with the model; give it to register({name}=…)")
            if isinstance(value, BlockPattern):
                if value.lives_here:
                    raise ValueError(
                        f"pattern {value!r} holds a Python function or a tensor, which no config can save; give it to register(pattern=…)"
                    )
                value = value.spec()
            plain[name] = json.loads(json.dumps(value))
        return plain


@functools.lru_cache(maxsize=64)
def _pattern_of(*branches: Any) -> DilatedPattern:
    return DilatedPattern(*branches)


REGISTERED: dict[str, Settings] = {}
# a name that an implementation has while processes share the sequences of a model, and the name that is saved in its place
STANDS_FOR: dict[str, str] = {}
# resolved settings by key: compiled code can treat the key as a constant, but not a pattern inside settings
_KNOWN: dict[str, Settings] = {}


def interfaces() -> tuple[Any, Any]:
    """Returns transformers' registries of attention and mask functions, imported on first use."""
    try:
        modeling, masking = importlib.import_module("transformers.modeling_utils"), importlib.import_module("transformers.masking_utils")
        return modeling.AttentionInterface, masking.AttentionMaskInterface
    except (ImportError, AttributeError) as error:
        raise ImportError(f'transformers 4.53 or later is needed ({error}): pip install "dilated-attention[hf]"') from error


def remember(name: str, settings: Settings) -> None:
    REGISTERED[name] = settings
    # compiled models check here whether what they were compiled for is still valid
    for key in [key for key in _KNOWN if key.startswith(f"{name} ")]:
        del _KNOWN[key]


@torch.compiler.assume_constant_result
def group_of(name: str) -> str:
    """Returns the name of the group that shares the sequences of a registered name; "" for one process. A constant in compiled code."""
    settings = REGISTERED[name]
    return group_name_of(settings.group, settings.mesh)


def settings_of(name: str, config: Any) -> Settings:
    """Returns the settings of a name for the model of a config: the config takes precedence over what was registered.

    Raises:
        ValueError, TypeError: if the config's settings are invalid, or lengths or a pattern are given nowhere.
    """
    told = None if config is None else getattr(config, CONFIG_KEY, None)
    if told is None:
        return _KNOWN[_resolved(name, None)]
    if not isinstance(told, dict):
        raise TypeError(
            f"config.{CONFIG_KEY} is {told!r}; expected a dict, e.g. {{'segment_lengths': [2048, 8192], 'dilation_rates': [1, 4]}}"
        )
    return _KNOWN[_resolved(name, tuple([(option, _hashable(value)) for option, value in told.items()]))]


def settings_to_save(name: str, config: Any) -> Any:
    """Returns the settings that decide what a model of this config computes, as JSON values, for the config that is saved with it.

    Names may be registered with other settings where the model is loaded. A pattern that holds a Python function cannot be saved.
    """
    told = getattr(config, CONFIG_KEY, None) or {}
    kind = REGISTERED[name].kind
    try:
        settings = REGISTERED[name].with_options({option: value for option, value in told.items() if option in OPTIONS[kind]})
    except (AttributeError, TypeError, ValueError):
        # what the model refuses at its next forward; a config's repr comes here, too
        return told
    wanted: tuple[str, ...] = {"block_sparse": ("pattern",), "ring": ()}.get(kind, BRANCH_OPTIONS)
    if not settings.is_complete or (settings.pattern is not None and settings.pattern.lives_here):
        wanted = ()
    return settings.plain(dict.fromkeys(wanted)) | told


def name_of(config: Any) -> str:
    """Returns the implementation of a config that is saved with it; "" where none was chosen."""
    name = getattr(config, "_attn_implementation", None)
    return STANDS_FOR.get(name, name) if isinstance(name, str) else ""


def base_of(model: Any) -> Any:
    """Returns a model without the adapters that PEFT put around it."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def configs_of(config: Any) -> list[Any]:
    """Returns a config and those nested in it."""
    found = [config]
    for name in getattr(config, "sub_configs", None) or ():
        if getattr(config, name, None) is not None:
            found += configs_of(getattr(config, name))
    return found


def _hashable(value: Any) -> Any:
    return tuple([_hashable(x) for x in value]) if isinstance(value, (list, tuple)) else value


@torch.compiler.assume_constant_result
def _resolved(name: str, told: tuple[tuple[str, Any], ...] | None) -> str:
    key = f"{name} {told}"
    _KNOWN[key] = _joined(REGISTERED[name], told)
    return key


@functools.lru_cache(maxsize=64)
def _joined(settings: Settings, told: tuple[tuple[str, Any], ...] | None) -> Settings:
    kind = settings.kind
    if told is not None:
        # a config may have settings of several kinds: a model trained with dilated attention is also run with ring_dilated
        everywhere = {option for options_of in OPTIONS.values() for option in options_of} - set(_PROCESSES)
        unknown = sorted({option for option, _ in told} - everywhere)
        if unknown:
            raise ValueError(f"config.{CONFIG_KEY} has {', '.join(unknown)}; expected some of {', '.join(sorted(everywhere))}")
        settings = settings.with_options({option: value for option, value in told if option in OPTIONS[kind]})
    if not settings.is_complete:
        missing, example = (
            ("pattern", "BigBird(256, 64, 3)") if kind == "block_sparse" else ("segment_lengths", "[2048, 8192], dilation_rates=[1, 4]")
        )
        raise ValueError(
            f"attention {kind!r} without {missing}: give them to all models by register({missing}={example}), or to this one by "
            f"configure(model, {missing}={example})"
        )
    return settings
