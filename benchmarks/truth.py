"""Errors of results against float64, ‖x − true‖ / ‖true‖, in sampled rows of two key/value heads.

The truth follows the definition, softmax(q kᵀ / √D + log m) v over the multiset of keys of each row. Which pairs count is asked of the
pattern, pair by pair. The gradient of out is zero in all other rows, so that the gradients of all keys follow from the sampled ones.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from benchmarks.case import Case, Pattern, padding_mask
from dilated_attention.backends import Dropout
from dilated_attention.backends.dropout import keep_mask
from dilated_attention.functional.maps import zero_keys
from dilated_attention.pattern import BlockPattern, DilatedPattern

# several times the error that rounding explains; float32 products may be TF32 on a GPU
BOUNDS = {torch.float64: 1e-10, torch.float32: 2e-3, torch.float16: 6e-3, torch.bfloat16: 2e-2}
# every row is compared up to this length, ROWS of each head beyond it
ALL_ROWS, ROWS = 512, 64
# numbers of a tile of rows and keys, 128 MiB in float64, and keys of 128 numbers at a time, likewise
_TILE, _STRETCH = 2**24, 2**17
# of the dropout that a checked call draws
SEED = 20


def wrong(errors: dict[str, float], bound: float) -> str:
    """Returns a note that names what exceeds ``bound``, NaN included; empty if nothing does."""
    beyond = ", ".join(f"{name} off by {error:.1e}" for name, error in errors.items() if not error <= bound)
    return f"wrong: {beyond}, allowed {bound:.0e}" if beyond else ""


def relative(result: Tensor, true: Tensor) -> float:
    return float((result.double() - true).norm() / true.norm().clamp(min=torch.finfo(torch.float64).tiny))


class Truth:
    """Sampled rows of a call in float64. ``mixture_grad="detached"``: the shares of branches have no gradient."""

    def __init__(self, case: Case, pattern: Pattern, mixture_grad: str = "exact", *, count: int = ROWS) -> None:
        self.case, self.pattern, self.parts = case, pattern, [pattern]
        if mixture_grad == "detached" and isinstance(pattern, DilatedPattern):
            self.parts = [pattern.with_branches([branch], case.num_heads) for branch in range(pattern.num_branches)]
        self._bounds = torch.tensor(case.bounds or (0, case.num_positions), device=case.device)
        # the seed that the call draws after torch.manual_seed(SEED)
        self._seed = int(torch.randint(2**62, (), generator=torch.Generator().manual_seed(SEED)))
        self._count = case.num_positions if case.num_positions <= ALL_ROWS else count
        places = dict.fromkeys([(0, case.kv_heads // 3), (case.batch_size - 1, case.kv_heads - 1)])
        self.places = [(b, kv_head, self._rows(b + kv_head)) for b, kv_head in places]

    def dout(self) -> Tensor:
        """Returns a gradient of out that is zero but in the sampled rows."""
        case = self.case
        noise = case.dout(101)
        dout = torch.zeros_like(noise)
        for b, kv_head, rows in self.places:
            for head in self._heads(kv_head):
                dout[b, rows - case.offset, head] = noise[b, rows - case.offset, head]
        return dout

    @torch.no_grad()
    def errors(self, leaves: Sequence[Tensor], dout: Tensor | None, out: Tensor, grads: Sequence[Tensor] = ()) -> dict[str, float]:
        """Returns relative errors of out and, if given, dq, dk and dv."""
        squares: dict[str, list[Tensor]] = {}
        for b, kv_head, rows in self.places:
            for name, result, true in self._compared(b, kv_head, rows, leaves, dout, out, grads):
                here = squares.setdefault(name, [true.new_zeros(()), true.new_zeros(())])
                here[0] += (result.double() - true).square().sum()
                here[1] += true.square().sum()
        return {name: math.sqrt(off / max(float(size), 1e-300)) for name, (off, size) in squares.items()}

    def _heads(self, kv_head: int) -> range:
        group = self.case.num_heads // self.case.kv_heads
        return range(kv_head * group, (kv_head + 1) * group)

    def _compared(
        self, b: int, kv_head: int, rows: Tensor, leaves: Sequence[Tensor], dout: Tensor | None, out: Tensor, grads: Sequence[Tensor]
    ) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yields (name, result, truth) of the query heads of one key/value head, and of its keys a tile at a time."""
        at, attended = rows - self.case.offset, []
        for head in self._heads(kv_head):
            q = leaves[0][b, at, head].detach().double()
            lses = torch.stack([self._zero_keys(part, head, rows).log() for part in self.parts])
            for keys, k, _ in self._tiles(b, kv_head, rows, leaves):
                lses = torch.logaddexp(lses, self._logits(b, head, rows, keys, q @ k.T).logsumexp(2))
            outs = lses.new_zeros(*lses.shape, self.case.head_dim)
            for keys, k, v in self._tiles(b, kv_head, rows, leaves):
                outs += self._weights(b, head, rows, keys, q @ k.T, lses)[1] @ v
            # shares of the softmaxes in their mixture; 0 in rows without keys
            shares = (lses - _finite(lses.logsumexp(0))).exp()[..., None]
            yield "out", out[b, at, head].detach(), (shares * outs).sum(0)
            attended.append((head, q, lses, outs, shares))
        if dout is None:
            return
        dqs = [torch.zeros_like(q) for _, q, *_ in attended]
        for keys, k, v in self._tiles(b, kv_head, rows, leaves):
            dk, dv = torch.zeros_like(k), torch.zeros_like(v)
            for dq, (head, q, lses, outs, shares) in zip(dqs, attended, strict=True):
                dout_rows = dout[b, at, head].double()
                p, kept = self._weights(b, head, rows, keys, q @ k.T, lses)
                ds = (shares * (kept * (dout_rows @ v.T) - p * (outs * dout_rows).sum(-1, keepdim=True))).sum(0)
                ds *= self.case.head_dim**-0.5
                dq += ds @ k
                dk += ds.T @ q
                dv += (shares * kept).sum(0).T @ dout_rows
            yield from (("dk", grads[1][b, keys, kv_head], dk), ("dv", grads[2][b, keys, kv_head], dv))
        for dq, (head, *_) in zip(dqs, attended, strict=True):
            yield "dq", grads[0][b, at, head], dq

    def _rows(self, seed: int) -> Tensor:
        """Returns all positions of queries, or the ends and random ones, sorted."""
        first, last, device = self.case.offset, self.case.num_positions, self.case.device
        if last - first <= self._count:
            return torch.arange(first, last, device=device)
        rows = torch.randint(first, last, (self._count - 2,), generator=torch.Generator().manual_seed(seed))
        return torch.cat([rows, torch.tensor([first, last - 1])]).unique().to(device)

    def _tiles(self, b: int, kv_head: int, rows: Tensor, leaves: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yields keys, as many at a time as fit into a tile with ``rows``, and k and v (keys, D) in float64."""
        step, last = max(1, min(_STRETCH, _TILE // max(len(rows), 1))), self.case.num_positions
        for start in range(0, last, step):
            keys = torch.arange(start, min(start + step, last), device=self.case.device)
            yield keys, leaves[1][b, keys, kv_head].detach().double(), leaves[2][b, keys, kv_head].detach().double()

    def _weights(self, b: int, head: int, rows: Tensor, keys: Tensor, scores: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the weights (softmaxes, rows, keys) of each softmax alone, and the same after dropout."""
        p = (self._logits(b, head, rows, keys, scores) - _finite(lses)[..., None]).exp()
        if not (dropout_p := self.case.dropout_p):
            return p, p
        batch, heads = (torch.tensor([x], device=rows.device) for x in (b, head))
        keep = keep_mask(Dropout(dropout_p, self._seed, batch, heads, rows[None], keys[None]), slice(None))[0, 0]
        return p, p * keep / (1 - dropout_p)

    def _logits(self, b: int, head: int, rows: Tensor, keys: Tensor, scores: Tensor) -> Tensor:
        """Returns q kᵀ / √D + log m (softmaxes, rows, keys)."""
        case = self.case
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
        scores = (scores * case.head_dim**-0.5).masked_fill(~seen, -torch.inf)
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
