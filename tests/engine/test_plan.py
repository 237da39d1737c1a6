"""The plan: its problems are exactly the pattern's pairs, on views that copy nothing, and cutting launches changes no result."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dilated_attention import DilatedPattern
from dilated_attention.backends import AttentionRequest, Backend, registry
from dilated_attention.engine.branches.heads import HeadGroup
from dilated_attention.engine.branches.plan import Plan, Shape, branch_plans, make_plan
from dilated_attention.engine.branches.views import extent, key_rows, launches, query_rows
from dilated_attention.engine.ops import prepare
from dilated_attention.pattern import NOT_IN_BRANCH
from dilated_attention.testing import Case, Space, inputs, random_case
from tests.helpers.op_settings import PLAIN

WHOLE = DilatedPattern((2**62,), (1,), "zero")


def random_shape(seed: int, case: Case, *, ranges: bool = True) -> Shape:
    """The case's documents and heads, with any query range and any key range of the sequence."""
    draw = random.Random(seed)
    n = case.num_keys
    bounds = case.bounds or (0, n)
    queries, keys = (0, n), (0, n)
    if ranges:
        queries, keys = ((min(pair), max(pair)) for pair in ([draw.randint(0, n) for _ in "ab"] for _ in "qk"))
    documents = tuple((a, b) for a, b in itertools.pairwise(bounds) if a < b)
    block = draw.choice([None, 1, 3, 8]) if case.window else None
    return Shape(case.heads, case.kv_heads, queries, keys, documents, case.is_causal, case.window, block)


def truth_of(pattern: DilatedPattern, shape: Shape, n: int) -> torch.Tensor:
    """Multiplicities (branches, H, n, n) by the pattern's definition, each document a sequence, cut to the ranges."""
    m = torch.zeros(pattern.num_branches, shape.num_heads, n, n, dtype=torch.int64)
    offsets = pattern.offsets(shape.num_heads)
    for branch, (length, rate) in enumerate(pattern.branches):
        for head, offset in enumerate(offsets[branch]):
            if offset == NOT_IN_BRANCH:
                continue
            alone = DilatedPattern((length,), (rate,), ((offset,),))
            for a, b in shape.documents:
                m[branch, head, a:b, a:b] += alone.dense_mask(b - a, b - a, 1, is_causal=shape.is_causal)[0]
    difference = torch.arange(n)[None, :] - torch.arange(n)[:, None]
    if shape.window is not None:
        left, right = shape.window
        m *= (difference >= (-n if left is None else -left)) & (difference <= (n if right is None else right))
    in_range = torch.zeros(n, n, dtype=torch.int64)
    in_range[slice(*shape.queries), slice(*shape.keys)] = 1
    return m * in_range


