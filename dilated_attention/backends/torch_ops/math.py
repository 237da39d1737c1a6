"""Attention in plain torch for every device, dtype and option: the fallback where no kernel library can, and the reference for them.

Shape letters: P problems, L queries, S keys, G query heads, K key/value heads, D head dim. Within a block of rows L counts its rows alone.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dilated_attention.backends.base import ALL_FLOATS, Capabilities, Grads, Options, Result, accumulation_dtype, new_lse
from dilated_attention.backends.dropout import keep_mask
from dilated_attention.backends.nonfinite import ContainedBackend
from dilated_attention.pattern.blocks.block_lists import BLOCK_SIZES

# scores of one block of query rows: small enough to stay near the caches and to bound memory at any length
_BLOCK_BYTES = 32 * 2**20


class MathBackend(ContainedBackend):
    """Materialises the scores of one block of rows at a time: O(L·S) arithmetic, bounded memory. Half precision computes in float32."""

    name = "math"
    capabilities = Capabilities(
        devices=frozenset({"cpu", "cuda", "mps", "xpu", "meta"}),
        dtypes=ALL_FLOATS,
        key_mask=True,
        window=True,
        dropout=True,
        softcap=True,
        bias=True,
        lse_grad=True,
        aligned_last=True,
        block_sizes=BLOCK_SIZES,
        block_masks=frozenset({"none", "interval", "bits"}),
        rocm=True,
        source="plain torch; no limits of its own",
    )

    def raw_forward(self, q: Tensor, k: Tensor, v: Tensor, options: Options, pairs: Tensor | None) -> Result:
        """Returns (out (P, L, G, D), lse (P, G, L)). ``pairs``: a mask of kept pairs, bool (P, 1 or L, S), besides those in ``options``."""
        G, acc = q.shape[2], accumulation_dtype(q.dtype)
        out, lse = q.new_empty(q.shape), new_lse(q)
        k_PGDS, v_PGSD = _heads_first(k, G, acc).transpose(-1, -2), _heads_first(v, G, acc)
        for rows in _row_blocks(q, k):
            s_PGLS = self._scores(q, k_PGDS, rows, options, pairs)
            lse_PGL = s_PGLS.logsumexp(-1)
            # this row has a score too large for acc, or none that acc can hold (see ``_scores``), so its lse is not known. It is NaN, since
            # −inf means a row without keys, and +inf tells a backward that a row takes no part
            lse_PGL.masked_fill_((lse_PGL == torch.inf) | (lse_PGL == torch.finfo(acc).min), torch.nan)
            p_PGLS = (s_PGLS - _finite(lse_PGL)[..., None]).exp_()
            # float32 holds an lse of 1e4 to only 5e-4, so these weights do not sum to 1; those of a row without keys are 0
            total_PGL1 = p_PGLS.sum(-1, keepdim=True)
            total_PGL1.masked_fill_(total_PGL1 == 0, 1.0)
            if options.dropout is not None:
                p_PGLS *= keep_mask(options.dropout, rows)
                p_PGLS /= 1 - options.dropout.probability
            out[:, rows] = (p_PGLS @ v_PGSD).div_(total_PGL1).transpose(1, 2).to(q.dtype)
            lse[:, :, rows] = lse_PGL
        return out, lse

    def raw_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, options: Options, dlse: Tensor | None,
        pairs: Tensor | None,
    ) -> Grads:  # fmt: skip
        """Returns (dq, dk, dv) of this launch's keys in the accumulation dtype; ``out`` and ``lse`` may be those of more keys."""
        (P, _, G, D), (S, K) = q.shape, k.shape[1:3]
        acc = accumulation_dtype(q.dtype)
        k_PGSD, v_PGSD = _heads_first(k, G, acc), _heads_first(v, G, acc)
        dq = q.new_empty(q.shape, dtype=acc)
        dk_PGSD = q.new_zeros((P, G, S, D), dtype=acc)
        dv_PGSD = torch.zeros_like(dk_PGSD)
        for rows in _row_blocks(q, k):
            q_PGLD = q[:, rows].transpose(1, 2).to(acc)
            do_PGLD = dout[:, rows].transpose(1, 2).to(acc)
            delta_PGL = (do_PGLD * out[:, rows].transpose(1, 2).to(acc)).sum(-1)
            if dlse is not None:
                delta_PGL = delta_PGL - dlse[:, :, rows].to(acc)
            s_PGLS = self._scores(q, k_PGSD.transpose(-1, -2), rows, options, pairs)
            p_PGLS = (s_PGLS - lse[:, :, rows, None].to(acc)).exp_()
            dp_PGLS = do_PGLD @ v_PGSD.transpose(-1, -2)
            weights_PGLS = p_PGLS
            if options.dropout is not None:
                kept_PGLS = keep_mask(options.dropout, rows).to(acc) / (1 - options.dropout.probability)
                dp_PGLS *= kept_PGLS
                weights_PGLS = p_PGLS * kept_PGLS
            dv_PGSD += weights_PGLS.transpose(-1, -2) @ do_PGLD
            ds_PGLS = p_PGLS * (dp_PGLS - delta_PGL[..., None])
            if options.bias is not None and options.bias.gradient is not None:
                options.bias.gradient.sub_(torch.einsum("pgls,pls->g", ds_PGLS, options.bias.distances(rows).to(acc)))
            ds_PGLS = ds_PGLS * options.scale
            if options.softcap:
                # the derivative of the cap, 1 − tanh²; a masked score is −inf and its weight 0
                ds_PGLS *= (1 - (s_PGLS / options.softcap).square_()).clamp_(min=0)
            dq[:, rows] = (ds_PGLS @ k_PGSD).transpose(1, 2)
            dk_PGSD += ds_PGLS.transpose(-1, -2) @ q_PGLD
        # sums the contributions of the query heads that share a key/value head
        dk, dv = (x.unflatten(1, (K, G // K)).sum(2).transpose(1, 2) for x in (dk_PGSD, dv_PGSD))
        return dq, dk, dv

    def _scores(self, q: Tensor, k_PGDS: Tensor, rows: slice, options: Options, pairs: Tensor | None) -> Tensor:
        """Returns the scores of some rows (P, G, rows, S), scaled, capped, biased and −inf where a key is masked."""
        q_PGLD = q[:, rows].transpose(1, 2).to(k_PGDS.dtype)
        # scales before or after the product, so that no intermediate result is larger than the score
        s_PGLS = (q_PGLD * options.scale) @ k_PGDS if abs(options.scale) <= 1 else (q_PGLD @ k_PGDS).mul_(options.scale)
        if options.softcap:
            s_PGLS.div_(options.softcap).tanh_().mul_(options.softcap)
        if options.bias is not None:
            s_PGLS.sub_(options.bias.slopes[:, None, None] * options.bias.distances(rows)[:, None])
        # a score this low has the weight 0 next to any other key; −inf is reserved for masked keys
        s_PGLS.clamp_(min=torch.finfo(s_PGLS.dtype).min)
        # causal: the last query sees the last key, so key − query is at most S − L; the mask then has no band of its own
        band = (None, k_PGDS.shape[-1] - q.shape[1]) if options.causal else options.mask.band
        if band is not None:
            s_PGLS.masked_fill_(~band_mask(band, q.shape[1], k_PGDS.shape[-1], q.device, rows), -torch.inf)
        if options.mask.padding is not None:
            s_PGLS.masked_fill_(options.mask.padding[:, None, None, :], -torch.inf)
        if pairs is not None:
            kept = pairs if pairs.shape[1] == 1 else pairs[:, rows]
            s_PGLS.masked_fill_(~kept[:, None], -torch.inf)
        return s_PGLS


def band_mask(band: tuple[int | None, int | None], num_rows: int, num_keys: int, device: torch.device, rows: slice = slice(None)) -> Tensor:
    """Returns a bool mask (rows, num_keys): True where lowest ≤ key − query ≤ highest."""
    difference = torch.arange(num_keys, device=device)[None, :] - torch.arange(num_rows, device=device)[rows, None]
    lowest, highest = band
    allowed = torch.ones_like(difference, dtype=torch.bool)
    if lowest is not None:
        allowed &= difference >= lowest
    if highest is not None:
        allowed &= difference <= highest
    return allowed


def _row_blocks(q: Tensor, k: Tensor) -> Iterator[slice]:
    """Yields slices of query rows whose scores, counted in 4 bytes, take at most ``_BLOCK_BYTES``; at least one row."""
    P, L, G, _ = q.shape
    bytes_per_row = max(1, P * G * k.shape[1]) * 4
    rows_at_once = max(1, min(L, _BLOCK_BYTES // bytes_per_row))
    for start in range(0, L, rows_at_once):
        yield slice(start, min(start + rows_at_once, L))


def _heads_first(x: Tensor, num_heads: int, dtype: torch.dtype) -> Tensor:
    """(P, S, K, D) → (P, G, S, D), each key/value head repeated for its group of query heads."""
    x = x.transpose(1, 2).to(dtype)
    return x if x.shape[1] == num_heads else x.repeat_interleave(num_heads // x.shape[1], dim=1)


def _finite(lse: Tensor) -> Tensor:
    """Replaces an lse of −inf by 0: a row without keys has scores of −inf, and subtracting 0 keeps its weights at exp(−inf) = 0."""
    return lse.masked_fill(lse == -torch.inf, 0.0)
