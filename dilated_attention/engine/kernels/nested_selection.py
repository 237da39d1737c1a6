"""Decides which branches of a pattern are visited together, each pair once (``nested.py``), and which run separately.

A sequence is cut into two pieces: whole segments of every branch, where nested branches can share pairs, and the remainder, which is
treated as a separate, shorter sequence.
"""

from __future__ import annotations

import functools
import importlib.metadata
import itertools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dilated_attention.backends import NESTED_CAPABILITIES, AttentionRequest, reasons_of
from dilated_attention.backends.hardware import has_gluon
from dilated_attention.engine.kernels.nested import MAX_DESCRIPTORS, TILE_KEYS, NestedFamily, nested_family
from dilated_attention.pattern import NOT_IN_BRANCH, DilatedPattern

# Floating-point operations of a call below which the kernel's launches, one per level, cost more than the saved pairs. On an H200 a call
# takes about a millisecond of CPU time.
MIN_OPERATIONS = 5e11
_TILE = TILE_KEYS


@dataclass(frozen=True)
class Split:
    """The branches of a pattern that nest, and the others.

    Args:
        family: indices of the nested branches, in increasing dilation rate; the first takes every position.
        others: pattern of the other branches, or None.
        layers: pattern of the branch buffers to merge: one direct branch for the family, and the others.
    """

    family: tuple[int, ...]
    others: DilatedPattern | None
    layers: DilatedPattern


@dataclass(frozen=True)
class SequencePiece:
    """Positions [start, start + length), treated as a separate sequence. ``split`` is None if it runs branch by branch."""

    start: int
    length: int
    split: Split | None


@functools.lru_cache(maxsize=256)
def make_pieces(pattern: DilatedPattern, num_heads: int, num_positions: int) -> tuple[SequencePiece, ...]:
    """Cuts the sequence into at most two pieces, in order. The second one runs branch by branch."""
    split = _best_split(pattern, num_heads, num_positions)
    if split is None:
        return (SequencePiece(0, num_positions, None),)
    length = chunk_family(pattern, split, (0, num_heads), num_heads, num_positions).num_positions
    pieces = (SequencePiece(0, length, split), SequencePiece(length, num_positions - length, None))
    return pieces if length < num_positions else pieces[:1]


def reasons_against(
    request: AttentionRequest, pattern: DilatedPattern, tensors: tuple[Tensor, ...], num_documents: int, scale: float
) -> list[str]:
    """Returns every reason why the nested kernel cannot run the forward of q, k, v; an empty list if it can."""
    q, k, v = tensors
    num_heads, num_positions = q.shape[2], q.shape[1]
    reasons = [] if num_documents == 1 else ["takes one document per call, not packed ones"]
    if k.shape[1] != num_positions:
        more = "visits each pair once only where queries and keys are one whole sequence"
        return [*reasons_of(NESTED_CAPABILITIES, request), *reasons, more]
    reasons += _reasons_against_sequence(request, pattern, num_heads, num_positions)
    piece = make_pieces(pattern, num_heads, num_positions)[0]
    if piece.split is None or "triton" not in request.hardware.packages:
        return reasons
    family = chunk_family(pattern, piece.split, (0, num_heads), num_heads, piece.length)
    return reasons + reasons_against_tensors(family, q, k, v, scale)


def is_chosen(pattern: DilatedPattern, request: AttentionRequest, batch: int, num_positions: int) -> bool:
    """Predicts, without its tensors, whether the forward of a sequence's self-attention visits shared pairs once with backend="auto"."""
    if _reasons_against_sequence(request, pattern, request.num_heads, num_positions):
        return False
    q = torch.empty((batch, num_positions, request.num_heads, request.head_dim), device="meta")
    return is_worth_it(pattern, q, request.causal)


def _reasons_against_sequence(request: AttentionRequest, pattern: DilatedPattern, num_heads: int, num_positions: int) -> list[str]:
    """Returns every reason against the self-attention of one sequence that does not depend on its tensors."""
    reasons = reasons_of(NESTED_CAPABILITIES, request)
    if pattern.tail == "zero_keys" and not request.causal:
        reasons.append("does not support zero keys")
    if make_pieces(pattern, num_heads, num_positions)[0].split is None:
        reasons.append(
            f"no two branches nest on {num_positions} positions: each length and rate must divide the next, offsets must agree, the first "
            f"rate must be 1, the shortest segment must hold {_TILE} positions of the largest rate, and the sequence only whole segments"
        )
    return reasons


