"""The base class of kernels that compute block lists and nothing else."""

from __future__ import annotations

from torch import Tensor

from dilated_attention.backends.base import Backend, Options


class BlocksBackend(Backend):
    """A backend whose capabilities say ``blocks_only``, so that it is never selected for a dense problem."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor]:
        raise AssertionError(f"{self.name} computes lists of blocks only")

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, options: Options, dlse: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        raise AssertionError(f"{self.name} computes lists of blocks only")
