"""Memory that runs out inside our ops: an error of torch's type, with what the call needs, a way out, and torch's own words."""

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from dilated_attention import (
    DilatedPattern,
    attention,
    block_sparse_attention,
    block_sparse_dilated_attention,
    decode_attention,
    dilated_attention,
)
from dilated_attention.backends import registry
from dilated_attention.engine import memory
from dilated_attention.engine.decode.keys import Cached
from dilated_attention.pattern import LocalWindow

TORCH = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.80 GiB of which 1.00 GiB is free."
CPU = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 2147483648 bytes."
CALLS: dict[str, Callable[..., torch.Tensor]] = {
    "dilated_attention": lambda q, k, v: dilated_attention(q, k, v, [64, 256], [1, 2]),
    "dilated_attention, dense": lambda q, k, v: attention(q, k, v, is_causal=True),
    "dilated_attention, other queries": lambda q, k, v: attention(q[:, :100], k, v),
    "block_sparse_attention": lambda q, k, v: block_sparse_attention(q, k, v, LocalWindow(64)),
    "block_sparse_dilated_attention": lambda q, k, v: block_sparse_dilated_attention(q, k, v, [64], [2], LocalWindow(64)),
}


def fails(kind: type[RuntimeError] = torch.OutOfMemoryError, text: str = TORCH) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise kind(text)

    return fail


def leaves(length: int = 256) -> list[torch.Tensor]:
    return [torch.randn(2, length, 4, 16, requires_grad=True) for _ in range(3)]


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Makes a pass of every CPU backend fail."""

    def breaks(pass_: str, fail: Callable[..., Any] | None = None) -> None:
        for name in ("sdpa_cpu", "math"):
            monkeypatch.setattr(type(registry.get(name)), pass_, fail or fails())

    yield breaks


@pytest.mark.parametrize(("kind", "text"), [(torch.OutOfMemoryError, TORCH), (RuntimeError, CPU)], ids=["gpu", "cpu"])
@pytest.mark.parametrize("pass_", ["forward", "backward"])
@pytest.mark.parametrize("name", CALLS)
def test_every_attention_says_it(name: str, pass_: str, kind: type[RuntimeError], text: str, broken: Callable[..., None]) -> None:
    q, k, v = leaves()
    out = CALLS[name](q, k, v)
    broken(pass_, fails(kind, text))
    with pytest.raises(RuntimeError) as found:
        CALLS[name](q, k, v) if pass_ == "forward" else out.sum().backward()
    # torch's own error is the cause, as it was raised
    assert type(found.value) is kind and str(found.value.__cause__) == text
    # accelerate and others look into a single argument for torch's words
    (said,) = found.value.args
    assert said.startswith(f"the {pass_} of {name.split(',')[0]} needs at least ") and said.endswith(text)
    assert "iB (q, k, v " in said and "dq, dk, dv " in said and "fewer sequences or positions" in said


def test_other_ops_say_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cached, "places", fails())
    q, cache = torch.randn(3, 1, 4, 16), torch.randn(3, 100, 2, 16)
    with pytest.raises(torch.OutOfMemoryError, match=r"the forward of decode_attention needs at least .*CUDA out of memory"):
        decode_attention(q, cache, cache, torch.tensor([7, 99, 50]), DilatedPattern((32, 64), (1, 2)))


def test_what_is_free_on_a_gpu_counts_what_the_allocator_holds_unused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's path, on a CPU."""
    figures = {"mem_get_info": (2**30, 2**36), "memory_reserved": 2**32, "memory_allocated": 2**31}
    for name, figure in figures.items():
        monkeypatch.setattr(f"torch.cuda.{name}", lambda device, figure=figure: figure)
    with torch._subclasses.FakeTensorMode(), pytest.raises(torch.OutOfMemoryError, match=r"of norm .*\(inputs 4 KiB\); free 3 GiB\. Call"):
        memory.explain_shortage(torch.OutOfMemoryError(TORCH), "forward of norm", {"x": torch.empty(1024, device="cuda:0")})


def test_other_errors_are_left_alone_and_nothing_is_hidden(broken: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = leaves()
    broken("forward", fails(RuntimeError, "something else"))
    with pytest.raises(RuntimeError, match=r"^something else$"):
        dilated_attention(q, k, v, [64], [1])
    broken("forward")
    monkeypatch.setattr(memory, "needed", fails(ValueError, "no such field"))  # type: ignore[arg-type]
    with pytest.raises(torch.OutOfMemoryError, match=r"ran out of memory.*\(ValueError: no such field\).*CUDA out of memory"):
        dilated_attention(q, k, v, [64], [1])


def test_no_memory_is_kept_once_the_error_is_gone(broken: Callable[..., None]) -> None:
    """The frames of a traceback hold the failed call's tensors; nothing else does, and there are no reference cycles."""
    made: list[weakref.ref[torch.Tensor]] = []

    def fail(*_: Any, **__: Any) -> Any:
        scratch = torch.zeros(1000)
        made.append(weakref.ref(scratch))
        raise torch.OutOfMemoryError(TORCH)

    broken("forward", fail)
    q, k, v = leaves()
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(torch.OutOfMemoryError):
            dilated_attention(q, k, v, [64], [1])
        assert made[0]() is None
    finally:
        gc.enable()


def test_through_torch_compile(broken: Callable[..., None]) -> None:
    q, k, v = leaves(128)
    compiled = torch.compile(lambda q, k, v: dilated_attention(q * 2, k, v, [64, 128], [1, 2]).sum(), fullgraph=True, backend="aot_eager")
    loss = compiled(q, k, v)
    broken("backward")
    with pytest.raises(torch.OutOfMemoryError, match="the backward of dilated_attention needs at least"):
        loss.backward()
