"""What must hold without an oracle: nothing leaks, nothing depends on order or layout, empty rows are exactly 0, runs repeat."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch

from dilated_attention import DilatedPattern, attention, dilated_attention
from dilated_attention.pattern import BigBird
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
    random_case,
    results,
)

BACKENDS = ("math", "sdpa_cpu")
CONTIGUOUS = Space(layouts=("contiguous",), max_length=48, dropout=False, window=False, head_dims=(3, 8, 16))


def drawn(seed: int, **changes: object) -> Case:
    return replace(random_case(seed, CONTIGUOUS), **changes)  # type: ignore[arg-type]


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit, NaN being equal to itself."""
    return a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())


def allowed_pairs(case: Case) -> torch.Tensor:
    """bool (H, Nq, Nk) from the pattern's own definition."""
    mask = case.pattern.dense_mask(case.num_queries, case.num_keys, case.heads, is_causal=case.is_causal, query_offset=case.query_offset)
    return mask > 0


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
@pytest.mark.parametrize("seed", range(30))
def test_later_tokens_change_nothing_before_them(backend: str, seed: int) -> None:
    """Causal: outputs and gradients of the rows before a cut, bit for bit, whatever finite numbers follow; outputs also before a NaN."""
    padding = ("none", "some")[seed % 2]
    case = drawn(seed, is_causal=True, bounds=None, query_offset=0, padding=padding, num_keys=37, num_queries=37, lse_grad=False)
    x = inputs(case, torch.float32)
    cut = 1 + seed % 36
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
def test_values_that_are_not_finite_reach_who_attends_to_them(backend: str, value: float) -> None:
    """Containing them does not hide them: exactly the rows with a weight above 0, in exactly their channel."""
    case = Case(pattern=DilatedPattern((6, 24), (1, 3)), num_queries=24, num_keys=24, heads=3, kv_heads=3, is_causal=True)
    x = inputs(case, torch.float32)
    v = x.v.clone()
    v[0, 9, :, 2] = value
    before, after = (call(case, x, x.q, x.k, z, backend=backend) for z in (x.v, v))
    reached = allowed_pairs(case)[:, :, 9].t()[None, :, :, None] & (torch.arange(8) == 2)
    assert torch.equal(~after[0].isfinite(), reached)
    assert max_error(after[0][~reached], before[0][~reached]) == 0 and equal(after[1], before[1])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("value", [None, 1e4, math.nan, math.inf, -math.inf])
