"""The Triton kernels for lists of blocks against a dense float64 softmax: interpreted on a CPU, compiled on a GPU."""

from __future__ import annotations

import itertools
import subprocess
import sys
from dataclasses import dataclass, replace

import pytest
import torch

from dilated_attention.backends import Hardware, Mask, Options, Request, registry
from dilated_attention.backends import triton_blocks as under_test
from dilated_attention.backends.blocks import BlockLists
from dilated_attention.backends.triton_blocks import Tile, Tuning
from dilated_attention.testing import low_precision_bound, max_error, relative_bound

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAMES = ("out", "lse", "dq", "dk", "dv")
BACKEND = registry.get("triton")
FLOAT32_TOLERANCE = 1e-5


def lists_of(
    kept: torch.Tensor, q_block: int, k_block: int, interval: tuple[torch.Tensor, torch.Tensor] | None = None, *, masked: bool | None = None
) -> BlockLists:
    """Exact lists of a dense bool mask (batch groups, head groups, Nq, Nk). Pairs beyond the end have random bits.

    ``masked`` False: there are whole blocks only; True: every block has a mask.
    """
    G, H, Nq, Nk = kept.shape
    rows, columns = -(-Nq // q_block), -(-Nk // k_block)
    padded = torch.rand(G * H, rows * q_block, columns * k_block, device=kept.device) < 0.5
    padded[:, :Nq, :Nk] = kept.flatten(0, 1)
    inside = torch.zeros_like(padded)
    inside[:, :Nq, :Nk] = True

    def blocks(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(1, (rows, q_block)).unflatten(3, (columns, k_block)).transpose(2, 3)

    some = blocks(padded & inside).any((3, 4))
    whole = blocks(padded | ~inside).all((3, 4))
    tiles = blocks(padded)[some].unflatten(2, (k_block // 32, 32))
    words = (tiles.long() << torch.arange(32, device=kept.device)).sum(3).to(torch.int32)
    different, which = words.unique(dim=0, return_inverse=True)
    masks = which.int() if masked else which.int().masked_fill(whole[some], -1)
    plain = masked is False or (masked is None and bool((masks < 0).all()))
    if plain:
        assert torch.equal(whole, some)
    return BlockLists(
        num_queries=Nq,
        num_keys=Nk,
        q_block=q_block,
        k_block=k_block,
        num_batch=G,
        num_heads=H,
        row_starts=torch.cat([some.new_zeros(1, dtype=torch.int64), some.sum(2).flatten().cumsum(0)]).int(),
        columns=some.nonzero()[:, 2].int(),
        masks=None if plain else masks,
        bits=different[:0] if plain else different.contiguous(),
        interval=interval,
    )


@dataclass(frozen=True)
class Case:
    Nq: int = 150
    Nk: int = 230
    q_block: int = 64
    k_block: int = 64
    B: int = 1
    H: int = 2
    K: int = 2
    D: int = 16
    per_batch: bool = False
    per_head: bool = False
    # of the blocks · of the pairs in a kept block that is not whole; 1 for whole blocks only
    block_density: float = 0.6
    pair_density: float = 0.5
    padding: bool = False
    scale: float = 0.3
    tile: tuple[int, int] = (128, 128)

    def mask(self) -> torch.Tensor:
        """(groups of batch, groups of heads, Nq, Nk) with whole, partial and left out blocks and some empty rows."""
        groups = (self.B if self.per_batch else 1, self.H if self.per_head else 1)
        coarse = (*groups, -(-self.Nq // self.q_block), -(-self.Nk // self.k_block))
        blocks = torch.rand(coarse) < self.block_density
        partial = torch.rand(coarse) < 0.5
        pairs = torch.rand(*groups, self.Nq, self.Nk) < self.pair_density

        def fine(x: torch.Tensor) -> torch.Tensor:
            return x.repeat_interleave(self.q_block, 2).repeat_interleave(self.k_block, 3)[:, :, : self.Nq, : self.Nk]

        kept = fine(blocks) & (pairs | ~fine(partial)) if self.pair_density < 1 else fine(blocks)
        if self.pair_density < 1:
            kept[:, :, 3::11] = False
        return kept.to(DEVICE)


Tensors = dict[str, torch.Tensor]


def inputs(case: Case, dtype: torch.dtype = torch.float32) -> Tensors:
    shapes = {"q": (case.B, case.Nq, case.H, case.D), "k": (case.B, case.Nk, case.K, case.D), "v": (case.B, case.Nk, case.K, case.D)}
    shapes |= {"dout": shapes["q"]}
    x = {name: torch.randn(shape).to(DEVICE, dtype) for name, shape in shapes.items()}
    return x | {"dlse": torch.randn(case.B, case.H, case.Nq).to(DEVICE)}


def dense(x: Tensors, kept: torch.Tensor, scale: float, padding: torch.Tensor | None, dtype: torch.dtype, *, dlse: bool = False) -> Tensors:
    """The definition: softmax over the kept pairs, all gradients by autograd."""
    q, k, v = (x[name].detach().to(dtype).requires_grad_() for name in "qkv")
    group = q.shape[2] // k.shape[2]
    kept = kept.expand(q.shape[0], q.shape[2], -1, -1)
    if padding is not None:
        kept = kept & ~padding[:, None, None, :]
    scores = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(group, 2)) * scale
    scores = scores.masked_fill(~kept, -torch.inf)
    empty = ~kept.any(-1)
    # a row without keys has out 0 and gradients 0, by definition and not by autograd
    safe = scores.masked_fill(empty[..., None], 0.0)
    weights = safe.softmax(-1).masked_fill(empty[..., None], 0.0)
    out = torch.einsum("bhij,bjhd->bihd", weights, v.repeat_interleave(group, 2))
    lse = safe.logsumexp(-1)
    loss = (out * x["dout"].to(dtype)).sum()
    if dlse:
        loss = loss + (lse * x["dlse"].to(dtype)).masked_fill(empty, 0.0).sum()
    grads = torch.autograd.grad(loss, (q, k, v))
    return dict(zip(NAMES, (out.detach(), lse.detach().masked_fill(empty, -torch.inf), *grads), strict=True))


def tuning_of(tile: tuple[int, int]) -> Tuning:
    same = Tile(*tile, 4, 2)
    return Tuning(forward=same, dq=same, dkdv=same)


def check(found: Tensors, truth: Tensors, plain: Tensors | None, dtype: torch.dtype) -> None:
    for name in found:
        bound = relative_bound(truth[name], FLOAT32_TOLERANCE)
        if dtype is not torch.float32:
            assert plain is not None
            bound = low_precision_bound(plain[name], truth[name], dtype)
        error = max_error(found[name], truth[name])
        assert error <= bound, f"{name}: {error:.3g} > {bound:.3g}"


def run(case: Case, dtype: torch.dtype = torch.float32, *, dlse: bool = False) -> None:
    kept, x = case.mask(), inputs(case, dtype)
    padding = (torch.rand(case.B, case.Nk) < 0.3).to(DEVICE) if case.padding else None
    options = Options(case.scale, mask=Mask(padding))
    lists = lists_of(kept, case.q_block, case.k_block)
    tuning = tuning_of(case.tile)
    out, lse = under_test.forward(x["q"], x["k"], x["v"], lists, options, tuning=tuning)
    assert out.dtype == dtype and lse.dtype == torch.float32
    more = (x["dlse"],) if dlse else ()
    grads = under_test.backward(x["dout"], x["q"], x["k"], x["v"], out, lse, lists, options, *more, tuning=tuning)
    found = dict(zip(NAMES, (out, lse, *grads), strict=True))
    truth = dense(x, kept, case.scale, padding, torch.float64, dlse=dlse)
    plain = dense(x, kept, case.scale, padding, dtype, dlse=dlse) if dtype is not torch.float32 else None
    check(found, truth, plain, dtype)


# each differs from the first in what its name says
CASES = {
    "first": Case(),
    "whole blocks": Case(pair_density=1.0),
    "even": Case(Nq=128, Nk=192),
    "even whole blocks": Case(Nq=128, Nk=192, pair_density=1.0, block_density=0.5),
    "more queries": Case(Nq=250, Nk=90),
    "128 by 64": Case(q_block=128),
    "64 by 128": Case(k_block=128),
    "128 by 128": Case(q_block=128, k_block=128, Nq=257, Nk=131),
    "small tiles": Case(q_block=128, k_block=128, tile=(32, 64)),
    "small tiles of whole blocks": Case(q_block=128, k_block=128, pair_density=1.0, tile=(64, 32)),
    "head dim 40": Case(D=40),
    "head dim 64": Case(D=64),
    "head dim 1": Case(D=1, scale=1.0),
    "GQA": Case(H=4, K=2),
    "one key head": Case(H=3, K=1, B=2),
    "lists of batch entries": Case(B=2, per_batch=True),
    "lists of heads": Case(H=3, K=3, per_head=True),
    "lists of batch entries and grouped heads": Case(B=2, H=4, K=2, per_batch=True, per_head=True, Nq=100, Nk=100),
    "lists of grouped heads": Case(B=2, H=4, K=2, per_head=True, Nq=100, Nk=100),
    "padding": Case(padding=True, B=2),
    "padding of whole blocks": Case(padding=True, pair_density=1.0),
    "nothing kept": Case(block_density=0.0),
    "one query": Case(Nq=1, Nk=70, pair_density=0.9),
    "one key": Case(Nq=70, Nk=1, block_density=1.0),
    "negative scale": Case(scale=-0.4),
    "scale 0": Case(scale=0.0),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_kernels_are_the_definition(case: Case) -> None:
    torch.manual_seed(0)
    run(case)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["first", "head dim 64", "lists of grouped heads"])
def test_half_precision_errs_as_plain_torch_does(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    run(CASES[name], dtype)


@pytest.mark.parametrize("name", ["first", "lists of grouped heads", "whole blocks"])
def test_gradient_of_lse(name: str) -> None:
    torch.manual_seed(2)
    run(CASES[name], dlse=True)
