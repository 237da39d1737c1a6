"""What must hold of branches and blocks: nothing leaks, nothing depends on order or layout, empty rows are exactly 0, runs repeat."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from dilated_attention import DilatedPattern, attention, dilated_attention
from dilated_attention.pattern import BigBird, BlockPattern, BlockTensor, GlobalLocal, LocalWindow, MaskFunction, RandomBlocks, TopBlocks
from dilated_attention.testing import (
    LAYOUTS,
    RESULTS,
    Case,
    Inputs,
    Space,
    call,
    inputs,
    largest,
    max_error,
    measure,
    multiplicities,
    random_case,
    results,
)
from dilated_attention.testing.cases import scattered
from dilated_attention.testing.oracle import block_multiplicities

BACKENDS = ("math", "sdpa_cpu")
CONTIGUOUS = Space(layouts=("contiguous",), max_length=48, dropout=False, window=False, head_dims=(3, 8, 16))


def drawn(seed: int, **changes: object) -> Case:
    return replace(random_case(seed, CONTIGUOUS), **changes)  # type: ignore[arg-type]


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit, NaN being equal to itself."""
    return a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())


def of_blocks(pattern: BlockPattern, **changes: object) -> Case:
    case = Case(pattern=pattern, num_queries=200, num_keys=200, heads=2, kv_heads=2, head_dim=3, lse_grad=True)
    return replace(case, **changes)  # type: ignore[arg-type]


def pairs(case: Case, x: Inputs) -> torch.Tensor:
    """bool (B, H, Nq, Nk): which pairs count, by the oracle's definition."""
    m = multiplicities(case, x.key_padding_mask)[0].sum(0)
    return ((m + block_multiplicities(case, x) if isinstance(case.pattern, BlockPattern) else m) > 0).expand(case.batch, -1, -1, -1)


# --- isolation: what a query does not attend to does not exist ------------------------------------------------------------------


def change(x: Inputs, rows: slice | torch.Tensor, value: float | None, *, names: str = "qkv") -> Inputs:
    """Inputs with other tokens at ``rows`` of q, k, v: other normal numbers, or a constant."""
    generator = torch.Generator().manual_seed(77)
    changed = {}
    for name in names:
        y = getattr(x, name).clone()
        y[:, rows] = torch.randn(y[:, rows].shape, generator=generator, dtype=torch.float64).to(y.dtype) if value is None else value
        changed[name] = y
    return replace(x, **changed)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("seed", range(32))
def test_later_tokens_change_nothing_before_them(backend: str, seed: int) -> None:
    """Causal: outputs and gradients of the rows before a cut, bit for bit, whatever finite numbers follow; outputs also before a NaN."""
    padding = ("none", "some")[seed % 2]
    case = drawn(seed, is_causal=True, bounds=None, query_offset=0, padding=padding, num_keys=37, num_queries=37, lse_grad=False)
    cut = 1 + seed % 36
    if seed >= 30:
        # a choice reads all queries of a block
        cut, pattern = 128, (LocalWindow(50, block_size=64), TopBlocks(2, block_size=64))[seed % 2]
        case = of_blocks(pattern, is_causal=True, padding=padding, lse_grad=False)
    x = inputs(case, torch.float32)
    # the loss reads the rows before the cut only
    x.dout[:, cut:] = 0
    before = results(call, case, x, backend=backend)
    for value in (None, 1e4, torch.finfo(torch.float32).tiny):
        after = results(call, case, change(x, slice(cut, None), value), backend=backend)
        assert equal(after["out"][:, :cut], before["out"][:, :cut])
        assert equal(after["lse"][..., :cut], before["lse"][..., :cut])
        for name in ("dq", "dk", "dv"):
            assert equal(after[name][:, :cut], before[name][:, :cut]), name
            assert not after[name][:, cut:].any(), name
    # a kernel multiplies their weight 0 by them
    for value, names in itertools.product((math.nan, math.inf, -math.inf), ("q", "k", "v", "qkv")):
        y = change(x, slice(cut, None), value, names=names)
        out, lse = call(case, y, y.q, y.k, y.v, backend=backend)
        assert equal(out[:, :cut], before["out"][:, :cut]) and equal(lse[..., :cut], before["lse"][..., :cut])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("window", [(3, 0), (2, 2), (None, 0), (0, None)], ids=str)
