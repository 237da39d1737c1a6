"""examples/recipe: settings are refused before anything is made, and a run that was stopped goes on as if it had not been."""

import fcntl
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dilated_attention.models import LongNetLM
from tests.helpers.scripts import log_of, run_script
from tests.scripts.test_docs import blocks
from tests.scripts.test_examples import EXAMPLES, run, torchrun

SCRIPT = EXAMPLES / "train_longnet.py"
SMALL = ["--layers", "2", "--embed-dim", "32", "--heads", "2", "--context", "128", "--batch", "1", "--skip-memory-test"]


@pytest.fixture(scope="module")
def whole(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of eight steps that nothing stops."""
    out = tmp_path_factory.mktemp("whole") / "run"
    train(text, out, "--steps", "8")
    return out


def train(text: Path, out: Path, *options: str, code: int = 0) -> str:
    """The run's stdout and stderr."""
    arguments = ["--data", str(text), "--out", str(out), *SMALL, *options]
    result = run_script(SCRIPT, *arguments, quick=True)
    assert result.returncode == code, result.stdout + result.stderr
    assert "Traceback" not in result.stderr, result.stderr
    return result.stdout + result.stderr


def test_sequences_double_until_the_context(text: Path, tmp_path: Path) -> None:
    """Steps have as many bytes at every length."""
    train(text, tmp_path / "grown", "--first-context", "32", "--steps", "6")
    lines = map(json.loads, (tmp_path / "grown" / "log.jsonl").read_text().splitlines())
    assert [line["length"] for line in lines if "length" in line] == [32, 32, 64, 64, 128, 128]
    progress = json.loads(next((tmp_path / "grown").glob("checkpoints/step-*6/run.json")).read_text())
    assert progress["tokens"] == 6 * 128
    refused = train(text, tmp_path / "refused", "--first-context", "48", code=2)
    assert "--first-context is 48; expected --context, 128, or a half, a quarter, an eighth … of it" in refused
    assert not (tmp_path / "refused").exists()


def test_a_run_that_is_killed_ends_to_the_same_bits(text: Path, tmp_path: Path) -> None:
    """By each signal, in the middle of training."""
    options = ["--steps", "80", "--save-minutes", "0.003"]
    train(text, tmp_path / "whole", *options)
    run = tmp_path / "killed"
    words = ["--data", str(text), "--out", str(run), *SMALL, *options, "--resume", "auto"]
    log = run / "log.jsonl"

    def kill(process: Any, kind: int, count: int, before: int | None) -> None:
        deadline = time.monotonic() + 200
        while process.is_alive() and (file_of(log) == before or len(steps_of(run)) < 8 * count) and time.monotonic() < deadline:
            time.sleep(0.02)
        # before, in or after the writing of a checkpoint
        time.sleep(0.05 * count)
        os.kill(process.pid, kind)

    for count, (kind, code) in enumerate(((signal.SIGKILL, -9), (signal.SIGTERM, 143), (signal.SIGINT, 130)), 1):
        # a run that goes on begins with a log of its own, without the steps that are done again
        meanwhile = functools.partial(kill, kind=kind, count=count, before=file_of(log))
        result = run_script(SCRIPT, *words, quick=True, meanwhile=meanwhile)
        assert result.returncode == code and "Traceback" not in result.stderr, result.stderr
        assert 8 * count <= len(steps_of(run)) < 80
        if kind == signal.SIGKILL:
            assert not (run / "checkpoint").exists()
        else:
            step = max(steps_of(run))
            assert f"stopped by {kind.name} after step {step}, which is saved; evaluate and generate" in result.stderr
            with pytest.warns(UserWarning, match=f"is the model of step {step}, after which the run was stopped"):
                LongNetLM.from_pretrained(run)
    train(text, run, *options, "--resume", "auto")
    assert figures_of(run) == figures_of(tmp_path / "whole")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        LongNetLM.from_pretrained(run)


def figures_of(run: Path) -> list[dict[str, Any]]:
    """The figures of every step and evaluation that do not depend on time and memory."""
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    return [{key: line[key] for key in ("step", "train/bits", "held_out/bits", "learning_rate") if key in line} for line in lines]


def file_of(path: Path) -> int | None:
    return path.stat().st_ino if path.exists() else None


def steps_of(run: Path) -> set[int]:
    """Steps that a run's log has; the last line may be one that is being written."""
    log = run / "log.jsonl"
    return {int(step) for step in re.findall(r'"step": (\d+)', log.read_text())} if log.exists() else set()


@pytest.mark.parametrize("options", [["--fsdp"], ["--context-parallel", "2", "--fsdp", "--layout", "zigzag"]])
def test_a_run_goes_on_with_another_number_of_processes(text: Path, tmp_path: Path, options: list[str]) -> None:
    """Sequences of a step stay what they were, and so do the bits, up to the order of sums; also where processes share a sequence.

    Once by torchrun itself, the one example that is.
    """
    alone, resumed = tmp_path / "alone", tmp_path / "resumed"
    train(text, alone, "--steps", "6", "--batch", "2", "--lr", "5e-4", "--validations", "0", "--save-minutes", "1e-9", "--keep", "9")
    shutil.copytree(alone, resumed)
    for name in (*(f"checkpoints/step-{step:08d}" for step in (4, 5, 6)), "checkpoint"):
        shutil.rmtree(resumed / name)
    words = [str(SCRIPT), "--resume", str(resumed), *options]
    shared = functools.partial(run_script, Path(words[0]), *words[1:], processes=2, quick=True)
    result = shared() if "--layout" in options else run(*torchrun(2), *words)
    assert result.returncode == 0 and result.stdout.count("done: validation") == 1, result.stdout
    bits = log_of(resumed)
    assert len(bits) == 6 and bits[:3] == log_of(alone)[:3]
    assert bits == pytest.approx(log_of(alone), abs=3e-6, rel=0)
    assert bits[5] < bits[0]


STEP_8 = "checkpoints/step-00000008"


def cut_off(run: Path) -> None:
    """A checkpoint written in part, one removed in part, and a line of the log that was being written."""
    for name in (".part-00000009", "step-00000009"):
        shutil.copytree(run / STEP_8, run / "checkpoints" / name)
    (run / "checkpoints" / "step-00000009" / "run.json").unlink()
    with (run / "log.jsonl").open("a") as file:
        file.write('{"step": 9, "train/bi')


def damage_log(run: Path) -> None:
    with (run / "log.jsonl").open("ab") as file:
        file.write(b"\0\0\xff\n[1]\n{}\n")


def write(name: str, content: str) -> Callable[[Path], object]:
    return lambda run: (run / STEP_8 / name).write_text(content)


def replace_in(name: str, old: str, new: str) -> Callable[[Path], object]:
    return lambda run: (run / name).write_text((run / name).read_text().replace(old, new))


def move_data(run: Path) -> None:
    """The settings name a file that holds the same text."""
    settings = json.loads((run / "settings.json").read_text())
    moved = str(shutil.copy(settings["data"], run.parent / "moved.txt"))
    (run / "settings.json").write_text(json.dumps(settings | {"data": moved}))


def change_data(run: Path) -> None:
    move_data(run)
    replace_in("../moved.txt", "fox", "cat")(run)


AUTO = ["--steps", "9", "--resume", "auto"]
ANEW = ["--steps", "3"]
# what happened to a run of eight steps: how it is gone on with, the exit code, what is said, and the steps that its log then has
RUNS: dict[str, tuple[Callable[[Path], object], list[str], int, str, int]] = {
    "nothing": (lambda run: None, ["--steps", "40", "--resume", "auto"], 0, "after step 8", 40),
    "a kill": (cut_off, AUTO, 0, "after step 8", 9),
    "a damaged log": (damage_log, AUTO, 0, "3 damaged line(s) left out", 9),
    "moved data, another rate": (move_data, [*AUTO, "--lr", "1e-4", "--data", "{run}/../moved.txt"], 0, "after step 8", 9),
    "other data": (change_data, [*AUTO, "--data", "{run}/../moved.txt"], 2, "was trained on other data", 8),
    "another context": (
        lambda run: None,
        [*AUTO, "--context", "64"],
        2,
        "--context is 64, and the run in {run} has 128; leave --context",
        8,
    ),
    "files of no checkpoint": (write("__0_0.distcp", "abc"), AUTO, 2, "{run}/" + STEP_8 + " cannot be loaded (", 8),
    "no record": (write("run.json", "[]"), AUTO, 2, "move it out of {run}/checkpoints", 8),
    "other bytes": (replace_in(STEP_8 + "/run.json", '"step": 8', '"step": 7'), AUTO, 2, "its files are not those that were written", 8),
    "no settings": (lambda run: (run / "settings.json").unlink(), AUTO, 2, "holds a run without its settings.json", 8),
    "no settings, anew": (lambda run: (run / "settings.json").unlink(), ANEW, 0, "is now in {run}/earlier-1", 3),
    "anew": (lambda run: None, ANEW, 0, "the run that was in {run} is now in {run}/earlier-1", 3),
    "elsewhere": (lambda run: None, ["--steps", "9", "--resume", "{whole}", "--keep", "2"], 0, "{run}/earlier-1", 1),
}


@pytest.mark.parametrize("what", RUNS)
def test_a_run_goes_on_begins_anew_or_is_left_alone(what: str, text: Path, whole: Path, tmp_path: Path) -> None:
    happens, options, code, said, steps = RUNS[what]
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    happens(run)
    printed = train(text, run, *(word.format(run=run, whole=whole) for word in options), code=code)
    assert said.format(run=run) in printed
    bits, before = log_of(run), log_of(whole)
    assert len(bits) == steps and (steps < 8 or bits[:8] == before)
    if "anew" in what or what == "elsewhere":
        assert log_of(run / "earlier-1") == before
        assert len(list((run / "checkpoints").iterdir())) == (2 if what == "elsewhere" else 1)
    if what == "nothing":
        # whole has had its four evaluations after eight steps; of 40 steps they are due after 8, 16, 24 and 32
        evaluated = [line["step"] for line in figures_of(run) if "held_out/bits" in line and line["step"] > 8]
        assert evaluated == [16, 24, 32, 40]
        # gone on with at its end, it is evaluated again, and the log has that once
        log = figures_of(run)
        result = run_script(SCRIPT, "--resume", str(run))
        assert result.returncode == 0 and figures_of(run) == log and "; nothing was left to train" in result.stdout
        assert min((run / name).stat().st_size for name in ("loss.png", "pattern.png")) > 5000


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        ("--steps 1 --context 4096", 0, "branches ((512, 1), (2048, 4), (8192, 16)), context 4096"),
        ("--steps 1 --context 256 --segment-lengths 64 256 --dilation-rates 1 2", 0, "branches ((64, 1), (256, 2)), context 256"),
        # the file of docs/training.md; flags on the command line win
        ("--config {folder}/run.toml --minutes 0.015 --context 512 --layers 4", 0, "mixed attention, context 512"),
        ("--steps 40 --lr 1e30", 1, "expected a number: go on from the last checkpoint with --resume auto and a smaller --lr"),
        ("--steps 1 --expect-below-bigram", 1, "bits per byte, not below both: unigram"),
        ("--steps 1 --lr 1e30", 1, "the held-out loss after step 1 is nan; expected a number"),
        ("--steps 1 --out {folder}/file/run", 1, "file"),
        ("--steps 1 --data {folder}", 2, "would be read as text; give another --out"),
    ],
)
def test_what_a_run_says(text: Path, tmp_path: Path, options: str, code: int, said: str) -> None:
    shutil.copy(text, tmp_path / "file")
    (settings,) = (block.code for block in blocks(EXAMPLES.parent / "docs" / "training.md") if block.language == "toml")
    (tmp_path / "run.toml").write_text(settings)
    words = options.format(folder=tmp_path).split()
    printed = train(text, tmp_path / "run", "--validations", "0", "--layers", "1", "--heads", "1", *words, code=code)
    # no failure, unless it is asked for
    assert said in printed and (code or "bits per byte, not below both: unigram" in printed)
    # weights that are no numbers are not saved
    assert code == 0 or "--steps 40" not in options or not (tmp_path / "run" / "checkpoint").exists()


