"""What ring.py compares: this library, torch's context_parallel, and zhuzilin's ring-flash-attention from the user's own copy.

ring-flash-attention needs the package flash-attn. Here a stand-in of that name runs the kernel of one of this library's backends:
the same kernel under another schedule.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from _ring_cases import Problem

import dilated_attention
from dilated_attention.backends import AttentionRequest, Options, detect, registry
from dilated_attention.backends.base import Bounds

HOW_TO_GET_IT = "other projects' sources are not in this repository: git clone https://github.com/zhuzilin/ring-flash-attention"


# instead of a layout: every rank has all positions
WHOLE = "whole"


class Unavailable(Exception):
    """A contender that this machine, case or command line does not have; with the reason."""


@dataclass(frozen=True)
class Contender:
    """One way to attend over a sequence that is spread over a group.

    Args:
        attend: shards q, k, v (B, n, H, D) -> this rank's out; (B, H, n, D) both ways if ``heads_first``.
        kernel: the backend that its speed is held against, alone on one GPU.
        layout: which positions a rank holds.
        context: entered once around all its calls.
        captures: with --graphs it is timed as a CUDA graph.
    """

    name: str
    attend: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    kernel: str
    layout: str
    context: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
    heads_first: bool = False
    note: str = ""
    captures: bool = False


def resolve(kernel: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    """The backend that ``"auto"`` stands for on this machine."""
    request = AttentionRequest(hardware=detect(device.type), dtype=dtype, head_dim=head_dim, needs_grad=True)
    return registry.select(request, kernel).name


def alone(kernel: str, problem: Problem) -> Contender:
    """One GPU's own attention over the whole of a problem: what a rank's speed is held against."""
    function = dilated_attention.attention if problem.pattern is None else dilated_attention.dilated_attention

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return function(q, k, v, *(problem.pattern or ()), is_causal=problem.is_causal, backend=kernel)

    return Contender(f"alone ({kernel})", attend, kernel, WHOLE, captures=True)


def ours(problem: Problem, group: Any, *, exchange: str, backend: str) -> list[Contender]:
    """This library's own; zigzag where the mask is causal and nothing is dilated."""
    dilated = problem.pattern is not None
    function = getattr(dilated_attention, "ring_dilated_attention" if dilated else "ring_attention", None)
    if function is None:
        raise Unavailable("this version of dilated_attention has no such function")
    layout = "zigzag" if problem.is_causal and not dilated else "contiguous"
    settings = {"group": group, "layout": layout, "exchange": exchange, "is_causal": problem.is_causal, "seq_len": problem.seq_len}
    if backend != "auto":
        settings["backend"] = backend

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return function(q, k, v, *(problem.pattern or ()), **settings)

    return [Contender(f"ours {exchange}" + ("" if backend == "auto" else f" ({backend})"), attend, backend, layout, captures=True)]


def torch_cp(problem: Problem, group: Any, *, rotate: str, device: torch.device) -> list[Contender]:
    """torch's context_parallel, as it should run first: on cuDNN, grouped heads as they are; then what its versions may need."""
    if device.type != "cuda":
        raise Unavailable("torch's context_parallel dispatches CUDA kernels only")
    if problem.pattern is not None:
        raise Unavailable("torch's context_parallel has no dilated attention")
    found = []
    for kernel in ("sdpa_cudnn", "sdpa_flash"):
        for repeated in (False, True) if problem.heads != problem.kv_heads else (False,):
            found.append(_torch_cp(problem, group, rotate, kernel, repeated, device.type))
    return found


