"""Saves and loads models as a folder with one file, ``model.safetensors``, whose header holds the configuration. No pickle is read."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn

from dilated_attention.files import replacing
from dilated_attention.models.config import ModelConfig
from dilated_attention.models.summary import Summary, summarise

ModelT = TypeVar("ModelT", bound="Pretrained")
WEIGHTS_FILE = "model.safetensors"
# the key of the configuration in the header
_CONFIG = "dilated_attention.config"
# a run's folder, which examples/recipe writes, has its last model in ``checkpoint`` and its saved steps in ``checkpoints/step-N``; each of
# these has a file of this name, which says how far the run was
_STATE = "run.json"


class Pretrained(nn.Module):
    """A model built as ``cls(config, **options)`` that saves itself as a folder and loads from one. A subclass sets ``config_class``, the
    class of its configuration. Non-persistent buffers are not saved: they must be made from the configuration alone, in ``__init__`` or
    at each call."""

    config_class: ClassVar[type[ModelConfig]]
    config: Any

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())

    def summary(self, lengths: tuple[int, ...] | None = None, *, memory: int | None = None) -> Summary:
        """Summarises parameters, keys per query, memory of training and of the cache, and what fits. ``print`` it.

        Args:
            lengths: numbers of positions to report on; None for a few orders of magnitude.
            memory: bytes of memory of the device; None for this machine's GPU, or its RAM.

        >>> print(create_model("longnet-125m", device="meta").summary())
        """
        sizes = {name: parameter.numel() for name, parameter in self.named_parameters()}
        return summarise(type(self).__name__, getattr(self.config, "encoder", self.config), sizes, lengths, memory)

    def save_pretrained(self, path: str | Path) -> None:
        """Writes ``model.safetensors``, with the configuration in its header, into the folder ``path``, which is created if necessary.

        The new file is written beside the old one and flushed to disk, so the disk must have room for both. Then it replaces the old one:
        whatever interrupts this, ``from_pretrained`` loads either the old model or the new one.

        Raises:
            OSError: if the file cannot be written; the old one is untouched.
            ValueError: if weights are on meta or sharded over processes, or a pattern holds a Python function or a tensor; an empty path.
        """
        import safetensors.torch

        if not str(path):
            raise ValueError("path is ''; expected a folder, '.' for the one that you are in")
        file, weights = Path(path, WEIGHTS_FILE), _separate(self.state_dict())
        metadata = {"format": "pt", _CONFIG: self.config.to_json()}
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file) as new:
            try:
                safetensors.torch.save_file(weights, str(new), metadata=metadata)
            except safetensors.SafetensorError as error:
                raise OSError(f"{file} could not be written, and the previous file is untouched: {error}") from error

    @classmethod
    def from_pretrained(
        cls: type[ModelT], path: str | Path, *, device: Any = None, dtype: torch.dtype | None = None, **options: Any
    ) -> ModelT:
        """Loads a model that ``save_pretrained`` wrote, in eval mode and in the stored dtype unless ``dtype`` is given.

        Weights without a configuration in their header, made by hand or by an early version, need a ``config.json`` beside them.
        Damaged bytes inside the weights are not noticed (docs/models.md has the figures).

        Args:
            path: the folder, or that of a run of examples/recipe with ``checkpoint/`` in it; warns if that is not the model of its end.
            device, dtype: those of the parameters.
            options: arguments of the constructor: ``backend``; ``group``, ``mesh``, ``layout`` …

        Raises:
            FileNotFoundError: if the folder lacks a file that is needed.
            ValueError: if the configuration belongs to another model or a later version, or the file is damaged.
            RuntimeError: if the weights do not fit the configuration.
        """
        folder = find_model(Path(path))
        try:
            unfinished = _unfinished_text(folder)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{folder / _STATE} is damaged ({error!r}): copy it again, or remove it") from error
        if unfinished:
            warnings.warn(unfinished, stacklevel=2)
        file, config_file = folder / WEIGHTS_FILE, folder / "config.json"
        weights, metadata = read_safetensors(file, device)
        for name, weight in weights.items():
            if not weight.is_floating_point():
                raise ValueError(f"{file} has {name} in {weight.dtype}; expected weights of a floating dtype")
        if _CONFIG in metadata:
            config = cls.config_class.from_json(metadata[_CONFIG], f"the configuration in {file}")
        elif config_file.exists():
            config = cls.config_class.load(config_file)
        else:
            raise FileNotFoundError(
                f"{file} holds no configuration, and {config_file} does not exist; expected a folder of save_pretrained"
            )
        stack: Any = getattr(config, "encoder", config)
        # a wrong configuration may ask for very many layers, which take long to build
        if stack.num_layers > len(weights):
            raise RuntimeError(f"{file} has {len(weights)} weights, too few for the {stack.num_layers} layers of its configuration")
        # on meta, nothing is allocated or initialized for values that are replaced at once
        model = cls(config, device="meta", **options)
        try:
            model.load_state_dict(weights, assign=True)
        except RuntimeError as error:
            raise RuntimeError(f"{file} does not fit its configuration: {error}") from error
        return model.requires_grad_().to(dtype=dtype).eval()


def find_model(path: Path) -> Path:
    """Returns the folder of the model: ``path``, or ``path/checkpoint`` if that is a run's folder. FileNotFoundError if neither holds
    weights; for a run that has only saved its steps, its text has the command that writes the model."""
    for folder in (path, path / "checkpoint"):
        if (folder / WEIGHTS_FILE).exists():
            return folder
    if step := _last_step(path):
        raise FileNotFoundError(f"{path} has no model yet, and the run was last saved after step {step}: {_advice(path, step)}")
    what = f"holds no {WEIGHTS_FILE}, nor does checkpoint/ in it" if path.is_dir() else "is a file" if path.exists() else "does not exist"
    raise FileNotFoundError(f"{path} {what}; expected a folder written by save_pretrained, or that of a run with checkpoint/ in it")


def _unfinished_text(folder: Path) -> str | None:
    """Returns the warning that a run's model, in ``folder``, is not that of the run's end; None if it is, or the folder is not a run's."""
    if not (folder / _STATE).is_file():
        return None
    state, last = json.loads((folder / _STATE).read_text()), _last_step(folder.parent)
    what = f"{folder} is the model of step {state['step']}"
    if last > state["step"]:
        return f"{what}, and the run has been trained to step {last}: {_advice(folder.parent, last)}"
    return f"{what}, after which the run was stopped" if state["stopped"] else None


