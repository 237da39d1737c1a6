"""Who is compared: this library by backend and option, torch's kernels, FlashAttention-4, FlexAttention, TorchScale from a user's copy.

For a case a contender makes a function of q, k, v (B, N, H, D), or calls whose cost alone is asked for, or it refuses with the reason.
"""

from __future__ import annotations

import functools
import itertools
import os
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
from dilated_attention.backends.flash import flash3, flash3_fp8
from dilated_attention.pattern import BlockPattern, DilatedPattern, TopBlocks, to_block_mask

Attend = Callable[..., torch.Tensor]
# of the default contenders, those that a run on a CPU leaves out
GPU_ONLY = ("torch cudnn", "torch flash", "torch efficient", "fa4", "flex", "ours flash4", "ours triton", "attention flash3",
            "attention fp8", "ours fp8")  # fmt: skip


@dataclass(frozen=True)
class Costs:
    """Calls by pass that are timed to compare with, whose results nobody asks for. Their time is multiplied by ``factor``."""

    calls: dict[str, Call]
    factor: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One implementation.

    Args:
        make: case → function, or ``Costs``; raises ``Refused`` or ``BackendUnavailable``.
        pattern: case → the pattern that it computes, None for dense attention, for its pairs and its check.
        mixture_grad: of branches, ``"exact"`` or ``"detached"``.
        trains: whether it has gradients.
        bound: relative error allowed; None for the dtype's bound.
        of: case → the case that it computes instead, as the one without options.
        is_foreign: whether it is other people's code, to which this library's times are compared.
    """

    name: str
    make: Callable[[Case], Any]
    pattern: Callable[[Case], Pattern | None] = lambda case: None
    mixture_grad: str = "exact"
    trains: bool = True
    bound: float | None = None
    of: Callable[[Case], Case] = lambda case: case
    is_foreign: bool = False

    def pairs(self, case: Case) -> int | None:
        """Returns the pairs that it computes, where the data does not decide them."""
        return pairs(case, self.pattern(case) or dense_pattern(case))

    def allowed(self, case: Case) -> float:
        return truth.BOUNDS[case.dtype] if self.bound is None else self.bound

    def errors(self, case: Case, attend: Attend, *, gradients: bool) -> dict[str, float]:
        """Returns relative errors of out and, with ``gradients``, of dq, dk and dv against float64, in sampled rows.

        Blocks chosen by content are those that the pattern chooses for the same q and k.
        """
        leaves = case.qkv(7)
        pattern = self.pattern(case) or dense_pattern(case)
        if isinstance(pattern, TopBlocks):
            pattern = pattern.choose(*(x.detach() for x in leaves[:2]), is_causal=case.is_causal)
        dout, given = (case.dout(101), None) if gradients else (None, None)
        if gradients:
            with torch.no_grad():
                given = []
                for part in [None] if self.pattern(case) is None else truth.softmaxes(case, pattern, self.mixture_grad):
                    torch.manual_seed(truth.SEED)
                    given.append(our_call(case, part, *leaves, return_lse=True))
        torch.manual_seed(truth.SEED)
        with torch.set_grad_enabled(gradients):
            out = attend(*leaves)
        grads = torch.autograd.grad(out, leaves, dout) if gradients else ()
        true = truth.Truth(case, pattern, leaves, dout, given, mixture_grad=self.mixture_grad)
        return true.errors(out, grads)


def ours(
    name: str, pattern: Callable[[Case], Pattern | None], *, trains: bool = True, bound: float | None = None, **options: Any
) -> Contender:
    """This library's function of ``pattern``, called with ``options``."""

    def make(case: Case) -> Attend:
        return functools.partial(our_call, case, pattern(case), **options)

    mixture = options.get("mixture_grad", "exact")
    return Contender(name=name, make=make, pattern=pattern, mixture_grad=mixture, trains=trains, bound=bound)


def _pattern(case: Case) -> Pattern | None:
    return case.pattern


def _dense(case: Case) -> None:
    return None


def equal_pattern(case: Case) -> DilatedPattern:
    """Returns the branches with TorchScale's offsets and zero keys."""
    return DilatedPattern(*zip(*case.branches.branches, strict=True), "blocked", tail="zero_keys")


def _takes_no(case: Case, *able: str) -> None:
    if missing := [name for name in case.options if name not in ("queries", *able)]:
        raise Refused(f"takes no {', '.join(missing)}")
    if "queries" in case.options and case.is_causal:
        raise Refused("its causal mask begins at the first key")


def _sdpa(case: Case) -> Attend:
    """``scaled_dot_product_attention`` as a user calls it."""
    _takes_no(case)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=case.is_causal, enable_gqa=k.shape[1] != q.shape[1]).transpose(1, 2)

    return attend


