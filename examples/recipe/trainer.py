"""The loop of a training run: steps, evaluations and checkpoints of a ``Task``, on one process or many, until its end or a signal.

Step s trains on sequences k·s … k·(s + 1) − 1 of an endless row, of which the data are a function of (seed, index) alone, and random
numbers of the model are a function of (seed, s, process). So nothing of the past but weights, optimizers and counts decides what comes:
a run that was stopped and goes on is, on a CPU with as many processes, the run that was not, to the bit.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import random
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from dilated_attention.models import LongNetLM
from recipe import checkpoints, log, settings
from recipe.costs import peak_memory
from recipe.main import interrupted
from recipe.processes import Processes

# what a run writes, but for its settings
WRITTEN = (
    *(log.FILE, "checkpoints", "checkpoint", "tensorboard", "loss.png", "pattern.png", "genome.json", "genome.png", "held_out.fa"),
    *("embeddings.npz", "predictions.csv", "slides.json", "heatmaps", "best.pt"),
)


@dataclass
class Progress:
    """What a run has done: it is saved with every checkpoint."""

    step: int = 0
    sequences: int = 0
    tokens: int = 0
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
        length: tokens of a sequence, by progress, where several stand for one of ``tokens``; None where none do.
        part: the name of the data that ``evaluate`` reads.
    """

    loss: Callable[[Sequence[int], float], torch.Tensor]
    evaluate: Callable[[float], float]
    tokens: Callable[[float], int]
    flops: Callable[[int], float] | None = None
    unit: str
    data: str
    evaluations: int
    batch: int
    accumulate: int = 1
    length: Callable[[float], int] | None = None
    part: str = "held out"


def schedule(progress: float) -> float:
    """Factor of the highest rate at a fraction of the training: a short warm-up, then a cosine to a twentieth."""
    warm_up = min(1.0, (progress + 0.002) / 0.04)
    return warm_up * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0))))


class Lengths:
    """The lengths of training sequences: from ``first`` on they double until they are ``context``, each for an equal share of the training.

    Args:
        first: None for ``context``. ValueError if doubling it does not end there.
    """

    def __init__(self, first: int | None, context: int) -> None:
        first = first or context
        self.all = [first << i for i in range(context.bit_length()) if first << i <= context]
        if self.all[-1:] != [context]:
            raise ValueError(f"--first-context is {first:,}; expected --context, {context:,}, or a half, a quarter, an eighth … of it")

    def at(self, progress: float) -> int:
        return self.all[min(int(progress * len(self.all)), len(self.all) - 1)]


def generator_of(seed: int, index: int) -> torch.Generator:
    """The random numbers of sequence ``index`` of a run."""
    return torch.Generator().manual_seed(random.Random(f"{seed}/{index}").getrandbits(63))


