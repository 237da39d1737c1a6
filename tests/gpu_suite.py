"""Every test of one GPU, or of several, and a table of what came of them in build/test-gpu.md (test-gpus.md): also of a run cut off.

    python -m tests.gpu_suite              one GPU: tests marked ``gpu``; side by side first, then those marked ``alone``, one by one.
                                           A machine's other GPUs take their share, each test sees one
    python -m tests.gpu_suite --several    2 to 4 GPUs: tests marked ``gpus``; DILATED_GPUS_SHARED=2: two processes share one GPU

pytest does the rest; its own records are beside the table (``*.xml``). Exit code 0: every test that was collected has passed, or was
skipped for a reason that the table shows. Optional libraries are tested where they are: flash-attn-4 on PYTHONPATH, FlashAttention-3 by
FLASH3_LIBRARY and FLASH3_CUDART, its fp8 build by FLASH3_FP8_LIBRARY.
"""

import argparse
import os
import re
import signal
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
# compiled kernels go to disk, so that what one process compiled no other compiles again
CACHES = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor", "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": "flash4"}
# processes side by side: one CPU thread each, and few for inductor's compilers
THREADS = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "2", "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1"}


class Table:
    """A plugin of pytest, in the process that workers report to: the outcome of each test, and the reason if it has not passed."""

    def __init__(self, path: Path) -> None:
        self.path, self.began, self.collected = path, time.monotonic(), set[str]()
        self.outcomes: dict[str, tuple[str, str]] = {}

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: Sequence[str]) -> None:
        self.collected.update(ids)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.outcomes[report.nodeid] = "failed", str(report.longrepr).splitlines()[-1]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        # what fails while it is torn down has failed
        if report.outcome != "passed" or (report.when == "call" and report.nodeid not in self.outcomes):
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(getattr(report.longrepr, "reprcrash", ""))
            self.outcomes[report.nodeid] = report.outcome, reason.removeprefix("Skipped: ")

    def write(self, trouble: str = "") -> bool:
        """Prints the table and writes it; returns whether all is well."""
        rest = dict.fromkeys(self.collected - self.outcomes.keys(), ("no outcome", ""))
        files: dict[str, Counter[str]] = defaultdict(Counter)
        reasons: Counter[str] = Counter()
        bad = [trouble] if trouble else [] if "passed" in dict(self.outcomes.values()) else ["no test has passed"]
        for test, (outcome, reason) in sorted((self.outcomes | rest).items()):
            files[test.split("::")[0]][outcome] += 1
            reasons[reason] += outcome == "skipped"
            bad += [f"{outcome}: {test}: {reason.partition(chr(10))[0]}"] if outcome in ("failed", "no outcome") else []
        kinds = ("passed", "failed", "skipped", "no outcome")
        total = sum(files.values(), Counter[str]())
        lines = [f"| {time.monotonic() - self.began:.0f} s | {' | '.join(kinds)} |", "| --- | ---: | ---: | ---: | ---: |"]
        for name, counts in (*files.items(), ("all", total)):
            lines.append(f"| {name} | {' | '.join(str(counts[kind]) for kind in kinds)} |")
        lines += ["", *(f"- skipped {count}: {reason}" for reason, count in (+reasons).most_common()), *(f"- {problem}" for problem in bad)]
        text = "\n".join([*lines, "", "FAILED" if bad else "PASSED", ""])
        self.path.with_suffix(".md").write_text(text)
        print(text, flush=True)
        return not bad


def run(phases: Sequence[Sequence[str]], path: Path, limit: float) -> bool:
    """Runs pytest with the arguments of each phase, in all for ``limit`` seconds at most."""
    from tests.helpers.scripts import descendants

    table = Table(path)

    def cut_off() -> None:
        table.write(f"cut off after {limit:g} s")
        for process in descendants(os.getpid())[1:]:
            os.kill(process, signal.SIGKILL)
        os._exit(1)

    timer = threading.Timer(limit, cut_off)
    timer.daemon = True
    timer.start()
    codes = [pytest.main(["-q", "-ra", f"--junitxml={path}-{i}.xml", *phase], plugins=[table]) for i, phase in enumerate(phases)]
    timer.cancel()
    # some failed, or none was there to run, which the table says
    return table.write("".join(f"pytest ended with exit code {code}" for code in codes if code not in (0, 1, 5)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--several", action="store_true", help="the tests of several GPUs")
    parser.add_argument("--processes", type=int, help="side by side (default: by CPU cores and the GPUs' memory)")
    parser.add_argument("--limit", type=float, default=720.0, help="seconds for all tests together (default %(default)s)")
    parser.add_argument("--output", type=Path, default=ROOT / "build", help="folder for the table (default build)")
    parser.add_argument("pytest", nargs="*", help="further arguments for pytest, after --: -- -k flash4")
    args = parser.parse_args()
    os.chdir(ROOT)
    output = args.output.resolve()
    # examples and benchmarks are scripts, which find the package there where it is not installed
    os.environ |= THREADS | {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}
    for name, folder in CACHES.items():
        Path(os.environ.setdefault(name, str(output / "gpu-caches" / folder))).mkdir(parents=True, exist_ok=True)
    import torch

    count, least = torch.cuda.device_count(), 2 if args.several else 1
    if max(count, int(os.environ.get("DILATED_GPUS_SHARED", "0")) if count and args.several else 0) < least:
        parser.error(f"needs {least} CUDA GPU{'s' * (least > 1)} and finds {count}; tests that need none: make test")
    # at most 16 processes a GPU, and one for 8 GiB of its memory, of which a few tests take more than twice that
    room = min(16, torch.cuda.get_device_properties(0).total_memory // (8 << 30))
    each = args.processes or max(1, min((os.cpu_count() or 1) // count, room))
    mark, named = ("gpus" if args.several else "gpu"), os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
    # the others need not even be imported, a dozen times
    mentions = re.compile(r"\bgpus\b|worlds\(" if args.several else r"mark\.gpu\b|\bdevice: str\b")
    files = [str(path) for path in sorted((ROOT / "tests").glob("*/test_*.py")) if mentions.search(path.read_text())]

    def phase(which: str, processes: int) -> list[str]:
        """Each process sees one GPU, but where several are tested."""
        seen = (
            ["-n", str(processes)]
            if args.several
            else [f"--tx={processes}*popen//env:CUDA_VISIBLE_DEVICES={gpu}" for gpu in named.split(",")]
        )
        return ["-m", f"{mark} and {which}", *seen, "--dist", "loadgroup", *files, *args.pytest]

    # pools of processes live in workers; failures and examples start processes of their own
    sizes = (6, 3) if args.several else (each, 1)
    return int(not run([phase("not alone", sizes[0]), phase("alone", sizes[1])], output / f"test-{mark}", args.limit))


if __name__ == "__main__":
    sys.exit(main())
