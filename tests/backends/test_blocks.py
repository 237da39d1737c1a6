"""Lists of blocks on every backend of plain torch and on the own Triton kernels: both passes are those of a dense float64 softmax.

Triton's kernels are interpreted on a CPU. ``gpu/test_blocks.py`` has all of them on a GPU, and FlashAttention-4's.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from dilated_attention.backends import AttentionRequest, Hardware, Options, detect, registry
from dilated_attention.backends.block_kernels import triton as triton_blocks
from dilated_attention.backends.dropout import Dropout, keep_mask
from dilated_attention.backends.tiles.sizes import TileSizes
from dilated_attention.backends.torch_ops import flex
from dilated_attention.backends.torch_ops.flex import block_mask
from dilated_attention.testing import low_precision_bound, max_error, relative_bound
from tests.helpers.block_cases import BlockCase, Problem, dense, expected, lists_from_dense, make, masked_softmax

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

pytest.importorskip("triton")
# compiled kernels take no tensors of a CPU
interpreted = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="gpu/test_blocks.py runs the compiled kernels")

NAMES = ("out", "lse", "dq", "dk", "dv")
TOLERANCES = {"math": 1e-12, "sdpa_cpu": 1e-12, "triton": 1e-5, "flex": 2e-5}
BACKENDS = ("math", "sdpa_cpu", pytest.param("triton", marks=interpreted))
FIRST = BlockCase(num_queries=100, num_keys=150, masks="bits", density=0.7)
# lists of their own for every head, two heads to a key head
GROUPED = replace(FIRST, batch=2, heads=4, groups=(1, 4))
# each differs from the first in what its name says
CASES = {
    "first": FIRST,
    "whole blocks": replace(FIRST, masks="none"),
    "intervals": replace(FIRST, masks="interval"),
    "even": replace(FIRST, num_queries=64, num_keys=128),
    "even whole blocks": replace(FIRST, num_queries=64, num_keys=128, masks="none"),
    "more queries": replace(FIRST, num_queries=200, num_keys=50),
    "more keys": replace(FIRST, num_queries=70, num_keys=333, masks="none"),
    "128 by 64": replace(FIRST, q_block=128),
    "64 by 128": replace(FIRST, k_block=128),
    "128 by 128": replace(FIRST, num_queries=257, num_keys=131, q_block=128, k_block=128, heads=1, kv_heads=1),
    "intervals of 128": replace(FIRST, num_queries=257, num_keys=131, q_block=128, k_block=128, masks="interval", groups=(1, 2)),
    "head dim 40": replace(FIRST, head_dim=40),
    "head dim 64": replace(FIRST, head_dim=64),
    "head dim 1": replace(FIRST, head_dim=1),
    "grouped heads": replace(FIRST, heads=4),
    "one key head": replace(FIRST, heads=3, kv_heads=1, num_queries=70),
    "lists of batch entries": replace(FIRST, batch=2, num_queries=70, groups=(2, 1)),
    "one list for a batch": replace(FIRST, batch=3, num_queries=70, masks="none"),
    "lists of heads": replace(FIRST, heads=3, kv_heads=3, num_queries=70, groups=(1, 3)),
    "lists of grouped heads": GROUPED,
    "lists of batch entries and grouped heads": replace(GROUPED, num_queries=70, num_keys=70, groups=(2, 4)),
    "padding": replace(FIRST, batch=2, padding="some"),
    "padding of whole blocks": replace(FIRST, padding="shared", masks="none"),
    "padding of everything": replace(FIRST, padding="all", masks="interval"),
    "nothing kept": replace(FIRST, density=0.0),
    "everything kept": replace(FIRST, density=1.0, empty_rows=False, masks="none"),
    "one query": replace(FIRST, num_queries=1),
    "one key": replace(FIRST, num_keys=1),
    "heads first": replace(FIRST, batch=2, heads=1, kv_heads=1, layout="heads_first"),
    "packed": replace(FIRST, batch=2, num_queries=70, layout="packed"),
    "every third position": replace(FIRST, batch=2, num_queries=70, layout="every_third"),
}


def problem_of(backend: str, case: BlockCase) -> Problem:
    """In float64 where the backend computes in it."""
    return make(replace(case, dtype=torch.float32) if backend in ("triton", "flex") and case.dtype is torch.float64 else case)


def has_dlse(backend: str) -> bool:
    return registry.get(backend).capabilities.lse_grad


def run(problem: Problem, backend: str, lists: Sequence[Any] = ()) -> list[torch.Tensor]:
    """out, lse, and the sum of the gradients over the parts ``lists``, each with the whole's out and lse; nothing for the whole."""
    engine, case, dlse = registry.get(backend), problem.case, problem.dlse if has_dlse(backend) else None
    tensors = (problem.q, problem.k, problem.v)
    out, lse = engine.forward(*tensors, problem.options, problem.lists)
    assert out.dtype is case.dtype and lse.dtype is (torch.float64 if case.dtype is torch.float64 else torch.float32)
    assert out.shape == problem.q.shape and lse.shape == (case.batch, case.heads, case.num_queries)
    shares = [engine.backward(problem.dout, *tensors, out, lse, problem.options, part, dlse=dlse) for part in lists or [problem.lists]]
    assert [x.shape for x in shares[0]] == [x.shape for x in tensors]
    assert all(x.dtype in (case.dtype, torch.float32) for x in shares[0])
    return [out, lse, *(sum(parts) for parts in zip(*shares, strict=True))]  # type: ignore[list-item]


