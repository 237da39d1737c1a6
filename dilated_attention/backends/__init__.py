"""Kernel libraries, one file each, and the order in which each architecture prefers them."""

from dilated_attention.backends.base import (
    PRECISIONS,
    AttentionRequest,
    Backend,
    Bounds,
    Capabilities,
    Keys,
    Mask,
    Options,
    Views,
    reasons_of,
)
from dilated_attention.backends.block_kernels.triton import TritonBlocksBackend
from dilated_attention.backends.dropout import Dropout
from dilated_attention.backends.flash.flash2 import Flash2Backend
from dilated_attention.backends.flash.flash3 import Flash3Backend
from dilated_attention.backends.flash.flash3_fp8 import Flash3Fp8Backend
from dilated_attention.backends.flash.flash4 import Flash4Backend
from dilated_attention.backends.flash.xformers import XformersBackend
from dilated_attention.backends.hardware import PACKAGES, Hardware, detect
from dilated_attention.backends.selection import BackendUnavailable, Registry, refresh, registry
from dilated_attention.backends.tiles.backend import TilesBackend
from dilated_attention.backends.torch_ops.flex import FlexBackend
from dilated_attention.backends.torch_ops.math import MathBackend, SdpaCpuBackend
from dilated_attention.backends.torch_ops.sdpa_cuda import SdpaCudnnBackend, SdpaEfficientBackend, SdpaFlashBackend

for _backend in (
    Flash4Backend(), Flash3Backend(), Flash3Fp8Backend(), Flash2Backend(), SdpaCudnnBackend(), SdpaFlashBackend(), SdpaEfficientBackend(),
    SdpaCpuBackend(), FlexBackend(), XformersBackend(), TritonBlocksBackend(), TilesBackend(), MathBackend(),
):  # fmt: skip
    registry.register(_backend, family="sdpa" if _backend.name.startswith("sdpa_") else None)

# The orders that apply where no shipped table of rates has a row (shipped/). Hopper: by the H200 figures in each backend's
# `source`. Ampere and Ada: FlashAttention-2 is ahead of cuDNN there (A100 rows of the FlashAttention-3 paper). Pascal:
# scaled_dot_product_attention was 2000 times slower than plain products (published runs on a GTX 1080). Volta and Turing have no flash
# kernels.
_DENSE = {
    "cpu": "sdpa_cpu math",
    "sm10x": "flash4 sdpa_cudnn sdpa_flash flash2 tiles sdpa_efficient xformers flex math",
    "sm12x": "flash4 flash2 sdpa_flash sdpa_cudnn tiles sdpa_efficient xformers flex math",
    "sm9x": "flash4 flash3 sdpa_cudnn flash2 sdpa_flash tiles sdpa_efficient xformers flex math",
    "sm8x": "flash2 sdpa_flash sdpa_cudnn tiles sdpa_efficient xformers flex math",
    "sm7x": "sdpa_efficient flex math",
    "sm6x": "math sdpa_efficient",
    "rocm": "math",
}
# Orders for block lists, where the shipped table has no row. Hopper: benchmarks speed --cases "blocks*" on an H200. Elsewhere our
# kernels go first, since flex_attention uses the same compiler and compiles for seconds per kind of call; neither was measured there.
_BLOCKS = {"cpu": "sdpa_cpu math", "sm9x": "flash4 triton flex math", "sm6x": "math", "rocm": "math"}
_BLOCKS |= dict.fromkeys(("sm10x", "sm12x", "sm8x", "sm7x"), "triton flex math")
for _kind, _orders in (("dense", _DENSE), ("blocks", _BLOCKS)):
    for _architecture, _names in _orders.items():
        registry.set_order(_architecture, tuple(_names.split()), kind=_kind)

__all__ = [
    "PACKAGES",
    "PRECISIONS",
    "AttentionRequest",
    "Backend",
    "BackendUnavailable",
    "Bounds",
    "Capabilities",
    "Dropout",
    "Hardware",
    "Keys",
    "Mask",
    "Options",
    "Registry",
    "Views",
    "detect",
    "reasons_of",
    "refresh",
    "registry",
]
