"""The interface to kernel libraries: a call (AttentionRequest), a library (Capabilities), and its two raw functions (Backend).

A backend declares its capabilities. Its method ``reasons_against(request)`` returns *every* reason why it cannot compute the request, or an
empty list if it can.

Shape letters: P problems (batch × segments), L rows, S keys, G query heads, K key/value heads, D head dim.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from dilated_attention.backends.dropout import Dropout
from dilated_attention.backends.hardware import Hardware
from dilated_attention.pattern.blocks.block_lists import BlockLists

ALL_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
HALVES = frozenset({torch.float16, torch.bfloat16})
# what ``precision=`` accepts
PRECISIONS = ("native", "fp8")


@dataclass(frozen=True, kw_only=True)
class AttentionRequest:
    """The properties of a call that the choice of a backend depends on. No field depends on the tensors' values."""

    hardware: Hardware
    dtype: torch.dtype
    head_dim: int
    num_heads: int = 1
    num_kv_heads: int = 1
    causal: bool = False
    # the backward pass; forward and backward are chosen separately, since any backward accepts any forward's (out, lse)
    needs_grad: bool = False
    key_mask: bool = False
    window: bool = False
    dropout: bool = False
    softcap: bool = False
    deterministic: bool = False
    lse_grad: bool = False
    # torch.use_deterministic_algorithms(True) is on; some torch ops have no determinism argument of their own
    torch_deterministic: bool = False
    # the largest span in elements, from first to last, of a single segment in any tensor
    extent: int = 0
    # rows of a typical problem, used to look up rates; 0 if unknown
    length: int = 0
    # "native": products in the inputs' dtype · "fp8": in 8-bit floats
    precision: str = "native"
    # (query block, key block) sizes of block lists; None for dense problems
    blocks: tuple[int, int] | None = None
    # form of the masks of single pairs inside blocks: "none" · "interval" · "bits"
    block_masks: str = "none"

    @property
    def kind(self) -> str:
        """The kind of request, which determines the order of backends that applies."""
        return "dense" if self.blocks is None else "blocks"

    def describe(self) -> str:
        parts = [f"{str(self.dtype).removeprefix('torch.')}", f"head_dim {self.head_dim}"]
        parts.append(f"{self.num_heads} heads" if self.num_heads == self.num_kv_heads else f"{self.num_heads}/{self.num_kv_heads} heads")
        parts.append("causal" if self.causal else "full")
        parts.append("backward" if self.needs_grad else "forward")
        if self.precision != "native":
            parts.append(self.precision)
        if self.blocks is not None:
            masks = "" if self.block_masks == "none" else f" with {self.block_masks} masks"
            parts.append(f"blocks of {self.blocks[0]}x{self.blocks[1]}{masks}")
        for flag in ("key_mask", "window", "dropout", "softcap", "deterministic", "lse_grad"):
            if getattr(self, flag):
                parts.append(flag)
        return f"{', '.join(parts)} on {self.hardware.label}"


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What a kernel library declares about itself. A limit of None means no limit."""

    devices: frozenset[str]
    dtypes: frozenset[torch.dtype]
    precisions: frozenset[str] = frozenset({"native"})
    package: str | None = None
    install: str = ""
    compute_capabilities: tuple[tuple[int, int], tuple[int, int]] | None = None
    min_torch: tuple[int, int] = (2, 11)
    max_head_dim: int = 256
    head_dim_multiple: int = 1
    head_dims: frozenset[int] | None = None
    key_mask: bool = False
    window: bool = False
    # computes windows of any width in one launch; otherwise the engine splits the queries into blocks and the backend masks each
    native_window: bool = False
    dropout: bool = False
    softcap: bool = False
    deterministic: bool = True
    backward: bool = True
    lse_grad: bool = False
    # limits that the engine respects by splitting launches
    max_batch: int | None = None
    max_extent: int | None = None
    # writes its results into given views; other backends return them and the results are copied
    writes_views: bool = False
    # a causal launch may have more keys than queries: the last query sees the last key
    aligned_last: bool = False
    # takes boundaries of sequences in place of a batch: forward_packed and backward_packed
    documents: bool = False
    # computes a call of many problems at once, whatever it consists of
    whole_calls: bool = False
    # which block lists it computes, and whether it computes nothing else
    block_sizes: frozenset[tuple[int, int]] = frozenset()
    block_masks: frozenset[str] = frozenset({"none"})
    blocks_only: bool = False
    # its launches may run concurrently on several streams
    concurrent: bool = True
    # where these capabilities were read or measured
    source: str = ""
    rocm: bool = False


@dataclass(frozen=True)
class Mask:
    """Which keys of a problem are attended to, apart from causality.

    Args:
        padding: bool, broadcastable to (P, S), True = the key is masked out.
        band: (lowest, highest) allowed value of (key index − query index), each None where unbounded.
    """

    padding: Tensor | None = None
    band: tuple[int | None, int | None] | None = None

    @property
    def is_trivial(self) -> bool:
        return self.padding is None and self.band is None


@dataclass(frozen=True)
class Options:
    """What both passes of one launch need in addition to the tensors.

    ``causal``: the last query sees the last key, and each earlier query one key less. There are as many queries as keys unless
    ``capabilities.aligned_last``.
    """

    scale: float
    causal: bool = False
    mask: Mask = field(default_factory=Mask)
    dropout: Dropout | None = None
    deterministic: bool = False
    # scores are softcap · tanh(s / softcap); 0 for s
    softcap: float = 0.0
    # equal for launches whose tensors have equal shapes, strides and alignment; None if unknown
    geometry: Hashable = None


class Bounds(NamedTuple):
    """Boundaries of S sequences, one after the other: int32 (S + 1,) among the queries and among the keys.

    Args:
        most_queries, most_keys: the most rows of a sequence.
        used_queries, used_keys: int32 (S,): the rows of each sequence, from its first boundary on; None if it ends where the next begins.
    """

    queries: Tensor
    keys: Tensor
    most_queries: int
    most_keys: int
    used_queries: Tensor | None = None
    used_keys: Tensor | None = None


class Backend(ABC):
    """A kernel library, wrapped in two raw functions.

    ``forward`` returns (out, lse): out (P, L, G, D) in q's dtype, lse (P, G, L) float32 (float64 for float64), natural
    logarithm. A row without keys has lse −inf and out 0, whatever the library itself returns for it.

    ``backward`` takes the out and lse *of the whole softmax*, of which this problem may be a part, and returns this part's
    contributions to dq, dk, dv. An lse of +inf marks a row that takes no part: its contributions are 0.
    """

    name: str
    capabilities: Capabilities

    def reasons_against(self, request: AttentionRequest) -> list[str]:
        """Returns every reason why this backend cannot compute this request; an empty list if it can."""
        return reasons_of(self.capabilities, request) + self.more_reasons(request)

    def more_reasons(self, request: AttentionRequest) -> list[str]:
        """Returns the reasons from rules that ``Capabilities`` cannot express; a backend with such rules overrides this."""
        return []

    @abstractmethod
    def forward(self, q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor]:
        """Computes (out, lse) of q (P, L, G, D), k and v (P, S, K, D), S ≥ 1, L ≥ 1, with any strides whose last one is 1."""

    @abstractmethod
    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, options: Options, dlse: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the contributions (dq, dk, dv), dense, in q's dtype or float32. ``dlse`` (P, G, L) only if ``capabilities.lse_grad``."""

    def forward_into(self, q: Tensor, k: Tensor, v: Tensor, options: Options, out: Tensor, lse: Tensor) -> None:
        """``forward`` that writes its results into out (P, L, G, D) and lse (P, G, L), views of any strides (out's last one 1)."""
        part_out, part_lse = self.forward(q, k, v, options)
        out.copy_(part_out)
        lse.copy_(part_lse)

    def backward_into(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, options: Options,
        grads: tuple[Tensor, Tensor, Tensor], dlse: Tensor | None = None,
    ) -> None:  # fmt: skip
        """``backward`` that writes its contributions into ``grads``, views (dq, dk, dv) of any strides (the last one 1)."""
        for grad, share in zip(grads, self.backward(dout, q, k, v, out, lse, options, dlse), strict=True):
            grad.copy_(share)

    def forward_packed(self, q: Tensor, k: Tensor, v: Tensor, bounds: Bounds, options: Options, out: Tensor) -> Tensor:
        """``forward`` of sequences: q (1, L, G, D), k and v (1, S, K, D). Writes out (1, L, G, D), a view, and returns lse (1, G, L).

        Causality is that of each sequence: its last query sees its last key. Only if ``capabilities.documents``.
        """
        raise AssertionError(f"{self.name} takes no boundaries of sequences")

    def backward_packed(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bounds: Bounds, options: Options,
        grads: tuple[Tensor, Tensor, Tensor],
    ) -> None:  # fmt: skip
        """Writes the gradients of ``forward_packed`` into (dq, dk, dv), all of them views of any strides (the last one 1)."""
        raise AssertionError(f"{self.name} takes no boundaries of sequences")

    def forward_blocks(self, q: Tensor, k: Tensor, v: Tensor, lists: BlockLists, options: Options) -> tuple[Tensor, Tensor]:
        """``forward`` over the pairs that ``lists`` keep; q (B, Nq, H, D), k and v (B, Nk, K, D). Only if ``capabilities.block_sizes``."""
        raise AssertionError(f"{self.name} takes no lists of blocks")

    def backward_blocks(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, lists: BlockLists, options: Options,
        dlse: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """``backward`` over the pairs that ``lists`` keep, in q's dtype or float32. ``dlse`` only if ``capabilities.lse_grad``."""
        raise AssertionError(f"{self.name} takes no lists of blocks")

    def forward_blocks_into(self, q: Tensor, k: Tensor, v: Tensor, lists: BlockLists, options: Options, out: Tensor) -> Tensor:
        """``forward_blocks`` that writes out into a view of any strides (the last one 1), and returns lse."""
        part_out, lse = self.forward_blocks(q, k, v, lists, options)
        out.copy_(part_out)
        return lse

    def backward_blocks_into(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, lists: BlockLists, options: Options,
        dq: Tensor, dlse: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """``backward_blocks`` that writes dq into a view of any strides (the last one 1), and returns (dk, dv)."""
        part_dq, dk, dv = self.backward_blocks(dout, q, k, v, out, lse, lists, options, dlse)
        dq.copy_(part_dq)
        return dk, dv


class WritingBackend(Backend):
    """A library that writes its results into given views: ``forward_into`` and ``backward_into`` are its raw functions."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor]:
        P, L, G, _ = q.shape
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.empty((P, G, L), dtype=accumulation_dtype(q.dtype), device=q.device)
        self.forward_into(q, k, v, options, out, lse)
        return out, lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, options: Options, dlse: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        # the gradients are dense, whatever the strides of q, k and v
        dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        self.backward_into(dout, q, k, v, out, lse, options, (dq, dk, dv), dlse)
        return dq, dk, dv


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which results of inputs in ``dtype`` are summed, which is also that of lse."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def reasons_of(capabilities: Capabilities, request: AttentionRequest) -> list[str]:
    """Returns every reason that ``capabilities`` gives against ``request``."""
    return hardware_reasons(capabilities, request.hardware) + _request_reasons(capabilities, request)


def hardware_reasons(capabilities: Capabilities, hardware: Hardware) -> list[str]:
    reasons = []
    if hardware.device_type not in capabilities.devices:
        return [f"runs on {' and '.join(sorted(capabilities.devices))}, not on {hardware.device_type}"]
    if hardware.is_rocm and not capabilities.rocm:
        reasons.append("not tried on ROCm")
    if capabilities.compute_capabilities is not None and hardware.device_type == "cuda" and not hardware.is_rocm:
        low, high = capabilities.compute_capabilities
        have = hardware.capability or (0, 0)
        if not low <= have <= high:
            reasons.append(f"needs compute capability {_dotted(low)} to {_dotted(high)}, the GPU has {_dotted(have)}")
    if hardware.torch_version < capabilities.min_torch:
        reasons.append(f"needs torch ≥ {_dotted(capabilities.min_torch)}, this is {_dotted(hardware.torch_version)}")
    if capabilities.package is not None and capabilities.package not in hardware.packages:
        why = dict(hardware.unusable).get(capabilities.package)
        reasons.append(
            f"{capabilities.package} is installed and cannot be used: {why}"
            if why
            else f"{capabilities.package} is not installed: {capabilities.install}"
        )
    return reasons


def _request_reasons(capabilities: Capabilities, request: AttentionRequest) -> list[str]:
    reasons = []
    if request.precision not in capabilities.precisions:
        way_out = " or ".join(f'precision="{name}"' for name in sorted(capabilities.precisions))
        what = "in the inputs' precision" if "native" in capabilities.precisions else " and ".join(sorted(capabilities.precisions))
        reasons.append(f"computes {what} only, not {request.precision}: {way_out}")
    if request.dtype not in capabilities.dtypes:
        names = ", ".join(sorted(str(d).removeprefix("torch.") for d in capabilities.dtypes))
        reasons.append(f"takes {names}, not {str(request.dtype).removeprefix('torch.')}")
    capability = request.hardware.capability
    if (
        request.dtype is torch.bfloat16
        and capability is not None
        and capability < (8, 0)
        and "cuda" in capabilities.devices
        and capabilities.compute_capabilities is not None
    ):
        reasons.append(f"bfloat16 needs compute capability 8.0, the GPU has {_dotted(capability)}")
    if capabilities.head_dims is not None and request.head_dim not in capabilities.head_dims:
        reasons.append(f"head_dim is one of {sorted(capabilities.head_dims)}, not {request.head_dim}")
    if request.head_dim > capabilities.max_head_dim:
        reasons.append(f"head_dim is at most {capabilities.max_head_dim}, not {request.head_dim}")
    if request.head_dim % capabilities.head_dim_multiple:
        reasons.append(f"head_dim must be a multiple of {capabilities.head_dim_multiple}, not {request.head_dim}")
    for wanted, able, text in (
        (request.needs_grad, capabilities.backward, "has no backward"),
        (request.key_mask, capabilities.key_mask, "takes no key_padding_mask"),
        (request.window, capabilities.window, "takes no window"),
        (request.dropout, capabilities.dropout, "has no dropout by position (the same element dropped in every branch)"),
        (request.softcap, capabilities.softcap, "takes no softcap"),
        (request.deterministic and request.needs_grad, capabilities.deterministic, "its backward is not deterministic"),
    ):
        if wanted and not able:
            reasons.append(text)
    if request.blocks is None and capabilities.blocks_only:
        reasons.append("computes lists of blocks only")
    if request.blocks is not None and not capabilities.block_sizes:
        reasons.append("takes no lists of blocks")
    elif request.blocks is not None:
        if request.blocks not in capabilities.block_sizes:
            sizes = ", ".join(f"{q}x{k}" for q, k in sorted(capabilities.block_sizes))
            reasons.append(f"blocks are of {sizes}, not {request.blocks[0]}x{request.blocks[1]}")
        if request.block_masks not in capabilities.block_masks:
            reasons.append(f"takes no {request.block_masks} masks inside blocks")
    if capabilities.max_extent is not None and request.extent >= capabilities.max_extent:
        reasons.append(f"one segment spans {request.extent} elements, 32-bit offsets end at {capabilities.max_extent}")
    return reasons


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
