"""Layouts that balance the work of attention across processes: of packed documents, and of several kinds of layers at once."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from dilated_attention.distributed.load_balance.dealing import (
    Cuts,
    Runs,
    contiguous,
    deal,
    even_out,
    loads_of_runs,
    pieces_of,
    zigzag,
)
from dilated_attention.distributed.load_balance.work import Work, works_of
from dilated_attention.distributed.sharding.custom_layout import Layout
from dilated_attention.distributed.sharding.layout import joined
from dilated_attention.engine.branches.plan import Range
from dilated_attention.engine.ops.bounds import document_ranges
from dilated_attention.pattern import BlockPattern, DilatedPattern
from dilated_attention.pattern.checks import MAX_RANKS, as_int, as_int_tuple, check_bool

# query-key pairs that a GPU computes while it receives one key row (key and value) of the same head dim: 580 TFLOP/s at 4 FLOPs per pair
# and channel, 235 GB/s at 4 bytes per row and channel. Measured on 4 H200s in rings in steps of heads (bench scaling, window): a
# window of 10 % received 741 MiB and took 10.0 ms with runs dealt out, 106 MiB and 7.8 ms if contiguous, and 6.7 ms without an exchange
PAIRS_PER_ROW = 2500
# a candidate with shorter runs is only used if it lowers the cost by at least this fraction
WORTH_IT = 0.01
# maximum over mean pairs of a process up to which a layout counts as balanced
BALANCED = 1.03
# the largest loads of a piece that are tried, in shares of what a process holds
LARGEST = (1.0, 0.5, 0.25, 0.125, 0.0625, 0.03125)

AnyPattern = BlockPattern | DilatedPattern | None


def balanced_layout(
    pattern: AnyPattern | Sequence[AnyPattern],
    seq_len: int,
    world_size: int,
    num_heads: int = 1,
    *,
    is_causal: bool = False,
    cu_seqlens: torch.Tensor | Sequence[int] | None = None,
    device: torch.device | str = "cpu",
) -> Layout:
    """Assigns positions to processes so that all of them finish at the same time.

    Every process gets the same number of positions, up to one unit: a position, or with block patterns a block. The candidates are
    contiguous, zigzag, and documents that are dealt out: long ones are cut into chunks or pairs of chunks of several lengths, short ones
    stay whole, so that their keys need not travel. Of the candidates whose processes have equal pairs (up to 3 %, for each pattern) the
    result is the one whose slowest process has the least to do, counting pairs and keys received from other processes; if there are none,
    it is the one with the most equal pairs.

    Args:
        pattern: what is computed: a block pattern that is determined by shapes alone, a ``DilatedPattern``, None for dense attention; or
            a list of them, one for each kind of layer of a model, and the layout balances each.
        seq_len: N.
        world_size: W.
        num_heads: H; it matters to patterns that differ between heads.
        is_causal: the same value as in the attention calls.
        cu_seqlens: boundaries of packed documents, int32 (documents + 1,) or a list, from 0 to N; None for one document. Each batch of
            other documents needs a layout of its own.
        device: where kept blocks are counted; a GPU is faster if there are many millions of them.

    Returns:
        A layout whose ``imbalance`` says how even it is: maximum over mean pairs of a process, the largest over the patterns. Of block
        patterns, the pairs are those of kept blocks, which kernels compute whole, and blocks are not cut.

    Raises:
        ValueError, TypeError: if a pattern, the sequence length or the boundaries are not valid.

    >>> layout = balanced_layout(
    ...     [None, DilatedPattern((2048, 32768), (1, 16))], N, W, H,
    ...     is_causal=True, cu_seqlens=cu_seqlens)
    >>> tokens, targets = shard_sequence(
    ...     group, [tokens, targets], [1, 1], layout=layout)
    """
    patterns = _checked(pattern)
    seq_len, size = as_int("seq_len", seq_len, minimum=0), as_int("world_size", world_size, minimum=1, maximum=MAX_RANKS)
    num_heads = as_int("num_heads", num_heads, minimum=1)
    check_bool("is_causal", is_causal)
    documents = _documents(cu_seqlens, seq_len)
    if not documents:
        return Layout(seq_len, ((),) * size)
    works = works_of(patterns, documents, num_heads, is_causal=is_causal, device=torch.device(device))
    balance = _Balance(works, Cuts(documents, max(work.unit for work in works)), size, is_causal)
    best: Layout | None = None
    least = math.inf
    for level in balance.levels():
        before = best
        for runs in level:
            found = tuple(joined(sorted(mine)) for mine in runs)
            pairs = balance.pairs(found)
            imbalance = max(1.0, float(pairs.max()))
            is_balanced, was_balanced = imbalance <= BALANCED, best is not None and best.imbalance <= BALANCED
            cost = balance.cost(found, pairs) if is_balanced else math.inf
            if best is None or (is_balanced and cost < least * (1 - WORTH_IT)) or (not was_balanced and imbalance < best.imbalance):
                best, least = Layout(seq_len, found, imbalance), cost
        assert best is not None
        # more pieces would only cost more
        if best.imbalance <= BALANCED and (best is before or least <= balance.least * (1 + WORTH_IT)):
            break
    assert best is not None
    return best


class _Balance:
    """What several kinds of layers ask of a layout.

    Attributes:
        least: what no layout's cost is below: the mean pairs of a process, without any exchange.
    """

    def __init__(self, works: list[Work], cuts: Cuts, size: int, is_causal: bool) -> None:
        self.works, self.cuts, self.size, self.is_causal = works, cuts, size, is_causal
        ends = torch.tensor([cuts.seq_len])
        # a pattern that keeps nothing is balanced anyhow
        totals = [float(work.pairs_before(ends)) for work in works]
        assert all(map(math.isfinite, totals)), "pairs overflow"
        self._kinds = [(work, total / size) for work, total in zip(works, totals, strict=True) if total]
        self.least = sum(mean for _, mean in self._kinds)

    def loads(self, starts: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """Returns the positions and the pairs of each pattern of runs (runs, 1 + patterns), in shares of a process's mean."""
        columns = [(ends - starts).double() * (self.size / self.cuts.seq_len)]
        columns += [(work.pairs_before(ends) - work.pairs_before(starts)) / mean for work, mean in self._kinds]
        return torch.stack(columns, 1)

    def pairs(self, shards: Sequence[Sequence[Range]]) -> torch.Tensor:
        """Returns each process's pairs of each pattern (W, patterns), in shares of the mean."""
        runs = [(*run, rank) for rank, mine in enumerate(shards) for run in mine]
        starts, ends, ranks = (torch.tensor(x, dtype=torch.int64) for x in zip(*runs, strict=True))
        # a pattern without pairs is even
        loads = self.loads(starts, ends)[:, 1:] if self._kinds else torch.zeros(len(runs), 1, dtype=torch.float64)
        return torch.zeros(self.size, loads.shape[1], dtype=torch.float64).index_add_(0, ranks, loads)

    def cost(self, shards: Sequence[Sequence[Range]], pairs: torch.Tensor) -> float:
        """Returns the pairs of the slowest process, summed over patterns; each row it must receive counts as ``PAIRS_PER_ROW`` pairs."""
        total = 0.0
        for index, (work, mean) in enumerate(self._kinds):
            rows = torch.tensor(work.rows_received(shards), dtype=torch.float64)
            total += float((pairs[:, index] * mean + PAIRS_PER_ROW * rows).max())
        return total

    def levels(self) -> Iterator[Iterator[list[Runs]]]:
        """Yields candidates, each process's runs, those of few and long runs first."""
        yield (make(self.cuts, self.size) for make in (contiguous, zigzag))
        loads = loads_of_runs(self.cuts.documents, self.loads)
        for largest in LARGEST:
            yield (self._dealt(loads, largest, paired=paired) for paired in (False, True))

    def _dealt(self, of_documents: torch.Tensor, largest: float, *, paired: bool) -> list[Runs]:
        dealt = deal(pieces_of(self.cuts, of_documents, self.size, largest, paired=paired), self.size, self.loads)
        even_out(dealt, self.cuts, self.loads, self._cost_of)
        return dealt

    def _cost_of(self, run: Range) -> float:
        """Returns the cost of a run on another process than the rest of its document, as a load."""
        start, end = self.cuts.document(run[0])
        if run == (start, end):
            return 0.0
        rows = (run[1] if self.is_causal else end) - start
        return rows * PAIRS_PER_ROW * len(self._kinds) / max(self.least, 1.0)


