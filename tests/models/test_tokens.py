"""Tokens and targets out of range, and logits that are not finite, are refused by name, before anything is written."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dilated_attention.models import (
    KVCache,
    LongNetConfig,
    LongNetLM,
    PagedKVCache,
    Sampling,
    Stepper,
    prefill,
    sharded_cross_entropy,
)

V = 50


def model(**changes: Any) -> LongNetLM:
    torch.manual_seed(1)
    shape: dict[str, Any] = {"vocab_size": V, "embed_dim": 32, "num_layers": 2, "num_heads": 4, "segment_lengths": (8, 24)}
    return LongNetLM(LongNetConfig(**{**shape, "dilation_rates": (1, 3), **changes})).eval().requires_grad_(False)


@pytest.mark.parametrize("wrong", [V, -1, -100, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
def test_tokens_out_of_range_are_refused_wherever_they_enter(wrong: int, dtype: torch.dtype) -> None:
    lm = model()
    good = torch.randint(V, (2, 20), dtype=dtype)
    bad = good.clone()
    bad[1, 15] = wrong
    low, high = int(bad.min()), int(bad.max())
    said = rf"tokens reach from {low} to {high}; expected 0 to vocab_size − 1 = 49"
    cache, pages = KVCache(lm.config, 2, 60), PagedKVCache(lm.config, 2, 60, page_size=4)
    for call in (
        lambda: lm(bad),
        lambda: lm(bad, targets=good),
        lambda: lm.hidden(bad),
        lambda: lm(bad, cache=cache),
        lambda: prefill(lm, bad, cache, chunk=7),
        lambda: prefill(lm, bad, pages, chunk=7),
        lambda: Stepper(lm, cache)(bad[:, 15:16]),
    ):
        with pytest.raises(ValueError, match=said if call.__code__.co_names[:1] != ("Stepper",) else "expected 0 to vocab_size − 1 = 49"):
            call()
    assert cache.lengths == pages.lengths == [0, 0] and pages.pages_in_use == 0
    with pytest.raises(ValueError, match=said.replace("tokens", "prompt")):
        lm.generate(bad, 3)
    with pytest.raises(ValueError, match=r"prompt\[1\] reach"):
        lm.generate([good[0], bad[1]], 3)
    assert torch.equal(lm(good), lm(good.long()))


@pytest.mark.parametrize("wrong", [V, -1, -99, -101])
def test_targets_out_of_range_are_refused_before_any_work(wrong: int) -> None:
    lm = model()
    tokens = torch.randint(V, (2, 20))
    targets = tokens.clone()
    targets[0, :5] = -100
    loss = lm(tokens, targets=targets)
    assert loss.isfinite()
    bad = targets.clone()
    bad[1, 3] = wrong
    calls = []
    hook = lm.decoder.register_forward_pre_hook(lambda *_: calls.append(1))
    with pytest.raises(ValueError, match=rf"targets reach from .*{abs(wrong)}.*; expected 0 to vocab_size − 1 = 49, or −100 where"):
        lm(tokens, targets=bad)
    hook.remove()
    assert not calls
    hidden = lm.hidden(tokens)
    for chunk in (None, 7):
        assert torch.allclose(sharded_cross_entropy(hidden, lm.output_weight, targets, chunk=chunk), loss)
        with pytest.raises(ValueError, match="targets reach from"):
            sharded_cross_entropy(hidden, lm.output_weight, bad, chunk=chunk)
    assert torch.allclose(sharded_cross_entropy(hidden, lm.output_weight, targets.to(torch.int16)), loss)
    ignored = torch.where(targets == -100, 3, targets)
    ignored[bad != targets] = -7
    assert sharded_cross_entropy(hidden, lm.output_weight, ignored, ignore_index=-7).isfinite()


def test_targets_of_another_type_or_number_are_refused() -> None:
    hidden, weight = torch.randn(2, 5, 8), torch.randn(V, 8)
    with pytest.raises(TypeError, match=r"targets has dtype torch\.float32; expected integers"):
        sharded_cross_entropy(hidden, weight, torch.full((2, 5), 1.7))
    with pytest.raises(TypeError, match="targets is a list"):
        sharded_cross_entropy(hidden, weight, [1] * 10)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"targets has shape \(2, 4\) and hidden has \(2, 5, 8\)"):
        sharded_cross_entropy(hidden, weight, torch.zeros(2, 4, dtype=torch.int64))


@pytest.mark.slow
def test_what_cannot_be_looked_at_is_not() -> None:
    """Compiled, mapped and fake tokens have no values on the host."""
    lm, tokens = model(), torch.randint(V, (2, 20))
    full = lm(tokens)
    torch.testing.assert_close(torch.compile(lm, backend="eager", fullgraph=True)(tokens), full)
    loss = torch.compile(lambda t: lm(t, targets=t), backend="eager", fullgraph=True)(tokens)
    torch.testing.assert_close(loss, lm(tokens, targets=tokens))
    each = torch.vmap(lambda t: sharded_cross_entropy(full[0], torch.eye(V), t))(tokens)
    torch.testing.assert_close(each[0], sharded_cross_entropy(full[0], torch.eye(V), tokens[0]))
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert lm(torch.zeros(2, 20, dtype=torch.int64)).shape == (2, 20, V)
    assert lm(tokens[:0]).shape == (0, 20, V)


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.9}], ids=str)
def test_weights_with_nan_do_not_generate(options: dict[str, Any]) -> None:
    lm, prompts = model(), torch.randint(V, (2, 9))
    assert lm.generate(prompts, 3, **options).shape == (2, 12)
    before = [module.training for module in lm.train().modules()]
    lm.decoder.blocks[1].ffn.up.weight[0, 0] = torch.nan
    for given in (prompts, [prompts[0], prompts[1, :4]]):
        with pytest.raises(ValueError, match=r"model gives logits .* nan .*prompt 0, 0 new tokens.*decoder\.blocks\.1\.ffn\.up\.weight"):
            lm.generate(given, 3, **options)
    assert [module.training for module in lm.modules()] == before


def test_nan_that_comes_later_is_seen_at_its_token() -> None:
    lm = model(tie_embeddings=False)
    prompt = torch.randint(V, (1, 9))
    free = lm.generate(prompt, 6, temperature=0.0)[0, 9:].tolist()
    first = next(i for i, token in enumerate(free) if token not in prompt[0].tolist())
    lm.embedding.weight[free[first]] = torch.inf
    with pytest.raises(ValueError, match=rf"prompt 0, {first + 1} new tokens.*embedding\.weight"):
        lm.generate(prompt, 6, temperature=0.0)


def test_logits_that_give_no_probabilities_are_refused() -> None:
    for temperature in (0.0, 0.7):
        draw = Sampling(temperature=temperature)
        for bad in (torch.nan, torch.inf):
            logits = torch.zeros(3, 8)
            logits[1, 2] = bad
            with pytest.raises(ValueError, match=r"logits have .* in row 1; expected"):
                draw.draw(logits)
        with pytest.raises(ValueError, match="logits have -inf in row 0"):
            draw.draw(torch.full((1, 8), -torch.inf))
        some = torch.full((1, 8), -torch.inf)
        some[0, 5] = 1.0
        assert draw.draw(some).item() == 5


def test_draws_are_those_of_torch_and_the_likeliest_is_the_first_of_equals() -> None:
    logits = torch.randn(40, 300)
    drawn = Sampling(generator=torch.Generator().manual_seed(7)).draw(logits)
    wanted = torch.multinomial(logits.softmax(-1), 1, generator=torch.Generator().manual_seed(7))
    assert torch.equal(drawn, wanted)
    ties = torch.randint(4, (100, 33)).float()
    assert torch.equal(Sampling(temperature=0.0).draw(ties), ties.argmax(-1, keepdim=True))


def test_an_overflow_names_the_dtype() -> None:
    lm = copy.deepcopy(model(tie_embeddings=False)).half()
    assert lm.output is not None
    lm.output.weight.mul_(6e4)
    with pytest.raises(ValueError, match=r"none of its parameters .*torch\.float16"):
        lm.generate(torch.randint(V, (1, 9)), 3)
