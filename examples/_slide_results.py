"""What is written of slides: vectors, a table of probabilities, and the AUC with an interval that few slides do not make too narrow."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from _slides import Slide, Slides


@dataclass(frozen=True)
class Tested:
    """Held-out slides of one training, and their probabilities (slides, classes)."""

    slides: list[Slide]
    probabilities: np.ndarray

    def auc(self, class_index: int) -> float:
        """Of one class against the rest: the share of pairs of slides, one of the class, in which that one has the higher probability."""
        from sklearn.metrics import roc_auc_score

        return float(roc_auc_score([slide.target == class_index for slide in self.slides], self.probabilities[:, class_index]))

    def patients(self, class_index: int) -> tuple[int, int]:
        """Patients with a slide of the class, and with one of another class."""
        inside, outside = ({slide.patient for slide in self.slides if (slide.target == class_index) is of_it} for of_it in (True, False))
        return len(inside), len(outside)


def auc_of(folds: list[Tested]) -> tuple[float, float, float]:
    """(AUC, lower and upper end of its 95 % interval), the mean over folds.

    Of two classes the second one's, else the mean over classes of each against the rest, and of the ends. The interval holds the values θ
    from which the AUC differs by at most 1.96 standard deviations, with Hanley and McNeil's variance at θ (Newcombe 2006, method 5). So an
    AUC of 1 has one, too, where a bootstrap's is a point. It counts patients: two slides of one patient are not two observations.
    """
    from scipy.optimize import brentq

    classes = folds[0].probabilities.shape[1]
    rows = []
    for index in [1] if classes == 2 else range(classes):
        auc = float(np.mean([fold.auc(index) for fold in folds]))
        counts = [fold.patients(index) for fold in folds]

        def excess(theta: float, auc: float = auc, counts: list[tuple[int, int]] = counts) -> float:
            deviation = np.sqrt(sum(variance(theta, *count) for count in counts)) / len(counts)
            return abs(auc - theta) - 1.96 * deviation

        low = brentq(excess, 0.0, auc - 1e-9) if auc > 1e-9 else 0.0
        high = brentq(excess, auc + 1e-9, 1.0) if auc < 1 - 1e-9 else 1.0
        rows.append((auc, low, high))
    auc, low, high = (float(x) for x in np.mean(rows, axis=0))
    return auc, low, high


def variance(theta: float, inside: int, outside: int) -> float:
    """Of an AUC whose true value is theta, from so many independent members of the class and others."""
    pairs = (1 - theta) / (2 - theta) + theta / (1 + theta)
    return theta * (1 - theta) * (1 + ((inside + outside) / 2 - 1) * pairs) / (inside * outside)


def save_table(path: Path, slides: Slides, chosen: list[Slide], probabilities: np.ndarray, *, folds: bool = False) -> None:
    """Writes a row a slide: slide_id, patient, label, split or fold, as far as known, and the probability of each class."""
    known = {
        "patient": lambda slide: slide.patient,
        "label": slides.class_of,
        "fold" if folds else "split": (lambda slide: str(slide.fold + 1)) if folds else lambda slide: slide.part,
    }
    known = {name: value for name, value in known.items() if any(map(value, chosen))}
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["slide_id", *known, *(f"p({name})" for name in slides.classes)])
        for slide, row in zip(chosen, probabilities, strict=True):
            writer.writerow([slide.name, *(value(slide) for value in known.values()), *(f"{p:.6f}" for p in row)])


def save_vectors(path: Path, slides: Slides, vectors: np.ndarray) -> None:
    """Writes vectors (slides, E) with ids, labels and parts; labels and parts are empty where there are none."""
    np.savez(
        path,
        slide_id=np.array([slide.name for slide in slides.all]),
        vector=vectors,
        label=np.array([slides.class_of(slide) for slide in slides.all]),
        split=np.array([slide.part for slide in slides.all]),
    )
