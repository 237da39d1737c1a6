"""Attention on a sequence that processes share: time, memory, and the efficiency against one process.

python -m benchmarks scaling
torchrun --nproc-per-node 4 -m benchmarks scaling --cases 'gigapath-*' 'packed-*' --graphs --lengths-vary

All processes learn of a failure on one of them before any continues; times are those of the slowest. Besides rings of this library there
are torch's context_parallel, and zhuzilin's ring-flash-attention from the user's own copy.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import fnmatch
import functools
import importlib
import itertools
import os
import statistics
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F

import dilated_attention as da
from benchmarks import copies
from benchmarks.case import GIGAPATH, LONGNET, Case, Family, Pattern, documents, geometric, new_lengths, our_call, small
from benchmarks.contenders import Contender, ours
from benchmarks.report import Group, Row
from benchmarks.speed import FLOPS, call_of
from benchmarks.timing import NEW, WARM, Call, Refused, attempt, captured, host_time, loop, new_and_again, peak_bytes, release, synchronise
from benchmarks.truth import wrong
from dilated_attention.backends import AttentionRequest, detect, registry
from dilated_attention.distributed import Layout, shard_sequence, unshard_sequence
from dilated_attention.distributed.sharding.layout import layout_name, local_lengths
from dilated_attention.parsing import size
from dilated_attention.pattern import DilatedPattern, LocalWindow, RandomBlocks, with_sparsity

ABOUT = "attention over processes (torchrun): time, efficiency, memory, beside torch's context_parallel and ring-flash-attention"
DEFAULT = ("dense-*", "longnet-*", "local-*")
# what lengths are divided by on a CPU, and the longest sequence that is checked
_SHRINK, _CHECKED = 128, 2**19
T = TypeVar("T")
# seconds that an exchange may take, and until a missing verdict of one process ends the others: longer than kernels take to compile
TIMEOUT, _PATIENCE = 60.0, 300.0
_LOOPS, _MOST_CALLS = 3, 20


def _tenth(make: Callable[..., Any], n: int) -> Pattern:
    """Returns a pattern that keeps a tenth of the blocks, of short sequences two in each row."""
    block = 128 if n >= 2**14 else 64
    return make(max(0.1, min(1.0, 2 * block / n)), block_size=block).at(n)


def _fixed(pattern: DilatedPattern, n: int) -> Pattern | None:
    return pattern if n >= 2**14 else small(pattern)


_blocks = functools.partial(Family, heads=(16, 16, 64), lengths=(32768,), layouts=("contiguous", "balanced"))
FAMILIES = {
    "dense": Family(heads=(32, 8, 128), lengths=(16384, 4096), totals=(65536,), is_causal=True, layouts=("zigzag",)),
    "longnet": Family(lengths=(131072, 32768), totals=(524288,), pattern=geometric, is_causal=True),
    "geometric": Family(heads=(16, 16, 64), lengths=(131072, 32768), pattern=geometric),
    "12x64": Family(lengths=(131072, 32768), pattern=functools.partial(_fixed, LONGNET)),
    "gigapath": Family(heads=(16, 16, 48), lengths=(25000, 100000), pattern=functools.partial(_fixed, GIGAPATH)),
    "random": _blocks(pattern=functools.partial(_tenth, RandomBlocks)),
    "window": _blocks(pattern=functools.partial(_tenth, functools.partial(with_sparsity, kind="local"))),
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


def groups(options: argparse.Namespace) -> list[Group]:
    ranks, made = Ranks(options.device), list[Group]()
    fields = {"dtype": options.dtype, "device": options.device}
    fields |= dict(zip(("num_heads", "num_kv_heads", "head_dim"), options.heads or (), strict=False))
    for name, family in FAMILIES.items():
        # what no process can hold is a hundred times as long as the others
        by = (_SHRINK if family.fits else _SHRINK**2) if options.is_small else 1
        lengths = {f"{name}-{n}": n * ranks.size for n in options.tokens or [n // by for n in family.lengths]}
        lengths |= {} if options.tokens else {f"{name}-of-{n // by}": n // by for n in family.totals}
        masks = options.masks or ["causal" if family.is_causal else "full"]
        for (label, length), mask in itertools.product(lengths.items(), masks):
            if any(fnmatch.fnmatchcase(label, glob) for glob in options.cases):
                at = functools.partial(family.case, name, is_causal=mask == "causal", **fields)
                made.append((f"{label} {mask} W={ranks.size}", functools.partial(measure, family, at, length, ranks, options)))
    return made


def _contenders(family: Family, case: Case, ranks: Ranks, options: argparse.Namespace) -> Iterator[Contender]:
    # without a causal mask, zigzag balances nothing
    layouts = dict.fromkeys("contiguous" if name == "zigzag" and not case.is_causal else name for name in family.layouts)
    for backend in options.backends:
        suffix = f" ({backend})" if backend != "auto" else ""
        for role in [*(["one process"] if family.fits else []), *(["kernel"] if ranks.size > 1 else [])]:
            yield ours(f"{role}{suffix}", fields={"role": role, "kernel": backend}, backend=backend)
        for layout in layouts:
            make = functools.partial(_ring, ranks, layout, {"backend": backend, "timeout": TIMEOUT})
            name = f"ring {layout}{suffix}" if len(layouts) > 1 else f"ring{suffix}"
            yield Contender(name=name, role="ring", kernel=backend, make=make)
    if case.pattern is None and ranks.group is not None:
        yield from competitors(case, options.ring_flash_attention, options.backends, ranks)


def _ring(ranks: Ranks, layout: str | Layout, options: dict[str, Any], case: Case) -> OnShards:
    """This library's function of the case's pattern on this process's part of it."""
    if layout == "balanced":
        about: dict[str, Any] = {"is_causal": case.is_causal, "cu_seqlens": case.bounds, "device": case.device}
        layout = da.balanced_layout(case.pattern, case.num_positions, ranks.size, case.num_heads, **about)
    part = functools.partial(our_call, case, case.pattern, over="ring_", seq_len=case.num_positions, layout=layout, **options)
    return OnShards(part, layout, ranks)


