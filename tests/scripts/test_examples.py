"""The examples as a user runs them, in small: their last line and exit code are what their docstrings promise."""

import contextlib
import functools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.scripts import descendants, free_port, needs_pins, run_script

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = ["--context", "512", "--batch", "1", "--skip-memory-test"]
# where it does not matter how well a model learns
NARROW = ["--layers", "1", "--embed-dim", "32", "--heads", "2"]


def run(*command: str, timeout: int = 240) -> subprocess.CompletedProcess[str]:
    """The program's end, with stderr among its output; what is not through by then is killed, with all that it has started."""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen([sys.executable, *command], env=os.environ | {"OMP_NUM_THREADS": "1"}, **pipes)
    try:
        out = process.communicate(timeout=timeout)[0]
    except BaseException:
        for member in descendants(process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(member, signal.SIGKILL)
        raise
    return subprocess.CompletedProcess(command, process.returncode, out, "")


def write_text(folder: Path) -> Path:
    """Text that is easy for attention and hard for a bigram: a long sentence over and over."""
    path = folder / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog; pack my box with five dozen liquor jugs. " * 400)
    return path


def test_training_ends_below_the_baselines_and_writes_what_it_says(text: Path, tmp_path: Path) -> None:
    steps = ["--steps", "16", "--expect-below-bigram", "--out", str(tmp_path)]
    result = run_script(EXAMPLES / "train_longnet.py", "--data", str(text), *steps, *SMALL)
    assert result.returncode == 0, result.stderr
    assert "forward: sdpa_cpu · backward: sdpa_cpu" in result.stdout
    files = {"checkpoint", "checkpoints", "log.jsonl", "loss.png", "pattern.png", "settings.json", "tensorboard"}
    assert {file.name for file in tmp_path.iterdir() if file.name != ".lock"} == files
    assert (tmp_path / "loss.png").stat().st_size > 5000
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    done = [line for line in lines if "train/bits" in line]
    assert [line["step"] for line in done] == list(range(1, 17))
    assert all(line["tokens_per_second"] > 0 and line["mfu"] > 0 and line["memory_gib"] > 0 for line in done)
    # four on the way, and the last
    assert len([line for line in lines if "held_out/bits" in line]) == 5


DOCUMENT = "--document {text}"
# what is run in small, and what its output has, the last line last
ENDS: dict[str, tuple[str, list[str]]] = {
    "block_sparse.py": (
        f"{DOCUMENT} --context 3600 --steps 2 --out {{out}}",
        [
            r"dense +100\.0% .* 0\.000 ",
            *(f"{kind} +{share}%" for share in (25, 10, 5) for kind in ("chosen", "random", "window")),
            "done: 10 % chosen is ",
        ],
    ),
    "slide_encoder.py": (
        "--tiles 90 200 --layers 2 --steps 2 --out {out}",
        [r"step 2 on slides of \[(55, 30, 15|110, 60, 30)\] tiles", "done: slides of 90, 200 tiles, step of "],
    ),
    "hf_long_document.py": (
        f"{DOCUMENT} --context 3000 --steps 3 --write 10",
        [
            r"sdpa +3 +[\d.]+ .* [3-8]\.\d+",
            r"dilated +3 +[\d.]+ .* [3-8]\.\d+",
            "it writes on, 10 bytes",
            "done: dilated reads 3000 bytes ",
        ],
    ),
    "extreme_length.py": ("--budget-gib 0.2", ["N = 65,536: predicted"]),
}


@pytest.mark.parametrize("script", ENDS)
def test_an_example_ends_with_what_it_promises(script: str, text: Path, tmp_path: Path) -> None:
    words, said = ENDS[script]
    # which measures what a process takes up
    start = (
        functools.partial(run_script, EXAMPLES / script)
        if script != "extreme_length.py"
        else functools.partial(run, str(EXAMPLES / script))
    )
    result = start(*words.format(text=text, out=tmp_path).split())
    assert result.returncode == 0, result.stdout + result.stderr
    place = 0
    for pattern in said:
        match = re.compile(pattern).search(result.stdout, place)
        assert match is not None, (pattern, result.stdout)
        place = match.start()
    assert result.stdout.rfind("\n", 0, -1) < place
    pictures = {"block_sparse.py": ["block_sparse.png"], "slide_encoder.py": ["slide_attention_200.png", "slide_attention_90.png"]}
    assert sorted(file.name for file in tmp_path.glob("*.png") if script in pictures) == pictures.get(script, [])


@needs_pins
def test_processes_fine_tune_a_transformers_model(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    losses = []
    for processes in (None, 2):
        options = ["--context", "301", "--out", str(tmp_path / str(processes))]
        result = run_script(EXAMPLES / "hf_context_parallel.py", *options, processes=processes)
        match = re.search(rf"done: 5 steps of 301 tokens on {processes or 1} processes, loss ([\d.]+) to ([\d.]+)", result.stdout)
        assert result.returncode == 0 and match is not None, result.stdout + result.stderr
        losses.append(match.groups())
    assert losses[0] == losses[1] and float(losses[0][1]) < float(losses[0][0]) - 0.2


@needs_pins
def test_a_kind_of_batch_that_processes_share_has_its_loss() -> None:
    pytest.importorskip("transformers")
    result = run_script(EXAMPLES / "hf_sharing_kinds.py", "--kind", "packing", processes=2)
    match = re.search(r"done: packing by ours: right: loss ([\d.]+), right ([\d.]+), of a model that ignores it ([\d.]+)", result.stdout)
    assert result.returncode == 0 and match is not None, result.stdout + result.stderr
    assert match[1] == match[2] and abs(float(match[3]) - float(match[2])) > 0.05


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
        ("matplotlib", ["slide_encoder.py", "--tiles", "30", "--layers", "1", "--steps", "1"], "no pictures, "),
        ("tensorboard", ["train_longnet.py", "--data", "{text}", "--steps", "2", *SMALL, *NARROW], "no TensorBoard curves, "),
        # needed: the script ends at its start
        ("tqdm", ["train_longnet.py"], "train"),
        ("tqdm", ["slide_features.py"], "train"),
        ("skimage", ["make_ihc_slides.py"], "slides"),
        ("transformers", ["hf_long_document.py"], "hf"),
        ("accelerate", ["hf_context_parallel.py"], "hf"),
    ],
)
def test_what_a_missing_package_draws_is_left_out_and_one_that_is_needed_is_named(
    text: Path, tmp_path: Path, package: str, words: list[str], said: str
) -> None:
    (tmp_path / "without.py").write_text(WITHOUT)
    script, *options = (word.format(text=text) for word in words)
    out = ["--out", str(tmp_path / "out")] if options else []
    result = run_script(tmp_path / "without.py", package, str(EXAMPLES / script), *options, *out)
    if not options:
        assert result.returncode == 1 and result.stdout == "" and result.stderr.count("\n") == 1
        assert package in result.stderr and f'pip install "dilated-attention[{said}]"' in result.stderr
        return
    assert result.returncode == 0, result.stderr
    (line,) = [line for line in result.stdout.splitlines() if line.startswith(said)]
    assert package in line and 'pip install "dilated-attention[' in line
    assert result.stdout.splitlines()[-1].startswith("done: ")


