"""Kernel libraries, one file each, and the order in which each architecture prefers them."""

from dilated_attention.backends.base import Backend, BackendUnavailable, Dropout, Facts, Mask, Options, Registry, Request, registry
from dilated_attention.backends.hardware import Hardware, detect, refresh
from dilated_attention.backends.math import MathBackend
from dilated_attention.backends.sdpa_cpu import SdpaCpuBackend

registry.register(SdpaCpuBackend(), family="sdpa")
registry.register(MathBackend())

registry.set_order("cpu", ("sdpa_cpu", "math"))

__all__ = [
    "Backend",
    "BackendUnavailable",
    "Dropout",
    "Facts",
    "Hardware",
    "Mask",
    "Options",
    "Registry",
    "Request",
    "detect",
    "refresh",
    "registry",
]
