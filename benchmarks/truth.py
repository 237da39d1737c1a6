"""Errors of results against float64, ‖x − true‖ / ‖true‖, in sampled rows and keys of two heads.

The truth follows the definition, softmax(q kᵀ / √D + log m) v over the multiset of keys of each row, a tile of rows and keys at a time.
Which pairs count is asked of the pattern itself, pair by pair: no plan, no list of blocks. A gradient of a key
rests on out and lse of all rows that see it, which are given; the same rows of those are compared.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.case import Case, Pattern, padding_mask
from dilated_attention.backends import Dropout
from dilated_attention.backends.dropout import keep_mask
from dilated_attention.engine.attention_rows import zero_keys
from dilated_attention.pattern import BlockPattern, DilatedPattern

# several times the error that rounding explains; float32 products may be TF32 on a GPU. The error of lse is absolute
BOUNDS = {torch.float64: 1e-10, torch.float32: 2e-3, torch.float16: 6e-3, torch.bfloat16: 2e-2}
_LSE_BOUND = 0.02
# every row is compared up to this length, ROWS of each head beyond it
ALL_ROWS, ROWS = 512, 64
# numbers of a tile of rows and keys, 128 MiB in float64, and rows of 128 numbers at a time, likewise
_TILE, _STRETCH = 2**24, 2**17
# of the dropout that a checked call draws
SEED = 20


def wrong(errors: dict[str, float], bound: float) -> str:
    """Returns a note that names what exceeds ``bound``, NaN included; empty if nothing does."""
    beyond = {name: error for name, error in errors.items() if not error <= (_LSE_BOUND if name == "lse" else bound)}
    return f"wrong: {', '.join(f'{name} off by {error:.1e}' for name, error in beyond.items())}, allowed {bound:.0e}" if beyond else ""


def relative(result: Tensor, true: Tensor) -> float:
    return float((result.double() - true).norm() / true.norm().clamp(min=torch.finfo(torch.float64).tiny))


def softmaxes(case: Case, pattern: Pattern, mixture_grad: str) -> list[Pattern]:
    """Returns the patterns whose softmaxes have gradients of their own: the whole one, or each branch of a detached mixture."""
    if mixture_grad == "exact" or isinstance(pattern, BlockPattern):
        return [pattern]
    return [pattern.with_branches([branch], case.num_heads) for branch in range(pattern.num_branches)]


class Truth:
    """Sampled rows of a call in float64.

    Args:
        leaves: q, k, v; with ``dout`` also gradients. Tensors, or what is indexed like them (the shards of several processes).
        given: (out, lse) of each of ``softmaxes``, in all rows; None where there are no gradients.
    """

    def __init__(
        self, case: Case, pattern: Pattern, leaves: Sequence[Any], dout: Any = None, given: Sequence[tuple[Any, Any]] | None = None,
        *, mixture_grad: str = "exact", count: int = ROWS,
    ) -> None:  # fmt: skip
        self.case, self.leaves, self.dout, self.given = case, leaves, dout, given
        self.pattern, self.parts = pattern, softmaxes(case, pattern, mixture_grad)
        self.count = case.num_positions if case.num_positions <= ALL_ROWS else count
        self._bounds = torch.tensor(case.bounds or (0, case.num_positions), device=case.device)
        # the seed that the call draws after torch.manual_seed(SEED)
        self._seed = int(torch.randint(2**62, (), generator=torch.Generator().manual_seed(SEED))) if case.dropout_p else 0
        places = dict.fromkeys([(0, case.kv_heads // 3), (case.batch_size - 1, case.kv_heads - 1)])
        with torch.no_grad():
            # name of a result, places in it, and what is there
            self._true = [each for b, kv_head in places for each in self._results(b, kv_head)]

    def errors(self, out: Any, grads: Sequence[Any] = (), lse: Any = None) -> dict[str, float]:
        """Returns relative errors of out and, if given, dq, dk and dv, and the largest absolute one of lse."""
        results = dict(zip(("out", "dq", "dk", "dv"), (out, *grads), strict=False)) | ({} if lse is None else {"lse": lse})
        pairs: dict[str, list[tuple[Tensor, Tensor]]] = {}
        for name, (b, first, second), true in self._true:
            if name in results:
                pairs.setdefault(name, []).append((results[name].detach()[b, first, second].double(), true))
        joined = {name: [torch.cat(side) for side in zip(*each, strict=True)] for name, each in pairs.items()}
        lses = joined.pop("lse", None)
        errors = {name: relative(*both) for name, both in joined.items()}
        if lses is not None:
            errors["lse"] = float(torch.where(lses[0] == lses[1], 0.0, lses[0] - lses[1]).abs().max())
        return errors

    def _results(self, b: int, kv_head: int) -> Iterator[tuple[str, tuple[Any, Any, Any], Tensor]]:
        """Yields out, lse and dq of the query heads of one key/value head, then its dk and dv."""
        case, group = self.case, self.case.num_heads // self.case.kv_heads
        heads = range(kv_head * group, (kv_head + 1) * group)
        rows, keys = (self._places(start, kv_head + b, heads[0]) for start in (case.offset, 0))
        dk = torch.zeros(len(keys), case.head_dim, dtype=torch.float64, device=keys.device)
        dv = torch.zeros_like(dk)
        for head in heads:
            lse, out, dq = self._rows(b, head, rows)
            at = rows - case.offset
            yield from (("out", (b, at, head), out), ("lse", (b, head, at), lse), ("dq", (b, at, head), dq))
            for part in self._stretches(case.offset, len(keys)) if self.dout is not None and self.given is not None else ():
                at = part - case.offset
                lses = torch.stack([lse[b, head, at].double() for _, lse in self.given or ()])
                outs = torch.stack([out[b, at, head].double() for out, _ in self.given or ()])
                kept, ds = self._shares(b, head, part, keys, lses, outs)
                q, _, _, dout = self._inputs(b, head, part, keys)
                dv += kept.T @ dout
                dk += ds.T @ q
        if self.dout is not None and self.given is not None:
            yield from (("dk", (b, keys, kv_head), dk), ("dv", (b, keys, kv_head), dv))

    def _places(self, first: int, seed: int, head: int) -> Tensor:
        """Returns all positions, or sorted ones: the ends, random ones, and as many that the widest dilation takes."""
        last, device = self.case.num_positions, self.case.device
        if last - first <= self.count:
            return torch.arange(first, last, device=device)
        places = torch.randint(first, last, (self.count - 2,), generator=torch.Generator().manual_seed(seed))
        if isinstance(self.pattern, DilatedPattern):
            branch = max(range(self.pattern.num_branches), key=lambda branch: self.pattern.branches[branch][1])
            length, rate = self.pattern.branches[branch]
            offset = self.pattern.offsets(self.case.num_heads)[branch][head]
            inside = (places - self._starts(places.to(device)).cpu()) % length
            places[::2] = (places - inside % rate + offset)[::2].clamp(first, last - 1)
        return torch.cat([places, torch.tensor([first, last - 1])]).unique().to(device)

    def _stretches(self, first: int, others: int) -> Iterator[Tensor]:
        """Yields the positions from ``first`` on, as many at a time as fit into a tile with ``others`` positions."""
        step, last = max(1, min(_STRETCH, _TILE // max(others, 1))), self.case.num_positions
        for start in range(first, last, step):
            yield torch.arange(start, min(start + step, last), device=self.case.device)

    def _rows(self, b: int, head: int, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns lse (rows,), out and dq (rows, D) of one head."""
        tiles = list(self._stretches(0, len(rows)))
        lses = torch.stack([self._zero_keys(part, head, rows).log() for part in self.parts])
        for keys in tiles:
            lses = torch.logaddexp(lses, self._logits(b, head, rows, keys).logsumexp(2))
        outs = lses.new_zeros(len(lses), len(rows), self.case.head_dim)
        for keys in tiles:
            outs += self._weights(b, head, rows, keys, lses)[1] @ self._inputs(b, head, rows, keys)[2]
        dq = torch.zeros_like(outs[0])
        for keys in tiles if self.dout is not None else ():
            dq += self._shares(b, head, rows, keys, lses, outs)[1] @ self._inputs(b, head, rows, keys)[1]
        return lses.logsumexp(0), (_mixture(lses)[..., None] * outs).sum(0), dq

    def _shares(self, b: int, head: int, rows: Tensor, keys: Tensor, lses: Tensor, outs: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the weights of the mixture, and the gradients of q kᵀ, (rows, keys), from lse and out of each softmax."""
        p, kept = self._weights(b, head, rows, keys, lses)
        _, _, v, dout = self._inputs(b, head, rows, keys)
        ds = kept * (dout @ v.T) - p * (outs * dout).sum(-1, keepdim=True)
        mixture = _mixture(lses)[..., None]
        return (mixture * kept).sum(0), (mixture * ds).sum(0) * self.case.head_dim**-0.5

    def _weights(self, b: int, head: int, rows: Tensor, keys: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the weights (softmaxes, rows, keys) of each softmax alone, and the same after dropout."""
        p = (self._logits(b, head, rows, keys) - _finite(lses)[..., None]).exp()
        if not (dropout_p := self.case.dropout_p):
            return p, p
        batch, heads = (torch.tensor([x], device=rows.device) for x in (b, head))
        keep = keep_mask(Dropout(dropout_p, self._seed, batch, heads, rows[None], keys[None]), slice(None))[0, 0]
        return p, p * keep / (1 - dropout_p)

    def _inputs(self, b: int, head: int, rows: Tensor, keys: Tensor) -> tuple[Any, Any, Any, Any]:
        """Returns q (rows, D), k and v (keys, D) and dout (rows, D), if there is one, in float64."""
        at, kv_head = rows - self.case.offset, head * self.case.kv_heads // self.case.num_heads
        k, v = (x[b, keys, kv_head].detach().double() for x in self.leaves[1:3])
        return self.leaves[0][b, at, head].detach().double(), k, v, None if self.dout is None else self.dout[b, at, head].double()

    def _logits(self, b: int, head: int, rows: Tensor, keys: Tensor) -> Tensor:
        """Returns q kᵀ / √D + log m (softmaxes, rows, keys)."""
        case, (q, k, _, _) = self.case, self._inputs(b, head, rows, keys)
        distance = keys - rows[:, None]
        seen = self._starts(rows)[:, None] == self._starts(keys)
        left, right = case.window or (None, None)
        if left is not None:
            seen &= distance >= -left
        right = 0 if case.is_causal else right
        if right is not None:
            seen &= distance <= right
        if (padding := padding_mask(case)) is not None:
            seen &= ~padding[b, keys]
        scores = (q @ k.T * case.head_dim**-0.5).masked_fill(~seen, -torch.inf)
        return torch.stack([scores + self._multiplicity(part, head, rows, keys).double().log() for part in self.parts])

    def _multiplicity(self, pattern: Pattern, head: int, rows: Tensor, keys: Tensor) -> Tensor:
        """Returns what the pattern says of a sequence, or of each document."""
        n = self.case.num_positions
        if isinstance(pattern, BlockPattern):
            return pattern.at(n).allowed(rows[:, None], keys, torch.tensor(head, device=rows.device), n)
        rows, keys = (x - self._starts(x) for x in (rows, keys))
        return pattern.with_heads(head, head + 1, self.case.num_heads).multiplicities(rows, keys, 1)[0]

    def _starts(self, x: Tensor) -> Tensor:
        """Returns the first position of the document of each position."""
        return self._bounds[torch.searchsorted(self._bounds, x, right=True) - 1]

    def _zero_keys(self, pattern: Pattern, head: int, rows: Tensor) -> Tensor:
        """Returns the number of zero keys of each row, in float64."""
        zero = torch.zeros(len(rows), dtype=torch.float64, device=rows.device)
        if isinstance(pattern, BlockPattern) or self.case.is_causal:
            return zero
        of_head = pattern.with_heads(head, head + 1, self.case.num_heads)
        for start, stop in itertools.pairwise(self._bounds.tolist()):
            inside = (rows >= start) & (rows < stop)
            zero[inside] = zero_keys(of_head, rows[inside] - start, 1, stop - start)[0].double()
        return zero


def _finite(lse: Tensor) -> Tensor:
    return torch.where(lse == -torch.inf, 0.0, lse)


def _mixture(lses: Tensor) -> Tensor:
    """Returns the shares of the softmaxes (softmaxes, rows) in their mixture; 0 in rows without keys."""
    return (lses - _finite(lses.logsumexp(0))).exp()
