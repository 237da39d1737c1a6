"""Attention in plain torch for every device, dtype and option: the fallback where no kernel library can, and the reference for them.

torch's own CPU flash attention, through the aten ops that return lse and accept it in the backward.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dilated_attention.backends.base import (
    ALL_FLOATS,
    Capabilities,
    Options,
    accumulation_dtype,
    additive_bias,
    band_mask,
    clear_empty_rows,
)
from dilated_attention.backends.block_kernels.block_gather import GatheringBackend
from dilated_attention.backends.dropout import keep_mask
from dilated_attention.backends.nonfinite import all_finite
from dilated_attention.pattern.blocks.block_lists import BLOCK_SIZES

# scores of one block of query rows: small enough to stay near the caches and to bound memory at any length
_BLOCK_BYTES = 32 * 2**20


class MathBackend(GatheringBackend):
    """Materialises the scores of one block of rows at a time: O(L·S) arithmetic, bounded memory. Half precision computes in float32."""

    name = "math"
    capabilities = Capabilities(
        devices=frozenset({"cpu", "cuda", "mps", "xpu", "meta"}),
        dtypes=ALL_FLOATS,
        key_mask=True,
        window=True,
        dropout=True,
        softcap=True,
        lse_grad=True,
        aligned_last=True,
        block_sizes=BLOCK_SIZES,
        block_masks=frozenset({"none", "interval", "bits"}),
        rocm=True,
        source="plain torch; no limits of its own",
    )

    def raw_forward(self, q: Tensor, k: Tensor, v: Tensor, options: Options, pairs: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """``forward`` with ``pairs``, a mask of kept pairs in addition to the masks in ``options``."""
        P, L, G, D = q.shape
        acc = accumulation_dtype(q.dtype)
        out = torch.empty((P, L, G, D), dtype=q.dtype, device=q.device)
        lse = torch.empty((P, G, L), dtype=acc, device=q.device)
        k_PGDS, v_PGSD = _heads_first(k, G, acc).transpose(-1, -2), _heads_first(v, G, acc)
        for rows in _row_blocks(q, k):
            s_PGLS = self._scores(q, k_PGDS, rows, options, pairs)
            lse_PGL = s_PGLS.logsumexp(-1)
            # acc cannot hold these scores; NaN keeps them apart from −inf (a row without keys) and +inf (an idle row of a backward)
            lse_PGL.masked_fill_((lse_PGL == torch.inf) | (lse_PGL == torch.finfo(acc).min), torch.nan)
            p_PGLS = (s_PGLS - _finite(lse_PGL)[..., None]).exp_()
            if options.dropout is not None:
                p_PGLS *= keep_mask(options.dropout, rows)
                p_PGLS /= 1 - options.dropout.probability
            out[:, rows] = (p_PGLS @ v_PGSD).transpose(1, 2).to(q.dtype)
            lse[:, :, rows] = lse_PGL
        return out, lse

    def raw_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, options: Options, dlse: Tensor | None = None,
        pairs: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        P, L, G, D = q.shape
        K, S = k.shape[2], k.shape[1]
        acc = accumulation_dtype(q.dtype)
        k_PGSD, v_PGSD = _heads_first(k, G, acc), _heads_first(v, G, acc)
        dq = torch.empty((P, L, G, D), dtype=acc, device=q.device)
        dk_PGSD = torch.zeros((P, G, S, D), dtype=acc, device=q.device)
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
            if options.dropout is not None:
                kept_PGLS = keep_mask(options.dropout, rows).to(acc) / (1 - options.dropout.probability)
                dp_PGLS *= kept_PGLS
                dv_PGSD += (p_PGLS * kept_PGLS).transpose(-1, -2) @ do_PGLD
            else:
                dv_PGSD += p_PGLS.transpose(-1, -2) @ do_PGLD
            ds_PGLS = p_PGLS * (dp_PGLS - delta_PGL[..., None]) * options.scale
            if options.softcap:
                # the derivative of the cap, 1 − tanh²; a masked score is −inf and its weight 0
                ds_PGLS *= (1 - (s_PGLS / options.softcap).square_()).clamp_(min=0)
            dq[:, rows] = (ds_PGLS @ k_PGSD).transpose(1, 2)
            dk_PGSD += ds_PGLS.transpose(-1, -2) @ q_PGLD
        # sums the contributions of the query heads that share a key/value head
        dk, dv = (x.unflatten(1, (K, G // K)).sum(2).transpose(1, 2) for x in (dk_PGSD, dv_PGSD))
        return dq, dk, dv

    def _scores(self, q: Tensor, k_PGDS: Tensor, rows: slice, options: Options, pairs: Tensor | None) -> Tensor:
        q_PGLD = q[:, rows].transpose(1, 2).to(k_PGDS.dtype)
        # scales before or after the product, so that no intermediate result is larger than the score
        s_PGLS = (q_PGLD * options.scale) @ k_PGDS if abs(options.scale) <= 1 else (q_PGLD @ k_PGDS).mul_(options.scale)
        if options.softcap:
            s_PGLS.div_(options.softcap).tanh_().mul_(options.softcap)
        # a score this low has the weight 0 next to any other key; −inf is reserved for masked keys
        s_PGLS.clamp_(min=torch.finfo(s_PGLS.dtype).min)
        band = (None, k_PGDS.shape[-1] - q.shape[1]) if options.causal else options.mask.band
        if band is not None:
            s_PGLS.masked_fill_(~band_mask(band, q.shape[1], k_PGDS.shape[-1], q.device, rows), -torch.inf)
        if options.mask.padding is not None:
            s_PGLS.masked_fill_(options.mask.padding[:, None, None, :], -torch.inf)
        if pairs is not None:
            kept = pairs if pairs.shape[1] == 1 else pairs[:, rows]
            s_PGLS.masked_fill_(~kept[:, None], -torch.inf)
        return s_PGLS


def _row_blocks(q: Tensor, k: Tensor) -> Iterator[slice]:
    P, L, G, _ = q.shape
    bytes_per_row = max(1, P * G * k.shape[1]) * 4
    block = max(1, min(L, _BLOCK_BYTES // bytes_per_row))
    for start in range(0, L, block):
        yield slice(start, min(start + block, L))


def _heads_first(x: Tensor, num_heads: int, dtype: torch.dtype) -> Tensor:
    """(P, S, K, D) → (P, G, S, D), each key/value head repeated for its group of query heads."""
    x = x.transpose(1, 2).to(dtype)
    return x if x.shape[1] == num_heads else x.repeat_interleave(num_heads // x.shape[1], dim=1)


def _finite(lse: Tensor) -> Tensor:
    """Replaces an lse of −inf by 0: a row without keys has scores of −inf, and subtracting 0 keeps its weights at exp(−inf) = 0."""
    return lse.masked_fill(lse == -torch.inf, 0.0)


_MATH = MathBackend()


class SdpaCpuBackend(GatheringBackend):
    """``aten::_scaled_dot_product_flash_attention_for_cpu`` and its backward, on strided views without a copy.

    The op has pitfalls, each guarded here and tested: a call without any keys kills the process; a last stride ≠ 1 is silently wrong;
    masks must be additive and of q's dtype; a row without keys gets lse 0, and so does a row whose scores are all NaN, with out 0; q · k
    and sums of values overflow where scores and outputs do not. Rows that may be affected by the last three are left to ``MathBackend``.
    """

    name = "sdpa_cpu"
    capabilities = Capabilities(
        devices=frozenset({"cpu"}),
        dtypes=ALL_FLOATS,
        key_mask=True,
        window=True,
        block_sizes=BLOCK_SIZES,
        block_masks=frozenset({"none", "interval", "bits"}),
        source=(
            "measured on torch 2.13, CPU: strided views as fast as contiguous ones; random blocks at 10 % density 7 times as fast as dense"
        ),
    )

    def raw_forward(self, q: Tensor, k: Tensor, v: Tensor, options: Options, pairs: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """``forward`` with ``pairs``, a mask of kept pairs that replaces the mask in ``options``."""
        assert k.shape[1] > 0 and q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
        bias = empty_PL = None
        if pairs is not None:
            bias, empty_PL = _bias_of_pairs(pairs, q.dtype), ~pairs.any(-1)
        elif options.mask.padding is not None or options.mask.band is not None:
            bias, empty_PL = additive_bias(q, k, options)
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), 0.0, options.causal, attn_mask=bias, scale=options.scale
        )
        out = out.transpose(1, 2)
        if empty_PL is not None:
            out, lse = clear_empty_rows(out, lse, empty_PL)
        # lse 0 may come from a single key with the score 0, or from NaN scores
        doubtful = lse == 0
        spoilt = ~(lse < torch.inf) | (~out.isfinite().all(-1).transpose(1, 2) if not all_finite(out) else False)
        if bool((doubtful | spoilt).any()):
            exact_out, exact_lse = _MATH.raw_forward(q, k, v, options, pairs)
            # if keys or values are not finite, they are the cause of a non-finite row, which must stay visible
            doubtful |= spoilt & all_finite(k, v)
            out = torch.where(doubtful.transpose(1, 2)[..., None], exact_out, out)
            lse = torch.where(doubtful, exact_lse, lse)
        return out, lse

    def raw_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, options: Options, dlse: Tensor | None = None,
        pairs: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        assert dlse is None
        bias = None
        if pairs is not None:
            bias = _bias_of_pairs(pairs, q.dtype)
        elif options.mask.padding is not None or options.mask.band is not None:
            bias = additive_bias(q, k, options)[0]
        heads_first = (x.transpose(1, 2) for x in (dout, q, k, v, out))
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *heads_first, lse, 0.0, options.causal, attn_mask=bias, scale=options.scale
        )
        dq, dk, dv = dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)
        if not all_finite(dq, dk, dv):
            exact = _MATH.raw_backward(dout, q, k, v, out, lse, options, None, pairs)
            dq, dk, dv = (torch.where(x.isfinite(), x, y.to(x.dtype)) for x, y in zip((dq, dk, dv), exact, strict=True))
        return dq, dk, dv


def _bias_of_pairs(pairs: Tensor, dtype: torch.dtype) -> Tensor:
    """Converts bool (P, L or 1, S) to a bias (P, 1, L or 1, S) with 0 where kept and −inf elsewhere."""
    return torch.where(pairs, torch.zeros((), dtype=dtype), torch.full((), -torch.inf, dtype=dtype))[:, None]
