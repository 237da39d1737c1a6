"""Measures what is alive while a function runs, without running it: fake tensors under a dispatch mode that counts their storages.

A fake run does not show what this library's attention ops allocate internally: the tape only records the position, and its reader adds the
figure (``estimate/memory.py``).

A step is traced at two lengths and with three and four blocks. Its operations are the same at every length, so the bytes of every tensor
are linear in the length; each further block repeats them once more, so they are linear in the depth.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from dilated_attention.engine.ops.resolve import INPUTS
from dilated_attention.engine.ops.settings import settings_of
from dilated_attention.functional.fused_layers import plain_layers

_ATTENTION = {
    "dilated_attention.dilated_attention.default": "forward",
    "dilated_attention.dilated_attention_backward.default": "backward",
    "dilated_attention.block_sparse_attention.default": "forward",
    "dilated_attention.block_sparse_attention_backward.default": "backward",
}
# lengths, and numbers of blocks, of the runs that are extrapolated: a first block, a last one, and one or two in between
LENGTHS, DEPTHS = (2048, 3072), (3, 4)


class Moment(NamedTuple):
    """The state after one operation.

    Args:
        alive: bytes of everything that was created since the tape began and still lives, including the results of this operation.
        grads: of these, the gradients of parameters.
        inside: bytes that the operation needed temporarily in addition.
        kept: number of attention calls with detached mixing whose branch outputs may be alive, since a GPU saves them for the backward.
        moved: bytes that operations, except attention, have read and written so far.
        attention: ``"forward"`` or ``"backward"`` where the operation is one of this library's attention ops, whose internal memory is not
            counted here; else "".
    """

    alive: int
    grads: int
    inside: int
    kept: int
    moved: int
    attention: str


# moments, and how many of them belong to the forward
Traced = tuple[list[Moment], int]


def extrapolated(few: list[Moment], many: list[Moment], part: float) -> list[Moment]:
    """Returns few + part · (many − few), for two runs of the same operations."""
    found = []
    for a, b in zip(few, many, strict=True):
        assert a.attention == b.attention, "other lengths and depths make the same operations"
        alive, grads, inside, kept, moved = (x + round(part * (y - x)) for x, y in zip(a[:5], b[:5], strict=True))
        found.append(Moment(alive, grads, inside, kept, moved, a.attention))
    return found


def deepened(trace: Callable[[int], Traced], depth: int) -> Traced:
    """Returns the moments of ``depth`` blocks; for many blocks, those of the first and last ones, extrapolated from 3 and 4 of them."""
    if depth <= DEPTHS[1]:
        return trace(depth)
    (few, few_forward), (some, some_forward) = (trace(blocks) for blocks in DEPTHS)
    # the longer run without one block in each pass: the last two of the forward and the last one of the backward stay
    ahead = some_forward - few_forward
    back = len(some) - len(few) - ahead
    first, last = few_forward - 2 * ahead, len(some) - 2 * back
    aligned = some[:first] + some[first + ahead : last] + some[last + back :]
    return extrapolated(few, aligned, depth - DEPTHS[0]), few_forward


class Tape(TorchDispatchMode):
    """Records a ``Moment`` for each operation that creates something.

    Args:
        on_gpu: whether the tensors, which are on a CPU as far as PyTorch knows, represent a GPU's.
        parameters: they are counted elsewhere; their gradients are counted separately.
    """

    def __init__(self, *, on_gpu: bool, parameters: Iterable[nn.Parameter] = ()) -> None:
        super().__init__()
        self.on_gpu = on_gpu
        self.moments: list[Moment] = []
        self._alive = self._grads = self._kept = self._moved = 0
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()
        for parameter in parameters:
            self._seen.add(parameter.untyped_storage())
            parameter.register_post_accumulate_grad_hook(self._made_grad)

    def __enter__(self) -> Tape:
        # the layers' kernels of a GPU, or none
        self._layers = plain_layers(forced=self.on_gpu)
        self._layers.__enter__()
        return super().__enter__()  # type: ignore[no-any-return]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._layers.__exit__(*error)

    def note(self, inside: int = 0, attention: str = "") -> None:
        """Records the current state."""
        self.moments.append(Moment(self._alive, self._grads, inside, self._kept, self._moved, attention))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        made = 0
        for x in tree_iter(out):
            if isinstance(x, torch.Tensor) and (storage := x.untyped_storage()) not in self._seen:
                self._seen.add(storage)
                made += storage.nbytes()
                weakref.finalize(storage, self._free, storage.nbytes())
        self._alive += made
        name = str(func)
        attention = _ATTENTION.get(name, "")
        if attention == "forward" and (settings := settings_of(*args[len(INPUTS) :])).detached and settings.needs_grad:
            # the branch outputs are freed together with the log-sum-exp, which the backward needs as well
            self._kept += 1
            weakref.finalize(out[1].untyped_storage(), self._free, 0, 1)
        if made and not attention:
            # a lookup reads the rows that it returns, not the table
            self._moved += made + (made if name == "aten.embedding.default" else _bytes_of(args))
        inside = _inside(name, args, out, self.on_gpu)
        if made or inside or attention:
            # memory cannot be higher between two allocations
            self.note(inside, attention)
        return out

    def _made_grad(self, parameter: torch.Tensor) -> None:
        self._grads += 0 if parameter.grad is None else parameter.grad.untyped_storage().nbytes()

    def _free(self, size: int, kept: int = 0) -> None:
        self._alive -= size
        self._kept -= kept


def _bytes_of(args: Any) -> int:
    return sum(x.numel() * x.element_size() for x in tree_iter(args) if isinstance(x, torch.Tensor))


class FusedNorms(TorchFunctionMode):
    """Inside this mode an RMSNorm is one operation, as on a GPU, where torch has a kernel for it; on a CPU it is seven.

    A LayerNorm stands in for it, which reads and writes the same but for one number per row.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == "rms_norm":
            given = dict(zip(("input", "normalized_shape", "weight", "eps"), args, strict=False)) | (kwargs or {})
            x, weight = given["input"], given.get("weight")
            # torch's kernel takes equal dtypes only
            if weight is None or weight.dtype is x.dtype:
                return nn.functional.layer_norm(x, given["normalized_shape"], weight)
        return func(*args, **(kwargs or {}))


@contextmanager
def fake_tensors() -> Iterator[None]:
    """Inside this context tensors have no memory, and PyTorch's warnings, e.g. about slower kernels, are silenced."""
    with warnings.catch_warnings(), FakeTensorMode(allow_non_fake_inputs=True):
        warnings.simplefilter("ignore")
        yield


def _inside(name: str, args: tuple[Any, ...], out: Any, on_gpu: bool) -> int:
    if name == "aten._softmax_backward_data.default" and on_gpu:
        # torch's CUDA kernel takes grad · output as a separate tensor (aten/native/cuda/SoftMax.cu)
        return args[0].numel() * args[0].element_size()
    return 0
