"""What must hold of branches and blocks: nothing leaks, nothing depends on order or layout, empty rows are exactly 0, runs repeat.
Numbers at the ends of what there is, and of types that are numbers, too, are computed with right."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import dilated_attention as da
from dilated_attention import DilatedPattern, attention, block_sparse_attention, dilated_attention
from dilated_attention.pattern import BigBird, BlockPattern, BlockTensor, LocalWindow, MaskFunction, RandomBlocks, Sparsity, TopBlocks
from dilated_attention.testing import (
    LAYOUTS,
    Case,
    Inputs,
    Space,
    call,
    inputs,
    max_error,
    measure,
    multiplicities,
    random_case,
    results,
)
from dilated_attention.testing.oracle import block_multiplicities

CONTIGUOUS = Space(layouts=("contiguous",), max_length=48, dropout=False, window=False, head_dims=(3, 8, 16))


@pytest.fixture(params=["math", "sdpa_cpu"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


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


KINDS: dict[str, dict[str, Any]] = {
    "later tokens": {"is_causal": True},
    "segments and offsets": {},
    "documents": {"batch": 1, "bounds": (0, 13, 13, 30, 41)},
    "padding": {"padding": "some"},
}


VALUES = [None, 1e4, torch.finfo(torch.float32).tiny]


# NaN and infinities where a kernel would multiply them by weights of 0: tests/backends/test_nonfinite.py
@pytest.mark.parametrize(
    ("kind", "value"),
    [*itertools.product(KINDS, VALUES), *itertools.product(("documents", "padding"), (math.nan, math.inf, -math.inf))],
)
def test_what_no_row_attends_to_changes_nothing(kind: str, value: float | None, backend: str) -> None:
    """A loss of some rows: their outputs and all gradients are bit for bit the same whatever the other queries hold, and the keys and
    values that none of these rows reaches, whose gradients are 0."""
    for seed in range(14):
        case = drawn(seed, **{"num_keys": 41, "num_queries": 41, "query_offset": 0, "bounds": None, "padding": "none"} | KINDS[kind])
        rows = slice(13, 30) if kind == "documents" else slice(0, 41 if kind == "padding" else 1 + 3 * seed)
        if seed >= 12 and kind in ("later tokens", "padding"):
            # a choice reads all queries of a block
            pattern = (LocalWindow(50, block_size=64), TopBlocks(2, block_size=64), BigBird(20, 3, 1, block_size=64))
            rows, case = (
                slice(0, 200 if kind == "padding" else 128),
                of_blocks(pattern[seed % 2 * (1 + (kind == "padding"))], **KINDS[kind]),
            )
        x = inputs(case, torch.float32)
        inside = torch.zeros(case.num_keys, dtype=torch.bool)
        inside[rows] = True
        x.dout[:, ~inside], x.dlse[..., ~inside] = 0, 0
        # causal or not, a kernel sees a segment as a whole, but not what comes after all queries
        reached = pairs(replace(case, is_causal=False), x)[:, :, rows].any(2).any(1)
        reached &= torch.arange(case.num_keys) < (rows.stop if case.is_causal else case.num_keys)
        other = torch.randn(x.q.shape, generator=torch.Generator().manual_seed(5)) if value is None else torch.full(x.q.shape, value)
        y = replace(x, q=torch.where(inside[:, None, None], x.q, other))
        for name in "kv":
            tokens = getattr(x, name)
            y = replace(y, **{name: torch.where(reached[..., None, None], tokens, other[:, :, : tokens.shape[2]])})
        before, after = (results(call, case, z, backend=backend) for z in (x, y))
        for name in before:
            if name == "lse":
                assert equal(after[name][..., rows], before[name][..., rows]), (name, case)
            elif name in ("dk", "dv"):
                assert equal(after[name][reached], before[name][reached]), (name, case)
                assert (kind == "documents" and value not in VALUES) or not after[name][~reached].any(), (name, case)
            elif name != "dsinks":
                assert equal(after[name][:, rows], before[name][:, rows]), (name, case)


# --- extremes -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_huge_logits(backend: str, dtype: torch.dtype, is_causal: bool) -> None:
    """Scores of ±1e4: finite everywhere, and the winning key's value comes out alone."""
    shape: dict[str, Any] = {"num_queries": 24, "num_keys": 24, "heads": 2, "kv_heads": 2, "head_dim": 4}
    case = Case(pattern=DilatedPattern((6, 12), (1, 1)), scale=1.0, is_causal=is_causal, **shape)
    sign = torch.full((1, 24, 1, 1), -1.0, dtype=dtype)
    sign[:, ::6] = 1.0
    x = inputs(case, dtype)
    x = replace(x, q=torch.full_like(x.q, 50.0), k=(sign * 50).expand(1, 24, 2, 4).contiguous())
    found = results(call, case, x, backend=backend)
    assert all(bool(y.isfinite().all()) for y in found.values())
    # of the keys that count, the positive ones
    weights = multiplicities(case, None)[0].sum(0)[0, 0].double() * (sign[0, :, 0, 0] > 0)
    truth = torch.einsum("ij,bjhd->bihd", weights / weights.sum(-1, keepdim=True), x.v.double())
    # the lse of 1e4 is held to half an ulp, and each merge's weights are exponentials of differences of such numbers
    ulp = 1e4 * torch.finfo(torch.float64 if dtype is torch.float64 else torch.float32).eps
    assert max_error(found["out"], truth) <= (4 * ulp + torch.finfo(dtype).eps) * float(x.v.abs().max())
    assert max_error(found["lse"], 1e4 + weights.sum(-1).log().expand(1, 2, 24)) <= 2 * ulp


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


