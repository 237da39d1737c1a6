"""Padded batches: rows of unequal length are computed as packed documents, without their padding."""

from __future__ import annotations

from typing import Any

import torch
from typing_extensions import TypedDict

from dilated_attention import validation as check
from dilated_attention.functional.options import check_names


class PaddingOptions(TypedDict, total=False):
    """Which positions of a batch are padding; at most one of the two. A row is computed as its tokens alone: positions and segments count
    from its first token, wherever padding lies, and nothing is computed for padding. On a GPU the host waits for the mask.

    Args:
        attention_mask: (B, N) integers or bool, 1 = token, 0 = padding, as transformers' tokenizers make it.
        key_padding_mask: (B, N) bool, True = padding, as in nn.MultiheadAttention.
    """

    attention_mask: torch.Tensor | None
    key_padding_mask: torch.Tensor | None


DEFAULTS: dict[str, Any] = dict.fromkeys(PaddingOptions.__annotations__)

_WAYS_OUT = {
    "cache": "prefill rows one by one without padding, with cache.of(i), or call generate, which does so",
    "cu_seqlens": "packed documents have no padding: leave one of them out",
}


def padding_of(function: str, x: Any, options: PaddingOptions, **others: Any) -> torch.Tensor | None:
    """Returns which positions of x (B, N, …) are padding, bool (B, N); None without a mask. ``function``: the public one that has it;
    ``others``: its arguments that go with no mask."""
    check_names(function, options)
    masks: dict[str, Any] = {name: mask for name, mask in options.items() if mask is not None}
    if not masks:
        return None
    if len(masks) > 1:
        raise ValueError("attention_mask and key_padding_mask are given; they say the same of opposite values: leave one of them out")
    ((name, mask),) = masks.items()
    if not isinstance(x, torch.Tensor) or x.ndim < 2:
        raise ValueError(f"{name} is given, and no batch (B, N) that it could be of; rows of a list have no padding: leave it out")
    for other, way_out in _WAYS_OUT.items():
        if others.get(other) is not None:
            raise ValueError(f"{name} is given and {other}, too; {way_out}")
    if name == "attention_mask":
        if not isinstance(mask, torch.Tensor) or mask.is_floating_point():
            got = mask.dtype if isinstance(mask, torch.Tensor) else f"a {type(mask).__name__}"
            raise TypeError(f"attention_mask is {got}; expected a tensor of integers or bool, 1 = token and 0 = padding")
        way_out = "expected 1 = token and 0 = padding: documents of one row are told by cu_seqlens"
        check.refuse_where(mask.long() * (mask.long() - 1) != 0, f"attention_mask has other values than 0 and 1; {way_out}")
        mask = mask == 0
    check.check_key_padding_mask(mask, x, name)
    return mask  # type: ignore[no-any-return]


def rows_of(function: str, tokens: Any, options: PaddingOptions) -> Any:
    """Returns the rows of tokens (B, N) without padding, as a list of tensors (N_i,); tokens themselves without a mask."""
    padding = padding_of(function, tokens, options)
    return tokens if padding is None else [row[~hidden] for row, hidden in zip(tokens, padding, strict=True)]