def test_a_document_is_trained_on_for_some_time(part: Callable[[str], Any], capsys: pytest.CaptureFixture[str]) -> None:
    """Of a negative time steps never ended, and 0 divided by itself."""
    parser = part("_text").document_parser(None, 64, 1.0)
    for value in ("nan", "0", "-1", "inf"):
        with pytest.raises(SystemExit):
            parser.parse_args(["--train-seconds", value])
        assert f"argument --train-seconds: got {value}; expected a number > 0" in capsys.readouterr().err


def test_a_folder_of_one_file_is_read_as_that_file(part: Callable[[str], Any], text: Path, tmp_path: Path) -> None:
    """It was held out as a whole, as the first of twelve."""
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "text.txt").write_bytes(text.read_bytes())
    read = part("_text").read
    (train, held_out, _), (train_of_file, held_out_of_file, _) = read(folder, 513), read(text, 513)
    assert train.equal(train_of_file) and held_out.equal(held_out_of_file) and len(train) > 10 * len(held_out)
    (folder / "two.txt").write_text("short")
    with pytest.raises(ValueError, match=r"has 5 bytes to train on, .*; of a folder every 12th file is held out, of one file a 12th"):
        read(folder, 513)


def torchrun(processes: int = 2) -> list[str]:
    return ["-m", "torch.distributed.run", f"--nproc_per_node={processes}", "--master_addr=127.0.0.1", f"--master_port={free_port()}"]


