"""The plan: its problems are exactly the pattern's pairs, on views that copy nothing, and cutting launches changes no result."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dilated_attention import DilatedPattern
from dilated_attention.backends import Options, detect, registry
from dilated_attention.backends.torch_ops.math import band_mask
from dilated_attention.engine.branches.launches import Launch, Rows, launches_of, problems_at_once
from dilated_attention.engine.branches.problems import Problem, Problems, Shape, problems_of
from dilated_attention.engine.ops import prepare
from dilated_attention.pattern import NOT_IN_BRANCH
from dilated_attention.testing import Case, Space, inputs, random_case
from tests.helpers.op_settings import calls_of
from tests.helpers.op_settings import settings as settings_of_call


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


Parts = Iterator[tuple[int, int, torch.Tensor, torch.Tensor]]


def parts_of(problem: Problem) -> Parts:
    """(query head, key/value head, rows, keys) of each head and segment, as a kernel pairs heads: evenly many to each key/value head."""
    group = problem.heads
    for i in range(group.size):
        head, kv_head = group.start + i * group.step, group.kv_start + i * group.kv_count // group.size * group.kv_step
        for segment in range(problem.segments):
            first = segment * problem.stride + group.shift * i
            rows, keys = (torch.arange(n) * problem.step + first for n in (problem.q_len, problem.k_len))
            yield head, kv_head, problem.q_start + rows, problem.k_start + keys


def pairs_of(plan: Problems, shape: Shape, pattern: DilatedPattern, n: int) -> torch.Tensor:
    """What the problems compute, pair by pair."""
    m = torch.zeros(pattern.num_branches, shape.num_heads, n, n, dtype=torch.int64)
    for problem in plan.problems:
        low, high = problem.band or (None, None)
        if problem.causal:
            assert problem.q_len == problem.k_len > 1 and problem.q_start == problem.k_start, "causal problems are square"
            high = 0
        allowed = band_mask((low, high), problem.q_len, problem.k_len, torch.device("cpu"))
        for head, kv_head, rows, keys in parts_of(problem):
            assert kv_head == head // (shape.num_heads // shape.num_kv_heads)
            m[problem.branch, head, rows[:, None], keys[None, :]] += allowed
    return m


@given(seed=st.integers(0, 2**32))
@settings(max_examples=200)
def test_problems_are_the_pairs_of_the_pattern(seed: int) -> None:
    """For any range of queries and any range of keys, branch by branch and head by head."""
    case = random_case(seed, Space(max_length=48))
    shape = random_shape(seed, case)
    plan = problems_of(case.pattern, shape)
    found = pairs_of(plan, shape, case.pattern, case.num_keys)
    truth = truth_of(case.pattern, shape, case.num_keys)
    assert torch.equal(found, truth)
    if shape.window is None:
        assert plan.pairs == int(truth.sum())
    else:
        assert plan.pairs >= int(truth.sum())
    assert all(p.q_len > 0 and p.k_len > 0 and p.segments > 0 for p in plan.problems), "no kernel is given nothing"


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
        for problem in problems_of(pattern, whole._replace(keys=keys)).problems:
            assert problem.zero_keys >= 0
            for head, _, rows, _ in parts_of(problem):
                brought[problem.branch, head, rows] += problem.zero_keys
    expected = torch.zeros_like(brought)
    m = truth_of(pattern, whole._replace(is_causal=False), n)
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
            plan = problems_of(DilatedPattern((16,), (rate,), convention), shape)
            most = 1 if convention == "zero" else rate
            assert len(plan.problems) <= (min(most, heads // rate) if heads == kv_heads else most)
            assert all(problem.segments == 4 for problem in plan.problems)
            apart = problems_of(DilatedPattern((16,), (rate,), convention), shape._replace(shifted_heads=False))
            assert all(problem.heads.shift == 0 for problem in apart.problems)


def test_equal_segments_are_one_problem() -> None:
    """A million positions are a handful of launches, however many segments; a range adds its two ends."""
    pattern, n = DilatedPattern((1024, 65536), (1, 4)), 2**20
    shape = Shape(8, 8, (0, n), (0, n), ((0, n),), True)
    assert len(problems_of(pattern, shape).problems) == 1 + 2
    assert len(problems_of(pattern, shape._replace(queries=(5, n - 5))).problems) <= 3 * 5 + 2 * 5


@pytest.mark.timeout(20)
def test_planning_one_query_does_not_walk_all_segments() -> None:
    """Decoding at the end of a long cache: time by what is asked, not by the number of segments."""
    pattern, n = DilatedPattern((16, 64), (1, 4)), 2**30
    for position in (0, n // 2, n - 1):
        plan = problems_of(pattern, Shape(8, 8, (position, position + 1), (0, n), ((0, n),), True))
        assert 1 <= len(plan.problems) <= 2
        assert plan.pairs <= 8 * (16 + 16)


# --- views -------------------------------------------------------------------------------------------------------------------------------


CAPABILITIES = registry.get("math").capabilities


def rows_of(x: torch.Tensor, keys: bool = False, position: int = 0) -> Rows:
    return Rows(0, keys, x.shape, x.stride(), position)


def views_of(problem: Problem, x: torch.Tensor, rows: Rows, part_bytes: int | None = None, **limits: int | None) -> list[torch.Tensor]:
    """The rows of a problem in x, one view (P, L, G, …) a launch."""
    (made,) = launches_of([problem], [rows], replace(CAPABILITIES, **limits), part_bytes, Options(scale=1.0))
    return [launch.of([x])[0] for launch in made]


def extent(view: torch.Tensor) -> int:
    return 1 + sum((size - 1) * stride for size, stride in zip(view.shape, view.stride(), strict=True)) if view.numel() else 0


@pytest.mark.parametrize("seed", range(60))
def test_launches_hold_the_rows_they_name_and_never_copy(seed: int) -> None:
    """In every layout, however launches are cut: each row once, and no launch over a limit that it could keep."""
    case = random_case(
        seed, Space(layouts=("contiguous", "heads_first", "packed", "offset", "expanded_batch", "expanded_heads", "expanded_rows"))
    )
    case = replace(case, num_queries=case.num_keys, query_offset=0)
    x = inputs(case, torch.float32)
    draw = random.Random(seed)
    limits = {name: draw.choice([None, draw.randint(1, most)]) for name, most in (("max_batch", 8), ("max_extent", 400))}
    for problem in problems_of(case.pattern, random_shape(seed, case)).problems:
        group = problem.heads
        queries = (problem.q_start, problem.q_len, group.start, group.step, group.size)
        keys = (problem.k_start, problem.k_len, group.kv_start, group.kv_step, group.kv_count)
        for of_keys, (start, length, head_start, head_step, count), y in ((False, queries, x.q), (True, keys, x.k), (True, keys, x.v)):
            positions = start + problem.stride * torch.arange(problem.segments)[:, None] + problem.step * torch.arange(length)[None, :]
            positions = positions[..., None] + group.shift * torch.arange(count)
            heads = head_start + head_step * torch.arange(count)
            assert int(positions.max()) < case.num_keys
            expected = y[:, positions, heads.expand_as(positions)]
            part_bytes = draw.choice([None, draw.randint(1, 30) * 4 * y.shape[-1]])
            views = views_of(problem, y, rows_of(y, of_keys), part_bytes, **limits)
            for view in views:
                assert view.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()
                assert view.storage_offset() + extent(view) <= y.untyped_storage().nbytes() // y.element_size()
                assert limits["max_batch"] is None or len(view) <= limits["max_batch"]
                assert part_bytes is None or len(view) == 1 or len(view) * length * group.size <= part_bytes // (4 * y.shape[-1])
                # what one problem spans by itself cannot be cut, nor grows where all problems lie on one another
                if limits["max_extent"] is not None and extent(view) > limits["max_extent"]:
                    assert len(view) == 1 or view.stride(0) == 0
            # folded by batch elements or by segments
            whole = torch.cat(views)
            assert torch.equal(whole, expected.flatten(0, 1)) or torch.equal(whole, expected.transpose(0, 1).flatten(0, 1))


def test_views_of_several_tensors_are_cut_in_step() -> None:
    """Where one tensor's batch and segments do not fold, no tensor's do."""
    problem = problems_of(DilatedPattern((4,), (1,)), Shape(2, 2, (0, 12), (0, 12), ((0, 12),), False)).problems[0]
    plain = torch.arange(2 * 12 * 2 * 3).view(2, 12, 2, 3)
    apart = torch.zeros(2, 20, 2, 3, dtype=torch.int64)[:, :12].copy_(plain)
    rows = [rows_of(plain), Rows(1, True, apart.shape, apart.stride())]
    (made,) = launches_of([problem], rows, CAPABILITIES, None, Options(scale=1.0))
    assert len(made) == 2 and all(isinstance(launch, Launch) for launch in made)
    for launch in made:
        one, other = launch.of([plain, apart])
        assert one.shape == (3, 4, 2, 3) and torch.equal(one, other)
    assert made[0].options.geometry is made[1].options.geometry


# --- 32-bit extents, on tensors without storage ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2**20, 2**24, 2**28])
def test_launches_of_huge_tensors_keep_to_the_extent(n: int) -> None:
    limit = 2**31
    q = torch.empty(1, n, 16, 64, dtype=torch.bfloat16, device="meta")
    for problem in problems_of(DilatedPattern((1024, 2**20), (1, 4)), Shape(16, 16, (0, n), (0, n), ((0, n),), False)).problems:
        pieces = views_of(problem, q, rows_of(q), max_batch=65_535, max_extent=limit)
        assert all(extent(piece) <= limit and len(piece) <= 65_535 for piece in pieces)
        assert sum(len(piece) for piece in pieces) == problem.segments
    assert problems_at_once(10, [(5, (3,), (1,))], replace(CAPABILITIES, max_extent=13)) == 3


@pytest.mark.parametrize("layout", ["rows_first", "heads_first", "packed"])
@pytest.mark.parametrize("which", [0, 1, 2, 3])
def test_request_extent_is_that_of_one_segment_in_any_layout(monkeypatch: pytest.MonkeyPatch, layout: str, which: int) -> None:
    """A kernel of 32-bit offsets is refused by the longest segment of any tensor; with heads first, heads lie N·D apart.

    Spans within 32 bits are told as 0, so that calls of nearly all lengths are one request.
    """
    n, heads, dim = 2**24, 8, 64
    calls = calls_of(monkeypatch, registry, "select")
    plain = torch.empty(1, n, heads, dim, device="meta")
    other = {
        "rows_first": plain,
        "heads_first": torch.empty(1, heads, n, dim, device="meta").transpose(1, 2),
        "packed": torch.empty(1, n, 3, heads, dim, device="meta")[:, :, 1],
    }[layout]
    tensors = tuple(other if i == which else plain for i in range(4))

    def extent_of(pattern: DilatedPattern) -> int:
        """As the op would ask the registry for."""
        registry.cached.clear()
        prepare.make_plan(settings_of_call(backend="math"), tensors, False, pattern=pattern, hardware=detect("cpu"))
        return calls[-1][1][0].extent

    assert extent_of(DilatedPattern((4096,), (1,))) in (0, 1 + (4095 + 7 * n) * dim + 63)
    pattern = DilatedPattern((4096, 2**23), (1, 2))
    plan = problems_of(pattern, Shape(heads, heads, (0, n), (0, n), ((0, n),), False))
    needed = max(extent(views_of(problem, x, rows_of(x), max_batch=1)[0]) for problem in plan.problems for x in tensors)
    # one head more than a problem may hold, but no more than all heads of one segment
    assert needed <= extent_of(pattern) <= max(extent(x[:, : 2**23]) for x in tensors)
