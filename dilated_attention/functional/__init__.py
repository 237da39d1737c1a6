"""The functional API. Tensors are (B, N, H, D); where several processes share a sequence, each holds its shard (B, n, H, D)."""

from dilated_attention.functional.calls import (
    attention,
    block_sparse_attention,
    block_sparse_dilated_attention,
    dilated_attention,
    ring_attention,
    ring_block_sparse_attention,
    ring_block_sparse_dilated_attention,
    ring_dilated_attention,
)
from dilated_attention.functional.decode import decode_attention, explain_decode
from dilated_attention.functional.maps import attention_map, attention_received
from dilated_attention.functional.options import (
    Alibi,
    BranchOptions,
    CallOptions,
    Distance,
    LocalOptions,
    MapOptions,
    RingOptions,
    ScoreOptions,
    SoftmaxOptions,
)

__all__ = [
    "Alibi",
    "BranchOptions",
    "CallOptions",
    "Distance",
    "LocalOptions",
    "MapOptions",
    "RingOptions",
    "ScoreOptions",
    "SoftmaxOptions",
    "attention",
    "attention_map",
    "attention_received",
    "block_sparse_attention",
    "block_sparse_dilated_attention",
    "decode_attention",
    "dilated_attention",
    "explain_decode",
    "ring_attention",
    "ring_block_sparse_attention",
    "ring_block_sparse_dilated_attention",
    "ring_dilated_attention",
]
