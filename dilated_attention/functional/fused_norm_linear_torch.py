"""``norm_linear`` in plain torch, forward and backward, one chunk of rows at a time: for CPUs, for float64, and without Triton."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from dilated_attention.backends.base import accumulation_dtype

# the intermediate results of a chunk of this many rows fit in a CPU's cache
_CHUNK_ROWS = 1024
_PLAIN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"gelu": F.gelu, "relu": F.relu, "silu": F.silu}


class Recipe(NamedTuple):
    """What is applied to x before the linear layers; ``dtype`` is that of z, of the products and of y.

    ``weight`` and ``bias`` (K,) are the norm's, None for 1 and 0.
    """

    weight: torch.Tensor | None
    bias: torch.Tensor | None
    activation: str
    norm: str
    eps: float
    dtype: torch.dtype

    def widened(self, dtype: torch.dtype) -> Recipe:
        """Returns the recipe with the norm's parameters in the dtype of accumulation."""
        weight, bias = (None if p is None else p.to(dtype) for p in (self.weight, self.bias))
        return self._replace(weight=weight, bias=bias)


def forward(
    x: torch.Tensor,
    gate: torch.Tensor | None,
    weights: list[torch.Tensor],
    biases: list[torch.Tensor],
    recipe: Recipe,
    stats: torch.Tensor,
    normal: torch.Tensor | None,
) -> list[torch.Tensor]:
    """Returns [y_i] of rows x (M, K). Writes mean and 1/std to ``stats`` (2, M), and (x − mean) / std to ``normal`` if given."""
    ys = [x.new_empty((x.shape[0], w.shape[0]), dtype=recipe.dtype) for w in weights]
    recipe = recipe.widened(accumulation_dtype(x.dtype))
    for part in _chunks(x):
        a, z = _prepare(x[part], None if gate is None else gate[part], recipe, stats[:, part])
        if normal is not None:
            normal[part].copy_((a - stats[0][part, None]).mul_(stats[1][part, None]))
        z = z.to(recipe.dtype)
        for i, (y, w) in enumerate(zip(ys, weights, strict=True)):
            if biases:
                torch.addmm(biases[i], z, w.t(), out=y[part])
            else:
                torch.mm(z, w.t(), out=y[part])
    return ys


def backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    gate: torch.Tensor | None,
    joined: torch.Tensor,
    stats: torch.Tensor,
    recipe: Recipe,
    needs: list[bool],
    wide: torch.dtype | None,
) -> tuple[torch.Tensor | None, torch.Tensor | None, list[torch.Tensor | None], torch.Tensor | None]:
    """Returns (dx, dgate, [dnorm_weight, dnorm_bias], dweight of all layers).

    Computes one chunk of rows at a time and sums in the accumulation dtype.
    """
    needs_input, needs_norm, needs_weights, _ = needs
    acc = stats.dtype
    recipe = recipe.widened(acc)
    dx = torch.empty_like(x, dtype=wide or x.dtype) if needs_input else None
    dgate = torch.empty_like(gate) if needs_input and gate is not None else None
    dnorm = [torch.zeros_like(p) if needs_norm and p is not None else None for p in (recipe.weight, recipe.bias)]
    dweight = torch.zeros_like(joined, dtype=acc) if needs_weights else None
    # if x is x̂, the norm is the identity, and the true 1/std is applied at the end
    own = stats if wide is None else torch.stack((torch.zeros_like(stats[0]), torch.ones_like(stats[1])))
    for part in _chunks(x):
        a = _activated(x[part], None if gate is None else gate[part], recipe.activation, acc)
        if dweight is not None:
            z = _normed(a, recipe, stats[:, part]) if wide is None else _affine(a, recipe)
            if recipe.dtype is acc:
                dweight.addmm_(dy[part].t(), z)
            else:
                dweight += dy[part].t() @ z.to(recipe.dtype)
        if not (needs_input or needs_norm):
            continue
        da = (dy[part] @ joined).to(acc)
        if recipe.norm != "none":
            da = _norm_backward(da, a, recipe, own[:, part], dnorm)
            if wide is not None:
                da *= stats[1][part, None]
        if dx is not None:
            _activation_backward(da, x[part], gate, part, recipe.activation, dx, dgate)
    return dx, dgate, dnorm, dweight


