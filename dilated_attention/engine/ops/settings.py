"""The settings of a call: all its arguments that are not tensors, as a record and as arguments of a custom op.

All attention ops take their tensors, then ``CallSettings.arguments()`` (``definition.py``). The *fixed* part of the settings, on which
torch.compile specializes, is one string. Numbers that may change from call to call are arguments of their own.
"""

from __future__ import annotations

import ast
import functools
import operator
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from dilated_attention.backends import AttentionRequest, Options, detect, registry
from dilated_attention.pattern import MAX_LENGTH, BlockPattern, DilatedPattern, pattern_from_spec

# segment_lengths, dilation_rates, head_offsets, branch_heads, tail
Branches = tuple[tuple[int, ...], tuple[int, ...], "str | tuple[tuple[int, ...], ...]", str, str]
# dense attention as branches: one segment longer than any sequence, which plans cut to the sequence
DENSE: Branches = (MAX_LENGTH,), (1,), "zero", "all", "mask"


class CallSettings(NamedTuple):
    """The checked arguments of one call that are not tensors: plain Python values, so that it is hashable.

    A new option of the softmax is a field here, with a default that changes nothing; ``features`` says what a backend must support for it,
    and ``kernel_options`` what its kernels are told. Whatever else handles a call passes this record on.

    Args:
        scale: factor of the scores q·k.
        query_offset: position of the first query; 0 in a distributed call.
        seq_len: N of a distributed call, −1 if the ranks have to ask each other; 0 in one process.
        branches: the arguments of a ``DilatedPattern``; None if there is only a block pattern.
        blocks: ``BlockPattern.spec()``; "" if there are only branches.
        window: (left, right), with −1 for unbounded; () without a window.
        detached: no gradient flows through the mixing weights of the branches.
        needs_grad: a backward will follow.
        softcap: c of scores c·tanh(s/c); 0 for plain scores.
        has_sinks: the softmax of each head includes a sink.
        bias: what is added to the scores: "" for nothing, "position" for ``Alibi``, "place" for ``Distance``.
        sharding: the additional settings of a distributed call; () in one process.
    """

    # what may change from call to call
    scale: float
    dropout_p: float = 0.0
    query_offset: int = 0
    seq_len: int = 0
    # the fixed part
    branches: Branches | None = None
    blocks: str = ""
    window: tuple[int, ...] = ()
    is_causal: bool = False
    detached: bool = False
    deterministic: bool = False
    needs_grad: bool = False
    backend: str = "auto"
    precision: str = "native"
    softcap: float = 0.0
    has_sinks: bool = False
    bias: str = ""
    sharding: tuple[Any, ...] = ()

    @property
    def pattern(self) -> DilatedPattern:
        """The dilated pattern of ``branches``, if there are any."""
        assert self.branches is not None
        return pattern_of(self.branches)

    @property
    def window_sides(self) -> tuple[int | None, int | None] | None:
        """The window with None for unbounded; None without a window."""
        if not self.window:
            return None
        left, right = self.window
        return None if left < 0 else left, None if right < 0 else right

    @property
    def saves_outputs(self) -> bool:
        """Whether the forward of a call on one whole sequence saves the branches' outputs for the backward, where it can."""
        is_plain = not (self.dropout_p or self.bias or self.window or self.query_offset)
        return self.detached and self.needs_grad and is_plain

    @property
    def features(self) -> dict[str, Any]:
        """What the weights of pairs ask of a backend, as fields of an ``AttentionRequest``."""
        return {"dropout": self.dropout_p > 0, "softcap": self.softcap > 0, "bias": bool(self.bias)}

    def kernel_options(self, **masks: Any) -> Options:
        """Returns what every launch of a call is told; ``masks``: its mask, dropout and bias."""
        deterministic = self.deterministic or torch.are_deterministic_algorithms_enabled()
        return Options(self.scale, deterministic=deterministic, softcap=self.softcap, **masks)

    def arguments(self) -> tuple[Any, ...]:
        """Returns the op's arguments that follow its tensors."""
        return settings_text(tuple(self[_FIXED:])), *self[:_FIXED]


