"""Settings with the figures that support them. What no page of docs/ has measured is described as unmeasured."""

from __future__ import annotations

from dataclasses import replace

import torch

from dilated_attention.factory import Explanation, explain_backend
from dilated_attention.pattern import BlockPattern, DilatedPattern
from dilated_attention.planning.advice.answer import Setting
from dilated_attention.planning.advice.rules import FIRST_SEGMENT, LONG, SHORT, Machine

PERFORMANCE, RING, DECODING, SPARSE, MODELS, SLIDES, GENOME, HUGGING_FACE, TORCHSCALE, MEMORY = (
    f"docs/{page}.md"
    for page in (
        "performance",
        "ring",
        "decoding",
        "block_sparse",
        "models",
        "slide_encoder",
        "genome",
        "huggingface",
        "torchscale",
        "memory",
    )
)
COMPUTED = "computed"
_EXTRAS = {"flash4": "flash4", "flash3": "xformers", "flash2": "flash2", "flash3_fp8": "fp8"}


def kind(chosen: str, base: str, length: int, wanted: str | None, needs_grad: bool, share: float) -> Setting:
    """Explains why dense, dilated or block-sparse attention was chosen.

    ``base`` is the kind of the whole sequence, ``wanted`` what was asked for, ``share`` its share of the pairs.
    """
    if wanted is not None:
        reason = "requested; a model keeps the attention that it was trained with, since another one computes another function"
        return Setting(name="kind", value=chosen, reason=reason, source=f"{HUGGING_FACE}, Transformers models")
    if base == "dense" and length <= SHORT:
        reason = (
            f"at {SHORT:,} positions LongNet's branches contain most of dense attention's pairs: on an H200 cuDNN's dense attention took "
            "0.62 of their time forward and 0.70 forward + backward, for one causal sequence of 12 heads of 64"
        )
        return Setting(name="kind", value=chosen, reason=reason, source=f"{PERFORMANCE}, Short sequences")
    if base == "dense":
        reason = (
            f"dilated was slower at {SHORT:,} positions and faster at {LONG:,}, on an H200; between them nothing was measured, and "
            "dense leaves no key out"
        )
        return Setting(name="kind", value=chosen, reason=reason, source=f"{PERFORMANCE}, Short sequences")
    if base == "block_sparse":
        reason = (
            "the cache of every dilated pattern of 8,192 positions and more is too large for so many requests; "
            "a window with global tokens keeps window + global positions of each: "
            "on an H200 32 requests reached 20,790 tokens/s at a million positions, dense attention 2,274 at 65,536"
        )
        return Setting(name="kind", value=chosen, reason=reason, source=f"{DECODING}, Measured")
    reason = f"every query attends to all near keys, and to fewer the farther away they are: {share:.2%} of dense attention's pairs"
    if not needs_grad:
        reason += ", and a step of decoding reads only these keys: 1,125 tokens/s at a million positions on an H200, dense attention 107"
        return Setting(name="kind", value=chosen, reason=reason, source=f"{DECODING}, Measured")
    if length < 32768:
        reason += (
            f"; at {LONG:,} causal positions of 12 heads of 64 dense forward + backward took 1.24 to 2.02 times as long by torch's "
            "kernels on an H200, 0.98 by FlashAttention-4"
        )
    else:
        reason += "; on an H200 1,048,576 causal positions of 12 heads of 64 took 17.4 ms forward and 48.6 ms backward"
    return Setting(
        name="kind",
        value=chosen,
        reason=reason,
        source=f"{PERFORMANCE}, {'Short sequences' if length < 32768 else 'Against the arithmetic floor'}",
    )


def quality(base: str) -> Setting | None:
    """Names the effect on quality that has not been measured."""
    if base == "dense":
        return None
    reason = (
        "how well a model learns with these keys is not measured here, and no pattern bounds how far its result is from dense attention's: "
        "train both on your data at a length that dense attention can handle"
    )
    return Setting(name="accuracy", value="measure it on your model", reason=reason, source=f"{SPARSE}, What it does not do")


def branches(pattern: DilatedPattern, length: int, heads: int, is_causal: bool) -> Setting:
    keys = pattern.keys_per_query(length, heads, is_causal=is_causal)
    dense = (length + 1) / 2 if is_causal else length
    each = pattern.branch_pairs(length, heads, is_causal=is_causal)
    value = ", ".join(f"{w}/{r}" for w, r in pattern.branches)
    listed = ", ".join(f"{n / (heads * length):,.0f}" for n in each)
    reason = (
        f"segment/rate. {keys:,.0f} keys per query on average ({listed}), dense attention has {dense:,.0f}. "
        "Lengths grow by factors of 4 up to the whole sequence, and rates with them up to the number of heads; "
        "each divides the next, which lets the `nested` kernel visit a shared pair once"
    )
    largest = max(pattern.dilation_rates)
    if max(pattern.segment_lengths) < length:
        reason += (
            f". No segment is longer than {max(pattern.segment_lengths):,}, so that the keys of all requests fit: "
            "earlier positions reach a later one only through several layers"
        )
    if largest > heads:
        reason += (
            f". Rates above the {heads} heads leave positions out of far branches: those see far keys only through other layers; "
            "more heads avoid this"
        )
    elif any(w > FIRST_SEGMENT * r for w, r in pattern.branches):
        reason += (
            f". No rate is above the {heads} heads, so some head takes every position in every branch; more heads would allow "
            "higher rates and fewer keys"
        )
    return Setting(name="branches", value=value, reason=reason, source=f"{PERFORMANCE}, How it works")


