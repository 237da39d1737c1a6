"""Forked children, such as workers of a DataLoader: no lock that another thread held stops them, no cache is half changed."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import dilated_attention
from dilated_attention.backends.flash.flash4_launch_cache import Replay
from dilated_attention.distributed.comm import watchdog
from dilated_attention.engine.blocks import lists
from dilated_attention.pattern import LocalWindow
from dilated_attention.pattern.blocks.block_lists import BlockLists

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
PACKAGE = Path(dilated_attention.__file__).parent


def in_fork(run: Callable[[], object], seconds: float = 20.0) -> None:
    """``run`` in a forked child; fails where that raises, or does not end."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            # as in workers of a DataLoader: threads of OpenMP do not live on in a child
            torch.set_num_threads(1)
            run()
            code = 0
        except BaseException as error:  # noqa: BLE001  told to the parent
            os.write(2, f"in the child: {type(error).__name__}: {error}\n".encode())
        os._exit(code)
    ended = time.monotonic() + seconds
    while time.monotonic() < ended:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            assert status == 0, f"the child ended with {status}"
            return
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    pytest.fail("the child does not go on")


@contextmanager
def in_thread(run: Callable[[Callable[[], None]], object]) -> Iterator[None]:
    """``run(pause)`` in a thread, which is inside ``pause`` while the block runs."""
    inside, over = threading.Event(), threading.Event()

    def pause() -> None:
        inside.set()
        over.wait(60)

    thread = threading.Thread(target=run, args=(pause,))
    thread.start()
    assert inside.wait(20)
    try:
        yield
    finally:
        over.set()
        thread.join()


def _lists(num_positions: int = 256) -> BlockLists:
    return lists.block_lists(LocalWindow(64), num_positions, 2, device="cpu")


def test_a_cache_of_lists_that_another_thread_changes() -> None:
    lists.clear_block_lists()
    kept = _lists()

    def change(pause: Callable[[], None]) -> None:
        with lists._lock:
            lists._cache["half"] = None  # type: ignore[index,assignment]
            pause()
            del lists._cache["half"]

    def child() -> None:
        assert "half" not in lists._cache
        assert _lists().num_entries == kept.num_entries
        lists.clear_block_lists()

    with in_thread(change):
        in_fork(child)
    # and a cache that nobody was changing is kept
    in_fork(lambda: _same(_lists(), kept))
    # a lock that the forking thread itself holds is its own in the child, too
    with lists._lock:
        in_fork(lambda: _same(_lists(), kept))
    assert _lists() is kept


def _same(x: object, y: object) -> None:
    assert x is y


class _Slow:
    """Row starts whose differences another thread is about to make."""

    def __init__(self, pause: Callable[[], None]) -> None:
        self._pause = pause

    def diff(self) -> torch.Tensor:
        self._pause()
        return torch.ones(2)


def test_a_cached_property_that_another_thread_makes() -> None:
    kept = _lists(512)
    expected = bool((kept.row_starts.diff() > 0).all()) and kept.masks is None

    def make(pause: Callable[[], None]) -> object:
        fields = {name: getattr(kept, name) for name in BlockLists.__dataclass_fields__}
        fields["row_starts"], fields["masks"] = _Slow(pause), None
        lists: Any = object.__new__(BlockLists)
        lists.__dict__.update(fields)
        return lists.fills_every_row

    with in_thread(make):
        in_fork(lambda: _same(_lists(512).fills_every_row, expected))


class _Interface:
    """Stands for FlashAttention-4's interface."""

    @staticmethod
    def run() -> None:
        pass


def test_a_recording_that_another_thread_makes() -> None:
    interface: Any = _Interface
    interface.run.compile_cache = cache = {}
    x = torch.zeros(4)

    def record(pause: Callable[[], None]) -> None:
        Replay(("run",), 0)(interface, [x], (), pause)

    def child() -> None:
        assert interface.run.compile_cache is cache
        ran = []
        Replay(("run",), 0)(interface, [torch.zeros(4)], (), lambda: ran.append(1))
        assert ran
        assert interface.run.compile_cache is cache

    with in_thread(record):
        assert interface.run.compile_cache is not cache
        in_fork(child)
    assert interface.run.compile_cache is cache


class _Wire:
    """Stands for a wire of a group."""

    failed: str | None = None
    queue = watchdog.Queue()
    timeout = 1.0


