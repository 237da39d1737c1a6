"""examples/slide_features.py and slide_predict.py as a user runs them: formats, refusals, AUC, files, and the public picture of tissue."""

import csv
import functools
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dilated_attention.integrations.torchscale import load_slide_encoder
from dilated_attention.models import SlideEncoder
from tests.helpers.scripts import log_of, run_script
from tests.helpers.torchscale_reference import Maker
from tests.scripts.test_examples import EXAMPLES

h5py = pytest.importorskip("h5py")
pytest.importorskip("sklearn")

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
        csv.writer(file, lineterminator="\n").writerows(
            [("slide_id", "label"), *((f"s{index:02d}", f"class{label}") for index, label in enumerate(labels))]
        )
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


def predict(features: Path, checkpoint: Path, out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    arguments = ["--features", str(features), "--checkpoint", str(checkpoint), "--out", str(out), *options]
    return run_script(EXAMPLES / "slide_predict.py", *arguments, quick=True)


def gigapath(folder: Path) -> tuple[Path, Maker]:
    """A file of weights of Prov-GigaPath's family."""
    maker = Maker(32)
    maker.slide_encoder(12, 1, ffn=64)
    torch.save({"model": {name: weight.float() for name, weight in maker.weights.items()}}, folder / "slide_encoder.pth")
    return folder / "slide_encoder.pth", maker


def auc_of(result: subprocess.CompletedProcess[str]) -> float:
    assert result.returncode == 0, result.stderr
    last = result.stdout.splitlines()[-1]
    assert last.startswith("done: AUC "), last
    return float(last.split()[2])


def table_of(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.open()))


def test_slides_of_three_formats_become_vectors_auc_model_and_heatmaps(tmp_path: Path) -> None:
    folder, out = make_folder(tmp_path / "features"), tmp_path / "out"
    (folder / "s00.png").write_bytes((EXAMPLES.parent / "docs" / "pictures" / "tail.png").read_bytes())
    result = run(folder, out, "--global-pool", quick=False)
    assert auc_of(result) > 0.95 and "of class1 against class0" in result.stdout.splitlines()[-1]
    bits = log_of(out, "train/bits")
    # 100 epochs of 18 slides by 8
    assert len(bits) == 225 and sum(bits[-20:]) < 0.5 * sum(bits[:20])
    results = json.loads((out / "slides.json").read_text())
    evaluated, held_out = log_of(out, "held_out/bits"), results["held-out probabilities"]
    assert len(evaluated) == 5 and results["held-out bits per slide"] == evaluated[-1] < 0.5 and len(held_out) == 6
    assert {file.stem for file in (out / "heatmaps").iterdir() if file.stat().st_size > 1000} == set(held_out)
    with np.load(out / "embeddings.npz") as stored:
        assert stored["vector"].shape == (24, 32) and set(stored["slide_id"][stored["split"] == "test"]) == set(held_out)
        vectors = dict(zip(stored["slide_id"], stored["vector"], strict=True))
    # the saved model gives these vectors and these probabilities
    model = SlideEncoder.from_pretrained(out / "checkpoint")
    for name, probabilities in held_out.items():
        features, coords = (torch.tensor(x)[None] for x in tissue(int(name[1:]), shift=float(int(name[1:]) % 2)))
        with torch.no_grad():
            np.testing.assert_allclose(model.embed(features, coords)[0], vectors[name], atol=1e-5)
            np.testing.assert_allclose(model(features, coords)[0].softmax(-1), probabilities, atol=1e-4)
    nats = [-np.log2(probabilities[int(name[1:]) % 2]) for name, probabilities in held_out.items()]
    assert results["held-out bits per slide"] == pytest.approx(np.mean(nats), abs=1e-5)


def rewrite(change: Callable[[str], str]) -> Callable[[Path], None]:
    def labels(folder: Path) -> None:
        path = folder / "labels.csv"
        path.write_text(change(path.read_text()))

    return labels


def columns(text: str, **values: Callable[[int], str]) -> str:
    """The labels with more columns: of row i what its function says."""
    head, *rows = text.split()
    return "\n".join([",".join([head, *values]), *(",".join([row, *(f(i) for f in values.values())]) for i, row in enumerate(rows))])


def move_into(folder: Path, name: str) -> None:
    (folder / name).mkdir()
    for path in [path for path in folder.iterdir() if path.suffix in (".h5", ".pt", ".npz")]:
        path.rename(folder / name / path.name)


def damage(folder: Path, tile: int, value: float) -> None:
    features, coords = tissue(0)
    features[tile:] = value
    write(folder / "s00.h5", features, coords)


