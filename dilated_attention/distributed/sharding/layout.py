"""Layouts of a sharded sequence: which positions each process holds, for any length.

    contiguous  W runs; rank r holds the r-th                      natural order, unbalanced if causal
    zigzag      2W runs; rank r holds the r-th and the (2W−1−r)-th  balanced if causal
    striped     rank r holds every position ≡ r (mod W)             balanced if causal, finest
    a Layout    the runs that it lists                              balanced for patterns and documents (balanced_layout)

Runs of the first two differ by at most one position, the longer ones first, so any length is possible and nothing is padded.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dilated_attention.distributed.comm.group import Members, members_of
from dilated_attention.engine.branches.problems import Range
from dilated_attention.pattern.checks import as_int, as_int_tuple, one_of
from dilated_attention.validation import not_a_tensor

Span = tuple[int, int, int]
_PREFIX = "runs:"
LAYOUTS = ("contiguous", "zigzag", "striped")
Runs = tuple[Range, ...]


@dataclass(frozen=True)
class Layout:
    """An explicit layout: which positions of a sequence of N each of W processes holds.

    It is accepted wherever a layout is: by ``shard_sequence``, ``unshard_sequence``, ``local_positions`` and attention over sharded
    sequences. ``balanced_layout`` makes one.

    Args:
        seq_len: N.
        runs: for each process its runs [start, end), ascending; together they hold every position once.
        imbalance: maximum over mean work of a process, if the layout was made for a given workload; 1 is even.

    Raises:
        ValueError: if the runs leave out a position or hold it twice.
    """

    seq_len: int
    runs: tuple[Runs, ...]
    imbalance: float = 1.0
    # the layout's name where only strings can be passed; not ``str()``, which torch.compile cannot trace
    name: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        runs = tuple(tuple((int(start), int(end)) for start, end in mine) for mine in self.runs)
        object.__setattr__(self, "runs", runs)
        if not runs:
            raise ValueError("runs is empty; expected the runs of at least one process")
        for rank, mine in enumerate(runs):
            if any(start >= end for start, end in mine) or any(a[1] > b[0] for a, b in itertools.pairwise(mine)):
                shown = mine if len(mine) <= 6 else f"{mine[:6]} …"
                raise ValueError(f"runs[{rank}] is {shown}; expected runs (start, end) with start < end, ascending, without overlap")
        end = 0
        for start, stop in sorted(run for mine in runs for run in mine):
            if start != end:
                raise ValueError(f"runs {'leave out' if start > end else 'hold twice'} position {min(start, end)}; each must be held once")
            end = stop
        if end != self.seq_len:
            raise ValueError(f"runs end at position {end} of a sequence of {self.seq_len}; they must hold all of it")
        text = ";".join(",".join(f"{start}-{stop}" for start, stop in mine) for mine in runs)
        object.__setattr__(self, "name", f"{_PREFIX}{self.seq_len}:{text}")

    @property
    def size(self) -> int:
        """W, the number of processes."""
        return len(self.runs)


def layout_name(layout: Any, known: tuple[str, ...] = LAYOUTS) -> str:
    """Returns a layout as the string that names it. ``known``: the layouts of one word that are accepted here; ValueError or TypeError for
    anything else but a ``Layout``."""
    if isinstance(layout, Layout):
        return layout.name
    if not (isinstance(layout, str) and layout.startswith(_PREFIX)):
        one_of("layout", layout, known, also="or a Layout, e.g. from balanced_layout")
    return str(layout)


def is_dealt(layout: str) -> bool:
    """Whether the name is that of a ``Layout``."""
    return layout.startswith(_PREFIX)


def short_name(layout: str) -> str:
    """Returns the name in the form shown in messages."""
    return (
        layout
        if len(layout) <= 60
        else f"{layout[:40]} … ({layout.count('-')} runs, hash {hashlib.sha256(layout.encode()).hexdigest()[:8]})"
    )


@functools.lru_cache(maxsize=64)
def runs_of(layout: str, seq_len: int, size: int) -> tuple[Runs, ...]:
    """Returns every process's runs from the name of a ``Layout``; ValueError if it was made for another length or number of processes."""
    length, _, text = layout.removeprefix(_PREFIX).partition(":")
    runs = [[run.split("-") for run in mine.split(",") if run] for mine in text.split(";")]
    if (int(length), len(runs)) != (seq_len, size):
        raise ValueError(
            f"layout is for {length} positions on {len(runs)} processes, the sequence has {seq_len} on {size}; make one for them with "
            f"balanced_layout(pattern, {seq_len}, {size})"
        )
    return tuple(tuple((int(start), int(end)) for start, end in mine) for mine in runs)


