"""Generation with a cache: whatever requests do, every pass gives the logits of the full forward, for every kind of attention."""

import contextlib
import random
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from dilated_attention.models import KVCache, LongNetConfig, LongNetLM, PagedKVCache, Sampling, Stepper, prefill
from dilated_attention.pattern import BigBird, GlobalLocal, LocalWindow, Strided

SHAPE: dict[str, Any] = {"vocab_size": 50, "embed_dim": 32, "num_layers": 2, "num_heads": 4}
DILATED: dict[str, Any] = {"segment_lengths": (8, 24), "dilation_rates": (1, 3)}
LLAMA: dict[str, Any] = {"ffn": "swiglu", "norm": "rms_norm", "sub_norm": False, "qk_norm": True, "bias": False, "tie_embeddings": False}
WINDOW = LocalWindow((13, 0), block_size=64)
WINDOWED = {"attention": "block_sparse", "block_pattern": WINDOW}
CONFIGS: dict[str, dict[str, Any]] = {
    "longnet": {**DILATED, "num_kv_heads": 2},
    # 8 and 12 have no common multiple among themselves
    "uneven": {"segment_lengths": (8, 12), "dilation_rates": (2, 3)},
    "blocked": {"segment_lengths": (8, 32), "dilation_rates": (1, 4), "head_offsets": "blocked"},
    "xpos": {**DILATED, "positions": "xpos"},
    "no positions": {**DILATED, "positions": "none"},
    # as many keys as a window at most, in segments
    "one branch": {"segment_lengths": (8,), "dilation_rates": (1,)},
    "llama": {"attention": "dense", "num_kv_heads": 1, **LLAMA},
    "window": WINDOWED,
    "global": {"attention": "block_sparse", "block_pattern": GlobalLocal((13, 0), 5, block_size=64), "num_kv_heads": 2},
    "blocks": {"attention": "block_sparse", "block_pattern": Strided(2, block_size=64) | LocalWindow(3, block_size=64)},
    # each layer's stretch as long as it needs
    "mixed": {"attention": [WINDOWED, {"attention": "dilated", **DILATED}]},
    "mixed positions": {"rotary_base": 500.0, "attention": [WINDOWED, {"attention": "dense", "positions": "none"}]},
    "mixed blocks": {
        "num_layers": 3,
        "attention": [
            {"attention": "block_sparse", "block_pattern": GlobalLocal((13, 0), 5, block_size=64)},
            {"attention": "block_sparse", "block_pattern": Strided(2, block_size=64) | LocalWindow(3, block_size=64)},
            {"attention": "dense"},
        ],
    },
    # on one process
    "ring_dilated": {"attention": "ring_dilated", **DILATED},
    "ring_block_sparse": {"attention": "ring_block_sparse", "block_pattern": WINDOW},
}
N = 110
FAILURES = ("step", "a chunk", "a later chunk", "between chunks")


def model(name: str = "longnet", **changes: Any) -> LongNetLM:
    torch.manual_seed(1)
    return LongNetLM(LongNetConfig(**{**SHAPE, **CONFIGS[name], **changes})).eval()


def frozen(name: str = "longnet", **changes: Any) -> LongNetLM:
    return model(name, **changes).requires_grad_(False)


def tokens_of(*shape: int) -> torch.Tensor:
    return torch.randint(50, shape)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def fails(*_: Any) -> None:
    raise torch.OutOfMemoryError("out of memory, by a test")


@contextlib.contextmanager
def failing(module: torch.nn.Module, at_call: int = 1) -> Iterator[None]:
    """The module's call of this number fails, which must reach the caller."""
    calls: list[None] = []
    hook = module.register_forward_pre_hook(lambda *_: calls.append(None) or (fails() if len(calls) == at_call else None))
    with pytest.raises(torch.OutOfMemoryError):
        yield
    hook.remove()


