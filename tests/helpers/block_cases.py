"""Random lists of blocks, and dense float64 attention under the same mask: what every kernel of lists is tested against."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from dilated_attention.backends.base import Mask, Options
from dilated_attention.pattern.blocks.block_lists import WORD, BlockLists


@dataclass(frozen=True, kw_only=True)
class BlockCase:
    """Shapes and a random mask. ``groups``: (batch entries, heads) with lists of their own, 1 or all."""

    batch: int = 1
    num_queries: int = 256
    num_keys: int = 256
    heads: int = 2
    kv_heads: int = 2
    head_dim: int = 16
    q_block: int = 64
    k_block: int = 64
    groups: tuple[int, int] = (1, 1)
    density: float = 0.5
    masks: str = "none"
    padding: str = "none"
    empty_rows: bool = True
    layout: str = "contiguous"
    dtype: torch.dtype = torch.float64
    softcap: float = 0.0
    seed: int = 0

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5


@dataclass(frozen=True)
class Problem:
    case: BlockCase
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    dlse: torch.Tensor
    mask: torch.Tensor
    lists: BlockLists
    padding: torch.Tensor | None
    interval: tuple[torch.Tensor, torch.Tensor] | None = field(default=None)

    @property
    def options(self) -> Options:
        return Options(scale=self.case.scale, mask=Mask(padding=self.padding), softcap=self.case.softcap)


def lists_from_dense(
    mask: torch.Tensor, q_block: int, k_block: int, interval: tuple[torch.Tensor, torch.Tensor] | None = None
) -> BlockLists:
    """Lists of a dense bool mask (batch entries, heads, Nq, Nk), the first two 1 or all. Bits past the ends are arbitrary."""
    num_batch, num_heads, Nq, Nk = mask.shape
    rows, columns = -(-Nq // q_block), -(-Nk // k_block)
    real = torch.zeros(rows * q_block, columns * k_block, dtype=torch.bool)
    real[:Nq, :Nk] = True
    kept = torch.zeros(num_batch * num_heads, *real.shape, dtype=torch.bool)
    kept[:, :Nq, :Nk] = mask.cpu().flatten(0, 1)

    def tiles(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (columns, k_block)).unflatten(-3, (rows, q_block)).transpose(-3, -2)

    whole = (tiles(kept | ~real)).flatten(-2).all(-1)
    some = tiles(kept).flatten(-2).any(-1)
    group, row, column = some.nonzero(as_tuple=True)
    starts = torch.zeros(kept.shape[0] * rows + 1, dtype=torch.int32)
    starts[1:] = some.sum(-1).flatten().cumsum(0)
    masked = ~whole[group, row, column]
    masks, bits = None, torch.empty(0, q_block, k_block // WORD, dtype=torch.int32)
    if masked.any():
        noise = torch.rand(kept.shape, generator=torch.Generator().manual_seed(1)) < 0.5
        if interval is not None:
            low, high = (x.cpu()[:, None] for x in interval)
            j = torch.arange(Nk)
            said = torch.zeros_like(real)
            said[:Nq, :Nk] = (low <= j) & (j < high)
            assert (tiles(kept)[group, row, column] == (tiles(said) & tiles(real))[row, column])[masked].all()
        different, which = tiles(torch.where(real, kept, noise))[group, row, column][masked].unique(dim=0, return_inverse=True)
        weights = torch.tensor([1 << n for n in range(WORD)], dtype=torch.int64)
        bits = (different.unflatten(-1, (k_block // WORD, WORD)).long() * weights).sum(-1)
        bits = torch.where(bits >= 2**31, bits - 2**32, bits).to(torch.int32)
        masks = torch.full(column.shape, -1, dtype=torch.int32)
        masks[masked] = which.to(torch.int32)
    device = mask.device
    return BlockLists(
        num_queries=Nq,
        num_keys=Nk,
        q_block=q_block,
        k_block=k_block,
        num_batch=num_batch,
        num_heads=num_heads,
        row_starts=starts.to(device),
        columns=column.to(torch.int32).to(device),
        masks=None if masks is None else masks.to(device),
        bits=bits.to(device),
        interval=None if masks is None or interval is None else (interval[0].to(device), interval[1].to(device)),
    )


def random_mask(case: BlockCase) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor] | None]:
    """(bool (batch entries, heads, Nq, Nk), interval or None). Where masks are intervals, some blocks outside them are kept whole."""
    rng = torch.Generator().manual_seed(case.seed)
    num_batch, num_heads = (case.batch if case.groups[0] > 1 else 1), (case.heads if case.groups[1] > 1 else 1)
    Nq, Nk = case.num_queries, case.num_keys
    rows, columns = -(-Nq // case.q_block), -(-Nk // case.k_block)

    def spread(blocks: torch.Tensor) -> torch.Tensor:
        return blocks.repeat_interleave(case.q_block, -2).repeat_interleave(case.k_block, -1)[..., :Nq, :Nk]

    blocks = torch.rand(num_batch, num_heads, rows, columns, generator=rng) < case.density
    if case.empty_rows and rows > 1:
        blocks[..., rows // 2, :] = False
    special = torch.rand(blocks.shape, generator=rng) < 0.5
    interval = None
    if case.masks == "none":
        return spread(blocks), None
    if case.masks == "interval":
        low = torch.randint(0, Nk + 1, (Nq,), generator=rng)
        high = (low + torch.randint(0, Nk + 1, (Nq,), generator=rng)).clamp(max=Nk)
        # a few queries whose interval holds nothing
        high[::7] = low[::7]
        interval = (low.to(torch.int32), high.to(torch.int32))
        j = torch.arange(Nk)
        pairs = ((low[:, None] <= j) & (j < high[:, None])).expand(num_batch, num_heads, Nq, Nk)
    else:
        pairs = torch.rand(num_batch, num_heads, Nq, Nk, generator=rng) < 0.3
        pairs = pairs & (torch.arange(Nq) % 5 != 3)[:, None]
    return spread(blocks & ~special) | (spread(blocks & special) & pairs), interval


def make(case: BlockCase, device: str = "cpu") -> Problem:
    rng = torch.Generator().manual_seed(case.seed + 1)

    def tensor(length: int, heads: int) -> torch.Tensor:
        x = torch.randn(case.batch, length, heads, case.head_dim, generator=rng, dtype=torch.float64).to(case.dtype).to(device)
        if case.layout == "heads_first":
            return x.transpose(1, 2).contiguous().transpose(1, 2)
        if case.layout == "packed":
            return torch.stack([x, x + 1, x - 1], 2)[:, :, 0]
        if case.layout == "every_third":
            return torch.stack([x, x + 1, x - 1], 2).flatten(1, 2)[:, ::3]
        return x

    q, dout = tensor(case.num_queries, case.heads), tensor(case.num_queries, case.heads)
    k, v = tensor(case.num_keys, case.kv_heads), tensor(case.num_keys, case.kv_heads)
    acc = torch.float64 if case.dtype is torch.float64 else torch.float32
    dlse = torch.randn(case.batch, case.heads, case.num_queries, generator=rng, dtype=torch.float64).to(acc).to(device)
    mask, interval = random_mask(case)
    padding = None
    if case.padding != "none":
        padding = torch.rand(1 if case.padding == "shared" else case.batch, case.num_keys, generator=rng) < 0.3
        if case.padding == "all":
            padding[0] = True
        elif case.num_keys > case.k_block:
            # a block without padding, and one of nothing else
            padding[:, : case.k_block] = False
            padding[:, -1 - case.num_keys % case.k_block :] = True
    lists = lists_from_dense(mask.to(device), case.q_block, case.k_block, interval)
    if padding is not None:
        padding = padding.to(device)
    return Problem(case, q, k, v, dout, dlse, mask.to(device), lists, padding, interval)


def dense(problem: Problem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of softmax over the kept pairs, every score written out, in the dtype of q, differentiable; 0 and −inf in empty rows."""
    return masked_softmax(q, k, v, _kept(problem), problem.case.scale, softcap=problem.case.softcap)


