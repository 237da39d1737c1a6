"""examples/slide_features.py as a user runs it: formats, what it refuses, its AUC, what it writes, and the public picture of tissue."""

from __future__ import annotations

import csv
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from dilated_attention.models import SlideEncoder
from tests.helpers import kills
from tests.helpers.scripts import Script, run_script
from tests.helpers.torchscale_reference import Maker

h5py = pytest.importorskip("h5py")
pytest.importorskip("sklearn")

EXAMPLES = Path(__file__).parents[2] / "examples"
SHAPE = ["--embed-dim", "32", "--layers", "1", "--heads", "4", "--tile-size", "256"]


def write(path: Path, features: np.ndarray, coords: np.ndarray) -> None:
    if path.suffix == ".h5":
        with h5py.File(path, "w") as file:
            file["features"], file["coords"] = features, coords
    elif path.suffix == ".npz":
        np.savez(path, features=features, coords=coords)
    else:
        torch.save({"tile_embeds": torch.tensor(features)[None], "coords": torch.tensor(coords)[None]}, path)


def tissue(seed: int, shift: float = 0.0, side: int = 5) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    y, x = np.indices((side, side)).reshape(2, -1) * 256
    return (random.normal(size=(side * side, 12)) + shift * (np.arange(12) % 2)).astype(np.float16), np.stack((x, y), axis=-1)


