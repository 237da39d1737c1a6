"""Learned sinks against softmax with one more column, in float64: every function, module and transform, and the interpreted kernels.

Random cases of the oracle's and the rings' own tests have sinks, too (``testing.Case.sinks``).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import dilated_attention as da
from dilated_attention.engine import sinks as engine_sinks
from dilated_attention.engine.ops import resolve
from dilated_attention.modules.core import Attention
from dilated_attention.pattern import DilatedPattern, GlobalLocal, LocalWindow
from tests.helpers.pool import patience, pool_of

sinks_triton = pytest.importorskip("dilated_attention.engine.sinks_triton")

N, H, HK, D = 70, 4, 2, 8
DILATED = DilatedPattern((16, 64), (1, 3))
BLOCKS = GlobalLocal(20, 4, block_size=64)
# no branch takes most positions of a head
GAPS = DilatedPattern((16,), (4,))
Tensors = tuple[torch.Tensor, ...]


def causal() -> torch.Tensor:
    return torch.ones(N, N, dtype=torch.int64).tril()


def branches_of(pattern: DilatedPattern) -> dict[str, Any]:
    return {"segment_lengths": list(pattern.segment_lengths), "dilation_rates": list(pattern.dilation_rates)}


# each function with its fixed arguments, and the multiplicities (H, N, N) that it stands for
FUNCTIONS: dict[str, tuple[Callable[..., Any], dict[str, Any], torch.Tensor]] = {
    "dense": (da.attention, {}, torch.ones(N, N, dtype=torch.int64)),
    "window": (da.attention, {"window": (20, 0), "is_causal": True}, causal().triu(-20)),
    "dilated": (da.dilated_attention, branches_of(DILATED), DILATED.dense_mask(N, N, H)),
    "gaps": (da.dilated_attention, branches_of(GAPS) | {"is_causal": True}, GAPS.dense_mask(N, N, H) * causal()),
    "blocks": (da.block_sparse_attention, {"pattern": BLOCKS}, BLOCKS.dense_mask(N, N, H).long()),
    "union": (
        da.block_sparse_dilated_attention,
        branches_of(DILATED) | {"pattern": BLOCKS, "is_causal": True},
        (BLOCKS.dense_mask(N, N, H).long() + DILATED.dense_mask(N, N, H)) * causal(),
    ),
    "ring": (da.ring_attention, {"is_causal": True, "layout": "contiguous"}, causal()),
    "ring_dilated": (da.ring_dilated_attention, branches_of(DILATED), DILATED.dense_mask(N, N, H)),
    "ring_blocks": (da.ring_block_sparse_attention, {"pattern": BLOCKS, "is_causal": True}, BLOCKS.dense_mask(N, N, H) * causal()),
    "ring_union": (
        da.ring_block_sparse_dilated_attention,
        branches_of(DILATED) | {"pattern": BLOCKS},
        BLOCKS.dense_mask(N, N, H).long() + DILATED.dense_mask(N, N, H),
    ),
}


def tensors(dtype: torch.dtype = torch.float64, batch: int = 2, seed: int = 0) -> Tensors:
    """q, k, v, sinks (one that outweighs all keys), dout and dlse."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((batch, N, H, D), (batch, N, HK, D), (batch, N, HK, D), (H,), (batch, N, H, D), (batch, H, N))
    made = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
    made[3][1] = 7.0
    return tuple(x.requires_grad_() if index < 4 else x for index, x in enumerate(made))


def plain(m: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) with every score written out, the sinks' in the last column."""
    k, v = (x.repeat_interleave(H // HK, 2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * D**-0.5
    scores = torch.where(m > 0, scores + m.clamp(min=1).to(q.dtype).log(), -torch.inf)
    scores = torch.cat([scores, sinks[:, None, None].expand(*scores.shape[:-1], 1)], -1)
    return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1)[..., :-1], v), scores.logsumexp(-1)


