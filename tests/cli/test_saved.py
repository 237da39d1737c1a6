"""``generate`` and ``evaluate`` of a saved model: what they print of bytes and bases, and everything that they refuse."""

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


def test_a_stop_may_be_bytes_that_are_no_text_and_runs_without_a_seed_differ(tmp_path: Path, capsys: Capture) -> None:
    """As --prompt may; the shell's bytes come as surrogates."""
    saved("bytes", tmp_path / "model")

    def run(*more: str) -> str:
        assert main(["generate", str(tmp_path / "model"), "--prompt", "x", "--max-new-tokens", "400", "--device", "cpu", *more]) == 0
        return capsys.readouterr().out

    whole, text = run("--seed", "1"), run("--seed", "1", "--stop", b"\xff".decode(errors="surrogateescape"))
    assert whole.startswith(text) and text.endswith("\ufffd") and len(text) < len(whole)
    assert len({whole, run(), run()}) == 3


@pytest.mark.parametrize(
    ("encoding", "raw", "written"),
    [
        ("utf-8", "aé→b".encode() + b"\xffc\xe2", "|a|a|aé|aé|aé|aé→|aé→b|aé→b\ufffd|aé→b\ufffdc|aé→b\ufffdc\ufffd"),
        # output that cannot hold a character replaces it
        ("ascii", "a→b".encode(), "|a|a|a|a?|a?b"),
    ],
)
def test_characters_are_written_when_they_are_whole(
    encoding: str, raw: bytes, written: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each byte is asked for only once the text before it is out; a character of three bytes waits for its last."""
    saved("bytes", tmp_path / "model")
    buffer, seen = io.BytesIO(), []

    def tokens(*arguments: object, **options: object) -> object:
        for value in raw:
            seen.append(buffer.getvalue().decode())
            yield torch.tensor([[value]])

    monkeypatch.setattr("dilated_attention.models.generate_stream", tokens)
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(buffer, encoding=encoding))
    assert main(["generate", str(tmp_path / "model"), "--prompt", "x", "--device", "cpu"]) == 0
    assert "|".join([*seen, buffer.getvalue().decode()]) == written


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
    (data / "y.fa").write_bytes(b">\nACGTA\n")
    for path, files, counts in ((data / "x.fa.gz", ["x.fa.gz"], (2, 18 + 480)), (data, ["x.fa.gz", "y.fa"], (3, 18 + 480 + 5))):
        records = [bases for file in files for _, bases in read_fasta(data / file)]
        found = evaluate(model, records, context=50)
        assert main(["evaluate", str(tmp_path / "model"), "--data", str(path), "--context", "50", "--json"]) == 0
        answer = json.loads(capsys.readouterr().out)
        assert answer["bits_per_base"] == pytest.approx(found.bits, abs=1e-6)
        assert (answer["records"], answer["bases"], answer["scored"]) == (*counts, found.scored)
        assert answer["objective"] == kind.partition(" ")[0].replace("bases", "causal")
    if kind == "bases":
        # N is no target, nor is the first base of a record
        assert found.scored == 18 + 480 + 5 - 2 - 3


@pytest.mark.parametrize(
    ("command", "kind", "options", "code", "text"),
    [
        ("generate", "masked bytes", ["--prompt", "x"], 1, "config.is_causal is False"),
        ("generate", "bytes", ["--prompt", ""], 2, "the prompt is empty"),
        ("generate", "bytes", ["--prompt-file", "none"], 1, "No such file or directory: 'none'"),
        ("generate", "bases", ["--prompt-file", "two.fa"], 1, "--prompt-file two.fa holds 2 records; expected one"),
        ("generate", "bytes", ["--prompt", "x", "--top-p", "2"], 2, "top_p is 2.0; expected a number in (0, 1]"),
        ("generate", "bytes", ["--prompt", "x", "--stop", ""], 2, "--stop has no bytes"),
        # data of another kind, or that cannot be scored
        # before a model is loaded
        ("evaluate", "nothing", ["--data", "none"], 1, "none does not exist; expected a file or a folder"),
        ("evaluate", "bytes", ["--data", "folder"], 1, "folder: no file of it has 2 bytes"),
        ("evaluate", "bases", ["--data", "texts"], 1, "holds no FASTA file, and the model's tokens are bases; expected names in .fa"),
        ("evaluate", "bases", ["--data", "unknown.fa"], 1, "the longest record has 4 tokens, and none of all is scored"),
        ("evaluate", "bytes", [*DATA, "--context", "4", "--stride", "5"], 2, "--stride is 5; expected at most --context, 4"),
        ("evaluate", "words", DATA, 1, "vocab_size is 300; expected 256 (bytes) or 5 (bases A, C, G, T, N)"),
        ("evaluate", "masked bases", [*FASTA_DATA, "--by-position"], 2, "--by-position is given, and this model sees both sides"),
        ("evaluate", "bytes", [*DATA, "--backend", "flash9"], 2, "backend is 'flash9'; expected one of auto"),
        ("evaluate", "bytes", [*DATA, "--device", "gpu"], 2, "--device is 'gpu', which torch cannot use here"),
        ("evaluate", "nan", DATA, 1, "the loss is nan"),
        # folders without a model
        ("evaluate", "an empty folder", DATA, 1, "holds no model.safetensors, nor does checkpoint/ in it"),
        ("evaluate", "half a file", DATA, 1, "cut off or of another format"),
    ],
)
def test_what_cannot_be_done_is_refused_in_one_line(
    command: str, kind: str, options: list[str], code: int, text: str, tmp_path: Path, data: Path, capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "texts").mkdir()
    files = {"folder/empty": b"", "texts/a.txt": b"ACGT", "unknown.fa": b">\nNNNN", "two.fa": b">a\nACGT\n>b\nA\n"}
    for name, held in files.items():
        (tmp_path / name).write_bytes(held)
    model, weights = tmp_path / "model", tmp_path / "model" / "model.safetensors"
    if kind == "an empty folder":
        model.mkdir()
    elif kind != "nothing":
        made = saved(kind if kind in KINDS else "bytes", model)
        if kind == "half a file":
            weights.write_bytes(weights.read_bytes()[:-100])
        if kind == "nan":
            made.output_weight.data.fill_(torch.nan)
            made.save_pretrained(model)
    try:
        found = main([command, "model", "--device", "cpu", *options])
    except SystemExit as error:
        found = int(error.code or 0)
    captured = capsys.readouterr()
    lines = captured.err.splitlines()
    # nothing is printed, and there is no traceback
    assert (found, captured.out, len(lines)) == (code, "", 1 if code == 1 else 2) and text in lines[-1], captured.err
