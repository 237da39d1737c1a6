"""Block patterns: each against loops over the sentence that defines it; counts, densities, strings, BlockMask, errors."""

import copy
import gc
import importlib
import pickle
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from dilated_attention import pattern as patterns
from dilated_attention.backends import AttentionRequest
from dilated_attention.engine.blocks.lists import block_lists
from dilated_attention.engine.ops.settings import as_dense, dense_form
from dilated_attention.factory import EXAMPLES
from dilated_attention.pattern import (
    Axial,
    BigBird,
    BlockPattern,
    BlockTensor,
    Causal,
    DilatedBlocks,
    Document,
    GlobalLocal,
    LocalWindow,
    MaskFunction,
    PerHead,
    RandomBlocks,
    Strided,
    TopBlocks,
    from_block_mask,
    pattern_from_spec,
    to_block_mask,
    with_sparsity,
)
from dilated_attention.pattern.blocks import base
from dilated_attention.pattern.blocks.compose import KINDS, Intersection
from dilated_attention.testing.cases import random_blocks
from tests.helpers.op_settings import settings as settings_of_call
from tests.helpers.pattern_cases import BLOCK_SIZES, HEADS, compositions, lattice, listed, pairs_of


def blocks_of(pattern: BlockPattern, n: int, head: int = 0, heads: int = HEADS) -> list[list[int]]:
    """The kept columns of each row, by the definition; every block whole or absent."""
    mask = pattern.dense_mask(n, n, heads)[head]
    found = []
    for q in range(0, n, pattern.q_block):
        kept = [mask[q : q + pattern.q_block, k : k + pattern.k_block] for k in range(0, n, pattern.k_block)]
        assert all(bool(tile.all()) or not bool(tile.any()) for tile in kept)
        found.append([column for column, tile in enumerate(kept) if tile.any()])
    return found