def check_close(found: Any, truth: Any, tolerance: float = 1e-10) -> None:
    for index, (a, b) in enumerate(zip(found, truth, strict=True)):
        assert a.shape == b.shape and a.dtype == b.dtype and bool(a.isfinite().all()), index
        assert float((a - b).detach().abs().max()) <= tolerance * max(1.0, float(b.detach().abs().max())), index


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_function_and_all_gradients(name: str) -> None:
    function, options, m = FUNCTIONS[name]
    *leaves, dout, dlse = tensors()
    found = function(*leaves[:3], **options, sinks=leaves[3], return_lse=True)
    truth = plain(m, *leaves)
    check_close(found, truth)
    check_close(torch.autograd.grad(found, leaves, (dout, dlse)), torch.autograd.grad(truth, leaves, (dout, dlse)))
    # out alone, and the sinks' gradient alone
    out = function(*(x.detach() for x in leaves[:3]), **options, sinks=leaves[3])
    check_close(torch.autograd.grad(out, leaves[3], dout), torch.autograd.grad(plain(m, *leaves)[0], leaves[3], dout))


def test_frozen_sinks_have_no_gradient_to_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    *leaves, dout, _ = tensors()
    function, options, m = FUNCTIONS["dilated"]
    truth = torch.autograd.grad(plain(m, *leaves)[0], leaves[:3], dout)
    monkeypatch.setattr(resolve, "sinks_gradient", lambda *_: pytest.fail("computed"))
    check_close(torch.autograd.grad(function(*leaves[:3], **options, sinks=leaves[3].detach()), leaves[:3], dout), truth)


def test_rows_without_keys_have_the_sink_alone() -> None:
    function, options, m = FUNCTIONS["gaps"]
    *leaves, dout, dlse = tensors()
    out, lse = function(*leaves[:3], **options, sinks=leaves[3], return_lse=True)
    empty = (m == 0).all(-1)
    assert int(empty.sum()) == N * H - int((~empty).sum()) > N
    assert bool((out.transpose(1, 2)[:, empty] == 0).all())
    assert torch.equal(lse[:, empty], leaves[3].detach()[:, None].expand(H, N)[empty].expand(2, -1))
    grads = torch.autograd.grad((out, lse), leaves, (torch.zeros_like(dout), dlse * empty))
    check_close(grads[3:], [(dlse * empty).sum((0, 2))])
    assert not any(bool(grad.any()) for grad in grads[:3])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_no_keys_and_no_sink(dtype: torch.dtype) -> None:
    """A sink of −inf is none; with a row that has no keys either, there is nothing to normalise, and nothing is NaN."""
    function, options, _ = FUNCTIONS["gaps"]
    *leaves, dout, dlse = tensors(dtype)
    none = torch.full((H,), -torch.inf, dtype=dtype, requires_grad=True)
    given = (*leaves[:3], none)
    found, truth = (function(*leaves[:3], **options, sinks=sinks, return_lse=True) for sinks in (none, None))
    assert all(torch.equal(a, b) for a, b in zip(found, truth, strict=True))
    rest = dlse.to(found[1].dtype)
    grads = torch.autograd.grad(found, given, (dout, rest))
    assert all(torch.equal(a, b) for a, b in zip(grads, torch.autograd.grad(truth, leaves[:3], (dout, rest)), strict=False))
    assert not grads[3].any()


@pytest.mark.parametrize("score", [-3e4, 3e4])
def test_scores_far_from_the_keys(score: float) -> None:
    *leaves, dout, dlse = tensors(torch.float32)
    sinks = torch.full((H,), score, requires_grad=True)
    given = (*leaves[:3], sinks)
    out, lse = da.attention(*leaves[:3], sinks=sinks, return_lse=True)
    grads = torch.autograd.grad((out, lse), given, (dout, dlse))
    assert all(bool(x.isfinite().all()) for x in (out, lse, *grads))
    if score > 0:
        assert not out.any() and bool((lse == score).all())
        torch.testing.assert_close(grads[3], dlse.sum((0, 2)))
    else:
        assert torch.equal(out, da.attention(*leaves[:3])) and not grads[3].any()


