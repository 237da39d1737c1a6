"""What is not finite stays in its reach, in both passes; and how far finite inputs give finite results.

The reference is the definition in float64. A pair takes part where its multiplicity is above 0, so NaN and infinity reach

    out and lse of a row from its own q and from every k and v that it reads (from v: out alone, in that channel alone),
    dq of a row also from its dout and dlse, and dk and dv of a key from every row that reads it and has anything of those.

Everywhere else the results are those of the same call with zeros in their place and without the gradients of the rows they reach.
"""

import math
import random
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from dilated_attention import attention, dilated_attention
from dilated_attention.pattern import BlockPattern
from dilated_attention.testing import (
    RESULTS,
    Case,
    Inputs,
    Result,
    Space,
    call,
    inputs,
    max_error,
    plain_attention,
    random_case,
    relative_bound,
    results,
)
from dilated_attention.testing.oracle import block_multiplicities, multiplicities
from tests.helpers import ring_cases
from tests.helpers.forms import cpu_backends, static
from tests.helpers.pool import pool_of

BACKENDS = cpu_backends()
VALUES = (math.nan, math.nan, math.inf, -math.inf)
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5}
PLANTED = ("q", "k", "v", "dout", "dlse")
SPACE = Space(max_length=40, head_dims=(1, 3, 8))


@dataclass(frozen=True)
class Reach:
    """Where a planted number may be seen, in the shapes of the results; ``sure`` where NaN must be."""

    may: dict[str, torch.Tensor]
    sure: dict[str, torch.Tensor]


def plant(x: Inputs, draw: random.Random, names: tuple[str, ...] = PLANTED, values: tuple[float, ...] = VALUES) -> tuple[Inputs, Inputs]:
    """(x with one to three numbers that are not finite, or rows or tails of them, x with zeros in their place)."""
    dirty = {name: getattr(x, name).clone() for name in PLANTED}
    for _ in range(draw.randint(1, 3)):
        name, value = draw.choice(names), draw.choice(values)
        y = dirty[name]
        if not y.numel() or (name == "dlse" and not x.dlse.any()):
            continue
        at: list[Any] = [draw.randrange(size) for size in y.shape]
        length = 1 if name != "dlse" else 2
        kind = draw.choice(["element", "row", "heads", "rest"])
        if name != "dlse" and kind != "element":
            at[3] = slice(None)
            if kind != "row":
                at[2] = slice(None)
        if kind == "rest":
            at[length] = slice(at[length], None)
        y[tuple(at)] = value
    clean = {name: y.masked_fill(~y.isfinite(), 0) for name, y in dirty.items()}
    return replace(x, **dirty), replace(x, **clean)


