"""The processes and GPUs that tests run on: ``worlds`` makes a test one over gloo, and over NCCL where GPUs are there and asked for.

    @pytest.mark.parametrize("pool", worlds(2, 3, gpus=(2, 4)))
    def test_something(pool: Pool) -> None: ...                     # pytest -m gpus: the cases on GPUs alone

Without GPUs those cases are skipped. With DILATED_GPUS_ON_CPU=1 they run over gloo, as if four GPUs were there: a try of the tests
themselves. With DILATED_GPUS_SHARED=2 those of two GPUs run over NCCL in two processes that share one: what is computed and sent is the
same, times are not. (Three and four processes on one H200 stopped inside the driver.) DILATED_GPUS_PERCENT makes sweeps shorter.
"""

import itertools
import os
from typing import Any

import pytest
import torch

from tests.helpers.pool import SHARED, pool_of

ON_CPU = os.environ.get("DILATED_GPUS_ON_CPU") == "1"
GPUS = torch.cuda.device_count()
COUNT = 4 if ON_CPU else max(GPUS, SHARED if GPUS else 0)
PERCENT = int(os.environ.get("DILATED_GPUS_PERCENT", "100"))
# processes that tests of one world are dealt to: on two H100s, 88 tests took more than 10 minutes in one, 68 of them 3.5 in five
POOLS = 4
_made = itertools.count()
# (backend, whether the group is bound to its GPU): three ways in which programs begin, after each of which groups are made differently
BEGINNINGS = {2: ("cpu:gloo,cuda:nccl", False), 3: ("nccl", False), 4: ("nccl", True)}


def on_gpus(world: int) -> list[pytest.MarkDecorator]:
    """Marks of a test that needs so many GPUs."""
    return [pytest.mark.gpus, pytest.mark.skipif(world > COUNT, reason=f"needs {world} GPUs")]


def worlds(*sizes: int, gpus: tuple[int, ...] = ()) -> list[Any]:
    """Pools as parameters of a test: of each number of processes over gloo, and of each number of GPUs."""
    parameters = [pytest.param(pool_of(size), id=f"{size} processes") for size in sizes]
    for size in gpus:
        pool = pool_of(size) if ON_CPU else pool_of(size, *BEGINNINGS[size])
        # tests of one world run in a few processes, each of which has such a pool
        group = pytest.mark.xdist_group(f"world {size}, {next(_made) % POOLS}")
        parameters.append(pytest.param(pool, marks=[*on_gpus(size), group], id=f"{size} GPUs"))
    return parameters


def share(count: int) -> int:
    """Of ``count`` cases of a sweep, those that run."""
    return max(1, count * PERCENT // 100)
