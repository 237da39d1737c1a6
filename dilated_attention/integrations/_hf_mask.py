"""Masks of transformers without their N² entries: padding, causality, windows, packed documents; and the part of a process."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from dilated_attention.distributed.comm.group import members_of
from dilated_attention.distributed.sharding.layout import local_positions, shard_sequence
from dilated_attention.models.text import check_tokens
from dilated_attention.pattern.checks import shown
from dilated_attention.validation import not_a_tensor

# the way out that every model has: gpt-oss and Gemma 2, among others, have no "sdpa"
OF_TRANSFORMERS = 'attn_implementation="sdpa" (or "eager" where the model has no "sdpa")'

# inputs that have a value for each position
_OF_POSITIONS = ("labels", "shift_labels", "attention_mask", "position_ids", "token_type_ids", "seq_idx")

# names of mask functions in transformers.masking_utils; those that are made by a function keep their settings in closure variables
_CAUSAL = "causal_mask_function"
_BOTH_WAYS = "bidirectional_mask_function"
_AND = "and_masks.<locals>.and_mask"
_WINDOW = "sliding_window_overlay.<locals>.inner_mask"
_WINDOW_BOTH_WAYS = "sliding_window_bidirectional_overlay.<locals>.inner_mask"
_CHUNKS = "chunked_overlay.<locals>.inner_mask"
_PACKED = "packed_sequence_mask_function.<locals>.inner_mask"
_PACKED_POSITIONS = "remap_positions_for_packed_sequence.<locals>.inner_mask"


@dataclass(frozen=True, eq=False)
class KeyMask:
    """A layer's attention mask as its parts. ``AttentionMaskInterface`` makes it, and models pass it on to their layers unchanged.

    Args:
        num_keys, num_filled: keys that the layer passes, and those filled, from the first on; the others are the rest of a static cache.
        query_offset: index of the first query among the keys.
        key_offset: position in the sequence of the first key; above 0 in a sliding cache.
        window: (left, right) in positions, None for unbounded; None for no window.
        padding: (B, num_filled) bool, True = padding.
        cu_seqlens: bounds of packed documents in the B rows concatenated, int32.
        is_guess: compiled code cannot read the bounds, so each row of ``cu_seqlens`` may in fact be one document.
        seq_len: of rows that ``context_parallel`` has cut, the length of the whole sequence, in which ``cu_seqlens`` are bounds.
        empty: (B, Nq) bool, True = a query that sees nothing, whatever the other parts say: its row is 0.
        checked: tensors that were searched for documents already, and configs that were looked at, so that the later layers of a forward
            do not do so again.
    """

    num_keys: int
    num_filled: int
    query_offset: int
    key_offset: int
    is_causal: bool
    window: tuple[int | None, int | None] | None = None
    padding: torch.Tensor | None = None
    cu_seqlens: torch.Tensor | None = None
    is_guess: bool = False
    seq_len: int | None = None
    empty: torch.Tensor | None = None
    checked: list[Any] = dataclasses.field(default_factory=list)

    # with a static cache, generate() makes the mask before the forward, and transformers then checks whether it is already a mask
    ndim: ClassVar[int] = 4

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuses a model that adds the mask to scores itself. After a TypeError, torch's operators would try the other operand."""
        raise ValueError(_own_attention(getattr(func, "__name__", func)))

    def __getattr__(self, name: str) -> Any:
        """Refuses a model that reads its mask as a tensor, through ``mask.shape`` or ``mask.dtype``."""
        raise AttributeError(_own_attention(name))

    def __getitem__(self, index: Any) -> Any:
        raise ValueError(_own_attention(f"[{index}]"))

    def to(self, *args: Any, **kwargs: Any) -> KeyMask:
        padding, bounds = (None if x is None else x.to(*args, **kwargs) for x in (self.padding, self.cu_seqlens))
        return dataclasses.replace(self, padding=padding, cu_seqlens=bounds)

    def contiguous(self) -> KeyMask:
        return self


def _own_attention(what: Any) -> str:
    return (
        f"{what} of a KeyMask: this model computes its attention itself, or changes its mask, and cannot have another; "
        "expected a model that calls transformers' attention interface with the mask that it was given. "
        'Load it with attn_implementation="eager"'
    )


