"""Settings for running a model, with the figures that support them: memory, several GPUs, CUDA graphs, caches, batches."""

from __future__ import annotations

import torch

from dilated_attention.functional import explain_decode
from dilated_attention.models.summary import readable
from dilated_attention.planning.advice.answer import Setting
from dilated_attention.planning.advice.rationale import COMPUTED, DECODING, GENOME, HUGGING_FACE, PERFORMANCE, RING, SLIDES
from dilated_attention.planning.advice.rules import LONG, TOKENS_PER_GPU, Machine, Mesh
from dilated_attention.planning.estimate.attention_plan import AttentionPlan
from dilated_attention.planning.text import seconds_text


def memory(value: int, machine: Machine, fits: bool, what: str, source: str) -> Setting:
    verdict = "fits" if fits else "does not fit"
    return Setting(
        name="memory",
        value=f"{readable(value)} per device, {verdict}",
        reason=f"{what}; {machine.name} has {readable(machine.memory)}",
        source=source,
    )


def time(plan: AttentionPlan | None, layers: int) -> list[Setting]:
    """Time of attention alone, forward and backward; empty where no rate is known."""
    if plan is None or plan.seconds is None:
        return []
    value = f"{seconds_text(plan.seconds)} forward + backward" + (
        f" of attention, {seconds_text(plan.seconds * layers)} in {layers} layers" if layers > 1 else ""
    )
    bounds = ", ".join(f"{name} by {one.bound}" for name, one in zip(("forward", "backward"), plan.passes, strict=False))
    reason = f"an estimate of plan_attention, bound {bounds}, at {plan.passes[0].rate / 1e12:.3g} TFLOP/s forward: {plan.passes[0].source}"
    return [Setting(name="attention time", value=value, reason=reason, source=COMPUTED)]


def checkpointing(taken: bool, fits: bool) -> Setting:
    if taken:
        reason = (
            "without it the activations do not fit; a training step of GigaPath's encoder went from 189 to 289 ms and from 11.9 to "
            "4.2 GB by it on an H200"
        )
    else:
        reason = "the activations fit, and computing blocks twice costs time: 289, not 189 ms per step of GigaPath's encoder on an H200"
    if not fits:
        reason += "; even so it does not fit"
    return Setting(name="checkpoint_activations", value=str(taken), reason=reason, source=f"{SLIDES}, NVIDIA H200")


