"""Tokens and targets out of range, and logits that are not finite, are refused by name, before anything is written."""

import copy
import functools
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dilated_attention.models import KVCache, PagedKVCache, Stepper, prefill, sharded_cross_entropy
from tests.models.test_generation import frozen

V = 50
model = functools.partial(frozen, "longnet")


@pytest.mark.parametrize(("wrong", "dtype"), [(V, torch.int64), (-1, torch.int32)])
def test_tokens_out_of_range_are_refused_wherever_they_enter(wrong: int, dtype: torch.dtype) -> None:
    lm, good = model(), torch.randint(V, (2, 20), dtype=dtype)
    bad = good.clone()
    bad[1, 15] = wrong
    said = rf"reach from {int(bad.min())} to {int(bad.max())}; expected 0 to vocab_size − 1 = 49"
    cache, pages = KVCache(lm.config, 2, 60), PagedKVCache(lm.config, 2, 60, page_size=4)
    for name, call in (
        ("tokens", lambda: lm(bad)),
        ("tokens", lambda: lm(bad, targets=good)),
        ("tokens", lambda: lm.hidden(bad)),
        ("tokens", lambda: lm(bad, cache=cache)),
        ("tokens", lambda: prefill(lm, bad, pages, chunk=7)),
        ("prompt", lambda: lm.generate(bad, 3)),
    ):
        with pytest.raises(ValueError, match=f"{name} {said}"):
            call()
    for name, call in (("tokens", lambda: Stepper(lm, cache)(bad[:, 15:16])), (r"prompt\[1\]", lambda: lm.generate([good[0], bad[1]], 3))):
        with pytest.raises(ValueError, match=f"{name} reach .*vocab_size − 1 = 49"):
            call()
    assert cache.lengths == pages.lengths == [0, 0] and pages.pages_in_use == 0
    assert torch.equal(lm(good), lm(good.long()))


def test_targets_out_of_range_of_another_type_or_number_are_refused_before_any_work() -> None:
    lm, tokens, calls = model(), torch.randint(V, (2, 20)), []
    targets = tokens.clone()
    targets[0, :5] = -100
    loss, hidden = lm(tokens, targets=targets), lm.hidden(tokens)
    lm.decoder.register_forward_pre_hook(lambda *_: calls.append(1))
    for wrong in (V, -99):
        bad = targets.clone()
        bad[1, 3] = wrong
        with pytest.raises(ValueError, match=rf"targets reach from .*{abs(wrong)}.*; expected 0 to vocab_size − 1 = 49, or −100 where"):
            lm(tokens, targets=bad)
        with pytest.raises(ValueError, match="targets reach from"):
            sharded_cross_entropy(hidden, lm.output_weight, bad, chunk=7)
    assert not calls
    ignored = targets.where(targets != -100, -7)
    for same, options in ((targets, {"chunk": 7}), (targets.to(torch.int16), {}), (ignored, {"ignore_index": -7})):
        torch.testing.assert_close(sharded_cross_entropy(hidden, lm.output_weight, same, **options), loss)
    for other, error, text in (
        (torch.full((2, 20), 1.7), TypeError, r"targets has dtype torch\.float32; expected .* integers"),
        ([1] * 40, TypeError, "targets is a list"),
        (targets[:, :4], ValueError, r"targets has shape \(2, 4\) and hidden has \(2, 20, 32\)"),
    ):
        with pytest.raises(error, match=text):
            sharded_cross_entropy(hidden, lm.output_weight, other)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"weight has shape \(0,\); expected \(vocabulary, width\)"):
        sharded_cross_entropy(hidden, torch.zeros(0), targets)


@pytest.mark.slow
def test_what_cannot_be_looked_at_is_not() -> None:
    """Compiled, mapped and fake tokens have no values on the host."""
    lm, tokens = model(), torch.randint(V, (2, 20))
    compiled = torch.compile(lambda t: (lm(t), lm(t, targets=t)), backend="eager", fullgraph=True)(tokens)
    full = lm(tokens)
    torch.testing.assert_close(compiled, (full, lm(tokens, targets=tokens)))
    each = torch.vmap(lambda t: sharded_cross_entropy(full[0], torch.eye(V), t))(tokens)
    torch.testing.assert_close(each[0], sharded_cross_entropy(full[0], torch.eye(V), tokens[0]))
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert lm(torch.zeros(2, 20, dtype=torch.int64)).shape == (2, 20, V)
    assert lm(tokens[:0]).shape == (0, 20, V)


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"top_k": 3, "top_p": 0.9}], ids=str)
def test_weights_that_make_logits_nan_do_not_generate(options: dict[str, Any]) -> None:
    lm, prompts = model(), torch.randint(V, (2, 9))
    assert lm.generate(prompts, 3, **options).shape == (2, 12)
    lm.decoder.blocks[1].ffn.up.weight[0, 0] = torch.nan
    for given in (prompts, [prompts[0], prompts[1, :4]]):
        with pytest.raises(ValueError, match=r"model gives logits .* nan .*prompt 0, 0 new tokens.*decoder\.blocks\.1\.ffn\.up\.weight"):
            lm.train().generate(given, 3, **options)
        assert lm.training
    lm = model(tie_embeddings=False)
    # NaN that comes later is seen at its token
    free = lm.generate(prompts[:1], 6, temperature=0.0)[0, 9:].tolist()
    first = next(i for i, token in enumerate(free) if token not in prompts[0].tolist())
    lm.embedding.weight[free[first]] = torch.inf  # type: ignore[index, operator]
    with pytest.raises(ValueError, match=rf"prompt 0, {first + 1} new tokens.*embedding\.weight"):
        lm.generate(prompts[:1], 6, temperature=0.0)
    # an overflow names the dtype
    lm = copy.deepcopy(model(tie_embeddings=False)).half()
    assert lm.output is not None
    lm.output.weight.mul_(6e4)
    with pytest.raises(ValueError, match=r"none of its parameters .*torch\.float16"):
        lm.generate(prompts, 3)
