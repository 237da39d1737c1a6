"""Whole calls on this project's own kernels over tables of tiles."""
