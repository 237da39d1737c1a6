"""A folder of tile features and a CSV of labels: read and checked, before a model is made; the whole is refused for one bad file."""

from __future__ import annotations

import csv
import functools
import hashlib
import json
import pickle
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from recipe.task import generator_of

from dilated_attention.models import collate_slides

PARTS = ("train", "test")


class Refused(Exception):
    """What is wrong with the input, and one way out."""


@dataclass(frozen=True)
class Slide:
    """A slide: its id, file, class and part."""

    name: str
    path: Path
    target: int
    part: str

    def load(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """(features (L, width), coords (L, 2)) on the device."""
        features, coords = read(self.path)
        return features.to(device), coords.to(device)


@dataclass(frozen=True)
class Slides:
    """The slides of a folder, the names of their classes, and the width of their features."""

    all: list[Slide]
    classes: list[str]
    width: int

    def part(self, name: str) -> list[Slide]:
        return [slide for slide in self.all if slide.part == name]

    def fingerprint(self) -> str:
        """Of ids, labels, parts and sizes of the files: another one is another data set."""
        rows = [(slide.name, self.classes[slide.target], slide.part, slide.path.stat().st_size) for slide in self.all]
        return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]


@functools.lru_cache(maxsize=4)
def shuffled(count: int, seed: int, epoch: int) -> list[int]:
    """The order of an epoch: a function of (seed, epoch) alone, so that a run which goes on needs no state of it."""
    return torch.randperm(count, generator=generator_of(seed, epoch)).tolist()


def read(path: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Reads (features (L, width), coords (L, 2)), without pickle."""
    if path.suffix == ".h5":
        import h5py

        with h5py.File(path) as file:
            found = {name: np.asarray(file[name]) for name in file if isinstance(file[name], h5py.Dataset)}
    elif path.suffix == ".npz":
        with np.load(path, allow_pickle=False) as file:
            found = dict(file)
    else:
        try:
            found = torch.load(path, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError:
            raise Refused(
                f"{path} is damaged or holds other objects than tensors, which are not unpickled; save a dict of tensors"
            ) from None
        if not isinstance(found, dict):
            raise Refused(
                f"{path} holds a {type(found).__name__}, and coords are needed: use the .h5 file, or a dict of features and coords"
            )
    features, coords = found.get("features", found.get("tile_embeds")), found.get("coords")
    if features is None or coords is None:
        raise Refused(f"{path} holds {', '.join(map(str, found)) or 'nothing'}; expected features (L, width) and coords (L, 2)")
    # some tools write a batch of one
    features, coords = (x[0] if x.ndim == 3 and len(x) == 1 else x for x in (features, coords))
    try:
        tiles, places, _ = collate_slides([(features, coords)])
    except (TypeError, ValueError) as error:
        raise Refused(f"{path}: {str(error).replace('slide 0', 'it')}") from error
    return tiles[0], places[0]


def read_labels(path: Path) -> dict[str, tuple[str, str | None]]:
    """{slide id: (label, part)}; the part is None where the file has no column split."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError) as error:
        raise Refused(f"--labels {path} cannot be read ({error}); expected a CSV file with the columns slide_id and label") from error
    if not rows or not {"slide_id", "label"} <= set(rows[0]):
        raise Refused(f"--labels {path} has the columns {', '.join(map(str, rows[0])) if rows else 'of no row'}; expected slide_id, label")
    found: dict[str, tuple[str, str | None]] = {}
    for row in rows:
        name, label, part = row["slide_id"], row["label"], row.get("split")
        if name in found:
            raise Refused(f"--labels {path} has slide {name} twice; keep one row a slide")
        if not label:
            raise Refused(f"--labels {path} has no label for slide {name}; fill it in, or remove row and file")
        if "split" in row and part not in PARTS:
            raise Refused(f"--labels {path} has split {part!r} for slide {name}; expected train or test")
        found[name] = (label, part)
    return found


def find_slides(folder: Path, labels_file: Path, *, held_out: float, seed: int, extent: int) -> Slides:
    """Finds the slides, reads all files once and checks them.

    Args:
        held_out, seed: how slides are split where the labels have no column split.
        extent: pixels that coords must stay below.
    """
    labels = read_labels(labels_file)
    paths = sorted(path for path in folder.glob("*") if path.suffix in (".h5", ".npz", ".pt"))
    if not paths:
        raise Refused(f"{folder} has no .h5, .pt or .npz file; expected one a slide, named by its id")
    twice = [name for name, count in Counter(path.stem for path in paths).items() if count > 1]
    if twice:
        raise Refused(f"slide {twice[0]} has several files in {folder}; keep one")
    for names, text in (
        ([path.stem for path in paths if path.stem not in labels], f"a file in {folder} and no row in {labels_file}"),
        ([name for name in labels if name not in {path.stem for path in paths}], f"a row in {labels_file} and no file in {folder}"),
    ):
        if names:
            raise Refused(
                f"{len(names)} of {len(paths)} slides have {text}: {', '.join(names[:3])}{' …' * (len(names) > 3)}; they must agree"
            )
    classes = sorted({label for label, _ in labels.values()})
    if len(classes) < 2:
        raise Refused(f"all slides of {labels_file} have the label {classes[0]}; expected at least two classes")
    parts = [labels[path.stem][1] or "" for path in paths]
    targets = [classes.index(labels[path.stem][0]) for path in paths]
    if not all(parts):
        parts = split(targets, held_out, seed)
    for part in PARTS:
        missing = set(range(len(classes))) - {target for target, own in zip(targets, parts, strict=True) if own == part}
        if missing:
            raise Refused(f"no {part} slide has the label {classes[min(missing)]}; training and AUC need every class in both parts")
    widths: dict[int, Path] = {}
    for path in paths:
        try:
            features, coords = read(path)
        except (OSError, RuntimeError, ValueError, KeyError, EOFError) as error:
            raise Refused(f"{path} cannot be read: {' '.join(str(error).split())[:200]}; write it again") from error
        if not len(features):
            raise Refused(f"{path} has no tiles; remove it and its row")
        widths.setdefault(features.shape[1], path)
        if len(widths) > 1:
            (one, first), (two, second) = widths.items()
            raise Refused(f"{first} has features of width {one} and {second} of width {two}; use one tile encoder for all")
        if coords.min() < 0 or coords.max() >= extent:
            raise Refused(f"{path} has coords from {coords.min():g} to {coords.max():g}; expected 0 to {extent - 1} pixels")
    slides = [Slide(path.stem, path, target, part) for path, target, part in zip(paths, targets, parts, strict=True)]
    return Slides(slides, classes, next(iter(widths)))


def split(targets: list[int], held_out: float, seed: int) -> list[str]:
    """The part of each slide, at random, with the same share of each class."""
    from sklearn.model_selection import train_test_split

    try:
        _, test = train_test_split(range(len(targets)), test_size=held_out, stratify=targets, random_state=seed % 2**32)
    except ValueError as error:
        raise Refused(f"the slides cannot be split: {error}; label more slides, or give a column split") from error
    return ["test" if index in set(test) else "train" for index in range(len(targets))]
