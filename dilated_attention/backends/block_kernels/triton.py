"""Block lists by this project's own Triton kernels: for any GPU that Triton supports, any head dim, and masks of single pairs.

Nothing is gathered or transposed: the kernels read q, k, v in place. No atomics are used, so gradients are the same in every run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dilated_attention.backends.base import HALVES, AttentionRequest, Backend, Capabilities, Keys, Options, Views
from dilated_attention.backends.hardware import on_device
from dilated_attention.pattern.blocks.block_lists import BLOCK_SIZES, BlockLists

# roughly the number of programs that a GPU runs at a time; it only determines which lists count as long
_PROGRAMS = 128
_MASK_KINDS = {"none": 0, "interval": 1, "bits": 2}
# the smallest scale passed to the forward kernel: 0 times the −inf of a masked pair would be NaN
_SMALLEST_SCALE = 1e-30


@dataclass(frozen=True)
class Tile:
    """Queries and keys that a program processes at a time (at most a block of the lists), warps of a program, and loads in flight."""

    rows: int
    keys: int
    warps: int
    stages: int

    def cut(self, lists: BlockLists) -> tuple[int, int, int, int]:
        """Returns (query block, key block, queries, keys), the kernels' WALK."""
        return lists.q_block, lists.k_block, min(self.rows, lists.q_block), min(self.keys, lists.k_block)


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """One tile for each kernel. Rows and keys are powers of two; keys are at least 32, rows at least 16."""

    forward: Tile
    dq: Tile
    dkdv: Tile


# By (dtype class, shared memory, head dim rounded up): "large" has 227 KiB per program (sm_90, sm_100), "medium" 163 (sm_80, sm_87),
# "small" 99 (sm_86, sm_89, sm_120). Timed on an H200 for half precision at 64 and 128 with random blocks of 128x128 at 10 %; the forward
# as a fraction of the proportional speed, dq and dkdv in ms:
# 128: 0.66, 2.16, 3.89 (forward 128x128x8x2: 0.61, dq 128x64x8x2: 2.53, dkdv 64x128x8x2: 4.05);
# 64: 0.77, 4.18, 6.82 (forward 128x128x8x2: 0.56, dq 128x64x8x3: 5.51, dkdv 64x128x8x2: 9.62).
# These times are of the kernels before their last change. The other entries were chosen by the output of ptxas 12.8 (no or few spilled
# registers) and not timed. Hopper at 64 runs two programs per multiprocessor, so that the softmax of one overlaps with the products of the
# other. With mma.sync (sm_80) at 64, every operand is held in registers around the branch for masks, and 64 rows in dkdv do not fit.
_SMALL_64 = Tuning(forward=Tile(128, 64, 4, 3), dq=Tile(64, 64, 4, 3), dkdv=Tile(32, 128, 8, 2))
_FLOAT_64 = Tuning(forward=Tile(64, 64, 8, 2), dq=Tile(64, 32, 8, 2), dkdv=Tile(32, 64, 8, 2))
_FLOAT_128 = Tuning(forward=Tile(64, 32, 8, 2), dq=Tile(64, 32, 8, 2), dkdv=Tile(64, 32, 8, 2))
_FLOAT_256 = Tuning(forward=Tile(16, 32, 8, 2), dq=Tile(32, 32, 8, 2), dkdv=Tile(16, 32, 8, 2))
_TUNINGS = {
    ("half", "large", 64): Tuning(forward=Tile(128, 64, 4, 3), dq=Tile(64, 64, 4, 3), dkdv=Tile(64, 64, 4, 3)),
    ("half", "large", 128): Tuning(forward=Tile(64, 64, 4, 3), dq=Tile(128, 64, 8, 3), dkdv=Tile(64, 128, 8, 3)),
    ("half", "large", 256): Tuning(forward=Tile(128, 64, 8, 2), dq=Tile(64, 32, 8, 2), dkdv=Tile(32, 64, 8, 2)),
    ("half", "medium", 64): _SMALL_64,
    ("half", "medium", 128): Tuning(forward=Tile(128, 64, 8, 3), dq=Tile(64, 64, 8, 2), dkdv=Tile(64, 64, 8, 2)),
    ("half", "medium", 256): Tuning(forward=Tile(64, 64, 8, 2), dq=Tile(64, 32, 8, 2), dkdv=Tile(32, 64, 8, 2)),
    ("half", "small", 64): _SMALL_64,
    ("half", "small", 128): Tuning(forward=Tile(64, 64, 4, 2), dq=Tile(64, 64, 8, 2), dkdv=Tile(64, 64, 8, 2)),
    ("half", "small", 256): Tuning(forward=Tile(64, 32, 4, 2), dq=Tile(32, 32, 4, 2), dkdv=Tile(32, 32, 4, 2)),
    ("float", "large", 64): _FLOAT_64,
    ("float", "large", 128): _FLOAT_128,
    ("float", "large", 256): _FLOAT_256,
    ("float", "medium", 64): _FLOAT_64,
    ("float", "medium", 128): _FLOAT_128,
    ("float", "medium", 256): _FLOAT_256,
    ("float", "small", 64): _FLOAT_64,
    ("float", "small", 128): Tuning(forward=Tile(64, 32, 8, 2), dq=Tile(32, 32, 8, 2), dkdv=Tile(32, 32, 8, 2)),
}


