"""A decorator for every custom op, which reports calls to watchers and explains out-of-memory errors.

It is applied below ``torch.library.custom_op``, so it sees only calls that really run, not fake tensors or torch.compile.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

# torch.library resolves annotations such as torch.Tensor in the globals of the function it is given, which is the one made here
import torch  # noqa: F401

from dilated_attention.engine.oom.requirement import MemoryRequirement, without_memory

P = ParamSpec("P")
R = TypeVar("R")
RequirementOf = Callable[[Mapping[str, Any]], MemoryRequirement]

# functions that receive the memory requirement of every call while they are in this list; a running profile adds one
watchers: list[Callable[[MemoryRequirement], None]] = []


def report(requirement_of: RequirementOf, arguments: Mapping[str, Any]) -> None:
    """Passes the memory requirement of a call to all watchers."""
    for watcher in list(watchers):
        watcher(requirement_of(without_memory(arguments)))


def explain_shortage(error: RuntimeError, requirement_of: RequirementOf, arguments: Mapping[str, Any]) -> None:
    """Adds to the error's message what the call needs and what fits, if memory has run out (``oom/report.py``)."""
    from dilated_attention.engine.oom.report import explain, is_out_of_memory

    if is_out_of_memory(error):
        explain(error, lambda: requirement_of(without_memory(arguments)))


def op_hook(requirement_of: RequirementOf) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorates an op's implementation: its calls are reported to watchers, and an out-of-memory error is explained.

    Args:
        requirement_of: returns what a call needs, given its arguments by name, with ``TensorInfo`` in place of tensors. It is called only
            when memory has run out or a profile runs.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            if watchers:
                report(requirement_of, signature.bind(*args, **kwargs).arguments)
            try:
                return function(*args, **kwargs)
            except RuntimeError as error:
                explain_shortage(error, requirement_of, signature.bind(*args, **kwargs).arguments)
                raise

        return run

    return decorate
