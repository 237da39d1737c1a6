"""The GPUs that the tests of this folder have, and live processes on them.

Without GPUs the tests are skipped. With DILATED_GPUS_ON_CPU=1 they run over gloo instead of NCCL, as if four GPUs were there: a try of
the tests themselves. With DILATED_GPUS_SHARED=2 those of two GPUs run over NCCL in two processes that share one: what is computed and
sent is the same, times are not. (Three and four processes on one H200 stopped inside the driver.) DILATED_GPUS_PERCENT makes sweeps
shorter.
"""

from __future__ import annotations

import itertools
import os
from typing import Any

import pytest
import torch

from tests.helpers.pool import SHARED, Pool, pool_of

ON_CPU = os.environ.get("DILATED_GPUS_ON_CPU") == "1"
GPUS = torch.cuda.device_count()
COUNT = 4 if ON_CPU else max(GPUS, SHARED if GPUS else 0)
# where this process, which is no rank, computes what ranks are held to
DEVICE = torch.device("cpu" if ON_CPU or not COUNT else "cuda")
PERCENT = int(os.environ.get("DILATED_GPUS_PERCENT", "100"))
# processes that tests of one world are dealt to: on two H100s, 88 tests took more than 10 minutes in one, 68 of them 3.5 in five
POOLS = 4
_made = itertools.count()
# (backend, whether the group is bound to its GPU): three ways in which programs begin, after each of which groups are made differently
BEGINNINGS = {2: ("cpu:gloo,cuda:nccl", False), 3: ("nccl", False), 4: ("nccl", True)}


def pool(world: int) -> Pool:
    return pool_of(world) if ON_CPU else pool_of(world, *BEGINNINGS[world])


def needs(world: int) -> list[pytest.MarkDecorator]:
    """Marks of a test that uses ``pool(world)``: it runs in one of a few processes, each of which has such a pool."""
    group = f"world {world}, {next(_made) % POOLS}"
    return [pytest.mark.skipif(world > COUNT, reason=f"needs {world} GPUs"), pytest.mark.xdist_group(group)]


def worlds(*sizes: int) -> list[Any]:
    """Parameters of a test that runs on each of these numbers of GPUs."""
    return [pytest.param(size, marks=needs(size), id=f"{size} GPUs") for size in sizes]


def share(count: int) -> int:
    """Of ``count`` cases of a sweep, those that run."""
    return max(1, count * PERCENT // 100)
