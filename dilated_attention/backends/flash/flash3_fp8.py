"""FlashAttention-3's fp8 (e4m3) forward: ``torch.ops.fa3_fwd`` from the package fa3-fwd, installed or loaded by path.

Each launch rounds its q, k and v to e4m3 (4 exponent and 3 mantissa bits, largest number 448), one scale per problem and key/value head:

    y = round((x − c) · 448 / amax),    descale = amax / 448,    mean = avg(x − y · descale),    x ≈ mean + y · descale

c is each channel's average over the rows, for keys and values; it is 0 for queries. Removing a constant does not change the attention:
softmax is invariant to one in its scores, and one in the values passes through. So scale·q·mean(k) is added to lse and mean(v) to out, in
float32. The mean is that of y *as rounded*: after a shift, rounding may be biased to one side, and an error common to all rows adds up.

Shape letters: P problems, L rows of queries, S rows of keys, G query heads, K key heads, D head dim.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dilated_attention.backends.base import HALVES, AttentionRequest, Backend, Capabilities, Grads, Keys, Options, Result, Views, new_lse
from dilated_attention.backends.flash import flash3

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
# keys summed in the tensor cores' short accumulator before the sum moves to a float32 one. With values of +1 in one half of 131,072 keys
# and −1 in the other, the relative error is 2.0 in one sum, 0.22 at 8192 and 0.18 at 4096; the last two add 8 and 16 % to the time
# (H200, D = 128)
KEYS_A_SUM = 8192
# the largest number of splits that the library's combining kernel accepts
_MOST_SPLITS = 128
# the largest size of the float32 results of all splits of a launch
_SPLIT_BYTES = 2**30
# a launch has at least so many rows, even if its results then are larger than that
_LEAST_ROWS = 1024


class Flash3Fp8Backend(Backend):
    """``fa3_fwd::fwd`` on e4m3 copies of q, k and v (Hopper, forward only); the kernel rounds out to bfloat16.

    Two effects matter:

    * The tensor cores sum 8-bit products with less precision than float32. A sum of values with the same sign comes out too small, and
      the error grows with the number of terms: values of mean 1 were 2.4 % wrong over 2048 keys, 57 % over 131,072. So the mean of the
      values is subtracted first (0.2 % at any length), and more than ``KEYS_A_SUM`` keys are summed in parts that are added in float32.
    * A constant in the keys costs mantissa bits that the scores need, so their mean is subtracted too.

    It pays for long dense rows only: on segments of 2048 rows rounding takes longer than the faster products save.
    """

    name = "flash3_fp8"
    capabilities = Capabilities(
        devices=frozenset({"cuda"}),
        dtypes=HALVES,
        precisions=frozenset({"fp8"}),
        package="flash-attn-3-fp8",
        install="pip install --no-deps fa3-fwd, or dilated_attention.backends.flash.flash3_fp8.load_library() on its _C.abi3.so",
        compute_capabilities=((9, 0), (9, 0)),
        head_dim_multiple=16,
        backward=False,
        max_batch=65_535,
        source="H200, fa3-fwd 0.0.3, dense 131,072 keys, quantising included: 590 TFLOP/s at D = 64, 798 at 128",
    )

    def __init__(self, keys_a_sum: int = KEYS_A_SUM) -> None:
        """Accepts another number of keys per sum, for tests."""
        self._keys_a_sum = keys_a_sum

    def more_reasons(self, request: AttentionRequest) -> list[str]:
        if request.needs_grad and request.precision == "fp8":
            return ['its forward gives no gradients: call it under torch.no_grad(), or train with precision="native"']
        return []

    def forward(self, q: Tensor, k: Tensor, v: Tensor, options: Options, keys: Keys = None, **__: Views) -> Result:
        assert keys is None
        (P, L, G, D), (S, K) = q.shape, k.shape[1:3]
        assert not options.causal or L == S
        q8, q_scale, _ = quantise(q, K)
        (k8, k_scale, k_mean), (v8, v_scale, v_mean) = (quantise(x, K, centre=True) for x in (k, v))
        out = q.new_empty(q.shape, dtype=torch.bfloat16)
        lse = new_lse(q)
        num_splits = min(_MOST_SPLITS, -(-S // self._keys_a_sum))
        # of several splits the library keeps a float32 out each, so the rows are cut into launches that bound its memory
        rows = L if num_splits == 1 else max(_LEAST_ROWS, _SPLIT_BYTES // (num_splits * P * G * D * 4))
        for start in range(0, L, rows):
            end = min(start + rows, L)
            # a causal launch aligns its last row with its last key
            seen = end if options.causal else S
            # the arguments of flash3.forward's launch, with scales in the three places for fp8; no window (−1)
            sides, after_window = (-1, -1), (0, 0.0, True, None, num_splits, None, 0)
            _, part_lse, *_ = _ops().fwd(
                q8[:, start:end], k8[:, :seen], v8[:, :seen], *(None,) * 3, out[:, start:end], *(None,) * 13, q_scale, k_scale,
                v_scale, options.scale, options.causal, *sides, *after_window,
            )  # fmt: skip
            lse[:, :, start:end] = part_lse
        # adds in place what quantise has taken away: scale·q·mean(k) and mean(v), with the query heads of a key head in a dimension
        lse.unflatten(1, (K, -1)).add_(torch.einsum("plkgd,pkd->pkgl", q.unflatten(2, (K, -1)).float(), k_mean), alpha=options.scale)
        out.unflatten(2, (K, -1)).add_(v_mean[:, None, :, None])
        return out.to(q.dtype), lse

    def backward(self, *_: Any, **__: Any) -> Grads:
        raise NotImplementedError("flash3_fp8 has no backward, and selection never asks it for one")


def quantise(x: Tensor, num_scales: int, *, centre: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Rounds x (P, L, G, D) to 8 bits with ``num_scales`` scales K a problem; ``centre`` subtracts each channel's average.

    Returns y (P, L, G, D) e4m3, last stride 1 · descale (P, K) float32 · mean (P, K, D) float32, which is meaningless without ``centre``.
    Only finite elements enter scales and means. A NaN or an infinity becomes e4m3's NaN, so it is not lost.
    """
    # (P, L, K, G/K, D)
    groups = x.unflatten(2, (num_scales, -1)).float()
    finite = groups.abs() < torch.inf
    average = torch.where(finite, groups, 0.0).mean((1, 3)) if centre else groups.new_zeros(x.shape[0], num_scales, x.shape[3])
    groups = groups - average[:, None, :, None]
    # the reciprocal of a smaller amax is not representable in float32; such values become zeros
    amax = torch.where(finite, groups.abs(), 0.0).amax((1, 3, 4)).clamp_min(1e-30)
    descale = amax / E4M3_MAX
    # 448 as a tensor: torch computes a Python number over amax as 448 · (1 / amax), which rounds twice. Clamped, because rounding may carry
    # the largest element past 448, and the cast would make that NaN
    scaled = (groups * (torch.full_like(amax, E4M3_MAX) / amax)[:, None, :, None, None]).clamp(-E4M3_MAX, E4M3_MAX)
    y = torch.where(finite, scaled, torch.nan).to(E4M3)
    # avg(x − y · descale), from averages: what is not finite counts as 0 in both
    mean = average - torch.where(finite, y.float(), 0.0).mean((1, 3)) * descale[:, :, None]
    return y.flatten(2, 3), descale, mean


def load_library(path: str | Path) -> None:
    """Registers ``fa3_fwd::fwd`` from ``fa3_fwd/_C.abi3.so`` of the package fa3-fwd, if that is unpacked rather than installed."""
    flash3.load_library(path)
    if not hasattr(torch.ops.fa3_fwd, "fwd"):
        raise ValueError(f"{path} does not register fa3_fwd::fwd; expected fa3_fwd/_C.abi3.so of the package fa3-fwd")


def _ops() -> Any:
    if not hasattr(torch.ops.fa3_fwd, "fwd"):
        # loaded by path, since its Python module imports another one that the package does not contain
        spec = importlib.util.find_spec("fa3_fwd")
        folders = [] if spec is None else list(spec.submodule_search_locations or ())
        torch.ops.load_library(str(next(file for folder in folders for file in Path(folder).glob("_C*.so"))))
    return torch.ops.fa3_fwd
