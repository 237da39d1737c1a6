"""Attention of spread sequences over NCCL against one GPU: random calls drawn kernel by kernel, and chosen ones. Needs 2, 3 and 4 GPUs.

A kernel is compiled on the first call that needs it, by all ranks at once; each call after it takes milliseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dilated_attention import attention, dilated_attention, ring_attention, ring_dilated_attention
from dilated_attention.backends import AttentionRequest, detect, registry
from dilated_attention.testing import Result, inputs, largest, max_error, results
from dilated_attention.testing.check import truth_and_bounds
from tests.helpers import ring_cases, ring_chosen
from tests.helpers.machine import DEVICE, ON_CPU, pool, share, worlds
from tests.helpers.pool import here, patience
from tests.helpers.ring_cases import WHOLE, Kernel, Spread, draw, positions, together, with_changes
from tests.helpers.ring_chosen import spread_of

pytestmark = [pytest.mark.gpus, pytest.mark.timeout(600)]

# heads for each key/value head, also where ranks share them out
ALONE = ((4, 4), (6, 6), (12, 12))
GROUPED = ((16, 4), (12, 3))
# what flash kernels have not; and windows, whose every form would be compiled
REST = (("padding", "auto"), ("dropout", "auto"))
WINDOWS = (*REST, ("window", "sdpa_flash"))


@dataclass(frozen=True)
class Sweep:
    kernel: Kernel
    # random calls in each world
    calls: int


def sweep(
    calls: int, dtype: torch.dtype, head_dim: int, backend: str, instead: tuple[tuple[str, str], ...] = REST, **options: Any
) -> Sweep:
    return Sweep(Kernel(dtype=dtype, head_dim=head_dim, backend=backend, instead=instead, shapes=4, **options), calls)


SWEEPS = {
    "float64": Sweep(Kernel(), 30),
    "flash4, 64": sweep(12, torch.bfloat16, 64, "flash4", WINDOWS, heads=ALONE, stretch=4),
    "flash4, 128 of 4": sweep(12, torch.bfloat16, 128, "flash4", WINDOWS, heads=GROUPED, stretch=3),
    "sdpa_flash, 48": sweep(12, torch.bfloat16, 48, "sdpa_flash", stretch=4),
    "sdpa_flash, 128, float16": sweep(10, torch.float16, 128, "sdpa_flash", stretch=3),
    # which plans every shape anew
    "sdpa_cudnn, 64": sweep(6, torch.bfloat16, 64, "sdpa_cudnn", WINDOWS, heads=(*ALONE, (8, 4), (12, 6))),
    "sdpa_efficient, 64, float32": sweep(12, torch.float32, 64, "sdpa_efficient", (("dropout", "auto"),), stretch=3),
    "auto, 64": sweep(12, torch.bfloat16, 64, "auto", (), heads=ALONE, stretch=4),
}
BATCH = 15


def kernel_of(name: str) -> Kernel:
    """The sweep's kernel, if this machine has it."""
    kernel = SWEEPS[name].kernel
    if ON_CPU:
        return replace(kernel, backend="auto", instead=())
    if kernel.backend == "auto":
        return kernel
    request = AttentionRequest(hardware=detect("cuda"), dtype=kernel.dtype, head_dim=kernel.head_dim, needs_grad=True)
    if reasons := registry.get(kernel.backend).reasons_against(request):
        pytest.skip("; ".join(reasons))
    return kernel


def judge(spread: Spread, parts: Sequence[Result], dtype: torch.dtype) -> None:
    """Holds the ranks' results to the whole sequence's on one device."""
    case, found = spread.case, together(spread, parts)
    truth, bounds = truth_and_bounds(case, inputs(case, dtype, DEVICE))
    for name in found:
        bound = bounds[name]
        if name in ("dk", "dv"):
            # every rank's share is rounded once, before they are summed in float32
            bound += len(parts) / 2 * torch.finfo(dtype).eps * largest(truth[name])
        error = max_error(found[name].to(DEVICE), truth[name])
        assert error <= bound, f"E({name}) = {error:.3g} > {bound:.3g} in {dtype} on {len(parts)} ranks for\n{spread}"


