"""Kernels that compute attention over lists of kept blocks."""
