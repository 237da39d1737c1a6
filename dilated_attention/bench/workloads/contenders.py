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

from dilated_attention.bench.measure.limits import Refused
from dilated_attention.bench.workloads.problem import BOUNDS, Pattern, Problem, our_call
from dilated_attention.bench.workloads.standard import standard_attention
from dilated_attention.factory import create_attention
from dilated_attention.pattern import BigBird, BlockPattern, DilatedPattern, LocalWindow, RandomBlocks, TopBlocks
from dilated_attention.pattern.blocks.kept_blocks import count_pairs

Attend = Callable[..., torch.Tensor]
# a materialised score matrix larger than this is not a meaningful contender
_MOST_SCORE_BYTES = 64 * 2**30


@dataclass(frozen=True)
class Costs:
    """Calls by pass that are timed to compare with, whose results nobody asks for. Their time is multiplied by ``factor``."""

    calls: dict[str, Callable[[], Any]]
    factor: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One implementation.

    Args:
        name: short, as in tables.
        what: a line for the legend.
        make: problem → function, or ``Costs``; raises ``Refused`` or ``BackendUnavailable``.
        pattern: problem → the pattern that it computes, for its pairs and its check; None where that depends on the data.
        inputs: ``"qkv"``, or ``"x"`` for modules with projections.
        trains: whether it has gradients.
        bound: relative error allowed; None for the dtype's bound.
        mixture_grad: of branches, ``"exact"`` or ``"detached"``.
        until: problem → first position whose results are known to be another function's; None if there is none.
        of: problem → the problem that it computes instead, as the one without options.
        is_external: whether it is other people's code, to which this library's times are compared.
    """

    name: str
    what: str
    make: Callable[[Problem], Any]
    pattern: Callable[[Problem], Pattern | None] = lambda problem: None
    inputs: str = "qkv"
    trains: bool = True
    bound: float | None = None
    mixture_grad: str = "exact"
    until: Callable[[Problem], int | None] = lambda problem: None
    of: Callable[[Problem], Problem] | None = None
    is_external: bool = False

    def allowed(self, problem: Problem) -> float:
        return BOUNDS[problem.dtype] if self.bound is None else self.bound

    def inputs_of(self, problem: Problem, seed: int = 0) -> list[torch.Tensor]:
        """Returns x, or q, k and v."""
        return [problem.embedded(seed)] if self.inputs == "x" else problem.qkv(seed)

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


def ours(
    name: str, what: str, pattern: Callable[[Problem], Pattern], *, trains: bool = True, bound: float | None = None, **options: Any
) -> Contender:
    """This library's function of ``pattern``, called with ``options``, as ``backend``."""

    def make(problem: Problem) -> Attend:
        return functools.partial(our_call, problem, pattern(problem), **options)

    mixture = options.get("mixture_grad", "exact")
    return Contender(name=name, what=what, make=make, pattern=pattern, trains=trains, bound=bound, mixture_grad=mixture)


def of_backend(backend: str, kind: str = "dilated", *, name: str = "", **options: Any) -> Contender:
    """This library's dense or dilated attention, or that of the case's blocks, on one backend."""
    start, pattern = _KINDS[kind]
    name = name or (start if backend == "auto" else f"{start} {backend}")
    return ours(name, f"this library's {kind} attention, backend {backend}", pattern, backend=backend, **options)


_KINDS: dict[str, tuple[str, Callable[[Problem], Pattern]]] = {
    "dense": ("attention", dense_pattern),
    "dilated": ("ours", dilated_pattern),
    "blocks": ("blocks", block_pattern),
}
external = functools.partial(Contender, pattern=dense_pattern, is_external=True)
STANDARD = external(name="standard", what="softmax(q kᵀ) v, materialised", make=_standard)
SDPA = external(name="torch sdpa", what="torch's scaled_dot_product_attention, its own choice", make=_sdpa)
FP8: dict[str, Any] = {"precision": "fp8", "trains": False, "bound": 0.15}
_LIBRARIES = {
    "sdpa_flash": "FlashAttention-2, as bundled in torch",
    "flash2": "FlashAttention-2, package flash-attn",
    "flash3": "FlashAttention-3",
    "flash3_fp8": "FlashAttention-3, 8-bit forward",
    "flash4": "FlashAttention-4",
    "sdpa_cudnn": "cuDNN, through torch",
    "sdpa_efficient": "memory-efficient attention, through torch",
    "flex": "FlexAttention, compiled",
    "sdpa_cpu": "torch's CPU kernel",
}
DENSE: tuple[Contender, ...] = (
    STANDARD,
    SDPA,
    *(ours(name, what, dense_pattern, backend=name, **FP8 if "fp8" in name else {}) for name, what in _LIBRARIES.items()),
)


def _block_size(problem: Problem) -> int:
    """Returns 128, or less where a short sequence would have few blocks."""
    return 128 if problem.num_positions >= 2048 else 64