def test_a_monitor_whose_lock_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "_monitor", watchdog.Monitor())
    wire: Any = _Wire()
    watchdog.watch(wire)
    monitor = watchdog._monitor

    def hold(pause: Callable[[], None]) -> None:
        with monitor._lock, monitor._stop._cond:
            pause()

    def child() -> None:
        assert watchdog._monitor is not monitor and watchdog._monitor._thread is None
        watchdog.watch(wire)
        thread = watchdog._monitor._thread
        assert thread is not None
        assert thread.is_alive()
        # a monitor that the parent's still is: its lock, too
        monitor.add(wire)

    try:
        with in_thread(hold):
            in_fork(child)
    finally:
        monitor.stop()


_EXITS = """
import os, sys, threading
from dilated_attention.distributed.comm import watchdog as watch
class Wire:
    failed, queue, timeout = None, watch.Queue(), 1.0
wire = Wire()
watch.watch(wire)
held = threading.Event()
def hold():
    with watch._monitor._stop._cond:
        held.set()
        threading.Event().wait(5)
threading.Thread(target=hold, daemon=True).start()
held.wait()
pid = os.fork()
if pid == 0:
    # the interpreter's own way out, with what runs at exit
    sys.exit(0)
print(os.waitpid(pid, 0)[1], flush=True)
os._exit(0)
"""


def test_a_child_ends_by_itself_although_the_watching_thread_held_its_event() -> None:
    with subprocess.Popen([sys.executable, "-c", _EXITS], stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            out, _ = process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            pytest.fail("the child does not end")
    assert out.strip() == "0"


_GROUP = """
import os, sys, time
import torch, torch.distributed as dist
import dilated_attention
from dilated_attention.distributed import RingError
rank, path = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
q = torch.randn(1, 8, 2, 8)
codes = []
# a group that no call has met yet, then the same after one has
for met in ("new", "met"):
    began = time.monotonic()
    pid = os.fork()
    if pid == 0:
        try:
            dilated_attention.ring_attention(q, q, q, timeout=20.0)
        except RingError as error:
            print(met, error)
            ok = "forked" in str(error) and "spawn" in str(error) and time.monotonic() - began < 15
            sys.stdout.flush()
            os._exit(0 if ok else 3)
        except BaseException as error:
            print(met, type(error), error, flush=True)
        os._exit(4)
    codes.append(os.waitpid(pid, 0)[1])
    # the parents' own group works as before
    dilated_attention.ring_attention(q, q, q, timeout=20.0)
dist.destroy_process_group()
sys.exit(1 if any(codes) else 0)
"""


def test_a_group_of_the_parent_is_refused_in_the_child_at_once(tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", _GROUP, str(rank), str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        for rank in (0, 1)
    ]
    try:
        found = [(process.communicate(timeout=90)[0], process.returncode) for process in ranks]
    except subprocess.TimeoutExpired:
        for process in ranks:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        pytest.fail("a child of a rank does not end")
    assert [code for _, code in found] == [0, 0], found


class _Attends(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        q = torch.randn(1, 128, 2, 8)
        return dilated_attention.block_sparse_attention(q, q, q, LocalWindow(64)).sum()


@pytest.mark.slow
def test_workers_of_a_data_loader_while_a_thread_clears_lists() -> None:
    # what the first call imports is imported before anything forks
    _Attends()[0]
    over = threading.Event()

    def clear() -> None:
        while not over.is_set():
            lists.clear_block_lists()
            _lists(128)

    thread = threading.Thread(target=clear)
    thread.start()
    try:
        for _ in range(5):
            loader = torch.utils.data.DataLoader(_Attends(), num_workers=2, timeout=20, multiprocessing_context="fork")
            assert len(list(loader)) == 8
    finally:
        over.set()
        thread.join()


@pytest.mark.slow
def test_every_lock_of_the_package_is_one_that_a_fork_renews() -> None:
    names = {"Lock", "RLock", "Condition", "Semaphore", "BoundedSemaphore", "Barrier", "cached_property"}
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        if path == PACKAGE / "fork.py":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and node.attr in names and isinstance(node.value, ast.Name):
                found.append(f"{path.relative_to(PACKAGE)}:{node.lineno}: {node.value.id}.{node.attr}")
            if isinstance(node, ast.ImportFrom) and node.module in ("threading", "functools"):
                found += [f"{path.relative_to(PACKAGE)}:{node.lineno}: {x.name}" for x in node.names if x.name in names]
    assert not found