def heads_of(group: HeadGroup) -> list[tuple[int, int]]:
    """(query head, key/value head) as a kernel pairs them: evenly many query heads to each key/value head."""
    per_kv = group.count // group.kv_count
    return [(group.start + i * group.step, group.kv_start + i // per_kv * group.kv_step) for i in range(group.count)]


def pairs_of(plan: Plan, shape: Shape, pattern: DilatedPattern, n: int) -> torch.Tensor:
    """What the problems compute, pair by pair."""
    m = torch.zeros(pattern.num_branches, shape.num_heads, n, n, dtype=torch.int64)
    for problem in plan.problems:
        for place, (head, kv_head) in enumerate(heads_of(problem.heads)):
            assert kv_head == head // (shape.num_heads // shape.num_kv_heads)
            shift = problem.heads.shift * place
            for segment in range(problem.segments):
                first = segment * problem.stride + shift
                rows = problem.q_start + first + problem.step * torch.arange(problem.q_len)
                keys = problem.k_start + first + problem.step * torch.arange(problem.k_len)
                index = torch.arange(problem.k_len)[None, :] - torch.arange(problem.q_len)[:, None]
                allowed = torch.ones_like(index, dtype=torch.bool)
                if problem.causal:
                    assert problem.q_len == problem.k_len > 1 and problem.q_start == problem.k_start, "causal problems are square"
                    allowed &= index <= 0
                low, high = problem.band or (None, None)
                if low is not None:
                    allowed &= index >= low
                if high is not None:
                    allowed &= index <= high
                m[problem.branch, head, rows[:, None], keys[None, :]] += allowed
    return m


@given(seed=st.integers(0, 2**32))
@settings(max_examples=300)
def test_problems_are_the_pairs_of_the_pattern(seed: int) -> None:
    """For any range of queries and any range of keys, branch by branch and head by head."""
    case = random_case(seed, Space(max_length=48))
    shape = random_shape(seed, case)
    plan = make_plan(case.pattern, shape)
    found = pairs_of(plan, shape, case.pattern, case.num_keys)
    truth = truth_of(case.pattern, shape, case.num_keys)
    assert torch.equal(found, truth)
    if shape.window is None:
        assert plan.pairs == int(truth.sum())
    else:
        assert plan.pairs >= int(truth.sum())
    assert all(p.q_len > 0 and p.k_len > 0 and p.segments > 0 for p in plan.problems), "no kernel is given nothing"


@given(seed=st.integers(0, 2**32))
@settings(max_examples=200)
def test_first_and_opens_mark_rows_not_written_before(seed: int) -> None:
    """first: no row of the problem was written before by any; opens: by none of its branch. And covered, single follow."""
    case = random_case(seed, Space(max_length=32))
    shape = random_shape(seed, case)
    plan = make_plan(case.pattern, shape)
    written = torch.zeros(case.pattern.num_branches, case.heads, case.num_keys, dtype=torch.int64)
    for problem in plan.problems:
        rows = torch.cat(
            [problem.q_start + s * problem.stride + problem.step * torch.arange(problem.q_len) for s in range(problem.segments)]
        )
        heads = torch.tensor([head for head, _ in heads_of(problem.heads)])
        mine = written[problem.branch][heads][:, rows]
        assert problem.opens == (not mine.any()) and (problem.opens or bool(mine.all()))
        anyone = written[:, heads][:, :, rows].sum(0)
        # a head may be new to rows of later branches without the plan saying so: it then merges into nothing
        assert not problem.first or not anyone.any()
        for head in heads:
            written[problem.branch, head, rows] += 1
    total = written.sum(0)[:, slice(*shape.queries)]
    assert not plan.covered or bool((total > 0).all()), "covered: no row keeps what torch.empty left"
    assert not plan.single or bool((total <= 1).all())
    for separate, part in branch_plans(plan):
        assert part.problems == tuple(p for p in plan.problems if p.branch == part.problems[0].branch)
        assert [replace(p, first=False) for p in separate.problems] == [replace(p, first=False) for p in part.problems]
        assert all(p.first == p.opens for p in separate.problems) and separate.single == all(p.opens for p in separate.problems)


@given(seed=st.integers(0, 2**32))
@settings(max_examples=150)
def test_zero_keys_are_brought_once(seed: int) -> None:
    """Keys cut into parts: over all parts every row has exactly its branch's zero keys, and none where it is causal."""
    case = random_case(seed, Space(max_length=32, window=False))
    pattern, n = replace(case.pattern, tail="zero_keys"), case.num_keys
    draw = random.Random(seed)
    whole = random_shape(seed, case, ranges=False)
    cuts = [0, *sorted(draw.randint(0, n) for _ in range(3)), n]
    brought = torch.zeros(pattern.num_branches, case.heads, n, dtype=torch.int64)
    for keys in itertools.pairwise(cuts):
        for problem in make_plan(pattern, replace(whole, keys=keys)).problems:
            assert problem.zero_keys >= 0
            for place, (head, _) in enumerate(heads_of(problem.heads)):
                for segment in range(problem.segments):
                    rows = (
                        problem.q_start
                        + place * problem.heads.shift
                        + segment * problem.stride
                        + problem.step * torch.arange(problem.q_len)
                    )
                    brought[problem.branch, head, rows] += problem.zero_keys
    expected = torch.zeros_like(brought)
    m = truth_of(pattern, replace(whole, is_causal=False), n)
    for branch, (length, rate) in enumerate(pattern.branches):
        for a, b in whole.documents:
            places = -(-min(length, b - a) // rate)
            counts = m[branch, :, a:b].sum(-1)
            expected[branch, :, a:b] = torch.where(counts > 0, places - counts, 0) * (not case.is_causal)
    assert torch.equal(brought, expected)


# --- head groups -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("convention", "heads", "kv_heads"), [("cyclic", 16, 16), ("cyclic", 16, 4), ("blocked", 16, 16), ("blocked", 16, 8), ("zero", 12, 3)]
)
def test_conventions_need_one_group_per_offset(convention: str, heads: int, kv_heads: int) -> None:
    """No launch more than there are offsets, also with grouped key/value heads, for rates that divide the heads; and no more than
    H/r where every head has its own keys, since the head stride then carries the offset."""
    for rate in (1, 2, 4, 8, 16):
        shape = Shape(heads, kv_heads, (0, 64), (0, 64), ((0, 64),), False)
        if rate <= heads:
            plan = make_plan(DilatedPattern((16,), (rate,), convention), shape)
            most = 1 if convention == "zero" else rate
            assert len(plan.problems) <= (min(most, heads // rate) if heads == kv_heads else most)
            assert all(problem.segments == 4 for problem in plan.problems)
            apart = make_plan(DilatedPattern((16,), (rate,), convention), replace(shape, shifted_heads=False))
            assert all(problem.heads.shift == 0 for problem in apart.problems)


def test_equal_segments_are_one_problem() -> None:
    """A million positions are a handful of launches, however many segments; a range adds its two ends."""
    pattern, n = DilatedPattern((1024, 65536), (1, 4)), 2**20
    shape = Shape(8, 8, (0, n), (0, n), ((0, n),), True)
    assert len(make_plan(pattern, shape).problems) == 1 + 2
    assert len(make_plan(pattern, replace(shape, queries=(5, n - 5))).problems) <= 3 * 5 + 2 * 5


@pytest.mark.timeout(20)
def test_planning_one_query_does_not_walk_all_segments() -> None:
    """Decoding at the end of a long cache: time by what is asked, not by the number of segments."""
    pattern, n = DilatedPattern((16, 64), (1, 4)), 2**30
    for position in (0, n // 2, n - 1):
        plan = make_plan(pattern, Shape(8, 8, (position, position + 1), (0, n), ((0, n),), True))
        assert 1 <= len(plan.problems) <= 2
        assert plan.pairs <= 8 * (16 + 16)


# --- views -------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(60))
def test_views_hold_the_rows_they_name_and_never_copy(seed: int) -> None:
    case = random_case(
        seed, Space(layouts=("contiguous", "heads_first", "packed", "offset", "expanded_batch", "expanded_heads", "expanded_rows"))
    )
    case = replace(case, num_queries=case.num_keys, query_offset=0)
    x = inputs(case, torch.float32)
    plan = make_plan(case.pattern, random_shape(seed, case))
    for problem in plan.problems:
        group = problem.heads
        queries = (problem.q_start, problem.q_len, group.start, group.step, group.count)
        keys = (problem.k_start, problem.k_len, group.kv_start, group.kv_step, group.kv_count)
        for view, (start, length, head_start, head_step, count), y in (
            (query_rows(problem, 0, x.q), queries, x.q), (key_rows(problem, 0, x.k), keys, x.k), (key_rows(problem, 0, x.v), keys, x.v),
        ):  # fmt: skip
            assert view.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()
            assert view.storage_offset() + extent(view) <= y.untyped_storage().nbytes() // y.element_size()
            positions = start + problem.stride * torch.arange(problem.segments)[:, None] + problem.step * torch.arange(length)[None, :]
            positions = positions[..., None] + group.shift * torch.arange(count)
            heads = head_start + head_step * torch.arange(count)
            assert int(positions.max()) < case.num_keys
            assert torch.equal(view, y[:, positions, heads.expand_as(positions)])


def segments_of(x: torch.Tensor, segments: int, stride: int, length: int, step: int) -> torch.Tensor:
    """Rows 0, step, … of segments ``stride`` rows apart, for all heads: (B, S, L, H, D)."""
    (B, _, H, D), (s_B, s_N, s_H, s_D) = x.shape, x.stride()
    return x.as_strided((B, segments, length, H, D), (s_B, stride * s_N, step * s_N, s_H, s_D), x.storage_offset())


@given(data=st.data())
@settings(max_examples=200)
def test_launches_cut_within_limits_and_lose_nothing(data: st.DataObject) -> None:
    """Every element of every view in exactly one launch, in step with the other views, and no launch over a limit it could keep."""
    B, S, L, G, D = (data.draw(st.integers(1, high)) for high in (3, 5, 4, 3, 3))
    limits = {name: data.draw(st.none() | st.integers(1, high)) for name, high in (("max_batch", 8), ("max_extent", 400), ("max_rows", 30))}
    n = S * L * 2
    tensors = []
    for kind in data.draw(st.lists(st.sampled_from(["plain", "heads_first", "expanded"]), min_size=1, max_size=3)):
        numbers = torch.arange(B * n * G * D)
        tensors.append(
            {
                "plain": numbers.view(B, n, G, D),
                "heads_first": numbers.view(B, G, n, D).transpose(1, 2),
                "expanded": numbers[: n * G * D].view(1, n, G, D).expand(B, n, G, D),
            }[kind]
        )
    step = data.draw(st.integers(1, 2))
    views = [segments_of(x, S, L if step == 1 else L * 2, L, step) for x in tensors]
    found = list(launches(views, **limits))
    for index, view in enumerate(views):
        pieces = [group[index] for group in found]
        assert all(piece.untyped_storage().data_ptr() == view.untyped_storage().data_ptr() for piece in pieces)
        whole = torch.cat(pieces)
        assert whole.shape == (B * S, L, G, D)
        # folded by batch elements or by segments: both orders are the same for all views
        assert torch.equal(whole, view.flatten(0, 1)) or torch.equal(whole, view.transpose(0, 1).flatten(0, 1))
    for group in found:
        count = group[0].shape[0]
        assert len({piece.shape[0] for piece in group}) == 1
        if limits["max_batch"] is not None:
            assert count <= limits["max_batch"]
        if limits["max_rows"] is not None:
            assert count == 1 or count * L <= limits["max_rows"]
        if limits["max_extent"] is not None:
            # what one problem spans by itself cannot be cut, nor grows where all problems lie on one another
            over = [piece for piece in group if extent(piece) > limits["max_extent"]]
            assert all(count == 1 or piece.stride(0) == 0 for piece in over)


# --- 32-bit extents, on tensors without storage ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2**20, 2**24, 2**28])
def test_launches_of_huge_tensors_keep_to_the_extent(n: int) -> None:
    limit = 2**31
    q = torch.empty(1, n, 16, 64, dtype=torch.bfloat16, device="meta")
    plan = make_plan(DilatedPattern((1024, 2**20), (1, 4)), Shape(16, 16, (0, n), (0, n), ((0, n),), False))
    for problem in plan.problems:
        view = query_rows(problem, 0, q)
        total = 0
        for (piece,) in launches([view], max_batch=65_535, max_extent=limit, max_rows=None):
            assert extent(piece) <= limit and piece.shape[0] <= 65_535
            assert piece.stride()[1:] == view.stride()[2:]
            total += piece.shape[0]
        assert total == problem.segments


def request_of(monkeypatch: pytest.MonkeyPatch, tensors: tuple[torch.Tensor, ...], pattern: DilatedPattern) -> AttentionRequest:
    """What the op would ask the registry for."""
    asked: list[AttentionRequest] = []

    def select(request: AttentionRequest, name: str) -> Backend:
        asked.append(request)
        return registry.get("math")

    monkeypatch.setattr(registry, "select", select)
    prepare.prepare(False, tensors, pattern, PLAIN)
    return asked[0]


@pytest.mark.parametrize("layout", ["rows_first", "heads_first", "packed"])
@pytest.mark.parametrize("which", [0, 1, 2, 3])
def test_request_extent_is_that_of_one_segment_in_any_layout(monkeypatch: pytest.MonkeyPatch, layout: str, which: int) -> None:
    """A kernel of 32-bit offsets is refused by the longest segment of any tensor; with heads first, heads lie N·D apart.

    Spans within 32 bits are told as 0, so that calls of nearly all lengths are one request.
    """
    n, heads, dim = 2**24, 8, 64
    plain = torch.empty(1, n, heads, dim, device="meta")
    other = {
        "rows_first": plain,
        "heads_first": torch.empty(1, heads, n, dim, device="meta").transpose(1, 2),
        "packed": torch.empty(1, n, 3, heads, dim, device="meta")[:, :, 1],
    }[layout]
    tensors = tuple(other if i == which else plain for i in range(4))
    assert request_of(monkeypatch, tensors, DilatedPattern((4096,), (1,))).extent in (0, 1 + (4095 + 7 * n) * dim + 63)
    pattern = DilatedPattern((4096, 2**23), (1, 2))
    request = request_of(monkeypatch, tensors, pattern)
    plan = make_plan(pattern, Shape(heads, heads, (0, n), (0, n), ((0, n),), False))
    needed = max(extent(query_rows(problem, 0, x)[:, :1]) for problem in plan.problems for x in tensors)
    assert request.extent >= needed
    # one head more than a problem may hold, but no more than all heads of one segment
    assert request.extent <= max(extent(x[:, : 2**23]) for x in tensors)
