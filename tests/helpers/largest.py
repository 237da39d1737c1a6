"""The largest tensor that any operation returns."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Largest(TorchDispatchMode):
    """Within it, ``elements`` and ``nbytes`` are those of the largest results, and ``calls`` those of operations."""

    elements = nbytes = calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        self.calls += 1
        for x in tree_leaves(results):
            if isinstance(x, torch.Tensor):
                self.elements, self.nbytes = max(self.elements, x.numel()), max(self.nbytes, x.nbytes)
        return results
