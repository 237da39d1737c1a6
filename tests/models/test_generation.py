"""Generation with a cache: at every step the logits of the full forward, for every kind of attention, in stretches and in pages."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from dilated_attention.models import KVCache, LongNetConfig, LongNetLM, PagedKVCache, Sampling, Stepper, prefill
from dilated_attention.pattern import BigBird, GlobalLocal, LocalWindow, Strided

SHAPE: dict[str, Any] = {"vocab_size": 50, "embed_dim": 32, "num_layers": 2, "num_heads": 4}
DILATED: dict[str, Any] = {"segment_lengths": (8, 24), "dilation_rates": (1, 3)}
CONFIGS: dict[str, dict[str, Any]] = {
    "longnet": {**DILATED, "num_kv_heads": 2},
    # 8 and 12 have no common multiple among themselves
    "uneven": {"segment_lengths": (8, 12), "dilation_rates": (2, 3)},
    "blocked": {"segment_lengths": (8, 32), "dilation_rates": (1, 4), "head_offsets": "blocked"},
    "xpos": {**DILATED, "positions": "xpos"},
    "no positions": {**DILATED, "positions": "none"},
    # as many keys as a window at most, in segments
    "one branch": {"segment_lengths": (8,), "dilation_rates": (1,)},
    "llama": {"attention": "dense", "num_kv_heads": 1, "ffn": "swiglu", "norm": "rms_norm", "sub_norm": False, "qk_norm": True,
    "bias": False,
              "tie_embeddings": False},
    "window": {"attention": "block_sparse", "block_pattern": LocalWindow((13, 0), block_size=64)},
    "global": {"attention": "block_sparse", "block_pattern": GlobalLocal((13, 0), 5, block_size=64), "num_kv_heads": 2},
    "blocks": {"attention": "block_sparse", "block_pattern": Strided(2, block_size=64) | LocalWindow(3, block_size=64)},
    # on one process
    "ring_dilated": {"attention": "ring_dilated", **DILATED},
    "ring": {"attention": "ring"},
    "ring_block_sparse": {"attention": "ring_block_sparse", "block_pattern": LocalWindow((13, 0), block_size=64)},
}  # fmt: skip


def model(name: str = "longnet", **changes: Any) -> LongNetLM:
    torch.manual_seed(1)
    return LongNetLM(LongNetConfig(**{**SHAPE, **CONFIGS[name], **changes})).eval()


@pytest.mark.parametrize("kind", ["stretches", "pages"])
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_at_every_step_are_those_of_the_full_forward(name: str, kind: str) -> None:
    lm, n = model(name), 110
    tokens = torch.randint(50, (2, n))
    with torch.no_grad():
        full = lm(tokens)
    for length, chunk in ((1, 1), (61, 17)):
        lengths = [length, length] if kind == "stretches" else [length, length + 3]
        rows = torch.arange(2)
        if kind == "stretches":
            cache: KVCache | PagedKVCache = KVCache(lm.config, 2, n)
            logits = prefill(lm, tokens[:, :length], cache, chunk=chunk)
        else:
            cache = PagedKVCache(lm.config, 2, n, page_size=4, chunk=chunk)
            logits = torch.cat([prefill(lm, tokens[i : i + 1, : lengths[i]], cache.of(i), chunk=chunk) for i in rows.tolist()])
        torch.testing.assert_close(logits, full[rows, torch.tensor(lengths) - 1], atol=1e-5, rtol=0)
        step = Stepper(lm, cache)
        while max(cache.lengths) < n:
            at = torch.tensor(cache.lengths)
            torch.testing.assert_close(step(tokens[rows, at][:, None]), full[rows, at], atol=1e-5, rtol=0)
        with pytest.raises(ValueError, match="larger max_length"):
            step(tokens[:, :1])


def test_a_cache_holds_what_can_be_read_and_says_so() -> None:
    lm = model()
    cache = KVCache(lm.config, 3, 1000)
    # 2 layers, k and v, 3 requests, the longest segment, 2 heads of 8, float32
    assert cache.capacity == 24 and cache.nbytes == 2 * 2 * 3 * 24 * 2 * 8 * 4
    assert "3 × 24 positions" in str(cache) and "float32: 18 KiB" in str(cache)
    assert "would be 750 KiB" in str(cache)
    assert KVCache(lm.config, 1, 10).capacity == 10
    assert KVCache(model("window").config, 1, 1000).capacity == 14
    assert KVCache(model("llama").config, 1, 1000).capacity == 1000
    assert KVCache(model("global").config, 1, 1000).capacity == 14 + 5
    halves = KVCache(lm.config, 3, 1000, dtype=torch.bfloat16)
    assert 2 * halves.nbytes == cache.nbytes


def test_pages_go_to_requests_and_come_back() -> None:
    lm = model()
    cache = PagedKVCache(lm.config, 3, 400, page_size=4, num_pages=20)
    for i, length in enumerate((30, 1, 50)):
        prefill(lm, torch.randint(50, (1, length)), cache.of(i), chunk=16)
    # of 30 positions, those from 24 on can be read; of 50 those from 48 on
    assert cache.lengths == [30, 1, 50] and cache.pages_in_use == 2 + 1 + 1
    step = Stepper(lm, cache)
    for _ in range(60):
        step(torch.randint(50, (3, 1)))
        assert cache.pages_in_use <= 3 * (24 // 4 + 1)
        owned = [page for pages in cache._pages for page in pages.values()]
        assert len(set(owned)) == len(owned) == cache.pages_in_use and 0 not in owned
    cache.free(1)
    assert cache.lengths == [90, 0, 110]
    with pytest.raises(RuntimeError, match="needs 25 more pages of 4 positions"):
        lm.requires_grad_(False)(torch.randint(50, (1, 100)), cache=cache.of(1))


def test_prompts_are_continued_by_the_full_forwards_likeliest_tokens_alone_or_together() -> None:
    lm = model()
    prompts = [torch.randint(50, (n,)) for n in (5, 40, 23)]
    together = lm.generate(prompts, 30, temperature=0.0, prefill_chunk=16)
    for prompt, written in zip(prompts, together, strict=True):
        assert torch.equal(written, lm.generate(prompt[None], 30, temperature=0.0)[0])
        with torch.no_grad():
            assert torch.equal(written[len(prompt) :], lm(written[None])[0, len(prompt) - 1 : -1].argmax(-1))


def test_sampling_follows_its_generator_and_top_k() -> None:
    lm, prompt = model(), torch.randint(50, (1, 5))

    def draw(seed: int, **options: Any) -> Any:
        return lm.generate(prompt, 20, generator=torch.Generator().manual_seed(seed), **options)

    assert torch.equal(draw(1), draw(1)) and not torch.equal(draw(1), draw(2))
    assert torch.equal(draw(1, top_k=1), lm.generate(prompt, 20, temperature=0.0))
    for bad in ({"temperature": -1.0}, {"top_k": 0}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            draw(1, **bad)


def test_generation_ends_with_its_stop_token() -> None:
    lm = model()
    prompts = [torch.randint(50, (n,)) for n in (5, 40)]
    free = lm.generate(prompts, 40, temperature=0.0)
    stop = int(free[0][5 + 3])
    ended = lm.generate(prompts, 40, temperature=0.0, stop_token=stop)
    for prompt, whole, found in zip(prompts, free, ended, strict=True):
        new = whole[len(prompt) :]
        where = (new == stop).nonzero()
        assert torch.equal(found, whole[: len(prompt) + int(where[0]) + 1] if len(where) else whole)
    same = torch.stack([prompts[0], prompts[0]])
    written = lm.generate(same, 40, temperature=0.0, stop_token=stop)
    assert torch.equal(written[0], ended[0]) and torch.equal(written[1], ended[0])


def test_a_nucleus_is_the_fewest_likeliest_that_reach_top_p() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    for top_p, kept in ((0.5, {0}), (0.51, {0, 1}), (0.8, {0, 1}), (0.9, {0, 1, 2}), (1.0, {0, 1, 2, 3})):
        draw = Sampling(top_p=top_p, generator=torch.Generator().manual_seed(0))
        assert {int(draw.draw(logits)) for _ in range(300)} == kept
    assert Sampling(top_p=1e-6).draw(logits) == 0
    # of equally likely tokens no more than k
    draw = Sampling(top_k=2, generator=torch.Generator().manual_seed(0))
    assert len({int(draw.draw(torch.tensor([[0.0, 1.0, 1.0, 1.0, 1.0]]))) for _ in range(100)}) == 2
    for bad in (0.0, 1.5, -1):
        with pytest.raises(ValueError, match="top_p"):
            Sampling(top_p=bad)
    with pytest.raises(TypeError, match="temperature"):
        Sampling(temperature="hot")  # type: ignore[arg-type]


def test_what_a_cache_cannot_do_is_refused() -> None:
    lm = model()
    cache, tokens = KVCache(lm.config, 2, 100), torch.randint(50, (2, 4))
    with pytest.raises(ValueError, match=r"torch\.no_grad"):
        lm(tokens, cache=cache)
    lm.requires_grad_(False)
    with pytest.raises(ValueError, match=r"model\.eval"):
        lm.train()(tokens, cache=cache)
    lm.eval()
    with pytest.raises(ValueError, match="targets, too"):
        lm(tokens, cache=cache, targets=tokens)
    with pytest.raises(ValueError, match="cu_seqlens, too"):
        lm(tokens, cache=cache, cu_seqlens=torch.tensor([0, 4], dtype=torch.int32))
    with pytest.raises(ValueError, match="cache has 2 requests"):
        lm(tokens[:1], cache=cache)
    lm(tokens[:1], cache=cache.of(1))
    with pytest.raises(ValueError, match="need equal lengths"):
        lm(tokens, cache=cache)
    with pytest.raises(ValueError, match="expected 0 to 1"):
        cache.of(2)
    with pytest.raises(ValueError, match="is_prefix_stable"):
        KVCache(LongNetConfig(**SHAPE, attention="block_sparse", block_pattern=BigBird(64, 64, 2)), 1, 1000)
    with pytest.raises(ValueError, match="is_causal is False"):
        KVCache(LongNetConfig(**SHAPE, **DILATED, is_causal=False), 1, 1000)
    with pytest.raises(TypeError, match="LongNetConfig"):
        KVCache(lm, 1, 1000)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="XPOS overflows"):
        short = model("xpos", xpos_scale_base=1.0).requires_grad_(False)
        short(tokens, cache=KVCache(short.config, 2, 1000))


@pytest.mark.parametrize("kind", [KVCache, PagedKVCache])
@pytest.mark.parametrize("name", ["longnet", "window", "llama"])
def test_a_request_that_pauses_keeps_its_positions_and_writes_into_no_others(name: str, kind: type) -> None:
    """Its first prompt ends with every segment, where pages are given back at once."""
    lm, n = model(name).requires_grad_(False), 80
    tokens = torch.randint(50, (2, n))
    full = lm(tokens)
    cache = kind(lm.config, 2, n, **({"page_size": 4} if kind is PagedKVCache else {}))
    for i, length in enumerate((24, 17)):
        prefill(lm, tokens[i : i + 1, :length], cache.of(i))
    cache.finish(0)
    step = Stepper(lm, cache)
    for at in range(17, 60):
        torch.testing.assert_close(step(tokens[:, at : at + 1])[1], full[1, at], atol=1e-5, rtol=0)
    for at in range(24, 50, 13):
        found = prefill(lm, tokens[:1, at : at + 13], cache.of(0))
        torch.testing.assert_close(found[0], full[0, at + 12], atol=1e-5, rtol=0)
    rows = torch.arange(2)
    torch.testing.assert_close(step(tokens[rows, torch.tensor(cache.lengths)][:, None])[1], full[1, 60], atol=1e-5, rtol=0)
    # its place is taken by another request while the other goes on
    cache.free(0)
    for at in range(61, 64):
        torch.testing.assert_close(step(tokens[:, at : at + 1])[1], full[1, at], atol=1e-5, rtol=0)
    assert cache.lengths == [0, 64] and cache.active == [False, True]
    other = tokens[:1].flip(1)
    prefill(lm, other[:, :31], cache.of(0))
    both, wanted = torch.cat([other, tokens[1:]]), torch.stack([lm(other)[0], full[1]])
    for _ in range(12):
        places = torch.tensor(cache.lengths)
        torch.testing.assert_close(step(both[rows, places][:, None]), wanted[rows, places], atol=1e-5, rtol=0)
    assert cache.lengths == [43, 76] and cache.active == [True, True]


def test_a_pass_that_found_no_page_may_be_tried_again() -> None:
    lm = model("llama").requires_grad_(False)
    tokens = torch.randint(50, (1, 40))
    cache = PagedKVCache(lm.config, 2, 60, page_size=4, num_pages=11)
    prefill(lm, torch.randint(50, (1, 20)), cache.of(1))
    prefill(lm, tokens[:, :6], cache.of(0))
    with pytest.raises(RuntimeError, match="free a request"):
        lm(tokens[:, 6:], cache=cache.of(0))
    # as a forward that raised halfway leaves it
    cache.reserve(0, 16)
    cache.free(1)
    torch.testing.assert_close(prefill(lm, tokens[:, 6:39], cache.of(0)), lm(tokens)[:, 38], atol=1e-5, rtol=0)
    used = [page for page in cache.table[0].tolist() if page]
    assert len(used) == len(set(used))


def test_caches_of_other_models_and_dtypes_are_refused_and_autocast_is_followed() -> None:
    lm = model().requires_grad_(False)
    tokens = torch.randint(50, (1, 9))
    with pytest.raises(ValueError, match="another pattern; make it with this model's config"):
        lm(tokens, cache=KVCache(model("uneven", num_kv_heads=2).config, 1, 30))
    with pytest.raises(ValueError, match=r"the cache holds torch.bfloat16 .* make the cache with dtype=torch.float32"):
        lm(tokens, cache=KVCache(lm.config, 1, 30, dtype=torch.bfloat16))
    for name in ("longnet", "llama"):
        with torch.autocast("cpu", torch.bfloat16):
            assert model(name).generate(tokens, 3, temperature=0.0).shape == (1, 12)


def test_generation_leaves_each_module_in_its_mode() -> None:
    lm = model().train()
    lm.decoder.blocks[0].eval()
    before = [module.training for module in lm.modules()]
    lm.generate(torch.randint(50, (1, 5)), 2)
    assert [module.training for module in lm.modules()] == before
    with pytest.raises(ValueError, match="stop_token is 50; expected a token below vocab_size = 50"):
        lm.generate(torch.randint(50, (1, 5)), 2, stop_token=50)
    logits = torch.tensor([[1.0, 900.0, 2.0]])
    assert Sampling(temperature=1e-29).draw(logits).item() == Sampling(temperature=1e-40).draw(logits).item() == 1


def test_a_step_takes_one_token_of_each_request_and_a_prompt_has_one_at_least() -> None:
    lm = model().requires_grad_(False)
    step = Stepper(lm, KVCache(lm.config, 3, 40))
    with pytest.raises(ValueError, match=r"tokens has shape \(1, 1\); expected one token for each request, \(3, 1\)"):
        step(torch.ones(1, 1, dtype=torch.int64))
    with pytest.raises(TypeError, match=r"dtype torch\.float32"):
        step(torch.full((3, 1), 1.7))
    with pytest.raises(ValueError, match="at least one position"):
        prefill(lm, torch.ones(3, 0, dtype=torch.int64), step.cache)
    assert step.cache.lengths == [0, 0, 0]


@pytest.mark.slow
def test_a_step_is_captured_anew_where_another_pass_has_made_larger_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """A captured graph reads the tables that there were. Here it is played by a function that notes them."""
    lm = model("blocks").requires_grad_(False)
    cache, captured = KVCache(lm.config, 1, 500), []
    step = Stepper(lm, cache)
    monkeypatch.setattr(step, "uses_graph", True)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())

    class Graph:
        def __init__(self) -> None:
            self.tables = cache.row_keys._columns
            step._logits = torch.empty(0)
            captured.append(self)

        def replay(self) -> None:
            assert self.tables is cache.row_keys._columns
            step._logits = step._forward()

    monkeypatch.setattr(step, "_capture", lambda: setattr(step, "_graph", Graph()))
    tokens = torch.randint(50, (1, 500))
    full = lm(tokens)
    for at in range(330):
        token = tokens[:, at : at + 1]
        # where a new row of blocks begins, whose tables may be larger, in a pass of the model itself
        found = step(token)[0] if at % 64 else lm(token, cache=cache)[0, 0]
        torch.testing.assert_close(found, full[0, at], atol=1e-5, rtol=0)
    assert len(captured) > 1


@pytest.mark.parametrize(("name", "before"), [("window", 13), ("global", 5 + 13), ("longnet", 16), ("llama", 160)])
def test_a_chunk_takes_along_no_more_keys_than_its_rows_can_read(name: str, before: int) -> None:
    lm = model(name).requires_grad_(False)
    tokens, lengths = torch.randint(50, (1, 176)), []
    lm.decoder.blocks[0].attention.attention.register_forward_pre_hook(lambda _, args: lengths.append(args[1].shape[1]))
    found = prefill(lm, tokens, KVCache(lm.config, 1, 200), chunk=16)
    # of LongNet's branches, segments of 24 begin at 144
    assert lengths[0] == 16 and lengths[-1] == before + 16
    torch.testing.assert_close(found, lm(tokens)[:, -1], atol=1e-5, rtol=0)


def _fails(*_: Any) -> None:
    raise torch.OutOfMemoryError("out of memory, by a test")


@pytest.mark.parametrize("kind", [KVCache, PagedKVCache])
@pytest.mark.parametrize("name", ["longnet", "window", "global", "llama"])
def test_a_chunk_that_failed_is_refused_until_the_request_is_freed_and_the_others_go_on(name: str, kind: type) -> None:
    lm, n = model(name).requires_grad_(False), 90
    tokens = torch.randint(50, (2, n))
    full = lm(tokens)
    cache = kind(lm.config, 2, n, **({"page_size": 4} if kind is PagedKVCache else {}))
    for i in range(2):
        prefill(lm, tokens[i : i + 1, :37], cache.of(i), chunk=16)
    for what in ("a chunk", "a later chunk of a prompt", "between chunks"):
        seen: list[None] = []

        def fail(*_: Any, what: str = what, seen: list[None] = seen) -> None:
            seen.append(None)
            if what == "a chunk" or len(seen) == 2:
                _fails()

        hook = (lm.embedding if what == "between chunks" else lm.decoder.blocks[1]).register_forward_pre_hook(fail)
        with pytest.raises(torch.OutOfMemoryError):
            prefill(lm, tokens[:1, 37:60], cache.of(0), chunk=23 if what == "a chunk" else 10)
        hook.remove()
        for call in (lambda: lm(tokens[:1, 37:38], cache=cache.of(0)), lambda: Stepper(lm, cache)(tokens[:, :1])):
            with pytest.raises(RuntimeError, match=r"request 0 has a pass that failed .* call free\(0\)"):
                call()
        at = cache.lengths[1]
        torch.testing.assert_close(lm(tokens[1:, at : at + 5], cache=cache.of(1))[0], full[1, at : at + 5], atol=1e-5, rtol=0)
        cache.free(0)
        torch.testing.assert_close(prefill(lm, tokens[:1, :37], cache.of(0), chunk=16)[0], full[0, 36], atol=1e-5, rtol=0)
    # what is refused before anything is computed leaves the request
    with pytest.raises(ValueError, match="larger max_length"):
        lm(tokens[:1, :60], cache=cache.of(0))
    torch.testing.assert_close(prefill(lm, tokens[:1, 37:60], cache.of(0))[0], full[0, 59], atol=1e-5, rtol=0)
    if isinstance(cache, PagedKVCache):
        for i in range(2):
            cache.free(i)
        assert cache.pages_in_use == 0 and len(set(cache._free)) == cache.num_pages and not cache.table.any()


@pytest.mark.parametrize("kind", [KVCache, PagedKVCache])
def test_a_step_that_failed_may_be_repeated(kind: type) -> None:
    for name in ("longnet", "window", "blocks"):
        lm = model(name).requires_grad_(False)
        tokens = torch.randint(50, (2, 60))
        cache = kind(lm.config, 2, 60)
        full, step = lm(tokens), Stepper(lm, cache)
        prefill(lm, tokens[:, :37], cache)
        for at in range(37, 60):
            hook = lm.decoder.blocks[1].register_forward_pre_hook(_fails)
            with pytest.raises(torch.OutOfMemoryError):
                step(tokens[:, at : at + 1])
            hook.remove()
            torch.testing.assert_close(step(tokens[:, at : at + 1]), full[:, at], atol=1e-5, rtol=0)


def test_a_pass_of_another_size_or_that_has_ended_is_refused() -> None:
    lm = model("window").requires_grad_(False)
    tokens = torch.randint(50, (2, 60))
    full, cache = lm(tokens), KVCache(lm.config, 2, 60)
    chunk = cache.begin(2, 6)
    with pytest.raises(ValueError, match=r"x has \(batch, positions\) \(2, 1\) and this pass was begun for \(2, 6\); begin one"):
        lm(tokens[:, :1], cache=chunk)
    with pytest.raises(RuntimeError, match="has not ended"):
        cache.begin(2, 3)
    torch.testing.assert_close(lm(tokens[:, :6], cache=chunk), full[:, :6], atol=1e-5, rtol=0)
    assert cache.lengths == [0, 0]
    chunk.end()
    assert cache.lengths == [6, 6]
    single = cache.begin(2, 1)
    torch.testing.assert_close(lm(tokens[:, 6:7], cache=single), full[:, 6:7], atol=1e-5, rtol=0)
    single.end()
    freed = cache.begin(2, 4)
    for request in range(2):
        cache.free(request)
    prefill(lm, tokens[:, :7], cache)
    for late in (chunk, single, freed):
        with pytest.raises(ValueError, match="this pass has ended, or its requests have changed"):
            lm(tokens[:, : late.count], cache=late)
        with pytest.raises(ValueError, match="this pass has ended"):
            late.end()
    torch.testing.assert_close(lm(tokens[:, 7:20], cache=cache), full[:, 7:20], atol=1e-5, rtol=0)


def test_a_graph_whose_capture_failed_is_captured_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = model().requires_grad_(False)
    tokens, cache = torch.randint(50, (2, 50)), KVCache(lm.config, 2, 50)
    full = lm(tokens)
    prefill(lm, tokens[:, :37], cache)
    step, failing = Stepper(lm, cache), [True]
    monkeypatch.setattr(step, "uses_graph", True)

    class Graph:
        """Replays what ran while it was captured."""

        def replay(self) -> None:
            assert step._logits is not None
            step._logits.copy_(step._forward())

    @contextlib.contextmanager
    def capture(_: Any) -> Iterator[None]:
        yield
        if failing[0]:
            _fails()

    class Stream:
        def __init__(self, *_: Any) -> None: ...
        def wait_stream(self, _: Any) -> None: ...

    fakes: dict[str, Any] = {"device": contextlib.nullcontext, "stream": contextlib.nullcontext, "graph": capture, "CUDAGraph": Graph}
    for name, fake in (fakes | {"Stream": Stream, "current_stream": Stream}).items():
        monkeypatch.setattr(torch.cuda, name, fake)
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError):
            step(tokens[:, 37:38])
        assert cache.lengths == [37, 37]
    failing[0] = False
    for at in range(37, 42):
        torch.testing.assert_close(step(tokens[:, at : at + 1]), full[:, at], atol=1e-5, rtol=0)