class ShardSpec(NamedTuple):
    """Rows at the positions of ``spans``, one after the other, and their heads [first, last)."""

    spans: tuple[Span, ...]
    heads: Range

    @property
    def rows(self) -> int:
        return sum(len(range(*span)) for span in self.spans)


def spans(seq_len: int, rank: int, size: int, layout: str | Layout) -> tuple[Span, ...]:
    """Returns (start, stop, step) of the positions of one rank, in the order in which it holds them."""
    return spans_of(seq_len, rank, size, layout_name(layout))


def spans_of(seq_len: int, rank: int, size: int, layout: str) -> tuple[Span, ...]:
    """Same as ``spans``, of a layout's name, which is not checked again."""
    if is_dealt(layout):
        # a rank without runs gets an empty one
        return tuple((start, stop, 1) for start, stop in runs_of(layout, seq_len, size)[rank]) or ((0, 0, 1),)
    if layout == "striped":
        return ((min(rank, seq_len), seq_len, size),)
    runs, indices = (size, (rank,)) if layout == "contiguous" else (2 * size, (rank, 2 * size - 1 - rank))
    length, longer = divmod(seq_len, runs)
    return tuple((i * length + min(i, longer), (i + 1) * length + min(i + 1, longer), 1) for i in indices)


def joined(ranges: Iterable[Range]) -> Runs:
    """Returns ascending ranges [start, stop) with those that meet as one and without empty ones."""
    found = list[Range]()
    for start, stop in ranges:
        if found and start <= found[-1][1]:
            first, last = found.pop()
            found.append((first, max(last, stop)))
        elif start < stop:
            found.append((start, stop))
    return tuple(found)


def shards_of(seq_len: int, size: int, layout: str, *, is_causal: bool) -> tuple[Runs, ...]:
    """Returns the position ranges of each rank's rows during the computation. Striped rows are no ranges, which it needs, so they are moved
    into another layout first."""
    layout = ("zigzag" if is_causal else "contiguous") if layout == "striped" else layout
    # adjacent ranges become one
    return tuple(joined((start, stop) for start, stop, _ in spans_of(seq_len, rank, size, layout)) for rank in range(size))


def local_lengths(seq_len: int, size: int, layout: str) -> list[int]:
    """Returns how many positions each rank holds."""
    return [ShardSpec(spans_of(seq_len, rank, size, layout), (0, 1)).rows for rank in range(size)]


def local_positions(
    group_or_mesh: Any, seq_len: int, *, layout: str | Layout = "contiguous", device: torch.device | str | None = None
) -> Tensor:
    """Returns the positions (n,) int64 of this rank's rows in the whole sequence, for rotary embeddings and position ids.

    Args:
        group_or_mesh: a ProcessGroup, a DeviceMesh of one axis, or None for all processes.
        seq_len: N, of the whole sequence.
        layout: ``"contiguous"`` · ``"zigzag"`` · ``"striped"`` · a ``Layout``.
    """
    members = members_of(group_or_mesh)
    seq_len = as_int("seq_len", seq_len, minimum=0)
    return positions_of(seq_len, members.rank, members.size, layout, device)


def positions_of(seq_len: int, rank: int, size: int, layout: str | Layout, device: torch.device | str | None) -> Tensor:
    """Same as ``local_positions``, but for any rank."""
    return torch.cat([torch.arange(*span, device=device) for span in spans(seq_len, rank, size, layout)])


