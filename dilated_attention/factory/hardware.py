"""Hardware records: this machine, and example machines to ask about, each described by its capabilities."""

from __future__ import annotations

from typing import Any

from dilated_attention.backends import Hardware, detect

_CUDA_PACKAGES = frozenset({"flash-attn-4", "flash-attn-3", "flash-attn-3-fp8", "flash-attn-2", "triton"})
_CAPABILITIES = {
    "pascal": (6, 1), "volta": (7, 0), "turing": (7, 5), "ampere": (8, 0), "ada": (8, 9), "hopper": (9, 0), "blackwell": (10, 0),
    "blackwell-consumer": (12, 0),
}  # fmt: skip
_TORCH: Any = {"torch_version": (2, 13)}

# every kernel package counts as installed, so that only the architecture can cause a refusal
EXAMPLES: dict[str, Hardware] = {
    "cpu": Hardware(device_type="cpu", name="cpu", **_TORCH),
    **{
        name: Hardware(device_type="cuda", capability=capability, cudnn_version=92000, packages=_CUDA_PACKAGES, name=name, **_TORCH)
        for name, capability in _CAPABILITIES.items()
    },
    "rocm": Hardware(device_type="cuda", is_rocm=True, capability=(9, 4), packages=_CUDA_PACKAGES, name="rocm", **_TORCH),
    "mps": Hardware(device_type="mps", name="mps", **_TORCH),
}

__all__ = ["EXAMPLES", "Hardware", "detect"]
