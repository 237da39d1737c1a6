"""The options of the public functions, once: what each means, its type, its default, and which function takes it. Type checkers and IDEs
complete ``**options: Unpack[...]``; ``shows_options`` spells them out for ``help``. Among them are biases by formula: numbers added to the
scores that kernels compute from positions, so that no (N, N) tensor exists.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor
from typing_extensions import TypedDict, get_type_hints

from dilated_attention.backends.base import accumulation_dtype
from dilated_attention.pattern import HeadOffsets
from dilated_attention.pattern.checks import check_number, shown
from dilated_attention.validation import check_numbers_of_heads, check_plain, check_probability, check_sinks

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True, eq=False)
class Alibi:
    """A bias by position: head h adds −slope_h · |i − j| to the score of query position i and key position j.

        s_ij = scale · q_i·k_j − slope_h · |i − j|,    lse includes it

    ALiBi (Press et al. 2022, arXiv 2108.12409, section 3) with slopes 2^(−8/H), 2^(−16/H), … for H heads. It differs in that keys after a
    query count, too, where attention is not causal, and in that slopes may be learned.

    Args:
        slopes: (H,), float32 or q's dtype, on q's device; any finite numbers. They may need a gradient.

    Raises (where it is given to an attention):
        ValueError, TypeError: slopes of another shape, dtype or device, or a softcap beside the bias.

    >>> slopes = 2.0 ** (-8.0 / 12 * torch.arange(1, 13))
    >>> out = attention(q, k, v, is_causal=True, bias=Alibi(slopes))
    """

    slopes: Tensor
    kind: ClassVar[str] = "position"


@dataclass(frozen=True, eq=False)
class Distance:
    """A bias by place: head h adds −slope_h · ‖c_i − c_j‖, the Euclidean distance of query and key, to their score.

        s_ij = scale · q_i·k_j − slope_h · ‖c_i − c_j‖,    lse includes it

    The two-dimensional ALiBi of TITAN's slide encoder (Ding et al. 2024, arXiv 2411.19666), where a place is that of a tile in the grid
    of its slide. It differs in that every position has a place, a class token too, in that slopes may be learned, and in that any other
    attention of this library takes it, not only a dense one.

    Args:
        coordinates: places of all keys: (N,), (N, 1) or (N, 2), or with the batch in front (B, N, 1) or (B, N, 2); floating-point or
            integers, finite, in any unit; computed in float32 (float64 for float64 q). Query i has the place of key query_offset + i.
            They get no gradient.
        slopes: (H,), float32 or q's dtype, on q's device, in 1/unit; any finite numbers. They may need a gradient.

    Raises (where it is given to an attention):
        ValueError, TypeError: coordinates or slopes of another shape, dtype or device, coordinates that need a gradient, or a softcap.

    >>> bias = Distance(tile_corners / 256, slopes)
    >>> out = dilated_attention(q, k, v, [1024, 4096], [1, 4], bias=bias)
    """

    coordinates: Tensor
    slopes: Tensor
    kind: ClassVar[str] = "place"


class ScoreOptions(TypedDict, total=False):
    """What decides the attention weights, for all functions.

    Args:
        is_causal: a query sees keys at its own position and before.
        scale: factor of q·k, from 1.18e-38 to 2.36e38; None for 1/sqrt(D).
        cu_seqlens: boundaries of packed documents, int32 (documents + 1,), B = 1; segments and blocks start anew at position 0 of each.
            The host reads it, at every call if it is on the CPU. On a GPU it waits for that once, and again after a change by torch; other
            changes (``.data``, dlpack) are refused there by an assertion on the device.
        key_padding_mask: (B, Nk) bool, True = padding, as in nn.MultiheadAttention.
        sinks: (H,), float32 or q's dtype: each head has one more key of value 0, whose score is this number: e^{sink_h} is added to the
            denominator, and to what lse is the logarithm of (as in gpt-oss). They may need a gradient. Not with detached mixing.
    """

    is_causal: bool
    scale: float | None
    cu_seqlens: torch.Tensor | None
    key_padding_mask: torch.Tensor | None
    sinks: torch.Tensor | None


class BranchOptions(TypedDict, total=False):
    """What the branches are in addition to ``segment_lengths`` and ``dilation_rates``.

    Args:
        head_offsets: ``"cyclic"`` o_h = h mod r (the paper) · ``"blocked"`` o_h = h // ceil(H/r) (TorchScale) · ``"zero"`` ·
            one list of H integers per branch.
        branch_heads: ``"all"``: every head runs every branch · ``"split"``: the heads are split among the branches (fkodom's layout).
        tail: ``"mask"``: only real keys take part · ``"zero_keys"``: TorchScale's zero padding takes part (non-causal only).
    """

    head_offsets: HeadOffsets
    branch_heads: str
    tail: str


class SoftmaxOptions(TypedDict, total=False):
    """Numbers that change the softmax, of calls and of ``explain_backend``.

    Args:
        softcap: c, from 1.18e-38 to 1.01e31: scores are c·tanh(s/c) (Gemma 2); None for s. Few backends can:
            ``explain_backend(softcap=…)`` says which.
        dropout_p: probability that an attention weight is dropped. A pair of positions has the same decision in every branch. Pass 0
            in evaluation.
    """

    softcap: float | None
    dropout_p: float


class CallOptions(ScoreOptions, SoftmaxOptions, total=False):
    """What every attention takes: ``ScoreOptions``, ``SoftmaxOptions`` and how it is computed.

    Args:
        bias: ``Alibi(slopes)`` or ``Distance(coordinates, slopes)``: what each head adds to its scaled scores, by position or place, with
            memory in proportion to N. Not with softcap. Content-chosen blocks are chosen without it. In a ring places are those of this
            process's keys.
        return_lse: also return the log-sum-exp of the scores.
        deterministic: use only kernels whose gradients repeat bit for bit.
        backend: ``"auto"``, or a name from ``list_backends()``. A named backend is used or the call is refused; it is never replaced.
    """

    bias: Alibi | Distance | None
    return_lse: bool
    deterministic: bool
    backend: str


class LocalOptions(CallOptions, total=False):
    """``CallOptions`` in one process.

    Args:
        query_offset: position of the first query in the key sequence, for decoding; query_offset + Nq ≤ Nk.
    """

    query_offset: int


class LocalBranchOptions(LocalOptions, BranchOptions, total=False):
    """``LocalOptions`` and ``BranchOptions``."""


class RingOptions(CallOptions, total=False):
    """``CallOptions`` of a sequence of N positions sharded over the W processes of a group. All must be equal on all processes, but
    ``backend``, ``timeout`` and the values of ``key_padding_mask``, ``sinks`` and ``bias``.

    ``key_padding_mask`` (B, n) is that of this process's keys, ``cu_seqlens`` has the boundaries in the whole sequence. Dropout is by
    position in the whole sequence: with equal seeds on all processes it equals that of a single process. A process's gradient of ``sinks``
    and of a bias's slopes is its share; the whole gradient is the sum over the group, like that of every replicated parameter.

    Args:
        group: the ProcessGroup that shares the sequence; None for ``mesh``, or for all processes. Without torch.distributed, or with
            one process, nothing is communicated.
        mesh: a DeviceMesh of one axis, instead of a group.
        seq_len: N. With None the processes ask each other in every call (0.2 ms or more). Either all processes give it, or none.
        timeout: seconds that an exchange may take before an error names it and its peer. It may differ, as
            ``backend`` may, but for a block pattern that is a window: on all processes it is ``"auto"``, or on none.
    """

    group: Any
    mesh: Any
    seq_len: int | None
    timeout: float


class RingBranchOptions(RingOptions, BranchOptions, total=False):
    """``RingOptions`` and ``BranchOptions``."""


class MapOptions(ScoreOptions, BranchOptions, total=False):
    """``ScoreOptions``, ``BranchOptions`` and ``query_offset`` (see ``LocalOptions``)."""

    query_offset: int


class DecodeOptions(TypedDict, total=False):
    """``scale``, ``sinks`` and ``return_lse``: see ``CallOptions``."""

    scale: float | None
    sinks: torch.Tensor | None
    return_lse: bool


class Options(NamedTuple):
    """All options of a call with their defaults, as the caller gave them, but ``group`` and ``layout`` by their names. ``window``: see
    ``CallSettings``."""

    key_padding_mask: Any = None
    cu_seqlens: Any = None
    sinks: Any = None
    window: tuple[int, ...] = ()
    head_offsets: Any = "cyclic"
    branch_heads: str = "all"
    tail: str = "mask"
    is_causal: bool = False
    return_lse: bool = False
    deterministic: bool = False
    query_offset: int = 0
    dropout_p: float = 0.0
    scale: float | None = None
    softcap: float | None = None
    bias: Any = None
    backend: str = "auto"
    precision: str = "native"
    mixture_grad: str = "exact"
    group: str = ""
    layout: str = "contiguous"
    exchange: str = "auto"
    ranks_per_node: int | None = None
    head_steps: int | None = None
    seq_len: int | None = None
    timeout: float = 60.0


DEFAULTS: dict[str, Any] = {**Options._field_defaults, "group": None, "mesh": None}
# what torch's scaled_dot_product_attention and flash-attn call it → what it is here
_NAMES_OF_OTHERS = {
    "attn_mask": "here is_causal, window, key_padding_mask and cu_seqlens, or block_sparse_attention with a pattern, e.g. MaskFunction",
    "enable_gqa": "key and value heads that are fewer than q's are shared without it",
    "causal": "here is_causal",
    "softmax_scale": "here scale",
    "window_size": "here window",
    "alibi_slopes": "here bias=Alibi(slopes)",
}
# public function or class → the keywords that it takes
KEYWORDS: dict[str, tuple[str, ...]] = {}


def shows_options(function: Function) -> Function:
    """Gives a function or constructor with ``**options: Unpack[...]`` a signature that shows each option with its default."""
    signature = inspect.signature(function)
    options = get_type_hints(function, include_extras=True)["options"].__args__[0]
    defaults = sys.modules[options.__module__].DEFAULTS
    shown = [parameter for parameter in signature.parameters.values() if parameter.kind is not inspect.Parameter.VAR_KEYWORD]
    shown += [
        # as the function's own annotations are: text
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=defaults[name], annotation=hint.__forward_arg__)
        for name, hint in options.__annotations__.items()
    ]
    function.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]
    names = [parameter.name for parameter in shown if parameter.kind is inspect.Parameter.KEYWORD_ONLY]
    KEYWORDS[function.__qualname__.removesuffix(".__init__")] = tuple(names)
    return function


def check_names(function: str, options: Iterable[str], owner: str = "") -> None:
    """Refuses options that the public function or class does not have. ``owner``: the class of which ``function`` is the ``forward``."""
    for name in options:
        if name not in KEYWORDS[function]:
            hint = f"an option of the constructor: {owner}(…, {name}=…)" if name in KEYWORDS.get(owner, ()) else _NAMES_OF_OTHERS.get(name)
            if owner and name == "bias":
                of_scores = "a bias of scores is an option of functions: dilated_attention(…, bias=…)"
                hint = f"{hint}, of its projections; {of_scores}" if hint else of_scores
            what = f"{owner}.forward" if owner else function
            raise TypeError(
                f"{what}() got an unexpected keyword argument {name!r}{f' ({hint})' if hint else ''}; "
                f"it accepts {', '.join(KEYWORDS[function])}"
            )


def checked_softmax(options: Options, q: Tensor, k: Tensor, scale: float) -> dict[str, Any]:
    """Checks the options that change the softmax, for checked q and k, and returns them as fields of ``CallSettings``."""
    check_sinks(options.sinks, q)
    if options.sinks is not None and options.mixture_grad == "detached":
        raise ValueError(
            "sinks are given with mixture_grad='detached', which lets no gradient reach the weights that sinks change; "
            "expected mixture_grad='exact', or no sinks"
        )
    check_bias(options.bias, q, k)
    if options.bias is not None and options.softcap is not None:
        raise ValueError(f"bias is given with softcap {options.softcap}; expected one of them: scores are capped or have a bias")
    return {
        "has_sinks": options.sinks is not None,
        "bias": getattr(options.bias, "kind", ""),
        **checked_numbers(options, scale, q.dtype),
    }


def checked_numbers(options: Options, scale: float, dtype: torch.dtype) -> dict[str, Any]:
    """Checks ``SoftmaxOptions`` of a call with a checked scale, and returns them as fields of ``CallSettings``."""
    return {
        "dropout_p": check_probability("dropout_p", options.dropout_p),
        "softcap": check_softcap(options.softcap, scale, dtype),
    }


def check_softcap(softcap: Any, scale: float, dtype: torch.dtype) -> float:
    """Returns the cap, and 0.0 for None. ``scale`` is that of the call."""
    if softcap is None:
        return 0.0
    check_number("softcap", softcap, "a number > 0, or None")
    held = torch.finfo(accumulation_dtype(dtype))
    # kernels compute tanh(scale / softcap · q·k), and treat quotients below the smallest normal number as 0: a larger cap would move scores
    # by more than rounding does
    lowest, highest = max(held.tiny, scale / held.max), held.eps / held.tiny
    if not lowest <= softcap <= highest:
        raise ValueError(
            f"softcap is {shown(softcap)} and scale is {scale:.3g}; expected a number from {lowest:.3g} to {highest:.3g}, for which "
            f"{held.dtype} holds scale / softcap, or None for scores without a cap"
        )
    # the same number, a constant to torch.compile, to which a float that varies is a symbol: the op takes caps in its text
    return float.fromhex(float(softcap).hex())


def check_bias(bias: Any, q: Tensor, k: Tensor) -> None:
    """Checks a bias for checked q and k."""
    if bias is None:
        return
    if not isinstance(bias, Alibi | Distance):
        way_out = "; a tensor of N² numbers is not taken" if isinstance(bias, Tensor) else ""
        raise TypeError(f"bias is a {type(bias).__name__}; expected Alibi(slopes), Distance(coordinates, slopes) or None{way_out}")
    check_numbers_of_heads("bias.slopes", bias.slopes, q)
    if isinstance(bias, Alibi):
        return
    x, (B, N) = bias.coordinates, k.shape[:2]
    check_plain("bias.coordinates", x, "a tensor of shape (N, 2), the places of all keys")
    allowed = [(N,), (N, 1), (N, 2), (B, N, 1), (B, N, 2)]
    if tuple(x.shape) not in allowed:
        raise ValueError(f"bias.coordinates has shape {tuple(x.shape)}; expected one of {', '.join(map(str, allowed))} for {N} keys")
    if x.dtype is torch.bool or x.is_complex():
        raise TypeError(f"bias.coordinates has dtype {x.dtype}; expected floating-point numbers or integers: convert it with .float()")
    if x.device != q.device:
        raise ValueError(f"bias.coordinates is on {x.device} and q on {q.device}; they must be on one device: move it with .to()")
    if x.requires_grad:
        raise ValueError("bias.coordinates needs a gradient, and a bias has none for places; expected fixed ones: give .detach()")


def bias_tensors(bias: Alibi | Distance, q: Tensor, k: Tensor) -> tuple[Tensor | None, Tensor]:
    """Returns what an op takes of a checked bias: coordinates (B, Nk, 2) in the dtype of lse, None for positions, and slopes (H,)."""
    if isinstance(bias, Alibi):
        return None, bias.slopes
    x = bias.coordinates
    x = (x[:, None] if x.ndim == 1 else x).to(accumulation_dtype(q.dtype))
    return torch.nn.functional.pad(x, (0, 2 - x.shape[-1])).expand(k.shape[0], -1, -1), bias.slopes
