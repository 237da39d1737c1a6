"""The request to ``recommend``, what was chosen for it, and the answer: the facts about both that ``rules.json`` asks for, and the code."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from dilated_attention.backends import Hardware
from dilated_attention.factory import Explanation, explain_backend
from dilated_attention.models.summary import readable
from dilated_attention.pattern import MAX_LENGTH, BlockPattern, DilatedPattern, GlobalLocal
from dilated_attention.planning.advice import rules
from dilated_attention.planning.advice.answer import Recommendation, settings_of
from dilated_attention.planning.estimate.plan import plan_attention
from dilated_attention.planning.estimate.problem import Machine
from dilated_attention.planning.text import seconds_text

_RING = {"dense": "ring", "dilated": "ring_dilated", "block_sparse": "ring_block_sparse"}
# the block pattern that decoding was measured with (docs/decoding.md), applied to both sides where there is no causality
_WINDOW, _GLOBAL = 2047, 128
_EXTRAS = {"flash4": "flash4", "flash3": "xformers", "flash2": "flash2", "flash3_fp8": "fp8"}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A request with its defaults filled in. ``here``: whether the machine is this one."""

    name: str
    length: int
    machine: Machine
    hardware: Hardware
    here: bool
    parameters: float | None
    heads: int | None
    head_dim: int | None
    gpus: int
    batch: int
    users: int
    causal: bool
    attention: str | None

    @property
    def base(self) -> str:
        """Returns dense, dilated or block_sparse."""
        return self.attention or ("dense" if self.length < rules.LONG else "dilated")

    @property
    def on_gpu(self) -> bool:
        return self.hardware.device_type == "cuda"

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of full speed: the default of ``explain_backend``, except float32 for GPUs before Volta, whose float16 is slow."""
        capability = (self.hardware.capability or (0, 0)) if self.on_gpu else (0, 0)
        return torch.bfloat16 if capability >= (8, 0) else torch.float16 if capability >= (7, 0) else torch.float32

    def pattern(self, base: str, heads: int, longest: int | None = None) -> DilatedPattern | BlockPattern:
        if base == "dilated":
            return rules.branches(self.length, heads, longest)
        return DilatedPattern((MAX_LENGTH,), (1,)) if base == "dense" else GlobalLocal((_WINDOW, 0 if self.causal else _WINDOW), _GLOBAL)

    def model(self, base: str, longest: int | None = None) -> rules.Model:
        """Returns the model with the number of heads that determines the dilation rates of its branches."""
        heads = self.heads
        if heads is None:
            heads = rules.language_model(self.parameters, None, self.head_dim, self.causal, {"attention": "dense"}).config.num_heads
        pattern = self.pattern(base, heads, longest)
        changes: dict[str, Any] = branches_of(pattern) if base == "dilated" else {"attention": base}
        if base == "block_sparse":
            changes["block_pattern"] = pattern
        return rules.language_model(self.parameters, self.heads, self.head_dim, self.causal, changes)

    def attention_arguments(self, base: str, pattern: DilatedPattern | BlockPattern, context: int) -> dict[str, Any]:
        """Returns the arguments of a layer; dense attention is one segment of the whole sequence."""
        whole = DilatedPattern((self.length,), (1,)) if base == "dense" else pattern
        return ({"pattern": pattern} if base == "block_sparse" else branches_of(whole)) | self.mesh_arguments(base, context)

    def mesh_arguments(self, base: str, context: int) -> dict[str, Any]:
        """Returns the arguments for a sequence shared by several processes; ``mesh`` is the variable that ``setup`` creates."""
        layout = "zigzag" if base == "dense" and self.causal else "contiguous"
        return {"mesh": _Source('mesh["cp"]'), "layout": layout} if context > 1 else {}

    def setup(self, function: str, base: str, data: int = 1, context: int = 1, module: str = "") -> list[str]:
        """Returns the lines that import a function and the pattern, and start the processes of several GPUs as a mesh."""
        lines = [f"from dilated_attention{module} import {function}"]
        if base == "block_sparse":
            lines.append("from dilated_attention.pattern import GlobalLocal")
        if data * context > 1:
            launched = f"  # torchrun --nproc_per_node={data * context}" if data * context <= 8 else ""
            device = "cuda" if self.on_gpu else "cpu"
            lines += [
                "import torch.distributed as dist",
                f"dist.init_process_group(){launched}",
                f'mesh = dist.init_device_mesh("{device}", ({data}, {context}), mesh_dim_names=("dp", "cp"))',
            ]
        return lines


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """The attention that was chosen, what a device holds at a time, and the distribution over GPUs."""

    base: str
    pattern: DilatedPattern | BlockPattern
    heads: int
    head_dim: int
    kv_heads: int | None = None
    needs_grad: bool = True
    sequences: int = 1
    data: int = 1
    context: int = 1
    memory: int | None = None
    fits: bool | None = None

    @property
    def kind(self) -> str:
        return _RING[self.base] if self.context > 1 else self.base


class _Source(str):
    """Source code that is inserted verbatim."""

    __repr__ = str.__str__


def answer(case: Case, chosen: Chosen, facts: dict[str, Any], setup: list[str], code: str) -> Recommendation:
    """Assembles the recommendation from what was chosen and the facts that only some use cases have."""
    explanation, pattern = _explained(case, chosen, case.hardware), chosen.pattern
    dense = (case.length + 1) / 2 if case.causal else case.length
    keys = pattern.pairs(case.length, chosen.heads, is_causal=case.causal) / (case.length * chosen.heads)
    found = _common_facts(case, chosen, explanation) | {"keys": keys, "dense": dense, "share": keys / dense} | facts
    branches = branches_of(pattern) if chosen.base == "dilated" else {"segment_lengths": (), "dilation_rates": ()}
    asked = {name: value for name, value in vars(case).items() if name not in ("hardware", "here")}
    return Recommendation(
        use_case=case.name, request=asked | {"machine": case.machine.name, "memory": case.machine.memory},
        machine=f"{case.length:,} positions on {f'{case.gpus} × ' if case.gpus > 1 else ''}{case.machine.name}", kind=chosen.kind,
        keys_per_query=keys, dense_keys_per_query=dense, forward=explanation.forward, backward=explanation.backward, memory=chosen.memory,
        fits=chosen.fits, settings=settings_of(found), setup=tuple(setup), code=code, **branches,
    )  # fmt: skip


def _common_facts(case: Case, chosen: Chosen, explanation: Explanation) -> dict[str, Any]:
    machine, pattern, length, gpus = case.machine, chosen.pattern, case.length, chosen.data * chosen.context
    is_slides, capability = case.name == "torchscale", case.hardware.capability
    taken = [name for name in (explanation.forward, explanation.backward) if name]
    facts: dict[str, Any] = vars(case) | vars(chosen) | {
        "use": case.name, "kind": chosen.kind, "asked": case.attention is not None, "training": chosen.needs_grad, "cuda": case.on_gpu,
        "hopper": capability is not None and capability[0] == 9 and not case.hardware.is_rocm, "machine": machine.name,
        "available": readable(machine.memory), "dtype": str(case.dtype).removeprefix("torch."),
        "usual_head_dim": chosen.head_dim in (64, 128), "pattern": shown(pattern),
        "memory": "" if chosen.memory is None else readable(chosen.memory), "fits": "fits" if chosen.fits else "does not fit",
        "part": -(-length // chosen.context), "count": chosen.sequences,
        # the class token precedes a slide's tiles
        "positions": -(-chosen.sequences * length // chosen.context) + is_slides,
        "too_short_to_share": chosen.context == 1 and length / gpus < rules.TOKENS_PER_GPU and case.batch < gpus,
        "computable": bool(taken), "forward": explanation.forward, "backward": explanation.backward,
        "plain": _plain(case, chosen, explanation), "described": explanation.request.describe(),
        "basis": " · ".join(dict.fromkeys(basis for basis in (explanation.forward_basis, explanation.backward_basis) if basis)),
        "extras": ",".join(_EXTRAS[name] for name in dict.fromkeys(taken) if name in _EXTRAS),
        "nested": chosen.base == "dilated" and not is_slides and not explanation.nested_reasons,
        "SHORT": rules.SHORT, "LONG": rules.LONG, "TOKENS_PER_GPU": rules.TOKENS_PER_GPU,
        "checkpointed": None, "sharded": False, "seconds": "",
    }  # fmt: skip
    if isinstance(pattern, DilatedPattern):
        reach, limited = max(pattern.segment_lengths), any(w > rules.FIRST_SEGMENT * r for w, r in pattern.branches)
        pairs = pattern.branch_pairs(length, chosen.heads, is_causal=case.causal)
        facts |= {
            "branches": ", ".join(f"{w}/{r}" for w, r in pattern.branches), "reach": reach, "is_cut": reach < length,
            "each": ", ".join(f"{n / (chosen.heads * length):,.0f}" for n in pairs),
            "rates": "above the heads" if max(pattern.dilation_rates) > chosen.heads else "limited" if limited else "",
        }  # fmt: skip
    return facts


def _explained(case: Case, chosen: Chosen, hardware: Hardware) -> Explanation:
    pattern, is_sparse = chosen.pattern, isinstance(chosen.pattern, BlockPattern)
    if isinstance(pattern, BlockPattern):
        rows = max(1, round(pattern.pairs(case.length, 1, is_causal=case.causal) / case.length))
    else:
        rows = max(-(-min(w, case.length) // r) for w, r in pattern.branches)
    return explain_backend(
        hardware=hardware, dtype=case.dtype, head_dim=chosen.head_dim, num_heads=chosen.heads, num_kv_heads=chosen.kv_heads,
        is_causal=case.causal, needs_grad=chosen.needs_grad, length=rows, block_size=128 if is_sparse else None,
        block_masks="bits" if is_sparse else "none",
    )  # fmt: skip


def _plain(case: Case, chosen: Chosen, explanation: Explanation) -> str:
    """Returns the backends with only PyTorch and Triton, where they are others; "" for this machine, whose packages are known."""
    if case.here or not case.on_gpu:
        return ""
    plain = _explained(case, chosen, replace(case.hardware, packages=frozenset({"triton"})))
    if (plain.forward, plain.backward) == (explanation.forward, explanation.backward):
        return ""
    return f"forward {plain.forward}" + (f", backward {plain.backward}" if plain.backward else "")


def time_facts(case: Case, chosen: Chosen, layers: int) -> dict[str, Any]:
    """Returns the plan of one layer's attention and its time; nothing for a GPU whose figures are unknown."""
    machine = case.machine
    if machine.gpu is None and case.on_gpu:
        return {}
    plan = plan_attention(
        chosen.kind, num_positions=case.length, num_heads=chosen.heads, num_kv_heads=chosen.kv_heads, head_dim=chosen.head_dim,
        batch_size=chosen.sequences, dtype=case.dtype, world_size=chosen.context,
        layout=case.mesh_arguments(chosen.base, chosen.context).get("layout"), is_causal=case.causal,
        pattern=None if chosen.base == "dense" else chosen.pattern, gpu=machine.gpu or "cpu", memory=machine.memory, find_longest=False,
    )  # fmt: skip
    if plan.seconds is None:
        return {"plan": plan}
    return {
        "plan": plan, "layers": layers, "seconds": seconds_text(plan.seconds), "seconds_of_layers": seconds_text(plan.seconds * layers),
        "bounds": ", ".join(f"{name} by {one.bound}" for name, one in zip(("forward", "backward"), plan.passes, strict=False)),
        "tflops": plan.passes[0].rate / 1e12, "rate_source": plan.passes[0].source,
    }  # fmt: skip


def shown(value: Any) -> str:
    """Returns a value as source code."""
    return f"GlobalLocal({value.window}, {value.global_tokens})" if isinstance(value, GlobalLocal) else repr(value)


def branches_of(pattern: DilatedPattern | BlockPattern) -> dict[str, Any]:
    assert isinstance(pattern, DilatedPattern)
    return {"segment_lengths": pattern.segment_lengths, "dilation_rates": pattern.dilation_rates}
