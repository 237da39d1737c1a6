"""What a call of an operation needs of memory, and what of it a user can change."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypedDict

import torch

from dilated_attention.engine.room import size_text

Terms = tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What of a call a user can change so that it takes less.

    Args:
        batch: B.
        length: N, or of a decoder the keys of a row.
        dtype: of q, k, v.
        detached: ``mixture_grad="detached"``.
    """

    batch: int
    length: int
    dtype: torch.dtype
    detached: bool = False


@dataclass(frozen=True, kw_only=True)
class Need:
    """One call of an operation. It holds no tensors.

    Args:
        op: name of the function that the user calls.
        is_backward: of which pass.
        device: of q.
        shapes: the tensors, in words.
        held: bytes of the tensors that were handed in, which lay there before.
        setting: as it is.
        terms: (what, bytes) at the highest point of the call, both passes looked at if there are two, at a setting; None where nothing is known.
        least: ``terms`` are results and copies that are made in any case, while kernels may take more.
        needs_grad: a backward is to come, or this is it.
        lse_gradient: of a backward, that a gradient of lse came in.
        can_shorten: whether fewer positions, or another dtype, are a way out.
        ways: more ways to need less than smaller settings have: functions of the bytes that are there for the call, each giving sentences.
    """

    op: str
    is_backward: bool
    device: torch.device
    shapes: str
    held: int
    setting: Setting
    terms: Callable[[Setting], Terms] | None = None
    least: bool = False
    needs_grad: bool = False
    lse_gradient: bool = False
    can_shorten: bool = True
    ways: tuple[Callable[[int], Iterable[str]], ...] = ()

    @property
    def pass_name(self) -> str:
        return "backward" if self.is_backward else "forward"

    @property
    def name(self) -> str:
        return f"the {self.pass_name} of {self.op}"

    def bytes_at(self, setting: Setting) -> int:
        assert self.terms is not None
        return sum(size for _, size in self.terms(setting))


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """A tensor without its memory. ``held``: bytes that it holds, which are fewer than it shows where it is expanded."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    held: int


def without_memory(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """An op's arguments with their tensors' facts in place of the tensors, so that what is kept of a call holds no memory."""

    def facts(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            held = min(x.numel() * x.element_size(), x.untyped_storage().nbytes())
            return TensorFacts(tuple(x.shape), x.dtype, x.device, held)
        return [facts(one) for one in x] if isinstance(x, (list, tuple)) else x

    return {name: facts(x) for name, x in arguments.items()}


def tensors_of(arguments: Mapping[str, Any]) -> dict[str, TensorFacts]:
    """The tensors among an op's arguments, by name."""
    return {name: x for name, x in arguments.items() if isinstance(x, TensorFacts)}


def held_bytes(arguments: Mapping[str, Any], device: torch.device) -> int:
    return sum(x.held for x in tensors_of(arguments).values() if x.device == device)


def shapes_text(arguments: Mapping[str, Any], names: tuple[str, ...] = ("q", "k", "v")) -> str:
    """ "q (1, 8, 2, 4), k (1, 8, 2, 4), v (1, 8, 2, 4) in float32" """
    found = {name: x for name, x in tensors_of(arguments).items() if name in names}
    first = next(iter(found.values()))
    return ", ".join(f"{name} {x.shape}" for name, x in found.items()) + f" in {dtype_text(first.dtype)}"


class Training(TypedDict):
    """What of a ``Need`` is about gradients."""

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
    """The largest multiple of ``step`` below ``below`` that fits, by bisection: what is smaller needs less. None if none does."""
    low, high = 0, math.ceil(below / step)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle * step) else (low, middle)
    return low * step if low else None
