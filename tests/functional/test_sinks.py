"""Learned sinks: what no random case has. Kernels against their twins, modules, refusals.

Any case with sinks and with caps, in any form, by any backend: tests/engine/test_oracle.py; over processes: tests/distributed/test_ring.py.
"""

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import dilated_attention as da
from dilated_attention.backends import merge
from dilated_attention.pattern import GlobalLocal
from dilated_attention.testing import Space, call, inputs, random_case, results
from tests.helpers.machine import ON_CPU

merge_triton = pytest.importorskip("dilated_attention.backends.merge_triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# where there is a GPU, its suite runs these tests on it
pytestmark = [pytest.mark.gpu] * (DEVICE == "cuda")
N, H, D = 70, 4, 8
BLOCKS = GlobalLocal(20, 4, block_size=64)
Tensors = tuple[torch.Tensor, ...]


def tensors(dtype: torch.dtype = torch.float64) -> Tensors:
    """q, k, v, sinks (one that outweighs all keys), dout and dlse."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, N, H, D), (2, N, 2, D), (2, N, 2, D), (H,), (2, N, H, D), (2, H, N))
    made = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
    made[3][1] = 7.0
    return tuple(x.requires_grad_() if index < 4 else x for index, x in enumerate(made))


@pytest.mark.parametrize("blocks", [False, True])
def test_no_keys_and_no_sink(blocks: bool) -> None:
    """A sink of −inf is none; with a row that has no keys either, there is nothing to normalise, and nothing is NaN."""
    for seed in range(30):
        case = random_case(seed, Space(softcap=True, bias=True, blocks=blocks, max_length=150 if blocks else 40))
        case = replace(case, mixture_grad="exact", sinks=True)
        x = inputs(case, (torch.float64, torch.float32, torch.bfloat16)[seed % 3])
        assert x.sinks is not None
        found = results(call, case, replace(x, sinks=torch.full_like(x.sinks, -torch.inf)))
        truth = results(call, replace(case, sinks=False), replace(x, sinks=None))
        assert not found.pop("dsinks").any() and all(torch.equal(found[name], truth[name]) for name in truth), case


@pytest.mark.parametrize("score", [-3e4, 3e4])
def test_scores_far_from_the_keys(score: float) -> None:
    *qkv, _, dout, dlse = tensors(torch.float32)
    sinks = torch.full((H,), score, requires_grad=True)
    out, lse = da.attention(*qkv, sinks=sinks, return_lse=True)
    grads = torch.autograd.grad((out, lse), (*qkv, sinks), (dout, dlse))
    assert all(bool(x.isfinite().all()) for x in (out, lse, *grads))
    if score > 0:
        assert not out.any() and bool((lse == score).all())
        torch.testing.assert_close(grads[3], dlse.sum((0, 2)))
    else:
        assert torch.equal(out, da.attention(*qkv)) and not grads[3].any()


@pytest.mark.skipif(ON_CPU and os.environ.get("TRITON_INTERPRET") != "1", reason="interprets kernels")
@pytest.mark.no_poison
def test_heads_of_a_gradient_that_lie_far_apart() -> None:
    """The third head begins at 2³¹ elements, of memory that is hardly touched."""
    out, lse = torch.randn(1, 4, 3, 16, device=DEVICE), torch.zeros(1, 3, 4, device=DEVICE)
    far = torch.empty(2**31 + 64, dtype=torch.bfloat16, device=DEVICE).as_strided(out.shape, (64, 16, 2**30, 1))
    near = out.sin().bfloat16()
    far.copy_(near)
    found, truth = (merge_triton.sinks_gradient(x, None, out, lse, torch.zeros(3, device=DEVICE)) for x in (far, near))
    assert torch.equal(found, truth)


CORES: dict[str, Callable[..., Any]] = {
    "dense ring": lambda **o: da.RingAttention(layout="contiguous", **o),
    "dilated ring": lambda **o: da.RingDilatedAttention([16, 64], [1, 3], **o),
    "block ring": lambda **o: da.RingBlockSparseAttention(BLOCKS, **o),
    "union": lambda **o: da.BlockSparseDilatedAttention([16, 64], [1, 3], BLOCKS, **o),
}


@pytest.mark.parametrize("name", CORES)
def test_modules_without_projections(name: str) -> None:
    """What they compute with sinks: tests/engine/test_oracle.py; layers with projections: tests/modules/test_modules.py."""
    make, (q, k, v, sinks, _, _) = CORES[name], tensors()
    module, without = make(sinks=True, num_heads=H).double(), make()
    assert module.sinks.shape == (H,) and not module.sinks.any() and "sinks=True" in repr(module)
    assert without.sinks is None and "sinks" not in repr(without)
    with torch.no_grad():
        module.sinks.copy_(sinks)
    out = module(q, k, v)
    # the number of heads comes with the first call, or with what is loaded
    lazy, loaded = make(sinks=True).double(), make(sinks=True).double()
    loaded.load_state_dict(module.state_dict())
    assert torch.equal(loaded(q, k, v), out)
    loaded.reset_parameters()
    assert torch.equal(lazy(q, k, v), loaded(q, k, v)) and lazy.sinks.dtype is torch.float64 and not lazy.sinks.any()


def test_a_model_generates_with_sinks() -> None:
    """The cache's kernels read the sinks of the layers as the forward does."""
    torch.manual_seed(0)
    model = da.create_model("longnet-tiny", segment_lengths=(8, 32), dilation_rates=(1, 2)).double().eval()
    for score, block in enumerate(model.decoder.blocks):
        block.attention.attention.sinks = torch.nn.Parameter(torch.randn(4, dtype=torch.float64) + score)
    with torch.no_grad():
        found = model.generate(torch.randint(256, (2, 20)), 12, temperature=0.0)
        for length in range(20, 32):
            assert torch.equal(model(found[:, :length])[:, -1].argmax(-1), found[:, length])


# ---- kernels, interpreted

SHAPES = [(1, 1, 1, 1), (2, 37, 3, 64), (1, 5, 2, 59), (2, 130, 2, 128), (1, 40, 1, 256), (3, 4099, 12, 64)]


def result(shape: tuple[int, int, int, int], dtype: torch.dtype, device: str) -> Tensors:
    """out, lse, sinks, dout that is not contiguous, dlse; empty rows, an absent sink, and both together."""
    B, n, heads, dim = shape
    generator = torch.Generator().manual_seed(n + dim)
    out = torch.randn(shape, generator=generator).to(dtype)
    lse = torch.randn(B, heads, n, generator=generator) * 4
    sinks = torch.randn(heads, generator=generator) * 2
    sinks[-1] = -torch.inf if heads > 1 else 0.5
    # of scores like these float32 holds few digits
    sinks[0], lse[:, 0] = sinks[0] + 1e4, lse[:, 0] + 1e4
    lse[:, :, ::3] = -torch.inf
    out[:, ::3] = 0
    dout = torch.randn(B, heads, n, dim, generator=generator).to(dtype).transpose(1, 2)
    return tuple(x.to(device) for x in (out, lse, sinks, dout, torch.randn(B, n, heads, generator=generator).transpose(1, 2)))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kernels", [merge, merge_triton], ids=["torch", "triton"])
def test_kernels_are_their_twins(shape: tuple[int, int, int, int], dtype: torch.dtype, kernels: Any, device: str) -> None:
    """The torch ones themselves too, in the dtypes that calls have."""
    if device == "cpu" and shape == SHAPES[-1]:
        pytest.skip("long for the interpreter")
    if device == "cpu" and DEVICE == "cuda" and kernels is merge_triton:
        pytest.skip("kernels are compiled for the GPU")
    out, lse, sinks, dout, dlse = result(shape, dtype, device)
    # the twin itself, in float64 on the CPU
    wide, wide_lse, wide_sinks, wide_dout, wide_dlse = (x.cpu().double() for x in (out, lse, sinks, dout, dlse))
    merge.add_sinks_(wide, wide_lse, wide_sinks)
    kernels.add_sinks_(out, lse, sinks)
    # Triton's interpreter cuts bfloat16 off instead of rounding it
    cut_off = device == "cpu" and kernels is merge_triton and dtype is torch.bfloat16
    step = torch.finfo(dtype).eps / (1 if cut_off else 2)
    assert bool(((out.cpu().double() - wide).abs() <= 1.01 * step * wide.abs() + 4e-6).all())
    torch.testing.assert_close(lse.cpu().double(), wide_lse, rtol=1e-6, atol=2e-6)
    for some, other in ((dlse, wide_dlse), (None, None)):
        found = kernels.sinks_gradient(dout, some, out, lse, sinks)
        truth = merge.sinks_gradient(wide_dout, other, out.cpu().double(), lse.cpu().double(), wide_sinks)
        torch.testing.assert_close(found.cpu().double(), truth, rtol=2e-5, atol=2e-4)
        assert torch.equal(found, kernels.sinks_gradient(dout, some, out, lse, sinks))
