"""The backend over a table of tiles, its kernels interpreted on a CPU. Compiled ones: tests/gpu/test_backends.py."""

import os
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")
from dilated_attention import attention, dilated_attention
from dilated_attention.backends import registry
from dilated_attention.backends.hardware import has_gluon
from dilated_attention.backends.tiles import call, table
from dilated_attention.backends.tiles import run as run_tiles
from dilated_attention.backends.tiles.call import prepared
from dilated_attention.backends.tiles.launch import NO_DEVICE, KernelLaunch
from dilated_attention.engine.branches import run_tiles as tiles
from dilated_attention.engine.ops import prepare
from dilated_attention.pattern import DilatedPattern
from dilated_attention.testing import Case, Space, measure, random_case
from tests.helpers.op_settings import calls_of

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="interprets kernels; a GPU has tests of its own")

SPACE = Space(head_dims=(1, 8, 24, 40, 48, 64), max_length=40)
# drawn so that few programs see every kind twice: the interpreter takes 20 ms for each
SEEDS = (125, 137, 379, 486, 521, 778, 913, 1001, 1087, 1404, 1589, 1971, 2017, 2225, 2257, 2475, 2596, 2649, 2947)


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    backend = registry.get("tiles")
    monkeypatch.setattr(backend, "capabilities", replace(backend.capabilities, devices=frozenset({"cpu", "cuda"})))
    registry.cached.clear()
    yield
    registry.cached.clear()


def tiles_of(monkeypatch: pytest.MonkeyPatch, **changes: int) -> None:
    sizes = run_tiles.sizes
    monkeypatch.setattr(run_tiles, "sizes", lambda *given: sizes(*given)._replace(**changes))


def check(case: Case, dtype: torch.dtype = torch.float32) -> None:
    assert not [result for result in measure(case, "tiles", dtype) if not result.passes], case


CASES = [*((seed, torch.float32, "none") for seed in SEEDS), *((seed, torch.float16, "none") for seed in (2017, 2649))]
CASES += [*((seed, torch.float32, "plane") for seed in SEEDS[::2]), (486, torch.float32, "line"), (2649, torch.float16, "alibi")]


