"""Processes that measure together, and what is compared over them.

All learn of a failure on one of them before any continues; times are those of the slowest. Besides rings of this library there are torch's
context_parallel, and zhuzilin's ring-flash-attention from the user's own copy.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import importlib
import itertools
import os
import statistics
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F

from benchmarks import copies
from benchmarks.case import Case, our_call
from benchmarks.contenders import Contender
from benchmarks.timing import Call, Refused, attempt, host_time, loop, synchronise
from dilated_attention.backends import AttentionRequest, detect, registry
from dilated_attention.distributed import Layout, shard_sequence, unshard_sequence
from dilated_attention.distributed.sharding.layout import local_length

T = TypeVar("T")
# seconds until a missing verdict of one process ends the others; longer than kernels take to compile
_PATIENCE = 300.0
_LOOPS, _MOST_CALLS = 3, 20


class Ranks:
    """The processes that measure together, one or several. All of them make the same calls in the same order."""

    def __init__(self, device: torch.device, timeout: float = 60.0) -> None:
        self.device, self.group, self._control = device, None, None
        if "MASTER_ADDR" in os.environ and not dist.is_initialized():
            on_gpu = device.type == "cuda"
            dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
        self.rank, self.size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        if dist.is_initialized():
            limit, patience = (datetime.timedelta(seconds=each) for each in (timeout, max(_PATIENCE, 2 * timeout)))
            # verdicts travel over CPUs: a process whose GPU hangs in an exchange can still be waited for
            self.group, self._control = dist.new_group(timeout=limit), dist.new_group(backend="gloo", timeout=patience)

    def everywhere(self, function: Callable[[], T], *, alone: bool = False, foreign: bool = False) -> list[T]:
        """Returns ``function()``, plain figures, of every process by rank; ``alone``: of the first, while the others wait.

        Raises Refused on all processes if one refused or ran out of memory (``foreign``: or raised anything), and else RuntimeError.
        """
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
        return replace(case, num_positions=local_length(case.num_positions, self.ranks.rank, self.ranks.size, self.layout))

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


def ring(case: Case, ranks: Ranks, layout: str | Layout = "contiguous", **options: Any) -> OnShards:
    """This library's function of the case's pattern on this process's part of it."""
    part = functools.partial(our_call, case, case.pattern, over="ring_", seq_len=case.num_positions, layout=layout, **options)
    return OnShards(part, layout, ranks)


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
