"""Attention weights of chosen rows and the attention keys receive, against the multiplicities written out in float64."""

import itertools
import random
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from dilated_attention import (
    MultiheadBlockSparseAttention,
    MultiheadBlockSparseDilatedAttention,
    MultiheadDilatedAttention,
)
from dilated_attention.functional import attention_map, attention_received, maps
from dilated_attention.pattern import BlockPattern, LocalWindow
from dilated_attention.testing import Case, Inputs, Space, inputs, random_case
from dilated_attention.testing.check import function_of
from dilated_attention.testing.oracle import softmax_parts
from tests.helpers.forms import static
from tests.helpers.largest import Largest

N, H = 37, 4
BRANCHES = ([8, 20, 5], [1, 3, 5])
PADDING = torch.arange(N)[None] >= torch.tensor([[N], [19]])
WINDOW = LocalWindow(9, block_size=64)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def make_qk(batch: int = 2, length: int = N, kv_heads: int = H) -> tuple[torch.Tensor, torch.Tensor]:
    return draw(batch, length, H, 6), draw(batch, length, kv_heads, 6, seed=1)


def mapped(case: Case, x: Inputs) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments of maps that stand for a case."""
    patterns = {"pattern": case.pattern} if isinstance(case.pattern, BlockPattern) else {}
    if (branches := case.dilated) is not None:
        patterns |= {field.name: getattr(branches, field.name) for field in fields(branches)}
    options = function_of(case, x)[2]
    names = ("is_causal", "scale", "cu_seqlens", "key_padding_mask", "sinks", "query_offset")
    return {"q": x.q, "k": x.k}, patterns | {name: options[name] for name in names}


# in float64, and of all other dtypes in float32
CLOSE: dict[bool, dict[str, float]] = {True: {"rtol": 1e-9, "atol": 1e-10}, False: {"rtol": 1e-5, "atol": 1e-5}}
USUAL = Space(window=False, dropout=False, lse_grad=False, max_length=40, head_dims=(3, 6))


@pytest.mark.parametrize("space", [USUAL, replace(USUAL, blocks=True, max_length=150)], ids=["branches", "blocks"])
@pytest.mark.parametrize("group", range(2))
def test_maps_of_any_case_are_its_weights(group: int, space: Space, device: str) -> None:
    """Of rows in any order, some twice, one alone, or none; lse known or not, keys in chunks, heads apart or their mean; what keys get."""
    for seed in range(12 * group, 12 * (group + 1)):
        # the keys of short segments are not all keys
        case = replace(random_case(seed, replace(space, max_segment=(None, 12)[seed % 2])), mixture_grad="exact")
        # kernels choose blocks by means of another rounding
        case = case if device == "cpu" else static(case)
        dtype = (torch.float64, torch.float32, torch.bfloat16, torch.float16)[seed % 4]
        x, draw_, close = inputs(case, dtype), random.Random(seed), CLOSE[dtype is torch.float64]
        (tensors, options), size = mapped(case, inputs(case, dtype, device)), 5 if space is USUAL else 70
        # p (B, H, Nq, Nk), by the multiplicities written out
        wide = replace(x, sinks=None if x.sinks is None else x.sinks.double())
        expected, _, lse = softmax_parts(case, wide, x.q.double(), x.k.double(), x.v.double())[0]
        exact = dtype if dtype is torch.float64 else torch.float32
        rows = [draw_.randrange(case.num_queries) for _ in range(6)] if case.num_queries else []
        for some, chunk, known in ((rows, None, None), (rows, size, lse.to(device, exact)), (rows[:1], None, None)):
            got = attention_map(**tensors, query_rows=some, chunk=chunk, lse=known, **options)
            assert got.dtype is exact and got.device.type == device
            torch.testing.assert_close(got.cpu().double(), expected[:, :, some], **close, msg=lambda m, case=case: f"{m} {case}")
        mean = attention_map(**tensors, query_rows=torch.tensor(rows, dtype=torch.int64), average_heads=True, chunk=size, **options)
        torch.testing.assert_close(mean.cpu().double(), expected[:, :, rows].mean(1), **close)
        torch.testing.assert_close(attention_received(**tensors, **options).cpu().double(), expected.sum(2), **close)
        weights = draw(*x.q.shape[:2], seed=3)
        got = attention_received(**tensors, query_weights=weights.to(device), average_heads=True, **options)
        torch.testing.assert_close(got.cpu().double(), torch.einsum("bi,bhij->bj", weights, expected) / case.heads, **close)


def test_without_a_pattern_they_are_dense_attentions() -> None:
    q, k = make_qk(kv_heads=2)
    dense = attention_map(q, k, query_rows=range(N))
    scores = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(2, 2)) * q.shape[3] ** -0.5
    torch.testing.assert_close(dense, scores.softmax(-1), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(attention_received(q, k), dense.sum(2), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_rounds_q_and_k_alone_and_a_dtype_may_be_asked_for(dtype: torch.dtype, device: str) -> None:
    wide = [x.to(device) for x in make_qk()]
    q, k = (x.to(dtype) for x in wide)
    expected = attention_map(q.double(), k.double(), *BRANCHES, query_rows=range(N))
    with torch.autocast(device, dtype):
        tensors = [x.float() for x in wide]
        rows, received = attention_map(*tensors, *BRANCHES, query_rows=range(N)), attention_received(*tensors, *BRANCHES)
    assert rows.dtype is received.dtype is torch.float32
    torch.testing.assert_close(rows.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(received.double(), expected.sum(2), rtol=1e-5, atol=1e-5)
    native = attention_received(q, k, *BRANCHES, dtype=dtype)
    assert native.dtype is torch.float32
    torch.testing.assert_close(native.double(), expected.sum(2), rtol=3 * torch.finfo(dtype).eps, atol=3 * torch.finfo(dtype).eps)


def test_cls_is_the_first_row_of_the_sequence_or_of_each_document() -> None:
    q, k = make_qk(1)
    everything = attention_map(q, k, *BRANCHES, query_rows=range(N))
    for rows, first in (("cls", 0), (3, 3)):
        torch.testing.assert_close(attention_map(q, k, *BRANCHES, query_rows=rows), everything[:, :, first : first + 1])
    bounds = torch.tensor([0, 13, 14, N], dtype=torch.int32)
    packed = attention_map(q, k, *BRANCHES, query_rows="cls", cu_seqlens=bounds)
    for index, (start, end) in enumerate(itertools.pairwise(bounds.tolist())):
        alone = attention_map(q[:, start:end], k[:, start:end], *BRANCHES, query_rows="cls")
        torch.testing.assert_close(packed[:, :, index], torch.nn.functional.pad(alone[:, :, 0], (start, N - end)))
    with pytest.raises(ValueError, match="a document of cu_seqlens is empty"):
        attention_map(q, k, *BRANCHES, query_rows="cls", cu_seqlens=torch.tensor([0, 13, 13, N], dtype=torch.int32))


def test_infinite_scores_of_masked_keys_leave_no_trace() -> None:
    q = torch.full((1, 5, 1, 2), 1e25)
    q[:, 0] = 1.0
    assert attention_map(q, q, query_rows=[0], is_causal=True).tolist() == [[[[1.0, 0.0, 0.0, 0.0, 0.0]]]]


@pytest.mark.parametrize("chunk", [50, 2000])
def test_memory_is_bounded_by_the_chunks(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor but the result is larger than what is scored at a time."""
    monkeypatch.setattr(maps, "SCORES_AT_ONCE", 3 * 2 * H * chunk)
    q, k = make_qk(2, 2000)
    with Largest() as largest:
        got = attention_map(q, k, [500, 2000], [1, 4], query_rows=range(0, 2000, 100), average_heads=True, chunk=chunk)
    assert largest.elements <= max(got.numel(), q.numel())
    torch.testing.assert_close(got.sum(-1), torch.ones(2, 20, dtype=torch.float64))


