"""What benchmarks compare: dense attention kernel by kernel, and every attention module of this library.

For a problem, a contender creates a function of q, k, v (B, N, H, D), or of x (B, N, E) where it includes projections; or it refuses and
gives the reason.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from dilated_attention.bench.accuracy.correctness import BOUNDS, FP8_BOUND, Attend, Pattern
from dilated_attention.bench.measure.skip import Refused
from dilated_attention.bench.workloads.problem import Problem
from dilated_attention.factory import create_attention
from dilated_attention.functional import attention
from dilated_attention.pattern import BigBird, BlockPattern, DilatedPattern, LocalWindow, RandomBlocks, TopBlocks
from dilated_attention.pattern.blocks.kept_blocks import count_pairs
from dilated_attention.planning.estimate.memory import standard_attention

# a materialised score matrix larger than this is not a meaningful contender
_MOST_SCORE_BYTES = 64 * 2**30


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One implementation.

    Args:
        name: short, as in tables.
        what: a line for the legend.
        make: problem → function; raises ``Refused`` or ``BackendUnavailable``.
        pattern: problem → the pattern that it computes, for its pairs and its check; None where that depends on the data.
        inputs: ``"qkv"``, or ``"x"`` for modules with projections.
        trains: whether it has gradients.
        bound: relative error allowed; None for the dtype's bound.
        chooses: problem → the pattern that chooses blocks by q and k, where there is one.
        reference: problem → the same on one process, to compare a function of x with; None for ``make``.
        local: problem → the part that this process holds, where processes share the sequence.
    """

    name: str
    what: str
    make: Callable[[Problem], Attend]
    pattern: Callable[[Problem], Pattern | None]
    inputs: str = "qkv"
    trains: bool = True
    bound: float | None = None
    chooses: Callable[[Problem], TopBlocks] | None = None
    reference: Callable[[Problem], Attend] | None = None
    local: Callable[[Problem], Problem] | None = None

    def allowed(self, problem: Problem) -> float:
        return BOUNDS[problem.dtype] if self.bound is None else self.bound

    def pairs(self, problem: Problem) -> int | None:
        """Returns the (query, key) pairs with multiplicity, over heads and batch; None where the data decides."""
        pattern = self.pattern(problem)
        if pattern is None:
            return None
        return problem.batch_size * _counted(pattern, problem.num_positions, problem.num_heads, problem.is_causal, problem.device)


@functools.lru_cache(maxsize=512)
def _counted(pattern: Pattern, num_positions: int, num_heads: int, is_causal: bool, device: torch.device) -> int:
    """Counts the pairs of one sequence on the benchmark's device: block lists of a million positions take minutes on a CPU."""
    if isinstance(pattern, BlockPattern) and device.type == "cuda" and not isinstance(pattern, TopBlocks) and not pattern.lives_here:
        return count_pairs(pattern, num_positions, num_heads, is_causal=is_causal, device=device)
    return pattern.pairs(num_positions, num_heads, is_causal=is_causal)


def dense_pattern(problem: Problem) -> DilatedPattern:
    return DilatedPattern((problem.num_positions,), (1,), "zero")


def _standard(problem: Problem) -> Attend:
    """Textbook softmax attention: the whole score matrix in memory, in the inputs' dtype."""
    scores = problem.batch_size * problem.num_heads * problem.num_positions**2 * problem.dtype.itemsize
    if scores > _MOST_SCORE_BYTES:
        raise Refused(f"the score matrix alone would take {scores / 2**30:.0f} GiB")
    hidden = None
    if problem.is_causal:
        hidden = torch.ones(problem.num_positions, problem.num_positions, dtype=torch.bool, device=problem.device).triu(1)
    return functools.partial(standard_attention, hidden=hidden)


def _backend(name: str, problem: Problem, **options: Any) -> Attend:
    attend = functools.partial(attention, is_causal=problem.is_causal, backend=name, **options)
    # a backend refuses all inputs of this kind or none, and the first call of FlashAttention-3 and -4 compiles or loads code
    with torch.no_grad():
        attend(*(x.detach() for x in problem.reduced(256).qkv()))
    return attend


def dense(name: str, what: str) -> Contender:
    """Dense attention on one of this library's backends."""
    return Contender(name=name, what=what, make=functools.partial(_backend, name), pattern=dense_pattern)


