"""KV caches: they keep the keys and values of past positions, so that a new token costs one row of attention.

``KVCache`` gives every request a contiguous stretch of equal length, ``PagedKVCache`` pages of a shared pool. Both hold what later rows
can still read: the last max(w) positions with LongNet's branches, the width of a window, everything with dense attention. Keys are stored
as they enter the product: normalised and rotated by their absolute position.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from dilated_attention.engine.decode import dispatch
from dilated_attention.engine.decode.keys import Cached, RowKeys, Runs, WindowKeys, row_keys
from dilated_attention.functional.arguments import autocast
from dilated_attention.models.config import LongNetConfig, as_config, as_size
from dilated_attention.models.summary import readable
from dilated_attention.modules.rotary import rotary_tables, rotate
from dilated_attention.pattern.checks import as_int, shown
from dilated_attention.validation import DTYPES, check_factory

if TYPE_CHECKING:
    from dilated_attention.modules.core import Attention

# the host keeps a length of each
MAX_REQUESTS = 2**20


class KVCache:
    """Gives every request a contiguous stretch of equal length, used as a ring buffer once it is full.

    A stretch holds what rows can still read: min(max_length, max(w)) positions for dilated branches, left + 1 for a window plus the global
    tokens before it, else max_length. Where layers differ, each layer's stretch is as long as its own attention needs.

    ``lengths`` are kept on the host, so no step waits for the device. ``positions`` (B,) says where a step writes each request's next
    token. A request that is not ``active`` takes part in steps without growing: its row is computed and ignored.

    Args:
        config: the model's configuration.
        num_requests: B, the number of requests.
        max_length: maximum number of positions of a request, prompt and new ones together.
        device, dtype: those of keys and values; they must be those of the model.
        backend: the backend for decoding; see ``decode_attention``.

    Raises:
        ValueError: if a block pattern is not ``is_prefix_stable``, or sizes are invalid.

    A pass of the model over new positions that fails leaves ``lengths`` unchanged and its requests refused until they are freed. A
    ``Stepper``'s step that fails may be repeated.

    >>> cache = KVCache(
    ...     model.config, 1, 2**20, device="cuda", dtype=torch.bfloat16)
    >>> logits = model(prompt, cache=cache)
    >>> logits = model(next_token, cache=cache)
    >>> print(cache)
    """

    # of a pool of pages
    page_size: int
    num_pages: int
    _free: list[int]

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
        if not as_config("config", config).is_causal:
            raise ValueError("config.is_causal is False; keys of past positions are useful only for causal attention")
        self.config = config
        self.num_requests = as_int("num_requests", num_requests, minimum=1, maximum=MAX_REQUESTS)
        self.max_length = as_int("max_length", max_length, minimum=1)
        self.device = torch.empty(0, device=check_factory(device, None)["device"]).device
        self.dtype = torch.get_default_dtype() if dtype is None else dtype
        if not (isinstance(self.dtype, torch.dtype) and self.dtype in DTYPES):
            raise ValueError(f"dtype is {shown(dtype)}; expected float16, bfloat16, float32 or float64, that of the model")
        dispatch.check_name(backend)
        self.backend = backend
        heads = config.num_kv_heads or config.num_heads
        # layer i has entry i mod their number; equal patterns have one and the same
        patterns = config.patterns
        kinds = {pattern: row_keys(pattern, config.num_heads, heads, self.max_length, self.device) for pattern in set(patterns)}
        self.row_keys: list[RowKeys] = [kinds[pattern] for pattern in patterns]
        self.rotates = [one.positions != "none" for one in config.cycle]
        self.lengths = [0] * self.num_requests
        self.active = [True] * self.num_requests
        self.positions = torch.zeros(self.num_requests, dtype=torch.int64, device=self.device)
        # those that a pass is about, in ``of`` one
        self._chosen = range(self.num_requests)
        # whose last pass failed or goes on: they are refused
        self._open: set[int] = set()
        # (requests, pages of each) int32 if slots come from a pool of pages
        self.table: torch.Tensor | None = None
        self._pages: list[dict[int, int]] = [{} for _ in range(self.num_requests)]
        capacities = [min(self.max_length, keys.num_needed) for keys in self.row_keys]
        self.capacity, slots = max(capacities), self._slots(capacities)
        shapes = [(*slots[layer % len(slots)], heads, config.head_dim) for layer in range(config.num_layers)]
        self.keys, self.values = ([torch.zeros(shape, dtype=self.dtype, device=self.device) for shape in shapes] for _ in range(2))

    def _slots(self, capacities: list[int]) -> list[tuple[int, int]]:
        """Returns (requests or pages, positions of each) of the layers, which take them in turn."""
        return [(self.num_requests, capacity) for capacity in capacities]

    def wraps(self, keys: RowKeys) -> bool:
        """Whether new positions of layers with these ``row_keys`` reuse the slots of old ones."""
        return self.table is None and keys.num_needed < self.max_length

    def cached(self, layer: int, requests: range) -> Cached:
        """Returns the keys and values of a layer."""
        keys, values, some = self.keys[layer], self.values[layer], slice(requests.start, requests.stop)
        needed = self.row_keys[layer % len(self.row_keys)]
        if self.table is not None:
            return Cached(keys, values, self.table[some])
        return Cached(keys[some], values[some], wraps=self.wraps(needed), fixed=needed.fixed)

    def _give_pages(self, request: int, length: int = 0) -> None:
        """Where slots come from a pool of pages: takes back those that no future row of this request can read, and gives it those of new
        positions below ``length``."""
        if self.table is None:
            return
        pages, held = self._pages[request], self.lengths[request]
        span = range(held // self.page_size, -(-length // self.page_size))
        if span and all(page in pages for page in span):
            return
        needed = {stretch for keys in self.row_keys for stretch in keys.needed(held)}
        gone = pages.keys() - {page for low, high in needed for page in range(low // self.page_size, -(-high // self.page_size))}
        if gone:
            # a finished request still writes, and must not write into a page that belongs to another request by then
            self.table[request, list(gone)] = 0
            self._free += [pages.pop(page) for page in gone]
        wanted = [page for page in span if page not in pages]
        if len(wanted) > len(self._free):
            raise RuntimeError(
                f"request {request} needs {len(wanted)} more pages of {self.page_size} positions "
                f"and {len(self._free)} of {self.num_pages} are free; free a request, or make a cache with more pages"
            )
        if wanted:
            pages |= {page: self._free.pop() for page in wanted}
            places = torch.tensor([pages[page] for page in wanted], dtype=torch.int32)
            self.table[request, wanted[0] : wanted[-1] + 1] = places.to(self.device)

    def of(self, request: int) -> KVCache:
        """Returns the cache of one request, to prefill it: ``model(tokens[None], cache=cache.of(i))``."""
        view = copy.copy(self)
        view._chosen = range(self._checked(request), request + 1)
        return view

    @contextlib.contextmanager
    def reading(self, batch: int, num_tokens: int) -> Iterator[CachePass]:
        """A pass over ``num_tokens`` new positions of all requests, or of that of ``of``, whose number must be ``batch``: at its end the
        lengths grow; after an error its requests are refused until they are freed."""
        chosen: Sequence[int] = self._chosen
        if batch != len(chosen):
            raise ValueError(f"the batch is {batch} and the cache has {len(chosen)} requests; they must be equal: for one, use cache.of(i)")
        # of requests that are all finished, too, a step drops the tokens; all that are free begin anew
        if num_tokens == 1 and len(chosen) == self.num_requests and (any(self.active) or any(self.lengths)):
            self.prepare_step()
            begun, chosen = self.step(), self._growing()
        else:
            lengths = [self.lengths[i] for i in chosen]
            if len(set(lengths)) > 1:
                raise ValueError(
                    f"requests have {lengths} positions; several new positions at a time need equal lengths: "
                    "pass requests one by one, cache.of(i)"
                )
            for request in chosen:
                self._make_room(request, num_tokens)
            begun = CachePass(self, num_tokens, lengths[0])
        self._open.update(chosen)
        try:
            yield begun
        finally:
            begun.is_over = True
        # those that were freed meanwhile do not grow, nor by a step those that were finished
        grown = [i for i in chosen if i in self._open and (begun.start is not None or self.active[i])]
        self._open.difference_update(chosen)
        self.advance(grown, num_tokens)
        if begun.start is not None:
            for request in grown:
                self._give_pages(request)

    def prepare_step(self) -> int:
        """Reserves room and prepares tables for one more position of every active request. Returns the generation of the tables; a CUDA
        graph captured with another generation must be discarded."""
        for request in self._growing():
            self._make_room(request, 1)
        positions = self._positions()
        # none of them decreases
        return sum(keys.prepare(positions) for keys in dict.fromkeys(self.row_keys))

    def step(self) -> CachePass:
        """Returns a pass of one position for every request, after ``prepare_step``; on the device only, so a CUDA graph may capture it."""
        return CachePass(self, 1, None)

    def _make_room(self, request: int, num_tokens: int) -> None:
        if request in self._open:
            raise RuntimeError(
                f"request {request} has a pass that failed or has not ended, and what it holds cannot be trusted; "
                f"call free({request}) of the cache and prefill the request again"
            )
        length = self.lengths[request]
        if length + num_tokens > self.max_length:
            raise ValueError(
                f"request {request} has {length} positions, {num_tokens} more are requested, "
                f"and max_length is {self.max_length}; make a cache with a larger max_length"
            )
        self._give_pages(request, length + num_tokens)

    def advance(self, requests: Sequence[int] | None = None, by: int = 1) -> None:
        """Increases the lengths of some requests, which become active, or of all active ones; ``by`` is not negative."""
        requests = self._growing() if requests is None else [self._checked(request) for request in requests]
        by = as_int("by", by, minimum=0)
        for i in requests:
            self.lengths[i] += by
            self.active[i] = True
        if len(requests) == self.num_requests:
            self.positions += by
        else:
            self._place()

    def finish(self, request: int) -> None:
        """Stops a request from growing; it keeps its positions until it is freed."""
        self.active[self._checked(request)] = False
        self._place()

    def free(self, request: int) -> None:
        """Forgets a request, so that its place can be prefilled again with ``cache.of(request)``. Until then a step over all requests drops
        its token, as that of a finished one."""
        self.lengths[self._checked(request)] = 0
        self.finish(request)
        self._give_pages(request)
        self._open.discard(request)

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values, as allocated."""
        return sum(x.nbytes for x in (*self.keys, *self.values))

    def __str__(self) -> str:
        heads, dim = self.keys[0].shape[2:]
        slots = f"{self.num_requests} × {' or '.join(f'{n:,}' for n in sorted({x.shape[1] for x in self.keys}))} positions"
        if self.table is not None:
            slots = f"{self.num_pages + 1:,} pages ({self.num_pages - len(self._free):,} in use) of {self.page_size} positions"
        dense = 2 * self.config.num_layers * heads * dim * self.dtype.itemsize * self.max_length * self.num_requests
        return (
            f"KV cache: {self.config.num_layers} layers × 2 × {slots} × {heads} heads × {dim}, "
            f"{str(self.dtype).removeprefix('torch.')}: {readable(self.nbytes)}; "
            f"all of {self.num_requests} × {self.max_length:,} positions, as dense attention keeps them, would be {readable(dense)}"
        )

    def _growing(self) -> list[int]:
        return [request for request in range(self.num_requests) if self.active[request]]

    def _positions(self) -> list[int]:
        # a finished request keeps writing to its next position; no row reads that slot before it is written again
        return [min(length, self.max_length - 1) for length in self.lengths]

    def _place(self) -> None:
        self.positions.copy_(torch.tensor(self._positions()))

    def _checked(self, request: int) -> int:
        if not 0 <= as_int("request", request) < self.num_requests:
            raise ValueError(f"request is {request}; expected 0 to {self.num_requests - 1}")
        return request


