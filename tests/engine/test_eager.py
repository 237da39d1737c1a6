"""Calls outside the dispatcher: taken where nothing looks on, equal to the op's bit for bit, and nothing remembered that has changed."""

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
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
from tests.helpers.op_settings import calls_of

BRANCHES: tuple[list[int], list[int]] = ([4, 8], [1, 2])
OPS = ("dilated_attention_op", "block_sparse_attention_op")
KINDS: dict[str, Callable[..., torch.Tensor]] = {
    "dense": lambda *qkv, **options: da.attention(*qkv, is_causal=True, **options),
    "dilated": lambda *qkv, **options: da.dilated_attention(*qkv, *BRANCHES, **options),
    "blocks": lambda *qkv, **options: da.block_sparse_attention(*qkv, LocalWindow(3, block_size=64), **options),
}
of_every_kind = pytest.mark.parametrize("kind", KINDS)
dilated = KINDS["dilated"]


class Listens(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Tagged(torch.Tensor):
    pass


def make(n: int = 16, batch: int = 2, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(n)
    return [torch.randn(batch, n, 4, 8, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for _ in range(3)]


@contextmanager
def default_device() -> Iterator[None]:
    torch.set_default_device("cpu")
    try:
        yield
    finally:
        torch.set_default_device(None)


WHERE: dict[str, tuple[bool, Callable[[], AbstractContextManager[Any]]]] = {
    "nothing": (False, nullcontext),
    "no_grad": (False, torch.no_grad),
    "inference_mode": (False, torch.inference_mode),
    "hooks of saved tensors": (False, lambda: torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)),
    "autocast": (False, lambda: torch.autocast("cpu", torch.bfloat16)),
    "default device": (False, default_device),
    "dispatch mode": (True, Looks),
    "function mode": (True, Listens),
    "flop counter": (True, lambda: FlopCounterMode(display=False)),
    "fake mode": (True, lambda: FakeTensorMode(allow_non_fake_inputs=True)),
    "profiler": (True, lambda: torch.autograd.profiler.profile(use_kineto=False)),
    "forward mode": (True, torch.autograd.forward_ad.dual_level),
}


@of_every_kind
@pytest.mark.parametrize("where", WHERE)
def test_the_op_is_called_where_something_looks_on_and_nowhere_else(kind: str, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    looks_on, context = WHERE[where]
    calls = calls_of(monkeypatch, arguments, *OPS)
    with context():
        KINDS[kind](*make(dtype=torch.float32))
    KINDS[kind](*(torch.nn.Parameter(x.detach()) for x in make()))
    assert len(calls) == looks_on


@of_every_kind
@pytest.mark.parametrize("packed", [False, True])
def test_tensors_say_where_a_call_runs_and_not_the_default_device(kind: str, packed: bool) -> None:
    tensors = make(batch=1)
    options = {"cu_seqlens": torch.tensor([0, 5, 16])} if packed else {}

    def call() -> list[torch.Tensor]:
        out = KINDS[kind](*tensors, **options)
        return [out, *torch.autograd.grad(out.sum(), tensors)]

    expected = call()
    with torch.device("meta"):
        assert all(map(torch.equal, call(), expected))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@of_every_kind
def test_the_op_is_called_for_tensors_of_other_kinds(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (x.detach() for x in make())
    function = KINDS[kind]
    expected = function(q, k, v)
    # −q by a flag that the memory does not show
    negative = torch.complex(torch.zeros_like(q), -q).conj().imag
    assert negative.is_neg()
    calls = calls_of(monkeypatch, arguments, *OPS)
    subclass = function(q.as_subclass(Tagged), k, v)
    assert type(subclass) is Tagged and torch.equal(subclass.as_subclass(torch.Tensor), expected)
    assert torch.equal(function(negative, k, v), expected)
    assert torch.equal(torch.func.vmap(function)(q[None], k[None], v[None])[0], expected)
    function(*(x.to("meta") for x in (q, k, v)))
    torch.func.grad(lambda q: function(q, k, v).sum())(q)
    torch.jit.trace(function, (q, k, v), check_trace=False)
    assert len(calls) == 6


@pytest.mark.parametrize("space", [Space(softcap=True), Space(softcap=True, blocks=True, max_length=200)], ids=["branches", "blocks"])
def test_results_and_gradients_are_those_of_the_op(space: Space) -> None:
    """Bit for bit, in the same memory; once where the call is decided, and once where it is known."""
    for seed in range(30):
        case = random_case(seed, space)
        x = inputs(case, (torch.float64, torch.float32, torch.bfloat16)[seed % 3])
        theirs = results(op, case, x)
        for ours in (results(call, case, x), results(call, case, x)):
            assert all(torch.equal(ours[name], theirs[name]) and ours[name].stride() == theirs[name].stride() for name in theirs), case


@of_every_kind
def test_gradients_in_a_batch_after_reentrant_checkpoints_and_of_changed_inputs(kind: str) -> None:
    q, k, v = tensors = make()
    weights = torch.randn(3, *q.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    out = KINDS[kind](*tensors)
    single = [torch.autograd.grad(out, tensors, weight, retain_graph=True) for weight in weights]
    batched = torch.autograd.grad(out, tensors, weights, is_grads_batched=True)
    torch.testing.assert_close(batched, tuple(torch.stack(grads) for grads in zip(*single, strict=True)), rtol=1e-12, atol=1e-12)
    checkpoint(KINDS[kind], *tensors, use_reentrant=True).backward(weights[0])
    assert all(torch.equal(x.grad, grad) for x, grad in zip(tensors, single[0], strict=True))
    held = q * 1
    out = KINDS[kind](held, k, v)
    held.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_forward_outside_goes_with_a_backward_that_is_looked_at() -> None:
    tensors = make()

    def outputs() -> list[torch.Tensor]:
        return [x.square().sum() for x in dilated(*tensors, return_lse=True)]

    expected, loss = torch.autograd.grad(outputs(), tensors), outputs()
    with FlopCounterMode(display=False) as counter:
        found = torch.autograd.grad(loss, tensors)
    assert counter.get_total_flops() == 2 * da.DilatedPattern(*BRANCHES).flops(16, 4, 8)[1]
    assert all(map(torch.equal, found, expected))


@of_every_kind
def test_no_tensor_is_held_after_a_call(kind: str) -> None:
    tensors = [*make(), torch.arange(16).expand(2, -1) > torch.tensor([[12], [5]])]
    held = [weakref.ref(x) for x in tensors]
    KINDS[kind](*tensors[:3], key_padding_mask=tensors[3]).sum().backward()
    del tensors
    gc.collect()
    assert [ref() for ref in held] == [None] * 4


def test_a_backend_registered_after_a_call_is_taken_by_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_backends", "_orders"):
        monkeypatch.setattr(registry, name, dict(getattr(registry, name)))
    tensors, counted = make(), type("Counted", (MathBackend,), {"name": "counted"})
    torch.autograd.grad(dilated(*tensors).sum(), tensors)
    registry.register(counted())
    registry.set_order("cpu", ("counted",))
    calls = calls_of(monkeypatch, counted, "raw_forward", "raw_backward")
    loss = dilated(*tensors).sum()
    launches = len(calls)
    torch.autograd.grad(loss, tensors)
    registry.set_order("cpu", ("math",))
    dilated(*tensors)
    assert [name for name, _ in calls] == ["raw_forward"] * launches + ["raw_backward"] * launches and launches


def test_a_call_is_decided_once_and_anew_after_anything_it_depends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, tensors = calls_of(monkeypatch, registry, "select"), make()

    def decided() -> int:
        asked.clear()
        out = dilated(*tensors)
        torch.autograd.grad(out, tensors, torch.ones_like(out))
        # and not again by the same call
        dilated(*tensors)
        return len(asked)

    # the forward asks for both passes
    assert [decided(), decided()] == [3, 0]
    refresh()
    assert [decided(), decided()] == [3, 0]
    torch.use_deterministic_algorithms(True)
    try:
        assert decided() == 3 and all(args[0].torch_deterministic for _, args in asked) and decided() == 0
    finally:
        torch.use_deterministic_algorithms(False)
    assert decided() == 0
    run_fused(monkeypatch)
    assert [decided(), decided()] == [3, 0]
    # strides and lengths need a plan of their own, from what was decided for this kind of call; and so do lengths of other types
    for others in ([x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in tensors], make(15)):
        tensors[:] = others
        assert decided() == 0
    for kind in (list, tuple, numpy.array, torch.tensor):
        assert torch.equal(da.dilated_attention(*tensors, kind([4, 8]), kind([1, 2])), dilated(*tensors)) and not asked
    with torch.no_grad():
        dilated(*tensors)
    assert [args[0].needs_grad for _, args in asked] == [False]


def test_what_is_data_is_read_in_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = make(batch=1)
    bounds, mask, step = torch.tensor([0, 5, 16], dtype=torch.int32), torch.zeros(1, 16, dtype=torch.bool), torch.tensor(3)

    def changes(function: Callable[[], torch.Tensor], change: Callable[[], object]) -> None:
        before = function()
        change()
        assert not torch.equal(before, function())

    changes(lambda: dilated(q, k, v, key_padding_mask=mask), lambda: mask[:, 8:].fill_(True))
    mask[:, 2::3] = True
    masked = dilated(q, k, v, key_padding_mask=mask)
    refresh()
    # a call like it without a mask has another plan
    dilated(q, k, v)
    assert torch.equal(dilated(q, k, v, key_padding_mask=mask), masked)
    # an offset may be a tensor, as of a loop that counts in place
    changes(lambda: da.attention(q[:, :1], k, v, is_causal=True, query_offset=step), lambda: step.add_(9))
    assert torch.equal(*(da.attention(q[:, :1], k, v, is_causal=True, query_offset=offset) for offset in (step, 12)))
    changes(lambda: da.attention(q, k, v, dropout_p=0.5), lambda: None)
    # once for both passes
    read = calls_of(monkeypatch, torch.Tensor, "tolist")
    torch.autograd.grad(dilated(q, k, v, cu_seqlens=bounds).sum(), q)
    assert len(read) == 1
    bounds[1] = 17
    with pytest.raises(ValueError, match="never decrease"):
        dilated(q, k, v, cu_seqlens=bounds)
