"""This project's kernels over a table of tiles (``tiles/``).

They compute one dense problem, or a whole call with two launches in the forward and three in the backward.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dilated_attention.backends.base import HALVES, AttentionRequest, Backend, Capabilities, Keys, Options, Views, new_lse, new_results
from dilated_attention.backends.dropout import Words

if TYPE_CHECKING:
    from dilated_attention.backends.tiles.call import Prepared, TileCall


_MAX_FLOAT32 = 128


class TilesBackend(Backend):
    """Supports every option of a call except float64 and fp8. Gradients repeat bit for bit, since no atomics are used.

    The backward pass computes scores twice, once for dq and once for dk and dv: 7 products instead of 5.
    """

    name = "tiles"
    capabilities = Capabilities(
        devices=frozenset({"cuda"}),
        dtypes=HALVES | {torch.float32},
        compute_capabilities=((8, 0), (12, 1)),
        key_mask=True,
        window=True,
        native_window=True,
        dropout=True,
        bias=True,
        lse_grad=True,
        writes_views=True,
        aligned_last=True,
        whole_calls=True,
        package="triton",
        install="pip install triton",
        source="H200, Triton 3.6, bench speed --cases short",
    )

    def more_reasons(self, request: AttentionRequest) -> list[str]:
        if request.dtype is torch.float32 and request.head_dim > _MAX_FLOAT32:
            return [f"float32 with head_dim {request.head_dim} spills registers; head_dim up to {_MAX_FLOAT32} does not"]
        return []

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, options: Options, keys: Keys | None = None, *, out: Views = (None, None)
    ) -> tuple[Tensor, Tensor]:
        from dilated_attention.backends.tiles import run

        assert keys is None
        (result,), lse = new_results(out[:1], (q,)), out[1]
        # the kernel writes lse densely
        dense = lse if lse is not None and lse.is_contiguous() else new_lse(q)
        run.forward(_prepared(q, k, options), q, k, v, result, dense, **_masks(options, k))
        return result, dense

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, options: Options, keys: Keys | None = None, *,
        dlse: Tensor | None = None, grads: Views = (None, None, None),
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        from dilated_attention.backends.tiles import run

        assert keys is None
        masks = _masks(options, k)
        results = new_results(grads, (q, k, v))
        if "padding" in masks:
            # the kernel of dq requires that padded keys and values are zeros
            k, v = (x.masked_fill(masks["padding"][:, :, None, None], 0) for x in (k, v))
        run.backward(_prepared(q, k, options), (dout, q, k, v, out, lse.contiguous()), dlse, results, **masks)
        return results  # type: ignore[return-value]


def float32_precision() -> str:
    """Returns how float32 products are computed: as three products of tf32 parts, which are as exact, or as one if torch allows it."""
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "tf32x3"


def _prepared(q: Tensor, k: Tensor, options: Options) -> Prepared:
    from dilated_attention.backends.tiles.call import prepared

    band = options.mask.band
    if options.causal:
        # the last query sees the last key
        band = (None, k.shape[1] - q.shape[1])
    call = _dense_call(q.shape[1], k.shape[1], q.shape[2], options.scale, band, float32_precision())
    return prepared(call, q.shape[0], k.shape[2], q.shape[3], q.dtype, q.device)


@functools.lru_cache(maxsize=1024)
def _dense_call(
    num_queries: int, num_keys: int, heads: int, scale: float, band: tuple[int | None, int | None] | None, precision: str
) -> TileCall:
    from dilated_attention.backends.tiles.call import TileCall
    from dilated_attention.backends.tiles.table import Walk

    longest = max(num_queries, num_keys)
    low, high = band or (None, None)
    walk = Walk(((longest, 1),), ((0, longest),), (0, num_queries), 0, 0, num_keys)
    return TileCall(walk, ((0,) * heads,), scale, None if low is None else -low, high, precision=precision)


def _masks(options: Options, k: Tensor) -> dict[str, Any]:
    masks: dict[str, Any] = {"bias": options.bias}
    # the kernels read masks and words densely, while those of a problem may be views of every r-th position
    if options.mask.padding is not None:
        masks["padding"] = options.mask.padding.expand(k.shape[:2]).contiguous()
    dropout = options.dropout
    if dropout is not None:
        masks |= {"words": Words(*(x.contiguous() for x in dropout.words)), "dropout_p": dropout.probability}
    return masks
