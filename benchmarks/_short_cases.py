"""The cases of short.py by name, and who competes in each."""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from _competitors import TorchScale, shifted_from
from _short_problem import Data, Problem, our_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from dilated_attention import DilatedAttention, DilatedPattern

LONGNET = (2048, 4096, 8192, 16384, 32768)
BRANCHES = {
    # heads, head dim, segment lengths, rates
    "longnet": (12, 64, LONGNET, (1, 2, 4, 6, 12)),
    "longnet128": (16, 128, LONGNET, (1, 2, 4, 8, 16)),
    "gigapath": (16, 48, (1024, 5792, 32768, 185_363, 1_048_576), (1, 2, 4, 8, 16)),
    "longvit": (16, 24, (1024, 4096, 32768, 262_144, 1_048_576), (1, 2, 4, 8, 16)),
}
MILLION = ["longnet-1048576", "longnet-1048576-full", "longvit-1048576"]
OPTIONS = {
    "option-padding-suffix": 32768,
    "option-padding-random": 32768,
    "option-dropout": 8192,
    "option-documents": 64,
    "option-float32": 8192,
    "option-window": 32768,
    "option-query-offset": 65536,
    "option-grouped": 32768,
    "option-deterministic": 32768,
}
NAMES = [
    *(f"gigapath-{n}" for n in (5308, 10_001, 45_681, 200_000)),
    *(f"longnet-{n}" for n in (4096, 8192, 32768, 131_072)),
    "dense-4096",
    "module-512-x8",
    *OPTIONS,
]
_NAME = re.compile(r"(?P<family>[a-z][a-z0-9-]*?)(-(?P<length>\d+))?(?P<full>-full)?(-x(?P<batch>\d+))?")
Function = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Contender:
    """``make`` gives a function of q, k, v; what it raises is why it does not compete."""

    name: str
    problem: Problem
    make: Callable[[Data], Function]
    # entered once around all calls, so that it is no part of their time
    context: Callable[[], Any] = contextlib.nullcontext
    # first position whose results are known to be another function's
    until: int | None = None


@dataclass(frozen=True)
class Settings:
    backends: tuple[str, ...] = ()
    torchscale: TorchScale | None = None
    # dense competitors are left out beyond so many pairs of all heads
    most_pairs: float = 5e10
    # every length is divided by it
    divisor: int = 1


@dataclass(frozen=True)
class Case:
    name: str
    contenders: list[Contender] = field(default_factory=list)


def chosen(patterns: list[str] | None, million: bool) -> list[str]:
    """Names of cases: those that ``patterns`` (shell wildcards) match, and others of known families as they are.

    Raises:
        ValueError: no such case.
    """
    everything = [*NAMES, *MILLION]
    if not patterns:
        return everything if million else NAMES
    found: dict[str, None] = {}
    for pattern in patterns:
        names = fnmatch.filter(everything, pattern) or [pattern]
        for name in names:
            parse(name)
        found |= dict.fromkeys(names)
    return list(found)


def parse(name: str) -> tuple[str, int, bool, int]:
    """(family, length, whether not causal, batch) of ``FAMILY-LENGTH[-full][-xBATCH]``; an option's length may be left out."""
    match = _NAME.fullmatch(name)
    if match is not None:
        family, length = match["family"], match["length"] or OPTIONS.get(match["family"])
        if length is not None and family in {*BRANCHES, *OPTIONS, "dense", "module"}:
            full = bool(match["full"]) or family in ("gigapath", "longvit")
            return family, int(length), full, int(match["batch"] or 1)
    families = ", ".join([*BRANCHES, "dense", "module", *OPTIONS])
    raise ValueError(f"there is no case {name!r}; expected FAMILY-LENGTH[-full][-xBATCH], FAMILY one of {families}")


def make_case(name: str, settings: Settings) -> Case:
    family, length, full, batch = parse(name)
    if family in OPTIONS:
        return Case(name, _options(family, length, settings))
    heads, head_dim, _, _ = BRANCHES.get(family, BRANCHES["longnet"])
    dense = Problem(_tiny(length, settings), heads, head_dim, is_causal=not full, batch=batch)
    exact = replace(dense, pattern=_pattern(family, settings))
    contenders: list[Contender] = []
    if family == "dense":
        contenders += _ours(dense, settings)
    elif family == "module":
        contenders += [Contender("ours", exact, _module), *_ours(exact, settings, "function")]
    else:
        contenders += _ours(exact, settings)
        if family != "longnet128" and (full or settings.torchscale):
            contenders += _of_torchscale(exact, settings)
    return Case(name, contenders + _dense(dense, settings))


