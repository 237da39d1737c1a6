"""Checks sampled rows of an extremely long result against float64: a few thousand keys at a time, by lists of each row's keys."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from dilated_attention.bench.accuracy.correctness import Pattern, keys_of, relative
from dilated_attention.bench.workloads.problem import Problem

# keys at a time: 2^16 rows of 128 in float64 take 64 MiB
_PIECE = 2**16


def sampled_errors(
    pattern: Pattern, problem: Problem, inputs: Sequence[torch.Tensor], results: Sequence[torch.Tensor], *, count: int = 12
) -> dict[str, float]:
    """Returns the relative errors of out, dq, dk and dv over ``count`` rows of the first sequence, and the largest absolute error of lse.

    Args:
        pattern: must let j see i where i sees j, except for causality.
        inputs: q, k, v and, with gradients, dout (B, N, H, D); with equal numbers of key/value and query heads.
        results: out, lse (B, H, N) and, with gradients, dq, dk, dv. dk and dv of a key are computed from the given out and lse of all rows
            that see it; those are checked in the sampled rows.
    """
    assert problem.kv_heads == problem.num_heads
    q, k, v, *douts = (x.detach()[0] for x in inputs)
    out, lse, *grads = (x.detach()[0] for x in results)
    scale = problem.head_dim**-0.5
    found: list[list[torch.Tensor]] = []
    largest = 0.0
    for i, h in _places(pattern, problem, count):
        q_i = q[i, h].double()
        keys = keys_of(pattern, problem, i, h)
        true_lse = torch.stack([(k[part, h].double() @ q_i * scale).logsumexp(0) for part in _pieces(keys)]).logsumexp(0)
        true = [torch.zeros_like(q_i) for _ in range(1 + len(grads))]
        for part in _pieces(keys):
            true[0] += (k[part, h].double() @ q_i * scale - true_lse).exp() @ v[part, h].double()
        largest = max(largest, 0.0 if lse[h, i] == true_lse else abs(float(lse[h, i] - true_lse)))
        if grads:
            dout = douts[0]
            d_i = dout[i, h].double()
            for part in _pieces(keys):
                k_j, v_j = k[part, h].double(), v[part, h].double()
                true[1] += ((k_j @ q_i * scale - true_lse).exp() * (v_j @ d_i - d_i @ true[0])) @ k_j * scale
            k_i, v_i = k[i, h].double(), v[i, h].double()
            for part in _pieces(_queries_of(pattern, problem, i, h)):
                q_j, dout_j, out_j = (x[part, h].double() for x in (q, dout, out))
                p = (q_j @ k_i * scale - lse[h, part].double()).exp()
                true[2] += (p * (dout_j @ v_i - (dout_j * out_j).sum(-1))) @ q_j * scale
                true[3] += p @ dout_j
        found.append([*true, *(x[i, h] for x in (out, *grads))])
    columns = [torch.stack([x.double() for x in column]) for column in zip(*found, strict=True)]
    half = len(columns) // 2
    return {name: relative(columns[half + i], columns[i]) for i, name in enumerate(("out", "dq", "dk", "dv")[:half])} | {"lse": largest}


def _places(pattern: Pattern, problem: Problem, count: int) -> list[tuple[int, int]]:
    """Returns (position, head) of rows: the ends, rows that the largest dilation rate takes, and others."""
    generator = torch.Generator().manual_seed(problem.num_positions)
    places = torch.randint(problem.num_positions, (count - 2,), generator=generator).tolist()
    rate = max(getattr(pattern, "dilation_rates", (1,)))
    places[: count // 3] = [place // rate * rate for place in places[: count // 3]]
    return [(place, place % problem.num_heads) for place in (0, problem.num_positions - 1, *places)]


def _queries_of(pattern: Pattern, problem: Problem, position: int, head: int) -> torch.Tensor:
    """Returns the rows that see this key."""
    if not problem.is_causal:
        return keys_of(pattern, problem, position, head)
    # without causality the lists of a pattern differ: they are built on the CPU, which has enough memory
    others = keys_of(pattern, replace(problem, is_causal=False, device=torch.device("cpu")), position, head)
    return others[others >= position].to(problem.device)


def _pieces(positions: torch.Tensor) -> Iterator[torch.Tensor]:
    return iter(positions.split(_PIECE)) if len(positions) else iter((positions,))
