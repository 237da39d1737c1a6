"""Chunks of branches with one merge each: they partition a call, in bounded memory. What they compute: test_oracle.py."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dilated_attention import DilatedPattern
from dilated_attention.engine.branches import branch_buffers


@given(data=st.data())
@settings(max_examples=200)
def test_chunks_partition_the_call_and_begin_with_segments(data: st.DataObject) -> None:
    kv_heads, ratio = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    heads, n = kv_heads * ratio, data.draw(st.integers(1, 300))
    lengths = tuple(data.draw(st.lists(st.sampled_from([1, 2, 3, 4, 8, 12, 16, 24, 48, 1000]), min_size=1, max_size=3)))
    rates = tuple(data.draw(st.integers(1, w)) for w in lengths)
    pattern = DilatedPattern(lengths, rates, "cyclic", "all", data.draw(st.sampled_from(["mask", "zero_keys"])))
    budget = data.draw(st.integers(1, 5000))
    cut = branch_buffers.make_chunk_sizes(pattern, branch_buffers.CallSizes(2, n, heads, kv_heads, 1, 1), 1, budget)
    taken = torch.zeros(n, heads, dtype=torch.int64)
    pieces = list(cut.chunks(heads, n))
    for chunk in pieces:
        taken[slice(*chunk.positions), slice(*chunk.heads)] += 1
        assert chunk.heads[0] % ratio == 0
        assert chunk.positions[0] == 0 or all(chunk.positions[0] % w == 0 for w in lengths)
    assert bool((taken == 1).all())
    if len(pieces) > 1:
        rows = [
            branch_buffers.make_branch_buffers(pattern, heads, c.heads, c.positions[1] - c.positions[0], False).rows(with_direct=False)
            * 2
            * (c.heads[1] - c.heads[0])
            for c in pieces
        ]
        smallest = cut.heads == ratio and (cut.positions == n or cut.positions <= max(lengths) * 12)
        assert smallest or max(rows) * branch_buffers.CONCURRENT_CHUNKS <= budget


def test_a_million_positions_of_longnet_keep_to_the_budget() -> None:
    """16 heads of 128, the paper's geometric branches: parts of the forward within 5 % of q, k and v, of the backward within 1 GiB."""
    n, pattern = 2**20, DilatedPattern([2048 << i for i in range(5)], [1 << i for i in range(5)])
    sizes = branch_buffers.CallSizes(1, n, 16, 16, 128, 2)
    for cut, row_bytes, limit in (
        (branch_buffers.chunk_sizes(pattern, sizes, False), 260, sizes.input_bytes // 20),
        (branch_buffers.chunk_sizes(pattern, sizes, True), 768, 2**30),
    ):
        layers = branch_buffers.make_branch_buffers(pattern, 16, (0, cut.heads), cut.positions, False)
        assert branch_buffers.CONCURRENT_CHUNKS * cut.heads * layers.rows(with_direct=False) * row_bytes <= limit
        assert cut.positions % 32768 == 0