class Requests:
    """Requests of a cache, and the whole forward over the tokens of each: every pass must give its logits."""

    def __init__(self, lm: LongNetLM, cache: KVCache) -> None:
        self.lm, self.cache, self.stepper = lm, cache, Stepper(lm, cache)
        self.tokens, self.full = (
            torch.empty(cache.num_requests, N, *size, dtype=dtype) for size, dtype in (((), torch.long), ((50,), None))
        )
        for i in range(cache.num_requests):
            self.renew(i)

    def renew(self, i: int) -> None:
        """Another request takes the place."""
        self.cache.free(i)
        self.tokens[i] = tokens_of(N)
        self.full[i] = self.lm(self.tokens[i : i + 1])[0]

    def read(self, i: int, count: int, chunk: int = 8192) -> None:
        at = self.cache.lengths[i]
        found = prefill(self.lm, self.tokens[i : i + 1, at : at + count], self.cache.of(i), chunk=chunk)
        close(found[0], self.full[i, at + count - 1])

    def step(self) -> None:
        lengths, active = list(self.cache.lengths), list(self.cache.active)
        rows, at = torch.arange(len(lengths)), torch.tensor(lengths).clamp(max=N - 1)
        logits = self.stepper(self.tokens[rows, at][:, None])
        close(logits[active], self.full[rows, at][active])
        assert self.cache.lengths == [length + is_active for length, is_active in zip(lengths, active, strict=True)]

    def fail(self, how: str, i: int) -> None:
        """A step that fails may be repeated; a prompt that fails in any chunk, or between two, is refused until its request is freed."""
        before = list(self.cache.lengths)
        if how == "step" and any(self.cache.active):
            with failing(self.lm.decoder.blocks[1]):
                self.step()
            assert self.cache.lengths == before
            return
        if before[i] > N - 20:
            self.renew(i)
        at_call = 1 if how == "a chunk" else 2
        with failing(self.lm.embedding if how == "between chunks" else self.lm.decoder.blocks[1], at_call):
            self.read(i, 20, 20 if at_call == 1 else 7)
        for call in (lambda: self.read(i, 1), lambda: self.stepper(self.tokens[:, :1])):
            if self.cache.active[i]:
                with pytest.raises(RuntimeError, match=rf"request {i} has a pass that failed .* call free\({i}\)"):
                    call()
        self.renew(i)

    def play(self, draw: random.Random, turns: int) -> None:
        """Prompts in chunks, steps, pauses, ends and failures, in any order."""
        for _ in range(turns):
            lengths, i = self.cache.lengths, draw.randrange(self.cache.num_requests)
            for j, length in enumerate(lengths):
                if length == N:
                    self.renew(j)
            action = draw.choice(["read", "read", "steps", "steps", "finish", "renew", "fail"])
            if action == "read" and not lengths[i]:
                self.read(i, draw.randint(1, 60), draw.choice([1, 5, 17, 100]))
            elif action == "read":
                self.read(i, min(draw.choice([1, 3, 24, 30]), N - lengths[i]), draw.choice([7, 100]))
            elif action == "steps":
                for _ in range(draw.randint(1, 20)):
                    if any(self.cache.active) and max(lengths) < N:
                        self.step()
            elif action == "fail":
                self.fail(draw.choice(FAILURES), i)
            else:
                (self.cache.finish if action == "finish" else self.renew)(i)
            if isinstance(self.cache, PagedKVCache):
                pages = self.cache.table[self.cache.table > 0]
                assert len(pages.unique()) == len(pages) == self.cache.pages_in_use


@pytest.mark.parametrize("kind", [KVCache, PagedKVCache])
@pytest.mark.parametrize("name", CONFIGS)
def test_every_pass_of_any_requests_gives_the_logits_of_the_full_forward(name: str, kind: Any) -> None:
    lm, draw = frozen(name), random.Random(zlib.crc32(f"{name}{kind.__name__}".encode()))
    cache = kind(lm.config, 2, N, **({"page_size": 4} if kind is PagedKVCache else {}))
    requests = Requests(lm, cache)
    # prompts that end with every segment, where pages are given back at once; the other request goes on
    requests.read(0, 24)
    requests.read(1, 17, chunk=5)
    cache.finish(0)
    for _ in range(43):
        requests.step()
    requests.read(0, 13)
    for how in FAILURES:
        requests.fail(how, 0)
        requests.read(0, 30)
    requests.play(draw, 15)
    requests.renew(0)
    requests.read(0, N, chunk=17)
    for call in (requests.step, lambda: lm(requests.tokens[:1, :1], cache=cache.of(0))):
        with pytest.raises(ValueError, match="larger max_length"):
            call()
    if kind is PagedKVCache:
        for i in range(2):
            cache.free(i)
        assert cache.pages_in_use == 0 and not cache.table.any()


