"""Files that are replaced whole or not at all, locks that end with their process, and JSON that is not trusted."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import stat
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# what a file system says that has no locks, and one that cannot flush a folder
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP, errno.EINVAL)
_NO_FOLDER_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EACCES, errno.EPERM)


@contextlib.contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """A new file to write, of ``path``'s name and suffix in a folder beside it, which takes the place of ``path`` at the end of the block.

    A reader sees the old file or the new one, never half of one, and so it stays after an exception, a kill or a crash of the machine. The
    new file has the mode of the old one. What is no regular file (a pipe, ``/dev/stdout``) is written directly.

    Raises:
        OSError: as ``open`` does; the old file is untouched.
    """
    # a link stays one, as it does where a file is opened and overwritten
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "is a folder, expected a file or nothing", str(path))
        yield path
        return
    if path.exists() and not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, "may not be written", str(path))
    try:
        folder = Path(tempfile.mkdtemp(prefix=_prefix(path), dir=path.parent))
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    try:
        new = folder / path.name
        # for its mode, which depends on the umask
        os.close(os.open(new, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
        mode = stat.S_IMODE((path if path.exists() else new).stat().st_mode)
        yield new
        flush(new)
        new.chmod(mode)
        new.replace(path)
        try:
            if os.name != "nt":
                flush(path.parent, os.O_RDONLY)
        except OSError as error:
            if error.errno not in _NO_FOLDER_SYNC:
                raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def write_text(path: str | Path, text: str) -> None:
    """``path.write_text`` in UTF-8, whole or not at all."""
    with replacing(path) as new:
        new.write_text(text, encoding="utf-8")


def remove_leftovers(path: Path) -> None:
    """What killed processes left of ``path`` when they wrote it. For the holder of a lock without which nobody writes ``path``."""
    path = Path(os.path.realpath(path))
    for folder in path.parent.iterdir():
        if folder.name.startswith(_prefix(path)):
            shutil.rmtree(folder, ignore_errors=True)


def _prefix(path: Path) -> str:
    # a name may have 255 bytes
    return f".{path.name[:40]}.part-"


def flush(path: Path, flags: int = os.O_RDWR) -> None:
    """Return when the disk has what was written to ``path``."""
    file = os.open(path, flags)
    try:
        os.fsync(file)
    finally:
        os.close(file)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock that is the file ``path``: one process, or thread, at a time. The system ends it with the process, however that ends.

    Where the file system has no locks, a warning says so, and the block runs without one.
    """
    file = _locked_file(path)
    try:
        yield
    finally:
        try:
            # while it is still locked: who waits for it sees that it has gone, and makes a new one. Windows removes no open file
            with contextlib.suppress(OSError):
                path.unlink()
        finally:
            os.close(file)


def _locked_file(path: Path) -> int:
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            _lock(file)
        except BaseException as error:
            if not isinstance(error, OSError) or error.errno not in _NO_LOCKS:
                os.close(file)
                raise
            warnings.warn(
                f"{path.parent} is on a file system without locks ({error}): let one process at a time write there, or use another folder",
                stacklevel=4,
            )
            return file
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file), path.stat()):
                return file
        os.close(file)


if sys.platform == "win32":
    import msvcrt

    def _lock(file: int) -> None:
        while True:
            try:
                msvcrt.locking(file, msvcrt.LK_NBLCK, 1)
                return
            except PermissionError:
                time.sleep(0.05)

else:
    import fcntl

    def _lock(file: int) -> None:
        fcntl.flock(file, fcntl.LOCK_EX)


def read_json(path: Path) -> Any:
    """The value in the file ``path``, as ``parse_json`` reads it."""
    return parse_json(path.read_bytes(), str(path))


def parse_json(text: str | bytes, name: str) -> Any:
    """The value that ``text`` writes in JSON.

    Args:
        text: bytes are UTF-8.
        name: of what is read, with which an error begins.

    Raises:
        ValueError: not UTF-8, not JSON, nested too deep, or a key that is there twice.
    """
    try:
        return json.loads(text.decode("utf-8-sig") if isinstance(text, bytes) else text, object_pairs_hook=_without_doubles)
    except RecursionError:
        raise ValueError(f"{name} is not JSON that can be read: it is nested too deep") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not JSON: it is not UTF-8 ({error.reason} at byte {error.start})") from error
    except ValueError as error:
        raise ValueError(f"{name} is not JSON: {error}") from error


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in found if names.count(name) > 1)!r} is there twice")
    return found
