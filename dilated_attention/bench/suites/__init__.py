"""One file a suite. A new one is a file here and a line below."""

from dilated_attention.bench.suite import Suite
from dilated_attention.bench.suites.bandwidth import Bandwidth
from dilated_attention.bench.suites.extreme import Extreme
from dilated_attention.bench.suites.memory import Memory
from dilated_attention.bench.suites.regression import Regression
from dilated_attention.bench.suites.speed import Speed

SUITES: dict[str, type[Suite]] = {suite.name: suite for suite in (Speed, Memory, Bandwidth, Extreme, Regression)}

__all__ = ["SUITES"]
