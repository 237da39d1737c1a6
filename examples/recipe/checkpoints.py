"""Checkpoints of a run, by torch.distributed.checkpoint: each process writes its part while training goes on, whole or not at all.

A checkpoint is a folder ``checkpoints/step-N``. It is written under another name, which a reader passes over, and renamed when all parts
are on disk. It loads on any number of processes, with or without FSDP2.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import warnings
from concurrent.futures import Future
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from dilated_attention.models.summary import readable

# one process is a run, too
warnings.filterwarnings("ignore", message="torch.distributed is disabled")
_STATE, _PREFIX, _PART = "run.json", "step-", ".part-"
# key in _STATE of the digest of a checkpoint
_SUM = "sha256"


def newest(run: Path) -> Path | None:
    """The whole checkpoint of the highest step in a run's folder, if it has one."""
    return max((path for path in _steps(run / "checkpoints") if (path / _STATE).is_file()), key=_step, default=None)


def cause_of(error: BaseException) -> str:
    """One line; of a CheckpointException, which holds a traceback for each process, the first process's error."""
    cause = next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) and error.failures else error
    return " ".join(f"{type(cause).__name__}: {cause}".split())[:300]


def _steps(folder: Path) -> list[Path]:
    return [path for path in folder.glob(f"{_PREFIX}*") if path.name.removeprefix(_PREFIX).isdecimal()]


def _step(path: Path) -> int:
    return int(path.name.removeprefix(_PREFIX))


def _digest(folder: Path, state: dict[str, Any]) -> str:
    """SHA-256 of the state, the index, and the size and end of each part, where torch's own sum of its last tensor is.

    A sum of whole parts would take half as long as loading them.
    """
    whole = hashlib.sha256(json.dumps(state, sort_keys=True).encode() + (folder / ".metadata").read_bytes())
    for path in sorted(folder.glob("*.distcp")):
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 4096))
            whole.update(f"{path.name} {size} ".encode() + file.read())
    return whole.hexdigest()


def _sync(path: Path) -> None:
    entry = os.open(path, os.O_RDONLY)
    os.fsync(entry)
    os.close(entry)


class Checkpoints:
    """Writes and reads the checkpoints of a run; every process has one and calls it alike.

    Args:
        run: the run's folder.
        model: without DDP around it.
        optimizers: those of its parameters.
        keep: how many checkpoints stay; older ones are removed once a newer one is whole.
    """

    def __init__(self, run: Path, model: torch.nn.Module, optimizers: list[torch.optim.Optimizer], keep: int) -> None:
        self.folder, self.model, self.optimizers, self.keep = run / "checkpoints", model, optimizers, keep
        self.is_first = not dist.is_initialized() or dist.get_rank() == 0
        # of its own: what a thread writes in the background must not meet the messages of training
        self.group = dist.new_group(backend="gloo") if dist.is_initialized() else None
        self._pending: tuple[Future[Any], Path, Path, dict[str, Any]] | None = None
        self._lock: IO[str] | None = None
        if self.is_first and run.is_dir():
            self.lock()
            for leftover in (*self.folder.glob(f"{_PART}*"), *_steps(self.folder)):
                # written in part, or removed in part
                if leftover.name.startswith(_PART) or not (leftover / _STATE).is_file():
                    shutil.rmtree(leftover)

    def lock(self) -> None:
        """Keeps other runs out of the run's folder until this process ends.

        Raises:
            BlockingIOError: if another run is writing there.
        """
        if self._lock is not None:
            return
        run = self.folder.parent
        lock = (run / ".lock").open("a")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            lock.close()
            raise BlockingIOError(f"another run is writing to {run}; wait for its end, or use another --out") from error
        except OSError as error:
            print(f"{run} cannot be locked ({error}): see that no other run writes to it")
        self._lock = lock

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Copies the state and begins to write it; ``finish`` waits for the end. A checkpoint still being written is waited for first.

        Args:
            step: steps done.
            state: anything JSON holds, such as the place in the data.
        """
        self.finish()
        part, whole = (self.folder / f"{prefix}{step:08d}" for prefix in (_PART, _PREFIX))
        if self.is_first:
            part.mkdir(parents=True, exist_ok=True)
        future = dcp.async_save(self._tensors(), checkpoint_id=part, process_group=self.group)
        assert isinstance(future, Future)
        self._pending = (future, part, whole, state)

    def poll(self) -> None:
        """Puts a checkpoint in place that has been written meanwhile."""
        if self._pending is not None and self._pending[0].done():
            self.finish()

    def finish(self) -> None:
        """Waits until the checkpoint is whole and on disk, and raises what kept it from that."""
        if self._pending is None:
            return
        future, part, whole, state = self._pending
        self._pending = None
        try:
            future.result()
        except CheckpointException as error:
            # a full disk is not what torch says of it
            free = readable(shutil.disk_usage(self.folder).free)
            raise OSError(
                f"a checkpoint cannot be written ({cause_of(error)}; {free} are free in {self.folder}); go on from the last one with "
                "--resume auto"
            ) from error
        # the first process ends last: it writes the index of what all wrote
        if self.is_first:
            (part / _STATE).write_text(json.dumps({**state, _SUM: _digest(part, state)}), encoding="utf-8")
            _sync(part / _STATE)
            _sync(part)
            part.rename(whole)
            _sync(self.folder)
            for path in sorted(_steps(self.folder), key=_step)[: -self.keep]:
                # in this order, a kill in between leaves no checkpoint that looks whole
                (path / _STATE).unlink()
                shutil.rmtree(path)

    def load(self, path: Path) -> dict[str, Any]:
        """Loads model and optimizers, and returns the state that was saved with them.

        Raises:
            ValueError: if files are damaged or missing, or hold another model.
        """
        tensors = self._tensors()
        try:
            state = json.loads((path / _STATE).read_text(encoding="utf-8"))
            if not isinstance(state, dict):
                raise TypeError(f"{_STATE} holds a {type(state).__name__}")
            # an earlier version wrote none
            if state.pop(_SUM, "") not in ("", _digest(path, state)):
                raise ValueError("its files are not those that were written")
            if state.get("step", _step(path)) != _step(path):
                raise ValueError(f"it holds step {state['step']}")
            # dcp.load itself would log a traceback if it is damaged
            dcp.FileSystemReader(path).read_metadata()
            dcp.load(tensors, checkpoint_id=path, process_group=self.group)
        # what torch raises for several processes is no Exception, and holds an interrupt of any of them, too
        except (CheckpointException, Exception) as error:
            if isinstance(error, CheckpointException) and any(isinstance(e, KeyboardInterrupt) for e, _ in error.failures.values()):
                raise KeyboardInterrupt from error
            raise ValueError(
                f"{path} cannot be loaded ({cause_of(error)}); if it is damaged, move it out of {path.parent}: "
                "the run goes on from the one before"
            ) from error
        set_state_dict(self.model, self.optimizers, model_state_dict=tensors["model"], optim_state_dict=tensors["optimizer"])
        return state

    def _tensors(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizers)
        return {"model": model, "optimizer": optimizer}
