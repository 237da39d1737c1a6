"""Every kernel of lists of blocks on a GPU, forward and backward, against dense float64 attention under the same mask."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from dilated_attention.backends import AttentionRequest, detect, registry
from dilated_attention.backends.base import Mask, Options
from dilated_attention.pattern.blocks.block_lists import WORD, BlockLists
from dilated_attention.testing import low_precision_bound, max_error

pytestmark = pytest.mark.gpu

NAMES = ("out", "lse", "dq", "dk", "dv")
BACKENDS = ("flash4", "triton", "flex")


# (query block, key block): with the head dim, what a kernel is compiled for
BLOCKS = ((128, 128), (64, 64), (128, 64), (64, 128))


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


def random_case(seed: int, **changes: Any) -> BlockCase:
    draw = random.Random(seed)
    kv_heads = draw.choice([1, 2])
    heads, batch = kv_heads * draw.choice([1, 1, 2]), draw.choice([1, 1, 2])
    case = BlockCase(
        batch=batch,
        num_queries=draw.choice([1, 64, 128, 200, 256, 384, 515]),
        num_keys=draw.choice([1, 100, 128, 256, 384, 640, 777]),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=draw.choice([64, 128, 128, 32, 96]),
        q_block=draw.choice([128, 128, 64]),
        k_block=draw.choice([128, 128, 64]),
        groups=(draw.choice([1, batch]), draw.choice([1, heads])),
        density=draw.choice([0.2, 0.5, 0.9]),
        masks=draw.choice(["none", "interval", "bits"]),
        padding=draw.choice(["none", "none", "some"]),
        layout=draw.choice(["contiguous", "heads_first", "packed", "every_third"]),
        dtype=draw.choice([torch.bfloat16, torch.float16]),
        seed=seed,
    )
    return replace(case, **changes)


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
    kept, case = problem.mask, problem.case
    if problem.padding is not None:
        kept = kept & ~problem.padding[:, None, None, :]
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v))
    s = torch.einsum("bihd,bjhd->bhij", q, k) * case.scale
    if case.softcap:
        s = case.softcap * (s / case.softcap).tanh()
    empty = ~kept.any(-1).expand(s.shape[:-1])
    s = torch.where(empty[..., None], 0.0, s.masked_fill(~kept, -torch.inf))
    p = s.softmax(-1).masked_fill(empty[..., None], 0.0)
    return torch.einsum("bhij,bjhd->bihd", p, v), torch.where(empty, -torch.inf, s.logsumexp(-1))


def expected(problem: Problem, *, lse_grad: bool = True) -> list[torch.Tensor]:
    """[out, lse, dq, dk, dv] in float64, for the loss Σ out·dout + Σ lse·dlse over rows with keys."""
    leaves = [x.detach().double().requires_grad_() for x in (problem.q, problem.k, problem.v)]
    out, lse = dense(problem, *leaves)
    loss = (out * problem.dout.double()).sum()
    if lse_grad:
        loss = loss + (torch.where(lse == -torch.inf, 0.0, lse) * problem.dlse.double()).sum()
    return [out.detach(), lse.detach(), *torch.autograd.grad(loss, leaves)]


def takes(name: str, problem: Problem, *, needs_grad: bool) -> list[str]:
    case = problem.case
    request = AttentionRequest(
        hardware=detect(torch.device("cuda")), dtype=case.dtype, head_dim=case.head_dim, num_heads=case.heads, num_kv_heads=case.kv_heads,
        needs_grad=needs_grad, key_mask=problem.padding is not None, blocks=(case.q_block, case.k_block),
        softcap=case.softcap > 0, block_masks=problem.lists.mask_kind,
    )  # fmt: skip
    return registry.get(name).reasons_against(request)


def check(name: str, problem: Problem, *, halves: bool = False) -> str:
    """What was compared: "" where the backend takes neither pass. Skips where its package is missing.

    ``halves``: the gradients are the sum over two halves of the keys, each with the whole's out and lse.
    """
    missing = [reason for reason in takes(name, problem, needs_grad=False) if "is not installed" in reason]
    if missing:
        pytest.skip(missing[0])
    able = {needs_grad: not takes(name, problem, needs_grad=needs_grad) for needs_grad in (False, True)}
    backend, case = registry.get(name), problem.case
    has_dlse = backend.capabilities.lse_grad and not halves
    truth = dict(zip(NAMES, expected(problem, lse_grad=has_dlse), strict=True))
    leaves = [x.detach().clone().requires_grad_() for x in (problem.q, problem.k, problem.v)]
    out, lse = dense(problem, *leaves)
    loss = (out * problem.dout).sum()
    if has_dlse:
        loss = loss + (torch.where(lse == -torch.inf, 0.0, lse) * problem.dlse).sum()
    plain = dict(zip(NAMES, (out, lse, *torch.autograd.grad(loss, leaves)), strict=True))
    found = {}
    tensors, options = (problem.q, problem.k, problem.v), problem.options
    if able[False]:
        found["out"], found["lse"] = backend.forward(*tensors, options, problem.lists)
    if able[True]:
        full_out, full_lse = truth["out"].to(case.dtype), truth["lse"].float()
        full_lse = full_lse.masked_fill(full_lse == -torch.inf, torch.inf)
        dlse, parts = problem.dlse if has_dlse else None, [problem.lists]
        if halves:
            first = torch.arange(case.num_keys, device="cuda") < case.num_keys // 2 // case.k_block * case.k_block
            parts = [lists_from_dense(problem.mask & half, case.q_block, case.k_block, problem.interval) for half in (first, ~first)]
        shares = [backend.backward(problem.dout, *tensors, full_out, full_lse, options, lists, dlse=dlse) for lists in parts]
        found.update(zip(NAMES[2:], (sum(x.float() for x in grads) for grads in zip(*shares, strict=True)), strict=True))
    for what, x in found.items():
        error = max_error(x, truth[what])
        bound = 1e-4 if what == "lse" else (1 + halves) * low_precision_bound(plain[what], truth[what], case.dtype)
        assert error <= bound, f"{name} {what}: {error:.3g} > {bound:.3g} for {case}"
    return " ".join(found)


# (head dim, blocks, dtype) that each takes, every head dim and every block size once: a kernel costs seconds to compile, another case
# milliseconds. flex searches for tiles where a block has 64, a minute for each kernel, and GPU_CASES has those
BF16, FP16 = torch.bfloat16, torch.float16
EACH = [
    (32, BLOCKS[0], FP16),
    (64, BLOCKS[0], BF16),
    (64, BLOCKS[1], BF16),
    (96, BLOCKS[2], FP16),
    (128, BLOCKS[0], BF16),
    (128, BLOCKS[3], BF16),
]
KERNELS = {
    "flash4": EACH,
    "triton": EACH,
    "flex": [(64, BLOCKS[0], BF16), (128, BLOCKS[0], BF16)],
}


@pytest.mark.parametrize(
    ("name", "head_dim", "blocks", "dtype"), [(name, *kernel) for name, kernels in KERNELS.items() for kernel in kernels], ids=str
)
def test_random_lists(name: str, head_dim: int, blocks: tuple[int, int], dtype: torch.dtype) -> None:
    changes = {"head_dim": head_dim, "q_block": blocks[0], "k_block": blocks[1], "dtype": dtype}
    cases = [random_case(seed, **changes) for seed in range(40)]
    compared = sum(bool(check(name, make(case, "cuda"))) for case in cases[: 8 if name == "flex" else 16])
    assert compared >= 3


USUAL = BlockCase(num_queries=700, num_keys=900, heads=4, kv_heads=4, q_block=128, k_block=128)
GPU_CASES = {
    "random": replace(USUAL, num_queries=2048, num_keys=2048, density=0.3),
    "intervals": replace(USUAL, num_queries=1500, num_keys=1800, kv_heads=2, masks="interval"),
    "lists of each head": replace(USUAL, num_queries=1333, kv_heads=2, groups=(1, 4)),
    "lists of each of both": replace(USUAL, batch=2, groups=(2, 4)),
    "padding": replace(USUAL, batch=2, kv_heads=2, padding="each"),
    "few queries": replace(USUAL, num_queries=100, num_keys=1500, groups=(1, 4)),
    "views": replace(USUAL, batch=2, heads=2, kv_heads=2, layout="packed"),
    "nothing kept": replace(USUAL, density=0.0),
    "64x64": replace(USUAL, num_keys=1300, kv_heads=2, q_block=64, k_block=64, masks="interval"),
    "64x64 few queries": replace(USUAL, num_queries=100, num_keys=1300, kv_heads=2, q_block=64, k_block=64),
    "64x128": replace(USUAL, num_keys=1300, kv_heads=2, q_block=64),
    "128x64": replace(USUAL, num_keys=1300, kv_heads=2, k_block=64, groups=(1, 4)),
}
SETTINGS = [
    (name, dtype, head_dim)
    for dtype, head_dim in ((BF16, 64), (BF16, 128), (torch.float32, 64))
    for name in GPU_CASES
    if "64" not in name or (dtype, head_dim) == (BF16, 64)
]


@pytest.mark.kernel("backend", "dtype", "head_dim")
@pytest.mark.parametrize(("name", "dtype", "head_dim"), SETTINGS, ids=str)
@pytest.mark.parametrize("backend", ["flex", "math"])
def test_chosen_lists(backend: str, name: str, dtype: torch.dtype, head_dim: int) -> None:
    assert check(backend, make(replace(GPU_CASES[name], dtype=dtype, head_dim=head_dim), "cuda"))


@pytest.mark.kernel("name", "head_dim")
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("masks", ["none", "interval"])
@pytest.mark.parametrize("name", BACKENDS)
def test_the_usual_case(name: str, head_dim: int, masks: str) -> None:
    case = BlockCase(
        num_queries=1024, num_keys=1024, heads=4, kv_heads=4, head_dim=head_dim, q_block=128, k_block=128, groups=(1, 4),
        density=0.3, masks=masks, dtype=torch.bfloat16,
    )  # fmt: skip
    assert check(name, make(case, "cuda"))
    assert check(name, make(replace(case, kv_heads=2, batch=2), "cuda"))
    assert check(name, make(case, "cuda"), halves=True)
    capped = check(name, make(replace(case, softcap=1.5), "cuda"))
    assert bool(capped) == registry.get(name).capabilities.softcap


@pytest.mark.parametrize("name", ["flash4", "triton"])
def test_two_block_sizes_in_one_process(name: str) -> None:
    for k_block in (128, 64, 128):
        case = BlockCase(num_queries=512, num_keys=512, head_dim=64, q_block=128, k_block=k_block, density=0.4, dtype=torch.bfloat16)
        assert check(name, make(case, "cuda"))


@pytest.mark.parametrize("name", ["flash4", "triton"])
def test_one_long_list_among_short_ones(name: str) -> None:
    """A block that keeps everything has a table, or a turn, of its own."""
    case = BlockCase(
        num_queries=128 * 80, num_keys=128 * 80, heads=2, kv_heads=2, head_dim=64, q_block=128, k_block=128, dtype=torch.bfloat16
    )
    problem = make(replace(case, num_queries=128, num_keys=128, density=1.0), "cuda")
    mask = torch.zeros(1, 1, 80, 80, dtype=torch.bool, device="cuda")
    mask[..., torch.arange(80), torch.arange(80)] = True
    mask[..., 3, :] = mask[..., 7] = True
    dense_mask = mask.repeat_interleave(128, -2).repeat_interleave(128, -1)
    big = make(replace(case, density=0.0), "cuda")
    problem = replace(big, mask=dense_mask, lists=lists_from_dense(dense_mask, 128, 128))
    assert check(name, problem)


@pytest.mark.parametrize("name", ["triton", "math"])
def test_deterministic_results_repeat(name: str) -> None:
    case = random_case(3, num_queries=2048, num_keys=2048, head_dim=64, q_block=128, k_block=128, masks="none", padding="none")
    problem, backend = make(case, "cuda"), registry.get(name)
    tensors, options = (problem.q, problem.k, problem.v), replace(problem.options, deterministic=True)

    def passes() -> tuple[torch.Tensor, ...]:
        out, lse = backend.forward(*tensors, options, problem.lists)
        return out, lse, *backend.backward(problem.dout, *tensors, out, lse, options, problem.lists)

    first = passes()
    for _ in range(100 if name == "triton" else 10):
        assert all(map(torch.equal, passes(), first))
