"""The kernels that copy the rows of an exchange against the same copies by torch: interpreted on a CPU, compiled on a GPU."""

from __future__ import annotations

import pytest
import torch

from dilated_attention.distributed.exchange import copy_tables as tables
from dilated_attention.distributed.exchange.messages import RowMessage, StepPlan

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
    copies = pytest.importorskip("dilated_attention.distributed.exchange.copies_triton")
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
