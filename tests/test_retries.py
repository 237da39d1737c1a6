"""Passes that fail midway: what is tried again in smaller pieces is exact, or refused; never something else.

Each test makes an operation of torch (or a line of the cache's code) fail in turn, for every kind of cache and attention.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dilated_attention.models import KVCache, LongNetConfig, LongNetLM, PagedKVCache, Stepper, prefill
from dilated_attention.models.cache import Cache
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


@contextmanager
def interrupted_at(number: int) -> Iterator[list[int]]:
    """KeyboardInterrupt before the line of this number that runs in the files of caches; the list counts them."""
    count = [0]

    def line(frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line":
            count[0] += 1
            if count[0] - 1 == number:
                raise KeyboardInterrupt
        return line

    def call(frame: FrameType, event: str, arg: Any) -> Any:
        name = frame.f_code.co_filename
        inside = "dilated_attention" in name and name.endswith(("cache.py", "cache_use.py", "decode.py", "decode_runs.py"))
        return line if inside else None

    before = sys.gettrace()
    sys.settrace(call)
    try:
        yield count
    finally:
        sys.settrace(before)


def made(name: str, kind: str) -> tuple[LongNetLM, torch.Tensor, torch.Tensor, Cache]:
    """(model, tokens, the logits of the whole, a cache that holds the first)."""
    torch.manual_seed(1)
    lm = LongNetLM(LongNetConfig(vocab_size=50, embed_dim=32, num_layers=2, num_heads=4, **CONFIGS[name])).eval().requires_grad_(False)
    tokens = torch.randint(50, (2, N))
    cache: Cache = KVCache(lm.config, 2, N) if kind == "stretches" else PagedKVCache(lm.config, 2, N, page_size=4)
    prefill(lm, tokens[:, :HELD], cache, chunk=16)
    return lm, tokens, lm(tokens), cache


def go_on(lm: LongNetLM, tokens: torch.Tensor, full: torch.Tensor, cache: Cache, pieces: tuple[int, ...] = (1, 9, 14, 7)) -> None:
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
    refused, failed = [], 0
    for place in places:
        # counted each time: what is worked out once is not worked out again
        with FailAt(None) as counted:
            what(lm, tokens, copy.deepcopy(cache))
        number = int(place * counted.count) if place >= 0 else counted.count + int(place)
        error: BaseException = TOO_MUCH if failed % 2 else KeyboardInterrupt()
        tried = copy.deepcopy(cache)
        try:
            with FailAt(number, error):
                what(lm, tokens, tried)
        except type(error):
            failed += 1
        else:
            continue
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
    assert failed > wanted - 3
    # only while what a pass has computed is written down, at its very end
    assert all(place < 0 or place > 0.7 for place in refused)


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_a_chunk_that_failed_anywhere_may_be_tried_again_in_pieces(name: str, kind: str) -> None:
    sweep(name, kind, lambda lm, tokens, cache: lm(tokens[:, HELD : HELD + CHUNK], cache=cache), 12)


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_a_step_that_failed_anywhere_may_be_tried_again(name: str, kind: str) -> None:
    sweep(name, kind, lambda lm, tokens, cache: Stepper(lm, cache)(tokens[:, HELD : HELD + 1]), 8)


def test_a_chunk_that_failed_in_its_second_block_loses_nothing() -> None:
    """The case that was met: out of memory in block 1, whose first block had written over what earlier rows still read."""
    for name in ("dilated", "window", "global"):
        lm, tokens, full, cache = made(name, "stretches")
        hook = lm.decoder.blocks[1].register_forward_pre_hook(_fail)
        with pytest.raises(torch.OutOfMemoryError):
            lm(tokens[:, HELD : HELD + CHUNK], cache=cache)
        hook.remove()
        go_on(lm, tokens, full, cache)


def _fail(*_: Any) -> None:
    raise TOO_MUCH
