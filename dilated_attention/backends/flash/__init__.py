"""Kernel libraries installed beside torch: FlashAttention 2, 3 and 4, and xformers."""