def check(found: Sequence[torch.Tensor], truth: Sequence[torch.Tensor], tolerance: float) -> None:
    for name, x, true in zip(NAMES[-len(found) :], found, truth, strict=True):
        error, bound = max_error(x, true), relative_bound(true, tolerance)
        assert error <= bound, f"{name}: {error:.3g} > {bound:.3g}"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_lists_are_the_definition(case: BlockCase, backend: str) -> None:
    problem = problem_of(backend, case)
    check(run(problem, backend), expected(problem, lse_grad=has_dlse(backend)), TOLERANCES[backend])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["first", "padding of whole blocks", "lists of grouped heads"])
def test_half_precision_errs_as_plain_torch_does(name: str, dtype: torch.dtype, backend: str) -> None:
    if backend == "triton" and dtype is torch.bfloat16:
        pytest.skip("Triton's interpreter multiplies the bits of bfloat16 as if they were integers")
    problem = make(replace(CASES[name], dtype=dtype))
    leaves = [x.detach().clone().requires_grad_() for x in (problem.q, problem.k, problem.v)]
    out, lse = dense(problem, *leaves)
    plain = [out, lse, *torch.autograd.grad((out * problem.dout).sum(), leaves)]
    truth = expected(problem, lse_grad=False)
    found = run(replace(problem, dlse=torch.zeros_like(problem.dlse)), backend)
    for what, x, same, true in zip(NAMES, found, plain, truth, strict=True):
        assert max_error(x, true) <= low_precision_bound(same, true, dtype), what


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("masks", ["none", "interval", "bits"])
def test_shares_of_parts_with_the_whole_softmax_add_up(masks: str, backend: str) -> None:
    """Two halves of the keys, each with the out and lse of the whole; rows that one half or both leave out."""
    problem = problem_of(backend, replace(GROUPED, num_queries=70, masks=masks, layout="every_third"))
    first = torch.arange(150) < 64
    parts = [lists_from_dense(problem.mask & half, 64, 64, problem.interval) for half in (first, ~first)]
    # a gradient of lse goes to one of the parts only, as the engine does it
    problem = replace(problem, dlse=torch.zeros_like(problem.dlse))
    check(run(problem, backend, parts), expected(problem, lse_grad=False), TOLERANCES[backend])


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_that_take_no_part_give_nothing_and_are_never_nan(backend: str) -> None:
    """Some row's lse is +inf though it has keys here: its weights are 0, whatever Triton's kernels get as its dlse."""
    problem = problem_of(backend, replace(FIRST, masks="none", density=1.0, empty_rows=False))
    engine, tensors = registry.get(backend), (problem.q, problem.k, problem.v)
    out, lse = engine.forward(*tensors, problem.options, problem.lists)
    lse[:, :, [3, 65]] = torch.inf
    dlse = problem.dlse.clone()
    dlse[:, :, [3, 65]] = torch.nan
    given = dlse if backend == "triton" else None
    grads = engine.backward(problem.dout, *tensors, out, lse, problem.options, problem.lists, dlse=given)
    assert (grads[0][:, [3, 65]] == 0).all()
    problem.mask[:, :, [3, 65]] = False
    check(grads, expected(problem, lse_grad=backend == "triton")[2:], TOLERANCES[backend])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scale", [-0.4, 0.0])
