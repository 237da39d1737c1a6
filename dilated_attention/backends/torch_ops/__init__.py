"""Attention kernels that come with torch, and plain torch."""
