"""Results of a problem in float64, of all rows of some heads or of sampled ones: out, lse, dq, dk and dv, under every option.

It follows the definition, softmax(q kᵀ / √D + log m) v over the multiset of keys of each row, a tile of rows and keys at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dilated_attention.backends import Dropout
from dilated_attention.backends.dropout import keep_mask
from dilated_attention.bench.workloads.problem import Problem
from dilated_attention.engine.blocks.lists import block_lists
from dilated_attention.functional import attention, block_sparse_attention, dilated_attention
from dilated_attention.pattern import NOT_IN_BRANCH, BlockPattern, DilatedPattern
from dilated_attention.pattern.blocks.block_lists import BlockLists

Pattern = DilatedPattern | BlockPattern
# several times the ‖found − true‖ / ‖true‖ that rounding explains; float32 products may be TF32 on a GPU
BOUNDS = {torch.float64: 1e-10, torch.float32: 2e-3, torch.float16: 6e-3, torch.bfloat16: 2e-2}
RESULTS = ("out", "dq", "dk", "dv")
# of the dropout that a checked call draws
SEED = 20
# every row of some heads is compared up to this length, ROWS of each head beyond it
ALL_ROWS = {"cuda": 10_240, "cpu": 256}
ROWS = 64
# numbers of a tile of rows and keys, 128 MiB in float64; and rows of 128 numbers at a time, likewise: a call of the longest sequence that
# fits leaves little memory
_TILE, _STRETCH = 2**24, 2**17
# out (B, N, H, D) and lse (B, H, N) of each softmax
Given = list[tuple[torch.Tensor, torch.Tensor]]


def our_call(problem: Problem, pattern: Pattern, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
    """Calls this library's function of ``pattern``, with the problem's mask and options."""
    options = problem.arguments | options
    if isinstance(pattern, BlockPattern):
        return block_sparse_attention(q, k, v, pattern, **options)
    if pattern.dilation_rates == (1,) and pattern.segment_lengths[0] >= problem.num_positions and options.get("mixture_grad") is None:
        return attention(q, k, v, **options)
    options = {"head_offsets": pattern.head_offsets, "tail": pattern.tail} | options
    return dilated_attention(q, k, v, pattern.segment_lengths, pattern.dilation_rates, **options)


@dataclass
class _Head:
    """True results of one key/value head: out, lse and dq of its query heads (group, rows, …), dk and dv (keys, D) unless unknown."""

    batch: int
    kv_head: int
    rows: torch.Tensor
    keys: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    dq: torch.Tensor
    dk: torch.Tensor | None = None
    dv: torch.Tensor | None = None


class Truth:
    """Results in float64 of two key/value heads, for all of their rows or some of them.

    dk and dv of a key rest on out and lse of all rows that see it. Where only some rows are computed here, they are taken from ``given``,
    whose sampled rows are compared, too. With a detached mixture there is a softmax of its own for every branch.

    Args:
        leaves, dout: inputs; random ones by default.
        given: by default this library's own forward; where that does not run, dk and dv are not compared.
        whole: whether all rows are compared; by default where there are few.
        count: the number of rows otherwise.
        gradients: False leaves out dq, dk and dv.
    """

    def __init__(
        self,
        problem: Problem,
        pattern: Pattern,
        mixture_grad: str = "exact",
        *,
        leaves: Sequence[torch.Tensor] | None = None,
        dout: torch.Tensor | None = None,
        given: Given | None = None,
        whole: bool | None = None,
        count: int = ROWS,
        gradients: bool = True,
    ) -> None:
        self.problem, self.pattern = problem, pattern
        self.leaves = list(problem.qkv(7) if leaves is None else leaves)
        self.dout = problem.dout(101) if dout is None and gradients else dout
        self._count = None if (problem.num_positions <= ALL_ROWS[problem.device.type] if whole is None else whole) else count
        self._softmaxes = _softmaxes(problem, pattern, mixture_grad)
        self._bounds = torch.tensor(problem.bounds or (0, problem.num_positions), device=problem.device)
        # the seed that the call draws after torch.manual_seed(SEED)
        self._seed = int(torch.randint(2**62, (), generator=torch.Generator().manual_seed(SEED))) if problem.dropout_p else 0
        with torch.no_grad():
            if given is None and self._count is not None and self.dout is not None:
                given = self._own()
            places = dict.fromkeys([(0, problem.kv_heads // 3), (problem.batch_size - 1, problem.kv_heads - 1)])
            self._heads = [self._head(b, kv_head, given) for b, kv_head in places]

    def errors(
        self, out: torch.Tensor, grads: Sequence[torch.Tensor] = (), until: int | None = None, lse: torch.Tensor | None = None
    ) -> dict[str, float]:
        """Returns relative errors of out and of dq, dk, dv if given, and the largest absolute one of lse.

        With ``until``, of rows before it alone, and not of dk and dv.
        """
        squares: dict[str, list[float]] = {}
        lse_errors: list[torch.Tensor] = []
        group = self.problem.num_heads // self.problem.kv_heads
        for true in self._heads:
            rows = true.rows if until is None else true.rows[true.rows < until]
            at = rows - self.problem.offset
            for i in range(group):
                head = true.kv_head * group + i
                for name, found, exact in zip(("out", "dq"), (out, *grads[:1]), (true.out, true.dq), strict=False):
                    _add(squares, name, found.detach()[true.batch, at, head], exact[i, : len(rows)])
                if lse is not None:
                    found_lse, true_lse = lse.detach()[true.batch, head, at], true.lse[i, : len(rows)]
                    lse_errors.append(torch.where(found_lse == true_lse, 0.0, found_lse - true_lse).abs())
            for name, found, keys in zip(("dk", "dv"), grads[1:], (true.dk, true.dv), strict=False):
                if keys is not None and until is None:
                    _add(squares, name, found[true.batch, true.keys, true.kv_head], keys)
        errors = {name: (off / true) ** 0.5 if true else float(off > 0) for name, (off, true) in squares.items()}
        return errors if lse is None else errors | {"lse": float(torch.cat(lse_errors).max())}

    def _own(self) -> Given | None:
        """Returns what this library's forward gives, a softmax at a time; None where it does not run."""
        found = []
        for pattern in self._softmaxes:
            torch.manual_seed(SEED)
            try:
                found.append(our_call(self.problem, pattern, *self.leaves, return_lse=True))
            except RuntimeError:
                return None
        return found

    def _head(self, b: int, kv_head: int, given: Given | None) -> _Head:
        problem, group = self.problem, self.problem.num_heads // self.problem.kv_heads
        heads = range(kv_head * group, (kv_head + 1) * group)
        rows, keys = (self._places(first, kv_head + b, heads[0]) for first in (problem.offset, 0))
        outs, lses, dqs = (torch.stack(x) for x in zip(*(self._rows(b, head, rows) for head in heads), strict=True))
        weights = _weights(lses)[..., None]
        found = _Head(b, kv_head, rows, keys, (weights * outs).sum(1), lses.logsumexp(1), (weights * dqs).sum(1))
        if self.dout is not None and (self._count is None or given is not None):
            found.dk = torch.zeros(len(keys), problem.head_dim, dtype=torch.float64, device=keys.device)
            found.dv = torch.zeros_like(found.dk)
            for i, head in enumerate(heads):
                for part in self._stretches(problem.offset, len(keys)):
                    at = part - problem.offset
                    if given is None:
                        out, lse = outs[i][:, at], lses[i][:, at]
                    else:
                        out = torch.stack([x[b, at, head].double() for x, _ in given])
                        lse = torch.stack([x[b, head, at].double() for _, x in given])
                    self._add_keys(found.dk, found.dv, b, head, part, keys, out, lse)
        return found

    def _places(self, first: int, seed: int, head: int) -> torch.Tensor:
        """Returns all positions, or sorted ones: the ends, random ones, and as many that the widest dilation takes."""
        last, count = self.problem.num_positions, self._count
        if count is None:
            return torch.arange(first, last, device=self.problem.device)
        places = torch.randint(first, last, (count - 2,), generator=torch.Generator().manual_seed(seed))
        if isinstance(self.pattern, DilatedPattern):
            length, rate = max(self.pattern.branches, key=lambda branch: branch[1])
            offset = self.pattern.offsets(self.problem.num_heads)[self.pattern.dilation_rates.index(rate)][head]
            inside = (places - self._documents(places.to(self.problem.device))[0].cpu()) % length
            places[::2] = (places - inside % rate + max(offset, 0))[::2].clamp(first, last - 1)
        return torch.cat([places, torch.tensor([first, last - 1])]).unique().to(self.problem.device)

    def _stretches(self, first: int, others: int) -> Iterator[torch.Tensor]:
        """Yields the positions from ``first`` on, as many at a time as fit into a tile with ``others`` positions."""
        step, last = max(1, min(_STRETCH, _TILE // others)), self.problem.num_positions
        for start in range(first, last, step):
            yield torch.arange(start, min(start + step, last), device=self.problem.device)

    def _rows(self, b: int, head: int, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns out (softmaxes, rows, D), lse (softmaxes, rows) and dq (softmaxes, rows, D) of one head; dq is 0 without gradients."""
        outs, lses, dqs = [], [], []
        for pattern in self._softmaxes:
            lse = self._zero_keys(pattern, head, rows).log()
            for keys in self._stretches(0, len(rows)):
                lse = torch.logaddexp(lse, self._logits(pattern, b, head, rows, keys).logsumexp(1))
            out = torch.zeros(len(rows), self.problem.head_dim, dtype=torch.float64, device=rows.device)
            dq, pk = torch.zeros_like(out), torch.zeros_like(out)
            for keys in self._stretches(0, len(rows)):
                _, k, v, dout = self._inputs(b, head, rows, keys)
                p = (self._logits(pattern, b, head, rows, keys) - _finite(lse)[:, None]).exp()
                kept = p * self._keep(b, head, rows, keys)
                out += kept @ v
                if dout is not None:
                    dq += (kept * (dout @ v.T)) @ k
                    pk += p @ k
            if dout is not None:
                dq -= (dout * out).sum(1, keepdim=True) * pk
            outs.append(out)
            lses.append(lse)
            dqs.append(dq * self.problem.head_dim**-0.5)
        return torch.stack(outs), torch.stack(lses), torch.stack(dqs)

    def _add_keys(
        self, dk: torch.Tensor, dv: torch.Tensor, b: int, head: int, rows: torch.Tensor, keys: torch.Tensor, outs: torch.Tensor,
        lses: torch.Tensor,
    ) -> None:  # fmt: skip
        """Adds what rows of one head contribute to dk and dv (keys, D), from out and lse (softmaxes, rows, …) of these rows."""
        q, _, v, dout = self._inputs(b, head, rows, keys)
        assert dout is not None
        keep = self._keep(b, head, rows, keys)
        for pattern, out, lse, weight in zip(self._softmaxes, outs, lses, _weights(lses), strict=True):
            p = (self._logits(pattern, b, head, rows, keys) - _finite(lse)[:, None]).exp() * weight[:, None]
            dv += (p * keep).T @ dout
            dk += (p * (keep * (dout @ v.T) - (dout * out).sum(1, keepdim=True))).T @ q * self.problem.head_dim**-0.5

    def _inputs(self, b: int, head: int, rows: torch.Tensor, keys: torch.Tensor) -> tuple[Any, Any, Any, Any]:
        """Returns q (rows, D), k and v (keys, D) and dout (rows, D), if there is one, in float64."""
        at, kv_head = rows - self.problem.offset, head * self.problem.kv_heads // self.problem.num_heads
        k, v = (x[b, keys, kv_head].detach().double() for x in self.leaves[1:])
        return self.leaves[0][b, at, head].detach().double(), k, v, None if self.dout is None else self.dout[b, at, head].double()

    def _logits(self, pattern: Pattern, b: int, head: int, rows: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Returns q kᵀ / √D + log m (rows, keys)."""
        q, k, _, _ = self._inputs(b, head, rows, keys)
        return q @ k.T * self.problem.head_dim**-0.5 + self._multiplicity(pattern, b, head, rows, keys).log()

    def _multiplicity(self, pattern: Pattern, b: int, head: int, rows: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        problem = self.problem
        if isinstance(pattern, BlockPattern):
            lists = block_lists(pattern, problem.num_positions, problem.num_heads, is_causal=problem.is_causal, device=rows.device)
            return pairs_of(lists, head, rows, keys).double()
        m = torch.zeros(len(rows), len(keys), dtype=torch.float64, device=rows.device)
        for (length, rate), offsets in zip(pattern.branches, pattern.offsets(problem.num_heads), strict=True):
            if offsets[head] != NOT_IN_BRANCH:
                of_rows, of_keys = (
                    self._segments(rows, length, rate, offsets[head], -1),
                    self._segments(keys, length, rate, offsets[head], -2),
                )
                m += of_rows[:, None] == of_keys
        distance = keys - rows[:, None]
        left, right = problem.window or (None, None)
        if left is not None:
            m.masked_fill_(distance < -left, 0.0)
        right = 0 if problem.is_causal else right
        if right is not None:
            m.masked_fill_(distance > right, 0.0)
        return m if problem.key_padding_mask is None else m * ~problem.key_padding_mask[b, keys]

    def _documents(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the first position and the size of the document of each position."""
        if self.problem.bounds is None:
            return torch.zeros_like(x), torch.full_like(x, self.problem.num_positions)
        number = torch.searchsorted(self._bounds, x, right=True)
        return self._bounds[number - 1], self._bounds[number] - self._bounds[number - 1]

    def _segments(self, x: torch.Tensor, length: int, rate: int, offset: int, nowhere: int) -> torch.Tensor:
        """Returns the first position of each position's segment, ``nowhere`` where the branch does not take it."""
        inside = x - self._documents(x)[0]
        return torch.where(inside % length % rate == offset, x - inside % length, nowhere)

    def _zero_keys(self, pattern: Pattern, head: int, rows: torch.Tensor) -> torch.Tensor:
        """Returns the number of zero keys of each row, in float64."""
        zero = torch.zeros(len(rows), dtype=torch.float64, device=rows.device)
        if isinstance(pattern, BlockPattern) or pattern.tail != "zero_keys" or self.problem.is_causal:
            return zero
        starts, sizes = self._documents(rows)
        for (length, rate), offsets in zip(pattern.branches, pattern.offsets(self.problem.num_heads), strict=True):
            first = self._segments(rows, length, rate, offsets[head], -1)
            taken = (torch.minimum(first + length, starts + sizes) - first - offsets[head] + rate - 1) // rate
            places = (sizes.clamp(max=length) + rate - 1) // rate
            zero += torch.where((first >= 0) & (offsets[head] != NOT_IN_BRANCH), places - taken, 0)
        return zero

    def _keep(self, b: int, head: int, rows: torch.Tensor, keys: torch.Tensor) -> torch.Tensor | float:
        """Returns 1/(1 − p) where dropout keeps the weight, 0 where it drops it; 1 without dropout."""
        p = self.problem.dropout_p
        if not p:
            return 1.0
        batch, heads = (torch.tensor([x], device=rows.device) for x in (b, head))
        return keep_mask(Dropout(p, self._seed, batch, heads, rows[None], keys[None]), slice(None))[0, 0].double() / (1 - p)


def pairs_of(lists: BlockLists, head: int, rows: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Returns bool (rows, keys): the pairs of one head that the lists keep, masks of single pairs included."""
    first_row = (head if lists.num_heads > 1 else 0) * lists.num_rows
    blocks, block = (first_row + rows // lists.q_block).unique(return_inverse=True)
    columns, column = (keys // lists.k_block).unique(return_inverse=True)
    # entries are in ascending order of (row, column)
    known = lists.row_of_entry * lists.num_columns + lists.columns
    wanted = blocks[:, None] * lists.num_columns + columns
    at = torch.searchsorted(known, wanted)
    found = torch.cat([known, known.new_tensor([-1])])[at] == wanted
    entry = torch.where(found, at, -1)[block][:, column]
    kept = entry >= 0
    if lists.masks is not None:
        masks = torch.where(kept, lists.masks[entry.clamp(min=0)], -1).long()
        inside = keys % lists.k_block
        words = lists.bits[masks.clamp(min=0), (rows % lists.q_block)[:, None], inside // 32]
        kept &= ((words >> (inside % 32)) & 1).bool() | (masks < 0)
    return kept


def _softmaxes(problem: Problem, pattern: Pattern, mixture_grad: str) -> list[Pattern]:
    """Returns the patterns whose softmaxes have gradients of their own: the whole one, or each branch of a detached mixture."""
    if mixture_grad == "exact" or isinstance(pattern, BlockPattern):
        return [pattern]
    branches = zip(pattern.segment_lengths, pattern.dilation_rates, pattern.offsets(problem.num_heads), strict=True)
    return [DilatedPattern((w,), (r,), (tuple(offsets),), tail=pattern.tail) for w, r, offsets in branches]


def _finite(lse: torch.Tensor) -> torch.Tensor:
    return torch.where(lse == -torch.inf, 0.0, lse)


def _weights(lses: torch.Tensor) -> torch.Tensor:
    """Returns the shares of the softmaxes (…, softmaxes, rows) in their mixture; 0 in rows without keys."""
    return (lses - _finite(lses.logsumexp(-2, keepdim=True))).exp()


def _add(squares: dict[str, list[float]], name: str, found: torch.Tensor, true: torch.Tensor) -> None:
    sums = squares.setdefault(name, [0.0, 0.0])
    sums[0] += float((found.double() - true).square().sum())
    sums[1] += float(true.square().sum())
