"""Vectors of new slides, and by the checkpoint of a run the probabilities of its classes: no labels are needed.

    python examples/slide_predict.py --features new --checkpoint runs/slides --out runs/new                   # a run of slide_features.py
    python examples/slide_predict.py --features new --checkpoint slide_encoder.pth --out runs/new             # vectors alone
    python examples/slide_predict.py --features new --checkpoint runs/slides --labels new.csv --out runs/new  # with an AUC

``--features`` is a folder as examples/slide_features.py takes it. The tiles' steps are read from the files, and slides with others than
those that the model was trained on, such as slides scanned at 40× beside 20×, are resized. ``--out`` gets ``embeddings.npz`` (slide_id,
vector), with classes ``predictions.csv`` (slide_id, the label if there is one, and a probability a class), and with ``--heatmaps``
``heatmaps/ID.png``. Exit code 2: the input is refused.
Last line: ``done: … slides in …``
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

# threads that wait for each other sleep instead of spinning
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import torch
from _slides import (
    Refused,
    Slides,
    Tested,
    auc_of,
    check,
    find_slides,
    model_folder,
    progress,
    save_table,
    save_vectors,
    tell_of_class_token,
    warn_of_trained,
)
from recipe import settings
from recipe.main import run_safely
from recipe.processes import Processes, precision
from slide_encoder import draw

from dilated_attention.integrations.torchscale import load_slide_encoder
from dilated_attention.models import SlideEncoder


def load(path: Path, global_pool: bool, device: torch.device) -> SlideEncoder:
    """The model of a run or of its checkpoint, or that of a file of Prov-GigaPath's family."""
    try:
        if path.is_dir():
            return SlideEncoder.from_pretrained(model_folder(path), device=device)
        if not global_pool:
            tell_of_class_token()
        return load_slide_encoder(path, global_pool=global_pool, device=device).eval()
    except (OSError, RuntimeError, TypeError, ValueError) as error:
        raise Refused(f"--checkpoint {path}: {error}") from error


def prepare(args: argparse.Namespace) -> tuple[SlideEncoder, Slides, torch.device]:
    device = Processes().device
    model = load(args.checkpoint, args.global_pool, device)
    config = model.config
    names = config.class_names or [f"class {index}" for index in range(config.num_classes or 0)]
    if args.labels and not names:
        raise Refused(f"--checkpoint {args.checkpoint} has no classes, so there is nothing to compare labels with; leave --labels out")
    slides = find_slides(args.features, args.labels, skip_missing=args.skip_missing, classes=names)
    slides = check(slides, tile_size=config.tile_size, cells=config.grid_size, is_fixed=True)
    if slides.width != config.in_dim:
        raise Refused(f"--checkpoint {args.checkpoint} reads features of width {config.in_dim} and these have {slides.width}")
    return model, slides, device


def main() -> int:
    parser = settings.Parser(__doc__)
    parser.add_argument("--features", type=Path, required=True, metavar="FOLDER", help="one .h5, .pt or .npz file a slide")
    parser.add_argument("--checkpoint", type=Path, required=True, help="a run, its checkpoint folder, or slide_encoder.pth")
    parser.add_argument("--labels", type=Path, metavar="CSV", help="with the columns slide_id and label: prints the AUC")
    parser.add_argument("--skip-missing", action="store_true", help="leave out rows without files and files without rows")
    parser.add_argument("--global-pool", action="store_true", help="of slide_encoder.pth: the vector is the mean of the tiles")
    parser.add_argument("--heatmaps", action="store_true", help="draw the attention to each slide's tiles")
    parser.add_argument("--out", type=Path, default=Path("runs/slide_predictions"), help="(default: runs/slide_predictions)")
    args = parser.parse_args()
    if (args.out / settings.FILE).exists():
        parser.error(f"--out {args.out} holds a run, whose predictions.csv and embeddings.npz would be replaced; give another --out")
    try:
        model, slides, device = prepare(args)
    except Refused as error:
        parser.refuse(str(error))
    print("\n".join(slides.notes))
    if args.labels:
        warn_of_trained(
            args.checkpoint, {slide.name for slide in slides.all}, "give --labels of others, e.g. its predictions.csv's split test"
        )
    args.out.mkdir(parents=True, exist_ok=True)
    vectors, probabilities = [], []
    for slide in progress(slides.all, "vectors"):
        features, coords = (x[None] for x in slide.load(device))
        with torch.no_grad(), precision(device):
            vector = model.embed(features, coords)
            weights = model.attention_received(features, coords)[0] if args.heatmaps else None
        vectors.append(vector[0].float())
        if model.head is not None:
            with torch.no_grad():
                probabilities.append(model.head(vectors[-1]).softmax(-1))
        if weights is not None:
            title = f"{slide.name}: {len(weights):,} tiles"
            draw(coords[0], {"attention, last layer": weights}, title, args.out / "heatmaps" / f"{slide.name}.png", None, slides.tile_size)
    save_vectors(args.out / "embeddings.npz", slides, torch.stack(vectors).cpu().numpy())
    if probabilities:
        table = torch.stack(probabilities).cpu().numpy()
        save_table(args.out / "predictions.csv", slides, slides.all, table)
        if args.labels:
            print(auc_text(slides, table))
    print(f"done: {len(slides.all)} slides in {args.out}")
    return 0


def auc_text(slides: Slides, probabilities: np.ndarray) -> str:
    missing = set(range(len(slides.classes))) - {slide.target for slide in slides.all}
    if missing:
        return f"no AUC: no slide has the label {slides.classes[min(missing)]}"
    auc, low, high = auc_of([Tested(slides.all, probabilities)])
    return f"AUC {auc:.4f} (95 %: {low:.2f} to {high:.2f})"


if __name__ == "__main__":
    sys.exit(run_safely(main))
