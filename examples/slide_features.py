"""From a folder of tile features to slide embeddings, a fine-tuned classifier with its AUC on held-out slides, and heatmaps.

    python examples/slide_features.py --features features --labels labels.csv --checkpoint slide_encoder.pth   # Prov-GigaPath's weights
    python examples/slide_features.py --features features --labels labels.csv --tune-encoder --global-pool --embed-dim 256 --layers 4
    python examples/slide_features.py --out runs/slides --resume auto                            # go on where it was stopped, by whatever

The folder holds one file a slide, ID.h5, ID.pt or ID.npz, with ``features`` (L, width) of any floating dtype and ``coords`` (L, 2), x and y
in pixels at level 0, as CLAM, TRIDENT and Prov-GigaPath's tools write them (``tile_embeds`` is read as features, too). A picture ID.png is
shown next to the heatmap. labels.csv has the columns slide_id and label, and may have split: train or test. Slides of one patient belong in
one part. Everything is read and checked before a model is made.

``--out`` gets ``log.jsonl`` and TensorBoard's curves while the run goes, a checkpoint every ``--save-minutes`` and on Ctrl-C or SIGTERM; at
the end the model (for ``SlideEncoder.from_pretrained``), ``embeddings.npz`` (slide_id, vector, label, split), ``slides.json`` (AUC, each
held-out slide's probabilities) and ``heatmaps/ID.png`` of the held-out slides. Exit code 2: the input is refused.
Last line: ``done: AUC … on … held-out slides, …``
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# threads that wait for each other sleep instead of spinning
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import torch
from _slides import Refused, Slide, Slides, find_slides, shuffled
from recipe import settings
from recipe.main import run_safely
from recipe.processes import Processes, precision
from recipe.task import Task
from recipe.trainer import Trainer
from slide_encoder import by_order, draw
from torch import nn

from dilated_attention import create_model
from dilated_attention.factory import MODEL_PRESETS
from dilated_attention.integrations.torchscale import load_slide_encoder
from dilated_attention.models import SlideEncoder, SlideEncoderConfig


def arguments() -> tuple[settings.Parser, argparse.Namespace]:
    presets = [name for name, config in MODEL_PRESETS.items() if isinstance(config, SlideEncoderConfig)]
    whole = settings.number(int, 1)
    parser = settings.Parser(__doc__, free=("features", "labels", "evaluations", "orders"))
    length = settings.add_common(parser, out="runs/slides", lr=None, minutes=None, processes=False)
    length.add_argument("--epochs", type=whole, help="the same in passes over the training slides, rounded up to whole steps")
    parser.add_argument("--features", type=Path, metavar="FOLDER", help="one .h5, .pt or .npz file a slide, named by its id")
    parser.add_argument("--labels", type=Path, metavar="CSV", help="with the columns slide_id, label and, if you like, split")
    parser.add_argument("--checkpoint", type=Path, help="slide_encoder.pth of Prov-GigaPath's family; without it weights are random")
    parser.add_argument("--model", choices=presets, default="gigapath-12l768d", help="shape of a model with random weights")
    parser.add_argument("--embed-dim", type=whole, help="instead of the preset's")
    parser.add_argument("--layers", type=whole, help="instead of the preset's")
    parser.add_argument("--heads", type=whole, help="instead of the preset's")
    parser.add_argument("--tile-size", type=whole, default=256, help="pixels of level 0 between neighbouring tiles (default: 256)")
    parser.add_argument("--global-pool", action="store_true", help="the slide's vector is the mean of its tiles, not the class token")
    parser.add_argument(
        "--tune-encoder",
        action="store_true",
        help="train the encoder, too (defaults: 10 epochs, --lr 1e-4); else the head alone on fixed vectors (100 epochs, --lr 1e-3)",
    )
    parser.add_argument("--batch", type=whole, default=8, help="slides a step; their gradients are added up slide by slide (default: 8)")
    share = settings.number(float, 0, 0.9, above=True)
    parser.add_argument("--held-out", type=share, default=0.25, help="share of each class, where the labels have no split (default: 0.25)")
    parser.add_argument("--evaluations", type=settings.number(int, 0), default=4, help="on the way, on all held-out slides (default: 4)")
    parser.add_argument("--orders", action="store_true", help="heatmaps with tiles in three orders, and how they correlate")
    args = settings.parse(parser)
    if args.features is None or args.labels is None:
        parser.error("expected --features FOLDER and --labels CSV")
    if args.checkpoint and (args.embed_dim or args.layers or args.heads):
        parser.error("--embed-dim, --layers and --heads shape a model with random weights; leave them out with --checkpoint")
    if args.epochs is args.steps is args.minutes is args.seconds is None:
        args.epochs = 10 if args.tune_encoder else 100
    args.lr = args.lr if args.lr is not None else 1e-4 if args.tune_encoder else 1e-3
    return parser, args


def build(args: argparse.Namespace, slides: Slides, device: torch.device) -> SlideEncoder:
    shared: dict[str, Any] = {"num_classes": len(slides.classes), "tile_size": args.tile_size, "global_pool": args.global_pool}
    shared |= {"device": device, "backend": args.backend}
    if args.checkpoint is None:
        shape = {"embed_dim": args.embed_dim, "num_layers": args.layers, "num_heads": args.heads}
        shape = {name: value for name, value in shape.items() if value is not None}
        try:
            return create_model(args.model, in_dim=slides.width, **shape, **shared)  # type: ignore[return-value]
        except (TypeError, ValueError) as error:
            raise Refused(f"no such model: {error}") from error
    try:
        model = load_slide_encoder(args.checkpoint, dropout=0.25, drop_path=0.1, **shared)
    except (OSError, RuntimeError, TypeError, ValueError) as error:
        raise Refused(f"--checkpoint {args.checkpoint}: {error}") from error
    if model.config.in_dim != slides.width:
        raise Refused(
            f"--checkpoint {args.checkpoint} reads features of width {model.config.in_dim} and these have {slides.width}; "
            "use its tile encoder"
        )
    return model


@dataclass
class Tuning:
    """What is trained: the head on fixed vectors of the slides, or the model on their tiles."""

    args: argparse.Namespace
    slides: Slides
    model: SlideEncoder
    device: torch.device
    # of slides whose vectors do not change any more
    vectors: dict[str, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert self.model.head is not None
        self.head = self.model.head
        self.trained: nn.Module = self.model if self.args.tune_encoder else self.head
        self.train, self.held_out = self.slides.part("train"), self.slides.part("test")

    def embed(self) -> None:
        """Takes each slide's vector (E,) for fixed from now on."""
        self.model.eval()
        for slide in self.slides.all:
            features, coords = slide.load(self.device)
            with torch.no_grad(), precision(self.device):
                self.vectors[slide.name] = self.model.embed(features[None], coords[None])[0].float()

    def train_head(self, trainer: Trainer) -> None:
        """Trains the head on vectors of one mean and scale, from which it learns much faster, and makes it one for vectors as they are."""
        self.embed()
        known = torch.stack([self.vectors[slide.name] for slide in self.train])
        mean, std = known.mean(0), known.std(0, correction=0).clamp_min(1e-6)
        vectors, self.vectors = self.vectors, {name: (vector - mean) / std for name, vector in self.vectors.items()}
        trainer.train()
        self.vectors = vectors
        with torch.no_grad():
            # W ((v - mean) / std) + b
            self.head.weight /= std
            self.head.bias -= self.head.weight @ mean

    def train_encoder(self, trainer: Trainer) -> None:
        self.model.train()
        trainer.train()
        if not trainer.stopped_by:
            self.embed()

    def logits(self, slides: list[Slide]) -> torch.Tensor:
        """(slides, classes)"""
        return torch.stack([self._logits(slide) for slide in slides]).float()

    def _logits(self, slide: Slide) -> torch.Tensor:
        if slide.name in self.vectors:
            return self.head(self.vectors[slide.name])
        features, coords = slide.load(self.device)
        with precision(self.device):
            return self.model(features[None], coords[None])[0]

    def cross_entropy(self, slides: list[Slide]) -> torch.Tensor:
        targets = torch.tensor([slide.target for slide in slides], device=self.device)
        return nn.functional.cross_entropy(self.logits(slides), targets)

    def loss(self, sequences: Sequence[int], _: float) -> torch.Tensor:
        """Of the slides at these places of an endless row of epochs, each in an order of its own."""
        count = len(self.train)
        places = [divmod(index, count) for index in sequences]
        return self.cross_entropy([self.train[shuffled(count, self.args.seed, epoch)[place]] for epoch, place in places])

    def evaluate(self, _: float) -> float:
        """Mean bits of the held-out slides' labels."""
        return self.cross_entropy(self.held_out).item() / math.log(2)

    def task(self) -> Task:
        return Task(
            loss=self.loss,
            evaluate=self.evaluate,
            tokens=lambda _: 1,
            flops=None,
            unit="slide",
            data=self.slides.fingerprint(),
            evaluations=self.args.evaluations,
            # one at a time: slides are unequal, and what one keeps for its backward is large
            batch=1,
            accumulate=self.args.batch,
        )


