"""The base class of kernels that compute block lists and nothing else."""

from __future__ import annotations

import torch

from dilated_attention.backends.base import Backend, Options


class BlocksBackend(Backend):
    """A backend whose capabilities say ``blocks_only``, so that it is never selected for a dense problem."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options) -> tuple[torch.Tensor, torch.Tensor]:
        raise AssertionError(f"{self.name} computes lists of blocks only")

    def backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        options: Options,
        dlse: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        raise AssertionError(f"{self.name} computes lists of blocks only")
