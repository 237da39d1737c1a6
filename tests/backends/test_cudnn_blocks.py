"""The cudnn-frontend adapter against a stand-in with the block-sparse functions' published signatures: their kernels need a Hopper GPU.

The stand-in holds callers to what the manual and the code of 1.32 demand, and computes in plain torch.
"""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import importlib.util
import itertools
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dilated_attention.backends import AttentionRequest, hardware, registry
from dilated_attention.backends.block_kernels import block_tables
from dilated_attention.backends.block_kernels.cudnn import CudnnBlocksBackend
from dilated_attention.factory import EXAMPLES
from tests.helpers.block_cases import BlockCase, Problem, expected, lists_from_dense, make

BACKEND = CudnnBlocksBackend()
calls: list[str] = []


def _kept(
    q: torch.Tensor, k: torch.Tensor, index: torch.Tensor, nums: torch.Tensor, block_sizes: torch.Tensor | None, size: int
) -> torch.Tensor:
    """Bool (B, H, Nq, Nk) of the caller's lists, which must be as the manual says."""
    B, Nq, H, _ = q.shape
    Nk = k.shape[1]
    rows, columns = -(-Nq // size), -(-Nk // size)
    assert size in (64, 128) and index.dtype is nums.dtype is torch.int32
    assert index.is_contiguous() and nums.is_contiguous()
    assert index.shape[:3] == nums.shape == (B, H, rows) and 1 <= index.shape[3] <= columns
    assert nums.min() >= 0 and nums.max() <= index.shape[3]
    tail = Nk - (columns - 1) * size
    if tail < size:
        assert block_sizes is not None
    if block_sizes is not None:
        assert block_sizes.shape == (B, columns) and block_sizes.dtype is torch.int32
        assert (block_sizes[:, :-1] == size).all() and (block_sizes[:, -1] == tail).all()
    kept = torch.zeros(B, H, rows, columns, dtype=torch.int32)
    live = torch.arange(index.shape[3]) < nums[..., None]
    assert (index[live] >= 0).all() and (index[live] < columns).all()
    kept.scatter_add_(-1, index.long() * live, live.int())
    assert kept.max() <= 1, "a block twice in a row"
    return kept.bool().repeat_interleave(size, 2).repeat_interleave(size, 3)[:, :, :Nq, :Nk]


def _check_tensors(*tensors: torch.Tensor, alignment: int = 16) -> None:
    for x in tensors:
        assert not x.requires_grad
        assert x.stride(-1) == 1 and x.data_ptr() % alignment == 0 and x.dtype is tensors[0].dtype
        assert all(stride > 0 and stride * x.element_size() % 16 == 0 for stride in x.stride()[:-1])


def _scores(q: torch.Tensor, k: torch.Tensor, scale: float | None) -> torch.Tensor:
    assert scale is not None
    return torch.einsum("bihd,bjhd->bhij", q.float(), k.float()) * scale


def block_sparse_attention_forward(
    q_tensor: torch.Tensor,
    k_tensor: torch.Tensor,
    v_tensor: torch.Tensor,
    q2k_block_index: torch.Tensor,
    block_sparse_num: int | None = None,
    block_sizes: torch.Tensor | None = None,
    q2k_block_nums: torch.Tensor | None = None,
    *,
    sparse_block_size: int | None = None,
    allow_empty_block_nums: bool = False,
    softmax_scale: float | None = None,
    pack_gqa: bool | None = None,
    layout: str = "bhsd",
    kv_splits: int | str = 1,
    use_clc: bool | None = None,
) -> dict[str, torch.Tensor]:
    calls.append("forward")
    assert (block_sparse_num, pack_gqa, layout, kv_splits, use_clc) == (None, None, "bshd", 1, None)
    assert q2k_block_nums is not None and sparse_block_size is not None
    assert sparse_block_size == 128 or q_tensor.shape[1] % 64 == 0
    assert allow_empty_block_nums or int(q2k_block_nums.min()) > 0
    # 128 on a GPU; memory of a CPU begins at multiples of 64
    _check_tensors(q_tensor, k_tensor, v_tensor, alignment=64)
    kept = _kept(q_tensor, k_tensor, q2k_block_index, q2k_block_nums, block_sizes, sparse_block_size)
    group = q_tensor.shape[2] // k_tensor.shape[2]
    k, v = (x.repeat_interleave(group, 2) for x in (k_tensor, v_tensor))
    scores = _scores(q_tensor, k, softmax_scale).masked_fill(~kept, -torch.inf)
    out = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1).nan_to_num(0), v.float())
    return {"o_tensor": out.to(q_tensor.dtype), "lse_tensor": scores.logsumexp(-1)}


