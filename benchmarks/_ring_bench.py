"""One run of ring.py: who competes, whether they are right, how fast they are, and how a line of it looks."""

from __future__ import annotations

import argparse
import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from _ring_cases import Problem, reference, tensors
from _ring_competitors import WHOLE, Contender, Unavailable, alone, ours, resolve, ring_flash_attention, torch_cp
from _ring_world import Journal, World, facts, freed

from dilated_attention import shard_sequence

WRONG = {torch.bfloat16: 0.02, torch.float16: 0.01, torch.float32: 1e-4}
NAMES = ("out", "dq", "dk", "dv")


class BudgetSpent(Exception):
    """--budget is used up; every rank stops at the same place."""


@dataclass(frozen=True)
class Entry:
    """A contender by name, and its forms for a problem, the preferred one first."""

    name: str
    forms: Callable[[Problem, Any], list[Contender]]


class Bench:
    """One run: who competes, what is known already, and how a line looks."""

    def __init__(self, args: argparse.Namespace, world: World) -> None:
        self.args, self.world = args, world
        self.dtype: torch.dtype = getattr(torch, args.dtype)
        self.journal = Journal(args.json, world)
        self.journal.facts = facts(world, args.commit) | {"dtype": args.dtype}
        self.auto = resolve("auto", world.device, self.dtype, args.head_dim)
        self.said: set[str] = set()

    def entries(self, *, dilated: bool = False) -> list[Entry]:
        args = self.args
        found = []
        if "ours" in args.against:
            for backend in args.backends:
                exchanges = args.dilated_exchange if dilated else args.exchange
                found += [Entry(f"ours {x} {backend}", functools.partial(ours, exchange=x, backend=backend)) for x in exchanges]
        if "torch" in args.against and not dilated:
            for rotate in ("allgather", "alltoall"):
                found.append(Entry(f"torch cp {rotate}", functools.partial(torch_cp, rotate=rotate, device=self.world.device)))
        if "rfa" in args.against and not dilated:
            kernels = list(dict.fromkeys(self.auto if kernel == "auto" else kernel for kernel in args.kernels))
            # the basic ring once: it is there to reproduce its known distance from zigzag
            for schedule, kernel in [*(("zigzag", kernel) for kernel in kernels), ("ring", kernels[0])]:
                form = functools.partial(ring_flash_attention, schedule=schedule, kernel=kernel, path=args.ring_flash_attention)
                found.append(Entry(f"rfa {schedule} ({kernel})", form))
        return found

    def say_once(self, text: str) -> None:
        if text not in self.said:
            self.said.add(text)
            self.world.say(text)

    def run(self, key: str, function: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        if key not in self.journal.known and self.world.agree(time.time() - self.journal.began > self.args.budget):
            raise BudgetSpent
        with freed(self.world):
            return self.journal.run(key, function)

    def alone_kernel(self, kernel: str) -> str:
        """What is measured of one GPU for a kernel: the one that ``auto`` takes is measured once, as auto."""
        return "auto" if kernel == self.auto and self.args.backends == ["auto"] else kernel

    # ---- correctness

    def errors(self, contender: Contender, problem: Problem, size: int) -> dict[str, Any]:
        """Relative error of out, dq, dk, dv over the whole sequence, against float64."""
        world = self.world

        def sums() -> list[tuple[float, float]]:
            whole = tensors(problem, world.device, self.dtype, seed=7)
            true = reference(problem, whole)
            shards = (lambda xs: xs) if contender.layout == WHOLE else self._sharder(contender, size)
            found = _train(contender, *_ready(contender, shards(whole)))()
            pairs = zip((_as_given(contender, x) for x in found), shards(true), strict=True)
            return [(float((x.double() - t).square().sum()), float(t.square().sum())) for x, t in pairs]

        with self.entered(contender, size):
            by_rank = world.everywhere(sums, size)
        totals = [[sum(column) for column in zip(*tensor, strict=True)] for tensor in zip(*by_rank, strict=True)]
        # a gradient that is nothing at all, as of rows with a single key: absolute
        return {"errors": {name: math.sqrt(found / (true or 1.0)) for name, (found, true) in zip(NAMES, totals, strict=True)}}

    def _sharder(self, contender: Contender, size: int) -> Callable[[list[torch.Tensor]], list[torch.Tensor]]:
        return lambda xs: shard_sequence(self.world.groups[size], xs, [1] * len(xs), layout=contender.layout)

    @contextlib.contextmanager
    def entered(self, contender: Contender, size: int) -> Iterator[None]:
        """Inside the contender's context on its ranks; a context that cannot be entered fails on all of them."""
        with contextlib.ExitStack() as stack:
            self.world.everywhere(lambda: stack.enter_context(contender.context()), size)
            yield

    def check_alone(self, kernel: str, problem: Problem, title: str) -> dict[str, float]:
        """Errors of one GPU on the whole; none where the kernel cannot do it or is wrong."""
        one = Entry(f"alone {kernel}", lambda problem, group: [alone(kernel, problem)])
        if self.right_form(one, problem, 1, title) is None:
            return {}
        errors: dict[str, float] = self.journal.known[self.key_of_check(one, problem, 1, title)]["errors"]
        return errors

    def key_of_check(self, entry: Entry, problem: Problem, size: int, title: str, index: int = 0) -> str:
        return f"{title} W={size} {problem.shape} {problem.mask} | {entry.name} #{index}"

    def right_form(
        self, entry: Entry, problem: Problem, size: int, title: str, single: dict[str, dict[str, float]] | None = None
    ) -> int | None:
        """Index of the entry's first form that is right; every form that is tried is shown."""
        forms = self.forms(entry, problem, size, title)
        for index, form in enumerate(forms):
            label = f"{title} W={size} {problem.shape} {problem.mask}"
            key = self.key_of_check(entry, problem, size, title, index)
            record = self.run(key, functools.partial(self.errors, form, problem, size))
            note = f"  [{form.kernel}{'; ' if form.note else ''}{form.note}]"
            if (errors := record.get("errors")) is None:
                self.say_once(f"{label:<40} | {form.name:<26} | FAILED: {record['failed']}{note}")
                continue
            # NaN is wrong, too
            right = all(error < WRONG[self.dtype] for error in errors.values())
            base = (single or {}).get(self.alone_kernel(form.kernel), {})
            shown = "  ".join(f"{name} {e:.2e}" + (f" ({e / base[name]:.2f}x)" if base.get(name) else "") for name, e in errors.items())
            self.say_once(f"{label:<40} | {form.name:<26} | {'' if right else 'WRONG: '}{shown}{note}")
            if right:
                return index
        return None

    def forms(self, entry: Entry, problem: Problem, size: int, title: str) -> list[Contender]:
        try:
            return entry.forms(problem, self.world.groups[size])
        except Unavailable as reason:
            self.say_once(f"{title} {problem.mask}: {entry.name} unavailable: {reason}")
            return []

    # ---- speed

    def time(self, key: str, contender: Contender, problem: Problem, which: str, *, ranks: int, share: int) -> dict[str, Any]:
        """Seconds, and TFLOP/s of the ``share``-th part of the problem. ``problem`` is whole; a rank holds its part of it."""
        world = self.world
        local = problem if contender.layout == WHOLE else problem.of_length(problem.seq_len // ranks)

        def measured() -> dict[str, Any]:
            made: list[Any] = []

            def prepare() -> None:
                ready = _ready(contender, tensors(local, world.device, self.dtype, seed=1000 + world.rank))
                made.append((_forward if which == "forward" else _train)(contender, *ready))

            with self.entered(contender, ranks):
                world.everywhere(prepare, ranks)
                if self.args.graphs and contender.captures and world.is_cuda:
                    made.append(world.everywhere(lambda: _captured(made[0]), ranks)[0])
                record = world.measure(lambda: made[-1](), seconds=self.args.seconds, ranks=ranks)
            made.clear()
            rate = problem.flops(which) / share / record["seconds"] / 1e12
            names = {"contender": contender.name, "kernel": contender.kernel, "layout": contender.layout, "note": contender.note}
            case = {"shape": problem.shape, "seq_len": problem.seq_len, "mask": problem.mask, "pass": which, "ranks": ranks}
            return record | {"tflops": rate} | names | case

        return self.run(key, measured)

    def compile(self, problem: Problem) -> None:
        """Has every rank compile the kernels of both masks by itself, so that none waits for another's compiler in a collective."""
        for backend in dict.fromkeys(["auto", *self.args.backends]):
            for is_causal in (True, False):
                one = replace(problem, is_causal=is_causal)
                self.time(f"first {backend} {one.shape} {one.mask}", alone(backend, one), one, "training", ranks=self.world.size, share=1)

    def row(self, label: str, name: str, record: dict[str, Any], more: str = "") -> None:
        if "failed" in record:
            self.world.say(f"{label:<40} | {name:<26} | FAILED: {record['failed']}")
            return
        # a rank that runs ahead and then waits has two kinds of calls, and a median of one kind
        uneven = f" (mean {1e3 * record['mean']:.3f})" if record["mean"] > 1.05 * record["seconds"] else ""
        what = f"{1e3 * record['seconds']:9.3f} ms ±{100 * record['spread']:5.1f} %{uneven} | {record['tflops']:6.1f} TFLOP/s"
        note = f"  [{record['note']}]" if record["note"] else ""
        self.world.say(f"{label:<40} | {name:<26} | {what} | {record['peak_bytes'] / 2**30:5.2f} GiB{more}{note}")


def _ready(contender: Contender, given: list[torch.Tensor]) -> list[torch.Tensor]:
    """q, k, v as leaves and dout, in the contender's own order of dimensions."""
    own = [x.transpose(1, 2).contiguous() for x in given] if contender.heads_first else given
    return [*(x.detach().requires_grad_() for x in own[:3]), own[3]]


def _captured(call: Callable[[], Any]) -> Callable[[], Any]:
    """The call as one CUDA graph: what the GPU does, without the CPU's time for it."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def _as_given(contender: Contender, x: torch.Tensor) -> torch.Tensor:
    return x.detach().transpose(1, 2) if contender.heads_first else x.detach()


def _forward(contender: Contender, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor) -> Callable[[], Any]:
    def forward() -> torch.Tensor:
        with torch.no_grad():
            return contender.attend(q, k, v)

    return forward


def _train(contender: Contender, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor) -> Callable[[], Any]:
    def train() -> tuple[torch.Tensor, ...]:
        out = contender.attend(q, k, v)
        return (out, *torch.autograd.grad(out, (q, k, v), dout))

    return train
