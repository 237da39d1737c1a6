"""Explicit softmax attention over a multiset of keys, with its gradients, some rows at a time: N² of work, N of memory.

In float64 it is the reference for results. In the inputs' own dtype, with every operation rounded as plain PyTorch rounds it, it shows what
accuracy that dtype allows.
"""

from __future__ import annotations

import torch

from dilated_attention.pattern import NOT_IN_BRANCH, DilatedPattern

# elements of (rows, keys) at a time: 256 MiB in float64
_PLACES = 2**25
RESULTS = ("out", "lse", "dq", "dk", "dv")
Result = dict[str, torch.Tensor]


def softmax_attention(
    pattern: DilatedPattern,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    *,
    is_causal: bool,
    dtype: torch.dtype,
    rounds_out: torch.dtype | None = None,
) -> Result:
    """Returns out, lse, dq, dk, dv in ``dtype`` (lse of half precision in float32) of q, k, v, dout (B, N, H, D), by the definition.

    Args:
        dtype: of all operations. Products of half-precision numbers are accumulated in float32 and rounded once, as matrix units do.
        rounds_out: also returns ``"dq of rounding"`` and ``"dk of rounding"``: the errors of the gradients if only out, from which flash
            kernels compute the softmax's gradient, is rounded to this dtype.
    """
    B, N, H, D = q.shape
    half = dtype in (torch.float16, torch.bfloat16)
    inner = torch.float32 if half else dtype
    scale = D**-0.5
    results = {name: torch.zeros(q.shape, dtype=dtype, device=q.device) for name in ("out", "dq", "dk", "dv")}
    results["lse"] = torch.zeros(B, H, N, dtype=inner, device=q.device)
    if rounds_out is not None:
        results |= {f"{name} of rounding": torch.zeros_like(results["dq"]) for name in ("dq", "dk")}
    rows = max(1, _PLACES // max(N, 1))
    for b in range(B):
        for h in range(H):
            q_ND, k_ND, v_ND, dout_ND = (x[b, :, h].to(dtype).to(inner) for x in (q, k, v, dout))
            dk, dv, dk_rounding = (torch.zeros_like(k_ND) for _ in range(3))
            for start in range(0, N, rows):
                at = slice(start, min(start + rows, N))
                m = multiplicities(pattern, h, H, N, at, is_causal=is_causal, device=q.device)
                empty = (m == 0).all(-1, keepdim=True)
                s = _rounded(_rounded(q_ND[at] @ k_ND.T, dtype) * scale, dtype)
                logits = _rounded(s + m.to(inner).log(), dtype).masked_fill(empty, 0.0)
                p = _rounded(logits.softmax(-1), dtype).masked_fill(empty, 0.0)
                out = _rounded(p @ v_ND, dtype)
                dp = _rounded(dout_ND[at] @ v_ND.T, dtype)
                ds = _rounded(_rounded(p * (dp - (p * dp).sum(-1, keepdim=True)), dtype) * scale, dtype)
                results["out"][b, at, h] = out.to(dtype)
                results["lse"][b, h, at] = logits.logsumexp(-1).masked_fill(empty[:, 0], -torch.inf)
                results["dq"][b, at, h] = (ds @ k_ND).to(dtype)
                dk += ds.T @ q_ND[at]
                dv += p.T @ dout_ND[at]
                if rounds_out is not None:
                    off = p * (dout_ND[at] * (out.to(rounds_out).to(inner) - out)).sum(-1, keepdim=True) * scale
                    results["dq of rounding"][b, at, h] = off @ k_ND
                    dk_rounding += off.T @ q_ND[at]
            results["dk"][b, :, h], results["dv"][b, :, h] = dk.to(dtype), dv.to(dtype)
            if rounds_out is not None:
                results["dk of rounding"][b, :, h] = dk_rounding
    return results


def _rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x if x.dtype is dtype else x.to(dtype).to(x.dtype)


def multiplicities(
    pattern: DilatedPattern, head: int, num_heads: int, num_positions: int, rows: slice, *, is_causal: bool, device: torch.device
) -> torch.Tensor:
    """Returns m (rows, N) float32 of one head: the number of branches that join row and key."""
    keys = torch.arange(num_positions, device=device)
    queries = keys[rows]
    m = torch.zeros(len(queries), num_positions, device=device)
    for (length, rate), offsets in zip(pattern.branches, pattern.offsets(num_heads), strict=True):
        if offsets[head] == NOT_IN_BRANCH:
            continue
        taken = keys % length % rate == offsets[head]
        m += (queries[:, None] // length == keys // length) & taken[rows, None] & taken
    return m.masked_fill_(keys > queries[:, None], 0.0) if is_causal else m
