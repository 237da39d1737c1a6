"""Patterns of one's own: derived from the library's, and defined again under the same name, as notebooks do."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from dilated_attention import block_sparse_attention, decode_attention, ring_block_sparse_attention
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
    Strided,
    with_sparsity,
)
from dilated_attention.pattern.blocks.whole_blocks import WholeBlocks

N, H = 300, 2
Q, K, V = torch.randn(3, 1, N, H, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).unbind()


def by_hand(mask: Tensor) -> Tensor:
    scores = (torch.einsum("bihd,bjhd->bhij", Q, K) / 2).masked_fill(~mask, -torch.inf)
    return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1).nan_to_num(), V)


BASES = [
    LocalWindow(100, block_size=64), Causal(block_size=64), GlobalLocal(90, 70, block_size=64), BigBird(9, 70, 1, block_size=64),
    Strided(2, 1, block_size=64), DilatedBlocks(1, 3, block_size=64), Axial(64, block_size=64), RandomBlocks(0.5, block_size=64),
    Document((130, 170), block_size=64), BlockTensor(torch.eye(5, dtype=torch.bool), block_size=64),
    MaskFunction(lambda batch, head, q_idx, kv_idx: q_idx >= kv_idx, block_size=64), LocalWindow(9) | Causal(), LocalWindow(9) & Causal(),
    *(with_sparsity(0.5, kind, block_size=64) for kind in ("random", "local", "global_local")),
]  # fmt: skip


@pytest.mark.parametrize("base", BASES, ids=lambda base: type(base).__name__)
@pytest.mark.parametrize("is_causal", [False, True])
def test_a_derived_class_is_what_its_own_definition_says(base: BlockPattern, is_causal: bool) -> None:
    class SomeKeys(type(base)):  # type: ignore[misc]
        def allowed(self, queries: Tensor, keys: Tensor, heads: Tensor, num_positions: int) -> Tensor:
            # some pairs of its base, and some that its base does not keep
            return (super().allowed(queries, keys, heads, num_positions) & (keys % 2 == 0)) | (keys == queries - 201)

    pattern = SomeKeys(**base.arguments())
    mask = pattern.dense_mask(N, N, H, is_causal=is_causal)
    for one in (pattern, pattern | pattern, PerHead([pattern] * H)):
        torch.testing.assert_close(block_sparse_attention(Q, K, V, one, is_causal=is_causal), by_hand(mask))
    assert pattern.pairs(N, H, is_causal=is_causal) == int(mask.sum())
    with pytest.raises(ValueError, match="is_prefix_stable"):
        decode_attention(Q[:, :1], K, V, torch.tensor([0]), pattern)


@pytest.mark.parametrize("base", [base for base in BASES if not isinstance(base, RandomBlocks)], ids=lambda base: type(base).__name__)
def test_a_derived_class_whose_heads_differ(base: BlockPattern) -> None:
    class Nearer(type(base)):  # type: ignore[misc]
        def allowed(self, queries: Tensor, keys: Tensor, heads: Tensor, num_positions: int) -> Tensor:
            return super().allowed(queries, keys, heads, num_positions) & (keys >= queries - 4 * (heads + 1))

    # a mask function's own statement is taken, if it makes one
    pattern = Nearer(**{name: value for name, value in base.arguments().items() if name != "per_head"})
    assert pattern.per_head
    mask = pattern.dense_mask(N, N, H)
    assert not torch.equal(*mask)
    torch.testing.assert_close(block_sparse_attention(Q, K, V, pattern), by_hand(mask))


@pytest.mark.parametrize("base", [base for base in BASES if isinstance(base, WholeBlocks)], ids=lambda base: type(base).__name__)
@pytest.mark.parametrize("is_causal", [False, True])
def test_a_derived_class_whose_blocks_differ(base: BlockPattern, is_causal: bool) -> None:
    class SomeBlocks(type(base)):  # type: ignore[misc]
        def keeps(self, grid: Any, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
            return (super().keeps(grid, head, row, column) & (column % 2 == 0)) | (column == row - 3)

    pattern = SomeBlocks(**base.arguments())
    out = block_sparse_attention(Q, K, V, pattern, is_causal=is_causal)
    torch.testing.assert_close(out, by_hand(pattern.dense_mask(N, N, H, is_causal=is_causal)))


@pytest.mark.parametrize("base", BASES, ids=lambda base: type(base).__name__)
@pytest.mark.parametrize("is_causal", [False, True])
def test_a_derived_class_that_lists_more_blocks_than_it_keeps(base: BlockPattern, is_causal: bool) -> None:
    class MoreListed(type(base)):  # type: ignore[misc]
        def columns(self, grid: Any, heads: Any) -> Any:
            return BlockPattern.columns(self, grid, heads)

    pattern = MoreListed(**base.arguments())
    out = block_sparse_attention(Q, K, V, pattern, is_causal=is_causal)
    torch.testing.assert_close(out, by_hand(base.dense_mask(N, N, H, is_causal=is_causal)))


def test_a_field_may_have_any_name_of_ones_own() -> None:
    @dataclass(frozen=True)
    class Parts(BlockPattern):
        parts: int

        def allowed(self, queries: Tensor, keys: Tensor, heads: Tensor, num_positions: int) -> Tensor:
            return queries % self.parts == keys % self.parts

    for pattern in (Parts(3), Parts(3) | LocalWindow(9)):
        torch.testing.assert_close(block_sparse_attention(Q, K, V, pattern), by_hand(pattern.dense_mask(N, N, H)))
        assert not pattern.reads_batch


def test_what_a_class_or_its_own_bases_say_is_kept() -> None:
    class EvenKeys(MaskFunction):
        def mask_mod(self, num_positions: int, num_heads: int, device: torch.device | str = "cpu") -> Any:
            whole = super().mask_mod(num_positions, num_heads, device)
            return lambda batch, head, query, key: whole(batch, head, query, key) & (key % 2 == 0)

    even = EvenKeys(lambda batch, head, q_idx, kv_idx: q_idx >= kv_idx)
    assert even.pairs(10, 1) == 30 == int(even.dense_mask(10, 10, 1).sum())

    class StableBase(BlockPattern):
        is_prefix_stable = True

    class NearOnes(StableBase):
        def allowed(self, queries: Tensor, keys: Tensor, heads: Tensor, num_positions: int) -> Tensor:
            return (queries - keys).abs() < 9

    class NamedWindow(LocalWindow):
        pass

    out = decode_attention(Q[:, 40:41], K[:, :41], V[:, :41], torch.tensor([40]), NearOnes())
    torch.testing.assert_close(out, by_hand(LocalWindow((8, 0)).dense_mask(N, N, H))[:, 40:41])
    assert NamedWindow(9).causal() == LocalWindow((9, 0))


def test_a_derived_window_with_a_reach_of_its_own() -> None:
    class Farther(LocalWindow):
        def reach(self, positions: Tensor, num_positions: int) -> tuple[Tensor, Tensor]:
            low, high = super().reach(positions, num_positions)
            return (low - 5).clamp(min=0), high

    out = block_sparse_attention(Q, K, V, Farther(4), is_causal=True)
    torch.testing.assert_close(out, by_hand(LocalWindow((9, 0)).dense_mask(N, N, H)))


def test_a_class_defined_again_replaces_the_first() -> None:
    def defined(distance: int) -> type[BlockPattern]:
        class Again(WholeBlocks):
            def keeps(self, grid: object, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
                return row - column == distance

        return Again

    first = defined(0)()
    for is_joined in (False, True):
        for distance in (0, 1):
            pattern = defined(distance)()
            pattern = pattern | pattern if is_joined else pattern
            out = block_sparse_attention(Q, K, V, pattern)
            torch.testing.assert_close(out, by_hand(pattern.dense_mask(N, N, H)))
    # those of the first stay what they were
    for old in (first, first | LocalWindow(3), first):
        torch.testing.assert_close(block_sparse_attention(Q, K, V, old), by_hand(old.dense_mask(N, N, H)))
        torch.testing.assert_close(ring_block_sparse_attention(Q, K, V, old), by_hand(old.dense_mask(N, N, H)))
