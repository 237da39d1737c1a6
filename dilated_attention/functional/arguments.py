"""What every public function does: it checks its arguments once, makes the record of the call, and runs it. A call like an earlier one is
recognized by its arguments and not checked again, except for the masks."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

from dilated_attention import validation as check
from dilated_attention.backends import PRECISIONS, registry
from dilated_attention.distributed.comm.group import group_name_of, members_named
from dilated_attention.distributed.exchange.setup import EXCHANGES, why_no_heads
from dilated_attention.distributed.ring_pass import resolve_ring
from dilated_attention.distributed.sharding.layout import Layout, layout_name
from dilated_attention.engine.blocks.selection import choose_blocks_op
from dilated_attention.engine.ops.bounds import own_bounds
from dilated_attention.engine.ops.definition import block_sparse_attention_op, block_sparse_dilated_attention_op, dilated_attention_op
from dilated_attention.engine.ops.resolve import find, remember, resolve
from dilated_attention.engine.ops.resolve_blocks import resolve_blocks
from dilated_attention.engine.ops.settings import CallSettings, checked_branches
from dilated_attention.engine.ops.transforms import is_eager
from dilated_attention.functional.options import Options, bias_tensors, check_bias, check_names
from dilated_attention.pattern import MAX_LENGTH, BlockPattern
from dilated_attention.pattern.checks import as_int, as_int_tuple, one_of

# an option that no caller can spell: whether the call, which is returned with its inputs in place of its result, needs gradients
RESOLVES = "resolves: needs_grad"
# the branches of dense attention, with head_offsets="zero": a segment longer than any sequence, which plans clamp
DENSE = ((MAX_LENGTH,), (1,))


def attend(
    function: str,
    given: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    branches: tuple[Any, Any] | None = None,
    blocks: BlockPattern | None = None,
    op: Any = None,
    window: tuple[int, ...] = (),
    **fixed: Any,
) -> Any:
    """Returns out, or (out, lse), of a call of the public ``function``. ``given``: the caller's options, a dict, which is changed;
    ``fixed``: of that function; ``branches``: see ``branches_of``; ``op``: that of a sharded call; ``window``: see ``CallSettings``."""
    q, k, v = autocast(q, k, v)
    padding, cu_seqlens, sinks = given.pop("key_padding_mask", None), given.pop("cu_seqlens", None), given.pop("sinks", None)
    bias = given.pop("bias", None)
    # None where the bias is of another type, which is refused below
    of_bias = () if bias is None else [x for x in (getattr(bias, "slopes", None), getattr(bias, "coordinates", None)) if x is not None]
    resolves = given.pop(RESOLVES, None)
    group = "" if op is None else group_name_of(given.pop("group", None), given.pop("mesh", None))
    if op is not None and isinstance(fixed["layout"], Layout):
        fixed["layout"] = fixed["layout"].name
    key, known = None, None
    has_masks = padding is not None or cu_seqlens is not None or sinks is not None or bias is not None
    eager = is_eager([q, k, v, *[x for x in (padding, cu_seqlens, sinks) if x is not None], *of_bias] if has_masks else [q, k, v])
    if eager:
        options_key = _options_key(given, fixed)
        # the record of a pattern that holds a function or a tensor would keep it alive
        if options_key is not None and (blocks is None or not blocks.lives_here):
            # in one process a record serves calls of all lengths
            sizes = (q.shape[2:], k.shape[2:], v.shape[2:]) if op is None else (q.shape, k.shape, v.shape)
            tensors = q.dtype, k.dtype, v.dtype, q.device, k.device, v.device, padding is None, sinks is None, getattr(bias, "kind", "")
            with_grad = needs_grad(q, k, v, sinks, *of_bias) if resolves is None else resolves
            key = function, branches, blocks, group, window, options_key, sizes, tensors, with_grad
            known = find(key, q.dtype)
    if known is None:
        check_names(function, given)
        options = Options(padding, cu_seqlens, sinks, window, bias=bias, group=group, **given, **fixed)
        settings = checked_settings(q, k, v, options, branches, blocks, is_sharded=op is not None)
        settings = settings if resolves is None else settings._replace(needs_grad=resolves)
        if eager:
            resolved = resolve_ring if op is not None else resolve if blocks is None else resolve_blocks
            known = resolved(q, k, padding, settings)
            if key is not None:
                remember(key, q.dtype, known)
    else:
        settings = known.settings
        if q.shape[0] != k.shape[0] or k.shape != v.shape or settings.query_offset + q.shape[1] > k.shape[1]:
            check.check_tensors(q, k, v)
            check.check_query_offset(settings.query_offset, q.shape[1], k.shape[1])
        if blocks is not None:
            blocks.check_batch(q.shape[0])
        if has_masks:
            check.check_key_padding_mask(padding, k)
            check.check_cu_seqlens(cu_seqlens, q, k)
            check.check_sinks(sinks, q)
            check_bias(bias, q, k)
    coordinates, slopes = (None, None) if bias is None else bias_tensors(bias, q, k)
    if cu_seqlens is not None:
        cu_seqlens = own_bounds(cu_seqlens, eager=eager)
    # from torch's default generator: reproducible under manual_seed, and repeated by activation checkpointing
    seed = torch.randint(2**62, (), dtype=torch.int64) if settings.dropout_p else None
    chosen = None
    if blocks is not None and blocks.is_chosen:
        chosen = choose_blocks_op(
            q.detach(), k.detach(), padding, cu_seqlens, settings.blocks, settings.is_causal, settings.scale, settings.query_offset
        )
    if known is None:
        if op is None:
            of_blocks = block_sparse_attention_op if branches is None else block_sparse_dilated_attention_op
            op = dilated_attention_op if blocks is None else of_blocks
        out, lse, _ = op(q, k, v, padding, cu_seqlens, seed, chosen, coordinates, slopes, sinks, *settings.arguments())
    else:
        if cu_seqlens is not None and op is None:
            known = known.with_documents(cu_seqlens, k.shape[1], saves=True)
        if resolves is not None:
            return known, (q, k, v, padding, cu_seqlens, seed, chosen, coordinates, slopes, sinks)
        out, lse = known(q, k, v, padding, cu_seqlens, seed, chosen, coordinates, slopes, sinks)
    if not given.get("return_lse"):
        return out
    return out, lse.detach() if settings.detached else lse


_PLAIN_TYPES = frozenset({str, int, float, bool, type(None)})


def _options_key(given: dict[str, Any], fixed: dict[str, Any]) -> Hashable:
    """Returns the options as a part of a call's key. None where equal values do not imply equal calls."""
    rows: Any = given.get("head_offsets")
    if type(rows) is list or type(rows) is tuple:
        rows, given = tuple([plain_ints(row) for row in rows]), {**given, "head_offsets": None}
        if None in rows:
            return None
    # 1 == True would mix up two calls, and a tensor's value may change
    values = (*given.values(), *fixed.values())
    types = tuple(map(type, values))
    return (tuple(given), values, types, rows) if _PLAIN_TYPES.issuperset(types) else None