def as_dense(settings: CallSettings, q: torch.Tensor) -> CallSettings:
    """Returns the settings of the dense attention that computes a call of a block pattern, where one does (see ``dense_form``)."""
    if not settings.blocks or settings.branches is not None or settings.backend != "auto" or not q.is_cuda:
        return settings
    # equal for all lengths
    form = _form_of(settings._replace(query_offset=0, seq_len=0), q.dtype, q.shape[3], q.device)
    return settings if form is None else settings._replace(branches=DENSE, blocks="", window=form[0], is_causal=form[1])


@functools.lru_cache(maxsize=256)
def _form_of(settings: CallSettings, dtype: torch.dtype, head_dim: int, device: torch.device) -> tuple[tuple[int, ...], bool] | None:
    asked = AttentionRequest(hardware=detect(device), dtype=dtype, head_dim=head_dim, needs_grad=True, **settings.features)
    return dense_form(pattern_from_spec(settings.blocks), settings.is_causal, asked)


def dense_form(pattern: object, is_causal: bool, asked: AttentionRequest) -> tuple[tuple[int, ...], bool] | None:
    """Returns (window as in ``CallSettings``, whether it is causal) of the dense attention that computes a block pattern; None where lists
    of blocks do: for other patterns, and where this project's own kernels cannot run, which take windows beside all options. Dense kernels
    take a window in closed form: a new length needs no lists, and packed documents are one launch.

    Args:
        asked: the kind of call; its window does not matter.
    """
    sides = pattern.dense_window if isinstance(pattern, BlockPattern) else None
    if sides is None or registry.get("tiles").reasons_against(replace(asked, window=True, blocks=None, block_masks="none")):
        return None
    left, right = sides
    if left is None and (right is None or right == 0 or is_causal):
        return (), is_causal or right == 0
    return (-1 if left is None else left, -1 if right is None else right), is_causal


# where the fixed part begins, and ``needs_grad`` in it
_FIXED = CallSettings._fields.index("branches")
_NEEDS_GRAD = CallSettings._fields.index("needs_grad") - _FIXED


def settings_text(fixed: tuple[Any, ...]) -> str:
    """Returns the text of the fixed part, a Python literal. torch.compile treats the result as a constant."""
    return repr(fixed)


# what torch.compiler.assume_constant_result does, without importing the compiler
settings_text._dynamo_marked_constant = True  # type: ignore[attr-defined]


def settings_of(text: str, scale: float, dropout_p: float, query_offset: int, seq_len: int) -> CallSettings:
    """Returns the settings that ``CallSettings.arguments`` made these arguments from."""
    return CallSettings._make((scale, dropout_p, query_offset, seq_len, *_parsed(text)))


@functools.lru_cache(maxsize=1024)
def _parsed(text: str) -> tuple[Any, ...]:
    return tuple(ast.literal_eval(text))


def with_needs_grad(text: str) -> str:
    """Returns the text of the same fixed part, with ``needs_grad`` true."""
    fixed = _parsed(text)
    return text if fixed[_NEEDS_GRAD] else settings_text((*fixed[:_NEEDS_GRAD], True, *fixed[_NEEDS_GRAD + 1 :]))


@functools.lru_cache(maxsize=256)
def pattern_of(branches: Branches) -> DilatedPattern:
    return DilatedPattern(*branches)


def checked_branches(branches: tuple[Any, ...], num_heads: int) -> Branches:
    """Validates the arguments of a dilated pattern, whose lengths and rates are integers already, and returns them as plain values.

    Raises:
        ValueError, TypeError: no such pattern exists.
    """
    # torch.compile traces this function. It warns about every lru_cache that it traces through, so pattern_of is not used; index() makes a
    # symbolic integer a constant
    lengths, rates, head_offsets, branch_heads, tail = branches
    lengths, rates = tuple([operator.index(length) for length in lengths]), tuple([operator.index(rate) for rate in rates])
    pattern = DilatedPattern(lengths, rates, head_offsets, branch_heads, tail)
    offsets = pattern.head_offsets
    if not isinstance(offsets, str):
        offsets = tuple([tuple([operator.index(offset) for offset in row]) for row in pattern.offsets(num_heads)])
    return lengths, rates, offsets, branch_heads, tail
