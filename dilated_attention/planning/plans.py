"""What planning answers, as figures, as JSON and as text: ``AttentionPlan`` and ``ModelPlan``, costs; ``Recommendation``, settings."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from dilated_attention.engine.memory import MemoryEstimate
from dilated_attention.models.summary import USABLE, readable
from dilated_attention.planning.gpus import THIS_CPU
from dilated_attention.planning.memory import Exchange
from dilated_attention.planning.problem import RINGS

_PASSES = ("forward", "backward")
# (unit, its size, the least number that is written in it); each list ends with the unit of all smaller numbers
_TIMES = (("days", 86400, 172800), ("h", 3600, 7200), ("min", 60, 120), ("s", 1, 0.9995), ("ms", 1e-3, 0.9995e-3), ("µs", 1e-6, 0))
_FLOPS = (("EFLOP", 1e18, 0.9995e18), ("PFLOP", 1e15, 0.9995e15), ("TFLOP", 1e12, 0.9995e12), ("GFLOP", 1e9, 0.9995e9), ("MFLOP", 1e6, 0))


# longnet-tiny took 1.5 times what was planned at 8,192 positions, 2.8 with checkpoints at 16,384; with the setting 1.1 times both
OF_MALLOC = "in tensors; glibc's malloc may keep up to twice as much again of what is freed, unless MALLOC_MMAP_THRESHOLD_=2097152 is set"


def seconds_text(seconds: float) -> str:
    """Formats a time in the usual unit for its magnitude: 35 µs, 12.3 ms, 47 s, 6.2 min, 5.1 h, 3.4 days."""
    return _in_units(seconds, _TIMES)


def _in_units(number: float, units: tuple[tuple[str, float, float], ...]) -> str:
    return next(f"{_three_digits(number / size)} {unit}" for unit, size, least in units if number >= least)


def _three_digits(number: float) -> str:
    return f"{number:.3g}" if number < 999.5 else f"{number:,.0f}"


class Pass(NamedTuple):
    """One pass of a call, in seconds.

    Args:
        arithmetic, memory, launches, links: the time that each would take alone.
        backend: the backend that computes the pass.
        rate: mean FLOP/s assumed for the arithmetic.
        source: where the rate comes from.
        exposed: the part of the link time that cannot be hidden behind the arithmetic.
    """

    arithmetic: float
    memory: float
    launches: float
    links: float
    exposed: float
    backend: str
    rate: float
    source: str

    @property
    def parts(self) -> dict[str, float]:
        """Returns the seconds that each would take alone."""
        return {name: getattr(self, name) for name in ("arithmetic", "memory", "launches", "links")}

    @property
    def seconds(self) -> float:
        return max(self.parts.values()) + self.exposed

    @property
    def bound(self) -> str:
        """Returns what takes longest: ``"arithmetic"``, ``"memory"``, ``"launches"`` or ``"links"``."""
        return max(self.parts, key=lambda name: self.parts[name])


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What plans of calls and of models have in common (no ``engine.plan.Plan``). ``str`` prints the figures, ``as_dict`` returns them.
    Times are estimates.

    Args:
        num_positions, …: the request, with defaults filled in. A sequence shared by ``world_size`` processes is planned for the rank with
            the largest share.
        exchange: what a rank receives and sends; for a model, in each layer's attention.
        no_time: why there is no estimate of the time; "" if there is one.
        device, device_memory: name of the machine's device, and its memory in bytes.
        fits: whether the peak is within ``USABLE`` of that memory, and the lists of blocks can index all kept blocks.
        longest: a number of positions that fits where one more does not, up to 2^31; 0 if not even one fits; None if not searched for.
    """

    num_positions: int
    batch_size: int
    dtype: str
    world_size: int
    training: bool
    exchange: Exchange
    no_time: str
    device: str
    device_memory: int
    fits: bool
    longest: int | None

    def as_dict(self) -> dict[str, Any]:
        exchange = self.exchange
        moved = {"name": exchange.name, "steps": exchange.steps, "exact": exchange.is_exact, **exchange.bytes._asdict()}
        return asdict(self) | {"exchange": moved, "no_time": self.no_time or None}

    def _wire(self, each: str = "") -> list[str]:
        """Says what a process receives."""
        if self.world_size == 1:
            return []
        moved, about = self.exchange.bytes, "" if self.exchange.is_exact else "about "
        back = f", {about}{readable(moved.backward_received)} backward" if self.training else ""
        received = f"receives {about}{readable(moved.forward_received)} forward{back}{each}"
        return [f"on the wire  {self.exchange.name}, steps: {self.exchange.steps}; a process {received}"]

    def _end(self, peak: int) -> list[str]:
        """Says whether ``peak`` bytes fit."""
        part = peak / self.device_memory
        share = f"{_three_digits(100 * part)}% of" if part < 10 else f"{_three_digits(part)} times"
        text = f"{'yes' if self.fits else 'no'}: it takes {share} the memory, of which {USABLE:.0%} can be used"
        if self.longest is not None:
            at_least = "at least " if self.longest >= 2**31 else ""
            text += f"; the longest that does: {f'{at_least}{self.longest:,} positions' if self.longest else 'none, not one position fits'}"
        lines = [f"fits         {text}"]
        return [*lines, f"             {OF_MALLOC}"] if self.device == THIS_CPU else lines


