"""The request to ``recommend``, the result of a use case, and the settings that every answer includes."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from dilated_attention.pattern import BlockPattern, DilatedPattern, GlobalLocal
from dilated_attention.planning.advice import rationale, rules, run_settings
from dilated_attention.planning.advice.answer import Recommendation, Setting
from dilated_attention.planning.advice.snippets import shown

KINDS = ("dense", "dilated", "block_sparse")
RING = {"dense": "ring", "dilated": "ring_dilated", "block_sparse": "ring_block_sparse"}
# the block pattern that decoding was measured with (docs/decoding.md), applied to both sides where there is no causality
_WINDOW, _GLOBAL = 2047, 128


@dataclass(frozen=True, kw_only=True)
class Case:
    """A request with its defaults filled in."""

    name: str
    length: int
    machine: rules.Machine
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

    def pattern(self, base: str, heads: int, longest: int | None = None) -> DilatedPattern | BlockPattern:
        if base == "dilated":
            return rules.branches(self.length, heads, longest)
        return rules.dense_pattern() if base == "dense" else GlobalLocal((_WINDOW, 0 if self.causal else _WINDOW), _GLOBAL)

    def model(self, base: str, longest: int | None = None) -> rules.Model:
        """Builds the model with the number of heads that determines the dilation rates of its branches."""
        heads = self.heads
        if heads is None:
            heads = rules.language_model(self.parameters, None, self.head_dim, self.causal, {"attention": "dense"}).config.num_heads
        pattern = self.pattern(base, heads, longest)
        changes: dict[str, Any] = {"attention": base} if base != "dilated" else listed(pattern)
        if base == "block_sparse":
            changes["block_pattern"] = pattern
        return rules.language_model(self.parameters, self.heads, self.head_dim, self.causal, changes)


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """What was chosen for a use case, before it is put into words."""

    kind: str
    base: str
    pattern: DilatedPattern | BlockPattern
    heads: int
    kv_heads: int | None
    head_dim: int
    needs_grad: bool
    # positions that a device holds at a time
    positions: int
    memory: int | None = None
    fits: bool | None = None


def told(case: Case, chosen: Chosen, middle: list[Setting], setup: list[str], code: str) -> Recommendation:
    """Assembles the recommendation: the settings in order, including those that every use case has."""
    machine, pattern, dtype = case.machine, chosen.pattern, case.machine.dtype
    call: dict[str, Any] = {
        "heads": chosen.heads, "kv_heads": chosen.kv_heads, "head_dim": chosen.head_dim, "is_causal": case.causal,
        "needs_grad": chosen.needs_grad,
    }  # fmt: skip
    explanation = rationale.explained(machine, dtype, pattern, case.length, **call)
    alone = None
    if machine.is_cuda and not machine.is_here:
        alone = rationale.explained(rationale.without_packages(machine), dtype, pattern, case.length, **call)
    dense = (case.length + 1) / 2 if case.causal else case.length
    keys = pattern.pairs(case.length, chosen.heads, is_causal=case.causal) / (case.length * chosen.heads)
    settings: list[Setting | None] = [
        rationale.kind(chosen.kind, chosen.base, case.length, case.attention, chosen.needs_grad, keys / dense)
        if case.name != "torchscale"
        else rationale.checkpoint_kind(),
        rationale.quality(chosen.base) if case.name != "torchscale" else None,
        _branches(case, chosen, keys, dense),
        rationale.backend(machine, explanation, alone, chosen.base == "dilated" and case.name != "torchscale"),
        rationale.dtype(machine, dtype),
        rationale.precision(machine, chosen.base, case.length, chosen.needs_grad),
        *middle,
    ]
    if chosen.needs_grad:
        settings += [
            run_settings.cuda_graph(chosen.positions, chosen.kind in RING.values()) if machine.is_cuda else None,
            rationale.compiled(machine),
        ]
    settings += [
        rationale.allocator(machine),
        rationale.head_dim(machine, chosen.head_dim, explanation) if case.name != "torchscale" else None,
    ]
    has_branches = isinstance(pattern, DilatedPattern) and chosen.base == "dilated"
    request = {field.name: getattr(case, field.name) for field in fields(case)} | {"machine": machine.name, "memory": machine.memory}
    return Recommendation(
        use_case=case.name,
        request=request,
        machine=f"{case.length:,} positions on {f'{case.gpus} × ' if case.gpus > 1 else ''}{machine.name}",
        kind=chosen.kind,
        segment_lengths=pattern.segment_lengths if has_branches and isinstance(pattern, DilatedPattern) else (),
        dilation_rates=pattern.dilation_rates if has_branches and isinstance(pattern, DilatedPattern) else (),
        keys_per_query=keys,
        dense_keys_per_query=dense,
        forward=explanation.forward,
        backward=explanation.backward,
        memory=chosen.memory,
        fits=chosen.fits,
        settings=tuple(setting for setting in settings if setting is not None),
        setup=tuple(setup),
        code=code,
    )


def _branches(case: Case, chosen: Chosen, keys: float, dense: float) -> Setting | None:
    if chosen.base == "dense":
        return None
    if isinstance(chosen.pattern, BlockPattern):
        return rationale.window(shown(chosen.pattern), keys, dense)
    if case.name == "torchscale":
        return rationale.checkpoint_branches(chosen.pattern, keys, dense)
    return rationale.branches(chosen.pattern, case.length, chosen.heads, case.causal)


def shared(case: Case, base: str, mesh: rules.Mesh, is_sharded: bool) -> list[Setting]:
    """Settings for several GPUs: the mesh, and how the parts of a sequence are exchanged."""
    if case.gpus == 1:
        return []
    exchange = run_settings.exchange(base, case.causal) if mesh.context > 1 else ()
    return [run_settings.parallel(base, mesh, case.length, case.batch, is_sharded), *exchange]


def listed(pattern: DilatedPattern | BlockPattern) -> dict[str, Any]:
    if not isinstance(pattern, DilatedPattern):
        return {}
    return {"segment_lengths": pattern.segment_lengths, "dilation_rates": pattern.dilation_rates}