def test_a_cache_holds_what_can_be_read_and_says_so() -> None:
    lm = frozen()
    cache = KVCache(lm.config, 3, 1000)
    # 2 layers, k and v, 3 requests, the longest segment, 2 heads of 8, float32
    assert cache.capacity == 24 and cache.nbytes == 2 * 2 * 3 * 24 * 2 * 8 * 4
    assert all(part in str(cache) for part in ("3 × 24 positions", "float32: 18 KiB", "would be 750 KiB"))
    for name, length, capacity in (
        ("longnet", 10, 10),
        ("window", 1000, 14),
        ("llama", 1000, 1000),
        ("global", 1000, 14 + 5),
        ("mixed", 1000, 24),
    ):
        one = KVCache(model(name).config, 1, length)
        assert one.capacity == capacity and one.nbytes == model(name).summary().cache_bytes(length, 4)
    assert [x.shape[1] for x in one.keys] == [14, 24] and "1 × 14 or 24 positions" in str(one)
    assert 2 * KVCache(lm.config, 3, 1000, dtype=torch.bfloat16).nbytes == cache.nbytes
    pages = PagedKVCache(lm.config, 3, 400, page_size=4, num_pages=20)
    for i, length in enumerate((30, 1, 50)):
        prefill(lm, tokens_of(1, length), pages.of(i), chunk=16)
    # of 30 positions, those from 24 on can be read; of 50 those from 48 on
    assert pages.lengths == [30, 1, 50] and pages.pages_in_use == 2 + 1 + 1
    step = Stepper(lm, pages)
    for _ in range(60):
        step(tokens_of(3, 1))
        assert pages.pages_in_use <= 3 * (24 // 4 + 1)
    with pytest.raises(RuntimeError, match="needs 25 more pages of 4 positions"):
        pages.free(1)
        lm(tokens_of(1, 100), cache=pages.of(1))
    # what found no page may be tried again
    prefill(lm, tokens_of(1, 30), pages.of(1))
    # by default there are as many as all can need
    for name in ("window", "global"):
        lm = frozen(name, num_layers=1)
        pages = PagedKVCache(lm.config, 12, 60, page_size=4, chunk=4)
        for i in range(12):
            prefill(lm, tokens_of(1, 20 + i % 4), pages.of(i), chunk=4)
        step = Stepper(lm, pages)
        for _ in range(30):
            step(tokens_of(12, 1))


def test_lengths_grow_at_the_end_of_a_pass_beside_which_there_is_no_other() -> None:
    lm = frozen("window")
    tokens, cache = tokens_of(2, 60), KVCache(lm.config, 2, 60)
    full = lm.hidden(tokens)
    with cache.reading(2, 6) as chunk:
        with pytest.raises(RuntimeError, match="has not ended"):
            lm(tokens[:, :3], cache=cache)
        with pytest.raises(ValueError, match=r"x has \(batch, positions\) \(2, 1\) and this pass was begun for \(2, 6\); begin one"):
            lm(tokens[:, :1], cache=chunk)
        close(lm.hidden(tokens[:, :6], cache=chunk), full[:, :6])
        assert cache.lengths == [0, 0]
    assert cache.lengths == [6, 6]
    with pytest.raises(ValueError, match=r"x has \(batch, positions\) \(2, 6\) and this pass has ended; begin one"):
        lm.hidden(tokens[:, 6:12], cache=chunk)
    close(lm.hidden(tokens[:, 6:20], cache=cache), full[:, 6:20])


def test_what_is_freed_or_finished_during_a_pass_does_not_grow() -> None:
    lm = frozen("window")
    tokens, cache = tokens_of(3, 8), KVCache(lm.config, 3, 60)
    prefill(lm, tokens[:, :7], cache)
    with cache.reading(3, 1) as step:
        lm(tokens[:, 7:], cache=step)
        cache.finish(0)
        cache.free(2)
    assert (cache.lengths, cache.active) == ([7, 8, 0], [False, True, False])
    with cache.of(2).reading(1, 4) as chunk:
        lm(tokens[2:, :4], cache=chunk)
        cache.free(2)
    assert (cache.lengths, cache.active) == ([7, 8, 0], [False, True, False])


@pytest.mark.parametrize("kind", [KVCache, PagedKVCache])
def test_a_step_does_not_revive_requests_that_are_all_finished(kind: Any) -> None:
    lm = frozen("window")
    cache, tokens = kind(lm.config, 2, 60), tokens_of(2, 7)
    prefill(lm, tokens, cache)
    for request in range(2):
        cache.finish(request)
    lm(tokens[:, :1], cache=cache)
    assert (cache.lengths, cache.active) == ([7, 7], [False, False])
    for request in range(2):
        cache.free(request)
    # free ones begin anew
    assert torch.equal(lm(tokens[:, :1], cache=cache), lm(tokens[:, :1], cache=kind(lm.config, 2, 60)))
    assert (cache.lengths, cache.active) == ([1, 1], [True, True])
    for arguments in ((None, -1), (None, 0.5), ([2], 1), ([-1], 1)):
        with pytest.raises((ValueError, TypeError), match=r"by is|request is"):
            cache.advance(*arguments)


TOKENS = torch.ones(2, 4, dtype=torch.int64)


def call_of(lm: LongNetLM, cache: Any = None, **options: Any) -> Callable[[], object]:
    tokens = options.pop("tokens", TOKENS)
    return lambda: lm(tokens, cache=KVCache(lm.config, 2, 100) if cache is None else cache, **options)


def unequal() -> object:
    lm = frozen()
    cache = KVCache(lm.config, 2, 100)
    lm(TOKENS[:1], cache=cache.of(1))
    return lm(TOKENS, cache=cache)


def cache_of(**changes: Any) -> KVCache:
    return KVCache(LongNetConfig(**SHAPE, **changes), 1, 1000)


def stepped(tokens: torch.Tensor) -> object:
    return Stepper(frozen(), KVCache(frozen().config, 3, 40))(tokens)


def test_a_cache_fits_models_whose_layers_are_the_same_however_their_list_is_written() -> None:
    entries, unrotated = CONFIGS["mixed positions"]["attention"], [{"attention": "dense", "positions": "none"}]
    pairs = [
        [model("mixed positions", num_layers=4, attention=attention) for attention in (entries * 2, entries)],
        # where no layer rotates, the base means nothing
        [model("mixed positions", attention=unrotated, rotary_base=base) for base in (50.0, 500.0)],
    ]
    for lm, other in pairs:
        with torch.no_grad():
            close(lm(tokens := tokens_of(1, 9), cache=KVCache(other.config, 1, 9)), lm(tokens))


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (call_of(model()), r"torch\.no_grad"),
        (call_of(frozen().train()), r"model\.eval"),
        (call_of(frozen(), targets=TOKENS), "targets, too"),
        (call_of(frozen(), cu_seqlens=torch.tensor([0, 4], dtype=torch.int32)), "cu_seqlens, too"),
        (call_of(frozen(), tokens=TOKENS[:1]), "cache has 2 requests"),
        (unequal, "need equal lengths"),
        (lambda: cache_of(**DILATED).of(2), "expected 0 to 0"),
        (lambda: cache_of(attention="block_sparse", block_pattern=BigBird(64, 64, 2)), "is_prefix_stable"),
        (lambda: cache_of(**DILATED, is_causal=False), "is_causal is False"),
        (lambda: KVCache(model(), 1, 1000), "LongNetConfig"),  # type: ignore[arg-type]
        (call_of(frozen("xpos", xpos_scale_base=0.1)), "XPOS overflows"),
        (call_of(frozen(), KVCache(model("uneven", num_kv_heads=2).config, 2, 30)), "another pattern; make it with this model's config"),
        (
            call_of(
                frozen("mixed positions"), KVCache(model("mixed positions", attention=[WINDOWED, {"attention": "dense"}]).config, 2, 30)
            ),
            "for a model with another positions; make it",
        ),
        (
            call_of(frozen(), KVCache(model().config, 2, 30, dtype=torch.bfloat16)),
            r"the cache holds torch.bfloat16 .* make the cache with dtype=torch.float32",
        ),
        (lambda: stepped(TOKENS[:1, :1]), r"tokens has shape \(1, 1\); expected one token for each request, \(3, 1\)"),
        (lambda: prefill(frozen(), TOKENS[:, :0], KVCache(model().config, 2, 9)), "at least one position"),
        (lambda: model().generate(TOKENS, 2, temperature=-1.0), "temperature"),
        (lambda: model().generate(TOKENS, 2, top_k=0), "top_k"),
        (lambda: model().generate(TOKENS, 2, stop_token=50), "stop_token is 50; expected a token below vocab_size = 50"),
        (lambda: Sampling(top_p=0.0), "top_p"),
        (lambda: Sampling(temperature="hot"), "temperature"),  # type: ignore[arg-type]
    ],
)
def test_what_a_cache_or_a_generation_cannot_do_is_refused(call: Callable[[], object], text: str) -> None:
    with pytest.raises((ValueError, TypeError), match=text):
        call()


