"""examples/recipe: settings are refused before anything is made, and a run that was stopped goes on as if it had not been."""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import time
import warnings
from pathlib import Path

import pytest

from dilated_attention.models import LongNetLM
from tests.helpers import kills
from tests.helpers.scripts import Script, run_script
from tests.scripts.test_examples import EXAMPLES, bits_of, write_text

SCRIPT = EXAMPLES / "train_longnet.py"


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def whole(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of eight steps that nothing stops."""
    out = tmp_path_factory.mktemp("whole") / "run"
    train(text, out, "--steps", "8")
    return out


def train(text: Path, out: Path, *options: str, processes: int | None = None, code: int = 0) -> str:
    """The run's stdout and stderr. Pictures of a resumed run: test_a_run_goes_on_past_its_end; of a new one: test_examples.py."""
    arguments = ["--data", str(text), "--out", str(out), *kills.SMALL, *options]
    result = run_script(SCRIPT, *arguments, processes=processes, quick=True)
    assert result.returncode == code, result.stdout + result.stderr
    assert "Traceback" not in result.stderr, result.stderr
    return result.stdout + result.stderr


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--seconds -1", "argument --seconds: got -1; expected a number > 0"),
        ("--seconds nan", "got nan; expected a number > 0"),
        ("--minutes inf", "got inf; expected a number > 0"),
        ("--steps 0", "argument --steps: got 0; expected a number >= 1"),
        ("--steps 3 --seconds 5", "not allowed with argument"),
        ("--batch 0", "argument --batch: got 0; expected a number >= 1"),
        ("--context 0", "argument --context: got 0; expected a number >= 2"),
        ("--context 1.5", "'1.5' is not a size; expected a whole number from 1 to 2**62, or one with k, M or G: 64k is 65536"),
        ("--context 9k --data {short}", "a context of 9,216 needs 9,217"),
        ("--validations=-1k", "'-1k' is not a size"),
        ("--layout foo", "argument --layout: invalid choice: 'foo'"),
        ("--lr -1", "argument --lr: got -1; expected a number > 0"),
        ("--preset longnet-nine", "preset is 'longnet-nine'; expected one of"),
        ("--preset gigapath-12l768d", "--preset is gigapath-12l768d, which is no causal language model"),
        ("--backend none", "none"),
        ("--heads 3", "num_heads is 3"),
        ("--dilation-rates 1 2", "--dilation-rates is given and --segment-lengths is not"),
        ("--context-parallel 2", "--context-parallel 2 with 1 process"),
        ("--fsdp", "--fsdp shards parameters over processes"),
        ("--resume nowhere", "--resume nowhere holds no run"),
        ("--data {empty}", "has 0 bytes to train on, and a context of 128 needs 129"),
        (
            "--context 4096 --data {short}",
            "has 200 bytes to train on, and a context of 4,096 needs 4,097; give more text or a smaller --context",
        ),
        ("--data {missing}", "does not exist; expected a text file or a folder of them"),
        ("--config {toml}", "the file of settings has 'contxt'; expected one of"),
        ("--config {bad}", "cannot be read"),
        ("--config {typed}", "argument --steps: 'many' is not a size"),
    ],
)
def test_settings_are_refused_before_anything_is_made(text: Path, tmp_path: Path, flags: str, expected: str) -> None:
    contents = {"empty": "", "short": "a" * 400, "toml": "contxt = 64", "bad": "context = = 64", "typed": 'steps = "many"'}
    for name, content in contents.items():
        (tmp_path / f"{name}.toml").write_text(content)
    places = {name: tmp_path / f"{name}.toml" for name in (*contents, "missing")}
    words = [word.format(**places) for word in flags.split()]
    data = [] if "--data" in flags else ["--data", str(text)]
    result = run_script(SCRIPT, *data, "--out", str(tmp_path / "run"), *kills.SMALL, *words)
    assert result.returncode == 2, result.stdout + result.stderr
    assert expected in result.stderr
    assert len(result.stderr.splitlines()) == 1, result.stderr
    assert not (tmp_path / "run").exists()


