"""Attention weights of chosen rows and the attention keys receive, against the multiplicities written out in float64."""

from __future__ import annotations

import itertools
import random
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dilated_attention import (
    BlockSparseAttention,
    BlockSparseDilatedAttention,
    DilatedAttention,
    MultiheadBlockSparseAttention,
    MultiheadBlockSparseDilatedAttention,
    MultiheadDilatedAttention,
    dilated_attention,
)
from dilated_attention.functional import attention_map, attention_received, maps
from dilated_attention.pattern import BlockPattern, LocalWindow
from dilated_attention.testing import Case, Inputs, Space, call, inputs, random_case
from dilated_attention.testing.check import function_of
from dilated_attention.testing.oracle import softmax_parts

N, H = 37, 4
BRANCHES = ([8, 20, 5], [1, 3, 5])
DOCUMENTS = torch.tensor([0, 13, 13, 14, N], dtype=torch.int32)
PADDING = torch.arange(N)[None] >= torch.tensor([[N], [19]])


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def make_qk(batch: int = 2, queries: int = N, keys: int = N, kv_heads: int = H) -> tuple[torch.Tensor, torch.Tensor]:
    return draw(batch, queries, H, 6), draw(batch, keys, kv_heads, 6, seed=1)


def weights_of(case: Case, x: Inputs) -> torch.Tensor:
    """p (B, H, Nq, Nk) in float64, by the multiplicities written out."""
    x = replace(x, sinks=None if x.sinks is None else x.sinks.double())
    return softmax_parts(case, x, *(y.double() for y in (x.q, x.k, x.v)))[0][0]


