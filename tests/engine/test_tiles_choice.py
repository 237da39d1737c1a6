"""Whether a call runs as a whole on the table of tiles or problem by problem on a library: estimates for GPUs that are not here."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from dilated_attention import DilatedPattern, explain_backend, plan_attention
from dilated_attention.backends import AttentionRequest, Hardware, rates, registry
from dilated_attention.engine.branches.problems import Shape
from dilated_attention.engine.ops import prepare
from dilated_attention.engine.ops.prepare import packed_library, runs_on_tiles
from dilated_attention.engine.ops.settings import DENSE
from dilated_attention.factory import EXAMPLES
from dilated_attention.pattern import LocalWindow
from dilated_attention.planning.gpus import find_gpu
from tests.helpers.op_settings import settings as settings_of_call

LONGNET = DilatedPattern((2048, 4096, 8192, 16384, 32768), (1, 2, 4, 6, 12))
REQUEST = AttentionRequest(hardware=EXAMPLES["hopper"], dtype=torch.bfloat16, head_dim=64, num_heads=12, num_kv_heads=12)


def machine(*packages: str, hardware: Hardware = EXAMPLES["hopper"]) -> Hardware:
    return replace(hardware, packages=frozenset({"triton", *packages}))


def is_chosen(
    N: int,
    request: AttentionRequest = REQUEST,
    *,
    is_backward: bool = False,
    documents: int = 1,
    backend: str = "auto",
    both: bool = False,
) -> bool:
    """What a pass is told that runs on N positions in equal documents."""
    ranges = tuple((N * i // documents, N * (i + 1) // documents) for i in range(documents))
    shape = Shape(12, 12, (0, N), (0, N), ranges, False)
    request = replace(request, needs_grad=is_backward, length=N // documents)
    return runs_on_tiles(LONGNET, shape, request, 1, registry.select(request, backend).name, both=both, named=backend != "auto")


@pytest.mark.parametrize("is_backward", [False, True])
@pytest.mark.parametrize("packages", [("flash-attn-4",), ("flash-attn-3",), ()], ids=str)
def test_short_calls_take_the_tiles_and_long_ones_the_library(packages: tuple[str, ...], is_backward: bool) -> None:
    # without flash-attn the library is cuDNN's, which plans every shape
    request = replace(REQUEST, hardware=machine(*packages), shapes_repeat=not packages)
    lengths = [2**i for i in range(8, 21)]
    chosen = [is_chosen(N, request, is_backward=is_backward) for N in lengths]
    assert chosen[0] and chosen[lengths.index(4096)] and not chosen[-1]
    # one crossing
    assert chosen == sorted(chosen, reverse=True)


@pytest.mark.parametrize(
    "asked",
    [
        replace(REQUEST, hardware=EXAMPLES["turing"], dtype=torch.float16),
        replace(REQUEST, hardware=replace(EXAMPLES["hopper"], packages=EXAMPLES["hopper"].packages - {"triton"})),
        replace(REQUEST, dtype=torch.float64),
        replace(REQUEST, precision="fp8"),
    ],
    ids=["old GPU", "no triton", "float64", "fp8"],
)
def test_never_where_they_have_a_reason_against_it(asked: AttentionRequest) -> None:
    assert registry.get("tiles").reasons_against(asked)
    assert not any(is_chosen(N, asked) for N in (64, 256, 4096, 2**20))


def test_single_choices() -> None:
    # many documents are many launches of a library
    assert not is_chosen(131_072) and is_chosen(131_072, documents=64)
    # kernels that are no match lose at any length: what is left are torch's memory-efficient kernels or plain torch
    masked = replace(REQUEST, hardware=machine("flash-attn-4"), key_mask=True)
    assert all(is_chosen(2**20, masked, is_backward=b) for b in (False, True))
    # what was asked for by name stays
    assert is_chosen(1024) and not is_chosen(1024, backend="flash4") and is_chosen(2**20, backend="tiles")
    # hardware without a table has rates to go by
    bare = Hardware(device_type="cuda", capability=(8, 6), packages=frozenset({"triton"}), name="86")
    assert rates.table_of(bare.architecture) is None
    assert [is_chosen(n, replace(REQUEST, hardware=bare)) for n in (1024, 2**20)] == [True, False]


def test_passes_of_detached_mixing_go_one_way() -> None:
    """The backward reads what the forward kept, in an order of its own, so one answer holds for both: on any kernels."""
    lengths = [*range(2048, 100_000, 2048), 2**18, 2**20]
    differ = 0
    for hardware, head_dim, deterministic in (
        (EXAMPLES["hopper"], 64, False),
        # forward flash4, backward flash3
        (EXAMPLES["hopper"], 48, False),
        # forward flash4 or torch's, backward tiles
        (machine("flash-attn-4"), 48, True),
        (machine(), 64, True),
        (machine(hardware=EXAMPLES["ada"]), 128, True),
    ):
        request = replace(REQUEST, hardware=hardware, head_dim=head_dim, deterministic=deterministic)
        for N in lengths:
            apart = [is_chosen(N, request, is_backward=b) for b in (False, True)]
            both = [is_chosen(N, request, is_backward=b, both=True) for b in (False, True)]
            assert both[0] == both[1], (request, N)
            differ += apart[0] != apart[1]
    assert differ


def test_another_order_of_backends_is_heeded_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one answer holds for both passes, too."""
    assert not is_chosen(2**17, both=True)
    monkeypatch.setattr(registry, "_orders", dict(registry._orders))
    registry.set_order("sm90", ("sdpa_efficient",))
    assert is_chosen(2**17, both=True)