def block_sparse_attention_backward(
    do_tensor: torch.Tensor,
    q_tensor: torch.Tensor,
    k_tensor: torch.Tensor,
    v_tensor: torch.Tensor,
    o_tensor: torch.Tensor,
    lse_tensor: torch.Tensor,
    q2k_block_index: torch.Tensor,
    block_sparse_num: int | None = None,
    block_sizes: torch.Tensor | None = None,
    q2k_block_nums: torch.Tensor | None = None,
    *,
    softmax_scale: float | None = None,
    dq_tensor: torch.Tensor | None = None,
    dk_tensor: torch.Tensor | None = None,
    dv_tensor: torch.Tensor | None = None,
    bucket_size_blocks: int | None = None,
    sparse_block_size: int | None = None,
    layout: str = "bhsd",
) -> dict[str, torch.Tensor]:
    calls.append("backward")
    assert (block_sparse_num, bucket_size_blocks, layout) == (None, None, "bshd")
    assert q2k_block_nums is not None and sparse_block_size is not None
    assert dq_tensor is not None and dk_tensor is not None and dv_tensor is not None
    assert sparse_block_size == 128 or q_tensor.shape[1] % 64 == 0
    assert do_tensor.shape == o_tensor.shape == q_tensor.shape and k_tensor.shape[2] == q_tensor.shape[2]
    assert (dq_tensor.shape, dk_tensor.shape, dv_tensor.shape) == (q_tensor.shape, k_tensor.shape, v_tensor.shape)
    B, N, H, _ = q_tensor.shape
    assert lse_tensor.shape == (B, H, N) and lse_tensor.is_contiguous() and lse_tensor.dtype is torch.float32
    _check_tensors(do_tensor, q_tensor, k_tensor, v_tensor, o_tensor, dq_tensor, dk_tensor, dv_tensor)
    kept = _kept(q_tensor, k_tensor, q2k_block_index, q2k_block_nums, block_sizes, sparse_block_size)
    do, q, k, v, o = (x.float() for x in (do_tensor, q_tensor, k_tensor, v_tensor, o_tensor))
    # as the kernel does: −inf for pairs that are not kept, then exp of the difference, also where lse is +inf
    assert not (lse_tensor == -torch.inf).any()
    p = (_scores(q, k, softmax_scale).masked_fill(~kept, -torch.inf) - lse_tensor[..., None]).exp()
    dp = torch.einsum("bihd,bjhd->bhij", do, v)
    ds = p * (dp - (do * o).sum(-1).transpose(1, 2)[..., None]) * softmax_scale
    dq_tensor.copy_(torch.einsum("bhij,bjhd->bihd", ds, k))
    dk_tensor.copy_(torch.einsum("bhij,bihd->bjhd", ds, q))
    dv_tensor.copy_(torch.einsum("bhij,bihd->bjhd", p, do))
    return {"dq_tensor": dq_tensor, "dk_tensor": dk_tensor, "dv_tensor": dv_tensor}


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    package, module = types.ModuleType("cudnn"), types.ModuleType("cudnn.block_sparse_attention")
    module.block_sparse_attention_forward = block_sparse_attention_forward  # type: ignore[attr-defined]
    module.block_sparse_attention_backward = block_sparse_attention_backward  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cudnn", package)
    monkeypatch.setitem(sys.modules, "cudnn.block_sparse_attention", module)
    calls.clear()


BASE = BlockCase(dtype=torch.float32, q_block=128, k_block=128, num_queries=384, num_keys=512)
SMALL = replace(BASE, q_block=64, k_block=64, num_queries=256, num_keys=320)
CASES = {
    "plain": BASE,
    "blocks of 64": SMALL,
    "ragged": replace(BASE, num_queries=333, num_keys=450),
    "ragged blocks of 64": replace(SMALL, num_queries=200, num_keys=333, batch=2),
    "shorter than a block": replace(BASE, num_queries=37, num_keys=50, density=1.0),
    "one query of a block of 64": replace(SMALL, num_queries=1, num_keys=130, density=1.0),
    "lists of each head": replace(BASE, heads=4, kv_heads=4, groups=(1, 4), batch=2),
    "lists of each batch entry": replace(SMALL, batch=3, groups=(3, 1)),
    "lists of each of both": replace(SMALL, batch=2, heads=4, kv_heads=4, groups=(2, 4), num_queries=190),
    "one list for a batch": replace(BASE, batch=3),
    "heads first in memory": replace(BASE, batch=2, layout="heads_first"),
    "packed qkv": replace(SMALL, batch=2, layout="packed", num_queries=222),
    "every third position": replace(BASE, batch=2, layout="every_third"),
    "head dim 20": replace(SMALL, head_dim=20, heads=3, kv_heads=3, groups=(1, 3)),
    "nothing kept": replace(BASE, density=0.0),
    "everything kept": replace(BASE, density=1.0, empty_rows=False),
}


