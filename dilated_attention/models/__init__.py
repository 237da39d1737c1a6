"""Whole models built from the modules."""

from dilated_attention.models.config import LongNetConfig
from dilated_attention.models.decoder import DecoderBlock, FeedForward, LongNetDecoder
from dilated_attention.models.language_model import LongNetLM

__all__ = [
    "DecoderBlock",
    "FeedForward",
    "LongNetConfig",
    "LongNetDecoder",
    "LongNetLM",
]
