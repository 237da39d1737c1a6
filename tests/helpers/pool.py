"""Live processes that tests send functions to: starting eight of gloo takes a second, a case in them a millisecond.

results = pool_of(4).run(function, *args)               # function(rank, world, *args), importable, in every process, over gloo
results = pool_of(4, "nccl").run(function, *args)       # the same with a GPU for each process

A function that makes tensors puts them where ``here()`` says, and then runs on either.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import datetime
import faulthandler
import functools
import multiprocessing as mp
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

# the ranks that may share a machine's GPUs
SHARED = int(os.environ.get("DILATED_GPUS_SHARED", "0"))
# the kind of device that this process computes on; set in a pool's processes
_device_type = "cpu"
# Linux: the signal a process gets when its parent ends
_PR_SET_PDEATHSIG = 1


def here() -> torch.device:
    """Where tensors of this process lie: on its own GPU in a pool over NCCL, else on the CPU."""
    import torch

    return torch.device("cuda", torch.cuda.current_device()) if _device_type == "cuda" else torch.device("cpu")


def device_of(rank: int) -> torch.device:
    """The GPU of a rank; call it before the process makes a group.

    Where there are fewer GPUs than ranks, some share one. NCCL refuses that of two processes of one machine, so each rank counts as a
    machine of its own, and messages go through sockets: nothing is as fast as on GPUs of their own, everything else is the same.
    """
    import torch

    count = torch.cuda.device_count()
    if count < SHARED:
        os.environ |= {"NCCL_HOSTID": f"rank {rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
        rank %= count
    return torch.device("cuda", rank)


def on_its_gpu(rank: int) -> torch.device:
    """From now on, this process, which is that rank, computes on its GPU."""
    import torch

    global _device_type
    _device_type = "cuda"
    device = device_of(rank)
    torch.cuda.set_device(device)
    return device


def patience() -> float:
    """Seconds that a rank waits for another: on a GPU, where one may compile a kernel that others do not need, minutes."""
    return 240.0 if _device_type == "cuda" else 30.0


# what tests of several processes import; what is not installed is passed over
OF_TESTS = ["torch.distributed", "torch._dynamo", "tests.conftest", "dilated_attention.distributed", "dilated_attention.models"]
# what the scripts import that train, save and draw
OF_SCRIPTS = ["torch.distributed.checkpoint.state_dict", "torch.distributed.fsdp", "torch.utils.tensorboard", "safetensors.torch", "tqdm"]
OF_SCRIPTS += ["h5py", "sklearn.metrics", "matplotlib.figure", "matplotlib.backends.backend_agg"]
OF_TRANSFORMERS = [f"transformers.models.{name}.modeling_{name}" for name in ("llama", "mistral", "gemma2", "gpt_oss")]
OF_TRANSFORMERS += ["transformers.trainer", "peft"]


def preloaded() -> list[str]:
    """What this process's tests import in theirs: the more of them there are, the more is worth importing once."""
    names = [*OF_TESTS]
    if "tests.helpers.scripts" in sys.modules:
        names += OF_SCRIPTS
    if "transformers" in sys.modules:
        names += OF_TRANSFORMERS
    # tests whose functions pools run
    folders = ("tests.helpers.", "tests.distributed.", "tests.models.", "tests.integrations.")
    modules = [(name, module) for name, module in sorted(sys.modules.items()) if name.startswith(folders)]
    names += [name for name, module in modules if {"pool_of", "here"} & vars(module).keys()]
    return [*names, "tests.helpers.frozen"]


