"""Stops a training run at random moments, by SIGINT, SIGTERM or SIGKILL, and goes on with it until it ends.

python -m tests.helpers.kills --kills 20 --processes 4     # prints what came of it; exit code 1 if a bit differs
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
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


def run_with_kills(words: list[str], out: Path, kills: int, processes: int) -> list[str]:
    """Starts the run, stops it ``kills`` times, 4 to 14 s after a start, and lets it end. Returns a line for each stop."""
    generator, report = random.Random(0), []
    for _ in range(kills):
        process = start(words)
        after = generator.uniform(4.0, 14.0)
        kind = generator.choice([signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
        try:
            process.wait(timeout=after)
        except subprocess.TimeoutExpired:
            printed = stop(process, kind)
            steps = [line["step"] for line in log_of(out)] if (out / "log.jsonl").exists() else []
            report.append(f"{kind.name} after {after:.1f} s, exit {process.returncode}, step {max(steps, default=0)}")
            # while Python imports, a Ctrl-C is Python's own
            if "bytes to train on" in printed and "Traceback" in printed and processes == 1:
                raise AssertionError(f"{kind.name} ended in a traceback:\n{printed}") from None
        else:
            report.append(f"had ended by itself after less than {after:.1f} s")
            break
    run_to_its_end(words)
    return report


def run_to_its_end(words: list[str]) -> None:
    process = start(words)
    printed = process.communicate(timeout=1200)[0]
    assert process.returncode == 0, printed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--steps", type=int, default=400)
    args, options = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as name:
        text, whole, killed = (Path(name) / part for part in ("text.txt", "whole", "killed"))
        text.write_bytes(b"".join(file.read_bytes() for file in sorted(Path(os.__file__).parent.glob("*.py"))[:12]))
        options = ["--steps", str(args.steps), "--save-minutes", "0.02", *options]
        run_to_its_end(command(text, whole, args.processes, *options))
        words = [*command(text, killed, args.processes, *options), "--resume", "auto"]
        print("\n".join(run_with_kills(words, killed, args.kills, args.processes)))
        logs = [log_of(out) for out in (whole, killed)]
    differ = sum(a != b for a, b in zip(*logs, strict=False)) + abs(len(logs[0]) - len(logs[1]))
    print(f"{args.processes} process(es): {len(logs[0])} figures, {differ} differ; the last {logs[0][-1]}, {logs[1][-1]}")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
