"""What every public function does (``attend``): it checks the arguments, makes the record of the call (``CallSettings``), and runs it.

A call like an earlier one is recognized by its arguments. Only what the record does not hold, such as masks, is checked again."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import Any

import torch

from dilated_attention import validation as check
from dilated_attention.backends import PRECISIONS, registry
from dilated_attention.distributed.comm.group import group_name_of, members_named
from dilated_attention.distributed.ring_pass import EXCHANGES, resolve_ring, why_no_heads
from dilated_attention.distributed.sharding.layout import Layout, layout_name
from dilated_attention.engine.blocks.selection import choose_blocks_op
from dilated_attention.engine.ops.bounds import own_bounds
from dilated_attention.engine.ops.definition import block_sparse_attention_op, block_sparse_dilated_attention_op, dilated_attention_op
from dilated_attention.engine.ops.resolve import CallInputs, find, remember, resolve
from dilated_attention.engine.ops.settings import CallSettings, checked_branches
from dilated_attention.engine.ops.transforms import is_eager
from dilated_attention.functional.options import Options, bias_tensors, check_bias, check_names, checked_softmax
from dilated_attention.pattern import BlockPattern
from dilated_attention.pattern.blocks.compose import spec_of_call
from dilated_attention.pattern.checks import as_int, as_int_tuple, one_of

# an internal option, with a name that is no identifier. With it ``attend`` does not run the call, but returns it with its inputs. Its value
# says whether the call needs gradients
RESOLVES = "resolves: needs_grad"


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
    """Runs a call of a public function and returns out, or (out, lse).

    Args:
        function: name of the public function, for messages.
        given: the options that the caller gave, a dict, which is changed.
        branches: (segment_lengths, dilation_rates), see ``branches_of``; None for a block pattern alone.
        blocks: the block pattern; None for branches alone.
        op: the custom op of a sharded call; None in one process.
        window: see ``CallSettings``.
        fixed: further options, which the public function sets.
    """
    q, k, v = autocast(q, k, v)
    padding, cu_seqlens, sinks = given.pop("key_padding_mask", None), given.pop("cu_seqlens", None), given.pop("sinks", None)
    bias = given.pop("bias", None)
    # getattr, since the bias may be of another type, which is refused below
    bias_inputs = () if bias is None else [x for x in (getattr(bias, "slopes", None), getattr(bias, "coordinates", None)) if x is not None]
    resolves = given.pop(RESOLVES, None)
    group = "" if op is None else group_name_of(given.pop("group", None), given.pop("mesh", None))
    if op is not None and isinstance(fixed["layout"], Layout):
        fixed["layout"] = fixed["layout"].name
    key, resolved = None, None
    has_masks = padding is not None or cu_seqlens is not None or sinks is not None or bias is not None
    eager = is_eager([q, k, v, *[x for x in (padding, cu_seqlens, sinks) if x is not None], *bias_inputs] if has_masks else [q, k, v])
    if eager:
        # a resolved call serves all lengths and batch sizes; N, which follows from that of a ring, is checked below
        has_length = op is not None and given.get("seq_len") is not None
        options_key = _options_key({**given, "seq_len": 0} if has_length else given, fixed)
        # not for a pattern that holds a function or a tensor, which the remembered call would keep alive
        if options_key is not None and (blocks is None or not blocks.is_bound_to_process):
            sizes = q.shape[2:], k.shape[2:], v.shape[2:]
            kinds = q.dtype, k.dtype, v.dtype, q.device, k.device, v.device, padding is None, sinks is None, getattr(bias, "kind", "")
            with_grad = needs_grad(q, k, v, sinks, *bias_inputs) if resolves is None else resolves
            key = function, branches, blocks, group, window, options_key, sizes, kinds, with_grad
            resolved = find(key, q.dtype)
    if resolved is None:
        check_names(function, given)
        options = Options(padding, cu_seqlens, sinks, window, bias=bias, group=group, **given, **fixed)
        settings = checked_settings(q, k, v, options, branches, blocks, is_sharded=op is not None)
        settings = settings if resolves is None else settings._replace(needs_grad=resolves)
        if eager:
            resolved = (resolve if op is None else resolve_ring)(q, k, padding, settings)
            if key is not None:
                remember(key, q.dtype, resolved)
    else:
        settings = resolved.settings
        if q.shape[0] != k.shape[0] or k.shape != v.shape:
            check.check_tensors(q, k, v)
        if op is not None:
            length = checked_length(q, k, given.get("seq_len"))
            if length != settings.seq_len:
                settings = settings._replace(seq_len=length)
                resolved = replace(resolved, settings=settings)
        elif settings.query_offset + q.shape[1] > k.shape[1]:
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
    # torch's default generator makes the seed reproducible under manual_seed, and activation checkpointing repeats it
    seed = torch.randint(2**62, (), dtype=torch.int64, device="cpu") if settings.dropout_p else None
    chosen = None
    if blocks is not None and blocks.is_chosen:
        chosen = choose_blocks_op(
            q.detach(), k.detach(), padding, cu_seqlens, settings.blocks, settings.is_causal, settings.scale, settings.query_offset
        )
    inputs = CallInputs(q, k, v, padding, cu_seqlens, seed, chosen, coordinates, slopes, sinks)
    if resolved is None:
        if op is None:
            block_op = block_sparse_attention_op if branches is None else block_sparse_dilated_attention_op
            op = dilated_attention_op if blocks is None else block_op
        out, lse, _ = op(*inputs, *settings.arguments())
    else:
        if cu_seqlens is not None and op is None:
            resolved = resolved.with_documents(cu_seqlens, k.shape[1], saves=True)
        if resolves is not None:
            return resolved, inputs
        out, lse = resolved(inputs)
    if not given.get("return_lse"):
        return out
    return out, lse.detach() if settings.detached else lse


# the types of options whose equal values mean equal calls
_PLAIN_TYPES = frozenset({str, int, float, bool, type(None)})


def _options_key(given: dict[str, Any], fixed: dict[str, Any]) -> Hashable:
    """Returns the options as a part of a call's key; None if equal options do not imply equal calls."""
    # offsets in lists are the one option that is hashed by its contents
    rows: Any = given.get("head_offsets")
    if type(rows) is list or type(rows) is tuple:
        rows, given = tuple([plain_ints(row) for row in rows]), {**given, "head_offsets": None}
        if None in rows:
            return None
    # with the types, since 1 == True would mix up two calls; a tensor's value may change
    values = (*given.values(), *fixed.values())
    types = tuple(map(type, values))
    return (tuple(given), values, types, rows) if _PLAIN_TYPES.issuperset(types) else None


