"""What a suite is: groups of rows to measure one after another, and the tables and plots that the rows make."""

from __future__ import annotations

import argparse
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from dilated_attention.bench.plots import Plot
from dilated_attention.bench.rows import Results, Row
from dilated_attention.bench.tables import Table


@dataclass(frozen=True, kw_only=True)
class Session:
    """Where and how a suite measures.

    Args:
        device: of all tensors.
        full: the sizes of a GPU; otherwise those that two CPU cores have time for.
        dtypes: to measure in, as far as a suite goes through several; the first is its usual one.
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
    """Rows that are measured together, in turns, and written together. ``label`` is unique in its suite and says what is measured."""

    label: str
    run: Callable[[], Iterable[Row]]


class Suite(ABC):
    """A kind of benchmark. One instance may run several times; it holds no results."""

    name: ClassVar[str]
    # a line for --help
    about: ClassVar[str]
    # whether several processes can measure it together; their groups then differ from those of one
    over_processes: ClassVar[bool] = False
    # False: measured anew on every run, whatever the folder holds
    resumes: ClassVar[bool] = True
    # False: no part of ``bench all``
    in_all: ClassVar[bool] = True

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:  # noqa: B027 - most suites have their own, none must
        """Options beside those of all suites. What changes figures belongs into ``settings``."""

    def settings(self, session: Session) -> dict[str, Any]:
        """What a file of results must have been made with to be continued."""
        return {"size": "full" if session.full else "small"}

    @abstractmethod
    def groups(self, session: Session) -> Sequence[Group]:
        """In the order of measurement; the labels do not depend on what is measured. Made on every run, so cheap to make."""

    @abstractmethod
    def tables(self, results: Results) -> list[Table]: ...

    @abstractmethod
    def plots(self, results: Results) -> list[Plot]: ...

    def finish(self, results: Results, session: Session) -> list[Path]:
        """Called once every group is measured; the paths of files beside JSON, Markdown and plots that it wrote."""
        return []

    def verdict(self, results: Results) -> int:
        """The exit code: 0, unless figures themselves are a failure."""
        return 0