def _torch_cp(problem: Problem, group: Any, rotate: str, kernel: str, repeated: bool, device: str) -> Contender:
    grouped = problem.heads // problem.kv_heads

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if repeated:
            k, v = (x.repeat_interleave(grouped, dim=1) for x in (k, v))
        more: dict[str, Any] = {"enable_gqa": True} if grouped > 1 and not repeated else {}
        # looked up at each call: context_parallel replaces it
        return F.scaled_dot_product_attention(q, k, v, is_causal=problem.is_causal, **more)

    return Contender(
        f"torch cp {rotate}",
        attend,
        kernel,
        # its head-tail balance is zigzag; without a causal mask it must be off, and the order natural
        "zigzag" if problem.is_causal else "contiguous",
        functools.partial(_context_parallel, group, rotate, kernel, problem.is_causal, device),
        heads_first=True,
        note="K and V repeated to all heads" if repeated else "",
    )


@contextlib.contextmanager
def _context_parallel(group: Any, rotate: str, kernel: str, is_causal: bool, device: str) -> Iterator[None]:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.nn.attention import SDPBackend, sdpa_kernel

    module = _module_of_context_parallel()
    mesh = DeviceMesh.from_group(group, device)
    which = SDPBackend.CUDNN_ATTENTION if kernel == "sdpa_cudnn" else SDPBackend.FLASH_ATTENTION
    before = module._cp_options.rotate_method
    # a buffer is demanded, and the balance follows from its length; q, k and v are sharded already
    buffer = torch.zeros(2 * dist.get_world_size(group), device=device)
    try:
        module.set_rotate_method(rotate)
        with context_parallel(mesh, buffers=[buffer], buffer_seq_dims=[0]), sdpa_kernel(which):
            # "Load balancing requires is_causal=True"; context_parallel has just set it, and puts it back
            module._cp_options.enable_load_balance = is_causal
            yield
    finally:
        module._cp_options.rotate_method = before


def _module_of_context_parallel() -> Any:
    """The module that keeps context_parallel's options; torch has moved it."""
    for name in ("_context_parallel._attention", "_attention"):
        with contextlib.suppress(ImportError):
            module = importlib.import_module(f"torch.distributed.tensor.experimental.{name}")
            if hasattr(module, "_cp_options") and hasattr(module, "set_rotate_method"):
                return module
    raise Unavailable("context_parallel's options are not where torch 2.11 to 2.13 keep them")


def ring_flash_attention(problem: Problem, group: Any, *, schedule: str, kernel: str, path: str | None) -> list[Contender]:
    """ring-flash-attention's zigzag (causal only) or basic ring on a backend's kernel."""
    if path is None:
        raise Unavailable(f"needs --ring-flash-attention PATH; {HOW_TO_GET_IT}")
    if problem.pattern is not None:
        raise Unavailable("ring-flash-attention has no dilated attention")
    if schedule == "zigzag" and not problem.is_causal:
        raise Unavailable("its zigzag is causal only")
    package = _import_ring_flash_attention(path)
    function = getattr(package, {"zigzag": "zigzag_ring_flash_attn_func", "ring": "ring_flash_attn_func"}[schedule])

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return function(q, k, v, causal=problem.is_causal, group=group)

    layout = "zigzag" if schedule == "zigzag" else "contiguous"
    return [Contender(f"rfa {schedule} ({kernel})", attend, kernel, layout, functools.partial(stand_in, kernel))]


