"""``block_sparse_attention`` and ``block_sparse_dilated_attention`` (dilated branches plus a block pattern), in one process."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask
from typing_extensions import Unpack

from dilated_attention.functional.arguments import attend, branches_of
from dilated_attention.functional.options import LocalBranchOptions, LocalOptions, shows_options
from dilated_attention.pattern import BlockPattern, from_block_mask
from dilated_attention.pattern.checks import shown

# each with what tells that it was written since
_converted: weakref.WeakKeyDictionary[BlockMask, tuple[list[Any], BlockPattern]] = weakref.WeakKeyDictionary()


@shows_options
def block_sparse_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pattern: Any, **options: Unpack[LocalOptions]) -> Any:
    """Computes attention over the pairs that a block pattern keeps, exactly, as one softmax over each query's kept keys.

        out_h(i) = Σ_j m_h(i,j) e^{s_ij} v_j / Σ_j m_h(i,j) e^{s_ij},    s_ij = scale · q_i·k_j,    m_h(i,j) ∈ {0, 1}

    m is ``pattern.dense_mask``. Time and memory grow with the number of kept blocks, not with N². A row without kept keys is 0 with
    lse −inf and gradient 0.

    Args:
        pattern: a block pattern of ``dilated_attention.pattern``, or several joined by | and &, for all heads or per head; or a
            ``BlockMask`` of torch.nn.attention.flex_attention, read by ``from_block_mask``.

    All other arguments, results and errors are those of ``dilated_attention``. Each packed document has its own blocks.

    The patterns are those of Longformer (arXiv 2004.05150), BigBird (arXiv 2007.14062) and Sparse Transformers (arXiv 1904.10509), in
    whole blocks. Some libraries take a softmax per block, so that a query's weights do not sum to 1; this function does not.

    >>> pattern = LocalWindow(512) | GlobalLocal(128, 16)
    >>> out = block_sparse_attention(q, k, v, pattern, is_causal=True)
    """
    return attend("block_sparse_attention", options, q, k, v, blocks=checked_pattern(pattern))


@shows_options
def block_sparse_dilated_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segment_lengths: Any, dilation_rates: Any, pattern: Any,
    **options: Unpack[LocalBranchOptions],
) -> Any:  # fmt: skip
    """Computes dilated branches and a block pattern together, exactly, as one softmax over the multiset of all their keys.

        m_h(i, j) = m_h(i, j) of ``dilated_attention`` + m_h(i, j) of ``block_sparse_attention``

    A pair that two branches keep, or a branch and a block, counts twice, as a pair in two branches does in LongNet. The two parts are
    computed by separate kernels and merged by their log-sum-exps. The backward of each part uses the merged log-sum-exps; no gradient
    flows through the merge. A named backend computes both parts or is refused.

    Args:
        segment_lengths, dilation_rates: see ``dilated_attention``.
        pattern: see ``block_sparse_attention``.

    All other arguments, results and errors are those of ``dilated_attention``; its ``mixture_grad`` is ``"exact"`` here.

    >>> out = block_sparse_dilated_attention(
    ...     q, k, v, [2048, 8192], [1, 4], BigBird(256, 64, 3), is_causal=True)
    """
    branches = branches_of(segment_lengths, dilation_rates)
    return attend("block_sparse_dilated_attention", options, q, k, v, branches, checked_pattern(pattern))


def checked_pattern(pattern: Any) -> BlockPattern:
    """Returns the block pattern; a ``BlockMask`` is converted, once as long as nobody writes it."""
    if isinstance(pattern, BlockPattern):
        return pattern
    if not isinstance(pattern, BlockMask):
        raise TypeError(
            f"pattern is {shown(pattern)} ({type(pattern).__name__}); expected a block pattern of dilated_attention.pattern, e.g. "
            "LocalWindow(512), or a BlockMask of torch.nn.attention.flex_attention"
        )
    if torch.compiler.is_compiling():
        raise TypeError(
            "pattern is a BlockMask inside a compiled function, where its lists cannot be read; convert it outside: "
            "dilated_attention.pattern.from_block_mask(block_mask)"
        )
    before, known = _converted.get(pattern, (None, None))
    now = [getattr(pattern, name) for name in _TABLES]
    if known is None or before is None or before[0] is not pattern.mask_mod or not all(map(_is_same, before[1:], now)):
        known = from_block_mask(pattern)
        _converted[pattern] = [pattern.mask_mod, *map(_copied, now)], known
    return known


_TABLES = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")


def _copied(table: torch.Tensor | None) -> Any:
    """Returns what ``_is_same`` compares: on the CPU the values, on a GPU, for whose values the host would wait, place and version."""
    if table is None or table.device.type == "cpu":
        return None if table is None else table.clone()
    return table.data_ptr(), 0 if table.is_inference() else table._version


def _is_same(before: Any, table: torch.Tensor | None) -> bool:
    if table is None or table.device.type != "cpu":
        return before == _copied(table)  # type: ignore[no-any-return]
    return isinstance(before, torch.Tensor) and torch.equal(before, table)
