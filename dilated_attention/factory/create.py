"""``create_attention`` and ``create_model``: modules by name, with every option checked."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import fields, replace
from typing import Any

from torch import nn

from dilated_attention.factory.presets import MODEL_PRESETS
from dilated_attention.models import LongNetConfig, LongNetLM
from dilated_attention.modules import (
    BlockSparseAttention,
    BlockSparseDilatedAttention,
    DilatedAttention,
    MultiheadBlockSparseAttention,
    MultiheadDilatedAttention,
    RingAttention,
    RingBlockSparseAttention,
    RingDilatedAttention,
    RingMultiheadBlockSparseAttention,
    RingMultiheadDilatedAttention,
)

# a new kind of attention is one line
KINDS: dict[str, type[nn.Module]] = {
    "dilated": DilatedAttention,
    "multihead_dilated": MultiheadDilatedAttention,
    "block_sparse": BlockSparseAttention,
    "multihead_block_sparse": MultiheadBlockSparseAttention,
    "block_sparse_dilated": BlockSparseDilatedAttention,
    "ring": RingAttention,
    "ring_dilated": RingDilatedAttention,
    "ring_block_sparse": RingBlockSparseAttention,
    "ring_multihead_dilated": RingMultiheadDilatedAttention,
    "ring_multihead_block_sparse": RingMultiheadBlockSparseAttention,
}
_BUILD_OPTIONS = ("backend", "group", "mesh", "layout", "exchange", "ranks_per_node", "timeout", "device", "dtype")


def create_attention(kind: str, **config: Any) -> nn.Module:
    """An attention module by its kind.

    Args:
        kind: ``"dilated"`` → ``DilatedAttention`` · ``"multihead_dilated"`` → ``MultiheadDilatedAttention`` ·
            ``"block_sparse"`` → ``BlockSparseAttention`` · ``"multihead_block_sparse"`` → ``MultiheadBlockSparseAttention`` ·
            ``"block_sparse_dilated"`` → ``BlockSparseDilatedAttention``;
            of a sequence that processes share ``"ring"`` → ``RingAttention`` (dense) · ``"ring_dilated"`` → ``RingDilatedAttention`` ·
            ``"ring_block_sparse"`` → ``RingBlockSparseAttention`` · ``"ring_multihead_dilated"`` → ``RingMultiheadDilatedAttention`` ·
            ``"ring_multihead_block_sparse"`` → ``RingMultiheadBlockSparseAttention``.
        config: the constructor's arguments, all by name.

    Raises:
        ValueError: no such kind, or a value the module refuses.
        TypeError: an argument the module does not know, or one it needs is missing; with the accepted ones.

    >>> create_attention("multihead_dilated", embed_dim=256, num_heads=8, segment_lengths=[512, 2048], dilation_rates=[1, 4])
    """
    if not isinstance(kind, str):
        raise TypeError(f"kind is {kind!r} ({type(kind).__name__}); expected one of {_listed(KINDS)}")
    if kind not in KINDS:
        raise ValueError(f"kind is {kind!r}; expected one of {_listed(KINDS)}")
    module = KINDS[kind]
    parameters = inspect.signature(module).parameters
    _refuse_unknown(f"create_attention({kind!r})", config, parameters)
    missing = [name for name, p in parameters.items() if p.default is inspect.Parameter.empty and name not in config]
    if missing:
        raise TypeError(f"create_attention({kind!r}) lacks {', '.join(missing)}; it accepts {', '.join(parameters)}")
    return module(**config)


def create_model(preset: str, **overrides: Any) -> nn.Module:
    """A model by its preset, with fields of its configuration replaced.

    Args:
        preset: a name of ``factory.presets.MODEL_PRESETS``, such as ``"longnet-tiny"``.
        overrides: fields of ``LongNetConfig`` (``num_layers=6``); ``backend``, ``device``, ``dtype`` of the model; and, for a model
            whose sequences processes share, ``group`` or ``mesh``, ``layout``, ``exchange``, ``ranks_per_node``, ``timeout``: see ``LongNetLM``.

    Returns:
        ``LongNetLM`` with freshly initialised parameters, in training mode.

    Raises:
        ValueError: no such preset, or a configuration that cannot be built.
        TypeError: an override that is no field; with the fields there are.

    >>> create_model("longnet-tiny", mesh=mesh["cp"], layout="contiguous")
    """
    if not isinstance(preset, str):
        raise TypeError(f"preset is {preset!r} ({type(preset).__name__}); expected one of {_listed(MODEL_PRESETS)}")
    if preset not in MODEL_PRESETS:
        raise ValueError(f"preset is {preset!r}; expected one of {_listed(MODEL_PRESETS)}")
    accepted = [field.name for field in fields(LongNetConfig)]
    _refuse_unknown(f"create_model({preset!r})", overrides, (*accepted, *_BUILD_OPTIONS))
    build = {name: overrides.pop(name) for name in _BUILD_OPTIONS if name in overrides}
    return LongNetLM(replace(MODEL_PRESETS[preset], **overrides), **build)


def _refuse_unknown(what: str, given: Iterable[str], accepted: Iterable[str]) -> None:
    accepted = list(accepted)
    unknown = [name for name in given if name not in accepted]
    if unknown:
        raise TypeError(f"{what} got {', '.join(unknown)}, which it does not know; it accepts {', '.join(accepted)}")


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))
