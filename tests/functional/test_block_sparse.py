"""Block-sparse attention against softmax under the pattern's dense mask in float64: every pattern, every option, all gradients."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

import dilated_attention.pattern as patterns
from dilated_attention import (
    BlockSparseAttention,
    DilatedPattern,
    attention,
    attention_map,
    attention_received,
    block_sparse_attention,
    block_sparse_dilated_attention,
    decode_attention,
)
from dilated_attention.backends import Dropout
from dilated_attention.backends.dropout import keep_mask
from dilated_attention.functional import ring_block_sparse_attention
from dilated_attention.pattern import (
    Axial,
    BigBird,
    BlockPattern,
    BlockTensor,
    Causal,
    DilatedBlocks,
    Document,
    GlobalLocal,
    LocalWindow,
    MaskFunction,
    PerHead,
    RandomBlocks,
    Sparsity,
    Strided,
    TopBlocks,
    from_block_mask,
    to_block_mask,
)

BACKENDS = ("math", "sdpa_cpu")
TOLERANCE = 1e-10
RESULTS = ("out", "lse", "dq", "dk", "dv")
BlockSize = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call. ``bounds``: of packed documents."""

    pattern: BlockPattern
    batch: int = 1
    num_queries: int = 200
    num_keys: int = 200
    heads: int = 2
    kv_heads: int = 2
    head_dim: int = 3
    is_causal: bool = False
    query_offset: int = 0
    bounds: tuple[int, ...] | None = None
    padding: bool = False
    dropout_p: float = 0.0
    scale: float | None = None
    branches: DilatedPattern | None = None
    seed: int = 0


@dataclass(frozen=True)
class Inputs:
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    dlse: torch.Tensor
    key_padding_mask: torch.Tensor | None
    cu_seqlens: torch.Tensor | None


