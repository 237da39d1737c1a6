"""Memory that runs out inside our ops: an error of torch's type, with its words, that says what was needed, is there and fits."""

from __future__ import annotations

import gc
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
from torch._subclasses.fake_tensor import FakeTensorMode

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
from dilated_attention.engine.decode import row as torch_decode
from dilated_attention.engine.oom import report
from dilated_attention.engine.oom.report import MemoryInfo, memory_info
from dilated_attention.engine.oom.requirement import MemoryRequirement, dilated_requirement, size_text
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
            monkeypatch.setattr(type(registry.get(name)), pass_, fails(**how))

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
    # torch's own error is the cause, as it was raised
    assert type(found.value) is kind and str(found.value.__cause__) == text
    # accelerate and others look into a single argument for torch's words
    (said,) = found.value.args
    assert said.startswith(f"the {pass_} of {name} ran out of memory\n") and said.endswith(text)
    assert "q (2, 256, 4, 16), k (2, 256, 4, 16), v (2, 256, 4, 16) in float32" in said
    assert re.search(r"needs: (about|at least) [\d.]+ MiB: q, k, v", said) and "memory: cpu: the process has" in said
    assert "would fit: 1 in place of 2 sequences at once: " in said


def test_a_decoder_says_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_decode.Cached, "places", fails())
    q, cache = torch.randn(3, 1, 4, 16), torch.randn(3, 100, 2, 16)
    with pytest.raises(
        torch.OutOfMemoryError,
        match=r"(?s)the forward of decode_attention.*a cache of \(3, 100, 2, 16\), at most 45 keys per row.*2 in place of 3 sequences",
    ):
        decode_attention(q, cache, cache, torch.tensor([7, 99, 50]), DilatedPattern((32, 64), (1, 2)))


def test_other_errors_are_left_alone(broken: Callable[..., None]) -> None:
    q, k, v = leaves()
    broken("forward", kind=RuntimeError, text="something else")
    with pytest.raises(RuntimeError, match=r"^something else$"):
        dilated_attention(q, k, v, [64], [1])