def test_prompts_are_continued_by_the_full_forwards_likeliest_tokens_alone_or_together_up_to_a_stop_token() -> None:
    lm = model().train()
    lm.decoder.blocks[0].eval()
    before = [module.training for module in lm.modules()]
    prompts = [tokens_of(n) for n in (5, 40, 23)]
    together = lm.generate(prompts, 30, temperature=0.0, prefill_chunk=16)
    assert [module.training for module in lm.modules()] == before
    lm.eval()
    for prompt, written in zip(prompts, together, strict=True):
        assert torch.equal(written, lm.generate(prompt[None], 30, temperature=0.0)[0])
        with torch.no_grad():
            assert torch.equal(written[len(prompt) :], lm(written[None])[0, len(prompt) - 1 : -1].argmax(-1))
    stop = int(together[0][5 + 3])
    ended = lm.generate(prompts, 30, temperature=0.0, stop_token=stop)
    for prompt, whole, found in zip(prompts, together, ended, strict=True):
        where = (whole[len(prompt) :] == stop).nonzero()
        assert torch.equal(found, whole[: len(prompt) + int(where[0]) + 1] if len(where) else whole)
    assert torch.equal(lm.generate(prompts[0].expand(2, -1), 30, temperature=0.0, stop_token=stop), ended[0].expand(2, -1))
    for name in ("longnet", "llama"):
        with torch.autocast("cpu", torch.bfloat16):
            assert model(name).generate(TOKENS, 3, temperature=0.0).shape == (2, 7)


