"""Tables of tiles and places of results, by brute force: every result has one place, and the kernels' arithmetic finds it again."""

from __future__ import annotations

import itertools
import random
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from dilated_attention.backends.tiles import call
from dilated_attention.backends.tiles import launch as tile_launch
from dilated_attention.backends.tiles.call import Tables
from dilated_attention.backends.tiles.launch import NO_DEVICE, KernelLaunch
from dilated_attention.backends.tiles.table import Walk, counts_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# (branch, offset, position) → place
Places = dict[tuple[int, int, int], int]


def random_walk(seed: int) -> Walk:
    rng = random.Random(seed)
    N = rng.choice([1, 2, rng.randint(3, 20), rng.randint(20, 60)])
    cuts = sorted({rng.randint(1, N) for _ in range(rng.randint(0, 4))} | {N}) if rng.random() < 0.6 else [N]
    branches = []
    for _ in range(rng.randint(1, 3)):
        w = rng.choice([rng.randint(1, 8), rng.randint(1, 2 * N), 2**40])
        branches.append((w, rng.choice([1, rng.randint(1, min(w, 7))])))
    queries, num_keys = (0, N), None
    if len(cuts) == 1 and rng.random() < 0.2:
        # a dense problem: as many positions as the longer side has
        queries, num_keys = rng.choice([((0, N), rng.randint(1, N)), ((0, rng.randint(1, N)), N)])
    elif rng.random() < 0.4:
        first = rng.randint(0, N - 1)
        queries = first, rng.randint(first + 1, N)
    whole = [b for b, (_, rate) in enumerate(branches) if rate == 1]
    direct, key_direct = (rng.choice(whole) if whole and rng.random() < 0.6 else -1 for _ in range(2))
    return Walk(tuple(branches), tuple(zip([0, *cuts], cuts, strict=False)), queries, direct, key_direct, num_keys)


def taken(walk: Walk, of_keys: bool) -> set[tuple[int, int, int]]:
    """Every (branch, offset, position) with a result, by the definition of a pattern."""
    low, high = walk.keys if of_keys else walk.queries
    found = set()
    for branch, (w, rate) in enumerate(walk.branches):
        for start, end in walk.documents:
            length = min(w, end - start)
            found |= {(branch, (p - start) % length % rate, p) for p in range(max(start, low), min(end, high))}
    return found


def by_table(walk: Walk, of_keys: bool, tile: int, rows: torch.Tensor) -> Places:
    """What programs write, read from their rows as the kernels do; that no two rows write one result is asserted."""
    low, high = walk.keys if of_keys else walk.queries
    places: Places = {}
    for branch, rate, start, length, index, place, _, query_place in rows.tolist():
        w, r = walk.branches[branch]
        assert rate == r and length <= w and index >= 0
        for offset in range(rate):
            run = [p for p in range(start + offset, start + length, rate) if low <= p < high]
            if not of_keys:
                assert place == query_place
            for t, position in list(enumerate(run))[index * tile : (index + 1) * tile]:
                assert (branch, offset, position) not in places
                places[branch, offset, position] = place + t
    return places


@pytest.mark.parametrize("first", range(0, 12, 6))
def test_every_result_has_one_place_and_one_tile(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed, (tile, right) in itertools.product(range(first, first + 6), ((16, None), (3, 0), (2, None))):
        walk = random_walk(seed)
        # as many documents at a time as there are, or fewer
        monkeypatch.setattr(call, "_DOCUMENTS", (512, 2)[seed % 2])
        counts, tables = (counts_of(walk, False, tile), counts_of(walk, True, tile)), Tables(walk, right == 0, tile, torch.device(DEVICE))
        tables.pointers()
        for of_keys, table in zip((False, True), tables.tensors()[1:], strict=True):
            direct = walk.key_direct if of_keys else walk.direct
            places = by_table(walk, of_keys, tile, table.view(-1, 8))
            assert set(places) == taken(walk, of_keys), (seed, walk)
            # a head has one offset in each branch: of those with equal places no two meet in one head
            heads: dict[int, set[tuple[int, int]]] = {}
            for (branch, offset, _), place in places.items():
                assert (branch, offset) not in heads.setdefault(place, set()), (seed, walk)
                heads[place].add((branch, offset))
            assert all(len({branch for branch, _ in owners}) == 1 for owners in heads.values())
            assert min(heads) >= 0 and max(heads) < counts[of_keys].all_places
            # what need not wait in memory comes last
            assert all((place >= counts[of_keys].num_places) == (branch == direct) for (branch, _, _), place in places.items())


class Compiled:
    """What a compiled kernel is to a launch."""

    function, packed_metadata = "function", "metadata"

    def __init__(self) -> None:
        self.runs: list[tuple[object, ...]] = []

    def run(self, *args: object) -> None:
        self.runs.append(args)


class Kernel:
    """A kernel before it is compiled, which counts how often Triton would bind its arguments."""

    arg_names = ("x_ptr", "y_ptr", "n", "SECOND", "FIRST")
    params = tuple(SimpleNamespace(do_not_specialize=False) for _ in arg_names)

    def __init__(self) -> None:
        self.bound: list[tuple[tuple[int, ...], tuple[object, ...], dict[str, object]]] = []
        self.compiled: list[Compiled] = []

    def __getitem__(self, grid: tuple[int, ...]) -> object:
        def bind(*args: object, **kwargs: object) -> Compiled:
            self.bound.append((grid, args, kwargs))
            self.compiled.append(Compiled())
            return self.compiled[-1]

        return bind


def test_a_launch_is_bound_once_and_again_where_pointers_are_not_aligned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 100 + device, raising=False)
    kernel, made = Kernel(), []
    launch = KernelLaunch(kernel, 7, [5], {"FIRST": 1, "SECOND": 2}, warps=8, stages=3, dtypes=())

    x, y = torch.empty(1), torch.empty(1)

    def tensors() -> list[torch.Tensor]:
        made.append(len(made))
        return [x, y]

    call = [((32, 8), 1), ((32, 64), 2), ((48, 160), 2), ((49, 160), 3), ((16, 16), 3)]
    for pointers, bound in call:
        launch(pointers, tensors, 1)
        # the first pointers were not aligned, so that their kernel may not serve others
        assert len(kernel.bound) == len(made) == bound
    options = {"FIRST": 1, "SECOND": 2, "num_warps": 8, "num_stages": 3}
    assert all(grid == (7, 1) and args == (x, y, 5) and named == options for grid, args, named in kernel.bound)
    first, second, third = (compiled.runs for compiled in kernel.compiled)
    assert not first and not third
    # constants in the order of the kernel's own signature
    fixed = (7, 1, 1, 101, "function", "metadata", None, None, None)
    assert second == [(*fixed, 48, 160, 5, 2, 1), (*fixed, 16, 16, 5, 2, 1)]


