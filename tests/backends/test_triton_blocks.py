"""The Triton kernels for lists of blocks against a dense float64 softmax: interpreted on a CPU, compiled on a GPU."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
from dilated_attention.backends import AttentionRequest, Hardware, Options, registry
from dilated_attention.backends.block_kernels import triton as under_test
from dilated_attention.backends.block_kernels.triton import Tile, Tuning
from dilated_attention.pattern.blocks.block_lists import BlockLists
from dilated_attention.testing import low_precision_bound, max_error, relative_bound
from tests.helpers.block_cases import BlockCase, Problem, dense, expected, lists_from_dense, make, masked_softmax

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAMES = ("out", "lse", "dq", "dk", "dv")
BACKEND = registry.get("triton")
FIRST = BlockCase(num_queries=100, num_keys=150, masks="bits", density=0.7, dtype=torch.float32)
# lists of their own for every head, two heads to a key head
GROUPED = replace(FIRST, batch=2, heads=4, num_keys=100, groups=(1, 4))
# each differs from the first in what its name says
CASES = {
    "first": FIRST,
    "whole blocks": replace(FIRST, masks="none"),
    "intervals": replace(FIRST, masks="interval"),
    "even": replace(FIRST, num_queries=64, num_keys=128),
    "even whole blocks": replace(FIRST, num_queries=64, num_keys=128, masks="none"),
    "more queries": replace(FIRST, num_queries=200, num_keys=50),
    "128 by 64": replace(FIRST, q_block=128),
    "64 by 128": replace(FIRST, k_block=128),
    "128 by 128": replace(FIRST, num_queries=257, num_keys=131, q_block=128, k_block=128, heads=1, kv_heads=1),
    "head dim 40": replace(FIRST, head_dim=40),
    "head dim 64": replace(FIRST, head_dim=64),
    "head dim 1": replace(FIRST, head_dim=1),
    "grouped heads": replace(FIRST, heads=4),
    "one key head": replace(FIRST, heads=3, kv_heads=1, num_queries=70),
    "lists of batch entries": replace(FIRST, batch=2, num_queries=70, groups=(2, 1)),
    "lists of heads": replace(FIRST, heads=3, kv_heads=3, num_queries=70, groups=(1, 3)),
    "lists of grouped heads": GROUPED,
    "lists of batch entries and grouped heads": replace(GROUPED, num_queries=70, num_keys=70, groups=(2, 4)),
    "padding": replace(FIRST, batch=2, padding="some"),
    "padding of whole blocks": replace(FIRST, padding="shared", masks="none"),
    "padding of everything": replace(FIRST, padding="all"),
    "nothing kept": replace(FIRST, density=0.0),
    "one query": replace(FIRST, num_queries=1),
    "one key": replace(FIRST, num_keys=1),
    "heads first": replace(FIRST, batch=2, heads=1, kv_heads=1, layout="heads_first"),
    "packed": replace(FIRST, batch=2, num_queries=70, layout="packed"),
}


def run(problem: Problem, *, tile: tuple[int, int] | None = None, dlse: bool = False) -> list[torch.Tensor]:
    tuning = None if tile is None else Tuning(**{name: Tile(*tile, 4, 2) for name in ("forward", "dq", "dkdv")})
    q, k, v, lists, options = problem.q, problem.k, problem.v, problem.lists, problem.options
    backend = under_test.TritonBlocksBackend()
    out, lse = backend.forward(q, k, v, options, lists, tuning=tuning)
    assert out.dtype == q.dtype and lse.dtype == torch.float32
    return [
        out,
        lse,
        *backend.backward(problem.dout, q, k, v, out, lse, options, lists, dlse=problem.dlse if dlse else None, tuning=tuning),
    ]


def check(found: list[torch.Tensor], truth: list[torch.Tensor], plain: list[torch.Tensor] | None = None) -> None:
    """``plain``: what torch makes of it in half precision; None for float32."""
    for i, name in enumerate(NAMES[-len(found) :]):
        bound = relative_bound(truth[i], 1e-5)
        if plain is not None:
            bound = low_precision_bound(plain[i], truth[i], found[0].dtype)
        error = max_error(found[i], truth[i])
        assert error <= bound, f"{name}: {error:.3g} > {bound:.3g}"


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_kernels_are_the_definition(case: BlockCase) -> None:
    problem = make(case, DEVICE)
    check(run(problem), expected(problem, lse_grad=False))


@pytest.mark.slow
@pytest.mark.parametrize("masks", ["bits", "interval", "none"])
def test_tiles_smaller_than_blocks(masks: str) -> None:
    case = replace(FIRST, num_queries=150, q_block=128, k_block=128, heads=1, kv_heads=1, masks=masks)
    problem = make(case, DEVICE)
    truth = expected(problem, lse_grad=False)
    for tile in ((64, 32), (32, 64)):
        check(run(problem, tile=tile), truth)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["first", "head dim 64", "lists of grouped heads"])
def test_half_precision_errs_as_plain_torch_does(name: str, dtype: torch.dtype) -> None:
    if dtype is torch.bfloat16 and DEVICE == "cpu":
        pytest.skip("Triton's interpreter multiplies the bits of bfloat16 as if they were integers")
    problem = make(replace(CASES[name], dtype=dtype), DEVICE)
    leaves = [x.detach().clone().requires_grad_() for x in (problem.q, problem.k, problem.v)]
    out, lse = dense(problem, *leaves)
    plain = [out, lse, *torch.autograd.grad((out * problem.dout).sum(), leaves)]
    check(run(problem), expected(problem, lse_grad=False), plain)


@pytest.mark.parametrize("name", ["first", "lists of grouped heads", "whole blocks"])
def test_gradient_of_lse(name: str) -> None:
    problem = make(CASES[name], DEVICE)
    check(run(problem, dlse=True), expected(problem))


@pytest.mark.parametrize("scale", [-0.4, 0.0])
def test_scales_that_are_not_positive(scale: float) -> None:
    problem = make(FIRST, DEVICE)
    options, lists = Options(scale), problem.lists
    leaves = [x.double().requires_grad_() for x in (problem.q, problem.k, problem.v)]
    out, lse = masked_softmax(*leaves, problem.mask, scale)
    truth = [out, lse, *torch.autograd.grad((out * problem.dout).sum(), leaves)]
    out, lse = BACKEND.forward(problem.q, problem.k, problem.v, options, lists)
    check([out, lse, *BACKEND.backward(problem.dout, problem.q, problem.k, problem.v, out, lse, options, lists)], truth)


def test_strides_of_64_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the kernels do where 128 positions span 2^31 elements, on tensors that fit in memory."""
    monkeypatch.setattr(under_test, "_wide", lambda strides, align: True)
    problem = make(replace(FIRST, heads=1, kv_heads=1), DEVICE)
    check(run(problem), expected(problem, lse_grad=False))


