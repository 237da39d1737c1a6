"""Bits per token of a model on held-out sequences, read in windows that overlap."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from typing_extensions import Unpack

from dilated_attention.functional.options import shows_options
from dilated_attention.models.config import NUM_BASES, as_config
from dilated_attention.models.generation import LanguageModel, eval_mode
from dilated_attention.models.loss import CHUNK_BYTES, cross_entropy
from dilated_attention.models.stack import PaddingOptions, rows_of
from dilated_attention.models.text import UNKNOWN, check_integers, kmers
from dilated_attention.pattern.checks import as_int

# positions of a window where the attention has no longest segment
_CONTEXT = 8192
_NOT_SCORED = -100
# share of tokens that are hidden from a model that sees both sides, and seed that picks them
_HIDDEN, _SEED = 0.15, 15


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """The targets that could see ``least`` … ``most`` inputs, over all windows, including targets that are scored in another window."""

    least: int
    most: int
    bits: float
    targets: int


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What ``evaluate`` found.

    Args:
        bits: mean of −log2 p(target) over the scored targets.
        scored: number of scored targets.
        context, stride: positions of a window, and from one window to the next.
        windows: number of windows that were read.
        positions: number of inputs of all windows.
        seconds: time of all windows.
        by_position: mean bits by the number of inputs that a target could see, in powers of two, over all targets of all windows; empty
            if attention is not causal.
    """

    bits: float
    scored: int
    context: int
    stride: int
    windows: int
    positions: int
    seconds: float
    by_position: tuple[Bucket, ...]


