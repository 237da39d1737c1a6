"""Runs public functions on a CPU as a GPU runs them: branches in chunks with one merge each, in plain torch and any dtype.

``combine`` is that of ``engine/branches/places.py`` by its definition: part after part.
"""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from dilated_attention.backends import registry
from dilated_attention.backends.base import accumulation_dtype
from dilated_attention.backends.merge import merge_
from dilated_attention.backends.tiles.table import place_of
from dilated_attention.engine.branches import places
from dilated_attention.engine.branches.places import Layout
from dilated_attention.engine.ops import definition, prepare


def run_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on calls with branches run with one merge, and what was decided before is not looked up."""
    monkeypatch.setattr(registry, "cached", {})
    for module in (prepare, definition):
        monkeypatch.setattr(module, "fuses", lambda hardware, dtype: True)
    monkeypatch.setattr(places, "combine", combine)


def at_positions(layout: Layout, branch: int, x: Tensor, empty: float) -> Tensor:
    """Spreads results (H, places, …) over positions: (B, N, H, …), ``empty`` where the branch takes no row."""
    (length, rate), n = layout.walk.branches[branch], torch.arange(layout.walk.documents[0][1], device=x.device)[:, None]
    base, places, segments = place_of(layout.walk, branch)
    of_entries = base + torch.arange(len(layout.walk.documents), device=x.device)[:, None, None] * places * segments
    offset = torch.tensor(layout.offsets[branch], device=x.device)
    t = n % length - offset
    taken = ((offset >= 0) & (t >= 0) & (t % rate == 0)).expand(len(of_entries), *t.shape)
    at = torch.where(taken, of_entries + n // length * -(-length // rate) + t // rate, 0)
    return x[torch.arange(len(offset), device=x.device), at].masked_fill(~taken.view(*taken.shape, *[1] * (x.dim() - 2)), empty)


def combine(layout: Layout, results: Sequence[Tensor], parts: Sequence[Tensor]) -> None:
    H, dtype, is_merge = results[0].shape[2], accumulation_dtype(results[0].dtype), results[1].dim() == 3
    totals = [torch.zeros(x.shape, dtype=dtype, device=x.device) for x in results]
    if is_merge:
        totals[1].fill_(-torch.inf)
    for b in range(layout.walk.num_branches):
        rows = list(results)
        if b != layout.walk.direct:
            empty = (0.0, -torch.inf) if is_merge else (0.0,) * 3
            rows = [at_positions(layout, b, x.view(H, -1, *y.shape[3:]), z) for x, y, z in zip(parts, results, empty, strict=True)]
        if is_merge:
            # whatever a part without keys holds
            merge_(*totals, rows[0].masked_fill(rows[1][..., None] == -torch.inf, 0.0), rows[1])
        else:
            totals = [total + row for total, row in zip(totals, rows, strict=True)]
    for x, total in zip(results, totals, strict=True):
        x.copy_(total)