def main() -> int:
    parser, args = arguments()
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"
    try:
        lacking = [name for name in ("h5py", "sklearn", "matplotlib") if importlib.util.find_spec(name) is None]
        if lacking:
            raise Refused(f'{", ".join(lacking)} not installed: pip install "dilated-attention[slides]"')
        if int(os.environ.get("WORLD_SIZE", 1)) > 1:
            raise Refused(f"one process trains on slides, and torchrun started {os.environ['WORLD_SIZE']}; start the script with python")
        cells = MODEL_PRESETS[args.model].grid_size  # type: ignore[attr-defined]
        slides = find_slides(args.features, args.labels, held_out=args.held_out, seed=args.seed, extent=cells * args.tile_size)
        processes = Processes(1, "contiguous", False)
        torch.manual_seed(args.seed)
        tuning = Tuning(args, slides, build(args, slides, processes.device), processes.device)
    except Refused as error:
        parser.refuse(str(error))
    if args.epochs:
        # the last step may reach into the next epoch
        args.steps = math.ceil(args.epochs * len(tuning.train) / args.batch)
    with settings.wrong_usage(parser):
        optimizer = torch.optim.AdamW(tuning.trained.parameters(), lr=args.lr, weight_decay=0.05)
        trainer = Trainer(args, processes, tuning.trained, tuning.trained, [optimizer], tuning.task())
    counts = f"{len(tuning.train)} train, {len(tuning.held_out)} test"
    print(f"{len(slides.all)} slides ({counts}), classes {', '.join(slides.classes)}, features of width {slides.width}")
    print(f"{tuning.model.num_parameters:,} parameters, {args.checkpoint or 'random weights'}, {processes.device}", flush=True)
    if args.tune_encoder:
        tuning.train_encoder(trainer)
    else:
        tuning.train_head(trainer)
    if trainer.stopped_by:
        return trainer.report_stop()
    tuning.model.save_pretrained(args.out / "checkpoint")
    return report(tuning, trainer)


