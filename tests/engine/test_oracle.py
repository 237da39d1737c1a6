"""The engine against the definition: the reference against loops, any case by any form against the reference, low precision."""

import itertools
import math
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dilated_attention import DilatedPattern
from dilated_attention import pattern as patterns
from dilated_attention.backends import registry
from dilated_attention.backends.torch_ops import math as math_module
from dilated_attention.backends.torch_ops.math import MathBackend
from dilated_attention.engine.branches import launches, places, run_branches
from dilated_attention.pattern.blocks.base import kinds
from dilated_attention.testing import (
    FLOAT32_TOLERANCE,
    FLOAT64_TOLERANCE,
    HEAD_DIMS,
    LAYOUTS,
    RESULTS,
    Case,
    Space,
    call,
    check_backend,
    inputs,
    low_precision_bound,
    make_tensor,
    max_error,
    oracle,
    plain_attention,
    random_case,
    reference,
    relative_bound,
    results,
)
from tests.helpers.forms import FORMS, cpu_backends
from tests.helpers.fused import run_fused
from tests.helpers.op_settings import calls_of
from tests.helpers.strategies import cases

CPU_BACKENDS = cpu_backends()
HALVES = (torch.bfloat16, torch.float16)
SMALL = Space(bias=True, head_dims=(1, 2, 3), max_length=11, heads_per_kv=(1, 2), layouts=("contiguous",))


# --- the reference against loops over single pairs ---------------------------------------------------------------------------


