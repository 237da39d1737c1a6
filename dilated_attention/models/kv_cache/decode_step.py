"""A pass of a model over new positions with a cache: one position of every request, or a chunk of positions of some requests."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from dilated_attention.engine.decode import dispatch
from dilated_attention.engine.decode.dispatch import has_kernels
from dilated_attention.engine.decode.keys import Runs, WindowKeys
from dilated_attention.engine.decode.row import Cached
from dilated_attention.functional.arguments import autocast
from dilated_attention.models.kv_cache.storage import Storage
from dilated_attention.modules.rotary import Table, rotate

if TYPE_CHECKING:
    from dilated_attention.modules.core import Attention
    from dilated_attention.modules.projections import MultiheadAttention

# (rotation table of queries, rotation table of keys)
Tables = tuple[Table, Table]


class CachePass(ABC):
    """A pass. What all layers share is computed once, at its beginning."""

    def __init__(self, cache: Storage, requests: slice, count: int) -> None:
        self.cache, self.requests, self.count = cache, requests, count
        self._begun = cache.changes[requests]
        self._rotations: dict[Any, Tables] = {}

    @property
    def batch(self) -> int:
        return len(self._begun)

    def check(self) -> None:
        """Raises ValueError if other passes have changed the requests since this one was begun."""
        if self.cache.changes[self.requests] != self._begun:
            raise ValueError(
                f"this pass is stale: its requests have changed since it was begun, to {self.cache.lengths[self.requests]} positions; "
                "expected no other pass between its beginning and its end: begin a new one"
            )

    def rotation(self, module: MultiheadAttention, dtype: torch.dtype) -> Tables:
        """Returns (queries' table, keys' table) of the new positions, made once for all layers with the same rotation."""
        key = (module.head_dim, module.rotary_base, module.xpos_scale_base, dtype)
        if key not in self._rotations:
            self._rotations[key] = self._rotation(module, dtype)
        return self._rotations[key]

    @abstractmethod
    def _rotation(self, module: MultiheadAttention, dtype: torch.dtype) -> Tables: ...

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tables: Tables | None, attention: Attention
    ) -> torch.Tensor:
        """Returns out (B, n, H, D) for queries (B, n, H, D) of a layer, and adds k and v (B, n, K, D) to the cache.

        Args:
            tables: the tables of ``rotation``, with which queries and keys still have to be rotated; None to leave them as they are.
            attention: the layer's attention module, which computes chunks.
        """
        cache, expected = self.cache, (self.batch, self.count)
        if tuple(k.shape[:2]) != expected:
            raise ValueError(f"x has (batch, positions) {tuple(k.shape[:2])} and this pass was begun for {expected}; begin one for these")
        q, k, v = autocast(q, k, v)
        if (k.dtype, k.device) != (cache.dtype, cache.device):
            raise ValueError(
                f"the cache holds {cache.dtype} on {cache.device} and keys are {k.dtype} on {k.device}; "
                f"make the cache with dtype={k.dtype}, device={str(k.device)!r}"
            )
        return self._attend(layer, q, k, v, tables, attention)

    @abstractmethod
    def _attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tables: Tables | None, attention: Attention
    ) -> torch.Tensor: ...

    @abstractmethod
    def end(self) -> None:
        """Ends the pass: the lengths grow."""


class Step(CachePass):
    """A pass over one new position of every request, each at its own position.

    Nothing here depends on the lengths on the host, so a CUDA graph may replay it.
    """

    def __init__(self, cache: Storage) -> None:
        super().__init__(cache, slice(0, cache.num_requests), 1)
        self.positions = cache.positions
        runs = cache.row_keys.runs(self.positions)
        keys = cache.row_keys
        is_window = isinstance(keys, WindowKeys) and runs.first.shape[2] == 1 and keys.max_keys == keys.span
        if is_window and cache.wraps and runs.dense is None:
            # a window that fills its stretch reads every slot, and softmax does not depend on their order
            runs = replace(runs, dense=(self.positions + 1).clamp(max=keys.span).to(torch.int32))
        self.runs: Runs = runs

    def _rotation(self, module: MultiheadAttention, dtype: torch.dtype) -> Tables:
        (q_cos, q_sin), (k_cos, k_sin) = module.rotation(self.positions, None, self.cache.max_length, dtype)
        # each batch entry has its own position
        return (q_cos[:, None], q_sin[:, None]), (k_cos[:, None], k_sin[:, None])

    def _attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tables: Tables | None, attention: Attention
    ) -> torch.Tensor:
        cached = self.cache.cached(layer, slice(None))
        if has_kernels(k):
            from dilated_attention.engine.decode.triton import rotate_and_append

            row = rotate_and_append(q[:, 0], k[:, 0], v[:, 0], self.positions, cached, tables)
        else:
            if tables is not None:
                q, k = rotate(q, tables[0]), rotate(k, tables[1])
            cached.write(self.positions[:, None], k, v)
            row = q[:, 0]
        out, _ = dispatch.decode(row, cached, self.runs, scale_of(attention, q.shape[3]), self.cache.backend, attention.sinks)
        return out[:, None]

    def end(self) -> None:
        self.check()
        self.cache.advance()


def scale_of(attention: Attention, head_dim: int) -> float:
    scale: float | None = attention.scale
    return head_dim**-0.5 if scale is None else scale


class Chunk(CachePass):
    """A pass over ``count`` new positions of some requests, from ``start`` on.

    It runs the layer's forward attention over the cached keys and the chunk's own.
    """

    def __init__(self, cache: Storage, requests: slice, start: int, count: int) -> None:
        super().__init__(cache, requests, count)
        self.start = start
        # for each layer, keys and values that can only be written at the end of the pass
        self._late: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._late_from = start + count
        # keys in between that no row needs are zeros
        self.needed, self.places, self.before = cache.row_keys.before(start)

    def _rotation(self, module: MultiheadAttention, dtype: torch.dtype) -> Tables:
        return module.rotation(self._range(self.start, self.start + self.count), None, self.cache.max_length, dtype)

    def _attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tables: Tables | None, attention: Attention
    ) -> torch.Tensor:
        if tables is not None:
            q, k = rotate(q, tables[0]), rotate(k, tables[1])
        held = self._held(layer, k, v)
        # a ring layer provides its single-process attention; a model shared between processes has been refused
        attend = getattr(attention, "forward_unsharded", attention)
        out: torch.Tensor = attend(q, *held, is_causal=True, query_offset=self.before)
        cached = self.cache.cached(layer, self.requests)
        # if a later layer fails, the pass must leave no trace: slots that rows from its start on read are overwritten only after all layers
        safe = self.cache.first_to_overwrite(self.start)
        for first, last in self._kept(cached):
            middle = min(max(first, safe), last)
            if first < middle:
                new = slice(first - self.start, middle - self.start)
                cached.write(self._range(first, middle).expand(k.shape[0], -1), k[:, new], v[:, new])
            if middle < last:
                self._late_from = middle
                self._late[layer] = k[:, middle - self.start :].clone(), v[:, middle - self.start :].clone()
        return out

    def _kept(self, cached: Cached) -> list[tuple[int, int]]:
        """Returns the ranges of the chunk's positions that are stored; if slots are reused, these are its last ones and the fixed ones."""
        end = self.start + self.count
        if not cached.wraps:
            return [(self.start, end)]
        for_good = (self.start, min(end, cached.fixed))
        rest = (max(self.start, cached.fixed, end - (cached.slots - cached.fixed)), end)
        return [(first, last) for first, last in (for_good, rest) if first < last]

    def _held(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the keys and values that the chunk's rows may read: a copy of those in the cache, then the chunk's own."""
        if self.before == 0:
            return k, v
        cached = self.cache.cached(layer, self.requests)
        both = []
        for new in (k, v):
            whole = new.new_zeros(new.shape[0], self.before + self.count, *new.shape[2:])
            whole[:, self.before :] = new
            both.append(whole)
        for (low, high), place in zip(self.needed, self.places, strict=True):
            found = cached.read(self._range(low, high).expand(k.shape[0], -1))
            for whole, part in zip(both, found, strict=True):
                whole[:, place : place + high - low] = part
        return both[0], both[1]

    def _range(self, first: int, last: int) -> torch.Tensor:
        return torch.arange(first, last, device=self.cache.device)

    def end(self) -> None:
        cache, end = self.cache, self.start + self.count
        self.check()
        late = self._range(self._late_from, end).expand(self.batch, -1)
        places = cache.cached(0, self.requests).places(late) if self._late else None
        with cache.writing_down(range(self.requests.start, self.requests.stop)):
            for layer, (k, v) in self._late.items():
                cached = cache.cached(layer, self.requests)
                cached.k[places], cached.v[places] = k, v
            cache.advance(self.requests, self.count)
            for request in range(self.requests.start, self.requests.stop):
                cache.release(request)
