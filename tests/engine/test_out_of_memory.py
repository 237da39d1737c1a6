"""Memory that runs out inside our ops: the error keeps its type and torch's words, and says what was needed, is there and fits."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dilated_attention import (
    DilatedPattern,
    attention,
    block_sparse_attention,
    block_sparse_dilated_attention,
    decode_attention,
    dilated_attention,
)
from dilated_attention.backends import registry
from dilated_attention.distributed.errors import RingError
from dilated_attention.engine.branches import fused_merge, strategy
from dilated_attention.engine.decode import dispatch
from dilated_attention.engine.decode import row as torch_decode
from dilated_attention.engine.oom import report
from dilated_attention.engine.oom.device_memory import MemoryInfo, memory_info, size_text
from dilated_attention.engine.oom.requirement import MemoryRequirement, TensorInfo, largest
from dilated_attention.engine.oom.requirements import dilated_requirement
from dilated_attention.functional.fused_norm_linear import norm_linear
from dilated_attention.pattern import LocalWindow
from tests.helpers.op_settings import settings
from tests.helpers.pool import Pool

GIB = 2**30
TORCH = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.80 GiB of which 1.00 GiB is free."
CPU = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 2147483648 bytes."
CPU_NAMES = ("sdpa_cpu", "math")


def fails(kind: type[RuntimeError] = torch.OutOfMemoryError, text: str = TORCH) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise kind(text)

    return fail


def leaves(length: int = 256) -> list[torch.Tensor]:
    return [torch.randn(2, length, 4, 16, requires_grad=True) for _ in range(3)]


CALLS: dict[str, Callable[..., torch.Tensor]] = {
    "dilated_attention": lambda q, k, v: dilated_attention(q, k, v, [64, 256], [1, 2]),
    "attention": lambda q, k, v: attention(q, k, v, is_causal=True),
    "block_sparse_attention": lambda q, k, v: block_sparse_attention(q, k, v, LocalWindow(64)),
    "block_sparse_dilated_attention": lambda q, k, v: block_sparse_dilated_attention(q, k, v, [64], [2], LocalWindow(64)),
}


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Makes a pass of every CPU backend fail."""

    def breaks(pass_: str, **how: Any) -> None:
        for name in CPU_NAMES:
            for method in (pass_, f"{pass_}_blocks"):
                monkeypatch.setattr(type(registry.get(name)), method, fails(**how))

    return breaks


@pytest.mark.parametrize(("kind", "text"), [(torch.OutOfMemoryError, TORCH), (RuntimeError, CPU)], ids=["gpu", "cpu"])
@pytest.mark.parametrize("pass_", ["forward", "backward"])
@pytest.mark.parametrize("name", CALLS)
def test_every_attention_says_it(name: str, pass_: str, kind: type[RuntimeError], text: str, broken: Callable[..., None]) -> None:
    q, k, v = leaves()
    out = CALLS[name](q, k, v)
    broken(pass_, kind=kind, text=text)
    with pytest.raises(RuntimeError) as found:
        CALLS[name](q, k, v) if pass_ == "forward" else out.sum().backward()
    assert type(found.value) is kind and found.value.__cause__ is None
    # accelerate and others look into a single argument for torch's words
    (said,) = found.value.args
    assert said.startswith(f"the {pass_} of {name} ran out of memory: it asked for 2.00 GiB in ")
    assert text in said and "q (2, 256, 4, 16), k (2, 256, 4, 16), v (2, 256, 4, 16) in float32" in said
    assert re.search(r"needs: (about|at least) [\d.]+ MiB: q, k, v", said) and "memory: cpu: the process has" in said
    assert "would fit:" in said and "in place of 2 sequences" in said


def test_a_decoder_says_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_decode.Cached, "places", fails())
    q, cache = torch.randn(3, 1, 4, 16), torch.randn(3, 100, 2, 16)
    with pytest.raises(
        torch.OutOfMemoryError, match=r"(?s)the forward of decode_attention.*decode \(engine/decode/row.py\).*cache of \(3, 100, 2, 16\)"
    ):
        decode_attention(q, cache, cache, torch.tensor([7, 99, 50]), DilatedPattern((32, 64), (1, 2)))


