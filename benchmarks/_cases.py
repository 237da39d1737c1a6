"""The cases of versus.py, the ratios of their results, and how one case reads as a line."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dilated_attention import DilatedPattern
from dilated_attention.engine.branches.plan import Shape, make_plan

DENSE = ("flash4", "sdpa_cudnn", "flex")


@dataclass(frozen=True)
class Case:
    name: str
    heads: int
    head_dim: int
    length: int
    lengths: tuple[int, ...]
    rates: tuple[int, ...]
    is_causal: bool = False
    # name of a ratio → the least it should be
    goals: dict[str, float] = field(default_factory=dict)

    @property
    def mask(self) -> str:
        return "causal" if self.is_causal else "full"

    @property
    def label(self) -> str:
        return f"{self.name} {self.length} {self.mask}"

    @property
    def pattern(self) -> DilatedPattern:
        return DilatedPattern(self.lengths, self.rates)

    @property
    def pairs(self) -> int:
        shape = Shape(self.heads, self.heads, (0, self.length), (0, self.length), ((0, self.length),), self.is_causal)
        return make_plan(self.pattern, shape).pairs

    @property
    def dense_pairs(self) -> int:
        return self.heads * (self.length * (self.length + 1) // 2 if self.is_causal else self.length**2)


def make_cases(lengths: list[int]) -> list[Case]:
    """All cases; ``lengths`` are those of LongNet."""
    cases = []
    segments = (2048, 4096, 8192, 16384, 32768)
    for name, heads, dim, rates in (("longnet-12x64", 12, 64, (1, 2, 4, 6, 12)), ("longnet-16x128", 16, 128, (1, 2, 4, 8, 16))):
        for length in lengths:
            goals = {"dense share": 0.85} | ({"forward": 4.3, "training": 3.3} if length == 2**20 else {})
            cases += [Case(name, heads, dim, length, segments, rates, causal, goals) for causal in (False, True)]
    rates = (1, 2, 4, 8, 16)
    goals = {"forward": 3.5, "training": 3.0, "memory": 3.0}
    for length in (10_001, 45_681, 200_000):
        least = goals | ({"dense": 1.0} if length == 10_001 else {})
        cases.append(Case("gigapath", 16, 48, length, (1024, 5792, 32768, 185_363, 1_048_576), rates, False, least))
    cases.append(Case("longvit", 16, 24, 2**20, (1024, 4096, 32768, 262_144, 1_048_576), rates, False, goals))
    return cases


def ratios(case: Case, results: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Competitor over ours: ``forward``, ``training``, ``memory`` of TorchScale, each also ``… equal``; ``dense`` of the fastest dense
    forward, and its share of the ratio of pairs."""
    found: dict[str, float] = {}
    # a wrong result has no speed
    results = {name: result for name, result in results.items() if not result.get("wrong")}
    rival = results.get("torchscale", {})
    for which, end in (("ours", ""), ("equal", " equal")):
        for name, key in (("forward", "forward_ms"), ("training", "training_ms"), ("memory", "training_peak")):
            if key in rival and key in results.get(which, {}):
                found[name + end] = rival[key] / results[which][key]
    per_pair = case.dense_pairs / case.pairs
    for name, key in (("dense", "forward_ms"), ("dense training", "training_ms")):
        times = [results[which][key] for which in DENSE if key in results.get(which, {})]
        if times and key in results.get("ours", {}):
            found[name] = min(times) / results["ours"][key]
            found[f"{name} share"] = found[name] / per_pair
    return found


def line(case: Case, results: dict[str, dict[str, Any]]) -> str:
    """One line: times and memory of each, then every ratio with its goal; ``!`` marks what is short of it."""
    parts = [f"{case.label:<29}"]
    for name, result in results.items():
        if "forward_ms" in result:
            training = f"{result['training_ms']:.2f}" if "training_ms" in result else "–"
            peak = f" {result['training_peak'] / 2**30:.2f} GiB" if "training_peak" in result else ""
            wrong = " WRONG" if result.get("wrong") else ""
            parts.append(f"{name}{wrong} {result['forward_ms']:.2f} / {training} ms{peak}")
        else:
            parts.append(f"{name}: {result.get('note', 'not measured')}")
    for name, ratio in ratios(case, results).items():
        goal = case.goals.get(name.removesuffix(" equal"))
        short = "" if goal is None else f" (goal {goal:g}{'' if ratio >= goal else ' !'})"
        parts.append(f"{name} {ratio:.2f}{'' if 'share' in name else 'x'}{short}")
    return " | ".join(parts)
