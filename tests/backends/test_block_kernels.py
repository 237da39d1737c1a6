"""Both passes over lists of blocks of the backends that run lists of blocks on dense kernels: math, sdpa_cpu, flex."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from dilated_attention.backends import AttentionRequest, Options, detect, registry
from dilated_attention.backends.block_kernels import block_gather
from dilated_attention.backends.dropout import Dropout, keep_mask
from dilated_attention.backends.torch_ops import flex
from dilated_attention.backends.torch_ops.flex import block_mask
from tests.helpers.block_cases import BlockCase, Problem, expected, lists_from_dense, make, masked_softmax

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

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
    out, lse = engine.forward(*tensors, problem.options, problem.lists)
    assert out.dtype is case.dtype and lse.dtype is (torch.float64 if case.dtype is torch.float64 else torch.float32)
    assert out.shape == problem.q.shape and lse.shape == (case.batch, case.heads, case.num_queries)
    dlse = problem.dlse if lse_grad else None
    grads = engine.backward(problem.dout, *tensors, out, lse, problem.options, problem.lists, dlse=dlse)
    assert [x.shape for x in grads] == [x.shape for x in tensors]
    assert all(x.dtype in (case.dtype, torch.float32) for x in grads)
    return [out, lse, *grads]


def check(results: list[torch.Tensor], truth: list[torch.Tensor], tolerance: float) -> None:
    assert len(results) == len(truth)
    for what, got, want in zip(NAMES, results, truth, strict=False):
        torch.testing.assert_close(got.double(), want, atol=tolerance, rtol=tolerance, msg=lambda m, what=what: f"{what}: {m}")


def relative_errors(results: list[torch.Tensor], truth: list[torch.Tensor]) -> dict[str, float]:
    """By norm, where finite; where not, both must agree."""
    errors = {}
    for what, got, want in zip(NAMES, results, truth, strict=True):
        finite = torch.isfinite(want)
        assert torch.equal(torch.isfinite(got), finite), what
        errors[what] = ((got.double() - want)[finite].norm() / want[finite].norm().clamp(min=1e-30)).item()
    return errors


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
    errors = relative_errors(run(problem, backend, lse_grad=False), expected(problem, lse_grad=False))
    eps = torch.finfo(dtype).eps
    assert all(error < (1e-5 if what == "lse" else 2 * eps) for what, error in errors.items()), errors


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
    out, lse = engine.forward(*tensors, options, problem.lists)
    pieces = [engine.forward(*tensors, options, lists) for lists in parts]
    merged_lse = torch.logaddexp(pieces[0][1], pieces[1][1])
    check([out, lse, lse], [truth[0], truth[1], merged_lse], 1e-12)
    shares = [engine.backward(problem.dout, *tensors, out, lse, options, lists) for lists in parts]
    check([out, lse, *(a + b for a, b in zip(*shares, strict=True))], truth, 1e-12)


@pytest.mark.parametrize("backend", ["math", "sdpa_cpu"])
def test_an_lse_of_plus_inf_gives_a_row_nothing(backend: str) -> None:
    problem = make(BlockCase(masks="bits"))
    engine, tensors = registry.get(backend), (problem.q, problem.k, problem.v)
    out, lse = engine.forward(*tensors, problem.options, problem.lists)
    lse[:, :, 5:70] = torch.inf
    dout = problem.dout.clone()
    dout[:, 5:70] = 0
    without = dataclasses.replace(problem, dout=dout)
    got = engine.backward(problem.dout, *tensors, out, lse, problem.options, problem.lists)
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
    out, lse = engine.forward(*tensors, options, problem.lists)
    check([out, lse, *engine.backward(problem.dout, *tensors, out, lse, options, problem.lists)], truth, 1e-12)


def test_pieces_are_cut_to_a_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_gather, "_PIECE_BYTES", 1)
    problem = make(BlockCase(batch=2, num_queries=300, num_keys=350, masks="bits", padding="each", groups=(1, 2)))
    for backend in ("math", "sdpa_cpu"):
        check(run(problem, backend, lse_grad=False), expected(problem, lse_grad=False), 1e-12)
    found = list(block_gather.pieces(problem.q, problem.k, problem.lists, problem.options))
    assert all(len(piece.rows) == 1 for piece in found)
    assert sum(piece.columns.numel() for piece in found) == 2 * problem.lists.num_entries


def test_math_says_shapes_of_tensors_without_data() -> None:
    problem = make(BlockCase(num_queries=200, num_keys=333, masks="bits"))
    tensors = [x.to("meta") for x in (problem.q, problem.k, problem.v)]
    out, lse = registry.get("math").forward(*tensors, Options(scale=1.0), problem.lists)
    assert out.shape == problem.q.shape and lse.shape == (1, 2, 200) and out.is_meta
    grads = registry.get("math").backward(out, *tensors, out, lse, Options(scale=1.0), problem.lists)
    assert [x.shape for x in grads] == [x.shape for x in tensors]


@pytest.mark.parametrize("backend", ["math", "sdpa_cpu"])
@pytest.mark.parametrize("masks", ["none", "interval", "bits"])
@pytest.mark.parametrize("blocks", [(64, 64), (64, 128), (128, 64), (128, 128)])
def test_what_they_declare(backend: str, masks: str, blocks: tuple[int, int]) -> None:
    request = AttentionRequest(
        hardware=detect("cpu"), dtype=torch.float32, head_dim=59, blocks=blocks, block_masks=masks, needs_grad=True, key_mask=True
    )
    assert registry.get(backend).reasons_against(request) == []


FLEX = {name: case for name, case in CASES.items() if case.masks != "bits"}


def listed(counts: torch.Tensor | None, table: torch.Tensor | None, num_values: int) -> torch.Tensor:
    """How often each value stands in each row of a padded table."""
    if counts is None or table is None:
        return torch.zeros(())
    assert counts.dtype is table.dtype is torch.int32 and table.shape[:-1] == counts.shape and table.is_contiguous()
    taken = (torch.arange(table.shape[-1]) < counts[..., None]).float()
    return torch.zeros(*counts.shape, num_values).scatter_add_(-1, table.long(), taken)


def dense_mask(blocks: BlockMask) -> torch.Tensor:
    (Nq, Nk), (q_block, k_block) = blocks.seq_lengths, blocks.BLOCK_SIZE
    masked, whole = (
        listed(counts, table, -(-Nk // k_block)).bool()
        for counts, table in ((blocks.kv_num_blocks, blocks.kv_indices), (blocks.full_kv_num_blocks, blocks.full_kv_indices))
    )
    zero, i, j = torch.zeros(()), torch.arange(Nq)[:, None], torch.arange(Nk)[None]

    def spread(x: torch.Tensor) -> torch.Tensor:
        return x.expand(masked.shape).repeat_interleave(q_block, -2).repeat_interleave(k_block, -1)[..., :Nq, :Nk]

    return (spread(masked) & blocks.mask_mod(zero, zero, i, j)) | spread(whole)


@pytest.mark.parametrize("name", FLEX)
def test_flex_tables_say_what_the_lists_say(name: str) -> None:
    """Both directions, masked and whole blocks apart; and with the mask of pairs, exactly the dense mask."""
    problem = make(FLEX[name])
    lists, blocks = problem.lists, block_mask(problem.lists)
    assert (lists.q_block, lists.k_block) == blocks.BLOCK_SIZE

    masked = listed(blocks.kv_num_blocks, blocks.kv_indices, lists.num_columns)
    whole = listed(blocks.full_kv_num_blocks, blocks.full_kv_indices, lists.num_columns)
    assert ((masked + whole) <= 1).all()
    assert torch.equal(masked, listed(blocks.q_num_blocks, blocks.q_indices, lists.num_rows).transpose(-1, -2))
    of_columns = listed(blocks.full_q_num_blocks, blocks.full_q_indices, lists.num_rows)
    assert torch.equal(whole, of_columns.transpose(-1, -2) if of_columns.dim() else of_columns)

    assert torch.equal(dense_mask(blocks), problem.mask)


def test_flex_tables_are_as_narrow_as_the_longest_row() -> None:
    mask = torch.zeros(1, 1, 640, 640, dtype=torch.bool)
    mask[..., :64] = True
    mask[..., 128:192, 320:384] = True
    blocks = block_mask(lists_from_dense(mask, 64, 64))
    assert blocks.kv_indices.shape == (1, 1, 10, 2) and blocks.q_indices.shape == (1, 1, 10, 10)


@pytest.mark.parametrize("name", FLEX)
@pytest.mark.parametrize("part", [False, True], ids=["alone", "part"])
def test_flex_around_its_kernel(name: str, part: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What FlexBackend does with lists before and after the kernel, which a dense one stands in for: empty rows, merged out and lse."""

    def kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **settings: Any) -> tuple[torch.Tensor, Any]:
        mask = dense_mask(settings["block_mask"])
        if settings["score_mod"] is not None:
            b, j = torch.arange(q.shape[0]).view(-1, 1, 1, 1), torch.arange(k.shape[2])
            mask = mask & (settings["score_mod"](torch.zeros(()), b, None, None, j) == 0)
        out, lse = masked_softmax(*(x.transpose(1, 2) for x in (q, k, v)), mask, settings["scale"])
        return out.transpose(1, 2), SimpleNamespace(lse=lse)

    monkeypatch.setattr(flex, "_compiled", lambda kind, search: kernel)
    problem = make(dataclasses.replace(FLEX[name], dtype=torch.float32))
    if not part:
        check(run(problem, "flex", lse_grad=True), expected(problem), 2e-5)
        return
    engine, case, options, tensors = registry.get("flex"), problem.case, problem.options, (problem.q, problem.k, problem.v)
    first = torch.arange(case.num_keys) < case.k_block
    out, lse = engine.forward(*tensors, options, problem.lists)
    lists = [lists_from_dense(problem.mask & half, case.q_block, case.k_block, problem.interval) for half in (first, ~first)]
    shares = [engine.backward(problem.dout, *tensors, out, lse, options, x) for x in lists]
    check([out, lse, *(a + b for a, b in zip(*shares, strict=True))], expected(problem, lse_grad=False), 2e-5)


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


