"""Block-sparse attention of a sequence spread over processes: what every rank gets is what the whole gives, in float64, to 1e-10."""

from __future__ import annotations

import pickle
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dilated_attention import (
    BackendUnavailable,
    RingBlockSparseAttention,
    balanced_layout,
    block_sparse_attention,
    create_attention,
    local_positions,
    ring_attention,
    ring_block_sparse_attention,
    ring_block_sparse_dilated_attention,
    shard_sequence,
    unshard_sequence,
)
from dilated_attention.distributed import Layout, spans
from dilated_attention.distributed.block_exchange.cost import LANES, TransferLoad, choose, even, seconds
from dilated_attention.distributed.block_exchange.lists import join_rows, lists_of_buffer
from dilated_attention.distributed.block_exchange.parts import make_block_steps
from dilated_attention.distributed.block_exchange.plan import RingBlockProblem, ascending_runs
from dilated_attention.distributed.comm.comm_stats import traffic
from dilated_attention.distributed.comm.comm_volume import Bytes, CommSizes
from dilated_attention.distributed.exchange import setup
from dilated_attention.engine.blocks.lists import block_lists, select_rows
from dilated_attention.pattern import (
    BigBird,
    BlockPattern,
    Causal,
    Document,
    GlobalLocal,
    LocalWindow,
    MaskFunction,
    PerHead,
    RandomBlocks,
    Strided,
    TopBlocks,
    with_sparsity,
)
from tests.functional.test_block_sparse import (
    PATTERNS,
    RESULTS,
    TOLERANCE,
    Case,
    Inputs,
    by_table,
    errors,
    inputs,
    of_branches,
    plain,
    results,
    some_branches,
    some_patterns,
)
from tests.helpers.comm_volume import block_bytes
from tests.helpers.op_settings import PLAIN
from tests.helpers.pool import here, patience, pool_of

SEQUENCE_DIM = {"out": 1, "lse": 2, "dq": 1, "dk": 1, "dv": 1}


@dataclass(frozen=True, kw_only=True)
class Spread:
    """One call of all ranks. ``layout``: also ``"balanced"`` and ``"dealt"``, blocks dealt at random."""

    case: Case
    layout: str = "contiguous"
    head_steps: int | None = None
    seq_len_given: bool = True
    backend: str = "auto"


def layout_of(spread: Spread, world: int) -> str | Layout:
    case = spread.case
    N = case.num_keys
    if spread.layout == "balanced":
        return balanced_layout(case.pattern, N, world, case.heads, is_causal=case.is_causal)
    if spread.layout != "dealt":
        return spread.layout
    size = max(case.pattern.block_size)
    blocks = [(start, min(start + size, N)) for start in range(0, N, size)]
    owners = random.Random(case.seed).choices(range(world), k=len(blocks))
    return Layout(N, tuple(tuple(block for block, owner in zip(blocks, owners, strict=True) if owner == rank) for rank in range(world)))


def positions(N: int, rank: int, world: int, layout: str | Layout) -> torch.Tensor:
    return torch.cat([torch.arange(*span) for span in spans(N, rank, world, layout)])


