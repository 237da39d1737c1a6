"""``generate`` and ``evaluate`` of a saved model: what they print of bytes and bases, and everything that they refuse."""

from __future__ import annotations

import gzip
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from dilated_attention.cli import main
from dilated_attention.models import BASES, BYTES, LongNetConfig, LongNetLM, evaluate, kmers, read_fasta

Capture = pytest.CaptureFixture[str]
FASTA = b">one\nACGTNNACGTACGT\nACGT\n>two\n" + b"GGGTTTACAGATTACA" * 30 + b"\n"
DATA, FASTA_DATA = ["--data", "data/b.txt"], ["--data", "data/x.fa.gz"]
SHAPE: dict[str, Any] = {"embed_dim": 32, "num_layers": 2, "num_heads": 2, "segment_lengths": (64, 256), "dilation_rates": (1, 4)}
KINDS: dict[str, dict[str, Any]] = {
    "bytes": {"vocab_size": 256},
    "bases": {"vocab_size": 5, "kmer": 4, "tie_embeddings": False},
    "masked bases": {"vocab_size": 5, "kmer": 4, "tie_embeddings": False, "is_causal": False},
    "masked bytes": {"vocab_size": 256, "is_causal": False},
    "words": {"vocab_size": 300},
}


def saved(kind: str, folder: Path) -> LongNetLM:
    """Saves a model with weights of one seed, and returns it."""
    torch.manual_seed(0)
    model = LongNetLM(LongNetConfig(**SHAPE, **KINDS[kind])).eval()
    model.save_pretrained(folder)
    return model


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


def refused(capsys: Capture, *arguments: str) -> tuple[int, str]:
    """(exit code, the last line of stderr); nothing is printed, and there is no traceback."""
    try:
        code = main(list(arguments))
    except SystemExit as error:
        code = int(error.code or 0)
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert len(lines) == (1 if code == 1 else 2), captured.err
    return code, lines[-1]


def test_bytes_are_those_of_the_models_generate(tmp_path: Path, capsys: Capture) -> None:
    model = saved("bytes", tmp_path / "run" / "checkpoint")
    prompt = "naïve"
    options = ["--max-new-tokens", "40", "--temperature", "0.9", "--top-k", "200", "--top-p", "0.9", "--seed", "7", "--device", "cpu"]
    assert main(["generate", str(tmp_path / "run"), "--prompt", prompt, *options]) == 0
    text = capsys.readouterr().out
    tokens = BYTES.encode(prompt)[None]
    made = model.generate(tokens, 40, temperature=0.9, top_k=200, top_p=0.9, generator=torch.Generator().manual_seed(7))
    assert text == BYTES.decode(made[0, tokens.shape[1] :])
    (tmp_path / "prompt.txt").write_text(prompt, encoding="utf-8")
    assert main(["generate", str(tmp_path / "run" / "checkpoint"), "--prompt-file", str(tmp_path / "prompt.txt"), *options]) == 0
    assert capsys.readouterr().out == text


def test_bases_are_letters(tmp_path: Path, capsys: Capture) -> None:
    model = saved("bases", tmp_path / "model")
    (tmp_path / "x.fa").write_bytes(b">one\nGATT\nACA\n")
    (tmp_path / "x.txt").write_bytes(b"gatt aca\n")
    codes = kmers(BASES.encode("GATTACA"), 4, False)[None]
    expected = BASES.decode(model.generate(codes, 50, generator=torch.Generator().manual_seed(1))[0, 7:] % 5)
    for prompt in (["--prompt", "gattaca"], ["--prompt-file", str(tmp_path / "x.fa")], ["--prompt-file", str(tmp_path / "x.txt")]):
        assert main(["generate", str(tmp_path / "model"), *prompt, "--max-new-tokens", "50", "--seed", "1"]) == 0
        assert capsys.readouterr().out == expected
    stop = expected[20:23].lower()
    assert main(["generate", str(tmp_path / "model"), "--prompt", "gattaca", "--max-new-tokens", "50", "--seed", "1", "--stop", stop]) == 0
    assert capsys.readouterr().out == expected[: expected.index(stop.upper()) + 3]


def test_a_stop_may_be_bytes_that_are_no_text(tmp_path: Path, capsys: Capture) -> None:
    """As --prompt may; the shell's bytes come as surrogates."""
    saved("bytes", tmp_path / "model")
    options = ["--prompt", "x", "--max-new-tokens", "400", "--seed", "1", "--device", "cpu"]
    assert main(["generate", str(tmp_path / "model"), *options]) == 0
    whole = capsys.readouterr().out
    assert main(["generate", str(tmp_path / "model"), *options, "--stop", b"\xff".decode(errors="surrogateescape")]) == 0
    text = capsys.readouterr().out
    assert whole.startswith(text) and text.endswith("\ufffd") and len(text) < len(whole)


