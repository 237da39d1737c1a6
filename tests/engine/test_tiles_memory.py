"""The account of calls on a table of tiles: against the formulas, against what the launches allocate, and where plans ask for it."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from dilated_attention.engine.branches import run_problems
from dilated_attention.engine.branches import run_tiles as tiles
from dilated_attention.engine.branches.launches import PART_BYTES, Masks
from dilated_attention.engine.memory import attention_memory
from dilated_attention.engine.ops.prepare import make_plan
from dilated_attention.factory import EXAMPLES, explain_backend
from dilated_attention.pattern import DilatedPattern
from dilated_attention.planning.gpus import find_gpu, machine_of
from dilated_attention.planning.memory import memory_of
from dilated_attention.planning.problem import make_problem
from tests.helpers.op_settings import settings

N, H, D = 4096, 8, 64
PATTERN = DilatedPattern((1024, 4096), (1, 4))


def terms_of(side: Sequence[tuple[str, int]]) -> int:
    return dict(side)["scratch of the tiles"]


def account(**options: Any) -> tuple[int, int]:
    options = {"dtype": torch.bfloat16, "hardware": EXAMPLES["hopper"], "backend": "tiles", "batch_size": 2} | options
    found = attention_memory(PATTERN, N, H, D, **options)
    return terms_of(found.forward), terms_of(found.backward)


def test_heads_run_in_turn_where_what_waits_exceeds_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = account()
    monkeypatch.setattr("dilated_attention.engine.branches.places.TRANSIENT_BYTES", 2**20)
    cut = account()
    # 5 % of q, k, v are more than 1 MiB: the eight heads of one of the two sequences forward, two of them backward
    budget = int(0.05 * 3 * 2 * N * H * D * 2)
    assert cut[0] <= budget < whole[0] and cut == (whole[0] // 2, whole[1] * 2 // 16)


@pytest.mark.parametrize("detached", [False, True])
@pytest.mark.parametrize("budget", [2**29, 2**19])
@pytest.mark.parametrize("kv_heads", [8, 2])
def test_the_launches_allocate_what_is_counted(kv_heads: int, budget: int, detached: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from dilated_attention.backends.tiles import launch, run

    monkeypatch.setattr("dilated_attention.engine.branches.places.TRANSIENT_BYTES", budget)
    monkeypatch.setattr(launch.KernelLaunch, "__call__", lambda *_: None)
    taken: list[int] = []

    def recorded(*arguments: Any) -> list[launch.Scratch]:
        parts = launch.workspace(*arguments)
        taken.append(parts[0].memory.numel())
        return parts

    monkeypatch.setattr(run, "workspace", recorded)
    q, k, v = (torch.zeros(2, N, heads, D, dtype=torch.bfloat16) for heads in (H, kv_heads, kv_heads))
    branches = (PATTERN.segment_lengths, PATTERN.dilation_rates, "cyclic", "all", "mask")
    call = settings(branches=branches, is_causal=True, detached=detached, needs_grad=True, backend="math")
    plan = make_plan(call, (q, k, v), False, runner=tiles)
    out, lse = tiles.forward(plan, q, k, v, Masks(), None)
    assert [("scratch of the tiles", max(taken))] == tiles.terms(plan)
    taken.clear()
    plan = make_plan(call, (q, k, v, q, out), True, runner=tiles)
    shares, parts = tiles.shares_of(plan, q.device), tiles.ranges_of(plan)
    assert [(share.batch, share.heads) for share in shares] == list(parts) and (len(parts) > 1) == (budget < 2**29)
    tiles.backward(plan, (out, q, k, v, out, lse), Masks(), None, None)
    own = max(x.prepared.extent.own_outputs() for x in shares) * 2 if detached else 0
    assert [("scratch of the tiles", own + max(taken))] == tiles.terms(plan)


def test_what_problems_take_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, a launch for each segment of 32 rows: few of its results wait beside what is summed in float32 and rounded at last."""
    monkeypatch.setitem(PART_BYTES, "cpu", 1)
    q, k = torch.zeros(1, 256, 4, 16, dtype=torch.bfloat16), torch.zeros(1, 256, 2, 16, dtype=torch.bfloat16)
    branches = ((32, 64), (1, 2), "zero", "all", "mask")
    forward, backward = (
        make_plan(settings(branches=branches, backend="math"), tensors, is_backward, runner=run_problems)
        for tensors, is_backward in (((q, k, k), False), ((q, k, k, q, q), True))
    )
    q_size, k_size, rows = 256 * 4 * 16, 256 * 2 * 16, 32 * 4
    # out and lse of the launch; in the backward dq, and dk and dv of its 32 keys of two heads
    out, grads = rows * (16 * 2 + 4), 2 * (rows * 16 + 2 * 32 * 2 * 16)
    assert dict(run_problems.terms(forward)) == {"out in float32": q_size * 2, "launch results, rounded out": q_size * 2 + out}
    assert dict(run_problems.terms(backward)) == {
        "lse of the launches": 2 * 256 * 4 * 4,
        "dq, dk, dv in float32": (q_size + 2 * k_size) * 2,
        "launch results, rounded dq, dk, dv": (q_size + 2 * k_size) * 2 + grads,
    }


