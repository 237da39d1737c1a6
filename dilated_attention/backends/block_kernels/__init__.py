"""Kernels that compute lists of kept blocks."""
