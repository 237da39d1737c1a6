"""Run every test that needs one GPU, or several, to the end, and write what came of each of them under build/.

    python -m tests.gpu_suite              one GPU: tests marked ``gpu``; side by side first, then those marked ``alone``, one by one.
                                           A machine's other GPUs take their share, each test sees one
    python -m tests.gpu_suite --several    2 to 4 GPUs: tests marked ``gpus``; DILATED_GPUS_SHARED=2: two processes share one GPU

Writes build/test-gpu.json and build/test-gpu.md (test-gpus.* with --several). Exit code 0: every test that was collected has passed, or
was skipped for a reason that ``skips.py`` names. Optional libraries are tested where they are: flash-attn-4 on PYTHONPATH,
FlashAttention-3 by FLASH3_LIBRARY and FLASH3_CUDART, its fp8 build by FLASH3_FP8_LIBRARY.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.gpu_suite.report import Outcome, read, summary, write
from tests.helpers.pool import SHARED

ROOT = Path(__file__).parents[2]
# compiled kernels go to disk, so that what one process compiled no other compiles again
CACHES = {
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": "flash4",
}


def environment(caches: Path) -> dict[str, str]:
    there = {name: os.environ.get(name, str(caches / folder)) for name, folder in CACHES.items()}
    for folder in there.values():
        Path(folder).mkdir(parents=True, exist_ok=True)
    # processes side by side: one CPU thread each, and few for inductor's compilers
    threads = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "2", "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1"}
    # examples and benchmarks are scripts, which find the package there where it is not installed
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, **threads, **there, "PYTHONPATH": path}


def most_processes(cores: int, gpus: int, memory: int) -> int:
    """As many processes as cores, at most 16 a GPU and one for 8 GiB of its memory, of which a few tests take more than twice that."""
    return max(1, min(cores, gpus * min(16, memory // (8 << 30))))


def visible(count: int) -> list[str]:
    """How CUDA_VISIBLE_DEVICES names each of the ``count`` GPUs that this process sees."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return [name.strip() for name in named.split(",")] if named else [str(i) for i in range(count)]


def dealt(processes: int, gpus: Sequence[str]) -> list[str]:
    """Arguments of pytest for as many processes, each of which sees one GPU."""
    shares = [processes // len(gpus) + (i < processes % len(gpus)) for i in range(len(gpus))]
    return [f"--tx={share}*popen//env:CUDA_VISIBLE_DEVICES={gpu}" for share, gpu in zip(shares, gpus, strict=True) if share]


def phases(several: bool, processes: int, gpus: Sequence[str]) -> dict[str, list[str]]:
    """Arguments of pytest, by the name of the phase."""
    if several:
        # pools of processes live in workers (tests/gpus/machine.py); failures and examples start processes of their own
        own = [f"tests/gpus/test_{name}.py" for name in ("failures", "examples")]
        pools = [str(path) for path in sorted((ROOT / "tests/gpus").glob("test_*.py")) if f"tests/gpus/{path.name}" not in own]
        return {"pools": ["-m", "gpus", "-n", "6", "--dist", "loadgroup", *pools], "processes": ["-m", "gpus", "-n", "3", *own]}
    # the others need not even be imported, a dozen times
    files = [str(path) for path in sorted((ROOT / "tests").glob("*/test_*.py")) if re.search(r"pytest\.mark\.gpu\b", path.read_text())]
    beside = [*dealt(processes, gpus), "--dist", "loadgroup"] if processes > 1 else []
    # one test at a time on each GPU
    alone = [*dealt(len(gpus), gpus), "--dist", "load"] if len(gpus) > 1 else []
    return {"side by side": ["-m", "gpu and not alone", *beside, *files], "alone": ["-m", "gpu and alone", *alone, *files]}


def run(arguments: list[str], log: Path, env: dict[str, str], limit: float) -> str:
    """ "" or what went wrong beside the tests: pytest's own exit, or that the time was over."""
    command = [sys.executable, "-m", "pytest", "-p", "tests.gpu_suite.plugin", "-q", "--durations=15", "-ra", *arguments]
    process = subprocess.Popen(command, cwd=ROOT, env={**env, "GPU_SUITE_LOG": str(log)}, start_new_session=True)
    try:
        code = process.wait(limit)
    except BaseException as error:
        # workers and their children, too
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        return f"did not end within {limit:.0f} s"
    # 0: all passed · 1: some failed, which the report says
    return "" if code in (0, 1) else f"pytest ended with exit code {code}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--several", action="store_true", help="the tests of several GPUs")
    parser.add_argument("--processes", type=int, help="side by side (default: by CPU cores and the GPUs' memory)")
    parser.add_argument("--limit", type=float, default=720.0, help="seconds for all phases together (default %(default)s)")
    parser.add_argument("--output", type=Path, default=ROOT / "build", help="folder for the tables (default build)")
    parser.add_argument("pytest", nargs="*", help="further arguments for pytest, after --: -- -k flash4")
    args = parser.parse_args()
    import torch

    count, least = torch.cuda.device_count(), 2 if args.several else 1
    if count and args.several:
        count = max(count, SHARED)
    if count < least:
        parser.error(f"needs {least} CUDA GPU{'s' * (least > 1)} and finds {count}; tests that need none: make test")
    processes = args.processes or most_processes(os.cpu_count() or 1, count, torch.cuda.get_device_properties(0).total_memory)
    needed = ["pytest", "pytest_timeout", *(["xdist"] if processes > 1 or count > 1 else [])]
    missing = [name.replace("xdist", "pytest_xdist").replace("_", "-") for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        parser.error(f"the GPU suite needs {' and '.join(missing)}: pip install {' '.join(missing)}")
    output = args.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    name = "test-gpus" if args.several else "test-gpu"
    env = environment(output / "gpu-caches")
    began = time.monotonic()
    outcomes: list[Outcome] = []
    troubles: list[str] = []
    seconds: dict[str, float] = {}
    for phase, arguments in phases(args.several, processes, visible(count)).items():
        log = output / f"{name}-{phase.replace(' ', '-')}.jsonl"
        log.unlink(missing_ok=True)
        started = time.monotonic()
        trouble = run([*arguments, *args.pytest], log, env, max(1.0, args.limit - (started - began)))
        seconds[phase] = time.monotonic() - started
        found, unfinished = read(log)
        outcomes += found
        troubles += [f"{phase}: {trouble}"] if trouble else []
        troubles += [f"{phase}: {test} has no outcome" for test in unfinished]
    problems = write(output / name, outcomes, troubles, seconds)
    print(summary(outcomes, seconds))
    for problem in problems:
        print(problem)
    print(f"{'FAILED' if problems else 'PASSED'}: {output / name}.md, {output / name}.json")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
