"""torch's own CPU flash attention, through the aten ops that return lse and accept it in the backward."""

from __future__ import annotations

import torch
from torch import Tensor

from dilated_attention.backends.base import ALL_FLOATS, Capabilities, Grads, Options, Result
from dilated_attention.backends.mask_convert import additive_bias, clear_empty_rows, of_kv_heads, repeat_heads
from dilated_attention.backends.nonfinite import ContainedBackend, all_finite
from dilated_attention.backends.torch_ops.math import MathBackend
from dilated_attention.pattern.blocks.block_lists import BLOCK_SIZES

_MATH = MathBackend()


class SdpaCpuBackend(ContainedBackend):
    """``aten::_scaled_dot_product_flash_attention_for_cpu`` and its backward, on strided views without a copy.

    The op has pitfalls, each tested:

    * a call without any keys kills the process, and a last stride ≠ 1 is silently wrong: an assert refuses both
    * masks must be additive and of q's dtype: they are converted
    * a row without keys gets lse 0: it is set to what ``Backend`` promises
    * a row whose scores are all NaN gets lse 0 and out 0; q · k and sums of values overflow where scores and outputs do not:
      ``MathBackend`` computes every row that may be such a row
    * in half precision the backward rounds dk and dv after every query head that reads them (1.5 and 2.5 times the bound of 12 and 32
      heads): each head gets a copy of its own, and the sum is float32

    Letters: P problems, L queries, S keys; ``empty_PL`` marks rows without keys.
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

    def raw_forward(self, q: Tensor, k: Tensor, v: Tensor, options: Options, pairs: Tensor | None) -> Result:
        """``forward`` with ``pairs``, a mask of kept pairs that replaces the mask in ``options``."""
        assert k.shape[1] > 0 and q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
        bias, empty_PL = additive_bias(q, k, options, pairs)
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), 0.0, options.causal, attn_mask=bias, scale=options.scale
        )
        out, lse = clear_empty_rows(out.transpose(1, 2), lse, empty_PL)
        # lse 0 may come from a single key with the score 0, or from NaN scores
        zero_lse = lse == 0
        not_finite = ~(lse < torch.inf) | (~out.isfinite().all(-1).transpose(1, 2) if not all_finite(out) else False)
        if bool((zero_lse | not_finite).any()):
            exact_out, exact_lse = _MATH.raw_forward(q, k, v, options, pairs)
            # if keys or values are not finite, they are the cause of a non-finite row, which must stay visible
            replaced = zero_lse | (not_finite & all_finite(k, v))
            out = torch.where(replaced.transpose(1, 2)[..., None], exact_out, out)
            lse = torch.where(replaced, exact_lse, lse)
        return out, lse

    def raw_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, options: Options, dlse: Tensor | None,
        pairs: Tensor | None,
    ) -> Grads:  # fmt: skip
        assert dlse is None
        bias, _ = additive_bias(q, k, options, pairs)
        heads = q.shape[2] if q.element_size() == 2 else k.shape[2]
        heads_first = (x.transpose(1, 2) for x in (dout, q, repeat_heads(k, heads), repeat_heads(v, heads), out))
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *heads_first, lse, 0.0, options.causal, attn_mask=bias, scale=options.scale
        )
        dq, dk, dv = dq.transpose(1, 2), of_kv_heads(dk.transpose(1, 2), k.shape[2]), of_kv_heads(dv.transpose(1, 2), k.shape[2])
        if not all_finite(dq, dk, dv):
            exact = _MATH.raw_backward(dout, q, k, v, out, lse, options, None, pairs)
            dq, dk, dv = (torch.where(x.isfinite(), x, y.to(x.dtype)) for x, y in zip((dq, dk, dv), exact, strict=True))
        return dq, dk, dv
