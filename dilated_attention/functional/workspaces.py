"""Bytes that the ops of norms, linear layers and residual branches allocate temporarily, in addition to their results, from shapes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from dilated_attention.backends.base import accumulation_dtype
from dilated_attention.functional.fused_norm_linear_torch import _CHUNK_ROWS

Args = tuple[Any, ...]


def _norm_linear(args: Args, out: Any, on_gpu: bool) -> int:
    x, _, _, _, weights, _, _, _, _, dtype, _ = args
    rows, columns = math.prod(x.shape[:-1]), x.shape[-1]
    cast = sum(w.numel() for w in weights) * dtype.itemsize if weights[0].dtype is not dtype else 0
    if on_gpu:
        # the rows in the dtype of the matrix product
        return cast + rows * columns * dtype.itemsize
    wide = accumulation_dtype(x.dtype).itemsize
    return cast + min(rows, _CHUNK_ROWS) * columns * (2 * wide + dtype.itemsize)


def _norm_linear_backward(args: Args, out: Any, on_gpu: bool) -> int:
    dys, x, _, _, _, weights, _, stats, needs, *_, dtype, wide = args
    rows, columns = math.prod(x.shape[:-1]), x.shape[-1]
    size, width = dtype.itemsize, sum(w.shape[0] for w in weights)
    joined = width * columns * size if len(weights) > 1 or weights[0].dtype is not dtype else 0
    dy = rows * width * size if len(dys) > 1 or dys[0].dtype is not dtype else 0
    # gradients of several weights are computed together and then copied into separate tensors
    apart = width * columns * (size if on_gpu else stats.element_size()) if needs[2] else 0
    copied = apart if len(weights) > 1 or (weights[0].dtype.itemsize != (size if on_gpu else stats.element_size())) else 0
    if not on_gpu:
        chunk = min(rows, _CHUNK_ROWS) * (columns * 5 + width) * stats.element_size()
        return joined + dy + copied + chunk
    z = rows * columns * size if needs[2] else 0
    # dx reuses the memory of dz where the dtypes match
    dz = rows * columns * size if (wide or x.dtype) is not dtype else 0
    weight_grads = sum(w.numel() * w.element_size() for w in weights) if needs[2] else 0
    return joined + dy + max(z + dz + apart - weight_grads, copied)


def _add_dropped(args: Args, out: Any, on_gpu: bool) -> int:
    if on_gpu:
        return 0
    # computed in float32 or higher before it is rounded
    y, wide = args[1], max(4, out.element_size())
    size: int = y.numel() * wide * ((y.element_size() < wide) + (out.element_size() < wide))
    return size


# (arguments of the op, its results, whether they are on a GPU) -> bytes
LAYER_WORKSPACES: dict[str, Callable[[Args, Any, bool], int]] = {
    "dilated_attention.norm_linear.default": _norm_linear,
    "dilated_attention.norm_linear_backward.default": _norm_linear_backward,
    "dilated_attention.add_dropped.default": _add_dropped,
}
