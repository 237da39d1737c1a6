"""One row a step over a cache equals that row of the forward, for every pattern, layout and decoder."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from dilated_attention import BackendUnavailable
from dilated_attention.backends import Hardware
from dilated_attention.engine.decode.dispatch import torch_decode
from dilated_attention.engine.decode.keys import Cached, RowKeys, row_keys
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
from dilated_attention.testing import Case, Inputs, plain_attention
from dilated_attention.testing.cases import random_blocks, random_branches
from tests.helpers.forms import Looks

D = 8
LAYOUTS = ("stretch", "pages", "round")
SMALL = {"block_size": 64}
PATTERNS: dict[str, DilatedPattern | BlockPattern | int | None] = {
    "dense": None,
    "window": 40,
    "window of one": 0,
    "longnet": DilatedPattern((32, 64, 128), (1, 2, 4)),
    # of every kind of offsets
    **{f"random {seed}": replace(random_branches(random.Random(seed), 4, 300, 100), tail="mask") for seed in range(10)},
    "local": LocalWindow(30, **SMALL),
    "causal": Causal(**SMALL),
    "global": GlobalLocal(30, 20, **SMALL),
    "strided": Strided(2, 0, **SMALL),
    "dilated blocks": DilatedBlocks(2, 3, block_size=(64, 128)),
    "axial": Axial(128, **SMALL),
    "union": Strided(3, **SMALL) | LocalWindow(9, **SMALL),
    "function": MaskFunction(lambda b, h, q, k: (q * k + h) % 3 == 0, per_head=True, **SMALL),
    "per head": PerHead((LocalWindow(9, **SMALL), Strided(2, **SMALL), GlobalLocal(3, 20, **SMALL), Causal(**SMALL))),
    # of which a later row keeps fewer blocks
    "wide axial": Axial(256, **SMALL),
    "two windows": LocalWindow(50, **SMALL) & Causal(**SMALL) & LocalWindow(20, **SMALL),
}


def forward(pattern: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None = None) -> Any:
    """(out, lse) of the whole sequence, by the definition."""
    is_pattern, (batch, n, heads, _) = isinstance(pattern, DilatedPattern | BlockPattern), q.shape
    sizes: dict[str, Any] = {"batch": batch, "num_queries": n, "num_keys": n, "heads": heads, "kv_heads": k.shape[2], "head_dim": D}
    window = None if is_pattern else (pattern, 0)
    case = Case(pattern=pattern if is_pattern else DilatedPattern((2**62,), (1,)), is_causal=True, window=window, **sizes)
    return plain_attention(case, Inputs(q, k, v, q, q, None, None, sinks), q, k, v)


def choice(pattern: Any) -> dict[str, Any]:
    return {"window": pattern} if isinstance(pattern, int) else {"pattern": pattern}


def keys_of(pattern: Any, kv_heads: int, n: int, device: str = "cpu") -> RowKeys:
    options = {"pattern": None} | choice(pattern)
    return row_keys(options.pop("pattern"), 4, kv_heads, n, device, **options)


def make(n: int, heads: int = 4, kv_heads: int = 4, batch: int = 2, seed: int = 0) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(batch, n, h, D, generator=generator) for h in (heads, kv_heads, kv_heads))


def laid_out(layout: str, k: torch.Tensor, v: torch.Tensor, positions: list[int], span: int, page: int = 16) -> tuple[Any, ...]:
    """(keys, values, table or None): one stretch · pages in no order · as many slots as are read, taken again. Elsewhere is NaN."""
    B, n = k.shape[:2]
    order = torch.randperm(B * -(-n // page) + 3, generator=torch.Generator().manual_seed(n))[:-3].view(B, -1)
    stores = []
    for x in (k, v):
        slots = span if layout == "round" else page * order.shape[1]
        store = x.new_full((B, slots, *x.shape[2:]), torch.nan)
        for b, p in enumerate(positions):
            at = torch.arange(max(0, p + 1 - slots), p + 1)
            store[b, at % slots] = x[b, at]
        if layout == "pages":
            pages = x.new_full((order.numel() + 3, page, *x.shape[2:]), torch.nan)
            pages[order] = store.unflatten(1, (-1, page))
            store = pages
        stores.append(store if layout != "stretch" else store[:, :n])
    return *stores, order.to(torch.int32) if layout == "pages" else None


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", PATTERNS)
def test_every_step_is_the_row_of_the_forward(name: str, layout: str) -> None:
    """Lengths that cross segments and blocks, requests at different positions."""
    pattern, n, rows = PATTERNS[name], 300, torch.arange(2)
    kv_heads = (4, 2, 1)[(list(PATTERNS).index(name) + LAYOUTS.index(layout)) % 3]
    q, k, v = make(n, kv_heads=kv_heads)
    sinks = None if kv_heads == 4 else torch.tensor([0.3, 5.0, -2.0, 1.0])
    out, lse = forward(pattern, q, k, v, sinks)
    span = keys_of(pattern, kv_heads, n).span
    for t in [*range(0, 140, 23), 63, 64, 96, 127, 128, 191, 192, 256, n - 1]:
        at = [t, (t * 7 + 13) % n]
        cache_k, cache_v, table = laid_out(layout, k, v, at, span)
        options = {"page_table": table, "max_length": n, "sinks": sinks, "return_lse": True} | choice(pattern)
        found, found_lse = decode_attention(q[rows, at][:, None], cache_k, cache_v, torch.tensor(at), **options)
        torch.testing.assert_close(found[:, 0], out[rows, at], atol=1e-5, rtol=0)
        torch.testing.assert_close(found_lse[..., 0], lse[rows, :, at], atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", PATTERNS)
def test_a_captured_row_serves_all_lengths(name: str) -> None:
    keys, at = keys_of(PATTERNS[name], 2, 300), torch.tensor([0, 63, 128, 199, 299])
    keys.prepare(at.tolist())
    runs = keys.runs(at)
    wanted, used = runs.keys()
    seen: list[Any] = []
    with Looks(lambda function, _: seen.append(function)):
        positions, inside = runs.keys(is_captured=True)
    # a graph cannot capture that a number of the device is read
    assert torch.ops.aten._local_scalar_dense.default not in seen != []
    assert positions.shape[-1] == runs.max_keys >= wanted.shape[-1] and not inside[..., wanted.shape[-1] :].any()
    assert torch.equal(positions[..., : wanted.shape[-1]], wanted) and torch.equal(inside[..., : wanted.shape[-1]], used)
    # nothing is left of the rows before
    for rows in (at.roll(1), at):
        keys.prepare(rows.tolist())
    found = keys.runs(at).keys()
    assert torch.equal(found[0], wanted) and torch.equal(found[1], used)


@pytest.mark.parametrize("name", ["window", "longnet", "global"])
def test_compiled_code_may_decode(name: str) -> None:
    q, k, v = make(100)
    at = torch.tensor([7, 99])

    def row(q: torch.Tensor) -> torch.Tensor:
        return 2 * decode_attention(q, k, v, at, **choice(PATTERNS[name]))

    assert torch.equal(torch.compile(row, backend="eager")(q[:, :1]), row(q[:, :1]))


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
    kv_heads, splits, layout, at = (4, 2, 1)[turn % 3], (2, 1, 20)[turn // 2 % 3], LAYOUTS[2 - turn % 2], [70, n - 1]
    q, k, v = make(n, kv_heads=kv_heads, seed=turn)
    keys = keys_of(pattern, kv_heads, n, device)
    cache_k, cache_v, table = (x if x is None else x.to(device) for x in laid_out(layout, k, v, at, keys.span, 32))
    # values with strides of their own
    cache_v = torch.nn.functional.pad(cache_v, (0, 8))[..., :D]
    keys.prepare(at)
    cached, runs = Cached(cache_k, cache_v, table, wraps=layout == "round"), keys.runs(torch.tensor(at, device=device))
    rows = q[torch.arange(2), at].to(device)
    expected = torch_decode(rows, cached, runs, 0.3)
    torch.testing.assert_close(decode_triton.decode(rows, cached, runs, 0.3, num_splits=splits), expected, atol=1e-5, rtol=0)


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


PREFIXES = (1, 63, 64, 65, 100, 127, 128, 129, 192, 250, 321)


@pytest.mark.parametrize(
    "pattern", [*STABLE, *UNSTABLE, TopBlocks(2, **SMALL), Document((300, 100), **SMALL)], ids=lambda x: type(x).__name__
)
def test_patterns_are_those_of_every_prefix_or_refused(pattern: BlockPattern) -> None:
    assert pattern.is_prefix_stable == (pattern in STABLE)
    if pattern in [*STABLE, *UNSTABLE]:
        whole = pattern.dense_mask(400, 400, 4, is_causal=True)
        alike = [torch.equal(pattern.dense_mask(n, n, 4, is_causal=True), whole[:, :n, :n]) for n in PREFIXES]
        assert all(alike) == (pattern in STABLE)
    if pattern not in STABLE:
        q, k, v = make(400)
        with pytest.raises(ValueError, match="is_prefix_stable"):
            decode_attention(q[:, :1], k, v, torch.tensor([0, 0]), pattern)


@pytest.mark.parametrize(("claim", "lengths"), [("is_prefix_stable", (1, 64, 65, 150, 450)), ("shares_lists", (577, 600, 639))])
def test_drawn_patterns_keep_what_they_claim(claim: str, lengths: tuple[int, ...]) -> None:
    """Prefixes have the causal pattern of the whole; lengths of equally many blocks have one list, up to where each ends."""
    drawn = [random_blocks(random.Random(seed), 2, 640, (64, 64), any_length=True, depth=1) for seed in range(60)]
    claims = [pattern for pattern in drawn if getattr(pattern, claim)]
    assert len({type(pattern) for pattern in claims}) > 4
    for pattern, is_causal in ((x, y) for x in claims for y in ((True,) if claim == "is_prefix_stable" else (False, True))):
        whole = pattern.dense_mask(640, 640, 2, is_causal=is_causal)
        assert all(torch.equal(pattern.dense_mask(n, n, 2, is_causal=is_causal), whole[:, :n, :n]) for n in lengths), pattern


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
    refused(
        "positions reach from 3 to 50; expected 0 to max_length − 1 = 49: give as max_length", ValueError, one, k, v, torch.tensor([3, 50])
    )
    refused("give page_table", ValueError, one, k[:1], v[:1], at)
    refused("they must be equal", ValueError, one, k, v[:, 1:], at)
    refused("not a multiple|multiple of", ValueError, one[:, :, :3], k, v, at)
    refused("a cache is not copied", ValueError, one, k.mT.contiguous().mT, v, at)
    refused("page_table is torch.int64", TypeError, one, k, v, at, page_table=torch.zeros(2, 1, dtype=torch.int64))
    refused("page_table has shape", ValueError, one, k, v, at, page_table=torch.zeros(1, 1, dtype=torch.int32))
    pages, table = k.reshape(10, 10, *k.shape[2:]), torch.tensor([[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]], dtype=torch.int32)
    far = torch.tensor([44, 44])
    for wrong in (-1, 10):
        table[1, 3] = wrong
        refused("page_table has other numbers than 0 to 9, the pages of k", ValueError, one, pages, pages, far, page_table=table)
    # of a window's row no other page is read
    assert decode_attention(one, pages, pages, far, page_table=table, window=3).isfinite().all()
    refused("give one of them", pattern=LocalWindow(3), window=3)
    refused("expected a DilatedPattern", TypeError, pattern="dense")
    refused("expected 'auto'", backend="flash9")
    refused("rows read up to 60 positions back", max_length=60)
    refused("scale is -1", scale=-1)
    with pytest.raises(BackendUnavailable, match="runs on cuda, not on cpu"):
        decode_attention(one, k, v, at, backend="triton")


@pytest.mark.parametrize("pattern", [None, DilatedPattern((4, 8), (1, 2)), LocalWindow(3), GlobalLocal(3, 2)])
def test_no_request_has_no_rows(pattern: Any) -> None:
    q, k, v = (x[:0] for x in make(50, kv_heads=2))
    out, lse = decode_attention(q[:, :1], k, v, torch.zeros(0, dtype=torch.int64), pattern, return_lse=True)
    assert out.shape == q[:, :1].shape and lse.shape == (0, q.shape[2], 1) and lse.dtype == q.dtype


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
    from dilated_attention.modules.rotary import rotary_tables, rotate

    device = "cuda" if torch.cuda.is_available() else "cpu"
    positions = torch.tensor([3, 29, 11], device=device)
    q, k, v = (torch.randn(3, 1, heads, 12, device=device) for heads in (4, 2, 3))
    v = v[:, :, :2]
    pairs = rotary_tables(positions, None, 64, 12, 10000.0, xpos, torch.float32)
    tables = tuple((cos[:, None], sin[:, None]) for cos, sin in pairs)

    def cache() -> Cached:
        table = torch.randperm(24, generator=torch.Generator().manual_seed(0)).view(3, 8).to(device, torch.int32)
        shape = (24, 4, 2, 12) if layout == "pages" else (3, 32 if layout == "stretch" else 14, 2, 12)
        # values with strides of their own
        zeros, wider = torch.zeros(shape, device=device), torch.zeros(*shape[:3], 16, device=device)
        return Cached(
            zeros, wider[..., :12], table if layout == "pages" else None, wraps=layout == "round", fixed=5 if layout == "round" else 0
        )

    for turned in (tables, None):
        expected, found = cache(), cache()
        turned_q, turned_k = (q, k) if turned is None else (rotate(q, turned[0]), rotate(k, turned[1]))
        expected.write(positions[:, None], turned_k, v)
        out = decode_triton.rotate_and_append(q[:, 0], k[:, 0], v[:, 0], positions, found, turned)
        torch.testing.assert_close(out, turned_q[:, 0], atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(found.k, expected.k, atol=1e-6, rtol=1e-6)
        assert torch.equal(found.v, expected.v) and found.v.any()
