"""Every GPU backend against float64, on a GPU. Random cases over the options each backend takes; skipped without CUDA."""

import itertools
import os
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from dilated_attention import BackendUnavailable, DilatedPattern, dilated_attention
from dilated_attention.backends import AttentionRequest, Options, detect, registry
from dilated_attention.testing import Case, Space, inputs, largest, measure, random_case
from tests.helpers.gpu_memory import peak_of

pytestmark = pytest.mark.gpu

HALVES = (torch.bfloat16, torch.float16)
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
# (head dims, dtypes, query heads per key/value head, cases of each head dim and dtype): a kernel costs seconds to compile, another case
# milliseconds. flash4 and flex compile one for nearly every option, so they have few head dims; so do the tiles, five kernels a case, which
# have few cases, too, as tests/backends/test_tiles.py interprets the same kernels
SWEEP: dict[str, tuple[tuple[int, ...], tuple[torch.dtype, ...], list[int], int]] = {
    "sdpa_flash": ((8, 24, 32, 48, 64, 80, 96, 128, 192, 256), (BF16, FP16), [1, 2, 4], 24),
    "sdpa_cudnn": ((8, 24, 48, 64, 96, 128), (BF16, FP16), [1, 2], 16),
    "sdpa_efficient": ((8, 24, 48, 64, 128, 256), (BF16, FP16, FP32), [1, 2], 24),
    "flash4": ((24, 64, 128, 256), (BF16,), [1, 2], 60),
    "flash3": ((24, 48, 64, 96, 128, 192, 256), (BF16, FP16), [1, 2, 4], 30),
    # head dims of more than 128 only where the installed flash-attn has their kernels
    "flash2": ((24, 48, 64, 96, 128), (BF16, FP16), [1, 2, 4], 30),
    "xformers": ((8, 24, 48, 64, 96, 128, 256), (BF16, FP16, FP32), [1, 2, 4], 24),
    "flex": ((24, 64), (BF16, FP32), [2], 4),
    "tiles": ((24, 48, 64, 128, 256), (BF16, FP16, FP32), [1, 2, 4], 8),
    "math": ((1, 24, 59, 64, 128), (FP64, FP32, BF16), [1, 2], 16),
}
KERNELS = [
    (backend, dtype, head_dim)
    for backend, (dims, dtypes, _, _) in SWEEP.items()
    for head_dim in dims
    for dtype in dtypes
    if (backend != "flex" or (dtype is BF16) == (head_dim == 64)) and (backend != "tiles" or dtype is BF16 or head_dim == 64)
]
CASES = int(os.environ.get("GPU_CASES_PERCENT", "100"))
# scores of a case in float64, of which the oracle holds a few and a dozen processes share one GPU
MOST_SCORES = 2**23


def need(name: str, dtype: torch.dtype = BF16, head_dim: int = 64) -> None:
    """Skips, with every reason, where this backend cannot be."""
    if reasons := registry.get(name).reasons_against(AttentionRequest(hardware=detect("cuda"), dtype=dtype, head_dim=head_dim)):
        pytest.skip("; ".join(reasons))


def branches_of(seed: str, *, shortest: int) -> list[tuple[tuple[int, ...], tuple[int, ...], str, str]]:
    """A few (lengths, rates, tail, mixing), which merging kernels are compiled for: once for all cases of a dtype and head dim."""
    rng, found = random.Random(seed), []
    for _ in range(6):
        lengths = tuple(max(shortest, round(2 ** rng.uniform(0, 11.5))) for _ in range(rng.randint(1, 4)))
        rates = tuple(rng.randint(1, min(w, 17)) for w in lengths)
        found.append((lengths, rates, rng.choice(["mask", "zero_keys"]), rng.choice(["exact", "exact", "detached"])))
    return found


def draw(rng: random.Random, backend: str, dtype: torch.dtype, head_dim: int) -> Case:
    """A random case that the backend takes. flex compiles anew for each number of heads, each size of 1 and each order of strides."""
    facts, is_flex = registry.get(backend).capabilities, backend == "flex"
    while True:
        space = Space.of_backend(
            backend, head_dims=(head_dim,), max_length=rng.choice([4, 64, 400, 1500]), heads_per_kv=tuple(SWEEP[backend][2]),
            layouts=("contiguous", "heads_first", "packed"),
            dropout=facts.dropout and dtype is FP32, window=facts.window and not (backend == "xformers" and dtype is FP32),
        )  # fmt: skip
        case = random_case(rng, space)
        if is_flex:
            n = rng.randint(4, 700)
            plain: dict[str, Any] = {"batch": 2, "heads": 4, "kv_heads": 2, "num_keys": n, "num_queries": n, "query_offset": 0}
            case = replace(case, **plain, bounds=None, layouts=("contiguous",) * 4)
        if 0 < case.batch * case.heads * case.num_queries * case.num_keys <= MOST_SCORES:
            break
    if backend == "tiles" and case.softcap is None:
        case = replace(case, bias=rng.choice(["none", "none", "none", "alibi", "line", "plane"]))
    # one cap only, as flash4 compiles anew for each
    case = replace(case, scale=None, softcap=case.softcap and 1.5)
    if case.window is not None:
        # nor without a side, of which it makes another kernel
        return replace(case, window=tuple(case.num_keys if side is None else side for side in case.window))
    lengths, rates, tail, mixing = rng.choice(branches_of(f"{dtype} {head_dim}", shortest=34 if is_flex else 1))
    split = rng.random() < 0.2 and not is_flex
    offsets = "cyclic" if split else "zero" if is_flex else rng.choice(["cyclic", "blocked", "zero"])
    pattern, exact = DilatedPattern(lengths, rates, offsets, "split" if split else "all", tail), mixing == "exact"
    return replace(case, pattern=pattern, mixture_grad=mixing, lse_grad=case.lse_grad and exact, sinks=case.sinks and exact)


