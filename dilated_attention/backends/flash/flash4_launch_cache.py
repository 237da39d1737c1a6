"""Replays FlashAttention-4's compiled kernels without its Python code: a launch then costs microseconds of CPU time instead of 100-200.

The interface recomputes tile sizes, compile keys and validations in Python at every call. A dilated attention makes tens of short
launches, so at 32,000 positions the CPU would be the bottleneck. So the first call with given shapes and strides goes through the
interface while its kernel caches are watched: it records which compiled kernels ran, in which order, on which tensors. Later calls with
the same shapes, strides and alignment run those kernels on their own tensors, with newly allocated scratch memory.

Nothing is recorded, and every call goes through the interface, where a replay might not be the same computation: if inputs share memory,
if the interface copies inputs first, if it uses more scratch memory than expected, or if its caches are not found.
"""

from __future__ import annotations

import functools
import operator
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

_MOST_RECORDINGS = 2048
_lock = threading.RLock()
# a kernel and its arguments
_Steps = list[tuple[Callable[..., Any], tuple[Any, ...]]]
# takes an argument from inputs + scratch
_Taker = Callable[[list[Tensor]], Any]


class Replay:
    """The recorded runs of one interface function, by shapes and strides.

    Args:
        owners: names of the interface's functions whose ``compile_cache`` holds the kernels.
        num_scratch: number of tensors that the kernels use in addition to those passed to them.
        num_zeroed: how many of these must start as zeros: the last ones in the order of first use.
    """

    def __init__(self, owners: tuple[str, ...], num_scratch: int, num_zeroed: int = 0) -> None:
        self._owners = owners
        self._num_scratch = num_scratch
        self._num_zeroed = num_zeroed
        self._recordings: OrderedDict[Hashable, Callable[[Sequence[Tensor]], None] | None] = OrderedDict()

    def __call__(
        self,
        interface: Any,
        tensors: Sequence[Tensor],
        settings: tuple[Hashable, ...],
        call: Callable[[], object],
        geometry: Hashable = None,
    ) -> None:
        """Has the effect of ``call()``, which must write its results into some of ``tensors`` and depend only on them and ``settings``.

        Args:
            geometry: a key that stands for the tensors' shapes and strides, if the caller has already computed one.
        """
        first = tensors[0]
        shapes = geometry if geometry is not None else tuple((x.shape, x.stride()) for x in tensors)
        key = (shapes, settings, first.dtype, first.device, *[x.data_ptr() % 16 for x in tensors])
        recording = self._recordings.get(key)
        if recording is not None:
            recording(tensors)
        elif key in self._recordings or not all(hasattr(getattr(interface, name, None), "compile_cache") for name in self._owners):
            call()
        else:
            self._record(interface, key, tensors, call)

    def _record(self, interface: Any, key: Hashable, tensors: Sequence[Tensor], call: Callable[[], object]) -> None:
        identities = [_identity(x) for x in tensors]
        if len(set(identities)) < len(identities):
            # an argument could be either of two identical tensors, which may differ in the next call
            call()
            return
        steps: _Steps = []
        with _lock:
            owners = [getattr(interface, name) for name in self._owners]
            caches = [owner.compile_cache for owner in owners]
            try:
                for owner, cache in zip(owners, caches, strict=True):
                    owner.compile_cache = _Watched(cache, steps)
                call()
            finally:
                for owner, cache in zip(owners, caches, strict=True):
                    owner.compile_cache = cache
            self._recordings[key] = _recording(steps, identities, self._num_scratch, self._num_zeroed)
            while len(self._recordings) > _MOST_RECORDINGS:
                self._recordings.popitem(last=False)


replay_forward = Replay(("_flash_attn_fwd",), num_scratch=0)
_BACKWARD = ("_bwd_preprocess", "_flash_attn_bwd", "_bwd_postprocess_convert")
# the backward's scratch: dq in float32, which its first kernel clears; δ; and lse in base 2
_one_to_one = Replay(_BACKWARD, num_scratch=3)
# in addition, float32 sums of dk and dv over the heads that share them
_grouped = Replay(_BACKWARD, num_scratch=5, num_zeroed=2)


def replay_backward(q: Tensor, k: Tensor) -> Replay:
    """Returns the replay for backward passes with as many key heads as query heads, or with fewer."""
    return _one_to_one if k.shape[2] == q.shape[2] else _grouped


class _Watched:
    """A kernel cache that records which of its kernels this thread calls, and with which arguments."""

    def __init__(self, cache: Any, steps: _Steps) -> None:
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


def _identity(x: Tensor) -> tuple[Any, ...]:
    return x.data_ptr(), x.dtype, tuple(x.shape), x.stride()


def _recording(
    steps: _Steps, identities: list[tuple[Any, ...]], num_scratch: int, num_zeroed: int
) -> Callable[[Sequence[Tensor]], None] | None:
    """Returns what runs the steps on other inputs, or None if some tensor is neither an input nor plain scratch memory."""
    places = {identity: index for index, identity in enumerate(identities)}
    used: set[int] = set()
    scratch: list[Callable[[], Tensor]] = []

    def taker(argument: Any, is_whole: bool = True) -> _Taker | None:
        """Returns None for an argument without tensors, which stays as it was. ``is_whole``: it is not an entry of another one.

        Raises:
            KeyError: a tensor is neither an input nor scratch.
        """
        if isinstance(argument, Tensor):
            identity = _identity(argument)
            # a tensor in a list (block lists) that is no input is one that the interface created itself
            if is_whole and identity not in places and argument.is_contiguous() and not argument.storage_offset():
                places[identity] = len(identities) + len(scratch)
                make = torch.zeros if len(scratch) >= num_scratch - num_zeroed else torch.empty
                scratch.append(functools.partial(make, argument.shape, dtype=argument.dtype, device=argument.device))
            used.add(places[identity])
            return operator.itemgetter(places[identity])
        if not isinstance(argument, (tuple, list)):
            contents = argument if isinstance(argument, dict) else getattr(argument, "__dict__", {})
            if any(isinstance(x, Tensor) for x in contents.values()):
                raise KeyError(argument)
            return None
        takers = [taker(x, False) for x in argument]
        if not any(takers):
            return None
        parts = [(take, None if take else x) for take, x in zip(takers, argument, strict=True)]
        rebuilt = getattr(type(argument), "_make", type(argument))
        return lambda tensors: rebuilt([take(tensors) if take else x for take, x in parts])

    recorded = []
    try:
        for kernel, arguments in steps:
            takers = [(position, take) for position, x in enumerate(arguments) if (take := taker(x))]
            taken = {position for position, _ in takers}
            recorded.append((kernel, [None if i in taken else x for i, x in enumerate(arguments)], takers))
    except KeyError:
        return None
    # an input that was passed to no kernel was copied first; more scratch than expected may be such copies
    if not recorded or len(scratch) != num_scratch or not used.issuperset(range(len(identities))):
        return None

    def run(inputs: Sequence[Tensor]) -> None:
        tensors = [*inputs, *(make() for make in scratch)]
        for kernel, constants, takers in recorded:
            arguments = constants.copy()
            for position, take in takers:
                arguments[position] = take(tensors)
            kernel(*arguments)

    return run