GPU_CASES = {
    "random": BlockCase(num_queries=2048, num_keys=2048, heads=4, kv_heads=4, q_block=128, k_block=128, density=0.3),
    "intervals": BlockCase(num_queries=1500, num_keys=1800, heads=4, kv_heads=2, q_block=128, k_block=128, masks="interval"),
    "lists of each head": BlockCase(num_queries=1333, num_keys=900, heads=4, kv_heads=2, q_block=128, k_block=128, groups=(1, 4)),
    "lists of each of both": BlockCase(
        batch=2, num_queries=700, num_keys=900, heads=4, q_block=128, k_block=128, groups=(2, 4), kv_heads=4
    ),
    "padding": BlockCase(batch=2, num_queries=700, num_keys=900, heads=4, kv_heads=2, q_block=128, k_block=128, padding="each"),
    "few queries": BlockCase(num_queries=100, num_keys=1500, heads=4, kv_heads=4, q_block=128, k_block=128, groups=(1, 4)),
    "views": BlockCase(batch=2, num_queries=700, num_keys=900, q_block=128, k_block=128, layout="packed"),
    "nothing kept": BlockCase(num_queries=256, num_keys=256, q_block=128, k_block=128, density=0.0),
    "64x64": BlockCase(num_queries=1000, num_keys=1300, heads=4, kv_heads=2, masks="interval"),
    "64x64 few queries": BlockCase(num_queries=100, num_keys=1300, heads=4, kv_heads=2),
    "64x128": BlockCase(num_queries=1000, num_keys=1300, heads=4, kv_heads=2, k_block=128),
    "128x64": BlockCase(num_queries=1000, num_keys=1300, heads=4, kv_heads=2, q_block=128, groups=(1, 4)),
}
# where a block has 64, flex searches for tiles, which takes a minute of compilation for each dtype and head dim
SETTINGS = [
    (name, dtype, head_dim)
    for dtype, head_dim in ((torch.bfloat16, 64), (torch.bfloat16, 128), (torch.float32, 64))
    for name in GPU_CASES
    if "64" not in name or (dtype, head_dim) == (torch.bfloat16, 64)
]


