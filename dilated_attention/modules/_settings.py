"""What attention modules without parameters share: settings, their checks and their repr; and those of one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from dilated_attention import validation as check
from dilated_attention.backends import registry
from dilated_attention.functional import attention_map, attention_received
from dilated_attention.pattern import DilatedPattern
from dilated_attention.pattern.checks import MAX_HEADS, as_int, one_of

PATTERN_ARGUMENTS = ("segment_lengths", "dilation_rates", "head_offsets", "branch_heads", "tail")
# what a module shows of itself where it differs from the default
_DEFAULTS = {
    "window": None, "scale": None, "dropout": 0.0, "head_offsets": "cyclic", "branch_heads": "all", "tail": "mask", "mixture_grad": "exact",
    "deterministic": False, "backend": "auto", "precision": "native", "head_steps": None,
}  # fmt: skip


class KernelSettings(nn.Module):
    """Holds the arguments that every attention function has and that are fixed at construction. Subclasses add ``forward``.

    Args:
        given: the arguments of the public class by name, its ``locals()``; others are not read.
    """

    sinks: nn.Parameter | nn.UninitializedParameter | None
    # the function that ``forward`` calls
    function: ClassVar[Callable[..., Any]]

    def __init__(self, given: Mapping[str, Any]) -> None:
        super().__init__()
        # the head dimension is not known yet; only scale=None would need it
        self.scale = None if given["scale"] is None else check.check_scale(given["scale"], 1)
        self.dropout = check.check_probability("dropout", given["dropout"])
        self.deterministic = check.check_bool("deterministic", given["deterministic"])
        registry.check_name(given["backend"])
        self.backend: str = given["backend"]
        sinks, num_heads = given["sinks"], given["num_heads"]
        if num_heads is not None and not check.check_bool("sinks", sinks):
            raise ValueError(f"num_heads is {num_heads} without sinks, for which alone it is; give sinks=True, or leave it out")
        self.sinks = None
        if sinks:
            # like torch's lazy modules: the first call, or a loaded state, says how many heads there are
            lazy = nn.UninitializedParameter()
            heads = None if num_heads is None else as_int("num_heads", num_heads, minimum=1, maximum=MAX_HEADS)
            self.sinks = lazy if heads is None else nn.Parameter(torch.zeros(heads))
            self.register_load_state_dict_pre_hook(_make_loaded_sinks)

    def reset_parameters(self) -> None:
        """Sets the sinks to 0, if there are any."""
        if self.sinks is not None and not isinstance(self.sinks, nn.UninitializedParameter):
            nn.init.zeros_(self.sinks)

    def _sinks_for(self, query: Any) -> Any:
        """Returns the sinks, which are made here if the number of heads was not known before."""
        if isinstance(self.sinks, nn.UninitializedParameter) and isinstance(query, torch.Tensor) and query.ndim == 4:
            _make_sinks(self.sinks, (query.shape[2],))
        return self.sinks

    def _map_arguments(self, query: torch.Tensor) -> dict[str, Any]:
        """Returns the arguments that determine the attention weights: the pattern, the scale and the sinks."""
        return {"scale": self.scale, "sinks": self._sinks_for(query)}

    def _arguments(self, query: torch.Tensor) -> dict[str, Any]:
        """Returns the settings as arguments of ``function``."""
        dropout_p = self.dropout if self.training else 0.0
        return self._map_arguments(query) | {"dropout_p": dropout_p, "deterministic": self.deterministic, "backend": self.backend}

    def _shown(self) -> list[str]:
        """Returns what is shown first: the pattern."""
        return []

    def extra_repr(self) -> str:
        """The pattern, how the sequence is sharded, and every setting that differs from its default."""
        parts = self._shown()
        if ring := getattr(self, "ring", None):
            parts.append(ring.extra_repr())
        values = {**getattr(self, "_branches", {}), **vars(self)}
        parts += [f"{name}={values[name]!r}" for name, default in _DEFAULTS.items() if values.get(name, default) != default]
        return ", ".join(parts if self.sinks is None else [*parts, "sinks=True"])


def _make_loaded_sinks(module: KernelSettings, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Makes sinks of the size of those that are about to be loaded."""
    loaded = state.get(f"{prefix}sinks")
    if isinstance(module.sinks, nn.UninitializedParameter) and loaded is not None:
        _make_sinks(module.sinks, loaded.shape)


