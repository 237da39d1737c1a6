"""Codes of bases with their nearest, which a model with ``kmer`` reads."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from dilated_attention.models.config import MAX_KMER, NUM_BASES
from dilated_attention.models.text.vocabulary import UNKNOWN
from dilated_attention.models.tokens import check_range
from dilated_attention.pattern.checks import as_int
from dilated_attention.validation import check_bool


def kmers(symbols: torch.Tensor, k: int, both_sides: bool) -> torch.Tensor:
    """Returns Σ_j 5^j · symbols[t + o_j], j = 0 … k − 1, o_0 = 0: each base with its k − 1 nearest, itself the lowest digit.

    A token that carries its neighbours can be sharded over processes like any other, and ``codes % 5`` are the bases again.

    Args:
        symbols: (…, N) integers: 0 to 4 for A, C, G, T, N.
        k: digits of a code; 1 to 13.
        both_sides: o = −1, 1, −2, 2, … (one base before, one after, …) for a model with ``is_causal=False``; else o = −1, −2, …

    Returns:
        (…, N) in the dtype of ``symbols``. Beyond both ends are N.

    Raises:
        ValueError, TypeError: if symbols are not integers, or on the CPU not 0 to 4; if k is not 1 to 13.
    """
    k = as_int("k", k, minimum=1, maximum=MAX_KMER)
    check_bool("both_sides", both_sides)
    if not isinstance(symbols, torch.Tensor) or symbols.dtype not in (torch.int64, torch.int32):
        got = f"has dtype {symbols.dtype}" if isinstance(symbols, torch.Tensor) else f"is a {type(symbols).__name__}"
        raise TypeError(f"symbols {got}; expected an int64 or int32 tensor (…, N): use BASES.encode(text)")
    check_range("symbols", symbols, NUM_BASES, limit="the number of bases − 1", way_out="use BASES.encode(text)")
    n = symbols.shape[-1]
    padded = F.pad(symbols, (k - 1, k - 1), value=UNKNOWN)
    codes = symbols.clone()
    for j in range(1, k):
        offset = (j + 1) // 2 * (-1 if j % 2 else 1) if both_sides else -j
        codes += padded[..., k - 1 + offset :][..., :n] * NUM_BASES**j
    return codes