def make_folder(folder: Path, *, classes: int = 2, count: int = 24, shuffled: bool = False) -> Path:
    """Slides of three formats whose class shifts half of the features; ``shuffled``: labels that have nothing to do with it."""
    folder.mkdir(exist_ok=True)
    targets = [index % classes for index in range(count)]
    labels = list(np.random.default_rng(3).permutation(targets)) if shuffled else targets
    with (folder / "labels.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("slide_id", "label"), *((f"s{index:02d}", f"class{label}") for index, label in enumerate(labels))])
    for index, target in enumerate(targets):
        write(folder / f"s{index:02d}{('.h5', '.pt', '.npz')[index % 3]}", *tissue(index, shift=target * 1.0))
    return folder


def inputs(folder: Path) -> list[str]:
    return ["--features", str(folder), "--labels", str(folder / "labels.csv")]


def run(folder: Path, out: Path, *options: str, quick: bool = True) -> subprocess.CompletedProcess[str]:
    """The script's end; drawn are the maps of test_slides_of_three_formats_become_vectors_auc_model_and_heatmaps and of tissue."""
    return script(*inputs(folder), *SHAPE, "--out", str(out), *options, quick=quick)


def script(*arguments: str, quick: bool = True) -> subprocess.CompletedProcess[str]:
    return run_script(EXAMPLES / "slide_features.py", *arguments, quick=quick)


def auc_of(result: subprocess.CompletedProcess[str]) -> float:
    assert result.returncode == 0, result.stderr
    last = result.stdout.splitlines()[-1]
    assert last.startswith("done: AUC "), last
    return float(last.split()[2])


def test_slides_of_three_formats_become_vectors_auc_model_and_heatmaps(tmp_path: Path) -> None:
    folder, out = make_folder(tmp_path / "features"), tmp_path / "out"
    (folder / "s00.png").write_bytes((EXAMPLES.parent / "docs" / "pictures" / "tail.png").read_bytes())
    result = run(folder, out, "--global-pool", quick=False)
    assert auc_of(result) > 0.95
    assert "of class1 against class0" in result.stdout.splitlines()[-1]
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    bits = [line["train/bits"] for line in lines if "train/bits" in line]
    # 100 epochs of 18 slides by 8
    assert len(bits) == 225 and sum(bits[-20:]) < 0.5 * sum(bits[:20])
    assert len([line for line in lines if "held_out/bits" in line]) == 5
    results = json.loads((out / "slides.json").read_text())
    assert results["held-out bits per slide"] == lines[-1]["held_out/bits"] < 0.5
    held_out = results["held-out probabilities"]
    assert len(held_out) == 6
    assert {file.stem for file in (out / "heatmaps").iterdir()} == set(held_out)
    assert min(file.stat().st_size for file in (out / "heatmaps").iterdir()) > 1000
    with np.load(out / "embeddings.npz") as stored:
        assert stored["vector"].shape == (24, 32) and set(stored["slide_id"][stored["split"] == "test"]) == set(held_out)
        vectors = dict(zip(stored["slide_id"], stored["vector"], strict=True))
    # the saved model gives these vectors and these probabilities
    model = SlideEncoder.from_pretrained(out / "checkpoint")
    name = next(iter(held_out))
    features, coords = (torch.tensor(x)[None] for x in tissue(int(name[1:]), shift=float(int(name[1:]) % 2)))
    with torch.no_grad():
        np.testing.assert_allclose(model.embed(features, coords)[0], vectors[name], atol=1e-5)
        np.testing.assert_allclose(model(features, coords)[0].softmax(-1), held_out[name], atol=1e-4)
    targets = {name: int(name[1:]) % 2 for name in held_out}
    assert results["held-out bits per slide"] == pytest.approx(-np.mean([np.log2(held_out[n][t]) for n, t in targets.items()]), abs=1e-5)


def test_shuffled_labels_give_no_auc(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "features", count=60, shuffled=True)
    assert 0.15 < auc_of(run(folder, tmp_path / "out", "--global-pool", "--epochs", "20")) < 0.8


def test_three_classes_tuned_encoder_and_orders(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "features", classes=3)
    result = run(folder, tmp_path / "out", "--tune-encoder", "--global-pool", "--lr", "3e-3", "--epochs", "6", "--orders")
    assert auc_of(result) > 0.9
    assert "mean over classes" in result.stdout.splitlines()[-1]
    correlations = json.loads((tmp_path / "out" / "slides.json").read_text())["correlations of orders"]
    assert len(correlations) == 3 and all(len(values) == 6 and max(map(abs, values)) <= 1 for values in correlations.values())


def test_a_split_of_the_user_is_kept(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "features")
    rows = list(csv.reader((folder / "labels.csv").open()))
    parts = ["split", *("test" if index < 4 else "train" for index in range(24))]
    with (folder / "labels.csv").open("w", newline="") as file:
        csv.writer(file).writerows([*row, part] for row, part in zip(rows, parts, strict=True))
    auc_of(run(folder, tmp_path / "out", "--epochs", "1"))
    assert sorted(file.stem for file in (tmp_path / "out" / "heatmaps").iterdir()) == ["s00", "s01", "s02", "s03"]


def rewrite(change: Callable[[str], str]) -> Callable[[Path], None]:
    def labels(folder: Path) -> None:
        path = folder / "labels.csv"
        path.write_text(change(path.read_text()))

    return labels


def damage(folder: Path, tile: int, value: float) -> None:
    features, coords = tissue(0)
    features[tile:] = value
    write(folder / "s00.h5", features, coords)


REFUSALS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no label": (rewrite(lambda text: text.replace("s05,class1", "s05,")), "no label for slide s05"),
    "no row": (rewrite(lambda text: text.replace("s05,class1\n", "").replace("s05,class1\r\n", "")), "a file in "),
    "no file": (lambda folder: (folder / "s01.pt").unlink(), "no file in "),
    "row twice": (rewrite(lambda text: text + "s05,class1\n"), "slide s05 twice"),
    "id twice": (lambda folder: write(folder / "s00.npz", *tissue(0)), "slide s00 has several files"),
    "columns": (rewrite(lambda text: text.replace("slide_id", "slide")), "expected slide_id, label"),
    "one class": (rewrite(lambda text: text.replace("class1", "class0")), "at least two classes"),
    "NaN": (lambda folder: damage(folder, 23, float("nan")), "it has 2 of 25 tiles with NaN"),
    "width": (lambda folder: write(folder / "s00.h5", np.zeros((4, 7)), np.zeros((4, 2))), "of width 7"),
    "no coords": (lambda folder: torch.save(torch.zeros(4, 12), folder / "s01.pt"), "holds a Tensor, and coords are needed"),
    "pickle": (lambda folder: torch.save({"features": folder}, folder / "s01.pt"), "not unpickled"),
    "damaged": (lambda folder: (folder / "s00.h5").write_bytes(b"no HDF5"), "s00.h5 cannot be read"),
    "outside": (lambda folder: write(folder / "s00.h5", np.zeros((4, 12)), np.full((4, 2), -1.0)), "coords from -1 to -1"),
    "empty": (lambda folder: write(folder / "s00.h5", np.zeros((0, 12)), np.zeros((0, 2))), "no tiles"),
    "few": (rewrite(lambda text: text.replace("class1", "class0").replace("s05,class0", "s05,class1")), "cannot be split"),
}


