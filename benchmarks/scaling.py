"""Attention on a sequence that processes share: time, memory, what is sent, and the efficiency against one process.

python -m benchmarks scaling
torchrun --nproc-per-node 4 -m benchmarks scaling --cases 'gigapath-*' 'packed-*' --graphs --lengths-vary
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import dilated_attention as da
from benchmarks.case import GIGAPATH, LONGNET, Case, Family, Pattern, documents, geometric, new_lengths, small
from benchmarks.contenders import Contender, ours
from benchmarks.report import Group, Row
from benchmarks.sharded import OnShards, Ranks, competitors, ring
from benchmarks.speed import FLOPS, call_of
from benchmarks.timing import NEW, WARM, Call, Refused, captured, counted, loop, new_and_again, release
from benchmarks.truth import wrong
from dilated_attention.distributed import Layout
from dilated_attention.distributed.comm.p2p import traffic
from dilated_attention.parsing import size
from dilated_attention.pattern import DilatedPattern, LocalWindow, RandomBlocks, with_sparsity

ABOUT = "attention over processes (torchrun): time, efficiency, memory, traffic, beside torch's context_parallel and ring-flash-attention"
DEFAULT = ("dense-*", "longnet-*", "local-*")
# what lengths are divided by on a CPU, and the longest sequence that is checked
_SHRINK, _CHECKED = 128, 2**19


def _tenth(make: Callable[..., Any], n: int) -> Pattern:
    """Returns a pattern that keeps a tenth of the blocks, of short sequences two in each row."""
    block = 128 if n >= 2**14 else 64
    return make(max(0.1, min(1.0, 2 * block / n)), block_size=block).at(n)


def _fixed(pattern: DilatedPattern, n: int) -> Pattern | None:
    return pattern if n >= 2**14 else small(pattern)


_blocks = functools.partial(Family, heads=(16, 16, 64), lengths=(32768,), layouts=("contiguous", "balanced"))
_local = functools.partial(with_sparsity, kind="local")
FAMILIES = {
    "dense": Family(heads=(32, 8, 128), lengths=(16384, 4096), totals=(65536,), is_causal=True, layouts=("zigzag",)),
    "longnet": Family(lengths=(131072, 32768), totals=(524288,), pattern=geometric, is_causal=True),
    "geometric": Family(heads=(16, 16, 64), lengths=(131072, 32768), pattern=geometric),
    "12x64": Family(lengths=(131072, 32768), pattern=functools.partial(_fixed, LONGNET)),
    "gigapath": Family(heads=(16, 16, 48), lengths=(25000, 100000), pattern=functools.partial(_fixed, GIGAPATH)),
    "random": _blocks(pattern=functools.partial(_tenth, RandomBlocks)),
    "window": _blocks(pattern=functools.partial(_tenth, _local)),
    "bigbird": _blocks(pattern=functools.partial(_tenth, functools.partial(with_sparsity, kind="big_bird"))),
    "local": _blocks(pattern=lambda n: LocalWindow(1024 if n >= 2**14 else 16, block_size=64), totals=(524288,)),
    "packed": Family(heads=(64, 8, 128), lengths=(32768,), is_causal=True, layouts=("balanced", "zigzag", "contiguous"),
                     options=lambda n: {"bounds": documents(n)}),
    "extreme": Family(heads=(1, 1, 64), totals=(2**30,), pattern=geometric, passes=("forward",), fits=False),
    "extreme-training": Family(heads=(1, 1, 64), totals=(2**28,), pattern=geometric, fits=False),
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    about = f"NAME-TOKENS of a process or NAME-of-TOTAL, names are {', '.join(FAMILIES)}; default: {' '.join(DEFAULT)}"
    add = parser.add_argument
    add("--cases", nargs="+", default=DEFAULT, metavar="GLOB", help=about)
    add("--contenders", nargs="+", default=["*"], metavar="GLOB", help="e.g. 'ring*' 'one process'; default: all")
    add("--lengths-vary", action="store_true", help=f"also call each ring at {NEW} lengths that were not before")
    add("--tokens", type=size, nargs="+", help="of each process; default: the cases' own; small: a hundredth")
    add("--heads", type=size, nargs=3, metavar=("H", "HK", "D"), help="query and key/value heads, head dim of all cases")
    add("--masks", nargs="+", choices=("causal", "full"), help="default: the cases' own")
    add("--backends", nargs="+", default=["auto"], help="default: auto")
    add("--ring-flash-attention", metavar="PATH", default="", help="a copy of zhuzilin's ring-flash-attention, run on --backends")
    add("--graphs", action="store_true", help="also time this library's calls as CUDA graphs")
    add("--timeout", type=float, default=60.0, help="seconds that an exchange may take; default 60")


def groups(options: argparse.Namespace) -> list[Group]:
    ranks, made = Ranks(options.device, options.timeout), list[Group]()
    for label, name, length, mask in _cases(options, ranks.size):
        fields = {"dtype": options.dtypes[0], "device": options.device, "is_causal": mask == "causal"}
        fields |= dict(zip(("num_heads", "num_kv_heads", "head_dim"), options.heads or (), strict=False))
        at = functools.partial(FAMILIES[name].case, name, **fields)
        made.append((f"{label} {mask} W={ranks.size}", functools.partial(measure, FAMILIES[name], at, length, ranks, options)))
    return made


def _matches(name: str, globs: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, glob) for glob in globs)


def _cases(options: argparse.Namespace, size: int) -> Iterator[tuple[str, str, int, str]]:
    """Yields (label, family, positions of the whole sequence, mask)."""
    shrink = _SHRINK if options.is_small else 1
    for name, family in FAMILIES.items():
        # what no process can hold is a hundred times as long as the others
        by = shrink if family.fits else shrink**2
        lengths = {f"{name}-{n}": n * size for n in options.tokens or [n // by for n in family.lengths]}
        lengths |= {} if options.tokens else {f"{name}-of-{n // by}": n // by for n in family.totals}
        masks = options.masks or ["causal" if family.is_causal else "full"]
        yield from ((label, name, n, mask) for label, n in lengths.items() for mask in masks if _matches(label, options.cases))


def _contenders(family: Family, case: Case, ranks: Ranks, options: argparse.Namespace) -> Iterator[Contender]:
    # without a causal mask, zigzag balances nothing
    layouts = dict.fromkeys("contiguous" if name == "zigzag" and not case.is_causal else name for name in family.layouts)
    for backend in options.backends:
        suffix = f" ({backend})" if backend != "auto" else ""
        for role in [*(["one process"] if family.fits else []), *(["kernel"] if ranks.size > 1 else [])]:
            yield ours(f"{role}{suffix}", fields={"role": role, "kernel": backend}, backend=backend)
        for layout in layouts:
            make = functools.partial(_ring, ranks, layout, {"backend": backend, "timeout": options.timeout})
            name = f"ring {layout}{suffix}" if len(layouts) > 1 else f"ring{suffix}"
            yield Contender(name=name, role="ring", kernel=backend, make=make)
    if case.pattern is None and ranks.group is not None:
        yield from competitors(case, options.ring_flash_attention, options.backends, ranks)


def _ring(ranks: Ranks, layout: str, options: dict[str, Any], case: Case) -> OnShards:
    held: str | Layout = layout
    if layout == "balanced":
        about: dict[str, Any] = {"is_causal": case.is_causal, "cu_seqlens": case.bounds, "device": case.device}
        held = da.balanced_layout(case.pattern, case.num_positions, ranks.size, case.num_heads, **about)
    return ring(case, ranks, held, **options)


def measure(family: Family, at: Callable[[int], Case], total: int, ranks: Ranks, options: argparse.Namespace) -> list[Row]:
    """Returns a row for each contender and pass at ``total`` positions of all processes; with a note where it fails or is wrong."""
    rows = list[Row]()
    for one in _contenders(family, at(total), ranks, options):
        if not _matches(one.name, options.contenders):
            continue
        case, which = at(total // ranks.size if one.role == "kernel" else total), family.passes[0]
        row = Row(name=one.name, case=case.row() | {"W": ranks.size, "kind": one.role, "kernel": one.kernel})
        who = {"alone": one.role == "one process", "foreign": one.is_foreign}
        with contextlib.ExitStack() as stack:
            try:
                attend = one.make(case)
                context = getattr(attend, "context", contextlib.nullcontext)
                ranks.everywhere(lambda context=context: bool(stack.enter_context(context())), **who)
                checked = at(min(case.num_positions, _CHECKED))
                answers = ranks.everywhere(functools.partial(_errors, one, checked, gradients="both" in family.passes), **who)
                # NaN is the largest
                errors = {key: max((each[key] for each in answers), key=lambda x: (x != x, x)) for key in answers[0]}
                row = replace(row, errors=errors)
                if note := wrong(errors, one.allowed(case)):
                    raise Refused(note)
                for which in family.passes:
                    release()
                    values = _timed(one, attend, at, case, ranks, which, options, who)
                    rows.append(replace(row, case=row.case | {"pass": which}, values=values))
            except Refused as refused:
                rows.append(replace(row, case=row.case | {"pass": which}, note=str(refused)))
        release()
    return _compared(rows)


def _errors(one: Contender, case: Case, *, gradients: bool) -> dict[str, float]:
    attend = one.make(case)
    return one.errors(case, getattr(attend, "whole", attend), gradients=gradients)


def _timed(
    one: Contender, attend: Any, at: Callable[[int], Case], case: Case, ranks: Ranks, which: str, options: argparse.Namespace,
    who: dict[str, bool],
) -> dict[str, float]:  # fmt: skip
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
    values |= ranks.times(lambda: calls[-1](), seconds=options.seconds, **who)
    if options.graphs and case.device.type == "cuda" and not one.is_foreign:
        # a call that cannot be captured has the figures of plain calls alone
        with contextlib.suppress(Refused):
            ranks.everywhere(lambda: calls.append(_captured(calls[0])), **who)
            values["graph"] = ranks.times(lambda: calls[-1](), seconds=options.seconds, **who)["called"]
    if options.lengths_vary and one.role == "ring":

        def make(length: int) -> Call:
            new = at(length)
            return call_of(one.make(new), new, which)

        values |= new_and_again(
            make, list(new_lengths(case, WARM + NEW)), lambda call: ranks.slowest(functools.partial(loop, call, case.device))
        )
    values["tokens_per_s"] = 1000 * case.num_positions / values["called"]
    if (count := one.pairs(case)) is not None:
        parts = ranks.size if isinstance(attend, OnShards) else 1
        values["tflops"] = FLOPS[which] * count * case.head_dim / parts / values["called"] / 1e9
    return values


def _captured(call: Call) -> Call:
    try:
        return captured(call)
    except RuntimeError as error:
        raise Refused(f"cannot be captured: {error}") from error


def _compared(rows: Sequence[Row]) -> list[Row]:
    """Adds ``efficiency``, the time of one process, on the same backend if there is one, over W times this time."""
    alone = {
        (row.case["kernel"], row.case["pass"]): row.values["called"] for row in rows if row.case["kind"] == "one process" and row.values
    }
    compared = []
    for row in rows:
        which = row.case["pass"]
        one = alone.get((row.case["kernel"], which), alone.get(("auto", which)))
        if one and row.values and row.case["kind"] in ("ring", "foreign"):
            row = replace(row, values=row.values | {"efficiency": one / row.case["W"] / row.values["called"]})
        compared.append(row)
    return compared
