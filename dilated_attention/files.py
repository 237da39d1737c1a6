"""Files that are replaced whole, and JSON from untrusted sources."""

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Yields a new file beside ``path``, which replaces it at the end: readers see the old or the new. Raises OSError as ``open`` does."""
    # a link remains a link, as when a file is opened and overwritten
    path = Path(os.path.realpath(path))
    if path.exists():
        # refuses a folder and a protected file; a pipe, a terminal and /dev/null are written directly
        os.close(os.open(path, os.O_RDWR))
        if not path.is_file():
            yield path
            return
    try:
        beside = tempfile.TemporaryDirectory(prefix=".part-", dir=path.parent, ignore_cleanup_errors=True)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    with beside as folder:
        new = Path(folder, path.name)
        new.touch()
        mode = (path if path.exists() else new).stat().st_mode
        yield new
        with new.open("rb") as file:
            os.fsync(file.fileno())
        new.chmod(mode & 0o7777)
        os.replace(new, path)


def parse_json(text: str | bytes, name: str) -> Any:
    """Parses a str or UTF-8 bytes. Raises ValueError, which begins with ``name``, for what is no JSON, too deep, or has a key twice."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(found := dict(pairs)) < len(pairs):
            raise ValueError(f"a key of {', '.join(found)[:200]} occurs twice")
        return found

    try:
        return json.loads(text.decode("utf-8-sig") if isinstance(text, bytes) else text, object_pairs_hook=unique)
    except (RecursionError, ValueError) as error:
        raise ValueError(f"{name} is not JSON that can be read: {error}") from error
