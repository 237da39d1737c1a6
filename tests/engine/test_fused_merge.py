"""Layers, chunks and the fused merge: the same function as problem by problem, in bounded memory. On a CPU, with the torch twin."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dilated_attention import DilatedPattern, dilated_attention
from dilated_attention.backends import Options, registry
from dilated_attention.engine.branches import branch_buffers, chunking, launches
from dilated_attention.engine.branches.problems import Shape, problems_of
from dilated_attention.testing import Space, random_case
from tests.helpers import merge_twin

SPACE = Space(window=False, dropout=False, max_length=60)


# --- chunks ------------------------------------------------------------------------------------------------------------------------------


@given(data=st.data())
@settings(max_examples=200)
def test_chunks_partition_the_call_and_begin_with_segments(data: st.DataObject) -> None:
    kv_heads, ratio = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    heads, n = kv_heads * ratio, data.draw(st.integers(1, 300))
    lengths = tuple(data.draw(st.lists(st.sampled_from([1, 2, 3, 4, 8, 12, 16, 24, 48, 1000]), min_size=1, max_size=3)))
    rates = tuple(data.draw(st.integers(1, w)) for w in lengths)
    pattern = DilatedPattern(lengths, rates, "cyclic", "all", data.draw(st.sampled_from(["mask", "zero_keys"])))
    budget = data.draw(st.integers(1, 5000))
    cut = chunking.make_chunk_sizes(pattern, chunking.CallSizes(2, n, heads, kv_heads, 1, 1), 1, budget)
    taken = torch.zeros(n, heads, dtype=torch.int64)
    pieces = list(cut.chunks(heads, n))
    for chunk in pieces:
        taken[slice(*chunk.positions), slice(*chunk.heads)] += 1
        assert chunk.heads[0] % ratio == 0
        assert chunk.positions[0] == 0 or all(chunk.positions[0] % w == 0 for w in lengths)
    assert bool((taken == 1).all())
    if len(pieces) > 1:
        assert cut.concurrent == chunking.CONCURRENT_CHUNKS
        rows = [
            branch_buffers.make_branch_buffers(pattern, heads, c.heads, c.positions[1] - c.positions[0], False).rows(with_direct=False)
            * 2
            * (c.heads[1] - c.heads[0])
            for c in pieces
        ]
        smallest = cut.heads == ratio and (cut.positions == n or cut.positions <= max(lengths) * 12)
        assert smallest or max(rows) * cut.concurrent <= budget


def test_budget_is_half_a_gibibyte_one_in_the_backward_or_a_twentieth() -> None:
    for is_backward in (False, True):
        assert chunking.transient_budget(2**30, is_backward=is_backward) == (2**30 if is_backward else 2**29)
        assert chunking.transient_budget(2**40, is_backward=is_backward) == 2**40 // 20


def test_a_million_positions_of_longnet_keep_to_the_budget() -> None:
    """16 heads of 128, the paper's geometric branches: parts of the forward within 5 % of q, k and v, of the backward within 1 GiB."""
    n, pattern = 2**20, DilatedPattern([2048 << i for i in range(5)], [1 << i for i in range(5)])
    sizes = chunking.CallSizes(1, n, 16, 16, 128, 2)
    for cut, row_bytes, limit in (
        (chunking.forward_chunk_sizes(pattern, sizes), 260, chunking.transient_budget(sizes.input_bytes)),
        (chunking.backward_chunk_sizes(pattern, sizes), 768, chunking.transient_budget(sizes.input_bytes, is_backward=True)),
    ):
        layers = branch_buffers.make_branch_buffers(pattern, 16, (0, cut.heads), cut.positions, False)
        assert cut.concurrent * cut.heads * layers.rows(with_direct=False) * row_bytes <= limit
        assert cut.positions % 32768 == 0


# --- layers ------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(40))
def test_every_row_of_a_problem_has_the_place_that_the_merge_reads(seed: int) -> None:
    """Written through ``BranchBuffers.view``, read by position: the same rows, and no row written twice."""
    case = random_case(seed + 90, SPACE)
    n, heads = case.num_keys, case.heads
    if not n:
        return
    layers = branch_buffers.make_branch_buffers(case.pattern, heads, (0, heads), n, False)
    counts = torch.zeros(heads * layers.rows(with_direct=True))
    views = merge_twin.split(layers, counts, 1, head_dim=1, with_direct=True)
    label = torch.arange(n * heads, dtype=torch.float32).view(1, n, heads, 1) + 1
    for problem in problems_of(case.pattern, Shape(heads, heads, (0, n), (0, n), ((0, n),), case.is_causal)).problems:
        place = functools.partial(layers.view, index=1, batch=1, head_dim=1, with_direct=True)
        rows = [
            launches.Rows(0, False, label.shape, label.stride(), place=None),
            launches.Rows(0, False, label.shape, label.stride(), place=place),
        ]
        (made,) = launches.launches_of([problem], rows, registry.get("math").capabilities, None, Options(scale=1.0))
        for launch in made:
            source, part = launch.of([label, counts])
            assert part.shape == source.shape and not part.any()
            part.copy_(source)
    m = [case.pattern.branches, case.pattern.offsets(heads)]
    for branch, ((w, r), offsets) in enumerate(zip(*m, strict=True)):
        layer = views[branch]
        assert layer is not None
        found = merge_twin.at_positions(layers, branch, layer, 0.0)[0, :, :, 0]
        for position, head in itertools.product(range(n), range(heads)):
            taken = offsets[head] >= 0 and position % w % r == offsets[head]
            assert found[position, head] == (label[0, position, head, 0] if taken else 0)


def test_launches_of_equal_shapes_and_strides_have_equal_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """What recorded launches are found by: two layers of one model share them, other lengths do not, and nothing is kept for ever."""
    keys: list[object] = []
    math = registry.get("math")
    original = type(math).forward
    monkeypatch.setattr(type(math), "forward", lambda *args, **views: (keys.append(args[4].geometry), original(*args, **views))[1])
    found = []
    for n in (64, 64, 72):
        keys.clear()
        registry.cached.clear()
        q, k, v = torch.randn(3, 1, n, 4, 8)
        dilated_attention(q, k, v, [16, 32], [1, 2], backend="math")
        found.append(list(keys))
    assert found[0] and found[0] == found[1]
    assert [hash(key) for key in found[0]] == [hash(key) for key in found[1]]
    assert set(found[2]) - set(found[0]), "a shorter last segment is another launch"
    monkeypatch.setattr(launches, "_MOST_GEOMETRIES", 0)
    registry.cached.clear()
    dilated_attention(q, k, v, [16, 32], [1, 2], backend="math")
    assert len(launches._geometries) == 1
