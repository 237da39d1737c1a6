"""XPOS in the modules: against a restatement of TorchScale's in float64, and what its growing and shrinking factors need."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed as dist

from dilated_attention import MultiheadDilatedAttention, RingMultiheadDilatedAttention, shard_sequence
from dilated_attention.engine.reference import reference_attention
from dilated_attention.modules.rotary import rotary_table, rotate, xpos_max_length, xpos_tables
from tests.helpers.pool import pool_of

SHAPE: dict[str, Any] = {"embed_dim": 32, "num_heads": 4, "segment_lengths": [4, 8], "dilation_rates": [1, 2]}
DOCUMENTS = torch.tensor([0, 5, 5, 14], dtype=torch.int32)


def make_layer(kind: Any = MultiheadDilatedAttention, **settings: Any) -> Any:
    torch.manual_seed(0)
    return kind(**{**SHAPE, "rotary": True, "xpos_scale_base": 6.0, "dtype": torch.float64, **settings})


def make_x(batch: int = 2, length: int = 14, seed: int = 1) -> torch.Tensor:
    return torch.randn(batch, length, 32, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def torchscale_xpos(x: torch.Tensor, scale_base: float, theta: float, *, downscale: bool) -> torch.Tensor:
    """TorchScale's XPOS of x (B, N, H, D), as its paper and code say it: neighbours (x_2i, x_2i+1) are a pair, scales are centred."""
    length, dim = x.shape[1], x.shape[3]
    out = torch.empty_like(x)
    for n in range(length):
        for i in range(dim // 2):
            zeta = ((2 * i + 0.4 * dim) / (1.4 * dim)) ** ((n - length // 2 - length % 2) / scale_base)
            factor = 1 / zeta if downscale else zeta
            angle = n * theta ** (-i / (dim // 2))
            even, odd = x[:, n, :, 2 * i], x[:, n, :, 2 * i + 1]
            out[:, n, :, 2 * i] = factor * (even * math.cos(angle) - odd * math.sin(angle))
            out[:, n, :, 2 * i + 1] = factor * (odd * math.cos(angle) + even * math.sin(angle))
    return out


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("length", [13, 14])
def test_the_layer_is_torchscales_with_its_projection_rows_permuted(length: int, is_causal: bool) -> None:
    layer, x = make_layer(bias=False, layer_norm=False), make_x(length=length)
    # their row 2i of a head is our row i, their row 2i + 1 our row i + D/2
    theirs = torch.stack([torch.arange(4), torch.arange(4) + 4], dim=1).flatten()
    q, k = ((x @ p.weight.view(4, 8, 32)[:, theirs].reshape(32, 32).T).view(2, length, 4, 8) for p in (layer.q_proj, layer.k_proj))
    q, k = torchscale_xpos(q, 6.0, 10000.0, downscale=False), torchscale_xpos(k, 6.0, 10000.0, downscale=True)
    out, _ = reference_attention(q, k, (x @ layer.v_proj.weight.T).view(2, length, 4, 8), layer.attention.pattern, is_causal=is_causal)
    torch.testing.assert_close(layer(x, is_causal=is_causal)[0], out.flatten(2) @ layer.out_proj.weight.T, rtol=1e-9, atol=1e-10)
    without = make_layer(bias=False, layer_norm=False, xpos_scale_base=None)
    assert (without(x, is_causal=is_causal)[0] - layer(x, is_causal=is_causal)[0]).abs().max() > 1e-3


def test_scores_depend_on_the_distance_only_and_fade_with_it() -> None:
    q, k = (torch.randn(8, generator=torch.Generator().manual_seed(i), dtype=torch.float64).expand(1, 9, 1, 8) for i in range(2))

    def scores(first: int) -> torch.Tensor:
        positions = torch.arange(first, first + 9)
        tables = xpos_tables(rotary_table(positions, 8, 100.0, q.dtype), positions, 8, 6.0)
        return torch.einsum("bihd,bjhd->ij", rotate(q, tables[0]), rotate(k, tables[1]))

    near = scores(-4)
    torch.testing.assert_close(scores(50), near, rtol=1e-9, atol=1e-10)
    # Σ_i ζ_i^((n−m)/b) (cos((n−m)θ_i) (q·k)_i + sin((n−m)θ_i) (q×k)_i)
    for n, m in ((8, 0), (3, 3), (0, 5)):
        expected = 0.0
        for i in range(4):
            a, b = complex(q[0, 0, 0, i], q[0, 0, 0, i + 4]), complex(k[0, 0, 0, i], k[0, 0, 0, i + 4])
            turn = (n - m) * 100.0 ** (-i / 4)
            expected += ((2 * i + 3.2) / 11.2) ** ((n - m) / 6) * (a * b.conjugate() * complex(math.cos(turn), math.sin(turn))).real
        assert abs(near[n, m] - expected) < 1e-10


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_longest_sequence_fits_its_dtype_and_longer_ones_are_refused(dtype: torch.dtype) -> None:
    base = 0.5
    longest = xpos_max_length(base, dtype)
    layer = make_layer(xpos_scale_base=base, dtype=dtype)
    for length in (longest, longest - 1):
        q = k = torch.full((1, length, 4, 8), 15.0, dtype=dtype)
        # the rotation may lengthen one component by √2
        q, k = (x / 2 for x in (q, k))
        assert all(bool(x.isfinite().all()) for x in layer.rotate(q, k, torch.arange(length), None))
    x = make_x(1, longest + 1).to(dtype)
    with pytest.raises(ValueError, match=rf"the sequence has {longest + 1} positions.*{dtype} beyond {longest}: use a larger"):
        layer(x)
    # packed, the documents count
    fits = torch.tensor([0, 4, longest + 1], dtype=torch.int32)
    assert bool(layer(x, cu_seqlens=fits, is_causal=True)[0].isfinite().all())
    with pytest.raises(ValueError, match=rf"a document has {longest + 1} positions.*beyond {longest}"):
        layer(x, cu_seqlens=torch.tensor([0, longest + 1], dtype=torch.int32))


def test_the_documented_limits_are_these() -> None:
    assert [xpos_max_length(512.0, dtype) for dtype in (torch.float16, torch.bfloat16)] == [6798, 70251]


def test_half_precision_factors_are_rounded_once() -> None:
    layer, x = make_layer(dtype=torch.bfloat16), make_x().bfloat16()
    q, k, _ = layer.project(x, x, x)
    wide = make_layer().rotate(q.double(), k.double(), torch.arange(14), None)
    for got, want in zip(layer.rotate(q, k, torch.arange(14), None), wide, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=2**-8, atol=1e-6)


# with the last base the documents' lengths are read, and scores that the causal mask hides are infinite
@pytest.mark.slow
@pytest.mark.parametrize(
    ("base", "options"),
    [(6.0, {"is_causal": True}), (6.0, {"cu_seqlens": DOCUMENTS}), (0.01, {"cu_seqlens": DOCUMENTS, "is_causal": True})],
    ids=["causal", "documents", "long_documents"],
)
def test_a_compiled_layer_equals_eager(base: float, options: dict[str, Any]) -> None:
    torch._dynamo.reset()
    layer, x = make_layer(xpos_scale_base=base, qk_norm=True), make_x(1 if "cu_seqlens" in options else 2).requires_grad_()
    graph = torch.compile(layer, backend="aot_eager", fullgraph=True)
    assert (xpos_max_length(base, x.dtype) < x.shape[1]) == (base == 0.01)
    results = []
    for call in (layer, graph):
        out = call(x, **options)[0]
        results.append((out, *torch.autograd.grad(out.sin().sum(), [x, *layer.parameters()])))
    for eager, other in zip(*results, strict=True):
        assert bool(eager.isfinite().all())
        torch.testing.assert_close(other, eager, rtol=1e-9, atol=1e-10)


def spread_equals_one_process(rank: int, world: int) -> None:
    for layout in ("contiguous", "zigzag", "striped"):
        alone, spread = make_layer(), make_layer(RingMultiheadDilatedAttention, layout=layout)
        for options in ({"is_causal": True}, {"cu_seqlens": DOCUMENTS}):
            x = make_x(1 if "cu_seqlens" in options else 2)
            part, want = shard_sequence(dist.group.WORLD, [x, alone(x, **options)[0]], [1, 1], layout=layout)
            torch.testing.assert_close(spread(part, **options)[0], want, rtol=1e-9, atol=1e-10)
    # refused on all processes alike, by the whole length
    (part,) = shard_sequence(dist.group.WORLD, [make_x()], [1])
    with pytest.raises(ValueError, match="the sequence has 14 positions"):
        make_layer(RingMultiheadDilatedAttention, xpos_scale_base=0.01)(part)


def test_processes_share_one_middle() -> None:
    pool_of(2).run(spread_equals_one_process)