def test_nan_outside_a_window_changes_nothing(backend: str, window: tuple[int | None, int | None]) -> None:
    x = inputs(Case(pattern=DilatedPattern((2**62,), (1,)), num_queries=30, num_keys=30), torch.float32)
    # torch's CPU op adds −inf to a masked score, which leaves a NaN key's NaN
    y = change(x, slice(15, 16), math.nan, names="kv" if backend == "math" else "v")
    before, after = (attention(z.q, z.k, z.v, window=window, backend=backend) for z in (x, y))
    rows = torch.arange(30)
    left, right = (99 if side is None else side for side in window)
    reached = (rows - left <= 15) & (rows + right >= 15)
    assert equal(after[:, ~reached], before[:, ~reached]) and bool(after[:, reached].isnan().all())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize(
    "pattern",
    [
        DilatedPattern((6, 120), (1, 3)),
        LocalWindow((70, 9), block_size=64),
        RandomBlocks(0.4, seed=1, block_size=64),
        MaskFunction(scattered, block_size=64),
        GlobalLocal(20, 5, block_size=64),
    ],
    ids=lambda pattern: type(pattern).__name__,
)
def test_values_that_are_not_finite_reach_who_attends_to_them(pattern: DilatedPattern | BlockPattern, value: float, backend: str) -> None:
    """Containing them does not hide them: exactly the rows with a weight above 0; those of v in exactly their channel."""
    case = replace(of_blocks(LocalWindow(0), is_causal=True), pattern=pattern)
    x, at = inputs(case, torch.float32), 77
    before = call(case, x, x.q, x.k, x.v, backend=backend)
    rows = pairs(case, x)[..., at].transpose(1, 2)
    assert rows.any() and not rows.all()
    for name, channels in (("v", [2]), ("v", [0, 1, 2]), ("k", [0, 1, 2])):
        y = replace(x, **{name: getattr(x, name).clone()})
        getattr(y, name)[:, at, :, channels] = value
        out, lse = call(case, y, y.q, y.k, y.v, backend=backend)
        reached = rows[..., None] & torch.isin(torch.arange(3), torch.tensor(channels))
        assert torch.equal(~out.isfinite(), reached) and equal(out[~reached], before[0][~reached])
        seen = rows.transpose(1, 2) & (name == "k")
        assert equal(lse[~seen], before[1][~seen])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("value", [None, 1e4, math.nan, math.inf, -math.inf])
def test_another_segment_or_offset_changes_nothing(backend: str, value: float | None) -> None:
    """Tokens that no row of the loss shares a branch with may be anything at all, NaN included."""
    for seed in range(12):
        case = drawn(seed, bounds=None, query_offset=0, num_keys=40, num_queries=40, padding="none", is_causal=bool(seed % 2))
        rows = torch.arange(0, 9)
        x = inputs(case, torch.float32)
        # key positions that the rows reach through any branch and head, causal or not: a kernel sees a segment as a whole
        reached = pairs(replace(case, is_causal=False), x)[:, :, rows].any(2).any(1).any(0)
        reached[rows] = True
        others = (~reached).nonzero()[:, 0]
        if not len(others):
            continue
        before = call(case, x, x.q, x.k, x.v, backend=backend)
        y = change(x, others, value)
        after = call(case, y, y.q, y.k, y.v, backend=backend)
        assert equal(after[0][:, rows], before[0][:, rows]) and equal(after[1][..., rows], before[1][..., rows])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("value", [None, 1e4, math.nan, math.inf])
