"""Computes the memory requirements of the single-process operations from their arguments."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from dilated_attention.backends import AttentionRequest, detect
from dilated_attention.backends.base import accumulation_dtype
from dilated_attention.engine.branches.strategy import is_fused, saved_budget
from dilated_attention.engine.kernels.tiles_choice import tiles_passes
from dilated_attention.engine.memory import attention_memory
from dilated_attention.engine.oom.requirement import (
    AdjustableSetting,
    MemoryRequirement,
    TensorInfo,
    Terms,
    dtype_text,
    held_bytes,
    of_training,
    shapes_text,
)
from dilated_attention.engine.ops.settings import pattern_of
from dilated_attention.pattern import DilatedPattern

# ways to save memory that higher-level modules add: each takes the call's arguments and returns an entry of
# ``MemoryRequirement.suggestions``
more_suggestions: list[Callable[[Mapping[str, Any]], Callable[[int], Iterable[str]]]] = []


def setting_of(arguments: Mapping[str, Any]) -> AdjustableSetting:
    q, k = arguments["q"], arguments["k"]
    return AdjustableSetting(batch=q.shape[0], length=k.shape[1], dtype=q.dtype, detached=arguments.get("detached", False))


def dilated_requirement(arguments: Mapping[str, Any]) -> MemoryRequirement:
    """Returns what ``dilated_attention`` and ``attention`` need. For self-attention it is the engine's own estimate."""
    x = arguments
    q, k = x["q"], x["k"]
    pattern = pattern_of(x["branches"])
    is_dense = pattern.dilation_rates == (1,) and pattern.segment_lengths[0] >= k.shape[1]
    whole = q.shape[1] == k.shape[1] and not x["query_offset"]
    # on a GPU the estimate covers only the fused engine and the tiles
    plain = not (x["window"] or x["dropout_p"] or x["cu_seqlens"] is not None)
    exact = whole and (plain or q.device.type == "cpu")
    needs_grad = x["needs_grad"] or "dout" in x

    def terms(setting: AdjustableSetting) -> Terms:
        if not exact:
            return results(setting, q, k, needs_grad)
        saved = saved_bytes(pattern, setting, q, k) if setting.detached and needs_grad else 0
        estimate = attention_memory(
            pattern,
            setting.length,
            q.shape[2],
            q.shape[3],
            batch_size=setting.batch,
            num_kv_heads=k.shape[2],
            dtype=setting.dtype,
            device_type=q.device.type,
            is_causal=x["is_causal"],
            needs_grad=needs_grad,
            key_padding_mask=x["key_padding_mask"] is not None,
            tiles=_on_tiles(x, pattern, setting, needs_grad),
            detached=setting.detached,
            saved_bytes=saved,
        )
        return max(estimate.forward, estimate.backward, key=lambda side: sum(size for _, size in side))

    return MemoryRequirement(
        op="attention" if is_dense else "dilated_attention",
        **of_training(x),
        device=q.device,
        shapes=_shapes(x, pattern, is_dense),
        held=held_bytes(x, q.device),
        setting=setting_of(x),
        terms=terms,
        least=not exact or bool(x["dropout_p"]),
        suggestions=tuple(way(x) for way in more_suggestions),
    )


def _on_tiles(x: Mapping[str, Any], pattern: DilatedPattern, setting: AdjustableSetting, needs_grad: bool) -> tuple[bool, bool]:
    """Whether the forward and the backward of an op would run on the tile-table kernels at a given setting."""
    q, k = x["q"], x["k"]
    # the estimate for a GPU may be requested on a machine without one
    if q.device.type != "cuda" or not torch.cuda.is_available():
        return False, False
    request = AttentionRequest(
        hardware=detect(q.device),
        dtype=setting.dtype,
        head_dim=q.shape[3],
        num_heads=q.shape[2],
        num_kv_heads=k.shape[2],
        causal=x["is_causal"],
        key_mask=x["key_padding_mask"] is not None,
        deterministic=x["deterministic"] or torch.are_deterministic_algorithms_enabled(),
        torch_deterministic=torch.are_deterministic_algorithms_enabled(),
        precision=x["precision"],
        softcap=x["softcap"] > 0,
    )
    return tiles_passes(pattern, request, setting.batch, setting.length, needs_grad, detached=setting.detached, backend=x["backend"])


