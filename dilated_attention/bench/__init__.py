"""Reproducible benchmarks: suites of fair, checked measurements, with tables. ``python -m dilated_attention bench``."""

from dilated_attention.bench.report.rows import Results, Row
from dilated_attention.bench.runner import Outcome, run
from dilated_attention.bench.suite import Group, Session, Suite

__all__ = ["Group", "Outcome", "Results", "Row", "Session", "Suite", "run"]
