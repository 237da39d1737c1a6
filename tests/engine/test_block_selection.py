"""Content-chosen blocks against their definition in float64 loops; the kernels' choice and lists against torch's, bit by bit."""

import itertools
import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from dilated_attention.backends.torch_ops.math import band_mask
from dilated_attention.engine.blocks import selection
from dilated_attention.engine.blocks.lists import bits_of_lists, lists_of_kept
from dilated_attention.engine.blocks.selection import choose_blocks_op
from dilated_attention.pattern import (
    BlockPattern,
    ChosenBlocks,
    LocalWindow,
    MaskFunction,
    PerHead,
    TopBlocks,
    pattern_from_spec,
)
from dilated_attention.pattern.blocks.block_lists import packed, unpacked
from dilated_attention.testing import Case, Inputs, Space, inputs, random_case
from dilated_attention.testing.cases import random_blocks
from tests.helpers.pattern_cases import expanded, expanded_by_interval

SIZES = [(64, 64), (128, 64), (64, 128), (128, 128)]
SPACE = Space(blocks=True, max_length=900, head_dims=(8,), heads_per_kv=(1, 2, 3))


def choose(case: Case, x: Inputs) -> torch.Tensor:
    arguments = (x.key_padding_mask, x.cu_seqlens, case.pattern.spec(), case.is_causal, 8**-0.5, case.query_offset)
    return choose_blocks_op(x.q, x.k, *arguments)


def chosen_case(seed: int, space: Space = SPACE) -> Case:
    """Everything that a choice may depend on, drawn by a seed."""
    draw = random.Random(seed)
    while not (case := random_case(draw, space)).num_queries:
        pass
    block_size = case.pattern.q_block, case.pattern.k_block
    statics = [random_blocks(draw, case.heads, case.num_keys, block_size, any_length=True, depth=1) for _ in range(2)]
    kept: dict[str, Any] = {name: draw.choice([None, x]) for name, x in zip(("always", "within"), statics, strict=True)}
    if seed % 6 == 1:
        # of some heads no block of the diagonal
        apart = MaskFunction(lambda b, h, i, j: (j < 90 + 70 * h) | ((h == 2) & (i == j)), block_size=block_size)
        kept[draw.choice(["always", "within"])] = apart
    amount: Any = [{"blocks": draw.randint(1, 9)}, {"density": draw.choice([0.1, 0.3, 1.0, draw.random()])}, {"mass": draw.random()}]
    near, queries = draw.choice([None, True, False]), draw.choice([None, None, "block", "before"])
    pattern = TopBlocks(**draw.choice(amount), **kept, near=near, queries=queries, block_size=block_size)
    return replace(case, pattern=pattern)


def blocks_of(pattern: BlockPattern, num_positions: int, num_heads: int) -> torch.Tensor:
    """(H, rows, columns) bool: blocks of which the pattern keeps any pair."""
    mask = pattern.dense_mask(num_positions, num_positions, num_heads)
    q_block, k_block = pattern.q_block, pattern.k_block
    mask = torch.nn.functional.pad(mask, (0, -num_positions % k_block, 0, -num_positions % q_block))
    return mask.unflatten(1, (-1, q_block)).unflatten(3, (-1, k_block)).any(4).any(2)