def default_tuning(dtype: torch.dtype, head_dim: int, capability: tuple[int, int] | None) -> Tuning:
    """Returns the tiles for this dtype, head dim and GPU; a ``capability`` of None (the interpreter) counts as Hopper."""
    kind = "float" if dtype is torch.float32 else "half"
    size = 64 if head_dim <= 64 else 128 if head_dim <= 128 else 256
    return _TUNINGS[kind, _shared_memory(capability), size]


def _shared_memory(capability: tuple[int, int] | None) -> str:
    if capability is None or capability[0] in (9, 10):
        return "large"
    return "medium" if capability in ((8, 0), (8, 7)) else "small"


class TritonBlocksBackend(Backend):
    """Computes only block-sparse attention; dense problems have better kernels.

    The backward pass recomputes the scores twice, for dq by query blocks and for dk and dv by key blocks: 7 products instead of 5,
    which avoids atomics. One program computes a whole row or column of blocks; the longest ones are started first.
    """

    name = "triton"
    capabilities = Capabilities(
        devices=frozenset({"cuda"}),
        dtypes=HALVES | {torch.float32},
        compute_capabilities=((8, 0), (12, 1)),
        key_mask=True,
        lse_grad=True,
        block_sizes=BLOCK_SIZES,
        block_masks=frozenset(_MASK_KINDS),
        blocks_only=True,
        package="triton",
        install="pip install triton",
        source="compiled for sm_80, sm_89 and sm_90 by Triton 3.7, interpreted on CPUs",
    )

    def more_reasons(self, request: AttentionRequest) -> list[str]:
        capability = request.hardware.capability
        if request.dtype is torch.float32 and request.head_dim > 128 and capability and _shared_memory(capability) == "small":
            limit = f"compute capability {capability[0]}.{capability[1]}"
            return [f"float32 with head_dim {request.head_dim} needs more shared memory than {limit} has; head_dim up to 128 does not"]
        return []

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, options: Options, keys: Keys | None = None, *, tuning: Tuning | None = None, **__: Views
    ) -> tuple[Tensor, Tensor]:
        """Computes the softmax attention over the kept pairs.

        Args:
            q, k, v: (B, Nq, H, D), (B, Nk, K, D) twice; float16, bfloat16 or float32, D ≤ 256, any strides with the last one 1.
            tuning: None for ``default_tuning``.

        Returns:
            out (B, Nq, H, D) in q's dtype and lse (B, H, Nq) float32, dense; 0 and −inf in a row without keys.
        """
        from dilated_attention.backends.block_kernels import triton_kernels as kernels

        assert isinstance(keys, BlockLists)
        lists, (B, _, H, _) = keys, q.shape
        tile = (tuning or _tuning_for(q)).forward
        problem = _problem(q, k, v, lists, options)
        result = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.empty((B, H, lists.num_queries), dtype=torch.float32, device=q.device)
        walk = tile.cut(lists)
        align, strides = _strides(q, k, v)
        order = row_order(lists)
        grid = (lists.num_rows * (walk[0] // walk[2]) * B * H,)
        if not lists.num_rows * B * H:
            return result, lse
        with on_device(q.device):
            kernels.forward_kernel[grid](
                q, k, v, result, lse, lists.row_starts, lists.columns, lists.masks, *problem.masks, order.places, order.heavy,
                *strides, *problem.padding_strides, lists.num_queries, lists.num_keys, lists.num_rows, B * H, H,
                *problem.steps, *problem.steps, max(abs(options.scale), _SMALLEST_SCALE),
                WALK=walk, NEGATIVE=options.scale < 0, EVEN=lists.num_keys % lists.k_block == 0, ALIGN=align, WIDE=_wide(strides, align),
                **problem.constants, num_warps=tile.warps, num_stages=tile.stages,
            )  # fmt: skip
        return result, lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, options: Options, keys: Keys | None = None, *,
        dlse: Tensor | None = None, tuning: Tuning | None = None, **__: Views,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Computes the contributions of the kept pairs to the gradients of a softmax, of which these pairs may be only a part.

        Args:
            dout, out: (B, Nq, H, D); out and lse are those of the whole softmax.
            lse, dlse: (B, H, Nq) of any strides; rows whose lse is not finite take no part.
            tuning: None for ``default_tuning``.

        Returns:
            dq, dk, dv, dense, in q's dtype; summed in float32.
        """
        from dilated_attention.backends.block_kernels import triton_kernels as kernels

        assert isinstance(keys, BlockLists)
        lists, (B, _, H, D), K = keys, q.shape, k.shape[2]
        tuning = tuning or _tuning_for(q)
        problem = _problem(q, k, v, lists, options)
        dout, out = (x if x.stride(3) == 1 or D == 1 else x.contiguous() for x in (dout.to(q.dtype), out))
        dq, dk, dv = (torch.empty(x.shape, dtype=q.dtype, device=q.device) for x in (q, k, v))
        offset, delta = torch.empty((2, B, H, lists.num_rows * lists.q_block), dtype=torch.float32, device=q.device)
        align, strides = _strides(dout, out)
        dlse_strides = dlse.stride() if dlse is not None else (0, 0, 0)
        constants = {key: problem.constants[key] for key in ("D", "BLOCK_D")}
        with on_device(q.device):
            if lists.num_rows * B * H:
                kernels.rows_kernel[(lists.num_rows * B * H,)](
                    dout, out, lse, dlse, offset, delta, *strides, *_by_token(lse.stride()), *_by_token(dlse_strides),
                    lists.num_queries, lists.num_rows, H,
                    ROWS=lists.q_block, HAS_DLSE=dlse is not None, ALIGN=align, WIDE=_wide(strides, align), **constants, num_warps=4,
                )  # fmt: skip
            align, strides = _strides(dout, q, k, v)
            common = problem.constants | {"ALIGN": align, "WIDE": _wide(strides, align)}
            walk, order = tuning.dq.cut(lists), row_order(lists)
            if lists.num_rows * B * H:
                kernels.dq_kernel[(lists.num_rows * (walk[0] // walk[2]) * B * H,)](
                    dout, q, k, v, dq, offset, delta,
                    lists.row_starts, lists.columns, lists.masks, *problem.masks, order.places, order.heavy,
                    *strides, *problem.padding_strides, lists.num_queries, lists.num_keys, lists.num_rows, B * H, H,
                    *problem.steps, *problem.steps, options.scale,
                    WALK=walk, EVEN=lists.num_keys % lists.k_block == 0, **common, num_warps=tuning.dq.warps, num_stages=tuning.dq.stages,
                )  # fmt: skip
            columns = lists.by_column
            walk, order = tuning.dkdv.cut(lists), column_order(lists, H // K)
            if lists.num_columns * B * K:
                kernels.dkdv_kernel[(lists.num_columns * (walk[1] // walk[3]) * B * K,)](
                    dout, q, k, v, dk, dv, offset, delta,
                    columns.starts, columns.rows, columns.masks, *problem.masks, order.places, order.heavy,
                    *strides, *problem.padding_strides, lists.num_queries, lists.num_keys, lists.num_columns, B * K, K,
                    *problem.steps, *problem.key_steps, lists.num_rows, options.scale,
                    WALK=walk, EVEN=lists.num_queries % lists.q_block == 0, **common,
                    num_warps=tuning.dkdv.warps, num_stages=tuning.dkdv.stages,
                )  # fmt: skip
        return dq, dk, dv


class Order(NamedTuple):
    """The order in which programs process the lists: longest first.

    Lengths are compared in steps of a quarter of the mean, so that neighbours of similar length stay together.

    Args:
        places: (groups, lists) int32, each group's lists in their order.
        heavy: () int32, the number of lists that all heads process before any head continues with the rest: lists so long that they would
            finish after everything else if the last head only began with them in its turn.
    """

    places: Tensor
    heavy: Tensor


def row_order(lists: BlockLists) -> Order:
    """Returns the order of the query blocks' lists, by group; computed once."""
    return lists.derived("triton rows", lambda x: _order(x.row_starts.diff().view(x.num_groups, x.num_rows)))


def column_order(lists: BlockLists, heads_per_key_head: int) -> Order:
    """Returns the order of the key blocks' lists by batch entry and key head, whose program covers all its query heads; computed once."""
    members = heads_per_key_head if lists.num_heads > 1 else 1

    def make(lists: BlockLists) -> Order:
        counts = lists.by_column.starts.diff().view(lists.num_groups // members, members, lists.num_columns)
        return _order(counts.sum(1))

    return lists.derived(("triton columns", members), make)


def _order(counts: Tensor) -> Order:
    num_lists = counts.shape[1]
    coarse = (counts * (4 / counts.float().mean().clamp(min=1e-3))).int()
    heavy = (coarse >= 4 * max(2.0, num_lists / (2 * _PROGRAMS))).sum(1).amax()
    return Order(coarse.argsort(dim=1, descending=True, stable=True).int(), heavy.int())


@dataclass(frozen=True)
class _Problem:
    """The arguments that all kernels share.

    ``steps`` are the strides of a batch entry and a head in the groups of lists; ``key_steps`` are those of a batch entry and a key head.
    """

    masks: tuple[Tensor | None, ...]
    padding_strides: tuple[int, int]
    steps: tuple[int, int]
    key_steps: tuple[int, int]
    constants: dict[str, Any]


def _problem(q: Tensor, k: Tensor, v: Tensor, lists: BlockLists, options: Options) -> _Problem:
    (B, Nq, H, D), (_, Nk, K, _) = q.shape, k.shape
    assert not options.causal and options.dropout is None and options.mask.band is None, "block lists already say which pairs are kept"
    assert (Nq, Nk) == (lists.num_queries, lists.num_keys) and v.shape == k.shape and k.dtype == v.dtype == q.dtype and H % K == 0
    assert lists.num_batch in (1, B) and lists.num_heads in (1, H)
    assert all(x.stride(3) == 1 or D == 1 for x in (q, k, v))
    padding, padding_strides = options.mask.padding, (0, 0)
    if padding is not None:
        padding_strides = (padding.stride(0) if padding.shape[0] > 1 else 0, padding.stride(1))
        padding = padding.view(torch.uint8)
    low, high = lists.interval or (None, None)
    batch, head = int(lists.num_batch > 1), int(lists.num_heads > 1)
    constants = {
        "GROUP": H // K,
        "D": D,
        "BLOCK_D": max(16, 1 << (D - 1).bit_length()),
        "MASKS": _MASK_KINDS[lists.mask_kind],
        "PADDED": padding is not None,
    }
    key_heads = lists.num_heads * K // H if head else 1
    bits = lists.bits if lists.mask_kind == "bits" else None
    return _Problem((bits, low, high, padding), padding_strides, (batch * lists.num_heads, head), (batch * key_heads, head), constants)


def _tuning_for(q: Tensor) -> Tuning:
    capability = torch.cuda.get_device_capability(q.device) if q.device.type == "cuda" else None
    return default_tuning(q.dtype, q.shape[3], capability)


def _strides(*tensors: Tensor) -> tuple[int, list[int]]:
    """Returns (align, strides of batch, token and head of each tensor in units of align).

    align is a power of two up to 16 that divides all strides. A kernel that knows it can load 16 bytes at a time.
    """
    strides = [0 if size == 1 else stride for x in tensors for stride, size in zip(x.stride()[:3], x.shape[:3], strict=True)]
    align = math.gcd(16, *strides)
    return align, [stride // align for stride in strides]


def _wide(strides: list[int], align: int) -> bool:
    return max(strides[1::3]) * align * 128 >= 2**31


def _by_token(strides: tuple[int, ...]) -> tuple[int, int, int]:
    """Reorders the strides of (B, H, N) as batch, token, head."""
    return strides[0], strides[2], strides[1]
