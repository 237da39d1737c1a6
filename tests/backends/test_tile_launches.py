"""Launches of kernels, on stand-ins of Triton's: bound once, shared where Triton selects one kernel, compiled ahead."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from dilated_attention.backends.tiles import launch as tile_launch
from dilated_attention.backends.tiles.launch import NO_DEVICE, KernelLaunch


class Compiled:
    """What a compiled kernel is to a launch."""

    function, packed_metadata = "function", "metadata"

    def __init__(self) -> None:
        self.runs: list[tuple[object, ...]] = []

    def run(self, *args: object) -> None:
        self.runs.append(args)


def at(*pointers: int) -> list[Any]:
    """Stand-ins of tensors at these addresses."""
    return [SimpleNamespace(data_ptr=lambda pointer=pointer: pointer, device=torch.device("cpu")) for pointer in pointers]


class Kernel:
    """A kernel before it is compiled, which counts how often Triton would bind its arguments."""

    arg_names = ("x_ptr", "y_ptr", "n", "SECOND", "FIRST")
    params = tuple(SimpleNamespace(do_not_specialize=False) for _ in arg_names)

    def __init__(self) -> None:
        self.bound: list[tuple[tuple[int, ...], tuple[object, ...], dict[str, object]]] = []
        self.compiled: list[Compiled] = []

    def __getitem__(self, grid: tuple[int, ...]) -> object:
        def bind(*args: object, **kwargs: object) -> Compiled:
            self.bound.append((grid, args, kwargs))
            self.compiled.append(Compiled())
            return self.compiled[-1]

        return bind


def test_a_launch_is_bound_once_and_again_where_pointers_are_not_aligned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 100 + device, raising=False)
    kernel = Kernel()
    launch = KernelLaunch(kernel, 7, [5], {"FIRST": 1, "SECOND": 2}, warps=8, stages=3, dtypes=())
    call = [((32, 8), 1), ((32, 64), 2), ((48, 160), 2), ((49, 160), 3), ((16, 16), 3)]
    given = []
    for pointers, bound in call:
        given.append(at(*pointers))
        launch(given[-1], 1)
        # the first pointers were not aligned, so that their kernel may not serve others
        assert len(kernel.bound) == bound
    options = {"FIRST": 1, "SECOND": 2, "num_warps": 8, "num_stages": 3}
    bound_tensors = [tuple(given[i]) for i in (0, 1, 3)]
    assert kernel.bound == [((7, 1), (*tensors, 5), options) for tensors in bound_tensors]
    first, second, third = (compiled.runs for compiled in kernel.compiled)
    assert not first and not third
    # constants in the order of the kernel's own signature
    fixed = (7, 1, 1, 101, "function", "metadata", None, None, None)
    assert second == [(*fixed, 48, 160, 5, 2, 1), (*fixed, 16, 16, 5, 2, 1)]


class Compilable(Kernel):
    """A kernel whose first compilation fails."""

    def warmup(self, *args: object, **kwargs: object) -> Compiled:
        self.bound.append(((), args, kwargs))
        if len(self.bound) == 1:
            raise ValueError("the compiler says no")
        self.compiled.append(Compiled())
        return self.compiled[-1]


@pytest.mark.parametrize(
    ("shared", "numbers", "changes"),
    [
        (True, [7], {}),
        *((False, [number], {}) for number in (1, 16, 2**31 + 5, -(2**31) - 5)),
        *((False, [5], change) for change in ({"constants": {"FIRST": 1, "SECOND": 3}}, {"warps": 8}, {"stages": 2}, {"dtypes": "other"})),
    ],
    ids=str,
)
def test_launches_share_a_kernel_where_triton_selects_one(
    shared: bool, numbers: list[int], changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It compiles others for 1, for multiples of 16 and for numbers beyond 32 bits."""
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 100 + device, raising=False)
    kernel, some = Compilable(), {"constants": {"FIRST": 1, "SECOND": 2}, "dtypes": "some"}
    for values, options in (([5], some), (numbers, some | changes)):
        KernelLaunch(kernel, 7, values, **options)(at(16, 32), 1)  # type: ignore[arg-type]
    assert len(kernel.bound) == (1 if shared else 2)


def test_a_kernel_that_compiles_ahead_is_waited_for_where_it_is_launched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Meta tensors start it, in a thread, for the dtypes and numbers of the launch."""
    driver = SimpleNamespace(launcher_cls=lambda src, metadata: None, get_current_device=lambda: 1)
    monkeypatch.setattr("triton.runtime.driver", SimpleNamespace(active=driver))
    monkeypatch.setattr("triton.runtime.cache.triton_key", lambda: "")
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 100 + device, raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    monkeypatch.setattr(Compiled, "src", None, raising=False)
    monkeypatch.setattr(Compiled, "metadata", None, raising=False)
    kernel, x, y = Compilable(), torch.empty(4, device="meta"), torch.empty(4, dtype=torch.int32, device="meta")
    launch = KernelLaunch(kernel, 7, [5], {"FIRST": 1, "SECOND": 2}, dtypes=(x.dtype, y.dtype))
    launch((x, y), NO_DEVICE)
    launch((x, y), NO_DEVICE)
    with pytest.raises(ValueError, match="the compiler says no"):
        launch(at(16, 32), 1)
    launch((x, y), NO_DEVICE)
    tile_launch.finish()
    assert len(kernel.bound) == 2
    for rows in (16, 48):
        # of another length, and so another launch
        KernelLaunch(kernel, rows, [5], {"FIRST": 1, "SECOND": 2}, dtypes=(x.dtype, y.dtype))(at(rows, 32), 1)
    assert len(kernel.bound) == 2
    options = {"FIRST": 1, "SECOND": 2, "num_warps": 4, "num_stages": 1}
    assert all(args == (x.dtype, y.dtype, 5) and named == {"grid": (1,), **options} for _, args, named in kernel.bound)
    assert [run[:1] + run[-5:] for run in kernel.compiled[0].runs] == [(16, 16, 32, 5, 2, 1), (48, 48, 32, 5, 2, 1)]
