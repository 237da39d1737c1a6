"""The interface to kernel libraries: a call (AttentionRequest), a library (Capabilities), and its two raw functions (Backend).

A backend declares its capabilities. Its method ``reasons_against(request)`` returns *every* reason why it cannot compute the request, or an
empty list if it can.

Shape letters: P problems (batch × segments), L rows, S keys, G query heads, K key/value heads, D head dim.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

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
    bias: bool = False
    deterministic: bool = False
    lse_grad: bool = False
    # torch.use_deterministic_algorithms(True) is on; some torch ops have no determinism argument of their own
    torch_deterministic: bool = False
    # torch.backends.cudnn.benchmark is on: the same shapes come again and again, so that a plan for each shape pays
    shapes_repeat: bool = False
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
    def flops(self) -> float:
        """Floating-point operations of a typical problem of all heads; 0 if its length is unknown."""
        return (10 if self.needs_grad else 4) * self.head_dim * self.num_heads * self.length**2 / (2 if self.causal else 1)

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
        parts += [flag for flag in (*_REFUSALS, "deterministic", "lse_grad") if getattr(self, flag)]
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
    max_head_dim: int = 256
    head_dim_multiple: int = 1
    key_mask: bool = False
    window: bool = False
    # computes windows of any width in one launch; otherwise the engine splits the queries into blocks and the backend masks each
    native_window: bool = False
    dropout: bool = False
    softcap: bool = False
    bias: bool = False
    deterministic: bool = True
    backward: bool = True
    lse_grad: bool = False
    # limits that the engine respects by splitting launches
    max_batch: int | None = None
    max_extent: int | None = None
    # writes its results into ``out`` and ``grads``; those of other backends are copied
    writes_views: bool = False
    # a causal launch may have more keys than queries: the last query sees the last key
    aligned_last: bool = False
    # takes boundaries of sequences in place of a batch: ``Bounds``
    documents: bool = False
    # computes a call of many problems at once, whatever it consists of
    whole_calls: bool = False
    # which block lists it computes, and whether it computes nothing else
    block_sizes: frozenset[tuple[int, int]] = frozenset()
    block_masks: frozenset[str] = frozenset({"none"})
    blocks_only: bool = False
    # makes a plan for every new shape, which takes as long as hundreds of calls: "auto" prefers it only where shapes repeat
    plans_shapes: bool = False
    # its launches may run concurrently on several streams
    concurrent: bool = True
    # where these capabilities were read or measured
    source: str = ""
    rocm: bool = False


# what the builds of FlashAttention have in common; each of them declares more
FLASH = Capabilities(
    devices=frozenset({"cuda"}),
    dtypes=HALVES,
    compute_capabilities=((8, 0), (12, 1)),
    head_dim_multiple=8,
    window=True,
    native_window=True,
    # the launch grids put the batch in a 16-bit dimension
    max_batch=65_535,
    aligned_last=True,
)


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


class Bias(NamedTuple):
    """What is added to a scaled score: −slope · ‖c_query − c_key‖.

    Args:
        queries, keys: coordinates (P, L, 2) and (P, S, 2), in the dtype of lse.
        slopes: (G,), in that dtype.
        gradient: (G,), to which a backward adds the gradient of the slopes; None where it is not needed.
    """

    queries: Tensor
    keys: Tensor
    slopes: Tensor
    gradient: Tensor | None = None

    def distances(self, rows: slice) -> Tensor:
        """Returns ‖c_query − c_key‖ (P, rows, S) of some queries."""
        x, y = (self.queries[:, rows, None, i] - self.keys[:, None, :, i] for i in range(2))
        return torch.hypot(x, y)

    def part(self, queries: Any = slice(None), keys: Any = slice(None), heads: slice = slice(None)) -> Bias:
        """Returns the bias of some queries and keys, indices of their tensors, and heads."""
        gradient = None if self.gradient is None else self.gradient[heads]
        return Bias(self.queries[queries], self.keys[keys], self.slopes[heads], gradient)


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
    bias: Bias | None = None
    # equal for launches whose tensors have equal shapes, strides and alignment; None if unknown
    geometry: Hashable = None


class Bounds(NamedTuple):
    """Boundaries of S sequences, one after the other: int32 (S + 1,) among the queries and among the keys.

    Args:
        most_queries, most_keys: the most rows of a sequence.
    """

    queries: Tensor
    keys: Tensor
    most_queries: int
    most_keys: int


# which keys a launch's rows may see: those of their sequence, those that lists keep, or all of their problem
Keys = Bounds | BlockLists | None
# where results go, of any strides (the last one 1); None where that is left to what computes them
Views = tuple[Tensor | None, ...]
# what a pass returns: (out, lse), or (dq, dk, dv)
Result = tuple[Tensor, Tensor]
Grads = tuple[Tensor, Tensor, Tensor]


class Backend(ABC):
    """A kernel library, wrapped in two raw functions.

    ``keys`` says which keys a row may see, apart from ``options``:

    * None: all of its problem. q is (P, L, G, D), k and v (P, S, K, D), S ≥ 1, L ≥ 1.
    * ``Bounds``, if ``capabilities.documents``: those of its sequence. q is (1, L, G, D), k and v (1, S, K, D). Causality is that of each
      sequence: its last query sees its last key.
    * ``BlockLists``, if ``capabilities.block_sizes``: those that the lists keep. q is (B, Nq, H, D), k and v (B, Nk, K, D).

    q, k and v have any strides whose last one is 1. ``out`` and ``grads`` are views for the results. A backend may write to them and return
    them; it may as well return other tensors, which are then copied (``placed``). ``capabilities.writes_views`` declares the former.
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
    def forward(self, q: Tensor, k: Tensor, v: Tensor, options: Options, keys: Keys = None, *, out: Views = (None, None)) -> Result:
        """Returns (out (P, L, G, D) in q's dtype, lse (P, G, L) float32 (float64 for float64), natural logarithm).

        A row without keys has lse −inf and out 0, whatever the library itself returns for it.

        Args:
            out: views for out and lse.
        """

    @abstractmethod
    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, options: Options, keys: Keys = None, *,
        dlse: Tensor | None = None, grads: Views = (None, None, None),
    ) -> Grads:  # fmt: skip
        """Returns the contributions (dq, dk, dv), in q's dtype or float32.

        ``out`` and ``lse`` are those *of the whole softmax*, of which this launch may be a part. An lse of +inf marks a row that takes no
        part: its contributions are 0; a row without keys comes so, never with −inf.

        Args:
            dlse: (P, G, L), only if ``capabilities.lse_grad``.
            grads: views for dq, dk and dv.
        """


