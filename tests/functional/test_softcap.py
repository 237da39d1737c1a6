"""Scores c·tanh(s/c): every function against plain softmax in float64, and who refuses them.

Random cases of the backends that declare it have caps, too (``testing.Space.softcap``).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dilated_attention as da
from dilated_attention.backends import registry
from dilated_attention.testing import Space, check_backend, inputs, max_error, plain_attention, random_case, reference, results
from tests.functional.test_sinks import FUNCTIONS, HK, D, H, check_close, tensors
from tests.helpers.pool import patience, pool_of

CAP = 0.8


def plain(m: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    k, v = (x.repeat_interleave(H // HK, 2) for x in (k, v))
    scores = CAP * (torch.einsum("bihd,bjhd->bhij", q, k) * D**-0.5 / CAP).tanh()
    empty = (m == 0).all(-1)
    scores = torch.where(m > 0, scores + m.clamp(min=1).to(q.dtype).log(), -torch.inf).masked_fill(empty[..., None], 0.0)
    weights = scores.softmax(-1).masked_fill(empty[..., None], 0.0)
    return torch.einsum("bhij,bjhd->bihd", weights, v), scores.logsumexp(-1).masked_fill(empty, -torch.inf)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_function_and_all_gradients(name: str) -> None:
    function, options, m = FUNCTIONS[name]
    q, k, v, _, dout, dlse = tensors()
    out, lse = function(q, k, v, **options, softcap=CAP, return_lse=True)
    truth, true_lse = plain(m, q, k, v)
    some = lse.isfinite()
    assert torch.equal(some, true_lse.isfinite())
    check_close((out, lse[some]), (truth, true_lse[some]))
    grads = [torch.autograd.grad((a, b[some]), (q, k, v), (dout, dlse[some])) for a, b in ((out, lse), (truth, true_lse))]
    check_close(*grads)
    assert float((function(q, k, v, **options) - out).detach().abs().max()) > 1e-2


def of_rank(rank: int, world: int, name: str) -> list[torch.Tensor]:
    function, options, _ = FUNCTIONS[name]
    q, k, v, dout = da.shard_sequence(None, [x.detach() for x in (*tensors()[:3], tensors()[4])], [1] * 4, layout="contiguous")
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = function(*leaves, **options, softcap=CAP, seq_len=tensors()[0].shape[1], timeout=patience())
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


@pytest.mark.distributed
@pytest.mark.parametrize("name", ["ring", "ring_dilated", "ring_blocks", "ring_union"])
def test_processes_share_a_sequence(name: str) -> None:
    ranks = pool_of(2).run(of_rank, name)
    q, k, v, _, dout, _ = tensors()
    truth, _ = plain(FUNCTIONS[name][2], q, k, v)
    expected = (truth.detach(), *torch.autograd.grad(truth, (q, k, v), dout))
    check_close([torch.cat(parts, 1) for parts in zip(*ranks, strict=True)], expected)


@pytest.mark.parametrize("seed", range(4))
def test_random_cases(seed: int) -> None:
    space = Space.of_backend("math", max_length=24)
    assert space.softcap
    capped = 0
    for index in range(seed * 40, seed * 40 + 40):
        case = random_case(index, space)
        if case.softcap is None:
            continue
        capped += 1
        x = inputs(case, torch.float64)
        found, truth = results(reference, case, x), results(plain_attention, case, x)
        assert all(max_error(found[name], truth[name]) <= 1e-11 for name in truth), case
    assert capped > 4
    check_backend("math", device="cpu", cases=40, seed=seed * 40, space=space)


def test_who_takes_it_and_who_refuses() -> None:
    q, k, v, *_ = tensors()
    with pytest.raises(da.BackendUnavailable, match="sdpa_cpu: takes no softcap"):
        da.attention(q, k, v, softcap=CAP, backend="sdpa_cpu")
    explained = da.explain_backend(softcap=CAP, device="cpu")
    assert explained.forward == explained.backward == "math"
    assert [name for name in registry.names() if registry.get(name).capabilities.softcap] == [*("flash4", "flash2", "flex", "math")]


@pytest.mark.parametrize("softcap", [0.0, -1.0, float("nan"), "1", True])
def test_caps_that_are_none(softcap: Any) -> None:
    q, k, v, *_ = tensors()
    with pytest.raises((TypeError, ValueError), match="softcap is"):
        da.attention(q, k, v, softcap=softcap)