@pytest.mark.slow
def test_shares_of_parts_with_the_merged_results_add_up() -> None:
    """Two halves of a mask, each with the out and lse of the whole; rows that one half or both leave out; strided everything."""
    problem = make(replace(FIRST, batch=2, kv_heads=1, num_queries=70, groups=(1, 2), layout="every_third"), DEVICE)
    q, k, v, kept = problem.q, problem.k, problem.v, problem.mask
    first = kept & (torch.rand(kept.shape, generator=torch.Generator().manual_seed(0)).to(DEVICE) < 0.5)
    first[:, :, 5] = False
    first[:, :, 7] = kept[:, :, 7]
    halves = [lists_from_dense(half, 64, 128) for half in (first, kept & ~first)]
    parts = [BACKEND.forward(q, k, v, problem.options, lists) for lists in halves]
    lse = torch.logaddexp(parts[0][1], parts[1][1])
    weights = [(part_lse - lse).exp().nan_to_num(0.0).transpose(1, 2)[..., None] for _, part_lse in parts]
    out = sum(part * weight for (part, _), weight in zip(parts, weights, strict=True))
    found = [out, lse]
    # what the engine hands a backward for rows without keys, and results that lie apart
    lse = lse.masked_fill(lse == -torch.inf, torch.inf).transpose(1, 2).contiguous().transpose(1, 2)
    out = torch.stack([out, out + 1], 2).flatten(1, 2)[:, ::2]
    shares = [BACKEND.backward(problem.dout, q, k, v, out, lse, problem.options, lists, dlse=problem.dlse) for lists in halves]
    check([*found, *(a + b for a, b in zip(*shares, strict=True))], expected(problem))


