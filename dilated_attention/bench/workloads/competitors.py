"""What others compute, called as they are called: torch's kernels, FlashAttention-4, FlexAttention, TorchScale from the user's own copy.

Also costs to compare with: the same FLOPs as dense problems, lists of blocks, and the choice of blocks.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from dilated_attention.backends import AttentionRequest, Options, detect, registry
from dilated_attention.backends.flash import flash3, flash3_fp8
from dilated_attention.bench.measure.limits import Refused
from dilated_attention.bench.models import torchscale as copies
from dilated_attention.bench.workloads.contenders import (
    Attend,
    Contender,
    Costs,
    block_pattern,
    dilated_pattern,
    equal_pattern,
    external,
    ours,
)
from dilated_attention.bench.workloads.problem import Problem
from dilated_attention.engine.blocks.bitmask import lists_of_kept
from dilated_attention.engine.blocks.lists import block_lists, clear_block_lists
from dilated_attention.engine.blocks.selection import choose_blocks_op
from dilated_attention.pattern import DilatedPattern, TopBlocks, to_block_mask


def load_libraries() -> None:
    """Loads FlashAttention-3 from the files that FLASH3_LIBRARY, FLASH3_CUDART and FLASH3_FP8_LIBRARY name."""
    if library := os.environ.get("FLASH3_LIBRARY"):
        flash3.load_library(library, os.environ.get("FLASH3_CUDART"))
    if library := os.environ.get("FLASH3_FP8_LIBRARY"):
        flash3_fp8.load_library(library)


def _takes_no(problem: Problem, *able: str) -> None:
    if missing := [name for name in problem.options if name not in ("data", "queries", *able)]:
        raise Refused(f"takes no {', '.join(missing)}")
    if "queries" in problem.options and problem.is_causal:
        raise Refused("its causal mask begins at the first key")


def _torch_kernel(name: str, problem: Problem) -> Attend:
    """One of torch's kernels, without the microseconds that the context manager ``sdpa_kernel`` takes."""
    _takes_no(problem)
    op = getattr(torch.ops.aten, f"_scaled_dot_product_{name}_attention")
    before: tuple[Any, ...] = () if name == "flash" else (None, True)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = op(*(x.transpose(1, 2) for x in (q, k, v)), *before, 0.0, problem.is_causal)[0]
        return out.transpose(1, 2)

    return attend


def _flash4(problem: Problem) -> Attend:
    _takes_no(problem, "window")
    from flash_attn.cute.interface import flash_attn_func

    options: dict[str, Any] = {"causal": problem.is_causal} if problem.window is None else {"window_size": problem.window}

    def attend(*qkv: torch.Tensor) -> torch.Tensor:
        out = flash_attn_func(*qkv, **options)
        return out[0] if isinstance(out, tuple) else out

    return attend


