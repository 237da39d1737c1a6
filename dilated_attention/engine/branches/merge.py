"""Merges of partial results (out, lse), see ``backends/merge.py``, in the forms that the engine needs, and zero keys."""

from __future__ import annotations

import functools
import logging
import math

import torch
from torch import Tensor

from dilated_attention.backends import detect
from dilated_attention.backends.merge import merge_, merge_weights

logger = logging.getLogger("dilated_attention")


def merge(out_1: Tensor, lse_1: Tensor, out_2: Tensor, lse_2: Tensor) -> tuple[Tensor, Tensor]:
    """Merges two parts out (…, D), lse (…) into new tensors in lse's dtype. It is not differentiable by design: see ``sequential.py``."""
    out, lse = out_1.to(lse_1.dtype, copy=True), lse_1.clone()
    merge_(out, lse, out_2, lse_2)
    return out, lse


def add_zero_keys(out: Tensor, lse: Tensor, num_zero_keys: int) -> tuple[Tensor, Tensor]:
    """Returns the part (out, lse) with added keys of score 0 and value 0: the closed form of TorchScale's padding."""
    zeros = lse.new_full((), math.log(num_zero_keys))
    return out * zero_key_share(lse, num_zero_keys)[..., None].to(out.dtype), torch.logaddexp(lse, zeros)


def zero_key_share(lse: Tensor, num_zero_keys: int) -> Tensor:
    """Returns e^lse / (e^lse + z), the factor by which z ≥ 1 zero keys scale a part's out; 0 where the part is empty."""
    return (lse - math.log(num_zero_keys)).sigmoid_()


def merge_onto(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    """Like ``merge_``, but for an out of any dtype, rounded once. Takes views (P, L, G, D) and (P, L, G) of any strides."""
    if has_kernels(lse):
        from dilated_attention.engine.branches.merge_inplace_triton import merge_onto as fused

        fused(out, lse, part_out, part_lse)
    elif out.dtype is lse.dtype:
        merge_(out, lse, part_out, part_lse)
    else:
        merged, weight, part_weight = merge_weights(lse, part_lse)
        out.copy_(out * weight[..., None] + part_out * part_weight[..., None])
        lse.copy_(merged)


def has_kernels(x: Tensor | None) -> bool:
    """Whether Triton kernels take x: they run on GPUs only and compute in float32."""
    return x is not None and x.device.type == "cuda" and x.dtype is not torch.float64 and _has_triton(x.device)


@functools.lru_cache(maxsize=8)
def _has_triton(device: torch.device) -> bool:
    found = "triton" in detect(device).packages
    if not found:
        logger.warning("triton is not installed: branches are merged one by one, which moves more memory; pip install triton")
    return found
