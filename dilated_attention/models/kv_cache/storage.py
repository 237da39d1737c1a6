"""Where a model keeps keys and values of past positions: requests, their lengths, and what each of them holds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from dilated_attention.engine.decode import dispatch
from dilated_attention.engine.decode.keys import RowKeys, row_keys
from dilated_attention.engine.decode.row import Cached
from dilated_attention.models.config import LongNetConfig
from dilated_attention.models.summary import readable
from dilated_attention.pattern.checks import as_int, shown
from dilated_attention.validation import DTYPES

# the host keeps a length of each
MAX_REQUESTS = 2**20


class Storage(ABC):
    """Keys and values of requests, and how far each request has come: what a pass over new positions reads and writes.

    ``lengths`` are kept on the host, so no step waits for the device. ``positions`` (B,) says where a step writes each request's next
    token. A request that is not ``active`` takes part in steps without growing: its row is computed and ignored. ``changes`` counts how
    often each request has grown or shrunk.
    """

    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    # whether new positions reuse the slots of old ones
    wraps = False

    def __init__(
        self,
        config: LongNetConfig,
        num_requests: int,
        max_length: int,
        *,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
        backend: str,
    ) -> None:
        if not isinstance(config, LongNetConfig):
            raise TypeError(f"config is {shown(config)} ({type(config).__name__}); expected a LongNetConfig, e.g. model.config")
        if not config.is_causal:
            raise ValueError("config.is_causal is False; keys of past positions are useful only for causal attention")
        self.config = config
        self.num_requests = as_int("num_requests", num_requests, minimum=1, maximum=MAX_REQUESTS)
        self.max_length = as_int("max_length", max_length, minimum=1)
        self.device = torch.empty(0, device=device).device
        self.dtype = torch.get_default_dtype() if dtype is None else dtype
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype is {dtype}; expected float16, bfloat16, float32 or float64, that of the model")
        dispatch.check_name(backend)
        self.backend = backend
        self.num_kv_heads = config.num_kv_heads or config.num_heads
        self.row_keys: RowKeys = row_keys(config.pattern, config.num_heads, self.num_kv_heads, self.max_length, self.device)
        self.lengths = [0] * self.num_requests
        self.active = [True] * self.num_requests
        # requests that must not be continued; and, for each request, the furthest end of all passes that were begun
        self._cut_off: frozenset[int] = frozenset()
        self._ends = [0] * self.num_requests
        self.changes = [0] * self.num_requests
        self.positions = torch.zeros(self.num_requests, dtype=torch.int64, device=self.device)

    @abstractmethod
    def cached(self, layer: int, requests: slice) -> Cached:
        """Returns the storage of the keys and values of a layer."""

    def reserve(self, request: int, length: int) -> None:
        """Makes room for positions below ``length``, unless there always is."""
        return

    def release(self, request: int) -> None:
        """Releases what no future row of this request can read, unless its slots are reused anyway."""
        return

    def first_to_overwrite(self, length: int) -> int:
        """Returns the first position that would overwrite a slot that rows from ``length`` on read; ``max_length`` if there is none."""
        return self.max_length

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values, as allocated."""
        return sum(x.numel() * x.element_size() for x in (*self.keys, *self.values))

    @property
    def position_bytes(self) -> int:
        """Bytes of one position: its keys and values in all layers."""
        return 2 * self.config.num_layers * self.num_kv_heads * self.config.head_dim * self.dtype.itemsize

    def advance(self, requests: slice | None = None, by: int = 1) -> None:
        """Increases the lengths of some requests, which become active, or of all active ones."""
        chosen = [i for i in self._chosen(requests) if requests is not None or self.active[i]]
        with self.writing_down(chosen):
            for i in chosen:
                self.lengths[i] += by
                self.changes[i] += 1
                self.active[i] = True
            if requests is None and all(self.active):
                self.positions += by
            else:
                self._place()

    @contextmanager
    def as_one(self, requests: slice | None = None) -> Iterator[None]:
        """Makes several passes count as one: if any of them fails, the requests are restored.

        A request whose former contents have been overwritten is refused until it is freed.
        """
        before = [(i, self.lengths[i], self.active[i]) for i in self._chosen(requests)]
        try:
            yield
        except BaseException:
            lost = {i for i, length, _ in before if length != self.lengths[i] and not self._holds(i, length)}
            with self.writing_down([i for i, _, _ in before]):
                for i, length, is_active in before:
                    self.lengths[i], self.active[i] = length, is_active
                    self.changes[i] += 1
                self._place()
            self._cut_off |= lost
            for i, length, is_active in before:
                if length == 0:
                    # it held nothing before, so it can be reset completely, wherever the error occurred
                    self.free(i)
                    self.active[i] = is_active
            raise

    @contextmanager
    def writing_down(self, requests: Iterable[int]) -> Iterator[None]:
        """Guards an update of the requests' contents and bookkeeping: if an error interrupts it, these requests are refused."""
        before = self._cut_off
        self._cut_off = before.union(requests)
        yield
        self._cut_off = before

    def finish(self, request: int) -> None:
        """Stops a request from growing; it keeps its positions until it is freed."""
        self.active[self._checked(request)] = False
        self._place()

    def free(self, request: int) -> None:
        """Forgets a request, so that its place can be prefilled again with ``cache.of(request)``.

        Until then a step over all requests drops its token, as that of a finished one.
        """
        with self.writing_down([self._checked(request)]):
            self.lengths[request] = 0
            self.changes[request] += 1
            self._ends[request] = 0
            self.finish(request)
            self._forget(request)
        self._cut_off -= {request}

    def __str__(self) -> str:
        dense = self.position_bytes * self.max_length * self.num_requests
        return (
            f"KV cache: {self.config.num_layers} layers × 2 × {self._shape()} × {self.num_kv_heads} heads × {self.config.head_dim}, "
            f"{str(self.dtype).removeprefix('torch.')}: {readable(self.nbytes)}; "
            f"all of {self.num_requests} × {self.max_length:,} positions, as dense attention keeps them, would be {readable(dense)}"
        )

    @abstractmethod
    def _holds(self, request: int, length: int) -> bool:
        """Whether the cache still holds all that rows from ``length`` on read, after passes over later positions."""

    def _forget(self, request: int) -> None:
        """Releases all that a request holds, unless its slots are written again before they are read."""
        return

    @abstractmethod
    def _shape(self) -> str:
        """Describes the requests and slots, or the pages, for display."""

    def _chosen(self, requests: slice | None) -> range:
        return range(self.num_requests)[slice(None) if requests is None else requests]

    def _position(self, request: int) -> int:
        length = self.lengths[request]
        # a finished request keeps writing to its next position; no row reads that slot before it is written again
        return min(length, self.max_length - 1)

    def _place(self) -> None:
        self.positions.copy_(torch.tensor([self._position(i) for i in range(self.num_requests)]))

    def _checked(self, request: int) -> int:
        if not 0 <= as_int("request", request) < self.num_requests:
            raise ValueError(f"request is {request}; expected 0 to {self.num_requests - 1}")
        return request

    def _allocate(self, *shape: int) -> None:
        shape = (*shape, self.num_kv_heads, self.config.head_dim)
        self.keys, self.values = (
            [torch.zeros(shape, dtype=self.dtype, device=self.device) for _ in range(self.config.num_layers)] for _ in range(2)
        )