def shard_sequence(
    group_or_mesh: Any, buffers: Sequence[Tensor], seq_dims: Sequence[int], *, layout: str | Layout = "contiguous"
) -> list[Tensor]:
    """Cuts out this rank's shard of tensors that every rank holds whole, each along its sequence dimension.

    Differentiable; needs no communication.

    Args:
        group_or_mesh: a ProcessGroup, a DeviceMesh of one axis, or None for all processes.
        buffers: whole tensors.
        seq_dims: the sequence dimension of each.
        layout: ``"contiguous"`` · ``"zigzag"`` · ``"striped"`` · a ``Layout``.

    Returns:
        New contiguous tensors with ceil or floor of N/W positions (zigzag: two runs of N/(2W)), or the rank's runs of a ``Layout``.

    Raises:
        ValueError, TypeError: if the numbers of dimensions and buffers differ, a dimension is out of range, or the group lacks this rank.
    """
    members = members_of(group_or_mesh)
    dims = _check(buffers, seq_dims)
    return [_cut(x, dim, spans(x.shape[dim], members.rank, members.size, layout)) for x, dim in zip(buffers, dims, strict=True)]


def _cut(x: Tensor, dim: int, held: Sequence[Span]) -> Tensor:
    pieces = [x[(slice(None),) * dim + (slice(*span),)] for span in held]
    # the memory format of one piece may be another
    return torch.cat(pieces, dim).contiguous()


def unshard_sequence(
    group_or_mesh: Any,
    buffers: Sequence[Tensor],
    seq_dims: Sequence[int],
    *,
    layout: str | Layout = "contiguous",
    seq_len: int | None = None,
) -> list[Tensor]:
    """Gathers the whole tensors on every rank from every rank's shard: the inverse of ``shard_sequence``. All ranks must call it.

    Differentiable: the gradient of each rank's shard is summed over all ranks, as if the loss were the sum of their losses.

    Args:
        seq_len: N, to check against the shards; None for the sum of all ranks' lengths.

    Raises:
        ValueError: if the ranks' lengths are not those of one sequence in this layout, or if their tensors differ in dtype or in another
            dimension, or their layout or seq_len; raised on every rank, naming the ranks.
    """
    members = members_of(group_or_mesh)
    layout = layout_name(layout)
    seq_len = None if seq_len is None else as_int("seq_len", seq_len, minimum=0)
    dims = _check(buffers, seq_dims)
    lengths = _exchange_lengths(members, buffers, dims, f"layout {short_name(layout)!r} and seq_len {seq_len}")
    totals = list[int]()
    for index, found in enumerate(map(list, zip(*lengths, strict=True))):
        totals.append(sum(found) if seq_len is None else seq_len)
        expected = local_lengths(totals[-1], members.size, layout)
        if found != expected:
            raise ValueError(
                f"buffers[{index}] has {found} positions on the group's ranks; a {short_name(layout)} sequence of {totals[-1]} has "
                f"{expected}: shard it with shard_sequence and the same layout and seq_len"
            )
    if members.size == 1:
        return [x.clone(memory_format=torch.contiguous_format) for x in buffers]
    return [_Moved.apply(x, dim, total, layout, members, True) for x, dim, total in zip(buffers, dims, totals, strict=True)]


