"""Detached mixing on the fused path: branches' own outputs kept by the forward, or made again. On a CPU, with the torch twin."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo

from dilated_attention import DilatedPattern, dilated_attention
from dilated_attention.backends import registry
from dilated_attention.engine.branches import branch_buffers, launches
from dilated_attention.engine.ops import prepare, resolve
from dilated_attention.engine.reference import reference_attention
from tests.helpers.fused import run_fused
from tests.helpers.op_settings import settings

FORWARD = torch.ops.dilated_attention.dilated_attention.default
BACKWARD = torch.ops.dilated_attention.dilated_attention_backward.default
OPTIONS: dict[str, Any] = {"mixture_grad": "detached", "tail": "zero_keys", "head_offsets": "blocked"}
PATTERNS = [
    DilatedPattern((8, 24, 64), (1, 3, 4), "blocked", "all", "zero_keys"),
    DilatedPattern((4, 8, 16), (1, 2, 4), "cyclic"),
    # no branch takes everything; two are the same
    DilatedPattern((9, 9, 30), (2, 2, 5), "zero", "all", "zero_keys"),
    # equal lengths and rates, other offsets
    DilatedPattern((8, 8), (2, 2), ((0, 0, 1, 1), (1, 0, 1, 0))),
]


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    run_fused(monkeypatch)


def make(n: int, heads: int = 2, kv_heads: int | None = None) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(n)
    shapes = [(2, n, heads, 4), (2, n, kv_heads or heads, 4), (2, n, kv_heads or heads, 4), (2, n, heads, 4)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]


def count_forwards(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Forwards of the backend that are run from now on."""
    launched: list[int] = []
    math = type(registry.get("math"))
    original = math.forward
    monkeypatch.setattr(math, "forward", lambda *args, **views: (launched.append(1), original(*args, **views))[1])
    return launched


@pytest.mark.parametrize("cut", ["whole", "chunks"])
@pytest.mark.parametrize("which", range(len(PATTERNS)))
@pytest.mark.parametrize("n", [64, 77])
def test_kept_outputs_and_those_made_again_give_one_gradient(monkeypatch: pytest.MonkeyPatch, which: int, n: int, cut: str) -> None:
    """However the backward is cut: its budget is another one here."""
    small = {"whole": 2**40, "chunks": 2**14}[cut]
    monkeypatch.setattr(branch_buffers, "transient_budget", lambda size, is_backward=False: small if size else 2**40)
    monkeypatch.setitem(launches.PART_BYTES, "cuda", 0)
    launched = count_forwards(monkeypatch)
    pattern = PATTERNS[which]
    *qkv, dout = make(n, 4)
    found = []
    for keeps in (True, False):
        if not keeps:
            monkeypatch.setattr(prepare, "saved_elements", lambda *_: 0)
            registry.cached.clear()
        options: dict[str, Any] = {"head_offsets": pattern.head_offsets, "tail": pattern.tail, "mixture_grad": "detached"}
        out = dilated_attention(*qkv, pattern.segment_lengths, pattern.dilation_rates, backend="math", **options)
        launched.clear()
        found.append(torch.autograd.grad(out, qkv, dout))
        assert bool(launched) is not keeps
    truth = reference_attention(*qkv, pattern, mixture_grad="detached")[0]
    for kept, again, true in zip(*found, torch.autograd.grad(truth, qkv, dout), strict=True):
        torch.testing.assert_close(kept, again, rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(kept, true, rtol=1e-10, atol=1e-12)


def test_only_a_backward_with_detached_mixing_is_kept_for(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[int] = []
    original = resolve.make_plan

    def make_plan(*args: Any, **options: Any) -> Any:
        plan = original(*args, **options)
        kept.append(plan.saved)
        return plan

    # what a call saves is decided once for all calls like it
    monkeypatch.setattr(resolve, "make_plan", make_plan)
    q, k, v, _ = make(20)
    elements = 2 * 2 * 4 * (3 * 8 + 5)

    def run(k: torch.Tensor = k, v: torch.Tensor = v, lengths: Any = (8, 40), rates: Any = (1, 4), **options: Any) -> int:
        registry.cached.clear()
        dilated_attention(q, k, v, lengths, rates, **options)
        return kept.pop()

    assert run(**OPTIONS) == elements
    assert run(**OPTIONS, key_padding_mask=(torch.arange(20) > 17).repeat(2, 1)) == elements
    with torch.no_grad():
        assert run(**OPTIONS) == 0
    assert run(**{**OPTIONS, "mixture_grad": "exact"}) == 0
    assert run(k[:, :, :1], v[:, :, :1], **OPTIONS) == 0
    assert run(**OPTIONS, dropout_p=0.1) == 0
    assert run(lengths=(8,), rates=(1,), **OPTIONS) == 0
    monkeypatch.setattr(branch_buffers, "transient_budget", lambda _, is_backward=False: elements * 8 - 1)
    assert run(**OPTIONS) == 0


def test_an_op_whose_outputs_are_kept_passes_every_opcheck() -> None:
    # whole segments: places of positions that there are not hold nothing that could be compared
    qkv = [x.detach().requires_grad_() for x in make(8)[:3]]
    branches = ((2, 4), (1, 2), "blocked", "all", "zero_keys")
    call = settings(branches=branches, detached=True, needs_grad=True)
    arguments = (*qkv, *[None] * 5, *call.arguments())
    out, lse, kept = FORWARD(*arguments)
    assert kept.numel() == 2 * 2 * 4 * (8 + 4)
    assert set(torch.library.opcheck(FORWARD, arguments).values()) == {"SUCCESS"}
    given = [x.detach() for x in (torch.ones_like(out), *qkv, out, lse, kept)]
    results = torch.library.opcheck(BACKWARD, (given[0], None, *given[1:], *arguments[3:]))
    assert set(results.values()) == {"SUCCESS"}


def test_a_dynamic_graph_keeps_and_gives_what_eager_calls_do() -> None:
    def run(*qkv: torch.Tensor) -> torch.Tensor:
        return dilated_attention(*(x.sin() for x in qkv), [8, 40], [1, 4], **OPTIONS).exp()

    torch._dynamo.reset()
    graph = torch.compile(run, backend="aot_eager", fullgraph=True, dynamic=True)
    # of the first length, which serves the others
    for n in (20, 33, 48):
        qkv = make(n)[:3]
        with torch.compiler.set_stance("default" if n == 20 else "fail_on_recompile"):
            compiled = torch.autograd.grad(graph(*qkv).sum(), qkv)
        for one, other in zip(torch.autograd.grad(run(*qkv).sum(), qkv), compiled, strict=True):
            torch.testing.assert_close(other, one, rtol=1e-12, atol=1e-12)
