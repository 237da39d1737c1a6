"""Confines NaN and infinity to the rows and keys that they can affect, in both passes of a dense kernel on a CPU.

A kernel multiplies the weight 0 of a masked pair by whatever the pair holds, and 0 · NaN is NaN. So a launch whose results are not finite
is computed again without the non-finite numbers, and that result is used wherever those have no effect. Where row i reads key j, that is,
where the pair is not masked,

    a non-finite key makes out and lse of the row NaN; a non-finite value shows in its channel of out;
    a non-finite number in q, dout, out, lse, dlse of the row, or in a key or value that it reads, affects its dq and the key's dk, dv.

On a GPU the check would have to wait for the device, so the kernels' own results are kept there.

Layout: q, dout, out (P, L, G, D), k and v (P, S, K, D), lse and dlse (P, G, L), see ``Backend``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from dilated_attention.backends import block_gather
from dilated_attention.backends.base import Backend, Keys, Options, Views, accumulation_dtype
from dilated_attention.pattern.blocks.block_lists import BlockLists

# a kernel's forward and backward; the arguments are tensors, options, dlse (backward only) and pairs
RawForward = Callable[..., tuple[Tensor, Tensor]]
RawBackward = Callable[..., tuple[Tensor, Tensor, Tensor]]


def all_finite(*tensors: Tensor) -> bool:
    """Whether every element is finite; if so, one sum per tensor usually decides it."""
    # the sum of finite numbers may overflow, so a non-finite sum needs the full check
    return all(math.isfinite(x.sum().item()) or bool(x.isfinite().all()) for x in tensors)


class ContainedBackend(Backend):
    """A backend on a dense kernel (``raw_forward`` and ``raw_backward``) whose non-finite numbers are confined.

    The dense functions take ``pairs``: bool (P, L or 1, S), True where the pair is kept; None where all are. With it they also compute
    lists of blocks, if the capabilities declare any (``block_gather.py``).
    """

    # ``dense_forward`` and ``dense_backward`` for finite inputs
    raw_forward: RawForward
    raw_backward: RawBackward

    def forward(self, q: Tensor, k: Tensor, v: Tensor, options: Options, keys: Keys | None = None, **__: Views) -> tuple[Tensor, Tensor]:
        if keys is None:
            return self.dense_forward(q, k, v, options)
        assert isinstance(keys, BlockLists)
        return block_gather.forward(self.dense_forward, q, k, v, options, keys)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, options: Options, keys: Keys | None = None, *,
        dlse: Tensor | None = None, **__: Views,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Returns (dq, dk, dv); of lists, dk and dv in float32 (float64 for float64)."""
        if keys is None:
            return self.dense_backward(dout, q, k, v, out, lse, options, dlse)
        assert isinstance(keys, BlockLists)
        return block_gather.backward(self.dense_backward, dout, q, k, v, out, lse, options, keys, dlse)

    def dense_forward(self, q: Tensor, k: Tensor, v: Tensor, options: Options, pairs: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Returns (out, lse) of P dense problems."""
        out, lse = self.raw_forward(q, k, v, options, pairs)
        if q.device.type != "cpu" or all_finite(out, k):
            return out, lse
        bad_k, bad_v = ~_rows_finite(k), ~v.isfinite()
        if not (bool(bad_k.any()) or bool(bad_v.any())):
            return out, lse
        clean_out, clean_lse = self.raw_forward(q, _without(k, bad_k), _without(v, bad_v), options, pairs)
        # a value only affects its own channel
        out = torch.where(_readers(self.raw_forward, q, bad_v, options, pairs), out, clean_out)
        spoilt = _readers(self.raw_forward, q, bad_k, options, pairs)
        return out.masked_fill(spoilt, torch.nan), clean_lse.masked_fill(spoilt[..., 0].transpose(1, 2), torch.nan)

    def dense_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, options: Options, dlse: Tensor | None = None,
        pairs: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Returns (dq, dk, dv) of P dense problems."""
        slopes = None if options.bias is None else options.bias.gradient
        before = None if slopes is None else slopes.clone()
        dq, dk, dv = self.raw_backward(dout, q, k, v, out, lse, options, dlse, pairs)
        # without a mask every row reads every key, and there is nothing to confine
        masked = options.causal or pairs is not None or not options.mask.is_trivial
        if q.device.type != "cpu" or not masked or all_finite(dq, dk, dv):
            return dq, dk, dv
        bad_keys = ~(_rows_finite(k) & _rows_finite(v))
        bad_rows = ~(_rows_finite(q) & _rows_finite(dout) & _rows_finite(out))
        of_lse = ~lse.isfinite() if dlse is None else ~(lse.isfinite() & dlse.isfinite())
        # +inf marks a row that takes no part, so nothing in it has an effect
        idle = (lse == torch.inf).transpose(1, 2)[..., None]
        bad_rows |= of_lse.transpose(1, 2)[..., None] | _readers(self.raw_forward, q, bad_keys, options, pairs)
        zeroed, reached_rows = bad_rows | idle, bad_rows & ~idle
        if not (bool(zeroed.any()) or bool(bad_keys.any())):
            return dq, dk, dv
        without = zeroed[..., 0].transpose(1, 2)
        clean_dout, clean_q, clean_out = (_without(x, zeroed) for x in (dout, q, out))
        clean_k, clean_v = (_without(x, bad_keys) for x in (k, v))
        clean_lse = lse.masked_fill(without, torch.inf)
        clean_dlse = None if dlse is None else dlse.masked_fill(without, 0)
        if slopes is not None and before is not None:
            slopes.copy_(before)
        grads = self.raw_backward(clean_dout, clean_q, clean_k, clean_v, clean_out, clean_lse, options, clean_dlse, pairs)
        reached_keys = _read(self.raw_backward, k, reached_rows, options, pairs)
        # a row that reads no real key (it may read zero keys) has no dq
        reading = _readers(self.raw_forward, q, torch.ones_like(bad_keys), options, pairs)
        if slopes is not None:
            slopes.masked_fill_((reached_rows & reading).any(-1).flatten(0, 1).any(0), torch.nan)
        return (
            torch.where(reached_rows & reading, dq, grads[0]),
            torch.where(reached_keys, dk, grads[1]),
            torch.where(reached_keys, dv, grads[2]),
        )


def _without(x: Tensor, where: Tensor) -> Tensor:
    """Returns a copy of x with zeros ``where``, with last stride 1, as kernels require."""
    return x.clone(memory_format=torch.contiguous_format).masked_fill_(where, 0)


def _rows_finite(x: Tensor) -> Tensor:
    """Returns bool (…, 1): whether all elements of a row are finite."""
    return x.isfinite().all(-1, keepdim=True)


def _readers(raw: RawForward, q: Tensor, keys: Tensor, options: Options, pairs: Tensor | None) -> Tensor:
    """Returns bool (P, L, G, E): the rows that read one of ``keys``, bool (P, S, K, E)."""
    # all scores are equal, so every key that a row reads has a nonzero weight
    value = keys.to(accumulation_dtype(q.dtype), memory_format=torch.contiguous_format, copy=True)
    zeros_q, zeros_k = value.new_zeros((*q.shape[:3], keys.shape[3])), torch.zeros_like(value)
    found: Tensor = raw(zeros_q, zeros_k, value, replace(options, dropout=None, bias=None), pairs)[0] != 0
    return found


def _read(raw: RawBackward, k: Tensor, rows: Tensor, options: Options, pairs: Tensor | None) -> Tensor:
    """Returns bool (P, S, K, 1): the keys that one of ``rows``, bool (P, L, G, 1), reads."""
    dout = rows.to(accumulation_dtype(k.dtype), memory_format=torch.contiguous_format, copy=True)
    zeros_q, zeros_k = torch.zeros_like(dout), dout.new_zeros((*k.shape[:3], 1))
    # an lse of +inf gives the other rows the weight 0
    lse = torch.where(rows, 0.0, torch.inf).to(dout.dtype)[..., 0].transpose(1, 2)
    found: Tensor = raw(dout, zeros_q, zeros_k, zeros_k, zeros_q, lse, replace(options, dropout=None, bias=None), None, pairs)[2] != 0
    return found