def test_scales_that_are_not_positive_and_the_gradient_of_a_sum(scale: float, backend: str) -> None:
    """dout is one number expanded, out a view of channels that lie apart."""
    problem = problem_of(backend, FIRST)
    dout, options, engine = torch.ones((), dtype=problem.q.dtype).expand(problem.q.shape), Options(scale), registry.get(backend)
    leaves = [x.double().requires_grad_() for x in (problem.q, problem.k, problem.v)]
    truth, true_lse = masked_softmax(*leaves, problem.mask, scale)
    out, lse = engine.forward(problem.q, problem.k, problem.v, options, problem.lists)
    apart = torch.stack([out, out], -1)[..., 0]
    grads = engine.backward(dout, problem.q, problem.k, problem.v, apart, lse, options, problem.lists)
    check([out, lse, *grads], [truth, true_lse, *torch.autograd.grad(truth.sum(), leaves)], TOLERANCES[backend])


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
    engine, tensors = registry.get("math"), (problem.q, problem.k, problem.v)
    out, lse = engine.forward(*tensors, options, problem.lists)
    check([out, lse, *engine.backward(problem.dout, *tensors, out, lse, options, problem.lists)], truth, 1e-12)


@pytest.mark.parametrize("backend", ["math", "sdpa_cpu"])
def test_a_cpu_takes_every_list(backend: str) -> None:
    for blocks, masks in itertools.product(itertools.product((64, 128), repeat=2), ("none", "interval", "bits")):
        request = AttentionRequest(
            hardware=detect("cpu"), dtype=torch.float32, head_dim=59, blocks=blocks, block_masks=masks, needs_grad=True, key_mask=True
        )
        assert registry.get(backend).reasons_against(request) == []