def test_flags_may_stand_in_a_file(text: Path, tmp_path: Path) -> None:
    """Those on the command line win, and settings.json is such a file."""
    (tmp_path / "run.toml").write_text(f'data = "{text}"\nsteps = 5\nskip-memory-test = true\ncontext = 128\nlayers = 1\n')
    for config, out, options in ((tmp_path / "run.toml", "first", ["--steps", "2", "--validations", "0"]), (None, "second", [])):
        path = config or tmp_path / "first" / "settings.json"
        result = run_script(SCRIPT, "--config", str(path), "--out", str(tmp_path / out), *options, quick=True)
        assert result.returncode == 0, result.stderr
    first, second = ((tmp_path / out / "settings.json").read_text() for out in ("first", "second"))
    assert first == second
    assert json.loads(first)["steps"] == 2 and json.loads(first)["layers"] == 1
    assert bits_of(tmp_path / "first") == bits_of(tmp_path / "second") != []


@pytest.mark.parametrize(
    ("flags", "branches"),
    [
        ("--context 4096", "((512, 1), (2048, 4), (8192, 16))"),
        ("--context 20000", "((512, 1), (2048, 4), (8192, 16), (20000, 39))"),
        ("--context 256 --segment-lengths 64 256 --dilation-rates 1 2", "((64, 1), (256, 2))"),
    ],
)
def test_branches_follow_the_context(text: Path, tmp_path: Path, flags: str, branches: str) -> None:
    """A file is split so that either part is as long as the context, if it has that much."""
    options = ["--steps", "1", "--validations", "0", "--layers", "1", "--embed-dim", "8", "--heads", "1", *flags.split()]
    printed = train(text, tmp_path / "run", *options, code=0 if "20000" not in flags else 2)
    if "20000" in flags:
        # 34,400 bytes are too few for two parts
        assert "needs 20,001" in printed
        longer = tmp_path / "longer.txt"
        longer.write_text(text.read_text() * 2)
        printed = train(longer, tmp_path / "run", *options)
    assert f"branches {branches}, context {flags.split()[1]}" in printed
    # no failure, unless it is asked for (test_examples.py)
    assert "bits per byte, not below both: unigram" in printed


def test_a_run_goes_on_past_its_end(text: Path, whole: Path, tmp_path: Path) -> None:
    """With more steps than it had; its settings need not be given again."""
    run = tmp_path / "copy"
    shutil.copytree(whole, run)
    result = run_script(SCRIPT, "--resume", str(run), "--steps", "12")
    assert result.returncode == 0, result.stderr
    assert "going on with" in result.stdout and "after step 8" in result.stdout
    bits = bits_of(run)
    assert len(bits) == 12 and bits[:8] == bits_of(whole)
    assert min((run / name).stat().st_size for name in ("loss.png", "pattern.png")) > 5000
    # gone on with at its end, it is evaluated again, and the log has that once
    before = kills.log_of(run)
    assert run_script(SCRIPT, "--resume", str(run), quick=True).returncode == 0
    assert kills.log_of(run) == before


def test_a_pipe_gets_few_lines_of_progress(text: Path, tmp_path: Path) -> None:
    result = run_script(
        SCRIPT, "--data", str(text), "--out", str(tmp_path), *kills.SMALL, "--steps", "60", "--validations", "2", quick=True
    )
    shown = [line for line in re.split(r"[\r\n]", result.stderr) if "bits/byte" in line]
    assert len(bits_of(tmp_path)) == 60 and len(shown) == 1 and re.match(r"step 1, \d\.\d{3} bits/byte, [\d,]+ bytes/s", shown[0])
    assert "\r" not in result.stderr and result.stdout.count("held out: ") == 3


def test_a_run_that_is_killed_ends_to_the_same_bits(text: Path, tmp_path: Path) -> None:
    """By each signal, in the middle of training; python -m tests.helpers.kills does it twenty times, at any moment, on more processes."""
    options = ["--steps", "120", "--save-minutes", "0.003"]
    train(text, tmp_path / "whole", *options)
    run = tmp_path / "killed"
    words = ["--data", str(text), "--out", str(run), *kills.SMALL, *options, "--resume", "auto"]
    log = run / "log.jsonl"
    for count, (kind, code) in enumerate(((signal.SIGKILL, -9), (signal.SIGTERM, 143), (signal.SIGINT, 130)), 1):
        # a run that goes on begins with a log of its own, without the steps that are done again
        before = file_of(log)
        script = Script(SCRIPT, *words, quick=True)
        (process,) = script.processes
        deadline = time.monotonic() + 200
        while process.is_alive() and (file_of(log) == before or len(steps_of(run)) < 8 * count) and time.monotonic() < deadline:
            time.sleep(0.02)
        # before, in or after the writing of a checkpoint
        time.sleep(0.05 * count)
        os.kill(process.pid, kind)
        process.join(60)
        assert process.exitcode == code, script.output()
        assert "Traceback" not in script.output()[1]
        assert 8 * count <= len(steps_of(run)) < 120
        if kind == signal.SIGKILL:
            assert not (run / "checkpoint").exists()
        else:
            step = max(steps_of(run))
            assert f"stopped by {kind.name} after step {step}, which is saved; evaluate and generate" in script.output()[1]
            with pytest.warns(UserWarning, match=f"is the model of step {step}, after which the run was stopped"):
                LongNetLM.from_pretrained(run)
        script.end()
    train(text, run, *options, "--resume", "auto")
    assert kills.log_of(run) == kills.log_of(tmp_path / "whole")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        LongNetLM.from_pretrained(run)


