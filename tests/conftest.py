"""What every test lives with: poisoned allocations, one thread under xdist, markers."""

import functools
import gc
import importlib.util
import inspect
import os
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

# read where a Triton kernel is declared, so before any of them is imported
if not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("TRITON_INTERPRET", "1")
# read when torch is loaded. Tests of two threads run beside other workers, so a thread that spins while it waits may hold the core
# that the other thread needs
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# inductor compiles a few small kernels here; processes that each import torch to do that take longer than the kernels
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# workers of xdist have it, and commands would wrap their lines to it
os.environ.pop("COLUMNS", None)

import pytest
import torch
from hypothesis import HealthCheck, settings

from dilated_attention.backends import registry
from dilated_attention.backends.flash import flash3, flash3_fp8
from tests.helpers.machine import COUNT, GPUS

if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton"):
    from tests.helpers import interpreter

    interpreter.make_fast()

# torch.manual_seed notes for each kind of accelerator, with the stack as text, that it is to be seeded once there is one: milliseconds in
# the deep stacks of tests, thousands of times
if not torch.cuda.is_available():
    for _kind in (torch.cuda, torch.xpu, torch.mtia):
        _kind.manual_seed_all = lambda seed: None  # type: ignore[attr-defined]

# libraries that are asked for by their path
if torch.cuda.is_available():
    if library := os.environ.get("FLASH3_LIBRARY"):
        flash3.load_library(library, os.environ.get("FLASH3_CUDART"))
    if library := os.environ.get("FLASH3_FP8_LIBRARY"):
        flash3_fp8.load_library(library)

POISONED = ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty"))

# the same examples in every run; HYPOTHESIS_PROFILE=explore looks for new ones
_SLOW_IS_FINE = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example)
settings.register_profile("repeatable", deadline=None, derandomize=True, database=None, suppress_health_check=_SLOW_IS_FINE)
settings.register_profile("explore", deadline=None, suppress_health_check=_SLOW_IS_FINE)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA GPU; skipped without one")
    config.addinivalue_line("markers", "alone: measures times or free memory, so nothing runs beside it in tests.gpu_suite")
    config.addinivalue_line("markers", "slow: takes about 2 s or more on one core; make test-fast leaves it out")
    config.addinivalue_line("markers", "distributed: starts processes or needs several; set here by folder and by what the test calls")
    config.addinivalue_line("markers", "sweep: a further case of a test with many; set here, so that make test-fast runs a few of each")
    config.addinivalue_line(
        "markers", ("kernel(*parameters): cases with equal values of these share compiled kernels, so one process runs them")
    )
    config.addinivalue_line("markers", "gpus: needs two CUDA GPUs or more; skipped without, but with DILATED_GPUS_ON_CPU=1 tried over gloo")
    # of pytest-xdist, which a run may leave out
    config.addinivalue_line("markers", "xdist_group(name): tests that one worker of --dist loadgroup runs")
    config.addinivalue_line("markers", "no_poison: leaves torch.empty alone instead of filling it with NaN")
    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)


# what starts processes, by the name that a test's code uses
_STARTERS = frozenset({"pool_of", "Pool", "fresh_processes", "subprocess", "fork"})
# cases of one test that make test-fast runs
CASES_IN_THE_INNER_LOOP = 3


def starts_processes(function: Callable[..., object]) -> bool:
    """Whether the function's code, or that of functions of its module that it names, names what starts processes."""
    seen, left = set(), [inspect.unwrap(function)]
    while left:
        current = left.pop()
        seen.add(current)
        codes = [current.__code__]
        for code in codes:
            codes += [constant for constant in code.co_consts if inspect.iscode(constant)]
        names = {name for code in codes for name in code.co_names}
        if names & _STARTERS:
            return True
        called = (current.__globals__.get(name) for name in names)
        left += [f for f in called if inspect.isfunction(f) and f.__module__ == current.__module__ and f not in seen]
    return False


def mark_for_the_inner_loop(items: list[pytest.Item]) -> None:
    """``distributed`` by folder or by what a test calls; ``sweep`` for all but a few cases of each test, always the same few."""
    tests: dict[tuple[Path, str], list[pytest.Item]] = defaultdict(list)
    for item in items:
        tests[item.path, getattr(item, "originalname", item.name)].append(item)
    for (path, _), cases in tests.items():
        function = getattr(cases[0], "function", None)
        if path.parent.name in ("distributed", "gpus") or (function is not None and starts_processes(function)):
            for item in cases:
                item.add_marker(pytest.mark.distributed)
        # by a checksum of the name: cases in order would leave out whole values of a parameter
        for item in sorted(cases, key=lambda item: zlib.crc32(item.name.encode()))[CASES_IN_THE_INNER_LOOP:]:
            item.add_marker(pytest.mark.sweep)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if (mark := item.get_closest_marker("kernel")) is not None:
            values = item.callspec.params  # type: ignore[attr-defined]
            name = "-".join([item.originalname, *(str(values[parameter]) for parameter in mark.args)])  # type: ignore[attr-defined]
            item.add_marker(pytest.mark.xdist_group(name))
    mark_for_the_inner_loop(items)
    for item in items:
        # not by keywords, of which a folder's name is one
        if GPUS < 1 and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
        if COUNT < 2 and item.get_closest_marker("gpus"):
            item.add_marker(pytest.mark.skip(reason="needs 2 GPUs"))


def pytest_collection_finish() -> None:
    """Modules and cases live to the end; a collection of garbage that looks through all of them takes a second, and there are hundreds."""
    gc.collect()
    gc.freeze()


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
    registry.cached.clear()


@pytest.fixture(autouse=True)
def memory_for_others(request: pytest.FixtureRequest) -> Iterator[None]:
    """What torch reserves for later goes back after a GPU test that was large: a dozen processes share one GPU."""
    yield
    if request.node.get_closest_marker("gpu") and torch.cuda.is_initialized() and torch.cuda.memory_reserved() > 4 * 2**30:
        gc.collect()
        torch.cuda.empty_cache()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """A test with it runs on the CPU, and on a GPU where one is there: pytest -m gpu for that alone."""
    return str(request.param)


@pytest.fixture
def two_threads() -> Iterator[None]:
    """For tests of what depends on the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)