@pytest.mark.parametrize("backend", ["auto", "tiles"])
@pytest.mark.parametrize("is_backward", [False, True])
def test_one_head_of_a_very_long_sequence_is_cut_by_positions(is_backward: bool, backend: str) -> None:
    """The runner of branches does so on the same kernels, except where a call has what it does not know."""
    request = replace(REQUEST, hardware=machine(), head_dim=64, num_heads=1, num_kv_heads=1, needs_grad=is_backward)

    def chosen(N: int, window: tuple[int, int] | None = None, **options: bool) -> bool:
        shape = Shape(1, 1, (0, N), (0, N), ((0, N),), False, window)
        library = registry.get("tiles") if backend == "auto" else registry.select(request, backend)
        return runs_on_tiles(LONGNET, shape, replace(request, **options), 1, library.name, named=backend != "auto")

    assert chosen(2**20) and not chosen(2**24) and not chosen(2**24, key_mask=True)
    assert chosen(2**24, dropout=True) and chosen(2**24, bias=True) and chosen(2**24, window=(4096, 4096))


@pytest.mark.parametrize("first", [0, 25000])
@pytest.mark.parametrize("is_backward", [False, True])
def test_a_part_of_the_queries(first: int, is_backward: bool) -> None:
    """Ranks 0 and 1 of two, GigaPath's segments. Measured backwards: 3.5 to 4.0 ms on tiles, 6.2 where a library's problems are summed."""
    pattern = DilatedPattern((1024, 5792, 32768, 185363, 1048576), (1, 2, 4, 8, 16))
    request = replace(REQUEST, hardware=machine("flash-attn-3"), head_dim=48, num_heads=16, num_kv_heads=16, needs_grad=is_backward)
    request = replace(request, length=12500)
    shape = Shape(16, 16, (first, first + 25000), (0, 50000), ((0, 50000),), False)
    assert runs_on_tiles(pattern, shape, request, 1, registry.select(request).name)


@pytest.mark.parametrize("is_backward", [False, True])
def test_documents_take_the_library_that_computes_them_in_one_launch(is_backward: bool) -> None:
    """FlashAttention-4 is preferred at D = 128 in the backward, but takes a launch for each document; 21 ms were 9 (64/8 heads)."""
    request = replace(REQUEST, hardware=machine("flash-attn-4", "flash-attn-3"), head_dim=128, num_heads=64, num_kv_heads=8)
    request = replace(request, causal=True, needs_grad=is_backward, length=1000)
    documents = tuple((i * 1000, (i + 1) * 1000) for i in range(60))
    dense, whole = DilatedPattern((2**40,), (1,), "zero"), (0, 60_000)
    packed = Shape(64, 8, (30_000, 60_000), whole, documents, True)
    for preferred in ("flash4", "flash3"):
        assert packed_library(dense, packed, request, 1, preferred) == "flash3"
    one = Shape(64, 8, whole, whole, (whole,), True)
    assert packed_library(dense, one, request, 1, "flash4") == "flash4"
    # masks by position need problems
    assert packed_library(dense, packed, replace(request, dropout=True), 1, "flash4") == "flash4"


