"""Results of a problem in float64, of all rows of some heads or of sampled ones: out, lse, dq, dk and dv, under every option.

It follows the definition, softmax(q kᵀ / √D + log m) v over the multiset of keys of each row, a tile of rows and keys at a time. Which
pairs count is asked of the pattern itself, pair by pair: no plan, no list of blocks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

import dilated_attention as da
from dilated_attention.backends import Dropout
from dilated_attention.backends.dropout import keep_mask
from dilated_attention.bench.workloads.problem import Problem
from dilated_attention.engine.attention_rows import zero_keys
from dilated_attention.pattern import BlockPattern, DilatedPattern

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
Given = list[tuple[Tensor, Tensor]]


def our_call(problem: Problem, pattern: Pattern, *qkv: Tensor, over: str = "", **options: Any) -> Any:
    """Calls this library's function of ``pattern``, with the problem's mask and options; ``over="ring_"``: on a process's part."""
    options = problem.arguments | options
    if isinstance(pattern, BlockPattern):
        return getattr(da, f"{over}block_sparse_attention")(*qkv, pattern, **options)
    if pattern.dilation_rates == (1,) and pattern.segment_lengths[0] >= problem.num_positions and options.get("mixture_grad") is None:
        return getattr(da, f"{over}attention")(*qkv, **options)
    options = {"head_offsets": pattern.head_offsets, "tail": pattern.tail} | options
    return getattr(da, f"{over}dilated_attention")(*qkv, pattern.segment_lengths, pattern.dilation_rates, **options)


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
        self, problem: Problem, pattern: Pattern, mixture_grad: str = "exact", *, leaves: Sequence[Tensor] | None = None,
        dout: Tensor | None = None, given: Given | None = None, whole: bool | None = None, count: int = ROWS, gradients: bool = True,
    ) -> None:  # fmt: skip
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
            # result, places in it, and what is there
            self._true = [each for b, kv_head in places for each in self._results(b, kv_head, given)]

    def errors(self, out: Tensor, grads: Sequence[Tensor] = (), until: int | None = None, lse: Tensor | None = None) -> dict[str, float]:
        """Returns relative errors of out and of dq, dk, dv if given, and the largest absolute one of lse.

        With ``until``, of rows before it alone, and not of dk and dv.
        """
        found = dict(zip(RESULTS, (out, *grads), strict=False)) | ({} if lse is None else {"lse": lse})
        sums: dict[str, list[float]] = {}
        for name, (b, first, second), true in self._true:
            if name not in found or (until is not None and name in ("dk", "dv")):
                continue
            if until is not None and name != "lse":
                before = first + self.problem.offset < until
                first, true = first[before], true[before]
            mine, held = found[name].detach()[b, first, second].double(), sums.setdefault(name, [0.0, 0.0])
            if name == "lse":
                # infinite where it has to be
                off = torch.where(mine == true, 0.0, mine - true).abs().max()
                held[0] = float(off.maximum(off.new_tensor(held[0])))
            else:
                held[0] += float((mine - true).square().sum())
                held[1] += float(true.square().sum())
        roots = {name: (off / true) ** 0.5 if true else float(off > 0) for name, (off, true) in sums.items() if name != "lse"}
        return roots | ({} if lse is None else {"lse": sums["lse"][0]})

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

    def _results(self, b: int, kv_head: int, given: Given | None) -> Iterator[tuple[str, tuple[Any, Any, Any], Tensor]]:
        """Yields out, lse and dq of the query heads of one key/value head, then its dk and dv, unless unknown."""
        problem, group = self.problem, self.problem.num_heads // self.problem.kv_heads
        heads = range(kv_head * group, (kv_head + 1) * group)
        rows, keys = (self._places(first, kv_head + b, heads[0]) for first in (problem.offset, 0))
        dk = torch.zeros(len(keys), problem.head_dim, dtype=torch.float64, device=keys.device)
        dv = torch.zeros_like(dk)
        is_known = self.dout is not None and (self._count is None or given is not None)
        for head in heads:
            lses, outs, lse, out, dq = self._rows(b, head, rows)
            at = rows - problem.offset
            yield from (("out", (b, at, head), out), ("lse", (b, head, at), lse), ("dq", (b, at, head), dq))
            for part in self._stretches(problem.offset, len(keys)) if is_known else ():
                at = part - problem.offset
                if given is None:
                    lses_of_part, outs_of_part = lses[:, at], outs[:, at]
                else:
                    lses_of_part = torch.stack([x[b, head, at].double() for _, x in given])
                    outs_of_part = torch.stack([x[b, at, head].double() for x, _ in given])
                kept, ds = self._shares(b, head, part, keys, lses_of_part, outs_of_part)
                q, _, _, dout = self._inputs(b, head, part, keys)
                dv += kept.T @ dout
                dk += ds.T @ q
        if is_known:
            yield from (("dk", (b, keys, kv_head), dk), ("dv", (b, keys, kv_head), dv))

    def _places(self, first: int, seed: int, head: int) -> Tensor:
        """Returns all positions, or sorted ones: the ends, random ones, and as many that the widest dilation takes."""
        last, count = self.problem.num_positions, self._count
        if count is None:
            return torch.arange(first, last, device=self.problem.device)
        places = torch.randint(first, last, (count - 2,), generator=torch.Generator().manual_seed(seed))
        if isinstance(self.pattern, DilatedPattern):
            length, rate = max(self.pattern.branches, key=lambda branch: branch[1])
            offset = self.pattern.offsets(self.problem.num_heads)[self.pattern.dilation_rates.index(rate)][head]
            inside = (places - self._starts(places.to(self.problem.device)).cpu()) % length
            places[::2] = (places - inside % rate + offset)[::2].clamp(first, last - 1)
        return torch.cat([places, torch.tensor([first, last - 1])]).unique().to(self.problem.device)

    def _stretches(self, first: int, others: int) -> Iterator[Tensor]:
        """Yields the positions from ``first`` on, as many at a time as fit into a tile with ``others`` positions."""
        step, last = max(1, min(_STRETCH, _TILE // others)), self.problem.num_positions
        for start in range(first, last, step):
            yield torch.arange(start, min(start + step, last), device=self.problem.device)

    def _rows(self, b: int, head: int, rows: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Returns lses and outs (softmaxes, rows, …) of one head, then lse (rows,), out and dq (rows, D)."""
        tiles = list(self._stretches(0, len(rows)))
        lses = torch.stack([self._zero_keys(pattern, head, rows).log() for pattern in self._softmaxes])
        for keys in tiles:
            lses = torch.logaddexp(lses, self._logits(b, head, rows, keys).logsumexp(2))
        outs = lses.new_zeros(len(lses), len(rows), self.problem.head_dim)
        for keys in tiles:
            outs += self._weights(b, head, rows, keys, lses)[1] @ self._inputs(b, head, rows, keys)[2]
        dq = torch.zeros_like(outs[0])
        for keys in tiles if self.dout is not None else ():
            dq += self._shares(b, head, rows, keys, lses, outs)[1] @ self._inputs(b, head, rows, keys)[1]
        return lses, outs, lses.logsumexp(0), (_mixture(lses)[..., None] * outs).sum(0), dq

    def _shares(self, b: int, head: int, rows: Tensor, keys: Tensor, lses: Tensor, outs: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the weights of the mixture, and the gradients of q kᵀ, (rows, keys), from lse and out of each softmax."""
        p, kept = self._weights(b, head, rows, keys, lses)
        _, _, v, dout = self._inputs(b, head, rows, keys)
        ds = kept * (dout @ v.T) - p * (outs * dout).sum(-1, keepdim=True)
        mixture = _mixture(lses)[..., None]
        return (mixture * kept).sum(0), (mixture * ds).sum(0) * self.problem.head_dim**-0.5

    def _weights(self, b: int, head: int, rows: Tensor, keys: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the weights (softmaxes, rows, keys) of each softmax alone, and the same after dropout."""
        p = (self._logits(b, head, rows, keys) - _finite(lses)[..., None]).exp()
        if not (dropout_p := self.problem.dropout_p):
            return p, p
        batch, heads = (torch.tensor([x], device=rows.device) for x in (b, head))
        keep = keep_mask(Dropout(dropout_p, self._seed, batch, heads, rows[None], keys[None]), slice(None))[0, 0]
        return p, p * keep / (1 - dropout_p)

    def _inputs(self, b: int, head: int, rows: Tensor, keys: Tensor) -> tuple[Any, Any, Any, Any]:
        """Returns q (rows, D), k and v (keys, D) and dout (rows, D), if there is one, in float64."""
        at, kv_head = rows - self.problem.offset, head * self.problem.kv_heads // self.problem.num_heads
        k, v = (x[b, keys, kv_head].detach().double() for x in self.leaves[1:])
        return self.leaves[0][b, at, head].detach().double(), k, v, None if self.dout is None else self.dout[b, at, head].double()

    def _logits(self, b: int, head: int, rows: Tensor, keys: Tensor) -> Tensor:
        """Returns q kᵀ / √D + log m (softmaxes, rows, keys)."""
        problem, (q, k, _, _) = self.problem, self._inputs(b, head, rows, keys)
        starts, distance = self._starts(rows), keys - rows[:, None]
        seen = starts[:, None] == self._starts(keys)
        left, right = problem.window or (None, None)
        if left is not None:
            seen &= distance >= -left
        right = 0 if problem.is_causal else right
        if right is not None:
            seen &= distance <= right
        if problem.key_padding_mask is not None:
            seen &= ~problem.key_padding_mask[b, keys]
        scores = (q @ k.T * problem.head_dim**-0.5).masked_fill(~seen, -torch.inf)
        return torch.stack([scores + self._multiplicity(pattern, head, rows, keys).double().log() for pattern in self._softmaxes])

    def _multiplicity(self, pattern: Pattern, head: int, rows: Tensor, keys: Tensor) -> Tensor:
        """Returns what the pattern says of a sequence, or of each document."""
        N, H = self.problem.num_positions, self.problem.num_heads
        if isinstance(pattern, BlockPattern):
            return pattern.at(N).allowed(rows[:, None], keys, torch.tensor(head, device=rows.device), N)
        rows, keys = (x - self._starts(x) for x in (rows, keys))
        return pattern.with_heads(head, head + 1, H).multiplicities(rows, keys, 1)[0]

    def _starts(self, x: Tensor) -> Tensor:
        """Returns the first position of the document of each position."""
        return self._bounds[torch.searchsorted(self._bounds, x, right=True) - 1]

    def _zero_keys(self, pattern: Pattern, head: int, rows: Tensor) -> Tensor:
        """Returns the number of zero keys of each row, in float64."""
        zero = torch.zeros(len(rows), dtype=torch.float64, device=rows.device)
        if isinstance(pattern, BlockPattern) or self.problem.is_causal:
            return zero
        of_head = pattern.with_heads(head, head + 1, self.problem.num_heads)
        for start, stop in itertools.pairwise(self._bounds.tolist()):
            inside = (rows >= start) & (rows < stop)
            zero[inside] = zero_keys(of_head, rows[inside] - start, 1, stop - start)[0].double()
        return zero


def _softmaxes(problem: Problem, pattern: Pattern, mixture_grad: str) -> list[Pattern]:
    """Returns the patterns whose softmaxes have gradients of their own: the whole one, or each branch of a detached mixture."""
    if mixture_grad == "exact" or isinstance(pattern, BlockPattern):
        return [pattern]
    return [pattern.with_branches([branch], problem.num_heads) for branch in range(pattern.num_branches)]


def _finite(lse: Tensor) -> Tensor:
    return torch.where(lse == -torch.inf, 0.0, lse)


def _mixture(lses: Tensor) -> Tensor:
    """Returns the shares of the softmaxes (softmaxes, rows) in their mixture; 0 in rows without keys."""
    return (lses - _finite(lses.logsumexp(0))).exp()
