"""Attention weights of chosen rows and the attention keys receive, against the multiplicities written out in float64."""

from __future__ import annotations

import itertools
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from dilated_attention import (
    BlockSparseAttention,
    BlockSparseDilatedAttention,
    DilatedAttention,
    DilatedPattern,
    MultiheadBlockSparseAttention,
    MultiheadBlockSparseDilatedAttention,
    MultiheadDilatedAttention,
    attention,
    block_sparse_attention,
    block_sparse_dilated_attention,
    dilated_attention,
)
from dilated_attention.engine.reference import multiplicities
from dilated_attention.functional import attention_map, attention_received, maps
from dilated_attention.pattern import BigBird, BlockPattern, LocalWindow, MaskFunction, PerHead, TopBlocks, with_sparsity

N, H = 37, 4
BRANCHES = ([8, 20, 5], [1, 3, 5])
DOCUMENTS = torch.tensor([0, 13, 13, 14, N], dtype=torch.int32)
PADDING = torch.arange(N)[None] >= torch.tensor([[N], [19]])


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def make_qk(batch: int = 2, queries: int = N, keys: int = N, kv_heads: int = H) -> tuple[torch.Tensor, torch.Tensor]:
    return draw(batch, queries, H, 6), draw(batch, keys, kv_heads, 6, seed=1)


def written_out(
    q: torch.Tensor, k: torch.Tensor, m: torch.Tensor, zero: torch.Tensor | float = 0.0, scale: float | None = None
) -> torch.Tensor:
    """p (B, H, Nq, Nk) = m e^s / (Σ m e^s + zero), 0 in empty rows."""
    q, k = q.double(), k.double().repeat_interleave(q.shape[2] // k.shape[2], 2)
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * (q.shape[3] ** -0.5 if scale is None else scale)
    shares = m * scores.exp()
    total = shares.sum(-1, keepdim=True) + (zero[..., None] if isinstance(zero, torch.Tensor) else zero)
    return torch.where(total > 0, shares / total, 0.0)


def dilated_weights(q: torch.Tensor, k: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    shape = {name: options[name] for name in ("head_offsets", "branch_heads", "tail") if name in options}
    rest = {name: value for name, value in options.items() if name not in shape and name != "scale"}
    m, zero = multiplicities(DilatedPattern(*map(tuple, BRANCHES), **shape), q.shape[1], k.shape[1], H, **rest)
    return written_out(q, k, m.sum(0), zero.sum(0), options.get("scale"))


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.9},
    "blocked": {"head_offsets": "blocked"},
    "zero": {"head_offsets": "zero", "is_causal": True},
    "lists": {"head_offsets": ((0, 0, 0, 0), (2, 1, 0, 2), (4, 0, 3, 1))},
    "split": {"branch_heads": "split"},
    "zero_keys": {"head_offsets": "blocked", "tail": "zero_keys"},
    "causal_zero_keys": {"tail": "zero_keys", "is_causal": True},
    "padding": {"key_padding_mask": PADDING},
    "padding_zero_keys": {"key_padding_mask": PADDING, "tail": "zero_keys", "branch_heads": "split"},
    "documents": {"cu_seqlens": DOCUMENTS},
    "documents_zero_keys": {"cu_seqlens": DOCUMENTS, "tail": "zero_keys", "key_padding_mask": PADDING[1:]},
    "offset": {"query_offset": 20, "is_causal": True},
    "offset_zero_keys": {"query_offset": 11, "tail": "zero_keys"},
}


