"""The reference implementation: docs/meaning.md, literally, in float64 and O(N²). Every fast path is tested against it.

Shape letters: B batch, Nq queries, Nk keys, H query heads, D head dim, C coordinates. In einsum: b, i (query), j (key), h, d.
"""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

from dilated_attention.pattern import DilatedPattern


def multiplicities(
    pattern: DilatedPattern, num_queries: int, num_keys: int, num_heads: int, *, is_causal: bool = False, query_offset: int = 0,
    window: tuple[int | None, int | None] | None = None, cu_seqlens: Tensor | None = None, key_padding_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns (m, z), float64, for each branch alone:

        m  (branches, B or 1, H, Nq, Nk)  1 where query and key share a segment and are both taken, and nothing masks the key; else 0
        z  (branches, H, Nq)              how many zero keys ``tail="zero_keys"`` adds for the query

    Query row i is position ``query_offset`` + i.
    """
    bounds = [0, num_keys] if cu_seqlens is None else cu_seqlens.tolist()
    m = torch.zeros(pattern.num_branches, num_heads, num_queries, num_keys, dtype=torch.float64)
    zero_keys = torch.zeros(pattern.num_branches, num_heads, num_queries, dtype=torch.float64)
    positions, keys = torch.arange(query_offset, query_offset + num_queries)[:, None], torch.arange(num_keys)[None]
    for start, end in itertools.pairwise(bounds):
        for branch, ((length, rate), offsets) in enumerate(zip(pattern.branches, pattern.offsets(num_heads), strict=True)):
            same_segment = (positions - start) // length == (keys - start) // length
            # −1: the head does not run the branch
            for offset in {offset for offset in offsets if offset >= 0}:
                heads = [head for head, of_head in enumerate(offsets) if of_head == offset]
                # which queries (Nq, 1) and keys (1, Nk) of this document the branch takes
                row_taken, key_taken = ((start <= x) & (x < end) & ((x - start) % length % rate == offset) for x in (positions, keys))
                joined = row_taken & key_taken & same_segment
                m[branch, heads] += joined.double()
                # zero keys stand at the end of a segment, so a causal query sees none. Their number depends on how many real ones there are
                num_real = joined.sum(-1)
                for count in [] if is_causal else num_real[row_taken[:, 0]].unique().tolist():
                    rows = row_taken[:, 0] & (num_real == count)
                    zero_keys[branch, heads] += rows * float(pattern.zero_keys(branch, end - start, count))
    # of a key after a query
    distance = torch.arange(num_keys)[None, :] - (torch.arange(num_queries) + query_offset)[:, None]
    if is_causal:
        m = m * (distance <= 0)
    if window is not None:
        left, right = window
        m = m * (distance >= -(math.inf if left is None else left)) * (distance <= (math.inf if right is None else right))
    m = m[:, None]
    if key_padding_mask is not None:
        m = m * ~key_padding_mask.cpu()[None, :, None, None, :]
    return m, zero_keys


def reference_attention(
    q: Tensor, k: Tensor, v: Tensor, pattern: DilatedPattern, *, is_causal: bool = False, scale: float | None = None,
    query_offset: int = 0, window: tuple[int | None, int | None] | None = None, cu_seqlens: Tensor | None = None,
    key_padding_mask: Tensor | None = None, mixture_grad: str = "exact", keep: Tensor | None = None, dropout_p: float = 0.0,
    sinks: Tensor | None = None, softcap: float | None = None, coordinates: Tensor | None = None, slopes: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns (out (B, Nq, H, D), lse (B, H, Nq)) in float64 on the CPU, differentiable by autograd.

    Each branch is a separate softmax with its own zero keys. Branches are mixed by their denominators (LongNet Eq. 9–10), which *is*
    the softmax over the multiset. ``mixture_grad="detached"`` cuts the gradient of those mixing weights, as TorchScale does.
    ``keep`` (B, H, Nq, Nk) bool marks the weights that dropout keeps. ``sinks`` (H,) are mixed in like a branch whose output is 0.
    ``coordinates`` (B or 1, Nk, C) and ``slopes`` (H,): −slope · distance is added to the scores.
    """
    q, k, v = (x.double().cpu() for x in (q, k, v))
    B, num_queries, num_heads, head_dim = q.shape
    repeat = num_heads // k.shape[2]
    k, v = (x.repeat_interleave(repeat, dim=2) for x in (k, v))
    m, zero_keys = multiplicities(
        pattern,
        num_queries,
        k.shape[1],
        num_heads,
        is_causal=is_causal,
        query_offset=query_offset,
        window=window,
        cu_seqlens=cu_seqlens,
        key_padding_mask=key_padding_mask,
    )
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * (head_dim**-0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    if coordinates is not None and slopes is not None:
        scores = scores - distance_scores(coordinates.double().cpu(), slopes.double().cpu(), query_offset, num_queries)
    dropout_factors = torch.ones_like(scores) if keep is None else keep.double() / (1 - dropout_p)
    lses, outs = [], []
    for branch in range(pattern.num_branches):
        # m · e^s = e^(s + log m)
        logits = torch.where(m[branch] > 0, scores + m[branch].clamp(min=1).log(), -torch.inf)
        # all zero keys as one more column, with score 0; it counts in lse, and its value 0 adds nothing to out
        logits = torch.cat([logits, zero_keys[branch].log()[None, ..., None].expand(B, -1, -1, 1)], dim=-1)
        lse = _logsumexp(logits)
        weights = (logits - _shift(lse)[..., None]).exp()[..., :-1] * dropout_factors
        lses.append(lse)
        outs.append(torch.einsum("bhij,bjhd->bhid", weights, v))
    if sinks is not None:
        lses.append(sinks.double().cpu()[:, None].expand_as(lses[0]))
        outs.append(torch.zeros_like(outs[0]))
    branch_lses = torch.stack(lses)
    lse = _logsumexp(branch_lses.movedim(0, -1))
    mixing = (branch_lses - _shift(lse)).exp()
    if mixture_grad == "detached":
        mixing = mixing.detach()
    out = (mixing[..., None] * torch.stack(outs)).sum(0)
    return out.transpose(1, 2), lse


def distance_scores(coordinates: Tensor, slopes: Tensor, query_offset: int, num_queries: int) -> Tensor:
    """Returns slope · distance (B or 1, H, Nq, Nk) for coordinates (B or 1, Nk, C)."""
    queries = coordinates[:, query_offset : query_offset + num_queries, None]
    return slopes[:, None, None] * torch.linalg.vector_norm(queries - coordinates[:, None], dim=-1)[:, None]


def _shift(lse: Tensor) -> Tensor:
    """Returns lse, or 0 where it is −inf: there x − lse would be NaN, and with 0 every weight is e^−inf = 0."""
    return torch.where(lse == -torch.inf, 0.0, lse)


def _logsumexp(x: Tensor) -> Tensor:
    """Computes logsumexp over the last dimension, with gradient 0 instead of NaN where every entry is −inf."""
    empty = (x == -torch.inf).all(-1, keepdim=True)
    safe = torch.where(empty, 0.0, x)
    return torch.where(empty[..., 0], -torch.inf, safe.logsumexp(-1))