@pytest.mark.parametrize(("batch", "queries", "keys"), [(0, 7, 7), (2, 0, 0), (2, 0, 7), (0, 0, 0), (1, 1, 7)])
def test_empty_shapes(backend: str, batch: int, queries: int, keys: int) -> None:
    """Gradients of nothing, too, are zeros of the right shape. Other short sequences: tests/engine/test_oracle.py."""
    for pattern in (DilatedPattern((4, 8), (1, 2)), LocalWindow(3)):
        case = Case(pattern=pattern, batch=batch, num_queries=queries, num_keys=keys, heads=4, kv_heads=2)
        x = inputs(case, torch.float32)
        found = results(call, case, x, backend=backend)
        assert all(found[name].shape == like.shape for name, like in (("out", x.q), ("dq", x.q), ("dk", x.k), ("dv", x.v)))
        assert found["lse"].shape == (batch, 4, queries) and all(bool(y.isfinite().all()) for y in found.values())
        assert batch * queries > 0 or (not found["dk"].any() and not found["dv"].any())


def test_empty_documents_only() -> None:
    q = torch.randn(1, 0, 2, 4)
    assert dilated_attention(q, q, q, [4], [1], cu_seqlens=torch.tensor([0, 0, 0], dtype=torch.int32)).shape == q.shape


# --- determinism and layouts -------------------------------------------------------------------------------------------------------

USUAL = Case(pattern=DilatedPattern((6, 20), (2, 3)), batch=3, num_queries=50, num_keys=50, heads=4, kv_heads=2, lse_grad=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_repeats_are_equal(backend: str, dtype: torch.dtype, two_threads: None) -> None:
    """By the option, and by torch's own switch, whose filling of fresh memory changes nothing."""
    case = replace(USUAL, is_causal=True, padding="some")
    x = inputs(case, dtype)
    first = results(call, case, x, backend=backend, deterministic=True)
    for _ in range(20):
        again = results(call, case, x, backend=backend, deterministic=True)
        assert all(torch.equal(again[name], first[name]) for name in first)
    torch.use_deterministic_algorithms(True)
    try:
        found = results(call, case, x, backend=backend)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(found[name], first[name]) for name in first)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_inputs_of_any_layout_are_not_written_to_and_results_are_their_own(backend: str, layout: str) -> None:
    """What they compute: tests/engine/test_oracle.py."""
    case = replace(USUAL, layouts=(layout,) * 4)
    x = inputs(case, torch.float16)
    copies = {name: getattr(x, name).clone() for name in ("q", "k", "v", "dout")}
    found = results(call, case, x, backend=backend)
    assert all(torch.equal(getattr(x, name), copy) for name, copy in copies.items())
    assert found["out"].is_contiguous() and found["lse"].is_contiguous()
    assert found["out"].untyped_storage().data_ptr() not in [getattr(x, name).untyped_storage().data_ptr() for name in copies]


