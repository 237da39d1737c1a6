"""FlashAttention-4's compiled kernels, called again without its Python: a launch then costs microseconds of CPU instead of 100-200.

Its interface works out tile sizes, compile keys and validations anew at every call, in Python; a dilated attention makes tens of
short launches, and on 32,000 positions the CPU would be what is waited for. So the first call with given shapes and strides goes
through the interface while its kernel caches are watched: what is recorded is which compiled kernels ran, in which order, on which
tensors. Later calls with the same shapes, strides and alignment run those kernels on their own tensors, with scratch memory made anew.

Nothing is recorded, and every call goes the long way, where that would not be the same computation: inputs that share memory,
inputs that the interface copies first, more scratch memory than is known of, an interface whose caches are not found.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dilated_attention.fork import ForkSafeLock

_MOST_RECORDINGS = 2048
# functions of the interface whose caches are watched now, with these
_replaced: list[tuple[Any, Any]] = []


def _put_back(all_but: int = 0) -> None:
    """The caches themselves, but of the first ``all_but`` functions; of all in a child forked while another thread recorded."""
    while len(_replaced) > all_but:
        owner, cache = _replaced.pop()
        owner.compile_cache = cache


_lock = ForkSafeLock(_put_back)


@dataclass(frozen=True)
class _Scratch:
    shape: tuple[int, ...]
    dtype: torch.dtype
    zeroed: bool


@dataclass(frozen=True)
class _Place:
    """Stands inside a tuple or list among the arguments for the tensor of this index into inputs + scratch."""

    index: int


@dataclass(frozen=True)
class _Recording:
    """Kernels with their arguments: (position of the argument, index into inputs + scratch), everything else as it was.

    ``groups`` are the positions of arguments that are tuples or lists with tensors in them (lists of blocks), whose places are in them.
    """

    steps: tuple[tuple[Callable[..., Any], tuple[Any, ...], tuple[tuple[int, int], ...], tuple[int, ...]], ...]
    scratch: tuple[_Scratch, ...]

    def run(self, tensors: Sequence[torch.Tensor]) -> None:
        device = tensors[0].device
        held = [*tensors, *((torch.zeros if s.zeroed else torch.empty)(s.shape, dtype=s.dtype, device=device) for s in self.scratch)]
        for kernel, arguments, places, groups in self.steps:
            filled = list(arguments)
            for position, index in places:
                filled[position] = held[index]
            for position in groups:
                filled[position] = _mapped(filled[position], lambda x: held[x.index] if isinstance(x, _Place) else x)
            kernel(*filled)


class Replay:
    """Runs of one interface function, recorded by shapes and strides.

    Args:
        owners: names of the interface's functions whose ``compile_cache`` the kernels come from.
        num_scratch: tensors that the kernels use beside those they are given.
        num_zeroed: how many of them, the last ones that the kernels come to use, have to start as zeros.
    """

    def __init__(self, owners: tuple[str, ...], num_scratch: int, num_zeroed: int = 0) -> None:
        self._owners = owners
        self._num_scratch = num_scratch
        self._num_zeroed = num_zeroed
        self._recordings: OrderedDict[Hashable, _Recording | None] = OrderedDict()

    def __call__(
        self,
        interface: Any,
        tensors: Sequence[torch.Tensor],
        settings: tuple[Hashable, ...],
        call: Callable[[], object],
        geometry: Hashable = None,
    ) -> None:
        """The effect of ``call()``, which must write its results into some of ``tensors`` and depend on them and ``settings`` alone.

        Args:
            geometry: stands for the tensors' shapes and strides, where somebody has looked at them already.
        """
        first = tensors[0]
        shapes = geometry if geometry is not None else tuple((x.shape, x.stride()) for x in tensors)
        key = (shapes, settings, first.dtype, first.device, *[x.data_ptr() % 16 for x in tensors])
        recording = self._recordings.get(key)
        if recording is not None:
            recording.run(tensors)
        elif key in self._recordings or not all(hasattr(getattr(interface, name, None), "compile_cache") for name in self._owners):
            call()
        else:
            self._record(interface, key, tensors, call)

    def _record(self, interface: Any, key: Hashable, tensors: Sequence[torch.Tensor], call: Callable[[], object]) -> None:
        spans = [_identity(x) for x in tensors]
        if len(set(spans)) < len(spans):
            # which of two tensors an argument was cannot be told; the next call may have two
            call()
            return
        steps: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []
        with _lock:
            before = len(_replaced)
            try:
                for name in self._owners:
                    owner = getattr(interface, name)
                    _replaced.append((owner, owner.compile_cache))
                    owner.compile_cache = _Watched(owner.compile_cache, steps)
                call()
            finally:
                _put_back(before)
            self._recordings[key] = _recording(steps, spans, self._num_scratch, self._num_zeroed)
            while len(self._recordings) > _MOST_RECORDINGS:
                self._recordings.popitem(last=False)


replay_forward = Replay(("_flash_attn_fwd",), num_scratch=0)
_BACKWARD = ("_bwd_preprocess", "_flash_attn_bwd", "_bwd_postprocess_convert")
# the backward's scratch: dq in float32, which its first kernel clears, δ and lse in base 2
_one_to_one = Replay(_BACKWARD, num_scratch=3)
# and the sums of dk and dv over the heads that share them, in float32
_grouped = Replay(_BACKWARD, num_scratch=5, num_zeroed=2)


def replay_backward(q: torch.Tensor, k: torch.Tensor) -> Replay:
    """Of backward passes of as many key heads as query heads, or of fewer."""
    return _one_to_one if k.shape[2] == q.shape[2] else _grouped


class _Watched:
    """A kernel cache that tells which of its kernels this thread calls, and with what."""

    def __init__(self, cache: Any, steps: list[tuple[Callable[..., Any], tuple[Any, ...]]]) -> None:
        self._cache = cache
        self._steps = steps
        self._thread = threading.get_ident()

    def __contains__(self, key: object) -> bool:
        return key in self._cache

    def __setitem__(self, key: object, kernel: object) -> None:
        self._cache[key] = kernel

    def __getitem__(self, key: object) -> Callable[..., Any]:
        kernel = self._cache[key]

        def watched(*arguments: Any) -> Any:
            if threading.get_ident() == self._thread:
                self._steps.append((kernel, arguments))
            return kernel(*arguments)

        return watched


def _identity(x: torch.Tensor) -> tuple[Any, ...]:
    return x.data_ptr(), x.dtype, tuple(x.shape), x.stride()


def _recording(
    steps: list[tuple[Callable[..., Any], tuple[Any, ...]]], spans: list[tuple[Any, ...]], num_scratch: int, num_zeroed: int
) -> _Recording | None:
    """The steps with every tensor named, or None where some tensor is neither an input nor plain scratch memory."""
    known = {span: index for index, span in enumerate(spans)}
    used: set[int] = set()
    scratch: list[_Scratch] = []
    recorded = []

    def place_of(tensor: torch.Tensor) -> int | None:
        identity = _identity(tensor)
        if identity not in known:
            if not tensor.is_contiguous() or tensor.storage_offset():
                return None
            known[identity] = len(spans) + len(scratch)
            scratch.append(_Scratch(tuple(tensor.shape), tensor.dtype, len(scratch) >= num_scratch - num_zeroed))
        used.add(known[identity])
        return known[identity]

    for kernel, arguments in steps:
        places, groups = [], []
        kept = list(arguments)
        for position, argument in enumerate(arguments):
            if isinstance(argument, torch.Tensor):
                place = place_of(argument)
                if place is None:
                    return None
                places.append((position, place))
                kept[position] = None
            elif isinstance(argument, (tuple, list)) and _holds_tensor(argument):
                # a tensor that is nowhere known is one that the interface made for itself
                unknown = [x for x in _leaves(argument) if isinstance(x, torch.Tensor) and _identity(x) not in known]
                if unknown:
                    return None
                used.update(known[_identity(x)] for x in _leaves(argument) if isinstance(x, torch.Tensor))
                kept[position] = _mapped(argument, lambda x: _Place(known[_identity(x)]) if isinstance(x, torch.Tensor) else x)
                groups.append(position)
            elif _holds_tensor(argument):
                return None
        recorded.append((kernel, tuple(kept), tuple(places), tuple(groups)))
    # an input that no kernel was given was copied first; more scratch than expected may be such copies
    if not recorded or len(scratch) != num_scratch or not used.issuperset(range(len(spans))):
        return None
    return _Recording(tuple(recorded), tuple(scratch))


def _mapped(argument: Any, change: Callable[[Any], Any]) -> Any:
    """The same tuples and lists, named ones too, of changed leaves."""
    if not isinstance(argument, (tuple, list)):
        return change(argument)
    parts = [_mapped(x, change) for x in argument]
    return type(argument)(*parts) if hasattr(argument, "_fields") else type(argument)(parts)


def _leaves(argument: Any) -> Iterator[Any]:
    if isinstance(argument, (tuple, list)):
        for x in argument:
            yield from _leaves(x)
    else:
        yield argument


def _holds_tensor(argument: Any) -> bool:
    if isinstance(argument, (tuple, list)):
        return any(isinstance(x, torch.Tensor) or _holds_tensor(x) for x in argument)
    return any(isinstance(x, torch.Tensor) for x in getattr(argument, "__dict__", {}).values())
