"""One file per suite, with a separate ``_report`` file where its tables are long.

A new suite needs a file here and a line in ``regression.COMPARED``, or one below if it cannot run without arguments.
"""

from dilated_attention.bench.suite import Suite
from dilated_attention.bench.suites.quality import Quality
from dilated_attention.bench.suites.regression import COMPARED, Regression

SUITES: dict[str, type[Suite]] = {**COMPARED, Quality.name: Quality, Regression.name: Regression}

__all__ = ["SUITES"]