def test_what_cannot_be_explained_hides_nothing(broken: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = leaves()
    broken("forward")
    monkeypatch.setattr(report, "memory_info", fails(ValueError, "no such file"))  # type: ignore[arg-type]
    with pytest.raises(torch.OutOfMemoryError, match=r"(?s)CUDA out of memory.*no details are available \(ValueError: no such file\)"):
        dilated_attention(q, k, v, [64], [1])


def test_no_memory_is_kept_once_the_error_is_gone(broken: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """The frames of a traceback hold the failed call's tensors; nothing else does, and there are no reference cycles."""
    made: list[weakref.ref[torch.Tensor]] = []

    def fail(self: Any, q: torch.Tensor, *_: Any, **__: Any) -> Any:
        scratch = torch.zeros(1000)
        made.append(weakref.ref(scratch))
        raise torch.OutOfMemoryError(TORCH)

    for name in CPU_NAMES:
        monkeypatch.setattr(type(registry.get(name)), "forward", fail)
    q, k, v = leaves()
    gc.collect()
    gc.disable()
    try:
        try:
            dilated_attention(q, k, v, [64], [1])
        except torch.OutOfMemoryError as error:
            kept = made[0]()
            # it counts as free
            assert kept is not None and report._allocated(error.__cause__, {"q": q}, q.device) >= 4000  # type: ignore[arg-type]
            del kept
        assert made[0]() is None
    finally:
        gc.enable()


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


def requirement_of(length: int, *, batch: int = 4, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> MemoryRequirement:
    """Of the op, on a GPU that is not there."""
    call = settings(branches=((2048, 16384), (1, 4), "cyclic", "all", "mask"), scale=0.125, needs_grad=True)
    with FakeTensorMode():
        x = [torch.empty(batch, length, 16, 64, dtype=dtype, device="cuda:0") for _ in range(3)]
        tensors = dict(zip("qkv", x, strict=True)) | {"key_padding_mask": None, "cu_seqlens": None, "seed": None}
        return dilated_requirement({**tensors, **call._asdict(), **changes})


def fits(requirement: MemoryRequirement, free: int, cached: int = 0) -> str:
    memory = MemoryInfo(free, "the driver's figure", 70 * GIB, cached)
    return report.what_fits(requirement, memory, requirement.held)


@pytest.mark.parametrize("free", [GIB, 5 * GIB, 20 * GIB])
@pytest.mark.parametrize("batch", [1, 4])
def test_the_setting_fits_and_is_the_largest(free: int, batch: int) -> None:
    requirement = requirement_of(2**22 // batch, batch=batch)
    there = report.MARGIN * (free + requirement.held)
    assert requirement.bytes_at() > there
    found = re.match(r"([\d,]+) in place of ([\d,]+) (sequences|positions).*, after torch.cuda.empty_cache\(\)$", fits(requirement, free))
    assert found is not None
    name, step = ("batch", 1) if found[3] == "sequences" else ("length", 2**14)
    size, most = (int(x.replace(",", "")) for x in found.groups()[:2])
    assert (name == "batch") is (batch > 1) and most == getattr(requirement.setting, name)
    assert requirement.bytes_at(**{name: size}) <= there < requirement.bytes_at(**{name: size + step})


def test_pieces_are_named_where_they_would_do(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    requirement = requirement_of(2**18)
    more = requirement.bytes_at() - requirement.held
    assert "PYTORCH_ALLOC_CONF=expandable_segments:True" in fits(requirement, 0, int(1.2 * more))
    assert "expandable" not in fits(requirement, 0, more // 2)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    assert "3 in place of 4 sequences" in fits(requirement, 0, int(1.2 * more))


def test_nothing_is_suggested_that_does_not_fit() -> None:
    requirement = requirement_of(2**18)
    memory = MemoryInfo(1000, "", 70 * GIB)
    assert report.what_fits(requirement, memory, 0) == "no part of this call, while other tensors hold 70.00 GiB: free some of that"


def test_sizes_are_readable() -> None:
    sizes = {0: "0 bytes", 1023: "1,023 bytes", 1024: "1.00 KiB", 1536 * 2**20: "1.50 GiB", 2**50: "1,024.00 TiB"}
    assert {size: size_text(size) for size in sizes} == sizes


def test_the_decoder_in_torch_is_counted() -> None:
    from dilated_attention.profiling import profile_memory

    q, cache = torch.randn(4, 1, 8, 64), torch.randn(4, 4096, 8, 64)
    positions = torch.full((4,), 4095)
    with profile_memory(device="cpu") as profile:
        decode_attention(q, cache, cache, positions)
    ((requirement, _),) = profile.seen
    assert 0.5 < requirement.bytes_at() / profile.peak_allocated <= 1.05


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
    step(1, 65536)
except RuntimeError as error:
    assert type(error) is RuntimeError
    said = str(error)
print(said)
length = int(re.search(r"([\\d,]+) in place of 65,536 positions", said)[1].replace(",", ""))
step(1, length)
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
    assert 16384 < length < 65536


def test_memory_of_this_machine() -> None:
    memory = memory_info(torch.device("cpu"))
    assert memory.allocated > 0 and memory.cached == 0
    if Path("/proc/meminfo").exists():
        assert memory.free is not None and memory.free >= 0 and memory.bound


def one_rank_runs_out(rank: int, world: int) -> str:
    from dilated_attention import ring_attention
    from dilated_attention.distributed import ring_pass

    group = dist.new_group(list(range(world)))
    plain = ring_pass.kernel_ready
    if rank == 1:
        # before anything is sent
        ring_pass.kernel_ready = fails()
    q, k, v = (torch.randn(1, 64, 2, 8) for _ in range(3))
    try:
        ring_attention(q, k, v, group=group, exchange="ring", layout="contiguous", seq_len=64 * world, timeout=3.0)
    except (RingError, torch.OutOfMemoryError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        ring_pass.kernel_ready = plain
    return "passed"


def test_a_rank_that_runs_out_is_named_by_the_others() -> None:
    # a pool of its own: gloo may end a process some time after one of its groups has timed out
    pool = Pool(2)
    try:
        other, own = pool.run(one_rank_runs_out)
    finally:
        pool.close()
    assert own.startswith("OutOfMemoryError: the forward of ring_attention ran out of memory\n")
    assert "on rank 1 of 2" in own and "keys of other ranks" in own and "would fit: 63 in place of 64 positions on each rank" in own
    assert other.startswith("RingError: rank 0: forward, hop 1: K and V: receiving") and "rank 1 has not reported" in other
