"""Checks of results against float64: the relative errors ‖found − true‖ / ‖true‖ that decide whether there is a figure.

True results, out, lse, dq, dk and dv under every option, are computed of all rows of some heads or of sampled ones. They follow the
definition, softmax(q kᵀ / √D + log m) v over the multiset of keys of each row, a tile of rows and keys at a time. Which pairs count is
asked of the pattern itself, pair by pair: no plan, no list of blocks.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dilated_attention.backends import Dropout
from dilated_attention.backends.dropout import keep_mask
from dilated_attention.bench.workloads.contenders import Attend, Contender, OfEmbedded
from dilated_attention.bench.workloads.problem import BOUNDS as BOUNDS
from dilated_attention.bench.workloads.problem import Pattern, Problem, our_call
from dilated_attention.engine.attention_rows import zero_keys
from dilated_attention.pattern import BlockPattern, DilatedPattern, TopBlocks

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
# an lse is a logarithm of a sum of exponentials: its error is absolute, that of sums in float32
_LSE_BOUND = 0.02
# positions of the short problems on which every row and every gradient of a module is compared
WHOLE = 512
# the last problem's results, which contenders of the same function share
_truths: dict[tuple[object, ...], Truth] = {}


def wrong(errors: dict[str, float], bound: float) -> str:
    """Returns a note that names what exceeds ``bound``, NaN included; empty if nothing does."""
    beyond = {name: error for name, error in errors.items() if not error <= (_LSE_BOUND if name == "lse" else bound)}
    return f"wrong: {', '.join(f'{name} off by {error:.1e}' for name, error in beyond.items())}, allowed {bound:.0e}" if beyond else ""


def relative(found: Tensor, true: Tensor) -> float:
    return float((found.double() - true).norm() / true.norm().clamp(min=torch.finfo(torch.float64).tiny))


def forget() -> None:
    """Frees the tensors of the last problem."""
    _truths.clear()


def check(contender: Contender, problem: Problem, attend: Attend, *, gradients: bool) -> dict[str, float]:
    """Returns relative errors against float64 of out and, with ``gradients``, of dq, dk and dv.

    Blocks chosen by content are those that the pattern chooses for the same q and k. A function of x, or one whose pairs no single pattern
    describes, is compared with itself on plain PyTorch in float64 instead, on at most ``WHOLE`` positions.
    """
    pattern = contender.pattern(problem)
    if isinstance(pattern, TopBlocks):
        problem = replace(problem, batch_size=1)
        q, k, _ = (x.detach() for x in problem.qkv(7))
        pattern = pattern.choose(q, k, is_causal=problem.is_causal)
    elif contender.inputs == "x" or pattern is None:
        return dict(_against_itself(contender, problem.reduced(WHOLE)))
    key = (problem, contender.pattern(problem), contender.mixture_grad)
    if key not in _truths:
        # those of one function follow one another, and tensors of two long sequences may not fit
        forget()
        _truths[key] = Truth(problem, pattern, contender.mixture_grad)
    truth = _truths[key]
    torch.manual_seed(SEED)
    with torch.set_grad_enabled(gradients):
        out = attend(*truth.leaves)
    grads = torch.autograd.grad(out, truth.leaves, truth.dout) if gradients else ()
    return truth.errors(out, grads, contender.until(problem))


@functools.lru_cache(maxsize=256)
def _against_itself(contender: Contender, problem: Problem) -> tuple[tuple[str, float], ...]:
    """Returns the errors of out and of the input gradients against the same module in float64; computed once per process."""
    attend = contender.make(problem)
    leaves = contender.inputs_of(problem, 7)
    copies = [x.detach().cpu().double().requires_grad_() for x in leaves]
    dout = torch.randn_like(leaves[0]).detach()
    reference = contender.make(replace(problem, dtype=torch.float64, device=torch.device("cpu")))
    if isinstance(attend, OfEmbedded) and isinstance(reference, OfEmbedded):
        reference.module.load_state_dict({name: x.detach().cpu().double() for name, x in attend.module.state_dict().items()})
    found, true = attend(*leaves), reference(*copies)
    grads, true_grads = torch.autograd.grad(found, leaves, dout), torch.autograd.grad(true, copies, dout.cpu().double())
    names = ("out", "dx") if contender.inputs == "x" else ("out", "dq", "dk", "dv")
    pairs = zip(names, (found, *grads), (true, *true_grads), strict=True)
    return tuple((name, relative(a.detach().cpu(), b.detach())) for name, a, b in pairs)


def sampled_errors(
    pattern: Pattern, problem: Problem, inputs: Sequence[Any], results: Sequence[Any], *, count: int = 8
) -> dict[str, float]:
    """Returns the relative errors of an extremely long call over ``count`` rows of two heads, and the largest absolute error of lse.

    Args:
        inputs: q, k, v and, with gradients, dout; as tensors or ``Sharded``, of which all processes look at the same rows.
        results: out, lse and, with gradients, dq, dk, dv. dk and dv of a key are computed from the given out and lse of all rows that see
            it; those are compared in the sampled rows.
    """
    out, lse, *grads = results
    dout = inputs[3] if grads else None
    truth = Truth(problem, pattern, leaves=inputs[:3], dout=dout, given=[(out, lse)], whole=False, count=count, gradients=bool(grads))
    return truth.errors(out, grads, lse=lse)


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
        pairs: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in found}
        for name, (b, first, second), true in self._true:
            if name in found and (until is None or name in ("out", "dq")):
                if until is not None:
                    before = first + self.problem.offset < until
                    first, true = first[before], true[before]
                pairs[name].append((found[name].detach()[b, first, second].double(), true))
        return {name: _error(name, *map(torch.cat, zip(*held, strict=True))) for name, held in pairs.items() if held}

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
                    of_part = lses[:, at], outs[:, at]
                else:
                    of_part = (
                        torch.stack([x[b, head, at].double() for _, x in given]),
                        torch.stack([x[b, at, head].double() for x, _ in given]),
                    )
                kept, ds = self._shares(b, head, part, keys, *of_part)
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


def _error(name: str, found: Tensor, true: Tensor) -> float:
    """Returns the relative error, or of lse, which is infinite where it has to be, the largest absolute one."""
    return float(torch.where(found == true, 0.0, found - true).abs().max()) if name == "lse" else relative(found, true)


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
