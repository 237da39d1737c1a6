"""From a folder of tile features to slide embeddings, a fine-tuned classifier with its AUC on held-out patients, and heatmaps.

    python examples/slide_features.py --features features --labels labels.csv --checkpoint slide_encoder.pth   # Prov-GigaPath's weights
    python examples/slide_features.py --features features --labels labels.csv --folds 5                        # every patient held out once
    python examples/slide_features.py --features features --labels labels.csv --tune-encoder --global-pool --embed-dim 256 --layers 4
    python examples/slide_features.py --out runs/slides --resume auto                            # go on where it was stopped, by whatever

The folder holds one file a slide, ID.h5, ID.pt or ID.npz, with ``features`` (L, width) of any floating dtype and width, and ``coords``
(L, 2), x and y in pixels at level 0, as CLAM, TRIDENT and Prov-GigaPath's tools write them (``tile_embeds`` is read as features, too). A
picture ID.png is shown next to the heatmap. labels.csv has the columns slide_id and label. Slides with one patient_id, patient or case_id
stay together. By a column split, train, val or test, the user says which are held out; with a val part the weights that are best on it are
kept. Everything is read and checked before a model is made. Slides without labels: examples/slide_predict.py.

``--out`` gets ``log.jsonl`` and TensorBoard's curves while the run goes, a checkpoint every ``--save-minutes`` and on Ctrl-C or SIGTERM; at
the end the model (for ``SlideEncoder.from_pretrained``), ``embeddings.npz`` (slide_id, vector, label, split), ``predictions.csv`` (a row a
slide), ``slides.json`` (AUC and settings) and ``heatmaps/ID.png`` of the held-out slides; with ``--folds`` in a folder a fold, and AUC and
table of all. Exit code 2: the input is refused.
Last line: ``done: AUC … (95 %: … to …) on … held-out slides of … patients, …``
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

# threads that wait for each other sleep instead of spinning
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import torch
from _slide_tuning import Tuning
from _slides import (
    PARTS,
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
    with_parts,
)
from recipe import settings
from recipe.main import run_safely
from recipe.processes import Processes, precision
from recipe.trainer import Trainer
from slide_encoder import by_order, draw

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
    parser.add_argument("--labels", type=Path, metavar="CSV", help="with the columns slide_id, label; if you like case_id and split")
    parser.add_argument("--skip-missing", action="store_true", help="leave out rows without files and files without rows")
    parser.add_argument("--checkpoint", type=Path, help="slide_encoder.pth of Prov-GigaPath's family, or a run; else weights are random")
    parser.add_argument("--model", choices=presets, default="gigapath-12l768d", help="shape of a model with random weights")
    parser.add_argument("--embed-dim", type=whole, help="instead of the preset's")
    parser.add_argument("--layers", type=whole, help="instead of the preset's")
    parser.add_argument("--heads", type=whole, help="instead of the preset's")
    parser.add_argument("--tile-size", type=whole, help="pixels of level 0 between neighbouring tiles (default: what the files have)")
    parser.add_argument("--global-pool", action="store_true", help="the slide's vector is the mean of its tiles, not the class token")
    parser.add_argument(
        "--tune-encoder",
        action="store_true",
        help="train the encoder, too (defaults: 10 epochs, --lr 1e-4); else the head alone on fixed vectors (100 epochs, --lr 1e-3)",
    )
    parser.add_argument("--batch", type=whole, default=8, help="slides a step; their gradients are added up slide by slide (default: 8)")
    share = settings.number(float, 0, 0.9, above=True)
    parser.add_argument("--held-out", type=share, default=0.25, help="share of each class, where the labels have no split (default: 0.25)")
    parser.add_argument("--folds", type=settings.number(int, 2), help="train as many times, each time with other patients held out")
    help_text = "on the way, on all val or else held-out slides (default: 4; with a val part 10, of which the best is kept)"
    parser.add_argument("--evaluations", type=settings.number(int, 0), help=help_text)
    parser.add_argument("--orders", action="store_true", help="heatmaps with tiles in three orders, and how they correlate")
    args = settings.parse(parser)
    if args.features is None or args.labels is None:
        # with --resume auto the run may have been stopped before its first step
        way = "which only a run that goes on has saved; for slides without labels examples/slide_predict.py"
        parser.error(f"expected --features FOLDER and --labels CSV, {way}")
    if not args.resume and args.out.resolve().is_relative_to(args.features.resolve()):
        parser.error(f"--out {args.out} lies in --features {args.features}, where its vectors would be read as a slide; give another --out")
    if args.checkpoint and (args.embed_dim or args.layers or args.heads):
        parser.error("--embed-dim, --layers and --heads shape a model with random weights; leave them out with --checkpoint")
    for folder in (args.out, args.resume) if args.folds else ():
        if folder and (folder / "checkpoints").exists():
            parser.error(f"{folder} holds a run of one training, and --folds {args.folds} has a folder for each; use another --out")
    if not args.resume and (args.out / "fold-1").exists():
        parser.error(f"{args.out} holds the folds of a run; go on with them by --resume auto, or use another --out")
    if args.epochs is args.steps is args.minutes is args.seconds is None:
        args.epochs = 10 if args.tune_encoder else 100
    args.lr = args.lr if args.lr is not None else 1e-4 if args.tune_encoder else 1e-3
    return parser, args


def build(args: argparse.Namespace, slides: Slides, device: torch.device) -> SlideEncoder:
    shared: dict[str, Any] = {"tile_size": slides.tile_size, "num_classes": len(slides.classes)}
    options = {"device": device, "backend": args.backend}
    try:
        if args.checkpoint is None:
            shape = {"embed_dim": args.embed_dim, "num_layers": args.layers, "num_heads": args.heads}
            shape = {name: value for name, value in shape.items() if value is not None}
            model = create_model(args.model, in_dim=slides.width, global_pool=args.global_pool, **shape, **shared, **options)
        elif args.checkpoint.is_dir():
            model = of_run(args, shared | {"class_names": tuple(slides.classes)}, options)
        else:
            # the segments that the weights were trained with, whatever a tile's pixels are
            lengths = SlideEncoderConfig.gigapath().encoder.segment_lengths
            if not (args.global_pool or args.tune_encoder):
                tell_of_class_token()
            shared |= {"segment_lengths": lengths, "dropout": 0.25, "drop_path": 0.1, "global_pool": args.global_pool}
            model = load_slide_encoder(args.checkpoint, **shared, **options)
    except (OSError, RuntimeError, TypeError, ValueError) as error:
        raise Refused(f"--checkpoint {args.checkpoint}: {error}" if args.checkpoint else f"no such model: {error}") from error
    assert isinstance(model, SlideEncoder)
    if model.config.in_dim != slides.width:
        raise Refused(
            f"--checkpoint {args.checkpoint} reads features of width {model.config.in_dim} and these have {slides.width}; "
            "use its tile encoder"
        )
    model.config = replace(model.config, class_names=tuple(slides.classes))
    return model


def of_run(args: argparse.Namespace, changes: dict[str, Any], options: dict[str, Any]) -> SlideEncoder:
    """The model of a run, with its head if that has these classes, else with a new one."""
    stored = SlideEncoder.from_pretrained(model_folder(args.checkpoint))
    model = SlideEncoder(replace(stored.config, **changes, global_pool=args.global_pool or stored.config.global_pool), **options)
    has_head = stored.config.class_names == changes["class_names"]
    weights = {name: value for name, value in stored.state_dict().items() if has_head or not name.startswith("head.")}
    model.load_state_dict(weights, strict=has_head)
    return model


def main() -> int:
    parser, args = arguments()
    try:
        lacking = [name for name in ("h5py", "sklearn", "matplotlib") if importlib.util.find_spec(name) is None]
        if lacking:
            raise Refused(f'{", ".join(lacking)} not installed: pip install "dilated-attention[slides]"')
        if int(os.environ.get("WORLD_SIZE", 1)) > 1:
            raise Refused(f"one process trains on slides, and torchrun started {os.environ['WORLD_SIZE']}; start the script with python")
        cells = MODEL_PRESETS[args.model].grid_size  # type: ignore[attr-defined]
        slides = find_slides(args.features, args.labels, skip_missing=args.skip_missing)
        slides = with_parts(slides, held_out=args.held_out, folds=args.folds, seed=args.seed)
        slides = check(slides, tile_size=args.tile_size, cells=cells)
        device = Processes().device
        torch.manual_seed(args.seed)
        model = build(args, slides, device)
    except Refused as error:
        parser.refuse(str(error))
    print("\n".join(slides.notes))
    held_out = {slide.name for slide in slides.all if args.folds or slide.part == "test"}
    warn_of_trained(args.checkpoint, held_out, "hold out those that it held out, by its --seed and --held-out or a column split")
    print(f"classes {', '.join(slides.classes)}; {model.num_parameters:,} parameters, {args.checkpoint or 'random weights'}, {device}")
    if args.folds:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / settings.FILE).write_text(settings.save(args), encoding="utf-8")
    vectors: dict[str, torch.Tensor] = {}
    runs: list[dict[str, Any]] = []
    tested: list[Tested] = []
    for fold in range(args.folds or 1):
        run_args, part = (of_fold(args, fold), slides.with_fold(fold)) if args.folds else (args, slides)
        if fold:
            torch.manual_seed(args.seed)
            model = build(args, slides, device)
        # a fixed encoder gives the same vectors in every fold
        tuning = Tuning(run_args, part, model, device, {} if args.tune_encoder else vectors)
        if args.epochs:
            # the last step may reach into the next epoch
            run_args.steps = math.ceil(args.epochs * len(tuning.train) / args.batch)
        with settings.wrong_usage(parser):
            optimizer = torch.optim.AdamW(tuning.trained.parameters(), lr=args.lr, weight_decay=0.05)
            trainer = Trainer(run_args, Processes(), tuning.trained, tuning.trained, [optimizer], tuning.task())
        counts = ", ".join(f"{len(part.part(name))} {name}" for name in PARTS if part.part(name))
        print(f"fold {fold + 1} of {args.folds}: {counts}" if args.folds else counts, flush=True)
        if args.tune_encoder:
            tuning.train_encoder(trainer)
        else:
            tuning.train_head(trainer)
        if trainer.stopped_by:
            # of all folds
            trainer.run = args.out
            return trainer.report_stop()
        results, of_fold_tested = report(tuning, trainer)
        runs.append(results)
        tested.append(of_fold_tested)
    return summarise(args, slides, runs, tested)


def of_fold(args: argparse.Namespace, fold: int) -> argparse.Namespace:
    """The settings of one fold: a run in a folder of its own, which goes on if it has begun."""
    name = f"fold-{fold + 1}"
    has_begun = args.resume and (args.resume / name / settings.FILE).is_file()
    return argparse.Namespace(**{**vars(args), "out": args.out / name, "resume": args.resume / name if has_begun else None})


def report(tuning: Tuning, trainer: Trainer) -> tuple[dict[str, Any], Tested]:
    """Writes what one training gives."""
    args, slides = tuning.args, tuning.slides
    tuning.model.save_pretrained(args.out / "checkpoint")
    vectors = torch.stack([tuning.vectors[slide.name] for slide in slides.all])
    save_vectors(args.out / "embeddings.npz", slides, vectors.cpu().numpy())
    # with a val part the log's bits are that part's
    bits = tuning.bits(tuning.held_out) if tuning.val else trainer.evaluate()
    with torch.no_grad():
        probabilities = tuning.logits(slides.all).softmax(-1).cpu().numpy()
    save_table(args.out / "predictions.csv", slides, slides.all, probabilities)
    rows = [index for index, slide in enumerate(slides.all) if slide.part == "test"]
    tested = Tested([slides.all[index] for index in rows], probabilities[rows])
    auc, low, high = auc_of([tested])
    correlations = draw_heatmaps(tuning, tested)
    for pair, values in correlations.items():
        print(f"attention with tiles {pair}: correlation {np.mean(values):.4f}, from {min(values):.4f} to {max(values):.4f} over slides")
    results = {
        "settings": json.loads(settings.save(args)),
        "classes": slides.classes,
        "tile size": slides.tile_size,
        "parameters": tuning.model.num_parameters,
        "steps": trainer.done.step,
        "seconds": trainer.done.seconds,
        "AUC": auc,
        "AUC 95 %": [low, high],
        "held-out bits per slide": bits,
        "held-out probabilities": {slide.name: row.tolist() for slide, row in zip(tested.slides, tested.probabilities, strict=True)},
        "correlations of orders": correlations,
    }
    (args.out / "slides.json").write_text(json.dumps(results) + "\n")
    return results, tested


def summarise(args: argparse.Namespace, slides: Slides, runs: list[dict[str, Any]], tested: list[Tested]) -> int:
    """Prints the AUC, and writes it with the table of all slides where there are folds."""
    auc, low, high = auc_of(tested)
    bits = float(np.mean([run["held-out bits per slide"] for run in runs]))
    if args.folds:
        held_out = [slide for fold in tested for slide in fold.slides]
        save_table(args.out / "predictions.csv", slides, held_out, np.concatenate([fold.probabilities for fold in tested]), folds=True)
        results = {"settings": json.loads(settings.save(args)), "classes": slides.classes, "AUC": auc, "AUC 95 %": [low, high]}
        results |= {"AUC of folds": [run["AUC"] for run in runs], "held-out bits per slide": bits}
        (args.out / "slides.json").write_text(json.dumps(results) + "\n")
        of_folds = ", ".join(f"{run['AUC']:.4f}" for run in runs)
        print(f"AUC of folds: {of_folds}")
    where = f"{args.out}/fold-1 … fold-{args.folds}, the first two of all slides in {args.out}" if args.folds else args.out
    print(f"predictions.csv, slides.json, log.jsonl, checkpoint (the model), checkpoints, embeddings.npz and heatmaps in {where}")
    names, count = slides.classes, sum(len(fold.slides) for fold in tested)
    which = f"of {names[1]} against {names[0]}" if len(names) == 2 else "mean over classes, each against the rest"
    patients = len({slide.patient for fold in tested for slide in fold.slides})
    how = f"{which}, mean of {args.folds} folds" if args.folds else which
    print(
        f"done: AUC {auc:.4f} (95 %: {low:.2f} to {high:.2f}) on {count} held-out slides of {patients} patients, {how}; "
        f"{bits:.4f} bits per slide, {runs[-1]['steps']} steps"
    )
    return 0


def draw_heatmaps(tuning: Tuning, tested: Tested) -> dict[str, list[float]]:
    """Draws the held-out slides, and returns with ``--orders`` the correlations of each pair of orders, slide by slide."""
    correlations: dict[str, list[float]] = {}
    tuning.model.eval()
    for slide, row in zip(progress(tested.slides, "heatmaps"), tested.probabilities, strict=True):
        features, coords = slide.load(tuning.device)
        if tuning.args.orders:
            panels, of_pairs = by_order(tuning.model, (features, coords))
            for pair, value in of_pairs.items():
                correlations.setdefault(pair, []).append(value)
        else:
            with torch.no_grad(), precision(tuning.device):
                panels = {"attention, last layer": tuning.model.attention_received(features[None], coords[None])[0]}
        photo = slide.path.with_suffix(".png")
        best = f"p({tuning.slides.classes[int(row.argmax())]}) = {row.max():.2f}"
        title = f"{slide.name}: {tuning.slides.class_of(slide)}, {best}, {len(features):,} tiles"
        path = tuning.args.out / "heatmaps" / f"{slide.name}.png"
        draw(coords, panels, title, path, photo if photo.is_file() else None, tuning.slides.tile_size)
    return correlations


if __name__ == "__main__":
    sys.exit(run_safely(main))