@pytest.mark.parametrize("is_causal", [False, True])
def test_another_document_changes_nothing(backend: str, value: float | None, is_causal: bool) -> None:
    """Outputs and gradients of one document, whatever its neighbours hold; the loss reads that document only."""
    for seed in range(8):
        case = drawn(
            seed, batch=1, bounds=(0, 13, 13, 30, 41), num_keys=41, num_queries=41, query_offset=0, padding="none", is_causal=is_causal
        )
        x = inputs(case, torch.float32)
        mine, others = slice(13, 30), torch.tensor([*range(13), *range(30, 41)])
        x.dout[:, others] = 0
        x.dlse[..., others] = 0
        before = results(call, case, x, backend=backend)
        after = results(call, case, change(x, others, value), backend=backend)
        for name in RESULTS:
            a, b = (r[name][..., mine] if name == "lse" else r[name][:, mine] for r in (after, before))
            assert equal(a, b), name


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("value", [None, 1e4, math.nan, math.inf, -math.inf])
def test_padded_keys_change_nothing(backend: str, value: float | None) -> None:
    """Keys and values under padding may be anything: every result is bit for bit the same, and their gradients are 0."""
    for seed in range(24):
        case = drawn(seed, padding=("some", "row", "all")[seed % 3])
        if seed >= 16:
            case = replace(case, pattern=BigBird(20, 3, 1, block_size=64), window=None, mixture_grad="exact")
        x = inputs(case, torch.float32)
        assert x.key_padding_mask is not None
        before = results(call, case, x, backend=backend)
        padded = x.key_padding_mask[:, :, None, None]
        generator = torch.Generator().manual_seed(5)
        other = torch.randn(x.k.shape, generator=generator) if value is None else torch.full(x.k.shape, value)
        y = replace(x, k=torch.where(padded, other, x.k), v=torch.where(padded, other, x.v))
        after = results(call, case, y, backend=backend)
        for name in RESULTS:
            assert equal(after[name], before[name]), (name, case)
        for name in ("dk", "dv"):
            assert not after[name].masked_select(padded).any(), name


@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_in_one_query_stays_in_its_row(backend: str) -> None:
    for seed in range(12):
        case = drawn(seed, bounds=None, query_offset=0, num_keys=20, num_queries=20)
        x = inputs(case, torch.float32)
        before = call(case, x, x.q, x.k, x.v, backend=backend)
        y = change(x, slice(7, 8), math.nan, names="q")
        after = call(case, y, y.q, y.k, y.v, backend=backend)
        rest = torch.arange(20) != 7
        assert equal(after[0][:, rest], before[0][:, rest]) and equal(after[1][..., rest], before[1][..., rest])


@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_in_one_sequence_stays_in_it(backend: str) -> None:
    case = Case(pattern=DilatedPattern((6, 20), (1, 3)), batch=3, num_queries=20, num_keys=20, heads=4, kv_heads=2, lse_grad=True)
    x = inputs(case, torch.float32)
    before = results(call, case, x, backend=backend)
    y = replace(x, **{name: getattr(x, name).clone() for name in "qkv"})
    for name in "qkv":
        getattr(y, name)[1] = math.nan
    after = results(call, case, y, backend=backend)
    for name in RESULTS:
        assert equal(after[name][[0, 2]], before[name][[0, 2]]), name
        # torch's CPU op calls the lse of a NaN row 0
        assert name == "lse" or bool(after[name][1].isnan().all()), name


