"""Padded batches: each row is computed as its tokens alone, wherever padding lies and whatever it holds."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dilated_attention.models import KVCache, LongNetConfig, LongNetEncoder, LongNetLM, evaluate, generate_stream
from dilated_attention.pattern import BigBird, GlobalLocal, TopBlocks
from tests.models.test_models import DILATED, SHAPE
from tests.models.test_models import KINDS as PLAIN

KINDS: dict[str, dict[str, Any]] = {
    # dilated, dense, a window, and layers that differ
    **PLAIN,
    "blocked offsets": {**DILATED, "head_offsets": "blocked", "mixture_grad": "detached", "num_kv_heads": 2},
    "zero keys": {**DILATED, "tail": "zero_keys", "is_causal": False},
    "xpos": {**DILATED, "positions": "xpos", "xpos_scale_base": 64.0},
    "global": {"attention": "block_sparse", "block_pattern": GlobalLocal((8, 8), 4, block_size=64)},
    "big bird": {"attention": "block_sparse", "block_pattern": BigBird(64, 64, 1, block_size=64)},
    "top blocks": {"attention": "block_sparse", "block_pattern": TopBlocks(2, block_size=64)},
    # on one process
    "ring": {"attention": "ring_dilated", **DILATED},
}
N, LENGTHS = 150, (0, 150, 1, 133, 70)


def model(name: str = "dilated", **changes: Any) -> LongNetLM:
    torch.manual_seed(1)
    return LongNetLM(LongNetConfig(**{**SHAPE, **KINDS[name], **changes}), dtype=torch.float64)


def batch(side: str, lengths: tuple[int, ...] = LENGTHS) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, targets and attention_mask."""
    random = torch.Generator().manual_seed(len(side))
    tokens, targets = torch.randint(17, (2, len(lengths), N), generator=random)
    order = torch.arange(N) if side == "right" else torch.arange(N).flip(0)
    places = torch.stack([torch.randperm(N, generator=random) if side == "between" else order for _ in lengths])
    return tokens, targets, (places < torch.tensor(lengths)[:, None]).long()


@pytest.mark.parametrize("name", KINDS)
def test_logits_loss_and_gradients_are_those_of_each_row_alone(name: str, device: str) -> None:
    """Where padding lies does not depend on the kind of attention, so that each has one of the sides."""
    side = ("left", "between", "right")[list(KINDS).index(name) % 3]
    lm = model(name, **{"is_causal": side != "right", **KINDS[name]}).to(device)
    tokens, targets, mask = (x.to(device) for x in batch(side))
    logits = lm(tokens, attention_mask=mask)
    assert not logits[mask == 0].any()
    loss = lm(tokens, targets=targets, key_padding_mask=mask == 0)
    gradients = torch.autograd.grad(loss, lm.parameters())
    alone = []
    for row, wanted, result, keep in zip(tokens, targets, logits, mask == 1, strict=True):
        if keep.any():
            torch.testing.assert_close(result[keep], lm(row[None, keep])[0], rtol=0, atol=1e-12)
            alone.append(lm(row[None, keep], targets=wanted[None, keep]) * keep.sum() / mask.sum())
    torch.testing.assert_close(loss, sum(alone), rtol=0, atol=1e-12)
    torch.testing.assert_close(gradients, torch.autograd.grad(sum(alone), lm.parameters()), rtol=0, atol=1e-12)


