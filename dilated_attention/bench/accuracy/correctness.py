"""Correctness checks: compares results with softmax attention in float64, on all rows if there are few, otherwise on sampled rows.

A relative error is ‖found − true‖ / ‖true‖ over the rows examined. Anything that exceeds its bound gets no speed figure.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from dilated_attention.bench.workloads.problem import Problem
from dilated_attention.engine.blocks.lists import block_lists
from dilated_attention.engine.reference_rows import partners
from dilated_attention.pattern import BlockPattern, DilatedPattern

Pattern = DilatedPattern | BlockPattern
Attend = Callable[..., torch.Tensor]

# several times the ‖found − true‖ / ‖true‖ that rounding explains; float32 products may be TF32 on a GPU
BOUNDS = {torch.float64: 1e-10, torch.float32: 2e-3, torch.float16: 6e-3, torch.bfloat16: 2e-2}
FP8_BOUND = 0.15
# positions up to which every row and every gradient is compared
WHOLE = 512
RESULTS = ("out", "dq", "dk", "dv")


def wrong(errors: dict[str, float], bound: float) -> str:
    """Returns a note that names what exceeds ``bound``, NaN included; empty if nothing does."""
    beyond = {name: error for name, error in errors.items() if not error <= bound}
    return f"wrong: {', '.join(f'{name} off by {error:.1e}' for name, error in beyond.items())}, allowed {bound:.0e}" if beyond else ""


def whole_errors(attend: Attend, pattern: Pattern, problem: Problem, *, gradients: bool = True) -> dict[str, float]:
    """Returns errors of out and, with ``gradients``, of dq, dk, dv over all rows of ``problem``. It takes N² memory, so N must be small."""
    leaves = problem.qkv(7)
    dout = problem.draw(problem.num_heads, 101)
    with torch.set_grad_enabled(gradients):
        out = attend(*leaves)
    found = [out.detach(), *(torch.autograd.grad(out, leaves, dout) if gradients else ())]
    true = true_results(pattern, problem, leaves, dout, gradients=gradients)
    return {name: relative(a, b) for name, a, b in zip(RESULTS, found, true, strict=False)}


def true_results(
    pattern: Pattern, problem: Problem, leaves: list[torch.Tensor], dout: torch.Tensor, *, gradients: bool = True
) -> list[torch.Tensor]:
    """Returns [out] or, with ``gradients``, [out, dq, dk, dv] of ``leaves`` q, k, v in float64."""
    exact = [x.detach().double().requires_grad_() for x in leaves]
    out = _exact(exact[0], exact[1], exact[2], _log_multiplicity(pattern, problem))
    return [out.detach(), *(torch.autograd.grad(out, exact, dout.double()) if gradients else ())]


def _exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, log_m: torch.Tensor) -> torch.Tensor:
    """Returns softmax(q kᵀ / √D + log m) v in the inputs' dtype; rows without keys are 0."""
    repeats = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(repeats, 2) for x in (k, v))
    empty = torch.isneginf(log_m).all(-1, keepdim=True)
    # the gradient of a softmax over no keys is NaN, which a later multiplication by zero does not remove
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5 + log_m.masked_fill(empty, 0.0)
    weights = scores.softmax(-1).masked_fill(empty, 0.0)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v)


def _log_multiplicity(pattern: Pattern, problem: Problem) -> torch.Tensor:
    n = problem.num_positions
    m = pattern.dense_mask(n, n, problem.num_heads).to(problem.device, torch.float64)
    if problem.is_causal:
        m = m.tril()
    return m.log()


def sampled_error(
    pattern: Pattern,
    problem: Problem,
    leaves: list[torch.Tensor],
    out: torch.Tensor,
    *,
    count: int = 24,
    held: torch.Tensor | None = None,
) -> float:
    """Returns the error of ``out`` in ``count`` rows sampled over batch, positions and heads, including the first and the last position.

    Args:
        leaves: q, k and v of the whole sequence.
        out: (B, n, H, D).
        held: (n,) positions of out's rows; None for all.
    """
    generator = torch.Generator().manual_seed(problem.num_positions)

    def draw(high: int, how_many: int = count) -> list[int]:
        return torch.randint(high, (how_many,), generator=generator).tolist()

    rows = [0, out.shape[1] - 1, *draw(out.shape[1], count - 2)]
    q, k, v = (x.detach() for x in leaves)
    difference = norm = 0.0
    for b, row, h in zip(draw(problem.batch_size), rows, draw(problem.num_heads), strict=True):
        i = row if held is None else int(held[row])
        keys = keys_of(pattern, problem, i, h)
        kv = h * problem.kv_heads // problem.num_heads
        scores = k[b, keys, kv].double() @ q[b, i, h].double() * problem.head_dim**-0.5
        true = scores.softmax(0) @ v[b, keys, kv].double()
        difference += float((out[b, row, h].detach().double() - true).square().sum())
        norm += float(true.square().sum())
    return (difference / norm) ** 0.5 if norm else float(difference > 0)


def keys_of(pattern: Pattern, problem: Problem, position: int, head: int) -> torch.Tensor:
    """Returns the positions that (position, head) attends to, with multiplicity, on the problem's device."""
    if isinstance(pattern, DilatedPattern):
        keys = partners(pattern, position, head, problem.num_heads, problem.num_positions)
        return (keys[keys <= position] if problem.is_causal else keys).to(problem.device)
    lists = block_lists(pattern, problem.num_positions, problem.num_heads, is_causal=problem.is_causal, device=problem.device)
    row = (head if lists.num_heads > 1 else 0) * lists.num_rows + position // lists.q_block
    first, last = lists.row_starts[row : row + 2].tolist()
    columns = lists.columns[first:last].long()
    keys = columns[:, None] * lists.k_block + torch.arange(lists.k_block, device=problem.device)
    kept = keys < problem.num_positions
    if lists.masks is not None:
        assert lists.bits is not None
        numbers = lists.masks[first:last]
        words = lists.bits[numbers.clamp(min=0).long(), position % lists.q_block]
        bits = ((words[..., None] >> torch.arange(32, device=problem.device)) & 1).flatten(-2).bool()
        kept &= bits | (numbers < 0)[:, None]
    return keys[kept]


def relative(found: torch.Tensor, true: torch.Tensor) -> float:
    return float((found.double() - true).norm() / true.norm().clamp(min=torch.finfo(torch.float64).tiny))
