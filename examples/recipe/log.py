"""The log of a run, while it runs: a line of JSON a step and evaluation, TensorBoard's curves where it is installed, a progress bar;
and its picture."""

from __future__ import annotations

import contextlib
import json
import math
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

try:
    from tqdm import tqdm
except ModuleNotFoundError:
    raise SystemExit('tqdm is not installed: pip install "dilated-attention[train]"; with [slides] for slides') from None

FILE = "log.jsonl"
SECONDS_BETWEEN_LINES = 30.0


def read(run: Path) -> list[dict[str, Any]]:
    """The lines of a run's log; a last line that a kill cut off is left out, and so are those that a power cut damaged."""
    return [line for line in _read(run) if line]


def _read(run: Path) -> list[dict[str, Any]]:
    """Every whole line; an empty one in place of each that is damaged."""
    path = run / FILE
    found = []
    for text in path.read_bytes().split(b"\n")[:-1] if path.exists() else []:
        try:
            line = json.loads(text)
        except ValueError:
            line = None
        found.append(line if isinstance(line, dict) and isinstance(line.get("step"), int) else {})
    return found


class Log:
    """Writes the log of a run; a resumed run goes on in it, from its own step.

    Args:
        run: the folder.
        step: steps done before; what the log has of later ones is dropped, since they are done again.
        total, unit: length of the progress bar.
        is_done: the run has ended before, so that the evaluation of its last step is done again.
    """

    def __init__(self, run: Path, step: int, total: int, unit: str, is_done: bool) -> None:
        before = _read(run)
        # whoever reads the output, such as head, has ended
        self.is_closed = False
        kept = [
            line for line in before if line and line["step"] <= step and not (is_done and "held_out/bits" in line and line["step"] == step)
        ]
        if damaged := before.count({}):
            print(f"{run / FILE}: {damaged} damaged line(s) left out")
        run.mkdir(parents=True, exist_ok=True)
        part = run / f"{FILE}.part"
        part.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
        part.replace(run / FILE)
        # a line at a time, so that a kill costs none of those before
        self._file = (run / FILE).open("a", encoding="utf-8", buffering=1)
        self._writer: Any = None
        self._next_point = 0.0
        try:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(run / "tensorboard"), purge_step=step + 1)
        except ImportError as error:
            print(f'no TensorBoard curves, {error}: pip install "dilated-attention[train]"; log.jsonl has the same figures')
        # none into a pipe or a file, which gets a line now and then
        self._bar = tqdm(total=total, unit=unit, dynamic_ncols=True, mininterval=1.0, miniters=0, disable=None)
        self._next_line = 0.0

    def add(self, step: int, values: dict[str, float]) -> None:
        """Adds figures of one step, by names such as ``train/bits``. TensorBoard gets those of a step a second, and all evaluations."""
        # JSON has no NaN
        self._file.write(json.dumps({"step": step, **{k: v if math.isfinite(v) else str(v) for k, v in values.items()}}) + "\n")
        if self._writer is None or ("train/bits" in values and time.perf_counter() < self._next_point):
            return
        # its writer takes as long as a small model's step
        self._next_point = time.perf_counter() + 1.0
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def show(self, done: int, text: str) -> None:
        """Sets the progress bar, which is drawn once a second."""
        with self._watched():
            if not self._bar.disable:
                self._bar.set_postfix_str(text, refresh=False)
                self._bar.update(min(done, self._bar.total) - self._bar.n)
            elif time.perf_counter() >= self._next_line:
                self._next_line = time.perf_counter() + SECONDS_BETWEEN_LINES
                print(text, file=sys.stderr, flush=True)

    def print(self, text: str) -> None:
        """Prints a line above the progress bar."""
        with self._watched():
            self._bar.write(text)

    def end_bar(self) -> None:
        with self._watched():
            self._bar.close()
        if self._writer is not None:
            self._writer.flush()

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            self.is_closed = True


def plot(run: Path, name: str, baselines: dict[str, float], unit: str, title: str) -> None:
    """Draws the bits of a run's log over time, and those of ``baselines`` as lines, into a picture in its folder."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    lines = read(run)
    trained, held_out = ([(line["seconds"], float(line[key])) for line in lines if key in line] for key in ("train/bits", "held_out/bits"))
    # sequences differ by more than a model learns in many steps
    span = max(1, len(trained) // 40)
    means = [sum(bits for _, bits in trained[i - span : i]) / span for i in range(span, len(trained) + 1)]
    axes.plot([seconds for seconds, _ in trained[span - 1 :]], means, lw=1, color="#56b4e9", label=f"training, mean of {span} steps")
    axes.plot(*zip(*held_out, strict=True), "o-", ms=4, color="#d55e00", label="held out")
    # the first steps are above chance, and may leave the picture
    compared = [*baselines.values(), *(bits for _, bits in held_out)]
    highest, lowest = max(compared), min(*means, *compared)
    bottom, top = (limit + 0.05 * sign * (highest - lowest) for limit, sign in ((lowest, -1), (highest, 1)))
    place = bottom
    for label, value in sorted(baselines.items(), key=lambda item: item[1]):
        # next to its line, or above the label below
        place = max(value, place + 0.045 * (top - bottom))
        axes.axhline(value, color="black", lw=0.8)
        axes.annotate(f"{label} {value:.3f}", (1.01, place), xycoords=axes.get_yaxis_transform(), va="center", fontsize="small")
    axes.set(xlabel="seconds of training", ylabel=f"bits per {unit}", ylim=(bottom, top))
    axes.set_title(textwrap.fill(title, 60), fontsize="small")
    axes.legend(fontsize="small", loc="best")
    figure.savefig(run / name, dpi=100)
