"""Scripts as a user starts them, without what a start costs: four seconds of imports a process, and torchrun is one more.

result = run_script(EXAMPLES / "train.py", "--steps", "1")                  # python train.py --steps 1
result = run_script(EXAMPLES / "train.py", "--steps", "1", processes=2)     # torchrun --nproc_per_node=2 train.py --steps 1

Each process is forked from one that has imported torch and nothing else happened in, so it is as fresh as one of ``python``. What only a
command line shows (torchrun's own arguments, imports that a script forgot and this server has made) needs ``run`` of
tests/scripts/test_examples.py; one test of each kind has it.
"""

import contextlib
import importlib
import importlib.util
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.helpers.pool import fresh_processes

# an older Python takes tools without a pin (Makefile): other pictures and pages, arguments that they do not have yet
needs_pins = pytest.mark.skipif(sys.version_info < (3, 11), reason="needs the pinned tools, which need Python 3.11")


def load(file: Path) -> ModuleType:
    """A script, as a module."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def log_of(run: Path, name: str = "train/bits") -> list[float]:
    """A figure of every step, or evaluation, from a run's log."""
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    return [line[name] for line in lines if name in line]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def descendants(process: int) -> list[int]:
    """The process and all that it has started, which are still there."""
    parents = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        parents[int(entry.parent.name)] = int(fields[1])
    found = [process]
    for member in found:
        found += [child for child, parent in parents.items() if parent == member]
    return found


def run_script(
    script: Path,
    *arguments: str,
    processes: int | None = None,
    timeout: float = 240,
    quick: bool = False,
    meanwhile: Callable[[Any], None] | None = None,
) -> subprocess.CompletedProcess[str]:
    """The end of the script's process, or of its processes: the first exit code that is not 0, and their output, rank after rank.

    Args:
        processes: None for one that knows of no others; else as many, with the variables that torchrun sets.
        timeout: seconds, after which all are killed with what they have started.
        quick: nothing is drawn, and the machine's FLOP/s are not measured, which takes most of the time of a run of a few steps.
        meanwhile: is called with the first process, which runs.
    """
    command, context, started, code = [str(script), *arguments], fresh_processes(), list[Any](), 0
    own = {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks: list[dict[str, str]] = [{}]
    if processes is not None:
        world = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(processes))
        world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        ranks = [{**world, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]
    deadline = time.monotonic() + timeout
    with tempfile.TemporaryDirectory(prefix="script") as folder:
        outputs = [tuple(Path(folder) / f"{name}{rank}" for name in ("out", "error")) for rank in range(len(ranks))]
        try:
            for variables, files in zip(ranks, outputs, strict=True):
                started.append(context.Process(target=_main, args=(command, own | variables, os.getcwd(), *map(str, files), quick)))
                started[-1].start()
            if meanwhile is not None:
                meanwhile(started[0])
            left = started
            # as torchrun does, none waits for one that failed
            while left and not code and wait([process.sentinel for process in left], max(0.0, deadline - time.monotonic())):
                code = next((process.exitcode for process in left if process.exitcode), 0)
                left = [process for process in left if process.exitcode is None]
        finally:
            for process in started:
                # with what it started; one that is still starting has no group of its own yet
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.kill()
                process.join()
        out, error = ("".join(files[i].read_text() if files[i].exists() else "" for files in outputs) for i in (0, 1))
    if left and not code:
        raise subprocess.TimeoutExpired(command, timeout, out, error)
    return subprocess.CompletedProcess(command, code, out, error)


def _main(command: list[str], environment: dict[str, str], folder: str, out: str, error: str, quick: bool) -> None:
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
    if quick:
        _measure_and_draw_nothing()
    # what multiprocessing takes as the end of a process is what python takes: SystemExit's code, or 1 and a traceback
    runpy.run_path(command[0], run_name="__main__")


def _measure_and_draw_nothing() -> None:
    from matplotlib.figure import Figure

    def savefig(figure: Figure, path: Any, **_: Any) -> None:
        Path(path).write_bytes(b"not drawn")

    Figure.savefig = savefig  # type: ignore[method-assign,assignment]
    costs = importlib.import_module("recipe.costs")
    costs.peak_flops = lambda device, stated: (1e11, "not measured")
