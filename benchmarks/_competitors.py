"""What versus.py compares with: TorchScale's dilated attention, from the user's own copy, and torch's FlexAttention."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from dilated_attention import DilatedPattern
from dilated_attention.backends import Options, registry
from dilated_attention.engine.reference_rows import partners

MODULE = "torchscale/component/dilated_attention.py"
HOW_TO_GET_IT = (
    "other projects' sources are not in this repository: git clone https://github.com/microsoft/torchscale and give that "
    "folder as --torchscale"
)


class _Kernel(torch.autograd.Function):
    """A backend's raw forward and backward as flash-attn's autograd function: saves q, k, v, out and lse; lse has no gradient."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, name: str, options: Options
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = registry.get(name).forward(q, k, v, options)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.mark_non_differentiable(lse)
        ctx.settings = name, options
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        name, options = ctx.settings
        dout = grads[0] if grads[0].stride(-1) == 1 else grads[0].contiguous()
        return *registry.get(name).backward(dout, q, k, v, out, lse, options), None, None


def flash_attn_func(
    kernel: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout: float = 0.0,
    bias: None = None,
    softmax_scale: float | None = None,
    is_causal: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of q, k, v (B, N, H, D), with the arguments that TorchScale gives its ``flash_attn_func``."""
    assert bias is None and dropout == 0.0
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    return _Kernel.apply(q, k, v, kernel, Options(scale=scale, causal=is_causal))


def find_torchscale(path: str | None) -> Path:
    """The folder that holds the package ``torchscale``; a ValueError that says how to get one otherwise."""
    if path is None:
        raise ValueError(f"comparing with TorchScale needs --torchscale PATH; {HOW_TO_GET_IT}, or leave torchscale out of --against")
    folder = Path(path).expanduser().resolve()
    if not (folder / MODULE).is_file():
        raise ValueError(f"--torchscale {path}: there is no {MODULE} in it; {HOW_TO_GET_IT}")
    return folder


class TorchScale:
    """The attention part of TorchScale's DilatedAttention on q, k, v (B, N, H, D): gathering, kernel, scattering, no projections.

    Args:
        folder: of the user's copy; its code runs unedited.
        kernel: backend that stands in for ``flash_attn_func`` of the package flash-attn. ``sdpa_flash`` is FlashAttention-2, the
            kernel that package runs, as torch bundles it.
    """

    def __init__(self, folder: Path, kernel: str) -> None:
        sys.path.insert(0, str(folder))
        try:
            # TorchScale leaves flash_attn_func None where flash-attn is missing, and looks it up here at each call
            importlib.import_module("torchscale.component.multihead_attention").flash_attn_func = functools.partial(flash_attn_func, kernel)
            self._module = importlib.import_module("torchscale.component.dilated_attention").DilatedAttention
        finally:
            sys.path.remove(str(folder))

    def attention(self, H: int, D: int, pattern: DilatedPattern, is_causal: bool) -> Callable[..., torch.Tensor]:
        """A function of q, k, v that returns out (B, N, H, D)."""
        args = SimpleNamespace(
            flash_attention=True,
            xpos_rel_pos=False,
            multiway=False,
            layernorm_eps=1e-5,
            seq_parallel=False,
            segment_length=list(pattern.segment_lengths),
            dilated_ratio=list(pattern.dilation_rates),
        )
        # its projections are built but never used
        with torch.device("meta"):
            module = self._module(args, H * D, H, self_attention=True)

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            outs, lses = [], []
            for length, rate in pattern.branches:
                ki, vi = (module.gathering(x, rate, length, is_causal=is_causal, is_kv=True, seq_parall=False) for x in (k, v))
                qi = module.gathering(q, rate, length, is_causal=is_causal, is_kv=False, seq_parall=False)
                out, lse = module.attention_ops(qi, ki, vi, is_causal=is_causal)
                outs.append(out)
                lses.append(lse)
            return module.scattering(outs, lses, q.shape[1], q.shape[0]).view(q.shape)

        return attend


def shifted_from(pattern: DilatedPattern, num_positions: int) -> int | None:
    """First position that TorchScale shifts, or None.

    It pads each segment to a multiple of r and lays segments side by side with the padding still in: where r does not divide w,
    all segments after the first land too far right and mix with other positions' rows.
    """
    lengths = [min(w, num_positions) for w in pattern.segment_lengths]
    return min((w for w, r in zip(lengths, pattern.dilation_rates, strict=True) if w % r and w < num_positions), default=None)


def detached_rows(
    pattern: DilatedPattern, tensors: tuple[torch.Tensor, ...], rows: list[tuple[int, int]], *, is_causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, dq), each (rows, D) in float64, of (position, head) ``rows``, with the zero keys of the pattern's tail and a mixture
    without gradient. ``tensors``: dout, q, k, v (1, N, H, D)."""
    dout, q, k, v = tensors
    N, H, D = q.shape[1:]
    branches = [DilatedPattern((w,), (r,), pattern.head_offsets, tail=pattern.tail) for w, r in pattern.branches]
    outs, grads = [], []
    for position, head in rows:
        q_i, dout_i = (x[0, position, head].double() for x in (q, dout))
        found = []
        for branch in branches:
            keys = partners(branch, position, head, H, N)
            if not len(keys):
                continue
            zero = 0 if is_causal else branch.zero_keys(0, N, len(keys))
            keys = (keys[keys <= position] if is_causal else keys).to(q.device)
            k_j, v_j = (x[0, keys, head].double() for x in (k, v))
            scores = k_j @ q_i * D**-0.5
            lse = torch.logaddexp(scores.logsumexp(0), torch.tensor(float(zero), dtype=torch.float64, device=q.device).log())
            p = (scores - lse).exp()
            out = p @ v_j
            found.append((lse, out, (p * (v_j @ dout_i - out @ dout_i)) @ k_j * D**-0.5))
        if not found:
            outs.append(torch.zeros_like(q_i))
            grads.append(torch.zeros_like(q_i))
            continue
        lses, branch_outs, branch_grads = (torch.stack(x) for x in zip(*found, strict=True))
        weights = lses.softmax(0)[:, None]
        outs.append((weights * branch_outs).sum(0))
        grads.append((weights * branch_grads).sum(0))
    return torch.stack(outs), torch.stack(grads)


def multiplicity(pattern: DilatedPattern, num_heads: int, is_causal: bool, device: str) -> Callable[..., torch.Tensor]:
    """m_h(i, j) as a function of index tensors, as FlexAttention's modifications are given them."""
    offsets = torch.tensor(pattern.offsets(num_heads), dtype=torch.int32, device=device)

    def count(h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        total: Any = 0
        for branch, (w, r) in enumerate(pattern.branches):
            o = offsets[branch, h]
            total = total + ((i // w == j // w) & (i % w % r == o) & (j % w % r == o)).int()
        return total * (i >= j).int() if is_causal else total

    return count


def flex_dense(num_positions: int, is_causal: bool) -> Callable[..., torch.Tensor]:
    """FlexAttention compiled for this length: no mask, or causal blocks."""
    mask = _block_mask(lambda b, h, i, j: i >= j, None, num_positions) if is_causal else None
    return functools.partial(_flex, None, mask)


def flex_dilated(pattern: DilatedPattern, num_heads: int, num_positions: int, is_causal: bool) -> Callable[..., torch.Tensor]:
    """The same multiset by FlexAttention: a BlockMask of the union of all branches, log m added to the scores.

    A union only says which pairs take part: without log m it would be another function than LongNet's mixture.
    """
    count = multiplicity(pattern, num_heads, is_causal, "cuda")
    mask = _block_mask(lambda b, h, i, j: count(h, i, j) > 0, num_heads, num_positions)
    # log of 0 never counts: the mask leaves such pairs out
    return functools.partial(_flex, lambda score, b, h, i, j: score + count(h, i, j).clamp(min=1).float().log(), mask)


def _block_mask(mask_mod: Callable[..., torch.Tensor], num_heads: int | None, num_positions: int) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    # compiled, so that no (H, N, N) mask is written out
    return torch.compile(create_block_mask)(mask_mod, None, num_heads, num_positions, num_positions, device="cuda")


def _flex(score_mod: Any, mask: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    out = _compiled_flex()(*(x.transpose(1, 2) for x in (q, k, v)), score_mod=score_mod, block_mask=mask)
    return out.transpose(1, 2)


@functools.cache
def _compiled_flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    torch._dynamo.config.recompile_limit = 64
    # shapes as constants: its fastest form
    return torch.compile(flex_attention, fullgraph=True, dynamic=False)