def _chosen(problem: Problem) -> TopBlocks:
    return TopBlocks(density=0.1, block_size=_block_size(problem))


def _tenth(problem: Problem) -> RandomBlocks:
    """Returns a random tenth of all blocks, including each row's own block, so that no causal row is empty."""
    return RandomBlocks(0.1, own_block=True, block_size=_block_size(problem))


def _window(problem: Problem) -> LocalWindow:
    return LocalWindow(max(128, problem.num_positions // 16), block_size=_block_size(problem))


def _big_bird(problem: Problem) -> BigBird:
    size = _block_size(problem)
    return BigBird(max(128, problem.num_positions // 32), global_tokens=size, random_blocks=3, block_size=size)


def _branches(problem: Problem) -> dict[str, Any]:
    lengths, rates = problem.branches
    return {"segment_lengths": lengths, "dilation_rates": rates}


def _both(problem: Problem) -> dict[str, Any]:
    return _branches(problem) | {"pattern": _window(problem)}


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


def module(
    name: str, what: str, kind: str, config: Callable[[Problem], dict[str, Any]],
    pattern: Callable[[Problem], Pattern | None] = lambda problem: None,
) -> Contender:  # fmt: skip
    """A module of this library, ``create_attention(kind)`` with ``config`` of the problem; ``pattern`` as in ``Contender``."""

    def make(problem: Problem) -> Attend:
        options = config(problem)
        if "multihead" not in kind:
            return functools.partial(create_attention(kind, **options), is_causal=problem.is_causal)
        torch.manual_seed(0)
        options |= {"embed_dim": problem.embed_dim, "num_heads": problem.num_heads, "num_kv_heads": problem.num_kv_heads}
        made = create_attention(kind, device=problem.device, dtype=problem.dtype, **options)
        return OfEmbedded(made, {"is_causal": problem.is_causal})

    inputs = "x" if "multihead" in kind else "qkv"
    return Contender(name=name, what=what, make=make, pattern=pattern, inputs=inputs)


def _block_sparse(name: str, what: str, pattern: Callable[[Problem], BlockPattern], kind: str = "block_sparse") -> Contender:
    return module(name, what, kind, lambda problem: {"pattern": pattern(problem)}, pattern)


def _torch_multihead(problem: Problem) -> Attend:
    if problem.is_causal:
        raise Refused("nn.MultiheadAttention takes causality as an (N, N) mask")
    torch.manual_seed(0)
    module = torch.nn.MultiheadAttention(problem.embed_dim, problem.num_heads, batch_first=True, device=problem.device, dtype=problem.dtype)
    return OfEmbedded(module, {"need_weights": False}, times=3)


MODULES: tuple[Contender, ...] = (
    module("DilatedAttention", "LongNet's branches: w = 2048 · 4^i, r = 4^i", "dilated", _branches, dilated_pattern),
    _block_sparse("BlockSparseAttention 10%", "a tenth of the blocks, random", _tenth),
    _block_sparse("BlockSparseAttention window", "a sliding window of N/16 on either side", _window),
    _block_sparse("BlockSparseAttention BigBird", "window N/32, a global block, 3 random blocks per row", _big_bird),
    _block_sparse("BlockSparseAttention chosen", "the tenth of the blocks that scores highest", _chosen),
    module("BlockSparseDilatedAttention", "branches and window in one softmax", "block_sparse_dilated", _both),
)
MULTIHEAD: tuple[Contender, ...] = (
    external(name="nn.MultiheadAttention", what="torch's, with projections", make=_torch_multihead, inputs="x"),
    module("MultiheadDilatedAttention", "with projections and norm", "multihead_dilated", _branches, dilated_pattern),
    _block_sparse("MultiheadBlockSparseAttention", "a tenth of the blocks, with projections and norm", _tenth, "multihead_block_sparse"),
    module("MultiheadBlockSparseDilatedAttention", "branches and window in one softmax, with projections and norm",
           "multihead_block_sparse_dilated", _both),
)  # fmt: skip


def _without(contender: Contender, name: str = "without") -> Contender:
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
_OURS, _ATTENTION = of_backend("auto"), of_backend("auto", "dense")
FUNCTIONS: tuple[Contender, ...] = (
    _OURS,
    _ATTENTION,
    *(of_backend(name, "blocks") for name in ("auto", "gluon", "cudnn_fe", "flash4", "triton")),
    of_backend("auto", name="ours deterministic", deterministic=True),
    ours("ours fp8", "the branches in 8 bits, forward", dilated_pattern, **FP8),
    _without(_OURS),
    _without(_ATTENTION, "dense without"),
    replace(_OURS, name="ungrouped", what="the same with as many key/value heads", of=lambda problem: replace(problem, num_kv_heads=None)),
    Contender(name="single calls", what="a call for each document", make=_single_calls, pattern=dilated_pattern),
)
