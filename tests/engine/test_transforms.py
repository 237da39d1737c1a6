"""Every public function under the transforms of torch.func and in forward mode: right as plain autograd in float64, or refused.

Also where a call draws, compiles, is empty or takes a shortcut, on two ranks, and modules with a gradient of each sample.
"""

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch.func import functionalize, grad, jvp, vjp, vmap
from torch.utils import _pytree as pytree

import dilated_attention as da
from dilated_attention.engine.branches import run_problems
from dilated_attention.engine.ops.resolve import ResolvedCall
from dilated_attention.testing import Case, Inputs, Space, call, inputs, max_error, plain_attention, random_case, relative_bound, results
from tests.helpers.op_settings import calls_of, settings
from tests.helpers.pool import pool_of
from tests.helpers.transform_cases import BRANCHES, TRANSFORMS, B, D, Function, H, N, functions, many, qkv, weights_of

REFUSED = {"jvp", "jvp_of_one", "hessian", "jacrev_of_jacrev"}
NO_FORWARD_MODE = "has no forward mode, and got a tangent.* use "
EVERY = functions()
FUNCTIONS: dict[str, Function] = {name: function for name, (function, _) in EVERY.items() if name.islower()}
DRAWN: dict[str, Function] = {name: partial(function, dropout_p=0.5) for name, function in FUNCTIONS.items()}
DRAWN["detached"] = partial(DRAWN["dilated_attention"], mixture_grad="detached")
# what has no derivative, and no rule for vmap
TOOLS: dict[str, Function] = {
    "attention_map": lambda q, k, v: da.attention_map(q, k, *BRANCHES, query_rows=[0, 3]),
    "attention_received": lambda q, k, v: da.attention_received(q, k, *BRANCHES),
    "decode_attention": lambda q, k, v: da.decode_attention(q[:, -1:], k, v, torch.full((B,), N - 1)),
}
WITHOUT_TENSORS = (
    "Alibi BackendUnavailable DilatedPattern Distance balanced_layout create_attention create_model explain_backend explain_decode "
)
WITHOUT_TENSORS += "list_backends local_positions plan_attention plan_model profile_memory recommend"


def assert_equal(ours: object, theirs: object) -> None:
    for mine, other in zip(pytree.tree_leaves(ours), pytree.tree_leaves(theirs), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-11)


def under(transform: str, function: Function) -> Any:
    return TRANSFORMS[transform](function, qkv(), many(), None)


def round_trip(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    (part,) = da.shard_sequence(None, [q + k * v], [1])
    return da.unshard_sequence(None, [part], [1])[0]


def test_every_public_name_that_takes_tensors_is_tried() -> None:
    assert set(da.__all__) == {*EVERY, *TOOLS, *WITHOUT_TENSORS.split(), "shard_sequence", "unshard_sequence"}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", EVERY)
def test_a_function_is_right_under_a_transform_or_refuses(name: str, transform: str) -> None:
    function, plain = EVERY[name]
    if transform in REFUSED:
        with pytest.raises(NotImplementedError, match=rf"({NO_FORWARD_MODE})|(has no second derivative.* use )"):
            under(transform, function)
    else:
        assert_equal(under(transform, function), under(transform, plain))


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_sharding_is_right_under_every_transform(transform: str) -> None:
    assert_equal(under(transform, round_trip), under(transform, lambda q, k, v: q + k * v))


@pytest.mark.parametrize("name", TOOLS)
def test_what_has_no_derivative_refuses_every_transform_but_takes_detached_tensors(name: str) -> None:
    tool = TOOLS[name]
    for transform in TRANSFORMS:
        # v alone may have a tangent, which only one of them reads
        with pytest.raises(NotImplementedError, match=rf"{name} has no (derivative|rule for torch\.func\.vmap).*detach"):
            under(transform, (lambda q, k, v: tool(v, v, v)) if transform == "jvp_of_one" else tool)
    q, k, v = qkv()
    gradient, found = grad(lambda q: (q.square().sum(), tool(q.detach(), k, v)), has_aux=True)(q)
    assert torch.equal(gradient, 2 * q) and torch.equal(found, tool(q, k, v))


def pulled(case: Case, x: Inputs) -> Any:
    """(out, lse, dq, dk, dv and perhaps dsinks) of q, k, v, dout and perhaps sinks."""

    def both(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, *sinks: torch.Tensor) -> Any:
        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None = None) -> Any:
            return call(case, replace(x, sinks=sinks), q, k, v)

        outputs, pull = vjp(attend, q, k, v, *sinks)
        return *outputs, *pull((dout, x.dlse))

    return both


