"""The attention weights of chosen queries, and how much every key receives from all queries, without all N² weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from typing_extensions import Unpack

from dilated_attention import validation as check
from dilated_attention.backends.base import accumulation_dtype
from dilated_attention.backends.mask_convert import repeat_heads
from dilated_attention.engine.ops.bounds import bounds_of, document_ranges
from dilated_attention.engine.ops.prepare import without_autocast
from dilated_attention.engine.ops.settings import DENSE
from dilated_attention.engine.ops.transforms import refuse_transforms
from dilated_attention.functional.arguments import attend, autocast, checked_settings
from dilated_attention.functional.calls import checked_pattern
from dilated_attention.functional.options import DEFAULTS, BranchOptions, MapOptions, Options, check_names, shows_options
from dilated_attention.pattern import BlockPattern, DilatedPattern, TopBlocks
from dilated_attention.pattern.checks import as_int, as_int_tuple, differs, one_of, shown

# keys scored at a time, and the number of scores that a chunk of rows may hold (64 MiB in float32)
CHUNK = 32768
SCORES_AT_ONCE = 2**24
# the alternative named when torch.func transforms an inspection function
WAY_OUT = (
    "pass q.detach() and k.detach() outside of vmap, in one call for the whole batch; "
    "for derivatives of weights at small N take the softmax of plain scores under the pattern's dense_mask(N, N, H)"
)


@shows_options
@torch.no_grad()
def attention_map(
    q: torch.Tensor, k: torch.Tensor, segment_lengths: Any = None, dilation_rates: Any = None, *, query_rows: Any, pattern: Any = None,
    average_heads: bool = False, lse: torch.Tensor | None = None, chunk: int | None = None, **options: Unpack[MapOptions],
) -> torch.Tensor:  # fmt: skip
    """Returns the exact weights with which chosen queries attend to every key: rows of the attention matrix.

        p_h(i, j) = m_h(i,j) e^{s_ij} / Σ_j' m_h(i,j') e^{s_ij'},    s_ij = scale · q_i·k_j

    so that out_h(i) = Σ_j p_h(i,j) v_j is what attention returns with the same arguments. With ``segment_lengths`` and
    ``dilation_rates``, m is that of ``dilated_attention``; with ``pattern``, that of ``block_sparse_attention``; with both, their sum
    (``block_sparse_dilated_attention``); with neither, 1 (``attention``). The time is that of scoring R·N pairs; the memory is that of
    the result and of one ``chunk``. This is for inspection: it has no gradient.

    Args:
        q: queries (B, Nq, H, D), of which only ``query_rows`` are read (a content-chosen pattern reads all of them).
        k: keys (B, Nk, Hk, D); Hk divides H.
        segment_lengths, dilation_rates: see ``dilated_attention``.
        query_rows: R rows of q, counted from 0 (in the packed sequence if documents are packed): integers, a tensor of them, one
            integer, or ``"cls"`` for row 0, or for the first row of each document with ``cu_seqlens``.
        pattern: see ``block_sparse_attention``.
        average_heads: return the mean over heads; the maps of the single heads are never all in memory.
        lse: the log-sum-exps (B, H, Nq) from ``return_lse=True``. They save computing those of the chosen rows: half the time.
            With ``sinks`` they must be of a call with them.
        chunk: keys scored at a time; None for 32768.
        options: is_causal, scale, cu_seqlens, key_padding_mask, sinks, head_offsets, branch_heads, tail, query_offset: see
            ``functional.MapOptions``.

    Returns:
        (B, H, R, Nk), or (B, R, Nk) with ``average_heads``. It is computed and returned in float32 (float64 for float64) whatever q's dtype
        and autocast are, from q and k as attention would read them. A row sums to 1 over the keys, or to 0 where it has no key: at a
        position that no branch of its head selects, or whose keys are all masked. With ``tail="zero_keys"`` the zero keys, which have no
        position, have the weight 1 minus that sum; so has a sink. Keys of other documents have weight 0.

    Raises:
        ValueError, TypeError: bad input, or rows that q does not have.
        NotImplementedError: a torch.func transform or forward-mode AD asks for a derivative or maps over the call.

    >>> weights = attention_map(
    ...     q, k, [1024, 4096], [1, 4], query_rows="cls", average_heads=True)
    >>> weights[0, 0]  # (N,)
    """
    check_names("attention_map", options)
    given = Options(**options)
    cu_seqlens, key_padding_mask, sinks = given.cu_seqlens, given.key_padding_mask, given.sinks
    refuse_transforms("attention_map", WAY_OUT, q, k, lse, sinks)
    q, k, _ = autocast(q, k, k)
    settings = checked_settings(q, k, k, given)
    is_causal, scale, query_offset = settings.is_causal, settings.scale, settings.query_offset
    check.check_bool("average_heads", average_heads)
    B, Nq, H, _ = q.shape
    Nk = k.shape[1]
    branches, blocks = checked_patterns(segment_lengths, dilation_rates, pattern, given, q)
    documents = ((0, Nk),) if cu_seqlens is None else document_ranges(bounds_of(cu_seqlens), Nk)
    rows = _checked_rows(query_rows, Nq, cu_seqlens, [start for start, _ in documents])
    _check_shape("lse", lse, (B, H, Nq), "(batch, heads, queries)")
    step = CHUNK if chunk is None else as_int("chunk", chunk, minimum=1)
    wide = accumulation_dtype(q.dtype)
    result = q.new_zeros((B, len(rows), Nk) if average_heads else (B, H, len(rows), Nk), dtype=wide)
    rows_at_once = max(1, SCORES_AT_ONCE // max(1, B * H * min(step, Nk)))
    with without_autocast(q):
        for start, end in documents:
            inside = [index for index, row in enumerate(rows) if start <= query_offset + row < end]
            if not inside:
                continue
            # the queries of a packed document are at the same rows as its keys
            queries = q[:, start:end]
            padding = None if key_padding_mask is None else key_padding_mask[:, start:end]
            keys = k[:, start:end]
            kept: tuple[BlockPattern, ...] = () if blocks is None else (blocks,)
            if isinstance(blocks, TopBlocks):
                # chosen by content
                chosen = blocks.choose(queries, keys, is_causal=is_causal, scale=scale, key_padding_mask=padding, query_offset=query_offset)
                kept = tuple(chosen[entry] for entry in range(B))
            for blocks_of_entry in kept:
                blocks_of_entry.check(end - start, H)
            for first in range(0, len(inside), rows_at_once):
                places = inside[first : first + rows_at_once]
                positions = [query_offset + rows[place] - start for place in places]
                where, picked = (torch.tensor(x, device=q.device) for x in (places, [rows[place] for place in places]))
                known = None if lse is None else lse.to(q.device, wide)[:, :, picked]
                scaled = q[:, picked].to(wide) * scale
                for low, weights in _weights(scaled, keys, positions, known, step, branches, kept, is_causal, padding, sinks):
                    columns = slice(start + low, start + low + weights.shape[-1])
                    result[..., where, columns] = weights.mean(1) if average_heads else weights
    return result


def _weights(
    q: torch.Tensor, k: torch.Tensor, positions: list[int], lse: torch.Tensor | None, step: int, branches: DilatedPattern | None,
    blocks: tuple[BlockPattern, ...], is_causal: bool, padding: torch.Tensor | None, sinks: torch.Tensor | None,
) -> Iterator[tuple[int, torch.Tensor]]:  # fmt: skip
    """Yields (first key, weights (B, H, R, K)) of rows at ``positions`` of one sequence or packed document, ``step`` keys at a time; keys
    outside of these chunks have weight 0. Without ``branches`` and ``blocks`` attention is dense.

    Args:
        q: the rows, times the scale, (B, R, H, D), in the dtype in which scores and weights are computed.
        k: all keys (B, N, Hk, D).
        lse: (B, H, R), or None. It is then computed over all keys, which takes an additional pass.
        branches: pattern whose multiplicities are added. A pair's multiplicity m says how many branches and blocks keep it; it multiplies
            e^score.
        blocks: adds 1 to the multiplicity of kept pairs. One pattern for all batch entries, or one for each. A content-chosen pattern
            must be replaced by the blocks it chose.
        padding: (B, N) bool, True = the key is masked.
        sinks: (H,) or None: a further score in each head's denominators.
    """
    B, R, H, _ = q.shape
    num_keys, Hk = k.shape[1:3]
    at = torch.tensor(positions, device=q.device)
    # make the query heads of one key head adjacent
    grouped = q.transpose(1, 2).unflatten(1, (Hk, H // Hk)).flatten(2, 3)
    low, high = 0, num_keys
    # a branch stays inside its segment; blocks may keep any key
    if branches is not None and not blocks:
        low = min(min(positions) // length * length for length in branches.segment_lengths)
        high = min(high, max((max(positions) // length + 1) * length for length in branches.segment_lengths))
    high = min(high, max(positions) + 1) if is_causal else high

    def logits(first: int) -> torch.Tensor:
        """Computes s + log m (B, H, R, K) for the chunk of keys from ``first`` on, −inf where m is 0."""
        chunk = slice(first, min(first + step, high))
        scores = (grouped @ k[:, chunk].to(q.dtype).permute(0, 2, 3, 1)).unflatten(2, (H // Hk, R)).flatten(1, 2)
        keys = torch.arange(chunk.start, chunk.stop, device=q.device)
        m = q.new_full((1, 1, R, len(keys)), branches is None and not blocks)
        if branches is not None:
            m = m + branches.multiplicities(at, keys, H)
        if blocks:
            heads = torch.arange(H if blocks[0].per_head else 1, device=q.device)[:, None, None]
            kept = [block.allowed(at[:, None], keys, heads, num_keys).broadcast_to(len(heads), R, len(keys)) for block in blocks]
            m = m + torch.stack(kept)
        if is_causal:
            m = m * (keys <= at[:, None])
        if padding is not None:
            m = m * ~padding[:, None, None, chunk]
        # not the sum alone: an infinite score and log 0 make NaN
        return torch.where(m > 0, scores + m.log(), -torch.inf)

    if lse is None:
        # of zero keys and sinks. Zero keys come after the last position, so causal queries do not see them
        zero = q.new_zeros((H, R))
        if branches is not None and not is_causal:
            zero = zero_keys(branches, at, H, num_keys).to(q.dtype)
        lse = zero.log() if sinks is None else zero.log().logaddexp(sinks.to(q.dtype)[:, None])
        lse = lse.expand(B, -1, -1)
        for first in range(low, high, step):
            lse = lse.logaddexp(logits(first).logsumexp(-1))
    # an empty row has no finite logit, so any finite shift works
    shift = lse.masked_fill(lse == -torch.inf, 0.0)[..., None]
    for first in range(low, high, step):
        yield first, logits(first).sub_(shift).exp_()


def zero_keys(pattern: DilatedPattern, rows: torch.Tensor, num_heads: int, num_positions: int) -> torch.Tensor:
    """Returns (H, R) int64: the number of zero keys, over all branches, that each row attends to; 0 with ``tail="mask"``."""
    total = rows.new_zeros((num_heads, rows.shape[0]), dtype=torch.int64)
    if pattern.tail == "mask":
        return total
    for branch, ((length, rate), offsets) in enumerate(zip(pattern.branches, pattern.offsets(num_heads), strict=True)):
        offset = torch.tensor(offsets, device=rows.device)[:, None]
        real = (num_positions - rows // length * length).clamp(max=length)
        # ceil((real − offset) / rate), which is not negative: real ≥ 1, and offsets are below the rate
        taken = -((offset - real) // rate)
        # the places of a full segment that keys do not fill; heads outside of the branch have an offset that no row has
        zero = pattern.zero_keys(branch, num_positions, 0) - taken
        total += torch.where(rows % length % rate == offset, zero, 0)
    return total


def checked_patterns(
    segment_lengths: Any, dilation_rates: Any, pattern: Any, options: Options, q: torch.Tensor
) -> tuple[DilatedPattern | None, BlockPattern | None]:
    """Returns the dilated pattern and the block pattern of a call, None for one that the call does not give."""
    if (segment_lengths is None) != (dilation_rates is None):
        raise ValueError(
            f"segment_lengths is {segment_lengths} and dilation_rates is {dilation_rates}; "
            "each branch needs one of each: give both, or neither"
        )
    blocks = None if pattern is None else checked_pattern(pattern)
    if blocks is not None:
        blocks.check_batch(q.shape[0])
    of_branches = {name: getattr(options, name) for name in BranchOptions.__annotations__}
    if segment_lengths is None:
        for name, value in of_branches.items():
            if differs(value, DEFAULTS[name]):
                raise ValueError(
                    f"{name} is {shown(value)} and applies only to branches; give segment_lengths and dilation_rates, or leave it out"
                )
        return None, blocks
    branches = DilatedPattern(segment_lengths, dilation_rates, **of_branches)
    branches.offsets(q.shape[2])
    return branches, blocks


def _checked_rows(query_rows: Any, num_queries: int, cu_seqlens: torch.Tensor | None, starts: list[int]) -> Sequence[int]:
    if isinstance(query_rows, str):
        one_of("query_rows", query_rows, ("cls",), also="or integers")
        if cu_seqlens is not None and len(starts) != cu_seqlens.shape[0] - 1:
            raise ValueError(
                "query_rows is 'cls' and a document of cu_seqlens is empty, so it has no first row; leave it out of cu_seqlens"
            )
        rows: Sequence[int] = starts
    else:
        if isinstance(query_rows, torch.Tensor) and query_rows.dtype is torch.bool:
            raise TypeError("query_rows is a mask; expected integers: mask.nonzero()[:, 0]")
        if getattr(query_rows, "ndim", 0) > 1:
            raise ValueError(f"query_rows has shape {tuple(query_rows.shape)}; expected (rows,), the same for all batch entries")
        is_several = hasattr(query_rows, "__len__") and getattr(query_rows, "ndim", 1) == 1
        rows = as_int_tuple("query_rows", query_rows if is_several else [query_rows])
    for row in rows:
        if not 0 <= row < num_queries:
            raise ValueError(f"query_rows holds {row}; expected rows of q, 0 to {num_queries - 1}")
    return rows


def _check_shape(name: str, x: Any, expected: tuple[int, ...], what: str) -> None:
    if x is not None and (not isinstance(x, torch.Tensor) or tuple(x.shape) != expected):
        got = f"has shape {tuple(x.shape)}" if isinstance(x, torch.Tensor) else f"is a {type(x).__name__}"
        raise ValueError(f"{name} {got}; expected {what} = {expected}")


@shows_options
def attention_received(
    q: torch.Tensor, k: torch.Tensor, segment_lengths: Any = None, dilation_rates: Any = None, *, query_weights: torch.Tensor | None = None,
    pattern: Any = None, average_heads: bool = False, dtype: torch.dtype | None = None, backend: str = "auto",
    **options: Unpack[MapOptions],
) -> torch.Tensor:  # fmt: skip
    """Returns the sum of every key's attention weights over all queries, as a heat map of a slide or a document shows it.

        a_h(j) = Σ_i g_i p_h(i, j),    p_h(i, j) as in ``attention_map``

    No weight is stored: a is the gradient of Σ_i g_i out_h(i) with respect to the values. So one forward and one backward of attention
    compute it, on the same backends, in their time and in memory that grows with N. This is for inspection: it has no gradient.

    Args:
        q, k, segment_lengths, dilation_rates, pattern, average_heads, options: see ``attention_map``.
        query_weights: g (B, Nq), real numbers, such as 0 for queries that are padding (``key_padding_mask`` hides keys alone), 1/Nq for a
            mean, or 1 for the queries of a region; None: 1 for all.
        dtype: the dtype in which q and k are passed to the kernels; None for float32 (float64 for float64). Half precision is several
            times faster on a GPU, but each weight and each a is then rounded to it (float16 holds sums up to 65504).
        backend: see ``dilated_attention``; it must have a backward.

    Returns:
        (B, H, Nk), or (B, Nk) with ``average_heads``, in float32 (float64 for float64). Without ``query_weights`` its sum over the keys is
        the number of queries that have any key, less the weight of zero keys with ``tail="zero_keys"`` and of sinks.

    Raises:
        ValueError, TypeError: bad input.
        BackendUnavailable: no backend can compute this, or the named one cannot.
        NotImplementedError: a torch.func transform or forward-mode AD asks for a derivative or maps over the call.

    >>> heat = attention_received(q, k, [1024, 4096], [1, 4], average_heads=True)
    >>> heat / q.shape[1]  # (B, N), sums to 1
    """
    check_names("attention_received", options)
    given = Options(**options)
    refuse_transforms("attention_received", WAY_OUT, q, k, query_weights, given.sinks)
    q, k, _ = autocast(q, k, k)
    check.check_tensors(q, k, k)
    check.check_bool("average_heads", average_heads)
    branches, blocks = checked_patterns(segment_lengths, dilation_rates, pattern, given, q)
    wide = accumulation_dtype(q.dtype)
    if dtype is not None and dtype not in check.DTYPES:
        raise ValueError(f"dtype is {dtype}; expected one of float16, bfloat16, float32, float64, or None for {wide}")
    if query_weights is not None and not isinstance(query_weights, torch.Tensor):
        raise check.not_a_tensor("query_weights", query_weights, "a tensor of shape (batch, queries), or None")
    _check_shape("query_weights", query_weights, tuple(q.shape[:2]), "(batch, queries)")
    if query_weights is not None and query_weights.is_complex():
        raise TypeError(f"query_weights has dtype {query_weights.dtype}; expected real numbers")
    # against q as it was given
    check.check_sinks(given.sinks, q)
    call: dict[str, Any] = {**options, "backend": backend}
    of_branches = None if branches is None else (branches.segment_lengths, branches.dilation_rates)
    if branches is None and blocks is None:
        of_branches, call["head_offsets"] = DENSE[:2], "zero"
    # the caller's inference mode would make a backward impossible, and the caller's autocast would round the tensors
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast(q.device.type, enabled=False):
        q, k = (_ordinary(x, wide if dtype is None else dtype) for x in (q, k))
        for name in ("cu_seqlens", "key_padding_mask"):
            if isinstance(call.get(name), torch.Tensor):
                call[name] = _ordinary(call[name], call[name].dtype)
        if given.sinks is not None:
            call["sinks"] = _ordinary(given.sinks, torch.promote_types(given.sinks.dtype, q.dtype))
        # one value head per query head gives one gradient per query head; the gradient does not depend on what the values hold
        k = repeat_heads(k, q.shape[2])
        # a transform around this call does not allow requires_grad_, so vjp is used
        out, pull = torch.func.vjp(lambda v: attend("block_sparse_dilated_attention", call, q, k, v, of_branches, blocks), k)  # type: ignore[misc]
        dout = torch.ones_like(out)
        if query_weights is not None:
            dout = _ordinary(query_weights.to(q.device), out.dtype)[:, :, None, None].expand_as(out).contiguous()
        (received,) = pull(dout)
    # the sum is the same in every dimension of a head
    result = received[..., 0].transpose(1, 2).to(wide)
    return result.mean(1) if average_heads else result.contiguous()


def _ordinary(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns x in ``dtype``, as a tensor that autograd can save."""
    x = x.detach().to(dtype)
    return x.clone() if x.is_inference() else x