def _tiny(length: int, settings: Settings) -> int:
    # of a smoke run, so that a case takes a second or two of one core; above 128 rows are sampled
    return length if settings.divisor == 1 else max(64, min(length // settings.divisor, 160))


def _pattern(family: str, settings: Settings) -> DilatedPattern:
    _, _, lengths, rates = BRANCHES.get(family, BRANCHES["longnet"])
    return DilatedPattern([length // settings.divisor for length in lengths], rates)


def _ours(problem: Problem, settings: Settings, label: str = "ours", **more: Any) -> list[Contender]:
    def make(data: Data, backend: str) -> Function:
        return functools.partial(data.call, backend=backend, **more)

    names = {label: "auto"} | {f"{label} {backend}": backend for backend in settings.backends}
    return [Contender(name, problem, functools.partial(make, backend=backend)) for name, backend in names.items()]


def _without(problem: Problem, name: str = "without") -> Contender:
    """The same call without the option."""
    return Contender(name, problem, lambda data: functools.partial(data.call, backend="auto"))


def _module(data: Data) -> Function:
    pattern = data.problem.pattern
    layer = DilatedAttention(pattern.segment_lengths, pattern.dilation_rates)
    return functools.partial(layer, is_causal=data.problem.is_causal)


def _of_torchscale(exact: Problem, settings: Settings) -> list[Contender]:
    """Ours as TorchScale's function, and TorchScale."""
    pattern = replace(exact.pattern, head_offsets="blocked", tail="zero_keys")
    problem = replace(exact, pattern=pattern, mixture_grad="detached")
    contenders = _ours(problem, settings, "equal")
    if (torchscale := settings.torchscale) is not None:

        def make(data: Data) -> Function:
            return torchscale.attention(problem.heads, problem.head_dim, pattern, problem.is_causal)

        contenders.append(Contender("torchscale", problem, make, until=shifted_from(pattern, problem.length)))
    return contenders


def _dense(problem: Problem, settings: Settings, *names: str) -> list[Contender]:
    """Dense attention of torch and FlashAttention-4, where it has no more pairs than ``most_pairs``."""
    if problem.pairs > settings.most_pairs:
        return []
    kernels = {"sdpa_cudnn": SDPBackend.CUDNN_ATTENTION, "sdpa_flash": SDPBackend.FLASH_ATTENTION}
    kernels |= {"sdpa_efficient": SDPBackend.EFFICIENT_ATTENTION, "sdpa_math": SDPBackend.MATH}
    contenders = []
    for name in names or ("sdpa_cudnn", "sdpa_flash", "fa4"):
        if name == "fa4":
            contenders.append(Contender(name, problem, _flash4))
        else:
            contenders.append(Contender(name, problem, _sdpa, functools.partial(sdpa_kernel, kernels[name])))
    return contenders


def _sdpa(data: Data) -> Function:
    is_causal = data.problem.is_causal

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal).transpose(1, 2)

    return attend


def _flash4(data: Data) -> Function:
    from flash_attn.cute.interface import flash_attn_func

    settings: dict[str, Any] = {"causal": data.problem.is_causal}
    if data.problem.window is not None:
        settings = {"causal": False, "window_size": data.problem.window}

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = flash_attn_func(q, k, v, **settings)
        return out[0] if isinstance(out, tuple) else out

    return attend


def _options(family: str, length: int, settings: Settings) -> list[Contender]:
    """Ours with the option, the same call without it, and whoever else can do it."""
    N = _tiny(length, settings)
    heads, head_dim, _, _ = BRANCHES["longnet"]
    dense = Problem(N, heads, head_dim, is_causal=True)
    plain = replace(dense, pattern=_pattern("longnet", settings))
    if family.startswith("option-padding"):
        plain = replace(plain, is_causal=False)
        return [*_ours(replace(plain, padding=(family.removeprefix("option-padding-"), 0.1)), settings), _without(plain)]
    if family == "option-dropout":
        return [*_ours(replace(plain, dropout_p=0.1), settings), _without(plain)]
    if family == "option-documents":
        return _documents(plain, length, settings)
    if family == "option-float32":
        single = replace(dense, dtype=torch.float32)
        dilated = replace(plain, dtype=torch.float32)
        return [*_ours(dilated, settings), _without(plain), *_ours(single, settings, "dense"), *_dense(single, settings, "sdpa_efficient")]
    if family == "option-window":
        windowed = replace(dense, window=(4096 // settings.divisor, 0))
        return [*_ours(windowed, settings), _without(dense), *_dense(windowed, settings, "fa4")]
    if family == "option-query-offset":
        queries = N // 16
        rectangle = replace(dense, queries=queries)
        # 3 % more pairs, and what torch's kernels can do: their causal mask begins at the first key
        full = _without(replace(rectangle, is_causal=False), "dense, full")
        flash = _dense(replace(rectangle, is_causal=False), settings, "sdpa_flash")
        return [*_ours(replace(plain, queries=queries), settings), _without(plain), *_ours(rectangle, settings, "dense"), full, *flash]
    if family == "option-grouped":
        return [*_ours(replace(plain, kv_heads=heads // 3), settings), _without(plain)]
    assert family == "option-deterministic"
    return [*_ours(plain, settings, deterministic=True), _without(plain)]


def _documents(plain: Problem, count: int, settings: Settings) -> list[Contender]:
    """``count`` packed documents; each in a call of its own; and one sequence of as many tokens."""
    draw = random.Random(0)
    count = count if settings.divisor == 1 else 2
    sizes = [draw.randint(500, 20_000) // settings.divisor for _ in range(count)]
    bounds = [0]
    for size in sizes:
        bounds.append(bounds[-1] + size)
    packed = replace(plain, length=bounds[-1], bounds=tuple(bounds))

    def single_calls(data: Data) -> Function:
        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            parts = zip(*(x.split(sizes, 1) for x in (q, k, v)), strict=True)
            return torch.cat([our_call(plain, *part, is_causal=True) for part in parts], 1)

        return attend

    return [*_ours(packed, settings), Contender("single calls", packed, single_calls), _without(replace(plain, length=bounds[-1]))]
