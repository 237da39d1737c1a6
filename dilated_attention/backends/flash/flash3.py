"""FlashAttention-3 through its registered ops ``torch.ops.flash_attn_3``.

The ops come from a built package flash_attn_interface, or from the library in the wheel of xformers 0.0.34 (``load_library``).
"""

from __future__ import annotations

import ctypes
import importlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dilated_attention.backends.base import HALVES, AttentionRequest, Backend, Bounds, Capabilities, Keys, Options, Views, new_results
from dilated_attention.backends.mask_convert import flash_sides
from dilated_attention.backends.selection import refresh


class Flash3Backend(Backend):
    """``flash_attn_3::fwd`` and ``::bwd`` (Hopper): strided views, windows, grouped heads, packed documents, merged out and lse.

    The build in xformers' wheel has kernels for head dims 64, 96, 128, 192 and 256. Another head dim (a multiple of 8) takes the arithmetic
    of the next larger one.
    """

    name = "flash3"
    capabilities = Capabilities(
        devices=frozenset({"cuda"}),
        dtypes=HALVES,
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
        out_view, _ = out
        if isinstance(keys, Bounds):
            # the sequences stand one after another in a batch of one
            lengths = keys.queries, keys.keys, None, None, None, keys.most_queries, keys.most_keys
            tensors = q[0], k[0], v[0], options.scale, options.causal
            packed_out, lse = forward(*tensors, out=None if out_view is None else out_view[0], lengths=lengths)
            return packed_out[None] if out_view is None else out_view, lse[None]
        assert keys is None
        result, lse = forward(q, k, v, options.scale, options.causal, flash_sides(options, q, k), out_view)
        return result if out_view is None else out_view, lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, options: Options, keys: Keys | None = None, *,
        dlse: Tensor | None = None, grads: Views = (None, None, None),
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        assert dlse is None
        results = new_results(grads, (q, k, v))
        tensors: tuple[Tensor, ...] = dout, q, k, v, out, lse.contiguous(), *results
        # boundaries of queries and of keys; used rows of both; the most rows of both
        lengths: tuple[Tensor | int | None, ...] = (None,) * 6
        if isinstance(keys, Bounds):
            lengths = keys.queries, keys.keys, None, None, keys.most_queries, keys.most_keys
            tensors, window_sides = tuple(x[0] for x in tensors), (-1, -1)
        else:
            assert keys is None
            window_sides = flash_sides(options, q, k)
        # results go into these tensors: without them the build in xformers' wheel returns nothing useful
        _ops().bwd(*tensors, *lengths, options.scale, options.causal, *window_sides, 0.0, options.deterministic, 0)
        return results  # type: ignore[return-value]


def forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool = False, sides: tuple[int, int] = (-1, -1), out: Tensor | None = None, *,
    lengths: tuple[Tensor | int | None, ...] = (None,) * 7, table: Tensor | None = None, num_splits: int = 1,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Calls ``flash_attn_3::fwd`` and returns (out, lse).

    Args:
        sides: the window (left, right); −1 for unbounded.
        out: where out goes; None for a new tensor.
        lengths: boundaries of queries, keys and new keys; used rows of queries and keys; the most rows of queries and keys.
        table: the page of each block of keys, for keys in pages.
        num_splits: into how many parts a row's keys are split; 0: the library chooses.
    """
    # what follows the window: attention_chunk, softcap, is_rotary_interleaved, scheduler_metadata, num_splits, pack_gqa, sm_margin
    after_window = 0, 0.0, True, None, num_splits, None, 0
    # None: k_new, v_new and q_v before out; after the table kv_batch_idx, leftpad_k, three arguments of rotation, three of fp8
    out, lse, *_ = _ops().fwd(q, k, v, *(None,) * 3, out, *lengths, table, *(None,) * 8, scale, causal, *sides, *after_window)
    return out, lse


def load_library(path: str | Path, cuda_runtime: str | Path | None = None) -> None:
    """Registers ``flash_attn_3::fwd`` and ``::bwd`` from a shared library, such as ``xformers/flash_attn_3/_C.so`` of xformers 0.0.34.

    Args:
        path: the library.
        cuda_runtime: the libcudart that it was linked against, if torch has another one (xformers 0.0.34: libcudart.so.12).
    """
    for file in (path, cuda_runtime):
        if file is not None and not Path(file).is_file():
            raise ValueError(f"{file} is not a file; expected the path of a shared library")
    if cuda_runtime is not None:
        ctypes.CDLL(str(cuda_runtime), mode=ctypes.RTLD_GLOBAL)
    torch.ops.load_library(str(path))
    refresh()


def _ops() -> Any:
    """Returns the registered ops, after an import of flash_attn_interface if nothing has registered them yet."""
    if not hasattr(torch.ops.flash_attn_3, "fwd"):
        importlib.import_module("flash_attn_interface")
    return torch.ops.flash_attn_3
