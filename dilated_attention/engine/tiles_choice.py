"""Whether a whole call runs on the kernels that walk a table of tiles, or problem by problem on a kernel library.

A library's kernels are faster on long problems, but every problem is a launch of its own, which costs the host more than the GPU at short
lengths. So both times are estimated, from the rates of the preference table and the launches of the plan, and the shorter one wins.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import NamedTuple

import torch

from dilated_attention.backends import BackendUnavailable, Request, preference, registry
from dilated_attention.engine.plan import Shape, make_plan
from dilated_attention.engine.run import Call
from dilated_attention.pattern import DilatedPattern

NAME = "tiles"
# Host time of a library's problem, its views and launches, and of what a call does besides, in ms, forward and backward: benchmarks/short.py on
# an H200. A whole call of the tiles takes less than 0.1 and 0.25.
_PROBLEM_MS = {False: 0.09, True: 0.17}
_CALL_MS = {False: 0.2, True: 1.0}
# TFLOP/s where the table has no row: of the tiles and of a library, half precision and float32
_TILES_TFLOPS = {False: (250.0, 45.0), True: (190.0, 33.0)}
_LIBRARY_TFLOPS = {False: (420.0, 35.0), True: (380.0, 30.0)}
# kernels that are no match for the tiles, whatever the length; the last two in half precision
_SLOWER = frozenset({"math", "flex"})
_SLOWER_HALF = frozenset({"sdpa_efficient", "xformers"})


def runs_on_tiles(pattern: DilatedPattern, shape: Shape, q: torch.Tensor, call: Call, is_backward: bool) -> bool:
    if call.backend.facts.whole_calls:
        return True
    request = call.request
    if request is None or call.named or q.device.type != "cuda":
        return False
    # with detached mixing both passes go one way, as the backward reads what the forward kept
    both = call.detached and call.needs_grad
    return _is_faster(pattern, shape, request, q.shape[0], call.backend.name, is_backward, both, preference.generation())


class Choice(NamedTuple):
    """Of one pass: the backend that the registry prefers, whether tiles run instead, and the estimates for both in ms, 0 where none was made."""

    library: str
    tiles: bool
    tiles_ms: float = 0.0
    library_ms: float = 0.0


def choices_of(
    pattern: DilatedPattern,
    shape: Shape,
    request: Request,
    batch: int,
    *,
    needs_grad: bool,
    detached: bool = False,
    backend: str = "auto",
) -> tuple[Choice, ...]:
    """What ``runs_on_tiles`` will say of the forward and, with ``needs_grad``, of the backward of a call that need not be there.

    Raises:
        BackendUnavailable: nothing can compute it.
    """
    found = []
    for is_backward in (False, True)[: 1 + needs_grad]:
        asked = replace(request, needs_grad=is_backward)
        chosen = registry.select(asked, backend)
        if chosen.facts.whole_calls or backend != "auto" or asked.hardware.device_type != "cuda":
            found.append(Choice(chosen.name, chosen.facts.whole_calls))
            continue
        both = detached and needs_grad
        is_faster = _is_faster(pattern, shape, asked, batch, chosen.name, is_backward, both, preference.generation())
        times = _tiles_ms(pattern, shape, asked, batch, is_backward), _library_ms(pattern, shape, asked, batch, chosen.name, is_backward)
        found.append(Choice(chosen.name, is_faster, *times))
    return tuple(found)


def whole_shape(request: Request, num_positions: int) -> Shape:
    """The attention of one sequence to itself."""
    whole = 0, num_positions
    return Shape(request.num_heads, request.num_kv_heads, whole, whole, (whole,), request.causal)


def tiles_passes(
    pattern: DilatedPattern,
    request: Request,
    batch: int,
    num_positions: int,
    needs_grad: bool,
    *,
    detached: bool = False,
    backend: str = "auto",
) -> tuple[bool, bool]:
    """Whether forward and backward of the attention of a sequence to itself run on tiles; never where nothing can compute it."""
    length = max((-(-min(w, num_positions) // r) for w, r in pattern.branches), default=0)
    try:
        found = choices_of(
            pattern,
            whole_shape(request, num_positions),
            replace(request, length=length),
            batch,
            needs_grad=needs_grad,
            detached=detached,
            backend=backend,
        )
    except BackendUnavailable:
        return False, False
    return found[0].tiles, needs_grad and found[-1].tiles


@functools.lru_cache(maxsize=4096)
def _is_faster(
    pattern: DilatedPattern, shape: Shape, request: Request, batch: int, library: str, is_backward: bool, both: bool, _: int
) -> bool:
    tiles = registry.get(NAME)
    if tiles.why_not(request):
        return False
    if library in _SLOWER or (library in _SLOWER_HALF and request.dtype is not torch.float32):
        return True
    passes = (False, True) if both else (is_backward,)
    return sum(_tiles_ms(pattern, shape, request, batch, which) for which in passes) < sum(
        _library_ms(pattern, shape, request, batch, library, which) for which in passes
    )


def _operations(pattern: DilatedPattern, shape: Shape, head_dim: int, batch: int, is_backward: bool) -> float:
    pairs = sum(pattern.pairs(end - start, shape.num_heads, is_causal=shape.is_causal) for start, end in shape.documents)
    pairs = pairs * (shape.queries[1] - shape.queries[0]) // max(1, shape.keys[1])
    if shape.window is not None and None not in shape.window:
        left, right = shape.window
        assert left is not None and right is not None
        pairs = min(pairs, (left + right + 1) * (shape.queries[1] - shape.queries[0]) * shape.num_heads)
    return (10 if is_backward else 4) * head_dim * pairs * batch


def _tiles_ms(pattern: DilatedPattern, shape: Shape, request: Request, batch: int, is_backward: bool) -> float:
    rate = _rate(NAME, request, is_backward) or _TILES_TFLOPS[is_backward][request.dtype is torch.float32]
    return _operations(pattern, shape, request.head_dim, batch, is_backward) / rate / 1e9 + 0.1


def _library_ms(pattern: DilatedPattern, shape: Shape, request: Request, batch: int, library: str, is_backward: bool) -> float:
    rate = _rate(library, request, is_backward) or _LIBRARY_TFLOPS[is_backward][request.dtype is torch.float32]
    kernels = _operations(pattern, shape, request.head_dim, batch, is_backward) / rate / 1e9
    # every document has launches of its own, and planning many takes longer than this answer is worth
    few = len(shape.documents) <= 8
    problems = len(make_plan(pattern, shape).problems) if few else len(shape.documents) * pattern.num_branches
    return max(kernels, problems * _PROBLEM_MS[is_backward] + _CALL_MS[is_backward])


def _rate(name: str, request: Request, is_backward: bool) -> float | None:
    """TFLOP/s as measured here, else as shipped."""
    request = replace(request, needs_grad=is_backward)
    tables = (preference.measured_here(request.hardware), preference.shipped(request.hardware.architecture))
    for table in tables:
        row = table.row_for(request) if table is not None else None
        found = [timing.tflops for timing in row.timings if timing.backend == name] if row is not None else []
        if found:
            return found[0]
    return None