@pytest.mark.parametrize("pass_", ["forward", "backward"])
def test_linear_layers_say_it(pass_: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from dilated_attention.functional import fused_norm_linear_torch

    x, weight = torch.randn(2, 8, 16, requires_grad=True), torch.randn(4, 16, requires_grad=True)
    (y,) = norm_linear(x, [weight], [], norm="layer")
    monkeypatch.setattr(fused_norm_linear_torch, pass_, fails())
    with pytest.raises(torch.OutOfMemoryError, match=rf"the {pass_} of norm_linear ran out.*"):
        norm_linear(x, [weight], [], norm="layer") if pass_ == "forward" else y.sum().backward()


def test_other_errors_are_left_alone(broken: Callable[..., None]) -> None:
    q, k, v = leaves()
    broken("forward", kind=RuntimeError, text="something else")
    with pytest.raises(RuntimeError, match=r"^something else$"):
        dilated_attention(q, k, v, [64], [1])


def test_what_cannot_be_explained_hides_nothing(broken: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = leaves()
    broken("forward")
    monkeypatch.setattr(report, "memory_info", fails(ValueError, "no such file"))  # type: ignore[arg-type]
    with pytest.raises(torch.OutOfMemoryError, match=r"(?s)no details are available \(ValueError: no such file\).*CUDA out of memory"):
        dilated_attention(q, k, v, [64], [1])


def test_an_error_that_is_kept_keeps_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[torch.Tensor]] = []

    def fail(self: Any, q: torch.Tensor, *_: Any, **__: Any) -> Any:
        scratch = torch.zeros(1000)
        made.append(weakref.ref(scratch))
        raise torch.OutOfMemoryError(TORCH)

    for name in CPU_NAMES:
        monkeypatch.setattr(type(registry.get(name)), "forward", fail)
    q, k, v = leaves()
    with pytest.raises(torch.OutOfMemoryError) as found:
        dilated_attention(q, k, v, [64], [1])
    assert made[0]() is None and "fail (" not in str(found.value) and found.value.__traceback__ is not None


def test_an_error_in_a_chunk_keeps_no_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which are variables of the function around the one that failed. A GPU's path, on a CPU."""
    results: list[weakref.ref[torch.Tensor]] = []
    forward = fused_merge.forward

    def short(plan: Any, layers: Any, tensors: Any, given: tuple[torch.Tensor, ...], *arguments: Any, **options: Any) -> None:
        results.extend(weakref.ref(x if x._base is None else x._base) for x in given)
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "new_empty", fails(torch.OutOfMemoryError, TORCH))
            forward(plan, layers, tensors, given, *arguments, **options)

    monkeypatch.setattr(strategy, "_is_fused", lambda *_: True)
    monkeypatch.setattr(fused_merge, "forward", short)
    q, k, v = leaves()
    with pytest.raises(torch.OutOfMemoryError) as found:
        dilated_attention(q, k, v, [16, 32, 64], [1, 1, 1], backend="sdpa_cpu")
    assert len(results) == 2 and [x() for x in results] == [None, None]
    # and where it happened is still told
    assert "fused_merge.py" in str(found.value) and found.value.__traceback__ is not None


def test_through_torch_compile(broken: Callable[..., None]) -> None:
    q, k, v = leaves(128)
    compiled = torch.compile(lambda q, k, v: dilated_attention(q * 2, k, v, [64, 128], [1, 2]).sum(), fullgraph=True, backend="aot_eager")
    loss = compiled(q, k, v)
    broken("backward")
    with pytest.raises(torch.OutOfMemoryError, match="the backward of dilated_attention ran out"):
        loss.backward()
    broken("forward")
    with pytest.raises(torch.OutOfMemoryError, match="the forward of dilated_attention ran out"):
        compiled(q, k, v)


def arguments(length: int, *, batch: int = 4, dtype: torch.dtype = torch.bfloat16, device: str = "cuda", **changes: Any) -> dict[str, Any]:
    """Of the op, without any memory: so of a GPU that is not there."""
    where = torch.device(device)
    x = TensorInfo((batch, length, 16, 64), dtype, where, batch * length * 16 * 64 * dtype.itemsize)
    tensors = {"q": x, "k": x, "v": x, "key_padding_mask": None, "cu_seqlens": None, "seed": None, "kept": None}
    call = settings(branches=((2048, 16384), (1, 4), "cyclic", "all", "mask"), scale=0.125, needs_grad=True)
    return {**tensors, **call._asdict(), **changes}