LAYERS: dict[str, Any] = {
    "dilated": lambda **s: MultiheadDilatedAttention(24, H, *BRANCHES, head_offsets="blocked", tail="zero_keys", scale=0.5, **s),
    "rotary": lambda **s: MultiheadDilatedAttention(24, H, *BRANCHES, rotary=True, qk_norm=True, num_kv_heads=2, dropout=0.5, **s),
    "block_sparse": lambda **s: MultiheadBlockSparseAttention(24, H, WINDOW, rotary=True, scale=0.3, **s),
    "union": lambda **s: MultiheadBlockSparseDilatedAttention(24, H, *BRANCHES, WINDOW, branch_heads="split", **s),
}
CALLS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"is_causal": True},
    "padding": {"key_padding_mask": PADDING},
    "documents": {"cu_seqlens": torch.tensor([0, 13, 13, 14, N], dtype=torch.int32), "is_causal": True},
    "offset": {"query_offset": 9, "is_causal": True},
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", LAYERS)
def test_a_layers_weights_give_its_output(name: str, call: str) -> None:
    torch.manual_seed(0)
    layer, options = LAYERS[name](dtype=torch.float64, layer_norm=False).eval(), CALLS[call]
    key = draw(1 if call == "documents" else 2, N, 24)
    query = draw(2, 12, 24, seed=4) if call == "offset" else key
    other = None if query is key else key
    weights = layer.attention_map(query, other, query_rows=range(query.shape[1]), **options)
    assert not weights.requires_grad
    v = layer.project(query, key, key)[2]
    out = torch.einsum("bhij,bjhd->bihd", weights, v.repeat_interleave(H // v.shape[2], 2))
    torch.testing.assert_close(layer.combine(out), layer(query, key, **options)[0], rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(layer.attention_received(query, other, **options), weights.sum(2), rtol=1e-9, atol=1e-10)