def parallel(base: str, mesh: Mesh, length: int, batch: int, is_large: bool) -> Setting:
    value, gpus = f"{mesh.data} × {mesh.context} (sequences × parts of one)", mesh.data * mesh.context
    if mesh.context == 1:
        reason = "whole sequences fit on a GPU, and GPUs that share none exchange only gradients"
        if length / gpus < TOKENS_PER_GPU and batch < gpus:
            reason += f"; sharing one would leave less than {TOKENS_PER_GPU:,} tokens per GPU: give at least {gpus} sequences per step"
        source = f"{RING}, Figures"
    else:
        part = -(-length // mesh.context)
        reason = f"{part:,} tokens per GPU; on four H200 "
        reason += {
            "dense": "causal forward + backward had 0.95 to 0.98 of one GPU's speed from 4,096 tokens per GPU on",
            "dilated": (
                "from 32,768 tokens per GPU on, forward + backward had 0.92 to 0.98 of one GPU's speed in a CUDA graph, else 0.41 to 0.87"
            ),
            "block_sparse": "a window ran at 1.00 of one GPU's speed forward and 0.90 with backward, at 32,768 tokens per GPU",
        }[base]
        if mesh.context > 8:
            reason += "; several nodes were not measured"
        source = f"{RING}, Figures"
    share = "FSDP2 (fully_shard)" if is_large else "FSDP2 or DDP"
    reason += f". {share} over all {gpus}" + (", as weights, gradients and AdamW's moments are 16 bytes per parameter" if is_large else "")
    return Setting(name="mesh", value=value, reason=reason, source=source)


def exchange(base: str, is_causal: bool) -> tuple[Setting, Setting]:
    """Layout and exchange of a sequence shared by several processes."""
    if base == "dilated":
        layout = ('"contiguous"', "branches inside a process need no exchange")
        how = ('"auto": all_gather', "of a longer branch only the selected positions are sent, 1/r of the keys, during local computation")
    elif base == "block_sparse":
        layout = (
            '"contiguous"',
            "a window's blocks are on their process or its neighbour; `balanced_layout` finds the layout of other patterns",
        )
        how = ("blocks", "a process receives the key blocks that its queries keep")
    else:
        layout = (
            ('"zigzag"', "gives every process equally many causal pairs")
            if is_causal
            else ('"contiguous"', "without causality all have equally many pairs")
        )
        how = (
            '"auto"',
            "all_gather as long as the keys fit, and at 16,384 tokens per GPU the fastest: 628 TFLOP/s forward, ring 596, all_to_all 610",
        )
    return (
        Setting(name="layout", value=layout[0], reason=layout[1], source=f"{RING}, How it works"),
        Setting(name="exchange", value=how[0], reason=how[1], source=f"{RING}, {'Figures' if base == 'dense' else 'How it works'}"),
    )


def cuda_graph(positions: int, is_shared: bool) -> Setting:
    """``positions`` is per device at a time; ``is_shared`` says whether several devices share a sequence."""
    if is_shared:
        reason = (
            "with its exchanges: at 131,072 dilated tokens per GPU it gained 6 to 30 % on four H200, "
            "at 32,768 it halved the time; give seq_len"
        )
        return Setting(name="CUDA graph", value="yes, where lengths repeat", reason=reason, source=f"{RING}, Figures")
    if positions <= 32768:
        reason = (
            "short sequences wait for the CPU, which a graph avoids: for 4,096 causal positions of 12 heads of 64 "
            "the host took 0.589 ms forward + backward, the kernels 0.363, on an H200. Capture the step after a warm-up"
        )
        return Setting(name="CUDA graph", value="yes, where lengths repeat", reason=reason, source=f"{PERFORMANCE}, Short sequences")
    reason = (
        f"{positions:,} positions keep a GPU busy; GigaPath's encoder still went from 170 to 153 ms per step with 45,681 tiles on an H200"
    )
    return Setting(name="CUDA graph", value="little to gain", reason=reason, source=f"{SLIDES}, NVIDIA H200")


def batch(length: int, sequences: int) -> Setting:
    if length <= 2 * LONG:
        reason = (
            "short sequences fill a GPU together: "
            "of one with 4,096 positions the host took 0.589 ms forward + backward, the kernels 0.363 (H200)"
        )
        return Setting(
            name="batch", value=f"{sequences} at a time, 8 or more if they fit", reason=reason, source=f"{PERFORMANCE}, Short sequences"
        )
    reason = (
        "one long sequence fills a GPU; more at a time cost memory and gain nothing that was measured. "
        "Accumulate gradients for a larger batch"
    )
    return Setting(name="batch", value=f"{sequences} at a time", reason=reason, source=f"{GENOME}, What is trained")


def cache(base: str, paged: bool, rows: int, length: int, bytes_of_one: int) -> Setting:
    value = "PagedKVCache: model.generate([prompt, …])" if paged else "KVCache: model.generate(prompt, …)"
    reason = f"{readable(bytes_of_one)} per request for the last {rows:,} of {length:,} positions"
    reason += "; pages are allocated as requests grow, and freed" if paged else ""
    reason += {
        "dense": "; a step reads all keys",
        "dilated": "; those before the longest segment are dropped",
        "block_sparse": "; the window and the global tokens",
    }[base]
    return Setting(name="KV cache", value=value, reason=reason, source=f"{DECODING}, What a row reads")


def users(count: int, fitting: int) -> Setting:
    reason = (
        "one request's step is bound by launches: "
        "1,120 tokens/s alone, 16,600 for 32 together, on an H200 with LongNet's branches at any context"
    )
    return Setting(name="batch", value=f"{count} requests per GPU, of {fitting} that fit", reason=reason, source=f"{DECODING}, Measured")


def decoder(machine: Machine, dtype: torch.dtype, base: str, *, heads: int, kv_heads: int | None, head_dim: int) -> Setting:
    explained = explain_decode(
        hardware=machine.hardware, dtype=dtype, dense=base == "dense", head_dim=head_dim, num_heads=heads, num_kv_heads=kv_heads
    )
    reason = "the kernel of one row over the cache, by functional.explain_decode" + (
        "" if machine.is_here else ", with every kernel package installed"
    )
    return Setting(name="decoder", value=str(explained.chosen), reason=reason, source=COMPUTED)


def stepping() -> Setting:
    reason = "Stepper and generate capture a step as a graph by themselves on a GPU; prefill runs in chunks of 8,192"
    return Setting(name="CUDA graph", value="yes: generate's default", reason=reason, source=f"{DECODING}, Decoding")


def replicas(gpus: int) -> Setting:
    reason = (
        "a sequence is continued by one process; more GPUs serve more requests. Reading or scoring alone can be shared, by a model "
        "made with mesh="
    )
    return Setting(
        name="mesh",
        value=f"{gpus} processes, each with its own requests",
        reason=reason,
        source=f"{HUGGING_FACE}, Sequences that processes share",
    )
