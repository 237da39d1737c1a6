"""What surrounds the implementation of every custom op: calls are reported to watchers, and out-of-memory errors are explained.

It is applied below ``torch.library.custom_op``, so it sees only calls that really run, not fake tensors or torch.compile.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

# torch.library resolves annotations such as torch.Tensor in the globals of the function it is given, which is the one made here
import torch  # noqa: F401

from dilated_attention.engine.oom.report import explanation, is_out_of_memory
from dilated_attention.engine.oom.requirement import MemoryRequirement

P = ParamSpec("P")
R = TypeVar("R")
RequirementOf = Callable[[Mapping[str, Any]], MemoryRequirement]

# functions that receive the memory requirement of every call while they are in this list; a running profile adds one
watchers: list[Callable[[MemoryRequirement], None]] = []


def report(requirement_of: RequirementOf, arguments: Mapping[str, Any]) -> None:
    """Passes the memory requirement of a call to all watchers."""
    for watcher in list(watchers):
        watcher(requirement_of(arguments))


def explain_shortage(error: RuntimeError, requirement_of: RequirementOf, arguments: Mapping[str, Any]) -> None:
    """If memory has run out, raises an error of the same type from ``error`` that explains what the call needs and what fits."""
    if is_out_of_memory(error):
        try:
            text = explanation(error, requirement_of(arguments), arguments)
        except Exception as failed:  # noqa: BLE001 - whatever it is, the shortage must not be hidden by it
            text = f"{error}\n  no details are available ({type(failed).__name__}: {failed})"
        raise type(error)(text) from error


def op_hook(requirement_of: RequirementOf) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorates an op's implementation.

    Args:
        requirement_of: returns what a call needs, given its arguments by name; called only when memory has run out or a profile runs.
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
