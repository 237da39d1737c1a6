"""Bounds of packed documents are read once a tensor: what is kept of them, and when it is read anew."""

from __future__ import annotations

import gc

import pytest
import torch

from dilated_attention import dilated_attention
from dilated_attention.engine.ops import prepare, resolve

N = 24


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Bounds each time that they are read."""
    found, read = [], resolve.document_ranges

    def counted(cu_seqlens: torch.Tensor, num_keys: int) -> tuple[tuple[int, int], ...]:
        found.append(cu_seqlens.tolist())
        return read(cu_seqlens, num_keys)

    monkeypatch.setattr(resolve, "document_ranges", counted)
    return found


def call(cu_seqlens: torch.Tensor, rates: tuple[int, int] = (1, 2)) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, N, 2, 8, generator=generator).requires_grad_() for _ in range(3))
    out = dilated_attention(q, k, v, [4, 8], rates, cu_seqlens=cu_seqlens)
    return torch.cat([out, *torch.autograd.grad(out.square().sum(), (q, k, v))]).detach()


def bounds(*values: int) -> torch.Tensor:
    return torch.tensor([0, *values, N], dtype=torch.int32)


def test_one_tensor_is_read_once_by_calls_of_a_kind(reads: list[list[int]]) -> None:
    one = bounds(5, 11)
    first = call(one)
    assert reads == [[0, 5, 11, N]]
    assert torch.equal(call(one), first)
    assert len(reads) == 1
    # another kind of call has records of its own; an equal tensor may be changed later
    call(one, rates=(1, 4))
    assert torch.equal(call(one.clone()), first)
    assert len(reads) == 3


def test_a_change_in_place_is_seen(reads: list[list[int]]) -> None:
    one = bounds(5, 11)
    before = call(one)
    one[1] = 7
    after = call(one)
    assert reads == [[0, 5, 11, N], [0, 7, 11, N]]
    assert not torch.equal(before, after) and torch.equal(after, call(bounds(7, 11)))


def test_a_tensor_of_inference_mode_counts_no_changes_and_is_read_each_time(reads: list[list[int]]) -> None:
    x = torch.randn(1, N, 2, 8)

    def forward(cu_seqlens: torch.Tensor) -> torch.Tensor:
        return dilated_attention(x, x, x, [4, 8], [1, 2], cu_seqlens=cu_seqlens)  # type: ignore[no-any-return]

    with torch.inference_mode():
        one = bounds(5, 11)
        before = forward(one)
        assert torch.equal(forward(one), before)
        one[1] = 7
        assert torch.equal(forward(one), forward(bounds(7, 11)))
    assert reads == [[0, 5, 11, N]] * 2 + [[0, 7, 11, N]] * 2


def test_a_new_tensor_in_the_place_of_an_old_one_is_read(reads: list[list[int]]) -> None:
    """A tensor's id is free again when it is gone; the record knows whose it was."""
    middles = range(1, N, 3)
    wanted = {middle: call(bounds(middle)) for middle in middles}
    del reads[:]
    # what other tests left alive is not looked through once a tensor
    gc.collect()
    gc.freeze()
    for middle in middles:
        one = bounds(middle)
        assert torch.equal(call(one), wanted[middle])
        del one
        gc.collect()
    gc.unfreeze()
    assert [x[1] for x in reads] == list(middles)


def test_more_tensors_than_are_kept(reads: list[list[int]]) -> None:
    some = [bounds(middle) for middle in range(1, 12)]
    first = [call(x) for x in some]
    assert all(torch.equal(call(x), y) for x, y in zip(some, first, strict=True))
    assert len(reads) >= len(some)


@pytest.mark.parametrize("wrong", [[1, N], [0, N - 1], [0, 9, 5, N], [0, N + 1]])
def test_bounds_that_bound_nothing_are_refused_each_time(wrong: list[int]) -> None:
    one = torch.tensor(wrong, dtype=torch.int32)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"expected bounds that start at 0, never decrease and end at N = 24"):
            call(one)
    good = bounds(9)
    call(good)
    good[-1] = N - 1
    with pytest.raises(ValueError, match="cu_seqlens is"):
        call(good)


class Counted(torch.Tensor):
    """Counts how often its values are read."""

    reads = 0

    def tolist(self) -> list[int]:
        Counted.reads += 1
        return self.as_subclass(torch.Tensor).tolist()


def test_rings_read_the_bounds_of_a_version_once() -> None:
    """Rings read them in every pass, without a record for each tensor."""
    x, before = bounds(7, 15).as_subclass(Counted), Counted.reads
    assert [prepare.bounds_of(x) for _ in range(3)] == [(0, 7, 15, N)] * 3
    assert Counted.reads == before + 1
    x[1] = 9
    assert prepare.document_ranges(x, N) == ((0, 9), (9, 15), (15, N))
    assert Counted.reads == before + 2
    with torch.inference_mode():
        y = bounds(5).as_subclass(Counted)
    assert prepare.bounds_of(y) == prepare.bounds_of(y) == (0, 5, N)
    assert Counted.reads == before + 4


def test_few_tensors_of_bounds_are_remembered() -> None:
    kept = [bounds(1 + i % 20) for i in range(prepare.MOST_BOUNDS + 5)]
    assert all(prepare.bounds_of(x) == tuple(x.tolist()) for x in kept)
    assert len(prepare._bounds) <= prepare.MOST_BOUNDS