def branches_of(segment_lengths: Any, dilation_rates: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    lengths = plain_ints(segment_lengths) or as_int_tuple("segment_lengths", segment_lengths)
    return lengths, plain_ints(dilation_rates) or as_int_tuple("dilation_rates", dilation_rates)


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
    options: Options,
    branches: tuple[Any, Any] | None = None,
    blocks: BlockPattern | None = None,
    *,
    is_sharded: bool = False,
) -> CallSettings:
    """Checks all arguments of a call, named as in ``attend``, and returns its record."""
    check.check_tensors(q, k, v)
    if blocks is not None:
        blocks.check_batch(q.shape[0])
    sharding, seq_len = checked_sharding(q, k, options, blocks) if is_sharded else ((), 0)
    of_branches = options.head_offsets, options.branch_heads, options.tail
    plain = None if branches is None else checked_branches((*branches, *of_branches), q.shape[2])
    one_of("mixture_grad", options.mixture_grad, ("exact", "detached"))
    one_of("precision", options.precision, PRECISIONS)
    scale = check.check_scale(options.scale, q.shape[3], q.dtype)
    for name in ("is_causal", "return_lse", "deterministic"):
        check.check_bool(name, getattr(options, name))
    dropout_p = check.check_probability("dropout_p", options.dropout_p)
    query_offset = check.check_query_offset(options.query_offset, q.shape[1], k.shape[1])
    check.check_key_padding_mask(options.key_padding_mask, k)
    check.check_cu_seqlens(options.cu_seqlens, q, k)
    check.check_sinks(options.sinks, q)
    if options.sinks is not None and options.mixture_grad == "detached":
        raise ValueError(
            "sinks are given with mixture_grad='detached', which lets no gradient reach the weights that sinks change; "
            "expected mixture_grad='exact', or no sinks"
        )
    check_bias(options.bias, q, k)
    if options.bias is not None and options.softcap is not None:
        raise ValueError(f"bias is given with softcap {options.softcap}; expected one of them: scores are capped or have a bias")
    registry.check_name(options.backend)
    return CallSettings(
        branches=plain,
        blocks="" if blocks is None else blocks.spec(),
        window=options.window,
        is_causal=options.is_causal,
        detached=options.mixture_grad == "detached",
        deterministic=options.deterministic,
        needs_grad=needs_grad(q, k, v, options.sinks, getattr(options.bias, "slopes", None)),
        backend=options.backend,
        precision=options.precision,
        has_sinks=options.sinks is not None,
        bias=getattr(options.bias, "kind", ""),
        softcap=check.check_softcap(options.softcap, scale, q.dtype),
        sharding=sharding,
        scale=scale,
        dropout_p=dropout_p,
        query_offset=query_offset,
        seq_len=seq_len,
    )


