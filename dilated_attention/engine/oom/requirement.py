"""Computes how much memory a call of an operation needs, from the arguments of the op by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch

from dilated_attention.backends.base import accumulation_dtype
from dilated_attention.engine.memory import attention_memory
from dilated_attention.engine.ops.settings import pattern_of

Terms = tuple[tuple[str, int], ...]


class Setting(NamedTuple):
    """What a user can change of a call. ``length``: N, or for a decoder the number of keys of a row."""

    batch: int
    length: int
    dtype: torch.dtype


@dataclass(frozen=True, kw_only=True)
class MemoryRequirement:
    """The memory requirement of one call of an operation. It holds no tensors.

    Args:
        op: name of the function that the user calls.
        shapes: description of the tensors.
        held: bytes of the tensors that were passed in and existed before the call.
        terms: function of a setting that returns (what, bytes) at the peak of the call, over both passes if there are two; None if
            nothing is known.
        least: ``terms`` is a lower bound: results and copies that are always made, while kernels may take more.
        needs_grad: a backward will follow, or this is one.
        positions: what ``setting.length`` counts; "" where no fewer would help.
    """

    op: str
    pass_name: Literal["forward", "backward"]
    device: torch.device
    shapes: str
    held: int
    setting: Setting
    terms: Callable[[Setting], Terms] | None = None
    least: bool = False
    needs_grad: bool = False
    positions: str = "positions"

    def bytes_at(self, **changes: Any) -> int:
        """Returns the bytes that the call needs at its own setting, or with ``changes`` to it."""
        assert self.terms is not None
        return sum(size for _, size in self.terms(self.setting._replace(**changes)))

    def size_text(self, **changes: Any) -> str:
        return f"{'at least' if self.least else 'about'} {size_text(self.bytes_at(**changes))}"


def size_text(size: float) -> str:
    """ "1.50 GiB": in the largest unit of which there is at least one."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:,.0f} bytes" if unit == "bytes" else f"{size:,.2f} {unit}"
        size /= 1024
    return f"{size:,.2f} TiB"


def requirement(op: str, x: Mapping[str, Any], shapes: str = "", **more: Any) -> MemoryRequirement:
    """Returns the requirement of a call with arguments x. ``shapes``: what to add to the inputs' shapes; ``more``: other fields."""
    lists = {f"{name}[{i}]": one for name, found in x.items() if isinstance(found, list) for i, one in enumerate(found)}
    tensors = {name: one for name, one in {**x, **lists}.items() if isinstance(one, torch.Tensor)}
    inputs = {name: one for name, one in tensors.items() if "q" not in x or name in ("q", "k", "v")}
    first = next(iter(inputs.values()))
    named = ", ".join(f"{name} {tuple(one.shape)}" for name, one in inputs.items())
    return MemoryRequirement(
        op=op,
        pass_name="forward" if {"dout", "dys"}.isdisjoint(x) else "backward",
        device=first.device,
        shapes=f"{named} in {str(first.dtype).removeprefix('torch.')}{shapes}",
        # fewer than the shape implies where a tensor is expanded
        held=sum(min(one.nbytes, one.untyped_storage().nbytes()) for one in tensors.values() if one.device == first.device),
        setting=more.pop("setting", None) or Setting(first.shape[0], x["k"].shape[1] if "k" in x else 1, first.dtype),
        needs_grad=trains(x),
        **more,
    )


def trains(x: Mapping[str, Any]) -> bool:
    return bool(x.get("needs_grad") or "dout" in x)


def dilated_requirement(x: Mapping[str, Any]) -> MemoryRequirement:
    """Returns what ``dilated_attention`` and ``attention`` need. For self-attention it is the engine's own estimate."""
    (_, Nq, H, D), (_, Nk, Hk, _), needs_grad = x["q"].shape, x["k"].shape, trains(x)
    on_cpu, is_causal, with_mask = x["q"].device.type == "cpu", x["is_causal"], x["key_padding_mask"] is not None
    pattern = pattern_of(x["branches"])
    is_dense = pattern.dilation_rates == (1,) and pattern.segment_lengths[0] >= Nk
    # on a GPU the estimate covers only the fused engine; a table of tiles needs about as much forward, and less backward
    exact = Nq == Nk and not x["query_offset"] and (on_cpu or not (x["window"] or x["dropout_p"] or x["cu_seqlens"] is not None))

    def terms(setting: Setting) -> Terms:
        found = attention_memory(
            pattern, setting.length, H, D, batch_size=setting.batch, num_kv_heads=Hk, dtype=setting.dtype, needs_grad=needs_grad,
            device_type="cpu" if on_cpu else "cuda", is_causal=is_causal, key_padding_mask=with_mask,
        )  # fmt: skip
        return found.forward if found.forward_peak >= found.backward_peak else found.backward

    shapes = "" if is_dense else f", branches {' '.join(f'{w}/{r}' for w, r in pattern.branches)}"
    shapes += "".join(f", {name}={x[name]}" for name in ("is_causal", "dropout_p", "window") if x[name])
    # outputs of branches that detached mixing saves on a GPU are not counted
    least = not exact or bool(x["dropout_p"]) or (x["detached"] and not on_cpu)
    return requirement("attention" if is_dense else "dilated_attention", x, shapes, terms=terms if exact else results(x), least=least)


def blocks_requirement(x: Mapping[str, Any]) -> MemoryRequirement:
    """Returns what ``block_sparse_attention`` needs, with or without dilated branches: the tensors allocated whichever kernel runs."""
    op = "block_sparse_attention" if x["branches"] is None else "block_sparse_dilated_attention"
    return requirement(op, x, f", pattern {x['blocks'][:80]}", terms=results(x), least=True)


def results(x: Mapping[str, Any]) -> Callable[[Setting], Terms]:
    """Returns the bytes of the inputs and results alone, which any kernel needs; in training, those of the backward."""
    (_, Nq, H, D), (_, Nk, Hk, _), needs_grad = x["q"].shape, x["k"].shape, trains(x)
    # branches and blocks have separate results, which are then merged or added in the accumulation dtype
    is_union = x["branches"] is not None and x["blocks"]

    def terms(setting: Setting) -> Terms:
        e, a = setting.dtype.itemsize, accumulation_dtype(setting.dtype).itemsize
        # the ratio of queries to keys stays that of the call
        rows = setting.batch * (setting.length * Nq // max(1, Nk)) * H
        Q, K = rows * D, setting.batch * setting.length * Hk * D
        found = [("q, k, v", (Q + 2 * K) * e), ("out, dout" if needs_grad else "out", Q * e * (1 + needs_grad)), ("lse", rows * a)]
        found += [("dq, dk, dv", (Q + 2 * K) * e)] if needs_grad else []
        found += [("of the other part", (Q + 2 * K) * a if needs_grad else Q * e)] if is_union else []
        return tuple(found)

    return terms
