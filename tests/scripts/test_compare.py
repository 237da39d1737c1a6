"""examples/compare_attention.py: what it reads, cuts, measures and starts, each against its definition, and a whole run in small."""

import json
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dilated_attention.models import BASES, LongNetConfig, LongNetLM
from dilated_attention.planning import recommend

ROOT = Path(__file__).parents[2]
Part = Callable[[str], Any]
SMALL = [
    *("--context", "512", "--tokens", "1024", "--layers", "2", "--embed-dim", "32", "--heads", "2", "--held-out", "512"),
    *("--steps", "3", "--evaluations", "1"),
]


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """Packages of text, of which certifi's name says that it is held out."""
    for name, word in (("alpha", "one"), ("beta", "two"), ("certifi", "three")):
        (tmp_path / "packages" / name).mkdir(parents=True)
        for i in range(3):
            text = "".join(f"{word}_{i}_{j} = call_{word}({j})\n" for j in range(60))
            (tmp_path / "packages" / name / f"m{i}.py").write_text(text)
    # a copy, a folder of what is known of a package, and what is no text
    (tmp_path / "packages" / "alpha" / "copy.py").write_bytes((tmp_path / "packages" / "beta" / "m0.py").read_bytes())
    (tmp_path / "packages" / "certifi-1.0.dist-info").mkdir()
    (tmp_path / "packages" / "certifi-1.0.dist-info" / "LICENSE.txt").write_text("licence of certifi")
    (tmp_path / "packages" / "beta" / "x.bin").write_bytes(b"binary")
    return tmp_path / "packages"


