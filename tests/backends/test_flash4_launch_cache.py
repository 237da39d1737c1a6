"""FlashAttention-4's kernels called again: on a stand-in with the interface's shape, since the package needs a GPU."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dilated_attention.backends.flash import flash4_launch_cache
from dilated_attention.backends.flash.flash4_launch_cache import Replay


def make_interface(*, copies: bool = False, zeros: bool = False) -> Any:
    """A function of two kernels: scratch = 2 · x (cleared first by the kernel), y = scratch · scale + 1."""
    count = {"calls": 0, "kernels": 0}

    def first(x: torch.Tensor, scratch: torch.Tensor, _: None) -> None:
        count["kernels"] += 1
        scratch.copy_(x * 2)

    def second(scratch: torch.Tensor, y: torch.Tensor, scale: float) -> None:
        count["kernels"] += 1
        y.copy_(scratch * scale + 1)

    def pre() -> None: ...

    def main(x: torch.Tensor, y: torch.Tensor, scale: float) -> None:
        count["calls"] += 1
        scratch = torch.empty(x.shape)
        extra = torch.zeros(3) if zeros else None
        for owner, kernel in ((pre, first), (main, second)):
            if "key" not in owner.compile_cache:  # type: ignore[attr-defined]
                owner.compile_cache["key"] = kernel  # type: ignore[attr-defined]
        pre.compile_cache["key"](x.clone() if copies else x.detach(), scratch, extra)  # type: ignore[attr-defined]
        main.compile_cache["key"](scratch, y, scale)  # type: ignore[attr-defined]

    pre.compile_cache, main.compile_cache = {}, {}  # type: ignore[attr-defined]
    return SimpleNamespace(pre=pre, main=main, count=count)


def run(replay: Replay, interface: Any, x: torch.Tensor, y: torch.Tensor, scale: float = 3.0) -> torch.Tensor:
    replay(interface, (x, y), (scale,), lambda: interface.main(x, y, scale))
    return y


def test_later_calls_run_the_kernels_on_their_own_tensors() -> None:
    interface, replay = make_interface(), Replay(("pre", "main"), num_scratch=1)
    for call in range(4):
        x, y = torch.randn(4, 8), torch.empty(4, 8)
        assert torch.equal(run(replay, interface, x, y), x * 2 * 3.0 + 1)
        # a first call may be the only one with its length, so the second is recorded
        assert interface.count == {"calls": min(call + 1, 2), "kernels": 2 * call + 2}
    assert type(interface.main.compile_cache) is dict, "the caches are put back"


@pytest.mark.parametrize("change", ["shape", "stride", "scale", "dtype"])
def test_what_the_kernels_may_depend_on_is_recorded_apart(change: str) -> None:
    interface, replay = make_interface(), Replay(("pre", "main"), num_scratch=1)
    for _ in range(3):
        run(replay, interface, torch.randn(4, 8), torch.empty(4, 8))
    x = {"shape": torch.randn(2, 8), "stride": torch.randn(8, 4).t(), "dtype": torch.randn(4, 8).double()}.get(change, torch.randn(4, 8))
    scale = 5.0 if change == "scale" else 3.0
    for calls in (3, 4, 4):
        y = run(replay, interface, x, torch.empty(x.shape, dtype=x.dtype), scale)
        torch.testing.assert_close(y, x * 2 * scale + 1, atol=1e-5, rtol=0)
        assert interface.count["calls"] == calls


def test_the_oldest_recording_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash4_launch_cache, "_MOST_PROGRAMS", 2)
    interface, replay = make_interface(), Replay(("pre", "main"), num_scratch=1)
    for rows, calls in ((1, 1), (1, 2), (2, 3), (2, 4), (2, 4), (1, 4), (3, 5), (2, 5), (1, 6), (1, 7)):
        run(replay, interface, torch.randn(rows, 8), torch.empty(rows, 8))
        assert interface.count["calls"] == calls


@pytest.mark.parametrize("why", ["copies", "zeros", "aliased", "no_caches"])
def test_what_would_not_be_the_same_goes_the_long_way(why: str) -> None:
    interface, replay = make_interface(copies=why == "copies", zeros=why == "zeros"), Replay(("pre", "main"), num_scratch=1)
    if why == "no_caches":
        replay = Replay(("pre", "other"), num_scratch=1)
    for call in range(3):
        x, y = torch.randn(4, 8), torch.empty(4, 8)
        expected = x * 2 * 3.0 + 1
        if why == "aliased":
            y = x
        assert torch.equal(run(replay, interface, x, y), expected)
        assert interface.count["calls"] == call + 1


def test_an_error_in_the_recorded_call_puts_the_caches_back() -> None:
    interface, replay = make_interface(), Replay(("pre", "main"), num_scratch=1)
    run(replay, interface, torch.randn(4, 8), torch.empty(4, 8))
    interface.main.compile_cache["key"] = None
    with pytest.raises(TypeError):
        run(replay, interface, torch.randn(4, 8), torch.empty(4, 8))
    assert type(interface.main.compile_cache) is dict


def test_scratch_that_kernels_add_to_starts_as_zeros_again() -> None:
    """As grouped heads add up their gradients: y = x + x, summed in scratch memory that the interface hands out cleared."""

    def adding(x: torch.Tensor, scratch: torch.Tensor, total: torch.Tensor, y: torch.Tensor) -> None:
        scratch.copy_(x)
        total.add_(scratch).add_(x)
        y.copy_(total)

    def main() -> None: ...

    main.compile_cache = {"key": adding}  # type: ignore[attr-defined]
    interface = SimpleNamespace(main=main)
    replay = Replay(("main",), num_scratch=2, num_zeroed=1)
    calls = 0

    def call() -> None:
        nonlocal calls
        calls += 1
        main.compile_cache["key"](x, torch.empty(4), torch.zeros(4), y)  # type: ignore[attr-defined]

    for _ in range(3):
        x, y = torch.randn(4), torch.empty(4)
        replay(interface, (x, y), (), call)
        assert torch.equal(y, 2 * x)
    assert calls == 2
