"""Side streams, so that independent launches run beside each other: short ones fill the GPU together, and while one chunk is
merged (memory) the next one is computed (arithmetic)."""

from __future__ import annotations

import contextlib
import functools

import torch


class Lanes:
    """Work on lane i runs in order, lanes run beside each other; everything before ``with`` is seen, everything after it waits.

    Lane 0 is the current stream. Only memory that outlives the ``with`` block may be handed from lane to lane. Off CUDA there is
    one lane. Streams are joined by events, which a CUDA graph captures.
    """

    def __init__(self, device: torch.device, count: int) -> None:
        self._main = torch.cuda.current_stream(device) if device.type == "cuda" else None
        # the same ones whatever their number: torch's allocator keeps memory apart for every stream
        self._side = tuple(_stream(device, index) for index in range(count - 1)) if self._main is not None else ()

    def __enter__(self) -> Lanes:
        if self._side:
            assert self._main is not None
            start = self._main.record_event()
            for stream in self._side:
                stream.wait_event(start)
        return self

    def __exit__(self, *_: object) -> None:
        if self._main is not None:
            for stream in self._side:
                self._main.wait_stream(stream)

    def __len__(self) -> int:
        return 1 + len(self._side)

    def lane(self, index: int) -> contextlib.AbstractContextManager[object]:
        index %= len(self)
        return contextlib.nullcontext() if index == 0 else torch.cuda.stream(self._side[index - 1])


@functools.lru_cache(maxsize=64)
def _stream(device: torch.device, index: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
