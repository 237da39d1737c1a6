"""Runs functions in separate processes, for figures that an earlier measurement would distort: a peak of memory, a limit of memory.

A helper process imports torch once and then forks a child for each call, so that a call takes milliseconds instead of an import, and every
child starts in the same state. The helper itself never computes: threads that it had started would be missing in its children.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch

from dilated_attention.bench.measure.skip import Attempt, attempt, settle


class _Helper(NamedTuple):
    process: subprocess.Popen[bytes]
    calls: Connection
    answers: Connection


_helper: _Helper | None = None


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
    helper = _start()
    try:
        helper.calls.send((function, args, memory, seconds))
        found = helper.answers.recv()
    except (EOFError, BrokenPipeError) as gone:
        code = helper.process.wait()
        raise RuntimeError(f"the process that forks children for measurements ended with code {code}") from gone
    if isinstance(found, str):
        raise RuntimeError(f"in a separate process: {found}")
    assert isinstance(found, Attempt)
    return found


def _start() -> _Helper:
    global _helper
    if _helper is None or _helper.process.poll() is not None:
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "OMP_NUM_THREADS": str(torch.get_num_threads()),
            # large blocks return to the system as soon as they are freed, so that a peak is that of live tensors
            "MALLOC_MMAP_THRESHOLD_": str(2**16),
            "CUDA_VISIBLE_DEVICES": "",
        }
        command = [sys.executable, "-c", "from dilated_attention.bench.measure.subprocess_runner import serve; serve()"]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        assert process.stdin is not None and process.stdout is not None
        calls = Connection(os.dup(process.stdin.fileno()), readable=False)
        answers = Connection(os.dup(process.stdout.fileno()), writable=False)
        process.stdin.close()
        process.stdout.close()
        _helper = _Helper(process, calls, answers)
        atexit.register(_stop, _helper)
    return _helper


def _stop(helper: _Helper) -> None:
    """Ends the helper by closing its calls."""
    helper.calls.close()
    helper.process.wait()


def serve() -> None:
    """Runs the helper: receives calls on stdin, sends answers on the original stdout."""
    # Ctrl-C is handled by the calling process; this one ends when its pipe closes
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # PyTorch loads its compiler with the first custom op; without this every child would load it again, within its memory limit
    import torch._dynamo  # noqa: F401

    calls, answers = Connection(os.dup(0), writable=False), Connection(os.dup(1), readable=False)
    # what a function prints must not be mixed with the answers
    os.dup2(2, 1)
    while True:
        try:
            call = calls.recv()
        except EOFError:
            return
        answer = _forked(*call)
        # a child's answer is passed on unchanged
        answers.send_bytes(answer) if isinstance(answer, bytes) else answers.send(answer)


def _forked(function: Callable[..., Any], args: tuple[Any, ...], memory: int | None, seconds: float | None) -> bytes | Attempt[Any]:
    reading, writing = Pipe(duplex=False)
    child = os.fork()
    if child == 0:
        reading.close()
        writing.send(_run(function, args, memory))
        # skips the helper's exit handlers
        os._exit(0)
    writing.close()
    answer: bytes | None = None
    in_time = reading.poll(seconds)
    if in_time:
        with contextlib.suppress(EOFError):
            answer = reading.recv_bytes()
    else:
        os.kill(child, signal.SIGKILL)
    reading.close()
    _, status = os.waitpid(child, 0)
    if not in_time:
        return Attempt(None, "time, not memory")
    # the system handles a lack of memory by SIGKILL, some libraries by abort()
    return answer or Attempt(None, f"the process ended by signal {os.waitstatus_to_exitcode(status) * -1}")


def _run(function: Callable[..., Any], args: tuple[Any, ...], memory: int | None) -> Attempt[Any] | str:
    try:
        if memory is not None:
            # the limit counts from here on; the memory shared with the helper is already in use
            import resource

            limit = status_bytes("VmData") + memory
            resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.getrlimit(resource.RLIMIT_DATA)[1]))
        return attempt(lambda: function(*args))
    except BaseException:  # noqa: BLE001 - told to the process that asked
        import traceback

        return traceback.format_exc()


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
