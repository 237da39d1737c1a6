"""Kernel libraries that are installed in addition to torch: FlashAttention 2, 3 and 4, and xformers."""
