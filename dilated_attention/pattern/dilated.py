"""LongNet's dilated pattern: its branches, each of a segment length, a dilation rate and one offset per head, and the number of its pairs.
``geometric_branches`` is the paper's rule for choosing branches."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from dilated_attention.pattern.base import Pattern
from dilated_attention.pattern.checks import (
    MAX_BRANCHES,
    MAX_HEADS,
    MAX_LENGTH,
    as_int,
    as_int_tuple,
    check_bool,
    one_of,
    shown,
)

HeadOffsets = Literal["cyclic", "blocked", "zero"] | Sequence[Sequence[int]]
# of each branch, that of each head
Offsets = tuple[tuple[int, ...], ...]
# the offset of a head that does not run a branch
NOT_IN_BRANCH = -1


@dataclass(frozen=True)
class DilatedPattern(Pattern):
    """Which keys each query of dilated attention sees, and how often (LongNet, arXiv 2307.02486, Eq. 3–15).

    Branch b = (w, r) cuts the sequence into segments of w positions (the last may be shorter). In each segment, head h *takes* the
    positions whose index inside the segment is ≡ o_h (mod r). The multiplicity m_h(i, j) of query i and key j is the number of branches
    in which both are in the same segment and both are taken.

    Args:
        segment_lengths: w of each branch, in positions; w ≥ 1. It need not divide the sequence.
        dilation_rates: r of each branch; 1 ≤ r ≤ w. It need not divide w.
        head_offsets: ``"cyclic"`` o_h = h mod r (the paper, Eq. 13) · ``"blocked"`` o_h = h // ceil(H/r) (TorchScale, and so
            the weights of Prov-GigaPath and LongViT) · ``"zero"`` · one list of H integers per branch, each < r.
        branch_heads: ``"all"``: every head runs every branch · ``"split"``: the H heads are divided among the G branches in contiguous
            groups, the first H mod G groups one larger, and o = branch index mod r (fkodom's layout).
        tail: ``"mask"``: only real keys are attended to · ``"zero_keys"``: TorchScale's padding; see ``zero_keys``.

    Raises:
        ValueError, TypeError: a branch cannot exist. The message names the argument, its value and what is allowed.

    Differs from the paper: offsets count inside the segment (the paper's upper index would spill into the next one), and
    N, w and r are arbitrary.
    """

    segment_lengths: tuple[int, ...]
    dilation_rates: tuple[int, ...]
    head_offsets: str | Offsets = "cyclic"
    branch_heads: str = "all"
    tail: str = "mask"

    if TYPE_CHECKING:
        # lists are stored as tuples
        def __init__(
            self, segment_lengths: Sequence[int], dilation_rates: Sequence[int], head_offsets: str | Sequence[Sequence[int]] = "cyclic",
            branch_heads: str = "all", tail: str = "mask",
        ) -> None: ...  # fmt: skip

    def __post_init__(self) -> None:
        lengths = as_int_tuple("segment_lengths", self.segment_lengths, minimum=1, maximum=MAX_LENGTH)
        rates = as_int_tuple("dilation_rates", self.dilation_rates, minimum=1)
        if not lengths:
            raise ValueError("segment_lengths is empty; at least one branch is needed, e.g. segment_lengths=[2048], dilation_rates=[1]")
        if len(lengths) != len(rates):
            raise ValueError(
                f"segment_lengths has {len(lengths)} entries {shown(list(lengths))} "
                f"and dilation_rates has {len(rates)} {shown(list(rates))}; each branch needs one of each: give lists of equal length"
            )
        if len(lengths) > MAX_BRANCHES:
            raise ValueError(f"segment_lengths has {len(lengths):,} entries; expected at most {MAX_BRANCHES:,}, one for each branch")
        for branch, (length, rate) in enumerate(zip(lengths, rates, strict=True)):
            if rate > length:
                raise ValueError(
                    f"dilation_rates[{branch}] is {shown(rate)}, larger than segment_lengths[{branch}] = {length}, so some heads would "
                    f"take nothing: use a rate ≤ {length}"
                )
        one_of("branch_heads", self.branch_heads, ("all", "split"))
        one_of("tail", self.tail, ("mask", "zero_keys"))
        object.__setattr__(self, "segment_lengths", lengths)
        object.__setattr__(self, "dilation_rates", rates)
        object.__setattr__(self, "head_offsets", self._checked_offsets(self.head_offsets))

    def _checked_offsets(self, offsets: Any) -> str | Offsets:
        """Returns ``head_offsets`` as it is stored, a name or one tuple of H integers per branch, or raises."""
        if isinstance(offsets, str) or not isinstance(offsets, Sequence):
            one_of("head_offsets", offsets, ("cyclic", "blocked", "zero"), also="or one list of H integers per branch")
        if self.branch_heads == "split" and offsets != "cyclic":
            raise ValueError(
                f"head_offsets={shown(offsets)} has no effect with branch_heads='split', where the offset is the branch index mod r; "
                "leave head_offsets at its default"
            )
        if isinstance(offsets, str):
            return offsets
        if len(offsets) != len(self.segment_lengths):
            raise ValueError(
                f"head_offsets has {len(offsets)} lists for {len(self.segment_lengths)} branches; give one list of H integers per branch"
            )
        rows = []
        for branch, (row, rate) in enumerate(zip(offsets, self.dilation_rates, strict=True)):
            values = as_int_tuple(f"head_offsets[{branch}]", row)
            for head, value in enumerate(values):
                if not 0 <= value < rate:
                    raise ValueError(
                        f"head_offsets[{branch}][{head}] is {shown(value)}; expected at least 0 and below {rate}, as dilation rate {rate} "
                        f"leaves {rate} offsets"
                    )
            rows.append(values)
        if len({len(row) for row in rows}) > 1:
            raise ValueError(f"head_offsets has lists of lengths {shown([len(row) for row in rows])}; each needs one integer per head")
        return tuple(rows)

    @property
    def num_branches(self) -> int:
        return len(self.segment_lengths)

    @property
    def branches(self) -> tuple[tuple[int, int], ...]:
        """Returns (w, r) of each branch."""
        return tuple(zip(self.segment_lengths, self.dilation_rates, strict=True))

    def offsets(self, num_heads: int) -> Offsets:
        """Returns o_h for each branch and head; −1 (``NOT_IN_BRANCH``) if the head does not run the branch."""
        num_heads = as_int("num_heads", num_heads, minimum=1, maximum=MAX_HEADS)
        heads = range(num_heads)
        if self.branch_heads == "split":
            rates = self.dilation_rates
            size, larger_groups = divmod(num_heads, self.num_branches)
            branch_of = [b for b in range(self.num_branches) for _ in range(size + (b < larger_groups))]
            return tuple(tuple(b % rate if branch_of[h] == b else NOT_IN_BRANCH for h in heads) for b, rate in enumerate(rates))
        if self.head_offsets == "cyclic":
            return tuple(tuple(h % rate for h in heads) for rate in self.dilation_rates)
        if self.head_offsets == "blocked":
            return tuple(tuple(h // -(-num_heads // rate) for h in heads) for rate in self.dilation_rates)
        if self.head_offsets == "zero":
            return ((0,) * num_heads,) * self.num_branches
        assert not isinstance(self.head_offsets, str)
        if len(self.head_offsets[0]) != num_heads:
            raise ValueError(f"head_offsets has {len(self.head_offsets[0])} integers per branch for {num_heads} heads; give one per head")
        return self.head_offsets

    def with_branches(self, branches: Sequence[int], num_heads: int) -> DilatedPattern:
        """Returns the pattern of the branches with these indices, for ``num_heads`` heads, all of which must run them."""
        offsets = self.offsets(num_heads)
        lengths, rates = (tuple([row[b] for b in branches]) for row in (self.segment_lengths, self.dilation_rates))
        return DilatedPattern(lengths, rates, tuple([offsets[b] for b in branches]), "all", self.tail)

    def with_heads(self, first: int, last: int, num_heads: int) -> DilatedPattern:
        """Returns the pattern of heads [first, last) of ``num_heads``. There is none if heads run different branches."""
        assert self.branch_heads == "all"
        if (first, last) == (0, num_heads):
            return self
        rows = tuple(row[first:last] for row in self.offsets(num_heads))
        return DilatedPattern(self.segment_lengths, self.dilation_rates, rows, "all", self.tail)

    def zero_keys(self, branch: int, num_positions: int, num_taken: int) -> int:
        """Returns z, the number of zero keys that TorchScale's padding adds to a segment in which a head takes ``num_taken`` positions.

        The sequence is padded to a multiple of w' = min(w, N) and each segment to a multiple of r, so a head takes ceil(w'/r) positions of
        every segment. Those that the padding added are keys with score 0 and value 0. With ``tail="mask"`` z is 0.
        """
        if self.tail == "mask":
            return 0
        length = min(self.segment_lengths[branch], num_positions)
        return -(-length // self.dilation_rates[branch]) - num_taken

    def _mask(self, rows: Tensor, keys: Tensor, num_heads: int, num_positions: int) -> Tensor:
        return self.multiplicities(rows, keys, num_heads, torch.int64)

    def multiplicities(self, rows: Tensor, keys: Tensor, num_heads: int, dtype: torch.dtype = torch.int16) -> Tensor:
        """Returns m_h(i, j) as (num_heads, rows, keys) for query positions ``rows`` and key positions ``keys``, which may be any."""
        m = keys.new_zeros((num_heads, rows.shape[0], keys.shape[0]), dtype=dtype)
        for (length, rate), offsets in zip(self.branches, self.offsets(num_heads), strict=True):
            # NOT_IN_BRANCH matches no position
            offset = torch.tensor(offsets, device=keys.device)[:, None]
            row_taken, key_taken = (x % length % rate == offset for x in (rows, keys))
            m += row_taken[:, :, None] & key_taken[:, None, :] & ((rows // length)[:, None] == keys // length)
        return m

    def pairs(self, num_positions: int, num_heads: int = 1, *, is_causal: bool = False) -> int:
        return sum(self.branch_pairs(num_positions, num_heads, is_causal=is_causal))

    def branch_pairs(self, num_positions: int, num_heads: int = 1, *, is_causal: bool = False) -> tuple[int, ...]:
        """Returns ``pairs`` of each branch."""
        n = as_int("num_positions", num_positions, minimum=0, maximum=MAX_LENGTH)
        check_bool("is_causal", is_causal)

        def pairs_of(rows: int) -> int:
            return rows * (rows + 1) // 2 if is_causal else rows * rows

        totals = []
        for (length, rate), offsets in zip(self.branches, self.offsets(num_heads), strict=True):
            num_full_segments, last_length = divmod(n, length)
            pairs_by_offset = (
                num_equal_heads * (num_full_segments * pairs_of(taken(length, rate, offset)) + pairs_of(taken(last_length, rate, offset)))
                for offset, num_equal_heads in Counter(offsets).items()
                if offset != NOT_IN_BRANCH
            )
            totals.append(sum(pairs_by_offset))
        return tuple(totals)

    def keys_per_query(self, num_positions: int, num_heads: int = 1, *, is_causal: bool = False) -> float:
        """Returns the mean number of keys, with multiplicity, over all heads and queries: ``pairs / (H·N)``."""
        return self.pairs(num_positions, num_heads, is_causal=is_causal) / max(num_heads * num_positions, 1)

    def long_cell_pairs(self, num_positions: int, num_heads: int, cell: int, is_causal: bool) -> Tensor:
        """Returns what ``cell_pairs`` (``pattern/base.py``) does, for sequences whose dense mask would be too large: int64 (num_heads,
        cells, cells)."""
        cells, positions = -(-num_positions // cell), torch.arange(num_positions)
        total = torch.zeros(num_heads, cells, cells, dtype=torch.int64)
        for (length, rate), offsets in zip(self.branches, self.offsets(num_heads), strict=True):
            for offset in sorted(set(offsets) - {NOT_IN_BRANCH}):
                taken_positions = positions[positions % length % rate == offset]
                # (cells, segments): how many taken positions are in both; float64 counts exactly
                cells_and_segments = torch.stack([taken_positions // cell, taken_positions // length])
                ones = torch.ones(len(taken_positions), dtype=torch.float64)
                with warnings.catch_warnings():
                    # torch warns that sparse matrices may change
                    warnings.simplefilter("ignore")
                    counts = torch.sparse_coo_tensor(cells_and_segments, ones, (cells, -(-num_positions // length)))
                    pairs = torch.sparse.mm(counts, counts.T).to_dense().long()
                if is_causal:
                    # of a cell on the diagonal, which has each pair of different positions twice and each position with itself once,
                    # keep every pair once
                    taken_in_cell = torch.bincount(cells_and_segments[0], minlength=cells)
                    pairs = pairs.tril(-1) + ((pairs.diag() + taken_in_cell) // 2).diag()
                total[torch.tensor([o == offset for o in offsets])] += pairs
        return total


def taken(length: int, rate: int, offset: int) -> int:
    """Returns how many of ``length`` positions have index ≡ offset (mod rate): ceil((length − offset) / rate), at least 0."""
    return max(0, -(-(length - offset) // rate))


def geometric_branches(length: int, first: int = 2048, growth: int = 4) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns LongNet's branches for a context (arXiv 2307.02486, section 2.2): w_i = first · growth^i, r_i = w_i // first.

    The last segment is the context itself, w = length with r = length // first, so that positions at any distance can see each other. A
    query that a branch takes sees w / r keys in it: exactly ``first`` where w is a multiple of it, else fewer than 2·first. A head takes
    every r-th position, so in the mean a branch costs first / r keys per query and head (half if causal). All branches together cost
    about first · growth / (growth − 1), which is 4/3 · first by default, whatever the context. A context below 2 · first costs more, since
    both of its branches are dense.

    Args:
        length: positions of the context, ≥ 1.
        first: the shortest segment, which is attended densely, ≥ 1; a shorter context is one dense branch.
        growth: factor from one segment to the next, ≥ 2.

    Returns:
        (segment_lengths, dilation_rates), for ``DilatedPattern`` and everything that takes branches.

    Raises:
        ValueError, TypeError: if a number is not an integer of its range.

    >>> geometric_branches(65536)
    ((2048, 8192, 32768, 65536), (1, 4, 16, 32))
    """
    length, first = as_int("length", length, minimum=1), as_int("first", first, minimum=1)
    growth = as_int("growth", growth, minimum=2)
    segments = []
    segment = first
    while segment < length:
        segments.append(segment)
        segment *= growth
    segments.append(length)
    return tuple(segments), tuple(max(1, w // first) for w in segments)
