"""What all attention modules without projections have in common: ``Attention`` keeps their options; ``LocalAttention`` attends to whole
sequences, ``RingModule`` to sequences that processes share.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from typing_extensions import Unpack

from dilated_attention import validation as check
from dilated_attention.backends import PRECISIONS, registry
from dilated_attention.functional import attention_map, attention_received
from dilated_attention.functional.arguments import check_ring_blocks
from dilated_attention.functional.calls import checked_pattern
from dilated_attention.functional.options import KEYWORDS, BranchOptions, check_names, shows_options
from dilated_attention.modules._ring import RingSettings
from dilated_attention.modules.options import DEFAULTS, LocalArguments, RingArguments
from dilated_attention.pattern import BlockPattern, DilatedPattern, with_sparsity
from dilated_attention.pattern.blocks.compose import KINDS
from dilated_attention.pattern.checks import MAX_HEADS, as_int, check_number, differs, one_of, shown

# the options that a module's repr shows where they differ from their defaults, in this order
_SHOWN_OPTIONS = (
    "window", "scale", "dropout", "head_offsets", "branch_heads", "tail", "mixture_grad", "deterministic", "backend", "precision",
    "head_steps",
)  # fmt: skip


class Attention(nn.Module):
    """Checks and keeps the pattern and the options of a module. ``LocalAttention`` and ``RingModule`` add ``forward``.

    Args:
        name: the public class, whose options are accepted.
        options: what the user gave of them.
        branches: (segment_lengths, dilation_rates); None for a class without branches.
        blocks: (pattern,), the argument of a class with blocks, whose pattern is None if ``sparsity_ratio`` is given instead; () for a
            class without blocks.
    """

    # the public function that ``forward`` calls
    function: ClassVar[Callable[..., Any]]
    sinks: nn.Parameter | nn.UninitializedParameter | None

    def __init__(
        self, name: str, options: Mapping[str, Any], branches: tuple[Any, Any] | None = None, blocks: tuple[Any, ...] = ()
    ) -> None:
        check_names(name, options)
        super().__init__()
        settings = {**DEFAULTS, **options}
        # the check needs a head dimension, here 1, for scale=None alone
        self.scale = None if settings["scale"] is None else check.check_scale(settings["scale"], 1)
        self.dropout = check.check_probability("dropout", settings["dropout"])
        self.deterministic = check.check_bool("deterministic", settings["deterministic"])
        registry.check_name(settings["backend"])
        self.backend: str = settings["backend"]
        sinks, num_heads = check.check_bool("sinks", settings["sinks"]), settings["num_heads"]
        if num_heads is not None and not sinks:
            raise ValueError(f"num_heads is {num_heads} without sinks, for which alone it is; give sinks=True, or leave it out")
        self.sinks = None
        if sinks:
            # without num_heads, the first call or a loaded state says how many heads there are, as in torch's lazy modules
            self.sinks = nn.UninitializedParameter()
            if num_heads is not None:
                self.sinks = nn.Parameter(torch.zeros(as_int("num_heads", num_heads, minimum=1, maximum=MAX_HEADS)))
            self.register_load_state_dict_pre_hook(_make_loaded_sinks)
        # the arguments of ``function`` that say the pattern; without those that have their default
        self._pattern_arguments: dict[str, Any] = {}
        self._pattern: DilatedPattern | None = None
        self._blocks: BlockPattern | None = None
        if branches is not None:
            self._pattern = DilatedPattern(*branches, **{key: settings[key] for key in BranchOptions.__annotations__})
            # from the pattern, which has made plain integers of them
            arguments = {key: getattr(self._pattern, key) for key in ("segment_lengths", "dilation_rates", *BranchOptions.__annotations__)}
            self._pattern_arguments = {key: value for key, value in arguments.items() if value != DEFAULTS.get(key)}
        if blocks:
            (pattern,) = blocks
            self._blocks = _block_pattern_of(pattern, settings)
            self._pattern_arguments["pattern"] = self._blocks
        one_of("mixture_grad", settings["mixture_grad"], ("exact", "detached"))
        one_of("precision", settings["precision"], PRECISIONS)
        if sinks and settings["mixture_grad"] == "detached":
            raise ValueError("sinks=True with mixture_grad='detached', which would give them no gradient; expected mixture_grad='exact'")
        # of the options that only some functions take, those that this one takes
        self._extra_options = [key for key in ("window", "mixture_grad", "precision") if key in KEYWORDS[name]]
        for key in self._extra_options:
            setattr(self, key, settings[key])

    @property
    def pattern(self) -> Any:
        """Which positions attend to which. A pattern can count its pairs and FLOPs, and draw itself."""
        if self._pattern is None and self._blocks is None:
            raise AttributeError("attention to all positions has no pattern")
        return self._blocks if self._pattern is None else self._pattern

    @property
    def block_pattern(self) -> BlockPattern:
        """The pattern of the blocks, in a module that has branches and blocks; ``pattern`` is then that of the branches."""
        if self._pattern is None or self._blocks is None:
            raise AttributeError("this attention has no branches together with blocks")
        return self._blocks

    def reset_parameters(self) -> None:
        """Sets the sinks to 0, if there are any."""
        if self.sinks is not None and not isinstance(self.sinks, nn.UninitializedParameter):
            nn.init.zeros_(self.sinks)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        # as torch's lazy modules do: sinks without a size as they are, since torch would detach them, which needs one
        is_lazy = isinstance(self.sinks, nn.UninitializedParameter)
        super()._save_to_state_dict(destination, prefix, keep_vars or is_lazy)
        if is_lazy and not keep_vars:
            for name in {*self._parameters, *self._buffers} - {"sinks"}:
                if (key := f"{prefix}{name}") in destination:
                    destination[key] = destination[key].detach()

    def _weight_arguments(self, query: torch.Tensor) -> dict[str, Any]:
        """Returns the arguments on which attention weights depend: the pattern, the scale and the sinks. Makes sinks in the first call."""
        # another query than (B, Nq, H, D) is refused by the function that is called with these arguments
        if isinstance(self.sinks, nn.UninitializedParameter) and isinstance(query, torch.Tensor) and query.ndim == 4:
            _make_sinks(self.sinks, (query.shape[2],))
        return {**self._pattern_arguments, "scale": self.scale, "sinks": self.sinks}

    def _arguments(self, query: torch.Tensor) -> dict[str, Any]:
        """Returns the module's options as arguments of ``function``."""
        arguments = self._weight_arguments(query)
        # as in torch, a module drops in training mode alone, and says "dropout" where functions say "dropout_p"
        arguments["dropout_p"] = self.dropout if self.training else 0.0
        arguments["deterministic"] = self.deterministic
        arguments["backend"] = self.backend
        for name in self._extra_options:
            arguments[name] = getattr(self, name)
        return arguments

    def extra_repr(self) -> str:
        """The pattern, how the sequence is sharded, and the options that differ from their defaults."""
        branches = [name for name in ("segment_lengths", "dilation_rates") if name in self._pattern_arguments]
        parts = [f"{name}={list(self._pattern_arguments[name])}" for name in branches]
        if self._blocks is not None:
            parts.append(f"block_pattern={self._blocks!r}" if parts else repr(self._blocks))
        # of ``RingModule``, whose settings stand between the pattern and the options
        if ring := getattr(self, "ring", None):
            parts.append(ring.extra_repr())
        # options are attributes or arguments of the pattern; what this class does not take has its default
        settings = {**DEFAULTS, **self._pattern_arguments, **vars(self)}
        parts += [f"{name}={settings[name]!r}" for name in _SHOWN_OPTIONS if settings[name] != DEFAULTS[name]]
        return ", ".join(parts if self.sinks is None else [*parts, "sinks=True"])


