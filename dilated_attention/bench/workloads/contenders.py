"""What benchmarks compare: dense attention kernel by kernel, every attention module of this library, and options of its functions.

For a problem, a contender creates a function of q, k, v (B, N, H, D), or of x (B, N, E) where it includes projections; or it refuses and
gives the reason.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from dilated_attention.bench.accuracy.correctness import BOUNDS, FP8_BOUND, Attend, Pattern
from dilated_attention.bench.accuracy.truth import our_call
from dilated_attention.bench.measure.skip import Refused
from dilated_attention.bench.workloads.problem import Problem
from dilated_attention.factory import create_attention
from dilated_attention.functional import attention
from dilated_attention.pattern import BigBird, BlockPattern, DilatedPattern, LocalWindow, RandomBlocks, TopBlocks
from dilated_attention.pattern.blocks.kept_blocks import count_pairs
from dilated_attention.planning.estimate.memory import standard_attention

# a materialised score matrix larger than this is not a meaningful contender
_MOST_SCORE_BYTES = 64 * 2**30
# calls by pass, and a factor by which their time is multiplied
Costs = tuple[dict[str, Callable[[], Any]], float]


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
        mixture_grad: of branches, ``"exact"`` or ``"detached"``.
        until: problem → first position whose results are known to be another function's; None if there is none.
        of: problem → the problem that it computes instead, as the one without options.
        costs: instead of ``make``: calls that are timed to compare with, and whose results nobody asks for.
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
    mixture_grad: str = "exact"
    until: Callable[[Problem], int | None] = lambda problem: None
    of: Callable[[Problem], Problem] | None = None
    costs: Callable[[Problem], Costs] | None = None
    reference: Callable[[Problem], Attend] | None = None
    local: Callable[[Problem], Problem] | None = None

    def allowed(self, problem: Problem) -> float:
        return BOUNDS[problem.dtype] if self.bound is None else self.bound

    def pairs(self, problem: Problem) -> int | None:
        """Returns the (query, key) pairs with multiplicity, over heads and batch; None where the data decides."""
        pattern = self.pattern(problem)
        if pattern is None or isinstance(pattern, TopBlocks):
            return None
        if isinstance(pattern, DilatedPattern) and problem.options:
            return problem.pairs(pattern)
        return problem.batch_size * _counted(pattern, problem.num_positions, problem.num_heads, problem.is_causal, problem.device)


@functools.lru_cache(maxsize=512)
def _counted(pattern: Pattern, num_positions: int, num_heads: int, is_causal: bool, device: torch.device) -> int:
    """Counts the pairs of one sequence on the benchmark's device: block lists of a million positions take minutes on a CPU."""
    if isinstance(pattern, BlockPattern) and device.type == "cuda" and not pattern.lives_here:
        return count_pairs(pattern, num_positions, num_heads, is_causal=is_causal, device=device)
    return pattern.pairs(num_positions, num_heads, is_causal=is_causal)


def dense_pattern(problem: Problem) -> DilatedPattern:
    return DilatedPattern((problem.num_positions,), (1,), "zero")


def dilated_pattern(problem: Problem) -> DilatedPattern:
    return DilatedPattern(*problem.branches)


def equal_pattern(problem: Problem) -> DilatedPattern:
    """Returns the branches with TorchScale's offsets and zero keys."""
    return DilatedPattern(*problem.branches, "blocked", tail="zero_keys")


def block_pattern(problem: Problem) -> BlockPattern:
    assert problem.blocks is not None, "a case with blocks"
    return problem.blocks


def _standard(problem: Problem) -> Attend:
    """Textbook softmax attention: the whole score matrix in memory, in the inputs' dtype."""
    scores = problem.batch_size * problem.num_heads * problem.num_positions**2 * problem.dtype.itemsize
    if scores > _MOST_SCORE_BYTES:
        raise Refused(f"the score matrix alone would take {scores / 2**30:.0f} GiB")
    hidden = None
    if problem.is_causal:
        hidden = torch.ones(problem.num_positions, problem.num_positions, dtype=torch.bool, device=problem.device).triu(1)
    return functools.partial(standard_attention, hidden=hidden)