def errors(case: Case, backend: str, dtype: torch.dtype) -> list[tuple[str, float, float]]:
    """(what, error, bound)."""
    more = 0.0
    if dtype not in HALVES:
        # dS is a difference of two sums of |dout ∘ v|: where it cancels, their rounding is what remains
        x = inputs(case, dtype)
        size = max(1.0, largest(x.dout) * largest(x.v) * case.head_dim**0.5)
        more = 16 * torch.finfo(dtype).eps * size / (1 - case.dropout_p)
    return [(result.name, result.error, result.bound + more) for result in measure(case, backend, dtype, "cuda")]


@pytest.mark.parametrize(("backend", "dtype", "head_dim"), KERNELS, ids=lambda x: str(x).removeprefix("torch."))
def test_random_cases_match_float64(backend: str, dtype: torch.dtype, head_dim: int) -> None:
    """Each kernel with cases of its own, drawn by what it is compiled for."""
    need(backend, dtype, head_dim)
    rng, failures, count = random.Random(f"{backend} {dtype} {head_dim}"), [], max(1, SWEEP[backend][3] * CASES // 100)
    worst: dict[str, float] = {}
    for index in range(count):
        case = draw(rng, backend, dtype, head_dim)
        try:
            report = errors(case, backend, dtype)
            bad = [f"{what} {error:.2e} > {bound:.2e}" for what, error, bound in report if not error <= bound]
            for what, error, bound in report:
                worst[what] = max(worst.get(what, 0.0), error / bound if bound else 0.0)
        except Exception as error:  # noqa: BLE001  one case that raises must not hide the others
            bad = [f"{type(error).__name__}: {str(error)[:300]}"]
        if bad:
            failures.append(f"#{index} {case}: {bad}")
            print(failures[-1], flush=True)
    shown = {what: round(ratio, 2) for what, ratio in worst.items()}
    print(f"{backend} {dtype} {head_dim}: {count} cases, {len(failures)} failures; largest error / bound {shown}")
    assert not failures, f"{len(failures)} of {count}\n" + "\n".join(failures[:6])


@pytest.mark.parametrize("first", range(8, 257, 64))
@pytest.mark.parametrize("backend", ["flash4", "flash3", "sdpa_cudnn", "sdpa_flash", "sdpa_efficient", "xformers"])
def test_every_head_dim_it_admits_is_right(backend: str, first: int) -> None:
    """Forward and backward at each multiple of 8 up to 256, grouped heads and causal too: a wrong tile size shows nowhere else."""
    need(backend)
    wrong, admitted = [], []
    for head_dim in range(first, min(first + 64, 257), 8):
        request = AttentionRequest(hardware=detect("cuda"), dtype=torch.bfloat16, head_dim=head_dim, needs_grad=True)
        if registry.get(backend).reasons_against(request):
            continue
        admitted.append(head_dim)
        kinds = ((2, 2, False), (4, 2, True))
        # it compiles four kernels for each: one of the two for each head dim, as its tiles are multiples of 16
        for heads, kv_heads, is_causal in kinds if backend != "flash4" else kinds[head_dim % 16 == 0 :][:1]:
            case = Case(
                pattern=DilatedPattern((2**62,), (1,), "zero"), window=(None, None), batch=2, num_queries=700, num_keys=700, heads=heads,
                kv_heads=kv_heads, head_dim=head_dim, is_causal=is_causal,
            )  # fmt: skip
            wrong += [(head_dim, heads, *found) for found in errors(case, backend, BF16) if not found[1] <= found[2]]
    print(f"{backend}: head dims {admitted}")
    assert not wrong, wrong


@pytest.mark.parametrize("backend", ["flash4", "flash3", "flash2", "sdpa_cudnn", "sdpa_flash", "sdpa_efficient", "xformers"])
def test_views_are_not_copied(backend: str) -> None:
    """Peak memory of a forward over strided segments: output, lse and one branch's results, and no copy of q, k or v."""
    need(backend)
    N, H, D = 65_536, 8, 64
    q, k, v = (torch.randn(1, N, H, D, device="cuda", dtype=torch.bfloat16) for _ in range(3))

    def call() -> torch.Tensor:
        return dilated_attention(q, k, v, [4096], [4], head_offsets="zero", backend=backend)  # type: ignore[no-any-return]

    extra = peak_of(call)
    out, part, lse = q.numel() * 2, q.numel() // 4 * 2, N * H * 4
    # dense lse for the whole (twice: inside and as returned) and the part's own, padded at most to twice its size
    allowed = out + part + 2 * lse + lse // 2 + 2**20
    print(f"{backend}: extra {extra / 2**20:.1f} MiB, allowed {allowed / 2**20:.1f} MiB")
    assert extra <= allowed


@pytest.mark.parametrize("backend", ["flash4", "flash3", "flash2", "tiles", "math", "flex"])
def test_deterministic_backward_repeats(backend: str) -> None:
    need(backend)
    q, k, v = (torch.randn(1, 3000, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    dout = torch.randn_like(q)

    def grads() -> tuple[torch.Tensor, ...]:
        out = dilated_attention(q, k, v, [512, 3000], [1, 3], is_causal=True, deterministic=True, backend=backend)
        return torch.autograd.grad(out, (q, k, v), dout)

    first = grads()
    for _ in range(10):
        assert all(torch.equal(a, b) for a, b in zip(first, grads(), strict=True))


def test_nondeterministic_backend_is_refused_by_name() -> None:
    q = torch.randn(1, 64, 2, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    for backend in ("sdpa_flash", "sdpa_efficient", "sdpa_cudnn"):
        with pytest.raises(BackendUnavailable, match="determinis"):
            dilated_attention(q, q, q, [32], [1], deterministic=True, backend=backend)


@pytest.mark.parametrize("backend", ["flash4", "flash3", "flash2", "sdpa_cudnn", "sdpa_flash", "sdpa_efficient", "xformers"])
def test_more_segments_than_a_launch_grid_holds(backend: str) -> None:
    """70,000 segments: beyond the 65,535 problems of one launch."""
    need(backend)
    N, w = 70_000 * 16, 16
    q, k, v = (torch.randn(1, N, 1, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    dout = torch.randn_like(q)
    out = dilated_attention(q, k, v, [w], [1], backend=backend)
    grads = torch.autograd.grad(out, (q, k, v), dout)
    folded = [x.detach().view(-1, w, 1, 64).transpose(1, 2).double().requires_grad_() for x in (q, k, v)]
    expected = torch.nn.functional.scaled_dot_product_attention(*folded)
    expected_grads = torch.autograd.grad(expected, folded, dout.view(-1, w, 1, 64).transpose(1, 2).double())
    for got, want in zip((out, *grads), (expected, *expected_grads), strict=True):
        want = want.transpose(1, 2).reshape(got.shape)
        assert (got.double() - want).abs().max() <= 0.02 * want.abs().max()


@pytest.mark.parametrize("backend", list(SWEEP))
def test_huge_logits(backend: str) -> None:
    need(backend)
    for scale in (100.0, 1e-3):
        q, k, v = (torch.randn(1, 77, 2, 64, device="cuda", dtype=torch.bfloat16).mul(10).requires_grad_() for _ in range(3))
        out = dilated_attention(q, k, v, [16, 77], [1, 3], is_causal=True, scale=scale, backend=backend)
        grads = torch.autograd.grad(out, (q, k, v), torch.randn_like(out))
        assert all(torch.isfinite(x).all() for x in (out, *grads))


@pytest.mark.parametrize("backend", ["flash4", "flash3", "flash2", "sdpa_cudnn", "sdpa_flash", "sdpa_efficient", "xformers", "tiles"])
@pytest.mark.parametrize("heads", [1, 4])
def test_backward_takes_out_and_dout_in_any_layout(backend: str, heads: int) -> None:
    """Equal q, k, v, then another layout of out or dout: torch keeps one cuDNN plan for all, built for the strides of the first."""
    need(backend)
    kernels, options = registry.get(backend), Options(scale=0.125)
    q, k, v, dout = (torch.randn(2, 300, heads, 64, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    out, lse = kernels.forward(q, k, v, options)
    expected = None
    for layout, of_dout in itertools.product((torch.Tensor.contiguous, _wide, _heads_first), repeat=2):
        grads = kernels.backward(of_dout(dout), q, k, v, layout(out), lse, options)
        expected = expected or grads
        for found, true in zip(grads, expected, strict=True):
            torch.testing.assert_close(found.float(), true.float(), atol=0.02, rtol=0.02)


def _wide(x: torch.Tensor) -> torch.Tensor:
    B, N, H, D = x.shape
    return torch.full((B, 2 * N, 2 * H, D), torch.nan, device=x.device, dtype=x.dtype)[:, ::2, ::2].copy_(x)


def _heads_first(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)