@torch.compiler.disable
def _make_sinks(sinks: nn.UninitializedParameter, shape: tuple[int, ...]) -> None:
    """Makes a parameter of zeros, as in the constructor, whatever modes are on: one of inference mode could never be trained."""
    with torch.inference_mode(False), torch._C._DisableFuncTorch(), _disable_current_modes():
        sinks.materialize(shape)
        nn.init.zeros_(sinks)


class LocalAttention(KernelSettings):
    """A module that takes projected queries, keys and values of whole sequences."""

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        is_causal: bool = False,
        key_padding_mask: torch.Tensor | None = None,
        cu_seqlens: torch.Tensor | None = None,
        query_offset: int = 0,
        return_lse: bool = False,
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
        return self.function(
            query,
            key,
            value,
            **self._arguments(query),
            is_causal=is_causal,
            cu_seqlens=cu_seqlens,
            key_padding_mask=key_padding_mask,
            query_offset=query_offset,
            return_lse=return_lse,
        )

    def attention_map(self, query: torch.Tensor, key: torch.Tensor, query_rows: Any, **options: Any) -> torch.Tensor:
        """Returns the attention weights (B, H, R, Nk) of chosen queries in a ``forward`` without dropout.

        Args:
            query, key: see ``forward``.
            query_rows: see ``dilated_attention.functional.attention_map``.
            options: of ``forward``: is_causal, key_padding_mask, cu_seqlens, query_offset; of that function: average_heads, lse, chunk.
        """
        return attention_map(query, key, query_rows=query_rows, **self._map_arguments(query), **options)

    def attention_received(self, query: torch.Tensor, key: torch.Tensor, **options: Any) -> torch.Tensor:
        """Returns the attention (B, H, Nk) that every key receives from all queries.

        Args:
            query, key: see ``forward``.
            options: of ``forward``: is_causal, key_padding_mask, cu_seqlens, query_offset; of
                ``dilated_attention.functional.attention_received``: query_weights, average_heads, dtype, backend. The module's own
                backend is not used, since it may not support ``dtype``.
        """
        return attention_received(query, key, **self._map_arguments(query), **options)


class DilatedSettings(KernelSettings):
    """Holds the arguments of ``dilated_attention`` that are fixed at construction; see ``DilatedAttention``. Subclasses add ``forward``."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        super().__init__(given)
        self._pattern = DilatedPattern(*(given[name] for name in PATTERN_ARGUMENTS))
        # as the pattern has made them, plain integers
        self._branches = {name: getattr(self._pattern, name) for name in PATTERN_ARGUMENTS}
        self.mixture_grad: str = given.get("mixture_grad", "exact")
        one_of("mixture_grad", self.mixture_grad, ("exact", "detached"))
        if given["sinks"] and self.mixture_grad == "detached":
            raise ValueError("sinks=True with mixture_grad='detached', which would give them no gradient; expected mixture_grad='exact'")

    @property
    def pattern(self) -> DilatedPattern:
        """The pattern: which positions attend to which. It can count its pairs and FLOPs and draw itself."""
        return self._pattern

    def _map_arguments(self, query: torch.Tensor) -> dict[str, Any]:
        return self._branches | super()._map_arguments(query)

    def _arguments(self, query: torch.Tensor) -> dict[str, Any]:
        return super()._arguments(query) | {"mixture_grad": self.mixture_grad}

    def _shown(self) -> list[str]:
        pattern = self._pattern
        return [f"segment_lengths={list(pattern.segment_lengths)}", f"dilation_rates={list(pattern.dilation_rates)}"]
