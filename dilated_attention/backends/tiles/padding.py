"""A mask of padded keys packed in the order in which each branch reads it: 32 keys a word, which a kernel looks at once for many keys.

The positions of one *class* of a branch of rate r are those that agree mod r: a segment's keys are neighbours among them, whatever its first
position and its head's offset. Words of a branch: class by class, ⌈⌈N/r⌉/32⌉ + 2 words each; bit t mod 32 of word t div 32 is set where
position class + r·t is padded. Two words of zeros follow, so that reading three words from any key on stays inside.
"""

# kernels have no types that mypy knows
# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl

# words of a program
WORDS = 64


def words_of(rate: int, num_keys: int) -> int:
    """Words of a branch."""
    return rate * (((num_keys + rate - 1) // rate + 31) // 32 + 2)


@triton.jit(do_not_specialize=["num_branches", "num_keys", "blocks"])
def pack_kernel(padding_ptr, rates_ptr, words_ptr, pad_b, num_branches, num_keys, words, blocks, WORDS: tl.constexpr):
    """WORDS words of one branch and batch entry; ``words``: of the longest branch, from one to the next."""
    pid = tl.program_id(0)
    block, row = pid % blocks, pid // blocks
    branch, batch = row % num_branches, (row // num_branches).to(tl.int64)
    rate = tl.load(rates_ptr + branch)
    of_class = ((num_keys + rate - 1) // rate + 31) // 32 + 2
    index = block * WORDS + tl.arange(0, WORDS)
    bit = tl.arange(0, 32)
    # in 64 bits: what lies beyond the last class must not wrap
    place = (index % of_class).to(tl.int64)[:, None] * 32 + bit[None, :]
    position = (index // of_class).to(tl.int64)[:, None] + rate * place
    inside = ((index // of_class) < rate)[:, None] & (position < num_keys)
    hidden = tl.load(padding_ptr + batch * pad_b + position, mask=inside, other=0)
    packed = tl.sum((hidden != 0).to(tl.uint32) << bit[None, :].to(tl.uint32), 1)
    tl.store(words_ptr + row.to(tl.int64) * words + index, packed.to(tl.int32, bitcast=True), mask=index < words)
