"""The train-infer suite: one set of parameters for all kinds of attention, right first, and figures that follow from the times."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dilated_attention.bench import Results, Row
from dilated_attention.bench.models import language, slide_encoder
from dilated_attention.bench.models.language import KINDS, Shape, check, family
from dilated_attention.bench.report.rows import machine
from dilated_attention.bench.suites import SUITES
from dilated_attention.cli import main
from dilated_attention.models import KVCache

CPU = torch.device("cpu")
NARROW = {"vocab_size": 64, "num_layers": 2, "num_heads": 2, "embed_dim": 32}
SMALL = Shape("gpt2-124m", NARROW, True)
HERE: dict[str, Any] = {"device": CPU, "dtype": torch.float32, "seconds": 0.001}


@pytest.fixture(autouse=True)
def forgotten() -> Any:
    """What one test makes wrong is not remembered by the next."""
    yield
    language.check.cache_clear()


def test_kinds_share_their_parameters_and_differ_in_attention() -> None:
    models = family(SMALL, KINDS, CPU, torch.float32)
    assert [model.config.kind for model in models.values()] == list(KINDS)
    for model in models.values():
        assert all(a is b for a, b in zip(model.parameters(), models["dense"].parameters(), strict=True))
    tokens = torch.randint(64, (1, 1200), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        dense, dilated, window = (models[kind](tokens) for kind in KINDS)
    # within the window and the first segment all see the same keys
    assert torch.allclose(window[:, :256], dense[:, :256], atol=1e-4)
    assert not torch.allclose(window[:, 300:], dense[:, 300:], atol=1e-3)
    assert not torch.allclose(dilated[:, 300:], dense[:, 300:], atol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_two_layers_are_compared_with_float64(kind: str) -> None:
    errors = check("gpt2-124m", 32, True, kind, CPU, torch.float32)
    assert set(errors) == {"logits", "decoded"}
    assert all(0 < error < 1e-4 for error in errors.values())


@pytest.mark.slow
def test_the_command_generates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["bench", "train-infer", "--output", str(tmp_path), "--models", "gpt2-124m", "llama-7b", "--contexts", "64", "96"]
    command += ["--batches", "1", "2", "--seconds", "0.001", "--quiet"]
    assert main(command) == 0
    text = capsys.readouterr().out
    before = (tmp_path / "train-infer.json").read_text()
    rows = Results.load(tmp_path / "train-infer.json").rows
    assert not any(row.note for row in rows)
    written = [row for row in rows if row.case["task"] == "decode"]
    assert len(written) == len([row for row in rows if row.case["task"] == "prefill"]) == 2 * 3 * 4
    for row in written:
        assert row.values["tokens_per_s"] == pytest.approx(1000 * row.case["B"] / row.values["ms"], rel=1e-3)
    cached = {
        (row.name, row.case["N"], row.case["B"]): row.values["cache_bytes"] for row in written if row.case["model"].startswith("gpt2")
    }
    # 2 layers of keys and values of 128 floats, for the prompt and what comes behind it
    assert cached["dense", 64, 2] == 2 * 2 * 128 * 4 * 2 * (64 + 8)
    assert "llama-7b cut to 2 × 128: writing after a prompt" in text
    assert "block_sparse: LocalWindow(block_size=(64, 64), window=(255, 0))" in text and "dilated: segments/rates 256/1, 1,024/4" in text
    assert main(command) == 0
    assert (tmp_path / "train-infer.json").read_text() == before


def test_a_model_that_decodes_wrong_has_no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    class Shifted(language.Stepper):
        def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
            return super().__call__(tokens).roll(1, -1)

    monkeypatch.setattr(language, "Stepper", Shifted)
    rows = language.generate(SMALL, ("dense", "block_sparse"), 16, 1, new_tokens=1, **HERE)
    assert all(row.note.startswith("wrong: decoded off by") and not row.values for row in rows) and len(rows) == 2


def test_decoding_starts_in_a_cache_of_random_numbers() -> None:
    rows = language.generate(SMALL, ("dense", "dilated-1M", "global-local"), 512, 2, new_tokens=2, is_random=True, **HERE)
    assert [(row.name, row.case["task"], row.note) for row in rows] == [(x, "step", "") for x in ("dense", "dilated-1M", "global-local")]
    for row in rows:
        assert row.values["tokens_per_s"] == pytest.approx(2000 / row.values["ms"]) and set(row.errors) == {"logits", "decoded"}
    # 2 layers of keys and values of 32 floats at 512 positions
    assert rows[0].values["cache_bytes"] == 2 * 2 * 2 * 512 * 32 * 4


def test_the_slide_encoder_takes_a_step() -> None:
    rows = list(slide_encoder.measure(20, None, 10, {"num_layers": 1}, CPU, 0.01))
    assert [row.name for row in rows] == [f"ours, {label}" for label in slide_encoder.VARIANTS["cpu"]]
    # float32 weights and gradients of a layer of 768
    assert all(not row.note and row.values["peak_bytes"] > 2 * 4 * 12 * 768**2 for row in rows)
    with pytest.raises(ValueError, match=r"there is no gigapath/slide_encoder.py in it"):
        list(slide_encoder.measure(20, Path("no/such"), 10, {}, CPU, 0.01))


@pytest.mark.slow
def test_what_does_not_fit_is_told_and_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(config: Any, *arguments: Any, **options: Any) -> KVCache:
        # not where it is compared with float64
        if config.kind == "dilated" and config.vocab_size == NARROW["vocab_size"]:
            raise torch.OutOfMemoryError("no room for the cache")
        return KVCache(config, *arguments, **options)

    monkeypatch.setattr(language, "KVCache", full)
    rows = language.generate(SMALL, KINDS, 16, 2, new_tokens=1, **HERE)
    (failed,) = (row for row in rows if row.note)
    assert (failed.name, failed.case["task"]) == ("dilated", "prefill")
    assert failed.note == "out of memory, with what the other kinds hold"
    assert {row.name for row in rows if row.values} == {"dense", "block_sparse"}

    def no_room(shape: Shape, *arguments: Any, **options: Any) -> None:
        raise torch.OutOfMemoryError("not even the weights")

    monkeypatch.setattr(language, "family", no_room)
    notes = [row.note for row in language.generate(SMALL, KINDS, 16, 1, **HERE)]
    assert notes == ["out of memory"] * 3


def test_cut_models_say_so() -> None:
    assert Shape("llama-7b").name == "llama-7b"
    assert Shape("llama-7b", {"num_layers": 8}).name == "llama-7b cut to 8 × 4096"
    assert SMALL.name == "gpt2-124m cut to 2 × 32"


def synthetic() -> Results:
    """What an H200 could leave."""
    here = machine(CPU)
    rows = []
    for model, contexts in (("gpt2-124m", (1024, 4096, 16384, 65536, 131072)), ("llama-7b", (2048, 8192, 32768))):
        for i, kind in enumerate(KINDS):
            for n in contexts:
                rate = 1e5 / (1 + n / (4096 if kind == "dense" else 1e6)) * (1 + 0.1 * i)
                case = {"model": model, "N": n, "dtype": "bfloat16", "attention": f"like {kind}"}
                for batch in (1, 8):
                    if (model, kind, n) == ("llama-7b", "dense", 32768):
                        rows.append(Row(name=kind, case=case | {"task": "prefill", "B": batch}, note="out of memory"))
                        continue
                    for task in ("prefill", "decode"):
                        rates = {
                            "ms": 5.0,
                            "low_ms": 4.9,
                            "high_ms": 5.1,
                            "tokens_per_s": rate * batch / (1 if task == "prefill" else 100),
                            "cache_bytes": n * batch * 2**18,
                        }
                        rows.append(Row(name=kind, case=case | {"task": task, "B": batch}, values=rates))
    failed = Row(name="all", case={"group": "generate llama-7b N=65536 B=1 bfloat16"}, note="out of memory")
    return Results("train-infer", here, {}, {"all": rows, "failed": [failed]})


@pytest.mark.slow
def test_results_of_a_gpu_become_tables() -> None:
    suite, results = SUITES["train-infer"](), synthetic()
    tables = {table.title: table for table in suite.tables(results)}
    gpt = tables["gpt2-124m: reading a prompt"]
    lines = {(row[0], row[1]): dict(zip(gpt.columns, row, strict=True)) for row in gpt.rows}
    # a rate over dense: more is better
    assert float(lines["dilated", "1 × 131,072"]["×"]) > 10 and "8 × 131,072" in {place for _, place in lines}
    assert "like dilated" in gpt.caption
    assert ["dense", "1 × 32,768", "–", "–", "–", "–", "out of memory"] in tables["llama-7b: reading a prompt"].rows
    assert tables["Groups that failed"].rows == [("generate llama-7b N=65536 B=1 bfloat16", "out of memory")]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_one_gpu(tmp_path: Path) -> None:
    command = ["bench", "train-infer", "--output", str(tmp_path), "--layers", "2", "--contexts", "2048", "--seconds", "0.1", "--quiet"]
    assert main(command) == 0
    rows = Results.load(tmp_path / "train-infer.json").rows
    assert not [row for row in rows if row.note]
    assert {row.case["model"] for row in rows} == {"gpt2-124m cut to 2 × 768", "llama-7b cut to 2 × 4096"}
