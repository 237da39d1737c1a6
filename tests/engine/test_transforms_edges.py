"""Transforms of torch.func where a call draws, keeps, compiles, is empty or takes a shortcut; and modules with a batch of gradients."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import nn
from torch.func import functional_call, grad, jvp, vjp, vmap

import dilated_attention as da
from tests.engine.test_transforms import assert_equal
from tests.helpers.op_settings import settings
from tests.helpers.transform_cases import BLOCKS, BRANCHES, D, H, N, functions, loss_of, many, qkv, weights_of

Attend = Callable[..., torch.Tensor]
FUNCTIONS: dict[str, Attend] = {name: function for name, (function, _) in functions().items() if name.islower()}
DRAWN: dict[str, Attend] = {name: partial(function, dropout_p=0.5) for name, function in FUNCTIONS.items()}
DRAWN["detached"] = partial(DRAWN["dilated_attention"], mixture_grad="detached")


def one_by_one(function: Attend, *x: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
    """(out, dq, dk, dv) of each entry by plain calls, whose seeds are drawn as a mapped one draws its own."""
    results = []
    for entry in zip(*x, strict=True):
        leaves = [tensor.clone().requires_grad_() for tensor in entry]
        out = function(*leaves)
        results.append((out.detach(), *torch.autograd.grad((out * weights_of(out)).sum(), leaves)))
    return results


def out_and_gradients(function: Attend) -> Callable[..., tuple[torch.Tensor, ...]]:
    def both(*x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out, pull = vjp(function, *x)
        return out, *pull(weights_of(out))

    return both


@pytest.mark.parametrize("name", DRAWN)
def test_a_mapped_dropout_draws_a_mask_for_each_entry(name: str) -> None:
    torch.manual_seed(11)
    seeds = torch.randint(2**62, (3,), dtype=torch.int64)
    torch.manual_seed(11)
    mapped = vmap(out_and_gradients(DRAWN[name]), randomness="different")(*many())
    drawn = iter(seeds)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "randint", lambda *_, **__: next(drawn))
        expected = one_by_one(DRAWN[name], *many())
    assert_equal(mapped, tuple(torch.stack(parts) for parts in zip(*expected, strict=True)))


@pytest.mark.parametrize("name", DRAWN)
def test_a_mapped_dropout_may_be_the_same_for_all_entries_and_is_refused_by_default(name: str) -> None:
    x = tuple(tensor[:1].expand_as(tensor) for tensor in many())
    torch.manual_seed(5)
    mapped = vmap(out_and_gradients(DRAWN[name]), randomness="same")(*x)
    torch.manual_seed(5)
    (expected,) = one_by_one(DRAWN[name], *(tensor[:1] for tensor in x))
    for ours, other in zip(mapped, expected, strict=True):
        assert_equal(tuple(ours), (other,) * 3)
    with pytest.raises(RuntimeError, match="randomness"):
        vmap(DRAWN[name])(*x)


def test_mapped_calls_are_one_call_of_a_larger_batch_without_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    from dilated_attention.engine.branches import run_problems

    for name in ("run_forward", "run_backward"):
        inner = getattr(run_problems, name)
        monkeypatch.setattr(run_problems, name, lambda *args, inner=inner: calls.append(1) or inner(*args))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        vmap(grad(loss_of(lambda *x: da.dilated_attention(*x, *BRANCHES))))(*many())
    assert len(calls) == 2


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if "ring" not in name])
@pytest.mark.parametrize(
    ("shortcut", "how"),
    [(shortcut, how) for shortcut in ("no_batch", "no_rows", "no_grad", "keys_alone", "leaf") for how in ("jvp", "make_dual")]
    # torch makes no dual tensor in inference mode
    + [("inference_mode", "jvp")],
)
def test_a_tangent_is_refused_on_every_shortcut(name: str, shortcut: str, how: str) -> None:
    q, k, v = qkv()
    if shortcut == "no_batch":
        q, k, v = q[:0], k[:0], v[:0]
    elif shortcut == "no_rows":
        q, k, v = q[:, :0], k[:, :0], v[:, :0]
    elif shortcut == "leaf":
        q = q.requires_grad_()

    def attend(x: torch.Tensor) -> torch.Tensor:
        arguments = (q, x, v) if shortcut == "keys_alone" else (x, k, v)
        if shortcut == "no_grad":
            with torch.no_grad():
                return FUNCTIONS[name](*arguments)
        return FUNCTIONS[name](*arguments)

    given = k if shortcut == "keys_alone" else q
    context = torch.inference_mode() if shortcut == "inference_mode" else torch.enable_grad()
    with context, pytest.raises(NotImplementedError, match="has no forward mode, and got a tangent"):
        if how == "jvp":
            jvp(attend, (given,), (torch.ones_like(given),))
        else:
            with forward_ad.dual_level():
                attend(forward_ad.make_dual(given, torch.ones_like(given)))


def test_a_tangent_of_something_else_leaves_attention_alone() -> None:
    q, k, v = qkv()
    out, tangent = jvp(lambda scale: da.attention(q, k, v) * scale, (torch.tensor(2.0),), (torch.tensor(1.0),))
    assert torch.equal(out, 2 * da.attention(q, k, v)) and torch.equal(tangent, da.attention(q, k, v).to(tangent.dtype))
    with forward_ad.dual_level():
        assert forward_ad.unpack_dual(da.attention(q, k, v)).tangent is None
    with pytest.raises(NotImplementedError, match="has no forward mode"):
        jvp(lambda sinks: da.attention(q, k, v, sinks=sinks), (torch.zeros(H),), (torch.ones(H),))


@pytest.mark.parametrize("function", [da.attention, lambda *x: da.block_sparse_attention(*x, BLOCKS), da.ring_attention])
def test_a_tangent_of_the_gradient_is_refused(function: Attend) -> None:
    q, k, v = (x.requires_grad_() for x in qkv())
    out = function(q, k, v)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="has no forward mode, and got a tangent"):
        torch.autograd.grad(out, q, forward_ad.make_dual(torch.ones_like(out), torch.ones_like(out)))


def test_a_tangent_of_a_parameter_is_refused() -> None:
    module = da.MultiheadDilatedAttention(H * D, H, *BRANCHES).double()
    x = qkv()[0].flatten(2)
    parameters = dict(module.named_parameters())
    for name in ("q_proj.weight", "k_proj.weight", "v_proj.bias"):
        others = {key: value.detach() for key, value in parameters.items() if key != name}
        call = lambda p, name=name, others=others: functional_call(module, {name: p, **others}, (x,))[0]  # noqa: E731
        with pytest.raises(NotImplementedError, match="has no forward mode"):
            jvp(call, (parameters[name].detach(),), (torch.ones_like(parameters[name]),))
    # those behind the attention have one
    others = {key: value.detach() for key, value in parameters.items() if key != "out_proj.bias"}
    call = lambda p: functional_call(module, {"out_proj.bias": p, **others}, (x,))[0]  # noqa: E731
    bias = parameters["out_proj.bias"].detach()
    assert torch.equal(jvp(call, (bias,), (torch.ones_like(bias),))[1], torch.ones_like(x))


def test_an_op_called_by_itself_transforms_as_its_function_does() -> None:
    q, k, v = qkv()
    branches = (tuple(BRANCHES[0]), tuple(BRANCHES[1]), "cyclic", "all", "mask")
    rest = (*[None] * 5, *settings(branches=branches, scale=D**-0.5, needs_grad=True).arguments())

    def attend(*x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.ops.dilated_attention.dilated_attention(*x, *rest)[0]
        return out

    assert_equal(grad(loss_of(attend))(q, k, v), grad(loss_of(lambda *x: da.dilated_attention(*x, *BRANCHES)))(q, k, v))
    with pytest.raises(NotImplementedError, match="has no forward mode"):
        jvp(attend, (q, k, v), (q, k, v))


def test_vmap_over_nothing_gives_nothing() -> None:
    assert vmap(lambda *x: da.attention(*x))(*(x[:0] for x in many())).shape == (0, *qkv()[0].shape)
    with pytest.raises(NotImplementedError, match="size 0"):
        vmap(DRAWN["attention"], randomness="different")(*(x[:0] for x in many()))


def test_functionalize_still_calls_the_op() -> None:
    assert_equal(torch.func.functionalize(da.attention)(*qkv()), da.attention(*qkv()))


@pytest.mark.parametrize("name", ["grad", "vmap_of_grad", "jvp"])
def test_transforms_inside_a_compiled_function(name: str) -> None:
    attend = lambda *x: da.dilated_attention(*x, *BRANCHES)  # noqa: E731
    inside: dict[str, Any] = {
        "grad": lambda *x: grad(loss_of(attend))(*x),
        "vmap_of_grad": lambda *x: vmap(grad(loss_of(attend)))(*x),
        "jvp": lambda *x: jvp(attend, x, x)[1],
    }
    torch._dynamo.reset()
    graph = torch.compile(inside[name], backend="aot_eager", fullgraph=name != "jvp")
    x = many() if name == "vmap_of_grad" else qkv()
    if name == "jvp":
        with pytest.raises(NotImplementedError, match="has no forward mode"):
            graph(*x)
    else:
        assert_equal(graph(*x), inside[name](*x))


MODULES: dict[str, Callable[..., nn.Module]] = {
    "rotary": lambda **options: da.MultiheadDilatedAttention(12, 2, *BRANCHES, rotary=True, num_kv_heads=1, **options),
    "blocks": lambda **options: da.MultiheadBlockSparseAttention(12, 2, BLOCKS, **options),
    "ring_union": lambda **options: da.RingMultiheadBlockSparseDilatedAttention(12, 2, *BRANCHES, BLOCKS, **options),
}


def per_sample(module: nn.Module, *, randomness: str = "error") -> Callable[[dict[str, torch.Tensor], torch.Tensor], Any]:
    def loss(parameters: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        out = functional_call(module, parameters, (x[None],))
        out = out[0] if isinstance(out, tuple) else out
        return (out * weights_of(out).to(out.dtype)).sum()

    return vmap(grad(loss), in_dims=(None, 0), randomness=randomness)


@pytest.mark.parametrize("name", MODULES)
def test_gradients_of_each_sample_are_those_of_samples_alone(name: str) -> None:
    torch.manual_seed(0)
    module = MODULES[name]().double()
    x = torch.randn(4, N, 12, dtype=torch.float64)
    parameters = {key: value.detach() for key, value in module.named_parameters()}
    found = per_sample(module)(parameters, x)
    for index, sample in enumerate(x):
        out = module(sample[None])[0]
        expected = torch.autograd.grad((out * weights_of(out)).sum(), list(module.parameters()))
        assert_equal([found[key][index] for key in parameters], list(expected))


@pytest.mark.parametrize("name", MODULES)
def test_gradients_of_each_sample_with_dropout_draw_for_each(name: str) -> None:
    torch.manual_seed(0)
    module = MODULES[name](dropout=0.5).double().train()
    x = torch.randn(1, N, 12, dtype=torch.float64).expand(4, -1, -1)
    parameters = {key: value.detach() for key, value in module.named_parameters()}
    different = per_sample(module, randomness="different")(parameters, x)["v_proj.weight"]
    assert all((different[i] - different[j]).abs().max() > 1e-6 for i in range(4) for j in range(i))
    same = per_sample(module, randomness="same")(parameters, x)["v_proj.weight"]
    assert_equal(same, same[:1].expand_as(same))
