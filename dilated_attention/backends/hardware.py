"""What a machine can do: a frozen record, made by asking for capabilities, never from a GPU's name. Also contexts of devices and streams,
and what CUDA graphs keep alive."""

from __future__ import annotations

import functools
import importlib.util
import logging
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from dilated_attention.pattern.checks import shown

logger = logging.getLogger("dilated_attention")
# kernel packages, as named in Hardware.packages → the module that must be importable; _packages finds FlashAttention-3 in other ways
PACKAGES = {
    "flash-attn-4": "flash_attn.cute",
    "flash-attn-2": "flash_attn.flash_attn_interface",
    "xformers": "xformers.ops",
    "triton": "triton",
}
# what ``on_device`` returns where the device is already current
_NO_SWITCH: AbstractContextManager[Any] = nullcontext()


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """What backend selection knows about a machine. Build one by hand to ask what would be selected on another machine.

    Args:
        device_type: ``"cpu"``, ``"cuda"`` (AMD's ROCm also reports ``"cuda"``), ``"mps"``, …
        capability: CUDA compute capability, e.g. (9, 0) for Hopper; None without CUDA.
        is_rocm: torch is built for ROCm.
        torch_version: (major, minor).
        cudnn_version: as ``torch.backends.cudnn.version()``, e.g. 91900; None without cuDNN.
        packages: the kernel packages that can be imported: names in ``PACKAGES``, ``"flash-attn-3"``, ``"flash-attn-3-fp8"``.
        unusable: (package, why) of kernel packages that are installed but cannot be used.
        name: the device's name, for display.
    """

    device_type: str
    capability: tuple[int, int] | None = None
    is_rocm: bool = False
    torch_version: tuple[int, int] = (2, 11)
    cudnn_version: int | None = None
    packages: frozenset[str] = field(default_factory=frozenset)
    unusable: tuple[tuple[str, str], ...] = ()
    name: str = ""

    @property
    def architecture(self) -> str:
        """The name under which preferred backends and their rates are kept: ``"cpu"``, ``"sm90"``, …, ``"rocm"``, or the device type."""
        if self.is_rocm:
            return "rocm"
        if self.device_type == "cuda" and self.capability is not None:
            return f"sm{self.capability[0]}{self.capability[1]}"
        return self.device_type

    @property
    def label(self) -> str:
        """The machine in a few words, for display."""
        return f"{self.name or self.device_type} ({self.architecture}, torch {self.torch_version[0]}.{self.torch_version[1]})"


def detect(device: torch.device | str | None = None) -> Hardware:
    """Returns the hardware of ``device``; by default of the current CUDA device if there is one, else of the CPU."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    index = device.index if device.index is not None else (torch.cuda.current_device() if device.type == "cuda" else 0)
    return _detect(device.type, index)


# what torch.compiler.assume_constant_result does: it would trace how libraries are looked for
detect._dynamo_marked_constant = True  # type: ignore[attr-defined]


def hardware_of(device: Any, hardware: Any) -> Hardware:
    """Returns the hardware that a user asks about: ``hardware`` itself or, without it, that of ``device``."""
    if hardware is None:
        try:
            return detect(device)
        except (RuntimeError, AssertionError, TypeError, ValueError) as error:
            error_type = TypeError if isinstance(error, TypeError) else ValueError
            reason = str(error).splitlines()[0]
            raise error_type(f"device is {shown(device)}; expected one of this machine, such as 'cpu', or hardware=: {reason}") from error
    if device is not None:
        raise ValueError(f"device is {device!r} and hardware is given too; ask about one of them")
    if not isinstance(hardware, Hardware):
        raise TypeError(
            f"hardware is {shown(hardware)} ({type(hardware).__name__}); expected a Hardware, such as factory.EXAMPLES['hopper']"
        )
    return hardware


@functools.lru_cache(maxsize=32)
def _detect(device_type: str, index: int) -> Hardware:
    is_cuda = device_type == "cuda"
    release = torch.__version__.split("+")[0].split(".")
    packages = _packages()
    unusable = {"xformers": why} if is_cuda and "xformers" in packages and (why := _why_xformers_fails()) else {}
    packages = packages.difference(unusable)
    return Hardware(
        device_type=device_type,
        capability=torch.cuda.get_device_capability(index) if is_cuda else None,
        is_rocm=is_cuda and torch.version.hip is not None,
        torch_version=(int(release[0]), int(release[1])),
        cudnn_version=torch.backends.cudnn.version() if is_cuda and torch.backends.cudnn.is_available() else None,
        packages=packages,
        unusable=tuple(unusable.items()),
        name=torch.cuda.get_device_name(index) if is_cuda else device_type,
    )


def _packages() -> frozenset[str]:
    found = {package for package, module in PACKAGES.items() if _importable(module)}
    # several packages register FlashAttention-3's ops
    if hasattr(torch.ops.flash_attn_3, "fwd") or _importable("flash_attn_interface"):
        found.add("flash-attn-3")
    # FlashAttention-3's fp8 kernels are not separate ops, and a build without them fails only when called; fa3-fwd always has them
    if hasattr(torch.ops.fa3_fwd, "fwd") or _importable("fa3_fwd"):
        found.add("flash-attn-3-fp8")
    return frozenset(found)


def _why_xformers_fails() -> str:
    """Returns why xformers, though installed, cannot compute attention; "" if it can. Imports both parts, Python and library: either
    may fail alone."""
    try:
        from xformers import _cpp_lib
        from xformers.ops import fmha  # noqa: F401
    except (ImportError, AttributeError) as error:
        # xformers takes any package named flash_attn for FlashAttention-2, and flash-attn-4 has that name
        return f"its import fails ({error}); with flash-attn-4 it needs flash-attn installed, too: uninstall one of the two"
    failure = _cpp_lib._cpp_library_load_exception
    if failure is None:
        return ""
    while failure.__cause__ or failure.__context__:
        failure = failure.__cause__ or failure.__context__
    return (
        f"its library does not load ({str(failure).splitlines()[0]}); if libcudart.so.12 is missing, pip install nvidia-cuda-runtime-cu12 "
        "and add its folder lib to LD_LIBRARY_PATH"
    )


def capability(device: torch.device) -> tuple[int, int] | None:
    """Returns the CUDA compute capability of a GPU; for the meta device, for which kernels are compiled ahead, that of the current
    GPU; None without a GPU."""
    has_gpu = device.type == "cuda" or (device.type == "meta" and torch.cuda.is_available())
    return torch.cuda.get_device_capability(device.index) if has_gpu else None


@functools.lru_cache(maxsize=16)
def multiprocessors(device: torch.device) -> int:
    """Returns the number of multiprocessors of a GPU; 1 for other devices."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Returns a context that makes ``device`` current: a Triton launch uses the current device. It does nothing for a CPU."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return _NO_SWITCH
    return torch.cuda.device(device)


