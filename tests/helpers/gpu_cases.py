"""Random cases for the GPU tests, a vectorised dense oracle, as the one of loops would take too long, and what others hold of the GPU."""

from __future__ import annotations

import gc
import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from benchmarks.timing import settle
from dilated_attention import DilatedPattern

# a CUDA context, beside what torch has reserved
_CONTEXT_BYTES = 2**30
# scores of a case in float64, of which the oracle holds a few and a dozen processes share one GPU
_MOST_SCORES = 2**23


def others_hold() -> int:
    """Bytes of this GPU that other processes have; a GiB of them may be this one's own context."""
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


def is_shared() -> bool:
    return others_hold() > 2 * _CONTEXT_BYTES


def bare() -> int:
    """Gives back all that no tensor holds, cuBLAS's workspaces included, and returns the bytes that tensors hold."""
    settle()
    gc.collect()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated()


@dataclass(frozen=True)
class Case:
    batch: int
    length: int
    num_queries: int
    query_offset: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    pattern: DilatedPattern
    is_causal: bool
    mixture_grad: str
    bounds: tuple[int, ...] | None
    padded: bool
    window: tuple[int, int] | None
    lse_grad: bool
    layout: str
    softcap: float | None
    sinks: bool


@dataclass(frozen=True)
class Branches:
    """What the kernels that merge branches are compiled for."""

    lengths: tuple[int, ...]
    rates: tuple[int, ...]
    tail: str
    mixture_grad: str


def draw_branches(seed: str, count: int, *, shortest: int = 1) -> list[Branches]:
    """``count`` of them, the same for the same ``seed``: kernels of a dtype and head dim are then compiled once for all backends."""
    rng = random.Random(seed)
    found = []
    for _ in range(count):
        lengths = tuple(max(shortest, round(2 ** rng.uniform(0, 11.5))) for _ in range(rng.randint(1, 4)))
        rates = tuple(rng.randint(1, min(w, 17)) for w in lengths)
        found.append(Branches(lengths, rates, rng.choice(["mask", "zero_keys"]), rng.choice(["exact", "exact", "detached"])))
    return found


