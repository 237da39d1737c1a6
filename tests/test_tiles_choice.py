"""Whether a call runs as a whole on the table of tiles or problem by problem on a library: estimates for GPUs that are not here."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dilated_attention import DilatedPattern
from dilated_attention.backends import Hardware, Options, Request, preference, registry
from dilated_attention.engine.plan import Shape
from dilated_attention.engine.run import Call
from dilated_attention.engine.tiles_choice import runs_on_tiles
from dilated_attention.factory import EXAMPLES

LONGNET = DilatedPattern((2048, 4096, 8192, 16384, 32768), (1, 2, 4, 6, 12))
REQUEST = Request(hardware=EXAMPLES["hopper"], dtype=torch.bfloat16, head_dim=64, num_heads=12, num_kv_heads=12)


def is_chosen(
    N: int,
    library: str = "flash4",
    request: Request = REQUEST,
    *,
    is_backward: bool = False,
    documents: int = 1,
    device: str = "cuda",
    **changes: Any,
) -> bool:
    ranges = tuple((N * i // documents, N * (i + 1) // documents) for i in range(documents))
    shape = Shape(12, 12, (0, N), (0, N), ranges, False)
    call = Call(registry.get(library), Options(scale=0.125), request=replace(request, needs_grad=is_backward, length=N))
    q: Any = SimpleNamespace(device=torch.device(device), shape=(1, N, 12, request.head_dim))
    return runs_on_tiles(LONGNET, shape, q, replace(call, **changes), is_backward)


@pytest.fixture(autouse=True)
def nothing_measured_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preference, "measured_here", lambda hardware: None)


@pytest.mark.parametrize("is_backward", [False, True])
@pytest.mark.parametrize("library", ["flash4", "flash3", "sdpa_cudnn"])
def test_short_calls_take_the_tiles_and_long_ones_the_library(library: str, is_backward: bool) -> None:
    lengths = [2**i for i in range(8, 21)]
    chosen = [is_chosen(N, library, is_backward=is_backward) for N in lengths]
    assert chosen[0] and chosen[lengths.index(4096)] and not chosen[-1]
    # one crossing
    assert chosen == sorted(chosen, reverse=True)


def test_many_documents_are_many_launches_of_a_library() -> None:
    N = 131_072
    assert not is_chosen(N)
    assert is_chosen(N, documents=64)
    assert is_chosen(N, documents=8) >= is_chosen(N, documents=2)


@pytest.mark.parametrize(
    "request",
    [
        replace(REQUEST, hardware=EXAMPLES["turing"]),
        replace(REQUEST, hardware=replace(EXAMPLES["hopper"], packages=EXAMPLES["hopper"].packages - {"triton"})),
        replace(REQUEST, dtype=torch.float64),
        replace(REQUEST, precision="fp8"),
        replace(REQUEST, head_dim=320),
    ],
    ids=["old GPU", "no triton", "float64", "fp8", "head dim"],
)
def test_never_where_they_have_a_reason_against_it(request: Request) -> None:
    assert registry.get("tiles").why_not(request)
    assert not any(is_chosen(N, library, request) for N in (256, 4096) for library in ("math", "flex", "flash4"))


def test_kernels_that_are_no_match_lose_at_any_length() -> None:
    for library in ("math", "flex", "sdpa_efficient"):
        assert is_chosen(2**20, library)
    single = replace(REQUEST, dtype=torch.float32)
    assert is_chosen(2**20, "math", single)
    assert is_chosen(1024, "sdpa_efficient", single)


def test_what_was_asked_for_by_name_stays() -> None:
    assert is_chosen(1024)
    assert not is_chosen(1024, named=True)
    assert not is_chosen(1024, device="cpu")
    # chosen by its place in the order, or named
    assert is_chosen(2**20, "tiles", named=True) and is_chosen(2**20, "tiles")


def test_passes_of_detached_mixing_go_one_way() -> None:
    """The backward reads what the forward kept, so their times are added up before they are compared."""
    apart = {N: [is_chosen(N, is_backward=b) for b in (False, True)] for N in range(4096, 200_000, 4096)}
    assert any(forward != backward for forward, backward in apart.values())
    for N, (forward, backward) in apart.items():
        both = [is_chosen(N, is_backward=b, detached=True, needs_grad=True) for b in (False, True)]
        assert both[0] == both[1]
        assert forward != backward or both[0] == forward


def test_a_measured_rate_moves_the_crossing(monkeypatch: pytest.MonkeyPatch) -> None:
    N = 2**20
    assert not is_chosen(N)
    timings = [SimpleNamespace(backend="tiles", tflops=900.0), SimpleNamespace(backend="flash4", tflops=300.0)]
    table = SimpleNamespace(row_for=lambda request: SimpleNamespace(timings=timings))
    monkeypatch.setattr(preference, "measured_here", lambda hardware: table)
    monkeypatch.setattr(preference, "generation", lambda: -1)
    assert is_chosen(N)


def test_hardware_without_a_table_has_rates_to_go_by() -> None:
    bare = Hardware(device_type="cuda", capability=(8, 6), packages=frozenset({"triton"}), name="86")
    request = replace(REQUEST, hardware=bare)
    assert preference.shipped(bare.architecture) is None
    assert is_chosen(1024, "sdpa_flash", request) and not is_chosen(2**20, "sdpa_flash", request)