def _make_loaded_sinks(module: Attention, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """A hook before ``load_state_dict``: sinks that have no size yet get the size of those that are loaded."""
    loaded = state.get(f"{prefix}sinks")
    if isinstance(loaded, nn.UninitializedParameter) or not isinstance(loaded, torch.Tensor):
        return
    if isinstance(module.sinks, nn.UninitializedParameter):
        _make_sinks(module.sinks, loaded.shape)


def _make_sinks(sinks: nn.UninitializedParameter, shape: tuple[int, ...]) -> None:
    """Gives sinks a size and sets them to 0, outside of all modes of torch: a parameter made in inference mode could not be trained."""
    with torch.inference_mode(False), contextlib.ExitStack() as stack:
        # outside of torch.func's transforms, too, which compiled code cannot leave
        if not torch.compiler.is_compiling():
            stack.enter_context(torch._C._DisableFuncTorch())
        stack.enter_context(_disable_current_modes())
        sinks.materialize(shape)
        nn.init.zeros_(sinks)


def _block_pattern_of(pattern: Any, settings: Mapping[str, Any]) -> BlockPattern:
    """Returns the given block pattern, or that of a sparsity ratio; raises ValueError unless exactly one of the two is given."""
    sparsity_ratio = settings["sparsity_ratio"]
    if (pattern is None) == (sparsity_ratio is None):
        which = "neither" if pattern is None else f"both (pattern {shown(pattern)}, sparsity_ratio {shown(sparsity_ratio)})"
        raise ValueError(
            f"pattern and sparsity_ratio: {which} given; expected exactly one: give a pattern, e.g. LocalWindow(512), or a fraction "
            "of dense attention's pairs, e.g. sparsity_ratio=0.1"
        )
    if sparsity_ratio is not None:
        one_of("sparsity", settings["sparsity"], KINDS)
        check_number("sparsity_ratio", sparsity_ratio, "a number above 0 and at most 1")
        if not 0 < sparsity_ratio <= 1:
            raise ValueError(f"sparsity_ratio is {sparsity_ratio}; expected the fraction of all pairs to compute, above 0 and at most 1")
        return with_sparsity(sparsity_ratio, settings["sparsity"], block_size=settings["block_size"], seed=settings["seed"])
    for name in ("sparsity", "block_size", "seed"):
        if differs(settings[name], DEFAULTS[name]):
            raise ValueError(
                f"{name} is {shown(settings[name])} with a pattern, which has its own; leave {name} at its default, or use sparsity_ratio "
                "instead of pattern"
            )
    return checked_pattern(pattern)


class LocalAttention(Attention):
    """A module that takes projected queries, keys and values of whole sequences."""

    @shows_options
    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, return_lse: bool = False, **options: Unpack[LocalArguments]
    ) -> Any:
        """Computes the attention.

        Args:
            query: (B, Nq, H, D), float16, bfloat16, float32 or float64.
            key, value: (B, Nk, Hk, D), Hk a divisor of H.
            is_causal: a query sees keys at its own position and before.
            key_padding_mask: (B, Nk) bool, True = padding.
            cu_seqlens: boundaries of packed documents, int32 (documents + 1,), B = 1.
            query_offset: position of the first query among the keys, for decoding; query_offset + Nq ≤ Nk.
            return_lse: also return the log-sum-exp of the scores.

        Returns:
            out (B, Nq, H, D) in query's dtype; with ``return_lse`` (out, lse (B, H, Nq)), lse in float32 (float64 for float64).

        Raises:
            ValueError, TypeError: the tensors do not fit together; messages call query, key and value q, k and v.
            BackendUnavailable: no backend can compute this, or the named one cannot.
        """
        check_names("LocalAttention.forward", options, type(self).__name__)
        return self.function(query, key, value, **self._arguments(query), return_lse=return_lse, **options)

    def attention_map(self, query: torch.Tensor, key: torch.Tensor, query_rows: Any, **options: Any) -> torch.Tensor:
        """Returns the attention weights (B, H, R, Nk) of chosen queries in a ``forward`` without dropout.

        Args:
            query, key: see ``forward``.
            query_rows: see ``dilated_attention.functional.attention_map``.
            options: of ``forward``: is_causal, key_padding_mask, cu_seqlens, query_offset; of that function: average_heads, lse, chunk.
        """
        return attention_map(query, key, query_rows=query_rows, **self._weight_arguments(query), **options)

    def attention_received(self, query: torch.Tensor, key: torch.Tensor, **options: Any) -> torch.Tensor:
        """Returns the attention (B, H, Nk) that every key receives from all queries.

        Args:
            query, key: see ``forward``.
            options: of ``forward``: is_causal, key_padding_mask, cu_seqlens, query_offset; of
                ``dilated_attention.functional.attention_received``: query_weights, average_heads, dtype, backend. The module's own
                backend is not used, since it may not support ``dtype``.
        """
        return attention_received(query, key, **self._weight_arguments(query), **options)


