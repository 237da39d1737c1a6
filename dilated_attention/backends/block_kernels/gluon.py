"""Block-sparse attention on Hopper by this project's own kernel; ``gluon_kernel.py`` describes how it works."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from dilated_attention.backends.base import HALVES, Capabilities, Options
from dilated_attention.backends.block_kernels.base import BlocksBackend
from dilated_attention.backends.hardware import multiprocessors, on_device
from dilated_attention.pattern.blocks.block_lists import BlockLists

# a list counts as long if it has more than this many times the mean
_LONG = 4


@dataclass(frozen=True)
class GluonSettings:
    """How the kernel runs at one head dim.

    Args:
        tile_keys: keys in a tile; a key block may be two tiles.
        stages: ring stages for keys and for values.
        programs: programs per multiprocessor.
        registers: registers of a consumer thread and of a loading thread.
        maxnreg: register limit of every thread at the start.
    """

    tile_keys: int
    stages: tuple[int, int]
    programs: int = 1
    registers: tuple[int, int] = (232, 40)
    maxnreg: int = 168


# H200, random blocks of 128x128, rate per kept pair as a fraction of dense FlashAttention-4's, at densities of 50, 10, 5 and 2 %:
# head dim 128, stages (2, 3): 0.94, 0.87, 0.89, 0.84; (3, 2): 0.95, 0.85, 0.85, 0.75; (2, 2): 0.95, 0.87, 0.85, 0.76;
# 64, (5, 4): 0.83, 0.85, 0.85, 0.79; (4, 4): 0.81, 0.83, 0.80, 0.76; (5, 4) with 240 registers instead of 232: 0.74, 0.74, 0.74, 0.73.
# Key tiles of 64, two programs per multiprocessor at head dim 64, and sums of weights kept per thread lose 2 to 15 %.
LAUNCHES = {64: GluonSettings(128, (5, 4)), 128: GluonSettings(128, (2, 3))}


class GluonBlocksBackend(BlocksBackend):
    """Computes the forward over lists of blocks of 128 queries and 64 or 128 keys, head dims 64 and 128, compute capability 9.0."""

    name = "gluon"
    capabilities = Capabilities(
        devices=frozenset({"cuda"}),
        dtypes=HALVES,
        package="triton",
        install="pip install triton",
        compute_capabilities=((9, 0), (9, 0)),
        head_dims=frozenset({64, 128}),
        backward=False,
        block_sizes=frozenset({(128, 64), (128, 128)}),
        block_masks=frozenset({"none", "interval", "bits"}),
        blocks_only=True,
        source="H200, Triton 3.6",
    )

    def forward_blocks(
        self, q: Tensor, k: Tensor, v: Tensor, lists: BlockLists, options: Options, launch: GluonSettings | None = None
    ) -> tuple[Tensor, Tensor]:
        B, Nq, H, D = q.shape
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.empty((B, H, Nq), dtype=torch.float32, device=q.device)
        if not lists.num_entries:
            return out.zero_(), lse.fill_(-torch.inf)
        kernel, descriptor = _kernel()
        launch = launch or LAUNCHES[D]
        tile = min(launch.tile_keys, lists.k_block)
        total = B * H * lists.num_rows
        order = lists.derived(("order", B, H), lambda: _order(lists, B, H))
        masks = lists.masks if lists.masks is not None else lists.columns
        bits = lists.bits if lists.masks is not None else lists.columns
        shape = (H, H // k.shape[2], lists.num_heads if lists.num_batch > 1 else 0, int(lists.num_heads > 1), order is not None)
        with on_device(q.device):
            kernel[(min(total, launch.programs * multiprocessors(q.device)),)](
                descriptor(q, 64), descriptor(k, tile), descriptor(v, tile), descriptor(out, 64),
                lists.row_starts, lists.columns, masks, bits, lists.columns if order is None else order, lse,
                lists.num_rows, lists.num_entries, total, Nq, lists.num_keys, *lse.stride(), options.scale,
                shape, D, tile, lists.k_block // tile, launch.stages,
                lists.masks is not None, lists.num_keys % lists.k_block != 0, launch.registers,
                num_warps=4, maxnreg=launch.maxnreg,
            )  # fmt: skip
        return out, lse


def _order(lists: BlockLists, num_batch: int, num_heads: int) -> Tensor | None:
    """Orders the query blocks of all batch entries and heads, with long lists first: one that starts last would end long after the rest.

    Returns None if lists are of similar length; the order is then that of positions, in which neighbours share keys in the L2 cache.
    """
    counts = lists.row_starts.diff().view(lists.num_batch, lists.num_heads, lists.num_rows)
    counts = counts.expand(num_batch, num_heads, -1).flatten()
    long = counts > _LONG * counts.double().mean()
    order = torch.cat([long.nonzero(), (~long).nonzero()]).flatten().to(torch.int32)
    return order if bool(long.any()) else None


@functools.lru_cache(maxsize=1)
def _kernel():  # type: ignore[no-untyped-def]
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from dilated_attention.backends.block_kernels.gluon_kernel import blocks_kernel

    def descriptor(x: Tensor, tile: int):  # type: ignore[no-untyped-def]
        B, N, H, D = x.shape
        layout = gl.NVMMASharedLayout.get_default_for([1, 1, tile, D], gl.bfloat16)
        return TensorDescriptor(x, [B, H, N, D], [x.stride(0), x.stride(2), x.stride(1), 1], [1, 1, tile, D], layout)

    return blocks_kernel, descriptor
