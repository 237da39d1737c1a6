"""Results of a problem in float64, of all rows of some heads or of sampled ones: out, dq, dk and dv, under every option."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import torch
from _short_problem import Data, Problem, our_call

from dilated_attention import DilatedPattern
from dilated_attention.backends import Dropout
from dilated_attention.backends.dropout import keep_mask
from dilated_attention.bench.accuracy.correctness import BOUNDS
from dilated_attention.pattern import NOT_IN_BRANCH

SEED = 20
# every row of some heads is compared up to this length, ROWS of each head beyond it
WHOLE = {"cuda": 10_240, "cpu": 128}
ROWS = 64
# (rows, keys) numbers at a time: 128 MiB in float64
_ELEMENTS = 2**24
# what the saved lse of a call may be off by
_LSE_BOUND = 0.01


@dataclass
class _Sample:
    """True results of one key/value head: out and dq of its query heads (group, rows, D), dk and dv (keys, D) unless they are unknown."""

    batch: int
    kv_head: int
    rows: torch.Tensor
    keys: torch.Tensor
    out: torch.Tensor
    dq: torch.Tensor
    dk: torch.Tensor | None = None
    dv: torch.Tensor | None = None


class Truth:
    """Results in float64 of two key/value heads, for all of their rows or ``ROWS`` of them.

    dk and dv of a key rest on out and lse of all rows that see it: of a long sequence those are taken as our forward gives them, once
    the sampled rows have shown them to be right. With a detached mixture that is a softmax of its own for every branch.
    """

    def __init__(self, data: Data) -> None:
        problem = data.problem
        self.data, self._problem = data, problem
        self._softmaxes = softmaxes(problem)
        self._starts = torch.zeros(problem.length, dtype=torch.int64, device=data.device)
        self._sizes = torch.full_like(self._starts, problem.length)
        for first, last in itertools.pairwise(problem.bounds or ()):
            self._starts[first:last], self._sizes[first:last] = first, last - first
        # the seed that the call draws after torch.manual_seed(SEED)
        self._seed = int(torch.randint(2**62, (), generator=torch.Generator().manual_seed(SEED))) if problem.dropout_p else 0
        kv_heads = problem.kv_heads or problem.heads
        places = dict.fromkeys([(0, kv_heads // 3), (problem.batch - 1, kv_heads - 1)])
        # out and lse of all rows of each query head of one sample
        self._whole_rows: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.note = ""
        with torch.no_grad():
            whole = problem.length <= WHOLE[torch.device(data.device).type]
            given = None if whole else self._given()
            self.samples = [self._sample(b, kv_head, given) for b, kv_head in places]

    def errors(self, out: torch.Tensor, grads: tuple[torch.Tensor, ...], until: int | None = None) -> dict[str, float]:
        """Relative errors of out, dq, dk, dv. With ``until``, of rows before that position alone, and not of dk and dv."""
        squares: dict[str, list[float]] = {}
        for sample in self.samples:
            rows = sample.rows if until is None else sample.rows[sample.rows < until]
            heads = range(sample.kv_head * self._problem.group, (sample.kv_head + 1) * self._problem.group)
            at = rows - self._problem.offset
            for name, found, true in (("out", out, sample.out), ("dq", grads[0], sample.dq)):
                for head, rows_of_head in zip(heads, true, strict=True):
                    _add(squares, name, found.detach()[sample.batch, at, head], rows_of_head[: len(rows)])
            for name, found, keys in (("dk", grads[1], sample.dk), ("dv", grads[2], sample.dv)):
                if keys is not None and until is None:
                    _add(squares, name, found[sample.batch, sample.keys, sample.kv_head], keys)
        return {name: (off / true) ** 0.5 if true else float(off > 0) for name, (off, true) in squares.items()}

    def wrong(self, errors: dict[str, float]) -> list[str]:
        return [name for name, error in errors.items() if not error <= BOUNDS[self._problem.dtype]]

    def _given(self) -> list[tuple[torch.Tensor, torch.Tensor]] | None:
        """(out, lse) of our own forward, a softmax at a time; None, with a note, where it does not run."""
        found = []
        for pattern in self._softmaxes:
            torch.manual_seed(SEED)
            problem = replace(self._problem, pattern=pattern, mixture_grad="exact")
            try:
                found.append(our_call(problem, *self.data.leaves, **self.data.arguments, return_lse=True))
            except RuntimeError as error:
                self.note = f"dk, dv not compared: {str(error).splitlines()[0]}"
                return None
        return found

    def _sample(self, b: int, kv_head: int, given: list[tuple[torch.Tensor, torch.Tensor]] | None) -> _Sample:
        problem, device = self._problem, self.data.device
        whole = problem.length <= WHOLE[torch.device(device).type]
        heads = range(kv_head * problem.group, (kv_head + 1) * problem.group)
        if whole:
            rows, keys = torch.arange(problem.offset, problem.length), torch.arange(problem.length)
        else:
            rows, keys = (self._places(first, kv_head + b, heads[0]) for first in (problem.offset, 0))
        rows, keys = rows.to(device), keys.to(device)
        sample = _Sample(b, kv_head, rows, keys, *self._rows(b, heads, rows, given, whole))
        if whole or given is not None:
            everything = [self._given_of(b, head, given) for head in heads] if given is not None else self._whole_rows
            sample.dk, sample.dv = self._keys(b, kv_head, keys, everything)
        self._whole_rows = []
        return sample

    def _places(self, first: int, seed: int, head: int) -> torch.Tensor:
        """Sorted positions: the ends, random ones, and as many that the widest dilation takes."""
        generator = torch.Generator().manual_seed(seed)
        places = torch.randint(first, self._problem.length, (ROWS - 2,), generator=generator)
        pattern = self._problem.pattern
        length, rate = max(pattern.branches, key=lambda branch: branch[1])
        offset = pattern.offsets(self._problem.heads)[pattern.dilation_rates.index(rate)][head]
        starts = self._starts.cpu()[places]
        segments = starts + (places - starts) // length * length
        taken = segments + (places - segments) // rate * rate + max(offset, 0)
        places[::2] = taken[::2].clamp(first, self._problem.length - 1)
        return torch.cat([places, torch.tensor([first, self._problem.length - 1])]).unique()

    def _rows(
        self, b: int, heads: range, rows: torch.Tensor, given: list[tuple[torch.Tensor, torch.Tensor]] | None, whole: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """out and dq (group, rows, D); checks what is ``given``, and keeps out and lse of all rows where they are ``whole``."""
        data, scale = self.data, self._problem.head_dim**-0.5
        kv_head = heads[0] // self._problem.group
        k, v = data.k[b, :, kv_head].double(), data.v[b, :, kv_head].double()
        keys = torch.arange(len(k), device=k.device)
        outs, dqs = [], []
        self._whole_rows = []
        for head in heads:
            chunks = []
            for part in rows.split(max(1, _ELEMENTS // len(k))):
                q, dout = (x[b, part - self._problem.offset, head].double() for x in (data.q, data.dout))
                scores, products = q @ k.T * scale, dout @ v.T
                kept = products if (keep := self._keep(b, head, part, keys)) is None else products * keep
                found = []
                for pattern in self._softmaxes:
                    m, zero = self._multiplicity(pattern, b, head, part, keys)
                    logits = scores + m.log()
                    lse = torch.logaddexp(logits.logsumexp(1), zero.log())
                    p = (logits - _finite(lse)[:, None]).exp()
                    out = (p if keep is None else p * keep) @ v
                    ds = p * (kept - (p * kept).sum(1, keepdim=True))
                    found.append((out, ds @ k * scale, lse))
                chunks.append([torch.stack(x) for x in zip(*found, strict=True)])
            out, dq, lse = (torch.cat(x, 1) for x in zip(*chunks, strict=True))
            weights = _weights(lse)[..., None]
            outs.append((weights * out).sum(0))
            dqs.append((weights * dq).sum(0))
            if whole:
                self._whole_rows.append((out, lse))
            elif given is not None:
                self._check(out, lse, self._given_of(b, head, given), rows - self._problem.offset)
        return torch.stack(outs), torch.stack(dqs)

    def _check(self, out: torch.Tensor, lse: torch.Tensor, given: tuple[torch.Tensor, torch.Tensor], at: torch.Tensor) -> None:
        off = float((given[0][:, at] - out).norm() / out.norm())
        same = given[1][:, at] == lse
        off_lse = float(torch.where(same, 0.0, given[1][:, at] - lse).abs().max())
        if not (off <= BOUNDS[self._problem.dtype] and off_lse <= _LSE_BOUND):
            self.note = f"our forward is off (out {off:.1e}, lse {off_lse:.1e}), and dk, dv are compared with what follows from it"

    def _given_of(self, b: int, head: int, given: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
        """out (softmaxes, Nq, D) and lse (softmaxes, Nq) of one head."""
        return torch.stack([out[b, :, head].double() for out, _ in given]), torch.stack([lse[b, head].double() for _, lse in given])

    def _keys(
        self, b: int, kv_head: int, keys: torch.Tensor, everything: list[tuple[torch.Tensor, torch.Tensor]]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """dk and dv (keys, D) from out and lse of all rows of each query head."""
        data, scale = self.data, self._problem.head_dim**-0.5
        k, v = (x[b, keys, kv_head].double() for x in (data.k, data.v))
        dk, dv = torch.zeros_like(k), torch.zeros_like(v)
        rows = torch.arange(self._problem.offset, self._problem.length, device=k.device)
        for i, (outs, lses) in enumerate(everything):
            head = kv_head * self._problem.group + i
            weights = _weights(lses)
            for part in rows.split(max(1, _ELEMENTS // len(keys))):
                at = part - self._problem.offset
                q, dout = (x[b, at, head].double() for x in (data.q, data.dout))
                scores, products = q @ k.T * scale, dout @ v.T
                keep = self._keep(b, head, part, keys)
                kept = products if keep is None else products * keep
                for pattern, out, lse, weight in zip(self._softmaxes, outs[:, at], lses[:, at], weights[:, at], strict=True):
                    m, _ = self._multiplicity(pattern, b, head, part, keys)
                    p = (scores + m.log() - _finite(lse)[:, None]).exp() * weight[:, None]
                    dv += (p if keep is None else p * keep).T @ dout
                    dk += (p * (kept - (dout * out).sum(1, keepdim=True))).T @ q * scale
        return dk, dv

    def _multiplicity(
        self, pattern: DilatedPattern, b: int, head: int, rows: torch.Tensor, keys: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """m (rows, keys) and the zero keys z (rows,), in float64."""
        problem = self._problem
        m = torch.zeros(len(rows), len(keys), dtype=torch.float64, device=rows.device)
        zero = m.new_zeros(len(rows))
        for (length, rate), offsets in zip(pattern.branches, pattern.offsets(problem.heads), strict=True):
            if offsets[head] == NOT_IN_BRANCH:
                continue
            # a segment is known by its first position; whoever is not taken is in a segment of its own
            firsts = []
            for x, nowhere in ((rows, -1), (keys, -2)):
                inside = x - self._starts[x]
                taken = inside % length % rate == offsets[head]
                firsts.append(torch.where(taken, x - inside % length, nowhere))
            m += firsts[0][:, None] == firsts[1]
            if pattern.tail == "zero_keys" and not problem.is_causal:
                starts, sizes = self._starts[rows], self._sizes[rows]
                size = torch.minimum(firsts[0] + length, starts + sizes) - firsts[0]
                taken_keys = (size - offsets[head] + rate - 1) // rate
                places = (sizes.clamp(max=length) + rate - 1) // rate
                zero += torch.where(firsts[0] >= 0, places - taken_keys, 0)
        distance = keys - rows[:, None]
        left, right = problem.window or (None, None)
        if left is not None:
            m.masked_fill_(distance < -left, 0.0)
        right = 0 if problem.is_causal else right
        if right is not None:
            m.masked_fill_(distance > right, 0.0)
        if self.data.padding is not None:
            m *= ~self.data.padding[b, keys]
        return m, zero

    def _keep(self, b: int, head: int, rows: torch.Tensor, keys: torch.Tensor) -> torch.Tensor | None:
        """1/(1 − p) where the weight is kept, 0 where it is dropped."""
        p = self._problem.dropout_p
        if not p:
            return None
        numbers = (torch.tensor([x], device=rows.device) for x in (b, head))
        return keep_mask(Dropout(p, self._seed, *numbers, rows[None], keys[None]), slice(None))[0, 0].double() / (1 - p)


def softmaxes(problem: Problem) -> list[DilatedPattern]:
    """The patterns whose softmaxes have gradients of their own: the whole one, or each branch where their mixture is detached."""
    pattern = problem.pattern
    if problem.mixture_grad == "exact":
        return [pattern]
    branches = zip(pattern.segment_lengths, pattern.dilation_rates, pattern.offsets(problem.heads), strict=True)
    return [DilatedPattern((length,), (rate,), [list(offsets)], tail=pattern.tail) for length, rate, offsets in branches]


def _finite(lse: torch.Tensor) -> torch.Tensor:
    return torch.where(lse == -torch.inf, 0.0, lse)


def _weights(lses: torch.Tensor) -> torch.Tensor:
    """Shares (softmaxes, rows) of the softmaxes in their mixture; 0 in rows without keys."""
    return (lses - _finite(lses.logsumexp(0))).exp()


def _add(squares: dict[str, list[float]], name: str, found: torch.Tensor, true: torch.Tensor) -> None:
    sums = squares.setdefault(name, [0.0, 0.0])
    sums[0] += float((found.double() - true).square().sum())
    sums[1] += float(true.square().sum())
