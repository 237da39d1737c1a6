"""What a slide encoder is given: tiles on a grid and their positions, packed slides of unequal length; and checks of all of it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import default_collate

from dilated_attention.models.text import has_values
from dilated_attention.pattern.checks import as_int_tuple, one_of, shown
from dilated_attention.validation import not_a_tensor


def check_coords_dtype(name: str, coords: torch.Tensor) -> None:
    if (coords.is_floating_point() and coords.itemsize < 4) or coords.dtype is torch.bool or coords.is_complex():
        raise TypeError(f"{name} has dtype {coords.dtype}, which does not hold pixel coordinates; use float32 or int64")


def check_finite_coords(what: str, coords: torch.Tensor) -> None:
    if not coords.isfinite().all():
        raise ValueError(f"{what} has NaN or infinite coords; expected pixels at level 0")


def grid_positions(
    coords: torch.Tensor, embed_dim: int, *, tile_size: int = 256, grid_size: int = 1000, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Computes fixed 2-D sine-cosine positions (…, embed_dim) of tiles at pixel coordinates (…, 2), for these tiles alone.

        position(x, y) = [table(y); table(x)],    table(p) = [sin(p·ω); cos(p·ω)],    ω_i = 10000^(−4i/E)

    x and y are the first and the second coordinate in tiles. The second comes first, as in Prov-GigaPath, where this is row 1 + x·grid_size
    + y of the table. Its row 0, for the class token, is zeros and needs no function.

    Args:
        coords: pixel coordinates, float32, float64 or integers; TypeError for a dtype that rounds them.
        embed_dim: E, a multiple of 4.
        tile_size: side of a tile in pixels.
        grid_size: side of the grid in cells. It bounds the coordinates and changes no position. ValueError for a cell outside. This reads
            the values, so a GPU makes the host wait; where it cannot (torch.compile, a CUDA graph), each run asserts on the device.
        dtype: of the result; None for torch's default. Positions are computed in float64 in any case.

    Differs from Prov-GigaPath: the table takes (grid_size, E/2) instead of (grid_size² + 1, E), which is 3 GB for E = 768; and a coordinate
    outside the grid is refused instead of wrapping into another row.
    """
    check_coords_dtype("coords", coords)
    # in 64 bits, because a narrower integer may not be able to hold the tile size
    coords = coords if coords.is_floating_point() else coords.long()
    cells = coords.div(tile_size, rounding_mode="floor")
    if torch.compiler.is_compiling() or (cells.is_cuda and torch.cuda.is_current_stream_capturing()):
        # not in eager mode: after a failed assertion a process cannot use its GPU any more, while a ValueError names the tile
        inside = ((cells >= 0) & (cells < grid_size)).all()
        torch._assert_async(inside, f"coords are outside the grid of {grid_size} cells per side at tile_size {tile_size}")
    elif cells.device.type != "meta" and cells.numel():
        low, high = torch.stack(torch.aminmax(cells)).tolist()
        if not 0 <= low <= high < grid_size:
            check_finite_coords("a tile", coords)
            raise ValueError(
                f"coords reach from cell {int(low)} to cell {int(high)} at tile_size {tile_size}; expected cells from 0 to grid_size − 1 = "
                f"{grid_size - 1}: subtract the slide's origin, or raise grid_size, which changes no other cell's position"
            )
    # Apple's GPUs have no float64
    home = torch.device("cpu") if cells.device.type == "mps" else cells.device
    omega = 10000.0 ** (torch.arange(embed_dim // 4, dtype=torch.float64, device=home) * (-4 / embed_dim))
    angles = torch.arange(grid_size, dtype=torch.float64, device=home)[:, None] * omega
    table = torch.cat((angles.sin(), angles.cos()), dim=1)
    table = table.to(device=cells.device, dtype=torch.get_default_dtype() if dtype is None else dtype)
    return table[cells.long().flip(-1)].flatten(-2)


def checked_slides(tiles: Any, coords: Any, cu_seqlens: Any, in_dim: int) -> list[int] | None:
    """Checks types and shapes, and returns the bounds of packed slides."""
    if not isinstance(tiles, torch.Tensor) or not isinstance(coords, torch.Tensor):
        raise TypeError(f"tiles and coords are {type(tiles).__name__} and {type(coords).__name__}; expected two tensors")
    if tiles.ndim != 3 or tiles.shape[2] != in_dim:
        raise ValueError(f"tiles has shape {tuple(tiles.shape)}; expected (slides, tiles, in_dim) with in_dim = {in_dim}")
    _check_features_dtype("tiles", tiles)
    if tuple(coords.shape) != (*tiles.shape[:2], 2):
        raise ValueError(
            f"coords has shape {tuple(coords.shape)} and tiles has {tuple(tiles.shape)}; expected one pair of pixels for each tile, "
            f"{(*tiles.shape[:2], 2)}"
        )
    if cu_seqlens is None:
        return None
    if not isinstance(cu_seqlens, torch.Tensor) or cu_seqlens.dtype not in (torch.int32, torch.int64) or cu_seqlens.ndim != 1:
        raise TypeError(f"cu_seqlens is {cu_seqlens!r}; expected an int32 tensor (slides + 1,), as returned by collate_slides")
    if tiles.shape[0] != 1:
        raise ValueError(
            f"cu_seqlens with {tiles.shape[0]} rows of tiles; packed slides are one row: expected tiles (1, all tiles, in_dim)"
        )
    bounds: list[int] = cu_seqlens.tolist()
    return bounds


def _check_features_dtype(name: str, tiles: torch.Tensor) -> None:
    if not tiles.is_floating_point():
        raise TypeError(f"{name} has dtype {tiles.dtype}; expected features of a floating dtype, such as float16")


def rows_of_slides(query_rows: Any, bounds: list[int]) -> list[int]:
    """Converts indices within each slide to rows of the packed sequence."""
    if isinstance(query_rows, str):
        one_of("query_rows", query_rows, ("cls",), also="or integers")
        return bounds[:-1]
    places = as_int_tuple("query_rows", query_rows if not isinstance(query_rows, int) else (query_rows,))
    for slide, (start, end) in enumerate(itertools.pairwise(bounds)):
        for place in places:
            if not 0 <= place < end - start:
                raise ValueError(
                    f"query_rows has {place}, and slide {slide} has places 0 to {end - start - 1}; choose one that all slides have"
                )
    return [start + place for start in bounds[:-1] for place in places]


def check_finite(tiles: torch.Tensor, bounds: list[int], *, is_shard: bool = False, waits: bool = False) -> None:
    """Raises ValueError if features (B, L, in_dim) are NaN or infinite; only on the CPU, unless ``waits`` allows waiting for the device."""
    if not tiles.numel() or not has_values(tiles, waits=waits) or all(math.isfinite(x) for x in torch.stack(torch.aminmax(tiles)).tolist()):
        return
    bad = ~tiles.isfinite().all(dim=-1)
    rows = bad if is_shard or len(bounds) == 2 else bad[0].tensor_split(bounds[1:-1])
    slide, row = next((slide, row) for slide, row in enumerate(rows) if row.any())
    name = f"this process's shard of row {slide}" if is_shard else f"slide {slide}"
    raise ValueError(
        f"{name} has {int(row.sum()):,} of {len(row):,} tiles with NaN or infinite features in {tiles.dtype}, the first is tile "
        f"{int(row.int().argmax())}; leave such tiles out together with their coords, or embed them again"
    )


def tile_step(coords: torch.Tensor) -> float | None:
    """Returns the pixels between neighbouring tiles of one slide, the median over its rows and columns: the ``tile_size`` of its grid.

    Args:
        coords: (L, 2), each tile's x and y, in any order, on any device: the host reads them.

    Returns:
        The step; 0.0 if tiles lie on each other; None if there is no one step: for scattered tiles, a small share of a grid, few tiles.

    >>> tile_step(coords)
    512.0
    """
    if not isinstance(coords, torch.Tensor):
        raise not_a_tensor("coords", coords, "a tensor (tiles, 2)")
    if coords.ndim != 2 or coords.shape[1] != 2:
        raise ValueError(f"coords has shape {tuple(coords.shape)}; expected (tiles, 2), x and y of one slide's tiles")
    places = coords.detach().cpu().double()
    check_finite_coords("a tile", places)
    steps = []
    for line, along in (places.unbind(1), places.flip(1).unbind(1)):
        order = along.argsort()
        order = order[line[order].argsort(stable=True)]
        steps.append(along[order].diff()[line[order].diff() == 0])
    between = torch.cat(steps)
    # a whole grid has nearly two neighbours a tile
    if len(between) < max(8, len(places) / 2):
        return None
    step = float(between.median())
    is_step = (between - step).abs() <= 0.01 * step
    return step if 2 * int(is_step.sum()) >= len(between) else None


def wrong_step(coords: torch.Tensor, bounds: list[int], tile_size: int) -> str | None:
    """Describes the first slide whose tiles are not ``tile_size`` pixels apart, by more than a twentieth; None if there is none. Tiles
    without a common step are told of if there are two or more of them for each cell that has any, or if none touches another though as many
    at random places would."""
    for slide, places in enumerate(coords if len(bounds) == 2 else coords[0].tensor_split(bounds[1:-1])):
        step = tile_step(places)
        if not step:
            cells = places.double().div(tile_size, rounding_mode="floor").unique(dim=0)
            square = f"cells of {tile_size} × {tile_size} pixels"
            if len(places) and 2 * len(cells) <= len(places):
                return (
                    f"the {len(places)} tiles of slide {slide} lie in {len(cells)} {square}, so several get one position; expected the x "
                    "and y of each tile in pixels at level 0"
                )
            if _never_touch(cells):
                return (
                    f"no two of the {len(places)} tiles of slide {slide} lie in neighbouring {square}, so they never touch; expected "
                    "tile_size to be the pixels at level 0 that a tile covers, such as 512 for 256 pixels at 20× of a slide scanned at 40× "
                    f"(TRIDENT's patch_size_level0): make the model with it, or multiply coords by {tile_size} / it"
                )
        elif abs(step - tile_size) > tile_size / 20:
            result = "several tiles get one position" if step < tile_size else "cells between them stay empty"
            resize = f"make the model with tile_size={step:g}, or " if step == round(step) else ""
            return (
                f"tiles of slide {slide} are {step:g} pixels apart and tile_size is {tile_size}, so {result}; expected pixels at level 0: "
                f"{resize}multiply coords by {tile_size / step:g}"
            )
    return None


def _never_touch(cells: torch.Tensor) -> bool:
    """Whether no two of these cells (n, 2) are neighbours, though of as many at random places in their rectangle 5 pairs would be."""
    low, high = torch.aminmax(cells, dim=0) if len(cells) else (cells, cells)
    if 4 * len(cells) ** 2 < 5 * float((high - low + 1).prod()):
        return False
    # numbers of cells in rows that have one more on each side
    width = high[1] - low[1] + 3
    numbers = (cells - low) @ torch.stack((width, torch.ones_like(width)))
    steps = torch.stack((width, width - 1, width + 1, torch.ones_like(width)))
    return not bool(torch.isin(numbers[:, None] + steps, numbers).any())


def collate_slides(slides: Sequence[Sequence[Any]]) -> tuple[torch.Tensor, ...]:
    """Packs slides of unequal length into one batch, for a DataLoader's ``collate_fn`` or by hand.

    Args:
        slides: (tiles (L, in_dim), coords (L, 2)) or (tiles, coords, label) of each slide. Tiles and coords are tensors or numpy arrays,
            all on one device; of several dtypes the result has one that holds them all, as torch promotes them. Labels are numbers, or
            tensors or arrays of one shape; all slides have one, or none has.

    Returns:
        tiles (1, ΣL, in_dim), coords (1, ΣL, 2), cu_seqlens int32 (slides + 1,), the arguments of ``SlideEncoder``; with labels also
        labels (slides, …), int64 for integers and float32 for floats.

    Raises:
        ValueError, TypeError: if slides do not fit each other, or a tile has NaN or infinite features or coordinates, wherever the tensors
            are: on a GPU the host waits for it.

    >>> loader = DataLoader(slides, batch_size=4, collate_fn=collate_slides)
    >>> tiles, coords, cu_seqlens, labels = next(iter(loader))
    """
    if not isinstance(slides, Sequence) or not all(isinstance(slide, Sequence) for slide in slides):
        raise TypeError(
            f"slides is {shown(slides)} ({type(slides).__name__}); expected a list of (tiles, coords), or (tiles, coords, label)"
        )
    if not slides:
        raise ValueError("slides is empty; expected at least one (tiles, coords)")
    sizes = {len(slide) for slide in slides}
    if not sizes <= {2, 3} or len(sizes) > 1:
        raise ValueError(
            f"slides have {', '.join(map(str, sorted(sizes)))} parts; expected (tiles, coords) of each, or (tiles, coords, label)"
        )
    pairs = []
    for index, slide in enumerate(slides):
        tiles, coords = (_as_tensor(f"{name} of slide {index}", x) for name, x in zip(("tiles", "coords"), slide, strict=False))
        if tiles.ndim != 2 or tuple(coords.shape) != (tiles.shape[0], 2):
            raise ValueError(
                f"slide {index} has tiles {tuple(tiles.shape)} and coords {tuple(coords.shape)}; expected (tiles, in_dim) and (tiles, 2)"
            )
        _check_features_dtype(f"tiles of slide {index}", tiles)
        check_coords_dtype(f"coords of slide {index}", coords)
        pairs.append((tiles, coords))
    packed = list(zip(*pairs, strict=True))
    for name, tensors in zip(("tiles", "coords"), packed, strict=True):
        devices = sorted({str(x.device) for x in tensors})
        if len(devices) > 1:
            raise ValueError(
                f"{name} of these slides are on {' and on '.join(devices)}; expected one device: move tensors with .to(device), "
                "arrays with torch.from_numpy(array).to(device)"
            )
    widths = {x.shape[1] for x in packed[0]}
    if len(widths) > 1:
        raise ValueError(f"tiles of these slides have widths {sorted(widths)}; expected one, that of one tile encoder")
    bounds = [0, *itertools.accumulate(map(len, packed[0]))]
    tiles, coords = (torch.cat(tensors)[None] for tensors in packed)
    check_finite(tiles, bounds, waits=True)
    if not coords.isfinite().all():
        for index, places in enumerate(packed[1]):
            check_finite_coords(f"slide {index}", places)
    batch = (tiles, coords, torch.tensor(bounds, dtype=torch.int32, device=tiles.device))
    if sizes == {2}:
        return batch
    labels = [slide[2] for slide in slides]
    try:
        stacked = default_collate(labels)
    except (TypeError, RuntimeError) as error:
        raise ValueError(f"labels of these slides are {labels[:4]!r}; expected numbers, or tensors of one shape") from error
    if not isinstance(stacked, torch.Tensor):
        raise TypeError(f"labels of these slides are {labels[:4]!r}; expected numbers, such as the index of a class")
    return *batch, stacked.to(tiles.device, torch.float32 if stacked.is_floating_point() else torch.int64)


def _as_tensor(name: str, x: Any) -> torch.Tensor:
    """Returns a tensor, of a numpy array as a copy: integers as int64, since torch's operations do not know all unsigned dtypes."""
    if isinstance(x, torch.Tensor):
        return x
    # numpy is no dependency, so its class is not at hand
    if type(x).__module__.partition(".")[0] != "numpy":
        raise TypeError(f"{name} is a {type(x).__name__}; expected a tensor or a numpy array")
    if x.dtype.kind not in "iufb":
        raise TypeError(f"{name} has numpy's dtype {x.dtype}; expected floats or integers")
    # files may have the other byte order, which torch does not take
    x = x.astype(x.dtype.newbyteorder("="), copy=False)
    return torch.tensor(x, dtype=torch.int64 if x.dtype.kind in "iu" else None)
