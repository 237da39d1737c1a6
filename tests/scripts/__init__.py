"""Tests of what is run as a script or read as a page: examples, benchmarks, README, docs, the GPU suite."""
