"""Saves and loads models as a folder of ``config.json`` and ``model.safetensors``, without pickle."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn

from dilated_attention.models.checkpoint import CONFIG_FILE, WEIGHTS_FILE, Stored, find_model, read_folder, unfinished, write_folder
from dilated_attention.models.config import ConfigT, ModelConfig, config_text
from dilated_attention.models.summary import Summary, summarise

ModelT = TypeVar("ModelT", bound="Pretrained")


class Pretrained(nn.Module):
    """A model built as ``cls(config, **options)`` that saves itself as a folder and loads from one.

    A subclass sets ``config_class`` to the class of its configuration. Non-persistent buffers must be made in ``__init__`` from the
    configuration alone, or at each call.
    """

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
        """Writes ``config.json`` and ``model.safetensors`` into the folder ``path``, all or nothing; the folder is created if necessary.

        The new files are written next to the old ones and flushed to disk, so the disk must have room for both. Then each replaces the old
        file, the weights first. Whatever interrupts this, even a kill, ``from_pretrained`` loads either the old model or the new one.
        Several processes that save into one folder take turns, and the last one's model stays.

        Raises:
            OSError: if a file cannot be written; the folder still holds a whole model, the old one unless only the last step failed.
            ValueError: if weights are on meta or sharded over processes, or a pattern holds a Python function or a tensor.
        """
        write_folder(Path(path), config_text(self.config), self.state_dict())

    @classmethod
    def from_pretrained(
        cls: type[ModelT], path: str | Path, *, device: Any = None, dtype: torch.dtype | None = None, **options: Any
    ) -> ModelT:
        """Loads a model that ``save_pretrained`` wrote, in eval mode and in the stored dtype unless ``dtype`` is given.

        Weights saved by ``save_pretrained`` contain their configuration, so ``config.json`` may be missing. Weights without one, made by
        hand or by an older version, are loaded with ``config.json`` alone.
        Damaged bytes inside the weights are not noticed (docs/models.md has the figures).

        Args:
            path: the folder, or that of a run of examples/recipe with ``checkpoint/`` in it; warns if that is not the model of its end.
            device, dtype: those of the parameters.
            options: arguments of the constructor: ``backend``; ``group``, ``mesh``, ``layout`` …

        Raises:
            FileNotFoundError: if the folder lacks a file that is needed.
            ValueError: if the configuration belongs to another model or a later version, or files are damaged or do not belong together.
            RuntimeError: if the weights do not fit the configuration.
        """
        folder = find_model(Path(path))
        if note := unfinished(folder):
            warnings.warn(note, stacklevel=2)
        stored = read_folder(folder, device)
        weights = stored.weights
        odd = [name for name, weight in weights.items() if not weight.is_floating_point()]
        if odd:
            raise ValueError(f"{folder / WEIGHTS_FILE} has {odd[0]} in {weights[odd[0]].dtype}; expected weights of a floating dtype")
        config = _config_of(cls.config_class, folder, stored)
        stack: Any = getattr(config, "encoder", config)
        # check this before so many layers are built
        if stack.num_layers > len(weights):
            raise RuntimeError(
                f"{folder / WEIGHTS_FILE} has {len(weights)} weights, too few for the {stack.num_layers} layers of its configuration"
            )
        # on meta, nothing is allocated or initialized for values that are replaced at once
        model = cls(config, device="meta", **options)
        try:
            model.load_state_dict(weights, assign=True)
        except RuntimeError as error:
            raise RuntimeError(f"{folder / WEIGHTS_FILE} does not fit its configuration: {error}") from error
        model.requires_grad_()
        return model.to(dtype=dtype).eval() if dtype is not None else model.eval()


def _config_of(kind: type[ConfigT], folder: Path, stored: Stored) -> ConfigT:
    """Returns the configuration that the weights were saved with or, if they contain none, that of ``config.json``.

    Raises:
        ValueError: if a configuration is invalid, or if ``config.json`` differs from the weights' configuration.
    """
    path, weights = folder / CONFIG_FILE, folder / WEIGHTS_FILE
    if stored.saved_with is None:
        assert stored.beside is not None
        try:
            return kind._read(stored.beside, str(path))
        except ValueError as error:
            raise ValueError(f"{error}; copy the file again, or write it with {kind.__name__}(…).save({str(path)!r})") from error
    config = kind._read(stored.saved_with, f"the configuration in {weights}")
    if stored.interrupted:
        warnings.warn(
            f"saving into {folder} was interrupted before {CONFIG_FILE} was replaced; "
            f"the configuration in {WEIGHTS_FILE} is used. save_pretrained writes both files again",
            stacklevel=3,
        )
    if stored.interrupted or stored.beside is None:
        return config
    way_out = (
        f"delete {CONFIG_FILE} to load the weights with the configuration that they were saved with; "
        "for another one, build the model with it and call load_state_dict(safetensors.torch.load_file(…))"
    )
    try:
        given = kind._read(stored.beside, str(path))
    except ValueError as error:
        raise ValueError(f"{error}; {way_out}") from error
    if given != config:
        ours, theirs = given.to_dict(), config.to_dict()
        changed = "; ".join(f"{key} is {ours[key]!r}, there {theirs[key]!r}" for key in ours if ours[key] != theirs[key])
        raise ValueError(f"{path} is not the configuration that {weights} was saved with: {changed}; {way_out}")
    return config