def key_mask(
    batch_size: int,
    q_length: Any = None,
    kv_length: Any = None,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Any = None,
    *,
    is_shared: bool = False,
    cache_position: torch.Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    config: Any = None,
    device: Any = None,
    **kwargs: Any,
) -> KeyMask:
    """Makes a ``KeyMask``: the function that ``AttentionMaskInterface`` calls, for transformers 4.57 (``cache_position``) to 5.x.

    ``attention_mask``: (B, keys seen) bool, True = real, shorter than the cache if the cache is static; or an existing KeyMask.
    ``is_shared``: processes share the sequence, so they must make the same call, whatever their own part of the mask holds.
    ``mask_function`` decides which pairs are kept: ValueError for any but transformers' own, or one that keeps others than causality, a
    window, padding and documents do.
    """
    if isinstance(attention_mask, KeyMask):
        return attention_mask
    if isinstance(q_length, torch.Tensor):
        # 4.57 passes cache_position here, as a positional argument
        cache_position = q_length
    num_keys, num_queries = kv_length, q_length if cache_position is None else cache_position.shape[0]
    query_offset = 0
    # read from a tensor only if necessary, because a compiled model cannot do it
    if num_queries != num_keys:
        query_offset = int(q_offset if cache_position is None else cache_position[0]) - kv_offset
    bounds = window = None
    # in compiled code, a module's functions have no __qualname__, and closures cannot be looked into
    kind = _CAUSAL if mask_function is None else getattr(mask_function, "__name__", "without a name")
    is_causal, is_compiling = kind == _CAUSAL, torch.compiler.is_compiling()
    if mask_function is not None and kind not in (_CAUSAL, _BOTH_WAYS):
        if is_compiling:
            chunk = getattr(config, "attention_chunk_size", None)
            if kind != "and_mask" or use_vmap:
                raise _unknown(f"the mask function {kind!r}")
            if local_size is not None and local_size == chunk:
                raise _unknown(f"chunks of {chunk} positions, inside a compiled model,")
            # transformers passes the first with two-sided masks alone; of several queries the last is false with packed rows alone
            is_causal, size, is_packed = "allow_is_bidirectional_skip" not in kwargs, local_size, not allow_is_causal_skip
        else:
            parts = _parts_of(mask_function, num_keys + kv_offset)
            is_causal, is_packed = _CAUSAL in parts, _PACKED in parts
            size = parts.get(_WINDOW, parts.get(_WINDOW_BOTH_WAYS))
        # transformers counts the query itself in a causal window, but not in a two-sided one
        window = None if size is None else (size - 1, 0) if is_causal else (size, size)
        if is_packed and num_queries == num_keys > 1:
            bounds = _bounds(mask_function, batch_size, num_keys, device)
    num_filled = query_offset + num_queries if is_causal else num_keys
    padding = None
    if attention_mask is not None:
        # as in transformers, positions beyond the mask are padding
        missing = num_filled + kv_offset - attention_mask.shape[-1]
        seen = attention_mask if missing <= 0 else torch.nn.functional.pad(attention_mask, (0, missing))
        real = seen[:, kv_offset : kv_offset + num_filled].bool()
        # read once per forward, so that layers without padding can use kernels that do not support it
        if is_shared or is_compiling or not bool(real.all()):
            padding = ~real
    return KeyMask(
        num_keys=num_keys,
        num_filled=num_filled,
        query_offset=query_offset,
        key_offset=kv_offset,
        is_causal=is_causal,
        window=window,
        padding=padding,
        cu_seqlens=bounds,
        is_guess=bounds is not None and is_compiling,
    )


def _parts_of(mask_function: Callable[..., Any], reach: int) -> dict[str, Any]:
    """Returns the known parts of an intersection of mask functions by name, each with its setting."""
    name = getattr(mask_function, "__qualname__", repr(mask_function))
    code, cells = getattr(mask_function, "__code__", None), getattr(mask_function, "__closure__", None)
    held = {} if code is None or cells is None else {x: cell.cell_contents for x, cell in zip(code.co_freevars, cells, strict=True)}
    if name in (_CAUSAL, _BOTH_WAYS, _PACKED):
        return {name: True}
    if name in (_WINDOW, _WINDOW_BOTH_WAYS):
        return {name: held["sliding_window"]}
    if name == _PACKED_POSITIONS:
        return _parts_of(held["mask_function"], reach)
    if name == _CHUNKS and reach <= held["chunk_size"]:
        # the whole sequence is in one chunk
        return {}
    if name == _AND:
        parts: dict[str, Any] = {}
        for part in held["mask_functions"]:
            for key, setting in _parts_of(part, reach).items():
                if parts.setdefault(key, setting) != setting:
                    raise _unknown(f"two windows, of {parts[key]} and {setting} positions")
        return parts
    raise _unknown(f"chunks of {held['chunk_size']} positions" if name == _CHUNKS else f"the mask function {name!r}")


