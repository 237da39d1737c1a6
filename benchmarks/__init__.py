"""Measurements of this library beside others, held to float64 before they are timed: ``python -m benchmarks``. Not installed."""
