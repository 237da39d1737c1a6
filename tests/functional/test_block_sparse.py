"""Block masks of flex attention.

Any pattern, alone and beside branches, with any option by any backend and in any form: tests/engine/test_oracle.py.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from dilated_attention import (
    BlockSparseAttention,
    attention_map,
    attention_received,
    block_sparse_attention,
    block_sparse_dilated_attention,
    decode_attention,
)
from dilated_attention.functional import ring_block_sparse_attention
from dilated_attention.pattern import (
    LocalWindow,
    MaskFunction,
    TopBlocks,
    from_block_mask,
    to_block_mask,
)

TOLERANCE = 1e-10


# --- block masks of flex attention ---------------------------------------------------------------------------------------------------


def mask_of(mod: Callable[..., torch.Tensor], length: int, **options: Any) -> BlockMask:
    return create_block_mask(mod, options.pop("B", None), None, length, length, device="cpu", **options)


def within(width: torch.Tensor) -> Callable[..., torch.Tensor]:
    """Causal windows, of each head its own width."""
    return lambda b, h, i, j: (i >= j) & (i - j <= width[h])


def by_flex(x: tuple[torch.Tensor, ...], mask: BlockMask) -> torch.Tensor:
    """FlexAttention on a CPU: it asks mask_mod about every pair of every entry and head, whatever the lists of blocks say."""
    return flex_attention(*(y.transpose(1, 2) for y in x), block_mask=mask, enable_gqa=True).transpose(1, 2)


def qkv(length: int, batch: int = 1) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(length)
    return tuple(torch.randn(batch, length, h, 8, generator=generator, dtype=torch.float64) for h in (4, 2, 2))


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
    mask, x = mask_of(within(torch.tensor(widths)), 512), qkv(512)
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

    mask, both, x = mask_of(same_document, length), mask_of(same_document, length, B=2), qkv(length, batch=2)
    position, whole = torch.full((2,), length - 1), from_block_mask(mask)
    others: dict[str, Callable[..., Any]] = {
        "beside branches": lambda q, k, v, pattern: block_sparse_dilated_attention(q, k, v, [64], [1], pattern),
        "received": lambda q, k, v, pattern: attention_received(q, k, pattern=pattern),
        "decode": lambda q, k, v, pattern: decode_attention(q[:, -1:], k, v, position, MaskFunction(pattern.mask_mod)),
        "within": lambda q, k, v, pattern: block_sparse_attention(q, k, v, TopBlocks(1, within=whole)),
    }
    with pytest.raises(ValueError, match=r"the batch has 2 entries, which the function of .* may tell apart; expected one, of index 0"):
        (ENTRIES | others)[entry](*x, mask)
    first = tuple(y[:1] for y in x)
    if entry in ENTRIES:
        torch.testing.assert_close(ENTRIES[entry](*first, mask), by_flex(first, mask), rtol=0, atol=TOLERANCE)
    if entry != "function":
        return
    # an entry by its number for a whole batch
    each = [block_sparse_attention(*(y[b : b + 1] for y in x), from_block_mask(both, batch=b)) for b in range(2)]
    torch.testing.assert_close(torch.cat(each), by_flex(x, both), rtol=0, atol=TOLERANCE)
    assert block_sparse_attention(*x, from_block_mask(both, batch=1)).shape == x[0].shape


def test_a_list_of_other_blocks_than_head_0_keeps_holds_for_all_heads() -> None:
    length, width = 384, torch.tensor([200, 40, 90, 1])
    counts, indices = torch.tensor([[[1, 1, 2]]]), torch.tensor([[[[0, 0, 0], [1, 0, 0], [0, 2, 0]]]])
    mask = BlockMask.from_kv_blocks(counts.int(), indices.int(), mask_mod=lambda b, h, i, j: (i - j).abs() <= width[h])
    distance = (torch.arange(length)[:, None] - torch.arange(length)).abs()
    listed = torch.tensor([[1, 0, 0], [0, 1, 0], [1, 0, 1]]).bool().repeat_interleave(128, 0).repeat_interleave(128, 1)
    assert torch.equal(from_block_mask(mask).dense_mask(length, length, 4), listed & (distance <= width[:, None, None]))


def test_a_block_mask_written_anew_or_with_another_mask_mod_is_read_anew() -> None:
    x, (mask, other) = qkv(512), (mask_of(within(torch.full((4,), width)), 512) for width in (100, 300))
    before, wanted = block_sparse_attention(*x, mask), block_sparse_attention(*x, other)
    assert not torch.equal(before, wanted)
    for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"):
        getattr(mask, name).data.copy_(getattr(other, name))
    mask.mask_mod = other.mask_mod
    assert torch.equal(block_sparse_attention(*x, mask), wanted)
    x, counts, indices = qkv(200), torch.tensor([[[2, 2]]]), torch.tensor([[[[0, 1], [0, 1]]]])
    mask = BlockMask.from_kv_blocks(counts.int(), indices.int(), mask_mod=lambda b, h, i, j: i >= j, seq_lengths=(200, 200))
    for mask_mod in (mask.mask_mod, lambda b, h, i, j: i <= j):
        mask.mask_mod = mask_mod
        torch.testing.assert_close(block_sparse_attention(*x, mask), by_flex(x, mask), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("index", [(0,), (slice(None), 0), (slice(None), slice(None), 0), (slice(None), slice(None), slice(1, 3))], ids=str)
def test_a_slice_of_a_block_mask_is_refused_with_what_to_do(index: tuple[Any, ...]) -> None:
    mask = mask_of(lambda b, h, i, j: i >= j, 512)
    sliced = mask[index]
    with pytest.raises(ValueError, match=r"512 queries have 4 rows: it is a slice of a BlockMask, .* without mask_mod; convert the whole"):
        block_sparse_attention(*qkv(512), sliced)
    # as torch's message for slices advises
    sliced.mask_mod = mask.mask_mod
    if len(index) < 3:
        assert torch.equal(block_sparse_attention(*qkv(512), sliced), block_sparse_attention(*qkv(512), mask))
        return
    with pytest.raises(ValueError, match=r"blocks for \(1, 1, [12]\) .* without some rows; convert the whole.*query_offset=i \* 128"):
        block_sparse_attention(*qkv(512), sliced)
    # as the message says
    q, k, v = qkv(512)
    rows = slice(128, 384) if isinstance(index[2], slice) else slice(0, 128)
    part = block_sparse_attention(q[:, rows], k, v, mask, query_offset=rows.start)
    torch.testing.assert_close(part, block_sparse_attention(q, k, v, mask)[:, rows], rtol=0, atol=TOLERANCE)


def test_block_masks_that_read_behind_an_end_are_refused() -> None:
    counts, indices = torch.tensor([[[1, 1, 1]]]), torch.tensor([[[[0], [7], [2]]]])
    for mask, text in (
        (mask_of(within(torch.tensor([200, 40])), 300), r"fn reads a tensor behind its end \(index 2 .* an entry for each query head"),
        (
            BlockMask((300, 300), counts, indices, None, None, None, None, None, None),
            "lists blocks of keys up to 7 and its 300 keys have 3, numbered from 0",
        ),
    ):
        with pytest.raises(ValueError, match=text):
            block_sparse_attention(*qkv(300), mask)


READING: dict[str, tuple[Any, tuple[bool, bool]]] = {
    "neither": (lambda b, h, i, j: i >= j, (False, False)),
    "only their form": (lambda b, h, i, j: b.new_ones(()).bool() & (i >= j).expand(h.shape), (False, False)),
    "an index": (lambda b, h, i, j: torch.arange(3)[h] > i - j, (False, True)),
    "both in an index": (lambda b, h, i, j: torch.ones(2, 3).bool()[b, h], (True, True)),
    "a condition": (lambda b, h, i, j: torch.where(b == 0, i >= j, i <= j), (True, False)),
    "into another index": (lambda b, h, i, j: i.add_(h) >= j, (False, True)),
    "its bytes": (lambda b, h, i, j: h.view(torch.bool), (False, True)),
    "out of torch": (lambda b, h, i, j: i - j <= int(h), (True, True)),
    "an error": (lambda b, h, i, j: torch.zeros(0)[h] > 0, (True, True)),
}


@pytest.mark.parametrize("name", READING)
def test_what_a_function_reads(name: str) -> None:
    fn, reads = READING[name]
    pattern = MaskFunction(fn)
    assert (pattern.reads_batch, pattern.per_head) == reads
    assert MaskFunction(fn, per_head=False).per_head is False
