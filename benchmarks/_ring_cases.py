"""The problems of ring.py: sizes, inputs, work, and a float64 result that no kernel of this library has part in."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from dilated_attention import DilatedPattern
from dilated_attention.engine.branches.plan import Shape, make_plan

# forward + backward over forward
TRAINING = 3.5


@dataclass(frozen=True)
class Problem:
    """What is attended. ``pattern``: segment lengths and dilation rates, None for dense attention."""

    heads: int
    kv_heads: int
    head_dim: int
    seq_len: int
    is_causal: bool
    pattern: tuple[tuple[int, ...], tuple[int, ...]] | None = None

    @property
    def mask(self) -> str:
        return "causal" if self.is_causal else "full"

    @property
    def shape(self) -> str:
        heads = f"{self.heads}" if self.heads == self.kv_heads else f"{self.heads}/{self.kv_heads}"
        return f"{heads}x{self.head_dim}"

    def of_length(self, seq_len: int) -> Problem:
        return replace(self, seq_len=seq_len)

    def flops(self, which: str) -> float:
        """4 · pairs · D of the forward, with pairs counted in every head; with the backward 3.5 times that."""
        N = self.seq_len
        if self.pattern is None:
            pairs = self.heads * (N * (N + 1) // 2 if self.is_causal else N * N)
        else:
            shape = Shape(self.heads, self.heads, (0, N), (0, N), ((0, N),), self.is_causal)
            pairs = make_plan(DilatedPattern(*self.pattern), shape).pairs
        return 4.0 * pairs * self.head_dim * (1.0 if which == "forward" else TRAINING)


@dataclass(frozen=True)
class Setting:
    """Branches of dilated attention: w_i = unit · growth^i, as far as they are no longer than the sequence."""

    name: str
    heads: int
    head_dim: int
    growth: int
    rates: tuple[int, ...]

    def problem(self, seq_len: int, is_causal: bool, unit: int) -> Problem:
        branches = [(unit * self.growth**i, r) for i, r in enumerate(self.rates) if i == 0 or unit * self.growth**i <= seq_len]
        lengths, rates = zip(*branches, strict=True)
        return Problem(self.heads, self.heads, self.head_dim, seq_len, is_causal, (lengths, rates))

    def small(self, seq_len: int, is_causal: bool) -> Problem:
        """The same rates with the longest segment as long as the sequence, so that some branches reach over ranks and some do not."""
        count = min(len(self.rates), 5)
        unit = max(1, seq_len // self.growth ** (count - 1))
        lengths = tuple(max(r, unit * self.growth**i) for i, r in enumerate(self.rates[:count]))
        return Problem(self.heads, self.heads, self.head_dim, seq_len, is_causal, (lengths, self.rates[:count]))


SETTINGS = {
    "12x64": Setting("12x64", 12, 64, 2, (1, 2, 4, 6, 12)),
    "16x128": Setting("16x128", 16, 128, 2, (1, 2, 4, 8, 16)),
    # LongNet's own: w and r grow alike, up to the whole sequence
    "geometric": Setting("geometric", 16, 64, 4, (1, 4, 16, 64, 256, 1024)),
    # for a try on CPU
    "tiny": Setting("tiny", 4, 8, 2, (1, 2, 4)),
}


def tensors(problem: Problem, device: torch.device, dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    """Normal q, k, v, dout (1, N, H or Hk, D): the same on every rank with the same seed, as its GPUs are of one kind."""
    generator = torch.Generator(device).manual_seed(seed)
    H, Hk = problem.heads, problem.kv_heads
    return [
        torch.randn((1, problem.seq_len, heads, problem.head_dim), generator=generator, device=device, dtype=dtype)
        for heads in (H, Hk, Hk, H)
    ]


def reference(problem: Problem, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """(out, dq, dk, dv) in float64 by plain softmax, a head at a time; O(N²) memory."""
    q, k, v, dout = inputs
    results = [torch.zeros(x.shape, dtype=torch.float64, device=x.device) for x in (q, q, k, v)]
    scale = problem.head_dim**-0.5
    for head in range(problem.heads):
        of = head * problem.kv_heads // problem.heads
        qh, kh, vh, dh = (x[0, :, h].double() for x, h in ((q, head), (k, of), (v, of), (dout, head)))
        scores = qh @ kh.T * scale + _log_multiplicity(problem, head, q.device)
        lse = scores.logsumexp(1, keepdim=True)
        # a row that no branch of its head takes: 0, with gradient 0
        p = (scores - lse.masked_fill(lse == -torch.inf, 0)).exp()
        del scores
        out = p @ vh
        ds = p * (dh @ vh.T - (dh * out).sum(1, keepdim=True)) * scale
        for result, h, share in zip(results, (head, head, of, of), (out, ds @ kh, ds.T @ qh, p.T @ dh), strict=True):
            result[0, :, h] += share
    return results


def _log_multiplicity(problem: Problem, head: int, device: torch.device) -> torch.Tensor:
    """log m(i, j) of one head, −inf where j takes no part for i. Offsets are h mod r."""
    i = torch.arange(problem.seq_len, device=device)[:, None]
    j = i.T
    count = torch.ones((), dtype=torch.float64, device=device)
    if problem.pattern is not None:
        count = torch.zeros((problem.seq_len, problem.seq_len), dtype=torch.float64, device=device)
        for w, r in zip(*problem.pattern, strict=True):
            offset = head % r
            count += (i // w == j // w) & (i % w % r == offset) & (j % w % r == offset)
    return (count * (i >= j) if problem.is_causal else count).log()
