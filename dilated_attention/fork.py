"""What other threads leave half done when a process forks, made whole in the child; workers of a DataLoader are forked.

Of all threads the child has only the one that forked. A lock that another one held would stay held for ever, and what it guards may be
half changed. Everything of this package that a fork could break is made by a class of this file, or registers itself with ``in_child``.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

T = TypeVar("T")


def in_child(run: Callable[[], object]) -> None:
    """Has ``run`` called in every forked child, before anything else runs there."""
    # not on Windows, where nothing forks
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=run)


_locks: weakref.WeakSet[ForkSafeLock] = weakref.WeakSet()


class ForkSafeLock:
    """A reentrant lock, ``with lock:``, that is free in a forked child unless the forking thread itself holds it.

    Args:
        forget: called in a child in which another thread's hold was ended: makes anew what the lock guards.
    """

    def __init__(self, forget: Callable[[], object] | None = None) -> None:
        self._lock = threading.RLock()
        self._forget = forget
        _locks.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def renew(self) -> None:
        # free, or held by this very thread, which goes on in the child
        if self._lock.acquire(blocking=False):
            self._lock.release()
            return
        self._lock = threading.RLock()
        if self._forget is not None:
            self._forget()


def _renew() -> None:
    for lock in list(_locks):
        lock.renew()


in_child(_renew)


class cached_property(Generic[T]):
    """``functools.cached_property`` as it is since Python 3.12, without the lock that all instances shared before.

    Two threads at once may both make the value, which is the same.
    """

    def __init__(self, make: Callable[[Any], T]) -> None:
        self._make = make
        self.__doc__ = make.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type) -> cached_property[T]: ...

    @overload
    def __get__(self, instance: object, owner: type) -> T: ...

    def __get__(self, instance: object | None, owner: type) -> cached_property[T] | T:
        if instance is None:
            return self
        # found there from then on; a frozen dataclass refuses setattr
        value = instance.__dict__[self._name] = self._make(instance)
        return value