def run(problem: Problem) -> list[torch.Tensor]:
    tensors = (problem.q, problem.k, problem.v)
    out, lse = BACKEND.forward_blocks(*tensors, problem.lists, problem.options)
    assert out.shape == problem.q.shape and out.dtype is problem.q.dtype and lse.dtype is torch.float32
    results = [out, lse]
    if problem.case.heads == problem.case.kv_heads:
        # the engine's word for a row without keys
        given = lse.masked_fill(lse == -torch.inf, torch.inf)
        results += BACKEND.backward_blocks(problem.dout, *tensors, out, given, problem.lists, problem.options)
    return results


def check(problem: Problem, truth: list[torch.Tensor] | None = None) -> None:
    truth = truth or expected(problem, lse_grad=False)
    for what, got, want in zip(("out", "lse", "dq", "dk", "dv"), run(problem), truth, strict=False):
        torch.testing.assert_close(got.double(), want, atol=2e-5, rtol=2e-5, msg=lambda m, what=what: f"{what}: {m}")


@pytest.mark.parametrize("name", CASES)
def test_both_passes_reach_the_kernels_as_meant(name: str) -> None:
    problem = make(CASES[name])
    check(problem)
    assert calls == ([] if name == "nothing kept" else ["forward", "backward"])


@pytest.mark.parametrize("groups", [(1, 1), (1, 6), (2, 6)])
@pytest.mark.parametrize("launches", [1, 2])
def test_groups_of_query_heads_forward(groups: tuple[int, int], launches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if launches == 2:
        monkeypatch.setattr(block_tables, "TABLE_BYTES", 1)
    check(make(replace(SMALL, batch=2, heads=6, kv_heads=2, groups=groups)))
    assert calls == ["forward"] * launches


@pytest.mark.parametrize("groups", [(1, 1), (1, 4), (2, 1), (2, 4)])
@pytest.mark.parametrize("heads_per_launch", [1, 3])
def test_heads_are_cut_where_tables_are_large(groups: tuple[int, int], heads_per_launch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = replace(SMALL, batch=2, heads=4, kv_heads=4, groups=groups, density=1.0)
    monkeypatch.setattr(block_tables, "TABLE_BYTES", heads_per_launch * 2 * 4 * 5 * 4)
    problem = make(case)
    check(problem)
    assert calls == ["forward"] * (4 if heads_per_launch == 1 else 2) + ["backward"] * (4 if heads_per_launch == 1 else 2)
    before = list(problem.lists.cache)
    check(problem)
    assert list(problem.lists.cache) == before


@pytest.mark.slow
def test_one_long_list_among_short_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward, the long list is a launch of its own; backward only where one table for all of them were too large."""
    blocks = torch.eye(64, dtype=torch.bool)
    blocks[2] = blocks[:, 5] = True
    mask = blocks.repeat_interleave(64, 0).repeat_interleave(64, 1)[None, None, :4050, :4060]
    problem = make(replace(SMALL, num_queries=4050, num_keys=4060, heads=1, kv_heads=1, density=0.0))
    problem = replace(problem, mask=mask, lists=lists_from_dense(mask, 64, 64))
    truth = expected(problem, lse_grad=False)
    check(problem, truth)
    assert calls == ["forward"] * 3 + ["backward"]
    calls.clear()
    monkeypatch.setattr(block_tables, "TABLE_BYTES", 64 * 64 * 4 - 1)
    problem.lists.cache.clear()
    check(problem, truth)
    assert calls == ["forward"] * 3 + ["backward"] * 3


@pytest.mark.parametrize("name", ["plain", "ragged blocks of 64"])
def test_parts_with_the_whole_softmax_add_up_and_rows_of_plus_inf_give_nothing(name: str) -> None:
    problem = make(replace(CASES[name], empty_rows=False, density=0.8))
    case, tensors = problem.case, (problem.q, problem.k, problem.v)
    first = torch.zeros(case.num_keys, dtype=torch.bool)
    first[: 2 * case.k_block] = True
    out, lse = BACKEND.forward_blocks(*tensors, problem.lists, problem.options)
    lse[:, :, 5:70] = torch.inf
    shares = [
        BACKEND.backward_blocks(problem.dout, *tensors, out, lse, lists_from_dense(problem.mask & half, case.q_block, case.k_block),
        problem.options)
        for half in (first, ~first)
    ]  # fmt: skip
    dout = problem.dout.clone()
    dout[:, 5:70] = 0
    for got, want in zip(map(torch.add, *shares), expected(replace(problem, dout=dout), lse_grad=False)[2:], strict=True):
        torch.testing.assert_close(got.double(), want, atol=2e-5, rtol=2e-5)
    assert (shares[0][0][:, 5:70] == 0).all()


def test_leaves_that_need_gradients_are_taken() -> None:
    problem = make(BASE)
    check(replace(problem, q=problem.q.requires_grad_(), k=problem.k.requires_grad_(), v=problem.v.requires_grad_()))


def test_gradients_that_are_views_of_one_number_are_copied() -> None:
    problem = make(BASE)
    check(replace(problem, dout=torch.ones(()).expand(problem.q.shape)))


REQUEST = AttentionRequest(
    hardware=EXAMPLES["hopper"], dtype=torch.bfloat16, head_dim=128, num_heads=4, num_kv_heads=4, needs_grad=True, blocks=(128, 128)
)


@pytest.mark.parametrize(
    ("changes", "chosen"),
    [
        ({}, "flash4"),
        ({"blocks": (64, 64)}, "cudnn_fe"),
        ({"blocks": (64, 64), "lse_grad": True}, "cudnn_fe"),
        ({"blocks": (64, 128)}, "flash4"),
        ({"dtype": torch.float16}, "flash4"),
        ({"head_dim": 64}, "flash4"),
        ({"num_kv_heads": 2}, "flash4"),
        ({"block_masks": "interval"}, "flash4"),
        ({"block_masks": "bits"}, "triton"),
        ({"deterministic": True}, "triton"),
        ({"key_mask": True}, "triton"),
        ({"needs_grad": False}, "gluon"),
        ({"needs_grad": False, "blocks": (64, 64)}, "flash4"),
        ({"needs_grad": False, "blocks": (64, 64), "num_kv_heads": 2, "dtype": torch.float16, "head_dim": 96}, "flash4"),
        ({"needs_grad": False, "blocks": (64, 64), "head_dim": 32}, "flash4"),
        ({"needs_grad": False, "head_dim": 96, "deterministic": True}, "flash4"),
        ({"needs_grad": False, "beside_exchange": True}, "flash4"),
    ],
)
def test_which_requests_go_to_it_on_hopper(changes: dict[str, object], chosen: str) -> None:
    assert registry.select(replace(REQUEST, **changes)).name == chosen  # type: ignore[arg-type]


def test_reasons_are_words() -> None:
    reasons = "; ".join(BACKEND.reasons_against(replace(REQUEST, dtype=torch.float16, head_dim=64, num_kv_heads=2, deterministic=True)))
    for reason in (
        "bfloat16 only, not float16",
        "head_dim 128 only, not 64",
        "as many key heads as query heads, not 4/2",
        "not deterministic",
    ):
        assert reason in reasons, reason
    bare = replace(EXAMPLES["hopper"], packages=frozenset())
    assert "pip install 'nvidia-cudnn-frontend>=1.32'" in BACKEND.reasons_against(replace(REQUEST, hardware=bare))[0]
    for name in ("ampere", "blackwell"):
        assert "compute capability 9.0 to 9.0" in BACKEND.reasons_against(replace(REQUEST, hardware=EXAMPLES[name]))[0]
    assert "computes lists of blocks only" in BACKEND.reasons_against(replace(REQUEST, blocks=None))


VERSIONS = ("1.31.9", "1.32.0", "2.0", "unknown", None)


@pytest.mark.parametrize(("version", "folder", "cutlass"), list(itertools.product(VERSIONS, (True, False), (True, False))))
def test_the_package_is_found_without_importing_it(
    version: str | None, folder: bool, cutlass: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = tmp_path / "cudnn" / ("block_sparse_attention" if folder else "other")
    part.mkdir(parents=True)
    (part / "__init__.py").write_text("raise AssertionError('imported')")
    (tmp_path / "cudnn" / "__init__.py").write_text("raise AssertionError('imported')")
    find: Callable[..., object] = importlib.util.find_spec

    def find_spec(name: str, *rest: str) -> object:
        if name == "cudnn":
            return importlib.machinery.PathFinder.find_spec(name, [str(tmp_path)])
        if name == "cutlass":
            return types.SimpleNamespace() if cutlass else None
        return find(name, *rest)

    def version_of(name: str) -> str:
        if name != "nvidia-cudnn-frontend" or version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    monkeypatch.setattr(importlib.metadata, "version", version_of)
    assert ("nvidia-cudnn-frontend" in hardware._packages()) == (version in ("1.32.0", "2.0") and folder and cutlass)
