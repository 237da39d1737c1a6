"""Plans as people read them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dilated_attention.models.summary import USABLE, readable

if TYPE_CHECKING:
    from dilated_attention.planning.plan import AttentionPlan


def plan_text(plan: AttentionPlan) -> str:
    heads = f"{plan.num_heads} heads of {plan.head_dim}" + (f", {plan.num_kv_heads} of keys" if plan.num_kv_heads != plan.num_heads else "")
    flags = [plan.dtype, "causal" if plan.is_causal else "full", "training" if plan.training else "inference"]
    spread = f", {plan.world_size} processes, {plan.layout}" if plan.world_size > 1 else ""
    lines = [
        f"{plan.kind}, {plan.num_positions:,} positions × {plan.batch_size}, {heads}, {', '.join(flags)}{spread}",
        f"on {plan.device} with {readable(plan.device_memory)} (from: {plan.device_source})",
    ]
    if plan.pattern != "every key":
        lines.append(f"pattern: {plan.pattern}")
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
    lines += ["", f"fits         {fit_text(plan)}"]
    return "\n".join(lines)


def fit_text(plan: AttentionPlan) -> str:
    part = plan.peak / plan.device_memory
    told = f"{'yes' if plan.fits else 'no'}: {part:,.2g} of the memory, of which {USABLE:.0%} can be used"
    at_least = "at least " if plan.longest >= 2**31 else ""
    return f"{told}; the longest that does: {at_least}{plan.longest:,} positions"


def flops_text(flops: float) -> str:
    for unit, size in (("PFLOP", 1e15), ("TFLOP", 1e12), ("GFLOP", 1e9)):
        if flops >= size:
            return f"{flops / size:,.3g} {unit}" if flops < 1000 * size else f"{flops / size:,.0f} {unit}"
    return f"{flops / 1e6:,.3g} MFLOP"


def seconds_text(seconds: float) -> str:
    if seconds >= 100:
        return f"{seconds:,.0f} s"
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} µs"
