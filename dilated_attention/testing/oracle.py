"""Oracles: what a case's results should be. ``reference`` is the definition, row by row; ``plain_attention`` is softmax attention over all
pairs in plain PyTorch, in any dtype.

m counts how often a query sees a key, and z how many zero keys it sees, whose score and value are 0.

Letters: B batch, H query heads, G branches; N = Nq query positions, M = Nk key positions. Suffixes such as _BHNM are shapes.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import torch

from dilated_attention.backends import Dropout
from dilated_attention.backends.dropout import keep_mask
from dilated_attention.engine import reference as definition
from dilated_attention.engine.reference import distance_scores
from dilated_attention.pattern import BlockPattern, DilatedPattern
from dilated_attention.testing.bounds import largest
from dilated_attention.testing.cases import Case, Inputs


def multiplicities(
    case: Case, key_padding_mask: torch.Tensor | None, device: torch.device | str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (m (G, B or 1, H, Nq, Nk), z (G, 1, H, Nq)) of the case's branches, as ``engine.reference`` defines them; G is 0 without
    branches."""
    shape = case.num_queries, case.num_keys, case.heads
    if case.dilated is None:
        z = torch.zeros(0, 1, case.heads, case.num_queries, device=device)
        return z[..., None].expand(-1, -1, -1, -1, case.num_keys), z
    bounds = None if case.bounds is None else torch.tensor(case.bounds)
    m, z = definition.multiplicities(
        case.dilated, *shape, is_causal=case.is_causal, query_offset=case.query_offset, window=case.window, cu_seqlens=bounds,
        key_padding_mask=key_padding_mask,
    )  # fmt: skip
    return m.to(device), z[:, None].to(device)


def block_multiplicities(case: Case, x: Inputs) -> torch.Tensor:
    """Returns m (B, H, Nq, Nk) of the case's block pattern, by its definition. If q and k choose blocks, each batch entry has its own."""
    m = torch.zeros(case.batch, case.heads, case.num_queries, case.num_keys, device=x.q.device)
    options: Any = {"is_causal": case.is_causal, "query_offset": case.query_offset}
    for start, end in itertools.pairwise(case.bounds or (0, case.num_keys)):
        rows = slice(0, case.num_queries) if case.bounds is None else slice(start, end)
        for b in range(case.batch if end > start else 0):
            pattern: Any = case.pattern
            hidden = None if x.key_padding_mask is None else x.key_padding_mask[b : b + 1, start:end]
            if pattern.is_chosen:
                q, k = x.q[b : b + 1, rows], x.k[b : b + 1, start:end]
                pattern = pattern.choose(q, k, scale=case.scale, key_padding_mask=hidden, **options)
            keeps = pattern.dense_mask(rows.stop - rows.start, end - start, case.heads, **options).to(m.device)
            m[b, :, rows, start:end] = keeps if hidden is None else keeps & ~hidden[:, None]
    return m