def test_positions_follow_the_context(part: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A rotary preset was refused beyond 65,536 bytes, since it was given XPOS's scale."""
    script = part("train_longnet")
    for preset, context, name, expected in (
        ("longnet-125m", 2**17, "xpos_scale_base", 1024),
        ("longnet-15m", 2**17, "rotary_base", 8e6),
        ("mixed-15m", 2**17, "rotary_base", 8e6),
        ("longnet-15m", 2**15, "rotary_base", 1e4),
        ("mixed-15m", 2**15, "rotary_base", 5e5),
    ):
        monkeypatch.setattr(sys, "argv", ["train_longnet.py", "--preset", preset, "--context", str(context)])
        config = script.build(script.arguments()[1], None).config
        assert getattr(config, name) == expected and (config.kind == "mixed" or max(config.segment_lengths) >= context)


def test_two_runs_do_not_share_a_folder(text: Path, whole: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    with (run / ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for options in ([], ["--resume", "auto"]):
            printed = train(text, run, "--steps", "9", *options, code=2)
            assert f"another run is writing to {run}" in printed
    assert log_of(run) == log_of(whole) and not (run / "earlier-1").exists()


INTERRUPTED = """
import os, runpy, signal, sys
sys.path[0] = sys.argv[5].rpartition("/")[0]
from recipe.checkpoints import Checkpoints
from torch.distributed.checkpoint import FileSystemReader
kind, name, rank, error = sys.argv[1:5]
original = getattr(globals()[kind], name)
def interrupted(*arguments, **options):
    try:
        if os.environ.get("RANK", rank) == rank:
            signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        if not error:
            raise
        raise ImportError(error)
    return original(*arguments, **options)
setattr(globals()[kind], name, interrupted)
del sys.argv[:5]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize(
    ("place", "processes"), [("FileSystemReader read_metadata 0 numpy._core.multiarray", None), ("FileSystemReader read_data 1", 2)]
)
def test_an_interrupt_is_reported_as_one_whatever_a_library_makes_of_it(
    text: Path, whole: Path, tmp_path: Path, place: str, processes: int | None
) -> None:
    """Torch wraps it, also another process's, in an exception of its checkpoints; a user must not move a good one away."""
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    (tmp_path / "interrupted.py").write_text(INTERRUPTED)
    words = [*f"{place} ".split(" ")[:4], str(SCRIPT), "--data", str(text), "--out", str(run), "--steps", "9", "--resume", "auto"]
    result = run_script(tmp_path / "interrupted.py", *words, processes=processes)
    assert (result.returncode, result.stderr.splitlines()[-1]) == (130, "interrupted; what is not saved is lost")
    assert "cannot be" not in result.stderr and "Traceback" not in result.stderr


def test_a_run_whose_reader_ends_saves_and_stops(text: Path, tmp_path: Path) -> None:
    """As in ``train_longnet.py … | head``."""
    options = ["--data", str(text), "--out", str(tmp_path / "run"), *SMALL, "--steps", "100000", "--validations", "10000"]
    command = [sys.executable, str(SCRIPT), *options, "--save-minutes", "100"]
    process = subprocess.Popen(
        command, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stderr is not None
    # printed just before the first step
    while "held out" not in process.stdout.readline():
        assert process.poll() is None
    process.stdout.close()
    printed = process.stderr.read()
    assert process.wait(60) == 141, printed
    assert "Traceback" not in printed and "which is saved; " in printed and "; go on with --resume auto" in printed
    assert len(list((tmp_path / "run" / "checkpoints").iterdir())) == 1


def test_a_checkpoint_that_does_not_fit_ends_in_one_line_and_the_run_goes_on(text: Path, tmp_path: Path) -> None:
    """A limit of a file's size stands for a full disk."""
    limited = tmp_path / "limited.py"
    limited.write_text(
        "import resource, runpy, sys\nresource.setrlimit(resource.RLIMIT_FSIZE, (200 * 1024, 200 * 1024))\ndel sys.argv[0]\n"
        "sys.path[0] = sys.argv[0].rpartition('/')[0]\nrunpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    words = [str(SCRIPT), "--data", str(text), "--out", str(tmp_path / "run"), *SMALL, "--steps", "3000", "--save-minutes", "0.001"]
    result = run_script(limited, *words, "--validations", "0")
    assert result.returncode == 1, result.stderr
    assert "Traceback" not in result.stderr
    last = result.stderr.strip().splitlines()[-1]
    # the system's error, or that of torch's writer, which finds its file shorter than it should be
    assert last.startswith(("a checkpoint cannot be written (OSError: ", "a checkpoint cannot be written (RuntimeError: ["))
    assert f" are free in {tmp_path}/run/checkpoints); go on from the last one with --resume auto" in last
    train(text, tmp_path / "run", "--steps", "3", "--resume", "auto")
    assert len(log_of(tmp_path / "run")) == 3


@pytest.mark.parametrize(("script", "said"), [("train_longnet.py", "got -1"), ("slide_features.py", "torchrun started 2")])
def test_one_process_of_several_reports_wrong_usage(script: str, said: str, tmp_path: Path) -> None:
    options = ["--lr", "-1"] if "train" in script else ["--features", str(tmp_path / "features"), "--labels", "labels.csv"]
    result = run_script(EXAMPLES / script, *options, "--out", str(tmp_path / "run"), processes=2)
    assert result.returncode == 2 and result.stderr.count(said) == 1, result.stderr
    assert os.listdir(tmp_path) == []
