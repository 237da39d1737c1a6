"""One file per suite. A new suite needs a file here and a line below."""

from dilated_attention.bench.runner import Suite
from dilated_attention.bench.suites.accuracy import Accuracy
from dilated_attention.bench.suites.extreme import Extreme
from dilated_attention.bench.suites.memory import Memory
from dilated_attention.bench.suites.quality import Quality
from dilated_attention.bench.suites.scaling import Scaling
from dilated_attention.bench.suites.speed import Speed
from dilated_attention.bench.suites.train_infer import TrainInfer

SUITES: dict[str, type[Suite]] = {suite.name: suite for suite in (Speed, Accuracy, Memory, Extreme, Scaling, TrainInfer, Quality)}

__all__ = ["SUITES"]