SMALL_RUN, SMALL_GENOME = (
    " ".join([*SMALL, *NARROW]),
    "--context 512 --layers 2 --embed-dim 32 --heads 2 --markov-order 6 --fasta {repeats}",
)
REFUSED: dict[str, list[tuple[str, str]]] = {
    f"train_longnet.py {SMALL_RUN} --data {{text}}": [
        ("--seconds nan", "argument --seconds: got nan; expected a number > 0"),
        ("--steps 0", "argument --steps: got 0; expected a number >= 1"),
        ("--context 9k --data {short}", "a context of 9,216 needs 9,217; give more text or a smaller --context"),
        ("--preset gigapath-12l768d", "--preset is gigapath-12l768d, which is no causal language model"),
        ("--dilation-rates 1 2", "--dilation-rates is given and --segment-lengths is not"),
        ("--context-parallel 2", "--context-parallel 2 with 1 process"),
        ("--fsdp", "--fsdp shards parameters over processes"),
        ("--resume nowhere", "--resume nowhere holds no run"),
        ("--resume ''", "--resume is empty"),
        ("--data {empty}", "has 0 bytes to train on, and a context of 512 needs 513"),
        ("--data {missing}", "does not exist; expected a text file or a folder of them"),
        ("--config {toml}", "the file of settings has 'contxt'; expected one of"),
        ("--config {bad}", "cannot be read"),
        ("--config {typed}", "argument --steps: 'many' is not a size"),
    ],
    f"train_genome.py {SMALL_GENOME}": [
        ("--fasta {empty}", "holds no FASTA record"),
        ("--fasta {unknown}", "bases are all unknown; expected some to evaluate"),
        ("--fasta {gaps}", "of the 85,000 bases to train on 0.5% are known; expected at least 1%"),
        ("--context 9000", "6,375 bases to train on, and --context is 9,000"),
        ("--short-context 2k", "--short-context is 2,048 and --context 512"),
        ("--held-out 0", "--held-out 0 is no record of"),
        ("--held-out repeats", "--held-out leaves 0 bases to train on"),
        ("--segment-lengths 64", "--segment-lengths and --dilation-rates belong together"),
        ("--attention mixed --segment-lengths 64 --dilation-rates 1", "--segment-lengths is given with --attention mixed"),
        ("--attention mixed --first-segment 64", "--first-segment is given with --attention mixed"),
    ],
    "slide_features.py --features {out}/features --labels {out}/labels.csv": [
        ("--held-out 1", "got 1; expected a number > 0 and <= 0.9"),
        ("--fsdp", "unrecognized arguments: --fsdp"),
        ("--checkpoint x.pth --heads 4", "leave them out with --checkpoint"),
    ],
    # found when the script is at work: exit code 1
    "block_sparse.py": [("--document nowhere", "No such file or directory: 'nowhere'")],
    "hf_context_parallel.py": [
        ("--size 3 --steps 1", "size is 3 and there are 1 processes; expected a divisor"),
        ("--context 1M", "expected a --context up to that"),
    ],
    "hf_sharing_kinds.py": [("--kind plain", "got 1 processes; expected 2: torchrun")],
    "slide_encoder.py --tiles 20 --layers 1 --steps 1": [("--out /proc/none", "No such file or directory: '/proc/none'")],
    "extreme_length.py": [("--heads 999999999", "num_heads is 999999999; expected an integer")],
}


@pytest.mark.parametrize(("words", "said"), [(f"{script} {more}", said) for script, rows in REFUSED.items() for more, said in rows])
def test_what_a_script_cannot_do_is_said_in_one_line_before_anything_is_made(
    words: str, said: str, text: Path, tmp_path: Path, here: Callable[..., tuple[int, str, str]]
) -> None:
    contents = {
        "empty": "",
        "short": "a" * 400,
        "toml": "contxt = 64",
        "bad": "context = = 64",
        "typed": 'steps = "many"',
        "repeats": ">repeats\n" + "ACGTTGCAAC" * 750,
        "unknown": ">a\n" + "ACGT" * 1500 + "N" * 1500,
        "gaps": ">a\n" + "ACGTA" * 85 + "N" * 84_575 + "ACGTA" * 3000,
    }
    for name, content in contents.items():
        (tmp_path / f"{name}.toml").write_text(content)
    places = {name: tmp_path / f"{name}.toml" for name in (*contents, "missing")}
    script, *options = shlex.split(words.format(text=text, out=tmp_path, **places))
    out = ["--out", str(tmp_path / "run")] if "train" in script or "features" in script else []
    code, _, error = here(script, *out, *options)
    assert code == (2 if out else 1) and said in error and "Traceback" not in error, error
    assert not (tmp_path / "run").exists() and (not out or error.count("\n") == 1)
