"""Reads and writes a model's folder: ``config.json`` and ``model.safetensors``, which are replaced and read consistently.

The weights' file also holds the configuration, so replacing this one file replaces the model. ``config.json`` is replaced after it, for
people and other programs to read. Reading returns both, so that they can be compared.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dilated_attention.files import flush, locked, read_json, remove_leftovers, replacing

CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"
# keys in the header of the weights' file: the configuration, its SHA-256, and the SHA-256 of the previous config.json
_CONFIG, _SUM, _REPLACED = (f"dilated_attention.{name}" for name in ("config", "config_sha256", "replaced_config_sha256"))
_EXPECTED = f"expected a folder written by save_pretrained, with {CONFIG_FILE} and {WEIGHTS_FILE}"


# a run's folder, which examples/recipe writes: the model, how far it was trained, and what the run itself goes on from
_MODEL, _STATE, _STEPS = "checkpoint", "run.json", "checkpoints/step-*"


@dataclass(frozen=True)
class Stored:
    """The contents of a folder.

    Args:
        weights: name → tensor.
        saved_with: the text of the configuration in the weights' file; None if the file was made by hand, or by a version that did not
            write it.
        beside: the contents of ``config.json``; None if there is none.
        interrupted: whether ``beside`` was there before these weights were saved and does not belong to them.
    """

    weights: dict[str, torch.Tensor]
    saved_with: str | None
    beside: bytes | None
    interrupted: bool


def find_model(path: Path) -> Path:
    """Returns the folder of the model: ``path``, or in the folder of a run ``path/checkpoint``.

    Raises:
        FileNotFoundError: if neither holds weights; of a run that has only saved its steps, with the command that writes them.
    """
    for folder in (path, path / _MODEL):
        if (folder / WEIGHTS_FILE).exists():
            return folder
    if last := _last_step(path):
        raise FileNotFoundError(
            f"{path} has no model yet, and the run was last saved after step {last}: write that model {_way_out(path, last)}"
        )
    what = f"holds no {WEIGHTS_FILE}, nor does {_MODEL}/ in it"
    if not path.is_dir():
        what = "is no folder" if path.exists() else "does not exist"
    raise FileNotFoundError(f"{path} {what}; {_EXPECTED}, or the folder of a run with {_MODEL}/ in it")


def unfinished(folder: Path) -> str | None:
    """Returns what to warn of if the model of a run is not that of its end, else None."""
    run, state = folder.parent, folder / _STATE
    if not state.is_file():
        return None
    step, last = read_json(state)["step"], _last_step(run)
    if last > step:
        return f"{folder} is the model of step {step}, and the run has been trained to step {last}: write that model {_way_out(run, last)}"
    return f"{folder} is the model of step {step}, after which the run was stopped" if read_json(state)["stopped"] else None


def _last_step(run: Path) -> int:
    """Returns 0 if there is none; one that is being written or removed lacks its state."""
    names = [folder.name.removeprefix("step-") for folder in run.glob(_STEPS) if (folder / _STATE).is_file()]
    return max((int(name) for name in names if name.isdecimal()), default=0)


def _way_out(run: Path, step: int) -> str:
    return f"with the run's script and --resume {run} --steps {step}"


def write_folder(folder: Path, config: str, weights: dict[str, torch.Tensor]) -> None:
    """Replaces both files in ``folder``, which is created if necessary. Raises OSError and ValueError like ``save_pretrained``."""
    safetensors = import_safetensors()
    weights = _apart(weights)
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / ".save_pretrained.lock"):
        for name in (CONFIG_FILE, WEIGHTS_FILE):
            remove_leftovers(folder / name)
        metadata = {"format": "pt", _CONFIG: config, _SUM: _digest(config.encode())}
        if (folder / CONFIG_FILE).is_file():
            metadata[_REPLACED] = _digest((folder / CONFIG_FILE).read_bytes())
        # the inner file is put in place first
        with replacing(folder / CONFIG_FILE) as new_config, replacing(folder / WEIGHTS_FILE) as new_weights:
            new_config.write_text(config, encoding="utf-8")
            # flush before the weights are put in place: a full disk may only show up here
            flush(new_config)
            try:
                safetensors.torch.save_file(weights, str(new_weights), metadata=metadata)
            except safetensors.SafetensorError as error:
                raise OSError(f"{folder / WEIGHTS_FILE} could not be written, and the previous file is untouched: {error}") from error


def read_folder(folder: Path, device: Any = None) -> Stored:
    """Reads both files. Raises FileNotFoundError, PermissionError, and ValueError for files that are folders or damaged."""
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if (folder / name).is_dir():
            raise ValueError(f"{folder / name} is a folder; {_EXPECTED}")
    while True:
        written, beside = _written(folder), _read_config(folder)
        weights, metadata = read_safetensors(folder / WEIGHTS_FILE, device)
        # otherwise they were saved again in between, perhaps twice, and the second time as they were before
        if (_written(folder), _read_config(folder)) == (written, beside):
            break
    saved_with = metadata.get(_CONFIG)
    # an earlier version wrote no sum
    if saved_with is not None and metadata.get(_SUM, "") not in ("", _digest(saved_with.encode())):
        raise ValueError(
            f"the configuration in {folder / WEIGHTS_FILE} is damaged: its SHA-256 is not the one saved with it; copy or download it again"
        )
    if beside is None and saved_with is None:
        raise FileNotFoundError(f"{folder / CONFIG_FILE} does not exist, and {folder / WEIGHTS_FILE} holds no configuration; {_EXPECTED}")
    replaced = (
        beside is not None and saved_with is not None and beside != saved_with.encode() and metadata.get(_REPLACED) == _digest(beside)
    )
    return Stored(weights, saved_with, beside, replaced)


def _written(folder: Path) -> int | None:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return (folder / CONFIG_FILE).stat().st_mtime_ns
    return None


def _read_config(folder: Path) -> bytes | None:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return (folder / CONFIG_FILE).read_bytes()
    return None


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def read_safetensors(path: Path, device: Any = None) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Returns (name → tensor, the header's texts) of one state of the file, even if it is replaced meanwhile.

    Raises:
        FileNotFoundError, PermissionError: if the file cannot be read.
        ValueError: if it is damaged or has another format.
    """
    safetensors = import_safetensors()
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; {_EXPECTED}")
    # safetensors would report a file without read permission as not existing; while it is open, no other file gets its number
    with path.open("rb") as opened:
        try:
            with safetensors.safe_open(str(path), framework="pt", device=str(torch.device(device or "cpu"))) as file:
                weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
                metadata = file.metadata() or {}
        except safetensors.SafetensorError as error:
            if os.path.samestat(os.fstat(opened.fileno()), path.stat()):
                raise ValueError(
                    f"{path} cannot be read as safetensors ({error}); "
                    "it is damaged, cut off or of another format: copy or download it again"
                ) from error
        # safetensors opens the file twice: the header may be that of one state, and the weights those of the next
        is_one = os.path.samestat(os.fstat(opened.fileno()), path.stat())
    return (weights, metadata) if is_one else read_safetensors(path, device)


def _apart(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the weights contiguous, each with separate memory.

    A file cannot store two names for one weight, and a model that is loaded from it needs every name.
    """
    taken: set[int] = set()
    apart = {}
    for name, weight in weights.items():
        if weight.is_meta:
            raise ValueError(
                f"{name} is on the device meta and has no values to save; build the model on another device, or load weights into it"
            )
        if hasattr(weight, "full_tensor"):
            raise ValueError(
                f"{name} is sharded over processes (a {type(weight).__name__}); gather the weights with "
                "torch.distributed.checkpoint.state_dict."
                "get_model_state_dict and full_state_dict=True, load them into a model of one process, and save that"
            )
        x = weight.contiguous()
        if x.numel() and x.untyped_storage().data_ptr() in taken:
            x = x.clone()
        taken.add(x.untyped_storage().data_ptr())
        apart[name] = x
    return apart


def import_safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError('saving and loading models needs safetensors: pip install safetensors, or "dilated-attention[hf]"') from error
    return safetensors
