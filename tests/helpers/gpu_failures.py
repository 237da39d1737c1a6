"""Failures of ranks on real GPUs: each survivor says PASS or FAIL, and so does the whole.

    python tests/helpers/gpu_failures.py all --ranks 2          every mode, one after the other
    python tests/helpers/gpu_failures.py kill --ranks 4         one mode
    torchrun --nproc-per-node 2 tests/helpers/gpu_failures.py stall     the same under torchrun, which ends all ranks once one has died

Last line: ``PASS all`` or ``FAIL ...``. Without a GPU, and with DILATED_GPUS_ON_CPU=1, it runs over gloo, where the modes of the
watchdog are left out. ``gpus/test_failures.py`` runs every mode under pytest.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import datetime
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
from dilated_attention import ring_attention
from dilated_attention.distributed import Members, members_of
from dilated_attention.distributed.comm.handshake import agree
from dilated_attention.distributed.comm.p2p import wire_of
from dilated_attention.distributed.comm.watchdog import COLLECT, GRACE, POLL
from dilated_attention.distributed.errors import RingError
from tests.helpers.pool import SHARED, device_of

GPU = torch.cuda.is_available() and os.environ.get("DILATED_GPUS_ON_CPU") != "1"
TIMEOUT = 5.0
LIMIT = TIMEOUT + COLLECT + GRACE + 4 * POLL + 3.0
SILENT = "has not reported: dead, stalled or in another call"


def ring(members: Members, device: torch.device, hops: int, at_hop: Callable[[int], None], size: int = 1 << 20) -> None:
    """Passes a tensor around without waiting for the GPU, as attention does, and looks at it at the end."""
    wire = wire_of(members, TIMEOUT)
    after, before = (members.rank + 1) % members.size, (members.rank - 1) % members.size
    held = torch.full((size,), float(members.rank), device=device)
    coming = torch.empty_like(held)
    for hop in range(hops):
        at_hop(hop)
        wire.start([(after, held)], [(before, coming)], f"ring forward, hop {hop}: K and V").wait()
        held, coming = coming, held
    expected = float((members.rank - hops) % members.size)
    assert held[0].item() == held[-1].item() == expected, (held[0].item(), expected)


def finish(device: torch.device) -> None:
    if GPU:
        torch.cuda.synchronize(device)


def run(members: Members, device: torch.device) -> str:
    rank, peer, back = members.rank, (members.rank + 1) % members.size, (members.rank - 1) % members.size
    wire, gradients = wire_of(members, TIMEOUT), wire_of(members, TIMEOUT, "gradients")
    # the first exchange leaves rank 0 out, but for an empty tensor that tells the device
    nothing = torch.empty(0, device=device)
    wire.start([(peer, nothing)], [(back, nothing)], "nothing").wait()
    for dtype in (torch.bfloat16, torch.float32, torch.bool, torch.int16, torch.complex64, torch.int64):
        mine, got = torch.full((1000,), rank, device=device).to(dtype), torch.zeros(1000, device=device, dtype=dtype)
        other = torch.zeros_like(got)
        one = wire.start([(peer, mine), (peer, nothing)], [(back, got), (back, nothing)], f"{dtype}")
        two = gradients.start([(back, mine)], [(peer, other)], f"{dtype}, backwards")
        two.wait()
        one.wait()
        assert torch.equal(got, torch.full_like(got, back)) and torch.equal(other, torch.full_like(other, peer)), dtype
    ring(members, device, 500, lambda _: None)
    finish(device)
    small, hops, began = torch.zeros(64, device=device), 500, time.perf_counter()
    for _ in range(hops):
        wire.start([(peer, small), (peer, small)], [(back, small.clone()), (back, small.clone())], "timed").wait()
    cost = (time.perf_counter() - began) / hops * 1e6
    finish(device)
    return f"{cost:.1f} µs of CPU per exchange of two tensors each way, start and wait and two clones"


def compute(members: Members, device: torch.device) -> str:
    """Work queued on the GPU for longer than the timeout, before an exchange, is no stall."""
    wire_of(members, TIMEOUT)
    ring(members, device, 2, lambda _: None)
    cycles = int(2.5e9 * TIMEOUT * 2)
    began = time.monotonic()
    ring(members, device, 3, lambda hop: torch.cuda._sleep(cycles) if hop == 1 else None)
    took = time.monotonic() - began
    assert took > TIMEOUT + 1, f"the GPU was busy for {took:.1f} s only; the test shows nothing"
    return f"busy for {took:.1f} s, no alarm"


def capture(members: Members, device: torch.device) -> str:
    """The watch asks about exchanges while another thread captures a CUDA graph, which must survive it."""
    ring(members, device, 2, lambda _: None)
    wire = wire_of(members, TIMEOUT)
    x, got = torch.ones(64, device=device), torch.zeros(64, device=device)
    torch.cuda._sleep(int(2e9 * 4))
    going = wire.start([((members.rank + 1) % members.size, x)], [((members.rank - 1) % members.size, got)], "under way")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x + 1
        time.sleep(4 * POLL)
    going.wait()
    graph.replay()
    finish(device)
    assert y[0].item() == 2 and got[0].item() == 1
    return "captured while an exchange was watched"


def kill(members: Members, device: torch.device, victim: int = -1) -> None:
    def at_hop(hop: int) -> None:
        if hop == 5 and members.rank == victim % members.size:
            finish(device)
            os.kill(os.getpid(), signal.SIGKILL)

    ring(members, device, 200, at_hop)


def step(members: Members, device: torch.device) -> None:
    """Training steps of attention itself, in which a rank is killed."""
    shape, dtype = (1, 256, 4, 64), torch.bfloat16 if GPU else torch.float32
    q, k, v, dout = (torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(4))
    for index in range(100):
        if index == 5 and members.rank == members.size - 1:
            finish(device)
            os.kill(os.getpid(), signal.SIGKILL)
        # the first steps load libraries
        limit = 60.0 if index < 2 else TIMEOUT
        out = ring_attention(q, k, v, is_causal=True, backend="sdpa", seq_len=256 * members.size, timeout=limit)
        torch.autograd.grad(out, (q, k, v), dout)
    finish(device)


def stall(members: Members, device: torch.device) -> None:
    def at_hop(hop: int) -> None:
        if hop == 5 and members.rank == 1:
            time.sleep(TIMEOUT + 8)

    ring(members, device, 200, at_hop)


def raises(members: Members, device: torch.device) -> None:
    def at_hop(hop: int) -> None:
        if hop == 5 and members.rank == 1:
            raise MemoryError("out of memory on purpose")

    ring(members, device, 200, at_hop)


def stuck(members: Members, device: torch.device) -> None:
    """Rank 0 is in a C call that never returns when rank 1 leaves it: only the end of the process helps."""
    ring(members, device, 2, lambda _: None)
    if members.rank == 0:
        x = torch.ones(8, device=device)
        wire_of(members, TIMEOUT).start([(1, x)], [(1, x.clone())], "ring forward, hop 0: K and V")
        ctypes.CDLL(None).sleep(1000)
    elif members.rank == 1:
        time.sleep(LIMIT)


def mismatch(members: Members, device: torch.device) -> None:
    odd = members.rank == 1
    for same in ({"dtype": torch.float32 if odd else torch.bfloat16}, {"heads": 4 if odd else 8}, {"causal": not odd}):
        try:
            agree(members, {"function": "ring_attention", **same}, {"rows": 1}, TIMEOUT)
        except ValueError as error:
            (argument,) = same
            assert re.search(rf"ring_attention: ranks disagree on {argument}: .*rank 1 has {same[argument] if odd else ''}", str(error)), (
                error
            )
        else:
            raise AssertionError(f"{same} went unseen")
    raise ValueError("all refused")


# mode -> (what it plays, the error it ends with or None for none, a pattern found in the error's text)
ENDS: dict[str, tuple[Callable[[Members, torch.device], str | None], type[BaseException] | None, str]] = {
    "run": (run, None, ""),
    "compute": (compute, None, ""),
    "capture": (capture, None, ""),
    "mismatch": (mismatch, ValueError, "all refused"),
    "kill": (kill, RingError, "VICTIM " + SILENT),
    "kill0": (
        lambda members, device: kill(members, device, 0),
        RingError,
        "its server, usually global rank 0, has ended|store of torch.distributed",
    ),
    "step": (step, RingError, "VICTIM " + SILENT),
    "stall": (stall, RingError, "rank 1 " + SILENT + "|all ranks report|gave up waiting|store of torch.distributed"),
    "raise": (raises, RingError, "rank 1 " + SILENT),
    "stuck": (stuck, None, ""),
}
ON_GPU_ONLY = ("compute", "capture", "stuck")
MODES = [mode for mode in ENDS if GPU or mode not in ON_GPU_ONLY]


def rank_main(mode: str) -> int:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = device_of(int(os.environ["LOCAL_RANK"])) if GPU else torch.device("cpu")
    if GPU:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if GPU else "gloo", timeout=datetime.timedelta(seconds=600))
    members = members_of(None)
    play, kind, text = ENDS[mode]
    agree(members, {"mode": mode}, {}, 60.0)
    wire_of(members, 60.0)
    began = time.monotonic()
    told, failed = "", True
    try:
        told = play(members, device) or ""
        failed = kind is not None
    except BaseException as error:  # noqa: BLE001 - judged here
        told = f"{type(error).__name__} after {time.monotonic() - began:.1f} s: {error}"
        own = mode == "raise" and rank == 1
        right = isinstance(error, MemoryError) if own else kind is not None and isinstance(error, kind)
        found = own or re.search(text.replace("VICTIM", f"rank {world - 1}"), str(error)) is not None
        # a stalled one first wakes up
        failed = not right or not found or time.monotonic() - began > LIMIT + (TIMEOUT + 8) * (mode == "stall" and rank == 1)
    if mode == "stall" and rank == 1 and GPU and not told:
        # the others have given this group up: torch's watchdog ends what this rank still waits for, and soon the process
        told, failed = "woke up to a group that the others had given up", False
    print(f"{'FAIL' if failed else 'PASS'} rank {rank} {mode}: {told}", flush=True)
    if kind is None:
        dist.destroy_process_group()
    return int(failed)


def launch(mode: str, ranks: int) -> tuple[bool, str]:
    """Plays a mode in processes of its own, none of which outlives it: whether all ended as they should, and what each said."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, os.path.abspath(__file__), mode]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    began = time.monotonic()
    environments = [{**env, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
    processes = [subprocess.Popen(command, env=own, start_new_session=True, **pipes) for own in environments]  # type: ignore[call-overload]
    try:
        return judge(mode, processes, began)
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def judge(mode: str, processes: list[subprocess.Popen[str]], began: float) -> tuple[bool, str]:
    ranks, lines = len(processes), []
    good = True
    dies = {"kill": ranks - 1, "kill0": 0, "step": ranks - 1}.get(mode)
    for rank, process in enumerate(processes):
        try:
            output, _ = process.communicate(timeout=max(1.0, began + 90 + 2 * LIMIT - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            output = process.communicate()[0] + "\nHANGS"
        if rank == dies:
            right = process.returncode == -signal.SIGKILL
        elif mode == "stuck" and rank == 0:
            right = process.returncode == 1 and "so this process ends now" in output
        elif mode == "stall" and rank == 1 and GPU:
            # ended by its own error, or by torch's watchdog; but not by us
            right = "HANGS" not in output
        else:
            # where messages go through a network, NCCL reports a lost connection, after which torch's watchdog ends the process
            ends = (0, -signal.SIGABRT, -signal.SIGSEGV) if SHARED else (0,)
            right = process.returncode in ends and f"PASS rank {rank} {mode}" in output
        good &= right
        verdict = [line for line in output.splitlines() if line.startswith(("PASS", "FAIL"))]
        lines.append(f"  rank {rank}: exit code {process.returncode}: {' '.join(verdict) or '(no verdict)'}")
        if not right:
            lines.append("    " + "\n    ".join(output.splitlines()[-40:]))
    lines.append(f"{'PASS' if good else 'FAIL'} {mode}, {ranks} ranks, {time.monotonic() - began:.1f} s")
    return good, "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=["all", *ENDS])
    parser.add_argument("--ranks", type=int, default=2)
    args = parser.parse_args()
    if "RANK" in os.environ:
        return rank_main(args.mode)
    bad = []
    for mode in MODES if args.mode == "all" else [args.mode]:
        good, text = launch(mode, args.ranks)
        print(text, flush=True)
        bad += [] if good else [mode]
    print("FAIL " + ", ".join(bad) if bad else "PASS all")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