def reasons_against_tensors(family: NestedFamily, q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> list[str]:
    """Returns every reason against these tensors that a request does not show."""
    reasons = []
    if not has_gluon():
        reasons.append(f"needs the Gluon language of Triton 3.6 or later, this is Triton {importlib.metadata.version('triton')}")
    if family.num_levels > MAX_DESCRIPTORS + 1:
        reasons.append(f"{family.num_levels} branches, at most {MAX_DESCRIPTORS + 1}")
    if max(family.num_positions, *(x.stride(1) * family.rates[-1] for x in (q, k, v))) >= 2**31:
        reasons.append("positions and the elements between two rows of a progression are counted in 32 bits")
    if scale is not None and not (scale > 0 and math.isfinite(scale)):
        reasons.append(f"scale {scale}; expected a scale above 0, since the maximum of a row is taken before scaling")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not _by_tma(x):
            reasons.append(
                f"{name} with strides {x.stride()} at byte {x.data_ptr() % 16} of 16: "
                "TMA needs a last stride of 1, and other strides in multiples of 16 bytes"
            )
    return reasons


def _by_tma(x: Tensor) -> bool:
    steps = 16 // x.element_size()
    aligned = all(stride % steps == 0 for stride, size in zip(x.stride()[:3], x.shape[:3], strict=True) if size > 1)
    # residue · token stride + channel is one coordinate of the descriptor
    return aligned and x.stride(3) == 1 and x.stride(1) >= x.shape[3] and x.data_ptr() % 16 == 0


def is_worth_it(pattern: DilatedPattern, q: Tensor, is_causal: bool) -> bool:
    """Whether visiting shared pairs once is faster than running branch by branch, for a call without reasons in ``reasons_against``."""
    B, N, H, D = q.shape
    piece = make_pieces(pattern, H, N)[0]
    assert piece.split is not None
    pairs = chunk_family(pattern, piece.split, (0, H), H, piece.length).pairs() * B * H
    return 4 * D * pairs / (2 if is_causal else 1) >= MIN_OPERATIONS


@functools.lru_cache(maxsize=256)
def _best_split(pattern: DilatedPattern, num_heads: int, num_positions: int) -> Split | None:
    """Finds the nested branches that save the most pairs and leave whole segments to the others."""
    order = sorted(range(pattern.num_branches), key=lambda b: (pattern.dilation_rates[b], pattern.segment_lengths[b]))
    best: tuple[int, tuple[int, ...]] | None = None
    # with more than 10 branches, try only runs of neighboring branches, of which there are few
    sizes = range(2, len(order) + 1)
    candidates = (
        c
        for n in sizes
        for c in (itertools.combinations(order, n) if len(order) <= 10 else zip(*(order[i:] for i in range(n)), strict=False))
    )
    for chosen in candidates:
        saved = _saved(pattern, tuple(chosen), num_heads, num_positions)
        if saved > 0 and (best is None or saved > best[0]):
            best = saved, tuple(chosen)
    if best is None:
        return None
    left = [b for b in range(pattern.num_branches) if b not in best[1]]
    others = pattern.with_branches(left, num_heads) if left else None
    return Split(best[1], others, pattern.with_branches(left, num_heads, onto_all=True))


def _saved(pattern: DilatedPattern, chosen: tuple[int, ...], num_heads: int, num_positions: int) -> int:
    """Returns the number of pairs per head that the chosen branches repeat; 0 if they do not nest or if other branches would be cut."""
    offsets = pattern.offsets(num_heads)
    if pattern.dilation_rates[chosen[0]] != 1 or any(NOT_IN_BRANCH in offsets[b] for b in range(pattern.num_branches)):
        return 0
    lengths, rates = [pattern.segment_lengths[b] for b in chosen], [pattern.dilation_rates[b] for b in chosen]
    if max(lengths) > num_positions:
        # with segments cut to the sequence they could nest, but every sequence length would need its own compiled kernel
        return 0
    family = nested_family(lengths, rates, [offsets[b] for b in chosen], num_positions)
    if family is None or not family.has_tiles(_TILE, _TILE):
        return 0
    if family.num_positions < num_positions and any(w >= num_positions or family.num_positions % w for w in pattern.segment_lengths):
        return 0
    return (family.branch_pairs() - family.pairs()) * num_positions // family.num_positions


@functools.lru_cache(maxsize=256)
def chunk_family(pattern: DilatedPattern, split: Split, heads: tuple[int, int], num_heads: int, num_positions: int) -> NestedFamily:
    """Returns the family of heads [first, last) on the whole longest segments of a sequence."""
    offsets = pattern.offsets(num_heads)
    lengths, rates = [pattern.segment_lengths[b] for b in split.family], [pattern.dilation_rates[b] for b in split.family]
    family = nested_family(lengths, rates, [offsets[b][slice(*heads)] for b in split.family], num_positions)
    assert family is not None
    return family
