"""The examples as a user runs them, in small: their last line and exit code are what their docstrings promise."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dilated_attention import DilatedPattern
from dilated_attention.engine.memory import attention_memory
from tests.helpers.scripts import free_port, needs_pins, run_script

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = ["--context", "512", "--batch", "1", "--skip-memory-test"]
# where it does not matter how well a model learns
NARROW = ["--layers", "1", "--embed-dim", "32", "--heads", "2"]


def run(*command: str, timeout: int = 240) -> subprocess.CompletedProcess[str]:
    """The program's end; what is not through by then is killed, with all that it has started."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    arguments = [sys.executable, *command]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(arguments, text=True, env=environment, start_new_session=True, **pipes) as process:  # type: ignore[call-overload]
        try:
            out, error = process.communicate(timeout=timeout)
        except BaseException:
            # the processes of torchrun have sessions of their own, and it ends them
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=40)
            raise
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(arguments, process.returncode, out, error)


def write_text(folder: Path) -> Path:
    """Text that is easy for attention and hard for a bigram: a long sentence over and over."""
    path = folder / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog; pack my box with five dozen liquor jugs. " * 400)
    return path


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("data"))


def bits_of(run: Path) -> list[float]:
    """Bits of every step, from a run's log."""
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    return [line["train/bits"] for line in lines if "train/bits" in line]


def test_training_ends_below_the_baselines_and_writes_what_it_says(text: Path, tmp_path: Path) -> None:
    steps = ["--steps", "16", "--expect-below-bigram", "--out", str(tmp_path)]
    result = run_script(EXAMPLES / "train_longnet.py", "--data", str(text), *steps, *SMALL)
    assert result.returncode == 0, result.stderr
    assert "forward: sdpa_cpu · backward: sdpa_cpu" in result.stdout
    assert result.stdout.splitlines()[-1].startswith("done: validation ")
    files = {"checkpoint", "checkpoints", "log.jsonl", "loss.png", "pattern.png", "settings.json", "tensorboard"}
    assert {file.name for file in tmp_path.iterdir() if file.name != ".lock"} == files
    assert (tmp_path / "loss.png").stat().st_size > 5000
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    steps_done = [line for line in lines if "train/bits" in line]
    assert [line["step"] for line in steps_done] == list(range(1, 17))
    assert all(line["tokens_per_second"] > 0 and line["mfu"] > 0 and line["memory_gib"] > 0 for line in steps_done)
    # the peak itself is measured before, and on a busy machine as less than a step then reaches
    flops_of_a_byte = [line["mfu"] / line["tokens_per_second"] for line in steps_done]
    assert flops_of_a_byte == pytest.approx([flops_of_a_byte[0]] * 16)
    # four on the way, and the last
    assert len([line for line in lines if "held_out/bits" in line]) == 5


def test_training_that_is_not_below_the_baselines_fails_where_that_was_asked_for(text: Path, tmp_path: Path) -> None:
    """Where it was not, it is no failure: test_branches_follow_the_context of test_recipe.py."""
    options = ["--steps", "1", "--validations", "0", "--out", str(tmp_path), *SMALL, *NARROW, "--expect-below-bigram"]
    result = run_script(EXAMPLES / "train_longnet.py", "--data", str(text), *options, quick=True)
    assert result.returncode == 1, result.stderr
    assert "bits per byte, not below both: unigram" in result.stdout.splitlines()[-1]


