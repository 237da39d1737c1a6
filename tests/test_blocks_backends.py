"""forward_blocks and backward_blocks of the backends that run lists of blocks on dense kernels: math, sdpa_cpu, flex."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from dilated_attention.backends import Options, Request, detect, gathered, registry
from dilated_attention.backends.base import Dropout, Mask
from dilated_attention.backends.dropout import keep_mask
from tests.block_cases import BlockCase, Problem, expected, lists_from_dense, make, masked_softmax

NAMES = ("out", "lse", "dq", "dk", "dv")
CASES = {
    "plain": BlockCase(),
    "ragged": BlockCase(num_queries=200, num_keys=333, density=0.7),
    "shorter than a block": BlockCase(num_queries=37, num_keys=50, density=1.0),
    "one query": BlockCase(num_queries=1, num_keys=130, density=1.0),
    "more keys than queries": BlockCase(num_queries=128, num_keys=700, k_block=128),
    "more queries than keys": BlockCase(num_queries=700, num_keys=129, q_block=128),
    "blocks of 128": BlockCase(num_queries=512, num_keys=640, q_block=128, k_block=128, density=0.3),
    "groups of heads": BlockCase(heads=6, kv_heads=2, num_queries=300),
    "lists of each head": BlockCase(heads=6, kv_heads=2, num_queries=300, groups=(1, 6), density=0.4),
    "lists of each batch entry": BlockCase(batch=3, groups=(3, 1), num_keys=200),
    "lists of each of both": BlockCase(batch=2, heads=4, kv_heads=2, groups=(2, 4), num_queries=190, masks="bits"),
    "one list for a batch": BlockCase(batch=3, num_queries=260),
    "intervals": BlockCase(num_queries=330, num_keys=270, masks="interval", density=0.8),
    "intervals of 128": BlockCase(num_queries=330, num_keys=400, q_block=128, k_block=128, masks="interval", groups=(1, 2)),
    "bits": BlockCase(num_queries=250, num_keys=333, masks="bits", q_block=64, k_block=128),
    "bits of 128": BlockCase(num_queries=333, num_keys=250, masks="bits", q_block=128, k_block=64, batch=2, heads=4, kv_heads=2),
    "padding": BlockCase(batch=2, num_keys=333, padding="each"),
    "padding of one entry for a batch": BlockCase(batch=2, num_keys=333, padding="shared", masks="bits"),
    "padding of everything": BlockCase(batch=2, num_keys=333, padding="all", masks="interval", groups=(2, 1)),
    "heads first in memory": BlockCase(batch=2, num_keys=333, layout="heads_first", masks="bits"),
    "packed qkv": BlockCase(batch=2, num_queries=222, layout="packed", groups=(1, 2)),
    "every third position": BlockCase(batch=2, num_queries=222, num_keys=333, layout="every_third"),
    "nothing kept": BlockCase(density=0.0),
    "everything kept": BlockCase(density=1.0, empty_rows=False, num_queries=500, num_keys=500),
}


def run(problem: Problem, backend: str, *, lse_grad: bool) -> list[torch.Tensor]:
    engine, case = registry.get(backend), problem.case
    tensors = (problem.q, problem.k, problem.v)
    out, lse = engine.forward_blocks(*tensors, problem.lists, problem.options)
    assert out.dtype is case.dtype and lse.dtype is (torch.float64 if case.dtype is torch.float64 else torch.float32)
    assert out.shape == problem.q.shape and lse.shape == (case.batch, case.heads, case.num_queries)
    dlse = problem.dlse if lse_grad else None
    grads = engine.backward_blocks(problem.dout, *tensors, out, lse, problem.lists, problem.options, dlse)
    assert [x.shape for x in grads] == [x.shape for x in tensors]
    assert all(x.dtype in (case.dtype, torch.float32) for x in grads)
    return [out, lse, *grads]


def check(results: list[torch.Tensor], truth: list[torch.Tensor], tolerance: float) -> None:
    assert len(results) == len(truth)
    for what, got, want in zip(NAMES, results, truth, strict=False):
        torch.testing.assert_close(got.double(), want, atol=tolerance, rtol=tolerance, msg=lambda m, what=what: f"{what}: {m}")


@pytest.mark.parametrize("name", CASES)
def test_math_is_exact(name: str) -> None:
    problem = make(CASES[name])
    check(run(problem, "math", lse_grad=True), expected(problem), 1e-12)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_sdpa_cpu_matches_float64(name: str, dtype: torch.dtype) -> None:
    problem = make(dataclasses.replace(CASES[name], dtype=dtype))
    check(run(problem, "sdpa_cpu", lse_grad=False), expected(problem, lse_grad=False), 2e-5 if dtype is torch.float32 else 1e-12)


@pytest.mark.parametrize("backend", ["math", "sdpa_cpu"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("masks", ["none", "bits"])
def test_half_precision(backend: str, dtype: torch.dtype, masks: str) -> None:
    problem = make(BlockCase(batch=2, num_queries=200, num_keys=333, heads=4, masks=masks, padding="each", dtype=dtype, groups=(1, 4)))
    truth = expected(problem, lse_grad=False)
    results = run(problem, backend, lse_grad=False)
    eps = torch.finfo(dtype).eps
    for what, got, want in zip(NAMES, results, truth, strict=True):
        finite = torch.isfinite(want)
        assert torch.equal(torch.isfinite(got), finite), what
        error = (got.double() - want)[finite].norm() / want[finite].norm()
        assert error < (1e-5 if what == "lse" else 2 * eps), (what, error)


@pytest.mark.parametrize("backend", ["math", "sdpa_cpu"])
@pytest.mark.parametrize("masks", ["none", "interval", "bits"])
def test_parts_with_the_whole_softmax_add_up_to_its_gradient(backend: str, masks: str) -> None:
    """Backward of two disjoint lists with the whole's out and lse in place of their own: the shares of the whole gradient."""
    case = BlockCase(batch=2, heads=4, kv_heads=2, num_queries=300, num_keys=350, masks=masks, density=0.8, groups=(1, 4))
    problem = make(case)
    truth = expected(problem, lse_grad=False)
    engine, options = registry.get(backend), problem.options
    first = torch.zeros(case.num_keys, dtype=torch.bool)
    first[: 2 * case.k_block] = True
    parts = [lists_from_dense(problem.mask & half, case.q_block, case.k_block, problem.interval) for half in (first, ~first)]
    tensors = (problem.q, problem.k, problem.v)
    out, lse = engine.forward_blocks(*tensors, problem.lists, options)
    pieces = [engine.forward_blocks(*tensors, lists, options) for lists in parts]
    merged_lse = torch.logaddexp(pieces[0][1], pieces[1][1])
    check([out, lse, lse], [truth[0], truth[1], merged_lse], 1e-12)
    shares = [engine.backward_blocks(problem.dout, *tensors, out, lse, lists, options) for lists in parts]
    check([out, lse, *(a + b for a, b in zip(*shares, strict=True))], truth, 1e-12)


