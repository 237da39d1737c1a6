"""FlashAttention-3 through its registered ops ``torch.ops.flash_attn_3``.

The ops come from a built package flash_attn_interface, or from the library in the wheel of xformers 0.0.34 (``load_library``).
"""

from __future__ import annotations

import ctypes
import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dilated_attention.backends.base import FLASH, AttentionRequest, Backend, Bounds, Grads, Keys, Options, Result, Views, new_results
from dilated_attention.backends.mask_convert import flash_sides
from dilated_attention.backends.selection import refresh


class Flash3Backend(Backend):
    """``flash_attn_3::fwd`` and ``::bwd`` (Hopper): strided views, windows, grouped heads, packed documents, merged out and lse.

    The build in xformers' wheel has kernels for head dims 64, 96, 128, 192 and 256. Another head dim (a multiple of 8) takes the arithmetic
    of the next larger one.
    """

    name = "flash3"
    capabilities = replace(
        FLASH,
        package="flash-attn-3",
        install=(
            "build flash_attn_interface, "
            "or dilated_attention.backends.flash.flash3.load_library() on the library in the xformers 0.0.34 wheel"
        ),
        compute_capabilities=((9, 0), (9, 0)),
        writes_views=True,
        documents=True,
        source="H200, library of xformers 0.0.34: 514/518 TFLOP/s forward/backward at D = 64, 668/598 at 128",
    )

    def more_reasons(self, request: AttentionRequest) -> list[str]:
        if request.deterministic and request.needs_grad and request.head_dim > 192:
            return [f"its deterministic backward takes head_dim up to 192, not {request.head_dim}"]
        return []

    def forward(self, q: Tensor, k: Tensor, v: Tensor, options: Options, keys: Keys = None, *, out: Views = (None, None)) -> Result:
        # the op always makes a new tensor for lse
        out_view, _ = out
        if isinstance(keys, Bounds):
            # the op takes packed sequences without the dimension of problems, which is 1
            packed_view = None if out_view is None else out_view[0]
            packed_out, lse = call_fwd(q[0], k[0], v[0], options.scale, options.causal, out=packed_view, bounds=keys)
            return packed_out[None] if out_view is None else out_view, lse[None]
        assert keys is None
        result, lse = call_fwd(q, k, v, options.scale, options.causal, flash_sides(options, q, k), out_view)
        return result if out_view is None else out_view, lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, options: Options, keys: Keys = None, *,
        dlse: Tensor | None = None, grads: Views = (None, None, None),
    ) -> Grads:  # fmt: skip
        # its capabilities declare no gradient of lse
        assert dlse is None
        results = new_results(grads, (q, k, v))
        tensors: tuple[Tensor, ...] = dout, q, k, v, out, lse.contiguous(), *results
        if isinstance(keys, Bounds):
            # packed sequences have no window
            tensors, window_sides = tuple(x[0] for x in tensors), (-1, -1)
        else:
            assert keys is None
            window_sides = flash_sides(options, q, k)
        bounds: tuple[Any, ...] = keys or (None,) * 4
        # None: how many rows of each problem are used
        of_rows = *bounds[:2], None, None, *bounds[2:]
        # what follows the window: softcap, deterministic, sm_margin
        after_window = 0.0, options.deterministic, 0
        # results go into these tensors: without them the build in xformers' wheel returns nothing useful
        _ops().bwd(*tensors, *of_rows, options.scale, options.causal, *window_sides, *after_window)
        return results  # type: ignore[return-value]


def call_fwd(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool = False, window_sides: tuple[int, int] = (-1, -1),
    out: Tensor | None = None, *, bounds: Bounds | None = None, used_keys: Tensor | None = None, page_table: Tensor | None = None,
    num_splits: int = 1,
) -> Result:  # fmt: skip
    """Calls ``flash_attn_3::fwd`` and returns (out, lse).

    Args:
        q, k, v: (P, L, G, D) and (P, S, K, D); with ``bounds`` (L, G, D) and (S, K, D).
        window_sides: (left, right); −1 for unbounded.
        out: where out goes; None for a new tensor.
        bounds: boundaries of sequences in place of problems.
        used_keys: how many of each problem's first keys are used, int32 (P,); None: all.
        page_table: the page of each block of keys, for keys in pages.
        num_splits: into how many parts a row's keys are split; 0: the library chooses.
    """
    # what follows the window: attention_chunk, softcap, is_rotary_interleaved, scheduler_metadata, num_splits, pack_gqa, sm_margin
    after_window = 0, 0.0, True, None, num_splits, None, 0
    of_rows: tuple[Any, ...] = bounds or (None,) * 4
    # None: k_new, v_new and q_v before out; the boundaries of new keys and the used queries before the used keys; after the table
    # kv_batch_idx, leftpad_k, three arguments of rotation, three of fp8
    tensors = q, k, v, *(None,) * 3, out, *of_rows[:2], None, None, used_keys, *of_rows[2:], page_table, *(None,) * 8
    out, lse, *_ = _ops().fwd(*tensors, scale, causal, *window_sides, *after_window)
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