def check(world: int, spreads: Sequence[Spread], dtype: torch.dtype = torch.float64) -> None:
    ranks = pool(world).run(ring_cases.run, list(spreads), dtype)
    for index, spread in enumerate(spreads):
        judge(spread, [rank[index][0] for rank in ranks], dtype)


@pytest.mark.parametrize("name", SWEEPS)
@pytest.mark.parametrize("world", worlds(2, 3, 4))
def test_random_calls(world: int, name: str) -> None:
    kernel, count = kernel_of(name), share(SWEEPS[name].calls)
    # other calls than those of the CPU's suite
    spreads = [draw(world, 10_000 + 100 * list(SWEEPS).index(name) + seed, kernel) for seed in range(count)]
    for first in range(0, count, BATCH):
        check(world, spreads[first : first + BATCH], kernel.dtype)


def test_random_calls_reach_everything() -> None:
    """At least 200 of them; every exchange, layout and option, and the kernel that a sweep is named after in most of its calls."""
    drawn = {
        name: [draw(world, 10_000 + 100 * index + seed, sweep.kernel) for world in (2, 3, 4) for seed in range(sweep.calls)]
        for index, (name, sweep) in enumerate(SWEEPS.items())
    }
    every = [spread for spreads in drawn.values() for spread in spreads]
    cases = [spread.case for spread in every]
    assert len(every) >= 200
    exchanges = ("all_gather", "ring", "all_to_all", "2d")
    assert {(spread.exchange, spread.layout) for spread in every} >= {(a, b) for a in exchanges for b in ring_cases.LAYOUTS}
    wanted = (
        sum(case.is_causal for case in cases),
        sum(case.window is not None for case in cases),
        sum(case.bounds is not None for case in cases),
        sum(case.padding != "none" for case in cases),
        sum(case.dropout_p > 0 for case in cases),
        sum(case.pattern.tail == "zero_keys" for case in cases),
        sum(case.mixture_grad == "detached" for case in cases),
        sum(case.lse_grad for case in cases),
        sum(case.heads != case.kv_heads for case in cases),
        sum(spread.steps for spread in every),
        sum(not spread.seq_len_given for spread in every),
        sum(spread.memory != "rows" for spread in every),
    )
    assert min(wanted) >= 8, wanted
    for name, spreads in drawn.items():
        backend = SWEEPS[name].kernel.backend
        assert sum(spread.backend == backend for spread in spreads) >= len(spreads) // 3, name


# --- chosen calls, in float64, where nothing but the exchange can be wrong, and once in bfloat16 ------------------------------------