def inputs_for(options: dict[str, Any], kv_heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    return make_qk(1 if "cu_seqlens" in options else 2, 15 if "query_offset" in options else N, N, kv_heads)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_of_dilated_attention(name: str, kv_heads: int) -> None:
    options = OPTIONS[name]
    q, k = inputs_for(options, kv_heads)
    expected = dilated_weights(q, k, options)
    v = draw(*k.shape, seed=2)
    out, lse = dilated_attention(q, k, v, *BRANCHES, return_lse=True, **options)
    # in any order, some twice
    rows = [7, 3, 3, 14, 0, 9]
    for chunk, known in ((None, None), (5, None), (8, lse)):
        got = attention_map(q, k, *BRANCHES, query_rows=rows, chunk=chunk, lse=known, **options)
        torch.testing.assert_close(got, expected[:, :, rows], rtol=1e-10, atol=1e-12)
    mean = attention_map(q, k, *BRANCHES, query_rows=rows, average_heads=True, chunk=5, **options)
    torch.testing.assert_close(mean, expected[:, :, rows].mean(1), rtol=1e-10, atol=1e-12)
    # they are the weights of what attention returns
    weights = attention_map(q, k, *BRANCHES, query_rows=range(q.shape[1]), **options)
    values = v.repeat_interleave(H // kv_heads, 2)
    torch.testing.assert_close(torch.einsum("bhij,bjhd->bihd", weights, values), out, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize("name", OPTIONS)
def test_attention_received_is_the_sum_of_the_rows(name: str, kv_heads: int) -> None:
    options = OPTIONS[name]
    q, k = inputs_for(options, kv_heads)
    expected = dilated_weights(q, k, options)
    got = attention_received(q, k, *BRANCHES, **options)
    torch.testing.assert_close(got, expected.sum(2), rtol=1e-9, atol=1e-10)
    weights = draw(*q.shape[:2], seed=3)
    got = attention_received(q, k, *BRANCHES, query_weights=weights, average_heads=True, **options)
    torch.testing.assert_close(got, torch.einsum("bi,bhij->bj", weights, expected) / H, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("options", [OPTIONS[name] for name in ("plain", "causal", "split", "padding", "documents")], ids=str)
def test_rows_sum_to_one_and_rows_without_keys_to_zero(options: dict[str, Any]) -> None:
    q, k = inputs_for(options, 2)
    sums = attention_map(q, k, *BRANCHES, query_rows=range(N), **options).sum(-1)
    empty = torch.isneginf(dilated_attention(q, k, k, *BRANCHES, return_lse=True, **options)[1])
    torch.testing.assert_close(sums, (~empty).double(), rtol=0, atol=1e-12)
    assert bool(empty.any()) == ("branch_heads" in options or "key_padding_mask" in options)


def test_the_share_of_zero_keys_is_what_lacks_to_one() -> None:
    q, k = make_qk()
    # one segment of 40 > N: 37 positions, padded to 39 by rate 3; offset 1 takes 12 of 13
    options = {"head_offsets": [[1] * H], "tail": "zero_keys"}
    sums = attention_map(q, k, [40], [3], query_rows=[1, 4], **options).sum(-1)
    lse = dilated_attention(q, k, k, [40], [3], return_lse=True, **options)[1][:, :, [1, 4]]
    torch.testing.assert_close(1 - sums, (-lse).exp(), rtol=1e-10, atol=1e-12)


BLOCK_N = 150
PATTERNS: dict[str, BlockPattern] = {
    "window": LocalWindow(30, block_size=64),
    "per_head": PerHead([LocalWindow(9, block_size=64)] * 3 + [BigBird(20, 5, 1, block_size=64)]),
    "density": with_sparsity(0.4, "random", block_size=64),
    "function": MaskFunction(lambda b, h, i, j: (i + j) % 3 == h % 3, block_size=64),
    "chosen": TopBlocks(1, block_size=64),
}
BLOCK_OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "padding": {"key_padding_mask": torch.arange(BLOCK_N)[None] >= torch.tensor([[BLOCK_N], [70]]), "is_causal": True},
    "documents": {"cu_seqlens": torch.tensor([0, 66, 66, BLOCK_N], dtype=torch.int32)},
    "offset": {"query_offset": 101, "is_causal": True, "scale": 0.3},
}


def block_multiplicities(pattern: BlockPattern, q: torch.Tensor, k: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    """m (B, H, Nq, Nk) by the patterns' own definitions, document by document."""
    m = torch.zeros(q.shape[0], H, q.shape[1], BLOCK_N)
    padding, bounds = options.get("key_padding_mask"), options.get("cu_seqlens", torch.tensor([0, BLOCK_N])).tolist()
    where = {name: options[name] for name in ("is_causal", "query_offset") if name in options}
    for (start, end), b in itertools.product(itertools.pairwise(bounds), range(q.shape[0])):
        if start == end:
            continue
        rows = slice(start, end) if "cu_seqlens" in options else slice(None)
        kept = pattern
        if isinstance(pattern, TopBlocks):
            hidden = None if padding is None else padding[b : b + 1]
            kept = pattern.choose(q[b : b + 1, rows], k[b : b + 1, start:end], key_padding_mask=hidden, scale=options.get("scale"), **where)
        m[b, :, rows, start:end] = kept.dense_mask(m[b, 0, rows].shape[0], end - start, H, **where).float()
    return m if padding is None else m * ~padding[:, None, None]


@pytest.mark.parametrize("option", BLOCK_OPTIONS)
@pytest.mark.parametrize("name", PATTERNS)
def test_every_kind_of_block_pattern(name: str, option: str) -> None:
    pattern, options = PATTERNS[name], BLOCK_OPTIONS[option]
    batch, queries = 1 if option == "documents" else 2, 40 if option == "offset" else BLOCK_N
    q, k = make_qk(batch, queries, BLOCK_N, 2)
    expected = written_out(q, k, block_multiplicities(pattern, q, k, options), scale=options.get("scale"))
    rows = [39, 0, 20, 21]
    got = attention_map(q, k, pattern=pattern, query_rows=torch.tensor(rows), chunk=70, **options)
    torch.testing.assert_close(got, expected[:, :, rows], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(attention_received(q, k, pattern=pattern, **options), expected.sum(2), rtol=1e-9, atol=1e-10)


def test_branches_and_blocks_add_up_and_neither_is_dense() -> None:
    q, k = make_qk(2, BLOCK_N, BLOCK_N, 2)
    options: dict[str, Any] = {"is_causal": True, "head_offsets": "blocked"}
    values = draw(*k.shape, seed=2)
    both = attention_map(q, k, *BRANCHES, pattern=PATTERNS["window"], query_rows=range(BLOCK_N), **options)
    out = block_sparse_dilated_attention(q, k, values, *BRANCHES, PATTERNS["window"], **options)
    torch.testing.assert_close(torch.einsum("bhij,bjhd->bihd", both, values.repeat_interleave(2, 2)), out, rtol=1e-9, atol=1e-10)
    received = attention_received(q, k, *BRANCHES, pattern=PATTERNS["window"], **options)
    torch.testing.assert_close(received, both.sum(2), rtol=1e-9, atol=1e-10)
    # without causality a block reaches beyond the segments of a row
    far = attention_map(q, k, [4], [1], pattern=PATTERNS["window"], query_rows=[50])
    assert bool((far[..., 20:80] > 0).all()) and not bool(far[..., 81:].any())
    dense = attention_map(q, k, query_rows=range(BLOCK_N))
    torch.testing.assert_close(dense, written_out(q, k, torch.ones(())), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(attention_received(q, k), dense.sum(2), rtol=1e-9, atol=1e-10)


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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_half_precision_and_autocast_are_computed_in_float32(dtype: torch.dtype) -> None:
    wide = make_qk()
    q, k = (x.to(dtype) for x in wide)
    expected = dilated_weights(q, k, {})
    if dtype is not torch.float32:
        with torch.autocast("cpu", dtype):
            # q and k are rounded, as they are for attention, and nothing after them
            rounded = attention_map(*(x.float() for x in wide), *BRANCHES, query_rows=range(N))
            received = attention_received(*(x.float() for x in wide), *BRANCHES)
        assert rounded.dtype is torch.float32
        torch.testing.assert_close(rounded.double(), expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(received.double(), expected.sum(2), rtol=1e-5, atol=1e-5)
    got = attention_map(q, k, *BRANCHES, query_rows=range(N))
    assert got.dtype is torch.float32
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-6)
    received = attention_received(q, k, *BRANCHES)
    assert received.dtype is torch.float32
    torch.testing.assert_close(received.double(), expected.sum(2), rtol=1e-5, atol=1e-5)
    # unless asked for
    native = attention_received(q, k, *BRANCHES, dtype=dtype)
    assert native.dtype is torch.float32
    torch.testing.assert_close(native.double(), expected.sum(2), rtol=3 * torch.finfo(dtype).eps, atol=3 * torch.finfo(dtype).eps)


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
    window = PATTERNS["window"]
    modules: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
        (DilatedAttention(*BRANCHES, tail="zero_keys", scale=0.4, dropout=0.9), BRANCHES, {"tail": "zero_keys", "scale": 0.4}),
        (BlockSparseAttention(window, scale=0.4, dropout=0.9), (), {"pattern": window, "scale": 0.4}),
        (
            BlockSparseDilatedAttention(*BRANCHES, window, branch_heads="split"),
            BRANCHES,
            {"pattern": window, "branch_heads": "split"},
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


Q, K = make_qk()


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"query_rows": [N]}, ValueError, "query_rows holds 37; expected rows of q, 0 to 36"),
        ({"query_rows": [-1]}, ValueError, "query_rows holds -1"),
        ({"query_rows": "first"}, ValueError, "query_rows is 'first'"),
        ({"query_rows": [1.5]}, TypeError, r"query_rows\[0\] is 1.5"),
        ({"query_rows": None}, TypeError, r"query_rows\[0\] is None"),
        ({"query_rows": torch.ones(N, dtype=torch.bool)}, TypeError, "mask.nonzero"),
        ({"query_rows": torch.zeros(2, 3, dtype=torch.int64)}, ValueError, r"query_rows has shape \(2, 3\)"),
        ({"segment_lengths": None}, ValueError, "segment_lengths is None and dilation_rates is"),
        ({"segment_lengths": None, "dilation_rates": None, "tail": "zero_keys"}, ValueError, "tail is 'zero_keys' and applies only"),
        ({"segment_lengths": [3, 8]}, ValueError, "segment_lengths has 2 entries"),
        ({"head_offsets": [[0], [0], [0]]}, ValueError, "1 integers per branch for 4 heads"),
        ({"pattern": "window"}, TypeError, "pattern is 'window'"),
        ({"chunk": 0}, ValueError, "chunk is 0"),
        ({"is_causal": 1}, TypeError, "is_causal is 1"),
        ({"average_heads": None}, TypeError, "average_heads is None"),
        ({"scale": math.nan}, ValueError, "scale is nan"),
        ({"lse": torch.zeros(2, H, 3)}, ValueError, r"lse has shape \(2, 4, 3\); expected \(batch, heads, queries\) = \(2, 4, 37\)"),
        ({"lse": 1.0}, ValueError, "lse is a float"),
        ({"query_offset": 1}, ValueError, "query_offset is 1"),
        ({"key_padding_mask": PADDING[:, :3]}, ValueError, "key_padding_mask has shape"),
        ({"cu_seqlens": DOCUMENTS}, ValueError, "cu_seqlens with batch size 2"),
        ({"q": Q[..., :5]}, ValueError, "q has head_dim 5"),
    ],
    ids=str,
)
def test_bad_input_is_refused(options: dict[str, Any], error: type[Exception], text: str) -> None:
    call = {"q": Q, "k": K, "segment_lengths": BRANCHES[0], "dilation_rates": BRANCHES[1], "query_rows": [0]} | options
    with pytest.raises(error, match=text):
        attention_map(call.pop("q"), call.pop("k"), **call)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"query_weights": torch.ones(2, 3)}, ValueError, r"query_weights has shape \(2, 3\); expected \(batch, queries\) = \(2, 37\)"),
        ({"query_weights": 2.0}, TypeError, "query_weights is a float"),
        ({"dtype": torch.int8}, ValueError, "dtype is torch.int8"),
        ({"backend": "fastest"}, ValueError, "backend is 'fastest'"),
        ({"average_heads": 1}, TypeError, "average_heads is 1"),
    ],
    ids=str,
)
def test_bad_input_of_attention_received_is_refused(options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        attention_received(Q, K, *BRANCHES, **options)


def test_dense_and_block_outputs_agree_with_their_functions() -> None:
    q, k = make_qk(2, BLOCK_N, BLOCK_N)
    v = draw(*k.shape, seed=2)
    for weights, out in (
        (attention_map(q, k, query_rows=range(BLOCK_N), is_causal=True), attention(q, k, v, is_causal=True)),
        (
            attention_map(q, k, pattern=PATTERNS["density"], query_rows=range(BLOCK_N)),
            block_sparse_attention(q, k, v, PATTERNS["density"]),
        ),
    ):
        torch.testing.assert_close(torch.einsum("bhij,bjhd->bihd", weights, v), out, rtol=1e-9, atol=1e-10)


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
