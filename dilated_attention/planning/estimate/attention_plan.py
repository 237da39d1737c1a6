"""``AttentionPlan``: the cost of one attention call, as figures, as JSON and as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dilated_attention.engine.memory import MemoryEstimate
from dilated_attention.models.summary import readable
from dilated_attention.planning.estimate.problem import RINGS
from dilated_attention.planning.estimate.ring_estimate import Exchange
from dilated_attention.planning.estimate.speed import Pass
from dilated_attention.planning.text import below_text, columns_text, fit_text, flops_text, seconds_text


@dataclass(frozen=True, kw_only=True)
class AttentionPlan:
    """The cost of one call in figures. ``str`` prints them, ``as_dict`` returns them. Times are estimates and state what they are based on.

    Args:
        kind, num_positions, …: the request, with defaults filled in. For a sequence shared by several processes, the figures are those of
            the rank with the largest share.
        pairs: (query, key) products of the whole call, batch included.
        dense_pairs: pairs of dense attention with the same causality.
        pairs_exact: whether the pairs were counted; otherwise they are extrapolated from shorter sequences, as for long block patterns.
        flops: (forward, backward) of the whole call: 4·D and 10·D per pair; the backward is 0 without training.
        least_bytes: (forward, backward) memory traffic of one process: what must be read and written once.
        memory: peak bytes of one process, by term.
        exchange: what a rank receives and sends.
        passes: forward and backward in seconds; empty where no rate is known, and ``no_time`` says why.
        device, device_memory: name of the machine's device, and its memory in bytes.
        fits: whether the peak is within ``USABLE`` of that memory, and the lists of blocks can index all kept blocks.
        longest: a number of positions that fits where one more does not, up to 2^31; 0 if not even one fits.
    """

    kind: str
    pattern: str
    num_positions: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    batch_size: int
    dtype: str
    world_size: int
    layout: str
    is_causal: bool
    training: bool
    pairs: int
    dense_pairs: int
    pairs_exact: bool
    flops: tuple[int, int]
    least_bytes: tuple[int, int]
    memory: MemoryEstimate
    exchange: Exchange
    passes: tuple[Pass, ...]
    no_time: str
    device: str
    device_memory: int
    device_source: str
    fits: bool
    longest: int

    @property
    def keys_per_query(self) -> float:
        return self.pairs / (self.batch_size * self.num_positions * self.num_heads)

    @property
    def share_of_dense(self) -> float:
        return self.pairs / self.dense_pairs

    @property
    def peak(self) -> int:
        """Peak bytes of one process."""
        return self.memory.peak

    @property
    def seconds(self) -> float | None:
        """Seconds of the forward, plus the backward with ``training``; None where no rate is known."""
        return sum(one.seconds for one in self.passes) if self.passes else None

    def as_dict(self) -> dict[str, Any]:
        names = ("forward", "backward")
        moved = asdict(self.exchange.bytes)
        return {
            "kind": self.kind,
            "pattern": self.pattern,
            "num_positions": self.num_positions,
            "num_heads": self.num_heads,
            "num_kv_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "batch_size": self.batch_size,
            "dtype": self.dtype,
            "world_size": self.world_size,
            "layout": self.layout if self.world_size > 1 else None,
            "is_causal": self.is_causal,
            "training": self.training,
            "pairs": self.pairs,
            "pairs_exact": self.pairs_exact,
            "keys_per_query": self.keys_per_query,
            "share_of_dense": self.share_of_dense,
            "flops": dict(zip(names, self.flops, strict=True)),
            "least_bytes": dict(zip(names, self.least_bytes, strict=True)),
            "memory": {
                "peak": self.peak,
                "reserve": self.memory.reserve,
                "forward_peak": self.memory.forward_peak,
                "backward_peak": self.memory.backward_peak,
                "forward": [list(term) for term in self.memory.forward],
                "backward": [list(term) for term in self.memory.backward],
            },
            "exchange": {"name": self.exchange.name, "steps": self.exchange.steps, "exact": self.exchange.is_exact, **moved},
            "seconds": self.seconds,
            "passes": [
                asdict(one) | {"pass": name, "seconds": one.seconds, "bound": one.bound}
                for name, one in zip(names, self.passes, strict=False)
            ],
            "no_time": self.no_time or None,
            "device": self.device,
            "device_memory": self.device_memory,
            "device_source": self.device_source,
            "fits": self.fits,
            "longest": self.longest,
        }

    def __str__(self) -> str:
        return _text(self)


def _text(plan: AttentionPlan) -> str:
    lines = _heading(plan)
    about = "" if plan.pairs_exact else "about "
    lines += [
        "",
        f"pairs        {about}{plan.pairs:,}: {plan.keys_per_query:,.1f} keys per query, {plan.share_of_dense:.3%} of dense",
        f"FLOPs        {flops_text(plan.flops[0])} forward" + (f", {flops_text(plan.flops[1])} backward" if plan.training else ""),
        f"least bytes  {readable(plan.least_bytes[0])} forward"
        + (f", {readable(plan.least_bytes[1])} backward" if plan.training else "")
        + " through device memory"
        + (", per process" if plan.world_size > 1 else ""),
        "",
        f"peak memory  {readable(plan.peak)}" + (" per process" if plan.world_size > 1 else ""),
    ]
    for name, terms, total in (
        ("forward", plan.memory.forward, plan.memory.forward_peak),
        ("backward", plan.memory.backward, plan.memory.backward_peak),
    ):
        if terms:
            lines.append(f"  {name:<9}  {readable(total)} = " + " + ".join(f"{what} {readable(size)}" for what, size in terms))
    if plan.world_size > 1:
        moved = plan.exchange.bytes
        told = "" if plan.exchange.is_exact else "about "
        lines += ["", f"on the wire  {plan.exchange.name}, {plan.exchange.steps} step{'s' if plan.exchange.steps != 1 else ''}; a process"]
        lines.append(f"  forward    receives {told}{readable(moved.forward_received)}, sends {told}{readable(moved.forward_sent)}")
        if plan.training:
            lines.append(f"  backward   receives {told}{readable(moved.backward_received)}, sends {told}{readable(moved.backward_sent)}")
    lines.append("")
    if plan.passes:
        whole = plan.seconds or 0.0
        lines.append(f"time         {seconds_text(whole)} (an estimate)")
        for name, one in zip(("forward", "backward"), plan.passes, strict=False):
            lines.append(
                f"  {name:<9}  {seconds_text(one.seconds)}, bound by {one.bound}: arithmetic {seconds_text(one.arithmetic)}, "
                f"memory at least {seconds_text(one.memory)}, launches {seconds_text(one.host)}"
                + (f", links {seconds_text(one.links + one.exposed)}" if plan.world_size > 1 else "")
            )
            lines.append(f"             {one.backend} at {one.rate / 1e12:,.0f} TFLOP/s: {one.source}")
    else:
        lines.append(f"time         no estimate: {plan.no_time}")
    lines += ["", f"fits         {fit_text(plan.fits, plan.peak, plan.device_memory, plan.longest, plan.memory.reserve)}"]
    return "\n".join(lines)


def _heading(plan: AttentionPlan, length: str | None = None) -> list[str]:
    heads = f"{plan.num_heads} heads of {plan.head_dim}" + (f", {plan.num_kv_heads} of keys" if plan.num_kv_heads != plan.num_heads else "")
    flags = [plan.dtype, "causal" if plan.is_causal else "full", "training" if plan.training else "inference"]
    spread = f", {plan.world_size} processes, {plan.layout}" if plan.world_size > 1 else ", 1 process" if plan.kind in RINGS else ""
    lines = [
        f"{plan.kind}, {length or f'{plan.num_positions:,} positions'} × {plan.batch_size}, {heads}, {', '.join(flags)}{spread}",
        f"on {plan.device} with {readable(plan.device_memory)} (from: {plan.device_source})",
    ]
    if plan.pattern != "every key":
        lines.append(f"pattern: {plan.pattern}")
    return lines


def attention_table(plans: Sequence[AttentionPlan]) -> str:
    """Formats plans of one call at several lengths; only the last one contains the longest length that fits."""
    last = plans[-1]
    spread = last.world_size > 1
    rows = [("positions", "keys/query", "of dense", "FLOPs", "peak memory", *(("received",) if spread else ()), "time", "fits")]
    for plan in plans:
        moved = plan.exchange.bytes
        received = (readable(moved.forward_received + moved.backward_received),) if spread else ()
        share = f"{plan.share_of_dense:.2%}" if plan.share_of_dense >= 1e-4 else f"{plan.share_of_dense:.1e}"
        time = "–" if plan.seconds is None else seconds_text(plan.seconds)
        rows.append(
            (
                f"{plan.num_positions:,}", f"{plan.keys_per_query:,.0f}", share, flops_text(sum(plan.flops)), readable(plan.peak),
                *received, time,
                "yes" if plan.fits else "no",
            )
        )  # fmt: skip
    return "\n".join(
        [
            *_heading(last, "several lengths"),
            "",
            *columns_text(rows),
            "",
            *below_text(last.longest, [one.source for one in last.passes], last.no_time),
        ]
    )
