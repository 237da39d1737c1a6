"""The kernels that copy the rows of an exchange, interpreted, do what torch's operations do."""

import random

import pytest
import torch

from dilated_attention.distributed.exchange import copies_triton, plan
from dilated_attention.distributed.exchange import run as copies_torch
from dilated_attention.distributed.exchange.plan import RingProblem, Step, key_span, make_step
from dilated_attention.pattern import DilatedPattern

CPU = torch.device("cpu")


def random_pair(B: int, rows: int, heads: int, D: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V as views of one tensor, whose strides are not those of either."""
    return copies_torch.views_of(torch.randn(rows, heads, B, 2 * D).to(dtype))


def random_step(seed: int) -> tuple[Step, int, int, int, int, torch.dtype]:
    """Returns a step with lines of all heads or of one, of some heads; the rank's rows and heads, B, D and a dtype."""
    rng = random.Random(seed)
    N, H, Hk, B, D = 48, 4, rng.choice((1, 2, 4)), rng.randint(1, 2), rng.choice((8, 12))
    offsets = "blocked" if seed % 2 else None
    pattern = DilatedPattern((12, 48), (1, 3), **({} if offsets is None else {"head_offsets": offsets}))
    shards = (((0, 6), (42, 48)), ((6, 42),)) if rng.random() < 0.5 else (((0, 20),), ((20, 29),), ((29, 48),))
    problem, rank = RingProblem(pattern, ((0, N),), shards, H, Hk, rng.random() < 0.5), rng.randrange(len(shards))
    heads = (0, Hk) if rng.random() < 0.5 else (Hk - 1, Hk)
    span, rows = key_span(problem, rank), sum(end - start for start, end in shards[rank])
    step = make_step(problem, rank, heads, span, "", CPU)
    return step, rows, Hk, B, D, rng.choice((torch.float32, torch.bfloat16))


@pytest.mark.parametrize("seed", range(8))
def test_kernels_copy_as_torch_does(seed: int) -> None:
    torch.manual_seed(seed)
    step, rows, Hk, B, D, dtype = random_step(seed)
    own = random_pair(B, rows, Hk, D, dtype)
    own = step.of_heads(own[0]), step.of_heads(own[1])
    width, views = step.width * B * 2 * D, copies_torch.views_of

    sent = [torch.full((len(step.send.numbers), step.width, B, 2 * D), torch.nan, dtype=dtype) for _ in range(2)]
    memory = [torch.full((step.rows, step.num_kv_heads, B, 2 * D), torch.nan, dtype=dtype) for _ in range(2)]
    came, returned = torch.randn(len(step.place.numbers), width).to(dtype), torch.randn(len(step.send.numbers), width).to(dtype)
    grads = random_pair(B, step.rows, step.num_kv_heads, D, torch.float32)
    # sums that are added to other shares are not rounded
    sums = [random_pair(B, rows, Hk, D, torch.float32 if seed % 3 == 0 else dtype) for _ in range(2)]
    back = [torch.full((len(step.place.numbers), step.width, B, 2 * D), torch.nan, dtype=dtype) for _ in range(2)]
    for copies, *to in zip((copies_torch, copies_triton), sent, memory, sums, back, strict=True):
        copies.copy(views(to[0]), own, step.send.numbers, step)
        copies.copy(views(to[1]), own, step.sources, step, (came, step.sources[None]))
        copies.copy((step.of_heads(to[2][0]), step.of_heads(to[2][1])), grads, step.own_places, step, (returned, step.returned))
        copies.copy(views(to[3]), grads, step.place.numbers, step)
    for one, other in (sent, memory):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    for one, other in (back, *([step.of_heads(x) for x in both] for both in zip(*sums, strict=True))):
        # the interpreter cuts off what a GPU rounds
        torch.testing.assert_close(one, other, rtol=2**-7 if dtype is torch.bfloat16 else 1e-6, atol=1e-6)
    # what came is in the memory, line by line, and what nobody needs is zero
    lines = memory[0].view(-1, width)
    torch.testing.assert_close(lines[step.place.numbers], came, rtol=0, atol=0)
    assert not lines[step.sources == -1].any()


@pytest.mark.parametrize("seed", range(3))
def test_what_compiles_ahead_is_what_the_copies_launch(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches are remembered by all that they depend on: those of the calls on meta tensors serve the copies."""
    step, rows, Hk, B, D, dtype = random_step(seed)
    k, v = random_pair(B, rows, Hk, D, dtype)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    copies_torch.compile_copies(step, k, v, dtype)
    launches, own, views = set(step.made), (step.of_heads(k), step.of_heads(v)), copies_torch.views_of
    sent, came = (torch.zeros(count, step.width, B, 2 * D, dtype=dtype) for count in (len(step.send.numbers), len(step.place.numbers)))
    copies_triton.copy(views(sent), own, step.send.numbers, step)
    memory = torch.zeros(step.rows, step.num_kv_heads, B, 2 * D, dtype=dtype)
    copies_triton.copy(views(memory), own, step.sources, step, (came.flatten(1), step.sources[None]))
    grads, to = torch.zeros(B, step.rows, step.num_kv_heads, D, dtype=dtype), step.of_heads(torch.zeros(k.shape, dtype=dtype))
    copies_triton.copy((to, to), (grads, grads), step.own_places, step, (sent.flatten(1), step.returned))
    copies_triton.copy(views(came), (grads, grads), step.place.numbers, step)
    assert set(step.made) == launches != set()


@pytest.mark.parametrize("seed", range(8))
def test_few_lines_are_numbered_as_many_are(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    one = random_step(seed)[0]
    monkeypatch.setattr(plan, "_FEW_LINES", 0)
    other = random_step(seed)[0]
    assert torch.equal(one.sources, other.sources) and torch.equal(one.send.numbers, other.send.numbers)
    assert torch.equal(one.place.numbers, other.place.numbers) and one.send.numbers.dtype is torch.int64


def test_heads_that_need_the_same_rows_share_what_is_needed() -> None:
    alike, cyclic = (
        RingProblem(DilatedPattern((48,), (2,), offsets), ((0, 48),), (((0, 24),), ((24, 48),)), 4, 2, False)
        for offsets in ("zero", "cyclic")
    )
    assert alike.same_rows and alike.needed(0, (0, 1)) is alike.needed(0, (1, 2)) is alike.needed(0)
    assert not cyclic.same_rows and cyclic.needed(0, (0, 1)) is not cyclic.needed(0)
