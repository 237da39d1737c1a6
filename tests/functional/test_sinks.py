"""Learned sinks: what no random case has. Kernels against their twins, modules, refusals.

Any case with sinks and with caps, in any form, by any backend: tests/engine/test_oracle.py; over processes: tests/distributed/test_ring.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import dilated_attention as da
from dilated_attention.backends import registry
from dilated_attention.engine import sinks as engine_sinks
from dilated_attention.engine.ops import resolve
from dilated_attention.modules.core import Attention
from dilated_attention.pattern import DilatedPattern, GlobalLocal
from dilated_attention.testing import Case, Inputs, max_error, plain_attention

sinks_triton = pytest.importorskip("dilated_attention.engine.sinks_triton")

N, H, HK, D = 70, 4, 2, 8
DILATED = DilatedPattern((16, 64), (1, 3))
BLOCKS = GlobalLocal(20, 4, block_size=64)
# no branch takes most positions of a head
GAPS: dict[str, Any] = {"segment_lengths": [16], "dilation_rates": [4], "is_causal": True}
Tensors = tuple[torch.Tensor, ...]
WHOLE = Case(pattern=DilatedPattern((2**62,), (1,), "zero"), window=(None, None), batch=2, num_queries=N, num_keys=N, heads=H, kv_heads=HK)
CASES = {
    "dense": replace(WHOLE, is_causal=True),
    "dilated": replace(WHOLE, pattern=DILATED, window=None),
    "blocks": replace(WHOLE, pattern=BLOCKS, window=None, is_causal=True),
    "union": replace(WHOLE, pattern=BLOCKS, window=None, branches=DILATED),
}


def tensors(dtype: torch.dtype = torch.float64, batch: int = 2, seed: int = 0) -> Tensors:
    """q, k, v, sinks (one that outweighs all keys), dout and dlse."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((batch, N, H, D), (batch, N, HK, D), (batch, N, HK, D), (H,), (batch, N, H, D), (batch, H, N))
    made = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
    made[3][1] = 7.0
    return tuple(x.requires_grad_() if index < 4 else x for index, x in enumerate(made))


def dilated(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
    return da.dilated_attention(q, k, v, DILATED.segment_lengths, DILATED.dilation_rates, **options)


def union(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
    return da.block_sparse_dilated_attention(q, k, v, DILATED.segment_lengths, DILATED.dilation_rates, BLOCKS, **options)


def plain(name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    case = replace(CASES[name], batch=q.shape[0], is_causal=False, sinks=True)
    return plain_attention(case, Inputs(q, k, v, q, q, None, None, sinks), q, k, v)[0]


def check_close(found: Any, truth: Any, tolerance: float = 1e-10) -> None:
    for index, (a, b) in enumerate(zip(found, truth, strict=True)):
        assert a.shape == b.shape and a.dtype == b.dtype and bool(a.isfinite().all()), index
        assert max_error(a, b) <= tolerance * max(1.0, float(b.detach().abs().max())), index


def test_frozen_sinks_have_no_gradient_to_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    *leaves, dout, _ = tensors()
    truth = torch.autograd.grad(plain("dilated", *leaves), leaves[:3], dout)
    monkeypatch.setattr(resolve, "sinks_gradient", lambda *_: pytest.fail("computed"))
    check_close(torch.autograd.grad(dilated(*leaves[:3], sinks=leaves[3].detach()), leaves[:3], dout), truth)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_no_keys_and_no_sink(dtype: torch.dtype) -> None:
    """A sink of −inf is none; with a row that has no keys either, there is nothing to normalise, and nothing is NaN."""
    *leaves, dout, dlse = tensors(dtype)
    none = torch.full((H,), -torch.inf, dtype=dtype, requires_grad=True)
    given = (*leaves[:3], none)
    found, truth = (da.dilated_attention(*leaves[:3], **GAPS, sinks=sinks, return_lse=True) for sinks in (none, None))
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
        outs = [dilated(*leaves[:3], sinks=sinks) for sinks in (leaves[3], single)]
        assert torch.equal(*outs)
        grads = [torch.autograd.grad(out, sinks, dout)[0] for out, sinks in zip(outs, (leaves[3], single), strict=True)]
        assert [grad.dtype for grad in grads] == [dtype, torch.float32] and torch.equal(grads[1].to(dtype), grads[0])


def test_autocast() -> None:
    *leaves, _, _ = tensors(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = da.attention(*leaves[:3], sinks=leaves[3])
    assert out.dtype is torch.bfloat16
    assert torch.equal(out, da.attention(*(x.bfloat16() for x in leaves[:3]), sinks=leaves[3]))
    (grad,) = torch.autograd.grad(out.float().sum(), leaves[3])
    assert grad.dtype is torch.float32 and bool(grad.any())


# ---- processes


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
    kind = {"block ring": "blocks"}.get(name, name.split()[0])
    out, truth = module(q, k, v), plain(kind, q, k, v, sinks)
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
    check_close((lazy(q, k, v),), (plain(kind, q, k, v, torch.zeros_like(sinks)),))
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


def test_who_takes_a_cap_and_who_refuses() -> None:
    q, k, v, *_ = tensors()
    with pytest.raises(da.BackendUnavailable, match="sdpa_cpu: takes no softcap"):
        da.attention(q, k, v, softcap=0.8, backend="sdpa_cpu")
    explained = da.explain_backend(softcap=0.8, device="cpu")
    assert explained.forward == explained.backward == "math"
    assert [name for name in registry.names() if registry.get(name).capabilities.softcap] == [*("flash4", "flash2", "flex", "math")]


# ---- kernels, interpreted

SHAPES = [(1, 1, 1, 1), (2, 37, 3, 64), (1, 5, 2, 59), (2, 130, 2, 128), (1, 40, 1, 256), (3, 4099, 12, 64)]


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


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_kernels_are_their_twins(shape: tuple[int, int, int, int], dtype: torch.dtype, device: str) -> None:
    if device == "cpu" and shape == SHAPES[-1]:
        pytest.skip("long for the interpreter")
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