REFUSALS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no label": (rewrite(lambda text: text.replace("s05,class1", "s05,")), "no label for slide s05"),
    "no row": (rewrite(lambda text: text.replace("s05,class1\n", "")), "have no row, such as s05.npz: a file is named by its slide_id"),
    "no file": (lambda folder: (folder / "s01.pt").unlink(), "1 of 24 rows of "),
    "patient in two parts": (
        rewrite(lambda text: columns(text, case_id=lambda i: f"P{i // 2}", split=lambda i: "test" if i in (3, 4) else "train")),
        "patient P1 has slides in train (s02) and in test (s03)",
    ),
    "no patient": (rewrite(lambda text: columns(text, patient_id=lambda i: "P" * (i != 5))), "no patient_id for slide s05"),
    "split": (rewrite(lambda text: columns(text, split=lambda i: "held-out")), "expected train, val, test"),
    "a folder above": (lambda folder: move_into(folder, "h5_files"), "h5_files, which has"),
    "row twice": (rewrite(lambda text: text + "s05,class1\n"), "slide s05 twice"),
    "id twice": (lambda folder: write(folder / "s00.npz", *tissue(0)), "slide s00 has several files"),
    "columns": (rewrite(lambda text: text.replace("slide_id", "slide")), "expected slide_id, label"),
    "one class": (rewrite(lambda text: text.replace("class1", "class0")), "at least two classes"),
    "NaN": (lambda folder: damage(folder, 23, float("nan")), "it has 2 of 25 tiles with NaN"),
    "width": (lambda folder: write(folder / "s00.h5", np.zeros((4, 7)), np.zeros((4, 2))), "of width 7"),
    "no coords": (lambda folder: torch.save(torch.zeros(4, 12), folder / "s01.pt"), "holds a Tensor, and coords are needed"),
    "pickle": (lambda folder: torch.save({"features": folder}, folder / "s01.pt"), "not unpickled"),
    "damaged": (lambda folder: (folder / "s00.h5").write_bytes(b"no HDF5"), "s00.h5 cannot be read"),
    "two damaged": (
        lambda folder: [(folder / f"{name}.h5").write_bytes(b"no HDF5") for name in ("s00", "s03")],
        "write it again; neither can s03.h5",
    ),
    "outside": (lambda folder: write(folder / "s00.h5", np.zeros((4, 12)), np.full((4, 2), -1.0)), "coords from -1 to -1"),
    "empty": (lambda folder: write(folder / "s00.h5", np.zeros((0, 12)), np.zeros((0, 2))), "no tiles"),
    "held out": (
        rewrite(lambda text: columns(text, split=lambda i: "test" if i in (0, 2) else "train")),
        "no test slide has the label class1",
    ),
    "few": (rewrite(lambda text: text.replace("class1", "class0").replace("s05,class0", "s05,class1")), "cannot be split"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_is_wrong_is_said_in_one_line(case: str, tmp_path: Path, here: Callable[..., tuple[int, str, str]]) -> None:
    folder = make_folder(tmp_path / "features")
    spoil, text = REFUSALS[case]
    spoil(folder)
    code, _, error = here("slide_features.py", *inputs(folder), "--out", tmp_path / "out")
    assert code == 2 and error.startswith("slide_features.py: ") and text in error and error.count("\n") == 1, error
    assert not (tmp_path / "out").exists()


def test_a_patient_is_trained_on_or_held_out(tmp_path: Path) -> None:
    """In every fold, and each patient is held out once; the interval counts patients, of which there are a third as many."""
    folder, out = make_folder(tmp_path / "features", count=30), tmp_path / "out"

    def patient_of(i: int) -> str:
        # two slides of each class and one of the other: P0 has s00, s02, s04 …
        return f"P{i // 6}{i % 2}"

    rewrite(lambda text: columns(text, case_id=patient_of))(folder)
    (folder / "s31.npz").write_bytes((folder / "s05.npz").read_bytes())
    # files without rows are left out where that is asked for
    options = ["--epochs", "3", "--global-pool", "--folds", "3", "--skip-missing"]
    result = run(folder, out, *options)
    auc = auc_of(result)
    assert "30 slides of 10 patients (column case_id)" in result.stdout and "left out: 1 of 31 files in" in result.stdout
    everyone, held_out = {patient_of(i) for i in range(30)}, []
    for rows in map(table_of, sorted(out.glob("fold-*/predictions.csv"))):
        assert all(row["patient"] == patient_of(int(row["slide_id"][1:])) for row in rows)
        assert all(float(row["p(class0)"]) + float(row["p(class1)"]) == pytest.approx(1, abs=1e-5) for row in rows)
        train, test = ({row["patient"] for row in rows if row["split"] == part} for part in ("train", "test"))
        assert not train & test and train | test == everyone
        held_out += test
    assert sorted(held_out) == sorted(everyone)
    rows = table_of(out / "predictions.csv")
    assert len({row["slide_id"] for row in rows}) == len(rows) == 30 and {row["fold"] for row in rows} == {"1", "2", "3"}
    results = json.loads((out / "slides.json").read_text())
    low, high = results["AUC 95 %"]
    assert low <= results["AUC"] <= high and high - low > 0.1
    assert auc == pytest.approx(results["AUC"], abs=1e-4) == pytest.approx(np.mean(results["AUC of folds"]), abs=1e-4)
    again = script("--resume", str(out))
    assert again.stdout.count("going on with") == 3 and auc_of(again) == auc, again.stderr
    refused = run(folder, out, *options)
    assert refused.returncode == 2 and "holds the folds of a run" in refused.stderr
    refused = run(folder, folder / "features" / "run", "--epochs", "1")
    assert refused.returncode == 2 and "would be read as a slide; give another --out" in refused.stderr


def test_the_interval_of_an_auc_holds_its_true_value(part: Callable[[str], Any]) -> None:
    """Of few patients, in about 95 of 100 samples; also where the AUC is 1, and more patients make it narrower."""
    files = part("_slides")
    random = np.random.default_rng(0)

    def interval(scores: np.ndarray, slides_of_each: int = 1, folds: int = 1) -> Any:
        count = len(scores) // 2
        slides = [files.Slide(str(i), Path(), i // count, patient=str(i // slides_of_each)) for i in range(2 * count)]
        auc, low, high = files.auc_of([files.Tested(slides, np.stack((-scores, scores), 1))] * folds)
        assert low <= auc <= high
        return auc, low, high

    # two normal distributions this far apart have the AUC 0.9
    samples = [interval(np.concatenate((random.normal(size=6), random.normal(1.8124, size=6)))) for _ in range(200)]
    assert 180 <= sum(low <= 0.9 <= high for _, low, high in samples) <= 199
    (auc, few, _), (_, many, _) = (interval(np.arange(2.0 * n)) for n in (3, 12))
    assert auc == 1 and few < 0.6 < many < 0.9
    # as many slides of fewer patients say less; two folds say more than one
    assert interval(np.arange(24.0), 4)[1] == few < interval(np.arange(6.0), folds=2)[1]


def test_the_val_part_chooses_the_weights_of_three_classes(tmp_path: Path) -> None:
    """Labels of the training slides say nothing, so that the model gets worse the longer it trains."""
    folder, out = make_folder(tmp_path / "features", classes=3, count=36, shuffled=True), tmp_path / "out"
    rewrite(lambda text: columns(text, split=lambda i: "val" if i < 9 else "test" if i < 18 else "train"))(folder)
    result = run(folder, out, "--lr", "0.02", "--tune-encoder", "--epochs", "8", "--orders")
    auc = auc_of(result)
    assert "18 train, 9 val, 9 test" in result.stdout and "mean over classes" in result.stdout.splitlines()[-1]
    bits, rows, results = log_of(out, "held_out/bits"), table_of(out / "predictions.csv"), json.loads((out / "slides.json").read_text())
    assert min(bits) < bits[-1]
    tested = [row for row in rows if row["split"] == "test"]
    for part, wanted in (("val", min(bits)), ("test", results["held-out bits per slide"])):
        of_part = [-np.log2(float(row[f"p({row['label']})"])) for row in rows if row["split"] == part]
        assert np.mean(of_part) == pytest.approx(wanted, abs=1e-4)
    # of each class, the share of pairs in which its slide has the higher probability
    shares = []
    for name in results["classes"]:
        mine, others = ([float(row[f"p({name})"]) for row in tested if (row["label"] == name) is of_it] for of_it in (True, False))
        shares.append(np.mean([x > y for x in mine for y in others]))
    assert auc == pytest.approx(np.mean(shares), abs=1e-4)
    correlations = results["correlations of orders"]
    assert len(correlations) == 3 and all(len(values) == 9 and max(map(abs, values)) <= 1 for values in correlations.values())
    # a run that goes on still knows the best of those before
    (out / "checkpoint" / "model.safetensors").unlink()
    assert auc_of(script("--resume", str(out))) == auc and table_of(out / "predictions.csv") == rows


def apart(folder: Path, steps: Callable[[int], int], form: str = "", tiles: int | None = None) -> Path:
    """The slides as .h5 with tiles so many pixels apart, and attributes of tiles of 512 pixels as a tool writes them."""
    attributes: dict[str, dict[str, Any]] = {
        "": {},
        "CLAM": {"patch_size": 256, "patch_level": 1, "downsample": (2.0, 2.0), "name": "s"},
        "TRIDENT": {"patch_size": 256, "patch_size_level0": 512, "level0_magnification": 40, "target_magnification": 20, "overlap": 0},
    }
    for index in range(24):
        for file in folder.glob(f"s{index:02d}.*"):
            file.unlink()
        features, coords = tissue(index, shift=float(index % 2))
        with h5py.File(folder / f"s{index:02d}.h5", "w") as h5:
            h5["features"], h5["coords"] = features[:tiles], coords[:tiles] // 256 * steps(index)
            h5["coords"].attrs.update(attributes[form])
    return folder


@pytest.mark.parametrize(
    ("steps", "form", "tile_size", "text"),
    [
        (lambda _: 512, "", 256, "24 of 24 slides have tiles 512 pixels apart, such as s00; give --tile-size 512, or leave it out"),
        (lambda i: 256 if i % 2 else 512, "", 512, "12 of 24 slides have tiles 256 pixels apart, such as s01; leave it out, and each"),
        (lambda _: 512, "TRIDENT", None, "tiles 512 pixels apart, as their coords say"),
        (lambda i: 516 if i == 3 else 512, "", None, "coords of 1 slides with tiles 516 pixels apart are resized to 512, such as s03"),
        (lambda _: 1024, "TRIDENT", None, "s00 has tiles of 512 pixels 1024 apart: they do not touch (and 23 slides like it)"),
        (lambda _: 256, "CLAM", None, "s00 has tiles of 512 pixels 256 apart: they overlap (and 23 slides like it)"),
    ],
)
def test_the_pixels_between_tiles_are_read_or_compared(
    steps: Callable[[int], int], form: str, tile_size: int | None, text: str, tmp_path: Path, part: Callable[[str], Any]
) -> None:
    folder, files = apart(make_folder(tmp_path / "features"), steps, form), part("_slides")
    check = functools.partial(files.check, cells=1000, tile_size=tile_size)
    slides = files.find_slides(folder, folder / "labels.csv")
    if tile_size is not None:
        with pytest.raises(files.Refused, match=f"--tile-size is {tile_size}, and {text}"):
            check(slides)
        return
    checked = check(slides)
    assert any(text in note for note in checked.notes), checked.notes
    for slide in checked.all:
        assert torch.equal(slide.load(torch.device("cpu"))[1] // checked.tile_size, torch.tensor(tissue(0)[1]) // 256)
    # attributes count where coords say nothing, of slides of one tile
    apart(folder, steps, form, tiles=1)
    assert check(files.find_slides(folder, None)).tile_size == (512 if form else 256)


def test_a_slide_at_scattered_places_is_named(tmp_path: Path, part: Callable[[str], Any]) -> None:
    """It was trained on without a word."""
    folder, files = make_folder(tmp_path / "features"), part("_slides")
    for path in folder.glob("s05.*"):
        path.unlink()
    features, coords = tissue(5)
    scattered = np.random.default_rng(0).integers(0, 90_000, np.shape(coords))
    np.savez(folder / "s05.npz", features=features, coords=scattered)
    notes = files.check(files.find_slides(folder, None), cells=1000, tile_size=None).notes
    assert sum("1 slides have tiles at no common step, such as s05; look whether" in note for note in notes) == 1


def test_new_slides_are_embedded_and_predicted(tmp_path: Path) -> None:
    """By a run and its checkpoint folder; of slides at another magnification, and without labels."""
    folder, out, new = make_folder(tmp_path / "features"), tmp_path / "out", tmp_path / "new"
    auc_of(run(folder, out, "--global-pool", "--epochs", "30"))
    before = {row["slide_id"]: row for row in table_of(out / "predictions.csv")}
    shutil.copytree(folder, new)
    apart(new, lambda i: 512 if i < 10 else 256)
    # some tools keep the ending of the scan
    (new / "s05.h5").rename(new / "s05.SVS.h5")
    result = predict(new, out, out)
    assert result.returncode == 2 and f"--out {out} holds a run" in result.stderr
    result = predict(new, out, tmp_path / "by-run", "--heatmaps")
    assert result.returncode == 0, result.stderr
    assert "coords of 10 slides with tiles 512 pixels apart are resized to 256" in result.stdout
    assert result.stdout.splitlines()[-1] == f"done: 24 slides in {tmp_path / 'by-run'}"
    rows = table_of(tmp_path / "by-run" / "predictions.csv")
    assert list(rows[0]) == ["slide_id", "p(class0)", "p(class1)"]
    assert all(float(row["p(class1)"]) == pytest.approx(float(before[row["slide_id"]]["p(class1)"]), abs=1e-3) for row in rows)
    with np.load(tmp_path / "by-run" / "embeddings.npz") as stored, np.load(out / "embeddings.npz") as first:
        np.testing.assert_allclose(stored["vector"], first["vector"], atol=1e-3)
        assert stored["slide_id"].tolist() == first["slide_id"].tolist()
    assert len(list((tmp_path / "by-run" / "heatmaps").iterdir())) == 24
    # its checkpoint folder, with labels of which some have no file
    labels = new / "labels.csv"
    for text, options, code, said in (
        ("x00,class1\n", [], 2, "1 of 25 rows of"),
        ("x00,class1\n", ["--skip-missing"], 0, "AUC 1.0000 (95 %: 0."),
        ("x00,tumour\ns30,tumour\n", ["--skip-missing"], 2, "has the label tumour, and the checkpoint the classes class0, class1"),
    ):
        if "s30" in text:
            shutil.copy(new / "s05.SVS.h5", new / "s30.h5")
        labels.write_text((folder / "labels.csv").read_text() + text)
        result = predict(new, out / "checkpoint", tmp_path / "by-checkpoint", "--labels", str(labels), *options)
        assert result.returncode == code and said in result.stdout + result.stderr, result.stderr
        # the AUC is of slides that the run was trained on, too
        assert code or re.search(r"was trained on \d\d of the slides .*give --labels of others", result.stderr)
    # further training of a run's model, with its head
    (new / "s30.h5").unlink()
    shutil.copy(folder / "labels.csv", labels)
    result = script(*inputs(new), "--checkpoint", str(out), "--epochs", "1", "--lr", "1e-6", "--out", str(tmp_path / "further"), quick=True)
    assert auc_of(result) > 0.95 and "was trained on" not in result.stderr
    # other slides are held out
    again = ["--epochs", "1", "--lr", "1e-6", "--seed", "1", "--out", str(tmp_path / "other")]
    result = script(*inputs(new), "--checkpoint", str(out / "checkpoint"), *again, quick=True)
    told = re.search(r"was trained on (\d) of the slides that are held out here, such as (s\d\d): their AUC is too high", result.stderr)
    assert told and before[told[2]]["split"] == "train"
    assert int(told[1]) == sum(
        row["split"] == "test" != before[row["slide_id"]]["split"] for row in table_of(tmp_path / "other" / "predictions.csv")
    )


def test_weights_of_prov_gigapaths_family_embed_without_labels_and_keep_their_segments(tmp_path: Path) -> None:
    """Those that they were trained with, whatever the pixels of a tile."""
    folder = make_folder(tmp_path / "features")
    weights, maker = gigapath(tmp_path)
    result = predict(folder, weights, tmp_path / "embedded")
    assert result.returncode == 0, result.stderr
    assert {file.name for file in (tmp_path / "embedded").iterdir()} == {"embeddings.npz"}
    features, coords = (torch.tensor(x)[None] for x in tissue(0))
    with np.load(tmp_path / "embedded" / "embeddings.npz") as stored, torch.no_grad():
        np.testing.assert_allclose(load_slide_encoder(weights).eval()(features, coords)[0], stored["vector"][0], atol=1e-5)
    result = predict(folder, weights, tmp_path / "embedded", "--labels", str(folder / "labels.csv"))
    assert result.returncode == 2 and "has no classes" in result.stderr
    apart(folder, lambda _: 512)
    auc_of(script(*inputs(folder), "--checkpoint", str(weights), "--epochs", "2", "--out", str(tmp_path / "out")))
    model = SlideEncoder.from_pretrained(tmp_path / "out" / "checkpoint")
    assert model.config.tile_size == 512 and model.config.encoder.segment_lengths == (1024, 5792, 32768, 185363, 1048576)
    assert torch.equal(model.class_token.detach(), maker.weights["cls_token"].float().flatten())


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


@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_labels_are_separated_by_what_gives_their_columns(separator: str, part: Callable[[str], Any], tmp_path: Path) -> None:
    stage = '"T, N, M, grade"' if separator == ";" else '"T; N; M; grade"'
    rows = [["slide_id", stage, "label", "patient"], ["a.svs", "61,5" if separator == ";" else "61", "yes", "p"]]
    (tmp_path / "labels.csv").write_text("\n".join(map(separator.join, rows)))
    table, column = part("_slides").read_labels(tmp_path / "labels.csv")
    assert column == "patient" and [row["label"] for row in table.values()] == ["yes"]
