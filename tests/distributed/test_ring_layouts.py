"""Attention of sequences spread by a ``Layout``, whose runs begin and end anywhere, against one process, in float64, to 1e-10."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dilated_attention import (
    DilatedPattern,
    RingDilatedAttention,
    RingMultiheadDilatedAttention,
    attention,
    balanced_layout,
    ring_attention,
    shard_sequence,
)
from dilated_attention.distributed import Layout, explain_exchange
from dilated_attention.models import LongNetConfig, LongNetLM, average_gradients
from dilated_attention.modules import set_layout
from tests.distributed.test_ring import check
from tests.helpers.pool import here, patience, pool_of
from tests.helpers.ring_cases import WHOLE, Spread, draw, with_changes
from tests.helpers.ring_chosen import spread_of

WORLDS = (1, 2, 3, 5)


def random_layout(seq_len: int, world: int, seed: int) -> Layout:
    """Runs of random lengths, dealt at random: neighbours may go to one rank, and a rank may get none."""
    rng = random.Random(seed)
    cuts = sorted({0, seq_len, *(rng.randint(0, seq_len) for _ in range(rng.randint(0, 4 * world)))})
    runs: list[list[tuple[int, int]]] = [[] for _ in range(world)]
    for start, end in itertools.pairwise(cuts):
        runs[rng.randrange(world)].append((start, end))
    return Layout(seq_len, tuple(tuple(mine) for mine in runs))


def with_layout(spread: Spread, world: int, seed: int) -> Spread:
    return with_changes(spread, layout=random_layout(spread.case.num_keys, world, seed).name)


@pytest.mark.parametrize("world", WORLDS)
def test_random_calls(world: int) -> None:
    check(world, [with_layout(draw(world, seed), world, seed) for seed in range(1000, 1030)])


DOCUMENTS = (0, 3, 3, 40, 41, 96)
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"is_causal": True},
    {"is_causal": True, "bounds": DOCUMENTS, "batch": 1},
    {"bounds": DOCUMENTS, "batch": 1, "steps": True},
    {"is_causal": True, "padding": "some", "heads": 8, "kv_heads": 1},
    {"is_causal": True, "dropout_p": 0.4, "bounds": DOCUMENTS, "batch": 1},
)


@pytest.mark.parametrize("world", [2, 3])
def test_every_option(world: int) -> None:
    patterns = (
        WHOLE,
        DilatedPattern((16, 48, 96), (1, 2, 4)),
        DilatedPattern((31, 70), (3, 5), "blocked", tail="zero_keys"),
        DilatedPattern((24, 96), (1, 2), branch_heads="split"),
    )
    # one world has every pair with one exchange, the next one with the other
    spreads = [
        with_layout(spread_of(pattern, 96, exchange=("all_gather", "ring")[(row + index + world) % 2], **options), world, index)
        for row, pattern in enumerate(patterns)
        for index, options in enumerate(OPTIONS)
    ]
    windows = [
        with_layout(spread_of(WHOLE, 96, window=window, exchange="all_gather", **options), world, 50 + index)
        for row, window in enumerate(((9, 0), (0, 4), (None, 20)))
        for index, options in enumerate(OPTIONS)
        if (row + index + world) % 2
    ]
    heads = [
        with_layout(spread_of(pattern, 96, heads=2 * world, kv_heads=world, exchange="all_to_all", **OPTIONS[2]), world, 90 + index)
        for index, pattern in enumerate(patterns[:3])
    ]
    check(world, [*spreads, *windows, *heads])


@pytest.mark.parametrize("world", [2, 3])
def test_balanced_layouts(world: int) -> None:
    """One layout for dense and dilated layers, of documents of which some are cut and short ones are not."""
    bounds = (0, 5, 9, 70, 71, 80, 120, 128)
    patterns = (WHOLE, DilatedPattern((16, 64), (1, 4)))
    spreads = []
    for is_causal in (False, True):
        layout = balanced_layout([None, patterns[1]], 128, world, 4, is_causal=is_causal, cu_seqlens=bounds).name
        spreads += [
            spread_of(pattern, 128, bounds=bounds, batch=1, is_causal=is_causal, exchange=exchange, layout=layout)
            for pattern in patterns
            for exchange in ("auto", "ring")
        ]
    check(world, spreads)


CONFIG = LongNetConfig(
    vocab_size=20, embed_dim=16, num_layers=2, num_heads=4, segment_lengths=(8, 32), dilation_rates=(1, 4), drop_path=0.0, is_causal=True
)


def packed(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, targets and boundaries of 64 positions."""
    generator = torch.Generator().manual_seed(seed)
    bounds = [0, *sorted(torch.randint(1, 64, (5,), generator=generator).tolist()), 64]
    tokens = torch.randint(20, (1, 65), generator=generator).to(here())
    return tokens[:, :-1], tokens[:, 1:], torch.tensor(bounds, dtype=torch.int32).to(here())


def language_model(**spread: Any) -> LongNetLM:
    torch.manual_seed(0)
    return LongNetLM(CONFIG, dtype=torch.float64, **spread).to(here())


