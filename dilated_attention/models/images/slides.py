"""Packed slides of unequal length: collation, checks of their bounds, and row indices."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from dilated_attention.pattern.checks import as_int_tuple, one_of


def check_tiles(tiles: Any, coords: Any, in_dim: int) -> None:
    if not isinstance(tiles, torch.Tensor) or not isinstance(coords, torch.Tensor):
        raise TypeError(f"tiles and coords are {type(tiles).__name__} and {type(coords).__name__}; expected two tensors")
    if tiles.ndim != 3 or tiles.shape[2] != in_dim:
        raise ValueError(f"tiles has shape {tuple(tiles.shape)}; expected (slides, tiles, in_dim) with in_dim = {in_dim}")
    if tuple(coords.shape) != (*tiles.shape[:2], 2):
        raise ValueError(
            f"coords has shape {tuple(coords.shape)} and tiles has {tuple(tiles.shape)}; expected one pair of pixels for each tile, "
            f"{(*tiles.shape[:2], 2)}"
        )


def bounds_of(cu_seqlens: Any, tiles: torch.Tensor) -> list[int]:
    if not isinstance(cu_seqlens, torch.Tensor) or cu_seqlens.dtype not in (torch.int32, torch.int64) or cu_seqlens.ndim != 1:
        raise TypeError(f"cu_seqlens is {cu_seqlens!r}; expected an int32 tensor (slides + 1,), as returned by collate_slides")
    if tiles.shape[0] != 1:
        raise ValueError(
            f"cu_seqlens with {tiles.shape[0]} rows of tiles; packed slides are one row: expected tiles (1, all tiles, in_dim)"
        )
    bounds: list[int] = cu_seqlens.tolist()
    return bounds


def check_bounds(bounds: list[int] | None, num_tiles: int, *, global_pool: bool) -> None:
    """Raises an error if bounds are not those of packed slides of ``num_tiles`` tiles, or if a mean would be of no tiles."""
    if bounds is not None:
        is_rising = all(start <= end for start, end in itertools.pairwise(bounds))
        if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != num_tiles or not is_rising:
            raise ValueError(f"cu_seqlens is {bounds}; expected rising bounds from 0 to the number of tiles, {num_tiles}")
    if global_pool and (num_tiles == 0 or (bounds is not None and has_empty(bounds))):
        raise ValueError("a slide has no tiles, and global_pool=True means the mean of its tiles; leave that slide out")


def rows_of_slides(query_rows: Any, bounds: list[int]) -> list[int]:
    """Converts indices within each slide to rows of the packed sequence."""
    if isinstance(query_rows, str):
        one_of("query_rows", query_rows, ("cls",), also="or integers")
        return bounds[:-1]
    places = as_int_tuple("query_rows", query_rows if not isinstance(query_rows, int) else (query_rows,))
    for place in places:
        for slide, (start, end) in enumerate(itertools.pairwise(bounds)):
            if not 0 <= place < end - start:
                raise ValueError(
                    f"query_rows has {place}, and slide {slide} has places 0 to {end - start - 1}; choose one that all slides have"
                )
    return [start + place for start in bounds[:-1] for place in places]


def has_empty(bounds: list[int]) -> bool:
    return any(start == end for start, end in itertools.pairwise(bounds))


def device_bounds(bounds: list[int] | None, x: torch.Tensor) -> torch.Tensor | None:
    return None if bounds is None else torch.tensor(bounds, dtype=torch.int32, device=x.device)


def collate_slides(slides: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Packs slides of unequal length into one batch, for a DataLoader's ``collate_fn`` or by hand.

    Args:
        slides: (tiles (L, in_dim), coords (L, 2)) of each slide, all with the same dtype and device.

    Returns:
        tiles (1, ΣL, in_dim), coords (1, ΣL, 2), cu_seqlens int32 (slides + 1,), the arguments of ``SlideEncoder``.
    """
    if not slides:
        raise ValueError("slides is empty; expected at least one (tiles, coords)")
    for index, (tiles, coords) in enumerate(slides):
        if tiles.ndim != 2 or tuple(coords.shape) != (tiles.shape[0], 2):
            raise ValueError(
                f"slide {index} has tiles {tuple(tiles.shape)} and coords {tuple(coords.shape)}; expected (tiles, in_dim) and (tiles, 2)"
            )
    for name, tensors in zip(("tiles", "coords"), zip(*slides, strict=True), strict=True):
        kinds = {(x.dtype, x.device) for x in tensors}
        if len(kinds) > 1:
            raise ValueError(f"{name} of these slides have different dtypes or devices: {sorted(map(str, kinds))}; convert them with .to()")
    lengths = [tiles.shape[0] for tiles, _ in slides]
    bounds = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=slides[0][0].device)
    return torch.cat([tiles for tiles, _ in slides])[None], torch.cat([coords for _, coords in slides])[None], bounds
