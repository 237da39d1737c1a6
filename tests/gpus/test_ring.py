"""What only GPUs have of spread sequences: kernels of half precision, groups of two devices, CUDA graphs, streams, long sequences.

Needs 2, 3 and 4 GPUs. ``distributed/test_ring.py`` has the calls in float64. A kernel is compiled on the first call that needs it, by all
ranks at once; each call after it takes milliseconds.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dilated_attention import DilatedPattern, attention, ring_attention, ring_dilated_attention
from dilated_attention.backends import AttentionRequest, detect, registry
from dilated_attention.testing import Result, inputs, results
from tests.distributed.test_ring import BATCH, check, judge
from tests.helpers import ring_cases
from tests.helpers.gpu_memory import captured
from tests.helpers.machine import ON_CPU, share, worlds
from tests.helpers.pool import Pool, here, patience
from tests.helpers.ring_cases import WHOLE, Kernel, Spread, draw, positions, spread_of

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


@pytest.mark.parametrize("name", SWEEPS)
@pytest.mark.parametrize("pool", worlds(gpus=(2, 3, 4)))
def test_random_calls(pool: Pool, name: str) -> None:
    kernel, count = kernel_of(name), share(SWEEPS[name].calls)
    # other calls than those of the CPU's suite
    spreads = [draw(pool.world, 10_000 + 100 * list(SWEEPS).index(name) + seed, kernel) for seed in range(count)]
    for first in range(0, count, BATCH):
        check(pool, spreads[first : first + BATCH], kernel.dtype)


def cpu_and_gpu(rank: int, world: int, spreads: Sequence[Spread]) -> list[Result]:
    """The calls with tensors on the CPU and on the GPU in turn, in one group: results of both."""
    found = []
    for spread in spreads:
        rows = positions(spread.case.num_keys, rank, world, spread.layout)
        for device in ("cpu", here()):
            x = ring_cases.local_inputs(inputs(spread.case, torch.float64, device), rows.to(device), spread.memory)
            found.append({name: y.cpu() for name, y in results(ring_cases.ring_call(spread), spread.case, x).items()})
    return found


@pytest.mark.parametrize("pool", worlds(gpus=(2,)))
def test_a_group_of_gloo_and_nccl_carries_tensors_of_both(pool: Pool) -> None:
    spreads = [spread_of(is_causal=True, layout="zigzag"), spread_of(is_causal=True, exchange="all_gather"), spread_of(layout="striped")]
    ranks = pool.run(cpu_and_gpu, spreads)
    for index, spread in enumerate([spread for spread in spreads for _ in range(2)]):
        judge(spread, [rank[index] for rank in ranks], device=pool.device)


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
        graph, results = captured(lambda: step_of(function, tensors))
    equal = True
    given = [x.detach().clone() for x in tensors]
    for factor in (2.0, 0.5, 1.0):
        with torch.no_grad():
            for x, first in zip(tensors, given, strict=True):
                x.copy_(first * factor)
        if graph is None:
            results = step_of(function, tensors)
        else:
            graph.replay()
            torch.cuda.synchronize()
        found = [x.clone() for x in results]
        equal &= all(map(torch.equal, found, step_of(function, tensors)))
    return equal, dict(zip(("out", "dq", "dk", "dv"), (x.cpu() for x in found), strict=True))


@pytest.mark.parametrize("exchange", ["all_gather", "all_to_all"])
@pytest.mark.parametrize("kind", ["dense", "dilated"])
@pytest.mark.parametrize("pool", worlds(gpus=(2, 4)))
def test_both_passes_in_one_cuda_graph(pool: Pool, kind: str, exchange: str) -> None:
    """Captured with their exchanges and replayed on other tensors: the plain call's results, to the bit, and right."""
    pattern = WHOLE if kind == "dense" else DilatedPattern((64, 512), (1, 3))
    spread = spread_of(pattern, 512, head_dim=64, heads=4, kv_heads=4, is_causal=True, exchange=exchange, lse_grad=False)
    spread = replace(spread, layout="zigzag" if kind == "dense" else "contiguous")
    ranks = pool.run(replayed, spread)
    assert all(equal for equal, _ in ranks)
    judge(spread, [result for _, result in ranks], torch.bfloat16, pool.device)


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


@pytest.mark.parametrize("pool", worlds(gpus=(2, 4)))
def test_interleaved_rings_equal_serial_ones(pool: Pool) -> None:
    dense = spread_of(n=512, head_dim=64, heads=4, kv_heads=4, is_causal=True, layout="zigzag", exchange="all_to_all")
    pattern = DilatedPattern((64, 512), (1, 3))
    dilated = spread_of(pattern, 512, head_dim=64, heads=4, kv_heads=4, exchange="all_gather")
    repeats = share(200)
    assert pool.run(interleaved, (dense, dilated), repeats) == [repeats] * pool.world


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


@pytest.mark.parametrize(("exchange", "layout"), [("all_gather", "zigzag"), ("all_to_all", "contiguous")])
@pytest.mark.parametrize("pool", worlds(gpus=(2, 4)))
def test_long_sequences_equal_one_gpu(pool: Pool, exchange: str, layout: str) -> None:
    """Exchanges of megabytes beside kernels of milliseconds, time and again: nothing is read before it has come."""
    n = 512 if ON_CPU else 2**15
    spread = spread_of(n=n, head_dim=64, heads=8, kv_heads=8, batch=1, is_causal=True, layout=layout, exchange=exchange)
    assert max(pool.run(distance_from_one_gpu, spread, 2 if ON_CPU else 20)) < 0.01
