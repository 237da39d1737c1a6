"""Every public function under the transforms of torch.func and in forward mode: right as plain autograd in float64, or refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

import dilated_attention as da
from dilated_attention.testing import Case, Inputs, Space, call, inputs, max_error, plain_attention, random_case, relative_bound, results
from tests.helpers import transform_cases as cases
from tests.helpers.pool import pool_of
from tests.helpers.transform_cases import RING_TRANSFORMS, RINGS, TRANSFORMS, N, loss_of, many, qkv, weights_of

FORWARD_MODE = {"jvp", "jvp_of_one", "make_dual", "linearize", "jacfwd"}
SECOND = {"hessian", "jacrev_of_jacrev"}
FUNCTIONS = cases.functions()
TOOLS = cases.tools()
WITHOUT_TENSORS = {
    "BackendUnavailable",
    "DilatedPattern",
    "balanced_layout",
    "create_attention",
    "create_model",
    "explain_backend",
    "explain_decode",
    "list_backends",
    "local_positions",
    "plan_attention",
    "plan_model",
    "profile_memory",
    "recommend",
}


def assert_equal(ours: object, theirs: object) -> None:
    for mine, other in zip(pytree.tree_leaves(ours), pytree.tree_leaves(theirs), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-11)


def test_every_public_name_that_takes_tensors_is_tried() -> None:
    assert set(da.__all__) == {*FUNCTIONS, *TOOLS, *WITHOUT_TENSORS, "shard_sequence", "unshard_sequence"}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_is_right_under_a_transform_or_refuses(name: str, transform: str) -> None:
    function, plain = FUNCTIONS[name]
    if transform in FORWARD_MODE | SECOND:
        with pytest.raises(NotImplementedError, match=r"has no (forward mode, and got a tangent|second derivative).* use "):
            TRANSFORMS[transform](function)
    else:
        assert_equal(TRANSFORMS[transform](function), TRANSFORMS[transform](plain))


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_sharding_is_right_under_every_transform(transform: str) -> None:
    assert_equal(TRANSFORMS[transform](cases.round_trip), TRANSFORMS[transform](lambda q, k, v: q + k * v))


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", TOOLS)
def test_what_has_no_derivative_refuses_every_transform(name: str, transform: str) -> None:
    function = TOOLS[name]
    if transform == "jvp_of_one":
        # v alone has a tangent, which only one of them reads
        function = lambda q, k, v: TOOLS[name](v, v, v)  # noqa: E731
    with pytest.raises(NotImplementedError, match=rf"{name} has no (derivative|rule for torch\.func\.vmap).*detach"):
        TRANSFORMS[transform](function)


@pytest.mark.parametrize("name", TOOLS)
def test_what_has_no_derivative_takes_detached_tensors_inside_a_transform(name: str) -> None:
    q, k, v = cases.qkv()
    expected = TOOLS[name](q, k, v)

    def loss(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return q.square().sum(), TOOLS[name](q.detach(), k, v)

    gradient, found = torch.func.grad(loss, has_aux=True)(q)
    assert torch.equal(gradient, 2 * q) and torch.equal(found, expected)


def pulled(case: Case, x: Inputs) -> Any:
    """(out, lse, dq, dk, dv and perhaps dsinks) of q, k, v, dout and perhaps sinks."""

    def both(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, *sinks: torch.Tensor) -> Any:
        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None = None) -> Any:
            return call(case, replace(x, sinks=sinks), q, k, v)

        outputs, pull = torch.func.vjp(attend, q, k, v, *sinks)
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
        found = torch.func.vmap(pulled(case, x), in_dims=in_dims)(q, x.k, v, dout, *sinks)
        truth = results(plain_attention, case, x, torch.float64)
        for name, y in zip(truth, found, strict=True):
            assert max_error(y[1], truth[name]) <= relative_bound(truth[name], 1e-10), (name, case)


def expected_on_two(name: str, transform: str) -> list[torch.Tensor]:
    """What the whole sequence gives, by plain autograd."""
    plain = cases.plain(RINGS[name][1])
    every = (0, 1, 2)
    if transform == "vjp":
        out, pull = torch.func.vjp(plain, *qkv())
        return [out, *pull(weights_of(out))]
    if transform == "grad":
        return list(torch.func.grad(loss_of(plain), argnums=every)(*qkv()))
    if transform in ("vmap_of_grad", "grad_of_vmap"):
        return list(torch.func.vmap(torch.func.grad(loss_of(plain), argnums=every))(*many()))
    if transform == "vmap":
        return [torch.func.vmap(plain)(*many())]
    return list(torch.func.jacrev(lambda *x: plain(*x).sum(1), argnums=every)(*qkv()))


@pytest.mark.parametrize("transform", RING_TRANSFORMS)
@pytest.mark.parametrize("name", RINGS)
def test_a_ring_of_two_is_right_under_a_transform_or_refuses(name: str, transform: str) -> None:
    ranks = pool_of(2).run(cases.on_this_rank, name, transform)
    if transform in ("jvp", "make_dual", "hessian"):
        assert all("has no forward mode, and got a tangent" in text and "use " in text for text in ranks)
        return
    for index, expected in enumerate(expected_on_two(name, transform)):
        found = torch.cat([parts[index] for parts in ranks], dim=-3)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


def test_shards_of_two_put_together_have_first_and_second_derivatives() -> None:
    x = torch.arange(3.0 * N).reshape(3, 1, N).double().cos()
    place = torch.arange(N)
    for rank, (first, second, refused) in enumerate(pool_of(2).run(cases.round_trip_on_this_rank)):
        own = (place // (N // 2) == rank).double()
        # each rank reads its own part of the x that all of them hold; the loss of two ranks, halved, is that of one
        torch.testing.assert_close(first, (2 * x * place * own))
        torch.testing.assert_close(second, (4 * x[0] * place * own))
        assert "unshard_sequence has no forward mode" in refused
