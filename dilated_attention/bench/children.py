"""Functions in processes of their own, for figures that another measurement before would spoil: a peak of memory, a limit of memory.

One helper process imports torch and then forks a child for each call, so that a call costs milliseconds, not an import, and every child
begins alike. The helper itself never computes: threads of a parent that has would be missing in its children.
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

from dilated_attention.bench.attempt import Attempt, attempt, settle


class _Helper(NamedTuple):
    process: subprocess.Popen[bytes]
    calls: Connection
    answers: Connection


_helper: _Helper | None = None


def why_no_children() -> str:
    """Why calls in processes of their own are not possible here; empty if they are."""
    if not (hasattr(os, "fork") and os.path.exists("/proc/self/status")):
        return "measured in processes of their own, which need Linux's fork and /proc"
    return ""


def in_child(function: Callable[..., Any], *args: Any, memory: int | None = None, seconds: float | None = None) -> Attempt[Any]:
    """``attempt(function(*args))`` in a new process on the CPU.

    Args:
        function: of a module; it, ``args`` and the result can be sent to another process, as ``multiprocessing`` does.
        memory: bytes that it may allocate; beyond them an allocation fails, as ``out of memory``.
        seconds: after which it is ended, as ``time, not memory``.

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
        raise RuntimeError(f"in a process of its own: {found}")
    assert isinstance(found, Attempt)
    return found


def _start() -> _Helper:
    global _helper
    if _helper is None or _helper.process.poll() is not None:
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "OMP_NUM_THREADS": str(torch.get_num_threads()),
            # large blocks go back to the system when they are freed, whatever was freed before, so that a peak is that of live tensors
            "MALLOC_MMAP_THRESHOLD_": str(2**16),
            "CUDA_VISIBLE_DEVICES": "",
        }
        command = [sys.executable, "-c", "from dilated_attention.bench.children import serve; serve()"]
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
    """The end of its calls ends it."""
    helper.calls.close()
    helper.process.wait()


def serve() -> None:
    """The helper: calls on stdin, answers on what was stdout."""
    # Ctrl-C is for the process that asks; the end of its pipe ends this one
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # torch loads its compiler with the first custom op: in every child anew, and within the memory that it is given
    import torch._dynamo  # noqa: F401

    calls, answers = Connection(os.dup(0), writable=False), Connection(os.dup(1), readable=False)
    # what a function prints must not get between answers
    os.dup2(2, 1)
    while True:
        try:
            call = calls.recv()
        except EOFError:
            return
        answer = _forked(*call)
        # a child's answer is handed on as it came
        answers.send_bytes(answer) if isinstance(answer, bytes) else answers.send(answer)


def _forked(function: Callable[..., Any], args: tuple[Any, ...], memory: int | None, seconds: float | None) -> bytes | Attempt[Any]:
    reading, writing = Pipe(duplex=False)
    child = os.fork()
    if child == 0:
        reading.close()
        writing.send(_run(function, args, memory))
        # no exit handlers of the helper
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
    # the system's own remedy against too little memory is SIGKILL, a library's is abort()
    return answer or Attempt(None, f"the process ended by signal {os.waitstatus_to_exitcode(status) * -1}")


def _run(function: Callable[..., Any], args: tuple[Any, ...], memory: int | None) -> Attempt[Any] | str:
    try:
        if memory is not None:
            # of a child's own from here on; what it shares with the helper it has already
            import resource

            limit = status_bytes("VmData") + memory
            resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.getrlimit(resource.RLIMIT_DATA)[1]))
        return attempt(lambda: function(*args))
    except BaseException:  # noqa: BLE001 - told to the process that asked
        import traceback

        return traceback.format_exc()


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
            settle(device)
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
