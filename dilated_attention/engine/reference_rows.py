"""The reference on a few rows of a sequence of any length, in float64, in O(keys per query) per row instead of O(N²)."""

from __future__ import annotations

import torch
from torch import Tensor

from dilated_attention.pattern import NOT_IN_BRANCH, DilatedPattern


def partners(pattern: DilatedPattern, position: int, head: int, num_heads: int, num_positions: int) -> Tensor:
    """Returns the positions that attend together with ``position``, concatenated over branches, so repeated by their multiplicity."""
    found = [torch.empty(0, dtype=torch.int64)]
    for (length, rate), offsets in zip(pattern.branches, pattern.offsets(num_heads), strict=True):
        start = position // length * length
        if offsets[head] != NOT_IN_BRANCH and (position - start) % rate == offsets[head]:
            found.append(torch.arange(start + offsets[head], min(start + length, num_positions), rate))
    return torch.cat(found)


def sampled_rows(
    pattern: DilatedPattern, q: Tensor, k: Tensor, v: Tensor, rows: list[tuple[int, int]], *, is_causal: bool = False,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns out (rows, D) and lse (rows,) in float64 for (position, head) ``rows`` of the first batch element of q (B, N, H, D).

    It covers self-attention with ``tail="mask"``. The number of key/value heads must divide H. A row without keys has out 0 and lse −inf.
    """
    _check(pattern)
    N, H, D = q.shape[1:]
    scale = D**-0.5 if scale is None else scale
    outs, lses = [], []
    for position, head in rows:
        keys = partners(pattern, position, head, H, N)
        keys = (keys[keys <= position] if is_causal else keys).to(q.device)
        kv_head = head * k.shape[2] // H
        scores = k[0, keys, kv_head].double() @ q[0, position, head].double() * scale
        lses.append(scores.logsumexp(0) if len(keys) else scores.new_tensor(-torch.inf))
        outs.append(scores.softmax(0) @ v[0, keys, kv_head].double())
    return torch.stack(outs), torch.stack(lses)


def sampled_gradients(
    pattern: DilatedPattern,
    tensors: tuple[Tensor, ...],
    rows: list[tuple[int, int]],
    *,
    is_causal: bool = False,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (dq, dk, dv), each (rows, D) in float64, for (position, head) ``rows`` of the first batch element.

    Args:
        tensors: dout, q, k, v, out (B, N, H, D) and lse (B, H, N). out and lse are used as given; check them with ``sampled_rows``.
            Every query head must have its own key/value head.
    """
    _check(pattern)
    dout, q, k, v, out, lse = tensors
    N, H, D = q.shape[1:]
    scale = D**-0.5 if scale is None else scale
    results: tuple[list[Tensor], ...] = ([], [], [])
    for position, head in rows:
        others = partners(pattern, position, head, H, N)
        keys = (others[others <= position] if is_causal else others).to(q.device)
        queries = (others[others >= position] if is_causal else others).to(q.device)
        q_i, dout_i, out_i = (x[0, position, head].double() for x in (q, dout, out))
        k_i, v_i = (x[0, position, head].double() for x in (k, v))
        k_j, v_j = (x[0, keys, head].double() for x in (k, v))
        p = (k_j @ q_i * scale - lse[0, head, position].double()).exp()
        results[0].append((p * (v_j @ dout_i - dout_i @ out_i)) @ k_j * scale)
        q_j, dout_j, out_j = (x[0, queries, head].double() for x in (q, dout, out))
        p = (q_j @ k_i * scale - lse[0, head, queries].double()).exp()
        results[1].append((p * (dout_j @ v_i - (dout_j * out_j).sum(-1))) @ q_j * scale)
        results[2].append(p @ dout_j)
    dq, dk, dv = (torch.stack(result) for result in results)
    return dq, dk, dv


def _check(pattern: DilatedPattern) -> None:
    if pattern.tail != "mask":
        raise ValueError(f"tail is {pattern.tail!r}; the sampled oracle supports only real keys: use tail='mask'")