def multiplicity(pattern: DilatedPattern, num_heads: int, is_causal: bool, device: torch.device | str) -> Callable[..., torch.Tensor]:
    """Returns m_h(i, j) as a function of index tensors, as FlexAttention's modifications are given them."""
    offsets = torch.tensor(pattern.offsets(num_heads), dtype=torch.int32, device=device)

    def count(h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        total: Any = 0
        for branch, (w, r) in enumerate(pattern.branches):
            o = offsets[branch, h]
            total = total + ((i // w == j // w) & (i % w % r == o) & (j % w % r == o)).int()
        return total * (i >= j).int() if is_causal else total

    return count


def _flex(problem: Problem) -> Attend:
    """The case's blocks, or its branches (a mask of their union, log m added to the scores), by compiled FlexAttention."""
    _takes_no(problem)
    from torch.nn.attention import flex_attention as flex

    n, heads = problem.num_positions, problem.num_heads
    score = None
    if problem.blocks is not None:
        mask = to_block_mask(problem.blocks, n, heads, is_causal=problem.is_causal, device=problem.device)
    else:
        count = multiplicity(dilated_pattern(problem), heads, problem.is_causal, problem.device)
        # compiled, so that no (H, N, N) mask is written out
        make = torch.compile(flex.create_block_mask)
        mask = make(lambda b, h, i, j: count(h, i, j) > 0, None, heads, n, n, device=problem.device)

        def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
            # log of 0 never counts: the mask leaves such pairs out
            return s + count(h, i, j).clamp(min=1).float().log()

    torch._dynamo.config.recompile_limit = 64
    # shapes as constants: its fastest form
    compiled = torch.compile(flex.flex_attention, fullgraph=True, dynamic=False)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out: Any = compiled(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), score_mod=score, block_mask=mask)
        found: torch.Tensor = out.transpose(1, 2)
        return found

    return attend


def _floor(backend: str, problem: Problem) -> Costs:
    """The branches' FLOPs as independent dense problems, on the fastest library here or ``backend``; up to 2^20 rows, then scaled."""
    pattern, heads, dim = dilated_pattern(problem), problem.num_heads, problem.head_dim
    # the shortest segment's: 2048 for LongNet's branches
    length = min(problem.num_positions, *(w // r for w, r in pattern.branches))
    each = heads * (length * (length + 1) // 2 if problem.is_causal else length * length)
    pairs = problem.pairs(pattern)
    count = max(1, min(round(pairs / each), 2**20 // length))
    dense = Problem(num_positions=length, batch_size=count, num_heads=heads, head_dim=dim, dtype=problem.dtype, device=problem.device)
    q, k, v = (x.detach() for x in dense.qkv())
    dout = dense.dout()
    request = AttentionRequest(hardware=detect(problem.device), dtype=problem.dtype, head_dim=dim, needs_grad=True)
    kernels = registry.select(request) if backend == "auto" else registry.get(backend)
    if reasons := kernels.reasons_against(request):
        raise Refused("; ".join(reasons))
    options = Options(scale=dim**-0.5, causal=problem.is_causal)
    out, lse = kernels.forward(q, k, v, options)

    def forward() -> Any:
        return kernels.forward(q, k, v, options)

    def backward() -> Any:
        return kernels.backward(dout, q, k, v, out, lse, options)

    def both() -> Any:
        return forward(), backward()

    return Costs({"forward": forward, "backward": backward, "both": both}, pairs / (count * each))


def _lists(problem: Problem) -> Costs:
    pattern = block_pattern(problem)

    def build() -> Any:
        clear_block_lists()
        return block_lists(pattern, problem.num_positions, problem.num_heads, is_causal=problem.is_causal, device=problem.device)

    return Costs({"forward": build})


def _choice(problem: Problem) -> Costs:
    pattern, n = block_pattern(problem), problem.num_positions
    if not isinstance(pattern, TopBlocks):
        raise Refused("the case's blocks are not chosen by content")
    q, k, _ = (x.detach() for x in problem.qkv())

    def choose() -> Any:
        kept = choose_blocks_op(q, k, None, None, pattern.spec(), problem.is_causal, problem.head_dim**-0.5, 0)
        return lists_of_kept(kept, pattern, n, n, is_causal=problem.is_causal)

    return Costs({"forward": choose})


def floor(backend: str = "auto") -> Contender:
    """The branches' FLOPs as dense problems."""
    name, where = ("floor", "the fastest library here") if backend == "auto" else (f"floor {backend}", backend)
    what = f"the branches' FLOPs as dense problems of the shortest w / r, on {where}"
    return Contender(name=name, what=what, make=functools.partial(_floor, backend), pattern=dilated_pattern)


COMPETITORS: tuple[Contender, ...] = (
    *(external(name=f"torch {name}", what=f"torch's kernel {name}, as a user calls it", make=functools.partial(_torch_kernel, name))
      for name in ("cudnn", "flash", "efficient")),
    external(name="fa4", what="FlashAttention-4, as a user calls it", make=_flash4),
    external(name="flex dilated", what="the branches, by FlexAttention", make=_flex, pattern=dilated_pattern),
    external(name="flex blocks", what="the case's blocks, by FlexAttention", make=_flex, pattern=block_pattern),
    ours("equal", "ours as TorchScale's function: offsets, zero keys, detached mixture", equal_pattern, mixture_grad="detached"),
    floor(),
    Contender(name="lists", what="building the lists of the case's blocks for the first time", make=_lists),
    Contender(name="choice", what="choosing the case's blocks by content, and their lists", make=_choice),
)  # fmt: skip


def torchscale(path: str, kernel: str) -> Contender:
    """TorchScale's dilated attention on q, k, v: gathering, kernel, scattering, no projections. Its code runs unedited.

    Args:
        path: the user's copy.
        kernel: backend that stands in for the package flash-attn. ``sdpa_flash`` is FlashAttention-2, the kernel that package runs.

    Raises:
        ValueError: there is no TorchScale in ``path``.
    """
    folder = copies.find(Path(path), copies.TORCHSCALE)
    with copies.imported(folder):
        found = copies.load("torchscale.component.dilated_attention", kernel).DilatedAttention
    return external(
        name="torchscale",
        what=f"TorchScale's dilated attention, without projections, on {kernel}",
        make=functools.partial(_torchscale, found),
        pattern=equal_pattern,
        mixture_grad="detached",
        until=lambda problem: shifted_from(equal_pattern(problem), problem.num_positions),
    )


def _torchscale(kind: Any, problem: Problem) -> Attend:
    _takes_no(problem)
    lengths, rates = problem.branches
    args = SimpleNamespace(flash_attention=True, xpos_rel_pos=False, multiway=False, layernorm_eps=1e-5, seq_parallel=False,
                           segment_length=list(lengths), dilated_ratio=list(rates))  # fmt: skip
    causal = {"is_causal": problem.is_causal}
    # its projections are built but never used
    with torch.device("meta"):
        module = kind(args, problem.embed_dim, problem.num_heads, self_attention=True)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        outs, lses = [], []
        for length, rate in zip(lengths, rates, strict=True):
            ki, vi = (module.gathering(x, rate, length, is_kv=True, seq_parall=False, **causal) for x in (k, v))
            qi = module.gathering(q, rate, length, is_kv=False, seq_parall=False, **causal)
            out, lse = module.attention_ops(qi, ki, vi, **causal)
            outs.append(out)
            lses.append(lse)
        found: torch.Tensor = module.scattering(outs, lses, q.shape[1], q.shape[0]).view(q.shape)
        return found

    return attend


def shifted_from(pattern: DilatedPattern, num_positions: int) -> int | None:
    """Returns the first position that TorchScale shifts, or None.

    It pads each segment to a multiple of r and lays segments next to each other with the padding still in: where r does not divide w,
    all segments after the first land too far right and mix with other positions' rows.
    """
    lengths = [min(w, num_positions) for w in pattern.segment_lengths]
    return min((w for w, r in zip(lengths, pattern.dilation_rates, strict=True) if w % r and w < num_positions), default=None)
