"""KV caches: they keep the keys and values of past positions, so that a new token costs one row of attention.

``KVCache`` gives every request a contiguous stretch of equal length; for a cache in pages see ``paged.py``. Both hold what later rows
can still read: the last max(w) positions with LongNet's branches, the width of a window, everything with dense attention. Keys are stored
as they enter the product: normalised and rotated by their absolute position.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from dilated_attention.engine.decode.row import Cached
from dilated_attention.models.config import LongNetConfig
from dilated_attention.models.kv_cache.decode_step import CachePass, Chunk, Step
from dilated_attention.models.kv_cache.storage import Storage


class Cache(Storage):
    """Base class of both caches: the storage of requests, and passes of a model over new positions of them.

    A pass that fails or is interrupted leaves ``lengths`` unchanged, and any other pass may follow: no pass reads what it wrote. If it
    fails while its end is being recorded, its requests are refused until they are freed.
    """

    def begin(self, batch: int, num_tokens: int, requests: slice | None = None) -> CachePass:
        """Begins a pass over ``num_tokens`` new positions of ``requests`` (default: all), whose number must be ``batch``."""
        chosen = self._chosen(requests)
        if batch != len(chosen):
            raise ValueError(f"the batch is {batch} and the cache has {len(chosen)} requests; they must be equal: for one, use cache.of(i)")
        if num_tokens == 1 and requests is None and any(self.active):
            self.prepare_step()
            return self.step()
        lengths = [self.lengths[i] for i in chosen]
        if len(set(lengths)) > 1:
            raise ValueError(
                f"requests have {lengths} positions; several new positions at a time need equal lengths: "
                "pass requests one by one, cache.of(i)"
            )
        for request in chosen:
            self._check_pass(request, num_tokens)
            self._ends[request] = max(self._ends[request], lengths[0] + num_tokens)
            self.reserve(request, lengths[0] + num_tokens)
        return Chunk(self, slice(chosen.start, chosen.stop), lengths[0], num_tokens)

    def prepare_step(self) -> int:
        """Reserves room and prepares tables for one more position of every active request.

        Returns the generation of the tables; a CUDA graph captured with another generation must be discarded.
        """
        for request in range(self.num_requests):
            if self.active[request]:
                self._check_pass(request, 1)
                self._ends[request] = max(self._ends[request], self.lengths[request] + 1)
                self.reserve(request, self.lengths[request] + 1)
        return self.row_keys.prepare([self._position(request) for request in range(self.num_requests)])

    def step(self) -> CachePass:
        """Returns a pass of one position for every request, after ``prepare_step``.

        It runs on the device only, so a CUDA graph may capture it.
        """
        return Step(self)

    def of(self, request: int) -> Requests:
        """Returns the cache of one request, to prefill it: ``model(tokens[None], cache=cache.of(i))``."""
        self._checked(request)
        return Requests(self, slice(request, request + 1))

    def _check_pass(self, request: int, num_tokens: int) -> None:
        if request in self._cut_off:
            raise RuntimeError(
                f"request {request} was cut off by an error while its positions were written, and what it holds cannot be trusted; "
                f"expected a request whose last pass ended: call free({request}) of the cache and prefill the request again"
            )
        if self.lengths[request] + num_tokens > self.max_length:
            raise ValueError(
                f"request {request} has {self.lengths[request]} positions, {num_tokens} more are requested, "
                f"and max_length is {self.max_length}; make a cache with a larger max_length"
            )


class KVCache(Cache):
    """Gives every request a contiguous stretch of equal length, used as a ring buffer once it is full.

    A stretch holds what rows can still read: min(max_length, max(w)) positions for dilated branches, left + 1 for a window plus the global
    tokens before it, else max_length.

    Args:
        config: the model's configuration.
        num_requests: B, the number of requests.
        max_length: maximum number of positions of a request, prompt and new ones together.
        device, dtype: those of keys and values; they must be those of the model.
        backend: the backend for decoding; see ``decode_attention``.

    Raises:
        ValueError: if a block pattern is not ``is_prefix_stable``, or sizes are invalid.

    >>> cache = KVCache(
    ...     model.config, 1, 2**20, device="cuda", dtype=torch.bfloat16)
    >>> logits = model(prompt, cache=cache)
    >>> logits = model(next_token, cache=cache)
    >>> print(cache)
    """

    def __init__(
        self,
        config: LongNetConfig,
        num_requests: int,
        max_length: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__(config, num_requests, max_length, device=device, dtype=dtype, backend=backend)
        self.capacity = min(self.max_length, self.row_keys.num_needed)
        self.wraps = self.capacity < self.max_length
        self._allocate(self.num_requests, self.capacity)

    def cached(self, layer: int, requests: slice) -> Cached:
        return Cached(self.keys[layer][requests], self.values[layer][requests], wraps=self.wraps, fixed=self.row_keys.fixed)

    def first_to_overwrite(self, length: int) -> int:
        fixed = self.row_keys.fixed
        lows = [max(low, fixed) for low, high in self.row_keys.needed(length) if high > max(low, fixed)]
        return min(lows) + self.capacity - fixed if self.wraps and lows else self.max_length

    def _holds(self, request: int, length: int) -> bool:
        return self._ends[request] <= self.first_to_overwrite(length)

    def _shape(self) -> str:
        return f"{self.num_requests} × {self.capacity:,} positions"


@dataclass(frozen=True)
class Requests:
    """A view of some requests of a cache, used in place of the whole cache."""

    cache: Cache
    requests: slice

    def begin(self, batch: int, num_tokens: int) -> CachePass:
        return self.cache.begin(batch, num_tokens, self.requests)

    def as_one(self) -> AbstractContextManager[None]:
        return self.cache.as_one(self.requests)