def auc_of(probabilities: np.ndarray, targets: list[int]) -> float:
    """Of the second class if there are two, else the mean over classes of each against the rest."""
    from sklearn.metrics import roc_auc_score

    if probabilities.shape[1] == 2:
        return float(roc_auc_score(targets, probabilities[:, 1]))
    return float(roc_auc_score(targets, probabilities, multi_class="ovr"))


def report(tuning: Tuning, trainer: Trainer) -> int:
    args, slides, held_out = tuning.args, tuning.slides, tuning.held_out
    np.savez(
        args.out / "embeddings.npz",
        slide_id=np.array([slide.name for slide in slides.all]),
        vector=torch.stack([tuning.vectors[slide.name] for slide in slides.all]).cpu().numpy(),
        label=np.array([slides.classes[slide.target] for slide in slides.all]),
        split=np.array([slide.part for slide in slides.all]),
    )
    bits = trainer.evaluate()
    with torch.no_grad():
        probabilities = tuning.logits(held_out).softmax(-1).cpu().numpy()
    auc = auc_of(probabilities, [slide.target for slide in held_out])
    correlations = draw_heatmaps(tuning, probabilities)
    for pair, values in correlations.items():
        print(f"attention with tiles {pair}: correlation {np.mean(values):.4f}, from {min(values):.4f} to {max(values):.4f} over slides")
    results = {
        "settings": json.loads(settings.save(args)),
        "classes": slides.classes,
        "parameters": tuning.model.num_parameters,
        "steps": trainer.done.step,
        "seconds": trainer.done.seconds,
        "AUC": auc,
        "held-out bits per slide": bits,
        "held-out probabilities": {slide.name: row.tolist() for slide, row in zip(held_out, probabilities, strict=True)},
        "correlations of orders": correlations,
    }
    (args.out / "slides.json").write_text(json.dumps(results) + "\n")
    print(f"log.jsonl, checkpoint (the model), checkpoints, embeddings.npz, slides.json and heatmaps in {args.out}")
    names = slides.classes
    which = f"of {names[1]} against {names[0]}" if len(names) == 2 else "mean over classes, each against the rest"
    print(f"done: AUC {auc:.4f} on {len(held_out)} held-out slides, {which}; {bits:.4f} bits per slide, {trainer.done.step} steps")
    return 0


def draw_heatmaps(tuning: Tuning, probabilities: np.ndarray) -> dict[str, list[float]]:
    """Draws the held-out slides, and returns with ``--orders`` the correlations of each pair of orders, slide by slide."""
    correlations: dict[str, list[float]] = {}
    tuning.model.eval()
    for slide, row in zip(tuning.held_out, probabilities, strict=True):
        features, coords = slide.load(tuning.device)
        if tuning.args.orders:
            panels, found = by_order(tuning.model, (features, coords))
            for pair, value in found.items():
                correlations.setdefault(pair, []).append(value)
        else:
            with torch.no_grad(), precision(tuning.device):
                panels = {"attention, last layer": tuning.model.attention_received(features[None], coords[None])[0]}
        photo = slide.path.with_suffix(".png")
        best = f"p({tuning.slides.classes[int(row.argmax())]}) = {row.max():.2f}"
        title = f"{slide.name}: {tuning.slides.classes[slide.target]}, {best}, {len(features):,} tiles"
        draw(coords, panels, title, tuning.args.out / "heatmaps" / f"{slide.name}.png", photo if photo.is_file() else None)
    return correlations


if __name__ == "__main__":
    sys.exit(run_safely(main))
