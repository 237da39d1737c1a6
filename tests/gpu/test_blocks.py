"""Every kernel of lists of blocks on a GPU, forward and backward, against dense float64 attention under the same mask."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from dilated_attention.backends import AttentionRequest, detect, registry
from dilated_attention.testing import low_precision_bound, max_error
from tests.helpers.block_cases import BlockCase, Problem, dense, expected, lists_from_dense, make

pytestmark = pytest.mark.gpu

NAMES = ("out", "lse", "dq", "dk", "dv")
BACKENDS = ("flash4", "triton", "flex")


# (query block, key block): with the head dim, what a kernel is compiled for
BLOCKS = ((128, 128), (64, 64), (128, 64), (64, 128))


def random_case(seed: int, **changes: object) -> BlockCase:
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