def place_in(group_name: str) -> tuple[int, int]:
    """Returns (rank, W) in the named group; (0, 1) for "". It is a constant to torch.compile, which cannot look up a group."""
    members = members_named(group_name)
    return members.rank, members.size


# what torch.compiler.assume_constant_result does (a test compares them), without the compiler, half of this package's import time
place_in._dynamo_marked_constant = True  # type: ignore[attr-defined]


def checked_sharding(q: torch.Tensor, k: torch.Tensor, options: Options, blocks: BlockPattern | None) -> tuple[tuple[Any, ...], int]:
    """Checks what sharded calls have in addition, and returns ``sharding`` and ``seq_len`` of ``CallSettings``."""
    if blocks is None:
        layout_name(options.layout)
    else:
        check_ring_blocks(blocks, options.layout)
    exchange = options.exchange
    one_of("exchange", exchange, ("auto", *EXCHANGES))
    if options.ranks_per_node is not None:
        as_int("ranks_per_node", options.ranks_per_node, minimum=1)
    steps = 0 if options.head_steps is None else as_int("head_steps", options.head_steps, minimum=1)
    lse_grad = options.return_lse and options.mixture_grad == "exact"
    sharding = options.group, options.layout, exchange, check.check_timeout(options.timeout), lse_grad, steps
    seq_len = -1 if options.seq_len is None else as_int("seq_len", options.seq_len, minimum=0)
    if exchange == "all_to_all":
        reason = why_no_heads(q.shape[2], k.shape[2], place_in(options.group)[1], options.branch_heads)
        if reason is not None:
            raise ValueError(f"exchange={exchange!r}: {reason}; use exchange='all_gather', which does not divide the heads")
    check.check_rows(q, k)
    return sharding, seq_len


def check_ring_blocks(pattern: BlockPattern, layout: Any) -> None:
    """Refuses a pattern that shapes alone do not determine, and a layout whose processes do not hold runs of positions."""
    if pattern.is_chosen:
        raise ValueError(
            f"pattern is {pattern!r}, which is chosen by content; the processes of a ring find what to exchange from the pattern alone: "
            "use a pattern that is determined by shapes, or block_sparse_attention on one process"
        )
    if isinstance(layout, str) and layout == "striped":
        raise ValueError(
            "layout is 'striped', which spreads every block over all processes, so that each would need all keys; use 'contiguous', "
            "'zigzag' or balanced_layout(pattern, seq_len, world_size)"
        )
    # the layouts with a one-word name
    layout_name(layout, ("contiguous", "zigzag"))


def needs_grad(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *others: Any) -> bool:
    """``others``: sinks, slopes and whatever else was given in their place, or None."""
    if not torch.is_grad_enabled():
        return False
    return q.requires_grad or k.requires_grad or v.requires_grad or any(getattr(x, "requires_grad", False) for x in others)


def autocast(q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
    """Casts the tensors to the autocast dtype if autocast is enabled."""
    # is_autocast_enabled raises for a device without autocast, such as meta
    if not isinstance(q, torch.Tensor) or q.device.type == "meta" or not torch.is_autocast_enabled(q.device.type):
        return q, k, v
    casts = [isinstance(x, torch.Tensor) and x.is_floating_point() and x.dtype is not torch.float64 for x in (q, k, v)]
    dtype = torch.get_autocast_dtype(q.device.type)
    return tuple([x.to(dtype) if cast else x for x, cast in zip((q, k, v), casts, strict=True)])
