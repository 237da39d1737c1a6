"""Every kernel of lists of blocks on a GPU, forward and backward: any case is its definition. On a CPU: backends/test_blocks.py."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from dilated_attention import BackendUnavailable, DilatedPattern
from dilated_attention.backends import AttentionRequest, detect, registry
from dilated_attention.pattern import BlockTensor, LocalWindow, MaskFunction, RandomBlocks, TopBlocks
from dilated_attention.testing import Case, Space, call, inputs, max_error, random_case, results
from dilated_attention.testing.cases import scattered
from dilated_attention.testing.check import truth_and_bounds

pytestmark = pytest.mark.gpu

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DEVICE = "cuda"
# (query block, key block): with the head dim, what a kernel is compiled for
BLOCKS = ((128, 128), (64, 64), (128, 64), (64, 128))
# (head dim, blocks, dtype) that each takes, every head dim and every block size once: a kernel costs seconds to compile, another case
# milliseconds. flex searches for tiles where a block has 64, a minute for each kernel
EACH = [
    (32, BLOCKS[0], FP16),
    (64, BLOCKS[0], BF16),
    (64, BLOCKS[1], BF16),
    (96, BLOCKS[2], FP16),
    (128, BLOCKS[0], BF16),
    (128, BLOCKS[3], BF16),
]
FLEX = [*((64, blocks, BF16) for blocks in BLOCKS), (128, BLOCKS[0], BF16), (64, BLOCKS[0], FP32)]
KERNELS = {"flash4": EACH, "triton": EACH, "flex": FLEX, "math": FLEX}
# what sharing a softmax with branches needs of lists; few branches, as their kernels are compiled, too
BRANCHES = DilatedPattern((128, 600), (1, 3))


def usual(pattern: Any, **changes: Any) -> Case:
    shape: dict[str, Any] = {"batch": 2, "num_queries": 700, "num_keys": 900, "query_offset": 200, "heads": 4, "kv_heads": 2}
    return replace(
        Case(pattern=pattern, head_dim=64, lse_grad=True, layouts=("packed", "heads_first", "packed", "packed"), **shape), **changes
    )


def compared(case: Case, backend: str, dtype: torch.dtype) -> str:
    """What was compared: "" where the backend takes neither pass of the case."""
    x = inputs(case, dtype, DEVICE)
    try:
        found = results(call, case, x, backend=backend)
    except BackendUnavailable:
        try:
            with torch.no_grad():
                found = dict(zip(("out", "lse"), call(case, x, x.q, x.k, x.v, backend=backend), strict=True))
        except BackendUnavailable:
            return ""
    truth, bounds = truth_and_bounds(case, x)
    if case.branches is None:
        bounds["lse"] = 1e-4
    errors = {name: max_error(y, truth[name]) for name, y in found.items()}
    assert not {name: (error, bounds[name]) for name, error in errors.items() if not error <= bounds[name]}, (backend, case)
    return " ".join(found)


def need(backend: str, dtype: torch.dtype = BF16) -> None:
    """Skips where its package is missing."""
    reasons = registry.get(backend).reasons_against(AttentionRequest(hardware=detect(DEVICE), dtype=dtype, head_dim=64, blocks=BLOCKS[0]))
    if missing := [reason for reason in reasons if "is not installed" in reason]:
        pytest.skip(missing[0])


def drawn(head_dim: int, blocks: tuple[int, int]) -> Iterator[Case]:
    """Random cases of these blocks; one cap only, as flash4 compiles anew for each."""
    space = Space(
        blocks=True, max_length=800, head_dims=(head_dim,), heads_per_kv=(1, 2), layouts=("contiguous", "heads_first", "packed"),
        dropout=False, softcap=True,
    )  # fmt: skip
    for seed in itertools.count():
        case: Any = random_case(seed, space)
        if (case.pattern.q_block, case.pattern.k_block) == blocks and case.num_queries:
            yield replace(case, scale=None, softcap=case.softcap and 1.5, branches=case.branches and BRANCHES)


@pytest.mark.kernel("name", "head_dim")
@pytest.mark.parametrize(
    ("name", "head_dim", "blocks", "dtype"), [(name, *kernel) for name, kernels in KERNELS.items() for kernel in kernels], ids=str
)
def test_any_case(name: str, head_dim: int, blocks: tuple[int, int], dtype: torch.dtype) -> None:
    need(name, dtype)
    capabilities, sizes = registry.get(name).capabilities, {"block_size": blocks}
    kinds = {
        "none": RandomBlocks(0.4, **sizes),
        "interval": LocalWindow((300, 30), **sizes),
        "bits": MaskFunction(scattered, per_head=True, **sizes),
    }
    window, shape = kinds["interval"], {"head_dim": head_dim}
    if name == "flex" and blocks != BLOCKS[0]:
        assert compared(usual(window, **shape), name, dtype)
        return
    for kind, pattern in kinds.items():
        assert bool(compared(usual(pattern, **shape), name, dtype)) == (kind in capabilities.block_masks)
    # lists of each batch entry (beyond the blocks that all keep), none, of few queries, of a softmax shared with branches, of capped scores
    assert compared(usual(TopBlocks(6, **sizes), **shape), name, dtype)
    assert compared(usual(RandomBlocks(0.0, **sizes), **shape), name, dtype)
    assert compared(usual(kinds["none"], num_queries=100, **shape), name, dtype)
    assert compared(usual(window, branches=BRANCHES, **shape), name, dtype) or name in ("triton", "flex")
    assert bool(compared(usual(window, softcap=1.5, **shape), name, dtype)) == capabilities.softcap
    for bias in ("alibi", "line", "plane"):
        assert bool(compared(usual(window, bias=bias, **shape), name, dtype)) == capabilities.bias
    assert sum(bool(compared(case, name, dtype)) for case in itertools.islice(drawn(head_dim, blocks), 8 if name == "flex" else 16)) >= 3


@pytest.mark.parametrize("name", ["flash4", "triton"])
def test_two_block_sizes_in_one_process(name: str) -> None:
    need(name)
    for k_block in (128, 64, 128):
        assert compared(usual(RandomBlocks(0.4, block_size=(128, k_block))), name, BF16)


@pytest.mark.parametrize("name", ["flash4", "triton"])
def test_one_long_list_among_short_ones(name: str) -> None:
    """A block that keeps everything has a table, or a turn, of its own."""
    need(name)
    table = torch.eye(64, dtype=torch.bool)
    table[3] = table[:, 7] = True
    shape = {"batch": 1, "num_queries": 64 * 128, "num_keys": 64 * 128, "query_offset": 0, "heads": 2}
    assert compared(usual(BlockTensor(table, block_size=128), **shape), name, BF16)


@pytest.mark.parametrize("name", ["triton", "math"])
def test_deterministic_results_repeat(name: str) -> None:
    case = usual(RandomBlocks(0.5, block_size=128), num_queries=2048, num_keys=2048, query_offset=0)
    x = inputs(case, BF16, DEVICE)
    first, *others = (results(call, case, x, backend=name, deterministic=True) for _ in range(101 if name == "triton" else 11))
    assert all(torch.equal(first[what], other[what]) for other in others for what in first)