def test_text_is_of_whole_packages_each_content_once(part: Part, packages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = part("_compare_data")
    text = data.Text(packages, Path("unused"), torch.device("cpu"))
    train, held_out = (bytes(part.tolist()).decode() for part in text.parts)
    assert train.startswith("\n# alpha/copy.py\ntwo_0_0") and "# beta/m0.py" not in train and "# beta/m1.py" in train
    assert "three" in held_out and "licence of certifi" in held_out and "three" not in train and "binary" not in train + held_out
    assert "one_" not in held_out and "two_" not in held_out
    window = text.random_window(64, torch.Generator().manual_seed(0))
    assert bytes(window.tolist()).decode() in train and len(window) == 65
    ends = list(text.held_out(64, 3))
    assert bytes(ends[0].tolist()).decode() == held_out[:65] and bytes(ends[-1].tolist()).decode() == held_out[-65:]
    # what this Python's packages ship is kept in a file for the next run
    monkeypatch.setattr(data.sysconfig, "get_paths", lambda: dict.fromkeys(("purelib", "stdlib"), str(packages)))
    for _ in range(2):
        same = data.Text(None, tmp_path / "runs" / "text.pt", torch.device("cpu"))
        assert same.data == text.data and all(map(torch.equal, same.parts, text.parts))
        monkeypatch.setattr(data.Text, "_read", None)
    with pytest.raises(ValueError, match=r"bytes in a part and --context is 10,000,000; choose a smaller one"):
        text.random_window(10**7, torch.Generator())


def test_distances_of_copies_are_those_of_a_search(part: Part) -> None:
    data = part("_compare_data")
    draw = torch.Generator().manual_seed(0)
    part = torch.randint(4, (60,), generator=draw)
    window = torch.cat([part, torch.randint(4, (30,), generator=draw), part, part[:40]])
    for base in (5, 256):
        found = data.copy_distance(window, base).tolist()
        assert len(found) == len(window) - 1
        text = "".join(map(str, window.tolist()))
        for i, distance in enumerate(found):
            start = i + 1 - data.ANCHOR
            before = text.rfind(text[start : i + 1], 0, i) if start >= 0 else -1
            assert distance == (start - before if before >= 0 else 0)
    assert max(found) == 90


def test_a_sequence_is_a_place_of_two_strains(part: Part, tmp_path: Path) -> None:
    data = part("_compare_data")
    draw = torch.Generator().manual_seed(0)
    one = torch.randint(4, (40_000,), generator=draw)
    other = one.where(torch.rand(len(one), generator=draw) > 0.01, 3 - one)
    # the second file holds the other strand
    for name, symbols in (("a", one), ("b", data.other_strand(other))):
        (tmp_path / f"{name}.fa").write_text(f">{name}\n{BASES.decode(symbols)}\n")
    files = [tmp_path / "a.fa", tmp_path / "b.fa"]
    strains = data.Strains(files, 4096, torch.device("cpu"))
    assert len(strains.strains) == 2 and all(strains.places) and strains.strains[1].tolist() == other.tolist()
    cut = strains.bounds[0][0][1]
    assert cut == 30_000 and strains.bounds[0][1] == (cut, len(one))
    for window in strains.held_out(4096, 4):
        assert len(window) == 4097 and window[2048] == 4 and int((window == 4).sum()) == 1
        distance = data.copy_distance(window, 5)[2100:]
        assert float((distance > 1900).double().mean()) > 0.5
    for seed in range(4):
        window = strains.random_window(4096, torch.Generator().manual_seed(seed))
        far = data.copy_distance(window, 5)[2400:]
        assert len(window) == 4097 and set(window.tolist()) == {0, 1, 2, 3, 4} and float((far > 1700).double().mean()) > 0.4
    short = strains.random_window(1024, torch.Generator().manual_seed(0))
    assert len(short) == 1025 and int((short == 4).sum()) == 1 and float((data.copy_distance(short, 5)[600:] > 450).double().mean()) > 0.4
    assert strains.targets(window[None])[0, 2047] == -100 and strains.inputs(window[None]).max() < 5**strains.kmer
    with pytest.raises(ValueError, match="are followed by 32,768 bases; choose a smaller --context"):
        data.Strains(files, 65536, torch.device("cpu"))
    with pytest.raises(ValueError, match="expected FASTA files of at least two strains"):
        data.Strains(files[:1], 4096, torch.device("cpu"))
    with pytest.raises(ValueError, match=r"a\.fa holds the bases of another file; expected strains that differ: leave it out"):
        data.Strains([*files, files[0]], 4096, torch.device("cpu"))


def test_every_name_is_a_model_that_reads(part: Part) -> None:
    script = part("compare_attention")
    for name in (*script.NAMES, "window-300", "longnet-3"):
        entries = script.attention_of(name, 700, 2, 4)
        config = LongNetConfig(vocab_size=9, embed_dim=16, num_layers=4, num_heads=2, attention=entries)
        assert LongNetLM(config)(torch.zeros(1, 700, dtype=torch.int64)).shape == (1, 700, 9)
    offsets = [entry["head_offsets"] for entry in script.attention_of("dilated-offsets", 2**15, 4, 3)]
    # rates 1, 4, 16
    assert offsets[1] == ((0, 0, 0, 0), (0, 1, 2, 3), (4, 5, 6, 7)) and offsets[0][2] == (0, 1, 2, 3)
    kinds = [entry["attention"] for entry in script.attention_of("mix-window-dense", 2**15, 4, 8)]
    assert kinds == ["block_sparse"] * 3 + ["dense"]
    entries = script.attention_of("mix-window-nope", 2**15, 4, 8)
    assert [entry.get("positions", "rotary") for entry in entries] == ["rotary"] * 3 + ["none"]
    for name in ("far", "window-0", "window-" + "9" * 19, "longnet-0", "longnet-1", "longnet-" + "9" * 19):
        with pytest.raises(ValueError, match=f"--attention is {name}; expected one of dense, .* another number: window- from 1"):
            script.attention_of(name, 700, 2, 4)


def test_a_run_writes_what_came_of_it_and_goes_on(
    part: Part, here: Callable[..., tuple[int, str, str]], packages: Path, tmp_path: Path
) -> None:
    out = tmp_path / "runs" / "a"
    flags = ["--attention", "mix-window-dilated", "--data", "bytes", packages, "--out", out, *SMALL]
    code, said, _ = here("compare_attention.py", *flags)
    found = json.loads((tmp_path / "runs" / "a.json").read_text())
    assert code == 0 and said.splitlines()[-1].startswith(f"done: {found['bits']:.4f} bits per byte, ")
    assert (found["steps"], found["tokens"], found["settings"]["attention"]) == (3, 3 * 1024, "mix-window-dilated")
    assert found["dense_kernels"] == ["sdpa_cpu", "sdpa_cpu"] and found["rotary_base"] == 500_000.0
    assert [tokens for _, tokens, _ in found["curve"]] == [2048, 3072] and found["curve"][-1][2] == found["bits"]
    # four windows of 512 targets, each in one bin
    assert [row[:3] for row in found["by_position"]] == [*([2**i, 2 ** (i + 1), 4 * 2**i] for i in range(9)), [512, 1024, 4]]
    figures = part("_compare_table")
    for name in ("by_position", "by_copy"):
        assert sum(row[2] for row in found[name]) == 2048 and figures.mean_beyond(found[name], 0) == pytest.approx(found["bits"], abs=1e-4)
    (_, _, first), (_, _, last) = found["curve"]
    assert [figures.at_tokens(found, n) for n in (50, 2560, 3072)] == pytest.approx([first, (first + last) / 2, last])
    assert math.isnan(figures.at_tokens(found, 4000))
    assert [row[:2] for row in found["needle"]] == [[128, 4 * 24], [392, 4 * 24]]
    # again: the same run has ended; with one more step it goes on
    assert here("compare_attention.py", *flags)[0] == 0
    again = json.loads((tmp_path / "runs" / "a.json").read_text())
    assert again["bits"] == found["bits"] and again["steps"] == 3
    assert here("compare_attention.py", *flags[:-4], "--steps", 4, "--evaluations", 1)[0] == 0
    longer = json.loads((tmp_path / "runs" / "a.json").read_text())
    assert longer["steps"] == 4 and longer["bits"] < found["bits"]
    code, table, _ = here("compare_attention.py", "--table", tmp_path / "runs", "--pictures", tmp_path / "pictures")
    assert code == 0 and f"| mix-window-dilated | 0.001 | 0 | {longer['bits']:.4f} | {longer['bits']:.4f} |" in table
    # no 24 bytes of the held-out text stand twice in a window
    pictures = [f"compare-bytes-512-4-steps-1024-2-{x}.png" for x in ("position", "time")]
    assert sorted(path.name for path in (tmp_path / "pictures").iterdir()) == pictures


def test_sequences_that_grow(
    part: Part, here: Callable[..., tuple[int, str, str]], packages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ["--attention", "window-64", "--data", "bytes", packages, *SMALL]
    grows = [*flags, "--tokens", "256", "--first-context", "128"]
    assert here("compare_attention.py", *grows, "--out", tmp_path / "a")[0] == 0
    # two of 128, one of 256, one of 512
    steps = [line for line in part("recipe.log").read(tmp_path / "a") if "length" in line]
    seconds = [line["seconds"] for line in steps]
    tokens = [round(line["tokens_per_second"] * (x - y)) for line, x, y in zip(steps, seconds, [0.0, *seconds], strict=False)]
    found = json.loads((tmp_path / "a.json").read_text())
    assert [line["length"] for line in steps] == [128, 256, 512] and tokens == [256, 256, 512]
    assert found["tokens"] == 1024 and [x[1] for x in found["curve"]] == [512, 1024]
    script = part("compare_attention")
    monkeypatch.setattr(sys, "argv", ["compare_attention.py", *map(str, grows)])
    run, seen = script.Run(script.arguments()[1], torch.device("cpu")), list[torch.Tensor]()
    run.model = lambda inputs, targets: seen.append(inputs) or torch.zeros(())
    for sequence, progress in ((0, 0.0), (1, 0.2), (0, 0.4), (0, 0.9), (0, 0.0)):
        run.loss([sequence], progress)
    assert [tuple(x.shape) for x in seen] == [(2, 128), (2, 128), (1, 256), (1, 512), (2, 128)] and torch.equal(seen[0], seen[-1])
    assert len({tuple(row.tolist()) for x in seen[:2] for row in x}) == 4
    # a run that goes on in another folder has the tokens of the first, too
    assert here("compare_attention.py", *grows, "--steps", "4", "--resume", tmp_path / "a", "--out", tmp_path / "c")[0] == 0
    assert json.loads((tmp_path / "c.json").read_text())["tokens"] == 1024 + 512
    code, _, said = here("compare_attention.py", *flags, "--first-context", "100", "--out", tmp_path / "b")
    assert code == 2 and "--first-context is 100; expected --context, 512, or a half, a quarter, an eighth … of it" in said


def test_the_page_has_the_figures_of_the_results(part: Part) -> None:
    figures = part("_compare_table")
    results = figures.results(ROOT / "benchmarks/results/2026-11-30-h200x2/compare")
    group = "bytes", 32768, "360 seconds", 65536, 10
    found = figures.results(ROOT / "benchmarks/results/2026-11-29-h200x2/compare")[group] + results[group]
    runs = {(run["settings"]["attention"], run["settings"]["lr"]): run for run in found}
    fewest = min(run["tokens"] for run in found)
    page = (ROOT / "docs/patterns.md").read_text(encoding="utf-8").partition("## Which attention should I train with?")[2]
    rows = [
        [cell.strip(" *") for cell in line.split("|")[1:-1]] for line in page.partition("\n## ")[0].splitlines() if line.startswith("|")
    ]
    names = {
        "3 windows of 1,024, 1 dense": "mix-window-dense", "windows of 4,096": "window-4096",
        "window of 1,024, LongNet's branches": "mix-window-dilated", "windows of 1,024": "window-1024",
        "dilated blocks, window, prefix": "dilated-blocks", "BigBird": "bigbird", "LongNet's branches, growth 4": "longnet-4",
        "… growth 2": "longnet-2", "… offsets change by layer": "dilated-offsets",
        "3 windows, 1 dense that rotates nothing": "mix-window-nope", "dense": "dense", "`TopBlocks`, 10 %": "topblocks",
    }  # fmt: skip
    assert [row[0] for row in rows[2:]] == list(names)
    longer = {run["settings"]["attention"]: run for run in results["bytes", 131072, "360 seconds", 65536, 10]}
    for row in rows[2:]:
        run = runs[names[row[0]], 1e-3]
        bits = run["bits"], figures.at_tokens(run, fewest), figures.mean_beyond(run["by_copy"], 8192)
        at_length = f"{longer[names[row[0]]]['bits']:.3f}" if names[row[0]] in longer else ""
        assert row[1:] == [*(f"{x:.3f}" for x in bits), f"{run['tokens_per_second'] / 1000:.0f}k", at_length]
    assert f"dense at 2e-3: {runs['dense', 2e-3]['bits']:.3f}" in page
    far = {
        (run["settings"]["attention"], run.get("rotary_base", 500_000)): f"{figures.mean_beyond(run['by_copy'], 524_288):.3f}"
        for run in results["genomes", 2**20, "480 seconds", 65536, 10]
    }
    told = next(line for line in page.splitlines() if line.startswith("In a million bases"))
    names_of_bases = [
        ("mix-window-nope", 512e6), ("mix-window-dense", 512e6), ("mix-window-dense", 500_000), ("window-1024", 500_000),
        ("longnet-4", 500_000), ("dilated-blocks", 500_000),
    ]  # fmt: skip
    assert re.findall(r"\d\.\d{3}", told) == [far[x] for x in names_of_bases] and len(far) == 6
    advice = recommend("training", 32768, gpu="H200").setting("accuracy").reason
    readme = next(line for line in (ROOT / "README.md").read_text(encoding="utf-8").splitlines() if line.startswith("Trained from nothing"))
    of_advice, of_readme = (
        ("longnet-4", "window-1024", "dense", "mix-window-dense"),
        ("mix-window-dense", "longnet-4", "window-1024", "dense"),
    )
    short, of_length = ([f"{of(x)['bits']:.3f}" for x in of_advice] for of in (lambda x: runs[x, 1e-3], longer.__getitem__))
    rotates_nothing = f"{longer['mix-window-nope']['bits']:.3f}"
    assert re.findall(r"\d\.\d{3}", advice) == [*short, *of_length, rotates_nothing]
    copied = [far[x] for x in (("mix-window-nope", 512e6), ("window-1024", 500_000))]
    assert re.findall(r"\d\.\d{3}", readme) == [f"{runs[x, 1e-3]['bits']:.3f}" for x in of_readme] + copied