WITH_CAPS = Space(softcap=True, dropout=False)


@pytest.mark.parametrize("space", [WITH_CAPS, replace(WITH_CAPS, blocks=True, max_length=200)], ids=["branches", "blocks"])
def test_gradients_of_each_sample_of_any_case(space: Space) -> None:
    """vmap of a vjp, whose samples have cotangents of their own, keys in common, and sinks in common or of their own."""
    for seed in range(30):
        case = random_case(seed, space)
        x = inputs(case, torch.float64)
        q, v, dout = (torch.stack([y.sin(), y]) for y in (x.q, x.v, x.dout))
        sinks: tuple[torch.Tensor, ...] = () if x.sinks is None else (x.sinks.double(),)
        in_dims = (0, None, 0, 0, *[0 if seed % 2 else None] * len(sinks))
        if seed % 2:
            sinks = tuple(torch.stack([y.sin(), y]) for y in sinks)
        found = vmap(pulled(case, x), in_dims=in_dims)(q, x.k, v, dout, *sinks)
        truth = results(plain_attention, case, x, torch.float64)
        for name, y in zip(truth, found, strict=True):
            assert max_error(y[1], truth[name]) <= relative_bound(truth[name], 1e-10), (name, case)


# --- two ranks ---------------------------------------------------------------------------------------------------------------------------

RINGS = {
    name: options for name in FUNCTIONS if "ring" in name for options in [{"layout": "contiguous"} if name == "ring_attention" else {}]
}