def window(pattern: str, keys: float, dense: float) -> Setting:
    reason = (
        f"{keys:,.0f} keys per query on average, dense attention has {dense:,.0f}: "
        "near keys, and the first positions, which see all positions and are seen by all. "
        "A forward of 1,048,576 positions, 16 heads of 128, ran at 468 TFLOP/s with a causal window of 2,048, "
        "and at 386 with a window of 1,024 and 128 global positions (H200)"
    )
    return Setting(name="pattern", value=pattern, reason=reason, source=f"{SPARSE}, Performance")


def checkpoint_kind() -> Setting:
    reason = "what the weights were trained with: offsets in blocks of heads, TorchScale's zero keys and its gradient, all in the preset"
    return Setting(name="kind", value="dilated", reason=reason, source=f"{TORCHSCALE}, What is the same")


def checkpoint_branches(pattern: DilatedPattern, keys: float, dense: float) -> Setting:
    value = ", ".join(f"{w}/{r}" for w, r in pattern.branches)
    reason = (
        "segment/rate, Prov-GigaPath's for slides of 262,144 pixels. "
        f"{keys:,.0f} keys per query on average, dense attention has {dense:,.0f}"
    )
    return Setting(name="branches", value=value, reason=reason, source=f"{MODELS}, Presets")


def checkpoints(machine: Machine) -> list[Setting]:
    """Says what loading and fine-tuning Prov-GigaPath's weights requires."""
    made = [
        Setting(
            name="weights", value='load_torchscale("slide_encoder.pth")',
            reason=("reads them with weights_only, without TorchScale, flash-attn or fairscale; outputs were within 5.3e-7 of the "
                "original's in float32"),
            source=f"{TORCHSCALE}, What is the same",
        ),
        Setting(
            name="mixture_grad", value='"detached", as trained',
            reason='"exact" trains with the true gradient of the mixture and keeps less: 9.7 instead of 11.5 GB at 45,681 tiles on an H200',
            source=f"{SLIDES}, NVIDIA H200",
        ),
    ]  # fmt: skip
    if machine.is_cuda:
        reason = (
            "packed slides are exact but not faster on a GPU: three of 5,308 tiles took 0.6 to 0.9 s per step, one 0.12. "
            "Accumulate gradients"
        )
        made.append(Setting(name="batch", value="one slide at a time", reason=reason, source=f"{SLIDES}, NVIDIA H200"))
    return made


def transformers(base: str) -> list[Setting]:
    """Says which features a transformers model keeps and which it does not."""
    if base == "dense":
        reason = "a model trained with dense attention is left as it is; transformers' own sdpa computes that"
        return [Setting(name="integration", value='"sdpa"', reason=reason, source=f"{HUGGING_FACE}, Transformers models")]
    reason = "a model trained with dense attention computes something else with these layers: fine-tune it, or train it with them"
    return [
        Setting(name="integration", value="fine-tune", reason=reason, source=f"{HUGGING_FACE}, Transformers models"),
        Setting(
            name="padding", value="on the right", reason="padding on the left shifts segments, so that the same tokens may see other keys",
            source=f"{HUGGING_FACE}, What is honoured, and what is refused",
        ),
    ]  # fmt: skip


def known_encoders() -> Setting:
    reason = (
        "for slides, the encoder with tile positions: "
        "a step on 45,681 tiles took 153 ms as a graph to 207 ms as called and 11.5 to 11.9 GB on an H200. "
        'For genomes see docs/genome.md, for images create_model("longvit-4096")'
    )
    return Setting(
        name="slides", value='create_model("gigapath-12l768d", mixture_grad="exact")', reason=reason, source=f"{SLIDES}, NVIDIA H200"
    )


