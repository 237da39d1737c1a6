"""The kernels that copy the rows of an exchange against the same copies by torch: interpreted on a CPU, compiled on a GPU."""

from __future__ import annotations

import pytest
import torch

from dilated_attention import DilatedPattern
from dilated_attention.backends import registry
from dilated_attention.backends.hardware import has_kernels
from dilated_attention.distributed.exchange import crossing, setup
from dilated_attention.distributed.exchange.crossing import SMALL_BYTES
from dilated_attention.distributed.exchange.rows import copy_tables as tables
from dilated_attention.distributed.exchange.rows import sparse_rows, transfer
from dilated_attention.distributed.exchange.rows.messages import RowMessage, StepPlan
from dilated_attention.distributed.exchange.rows.sparse_rows import SparseRows
from tests.helpers import ring_cases
from tests.helpers.pool import pool_of
from tests.helpers.ring_cases import draw
from tests.helpers.ring_chosen import spread_of

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def step_of(rows: int, heads: int, rng: torch.Generator) -> tuple[StepPlan, int]:
    """A step of three peers, one message of each form, and two fills; and the number of own rows."""
    order = torch.randperm(rows - 8, generator=rng)
    few = order[: (rows - 8) // 3].sort().values
    units = order[(rows - 8) // 3 : (rows - 8) // 2].sort().values * heads + heads - 1
    messages = [RowMessage(1, ((rows - 8, rows - 5),), None), RowMessage(2, (), few, whole_rows=True), RowMessage(3, (), units)]
    receives = tuple(RowMessage(m.peer, m.runs, None if m.units is None else m.units.to(DEVICE), m.whole_rows) for m in messages)
    # the last rows are the rank's own, in two runs
    fills = ((0, rows - 5, 2), (2, rows - 3, 3))
    n = 5
    owed = (
        RowMessage(1, ((0, 2), (4, 5)), None),
        RowMessage(2, (), torch.tensor([1, 3], device=DEVICE), whole_rows=True),
        RowMessage(3, (), torch.tensor([0, 2 * heads, 4 * heads + heads - 1], device=DEVICE).unique()),
    )
    return StepPlan("keys", (0, heads), ((0, rows),), fills, owed, receives, owed, False, False, False), n


@pytest.mark.parametrize("shape", [(1, 12, 1, 1), (2, 37, 3, 24), (1, 130, 2, 64)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_kernels_copy_and_add_as_torch_does(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    copies = pytest.importorskip("dilated_attention.distributed.exchange.rows.copies_triton")
    B, rows, heads, D = shape
    rng = torch.Generator().manual_seed(rows)
    step, n = step_of(rows, heads, rng)

    def some(count: int) -> torch.Tensor:
        # heads of a wider tensor
        return torch.randn(B, count, heads + 1, D, generator=rng).to(DEVICE, dtype)[:, :, 1:]

    def flat(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """(rows · heads, B, 2·D)"""
        return torch.cat((k, v), -1).permute(1, 2, 0, 3).reshape(-1, B, 2 * D)

    k, v = some(n), some(n)
    units = tables.sent_units(step, DEVICE)
    assert len(units) == sum(message.size(heads) for message in step.owed if message.units is not None)
    sent = torch.empty((len(units), B, 2 * D), dtype=dtype, device=DEVICE)
    copies.gather(step, sent, k, v, units)
    assert torch.equal(sent, flat(k, v)[units.long()])

    # 7 is what arrives in place and must stay
    memory = torch.full((rows, heads, B, 2 * D), 7.0, dtype=dtype, device=DEVICE)
    singles = sum(message.size(heads) for message in step.receives if message.units is not None)
    came = torch.randn(singles, B, 2 * D, generator=rng).to(DEVICE, dtype)
    wanted = torch.zeros_like(memory)
    wanted[rows - 8 : rows - 5] = 7.0
    for row, place, count in step.fills:
        wanted[place : place + count] = torch.cat((k, v), -1)[:, row : row + count].permute(1, 2, 0, 3)
    start = 0
    for message in step.receives:
        if message.units is not None:
            view = message.flat(wanted)
            end = start + message.size(heads)
            view[message.units] = came[start:end].view(-1, *view.shape[1:])
            start = end
    copies.assemble(step, memory, k, v, came, tables.sources(step, n, DEVICE))
    assert torch.equal(memory, wanted)

    own = some(rows), some(rows)
    back = torch.randn(sum(message.size(heads) for message in step.owed), B, 2 * D, generator=rng).to(DEVICE, dtype)
    total = torch.zeros((n * heads, B, 2 * D), device=DEVICE)
    for row, place, count in step.fills:
        total[row * heads : (row + count) * heads] = flat(*own)[place * heads : (place + count) * heads].float()
    returned = tables.returned_units(step, n, DEVICE)
    for peer in range(3):
        for unit in range(n * heads):
            if returned[peer, unit] >= 0:
                total[unit] += back[returned[peer, unit]].float()
    assert sorted(returned[returned >= 0].tolist()) == list(range(len(back)))
    grads = some(n), some(n)
    copies.add(step, grads, own, back, tables.own_places(step, n, DEVICE), returned)
    torch.testing.assert_close(flat(*grads), total.to(dtype), atol=2e-3 if dtype is torch.float16 else 1e-6, rtol=1e-3)


@pytest.mark.parametrize("shape", [(1, 6, 1, 1), (2, 10, 3, 24), (1, 33, 2, 64)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_kernels_of_sparse_rows_do_as_torch_does(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    kernels = pytest.importorskip("dilated_attention.distributed.exchange.rows.sparse_rows_triton")
    B, count, heads, D = shape
    every, rng = 4, torch.Generator().manual_seed(count)
    rows = SparseRows(every, tuple(range(heads)), DEVICE)
    of_kernels = kernels.Rows(*rows._rows)

    def some(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=rng).to(DEVICE, dtype if len(sizes) == 4 else torch.float32)

    n = every * count
    q, dout, out, lse, dlse = some(B, n, heads, D), some(B, n, heads + 1, D)[:, :, 1:], some(B, n, heads, D), *(some(B, heads, n),) * 2
    found, stats = kernels.take(of_kernels, [q, dout, out], [lse, dlse])
    for x, some_x in zip((q, dout, out), found, strict=True):
        index = torch.arange(count, device=DEVICE) * every
        assert all(torch.equal(some_x[:, :, h], x[:, index + h, h]) for h in range(heads))
    for x, some_x in zip((lse, dlse), stats, strict=True):
        assert all(torch.equal(some_x[:, h], x[:, h, torch.arange(count, device=DEVICE) * every + h]) for h in range(heads))

    part, part_lse = some(B, count, heads, D), some(B, heads, count)
    lse[:, :, :every], part_lse[:, :, 0] = -torch.inf, -torch.inf
    wanted, wanted_lse = out.double(), lse.double()
    wanted_lse = rows.merge(wanted, wanted_lse, part.double(), part_lse.double())
    kernels.merge(of_kernels, out, lse, part, part_lse)
    tolerance = {"atol": 2e-2, "rtol": 2e-2} if dtype is torch.bfloat16 else {"atol": 1e-5, "rtol": 1e-5}
    torch.testing.assert_close(out.double(), wanted, **tolerance)
    torch.testing.assert_close(lse.double(), wanted_lse, atol=1e-5, rtol=1e-5)

    wanted = q.double()
    rows.add(wanted, part.double())
    kernels.add(of_kernels, q, part)
    torch.testing.assert_close(q.double(), wanted, **tolerance)


def with_kernels(rank: int, world: int, fused: bool) -> None:
    """From now on, float32 calls of this process copy rows by kernels, as on a GPU, or by torch's operations."""
    transfer.has_kernels = sparse_rows.has_kernels = (lambda x: x.dtype is not torch.float64) if fused else has_kernels
    crossing.SMALL_BYTES = 0 if fused else SMALL_BYTES
    registry.cached.clear()
    setup._setups.clear()


def kept_sparse(rank: int, world: int) -> int:
    return sum(step.sparse is not None for _, step, *_ in transfer._kept)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="tests/gpus/test_ring.py has calls on GPUs")
def test_whole_calls_by_kernels_equal_calls_by_torch() -> None:
    """Random calls, and calls with branches across ranks, twice each: the second one finds the buffers of the first."""
    pytest.importorskip("triton")
    spreads = [draw(2, seed) for seed in range(8)]
    for lengths, rates in (((8, 128), (1, 4)), ((4, 8, 64), (1, 2, 8)), ((8, 128, 128), (1, 4, 8))):
        for heads, kv_heads in ((4, 4), (4, 2)):
            for layout, is_causal in (("contiguous", True), ("zigzag", False)):
                pattern = DilatedPattern(lengths, rates, "zero" if kv_heads == 2 else "cyclic")
                options = {"heads": heads, "kv_heads": kv_heads, "is_causal": is_causal, "layout": layout, "exchange": "all_gather"}
                spreads.append(spread_of(pattern, 128, **options))
    pool = pool_of(2)
    wanted = pool.run(ring_cases.run, spreads, torch.float32)
    pool.run(with_kernels, True)
    try:
        found = pool.run(ring_cases.run, spreads, torch.float32, 2)
        assert min(pool.run(kept_sparse)) > 0
    finally:
        pool.run(with_kernels, False)
    for want, got in zip(wanted, found, strict=True):
        for spread, of_torch, of_kernels in zip(spreads, want, got, strict=True):
            for name, x in of_torch[0].items():
                for other in of_kernels:
                    torch.testing.assert_close(other[name], x, atol=2e-5, rtol=2e-4, msg=lambda text, s=spread, n=name: f"{s}: {n}: {text}")