def placed(results: tuple[Tensor, ...], views: Views | None) -> tuple[Tensor, ...]:
    """Returns the results, each copied to its view unless there is none or it was written there. ``views``: None for none at all."""
    if views is None:
        return results
    return tuple([x if view is None or view is x else view.copy_(x) for x, view in zip(results, views, strict=True)])


def new_results(views: Views | None, like: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Returns the views, and where there is none, a dense new tensor like the tensor in its place."""
    views = (None,) * len(like) if views is None else views
    return tuple([x.new_empty(x.shape) if view is None else view for view, x in zip(views, like, strict=True)])


def new_lse(q: Tensor) -> Tensor:
    """Returns an uninitialised lse (P, G, L) for queries (P, L, G, D)."""
    return q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=accumulation_dtype(q.dtype))


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which results of inputs in ``dtype`` are summed, which is also that of lse."""
    return torch.float64 if dtype is torch.float64 else torch.float32


# options that a backend takes or not: fields of a request and of the capabilities
_REFUSALS = {
    "key_mask": "takes no key_padding_mask",
    "window": "takes no window",
    "dropout": "has no dropout by position (the same element dropped in every branch)",
    "softcap": "takes no softcap",
    "bias": "takes no bias by position or distance (math and tiles do)",
}


def reasons_of(capabilities: Capabilities, request: AttentionRequest) -> list[str]:
    """Returns every reason that ``capabilities`` gives against ``request``."""
    hardware = request.hardware
    if hardware.device_type not in capabilities.devices:
        reasons = [f"runs on {' and '.join(sorted(capabilities.devices))}, not on {hardware.device_type}"]
    else:
        reasons = _hardware_reasons(capabilities, hardware)
    if request.precision not in capabilities.precisions:
        way_out = " or ".join(f'precision="{name}"' for name in sorted(capabilities.precisions))
        what = "in the inputs' precision" if "native" in capabilities.precisions else " and ".join(sorted(capabilities.precisions))
        reasons.append(f"computes {what} only, not {request.precision}: {way_out}")
    if request.dtype not in capabilities.dtypes:
        names = ", ".join(sorted(str(d).removeprefix("torch.") for d in capabilities.dtypes))
        reasons.append(f"takes {names}, not {str(request.dtype).removeprefix('torch.')}")
    capability = hardware.capability or (8, 0)
    if request.dtype is torch.bfloat16 and capability < (8, 0) and capabilities.compute_capabilities is not None:
        reasons.append(f"bfloat16 needs compute capability 8.0, the GPU has {_dotted(capability)}")
    if request.head_dim > capabilities.max_head_dim:
        reasons.append(f"head_dim is at most {capabilities.max_head_dim}, not {request.head_dim}")
    if request.head_dim % capabilities.head_dim_multiple:
        reasons.append(f"head_dim must be a multiple of {capabilities.head_dim_multiple}, not {request.head_dim}")
    if request.needs_grad and not capabilities.backward:
        reasons.append("has no backward")
    reasons += [text for name, text in _REFUSALS.items() if getattr(request, name) and not getattr(capabilities, name)]
    if request.deterministic and request.needs_grad and not capabilities.deterministic:
        reasons.append("its backward is not deterministic")
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


def _hardware_reasons(capabilities: Capabilities, hardware: Hardware) -> list[str]:
    """Returns the reasons against a machine of the right kind."""
    reasons = []
    if hardware.is_rocm and not capabilities.rocm:
        reasons.append("not tried on ROCm")
    if capabilities.compute_capabilities is not None and hardware.device_type == "cuda" and not hardware.is_rocm:
        low, high = capabilities.compute_capabilities
        have = hardware.capability or (0, 0)
        if not low <= have <= high:
            reasons.append(f"needs compute capability {_dotted(low)} to {_dotted(high)}, the GPU has {_dotted(have)}")
    if capabilities.package is not None and capabilities.package not in hardware.packages:
        why = dict(hardware.unusable).get(capabilities.package)
        reasons.append(
            f"{capabilities.package} is installed and cannot be used: {why}"
            if why
            else f"{capabilities.package} is not installed: {capabilities.install}"
        )
    return reasons
