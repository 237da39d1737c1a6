"""Attention on a sequence that processes share: time, memory, what is sent, and the efficiency against one process.

python -m benchmarks scaling
torchrun --nproc-per-node 4 -m benchmarks scaling --cases 'gigapath-*' 'packed-*' --graphs --lengths-vary
torchrun --nproc-per-node 4 -m benchmarks scaling --list --cases '*'
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

import dilated_attention as da
from benchmarks import sharded_competitors
from benchmarks.case import GIGAPATH, Case, Pattern, dense_pattern, new_lengths, pairs, small
from benchmarks.contenders import Contender, Costs, ours
from benchmarks.ranks import OnShards, Ranks, Sharded, ring, ring_call
from benchmarks.report import Row
from benchmarks.session import Group, Session
from benchmarks.slides import sharded_step
from benchmarks.speed import FLOPS, NEW, WARM, call_of
from benchmarks.timing import Call, Refused, captured, counted, loop, release
from benchmarks.truth import Truth, wrong
from dilated_attention.distributed import Layout, spans
from dilated_attention.distributed.comm.comm_stats import traffic
from dilated_attention.parsing import size
from dilated_attention.pattern import DilatedPattern, LocalWindow, RandomBlocks, with_sparsity

ABOUT = "attention over processes (torchrun): time, efficiency, memory, traffic, beside torch's context_parallel and ring-flash-attention"
DEFAULT = ("dense-*", "longnet-*", "local-*")
# what lengths are divided by on a CPU
_SHRINK = 128


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of attention, and the lengths that it is measured at.

    Args:
        heads: query heads, key/value heads, head dim.
        tokens, totals: lengths of one process's part (``dense-16384``), and of whole sequences (``dense-of-65536``).
        pattern: N → branches or blocks; None for dense attention.
        is_packed: whether the sequence is one of packed documents, most short and a few long.
        fits: whether one process can compute the whole sequence, for comparison.
    """

    heads: tuple[int, int, int]
    tokens: tuple[int, ...] = ()
    totals: tuple[int, ...] = ()
    pattern: Callable[[int], Pattern | None] = lambda n: None
    is_causal: bool = False
    layouts: tuple[str, ...] = ("contiguous",)
    passes: tuple[str, ...] = ("forward", "both")
    is_packed: bool = False
    fits: bool = True


