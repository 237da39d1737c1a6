"""Repairs, in a forked child process, state that other threads left half-changed; a DataLoader forks its workers.

Only the thread that forked continues in the child. A lock held by another thread would stay held forever, and what it guards may be
half-changed. Everything in this package that a fork could break uses a class of this file or registers itself with ``in_child``.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

T = TypeVar("T")


def in_child(run: Callable[[], object]) -> None:
    """Registers ``run`` to be called in every forked child before anything else runs there."""
    # Windows has no fork
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=run)


_locks: weakref.WeakSet[ForkSafeLock] = weakref.WeakSet()


class ForkSafeLock:
    """A reentrant lock, used as ``with lock:``, that is free in a forked child unless the forking thread itself holds it.

    Args:
        forget: called in a child where a lock held by another thread was released; resets what the lock guards.
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
        # free, or held by this thread, which continues in the child
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
    """``functools.cached_property`` as it behaves since Python 3.12: without the lock that all instances shared before.

    Two threads may compute the value at the same time; both results are equal.
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
        # the attribute is found in __dict__ from now on; written there directly because a frozen dataclass refuses setattr
        value = instance.__dict__[self._name] = self._make(instance)
        return value
