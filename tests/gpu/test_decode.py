"""Decoding on a GPU: the kernels against float64 over the same cache, FlashAttention-3's paged one, steps replayed from a CUDA graph."""

import random
from typing import Any

import pytest
import torch

from dilated_attention.engine.decode import dispatch
from dilated_attention.engine.decode.keys import Cached, row_keys
from dilated_attention.functional import decode_attention, explain_decode
from dilated_attention.models import KVCache, LongNetConfig, LongNetLM, PagedKVCache, Stepper, prefill
from dilated_attention.pattern import DilatedPattern, GlobalLocal, LocalWindow, Strided
from dilated_attention.testing import low_precision_bound, max_error
from tests.engine.test_decode import LAYOUTS, laid_out

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
PATTERNS: dict[str, Any] = {
    "dense": None,
    "longnet": DilatedPattern((256, 1024, 2048), (1, 4, 12)),
    "zero": DilatedPattern((256, 2048), (1, 4), "zero"),
    "window": LocalWindow((700, 0)),
    "global": GlobalLocal((300, 0), 70),
    "blocks": Strided(3) | LocalWindow((200, 0)),
}


def case(seed: int, dtype: torch.dtype, head_dim: int, name: str) -> tuple[torch.Tensor, Cached, Any, torch.Tensor]:
    """q (B, H, D), a cache of a random layout, NaN where no row is, the runs, the positions."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    kv_heads, group, batch, n = draw.choice([1, 2, 4]), draw.choice([1, 1, 2, 4, 7]), draw.choice([1, 3]), draw.choice([300, 2500])
    k, v = (torch.randn(batch, n, kv_heads, head_dim).to(dtype) for _ in range(2))
    keys, at, layout = (
        row_keys(PATTERNS[name], kv_heads * group, kv_heads, n, DEVICE),
        draw.choices(range(n), k=batch),
        draw.choice(LAYOUTS),
    )
    stores = laid_out(layout, k, v, at, keys.span, draw.choice([16, 128]))
    k, v, table = (x if x is None else x.to(DEVICE) for x in stores)
    keys.prepare(at)
    positions = torch.tensor(at, device=DEVICE)
    q = torch.randn(batch, kv_heads * group, head_dim).to(DEVICE, dtype)
    return q, Cached(k, v, table, wraps=layout == "round" and keys.span < n), keys.runs(positions), positions


def judge(dtype: torch.dtype, head_dim: int, name: str, backend: str, seeds: range) -> None:
    for seed in seeds:
        q, cached, runs, _ = case(seed * 1000 + head_dim, dtype, head_dim, name)
        exact = Cached(cached.k.double(), cached.v.double(), cached.table, cached.wraps)
        truth, truth_lse = dispatch.torch_decode(q.double(), exact, runs, head_dim**-0.5)
        plain, _ = dispatch.torch_decode(q, cached, runs, head_dim**-0.5)
        if backend == "flash3":
            cached = Cached(cached.k.nan_to_num(), cached.v.nan_to_num(), cached.table, cached.wraps)
        out, lse = dispatch.decode(q, cached, runs, head_dim**-0.5, backend)
        bound = 1e-5 if dtype is torch.float32 else low_precision_bound(plain, truth, dtype)
        assert max_error(out, truth) <= bound, (seed, dtype)
        assert max_error(lse, truth_lse) <= (1e-3 if backend == "flash3" else 1e-4)


@pytest.mark.kernel("dtype", "head_dim")
@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("head_dim", [24, 40, 64, 96, 128, 192, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_kernel_against_float64(dtype: torch.dtype, head_dim: int, name: str) -> None:
    judge(dtype, head_dim, name, "triton", range(4))


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_flash3_over_stretches_and_pages(dtype: torch.dtype, head_dim: int) -> None:
    explained = explain_decode(dtype=dtype, head_dim=head_dim, dense=True, backend="flash3")
    if explained.chosen is None:
        pytest.skip(str(explained))
    judge(dtype, head_dim, "dense", "flash3", range(8))


def test_no_step_waits_for_the_host() -> None:
    q, cached, _, positions = case(3, torch.bfloat16, 64, "longnet")
    # the branches' tables come from the host, as arguments
    decode_attention(q[:, None], cached.k, cached.v, positions, PATTERNS["longnet"], page_table=cached.table, max_length=2500)
    keys = row_keys(PATTERNS["longnet"], q.shape[1], cached.k.shape[2], 2500, "cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        dispatch.decode(q, cached, keys.runs(positions), 0.1)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.xdist_group("large")
def test_large_offsets() -> None:
    """A cache of more than 2^31 elements: addresses are counted in 64 bits."""
    n, heads, dim = 2**21 + 5000, 8, 128
    k, v = (torch.zeros(1, n, heads, dim, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    for x in (k, v):
        x[:, -3000:] = torch.randn(1, 3000, heads, dim, device="cuda").to(x.dtype)
    q = torch.randn(1, 1, heads, dim, device="cuda", dtype=torch.bfloat16)
    found = decode_attention(q, k, v, torch.tensor([n - 1], device="cuda"), window=999, backend="triton")
    expected = decode_attention(q, k[:, -1000:], v[:, -1000:], torch.tensor([999], device="cuda"), window=999, backend="torch")
    torch.testing.assert_close(found, expected, atol=2e-2, rtol=0)


CONFIGS: dict[str, dict[str, Any]] = {
    "longnet": {"segment_lengths": (64, 256, 512), "dilation_rates": (1, 4, 6)},
    "dense": {"attention": "dense", "num_kv_heads": 2},
    "window": {"attention": "block_sparse", "block_pattern": LocalWindow((100, 0))},
    "blocks": {"attention": "block_sparse", "block_pattern": Strided(2, block_size=64) | LocalWindow((30, 0), block_size=64)},
    "xpos": {"segment_lengths": (64, 512), "dilation_rates": (1, 4), "positions": "xpos"},
    "mixed": {
        "attention": [
            {"attention": "block_sparse", "block_pattern": LocalWindow((100, 0))},
            {"attention": "dense", "positions": "none"},
        ]
    },
}


@pytest.mark.parametrize("name", CONFIGS)
def test_replayed_steps_are_the_full_forward(name: str) -> None:
    torch.manual_seed(0)
    shape: dict[str, Any] = {"vocab_size": 100, "embed_dim": 256, "num_layers": 3, "num_heads": 4}
    lm = LongNetLM(LongNetConfig(**shape, **CONFIGS[name]), device="cuda").eval().requires_grad_(False)
    n = 1100
    tokens = torch.randint(100, (2, n), device="cuda")
    # float64 stands for both: each is float32's rounding away from it
    full = lm.double()(tokens)
    lm = lm.float()
    lengths = (700, 517)
    for kind in ("stretches", "pages"):
        cache: Any
        if kind == "stretches":
            cache, lengths_now = KVCache(lm.config, 2, n, device="cuda"), (700, 700)
            prefill(lm, tokens[:, :700], cache, chunk=300)
        else:
            cache, lengths_now = PagedKVCache(lm.config, 2, n, device="cuda", page_size=64), lengths
            for i, length in enumerate(lengths):
                prefill(lm, tokens[i : i + 1, :length], cache.of(i), chunk=300)
        assert tuple(cache.lengths) == lengths_now
        step = Stepper(lm, cache)
        assert step.uses_graph
        rows = torch.arange(2, device="cuda")
        worst = 0.0
        for _ in range(200):
            at = cache.positions.clone()
            worst = max(worst, float((step(tokens[rows, at][:, None]).double() - full[rows, at]).abs().max()))
        assert worst <= 1e-5 * max(1.0, float(full.abs().max())), (kind, worst)
