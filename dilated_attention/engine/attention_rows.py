"""Computes rows of the attention matrix of one sequence, one chunk of keys at a time, for ``attention_map``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dilated_attention.pattern import BlockPattern, DilatedPattern


@dataclass(frozen=True, eq=False, kw_only=True)
class KeySide:
    """The keys that selected queries of one sequence, or of one packed document, may attend to. Without ``branches`` and
    ``blocks`` attention is dense.

    Args:
        k: keys (B, N, Hk, D).
        branches: pattern whose multiplicities are added. A pair's multiplicity m says how many branches and blocks keep it; it multiplies
            e^score.
        blocks: adds 1 to the multiplicity of kept pairs. One pattern for all batch entries, or one for each. A content-chosen pattern
            must be replaced by the blocks it chose.
        padding: (B, N) bool, True = the key is masked.
        dtype: dtype in which scores and weights are computed.
        sinks: (H,) or None: a further score in each head's denominators.
    """

    k: Tensor
    branches: DilatedPattern | None
    blocks: tuple[BlockPattern, ...]
    is_causal: bool
    scale: float
    padding: Tensor | None
    dtype: torch.dtype
    sinks: Tensor | None

    @property
    def num_keys(self) -> int:
        return self.k.shape[1]

    def weights(self, q: Tensor, positions: list[int], lse: Tensor | None, step: int) -> Iterator[tuple[int, Tensor]]:
        """Yields (first key, weights (B, H, R, K)) of rows q (B, R, H, D) at ``positions``, ``step`` keys at a time; keys
        outside of these chunks have weight 0.

        ``lse`` (B, H, R) may be None. It is then computed over all keys, which takes an additional pass.
        """
        q, at = q.to(self.dtype) * self.scale, torch.tensor(positions, device=q.device)
        low, high = self._span(positions)
        chunks = [(first, min(first + step, high)) for first in range(low, high, step)]
        if lse is None:
            lse = self._first_lse(at, q.shape[2])
            for first, last in chunks:
                lse = lse.logaddexp(self._logits(q, at, first, last).logsumexp(-1))
        # an empty row has no finite logit, so any finite shift works
        shift = lse.masked_fill(lse == -torch.inf, 0.0)[..., None]
        for first, last in chunks:
            yield first, self._logits(q, at, first, last).sub_(shift).exp_()

    def _span(self, positions: list[int]) -> tuple[int, int]:
        """Returns the range [low, high) that contains all keys of these positions."""
        low, high = 0, self.num_keys
        # a branch stays inside its segment; blocks may keep any key
        if self.branches is not None and not self.blocks:
            lengths = self.branches.segment_lengths
            low = min(min(positions) // length * length for length in lengths)
            high = min(high, max((max(positions) // length + 1) * length for length in lengths))
        return low, min(high, max(positions) + 1) if self.is_causal else high

    def _logits(self, q: Tensor, at: Tensor, first: int, last: int) -> Tensor:
        """Computes s + log m (B, H, R, K) for keys [first, last), −inf where m is 0."""
        H, Hk = q.shape[2], self.k.shape[2]
        # make the query heads of one key head adjacent
        grouped = q.transpose(1, 2).unflatten(1, (Hk, H // Hk)).flatten(2, 3)
        scores = grouped @ self.k[:, first:last].to(self.dtype).permute(0, 2, 3, 1)
        scores = scores.unflatten(2, (H // Hk, q.shape[1])).flatten(1, 2)
        keys = torch.arange(first, last, device=q.device)
        m = self._multiplicity(at, keys, H)
        if self.is_causal:
            m = m * (keys <= at[:, None])
        if self.padding is not None:
            m = m * ~self.padding[:, None, None, first:last]
        # not the sum alone: an infinite score and log 0 make NaN
        return torch.where(m > 0, scores + m.log(), -torch.inf)

    def _multiplicity(self, rows: Tensor, keys: Tensor, num_heads: int) -> Tensor:
        """Returns m in ``dtype``, (B or 1, H or 1, R, K), not considering causality and padding."""
        if self.branches is None and not self.blocks:
            return torch.ones((1, 1, rows.shape[0], keys.shape[0]), dtype=self.dtype, device=keys.device)
        parts = [] if self.branches is None else [self.branches.multiplicities(rows, keys, num_heads)[None]]
        if self.blocks:
            heads = torch.arange(num_heads if self.blocks[0].per_head else 1, device=keys.device)[:, None, None]
            shape = (heads.shape[0], rows.shape[0], keys.shape[0])
            kept = [block.allowed(rows[:, None], keys, heads, self.num_keys).broadcast_to(shape) for block in self.blocks]
            parts.append(torch.stack(kept))
        return sum(parts[1:], parts[0]).to(self.dtype)

    def _first_lse(self, at: Tensor, num_heads: int) -> Tensor:
        """Returns (B, H, R): each row's lse before any key of k is added, log(number of its zero keys + e^sink). A zero key is padding with
        score 0 and value 0, of ``tail="zero_keys"``."""
        zero = torch.zeros((num_heads, at.shape[0]), dtype=self.dtype, device=at.device)
        # they come after the last position, so causal queries do not see them
        if self.branches is not None and not self.is_causal:
            zero = zero_keys(self.branches, at, num_heads, self.num_keys).to(self.dtype)
        lse = zero.log()
        if self.sinks is not None:
            lse = lse.logaddexp(self.sinks.to(self.dtype)[:, None])
        return lse.expand(self.k.shape[0], -1, -1)


def zero_keys(pattern: DilatedPattern, rows: Tensor, num_heads: int, num_positions: int) -> Tensor:
    """Returns (H, R) int64: the number of zero keys, over all branches, that each row attends to; 0 with ``tail="mask"``."""
    total = torch.zeros((num_heads, rows.shape[0]), dtype=torch.int64, device=rows.device)
    if pattern.tail == "mask":
        return total
    for branch, ((length, rate), offsets) in enumerate(zip(pattern.branches, pattern.offsets(num_heads), strict=True)):
        offset = torch.tensor(offsets, device=rows.device)[:, None]
        real = (num_positions - rows // length * length).clamp(max=length)
        # ceil((real − offset) / rate)
        taken = -((offset - real) // rate)
        # the places of a full segment that keys do not fill; heads outside of the branch have an offset that no row has
        zero = pattern.zero_keys(branch, num_positions, 0) - taken.clamp(min=0)
        total += torch.where(rows % length % rate == offset, zero, 0)
    return total