WITHOUT = """
import runpy, sys
package = sys.argv[1]
for name in [name for name in sys.modules if package in name.split(".")]:
    del sys.modules[name]
sys.modules[package] = None
del sys.argv[:2]
sys.path[0] = sys.argv[0].rpartition("/")[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize(
    ("package", "words", "said"),
    [
        ("matplotlib", ["train_longnet.py", "--data", "{text}", "--steps", "2", "--validations", "0", *SMALL, *NARROW], "no pictures, "),
        ("tensorboard", ["train_longnet.py", "--data", "{text}", "--steps", "2", *SMALL, *NARROW], "no TensorBoard curves, "),
        (
            "matplotlib",
            ["train_genome.py", "--fasta", "{fasta}", "--steps", "2", "--context", "256", "--markov-order", "3"],
            "no pictures, ",
        ),
        ("matplotlib", ["slide_encoder.py", "--tiles", "30", "--layers", "1", "--steps", "1"], "no pictures, "),
    ],
)
def test_what_a_missing_package_draws_is_left_out_and_the_work_is_not_lost(
    text: Path, tmp_path: Path, package: str, words: list[str], said: str
) -> None:
    (tmp_path / "without.py").write_text(WITHOUT)
    (tmp_path / "bases.fasta").write_text(">bases\n" + "ACGTTGCAAC" * 2000)
    script, *options = (word.format(text=text, fasta=tmp_path / "bases.fasta") for word in words)
    result = run_script(tmp_path / "without.py", package, str(EXAMPLES / script), *options, "--out", str(tmp_path / "out"))
    assert result.returncode == 0, result.stderr
    (line,) = [line for line in result.stdout.splitlines() if line.startswith(said)]
    assert package in line and 'pip install "dilated-attention[' in line
    assert result.stdout.splitlines()[-1].startswith("done: ")


@pytest.mark.parametrize(
    ("package", "script", "extra"),
    [
        ("tqdm", "train_longnet.py", "train"),
        ("tqdm", "slide_features.py", "train"),
        ("skimage", "make_ihc_slides.py", "slides"),
        ("transformers", "hf_long_document.py", "hf"),
        ("accelerate", "hf_context_parallel.py", "hf"),
    ],
)
def test_a_missing_package_that_is_needed_ends_a_script_at_its_start(tmp_path: Path, package: str, script: str, extra: str) -> None:
    (tmp_path / "without.py").write_text(WITHOUT)
    result = run_script(tmp_path / "without.py", package, str(EXAMPLES / script))
    assert result.returncode == 1 and result.stdout == ""
    assert package in result.stderr and f'pip install "dilated-attention[{extra}]"' in result.stderr and result.stderr.count("\n") == 1


def torchrun(processes: int = 2) -> list[str]:
    return ["-m", "torch.distributed.run", f"--nproc_per_node={processes}", "--master_addr=127.0.0.1", f"--master_port={free_port()}"]


def test_two_processes_train_data_parallel(text: Path, tmp_path: Path) -> None:
    # by torchrun itself, the one example that is
    options = ["--data", str(text), "--steps", "4", "--validations", "0", "--out", str(tmp_path), *SMALL, *NARROW]
    result = run(*torchrun(), str(EXAMPLES / "train_longnet.py"), *options)
    assert result.returncode == 0, result.stderr
    # only the first rank reports
    assert result.stdout.count("done: validation") == 1
    bits = bits_of(tmp_path)
    assert len(bits) == 4 and bits[-1] < bits[0] - 0.5, bits


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's /proc")
def test_predicted_peak_memory_is_measured(tmp_path: Path) -> None:
    """At 2^18 tokens, where the tensors outweigh what a process takes up besides."""
    result = run(str(EXAMPLES / "extreme_length.py"), "--budget-gib", "0.7")
    assert result.returncode == 0, result.stdout + result.stderr
    last = result.stdout.splitlines()[-1]
    assert last.startswith("N = 262,144: predicted")


def test_memory_estimate_counts_what_shapes_say() -> None:
    """One dense full-length branch in float32: every term by hand."""
    n, heads, dim = 4096, 2, 32
    estimate = attention_memory(DilatedPattern([n], [1]), n, heads, dim)
    tensor, rows = n * heads * dim * 4, n * heads * 4
    assert estimate.inputs == 3 * tensor
    # q, k, v, out, lse: the results of a dense call are those of its launch
    assert estimate.forward_peak == 3 * tensor + tensor + rows
    # q, k, v, out, dout, lse, dq, dk, dv
    assert estimate.backward_peak == 3 * tensor + 2 * tensor + rows + 3 * tensor
    assert estimate.peak == max(estimate.forward_peak, estimate.backward_peak)
    assert "dq, dk, dv" in str(estimate)
    assert attention_memory(DilatedPattern([n], [1]), n, heads, dim, needs_grad=False).backward_peak == 0
    half = attention_memory(DilatedPattern([n], [1]), n, heads, dim, dtype=torch.bfloat16)
    assert half.inputs * 2 == estimate.inputs


def test_a_document_through_sparse_layers(text: Path, tmp_path: Path) -> None:
    small = ["--context", "6800", "--steps", "3", "--out", str(tmp_path)]
    result = run_script(EXAMPLES / "block_sparse.py", "--document", str(text), *small)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    kinds = ("dense ", "chosen ", "random ", "window ")
    rows = {line[:14].strip(): line[14:].split() for line in lines if line.startswith(kinds)}
    assert list(rows) == ["dense", *(f"{kind} {percent}%" for percent in (25, 10, 5) for kind in ("chosen", "random", "window"))]
    kept, errors = ({name: float(row[i].rstrip("%")) for name, row in rows.items()} for i in (0, 3))
    # of up to 54 blocks a row keeps whole ones, at least the first, its own and the one before
    assert all(abs(share - float(name.split()[1].rstrip("%"))) < 6 for name, share in kept.items() if name != "dense")
    assert errors["dense"] == 0.0 and 0.0 < errors["chosen 25%"] <= errors["chosen 5%"] < 1.5
    assert lines[-1].startswith("done: 10 % chosen is ")
    assert (tmp_path / "block_sparse.png").stat().st_size > 5000


def test_a_slide_is_embedded_drawn_and_learned_from(tmp_path: Path) -> None:
    result = run_script(EXAMPLES / "slide_encoder.py", "--tiles", "90", "200", "--layers", "2", "--steps", "2", "--out", str(tmp_path))
    assert result.returncode == 0, result.stderr
    # a CPU trains on half as many
    sizes = [110, 60, 30] if torch.cuda.is_available() else [55, 30, 15]
    assert f"step 2 on slides of {sizes} tiles" in result.stdout
    assert result.stdout.splitlines()[-1].startswith("done: slides of 90, 200 tiles, step of ")
    assert {file.name for file in tmp_path.iterdir()} == {"slide_attention_90.png", "slide_attention_200.png"}


def test_a_transformers_model_reads_a_document(text: Path) -> None:
    pytest.importorskip("transformers")
    small = ["--context", "3000", "--steps", "3", "--write", "10"]
    result = run_script(EXAMPLES / "hf_long_document.py", "--document", str(text), *small)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    rows = {line.split()[0]: line.split()[1:] for line in lines if line.startswith(("sdpa ", "dilated "))}
    assert list(rows) == ["sdpa", "dilated"]
    for steps, seconds, _, bits in rows.values():
        # three steps leave about the 8 bits of random weights
        assert int(steps) == 3 and float(seconds) > 0 and 3 < float(bits) < 8.2
    assert any(line.startswith("it writes on, 10 bytes") for line in lines)
    assert lines[-1].startswith("done: dilated reads 3000 bytes ")


@needs_pins
def test_processes_fine_tune_a_transformers_model(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    losses = []
    for processes in (None, 2):
        options = ["--context", "301", "--out", str(tmp_path / str(processes))]
        result = run_script(EXAMPLES / "hf_context_parallel.py", *options, processes=processes)
        assert result.returncode == 0, result.stderr
        last = result.stdout.splitlines()[-1]
        assert last.startswith(f"done: 5 steps of 301 tokens on {processes or 1} processes, loss "), last
        losses.append(last.partition("loss ")[2].partition(";")[0])
    assert losses[0] == losses[1]
    first, _, end = losses[0].partition(" to ")
    assert float(end) < float(first) - 0.2


@needs_pins
def test_the_longest_sequence_of_a_transformers_model(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    out = tmp_path / "longest.json"
    options = ["--context", "256", "--memory-gib", "64", "--most", "1024", "--out", str(out)]
    result = run_script(EXAMPLES / "hf_context_parallel.py", "--longest", *options)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1].startswith("done: the longest sequence, of all options, has ")
    rows = json.loads(out.read_text())["rows"]
    assert list(rows) == ["all options", "without liger", "without offload", "none"]
    for row in rows.values():
        assert [point["tokens"] for point in row["measured"]] == [256, 512]
        assert all(point["tokens a second"] > 0 and point["peak GiB"] > 0 for point in row["measured"])


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("block_sparse.py --document nowhere", "No such file or directory: 'nowhere'"),
        ("hf_long_document.py --document .", "Is a directory: '.'"),
        ("hf_context_parallel.py --size 3 --steps 1", "size is 3 and there are 1 processes; expected a divisor"),
        ("hf_context_parallel.py --context 1M", "expected a --context up to that"),
        ("slide_encoder.py --tiles 20 --layers 1 --steps 1 --out /proc/none", "No such file or directory: '/proc/none'"),
        ("extreme_length.py --heads 999999999", "num_heads is 999999999; expected an integer"),
        ("train_longnet.py --context 128 --backend flash4 --steps 1 --out {out} --skip-memory-test", "flash4"),
    ],
)
def test_what_a_script_cannot_do_has_no_traceback(words: str, expected: str, tmp_path: Path) -> None:
    script, *options = words.format(out=tmp_path).split()
    result = run_script(EXAMPLES / script, *options, quick=True)
    assert result.returncode == 1 and "Traceback" not in result.stderr, result.stderr
    assert expected in result.stderr