def explained(
    machine: Machine, dtype: torch.dtype, pattern: DilatedPattern | BlockPattern, length: int, *, heads: int, kv_heads: int | None,
    head_dim: int,
    is_causal: bool, needs_grad: bool,
) -> Explanation:  # fmt: skip
    """Calls ``explain_backend`` for such a call."""
    sparse = isinstance(pattern, BlockPattern)
    if isinstance(pattern, BlockPattern):
        rows = max(1, round(pattern.pairs(length, 1, is_causal=is_causal) / length))
    else:
        rows = max(-(-min(w, length) // r) for w, r in pattern.branches)
    return explain_backend(
        hardware=machine.hardware, dtype=dtype, head_dim=head_dim, num_heads=heads, num_kv_heads=kv_heads, is_causal=is_causal,
        needs_grad=needs_grad, length=rows, block_size=128 if sparse else None, block_masks="bits" if sparse else "none",
    )  # fmt: skip


def backend(machine: Machine, explanation: Explanation, without: Explanation | None, nests: bool) -> Setting:
    """Explains the choice of backend.

    ``without`` is the explanation with only PyTorch and Triton, for a machine that is not at hand. ``nests`` says whether the branches'
    lengths and rates divide each other.
    """
    taken = [name for name in (explanation.forward, explanation.backward) if name]
    if not taken:
        reason = f"no backend can compute {explanation.request.describe()} on {machine.name}; try another head dim"
        return Setting(name="backend", value="none", reason=reason, source=COMPUTED)
    value = f"forward {explanation.forward}" + (f", backward {explanation.backward}" if explanation.request.needs_grad else "")
    basis = dict.fromkeys(basis for basis in (explanation.forward_basis, explanation.backward_basis) if basis)
    reason = f'what backend="auto" chooses: {" · ".join(basis)}'
    extras = [_EXTRAS[name] for name in dict.fromkeys(taken) if name in _EXTRAS]
    if not machine.is_here and machine.is_cuda:
        reason += "; with every kernel package installed"
    if extras and not machine.is_here:
        reason += f': pip install "dilated-attention[{",".join(extras)}]"'
    if without is not None and (without.forward, without.backward) != (explanation.forward, explanation.backward):
        reason += f"; with only torch and Triton forward {without.forward}" + (f", backward {without.backward}" if without.backward else "")
    if nests and not explanation.nested_reasons:
        reason += "; the forward of a long sequence uses `nested` instead, where that saves more than it costs"
    return Setting(name="backend", value=value, reason=reason, source=COMPUTED)


def without_packages(machine: Machine) -> Machine:
    return replace(machine, hardware=replace(machine.hardware, packages=frozenset({"triton"})))


def dtype(machine: Machine, chosen: torch.dtype) -> Setting:
    name = str(chosen).removeprefix("torch.")
    reason = {
        torch.bfloat16: "the range of float32 at half the bytes; partial results, sums of gradients and the softmax are float32 inside",
        torch.float16: "the GPU has no bfloat16; train with torch.amp.GradScaler, whose scaling float16's range needs",
        torch.float32: "no fast 16-bit products here"
        if machine.is_cuda
        else "torch's CPU kernel; figures for CPUs in README are float32's",
    }[chosen]
    return Setting(name="dtype", value=name, reason=reason, source=f"{MODELS}, Memory" if chosen is torch.bfloat16 else COMPUTED)


def precision(machine: Machine, base: str, length: int, needs_grad: bool) -> Setting:
    if machine.is_hopper and base == "dense" and not needs_grad and length >= 131072:
        reason = (
            "8-bit products in the forward took 1/1.08 to 1/1.14 of the time at 131,072 dense keys on an H200, with about 5 % "
            "relative error: try it"
        )
        return Setting(
            name="precision", value='"fp8" for reading, if its error is small enough', reason=reason, source=f"{PERFORMANCE}, fp8"
        )
    if needs_grad:
        reason = "fp8 gives no gradients"
    elif base == "dilated":
        reason = "in dilated branches fp8 took 1.6 to 1.9 times as long on an H200"
    else:
        reason = "fp8 is forward only, on Hopper GPUs, and pays off from 131,072 dense keys on"
    return Setting(name="precision", value='"native", not fp8', reason=reason, source=f"{PERFORMANCE}, fp8")


def compiled(machine: Machine) -> Setting:
    if not machine.is_cuda:
        return Setting(name="torch.compile", value="no", reason="not measured on a CPU", source=COMPUTED)
    reason = "works without graph breaks; the genome's training compiled its blocks, 41 s once. Its gain was not measured separately"
    return Setting(name="torch.compile", value="each block", reason=reason, source=f"{GENOME}, Measured on H200")


def allocator(machine: Machine) -> Setting | None:
    if not machine.is_cuda:
        return None
    reason = (
        "with default settings torch's allocator then reserves far more than tensors hold: "
        "over 200 random lengths on an H200 3.75 times as much without any attention, 3.03 to 4.09 times with it; "
        "with this setting 1.00 to 1.16. Set it before the process starts"
    )
    return Setting(
        name="expandable_segments",
        value=("PYTORCH_ALLOC_CONF=expandable_segments:True, if lengths vary"),
        reason=reason,
        source=f"{MEMORY}, Fragmentation",
    )


def head_dim(machine: Machine, chosen: int, explanation: Explanation) -> Setting:
    if not machine.is_hopper:
        reason = "64 and 128 are what every kernel library is built for; which is faster was not measured on this machine"
        return Setting(name="head dim", value=f"{chosen}", reason=reason, source=COMPUTED)
    reason, source = "this library's own forward kernels, `nested` and `gluon`, support only 64 and 128", f"{SPARSE}, Kernels"
    if explanation.request.needs_grad:
        reason += "; backward problems of 2048 rows ran at 477 TFLOP/s with 64 and 558 with 128 on an H200"
        source = f"{PERFORMANCE}, Against the arithmetic floor"
    value = f"{chosen}" if chosen in (64, 128) else f"{chosen}; better 64 or 128"
    return Setting(name="head dim", value=value, reason=reason, source=source)
