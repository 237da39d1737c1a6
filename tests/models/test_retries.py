"""Passes that fail midway: what is tried again in smaller pieces is exact, or refused; never something else.

Each test makes operations of torch fail in turn, out of memory or by an interrupt, for every kind of cache and attention.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dilated_attention.models import KVCache, LongNetConfig, LongNetLM, PagedKVCache, Stepper, prefill
from dilated_attention.models.kv_cache.cache import Cache
from dilated_attention.pattern import GlobalLocal, LocalWindow, Strided

HELD, CHUNK, N = 37, 31, 90
CONFIGS: dict[str, dict[str, Any]] = {
    "dense": {"attention": "dense"},
    "dilated": {"segment_lengths": (8, 24), "dilation_rates": (1, 3), "num_kv_heads": 2},
    # 8 and 12 have no common multiple among themselves
    "uneven": {"segment_lengths": (8, 12), "dilation_rates": (2, 3)},
    "window": {"attention": "block_sparse", "block_pattern": LocalWindow((13, 0), block_size=64)},
    "global": {"attention": "block_sparse", "block_pattern": GlobalLocal((13, 0), 5, block_size=64)},
    "blocks": {"attention": "block_sparse", "block_pattern": Strided(2, block_size=64)},
    "hybrid": {"attention": "block_sparse", "block_pattern": Strided(2, block_size=64) | LocalWindow((9, 0), block_size=64)},
}
KINDS = ("stretches", "pages")
CASES = [(name, kind) for name in CONFIGS for kind in KINDS]
TOO_MUCH = torch.OutOfMemoryError("out of memory, by a test")


class FailAt(TorchDispatchMode):
    """The operation of this number raises in place of running; None: all run and are counted."""

    def __init__(self, number: int | None, error: BaseException = TOO_MUCH) -> None:
        super().__init__()
        self.number, self.error, self.count = number, error, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        if self.count - 1 == self.number:
            raise self.error
        return func(*args, **(kwargs or {}))


def made(name: str, kind: str) -> tuple[LongNetLM, torch.Tensor, torch.Tensor, Cache]:
    """(model, tokens, the logits of the whole, a cache that holds the first)."""
    torch.manual_seed(1)
    lm = LongNetLM(LongNetConfig(vocab_size=50, embed_dim=32, num_layers=2, num_heads=4, **CONFIGS[name])).eval().requires_grad_(False)
    tokens = torch.randint(50, (2, N))
    cache: Cache = KVCache(lm.config, 2, N) if kind == "stretches" else PagedKVCache(lm.config, 2, N, page_size=4)
    prefill(lm, tokens[:, :HELD], cache, chunk=16)
    return lm, tokens, lm(tokens), cache


def go_on(lm: LongNetLM, tokens: torch.Tensor, full: torch.Tensor, cache: Cache, pieces: tuple[int, ...] = (1, 9, 21)) -> None:
    """Every logit from where the cache ends is that of the whole."""
    for piece in pieces:
        at = cache.lengths[0]
        torch.testing.assert_close(lm(tokens[:, at : at + piece], cache=cache), full[:, at : at + piece], atol=1e-5, rtol=0)
    step = Stepper(lm, cache)
    for _ in range(3):
        at = cache.lengths[0]
        torch.testing.assert_close(step(tokens[:, at : at + 1]), full[:, at], atol=1e-5, rtol=0)


def sweep(name: str, kind: str, what: Callable[[LongNetLM, torch.Tensor, Cache], Any], wanted: int) -> None:
    """Make operations of ``what`` fail in turn, about ``wanted`` of them and the last three."""
    lm, tokens, full, cache = made(name, kind)
    places = [*(i / wanted for i in range(wanted)), -3, -2, -1]
    refused = []
    for place in places:
        # counted each time: what is worked out once is not worked out again
        tried, same = copy.deepcopy(cache), copy.deepcopy(cache)
        with FailAt(None) as counted:
            what(lm, tokens, same)
        number = int(place * counted.count) if place >= 0 else counted.count + int(place)
        error: BaseException = TOO_MUCH if number % 2 else KeyboardInterrupt()
        with pytest.raises(type(error)), FailAt(number, error):
            what(lm, tokens, tried)
        assert tried.lengths == cache.lengths or tried._cut_off, number
        try:
            go_on(lm, tokens, full, tried)
        except RuntimeError as refusal:
            refused.append(place)
            assert "cut off" in str(refusal)
            for request in range(2):
                tried.free(request)
            prefill(lm, tokens[:, :HELD], tried, chunk=16)
            go_on(lm, tokens, full, tried)
    # only while what a pass has computed is written down, at its very end
    assert all(place < 0 or place > 0.8 for place in refused)


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_a_chunk_or_step_that_failed_anywhere_may_be_tried_again(name: str, kind: str) -> None:
    sweep(name, kind, lambda lm, tokens, cache: lm(tokens[:, HELD : HELD + CHUNK], cache=cache), 5)
    sweep(name, kind, lambda lm, tokens, cache: Stepper(lm, cache)(tokens[:, HELD : HELD + 1]), 3)


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_a_prompt_that_failed_in_any_of_its_chunks_enters_as_a_whole_or_not_at_all(name: str, kind: str) -> None:
    lm, tokens, full, cache = made(name, kind)
    fresh: Cache = KVCache(lm.config, 2, N) if kind == "stretches" else PagedKVCache(lm.config, 2, N, page_size=4)
    fresh.free(1)
    for start, before in ((0, fresh), (HELD, cache)):
        for place in (0.2 if kind == "stretches" else 0.6, 0.97):
            tried, same = copy.deepcopy(before), copy.deepcopy(before)
            with FailAt(None) as counted:
                prefill(lm, tokens[:1, start : start + 40], same.of(0), chunk=13)
            with pytest.raises(torch.OutOfMemoryError), FailAt(int(place * counted.count)):
                prefill(lm, tokens[:1, start : start + 40], tried.of(0), chunk=13)
            assert (tried.lengths, tried.active) == (before.lengths, before.active)
            try:
                found = prefill(lm, tokens[:1, start : start + 40], tried.of(0), chunk=5)
            except RuntimeError as refusal:
                # an empty request has nothing to lose
                assert "cut off" in str(refusal) and start
                tried.free(0)
                found = prefill(lm, tokens[:1, : start + 40], tried.of(0), chunk=5)
            torch.testing.assert_close(found[0], full[0, start + 39], atol=1e-5, rtol=0)


def test_a_graph_whose_capture_failed_is_captured_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    lm, tokens, full, cache = made("dilated", "stretches")
    step, failing = Stepper(lm, cache), [True]
    monkeypatch.setattr(step, "uses_graph", True)

    class Graph:
        """Replays what ran while it was captured."""

        def replay(self) -> None:
            assert step._logits is not None
            step._logits.copy_(step._forward())

    @contextmanager
    def nothing(*_: Any) -> Iterator[None]:
        yield

    @contextmanager
    def capture(_: Any) -> Iterator[None]:
        yield
        if failing[0]:
            raise TOO_MUCH

    class Stream:
        def __init__(self, *_: Any) -> None: ...
        def wait_stream(self, _: Any) -> None: ...

    for found, fake in (("device", nothing), ("stream", nothing), ("graph", capture), ("Stream", Stream), ("CUDAGraph", Graph)):
        monkeypatch.setattr(torch.cuda, found, fake)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError):
            step(tokens[:, HELD : HELD + 1])
        assert cache.lengths == [HELD, HELD]
    failing[0] = False
    for at in range(HELD, HELD + 5):
        torch.testing.assert_close(step(tokens[:, at : at + 1]), full[:, at], atol=1e-5, rtol=0)


def test_a_pass_that_others_have_overtaken_or_of_another_size_is_refused() -> None:
    lm, tokens, full, cache = made("window", "stretches")
    chunk = cache.begin(2, 6)
    with pytest.raises(ValueError, match=r"x has \(batch, positions\) \(2, 1\) and this pass was begun for \(2, 6\); begin one"):
        lm(tokens[:, HELD : HELD + 1], cache=chunk)
    other = cache.begin(2, 3)
    lm(tokens[:, HELD : HELD + 6], cache=chunk)
    chunk.end()
    for late in (chunk, other, cache.begin(2, 1)):
        if late.count == 1:
            go_on(lm, tokens, full, cache)
        with pytest.raises(ValueError, match="no other pass between"):
            lm(tokens[:, HELD : HELD + late.count], cache=late)
        with pytest.raises(ValueError, match="no other pass between"):
            late.end()
    stale = cache.begin(2, 4)
    at = cache.lengths[0]
    lm(tokens[:, at : at + 4], cache=stale)
    for request in range(2):
        cache.free(request)
    # other tokens, as many
    prefill(lm, tokens.flip(1)[:, :at], cache)
    with pytest.raises(ValueError, match="this pass is stale"):
        stale.end()


def test_pages_that_could_not_be_entered_into_the_table_are_not_taken_for_given() -> None:
    lm, tokens, full, cache = made("dense", "pages")
    assert isinstance(cache, PagedKVCache)
    in_use = cache.pages_in_use
    for number in range(20):
        tried = copy.deepcopy(cache)
        try:
            with FailAt(number):
                tried.reserve(0, HELD + 20)
        except torch.OutOfMemoryError:
            assert tried._cut_off or tried.pages_in_use == in_use
        else:
            break
        if tried._cut_off:
            tried.free(0)
            prefill(lm, tokens[:1, :HELD], tried.of(0))
        go_on(lm, tokens, full, tried)
        for request in range(2):
            tried.free(request)
        assert tried.pages_in_use == 0 and len(set(tried._free)) == tried.num_pages
    assert number > 2
