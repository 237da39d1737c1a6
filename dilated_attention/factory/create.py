"""``create_attention`` and ``create_model``: create modules by name, with every option checked."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable
from dataclasses import fields, replace
from typing import Any

from torch import nn

from dilated_attention import modules
from dilated_attention.factory.presets import MODEL_PRESETS, hint_of
from dilated_attention.models import (
    LongNetConfig,
    LongNetLM,
    LongViT,
    ModelConfig,
    Pretrained,
    SlideEncoder,
    SlideEncoderConfig,
    VisionConfig,
)
from dilated_attention.models.config import KINDS as ATTENTION_KINDS
from dilated_attention.models.config import RING_KINDS, as_config, without_meaning
from dilated_attention.pattern import geometric_branches
from dilated_attention.pattern.checks import as_int, one_of, shown

# a new kind of attention needs its name here: that of its module in lower case, without "attention"
_NAMES = (
    "dilated", "multihead_dilated", "block_sparse", "multihead_block_sparse", "block_sparse_dilated", "multihead_block_sparse_dilated",
    "ring", "ring_dilated", "ring_block_sparse", "ring_block_sparse_dilated", "ring_multihead_dilated", "ring_multihead_block_sparse",
    "ring_multihead_block_sparse_dilated",
)  # fmt: skip
KINDS: dict[str, type[nn.Module]] = {name: getattr(modules, f"{name.title().replace('_', '')}Attention") for name in _NAMES}
# a new kind of model needs one line here
MODELS: dict[type[ModelConfig], type[Pretrained]] = {LongNetConfig: LongNetLM, SlideEncoderConfig: SlideEncoder, VisionConfig: LongViT}


def create_attention(kind: str, **config: Any) -> nn.Module:
    """Creates an attention module by its kind.

    Args:
        kind: a name of ``factory.KINDS``: the module's own in lower case, ``"multihead_dilated"`` → ``MultiheadDilatedAttention``, without
            "attention"; ``"ring"`` → ``RingAttention`` (dense).
        config: the constructor's arguments, all as keywords.

    Raises:
        ValueError: an unknown kind, or a value that the module refuses.
        TypeError: an argument that the module does not accept, or a missing required one; the message lists the accepted ones.

    >>> create_attention("multihead_dilated", embed_dim=256, num_heads=8,
    ...                  segment_lengths=[512, 2048], dilation_rates=[1, 4])
    """
    one_of("kind", kind, tuple(KINDS))
    parameters = inspect.signature(KINDS[kind]).parameters
    _refuse_unknown(f"create_attention({kind!r})", config, parameters)
    if missing := [name for name, p in parameters.items() if p.default is inspect.Parameter.empty and name not in config]:
        raise TypeError(f"create_attention({kind!r}) lacks {', '.join(missing)}; it accepts {', '.join(parameters)}")
    return KINDS[kind](**config)


def create_model(preset: str, *, context_length: int | None = None, **overrides: Any) -> Any:
    """Creates a model from its preset, with fields of its configuration replaced.

    Args:
        preset: a name of ``factory.presets.MODEL_PRESETS``, such as ``"longnet-tiny"``. The class of its configuration determines the
            model: ``LongNetConfig`` → ``LongNetLM`` · ``SlideEncoderConfig`` → ``SlideEncoder`` · ``VisionConfig`` → ``LongViT``.
        context_length: positions that the branches shall reach, in place of the preset's segments and rates: those of
            ``geometric_branches(context_length, first)``, ``first`` being the preset's shortest segment. None for the preset's own. The
            model takes sequences of any length either way.
        overrides: fields of that configuration (``num_layers=6``), or of the encoder's configuration within it; and options of the model:
            ``backend``, ``checkpoint_activations``, ``device``, ``dtype``; for a model whose sequences are shared by several processes also
            ``group`` or ``mesh``, ``layout``, ``exchange``, ``ranks_per_node``, ``timeout``: see ``LongNetLM``,
            ``SlideEncoder``, ``LongViT``. Another kind of ``attention`` drops the preset's segments, rates, offsets, tail,
            mixture_grad and block pattern; so does a list of dicts, which layers take in turn (see ``LongNetConfig``); other ``positions``
            drop the bases that they do not have. Fewer layers than a preset's list has entries take the first of them.

    Returns:
        The model with freshly initialised parameters, in training mode; to a type checker Any, since its class follows from the preset.
        ``model.summary()`` gives its size and reach.

    Raises:
        ValueError: an unknown preset, or a configuration that cannot be built; a context_length where attention is not dilated, or with
            segments or rates.
        TypeError: an override that is not a field; the message lists the existing fields.

    >>> create_model("longnet-tiny", mesh=mesh["cp"], layout="contiguous")
    >>> # segments 2048, 8192, 32768, 131072 with rates 1, 4, 16, 64
    >>> create_model("longnet-15m", context_length=131072)
    >>> # the shape of "mixed-15m", with dense layers that rotate nothing
    >>> window = {"attention": "block_sparse",
    ...           "block_pattern": LocalWindow((1023, 0))}
    >>> create_model("mixed-15m", attention=[window] * 3 + [
    ...     {"attention": "dense", "positions": "none"}])
    """
    config, options = configured(preset, **overrides, context_length=context_length)
    return MODELS[type(config)](config, **options)


def configured(preset: str, *, context_length: int | None = None, **overrides: Any) -> tuple[Any, dict[str, Any]]:
    """Returns (the configuration, the options) that ``create_model`` makes a model of."""
    one_of("preset", preset, tuple(MODEL_PRESETS), also=hint_of(preset))
    config: Any = MODEL_PRESETS[preset]
    options = [name for name in inspect.signature(MODELS[type(config)]).parameters if name != "config"]
    encoder: Any = getattr(config, "encoder", None)
    model_fields, encoder_fields = ([] if x is None else [field.name for field in fields(x)] for x in (config, encoder))
    _refuse_unknown(f"create_model({preset!r})", overrides, dict.fromkeys((*model_fields, *encoder_fields, *options, "context_length")))
    if context_length is not None:
        overrides |= _branches_of(preset, config, context_length, overrides)
    # where the model and its encoder have a field of the same name, the model's takes precedence
    if encoder_changes := {name: value for name, value in overrides.items() if name in encoder_fields and name not in model_fields}:
        overrides["encoder"] = replaced(as_config("encoder", overrides.get("encoder", encoder)), encoder_changes)
    config = replaced(config, {name: value for name, value in overrides.items() if name in model_fields})
    return config, {name: value for name, value in overrides.items() if name in options}


def _branches_of(preset: str, config: Any, context_length: int, overrides: dict[str, Any]) -> dict[str, Any]:
    """The overrides that ``context_length`` means, which others may not contradict."""
    stack = getattr(config, "encoder", config)
    attention = overrides.get("attention", stack.attention)
    if not stack.segment_lengths or not isinstance(attention, str) or RING_KINDS.get(attention, attention) != "dilated":
        raise ValueError(
            f"context_length is {shown(context_length)} and attention is {shown(attention)}, which has no branches that could follow it: "
            "leave context_length out"
        )
    if given := [name for name in ("segment_lengths", "dilation_rates", "encoder") if name in overrides]:
        raise ValueError(f"context_length and {' and '.join(given)} are given; each says what the branches are: leave out either")
    branches = geometric_branches(as_int("context_length", context_length, minimum=1), min(stack.segment_lengths))
    return dict(zip(("segment_lengths", "dilation_rates"), branches, strict=True))


def replaced(config: Any, changes: dict[str, Any]) -> Any:
    """Returns ``config`` with fields changed. Fields that mean nothing with another kind of attention or of positions are dropped."""
    if isinstance(config, LongNetConfig):
        attention, layers = changes.get("attention", config.attention), changes.get("num_layers")
        is_mixed = isinstance(attention, (list, tuple))
        if not is_mixed:
            one_of("attention", attention, ATTENTION_KINDS)
        elif "attention" not in changes and isinstance(layers, int) and layers > 0:
            # of a preset; in a list of one's own more entries than layers are refused
            changes = changes | {"attention": attention[:layers]}
        kind = "mixed" if is_mixed else RING_KINDS.get(attention, attention)
        defaults = {field.name: field.default for field in fields(config)}
        meaningless = without_meaning(kind, changes.get("positions", config.positions))
        changes = {name: defaults[name] for name, _ in meaningless} | changes
    return replace(config, **changes)


def _refuse_unknown(what: str, given: Iterable[str], accepted: Collection[str]) -> None:
    if unknown := [name for name in given if name not in accepted]:
        raise TypeError(f"{what} got {', '.join(unknown)}, which it does not know; it accepts {', '.join(accepted)}")
