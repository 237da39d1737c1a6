"""What Triton launches and lists of blocks have in common."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from dilated_attention.pattern.blocks.block_lists import BLOCK_SIZES as BLOCK_SIZES
from dilated_attention.pattern.blocks.block_lists import WORD as WORD
from dilated_attention.pattern.blocks.block_lists import BlockLists as BlockLists

_HERE: AbstractContextManager[Any] = nullcontext()


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Makes ``device`` current for a Triton launch, which uses the current device. Triton's interpreter accepts CPU tensors."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return _HERE
    return torch.cuda.device(device)


def checked_total(total: int) -> int:
    """Returns ``total`` entries if kernels can count them (in 32 bits, in quarters of a block); raises otherwise."""
    if total >= 2**29:
        raise ValueError(
            f"{total} kept blocks over all batch entries and heads; lists count to 2**29 − 1: "
            "keep less, use larger blocks, or give one list to all heads"
        )
    return total
