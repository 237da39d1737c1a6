"""A KV cache in pages of a shared pool, for requests of unequal length."""

from __future__ import annotations

import torch

from dilated_attention.engine.decode.row import Cached
from dilated_attention.models.config import LongNetConfig, as_size
from dilated_attention.models.kv_cache.cache import Cache
from dilated_attention.pattern.checks import as_int


class PagedKVCache(Cache):
    """KV cache in pages of a shared pool, for requests of unequal length.

    Pages are assigned to requests as they grow and taken back once no future row can read them.

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
        super().__init__(config, num_requests, max_length, device=device, dtype=dtype, backend=backend)
        self.page_size = as_size("page_size", page_size)
        of_request = -(-self.max_length // self.page_size)
        if num_pages is None:
            # each of the at most two stretches begins and ends inside a page
            steady = min(of_request, -(-self.row_keys.num_needed // self.page_size) + 2)
            num_pages = self.num_requests * steady + min(of_request - steady, -(-as_int("chunk", chunk, minimum=1) // self.page_size) + 1)
        self.num_pages = as_size("num_pages", num_pages)
        # page 0 belongs to no request: freed requests write there in steps
        self._allocate(self.num_pages + 1, self.page_size)
        self.table = torch.zeros(self.num_requests, of_request, dtype=torch.int32, device=self.device)
        self._free = list(range(self.num_pages, 0, -1))
        self._pages: list[dict[int, int]] = [{} for _ in range(self.num_requests)]

    @property
    def pages_in_use(self) -> int:
        return self.num_pages - len(self._free)

    def cached(self, layer: int, requests: slice) -> Cached:
        return Cached(self.keys[layer], self.values[layer], self.table[requests])

    def reserve(self, request: int, length: int) -> None:
        pages, position = self._pages[request], self.lengths[request]
        span = range(position // self.page_size, -(-length // self.page_size))
        if all(page in pages for page in span):
            return
        # also takes back what a failed pass had reserved
        self.release(request)
        wanted = [page for page in span if page not in pages]
        if len(wanted) > len(self._free):
            raise RuntimeError(
                f"request {request} needs {len(wanted)} more pages of {self.page_size} positions "
                f"and {len(self._free)} of {self.num_pages} are free; free a request, or make a cache with more pages"
            )
        given = self._free[-len(wanted) :]
        entries = torch.tensor(given, dtype=torch.int32).to(self.device)
        with self.writing_down([request]):
            self.table[request, wanted[0] : wanted[-1] + 1] = entries
            del self._free[-len(wanted) :]
            pages.update(zip(wanted, given, strict=True))

    def release(self, request: int) -> None:
        """Takes back the pages that no future row of this request can read: after each chunk, and whenever ``reserve`` assigns pages."""
        size, pages = self.page_size, self._pages[request]
        kept = self._needed_pages(self.lengths[request])
        # the page of the next position stays in use, whatever it holds
        kept.add(self.lengths[request] // size)
        gone = [page for page in pages if page not in kept]
        if gone:
            with self.writing_down([request]):
                # a finished request still writes, and must not write into a page that belongs to another request by then
                self.table[request, gone] = 0
                self._free += [pages.pop(page) for page in gone]

    def _needed_pages(self, length: int) -> set[int]:
        size = self.page_size
        return {page for low, high in self.row_keys.needed(length) for page in range(low // size, -(-high // size))}

    def _holds(self, request: int, length: int) -> bool:
        return self._needed_pages(length) <= self._pages[request].keys()

    def _forget(self, request: int) -> None:
        self.table[request] = 0
        self._pages[request] = {}
        # rebuilt from the pages in use, because an interrupt during an assignment may have lost some
        used = {page for pages in self._pages for page in pages.values()}
        self._free = [page for page in range(self.num_pages, 0, -1) if page not in used]

    def _shape(self) -> str:
        return f"{self.num_pages + 1:,} pages ({self.pages_in_use:,} in use) of {self.page_size} positions"