@pytest.mark.parametrize("changes", [{"checkpoint_activations": True}, {}])
def test_an_encoder_takes_padding_that_is_not_finite(changes: dict[str, Any]) -> None:
    config = LongNetConfig(**{**SHAPE, **DILATED, "is_causal": False})
    encoder, (_, _, mask) = LongNetEncoder(config, dtype=torch.float64, **changes), batch("left")
    x = torch.randn(*mask.shape, 16, dtype=torch.float64)
    spoilt = x.masked_fill(mask[..., None] == 0, torch.nan).requires_grad_()
    y, states = encoder(spoilt, attention_mask=mask, all_layers=True)
    (slope,) = torch.autograd.grad(y.square().sum(), spoilt)
    for i, keep in enumerate(mask == 1):
        torch.testing.assert_close(y[i, keep], encoder(x[i : i + 1, keep])[0])
    # what is no padding is computed as without a mask
    assert [state.shape for state in states] == [x.shape] * 3 and not slope[mask == 0].any() and slope.isfinite().all()
    assert torch.equal(encoder(x, attention_mask=torch.ones_like(mask)), encoder(x))
    if not changes:
        assert torch.equal(torch.compile(encoder, backend="eager")(x, attention_mask=mask), y)


CONTINUED = [("dilated", "left"), ("xpos", "right"), ("dense", "between"), ("block_sparse", "left"), ("mixed", "right")]


@pytest.mark.parametrize(("name", "side"), CONTINUED)
def test_a_padded_batch_is_continued_and_evaluated_as_each_row_alone(name: str, side: str, device: str) -> None:
    lm, (tokens, _, mask) = model(name).eval().to(device), (x.to(device) for x in batch(side, LENGTHS[1:]))
    padded = {"attention_mask": mask.bool()}
    found = lm.generate(tokens, 20, temperature=0, **padded)
    rows = [row[keep] for row, keep in zip(tokens, mask == 1, strict=True)]
    assert torch.equal(found[:, :N], tokens)
    assert torch.equal(found[:, N:], torch.cat([lm.generate(row[None], 20, temperature=0)[:, -20:] for row in rows]))
    stop = int(found[0, N + 3])
    stream = torch.cat(list(generate_stream(lm, tokens, 5, stop_token=stop, **padded)), 1)
    assert stream.shape == (4, 5)
    assert evaluate(lm, tokens, context=30, **padded).bits == evaluate(lm, rows, context=30).bits


def test_masks_that_do_not_fit_are_refused() -> None:
    lm, (tokens, _, mask) = model().eval(), batch("left")
    cache = KVCache(lm.config, len(LENGTHS), 2 * N, dtype=torch.float64)
    wrong: list[tuple[Callable[[], Any], str]] = [
        (lambda: lm(tokens, attention_mask=mask, key_padding_mask=mask == 0), "leave one of them out"),
        (lambda: lm(tokens, attention_mask=2 * mask), "expected 1 = token and 0 = padding: documents of one row are told by cu_seqlens"),
        (lambda: lm(tokens, attention_mask=mask.float()), "attention_mask is torch.float32; expected a tensor of integers or bool"),
        (lambda: lm(tokens, attention_mask=mask[:, 1:]), r"attention_mask has shape \(5, 149\); expected"),
        (lambda: lm(tokens, key_padding_mask=mask), "key_padding_mask has dtype torch.int64; expected torch.bool, True = padding"),
        (lambda: lm(tokens, padding_mask=mask), r"LongNetLM.forward\(\) got an unexpected keyword argument 'padding_mask'"),
        (lambda: lm(tokens[:1], attention_mask=mask[:1], cu_seqlens=torch.tensor([0, N])), "packed documents have no padding"),
        (lambda: lm.generate(list(tokens), 1, attention_mask=mask), "rows of a list have no padding"),
        (lambda: lm.generate(tokens, 1, attention_mask=mask), r"prompt\[0\] has shape \(1, 0\); expected at least one token"),
        (lambda: lm(tokens, attention_mask=mask, cache=cache), "attention_mask is given and cache, too; prefill rows one by one"),
        (lambda: lm.decoder.attention_received(torch.randn(1, 8, 16), key_padding_mask=mask[:1, :8] == 0), "blocks before this one"),
    ]
    for call, message in wrong:
        with pytest.raises((TypeError, ValueError), match=message), torch.no_grad():
            call()
    # no pass of the cache was begun
    with torch.no_grad():
        assert lm(tokens, cache=cache).shape == (5, N, 17)