def _documents(n: int) -> tuple[int, ...]:
    """Returns where documents begin, and N; their lengths are log-normal, none above a quarter of the whole."""
    generator, bounds = torch.Generator().manual_seed(0), [0]
    while bounds[-1] < n:
        length = int(torch.empty(()).log_normal_(mean=6.5 if n >= 2**14 else 3.0, std=1.4, generator=generator))
        bounds.append(min(n, bounds[-1] + max(1, min(length, n // 4))))
    return tuple(bounds)


def _by_rates(rates: Sequence[int], growth: int, n: int) -> DilatedPattern:
    """Returns branches w = 2048 · growth^i as far as they are no longer than the sequence."""
    lengths = [2048 * growth**i for i in range(len(rates)) if i == 0 or 2048 * growth**i <= n]
    return DilatedPattern(lengths, rates[: len(lengths)])


def _to_the_whole(n: int) -> DilatedPattern:
    """Returns branches of 2,048 keys each, the last one as long as the sequence."""
    lengths = (*(2048 * 4**i for i in range(30) if 2048 * 4**i < n), n)
    return DilatedPattern(lengths, tuple(-(-length // 2048) for length in lengths))


def _tenth(make: Callable[..., Any], n: int) -> Pattern:
    """Returns a pattern that keeps a tenth of the blocks, of short sequences two in each row."""
    block = 128 if n >= 2**14 else 64
    return make(max(0.1, min(1.0, 2 * block / n)), block_size=block).at(n)


_fours = tuple(4**i for i in range(6))
_blocks = functools.partial(Kind, heads=(16, 16, 64), tokens=(32768,), layouts=("contiguous", "balanced"))
KINDS = {
    "dense": Kind(heads=(32, 8, 128), tokens=(16384, 4096), totals=(65536,), is_causal=True, layouts=("zigzag",)),
    "longnet": Kind(
        heads=(12, 12, 64), tokens=(131072, 32768), totals=(524288,), pattern=functools.partial(_by_rates, _fours, 4), is_causal=True
    ),
    "geometric": Kind(heads=(16, 16, 64), tokens=(131072, 32768), pattern=functools.partial(_by_rates, _fours, 4)),
    "12x64": Kind(heads=(12, 12, 64), tokens=(131072, 32768), pattern=functools.partial(_by_rates, (1, 2, 4, 6, 12), 2)),
    "gigapath": Kind(heads=(16, 16, 48), tokens=(25000, 100000), pattern=lambda n: GIGAPATH),
    "random": _blocks(pattern=functools.partial(_tenth, RandomBlocks)),
    "window": _blocks(pattern=functools.partial(_tenth, functools.partial(with_sparsity, kind="local"))),
    "bigbird": _blocks(pattern=functools.partial(_tenth, functools.partial(with_sparsity, kind="big_bird"))),
    "local": _blocks(pattern=lambda n: LocalWindow(1024 if n >= 2**14 else 16, block_size=64), totals=(524288,)),
    "packed": Kind(heads=(64, 8, 128), tokens=(32768,), is_causal=True, layouts=("balanced", "zigzag", "contiguous"), is_packed=True),
    "slide": Kind(heads=(16, 16, 48), totals=(100_000,), pattern=lambda n: GIGAPATH, passes=("both",)),
    "extreme": Kind(heads=(1, 1, 64), totals=(2**30,), pattern=_to_the_whole, passes=("forward",), fits=False),
    "extreme-training": Kind(heads=(1, 1, 64), totals=(2**28,), pattern=_to_the_whole, fits=False),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    about = f"NAME-TOKENS of a process or NAME-of-TOTAL, names are {', '.join(KINDS)}; default: {' '.join(DEFAULT)}"
    add = parser.add_argument
    add("--cases", nargs="+", default=DEFAULT, metavar="GLOB", help=about)
    add("--contenders", nargs="+", default=["*"], metavar="GLOB", help="e.g. 'ring*' 'one process'; default: all")
    add("--list", action="store_true", help="print cases and contenders, and measure nothing")
    add("--lengths-vary", action="store_true", help=f"also call each ring at {NEW} lengths that were not before")
    add("--tokens", type=size, nargs="+", help="of each process; default: the cases' own; small: a hundredth")
    add("--heads", type=size, nargs=3, metavar=("H", "HK", "D"), help="query and key/value heads, head dim of all cases")
    add("--masks", nargs="+", choices=("causal", "full"), help="default: the cases' own")
    add("--backends", nargs="+", default=["auto"], help="default: auto")
    add("--ring-flash-attention", metavar="PATH", default="", help="a copy of zhuzilin's ring-flash-attention, run on --backends")
    add("--check-tokens", type=size, default=2**19, help="longer sequences are checked at this length; default 512k")
    add("--graphs", action="store_true", help="also time this library's calls as CUDA graphs")
    add("--timeout", type=float, default=60.0, help="seconds that an exchange may take; default 60")


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A contender on one case: as "one process" while the others wait, as "kernel" on one process's tokens, as "ring", or "foreign"."""

    contender: Contender
    at: Callable[[int], Case]
    length: int
    role: str
    kernel: str
    kind: Kind
    label: str


def groups(session: Session) -> list[Group]:
    options = session.options
    ranks = Ranks(session.device, options.timeout)
    labels: dict[str, list[Entry]] = {}
    for entry in _entries(session, ranks):
        mask = "causal" if entry.at(entry.length).is_causal else "full"
        labels.setdefault(f"{entry.label} {mask} W={ranks.size}", []).append(entry)
    if options.list:
        if session.rank == 0:
            print(*(f"{label} {entry.contender.name}" for label, entries in labels.items() for entry in entries), sep="\n")
        raise SystemExit(0)
    return [(label, functools.partial(measure, entries, ranks, session)) for label, entries in labels.items()]


def _matches(name: str, globs: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, glob) for glob in globs)


def _cases(session: Session, size: int) -> Iterator[tuple[str, Kind, int, Callable[[int], Case]]]:
    """Yields (label, kind, positions of the whole sequence, N → case)."""
    options, shrink = session.options, _SHRINK if session.is_small else 1
    for name, kind in KINDS.items():
        # what no process can hold is a hundred times as long as the others
        by = shrink if kind.fits else shrink**2
        lengths = {f"{name}-{n}": n * size for n in options.tokens or [n // by for n in kind.tokens]}
        lengths |= {} if options.tokens else {f"{name}-of-{n // by}": n // by for n in kind.totals}
        for (label, length), mask in itertools.product(lengths.items(), options.masks or ["causal" if kind.is_causal else "full"]):
            if _matches(label, options.cases):
                yield label, kind, length, functools.partial(_case, session, name, kind, mask == "causal")


def _case(session: Session, name: str, kind: Kind, is_causal: bool, n: int) -> Case:
    (heads, kv_heads, head_dim), pattern = session.options.heads or kind.heads, kind.pattern(n)
    return Case(
        name=name, num_positions=n, num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, dtype=session.dtype, device=session.device,
        is_causal=is_causal, bounds=_documents(n) if kind.is_packed else None,
        pattern=small(pattern) if session.is_small and isinstance(pattern, DilatedPattern) else pattern,
    )  # fmt: skip


def _entries(session: Session, ranks: Ranks) -> Iterator[Entry]:
    options = session.options
    for label, kind, n, at in _cases(session, ranks.size):
        case = at(n)
        made = list[tuple[str, str, Contender]]()
        # without a causal mask, zigzag balances nothing
        layouts = dict.fromkeys("contiguous" if name == "zigzag" and not case.is_causal else name for name in kind.layouts)
        for backend in () if case.name == "slide" else options.backends:
            suffix = f" ({backend})" if backend != "auto" else ""
            alone = functools.partial(ours, pattern=lambda case: case.pattern, backend=backend)
            made += [("one process", backend, alone(f"one process{suffix}"))] if kind.fits else []
            made += [("kernel", backend, alone(f"kernel{suffix}"))] if ranks.size > 1 else []
            for layout in layouts:
                make = functools.partial(_ring, ranks, layout, {"backend": backend, "timeout": options.timeout})
                name = f"ring {layout}{suffix}" if len(layouts) > 1 else f"ring{suffix}"
                made.append(("ring", backend, replace(alone(name), make=make)))
        if case.pattern is None and ranks.group is not None:
            made += [("foreign", *each) for each in
                     sharded_competitors.competitors(case, options.ring_flash_attention, options.backends, ranks)]  # fmt: skip
        if case.name == "slide":
            for role in ("one process", "ring"):
                step = functools.partial(_slide_step, role == "ring")
                made.append((role, "auto", Contender(name=role, make=step)))
        for role, kernel, one in made:
            if _matches(one.name, options.contenders):
                length = n // ranks.size if role == "kernel" else n
                yield Entry(contender=one, at=at, length=length, role=role, kernel=kernel, kind=kind, label=label)


def _ring(ranks: Ranks, layout: str, options: dict[str, Any], case: Case) -> OnShards:
    held: str | Layout = layout
    if layout == "balanced":
        about: dict[str, Any] = {"is_causal": case.is_causal, "cu_seqlens": case.bounds, "device": case.device}
        held = da.balanced_layout(case.pattern, case.num_positions, ranks.size, case.num_heads, **about)
    return ring(case, ranks, held, **options)


def _slide_step(is_shared: bool, case: Case) -> Costs:
    return Costs({"both": sharded_step(is_shared, case.num_positions, case.device)})


def measure(entries: Sequence[Entry], ranks: Ranks, session: Session) -> list[Row]:
    """Returns a row for each contender and pass; one with a note where it fails or is wrong. Times are compared within the group."""
    rows = list[Row]()
    for entry in entries:
        case = entry.at(entry.length)
        about = case.row() | {"W": ranks.size, "kind": entry.role, "kernel": entry.kernel}
        row, which = Row(name=entry.contender.name, case=about), entry.kind.passes[0]
        with contextlib.ExitStack() as stack:
            try:
                who: dict[str, Any] = {"alone": entry.role == "one process", "foreign": entry.contender.is_foreign}
                attend = entry.contender.make(case)
                context = getattr(attend, "context", contextlib.nullcontext)
                ranks.everywhere(lambda context=context: bool(stack.enter_context(context())), **who)
                answers = ranks.everywhere(functools.partial(_errors, entry, attend, ranks, session.options.check_tokens), **who)
                # NaN is the largest
                errors = {key: max((one[key] for one in answers), key=lambda error: (error != error, error)) for key in answers[0]}
                row = replace(row, errors=errors)
                if note := wrong(errors, entry.contender.allowed(case)):
                    raise Refused(note)
                for which in entry.kind.passes:
                    release()
                    values = _timed(entry, attend, case, ranks, which, session)
                    rows.append(replace(row, case=about | {"pass": which}, values=values))
            except Refused as refused:
                rows.append(replace(row, case=about | {"pass": which}, note=str(refused)))
        release()
    return _compared(rows)


def _errors(entry: Entry, attend: Any, ranks: Ranks, most: int) -> dict[str, float]:
    """Returns the errors of the results, on at most ``most`` positions unless no process can hold the whole."""
    gradients = "both" in entry.kind.passes
    if isinstance(attend, Costs):
        return {}
    if entry.role == "ring" and not entry.kind.fits:
        return _row_errors(entry.at(entry.length), ranks, gradients)
    case = entry.at(min(entry.length, most))
    if case.num_positions != entry.length:
        attend = entry.contender.make(case)
    return entry.contender.errors(case, attend.whole if isinstance(attend, OnShards) else attend, gradients=gradients)


def _row_errors(case: Case, ranks: Ranks, gradients: bool) -> dict[str, float]:
    """Returns the errors in sampled rows of this library's function over processes; other rows and keys stay where they are."""
    if case.num_positions % ranks.size:
        raise Refused(f"{case.num_positions} positions on {ranks.size} processes; sampled rows need equal shards")
    local = replace(case, num_positions=case.num_positions // ranks.size)
    leaves, dout = [x.requires_grad_(gradients) for x in local.qkv(ranks.rank)], local.dout(101 + ranks.rank)
    out, lse = ring_call(case, *leaves, return_lse=True)
    grads = torch.autograd.grad(out, leaves, dout) if gradients else ()
    whole = [Sharded(x, ranks) for x in (out, *grads)]
    lses, inputs = Sharded(lse, ranks, 2), [Sharded(x, ranks) for x in (*leaves, dout)]
    true = Truth(case, case.pattern or dense_pattern(case), inputs[:3], inputs[3] if gradients else None, [(whole[0], lses)], count=16)
    return true.errors(whole[0], whole[1:], lses)


def _timed(entry: Entry, attend: Any, case: Case, ranks: Ranks, which: str, session: Session) -> dict[str, float]:
    who: dict[str, Any] = {"alone": entry.role == "one process", "foreign": entry.contender.is_foreign}
    calls: list[Call] = []

    def prepare() -> dict[str, float]:
        call = call_of(attend, case, which)
        calls.append(call)
        # opens communicators and compiles kernels
        call()
        with traffic() as sent:
            call()
        figures = {"sent_bytes": sent.sent, "received_bytes": sent.received}
        if case.device.type == "cuda":
            with counted(case.device) as peak:
                call()
            figures["peak_bytes"] = peak.bytes
        return figures

    answers = ranks.everywhere(prepare, **who)
    values = {name: max(answer[name] for answer in answers) for name in answers[0]}
    call = calls[0] if calls else lambda: None
    values |= ranks.times(call, seconds=session.seconds, **who)
    if session.options.graphs and case.device.type == "cuda" and not entry.contender.is_foreign:
        # a call that cannot be captured has the figures of plain calls alone
        with contextlib.suppress(Refused):
            ranks.everywhere(lambda: calls.append(_captured(calls[0])), **who)
            values["graph"] = ranks.times(lambda: calls[-1](), seconds=session.seconds, **who)["called"]
    if session.options.lengths_vary and entry.role == "ring" and not isinstance(attend, Costs):
        values |= _new(entry, case, ranks, which)
    values["tokens_per_s"] = 1000 * case.num_positions / values["called"]
    if not isinstance(attend, Costs) and (count := entry.contender.pairs(case)) is not None:
        parts = ranks.size if isinstance(attend, OnShards) else 1
        values["tflops"] = FLOPS[which] * count * case.head_dim / parts / values["called"] / 1e9
        if isinstance(attend, OnShards) and case.bounds is not None:
            runs = [spans(case.num_positions, rank, parts, attend.layout) for rank in range(parts)]
            held = [sum(pairs(case, dense_pattern(case), (start, stop)) or 0 for start, stop, _ in mine) for mine in runs]
            values["imbalance"] = max(held) * parts / sum(held)
    return values


def _new(entry: Entry, case: Case, ranks: Ranks, which: str) -> dict[str, float]:
    """Returns the times of the first and the second call at lengths that were not before, of the slowest process."""
    first, second = list[float](), list[float]()
    for length in new_lengths(case, WARM + NEW):
        at = entry.at(length)
        call = call_of(entry.contender.make(at), at, which)
        for times in (first, second):
            times.append(max(ranks.everywhere(functools.partial(loop, call, at.device))))
    first, second = (sorted(times[WARM:]) for times in (first, second))
    return {"new_ms": first[len(first) // 2], "worst_ms": first[-1], "again_ms": second[len(second) // 2]}


def _captured(call: Call) -> Call:
    try:
        return captured(call)
    except RuntimeError as error:
        raise Refused(f"cannot be captured: {error}") from error


def _compared(rows: Sequence[Row]) -> list[Row]:
    """Adds ``efficiency``, time of one process over W times this time, and ``kernel_share``, rate over that of the kernel alone."""
    known = {(row.case["kind"], row.case["kernel"], row.case["pass"]): row.values for row in rows if row.values}
    compared = []
    for row in rows:
        values, which = dict(row.values), row.case["pass"]
        if values and row.case["kind"] in ("ring", "foreign"):
            # third-party code runs on kernels that may not have been timed alone
            whole, kernel = (
                next((known[key] for each in (row.case["kernel"], "auto") if (key := (role, each, which)) in known), {})
                for role in ("one process", "kernel")
            )
            values["efficiency"] = whole.get("called", math.nan) / row.case["W"] / values["called"]
            values["kernel_share"] = values.get("tflops", math.nan) / kernel.get("tflops", math.nan)
        compared.append(replace(row, values={key: value for key, value in values.items() if value == value}))
    return compared
