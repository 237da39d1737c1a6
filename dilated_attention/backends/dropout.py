"""Dropout by position: counter-based random words decide each (batch, head, query, key) pair, however the work is split.

Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") turns a counter of four 32-bit words into four random
words. Its key is the 64-bit seed (low word, high word). A query's position gets two of these words, a and c, a key's position one, b::

    query: (a, c', …) = philox(seed, (position mod 2³², head, batch, 0))      c = c' | 1
    key:   (b, …)     = philox(seed, (position mod 2³², head, batch, 1))

    x = ((a xor b) · c) mod 2³²        the pair is kept where x ≥ threshold = ⌊p · 2³²⌋

So threshold / 2³² of the pairs are dropped, at three integer operations per pair. ``dropout_triton`` computes the same words on a GPU.

Shape letters: P problems of a launch (or batch entries), G heads, L queries, S keys.

Why so few operations are enough: the words are independent and uniform, so a xor b is too, and so is x, since c is odd. This holds
exactly for the pairs of one row, and for those of one column. Two rows of a head are two functions of one 32-bit word b: their
correlation over all keys is 0 on average and 2⁻¹⁶ to 2⁻¹⁵ in the root mean square, as for functions drawn at random; it exceeds 0.1 for
about 10⁻⁸ of the pairs of rows (by enumeration of words of 8 to 16 bits). Of the pairs of keys, 2⁻³² share b, and so every decision.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF
_ROUNDS = 10
# multipliers of a round, and what each round adds to the key; int64 products wrap, and so hold the 64 bits of the unsigned product
_MULTIPLY = (0xD2511F53, 0xCD9E8D57)
_ADD = (0x9E3779B9, 0xBB67AE85)
# counters computed at a time: on a CPU a round's int64 tensors fit in its cache; on a GPU launches are few and take little memory
_CPU_CHUNK, _GPU_CHUNK = 2**15, 2**22


class Words(NamedTuple):
    """The random words: int32 tensors that hold the bits of unsigned words."""

    a: Tensor  # (P, G, L)
    c: Tensor  # (P, G, L), odd
    b: Tensor  # (P, G, S)


@dataclass(frozen=True)
class Dropout:
    """Attention dropout of one launch: its batch entries, heads and positions, numbered as in the whole sequence and model.

    These numbers, the seed and the probability decide about each pair. So the decision is the same in every branch, in forward and
    backward, and however the work is split.
    """

    probability: float
    seed: int
    batch: Tensor  # (P,)
    heads: Tensor  # (G,)
    queries: Tensor  # (P, L)
    keys: Tensor  # (P, S)

    @cached_property
    def words(self) -> Words:
        """The random words of all queries and keys, computed once however many times ``keep_mask`` asks."""
        return words_of(self.seed, self.batch, self.heads, self.queries, self.keys)


def threshold_of(probability: float) -> int:
    """Returns ⌊p · 2³²⌋: a pair is dropped where its word x is below it."""
    return int(probability * 2**32)


def keep_mask(dropout: Dropout, rows: slice) -> Tensor:
    """Returns bool (P, G, rows, S) for these rows of queries: True where the attention weight is kept, with probability 1 − p."""
    words = dropout.words
    # int32 compares as signed, so x needs its sign bit flipped; since c is odd, flipping that of a does so
    a = words.a[..., rows, None] ^ -(2**31)
    x = a ^ words.b[..., None, :]
    x *= words.c[..., rows, None]
    return x >= threshold_of(dropout.probability) - 2**31


def words_of(seed: int, batch: Tensor, heads: Tensor, queries: Tensor, keys: Tensor) -> Words:
    """Returns the words of queries and keys at positions (P or 1, L or S), of batch entries (P,) and heads (G,); arguments are int64."""
    P, G, L = batch.numel(), heads.numel(), queries.shape[1]
    positions = torch.cat([x.expand(P, -1) for x in (queries, keys)], dim=1) & _WORD
    is_key = (torch.arange(positions.shape[1], device=positions.device) >= L).long()
    entries, heads = (batch & _WORD)[:, None, None], (heads & _WORD)[None, :, None]
    first, second = (positions.new_empty((P, G, positions.shape[1]), dtype=torch.int32) for _ in range(2))
    chunk = max(1, (_CPU_CHUNK if positions.device.type == "cpu" else _GPU_CHUNK) // max(1, P * G))
    for start in range(0, positions.shape[1], chunk):
        part = slice(start, start + chunk)
        # assigning to int32 wraps
        first[..., part], second[..., part] = philox(seed, positions[:, None, part], heads, entries, is_key[part])[:2]
    return Words(first[..., :L], second[..., :L] | 1, first[..., L:])


def philox(seed: int, *counter: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the four words of Philox4x32-10 for a counter of four broadcastable int64 tensors of 32-bit words; ``seed`` is mod 2⁶⁴."""
    c0, c1, c2, c3 = counter
    k0, k1 = seed & _WORD, seed >> 32 & _WORD
    for _ in range(_ROUNDS):
        product0, product2 = c0 * _MULTIPLY[0], c2 * _MULTIPLY[1]
        # c0 and c2 take a product's upper word; c1 and c3 stay whole products, whose upper words the next mask removes
        c0, c1, c2, c3 = (product2 >> 32 ^ c1 ^ k0) & _WORD, product2, (product0 >> 32 ^ c3 ^ k1) & _WORD, product0
        k0, k1 = (k0 + _ADD[0]) & _WORD, (k1 + _ADD[1]) & _WORD
    return c0, c1 & _WORD, c2, c3 & _WORD