def gpu_room(left: int, *, pieces: int = 0) -> MemoryInfo:
    return MemoryInfo(
        device="cuda:0", total=80 * GIB, free=left, allocated=70 * GIB, reserved=70 * GIB + pieces, bound="the driver's figure"
    )


def numbers(suggestions: list[str], pattern: str) -> list[int]:
    found = [re.search(pattern, way) for way in suggestions]
    return [int(x[1].replace(",", "")) for x in found if x]


@pytest.mark.parametrize("left", [GIB, 5 * GIB, 20 * GIB])
def test_suggestions_fit_and_are_the_largest(left: int) -> None:
    requirement = dilated_requirement(arguments(2**20, dtype=torch.float32))
    assert requirement.bytes_at(requirement.setting) > left + requirement.held
    suggestions = report.suggestions_for(requirement, gpu_room(left), None)
    there = report.MARGIN * (left + requirement.held)
    (length,) = numbers(suggestions, r"^([\d,]+) in place of 1,048,576 positions")
    assert requirement.bytes_at(dataclasses.replace(requirement.setting, length=length)) <= there
    assert requirement.bytes_at(dataclasses.replace(requirement.setting, length=length + 2**12)) > there
    for batch in numbers(suggestions, r"^(\d) in place of 4 sequences"):
        assert (
            requirement.bytes_at(dataclasses.replace(requirement.setting, batch=batch))
            <= there
            < requirement.bytes_at(dataclasses.replace(requirement.setting, batch=batch + 1))
        )
    half = requirement.bytes_at(dataclasses.replace(requirement.setting, dtype=torch.bfloat16))
    assert any("bfloat16 in place of float32" in way for way in suggestions) == (half <= there)
    (gpus,) = numbers(suggestions, r"^ring_dilated_attention over (\d+) GPUs")
    assert gpus >= 2