def packed_ring_flash_attention(
    path: str, bounds: torch.Tensor, heads: int, group: Any
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    """ring-flash-attention's llama3 form on causal packed documents, q, k, v (1, n, H, D) of equal contiguous shards.

    Forward and backward run in ``stand_in``, with a backend that takes boundaries.

    Args:
        heads: key/value heads that are gathered at a time (heads_k_stride).
    """
    package = _import_ring_flash_attention(path)
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    *of_rank, rows = package.llama3_flash_attn_prepare_cu_seqlens(bounds, True, rank, size)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        options = {"heads_k_stride": heads, "local_k_slice": rows, "causal": True, "group": group}
        return package.llama3_flash_attn_varlen_func(q[0], k[0], v[0], *of_rank, **options)[None]  # type: ignore[no-any-return]

    return attend


@functools.cache
def _import_ring_flash_attention(path: str) -> Any:
    folder = Path(path).expanduser().resolve()
    if not (folder / "ring_flash_attn" / "__init__.py").is_file():
        raise Unavailable(f"--ring-flash-attention {path}: there is no ring_flash_attn/__init__.py in it; {HOW_TO_GET_IT}")
    interface = types.ModuleType("flash_attn.flash_attn_interface")
    parent = types.ModuleType("flash_attn")
    interface.__dict__.update(
        _flash_attn_forward=_flash_attn_forward,
        _flash_attn_backward=_flash_attn_backward,
        _flash_attn_varlen_forward=_flash_attn_varlen_forward,
        _flash_attn_varlen_backward=_flash_attn_varlen_backward,
    )
    parent.__dict__.update(flash_attn_interface=interface, __path__=[])
    # its adapter for transformers imports names that transformers 5 has no more
    adapters = types.ModuleType("ring_flash_attn.adapters")
    adapters.__dict__.update(substitute_hf_flash_attn=_no_adapter, update_ring_flash_attn_params=_no_adapter)
    stands = {"flash_attn": parent, "flash_attn.flash_attn_interface": interface, "ring_flash_attn.adapters": adapters}
    # FlashAttention-4 lives in a package of the same name: it gets its place back
    kept = {name: module for name, module in sys.modules.items() if name == "flash_attn" or name.startswith("flash_attn.")}
    for name in kept:
        del sys.modules[name]
    sys.modules.update(stands)
    sys.path.insert(0, str(folder))
    try:
        return importlib.import_module("ring_flash_attn")
    finally:
        sys.path.remove(str(folder))
        for name in ("flash_attn", "flash_attn.flash_attn_interface"):
            sys.modules.pop(name, None)
        sys.modules.update(kept)


_kernel = "auto"


@contextlib.contextmanager
def stand_in(kernel: str) -> Iterator[None]:
    """The backend behind flash-attn's functions meanwhile."""
    global _kernel
    before, _kernel = _kernel, kernel
    try:
        yield
    finally:
        _kernel = before


def _options(scale: float, causal: bool, others: tuple[Any, ...]) -> Options:
    assert others == (0, (-1, -1), 0.0, None), f"dropout, windows, softcap and ALiBi are not stood in for: {others}"
    return Options(scale=scale, causal=causal)


# The names and the order of both are flash-attn's: ring-flash-attention reads them by inspection.
def _flash_attn_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    return_softmax: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, None, None]:
    options = _options(softmax_scale, causal, (dropout_p, window_size, softcap, alibi_slopes))
    return *registry.get(_kernel).forward(q, k, v, options), None, None


def _flash_attn_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    rng_state: torch.Tensor | None = None,
) -> None:
    options = _options(softmax_scale, causal, (dropout_p, window_size, softcap, alibi_slopes))
    registry.get(_kernel).backward_into(dout.contiguous(), q, k, v, out, softmax_lse.contiguous(), options, (dq, dk, dv))


def _no_adapter(*args: Any, **kwargs: Any) -> None:
    raise NotImplementedError("not stood in for: the adapters for transformers are not used here")


def _flash_attn_varlen_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    return_softmax: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, None, None]:
    options = _options(softmax_scale, causal, (dropout_p, window_size, softcap, alibi_slopes))
    out = torch.empty_like(q)
    bounds = Bounds(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    lse = registry.get(_kernel).forward_packed(q[None], k[None], v[None], bounds, options, out[None])
    return out, lse[0], None, None


def _flash_attn_varlen_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
) -> None:
    options = _options(softmax_scale, causal, (dropout_p, window_size, softcap, alibi_slopes))
    bounds = Bounds(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    given = [x[None] for x in (dout, q, k, v, out, softmax_lse)]
    registry.get(_kernel).backward_packed(*given, bounds, options, (dq[None], dk[None], dv[None]))