def branch_multiplicity(case: Case, branch: int, head: int, i: int, j: int) -> int:
    """Whether a branch joins query position i and key position j, by listing segments position by position."""
    length, rate = case.pattern.segment_lengths[branch], case.pattern.dilation_rates[branch]
    if case.pattern.branch_heads == "split":
        groups = case.pattern.num_branches
        sizes = [case.heads // groups + (1 if g < case.heads % groups else 0) for g in range(groups)]
        if not sum(sizes[:branch]) <= head < sum(sizes[: branch + 1]):
            return 0
        offset = branch % rate
    elif case.pattern.head_offsets == "cyclic":
        offset = head % rate
    elif case.pattern.head_offsets == "blocked":
        offset = head // math.ceil(case.heads / rate)
    elif case.pattern.head_offsets == "zero":
        offset = 0
    else:
        offset = case.pattern.head_offsets[branch][head]
    start, end = document_of(case, i)
    taken = [p for p in range(start, end) if (p - start) // length == (i - start) // length and (p - start) % length % rate == offset]
    return int(i in taken and j in taken)


def document_of(case: Case, i: int) -> tuple[int, int]:
    bounds = case.bounds or (0, case.num_keys)
    return next((a, b) for a, b in itertools.pairwise(bounds) if a <= i < b)


def zero_keys(case: Case, branch: int, head: int, i: int) -> int:
    """Places of TorchScale's padded segment that hold no real key, for a query that the branch takes."""
    if case.pattern.tail == "mask" or case.is_causal or not branch_multiplicity(case, branch, head, i, i):
        return 0
    start, end = document_of(case, i)
    places = math.ceil(min(case.pattern.segment_lengths[branch], end - start) / case.pattern.dilation_rates[branch])
    return places - sum(branch_multiplicity(case, branch, head, i, j) for j in range(start, end))


def multiplicities_by_loops(case: Case, padding: torch.Tensor | None, device: Any = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """How often each branch counts each (query, key) pair, and how many zero keys it has, one after the other."""
    G, B, H, Nq, Nk = case.pattern.num_branches, case.batch, case.heads, case.num_queries, case.num_keys
    m, z = torch.zeros(G, B, H, Nq, Nk, device=device), torch.zeros(G, 1, H, Nq, device=device)
    left, right = case.window or (None, None)
    for g, h, i in itertools.product(range(G), range(H), range(Nq)):
        position = case.query_offset + i
        z[g, 0, h, i] = zero_keys(case, g, h, position)
        for j in range(Nk):
            blocked = case.is_causal and j > position
            blocked |= left is not None and j < position - left
            blocked |= right is not None and j > position + right
            times = 0 if blocked else branch_multiplicity(case, g, h, position, j)
            for b in range(B):
                m[g, b, h, i, j] = 0 if padding is not None and padding[b, j] else times
    return m, z


def reference_equals_plain_attention(case: Case) -> None:
    x = inputs(case, torch.float64)
    found, truth = results(plain_attention, case, x), results(reference, case, x)
    for name in truth:
        assert max_error(found[name], truth[name]) <= 1e-12 * max(1.0, float(case.num_queries)), (name, case)


@pytest.mark.parametrize("group", range(5))
def test_reference_equals_loops(group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Softmax attention in plain torch, differentiated by torch, over the keys that loops count."""
    monkeypatch.setattr(oracle, "multiplicities", multiplicities_by_loops)
    for seed in range(group * 36, (group + 1) * 36):
        reference_equals_plain_attention(random_case(seed, SMALL))


def test_plain_attention_is_the_reference() -> None:
    """``testing.plain_attention`` stands in for the reference where N is large: the same function, vectorised."""
    for seed in range(1000, 1060):
        reference_equals_plain_attention(random_case(seed, Space(softcap=True, bias=True)))


# --- any case, by any backend, runner and form -----------------------------------------------------------------------------------

ANY = Space(softcap=True, bias=True, head_dims=(*HEAD_DIMS, 111, 200, 256))
BLOCKS = Space(softcap=True, bias=True, blocks=True, head_dims=(1, 2, 3, 4), max_length=300)


def check(case: Case, form: str = "eager", backend: str = "auto", dtype: torch.dtype = torch.float64) -> None:
    if backend == "sdpa_cpu":
        case = replace(case, dropout_p=0.0, softcap=None, bias="none")
    function, fitting = FORMS[form]
    case = fitting(case)
    x, tolerance = inputs(case, dtype), FLOAT64_TOLERANCE if dtype is torch.float64 else FLOAT32_TOLERANCE
    before = [y.clone() for y in (x.q, x.k, x.v, x.dout)]
    found, truth = results(function, case, x, backend=backend), results(plain_attention, case, x, torch.float64)
    assert all(map(torch.equal, (x.q, x.k, x.v, x.dout), before)), "inputs are written to"
    assert form != "eager" or (found["out"].is_contiguous() and found["lse"].is_contiguous())
    # rows without keys and keys without rows are exactly 0
    empty, unseen = (truth["lse"] == -torch.inf).transpose(1, 2), (truth["dv"] == 0).all(-1) & (case.dropout_p == 0)
    assert not any(found[name][rows].any() for name, rows in (("out", empty), ("dq", empty), ("dk", unseen), ("dv", unseen))), case
    for name in truth:
        assert found[name].dtype is dtype or name in ("dslopes", "dsinks"), name
        bound = relative_bound(truth[name], tolerance, case.dropout_p) * x.reach(name)
        assert max_error(found[name], truth[name]) <= bound, (name, case)


@pytest.mark.parametrize("form", [form for form in FORMS if form != "compiled"])
@pytest.mark.parametrize("space", [ANY, BLOCKS], ids=["branches", "blocks"])
@given(data=st.data())
@settings(max_examples=36)
def test_any_case_in_any_form_by_any_backend(space: Space, form: str, data: st.DataObject) -> None:
    backend, dtype = (data.draw(st.sampled_from(kinds)) for kinds in (["auto", *CPU_BACKENDS], [torch.float64, torch.float32]))
    check(data.draw(cases(space)), form, backend, dtype)


COMPILED = [random_case(seed, space) for space in (ANY, BLOCKS) for seed in (*range(10), 35)]


@pytest.mark.filterwarnings("error:Dynamo detected a call to a `functools.lru_cache`")
@pytest.mark.parametrize("index", range(len(COMPILED)))
def test_any_case_compiled(index: int) -> None:
    check(COMPILED[index], "compiled")


# how the passes of branches run where one does not say so: (bytes at a time, what math is changed to)
RUNNERS: dict[str, tuple[int, dict[str, Any]]] = {
    "whole": (2**40, {}),
    "chunks": (2**13, {}),
    "smallest chunks": (1, {}),
    "results written where told": (2**40, {"writes_views": True, "max_batch": 2}),
    "no gradient of lse": (2**40, {"lse_grad": False}),
    "launches cut by extent": (2**40, {"max_extent": 700}),
}


# chunks are of one merge
WAYS = [(runner, way) for runner in RUNNERS for way in ("one merge", *(("problems", "blocks") if "chunks" not in runner else ()))]


@pytest.mark.parametrize(("runner", "way"), WAYS)
def test_any_case_by_any_runner(runner: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every branch to its places and one merge, in chunks of any size, with the torch twin; problem by problem; or lists of blocks."""
    fused = way == "one merge"
    budget, changes = RUNNERS[runner]
    monkeypatch.setattr(places, "transient_budget", lambda _, is_backward=False: budget)
    monkeypatch.setitem(launches.PART_BYTES, "cuda", 0)
    monkeypatch.setattr(registry.get("math"), "capabilities", replace(registry.get("math").capabilities, **changes))
    # the limit on one segment's extent is the choice of a backend; here the cutting alone is looked at
    monkeypatch.setattr(type(registry.get("math")), "reasons_against", lambda self, request: [])
    if "max_extent" in changes:
        monkeypatch.setitem(launches.PART_BYTES, "cpu", 2**10)
        monkeypatch.setattr(math_module, "_BLOCK_BYTES", 2**10)
    if fused:
        run_fused(monkeypatch)
    calls = calls_of(monkeypatch, run_branches, "_forward", "_backward")
    for seed in range(500, 512 if way == "blocks" else 524):
        # each launch of a bias has places of its own: problem by problem
        case = random_case(seed, BLOCKS if way == "blocks" else replace(ANY, bias=not fused))
        if seed % 4:
            # of these two kinds few are drawn, and a runner of whole calls takes no other
            case = replace(case, num_queries=case.num_keys, query_offset=0, bounds=None, window=None)
        if seed % 8 == 1 and way != "blocks":
            # a chunk may end in a segment that zero keys fill up
            case = replace(case, pattern=DilatedPattern((4, 8), (1, 3), "blocked", tail="zero_keys"), is_causal=False)
        if seed % 3 == 0 and way != "blocks":
            case = replace(case, mixture_grad="detached", lse_grad=False, sinks=False)
        elif runner == "no gradient of lse":
            case = replace(case, lse_grad=True, mixture_grad="exact", dropout_p=0.5 * (seed % 2))
        check(case, backend="math")
    if fused:
        assert {"_forward", "_backward"} <= {name for name, _ in calls}
        # merged onto the result of the short segments, where chunks of all branches at once would not fit
        later = {name for name, (_, part, *_) in calls if part.stage.merged is not None}
        assert later == ({"_forward", "_backward"} if "chunks" in runner else set())


def kinds_in(pattern: Any) -> set[type]:
    return {type(pattern)}.union(*(kinds_in(part) for part in getattr(pattern, "parts", ())))


def test_random_cases_reach_every_option() -> None:
    """The draws above are worth what they cover."""
    drawn, blocks = [random_case(seed) for seed in range(600)], [random_case(seed, BLOCKS) for seed in range(500)]
    for some in ([*drawn, *blocks], COMPILED):
        for field in fields(Case):
            assert len({str(getattr(case, field.name)) for case in some}) > 1, field.name
    assert {case.layouts[0] for case in drawn} == set(LAYOUTS) and {case.padding for case in drawn} == {"none", "some", "row", "all"}
    for told in (
        lambda case: case.bounds and any(a == b for a, b in itertools.pairwise(case.bounds)),
        lambda case: case.query_offset + case.num_queries < case.num_keys,
        lambda case: any(w % r for w, r in case.pattern.branches),
        lambda case: any(case.heads < r for r in case.pattern.dilation_rates),
        lambda case: 1 < case.kv_heads < case.heads,
        lambda case: case.pattern.branch_heads == "split" and case.heads < case.pattern.num_branches,
        lambda case: case.pattern.tail == "zero_keys" and not case.is_causal,
        lambda case: case.mixture_grad == "detached" and case.dropout_p,
        lambda case: case.window and case.bounds,
        lambda case: case.is_causal and case.padding == "some" and case.query_offset,
    ):
        assert sum(bool(told(case)) for case in drawn) >= 3
    # each layout is what it says: strides of (2, 5, 4, 8)
    strides = [make_tensor((2, 5, 4, 8), layout, torch.float32, "cpu", torch.Generator()).stride() for layout in LAYOUTS]
    assert len(set(strides)) == len(LAYOUTS) - 1, "one is contiguous, at an offset"
    exported = {kind for name, kind in kinds().items() if name in patterns.__all__}
    # what a choice made is tested with it
    assert exported - {patterns.ChosenBlocks} <= set().union(*(kinds_in(case.pattern) for case in blocks))


def self_attention(n: int, pattern: DilatedPattern, heads: int = 2, kv_heads: int | None = None, **options: Any) -> Case:
    return Case(**{"pattern": pattern, "num_queries": n, "num_keys": n, "heads": heads, "kv_heads": kv_heads or heads} | options)


WHOLE = DilatedPattern((2**62,), (1,), "zero")
LONG = [
    self_attention(1100, DilatedPattern((64, 256, 800), (1, 3, 7), "blocked"), 4, 2, is_causal=True),
    self_attention(501, DilatedPattern((100, 399), (6, 10), tail="zero_keys"), 12, mixture_grad="detached"),
    self_attention(1400, DilatedPattern((37, 512), (5, 16), branch_heads="split"), 3, 1, num_queries=700, query_offset=650, is_causal=True),
    self_attention(1100, WHOLE, 2, 1, window=(70, 5), lse_grad=True),
    self_attention(1200, WHOLE, 2, 1, num_queries=1100, window=(600, None), query_offset=60, padding="some"),
    self_attention(1100, DilatedPattern((128, 600), (2, 5)), 2, 1, bounds=(0, 1, 130, 130, 1099, 1100), padding="some"),
]
# each failed once, or shrinking of a planted fault arrived at it
PATTERN = DilatedPattern((4, 16), (1, 3))
REGRESSIONS = [
    # D = 1 with a last stride ≠ 1: contiguous() is no copy there
    self_attention(5, PATTERN, head_dim=1, layouts=("transposed_dim",) * 4),
    self_attention(1, PATTERN, 1, head_dim=1, layouts=("strided_dim", "transposed_dim", "strided_dim", "strided_dim")),
    # heads whose offsets grow, but not evenly, are not one view
    self_attention(20, DilatedPattern((20,), (5,), ((0, 1, 3, 4),)), 4),
    # strides that no 64-bit integer holds, of a step that is never taken
    self_attention(9, DilatedPattern((2**62, 2**62), (2**62, 2**61)), 3),
]


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("index", range(len(LONG) + len(REGRESSIONS)))
def test_chosen_cases(index: int, backend: str) -> None:
    """Lengths at which windows are cut into blocks, and rows of the math backend into chunks; and what failed before."""
    check([*LONG, *REGRESSIONS][index], backend=backend, dtype=torch.float32 if index < len(LONG) else torch.float64)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_gradient_of_lse_is_not_rounded_to_half_precision(dtype: torch.dtype) -> None:
    """A dlse midway between two numbers of the inputs' dtype: no bias in dq, whose own rounding is to both sides."""
    case = self_attention(64, WHOLE, head_dim=16, lse_grad=True)
    x = inputs(case, dtype)
    step = torch.finfo(dtype).eps / 2
    x = replace(x, dout=torch.zeros_like(x.dout), dlse=torch.full_like(x.dlse, 1 + step))
    found, truth = results(call, case, x, backend="sdpa_cpu")["dq"].double(), results(reference, case, x)["dq"].double()
    assert abs(float((found * truth).sum() / truth.square().sum()) - 1) <= step / 4


def test_parts_merge_in_float32() -> None:
    """bfloat16 branches: each is rounded once by its kernel and their merge once at the end, however many there are."""
    lengths = tuple(range(3, 40, 3))
    case = self_attention(120, DilatedPattern(lengths, (1,) * len(lengths)), batch=2)
    x = inputs(case, torch.bfloat16)
    # values of one binade: half a rounding of any of them, and of any mean of them, is eps / 2
    x = replace(x, v=x.v.float().sigmoid().add(0.999).to(torch.bfloat16))
    assert float(x.v.min()) >= 1 and float(x.v.max()) <= 2
    error = max_error(call(case, x, x.q, x.k, x.v, backend="math")[0], reference(case, x, x.q, x.k, x.v)[0])
    assert error <= torch.finfo(torch.bfloat16).eps * 1.001


# --- low precision ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("seed", "blocks"), [*((seed, False) for seed in range(0, 300, 50)), (300, True)])
@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_low_precision_keeps_to_twice_the_error_of_plain_softmax(backend: str, seed: int, blocks: bool) -> None:
    space = Space.of_backend(backend, blocks=blocks, max_length=300 if blocks else 70)
    report = check_backend(backend, device="cpu", dtypes=HALVES, cases=25, seed=seed, space=space)
    assert report.cases + report.refused == 25 and report.cases >= 20
    assert set(report.worst) == {*RESULTS, "dsinks", *(["dslopes"] if registry.get(backend).capabilities.bias else [])}


# faults that show in some calls alone: when, by q, k, whether the call is causal, and the rows of its lists of blocks
_RARE: dict[str, Callable[[Any, Any, bool, int], bool]] = {
    "long": lambda q, k, causal, rows: causal and q.shape[1] > 1000,
    "grouped": lambda q, k, causal, rows: q.shape[2] > k.shape[2] and q.shape[1] > 100,
    "batch": lambda q, k, causal, rows: q.shape[0] > 1 and q.shape[1] > 100,
    "lists": lambda q, k, causal, rows: rows > 5,
}


class _Broken(MathBackend):
    """A backend with a fault that ``check_backend`` must see."""

    name = "broken"

    def __init__(self, fault: str) -> None:
        self.fault = fault
        self.capabilities = replace(MathBackend.capabilities, dtypes=frozenset()) if fault == "refuses" else MathBackend.capabilities

    def spoilt(self, **results: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if self.fault == "piece" and "out" in results:
            # wrong in the second piece of 256 rows alone
            results["out"][:, 256:] *= 1.05
        return tuple(x * (1.02 if name == self.fault else 1) for name, x in results.items())

    def forward(self, q: Any, k: Any, v: Any, options: Any, keys: Any = None, **views: Any) -> Any:
        results = dict(zip(("out", "lse"), super().forward(q, k, v, options, keys, **views), strict=True))
        if self.fault in _RARE and _RARE[self.fault](q, k, options.causal, getattr(keys, "num_rows", 0)):
            results["out"] = results["out"] * 1.05
        return self.spoilt(**results)

    def backward(self, *args: Any, **kwargs: Any) -> Any:
        return self.spoilt(**dict(zip(("dq", "dk", "dv"), super().backward(*args, **kwargs), strict=True)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("fault", ["none", "out", "piece", "lse", "dq", "dk", "dv", "refuses", *_RARE])
def test_check_backend_sees_a_fault(monkeypatch: pytest.MonkeyPatch, fault: str, dtype: torch.dtype) -> None:
    monkeypatch.setattr(registry, "_backends", {**registry._backends, "broken": _Broken(fault)})
    monkeypatch.setattr(registry, "cached", {})
    if fault == "none":
        # of which every kind is one, also those of many rows
        assert check_backend("broken", device="cpu", dtypes=[dtype], cases=25).cases == 25
    elif fault in ("piece", *_RARE):
        with pytest.raises(AssertionError, match=r"E\((out|d)"):
            check_backend("broken", device="cpu", dtypes=[dtype], cases=10)
    else:
        expected = {"out": "out|d", "lse": "lse|out|d", "refuses": "refused"}.get(fault, fault)
        with pytest.raises(AssertionError, match=f"refused|E\\(({expected})"):
            check_backend("broken", device="cpu", dtypes=[dtype], cases=40)


def test_max_error() -> None:
    inf, nan = math.inf, math.nan
    for x, y, error in (([1.0, -inf], [1.5, -inf], 0.5), ([nan], [1.0], inf), ([1.0], [inf], inf), ([inf], [-inf], inf), ([], [], 0.0)):
        assert max_error(torch.tensor(x), torch.tensor(y)) == error
    with pytest.raises(AssertionError, match="shapes differ"):
        max_error(torch.zeros(2), torch.zeros(3))


def test_low_precision_bound() -> None:
    truth = torch.tensor([2.0, -4.0], dtype=torch.float64)
    plain = truth + torch.tensor([0.25, 0.0])
    assert low_precision_bound(plain, truth, torch.bfloat16) == pytest.approx(0.5 + 4 * 2**-7 + 4e-5)
    assert relative_bound(truth, 1e-3) == 4e-3 and relative_bound(truth / 100, 1e-3) == 1e-3