def file_of(path: Path) -> int | None:
    return path.stat().st_ino if path.exists() else None


def steps_of(run: Path) -> set[int]:
    """Steps that a run's log has; the last line may be one that is being written."""
    log = run / "log.jsonl"
    return {int(step) for step in re.findall(r'"step": (\d+)', log.read_text())} if log.exists() else set()


@pytest.mark.parametrize(
    ("before", "after", "options"), [(2, None, []), (None, 2, ["--context-parallel", "2", "--fsdp", "--layout", "zigzag"])]
)
def test_a_run_goes_on_with_another_number_of_processes(
    text: Path, tmp_path: Path, before: int | None, after: int | None, options: list[str]
) -> None:
    """Sequences of a step stay what they were, and so do the bits, up to the order of sums; also where processes share a sequence."""
    small = ["--lr", "5e-4", "--validations", "0"]
    alone = tmp_path / "alone"
    train(text, alone, "--steps", "3", *small, processes=before)
    shutil.copytree(alone, tmp_path / "resumed")
    train(text, alone, "--steps", "6", "--resume", "auto", processes=before)
    train(text, tmp_path / "resumed", "--steps", "6", "--resume", "auto", *options, processes=after)
    bits = bits_of(tmp_path / "resumed")
    assert len(bits) == 6 and bits[:3] == bits_of(alone)[:3]
    assert bits == pytest.approx(bits_of(alone), abs=3e-6, rel=0)
    assert bits[5] < bits[0]


def test_sharded_parameters_without_shared_sequences_end_as_others_do(text: Path, tmp_path: Path) -> None:
    """The first process reports alone, and no longer asks a model of which it holds a part."""
    printed = train(text, tmp_path / "run", "--steps", "2", "--fsdp", processes=2)
    assert "done: validation" in printed
    assert (tmp_path / "run" / "checkpoint" / "model.safetensors").is_file()


def test_what_a_resumed_run_refuses(text: Path, whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "run")
    printed = train(text, tmp_path / "run", "--resume", "auto", "--context", "64", code=2)
    assert f"--context is 64, and the run in {tmp_path / 'run'} has 128; leave --context out to go on with it" in printed
    other = tmp_path / "other.txt"
    other.write_text(text.read_text().replace("fox", "cat"))
    (tmp_path / "run" / "settings.json").write_text((whole / "settings.json").read_text().replace(str(text), str(other)))
    printed = train(other, tmp_path / "run", "--resume", "auto", code=2)
    assert "was trained on other data" in printed
    assert bits_of(tmp_path / "run") == bits_of(whole)


def test_a_run_that_begins_anew_keeps_the_one_before(text: Path, whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "run")
    printed = train(text, tmp_path / "run", "--steps", "2")
    assert f"the run that was in {tmp_path / 'run'} is now in {tmp_path / 'run' / 'earlier-1'}" in printed
    assert bits_of(tmp_path / "run" / "earlier-1") == bits_of(whole)
    assert (tmp_path / "run" / "earlier-1" / "checkpoint" / "model.safetensors").is_file()
    assert len(bits_of(tmp_path / "run")) == 2
    assert len(list((tmp_path / "run" / "checkpoints").iterdir())) == 1


