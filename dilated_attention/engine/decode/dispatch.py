"""Selects the kernel that decodes a row: this project's Triton kernel, FlashAttention-3 where rows read every key, or plain torch.

Shape letters as in ``keys.py``; in addition, L keys of a row.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dilated_attention.backends import AttentionRequest, BackendUnavailable, Capabilities, Hardware, detect, reasons_of
from dilated_attention.backends.base import ALL_FLOATS, HALVES, Result, accumulation_dtype
from dilated_attention.backends.flash import flash3

# models, which do not import backends, ask for it here
from dilated_attention.backends.hardware import has_kernels as has_kernels
from dilated_attention.backends.merge import add_sinks_
from dilated_attention.engine.decode.keys import Cached, Runs
from dilated_attention.engine.memory import explains_shortage


def torch_decode(q: Tensor, cached: Cached, runs: Runs, scale: float) -> tuple[Tensor, Tensor]:
    """Returns (out (B, H, D) in q's dtype, lse (B, H)) for q (B, H, D).

    It gathers each row's keys and computes one softmax, in plain torch on any device and in any dtype. A row without keys has out 0 and
    lse −inf.
    """
    B, H, D = q.shape
    K = cached.k.shape[2]
    positions, inside = runs.keys(q.is_cuda and torch.cuda.is_current_stream_capturing())
    wide = accumulation_dtype(q.dtype)
    first, slot = cached.places(positions)
    if cached.table is not None:
        # tables may hold anything where no row reads
        first, pages = first.masked_fill(~inside, 0), cached.k.shape[0]
        # the host would wait for a GPU
        if q.device.type == "cpu" and not torch.compiler.is_compiling() and bool(((first < 0) | (first >= pages)).any()):
            raise ValueError(
                f"page_table has other numbers than 0 to {pages - 1}, the pages of k, where a row reads; expected those that hold its keys"
            )
    G = runs.num_groups
    if G == 1:
        # gathered as (B, L, K, D), shared by all heads
        k, v = (x[first[:, 0], slot[:, 0]].to(wide).transpose(1, 2) for x in (cached.k, cached.v))
    else:
        of_group = torch.arange(G, device=q.device) // (G // K)
        k, v = (x[first, slot, of_group[None, :, None]].to(wide) for x in (cached.k, cached.v))
    # (B, K or H, heads that read these keys, D)
    heads = q.to(wide).view(B, k.shape[1], -1, D)
    scores = (heads @ k.transpose(-1, -2) * scale).masked_fill(~inside[:, :, None], -torch.inf)
    lse = scores.logsumexp(-1) if scores.shape[-1] else scores.new_full(scores.shape[:-1], -torch.inf)
    # not e^(score − lse): float32 holds an lse of 1e4 to only 5e-4. Without keys there is no softmax
    weights = scores.softmax(-1).masked_fill(lse[..., None] == -torch.inf, 0.0)
    # slots that no row reads may hold arbitrary values
    out = weights @ v.masked_fill(~inside[..., None], 0.0)
    return out.view(B, H, D).to(q.dtype), lse.view(B, H)


TRITON_FACTS = Capabilities(
    devices=frozenset({"cuda"}),
    dtypes=ALL_FLOATS - {torch.float64},
    package="triton",
    install="pip install triton",
    compute_capabilities=((7, 0), (99, 9)),
    backward=False,
    source="any runs of keys, read in place",
)
FLASH3_FACTS = replace(
    TRITON_FACTS,
    dtypes=HALVES,
    package="flash-attn-3",
    install=flash3.Flash3Backend.capabilities.install,
    compute_capabilities=((9, 0), (9, 0)),
    head_dim_multiple=8,
    source="splits a row's keys over programs and merges them; takes page tables",
)
TORCH_FACTS = Capabilities(
    devices=frozenset({"cpu", "cuda", "mps"}), dtypes=ALL_FLOATS, backward=False, rocm=True, source="gathers a copy of the keys"
)


@dataclass(frozen=True)
class Explained:
    """The choice of a decoder; ``str()`` prints the table."""

    what: str
    chosen: str | None
    rows: tuple[tuple[str, tuple[str, ...], str], ...]

    def __str__(self) -> str:
        lines = [f"decode {self.what}: {self.chosen or 'none can'}"]
        for name, reasons, source in self.rows:
            mark = "→" if name == self.chosen else ("✗" if reasons else "·")
            lines.append(f"  {mark} {name:<6}  {'; '.join(reasons) or source}")
        return "\n".join(lines)


def _flash3(q: Tensor, cached: Cached, runs: Runs, scale: float) -> Result:
    assert runs.dense is not None
    out, lse = flash3.call_fwd(q[:, None], cached.k, cached.v, scale, used_keys=runs.dense, page_table=cached.table, num_splits=0)
    return out[:, 0], lse[:, :, 0]


def _triton(q: Tensor, cached: Cached, runs: Runs, scale: float) -> Result:
    from dilated_attention.engine.decode.triton import decode

    return decode(q, cached, runs, scale)


# in order of preference, as measured on an H200 (docs/decoding.md). For dense rows, FlashAttention-3 takes 1.7 times as long with one key
# head per query head and 32 requests. It is faster, by a fifth at most, for a single request with grouped heads in pages.
_DECODERS: dict[str, tuple[Capabilities, Callable[[Tensor, Cached, Runs, float], Result]]] = {
    "triton": (TRITON_FACTS, _triton),
    "flash3": (FLASH3_FACTS, _flash3),
    "torch": (TORCH_FACTS, torch_decode),
}
DECODERS = tuple(_DECODERS)


def reasons_against(name: str, request: AttentionRequest, *, dense: bool) -> list[str]:
    """Returns every reason against decoder ``name``. ``dense``: rows read all of the first positions of the cache."""
    reasons = reasons_of(_DECODERS[name][0], request)
    if name == "flash3" and not dense:
        reasons.append("reads every key up to the row, but this pattern keeps only some")
    return reasons


@functools.lru_cache(maxsize=256)
def explain(request: AttentionRequest, dense: bool, name: str = "auto") -> Explained:
    rows = tuple((x, tuple(reasons_against(x, request, dense=dense)), _DECODERS[x][0].source) for x in DECODERS)
    chosen = next((x for x, reasons, _ in rows if not reasons and name in ("auto", x)), None)
    what = (
        f"{'dense' if dense else 'sparse'} rows, {str(request.dtype).removeprefix('torch.')}, head_dim {request.head_dim} on "
        f"{request.hardware.label}"
    )
    return Explained(what, chosen, rows)


def check_name(name: object) -> None:
    if not isinstance(name, str):
        raise TypeError(f"backend is {name!r} ({type(name).__name__}); expected 'auto', {', '.join(map(repr, DECODERS))}")
    if name != "auto" and name not in DECODERS:
        raise ValueError(f"backend is {name!r}; expected 'auto', {', '.join(map(repr, DECODERS))}")


def request_of(q: Tensor, num_kv_heads: int, hardware: Hardware | None = None) -> AttentionRequest:
    return AttentionRequest(
        hardware=hardware or detect(q.device), dtype=q.dtype, head_dim=q.shape[-1], num_heads=q.shape[-2], num_kv_heads=num_kv_heads
    )


@explains_shortage("forward of decode_attention")
def decode(q: Tensor, cached: Cached, runs: Runs, scale: float, backend: str = "auto", sinks: Tensor | None = None) -> Result:
    """Returns (out (B, H, D), lse (B, H)), with ``sinks`` (H,) in them, by the most preferred decoder that can, or by the named one.

    Raises:
        BackendUnavailable: the named decoder cannot compute it. The message has all reasons.
    """
    explained = explain(request_of(q, cached.k.shape[2]), runs.dense is not None, backend)
    if explained.chosen is None:
        raise BackendUnavailable(f"backend={backend!r} cannot decode this\n{explained}")
    out, lse = _DECODERS[explained.chosen][1](q, cached, runs, scale)
    if sinks is not None:
        out, lse = out.contiguous(), lse.contiguous()
        add_sinks_(out[:, None], lse[..., None], sinks)
    return out, lse
