"""Configurations of models: frozen records that are validated once and written as JSON next to the weights."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence, Sized
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from dilated_attention.files import parse_json, replacing
from dilated_attention.pattern import MAX_LENGTH, BlockPattern, DilatedPattern, pattern_from_spec
from dilated_attention.pattern.blocks.base import OBJECT
from dilated_attention.pattern.checks import as_int, as_int_tuple, differs, one_of, shown
from dilated_attention.validation import check_bool, check_heads, check_held, check_positive, check_probability

# ring attention over a sequence shared between processes → the same attention of a whole sequence
RING_KINDS = {"ring_dilated": "dilated", "ring": "dense", "ring_block_sparse": "block_sparse"}
KINDS = (*RING_KINDS.values(), *RING_KINDS)
# settings of the encoders that were trained with TorchScale: Prov-GigaPath's and LongViT's
TORCHSCALE_ENCODER: dict[str, Any] = {
    "dilation_rates": (1, 2, 4, 8, 16),
    "is_causal": False,
    "positions": "none",
    "head_offsets": "blocked",
    "tail": "zero_keys",
}
FEED_FORWARDS = ("gelu", "relu", "silu", "swiglu")
# A, C, G, T, N; and the longest k-mers whose 5^k codes are a size (as_size)
NUM_BASES, MAX_KMER = 5, 13
# fields of a kind of attention, in which layers may differ
ATTENTION_FIELDS = ("segment_lengths", "dilation_rates", "block_pattern", "head_offsets", "tail", "mixture_grad")
_OF_ROTATION = {"rotary_base": ("positions", ("rotary", "xpos")), "xpos_scale_base": ("positions", ("xpos",))}
# field → (the field, and its values, without which it means nothing)
_ONLY_WITH = {
    **_OF_ROTATION,
    "block_pattern": ("attention", ("block_sparse",)),
} | dict.fromkeys(("segment_lengths", "dilation_rates", "head_offsets", "tail", "mixture_grad"), ("attention", ("dilated",)))
ConfigT = TypeVar("ConfigT", bound="ModelConfig")
T = TypeVar("T", int, float)
# of a count that determines tensor shapes: the product of two such counts is below 2**63, which torch can represent
as_size = partial(as_int, minimum=1, maximum=2**31 - 1)


def without_meaning(kind: str, positions: Any) -> list[tuple[str, tuple[str, tuple[str, ...]]]]:
    """Returns the fields that mean nothing with this kind of attention and these positions, each with (the field that decides it, and the
    values with which it means something)."""
    chosen = {"attention": kind, "positions": positions}
    return [(name, decided) for name, decided in _ONLY_WITH.items() if chosen[decided[0]] not in decided[1]]


class ModelConfig:
    """Base class of the frozen dataclasses that configure a model: conversion to plain values for JSON, and back."""

    __slots__ = ()

    def _convert(self, check: Callable[[str, Any], Any], *names: str, optional: bool = False) -> None:
        """Replaces fields by what ``check`` makes of their name and value; ``optional``: None stays."""
        for name in names:
            value = getattr(self, name)
            object.__setattr__(self, name, None if optional and value is None else check(name, value))

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values for JSON: tuples as lists, a block pattern as its ``spec()``, a nested configuration as a dict.

        Raises:
            ValueError: if a pattern holds a Python function or a tensor, which cannot be written to a file.
        """
        assert is_dataclass(self)
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return dict(json.loads(json.dumps(values, default=_plain)))

    @classmethod
    def from_dict(cls: type[ConfigT], values: dict[str, Any]) -> ConfigT:
        """The inverse of ``to_dict``. Unknown keys are refused, because they would describe a different model."""
        assert is_dataclass(cls)
        if not isinstance(values, dict):
            raise TypeError(f"configuration is {values!r} ({type(values).__name__}); expected a dict, as {cls.__name__}.to_dict() makes it")
        known = [field.name for field in fields(cls)]
        unknown = sorted(set(values) - set(known))
        if unknown:
            raise ValueError(f"configuration has unknown keys {', '.join(unknown)}; {cls.__name__} knows {', '.join(known)}")
        missing = [x.name for x in fields(cls) if x.default is MISSING and x.default_factory is MISSING and x.name not in values]
        if missing:
            raise ValueError(f"configuration has no {', '.join(missing)}; {cls.__name__} needs it, and to_dict() writes it")
        if f'"{OBJECT}' in str(values):
            # in this process another pattern may have that name
            raise ValueError(
                f"configuration has a block_pattern with {OBJECT!r}, which names a function or a tensor of one process; expected a pattern "
                "of numbers"
            )
        return cls(**values)

    def to_json(self) -> str:
        """Returns the configuration as JSON."""
        return json.dumps(self.to_dict(), indent=2) + "\n"

    @classmethod
    def from_json(cls: type[ConfigT], text: str | bytes, name: str) -> ConfigT:
        """The inverse of ``to_json``. Raises ValueError, which begins with ``name``, for what is no configuration of this class."""
        values = parse_json(text, name)
        try:
            return cls.from_dict(values)
        # values in a file are not trusted: a string in place of a number means a bad file, not a wrong call
        except (TypeError, ValueError, ArithmeticError, RuntimeError) as error:
            raise ValueError(f"{name} is not a {cls.__name__}: {error}") from error

    def save(self, path: str | Path) -> None:
        """Writes the configuration as JSON: a reader sees either the old file or the new one."""
        with replacing(path) as new:
            new.write_text(self.to_json(), encoding="utf-8")

    @classmethod
    def load(cls: type[ConfigT], path: str | Path) -> ConfigT:
        """Loads the configuration from a file that ``save`` wrote. Raises ValueError like ``from_json``, with the file's name."""
        return cls.from_json(Path(path).read_bytes(), str(path))


