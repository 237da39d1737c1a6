"""One row a step over a cache equals that row of the forward, for every pattern, layout and decoder."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dilated_attention import BackendUnavailable, attention, block_sparse_attention, dilated_attention
from dilated_attention.backends import Hardware
from dilated_attention.engine.decode import dispatch as torch_decode
from dilated_attention.engine.decode.keys import Cached, row_keys
from dilated_attention.functional import decode_attention, explain_decode
from dilated_attention.pattern import (
    Axial,
    BigBird,
    BlockPattern,
    Causal,
    DilatedBlocks,
    DilatedPattern,
    Document,
    GlobalLocal,
    LocalWindow,
    MaskFunction,
    PerHead,
    RandomBlocks,
    Strided,
    TopBlocks,
    with_sparsity,
)
from dilated_attention.testing.cases import random_branches

D = 8
SMALL = {"block_size": 64}
OFFSETS = ((0, 3, 3, 0), (1, 0, 0, 1))
PATTERNS: dict[str, DilatedPattern | BlockPattern | int | None] = {
    "dense": None,
    "window": 40,
    "window of one": 0,
    "longnet": DilatedPattern((32, 64, 128), (1, 2, 4)),
    "odd": DilatedPattern((50, 70), (7, 3)),
    "blocked": DilatedPattern((32, 96), (2, 4), "blocked"),
    "zero": DilatedPattern((32, 96), (1, 4), "zero"),
    "lists": DilatedPattern((32, 96), (4, 2), OFFSETS),
    "split": DilatedPattern((64, 128), (2, 4), branch_heads="split"),
    "sparse": DilatedPattern((60,), (9,)),
    "local": LocalWindow(30, **SMALL),
    "causal": Causal(**SMALL),
    "global": GlobalLocal(30, 20, **SMALL),
    "strided": Strided(2, 0, **SMALL),
    "dilated blocks": DilatedBlocks(2, 3, block_size=(64, 128)),
    "axial": Axial(128, **SMALL),
    "union": Strided(3, **SMALL) | LocalWindow(9, **SMALL),
    "function": MaskFunction(lambda b, h, q, k: (q * k + h) % 3 == 0, per_head=True, **SMALL),
    "per head": PerHead((LocalWindow(9, **SMALL), Strided(2, **SMALL), GlobalLocal(3, 20, **SMALL), Causal(**SMALL))),
}


def forward(
    pattern: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of the whole sequence."""
    options: dict[str, Any] = {"is_causal": True, "return_lse": True, "sinks": sinks}
    if pattern is None or isinstance(pattern, int):
        return attention(q, k, v, window=None if pattern is None else (pattern, 0), **options)
    if isinstance(pattern, BlockPattern):
        return block_sparse_attention(q, k, v, pattern, **options)
    branches: dict[str, Any] = {"head_offsets": pattern.head_offsets, "branch_heads": pattern.branch_heads}
    return dilated_attention(q, k, v, pattern.segment_lengths, pattern.dilation_rates, **branches, **options)


def choice(pattern: Any) -> dict[str, Any]:
    return {"window": pattern} if isinstance(pattern, int) else {"pattern": pattern}


