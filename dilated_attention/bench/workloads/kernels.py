"""Kernels of this library that only move memory: merges of partial results, norms and activations.

Measures what each must move, and checks whether its result is correct.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from dilated_attention.backends.merge import merge_weights
from dilated_attention.bench.accuracy.correctness import BOUNDS
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
    what: str
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
    errors = {"out": _relative(out[:, rows], true), "lse": _relative(lse[:, rows], true_lse)}
    moved = 3 * out.numel() * out.element_size() + 3 * lse.numel() * lse.element_size()
    return lambda: merge_onto(out, lse, part, part_lse), moved, errors


def _layers(num_positions: int, heads: int) -> BranchBuffers:
    return make_branch_buffers(DilatedPattern(*geometric(num_positions)), heads, (0, heads), num_positions, False)


def _buffers(layers: BranchBuffers, D: int, device: torch.device, dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    """Returns out, lse, and the flat buffers of parts and of their lses, B = 1."""
    generator = torch.Generator(device).manual_seed(seed)
    N, H = layers.positions, layers.heads
    part_rows, lse_rows = H * layers.rows(with_direct=False), H * layers.rows(with_direct=True)

    def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, device=device, generator=generator, dtype=dtype)

    out, parts = draw(1, N, H, D, dtype=dtype), draw(part_rows * D, dtype=dtype)
    return [out, torch.empty(1, N, H, device=device), parts, draw(lse_rows)]


def _merge_layers(device: torch.device, dtype: torch.dtype, full: bool) -> Prepared:
    """Merges all branches of a dilated attention in one kernel."""
    _need_triton(device, dtype)
    from dilated_attention.engine.branches import merge_triton

    small = _layers(4096, 4)
    out, lse, parts, part_lses = _buffers(small, 64, device, dtype, 1)
    true_out, true_lse = out.double(), lse.double()
    shaped = [None if x is None else x.double() for x in small.split(parts, 1, head_dim=64, with_direct=False)]
    lses = [x.double() for x in small.split(part_lses, 1, head_dim=0, with_direct=True) if x is not None]
    layered.merge_buffers(small, true_out, true_lse, shaped, lses)
    merge_triton.merge_buffers(small, out, lse, parts, part_lses)
    errors = {"out": _relative(out, true_out), "lse": _relative(lse, true_lse)}
    layers, D = _layers(2**18 if full else 2**14, 16), 128
    out, lse, parts, part_lses = _buffers(layers, D, device, dtype, 2)
    # rows that only the direct branch computes are already in place
    rows = layers.positions // layers.step * layers.heads
    moved = parts.nbytes + part_lses.nbytes + lse.nbytes + 2 * rows * D * dtype.itemsize
    return lambda: merge_triton.merge_buffers(layers, out, lse, parts, part_lses), moved, errors


def _sum_layers(device: torch.device, dtype: torch.dtype, full: bool) -> Prepared:
    """Sums dq, dk and dv of all branches in one kernel."""
    _need_triton(device, dtype)
    from dilated_attention.engine.branches import merge_triton

    small = _layers(4096, 4)
    made = [_buffers(small, 64, device, dtype, seed) for seed in range(3)]
    grads, parts = [x[0] for x in made], [x[2] for x in made]
    true = [grad.double() for grad in grads]
    for grad, part in zip(true, parts, strict=True):
        shaped = [None if x is None else x.double() for x in small.split(part, 1, head_dim=64, with_direct=False)]
        layered.sum_buffers(small, grad, shaped)
    merge_triton.sum_buffers(small, grads, parts)
    errors = {name: _relative(a, b) for name, a, b in zip(("dq", "dk", "dv"), grads, true, strict=True)}
    layers, D = _layers(2**17 if full else 2**14, 16), 128
    made = [_buffers(layers, D, device, dtype, seed) for seed in range(3)]
    grads, parts = [x[0] for x in made], [x[2] for x in made]
    rows = layers.positions // layers.step * layers.heads
    moved = 3 * (parts[0].nbytes + 2 * rows * D * dtype.itemsize)
    return lambda: merge_triton.sum_buffers(layers, grads, parts), moved, errors


def _norm(activation: str, backward: bool, device: torch.device, dtype: torch.dtype, full: bool) -> Prepared:
    """The norm before a linear layer, on rows of 2048; with an activation, on rows of 8192."""
    _need_triton(device, dtype)
    from dilated_attention.functional import fused_norm_linear_triton

    K = 8192 if activation != "none" else 2048
    M = _NORM_ELEMENTS[full] // K
    generator = torch.Generator(device).manual_seed(3)
    x, dz = (torch.randn(M, K, device=device, dtype=dtype, generator=generator) for _ in range(2))
    weight, bias = (torch.randn(K, device=device, generator=generator) for _ in range(2))
    recipe = Recipe(activation, "layer", 1e-5, dtype)
    stats = torch.empty(2, M, device=device)
    z = fused_norm_linear_triton.prepare(x, None, weight, bias, recipe, stats, None)
    rows = slice(0, 256)
    leaf = x[rows].double().requires_grad_()
    a = leaf if activation == "none" else F.gelu(leaf)
    true = F.layer_norm(a, (K,), weight.double(), bias.double(), 1e-5)
    errors = {"z": _relative(z[rows], true.detach())}
    if not backward:
        return lambda: fused_norm_linear_triton.prepare(x, None, weight, bias, recipe, stats, None), 2 * x.nbytes, errors
    (true_dx,) = torch.autograd.grad(true, leaf, dz[rows].double())
    # it writes dx over dz, so the previous result is the next call's input: the same number of bytes, different values
    dx = fused_norm_linear_triton.prepare_backward(x, None, weight, bias, recipe, stats, dz.clone(), True, None)[1]
    assert dx is not None
    errors["dx"] = _relative(dx[rows], true_dx)
    return lambda: fused_norm_linear_triton.prepare_backward(x, None, weight, bias, recipe, stats, dz, True, None), 4 * x.nbytes, errors


def _relative(found: torch.Tensor, true: torch.Tensor) -> float:
    return float((found.double() - true).norm() / true.norm())


KERNELS = (
    Kernel("merge of two", "a part into (out, lse), as each step of a ring does", _merge_two),
    Kernel("merge of layers", "all branches' out and lse into one", _merge_layers),
    Kernel("sum of layers", "all branches' dq, dk, dv into one", _sum_layers),
    Kernel("layer norm", "in front of a linear layer", lambda *where: _norm("none", False, *where)),
    Kernel("layer norm, backward", "z again, dx, and sums of the norm's gradients", lambda *where: _norm("none", True, *where)),
    Kernel("GELU and layer norm", "in front of a linear layer", lambda *where: _norm("gelu", False, *where)),
    Kernel("GELU and layer norm, backward", "z again, dx, and sums of the norm's gradients", lambda *where: _norm("gelu", True, *where)),
)