class Compilable(Kernel):
    """A kernel whose first compilation fails."""

    def warmup(self, *args: object, **kwargs: object) -> Compiled:
        self.bound.append(((), args, kwargs))
        if len(self.bound) == 1:
            raise ValueError("the compiler says no")
        self.compiled.append(Compiled())
        return self.compiled[-1]


@pytest.mark.parametrize(
    ("shared", "numbers", "changes"),
    [
        (True, [7], {}),
        *((False, [number], {}) for number in (1, 16, 2**31 + 5, -(2**31) - 5)),
        *((False, [5], change) for change in ({"constants": {"FIRST": 1, "SECOND": 3}}, {"warps": 8}, {"stages": 2}, {"dtypes": "other"})),
    ],
    ids=str,
)
def test_launches_share_a_kernel_where_triton_selects_one(
    shared: bool, numbers: list[int], changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It compiles others for 1, for multiples of 16 and for numbers beyond 32 bits."""
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 100 + device, raising=False)
    kernel, tensors, some = Compilable(), [torch.empty(1)] * 2, {"constants": {"FIRST": 1, "SECOND": 2}, "dtypes": "some"}
    for values, options in (([5], some), (numbers, some | changes)):
        KernelLaunch(kernel, 7, values, **options)([16, 32], lambda: tensors, 1)  # type: ignore[arg-type]
    assert len(kernel.bound) == (1 if shared else 2)


def test_a_kernel_that_compiles_ahead_is_waited_for_where_it_is_launched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Meta tensors start it, in a thread, for the dtypes and numbers of the launch."""
    driver = SimpleNamespace(launcher_cls=lambda src, metadata: None, get_current_device=lambda: 1)
    monkeypatch.setattr("triton.runtime.driver", SimpleNamespace(active=driver))
    monkeypatch.setattr("triton.runtime.cache.triton_key", lambda: "")
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 100 + device, raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    monkeypatch.setattr(Compiled, "src", None, raising=False)
    monkeypatch.setattr(Compiled, "metadata", None, raising=False)
    kernel, x, y = Compilable(), torch.empty(4, device="meta"), torch.empty(4, dtype=torch.int32, device="meta")
    launch = KernelLaunch(kernel, 7, [5], {"FIRST": 1, "SECOND": 2}, dtypes=(x.dtype, y.dtype))
    launch([0, 0], lambda: (x, y), NO_DEVICE)
    launch([0, 0], lambda: (x, y), NO_DEVICE)
    with pytest.raises(ValueError, match="the compiler says no"):
        launch([16, 32], lambda: (x, y), 1)
    launch([0, 0], lambda: (x, y), NO_DEVICE)
    tile_launch.finish()
    assert len(kernel.bound) == 2
    for rows in (16, 48):
        # of another length, and so another launch
        KernelLaunch(kernel, rows, [5], {"FIRST": 1, "SECOND": 2}, dtypes=(x.dtype, y.dtype))([rows, 32], lambda: (x, y), 1)
    assert len(kernel.bound) == 2
    options = {"FIRST": 1, "SECOND": 2, "num_warps": 4, "num_stages": 1}
    assert all(args == (x.dtype, y.dtype, 5) and named == {"grid": (1,), **options} for _, args, named in kernel.bound)
    assert [run[:1] + run[-5:] for run in kernel.compiled[0].runs] == [(16, 16, 32, 5, 2, 1), (48, 48, 32, 5, 2, 1)]
