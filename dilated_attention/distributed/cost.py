"""Which exchange a call takes, by a model of its time and memory, and the model as a table to read.

All ranks must come to the same answer without asking each other, so it depends on shapes and on what the GPUs are, not on free memory.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass

import torch

from dilated_attention.distributed.layout import spans
from dilated_attention.distributed.plan import Job
from dilated_attention.distributed.route import why_no_heads
from dilated_attention.pattern import DilatedPattern

logger = logging.getLogger("dilated_attention")

# of one H200 and of NCCL between four, see docs/ring.md: FLOP/s of a forward in half precision, bytes/s received, seconds that an
# exchange takes at least, bytes/s of device memory
FLOPS, WIRE, LATENCY, MEMORY = 600e12, 300e9, 40e-6, 3.5e12
# brought keys may take this share of the device's memory
SHARE = 0.25
# a step of an all_gather brings at least this much, or its latency shows; and no call has more steps than this
STEP_BYTES, MOST_STEPS = 24 * 2**20, 8
# multiprocessors for exchanges that are small beside what is computed meanwhile
FEW_CTAS = 4
# keys on their way may take this much, or two steps where that is more
AHEAD_BYTES = 2**30


@dataclass(frozen=True)
class Question:
    """What the choice depends on."""

    size: int
    layout: str
    seq_len: int
    batch: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    itemsize: int
    is_causal: bool
    is_dense: bool
    branch_heads: str
    has_window: bool
    needs_grad: bool
    memory: int


@dataclass(frozen=True)
class Offer:
    """One exchange: its seconds forward, the bytes it holds beside the results, and why it cannot be had, if so."""

    exchange: str
    seconds: float
    bytes_held: int
    reason: str | None


@functools.lru_cache(maxsize=256)
def offers(question: Question) -> tuple[Offer, ...]:
    """All exchanges within one node, best first."""
    x = question
    n = -(-x.seq_len // x.size)
    row = x.batch * x.head_dim * x.itemsize
    pairs = x.seq_len**2 / (2 if x.is_causal else 1)
    mean = 4 * pairs / x.size * x.num_heads * x.head_dim * x.batch / FLOPS
    compute = mean * (_imbalance(x) if x.is_causal else 1.0)
    keys = 2 * (x.seq_len - n) * x.num_kv_heads * row
    steps = head_steps(x.seq_len, x.batch, x.num_kv_heads, x.head_dim, x.itemsize) if x.is_dense else 1
    wire = keys / WIRE
    relayout = 0.0 if x.layout != "striped" else _all_to_all(x, n)
    gradients = 1 + (4 / x.itemsize if x.needs_grad else 0)
    merges = (x.size - 1) * n * x.num_heads * (x.itemsize * row / x.itemsize + 8 * x.batch * x.head_dim) / MEMORY
    found = []
    held = int(2 * 2 * x.seq_len * x.num_kv_heads / steps * row * gradients)
    found.append(Offer("all_gather", max(compute, wire) + wire / steps + LATENCY + relayout, held, _too_much(held, x.memory)))
    held = int(2 * 2 * n * x.num_kv_heads * row * gradients)
    reason = "a window's keys come in one exchange" if x.has_window else None
    found.append(Offer("ring", max(compute, wire) + merges + x.size * LATENCY + relayout, held, reason))
    held = int(2 * n * (x.num_heads + x.num_kv_heads) * row)
    reason = why_no_heads(x.num_heads, x.num_kv_heads, x.size, x.branch_heads)
    found.append(Offer("all_to_all", mean + _all_to_all(x, n), held, reason))
    if not x.is_dense:
        # a dilated call moves a fraction of its keys under what needs none: nothing else comes near
        found = [offer if offer.exchange == "all_gather" else _no(offer, "more is moved") for offer in found]
        found[0] = Offer("all_gather", found[0].seconds, 0, None)
    return tuple(sorted(found, key=lambda offer: (offer.reason is not None, offer.seconds)))


def _no(offer: Offer, reason: str) -> Offer:
    return Offer(offer.exchange, offer.seconds, offer.bytes_held, offer.reason or reason)


def _too_much(held: int, memory: int) -> str | None:
    if held <= SHARE * memory:
        return None
    return f"holds {held / 2**30:.1f} GiB, more than {SHARE:.0%} of the device's memory"


def _all_to_all(x: Question, n: int) -> float:
    moved = 2 * (x.num_heads + max(x.num_kv_heads, x.size)) * n * x.batch * x.head_dim * x.itemsize * (x.size - 1) / x.size
    return moved / WIRE + 2 * LATENCY


def _imbalance(x: Question) -> float:
    """The causal pairs of the busiest rank over the mean."""
    if x.layout == "striped":
        return 1.0
    pairs = [sum((b * (b + 1) - a * (a + 1)) / 2 for a, b, _ in spans(x.seq_len, rank, x.size, x.layout)) for rank in range(x.size)]
    return max(pairs) * x.size / max(1.0, sum(pairs))


def head_steps(seq_len: int, batch: int, num_kv_heads: int, head_dim: int, itemsize: int) -> int:
    """Steps of a dense all_gather: the first one's keys are waited for, so they are few; small messages are slow, so not too few."""
    total = 2 * seq_len * batch * num_kv_heads * head_dim * itemsize
    most = min(MOST_STEPS, max(1, total // STEP_BYTES))
    return max(d for d in range(1, num_kv_heads + 1) if num_kv_heads % d == 0 and d <= most)


def steps_ahead(job: Job, batch: int, head_dim: int, itemsize: int) -> int:
    """Steps whose keys may be in memory at once: two, or all that fit into a small budget, so that none waits for memory to be free."""
    rows = job.shape.keys[1] * job.shape.num_kv_heads // (job.size if job.exchange == "ring" else job.head_steps)
    return max(2, AHEAD_BYTES // max(1, 2 * rows * batch * head_dim * itemsize))


def question_of(
    q: torch.Tensor,
    k: torch.Tensor,
    pattern: DilatedPattern,
    *,
    size: int,
    layout: str,
    seq_len: int,
    is_causal: bool,
    has_window: bool = False,
    needs_grad: bool = False,
) -> Question:
    return Question(
        size=size,
        layout=layout,
        seq_len=seq_len,
        batch=q.shape[0],
        num_heads=q.shape[2],
        num_kv_heads=k.shape[2],
        head_dim=q.shape[3],
        itemsize=q.element_size(),
        is_causal=is_causal,
        is_dense=pattern.dilation_rates == (1,) and pattern.segment_lengths[0] >= seq_len,
        branch_heads=pattern.branch_heads,
        has_window=has_window,
        needs_grad=needs_grad,
        memory=_memory(q.device),
    )


def choose(question: Question) -> str:
    """The best exchange, told once for a kind of call."""
    best = offers(question)[0]
    _tell(question, best.exchange)
    return best.exchange


@functools.lru_cache(maxsize=256)
def _tell(question: Question, exchange: str) -> None:
    logger.info("ring: exchange %r for %s over %d processes\n%s", exchange, f"N = {question.seq_len}", question.size, table(question))


def table(question: Question) -> str:
    """The model's answer for every exchange, best first."""
    lines = ["  exchange     forward (model)   beside the results"]
    for offer in offers(question):
        note = f"  not taken: {offer.reason}" if offer.reason else ""
        lines.append(f"  {offer.exchange:<12} {offer.seconds * 1e3:>11.3f} ms {offer.bytes_held / 2**20:>15,.1f} MiB{note}")
    return "\n".join(lines)


@functools.lru_cache(maxsize=8)
def _memory(device: torch.device) -> int:
    # of a CPU all processes of the machine share it, and no two see the same amount free
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 2**36
