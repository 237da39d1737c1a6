"""File helpers: files that are replaced completely or not at all, locks that end with their process, and JSON from untrusted sources."""

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

# errors of a file system without locks
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP, errno.EINVAL)


@contextlib.contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Yields a new file to write, which replaces ``path`` at the end of the block.

    The new file has the name and suffix of ``path`` and is in a folder next to it. A reader sees the old file or the new one, never a part
    of one. The new file has the mode of the old one. Anything that is not a regular file (a pipe, ``/dev/stdout``) is written directly.

    Raises:
        OSError: as ``open`` does; the old file is untouched.
    """
    # a link remains a link, as when a file is opened and overwritten
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "is a folder, expected a file or nothing", str(path))
        yield path
        return
    if path.exists() and not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, "may not be written", str(path))
    try:
        folder = tempfile.TemporaryDirectory(prefix=_prefix(path), dir=path.parent, ignore_cleanup_errors=True)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    with folder:
        new = Path(folder.name, path.name)
        # created for its mode, which depends on the umask
        new.touch()
        mode = (path if path.exists() else new).stat().st_mode
        yield new
        flush(new)
        new.chmod(stat.S_IMODE(mode))
        new.replace(path)


def write_text(path: str | Path, text: str) -> None:
    """Does ``path.write_text`` in UTF-8, completely or not at all."""
    with replacing(path) as new:
        new.write_text(text, encoding="utf-8")


def remove_leftovers(path: Path) -> None:
    """Removes what killed processes left while writing ``path``. The caller must hold the lock that every writer of ``path`` takes."""
    path = Path(os.path.realpath(path))
    for folder in path.parent.iterdir():
        if folder.name.startswith(_prefix(path)):
            shutil.rmtree(folder, ignore_errors=True)


def _prefix(path: Path) -> str:
    # a file name can have at most 255 bytes
    return f".{path.name[:40]}.part-"


def flush(path: Path) -> None:
    """Returns once everything written to ``path`` is on disk."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds a lock on the file ``path``, for one process or thread at a time. The system releases it when the process ends for any reason.

    Where the file system does not support locks, this warns and runs the block without one.
    """
    file = _locked_file(path)
    try:
        yield
    finally:
        try:
            # removed while still locked: a waiter sees that the file is gone and makes a new one. Windows does not remove open files
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
    """Returns the value in the file ``path``, read by ``parse_json``."""
    return parse_json(path.read_bytes(), str(path))


def parse_json(text: str | bytes, name: str) -> Any:
    """Parses ``text`` as JSON.

    Args:
        text: str or UTF-8 bytes.
        name: what is being read; error messages begin with it.

    Raises:
        ValueError: not UTF-8, not JSON, nested too deeply, or a duplicate key.
    """
    try:
        return json.loads(text.decode("utf-8-sig") if isinstance(text, bytes) else text, object_pairs_hook=_without_doubles)
    except RecursionError:
        raise ValueError(f"{name} is not JSON that can be read: it is nested too deeply") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not JSON: it is not UTF-8 ({error.reason} at byte {error.start})") from error
    except ValueError as error:
        raise ValueError(f"{name} is not JSON: {error}") from error


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in found if names.count(name) > 1)!r} occurs twice")
    return found