def test_a_rank_of_a_dense_ring_takes_the_library_where_it_is_one_launch() -> None:
    """The last quarter of 8,192 positions, 32/8 heads: 0.33 ms on FlashAttention-3 and 0.49 on the tiles (H100)."""
    request = replace(REQUEST, hardware=machine("flash-attn-3"), head_dim=128, num_heads=32, num_kv_heads=8, causal=True, length=8192)
    shape = Shape(32, 8, (6144, 8192), (0, 8192), ((0, 8192),), True, aligned_last=True)
    assert not runs_on_tiles(DilatedPattern((8192,), (1,)), shape, request, 1, registry.select(request).name, host_ms=0.6)


@pytest.mark.parametrize("is_backward", [False, True])
@pytest.mark.parametrize(("head_dim", "chosen"), [(64, "tiles"), (96, "tiles"), (128, "tiles"), (256, "sdpa_flash")])
def test_windows_take_what_was_fastest_with_a_window(head_dim: int, chosen: str, is_backward: bool) -> None:
    """131,072 positions and 1,024 keys a query: torch's FlashAttention-2 took 3.1 ms forward at D = 64, tiles 1.4 (H200)."""
    q = torch.empty(1, 2**17, 8, head_dim, dtype=torch.bfloat16, device="meta")
    call = settings_of_call(branches=DENSE, window=(1023, 0), needs_grad=True)
    tensors = (q,) * (5 if is_backward else 3)
    plan = prepare.make_plan(call, tensors, is_backward, hardware=machine())
    assert plan.backend.name == chosen
    if head_dim <= 128:
        plan = prepare.make_plan(call, tensors, is_backward, hardware=machine("flash-attn-4"))
        assert plan.backend.name == "flash4"
    # one launch, with the window: nothing is cut, summed or copied
    assert plan.one_launch and plan.options.mask.band == (-1023, 0)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("first", [0, 17, 40])
@pytest.mark.parametrize("window", [None, (7, 0), (None, 0), (7, None), (7, 5)])
def test_times_of_a_part_of_the_queries_are_those_of_their_pairs(window: Any, first: int, is_causal: bool) -> None:
    dense, shape = DilatedPattern((2**40,), (1,), "zero"), Shape(12, 12, (first, first + 34), (0, 96), ((0, 96),), is_causal, window)
    mask = LocalWindow(window or (None, None)).dense_mask(34, 96, 12, is_causal=is_causal, query_offset=first)
    assert prepare._pairs(dense, shape) == mask.sum()


@pytest.mark.parametrize("gpu", ["H200 SXM", "RTX 4090", "T4"])
def test_an_explanation_and_a_plan_name_what_a_call_runs_on(gpu: str) -> None:
    """At lengths that are no power of two, where a choice by the exact length differs from one by the rounded."""
    # plans are for a machine with these packages
    hardware = machine("flash-attn-4", hardware=replace(EXAMPLES["hopper"], capability=find_gpu(gpu).capability))
    patterns = (DilatedPattern((700, 3000), (1, 2)), LONGNET)
    sizes = itertools.product((1500, 7000, 50_000), patterns, (torch.float32, torch.float16), (48, 64, 128), (False, True))
    for n, pattern, dtype, head_dim, causal in sizes:
        shape = {"num_positions": n, "num_heads": 8, "head_dim": head_dim, "dtype": dtype, "is_causal": causal}
        told = explain_backend(pattern=pattern, hardware=hardware, **shape)
        branches = {"segment_lengths": pattern.segment_lengths, "dilation_rates": pattern.dilation_rates}
        planned = plan_attention("dilated", gpu=gpu, find_longest=False, **branches, **shape)
        q = torch.empty(1, n, 8, head_dim, dtype=dtype, device="meta")
        call = settings_of_call(branches=(pattern.segment_lengths, pattern.dilation_rates, *DENSE[2:]), is_causal=causal, needs_grad=True)
        for is_backward, chosen, of_plan in zip((False, True), (told.forward, told.backward), planned.passes, strict=True):
            plan = prepare.make_plan(call, (q,) * (5 if is_backward else 3), is_backward, pattern=pattern, hardware=hardware)
            assert chosen == of_plan.backend == plan.backend.name, (n, pattern, dtype, head_dim, causal, is_backward)
