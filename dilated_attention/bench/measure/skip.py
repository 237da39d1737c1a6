"""Runs functions that may fail (out of memory, refused by a backend, wrong) and turns failures into notes, so that a suite continues."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from dilated_attention.backends import BackendUnavailable

T = TypeVar("T")
# messages of PyTorch's CPU allocator, C++ and the system
_OUT_OF_MEMORY = ("not enough memory", "can't allocate memory", "bad_alloc", "Cannot allocate memory")


class Refused(Exception):
    """Raised by a contender that cannot run a case; its text becomes the row's note."""


@dataclass(frozen=True)
class Attempt(Generic[T]):
    """``value`` if the call succeeded, else None and a ``note``."""

    value: T | None
    note: str = ""


def attempt(function: Callable[[], T], *, foreign: bool = False) -> Attempt[T]:
    """Calls a function; out of memory and refusals become a note, and the memory is released. Other errors are bugs and propagate.

    Args:
        foreign: whether third-party code runs inside, whose kernels may fail at unsupported shapes: then all its errors become notes, too,
            except those after which a GPU can no longer compute.
    """
    try:
        return Attempt(function())
    except Refused as refusal:
        return Attempt(None, _first_line(refusal))
    except BackendUnavailable as unavailable:
        # the second line is why the requested backend cannot run, after its name
        reasons = str(unavailable).splitlines()[1:2]
        return Attempt(None, reasons[0].strip().split(": ", 1)[-1][:200] if reasons else _first_line(unavailable))
    except Exception as error:
        if is_out_of_memory(error):
            note = "out of memory"
        elif foreign and "CUDA error" not in str(error):
            note = f"raised {type(error).__name__}: {_first_line(error)}"
        else:
            raise
    # the frames of a caught error keep its tensors alive until here
    gc.collect()
    release()
    return Attempt(None, note)


def is_out_of_memory(error: BaseException) -> bool:
    text = str(error)
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(words in text for words in _OUT_OF_MEMORY)


def release(*, workspaces: bool = False) -> None:
    """Returns unused memory to the device. On a CPU only reference cycles have to be collected.

    Args:
        workspaces: also frees cuBLAS's workspaces, which the next product allocates again: 32 MiB for each thread on Hopper. They may be
            part of a large block, which cannot be returned as a whole while they exist. Must not be used while a CUDA graph lives, whose
            products write there.
    """
    if torch.cuda.is_available():
        settle(torch.device("cuda"))
        gc.collect()
        if workspaces:
            torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()


def settle(device: torch.device) -> None:
    """Waits until a GPU's autograd thread has freed what the last backward held.

    A backward returns to its caller before that thread has dropped the tensors of its last step. Bytes counted right after it may therefore
    be freed during the next call, and a peak relative to them would be too small. The thread starts this small backward only after dropping
    them.
    """
    if device.type == "cuda":
        x = torch.zeros((), device=device, requires_grad=True)
        torch.autograd.grad(x * 1, x)


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