def test_masks_of_any_layout(backend: str) -> None:
    """A mask transposed, expanded over the batch, or cut out of a larger one is read as what it says."""
    x, flags = inputs(USUAL, torch.float32), torch.rand(3, 50, generator=torch.Generator().manual_seed(0)) < 0.4
    wide = torch.ones(3, 120, dtype=torch.bool)
    wide[:, 5:105:2] = flags
    for mask in (flags.t().contiguous().t(), wide[:, 5:105:2], flags[:1].expand(3, 50), flags[:, :1].expand(3, 50)):
        found, truth = (results(call, USUAL, replace(x, key_padding_mask=m), backend=backend) for m in (mask, mask.contiguous().clone()))
        assert all(torch.equal(found[name], truth[name]) for name in truth)


# --- numbers ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("huge", [2**63, 10**24, 10**400], ids=["2**63", "10**24", "10**400"])
def test_a_window_beyond_the_sequence_is_unbounded(huge: int) -> None:
    torch.manual_seed(0)
    q = torch.randn(1, 24, 2, 8)
    assert torch.equal(attention(q, q, q, window=huge), attention(q, q, q))
    assert torch.equal(attention(q, q, q, window=(huge, 2)), attention(q, q, q, window=(None, 2)))
    assert LocalWindow(huge) == LocalWindow((None, None))
    assert torch.equal(block_sparse_attention(q, q, q, LocalWindow(huge)), block_sparse_attention(q, q, q, LocalWindow(24)))


def test_numbers_of_any_kind_are_taken() -> None:
    """What is an integer is not refused for its type: numpy's, torch's, a range."""
    for lengths in (np.array([4, 8]), torch.tensor([4, 8]), (np.int32(4), np.int64(8)), range(4, 9, 4), [torch.tensor(4), 8]):
        assert DilatedPattern(lengths, [1, 2]) == DilatedPattern([4, 8], [1, 2])
    q, documents = torch.randn(1, 300, 2, 8), torch.tensor([0, 3, 300])
    for scale in (1, 0.5, np.float64(0.5)):
        options: dict[str, Any] = {"scale": scale, "cu_seqlens": documents, "query_offset": np.int64(0)}
        assert dilated_attention(q, q, q, np.array([4, 8]), torch.tensor([1, 2]), **options).shape == q.shape
    drawn = [block_sparse_attention(q, q, q, Sparsity(0.5, seed=seed)) for seed in (np.int64(3), 3)]
    assert torch.equal(*drawn)


WINDOW = LocalWindow(16)
BRANCHES: dict[str, Any] = {"segment_lengths": [16], "dilation_rates": [2]}
ATTENTIONS: dict[str, dict[str, Any]] = {
    "attention": {},
    "dilated_attention": BRANCHES,
    "block_sparse_attention": {"pattern": WINDOW},
    "block_sparse_dilated_attention": BRANCHES | {"pattern": WINDOW},
    "ring_attention": {},
}


@pytest.mark.parametrize("name", ATTENTIONS)
def test_a_softcap_at_the_ends_of_numbers_is_computed_right(name: str) -> None:
    def with_gradients(dtype: torch.dtype, **options: Any) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        x = [torch.randn(1, 64, 2, 8, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for _ in range(3)]
        out = getattr(da, name)(*x, **ATTENTIONS[name], **options)
        return [out.detach(), *torch.autograd.grad(out.square().sum(), x)]

    for cap in (1.2e-38, 1e-30, 1, np.float64(50), 2**70, 1e31):
        for x, y in zip(*(with_gradients(dtype, softcap=cap) for dtype in (torch.float32, torch.float64)), strict=True):
            assert float((x - y).abs().max()) < 1e-5, cap
    # the quotient that kernels multiply q·k by
    with pytest.raises(ValueError, match="softcap is 1e-30 and scale is 1e"):
        with_gradients(torch.float32, softcap=1e-30, scale=1e10)


def test_lengths_of_xpos_have_no_end_where_its_scale_has_none() -> None:
    layer = da.MultiheadDilatedAttention(16, 2, [16], [2], rotary=True, xpos_scale_base=1e308)
    assert bool(layer(torch.randn(1, 16, 16), is_causal=True)[0].isfinite().all())