@pytest.mark.gpu
@pytest.mark.kernel("backend", "dtype", "head_dim")
@pytest.mark.parametrize(("name", "dtype", "head_dim"), SETTINGS, ids=str)
@pytest.mark.parametrize("backend", ["flex", "math"])
def test_on_a_gpu(backend: str, name: str, dtype: torch.dtype, head_dim: int) -> None:
    problem = make(dataclasses.replace(GPU_CASES[name], dtype=dtype, head_dim=head_dim), "cuda")
    errors = relative_errors(run(problem, backend, lse_grad=True), expected(problem))
    print(f"{backend} {name} {head_dim} {dtype}: {errors}")
    limit = 0.01 if dtype is torch.bfloat16 else 2e-5
    assert all(error < (1e-4 if what == "lse" else limit) for what, error in errors.items()), errors


@pytest.mark.gpu
@pytest.mark.parametrize("masks", ["none", "interval"])
@pytest.mark.parametrize("backend", ["flex", "math"])
def test_parts_with_the_whole_softmax_on_a_gpu(backend: str, masks: str) -> None:
    case = BlockCase(num_queries=900, num_keys=1100, heads=4, q_block=128, k_block=128, masks=masks, head_dim=64, dtype=torch.bfloat16)
    problem = make(case, "cuda")
    engine, options, tensors = registry.get(backend), problem.options, (problem.q, problem.k, problem.v)
    first = torch.arange(case.num_keys, device="cuda") < 4 * case.k_block
    out, lse = engine.forward(*tensors, options, problem.lists)
    total = [torch.zeros_like(x, dtype=torch.float32) for x in tensors]
    for half in (first, ~first):
        lists = lists_from_dense(problem.mask & half, case.q_block, case.k_block, problem.interval)
        for sum_, share in zip(total, engine.backward(problem.dout, *tensors, out, lse, options, lists), strict=True):
            sum_ += share
    errors = relative_errors([out, lse, *total], expected(problem, lse_grad=False))
    assert all(error < 0.01 for error in errors.values()), errors


@pytest.mark.gpu
def test_deterministic_math_on_a_gpu_repeats() -> None:
    problem = make(BlockCase(num_queries=1500, num_keys=1500, density=0.5, dtype=torch.float32, head_dim=64), "cuda")
    engine, tensors = registry.get("math"), (problem.q, problem.k, problem.v)
    options = dataclasses.replace(problem.options, deterministic=True)
    out, lse = engine.forward(*tensors, options, problem.lists)
    first = engine.backward(problem.dout, *tensors, out, lse, options, problem.lists)
    for _ in range(10):
        again = engine.backward(problem.dout, *tensors, out, lse, options, problem.lists)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