def test_characters_are_written_when_they_are_whole(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each byte is asked for only once the text before it is out; a character of three bytes waits for its last."""
    saved("bytes", tmp_path / "model")
    raw = "aé→b".encode() + b"\xff" + b"c\xe2"
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    seen: list[str] = []

    def tokens(*arguments: object, **options: object) -> object:
        for value in raw:
            seen.append(out.buffer.getvalue().decode())  # type: ignore[attr-defined]
            yield torch.tensor([[value]])

    monkeypatch.setattr("dilated_attention.models.generate_stream", tokens)
    monkeypatch.setattr(sys, "stdout", out)
    assert main(["generate", str(tmp_path / "model"), "--prompt", "x", "--device", "cpu"]) == 0
    assert seen == ["", "a", "a", "aé", "aé", "aé", "aé→", "aé→b", "aé→b\ufffd", "aé→b\ufffdc"]
    assert out.buffer.getvalue().decode() == "aé→b\ufffdc\ufffd"  # type: ignore[attr-defined]


def test_output_that_cannot_hold_a_character_replaces_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    saved("bytes", tmp_path / "model")
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr("dilated_attention.models.generate_stream", lambda *_, **__: (torch.tensor([[byte]]) for byte in "a→b".encode()))
    assert main(["generate", str(tmp_path / "model"), "--prompt", "x", "--device", "cpu"]) == 0
    assert out.buffer.getvalue() == b"a?b"  # type: ignore[attr-defined]


def test_runs_without_a_seed_differ(tmp_path: Path, capsys: Capture) -> None:
    saved("bytes", tmp_path / "model")
    texts = set()
    for _ in range(2):
        assert main(["generate", str(tmp_path / "model"), "--prompt", "x", "--max-new-tokens", "30"]) == 0
        texts.add(capsys.readouterr().out)
    assert len(texts) == 2


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
        code, line = refused(capsys, "evaluate", str(tmp_path / "model"), "--data", str(tmp_path / name))
        assert code == 1 and name in line and text in line, line
    code, line = refused(capsys, "evaluate", str(tmp_path / "model"), "--data", str(tmp_path / "one"), "--context", "4", "--stride", "5")
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
        code, line = refused(capsys, "evaluate", str(tmp_path / "bases"), "--data", str(path))
        assert code == 1 and text in line, line


@pytest.mark.parametrize(
    ("command", "kind", "options", "code", "text"),
    [
        ("generate", "masked bytes", ["--prompt", "x"], 1, "config.is_causal is False"),
        ("generate", "bytes", ["--prompt", ""], 2, "the prompt is empty"),
        ("generate", "bases", ["--prompt", " \n"], 1, "the prompt has no bases"),
        ("generate", "bytes", ["--prompt-file", "none"], 1, "No such file or directory: 'none'"),
        ("generate", "bytes", ["--prompt-file", "."], 1, "Is a directory: '.'"),
        ("generate", "bytes", ["--prompt-file", "empty"], 2, "the prompt is empty"),
        ("generate", "bases", ["--prompt-file", "two.fa"], 1, "--prompt-file two.fa holds 2 records; expected one"),
        ("generate", "bytes", [], 2, "one of the arguments --prompt --prompt-file is required"),
        ("generate", "bytes", ["--prompt", "x", "--prompt-file", "y"], 2, "not allowed with argument --prompt"),
        ("generate", "bytes", ["--prompt", "x", "--temperature", "-1"], 2, "temperature is -1.0; expected a number from 0"),
        ("generate", "bytes", ["--prompt", "x", "--top-p", "2"], 2, "top_p is 2.0; expected a number in (0, 1]"),
        ("generate", "bytes", ["--prompt", "x", "--top-k", "0"], 2, "argument --top-k: '0' is not a size"),
        ("generate", "bytes", ["--prompt", "x", "--max-new-tokens", "0"], 2, "argument --max-new-tokens: '0' is not a size"),
        ("generate", "bytes", ["--prompt", "x", "--stop", ""], 2, "--stop has no bytes"),
        ("generate", "bases", ["--prompt", "A", "--stop", " "], 2, "--stop has no bases"),
        ("evaluate", "words", DATA, 1, "vocab_size is 300; expected 256 (bytes) or 5 (bases A, C, G, T, N)"),
        ("evaluate", "masked bytes", DATA, 1, "only bases (vocab_size=5) have one that hides, N"),
        ("evaluate", "masked bases", [*FASTA_DATA, "--by-position"], 2, "--by-position is given, and this model sees both sides"),
        ("evaluate", "bytes", [*DATA, "--backend", "flash9"], 2, "backend is 'flash9'; expected one of auto"),
        ("evaluate", "bytes", [*DATA, "--backend", "flash4"], 1, "flash4"),
        ("evaluate", "bytes", [*DATA, "--device", "gpu"], 2, "--device is 'gpu', which torch cannot use here"),
        ("evaluate", "bytes", [*DATA, "--device", "meta"], 2, "--device is 'meta'; expected cpu, cuda or cuda:<index>"),
        ("evaluate", "bytes", [*DATA, "--context", "0"], 2, "argument --context: '0' is not a size"),
        ("evaluate", "bytes", [*DATA, "--dtype", "int8"], 2, "argument --dtype: invalid choice: 'int8'"),
        ("evaluate", "bytes", [*DATA, "--stride", "257"], 1, "stride is 257; expected at most context = 256"),
    ],
)
def test_what_cannot_be_done_is_refused_in_one_line(
    command: str, kind: str, options: list[str], code: int, text: str, tmp_path: Path, data: Path, capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    saved(kind, tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "two.fa").write_bytes(b">a\nACGT\n>b\nACGT\n")
    found, line = refused(capsys, command, "model", "--device", "cpu", *options)
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
        code, line = refused(capsys, "evaluate", str(tmp_path / name), "--data", str(data / "b.txt"))
        assert code == 1 and text in line, line


def test_a_model_of_nan_is_refused(tmp_path: Path, data: Path, capsys: Capture) -> None:
    model = saved("bytes", tmp_path / "model")
    with torch.no_grad():
        model.output_weight.fill_(torch.nan)
    model.save_pretrained(tmp_path / "model")
    code, line = refused(capsys, "evaluate", str(tmp_path / "model"), "--data", str(data / "b.txt"))
    assert code == 1 and "the loss is nan" in line