def test_a_checkpoint_that_a_kill_cut_off_is_passed_over(text: Path, whole: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    # written in part, and removed in part
    shutil.copytree(run / "checkpoints" / "step-00000008", run / "checkpoints" / ".part-00000009")
    shutil.copytree(run / "checkpoints" / "step-00000008", run / "checkpoints" / "step-00000009")
    (run / "checkpoints" / "step-00000009" / "run.json").unlink()
    with (run / "log.jsonl").open("a") as file:
        file.write('{"step": 9, "train/bi')
    assert "after step 8" in train(text, run, "--steps", "9", "--resume", "auto")
    assert len(bits_of(run)) == 9
    assert not (run / "checkpoints" / ".part-00000009").exists()


def test_a_loss_that_is_no_number_ends_the_run_and_saves_no_such_weights(text: Path, tmp_path: Path) -> None:
    printed = train(text, tmp_path, "--steps", "40", "--lr", "1e30", "--validations", "0", code=1)
    assert "expected a number: go on from the last checkpoint with --resume auto and a smaller --lr" in printed
    assert not (tmp_path / "checkpoint").exists()


def test_a_smaller_rate_and_moved_data_are_no_other_run(text: Path, whole: Path, tmp_path: Path) -> None:
    """The rate is what the message of a loss that is no number advises to change."""
    shutil.copytree(whole, tmp_path / "run")
    moved = tmp_path / "moved.txt"
    shutil.copy(text, moved)
    train(moved, tmp_path / "run", "--resume", "auto", "--lr", "1e-4", "--steps", "9")
    saved = json.loads((tmp_path / "run" / "settings.json").read_text())
    assert saved["lr"] == 1e-4 and saved["data"] == str(moved)
    assert len(bits_of(tmp_path / "run")) == 9


def test_a_run_that_diverges_in_its_last_step_fails(text: Path, tmp_path: Path) -> None:
    printed = train(text, tmp_path, "--steps", "1", "--lr", "1e30", "--validations", "0", code=1)
    assert "the held-out loss after step 1 is nan; expected a number" in printed


def test_checkpoints_without_their_settings_are_kept(text: Path, whole: Path, tmp_path: Path) -> None:
    """A new run neither goes on with them nor counts them among its own, of which it removes old ones."""
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    (run / "settings.json").unlink()
    assert "holds a run without its settings.json" in train(text, run, "--steps", "3", "--resume", "auto", code=2)
    assert bits_of(run) == bits_of(whole)
    train(text, run, "--steps", "3")
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-00000003"]
    assert bits_of(run / "earlier-1") == bits_of(whole)
    assert (run / "earlier-1" / "loss.png").is_file()


def test_a_run_that_goes_on_elsewhere_moves_what_is_there(text: Path, whole: Path, tmp_path: Path) -> None:
    """And has a checkpoint of its own at once."""
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    train(text, run, "--resume", str(whole), "--steps", "9", "--keep", "2")
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step-00000008", "step-00000009"]
    assert bits_of(run / "earlier-1") == bits_of(whole)
    assert len(bits_of(run)) == 1


def test_two_runs_do_not_share_a_folder(text: Path, whole: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    with (run / ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for options in ([], ["--resume", "auto"]):
            printed = train(text, run, "--steps", "9", *options, code=2)
            assert f"another run is writing to {run}" in printed
    assert bits_of(run) == bits_of(whole) and not (run / "earlier-1").exists()


def test_damaged_lines_of_the_log_are_left_out(text: Path, whole: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    with (run / "log.jsonl").open("ab") as file:
        file.write(b"\0\0\xff\n[1]\n{}\n")
    assert "3 damaged line(s) left out" in train(text, run, "--steps", "9", "--resume", "auto")
    assert len(bits_of(run)) == 9


@pytest.mark.parametrize(("name", "content"), [("__0_0.distcp", "abc"), (".metadata", "abc"), ("run.json", "{"), ("run.json", "[]")])
def test_a_damaged_checkpoint_is_reported_in_one_line(text: Path, whole: Path, tmp_path: Path, name: str, content: str) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    path = run / "checkpoints" / "step-00000008"
    assert (path / name).is_file()
    (path / name).write_text(content)
    printed = train(text, run, "--steps", "9", "--resume", "auto", code=2)
    assert f"error: {path} cannot be loaded (" in printed and f"move it out of {path.parent}" in printed
    assert bits_of(run) == bits_of(whole)


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
    ("place", "processes"),
    [
        ("FileSystemReader read_data 0", None),
        # a module of C makes an error of its own of it
        ("FileSystemReader read_metadata 0 numpy._core.multiarray", None),
        ("Checkpoints __init__ 0 numpy._core.multiarray", None),
        ("FileSystemReader read_data 1", 2),
    ],
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
    assert "after step 8" in train(text, run, "--steps", "9", "--resume", "auto")


@pytest.mark.parametrize("what", ["the count of steps", "a file of another checkpoint"])
def test_a_checkpoint_of_other_bytes_is_refused(text: Path, whole: Path, tmp_path: Path, what: str) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    train(text, run, "--steps", "9", "--resume", "auto")
    path = run / "checkpoints" / "step-00000009"
    if what == "the count of steps":
        state = (path / "run.json").read_text()
        (path / "run.json").write_text(state.replace('"step": 9', '"step": 1'))
        assert (path / "run.json").read_text() != state
    else:
        shutil.copy(whole / "checkpoints" / "step-00000008" / "__0_0.distcp", path)
    printed = train(text, run, "--steps", "10", "--resume", "auto", code=2)
    assert f"error: {path} cannot be loaded (ValueError: its files are not those that were written)" in printed
    # a checkpoint of an earlier version says nothing of its files
    state = json.loads((whole / "checkpoints" / "step-00000008" / "run.json").read_text())
    del state["sha256"]
    shutil.rmtree(path)
    shutil.copytree(whole / "checkpoints" / "step-00000008", run / "checkpoints" / "step-00000008", dirs_exist_ok=True)
    (run / "checkpoints" / "step-00000008" / "run.json").write_text(json.dumps(state))
    assert "after step 8" in train(text, run, "--steps", "9", "--resume", "auto")


def test_a_longer_run_is_evaluated_on_its_way(text: Path, whole: Path, tmp_path: Path) -> None:
    """Whole has had its four evaluations after eight steps; of 40 steps they are due after 8, 16, 24 and 32."""
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    train(text, run, "--steps", "40", "--resume", "auto")
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "held_out/bits" in line and line["step"] > 8] == [16, 24, 32, 40]


def test_a_run_does_not_read_what_it_writes(text: Path, tmp_path: Path) -> None:
    shutil.copy(text, tmp_path)
    assert "would be read as text; give another --out" in train(tmp_path, tmp_path / "run", "--steps", "1", code=2)
    assert not (tmp_path / "run").exists()


def test_a_run_whose_reader_ends_saves_and_stops(text: Path, tmp_path: Path) -> None:
    """As in ``train_longnet.py … | head``."""
    command = kills.command(text, tmp_path / "run", 1, "--steps", "100000", "--validations", "10000", "--save-minutes", "100")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
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
    words = [str(SCRIPT), "--data", str(text), "--out", str(tmp_path / "run"), *kills.SMALL, "--steps", "3000", "--save-minutes", "0.001"]
    result = run_script(limited, *words, "--validations", "0")
    assert result.returncode == 1, result.stderr
    assert "Traceback" not in result.stderr
    last = result.stderr.strip().splitlines()[-1]
    # the system's error, or that of torch's writer, which finds its file shorter than it should be
    assert last.startswith(("a checkpoint cannot be written (OSError: ", "a checkpoint cannot be written (RuntimeError: ["))
    assert last.endswith("go on from the last one with --resume auto")
    train(text, tmp_path / "run", "--steps", "3", "--resume", "auto")
    assert len(bits_of(tmp_path / "run")) == 3


def test_a_file_in_the_way_ends_in_one_line(text: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    printed = train(text, tmp_path / "file" / "run", "--steps", "2", code=1)
    assert "file" in printed


def test_one_process_of_several_reports_wrong_usage(text: Path, tmp_path: Path) -> None:
    result = run_script(SCRIPT, "--lr", "-1", "--out", str(tmp_path / "run"), processes=2)
    assert result.returncode == 2
    assert result.stderr.count("got -1") == 1
    assert os.listdir(tmp_path) == []


def test_a_swallowed_interrupt_still_stops_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """As while libraries are loaded: before it was noted, a run went on as if nobody had pressed Ctrl-C."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    main = importlib.import_module("recipe.main")
    assert main.interrupted() is None

    def swallow() -> int:
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        return 7 if main.interrupted() == signal.SIGINT else 0

    before = signal.getsignal(signal.SIGINT)
    assert main.run_safely(swallow) == 7
    assert signal.getsignal(signal.SIGINT) is before
    assert main.run_safely(lambda: int(main.interrupted() is not None)) == 0
