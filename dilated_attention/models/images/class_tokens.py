"""Class tokens in a sequence that processes share: which rows move to make room for them, and sums of rows over all processes.

A class token is a position of the sequence, so S of them change which process holds which tile. With contiguous shards of 9 tiles over 2
processes and one class token c, tile 4 moves:

    tiles        0 1 2 3 4 | 5 6 7 8
    sequence   c 0 1 2 3 | 4 5 6 7 8

For contiguous shards at most S rows leave a process, for zigzag 2S; of striped shards almost all rows move.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from dilated_attention.distributed.comm.group import members_named
from dilated_attention.distributed.sharding.layout import Span, spans
from dilated_attention.distributed.sharding.reshard import ShardSpec, SharedRows, shared_rows
from dilated_attention.functional.arguments import place_in
from dilated_attention.models.loss import sum_over_group

Run = tuple[int, int]
Move = tuple[tuple[SharedRows, ...], ...]


def rows_at(held: Sequence[Span], start: int, stop: int) -> list[Run]:
    """Returns the runs [first, last) of a process's rows that are at positions in [start, stop)."""
    found = []
    row = 0
    for span in held:
        places = range(*span)
        first, last = (min(max(-(-(end - places.start) // places.step), 0), len(places)) for end in (start, stop))
        if first < last:
            found.append((row + first, row + last))
        row += len(places)
    return found


@dataclass(frozen=True, slots=True)
class TokenPlan:
    """What one process does when class tokens are inserted.

    Args:
        tiles, rows: the number of its rows before, and after with class tokens.
        tokens: which of its rows after are class tokens.
        sends, receives: for each process the rows that go there, and that come from there; ``here`` is before, ``there`` after.
        travels: whether any process sends a row to another.
    """

    tiles: int
    rows: int
    tokens: tuple[int, ...]
    sends: Move
    receives: Move
    travels: bool


@functools.lru_cache(maxsize=64)
def token_plan(bounds: tuple[int, ...], rank: int, size: int, layout: str) -> TokenPlan:
    """Plans class tokens before each of the slides [bounds[i], bounds[i + 1]) of a sharded sequence of tiles."""
    whole = bounds[-1] + len(bounds) - 1
    before = [ShardSpec(_moved_up(bounds, spans(bounds[-1], r, size, layout)), (0, 1)) for r in range(size)]
    after = [ShardSpec(spans(whole, r, size, layout), (0, 1)) for r in range(size)]
    places = (bound + slide for slide, bound in enumerate(bounds[:-1]))
    return TokenPlan(
        tiles=before[rank].rows,
        rows=after[rank].rows,
        tokens=tuple(row for place in places for row, _ in rows_at(after[rank].spans, place, place + 1)),
        sends=tuple(shared_rows(before[rank], there) for there in after),
        receives=tuple(shared_rows(here, after[rank]) for here in before),
        travels=any(shared_rows(before[r], after[s]) for r, s in itertools.permutations(range(size), 2)),
    )


def _moved_up(bounds: tuple[int, ...], held: Sequence[Span]) -> tuple[Span, ...]:
    """Returns the positions that tiles have once there is a class token before their own slide and before each earlier one."""
    moved = []
    for start, stop, step in held:
        for slide, run in enumerate(itertools.pairwise(bounds)):
            for first, last in rows_at([(start, stop, step)], *run):
                moved.append((start + first * step + slide + 1, start + (last - 1) * step + slide + 2, step))
    return tuple(moved)


@torch.library.custom_op("dilated_attention::insert_class_tokens", mutates_args=())
def insert_class_tokens(x: torch.Tensor, token: torch.Tensor, bounds: Sequence[int], group_name: str, layout: str) -> torch.Tensor:
    """Returns this process's rows (B, n′, E) of the sequence with class tokens, from its rows x (B, n, E) of the tiles.

    Args:
        x: its rows in the order of the layout.
        token: (E,), in x's dtype.
        bounds: of the slides in the whole sequence of tiles, each of which gets a class token before its first tile.
        group_name, layout: see ``RingSettings``. All processes must call it.

    If n rows are no shard of the tiles, it returns a row too many: the attention that follows then refuses them, on all processes alike.
    """
    plan = _plan(bounds, group_name, layout)
    is_shard = x.shape[1] == plan.tiles
    rows = x if is_shard else x.new_zeros(x.shape[0], plan.tiles, x.shape[2])
    out = x.new_empty(x.shape[0], plan.rows, x.shape[2])
    _move(rows, out, plan, group_name, inverse=False)
    for row in plan.tokens:
        out[:, row] = token
    return out if is_shard else x.new_zeros(x.shape[0], plan.rows + 1, x.shape[2])


@torch.library.custom_op("dilated_attention::remove_class_tokens", mutates_args=())
def remove_class_tokens(x: torch.Tensor, bounds: Sequence[int], group_name: str, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns this process's rows (B, n, E) of the tiles, and the sum (E,) of its class tokens: the derivative of the former."""
    plan = _plan(bounds, group_name, layout)
    out = x.new_empty(x.shape[0], plan.tiles, x.shape[2])
    _move(x, out, plan, group_name, inverse=True)
    tokens = [x[:, row] for row in plan.tokens]
    return out, torch.stack(tokens).sum((0, 1)) if tokens else x.new_zeros(x.shape[2])


@insert_class_tokens.register_fake
def _(x: torch.Tensor, token: torch.Tensor, bounds: Sequence[int], group_name: str, layout: str) -> torch.Tensor:
    return x.new_empty(x.shape[0], _plan(bounds, group_name, layout).rows, x.shape[2])


@remove_class_tokens.register_fake
def _(x: torch.Tensor, bounds: Sequence[int], group_name: str, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape[0], _plan(bounds, group_name, layout).tiles, x.shape[2]), x.new_empty(x.shape[2])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.settings = inputs[2:]


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    return (*remove_class_tokens(grad, *ctx.settings), None, None, None)


insert_class_tokens.register_autograd(_backward, setup_context=_keep)


def _plan(bounds: Sequence[int], group_name: str, layout: str) -> TokenPlan:
    return token_plan(tuple(int(bound) for bound in bounds), *place_in(group_name), layout)


def _move(x: torch.Tensor, out: torch.Tensor, plan: TokenPlan, group_name: str, *, inverse: bool) -> None:
    """Copies tiles to their rows with class tokens, or back, on whichever process these are."""
    members = members_named(group_name)
    sends, receives = (plan.receives, plan.sends) if inverse else (plan.sends, plan.receives)

    def sent(pieces: Sequence[SharedRows]) -> list[torch.Tensor]:
        return [piece.of(x[:, :, None], piece.there if inverse else piece.here, 0) for piece in pieces]

    def arrived(pieces: Sequence[SharedRows]) -> list[torch.Tensor]:
        return [piece.of(out[:, :, None], piece.here if inverse else piece.there, 0) for piece in pieces]

    for place, part in zip(arrived(receives[members.rank]), sent(sends[members.rank]), strict=True):
        place.copy_(part)
    if not plan.travels:
        return
    away = [() if rank == members.rank else pieces for rank, pieces in enumerate(sends)]
    home = [() if rank == members.rank else pieces for rank, pieces in enumerate(receives)]
    counts = [[sum(piece.count for piece in pieces) for pieces in moves] for moves in (home, away)]
    # rows go first, since processes are sent whole rows
    parts = [part.transpose(0, 1) for pieces in away for part in sent(pieces)]
    packed = torch.cat(parts) if parts else x.new_empty(0, x.shape[0], 1, x.shape[2])
    received = x.new_empty(sum(counts[0]), *packed.shape[1:])
    dist.all_to_all_single(received, packed.contiguous(), counts[0], counts[1], group=members.group)
    places = [place for pieces in home for place in arrived(pieces)]
    for place, part in zip(places, received.split([place.shape[1] for place in places]), strict=True):
        place.copy_(part.transpose(0, 1))


def sum_runs(x: torch.Tensor, runs: Sequence[Run], seq_len: int, group_name: str, layout: str) -> torch.Tensor:
    """Sums the rows at the positions of each run over all processes, which must all call it.

    Args:
        x: (B, n, E), this process's rows.
        runs: disjoint runs [start, stop) of positions in the whole sequence.
        seq_len, group_name, layout: of the whole sequence.

    Returns:
        (B, runs, E), equal on all processes, float32 for 16-bit x. A process's gradient is the sum over all processes' losses, as
        ``average_gradients``, DDP and FSDP2 need it.
    """
    held = spans(seq_len, *place_in(group_name), layout)
    pieces = sorted((*rows, index) for index, run in enumerate(runs) for rows in rows_at(held, *run))
    edges = [0, *(edge for first, last, _ in pieces for edge in (first, last)), x.shape[1], x.shape[1]]
    # the backward of one split is one tensor, that of each slice would be one of x's size
    parts = x.split([b - a for a, b in itertools.pairwise(edges)], dim=1)
    dtype = torch.float64 if x.dtype is torch.float64 else torch.float32
    # the sum of no rows ties a process without rows to the backward, in which all must take part
    sums = [parts[-1].sum(1, dtype=dtype)] * len(runs)
    for (_, _, index), part in zip(pieces, parts[1::2], strict=False):
        sums[index] = sums[index] + part.sum(1, dtype=dtype)
    return sum_over_group(torch.stack(sums, 1), group_name)
