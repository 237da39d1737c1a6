"""This project's own kernels (``tiles/``), over a table of tiles or over lists of blocks. Nothing is gathered or transposed: they read q, k
and v in place; only a dense backward under padding copies k and v. No atomics are used, so gradients are the same in every run."""

from __future__ import annotations

from collections.abc import Hashable
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from dilated_attention.backends.base import (
    HALVES,
    AttentionRequest,
    Backend,
    Capabilities,
    Grads,
    Keys,
    Options,
    Result,
    Views,
    new_lse,
    new_results,
)
from dilated_attention.backends.dropout import Words
from dilated_attention.backends.hardware import on_device
from dilated_attention.backends.tiles.table import LARGE_MEMORY, head_blocks, sizes, strides_of
from dilated_attention.pattern.blocks.block_lists import BLOCK_SIZES, BlockLists

if TYPE_CHECKING:
    from dilated_attention.backends.tiles.call import Prepared


# the largest head dim in float32
_MAX_FLOAT32 = 128
# roughly the number of programs that a GPU runs at a time; it only determines which lists count as long
_PROGRAMS = 128
# see ``rows.Form.masks``
_MASK_KINDS = {"none": 0, "interval": 1, "bits": 2}
_LOG2_E = 1.4426950408889634
# compilations that were begun, by what the kernel depends on; None for one that has ended
_compilations: dict[Hashable, Future[Any] | None] = {}
# what both backends have in common
_OURS = Capabilities(
    devices=frozenset({"cuda"}),
    dtypes=HALVES | {torch.float32},
    compute_capabilities=((8, 0), (12, 1)),
    key_mask=True,
    lse_grad=True,
    package="triton",
    install="pip install triton",
)


class TilesBackend(Backend):
    """Supports every option of a call but float64, fp8 and softcap: one dense problem, or a whole call with two launches in the forward and
    three in the backward.

    The backward pass computes scores twice, once for dq and once for dk and dv: 7 products instead of 5.
    """

    name = "tiles"
    capabilities = replace(
        _OURS,
        window=True,
        native_window=True,
        dropout=True,
        bias=True,
        writes_views=True,
        aligned_last=True,
        whole_calls=True,
        source="H200, Triton 3.6, bench speed --cases short",
    )

    def more_reasons(self, request: AttentionRequest) -> list[str]:
        if request.dtype is torch.float32 and request.head_dim > _MAX_FLOAT32:
            return [f"float32 with head_dim {request.head_dim} spills registers; head_dim up to {_MAX_FLOAT32} does not"]
        return []

    def forward(self, q: Tensor, k: Tensor, v: Tensor, options: Options, keys: Keys = None, *, out: Views = (None, None)) -> Result:
        from dilated_attention.backends.tiles import run

        assert keys is None
        out_view, lse_view = out
        (result,) = new_results((out_view,), (q,))
        # the kernel writes a contiguous lse; the caller copies it to any other view
        lse = lse_view if lse_view is not None and lse_view.is_contiguous() else new_lse(q)
        run.forward(_prepared(q, k, options), q, k, v, result, lse, **_mask_arguments(options, k))
        return result, lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, options: Options, keys: Keys = None, *,
        dlse: Tensor | None = None, grads: Views = (None, None, None),
    ) -> Grads:  # fmt: skip
        from dilated_attention.backends.tiles import run

        assert keys is None
        masks = _mask_arguments(options, k)
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
    from dilated_attention.backends.tiles.call import TileCall, prepared
    from dilated_attention.backends.tiles.table import Walk

    (B, Nq, H, D), (Nk, Hk) = q.shape, k.shape[1:3]
    # if it is causal, the last query sees the last key
    low, high = (None, Nk - Nq) if options.causal else options.mask.band or (None, None)
    walk = Walk(((max(Nq, Nk), 1),), ((0, max(Nq, Nk)),), (0, Nq), 0, 0, Nk)
    call = TileCall(walk, ((0,) * H,), options.scale, None if low is None else -low, high, precision=float32_precision())
    return prepared(call, B, Hk, D, q.dtype, q.device)


