"""Chooses the exchange of a call with a model of its time and memory, and prints the model as a table. All ranks must come to the same
answer without asking each other, so it depends on shapes and on the GPU model, not on free memory."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from dilated_attention.backends import registry
from dilated_attention.distributed.exchange.sharding_plan import why_no_heads
from dilated_attention.distributed.sharding.custom_layout import Layout, is_dealt, layout_name
from dilated_attention.distributed.sharding.layout import spans
from dilated_attention.pattern import DilatedPattern
from dilated_attention.pattern.checks import MAX_RANKS, as_int
from dilated_attention.validation import check_counts

# an H200, and NCCL between four (docs/ring.md): FLOP/s of a half-precision forward, bytes/s received, least s an exchange, memory's bytes/s
FLOPS, WIRE, LATENCY, MEMORY = 600e12, 300e9, 40e-6, 3.5e12
# of a device's memory, the fractions that received keys may take, and a whole call of dense attention: below the 90 % usable in plans
SHARE, CALL_SHARE = 0.25, 0.85
# a dense all_gather is split into steps of heads if its transfer takes more than this fraction of the arithmetic, because each step
# costs additional launches; the minimum bytes per step, and the maximum number of steps (H200, 32/8 heads of 128: 4 steps gain 3 % at
# 4,096 and 8,192 tokens per GPU, and lose 2 % at 16,384)
STEP_SHARE, STEP_BYTES, MOST_STEPS = 0.06, 16 * 2**20, 4
# seconds of a forward's arithmetic that a step must have: the host takes 0.15 ms to issue a step of two parts, and 0.7 ms in training
STEP_SECONDS = 0.3e-3
# multiprocessors for exchanges that are small compared with the computation they overlap with
FEW_CTAS = 4


@dataclass(frozen=True)
class ExchangeRequest:
    """The inputs of the model that chooses the exchange."""

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
    needs_grad: bool
    memory: int


@dataclass(frozen=True)
class ExchangeEstimate:
    """One exchange: the modelled seconds of its forward, the bytes it holds in addition to the results, and any reason against it, which is
    only a preference where the exchange is ``possible``."""

    exchange: str
    seconds: float
    bytes_held: int
    reason: str | None
    possible: bool = True


@functools.lru_cache(maxsize=256)
def exchange_estimates(question: ExchangeRequest) -> tuple[ExchangeEstimate, ...]:
    """Returns all exchanges within one node, best first."""
    x = question
    n, steps, mean = -(-x.seq_len // x.size), head_steps(x), _mean_seconds(x)
    row = x.batch * x.head_dim * x.itemsize
    compute = mean * (_imbalance(x) if x.is_causal else 1.0)
    wire = 2 * (x.seq_len - n) * x.num_kv_heads * row / WIRE
    relayout = 0.0 if x.layout != "striped" else _all_to_all(x, n)
    held, all_held = _held(x, steps), int(2 * n * (x.num_heads + x.num_kv_heads) * row)
    too_much = f"holds {held / 2**30:.1f} GiB, more than {SHARE:.0%} of the device's memory" if held > SHARE * x.memory else None
    why_not = why_no_heads(x.num_heads, x.num_kv_heads, x.size, x.branch_heads)
    # a dilated call moves only a fraction of its keys, while it computes what needs none; no other exchange comes close
    found = [
        ExchangeEstimate("all_gather", max(compute, wire) + wire / steps + LATENCY + relayout, held, too_much if x.is_dense else None),
        ExchangeEstimate(
            "all_to_all", mean + _all_to_all(x, n), all_held, why_not or (None if x.is_dense else "moves more bytes"), not why_not
        ),
    ]
    return tuple(sorted(found, key=lambda offer: (not offer.possible, offer.reason is not None, offer.seconds)))


def _all_to_all(x: ExchangeRequest, n: int) -> float:
    moved = 2 * (x.num_heads + max(x.num_kv_heads, x.size)) * n * x.batch * x.head_dim * x.itemsize * (x.size - 1) / x.size
    return moved / WIRE + 2 * LATENCY


def _imbalance(x: ExchangeRequest) -> float:
    """Returns the causal pairs of the busiest rank divided by the mean."""
    # a Layout is made for documents, which the model does not know, and balances them
    if x.layout == "striped" or is_dealt(x.layout):
        return 1.0
    pairs = [sum((b * (b + 1) - a * (a + 1)) / 2 for a, b, _ in spans(x.seq_len, rank, x.size, x.layout)) for rank in range(x.size)]
    return max(pairs) * x.size / max(1.0, sum(pairs))


def head_steps(question: ExchangeRequest) -> int:
    """Returns the number of steps of an all_gather, in equal groups of key/value heads: few, unless keys or call take too much memory. With
    the keys alone, a longer call, in more steps, could fit where a shorter one does not."""
    x = question
    if x.branch_heads != "all":
        return 1
    total = 2 * x.seq_len * x.batch * x.num_kv_heads * x.head_dim * x.itemsize
    wanted = 1
    if x.is_dense and total / WIRE * (x.size - 1) / x.size > STEP_SHARE * _mean_seconds(x):
        wanted = min(MOST_STEPS, max(1, total // STEP_BYTES), max(1, int(_mean_seconds(x) / STEP_SECONDS)))
    divisors = [d for d in range(1, x.num_kv_heads + 1) if x.num_kv_heads % d == 0]
    most = CALL_SHARE * x.memory
    fitting = [d for d in divisors if _held(x, d) <= SHARE * x.memory and (not x.is_dense or _needed(x, d) <= most)] or divisors[-1:]
    return max([d for d in fitting if d <= wanted], default=fitting[0])


def _held(x: ExchangeRequest, steps: int) -> int:
    """Returns the bytes of received keys, for two steps at a time, and in training of contributions to their gradients."""
    total = 2 * x.seq_len * x.num_kv_heads * x.batch * x.head_dim * x.itemsize
    return total * min(2, steps) // steps * (2 if x.needs_grad else 1)


def _needed(x: ExchangeRequest, steps: int) -> int:
    """Returns an upper bound of what a rank needs for a call of dense attention: its rows, the keys of steps, and one step's work."""
    rows, e = -(-x.seq_len // x.size) * x.batch, x.itemsize
    lse, out = 4 * rows * x.num_heads, rows * x.num_heads * x.head_dim
    step = 2 * x.seq_len * x.num_kv_heads * x.batch * x.head_dim // steps
    held = step * e * min(steps, 2)
    own = (out + 2 * rows * x.num_kv_heads * x.head_dim) * e
    if not x.needs_grad:
        return own + out * e + lse + held + (out * e + lse) // steps
    # kernels sum dq in float32, and dk and dv that query heads share; PyTorch's own have them for each query head
    shared = step * max(4, e * x.num_heads // x.num_kv_heads) if x.num_heads > x.num_kv_heads else 0
    return own + 3 * out * e + lse + held + ((4 + e) * out + 3 * lse) // steps + 2 * step * e + shared


def _mean_seconds(x: ExchangeRequest) -> float:
    """Returns the mean seconds of a rank's share of a forward's arithmetic."""
    pairs = x.seq_len**2 / (2 if x.is_causal else 1)
    return 4 * pairs / x.size * x.num_heads * x.head_dim * x.batch / FLOPS


def exchange_request(
    q: torch.Tensor,
    k: torch.Tensor,
    pattern: DilatedPattern,
    seq_len: int,
    *,
    size: int,
    layout: str,
    is_causal: bool,
    needs_grad: bool = False,
) -> ExchangeRequest:
    return ExchangeRequest(
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
        needs_grad=needs_grad,
        memory=device_memory(q.device),
    )


def explain_exchange(
    seq_len: int,
    size: int,
    *,
    num_heads: int,
    num_kv_heads: int | None = None,
    head_dim: int = 128,
    batch: int = 1,
    layout: str | Layout = "zigzag",
    is_causal: bool = False,
    needs_grad: bool = False,
    itemsize: int = 2,
    memory: int = 141 * 10**9,
) -> str:
    """Explains the choice of ``exchange="auto"`` for dense attention over ``size`` processes of one node, as a table to print.

    The table lists for every exchange its modelled seconds, the bytes it holds in addition to the results, and why it is not chosen.

    Args:
        seq_len: N, the length of the whole sequence.
        layout: as in ``ring_attention``; a ``Layout`` is taken to be balanced.
        itemsize: bytes per element of q.
        memory: bytes of memory of each device.
    """
    head_dim, num_heads, heads = check_counts(head_dim, num_heads, num_kv_heads)
    seq_len, size = as_int("seq_len", seq_len, minimum=0), as_int("size", size, minimum=1, maximum=MAX_RANKS)
    batch, itemsize = as_int("batch", batch, minimum=1), as_int("itemsize", itemsize, minimum=1)
    memory = as_int("memory", memory, minimum=1)
    shapes = {"num_heads": num_heads, "num_kv_heads": heads, "head_dim": head_dim, "batch": batch, "itemsize": itemsize}
    question = ExchangeRequest(
        size=size, layout=layout_name(layout), seq_len=seq_len, is_causal=is_causal, is_dense=True, branch_heads="all",
        needs_grad=needs_grad, memory=memory, **shapes,
    )  # fmt: skip
    return table(question)


def choose(question: ExchangeRequest) -> str:
    """Returns the best exchange and logs it, once for each kind of call."""
    best = exchange_estimates(question)[0].exchange
    registry.tell_once(f"ring: exchange {best!r} for N = {question.seq_len} over {question.size} processes\n{table(question)}")
    return best


def table(question: ExchangeRequest) -> str:
    """Formats the model's result for every exchange, best first."""
    lines = ["  exchange     forward (model)  besides the results"]
    for offer in exchange_estimates(question):
        note = f"  not chosen: {offer.reason}" if offer.reason else ""
        lines.append(f"  {offer.exchange:<12} {offer.seconds * 1e3:>11.3f} ms {offer.bytes_held / 2**20:>15,.1f} MiB{note}")
    return "\n".join(lines)


@functools.lru_cache(maxsize=8)
def device_memory(device: torch.device) -> int:
    # on a CPU all processes of the machine share the memory, and no two see the same amount free, so a fixed value is used
    # in whole GiB, because ranks compare it
    return torch.cuda.get_device_properties(device).total_memory >> 30 << 30 if device.type == "cuda" else 2**36