def _unknown(what: str) -> ValueError:
    return ValueError(
        f"the model's attention mask keeps pairs by {what}; expected causality, a sliding window, padding and packed documents only. "
        f"Load this model with {OF_TRANSFORMERS}"
    )


def _bounds(mask_function: Callable[..., Any], batch_size: int, num_keys: int, device: Any) -> torch.Tensor | None:
    """Returns the bounds of documents, found by checking whether a position sees the one before it; None if every row is one document."""
    rows = torch.arange(batch_size, device=device)[:, None]
    positions = torch.arange(num_keys, device=device)[None]
    starts = ~mask_function(rows, rows.new_zeros(()), positions, (positions - 1).clamp(min=0)).expand(batch_size, num_keys)
    starts = (starts | (positions == 0)).flatten()
    total = batch_size * num_keys
    if torch.compiler.is_compiling():
        # the size must not depend on values, so there are empty documents at the end, which cost nothing
        where = torch.where(starts, torch.arange(total, device=device), total).sort().values
    else:
        where = starts.nonzero()[:, 0]
        if where.numel() == batch_size:
            return None
    return torch.cat([where, where.new_full((1,), total)]).to(torch.int32)


def document_starts(position_ids: torch.Tensor | None, seq_idx: torch.Tensor | None, real: torch.Tensor | None) -> torch.Tensor:
    """Returns where a document begins within a row, after another, (B, N) bool: at a position that is not above the one before, or at
    another value of ``seq_idx``, both (B, N) or (1, N), at least one given. Padding, False in ``real`` (B, N), says nothing and is passed
    over, and positions that leave numbers out go on."""
    told = [(is_new, x) for is_new, x in ((torch.le, position_ids), (torch.ne, seq_idx)) if x is not None]
    real = torch.ones_like(told[0][1], dtype=torch.bool) if real is None else real
    real, *values = torch.broadcast_tensors(real, *(x for _, x in told))
    # where the last token before each position is; -1 where there is none
    last = torch.where(real, torch.arange(real.shape[1], device=real.device), -1).cummax(1).values[:, :-1]
    starts = torch.zeros_like(real[:, 1:])
    for (is_new, _), x in zip(told, values, strict=True):
        starts = starts | is_new(x[:, 1:], x.gather(1, last.clamp(min=0)))
    return torch.nn.functional.pad(starts & (last >= 0) & real[:, 1:], (1, 0))


