"""examples/train_genome.py: what it reads, masks, counts and optimises, each against its definition, and the whole in small."""

import gzip
import json
import math
import random
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from dilated_attention.models import BASES, LongNetConfig, LongNetLM, other_strand, read_fasta
from tests.helpers.scripts import run_script
from tests.scripts.test_docs import blocks

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SMALL = ["--context", "512", "--layers", "2", "--embed-dim", "32", "--heads", "2", "--first-segment", "128", "--kmer", "5"]
Part = Callable[[str], Any]
# the machine's FLOP/s are measured in test_training_ends_below_markov_models[masked]
PEAK = ["--peak-tflops", "1"]
SMALL += ["--evaluations", "1", "--evaluate-share", "2", "--markov-order", "6"]


def symbols_of(count: int) -> torch.Tensor:
    """Bases with repeats, some on the other strand, and some N."""
    draw = torch.Generator().manual_seed(0)
    text = torch.randint(4, (count // 3,), generator=draw)
    symbols = torch.cat([text, other_strand(text), text])
    return symbols.where(torch.rand(len(symbols), generator=draw) > 0.02, 4)


def test_records_are_read_held_out_and_written(part: Part, tmp_path: Path) -> None:
    genome = part("_genome")
    contigs = {"1": "AACC", "chr2 of a>t": "GGTTG", "2": "CNATTT"}
    (tmp_path / "x.fa").write_text("".join(f">{name}\n{bases}\n" for name, bases in contigs.items()))
    for held_out, text, cut, written in (
        (["chr2"], "AACCNCNATTTNGGTTG", 12, ">chr2 of a>t\nGGTTG\n"),
        (["2", "1"], "GGTTGNAACCNCNATTT", 6, ">1\nAACC\n>2\nCNATTT\n"),
        ([0.5], "AACCNGGTTGNCNATTT", 8, ">chr2:4-5\nTG\n>2\nCNATTT\n"),
    ):
        read = genome.read_genome(tmp_path / "x.fa", held_out)
        assert (genome.BASES.decode(read.symbols), read.cut, read.name) == (text, cut, "3 records of x.fa")
        genome.write_held_out(read, tmp_path / "out.fa")
        assert (tmp_path / "out.fa").read_text() == written
    (tmp_path / "empty").write_bytes(b">nothing\n\n")
    for call, expected in (
        (
            lambda: genome.read_genome(tmp_path / "x.fa", ["chr3"]),
            r"--held-out chr3 is no record of .*x\.fa; expected 1, chr2, 2, or a share",
        ),
        (lambda: genome.read_genome(tmp_path / "x.fa", [0.5, "1"]), "--held-out 0.5 1; expected one share, or names of records"),
        (lambda: genome.read_genome(tmp_path / "empty"), "has records and no base in them"),
        (lambda: genome.find_fasta(tmp_path / "none"), "leave it out and pip install pyrodigal"),
    ):
        with pytest.raises(ValueError, match=expected):
            call()
    pytest.importorskip("pyrodigal")
    read = genome.read_genome(genome.find_fasta(None))
    assert read.symbols.bincount(minlength=5).tolist() == [571_277, 661_407, 657_251, 573_731, 0]


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("length", [64, 256])
def test_every_held_out_target_is_scored_once_and_none_is_shown(part: Part, is_causal: bool, length: int) -> None:
    genome = part("_genome")
    # no repeats: a window fits at one place only
    symbols = torch.randint(5, (600,), generator=torch.Generator().manual_seed(0))
    chromosome = genome.Chromosome(symbols=symbols, cut=500, is_causal=is_causal, k=1, both_strands=True)
    places: list[int] = []
    for inputs, targets in chromosome.held_out(length):
        assert len(inputs) == len(targets) == length
        # where the window lies: the one place whose symbols the unmasked inputs are
        all_windows = symbols.unfold(0, length, 1)
        (fits,) = ((inputs == all_windows) | (inputs == genome.UNKNOWN)).all(1).nonzero().flatten().tolist()
        scored = (targets != -100).nonzero().flatten()
        here = scored + fits + (1 if is_causal else 0)
        assert torch.equal(targets[scored], symbols[here]) and (is_causal or bool((inputs[scored] == genome.UNKNOWN).all()))
        places += here.tolist()
    assert sorted(places) == chromosome.scored().nonzero().flatten().tolist() and min(places) >= 500


@pytest.mark.parametrize("is_causal", [True, False])
def test_a_window_does_not_cost_what_the_genome_does(part: Part, is_causal: bool) -> None:
    """Each had a mask as long as the genome: minutes, and all memory, of 30 million bases."""
    largest = [0]

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **kwargs or {})
            given, made = ({x.untyped_storage() for x in tree_leaves(some) if isinstance(x, torch.Tensor)} for some in (args, result))
            # a slice of the genome has the genome's storage
            addresses = {storage.data_ptr() for storage in given}
            largest.extend(storage.nbytes() for storage in made if storage.data_ptr() not in addresses)
            return result

    genome = part("_genome")
    windows = genome.Chromosome(symbols=symbols_of(300_000), cut=200_000, is_causal=is_causal, k=1, both_strands=True).held_out(512)
    next(windows)
    with Watch():
        assert len(next(windows)[0]) == 512
    assert 512 <= max(largest) <= 8 * 513


@pytest.mark.parametrize(("is_causal", "both_strands"), [(True, True), (True, False), (False, False)])
def test_training_windows(part: Part, is_causal: bool, both_strands: bool) -> None:
    """Of both strands where that is asked for, 15 % hidden, and none of little but unknown bases."""
    genome = part("_genome")
    symbols = symbols_of(600)
    symbols[200:320] = 4
    chromosome = genome.Chromosome(symbols=symbols, cut=500, is_causal=is_causal, k=1, both_strands=both_strands)
    text, other = ("".join(map(str, x.tolist())) for x in (symbols[:500], other_strand(symbols[:500])))
    strands, hidden, share = set(), [], float((symbols[:500] != 4).double().mean())
    for seed in range(60):
        inputs, targets = chromosome.random_window(64, torch.Generator().manual_seed(seed))
        bases = inputs.where(targets == -100, targets)
        if is_causal:
            assert torch.equal(targets[:-1], genome.targets_of(inputs[1:]))
            bases = torch.cat([inputs, targets[-1:].where(targets[-1:] >= 0, 4)])
        window = "".join(map(str, bases.tolist()))
        assert window in text or window in other
        assert window.count("4") <= len(window) * (1 - share / 2) + 1 and bool((targets != -100).any())
        strands.add(window in text)
        hidden.append(float((targets != -100).float().mean()))
    assert strands == ({True, False} if both_strands else {True})
    assert is_causal or 0.1 < sum(hidden) / 60 < 0.2


def bits(pairs: Iterable[tuple[int, int]], alpha: float) -> float:
    """Mean bits of counts (of a context with its base, of the context)."""
    losses = [-math.log2((n + alpha) / (of + 4 * alpha)) for n, of in pairs]
    return sum(losses) / len(losses)


def brute_force(symbols: list[int], scored: list[int], k: int, both_strands: bool, cut: int | None) -> list[tuple[int, int]]:
    """Counts at the scored positions: of all that came before, or (``cut``) with k bases on each side, of the part before the cut."""
    after = 0 if cut is None else k
    counts: Counter[tuple[Any, ...]] = Counter()
    rows: dict[int, tuple[int, int]] = {}

    def window(t: int) -> tuple[int, ...] | None:
        found = tuple(symbols[t - k : t + after + 1]) if t >= k else ()
        return found if len(found) == k + after + 1 and 4 not in found else None

    def look(t: int) -> None:
        found = window(t)
        context = None if found is None else (found[:k], found[k + 1 :])
        rows[t] = (0, 0) if found is None else (counts[(context, found[k])], sum(counts[(context, x)] for x in range(4)))

    for t in range(len(symbols) if cut is None else cut - after):
        if cut is None:
            look(t)
        if (found := window(t)) is not None:
            for event in (found, tuple(3 - x for x in reversed(found)))[: 1 + both_strands]:
                counts[((event[:k], event[k + 1 :]), event[k])] += 1
    for t in scored if cut is not None else []:
        look(t)
    return [rows[t] for t in scored]


@pytest.mark.parametrize("both_strands", [True, False])
def test_markov_models_count_what_came_before_or_the_training_part(part: Part, both_strands: bool) -> None:
    markov = part("_markov")
    symbols = symbols_of(900)
    scored = (symbols != 4) & (torch.arange(900) >= 500)
    places = scored.nonzero().flatten().tolist()
    before = markov.adaptive(symbols, scored, 5, both_strands)
    around = markov.two_sided(symbols, scored, 500, 3, both_strands)
    for rows, cut in ((before, None), (around, 500)):
        for k, row in enumerate(rows):
            counts = brute_force(symbols.tolist(), places, k, both_strands, cut)
            assert row.k == k and row.smoothed == pytest.approx(min(bits(counts, alpha) for alpha in markov.ALPHAS), abs=1e-12)
    # from 1/4 as the lower model, order 0 interpolated is order 0 smoothed with α = c/4
    order_0 = brute_force(symbols.tolist(), places, 0, both_strands, None)
    assert before[0].interpolated == pytest.approx(min(bits(order_0, c / 4) for c in markov.WEIGHTS), abs=1e-12)
    # bases follow from their repeats
    assert before[5].interpolated < before[1].interpolated - 0.1


def test_muon_is_torchs(part: Part) -> None:
    """Up to the bfloat16 of torch's own products; the batched ones are float32 here."""
    muon, torch_s = part("_muon").Muon, torch.optim.Muon
    draw = torch.Generator().manual_seed(0)
    start, *grads = ([torch.randn(shape, generator=draw) for shape in ((16, 48), (48, 16), (16, 48), (32, 32))] for _ in range(4))
    results = []
    for kind, options in ((muon, {}), (torch_s, {"weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"})):
        parameters = [torch.nn.Parameter(x.clone()) for x in start]
        optimizer = kind(parameters, lr=0.1, **options)
        for step in grads:
            for p, grad in zip(parameters, step, strict=True):
                p.grad = grad.clone()
            optimizer.step()
        results.append(parameters)
    for ours, theirs, first in zip(*results, start, strict=True):
        assert (ours - theirs).norm() < 0.02 * (theirs - first).norm() and (theirs - first).norm() > 1.0


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


@pytest.mark.slow
@pytest.mark.parametrize(("objective", "attention"), [("causal", "longnet"), ("masked", "longnet"), ("masked", "mixed")])
def test_training_ends_below_markov_models(
    part: Part, here: Callable[..., tuple[int, str, str]], fasta: Path, tmp_path: Path, objective: str, attention: str
) -> None:
    words = f"--attention {attention} --objective {objective} --steps 40 --short-context 256 --short-share 0.4".split()
    words += ["--no-both-strands", "--expect-below-markov"]
    genome = part("_genome")
    small = SMALL if attention == "longnet" else [word for word in SMALL if word not in ("--first-segment", "128")]
    code, out, error = here(
        "train_genome.py", "--fasta", str(fasta), *small, *words, "--out", str(tmp_path), *(PEAK if objective == "causal" else [])
    )
    assert code == 0, out + error
    orders = "0, 1, 2" if objective == "causal" else "0, 1"
    assert re.match(rf"done: held-out \d\.\d{{4}} bits per base, below the Markov models of orders {orders}", out.splitlines()[-1])
    log = json.loads((tmp_path / "genome.json").read_text())
    assert [length for length, _, _ in log["steps"]] == [256] * 16 + [512] * 24
    assert log["held out bits per base"] == log["evaluations"][-1][2] < log["markov"][1]["smoothed"]
    assert log["speed"]["bases/s"] > 0 and log["speed"]["peak memory GiB"] > 0
    assert (tmp_path / "genome.png").stat().st_size > 5000
    # and the checkpoint is the model that was measured
    model, read = LongNetLM.from_pretrained(tmp_path / "checkpoint"), genome.read_genome(fasta)
    assert model.config.is_causal is (objective == "causal") and model.config.kind == {"longnet": "dilated"}.get(attention, attention)
    chromosome = genome.Chromosome(symbols=read.symbols, cut=read.cut, is_causal=objective == "causal", k=5, both_strands=True)
    windows = list(chromosome.held_out(512))
    counts = [int((targets != -100).sum()) for _, targets in windows]
    with torch.no_grad():
        nats = [float(model(x[None], targets=y[None])) * count for (x, y), count in zip(windows, counts, strict=True)]
    assert sum(nats) / sum(counts) / math.log(2) == pytest.approx(log["held out bits per base"], abs=1e-5)
    # a third of a step's FLOPs is the forward, as torch counts it op by op
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(windows[0][0][None])
    assert log["speed"]["FLOPs a base"] * 512 == pytest.approx(3 * counter.get_total_flops(), rel=1e-12)
    # its settings are taken up again
    code, out, error = here("train_genome.py", "--resume", tmp_path, "--steps", 41)
    assert code in (0, 1) and "after step 40" in out, out + error


@pytest.mark.slow
def test_a_stopped_run_goes_on_with_two_processes_that_share_a_sequence(
    here: Callable[..., tuple[int, str, str]], fasta: Path, tmp_path: Path
) -> None:
    """With Muon's momentum, k-mers and windows of two lengths: to the bits of a run that one process did not stop, parameters shared, too.
    Muon's products are float32 on a CPU, so they agree."""
    options = ["--short-context", "256", "--short-share", "0.5", "--lr", "1e-3", "--save-minutes", "1e-9", "--keep", "9", "--checkpoint"]
    code, out, error = here("train_genome.py", "--fasta", fasta, *SMALL, *PEAK, *options, "--steps", 8, "--out", tmp_path / "whole")
    # too few steps to learn much, and the report says so
    assert code == 0 and "not below the Markov models" in out.splitlines()[-1], error
    run = tmp_path / "stopped"
    shutil.copytree(tmp_path / "whole", run)
    for name in (*(f"checkpoints/step-{step:08d}" for step in range(4, 9)), "checkpoint"):
        shutil.rmtree(run / name)
    shared = ["--resume", str(run), "--context-parallel", "2", "--fsdp", "--layout", "zigzag"]
    result = run_script(EXAMPLES / "train_genome.py", *shared, processes=2, quick=True)
    assert result.returncode == 0 and "step-00000003 after step 3" in result.stdout, result.stderr
    ((name, bases),) = read_fasta(run / "held_out.fa")
    assert name == "repeats:6376-7500" and len(bases) == 1125
    logs = [json.loads((tmp_path / name / "genome.json").read_text()) for name in ("whole", "stopped")]
    alone, together = ([*(bits for _, _, bits in log["steps"]), log["held out bits per base"]] for log in logs)
    assert together[:3] == alone[:3] and together == pytest.approx(alone, abs=1e-4, rel=0) and alone[7] < alone[4] - 0.01
    assert here("train_genome.py", "--resume", run, "--steps", 5)[1].endswith("; nothing was left to train\n")


def test_embeddings_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shape: dict[str, Any] = {"vocab_size": 5, "kmer": 3, "tie_embeddings": False, "embed_dim": 8, "num_layers": 1, "num_heads": 1}
    model = LongNetLM(LongNetConfig(**shape, segment_lengths=(256, 1024), dilation_rates=(1, 4), is_causal=False)).eval()
    model.save_pretrained("runs/mine/checkpoint")
    text = "GATTACANNN" * 13_000
    Path("my.fa.gz").write_bytes(gzip.compress(f">other\nACGT\n>chr21 of a species\n{text}".encode()))
    (block,) = (block for block in blocks(EXAMPLES.parent / "docs" / "genome.md") if block.language == "python")
    names: dict[str, Any] = {}
    exec(block.code, names)
    assert names["region"].shape == (1000, 8) and names["vector"].shape == (8,)
    unknown = names["window"][1:] == 4
    assert torch.equal(names["likelihood"].isnan(), unknown) and bool((names["likelihood"][~unknown] < 0).all())
    # the window begins with a segment, and reads what the whole record has there
    window = model.encode(BASES.encode(text)[120_000 - 15_000 : 121_000 + 15_000])
    with torch.no_grad():
        assert torch.equal(names["region"], model.hidden(window)[0, 15_000:16_000])