def mapped(case: Case, x: Inputs) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments of maps that stand for a case."""
    given = {"pattern": case.pattern} if isinstance(case.pattern, BlockPattern) else {}
    if (branches := case.dilated) is not None:
        given |= {field.name: getattr(branches, field.name) for field in fields(branches)}
    options = function_of(case, x)[2]
    kept = ("is_causal", "scale", "cu_seqlens", "key_padding_mask", "sinks", "query_offset")
    return {"q": x.q, "k": x.k}, given | {name: options[name] for name in kept}


USUAL = Space(window=False, dropout=False, lse_grad=False, max_length=40, head_dims=(3, 6))


@pytest.mark.parametrize("space", [USUAL, replace(USUAL, blocks=True, max_length=150)], ids=["branches", "blocks"])
@pytest.mark.parametrize("group", range(2))
def test_maps_of_any_case_are_its_weights(group: int, space: Space) -> None:
    """Of rows in any order, some twice; with lse known or not, keys in chunks, heads apart or their mean; and what keys receive."""
    for seed in range(12 * group, 12 * (group + 1)):
        case = replace(random_case(seed, space), mixture_grad="exact")
        x, draw_ = inputs(case, torch.float64), random.Random(seed)
        expected, (tensors, options), size = weights_of(case, x), mapped(case, x), 5 if space is USUAL else 70
        rows = [draw_.randrange(case.num_queries) for _ in range(6)] if case.num_queries else []
        lse = call(case, x, x.q, x.k, x.v)[1]
        for chunk, known in ((None, None), (size, lse)):
            got = attention_map(**tensors, query_rows=rows, chunk=chunk, lse=known, **options)
            torch.testing.assert_close(got, expected[:, :, rows], rtol=1e-9, atol=1e-11, msg=lambda m, case=case: f"{m} {case}")
        mean = attention_map(**tensors, query_rows=torch.tensor(rows, dtype=torch.int64), average_heads=True, chunk=size, **options)
        torch.testing.assert_close(mean, expected[:, :, rows].mean(1), rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(attention_received(**tensors, **options), expected.sum(2), rtol=1e-9, atol=1e-10)
        weights = draw(*x.q.shape[:2], seed=3)
        got = attention_received(**tensors, query_weights=weights, average_heads=True, **options)
        torch.testing.assert_close(got, torch.einsum("bi,bhij->bj", weights, expected) / case.heads, rtol=1e-9, atol=1e-10)


def test_without_a_pattern_they_are_dense_attentions() -> None:
    q, k = make_qk(2, BLOCK_N, BLOCK_N, 2)
    dense = attention_map(q, k, query_rows=range(BLOCK_N))
    scores = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(2, 2)) * q.shape[3] ** -0.5
    torch.testing.assert_close(dense, scores.softmax(-1), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(attention_received(q, k), dense.sum(2), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_half_precision_and_autocast_are_computed_in_float32(dtype: torch.dtype) -> None:
    wide = make_qk()
    q, k = (x.to(dtype) for x in wide)
    expected = attention_map(q.double(), k.double(), *BRANCHES, query_rows=range(N))
    found = [(attention_map(q, k, *BRANCHES, query_rows=range(N)), attention_received(q, k, *BRANCHES))]
    if dtype is not torch.float32:
        single = [x.float() for x in wide]
        with torch.autocast("cpu", dtype):
            # q and k are rounded, as they are for attention, and nothing after them
            found.append((attention_map(*single, *BRANCHES, query_rows=range(N)), attention_received(*single, *BRANCHES)))
    for rows, received in found:
        assert rows.dtype is received.dtype is torch.float32
        torch.testing.assert_close(rows.double(), expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(received.double(), expected.sum(2), rtol=1e-5, atol=1e-5)
    # unless asked for
    native = attention_received(q, k, *BRANCHES, dtype=dtype)
    assert native.dtype is torch.float32
    torch.testing.assert_close(native.double(), expected.sum(2), rtol=3 * torch.finfo(dtype).eps, atol=3 * torch.finfo(dtype).eps)


def test_the_share_of_zero_keys_is_what_lacks_to_one() -> None:
    q, k = make_qk()
    # one segment of 40 > N: 37 positions, padded to 39 by rate 3; offset 1 takes 12 of 13
    options = {"head_offsets": [[1] * H], "tail": "zero_keys"}
    sums = attention_map(q, k, [40], [3], query_rows=[1, 4], **options).sum(-1)
    lse = dilated_attention(q, k, k, [40], [3], return_lse=True, **options)[1][:, :, [1, 4]]
    torch.testing.assert_close(1 - sums, (-lse).exp(), rtol=1e-10, atol=1e-12)


BLOCK_N = 150
WINDOW = LocalWindow(30, block_size=64)


def test_cls_is_the_first_row_of_the_sequence_or_of_each_document() -> None:
    q, k = make_qk(1)
    everything = attention_map(q, k, *BRANCHES, query_rows=range(N))
    torch.testing.assert_close(attention_map(q, k, *BRANCHES, query_rows="cls"), everything[:, :, :1])
    torch.testing.assert_close(attention_map(q, k, *BRANCHES, query_rows=3), everything[:, :, 3:4])
    bounds = torch.tensor([0, 13, 14, N], dtype=torch.int32)
    packed = attention_map(q, k, *BRANCHES, query_rows="cls", cu_seqlens=bounds)
    for index, (start, end) in enumerate(itertools.pairwise(bounds.tolist())):
        alone = attention_map(q[:, start:end], k[:, start:end], *BRANCHES, query_rows="cls")
        torch.testing.assert_close(packed[:, :, index, start:end], alone[:, :, 0])
        assert packed[:, :, index].count_nonzero() == alone.count_nonzero()
    with pytest.raises(ValueError, match="a document of cu_seqlens is empty"):
        attention_map(q, k, *BRANCHES, query_rows="cls", cu_seqlens=DOCUMENTS)


def test_infinite_scores_of_masked_keys_leave_no_trace() -> None:
    q = torch.full((1, 5, 1, 2), 1e25)
    k = q.clone()
    q[:, 0], k[:, 0] = 1.0, 1.0
    got = attention_map(q, k, query_rows=[0], is_causal=True)
    assert got.tolist() == [[[[1.0, 0.0, 0.0, 0.0, 0.0]]]]


def test_memory_is_bounded_by_the_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor but the result is larger than what is scored at a time."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                self.elements = max(self.elements, out.numel())
            return out

    monkeypatch.setattr(maps, "SCORES_AT_ONCE", 3 * 2 * H * 50)
    q, k = make_qk(2, 2000, 2000)
    with Largest() as largest:
        got = attention_map(q, k, [500, 2000], [1, 4], query_rows=range(0, 2000, 100), average_heads=True, chunk=50)
    assert got.numel() == 2 * 20 * 2000
    assert largest.elements <= max(got.numel(), q.numel())
    torch.testing.assert_close(got.sum(-1), torch.ones(2, 20, dtype=torch.float64))


LAYERS: dict[str, Any] = {
    "dilated": lambda **s: MultiheadDilatedAttention(24, H, *BRANCHES, head_offsets="blocked", tail="zero_keys", scale=0.5, **s),
    "rotary": lambda **s: MultiheadDilatedAttention(24, H, *BRANCHES, rotary=True, qk_norm=True, num_kv_heads=2, dropout=0.5, **s),
    "xpos": lambda **s: MultiheadDilatedAttention(24, H, *BRANCHES, rotary=True, xpos_scale_base=30.0, **s),
    "block_sparse": lambda **s: MultiheadBlockSparseAttention(24, H, LocalWindow(9, block_size=64), rotary=True, scale=0.3, **s),
    "union": lambda **s: MultiheadBlockSparseDilatedAttention(24, H, *BRANCHES, LocalWindow(9, block_size=64), num_kv_heads=2, **s),
}


@pytest.mark.parametrize("call", ["full", "causal", "padding", "documents", "offset"])
@pytest.mark.parametrize("name", LAYERS)
def test_a_layers_weights_give_its_output(name: str, call: str) -> None:
    torch.manual_seed(0)
    layer = LAYERS[name](dtype=torch.float64, layer_norm=False).eval()
    options: dict[str, Any] = {
        "full": {},
        "causal": {"is_causal": True},
        "padding": {"key_padding_mask": PADDING},
        "documents": {"cu_seqlens": DOCUMENTS, "is_causal": True},
        "offset": {"query_offset": 9, "is_causal": True},
    }[call]
    key = draw(1 if call == "documents" else 2, N, 24)
    query = draw(2, 12, 24, seed=4) if call == "offset" else key
    weights = layer.attention_map(query, None if query is key else key, query_rows=range(query.shape[1]), **options)
    assert not weights.requires_grad
    v = layer.project(query, key, key)[2]
    out = torch.einsum("bhij,bjhd->bihd", weights, v.repeat_interleave(H // v.shape[2], 2))
    torch.testing.assert_close(layer.combine(out), layer(query, key, **options)[0], rtol=1e-9, atol=1e-10)
    received = layer.attention_received(query, None if query is key else key, **options)
    torch.testing.assert_close(received, weights.sum(2), rtol=1e-9, atol=1e-10)
    few = layer.attention_map(query, key, query_rows=[5, 2], average_heads=True, chunk=6, **options)
    torch.testing.assert_close(few, weights[:, :, [5, 2]].mean(1), rtol=1e-10, atol=1e-12)


def test_modules_on_tensors_have_the_functions_with_their_settings() -> None:
    q, k = make_qk(2, BLOCK_N, BLOCK_N, 2)
    modules: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
        (DilatedAttention(*BRANCHES, tail="zero_keys", scale=0.4, dropout=0.9), BRANCHES, {"tail": "zero_keys", "scale": 0.4}),
        (BlockSparseAttention(WINDOW, scale=0.4, dropout=0.9), (), {"pattern": WINDOW, "scale": 0.4}),
        (
            BlockSparseDilatedAttention(*BRANCHES, WINDOW, branch_heads="split"),
            BRANCHES,
            {"pattern": WINDOW, "branch_heads": "split"},
        ),
    ]
    for module, branches, options in modules:
        expected = attention_map(q, k, *branches, query_rows=[3, 80], is_causal=True, **options)
        lse = module.eval()(q, k, k, is_causal=True, return_lse=True)[1]
        assert torch.equal(module.attention_map(q, k, [3, 80], is_causal=True), expected)
        torch.testing.assert_close(module.attention_map(q, k, [3, 80], is_causal=True, lse=lse), expected)
        assert torch.equal(module.attention_received(q, k, is_causal=True), attention_received(q, k, *branches, is_causal=True, **options))


def test_maps_work_in_inference_mode_and_have_no_gradient() -> None:
    q, k = make_qk()
    q, mask = q.requires_grad_(), PADDING
    expected = (
        attention_map(q, k, *BRANCHES, query_rows=[1], key_padding_mask=mask),
        attention_received(q, k, *BRANCHES, key_padding_mask=mask),
    )
    assert not any(x.requires_grad for x in expected)
    with torch.inference_mode():
        q, k, mask = q.clone(), k.clone(), mask.clone()
        got = (
            attention_map(q, k, *BRANCHES, query_rows=[1], key_padding_mask=mask),
            attention_received(q, k, *BRANCHES, key_padding_mask=mask),
        )
    assert all(map(torch.equal, got, expected))


def test_empty_sequences_and_no_rows() -> None:
    q, k = make_qk()
    assert attention_map(q, k, *BRANCHES, query_rows=[]).shape == (2, H, 0, N)
    nothing = make_qk(2, 0, 0)
    assert attention_map(*nothing, *BRANCHES, query_rows=[]).shape == (2, H, 0, 0)
    assert attention_received(*nothing, *BRANCHES).shape == (2, H, 0)
    assert attention_map(make_qk(2, 0, N)[0], k, *BRANCHES, query_rows=[]).shape == (2, H, 0, N)
    assert not bool(attention_received(make_qk(2, 0, N)[0], k, *BRANCHES).any())


def test_the_page_on_attention_maps_runs_and_is_right() -> None:
    page = (Path(__file__).parents[2] / "docs" / "attention_maps.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, flags=re.S)
    names: dict[str, Any] = {}
    torch.manual_seed(0)
    # as it stands, but for a length that a test has time for
    exec(compile(code.replace("5000", "500").replace("4999", "499"), "docs/attention_maps.md", "exec"), names)
    cls, heat, rows, received = (names[name] for name in ("cls", "heat", "rows", "received"))
    assert [tuple(x.shape) for x in (cls, heat, rows, received)] == [(1, 1, 500), (1, 500), (1, 16, 3, 500), (1, 500)]
    for sums in (cls.sum(-1), heat.sum(-1), rows.sum(-1), received.sum(-1) / 500):
        torch.testing.assert_close(sums, torch.ones_like(sums))