def dropout_keep(case: Case, seed: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Returns bool (B, H, Nq, Nk): the weights that dropout with this seed keeps."""
    queries = torch.arange(case.query_offset, case.query_offset + case.num_queries, device=device)
    keys = torch.arange(case.num_keys, device=device)
    batch = torch.arange(case.batch, device=device)
    positions = (queries.repeat(case.batch, 1), keys.repeat(case.batch, 1))
    return keep_mask(Dropout(case.dropout_p, seed, batch, torch.arange(case.heads, device=device), *positions), slice(None))


def op_seed(case: Case) -> int:
    """Returns the dropout seed that a call draws right after ``torch.manual_seed(case.seed)``."""
    return int(torch.randint(2**62, (), generator=torch.Generator().manual_seed(case.seed)))


def plain_attention(case: Case, x: Inputs, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (out, lse) of the case by softmax attention in plain PyTorch, all in q's dtype; differentiable."""
    _, out, lse = map(torch.stack, zip(*softmax_parts(case, x, q, k, v), strict=True))
    if len(out) == 1:
        return out[0], lse[0]
    lse = lse.detach()
    mixing = (lse - _finite_lse(lse.logsumexp(0))).exp().transpose(2, 3)
    return (out * mixing[..., None]).sum(0), lse.logsumexp(0)


def softmax_parts(
    case: Case, x: Inputs, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Returns (p, out, lse) of each softmax that the gradient treats apart: one, or with detached mixing one per branch. p (B, H, Nq, Nk)
    are the weights before dropout."""
    m, z = multiplicities(case, x.key_padding_mask, q.device)
    if case.mixture_grad == "exact":
        m, z = m.sum(0, keepdim=True), z.sum(0, keepdim=True)
    if isinstance(case.pattern, BlockPattern):
        m = m + block_multiplicities(case, x)
    k, v = (y.repeat_interleave(case.heads // case.kv_heads, dim=2) for y in (k, v))
    s_BHNM = torch.einsum("bihd,bjhd->bhij", q, k) * (case.head_dim**-0.5 if case.scale is None else case.scale)
    if case.softcap is not None:
        s_BHNM = case.softcap * (s_BHNM / case.softcap).tanh()
    if x.coordinates is not None and x.slopes is not None:
        # coordinates are exact in float32, whatever q's dtype
        wide = torch.promote_types(q.dtype, torch.float32)
        penalty = distance_scores(x.coordinates.to(wide), x.slopes.to(wide), case.query_offset, case.num_queries)
        s_BHNM = s_BHNM - penalty.to(q.dtype)
    # after the keys come columns whose value is 0: one for all zero keys, of score 0, and one for the sink
    extra_scores = [s_BHNM.new_zeros(*s_BHNM.shape[:-1], 1)]
    if x.sinks is not None:
        extra_scores.append(x.sinks.to(q.dtype)[:, None, None].expand_as(extra_scores[0]))
    s_BHNM = torch.cat([s_BHNM, *extra_scores], dim=-1)
    keep = dropout_keep(case, op_seed(case), q.device).to(q.dtype) / (1 - case.dropout_p) if case.dropout_p else None
    parts = []
    for m_BHNM, z_BHN in zip(m, z, strict=True):
        z_BHN1 = z_BHN[..., None].expand(*m_BHNM.shape[:-1], 1)
        counts = torch.cat([m_BHNM, z_BHN1, *[torch.ones_like(z_BHN1)] * (len(extra_scores) - 1)], dim=-1).expand(s_BHNM.shape)
        sees_nothing = (counts == 0).all(-1, keepdim=True)
        logits = torch.where(counts > 0, s_BHNM + counts.clamp(min=1).double().log().to(q.dtype), -torch.inf)
        logits = torch.where(sees_nothing, 0.0, logits)
        p_BHNM = torch.where(sees_nothing, 0.0, logits.softmax(-1))[..., : case.num_keys]
        out = torch.einsum("bhij,bjhd->bihd", p_BHNM if keep is None else p_BHNM * keep, v)
        parts.append((p_BHNM, out, torch.where(sees_nothing[..., 0], -torch.inf, logits.logsumexp(-1))))
    return parts


def rounded_out_error(case: Case, x: Inputs) -> dict[str, float]:
    """Returns the largest errors of dq, dk, dslopes and dsinks if nothing but the saved out is rounded to the inputs' dtype.

    A flash backward computes δ = rowsum(dout ∘ out) from this out. An error of δ is as much gradient of lse. Plain softmax saves p instead.
    Its own error is no measure for δ's: it happens to be 0 where everything cancels, as with a single key.
    """
    leaves = {name: getattr(x, name).double().requires_grad_() for name in ("q", "k", "sinks") if getattr(x, name) is not None}
    parts = softmax_parts(case, replace(x, sinks=leaves.get("sinks")), leaves["q"], leaves["k"], x.v.double())
    p_GBHNM, out, lse = map(torch.stack, zip(*parts, strict=True))
    delta_error = (x.dout.double() * (out.to(x.q.dtype).double() - out)).sum(-1).transpose(2, 3)
    errors_GBHN = ((lse - _finite_lse(lse.logsumexp(0))).exp() * delta_error).detach()
    grads = torch.autograd.grad(_finite_lse(lse), tuple(leaves.values()), errors_GBHN, materialize_grads=True)
    errors = {f"d{name}": largest(grad) for name, grad in zip(leaves, grads, strict=True)}
    if x.coordinates is not None and x.slopes is not None:
        distance = distance_scores(x.coordinates.double(), torch.ones_like(x.slopes.double()), case.query_offset, case.num_queries)
        # the errors of rows have random signs, so three standard deviations bound their sum
        errors["dslopes"] = 3 * largest((errors_GBHN[..., None] * p_GBHNM * distance).sum((0, 4)).square().sum((0, 2)).sqrt())
    return errors


def _finite_lse(lse: torch.Tensor) -> torch.Tensor:
    return torch.where(lse == -torch.inf, 0.0, lse)


def reference(case: Case, x: Inputs, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (out, lse) of a case without a block pattern by the definition itself, ``engine.reference.reference_attention``: row by row
    on the CPU, for small N."""
    assert isinstance(case.pattern, DilatedPattern), "blocks are defined by their dense mask: plain_attention"
    names = ("is_causal", "scale", "query_offset", "window", "mixture_grad", "dropout_p", "softcap")
    options = {name: getattr(case, name) for name in names}
    options |= {name: getattr(x, name) for name in ("cu_seqlens", "key_padding_mask", "sinks", "coordinates", "slopes")}
    keep = dropout_keep(case, op_seed(case)) if case.dropout_p else None
    return definition.reference_attention(q, k, v, case.pattern, keep=keep, **options)