def reach(case: Case, x: Inputs) -> Reach:
    """``x`` with the planted numbers."""
    m, H, K = multiplicities(case, x.key_padding_mask)[0].sum(0), case.heads, case.kv_heads
    if isinstance(case.pattern, BlockPattern):
        m = m + block_multiplicities(case, x)
    takes = (m > 0).expand(case.batch, -1, -1, -1)
    nonempty = takes.any(-1)

    def all_reached(nonfinite_of: Any) -> dict[str, torch.Tensor]:
        def heads_first(y: torch.Tensor) -> torch.Tensor:
            return nonfinite_of(y).any(-1).transpose(1, 2)

        q, k, dout = heads_first(x.q), heads_first(x.k).repeat_interleave(H // K, 1), heads_first(x.dout)
        v = nonfinite_of(x.v).repeat_interleave(H // K, 2).permute(0, 2, 1, 3)
        scores = (q & nonempty) | (takes & k[:, :, None]).any(-1)
        from_v = (takes.double() @ v.double()) > 0
        rows = (scores | from_v.any(-1) | dout | nonfinite_of(x.dlse)) & nonempty
        keys = (takes & rows[..., None]).any(2)
        keys = keys.unflatten(1, (K, H // K)).any(2).transpose(1, 2)[..., None].expand(x.k.shape)
        out = (scores[..., None] | from_v).transpose(1, 2)
        return {"out": out, "lse": scores, "dq": rows.transpose(1, 2)[..., None].expand(x.q.shape), "dk": keys, "dv": keys}

    return Reach(all_reached(lambda y: ~y.isfinite()), all_reached(torch.isnan))


def judge(
    found: dict[str, torch.Tensor],
    truth: dict[str, torch.Tensor],
    reached: Reach,
    tolerance: float,
    dropout_p: float = 0.0,
    detached: bool = False,
) -> None:
    for name in RESULTS:
        may, sure = reached.may[name], reached.sure[name]
        inside, expected = found[name].masked_fill(may, 0), truth[name].masked_fill(may, 0)
        assert max_error(inside, expected) <= relative_bound(expected, tolerance, dropout_p), name
        # dv needs no values, so a NaN among them leaves it finite; detached, dk needs those of its own branch
        if name != "dv" and not (detached and name == "dk"):
            assert bool(found[name][sure].isnan().all()), name


def truth_of(case: Case, dirty: Inputs, clean: Inputs, reached: Reach) -> dict[str, torch.Tensor]:
    """Of the rows that nothing planted reaches; the others' gradients are left out."""
    spoilt = reached.may["dq"][..., 0]
    dout = clean.dout.masked_fill(spoilt[..., None], 0)
    dlse = clean.dlse.masked_fill(spoilt.transpose(1, 2), 0)
    return results(plain_attention, case, replace(clean, dout=dout, dlse=dlse), torch.float64)


SPACES = {"branches": SPACE, "blocks": replace(SPACE, blocks=True, max_length=200)}
SEEDS = [*(("branches", seed) for seed in (*range(60), 1061, 2021)), *(("blocks", seed) for seed in (*range(24), 45, 61))]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("space", "seed"), SEEDS)
def test_planted_numbers_stay_in_their_reach(space: str, seed: int, backend: str) -> None:
    draw, dtype = random.Random(seed), (torch.float64, torch.float32)[seed % 2]
    # blocks that content chooses are others where it is not finite
    case = static(random_case(draw, replace(SPACES[space], dropout=backend == "math")))
    dirty, clean = plant(inputs(case, dtype), draw)
    reached = reach(case, dirty)
    found = results(call, case, dirty, backend=backend)
    judge(found, truth_of(case, dirty, clean, reached), reached, TOLERANCES[dtype], case.dropout_p, case.mixture_grad == "detached")


# --- rings, own kernels --------------------------------------------------------------------------------------------------------------


def planted_in_a_ring(seed: int, world: int) -> tuple[ring_cases.Spread, Inputs, Inputs]:
    spread = ring_cases.draw(world, seed)
    return spread, *plant(inputs(spread.case, torch.float64), random.Random(seed))


def run_planted(rank: int, world: int, seeds: list[int]) -> list[Result]:
    """This rank's results."""
    found = []
    for seed in seeds:
        spread, dirty, _ = planted_in_a_ring(seed, world)
        rows = ring_cases.positions(spread.case.num_keys, rank, world, spread.layout)
        found.append(results(ring_cases.ring_call(spread), spread.case, ring_cases.local_inputs(dirty, rows, spread.memory)))
    return found


@pytest.mark.parametrize("first", range(0, 40, 20))
def test_planted_numbers_stay_in_their_reach_of_rings(first: int) -> None:
    world, seeds = 2, list(range(first, first + 20))
    ranks = pool_of(world).run(run_planted, seeds)
    for index, seed in enumerate(seeds):
        spread, dirty, clean = planted_in_a_ring(seed, world)
        case = spread.case
        reached = reach(case, dirty)
        found = ring_cases.together(spread, [rank[index] for rank in ranks])
        judge(found, truth_of(case, dirty, clean, reached), reached, 1e-10, case.dropout_p, case.mixture_grad == "detached")


# --- finite inputs -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_float32_holds_is_right(backend: str, is_causal: bool, dtype: torch.dtype) -> None:
    """Sums of values, q · k before the scale and q · scale before k may be larger than float32 holds; scores and results are not."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 5, 1, 8).to(dtype) for _ in range(3))
    for x, scale in (
        ((q, k, torch.full_like(v, 3.3e38)), None),
        ((q * 1e20, k * 1e20, v), 1e-39 * 12),
        ((q, k * 1e-37, v), 1e38),
        ((q.abs(), -k.abs() * 1e32, v), 1e4),
    ):
        leaves = [y.detach().requires_grad_() for y in x]
        options: dict[str, Any] = {"is_causal": is_causal, "scale": scale, "return_lse": True}
        out, lse = dilated_attention(*leaves, [2, 5], [1, 1], backend=backend, **options)
        truth, truth_lse = dilated_attention(*(y.double() for y in x), [2, 5], [1, 1], backend="math", **options)
        torch.testing.assert_close(out.double(), truth, rtol=1e-2, atol=0.05)
        torch.testing.assert_close(lse.double(), truth_lse, rtol=1e-2, atol=1e-3)
        # of values near the largest number only small gradients are finite
        grads = torch.autograd.grad(out.float().mean() * (1e-38 if scale is None else 1e-3), leaves)
        assert all(bool(grad.isfinite().all()) for grad in grads)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sign", [1, -1])
def test_a_row_whose_scores_float32_does_not_hold_is_nan(sign: int, backend: str) -> None:
    """Never 0 with an lse of 0 or −inf, as if it had no key; and the rows beside it are what they are."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 6, 1, 8).abs() for _ in range(3))
    large = q.clone()
    large[:, 3] = 1e20
    k *= sign * 1e20
    out, lse = attention(large, k, v, backend=backend, return_lse=True)
    others = torch.arange(6) != 3
    assert bool(out[:, 3].isnan().all()) and bool(lse[..., 3].isnan().all())
    before, before_lse = attention(q, k, v, backend=backend, return_lse=True)
    assert torch.equal(out[:, others], before[:, others]) and torch.equal(lse[..., others], before_lse[..., others])