def mask_of_tensor(mask: torch.Tensor, batch: int, num_queries: int, num_keys: int, is_causal: bool, *, is_shared: bool = False) -> KeyMask:
    """Converts a mask that a caller, or the model itself, made to a ``KeyMask`` that keeps the same pairs.

    As in transformers' sdpa, a mask of four dimensions alone decides which pairs count: the layer adds neither causality nor its window;
    then ``is_causal``, the layer's, decides only where a mask can be read both ways. Beside a mask (B, Nk) the layer's causality stays.

    ``mask``: (B, Nk), (B, 1, 1, Nk) or (B, 1, Nq, Nk), of one row for all or of ``batch``: bool, True = seen; or a term added to the
    scores: 0, or −inf or the lowest number. ValueError for other values, or other pairs than causality, one window and padding keep.
    """
    shape = f"attention_mask {tuple(mask.shape)} {mask.dtype}"
    expected = (
        f"expected {num_keys} keys' padding, as bool or as 0 and −inf, (B, keys), (B, 1, 1, keys) or (B, 1, queries, keys). "
        f"Or {OF_TRANSFORMERS}"
    )
    is_alone = mask.ndim == 4
    if mask.ndim == 2:
        mask = mask[:, None, None, :]
    sizes = ((1, batch), (1,), (1, num_queries), (num_keys,))
    if mask.ndim != 4 or any(size not in allowed for size, allowed in zip(mask.shape, sizes, strict=True)):
        raise ValueError(f"{shape} for {batch} rows of {num_queries} queries and {num_keys} keys; {expected}")
    if mask.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{shape} needs a gradient, which no kernel here computes; {expected}")
    mask = mask[:, 0]
    offset = num_keys - num_queries
    seen = mask if mask.dtype is torch.bool else mask == 0
    if torch.compiler.is_compiling():
        if mask.dtype is not torch.bool or (seen.shape[1] != 1 and num_queries != 1):
            raise ValueError(f"{shape} inside a compiled model, where its values cannot be read; expected a bool mask of keys, or none")
        is_causal = is_causal and not (is_alone and num_queries > 1)
        return KeyMask(num_keys, num_keys, offset, 0, is_causal, padding=~seen[:, 0].expand(batch, num_keys))
    lowest = torch.finfo(mask.dtype).min / 2 if mask.is_floating_point() else 0
    if mask.dtype is not torch.bool and (lowest == 0 or not bool((seen | (mask <= lowest)).all())):
        raise ValueError(f"{shape} holds values that are added to scores; {expected}")
    band = _band_of(seen, offset)
    is_guarded = band is None and is_causal
    if is_guarded:
        # where softmax cannot handle empty rows, transformers makes them see everything, as only the last row of a causal mask does
        guards = seen.all(-1, keepdim=True)
        guards[:, -1] = False
        seen = seen & ~guards
        band = _band_of(seen, offset)
    unlike = ValueError(f"{shape} keeps other pairs than causality, one window and padding do; {expected}")
    if band is None:
        raise unlike
    left, right, highest, misses_last = band
    # where a side on the right is found, it tells causality; otherwise the layer does
    is_causal = right <= 0 if right is not None else is_causal and (highest <= 0 or not is_alone)
    if is_causal and (right is not None or num_queries == 1):
        # the last key that a query sees is its own; those after it are the rest of a static cache. Distances count from row i to key
        # i + offset, so with the own key at a distance of ``highest`` both the offset and the window's left side move
        offset, left = offset + highest, None if left is None else left + highest
    elif misses_last and offset > 0:
        # the keys that no query sees may be padding, or the rest of a static cache
        raise ValueError(f"{shape} does not say which of the keys are those of the {num_queries} queries; {expected}")
    if offset < 0 or (left is not None and left < 0):
        raise unlike
    num_filled = offset + num_queries if is_causal else num_keys
    keys = seen.any(1).expand(batch, num_keys)[:, :num_filled]
    empty = ~seen.any(-1).expand(batch, num_queries)
    has_padding, has_empty, has_real = torch.stack(
        [~keys.all(), empty.any(), (empty & keys[:, offset : offset + num_queries]).any()]
    ).tolist()
    # of a row that sees nothing, sdpa returns 0 with a mask of bool, else a mean of all values, which no kernel here computes. That is
    # without effect if the row is padding, whose own key no other row sees
    if has_real and (is_guarded or mask.dtype is not torch.bool):
        raise unlike
    return KeyMask(
        num_keys=num_keys,
        num_filled=num_filled,
        query_offset=offset,
        key_offset=0,
        is_causal=is_causal,
        window=None if left is None and (is_causal or right is None) else (left, 0 if is_causal else right),
        padding=~keys if has_padding or is_shared else None,
        empty=empty if has_empty else None,
    )


