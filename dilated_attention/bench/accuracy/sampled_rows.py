"""Checks sampled rows of a long result against float64: out, lse, and gradients, with memory for a few thousand keys at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from dilated_attention.bench.accuracy.correctness import Pattern, keys_of
from dilated_attention.bench.workloads.problem import Problem

# keys at a time: 2^16 rows of 128 in float64 take 64 MiB
_PIECE = 2**16


def sampled_errors(
    pattern: Pattern,
    problem: Problem,
    inputs: Sequence[torch.Tensor],
    results: Sequence[torch.Tensor],
    *,
    count: int = 12,
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
    truth: dict[str, list[torch.Tensor]] = {name: [] for name in ("out", "dq", "dk", "dv")}
    found: dict[str, list[torch.Tensor]] = {name: [] for name in truth}
    largest = 0.0
    for i, h in _places(pattern, problem, count):
        q_i = q[i, h].double()
        true_out, true_lse = _row(q_i * scale, k, v, _pieces(keys_of(pattern, problem, i, h)), h)
        truth["out"].append(true_out)
        found["out"].append(out[i, h])
        largest = max(largest, _distance(float(lse[h, i]), true_lse))
        if not grads:
            continue
        dout = douts[0]
        delta = dout[i, h].double() @ true_out
        dq = torch.zeros_like(true_out)
        for keys in _pieces(keys_of(pattern, problem, i, h)):
            k_j, v_j = k[keys, h].double(), v[keys, h].double()
            p = (k_j @ q_i * scale - true_lse).exp()
            dq += (p * (v_j @ dout[i, h].double() - delta)) @ k_j * scale
        dk, dv = torch.zeros_like(dq), torch.zeros_like(dq)
        k_i, v_i = k[i, h].double(), v[i, h].double()
        for queries in _pieces(_queries_of(pattern, problem, i, h)):
            q_j, dout_j, out_j = (x[queries, h].double() for x in (q, dout, out))
            p = (q_j @ k_i * scale - lse[h, queries].double()).exp()
            dk += (p * (dout_j @ v_i - (dout_j * out_j).sum(-1))) @ q_j * scale
            dv += p @ dout_j
        for name, grad, true in zip(("dq", "dk", "dv"), grads, (dq, dk, dv), strict=True):
            truth[name].append(true)
            found[name].append(grad[i, h])
    errors = {name: _relative(torch.stack(found[name]), torch.stack(rows)) for name, rows in truth.items() if rows}
    return errors | {"lse": largest}


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


def _row(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pieces: Iterator[torch.Tensor], head: int) -> tuple[torch.Tensor, float]:
    """Returns (out, lse) of one row, summed over pieces of its keys; 0 and −inf without keys."""
    high, total, out = -torch.inf, 0.0, torch.zeros_like(q)
    for keys in pieces:
        scores = k[keys, head].double() @ q
        top = max(high, float(scores.max()))
        weights = (scores - top).exp()
        shrink = float(torch.tensor(high - top, dtype=torch.float64).exp())
        total = total * shrink + float(weights.sum())
        out = out * shrink + weights @ v[keys, head].double()
        high = top
    if total == 0:
        return out, -torch.inf
    return out / total, high + float(torch.tensor(total, dtype=torch.float64).log())


def _pieces(positions: torch.Tensor) -> Iterator[torch.Tensor]:
    return iter(positions.split(_PIECE)) if len(positions) else iter(())


def _distance(found: float, true: float) -> float:
    return 0.0 if found == true else abs(found - true)


def _relative(found: torch.Tensor, true: torch.Tensor) -> float:
    norm = float(true.norm())
    return float((found.double() - true).norm()) / norm if norm else float(found.abs().max())