def test_plans_ask_what_a_call_asks() -> None:
    def planned(n: int, **options: Any) -> Any:
        shape = {"num_positions": n, "num_heads": 16, "head_dim": 64, "gpu": find_gpu("H200"), "is_causal": True}
        return make_problem("dilated", segment_lengths=[2048, 8192], dilation_rates=[1, 4], **shape, **options)

    def on_tiles(problem: Any) -> tuple[bool, bool]:
        found = memory_of(problem)
        return "scratch of the tiles" in dict(found.forward), "scratch of the tiles" in dict(found.backward)

    short, long = planned(8192), planned(2**20)
    assert on_tiles(short) == (True, True) and on_tiles(long) == (False, False)
    assert on_tiles(planned(8192, training=False)) == (True, False)
    assert on_tiles(dataclasses.replace(short, dtype=torch.float64)) == (False, False)
    cpu = machine_of("cpu")
    assert on_tiles(dataclasses.replace(short, machine=cpu, hardware=EXAMPLES["cpu"])) == (False, False)


def test_explain_backend_names_the_rule_and_the_estimates() -> None:
    options: dict[str, Any] = {"hardware": EXAMPLES["hopper"], "num_heads": 8}
    short = explain_backend(**options, pattern=PATTERN, num_positions=N)
    assert "on flash4: tiles · backward" in short.tiles and f"tiles: {short.tiles}" in str(short)
    # a short call runs whole on tiles, whatever a library's rate is
    assert short.forward == short.backward == "tiles" and "estimated time" in short.forward_basis
    assert "forward: tiles · backward: tiles" in str(short)
    long = explain_backend(**options, pattern=PATTERN, num_positions=2**20)
    assert (
        long.backward != "tiles" and long.tiles.endswith(f"on {long.backward}: {long.backward}") and long.as_dict()["tiles"] == long.tiles
    )
    assert "pattern=" in explain_backend(**options).tiles
    assert explain_backend(**options, backend="flash4").tiles == explain_backend(device="cpu").tiles == ""
    with pytest.raises(ValueError, match="give both"):
        explain_backend(**options, num_positions=N)


@pytest.mark.parametrize(("kv_heads", "sums"), [(16, 4 * 2**16 * 16 * 130), (4, 4 * 2**16 * 16 * 130 + 2 * 2**16 * 128 * 16 * 2)])
def test_one_launch_of_a_library_sums_in_float32(kv_heads: int, sums: int) -> None:
    # 65,536 positions, 16 heads of 128, torch's flash kernels: with 4 key heads an H200 took 2,424,308,736 bytes, of which 1,346,371,584
    # are inputs, results and lse
    machine = dataclasses.replace(EXAMPLES["hopper"], packages=frozenset())
    found = attention_memory(
        DilatedPattern((2**16,), (1,)), 2**16, 16, 128, num_kv_heads=kv_heads, dtype=torch.bfloat16, hardware=machine, backend="sdpa_flash"
    )
    assert dict(found.backward)["sums of kernels in float32"] == sums
    assert kv_heads == 16 or found.peak == pytest.approx(2_424_308_736, rel=0.02)


def test_branches_take_what_their_formulas_say() -> None:
    rows = 2 * N * H
    options: dict[str, Any] = {"dtype": torch.bfloat16, "hardware": EXAMPLES["hopper"], "backend": "sdpa_flash", "batch_size": 2}
    found = attention_memory(PATTERN, N, H, D, **options)
    masked = attention_memory(PATTERN, N, H, D, key_padding_mask=True, **options)
    assert dict(masked.forward)["q, k, v"] - dict(found.forward)["q, k, v"] == 2 * N
    # a quarter of the positions, of the branch that is not the direct one
    assert dict(found.forward)["parts"] == rows // 4 * (2 * D + 4)
    assert dict(found.backward)["parts"] == 3 * rows // 4 * 2 * D and dict(found.backward)["lse of the chunks"] == 4 * rows
    # problem by problem, the results of a launch and of the one before: 32 MiB of float32 each, with lse
    alone = attention_memory(DilatedPattern((2**16,), (1,)), 2**20, 1, 64, needs_grad=False)
    assert dict(alone.forward)["launch results, rounded out"] == 2 * (2**25 + 4 * 2**17)
