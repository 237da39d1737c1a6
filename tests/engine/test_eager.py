"""Calls outside the dispatcher: taken where nothing looks on, equal to the op's bit for bit, and nothing remembered that has changed."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import numpy
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import dilated_attention as da
from dilated_attention.backends import MathBackend, refresh, registry
from dilated_attention.functional import arguments
from dilated_attention.pattern import LocalWindow
from dilated_attention.testing import Space, call, inputs, random_case, results
from tests.helpers.forms import Looks, op
from tests.helpers.fused import run_fused

BRANCHES: tuple[list[int], list[int]] = ([4, 8], [1, 2])


class Listens(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Tagged(torch.Tensor):
    pass


def make(
    n: int = 16, *, heads: int = 4, kv_heads: int = 4, batch: int = 2, dim: int = 8, dtype: torch.dtype = torch.float64
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(n)
    shapes = [(batch, n, heads, dim), (batch, n, kv_heads, dim), (batch, n, kv_heads, dim)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


@pytest.fixture
def ops(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the ops that public functions called."""
    called: list[str] = []
    for kind, name in (("dilated", "dilated_attention_op"), ("blocks", "block_sparse_attention_op")):
        op = getattr(arguments, name)
        monkeypatch.setattr(arguments, name, lambda *args, kind=kind, op=op: called.append(kind) or op(*args))
    return called