# --- extremes -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_huge_logits(backend: str, dtype: torch.dtype, is_causal: bool) -> None:
    """Scores of ±1e4: finite everywhere, and the winning key's value comes out alone."""
    n, heads = 24, 2
    q = torch.full((1, n, heads, 4), 50.0, dtype=dtype)
    sign = torch.full((1, n, 1, 1), -1.0, dtype=dtype)
    sign[:, ::6] = 1.0
    k = (sign * 50).expand(1, n, heads, 4).contiguous()
    v = torch.randn(1, n, heads, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
    case = Case(
        pattern=DilatedPattern((6, 12), (1, 1)),
        num_queries=n,
        num_keys=n,
        heads=heads,
        kv_heads=heads,
        head_dim=4,
        scale=1.0,
        is_causal=is_causal,
    )
    x = Inputs(q, k, v, torch.ones_like(q), torch.zeros(1, heads, n), None, None)
    found = results(call, case, x, backend=backend)
    for name in found:
        assert bool(found[name].isfinite().all()), name
    # of the keys that count, the positive ones
    weights = multiplicities(case, None)[0].sum(0)[0, 0].double() * (sign[0, :, 0, 0] > 0)
    truth = torch.einsum("ij,bjhd->bihd", weights / weights.sum(-1, keepdim=True), v.double())
    # the lse of 1e4 is held to half an ulp, and each merge's weights are exponentials of differences of such numbers
    ulp = 1e4 * torch.finfo(torch.float64 if dtype is torch.float64 else torch.float32).eps
    assert max_error(found["out"], truth) <= (4 * ulp + torch.finfo(dtype).eps) * float(v.abs().max())
    assert max_error(found["lse"], 1e4 + weights.sum(-1).log().expand(1, heads, n)) <= 2 * ulp


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_rows_without_keys_are_exactly_zero(backend: str, dtype: torch.dtype, is_causal: bool) -> None:
    """Rows that no branch or block takes, or whose keys are all padding: out 0, lse −inf, no gradient from or to them."""
    cases = []
    for seed in range(20):
        case = drawn(seed, padding=("none", "some", "row", "all")[seed % 4], mixture_grad=("exact", "detached")[seed // 4 % 2])
        masked = replace(case.pattern, tail="mask")
        cases.append(replace(case, pattern=masked, lse_grad=case.mixture_grad == "exact", sinks=False))
    kept = torch.ones(4, 4, dtype=torch.bool)
    kept[1] = False
    for pattern in (
        BlockTensor(kept, block_size=64),
        MaskFunction(lambda b, h, i, j: i % 3 > 0, block_size=64),
        LocalWindow(0, block_size=64),
        RandomBlocks(0.0, block_size=64),
    ):
        cases.append(of_blocks(pattern, batch=2, padding="row" if isinstance(pattern, LocalWindow) else "none"))
    for case in (replace(case, is_causal=is_causal) for case in cases):
        x = inputs(case, dtype)
        found = results(call, case, x, backend=backend)
        assert all(bool(found[name].isfinite().all()) for name in ("out", "dq", "dk", "dv"))
        mask = pairs(case, x)
        empty = ~mask.any(-1)
        assert torch.equal(found["lse"] == -math.inf, empty)
        rows = empty.transpose(1, 2)
        assert not found["out"][rows].any() and not found["dq"][rows].any()
        unseen = ~mask.any(2).unflatten(1, (case.kv_heads, -1)).any(2).transpose(1, 2)
        assert not found["dk"][unseen].any() and not found["dv"][unseen].any()
        if isinstance(case.pattern, BlockPattern):
            assert empty.any() and all(result.passes for result in measure(case, backend, dtype))


@pytest.mark.parametrize("backend", [*BACKENDS, "auto"])
@pytest.mark.parametrize(("batch", "queries", "keys"), [(0, 7, 7), (2, 0, 0), (2, 0, 7), (0, 0, 0), (1, 1, 1), (1, 1, 7)])
def test_empty_and_tiny_shapes(backend: str, batch: int, queries: int, keys: int) -> None:
    shape: dict[str, Any] = {"batch": batch, "num_queries": queries, "num_keys": keys, "heads": 4, "kv_heads": 2}
    branches = Case(pattern=DilatedPattern((4, 8), (1, 2)), **shape)
    for case in (
        branches,
        replace(branches, is_causal=True, mixture_grad="detached"),
        replace(branches, is_causal=True, dropout_p=0.5 if backend == "auto" else 0.0),
        Case(pattern=LocalWindow(3), lse_grad=True, **shape),
        Case(pattern=LocalWindow(3), branches=DilatedPattern((4,), (1,)), lse_grad=True, **shape),
    ):
        x = inputs(case, torch.float32)
        leaves = [y.requires_grad_() for y in (x.q, x.k, x.v)]
        out, lse = call(case, x, *leaves, backend=backend)
        assert out.shape == x.q.shape and lse.shape == (batch, 4, queries) and out.dtype is x.q.dtype and lse.dtype is torch.float32
        which = slice(1 + case.lse_grad)
        # raises where one has no gradient
        grads = torch.autograd.grad([out, lse][which], leaves, [x.dout, x.dlse][which])
        assert all(grad.shape == y.shape and bool(grad.isfinite().all()) for grad, y in zip(grads, leaves, strict=True))
        assert batch * queries > 0 or not any(grad.any() for grad in grads[1:])


def test_empty_documents_only() -> None:
    q = torch.randn(1, 0, 2, 4)
    out = dilated_attention(q, q, q, [4], [1], cu_seqlens=torch.tensor([0, 0, 0], dtype=torch.int32))
    assert out.shape == q.shape


# --- determinism and layouts -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fifty_repeats_are_equal(backend: str, dtype: torch.dtype, two_threads: None) -> None:
    pattern = DilatedPattern((16, 50), (1, 3))
    case = Case(pattern=pattern, batch=2, num_queries=64, num_keys=64, heads=4, kv_heads=2, is_causal=True, padding="some", lse_grad=True)
    x = inputs(case, dtype)
    first = results(call, case, x, backend=backend, deterministic=True)
    for _ in range(50):
        again = results(call, case, x, backend=backend, deterministic=True)
        assert all(torch.equal(again[name], first[name]) for name in first)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_layouts_equal_contiguous(backend: str, layout: str, dtype: torch.dtype) -> None:
    """Every layout of q, k, v and dout gives the results of contiguous copies, and none is written to."""
    for seed in (1, 2, 3, 4):
        case = drawn(seed, layouts=(layout,) * 4, batch=2, bounds=None, head_dim=8)
        x = inputs(case, dtype)
        copies = {name: getattr(x, name).contiguous().clone() for name in ("q", "k", "v", "dout")}
        found, truth = results(call, case, x, backend=backend), results(call, case, replace(x, **copies), backend=backend)
        eps = torch.finfo(dtype).eps
        for name in truth:
            # folding of batch and segments follows strides, and a matrix product of another size may round in another order
            assert max_error(found[name], truth[name]) <= 32 * eps * max(1.0, largest(truth[name])), (name, case)
        for name, copy in copies.items():
            assert torch.equal(getattr(x, name), copy), name


@pytest.mark.parametrize("backend", BACKENDS)
def test_result_does_not_alias_inputs_and_is_contiguous(backend: str) -> None:
    q = torch.randn(2, 4, 12, 8).transpose(1, 2)
    out, lse = dilated_attention(q, q, q, [4, 12], [2, 3], return_lse=True, backend=backend)
    assert out.is_contiguous() and lse.is_contiguous()
    assert out.untyped_storage().data_ptr() != q.untyped_storage().data_ptr()


@pytest.mark.parametrize("backend", BACKENDS)
def test_masks_of_any_layout(backend: str) -> None:
    """A mask transposed, expanded over the batch, or cut out of a larger one is read as what it says."""
    case = Case(pattern=DilatedPattern((6, 20), (1, 3)), batch=3, num_queries=20, num_keys=20, heads=4, kv_heads=2)
    x = inputs(case, torch.float32)
    flags = torch.rand(3, 20, generator=torch.Generator().manual_seed(0)) < 0.4
    wide = torch.ones(3, 60, dtype=torch.bool)
    wide[:, 5:45:2] = flags
    for mask in (flags.t().contiguous().t(), wide[:, 5:45:2], flags[:1].expand(3, 20), flags[:, :1].expand(3, 20)):
        found, truth = (results(call, case, replace(x, key_padding_mask=m), backend=backend) for m in (mask, mask.contiguous().clone()))
        assert all(torch.equal(found[name], truth[name]) for name in truth)


@pytest.mark.parametrize("backend", BACKENDS)
def test_under_deterministic_algorithms(backend: str) -> None:
    """torch's own switch is honoured, and its filling of fresh memory changes nothing."""
    case = Case(
        pattern=DilatedPattern((6, 20), (2, 3)), batch=2, num_queries=20, num_keys=20, heads=4, kv_heads=2, padding="some", lse_grad=True
    )
    x = inputs(case, torch.float32)
    truth = results(call, case, x, backend=backend)
    torch.use_deterministic_algorithms(True)
    try:
        found = results(call, case, x, backend=backend)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(found[name], truth[name]) for name in truth)
