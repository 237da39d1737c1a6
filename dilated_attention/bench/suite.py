"""The definition of a suite: groups of rows to measure one after another, and the tables made from the rows."""

from __future__ import annotations

import argparse
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from dilated_attention.bench.report.rows import Results, Row
from dilated_attention.bench.report.tables import Table


@dataclass(frozen=True, kw_only=True)
class Session:
    """Where and how a suite measures.

    Args:
        device: of all tensors.
        full: whether to use sizes for a GPU; otherwise those that two CPU cores can handle.
        dtypes: dtypes to measure, for suites that measure several; the first is the default.
        seconds: of timing for each contender and pass.
        options: the suite's own arguments.
        rank, world_size: of this process, where several measure together.
    """

    device: torch.device
    full: bool
    dtypes: tuple[torch.dtype, ...]
    seconds: float
    options: argparse.Namespace
    rank: int = 0
    world_size: int = 1

    @property
    def dtype(self) -> torch.dtype:
        return self.dtypes[0]


@dataclass(frozen=True)
class Group:
    """Rows that are measured together, in turns, and written together. ``label`` describes them and is unique in its suite."""

    label: str
    run: Callable[[], Iterable[Row]]


class Suite(ABC):
    """A kind of benchmark. An instance may run several times; it stores no results."""

    name: ClassVar[str]
    # a line for --help
    about: ClassVar[str]
    # whether several processes can measure it together; their groups then differ from those of one process
    over_processes: ClassVar[bool] = False

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:  # noqa: B027 - most suites have their own, none must
        """Adds options in addition to those of all suites. Options that change figures must be included in ``settings``."""

    def settings(self, session: Session) -> dict[str, Any]:
        """Returns the settings with which a file of results must have been made to be continued."""
        return {"size": "full" if session.full else "small"}

    @abstractmethod
    def groups(self, session: Session) -> Sequence[Group]:
        """Returns the groups in order of measurement; labels do not depend on what is measured. Called on every run: must be cheap."""

    @abstractmethod
    def tables(self, results: Results) -> list[Table]: ...

    def verdict(self, results: Results, session: Session) -> tuple[bool, list[Table]]:
        """Returns whether the figures themselves are a failure, so that the exit code is 1, and tables on why."""
        return False, []