class PagedKVCache(KVCache):
    """KV cache in pages of a shared pool, for requests of unequal length.

    Pages are assigned to requests as they grow and taken back once no future row of any layer can read them.

    Args:
        config, max_length, device, dtype, backend: see ``KVCache``.
        num_requests: number of simultaneous requests; each has a row of the page table.
        num_pages: number of pages in the pool; None for as many as all requests can need at ``max_length`` if they are prefilled one by
            one, ``chunk`` positions at a time.
        page_size: positions per page.
        chunk: positions that a prefill adds at a time; only used if ``num_pages`` is None.

    Raises:
        ValueError: see ``KVCache``.
        RuntimeError: if a request grows and no page is free.

    >>> cache = PagedKVCache(model.config, 8, 65536, num_pages=1024)
    >>> for i, prompt in enumerate(prompts):
    ...     logits = model(prompt[None], cache=cache.of(i))
    """

    def __init__(
        self,
        config: LongNetConfig,
        num_requests: int,
        max_length: int,
        *,
        num_pages: int | None = None,
        page_size: int = 128,
        chunk: int = 8192,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        backend: str = "auto",
    ) -> None:
        self.page_size = as_size("page_size", page_size)
        self._wanted = num_pages, as_int("chunk", chunk, minimum=1)
        super().__init__(config, num_requests, max_length, device=device, dtype=dtype, backend=backend)

    def _slots(self, capacities: list[int]) -> list[tuple[int, int]]:
        num_pages, chunk = self._wanted
        of_request = -(-self.max_length // self.page_size)
        if num_pages is None:
            # a page holds its positions in all layers; where those differ, the first positions of one and the last of another are needed
            needed = max(x.num_needed for x in self.row_keys) + max(x.fixed for x in self.row_keys) * (len(self.row_keys) > 1)
            # each of the at most two stretches begins and ends inside a page
            steady = min(of_request, -(-needed // self.page_size) + 2)
            num_pages = self.num_requests * steady + min(of_request - steady, -(-chunk // self.page_size) + 1)
        self.num_pages = as_size("num_pages", num_pages)
        self.table = torch.zeros(self.num_requests, of_request, dtype=torch.int32, device=self.device)
        self._free = list(range(self.num_pages, 0, -1))
        # page 0 belongs to no request: freed requests write there in steps
        return [(self.num_pages + 1, self.page_size)]

    @property
    def pages_in_use(self) -> int:
        return self.num_pages - len(self._free)


class CachePass:
    """A pass of a model over ``count`` new positions. What all layers share is computed once, at its beginning.

    ``start``: position of the first, for a chunk of ``cache``'s chosen requests: the layer's forward attention runs over the cached keys
    and the chunk's own. None for a step: one position of every request, each at its own, where nothing depends on the lengths on the host,
    so that a CUDA graph may replay it.
    """

    def __init__(self, cache: KVCache, count: int, start: int | None) -> None:
        self.cache, self.count, self.start, self.is_over = cache, count, start, False
        if start is not None:
            self.requests, self.positions = cache._chosen, self._range(start, start + count)
            # keys in between that no row needs are zeros
            self.before = {keys: keys.before(start) for keys in cache.row_keys}
        else:
            self.requests, self.positions = range(cache.num_requests), cache.positions
            self.runs = {keys: self._runs(keys) for keys in dict.fromkeys(cache.row_keys)}
        # (queries' table, keys' table) of the new positions, with which queries and keys are rotated
        self.tables: Any = None
        config = cache.config
        if any(cache.rotates):
            base = config.xpos_scale_base if config.positions == "xpos" else None
            tables = rotary_tables(self.positions, None, cache.max_length, config.head_dim, config.rotary_base, base, cache.dtype)
            # in a step each batch entry has its own position
            self.tables = tables if start is not None else [[x[:, None] for x in table] for table in tables]

    def _runs(self, keys: RowKeys) -> Runs:
        runs = keys.runs(self.positions)
        is_window = isinstance(keys, WindowKeys) and runs.first.shape[2] == 1 and keys.max_keys == keys.span
        if is_window and self.cache.wraps(keys) and runs.dense is None:
            # a window that fills its stretch reads every slot, and softmax does not depend on their order
            return replace(runs, dense=(self.positions + 1).clamp(max=keys.max_keys).to(torch.int32))
        return runs

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attention: Attention) -> torch.Tensor:
        """Returns out (B, n, H, D) for queries (B, n, H, D) of a layer, not yet rotated, and adds k and v (B, n, K, D) to the cache.
        ``attention``: the layer's module."""
        cache, expected = self.cache, (len(self.requests), self.count)
        if self.is_over or tuple(k.shape[:2]) != expected:
            which = "has ended" if self.is_over else f"was begun for {expected}"
            raise ValueError(f"x has (batch, positions) {tuple(k.shape[:2])} and this pass {which}; begin one for these")
        q, k, v = autocast(q, k, v)
        if (k.dtype, k.device) != (cache.dtype, cache.device):
            raise ValueError(
                f"the cache holds {cache.dtype} on {cache.device} and keys are {k.dtype} on {k.device}; "
                f"make the cache with dtype={k.dtype}, device={str(k.device)!r}"
            )
        cached, keys = cache.cached(layer, self.requests), cache.row_keys[layer % len(cache.row_keys)]
        tables = self.tables if cache.rotates[layer % len(cache.rotates)] else None
        if self.start is None and dispatch.has_kernels(k):
            from dilated_attention.engine.decode.triton import rotate_and_append

            row = rotate_and_append(q[:, 0], k[:, 0], v[:, 0], self.positions, cached, tables)
        else:
            if tables is not None:
                q, k = rotate(q, tables[0]), rotate(k, tables[1])
            if self.start is not None:
                return self._attend_chunk(q, k, v, cached, self.start, attention, keys)
            cached.write(self.positions[:, None], k, v)
            row = q[:, 0]
        scale = q.shape[3] ** -0.5 if attention.scale is None else attention.scale
        return dispatch.decode(row, cached, self.runs[keys], scale, cache.backend, attention.sinks)[0][:, None]

    def _attend_chunk(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cached: Cached, start: int, attention: Attention, keys: RowKeys
    ) -> torch.Tensor:
        end = start + self.count
        both = [k, v]
        needed, places, before = self.before[keys]
        if before:
            both = [F.pad(new, (0, 0, 0, 0, before, 0)) for new in both]
            for (low, high), place in zip(needed, places, strict=True):
                parts = cached.read(self._range(low, high).expand(k.shape[0], -1))
                for whole, part in zip(both, parts, strict=True):
                    whole[:, place : place + high - low] = part
        run: Any = attention
        if unsharded := getattr(attention, "unsharded", None):
            # a ring's layer on one process; a model shared between processes has been refused
            run = functools.partial(unsharded, **attention._arguments(q))
        out: torch.Tensor = run(q, *both, is_causal=True, query_offset=before)
        # where slots are reused, the last positions are stored and the fixed ones
        kept = [(start, end)]
        if cached.wraps:
            kept = [(start, min(end, cached.fixed)), (max(start, cached.fixed, end - cached.slots + cached.fixed), end)]
        for first, last in kept:
            if first < last:
                rows = slice(first - start, last - start)
                cached.write(self._range(first, last).expand(k.shape[0], -1), k[:, rows], v[:, rows])
        return out

    def _range(self, first: int, last: int) -> torch.Tensor:
        return torch.arange(first, last, device=self.cache.device)