def _band_of(seen: torch.Tensor, offset: int) -> tuple[int | None, int | None, int, bool] | None:
    """Returns (left, right, highest, misses_last) of a mask (B, Nq or 1, Nk), or None if it keeps other pairs than such a band.

    Of the keys that any query sees, a query sees those from own − left to own + right, where own is the key at its own position; None for
    a side on which nothing is dropped. ``highest`` is the highest key − own that is seen; ``misses_last``: no query sees the last key.
    Rows that see nothing do not count.
    """
    num_queries, num_keys = seen.shape[1:]
    own = torch.arange(offset, offset + num_queries, dtype=torch.int32, device=seen.device)
    distance = torch.arange(num_keys, dtype=torch.int32, device=seen.device) - own[:, None]
    of_any = seen.any(0)
    low, high = distance.where(of_any, num_keys).min(), distance.where(of_any, -num_keys).max()
    dropped = (seen.any(1, keepdim=True) & seen.any(-1, keepdim=True) & ~seen).any(0)
    before, after = distance < low, distance > high
    facts = [(dropped & side).any() for side in (before, after, ~before & ~after)] + [of_any.any(), of_any[:, -1].any()]
    # one read from the device
    cut_left, cut_right, is_other, any_seen, sees_last, lowest, highest = torch.stack([*(x.long() for x in facts), low, high]).tolist()
    if is_other:
        return None
    if not any_seen:
        return None, None, 0, False
    return -lowest if cut_left else None, highest if cut_right else None, highest, not sees_last


def packed_bounds(of_queries: torch.Tensor | None, of_keys: torch.Tensor | None) -> torch.Tensor:
    """Returns the bounds of packed documents, int32, of which queries and keys must have the same."""
    same = of_queries is of_keys
    if not same and of_queries is not None and of_keys is not None and of_queries.shape == of_keys.shape:
        # in a compiled model values cannot be read, so only shapes are compared
        same = torch.compiler.is_compiling() or bool((of_queries == of_keys).all())
    if not same or of_queries is None:
        raise ValueError(
            f"cu_seq_lens_q is {of_queries} and cu_seq_lens_k is {of_keys}; expected equal bounds: "
            "packed documents have as many queries as keys"
        )
    return of_queries.to(torch.int32)