def layers(
    x: torch.Tensor,
    gate: torch.Tensor | None,
    weights: list[torch.Tensor],
    biases: list[torch.Tensor],
    recipe: Recipe,
) -> list[torch.Tensor]:
    """Returns [y_i] of x (…, K) by torch's own layers, one by one: all torch.func transforms and forward-mode AD can go through them."""
    acc = accumulation_dtype(x.dtype)
    recipe = recipe.widened(acc)
    # not in place, since vmap may map only one of the two
    z = _activated(x, None, recipe.activation, acc) if gate is None else F.silu(gate.to(acc)) * x.to(acc)
    if recipe.norm == "layer":
        z = F.layer_norm(z, z.shape[-1:], recipe.weight, recipe.bias, recipe.eps)
    elif recipe.norm == "rms":
        z = _affine(z * (z.square().mean(-1, keepdim=True) + recipe.eps).rsqrt(), recipe)
    z = z.to(recipe.dtype)
    return [F.linear(z, w.to(recipe.dtype), biases[i].to(recipe.dtype) if biases else None) for i, w in enumerate(weights)]


def _chunks(rows: torch.Tensor) -> list[slice]:
    return [slice(i, i + _CHUNK_ROWS) for i in range(0, rows.shape[0], _CHUNK_ROWS)]


def _prepare(x: torch.Tensor, gate: torch.Tensor | None, recipe: Recipe, stats: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (a, z) of some rows in the accumulation dtype, and writes their statistics to ``stats``."""
    a = _activated(x, gate, recipe.activation, accumulation_dtype(x.dtype))
    if recipe.norm == "none":
        return a, a
    if recipe.norm == "layer":
        z, mean, rstd = torch.native_layer_norm(a, a.shape[1:], recipe.weight, recipe.bias, recipe.eps)
        stats[0].copy_(mean.view(-1))
        stats[1].copy_(rstd.view(-1))
        return a, z
    stats[0].zero_()
    stats[1].copy_((a.square().mean(-1) + recipe.eps).rsqrt_())
    return a, _affine(a * stats[1][:, None], recipe)


def _activated(x: torch.Tensor, gate: torch.Tensor | None, activation: str, dtype: torch.dtype) -> torch.Tensor:
    x = x.to(dtype)
    if gate is not None:
        return F.silu(gate.to(dtype)).mul_(x)
    return x if activation == "none" else _PLAIN[activation](x)


def _normed(a: torch.Tensor, recipe: Recipe, stats: torch.Tensor) -> torch.Tensor:
    """Recomputes norm(a) with the ``stats`` of the forward."""
    if recipe.norm == "layer":
        # torch's single pass, which recomputes the statistics, is faster than three passes that reuse them
        return torch.native_layer_norm(a, a.shape[1:], recipe.weight, recipe.bias, recipe.eps)[0]
    return a if recipe.norm == "none" else _affine(a * stats[1][:, None], recipe)


def _affine(normal: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    z = normal if recipe.weight is None else normal * recipe.weight
    return z if recipe.bias is None else z + recipe.bias


def _norm_backward(
    dz: torch.Tensor, a: torch.Tensor, recipe: Recipe, stats: torch.Tensor, dnorm: list[torch.Tensor | None]
) -> torch.Tensor:
    """Returns da, and adds the contributions to the gradients of the norm's parameters to ``dnorm``."""
    weight, mean, rstd = recipe.weight, stats[0][:, None], stats[1][:, None]
    if recipe.norm == "layer":
        wanted = [True, *(share is not None for share in dnorm)]
        da, *shares = torch.ops.aten.native_layer_norm_backward(dz, a, a.shape[1:], mean, rstd, weight, recipe.bias, wanted)
        for total, share in zip(dnorm, shares, strict=True):
            if total is not None:
                total += share
        return da
    normal = a * rstd
    along = dz * normal
    if dnorm[0] is not None:
        dnorm[0] += along.sum(0)
    if dnorm[1] is not None:
        dnorm[1] += dz.sum(0)
    if weight is None:
        return dz.addcmul_(normal, along.mean(-1, keepdim=True), value=-1).mul_(rstd)
    # subtracts the component that only changes the length of a: normal · mean(dz · weight · normal)
    return torch.addcmul(dz * weight, normal, (along @ weight)[:, None], value=-1 / a.shape[1]).mul_(rstd)


def _activation_backward(
    da: torch.Tensor,
    x: torch.Tensor,
    gates: torch.Tensor | None,
    part: slice,
    activation: str,
    dx: torch.Tensor,
    dgate: torch.Tensor | None,
) -> None:
    """Writes dx (and dgate) of the chunk ``part``."""
    x = x.to(da.dtype)
    if gates is not None and dgate is not None:
        gate = gates[part].to(da.dtype)
        dgate[part].copy_(torch.ops.aten.silu_backward(da * x, gate))
        da.mul_(F.silu(gate))
    elif activation == "gelu":
        da = torch.ops.aten.gelu_backward(da, x)
    elif activation == "silu":
        da = torch.ops.aten.silu_backward(da, x)
    elif activation == "relu":
        da.mul_(x > 0)
    dx[part].copy_(da)