def test_detached_mixing_is_named_where_it_is_what_is_too_much() -> None:
    def requirement_of(detached: bool) -> MemoryRequirement:
        return dilated_requirement(arguments(2**15, detached=detached))

    detached, exact = requirement_of(True), requirement_of(False)
    more = detached.bytes_at(detached.setting) - exact.bytes_at(exact.setting)
    # branches of 1/1 and 1/4 of the positions
    assert more == 4 * 2**15 * 16 * 64 * 2 * 5 // 4
    enough = int(exact.bytes_at(exact.setting) / report.MARGIN) - exact.held + 2**20
    assert any('mixture_grad="exact"' in way for way in report.suggestions_for(detached, gpu_room(enough), None))
    assert not any("mixture_grad" in way for way in report.suggestions_for(exact, gpu_room(enough // 2), None))


def test_pieces_are_named_where_they_would_do(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    requirement = dilated_requirement(arguments(2**18))
    (text,) = [way for way in report.suggestions_for(requirement, gpu_room(0, pieces=3 * GIB), 2 * GIB) if "pieces" in way]
    assert "3.00 GiB reserved" in text and "PYTORCH_ALLOC_CONF=expandable_segments:True" in text
    assert not any("pieces" in way for way in report.suggestions_for(requirement, gpu_room(0, pieces=GIB), 2 * GIB))
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    (text,) = [way for way in report.suggestions_for(requirement, gpu_room(0, pieces=3 * GIB), 2 * GIB) if "pieces" in way]
    assert "joins" not in text


def test_nothing_is_suggested_that_does_not_fit() -> None:
    requirement = dataclasses.replace(dilated_requirement(arguments(2**18)), held=0, suggestions=())
    assert report.suggestions_for(requirement, gpu_room(1000), None) == []
    unknown = dataclasses.replace(gpu_room(GIB), free=None)
    assert unknown.left is None and report.suggestions_for(requirement, unknown, None) == [] and "unknown" in str(unknown)


def test_asked_bytes_and_bisection() -> None:
    assert report.asked_bytes(TORCH) == 2 * GIB == report.asked_bytes(CPU)
    assert report.asked_bytes("HIP out of memory. Tried to allocate 12.50 MiB.") == 12.5 * 2**20
    assert report.asked_bytes("out of memory") is None
    for limit in range(20):
        for step in (1, 3):
            fitting = [n for n in range(step, 15, step) if n <= limit]
            assert largest(lambda n, limit=limit: n <= limit, 15, step) == (fitting[-1] if fitting else None)
    assert [size_text(x) for x in (0, 1023, 1024, 1536 * 2**20, 2**50)] == [
        "0 bytes",
        "1,023 bytes",
        "1.00 KiB",
        "1.50 GiB",
        "1,024.00 TiB",
    ]


def test_the_decoder_in_torch_is_counted() -> None:
    """Its copies are what is measured, and the kernel that makes none is named on a GPU."""
    from dilated_attention.profiling import profile_memory

    q, cache = torch.randn(4, 1, 8, 64), torch.randn(4, 4096, 8, 64)
    positions = torch.full((4,), 4095)
    with profile_memory(device="cpu") as profile:
        decode_attention(q, cache, cache, positions)
    (seen,) = profile.seen
    requirement = seen.requirement
    assert 0.5 < requirement.bytes_at(requirement.setting) / profile.peak_allocated <= 1.05
    assert dispatch.reasons_against("triton", dispatch.request_of(q, 8), dense=True)


CHILD = """
import re, resource, sys, torch
from dilated_attention import dilated_attention
torch.set_num_threads(1)
def step(batch, length):
    q, k, v = (torch.ones(batch, length, 1, 256, requires_grad=True) for _ in range(3))
    dilated_attention(q, k, v, [64, 256], [1, 4]).backward(torch.ones(batch, length, 1, 256))
step(1, 128)
used = int(re.search(r"VmSize:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
limit = used + 350 * 2**20
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
try:
    step(2, 32768)
except RuntimeError as error:
    assert type(error) is RuntimeError
    said = str(error)
print(said)
length = int(re.search(r"([\\d,]+) in place of 32,768 positions", said)[1].replace(",", ""))
step(2, length)
print("fits:", length)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits of address space are Linux's")
def test_a_process_with_a_limit_is_told_a_length_that_fits() -> None:
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
    done = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, timeout=120, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert "RLIMIT_AS" in done.stdout and "DefaultCPUAllocator" in done.stdout
    length = int(done.stdout.rsplit("fits:", 1)[1])
    assert 4096 < length < 32768


def test_memory_of_this_machine() -> None:
    room = memory_info(torch.device("cpu"))
    assert room.device == "cpu" and room.allocated > 0
    if Path("/proc/meminfo").exists():
        assert room.free is not None and 0 <= room.free <= room.total and room.bound in str(room)


def one_rank_runs_out(rank: int, world: int) -> str:
    from dilated_attention import ring_attention
    from dilated_attention.distributed.exchange import context_parallel

    group = dist.new_group(list(range(world)))
    plain = context_parallel.kernel_ready
    if rank == 1:
        # before anything is sent
        context_parallel.kernel_ready = fails()
    q, k, v = (torch.randn(1, 64, 2, 8) for _ in range(3))
    try:
        ring_attention(q, k, v, group=group, exchange="ring", layout="contiguous", seq_len=64 * world, timeout=3.0)
    except (RingError, torch.OutOfMemoryError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        context_parallel.kernel_ready = plain
    return "passed"


def test_a_rank_that_runs_out_is_named_by_the_others() -> None:
    # a pool of its own: gloo may end a process some time after one of its groups has timed out
    pool = Pool(2)
    try:
        other, own = pool.run(one_rank_runs_out)
    finally:
        pool.close()
    assert own.startswith(
        "OutOfMemoryError: the forward of ring_attention ran out of memory: it asked for 2.00 GiB in _inputs "
        "(distributed/exchange/context_parallel.py)"
    )
    assert "on rank 1 of 2" in own and "keys of other ranks" in own and "over 4 ranks in place of 2" in own
    assert other.startswith("RingError: rank 0: forward, hop 1: K and V: receiving") and "rank 1 has not reported" in other