# --- Triton -----------------------------------------------------------------------------------------------------------------------


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("masks", ["bits", "interval", "none"])
def test_tiles_smaller_than_blocks(masks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_of("triton", replace(FIRST, q_block=128, k_block=128, heads=1, kv_heads=1, masks=masks))
    for tile in ((64, 32), (32, 64)):
        monkeypatch.setattr(triton_blocks, "_sizes_for", lambda *_, tile=tile: TileSizes(*tile, 4, 2))
        check(run(problem, "triton"), expected(problem), TOLERANCES["triton"])


@interpreted
def test_long_lists_of_some_heads() -> None:
    """Long lists start first: every block finds its program, in whatever order; a row and a column of one head keep everything."""
    problem = problem_of("triton", replace(FIRST, num_queries=260, num_keys=300, density=0.0, groups=(1, 2)))
    blocks = torch.zeros(1, 2, 5, 5, dtype=torch.bool)
    blocks[:, :, torch.arange(5), torch.arange(5)] = True
    blocks[:, 1, 3] = blocks[:, 1, :, 2] = True
    mask = blocks.repeat_interleave(64, 2).repeat_interleave(64, 3)[:, :, :260, :300]
    problem = replace(problem, mask=mask, lists=lists_from_dense(mask, 64, 64))
    assert triton_blocks.row_order(problem.lists).heavy == triton_blocks.column_order(problem.lists, 1).heavy == 1
    check(run(problem, "triton"), expected(problem), TOLERANCES["triton"])


def test_what_triton_says_of_itself() -> None:
    hopper = Hardware(device_type="cuda", capability=(9, 0), torch_version=(2, 13), packages=frozenset({"triton"}))
    request = AttentionRequest(hardware=hopper, dtype=torch.bfloat16, head_dim=72, blocks=(64, 128), block_masks="bits", key_mask=True)
    backend = registry.get("triton")
    assert backend.reasons_against(request) == []
    assert backend.reasons_against(replace(request, needs_grad=True, lse_grad=True, deterministic=True, block_masks="interval")) == []
    for change, words in (
        ({"blocks": None}, "lists of blocks only"),
        ({"blocks": (32, 64)}, "64x64"),
        ({"window": True}, "window"),
        ({"dropout": True}, "dropout"),
        ({"dtype": torch.float64}, "float64"),
        ({"head_dim": 264}, "256"),
        ({"hardware": replace(hopper, packages=frozenset())}, "triton is not installed"),
        ({"hardware": replace(hopper, capability=(7, 5)), "dtype": torch.float16}, "8.0"),
        ({"hardware": replace(hopper, capability=(8, 9)), "dtype": torch.float32, "head_dim": 256}, "shared memory"),
    ):
        reasons = backend.reasons_against(replace(request, **change))
        assert len(reasons) == 1 and words in reasons[0], (change, reasons)


# --- flex: what it does with lists around its kernel, which a dense one stands in for ---------------------------------------------


def listed(counts: torch.Tensor | None, table: torch.Tensor | None, num_values: int) -> torch.Tensor:
    """How often each value stands in each row of a padded table."""
    if counts is None or table is None:
        return torch.zeros(())
    assert counts.dtype is table.dtype is torch.int32 and table.shape[:-1] == counts.shape and table.is_contiguous()
    taken = (torch.arange(table.shape[-1]) < counts[..., None]).float()
    return torch.zeros(*counts.shape, num_values).scatter_add_(-1, table.long(), taken)


def dense_mask(blocks: BlockMask) -> torch.Tensor:
    """The pairs that both directions of the tables keep."""
    (Nq, Nk), (q_block, k_block) = blocks.seq_lengths, blocks.BLOCK_SIZE
    rows, columns = -(-Nq // q_block), -(-Nk // k_block)
    kept = []
    for kind in ("", "full_"):
        tables = [getattr(blocks, f"{kind}{side}_{what}") for side in ("kv", "q") for what in ("num_blocks", "indices")]
        by_row, by_column = listed(*tables[:2], columns), listed(*tables[2:], rows)
        assert torch.equal(by_row, by_column.transpose(-1, -2) if by_column.dim() else by_column) and (by_row <= 1).all()
        kept.append(by_row.bool())
    zero, i, j = torch.zeros(()), torch.arange(Nq)[:, None], torch.arange(Nk)[None]

    def spread(x: torch.Tensor) -> torch.Tensor:
        return x.expand(kept[0].shape).repeat_interleave(q_block, -2).repeat_interleave(k_block, -1)[..., :Nq, :Nk]

    return (spread(kept[0]) & blocks.mask_mod(zero, zero, i, j)) | spread(kept[1])


FLEX = {name: case for name, case in CASES.items() if case.masks != "bits"}


@pytest.mark.parametrize("name", FLEX)
@pytest.mark.parametrize("part", [False, True], ids=["alone", "part"])
def test_flex_around_its_kernel(name: str, part: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables, empty rows, merged out and lse."""

    def kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **settings: Any) -> tuple[torch.Tensor, Any]:
        mask = dense_mask(settings["block_mask"])
        if settings["score_mod"] is not None:
            b, j = torch.arange(q.shape[0]).view(-1, 1, 1, 1), torch.arange(k.shape[2])
            mask = mask & (settings["score_mod"](torch.zeros(()), b, None, None, j) == 0)
        out, lse = masked_softmax(*(x.transpose(1, 2) for x in (q, k, v)), mask, settings["scale"])
        return out.transpose(1, 2), SimpleNamespace(lse=lse)

    monkeypatch.setattr(flex, "_compiled", lambda kind, search: kernel)
    problem = problem_of("flex", FLEX[name])
    assert torch.equal(dense_mask(block_mask(problem.lists)), problem.mask)
    parts = []
    if part:
        first = torch.arange(problem.case.num_keys) < problem.case.k_block
        sides = (problem.case.q_block, problem.case.k_block, problem.interval)
        parts = [lists_from_dense(problem.mask & half, *sides) for half in (first, ~first)]
        problem = replace(problem, dlse=torch.zeros_like(problem.dlse))
    check(run(problem, "flex", parts), expected(problem, lse_grad=not part), TOLERANCES["flex"])


@pytest.mark.slow
def test_compiled_flex_on_the_cpu_follows_the_tables() -> None:
    """Only the forward, without lse, and with tables as wide as the keys: that is all of FlexAttention that torch compiles for CPUs."""
    from torch.nn.attention.flex_attention import flex_attention

    case = BlockCase(num_queries=300, num_keys=400, heads=4, groups=(1, 4), masks="interval", dtype=torch.float32, k_block=128)
    problem = make(case)
    blocks = block_mask(problem.lists)
    room = problem.lists.num_columns - blocks.kv_indices.shape[-1]
    for name in ("kv_indices", "full_kv_indices"):
        setattr(blocks, name, torch.nn.functional.pad(getattr(blocks, name), (0, room)))
    tensors = (x.transpose(1, 2) for x in (problem.q, problem.k, problem.v))
    compiled = torch.compile(flex_attention, fullgraph=True, dynamic=True)
    out = compiled(*tensors, block_mask=blocks, scale=case.scale, enable_gqa=True)
    torch.testing.assert_close(out.transpose(1, 2).double(), expected(problem)[0], atol=1e-5, rtol=1e-5)