def branches_of(segment_lengths: Any, dilation_rates: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns both as tuples of integers, which are hashable; they are checked further in ``checked_settings``."""
    lengths = plain_ints(segment_lengths) or as_int_tuple("segment_lengths", segment_lengths)
    return lengths, plain_ints(dilation_rates) or as_int_tuple("dilation_rates", dilation_rates)


def plain_ints(values: Any) -> tuple[int, ...] | None:
    """Returns a list or tuple of plain Python integers as a tuple; None for anything else, which ``as_int_tuple`` checks."""
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
    for name in ("is_causal", "return_lse", "deterministic"):
        check.check_bool(name, getattr(options, name))
    sharding, seq_len = checked_sharding(q, k, options, blocks) if is_sharded else ((), 0)
    checked = None
    if branches is not None:
        checked = checked_branches((*branches, options.head_offsets, options.branch_heads, options.tail), q.shape[2])
    one_of("mixture_grad", options.mixture_grad, ("exact", "detached"))
    one_of("precision", options.precision, PRECISIONS)
    scale = check.check_scale(options.scale, q.shape[3], q.dtype)
    query_offset = check.check_query_offset(options.query_offset, q.shape[1], k.shape[1])
    check.check_key_padding_mask(options.key_padding_mask, k)
    check.check_cu_seqlens(options.cu_seqlens, q, k)
    softmax = checked_softmax(options, q, k, scale)
    registry.check_name(options.backend)
    return CallSettings(
        branches=checked,
        blocks="" if blocks is None else spec_of_call(blocks),
        window=options.window,
        is_causal=options.is_causal,
        detached=options.mixture_grad == "detached",
        deterministic=options.deterministic,
        needs_grad=needs_grad(q, k, v, options.sinks, getattr(options.bias, "slopes", None)),
        backend=options.backend,
        precision=options.precision,
        sharding=sharding,
        scale=scale,
        query_offset=query_offset,
        seq_len=seq_len,
        **softmax,
    )


def place_in(group_name: str) -> tuple[int, int]:
    """Returns (rank, W) of this process in the named group; (0, 1) for "". To torch.compile, which cannot look up a group, it is a
    constant."""
    members = members_named(group_name)
    return members.rank, members.size


# what torch.compiler.assume_constant_result does (a test compares them), without importing the compiler, which would be half of this
# package's import time
place_in._dynamo_marked_constant = True  # type: ignore[attr-defined]


def checked_sharding(q: torch.Tensor, k: torch.Tensor, options: Options, blocks: BlockPattern | None) -> tuple[tuple[Any, ...], int]:
    """Checks the options that sharded calls alone have, and returns ``sharding`` and ``seq_len`` of ``CallSettings``."""
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
    length = checked_length(q, k, options.seq_len)
    if exchange == "all_to_all":
        reason = why_no_heads(q.shape[2], k.shape[2], place_in(options.group)[1], options.branch_heads)
        if reason is not None:
            raise ValueError(f"exchange={exchange!r}: {reason}; use exchange='all_gather', which does not divide the heads")
    return sharding, length


def checked_length(q: torch.Tensor, k: torch.Tensor, seq_len: Any) -> int:
    """Returns ``seq_len`` of a sharded call's ``CallSettings``."""
    length = -1 if seq_len is None else as_int("seq_len", seq_len, minimum=0)
    check.check_rows(q, k)
    return length


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
    # of the layouts with a one-word name these two are left
    layout_name(layout, ("contiguous", "zigzag"))


def needs_grad(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *others: Any) -> bool:
    """Whether the call needs gradients: they are enabled, and an input requires one. ``others``: sinks, slopes and coordinates, or whatever
    the caller gave as these."""
    if not torch.is_grad_enabled():
        return False
    return q.requires_grad or k.requires_grad or v.requires_grad or any(getattr(x, "requires_grad", False) for x in others)


def autocast(q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
    """Casts floating-point tensors to the autocast dtype, as torch's own functions do, if autocast is enabled; float64 stays."""
    # is_autocast_enabled raises for a device without autocast, such as meta
    if not isinstance(q, torch.Tensor) or q.device.type == "meta" or not torch.is_autocast_enabled(q.device.type):
        return q, k, v
    casts = [isinstance(x, torch.Tensor) and x.is_floating_point() and x.dtype is not torch.float64 for x in (q, k, v)]
    dtype = torch.get_autocast_dtype(q.device.type)
    return tuple([x.to(dtype) if cast else x for x, cast in zip((q, k, v), casts, strict=True)])
