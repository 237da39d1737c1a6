"""Who is compared: this library by backend and option, torch's kernels, FlashAttention-4, FlexAttention, TorchScale from a user's copy.

For a case a contender makes a function of q, k, v (B, N, H, D), or calls whose cost alone is asked for, or it refuses with the reason.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks import copies, truth
from benchmarks.case import Case, Pattern, dense_pattern, our_call, pairs
from benchmarks.timing import Call, Refused
from dilated_attention.backends import AttentionRequest, Options, detect, registry
from dilated_attention.pattern import BlockPattern, DilatedPattern, TopBlocks, to_block_mask

Attend = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Costs:
    """Calls by pass that are timed to compare with, whose results nobody asks for. Their time is multiplied by ``factor``."""

    calls: dict[str, Call]
    factor: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One implementation."""

    name: str
    # raises Refused or BackendUnavailable
    make: Callable[[Case], Any]
    # what it computes, for its pairs and its check; None for dense attention
    pattern: Callable[[Case], Pattern | None] = operator.attrgetter("pattern")
    mixture_grad: str = "exact"
    trains: bool = True
    # relative error allowed, if it is not the dtype's
    bound: float | None = None
    # the case that it computes instead, as the one without options
    of: Callable[[Case], Case] = lambda case: case
    is_foreign: bool = False
    # over processes, "one process" while the others wait, "kernel" on one process's tokens, "ring" or "foreign"; and on which backend
    role: str = ""
    kernel: str = "auto"

    def pairs(self, case: Case) -> int | None:
        """Returns the pairs that it computes, where the data does not decide them."""
        return pairs(case, self.pattern(case) or dense_pattern(case))

    def allowed(self, case: Case) -> float:
        return truth.BOUNDS[case.dtype] if self.bound is None else self.bound

    def errors(self, case: Case, attend: Attend, *, gradients: bool, rows: int = truth.ROWS) -> dict[str, float]:
        """Returns relative errors of out and, with ``gradients``, of dq, dk and dv against float64, in sampled rows. Blocks chosen by
        content are those that the pattern chooses for the same q and k."""
        leaves, pattern = case.qkv(7), self.pattern(case) or dense_pattern(case)
        if isinstance(pattern, TopBlocks):
            pattern = pattern.choose(*(x.detach() for x in leaves[:2]), is_causal=case.is_causal)
        true = truth.Truth(case, pattern, self.mixture_grad, count=rows)
        dout = true.dout() if gradients else None
        torch.manual_seed(truth.SEED)
        with torch.set_grad_enabled(gradients):
            out = attend(*leaves)
        return true.errors(leaves, dout, out, torch.autograd.grad(out, leaves, dout) if gradients else ())


def ours(
    name: str, pattern: Callable[[Case], Pattern | None] = operator.attrgetter("pattern"), *, fields: Any = None, **options: Any
) -> Contender:
    """This library's function of ``pattern``, called with ``options``; ``fields`` of the contender."""
    made = {"mixture_grad": options.get("mixture_grad", "exact")} | (fields or {})
    return Contender(name=name, make=lambda case: functools.partial(our_call, case, pattern(case), **options), pattern=pattern, **made)


def equal_pattern(case: Case) -> DilatedPattern:
    """Returns the branches with TorchScale's offsets and zero keys."""
    branches = case.branches
    return DilatedPattern(branches.segment_lengths, branches.dilation_rates, "blocked", tail="zero_keys")


def _takes_no(case: Case, *able: str, cpu: bool = False) -> None:
    if missing := [name for name in case.options if name not in ("queries", *able)]:
        raise Refused(f"takes no {', '.join(missing)}")
    if "queries" in case.options and case.is_causal:
        raise Refused("its causal mask begins at the first key")
    if case.device.type == "cpu" and not cpu:
        raise Refused("compared on a GPU")


def _torch(kernel: str, case: Case) -> Attend:
    """torch's attention as a user calls it, or one kernel, without the microseconds of the context manager ``sdpa_kernel``."""
    _takes_no(case, cpu=kernel == "sdpa")
    before: tuple[Any, ...] = () if kernel == "flash" else (None, True)

    def attend(*qkv: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.transpose(1, 2) for x in qkv)
        if kernel == "sdpa":
            out = F.scaled_dot_product_attention(q, k, v, is_causal=case.is_causal, enable_gqa=k.shape[1] != q.shape[1])
        else:
            out = getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_attention")(q, k, v, *before, 0.0, case.is_causal)[0]
        return out.transpose(1, 2)

    return attend


def _flash4(case: Case) -> Attend:
    _takes_no(case, "window")
    from flash_attn.cute.interface import flash_attn_func

    options: dict[str, Any] = {"causal": case.is_causal} if case.window is None else {"window_size": case.window}

    def attend(*qkv: torch.Tensor) -> torch.Tensor:
        out = flash_attn_func(*qkv, **options)
        return out[0] if isinstance(out, tuple) else out

    return attend


def _flex(case: Case) -> Attend:
    """The case's blocks by compiled FlexAttention."""
    _takes_no(case)
    from torch.nn.attention.flex_attention import flex_attention

    if not isinstance(case.pattern, BlockPattern):
        raise Refused("compared on patterns of blocks")
    mask = to_block_mask(case.pattern, case.num_positions, case.num_heads, is_causal=case.is_causal, device=case.device)
    # a pass is timed by repeating the backward of one forward, which a compiled one refuses where it may overwrite what it was given
    torch._functorch.config.donated_buffer = False
    # shapes as constants: its fastest form
    compiled = torch.compile(flex_attention, fullgraph=True, dynamic=False)
    return lambda q, k, v: compiled(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), block_mask=mask).transpose(1, 2)


