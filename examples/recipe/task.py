"""What a run trains, what it has done, and what follows from its place: the learning rate and the random numbers of a sequence."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch


@dataclass
class Progress:
    """What a run has done: it is saved with every checkpoint."""

    step: int = 0
    sequences: int = 0
    seconds: float = 0.0
    evaluations: int = 0
    # of all rows of processes together, in one step
    batch: int = 0
    # of what the run trains on; another text is another run
    data: str = ""


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is trained.

    Args:
        loss: (indices of sequences, progress from 0 to 1) → their mean loss in nats, of this process's part.
        evaluate: the share of the way, from 0 to 1 → bits a token on held-out data. 1 is the end.
        tokens: the tokens of a sequence, by progress.
        flops: FLOPs of a training step for each token, by the tokens of a sequence; None where nobody has counted.
        unit: of what the loss is a mean, such as ``"byte"``.
        data: a fingerprint of the data.
        evaluations: how many on the way.
        batch: sequences that a process takes at a time.
        accumulate: how many times a step, when a run begins; their gradients are added up.
    """

    loss: Callable[[Sequence[int], float], torch.Tensor]
    evaluate: Callable[[float], float]
    tokens: Callable[[float], int]
    flops: Callable[[int], float] | None
    unit: str
    data: str
    evaluations: int
    batch: int
    accumulate: int = 1


def schedule(progress: float) -> float:
    """Factor of the highest rate at a fraction of the training: a short warm-up, then a cosine to a twentieth."""
    warm_up = min(1.0, (progress + 0.002) / 0.04)
    return warm_up * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0))))


def generator_of(seed: int, index: int) -> torch.Generator:
    """The random numbers of sequence ``index`` of a run."""
    return torch.Generator().manual_seed(random.Random(f"{seed}/{index}").getrandbits(63))