@dataclass(frozen=True, kw_only=True)
class AttentionPlan(Plan):
    """The cost of one call: what every ``Plan`` has, and more.

    Args:
        pairs: (query, key) products of the whole call, batch included.
        dense_pairs: pairs of dense attention with the same causality.
        pairs_exact: whether the pairs were counted; otherwise they come from a sample, as for long block patterns.
        flops: (forward, backward) of the whole call: 4·D and 10·D per pair; the backward is 0 without training.
        least_bytes: (forward, backward) memory traffic of one process: what must be read and written once.
        memory: peak bytes of one process, by term.
        passes: forward and backward in seconds, with what they are based on; empty where no rate is known.
    """

    kind: str
    pattern: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layout: str
    is_causal: bool
    pairs: int
    dense_pairs: int
    pairs_exact: bool
    flops: tuple[int, int]
    least_bytes: tuple[int, int]
    memory: MemoryEstimate
    passes: tuple[Pass, ...]
    device_source: str

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
        found, memory = super().as_dict(), self.memory
        del found["dense_pairs"]
        added = ("keys_per_query", "share_of_dense", "seconds")
        found |= {name: getattr(self, name) for name in added} | {"layout": self.layout if self.world_size > 1 else None}
        found |= {name: dict(zip(_PASSES, found[name], strict=True)) for name in ("flops", "least_bytes")}
        sizes = {name: getattr(memory, name) for name in ("peak", "forward_peak", "backward_peak")}
        return found | {
            "memory": sizes | {name: list(map(list, getattr(memory, name))) for name in _PASSES},
            "passes": [
                one._asdict() | {"pass": name, "seconds": one.seconds, "bound": one.bound}
                for name, one in zip(_PASSES, self.passes, strict=False)
            ],
        }

    def heading(self, length: str) -> list[str]:
        heads = f"{self.num_heads} heads of {self.head_dim}"
        heads += f", {self.num_kv_heads} of keys" if self.num_kv_heads != self.num_heads else ""
        flags = [self.dtype, "causal" if self.is_causal else "full", "training" if self.training else "inference"]
        spread = f", {self.world_size} processes, {self.layout}" if self.world_size > 1 else ", 1 process" if self.kind in RINGS else ""
        return [
            f"{self.kind}, {length} × {self.batch_size:,}, {heads}, {', '.join(flags)}{spread}",
            f"on {self.device} with {readable(self.device_memory)} (from: {self.device_source})",
            *([] if self.pattern == "every key" else [f"pattern: {self.pattern}"]),
        ]

    @property
    def total_flops(self) -> float:
        return sum(self.flops)

    @property
    def time_source(self) -> str:
        return "; ".join(dict.fromkeys(one.source for one in self.passes))

    def __str__(self) -> str:
        about, each = "" if self.pairs_exact else "about ", ", per process" if self.world_size > 1 else ""
        names = _PASSES[: 1 + self.training]
        flops = ", ".join(f"{_in_units(number, _FLOPS)} {name}" for number, name in zip(self.flops, names, strict=False))
        least = ", ".join(f"{readable(size)} {name}" for size, name in zip(self.least_bytes, names, strict=False))
        lines = [
            *self.heading(f"{self.num_positions:,} positions"),
            "",
            f"pairs        {about}{self.pairs:,}: {self.keys_per_query:,.1f} keys per query, {self.share_of_dense:.3%} of dense",
            f"FLOPs        {flops}",
            f"least bytes  {least} through device memory{each}",
            "",
            f"peak memory  {readable(self.peak)}{each.replace(',', '')}",
        ]
        for name in names:
            terms = " + ".join(f"{what} {readable(size)}" for what, size in getattr(self.memory, name))
            lines.append(f"  {name:<9}  {readable(getattr(self.memory, f'{name}_peak'))} = {terms}")
        lines += ["", *self._wire(), f"time         {_time(self.seconds, self.no_time)}"]
        for name, one in zip(_PASSES, self.passes, strict=False):
            parts = ", ".join(f"{part} {seconds_text(seconds)}" for part, seconds in one.parts.items() if seconds)
            lines.append(f"  {name:<9}  {seconds_text(one.seconds)}, bound by {one.bound}: {parts}")
            lines.append(f"             {one.backend} at {one.rate / 1e12:,.0f} TFLOP/s: {one.source}")
        return "\n".join([*lines, "", *self._end(self.peak)])


