"""Muon for many matrices of few shapes, whole or sharded: all matrices of a shape are orthogonalised in one batched product."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

# of the quintic X ← aX + (bA + cA²)X, A = XXᵀ, whose five rounds bring singular values near 1 (Jordan et al., 2024)
_A, _B, _C = 3.4445, -4.7750, 2.0315


class Muon(torch.optim.Optimizer):
    """p ← (1 − lr·wd)·p − lr·0.2·sqrt(max(rows, columns))·UVᵀ, for the momentum's USVᵀ; as
    torch.optim.Muon(adjust_lr_fn="match_rms_adamw").

    Differs from it in this: matrices of one shape go together, a few launches instead of a few for each; a matrix that FSDP2 has sharded
    is gathered once and orthogonalised whole on every process, instead of through a sharded product at each round; and on a CPU the
    products are float32, since few CPUs have bfloat16 ones.

    Args:
        matrices: parameters of two dimensions.
        lr, weight_decay, momentum: as of torch.optim.Muon; Nesterov's form.
    """

    def __init__(self, matrices: Iterable[torch.nn.Parameter], *, lr: float, weight_decay: float = 0.1, momentum: float = 0.95) -> None:
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            same_shape = defaultdict(list)
            for p in group["params"]:
                if p.grad is not None:
                    same_shape[p.shape].append(p)
            for shape, matrices in same_shape.items():
                updates = orthogonal(torch.stack([self._momentum(p, group["momentum"]) for p in matrices]))
                rate = group["lr"] * 0.2 * math.sqrt(max(shape))
                for p, update in zip(matrices, updates, strict=True):
                    p.mul_(1 - group["lr"] * group["weight_decay"]).add_(_like(p, update.to(p.dtype)), alpha=-rate)

    def _momentum(self, p: torch.nn.Parameter, momentum: float) -> torch.Tensor:
        """The whole matrix to orthogonalise."""
        assert p.grad is not None
        buffer = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p.grad))
        buffer.lerp_(p.grad, 1 - momentum)
        update = p.grad.lerp(buffer, momentum)
        return update.full_tensor() if isinstance(update, DTensor) else update


def optimizers_of(model: torch.nn.Module, lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the blocks, AdamW for embedding, output and all vectors; the same rate serves both."""
    inner = [p for name, p in model.named_parameters() if p.ndim == 2 and ".blocks." in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or ".blocks." not in name]
    return [Muon(inner, lr=lr), torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.98), weight_decay=0.0)]


def orthogonal(matrices: torch.Tensor) -> torch.Tensor:
    """(count, rows, columns) → about UVᵀ of each."""
    x = matrices.bfloat16() if matrices.is_cuda else matrices.float()
    is_tall = x.shape[1] > x.shape[2]
    x = x.mT if is_tall else x
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=_B, alpha=_C), x, beta=_A)
    return x.mT if is_tall else x


def _like(p: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """``whole`` as p lies: every process has all of it and keeps its own rows."""
    if not isinstance(p, DTensor):
        return whole
    return distribute_tensor(whole, p.device_mesh, p.placements, src_data_rank=None)
