"""Formats plans as text for people to read."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dilated_attention.models.summary import USABLE, readable
from dilated_attention.planning.estimate.problem import RINGS

if TYPE_CHECKING:
    from dilated_attention.planning.estimate.attention_plan import AttentionPlan
    from dilated_attention.planning.whole_models.model_plan import ModelPlan


def plan_text(plan: AttentionPlan) -> str:
    lines = _heading(plan)
    about = "" if plan.pairs_exact else "about "
    lines += [
        "",
        f"pairs        {about}{plan.pairs:,}: {plan.keys_per_query:,.1f} keys a query, {plan.share_of_dense:.3%} of dense",
        f"FLOPs        {flops_text(plan.flops[0])} forward" + (f", {flops_text(plan.flops[1])} backward" if plan.training else ""),
        f"least bytes  {readable(plan.least_bytes[0])} forward"
        + (f", {readable(plan.least_bytes[1])} backward" if plan.training else "")
        + " through device memory"
        + (", a process" if plan.world_size > 1 else ""),
        "",
        f"peak memory  {readable(plan.peak)}" + (" a process" if plan.world_size > 1 else ""),
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
    lines += ["", f"fits         {fit_text(plan, plan.memory.reserve)}"]
    return "\n".join(lines)


def fit_text(plan: AttentionPlan | ModelPlan, reserve: int = 0) -> str:
    told = f"{'yes' if plan.fits else 'no'}: it takes {part_text(plan.peak / plan.device_memory)} the memory, of which {USABLE:.0%} can be used"
    if reserve:
        told += f", and {readable(reserve)} lie in pieces that the allocator cannot use again"
    return f"{told}; {longest_text(plan.longest)}"


def flops_text(flops: float) -> str:
    for unit, size in (("EFLOP", 1e18), ("PFLOP", 1e15), ("TFLOP", 1e12), ("GFLOP", 1e9)):
        if flops >= 0.9995 * size:
            return f"{_three_digits(flops / size)} {unit}"
    return f"{_three_digits(flops / 1e6)} MFLOP"


def seconds_text(seconds: float) -> str:
    """Formats a time in the usual unit for its magnitude: 35 µs, 12.3 ms, 47 s, 6.2 min, 5.1 h, 3.4 days."""
    for unit, size, least in (("days", 86400.0, 172800.0), ("h", 3600.0, 7200.0), ("min", 60.0, 120.0), ("s", 1.0, 0.9995), ("ms", 1e-3, 0.9995e-3)):
        if seconds >= least:
            return f"{_three_digits(seconds / size)} {unit}"
    return f"{_three_digits(seconds * 1e6)} µs"


def part_text(part: float) -> str:
    """Formats a peak as a share of the available memory."""
    return f"{_three_digits(100 * part)}% of" if part < 10 else f"{_three_digits(part)} times"


def longest_text(longest: int, what: str = "the longest that does") -> str:
    return f"{what}: {'at least ' if longest >= 2**31 else ''}{longest:,} positions" if longest else f"{what}: none, not one position fits"


def _three_digits(number: float) -> str:
    return f"{number:.3g}" if number < 999.5 else f"{number:,.0f}"


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


def model_text(plan: ModelPlan) -> str:
    """Formats a ``ModelPlan``."""
    lines = _model_heading(plan)
    lines += [
        "",
        f"parameters   {plan.parameters:,} in {plan.layers} blocks",
        f"FLOPs        {flops_text(plan.flops)} a {'step' if plan.training else 'forward'}",
        f"peak memory  {readable(plan.peak)}, {plan.moment}" + (", a process" if plan.world_size * plan.weight_shards > 1 else ""),
    ]
    lines += [f"  {readable(size):>9}  {what}" for what, size in plan.terms]
    if plan.world_size > 1:
        moved = plan.exchange.bytes
        back = f", {readable(moved.backward_received)} backward" if plan.training else ""
        lines.append(f"on the wire  {plan.exchange.name}; a process receives {readable(moved.forward_received)} forward{back}, a layer")
    if plan.seconds is None:
        lines.append(f"time         no estimate: {plan.no_time}")
    else:
        rate = plan.batch_size * plan.num_positions / plan.seconds
        lines.append(f"time         {seconds_text(plan.seconds)} (an estimate), {rate:,.0f} positions/s")
        # one part per line; text in brackets stays together
        lines += [f"             {part}" for part in re.split(r"; (?![^(]*\))", plan.time_source)]
    lines.append(f"fits         {fit_text(plan)}")
    return "\n".join(lines)


def _model_heading(plan: ModelPlan, length: str | None = None) -> list[str]:
    weights = "float32 weights under autocast" if plan.autocast else f"{plan.dtype} weights"
    flags = [f"{plan.dtype}", weights, "training" if plan.training else "inference"]
    if plan.checkpoint_activations:
        flags.append("activations checkpointed")
    if plan.world_size > 1:
        flags.append(f"{plan.world_size} processes share a sequence")
    if plan.weight_shards > 1:
        flags.append(f"weights over {plan.weight_shards} processes")
    return [
        f"{plan.preset}, {length or f'{plan.num_positions:,} positions'} × {plan.batch_size}, {', '.join(flags)}",
        f"on {plan.device} with {readable(plan.device_memory)}",
    ]


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
                f"{plan.num_positions:,}", f"{plan.keys_per_query:,.0f}", share, flops_text(sum(plan.flops)), readable(plan.peak), *received, time,
                "yes" if plan.fits else "no",
            )
        )  # fmt: skip
    return "\n".join([*_heading(last, "several lengths"), "", *_columns(rows), "", *_below(last, [one.source for one in last.passes])])


def model_table(plans: Sequence[ModelPlan]) -> str:
    """Formats plans of one model at several lengths; only the last one contains the longest length that fits."""
    last = plans[-1]
    rows = [("positions", "FLOPs", "peak memory", "highest", "time", "fits")]
    for plan in plans:
        time = "–" if plan.seconds is None else seconds_text(plan.seconds)
        rows.append(
            (f"{plan.num_positions:,}", flops_text(plan.flops), readable(plan.peak), plan.moment, time, "yes" if plan.fits else "no")
        )
    return "\n".join(
        [*_model_heading(last, "several lengths"), "", *_columns(rows), "", *_below(last, [last.time_source] if last.time_source else [])]
    )


def _columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def _below(plan: AttentionPlan | ModelPlan, sources: Sequence[str]) -> list[str]:
    told = f"times are estimates; in the last row: {'; '.join(dict.fromkeys(sources))}" if sources else f"no times: {plan.no_time}"
    return [longest_text(plan.longest, f"the longest that fits in {USABLE:.0%} of the memory"), told]