def _floor(backend: str, case: Case) -> Costs:
    """The branches' FLOPs as independent dense problems of the shortest w / r, on one library; up to 2^20 rows, then scaled."""
    pattern, heads, dim = case.branches, case.num_heads, case.head_dim
    length = min(case.num_positions, *(w // r for w, r in pattern.branches))
    each = heads * (length * (length + 1) // 2 if case.is_causal else length * length)
    total = pairs(case, pattern) or 0
    count = max(1, min(round(total / each), 2**20 // length))
    dense = replace(case.plain(), num_positions=length, batch_size=count, num_kv_heads=None, pattern=None)
    q, k, v = (x.detach() for x in dense.qkv())
    dout = dense.dout()
    request = AttentionRequest(hardware=detect(case.device), dtype=case.dtype, head_dim=dim, needs_grad=True)
    kernels = registry.select(request) if backend == "auto" else registry.get(backend)
    if reasons := kernels.reasons_against(request):
        raise Refused("; ".join(reasons))
    options = Options(scale=dim**-0.5, causal=case.is_causal)
    out, lse = kernels.forward(q, k, v, options)
    forward = functools.partial(kernels.forward, q, k, v, options)
    backward = functools.partial(kernels.backward, dout, q, k, v, out, lse, options)
    return Costs({"forward": forward, "backward": backward, "both": lambda: (forward(), backward())}, total / (count * each))


def _torchscale(path: str, case: Case) -> Attend:
    """TorchScale's dilated attention on q, k, v: gathering, kernel, scattering, no projections. Its code runs unedited."""
    if not path:
        raise Refused("give --torchscale PATH, a copy of github.com/microsoft/torchscale")
    with copies.imported(copies.find(Path(path), copies.TORCHSCALE)):
        kernel = "sdpa_flash" if torch.cuda.is_available() else "sdpa_cpu"
        theirs = copies.load("torchscale.component.dilated_attention", kernel).DilatedAttention
    _takes_no(case, cpu=True)
    if any(w < case.num_positions and w % r for w, r in case.branches.branches):
        raise Refused("shifts all segments after the first where r does not divide w")
    lengths, rates = (list(x) for x in zip(*case.branches.branches, strict=True))
    args = SimpleNamespace(flash_attention=True, xpos_rel_pos=False, multiway=False, layernorm_eps=1e-5, seq_parallel=False,
                           segment_length=lengths, dilated_ratio=rates)  # fmt: skip
    causal = {"is_causal": case.is_causal}
    # its projections are built but never used
    with torch.device("meta"):
        module = theirs(args, case.num_heads * case.head_dim, case.num_heads, self_attention=True)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        outs, lses = [], []
        for length, rate in zip(lengths, rates, strict=True):
            ki, vi = (module.gathering(x, rate, length, is_kv=True, seq_parall=False, **causal) for x in (k, v))
            qi = module.gathering(q, rate, length, is_kv=False, seq_parall=False, **causal)
            out, lse = module.attention_ops(qi, ki, vi, **causal)
            outs.append(out)
            lses.append(lse)
        joined: torch.Tensor = module.scattering(outs, lses, q.shape[1], q.shape[0]).view(q.shape)
        return joined

    return attend


def contender(name: str, torchscale: str = "") -> Contender:
    """Returns the contender of a name, of which the first word may be followed by a backend: ``"ours flash4"``, ``"floor flash3"``."""
    kind, _, rest = name.partition(" ")
    if kind in ("ours", "attention"):
        fields = {"trains": False, "bound": 0.15} if rest == "fp8" else {}
        named: dict[str, dict[str, Any]] = {"deterministic": {"deterministic": True}, "fp8": {"precision": "fp8"}, "": {}}
        return ours(name, *([lambda case: None] if kind == "attention" else []), fields=fields, **named.get(rest, {"backend": rest}))
    if kind == "floor":
        return Contender(name=name, make=functools.partial(_floor, rest or "auto"))
    dense: dict[str, Any] = {"pattern": lambda case: None, "is_foreign": True}
    equal: dict[str, Any] = {"pattern": equal_pattern, "mixture_grad": "detached"}
    table: dict[str, dict[str, Any]] = {
        "equal": equal | {"make": ours("", equal_pattern, mixture_grad="detached").make},
        "torchscale": equal | {"make": functools.partial(_torchscale, torchscale), "is_foreign": True},
        "without": {"make": ours("").make, "of": Case.plain},
        **{f"torch {kernel}": dense | {"make": functools.partial(_torch, kernel)} for kernel in ("sdpa", "cudnn", "flash", "efficient")},
        "fa4": dense | {"make": _flash4},
        "flex": {"make": _flex, "is_foreign": True},
    }  # fmt: skip
    if name not in table:
        known = ", ".join(("ours [BACKEND | fp8 | deterministic]", "attention [BACKEND]", "floor [BACKEND]", *table))
        raise ValueError(f"there is no contender {name!r}; expected one of {known}")
    return Contender(name=name, **table[name])
