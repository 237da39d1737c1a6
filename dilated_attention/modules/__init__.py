"""nn.Modules for the functional API: attention alone and with its projections, in one process and across several."""

from dilated_attention.modules._ring import RingSettings, set_layout
from dilated_attention.modules.attention import (
    BlockSparseAttention,
    BlockSparseDilatedAttention,
    DilatedAttention,
    RingAttention,
    RingBlockSparseAttention,
    RingBlockSparseDilatedAttention,
    RingDilatedAttention,
)
from dilated_attention.modules.multihead import (
    MultiheadBlockSparseAttention,
    MultiheadBlockSparseDilatedAttention,
    MultiheadDilatedAttention,
    RingMultiheadBlockSparseAttention,
    RingMultiheadBlockSparseDilatedAttention,
    RingMultiheadDilatedAttention,
)
from dilated_attention.modules.options import AttentionOptions, BlockOptions, CoreOptions, GroupOptions, ProjectionOptions

__all__ = [
    "AttentionOptions",
    "BlockOptions",
    "BlockSparseAttention",
    "BlockSparseDilatedAttention",
    "CoreOptions",
    "DilatedAttention",
    "GroupOptions",
    "MultiheadBlockSparseAttention",
    "MultiheadBlockSparseDilatedAttention",
    "MultiheadDilatedAttention",
    "ProjectionOptions",
    "RingAttention",
    "RingBlockSparseAttention",
    "RingBlockSparseDilatedAttention",
    "RingDilatedAttention",
    "RingMultiheadBlockSparseAttention",
    "RingMultiheadBlockSparseDilatedAttention",
    "RingMultiheadDilatedAttention",
    "RingSettings",
    "set_layout",
]