def test_another_segment_or_offset_changes_nothing(backend: str, value: float | None) -> None:
    """Tokens that no row of the loss shares a branch with may be anything at all, NaN included."""
    for seed in range(12):
        case = drawn(seed, bounds=None, query_offset=0, num_keys=40, num_queries=40, padding="none", is_causal=bool(seed % 2))
        rows = torch.arange(0, 9)
        # key positions that the rows reach through any branch and head, causal or not: a kernel sees a segment as a whole
        reached = allowed_pairs(replace(case, is_causal=False))[:, rows].any(0).any(0)
        reached[rows] = True
        others = (~reached).nonzero()[:, 0]
        if not len(others):
            continue
        x = inputs(case, torch.float32)
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
    rows = torch.arange(n)
    first, second = rows // 6 * 6, rows // 12 * 12
    # branch of 6: the one positive key of the segment; branch of 12: both, or the first alone where the second lies ahead
    weights = torch.zeros(n, n, dtype=torch.float64)
    for i in range(n):
        weights[i, first[i]] += 1
        for j in (int(second[i]), int(second[i]) + 6):
            weights[i, j] += not is_causal or j <= i
    truth = torch.einsum("ij,bjhd->bihd", weights / weights.sum(-1, keepdim=True), v.double())
    # the lse of 1e4 is held to half an ulp, and each merge's weights are exponentials of differences of such numbers
    ulp = 1e4 * torch.finfo(torch.float64 if dtype is torch.float64 else torch.float32).eps
    assert max_error(found["out"], truth) <= (4 * ulp + torch.finfo(dtype).eps) * float(v.abs().max())
    assert max_error(found["lse"], 1e4 + weights.sum(-1).log().expand(1, heads, n)) <= 2 * ulp


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_rows_without_keys_are_exactly_zero(backend: str, dtype: torch.dtype, is_causal: bool) -> None:
    """Rows that no branch takes, or whose keys are all padding: out 0, lse −inf, no gradient from or to them."""
    for seed in range(20):
        case = drawn(
            seed, is_causal=is_causal, padding=("none", "some", "row", "all")[seed % 4], mixture_grad=("exact", "detached")[seed // 4 % 2]
        )
        case = replace(case, pattern=replace(case.pattern, tail="mask"), lse_grad=case.mixture_grad == "exact", sinks=False)
        x = inputs(case, dtype)
        found = results(call, case, x, backend=backend)
        assert all(bool(found[name].isfinite().all()) for name in ("out", "dq", "dk", "dv"))
        mask = _document_mask(case)[None].expand(case.batch, -1, -1, -1)
        if x.key_padding_mask is not None:
            mask = mask & ~x.key_padding_mask[:, None, None, :]
        empty = ~mask.any(-1)
        assert torch.equal(found["lse"] == -math.inf, empty)
        rows = empty.transpose(1, 2)
        assert not found["out"][rows].any() and not found["dq"][rows].any()
        unseen = ~mask.any(2).unflatten(1, (case.kv_heads, -1)).any(2).transpose(1, 2)
        assert not found["dk"][unseen].any() and not found["dv"][unseen].any()


def _document_mask(case: Case) -> torch.Tensor:
    if case.bounds is None:
        return allowed_pairs(case)
    mask = torch.zeros(case.heads, case.num_queries, case.num_keys, dtype=torch.bool)
    for a, b in itertools.pairwise(case.bounds):
        mask[:, a:b, a:b] = case.pattern.dense_mask(b - a, b - a, case.heads, is_causal=case.is_causal) > 0
    return mask


@pytest.mark.parametrize("backend", [*BACKENDS, "auto"])
@pytest.mark.parametrize(("batch", "queries", "keys"), [(0, 7, 7), (2, 0, 0), (2, 0, 7), (0, 0, 0), (1, 1, 1), (1, 1, 7)])
def test_empty_and_tiny_shapes(backend: str, batch: int, queries: int, keys: int) -> None:
    for is_causal, mixture_grad, dropout_p in (
        (False, "exact", 0.0),
        (True, "detached", 0.0),
        (True, "exact", 0.5 if backend == "auto" else 0.0),
    ):
        q = torch.randn(batch, queries, 4, 8, requires_grad=True)
        k, v = (torch.randn(batch, keys, 2, 8, requires_grad=True) for _ in range(2))
        out, lse = dilated_attention(
            q, k, v, [4, 8], [1, 2], is_causal=is_causal, mixture_grad=mixture_grad, dropout_p=dropout_p, return_lse=True, backend=backend
        )
        assert out.shape == q.shape and lse.shape == (batch, 4, queries) and out.dtype is q.dtype and lse.dtype is torch.float32
        out.sum().backward()
        for x in (q, k, v):
            assert x.grad is not None and x.grad.shape == x.shape and bool(x.grad.isfinite().all())
        assert batch * queries > 0 or not any(x.grad.any() for x in (k, v) if x.grad is not None)


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


# --- the poison that every test lives with -------------------------------------------------------------------------------------------


def test_fresh_memory_is_poisoned() -> None:
    for x in (torch.empty(3), torch.empty_like(torch.zeros(3)), torch.zeros(1).new_empty(3), torch.empty(3, dtype=torch.bfloat16)):
        assert bool(x.isnan().all())
    assert torch.empty(3, dtype=torch.int64).dtype is torch.int64 and torch.empty(2, device="meta").device.type == "meta"
    assert torch.empty(2, requires_grad=True).requires_grad


@pytest.mark.no_poison
def test_poison_can_be_left_out() -> None:
    assert not hasattr(torch.empty, "__wrapped__")
