"""Files of the package are the old ones or the new ones, whatever interrupts a write; locks end with their holder."""

from __future__ import annotations

import errno
import io
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dilated_attention import files
from dilated_attention.backends import tuning_table
from dilated_attention.backends.tuning_table import Timing, TuningTable
from dilated_attention.backends.tuning_table import TuningRow as Preferred
from dilated_attention.models import LongNetConfig
from dilated_attention.pattern import DilatedPattern

# what files are written by: a failure is put into each call of each
CALLS = [(os, "open"), (os, "mkdir"), (os, "chmod"), (os, "fsync"), (os, "replace"), (os, "unlink"), (io, "open")]


def _table(folder: Path, version: int) -> None:
    row = Preferred(which="forward", dtype="half", head_dim=64, length=256, causal=True, timings=(Timing("math", 1.0, float(version)),))
    tuning_table.save(TuningTable(architecture="cpu", environment={}, date="2026-01-01", source="", rows=(row,)), folder / "table.json")


def _picture(folder: Path, version: int) -> None:
    DilatedPattern([4], [1]).show(4 * version, 1, path=str(folder / "pattern.png"))


def _config(folder: Path, version: int) -> None:
    LongNetConfig(embed_dim=32 * version, num_layers=1, num_heads=2, attention="dense").save(folder / "config.json")


WRITERS: dict[str, Callable[[Path, int], Any]] = {
    "preference table": _table,
    "picture of a pattern": _picture,
    "configuration": _config,
}