def _plain(value: ModelConfig | BlockPattern) -> Any:
    """Returns what JSON writes of a value that it does not know."""
    if isinstance(value, ModelConfig):
        return value.to_dict()
    if value.is_bound_to_process:
        raise ValueError(
            f"block_pattern is {value!r}, which holds a function or a tensor and cannot be written to a file; use a pattern of numbers"
        )
    return value.spec()


@dataclass(frozen=True, kw_only=True, slots=True)
class LongNetConfig(ModelConfig):
    """Everything that defines a stack of blocks and its language model. The choice of kernels is not part of it; see ``backend=``.

    Args:
        vocab_size: number of tokens; 256 for bytes, 5 for bases. None for a stack without embeddings.
        embed_dim: E, width of the residual stream; a multiple of num_heads, and of 2·num_heads with rotary or XPOS positions.
        num_layers: M, the number of blocks.
        num_heads: H, the number of query heads.
        attention: ``"dilated"`` · ``"dense"`` · ``"block_sparse"``; and for a sequence shared between processes ``"ring_dilated"`` ·
            ``"ring"`` (dense) · ``"ring_block_sparse"``, with the same weights. Or a list of dicts that layers take in turn: layer i has
            entry i mod their number. An entry has the fields ``attention``, ``segment_lengths``, ``dilation_rates``, ``block_pattern``,
            ``head_offsets``, ``tail`` and ``mixture_grad``, with their usual defaults, and the configuration has none of them beside it;
            and ``positions="none"`` for layers that rotate nothing, in a model whose others do.
        segment_lengths: for dilated attention, w of each branch in positions.
        dilation_rates: r of each branch.
        block_pattern: for block-sparse attention, a ``BlockPattern`` or its ``spec()``. ``LocalWindow((1023, 0))`` is a sliding window.
        is_causal: whether a position sees only itself and earlier ones (``LongNetDecoder``). False: ``LongNetEncoder``.
        num_kv_heads: number of key/value heads, a divisor of num_heads; None for num_heads.
        ffn: activation of the feed-forward layer: ``"gelu"`` (the paper's) · ``"relu"`` · ``"silu"`` · ``"swiglu"``.
        ffn_dim: width of the feed-forward layer; None for 4·E, or with ``"swiglu"`` 8/3·E rounded up to a multiple of 32, which gives about
            as many parameters.
        norm: norm of the residual stream: ``"layer_norm"`` · ``"rms_norm"``.
        sub_norm: use MAGNETO's LayerNorms inside attention and feed-forward (arXiv 2210.06423), and its initialization.
        qk_norm: apply RMSNorm to query and key heads before they are rotated.
        bias: give all linear layers a bias.
        positions: ``"rotary"`` · ``"xpos"`` (the paper's; arXiv 2212.10554) · ``"none"``.
        rotary_base: θ of the rotation, for ``"rotary"`` and ``"xpos"``. It bounds the context N in which equal contents attract one
            another: at least 0.0424 · N^1.628 is needed (arXiv 2405.14591, Fig. 1), 1e6 at N = 32,768.
        xpos_scale_base: for ``"xpos"``, the number of positions over which XPOS's scale decays by its factor ζ.
        head_offsets, tail, mixture_grad: see ``dilated_attention``.
        dropout: dropout of the embedding and of each residual branch in training; [0, 1).
        attention_dropout: dropout of attention weights in training; [0, 1). Flash kernels do not support it, so it is slow.
        drop_path: probability in training that a whole residual branch is dropped for a sample or a packed document (stochastic depth,
            arXiv 1603.09382). It is that of the last block; it grows linearly from 0 at the first.
        final_norm: apply a norm after the last block.
        tie_embeddings: use the embedding as the output layer.
        scale_embedding: multiply embeddings by sqrt(E).
        layer_norm_eps: ε of every norm.
        kmer: k, for bases (``vocab_size=5``, ``tie_embeddings=False``): an input token is a base with its k − 1 nearest, as
            ``models.kmers(bases, k, both_sides=not is_causal)`` codes them, below 5^k; targets and logits stay the 5 bases. 1 (a token is
            a base) to 13.

    Raises:
        ValueError, TypeError: if the model cannot be built; the message names the field, its value and what is allowed.
    """

    vocab_size: int | None = None
    embed_dim: int
    num_layers: int
    num_heads: int
    # a dict has no hash
    attention: str | tuple[dict[str, Any], ...] = field(default="dilated", hash=False)
    segment_lengths: tuple[int, ...] = ()
    dilation_rates: tuple[int, ...] = ()
    block_pattern: BlockPattern | None = None
    is_causal: bool = True
    num_kv_heads: int | None = None
    ffn: str = "gelu"
    ffn_dim: int | None = None
    norm: str = "layer_norm"
    sub_norm: bool = True
    qk_norm: bool = False
    bias: bool = True
    positions: str = "rotary"
    rotary_base: float = 10000.0
    xpos_scale_base: float = 512.0
    head_offsets: str | tuple[tuple[int, ...], ...] = "cyclic"
    tail: str = "mask"
    mixture_grad: str = "exact"
    dropout: float = 0.0
    attention_dropout: float = 0.0
    drop_path: float = 0.0
    final_norm: bool = True
    tie_embeddings: bool = True
    scale_embedding: bool = True
    layer_norm_eps: float = 1e-5
    kmer: int = 1

    def __post_init__(self) -> None:
        self._convert(as_size, "embed_dim", "num_layers", "num_heads")
        self._convert(as_size, "vocab_size", "num_kv_heads", "ffn_dim", optional=True)
        if not isinstance(self.attention, (list, tuple)):
            one_of("attention", self.attention, KINDS)
        one_of("ffn", self.ffn, FEED_FORWARDS)
        one_of("norm", self.norm, ("layer_norm", "rms_norm"))
        one_of("positions", self.positions, ("rotary", "xpos", "none"))
        one_of("mixture_grad", self.mixture_grad, ("exact", "detached"))
        self._convert(check_bool, "is_causal", "sub_norm", "qk_norm", "bias", "final_norm", "tie_embeddings", "scale_embedding")
        check_heads(self.embed_dim, self.num_heads, self.num_kv_heads or self.num_heads, rotary=self.positions != "none")
        self._convert(partial(check_positive, above=1.0), "rotary_base")
        self._convert(partial(check_positive, above=0.0), "xpos_scale_base")
        self._convert(check_held, "layer_norm_eps")
        self._convert(check_probability, "dropout", "attention_dropout", "drop_path")
        self._convert(partial(as_int, minimum=1, maximum=MAX_KMER), "kmer")
        if self.kmer > 1 and self.vocab_size != NUM_BASES:
            raise ValueError(
                f"kmer is {self.kmer} and vocab_size is {self.vocab_size}; k-mers are of the bases A, C, G, T and N: use "
                f"vocab_size={NUM_BASES}, or leave kmer out"
            )
        if self.kmer > 1 and self.tie_embeddings:
            raise ValueError(
                f"kmer is {self.kmer} and tie_embeddings is True; an embedding of 5^{self.kmer} codes is no output layer for {NUM_BASES} "
                "bases: use tie_embeddings=False"
            )
        if isinstance(self.block_pattern, str):
            self._convert(lambda _, spec: pattern_from_spec(spec), "block_pattern")
        if self.kind == "dilated":
            if not as_int_tuple("segment_lengths", self.segment_lengths):
                raise ValueError(f"attention is {self.attention!r} and segment_lengths is empty; give segment_lengths and dilation_rates")
            pattern = self.pattern
            assert isinstance(pattern, DilatedPattern)
            pattern.offsets(self.num_heads)
            # the pattern has converted lists to tuples of plain integers, so that equal configurations compare equal
            self._convert(lambda name, _: getattr(pattern, name), "segment_lengths", "dilation_rates", "head_offsets")
        else:
            # JSON writes empty tuples as lists; what is not empty is refused below, as are tensors of no dimension, which have no length
            for name in ("segment_lengths", "dilation_rates"):
                value = getattr(self, name)
                if isinstance(value, Sized) and not isinstance(value, str | dict) and getattr(value, "ndim", True) and not len(value):
                    object.__setattr__(self, name, ())
        for name, (chooser, owners) in without_meaning(self.kind, self.positions):
            value = getattr(self, name)
            if differs(value, type(self).__dataclass_fields__[name].default):
                raise ValueError(
                    f"{name} is {shown(value)} and {chooser} is {getattr(self, chooser)!r}, which has none; leave it out, or "
                    f"use {chooser}={' or '.join(map(repr, owners))}"
                )
        if self.kind == "mixed":
            self._convert(self._checked_entries, "attention")
        if self.kind == "block_sparse" and not isinstance(self.block_pattern, BlockPattern):
            raise (ValueError if self.block_pattern is None else TypeError)(
                f"block_pattern is {shown(self.block_pattern)}; attention={self.attention!r} needs a pattern of dilated_attention.pattern, "
                "such as LocalWindow((1023, 0))"
            )

    def _checked_entries(self, name: str, entries: Any) -> tuple[dict[str, Any], ...]:
        """Returns the entries of ``attention`` with their values converted, and without those that are the default."""
        if not 1 <= len(entries) <= self.num_layers:
            raise ValueError(
                f"attention has {len(entries)} entries and num_layers is {self.num_layers}; expected 1 to {self.num_layers}, which layers "
                "take in turn"
            )
        checked = []
        for i, entry in enumerate(entries):
            if not isinstance(entry, dict):
                raise TypeError(f"{name}[{i}] is {shown(entry)} ({type(entry).__name__}); expected a dict such as {{'attention': 'dense'}}")
            if unknown := [key for key in entry if key not in ("attention", *ATTENTION_FIELDS, "positions")]:
                raise ValueError(
                    f"{name}[{i}] has {', '.join(map(shown, unknown))}; expected some of attention, {', '.join(ATTENTION_FIELDS)}, "
                    "positions: all others are the same in every layer"
                )
            one_of(f"{name}[{i}]['attention']", entry.get("attention", "dilated"), KINDS)
            one_of(f"{name}[{i}]['positions']", entry.get("positions", "none"), tuple(dict.fromkeys(("none", self.positions))))
            try:
                layer = self._with(entry)
            except (TypeError, ValueError) as error:
                raise (TypeError if isinstance(error, TypeError) else ValueError)(f"{name}[{i}]: {error}") from error
            usual = type(self).__dataclass_fields__
            values = {key: getattr(layer, key) for key in ATTENTION_FIELDS}
            values = {"attention": layer.attention} | {key: value for key, value in values.items() if value != usual[key].default}
            checked.append(values if layer.positions == self.positions else values | {"positions": layer.positions})
        return tuple(checked)

    def _with(self, entry: dict[str, Any]) -> LongNetConfig:
        changes: dict[str, Any] = {"attention": "dilated"}
        if entry.get("positions") == "none":
            # the numbers of a rotation go with it
            changes |= {name: type(self).__dataclass_fields__[name].default for name in _OF_ROTATION}
        return replace(self, **changes | entry)

    @property
    def kind(self) -> str:
        """``"dilated"``, ``"dense"`` or ``"block_sparse"``; for a ring, the kind of attention over the whole sequence. ``"mixed"`` if
        ``attention`` lists entries that layers take in turn."""
        return RING_KINDS.get(self.attention, self.attention) if isinstance(self.attention, str) else "mixed"

    @property
    def cycle(self) -> tuple[LongNetConfig, ...]:
        """The configurations that layers take in turn, each with one attention: this one, unless ``attention`` is a list."""
        return (self,) if isinstance(self.attention, str) else tuple(map(self._with, self.attention))

    @property
    def layers(self) -> tuple[LongNetConfig, ...]:
        """The configuration of each layer, with one attention."""
        return tuple(itertools.islice(itertools.cycle(self.cycle), self.num_layers))

    @property
    def patterns(self) -> tuple[DilatedPattern | BlockPattern, ...]:
        """The patterns of ``cycle``."""
        return tuple(one.pattern for one in self.cycle)

    def sum_over_layers(self, figures: Sequence[T]) -> T:
        """Returns the sum over all layers of a figure of each configuration in ``cycle``."""
        total: Any = sum(figure * len(range(i, self.num_layers, len(figures))) for i, figure in enumerate(figures))
        return total  # type: ignore[no-any-return]

    @property
    def is_ring(self) -> bool:
        return any(one.attention in RING_KINDS for one in self.cycle)

    @property
    def pattern(self) -> DilatedPattern | BlockPattern:
        """The attention pattern of every block; ``is_causal`` applies in addition.

        Raises:
            ValueError: if layers differ; ``layers`` and ``cycle`` have each one's.
        """
        if self.kind == "mixed":
            raise ValueError(f"attention is {shown(self.attention)}, by layer, and has no one pattern; ask config.layers[i].pattern")
        if self.kind == "dilated":
            return DilatedPattern(self.segment_lengths, self.dilation_rates, self.head_offsets, tail=self.tail)  # type: ignore[arg-type]
        if self.kind == "dense":
            return DilatedPattern((MAX_LENGTH,), (1,))
        assert self.block_pattern is not None
        return self.block_pattern

    @property
    def head_dim(self) -> int:
        return self.embed_dim // self.num_heads

    @property
    def inner_dim(self) -> int:
        """Width of the feed-forward layer, with the default filled in."""
        if self.ffn_dim is not None:
            return self.ffn_dim
        return -(-8 * self.embed_dim // 3 // 32) * 32 if self.ffn == "swiglu" else 4 * self.embed_dim


def as_config(name: str, value: Any) -> LongNetConfig:
    if not isinstance(value, LongNetConfig):
        raise TypeError(f"{name} is {shown(value)} ({type(value).__name__}); expected a LongNetConfig, e.g. model.config")
    return value