def main_of(arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> tuple[object, str]:
    """Exit code and stderr of the script in this process: each start of it would cost seconds of imports."""
    monkeypatch.setattr(sys, "argv", ["slide_features.py", *arguments])
    monkeypatch.syspath_prepend(str(EXAMPLES))
    # main() sets how warnings are printed
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    try:
        code = importlib.import_module("slide_features").main()
    except SystemExit as stop:
        code = stop.code
    return code, capsys.readouterr().err


@pytest.mark.parametrize("case", REFUSALS)
def test_what_is_wrong_is_said_in_one_line(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_folder(tmp_path / "features")
    spoil, text = REFUSALS[case]
    spoil(folder)
    arguments = [*inputs(folder), "--out", str(tmp_path / "out")]
    code, error = main_of(arguments, monkeypatch, capsys)
    assert code == 2
    assert error.startswith("slide_features.py: ") and text in error and error.count("\n") == 1, error
    assert not (tmp_path / "out").exists()


def test_held_out_slides_of_one_class_are_refused(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "features")
    rows = (folder / "labels.csv").read_text().split()
    split = [f"{row},{'split' if index == 0 else 'test' if index in (1, 3) else 'train'}" for index, row in enumerate(rows)]
    (folder / "labels.csv").write_text("\n".join(split))
    result = run(folder, tmp_path / "out")
    assert result.returncode == 2 and "no test slide has the label class1" in result.stderr


def test_tile_indices_are_warned_of(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "features")
    for index in range(24):
        for file in folder.glob(f"s{index:02d}.*"):
            file.unlink()
        features, coords = tissue(index, shift=float(index % 2))
        write(folder / f"s{index:02d}.npz", features, coords // 256)
    result = run(folder, tmp_path / "out", "--epochs", "1")
    assert result.returncode == 0 and result.stderr.count("warning: 25 of the 25 tiles") == 1 and "tile indices" in result.stderr


def test_a_run_that_was_stopped_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    """By Ctrl-C in the middle of the encoder's training, with dropout; then with the settings that are in the folder."""
    folder, stopped, whole = make_folder(tmp_path / "features"), tmp_path / "stopped", tmp_path / "whole"
    options = [*inputs(folder), *SHAPE, "--tune-encoder", "--epochs", "8", "--lr", "1e-3"]
    first = Script(EXAMPLES / "slide_features.py", *options, "--out", str(stopped), quick=True)
    (process,) = first.processes
    log, deadline = stopped / "log.jsonl", time.monotonic() + 200
    while not (log.exists() and '"step": 3' in log.read_text()) and time.monotonic() < deadline and process.is_alive():
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGINT)
    result = first.end(100)
    error = result.stderr
    assert result.returncode == 130, error
    assert "stopped by SIGINT after step" in error and "Traceback" not in error
    assert not (stopped / "checkpoint").exists()
    result = script("--resume", str(stopped))
    assert "going on with" in result.stdout, result.stderr
    assert auc_of(result) == auc_of(script(*options, "--out", str(whole)))
    found, expected = (json.loads((path / "slides.json").read_text()) for path in (stopped, whole))
    for name in ("AUC", "held-out bits per slide", "held-out probabilities", "steps"):
        assert found[name] == expected[name], name
    assert kills.log_of(stopped) == kills.log_of(whole)
    assert expected["steps"] == 18


def test_a_head_goes_on_to_the_same_bits_and_to_more_epochs(tmp_path: Path) -> None:
    """From the checkpoint before the last; then past the end. Other data are refused."""
    folder, out = make_folder(tmp_path / "features"), tmp_path / "out"
    auc = auc_of(run(folder, out, "--steps", "12", "--save-minutes", "1e-9"))
    # 12 steps of 8 slides
    assert json.loads((out / "checkpoints" / "step-00000012" / "run.json").read_text())["sequences"] == 96
    log, results = kills.log_of(out), json.loads((out / "slides.json").read_text())
    for name in ("checkpoints/step-00000012", "checkpoint"):
        shutil.rmtree(out / name)
    result = script("--out", str(out), "--resume", "auto", *inputs(folder))
    assert "step-00000011 after step 11" in result.stdout
    assert auc_of(result) == auc
    assert kills.log_of(out) == log
    again = json.loads((out / "slides.json").read_text())
    assert again["held-out probabilities"] == results["held-out probabilities"]
    # 8 epochs of 18 slides are 18 steps of 8
    assert auc_of(script("--resume", str(out), "--epochs", "8")) >= 0.0
    assert json.loads((out / "slides.json").read_text())["steps"] == 18
    assert json.loads((out / "settings.json").read_text())["epochs"] == 8
    # a folder that moved holds the same data; a run that begins anew leaves no picture of this one
    folder = folder.rename(tmp_path / "moved")
    assert script("--resume", str(out), *inputs(folder)).returncode == 0
    auc_of(run(folder, out, "--steps", "1", "--seed", "5"))
    assert len(list((out / "earlier-1" / "heatmaps").iterdir())) == len(list((out / "heatmaps").iterdir())) == 6
    (folder / "labels.csv").write_text((folder / "labels.csv").read_text().replace("s05,class1", "s05,class0"))
    for options, text in ((["--checkpoint", "x.pth"], "--checkpoint is x.pth"), ([], "was trained on other data")):
        result = script("--resume", str(out), *options)
        assert result.returncode == 2 and text in result.stderr, result.stderr


def test_epochs_are_shuffled_and_hold_each_slide_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    shuffled = importlib.import_module("_slides").shuffled
    orders = [shuffled(18, 0, epoch) for epoch in range(5)]
    assert all(sorted(order) == list(range(18)) for order in orders)
    assert len(set(map(tuple, [*orders, shuffled(18, 1, 0)]))) == 6


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--lr", "0"], "got 0; expected a number > 0"),
        (["--epochs", "0"], "argument --epochs: got 0; expected a number >= 1"),
        (["--epochs", "3", "--steps", "4"], "not allowed with argument"),
        (["--held-out", "1"], "got 1; expected a number > 0 and <= 0.9"),
        (["--batch", "1.5"], "'1.5' is not a size"),
        (["--fsdp"], "unrecognized arguments: --fsdp"),
        (["--backend", "none"], "no such model: "),
        (["--checkpoint", "x.pth", "--heads", "4"], "leave them out with --checkpoint"),
    ],
)
def test_settings_are_refused(
    flags: list[str], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_folder(tmp_path / "features")
    code, error = main_of([*inputs(folder), "--out", str(tmp_path / "out"), *flags], monkeypatch, capsys)
    assert code == 2 and expected in error, error
    assert not (tmp_path / "out").exists()


def test_a_missing_progress_bar_is_named(tmp_path: Path) -> None:
    code = f"import runpy, sys\nsys.modules['tqdm'] = None\nsys.path.insert(0, {str(EXAMPLES)!r})\nrunpy.run_module('slide_features')\n"
    (tmp_path / "without.py").write_text(code)
    result = run_script(tmp_path / "without.py")
    assert result.returncode == 1 and result.stderr.startswith('tqdm is not installed: pip install "dilated-attention[train]"')
    assert result.stderr.count("\n") == 1


def test_several_processes_are_refused(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "features")
    result = run_script(EXAMPLES / "slide_features.py", *inputs(folder), "--out", str(tmp_path / "out"), processes=2)
    assert result.returncode == 2 and result.stderr.count("\n") == 1, result.stderr
    assert "one process trains on slides, and torchrun started 2" in result.stderr


def test_the_public_picture_of_tissue(tmp_path: Path) -> None:
    """In small: 32 slides to train on and 32 held out. Their labels are not in the features, and still can be learned."""
    pytest.importorskip("skimage")
    result = run_script(EXAMPLES / "make_ihc_slides.py", str(tmp_path / "ihc"), "--step", "32")
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == f"done: 64 slides in {tmp_path / 'ihc'}"
    shape = ["--tile-size", "8", "--embed-dim", "64", "--layers", "2", "--heads", "4", "--global-pool"]
    folder, out = tmp_path / "ihc", tmp_path / "out"
    result = run_script(EXAMPLES / "slide_features.py", *inputs(folder), *shape, "--out", str(out), "--epochs", "30", quick=True)
    assert auc_of(result) > 0.7
    assert "warning" not in result.stderr
    assert len(list((out / "heatmaps").iterdir())) == 32


def test_weights_of_prov_gigapaths_family(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "features")
    maker = Maker(32)
    maker.slide_encoder(12, 1, ffn=64)
    torch.save({"model": {name: weight.float() for name, weight in maker.weights.items()}}, tmp_path / "slide_encoder.pth")
    arguments = [*inputs(folder), "--checkpoint", str(tmp_path / "slide_encoder.pth")]
    result = script(*arguments, "--epochs", "2", "--out", str(tmp_path / "out"))
    auc_of(result)
    stored = SlideEncoder.from_pretrained(tmp_path / "out" / "checkpoint").class_token
    assert torch.equal(stored.detach(), maker.weights["cls_token"].float().flatten())
