"""Third-party attention as a contender: ``name=module.path:function``, checked like this library's own before it is timed."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from dilated_attention.bench.accuracy import correctness
from dilated_attention.bench.accuracy.correctness import Attend
from dilated_attention.bench.measure.skip import Refused
from dilated_attention.bench.workloads.contenders import Contender, dense_pattern, dilated_pattern
from dilated_attention.bench.workloads.problem import Problem


@dataclass(frozen=True)
class Foreign:
    """``function``: problem → callable of q, k, v (B, N, H, D) that returns out (B, N, H, D). It may raise anything where it cannot run."""

    name: str
    target: str
    function: Callable[[Problem], Any]

    def make(self, problem: Problem) -> Attend:
        attend = self.function(problem)

        def checked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            out = attend(q, k, v)
            if not isinstance(out, torch.Tensor) or out.shape != q.shape:
                got = tuple(out.shape) if isinstance(out, torch.Tensor) else type(out).__name__
                raise Refused(f"{self.target} returned {got}; expected a tensor of q's shape {tuple(q.shape)}")
            return out

        return checked

    def contender(self, problem: Problem) -> Contender:
        """Creates a contender, checked against dense attention or ``problem``'s dilated branches, whichever is closer at a short length.

        A contender whose results have no gradient competes in the forward only.
        """
        small = problem.reduced(correctness.WHOLE)
        attend = self.make(small)
        patterns = {"dense": dense_pattern, "dilated": dilated_pattern}
        errors = {name: correctness.whole_errors(attend, make(small), small, gradients=False)["out"] for name, make in patterns.items()}
        # NaN is closer to neither
        nearer = "dilated" if errors["dilated"] < errors["dense"] else "dense"
        trains = attend(*replace(small, num_positions=min(64, small.num_positions)).qkv()).requires_grad
        what = f"{self.target}, compared with {nearer} attention"
        return Contender(name=self.name, what=what, make=self.make, pattern=patterns[nearer], trains=trains)


def foreign(text: str) -> Foreign:
    """Parses ``name=module.path:function``.

    Raises:
        argparse.ArgumentTypeError: another format, a module that cannot be imported, or no such function in it.
    """
    name, _, target = text.partition("=")
    module, _, function = target.partition(":")
    if not (name and module and function):
        expected = "name=module.path:function, a function(problem) -> callable(q, k, v)"
        raise argparse.ArgumentTypeError(f"{text!r} is not a contender; expected {expected}")
    try:
        found = getattr(importlib.import_module(module), function, None)
    except ImportError as error:
        raise argparse.ArgumentTypeError(
            f"{text!r}: {error}; the module must be importable here: run in its folder, or set PYTHONPATH"
        ) from error
    if not callable(found):
        raise argparse.ArgumentTypeError(f"{text!r}: {module} has no function {function!r}")
    return Foreign(name, target, found)
