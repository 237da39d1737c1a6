"""``AttentionPlan``: the cost of one attention call, as figures, as JSON and as text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dilated_attention.engine.memory import MemoryEstimate
from dilated_attention.models.summary import readable
from dilated_attention.planning.estimate.problem import RINGS
from dilated_attention.planning.estimate.ring_estimate import Exchange
from dilated_attention.planning.estimate.speed import Pass
from dilated_attention.planning.text import fit_text, flops_text, seconds_text, table_text

_PASSES = ("forward", "backward")


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
        found = asdict(self)
        del found["dense_pairs"]
        memory, moved = self.memory, found["exchange"]["bytes"]
        return found | {
            "layout": self.layout if self.world_size > 1 else None,
            "keys_per_query": self.keys_per_query,
            "share_of_dense": self.share_of_dense,
            **{name: dict(zip(_PASSES, found[name], strict=True)) for name in ("flops", "least_bytes")},
            "memory": {
                **{name: getattr(memory, name) for name in ("peak", "reserve", "forward_peak", "backward_peak")},
                **{name: [list(term) for term in getattr(memory, name)] for name in _PASSES},
            },
            "exchange": {"name": self.exchange.name, "steps": self.exchange.steps, "exact": self.exchange.is_exact, **moved},
            "seconds": self.seconds,
            "passes": [
                asdict(one) | {"pass": name, "seconds": one.seconds, "bound": one.bound}
                for name, one in zip(_PASSES, self.passes, strict=False)
            ],
            "no_time": self.no_time or None,
        }

    def __str__(self) -> str:
        return "\n".join([*_heading(self), "", *_costs(self), "", *_times(self), "", self._fit()])

    def _fit(self) -> str:
        return f"fits         {fit_text(self.fits, self.peak, self.device_memory, self.longest, self.memory.reserve)}"


def _costs(plan: AttentionPlan) -> list[str]:
    about, each = "" if plan.pairs_exact else "about ", ", per process" if plan.world_size > 1 else ""

    def both(values: Sequence[int], text: Callable[[int], str]) -> str:
        return f"{text(values[0])} forward" + (f", {text(values[1])} backward" if plan.training else "")

    lines = [
        f"pairs        {about}{plan.pairs:,}: {plan.keys_per_query:,.1f} keys per query, {plan.share_of_dense:.3%} of dense",
        f"FLOPs        {both(plan.flops, flops_text)}",
        f"least bytes  {both(plan.least_bytes, readable)} through device memory{each}",
        "",
        f"peak memory  {readable(plan.peak)}{each.replace(',', '')}",
    ]
    for name in _PASSES:
        terms: tuple[tuple[str, int], ...] = getattr(plan.memory, name)
        listed = " + ".join(f"{what} {readable(size)}" for what, size in terms)
        lines += [f"  {name:<9}  {readable(sum(size for _, size in terms))} = {listed}"] if terms else []
    if plan.world_size > 1:
        moved, about, steps = asdict(plan.exchange.bytes), "" if plan.exchange.is_exact else "about ", plan.exchange.steps
        lines += ["", f"on the wire  {plan.exchange.name}, {steps} step{'s' if steps != 1 else ''}; a process"]
        for name in _PASSES[: 1 + plan.training]:
            received, sent = (about + readable(moved[f"{name}_{way}"]) for way in ("received", "sent"))
            lines.append(f"  {name:<9}  receives {received}, sends {sent}")
    return lines


def _times(plan: AttentionPlan) -> list[str]:
    if plan.seconds is None:
        return [f"time         no estimate: {plan.no_time}"]
    lines = [f"time         {seconds_text(plan.seconds)} (an estimate)"]
    for name, one in zip(_PASSES, plan.passes, strict=False):
        links = f", links {seconds_text(one.links + one.exposed)}" if plan.world_size > 1 else ""
        lines += [
            f"  {name:<9}  {seconds_text(one.seconds)}, bound by {one.bound}: arithmetic {seconds_text(one.arithmetic)}, "
            f"memory at least {seconds_text(one.memory)}, launches {seconds_text(one.host)}{links}",
            f"             {one.backend} at {one.rate / 1e12:,.0f} TFLOP/s: {one.source}",
        ]
    return lines


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
    return table_text(_heading(last, "several lengths"), rows, last.longest, [one.source for one in last.passes], last.no_time)