class _Moved(torch.autograd.Function):
    """Gathers all ranks' shards in order of position (``gathers``), or returns this rank's shard of the sum of all ranks' tensors: each is
    the derivative of the other."""

    @staticmethod
    def forward(x: Tensor, dim: int, seq_len: int, layout: str, members: Members, gathers: bool) -> Tensor:
        if not gathers:
            # not in place, because autograd may pass the tensor to others
            total = x.clone(memory_format=torch.contiguous_format)
            dist.all_reduce(total, group=members.group)
            return _cut(total, dim, spans(seq_len, members.rank, members.size, layout))
        most, moved = max(local_lengths(seq_len, members.size, layout)), x.movedim(dim, 0)
        # bool is sent as bytes, because not every communication library supports it
        is_bool = x.dtype is torch.bool
        mine = moved.new_zeros((most, *moved.shape[1:]), dtype=torch.uint8 if is_bool else x.dtype)
        mine[: moved.shape[0]] = moved
        parts = [torch.empty_like(mine) for _ in range(members.size)]
        dist.all_gather(parts, mine, group=members.group)
        whole = mine.new_empty((seq_len, *moved.shape[1:]))
        for rank, part in enumerate(parts):
            held = spans(seq_len, rank, members.size, layout)
            counts = [len(range(*span)) for span in held]
            for span, piece in zip(held, part[: sum(counts)].split(counts), strict=True):
                whole[slice(*span)] = piece
        return (whole.bool() if is_bool else whole).movedim(0, dim).contiguous()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.settings = inputs[1:]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *settings, gathers = ctx.settings
        return _Moved.apply(grad, *settings, not gathers), *(None,) * len(ctx.settings)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: Tensor, dim: int, *settings: Any) -> tuple[Tensor, int]:
        return _Moved.apply(x.movedim(in_dims[0], 0), dim + 1, *settings), 0

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> Tensor:
        raise NotImplementedError(
            "unshard_sequence has no forward mode, and got a tangent, which the other processes may not have; use reverse mode "
            "(torch.func.vjp, grad), or unshard the tangents in a separate call"
        )


def _check(buffers: Sequence[Tensor], seq_dims: Sequence[int]) -> list[int]:
    if not isinstance(buffers, (list, tuple)):
        raise TypeError(f"buffers is a {type(buffers).__name__}; expected a list of tensors, e.g. [q, k, v]")
    if isinstance(seq_dims, int) or len(as_int_tuple("seq_dims", seq_dims)) != len(buffers):
        raise ValueError(f"seq_dims is {seq_dims} for {len(buffers)} buffers; give one sequence dimension for each")
    dims = []
    for index, (x, dim) in enumerate(zip(buffers, seq_dims, strict=True)):
        if not isinstance(x, Tensor):
            raise not_a_tensor(f"buffers[{index}]", x, "a tensor")
        if not -x.dim() <= dim < x.dim():
            raise ValueError(f"seq_dims[{index}] is {dim} for a tensor of shape {tuple(x.shape)}; expected {-x.dim()} to {x.dim() - 1}")
        dims.append(dim % x.dim())
    return dims


def _exchange_lengths(members: Members, buffers: Sequence[Tensor], dims: Sequence[int], how: str) -> list[list[int]]:
    """Gathers every rank's lengths, so that all ranks check the same values and none waits for one that has raised an error.

    Raises ValueError, on every rank, if their tensors differ otherwise, since a collective of unequal tensors may abort the process, or
    ``how`` they are put together does."""

    def gather(mine: list[int]) -> list[list[int]]:
        local = torch.tensor(mine, dtype=torch.int64, device=buffers[0].device)
        rows = local.new_empty((members.size, len(mine)))
        dist.all_gather(list(rows), local, group=members.group)
        return rows.tolist()  # type: ignore[no-any-return]

    sizes = list(zip(buffers, dims, strict=True))
    lengths = [x.shape[dim] for x, dim in sizes]
    if members.size == 1 or not buffers:
        return [lengths] * members.size
    kinds = ", ".join([f"{x.dtype} {(*x.shape[:dim], 'N', *x.shape[dim + 1 :])}" for x, dim in sizes])
    kinds += f", with {how},"
    digests = gather([zlib.crc32(kinds.encode())])
    if others := [rank for rank, digest in enumerate(digests) if digest != digests[members.rank]]:
        raise ValueError(
            f"buffers are {kinds} on rank {members.rank} and others on ranks {others}; expected the same dtypes and sizes, but for N, "
            "the same layout, and seq_len on all ranks or on none"
        )
    return gather(lengths)