def inputs(case: Case, dtype: torch.dtype = torch.float64, device: torch.device | str = "cpu") -> Inputs:
    """Equal for equal seeds on every device, up to the rounding to ``dtype``."""
    generator = torch.Generator().manual_seed(case.seed)

    def made(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).to(device)

    q, dout = (made(case.batch, case.num_queries, case.heads, case.head_dim) for _ in range(2))
    k, v = (made(case.batch, case.num_keys, case.kv_heads, case.head_dim) for _ in range(2))
    dlse = made(case.batch, case.heads, case.num_queries).to(torch.float64 if dtype is torch.float64 else torch.float32)
    padding = torch.rand(case.batch, case.num_keys, generator=generator) < 0.4 if case.padding else None
    if padding is not None:
        padding[0, : case.num_keys // 2] = True
        padding = padding.to(device)
    bounds = None if case.bounds is None else torch.tensor(case.bounds, dtype=torch.int32, device=device)
    return Inputs(q, k, v, dout, dlse, padding, bounds)


def multiplicities(case: Case, x: Inputs) -> torch.Tensor:
    """m (B, H, Nq, Nk) by the patterns' own definitions, document by document."""
    m = torch.zeros(case.batch, case.heads, case.num_queries, case.num_keys, dtype=torch.int64)
    for start, end in itertools.pairwise(case.bounds or (0, case.num_keys)):
        whole = case.bounds is None
        rows = slice(0, case.num_queries) if whole else slice(start, end)
        sizes = (rows.stop - rows.start, end - start, case.heads)
        options = {"is_causal": case.is_causal, "query_offset": case.query_offset}
        for b in range(case.batch):
            if end > start:
                m[b, :, rows, start:end] += block_pattern(case, x, b, rows, slice(start, end)).dense_mask(*sizes, **options)
            if case.branches is not None:
                m[b, :, rows, start:end] += case.branches.dense_mask(*sizes, **options)
    if x.key_padding_mask is not None:
        m = m * ~x.key_padding_mask[:, None, None, :].cpu()
    return m


def block_pattern(case: Case, x: Inputs, b: int, rows: slice, keys: slice) -> BlockPattern:
    """The case's pattern, or what a content-chosen one chooses for one batch entry and document."""
    if not isinstance(case.pattern, TopBlocks):
        return case.pattern
    q, k = x.q[b : b + 1, rows], x.k[b : b + 1, keys]
    padding = None if x.key_padding_mask is None else x.key_padding_mask[b : b + 1, keys]
    return case.pattern.choose(q, k, is_causal=case.is_causal, scale=case.scale, key_padding_mask=padding, query_offset=case.query_offset)


def plain(case: Case, x: Inputs, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse): every score written out; differentiable."""
    m = multiplicities(case, x).to(q.device)
    k, v = (y.repeat_interleave(case.heads // case.kv_heads, 2) for y in (k, v))
    s = torch.einsum("bihd,bjhd->bhij", q, k) * (case.head_dim**-0.5 if case.scale is None else case.scale)
    empty = (m == 0).all(-1)
    s = torch.where(m > 0, s + m.clamp(min=1).double().log().to(s.dtype), -torch.inf)
    s = torch.where(empty[..., None], 0.0, s)
    p = s.softmax(-1).masked_fill(empty[..., None], 0.0)
    if case.dropout_p:
        p = p * kept_weights(case).to(q.device) / (1 - case.dropout_p)
    return torch.einsum("bhij,bjhd->bihd", p, v), torch.where(empty, -torch.inf, s.logsumexp(-1))


def kept_weights(case: Case) -> torch.Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(case.seed)
        seed = int(torch.randint(2**62, (), dtype=torch.int64))
    queries = torch.arange(case.query_offset, case.query_offset + case.num_queries).expand(case.batch, -1)
    keys = torch.arange(case.num_keys).expand(case.batch, -1)
    return keep_mask(Dropout(case.dropout_p, seed, torch.arange(case.batch), torch.arange(case.heads), queries, keys), slice(None))


def call(case: Case, x: Inputs, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(case.seed)
    options = {
        "is_causal": case.is_causal,
        "scale": case.scale,
        "cu_seqlens": x.cu_seqlens,
        "key_padding_mask": x.key_padding_mask,
        "dropout_p": case.dropout_p,
        "query_offset": case.query_offset,
        "return_lse": True,
    } | options
    if case.branches is None:
        return block_sparse_attention(q, k, v, case.pattern, **options)
    return block_sparse_dilated_attention(q, k, v, pattern=case.pattern, **of_branches(case.branches), **options)


def of_branches(branches: DilatedPattern) -> dict[str, Any]:
    """The arguments of a function that say which branches."""
    return {field.name: getattr(branches, field.name) for field in fields(branches)}


def results(
    function: Callable[..., Any], case: Case, x: Inputs, dtype: torch.dtype | None = None, **options: Any
) -> dict[str, torch.Tensor]:
    leaves = [(y if dtype is None else y.to(dtype)).detach().requires_grad_() for y in (x.q, x.k, x.v)]
    out, lse = function(case, x, *leaves, **options)
    grads = torch.autograd.grad((out, lse), leaves, (x.dout.to(out.dtype), x.dlse.to(lse.dtype)))
    return dict(zip(RESULTS, (y.detach() for y in (out, lse, *grads)), strict=True))


def errors(mine: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]) -> dict[str, float]:
    found = {}
    for name in RESULTS:
        a, b = mine[name].double(), truth[name].double()
        assert a.shape == b.shape, name
        difference = torch.where(a == b, 0.0, (a - b).abs())
        found[name] = float(torch.where(difference.isnan(), torch.inf, difference).max()) if difference.numel() else 0.0
    return found


def check(case: Case, backend: str) -> None:
    x = inputs(case)
    for name, error in errors(results(call, case, x, backend=backend), results(plain, case, x)).items():
        assert error <= TOLERANCE, f"E({name}) = {error:.3g} on {backend}: {case}"


def by_table(batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return (query * 7 + key * 3 + head) % 5 < 2


def table(heads: int, rows: int, columns: int) -> torch.Tensor:
    return torch.rand(heads, rows, columns, generator=torch.Generator().manual_seed(rows)) < 0.5


# every pattern, of N positions with blocks of a size
PATTERNS: dict[str, Callable[[int, BlockSize], BlockPattern]] = {
    "window": lambda n, b: LocalWindow((70, 9), block_size=b),
    "half-open window": lambda n, b: LocalWindow((None, 0), block_size=b),
    "causal": lambda n, b: Causal(block_size=b),
    "documents": lambda n, b: Document((n // 3, 0, n - n // 3), block_size=b),
    "global": lambda n, b: GlobalLocal(20, 5, block_size=b),
    "BigBird": lambda n, b: BigBird(30, 3, 1, seed=2, block_size=b),
    "strided": lambda n, b: Strided(3, block_size=b),
    "dilated blocks": lambda n, b: DilatedBlocks(2, 3, block_size=b),
    "axial": lambda n, b: Axial(130, block_size=b),
    "random": lambda n, b: RandomBlocks(0.4, seed=1, block_size=b),
    "sparsity": lambda n, b: Sparsity(0.3, "big_bird", block_size=b),
    "table": lambda n, b: BlockTensor(table(1, -(-n // b[0]), -(-n // b[1])), block_size=b),
    "table of heads": lambda n, b: BlockTensor(table(2, -(-n // b[0]), -(-n // b[1])), block_size=b),
    "function": lambda n, b: MaskFunction(by_table, block_size=b),
    "function of heads": lambda n, b: MaskFunction(by_table, per_head=True, block_size=b),
    "top blocks": lambda n, b: TopBlocks(2, block_size=b),
    "top density": lambda n, b: TopBlocks(density=0.3, always=LocalWindow(3, block_size=b), block_size=b),
    "top mass": lambda n, b: TopBlocks(mass=0.7, within=LocalWindow(150, block_size=b), block_size=b),
    "either": lambda n, b: LocalWindow(20, block_size=b) | RandomBlocks(0.2, block_size=b),
    "both": lambda n, b: LocalWindow(150, block_size=b) & MaskFunction(by_table, block_size=b),
    "by head": lambda n, b: PerHead((LocalWindow(20, block_size=b), Strided(2, block_size=b))),
}


def kinds_in(pattern: BlockPattern) -> set[type]:
    return {type(pattern)}.union(*(kinds_in(part) for part in getattr(pattern, "parts", ())))


def test_every_pattern_of_the_package_is_here() -> None:
    exported = {getattr(patterns, name) for name in patterns.__all__}
    kinds = {kind for kind in exported if isinstance(kind, type) and issubclass(kind, BlockPattern) and not inspect.isabstract(kind)}
    # what a choice made, which is tested with it
    kinds -= {patterns.ChosenBlocks}
    assert kinds <= set().union(*(kinds_in(make(200, (64, 64))) for make in PATTERNS.values()))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("block", [(64, 64), (128, 64)], ids=str)
@pytest.mark.parametrize("name", PATTERNS)
def test_every_pattern_equals_softmax_under_its_dense_mask(name: str, block: BlockSize, is_causal: bool) -> None:
    length = 230
    case = Case(pattern=PATTERNS[name](length, block), num_queries=length, num_keys=length, is_causal=is_causal, kv_heads=1)
    check(case, BACKENDS[is_causal])


@pytest.mark.parametrize("name", PATTERNS)
def test_every_pattern_beside_dilated_branches_is_one_softmax(name: str) -> None:
    branches = DilatedPattern((48, 200), (1, 3))
    case = Case(pattern=PATTERNS[name](150, (64, 128)), num_queries=150, num_keys=150, is_causal=True, branches=branches)
    check(case, "math")


# --- anything with anything ------------------------------------------------------------------------------------------------------


@st.composite
def some_patterns(draw: st.DrawFn, heads: int, length: int, block: BlockSize, *, any_length: bool, depth: int = 2) -> BlockPattern:
    """``any_length``: a pattern that exists at every length."""
    if depth and draw(st.integers(0, 2)) == 0:
        parts = draw(st.lists(some_patterns(heads, length, block, any_length=any_length, depth=depth - 1), min_size=2, max_size=3))
        how = draw(st.sampled_from(["or", "and", "heads"]))
        if how == "heads":
            return PerHead(tuple(parts[h % len(parts)] for h in range(heads)))
        return parts[0] | parts[1] if how == "or" else parts[0] & parts[1]
    small = st.integers(0, 150)
    leaves = [
        st.builds(LocalWindow, st.tuples(st.none() | small, st.none() | small), block_size=st.just(block)),
        st.builds(Causal, block_size=st.just(block)),
        st.builds(GlobalLocal, small, small, block_size=st.just(block)),
        st.builds(BigBird, small, st.integers(0, 3), st.integers(0, 2), seed=st.integers(0, 9), block_size=st.just(block)),
        st.builds(Strided, st.integers(1, 4), st.integers(0, 2), block_size=st.just(block)),
        st.builds(DilatedBlocks, st.integers(1, 3), st.integers(1, 3), block_size=st.just(block)),
        st.builds(Axial, st.integers(1, 300), block_size=st.just(block)),
        st.builds(RandomBlocks, st.sampled_from([0.0, 0.2, 0.5, 1.0]), seed=st.integers(0, 9), block_size=st.just(block)),
        st.builds(Sparsity, st.sampled_from([0.1, 0.6]), st.sampled_from(["random", "local", "global_local"]), block_size=st.just(block)),
        st.builds(MaskFunction, st.just(by_table), per_head=st.booleans(), block_size=st.just(block)),
    ]
    if not any_length:
        cut = draw(st.integers(0, length))
        leaves.append(st.just(Document((cut, length - cut), block_size=block)))
        leaves.append(st.just(BlockTensor(table(heads, -(-length // block[0]), -(-length // block[1])), block_size=block)))
    return draw(st.one_of(leaves))


@st.composite
def some_branches(draw: st.DrawFn, heads: int) -> DilatedPattern:
    lengths = tuple(draw(st.lists(st.integers(4, 200) | st.just(2**40), min_size=1, max_size=3)))
    rates = tuple(draw(st.integers(1, 4)) for _ in lengths)
    if heads % len(lengths) == 0 and draw(st.integers(0, 3)) == 0:
        return DilatedPattern(lengths, rates, branch_heads="split")
    return DilatedPattern(lengths, rates, draw(st.sampled_from(["cyclic", "blocked", "zero"])))


@st.composite
def some_cases(draw: st.DrawFn) -> Case:
    kv_heads = draw(st.integers(1, 2))
    heads = kv_heads * draw(st.integers(1, 2))
    length = draw(st.integers(1, 300))
    block = draw(st.sampled_from(list(itertools.product((64, 128), repeat=2))))
    bounds, query_offset, num_queries = None, 0, length
    how = draw(st.sampled_from(["whole", "whole", "documents", "offset"]))
    if how == "documents":
        bounds = (0, *sorted(draw(st.lists(st.integers(0, length), max_size=3))), length)
    elif how == "offset":
        query_offset = draw(st.integers(0, length - 1))
        num_queries = draw(st.integers(1, length - query_offset))
    pattern = draw(some_patterns(heads, length, block, any_length=bounds is not None))
    if draw(st.integers(0, 3)) == 0:
        static = draw(st.none() | some_patterns(heads, length, block, any_length=bounds is not None, depth=1))
        amount = draw(st.sampled_from([{"blocks": 1}, {"blocks": 2}, {"density": 0.4}, {"mass": 0.6}]))
        pattern = TopBlocks(**amount, **{draw(st.sampled_from(["always", "within"])): static}, block_size=block)
    branches = draw(some_branches(heads)) if draw(st.integers(0, 3)) == 0 else None
    return Case(
        pattern=pattern,
        batch=1 if bounds else draw(st.integers(1, 2)),
        num_queries=num_queries,
        num_keys=length,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=draw(st.integers(1, 4)),
        is_causal=draw(st.booleans()),
        query_offset=query_offset,
        bounds=bounds,
        padding=draw(st.booleans()),
        dropout_p=draw(st.sampled_from([0.0, 0.0, 0.5])),
        scale=draw(st.sampled_from([None, 0.3])),
        branches=branches,
        seed=draw(st.integers(0, 2**16)),
    )


@pytest.mark.slow
@given(case=some_cases(), backend=st.sampled_from(BACKENDS))
@settings(max_examples=120)
def test_any_composition_with_any_option_is_one_softmax(case: Case, backend: str) -> None:
    check(case, "math" if case.dropout_p else backend)


# --- rows without keys ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("how", ["no block", "no pair of a block", "padding", "nothing at all"])
def test_rows_without_a_key_are_zero_with_lse_minus_infinity_and_no_gradient(how: str, backend: str) -> None:
    length = 200
    kept = torch.ones(4, 4, dtype=torch.bool)
    kept[1] = False
    pattern = {
        "no block": BlockTensor(kept, block_size=64),
        "no pair of a block": MaskFunction(lambda b, h, i, j: i % 3 > 0, block_size=64),
        "padding": LocalWindow(0, block_size=64),
        "nothing at all": RandomBlocks(0.0, block_size=64),
    }[how]
    case = Case(pattern=pattern, num_queries=length, num_keys=length, padding=how == "padding")
    x = inputs(case)
    found = results(call, case, x, backend=backend)
    empty = (multiplicities(case, x) == 0).all(-1).transpose(1, 2)
    assert empty.any()
    assert bool((found["out"][empty] == 0).all()) and bool((found["dq"][empty] == 0).all())
    assert torch.equal(found["lse"].transpose(1, 2) == -math.inf, empty)
    check(case, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_empty_sequence_and_an_empty_batch(backend: str) -> None:
    for batch, queries, keys in ((1, 0, 0), (0, 70, 70), (2, 0, 5)):
        case = Case(pattern=LocalWindow(3), batch=batch, num_queries=queries, num_keys=keys)
        for function in (case, replace(case, branches=DilatedPattern((4,), (1,)))):
            found = results(call, function, inputs(case), backend=backend)
            assert found["out"].shape == (batch, queries, 2, 3) and found["lse"].shape == (batch, 2, queries)
            assert not found["dk"].any() and not found["dv"].any()


# --- what must not change a result -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["window", "random", "function", "global"])
def test_keys_that_a_row_does_not_keep_may_be_anything(name: str, value: float, backend: str) -> None:
    case = Case(pattern=PATTERNS[name](200, (64, 64)), is_causal=True)
    x = inputs(case)
    at = 77
    reached = (multiplicities(case, x)[0, :, :, at] > 0).T
    assert reached.any() and not reached.all()
    before = call(case, x, x.q, x.k, x.v, backend=backend)
    for which in ("k", "v"):
        changed = getattr(x, which).clone()
        changed[:, at] = value
        out, lse = call(case, x, x.q, *(changed if name == which else getattr(x, name) for name in ("k", "v")), backend=backend)
        assert torch.equal(out[0][~reached], before[0][0][~reached])
        assert torch.equal(lse[0].T[~reached], before[1][0].T[~reached])
        assert not out[0][reached].isfinite().any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_padded_keys_may_be_anything(backend: str) -> None:
    case = Case(pattern=BigBird(20, 3, 1, block_size=64), padding=True, batch=2)
    x = inputs(case)
    assert x.key_padding_mask is not None
    before = results(call, case, x, backend=backend)
    k, v = (torch.where(x.key_padding_mask[..., None, None], math.nan, y) for y in (x.k, x.v))
    after = results(call, case, replace(x, k=k, v=v), backend=backend)
    for name in RESULTS:
        assert torch.equal(after[name], before[name]), name


@pytest.mark.parametrize("pattern", [LocalWindow(50, block_size=64), TopBlocks(2, block_size=64)], ids=repr)
def test_what_comes_later_changes_nothing_before(pattern: BlockPattern) -> None:
    case = Case(pattern=pattern, is_causal=True)
    x = inputs(case)
    cut = 128
    before = call(case, x, x.q, x.k, x.v)
    q, k, v = (torch.cat([y[:, :cut], torch.full_like(y[:, cut:], 3.0)], 1) for y in (x.q, x.k, x.v))
    after = call(case, x, q, k, v)
    assert torch.equal(after[0][:, :cut], before[0][:, :cut]) and torch.equal(after[1][..., :cut], before[1][..., :cut])


@pytest.mark.parametrize("pattern", [RandomBlocks(0.4, block_size=64), TopBlocks(2, block_size=64)], ids=repr)
def test_batch_entries_do_not_meet(pattern: BlockPattern) -> None:
    case = Case(pattern=pattern, batch=3, padding=True)
    x = inputs(case)
    order = torch.tensor([2, 0, 1])
    assert x.key_padding_mask is not None
    shuffled = Inputs(*(y[order] for y in (x.q, x.k, x.v, x.dout, x.dlse, x.key_padding_mask)), None)
    before, after = results(call, case, x), results(call, case, shuffled)
    for name in RESULTS:
        torch.testing.assert_close(after[name], before[name][order], rtol=0, atol=1e-13)


@pytest.mark.parametrize("backend", BACKENDS)
def test_each_document_is_attended_as_if_alone(backend: str) -> None:
    bounds = (0, 70, 70, 135, 200)
    case = Case(pattern=BigBird(9, 2, 1, block_size=64), bounds=bounds, is_causal=True)
    x = inputs(case)
    packed = results(call, case, x, backend=backend)
    for start, end in itertools.pairwise(bounds):
        part = replace(case, bounds=None, num_queries=end - start, num_keys=end - start)
        rows = slice(start, end)
        alone = Inputs(*(y[:, rows] for y in (x.q, x.k, x.v, x.dout)), x.dlse[..., rows], None, None)
        found = results(call, part, alone, backend=backend)
        for name in RESULTS:
            mine = packed[name][..., rows] if name == "lse" else packed[name][:, rows]
            torch.testing.assert_close(found[name], mine, rtol=0, atol=1e-13)


@pytest.mark.parametrize("backend", BACKENDS)
def test_queries_one_by_one_are_those_of_the_whole(backend: str) -> None:
    case = Case(pattern=LocalWindow(30, block_size=64) | Strided(2, block_size=64), is_causal=True)
    x = inputs(case)
    whole, lse = call(case, x, x.q, x.k, x.v, backend=backend)
    for i in (0, 63, 64, 100, 199):
        one = replace(case, num_queries=1, query_offset=i)
        out, one_lse = call(one, x, x.q[:, i : i + 1], x.k, x.v, backend=backend)
        torch.testing.assert_close(out[:, 0], whole[:, i], rtol=0, atol=1e-13)
        torch.testing.assert_close(one_lse[..., 0], lse[..., i], rtol=0, atol=1e-13)


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_pattern_of_everything_is_dense_attention(is_causal: bool) -> None:
    case = Case(pattern=LocalWindow((None, None)), is_causal=is_causal, kv_heads=1)
    x = inputs(case)
    dense = attention(x.q, x.k, x.v, is_causal=is_causal, return_lse=True)
    for mine, other in zip(call(case, x, x.q, x.k, x.v), dense, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-12)


def test_a_pair_of_both_parts_counts_twice() -> None:
    """Everything beside everything: the same weights, and an lse higher by log 2."""
    case = Case(pattern=LocalWindow((None, None)), branches=DilatedPattern((2**40,), (1,)))
    x = inputs(case)
    dense, lse = attention(x.q, x.k, x.v, return_lse=True)
    out, both = call(case, x, x.q, x.k, x.v)
    torch.testing.assert_close(out, dense, rtol=0, atol=1e-12)
    torch.testing.assert_close(both, lse + math.log(2), rtol=0, atol=1e-12)


# --- dropout -----------------------------------------------------------------------------------------------------------------------


def test_dropout_repeats_with_its_seed_and_keeps_the_mean() -> None:
    case = Case(pattern=LocalWindow(60, block_size=64), dropout_p=0.4, heads=4, kv_heads=4)
    x = inputs(case)
    first, second = (call(case, x, x.q, x.k, torch.ones_like(x.v))[0] for _ in range(2))
    other = call(replace(case, seed=1), x, x.q, x.k, torch.ones_like(x.v))[0]
    assert torch.equal(first, second) and not torch.equal(first, other)
    assert abs(float(first.mean()) - 1) < 0.02


# --- dtypes --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("with_branches", [False, True])
def test_lower_precision_is_off_by_its_own_rounding(dtype: torch.dtype, backend: str, with_branches: bool) -> None:
    branches = DilatedPattern((64, 200), (1, 3)) if with_branches else None
    case = Case(pattern=BigBird(40, 5, 1, block_size=64), head_dim=16, is_causal=True, kv_heads=1, branches=branches)
    x = inputs(case, dtype)
    mine = results(call, case, x, backend=backend)
    truth, rounded = results(plain, case, x, torch.float64), results(plain, case, x)
    for name in RESULTS:
        expected = torch.float32 if name == "lse" else dtype
        assert mine[name].dtype is expected
    off, theirs = errors(mine, truth), errors(rounded, truth)
    for name in RESULTS:
        largest = float(truth[name][truth[name].isfinite()].abs().max())
        assert off[name] <= 2 * theirs[name] + 2 * torch.finfo(dtype).eps * largest, (name, off[name], theirs[name])


# --- block masks of flex attention ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [64, 128])
def test_a_block_mask_of_flex_attention_is_taken_as_it_is(block: int) -> None:
    def mod(batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (query - key < 90 + 20 * head) & (key <= query)

    length = 256
    mask = create_block_mask(mod, None, 2, length, length, device="cpu", BLOCK_SIZE=block)
    case = Case(pattern=MaskFunction(mod, per_head=True, block_size=block), num_queries=length, num_keys=length)
    x = inputs(case)
    q, k, v = (y.clone().requires_grad_() for y in (x.q, x.k, x.v))
    out, lse = block_sparse_attention(q, k, v, mask, return_lse=True)
    truth = results(plain, case, x)
    # the converted pattern lives as long as the graph
    grads = torch.autograd.grad((out, lse), (q, k, v), (x.dout, x.dlse))
    mine = dict(zip(RESULTS, (out.detach(), lse.detach(), *grads), strict=True))
    assert max(errors(mine, truth).values()) <= TOLERANCE


def test_a_block_mask_written_anew_is_read_anew() -> None:
    def mask_of(window: int) -> BlockMask:
        return create_block_mask(lambda b, h, i, j: (i >= j) & (i - j <= window), None, None, 512, 512, device="cpu")

    q = torch.randn(1, 512, 1, 8, generator=torch.Generator().manual_seed(0))
    mask, other = mask_of(100), mask_of(300)
    before, wanted = block_sparse_attention(q, q, q, mask), block_sparse_attention(q, q, q, other)
    assert not torch.equal(before, wanted)
    for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"):
        getattr(mask, name).data.copy_(getattr(other, name))
    mask.mask_mod = other.mask_mod
    assert torch.equal(block_sparse_attention(q, q, q, mask), wanted)


def by_flex(x: tuple[torch.Tensor, ...], mask: BlockMask) -> torch.Tensor:
    """FlexAttention on a CPU: it asks mask_mod about every pair of every entry and head, whatever the lists of blocks say."""
    return flex_attention(*(y.transpose(1, 2) for y in x), block_mask=mask, enable_gqa=True).transpose(1, 2)


def qkv(length: int, batch: int = 1, heads: int = 4) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(length)
    return tuple(torch.randn(batch, length, h, 8, generator=generator, dtype=torch.float64) for h in (heads, 2, 2))


def rows_of_map(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pattern: Any) -> torch.Tensor:
    weights = attention_map(q, k, pattern=pattern, query_rows=range(q.shape[1]))
    return torch.einsum("bhij,bjhd->bihd", weights, v.repeat_interleave(q.shape[2] // v.shape[2], 2))


ENTRIES: dict[str, Callable[..., torch.Tensor]] = {
    "function": block_sparse_attention,
    "ring": ring_block_sparse_attention,
    "module": lambda q, k, v, pattern: BlockSparseAttention(pattern)(q, k, v),
    "converted": lambda q, k, v, pattern: block_sparse_attention(q, k, v, from_block_mask(pattern)),
    "part": lambda q, k, v, pattern: block_sparse_attention(q, k, v, LocalWindow(q.shape[1]) & from_block_mask(pattern)),
    "there and back": lambda q, k, v, pattern: block_sparse_attention(q, k, v, to_block_mask(from_block_mask(pattern), *q.shape[1:3])),
    "function of pairs": lambda q, k, v, pattern: block_sparse_attention(q, k, v, MaskFunction(pattern.mask_mod)),
    "map": rows_of_map,
}


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("widths", [(200, 40, 90, 1), (40, 400, 0, 128), (300, 20, 129, 1)], ids=str)
def test_a_block_mask_for_all_heads_asks_about_each_if_mask_mod_reads_it(widths: tuple[int, ...], entry: str) -> None:
    """Its list is that of head 0, of which other heads keep more or fewer blocks, or less of the full ones."""
    length, width = 512, torch.tensor(widths)
    mask = create_block_mask(lambda b, h, i, j: (i >= j) & (i - j <= width[h]), None, None, length, length, device="cpu")
    x = qkv(length)
    torch.testing.assert_close(ENTRIES[entry](*x, mask), by_flex(x, mask), rtol=0, atol=TOLERANCE)
    if entry in ("function", "ring"):
        with pytest.raises(ValueError, match=r"mask has shape \(1, 4, 4\); 4 heads of 300 positions have"):
            ENTRIES[entry](*qkv(300), mask)


@pytest.mark.parametrize("entry", [*ENTRIES, "beside branches", "received", "decode", "within"])
def test_a_function_that_reads_the_batch_entry_takes_one(entry: str) -> None:
    length = 130
    documents = torch.tensor([[0] * 50 + [1] * 80, [0] * 100 + [1] * 30])

    def same_document(batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return documents[batch, query] == documents[batch, key]

    mask = create_block_mask(same_document, None, None, length, length, device="cpu")
    position, whole = torch.full((2,), length - 1), from_block_mask(mask)
    others: dict[str, Callable[..., Any]] = {
        "beside branches": lambda q, k, v, pattern: block_sparse_dilated_attention(q, k, v, [64], [1], pattern),
        "received": lambda q, k, v, pattern: attention_received(q, k, pattern=pattern),
        "decode": lambda q, k, v, pattern: decode_attention(q[:, -1:], k, v, position, MaskFunction(pattern.mask_mod)),
        "within": lambda q, k, v, pattern: block_sparse_attention(q, k, v, TopBlocks(1, within=whole)),
    }
    x = qkv(length, batch=2)
    with pytest.raises(ValueError, match=r"the batch has 2 entries, which the function of .* may tell apart; expected one, of index 0"):
        (ENTRIES | others)[entry](*x, mask)
    # one entry, and an entry by its number for a whole batch
    first = tuple(y[:1] for y in x)
    if entry in ENTRIES:
        torch.testing.assert_close(ENTRIES[entry](*first, mask), by_flex(first, mask), rtol=0, atol=TOLERANCE)
    both = create_block_mask(same_document, 2, None, length, length, device="cpu")
    mine = [block_sparse_attention(*(y[b : b + 1] for y in x), from_block_mask(both, batch=b)) for b in range(2)]
    torch.testing.assert_close(torch.cat(mine), by_flex(x, both), rtol=0, atol=TOLERANCE)
    assert block_sparse_attention(*x, from_block_mask(both, batch=1)).shape == x[0].shape


def test_a_list_of_other_blocks_than_head_0_keeps_holds_for_all_heads() -> None:
    length, width = 384, torch.tensor([200, 40, 90, 1])
    counts, indices = torch.tensor([[[1, 1, 2]]]), torch.tensor([[[[0, 0, 0], [1, 0, 0], [0, 2, 0]]]])
    mask = BlockMask.from_kv_blocks(counts.int(), indices.int(), mask_mod=lambda b, h, i, j: (i - j).abs() <= width[h])
    distance = (torch.arange(length)[:, None] - torch.arange(length)).abs()
    listed = torch.tensor([[1, 0, 0], [0, 1, 0], [1, 0, 1]]).bool().repeat_interleave(128, 0).repeat_interleave(128, 1)
    assert torch.equal(from_block_mask(mask).dense_mask(length, length, 4), listed & (distance <= width[:, None, None]))


def test_a_mask_mod_that_is_set_anew_is_asked_anew() -> None:
    x = qkv(200)
    counts, indices = torch.tensor([[[2, 2]]]), torch.tensor([[[[0, 1], [0, 1]]]])
    mask = BlockMask.from_kv_blocks(counts.int(), indices.int(), mask_mod=lambda b, h, i, j: i >= j, seq_lengths=(200, 200))
    for mask_mod in (mask.mask_mod, lambda b, h, i, j: i <= j):
        mask.mask_mod = mask_mod
        torch.testing.assert_close(block_sparse_attention(*x, mask), by_flex(x, mask), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("index", [(0,), (slice(None), 0), (slice(None), slice(None), 0), (slice(None), slice(None), slice(1, 3))], ids=str)
def test_a_slice_of_a_block_mask_is_refused_with_what_to_do(index: tuple[Any, ...]) -> None:
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 512, 512, device="cpu")
    sliced = mask[index]
    with pytest.raises(ValueError, match=r"512 queries have 4 rows: it is a slice of a BlockMask, .* without mask_mod; convert the whole"):
        block_sparse_attention(*qkv(512), sliced)
    # as torch's message for slices advises
    sliced.mask_mod = mask.mask_mod
    if len(index) < 3:
        assert torch.equal(block_sparse_attention(*qkv(512), sliced), block_sparse_attention(*qkv(512), mask))
        return
    with pytest.raises(ValueError, match=r"blocks for \(1, 1, [12]\) .* without some rows; convert the whole"):
        block_sparse_attention(*qkv(512), sliced)


def test_block_masks_that_read_behind_an_end_are_refused() -> None:
    x, widths = qkv(300), torch.tensor([200, 40])
    with pytest.raises(
        ValueError, match=r"fn reads a tensor behind its end \(index 2 .* size 2\); expected .* an entry for each query head"
    ):
        block_sparse_attention(*x, create_block_mask(lambda b, h, i, j: i - j <= widths[h], None, None, 300, 300, device="cpu"))
    counts, indices = torch.tensor([[[1, 1, 1]]]), torch.tensor([[[[0], [7], [2]]]])
    mask = BlockMask((300, 300), counts, indices, None, None, None, None, None, None)
    with pytest.raises(ValueError, match="lists blocks of keys up to 7 and its 300 keys have 3, numbered from 0"):
        block_sparse_attention(*x, mask)


READING: dict[str, tuple[Any, tuple[bool, bool]]] = {
    "neither": (lambda b, h, i, j: i >= j, (False, False)),
    "only their form": (lambda b, h, i, j: b.new_ones(()).bool() & (i >= j).expand(h.shape), (False, False)),
    "what is not returned": (lambda b, h, i, j: ((b + h), i >= j)[1], (False, False)),
    "an index": (lambda b, h, i, j: torch.arange(3)[h] > i - j, (False, True)),
    "both in an index": (lambda b, h, i, j: torch.ones(2, 3).bool()[b, h], (True, True)),
    "a condition": (lambda b, h, i, j: torch.where(b == 0, i >= j, i <= j), (True, False)),
    "in place": (lambda b, h, i, j: (i >= j).logical_and_(h > 0), (False, True)),
    "out of torch": (lambda b, h, i, j: i - j <= int(h), (True, True)),
    "an error": (lambda b, h, i, j: torch.zeros(0)[h] > 0, (True, True)),
}


@pytest.mark.parametrize("name", READING)
def test_what_a_function_reads(name: str) -> None:
    fn, reads = READING[name]
    pattern = MaskFunction(fn)
    assert (pattern.reads_batch, pattern.per_head) == reads
    assert MaskFunction(fn, per_head=False).per_head is False