def packed_steps(rank: int, world: int, checkpoint: bool) -> list[float]:
    """Errors of the loss and of all gradients of a model that gets another layout for each batch."""
    alone, spread = language_model(), language_model(group=dist.group.WORLD, checkpoint_activations=checkpoint, timeout=patience())
    errors = []
    for seed in range(3):
        tokens, targets, bounds = packed(seed)
        expected = alone(tokens, targets=targets, cu_seqlens=bounds)
        layout = balanced_layout(CONFIG.pattern, 64, world, 4, is_causal=True, cu_seqlens=bounds.cpu())
        set_layout(spread, layout)
        mine = shard_sequence(None, [tokens, targets], [1, 1], layout=layout)
        loss = spread(mine[0], targets=mine[1], cu_seqlens=bounds, seq_len=64 if seed else None)
        errors.append(float((loss - expected).abs()))
        expected.backward()
        loss.backward()
        average_gradients(spread)
        pairs = zip(alone.parameters(), spread.parameters(), strict=True)
        errors += [float((a.grad - b.grad).abs().max()) for a, b in pairs if a.grad is not None and b.grad is not None]
        for model in (alone, spread):
            model.zero_grad()
    return errors


@pytest.mark.parametrize("checkpoint", [False, True])
def test_a_model_gets_another_layout_for_each_batch(checkpoint: bool) -> None:
    for errors in pool_of(3).run(packed_steps, checkpoint):
        # the loss is float32
        assert len(errors) > 20 and max(errors) < 1e-6


def errors_of_key_gradients(rank: int, world: int, runs: int) -> list[float]:
    """Of dk and dv in bfloat16, relative to float64 in one process; each rank has so many runs of the sequence."""
    n = 1024
    size = n // (world * runs)
    layout = Layout(n, tuple(tuple((i * size, i * size + size) for i in range(r, world * runs, world)) for r in range(world)))
    mine = torch.cat([torch.arange(*run) for run in layout.runs[rank]])
    rng = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(1, n, 2, 16, generator=rng).to(torch.bfloat16) * scale for scale in (0.1, 0.1, 1, 1))
    leaves = [x[:, mine].requires_grad_() for x in (q, k, v)]
    out = ring_attention(*leaves, seq_len=n, layout=layout, exchange="all_gather")
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    expected = torch.autograd.grad(attention(*exact), exact, dout.double())
    found = torch.autograd.grad(out, leaves, dout[:, mine])
    return [float((a - b[:, mine]).norm() / b[:, mine].norm()) for a, b in zip(found[1:], expected[1:], strict=True)]


def test_sums_over_many_runs_are_not_rounded_at_each_of_them() -> None:
    of_one, of_many = (max(map(max, pool_of(2).run(errors_of_key_gradients, runs))) for runs in (1, 32))
    assert of_many < 1.2 * of_one < 0.01


def test_modules_show_a_layout_in_short_and_refuse_what_is_none() -> None:
    layout = Layout(64, (((0, 16), (16, 64)),))
    layer = RingDilatedAttention([8, 32], [1, 4], layout=layout)
    assert layer.ring.layout == layout.name and "layout='runs:64:0-16,16-64'" in repr(layer)
    many = Layout(64, (tuple((i, i + 1) for i in range(0, 64, 2)), tuple((i, i + 1) for i in range(1, 64, 2))))
    set_layout(layer, many)
    assert "… (64 runs, hash" in repr(layer)
    x = torch.zeros(1, 64, 2, 8)
    with pytest.raises(ValueError, match="layout is for 64 positions on 2 processes, the sequence has 64 on 1; make one for them"):
        layer(x, x, x)
    with pytest.raises(ValueError, match="layout is for 64 positions on 1 processes, the sequence has 63 on 1"):
        RingDilatedAttention([8, 32], [1, 4], layout=layout)(x[:, 1:], x[:, 1:], x[:, 1:], seq_len=63)
    with pytest.raises(TypeError, match=r"layout is 'zigzag' \(str\); expected a Layout"):
        set_layout(layer, "zigzag")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"module is a Linear without a ring.*pass group= or mesh="):
        set_layout(torch.nn.Linear(2, 2), layout)
    multihead = RingMultiheadDilatedAttention(16, 2, [8, 32], [1, 4], rotary=True, layout=layout)
    y = torch.randn(1, 64, 16)
    again = RingMultiheadDilatedAttention(16, 2, [8, 32], [1, 4], rotary=True)
    again.load_state_dict(multihead.state_dict())
    assert torch.equal(multihead(y, seq_len=64)[0], again(y, seq_len=64)[0])


def test_the_cost_model_takes_a_layout_to_be_balanced() -> None:
    sizes: dict[str, Any] = {"num_heads": 8, "is_causal": True}
    table = explain_exchange(4096, 2, layout=random_layout(4096, 2, 1), **sizes)
    assert table == explain_exchange(4096, 2, layout="zigzag", **sizes)
    with pytest.raises(ValueError, match="layout is 'diagonal'"):
        explain_exchange(4096, 2, layout="diagonal", **sizes)