@dataclass(frozen=True, kw_only=True)
class ModelPlan(Plan):
    """A training step, or generation, in figures of one process: what every ``Plan`` has, and more.

    Args:
        attention: the patterns of the layers that take turns.
        parameters: number of parameters of the whole model.
        terms: (what, bytes) at the highest point.
        moment: when the highest point occurs.
        flops: of the whole step: forward and backward, without recomputation; for inference, of the forward.
        seconds: an estimate, None where no rate is known; ``time_source`` says what it is based on. None for a prompt that
            enters a cache.
        decode_seconds: of a step after these, which adds a token to every sequence; None in training, where no rate is known, or for a
            model that does not generate from a cache. ``decode_source`` says what it is based on.
    """

    preset: str
    attention: tuple[str, ...]
    autocast: bool
    weight_shards: int
    checkpoint_activations: bool
    parameters: int
    layers: int
    terms: tuple[tuple[str, int], ...]
    moment: str
    flops: float
    seconds: float | None
    time_source: str
    decode_seconds: float | None = None
    decode_source: str = ""

    @property
    def total_flops(self) -> float:
        return self.flops

    @property
    def peak(self) -> int:
        """Peak bytes of one process."""
        return sum(size for _, size in self.terms)

    def as_dict(self) -> dict[str, Any]:
        return super().as_dict() | {"terms": [list(term) for term in self.terms], "peak": self.peak}

    def heading(self, length: str) -> list[str]:
        flags = [self.dtype, "float32 weights under autocast" if self.autocast else f"{self.dtype} weights"]
        flags.append("training" if self.training else "inference")
        flags += ["activations checkpointed"] if self.checkpoint_activations else []
        flags += [f"{self.world_size} processes share a sequence"] if self.world_size > 1 else []
        flags += [f"weights over {self.weight_shards} processes"] if self.weight_shards > 1 else []
        return [
            f"{self.preset}, {length} × {self.batch_size:,}, {', '.join(flags)}",
            f"on {self.device} with {readable(self.device_memory)}",
        ]

    def __str__(self) -> str:
        lines = [
            *self.heading(f"{self.num_positions:,} positions"),
            "",
            f"parameters   {self.parameters:,} in {self.layers} blocks",
            *(f"attention    {pattern}" for pattern in self.attention),
            f"FLOPs        {_in_units(self.flops, _FLOPS)} per {'step' if self.training else 'forward'}",
            f"peak memory  {readable(self.peak)}, {self.moment}" + (", per process" if self.world_size * self.weight_shards > 1 else ""),
            *(f"  {readable(size):>9}  {what}" for what, size in self.terms),
        ]
        lines += [*self._wire(", per layer"), f"time         {_time(self.seconds, self.no_time)}"]
        if self.seconds is not None:
            lines[-1] += f", {self.batch_size * self.num_positions / self.seconds:,.0f} positions/s"
            # one part per line; text in brackets stays together
            lines += [f"             {part}" for part in re.split(r"; (?![^(]*\))", self.time_source)]
        if self.decode_seconds is not None:
            rate = f"{self.batch_size / self.decode_seconds:,.0f} tokens/s"
            lines.append(f"generating   {seconds_text(self.decode_seconds)} a step (an estimate), {rate}")
            lines.append(f"             {self.decode_source}")
        return "\n".join([*lines, *self._end(self.peak)])