class RingModule(Attention):
    """A module that takes projected queries, keys and values of the rows that this process holds. ``ring`` says how processes share the
    sequence. For the options see ``ring_dilated_attention`` and ``ring_block_sparse_attention``."""

    ring: RingSettings
    # the function for a sequence that one process holds whole, as with a cache
    unsharded: ClassVar[Callable[..., Any]]

    def __init__(self, name: str, options: Mapping[str, Any], **patterns: Any) -> None:
        super().__init__(name, options, **patterns)
        if self._blocks is not None:
            check_ring_blocks(self._blocks, options.get("layout", "contiguous"))
            steps = options.get("head_steps")
            self.head_steps = None if steps is None else as_int("head_steps", steps, minimum=1)
        self.ring = RingSettings.of(options)

    @shows_options
    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, return_lse: bool = False, **options: Unpack[RingArguments]
    ) -> Any:
        """Computes the attention.

        Args:
            query: (B, n, H, D), this process's rows in the order of the layout; float16, bfloat16, float32 or float64.
            key, value: (B, n, Hk, D), of the same positions; Hk a divisor of H.
            is_causal: a query sees keys at its own position and before.
            seq_len: N. With None the processes ask each other in every call. Either all processes give it, or none.
            key_padding_mask: (B, n) bool of this process's keys, True = padding.
            cu_seqlens: boundaries of packed documents in the whole sequence, int32 (documents + 1,), B = 1; equal on all processes.
            return_lse: also return the log-sum-exp of the scores.

        Returns:
            out (B, n, H, D) in query's dtype; with ``return_lse`` (out, lse (B, H, n)), lse in float32 (float64 for float64).

        Raises:
            ValueError, TypeError: the tensors do not fit together, or the calls differ between processes.
            RingError: a process died, stalled or made a different call.
            BackendUnavailable: no backend can compute this, or the named one cannot.
        """
        check_names("RingModule.forward", options, type(self).__name__)
        ring = self.ring.arguments()
        if self._blocks is not None:
            ring["head_steps"] = self.head_steps
        return self.function(query, key, value, **self._arguments(query), **ring, return_lse=return_lse, **options)
