"""A folder of tile features and a CSV of labels: files and rows are read and checked before a model is made, and all are refused for one
bad file. Which slides are trained on, chosen by and held out; and what is written of them.
"""

from __future__ import annotations

import csv
import functools
import hashlib
import json
import pickle
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from recipe.log import tqdm
from recipe.trainer import generator_of

from dilated_attention.models import collate_slides, tile_step

PARTS = ("train", "val", "test")
# columns of the labels that say whose a slide is; the first that there is counts
PATIENTS = ("patient_id", "patient", "case_id", "pat_id")
# endings of scans, which some tables have in their ids
SCANS = (".svs", ".ndpi", ".tif", ".tiff", ".mrxs")
T = TypeVar("T")


class Refused(Exception):
    """What is wrong with the input, and one way out."""


def progress(items: Sequence[T], text: str) -> Iterator[T]:
    """The items behind a progress bar, of what takes more than two seconds; a file gets a state each half minute."""
    with tqdm(items, desc=text, unit="slide", dynamic_ncols=True, delay=2.0, mininterval=1.0 if sys.stderr.isatty() else 30.0) as bar:
        yield from bar


def tell_of_class_token() -> None:
    print("the class token of Prov-GigaPath's released weights was never trained: --global-pool takes the mean of the tiles")


def model_folder(path: Path) -> Path:
    """The folder of the model, of a run or itself."""
    return path / "checkpoint" if (path / "checkpoint").is_dir() else path


def trained_on(path: Path) -> set[str]:
    """The slides of which a run, or that of a checkpoint's folder, has taken its weights, as far as its table says."""
    table = next((file for file in (path / "predictions.csv", path.parent / "predictions.csv") if file.is_file()), None)
    if table is None:
        return set()
    with table.open(newline="", encoding="utf-8") as file:
        return {row["slide_id"] for row in csv.DictReader(file) if row.get("split") in ("train", "val")}


def warn_of_trained(path: Path | None, names: set[str], way_out: str) -> None:
    """Warns of slides to score that a run's weights were trained on."""
    if path is not None and (seen := trained_on(path) & names):
        text = f"{path} was trained on {len(seen)} of the slides that are held out here, such as {min(seen)}: their AUC is too high"
        warnings.warn(f"{text}; {way_out}", stacklevel=2)


@dataclass(frozen=True)
class Slide:
    """A slide: its id and file; class, part, patient and fold as far as it has labels; pixels between its tiles, and of a cell."""

    name: str
    path: Path
    target: int | None = None
    part: str = ""
    patient: str = ""
    fold: int = 0
    step: float = 1.0
    cell: float = 1.0

    def load(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """(features (L, width), coords (L, 2)) on the device; tiles are a cell apart."""
        tiles = read(self.path)
        # first the division: it is exact at the edge of a cell, where a rounded number would fall into the cell before
        coords = tiles.coords if self.step == self.cell else tiles.coords.double() / self.step * self.cell
        return tiles.features.to(device), coords.to(device)


@dataclass(frozen=True)
class Slides:
    """The slides of a folder, the names of their classes, and what ``check`` found: the width of features, the pixels of a cell.

    ``notes`` are lines for the user.
    """

    all: list[Slide]
    classes: list[str]
    notes: tuple[str, ...] = ()
    width: int = 0
    tile_size: int = 0

    def part(self, name: str) -> list[Slide]:
        return [slide for slide in self.all if slide.part == name]

    def with_fold(self, fold: int) -> Slides:
        """The same where the slides of one fold are held out."""
        return replace(self, all=[replace(slide, part="test" if slide.fold == fold else "train") for slide in self.all])

    def fingerprint(self) -> str:
        """Of ids, labels, parts and sizes of the files: another one is another data set."""
        rows = [(slide.name, self.class_of(slide), slide.part, slide.path.stat().st_size) for slide in self.all]
        return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]

    def class_of(self, slide: Slide) -> str:
        return "" if slide.target is None else self.classes[slide.target]


@functools.lru_cache(maxsize=4)
def shuffled(count: int, seed: int, epoch: int) -> list[int]:
    """The order of an epoch: a function of (seed, epoch) alone, so that a run which goes on needs no state of it."""
    return torch.randperm(count, generator=generator_of(seed, epoch)).tolist()