def masked_softmax(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kept: torch.Tensor,
    scale: float,
    weights: torch.Tensor | None = None,
    softcap: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``kept`` broadcastable to (B, H, Nq, Nk); ``weights`` multiply the probabilities, as dropout does."""
    ratio = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(ratio, 2) for x in (k, v))
    s = torch.einsum("bihd,bjhd->bhij", q, k) * scale
    if softcap:
        s = softcap * (s / softcap).tanh()
    empty = ~kept.any(-1).expand(s.shape[:-1])
    s = torch.where(empty[..., None], 0.0, s.masked_fill(~kept, -torch.inf))
    p = s.softmax(-1).masked_fill(empty[..., None], 0.0)
    lse = torch.where(empty, -torch.inf, s.logsumexp(-1))
    return torch.einsum("bhij,bjhd->bihd", p if weights is None else p * weights, v), lse


def _kept(problem: Problem) -> torch.Tensor:
    kept = problem.mask
    return kept if problem.padding is None else kept & ~problem.padding[:, None, None, :]


def expected(problem: Problem, *, lse_grad: bool = True) -> list[torch.Tensor]:
    """[out, lse, dq, dk, dv] in float64, for the loss Σ out·dout + Σ lse·dlse over rows with keys."""
    leaves = [x.detach().double().requires_grad_() for x in (problem.q, problem.k, problem.v)]
    out, lse = dense(problem, *leaves)
    loss = (out * problem.dout.double()).sum()
    if lse_grad:
        loss = loss + (torch.where(lse == -torch.inf, 0.0, lse) * problem.dlse.double()).sum()
    return [out.detach(), lse.detach(), *torch.autograd.grad(loss, leaves)]
