"""``python -m dilated_attention evaluate``: what it prints of bytes and bases, and everything that it refuses."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch

from dilated_attention.cli import main
from dilated_attention.models import BYTES, evaluate, read_fasta
from tests.cli.checkpoints import saved

Capture = pytest.CaptureFixture[str]
FASTA = b">one\nACGTNNACGTACGT\nACGT\n>two\n" + b"GGGTTTACAGATTACA" * 30 + b"\n"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder of texts, one of them hidden, and of a FASTA file."""
    folder = tmp_path / "data"
    (folder / "inner").mkdir(parents=True)
    (folder / ".git").mkdir()
    (folder / "b.txt").write_bytes(b"The text of one file. " * 20)
    (folder / "inner" / "a.txt").write_bytes("naïve → text".encode())
    (folder / ".git" / "config").write_bytes(b"no data" * 100)
    (folder / "x.fa.gz").write_bytes(gzip.compress(FASTA))
    return folder


def test_bytes_of_a_folder(tmp_path: Path, data: Path, capsys: Capture) -> None:
    (data / "x.fa.gz").unlink()
    model = saved("bytes", tmp_path / "run" / "checkpoint")
    found = evaluate(model, [BYTES.encode((data / name).read_bytes()) for name in ("b.txt", "inner/a.txt")], context=100, stride=30)
    options = ["--data", str(data), "--context", "100", "--stride", "30", "--device", "cpu"]
    # the folder of a run holds the checkpoint
    assert main(["evaluate", str(tmp_path / "run"), *options, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["bits_per_byte"] == pytest.approx(found.bits, abs=1e-6)
    assert (answer["bytes"], answer["scored"], answer["records"], answer["windows"]) == (440 + 15, 439 + 14, 2, found.windows)
    assert answer["bytes_per_second"] > 0 and answer["dtype"] == "float32" and "by_position" not in answer
    assert main(["evaluate", str(tmp_path / "run" / "checkpoint"), *options, "--by-position", "--dtype", "float64"]) == 0
    text = capsys.readouterr().out
    assert text.splitlines()[-1] == f"{found.bits:.4f} bits per byte over 453"
    assert f"{'64–100':>20}" in text and "in float64" in text


@pytest.mark.parametrize("kind", ["bases", "masked bases"])
def test_bases_of_every_record(kind: str, tmp_path: Path, data: Path, capsys: Capture) -> None:
    model = saved(kind, tmp_path / "model")
    records = [bases for _, bases in read_fasta(data / "x.fa.gz")]
    found = evaluate(model, records, context=50)
    for path in (data / "x.fa.gz", data):
        assert main(["evaluate", str(tmp_path / "model"), "--data", str(path), "--context", "50", "--json"]) == 0
        answer = json.loads(capsys.readouterr().out)
        assert answer["bits_per_base"] == pytest.approx(found.bits, abs=1e-6)
        assert (answer["records"], answer["bases"], answer["scored"]) == (2, 18 + 480, found.scored)
        assert answer["objective"] == kind.partition(" ")[0].replace("bases", "causal")
    if kind == "bases":
        # N is no target, nor is the first base of a record
        assert found.scored == 18 + 480 - 2 - 2


def refused(capsys: Capture, *arguments: str) -> tuple[int, str]:
    """(exit code, the last line of stderr); nothing is printed, and there is no traceback."""
    try:
        code = main(["evaluate", *arguments])
    except SystemExit as error:
        code = int(error.code or 0)
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert len(lines) == (1 if code == 1 else 2), captured.err
    return code, lines[-1]


def no_model(*arguments: object, **options: object) -> None:
    raise AssertionError("the model was loaded before its data was looked at")


def test_data_that_cannot_be_scored_is_refused_before_a_model_is_loaded(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved("bytes", tmp_path / "model")
    monkeypatch.setattr("dilated_attention.cli.saved.opened", no_model)
    (tmp_path / "folder").mkdir()
    for name, held in (("empty", b""), ("one", b"a"), ("folder/empty", b"")):
        (tmp_path / name).write_bytes(held)
    for name, text in (
        ("none", "does not exist; expected a file or a folder"),
        ("empty", ": no file of it has 2 bytes"),
        ("one", ": no file of it has 2 bytes"),
        ("folder", ": no file of it has 2 bytes"),
    ):
        code, line = refused(capsys, str(tmp_path / "model"), "--data", str(tmp_path / name))
        assert code == 1 and name in line and text in line, line
    code, line = refused(capsys, str(tmp_path / "model"), "--data", str(tmp_path / "one"), "--context", "4", "--stride", "5")
    assert (code, "--stride is 5; expected at most --context, 4" in line) == (2, True)


def test_data_of_another_kind_is_refused(tmp_path: Path, data: Path, capsys: Capture) -> None:
    saved("bases", tmp_path / "bases")
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_bytes(b"ACGT")
    (tmp_path / "unknown.fa").write_bytes(b">\nNNNN")
    for path, text in (
        (tmp_path / "texts" / "a.txt", "holds no FASTA record"),
        (tmp_path / "texts", "holds no FASTA file, and the model's tokens are bases; expected names in .fa"),
        (tmp_path / "unknown.fa", "the longest record has 4 tokens, and none of all is scored"),
    ):
        code, line = refused(capsys, str(tmp_path / "bases"), "--data", str(path))
        assert code == 1 and text in line, line


@pytest.mark.parametrize(
    ("kind", "options", "code", "text"),
    [
        ("words", [], 1, "vocab_size is 300; expected 256 (bytes) or 5 (bases A, C, G, T, N)"),
        ("masked bytes", [], 1, "only bases (vocab_size=5) have one that hides, N"),
        ("masked bases", ["--by-position"], 2, "--by-position is given, and this model sees both sides"),
        ("bytes", ["--backend", "flash9"], 2, "backend is 'flash9'; expected one of auto"),
        ("bytes", ["--backend", "flash4"], 1, "flash4"),
        ("bytes", ["--device", "gpu"], 2, "--device is 'gpu', which torch cannot use here"),
        ("bytes", ["--device", "meta"], 2, "--device is 'meta'; expected cpu, cuda or cuda:<index>"),
        ("bytes", ["--context", "0"], 2, "argument --context: '0' is not a size"),
        ("bytes", ["--dtype", "int8"], 2, "argument --dtype: invalid choice: 'int8'"),
        ("bytes", ["--stride", "257"], 1, "stride is 257; expected at most context = 256"),
    ],
)
def test_what_cannot_be_done_is_refused_in_one_line(
    kind: str, options: list[str], code: int, text: str, tmp_path: Path, data: Path, capsys: Capture
) -> None:
    saved(kind, tmp_path / "model")
    path = data / ("x.fa.gz" if "bases" in kind else "b.txt")
    found, line = refused(capsys, str(tmp_path / "model"), "--data", str(path), "--device", "cpu", *options)
    assert found == code and text in line, line


def test_folders_without_a_model_are_refused(tmp_path: Path, data: Path, capsys: Capture) -> None:
    (tmp_path / "run").mkdir()
    saved("bytes", tmp_path / "cut")
    weights = tmp_path / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    for name, text in (
        ("none", "does not exist; expected a folder written by save_pretrained"),
        ("run", "holds no model.safetensors, nor does checkpoint/ in it"),
        ("data/b.txt", "holds no model.safetensors"),
        ("cut", "cut off or of another format"),
    ):
        code, line = refused(capsys, str(tmp_path / name), "--data", str(data / "b.txt"))
        assert code == 1 and text in line, line


def test_a_model_of_nan_is_refused(tmp_path: Path, data: Path, capsys: Capture) -> None:
    model = saved("bytes", tmp_path / "model")
    with torch.no_grad():
        model.output_weight.fill_(torch.nan)
    model.save_pretrained(tmp_path / "model")
    code, line = refused(capsys, str(tmp_path / "model"), "--data", str(data / "b.txt"))
    assert code == 1 and "the loss is nan" in line