class Streams:
    """Some CUDA streams on which independent launches run concurrently: the current one, index 0, and side streams.

    Short launches fill the GPU together. While one chunk of a call is merged (limited by memory), the next is computed (limited by
    arithmetic).

    Side streams wait for the work issued before the ``with`` block, and work issued after the block waits for them. They wait by events,
    which a CUDA graph captures. Only memory that outlives the block may be passed between streams. Other devices have index 0 alone.
    """

    def __init__(self, device: torch.device, count: int) -> None:
        self._main = torch.cuda.current_stream(device) if device.type == "cuda" and count > 1 else None
        # always the same streams, since torch's allocator keeps a separate memory pool for each one
        self._side = tuple(_stream(device, index) for index in range(count - 1)) if self._main is not None else ()

    def __enter__(self) -> Streams:
        if self._main is not None:
            start = self._main.record_event()
            for stream in self._side:
                stream.wait_event(start)
        return self

    def __exit__(self, *_: object) -> None:
        if self._main is not None:
            for stream in self._side:
                self._main.wait_stream(stream)

    def __len__(self) -> int:
        return 1 + len(self._side)

    def stream(self, index: int) -> AbstractContextManager[object]:
        """Returns a context in which launches go to stream ``index``, modulo the number of streams."""
        index %= len(self)
        return nullcontext() if index == 0 else torch.cuda.stream(self._side[index - 1])


@functools.lru_cache(maxsize=64)
def _stream(device: torch.device, index: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


# what replays of CUDA graphs read, by id; kept for good, since torch does not tell when a graph has gone
_read_by_graphs: dict[int, object] = {}


def keep_for_graph(what: object, device_type: str) -> None:
    """Keeps alive what a pass has made for its launches, such as tables, if a CUDA graph is being captured."""
    # a torch built without CUDA cannot be asked
    if device_type == "cuda" and torch.cuda.is_current_stream_capturing():
        _read_by_graphs[id(what)] = what


@functools.cache
def has_gluon() -> bool:
    """Whether Triton has Gluon, the language of the kernels for Hopper (Triton 3.6 or later), and compiles for NVIDIA: AMD's MI300 also has
    capability 9, but cannot run them."""
    return torch.version.hip is None and _importable("triton.experimental.gluon")


def has_kernels(x: torch.Tensor | None) -> bool:
    """Whether this project's Triton kernels can compute with x: it is on a GPU with Triton, and not float64, since they use float32."""
    return x is not None and x.device.type == "cuda" and x.dtype is not torch.float64 and has_triton(x.device)


@functools.lru_cache(maxsize=8)
def has_triton(device: torch.device) -> bool:
    """Whether Triton is installed; warns once per device if it is not."""
    found = "triton" in detect(device).packages
    if not found:
        logger.warning("triton is not installed: branches are merged one by one, which moves more memory; pip install triton")
    return found


def _importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError, AttributeError):
        return False
