"""Results of a problem in float64, of all rows of some heads or of sampled ones: out, dq, dk and dv, under every option.

It follows the definition, softmax(q kᵀ / √D + log m) v over the multiset of keys of each row, a stretch of rows at a time.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dilated_attention.backends import Dropout
from dilated_attention.backends.block_lists import BlockLists
from dilated_attention.backends.dropout import keep_mask
from dilated_attention.bench.workloads.problem import Problem
from dilated_attention.engine.blocks.lists import block_lists
from dilated_attention.functional import attention, block_sparse_attention, dilated_attention
from dilated_attention.pattern import NOT_IN_BRANCH, BlockPattern, DilatedPattern

Pattern = DilatedPattern | BlockPattern
# several times the ‖found − true‖ / ‖true‖ that rounding explains; float32 products may be TF32 on a GPU
BOUNDS = {torch.float64: 1e-10, torch.float32: 2e-3, torch.float16: 6e-3, torch.bfloat16: 2e-2}
RESULTS = ("out", "dq", "dk", "dv")
# of the dropout that a checked call draws
SEED = 20
# every row of some heads is compared up to this length, ROWS of each head beyond it
ALL_ROWS = {"cuda": 10_240, "cpu": 256}
ROWS = 64
# (rows, keys) numbers at a time: 128 MiB in float64
_ELEMENTS = 2**24
# what the saved lse of a call may be off by
_LSE_BOUND = 0.01
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

    dk and dv of a key rest on out and lse of all rows that see it: of a long sequence those are taken as this library's own forward gives
    them, once the sampled rows have shown them to be right. With a detached mixture that is a softmax of its own for every branch.

    Args:
        leaves, dout: inputs; those of ``seed`` by default.
        whole: whether all rows are compared; by default where there are few.
        everywhere: all sequences and heads instead of two.
    """

    def __init__(
        self,
        problem: Problem,
        pattern: Pattern,
        mixture_grad: str = "exact",
        *,
        leaves: Sequence[torch.Tensor] | None = None,
        dout: torch.Tensor | None = None,
        whole: bool | None = None,
        everywhere: bool = False,
    ) -> None:
        self.problem, self.pattern = problem, pattern
        self.leaves = list(problem.qkv(7) if leaves is None else leaves)
        self.dout = problem.dout(101) if dout is None else dout
        self._whole = problem.num_positions <= ALL_ROWS[problem.device.type] if whole is None else whole
        self._softmaxes = _softmaxes(problem, pattern, mixture_grad)
        self._starts = torch.zeros(problem.num_positions, dtype=torch.int64, device=problem.device)
        self._sizes = torch.full_like(self._starts, problem.num_positions)
        for first, last in itertools.pairwise(problem.bounds or ()):
            self._starts[first:last], self._sizes[first:last] = first, last - first
        # the seed that the call draws after torch.manual_seed(SEED)
        self._seed = int(torch.randint(2**62, (), generator=torch.Generator().manual_seed(SEED))) if problem.dropout_p else 0
        places = [(0, problem.kv_heads // 3), (problem.batch_size - 1, problem.kv_heads - 1)]
        if everywhere:
            places = list(itertools.product(range(problem.batch_size), range(problem.kv_heads)))
        # out and lse of all rows of each query head of one sample
        self._whole_rows: Given = []
        self.note = ""
        with torch.no_grad():
            given = None if self._whole else self._given()
            self.samples = [self._sample(b, kv_head, given) for b, kv_head in dict.fromkeys(places)]

    def errors(self, out: torch.Tensor, grads: Sequence[torch.Tensor] = (), until: int | None = None) -> dict[str, float]:
        """Returns relative errors of out and of dq, dk, dv if given. With ``until``, of rows before it alone, and not of dk and dv."""
        squares: dict[str, list[float]] = {}
        group = self.problem.num_heads // self.problem.kv_heads
        for sample in self.samples:
            rows = sample.rows if until is None else sample.rows[sample.rows < until]
            at = rows - self.problem.offset
            for name, found, true in zip(("out", "dq"), (out, *grads[:1]), (sample.out, sample.dq), strict=False):
                for i, rows_of_head in enumerate(true):
                    _add(squares, name, found.detach()[sample.batch, at, sample.kv_head * group + i], rows_of_head[: len(rows)])
            for name, found, keys in zip(("dk", "dv"), grads[1:], (sample.dk, sample.dv), strict=False):
                if keys is not None and until is None:
                    _add(squares, name, found[sample.batch, sample.keys, sample.kv_head], keys)
        return {name: (off / true) ** 0.5 if true else float(off > 0) for name, (off, true) in squares.items()}

    def results(self) -> list[torch.Tensor]:
        """Returns [out, dq, dk, dv] whole; the samples must be ``whole`` and ``everywhere``."""
        found = [torch.zeros_like(x, dtype=torch.float64) for x in (self.leaves[0], *self.leaves)]
        group = self.problem.num_heads // self.problem.kv_heads
        for s in self.samples:
            assert s.dk is not None and s.dv is not None
            heads = slice(s.kv_head * group, (s.kv_head + 1) * group)
            found[0][s.batch, :, heads], found[1][s.batch, :, heads] = s.out.transpose(0, 1), s.dq.transpose(0, 1)
            found[2][s.batch, :, s.kv_head], found[3][s.batch, :, s.kv_head] = s.dk, s.dv
        return found

    def _given(self) -> Given | None:
        """Returns (out, lse) of this library's forward, a softmax at a time; None, with a note, where it does not run."""
        found = []
        for pattern in self._softmaxes:
            torch.manual_seed(SEED)
            try:
                found.append(our_call(self.problem, pattern, *self.leaves, return_lse=True))
            except RuntimeError as error:
                self.note = f"dk, dv not compared: {str(error).splitlines()[0]}"
                return None
        return found

    def _sample(self, b: int, kv_head: int, given: Given | None) -> _Sample:
        problem, group = self.problem, self.problem.num_heads // self.problem.kv_heads
        heads = range(kv_head * group, (kv_head + 1) * group)
        if self._whole:
            rows, keys = torch.arange(problem.offset, problem.num_positions), torch.arange(problem.num_positions)
        else:
            rows, keys = (self._places(first, kv_head + b, heads[0]) for first in (problem.offset, 0))
        rows, keys = rows.to(problem.device), keys.to(problem.device)
        sample = _Sample(b, kv_head, rows, keys, *self._rows(b, heads, rows, given))
        if self._whole or given is not None:
            everything = self._whole_rows if given is None else [_given_of(b, head, given) for head in heads]
            sample.dk, sample.dv = self._keys(b, kv_head, keys, everything)
        self._whole_rows = []
        return sample

    def _places(self, first: int, seed: int, head: int) -> torch.Tensor:
        """Returns sorted positions: the ends, random ones, and as many that the widest dilation takes."""
        generator = torch.Generator().manual_seed(seed)
        last = self.problem.num_positions
        places = torch.randint(first, last, (ROWS - 2,), generator=generator)
        if isinstance(self.pattern, DilatedPattern):
            length, rate = max(self.pattern.branches, key=lambda branch: branch[1])
            offset = self.pattern.offsets(self.problem.num_heads)[self.pattern.dilation_rates.index(rate)][head]
            starts = self._starts.cpu()[places]
            segments = starts + (places - starts) // length * length
            taken = segments + (places - segments) // rate * rate + max(offset, 0)
            places[::2] = taken[::2].clamp(first, last - 1)
        return torch.cat([places, torch.tensor([first, last - 1])]).unique()

    def _rows(self, b: int, heads: range, rows: torch.Tensor, given: Given | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns out and dq (group, rows, D); checks what is ``given``, and keeps out and lse of all rows where they are whole."""
        problem, scale = self.problem, self.problem.head_dim**-0.5
        kv_head = heads[0] * problem.kv_heads // problem.num_heads
        k, v = (x[b, :, kv_head].detach().double() for x in self.leaves[1:])
        keys = torch.arange(len(k), device=k.device)
        outs, dqs = [], []
        self._whole_rows = []
        for head in heads:
            chunks = []
            for part in rows.split(max(1, _ELEMENTS // len(k))):
                q, dout = (x[b, part - problem.offset, head].double() for x in (self.leaves[0], self.dout))
                scores, products = q @ k.T * scale, dout @ v.T
                keep = self._keep(b, head, part, keys)
                kept = products if keep is None else products * keep
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
            if self._whole:
                self._whole_rows.append((out, lse))
            elif given is not None:
                self._check(out, lse, _given_of(b, head, given), rows - problem.offset)
        return torch.stack(outs), torch.stack(dqs)

    def _check(self, out: torch.Tensor, lse: torch.Tensor, given: tuple[torch.Tensor, torch.Tensor], at: torch.Tensor) -> None:
        off = float((given[0][:, at] - out).norm() / out.norm())
        off_lse = float(torch.where(given[1][:, at] == lse, 0.0, given[1][:, at] - lse).abs().max())
        if not (off <= BOUNDS[self.problem.dtype] and off_lse <= _LSE_BOUND):
            self.note = f"our forward is off (out {off:.1e}, lse {off_lse:.1e}), and dk, dv are compared with what follows from it"

    def _keys(self, b: int, kv_head: int, keys: torch.Tensor, everything: Given) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns dk and dv (keys, D) from out and lse of all rows of each query head."""
        problem, scale = self.problem, self.problem.head_dim**-0.5
        k, v = (x[b, keys, kv_head].detach().double() for x in self.leaves[1:])
        dk, dv = torch.zeros_like(k), torch.zeros_like(v)
        rows = torch.arange(problem.offset, problem.num_positions, device=k.device)
        for i, (outs, lses) in enumerate(everything):
            head = kv_head * problem.num_heads // problem.kv_heads + i
            weights = _weights(lses)
            for part in rows.split(max(1, _ELEMENTS // len(keys))):
                at = part - problem.offset
                q, dout = (x[b, at, head].detach().double() for x in (self.leaves[0], self.dout))
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
        self, pattern: Pattern, b: int, head: int, rows: torch.Tensor, keys: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns m (rows, keys) and the zero keys z (rows,), in float64."""
        problem = self.problem
        m = torch.zeros(len(rows), len(keys), dtype=torch.float64, device=rows.device)
        zero = m.new_zeros(len(rows))
        if isinstance(pattern, BlockPattern):
            n = problem.num_positions
            m += pairs_of(block_lists(pattern, n, problem.num_heads, is_causal=problem.is_causal, device=rows.device), head, rows, keys)
            return m, zero
        for (length, rate), offsets in zip(pattern.branches, pattern.offsets(problem.num_heads), strict=True):
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
        if problem.key_padding_mask is not None:
            m *= ~problem.key_padding_mask[b, keys]
        return m, zero

    def _keep(self, b: int, head: int, rows: torch.Tensor, keys: torch.Tensor) -> torch.Tensor | None:
        """Returns 1/(1 − p) where the weight is kept, 0 where it is dropped; None without dropout."""
        p = self.problem.dropout_p
        if not p:
            return None
        batch, heads = (torch.tensor([x], device=rows.device) for x in (b, head))
        return keep_mask(Dropout(p, self._seed, batch, heads, rows[None], keys[None]), slice(None))[0, 0].double() / (1 - p)


def pairs_of(lists: BlockLists, head: int, rows: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Returns bool (rows, keys): the pairs of one head that the lists keep, masks of single pairs included."""
    first_row = (head if lists.num_heads > 1 else 0) * lists.num_rows
    starts = lists.row_starts[first_row : first_row + lists.num_rows + 1].long()
    entries = torch.arange(int(starts[0]), int(starts[-1]), device=rows.device)
    numbers = torch.full((lists.num_rows, lists.num_columns), -1, dtype=torch.int64, device=rows.device)
    numbers[torch.searchsorted(starts, entries, right=True) - 1, lists.columns[entries].long()] = entries
    entry = numbers[rows // lists.q_block][:, keys // lists.k_block]
    kept = entry >= 0
    if lists.masks is not None:
        assert lists.bits is not None
        masks = lists.masks[entry.clamp(min=0)].long()
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


def _given_of(b: int, head: int, given: Given) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns out (softmaxes, Nq, D) and lse (softmaxes, Nq) of one head."""
    return torch.stack([out[b, :, head].double() for out, _ in given]), torch.stack([lse[b, head].double() for _, lse in given])


def _finite(lse: torch.Tensor) -> torch.Tensor:
    return torch.where(lse == -torch.inf, 0.0, lse)


def _weights(lses: torch.Tensor) -> torch.Tensor:
    """Returns the shares (softmaxes, rows) of the softmaxes in their mixture; 0 in rows without keys."""
    return (lses - _finite(lses.logsumexp(0))).exp()


def _add(squares: dict[str, list[float]], name: str, found: torch.Tensor, true: torch.Tensor) -> None:
    sums = squares.setdefault(name, [0.0, 0.0])
    sums[0] += float((found.double() - true).square().sum())
    sums[1] += float(true.square().sum())
