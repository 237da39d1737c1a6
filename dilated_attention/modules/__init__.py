"""nn.Modules for the functional API: attention alone and with its projections, in one process and across several."""

from dilated_attention.modules._ring import RingSettings, set_layout
from dilated_attention.modules.block_sparse import BlockSparseAttention, BlockSparseDilatedAttention
from dilated_attention.modules.dilated import DilatedAttention
from dilated_attention.modules.multihead import (
    MultiheadBlockSparseAttention,
    MultiheadBlockSparseDilatedAttention,
    MultiheadDilatedAttention,
)
from dilated_attention.modules.ring import (
    RingAttention,
    RingBlockSparseAttention,
    RingBlockSparseDilatedAttention,
    RingDilatedAttention,
)
from dilated_attention.modules.ring_multihead import (
    RingMultiheadBlockSparseAttention,
    RingMultiheadBlockSparseDilatedAttention,
    RingMultiheadDilatedAttention,
)

__all__ = [
    "BlockSparseAttention",
    "BlockSparseDilatedAttention",
    "DilatedAttention",
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
    "RingSettings",
    "set_layout",
]
