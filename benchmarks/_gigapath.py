"""Prov-GigaPath's slide encoder from a user's own copy, run unedited for training, with torch's kernels in place of flash-attn's."""

from __future__ import annotations

import contextlib
import functools
import importlib
import re
import sys
from pathlib import Path
from typing import Any

import torch
from _competitors import flash_attn_func
from _torchscale_sources import imported
from torch import nn

# the kernel family that flash-attn has, as torch bundles it, and cuDNN's, which is faster on Hopper
KERNELS = {"cuda": ("sdpa_flash", "sdpa_cudnn"), "cpu": ("sdpa_cpu",)}


def _drop_path(x: torch.Tensor, probability: float, training: bool) -> torch.Tensor:
    """timm's: each sample's branch is dropped as a whole, and scaled by 1/(1 − p) otherwise."""
    if not training or not probability:
        return x
    kept = x.new_empty(x.shape[0], *(1,) * (x.ndim - 1)).bernoulli_(1 - probability)
    return x * kept.div_(1 - probability)


class Original:
    """``gigapath_slide_enc12l768d`` with random weights and its own rates of dropout, 0.25, and drop path, 0.1.

    Args:
        folder: that holds ``gigapath/``.
        grid: side of its table of positions: theirs is 1000, which takes 3 GB.
    """

    def __init__(self, folder: Path, *, grid: int, device: str) -> None:
        with imported(folder) as load, contextlib.redirect_stdout(sys.stderr):
            module = load("gigapath.slide_encoder")
            self._attention = importlib.import_module("torchscale.component.multihead_attention")
            # timm's is not here, and the stand-in for parity only knows evaluation
            importlib.import_module("torchscale.component.droppath").drop_path = _drop_path
            lengths = module.LongNetViT.get_optimal_segment_length
            # numpy ≥ 2 writes np.int64(1024), which their eval does not know
            module.LongNetViT.get_optimal_segment_length = lambda *sizes: re.sub(r"np\.int64\((\d+)\)", r"\1", lengths(*sizes))
            self.module: nn.Module = module.gigapath_slide_enc12l768d(slide_ngrids=grid)
        self.module.to(device)

    def use(self, kernel: str) -> None:
        """Have their attention call this kernel."""
        self._attention.flash_attn_func = functools.partial(flash_attn_func, kernel)

    def drop_nothing(self) -> None:
        """From here on without dropout and drop path."""
        for module in self.module.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
            elif hasattr(module, "drop_prob"):
                module.drop_prob = 0.0

    def __call__(self, tiles: torch.Tensor, coords: torch.Tensor) -> Any:
        return self.module(tiles, coords)[0]