def _checked(pattern: AnyPattern | Sequence[AnyPattern]) -> list[AnyPattern]:
    patterns = list(pattern) if isinstance(pattern, (list, tuple)) else [pattern]
    if not patterns:
        raise ValueError("pattern is an empty list; expected a pattern for each kind of layer, or None for dense attention")
    for one in patterns:
        if not (one is None or isinstance(one, (BlockPattern, DilatedPattern))):
            raise TypeError(
                f"pattern is {one!r} ({type(one).__name__}); expected a block pattern, e.g. LocalWindow(512), a DilatedPattern, None for "
                "dense attention, or a list of them"
            )
        if isinstance(one, BlockPattern) and one.is_chosen:
            raise ValueError(f"pattern is {one!r}, whose blocks are chosen by content in each call; expected one determined by shapes")
    return patterns  # type: ignore[return-value]


def _documents(cu_seqlens: torch.Tensor | Sequence[int] | None, seq_len: int) -> tuple[Range, ...]:
    """Returns the documents that are not empty."""
    if cu_seqlens is None:
        return ((0, seq_len),) if seq_len else ()
    if not isinstance(cu_seqlens, torch.Tensor):
        cu_seqlens = torch.tensor(as_int_tuple("cu_seqlens", cu_seqlens))
    if cu_seqlens.dim() != 1 or cu_seqlens.is_floating_point() or not len(cu_seqlens):
        raise ValueError(
            f"cu_seqlens has shape {tuple(cu_seqlens.shape)} and dtype {cu_seqlens.dtype}; expected integers (documents + 1,), "
            "e.g. int32 boundaries from 0 to N"
        )
    return document_ranges(tuple(cu_seqlens.tolist()), seq_len)