def _mask_arguments(options: Options, k: Tensor) -> dict[str, Any]:
    """Returns the arguments of ``run.forward`` and ``run.backward`` for bias, padding and dropout."""
    masks: dict[str, Any] = {"bias": options.bias}
    # the kernels read masks and words densely, while those of a problem may be views of every r-th position
    if options.mask.padding is not None:
        masks["padding"] = options.mask.padding.expand(k.shape[:2]).contiguous()
    dropout = options.dropout
    if dropout is not None:
        masks |= {"words": Words(*(x.contiguous() for x in dropout.words)), "dropout_p": dropout.probability}
    return masks


class TritonBlocksBackend(Backend):
    """Computes only block-sparse attention; dense problems have better kernels.

    The same kernels find the next keys in a list, with masks of single pairs. One program computes a tile of a block; the longest lists are
    started first.
    """

    name = "triton"
    capabilities = replace(
        _OURS,
        block_sizes=BLOCK_SIZES,
        block_masks=frozenset(_MASK_KINDS),
        blocks_only=True,
        source="compiled for sm_80, sm_89 and sm_90 by Triton 3.7, interpreted on CPUs",
    )

    def more_reasons(self, request: AttentionRequest) -> list[str]:
        capability = request.hardware.capability
        if request.dtype is torch.float32 and request.head_dim > 128 and capability and capability not in LARGE_MEMORY:
            limit = f"compute capability {capability[0]}.{capability[1]}"
            return [f"float32 with head_dim {request.head_dim} needs more shared memory than {limit} has; head_dim up to 128 does not"]
        return []

    def forward(self, q: Tensor, k: Tensor, v: Tensor, options: Options, keys: Keys = None, **__: Views) -> Result:
        """Computes the softmax attention over the kept pairs.

        Args:
            q, k, v: (B, Nq, H, D), (B, Nk, K, D) twice; float16, bfloat16 or float32, D ≤ 256, any strides with the last one 1.

        Returns:
            out (B, Nq, H, D) in q's dtype and lse (B, H, Nq) float32, contiguous; 0 and −inf in a row without keys.
        """
        from dilated_attention.backends.tiles.forward import forward_kernel

        assert isinstance(keys, BlockLists)
        out, lse, padding = q.new_empty(q.shape), new_lse(q), _padding_of(options, keys, q.shape[0])
        # in place of tensors that these calls do not have, and that the kernel does not read
        unread = lse
        # in the order of the kernel's parameters
        arguments = (
            q, k, v, out, lse,
            # of a table of tiles: the branches' outputs and their lse, rows, offsets
            out, unread, unread, unread,
            padding,
            # words of dropout (a, c, b), bias
            unread, unread, unread, unread,
            # strides, of padding those of batch and branch
            *strides_of(q, k, v, out), padding.stride(0), 0,
            # num_batches … part_rows, then direct, left, right
            *_sizes_of(q, k), 0, 0, 0,
            # scale, threshold and keep_scale of dropout
            options.scale * _LOG2_E, 0, 1.0,
        )  # fmt: skip
        _launch("forward", forward_kernel, q, k, options, keys, arguments, ZERO_KEYS=False)()
        return out, lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, options: Options, keys: Keys = None, *,
        dlse: Tensor | None = None, **__: Views,
    ) -> Grads:  # fmt: skip
        """Computes the contributions of the kept pairs to the gradients of a softmax, of which these pairs may be only a part.

        Args:
            dout, out: (B, Nq, H, D); out and lse are those of the whole softmax.
            lse, dlse: (B, H, Nq) of any strides; rows whose lse is not finite take no part.

        Returns:
            dq, dk, dv, contiguous, in q's dtype; summed in float32.
        """
        from dilated_attention.backends.tiles.backward import key_kernel, query_kernel

        assert isinstance(keys, BlockLists)
        dout, out = (x if x.stride(3) == 1 else x.contiguous() for x in (dout.to(q.dtype), out))
        lse = lse.contiguous()
        dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
        # δ and lse · log2(e) of each row
        stats = lse.new_empty(2 * lse.numel())
        padding, unread = _padding_of(options, keys, q.shape[0]), lse
        num_batches, num_heads, group, *lengths = _sizes_of(q, k)
        # delta_rows, direct, left, right, scale, natural_scale, and threshold and keep_scale of dropout
        last = q.shape[1], 0, 0, 0, options.scale * _LOG2_E, options.scale, 0, 1.0
        # in the order of the kernel's parameters, as in the forward
        of_queries = (
            q, k, v, out, lse, dout, unread if dlse is None else dlse, stats, dq,
            # of a table of tiles: the branches' dq, rows, offsets
            dq, unread, unread,
            padding,
            # words of dropout (a, c, b), bias
            unread, unread, unread, unread,
            # strides, of dlse (B, H, Nq) in the order of the others, of padding those of batch and branch
            *strides_of(q, k, v, out, dout, dq), *((0, 0, 0) if dlse is None else (dlse.stride(0), dlse.stride(2), dlse.stride(1))),
            padding.stride(0), 0,
            num_batches, num_heads, group, *lengths, *last,
        )  # fmt: skip
        of_keys = (
            q, k, v, dout, stats, dk, dv,
            # of a table of tiles: the branches' dk and dv, rows, offsets
            dk, dv, unread, unread,
            padding,
            # word b of dropout, bias
            unread, unread,
            *strides_of(q, k, v, dout, dk, dv), padding.stride(0),
            num_batches, num_heads, num_heads // group, group, *lengths, *last,
        )  # fmt: skip
        query_launch = _launch("query", query_kernel, q, k, options, keys, of_queries, OWN=False, DLSE=dlse is not None)
        # the GPU computes dq while the host makes the lists of the other kernel, but for the first time, when both kernels compile
        if not (is_first := query_launch.start()):
            query_launch()
        key_launch = _launch("key", key_kernel, q, k, options, keys, of_keys, SHARED=True)
        if is_first:
            key_launch.start()
            query_launch()
        key_launch()
        return dq, dk, dv