def _torch_sdpa(problem: Problem) -> Attend:
    """``torch.nn.functional.scaled_dot_product_attention`` as a user would call it."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        grouped = problem.kv_heads != problem.num_heads
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=problem.is_causal, enable_gqa=grouped)
        return out.transpose(1, 2)

    return attend


STANDARD = Contender(name="standard", what="softmax(q kᵀ) v, materialised", make=_standard, pattern=dense_pattern)
SDPA = Contender(name="torch sdpa", what="torch's scaled_dot_product_attention, its own choice", make=_torch_sdpa, pattern=dense_pattern)
DENSE: tuple[Contender, ...] = (
    STANDARD,
    SDPA,
    dense("sdpa_flash", "FlashAttention-2, as bundled in torch"),
    dense("flash2", "FlashAttention-2, package flash-attn"),
    dense("flash3", "FlashAttention-3"),
    Contender(
        name="flash3_fp8",
        what="FlashAttention-3, 8-bit forward",
        make=functools.partial(_backend, "flash3_fp8", precision="fp8"),
        pattern=dense_pattern,
        trains=False,
        bound=FP8_BOUND,
    ),
    dense("flash4", "FlashAttention-4"),
    dense("sdpa_cudnn", "cuDNN, through torch"),
    dense("sdpa_efficient", "memory-efficient attention, through torch"),
    dense("flex", "FlexAttention, compiled"),
    dense("sdpa_cpu", "torch's CPU kernel"),
)


def dilated_pattern(problem: Problem) -> DilatedPattern:
    return DilatedPattern(*problem.branches)


def _module(kind: str, problem: Problem, **config: Any) -> Attend:
    module = create_attention(kind, **config)
    return functools.partial(module, is_causal=problem.is_causal)


def _dilated(problem: Problem, **config: Any) -> Attend:
    lengths, rates = problem.branches
    return _module("dilated", problem, segment_lengths=lengths, dilation_rates=rates, **config)


def block_sparse(name: str, what: str, pattern: Callable[[Problem], BlockPattern]) -> Contender:
    """``BlockSparseAttention`` with a pattern made for the problem."""
    return Contender(name=name, what=what, make=lambda problem: _module("block_sparse", problem, pattern=pattern(problem)), pattern=pattern)


def chosen(problem: Problem) -> TopBlocks:
    """Returns the pattern of the highest-scoring tenth of the blocks."""
    return TopBlocks(density=0.1, block_size=block_size(problem))


def block_size(problem: Problem) -> int:
    """Returns 128, or less where a short sequence would have few blocks."""
    return 128 if problem.num_positions >= 2048 else 64


def tenth(problem: Problem) -> RandomBlocks:
    """Returns a random tenth of all blocks, including each row's own block, so that no causal row is empty."""
    return RandomBlocks(0.1, own_block=True, block_size=block_size(problem))


def window(problem: Problem) -> LocalWindow:
    """Returns a window of a sixteenth of the sequence on either side, at least 128 keys."""
    return LocalWindow(max(128, problem.num_positions // 16), block_size=block_size(problem))


def big_bird(problem: Problem) -> BigBird:
    size = block_size(problem)
    return BigBird(max(128, problem.num_positions // 32), global_tokens=size, random_blocks=3, block_size=size)


@dataclass(frozen=True)
class OfEmbedded:
    """A module with projections as a function of x alone."""

    module: torch.nn.Module
    options: dict[str, Any]
    # torch's own module takes query, key and value
    times: int = 1

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.module(*[x] * self.times, **self.options)[0]
        return out


def multihead(kind: str, problem: Problem, **config: Any) -> Attend:
    torch.manual_seed(0)
    module = create_attention(
        kind,
        embed_dim=problem.embed_dim,
        num_heads=problem.num_heads,
        num_kv_heads=problem.num_kv_heads,
        device=problem.device,
        dtype=problem.dtype,
        **config,
    )
    return OfEmbedded(module, {"is_causal": problem.is_causal})


def multihead_dilated(problem: Problem) -> Attend:
    lengths, rates = problem.branches
    return multihead("multihead_dilated", problem, segment_lengths=lengths, dilation_rates=rates)


def branches_and_window(problem: Problem) -> dict[str, Any]:
    lengths, rates = problem.branches
    return {"segment_lengths": lengths, "dilation_rates": rates, "pattern": window(problem)}


def both(problem: Problem) -> Attend:
    return _module("block_sparse_dilated", problem, **branches_and_window(problem))


def multihead_both(problem: Problem) -> Attend:
    return multihead("multihead_block_sparse_dilated", problem, **branches_and_window(problem))


def _torch_multihead(problem: Problem) -> Attend:
    if problem.is_causal:
        raise Refused("nn.MultiheadAttention takes causality as an (N, N) mask")
    torch.manual_seed(0)
    module = torch.nn.MultiheadAttention(problem.embed_dim, problem.num_heads, batch_first=True, device=problem.device, dtype=problem.dtype)
    return OfEmbedded(module, {"need_weights": False}, times=3)


MODULES: tuple[Contender, ...] = (
    Contender(name="DilatedAttention", what="LongNet's branches: w = 2048 · 4^i, r = 4^i", make=_dilated, pattern=dilated_pattern),
    block_sparse("BlockSparseAttention 10%", "a tenth of the blocks, random", tenth),
    block_sparse("BlockSparseAttention window", "a sliding window of N/16 on either side", window),
    block_sparse("BlockSparseAttention BigBird", "window N/32, a global block, 3 random blocks per row", big_bird),
    Contender(
        name="BlockSparseAttention chosen",
        what="the tenth of the blocks that scores highest",
        make=lambda problem: _module("block_sparse", problem, pattern=chosen(problem)),
        pattern=lambda problem: None,
        chooses=chosen,
    ),
    Contender(
        name="BlockSparseDilatedAttention",
        what="branches and window in one softmax",
        make=both,
        pattern=lambda problem: None,
    ),
)
MULTIHEAD: tuple[Contender, ...] = (
    Contender(name="nn.MultiheadAttention", what="torch's, with projections", make=_torch_multihead, pattern=dense_pattern, inputs="x"),
    Contender(
        name="MultiheadDilatedAttention", what="with projections and norm", make=multihead_dilated, pattern=dilated_pattern, inputs="x"
    ),
    Contender(
        name="MultiheadBlockSparseAttention",
        what="a tenth of the blocks, with projections and norm",
        make=lambda problem: multihead("multihead_block_sparse", problem, pattern=tenth(problem)),
        pattern=tenth,
        inputs="x",
    ),
    Contender(
        name="MultiheadBlockSparseDilatedAttention",
        what="branches and window in one softmax, with projections and norm",
        make=multihead_both,
        pattern=lambda problem: None,
        inputs="x",
    ),
)
