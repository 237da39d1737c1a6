"""What every test lives with: poisoned allocations, one thread under xdist, markers."""

from __future__ import annotations

import functools
import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path

# read where a Triton kernel is declared, so before any of them is imported
if not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import torch
from hypothesis import HealthCheck, settings

from dilated_attention.backends import registry

POISONED = ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty"))

# the same examples in every run; HYPOTHESIS_PROFILE=explore looks for new ones
_SLOW_IS_FINE = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example)
settings.register_profile("repeatable", deadline=None, derandomize=True, database=None, suppress_health_check=_SLOW_IS_FINE)
settings.register_profile("explore", deadline=None, suppress_health_check=_SLOW_IS_FINE)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA GPU; skipped without one")
    config.addinivalue_line("markers", "alone: measures times or free memory, so nothing runs beside it in tests.gpu_suite")
    config.addinivalue_line("markers", "kernel(*parameters): cases with equal values of these share compiled kernels, so one process runs them")
    config.addinivalue_line("markers", "gpus: needs two CUDA GPUs or more; skipped without, but with DILATED_GPUS_ON_CPU=1 tried over gloo")
    # of pytest-xdist, which a run may leave out
    config.addinivalue_line("markers", "xdist_group(name): tests that one worker of --dist loadgroup runs")
    config.addinivalue_line("markers", "no_poison: leaves torch.empty alone instead of filling it with NaN")
    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if (mark := item.get_closest_marker("kernel")) is not None:
            values = item.callspec.params  # type: ignore[attr-defined]
            name = "-".join([item.originalname, *(str(values[parameter]) for parameter in mark.args)])  # type: ignore[attr-defined]
            item.add_marker(pytest.mark.xdist_group(name))
    count = torch.cuda.device_count()
    for item in items:
        # not by keywords, of which a folder's name is one
        if count < 1 and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
        if count < 2 and item.get_closest_marker("gpus") and os.environ.get("DILATED_GPUS_ON_CPU") != "1":
            item.add_marker(pytest.mark.skip(reason="needs 2 GPUs"))


@pytest.fixture(autouse=True, scope="session")
def no_cache_of_the_user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Tests neither read nor write what the user of this machine measured. Set for child processes, too."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DILATED_ATTENTION_CACHE", str(folder))
        yield folder


@pytest.fixture(autouse=True)
def poison(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.empty and its like hand out NaN, so that reading what nobody wrote cannot pass by luck."""
    if request.node.get_closest_marker("no_poison") is not None:
        return
    for owner, name in POISONED:
        monkeypatch.setattr(owner, name, _poisoned(getattr(owner, name)))


def _poisoned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(make)
    def poisoned(*args: object, **kwargs: object) -> torch.Tensor:
        x = make(*args, **kwargs)
        # fake and meta tensors have no values, and a traced graph is to stay what the user wrote
        if type(x) is torch.Tensor and x.is_floating_point() and x.device.type != "meta" and not torch.compiler.is_compiling():
            with torch.no_grad():
                x.fill_(torch.nan)
        return x

    return poisoned


@pytest.fixture(autouse=True)
def nothing_decided() -> None:
    """What a call is decided to be is remembered; a test that puts something in the place of what decides begins without."""
    registry.answers().clear()


@pytest.fixture(autouse=True)
def memory_for_others(request: pytest.FixtureRequest) -> Iterator[None]:
    """What torch reserves for later goes back after a GPU test that was large: a dozen processes share one GPU."""
    yield
    if request.node.get_closest_marker("gpu") and torch.cuda.is_initialized() and torch.cuda.memory_reserved() > 4 * 2**30:
        gc.collect()
        torch.cuda.empty_cache()


@pytest.fixture
def two_threads() -> Iterator[None]:
    """For tests of what depends on the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)
