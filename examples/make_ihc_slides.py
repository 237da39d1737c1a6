"""Cut a public picture of tissue into small "slides" with features and labels, as input of examples/slide_features.py.

    python examples/make_ihc_slides.py runs/ihc            # 144 slides of 144 tiles; seconds on one core, nothing is downloaded
    python examples/slide_features.py --features runs/ihc --labels runs/ihc/labels.csv --tile-size 8 --embed-dim 64 --layers 2 --heads 4 \
        --global-pool --tune-encoder --lr 1e-3 --epochs 8 --out runs/ihc_run

The picture is scikit-image's ``immunohistochemistry``, 512 × 512 pixels of colon with a brown stain (DAB), which its wheel holds. It is cut
into 16 squares like a chessboard: crops of the black squares are the training slides, crops of the white ones are held out, so no pixel is
in both. A slide's label is "stained" if more of it is brown than of the median training slide, else "pale". The features of a tile of
8 × 8 pixels count in which of 54 ways its pixels are brighter or darker than their neighbours (uniform local binary patterns at three
radii): texture, with no colour, brightness or contrast in it. So no tile shows the label; the script prints with what AUC the mean
brightness of a crop alone would. All crops come from one piece of tissue and overlap within a square: an AUC on them shows that the
script works, not how good a model is.
Writes ID.h5 (features float16, coords in pixels), ID.png and labels.csv. Last line: ``done: … slides in …``
"""

from __future__ import annotations

import argparse
import csv
import itertools
import sys
from pathlib import Path
from typing import Any

import numpy as np
from recipe.main import run_safely

try:
    import h5py
    from skimage import color, data, feature, filters, io, util
    from sklearn.metrics import roc_auc_score
except ImportError as error:
    raise SystemExit(f'{error}: pip install "dilated-attention[slides]"') from None

TILE, SQUARE, CROP = 8, 128, 96
RADII = ((1, 8), (2, 16), (3, 24))


def texture(gray: Any) -> Any:
    """(tiles down, tiles across, 54): of each tile the share of its pixels with each local binary pattern."""
    codes = (feature.local_binary_pattern(util.img_as_ubyte(gray), points, radius, "uniform") for radius, points in RADII)
    is_code = np.stack([pattern == k for pattern, (_, points) in zip(codes, RADII, strict=True) for k in range(points + 2)], axis=-1)
    down, across = (side // TILE for side in gray.shape)
    return is_code.reshape(down, TILE, across, TILE, -1).mean((1, 3))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--step", type=int, default=16, help="pixels between crops, a multiple of 8: 16 for 9 crops of a square, 32 for 4")
    args = parser.parse_args()
    if args.step < TILE or args.step % TILE:
        parser.error(f"--step is {args.step}; expected a positive multiple of {TILE}, the side of a tile")
    args.folder.mkdir(parents=True, exist_ok=True)
    picture = data.immunohistochemistry()
    brown = color.rgb2hed(picture)[..., 2]
    gray = color.rgb2gray(picture)
    # (slide id, part, share that is brown, mean brightness)
    rows: list[tuple[str, str, float, float]] = []
    squares = {
        (row, column): (slice(row * SQUARE, (row + 1) * SQUARE), slice(column * SQUARE, (column + 1) * SQUARE))
        for row, column in itertools.product(range(picture.shape[0] // SQUARE), range(picture.shape[1] // SQUARE))
    }
    part_of = {place: "test" if sum(place) % 2 else "train" for place in squares}
    # the held-out squares have no say in what counts as brown, in the scale of features, nor in the median
    threshold = filters.threshold_otsu(np.stack([brown[square] for place, square in squares.items() if part_of[place] == "train"]))
    textures = {place: texture(gray[square]) for place, square in squares.items()}
    known = np.concatenate([textures[place].reshape(-1, textures[place].shape[-1]) for place in squares if part_of[place] == "train"])
    for place, square in squares.items():
        features = ((textures[place] - known.mean(0)) / known.std(0)).astype(np.float16)
        for top, left in itertools.product(range(0, SQUARE - CROP + 1, args.step), repeat=2):
            crop = (slice(top, top + CROP), slice(left, left + CROP))
            tiles = features[tuple(slice(side.start // TILE, side.stop // TILE) for side in crop)]
            y, x = np.indices(tiles.shape[:2]).reshape(2, -1) * TILE
            name = f"square{place[0]}{place[1]}_y{top:02d}_x{left:02d}"
            with h5py.File(args.folder / f"{name}.h5", "w") as file:
                file["features"] = tiles.reshape(len(x), -1)
                file["coords"] = np.stack((x, y), axis=-1)
            io.imsave(args.folder / f"{name}.png", picture[square][crop], check_contrast=False)
            rows.append((name, part_of[place], float((brown[square][crop] > threshold).mean()), float(gray[square][crop].mean())))
    median = np.median([share for _, part, share, _ in rows if part == "train"])
    with (args.folder / "labels.csv").open("w", newline="") as file:
        csv.writer(file).writerows(
            [("slide_id", "label", "split"), *((name, "stained" if share > median else "pale", part) for name, part, share, _ in rows)]
        )
    held_out, darkness = zip(*((share > median, -brightness) for _, part, share, brightness in rows if part == "test"), strict=True)
    print(f"stained: more than {median:.0%} of the crop is brown; so are {sum(held_out)} of {len(held_out)} held-out slides")
    print(f"for comparison, the darkness of a crop, which the features do not hold: AUC {roc_auc_score(held_out, darkness):.4f}")
    print(f"done: {len(rows)} slides in {args.folder}")
    return 0


if __name__ == "__main__":
    sys.exit(run_safely(main))
