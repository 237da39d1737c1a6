"""A CSV of labels and the files of a folder: which slide is whose, and which are trained on, chosen by and held out."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from _slides import Refused, Slide, Slides

PARTS = ("train", "val", "test")
# columns of the labels that say whose a slide is; the first that there is counts
PATIENTS = ("patient_id", "patient", "case_id", "pat_id")
# endings of scans, which some tables have in their ids
SCANS = (".svs", ".ndpi", ".tif", ".tiff", ".mrxs")


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
    twice = [name for name, count in Counter(path.stem for path in paths).items() if count > 1]
    if twice:
        raise Refused(f"slide {twice[0]} has several files in {folder}; keep one")
    if labels_file is None:
        return Slides([Slide(path.stem, path) for path in paths], list(classes))
    rows, column = read_labels(labels_file)
    paired = [path for path in paths if path.stem in rows]
    names = {path.stem for path in paths}
    texts = [
        f"{len(missing)} of {count} {what}, such as {', '.join(missing[:2])}"
        for missing, count, what in (
            ([name for name in rows if name not in names], len(rows), f"rows of {labels_file} have no file in {folder}"),
            ([path.name for path in paths if path.stem not in rows], len(paths), f"files in {folder} have no row"),
        )
        if missing
    ]
    if texts and not (skip_missing and paired):
        raise Refused(f"{'; '.join(texts)}: a file is named by its slide_id; --skip-missing leaves {'these' if paired else 'all'} out")
    labels = {rows[path.stem]["label"] for path in paired}
    if classes and not labels <= set(classes):
        raise Refused(
            f"{labels_file} has the label {min(labels - set(classes))}, and the checkpoint the classes {', '.join(classes)}; "
            "leave --labels out, or name the classes alike"
        )
    classes = list(classes) or sorted(labels)
    slides = [
        Slide(path.stem, path, classes.index(row["label"]), row.get("split", ""), row[column] if column else path.stem)
        for path, row in ((path, rows[path.stem]) for path in paired)
    ]
    patients = len({slide.patient for slide in slides})
    whose = f"of {patients} patients (column {column})" if column else f"and no column {', '.join(PATIENTS)}: each counts as a patient"
    return Slides(slides, classes, (*(f"left out: {text}" for text in texts), f"{len(slides)} slides {whose}"))


def read_labels(path: Path) -> tuple[dict[str, dict[str, str]], str | None]:
    """{slide id: row} of a CSV, and the name of its column of patients."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError) as error:
        raise Refused(f"--labels {path} cannot be read ({error}); expected a CSV file with the columns slide_id and label") from error
    if not rows or not {"slide_id", "label"} <= set(rows[0]):
        raise Refused(f"--labels {path} has the columns {', '.join(map(str, rows[0])) if rows else 'of no row'}; expected slide_id, label")
    column = next((name for name in PATIENTS if name in rows[0]), None)
    row_of: dict[str, dict[str, str]] = {}
    for row in rows:
        name = row["slide_id"]
        name = Path(name).stem if name.lower().endswith(SCANS) else name
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
