"""Describes how much memory a call of an operation needs, and which of its settings a user can change."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypedDict

import torch

from dilated_attention.engine.oom.device_memory import size_text

Terms = tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdjustableSetting:
    """The settings of a call that a user can change to make it take less memory.

    Args:
        batch: B.
        length: N, or for a decoder the number of keys of a row.
        dtype: dtype of q, k, v.
        detached: whether ``mixture_grad="detached"``.
    """

    batch: int
    length: int
    dtype: torch.dtype
    detached: bool = False


@dataclass(frozen=True, kw_only=True)
class MemoryRequirement:
    """The memory requirement of one call of an operation. It holds no tensors.

    Args:
        op: name of the function that the user calls.
        is_backward: whether the call is the backward.
        device: device of q.
        shapes: description of the tensors.
        held: bytes of the tensors that were passed in and existed before the call.
        setting: the current setting.
        terms: function of a setting that returns (what, bytes) at the peak of the call, over both passes if there are two; None if
            nothing is known.
        least: ``terms`` is a lower bound: results and copies that are always made, while kernels may take more.
        needs_grad: a backward will follow, or this is one.
        lse_gradient: this is a backward that received a gradient of lse.
        can_shorten: whether fewer positions or another dtype would help.
        suggestions: further ways to save memory, as functions of the bytes available to the call that return sentences.
    """

    op: str
    is_backward: bool
    device: torch.device
    shapes: str
    held: int
    setting: AdjustableSetting
    terms: Callable[[AdjustableSetting], Terms] | None = None
    least: bool = False
    needs_grad: bool = False
    lse_gradient: bool = False
    can_shorten: bool = True
    suggestions: tuple[Callable[[int], Iterable[str]], ...] = ()

    @property
    def pass_name(self) -> str:
        return "backward" if self.is_backward else "forward"

    @property
    def name(self) -> str:
        return f"the {self.pass_name} of {self.op}"

    def bytes_at(self, setting: AdjustableSetting) -> int:
        assert self.terms is not None
        return sum(size for _, size in self.terms(setting))


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Describes a tensor without holding its memory. ``held``: bytes of its storage, which are fewer than its shape implies if expanded."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    held: int


def without_memory(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns an op's arguments with ``TensorInfo`` in place of the tensors, so that a stored call keeps no memory alive."""

    def info(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            held = min(x.numel() * x.element_size(), x.untyped_storage().nbytes())
            return TensorInfo(tuple(x.shape), x.dtype, x.device, held)
        # lists of tensors; the settings of a call stay as they are
        return [info(one) for one in x] if isinstance(x, (list, tuple)) and any(isinstance(one, torch.Tensor) for one in x) else x

    return {name: info(x) for name, x in arguments.items()}


def tensors_of(arguments: Mapping[str, Any]) -> dict[str, TensorInfo]:
    """Returns the tensors among an op's arguments, by name."""
    return {name: x for name, x in arguments.items() if isinstance(x, TensorInfo)}


def held_bytes(arguments: Mapping[str, Any], device: torch.device) -> int:
    return sum(x.held for x in tensors_of(arguments).values() if x.device == device)


def shapes_text(arguments: Mapping[str, Any], names: tuple[str, ...] = ("q", "k", "v")) -> str:
    """ "q (1, 8, 2, 4), k (1, 8, 2, 4), v (1, 8, 2, 4) in float32" """
    found = {name: x for name, x in tensors_of(arguments).items() if name in names}
    first = next(iter(found.values()))
    return ", ".join(f"{name} {x.shape}" for name, x in found.items()) + f" in {dtype_text(first.dtype)}"


class Training(TypedDict):
    """The fields of a ``MemoryRequirement`` that concern gradients."""

    is_backward: bool
    needs_grad: bool
    lse_gradient: bool


def of_training(arguments: Mapping[str, Any]) -> Training:
    is_backward = "dout" in arguments
    return {
        "is_backward": is_backward,
        "needs_grad": is_backward or bool(arguments["needs_grad"]),
        "lse_gradient": arguments.get("dlse") is not None,
    }


def dtype_text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def terms_text(terms: Terms) -> str:
    """ "5.0 GiB: q, k, v 3.0 GiB, out 2.0 GiB" """
    total = sum(size for _, size in terms)
    return f"{size_text(total)}: {', '.join(f'{what} {size_text(size)}' for what, size in terms)}"


def largest(fits: Callable[[int], bool], below: int, step: int = 1) -> int | None:
    """Returns the largest multiple of ``step`` below ``below`` that fits, or None. It bisects, since smaller values need less."""
    low, high = 0, math.ceil(below / step)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle * step) else (low, middle)
    return low * step if low else None
