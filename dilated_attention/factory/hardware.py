"""Hardware records: this machine, and example machines to ask about, each described by its capabilities."""

from __future__ import annotations

from dilated_attention.backends import Hardware, detect

_CUDA_PACKAGES = frozenset({"flash-attn-4", "flash-attn-3", "flash-attn-3-fp8", "flash-attn-2", "triton"})


def _cuda(name: str, major: int, minor: int) -> Hardware:
    return Hardware(
        device_type="cuda", capability=(major, minor), torch_version=(2, 13), cudnn_version=92000, packages=_CUDA_PACKAGES, name=name
    )


# every kernel package counts as installed, so that only the architecture can cause a refusal
EXAMPLES: dict[str, Hardware] = {
    "cpu": Hardware(device_type="cpu", torch_version=(2, 13), name="cpu"),
    "pascal": _cuda("pascal", 6, 1),
    "volta": _cuda("volta", 7, 0),
    "turing": _cuda("turing", 7, 5),
    "ampere": _cuda("ampere", 8, 0),
    "ada": _cuda("ada", 8, 9),
    "hopper": _cuda("hopper", 9, 0),
    "blackwell": _cuda("blackwell", 10, 0),
    "blackwell-consumer": _cuda("blackwell-consumer", 12, 0),
    "rocm": Hardware(device_type="cuda", is_rocm=True, capability=(9, 4), torch_version=(2, 13), packages=_CUDA_PACKAGES, name="rocm"),
    "mps": Hardware(device_type="mps", torch_version=(2, 13), name="mps"),
}

__all__ = ["EXAMPLES", "Hardware", "detect"]
