"""The examples and the program of docs/ring.md under torchrun on GPUs, in small. Needs 2 and 4 GPUs.

Kernels of torch itself, but in one of them: a process would compile FlashAttention-4 for longer than it trains.
"""

import json
from pathlib import Path

import pytest

from tests.helpers.machine import COUNT as PROCESSES
from tests.helpers.machine import GPUS, ON_CPU
from tests.helpers.scripts import log_of
from tests.scripts.test_examples import EXAMPLES, run, torchrun, write_text
from tests.scripts.test_examples import SMALL as SMALL_TEXT
from tests.scripts.test_genome import SMALL as SMALL_GENOME
from tests.scripts.test_genome import write_fasta
from tests.scripts.test_readme import PROGRAMS

pytestmark = [pytest.mark.gpus, pytest.mark.alone, pytest.mark.timeout(400)]

# torchrun gives each process a GPU of its own
COUNT = PROCESSES if ON_CPU else GPUS
needs_2 = pytest.mark.skipif(COUNT < 2, reason="needs 2 GPUs")
needs_4 = pytest.mark.skipif(COUNT < 4, reason="needs 4 GPUs")
# losses of bfloat16 products in another order, after three steps
NEAR = 1e-4 if ON_CPU else 0.03


def train(folder: Path, processes: int, *options: str, steps: int = 3, lr: str = "5e-4") -> list[float]:
    """Bits of every step of train_longnet.py."""
    out = folder / f"out{processes}"
    launch = torchrun(processes) if processes > 1 else []
    command = [*launch, str(EXAMPLES / "train_longnet.py"), "--data", str(write_text(folder)), "--out", str(out)]
    command += ["--steps", str(steps), "--lr", lr, "--backend", "sdpa"]
    result = run(*command, *SMALL_TEXT, *options)
    # the first rank alone reports
    assert result.returncode == 0 and result.stdout.count("done: validation") == 1, result.stdout + result.stderr
    return log_of(out)


@needs_2
def test_processes_that_share_sequences_train_as_one_does(tmp_path: Path) -> None:
    alone = train(tmp_path, 1)
    assert alone[2] < alone[0] - 0.1
    assert train(tmp_path, 2, "--context-parallel", "2", "--fsdp", "--layout", "zigzag") == pytest.approx(alone, abs=NEAR)
    if COUNT >= 4:
        assert train(tmp_path, 4, "--context-parallel", "4", "--layout", "striped") == pytest.approx(alone, abs=NEAR)


@needs_2
def test_the_benchmark_of_several_gives_each_process_a_gpu(tmp_path: Path) -> None:
    words = ["--size", "small", "--cases", "dense-*", "--contenders", "ring", "--seconds", "0.01", "--output", str(tmp_path)]
    result = run(*torchrun(2), "-m", "benchmarks", "scaling", *words)
    assert result.returncode == 0 and (tmp_path / "scaling.json").exists(), result.stdout


@needs_4
def test_two_rows_of_two_that_share(tmp_path: Path) -> None:
    bits = train(tmp_path, 4, "--context-parallel", "2", "--fsdp", steps=8, lr="1e-2")
    assert len(bits) == 8 and bits[-1] < bits[0] - 0.5, bits


@needs_4
def test_a_genome_compiled_and_on_the_kernels_that_a_user_gets(tmp_path: Path) -> None:
    """That processes which share its sequence learn as one does: scripts/test_genome.py."""
    out = tmp_path / "genome"
    words = ["--fasta", str(write_fasta(tmp_path)), "--steps", "6", *([] if ON_CPU else ["--compile"]), "--out", str(out)]
    words += ["--short-share", "0", "--lr", "3e-3", "--context-parallel", "4", "--fsdp", "--embed-dim", "128"]
    result = run(*torchrun(4), str(EXAMPLES / "train_genome.py"), *SMALL_GENOME, *words, timeout=300)
    assert result.returncode == 0 and "not below the Markov models" in result.stdout, result.stdout + result.stderr
    log = json.loads((out / "genome.json").read_text())
    bits = [bits for _, _, bits in log["steps"]]
    assert log["processes"] == 4 and (out / "checkpoint").is_dir() and len(bits) == 6 and bits[5] < bits[0]


@needs_4
@pytest.mark.parametrize("code", PROGRAMS, ids=["docs/ring.md"])
def test_the_program_for_several_processes_runs(code: str, tmp_path: Path) -> None:
    """On GPUs as it stands; at a fiftieth of its length where there are none."""
    file = tmp_path / "train.py"
    file.write_text(code.replace("100_00", "2_00") if ON_CPU else code, encoding="utf-8")
    result = run(*torchrun(4), str(file))
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("loss ") == 4, result.stdout
