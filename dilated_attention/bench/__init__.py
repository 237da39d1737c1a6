"""Reproducible benchmarks: suites of fair, checked measurements, with tables. ``python -m dilated_attention bench``."""

from dilated_attention.bench.report.rows import Results, Row
from dilated_attention.bench.runner import Group, Outcome, Session, Suite, run

__all__ = ["Group", "Outcome", "Results", "Row", "Session", "Suite", "run"]
