"""One file per suite, with a separate ``_report`` file where its tables are long.

A new suite needs a file here and a line in ``regression.COMPARED``.
"""

from dilated_attention.bench.suite import Suite
from dilated_attention.bench.suites.regression import COMPARED, Regression

SUITES: dict[str, type[Suite]] = {**COMPARED, Regression.name: Regression}

__all__ = ["SUITES"]