@dataclass(frozen=True)
class Tiles:
    """features (L, width) and coords (L, 2); pixels of level 0 that a tile covers, and from one to the next; None where nothing says it."""

    features: torch.Tensor
    coords: torch.Tensor
    size: float | None
    step: float | None


def read(path: Path) -> Tiles:
    """Reads a slide's file, without pickle."""
    attributes: dict[str, Any] = {}
    if path.suffix == ".h5":
        import h5py

        with h5py.File(path) as file:
            arrays = {name: np.asarray(file[name]) for name in file if isinstance(file[name], h5py.Dataset)}
            attributes = {**file.attrs, **(file["coords"].attrs if "coords" in arrays else {})}
    elif path.suffix == ".npz":
        with np.load(path, allow_pickle=False) as file:
            arrays = dict(file)
    else:
        try:
            arrays = torch.load(path, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError:
            raise Refused(
                f"{path} is damaged or holds other objects than tensors, which are not unpickled; save a dict of tensors"
            ) from None
        if not isinstance(arrays, dict):
            raise Refused(
                f"{path} holds a {type(arrays).__name__}, and coords are needed: use the .h5 file, or a dict of features and coords"
            )
    features, coords = arrays.get("features", arrays.get("tile_embeds")), arrays.get("coords")
    if features is None or coords is None:
        raise Refused(f"{path} holds {', '.join(map(str, arrays)) or 'nothing'}; expected features (L, width) and coords (L, 2)")
    # some tools write a batch of one
    features, coords = (x[0] if x.ndim == 3 and len(x) == 1 else x for x in (features, coords))
    try:
        tiles, places, _ = collate_slides([(features, coords)])
    except (TypeError, ValueError) as error:
        raise Refused(f"{path}: {str(error).replace('slide 0', 'it')}") from error
    size, step = stated_size(attributes)
    return Tiles(tiles[0], places[0], size, tile_step(places[0]) or step)


def stated_size(attributes: Mapping[str, Any]) -> tuple[float | None, float | None]:
    """Pixels of level 0 that a tile covers, and from one to the next, by an .h5 file's attributes as TRIDENT and CLAM write them."""
    value = {name: float(np.ravel(x)[0]) for name, x in attributes.items() if np.asarray(x).dtype.kind in "iuf" and np.size(x)}
    side = value.get("patch_size")
    size = value.get("patch_size_level0")
    if size is None and side is not None and ("downsample" in value or not value.get("patch_level")):
        size = side * value.get("downsample", 1.0)
    if not size:
        return None, None
    return size, size * (1 - value.get("overlap", 0.0) / side) if side else size


def check(slides: Slides, *, tile_size: int | None, cells: int, is_fixed: bool = False) -> Slides:
    """Reads all files once, and sets what pixels there are between tiles.

    Args:
        tile_size: pixels of a cell; None: what most slides have between their tiles.
        cells: of the grid's side.
        is_fixed: tile_size is that of a trained model, and slides of other steps are resized to it; else they are refused.
    """
    widths: dict[int, Path] = {}
    steps: dict[str, float | None] = {}
    apart: list[str] = []
    reach: dict[str, tuple[float, float]] = {}
    unreadable: dict[Path, str] = {}
    for slide in progress(slides.all, "reading"):
        try:
            tiles = read(slide.path)
        except (OSError, RuntimeError, ValueError, KeyError, EOFError) as error:
            unreadable[slide.path] = " ".join(str(error).split())[:200]
            continue
        if not len(tiles.features):
            raise Refused(f"{slide.path} has no tiles; remove it and its row")
        widths.setdefault(tiles.features.shape[1], slide.path)
        if len(widths) > 1:
            (width, path), (other_width, other) = widths.items()
            raise Refused(f"{path} has features of width {width} and {other} of width {other_width}; use one tile encoder for all")
        steps[slide.name] = tiles.step
        reach[slide.name] = float(tiles.coords.min()), float(tiles.coords.max())
        if tiles.size and tiles.step and abs(tiles.step - tiles.size) > tiles.size / 20:
            text = "overlap" if tiles.step < tiles.size else "do not touch"
            apart.append(f"{slide.name} has tiles of {tiles.size:g} pixels {tiles.step:g} apart: they {text}")
    if unreadable:
        (path, why), *others = unreadable.items()
        also = f"; neither can {', '.join(other.name for other, _ in others[:8])}{' …' * (len(others) > 8)}" if others else ""
        raise Refused(f"{path} cannot be read: {why}; write it again{also}")
    notes = [f"{apart[0]} (and {len(apart) - 1} slides like it)" if len(apart) > 1 else apart[0]] if apart else []
    counts = Counter(step for step in steps.values() if step)
    usual = counts.most_common(1)[0][0] if counts else 256.0
    odd = [name for name, step in steps.items() if tile_size and step and abs(step - tile_size) > tile_size / 20]
    if odd and not is_fixed:
        way = f"give --tile-size {usual:g}, or leave it out" if len(counts) == 1 else "leave it out, and each slide has its own step"
        raise Refused(
            f"--tile-size is {tile_size}, and {len(odd)} of {len(steps)} slides have tiles {steps[odd[0]]:g} pixels apart, such as "
            f"{odd[0]}; {way}"
        )
    size = tile_size or max(1, round(usual))
    resized = {name: step for name, step in steps.items() if step and step != size}
    if resized:
        low, high = min(resized.values()), max(resized.values())
        between = f"{low:g}" if low == high else f"{low:g} to {high:g}"
        notes.append(
            f"coords of {len(resized)} slides with tiles {between} pixels apart are resized to {size}, such as {next(iter(resized))}"
        )
    if counts and (scattered := [name for name, step in steps.items() if not step]):
        notes.append(f"{len(scattered)} slides have tiles at no common step, such as {scattered[0]}; look whether their coords are pixels")
    for slide in slides.all:
        low, high = (x / (resized.get(slide.name, size)) for x in reach[slide.name])
        if low < 0 or high >= cells:
            low, high = reach[slide.name]
            raise Refused(f"{slide.path} has coords from {low:g} to {high:g}; expected at least 0, and less than {cells} tiles of {size}")
    known = "as their coords say" if counts else "which nothing in the files says: no neighbours among them"
    notes.append(f"tiles {size} pixels apart, {known}; features of width {min(widths)}")
    all_slides = [replace(slide, step=resized.get(slide.name, size), cell=size) for slide in slides.all]
    return replace(slides, all=all_slides, notes=(*slides.notes, *notes), width=min(widths), tile_size=size)


def slide_id(name: str) -> str:
    """The name of a slide without the ending of its scan, which some tools keep in rows, and some in files: ID.svs.h5."""
    return Path(name).stem if name.lower().endswith(SCANS) else name


def find_slides(folder: Path, labels_file: Path | None, *, skip_missing: bool = False, classes: Sequence[str] = ()) -> Slides:
    """Finds the files of slides, and their rows in the labels.

    Args:
        skip_missing: leave out rows without files and files without rows, instead of refusing them.
        classes: names that labels are to have; none: as many as the labels have.
    """
    paths, inside = (sorted(path for path in folder.glob(where) if path.suffix in (".h5", ".npz", ".pt")) for where in ("*", "*/*"))
    if not paths:
        way = f"give {inside[0].parent}, which has" if inside else "expected one a slide, named by its id"
        raise Refused(f"{folder} has no .h5, .pt or .npz file; {way}")
    ids = [slide_id(path.stem) for path in paths]
    twice = [name for name, count in Counter(ids).items() if count > 1]
    if twice:
        raise Refused(f"slide {twice[0]} has several files in {folder}; keep one")
    if labels_file is None:
        return Slides([Slide(name, path) for name, path in zip(ids, paths, strict=True)], list(classes))
    rows, column = read_labels(labels_file)
    paired = {name: path for name, path in zip(ids, paths, strict=True) if name in rows}
    texts = [
        f"{len(missing)} of {count} {what}, such as {', '.join(missing[:2])}"
        for missing, count, what in (
            ([name for name in rows if name not in paired], len(rows), f"rows of {labels_file} have no file in {folder}"),
            ([path.name for name, path in zip(ids, paths, strict=True) if name not in rows], len(paths), f"files in {folder} have no row"),
        )
        if missing
    ]
    if texts and not (skip_missing and paired):
        raise Refused(f"{'; '.join(texts)}: a file is named by its slide_id; --skip-missing leaves {'these' if paired else 'all'} out")
    labels = {rows[name]["label"] for name in paired}
    if classes and not labels <= set(classes):
        raise Refused(
            f"{labels_file} has the label {min(labels - set(classes))}, and the checkpoint the classes {', '.join(classes)}; "
            "leave --labels out, or name the classes alike"
        )
    classes = list(classes) or sorted(labels)
    slides = [
        Slide(name, path, classes.index(row["label"]), row.get("split", ""), row[column] if column else name)
        for name, path, row in ((name, path, rows[name]) for name, path in paired.items())
    ]
    patients = len({slide.patient for slide in slides})
    whose = f"of {patients} patients (column {column})" if column else f"and no column {', '.join(PATIENTS)}: each counts as a patient"
    return Slides(slides, classes, (*(f"left out: {text}" for text in texts), f"{len(slides)} slides {whose}"))


def read_labels(path: Path) -> tuple[dict[str, dict[str, str]], str | None]:
    """{slide id: row} of a CSV (commas, semicolons or tabs between them), and the name of its column of patients."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            lines = list(file)
    except (OSError, UnicodeDecodeError) as error:
        raise Refused(f"--labels {path} cannot be read ({error}); expected a CSV file with the columns slide_id and label") from error
    # spreadsheets write semicolons where a comma is the decimal sign, and tabs
    tables = [list(csv.DictReader(lines, delimiter=delimiter)) for delimiter in ",;\t"]
    rows = next((table for table in tables if table and {"slide_id", "label"} <= set(table[0])), tables[0])
    if not rows or not {"slide_id", "label"} <= set(rows[0]):
        raise Refused(f"--labels {path} has the columns {', '.join(map(str, rows[0])) if rows else 'of no row'}; expected slide_id, label")
    column = next((name for name in PATIENTS if name in rows[0]), None)
    row_of: dict[str, dict[str, str]] = {}
    for row in rows:
        name = slide_id(row["slide_id"])
        if name in row_of:
            raise Refused(f"--labels {path} has slide {name} twice; keep one row a slide")
        for needed in ("label", column):
            if needed and not row[needed]:
                raise Refused(f"--labels {path} has no {needed} for slide {name}; fill it in, or remove row and file")
        if "split" in row and row["split"] not in PARTS:
            raise Refused(f"--labels {path} has split {row['split']!r} for slide {name}; expected {', '.join(PARTS)}")
        row_of[name] = row
    return row_of, column


def with_parts(slides: Slides, *, held_out: float, folds: int | None, seed: int) -> Slides:
    """Gives each slide its part, or its fold: that of the labels' column split, else at random. A patient's slides stay together."""
    if len(slides.classes) < 2:
        raise Refused(f"all slides have the label {slides.classes[0]}; expected at least two classes")
    if any(slide.part for slide in slides.all):
        if folds:
            raise Refused("the labels have a column split, which --folds would not follow; leave out one of the two")
        parts: dict[str, Slide] = {}
        for slide in slides.all:
            other = parts.setdefault(slide.patient, slide)
            if other.part != slide.part:
                raise Refused(
                    f"patient {slide.patient} has slides in {other.part} ({other.name}) and in {slide.part} ({slide.name}); "
                    "expected all of a patient in one part"
                )
    else:
        slides = replace(slides, all=drawn(slides.all, held_out, folds, seed))
    for fold in range(folds or 1):
        turn = slides.with_fold(fold) if folds else slides
        for part in ("train", "test"):
            missing = set(range(len(slides.classes))) - {slide.target for slide in turn.part(part)}
            if missing:
                where = f"{part} slide of fold {fold + 1}" if folds else f"{part} slide"
                raise Refused(f"no {where} has the label {slides.classes[min(missing)]}; training and AUC need every class in both parts")
    return slides


def drawn(slides: list[Slide], held_out: float, folds: int | None, seed: int) -> list[Slide]:
    """The slides with parts or folds drawn at random: of each class about the same share."""
    from sklearn.model_selection import StratifiedGroupKFold, train_test_split

    seed %= 2**32
    try:
        if folds:
            groups = [slide.patient for slide in slides]
            splitter = StratifiedGroupKFold(folds, shuffle=True, random_state=seed)
            turns = splitter.split(np.zeros(len(slides)), [slide.target for slide in slides], groups)
            fold_of = {index: fold for fold, (_, test) in enumerate(turns) for index in test}
            return [replace(slide, fold=fold_of[index]) for index, slide in enumerate(slides)]
        targets: dict[str, Counter[int | None]] = {}
        for slide in slides:
            targets.setdefault(slide.patient, Counter())[slide.target] += 1
        usual = [counts.most_common(1)[0][0] for counts in targets.values()]
        _, test = train_test_split(list(targets), test_size=held_out, stratify=usual, random_state=seed)
    except ValueError as error:
        way = "give fewer --folds" if folds else "give a column split"
        raise Refused(f"the slides cannot be split: {error}; label more slides, or {way}") from error
    return [replace(slide, part="test" if slide.patient in set(test) else "train") for slide in slides]


@dataclass(frozen=True)
class Tested:
    """Held-out slides of one training, and their probabilities (slides, classes)."""

    slides: list[Slide]
    probabilities: np.ndarray

    def auc(self, class_index: int) -> float:
        """Of one class against the rest: the share of pairs of slides, one of the class, in which that one has the higher probability."""
        from sklearn.metrics import roc_auc_score

        return float(roc_auc_score([slide.target == class_index for slide in self.slides], self.probabilities[:, class_index]))

    def patients(self, class_index: int) -> tuple[int, int]:
        """Patients with a slide of the class, and with one of another class."""
        inside, outside = ({slide.patient for slide in self.slides if (slide.target == class_index) is of_it} for of_it in (True, False))
        return len(inside), len(outside)


def auc_of(folds: list[Tested]) -> tuple[float, float, float]:
    """(AUC, lower and upper end of its 95 % interval), the mean over folds.

    Of two classes the second one's, else the mean over classes of each against the rest, and of the ends. The interval holds the values θ
    from which the AUC differs by at most 1.96 standard deviations, with Hanley and McNeil's variance at θ (Newcombe 2006, method 5). So an
    AUC of 1 has one, too, where a bootstrap's is a point. It counts patients: two slides of one patient are not two observations.
    """
    from scipy.optimize import brentq

    classes = folds[0].probabilities.shape[1]
    rows = []
    for index in [1] if classes == 2 else range(classes):
        auc = float(np.mean([fold.auc(index) for fold in folds]))
        counts = [fold.patients(index) for fold in folds]

        def excess(theta: float, auc: float = auc, counts: list[tuple[int, int]] = counts) -> float:
            deviation = np.sqrt(sum(variance(theta, *count) for count in counts)) / len(counts)
            return abs(auc - theta) - 1.96 * deviation

        low = brentq(excess, 0.0, auc - 1e-9) if auc > 1e-9 else 0.0
        high = brentq(excess, auc + 1e-9, 1.0) if auc < 1 - 1e-9 else 1.0
        rows.append((auc, low, high))
    auc, low, high = (float(x) for x in np.mean(rows, axis=0))
    return auc, low, high


def variance(theta: float, inside: int, outside: int) -> float:
    """Of an AUC whose true value is theta, from so many independent members of the class and others."""
    pairs = (1 - theta) / (2 - theta) + theta / (1 + theta)
    return theta * (1 - theta) * (1 + ((inside + outside) / 2 - 1) * pairs) / (inside * outside)


def save_table(path: Path, slides: Slides, chosen: list[Slide], probabilities: np.ndarray, *, folds: bool = False) -> None:
    """Writes a row a slide: slide_id, patient, label, split or fold, as far as known, and the probability of each class."""
    known = {
        "patient": lambda slide: slide.patient,
        "label": slides.class_of,
        "fold" if folds else "split": (lambda slide: str(slide.fold + 1)) if folds else lambda slide: slide.part,
    }
    known = {name: value for name, value in known.items() if any(map(value, chosen))}
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["slide_id", *known, *(f"p({name})" for name in slides.classes)])
        for slide, row in zip(chosen, probabilities, strict=True):
            writer.writerow([slide.name, *(value(slide) for value in known.values()), *(f"{p:.6f}" for p in row)])


def save_vectors(path: Path, slides: Slides, vectors: np.ndarray) -> None:
    """Writes vectors (slides, E) with ids, labels and parts; labels and parts are empty where there are none."""
    np.savez(
        path,
        slide_id=np.array([slide.name for slide in slides.all]),
        vector=vectors,
        label=np.array([slides.class_of(slide) for slide in slides.all]),
        split=np.array([slide.part for slide in slides.all]),
    )
