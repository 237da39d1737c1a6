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
from dilated_attention.backends.dropout import Dropout
from dilated_attention.backends.flash.flash2 import Flash2Backend
from dilated_attention.backends.flash.flash3 import Flash3Backend
from dilated_attention.backends.flash.flash3_fp8 import Flash3Fp8Backend
from dilated_attention.backends.flash.flash4 import Flash4Backend
from dilated_attention.backends.flash.xformers import XformersBackend
from dilated_attention.backends.hardware import PACKAGES, Hardware, detect
from dilated_attention.backends.selection import BackendUnavailable, Registry, refresh, registry
from dilated_attention.backends.tiles.backend import TilesBackend, TritonBlocksBackend
from dilated_attention.backends.torch_ops.flex import FlexBackend
from dilated_attention.backends.torch_ops.math import MathBackend
from dilated_attention.backends.torch_ops.sdpa_cpu import SdpaCpuBackend
from dilated_attention.backends.torch_ops.sdpa_cuda import SdpaCudnnBackend, SdpaEfficientBackend, SdpaFlashBackend

# backend="sdpa" takes the first of this family that can compute a request
_SDPA = SdpaCudnnBackend(), SdpaFlashBackend(), SdpaEfficientBackend(), SdpaCpuBackend()
# our own kernels: "triton" for block lists, "tiles" for dense problems
_OURS = TritonBlocksBackend(), TilesBackend()
_FLASH = Flash4Backend(), Flash3Backend(), Flash3Fp8Backend(), Flash2Backend()
for _backend in (*_FLASH, *_SDPA, FlexBackend(), XformersBackend(), *_OURS, MathBackend()):
    registry.register(_backend, family="sdpa" if _backend in _SDPA else None)

# The orders of preference for dense calls, of all backends for which rates.py has no measured rate. "sm8x": every GPU of compute
# capability 8. Backends that are left out follow in the order of registration; flash3_fp8 is, since it alone computes precision="fp8".
registry.set_order("cpu", ("sdpa_cpu", "math"))
# Blackwell: sm10x in data centres, sm12x in consumer GPUs
registry.set_order("sm10x", ("flash4", "sdpa_cudnn", "sdpa_flash", "flash2", "tiles", "sdpa_efficient", "xformers", "flex", "math"))
registry.set_order("sm12x", ("flash4", "flash2", "sdpa_flash", "sdpa_cudnn", "tiles", "sdpa_efficient", "xformers", "flex", "math"))
# Hopper: by the H200 figures in ``Capabilities.source`` of each backend
registry.set_order(
    "sm9x", ("flash4", "flash3", "sdpa_cudnn", "flash2", "sdpa_flash", "tiles", "sdpa_efficient", "xformers", "flex", "math")
)
# Ampere and Ada: FlashAttention-2 is ahead of cuDNN there (A100 rows of the FlashAttention-3 paper)
registry.set_order("sm8x", ("flash2", "sdpa_flash", "sdpa_cudnn", "tiles", "sdpa_efficient", "xformers", "flex", "math"))
# Volta and Turing have no flash kernels
registry.set_order("sm7x", ("sdpa_efficient", "flex", "math"))
# Pascal: scaled_dot_product_attention was 2000 times slower than plain products (published runs on a GTX 1080)
registry.set_order("sm6x", ("math", "sdpa_efficient"))
registry.set_order("rocm", ("math",))

# The same for block lists. Hopper's order was measured: python -m benchmarks speed --cases "blocks*", on an H200. On other GPUs nothing
# was: "triton" goes before "flex", which compiles for seconds for each kind of call.
registry.set_order("cpu", ("sdpa_cpu", "math"), kind="blocks")
registry.set_order("sm9x", ("flash4", "triton", "flex", "math"), kind="blocks")
for _architecture in ("sm10x", "sm12x", "sm8x", "sm7x"):
    registry.set_order(_architecture, ("triton", "flex", "math"), kind="blocks")
registry.set_order("sm6x", ("math",), kind="blocks")
registry.set_order("rocm", ("math",), kind="blocks")

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