def _sdpa(problem: Problem) -> Attend:
    """``torch.nn.functional.scaled_dot_product_attention`` as a user would call it."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        grouped = problem.kv_heads != problem.num_heads
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=problem.is_causal, enable_gqa=grouped)
        return out.transpose(1, 2)

    return attend


def ours(name: str, what: str, pattern: Callable[[Problem], Pattern], *, options: dict[str, Any] | None = None, **more: Any) -> Contender:
    """This library's function of ``pattern``, called with ``options``, as ``backend``."""
    options = options or {}

    def make(problem: Problem) -> Attend:
        mine = pattern(problem)
        mixture = {"mixture_grad": more["mixture_grad"]} if "mixture_grad" in more else {}
        attend = functools.partial(our_call, problem, mine, **options, **mixture)
        if options.get("backend", "auto") != "auto" and not problem.options and isinstance(mine, DilatedPattern):
            # a backend refuses all inputs of this kind or none, and the first call of FlashAttention-3 and -4 compiles or loads code
            with torch.no_grad():
                small = (x.detach() for x in problem.reduced(256).qkv())
                attention(*small, is_causal=problem.is_causal, **({"backend": "auto"} | _of_dense(options)))
        return attend

    return Contender(name=name, what=what, make=make, pattern=pattern, **more)


def _of_dense(options: dict[str, Any]) -> dict[str, Any]:
    """Returns the options that ``attention`` takes too; its backends do not include kernels of branches."""
    names = {name: x for name, x in options.items() if name in ("backend", "precision")}
    return {} if names.get("backend") in ("nested", "tiles") else names


def dense(name: str, what: str, **more: Any) -> Contender:
    """Dense attention on one of this library's backends."""
    return ours(name, what, dense_pattern, options={"backend": name} | more.pop("options", {}), **more)


def of_backend(backend: str, kind: str = "dilated", *, name: str = "", **options: Any) -> Contender:
    """This library's dense or dilated attention, or that of the case's blocks, on one backend."""
    pattern, start = {"dense": (dense_pattern, "attention"), "dilated": (dilated_pattern, "ours"), "blocks": (block_pattern, "blocks")}[
        kind
    ]
    name = name or (start if backend == "auto" else f"{start} {backend}")
    made: Callable[[Problem], Pattern] = pattern  # type: ignore[assignment]
    return ours(name, f"this library's {kind} attention, backend {backend}", made, options={"backend": backend} | options)


STANDARD = Contender(name="standard", what="softmax(q kᵀ) v, materialised", make=_standard, pattern=dense_pattern)
SDPA = Contender(name="torch sdpa", what="torch's scaled_dot_product_attention, its own choice", make=_sdpa, pattern=dense_pattern)
FP8: dict[str, Any] = {"precision": "fp8"}
DENSE: tuple[Contender, ...] = (
    STANDARD,
    SDPA,
    dense("sdpa_flash", "FlashAttention-2, as bundled in torch"),
    dense("flash2", "FlashAttention-2, package flash-attn"),
    dense("flash3", "FlashAttention-3"),
    dense("flash3_fp8", "FlashAttention-3, 8-bit forward", options=FP8, trains=False, bound=FP8_BOUND),
    dense("flash4", "FlashAttention-4"),
    dense("sdpa_cudnn", "cuDNN, through torch"),
    dense("sdpa_efficient", "memory-efficient attention, through torch"),
    dense("flex", "FlexAttention, compiled"),
    dense("sdpa_cpu", "torch's CPU kernel"),
)


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


def branches_of(problem: Problem) -> dict[str, Any]:
    lengths, rates = problem.branches
    return {"segment_lengths": lengths, "dilation_rates": rates}


def branches_and_window(problem: Problem) -> dict[str, Any]:
    return branches_of(problem) | {"pattern": window(problem)}


def _module(kind: str, config: Callable[[Problem], dict[str, Any]], problem: Problem) -> Attend:
    return functools.partial(create_attention(kind, **config(problem)), is_causal=problem.is_causal)


def module(name: str, what: str, kind: str, config: Callable[[Problem], dict[str, Any]], pattern: Any = None, **more: Any) -> Contender:
    """An attention module without projections; ``pattern`` as in ``Contender``."""
    make = functools.partial(_module, kind, config)
    return Contender(name=name, what=what, make=make, pattern=pattern or (lambda problem: None), **more)


