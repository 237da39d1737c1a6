"""Side streams on which independent launches run concurrently.

Short launches then fill the GPU together, and while one chunk is merged (limited by memory), the next is computed (limited by arithmetic).
"""

from __future__ import annotations

import contextlib
import functools

import torch


class Streams:
    """The current CUDA stream and side streams, each in order.

    Every stream waits for the work issued before ``with``, and work issued after the block waits for every stream.

    Index 0 is the current stream. Only memory that outlives the ``with`` block may be passed between streams. On devices other than
    CUDA there is a single one. Streams are joined by events, which a CUDA graph captures.
    """

    def __init__(self, device: torch.device, count: int) -> None:
        self._main = torch.cuda.current_stream(device) if device.type == "cuda" else None
        # reuse the same streams, since torch's allocator keeps a separate memory pool for each stream
        self._side = tuple(_stream(device, index) for index in range(count - 1)) if self._main is not None else ()

    def __enter__(self) -> Streams:
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

    def stream(self, index: int) -> contextlib.AbstractContextManager[object]:
        index %= len(self)
        return contextlib.nullcontext() if index == 0 else torch.cuda.stream(self._side[index - 1])


@functools.lru_cache(maxsize=64)
def _stream(device: torch.device, index: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
