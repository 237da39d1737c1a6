"""examples/train_genome.py: what it reads, masks, counts and optimises, each against its definition, and the whole in small."""

from __future__ import annotations

import gzip
import importlib
import json
import math
import random
import re
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from dilated_attention.models import LongNetConfig, LongNetLM, read_fasta
from tests.helpers.scripts import run_script
from tests.scripts.test_docs import blocks

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SMALL = ["--context", "512", "--layers", "2", "--embed-dim", "32", "--heads", "2", "--first-segment", "128", "--kmer", "5"]
# the machine's FLOP/s are measured in test_training_ends_below_markov_models[masked]
PEAK = ["--peak-tflops", "1"]
SMALL += ["--evaluations", "1", "--evaluate-share", "2", "--markov-order", "6"]


@pytest.fixture
def genome(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return example("_genome", monkeypatch)


def example(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module(name)


def symbols_of(count: int, seed: int = 0, unknown: float = 0.02) -> torch.Tensor:
    """Bases with repeats, some on the other strand, and some N."""
    generator = random.Random(seed)
    text = [generator.randrange(4) for _ in range(count // 3)]
    text += [3 - base for base in reversed(text)] + text
    text += [generator.randrange(4) for _ in range(count - len(text))]
    return torch.tensor([4 if generator.random() < unknown else base for base in text])


def test_a_fasta_file_is_read_plain_or_packed(genome: ModuleType, tmp_path: Path) -> None:
    text = b">short plasmid\nACGT\n>long one\nACgtN\nrYAC\n\nGGT\n"
    (tmp_path / "plain.fa").write_bytes(text)
    (tmp_path / "packed.fa.gz").write_bytes(gzip.compress(text))
    for file in ("plain.fa", "packed.fa.gz"):
        read = genome.read_genome(tmp_path / file)
        # both records, with an N between them
        assert (read.name, read.symbols.tolist()) == (f"2 records of {file}", [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 4, 4, 0, 1, 2, 2, 3])
    (tmp_path / "one.fa").write_bytes(b">alone here\nACG")
    assert genome.read_genome(tmp_path / "one.fa").name == "alone here"
    (tmp_path / "other").write_bytes(b"ACGT")
    with pytest.raises(ValueError, match="holds no FASTA record"):
        genome.read_genome(tmp_path / "other")
    (tmp_path / "empty").write_bytes(b">nothing\n\n")
    with pytest.raises(ValueError, match="has records and no base in them"):
        genome.read_genome(tmp_path / "empty")
    with pytest.raises(ValueError, match="leave it out and pip install pyrodigal"):
        genome.find_fasta(tmp_path / "none")


def test_records_that_are_named_are_held_out_and_written(genome: ModuleType, tmp_path: Path) -> None:
    contigs = {"1": "AACC", "chr2 of a>t": "GGTTG", "2": "CNATTT"}
    (tmp_path / "x.fa").write_text("".join(f">{name}\n{bases}\n" for name, bases in contigs.items()))
    for held_out, text, cut, written in (
        (["chr2"], "AACCNCNATTTNGGTTG", 12, ">chr2 of a>t\nGGTTG\n"),
        (["2", "1"], "GGTTGNAACCNCNATTT", 6, ">1\nAACC\n>2\nCNATTT\n"),
        (["chr2 of a>t"], "AACCNCNATTTNGGTTG", 12, ">chr2 of a>t\nGGTTG\n"),
        ([0.5], "AACCNGGTTGNCNATTT", 8, ">chr2:4-5\nTG\n>2\nCNATTT\n"),
    ):
        read = genome.read_genome(tmp_path / "x.fa", held_out)
        assert (genome.BASES.decode(read.symbols), read.cut) == (text, cut)
        genome.write_held_out(read, tmp_path / "out.fa")
        assert (tmp_path / "out.fa").read_text() == written
    for wrong, expected in (
        (["chr3"], r"--held-out chr3 is no record of .*x\.fa; expected 1, chr2, 2, or a share above 0 and at most 0\.9"),
        ([0.5, "1"], "--held-out 0.5 1; expected one share, or names of records"),
    ):
        with pytest.raises(ValueError, match=expected):
            genome.read_genome(tmp_path / "x.fa", wrong)


def test_the_chromosome_of_the_wheel(genome: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    with monkeypatch.context() as patch:
        patch.setattr(genome.importlib.metadata, "files", missing)
        with pytest.raises(ValueError, match="whose wheel holds it, or give --fasta FILE"):
            genome.find_fasta(None)
    pytest.importorskip("pyrodigal")
    read = genome.read_genome(genome.find_fasta(None))
    assert read.symbols.bincount(minlength=5).tolist() == [571_277, 661_407, 657_251, 573_731, 0]


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("length", [64, 256])
def test_every_held_out_target_is_scored_once_and_none_is_shown(genome: ModuleType, is_causal: bool, length: int) -> None:
    # no repeats: a window fits at one place only
    symbols = torch.randint(5, (600,), generator=torch.Generator().manual_seed(0))
    chromosome = genome.Chromosome(symbols=symbols, cut=500, is_causal=is_causal, k=1, both_strands=True)
    places: list[int] = []
    for inputs, targets in chromosome.held_out(length):
        assert len(inputs) == len(targets) == length
        # where the window lies: the one place whose symbols the unmasked inputs are
        fits = [
            s for s in range(len(symbols) - length + 1) if bool(((inputs == symbols[s : s + length]) | (inputs == genome.UNKNOWN)).all())
        ]
        assert len(fits) == 1
        scored = (targets != -100).nonzero().flatten()
        here = scored + fits[0] + (1 if is_causal else 0)
        assert torch.equal(targets[scored], symbols[here])
        if not is_causal:
            assert bool((inputs[scored] == genome.UNKNOWN).all())
        places += here.tolist()
    assert sorted(places) == chromosome.scored().nonzero().flatten().tolist()
    assert min(places) >= 500


def test_training_windows(genome: ModuleType) -> None:
    symbols = symbols_of(600)
    text = "".join(map(str, symbols.tolist()))
    other = "".join(map(str, genome.other_strand(symbols[:500]).tolist()))
    generator = torch.Generator().manual_seed(0)
    causal = genome.Chromosome(symbols=symbols, cut=500, is_causal=True, k=1, both_strands=True)
    strands = set()
    for _ in range(20):
        inputs, targets = causal.random_window(64, generator)
        whole = "".join(map(str, [*inputs.tolist(), int(targets[-1]) if targets[-1] >= 0 else 4]))
        assert torch.equal(targets[:-1], genome.targets_of(inputs[1:]))
        assert whole in text[:500] or whole in other
        strands.add(whole in text[:500])
    assert strands == {True, False}
    masked = genome.Chromosome(symbols=symbols, cut=500, is_causal=False, k=1, both_strands=False)
    hidden = []
    for _ in range(20):
        inputs, targets = masked.random_window(64, generator)
        assert "".join(map(str, inputs.where(targets == -100, targets).tolist())) in text[:500]
        hidden.append(float((targets != -100).float().mean()))
    assert 0.1 < sum(hidden) / 20 < 0.2


def brute_force_adaptive(symbols: list[int], scored: list[bool], k: int, both_strands: bool, alpha: float) -> float:
    pairs: Counter[tuple[int, ...]] = Counter()
    contexts: Counter[tuple[int, ...]] = Counter()
    total, count = 0.0, 0
    for t, base in enumerate(symbols):
        window = tuple(symbols[t - k : t + 1]) if t >= k else (4,)
        known = 4 not in window
        if scored[t]:
            n, of = (pairs[window], contexts[window[:-1]]) if known else (0, 0)
            # what the four bases get sums to one
            assert not known or of == sum(pairs[(*window[:-1], x)] for x in range(4))
            total, count = total - math.log2((n + alpha) / (of + 4 * alpha)), count + 1
        if known:
            for event in (window, tuple(3 - x for x in reversed(window)))[: 1 + both_strands]:
                pairs[event] += 1
                contexts[event[:-1]] += 1
        assert base <= 4
    return total / count


@pytest.mark.parametrize("both_strands", [True, False])
def test_adaptive_markov_models_count_what_came_before(monkeypatch: pytest.MonkeyPatch, both_strands: bool) -> None:
    markov = example("_markov", monkeypatch)
    symbols = symbols_of(900)
    scored = (symbols != 4) & (torch.arange(900) >= 500)
    rows = markov.adaptive(symbols, scored, 5, both_strands)
    for k, row in enumerate(rows):
        expected = min(brute_force_adaptive(symbols.tolist(), scored.tolist(), k, both_strands, a) for a in markov.ALPHAS)
        assert row.k == k
        assert row.smoothed == pytest.approx(expected, abs=1e-12)
    # from 1/4 as the lower model, order 0 interpolated is order 0 smoothed with α = c/4
    order_0 = [brute_force_adaptive(symbols.tolist(), scored.tolist(), 0, both_strands, c / 4) for c in markov.WEIGHTS]
    assert rows[0].interpolated == pytest.approx(min(order_0), abs=1e-12)
    # every second base follows from its repeat
    assert rows[5].interpolated < rows[1].interpolated - 0.1


@pytest.mark.parametrize("is_causal", [True, False])
def test_no_window_is_of_little_but_unknown_bases(genome: ModuleType, is_causal: bool) -> None:
    """One is drawn in place of each that has less than half of the training part's share; others are as they were."""
    unknown, bases = torch.full((400,), 4), torch.randint(4, (100,), generator=torch.Generator().manual_seed(0))
    symbols = torch.cat([unknown, bases, unknown, bases, unknown, bases[:20], unknown])
    chromosome = genome.Chromosome(symbols=symbols, cut=1400, is_causal=is_causal, k=1, both_strands=True)
    for seed in range(100):
        inputs, targets = chromosome.random_window(64, torch.Generator().manual_seed(seed))
        assert int((inputs.where(targets == -100, targets) != 4).sum()) >= 64 * 200 / 1400 / 2 - 1
        assert bool((targets != -100).any())
    # the curve's windows are every fourth of those that have a target
    for share in (1, 4):
        windows = chromosome.held_out(16, share)
        assert windows and all(bool((targets != -100).any()) for _, targets in windows)


def test_two_sided_markov_models_count_the_training_part(monkeypatch: pytest.MonkeyPatch) -> None:
    markov = example("_markov", monkeypatch)
    symbols = symbols_of(900)
    scored = (symbols != 4) & (torch.arange(900) >= 500) & (torch.arange(900) % 7 == 0)
    rows = markov.two_sided(symbols, scored, 500, 3, True)
    values = symbols.tolist()
    for k, row in enumerate(rows):
        seen: Counter[tuple[tuple[int, ...], int]] = Counter()
        for t in range(k, 500 - k):
            window = tuple(values[t - k : t + k + 1])
            if 4 not in window:
                for event in (window, tuple(3 - x for x in reversed(window))):
                    seen[(event[:k] + event[k + 1 :], event[k])] += 1
        bits = []
        for alpha in markov.ALPHAS:
            losses = []
            for t in scored.nonzero().flatten().tolist():
                window = tuple(values[t - k : t + k + 1])
                around = window[:k] + window[k + 1 :]
                fits = len(window) == 2 * k + 1 and 4 not in window
                n, of = (seen[(around, values[t])], sum(seen[(around, x)] for x in range(4))) if fits else (0, 0)
                losses.append(-math.log2((n + alpha) / (of + 4 * alpha)))
            bits.append(sum(losses) / len(losses))
        assert row.smoothed == pytest.approx(min(bits), abs=1e-12)


def test_muon_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to the bfloat16 of torch's own products; the batched ones are float32 here."""
    muon = example("_muon", monkeypatch)
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(shape, generator=generator) for shape in ((16, 48), (48, 16), (16, 48), (32, 32))]
    results = []
    for make in (lambda p: muon.Muon(p, lr=0.1), lambda p: torch.optim.Muon(p, lr=0.1, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")):
        parameters = [torch.nn.Parameter(x.clone()) for x in start]
        optimizer = make(parameters)
        noise = torch.Generator().manual_seed(1)
        for _ in range(3):
            for p in parameters:
                p.grad = torch.randn(p.shape, generator=noise)
            optimizer.step()
        results.append(parameters)
    for ours, theirs, first in zip(*results, start, strict=True):
        moved = (theirs - first).norm()
        assert moved > 1.0
        assert (ours - theirs).norm() < 0.02 * moved


def test_flops_are_those_of_the_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """A third of a step's is the forward, as torch counts it op by op."""
    costs = example("recipe.costs", monkeypatch)
    for is_causal in (True, False):
        config = LongNetConfig(
            vocab_size=5, embed_dim=32, num_layers=2, num_heads=2, segment_lengths=(64, 256), dilation_rates=(1, 4),
            is_causal=is_causal, tie_embeddings=False, kmer=2,
        )  # fmt: skip
        model = LongNetLM(config)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(model.encode("GATTACA" * 50)[:, :300])
        assert costs.flops_per_token(model, 300) * 300 == pytest.approx(3 * counter.get_total_flops(), rel=1e-12)


def write_fasta(folder: Path) -> Path:
    """A motif of 100 bases over and over: easy for five bases of context, hard for two."""
    generator = random.Random(3)
    motif = "".join(generator.choice("ACGT") for _ in range(100))
    path = folder / "repeat.fa"
    path.write_text(">repeats\n" + motif * 75)
    return path


@pytest.fixture(scope="module")
def fasta(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_fasta(tmp_path_factory.mktemp("data"))


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """The script in this process, which has torch already: (exit code, stdout, stderr)."""
    script = example("train_genome", monkeypatch)

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["train_genome.py", *arguments])
        return (script.main(), *capsys.readouterr())

    return call


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["causal", "masked"])
def test_training_ends_below_markov_models(
    genome: ModuleType, here: Callable[..., tuple[int, str, str]], fasta: Path, tmp_path: Path, objective: str
) -> None:
    options = [
        "--objective",
        objective,
        "--steps",
        "40",
        "--short-context",
        "256",
        "--short-share",
        "0.4",
        "--no-both-strands",
        "--expect-below-markov",
        "--out",
        str(tmp_path),
    ]
    code, out, error = here("--fasta", str(fasta), *SMALL, *options, *(PEAK if objective == "causal" else []))
    assert code == 0, out + error
    last = out.splitlines()[-1]
    orders = "0, 1, 2" if objective == "causal" else "0, 1"
    assert re.match(rf"done: held-out \d\.\d{{4}} bits per base, below the Markov models of orders {orders}", last), last
    log = json.loads((tmp_path / "genome.json").read_text())
    assert [length for length, _, _ in log["steps"]] == [256] * 16 + [512] * 24
    assert log["held out bits per base"] == log["evaluations"][-1][2] < log["markov"][1]["smoothed"]
    assert log["speed"]["bases/s"] > 0 and log["speed"]["peak memory GiB"] > 0
    assert (tmp_path / "genome.png").stat().st_size > 5000
    model = LongNetLM.from_pretrained(tmp_path / "checkpoint")
    assert model.config.is_causal is (objective == "causal")
    # and the checkpoint is the model that was measured
    symbols = genome.read_genome(fasta).symbols
    chromosome = genome.Chromosome(
        symbols=symbols, cut=round(len(symbols) * 0.85), is_causal=model.config.is_causal, k=5, both_strands=True
    )
    total, count = 0.0, 0
    with torch.no_grad():
        for inputs, targets in chromosome.held_out(512):
            scored = int((targets != -100).sum())
            total, count = total + float(model(inputs[None], targets=targets[None])) * scored, count + scored
    assert total / count / math.log(2) == pytest.approx(log["held out bits per base"], abs=1e-5)


@pytest.mark.slow
def test_two_processes_that_share_a_sequence_train_as_one_does(
    here: Callable[..., tuple[int, str, str]], fasta: Path, tmp_path: Path
) -> None:
    """Bits of each step and of the held-out part, parameters and sequence shared: Muon's products are float32 on a CPU, so they agree."""
    common = ["--fasta", str(fasta), *SMALL, *PEAK, "--checkpoint", "--steps", "6", "--short-share", "0", "--lr", "1e-3"]
    shared = ["--context-parallel", "2", "--fsdp", "--layout", "zigzag", "--out", str(tmp_path / "shared")]
    code, out, error = here(*common, "--out", str(tmp_path / "alone"))
    # too few steps to learn much, and the report says so
    assert code == 0 and "not below the Markov models" in out.splitlines()[-1], error
    result = run_script(EXAMPLES / "train_genome.py", *common, *shared, processes=2, quick=True)
    assert result.returncode == 0 and "not below the Markov models" in result.stdout.splitlines()[-1], result.stderr
    losses = []
    for kind in ("alone", "shared"):
        log = json.loads((tmp_path / kind / "genome.json").read_text())
        losses.append([*(bits for _, _, bits in log["steps"]), log["held out bits per base"]])
    assert losses[1][0] == pytest.approx(losses[0][0], abs=1e-5, rel=0)
    assert losses[1] == pytest.approx(losses[0], abs=1e-4, rel=0)
    assert losses[0][5] < losses[0][0] - 0.02


@pytest.mark.slow
def test_a_stopped_run_goes_on(here: Callable[..., tuple[int, str, str]], fasta: Path, tmp_path: Path) -> None:
    """With Muon's momentum, k-mers and windows of two lengths: to the bits of a run that was not stopped."""
    lengths = ["--short-context", "256", "--short-share", "0.5"]
    common = ["--fasta", str(fasta), *SMALL, *PEAK, *lengths, "--dropout", "0.1", "--save-minutes", "1e-9"]
    assert here(*common, "--steps", "12", "--out", str(tmp_path / "whole"))[0] == 0
    run = tmp_path / "stopped"
    shutil.copytree(tmp_path / "whole", run)
    for name in ("checkpoints/step-00000012", "checkpoint"):
        shutil.rmtree(run / name)
    code, out, error = here("--resume", str(run))
    assert code == 0 and "step-00000011 after step 11" in out, error
    (record,) = read_fasta(run / "held_out.fa")
    assert record[0] == "repeats:6376-7500" and len(record[1]) == 1125
    whole, stopped = (json.loads((tmp_path / name / "genome.json").read_text()) for name in ("whole", "stopped"))
    assert stopped["held out bits per base"] == whole["held out bits per base"]
    assert [bits for _, _, bits in stopped["steps"]] == [bits for _, _, bits in whole["steps"]]


def test_embeddings_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = LongNetConfig(
        vocab_size=5, kmer=3, tie_embeddings=False, embed_dim=8, num_layers=1, num_heads=1, segment_lengths=(256, 1024),
        dilation_rates=(1, 4), is_causal=False,
    )  # fmt: skip
    model = LongNetLM(config).eval()
    model.save_pretrained("runs/mine/checkpoint")
    Path("my.fa.gz").write_bytes(gzip.compress(b">other\nACGT\n>chr21 of a species\n" + b"GATTACANNN" * 13_000))
    (block,) = (block for block in blocks(EXAMPLES.parent / "docs" / "genome.md") if block.language == "python")
    names: dict[str, Any] = {}
    exec(block.code, names)
    assert names["region"].shape == (1000, 8) and names["vector"].shape == (8,)
    # the window begins with a segment, and reads what the whole record has there
    record = dict(read_fasta("my.fa.gz"))["chr21 of a species"]
    window = model.encode(record[120_000 - 16_384 : 121_000 + 16_384])
    with torch.no_grad():
        assert torch.equal(names["region"], model.hidden(window)[0, 16_384:17_384])
    assert record[120_000] == window[0, 16_384] % 5


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--fasta", "{empty}"], "holds no FASTA record"),
        (["--fasta", "{unknown}"], "bases are all unknown; expected some to evaluate"),
        (["--fasta", "{missing}"], "is not a file; give a FASTA file"),
        (["--fasta", "{gaps}"], "of the 85,000 bases to train on 0.5% are known; expected at least 1%"),
        (["--context", "9000"], "6,375 bases to train on, and --context is 9,000"),
        (["--held-out", "0"], "--held-out 0 is no record of"),
        (["--held-out", "repeats"], "0 bases to train on, and --context is 512"),
        (["--kmer", "0"], "got 0; expected a number >= 1"),
        (["--segment-lengths", "64"], "--segment-lengths and --dilation-rates belong together"),
        (["--dropout", "2"], "got 2; expected a number >= 0 and <= 1"),
    ],
)
def test_settings_are_refused(
    here: Callable[..., tuple[int, str, str]],
    fasta: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    expected: str,
) -> None:
    (tmp_path / "empty").write_text("")
    (tmp_path / "unknown").write_text(">a\n" + "ACGT" * 1500 + "N" * 1500)
    (tmp_path / "gaps").write_text(">a\n" + "ACGTA" * 85 + "N" * 84_575 + "ACGTA" * 3000)
    words = [word.format(**{name: tmp_path / name for name in ("empty", "unknown", "gaps", "missing")}) for word in flags]
    with pytest.raises(SystemExit) as stop:
        here("--fasta", str(fasta), *SMALL, "--out", str(tmp_path / "run"), *words)
    assert stop.value.code == 2
    assert expected in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
