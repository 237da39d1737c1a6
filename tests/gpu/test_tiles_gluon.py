"""The Hopper kernels of a table of tiles against the Triton kernels that they replace: same table, same numbers, same results."""

from typing import Any

import pytest
import torch

from dilated_attention.backends.dropout_triton import dropout_words
from dilated_attention.backends.tiles import run
from dilated_attention.backends.tiles.call import Prepared, TileCall
from dilated_attention.backends.tiles.table import Walk
from dilated_attention.pattern import DilatedPattern

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"),
]

N = 1500
WHOLE = DilatedPattern((10**9,), (1,), "zero")
BLOCKED = DilatedPattern((128, 300, 2000), (1, 2, 4), "blocked")
CYCLIC = DilatedPattern((256, 512, 1024), (1, 2, 6), "cyclic")
# pattern, query heads, key heads, head dim, the fields of a call
CASES: dict[str, tuple[DilatedPattern, int, int, int, dict[str, Any]]] = {
    "branches": (BLOCKED, 4, 4, 48, {}),
    "causal": (CYCLIC, 6, 6, 64, {"right": 0}),
    "wide": (CYCLIC, 6, 6, 128, {"right": 0}),
    "grouped": (WHOLE, 6, 2, 64, {"right": 0}),
    "window": (WHOLE, 6, 2, 64, {"left": 100, "right": 20}),
    "zero keys": (BLOCKED, 4, 4, 64, {"zero_keys": True}),
    "cut": (CYCLIC, 6, 6, 64, {"right": 0}),
    # each branch's own output in place of the merged one, and a gradient of the lse
    "own": (BLOCKED, 4, 4, 64, {}),
    "padding": (BLOCKED, 4, 4, 64, {}),
    "padding, dropout": (CYCLIC, 6, 6, 48, {"right": 0}),
    "dropout": (CYCLIC, 6, 6, 128, {}),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CASES)
# many rows a program, too, so that the ring runs on from one to the next
@pytest.mark.parametrize("batch", [1, 40])
def test_as_the_triton_kernels(name: str, dtype: torch.dtype, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pattern, heads, kv_heads, head_dim, fields = CASES[name]
    cut, own = name == "cut", name == "own"
    dropout_p = 0.2 if "dropout" in name else 0.0
    direct = -1 if own else 0
    documents = ((0, N // 3), (N // 3, N)) if cut else ((0, N),)
    walk = Walk(pattern.branches, documents, (300, N - 200) if cut else (0, N), direct, direct, N - 100 if cut else None)
    call = TileCall(walk, pattern.offsets(heads), head_dim**-0.5, **fields)
    device = torch.device("cuda", torch.cuda.current_device())

    def draw(rows: int, width: int) -> torch.Tensor:
        return torch.randn(batch, rows, width, head_dim, device=device, dtype=dtype)

    def passes(is_hopper: bool, repeats: int) -> list[torch.Tensor]:
        p = Prepared(call, batch, kv_heads, head_dim, dtype, device)
        torch.manual_seed(0)
        q, dout, k, v = draw(p.num_queries, heads), draw(p.num_queries, heads), draw(p.num_keys, kv_heads), draw(p.num_keys, kv_heads)
        out, lse = torch.full_like(q, torch.nan), torch.full((batch, heads, p.num_queries), torch.nan, device=device)
        parts = torch.empty(batch * heads * p.part_rows * head_dim, device=device, dtype=dtype) if own else None
        dlse = torch.randn(batch, heads, p.num_queries, device=device) if own else None
        grads = torch.full_like(q, torch.nan), torch.full_like(k, torch.nan), torch.full_like(v, torch.nan)
        masks: dict[str, Any] = {"dropout_p": dropout_p}
        if "padding" in name:
            masks["padding"] = torch.rand(batch, p.num_keys, device=device) < torch.linspace(0.0, 1.0, p.num_keys, device=device)
            k, v = (x.masked_fill(masks["padding"][:, :, None, None], 0) for x in (k, v))
        if dropout_p:
            masks["words"] = dropout_words(7, batch, heads, p.num_keys, device)
        for _ in range(repeats):
            run.forward(p, q, k, v, out, lse, parts=parts, **masks)
            run.backward(p, (dout, q, k, v, out, lse), dlse, grads, parts=parts, **masks)
        taken = [launch.kernel.__module__ for launches in p.launches.values() for launch in launches]
        assert any("hopper" in module for module in taken) == is_hopper, taken
        return [out, lse, *grads]

    mine, again = passes(True, 1), passes(True, 50)
    monkeypatch.setattr(run, "hopper_launch", lambda *_: None)
    theirs = passes(False, 1)
    for what, x, y, z in zip(("out", "lse", "dq", "dk", "dv"), mine, again, theirs, strict=True):
        assert torch.equal(x, y), f"{what} differs between runs"
        # rows whose keys are all padded
        assert torch.equal(x == -torch.inf, z == -torch.inf)
        x, z = (y.masked_fill(y == -torch.inf, 0) for y in (x, z))
        error = ((x.double() - z.double()).norm() / z.double().norm()).item()
        assert error < 3e-3, f"{what}: {error:.1e}"