def draw(
    rng: random.Random,
    head_dims: list[int],
    dtypes: list[torch.dtype],
    *,
    key_mask: bool,
    window: bool,
    softcap: bool,
    ratios: list[int],
    branches: Sequence[Branches],
    plain_shapes: bool = False,
) -> Case:
    """A random case of some of ``branches``.

    ``plain_shapes``: for what compiles anew for each number of heads, each size of 1 and each order of strides.
    """
    kv_heads = rng.choice([2] if plain_shapes else [1, 2, 3, 4])
    heads = kv_heads * rng.choice(ratios)
    length = rng.choice([1, 2, 3, rng.randint(4, 64), rng.randint(65, 400), rng.randint(400, 1500)][4 * plain_shapes :])
    batch = rng.choice([1, 2, 3][plain_shapes:])
    length = min(length, math.isqrt(_MOST_SCORES // (batch * heads)))
    windowed, mixture_grad = window and rng.random() < 0.2, "exact"
    if windowed:
        pattern = DilatedPattern([2**40], [1], "zero")
    else:
        chosen = rng.choice(branches)
        split = rng.random() < 0.2 and not plain_shapes
        offsets = "cyclic" if split else rng.choice(["zero"] if plain_shapes else ["cyclic", "blocked", "zero"])
        pattern = DilatedPattern(chosen.lengths, chosen.rates, offsets, "split" if split else "all", chosen.tail)
        mixture_grad = chosen.mixture_grad
    packed = rng.random() < 0.25 and not plain_shapes
    bounds = None
    query_offset, num_queries = 0, length
    if packed:
        bounds = (0, *sorted(rng.randint(0, length) for _ in range(rng.randint(0, 3))), length)
    elif rng.random() < 0.3:
        query_offset = rng.randint(0, length - 1)
        num_queries = rng.randint(1, length - query_offset)
    return Case(
        batch=1 if packed else batch,
        length=length,
        num_queries=num_queries,
        query_offset=query_offset,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=rng.choice(head_dims),
        dtype=rng.choice(dtypes),
        pattern=pattern,
        is_causal=rng.random() < 0.5,
        mixture_grad=mixture_grad,
        bounds=bounds,
        padded=key_mask and rng.random() < 0.4,
        window=(rng.randint(0, length), rng.randint(0, length)) if windowed else None,
        lse_grad=mixture_grad == "exact" and rng.random() < 0.3,
        layout=rng.choice(["contiguous", "heads_first", "packed_qkv"][: 1 if plain_shapes else 3]),
        # one cap only, as flash4 compiles anew for each
        softcap=1.5 if softcap and rng.random() < 0.15 else None,
        sinks=mixture_grad == "exact" and rng.random() < 0.2,
    )


def tensors(case: Case, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    generator = torch.Generator(device).manual_seed(hash((case.length, case.heads, case.head_dim)) % 2**31)

    def make(rows: int, heads: int) -> torch.Tensor:
        x = torch.randn(case.batch, rows, heads, case.head_dim, device=device, dtype=torch.float32, generator=generator).to(case.dtype)
        if case.layout == "heads_first":
            return x.transpose(1, 2).contiguous().transpose(1, 2)
        if case.layout == "packed_qkv":
            return torch.stack([x, x, x], dim=2)[:, :, 1]
        return x

    padding = None
    if case.padded:
        padding = torch.rand(case.batch, case.length, device=device, generator=generator) < 0.4
    q, k, v = make(case.num_queries, case.heads), make(case.length, case.kv_heads), make(case.length, case.kv_heads)
    return q, k, v, padding


def _multiplicity(case: Case, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(m (branches, H, Nq, Nk), z (branches, H, Nq)) in float64."""
    pattern, n = case.pattern, case.length
    bounds = case.bounds or (0, n)
    single = [
        DilatedPattern([w], [r], (tuple(o),) if min(o) >= 0 else "zero", "all", pattern.tail)
        for (w, r), o in zip(pattern.branches, pattern.offsets(case.heads), strict=True)
    ]
    m = torch.zeros(pattern.num_branches, case.heads, n, n, dtype=torch.float64, device=device)
    z = torch.zeros(pattern.num_branches, case.heads, n, dtype=torch.float64, device=device)
    for b, (_branch, offsets) in enumerate(zip(single, pattern.offsets(case.heads), strict=True)):
        w, r = pattern.branches[b]
        for start, end in itertools.pairwise(bounds):
            size = end - start
            if not size:
                continue
            rows = torch.arange(size, device=device)
            for head, offset in enumerate(offsets):
                if offset < 0:
                    continue
                taken = rows % w % r == offset
                same = (rows // w)[:, None] == (rows // w)[None, :]
                block = (same & taken[:, None] & taken[None, :]).double()
                m[b, head, start:end, start:end] = block
                if pattern.tail == "zero_keys" and not case.is_causal:
                    padded = -(-min(w, size) // r)
                    z[b, head, start:end] = torch.where(taken, padded - block.sum(-1), 0.0)
    distance = torch.arange(n, device=device)[None, :] - torch.arange(n, device=device)[:, None]
    if case.is_causal:
        m *= distance <= 0
    if case.window is not None:
        m *= (distance >= -case.window[0]) & (distance <= case.window[1])
    rows = slice(case.query_offset, case.query_offset + case.num_queries)
    return m[:, :, rows], z[:, :, rows]


def dense(
    case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, padding: torch.Tensor | None, sinks: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The attention of ``case`` with every score written out, in the dtype of q, differentiable."""
    m, z = _multiplicity(case, q.device.type)
    repeat = case.heads // case.kv_heads
    k, v = (x.repeat_interleave(repeat, 2) for x in (k, v))
    m = m[:, None]
    if padding is not None:
        m = m * ~padding[None, :, None, None, :]
    s = torch.einsum("bihd,bjhd->bhij", q, k) * case.head_dim**-0.5
    if case.softcap is not None:
        s = case.softcap * (s / case.softcap).tanh()
    s = torch.cat([s, s.new_zeros(*s.shape[:-1], 1)], -1)
    v = torch.cat([v, v.new_zeros(v.shape[0], 1, *v.shape[2:])], 1)
    m = torch.cat([m, z[:, None, ..., None].expand(-1, m.shape[1], -1, -1, 1)], -1)
    if sinks is not None:
        # one key more, whose value is 0
        assert case.mixture_grad == "exact"
        s = torch.cat([s, sinks[None, :, None, None].expand(*s.shape[:-1], 1)], -1)
        v = torch.cat([v, v.new_zeros(v.shape[0], 1, *v.shape[2:])], 1)
        m = torch.cat([m, m.new_full((*m.shape[:-1], 1), 1 / m.shape[0])], -1)

    def softmax(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        empty = (weight.sum(-1) == 0)[..., None]
        logits = torch.where(weight > 0, s + weight.clamp(min=1e-300).log().to(s.dtype), -torch.inf)
        logits = torch.where(empty, 0.0, logits)
        lse = torch.where(empty[..., 0], -torch.inf, logits.logsumexp(-1))
        p = torch.where(empty, 0.0, logits.softmax(-1))
        return torch.einsum("bhij,bjhd->bihd", p, v), lse

    out, lse = softmax(m.sum(0))
    if case.mixture_grad == "detached":
        parts = [softmax(m[b]) for b in range(m.shape[0])]
        shift = torch.where(lse == -torch.inf, 0.0, lse)
        out = sum(part * (part_lse - shift).exp().detach().transpose(1, 2)[..., None] for part, part_lse in parts)
    return out, lse