def dense(*qkv: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = da.attention(*qkv, is_causal=True)
    return out


def dilated(*qkv: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = da.dilated_attention(*qkv, *BRANCHES)
    return out


def blocks(*qkv: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = da.block_sparse_attention(*qkv, LocalWindow(3, block_size=64))
    return out


KINDS = {"dense": dense, "dilated": dilated, "blocks": blocks}


@contextmanager
def default_device() -> Iterator[None]:
    torch.set_default_device("cpu")
    try:
        yield
    finally:
        torch.set_default_device(None)


PLAIN: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "nothing": nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "hooks of saved tensors": lambda: torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "default device": default_device,
}
LOOKED_ON: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "dispatch mode": Looks,
    "function mode": Listens,
    "flop counter": lambda: FlopCounterMode(display=False),
    "fake mode": lambda: FakeTensorMode(allow_non_fake_inputs=True),
    "profiler": lambda: torch.autograd.profiler.profile(use_kineto=False),
    "forward mode": torch.autograd.forward_ad.dual_level,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", PLAIN)
def test_no_op_is_called_where_nothing_looks_on(kind: str, where: str, ops: list[str]) -> None:
    with PLAIN[where]():
        KINDS[kind](*make(dtype=torch.float32))
    KINDS[kind](*(torch.nn.Parameter(x.detach()) for x in make()))
    assert not ops


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", LOOKED_ON)
def test_the_op_is_called_where_something_looks_on(kind: str, where: str, ops: list[str]) -> None:
    with LOOKED_ON[where]():
        KINDS[kind](*make())
    assert len(ops) == 1


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_the_op_is_called_for_tensors_of_other_kinds(kind: str, ops: list[str]) -> None:
    q, k, v = (x.detach() for x in make())
    call = KINDS[kind]
    expected = call(q, k, v)
    subclass = call(q.as_subclass(Tagged), k, v)
    assert type(subclass) is Tagged and torch.equal(subclass.as_subclass(torch.Tensor), expected) and len(ops) == 1
    call(*(x.to("meta") for x in (q, k, v)))
    assert len(ops) == 2
    # −q by a flag that the memory does not show
    negative = torch.complex(torch.zeros_like(q), q).conj().imag
    assert negative.is_neg()
    assert torch.equal(call(negative, k, v), call(-q, k, v)) and len(ops) == 3
    assert torch.equal(torch.func.vmap(call)(q[None], k[None], v[None])[0], expected) and len(ops) == 4
    torch.func.grad(lambda q: call(q, k, v).sum())(q)
    assert len(ops) == 5
    torch.jit.trace(call, (q, k, v), check_trace=False)
    assert len(ops) == 6


def test_a_compiled_call_holds_the_op() -> None:
    torch._dynamo.reset()
    found: list[Any] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        found.extend(node.target for node in graph.graph.nodes)
        return graph.forward

    torch.compile(dilated, backend=backend, fullgraph=True)(*make())
    names = {str(target) for target in found}
    assert any("dilated_attention.dilated_attention" in name for name in names), names


def transposed(x: torch.Tensor) -> torch.Tensor:
    """Of a last stride that is not 1."""
    return x.detach().transpose(1, 3).contiguous().transpose(1, 3).requires_grad_()


def padding() -> torch.Tensor:
    return torch.arange(16).expand(2, -1) > torch.tensor([[12], [5]])


@pytest.mark.parametrize("space", [Space(softcap=True), Space(softcap=True, blocks=True, max_length=200)], ids=["branches", "blocks"])
def test_results_and_gradients_are_those_of_the_op(space: Space) -> None:
    """Bit for bit, in the same memory; once where the call is decided, and once where it is known."""
    for seed in range(60):
        case = random_case(seed, space)
        x = inputs(case, (torch.float64, torch.float32, torch.bfloat16)[seed % 3])
        theirs = results(op, case, x)
        for ours in (results(call, case, x), results(call, case, x)):
            assert all(torch.equal(ours[name], theirs[name]) and ours[name].stride() == theirs[name].stride() for name in theirs), case


@pytest.mark.parametrize("kind", KINDS)
def test_a_changed_input_is_refused_by_the_backward(kind: str) -> None:
    q, k, v = make()
    held = q * 1
    out = KINDS[kind](held, k, v)
    held.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_of_gradients_is_mapped(kind: str) -> None:
    inputs = make()
    weights = torch.randn(3, *inputs[0].shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    batched = torch.autograd.grad(KINDS[kind](*inputs), inputs, weights, is_grads_batched=True)
    for i in range(3):
        for mine, other in zip(batched, torch.autograd.grad(KINDS[kind](*inputs), inputs, weights[i]), strict=True):
            torch.testing.assert_close(mine[i], other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_reentrant_checkpointed_gradients_are_equal(kind: str) -> None:
    inputs = make()
    expected = torch.autograd.grad(KINDS[kind](*inputs).square().sum(), inputs)
    for x in inputs:
        x.grad = None
    checkpoint(KINDS[kind], *inputs, use_reentrant=True).square().sum().backward()
    for x, grad in zip(inputs, expected, strict=True):
        assert x.grad is not None and torch.equal(x.grad, grad)


def test_a_forward_outside_goes_with_a_backward_that_is_looked_at() -> None:
    inputs = make()

    def outputs() -> list[torch.Tensor]:
        out, lse = da.dilated_attention(*inputs, *BRANCHES, return_lse=True)
        return [out.square().sum(), lse.square().sum()]

    expected, loss = torch.autograd.grad(outputs(), inputs), outputs()
    with FlopCounterMode(display=False) as counter:
        found = torch.autograd.grad(loss, inputs)
    assert counter.get_total_flops() == 2 * da.DilatedPattern(*BRANCHES).flops(16, 4, 8)[1]
    assert all(torch.equal(mine, other) for mine, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_no_tensor_is_held_after_a_call(kind: str) -> None:
    inputs = [*make(), padding()]
    held = [weakref.ref(x) for x in inputs]
    call = {"dense": da.attention, "dilated": lambda *x, **o: da.dilated_attention(*x, *BRANCHES, **o)}.get(
        kind, lambda *x, **o: da.block_sparse_attention(*x, LocalWindow(3), **o)
    )
    call(*inputs[:3], key_padding_mask=inputs[3]).sum().backward()
    del inputs
    gc.collect()
    assert [ref() for ref in held] == [None] * 4


class Counted(MathBackend):
    """Math that counts its passes."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.forwards, self.backwards = name, 0, 0

    def raw_forward(self, *args: Any, **kwargs: Any) -> Any:
        self.forwards += 1
        return super().raw_forward(*args, **kwargs)

    def raw_backward(self, *args: Any, **kwargs: Any) -> Any:
        self.backwards += 1
        return super().raw_backward(*args, **kwargs)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    """A backend that is registered for this test alone."""
    monkeypatch.setattr(registry, "_backends", dict(registry._backends))
    monkeypatch.setattr(registry, "_orders", dict(registry._orders))
    monkeypatch.setattr(registry, "cached", {})
    return Counted("counted")


def test_a_backend_registered_after_a_call_is_taken_by_the_next_one(counted: Counted) -> None:
    inputs = make()
    torch.autograd.grad(dilated(*inputs).sum(), inputs)
    registry.register(counted)
    registry.set_order("cpu", ("counted",))
    loss = dilated(*inputs).sum()
    launches = counted.forwards
    assert launches > 0 == counted.backwards
    torch.autograd.grad(loss, inputs)
    assert counted.backwards == launches
    registry.set_order("cpu", ("math",))
    dilated(*inputs)
    assert counted.forwards == launches


def decisions(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    asked: list[Any] = []
    select = registry.select
    monkeypatch.setattr(registry, "select", lambda request, name: asked.append(request) or select(request, name))
    return asked


def test_a_call_is_decided_once_and_anew_after_anything_it_depends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, inputs = decisions(monkeypatch), make()

    def decided(*, backward: int = 1) -> int:
        asked.clear()
        out = dilated(*inputs)
        passes = len(asked)
        torch.autograd.grad(out, inputs, torch.ones_like(out))
        assert len(asked) == passes + (backward if passes else 0)
        return len(asked)

    # the forward asks for both passes
    assert decided() == 3
    assert [decided(), decided()] == [0, 0]
    refresh()
    assert decided() == 3 and decided() == 0
    torch.use_deterministic_algorithms(True)
    try:
        assert decided() == 3 and all(request.torch_deterministic for request in asked) and decided() == 0
    finally:
        torch.use_deterministic_algorithms(False)
    assert decided() == 0
    run_fused(monkeypatch)
    assert decided() == 3 and decided() == 0
    # strides and lengths need a plan of their own, from what was decided for this kind of call
    inputs = [transposed(x).detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in inputs]
    assert decided() == 0
    inputs = make(15)
    assert decided() == 0
    with torch.no_grad():
        asked.clear()
        dilated(*inputs)
        assert [request.needs_grad for request in asked] == [False]


def test_what_is_data_is_read_in_every_call() -> None:
    q, k, v = make(batch=1)
    bounds, mask = torch.tensor([0, 5, 16], dtype=torch.int32), torch.zeros(1, 16, dtype=torch.bool)
    first = da.dilated_attention(q, k, v, *BRANCHES, cu_seqlens=bounds)
    bounds[1] = 9
    second = da.dilated_attention(q, k, v, *BRANCHES, cu_seqlens=bounds)
    assert not torch.equal(first, second)
    bounds[1] = 17
    with pytest.raises(ValueError, match="never decrease"):
        da.dilated_attention(q, k, v, *BRANCHES, cu_seqlens=bounds)
    first = da.dilated_attention(q, k, v, *BRANCHES, key_padding_mask=mask)
    mask[:, 8:] = True
    assert not torch.equal(first, da.dilated_attention(q, k, v, *BRANCHES, key_padding_mask=mask))
    # an offset may be a tensor, as of a loop that counts in place
    step, row = torch.tensor(3), q[:, :1]
    first = da.attention(row, k, v, is_causal=True, query_offset=step)
    step += 9
    second = da.attention(row, k, v, is_causal=True, query_offset=step)
    assert torch.equal(second, da.attention(row, k, v, is_causal=True, query_offset=12)) and not torch.equal(first, second)
    drawn = [da.attention(q, k, v, dropout_p=0.5) for _ in range(2)]
    assert not torch.equal(*drawn)


def test_documents_are_read_once_for_both_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, bounds = make(batch=1), torch.tensor([0, 5, 16], dtype=torch.int32)
    read: list[int] = []
    original = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda x: read.append(1) or original(x))
    torch.autograd.grad(da.dilated_attention(*inputs, *BRANCHES, cu_seqlens=bounds).sum(), inputs)
    assert len(read) == 1


@pytest.mark.parametrize("kind", [list, tuple, numpy.array, torch.tensor])
def test_lengths_of_any_type_are_one_call(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make()
    expected = dilated(*inputs)
    asked = decisions(monkeypatch)
    assert torch.equal(da.dilated_attention(*inputs, kind([4, 8]), kind([1, 2])), expected) and not asked


def test_facts_are_those_of_the_backend_at_the_time(counted: Counted) -> None:
    """A record names a backend and copies none of what it is asked while it runs."""
    registry.register(counted)
    q, k, v = make()
    da.attention(q, k, v, backend="counted")
    counted.capabilities = replace(counted.capabilities, max_batch=1)
    da.attention(q, k, v, backend="counted")
    assert counted.forwards == 1 + 2
