"""Exact long-sequence attention on PyTorch: dilated (LongNet), block-sparse, dense, and what is built from them."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from dilated_attention import interrupt

interrupt.end_at_once()

# ruff: noqa: E402  (torch is imported after the line above)
from dilated_attention.backends import BackendUnavailable
from dilated_attention.distributed import balanced_layout, local_positions, shard_sequence, unshard_sequence
from dilated_attention.factory import create_attention, create_model, explain_backend, list_backends
from dilated_attention.functional import (
    Alibi,
    Distance,
    attention,
    attention_map,
    attention_received,
    block_sparse_attention,
    block_sparse_dilated_attention,
    decode_attention,
    dilated_attention,
    explain_decode,
    ring_attention,
    ring_block_sparse_attention,
    ring_block_sparse_dilated_attention,
    ring_dilated_attention,
)
from dilated_attention.modules import (
    BlockSparseAttention,
    BlockSparseDilatedAttention,
    DilatedAttention,
    MultiheadBlockSparseAttention,
    MultiheadBlockSparseDilatedAttention,
    MultiheadDilatedAttention,
    RingAttention,
    RingBlockSparseAttention,
    RingBlockSparseDilatedAttention,
    RingDilatedAttention,
    RingMultiheadBlockSparseAttention,
    RingMultiheadBlockSparseDilatedAttention,
    RingMultiheadDilatedAttention,
)
from dilated_attention.pattern import DilatedPattern

if TYPE_CHECKING:
    from dilated_attention.planning import plan_attention, plan_model
    from dilated_attention.planning.advice import recommend
    from dilated_attention.profiling import profile_memory

__all__ = [
    "Alibi",
    "BackendUnavailable",
    "BlockSparseAttention",
    "BlockSparseDilatedAttention",
    "DilatedAttention",
    "DilatedPattern",
    "Distance",
    "MultiheadBlockSparseAttention",
    "MultiheadBlockSparseDilatedAttention",
    "MultiheadDilatedAttention",
    "RingAttention",
    "RingBlockSparseAttention",
    "RingBlockSparseDilatedAttention",
    "RingDilatedAttention",
    "RingMultiheadBlockSparseAttention",
    "RingMultiheadBlockSparseDilatedAttention",
    "RingMultiheadDilatedAttention",
    "attention",
    "attention_map",
    "attention_received",
    "balanced_layout",
    "block_sparse_attention",
    "block_sparse_dilated_attention",
    "create_attention",
    "create_model",
    "decode_attention",
    "dilated_attention",
    "explain_backend",
    "explain_decode",
    "list_backends",
    "local_positions",
    "plan_attention",
    "plan_model",
    "profile_memory",
    "recommend",
    "ring_attention",
    "ring_block_sparse_attention",
    "ring_block_sparse_dilated_attention",
    "ring_dilated_attention",
    "shard_sequence",
    "unshard_sequence",
]

__version__ = "0.1.0"

# modules that are used before a run rather than in it are imported on first use
_LATER = {
    "plan_attention": "dilated_attention.planning",
    "plan_model": "dilated_attention.planning",
    "profile_memory": "dilated_attention.profiling",
    "recommend": "dilated_attention.planning",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(importlib.import_module(_LATER[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER})