def _torch_kernel(name: str, case: Case) -> Attend:
    """One of torch's kernels, without the microseconds that the context manager ``sdpa_kernel`` takes."""
    _takes_no(case)
    op = getattr(torch.ops.aten, f"_scaled_dot_product_{name}_attention")
    before: tuple[Any, ...] = () if name == "flash" else (None, True)

    def attend(*qkv: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = op(*(x.transpose(1, 2) for x in qkv), *before, 0.0, case.is_causal)[0]
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
    # shapes as constants: its fastest form
    compiled = torch.compile(flex_attention, fullgraph=True, dynamic=False)

    def attend(*qkv: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = compiled(*(x.transpose(1, 2) for x in qkv), block_mask=mask)
        return out.transpose(1, 2)

    return attend


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


def _single_calls(case: Case) -> Attend:
    """Each packed document in a call of its own."""
    sizes = [last - first for first, last in itertools.pairwise(case.bounds or (0, case.num_positions))]

    def attend(*qkv: torch.Tensor) -> torch.Tensor:
        parts = zip(*(x.split(sizes, 1) for x in qkv), strict=True)
        return torch.cat([our_call(case.plain(), case.pattern, *part) for part in parts], 1)

    return attend


def _torchscale(path: str, kernel: str) -> Contender:
    """TorchScale's dilated attention on q, k, v: gathering, kernel, scattering, no projections. Its code runs unedited."""
    folder = copies.find(Path(path), copies.TORCHSCALE)
    with copies.imported(folder):
        theirs = copies.load("torchscale.component.dilated_attention", kernel).DilatedAttention

    def make(case: Case) -> Attend:
        _takes_no(case)
        if any(w < case.num_positions and w % r for w, r in case.branches.branches):
            raise Refused("shifts all segments after the first where r does not divide w")
        lengths, rates = zip(*case.branches.branches, strict=True)
        args = SimpleNamespace(flash_attention=True, xpos_rel_pos=False, multiway=False, layernorm_eps=1e-5, seq_parallel=False,
                               segment_length=list(lengths), dilated_ratio=list(rates))  # fmt: skip
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

    detached: dict[str, Any] = {"pattern": equal_pattern, "mixture_grad": "detached"}
    return Contender(name="torchscale", make=make, is_foreign=True, **detached)


def contender(name: str, torchscale: str = "") -> Contender:
    """Returns the contender of a name, of which the first word may be followed by a backend: ``"ours flash4"``, ``"floor flash3"``.

    Raises:
        ValueError: there is none, or ``torchscale`` is no copy of it.
        Refused: it needs what was not given.
    """
    kind, _, rest = name.partition(" ")
    fp8: dict[str, Any] = {"precision": "fp8", "trains": False, "bound": 0.15}
    foreign = functools.partial(Contender, name=name, is_foreign=True)
    if kind in ("ours", "attention"):
        options = {"deterministic": {"deterministic": True}, "fp8": fp8}.get(rest, {"backend": rest} if rest else {})
        return ours(name, _pattern if kind == "ours" else _dense, **options)
    if kind == "floor":
        return Contender(name=name, make=functools.partial(_floor, rest or "auto"), pattern=_pattern)
    if name == "torchscale":
        if not torchscale:
            raise Refused("give --torchscale PATH, a copy of github.com/microsoft/torchscale")
        return _torchscale(torchscale, "sdpa_flash" if torch.cuda.is_available() else "sdpa_cpu")
    made: dict[str, Contender] = {
        "equal": ours(name, equal_pattern, mixture_grad="detached"),
        "without": replace(ours(name, _pattern), of=Case.plain),
        "single calls": Contender(name=name, make=_single_calls, pattern=_pattern),
        "torch sdpa": foreign(make=_sdpa),
        **{f"torch {kernel}": foreign(make=functools.partial(_torch_kernel, kernel)) for kernel in ("cudnn", "flash", "efficient")},
        "fa4": foreign(make=_flash4),
        "flex": foreign(make=_flex, pattern=_pattern),
    }
    if name not in made:
        known = ", ".join(("ours [BACKEND | fp8 | deterministic]", "attention [BACKEND]", "floor [BACKEND]", "torchscale", *made))
        raise ValueError(f"there is no contender {name!r}; expected one of {known}")
    return made[name]


def load_libraries() -> None:
    """Loads FlashAttention-3 from the files that FLASH3_LIBRARY, FLASH3_CUDART and FLASH3_FP8_LIBRARY name."""
    if library := os.environ.get("FLASH3_LIBRARY"):
        flash3.load_library(library, os.environ.get("FLASH3_CUDART"))
    if library := os.environ.get("FLASH3_FP8_LIBRARY"):
        flash3_fp8.load_library(library)