def _last_step(run: Path) -> int:
    """Returns the number of the last saved step, 0 if there is none. A step that is being written has another name, and one that is being
    removed has lost its ``run.json``, so neither counts."""
    return max((int(file.parent.name.removeprefix("step-")) for file in run.glob(f"checkpoints/step-*/{_STATE}")), default=0)


def _advice(run: Path, step: int) -> str:
    return f"write that model with the run's script and --resume {run} --steps {step}"


def read_safetensors(path: Path, device: Any = None) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Returns (name → tensor, the header's texts) of one state of the file, even if it is replaced meanwhile. OSError if it cannot be read,
    ValueError if it is damaged or has another format."""
    import safetensors

    damage: Exception | None = None
    # safetensors opens the file twice: the header may be of one state, and the weights of the next, which is another file (inode). It is
    # open here, too, because no other file gets the number of an open inode, so equal numbers mean the same file; and because ``open``
    # tells a file without read permission from a missing one
    with path.open("rb") as opened:
        try:
            with safetensors.safe_open(str(path), framework="pt", device=str(torch.device("cpu" if device is None else device))) as file:
                weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
                metadata = file.metadata() or {}
        except safetensors.SafetensorError as error:
            damage = error
        is_same_file = os.path.samestat(os.fstat(opened.fileno()), path.stat())
    if not is_same_file:
        return read_safetensors(path, device)
    if damage is not None:
        raise ValueError(
            f"{path} cannot be read as safetensors ({damage}); it is damaged, cut off or of another format: copy or download it again"
        ) from damage
    return weights, metadata


def _separate(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the weights contiguous, each in its separate memory: safetensors refuses two names for the same memory, and a model with tied
    weights needs both."""
    taken: set[int] = set()
    separate = {}
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
        separate[name] = x
    return separate
