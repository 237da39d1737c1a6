"""What stands around every operation of ours: who is told of a call, and what an error of memory says.

One decorator, below ``torch.library.custom_op``: it sees what really runs, and neither fake tensors nor torch.compile see it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

# the name by which torch.library reads the annotations of what it is given, which is the function made here
import torch  # noqa: F401

from dilated_attention.engine.need import Need, without_memory

P = ParamSpec("P")
R = TypeVar("R")
NeedOf = Callable[[Mapping[str, Any]], Need]

# told the need of every call while they are in here: a profile that is under way
watchers: list[Callable[[Need], None]] = []


def watched(need_of: NeedOf, named: Callable[..., Mapping[str, Any]] | None = None) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator of an op's implementation. Where memory runs out inside, the error's text is put into words (``shortage.py``).

    Args:
        need_of: what a call needs, of its arguments by name, tensors as ``TensorFacts``. Asked only when memory has run out, or by a profile.
        named: those arguments, where the function has others of its own. None: its own.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)

        def need(*args: Any, **kwargs: Any) -> Need:
            arguments = named(*args, **kwargs) if named is not None else signature.bind(*args, **kwargs).arguments
            return need_of(without_memory(arguments))

        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            if watchers:
                for watcher in list(watchers):
                    watcher(need(*args, **kwargs))
            try:
                return function(*args, **kwargs)
            except RuntimeError as error:
                from dilated_attention.engine.shortage import explain, is_shortage

                if is_shortage(error):
                    explain(error, functools.partial(need, *args, **kwargs))
                raise

        return run

    return decorate
