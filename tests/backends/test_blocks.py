"""Lists of blocks on the own Triton kernels, interpreted on a CPU, and around FlexAttention's: any case is its definition.

Plain torch's: engine/test_oracle.py. ``gpu/test_blocks.py`` has all of them on a GPU, and FlashAttention-4's.
"""

import itertools
import os
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dilated_attention.backends import registry
from dilated_attention.backends.flash import flash4
from dilated_attention.backends.tiles import backend as triton_blocks
from dilated_attention.backends.tiles.table import TileSizes
from dilated_attention.backends.torch_ops import flex
from dilated_attention.engine.blocks.lists import block_lists, clear_block_lists
from dilated_attention.pattern import BlockTensor, LocalWindow, MaskFunction, RandomBlocks
from dilated_attention.testing import Case, Space, measure, random_case
from tests.helpers.op_settings import calls_of
from tests.helpers.pattern_cases import pairs_of

pytest.importorskip("triton")
# compiled kernels take no tensors of a CPU
interpreted = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="gpu/test_blocks.py runs the compiled kernels")
Use = Callable[[str], list[Any]]


def some_cases(count: int, head_dims: tuple[int, ...]) -> list[Case]:
    """Each of few programs: the interpreter takes 20 ms for each."""
    space = Space(blocks=True, max_length=300, head_dims=head_dims, dropout=False)
    drawn = (random_case(seed, space) for seed in itertools.count())
    small = (c for c in drawn if 0 < c.batch * c.heads * -(-c.num_queries // 64) * -(-c.num_keys // 64) <= 24)
    return list(itertools.islice(small, count))


CASES = some_cases(24, (1, 16, 40, 64))


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Use:
    """Lists are given to this backend from now on, on a CPU, too; returns its forwards."""

    def use(name: str) -> list[Any]:
        backend = registry.get(name)
        monkeypatch.setattr(backend, "capabilities", replace(backend.capabilities, devices=frozenset({"cpu", "cuda"})))
        monkeypatch.setattr(registry, "_orders", {**registry._orders, ("cpu", "blocks"): (name,)})
        registry.cached.clear()
        return calls_of(monkeypatch, type(backend), "forward")

    return use


def check(case: Case, dtype: torch.dtype = torch.float32, backend: str = "auto") -> None:
    assert not [result for result in measure(case, backend, dtype) if not result.passes], case


@interpreted
@pytest.mark.parametrize("index", range(len(CASES)))
def test_any_case_on_triton(index: int, use: Use) -> None:
    """Beside branches, too, whose shares of one softmax are others'."""
    forwards = use("triton")
    check(CASES[index])
    # of bfloat16 the interpreter multiplies the bits as if they were integers
    if index % 8 == 0:
        check(CASES[index], torch.float16)
    # where all keys are padding, nothing may be chosen
    assert forwards or CASES[index].padding == "all"


LAYOUTS = ("heads_first", "packed", "contiguous", "packed")
WHOLE = Case(pattern=LocalWindow(0), num_queries=257, num_keys=257, heads=2, kv_heads=1, head_dim=16, lse_grad=True, layouts=LAYOUTS)
PATTERNS = {
    "bits": MaskFunction(lambda b, h, i, j: (i * 7 + j * 3 + h) % 5 < 2, per_head=True),
    "interval": LocalWindow((100, 30)),
    "none": RandomBlocks(0.6),
}


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("masks", PATTERNS)
def test_tiles_smaller_than_blocks(masks: str, use: Use, monkeypatch: pytest.MonkeyPatch) -> None:
    forwards = use("triton")
    # of whole blocks alone, too
    for tile, n in (((64, 32), WHOLE.num_keys), ((32, 64), 256)):
        monkeypatch.setattr(triton_blocks, "sizes", lambda *_, lists, tile=tile: TileSizes(*tile, 4, 2))
        check(replace(WHOLE, pattern=PATTERNS[masks], num_queries=n, num_keys=n))
    assert forwards


@interpreted
def test_long_lists_of_some_heads(use: Use) -> None:
    """Long lists start first: every block finds its program, in whatever order; a row and a column of one head keep everything."""
    table = torch.eye(5, dtype=torch.bool).repeat(2, 1, 1)
    table[1, 3] = table[1, :, 2] = True
    case = replace(WHOLE, pattern=BlockTensor(table, block_size=64), num_queries=300, num_keys=300, kv_heads=2)
    lists = block_lists(case.pattern, 300, 2, device="cpu")
    assert triton_blocks.order_of(lists)[1] == triton_blocks.order_of(lists, 1)[1] == 1
    forwards = use("triton")
    check(case)
    assert forwards


@pytest.mark.parametrize("of_columns", [False, True])
@pytest.mark.parametrize(("together", "limit"), [(1, 2**27), (1, 2**12), (2, 2**11)])
def test_tables_hold_every_entry_once(together: int, limit: int, of_columns: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole blocks apart from those with a mask; a few long lists have tables of their own, and heads share one up to a limit of bytes."""
    monkeypatch.setattr(flash4, "TABLE_BYTES", limit)
    kept = torch.rand(4, 70, 70, generator=torch.Generator().manual_seed(0)) < 0.05
    kept[:, 66] = kept[2, :, 5] = True
    clear_block_lists()
    lists = block_lists(BlockTensor(kept, block_size=64), 70 * 64 - 10, 4, is_causal=True, device="cpu")
    tables = flash4.tables_of(lists, of_columns, together)
    found = []
    for table in tables:
        longest = int((table.partial[0] + table.full[0]).max())
        first, last = table.heads
        assert last - first == together or 4 * (last - first) * (table.end - table.start) * longest <= limit
        for is_whole, (counts, indices) in enumerate((table.partial, table.full)):
            for _, head, block in counts.nonzero().tolist():
                others = indices[0, head, block, : counts[0, head, block]].tolist()
                found += [(first + head, table.start + block, other, bool(is_whole)) for other in others]
    group, row = lists.row_of_entry // lists.num_rows, lists.row_of_entry % lists.num_rows
    assert lists.masks is not None
    blocks, others = (lists.columns, row) if of_columns else (row, lists.columns)
    entries = zip(group.tolist(), blocks.tolist(), others.tolist(), (lists.masks < 0).tolist(), strict=True)
    assert sorted(found) == sorted(entries) and len(tables) > 1 and (len({table.heads for table in tables}) > 1) == (limit < 2**27)


# --- flex: what it does with lists around its kernel, which a dense one stands in for ---------------------------------------------


def test_flex_around_its_kernel(use: Use, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables, padding, caps, empty rows, merged out and lse."""

    def kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **settings: Any) -> tuple[torch.Tensor, Any]:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        scores = torch.einsum("bhid,bhjd->bhij", q, k) * settings["scale"]
        if settings["score_mod"] is not None:
            b, j = torch.arange(q.shape[0]).view(-1, 1, 1, 1), torch.arange(k.shape[2])
            scores = settings["score_mod"](scores, b, None, None, j)
        scores = scores.masked_fill(~pairs_of(settings["block_mask"]), -torch.inf)
        empty = (scores == -torch.inf).all(-1, keepdim=True)
        weights = scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)
        return weights @ v, SimpleNamespace(lse=scores.masked_fill(empty, 0.0).logsumexp(-1).masked_fill(empty[..., 0], -torch.inf))

    forwards = use("flex")
    monkeypatch.setattr(flex, "_compiled", lambda kind, search: kernel)
    for index, case in enumerate(some_cases(60, (16, 24, 64))):
        check(replace(case, softcap=1.5 if index % 4 == 0 else None))
    assert len(forwards) > 40


def test_kernels_of_lists_begin_to_compile_in_both_forms_at_the_first_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths that do and that do not fill the last block. The launch itself compiles, or raises, where a compilation ahead has failed; no
    compilation holds a tensor."""
    from dilated_attention.backends.tiles import launch as tile_launch
    from dilated_attention.backends.tiles.rows import Form, Lists

    begun: list[bool] = []
    launched: list[tuple[Any, ...]] = []

    def submit(kernel: Any, arguments: Any, options: dict[str, Any], device: int) -> Future[Any]:
        assert arguments == [torch.float16, 1.5]
        assert [x.dtype for x in options["lists"]] == [torch.int32] * 8
        assert not any(isinstance(x, torch.Tensor) for x in options["lists"])
        begun.append(options["FORM"].even)
        compilation = Future[Any]()
        if len(begun) == 1:
            compilation.set_exception(ValueError("the compiler says no"))
        else:
            compilation.set_result(None)
        return compilation

    class Kernel:
        params = ()

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *arguments, **options: launched.append((*grid, arguments[1], options["FORM"].even))

    monkeypatch.setattr(tile_launch, "submit", submit)
    monkeypatch.setattr(triton_blocks, "_compilations", dict[Any, Any]())
    monkeypatch.setattr(triton_blocks, "on_device", lambda device: nullcontext())
    kernel, device, lists = Kernel(), torch.device("cuda", 0), Lists(*[torch.zeros(1, dtype=torch.int32)] * 8)

    def launch(programs: int, kind: str, even: bool) -> triton_blocks._Launch:
        options = {"FORM": Form(64, 64, 0, even, False, False), "lists": lists}
        return triton_blocks._Launch(kernel, programs, device, (kind,), (torch.zeros(1, dtype=torch.float16), 1.5), options)

    for programs, kind, even in ((3, "one", True), (5, "one", False), (7, "one", True), (0, "other", True), (9, "other", False)):
        launch(programs, kind, even)()
    assert begun == [True, False, False, True]
    assert launched == [(3, 1.5, True), (5, 1.5, False), (7, 1.5, True), (9, 1.5, False)]
    assert launch(1, "third", True).start() and not launch(1, "third", True).start() and not launch(1, "third", False).start()
