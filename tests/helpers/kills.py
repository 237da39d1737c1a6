"""Runs of a training script that are started, stopped and compared."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.helpers.scripts import free_port

SCRIPT = Path(__file__).parents[2] / "examples" / "train_longnet.py"
SMALL = ["--layers", "2", "--embed-dim", "32", "--heads", "2", "--context", "128", "--batch", "1", "--skip-memory-test"]


def command(text: Path, out: Path, processes: int, *options: str) -> list[str]:
    """A small run of examples/train_longnet.py, by torchrun if there are several processes."""
    launch = ["-m", "torch.distributed.run", f"--nproc_per_node={processes}", "--master_addr=127.0.0.1"] if processes > 1 else []
    launch += [f"--master_port={free_port()}"] if processes > 1 else []
    return [sys.executable, *launch, str(SCRIPT), "--data", str(text), "--out", str(out), *SMALL, *options]


def start(words: list[str]) -> subprocess.Popen[str]:
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "start_new_session": True}
    return subprocess.Popen(words, env={**os.environ, "OMP_NUM_THREADS": "1"}, **pipes)


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


def stop(process: subprocess.Popen[str], kind: signal.Signals) -> str:
    """Stops a run and returns its output. SIGKILL goes to all its processes, other signals to the first, as a scheduler sends them."""
    for member in descendants(process.pid) if kind == signal.SIGKILL else [process.pid]:
        try:
            os.kill(member, kind)
        except ProcessLookupError:
            continue
    try:
        return process.communicate(timeout=120)[0]
    finally:
        for member in descendants(process.pid):
            try:
                os.kill(member, signal.SIGKILL)
            except ProcessLookupError:
                continue


def log_of(out: Path) -> list[dict[str, Any]]:
    """The figures of every step and evaluation that do not depend on time and memory."""
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return [{key: line[key] for key in ("step", "train/bits", "held_out/bits", "learning_rate") if key in line} for line in lines]