def ring(case: Case, x: Inputs, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
    # all ranks are seeded alike, and as the one process is that the results are compared with
    torch.manual_seed(case.seed)
    options |= {
        "is_causal": case.is_causal,
        "scale": case.scale,
        "cu_seqlens": x.cu_seqlens,
        "key_padding_mask": x.key_padding_mask,
        "dropout_p": case.dropout_p,
        "return_lse": True,
        "timeout": patience(),
    }
    if case.branches is None:
        return ring_block_sparse_attention(q, k, v, case.pattern, **options)
    return ring_block_sparse_dilated_attention(q, k, v, pattern=case.pattern, **of_branches(case.branches), **options)


def local_inputs(x: Inputs, rows: torch.Tensor) -> Inputs:
    q, k, v, dout = (y[:, rows] for y in (x.q, x.k, x.v, x.dout))
    padding = None if x.key_padding_mask is None else x.key_padding_mask[:, rows]
    return Inputs(q, k, v, dout, x.dlse[..., rows], padding, x.cu_seqlens)


def run(rank: int, world: int, spreads: Sequence[Spread], dtype: torch.dtype = torch.float64) -> list[dict[str, torch.Tensor]]:
    found = []
    for spread in spreads:
        case, layout = spread.case, layout_of(spread, world)
        x = local_inputs(inputs(case, dtype, here()), positions(case.num_keys, rank, world, layout).to(here()))
        length = case.num_keys if spread.seq_len_given else None
        options = {"layout": layout, "seq_len": length, "head_steps": spread.head_steps, "backend": spread.backend}
        found.append({name: y.cpu() for name, y in results(ring, case, x, **options).items()})
    return found


def together(spread: Spread, parts: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The ranks' results as those of the whole sequence."""
    layout, whole = layout_of(spread, len(parts)), {}
    rows = torch.cat([positions(spread.case.num_keys, rank, len(parts), layout) for rank in range(len(parts))])
    for name in RESULTS:
        joined = torch.cat([part[name] for part in parts], SEQUENCE_DIM[name])
        whole[name] = torch.empty_like(joined).index_copy_(SEQUENCE_DIM[name], rows, joined)
    return whole


def check(world: int, spreads: Sequence[Spread], truth: Callable[..., Any] = plain) -> None:
    """``truth``: the definition, or what one process computes."""
    ranks = pool_of(world).run(run, list(spreads), timeout=120)
    for index, spread in enumerate(spreads):
        found = together(spread, [rank[index] for rank in ranks])
        for name, error in errors(found, results(truth, spread.case, inputs(spread.case))).items():
            assert error <= TOLERANCE, f"E({name}) = {error:.3g} on {world} ranks: {spread}"


def case_of(pattern: BlockPattern, N: int, **changes: Any) -> Case:
    options: dict[str, Any] = {"heads": 4, "kv_heads": 2} | changes
    return Case(pattern=pattern, num_queries=N, num_keys=N, **options)


# of the patterns that content does not choose
NAMES = [name for name in PATTERNS if not name.startswith("top")]


def of_every_pattern(world: int) -> list[Spread]:
    N = 64 * world + 70
    spreads = []
    for index, name in enumerate(NAMES):
        for is_causal in (False, True) if world > 1 else (index % 2 == 0,):
            block = [(64, 64), (128, 64), (64, 128), (128, 128)][(index + is_causal) % 4]
            layout = ["contiguous", "zigzag", "balanced", "dealt"][(index // 2 + is_causal) % 4]
            case = case_of(PATTERNS[name](N, block), N, heads=2, kv_heads=1 + index % 2, is_causal=is_causal, seed=index)
            spreads.append(Spread(case=case, layout=layout, head_steps=1 + index % 2))
    return spreads


@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_pattern(world: int) -> None:
    check(world, of_every_pattern(world))


N_BIG = 330
OPTIONS: dict[str, dict[str, Any]] = {
    "batch": {"batch": 3},
    "one head of keys": {"heads": 6, "kv_heads": 1},
    "causal": {"is_causal": True},
    "padding": {"batch": 2, "padding": True},
    "causal padding": {"batch": 2, "padding": True, "is_causal": True},
    "dropout": {"batch": 2, "dropout_p": 0.3},
    "scale": {"scale": 0.05},
    "documents": {"bounds": (0, 70, 70, 71, 201, N_BIG)},
    "causal documents of blocks": {"bounds": (0, 128, 256, N_BIG), "is_causal": True},
    "documents and dropout": {"bounds": (0, 151, N_BIG), "dropout_p": 0.2},
    "documents and padding": {"bounds": (0, 299, N_BIG), "padding": True, "is_causal": True},
}
SHARED, OF_HEADS = LocalWindow(40, block_size=64) | RandomBlocks(0.1, block_size=64), BigBird(30, 3, 1, block_size=(64, 128))


def of_every_option(world: int) -> list[Spread]:
    spreads = []
    for index, (name, options) in enumerate(OPTIONS.items()):
        pattern = [SHARED, OF_HEADS][(index + world) % 2]
        layout = ["contiguous", "zigzag", "balanced"][(index + world) % 3]
        case = case_of(pattern, N_BIG, **options, seed=index)
        spreads.append(Spread(case=case, layout=layout, head_steps=[None, 2][index % 2], seq_len_given=name != "scale"))
    return spreads


@pytest.mark.parametrize("world", [2, 5])
def test_every_option(world: int) -> None:
    check(world, of_every_option(world))


def test_documents_of_which_only_the_long_one_differs_between_heads() -> None:
    pattern = with_sparsity(0.3, "big_bird", block_size=64)
    assert pattern.at(1000).per_head and not pattern.at(300).per_head
    case = case_of(pattern, 1300, heads=2, bounds=(0, 300, 1300))
    check(2, [Spread(case=case), Spread(case=case, head_steps=2)])


def of_every_length(world: int) -> list[Spread]:
    """Nothing, fewer positions than ranks, than blocks, a block and one."""
    pattern = LocalWindow(20, block_size=64) | RandomBlocks(0.3, block_size=64)
    lengths = (0, 1, world - 1, 63, 64, 65, 64 * world, 64 * world + 1, 128 * world - 1)
    return [
        Spread(case=case_of(pattern, N, is_causal=N % 2 == 0), layout=layout, head_steps=1 + N % 2)
        for N in dict.fromkeys(lengths)
        for layout in (("contiguous", "zigzag", "balanced", "dealt") if (N < 64 and world < 4) or world == 3 else ("zigzag", "dealt"))
    ]


@pytest.mark.parametrize("world", [1, 3])
def test_every_length(world: int) -> None:
    check(world, of_every_length(world))


@st.composite
def some_spreads(draw: st.DrawFn, with_branches: bool = False) -> Spread:
    kv_heads = draw(st.integers(1, 3))
    heads = kv_heads * draw(st.integers(1, 2))
    N = draw(st.integers(0, 500))
    block = draw(st.sampled_from([(64, 64), (64, 128), (128, 64), (128, 128)]))
    bounds = (0, *sorted(draw(st.lists(st.integers(0, N), max_size=3))), N) if draw(st.integers(0, 3)) == 0 else None
    case = case_of(
        draw(some_patterns(heads, max(N, 1), block, any_length=True)),
        N,
        heads=heads,
        kv_heads=kv_heads,
        batch=1 if bounds else draw(st.integers(1, 2)),
        is_causal=draw(st.booleans()),
        bounds=bounds,
        padding=N > 0 and draw(st.integers(0, 3)) == 0,
        dropout_p=draw(st.sampled_from([0.0, 0.0, 0.4])),
        branches=draw(some_branches(heads)) if with_branches else None,
        seed=draw(st.integers(0, 99)),
    )
    layout = draw(st.sampled_from(["contiguous", "zigzag", "balanced", "dealt"]))
    head_steps = draw(st.none() | st.integers(1, 3))
    return Spread(case=case, layout=layout, head_steps=head_steps, seq_len_given=draw(st.booleans()))


@settings(max_examples=25)
@given(st.sampled_from((1, 2, 3, 4)), some_spreads())
def test_anything_with_anything(world: int, spread: Spread) -> None:
    check(world, [spread])


# --- what travels ----------------------------------------------------------------------------------------------------------------


def measured(rank: int, world: int, spreads: Sequence[Spread], dtype: torch.dtype) -> list[tuple[Bytes, dict[int, int]]]:
    """Bytes of forward and backward, and of the forward those sent to each peer."""
    found = []
    for spread in spreads:
        case, layout = spread.case, layout_of(spread, world)
        x = local_inputs(inputs(case, dtype), positions(case.num_keys, rank, world, layout))
        leaves = [y.detach().requires_grad_() for y in (x.q, x.k, x.v)]
        with traffic() as forward:
            out, lse = ring(case, x, *leaves, layout=layout, seq_len=case.num_keys, head_steps=spread.head_steps)
        with traffic() as backward:
            torch.autograd.grad([out, lse], leaves, [x.dout, x.dlse])
        found.append((Bytes(forward.sent, forward.received, backward.sent, backward.received), dict(forward.sent_to)))
    return found


def of_every_holder(world: int) -> list[Spread]:
    spreads = []
    for N in (64 * world, 64 * world + 37, world - 1):
        patterns = [
            LocalWindow(40, block_size=64),
            GlobalLocal(20, 70, block_size=64),
            RandomBlocks(0.3, block_size=(64, 128)),
            BigBird(30, 3, 1, block_size=(128, 64)),
            PerHead((LocalWindow(1), LocalWindow(150), RandomBlocks(0.2, seed=1), RandomBlocks(0.4, seed=2))),
        ]
        for index, pattern in enumerate(patterns):
            for layout in ("contiguous", "zigzag", "balanced", "dealt")[index % 2 :: 2]:
                case = case_of(pattern, N, batch=2, is_causal=index % 2 == 0, head_dim=3)
                spreads.append(Spread(case=case, layout=layout, head_steps=1 + index % 2))
    return spreads


def check_bytes(world: int, spreads: Sequence[Spread]) -> None:
    dtype = torch.float32 if world % 2 else torch.float64
    ranks = pool_of(world).run(measured, list(spreads), dtype)
    for index, spread in enumerate(spreads):
        case, layout = spread.case, layout_of(spread, world)
        sizes = CommSizes(case.heads, case.kv_heads, case.head_dim, case.batch, dtype.itemsize, dtype.itemsize)
        steps = even(case.kv_heads, spread.head_steps or 1)
        for rank in range(world):
            branches = None if case.branches is None else (case.branches.segment_lengths, case.branches.dilation_rates)
            options: dict[str, Any] = {"is_causal": case.is_causal, "head_steps": steps, "branches": branches}
            want = block_bytes(case.pattern, case.num_keys, world, rank, layout, sizes, **options)
            assert ranks[rank][index][0] == want, f"rank {rank} of {world}: {spread}"


@pytest.mark.parametrize("world", [2, 3])
def test_bytes_on_the_wire_are_those_of_the_formula(world: int) -> None:
    check_bytes(world, of_every_holder(world))


def test_a_window_asks_neighbours_only_and_nothing_of_others() -> None:
    """By hand: windows of 64 on four shards of two blocks: one block of each neighbour, K and V of 2 heads of 3 floats."""
    spread = Spread(case=case_of(LocalWindow(64, block_size=64), 512, head_dim=3))
    block = 2 * 64 * 2 * 3 * 4
    ranks = pool_of(4).run(measured, [spread], torch.float32)
    assert [found[0][1] for found in ranks] == [{1: block}, {0: block, 2: block}, {1: block, 3: block}, {2: block}]
    causal = replace(spread, case=replace(spread.case, is_causal=True))
    ranks = pool_of(4).run(measured, [causal], torch.float32)
    assert [found[0][1] for found in ranks] == [{1: block}, {2: block}, {3: block}, {}]


def test_a_pattern_that_stays_at_home_moves_nothing() -> None:
    spreads = [
        Spread(case=case_of(LocalWindow(500, block_size=64), 512, bounds=(0, 128, 256, 384, 512))),
        Spread(case=case_of(RandomBlocks(0.0, block_size=64), 512)),
    ]
    for found in pool_of(4).run(measured, spreads, torch.float32):
        assert all(total == Bytes(0, 0, 0, 0) and not sent for total, sent in found)


# --- calls that are refused ------------------------------------------------------------------------------------------------------


def by_other_table(batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return (query // 64 + key // 64) % 3 == 0


DISAGREEMENTS = ("call", "pattern", "block_size", "function", "is_causal", "head_steps", "layout", "backend")


def disagreeing(rank: int, world: int, which: str, length: int) -> str:
    # a length of its own for each case: what ranks have agreed on once is not compared again
    q = torch.zeros(1, length, 2, 4, device=here())
    odd = rank == world - 1
    pattern: BlockPattern = LocalWindow(40, block_size=64)
    options: dict[str, Any] = {}
    if which == "pattern":
        pattern = LocalWindow(41 if odd else 40, block_size=64)
    elif which == "block_size":
        pattern = LocalWindow(40, block_size=128 if odd else 64)
    elif which == "function":
        pattern = MaskFunction(by_other_table if odd else by_table, block_size=64)
    elif which == "backend":
        options["backend"] = "flash4" if odd else "auto"
    elif which != "call":
        options[which] = {"is_causal": odd, "head_steps": 2 if odd else 1, "layout": "zigzag" if odd else "contiguous"}[which]
    try:
        if which == "call" and odd:
            ring_attention(q, q, q, seq_len=length * world, timeout=patience())
        ring_block_sparse_attention(q, q, q, pattern, seq_len=length * world, timeout=patience(), **options)
    except (ValueError, BackendUnavailable) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize(
    ("which", "words"),
    [
        ("call", "ranks disagree on function: ranks 0, 1 have ring_block_sparse_attention, rank 2 has ring_attention"),
        ("pattern", "ring_block_sparse_attention: ranks disagree on pattern: ranks 0, 1 have .*40.*, rank 2 has .*41"),
        ("block_size", "block_size: ranks 0, 1 have .64, 64., rank 2 has .128, 128."),
        ("function", "ranks disagree on pattern .the blocks that its function keeps."),
        ("is_causal", "ranks disagree on is_causal: ranks 0, 1 have False, rank 2 has True"),
        ("head_steps", "ranks disagree on head_steps: ranks 0, 1 have 1, rank 2 has 2"),
        ("layout", "ranks disagree on layout: ranks 0, 1 have contiguous, rank 2 has zigzag"),
        ("backend", "ranks disagree on kernels: ranks 0, 1 have available, rank 2 has unavailable: backend='flash4'"),
    ],
)
def test_ranks_that_disagree_all_raise_the_same(which: str, words: str) -> None:
    texts = pool_of(3).run(disagreeing, which, 64 + DISAGREEMENTS.index(which))
    assert len(set(texts)) == 1, texts
    assert re.search(words, texts[0]), texts[0]
    # and the group goes on
    check(3, [Spread(case=case_of(SHARED, 100))])


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"pattern": 3}, TypeError, "pattern is 3"),
        ({"pattern": TopBlocks(2, block_size=64)}, ValueError, "chosen by content; the processes of a ring find what to exchange"),
        ({"layout": "striped"}, ValueError, "layout is 'striped', which spreads every block over all processes"),
        ({"layout": "diagonal"}, ValueError, "layout is 'diagonal'; expected one of 'contiguous', 'zigzag' or a Layout"),
        ({"layout": Layout(32, (((0, 32),),))}, ValueError, "layout is for 32 positions on 1 processes, the sequence has 64 on 1"),
        ({"head_steps": 0}, ValueError, "head_steps is 0; expected an integer ≥ 1"),
        ({"timeout": 0}, ValueError, "timeout is 0"),
        ({"seq_len": 65}, ValueError, r"the group's ranks hold \[64\] positions; a contiguous sequence of 65 has \[65\]"),
        ({"v": torch.zeros(1, 63, 2, 4)}, ValueError, "k has shape"),
        ({"q": torch.zeros(1, 63, 2, 4)}, ValueError, "q has 63 rows and k has 64"),
        ({"pattern": PerHead((LocalWindow(3),) * 3)}, ValueError, "PerHead got 3 patterns for 2 heads"),
        ({"backend": "flash4"}, BackendUnavailable, "flash4"),
    ],
)
def test_bad_input_is_refused(changes: dict[str, Any], error: type[Exception], words: str) -> None:
    x = torch.zeros(1, 64, 2, 4)
    arguments: dict[str, Any] = {"q": x, "k": x, "v": x, "pattern": LocalWindow(40, block_size=64)} | changes
    with pytest.raises(error, match=words):
        ring_block_sparse_attention(**arguments)


# --- the module ------------------------------------------------------------------------------------------------------------------


def module(rank: int, world: int) -> None:
    N = 64 * world + 9
    pattern = BigBird(30, 3, 1, block_size=64)
    layout = balanced_layout(pattern, N, world, 4, is_causal=True)
    whole = [torch.randn(2, N, heads, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(heads)) for heads in (4, 2, 2)]
    whole = [x.to(here()) for x in whole]
    q, k, v = (x.requires_grad_() for x in shard_sequence(None, whole, [1, 1, 1], layout=layout))
    layer = RingBlockSparseAttention(pattern, layout=layout, timeout=patience())
    made = create_attention("ring_block_sparse", pattern=pattern, layout=layout, timeout=patience())
    (want,) = shard_sequence(None, [block_sparse_attention(*whole, pattern, is_causal=True)], [1], layout=layout)
    out = layer(q, k, v, is_causal=True, seq_len=N)
    torch.testing.assert_close(out, want, atol=1e-12, rtol=0)
    torch.testing.assert_close(made(q, k, v, is_causal=True, seq_len=N), want, atol=1e-12, rtol=0)
    grads = torch.autograd.grad(out.sin().sum(), (q, k, v))
    torch._dynamo.reset()
    fast = torch.compile(layer, fullgraph=True, backend="aot_eager")
    again = fast(q, k, v, is_causal=True, seq_len=N)
    torch.testing.assert_close(again, out)
    torch.testing.assert_close(torch.autograd.grad(again.sin().sum(), (q, k, v)), grads)
    # without a length the op itself asks for it
    torch.testing.assert_close(fast(q, k, v, is_causal=True), out)
    copy = pickle.loads(pickle.dumps(layer))
    torch.testing.assert_close(copy(q, k, v, is_causal=True, seq_len=N), out)
    assert "BigBird" in repr(layer) and "layout='runs:" in repr(layer)
    # bf16 and a gradient of lse that some ranks do not use
    half = [x.detach().bfloat16().requires_grad_() for x in (q, k, v)]
    out, lse = layer(*half, return_lse=True, seq_len=N)
    assert out.dtype is torch.bfloat16 and lse.dtype is torch.float32
    assert all(grad.dtype is torch.bfloat16 for grad in torch.autograd.grad(lse.sum() if rank else out.sum(), half))


@pytest.mark.parametrize("world", [1, 2])
def test_the_module(world: int) -> None:
    pool_of(world).run(module)


# --- its parts -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "N", "world", "is_causal", "kind"),
    [
        (LocalWindow(300), 128 * 256, 4, False, "contiguous"),
        (LocalWindow(300), 128 * 256, 4, True, "contiguous"),
        (Causal(), 128 * 64, 4, False, "zigzag"),
        (RandomBlocks(0.4), 128 * 192 + 5, 2, True, "zigzag"),
        (Document((128 * 320, 128 * 80, 128 * 80, 128 * 32)), 128 * 512, 4, False, "dealt"),
        (Strided(7) & Causal(), 128 * 61, 5, False, "any"),
        (LocalWindow(5), 100, 4, False, "any"),
        (LocalWindow(5), 0, 3, False, "contiguous"),
    ],
)
def test_balanced_layouts(pattern: BlockPattern, N: int, world: int, is_causal: bool, kind: str) -> None:
    layout = balanced_layout(pattern, N, world, is_causal=is_causal)
    blocks = [sum(-(-(end - start) // 128) for start, end in runs) for runs in layout.runs]
    assert layout.size == world and max(blocks) - min(blocks) <= 1
    assert all(start % 128 == 0 for runs in layout.runs for start, _ in runs)
    if kind != "any":
        assert layout.imbalance <= 1.02
        # by the definition: pairs of kept blocks, here all of 128
        rows = pattern.entries(N, 1).row if not is_causal else pattern.at(N).causal().entries(N, 1).row
        loads = [sum(int(((rows >= a // 128) & (rows < -(-b // 128))).sum()) for a, b in runs) for runs in layout.runs]
        assert N == 0 or max(loads) * world / sum(loads) == pytest.approx(layout.imbalance, rel=0.01)
    longest = max(len(runs) for runs in layout.runs)
    assert longest <= {"contiguous": 1, "zigzag": 2}.get(kind, 64)
    if kind == "dealt":
        assert longest > 1
    assert [Layout(N, layout.runs).name == layout.name] and spans(N, 0, world, layout.name) == spans(N, 0, world, layout)


def test_a_layout_says_what_its_runs_lack() -> None:
    for runs, words in (
        ((((0, 5),), ((6, 9),)), "leave out position 5"),
        ((((0, 5),), ((4, 9),)), "hold twice position 4"),
        ((((0, 5),), ((5, 8),)), "end at position 8 of a sequence of 9"),
        ((((5, 9), (0, 5)),), "ascending"),
        ((), "expected the runs of at least one process"),
    ):
        with pytest.raises(ValueError, match=words):
            Layout(9, runs)


def test_a_layout_shards_and_unshards() -> None:
    layout = Layout(9, (((0, 2), (7, 9)), ((2, 7),)))
    assert [x.tolist() for x in pool_of(2).run(shards, layout)] == [[0, 1, 7, 8], [2, 3, 4, 5, 6]]
    with pytest.raises(ValueError, match="the sequence has 9 on 1"):
        shard_sequence(None, [torch.arange(9)], [0], layout=layout)


def shards(rank: int, world: int, layout: Layout) -> torch.Tensor:
    (mine,) = shard_sequence(None, [torch.arange(9)], [0], layout=layout)
    (whole,) = unshard_sequence(None, [mine], [0], layout=layout)
    assert whole.tolist() == list(range(9)) and local_positions(None, 9, layout=layout).tolist() == mine.tolist()
    return mine


def test_intervals_move_with_their_blocks() -> None:
    """A window's masks are intervals; in a buffer they stay so while its blocks lie in order, and become bits where they do not."""
    lists = block_lists(LocalWindow(100, block_size=64), 64 * 8, 1, device="cpu")
    assert lists.mask_kind == "interval"
    gone = torch.tensor([-1, -1, 0, 1, 2, 3, 4, 5])
    rows = select_rows(lists, torch.arange(4, 6))
    moved = lists_of_buffer(rows, gone, 64 * 6)
    assert moved.mask_kind == "interval" and moved.interval is not None and rows.interval is not None
    assert torch.equal(moved.interval[0], rows.interval[0] - 128)
    assert torch.equal(moved.interval[1], rows.interval[1] - 128)
    swapped = torch.tensor([-1, -1, 3, 4, 5, 0, 1, 2])
    assert lists_of_buffer(rows, swapped, 64 * 6).mask_kind == "bits"
    # only the diagonal is masked, wherever it lies
    causal = block_lists(RandomBlocks(0.5, block_size=64), 64 * 8, 1, is_causal=True, device="cpu")
    anywhere = torch.randperm(8, generator=torch.Generator().manual_seed(0))
    assert lists_of_buffer(causal, anywhere, 64 * 8).mask_kind == "interval"


@pytest.mark.parametrize("seed", range(4))
def test_joined_rows_are_those_of_the_whole(seed: int) -> None:
    pattern = [SHARED, OF_HEADS, RandomBlocks(0.3, block_size=64), LocalWindow(9, block_size=64)][seed]
    whole = block_lists(pattern, 600, 2, is_causal=seed % 2 == 0, device="cpu")
    q_block = pattern.q_block
    parts = [
        block_lists(pattern, 600, 2, first_query=first, num_queries=last - first, is_causal=seed % 2 == 0, device="cpu")
        for first, last in ((0, 2 * q_block), (3 * q_block, 600))
    ]
    joined = join_rows(parts)
    want = select_rows(whole, torch.tensor([row for row in range(whole.num_rows) if row != 2]))
    assert torch.equal(joined.row_starts, want.row_starts) and torch.equal(joined.columns, want.columns)
    assert joined.num_queries == want.num_queries and joined.mask_kind == want.mask_kind
    if joined.masks is not None and want.masks is not None:
        kept = joined.masks >= 0
        assert torch.equal(kept, want.masks >= 0)
        assert torch.equal(joined.bits[joined.masks[kept].long()], want.bits[want.masks[kept].long()])


@pytest.mark.parametrize("seed", range(6))
def test_steps_hold_every_head_and_the_model_prefers_the_faster(seed: int) -> None:
    rng = random.Random(seed)
    load = TransferLoad(rng.choice([1, 8, 16, 12]), rng.uniform(1e-5, 1e-3), rng.uniform(1e-6, 1e-4), rng.randint(10**5, 10**8), 10**8)
    way = choose(load, 10**12)
    assert sum(way.steps) == load.heads and min(way.steps) >= 1
    assert all(seconds(load, way) <= seconds(load, replace(way, steps=(load.heads,), lane=lane)) for lane in LANES)
    assert choose(load, 10**12, 3).steps == even(load.heads, 3)
    # too little memory for more than a head at a time
    assert choose(load, 10**8).steps == (1,) * load.heads
    assert choose(replace(load, brought=0), 10**12).steps == (load.heads,)


def test_a_window_starts_with_few_heads_and_random_blocks_grow() -> None:
    """Of 16 heads of 128 on 4 GPUs of 32,768 tokens at 10 %: what is waited for is a head's keys."""
    compute, launch = 0.366e-3, 0.114e-3
    window, everything = (
        choose(TransferLoad(16, compute, launch, brought, 67 * 10**6), 141 * 10**9) for brought in (7 * 10**6, 50 * 10**6)
    )
    assert window.steps[0] <= 2 and len(window.steps) == 2
    assert everything.steps[0] <= 2 and list(everything.steps) == sorted(everything.steps)
    assert everything.lane.most_ctas is None


def test_short_calls_take_few_steps() -> None:
    """Random blocks of 10 %, 16 heads of 64 on 2 GPUs: in three steps a forward waits for the host, 3.0 ms against 2.3 of the GPU."""
    long, short = (TransferLoad(16, compute, launch, brought, 2 * brought) for compute, launch, brought in (
        (9.2e-5, 4.4e-5, 8_388_608), (5.7e-6, 2.6e-5, 2_093_056),
    ))  # fmt: skip
    assert len(choose(long, 80 * 10**9).steps) == 2 and choose(short, 80 * 10**9).steps == (16,)


@pytest.mark.parametrize("pattern", [LocalWindow(70, block_size=64), LocalWindow(70, block_size=64) & Causal(block_size=64)])
def test_windows_stay_intervals_on_every_rank(pattern: BlockPattern) -> None:
    """Kernels that take intervals, not bits, are for them: also where a zigzag's runs lie in the buffer in another order."""
    N, world = 64 * 24, 4
    for layout in ("contiguous", "zigzag"):
        shards = tuple(ascending_runs(spans(N, rank, world, layout)) for rank in range(world))
        ring_problem = RingBlockProblem(pattern, ((0, N),), shards, 2, 1, False)
        for rank in range(world):
            _, ((part,),), _ = make_block_steps(ring_problem, rank, (1,), torch.device("cpu"), None, PLAIN)
            assert part.lists.mask_kind == "interval"


def test_steps_of_heads_without_masks_ask_for_none() -> None:
    pattern = PerHead((LocalWindow(70, block_size=64), RandomBlocks(0.5, block_size=64)))
    ring_problem = RingBlockProblem(pattern, ((0, 512),), (((0, 512),),), 2, 2, False)
    _, parts, _ = make_block_steps(ring_problem, 0, (1, 1), torch.device("cpu"), None, PLAIN)
    assert [part.lists.mask_kind for some in parts for part in some] == ["interval", "none"]


def test_setups_are_forgotten_when_their_lists_take_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup, "MAX_CACHED_BYTES", 1)
    x = torch.randn(1, 130, 1, 4)
    for window in (3, 4, 5):
        ring_block_sparse_attention(x, x, x, LocalWindow(window, block_size=64))
        assert len(setup._setups) == 1
    kept = next(iter(setup._setups.values()))
    ring_block_sparse_attention(x, x, x, LocalWindow(5, block_size=64))
    assert next(iter(setup._setups.values())) is kept
