"""What is compared over processes besides rings: torch's context_parallel, and zhuzilin's ring-flash-attention from the user's own copy."""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from benchmarks import copies
from benchmarks.case import Case
from benchmarks.contenders import Contender
from benchmarks.ranks import OnShards, Ranks
from benchmarks.timing import Refused
from dilated_attention.backends import AttentionRequest, detect, registry


def competitors(case: Case, path: str, kernels: list[str], ranks: Ranks) -> Iterator[Contender]:
    """Yields what has a form of dense attention on the case's documents.

    Args:
        path: the folder of ring-flash-attention's source; empty to leave it out.
        kernels: backends that take the place of flash-attn.
    """
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
