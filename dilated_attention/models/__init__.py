"""Whole models built from the modules."""

from dilated_attention.models.config import LongNetConfig
from dilated_attention.models.decoder import DecoderBlock, FeedForward, LongNetDecoder
from dilated_attention.models.language_model import LongNetLM
from dilated_attention.models.sharded import average_gradients, sharded_cross_entropy, sharded_mean

__all__ = [
    "DecoderBlock",
    "FeedForward",
    "LongNetConfig",
    "LongNetDecoder",
    "LongNetLM",
    "average_gradients",
    "sharded_cross_entropy",
    "sharded_mean",
]
