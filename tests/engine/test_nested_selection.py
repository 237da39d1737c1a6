"""Which branches are visited together, and the engine around them: on a CPU with the plain-torch twin in the kernel's place."""

from __future__ import annotations

import random

import pytest
import torch

from dilated_attention import BackendUnavailable, DilatedPattern, dilated_attention
from dilated_attention.engine.branches import chunking, strategy
from dilated_attention.engine.kernels import nested_selection
from dilated_attention.engine.kernels.nested import NestedFamily
from dilated_attention.engine.kernels.nested_selection import make_pieces
from dilated_attention.testing import Case, call, inputs, max_error, reference, results
from tests.helpers.fused import run_fused
from tests.helpers.nested_twin import nested_attention_twin

LONGNET = DilatedPattern((2048, 4096, 8192, 16384, 32768), (1, 2, 4, 8, 16))
PAPER = DilatedPattern((2048, 4096, 8192, 16384, 32768), (1, 2, 4, 6, 12))


def shown(pattern: DilatedPattern, heads: int, n: int) -> list[tuple[int, int, tuple[int, ...] | None]]:
    return [(p.start, p.length, p.split.family if p.split else None) for p in make_pieces(pattern, heads, n)]


def test_pieces_of_longnet() -> None:
    every = (0, 1, 2, 3, 4)
    assert shown(LONGNET, 16, 2**20) == [(0, 2**20, every)]
    # what is left over is a sequence of its own, branch by branch
    assert shown(LONGNET, 16, 100_000) == [(0, 98_304, every), (98_304, 1696, None)]
    # a segment longer than the sequence would nest if cut to it, but each such length would have to be compiled
    assert shown(LONGNET, 16, 16384) == [(0, 16384, (0, 1, 2, 3))]
    assert shown(LONGNET, 16, 20_000) == [(0, 20_000, None)]
    # 4, 6 and 12 do not all nest; 1, 2, 4 save more pairs than 1, 2, 6 could, and the other two run on their own
    assert shown(PAPER, 12, 2**20) == [(0, 2**20, (0, 1, 2))]
    split = make_pieces(PAPER, 12, 2**20)[0].split
    assert split is not None and split.others is not None
    assert split.others.branches == ((16384, 6), (32768, 12)) and split.others.offsets(12)[1] == tuple(range(12))
    assert split.layers.branches == ((2**62, 1), (16384, 6), (32768, 12))


@pytest.mark.parametrize(
    "pattern",
    [
        DilatedPattern((2048, 8192), (2, 4)),
        DilatedPattern((2048, 3000), (1, 2)),
        DilatedPattern((2048, 4096), (1, 32)),
        DilatedPattern((2048, 4096, 8192), (1, 2, 4), "blocked"),
        DilatedPattern((2048, 4096), (1, 2), branch_heads="split"),
        DilatedPattern((2048,), (1,)),
    ],
    ids=["no_rate_1", "lengths", "tile", "offsets", "heads_apart", "one_branch"],
)
def test_branches_that_do_not_nest_run_on_their_own(pattern: DilatedPattern) -> None:
    pieces = make_pieces(pattern, 8, 2**17)
    assert all(piece.split is None or piece.split.family == (0, 1) for piece in pieces)
    assert pattern.head_offsets == "blocked" or (len(pieces) == 1 and pieces[0].split is None)


@pytest.fixture
def with_twin(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The nested path on a CPU; the list has the positions of each call of the kernel."""
    run_fused(monkeypatch)
    monkeypatch.setattr(nested_selection, "is_worth_it", lambda *_: True)
    monkeypatch.setattr(nested_selection, "_TILE", 2)
    monkeypatch.setattr(nested_selection, "reasons_against", lambda *_: [])
    seen: list[int] = []

    def forward(family: NestedFamily, tensors: tuple[torch.Tensor, ...], out: torch.Tensor, lse: torch.Tensor, call: strategy.Call) -> None:
        seen.append(family.num_positions)
        options = {"is_causal": call.is_causal, "scale": call.options.scale, "tile_rows": 2, "tile_keys": 2}
        found = nested_attention_twin(family, *tensors, **options)
        out.copy_(found[0])
        lse.copy_(found[1])

    monkeypatch.setattr(strategy, "_nested_forward", forward)
    for cached in (nested_selection.make_pieces, nested_selection._best_split):
        cached.cache_clear()
    yield seen  # type: ignore[misc]
    for cached in (nested_selection.make_pieces, nested_selection._best_split):
        cached.cache_clear()


@pytest.mark.parametrize("budget", [2**40, 2**9], ids=["whole", "chunks"])
@pytest.mark.parametrize("seed", range(24))
def test_equals_the_reference(with_twin: list[int], monkeypatch: pytest.MonkeyPatch, seed: int, budget: int) -> None:
    """Nested branches, others beside them, left-over positions, grouped heads, batches, chunks: one function."""
    monkeypatch.setattr(chunking, "transient_budget", lambda _, is_backward=False: budget)
    rng = random.Random(seed)
    lengths, rates = [[8, 16, 32], [4, 8], [8, 16, 12]][seed % 3], [[1, 2, 4], [1, 2], [1, 2, 3]][seed % 3]
    kv_heads = rng.choice([1, 2])
    heads = kv_heads * rng.choice([1, 2, 3])
    n = rng.choice([48, 96]) if seed % 3 == 2 else rng.choice([32, 40, 64, 71])
    case = Case(
        pattern=DilatedPattern(lengths, rates), batch=rng.choice([1, 2]), num_queries=n, num_keys=n, heads=heads, kv_heads=kv_heads,
        head_dim=4, is_causal=rng.random() < 0.5, seed=seed,
    )  # fmt: skip
    x = inputs(case, torch.float64)
    truth, found = results(reference, case, x), results(call, case, x)
    assert sum(with_twin), "the kernel's place was not reached"
    for name in truth:
        assert max_error(found[name], truth[name]) <= 1e-10, name


def test_worth_is_a_matter_of_work() -> None:
    def worth(n: int, heads: int, causal: bool = False) -> bool:
        return nested_selection.is_worth_it(LONGNET, torch.empty(1, n, heads, 64, device="meta"), causal)

    assert worth(2**20, 12) and worth(2**17, 16) and worth(2**17, 16, True)
    assert not worth(2**15, 4) and not worth(2**16, 4, True)


def test_another_kernel_asked_for_by_name_is_taken(with_twin: list[int]) -> None:
    q, k, v = torch.randn(3, 1, 32, 2, 4)
    dilated_attention(q, k, v, [8, 16], [1, 2], backend="math")
    assert not with_twin
    dilated_attention(q, k, v, [8, 16], [1, 2], backend="nested")
    assert with_twin


def test_nested_by_name_is_refused_with_every_reason() -> None:
    q, k, v = torch.randn(3, 1, 64, 2, 4)
    with pytest.raises(BackendUnavailable, match="no two branches nest on 64 positions"):
        dilated_attention(q, k, v, [8, 16], [1, 2], backend="nested")
    with pytest.raises(BackendUnavailable, match="takes no key_padding_mask"):
        dilated_attention(q, k, v, [8, 16], [1, 2], key_padding_mask=torch.zeros(1, 64, dtype=torch.bool), backend="nested")
    q, k, v = torch.randn(3, 1, 2**15, 1, 8)
    with pytest.raises(BackendUnavailable, match="runs on cuda, not on cpu"):
        dilated_attention(q, k, v, [2048, 4096], [1, 2], backend="nested")
