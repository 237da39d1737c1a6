"""torch's FlexAttention, compiled by Triton: for any mask, float32, and head dims that flash kernels refuse."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from dilated_attention.backends.base import HALVES, AttentionRequest, Backend, Capabilities, Grads, Keys, Options, Result, Views
from dilated_attention.backends.mask_convert import clear_empty_rows
from dilated_attention.pattern.blocks.block_lists import BLOCK_SIZES, BlockLists
from dilated_attention.pattern.blocks.flex_mask import block_mask_of

# limit of recompiles for one kind of call: each new stride order costs one, and so does a batch, head count or length of 1; torch allows 8
_RECOMPILE_LIMIT = 64
_BLOCK = 128
_LSE_ONLY = AuxRequest(lse=True)


class FlexBackend(Backend):
    """``torch.nn.attention.flex_attention`` with its Triton kernels; lse is differentiable there.

    Flex does not expose its backward as a function. To get the contribution of a part to a merged softmax, its autograd is used instead:
    with w = exp(lse_part − lse), the part's out gets the gradient w·dout and its lse gets w·(rowsum(dout ∘ (out_part − out)) + dlse),
    which is the derivative of the merge. This costs an additional forward.
    """

    name = "flex"
    capabilities = Capabilities(
        devices=frozenset({"cuda"}),
        dtypes=HALVES | {torch.float32},
        compute_capabilities=((7, 0), (12, 1)),
        key_mask=True,
        window=True,
        softcap=True,
        lse_grad=True,
        max_batch=65_535,
        max_extent=2**31,
        block_sizes=BLOCK_SIZES,
        block_masks=frozenset({"none", "interval"}),
        package="triton",
        install="pip install triton",
        source="H200, torch 2.11, triton 3.6",
    )

    def more_reasons(self, request: AttentionRequest) -> list[str]:
        return [f"head_dim is at least 16, not {request.head_dim}"] if request.head_dim < 16 else []

    def forward(self, q: Tensor, k: Tensor, v: Tensor, options: Options, keys: Keys = None, **__: Views) -> Result:
        assert keys is None or isinstance(keys, BlockLists)
        with torch.no_grad():
            part_out, lse = _flex(q, k, v, options, keys)
        part_out = part_out.transpose(1, 2)
        if keys is not None:
            # with lists per head, different rows are empty in each head
            return part_out.masked_fill((lse == -torch.inf).transpose(1, 2)[..., None], 0.0), lse
        empty = (lse == -torch.inf).all(1) if not options.mask.is_trivial else None
        return clear_empty_rows(part_out, lse, empty)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, options: Options, keys: Keys = None, *,
        dlse: Tensor | None = None, **__: Views,
    ) -> Grads:  # fmt: skip
        assert keys is None or isinstance(keys, BlockLists)
        if keys is not None:
            # a row without keys has the weight exp(−inf − lse), which is 0 with an lse of +inf and NaN with −inf
            lse = lse.masked_fill(lse == -torch.inf, torch.inf)
        with _autograd_inside_an_op():
            q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
            part_out, part_lse = _flex(q, k, v, options, keys)
            out_PGLD, dout_PGLD = (x.transpose(1, 2).float() for x in (out, dout))
            with torch.no_grad():
                weight = (part_lse - lse).exp()
                lse_grad = (dout_PGLD * (part_out.float() - out_PGLD)).sum(-1)
                if dlse is not None:
                    lse_grad = lse_grad + dlse
                out_grad = (dout_PGLD * weight[..., None]).to(part_out.dtype)
            dq, dk, dv = torch.autograd.grad((part_out, part_lse), (q, k, v), (out_grad, (weight * lse_grad).to(part_lse.dtype)))
        return dq, dk, dv


def _flex(q: Tensor, k: Tensor, v: Tensor, options: Options, lists: BlockLists | None) -> Result:
    """Returns (out (P, G, L, D), lse (P, G, L))."""
    band = (None, 0) if options.causal else options.mask.band
    if lists is not None:
        assert band is None, "block lists already include causality and the window"
        mask = lists.derived("flex", block_mask, by_length=True)
        name = f"{lists.q_block}x{lists.k_block} {lists.mask_kind}"
    elif band is not None:
        mask, name = _band_block_mask(band, q.shape[1], k.shape[1], str(q.device)), "band"
    else:
        mask, name = None, "full"
    padding = options.mask.padding
    padding = None if padding is None else padding.expand(q.shape[0], -1).contiguous()
    cap = _scalar(options.softcap, q.device) if options.softcap else None
    score_mod = None if padding is None and cap is None else _score_mod(padding, cap)
    kind = (q.dtype, q.shape[-1], q.shape[2], k.shape[2], name, padding is None, cap is None, q.requires_grad)
    # torch's default tiles may be 128 wide, which does not divide blocks of 64; with autotuning it measures its other tile sizes
    search = lists is not None and min(lists.q_block, lists.k_block) < _BLOCK
    # torch's kernel for few queries reads the list of only one query block
    kernel = None if lists is None else {"FORCE_USE_FLEX_ATTENTION": True}
    with torch._dynamo.config.patch(recompile_limit=_RECOMPILE_LIMIT):
        out, aux = _compiled(kind, search)(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            score_mod=score_mod,
            block_mask=mask,
            scale=options.scale,
            enable_gqa=q.shape[2] != k.shape[2],
            kernel_options=kernel,
            return_aux=_LSE_ONLY,
        )
    return out, aux.lse


@contextmanager
def _autograd_inside_an_op() -> Iterator[None]:
    """Enables autograd inside the context: a custom op otherwise runs below it."""
    keys = torch._C.DispatchKey
    exclude = torch._C._dispatch_tls_local_exclude_set()
    for key in (keys.AutogradFunctionality, keys.AutogradOther, keys.AutogradNestedTensor, keys.ADInplaceOrView):
        exclude = exclude.remove(key)
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), exclude), torch.enable_grad():
        yield


def _call_flex(q: Tensor, k: Tensor, v: Tensor, **settings: Any) -> Any:
    return flex_attention(q, k, v, **settings)


@functools.lru_cache(maxsize=256)
def _compiled(kind: tuple[Any, ...], search: bool) -> Any:
    """Returns one compiled function for each kind of call.

    Dynamo counts recompiles per code object, so each function gets its own: a process that meets many shapes would otherwise use up one
    function's limit.
    """
    function = types.FunctionType(_call_flex.__code__.replace(co_name=f"flex_{hash(kind) & 0xFFFFFF:x}"), _call_flex.__globals__)
    # with fullgraph this raises past the limit, where a plain compile would silently materialise every score
    return torch.compile(function, fullgraph=True, dynamic=True, options={"max_autotune": True} if search else None)


@functools.lru_cache(maxsize=64)
@torch.inference_mode(False)
def _band_block_mask(band: tuple[int | None, int | None], num_queries: int, num_keys: int, device: str) -> Any:
    """Returns the band as a BlockMask, with lists computed from the blocks' corners: create_block_mask would materialise every pair."""
    lowest = -num_queries if band[0] is None else band[0]
    highest = num_keys if band[1] is None else band[1]
    q_first = torch.arange(0, num_queries, _BLOCK, device=device)[:, None]
    k_first = torch.arange(0, num_keys, _BLOCK, device=device)[None, :]
    q_last, k_last = (q_first + _BLOCK - 1).clamp(max=num_queries - 1), (k_first + _BLOCK - 1).clamp(max=num_keys - 1)
    visited = (k_last - q_first >= lowest) & (k_first - q_last <= highest)
    full = visited & (k_first - q_last >= lowest) & (k_last - q_first <= highest)
    # a ragged last block counts as masked, since kernels skip bounds checks in full blocks
    full &= (q_first + _BLOCK <= num_queries) & (k_first + _BLOCK <= num_keys)
    # the closure holds tensors, since every value of an integer would compile a separate kernel
    low, high = torch.tensor(lowest, device=device), torch.tensor(highest, device=device)

    def in_band(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (kv_idx - q_idx >= low) & (kv_idx - q_idx <= high)

    return BlockMask.from_kv_blocks(
        *_ordered(visited & ~full), *_ordered(full), BLOCK_SIZE=_BLOCK, mask_mod=in_band, seq_lengths=(num_queries, num_keys)
    )


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """bool (rows, columns) → (count, indices with those of the set columns first), with the batch and head dimensions that flex expects."""
    count = blocks.sum(-1, dtype=torch.int32)
    indices = blocks.to(torch.uint8).argsort(dim=-1, descending=True, stable=True).to(torch.int32)
    return count[None, None], indices[None, None]


@functools.lru_cache(maxsize=64)
@torch.inference_mode(False)
def _scalar(value: float, device: torch.device) -> Tensor:
    """Returns the number as a tensor (): every value of a Python number would compile a separate kernel."""
    return torch.tensor(value, dtype=torch.float32, device=device)


def _score_mod(padding: Tensor | None, cap: Tensor | None) -> Any:
    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        if cap is not None:
            score = cap * torch.tanh(score / cap)
        return score if padding is None else torch.where(padding[b, kv_idx], -float("inf"), score)

    return score_mod


@torch.inference_mode(False)
def block_mask(lists: BlockLists) -> Any:
    """Returns the BlockMask of ``lists`` with masks "none" or "interval"."""
    assert lists.mask_kind in ("none", "interval"), lists.mask_kind
    mask_mod = _every_pair if lists.masks is None or lists.interval is None else _in_interval(*lists.interval)
    # ragged blocks at the end are listed like any other: the kernels check the end of both kinds
    return block_mask_of(lists, mask_mod, asks_all=True)


def _every_pair(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return kv_idx >= 0


def _in_interval(low: Tensor, high: Tensor) -> Any:
    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (kv_idx >= low[q_idx]) & (kv_idx < high[q_idx])

    return mask_mod
