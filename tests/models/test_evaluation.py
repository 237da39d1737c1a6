"""evaluate: every token is scored once, with at least the context that was promised, and the bits are those of the model's logits."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from dilated_attention.models import LongNetConfig, LongNetLM, evaluate, kmers
from dilated_attention.models.evaluation import _windows

SHAPE: dict[str, Any] = {"embed_dim": 32, "num_layers": 2, "num_heads": 2, "segment_lengths": (8, 24), "dilation_rates": (1, 3)}


def model(**changes: Any) -> LongNetLM:
    torch.manual_seed(1)
    return LongNetLM(LongNetConfig(**{"vocab_size": 256, **SHAPE, **changes})).eval()


def tokens(n: int, below: int = 256) -> torch.Tensor:
    return torch.randint(below, (n,), generator=torch.Generator().manual_seed(n))


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize(("context", "stride"), [(1, 1), (2, 1), (7, 3), (8, 8), (16, 5), (100, 50)])
def test_each_target_is_scored_once_with_the_promised_context(context: int, stride: int, is_causal: bool) -> None:
    for n in (0, 1, 2, 7, 8, 9, 16, 17, 40, 100, 101):
        places: list[int] = []
        for window in _windows(n, context, stride, is_causal):
            assert 0 <= window.first < window.end <= (n - 1 if is_causal else n)
            assert window.end - window.first == min(context, n - 1 if is_causal else n) or window.first == 0
            assert window.end - window.first <= context
            for target in range(window.scored, window.scored_end):
                places.append(target)
                if is_causal:
                    # its inputs end with the token before it
                    assert window.end >= target and target - window.first >= min(target, context - stride + 1)
                else:
                    assert window.first <= target < window.end
        assert places == list(range(1 if is_causal else 0, n))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-13)])
def test_bits_are_those_of_the_logits(dtype: torch.dtype, tolerance: float) -> None:
    lm, records = model().to(dtype), [tokens(90), tokens(0), tokens(31), tokens(1)]
    found = evaluate(lm, records, context=24, stride=10)
    nats: list[float] = []
    by_seen: dict[int, list[float]] = {}
    inputs = 0
    with torch.no_grad():
        for record in records:
            end, scored = min(len(record), 25), 1
            while scored < end:
                first = max(0, end - 25)
                losses = torch.nn.functional.cross_entropy(lm(record[None, first : end - 1])[0], record[first + 1 : end], reduction="none")
                nats += losses[scored - first - 1 :].tolist()
                for i, loss in enumerate(losses.tolist()):
                    by_seen.setdefault((i + 1).bit_length(), []).append(loss)
                inputs += len(losses)
                scored, end = end, min(len(record), end + 10)
    assert found.scored == len(nats) == 89 + 30 and found.positions == inputs
    assert found.bits == pytest.approx(sum(nats) / len(nats) / math.log(2), abs=tolerance)
    assert [(b.least, b.most, b.targets) for b in found.by_position] == [
        (2 ** (p - 1), min(2**p - 1, 24), len(losses)) for p, losses in sorted(by_seen.items())
    ]
    for bucket, (_, losses) in zip(found.by_position, sorted(by_seen.items()), strict=True):
        assert bucket.bits == pytest.approx(sum(losses) / len(losses) / math.log(2), abs=1e-5)
    # one window that holds everything is the loss of the model
    whole = evaluate(lm, [tokens(90)], context=200)
    with torch.no_grad():
        assert whole.bits * math.log(2) == pytest.approx(float(lm(tokens(90)[None, :-1], targets=tokens(90)[None, 1:])), abs=1e-5)


@pytest.mark.parametrize("is_causal", [True, False])
def test_unknown_bases_are_no_targets_and_hidden_ones_are_not_shown(is_causal: bool) -> None:
    lm = model(vocab_size=5, kmer=3, tie_embeddings=False, is_causal=is_causal)
    with torch.no_grad():
        for table in lm.embedding.tables[1:]:  # type: ignore[union-attr, index]
            torch.nn.init.normal_(table.weight, std=0.3)  # type: ignore[arg-type]
    record = tokens(200, 5)
    found = evaluate(lm, [record], context=200)
    known = record != 4
    if is_causal:
        inputs, targets = kmers(record[:-1], 3, False), record[1:].where(known[1:], -100)
    else:
        hidden = torch.rand(200, generator=torch.Generator().manual_seed(15)) < 0.15
        inputs, targets = kmers(record.where(~hidden, 4), 3, True), record.where(known & hidden, -100)
    assert found.scored == int((targets != -100).sum()) < 180
    # windows of half the record see all of it
    with torch.no_grad():
        assert found.bits * math.log(2) == pytest.approx(float(lm(inputs[None], targets=targets[None])), abs=1e-5)
    assert bool(found.by_position) is is_causal


@pytest.mark.parametrize("is_causal", [True, False])
def test_windows_without_a_target_are_not_read(is_causal: bool) -> None:
    """Those of nothing but N; a part of the windows is one of the others."""
    lm = model(vocab_size=5, is_causal=is_causal)
    n = torch.full((1000,), 4)
    record = torch.cat([n, tokens(200, 4), n])
    whole = evaluate(lm, [n, record], context=40)
    assert (whole.scored == 200 or not is_causal) and 8 <= whole.windows <= 12
    assert evaluate(lm, [n, record], context=40, num_windows=1).scored > 0
    with pytest.raises(ValueError, match="none of all is scored"):
        evaluate(lm, [n], context=40)


def test_a_part_of_the_windows_is_spread_over_the_data() -> None:
    lm = model()
    found = evaluate(lm.train(), [tokens(400)], context=16, num_windows=5)
    assert (found.windows, found.stride, found.scored) == (5, 8, 16 + 4 * 8)
    assert lm.training
    assert evaluate(lm, [tokens(40)], num_windows=1000).scored == 39
    # the longest segment, and no more than there is
    assert [evaluate(lm, [tokens(n)]).context for n in (400, 20)] == [24, 20]
    assert evaluate(model(attention="dense", segment_lengths=(), dilation_rates=()), [tokens(30)]).context == 30


def test_what_cannot_be_evaluated_is_refused() -> None:
    lm = model()
    with pytest.raises(ValueError, match="stride is 9; expected at most context = 8"):
        evaluate(lm, [tokens(40)], context=8, stride=9)
    for name in ("context", "stride", "num_windows"):
        with pytest.raises(ValueError, match=f"{name} is 0"):
            evaluate(lm, [tokens(40)], **{name: 0})
    for records in ([], [tokens(1), tokens(0)]):
        with pytest.raises(ValueError, match="and none of all is scored"):
            evaluate(lm, records)
    with pytest.raises(ValueError, match=r"is_causal is False and vocab_size is 256; .* only bases"):
        evaluate(model(is_causal=False), [tokens(40)])
    with torch.no_grad():
        lm.embedding.weight[0] = torch.nan  # type: ignore[index, operator]
    with pytest.raises(ValueError, match="the loss is nan"):
        evaluate(lm, [tokens(40)])
