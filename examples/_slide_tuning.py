"""Training on slides: the head on fixed vectors, or encoder and head on tiles; a val part chooses the weights."""

from __future__ import annotations

import argparse
import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from _slides import Slide, Slides, progress, shuffled
from recipe.processes import precision
from recipe.trainer import Task, Trainer
from torch import nn

from dilated_attention.models import SlideEncoder

BEST = "best.pt"


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
        self.train, self.val, self.held_out = (self.slides.part(name) for name in ("train", "val", "test"))
        # the lowest bits on the val part, the share of the way, and the weights
        self.best: dict[str, Any] | None = None
        if self.val and self.args.resume and (path := self.args.resume / BEST).is_file():
            self.best = torch.load(path, map_location=self.device, weights_only=True)

    def embed(self) -> None:
        """Takes each slide's vector (E,) for fixed from now on."""
        self.model.eval()
        for slide in progress([slide for slide in self.slides.all if slide.name not in self.vectors], "vectors"):
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
        self.choose(trainer)
        self.vectors = vectors
        with torch.no_grad():
            # W ((v - mean) / std) + b
            self.head.weight /= std
            self.head.bias.sub_(self.head.weight @ mean)

    def train_encoder(self, trainer: Trainer) -> None:
        self.model.train()
        trainer.train()
        self.choose(trainer)
        if not trainer.stopped_by:
            self.embed()

    def choose(self, trainer: Trainer) -> None:
        """With a val part, goes back to the weights that were best on it."""
        if self.val and not trainer.stopped_by:
            trainer.evaluate()
            assert self.best is not None
            self.trained.load_state_dict(self.best["weights"])
            print(f"best on {len(self.val)} val slides after {self.best['share']:.0%} of the way: {self.best['bits']:.4f} bits/slide")

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

    @torch.no_grad()
    def bits(self, slides: list[Slide]) -> float:
        """Mean bits of their labels."""
        return self.cross_entropy(slides).item() / math.log(2)

    def evaluate(self, share: float) -> float:
        """Mean bits of the val slides, or of the held-out ones, after a share of the way."""
        bits = self.bits(self.val or self.held_out)
        if self.val:
            if self.best is None or bits < self.best["bits"]:
                self.best = {"bits": bits, "share": share, "weights": copy.deepcopy(self.trained.state_dict())}
            # a run that goes on needs it, and finds it whole
            torch.save(self.best, self.args.out / f"{BEST}.part")
            (self.args.out / f"{BEST}.part").replace(self.args.out / BEST)
        return bits

    def task(self) -> Task:
        usual = 10 if self.val else 4
        return Task(
            loss=self.loss,
            evaluate=self.evaluate,
            tokens=lambda _: 1,
            unit="slide",
            data=self.slides.fingerprint(),
            evaluations=usual if self.args.evaluations is None else self.args.evaluations,
            # one at a time: slides are unequal, and what one keeps for its backward is large
            batch=1,
            accumulate=self.args.batch,
            part="val" if self.val else "held out",
        )