@pytest.mark.parametrize(("seed", "dtype", "bias"), CASES)
def test_random_cases_match_float64(seed: int, dtype: torch.dtype, bias: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """float16: of bfloat16 the interpreter's ``tl.dot`` multiplies bit patterns. Half of the seeds have tiles of several parts, as long
    segments do."""
    if seed % 2:
        tiles_of(monkeypatch, rows=16)
    case = replace(random_case(seed, SPACE), bias=bias)
    check(case, dtype)


@pytest.mark.parametrize("changes", [{"num_queries": 70, "query_offset": 50}, {"bounds": (0, 7, 7, 90, 120)}], ids=["part", "documents"])
def test_segments_of_several_tiles_that_begin_anywhere(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a part of the queries, and of documents, of which a table is made from few at a time."""
    tiles_of(monkeypatch, rows=16, block=16)
    monkeypatch.setattr(table, "_TILE", 16)
    monkeypatch.setattr(call, "_DOCUMENTS", 2)
    case = Case(pattern=DilatedPattern((20, 45, 90), (1, 2, 1)), num_queries=120, num_keys=120, heads=2, kv_heads=2, lse_grad=True)
    for is_causal in (False, True):
        check(replace(case, is_causal=is_causal, **changes))


@pytest.mark.parametrize("seed", SEEDS[::2])
def test_problem_by_problem(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each a dense call with masks, random words and an lse that are views."""
    monkeypatch.setattr(prepare, "runs_on_tiles", lambda *_, **__: False)
    launches = calls_of(monkeypatch, type(registry.get("tiles")), "forward", "backward")
    case = random_case(seed, SPACE)
    check(case)
    assert launches or case.padding == "all"


# several entries, some keys of which are padding, and several key heads
@pytest.mark.parametrize("seed", [415, 630, 659, 753, 859, 1183])
def test_heads_in_turn(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small budget of memory: a share for each batch entry and key head, with words of dropout and rows of masks of its own.

    Without dropout such a call would be cut by positions, too, by the runner of branches.
    """
    case = replace(random_case(seed, SPACE), dropout_p=0.3)
    calls = calls_of(monkeypatch, tiles, "_masks_of")
    monkeypatch.setattr(tiles, "transient_budget", lambda _: 1)
    check(case)
    shares, group = {(share.batch, share.heads) for _, (_, share, _) in calls}, case.heads // case.kv_heads
    assert shares == {((b, b + 1), (h, h + group)) for b in range(case.batch) for h in range(0, case.heads, group)}


def test_tables_whose_making_was_interrupted_are_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """By Ctrl-C while kernels are compiled, say: else the next call would read what nothing wrote."""
    x = torch.randn(1, 21, 1, 8)
    call.tables_of.cache_clear()
    call.prepared.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(call.KernelLaunch, "__call__", mock.Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            attention(x, x, x, backend="tiles")
    torch.testing.assert_close(attention(x, x, x, backend="tiles"), attention(x, x, x, backend="math"))


@pytest.mark.parametrize("masks", [{}, {"dropout_p": 0.3, "bias": "plane", "padding": "some", "lse_grad": True}], ids=["plain", "masks"])
@pytest.mark.parametrize("window", [None, (30, None), (None, 30), (40, 25), (25, 0)])
def test_blocks_that_all_rows_of_a_tile_see(window: Any, masks: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """They are computed without a mask, before, between and after those that some rows see a part of."""
    tiles_of(monkeypatch, rows=32, block=16)
    # of each tensor with strides of its own
    masks = masks | {"layouts": ("heads_first", "packed", "contiguous", "packed")}
    case = Case(pattern=DilatedPattern((2**62,), (1,), "zero"), num_queries=90, num_keys=90, heads=2, window=window, **masks)
    check(case)


def made(N: int = 24, heads: int = 2, batch: int = 2) -> list[torch.Tensor]:
    torch.manual_seed(N)
    return [torch.randn(batch, N, h, 16) for h in (heads, min(heads, 2), min(heads, 2), heads)]


def run(tensors: list[torch.Tensor], *branches: list[int], dlse: torch.Tensor | None = None, **options: Any) -> list[torch.Tensor]:
    """out, lse, dq, dk, dv, all of one seed of dropout; ``dlse`` is expanded."""
    *leaves, dout = (x.detach().requires_grad_() for x in tensors)
    torch.manual_seed(3)
    out, lse = dilated_attention(*leaves, *branches, return_lse=True, backend="tiles", **options)
    grads = torch.autograd.grad(out, leaves, dout) if dlse is None else torch.autograd.grad((out, lse), leaves, (dout, dlse.expand_as(lse)))
    return [out.detach(), lse.detach(), *grads]


def test_a_call_like_one_before_has_its_own_numbers() -> None:
    """Launches are kept with their numbers; another probability, or a mask of other strides, has launches of its own."""
    tensors, mask = made(heads=1), torch.arange(48).view(2, 24) % 5 == 1
    calls = [{"dropout_p": 0.2}, {"dropout_p": 0.6}, {"key_padding_mask": mask}]
    calls += [
        {"key_padding_mask": torch.nn.functional.pad(~mask, (0, 9))[:, :24]},
        {"dlse": torch.rand(2, 1, 24)},
        {"dlse": torch.ones(())},
    ]

    def called(*, apart: bool) -> list[list[torch.Tensor]]:
        results = []
        for i, options in enumerate(calls):
            if apart or i == 0:
                prepared.cache_clear()
                registry.cached.clear()
            results.append(run(tensors, [24], [1], **options))
        return results

    for together, alone in zip(called(apart=False), called(apart=True), strict=True):
        assert all(map(torch.equal, together, alone))


@pytest.mark.parametrize(("begin", "first"), [(0, 3), (0, 40), (10, 70)])
def test_padding_in_one_word_of_a_block(begin: int, first: int) -> None:
    """Of blocks of 64 keys, which are in two words of 32 bits, or in three where their document does not begin with a word."""
    q, k, v, _ = made(begin + 64, heads=1, batch=1)
    padding = torch.zeros(1, begin + 64, dtype=torch.bool)
    padding[:, first : first + 3] = True
    options = {"key_padding_mask": padding, "cu_seqlens": torch.tensor([0, begin, begin + 64])}
    torch.testing.assert_close(*(attention(q, k, v, backend=name, **options) for name in ("tiles", "math")))


@pytest.mark.parametrize(("N", "bounds"), [(0, None), (5, (0, 0, 5, 5))])
def test_nothing_to_attend_to(N: int, bounds: tuple[int, ...] | None) -> None:
    check(Case(pattern=DilatedPattern((2**62,), (1,)), num_queries=N, num_keys=N, heads=2, kv_heads=2, bounds=bounds))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True, "cu_seqlens": torch.tensor([0, 7, 20], dtype=torch.int32)},
        {"head_offsets": "blocked", "tail": "zero_keys", "mixture_grad": "detached"},
        {"key_padding_mask": torch.arange(20)[None] > 15},
    ],
    ids=["plain", "documents", "torchscale", "padding"],
)
def test_what_compiles_ahead_is_what_is_launched(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Both passes are run on meta tensors, as on a GPU: they start the launches of the pass itself, with equal dtypes and constants."""
    started: list[Any] = []
    launched: list[Any] = []
    launch: Any = KernelLaunch.__call__
    ahead: Any = tiles.compile_ahead

    def recorded(self: KernelLaunch, tensors: Any, device: int) -> None:
        dtypes = [x.dtype for x in tensors]
        (started if device == NO_DEVICE else launched).append((self.kernel.fn.__name__, dtypes, self.constants, self.options))
        if device != NO_DEVICE:
            launch(self, tensors, device)

    def on_gpu(plan: Any, tensors: Any, has_padding: bool) -> None:
        there = tuple(SimpleNamespace(shape=x.shape, stride=x.stride, dtype=x.dtype, device=torch.device("cuda")) for x in tensors)
        ahead(plan, there, has_padding)

    monkeypatch.setattr(KernelLaunch, "__call__", recorded)
    monkeypatch.setattr(tiles, "compile_ahead", on_gpu)
    monkeypatch.setattr(tiles, "on_device", lambda device: nullcontext())
    monkeypatch.setattr(tiles, "_started", set())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    q, k, v = (torch.randn(1, 20, 2, 16, requires_grad=True) for _ in range(3))
    branches: dict[str, Any] = {"segment_lengths": [8, 16], "dilation_rates": [1, 2]} | options
    dilated_attention(q, k, v, **branches, backend="tiles").sum().backward()
    assert len(started) > 4
    assert all(one in launched for one in started) and all(one in started for one in launched)


def test_the_kernels_for_hopper_are_not_taken_on_an_amd_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """An MI300 reports capability 9.4."""
    if not has_gluon.__wrapped__():
        pytest.skip("this Triton has no Gluon")
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert not has_gluon.__wrapped__()
