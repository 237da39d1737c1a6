"""xformers: listed so that users who look for it find it, and always refused with the reason."""

from __future__ import annotations

import torch

from dilated_attention.backends.base import HALVES, AttentionRequest, Backend, Capabilities, Options

_REASON = "adds nothing to torch (0.0.35: its flash and cutlass ops are torch's own, its partial attention has no backward)"


class XformersBackend(Backend):
    """A backend that calls no kernels; ``reasons_against`` always gives the reason."""

    name = "xformers"
    capabilities = Capabilities(
        devices=frozenset({"cuda"}),
        dtypes=HALVES | {torch.float32},
        source="sources of xformers 0.0.34 and 0.0.35",
    )

    def more_reasons(self, request: AttentionRequest) -> list[str]:
        return [_REASON]

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options) -> tuple[torch.Tensor, torch.Tensor]:
        raise AssertionError("selection never takes a backend with a reason against it")

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
        raise AssertionError("selection never takes a backend with a reason against it")