def saved_bytes(pattern: DilatedPattern, setting: AdjustableSetting, q: TensorInfo, k: TensorInfo) -> int:
    """Returns the bytes that a forward with detached mixing saves for its backward on a GPU (see ``prepare.saved_elements``)."""
    if not is_fused(q.device.type) or pattern.num_branches == 1 or pattern.branch_heads == "split" or q.shape[2] != k.shape[2]:
        return 0
    N = setting.length
    rows = sum(-(-N // w) * -(-min(N, w) // r) for w, r in pattern.branches)
    size = setting.batch * q.shape[2] * q.shape[3] * rows * setting.dtype.itemsize
    return size if size <= saved_budget() else 0


def blocks_requirement(arguments: Mapping[str, Any]) -> MemoryRequirement:
    """Returns what ``block_sparse_attention`` needs, with or without dilated branches: the tensors allocated whichever kernel runs."""
    x = arguments
    return MemoryRequirement(
        op="block_sparse_attention" if x["branches"] is None else "block_sparse_dilated_attention",
        **of_training(x),
        device=x["q"].device,
        shapes=f"{shapes_text(x)}, pattern {_shortened(x['blocks'])}",
        held=held_bytes(x, x["q"].device),
        setting=setting_of(x),
        terms=block_terms(x),
        least=True,
    )


def block_terms(x: Mapping[str, Any]) -> Callable[[AdjustableSetting], Terms]:
    """Returns what the results take, of blocks and of dilated branches."""
    q, k, needs_grad = x["q"], x["k"], x["needs_grad"] or "dout" in x

    def terms(setting: AdjustableSetting) -> Terms:
        found = results(setting, q, k, needs_grad)
        if x["branches"] is None:
            return found
        Q, K = _elements(setting, q, k)
        # each part has separate results, which are then merged or added in the accumulation dtype
        a = accumulation_dtype(setting.dtype).itemsize
        return (*found, ("of the other part", (Q + 2 * K) * a if needs_grad else Q * setting.dtype.itemsize))

    return terms


def selection_requirement(arguments: Mapping[str, Any]) -> MemoryRequirement:
    """Returns the requirement of choosing blocks by content, without an estimate of its size. Scores exist for only some rows at a time."""
    x = arguments
    q = x["q"]
    return MemoryRequirement(
        op="the choice of blocks by content",
        is_backward=False,
        device=q.device,
        shapes=f"{shapes_text(x, ('q', 'k'))}, pattern {_shortened(x['spec'])}",
        held=held_bytes(x, q.device),
        setting=AdjustableSetting(batch=q.shape[0], length=x["k"].shape[1], dtype=q.dtype),
    )


def rows_requirement(op: str) -> Callable[[Mapping[str, Any]], MemoryRequirement]:
    """Returns the requirement function of an op that treats every row (…, K) of x independently. It gives shapes but no estimate."""

    def requirement(arguments: Mapping[str, Any]) -> MemoryRequirement:
        x = arguments
        first = x["x"] if x.get("x") is not None else x["y"]
        rows = math.prod(first.shape[:-1])
        weights = [w.shape for w in x.get("weights", ())]
        shapes = f"x {first.shape} in {dtype_text(first.dtype)}" + (f", weights {weights}" if weights else "")
        return MemoryRequirement(
            op=op,
            is_backward="dys" in x,
            device=first.device,
            shapes=shapes,
            held=held_bytes(x, first.device),
            setting=AdjustableSetting(batch=1, length=rows, dtype=first.dtype),
        )

    return requirement


def results(setting: AdjustableSetting, q: TensorInfo, k: TensorInfo, needs_grad: bool) -> Terms:
    """Returns the inputs and results alone, which any kernel needs; in training, those of the backward."""
    Q, K = _elements(setting, q, k)
    e, a = setting.dtype.itemsize, accumulation_dtype(setting.dtype).itemsize
    lse = Q // q.shape[3] * a
    if not needs_grad:
        return (("q, k, v", (Q + 2 * K) * e), ("out", Q * e), ("lse", lse))
    return (("q, k, v", (Q + 2 * K) * e), ("out, dout", 2 * Q * e), ("lse", lse), ("dq, dk, dv", (Q + 2 * K) * e))


def _elements(setting: AdjustableSetting, q: TensorInfo, k: TensorInfo) -> tuple[int, int]:
    """Returns the number of elements of q and of k at a setting. The ratio of queries to keys stays that of q and k."""
    rows = setting.length * q.shape[1] // max(1, k.shape[1])
    return setting.batch * rows * math.prod(q.shape[2:]), setting.batch * setting.length * math.prod(k.shape[2:])


def _shapes(x: Mapping[str, Any], pattern: DilatedPattern, is_dense: bool) -> str:
    text = shapes_text(x)
    if not is_dense:
        text += f", branches {' '.join(f'{w}/{r}' for w, r in pattern.branches)}"
        text += ', mixture_grad="detached"' if x["detached"] else ""
    for name, there in (("is_causal", x["is_causal"]), ("dropout_p", x["dropout_p"]), ("window", x["window"])):
        text += f", {name}={there}" if there else ""
    return text


def _shortened(spec: str) -> str:
    return spec if len(spec) <= 80 else f"{spec[:79]}…"
