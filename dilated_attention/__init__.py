"""Exact long-sequence attention on PyTorch: dilated (LongNet), block-sparse, dense, and what is built from them."""

from dilated_attention.backends import BackendUnavailable
from dilated_attention.distributed import balanced_layout, local_positions, shard_sequence, unshard_sequence
from dilated_attention.factory import create_attention, create_model, explain_backend, list_backends
from dilated_attention.functional import (
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
    ring_dilated_attention,
)
from dilated_attention.modules import (
    BlockSparseAttention,
    BlockSparseDilatedAttention,
    DilatedAttention,
    MultiheadBlockSparseAttention,
    MultiheadDilatedAttention,
    RingAttention,
    RingBlockSparseAttention,
    RingDilatedAttention,
    RingMultiheadBlockSparseAttention,
    RingMultiheadDilatedAttention,
)
from dilated_attention.pattern import DilatedPattern

__all__ = [
    "BackendUnavailable",
    "BlockSparseAttention",
    "BlockSparseDilatedAttention",
    "DilatedAttention",
    "DilatedPattern",
    "MultiheadBlockSparseAttention",
    "MultiheadDilatedAttention",
    "RingAttention",
    "RingBlockSparseAttention",
    "RingDilatedAttention",
    "RingMultiheadBlockSparseAttention",
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
    "ring_attention",
    "ring_block_sparse_attention",
    "ring_dilated_attention",
    "shard_sequence",
    "unshard_sequence",
]

__version__ = "0.1.0"
