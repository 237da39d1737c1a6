"""evaluate: every token is scored once, with at least the context that was promised, and the bits are those of the model's logits."""

import functools
import math

import pytest
import torch
import torch.nn.functional as F

from dilated_attention.models import evaluate, kmers
from dilated_attention.models.evaluation import _windows
from tests.models.test_generation import model as made

model = functools.partial(made, vocab_size=256)
bases = functools.partial(made, vocab_size=5, tie_embeddings=False)


def tokens(n: int, below: int = 256) -> torch.Tensor:
    return torch.randint(below, (n,), generator=torch.Generator().manual_seed(n))


@pytest.mark.parametrize(("context", "stride"), [(1, 1), (7, 3), (24, 10), (24, 24), (200, 50)])
@torch.no_grad()
def test_each_target_is_scored_once_with_the_promised_context(context: int, stride: int) -> None:
    lm, records = model().double().train(), [tokens(90), tokens(0), tokens(31), tokens(1), tokens(2)]
    found = evaluate(lm, records, context=context, stride=stride)
    assert lm.training
    lm.eval()
    nats: list[float] = []
    by_seen: dict[int, list[float]] = {}
    for record in records:
        end, scored = min(len(record), context + 1), 1
        while scored < end:
            first = max(0, end - 1 - context)
            losses = F.cross_entropy(lm(record[None, first : end - 1])[0], record[first + 1 : end], reduction="none")
            nats += losses[scored - first - 1 :].tolist()
            for i, loss in enumerate(losses.tolist()):
                by_seen.setdefault((i + 1).bit_length(), []).append(loss)
            scored, end = end, min(len(record), end + stride)
    buckets = sorted(by_seen.items())
    assert found.scored == len(nats) == 89 + 30 + 1 and found.positions == sum(len(losses) for _, losses in buckets)
    assert found.bits == pytest.approx(sum(nats) / len(nats) / math.log(2), abs=1e-13)
    longest = [(2 ** (p - 1), min(2**p - 1, context), len(losses)) for p, losses in buckets]
    assert [(b.least, b.most, b.targets) for b in found.by_position] == longest
    for bucket, (_, losses) in zip(found.by_position, buckets, strict=True):
        assert bucket.bits == pytest.approx(sum(losses) / len(losses) / math.log(2), abs=1e-5)


@pytest.mark.parametrize(("length", "context", "stride"), [(200, 24, 10), (90, 7, 3), (31, 24, 24), (20, 50, 20), (1, 1, 1)])
def test_a_model_that_sees_both_sides_has_as_much_before_as_after(length: int, context: int, stride: int) -> None:
    """But near the ends of a record."""
    scored, margin = list[int](), (context - stride) // 2
    for first, end, start, stop in _windows(length, context, stride, False):
        assert end - first == min(context, length)
        assert start - first >= margin or first == 0
        assert end - stop >= margin or end == length
        scored += range(start, stop)
    assert scored == list(range(length))


@pytest.mark.parametrize("is_causal", [True, False])
@torch.no_grad()
def test_unknown_bases_are_no_targets_and_hidden_ones_are_not_shown(is_causal: bool) -> None:
    lm = bases(kmer=3, is_causal=is_causal)
    for table in lm.embedding.tables[1:]:  # type: ignore[union-attr, index]
        torch.nn.init.normal_(table.weight, std=0.3)  # type: ignore[arg-type]
    record = tokens(200, 5)
    if is_causal:
        inputs, targets = kmers(record[:-1], 3, False), record[1:].where(record[1:] != 4, -100)
    else:
        hidden = torch.rand(200, generator=torch.Generator().manual_seed(15)) < 0.15
        inputs, targets = kmers(record.where(~hidden, 4), 3, True), record.where((record != 4) & hidden, -100)
    scored = int((targets != -100).sum())
    found = evaluate(lm, [record], context=200)
    assert found.scored == scored < 180 and bool(found.by_position) is is_causal
    assert found.bits * math.log(2) == pytest.approx(float(lm(inputs[None], targets=targets[None])), abs=1e-5)
    for context, stride in ((1, 1), (7, 3), (24, 24), (50, 20)):
        assert evaluate(lm, [record], context=context, stride=stride).scored == scored
    # windows of nothing but N are not read; a part of the windows is one of the others
    n = torch.full((1000,), 4)
    whole = evaluate(lm, [n, torch.cat([n, record, n])], context=40)
    assert whole.scored >= scored - 1 and 8 <= whole.windows <= 12
    assert evaluate(lm, [n, torch.cat([n, record, n])], context=40, num_windows=1).scored > 0
    with pytest.raises(ValueError, match="none of all is scored"):
        evaluate(lm, [n], context=40)


def test_a_part_of_the_windows_is_spread_over_the_data() -> None:
    lm = model()
    found = evaluate(lm, [tokens(400)], context=16, num_windows=5)
    assert (found.windows, found.stride, found.scored) == (5, 8, 16 + 4 * 8)
    # of 49 windows of one record and 50 of one target each: the first, one in the middle of the long record, and one after it
    assert evaluate(lm, [tokens(400), *[tokens(2)] * 50], context=16, num_windows=3).scored == 16 + 8 + 1
    assert evaluate(lm, [tokens(40)], num_windows=1000).scored == 39
    # the longest segment, and no more than there is
    assert [evaluate(lm, [tokens(n)]).context for n in (400, 20)] == [24, 20]
    assert evaluate(model("llama"), [tokens(30)]).context == 30


def test_what_cannot_be_evaluated_is_refused() -> None:
    lm = model()
    spoilt = model()
    with torch.no_grad():
        spoilt.embedding.weight[0] = torch.nan  # type: ignore[index, operator]
    for which, records, options, text in (
        (lm, [tokens(40)], {"context": 8, "stride": 9}, "stride is 9; expected at most context = 8"),
        *((lm, [tokens(40)], {name: 0}, f"{name} is 0") for name in ("context", "stride", "num_windows")),
        *((lm, few, {}, "and none of all is scored") for few in ([], [tokens(1)])),
        (model(is_causal=False), [tokens(40)], {}, r"is_causal is False and vocab_size is 256; .* only bases"),
        (spoilt, [tokens(40)], {}, "the loss is nan"),
        (lm, [tokens(40)[None]], {}, r"records\[0\] has shape \(1, 40\)"),
        (lm, [tokens(40).float()], {}, r"records\[0\] has dtype torch.float32"),
    ):
        with pytest.raises((ValueError, TypeError), match=text):
            evaluate(which, records, **options)