def test_gradient_of_a_sum() -> None:
    """dout is one number expanded, out a view of channels that lie apart."""
    problem = make(replace(FIRST, num_keys=70, num_queries=70), DEVICE)
    problem = replace(problem, dout=torch.ones((), device=DEVICE).expand(problem.q.shape))
    tensors = (problem.q, problem.k, problem.v)
    out, lse = BACKEND.forward(*tensors, problem.options, problem.lists)
    apart = torch.stack([out, out], -1)[..., 0]
    grads = BACKEND.backward(problem.dout, *tensors, apart, lse, problem.options, problem.lists)
    check([out, lse, *grads], expected(problem, lse_grad=False))


def test_rows_that_take_no_part_are_never_nan() -> None:
    """Some row's lse is +inf or −inf though it has keys here: its weights are 0, whatever its dlse."""
    problem = make(replace(FIRST, num_queries=70, num_keys=70, masks="none", density=1.0, empty_rows=False), DEVICE)
    tensors = (problem.q, problem.k, problem.v)
    out, lse = BACKEND.forward(*tensors, problem.options, problem.lists)
    lse[:, :, 3], lse[:, :, 65] = torch.inf, -torch.inf
    dlse = problem.dlse.clone()
    dlse[:, :, [3, 65]] = torch.nan
    grads = BACKEND.backward(problem.dout, *tensors, out, lse, problem.options, problem.lists, dlse=dlse)
    assert (grads[0][:, [3, 65]] == 0).all()
    problem.mask[:, :, [3, 65]] = False
    check(list(grads), expected(problem)[2:])


def test_a_mask_of_every_pair_is_no_mask() -> None:
    problem = make(replace(FIRST, masks="none"), DEVICE)
    plain = problem.lists
    masks, bits = torch.zeros_like(plain.columns), torch.full((1, 64, 2), -1, dtype=torch.int32, device=DEVICE)
    masked = replace(problem, lists=replace(plain, masks=masks, bits=bits))
    for a, b in zip(run(problem), run(masked), strict=True):
        assert torch.equal(a, b)


def counted(counts: list[list[int]], heads: int = 1) -> BlockLists:
    """Whole blocks: row i of group g keeps its first counts[g][i] columns."""
    columns = max(map(max, counts))
    kept = torch.tensor([[[column < count for column in range(columns)] for count in row] for row in counts])
    kept = kept.repeat_interleave(64, 1).repeat_interleave(64, 2)
    return lists_from_dense(kept.unflatten(0, (-1, heads)), 64, 64)


def test_long_lists_are_started_first_and_equal_ones_stay_in_order() -> None:
    order = under_test.row_order(lists := counted([[1, 1, 2, 1, 12, 0, 1, 30]]))
    assert order.places.tolist() == [[7, 4, 2, 0, 1, 3, 5, 6]] and order.heavy == 2
    assert under_test.row_order(lists) is order
    # nearly equal ones lie together, as do the keys that they share
    assert under_test.row_order(counted([[20, 21, 20, 21, 20, 9]])).places.tolist() == [[0, 1, 2, 3, 4, 5]]
    # a group without a long list goes on with its next ones
    order = under_test.row_order(counted([[2, 2, 2, 30, 2, 2], [2, 2, 2, 2, 2, 3]], heads=2))
    assert order.places.tolist() == [[3, 0, 1, 2, 4, 5], [5, 0, 1, 2, 3, 4]] and order.heavy == 1
    # a key head's program takes the columns of all its query heads
    lists = counted([[2, 0], [1, 0], [0, 1], [0, 1]], heads=4)
    assert under_test.column_order(lists, 2).places.tolist() == [[0, 1], [0, 1]]
    assert under_test.column_order(lists, 1).places.shape == (4, 2)
    assert under_test.row_order(counted([[0, 1]])).places.tolist() == [[1, 0]]


def test_long_lists_of_some_heads() -> None:
    """Every block finds its program, in whatever order they start: a row and a column of one head keep everything."""
    problem = make(replace(FIRST, num_queries=260, num_keys=300, density=0.0, groups=(1, 2), heads=2), DEVICE)
    blocks = torch.zeros(1, 2, 5, 5, dtype=torch.bool, device=DEVICE)
    blocks[:, :, torch.arange(5), torch.arange(5)] = True
    blocks[:, 1, 3] = blocks[:, 1, :, 2] = True
    mask = blocks.repeat_interleave(64, 2).repeat_interleave(64, 3)[:, :, :260, :300]
    lists = lists_from_dense(mask, 64, 64)
    assert under_test.row_order(lists).heavy == under_test.column_order(lists, 1).heavy == 1
    problem = replace(problem, mask=mask, lists=lists)
    check(run(problem), expected(problem, lse_grad=False))


