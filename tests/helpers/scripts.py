"""Scripts as a user starts them, without what a start costs: four seconds of imports a process, and torchrun is one more.

result = run_script(EXAMPLES / "train.py", "--steps", "1")                  # python train.py --steps 1
result = run_script(EXAMPLES / "train.py", "--steps", "1", processes=2)     # torchrun --nproc_per_node=2 train.py --steps 1

Each process is forked from one that has imported torch and nothing else happened in, so it is as fresh as one of ``python``. What only a
command line shows (torchrun's own arguments, imports that a script forgot and this server has made) needs ``run`` of
tests/scripts/test_examples.py; one test of each kind has it.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch

from tests.helpers.pool import fresh_processes


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def run_script(
    script: Path, *arguments: str, processes: int | None = None, timeout: float = 240, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """The end of the script's process, or of its processes: the first exit code that is not 0, and their output, rank after rank.

    Args:
        processes: None for one that knows of no others; else as many, with the variables that torchrun sets.
        timeout: seconds, after which all are killed with what they have started.
        environment: variables beside those of this process.
    """
    own = {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}
    ranks: list[dict[str, str]] = [{}]
    if processes is not None:
        world = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(processes))
        world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        ranks = [{**world, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]
    command = [str(script), *arguments]
    with tempfile.TemporaryDirectory(prefix="script") as folder:
        outputs = [(Path(folder) / f"out{rank}", Path(folder) / f"error{rank}") for rank in range(len(ranks))]
        context = fresh_processes()
        started: list[Any] = []
        for variables, (out, error) in zip(ranks, outputs, strict=True):
            started.append(context.Process(target=_main, args=(command, own | variables, os.getcwd(), str(out), str(error))))
            started[-1].start()
        try:
            code = _join(started, time.monotonic() + timeout)
        finally:
            for process in started:
                # with what it started; one that is still starting has no group of its own yet
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.kill()
                process.join()
        written, told = ("".join(files[i].read_text() if files[i].exists() else "" for files in outputs) for i in (0, 1))
    if code is None:
        raise subprocess.TimeoutExpired(command, timeout, written, told)
    return subprocess.CompletedProcess(command, code, written, told)


def _join(started: list[Any], deadline: float) -> int | None:
    """The first exit code that is not 0, else 0; None if there was none in time. As torchrun does, none waits for one that failed."""
    left = list(started)
    while left:
        if not wait([process.sentinel for process in left], max(0.0, deadline - time.monotonic())):
            return None
        for process in [process for process in left if process.exitcode is not None]:
            if process.exitcode != 0:
                return int(process.exitcode)
            left.remove(process)
    return 0


def _main(command: list[str], environment: dict[str, str], folder: str, out: str, error: str) -> None:
    os.setpgid(0, 0)
    for path, stream in ((out, sys.stdout), (error, sys.stderr)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, stream.fileno())
        os.close(file)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = command
    sys.path[0] = str(Path(command[0]).parent)
    torch.set_num_threads(1)
    # what multiprocessing takes as the end of a process is what python takes: SystemExit's code, or 1 and a traceback
    runpy.run_path(command[0], run_name="__main__")