def fresh_processes() -> Any:
    """Processes without this one's threads and tensors, yet with torch imported once for all of them, which takes seconds."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(preloaded())
    return context


# after the first failing rank, the others have this long to fail themselves
AFTERMATH = 5.0
# until a process has loaded torch, on a machine that is busy with other tests
STARTING = 180.0


class PoolError(AssertionError):
    """Some ranks raised, died or did not return."""


class Pool:
    """Processes 0 to world − 1 of one world. After a failure they are replaced, for messages may lie about unread.

    Args:
        backend: of ``init_process_group``. With ``"nccl"`` in it, rank r has GPU ``device_of(r)``.
        bound: the group is told its GPU at once, which makes the communicator at once and others by splitting it.
    """

    def __init__(self, world: int, backend: str = "gloo", *, bound: bool = False) -> None:
        self.world, self.backend, self.bound = world, backend, bound
        self.processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._owner = os.getpid()
        self._watch: subprocess.Popen[bytes] | None = None
        # before multiprocessing's own, which waits for processes that stand still
        atexit.register(self.close)

    @property
    def on_gpus(self) -> bool:
        return "nccl" in self.backend

    @property
    def device(self) -> str:
        """Where the parent, which is no rank, computes what ranks are held to."""
        return "cuda" if self.on_gpus else "cpu"

    def run(self, function: Callable[..., Any], *args: Any, timeout: float | None = None) -> list[Any]:
        """What ``function(rank, world, *args)`` returns on each rank.

        Args:
            timeout: seconds; None for 120, or 300 on GPUs, where a case may compile kernels.

        Raises:
            PoolError: naming all ranks that raised, with their tracebacks, and those that hang, with where they are.
        """
        if not self.processes:
            self._open()
        task = pickle.dumps((function, args))
        self._signal(signal.SIGCONT)
        for rank, pipe in enumerate(self._pipes):
            try:
                pipe.send_bytes(task)
            except OSError:
                self.close()
                raise PoolError(f"rank {rank} of {self.world} died since the last case") from None
        results: dict[int, Any] = {}
        errors: dict[int, str] = {}
        deadline = time.monotonic() + (timeout if timeout is not None else 300.0 if self.on_gpus else 120.0)
        while len(results) + len(errors) < self.world:
            open_ = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in results and rank not in errors}
            ready = wait(list(open_), max(0.0, deadline - time.monotonic()))
            if not ready:
                stacks = self._stacks(sorted(open_.values()))
                errors |= {rank: f"did not return; it is at\n{stack}" for rank, stack in stacks.items()}
                break
            for pipe in ready:
                rank = open_[pipe]  # type: ignore[index]
                try:
                    is_result, value = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
                except (EOFError, OSError):
                    self.processes[rank].join(1)
                    is_result, value = False, f"died with exit code {self.processes[rank].exitcode}"
                (results if is_result else errors)[rank] = value
                if not is_result:
                    deadline = min(deadline, time.monotonic() + AFTERMATH)
        if errors:
            self.close()
            told = "\n".join(f"--- rank {rank} of {self.world}: {errors[rank]}" for rank in sorted(errors))
            name = getattr(function, "__name__", function)
            raise PoolError(f"{name}: ranks {sorted(errors)} of {self.world} failed\n{told}")
        self._signal(signal.SIGSTOP)
        return [results[rank] for rank in range(self.world)]

    def _signal(self, signal_: signal.Signals) -> None:
        """Between cases, processes over gloo stand still: each group that it has made keeps a thread that wakes a hundred times a second,
        and the hundreds of them that idle pools have took a quarter of two cores."""
        if not self.on_gpus:
            for process in self.processes:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal_)

    def close(self) -> None:
        if self._owner != os.getpid():
            # a forked child, whose exit runs what its parent registered
            return
        if self._watch is not None:
            self._watch.kill()
            self._watch.communicate()
            self._watch = None
        for process in self.processes:
            # with what it started, such as compilers; a process that is still starting has no group of its own yet
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
        for process in self.processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self.processes, self._pipes = [], []
        if self._folder is not None:
            self._folder.cleanup()

    def _open(self) -> None:
        # on GPUs nothing is forked: whatever had asked for CUDA before would spoil it for all children
        context = mp.get_context("spawn") if self.on_gpus else fresh_processes()
        self._folder = tempfile.TemporaryDirectory(prefix="pool")
        for rank in range(self.world):
            ours, theirs = context.Pipe()
            arguments = (rank, self.world, self.backend, self.bound, theirs, self._folder.name)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self._pipes.append(ours)
        try:
            # rank 0 serves the store on a port that the system picked
            if not self._pipes[0].poll(STARTING):
                self.close()
                raise PoolError(f"rank 0 has not served a store within {STARTING:g} s")
            port = self._pipes[0].recv()
            for pipe in self._pipes[1:]:
                pipe.send(port)
        except EOFError:
            self.close()
            raise PoolError("rank 0 died before it served a store; its output tells why") from None
        if not self.on_gpus:
            # processes that stand still do not see that this one has been killed: a shell reads the end of a pipe, and ends them
            kill = ["sh", "-c", 'read _; kill -9 "$@"', "sh", *(str(process.pid) for process in self.processes)]
            self._watch = subprocess.Popen(kill, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True)

    def _stacks(self, ranks: list[int]) -> dict[int, str]:
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.processes[rank].pid, signal.SIGUSR1)
        time.sleep(0.5)
        assert self._folder is not None
        files = {rank: Path(self._folder.name) / f"stack{rank}" for rank in ranks}
        return {rank: file.read_text() if file.exists() else "(still starting)" for rank, file in files.items()}


def _serve(rank: int, world: int, backend: str, bound: bool, pipe: Connection, folder: str) -> None:
    os.setpgid(0, 0)
    if os.path.exists("/proc/self"):
        # a process that waits for a GPU would outlive a parent that was killed
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    import torch
    import torch.distributed as dist

    from tests.conftest import POISONED, _poisoned

    torch.set_num_threads(1)
    device = on_its_gpu(rank) if "nccl" in backend else None
    for owner, name in POISONED:
        setattr(owner, name, _poisoned(getattr(owner, name)))
    with open(os.path.join(folder, f"stack{rank}"), "w") as stacks:
        faulthandler.register(signal.SIGUSR1, stacks)
        if rank == 0:
            store = dist.TCPStore("127.0.0.1", 0, world, True, wait_for_workers=False)
            pipe.send(store.port)
        else:
            store = dist.TCPStore("127.0.0.1", pipe.recv(), world, False)
        limit = datetime.timedelta(seconds=60 if device is None else 300)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=limit, device_id=device if bound else None)
        while True:
            try:
                task = pipe.recv_bytes()
            except EOFError:
                # the parent has gone
                os._exit(0)
            try:
                function, args = pickle.loads(task)
                answer = pickle.dumps((True, function(rank, world, *args)))
            except BaseException:  # noqa: BLE001 - whatever it is, the parent raises it
                answer = pickle.dumps((False, traceback.format_exc()))
            pipe.send_bytes(answer)


@functools.cache
def pool_of(world: int, backend: str = "gloo", bound: bool = False) -> Pool:
    """The pool of this many processes, one per test process, made when first run."""
    return Pool(world, backend, bound=bound)