def measure(family: Family, at: Callable[[int], Case], total: int, ranks: Ranks, options: argparse.Namespace) -> list[Row]:
    """Returns a row for each contender and pass at ``total`` positions of all processes; with a note where it fails or is wrong."""
    rows = list[Row]()
    for one in _contenders(family, at(total), ranks, options):
        if not any(fnmatch.fnmatchcase(one.name, glob) for glob in options.contenders):
            continue
        case, which = at(total // ranks.size if one.role == "kernel" else total), family.passes[0]
        row = Row(name=one.name, case=case.row() | {"W": ranks.size, "kind": one.role, "kernel": one.kernel})
        who = {"alone": one.role == "one process", "foreign": one.is_foreign}
        with contextlib.ExitStack() as stack:
            try:
                attend = one.make(case)
                context = getattr(attend, "context", contextlib.nullcontext)
                ranks.everywhere(lambda context=context: bool(stack.enter_context(context())), **who)  # type: ignore[misc]
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
    _add_efficiency(rows)
    return rows


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
        return {"peak_bytes": peak_bytes(call, case.device)} if case.device.type == "cuda" else {}

    answers = ranks.everywhere(prepare, **who)
    values: dict[str, float] = {name: max(answer[name] for answer in answers) for name in answers[0]}
    values |= ranks.times(lambda: calls[-1](), seconds=options.seconds, **who)
    if options.graphs and case.device.type == "cuda" and not one.is_foreign:
        # a call that cannot be captured has the figures of plain calls alone
        with contextlib.suppress(Refused):
            ranks.everywhere(lambda: calls.append(captured(calls[0])), **who)
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


def _add_efficiency(rows: Sequence[Row]) -> None:
    """Adds ``efficiency``, the time of one process, on the same backend if there is one, over W times this time."""
    timed = [row for row in rows if row.values]
    alone = {(row.case["kernel"], row.case["pass"]): row.values["called"] for row in timed if row.case["kind"] == "one process"}
    for row in timed:
        which = row.case["pass"]
        one = alone.get((row.case["kernel"], which), alone.get(("auto", which)))
        if one and row.case["kind"] in ("ring", "foreign"):
            row.values["efficiency"] = one / row.case["W"] / row.values["called"]


class Ranks:
    """The processes that measure together, one or several. All of them make the same calls in the same order."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.group, self._control = device, None, None
        if "MASTER_ADDR" in os.environ and not dist.is_initialized():
            on_gpu = device.type == "cuda"
            dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
        self.rank, self.size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        if dist.is_initialized():
            limit, patience = (datetime.timedelta(seconds=each) for each in (TIMEOUT, _PATIENCE))
            # verdicts travel over CPUs: a process whose GPU hangs in an exchange can still be waited for
            self.group, self._control = dist.new_group(timeout=limit), dist.new_group(backend="gloo", timeout=patience)

    def everywhere(self, function: Callable[[], T], *, alone: bool = False, foreign: bool = False) -> list[T]:
        """Returns ``function()``, plain figures, of every process by rank; ``alone``: of the first, while the others wait. Raises Refused
        on all processes if one refused or ran out of memory (``foreign``: or raised anything), and else RuntimeError."""
        mine: tuple[Any, str, str] = (None, "", "")
        if self.rank == 0 or not alone:
            try:
                mine = (*attempt(function, foreign=foreign), "")
                synchronise(self.device)
            except Exception as error:
                if self.size == 1:
                    raise
                mine = (None, "", f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
        answers = [mine] * self.size
        if self.size > 1:
            dist.all_gather_object(answers, mine, group=self._control)
        for rank, (_, note, bug) in enumerate(answers):
            if bug:
                raise RuntimeError(f"process {rank}: {bug}")
            if note:
                raise Refused(f"process {rank}: {note}" if self.size > 1 else note)
        return [result for result, _, _ in (answers[:1] if alone else answers)]

    def slowest(self, measure: Callable[[], float], **who: bool) -> float:
        return max(self.everywhere(measure, **who))

    def times(self, call: Call, *, seconds: float, **who: bool) -> dict[str, float]:
        """Returns ``called``, a call of a loop that does not synchronise, and ``host``, until a call returns; of the slowest process."""
        once = self.slowest(lambda: loop(call, self.device), **who)
        count = max(1, min(_MOST_CALLS, int(1000 * seconds / _LOOPS / max(once, 1e-3))))
        loops = [self.slowest(lambda: loop(call, self.device, count), **who) for _ in range(_LOOPS)]
        return {"called": statistics.median(loops), "host": self.slowest(lambda: host_time(call, self.device, count), **who)}


@dataclass(frozen=True)
class OnShards:
    """A function of this process's part of a sequence, on which ``context`` is entered once around all calls."""

    part: Callable[..., torch.Tensor]
    layout: str | Layout
    ranks: Ranks
    context: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext

    def __call__(self, *x: torch.Tensor) -> torch.Tensor:
        return self.part(*x)

    def local(self, case: Case) -> Case:
        """Returns the part of the case that this process holds."""
        return replace(case, num_positions=local_lengths(case.num_positions, self.ranks.size, layout_name(self.layout))[self.ranks.rank])

    def whole(self, *x: torch.Tensor) -> torch.Tensor:
        """Attends on whole tensors, which are equal on all processes."""
        group, size = self.ranks.group, self.ranks.size
        if size == 1:
            return self.part(*x)

        def summed(grad: torch.Tensor) -> torch.Tensor:
            """Adds the processes' parts; each is as often too large as there are processes that pass in the gradient of the whole."""
            grad = grad.contiguous()
            dist.all_reduce(grad, group=group)
            return grad / size

        x = tuple(y.view_as(y) for y in x)
        for y in x:
            if y.requires_grad:
                y.register_hook(summed)
        shards = shard_sequence(group, x, [1] * len(x), layout=self.layout)
        return unshard_sequence(group, [self.part(*shards)], [1], layout=self.layout)[0]


def competitors(case: Case, path: str, kernels: list[str], ranks: Ranks) -> Iterator[Contender]:
    """Yields what has a form of dense attention on the case's documents; in ring-flash-attention ``kernels`` stand in for flash-attn."""
    foreign = functools.partial(Contender, role="foreign", is_foreign=True)
    is_packed, grouped = case.bounds is not None, case.num_heads // case.kv_heads
    # its balance is zigzag; without a causal mask it must be off, and the order natural
    layout = "zigzag" if case.is_causal else "contiguous"
    ways = itertools.product(("allgather", "alltoall"), ("sdpa_cudnn", "sdpa_flash"), (False, True))
    for rotate, kernel, repeats in ways if not is_packed else ():
        if not repeats or grouped > 1:
            name = f"torch context_parallel {rotate} ({kernel}{', K and V repeated' if repeats else ''})"
            make = functools.partial(_torch, layout, rotate, kernel, grouped if repeats else 1, ranks)
            yield foreign(name=name, kernel=kernel, make=make)
    for backend in kernels if path else ():
        request = AttentionRequest(hardware=detect(case.device.type), dtype=case.dtype, head_dim=case.head_dim, needs_grad=True)
        kernel = registry.select(request, backend).name
        for schedule in dict.fromkeys(f"llama3 {heads}" for heads in (case.kv_heads, 1)) if is_packed else ("zigzag", "ring"):
            layout = "zigzag" if schedule == "zigzag" else "contiguous"
            make = functools.partial(_ring_flash_attention, layout, schedule, kernel, path, ranks)
            yield foreign(name=f"ring-flash-attention {schedule} ({kernel})", kernel=kernel, make=make)


def _torch(layout: str, rotate: str, kernel: str, repeats: int, ranks: Ranks, case: Case) -> OnShards:
    if case.device.type != "cuda":
        raise Refused("torch's context_parallel dispatches CUDA kernels only")

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
        if repeats > 1:
            k, v = (x.repeat_interleave(repeats, dim=1) for x in (k, v))
        # looked up at each call: context_parallel replaces it
        out = F.scaled_dot_product_attention(q, k, v, is_causal=case.is_causal, enable_gqa=k.shape[1] != q.shape[1])
        return out.transpose(1, 2)

    return OnShards(attend, layout, ranks, functools.partial(_context_parallel, ranks.group, rotate, kernel, case.is_causal))


@contextlib.contextmanager
def _context_parallel(group: Any, rotate: str, kernel: str, is_causal: bool) -> Iterator[None]:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.nn.attention import SDPBackend, sdpa_kernel

    for name in ("_context_parallel._attention", "_attention"):
        # torch has moved the module that keeps the options
        with contextlib.suppress(ImportError):
            module = importlib.import_module(f"torch.distributed.tensor.experimental.{name}")
            if hasattr(module, "_cp_options") and hasattr(module, "set_rotate_method"):
                break
    else:
        raise Refused("context_parallel's options are not where torch 2.11 to 2.13 keep them")
    which = SDPBackend.CUDNN_ATTENTION if kernel == "sdpa_cudnn" else SDPBackend.FLASH_ATTENTION
    before = module._cp_options.rotate_method
    # a buffer is demanded, and the balance follows from its length; q, k and v are sharded already
    buffer = torch.zeros(2 * dist.get_world_size(group), device="cuda")
    try:
        module.set_rotate_method(rotate)
        with context_parallel(DeviceMesh.from_group(group, "cuda"), buffers=[buffer], buffer_seq_dims=[0]), sdpa_kernel(which):
            # "Load balancing requires is_causal=True"; context_parallel has just set it, and puts it back
            module._cp_options.enable_load_balance = is_causal
            yield
    finally:
        module._cp_options.rotate_method = before


def _ring_flash_attention(layout: str, schedule: str, kernel: str, path: str, ranks: Ranks, case: Case) -> OnShards:
    """Its zigzag (causal only), its basic ring, or its llama3 form for packed documents with so many key/value heads at a time."""
    if not case.is_causal and schedule != "ring":
        raise Refused(f"its {schedule} form is compared for causal attention alone")
    package, copies.standing_in["kernel"] = _imported(path), kernel
    if case.bounds is None:
        function = getattr(package, {"zigzag": "zigzag_ring_flash_attn_func", "ring": "ring_flash_attn_func"}[schedule])
        return OnShards(functools.partial(function, causal=case.is_causal, group=ranks.group), layout, ranks)
    bounds = torch.tensor(case.bounds, dtype=torch.int32, device=case.device)
    *of_rank, rows = package.llama3_flash_attn_prepare_cu_seqlens(bounds, True, ranks.rank, ranks.size)
    options = {"heads_k_stride": int(schedule.split()[1]), "local_k_slice": rows, "causal": True, "group": ranks.group}

    def packed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return package.llama3_flash_attn_varlen_func(q[0], k[0], v[0], *of_rank, **options)[None]  # type: ignore[no-any-return]

    return OnShards(packed, layout, ranks)


@functools.cache
def _imported(path: str) -> Any:
    try:
        folder = copies.find(Path(path), copies.RING)
    except ValueError as missing:
        raise Refused(f"--ring-flash-attention {missing}") from missing
    # FlashAttention-4 is installed in a package of the same name: it gets its place back
    names = ("flash_attn", "flash_attn.flash_attn_interface", "ring_flash_attn.adapters")
    stands = {name: types.ModuleType(name) for name in names}
    vars(stands[names[0]])["__path__"] = []
    vars(stands[names[1]]).update(copies.FLASH_ATTN)
    # its adapter for transformers imports names that transformers 5 no longer has
    vars(stands[names[2]]).update(dict.fromkeys(("substitute_hf_flash_attn", "update_ring_flash_attn_params")))
    with copies.imported(folder, stand_ins=stands):
        return importlib.import_module("ring_flash_attn")