def shard_inputs(
    inputs: Mapping[str, Any], *, group: Any = None, mesh: Any = None, layout: str = "contiguous", ignore_index: int = -100
) -> dict[str, Any]:
    """Returns this process's shard of a model's inputs, for ``"ring_dilated"`` and ``"ring"``. Needs no communication.

    Every tensor whose second dimension is the sequence length N is sharded; ``position_ids`` are those in the whole sequence. With
    ``labels``, the targets are shifted before they are sharded, so that no process needs its neighbour's. The result then contains
    ``shift_labels`` and ``num_items_in_batch``, the number of targets of the whole sequence. The losses that the processes' causal language
    models compute with these then sum to the loss of the whole sequence, and so do their gradients. Models with other losses do not read
    ``num_items_in_batch``, or shift nothing: leave their labels out.

    Packed documents of one row are told by ``cu_seq_lens_q`` and ``cu_seq_lens_k``, by ``position_ids`` that begin again or by another
    ``seq_idx``, whatever mask stands beside them. The result has their bounds in the whole sequence as ``cu_seq_lens_q`` and ``_k``.

    Args:
        inputs: inputs of the whole sequence, equal on all processes; they must include ``input_ids`` or ``inputs_embeds`` (B, N, …).
        group, mesh, layout: the same as given to ``register``.
        ignore_index: the label of positions that do not count.

    Returns:
        A new dict to call the model with: ``model(**shard_inputs(inputs))``, (B, n, …).

    Raises:
        ValueError, TypeError: if neither ``input_ids`` nor ``inputs_embeds`` is given, labels, masks or positions are not of their shape,
            several rows hold packed documents, the mask holds other numbers than 0 and 1, or there are more processes than positions.
    """
    if group is not None and mesh is not None:
        raise ValueError("group and mesh are both given; a sequence is spread over one of them: pass group= or mesh=")
    place = mesh if group is None else group
    first = sequence_of(inputs)
    batch, length = first.shape[:2]
    if length < (size := members_of(place).size):
        raise ValueError(f"a sequence of {length} positions for {size} processes; expected at least one for each: drop it, or pad it")
    whole = dict(inputs)
    for name in _OF_POSITIONS:
        x, expected = whole.get(name), f"a value for each position, {(batch, length)}"
        if x is not None and not isinstance(x, torch.Tensor):
            raise not_a_tensor(name, x, expected)
        # masks of pairs and positions of images have more dimensions
        shapes = [(batch, length), *([(1, length)] if name == "position_ids" else [])]
        if x is not None and x.ndim < 3 and tuple(x.shape) not in shapes:
            raise ValueError(f"{name} has shape {tuple(x.shape)} beside a sequence of {(batch, length)}; expected {expected}")
    if whole.get("labels") is not None and whole.get("shift_labels") is None:
        whole["shift_labels"] = torch.nn.functional.pad(whole["labels"][:, 1:], (0, 1), value=ignore_index)
    if whole.get("shift_labels") is not None:
        whole.setdefault("num_items_in_batch", int((whole["shift_labels"] != ignore_index).sum()))
    if whole.get("position_ids") is None:
        whole.pop("position_ids", None)
    bounds = _bounds_of(whole, length)
    if bounds is not None:
        whole |= {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
    names = [name for name, x in whole.items() if isinstance(x, torch.Tensor) and x.ndim >= 2 and x.shape[1] == length]
    parts = shard_sequence(place, [whole[name] for name in names], [1] * len(names), layout=layout)
    whole |= dict(zip(names, parts, strict=True))
    if "position_ids" not in whole:
        positions = local_positions(place, length, layout=layout, device=first.device)
        whole["position_ids"] = positions.expand(batch, -1)
    if layout != "contiguous" and whole.get("attention_mask") is None:
        # otherwise transformers would interpret jumps of positions as packed documents
        whole["attention_mask"] = torch.ones_like(whole["position_ids"], dtype=torch.bool)
    return whole


def sequence_of(inputs: Mapping[str, Any]) -> torch.Tensor:
    """Returns the input whose length is the sequence's."""
    if not isinstance(inputs, Mapping):
        raise TypeError(f"inputs is {shown(inputs)} ({type(inputs).__name__}); expected a dict of what the model is called with")
    tokens: torch.Tensor | None = inputs.get("input_ids")
    first = inputs.get("inputs_embeds") if tokens is None else tokens
    if first is None:
        raise ValueError(
            f"inputs are {', '.join(inputs) or 'none'}; expected input_ids or inputs_embeds among them, whose length is the sequence's"
        )
    if tokens is not None:
        check_tokens("input_ids", first)
    elif not isinstance(first, torch.Tensor):
        raise not_a_tensor("inputs_embeds", first, "a tensor (batch, sequence, width)")
    elif first.ndim != 3:
        raise ValueError(f"inputs_embeds has shape {tuple(first.shape)}; expected (batch, sequence, width)")
    return first


def _bounds_of(whole: Mapping[str, Any], length: int) -> torch.Tensor | None:
    """Returns the bounds of packed documents, int32 (documents + 1,); None for one document a row."""
    # positions of images have three dimensions, and repeat
    key_mask, position_ids, seq_idx = (
        x if isinstance(x, torch.Tensor) and x.ndim == 2 else None for x in map(whole.get, ("attention_mask", "position_ids", "seq_idx"))
    )
    if key_mask is not None and bool(((key_mask != 0) & (key_mask != 1)).any()):
        raise ValueError(
            f"attention_mask {tuple(key_mask.shape)} holds other numbers than 0 and 1, of which transformers makes ones; expected 0 for "
            "padding, 1 for tokens, and packed documents told by position_ids that begin again, or by cu_seq_lens_q and cu_seq_lens_k"
        )
    if whole.get("cu_seq_lens_q") is not None or whole.get("cu_seq_lens_k") is not None:
        return packed_bounds(whole.get("cu_seq_lens_q"), whole.get("cu_seq_lens_k"))
    if position_ids is None and seq_idx is None:
        return None
    real = None if key_mask is None else key_mask.bool()
    starts = document_starts(position_ids, seq_idx, real)
    if whole.get("attention_mask") is None and position_ids is not None:
        # as transformers finds documents where there is no mask: positions that leave numbers out begin one, too
        starts[:, 1:] |= position_ids.diff(dim=1) != 1
    if not bool(starts.any()):
        return None
    if starts.shape[0] > 1:
        raise ValueError(
            f"position_ids or seq_idx begin anew in {starts.shape[0]} rows: packed documents are one row; expected (1, sum of lengths), as "
            "DataCollatorWithFlattening makes them"
        )
    # padding before the first token is no part of its document, whose segments begin there
    starts[0, 0 if real is None else real[0].int().argmax()] = True
    where = starts[0].nonzero()[:, 0]
    return torch.cat([where.new_zeros(1), where[where > 0], where.new_full((1,), length)]).to(torch.int32)
