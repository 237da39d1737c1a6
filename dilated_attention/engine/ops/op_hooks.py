"""The decorator applied to every custom op: it reports calls to watchers and explains out-of-memory errors.

It is applied below ``torch.library.custom_op``, so it sees only calls that really run; fake tensors and torch.compile do not reach it.
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

# functions that receive the memory need of every call while they are in this list; a running profile adds one
watchers: list[Callable[[MemoryRequirement], None]] = []


def op_hook(
    requirement_of: RequirementOf, named: Callable[..., Mapping[str, Any]] | None = None
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorates an op's implementation. If memory runs out inside, the error's message explains the shortage (``oom/report.py``).

    Args:
        requirement_of: returns what a call needs, given its arguments by name, with ``TensorInfo`` in place of tensors. It is called only
            when memory has run out or a profile runs.
        named: returns those arguments by name, if the function's own parameters differ from them. None: the function's own.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)

        def requirement(*args: Any, **kwargs: Any) -> MemoryRequirement:
            arguments = named(*args, **kwargs) if named is not None else signature.bind(*args, **kwargs).arguments
            return requirement_of(without_memory(arguments))

        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            if watchers:
                for watcher in list(watchers):
                    watcher(requirement(*args, **kwargs))
            try:
                return function(*args, **kwargs)
            except RuntimeError as error:
                from dilated_attention.engine.oom.report import explain, is_out_of_memory

                if is_out_of_memory(error):
                    explain(error, functools.partial(requirement, *args, **kwargs))
                raise

        return run

    return decorate
