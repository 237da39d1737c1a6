"""Packs the key padding mask in the order in which each branch reads it: 32 keys per word, so a kernel can test many keys at once.

A *class* of a branch with rate r is a set of positions that are equal mod r. The selected keys of a segment are neighbours in their class,
whatever the segment's first position and the head's offset. A branch's words are stored class by class, ⌈⌈N/r⌉/32⌉ + 2 words each; bit
t mod 32 of word t div 32 is set where position class + r·t is padded. The last two words of a class are zeros, so that reading three words
from any key on stays in bounds.
"""

# mypy does not know the types of kernels
# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl

# words per program
WORDS = 64


def words_of(rate: int, num_keys: int) -> int:
    """Returns the number of words of a branch."""
    return rate * (((num_keys + rate - 1) // rate + 31) // 32 + 2)


@triton.jit(do_not_specialize=["pad_b", "num_branches", "num_keys", "words", "blocks"])
def pack_kernel(padding_ptr, rates_ptr, words_ptr, pad_b, num_branches, num_keys, words, blocks, WORDS: tl.constexpr):
    """Packs WORDS words of one branch and batch entry. ``words`` is the stride between branches: the words of the longest branch."""
    pid = tl.program_id(0)
    block, row = pid % blocks, pid // blocks
    branch, batch = row % num_branches, (row // num_branches).to(tl.int64)
    rate = tl.load(rates_ptr + branch)
    of_class = ((num_keys + rate - 1) // rate + 31) // 32 + 2
    index = block * WORDS + tl.arange(0, WORDS)
    bit = tl.arange(0, 32)
    # in 64 bits, so that positions beyond the last class do not wrap
    place = (index % of_class).to(tl.int64)[:, None] * 32 + bit[None, :]
    position = (index // of_class).to(tl.int64)[:, None] + rate * place
    inside = ((index // of_class) < rate)[:, None] & (position < num_keys)
    hidden = tl.load(padding_ptr + batch * pad_b + position, mask=inside, other=0)
    packed = tl.sum((hidden != 0).to(tl.uint32) << bit[None, :].to(tl.uint32), 1)
    tl.store(words_ptr + row.to(tl.int64) * words + index, packed.to(tl.int32, bitcast=True), mask=index < words)
