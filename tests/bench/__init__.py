"""Tests of the benchmarks of the package."""