def test_sinks_in_float32_of_half_precision_inputs() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        *leaves, dout, _ = tensors(dtype)
        single = leaves[3].detach().float().requires_grad_()
        outs = [da.dilated_attention(*leaves[:3], **branches_of(DILATED), sinks=sinks) for sinks in (leaves[3], single)]
        assert torch.equal(*outs)
        grads = [torch.autograd.grad(out, sinks, dout)[0] for out, sinks in zip(outs, (leaves[3], single), strict=True)]
        assert [grad.dtype for grad in grads] == [dtype, torch.float32] and torch.equal(grads[1].to(dtype), grads[0])


@pytest.mark.parametrize("pattern", [None, DILATED, LocalWindow((20, 0), block_size=64)])
def test_decoding_is_the_row_of_the_forward(pattern: Any) -> None:
    q, k, v, sinks, *_ = (x.detach() for x in tensors())
    whole: dict[str, Any] = {"sinks": sinks, "is_causal": True, "return_lse": True}
    if pattern is None:
        out, lse = da.attention(q, k, v, **whole)
    elif pattern is DILATED:
        out, lse = da.dilated_attention(q, k, v, **branches_of(DILATED), **whole)
    else:
        out, lse = da.block_sparse_attention(q, k, v, pattern, **whole)
    positions = torch.tensor([13, N - 1])
    rows = torch.arange(2)
    found = da.decode_attention(q[rows, positions][:, None], k, v, positions, pattern, sinks=sinks, return_lse=True)
    check_close(found, (out[rows, positions][:, None], lse[rows, :, positions][..., None]))


# ---- what stands between a caller and the op


