"""A folder of tile features: files are read and checked, before a model is made; the whole is refused for one bad file."""

from __future__ import annotations

import functools
import hashlib
import json
import pickle
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from recipe.log import tqdm
from recipe.task import generator_of

from dilated_attention.models import collate_slides, tile_step

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
    for slide in progress(slides.all, "reading"):
        try:
            tiles = read(slide.path)
        except (OSError, RuntimeError, ValueError, KeyError, EOFError) as error:
            raise Refused(f"{slide.path} cannot be read: {' '.join(str(error).split())[:200]}; write it again") from error
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
        notes.append(f"coords of {len(resized)} slides with tiles {between} pixels apart are resized to {size}")
    for slide in slides.all:
        low, high = (x / (resized.get(slide.name, size)) for x in reach[slide.name])
        if low < 0 or high >= cells:
            low, high = reach[slide.name]
            raise Refused(f"{slide.path} has coords from {low:g} to {high:g}; expected at least 0, and less than {cells} tiles of {size}")
    known = "as their coords say" if counts else "which nothing in the files says: no neighbours among them"
    notes.append(f"tiles {size} pixels apart, {known}; features of width {min(widths)}")
    all_slides = [replace(slide, step=resized.get(slide.name, size), cell=size) for slide in slides.all]
    return replace(slides, all=all_slides, notes=(*slides.notes, *notes), width=min(widths), tile_size=size)