def chosen_by_loops(case: Case, x: Inputs, keys: slice) -> torch.Tensor:
    """(B, H, rows, columns) bool for the document ``keys``: the docstring of TopBlocks, block by block."""
    pattern, is_causal, offset = case.pattern, case.is_causal, case.query_offset
    q_block, k_block = pattern.q_block, pattern.k_block
    q = (x.q if case.bounds is None else x.q[:, keys]).double()
    k = x.k[:, keys].double()
    B, Nq, H, D = q.shape
    N, K = k.shape[1:3]
    real_key = torch.ones(B, N, dtype=torch.bool) if x.key_padding_mask is None else ~x.key_padding_mask[:, keys]
    always, within = (None if x is None else blocks_of(x, N, H) for x in (pattern.always, pattern.within))
    before = pattern.queries == "before" or (pattern.queries is None and is_causal)
    rows = range(offset // q_block, -(-(offset + Nq) // q_block))
    found = torch.zeros(B, H, len(rows), -(-N // k_block), dtype=torch.bool)
    for b, h, row in itertools.product(range(B), range(H), rows):
        first = row * q_block
        last = min(first + q_block, offset + Nq) - 1
        scoring = range(first - q_block + 1, first + 1) if before else range(first, last + 1)
        scoring = [p - offset for p in scoring if offset <= p < offset + Nq] or [0]
        q_mean = q[b, scoring, h].mean(0)
        scores, forced, seen = {}, [], 0
        for c in range(-(-N // k_block)):
            positions = [j for j in range(c * k_block, min((c + 1) * k_block, N)) if real_key[b, j]]
            if not positions or (is_causal and c * k_block > last):
                continue
            seen += 1
            whole = not is_causal or (c + 1) * k_block - 1 <= first
            allowed = within is None or bool(within[min(h, within.shape[0] - 1), row, c])
            own = c * k_block <= last and (c + 1) * k_block > first
            # a block wider on each side, and the first that exists
            near = seen == 1 or ((c - 1) * k_block <= last and (c + 2) * k_block > first)
            if (always is not None and always[min(h, always.shape[0] - 1), row, c]) or (
                allowed and (not whole or (own and always is None) or (near and pattern.near))
            ):
                forced.append(c)
            if whole and (allowed or c in forced):
                scores[c] = float(q_mean @ k[b, positions, h // (H // K)].mean(0)) * D**-0.5
        best = sorted((c for c in scores if c not in forced), key=lambda c: (-scores[c], c))
        if pattern.mass is not None:
            high = max(scores.values(), default=0.0)
            weight = {c: math.exp(s - high) for c, s in scores.items()}
            wanted = pattern.mass * sum(weight.values()) - sum(weight[c] for c in forced if c in weight)
            take = 0
            while take < len(best) and sum(weight[c] for c in best[:take]) < wanted:
                take += 1
        else:
            # blocks that the row would see, and those that it would always keep, if the sequence did not end in it
            missing = range(last // k_block + 1, (first + q_block - 1) // k_block + 1) if is_causal and before else range(0)
            wanted_blocks = pattern.blocks or max(1, math.ceil(pattern.share * (seen + len(missing)) - 1e-9))  # type: ignore[operator]
            if pattern.within is not None:
                # of a longer sequence, a pattern that is not the same there may keep anything
                statics = [x for x in (pattern.within, pattern.always) if x is not None]
                stable = all(x.is_prefix_stable for x in statics)
                missing = [c for c in missing if stable and any(bool(blocks_of(x, first + q_block, H)[h, row, c]) for x in statics)]  # type: ignore[assignment]
            take = max(0, wanted_blocks - len(forced) - len(missing))
        found[b, h, row - rows.start, forced + best[:take]] = True
    return found


def by_loops(case: Case, x: Inputs) -> torch.Tensor:
    """(B, H, rows, 32 · words) bool, documents one after another."""
    N = case.num_keys
    parts = [chosen_by_loops(case, x, slice(a, b)) for a, b in itertools.pairwise(case.bounds or (0, N)) if a < b]
    width = -(-N // (32 * case.pattern.k_block)) * 32
    return torch.cat([torch.nn.functional.pad(part, (0, width - part.shape[-1])) for part in parts], 2)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ops run their Triton kernels, interpreted, on a CPU's tensors."""
    pytest.importorskip("triton")
    monkeypatch.setattr(selection, "has_kernels", lambda x: x.dtype is not torch.float64)


# the definition, and kernels, whose means differ by rounding, which no case here is close enough to notice
@pytest.mark.parametrize(("seed", "dtype"), [*((i, torch.float64) for i in range(60)), *((i, torch.float32) for i in range(100, 110))])
def test_choice_is_its_definition(seed: int, dtype: torch.dtype, kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts, shares and masses; causal or not; ragged, offset, grouped, padded, packed; always and within; few rows at a time."""
    if seed % 3 == 0:
        monkeypatch.setattr(selection, "_TORCH_BYTES", 4096)
        monkeypatch.setattr("dilated_attention.engine.blocks.lists._CHUNK", 16)
    # interpreted kernels take their time
    case = chosen_case(seed, SPACE if dtype is torch.float64 else replace(SPACE, max_length=400))
    x = inputs(case, dtype)
    if x.key_padding_mask is not None:
        # whole blocks, too
        x.key_padding_mask[:, 64:200] = True
    found, expected = choose(case, x), by_loops(case, x)
    rows = expected.shape[2]
    assert torch.equal(unpacked(found[:, :, :rows], expected.shape[-1]), expected)
    assert not found[:, :, rows:].any()
    if case.bounds is None and case.query_offset % case.pattern.q_block == 0:
        # the lists that kernels read
        where: Any = {"is_causal": case.is_causal, "query_offset": case.query_offset}
        lists = lists_of_kept(found, case.pattern, case.num_queries, case.num_keys, **where)
        pairs = expected.repeat_interleave(case.pattern.q_block, 2).repeat_interleave(case.pattern.k_block, 3)
        pairs = pairs[:, :, : case.num_queries, : case.num_keys].flatten(0, 1)
        if case.is_causal:
            pairs = pairs & band_mask((None, case.query_offset), *pairs.shape[1:], torch.device("cpu"))
        for written in (expanded, *[expanded_by_interval] * (lists.interval is not None)):
            assert torch.equal(written(lists, lists.num_groups), pairs)
        assert lists.mask_kind in ("interval", "none") and torch.equal(bits_of_lists(lists), found[:, :, :rows].flatten(0, 1))


def test_a_block_that_either_of_two_patterns_will_keep_counts_in_a_short_last_row() -> None:
    """Where a complete row would have one more column, of which ``within`` keeps pairs and ``always`` none."""

    class FirstKeys(BlockPattern):
        is_prefix_stable = True

        def allowed(self, queries: torch.Tensor, keys: torch.Tensor, heads: torch.Tensor, num_positions: int) -> torch.Tensor:
            return (keys < 64) & (queries >= 0) & (heads >= 0)

    size = (128, 64)
    pattern = TopBlocks(5, always=FirstKeys(block_size=size), within=LocalWindow(5000, block_size=size), queries="before", block_size=size)
    q, k = (torch.randn(1, 512, 2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    short, long = (choose_blocks_op(q[:, :n], k[:, :n], None, None, pattern.spec(), True, 8**-0.5, 0) for n in (448, 512))
    assert torch.equal(unpacked(short, 7), unpacked(long, 7)[:, :, : short.shape[2]])


@pytest.mark.slow
@pytest.mark.parametrize(("amount", "is_causal"), [({"blocks": 5}, True), ({"density": 0.4}, False), ({"mass": 0.7}, True)], ids=str)
def test_kernels_choose_the_same_of_equal_scores(amount: dict[str, Any], is_causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit: many equal scores, zeros and infinities of both signs, what is no number."""
    pytest.importorskip("triton")
    pattern = TopBlocks(**amount, within=LocalWindow(700, block_size=64), block_size=64)
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randint(-1, 2, (2, 16, 1, 8), generator=generator).float().repeat_interleave(64, 1) for _ in range(2))
    # infinities of both signs and what is no number, with the sign that would put it below everything
    k[0, 192:256], k[1, 640:704, :, 0] = torch.inf, torch.inf
    # zeros of both signs
    q[0, 512:640] = 0
    scored = selection._scores
    monkeypatch.setattr(selection, "_scores", lambda *means: (x := scored(*means)) * (1 - torch.arange(x.shape[-1]) % 2 * 2))
    # of a positive query, and of a negative one
    q[1, :, :, 0] = torch.tensor([1.0, -1.0]).repeat(8).repeat_interleave(64)[:, None]
    padding = torch.zeros(2, 1024, dtype=torch.bool)
    padding[1, 256:400] = True
    found = []
    for has in (True, False):
        monkeypatch.setattr(selection, "has_kernels", lambda x, has=has: has)
        found.append(choose_blocks_op(q, k, padding, None, pattern.spec(), is_causal, 8**-0.5, 0))
    assert torch.equal(*found)
    # what is no number is kept where it may be
    assert unpacked(found[0], 16)[0, 0, 10:13, 3].all()


@pytest.mark.parametrize("seed", range(3))
def test_nothing_later_changes_a_causal_choice(seed: int) -> None:
    """Neither other tokens after a position, nor more of them."""
    rng = random.Random(seed)
    block = rng.choice(SIZES)
    pattern = TopBlocks(**[{"blocks": 6}, {"density": 0.6}, {"mass": 0.6}][seed % 3], block_size=block)  # type: ignore[arg-type]
    N, stop = 1000, rng.randint(200, 900)
    q, k = (torch.randn(1, N, 2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(i)) for i in (seed, seed + 100))
    other = [torch.cat([x[:, :stop], 9 - x[:, stop:]], 1) for x in (q, k)]
    # nor where heads do not keep the block of the diagonal that a longer sequence adds
    some = MaskFunction(lambda b, h, i, j: (j < 400) | ((h == 1) & (i == j)), block_size=block)
    for top in (pattern, pattern & some):
        shorter, whole, changed = (
            top.choose(*x, is_causal=True).dense_mask(n, n, 2, is_causal=True)[:, :stop, :stop]
            for x, n in (((q[:, :stop], k[:, :stop]), stop), ((q, k), N), (other, N))
        )
        assert torch.equal(shorter, whole) and torch.equal(changed, whole)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("amount", [{"blocks": 4}, {"density": 0.1}, {"density": 1.0}], ids=str)
def test_counts_are_exact(amount: dict[str, Any], is_causal: bool) -> None:
    for block, N in zip(SIZES, (640, 1024, 897 if is_causal else 896, 130 if is_causal else 128), strict=True):
        pattern = TopBlocks(**amount, block_size=block)
        chosen = pattern.choose(torch.randn(1, N, 3, 4), torch.randn(1, N, 1, 4), is_causal=is_causal)
        pairs = int(chosen.dense_mask(N, N, 3, is_causal=is_causal).sum())
        assert pattern.pairs(N, 3, is_causal=is_causal) == chosen.pairs(N, 3, is_causal=is_causal) == pairs
        assert pattern.density(N, 3, is_causal=is_causal) == pairs / (3 * N * N)
    # ten of a hundred, not eleven, whatever 0.1 is in binary; and at least one
    words = choose_blocks_op(
        *(torch.randn(1, 6400, 1, 4) for _ in range(2)), None, None, TopBlocks(density=0.3, block_size=64).spec(), False, 1.0, 0
    )
    assert unpacked(words, 100).sum(-1).unique().tolist() == [30]


def test_compositions_with_static_patterns() -> None:
    a, b = LocalWindow(100, block_size=64), LocalWindow((300, 0), block_size=64)
    top = TopBlocks(blocks=3, near=False, block_size=64)
    q, k = torch.randn(1, 640, 1, 8), torch.randn(1, 640, 1, 8)

    def blocks(pattern: BlockPattern, is_causal: bool = False) -> torch.Tensor:
        assert isinstance(pattern, TopBlocks) and pattern_from_spec(pattern.spec()) == pattern
        return blocks_of(pattern.choose(q, k, is_causal=is_causal), 640, 1)

    static, other, eye = (blocks_of(x, 640, 1) for x in (a, b, LocalWindow(0, block_size=64)))
    assert a | top == top | a and a & top == top & a
    # three with those of the window, so no more where it has three
    assert torch.equal(blocks(a | top)[:, 2:8], static[:, 2:8] | eye[:, 2:8])
    assert (blocks(b & top).sum(-1) == other.sum(-1).clamp(max=3)).all()
    assert torch.equal(blocks((a | top) & b, True), blocks((a & b) | (top & b), True))
    # the diagonal of a causal row, too, keeps to what is allowed
    past = LocalWindow((500, 0), block_size=64) & ChosenBlocks(packed(~eye)[None], 640, block_size=64)
    assert not (blocks_of((top & past).choose(q, k, is_causal=True), 640, 1) & eye).any()
    # what is kept by default stays, whatever is joined
    near = blocks_of(LocalWindow(64, block_size=64), 640, 1)
    near[..., 0] = True
    assert torch.equal(blocks(a | TopBlocks(blocks=1, block_size=64)), static | near)
    assert torch.equal(blocks(TopBlocks(blocks=1, block_size=64) & b), near & other)
    with pytest.raises(ValueError, match="both are chosen by content"):
        top | TopBlocks(blocks=2, block_size=64)
    with pytest.raises(ValueError, match=r"combine it with \| or &"):
        PerHead([a, top])
    with pytest.raises(TypeError):
        top | 3  # type: ignore[operator]


def test_autocast_does_not_round_scores() -> None:
    arguments = *(torch.randn(1, 1280, 2, 64) for _ in range(2)), None, None, TopBlocks(blocks=3, block_size=64).spec(), False, 0.1, 0
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = choose_blocks_op(*arguments)
    assert torch.equal(found, choose_blocks_op(*arguments))