@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
@pytest.mark.parametrize("world", worlds(2, 4))
def test_steps_of_heads(world: int, dropout_p: float) -> None:
    check(world, ring_chosen.steps_of_heads(dropout_p)[:: max(1, 100 // share(100))])


@pytest.mark.parametrize("world", worlds(2, 3, 4))
def test_segments_and_ranks(world: int) -> None:
    spreads = ring_chosen.segments_and_ranks(world)
    check(world, spreads)
    half = [with_changes(spread, head_dim=48, backend="auto" if ON_CPU else "sdpa_flash") for spread in spreads]
    check(world, half, torch.bfloat16)


@pytest.mark.parametrize("world", worlds(2, 3))
def test_ranks_without_rows(world: int) -> None:
    """Zeros and −inf, never NaN."""
    check(world, ring_chosen.ranks_without_rows(world))


@pytest.mark.parametrize("world", worlds(2, 4))
def test_deterministic_runs_repeat_bit_for_bit(world: int) -> None:
    spreads = [with_changes(spread, head_dim=64, heads=4, kv_heads=4) for spread in ring_chosen.repeated(world)]
    for rank in pool(world).run(ring_cases.run, spreads, torch.bfloat16, 3, True):
        for first, *others in rank:
            assert all(torch.equal(first[name], other[name]) for other in others for name in first)


# --- groups and tensors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("as_mesh", [False, True])
@pytest.mark.parametrize("world", worlds(4))
def test_groups_that_are_a_part_of_the_world(world: int, as_mesh: bool) -> None:
    """Ranks 1 and 3 of four as a group; columns of a mesh, each a sequence of its own."""
    spreads = ring_chosen.of_parts()
    ranks = pool(world).run(ring_cases.in_subgroup, [1, 3], spreads, as_mesh)
    for members in ([ranks[0], ranks[2]], [ranks[1], ranks[3]]):
        if not as_mesh and members[0] is ranks[0]:
            assert members == [None, None]
            continue
        for index, spread in enumerate(spreads):
            judge(spread, [parts[index] for parts in members], torch.float64)


@pytest.mark.parametrize("world", worlds(3))
def test_processes_may_have_different_numbers_of_groups(world: int) -> None:
    spread = spread_of(is_causal=True)
    judge(spread, pool(world).run(ring_cases.part_first, [0, 2], spread), torch.float64)


def cpu_and_gpu(rank: int, world: int, spreads: Sequence[Spread]) -> list[Result]:
    """The calls with tensors on the CPU and on the GPU in turn, in one group: results of both."""
    found = []
    for spread in spreads:
        rows = positions(spread.case.num_keys, rank, world, spread.layout)
        for device in ("cpu", here()):
            x = ring_cases.local_inputs(inputs(spread.case, torch.float64, device), rows.to(device), spread.memory)
            found.append({name: y.cpu() for name, y in results(ring_cases.ring_call(spread), spread.case, x).items()})
    return found


@pytest.mark.parametrize("world", worlds(2))
def test_a_group_of_gloo_and_nccl_carries_tensors_of_both(world: int) -> None:
    spreads = [spread_of(is_causal=True, layout="zigzag"), spread_of(is_causal=True, exchange="ring"), spread_of(layout="striped")]
    ranks = pool(world).run(cpu_and_gpu, spreads)
    for index, spread in enumerate([spread for spread in spreads for _ in range(2)]):
        judge(spread, [rank[index] for rank in ranks], torch.float64)


@pytest.mark.parametrize("world", worlds(2))
def test_autocast_and_a_loss_that_is_a_sum(world: int) -> None:
    """A sum's gradient is one number for all of out: a tensor of strides 0."""
    ranks = pool(world).run(ring_cases.sums_under_autocast)
    x = inputs(ring_cases.AUTOCAST, torch.float32, DEVICE)
    leaves = [y.detach().requires_grad_() for y in (x.q, x.k, x.v)]
    with torch.autocast(DEVICE.type, torch.bfloat16):
        out = dilated_attention(*leaves, [8, 24], [1, 2], is_causal=True, backend="sdpa")
    grads = torch.autograd.grad(out.float().sum(), leaves)
    for index, whole in enumerate((out, *grads)):
        found = torch.cat([rank[index] for rank in ranks], 1)
        assert found.dtype is whole.dtype
        torch.testing.assert_close(found, whole.cpu(), atol=0.02, rtol=0.02)


@pytest.mark.parametrize(
    ("exchange", "at", "window"), [("all_gather", 11, None), ("all_gather", 5, 3), ("ring", 15, None), ("all_to_all", 5, 3)]
)
@pytest.mark.parametrize("world", worlds(2))
def test_nan_reaches_all_queries_that_see_it_and_no_other_batch_entry(world: int, exchange: str, at: int, window: int | None) -> None:
    """On a GPU it may reach the rest of the tile, see docs/meaning.md."""
    found = pool(world).run(ring_cases.rows_with_nan, at, exchange, window)
    assert set(range(at, 16 if window is None else at + window + 1)) <= {row for rows in found for row in rows}
    assert pool(world).run(ring_cases.rows_with_nan, at, exchange, window, 1) == [[]] * world


@pytest.mark.parametrize(("exchange", "layout"), [("all_to_all", "contiguous"), ("all_gather", "striped"), ("all_gather", "zigzag")])
@pytest.mark.parametrize("world", worlds(2, 4))
def test_a_gradient_of_lse_on_one_rank_alone(world: int, exchange: str, layout: str) -> None:
    assert max(pool(world).run(ring_cases.lse_gradient_of_the_last, exchange, layout)) <= 1e-10


# --- CUDA graphs, streams, several groups -----------------------------------------------------------------------------------------


def step_of(function: Any, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """(out, dq, dk, dv) of one call; ``tensors`` are leaves q, k, v and dout."""
    *leaves, dout = tensors
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def shard(spread: Spread, rank: int, world: int) -> list[torch.Tensor]:
    x = inputs(spread.case, torch.bfloat16, here())
    mine = ring_cases.local_inputs(x, positions(spread.case.num_keys, rank, world, spread.layout).to(here()))
    return [*(y.detach().requires_grad_() for y in (mine.q, mine.k, mine.v)), mine.dout]


def plainly(spread: Spread, group: Any = None) -> Any:
    """The call without lse and without anything of the CPU's in it, which a graph can hold."""
    case = spread.case
    options: dict[str, Any] = {"group": group, "layout": spread.layout, "exchange": spread.exchange, "seq_len": case.num_keys}
    options |= {"is_causal": case.is_causal, "deterministic": True, "timeout": patience()}
    if case.pattern == WHOLE:
        return lambda q, k, v: ring_attention(q, k, v, **options)
    lengths, rates = case.pattern.segment_lengths, case.pattern.dilation_rates
    return lambda q, k, v: ring_dilated_attention(q, k, v, lengths, rates, **options)


def replayed(rank: int, world: int, spread: Spread) -> tuple[bool, Result]:
    """Whether replays with other tensors equal plain calls bit for bit; and what one gave."""
    tensors, function = shard(spread, rank, world), plainly(spread)
    graph = None
    if here().type == "cuda":
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                step_of(function, tensors)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step_of(function, tensors)
    equal = True
    given = [x.detach().clone() for x in tensors]
    for factor in (2.0, 0.5, 1.0):
        with torch.no_grad():
            for x, first in zip(tensors, given, strict=True):
                x.copy_(first * factor)
        if graph is None:
            captured = step_of(function, tensors)
        else:
            graph.replay()
            torch.cuda.synchronize()
        found = [x.clone() for x in captured]
        equal &= all(map(torch.equal, found, step_of(function, tensors)))
    return equal, dict(zip(("out", "dq", "dk", "dv"), (x.cpu() for x in found), strict=True))


@pytest.mark.parametrize("exchange", ["all_gather", "ring", "all_to_all"])
@pytest.mark.parametrize("kind", ["dense", "dilated"])
@pytest.mark.parametrize("world", worlds(2, 4))
def test_both_passes_in_one_cuda_graph(world: int, kind: str, exchange: str) -> None:
    """Captured with their exchanges and replayed on other tensors: the plain call's results, to the bit, and right."""
    pattern = WHOLE if kind == "dense" else replace(ring_chosen.of_parts()[-1].case.pattern, segment_lengths=(64, 512))
    spread = spread_of(pattern, 512, head_dim=64, heads=4, kv_heads=4, is_causal=True, exchange=exchange, lse_grad=False)
    spread = replace(spread, layout="zigzag" if kind == "dense" else "contiguous")
    ranks = pool(world).run(replayed, spread)
    assert all(equal for equal, _ in ranks)
    judge(spread, [result for _, result in ranks], torch.bfloat16)


def interleaved(rank: int, world: int, spreads: tuple[Spread, Spread], repeats: int) -> int:
    """Two rings in two groups, on two streams, one's backward issued during the other's forward: the repeats that equal serial calls."""
    groups = [dist.group.WORLD, dist.new_group(list(range(world)))]
    functions = [plainly(spread, group) for spread, group in zip(spreads, groups, strict=True)]
    tensors = [shard(spread, rank, world) for spread in spreads]
    expected = [step_of(function, own) for function, own in zip(functions, tensors, strict=True)]
    on_gpu = here().type == "cuda"
    streams = [torch.cuda.Stream(), torch.cuda.Stream()] if on_gpu else [None, None]
    good = 0
    for _ in range(repeats):
        if on_gpu:
            torch.cuda.synchronize()
        found: list[list[torch.Tensor]] = [[], []]
        outs: list[Any] = [None, None]

        def forward(index: int, outs: list[Any] = outs) -> None:
            outs[index] = functions[index](*tensors[index][:3])

        def backward(index: int, outs: list[Any] = outs, found: list[list[torch.Tensor]] = found) -> None:
            found[index] = [outs[index].detach(), *torch.autograd.grad(outs[index], tensors[index][:3], tensors[index][3])]

        for index, act in ((0, forward), (1, forward), (0, backward), (0, forward), (1, backward), (0, backward)):
            with torch.cuda.stream(streams[index]):
                act(index)
        if on_gpu:
            torch.cuda.synchronize()
        good += all(torch.equal(a, b) for got, want in zip(found, expected, strict=True) for a, b in zip(got, want, strict=True))
    dist.barrier()
    dist.destroy_process_group(groups[1])
    return good


@pytest.mark.parametrize("world", worlds(2, 4))
def test_interleaved_rings_equal_serial_ones(world: int) -> None:
    dense = spread_of(n=512, head_dim=64, heads=4, kv_heads=4, is_causal=True, layout="zigzag", exchange="ring")
    pattern = replace(ring_chosen.of_parts()[-1].case.pattern, segment_lengths=(64, 512))
    dilated = spread_of(pattern, 512, head_dim=64, heads=4, kv_heads=4, exchange="all_gather")
    repeats = share(200)
    assert pool(world).run(interleaved, (dense, dilated), repeats) == [repeats] * world


def distance_from_one_gpu(rank: int, world: int, spread: Spread, repeats: int) -> float:
    """The largest |x − y| / |y| over out, dq, dk, dv and repeats: x by the ring, y these rows of one call on the whole sequence."""
    case = spread.case
    generator = torch.Generator(here()).manual_seed(case.seed)
    shape = (case.batch, case.num_keys, case.heads, case.head_dim)
    q, k, v, dout = (torch.randn(shape, device=here(), dtype=torch.bfloat16, generator=generator) for _ in range(4))
    wanted = step_of(lambda q, k, v: attention(q, k, v, is_causal=case.is_causal), [*(x.requires_grad_() for x in (q, k, v)), dout])
    rows = positions(case.num_keys, rank, world, spread.layout).to(here())
    mine = [x.detach()[:, rows].requires_grad_() for x in (q, k, v)]
    function, worst = plainly(spread), 0.0
    for _ in range(repeats):
        for found, want in zip(step_of(function, [*mine, dout[:, rows]]), wanted, strict=True):
            want = want[:, rows].float()
            worst = max(worst, ((found.float() - want).norm() / want.norm()).item())
    return worst


@pytest.mark.parametrize(("exchange", "layout"), [("all_gather", "zigzag"), ("ring", "zigzag"), ("all_to_all", "contiguous")])
@pytest.mark.parametrize("world", worlds(2, 4))
def test_long_sequences_equal_one_gpu(world: int, exchange: str, layout: str) -> None:
    """Exchanges of megabytes beside kernels of milliseconds, time and again: nothing is read before it has come."""
    n = 512 if ON_CPU else 2**15
    spread = spread_of(n=n, head_dim=64, heads=8, kv_heads=8, batch=1, is_causal=True, layout=layout, exchange=exchange)
    assert max(pool(world).run(distance_from_one_gpu, spread, 2 if ON_CPU else 20)) < 0.01