def block_sparse(name: str, what: str, pattern: Callable[[Problem], BlockPattern]) -> Contender:
    """``BlockSparseAttention`` with a pattern made for the problem."""
    return module(name, what, "block_sparse", lambda problem: {"pattern": pattern(problem)}, pattern)


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
    config |= {"embed_dim": problem.embed_dim, "num_heads": problem.num_heads, "num_kv_heads": problem.num_kv_heads}
    return OfEmbedded(create_attention(kind, device=problem.device, dtype=problem.dtype, **config), {"is_causal": problem.is_causal})


def multihead_dilated(problem: Problem) -> Attend:
    return multihead("multihead_dilated", problem, **branches_of(problem))


def both(problem: Problem) -> Attend:
    return _module("block_sparse_dilated", branches_and_window, problem)


def multihead_both(problem: Problem) -> Attend:
    return multihead("multihead_block_sparse_dilated", problem, **branches_and_window(problem))


def _torch_multihead(problem: Problem) -> Attend:
    if problem.is_causal:
        raise Refused("nn.MultiheadAttention takes causality as an (N, N) mask")
    torch.manual_seed(0)
    module = torch.nn.MultiheadAttention(problem.embed_dim, problem.num_heads, batch_first=True, device=problem.device, dtype=problem.dtype)
    return OfEmbedded(module, {"need_weights": False}, times=3)


def _multihead_tenth(problem: Problem) -> Attend:
    return multihead("multihead_block_sparse", problem, pattern=tenth(problem))


MODULES: tuple[Contender, ...] = (
    module("DilatedAttention", "LongNet's branches: w = 2048 · 4^i, r = 4^i", "dilated", branches_of, dilated_pattern),
    block_sparse("BlockSparseAttention 10%", "a tenth of the blocks, random", tenth),
    block_sparse("BlockSparseAttention window", "a sliding window of N/16 on either side", window),
    block_sparse("BlockSparseAttention BigBird", "window N/32, a global block, 3 random blocks per row", big_bird),
    block_sparse("BlockSparseAttention chosen", "the tenth of the blocks that scores highest", chosen),
    module("BlockSparseDilatedAttention", "branches and window in one softmax", "block_sparse_dilated", branches_and_window),
)
MULTIHEAD: tuple[Contender, ...] = tuple(
    Contender(name=name, what=what, make=make, pattern=pattern, inputs="x")
    for name, what, make, pattern in (
        ("nn.MultiheadAttention", "torch's, with projections", _torch_multihead, dense_pattern),
        ("MultiheadDilatedAttention", "with projections and norm", multihead_dilated, dilated_pattern),
        ("MultiheadBlockSparseAttention", "a tenth of the blocks, with projections and norm", _multihead_tenth, tenth),
        ("MultiheadBlockSparseDilatedAttention", "branches and window in one softmax, with projections and norm", multihead_both,
         lambda problem: None),
    )
)  # fmt: skip


def without(contender: Contender, name: str = "without") -> Contender:
    """The same on the problem without its options."""
    return replace(contender, name=name, what="the same call without the option", of=Problem.plain)


def _single_calls(problem: Problem) -> Attend:
    """Each packed document in a call of its own."""
    sizes = [last - first for first, last in itertools.pairwise(problem.bounds or (0, problem.num_positions))]
    pattern, plain = dilated_pattern(problem), problem.plain()

    def attend(*qkv: torch.Tensor) -> torch.Tensor:
        parts = zip(*(x.split(sizes, 1) for x in qkv), strict=True)
        return torch.cat([our_call(plain, pattern, *part) for part in parts], 1)

    return attend


# this library's functions as named cases call them: the branches, dense attention, the case's blocks, and what to compare options with
OURS = of_backend("auto")
ATTENTION = of_backend("auto", "dense")
FUNCTIONS: tuple[Contender, ...] = (
    OURS,
    ATTENTION,
    *(of_backend(name, "blocks") for name in ("auto", "gluon", "cudnn_fe", "flash4", "triton")),
    of_backend("auto", name="ours deterministic", deterministic=True),
    ours("ours fp8", "the branches in 8 bits, forward", dilated_pattern, options=FP8, trains=False, bound=FP8_BOUND),
    without(OURS),
    without(ATTENTION, "dense without"),
    replace(OURS, name="ungrouped", what="the same with as many key/value heads", of=lambda problem: replace(problem, num_kv_heads=None)),
    Contender(name="single calls", what="a call for each document", make=_single_calls, pattern=dilated_pattern),
)
