"""Kernels of this library that only move memory: merges of partial results, norms and activations.

Measures what each must move, and checks whether its result is correct.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from dilated_attention.backends.merge import merge_weights
from dilated_attention.bench.accuracy.correctness import BOUNDS, relative
from dilated_attention.bench.accuracy.correctness import wrong as beyond
from dilated_attention.bench.measure.skip import Refused
from dilated_attention.bench.workloads.problem import geometric
from dilated_attention.engine.branches import branch_buffers as layered
from dilated_attention.engine.branches.branch_buffers import BranchBuffers, make_branch_buffers
from dilated_attention.engine.branches.merge import has_kernels, merge_onto
from dilated_attention.functional.fused_norm_linear_torch import Recipe
from dilated_attention.pattern import DilatedPattern

# elements of the norms' input: larger than any cache with ``full``
_NORM_ELEMENTS = {False: 2**22, True: 2**28}
# (call, bytes that it must read and write once, relative errors)
Prepared = tuple[Callable[[], object], int, dict[str, float]]


@dataclass(frozen=True)
class Kernel:
    """``prepare(device, dtype, full)`` raises ``Refused`` where the kernel does not run."""

    name: str
    prepare: Callable[[torch.device, torch.dtype, bool], Prepared]


def wrong(errors: dict[str, float], dtype: torch.dtype) -> str:
    return beyond(errors, BOUNDS[dtype])


def _need_triton(device: torch.device, dtype: torch.dtype) -> None:
    if not has_kernels(torch.empty(0, device=device, dtype=dtype)):
        raise Refused("a Triton kernel for GPUs; on a CPU other loops include this work")


def _merge_two(device: torch.device, dtype: torch.dtype, full: bool) -> Prepared:
    """Merges a part into (out, lse) in place, as a ring does in each step."""
    N, H, D = (2**17, 16, 128) if full else (2**15, 4, 64)
    # on a CPU sums stay in float32; on a GPU each sum is rounded to the inputs' dtype
    kind = dtype if device.type == "cuda" or dtype is torch.float64 else torch.float32
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    out, part = (torch.randn(1, N, H, D, device=device).to(kind) for _ in range(2))
    lse, part_lse = (torch.randn(1, N, H, device=device, dtype=wide) for _ in range(2))
    rows = slice(0, 1024)
    true_lse, weight, part_weight = merge_weights(lse[:, rows].double(), part_lse[:, rows].double())
    true = out[:, rows].double() * weight[..., None] + part[:, rows].double() * part_weight[..., None]
    merge_onto(out, lse, part, part_lse)
    errors = {"out": relative(out[:, rows], true), "lse": relative(lse[:, rows], true_lse)}
    return lambda: merge_onto(out, lse, part, part_lse), 3 * out.nbytes + 3 * lse.nbytes, errors


def _buffers(
    positions: int, heads: int, D: int, device: torch.device, dtype: torch.dtype
) -> tuple[BranchBuffers, list[list[torch.Tensor]]]:
    """Returns the buffers' layout, and three times random [out, lse, parts, lses of parts] for B = 1."""
    layers = make_branch_buffers(DilatedPattern(*geometric(positions)), heads, (0, heads), positions, False)
    draw = functools.partial(torch.randn, device=device, generator=torch.Generator(device).manual_seed(1))
    part_rows, lse_rows = heads * layers.rows(with_direct=False), heads * layers.rows(with_direct=True)
    shape = (1, positions, heads)
    return layers, [
        [draw(*shape, D, dtype=dtype), torch.empty(shape, device=device), draw(part_rows * D), draw(lse_rows)] for _ in range(3)
    ]


def _layers(backward: bool, device: torch.device, dtype: torch.dtype, full: bool) -> Prepared:
    """Merges all branches' (out, lse) of a dilated attention in one kernel, or sums their dq, dk and dv."""
    _need_triton(device, dtype)
    from dilated_attention.engine.branches import merge_triton

    small, made = _buffers(4096, 4, 64, device, dtype)
    true = [[x.double() for x in each[:2]] for each in made]
    shaped = [[None if x is None else x.double() for x in small.split(each[2], 1, head_dim=64, with_direct=False)] for each in made]
    if backward:
        for (grad, _), parts in zip(true, shaped, strict=True):
            layered.sum_buffers(small, grad, parts)
        merge_triton.sum_buffers(small, [each[0] for each in made], [each[2] for each in made])
        errors = {name: relative(each[0], grad) for name, each, (grad, _) in zip(("dq", "dk", "dv"), made, true, strict=True)}
    else:
        lses = [x.double() for x in small.split(made[0][3], 1, head_dim=0, with_direct=True) if x is not None]
        layered.merge_buffers(small, true[0][0], true[0][1], shaped[0], lses)
        merge_triton.merge_buffers(small, *made[0])
        errors = {name: relative(x, y) for name, x, y in zip(("out", "lse"), made[0], true[0], strict=False)}
    layers, made = _buffers(2**17 if full else 2**14, 16, 128, device, dtype)
    # rows that only the direct branch computes are already in place
    rows = layers.positions // layers.step * layers.heads
    moved = made[0][2].nbytes + 2 * rows * 128 * dtype.itemsize
    if backward:
        grads, flat = [each[0] for each in made], [each[2] for each in made]
        return lambda: merge_triton.sum_buffers(layers, grads, flat), 3 * moved, errors
    return lambda: merge_triton.merge_buffers(layers, *made[0]), moved + made[0][3].nbytes + made[0][1].nbytes, errors


def _norm(activation: str, backward: bool, device: torch.device, dtype: torch.dtype, full: bool) -> Prepared:
    """The norm before a linear layer, on rows of 2048; with an activation, on rows of 8192."""
    _need_triton(device, dtype)
    from dilated_attention.functional import fused_norm_linear_triton as fused

    K = 8192 if activation != "none" else 2048
    M = _NORM_ELEMENTS[full] // K
    x, dz = (torch.randn(M, K, device=device, dtype=dtype) for _ in range(2))
    weight, bias = (torch.randn(K, device=device) for _ in range(2))
    stats = torch.empty(2, M, device=device)
    norm = (x, None, weight, bias, Recipe(activation, "layer", 1e-5, dtype), stats)
    z = fused.prepare(*norm, None)
    rows = slice(0, 256)
    leaf = x[rows].double().requires_grad_()
    true = F.layer_norm(leaf if activation == "none" else F.gelu(leaf), (K,), weight.double(), bias.double(), 1e-5)
    errors = {"z": relative(z[rows], true.detach())}
    if not backward:
        return lambda: fused.prepare(*norm, None), 2 * x.nbytes, errors
    (true_dx,) = torch.autograd.grad(true, leaf, dz[rows].double())
    # it writes dx over dz, so the previous result is the next call's input: the same number of bytes, different values
    dx = fused.prepare_backward(*norm, dz.clone(), True, None)[1]
    assert dx is not None
    errors["dx"] = relative(dx[rows], true_dx)
    return lambda: fused.prepare_backward(*norm, dz, True, None), 4 * x.nbytes, errors


KERNELS = (
    Kernel("merge of two", _merge_two),
    Kernel("merge of layers", functools.partial(_layers, False)),
    Kernel("sum of layers", functools.partial(_layers, True)),
    Kernel("layer norm", functools.partial(_norm, "none", False)),
    Kernel("layer norm, backward", functools.partial(_norm, "none", True)),
    Kernel("GELU and layer norm", functools.partial(_norm, "gelu", False)),
    Kernel("GELU and layer norm, backward", functools.partial(_norm, "gelu", True)),
)