def on_this_rank(rank: int, world: int, name: str, transform: str) -> Any:
    """The ring's part of a result, by a transform of this rank's shards; a refusal as its text."""
    rows = slice(rank * N // world, (rank + 1) * N // world)
    one, several = (tuple(x[..., rows, :, :] for x in made) for made in (qkv(), many()))
    try:
        # not the tangents of the whole
        made = TRANSFORMS["jvp_of_one" if transform == "jvp" else transform]
        return pytree.tree_leaves(made(partial(FUNCTIONS[name], **RINGS[name]), one, several, weights_of(qkv()[0])[:, rows]))
    except NotImplementedError as error:
        return str(error)


@pytest.mark.parametrize("transform", ["grad", "vmap_of_grad", "grad_of_vmap", "vmap", "jacrev", "jvp", "hessian"])
@pytest.mark.parametrize("name", RINGS)
def test_a_ring_of_two_is_right_under_a_transform_or_refuses(name: str, transform: str) -> None:
    """The same directions on all ranks at a time: what each rank's rows get from those of all."""
    ranks = pool_of(2).run(on_this_rank, name, transform)
    if transform in REFUSED:
        assert all("has no forward mode, and got a tangent" in text and "use " in text for text in ranks)
        return
    for index, expected in enumerate(pytree.tree_leaves(under(transform, EVERY[name][1]))):
        assert_equal(torch.cat([parts[index] for parts in ranks], dim=-3), expected)


def round_trip_on_this_rank(rank: int, world: int) -> Any:
    """Gradients of each of three samples, and second ones, through shards that are put together again."""
    x = torch.arange(3.0 * N).reshape(3, 1, N).double().cos()

    def loss(x: torch.Tensor) -> torch.Tensor:
        (part,) = da.shard_sequence(None, [x], [1])
        (whole,) = da.unshard_sequence(None, [part.square()], [1])
        # the gradient of a shard is summed over ranks
        return (whole * torch.arange(N)).sum() / world

    again = x[0].clone().requires_grad_()
    (dx,) = torch.autograd.grad(loss(again), again, create_graph=True)
    with pytest.raises(NotImplementedError, match="unshard_sequence has no forward mode"):
        jvp(loss, (x[0],), (x[0],))
    return vmap(grad(loss))(x), *torch.autograd.grad((dx * again).sum(), again)


def test_shards_of_two_put_together_have_first_and_second_derivatives() -> None:
    x, place = torch.arange(3.0 * N).reshape(3, 1, N).double().cos(), torch.arange(N)
    for rank, (first, second) in enumerate(pool_of(2).run(round_trip_on_this_rank)):
        part = (place // (N // 2) == rank).double()
        # each rank reads its own part of the x that all of them hold; the loss of two ranks, halved, is that of one
        assert_equal((first, second), (2 * x * place * part, 4 * x[0] * place * part))


# --- what draws, and shortcuts -----------------------------------------------------------------------------------------------------------


def out_and_gradients(function: Function) -> Callable[..., tuple[torch.Tensor, ...]]:
    def both(*x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out, pull = vjp(function, *x)
        return out, *pull(weights_of(out))

    return both


def one_by_one(function: Function, *x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Stacked (out, dq, dk, dv) of each entry by plain calls."""
    rows = []
    for entry in zip(*x, strict=True):
        leaves = [tensor.clone().requires_grad_() for tensor in entry]
        out = function(*leaves)
        rows.append((out.detach(), *torch.autograd.grad((out * weights_of(out)).sum(), leaves)))
    return tuple(torch.stack(parts) for parts in zip(*rows, strict=True))


@pytest.mark.parametrize("name", DRAWN)
def test_a_mapped_dropout_draws_a_mask_for_each_entry_or_one_for_all_and_is_refused_by_default(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    function, alike = out_and_gradients(DRAWN[name]), tuple(tensor[:1].expand_as(tensor) for tensor in many())
    torch.manual_seed(5)
    mapped = vmap(function, randomness="same")(*alike)
    torch.manual_seed(5)
    assert_equal(mapped, tuple(x.expand_as(y) for x, y in zip(one_by_one(DRAWN[name], *(x[:1] for x in alike)), mapped, strict=True)))
    with pytest.raises(RuntimeError, match="randomness"):
        vmap(DRAWN[name])(*alike)
    nothing = [x[:0] for x in many()]
    assert vmap(FUNCTIONS["attention"])(*nothing).shape == (0, *qkv()[0].shape)
    with pytest.raises(NotImplementedError, match="size 0"):
        vmap(DRAWN[name], randomness="different")(*nothing)
    torch.manual_seed(11)
    mapped = vmap(function, randomness="different")(*many())
    torch.manual_seed(11)
    # seeds of plain calls are drawn as a mapped one draws its own
    drawn = iter(torch.randint(2**62, (3,), dtype=torch.int64))
    monkeypatch.setattr(torch, "randint", lambda *_, **__: next(drawn))
    assert_equal(mapped, one_by_one(DRAWN[name], *many()))


def test_mapped_calls_are_one_call_of_a_larger_batch_without_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = calls_of(monkeypatch, run_problems, "run_forward", "run_backward")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        under("vmap_of_grad", FUNCTIONS["dilated_attention"])
    assert len(calls) == 2


def test_mapped_gradients_read_outputs_as_the_forward_wrote_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels of tiles take lse as contiguous: on a GPU they read beyond one that vmap had expanded, and all gradients but the first
    were wrong."""
    seen: list[bool] = []
    run_backward = ResolvedCall.run_backward

    def watched(call: ResolvedCall, dout: torch.Tensor, dlse: Any, given: Any, outputs: Any, **options: Any) -> Any:
        seen.extend(x.is_contiguous() for x in (*outputs[:2], *([] if dlse is None else [dlse])))
        return run_backward(call, dout, dlse, given, outputs, **options)

    monkeypatch.setattr(ResolvedCall, "run_backward", watched)
    # of one sample a view can stand for three
    x = [part[:1].requires_grad_() for part in qkv()]
    out, lse = da.dilated_attention(*x, *BRANCHES, return_lse=True)
    for y in (out, lse):
        dys = torch.randn(3, *y.shape, dtype=y.dtype)
        mapped = vmap(lambda dy, y=y: torch.autograd.grad(y, x, dy, retain_graph=True))(dys)
        each = [torch.autograd.grad(y, x, dy, retain_graph=True) for dy in dys]
        assert_equal(mapped, tuple(map(torch.stack, zip(*each, strict=True))))
    assert len(seen) >= 8 and all(seen)


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if "ring" not in name])
@pytest.mark.parametrize("shortcut", ["no_batch", "no_rows", "no_grad", "keys_alone", "leaf", "inference_mode"])
def test_a_tangent_is_refused_on_every_shortcut(name: str, shortcut: str) -> None:
    q, k, v = (x[: B * (shortcut != "no_batch"), : N * (shortcut != "no_rows")] for x in qkv())
    q = q.clone().requires_grad_(shortcut == "leaf")

    def attend(x: torch.Tensor) -> torch.Tensor:
        with torch.set_grad_enabled(shortcut != "no_grad"):
            return FUNCTIONS[name](*((q, x, v) if shortcut == "keys_alone" else (x, k, v)))

    x = k if shortcut == "keys_alone" else q
    with torch.inference_mode(shortcut == "inference_mode"), pytest.raises(NotImplementedError, match=NO_FORWARD_MODE):
        jvp(attend, (x,), (torch.ones_like(x),))
    # torch makes no dual tensor in inference mode
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match=NO_FORWARD_MODE):
        attend(forward_ad.make_dual(x, torch.ones_like(x)))


def test_a_tangent_of_something_else_leaves_attention_alone() -> None:
    q, k, v = qkv()
    expected = da.attention(q, k, v)
    out, tangent = jvp(lambda scale: da.attention(q, k, v) * scale, (torch.tensor(2.0),), (torch.tensor(1.0),))
    assert torch.equal(out, 2 * expected) and torch.equal(tangent, expected.to(tangent.dtype))
    with forward_ad.dual_level():
        assert forward_ad.unpack_dual(da.attention(q, k, v)).tangent is None
    with pytest.raises(NotImplementedError, match="has no forward mode"):
        jvp(lambda sinks: da.attention(q, k, v, sinks=sinks), (torch.zeros(H),), (torch.ones(H),))


@pytest.mark.parametrize("name", ["attention", "block_sparse_attention", "ring_attention"])
def test_a_tangent_of_the_gradient_is_refused(name: str) -> None:
    q, k, v = (x.requires_grad_() for x in qkv())
    out = FUNCTIONS[name](q, k, v)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match=NO_FORWARD_MODE):
        torch.autograd.grad(out, q, forward_ad.make_dual(torch.ones_like(out), torch.ones_like(out)))