def test_what_it_says_of_itself() -> None:
    hopper = Hardware(device_type="cuda", capability=(9, 0), torch_version=(2, 13), packages=frozenset({"triton"}))
    request = AttentionRequest(hardware=hopper, dtype=torch.bfloat16, head_dim=72, blocks=(64, 128), block_masks="bits", key_mask=True)
    assert BACKEND.reasons_against(request) == []
    assert BACKEND.reasons_against(replace(request, needs_grad=True, lse_grad=True, deterministic=True, block_masks="interval")) == []
    for change, words in (
        ({"blocks": None}, "lists of blocks only"),
        ({"blocks": (32, 64)}, "64x64"),
        ({"window": True}, "window"),
        ({"dropout": True}, "dropout"),
        ({"dtype": torch.float64}, "float64"),
        ({"head_dim": 264}, "256"),
        ({"hardware": replace(hopper, packages=frozenset())}, "triton is not installed"),
        ({"hardware": replace(hopper, capability=(7, 5)), "dtype": torch.float16}, "8.0"),
        ({"hardware": replace(hopper, capability=(8, 9)), "dtype": torch.float32, "head_dim": 256}, "shared memory"),
    ):
        reasons = BACKEND.reasons_against(replace(request, **change))
        assert len(reasons) == 1 and words in reasons[0], (change, reasons)


def test_tiles_fit_blocks_and_the_kernels() -> None:
    for dtype, head_dim, capability in itertools.product(
        (torch.float16, torch.float32), (8, 64, 96, 256), ((8, 0), (8, 6), (9, 0), (10, 0), (12, 0), None)
    ):
        if dtype is torch.float32 and head_dim == 256 and capability in ((8, 6), (12, 0)):
            continue
        tuning = under_test.default_tuning(dtype, head_dim, capability)
        for tile in (tuning.forward, tuning.dq, tuning.dkdv):
            assert 64 % min(tile.rows, 64) == 128 % tile.rows == 64 % min(tile.keys, 64) == 128 % tile.keys == 0
            assert tile.rows >= 16 and tile.keys >= 32


COMPILED = """
import sys
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from dilated_attention.backends.block_kernels import triton_kernels as kernels
from dilated_attention.backends.block_kernels.triton import default_tuning

halves = {"q_ptr", "k_ptr", "v_ptr", "out_ptr", "dout_ptr", "dq_ptr", "dk_ptr", "dv_ptr"}
for capability, memory, names in (((8, 0), 163, ["dkdv"]), ((9, 0), 227, ["forward", "dq", "dkdv"])):
    tuning = default_tuning(torch.bfloat16, 64, capability)
    for name in names:
        tile = getattr(tuning, name)
        kernel = getattr(kernels, f"{name}_kernel")
        constants = {"WALK": (128, 128, tile.rows, tile.keys), "GROUP": 1, "D": 64, "BLOCK_D": 64, "MASKS": 2, "NEGATIVE": False}
        constants |= {"PADDED": False, "EVEN": True, "ALIGN": 16, "WIDE": False}
        signature, values, aligned = {}, {}, {}
        for i, parameter in enumerate(kernel.params):
            pointer = parameter.name.endswith("_ptr")
            if parameter.is_constexpr:
                signature[parameter.name], values[(i,)] = "constexpr", constants[parameter.name]
            elif pointer:
                wide = parameter.name in ("lse_ptr", "offset_ptr", "delta_ptr")
                kind = "*bf16" if parameter.name in halves else "*fp32" if wide else "*i32"
                signature[parameter.name], aligned[(i,)] = kind, [["tt.divisibility", 16]]
            else:
                signature[parameter.name] = "fp32" if parameter.name == "scale" else "i32"
        source = ASTSource(kernel, signature, values, aligned)
        target = GPUTarget("cuda", capability[0] * 10 + capability[1], 32)
        made = triton.compile(source, target=target, options={"num_warps": tile.warps, "num_stages": tile.stages})
        assert made.metadata.shared <= memory * 1024, (name, capability, made.metadata.shared)
        # both streamed tensors are loaded ahead, 16 bytes at a time
        copies = [line for line in made.asm["ptx"].splitlines() if "cp.async.cg.shared.global" in line and "0x10" in line]
        assert len(copies) >= 4, (name, capability, copies)
"""


def test_compiled_loads_run_ahead(tmp_path: Path) -> None:
    """What the interpreter cannot show: a stride whose alignment the compiler does not know would halve the rate unseen."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", COMPILED], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