def make(n: int, heads: int = 4, kv_heads: int = 4, batch: int = 2, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((batch, n, heads, D), (batch, n, kv_heads, D), (batch, n, kv_heads, D))
    q, k, v = (torch.randn(shape, generator=generator) for shape in shapes)
    return q, k, v


def paged(k: torch.Tensor, v: torch.Tensor, page: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same keys and values in pages that lie in no order, and the table."""
    B, n = k.shape[:2]
    count = -(-n // page)
    order = torch.randperm(B * count + 3, generator=torch.Generator().manual_seed(seed))[: B * count].view(B, count)
    stores = []
    for x in (k, v):
        store = torch.full((B * count + 3, page, *x.shape[2:]), torch.nan)
        padded = torch.cat([x, torch.full((B, count * page - n, *x.shape[2:]), torch.nan)], 1)
        store[order] = padded.view(B, count, page, *x.shape[2:])
        stores.append(store)
    return stores[0], stores[1], order.to(torch.int32)


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("name", PATTERNS)
def test_every_step_is_the_row_of_the_forward(name: str, kv_heads: int) -> None:
    """Lengths that cross segments and blocks, requests at different positions; what lies behind the row is NaN."""
    pattern = PATTERNS[name]
    n = 300
    q, k, v = make(n, kv_heads=kv_heads)
    sinks = None if kv_heads == 4 else torch.tensor([0.3, 5.0, -2.0, 1.0])
    out, lse = forward(pattern, q, k, v, sinks)
    rows = torch.arange(2)
    for t in [*range(0, 140, 9), 63, 64, 96, 127, 128, 191, 192, 256, n - 1]:
        positions = torch.tensor([t, (t * 7 + 13) % n])
        seen_k, seen_v = k.clone(), v.clone()
        for b, p in enumerate(positions.tolist()):
            seen_k[b, p + 1 :], seen_v[b, p + 1 :] = torch.nan, torch.nan
        row, options = q[rows, positions][:, None], choice(pattern)
        found, found_lse = decode_attention(row, seen_k, seen_v, positions, sinks=sinks, return_lse=True, **options)
        torch.testing.assert_close(found[:, 0], out[rows, positions], atol=1e-5, rtol=0)
        torch.testing.assert_close(found_lse[..., 0], lse[rows, :, positions], atol=1e-5, rtol=0)


def test_a_row_that_nothing_takes_is_zero() -> None:
    q, k, v = make(60)
    out, lse = decode_attention(q[:, 8:9], k, v, torch.tensor([8, 8]), PATTERNS["sparse"], return_lse=True)  # type: ignore[arg-type]
    # offsets 0 … 3 of 9: position 8 is nobody's
    assert not out.any() and (lse == -torch.inf).all()


@pytest.mark.parametrize("name", ["dense", "window", "longnet", "lists", "global", "union", "per head"])
def test_pages_in_no_order_are_as_one_stretch(name: str) -> None:
    pattern = PATTERNS[name]
    n = 200
    q, k, v = make(n, kv_heads=2)
    pages_k, pages_v, table = paged(k, v, 16)
    for t in (0, 15, 16, 99, n - 1):
        positions = torch.tensor([t, n - 1 - t])
        rows = q[torch.arange(2), positions][:, None]
        expected = decode_attention(rows, k, v, positions, **choice(pattern))
        found = decode_attention(rows, pages_k, pages_v, positions, page_table=table, max_length=n, **choice(pattern))
        assert torch.equal(found, expected)


@pytest.mark.parametrize("name", ["window", "window of one", "longnet", "odd", "lists", "split", "local"])
def test_slots_are_taken_again_once_nothing_can_read_them(name: str) -> None:
    pattern = PATTERNS[name]
    n = 300
    q, k, v = make(n)
    span = row_keys(
        None if isinstance(pattern, int) else pattern, 4, 4, n, "cpu", **({"window": pattern} if isinstance(pattern, int) else {})
    ).span
    assert span < n
    round_k, round_v = (torch.full((2, span, 4, D), torch.nan) for _ in range(2))
    out, _ = forward(pattern, q, k, v)
    for t in range(n):
        round_k[:, t % span], round_v[:, t % span] = k[:, t], v[:, t]
        if t % 11 == 0 or t in (span - 1, span, span + 1):
            found = decode_attention(q[:, t : t + 1], round_k, round_v, torch.tensor([t, t]), max_length=n, **choice(pattern))
            torch.testing.assert_close(found[:, 0], out[:, t], atol=1e-5, rtol=0)
    with pytest.raises(ValueError, match=f"rows read up to {span} positions back" if span > 1 else "at least one slot"):
        decode_attention(q[:, :1], round_k[:, 1:], round_v[:, 1:], torch.tensor([0, 0]), max_length=n, **choice(pattern))


@given(st.integers(0, 10**6))
def test_random_branches(seed: int) -> None:
    draw = random.Random(seed)
    n, kv_heads = draw.randint(1, 90), draw.choice([1, 2, 4])
    pattern = replace(random_branches(draw, 4, n, 100), tail="mask")
    q, k, v = make(n, kv_heads=kv_heads, batch=1, seed=seed)
    out, lse = forward(pattern, q, k, v)
    for t in {0, n - 1, *(draw.randrange(n) for _ in range(4))}:
        found, found_lse = decode_attention(q[:, t : t + 1], k, v, torch.tensor([t]), pattern, return_lse=True)
        torch.testing.assert_close(found[:, 0], out[:, t], atol=1e-5, rtol=0)
        torch.testing.assert_close(found_lse[..., 0], lse[:, :, t], atol=1e-5, rtol=0)


def test_float64_and_halves() -> None:
    q, k, v = make(100)
    at = torch.tensor([70, 99])
    rows = q[torch.arange(2), at][:, None]
    pattern = PATTERNS["longnet"]
    exact = decode_attention(rows.double(), k.double(), v.double(), at, pattern)  # type: ignore[arg-type]
    assert exact.dtype is torch.float64
    for dtype, tolerance in ((torch.bfloat16, 0.03), (torch.float16, 0.004)):
        found, lse = decode_attention(rows.to(dtype), k.to(dtype), v.to(dtype), at, pattern, return_lse=True)  # type: ignore[arg-type]
        assert (found.dtype, lse.dtype) == (dtype, torch.float32)
        torch.testing.assert_close(found.double(), exact, atol=tolerance, rtol=0)


@pytest.mark.parametrize("name", PATTERNS)
def test_kernel_equals_its_twin(name: str) -> None:
    """Interpreted on a CPU, compiled on a GPU; the tables on the device that it has. Layouts, splits and groups of heads take turns."""
    decode_triton = pytest.importorskip("dilated_attention.engine.decode.triton")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    pattern, turn, n = PATTERNS[name], list(PATTERNS).index(name), 150
    kv_heads, splits = (4, 2, 1)[turn % 3], (2, 1, 5)[turn // 2 % 3]
    q, k, v = (x.to(device) for x in make(n, kv_heads=kv_heads, seed=turn))
    keys = row_keys(
        None if isinstance(pattern, int) else pattern, 4, kv_heads, n, device, **({"window": pattern} if isinstance(pattern, int) else {})
    )
    cached, positions = Cached(k, v), torch.tensor([70, n - 1], device=device)
    if turn % 2:
        pages_k, pages_v, table = (x.to(device) for x in paged(k.cpu(), v.cpu(), 32))
        cached = Cached(pages_k, pages_v, table)
    elif keys.span < n:
        # the last positions, where they go round
        at = torch.arange(n - keys.span, n, device=device)
        round_k, round_v = (torch.empty(2, keys.span, kv_heads, D, device=device) for _ in range(2))
        round_k[:, at % keys.span], round_v[:, at % keys.span] = k[:, at], v[:, at]
        cached, positions = Cached(round_k, round_v, wraps=True), torch.tensor([n - 1, n - 1], device=device)
    keys.prepare(positions.tolist())
    runs = keys.runs(positions)
    rows = q[torch.arange(2, device=device), positions]
    expected, expected_lse = torch_decode.gathered_row(rows, cached, runs, 0.3)
    found, lse = decode_triton.decode(rows, cached, runs, 0.3, num_splits=splits)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(lse, expected_lse, atol=1e-5, rtol=0)


STABLE = [
    *(x for x in PATTERNS.values() if isinstance(x, BlockPattern)),
    BigBird(20, 10, 0),
    LocalWindow((None, 3)),
    Strided(3, 2, block_size=(64, 128)),
]
UNSTABLE = [
    BigBird(20, 10, 2, **SMALL),
    RandomBlocks(0.3, **SMALL),
    Strided(3, 0, block_size=(128, 64)),
    DilatedBlocks(2, 4, block_size=(128, 64)),
    Axial(100, **SMALL),
    with_sparsity(0.2, **SMALL),
    RandomBlocks(0.3, **SMALL) | LocalWindow(3, **SMALL),
]


@pytest.mark.parametrize("pattern", STABLE, ids=lambda pattern: type(pattern).__name__)
def test_stable_patterns_are_those_of_every_prefix(pattern: BlockPattern) -> None:
    assert pattern.is_prefix_stable
    whole = pattern.dense_mask(400, 400, 4, is_causal=True)
    for n in (1, 63, 64, 65, 127, 128, 129, 192, 250, 321):
        assert torch.equal(pattern.dense_mask(n, n, 4, is_causal=True), whole[:, :n, :n])


@pytest.mark.parametrize("pattern", UNSTABLE, ids=str)
def test_patterns_that_depend_on_what_follows_are_refused(pattern: BlockPattern) -> None:
    whole = pattern.dense_mask(400, 400, 4, is_causal=True)
    assert any(not torch.equal(pattern.dense_mask(n, n, 4, is_causal=True), whole[:, :n, :n]) for n in (65, 100, 129, 192, 250, 321))
    _refused(pattern)


@pytest.mark.parametrize("pattern", [TopBlocks(2, **SMALL), Document((300, 100), **SMALL)], ids=str)
def test_patterns_of_one_sequence_are_refused(pattern: BlockPattern) -> None:
    _refused(pattern)


def _refused(pattern: BlockPattern) -> None:
    q, k, v = make(400)
    assert not pattern.is_prefix_stable
    with pytest.raises(ValueError, match="is_prefix_stable"):
        decode_attention(q[:, :1], k, v, torch.tensor([0, 0]), pattern)


def test_bad_input() -> None:
    q, k, v = make(50, kv_heads=2)
    at = torch.tensor([3, 4])
    one = q[:, :1]

    def refused(match: str, error: type[Exception] = ValueError, *args: Any, **options: Any) -> None:
        with pytest.raises(error, match=match):
            decode_attention(*(args or (one, k, v, at)), **options)

    refused("one query per request", ValueError, q, k, v, at)
    refused(r"sinks has shape \(3,\)", sinks=torch.zeros(3))
    refused("positions is list", TypeError, one, k, v, [3, 4])
    refused("one position per request", ValueError, one, k, v, at[:1])
    refused("positions reach from 3 to 50", ValueError, one, k, v, torch.tensor([3, 50]))
    refused("give page_table", ValueError, one, k[:1], v[:1], at)
    refused("they must be equal", ValueError, one, k, v[:, 1:], at)
    refused("not a multiple|multiple of", ValueError, one[:, :, :3], k, v, at)
    refused("a cache is not copied", ValueError, one, k.mT.contiguous().mT, v, at)
    refused("page_table is torch.int64", TypeError, one, k, v, at, page_table=torch.zeros(2, 1, dtype=torch.int64))
    refused("page_table has shape", ValueError, one, k, v, at, page_table=torch.zeros(1, 1, dtype=torch.int32))
    refused("give one of them", pattern=LocalWindow(3), window=3)
    refused("expected a DilatedPattern", TypeError, pattern="dense")
    refused("expected 'auto'", backend="flash9")
    refused("rows read up to 60 positions back", max_length=60)
    refused("scale is -1", scale=-1)
    with pytest.raises(BackendUnavailable, match="runs on cuda, not on cpu"):
        decode_attention(one, k, v, at, backend="triton")


def test_the_choice_of_a_decoder_is_explained() -> None:
    hopper = Hardware(device_type="cuda", capability=(9, 0), packages=frozenset({"triton", "flash-attn-3"}), name="H200")
    dense, sparse = (explain_decode(hardware=hopper, dense=dense) for dense in (True, False))
    assert (dense.chosen, sparse.chosen) == ("triton", "triton")
    assert "✗ flash3" in str(sparse) and "keeps only some" in str(sparse)
    ampere = Hardware(device_type="cuda", capability=(8, 0), packages=frozenset({"triton", "flash-attn-3"}), name="A100")
    assert explain_decode(hardware=ampere, dense=True).chosen == "triton"
    assert explain_decode(hardware=hopper, dense=True, dtype=torch.float64).chosen == "torch"
    assert explain_decode(device="cpu").chosen == "torch"
    assert explain_decode(device="cpu", backend="flash3").chosen is None


@pytest.mark.parametrize("layout", ["stretch", "round", "pages"])
@pytest.mark.parametrize("xpos", [None, 512.0])
def test_rotating_and_appending_in_one_kernel(layout: str, xpos: float | None) -> None:
    decode_triton = pytest.importorskip("dilated_attention.engine.decode.triton")
    from dilated_attention.modules import MultiheadDilatedAttention
    from dilated_attention.modules.rotary import rotate

    device = "cuda" if torch.cuda.is_available() else "cpu"
    layer = MultiheadDilatedAttention(4 * 12, 4, [8], [1], num_kv_heads=2, rotary=True, xpos_scale_base=xpos)
    positions = torch.tensor([3, 29, 11], device=device)
    q, k, v = (torch.randn(3, 1, heads, 12, device=device) for heads in (4, 2, 2))
    pairs = layer.rotation(positions, None, 64, torch.float32)
    tables = tuple((cos[:, None], sin[:, None]) for cos, sin in pairs)

    def cache() -> Cached:
        table = torch.randperm(24, generator=torch.Generator().manual_seed(0)).view(3, 8).to(device, torch.int32)
        shape = (24, 4, 2, 12) if layout == "pages" else (3, 32 if layout == "stretch" else 14, 2, 12)
        zeros = [torch.zeros(shape, device=device) for _ in range(2)]
        return Cached(
            zeros[0], zeros[1], table if layout == "pages" else None, wraps=layout == "round", fixed=5 if layout == "round" else 0
        )

    for turned in (tables, None):
        expected, found = cache(), cache()
        turned_q, turned_k = (q, k) if turned is None else (rotate(q, turned[0]), rotate(k, turned[1]))
        expected.write(positions[:, None], turned_k, v)
        out = decode_triton.rotate_and_append(q[:, 0], k[:, 0], v[:, 0], positions, found, turned)
        torch.testing.assert_close(out, turned_q[:, 0], atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(found.k, expected.k, atol=1e-6, rtol=1e-6)
        assert torch.equal(found.v, expected.v) and found.v.any()
