"""What every public function does: it checks its arguments once, makes the record of the call, and runs it.

A call like an earlier one is recognized by its arguments and not checked again, except for the masks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch

from dilated_attention import validation as check
from dilated_attention.backends import PRECISIONS, registry
from dilated_attention.engine.blocks.selection import choose_blocks_op
from dilated_attention.engine.ops import flops  # noqa: F401  registers the formulas of the ops
from dilated_attention.engine.ops.attention_ops import block_sparse_attention_op, block_sparse_dilated_attention_op, dilated_attention_op
from dilated_attention.engine.ops.bounds import own_bounds
from dilated_attention.engine.ops.eager import is_eager
from dilated_attention.engine.ops.resolve import ResolvedCall, find, remember, resolve
from dilated_attention.engine.ops.resolve_blocks import resolve_blocks
from dilated_attention.engine.ops.settings import CallSettings, checked_branches
from dilated_attention.pattern import MAX_LENGTH, BlockPattern
from dilated_attention.pattern.checks import one_of

# a segment longer than any sequence; plans clamp it, so a pattern with one such branch is dense attention
WHOLE_SEQUENCE = MAX_LENGTH
# the branches of dense attention: segment_lengths, dilation_rates, head_offsets, branch_heads, tail
DENSE = ((WHOLE_SEQUENCE,), (1,), "zero", "all", "mask")
# key_padding_mask, cu_seqlens and sinks
Masks = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


class Options(NamedTuple):
    """The options that all public functions share, as the caller gave them. ``strategy``: see ``CallSettings``."""

    is_causal: bool
    return_lse: bool
    deterministic: bool
    query_offset: int
    dropout_p: float
    scale: float | None
    backend: str
    precision: str = "native"
    mixture_grad: str = "exact"
    strategy: str = "auto"
    softcap: float | None = None


class Ring(NamedTuple):
    """What a call on a sharded sequence has in addition.

    Args:
        op: its op.
        resolve: see ``resolve``.
        checked: checks ``given``, and returns ``sharding`` and ``seq_len`` of ``CallSettings``.
        given: the options that only such calls have, as the caller gave them; they are part of the call's key.
    """

    op: Any
    resolve: Callable[..., ResolvedCall]
    checked: Callable[..., tuple[tuple[Any, ...], int]]
    given: tuple[Any, ...]


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    masks: Masks,
    branches: tuple[Any, ...] | None,
    blocks: BlockPattern | None,
    window: tuple[int, ...],
    options: Options,
    ring: Ring | None = None,
) -> Any:
    """Returns out, or (out, lse), of a call.

    Args:
        branches: segment_lengths and dilation_rates as tuples of integers, head_offsets, branch_heads and tail; None without branches.
        blocks: the block pattern, or None.
        window: see ``CallSettings``.
        ring: of a call on a sharded sequence; None in one process.
    """
    q, k, v = autocast(q, k, v)
    key_padding_mask, cu_seqlens, sinks = masks
    key, known, settings = None, None, None
    eager = is_eager([q, k, v, *[x for x in masks if x is not None]])
    if eager:
        key = _key(q, k, v, key_padding_mask, sinks, branches, blocks, window, options)
        if ring is not None and key is not None:
            # 1 == True, and a value of another type may not be hashable
            types = tuple(map(type, ring.given))
            key = (key, ring.given, types) if _PLAIN_TYPES.issuperset(types) else None
        known = None if key is None else find(key, q.dtype)
    if known is None:
        given_to = () if ring is None else ring.checked(q, k, v, branches, window, options, ring.given)
        settings = checked_settings(q, k, v, masks, branches, blocks, window, options, *given_to)
        if eager:
            of_one_process = resolve if blocks is None else resolve_blocks
            known = (of_one_process if ring is None else ring.resolve)(q, k, key_padding_mask, settings)
            if key is not None:
                remember(key, q.dtype, known)
    else:
        if key_padding_mask is not None:
            check.check_key_padding_mask(key_padding_mask, k)
        if cu_seqlens is not None:
            check.check_cu_seqlens(cu_seqlens, q, k)
        if sinks is not None:
            check.check_sinks(sinks, q)
    if cu_seqlens is not None:
        cu_seqlens = own_bounds(cu_seqlens, eager=eager)
    seed = draw_seed(options.dropout_p) if options.dropout_p else None
    kept = None
    if blocks is not None and blocks.is_chosen:
        given = settings if known is None else known.settings
        assert given is not None
        kept = choose_blocks_op(
            q.detach(), k.detach(), key_padding_mask, cu_seqlens, given.blocks, given.is_causal, given.scale, given.query_offset
        )
    if known is None:
        assert settings is not None
        of_blocks = block_sparse_attention_op if branches is None else block_sparse_dilated_attention_op
        op = ring.op if ring is not None else dilated_attention_op if blocks is None else of_blocks
        out, lse, _ = op(q, k, v, key_padding_mask, cu_seqlens, seed, kept, sinks, *settings.arguments())
    else:
        if cu_seqlens is not None and ring is None:
            known = known.with_documents(cu_seqlens, k.shape[1], saves=True)
        out, lse = known(q, k, v, key_padding_mask, cu_seqlens, seed, kept, sinks)
    if not options.return_lse:
        return out
    return out, lse.detach() if options.mixture_grad == "detached" else lse


_PLAIN_TYPES = frozenset({str, int, float, bool, type(None)})
_NUMBER_OR_NONE = (int, float, type(None))
# the types of the options in a key: 1 == True would mix up two calls, and a tensor's value may change
_OPTION_TYPES = frozenset(
    itertools.product((bool,), (bool,), (bool,), (int,), (int, float), _NUMBER_OR_NONE, (str,), (str,), (str,), (str,), _NUMBER_OR_NONE)
)


def _key(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    key_padding_mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    branches: tuple[Any, ...] | None,
    blocks: BlockPattern | None,
    window: tuple[int, ...],
    options: Options,
) -> Hashable:
    """Returns the key of a call: all its arguments but the values of masks and sinks. None where equal values do not imply equal calls."""
    if tuple(map(type, options)) not in _OPTION_TYPES:
        return None
    if branches is not None:
        lengths, rates, head_offsets, branch_heads, tail = branches
        if type(head_offsets) is not str:
            if type(head_offsets) not in (list, tuple):
                return None
            head_offsets = tuple([plain_ints(row) for row in head_offsets])
            if None in head_offsets:
                return None
        if type(branch_heads) is not str or type(tail) is not str:
            return None
        branches = lengths, rates, head_offsets, branch_heads, tail
    # the record of a pattern that holds a function or a tensor would keep it alive
    if blocks is not None and blocks.lives_here:
        return None
    tensors = q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device, key_padding_mask is None
    return branches, blocks, window, options, tensors, sinks is None, needs_grad(q, k, v, sinks)


def plain_ints(values: Any) -> tuple[int, ...] | None:
    """Returns a list or tuple of plain Python integers, which need no checks, as a tuple; None for anything else."""
    if type(values) is not tuple and type(values) is not list:
        return None
    for value in values:
        if type(value) is not int:
            return None
    return tuple(values)


def checked_settings(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    masks: Masks,
    branches: tuple[Any, ...] | None,
    blocks: BlockPattern | None,
    window: tuple[int, ...],
    options: Options,
    sharding: tuple[Any, ...] = (),
    seq_len: int = 0,
) -> CallSettings:
    """Checks all arguments of a call, named as in ``attend`` and ``CallSettings``, and returns its record."""
    check.check_tensors(q, k, v)
    if blocks is not None:
        blocks.check_batch(q.shape[0])
    if sharding:
        check.check_rows(q, k)
    plain = None if branches is None else checked_branches(branches, q.shape[2])
    one_of("mixture_grad", options.mixture_grad, ("exact", "detached"))
    one_of("precision", options.precision, PRECISIONS)
    scale = check.check_scale(options.scale, q.shape[3], q.dtype)
    for name in ("is_causal", "return_lse", "deterministic"):
        check.check_bool(name, getattr(options, name))
    dropout_p = check.check_probability("dropout_p", options.dropout_p)
    query_offset = check.check_query_offset(options.query_offset, q.shape[1], k.shape[1])
    check.check_key_padding_mask(masks[0], k)
    check.check_cu_seqlens(masks[1], q, k)
    check.check_sinks(masks[2], q)
    if masks[2] is not None and options.mixture_grad == "detached":
        raise ValueError(
            "sinks are given with mixture_grad='detached', which lets no gradient reach the weights that sinks change; "
            "expected mixture_grad='exact', or no sinks"
        )
    registry.check_name(options.backend)
    return CallSettings(
        branches=plain,
        blocks="" if blocks is None else blocks.spec(),
        window=window,
        is_causal=options.is_causal,
        detached=options.mixture_grad == "detached",
        deterministic=options.deterministic,
        needs_grad=needs_grad(q, k, v, masks[2]),
        backend=options.backend,
        precision=options.precision,
        strategy=options.strategy,
        has_sinks=masks[2] is not None,
        softcap=check.check_softcap(options.softcap, scale, q.dtype),
        sharding=sharding,
        scale=scale,
        dropout_p=dropout_p,
        query_offset=query_offset,
        seq_len=seq_len,
    )


def draw_seed(dropout_p: float) -> torch.Tensor | None:
    """Draws the dropout seed of a call."""
    # from torch's default generator: reproducible under manual_seed, and repeated by activation checkpointing
    return torch.randint(2**62, (), dtype=torch.int64) if dropout_p > 0 else None


def needs_grad(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None) -> bool:
    of_sinks = sinks is not None and sinks.requires_grad
    return torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad or of_sinks)


def autocast(q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
    """Casts the tensors to the autocast dtype if autocast is enabled."""
    # is_autocast_enabled raises for a device without autocast, such as meta
    if not isinstance(q, torch.Tensor) or q.device.type == "meta" or not torch.is_autocast_enabled(q.device.type):
        return q, k, v

    def cast(x: Any) -> Any:
        if isinstance(x, torch.Tensor) and x.is_floating_point() and x.dtype is not torch.float64:
            return x.to(torch.get_autocast_dtype(x.device.type))
        return x

    return cast(q), cast(k), cast(v)
