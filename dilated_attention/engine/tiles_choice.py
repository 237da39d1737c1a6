"""Whether a whole call runs on the kernels that walk a table of tiles, or problem by problem on a kernel library.

A library's kernels are faster on long problems, but every problem is a launch of its own, which costs the host more than the GPU at short
lengths. So both times are estimated, from the rates of the preference table and the launches of the plan, and the shorter one wins.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import torch

from dilated_attention.backends import Request, preference, registry
from dilated_attention.engine.plan import Shape, make_plan
from dilated_attention.engine.run import Call
from dilated_attention.pattern import DilatedPattern

NAME = "tiles"
# Host time of one launch of a library with its views, and of what a call does besides, in ms: benchmarks/short.py on an H200. The tiles' own
# launches take less than the first line together.
_LAUNCH_MS = {False: 0.045, True: 0.075}
_CALL_MS = {False: 0.15, True: 0.5}
# TFLOP/s where the table has no row: of the tiles, and of what a library reaches
_TILES_TFLOPS = {False: 250.0, True: 190.0}
_LIBRARY_TFLOPS = {False: 420.0, True: 380.0}
# kernels that are no match for the tiles, whatever the length
_SLOWER = frozenset({"math", "flex", "sdpa_efficient", "xformers"})


def runs_on_tiles(pattern: DilatedPattern, shape: Shape, q: torch.Tensor, call: Call, is_backward: bool) -> bool:
    if call.backend.facts.whole_calls:
        return True
    request = call.request
    if request is None or call.named or q.device.type != "cuda":
        return False
    # with detached mixing both passes go one way, as the backward reads what the forward kept
    both = call.detached and call.needs_grad
    return _is_faster(pattern, shape, request, q.shape[0], call.backend.name, is_backward, both, call.nested, preference.generation())


@functools.lru_cache(maxsize=4096)
def _is_faster(
    pattern: DilatedPattern, shape: Shape, request: Request, batch: int, library: str, is_backward: bool, both: bool, nested: bool, _: int
) -> bool:
    tiles = registry.get(NAME)
    if tiles.why_not(request):
        return False
    if library in _SLOWER:
        return True
    passes = (False, True) if both else (is_backward,)
    return sum(_tiles_ms(pattern, shape, request, batch, which) for which in passes) < sum(
        _library_ms(pattern, shape, request, batch, library, which, nested) for which in passes
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
    rate = _rate(NAME, request, is_backward) or _TILES_TFLOPS[is_backward]
    return _operations(pattern, shape, request.head_dim, batch, is_backward) / rate / 1e9 + 0.1


def _library_ms(
    pattern: DilatedPattern, shape: Shape, request: Request, batch: int, library: str, is_backward: bool, nested: bool
) -> float:
    rate = _rate(library, request, is_backward) or _LIBRARY_TFLOPS[is_backward]
    kernels = _operations(pattern, shape, request.head_dim, batch, is_backward) / rate / 1e9
    # every document has launches of its own, and planning many takes longer than this answer is worth
    few = len(shape.documents) <= 8
    launches = len(make_plan(pattern, shape).problems) if few else len(shape.documents) * pattern.num_branches
    if pattern.num_branches == 1 and launches == 1:
        return max(kernels, _LAUNCH_MS[is_backward])
    return max(kernels, launches * _LAUNCH_MS[is_backward] + _CALL_MS[is_backward])


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
