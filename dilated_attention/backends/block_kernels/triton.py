"""Block lists by this project's own Triton kernels: for any GPU that Triton supports, any head dim, and masks of single pairs.

Nothing is gathered or transposed: the kernels read q, k, v in place. No atomics are used, so gradients are the same in every run.
"""

from __future__ import annotations

from collections.abc import Hashable
from concurrent.futures import Future
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dilated_attention.backends.base import HALVES, AttentionRequest, Backend, Capabilities, Keys, Options, Views, new_lse
from dilated_attention.backends.hardware import on_device
from dilated_attention.backends.tiles.scratch import LARGE_MEMORY
from dilated_attention.backends.tiles.sizes import TileSizes, head_blocks, sizes
from dilated_attention.pattern.blocks.block_lists import BLOCK_SIZES, BlockLists

# roughly the number of programs that a GPU runs at a time; it only determines which lists count as long
_PROGRAMS = 128
# see ``lists.Form.masks``
_MASK_KINDS = {"none": 0, "interval": 1, "bits": 2}
# the smallest scale passed to the forward kernel: 0 times the −inf of a masked pair would be NaN
_SMALLEST_SCALE = 1e-30
_LOG2_E = 1.4426950408889634
# compilations that were begun, by what the kernel depends on; None for one that has ended
_compilations: dict[Hashable, Future[Any] | None] = {}


class TritonBlocksBackend(Backend):
    """Computes only block-sparse attention; dense problems have better kernels.

    Its kernels are those over a table of tiles (``backends/tiles``), which find the next keys in a list. The backward pass recomputes the
    scores twice, for dq by query blocks and for dk and dv by key blocks: 7 products instead of 5, which avoids atomics. One program
    computes a tile of a block; the longest lists are started first.
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
        if request.dtype is torch.float32 and request.head_dim > 128 and capability and capability not in LARGE_MEMORY:
            limit = f"compute capability {capability[0]}.{capability[1]}"
            return [f"float32 with head_dim {request.head_dim} needs more shared memory than {limit} has; head_dim up to 128 does not"]
        return []

    def forward(self, q: Tensor, k: Tensor, v: Tensor, options: Options, keys: Keys | None = None, **__: Views) -> tuple[Tensor, Tensor]:
        """Computes the softmax attention over the kept pairs.

        Args:
            q, k, v: (B, Nq, H, D), (B, Nk, K, D) twice; float16, bfloat16 or float32, D ≤ 256, any strides with the last one 1.

        Returns:
            out (B, Nq, H, D) in q's dtype and lse (B, H, Nq) float32, contiguous; 0 and −inf in a row without keys.
        """
        from dilated_attention.backends.tiles.forward import forward_kernel

        call = _Call(q, k, v, keys, options)
        out, lse = torch.empty(q.shape, dtype=q.dtype, device=q.device), new_lse(q)
        # in place of the lse of parts, tables, words of dropout and a bias
        unread = lse
        tensors = q, k, v, out, lse, out, unread, unread, unread, call.padding, unread, unread, unread, unread
        strides = *_strides(q, k, v, out), call.padding.stride(0), 0
        scale = max(abs(options.scale), _SMALLEST_SCALE) * _LOG2_E
        # direct, left, right, scale, threshold, keep_scale
        numbers = *call.sizes, 0, 0, 0, scale, 0, 1.0
        call.launch("forward", forward_kernel, tensors, (*strides, *numbers), ZERO_KEYS=False)()
        return out, lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, options: Options, keys: Keys | None = None, *,
        dlse: Tensor | None = None, **__: Views,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Computes the contributions of the kept pairs to the gradients of a softmax, of which these pairs may be only a part.

        Args:
            dout, out: (B, Nq, H, D); out and lse are those of the whole softmax.
            lse, dlse: (B, H, Nq) of any strides; rows whose lse is not finite take no part.

        Returns:
            dq, dk, dv, contiguous, in q's dtype; summed in float32.
        """
        from dilated_attention.backends.tiles.backward import key_kernel, query_kernel

        call = _Call(q, k, v, keys, options)
        dout, out = (x if x.stride(3) == 1 else x.contiguous() for x in (dout.to(q.dtype), out))
        lse = lse.contiguous()
        dq, dk, dv = (torch.empty(x.shape, dtype=q.dtype, device=q.device) for x in (q, k, v))
        # δ and lse · log2(e) of each row
        stats = torch.empty(2 * lse.numel(), dtype=torch.float32, device=q.device)
        pad, numbers = call.padding.stride(0), (0, 0, 0, options.scale * _LOG2_E, options.scale, 0, 1.0)
        of_dlse = (0, 0, 0) if dlse is None else (dlse.stride(0), dlse.stride(2), dlse.stride(1))
        B, H, _, group, *rows = call.sizes
        unread = lse
        of_rows = q, k, v, out, lse, dout, unread if dlse is None else dlse, stats, dq, dq
        tensors = *of_rows, unread, unread, call.padding, unread, unread, unread, unread
        strides = *_strides(q, k, v, out, dout, dq), *of_dlse, pad, 0
        of_queries = *strides, *call.sizes, q.shape[1], *numbers
        query = call.launch("query", query_kernel, tensors, of_queries, OWN=False, DLSE=dlse is not None)
        read_and_written = q, k, v, dout, stats, dk, dv, dk, dv, unread, unread, call.padding, unread, unread
        # batches, heads, key heads and heads of offsets
        of_keys = *_strides(q, k, v, dout, dk, dv), pad, B, H, H // group, H, group, *rows, q.shape[1], *numbers
        # the GPU computes dq while the host makes the lists of the other kernel, but for the first time, when both kernels compile
        if not (is_first := query.start()):
            query()
        key = call.launch("key", key_kernel, read_and_written, of_keys, SHARED=True)
        if is_first:
            key.start()
            query()
        key()
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


