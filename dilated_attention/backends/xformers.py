"""xformers: listed so that nobody looks for it in vain, and refused with the reason."""

from __future__ import annotations

import torch

from dilated_attention.backends.base import HALVES, Backend, Facts, Options, Request

_REASON = (
    "xformers 0.0.35 has no kernel that torch does not have: its flash op calls torch's own, its cutlass op is sdpa_efficient, "
    "FlashAttention-3 is no longer bundled, and its partial attention has no backward; use sdpa_flash, sdpa_efficient or flash3"
)


class XformersBackend(Backend):
    """No kernels of its own are called; ``why_not`` always says why."""

    name = "xformers"
    facts = Facts(
        devices=frozenset({"cuda"}),
        dtypes=HALVES | {torch.float32},
        package="xformers",
        install='pip install "dilated-attention[xformers]"',
        source="sources of xformers 0.0.34 and 0.0.35",
    )

    def more_reasons(self, request: Request) -> list[str]:
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
