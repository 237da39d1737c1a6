"""FlashAttention-3 through its registered ops ``torch.ops.flash_attn_3``.

They come from a built flash_attn_interface, or from the library in the xformers 0.0.34 wheel, loaded with ``torch.ops.load_library``.
"""

from __future__ import annotations

import ctypes
import importlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dilated_attention.backends.base import AttentionRequest, Backend, Bounds, Capabilities, Keys, Options, Views, flash_sides, new_results
from dilated_attention.backends.selection import refresh


class Flash3Backend(Backend):
    """``flash_attn_3::fwd`` and ``::bwd`` (Hopper): external out and lse, strided views, windows, grouped heads.

    The bundled build has head dims 64, 96, 128, 192 and 256. The kernels accept others (multiples of 8) by rounding up
    internally, which costs the arithmetic of the next larger one.
    """

    name = "flash3"
    capabilities = Capabilities(
        package="flash-attn-3",
        install=(
            "build flash_attn_interface, "
            "or dilated_attention.backends.flash.flash3.load_library() on the library in the xformers 0.0.34 wheel"
        ),
        compute_capabilities=((9, 0), (9, 0)),
        head_dim_multiple=8,
        window=True,
        native_window=True,
        max_batch=65_535,
        aligned_last=True,
        writes_views=True,
        documents=True,
        source="H200, library of xformers 0.0.34: 514/518 TFLOP/s forward/backward at D = 64, 668/598 at 128",
    )

    def more_reasons(self, request: AttentionRequest) -> list[str]:
        if request.deterministic and request.needs_grad and request.head_dim > 192:
            return [f"its deterministic backward takes head_dim up to 192, not {request.head_dim}"]
        return []

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, options: Options, keys: Keys | None = None, *, out: Views = (None, None)
    ) -> tuple[Tensor, Tensor]:
        where, _ = out
        if isinstance(keys, Bounds):
            lengths = keys.queries, keys.keys, None, None, None, keys.most_queries, keys.most_keys
            tensors = q[0], k[0], v[0], options.scale, options.causal
            packed_out, lse = forward(*tensors, out=None if where is None else where[0], lengths=lengths)
            return packed_out[None] if where is None else where, lse[None]
        assert keys is None
        result, lse = forward(q, k, v, options.scale, options.causal, flash_sides(options, q, k), where)
        return result if where is None else where, lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, options: Options, keys: Keys | None = None, *,
        dlse: Tensor | None = None, grads: Views = (None, None, None),
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        assert dlse is None
        results = new_results(grads, (q, k, v))
        tensors: tuple[Tensor, ...] = dout, q, k, v, out, lse.contiguous(), *results
        lengths: tuple[Tensor | int | None, ...] = (None,) * 6
        if isinstance(keys, Bounds):
            lengths = keys.queries, keys.keys, None, None, keys.most_queries, keys.most_keys
            tensors, sides = tuple(x[0] for x in tensors), (-1, -1)
        else:
            assert keys is None
            sides = flash_sides(options, q, k)
        # without output buffers the bundled build returns nothing useful
        _ops().bwd(*tensors, *lengths, options.scale, options.causal, *sides, 0.0, options.deterministic, 0)
        return results  # type: ignore[return-value]


def forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool = False, sides: tuple[int, int] = (-1, -1), out: Tensor | None = None, *,
    lengths: tuple[Tensor | int | None, ...] = (None,) * 7, table: Tensor | None = None, num_splits: int = 1,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns (out, lse).

    Args:
        lengths: boundaries of queries, keys and new keys; used rows of queries and keys; the most rows of queries and keys.
        table: pages of the keys.
        num_splits: into how many parts a row's keys are split; 0: the library chooses.
    """
    # chunk, softcap, interleaved rotation, scheduler metadata, then packed groups of heads and margin of multiprocessors
    rest = 0, 0.0, True, None, num_splits, None, 0
    out, lse, *_ = _ops().fwd(q, k, v, *(None,) * 3, out, *lengths, table, *(None,) * 8, scale, causal, *sides, *rest)
    return out, lse


def load_library(path: str | Path, cuda_runtime: str | Path | None = None) -> None:
    """Registers ``flash_attn_3::fwd`` and ``::bwd`` from a built library, such as ``xformers/flash_attn_3/_C.so`` of xformers 0.0.34.

    Args:
        path: the shared library.
        cuda_runtime: the libcudart it was linked against, if that is not the one in torch (xformers 0.0.34: libcudart.so.12).
    """
    for file in (path, cuda_runtime):
        if file is not None and not Path(file).is_file():
            raise ValueError(f"{file} is not a file; expected the path of a shared library")
    if cuda_runtime is not None:
        ctypes.CDLL(str(cuda_runtime), mode=ctypes.RTLD_GLOBAL)
    torch.ops.load_library(str(path))
    refresh()


def _ops() -> Any:
    if not hasattr(torch.ops.flash_attn_3, "fwd"):
        importlib.import_module("flash_attn_interface")
    return torch.ops.flash_attn_3