def own(row: int, n: int, q_block: int, k_block: int) -> list[int]:
    """Key blocks that hold positions of a query block."""
    return sorted({p // k_block for p in range(row * q_block, min((row + 1) * q_block, n))})


# --- definitions, by loops over positions or blocks ---


@pytest.mark.parametrize("n", [150, 65, 1])
@pytest.mark.parametrize(
    ("pattern", "keeps"),
    [
        (LocalWindow(7), lambda i, j: abs(i - j) <= 7),
        (LocalWindow((3, 20)), lambda i, j: i - 3 <= j <= i + 20),
        (Causal(), lambda i, j: j <= i),
        (Document([3, 0, 2, 145]), lambda i, j: (i >= 3) + (i >= 5) == (j >= 3) + (j >= 5)),
        (GlobalLocal(4, 10), lambda i, j: abs(i - j) <= 4 or i < 10 or j < 10),
        (MaskFunction(lambda b, h, q, k: (q + k) % 3 == 0), lambda i, j: (i + j) % 3 == 0),
    ],
)
def test_patterns_of_positions(pattern: BlockPattern, keeps: Callable[[int, int], bool], n: int) -> None:
    wanted = torch.tensor([[keeps(i, j) for j in range(n)] for i in range(n)])
    if isinstance(pattern, Document):
        pattern = Document([*pattern.lengths[:3], n - 5] if n > 5 else [n])
    for is_causal in (False, True):
        wanted = wanted.tril() if is_causal else wanted
        mask = pattern.dense_mask(n, n, 3, is_causal=is_causal)
        assert mask.dtype is torch.bool and mask.shape == (3, n, n) and mask.is_contiguous()
        assert torch.equal(mask, wanted.expand(3, n, n))
        if n > 64:
            part = pattern.dense_mask(n - 64, n, 3, is_causal=is_causal, query_offset=64)
            assert torch.equal(part, wanted[64:].expand(3, n - 64, n))
            # the queries tell how many positions there are
            part = pattern.dense_mask(n - 64, 40, 3, is_causal=is_causal, query_offset=64)
            assert torch.equal(part, wanted[64:, :40].expand(3, n - 64, 40))


class Near(LocalWindow):
    """A window of a user, which keeps other pairs than its base class."""


class Both(Intersection):
    """An intersection of a user, which keeps other pairs than its base class."""


@pytest.mark.parametrize(
    ("pattern", "window"),
    [
        (LocalWindow((3, 20)), (3, 20)),
        (LocalWindow((None, 5)), (None, 5)),
        (LocalWindow((None, None)), (None, None)),
        (Causal(), (None, 0)),
        (LocalWindow((9, 4)) & LocalWindow((4, 9)) & Causal(), (4, 0)),
        (LocalWindow(9) | LocalWindow(4), None),
        (LocalWindow(9) & Document((40, 60)), None),
        (GlobalLocal(9, 3), None),
        (BigBird(9, 0, 1), None),
        (PerHead((LocalWindow(9),) * 2), None),
        (Near(9), None),
        (Both((LocalWindow(9), Causal())), None),
    ],
)
@pytest.mark.parametrize("is_causal", [False, True])
def test_windows_of_dense_attention(pattern: BlockPattern, window: tuple[int | None, int | None] | None, is_causal: bool) -> None:
    """Of the patterns that are one, dense attention with this window and causality keeps the same pairs."""
    assert pattern.dense_window == window
    asked = AttentionRequest(hardware=EXAMPLES["hopper"], dtype=torch.bfloat16, head_dim=64)
    form = dense_form(pattern, is_causal, asked)
    if window is None:
        assert form is None
        return
    assert form is not None
    sides, causal = form
    left, right = (100 if side < 0 else side for side in sides or (-1, -1))
    distance = torch.arange(100)[None] - torch.arange(100)[:, None]
    kept = (distance >= -left) & (distance <= (0 if causal else right))
    assert torch.equal(pattern.dense_mask(100, 100, 1, is_causal=is_causal)[0], kept)


def test_lists_of_blocks_compute_windows_where_own_kernels_do_not() -> None:
    """On CPUs, older GPUs, in float64 and large float32 heads, with softcap; and where a backend is named."""
    asked = AttentionRequest(hardware=EXAMPLES["hopper"], dtype=torch.bfloat16, head_dim=64)
    for other in (
        {"hardware": EXAMPLES["cpu"]},
        {"hardware": EXAMPLES["turing"]},
        {"hardware": replace(EXAMPLES["hopper"], packages=frozenset())},
        {"dtype": torch.float64},
        {"dtype": torch.float32, "head_dim": 256},
        {"softcap": True},
    ):
        assert dense_form(LocalWindow(4), False, replace(asked, **other)) is None, other
    call = settings_of_call(branches=None, blocks=LocalWindow(4).spec())
    assert as_dense(call, torch.empty(1, 1, 1, 64)) == call


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("n", [100, 1300])
def test_patterns_of_blocks(n: int, block_size: int | tuple[int, int]) -> None:
    rows, columns = (-(-n // size) for size in (LocalWindow(0, block_size=block_size).block_size))  # type: ignore[union-attr]
    q_block, k_block = LocalWindow(0, block_size=block_size).block_size  # type: ignore[misc]
    for stride, local in ((3, 1), (4, 2), (1, 0), (50, 0)):
        found = blocks_of(Strided(stride, local, block_size=block_size), n)
        for row in range(rows):
            mine = own(row, n, q_block, k_block)
            assert found[row] == [c for c in range(columns) if any(abs(c - o) < local or (c - o) % stride == 0 for o in mine)]
    for dilation, number in ((1, 3), (2, 4), (3, 1), (5, 100)):
        found = blocks_of(DilatedBlocks(dilation, number, block_size=block_size), n)
        steps = range(-(number // 2), number - number // 2)
        for row in range(rows):
            wanted = {o + t * dilation for o in own(row, n, q_block, k_block) for t in steps}
            assert found[row] == sorted(c for c in wanted if 0 <= c < columns)
    for width in (30, 64, 128, 200, 256, 5000):
        found = blocks_of(Axial(width, block_size=block_size), n)
        places = [(p // width, p % width) for p in range(n)]
        for row in range(rows):
            mine = places[row * q_block : (row + 1) * q_block]
            picture_rows, picture_columns = ({place[axis] for place in mine} for axis in (0, 1))
            wanted = [
                c
                for c in range(columns)
                if any(r in picture_rows or s in picture_columns for r, s in places[c * k_block : (c + 1) * k_block])
            ]
            assert found[row] == wanted


@given(
    ratio=st.floats(0, 1),
    seed=st.integers(0, 2**40),
    n=st.integers(1, 2000),
    block_size=st.sampled_from(BLOCK_SIZES),
    own_block=st.booleans(),
)
@settings(max_examples=60)
def test_random_blocks(ratio: float, seed: int, n: int, block_size: int | tuple[int, int], own_block: bool) -> None:
    pattern = RandomBlocks(ratio, seed, own_block=own_block, block_size=block_size)
    rows, columns = -(-n // pattern.q_block), -(-n // pattern.k_block)
    group, row, column, _ = listed(pattern, n, 3)
    total = round(ratio * rows * columns)
    assert torch.bincount(group, minlength=3).tolist() == [total] * 3
    for head in range(3):
        counts = torch.bincount(row[group == head], minlength=rows)
        assert counts.max() - counts.min() <= 1
    if own_block:
        mine = row * pattern.q_block // pattern.k_block
        has_own = torch.zeros(3 * rows, dtype=torch.bool).index_put((group * rows + row,), column == mine, accumulate=True)
        assert int(has_own.sum()) == 3 * int((counts > 0).sum())


def test_big_bird_adds_random_blocks_that_nothing_else_reaches() -> None:
    def columns(pattern: BlockPattern, head: int) -> list[set[int]]:
        group, rows, column, _ = listed(pattern, 128 * 40)
        return [{*column[(group == head) & (rows == row)].tolist()} for row in range(40)]

    near = columns(GlobalLocal(200, 128), 0)
    for number in (1, 3, 8, 100, 2**62):
        for head in range(2):
            drawn = columns(BigBird(200, 128, number, seed=3), head)
            assert all(a <= b and len(b) - len(a) == min(number, 40 - len(a)) for a, b in zip(near, drawn, strict=True))


@pytest.mark.parametrize(
    ("pattern", "columns"),
    [
        (RandomBlocks(0.2, 11), "40662416034077172370410707"),
        (BigBird(100, 0, 2, seed=5), "0125012371234602345234572345614567136701360125701236012340234512456125671367"),
    ],
)
def test_draws_are_those_of_any_process(pattern: BlockPattern, columns: str) -> None:
    assert "".join(map(str, listed(pattern, 1000)[2].tolist())) == columns


# --- counts ---


def test_pairs_of_long_sequences_in_closed_form() -> None:
    n = 2**20 + 77
    assert LocalWindow(1000).pairs(n, 16) == 16 * (n * 2001 - 1000 * 1001)
    assert LocalWindow(1000).pairs(n, is_causal=True) == n * 1001 - 1000 * 1001 // 2
    assert RandomBlocks(0.001, 3).pairs(128 * 4096, 2) == 2 * round(0.001 * 4096**2) * 128**2
    # a 64-bit count
    assert GlobalLocal(0, 2**16).pairs(2**17, 16) == 16 * (2**34 - 2**32 + 2**16)


@given(
    ratio=st.floats(0.0005, 1),
    kind=st.sampled_from(KINDS),
    n=st.integers(1, 9000),
    block_size=st.sampled_from(BLOCK_SIZES),
    seed=st.integers(0, 99),
)
@settings(max_examples=150)
def test_sparsity_has_the_density_it_says(ratio: float, kind: str, n: int, block_size: int | tuple[int, int], seed: int) -> None:
    pattern = with_sparsity(ratio, kind, block_size=block_size, seed=seed if kind in ("random", "big_bird") else 0)
    # a row of dilated blocks keeps its own ones, which may be two, whatever the ratio
    assert abs(pattern.density(n, 2) - ratio) <= (max(pattern.block_size) if kind == "dilated" else pattern.k_block) / n + 1e-12
    # no query without keys
    assert bool(torch.bincount(listed(pattern, n, 1)[1], minlength=-(-n // pattern.q_block)).all())
    assert pattern.at(n).density(n, 2) == pattern.density(n, 2)


def test_sparsity_of_causal_pairs_and_of_unions() -> None:
    made = {"random": RandomBlocks, "local": LocalWindow, "dilated": DilatedBlocks, "global_local": GlobalLocal, "big_bird": BigBird}
    for pattern in (with_sparsity(ratio, kind) for kind in KINDS for ratio in (0.05, 0.5)):
        assert type(pattern.at(32768)) is made[pattern.kind]
        # as much of the causal pairs: of the triangle there is half
        assert pattern.density(32768, is_causal=True) == pytest.approx(pattern.density(32768) / 2, rel=0.12)
        assert (pattern | Causal()).at(32768) == pattern.at(32768) | Causal()


# --- strings ---


@given(pattern=compositions(300, 64))
@settings(max_examples=100)
def test_specs_copies_and_pickles(pattern: BlockPattern) -> None:
    again = pattern_from_spec(pattern.spec())
    assert again == pattern and hash(again) == hash(pattern) and again.spec() == pattern.spec()
    if not pattern.is_bound_to_process:
        assert pickle.loads(pickle.dumps(pattern)) == copy.deepcopy(pattern) == pattern
        assert pattern._parts or eval(repr(pattern), vars(patterns)) == pattern
    # configurations of models hold them
    assert LocalWindow(3).spec() == '{"pattern":"LocalWindow","block_size":[128,128],"window":[3,3]}'


def test_a_pattern_that_has_gone() -> None:
    pattern = BlockTensor(torch.ones(2, 2, dtype=torch.bool)) | LocalWindow(3)
    spec = pattern.spec()
    assert "object:" in spec and pattern_from_spec(spec) == pattern
    del pattern
    gc.collect()
    with pytest.raises(
        RuntimeError, match="holds a function or a tensor and has been freed, or was made by another process; keep a reference"
    ):
        pattern_from_spec(spec)


def test_patterns_are_records() -> None:
    assert LocalWindow(3) == LocalWindow((3, 3)) != LocalWindow(4)
    assert (LocalWindow(3) | Causal()) | Strided(2) == LocalWindow(3) | (Causal() | Strided(2))
    table = torch.ones(2, 2, dtype=torch.bool)
    first, second = (BlockTensor(table) for _ in range(2))
    table.zero_()
    assert first.pairs(256) == 256**2
    assert first != second and len({first, second, first}) == 2


# --- a pattern of one's own ---


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_new_pattern_needs_one_method(is_causal: bool) -> None:
    @dataclass(frozen=True)
    class Checkers(BlockPattern):
        """Fields of 150 × 70 positions, as on a chess board: full, empty and partial blocks, and blocks that a short end completes."""

        def allowed(self, queries: torch.Tensor, keys: torch.Tensor, heads: torch.Tensor, num_positions: int) -> torch.Tensor:
            return (queries // 150 + keys // 70 + heads) % 2 == 0

    class OfNoHead(Checkers):
        def allowed(self, queries: torch.Tensor, keys: torch.Tensor, heads: torch.Tensor, num_positions: int) -> torch.Tensor:
            return (queries // 150 + keys // 70) % 2 == 0

    checkers = Checkers(block_size=64)
    # nobody has to say it: lists of head 0 were once those of all
    assert checkers.per_head and not OfNoHead(block_size=64).per_head

    class ByNumpy(Checkers):
        def allowed(self, queries: torch.Tensor, keys: torch.Tensor, heads: torch.Tensor, num_positions: int) -> torch.Tensor:
            return (queries + keys + torch.from_numpy(heads.numpy())) % 2 == 0

    class LongAlone(Checkers):
        def allowed(self, queries: torch.Tensor, keys: torch.Tensor, heads: torch.Tensor, num_positions: int) -> torch.Tensor:
            return (queries + keys + (heads if num_positions > 64 and self.per_head else 0)) % 2 == 0

    assert ByNumpy(block_size=64).per_head and LongAlone(block_size=64).per_head
    for n in (1, 64, 300, 515):
        for pattern in (checkers, checkers | LocalWindow(40, block_size=64), checkers & LocalWindow(200, block_size=64)):
            mask = pattern.dense_mask(n, n, HEADS, is_causal=is_causal)
            assert pattern.pairs(n, HEADS, is_causal=is_causal) == int(mask.sum())
    assert any(listed(checkers, 515)[3])


# --- BlockMask ---


@given(data=st.data(), n=st.sampled_from((300, 512, 515)), block_size=st.sampled_from(BLOCK_SIZES), is_causal=st.booleans())
@settings(max_examples=60)
def test_to_block_mask(data: st.DataObject, n: int, block_size: int | tuple[int, int], is_causal: bool) -> None:
    pattern = data.draw(compositions(n, block_size))
    block_mask = to_block_mask(pattern, n, HEADS, is_causal=is_causal)
    wanted = pattern.dense_mask(n, n, HEADS, is_causal=is_causal)
    assert torch.equal(pairs_of(block_mask, HEADS).expand(1, HEADS, n, n)[0], wanted)
    assert block_mask.seq_lengths == (n, n) and block_mask.kv_indices.dtype is torch.int32
    # as narrow as the longest list; FlexAttention on the CPU asks for whole rows
    assert block_mask.q_indices.shape[-1] == max(1, int(max(block_mask.q_num_blocks.max(), block_mask.full_q_num_blocks.max())))
    assert block_mask.kv_indices.shape[-1] == -(-n // pattern.k_block)
    # exact outside the lists, too
    q, k = torch.arange(n)[:, None], torch.arange(n)[None, :]
    found = block_mask.mask_mod(torch.tensor(0), torch.arange(HEADS).view(-1, 1, 1), q, k)
    assert torch.equal(found.broadcast_to(HEADS, n, n), wanted)


@pytest.mark.parametrize(("size", "expected"), [(128, 128), (64, 64), (256, 128), (192, 64)])
def test_from_torchs_own(size: int, expected: int) -> None:
    def mask_mod(b, h, q, k):  # type: ignore[no-untyped-def]
        return (q - k).abs() <= 100 + 50 * h

    n = 700
    block_mask = create_block_mask(mask_mod, None, 3, n, n, device="cpu", BLOCK_SIZE=size)
    pattern = from_block_mask(block_mask)
    assert pattern.block_size == (expected, expected) and pattern.per_head
    wanted = torch.stack([mask_mod(0, h, torch.arange(n)[:, None], torch.arange(n)[None, :]) for h in range(3)])
    assert torch.equal(pattern.dense_mask(n, n, 3), wanted)
    assert pattern.pairs(n, 3) == int(wanted.sum())


def mask_of(q_len: int = 400, size: int = 128, batch: int | None = None) -> BlockMask:
    return create_block_mask(lambda b, h, q, k: q - k <= 100 * b, batch, None, q_len, 400, device="cpu", BLOCK_SIZE=size)


# --- the rest ---


def test_a_function_is_never_asked_about_everything_at_once() -> None:
    largest = 0

    def fn(b, h, q, k):  # type: ignore[no-untyped-def]
        nonlocal largest
        largest = max(largest, torch.broadcast_shapes(q.shape, k.shape).numel())
        return q >= k

    n = 128 * 60
    assert MaskFunction(fn).pairs(n) == n * (n + 1) // 2
    assert largest <= 2**24 < n * n
    largest = 0
    (MaskFunction(fn) & LocalWindow(128)).pairs(n)
    assert largest <= 4 * 60 * 128**2


def chosen(q_shape: tuple[int, ...], k_shape: tuple[int, ...] | None = None, **options: Any) -> Any:
    return TopBlocks(1).choose(torch.randn(q_shape), torch.randn(k_shape or q_shape), **options)


WRONG: dict[type[Exception], list[tuple[Callable[[], object], str]]] = {
    ValueError: [
        (lambda: LocalWindow(3, block_size=32), "block_size is 32; expected 64 or 128"),
        (lambda: LocalWindow(3, block_size=(64, 64, 64)), "expected one integer or"),
        (lambda: LocalWindow((1, 2, 3)), r"window is \(1, 2, 3\); expected one integer or \(left, right\)"),
        (lambda: GlobalLocal(3, -1), "global_tokens is -1"),
        (lambda: BigBird(3, 1, -1), "random_blocks is -1"),
        (lambda: BigBird(3, 1, 1, seed=2**62), "seed is 4611686018427387904"),
        (lambda: Strided(0), "stride_blocks is 0"),
        (lambda: DilatedBlocks(1, 0), "num_blocks is 0"),
        (lambda: Axial(0), "width is 0"),
        (lambda: RandomBlocks(1.5), "ratio is 1.5; expected a number from 0 to 1"),
        (lambda: Document([3, -1]), r"lengths\[1\] is -1"),
        (lambda: BlockTensor(torch.ones(2, dtype=torch.bool)), r"mask has shape \(2,\)"),
        (lambda: LocalWindow(3) | LocalWindow(3, block_size=64), r"Union got .* block_size \(128, 128\) and \(64, 64\)"),
        (lambda: PerHead([]), "PerHead got no patterns"),
        (lambda: with_sparsity(0), "ratio is 0: nothing would be kept"),
        (lambda: with_sparsity(0.1, "none"), "kind is 'none'; expected one of 'random', 'local'"),
        (lambda: with_sparsity(0.1, "local", seed=3), "seed is 3, but kind='local' draws nothing"),
        (lambda: from_block_mask(mask_of(q_len=300)), "block_mask has 300 queries and 400 keys"),
        (lambda: from_block_mask(mask_of(size=96)), r"BLOCK_SIZE \(96, 96\)"),
        (lambda: from_block_mask(mask_of(batch=2)), "block_mask has 2 batch entries and a pattern holds for the whole batch; choose one"),
        (lambda: from_block_mask(mask_of(batch=2), batch=2), "batch is 2; block_mask has 2 batch entries: expected 0 to 1"),
        (lambda: TopBlocks(), "none of blocks, density and mass given"),
        (lambda: TopBlocks(3, density=0.5), "exactly one"),
        (lambda: TopBlocks(0), "blocks is 0"),
        (lambda: TopBlocks(density=20), "for a number of blocks use blocks="),
        (lambda: TopBlocks(mass=float("nan")), "mass is nan"),
        (lambda: TopBlocks(1, within=TopBlocks(2)), "within is TopBlocks"),
        (lambda: TopBlocks(1, always=LocalWindow(3, block_size=64)), "give both the same block_size"),
        (lambda: TopBlocks(1, pool="max"), "pool is 'max'"),
        (lambda: TopBlocks(1, queries="all"), "queries is 'all'"),
        (lambda: chosen((1, 8, 3, 4), (1, 8, 2, 4)), "multiple of the key/value heads"),
        (lambda: chosen((1, 9, 1, 4), (1, 8, 1, 4)), "query_offset is 0"),
        (lambda: chosen((2, 8, 1, 4)).density(8), r"chosen\[b\]"),
        (lambda: chosen((1, 8, 1, 4)).density(9), r"choose\(q, k\) again"),
        (lambda: chosen((1, 9, 1, 4), (1, 200, 1, 4), query_offset=130).pairs(200), "with these queries"),
        *((lambda change=change: TopBlocks(**change).density(500), r"call choose\(q, k\)") for change in (
            {"mass": 0.5}, {"density": 0.5, "always": LocalWindow(5)}, {"blocks": 1, "within": LocalWindow(500)}, {"blocks": 2})),
        # without tensors there is no mask
        *((lambda ask=ask: ask(TopBlocks(density=0.1)), r"TopBlocks\(density=0.1, .*call its choose\(q, k\)") for ask in (
            lambda x: x.dense_mask(256, 256, 1), lambda x: x.show(256), lambda x: block_lists(x, 256, 1, device="cpu"))),
        *((lambda spec=spec: pattern_from_spec(spec), r"expected what BlockPattern.spec\(\) returns|no pattern is called")
          for spec in ("", "7", '{"pattern":"Nothing"}')),
    ],
    TypeError: [
        (lambda: LocalWindow(3, block_size="64"), "block_size is '64'"),
        (lambda: LocalWindow(2.5), r"window\[0\] is 2.5"),
        (lambda: LocalWindow(None), "window is None"),
        (lambda: RandomBlocks("0.1"), "ratio is '0.1'"),
        (lambda: BlockTensor(torch.ones(2, 2)), "mask is torch.float32; expected a bool tensor"),
        (lambda: from_block_mask(3), "block_mask is 3 .*expected a BlockMask"),
        (lambda: MaskFunction(7), "fn is 7"),
        (lambda: MaskFunction(lambda i, j: i > j), r"fn takes \(i, j\): too many positional arguments"),
        (lambda: MaskFunction(lambda b, h, q, k: q - k).pairs(100), "fn returned torch.int64; expected a bool tensor"),
        (lambda: MaskFunction(lambda b, h, q, k: q >= k and h == 0).pairs(100), r"fn takes a tensor of pairs .*expected .*&, \|, ~"),
        (lambda: to_block_mask(None, 12, 4), r"pattern is None \(NoneType\); expected a block pattern"),  # type: ignore[arg-type]
        (lambda: LocalWindow(3) | 7, "unsupported operand"),
        (lambda: TopBlocks(0.1), "blocks is 0.1"),
        (lambda: TopBlocks(mass="0.9"), "mass is '0.9'"),
        (lambda: TopBlocks(1, always=3), "always is 3"),
        (lambda: TopBlocks(1, near="first"), "near is 'first'"),
        (lambda: PerHead(Causal()), "expected a list of block patterns"),
        (lambda: PerHead([Causal(), 7]), r"PerHead got 7 \(int\) as pattern 1"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("error", WRONG)
def test_errors(error: type[Exception]) -> None:
    for make, text in WRONG[error]:
        with pytest.raises(error, match=text):
            make()


# --- what a copy is called ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("held", [MaskFunction(lattice), BlockTensor(torch.ones(2, 2, dtype=torch.bool))], ids=["function", "table"])
def test_a_copy_of_what_holds_objects_names_its_own(held: BlockPattern) -> None:
    pattern = LocalWindow(3) | held
    spec = pattern.spec()
    twin = copy.deepcopy(pattern)
    assert twin.spec() != spec and pattern_from_spec(twin.spec()) == twin and pattern_from_spec(spec) == pattern
    del pattern
    assert pattern_from_spec(twin.spec()).allowed(*(torch.arange(4) for _ in range(3)), 256).shape == (4,)
    if isinstance(held, MaskFunction):
        assert pickle.loads(pickle.dumps(twin)).spec() not in (spec, twin.spec())


def test_a_class_defined_again_replaces_the_old_one() -> None:
    def define(reach: int) -> type[LocalWindow]:
        @dataclass(frozen=True)
        class Rewritten(LocalWindow):
            def allowed(self, queries: torch.Tensor, keys: torch.Tensor, heads: torch.Tensor, num_positions: int) -> torch.Tensor:
                return (queries - keys).abs() + 0 * heads <= reach

        return Rewritten

    first = define(1)(5)
    assert pattern_from_spec(first.spec()) == first
    second = define(2)(5)
    assert first.spec() == second.spec() and type(pattern_from_spec(second.spec())) is type(second)


def test_a_class_that_cannot_be_told_apart_is_refused() -> None:
    class Plain(LocalWindow):
        def __init__(self, reach: int) -> None:
            super().__init__(reach)

    with pytest.raises(TypeError, match=r"@dataclass\(frozen=True\)"):
        Plain(3).spec()


EVERY_FEW = """
from dataclasses import dataclass
from dilated_attention.pattern.blocks.whole_blocks import WholeBlocks

@dataclass(frozen=True)
class EveryFew(WholeBlocks):
    limits = (("step", 1, 9),)
    step: int

    def keeps(self, grid, head, row, column):
        return (row + column) % self.step == 0
"""


def test_a_pattern_in_a_new_file_is_public_has_a_spec_and_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "every_few.py").write_text(EVERY_FEW)
    # without classes of tests
    own = {name: kind for name, kind in base._classes.items() if kind.__module__.startswith("dilated_attention.")}
    monkeypatch.setattr(base, "_classes", own)
    with monkeypatch.context() as patch:
        patch.setattr(patterns.blocks, "__path__", [*patterns.blocks.__path__, str(tmp_path)])
        every_few = importlib.reload(patterns).EveryFew  # type: ignore[attr-defined]
    assert pattern_from_spec(every_few(3).spec()) == every_few(3)
    with pytest.raises(ValueError, match="step is 0; expected an integer ≥ 1"):
        every_few(0)
    assert {every_few.random(random.Random(seed)).step for seed in range(100)} == set(range(1, 10))
    drawn = [random_blocks(random.Random(seed), 2, 300, (64, 64), any_length=True, depth=0) for seed in range(100)]
    assert any(isinstance(pattern, every_few) for pattern in drawn)
    del own["EveryFew"]
    assert "EveryFew" not in importlib.reload(patterns).__all__
