"""Groups heads that one launch can take together: evenly spaced head indices whose rows are shifted by a constant from head to head.

A kernel reads heads through a single stride. Suppose that head h takes the positions o_h, o_h + r, … Then heads of equal offset are
one view with stride s_H. Heads whose offsets grow evenly – the paper's o_h = h mod r, r heads at a time – are one view too, with
stride s_H + shift · s_N: the head stride carries the offset. So a branch takes min(r, H/r) launches instead of r.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

# (head, offset, kind) of one head of a branch. Heads of equal kind have problems of the same shape
Member = tuple[int, int, Any]


class HeadGroup(NamedTuple):
    """Query heads start, start + step, … and the key/value heads they read, with the same number of query heads for each.

    Args:
        shift: number of positions by which each head's rows are shifted from those of the previous head. If it is not 0, no two
            query heads share their keys, and kv_count is size (kv_step may be 0).
    """

    start: int
    step: int
    size: int
    kv_start: int
    kv_step: int
    kv_count: int
    shift: int = 0


def head_groups(members: Sequence[Member], group_size: int, shifted: bool = True) -> list[tuple[HeadGroup, int, int]]:
    """Divides members into few groups and returns each with the head and the offset of its first member.

    Args:
        members: in the order of their heads.
        group_size: number of query heads that read one key/value head.
        shifted: whether groups may hold heads with different offsets.
    """
    # plans of other lengths, or of a ring's steps, differ in their rows but not in their heads: with kinds replaced by numbers, the
    # groups are cached
    kinds: dict[Any, int] = {}
    return _grouped(tuple([(head, offset, kinds.setdefault(kind, len(kinds))) for head, offset, kind in members]), group_size, shifted)


@functools.lru_cache(maxsize=1024)
def _grouped(members: tuple[Member, ...], group_size: int, shifted: bool) -> list[tuple[HeadGroup, int, int]]:
    best: list[tuple[HeadGroup, int, int]] = []
    indices = [head for head, _, _ in members]
    span = indices[-1] - indices[0] if indices else 0
    # with contiguous heads every step occurs; computing all differences takes seconds from a thousand heads on
    is_whole = span == len(indices) - 1
    steps: Sequence[int] = range(1, span + 1) if is_whole else sorted({b - a for a in indices for b in indices if b > a})
    for same_offset in (True, False) if shifted else (True,):
        # a group never holds two kinds, nor two offsets unless it is shifted
        least = len({(kind, offset if same_offset else 0) for _, offset, kind in members})
        for step in steps or (1,):
            if best and len(best) <= least:
                break
            best = _deal(members, step, group_size, same_offset, len(best) or len(members) + 1) or best
    return best


def _deal(members: Sequence[Member], step: int, group_size: int, same_offset: bool, fewer_than: int) -> list[tuple[HeadGroup, int, int]]:
    """Returns groups of heads ``step`` apart, each as long as one launch can read; an empty list if there are not ``fewer_than``."""
    waiting = {member[0]: member for member in members}
    groups: list[tuple[HeadGroup, int, int]] = []
    for member in members:
        head, offset, _ = member
        if head not in waiting:
            continue
        if len(groups) + 1 == fewer_than:
            return []
        run = [waiting.pop(head)]
        while (after := waiting.get(run[-1][0] + step)) is not None and _joins(run, after, same_offset):
            del waiting[after[0]]
            run.append(after)
        while (group := _as_group(run, group_size)) is None:
            last = run.pop()
            waiting[last[0]] = last
        groups.append((group, head, offset))
    return groups


def _joins(run: list[Member], after: Member, same_offset: bool) -> bool:
    shift = after[1] - run[-1][1]
    # torch has no negative strides, and a head stride of shift · s_N may outweigh s_H
    if after[2] != run[0][2] or shift < 0 or (shift == 0) != same_offset:
        return False
    return len(run) == 1 or shift == run[1][1] - run[0][1]


def _as_group(run: list[Member], group_size: int) -> HeadGroup | None:
    """Returns the run as one group, or None if the key/value heads it reads are not evenly spaced."""
    heads = [head for head, _, _ in run]
    step = heads[1] - heads[0] if len(heads) > 1 else 1
    shift = run[1][1] - run[0][1] if len(run) > 1 else 0
    kv_of = [head // group_size for head in heads]
    if shift:
        kv_step = kv_of[1] - kv_of[0]
        if any(kv != kv_of[0] + kv_step * i for i, kv in enumerate(kv_of)):
            return None
        return HeadGroup(heads[0], step, len(heads), kv_of[0], kv_step, len(heads), shift)
    kv_heads = sorted(set(kv_of))
    kv_step = kv_heads[1] - kv_heads[0] if len(kv_heads) > 1 else 1
    per_kv, rest = divmod(len(heads), len(kv_heads))
    if rest or kv_of != [kv_heads[0] + kv_step * (i // per_kv) for i in range(len(heads))]:
        return None
    return HeadGroup(heads[0], step, len(heads), kv_heads[0], kv_step, len(kv_heads))