class _Launch(NamedTuple):
    """A kernel with its arguments, for so many programs. ``kind``: all that its compiled form depends on, beside ``options["FORM"]``."""

    kernel: Any
    programs: int
    device: torch.device
    kind: tuple[Any, ...]
    arguments: tuple[Any, ...]
    options: dict[str, Any]

    def start(self) -> bool:
        """Starts compiling the kernel for a GPU, and its other form, for lengths that do or do not fill the last block: the first of these
        would wait for it. Returns whether it does, which it does once for a kind."""
        form, lists = self.options["FORM"], self.options["lists"]
        if (self.kind, form) in _compilations or self.device.type != "cuda" or not self.programs:
            return False
        # what follows needs Triton
        from dilated_attention.backends.tiles import ahead

        # the interpreter compiles nothing
        if not (ahead.knows_triton() and hasattr(self.kernel, "params")):
            return False
        # dtypes in place of tensors, which would live as long as the compilation
        arguments, of_lists = ([x.dtype if isinstance(x, Tensor) else x for x in given] for given in (self.arguments, lists))
        options = self.options | {"lists": type(lists)(*map(ahead.stand_in, of_lists))}
        for some in (form, form._replace(even=not form.even)):
            _compilations[self.kind, some] = ahead.submit(self.kernel, arguments, options | {"FORM": some}, self.device.index or 0)
        return True

    def __call__(self) -> None:
        if not self.programs:
            return
        self.start()
        key = self.kind, self.options["FORM"]
        if (compilation := _compilations.get(key)) is not None:
            # waits; after an error the launch compiles again and raises its own
            compilation.exception()
            _compilations[key] = None
        with on_device(self.device):
            self.kernel[(self.programs,)](*self.arguments, **self.options)


class _Call:
    """What the launches of a pass share.

    Args:
        padding: (B or 1, Nk) uint8, or a tensor that is not read.
        sizes: the kernels' arguments from ``num_batches`` to ``part_rows``.
    """

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, keys: Keys | None, options: Options) -> None:
        assert isinstance(keys, BlockLists)
        (B, Nq, H, self.head_dim), (_, Nk, K, _) = q.shape, k.shape
        assert not options.causal and options.dropout is None and options.mask.band is None, "block lists already say which pairs are kept"
        assert (Nq, Nk) == (keys.num_queries, keys.num_keys) and v.shape == k.shape and k.dtype == v.dtype == q.dtype and H % K == 0
        assert keys.num_batch in (1, B) and keys.num_heads in (1, H)
        assert all(x.stride(3) == 1 or self.head_dim == 1 for x in (q, k, v))
        self.lists, self.dtype, self.device, self.negative = keys, q.dtype, q.device, options.scale < 0
        self.is_padded, self.padding = options.mask.padding is not None, keys.row_starts[None]
        if options.mask.padding is not None:
            padding = options.mask.padding.view(torch.uint8)
            self.padding = padding if padding.stride(1) == 1 else padding.contiguous()
            self.padding = self.padding.expand(B, -1)
        self.sizes = B, H, H, H // K, 0, Nq, Nq, Nk, 0

    def launch(self, which: str, kernel: Any, tensors: tuple[Tensor, ...], numbers: tuple[float, ...], **flags: bool) -> _Launch:
        from dilated_attention.backends.tiles.lists import Form, Lists

        lists, (B, H, _, group, *_) = self.lists, self.sizes
        starts, others, masks = lists.row_starts, lists.columns, lists.masks
        if which == "key":
            starts, others, masks = lists.by_column
            blocks, visited, num_lists, heads = (lists.k_block, lists.q_block), lists.num_queries, lists.num_columns, H // group
            order = column_order(lists, group)
        else:
            blocks, visited, num_lists, heads = (lists.q_block, lists.k_block), lists.num_keys, lists.num_rows, H
            order = row_order(lists)
        size = _sizes_for(which, self.head_dim, self.dtype, blocks[0], self.device)
        programs = num_lists * (blocks[0] // size.rows) * B * heads
        low, high = lists.interval or (starts, starts)
        data = Lists(starts, others, starts if masks is None else masks, lists.bits, low, high, order.places, order.heavy)
        kept = *blocks, _MASK_KINDS[lists.mask_kind], visited % blocks[1] == 0, lists.num_batch > 1, lists.num_heads > 1
        D0, D1 = head_blocks(self.head_dim)
        options = {
            "D": self.head_dim, "D0": D0, "D1": D1, "ROWS": size.rows, "PARTS": blocks[0] // size.rows, "BLOCK": size.block,
            "STAGES": size.stages, "PRECISION": "ieee", "LEFT": False, "RIGHT": False, "CUT": False, "PADDING": self.is_padded,
            "DROPOUT": False, "BIAS": False, "lists": data,
            "FORM": Form(*kept, self.negative), **flags,
            "num_warps": size.warps, "num_stages": size.stages,
        }  # fmt: skip
        kind = which, self.device, self.dtype, self.head_dim, size, self.is_padded, *flags.values()
        return _Launch(kernel, programs, self.device, kind, (*tensors, *numbers), options)


def _sizes_for(which: str, head_dim: int, dtype: torch.dtype, block: int, device: torch.device) -> TileSizes:
    small = device.type == "cuda" and torch.cuda.get_device_capability(device) not in LARGE_MEMORY
    return sizes(which, head_dim, dtype, block, small, lists=True)


def _strides(*tensors: Tensor) -> tuple[int, ...]:
    """Returns the strides of batch, token and head of each tensor."""
    return tuple(stride for x in tensors for stride in x.stride()[:3])