def _time(seconds: float | None, why_not: str) -> str:
    return f"no estimate: {why_not}" if seconds is None else f"{seconds_text(seconds)} (an estimate)"


def plans_table(plans: Sequence[AttentionPlan | ModelPlan]) -> str:
    """Formats plans of one call or model at several lengths; the longest that fits is the last one's."""
    last = plans[-1]
    lines = [f"{'positions':>14}  {'FLOPs':>11}  {'peak memory':>11}  {'time':>9}  fits"]
    for plan in plans:
        flops, time = _in_units(plan.total_flops, _FLOPS), "–" if plan.seconds is None else seconds_text(plan.seconds)
        lines.append(f"{plan.num_positions:>14,}  {flops:>11}  {readable(plan.peak):>11}  {time:>9}  {'yes' if plan.fits else 'no':>4}")
    times = f"times are estimates: {last.time_source}" if last.time_source else f"no times: {last.no_time}"
    return "\n".join([*last.heading("several lengths"), "", *lines, "", "the last row", *last._end(last.peak), times])


@dataclass(frozen=True)
class Setting:
    """One decision.

    Args:
        name, value: the setting and its value.
        reason: a rule that follows from the definition, or a measured figure with the machine it was measured on.
        source: page and heading of this repository's documentation that has the figure, ``"docs/ring.md, Figures"``; or ``"computed"``
            where the planning functions computed it for this request.
    """

    name: str
    value: str
    reason: str
    source: str = "computed"


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """An answer to "what should I use for this?". ``str()`` prints it, ``as_dict()`` returns it.

    Args:
        use_case: one of ``USE_CASES``.
        request: what was asked, with defaults filled in.
        machine: the hardware it is for.
        kind: ``"dense"`` · ``"dilated"`` · ``"block_sparse"``, or for a sequence shared by several processes ``"ring"`` (dense) ·
            ``"ring_dilated"`` · ``"ring_block_sparse"``: the names of ``LongNetConfig.attention``.
        segment_lengths, dilation_rates: of the branches; empty where there are none.
        keys_per_query, dense_keys_per_query: mean number of keys per query and head, with multiplicity; and of dense attention.
        forward, backward: backends chosen on this machine; ``backward`` is None without gradients, both are None where no backend can
            compute it.
        memory: bytes that one device needs by the estimates cited in ``settings``; None where nothing was estimated.
        fits: whether this memory fits on the device; None where nothing was estimated.
        settings: the decisions, ``kind`` and ``branches`` first.
        setup: lines that precede ``code``: imports, a mesh.
        code: the line to paste.
    """

    use_case: str
    request: dict[str, Any]
    machine: str
    kind: str
    segment_lengths: tuple[int, ...]
    dilation_rates: tuple[int, ...]
    keys_per_query: float
    dense_keys_per_query: float
    forward: str | None
    backward: str | None
    memory: int | None
    fits: bool | None
    settings: tuple[Setting, ...]
    setup: tuple[str, ...]
    code: str

    def setting(self, name: str) -> Setting:
        """Returns the decision with this name.

        Raises:
            KeyError: there is none; the message lists the existing names.
        """
        named = {setting.name: setting for setting in self.settings}
        if name not in named:
            raise KeyError(f"no setting is called {name!r}; the settings are {', '.join(named)}")
        return named[name]

    def as_dict(self) -> dict[str, Any]:
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    def text(self, width: int = 118) -> str:
        """Returns the answer in lines of at most ``width`` characters, except for the first line and the code."""
        lines, margin = [f"{self.use_case}: {self.machine}", ""], " " * min(24, width // 3)
        for x in self.settings:
            cited = "" if x.source == "computed" else f" [{x.source}]"
            first = f"{x.name}  ".ljust(len(margin)) + f"{x.value}: {x.reason}{cited}"
            lines += textwrap.wrap(first, width, subsequent_indent=margin, break_on_hyphens=False)
        return "\n".join([*lines, "", *(f"    {line}" for line in (*self.setup, self.code))])

    __str__ = text
