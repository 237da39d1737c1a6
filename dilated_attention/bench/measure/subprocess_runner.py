"""Runs functions in separate processes, for figures that an earlier measurement would distort: a peak of memory, a limit of memory.

multiprocessing's fork server imports this package once and then forks a child for each call, so that a call takes milliseconds instead of
an import, and every child starts in the same state. The server never computes: threads that it had started would be missing in children.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

from dilated_attention.bench.measure.skip import Attempt, attempt, settle

# of malloc.h
_M_MMAP_THRESHOLD = -3
_PRELOADED = ["torch._dynamo", "dilated_attention.bench.measure.subprocess_runner"]


def why_no_children() -> str:
    """Returns why calls in separate processes are not possible here; empty if they are."""
    if not (hasattr(os, "fork") and os.path.exists("/proc/self/status")):
        return "measured in separate processes, which need Linux's fork and /proc"
    return ""


def in_child(function: Callable[..., Any], *args: Any, memory: int | None = None, seconds: float | None = None) -> Attempt[Any]:
    """Runs ``attempt(function(*args))`` in a new process on the CPU.

    Args:
        function: a module-level function; it, ``args`` and the result must be picklable, as for ``multiprocessing``.
        memory: bytes that it may allocate; beyond this an allocation fails, as ``out of memory``.
        seconds: time limit after which it is ended, as ``time, not memory``.

    Raises:
        RuntimeError: an error that is neither out of memory nor a refusal, with its traceback.
    """
    assert not why_no_children()
    context = multiprocessing.get_context("forkserver")
    # PyTorch loads its compiler with the first custom op; without this every child would load it again, within its memory limit
    context.set_forkserver_preload(_PRELOADED)
    reading, writing = context.Pipe(duplex=False)
    child = context.Process(target=_run, args=(writing, torch.get_num_threads(), function, args, memory))
    child.start()
    writing.close()
    found: Attempt[Any] | str | None = None
    in_time = reading.poll(seconds)
    if in_time:
        with contextlib.suppress(EOFError):
            found = reading.recv()
    else:
        child.kill()
    child.join()
    reading.close()
    if not in_time:
        return Attempt(None, "time, not memory")
    if isinstance(found, str):
        raise RuntimeError(f"in a separate process: {found}")
    # the system handles a lack of memory by SIGKILL, some libraries by abort()
    return found or Attempt(None, f"the process ended by signal {-(child.exitcode or 0)}")


def _run(answers: Connection, threads: int, function: Callable[..., Any], args: tuple[Any, ...], memory: int | None) -> None:
    # Ctrl-C is handled by the calling process
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        # the server may be one that others have started, with settings of their own
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        torch.set_num_threads(threads)
        _return_memory_at_once()
        if memory is not None:
            import resource

            # the limit counts from here on; the memory shared with the server is already in use
            limit = status_bytes("VmData") + memory
            resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.getrlimit(resource.RLIMIT_DATA)[1]))
        answers.send(attempt(lambda: function(*args)))
    except BaseException:  # noqa: BLE001 - reported to the process that asked
        answers.send(traceback.format_exc())


def _return_memory_at_once() -> None:
    """Blocks of 64 KiB and more go back to the system as soon as they are freed, so that a peak is that of live tensors (glibc)."""
    libc = ctypes.CDLL(None)
    with contextlib.suppress(AttributeError):
        libc.mallopt(_M_MMAP_THRESHOLD, 2**16)
        # and what the server has freed
        libc.malloc_trim(0)


def status_bytes(field: str) -> int:
    """Returns a field of /proc/self/status in bytes: ``VmRSS``, ``VmHWM``, ``VmData``."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as status:
        for line in status:
            if line.startswith(field + ":"):
                return 1024 * int(line.split()[1])
    raise OSError(f"/proc/self/status has no {field}")


class Peak:
    """The highest memory use since this object was created, beyond the use at that time.

    On a GPU this is PyTorch's count of allocated bytes; on a CPU the resident pages of this process (VmHWM), so it is valid only in a
    separate process.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            settle(device)
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
            self._before = torch.cuda.memory_allocated(device)
            return
        # resets the peak where the kernel allows it
        with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w", encoding="ascii") as clear:
            clear.write("5")
        self._before = status_bytes("VmRSS")

    def bytes(self) -> int:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            return torch.cuda.max_memory_allocated(self._device) - self._before
        return status_bytes("VmHWM") - self._before
