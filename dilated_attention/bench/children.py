"""Functions in processes of their own, for figures that another measurement before would spoil: a peak of memory, a limit of memory.

One helper process imports torch and then forks a child for each call, so that a call costs milliseconds, not an import, and every child
begins alike. The helper itself never computes: threads of a parent that has would be missing in its children.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import select
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, BinaryIO

import torch

from dilated_attention.bench.attempt import Attempt, attempt

_LENGTH = struct.Struct("<Q")
_helper: subprocess.Popen[bytes] | None = None


def why_no_children() -> str:
    """Why calls in processes of their own are not possible here; empty if they are."""
    if not (hasattr(os, "fork") and os.path.exists("/proc/self/status")):
        return "measured in processes of their own, which need Linux's fork and /proc"
    return ""


def in_child(function: Callable[..., Any], *args: Any, memory: int | None = None, seconds: float | None = None) -> Attempt[Any]:
    """``attempt(function(*args))`` in a new process on the CPU.

    Args:
        function: of a module, as are ``args`` and the result something that ``pickle`` takes.
        memory: bytes that it may allocate; beyond them an allocation fails, as ``out of memory``.
        seconds: after which it is ended, as ``time, not memory``.

    Raises:
        RuntimeError: an error that is neither out of memory nor a refusal, with its traceback.
    """
    assert not why_no_children()
    helper = _start()
    assert helper.stdin is not None and helper.stdout is not None
    _send(helper.stdin, pickle.dumps((function, args, memory, seconds)))
    answer = _receive(helper.stdout)
    if answer is None:
        raise RuntimeError(f"the process that forks children for measurements ended with code {helper.wait()}")
    found = pickle.loads(answer)
    if isinstance(found, str):
        raise RuntimeError(f"in a process of its own: {found}")
    assert isinstance(found, Attempt)
    return found


def _start() -> subprocess.Popen[bytes]:
    global _helper
    if _helper is None or _helper.poll() is not None:
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "OMP_NUM_THREADS": str(torch.get_num_threads()),
            # large blocks go back to the system when they are freed, whatever was freed before, so that a peak is that of live tensors
            "MALLOC_MMAP_THRESHOLD_": str(2**16),
            "CUDA_VISIBLE_DEVICES": "",
        }
        command = [sys.executable, "-c", "from dilated_attention.bench.children import serve; serve()"]
        _helper = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        atexit.register(_stop, _helper)
    return _helper


def _stop(helper: subprocess.Popen[bytes]) -> None:
    """The end of its input ends it."""
    if helper.stdin is not None:
        with contextlib.suppress(BrokenPipeError):
            helper.stdin.close()
    helper.wait()


def serve() -> None:
    """The helper: calls on stdin, answers on what was stdout."""
    # Ctrl-C is for the process that asks; the end of its pipe ends this one
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with os.fdopen(os.dup(1), "wb") as answers:
        # what a function prints must not get between answers
        os.dup2(2, 1)
        while (call := _receive(sys.stdin.buffer)) is not None:
            _send(answers, _forked(*pickle.loads(call)))


def _forked(function: Callable[..., Any], args: tuple[Any, ...], memory: int | None, seconds: float | None) -> bytes:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        with os.fdopen(writing, "wb") as pipe:
            pipe.write(_run(function, args, memory))
        # no exit handlers of the helper
        os._exit(0)
    os.close(writing)
    answer = _all(reading, None if seconds is None else time.monotonic() + seconds)
    os.close(reading)
    if answer is None:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if answer is None:
        return pickle.dumps(Attempt(None, "time, not memory"))
    # the system's own remedy against too little memory is SIGKILL, a library's is abort()
    return answer or pickle.dumps(Attempt(None, f"the process ended by signal {os.waitstatus_to_exitcode(status) * -1}"))


def _run(function: Callable[..., Any], args: tuple[Any, ...], memory: int | None) -> bytes:
    try:
        if memory is not None:
            # of a child's own from here on; what it shares with the helper it has already
            import resource

            limit = status_bytes("VmData") + memory
            resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.getrlimit(resource.RLIMIT_DATA)[1]))
        return pickle.dumps(attempt(lambda: function(*args)))
    except BaseException:  # noqa: BLE001 - told to the process that asked
        import traceback

        return pickle.dumps(traceback.format_exc())


def _all(descriptor: int, until: float | None) -> bytes | None:
    """What comes until its end; None if that is not before ``until``."""
    parts = []
    while True:
        left = None if until is None else max(0.0, until - time.monotonic())
        if not select.select([descriptor], [], [], left)[0]:
            return None
        part = os.read(descriptor, 2**16)
        if not part:
            return b"".join(parts)
        parts.append(part)


def _send(pipe: Any, message: bytes) -> None:
    pipe.write(_LENGTH.pack(len(message)) + message)
    pipe.flush()


def _receive(pipe: BinaryIO | Any) -> bytes | None:
    head = pipe.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    message: bytes = pipe.read(length)
    return message if len(message) == length else None


def status_bytes(field: str) -> int:
    """A field of /proc/self/status: ``VmRSS``, ``VmHWM``, ``VmData``."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as status:
        for line in status:
            if line.startswith(field + ":"):
                return 1024 * int(line.split()[1])
    raise OSError(f"/proc/self/status has no {field}")


class Peak:
    """The most memory that was in use since this object was made, beyond what was in use then.

    On a GPU torch's count of bytes allocated; on a CPU the resident pages of this process (VmHWM), so in a process of its own only.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
            self._before = torch.cuda.memory_allocated(device)
            return
        # begins the count anew where the kernel lets us
        with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w", encoding="ascii") as clear:
            clear.write("5")
        self._before = status_bytes("VmRSS")

    def bytes(self) -> int:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            return torch.cuda.max_memory_allocated(self._device) - self._before
        return status_bytes("VmHWM") - self._before
