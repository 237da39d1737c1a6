"""Fixed 2-D sine-cosine positions of tiles on a slide's grid, as in Prov-GigaPath but without its table of a million rows."""

from __future__ import annotations

import torch

from dilated_attention.pattern.checks import as_int


def check_coords_dtype(name: str, coords: torch.Tensor) -> None:
    if (coords.is_floating_point() and coords.itemsize < 4) or coords.dtype is torch.bool or coords.is_complex():
        raise TypeError(f"{name} has dtype {coords.dtype}, which does not hold pixel coordinates; use float32 or int64")


def check_finite_coords(what: str, coords: torch.Tensor) -> None:
    if not coords.isfinite().all():
        raise ValueError(f"{what} has NaN or infinite coords; expected pixels at level 0")


def grid_positions(
    coords: torch.Tensor, embed_dim: int, *, tile_size: int = 256, grid_size: int = 1000, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Computes the positions (…, embed_dim) of tiles at pixel coordinates (…, 2), for these tiles alone.

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
    embed_dim, tile_size, grid_size = (
        as_int(name, value, minimum=1, maximum=2**31 - 1)
        for name, value in (("embed_dim", embed_dim), ("tile_size", tile_size), ("grid_size", grid_size))
    )
    if embed_dim % 4:
        raise ValueError(f"embed_dim is {embed_dim}; expected a multiple of 4: a sine and a cosine for each of two coordinates")
    check_coords_dtype("coords", coords)
    if not coords.ndim or coords.shape[-1] != 2:
        raise ValueError(f"coords has shape {tuple(coords.shape)}; expected (…, 2), x and y of each tile in pixels")
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