def test_draws_are_torchs_of_the_likeliest() -> None:
    def drawn(logits: torch.Tensor, **options: Any) -> set[int]:
        draw = Sampling(generator=torch.Generator().manual_seed(0), **options)
        return {int(draw.draw(logits)) for _ in range(300)}

    logits = torch.randn(40, 300)
    wanted = torch.multinomial(logits.softmax(-1), 1, generator=torch.Generator().manual_seed(7))
    assert torch.equal(Sampling(generator=torch.Generator().manual_seed(7)).draw(logits), wanted)
    # the likeliest is the first of equals
    ties = torch.randint(4, (100, 33)).float()
    assert torch.equal(Sampling(temperature=0.0).draw(ties), ties.argmax(-1, keepdim=True))
    # a nucleus is the fewest likeliest that reach top_p; the likeliest is last, since what has nothing to draw from draws the first
    nucleus = torch.tensor([[0.05, 0.15, 0.3, 0.5]]).log()
    for top_p, count in ((5e-324, 1), (1e-46, 1), (1e-6, 1), (0.5, 1), (0.51, 2), (0.8, 2), (0.9, 3), (1.0, 4)):
        assert drawn(nucleus, top_p=top_p) == set(range(4 - count, 4))
    for temperature, count in ((-0.0, 1), (1e-46, 1), (1e-3, 1), (2**64, 3)):
        assert drawn(nucleus, temperature=temperature, top_k=3) == set(range(4 - count, 4))
    # what a temperature divides stays finite
    assert drawn(torch.tensor([[1e9, 2e9]]), temperature=2e-30) == {1}
    # of equally likely tokens no more than k
    assert len(drawn(torch.tensor([[0.0, 1.0, 1.0, 1.0, 1.0]]), top_k=2)) == 2
    for temperature in (0.0, 0.7):
        draw = Sampling(temperature=temperature)
        with pytest.raises(ValueError, match=r"logits have nan in row 1; expected"):
            draw.draw(torch.tensor([[0.0, 1.0], [0.0, torch.nan]]))
        nothing = torch.full((1, 8), -torch.inf)
        with pytest.raises(ValueError, match="logits have -inf in row 0"):
            draw.draw(nothing)
        nothing[0, 5] = 1.0
        assert draw.draw(nothing).item() == 5


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
            self.tables = cache.row_keys[0]._columns
            step._logits = torch.empty(0)
            captured.append(self)

        def replay(self) -> None:
            assert self.tables is cache.row_keys[0]._columns
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