class Trainer:
    """Trains a model until its end, a signal or a loss or gradient that is no number.

    Args:
        args: the settings of ``settings.add_common``.
        processes: those that train.
        model: the model; ``parallel`` is the same with gradients averaged over processes.
        optimizers: their rates follow ``settings.lr`` and the schedule.
        task: data and loss.
        peak_flops: of a device, for the share that is used (MFU); None: not shown.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        processes: Processes,
        model: torch.nn.Module,
        parallel: torch.nn.Module,
        optimizers: list[torch.optim.Optimizer],
        task: Task,
        peak_flops: float | None = None,
    ) -> None:
        self.args, self.processes, self.model, self.parallel = args, processes, model, parallel
        self.optimizers, self.task, self.peak_flops = optimizers, task, peak_flops
        self.done = Progress(batch=task.batch * task.accumulate * processes.rows, data=task.data)
        self.run: Path = args.out
        self.stopped_by: int | None = None
        # counted once: a pattern's pairs take longer than a small model's step
        self._flops = None if task.flops is None else functools.cache(task.flops)
        self._checkpoints = checkpoints.Checkpoints(self.run, model, optimizers, args.keep)
        if args.resume:
            self._load(args.resume)
        # what its folder has of it already; a run that goes on in another folder has nothing there
        self._goes_on = bool(self.done.step) and self.run.resolve() == Path(args.resume).resolve()
        if self.done.batch % processes.rows:
            raise ValueError(
                f"the run has {self.done.batch} sequences a step, and {processes.rows} rows of processes share them; expected a divisor: "
                "start fewer processes, or give --context-parallel"
            )

    def _load(self, run: Path) -> None:
        path = checkpoints.newest(run)
        if path is None:
            print(f"{run} holds no whole checkpoint: the run begins anew")
            return
        state = Progress(**self._checkpoints.load(path))
        if state.data != self.task.data:
            raise ValueError(
                f"the run in {run} was trained on other data ({state.data}, now {self.task.data}); give those, or another --out"
            )
        self.done = state
        # with another length, or more evaluations, the next one is the next mark from here
        state.evaluations = min(state.evaluations, self._marks(self._progress(state.seconds)))
        print(f"going on with {path} after step {state.step}, {state.seconds:.0f} s of training")

    def _progress(self, seconds: float) -> float:
        """The share of the way that is done, after so much training."""
        return self.done.step / self.args.steps if self.args.steps else seconds / settings.duration(self.args)

    def _marks(self, progress: float) -> int:
        """Evaluations that are due up to there."""
        count = self.task.evaluations
        return sum(progress >= (i + 1) / (count + 1) for i in range(count))

    @property
    def sequences_of_a_process(self) -> int:
        return self.done.batch // self.processes.rows

    def train(self) -> None:
        """Runs to the end. Afterwards ``stopped_by`` is the signal that came before it, if one did; the state is saved either way."""
        args, first = self.args, self.processes.rank == 0
        if first:
            self._begin()
        before = {kind: signal.signal(kind, self._stop) for kind in (signal.SIGINT, signal.SIGTERM)}
        self.stopped_by = self.stopped_by or interrupted()
        total = args.steps or max(1, round(settings.duration(args)))
        # a run that has ended is evaluated again
        is_done = self._progress(self.done.seconds) >= 1
        self.remark = "; nothing was left to train" if is_done else ""
        self._log = log.Log(self.run, self.done.step, total, "step" if args.steps else "s", is_done) if first else None
        try:
            self._steps()
        finally:
            for kind, handler in before.items():
                signal.signal(kind, handler)
            if self._log is not None:
                self._log.end_bar()

    def report_stop(self, build: Callable[[], LongNetLM] | None = None) -> int:
        """Prints how to go on after a signal, and returns the exit code that a shell gives for it; every process must call it.

        Args:
            build: of ``save_model``, by which the model is written as well.
        """
        assert self.stopped_by
        name = signal.Signals(self.stopped_by).name
        if self.done.step:
            usable = ""
            if build is not None:
                self.save_model(build)
                usable = f"evaluate and generate read {self.run / 'checkpoint'}; "
            print(
                f"stopped by {name} after step {self.done.step}, which is saved; {usable}go on with --resume auto --out {self.run}",
                file=sys.stderr,
            )
        else:
            print(f"stopped by {name} before the first step", file=sys.stderr)
        return 128 + self.stopped_by

    def evaluate(self) -> float:
        """Bits a token on held-out data at the end; every process must call it."""
        return self._evaluate(1.0)

    def peak_memory(self) -> float:
        """GiB that the process with the most has had at once; every process must call it."""
        of_all = [0.0] * self.processes.world
        of_all[self.processes.rank] = peak_memory(self.processes.device) / 2**30
        return max(self.processes.total(of_all))

    def save_model(self, build: Callable[[], LongNetLM]) -> None:
        """Writes the model into ``checkpoint``, for ``from_pretrained``; every process must call it.

        Args:
            build: makes the model of one process, on the device meta.
        """
        # clones: what FSDP2 gathers are views of its buffers, and safetensors stores whole tensors
        weights = {name: value.cpu().clone() for name, value in self.processes.weights(self.model).items()}
        if self.processes.rank == 0:
            alone = build()
            alone.load_state_dict(weights, assign=True)
            # last: a kill in between leaves no step of other weights
            state = self.run / "checkpoint" / "run.json"
            state.unlink(missing_ok=True)
            alone.save_pretrained(state.parent)
            state.write_text(json.dumps({"step": self.done.step, "stopped": bool(self.stopped_by)}), encoding="utf-8")

    def _begin(self) -> None:
        """Writes the settings; a run that is in the folder already, and is not gone on with, moves into a folder of its own."""
        self.run.mkdir(parents=True, exist_ok=True)
        self._checkpoints.lock()
        # the settings last: a kill in between leaves no checkpoints without them
        earlier = [path for name in (*WRITTEN, settings.FILE) if (path := self.run / name).exists()]
        if earlier and not self._goes_on:
            aside = next(path for i in range(1, 10**6) if not (path := self.run / f"earlier-{i}").exists())
            aside.mkdir()
            for path in earlier:
                path.rename(aside / path.name)
            print(f"the run that was in {self.run} is now in {aside}")
        part = self.run / f"{settings.FILE}.part"
        part.write_text(settings.save(self.args), encoding="utf-8")
        part.replace(self.run / settings.FILE)

    def _stop(self, kind: int, _: Any) -> None:
        self.stopped_by = kind
        # the second time, at once
        signal.signal(kind, signal.default_int_handler if kind == signal.SIGINT else signal.SIG_DFL)

    def _steps(self) -> None:
        args, done = self.args, self.done
        since, saved, figures = time.perf_counter(), time.perf_counter(), None
        spent, saved_step = done.seconds, done.step
        if done.step and not self._goes_on:
            saved, saved_step = -math.inf, 0
        while True:
            is_first = self.processes.rank == 0
            now = time.perf_counter()
            elapsed = spent + now - since
            bits = math.nan if figures is None else figures[0].item() / math.log(2)
            due = is_first and now - saved > 60 * args.save_minutes
            if self._log is not None and self._log.is_closed:
                self.stopped_by = self.stopped_by or signal.SIGPIPE
            # one clock and one decision for all: a process that stopped a step early would leave the others waiting. A signal may have
            # reached one of them only
            clock, save, signal_sum, bits = self.processes.total(
                [elapsed if is_first else 0.0, float(due), float(self.stopped_by or 0), bits / self.processes.world]
            )
            if figures is not None:
                self._report(bits, *figures[1:], clock - done.seconds)
                done.seconds = clock
                if not math.isfinite(bits):
                    self._checkpoints.finish()
                    raise FloatingPointError(
                        f"the loss of step {done.step}, or its gradient, is {bits}; expected a number: go on from the last checkpoint with "
                        "--resume auto and a smaller --lr"
                    )
            progress = self._progress(clock)
            if self._marks(progress) > done.evaluations and progress < 1:
                done.evaluations = self._marks(progress)
                self._evaluate(progress)
                spent, since = clock, time.perf_counter()
            self._checkpoints.poll()
            if progress >= 1 or signal_sum or save:
                if done.step > saved_step:
                    self._checkpoints.save(done.step, asdict(done))
                    saved, saved_step = time.perf_counter(), done.step
                if progress >= 1 or signal_sum:
                    self._checkpoints.finish()
                    # a signal that came with the end changes nothing
                    self.stopped_by = None if progress >= 1 else self.stopped_by or signal.SIGTERM
                    return
            figures = self._step(progress)

    def _step(self, progress: float) -> tuple[torch.Tensor, float, int, float]:
        """(loss, learning rate, tokens of all processes, progress) of one step."""
        done, rank = self.done, self.processes.rank
        rate = self.args.lr * schedule(progress)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
        seed = random.Random(f"{self.args.seed}/{done.step}/{rank}").getrandbits(63)
        # torch.manual_seed would ask every kind of device that torch knows, at each step
        torch.default_generator.manual_seed(seed)
        if self.processes.device.type == "cuda":
            torch.cuda.manual_seed(seed)
        count = self.sequences_of_a_process
        mine = range(done.sequences + self.processes.row * count, done.sequences + (self.processes.row + 1) * count)
        turns = [mine[i : i + self.task.batch] for i in range(0, count, self.task.batch)]
        total = torch.zeros((), device=self.processes.device)
        for turn in turns:
            with self.processes.accumulate(self.parallel, last=turn is turns[-1]):
                loss = self.task.loss(turn, progress) * (len(turn) / count)
                loss.backward()
            total += loss.detach()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        # with FSDP2 a sum over processes
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        # weights after such a step are no numbers, and are not to be saved
        total = total.where(norm.isfinite(), math.nan)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        tokens = done.batch * self.task.tokens(progress)
        done.step, done.sequences, done.tokens = done.step + 1, done.sequences + done.batch, done.tokens + tokens
        return total, rate, tokens, progress

    def _report(self, bits: float, rate: float, tokens: int, progress: float, seconds: float) -> None:
        if self._log is None:
            return
        unit, speed = self.task.unit, tokens / max(seconds, 1e-9)
        length = (self.task.length or self.task.tokens)(progress)
        values = {
            "train/bits": bits,
            "length": length,
            "learning_rate": rate,
            "seconds": self.done.seconds + seconds,
            "tokens_per_second": speed,
        }
        if self._flops is not None and self.peak_flops:
            values["mfu"] = speed * self._flops(length) / self.processes.world / self.peak_flops
        values["memory_gib"] = peak_memory(self.processes.device) / 2**30
        self._log.add(self.done.step, values)
        done = self.done.step if self.args.steps else int(self.done.seconds + seconds)
        self._log.show(done, f"step {self.done.step}, {bits:.3f} bits/{unit}, {speed:,.0f} {unit}s/s")

    def _evaluate(self, progress: float) -> float:
        self.model.eval()
        with torch.no_grad():
            bits = self.task.evaluate(progress)
        self.model.train()
        if not math.isfinite(bits):
            self._checkpoints.finish()
            raise FloatingPointError(
                f"the held-out loss after step {self.done.step} is {bits}; expected a number: start anew with a smaller --lr"
            )
        if self._log is not None:
            self._log.add(self.done.step, {"held_out/bits": bits, "seconds": self.done.seconds, "tokens": self.done.tokens})
            self._log.print(f"{self.done.seconds:5.0f} s, step {self.done.step}, {self.task.part}: {bits:.4f} bits/{self.task.unit}")
        return bits