def contents(folder: Path) -> dict[str, bytes]:
    """Of all files, in folders, too, but for what a failure of cleaning up leaves: a lock's file, and a hidden folder."""
    found = {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
    return {name: data for name, data in found.items() if not (name.startswith(".") and (".part-" in name or name.endswith(".lock")))}


def failing(monkeypatch: pytest.MonkeyPatch, at: int, error: BaseException) -> list[int]:
    """The ``at``-th call of any of ``CALLS`` raises. Returns a list of one number: calls so far."""
    count = [0]

    def patched(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            count[0] += 1
            if count[0] == at:
                raise error
            return function(*args, **kwargs)

        return call

    for owner, name in CALLS:
        monkeypatch.setattr(owner, name, patched(getattr(owner, name)))
    return count


FULL, INTERRUPTED = OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()
# drawing takes long, and its files go through the same door
DRAWN = ("picture of a pattern",)
FAILURES = [(what, error) for what in WRITERS for error in (FULL, INTERRUPTED) if error is FULL or what not in DRAWN]


@pytest.mark.slow
@pytest.mark.parametrize(("what", "error"), FAILURES, ids=lambda x: x if isinstance(x, str) else type(x).__name__)
def test_a_failure_at_any_call_leaves_the_old_files_or_the_new(what: str, error: BaseException, tmp_path: Path) -> None:
    write = WRITERS[what]
    for name in ("new", "old"):
        (tmp_path / name).mkdir()
        write(tmp_path / name, 1)
        if name == "new":
            write(tmp_path / name, 2)
    old, new = contents(tmp_path / "old"), contents(tmp_path / "new")
    assert old.keys() == new.keys() and all(old[name] != new[name] for name in old if name.endswith((".json", ".png")))
    for at in range(1, 200):
        folder = tmp_path / str(at)
        shutil.copytree(tmp_path / "old", folder)
        with pytest.MonkeyPatch.context() as patch:
            count = failing(patch, at, error)
            try:
                write(folder, 2)
                failed = False
            except type(error):
                failed = True
        found = contents(folder)
        assert found.keys() == old.keys()
        # what fails before the new file is in place leaves nothing beside it
        assert not failed or found == new or isinstance(error, KeyboardInterrupt) or len(list(folder.iterdir())) == len(old)
        assert all(found[name] in (old[name], new[name]) for name in found)
        if count[0] < at:
            # no call is left to fail
            assert not failed and found == new
            break
        if what not in DRAWN:
            # a lock that was left held would keep this waiting for ever
            write(folder, 2)
            assert contents(folder) == new
    assert 4 < at < 199


def test_a_write_cut_off_by_a_full_disk_leaves_the_old_file(tmp_path: Path) -> None:
    """By the system's own limit of a file's size, which stops a write in the middle, from matplotlib and Rust, too."""
    code = """
        import resource, signal, sys
        from pathlib import Path
        import torch
        from tests.package.test_files import WRITERS, contents
        from tests.models.test_saving import model
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        def save(folder, version):
            model(version).save_pretrained(folder)
        for name, write in (WRITERS | {"checkpoint": save}).items():
            folder = Path(sys.argv[1]) / name.replace(" ", "-")
            folder.mkdir()
            write(folder, 1)
            old = contents(folder)
            for limit in (0, 1, 100, 700):
                if limit >= max(map(len, old.values())):
                    continue
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
                try:
                    write(folder, 2)
                except OSError as error:
                    pass
                else:
                    raise SystemExit(f"{name} has written more than {limit} bytes")
                finally:
                    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
                found = contents(folder)
                assert found == old, (name, limit, found.keys(), old.keys())
            write(folder, 2)
            assert contents(folder) != old, name
        print("done")
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    )
    assert done.stdout.endswith("done\n"), done.stderr[-2000:]


def test_a_replaced_file_keeps_its_mode_its_link_and_its_protection(tmp_path: Path) -> None:
    path, link = tmp_path / "a.json", tmp_path / "link.json"
    path.write_text("old")
    path.chmod(0o640)
    link.symlink_to(path)
    files.write_text(link, "new")
    assert link.is_symlink() and path.read_text() == "new"
    assert path.stat().st_mode & 0o777 == 0o640
    files.write_text(tmp_path / "b.json", "new")
    plain = tmp_path / "plain"
    plain.write_text("")
    assert (tmp_path / "b.json").stat().st_mode == plain.stat().st_mode
    with pytest.raises(IsADirectoryError, match=str(tmp_path)):
        files.write_text(tmp_path, "new")
    with pytest.raises(FileNotFoundError, match=r"nowhere/a\.json"):
        files.write_text(tmp_path / "nowhere" / "a.json", "new")
    # a pipe, a terminal, /dev/stdout are written, not replaced
    files.write_text("/dev/null", "new")
    assert not Path("/dev/null").is_file()
    long = tmp_path / ("é" * 120 + ".json")
    files.write_text(long, "new")
    assert long.read_text() == "new"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_file_that_may_not_be_written_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "baseline.json"
    path.write_text("old")
    path.chmod(0o444)
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o777)
    child = os.fork()
    if child == 0:
        try:
            os.setuid(65534)
            files.write_text(path, "new")
        except PermissionError as error:
            os._exit(0 if str(path) in str(error) else 2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert path.read_text() == "old"


def test_one_process_at_a_time_holds_a_lock(tmp_path: Path) -> None:
    """Each adds to a number that it has read; the lock's file, which comes and goes, is no way around."""
    number = tmp_path / "number"
    number.write_text("0")
    children = []
    for _ in range(4):
        child = os.fork()
        if child == 0:
            try:
                for _ in range(100):
                    with files.locked(tmp_path / ".lock"):
                        number.write_text(str(int(number.read_text()) + 1))
            except BaseException:  # noqa: BLE001 - told by the exit code
                os._exit(1)
            os._exit(0)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * 4
    assert number.read_text() == "400"
    assert not (tmp_path / ".lock").exists()


def test_a_lock_ends_with_a_killed_process(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        with files.locked(tmp_path / ".lock"):
            os.write(writing, b"x")
            time.sleep(60)
    os.read(reading, 1)
    begun = time.monotonic()
    waited = os.fork()
    if waited == 0:
        with files.locked(tmp_path / ".lock"):
            os._exit(0)
    time.sleep(0.1)
    assert os.waitpid(waited, os.WNOHANG) == (0, 0), "while it is held, another waits"
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(os.waitpid(waited, 0)[1]) == 0
    with files.locked(tmp_path / ".lock"):
        assert time.monotonic() - begun < 10
    os.close(reading)
    os.close(writing)


def test_a_file_system_without_locks_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(file: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(files, "_lock", refuse)
    with pytest.warns(UserWarning, match=r"file system without locks .*one process at a time"), files.locked(tmp_path / ".lock"):
        pass
    monkeypatch.setattr(files, "_lock", lambda file: (_ for _ in ()).throw(KeyboardInterrupt()))
    opened = len(os.listdir("/proc/self/fd"))
    with warnings.catch_warnings(), pytest.raises(KeyboardInterrupt), files.locked(tmp_path / ".lock"):
        pass
    assert len(os.listdir("/proc/self/fd")) == opened


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (b"", "is not JSON"),
        (b"\xff\xfe{}", "is not UTF-8"),
        (b"[" * 10_000 + b"]" * 10_000, "nested too deeply"),
        (b'{"a":' * 10_000 + b"1" + b"}" * 10_000, "nested too deeply"),
        (b'{"a": 1, "b": 2, "a": 3}', "key 'a' occurs twice"),
        (b'{"a": ' + b"1" * 5000 + b"}", "is not JSON.*digits"),
        (b'{"a": 1', "is not JSON"),
    ],
)
def test_json_that_cannot_be_read_is_a_value_error_with_its_name(text: bytes, what: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"^settings.json .*{what}"):
        files.parse_json(text, "settings.json")
    # the same in each file that the package reads
    path = tmp_path / "some.json"
    path.write_bytes(text)
    for load in (LongNetConfig.load, tuning_table.load):
        with pytest.raises(ValueError, match=rf"some\.json.*{what}"):
            load(path)
    assert files.parse_json(b'\xef\xbb\xbf{"a": [1]}', "with a byte order mark") == {"a": [1]}