@pytest.mark.parametrize("backend", ["math", "sdpa_cpu"])
def test_an_lse_of_plus_inf_gives_a_row_nothing(backend: str) -> None:
    problem = make(BlockCase(masks="bits"))
    engine, tensors = registry.get(backend), (problem.q, problem.k, problem.v)
    out, lse = engine.forward_blocks(*tensors, problem.lists, problem.options)
    lse[:, :, 5:70] = torch.inf
    dout = problem.dout.clone()
    dout[:, 5:70] = 0
    without = dataclasses.replace(problem, dout=dout)
    got = engine.backward_blocks(problem.dout, *tensors, out, lse, problem.lists, problem.options)
    assert (got[0][:, 5:70] == 0).all()
    check([out, lse, *got], [out, lse, *expected(without, lse_grad=False)[2:]], 1e-12)


@pytest.mark.parametrize("groups", [(1, 1), (2, 1), (1, 4)])
def test_dropout_by_position(groups: tuple[int, int]) -> None:
    """The same elements dropped as in a dense problem, forward and backward, however lists cut the work."""
    case = BlockCase(batch=2, heads=4, kv_heads=2, num_queries=150, num_keys=333, masks="bits", groups=groups)
    problem = make(case)
    dropout = Dropout(0.3, 7, torch.tensor([4, 9]), torch.arange(4), torch.arange(150)[None] + 1000, torch.arange(333)[None] * 2)
    options = Options(scale=case.scale, dropout=dropout)
    weights = keep_mask(dropout, slice(None)).double() / 0.7
    leaves = [x.detach().requires_grad_() for x in (problem.q, problem.k, problem.v)]
    out, lse = masked_softmax(*leaves, problem.mask, case.scale, weights)
    truth = [out.detach(), lse.detach(), *torch.autograd.grad((out * problem.dout).sum(), leaves)]
    engine = registry.get("math")
    tensors = (problem.q, problem.k, problem.v)
    out, lse = engine.forward_blocks(*tensors, problem.lists, options)
    check([out, lse, *engine.backward_blocks(problem.dout, *tensors, out, lse, problem.lists, options)], truth, 1e-12)


def test_pieces_are_cut_to_a_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathered, "_PIECE_BYTES", 1)
    problem = make(BlockCase(batch=2, num_queries=300, num_keys=350, masks="bits", padding="each", groups=(1, 2)))
    for backend in ("math", "sdpa_cpu"):
        check(run(problem, backend, lse_grad=False), expected(problem, lse_grad=False), 1e-12)
    found = list(gathered.pieces(problem.q, problem.k, problem.lists, problem.options))
    assert all(len(piece.rows) == 1 for piece in found)
    assert sum(piece.columns.numel() for piece in found) == 2 * problem.lists.num_entries


def test_math_says_shapes_of_tensors_without_data() -> None:
    problem = make(BlockCase(num_queries=200, num_keys=333, masks="bits"))
    tensors = [x.to("meta") for x in (problem.q, problem.k, problem.v)]
    out, lse = registry.get("math").forward_blocks(*tensors, problem.lists, Options(scale=1.0))
    assert out.shape == problem.q.shape and lse.shape == (1, 2, 200) and out.is_meta
    grads = registry.get("math").backward_blocks(out, *tensors, out, lse, problem.lists, Options(scale=1.0))
    assert [x.shape for x in grads] == [x.shape for x in tensors]


@pytest.mark.parametrize("backend", ["math", "sdpa_cpu"])
@pytest.mark.parametrize("masks", ["none", "interval", "bits"])
@pytest.mark.parametrize("blocks", [(64, 64), (64, 128), (128, 64), (128, 128)])
def test_what_they_declare(backend: str, masks: str, blocks: tuple[int, int]) -> None:
    request = Request(
        hardware=detect("cpu"), dtype=torch.float32, head_dim=59, blocks=blocks, block_masks=masks, needs_grad=True, key_mask=True
    )
    assert registry.get(backend).why_not(request) == []