@torch.no_grad()
@shows_options
def evaluate(
    model: LanguageModel,
    records: Sequence[torch.Tensor] | torch.Tensor,
    *,
    context: int | None = None,
    stride: int | None = None,
    num_windows: int | None = None,
    **options: Unpack[PaddingOptions],
) -> Evaluation:
    """Computes the mean of −log2 p(token) in windows that overlap, so that every token is scored once, with much before it.

    A causal model: the first window of a record scores all of its targets; each further window moves on by ``stride`` and scores the
    targets that are new, which have at least ``context − stride`` positions before them. A record's first token is no target. A model
    that sees both sides, of bases: the same 15 % of each record in every call are replaced with N and scored, each in the window whose
    middle it is nearest to (but near a record's ends). N itself is never scored where tokens are bases (``vocab_size=5``), and windows
    without a target are not read.

    Args:
        model: a ``LongNetLM`` on one device. It computes in the dtype of its weights, or autocast's where that is enabled.
        records: sequences (N_i,) of tokens, or a batch (B, N); bases for a model with ``config.kmer``, whose codes are made here, for each
            window.
        context: positions of a window; None for the model's longest segment, or 8,192 if it has none, or the longest record if that is
            shorter.
        stride: from window to window, at most ``context``; None for half of it.
        num_windows: read only so many windows, at equal distances among all of them; None for all.
        options: attention_mask, key_padding_mask (B, N) of a batch: see ``models.stack.PaddingOptions``.

    Raises:
        ValueError, TypeError: if numbers do not fit, if nothing can be scored, if the model sees both sides and its tokens are no bases
            (there is no token for what is hidden), or if its loss is not finite.
    """
    config = as_config("model.config", getattr(model, "config", None))
    records = rows_of("evaluate", records, options)
    if not config.is_causal and config.vocab_size != NUM_BASES:
        raise ValueError(
            f"is_causal is False and vocab_size is {config.vocab_size}; such a model fills in hidden tokens, and only bases "
            f"(vocab_size={NUM_BASES}) have one that hides, N: compute model(tokens, targets=…) with your own mask"
        )
    for i, record in enumerate(records):
        check_integers(f"records[{i}]", record)
        if record.ndim != 1:
            raise ValueError(f"records[{i}] has shape {tuple(record.shape)}; expected (N,) of each: for one sequence x use [x] or x[None]")
    longest = max((len(record) for record in records), default=0)
    if context is None:
        context = min(max((w for one in config.cycle for w in one.segment_lengths), default=_CONTEXT), max(longest, 1))
    context = as_int("context", context, minimum=1)
    stride = max(1, context // 2) if stride is None else as_int("stride", stride, minimum=1)
    if stride > context:
        raise ValueError(f"stride is {stride}; expected at most context = {context}, or tokens between windows would not be scored")
    shift, target_masks, windows = int(config.is_causal), [], []
    for i, record in enumerate(records):
        is_target = record != (UNKNOWN if config.vocab_size == NUM_BASES else _NOT_SCORED)
        if not config.is_causal:
            # what a model that sees both sides has to fill in, the same at every call
            is_target &= (torch.rand(len(record), dtype=torch.float32, generator=torch.Generator().manual_seed(_SEED)) < _HIDDEN).to(
                record.device
            )
        target_masks.append(is_target)
        is_target_on_cpu = is_target.cpu()
        of_record = _windows(len(record), context, stride, config.is_causal)
        # a genome may have long stretches of nothing but N, whose windows have no targets
        windows += [(i, *window) for window in of_record if is_target_on_cpu[slice(*window[2:])].any()]
    if num_windows is not None and as_int("num_windows", num_windows, minimum=1) < len(windows):
        windows = [windows[i * len(windows) // num_windows] for i in range(num_windows)]
    weight = model.output_weight
    device = weight.device
    # (nats, number of targets): of all targets, by floor(log2(number of inputs that a target sees)); and of the scored ones
    sums = torch.zeros(2, context.bit_length(), dtype=torch.float64, device=device)
    total = torch.zeros(2, dtype=torch.float64, device=device)
    start = time.perf_counter()
    with eval_mode(model):
        for i, first, end, scored_start, scored_end in windows:
            # from the first input to the last target: the token after its input, or with attention to both sides the token itself
            symbols, is_target = (x[i][first : end + shift].to(device) for x in (records, target_masks))
            inputs, targets = symbols.long()[: end - first], symbols.long().where(is_target, _NOT_SCORED)[shift:]
            if not config.is_causal:
                inputs = inputs.where(~is_target, UNKNOWN)
            if config.kmer > 1:
                inputs = kmers(inputs, config.kmer, both_sides=not config.is_causal)
            hidden = model.hidden(inputs[None])[0]
            # only one chunk of positions has logits at a time; nats are 0 where there is no target
            rows = max(1, CHUNK_BYTES // (4 * weight.shape[0]))
            chunks = zip(hidden.split(rows), targets.split(rows), strict=True)
            nats = torch.cat([cross_entropy(x, weight, wanted, reduction="none") for x, wanted in chunks]).double()
            # floor(log2(number of inputs that a target sees)); without causality this is not the number, and its sums are dropped below
            power = torch.frexp(torch.arange(1, len(inputs) + 1, device=device).double())[1].long() - 1
            both = torch.stack((nats, targets != _NOT_SCORED))
            sums.index_add_(1, power, both)
            # nats[i] are those of the target at first + shift + i
            counted = slice(scored_start - first - shift, scored_end - first - shift)
            total += both[:, counted].sum(1)
    nats_in_all, count = total.tolist()
    seconds = time.perf_counter() - start
    if not count:
        raise ValueError(f"the longest record has {longest} tokens, and none of all is scored; expected more, and known, tokens")
    if not math.isfinite(nats_in_all):
        raise ValueError(f"the loss is {nats_in_all}; expected a finite number: load weights without NaN and inf, or compute in float32")
    return Evaluation(
        bits=nats_in_all / count / math.log(2),
        scored=round(count),
        context=context,
        stride=stride,
        windows=len(windows),
        positions=sum(end - first for _, first, end, *_ in windows),
        seconds=seconds,
        by_position=tuple(
            Bucket(
                least=2**power,
                most=min(2 ** (power + 1) - 1, context),
                bits=of_nats / num_targets / math.log(2),
                targets=round(num_targets),
            )
            for power, (of_nats, num_targets) in enumerate(sums.T.tolist())
            if num_targets and config.is_causal
        ),
    )


def _windows(length: int, context: int, stride: int, is_causal: bool) -> Iterator[tuple[int, int, int, int]]:
    """Yields (first, end, scored_start, scored_end) of each window of one record: it reads inputs first … end − 1 and scores targets
    scored_start … scored_end − 1, all as positions of the record. Every target is scored in one window."""
    scored_start, step = (1, context) if is_causal else (0, stride)
    while scored_start < length:
        scored_end = min(scored_start + step, length)
        first = max(0, scored_end - 1 - context if is_causal else min((scored_start + scored_end - context) // 2, length - context))
        yield first, scored_end - 1 if is_causal else min(first + context, length), scored_start, scored_end
        scored_start, step = scored_end, stride
