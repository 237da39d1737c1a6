"""The plan: few problems however many segments, on views that copy nothing and keep to limits. That they are the pattern's pairs, and
that cutting them changes no result: test_oracle.py."""

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from dilated_attention import DilatedPattern
from dilated_attention.backends import Options, detect, registry
from dilated_attention.engine.branches.launches import Rows, launches_of, problems_at_once
from dilated_attention.engine.branches.problems import Problem, Shape, problems_of
from dilated_attention.engine.branches.run_problems import shares
from dilated_attention.engine.ops import prepare
from dilated_attention.engine.ops.settings import DENSE, CallSettings
from dilated_attention.factory import EXAMPLES
from dilated_attention.testing import Space, inputs, random_case
from tests.helpers.op_settings import calls_of
from tests.helpers.op_settings import settings as settings_of_call


@pytest.mark.parametrize(("convention", "heads", "kv_heads"), [("cyclic", 16, 16), ("cyclic", 16, 4), ("blocked", 16, 8), ("zero", 12, 3)])
def test_conventions_need_one_group_per_offset(convention: str, heads: int, kv_heads: int) -> None:
    """No launch more than there are offsets, also with grouped key/value heads, for rates that divide the heads; and no more than
    H/r where every head has its own keys, since the head stride then carries the offset."""
    for rate in (1, 2, 4, 8):
        shape = Shape(heads, kv_heads, (0, 64), (0, 64), ((0, 64),), False)
        problems = problems_of(DilatedPattern((16,), (rate,), convention), shape).problems
        most = 1 if convention == "zero" else rate
        assert len(problems) <= (min(most, heads // rate) if heads == kv_heads else most)
        assert all(problem.segments == 4 for problem in problems)


@pytest.mark.timeout(20)
def test_a_million_positions_are_a_handful_of_problems_and_one_query_does_not_walk_all_segments() -> None:
    """A range adds its two ends; decoding at the end of a long cache takes time by what is asked."""
    pattern, n = DilatedPattern((1024, 65536), (1, 4)), 2**20
    shape = Shape(8, 8, (0, n), (0, n), ((0, n),), True)
    assert len(problems_of(pattern, shape).problems) == 1 + 2
    assert len(problems_of(pattern, shape._replace(queries=(5, n - 5))).problems) <= 3 * 5 + 2 * 5
    pattern, n = DilatedPattern((16, 64), (1, 4)), 2**30
    for position in (0, n // 2, n - 1):
        plan = problems_of(pattern, Shape(8, 8, (position, position + 1), (0, n), ((0, n),), True))
        assert 1 <= len(plan.problems) <= 2 and plan.pairs <= 8 * (16 + 16)


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


@pytest.mark.parametrize("seed", range(20))
def test_launches_are_views_that_keep_to_limits(seed: int) -> None:
    """In every layout, however launches are cut: nothing is copied, and no launch is over a limit that it could keep."""
    space = Space(layouts=("contiguous", "heads_first", "packed", "offset", "expanded_batch", "expanded_heads", "expanded_rows"))
    case, draw = random_case(seed, space), random.Random(seed)
    case = replace(case, num_queries=case.num_keys, query_offset=0, window=None)
    q, n = inputs(case, torch.float32).q, case.num_keys
    documents = tuple((a, b) for a, b in itertools.pairwise(case.bounds or (0, n)) if a < b)
    limits = {name: draw.choice([None, draw.randint(1, most)]) for name, most in (("max_batch", 8), ("max_extent", 400))}
    part_bytes = draw.choice([None, draw.randint(1, 30) * 4 * q.shape[-1]])
    for problem in problems_of(case.pattern, Shape(case.heads, case.kv_heads, (0, n), (0, n), documents, case.is_causal)).problems:
        views = views_of(problem, q, rows_of(q), part_bytes, **limits)
        assert sum(map(len, views)) == len(q) * problem.segments
        for view in views:
            assert view.untyped_storage().data_ptr() == q.untyped_storage().data_ptr()
            assert limits["max_batch"] is None or len(view) <= limits["max_batch"]
            assert part_bytes is None or len(view) == 1 or 4 * view.numel() <= part_bytes
            # what one problem spans by itself cannot be cut, nor grows where all problems lie on one another
            assert limits["max_extent"] is None or extent(view) <= limits["max_extent"] or len(view) == 1 or view.stride(0) == 0


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_one_launch_takes_all_entries_of_a_batch_or_all_segments_of_one(batch: int) -> None:
    """Also where entries are further apart than their rows: then as many launches as the fewer of the two."""
    for x, together in ((torch.zeros(batch, 24, 2, 4), True), (torch.zeros(batch, 25, 2, 4)[:, :24], False)):
        for length in (24, 12, 4):
            shape = Shape(2, 2, (0, 24), (0, 24), ((0, 24),), False)
            (problem,) = problems_of(DilatedPattern((length,), (1,), "zero"), shape).problems
            views = views_of(problem, x, rows_of(x))
            assert len(views) == (1 if together else min(batch, 24 // length)) and sum(map(len, views)) == batch * 24 // length


def test_results_of_keys_keep_to_the_limit_where_queries_are_few() -> None:
    q, k = torch.zeros(8, 1, 2, 4), torch.zeros(8, 64, 2, 4)
    (problem,) = problems_of(DilatedPattern((64,), (1,), "zero"), Shape(2, 2, (63, 64), (0, 64), ((0, 64),), True)).problems
    rows = [rows_of(q, position=63), rows_of(k, keys=True)._replace(tensor=1)]
    (made,) = launches_of([problem], rows, CAPABILITIES, 3 * k[0].nbytes, Options(scale=1.0))
    assert [[len(view) for view in launch.of([q, k])] for launch in made] == [[3, 3], [3, 3], [2, 2]]
    for most, count in ((12, 2), (13, 3)):
        assert problems_at_once(10, [(5, (3,), (1,))], replace(CAPABILITIES, max_extent=most)) == count


# --- 32-bit extents, on tensors without storage ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["heads_first", "packed"])
@pytest.mark.parametrize("which", [0, 3])
def test_request_extent_is_that_of_one_segment_in_any_layout(monkeypatch: pytest.MonkeyPatch, layout: str, which: int) -> None:
    """A kernel of 32-bit offsets is refused by the longest segment of any tensor; with heads first, heads lie N·D apart.

    Spans within 32 bits are told as 0, so that calls of nearly all lengths are one request.
    """
    n, heads, dim = 2**24, 8, 64
    calls = calls_of(monkeypatch, registry, "select")
    plain = torch.empty(1, n, heads, dim, device="meta")
    other = {
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


@pytest.mark.parametrize("padding_first", [False, True])
def test_a_decision_is_that_of_calls_of_one_kind(padding_first: bool) -> None:
    """It is remembered for all lengths, but not for calls with a mask of keys, which other backends take."""
    q = torch.empty(1, 2**17, 8, 64, dtype=torch.bfloat16, device="meta")

    def chosen(has_padding: bool) -> str:
        whole = settings_of_call(branches=((2**17,), (1,), "zero", "all", "mask"))
        return prepare.make_plan(whole, (q, q, q), False, has_padding=has_padding, hardware=EXAMPLES["hopper"]).backend.name

    names = {has_padding: chosen(has_padding) for has_padding in (padding_first, not padding_first)}
    assert registry.get(names[True]).capabilities.key_mask and not registry.get(names[False]).capabilities.key_mask


def test_a_gradient_summed_in_float32_is_not_rounded_before_that_of_lse_is_added() -> None:
    """As backends without a gradient of lse return it for key heads that query heads share."""
    q, k = (torch.zeros(2, 3, heads, 4, dtype=torch.bfloat16) for heads in (2, 1))
    lse = torch.zeros(2, 2, 3)
    share = torch.full(k.shape, 1 + 2**-12)

    class Summing:
        capabilities = replace(CAPABILITIES, lse_grad=False)

        def backward(self, dout: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, ...]:
            return torch.zeros_like(dout), share, share

    summing: Any = Summing()
    _, dk, _ = shares(summing, (q, q, k, k, q, lse), Options(scale=1.0), lse)
    assert torch.equal(dk, 2 * share)


# what each setting is to the choice of a backend: a field of the request, "by name", or "" where every kernel computes it, since it
# changes which problems there are, what is done with their results, or nothing
ASKED_OF_BACKENDS = {
    "scale": "", "dropout_p": "dropout", "query_offset": "", "seq_len": "", "branches": "", "blocks": "blocks", "window": "window",
    "is_causal": "causal", "detached": "", "deterministic": "deterministic", "needs_grad": "needs_grad", "backend": "by name",
    "precision": "precision", "softcap": "softcap", "has_sinks": "", "bias": "bias", "sharding": "",
}  # fmt: skip


def test_no_setting_is_unknown_to_the_choice_of_a_backend() -> None:
    """A setting that the request lacks would be ignored by a backend that cannot do it."""
    assert tuple(ASKED_OF_BACKENDS) == CallSettings._fields
    q = torch.empty(1, 64, 2, 16, device="meta")
    given = {"window": (3, 0), "is_causal": True, "deterministic": True, "softcap": 2.0, "bias": "position", "dropout_p": 0.5}
    plain = prepare.make_plan(settings_of_call(branches=DENSE), (q, q, q), False, hardware=EXAMPLES["cpu"]).request
    for name, value in given.items():
        call = settings_of_call(branches=DENSE, backend="math", **{name: value})
        request = prepare.make_plan(call, (q, q, q), False, hardware=EXAMPLES["cpu"]).request
        field = ASKED_OF_BACKENDS[name]
        assert getattr(request, field) != getattr(plain, field), name