@pytest.mark.parametrize("name", ["dilated", "union"])
def test_transforms(name: str) -> None:
    function, options, m = FUNCTIONS[name]
    q, k, v, sinks, dout, _ = (x.detach() for x in tensors())
    others = torch.stack([sinks, sinks.flip(0), sinks * 0.1])

    def loss(kind: Callable[..., Any]) -> Callable[..., torch.Tensor]:
        return lambda q, k, v, sinks: (kind(q, k, v, sinks) * dout[:1]).sum()

    def mine(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
        return function(q, k, v, **options, sinks=sinks)  # type: ignore[no-any-return]

    def true(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
        return plain(m, q, k, v, sinks)[0]

    one = tuple(x[:1] for x in (q, k, v))
    batched = tuple(x[:, None] for x in (q, k, v))
    for apply in (
        lambda f: torch.func.grad(loss(f), argnums=(0, 3))(*one, sinks),
        lambda f: (torch.func.vmap(f, in_dims=(None, None, None, 0))(*one, others),),
        # gradients of each sample, also those of the sinks, which all samples share
        lambda f: torch.func.vmap(torch.func.grad(loss(f), argnums=(0, 1, 2, 3)), in_dims=(0, 0, 0, None))(*batched, sinks),
        lambda f: torch.func.vmap(torch.func.grad(loss(f), argnums=(2, 3)), in_dims=(None, None, None, 0))(*one, others),
    ):
        check_close(apply(mine), apply(true))
    with pytest.raises(NotImplementedError, match="has no forward mode"):
        torch.func.jvp(lambda s: mine(*one, s), (sinks,), (sinks,))


@pytest.mark.parametrize("name", ["dilated", "blocks"])
def test_compiled_and_checkpointed(name: str) -> None:
    function, options, m = FUNCTIONS[name]
    *leaves, dout, _ = tensors()
    truth = torch.autograd.grad(plain(m, *leaves)[0], leaves, dout)

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
        return function(q, k, v, **options, sinks=sinks)  # type: ignore[no-any-return]

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    check_close(torch.autograd.grad(compiled(*leaves), leaves, dout), truth)
    check_close(torch.autograd.grad(checkpoint(call, *leaves, use_reentrant=False), leaves, dout), truth)
    # a profiler sees the op
    with torch.profiler.profile() as profile:
        check_close(torch.autograd.grad(call(*leaves), leaves, dout), truth)
    assert any(event.key.startswith("dilated_attention::") for event in profile.key_averages())
    with pytest.raises(NotImplementedError, match="has no second derivative"):
        torch.autograd.grad(torch.autograd.grad(call(*leaves).sum(), leaves[3], create_graph=True)[0].sum(), leaves[3])


def test_autocast() -> None:
    *leaves, _, _ = tensors(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = da.attention(*leaves[:3], sinks=leaves[3])
    assert out.dtype is torch.bfloat16
    assert torch.equal(out, da.attention(*(x.bfloat16() for x in leaves[:3]), sinks=leaves[3]))
    (grad,) = torch.autograd.grad(out.float().sum(), leaves[3])
    assert grad.dtype is torch.float32 and bool(grad.any())


# ---- processes


def of_rank(rank: int, world: int, name: str, subgroup: bool) -> list[torch.Tensor]:
    """This rank's out and lse, and the gradients of its loss: dq, dk, dv of its rows, and its part of dsinks."""
    function, options, _ = FUNCTIONS[name]
    q, k, v, sinks, dout, dlse = (x.detach() for x in tensors())
    group = dist.new_group(list(range(world))) if subgroup else None
    q, k, v, dout, dlse = da.shard_sequence(group, [q, k, v, dout, dlse], [1, 1, 1, 1, 2], layout="contiguous")
    leaves = [x.requires_grad_() for x in (q, k, v, sinks)]
    found = function(*leaves[:3], **options, sinks=sinks, return_lse=True, group=group, seq_len=N, timeout=patience())
    return [*(x.detach() for x in found), *torch.autograd.grad(found, leaves, (dout, dlse))]


@pytest.mark.distributed
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", ["ring", "ring_dilated", "ring_blocks", "ring_union"])
def test_processes_share_a_sequence(name: str, world: int) -> None:
    ranks = pool_of(world).run(of_rank, name, world == 2)
    *leaves, dout, dlse = tensors()
    truth = plain(FUNCTIONS[name][2], *leaves)
    grads = torch.autograd.grad(truth, leaves, (dout, dlse))
    joined = [torch.cat([rank[index] for rank in ranks], dim) for index, dim in enumerate((1, 2, 1, 1, 1))]
    check_close(joined, [x.detach() for x in (*truth, *grads[:3])])
    check_close([torch.stack([rank[5] for rank in ranks]).sum(0)], grads[3:])


# ---- modules

CORES: dict[str, Callable[..., Attention]] = {
    "dense ring": lambda **o: da.RingAttention(layout="contiguous", **o),
    "dilated": lambda **o: da.DilatedAttention([16, 64], [1, 3], **o),
    "dilated ring": lambda **o: da.RingDilatedAttention([16, 64], [1, 3], **o),
    "blocks": lambda **o: da.BlockSparseAttention(BLOCKS, **o),
    "block ring": lambda **o: da.RingBlockSparseAttention(BLOCKS, **o),
    "union": lambda **o: da.BlockSparseDilatedAttention([16, 64], [1, 3], BLOCKS, **o),
}
MULTIHEAD: dict[str, Callable[..., Any]] = {
    "dilated": lambda **o: da.MultiheadDilatedAttention(H * D, H, [16, 64], [1, 3], **o),
    "ring": lambda **o: da.RingMultiheadDilatedAttention(H * D, H, [16, 64], [1, 3], **o),
    "blocks": lambda **o: da.modules.MultiheadBlockSparseAttention(H * D, H, BLOCKS, **o),
}


@pytest.mark.parametrize("name", CORES)
def test_modules_without_projections(name: str) -> None:
    module = CORES[name](sinks=True, num_heads=H).double()
    assert module.sinks is not None and module.sinks.shape == (H,) and not module.sinks.any() and "sinks=True" in repr(module)
    q, k, v, sinks, dout, _ = tensors()
    with torch.no_grad():
        module.sinks.copy_(sinks)
    m = torch.ones(N, N) if name == "dense ring" else FUNCTIONS[name.split()[0] if name != "block ring" else "blocks"][2]
    if name == "union":
        m = BLOCKS.dense_mask(N, N, H).long() + DILATED.dense_mask(N, N, H)
    out, truth = module(q, k, v), plain(m, q, k, v, sinks)[0]
    check_close((out,), (truth,))
    check_close(torch.autograd.grad(out, module.sinks, dout), torch.autograd.grad(truth, sinks, dout))
    other = CORES[name](sinks=True, num_heads=H).double()
    other.load_state_dict(module.state_dict())
    assert torch.equal(other(q, k, v), out)
    other.reset_parameters()
    assert other.sinks is not None and not other.sinks.any()
    assert CORES[name]().sinks is None and "sinks" not in repr(CORES[name]())
    # the number of heads comes with the first call, or with what is loaded
    lazy, loaded = CORES[name](sinks=True).double(), CORES[name](sinks=True).double()
    check_close((lazy(q, k, v),), (plain(m, q, k, v, torch.zeros_like(sinks))[0],))
    assert lazy.sinks is not None and lazy.sinks.dtype is torch.float64 and not lazy.sinks.any()
    loaded.load_state_dict(module.state_dict())
    assert torch.equal(loaded(q, k, v), out)


@pytest.mark.parametrize("name", MULTIHEAD)
def test_multihead_modules(name: str) -> None:
    torch.manual_seed(0)
    layer = MULTIHEAD[name](sinks=True, dtype=torch.float64)
    assert layer.sinks is layer.attention.sinks and layer.sinks.dtype is torch.float64
    assert MULTIHEAD[name](sinks=True, device="meta").sinks.is_meta and MULTIHEAD[name]().sinks is None
    without = MULTIHEAD[name](dtype=torch.float64)
    without.load_state_dict({key: value for key, value in layer.state_dict().items() if "sinks" not in key})
    x = torch.randn(2, N, H * D, dtype=torch.float64)
    with torch.no_grad():
        layer.sinks.fill_(-40.0)
        torch.testing.assert_close(layer(x)[0], without(x)[0], rtol=1e-10, atol=1e-10)
        layer.sinks.fill_(1.0)
        assert not torch.allclose(layer(x)[0], without(x)[0])
    layer(x)[0].square().sum().backward()
    assert bool(layer.sinks.grad.all())


def test_maps_leave_the_sinks_share_out() -> None:
    module = da.DilatedAttention([16, 64], [1, 3], sinks=True, num_heads=H).double()
    q, k, v, sinks, *_ = (x.detach() for x in tensors())
    with torch.no_grad():
        assert module.sinks is not None
        module.sinks.copy_(sinks)
        out, lse = module(q, k, v, return_lse=True)
    rows = [0, 5, 33, N - 1]
    values = v.repeat_interleave(H // HK, 2)
    for given in (None, lse):
        weights = module.attention_map(q, k, rows, lse=given)
        check_close((torch.einsum("bhij,bjhd->bihd", weights, values),), (out[:, rows],))
    check_close((1 - weights.sum(-1),), ((sinks[:, None] - lse[..., rows]).exp(),))
    received = module.attention_received(q, k)
    check_close((received.sum(-1),), ((1 - (sinks[:, None] - lse).exp()).sum(-1),))


def test_a_model_generates_with_sinks() -> None:
    """The cache's kernels read the sinks of the layers as the forward does."""
    torch.manual_seed(0)
    model = da.create_model("longnet-tiny", segment_lengths=(8, 32), dilation_rates=(1, 2)).double().eval()
    for block, score in zip(model.decoder.blocks, itertools.count(), strict=False):
        block.attention.attention.sinks = torch.nn.Parameter(torch.randn(4, dtype=torch.float64) + score)
    tokens = torch.randint(256, (2, 20))
    with torch.no_grad():
        found = model.generate(tokens, 12, temperature=0.0)
        for length in range(20, 32):
            assert torch.equal(model(found[:, :length])[:, -1].argmax(-1), found[:, length])


# ---- refusals


@pytest.mark.parametrize(
    ("sinks", "error", "text"),
    [
        (1.0, TypeError, r"sinks is a float; expected a tensor .* \(4,\)"),
        (torch.zeros(3), ValueError, r"shape \(3,\); expected one score per query head, \(4,\)"),
        (torch.zeros(1, 4), ValueError, r"shape \(1, 4\)"),
        (torch.zeros(4, dtype=torch.float16), ValueError, "float16; expected float32 or q's dtype, torch.float64"),
        (torch.zeros(4, device="meta"), ValueError, "sinks is on meta and q on cpu"),
        (torch.zeros(4).to_sparse(), TypeError, "sinks is a sparse tensor"),
    ],
)
def test_sinks_that_do_not_fit(sinks: Any, error: type[Exception], text: str) -> None:
    q, k, v, *_ = tensors()
    # the second call is recognised by its arguments, and still checked
    da.attention(q, k, v, sinks=torch.zeros(4))
    for function in (da.attention, lambda *x, **o: da.decode_attention(x[0][:, :1], *x[1:], torch.tensor([3, 4]), **o)):
        with pytest.raises(error, match=text):
            function(q, k, v, sinks=sinks)


def test_settings_that_do_not_fit() -> None:
    q, k, v, sinks, *_ = tensors()
    with pytest.raises(ValueError, match="sinks are given with mixture_grad='detached'"):
        da.dilated_attention(q, k, v, [16], [1], mixture_grad="detached", sinks=sinks)
    with pytest.raises(ValueError, match="sinks=True with mixture_grad='detached'"):
        da.MultiheadDilatedAttention(32, 4, [16], [1], mixture_grad="detached", sinks=True)
    with pytest.raises(ValueError, match="num_heads is 4 without sinks"):
        da.DilatedAttention([16], [1], num_heads=4)
    with pytest.raises(ValueError, match="q has shape"):
        da.DilatedAttention([16], [1], sinks=True)(q[0], k, v)


# ---- kernels, interpreted

SHAPES = [(1, 1, 1, 1), (2, 37, 3, 64), (1, 5, 2, 59), (2, 130, 2, 128), (1, 40, 1, 256)]


def result(shape: tuple[int, int, int, int], dtype: torch.dtype, device: str = "cpu") -> Tensors:
    """out, lse, sinks, dout that is not contiguous, dlse; empty rows, an absent sink, and both together."""
    B, n, heads, dim = shape
    generator = torch.Generator().manual_seed(n + dim)
    out = torch.randn(shape, generator=generator).to(dtype)
    lse = torch.randn(B, heads, n, generator=generator) * 4
    lse[:, :, ::3] = -torch.inf
    out[:, ::3] = 0
    sinks = torch.randn(heads, generator=generator) * 2
    sinks[-1] = -torch.inf if heads > 1 else 0.5
    dout = torch.randn(B, heads, n, dim, generator=generator).to(dtype).transpose(1, 2)
    return tuple(x.to(device) for x in (out, lse, sinks, dout, torch.randn(B, n, heads, generator=generator).transpose(1, 2)))


def check_kernels(shape: tuple[int, int, int, int], dtype: torch.dtype, device: str) -> None:
    out, lse, sinks, dout, dlse = result(shape, dtype, device)
    wide, wide_lse = out.double(), lse.double()
    # the twin itself, in float64 on the CPU
    wide, wide_lse = wide.cpu(), wide_lse.cpu()
    engine_sinks.add_sinks_(wide, wide_lse, sinks.cpu().double())
    sinks_triton.add_sinks_(out, lse, sinks)
    # Triton's interpreter cuts bfloat16 off instead of rounding it
    step = torch.finfo(dtype).eps / (1 if dtype is torch.bfloat16 and device == "cpu" else 2)
    assert bool(((out.cpu().double() - wide).abs() <= 1.01 * step * wide.abs() + 4e-6).all())
    torch.testing.assert_close(lse.cpu().double(), wide_lse, rtol=1e-6, atol=2e-6)
    for some in (dlse, None):
        found = sinks_triton.sinks_gradient(dout, some, out, lse, sinks)
        given = None if some is None else some.cpu().double()
        truth = engine_sinks.sinks_gradient(dout.cpu().double(), given, out.cpu().double(), lse.cpu().double(), sinks.cpu().double())
        torch.testing.assert_close(found.cpu().double(), truth, rtol=2e-5, atol=2e-4)
        assert torch.equal(found, sinks_triton.sinks_gradient(dout, some, out, lse, sinks))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_kernels_are_their_twins(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    check_kernels(shape, dtype, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [*SHAPES, (3, 4099, 12, 64)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_kernels_on_a_gpu(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    check_kernels(shape, dtype, "cuda")