def test_an_op_called_by_itself_transforms_as_its_function_does() -> None:
    call = settings(branches=(*BRANCHES, "cyclic", "all", "mask"), scale=D**-0.5, needs_grad=True)

    def attend(*x: torch.Tensor) -> torch.Tensor:
        return torch.ops.dilated_attention.dilated_attention(*x, *[None] * 7, *call.arguments())[0]

    assert_equal(under("grad", attend), under("grad", FUNCTIONS["dilated_attention"]))
    with pytest.raises(NotImplementedError, match="has no forward mode"):
        under("jvp", attend)
    assert_equal(functionalize(da.attention)(*qkv()), da.attention(*qkv()))


@pytest.mark.parametrize("name", ["grad", "vmap_of_grad", "jvp"])
def test_transforms_inside_a_compiled_function(name: str) -> None:
    torch._dynamo.reset()
    transform = TRANSFORMS[name]
    graph = torch.compile(lambda x, y: transform(FUNCTIONS["dilated_attention"], x, y, None), backend="aot_eager", fullgraph=name != "jvp")
    if name in REFUSED:
        with pytest.raises(NotImplementedError, match="has no forward mode"):
            graph(qkv(), many())
    else:
        assert_equal(graph(qkv(), many()), under(name, FUNCTIONS["dilated_attention"]))
