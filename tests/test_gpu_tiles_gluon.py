"""The Hopper kernels of a table of tiles against the Triton kernels that they replace: same table, same numbers, same results."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dilated_attention.backends.tiles import run
from dilated_attention.backends.tiles.table import Walk
from dilated_attention.pattern import DilatedPattern

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"),
]

Tensors = tuple[torch.Tensor, ...]

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
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CASES)
# many rows a program, too, so that the ring runs on from one to the next
@pytest.mark.parametrize("batch", [1, 40])
def test_as_the_triton_kernels(name: str, dtype: torch.dtype, batch: int) -> None:
    from dilated_attention.backends.tiles import gluon_run

    pattern, heads, kv_heads, head_dim, fields = CASES[name]
    cut, own = name == "cut", name == "own"
    direct = -1 if own else 0
    documents = ((0, N // 3), (N // 3, N)) if cut else ((0, N),)
    walk = Walk(pattern.branches, documents, (300, N - 200) if cut else (0, N), direct, direct, N - 100 if cut else None)
    call = run.TileCall(walk, pattern.offsets(heads), head_dim**-0.5, **fields)
    device = torch.device("cuda", torch.cuda.current_device())
    p = run.prepared(call, batch, kv_heads, head_dim, dtype, device)
    torch.manual_seed(0)

    def draw(rows: int, width: int) -> torch.Tensor:
        return torch.randn(batch, rows, width, head_dim, device=device, dtype=dtype)

    q, dout = draw(p.num_queries, heads), draw(p.num_queries, heads)
    k, v = draw(p.num_keys, kv_heads), draw(p.num_keys, kv_heads)
    out = torch.empty_like(q)
    assert not gluon_run.why_not(p, (q, k, v, dout, out))
    lse = torch.empty(batch, heads, p.num_queries, device=device)
    parts = torch.empty(batch * heads * p.part_rows * head_dim or 1, dtype=dtype, device=device)
    part_lse = torch.empty(batch * heads * p.part_rows or 1, device=device)
    grads = [torch.empty_like(x) for x in (q, k, v)]
    q_parts = torch.empty_like(parts)
    k_parts, v_parts = (torch.empty(batch * p.key_heads * p.key_part_rows * head_dim or 1, dtype=dtype, device=device) for _ in range(2))
    stats = torch.empty(2 * batch * heads * p.delta_rows, device=device)
    forward, merge = run._forward_launches(p, q, k, v, out, None, 0.0)
    dlse = torch.randn(batch, p.num_queries, heads, device=device) if own else None
    query, key, _ = run._backward_launches(p, (q, k, v, dout, out, *grads), dlse, None, own, 0.0)
    o = p.offsets

    def check(which: str, triton: Any, flags: dict[str, Any], before: Tensors, after: Tensors, results: Tensors, bound: float) -> None:
        size = gluon_run.sizes(which, head_dim)
        if size is None:
            return
        hopper = gluon_run.launch(p, which, size, triton.numbers, flags)
        found = []
        for launch, table in ((hopper, gluon_run.table_of(p, which == "key", size)), (triton, getattr(p, which)[0])):
            for x in results:
                x.fill_(7.0)
            # the second launch goes past Triton's binding of arguments
            for _ in range(2):
                launch((*before, table, o, *after))
            found.append([x.double() for x in results])
        for a, b in zip(*found, strict=True):
            finite = b.isfinite()
            assert torch.equal(finite, a.isfinite())
            assert (a - b)[finite].norm() <= bound * b[finite].norm()

    flags = {"ZERO_KEYS": call.zero_keys}
    # the order of keys in the online softmax differs with the size of a block
    check("forward", forward, flags, (q, k, v, out, lse, parts, part_lse), (o, o, o, o), (out, lse, parts, part_lse), 3e-3)
    forward((q, k, v, out, lse, parts, part_lse, p.forward[0], o, o, o, o, o))
    if p.part_rows:
        merge((out, lse, parts, part_lse, p.spans, p.starts, p.rates, p.offsets))
    before = (q, k, v, parts if own else out, lse, dout, lse if dlse is None else dlse, stats, grads[0], q_parts)
    query((*before, p.query[0], o, o, o, o, o))
    check("query", query, {"OWN": own, "DLSE": own}, before, (o, o, o, o), (grads[0], q_parts, stats), 1e-4)
    results = (grads[1], grads[2], k_parts, v_parts)
    check("key", key, {"SHARED": p.shared}, (q, k, v, dout, stats, *results), (o, o), results, 1e-4)