def order_of(lists: BlockLists, members: int = 0) -> tuple[Tensor, Tensor]:
    """Returns the order in which programs process the lists of query blocks, or of key blocks (``members`` > 0); computed once.

    Longest first; lengths are compared in steps of a quarter of the mean, so that neighbours of similar length stay together.

    Args:
        members: the heads with lists of their own that a program of key blocks covers.

    Returns:
        order: (groups, lists) int32, each group's lists in their order.
        heavy: () int32. The first so many lists of every head are processed before all others: they are so long that those of the last head
            would finish after everything else if they waited for their turn.
    """

    def make(lists: BlockLists) -> tuple[Tensor, Tensor]:
        if members:
            counts = lists.by_column.starts.diff().view(lists.num_groups // members, members, lists.num_columns).sum(1)
        else:
            counts = lists.row_starts.diff().view(lists.num_groups, lists.num_rows)
        coarse = (counts * (4 / counts.float().mean().clamp(min=1e-3))).int()
        heavy = (coarse >= 4 * max(2.0, counts.shape[1] / (2 * _PROGRAMS))).sum(1).amax()
        return coarse.argsort(dim=1, descending=True, stable=True).int(), heavy.int()

    return lists.derived(("triton", members), make)


class _Launch(NamedTuple):
    """A kernel with its arguments, for so many programs.

    ``kind``: all that the compiled kernel depends on, beside ``options["FORM"]``; ``options``: constants and Triton's own options.
    """

    kernel: Any
    programs: int
    device: torch.device
    kind: tuple[Any, ...]
    arguments: tuple[Any, ...]
    options: dict[str, Any]

    def start(self) -> bool:
        """Compiles this kernel and its other ``even`` variant in the background; True if this call began it.

        The other variant is for lengths that do not fill the last block, or for those that do; the first of them would wait for it.
        """
        form, lists = self.options["FORM"], self.options["lists"]
        if (self.kind, form) in _compilations or self.device.type != "cuda" or not self.programs:
            return False
        # what follows needs Triton
        from triton.runtime.jit import MockTensor

        from dilated_attention.backends.tiles import launch

        # the interpreter compiles nothing
        if not (launch.knows_triton() and hasattr(self.kernel, "params")):
            return False
        # dtypes in place of tensors, which would live as long as the compilation
        arguments, list_types = ([x.dtype if isinstance(x, Tensor) else x for x in given] for given in (self.arguments, lists))
        options = self.options | {"lists": type(lists)(*map(MockTensor.wrap_dtype, list_types))}
        for variant in (form, form._replace(even=not form.even)):
            compilation = launch.submit(self.kernel, arguments, options | {"FORM": variant}, self.device.index or 0)
            _compilations[self.kind, variant] = compilation
        return True

    def __call__(self) -> None:
        """Runs the kernel, once it is compiled."""
        if not self.programs:
            return
        self.start()
        key = self.kind, self.options["FORM"]
        if (compilation := _compilations.get(key)) is not None:
            # waits for the compilation; after an error in it the launch compiles again, and raises the error itself
            compilation.exception()
            _compilations[key] = None
        with on_device(self.device):
            self.kernel[(self.programs,)](*self.arguments, **self.options)


def _padding_of(options: Options, lists: BlockLists, batch: int) -> Tensor:
    """Returns the padding of keys (B, Nk) uint8, or a tensor that is not read."""
    assert not options.causal and options.dropout is None and options.mask.band is None, "block lists already say which pairs are kept"
    if options.mask.padding is None:
        return lists.row_starts[None]
    padding = options.mask.padding.view(torch.uint8)
    return (padding if padding.stride(1) == 1 else padding.contiguous()).expand(batch, -1)


def _sizes_of(q: Tensor, k: Tensor) -> tuple[int, ...]:
    """Returns the kernels' arguments num_batches, num_heads, group, q_first, q_last, num_queries, num_keys and part_rows."""
    (B, Nq, H, _), (_, Nk, K, _) = q.shape, k.shape
    return B, H, H // K, 0, Nq, Nq, Nk, 0


def _launch(
    which: str, kernel: Any, q: Tensor, k: Tensor, options: Options, lists: BlockLists, arguments: tuple[Any, ...], **flags: bool
) -> _Launch:
    """Builds the launch of a kernel over lists of key blocks ("forward", "query") or of query blocks ("key").

    Args:
        arguments: the kernel's, up to its constants.
        flags: constants that only this kernel has.
    """
    from dilated_attention.backends.tiles.rows import Form, Lists

    assert (q.shape[1], k.shape[1]) == (lists.num_queries, lists.num_keys), "the lists are those of other lengths"
    assert lists.num_batch in (1, len(q)) and lists.num_heads in (1, q.shape[2]) and (q.stride(3) == k.stride(3) == 1 or q.shape[3] == 1)
    (B, _, H, D), group, is_padded = q.shape, q.shape[2] // k.shape[2], options.mask.padding is not None
    if which == "key":
        starts, others, masks = lists.by_column
        tile_block, visited_block, num_visited = lists.k_block, lists.q_block, lists.num_queries
        num_lists, heads = lists.num_columns, H // group
        order, heavy = order_of(lists, group if lists.num_heads > 1 else 1)
    else:
        starts, others, masks = lists.row_starts, lists.columns, lists.masks
        tile_block, visited_block, num_visited = lists.q_block, lists.k_block, lists.num_keys
        num_lists, heads = lists.num_rows, H
        order, heavy = order_of(lists)
    size = sizes(which, D, q.dtype, tile_block, q.device, lists=True)
    parts = tile_block // size.rows
    # starts, in place of tensors that the kernel does not read
    low, high = lists.interval or (starts, starts)
    data = Lists(starts, others, starts if masks is None else masks, lists.bits, low, high, order, heavy)
    D0, D1 = head_blocks(D)
    form = Form(
        tile_block, visited_block, masks=_MASK_KINDS[lists.mask_kind], even=num_visited % visited_block == 0,
        per_batch=lists.num_batch > 1, per_head=lists.num_heads > 1,
    )  # fmt: skip
    # ieee: float32 products are exact here, whatever torch allows, and ``sizes`` are those for exact products
    constants = {
        "D": D, "D0": D0, "D1": D1, "ROWS": size.rows, "PARTS": parts, "BLOCK": size.block, "STAGES": size.stages, "PRECISION": "ieee",
        "LEFT": False, "RIGHT": False, "CUT": False, "PADDING": is_padded, "DROPOUT": False, "BIAS": False, "lists": data, "FORM": form,
        **flags, "num_warps": size.warps, "num_stages": size.stages,
    }  # fmt: skip
    kind = which, q.device, q.dtype, D, size, is_padded, *flags.values()
    return _Launch(kernel, num_lists * parts * B * heads, q.device, kind, arguments, constants)
