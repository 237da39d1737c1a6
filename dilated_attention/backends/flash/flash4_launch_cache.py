"""Replays FlashAttention-4's compiled kernels without its Python code: a launch then costs microseconds of CPU time instead of 100-200.

The interface recomputes tile sizes, compile keys and validations in Python at every call. A dilated attention makes tens of short
launches, so at 32,000 positions the CPU would be the bottleneck. So the second call with given shapes and strides goes through the
interface while its kernel caches are watched: it records which compiled kernels ran, in which order, on which tensors. Later calls with
the same shapes, strides and alignment run those kernels on their own tensors, with newly allocated scratch memory. A first call is not
recorded, which costs nearly as much as the call: where lengths change with every step, there is no second one.

Where a replay might not be the same computation, nothing is recorded and every call goes through the interface: if two inputs are the same
view, if the interface copies inputs first, if it uses more scratch memory than expected, or if its caches are not found.
"""

from __future__ import annotations

import functools
import operator
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

_MOST_PROGRAMS = 2048
_lock = threading.RLock()
# the kernels that a call ran, each with its arguments
_Steps = list[tuple[Callable[..., Any], tuple[Any, ...]]]
# runs the kernels of a recorded call on other inputs
_Program = Callable[[Sequence[Tensor]], None]
# returns an argument that consists of, or contains, some of the tensors: inputs + scratch
_Taker = Callable[[list[Tensor]], Any]


class Replay:
    """The recorded runs of one interface function, by shapes and strides.

    Args:
        owners: names of the interface's functions whose ``compile_cache`` holds the kernels.
        num_scratch: number of tensors that kernels take beyond the call's tensors.
        num_zeroed: how many of these must start as zeros: the last ones in the order of first use.
    """

    def __init__(self, owners: tuple[str, ...], num_scratch: int, num_zeroed: int = 0) -> None:
        self._owners = owners
        self._num_scratch = num_scratch
        self._num_zeroed = num_zeroed
        # False for calls that were made once, None for those that cannot be replayed
        self._programs: OrderedDict[Hashable, _Program | Literal[False] | None] = OrderedDict()

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
        # the dtypes of the other tensors follow from the first
        key = (shapes, settings, first.dtype, first.device, *[x.data_ptr() % 16 for x in tensors])
        program = self._programs.get(key)
        if program:
            program(tensors)
        elif program is False and all(hasattr(getattr(interface, name, None), "compile_cache") for name in self._owners):
            self._record(interface, key, tensors, call)
        else:
            call()
            if key not in self._programs:
                self._remember(key, False)

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
        self._remember(key, _program_of(steps, identities, self._num_scratch, self._num_zeroed))

    def _remember(self, key: Hashable, program: _Program | Literal[False] | None) -> None:
        with _lock:
            self._programs[key] = program
            while len(self._programs) > _MOST_PROGRAMS:
                self._programs.popitem(last=False)


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


def _program_of(steps: _Steps, identities: list[tuple[Any, ...]], num_scratch: int, num_zeroed: int) -> _Program | None:
    """Returns what runs the steps on other inputs; None if some tensor is neither an input nor plain scratch memory.

    Arguments without tensors stay as they were. A stream is never among them: kernels are compiled with
    ``make_fake_stream(use_tvm_ffi_env_stream=True)``, and so run on the stream that is current at the launch.
    """
    indices = {identity: index for index, identity in enumerate(identities)}
    used: set[int] = set()
    scratch: list[Callable[[], Tensor]] = []

    def taker_of(argument: Any, is_entry: bool = False) -> _Taker | None:
        """Returns what takes an argument, or an entry of one; None if it contains no tensors.

        Raises:
            KeyError: a tensor is neither an input nor scratch.
        """
        if isinstance(argument, Tensor):
            identity = _identity(argument)
            # an entry (of block lists) that is no input is a tensor that the interface created itself, and no scratch
            if not is_entry and identity not in indices and argument.is_contiguous() and not argument.storage_offset():
                indices[identity] = len(identities) + len(scratch)
                make = torch.zeros if len(scratch) >= num_scratch - num_zeroed else torch.empty
                scratch.append(functools.partial(make, argument.shape, dtype=argument.dtype, device=argument.device))
            used.add(indices[identity])
            return operator.itemgetter(indices[identity])
        if not isinstance(argument, (tuple, list)):
            contents = argument if isinstance(argument, dict) else getattr(argument, "__dict__", {})
            if any(isinstance(x, Tensor) for x in contents.values()):
                raise KeyError(argument)
            return None
        of_entries = [taker_of(x, is_entry=True) for x in argument]
        if not any(of_entries):
            return None
        entries = [(take, None if take else x) for take, x in zip(of_entries, argument, strict=True)]
        rebuilt = getattr(type(argument), "_make", type(argument))
        return lambda tensors: rebuilt([take(tensors) if take else x for take, x in entries])

    launches = []
    try:
        for kernel, arguments in steps:
            takers = {position: take for position, x in enumerate(arguments) if (take := taker_of(x))}
            launches.append((kernel, [None if i in takers else x for i, x in enumerate(arguments)], list(takers.items())))
    except KeyError:
        return None
    # an input that was passed to no kernel was copied first; more scratch than expected may be such copies
    if not launches or len(scratch) != num_scratch or not used.issuperset(range(len(identities))):
        return None

    def run(inputs: Sequence[Tensor]) -> None:
        tensors = [*inputs, *(make() for make in scratch)]
        for kernel, constants, taken in launches:
            arguments = constants.copy()
            for position, take in taken:
                arguments[position] = take(tensors)
            kernel(*arguments)

    return run
