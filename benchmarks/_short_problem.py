"""One function of q, k, v that short.py times, and its tensors."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch

from dilated_attention import DilatedPattern, attention, dilated_attention
from dilated_attention.engine.branches.plan import Shape, make_plan
from dilated_attention.functional.arguments import WHOLE_SEQUENCE

DENSE = DilatedPattern((WHOLE_SEQUENCE,), (1,), "zero")


@dataclass(frozen=True)
class Problem:
    """What is computed, whoever does it. ``queries`` are the last ones of ``length`` positions; None for all."""

    length: int
    heads: int
    head_dim: int
    pattern: DilatedPattern = DENSE
    is_causal: bool = False
    mixture_grad: str = "exact"
    batch: int = 1
    kv_heads: int | None = None
    queries: int | None = None
    dtype: torch.dtype = torch.bfloat16
    window: tuple[int | None, int | None] | None = None
    dropout_p: float = 0.0
    # share of keys that are padding: "suffix" of each sequence, or "random" ones
    padding: tuple[str, float] | None = None
    bounds: tuple[int, ...] | None = None

    @property
    def group(self) -> int:
        return self.heads // (self.kv_heads or self.heads)

    @property
    def offset(self) -> int:
        return 0 if self.queries is None else self.length - self.queries

    @property
    def pairs(self) -> int:
        """(query, key) pairs of all heads and sequences, padding included."""
        if self.window is not None:
            left, right = (self.length if side is None else side for side in self.window)
            rows = torch.arange(self.offset, self.length)
            last = (rows + (0 if self.is_causal else right)).clamp(max=self.length - 1)
            return self.batch * self.heads * int((last - (rows - left).clamp(min=0) + 1).sum())
        bounds = self.bounds or (0, self.length)
        documents = tuple(itertools.pairwise(bounds))
        ends = (self.offset, self.length), (0, self.length)
        shape = Shape(self.heads, self.kv_heads or self.heads, *ends, documents, self.is_causal)
        return self.batch * make_plan(self.pattern, shape).pairs


class Data:
    """q, k, v and dout of a problem, and the arguments of our calls on them."""

    def __init__(self, problem: Problem, device: str) -> None:
        self.problem, self.device = problem, device
        generator = torch.Generator(device).manual_seed(problem.length)
        places = [(problem.queries or problem.length, problem.heads)] + 2 * [(problem.length, problem.kv_heads or problem.heads)]
        self.q, self.k, self.v, self.dout = (
            torch.randn(problem.batch, n, heads, problem.head_dim, dtype=problem.dtype, device=device, generator=generator)
            for n, heads in (*places, places[0])
        )
        self.leaves = [x.requires_grad_() for x in (self.q, self.k, self.v)]
        self.padding: torch.Tensor | None = None
        if problem.padding is not None:
            kind, share = problem.padding
            if kind == "suffix":
                row = torch.arange(problem.length, device=device) >= round((1 - share) * problem.length)
                self.padding = row.expand(problem.batch, -1).contiguous()
            else:
                self.padding = torch.rand(problem.batch, problem.length, device=device, generator=generator) < share
        self.arguments: dict[str, Any] = {"is_causal": problem.is_causal}
        if problem.dropout_p:
            self.arguments["dropout_p"] = problem.dropout_p
        # without a mask the position of dense queries changes nothing
        if problem.offset and (problem.is_causal or problem.window is not None or problem.pattern is not DENSE):
            self.arguments["query_offset"] = problem.offset
        if self.padding is not None:
            self.arguments["key_padding_mask"] = self.padding
        if problem.bounds is not None:
            self.arguments["cu_seqlens"] = torch.tensor(problem.bounds, dtype=torch.int32, device=device)
        if problem.window is not None:
            self.arguments["window"] = problem.window

    def call(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **more: Any) -> Any:
        """Our function; ``more`` are backend, deterministic, return_lse."""
        return our_call(self.problem, q, k, v, **self.arguments, **more)


def our_call(problem: Problem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **arguments: Any) -> Any:
    """The public function with the pattern of ``problem``; its options are in ``arguments``."""
    pattern = problem.pattern
    if pattern is DENSE:
        return attention(q, k, v, **arguments)
    settings: dict[str, Any] = {"head_offsets": pattern.head_offsets, "tail": pattern.tail, "mixture_grad": problem.mixture_grad}
    return dilated_attention(q, k, v, pattern.segment_lengths, pattern.dilation_rates, **settings, **arguments)
