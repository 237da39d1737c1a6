"""What cannot be measured is said and passed by: out of memory, refused by a backend, wrong."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from dilated_attention.backends import BackendUnavailable

T = TypeVar("T")
# what torch's CPU allocator, C++ and the system say
_OUT_OF_MEMORY = ("not enough memory", "can't allocate memory", "bad_alloc", "Cannot allocate memory")


class Refused(Exception):
    """Raised by a contender that cannot do a case; its text becomes the row's note."""


@dataclass(frozen=True)
class Attempt(Generic[T]):
    """``value`` where it went well, else None and a ``note``."""

    value: T | None
    note: str = ""


def attempt(function: Callable[[], T], *, foreign: bool = False) -> Attempt[T]:
    """Call; out of memory and refusals become a note, with the memory given back. Other errors are bugs and pass through.

    Args:
        foreign: other people's code runs in there, kernels that fail at shapes they do not take: all its errors become notes, too, but for
            those after which a GPU computes nothing any more.
    """
    try:
        return Attempt(function())
    except Refused as refusal:
        return Attempt(None, _first_line(refusal))
    except BackendUnavailable as unavailable:
        return Attempt(None, _reason(unavailable))
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
    """Give what nobody holds back to the device. A CPU has it back at once, but for what holds itself.

    Args:
        workspaces: also cuBLAS's, which the next product makes anew: 32 MiB for each thread on Hopper. They may have been cut from a large block,
            which as a whole cannot be given back then. Not while a CUDA graph lives, whose products write there.
    """
    if torch.cuda.is_available():
        settle(torch.device("cuda"))
        gc.collect()
        if workspaces:
            torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()


def settle(device: torch.device) -> None:
    """Return when a GPU's autograd thread has freed what the last backward held.

    A backward returns to its caller before that thread has dropped the tensors of its last step, so bytes counted right after it can go
    during the next call, and a peak beyond them comes out too small. The thread takes up this little backward only when it has dropped them.
    """
    if device.type == "cuda":
        x = torch.zeros((), device=device, requires_grad=True)
        torch.autograd.grad(x * 1, x)


def _reason(error: BackendUnavailable) -> str:
    """Why the backend that was asked for cannot: the second line of the error, without the backend's name."""
    lines = str(error).splitlines()
    return lines[1].strip().split(": ", 1)[-1][:200] if len(lines) > 1 else _first_line(error)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
