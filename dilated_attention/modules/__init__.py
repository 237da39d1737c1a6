"""nn.Modules around the functional surface: attention alone, and with its projections."""

from dilated_attention.modules.dilated import DilatedAttention
from dilated_attention.modules.multihead import MultiheadDilatedAttention

__all__ = [
    "DilatedAttention",
    "MultiheadDilatedAttention",
]
