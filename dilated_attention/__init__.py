"""Exact long-sequence attention on PyTorch: dilated (LongNet), dense, and what is built from them."""

from dilated_attention.backends import BackendUnavailable
from dilated_attention.functional import attention, dilated_attention
from dilated_attention.pattern import DilatedPattern

__all__ = [
    "BackendUnavailable",
    "DilatedPattern",
    "attention",
    "dilated_attention",
]

__version__ = "0.1.0"
