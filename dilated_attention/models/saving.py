"""Configurations as JSON and models as a folder of ``config.json`` and ``model.safetensors``: no pickle anywhere."""

from __future__ import annotations

import json
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch import nn

from dilated_attention.pattern import BlockPattern

if TYPE_CHECKING:
    from dilated_attention.models.summary import Summary

CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"

ConfigT = TypeVar("ConfigT", bound="ModelConfig")
ModelT = TypeVar("ModelT", bound="Pretrained")


class ModelConfig:
    """What frozen dataclasses that shape a model share: plain values for JSON, and back."""

    __slots__ = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain values that JSON knows: tuples as lists, a block pattern as its ``spec()``, a configuration within as a dict.

        Raises:
            ValueError: a pattern that holds a Python function or a tensor, which no file can hold.
        """
        assert is_dataclass(self)
        return {field.name: _plain(field.name, getattr(self, field.name)) for field in fields(self)}

    @classmethod
    def from_dict(cls: type[ConfigT], values: dict[str, Any]) -> ConfigT:
        """The inverse of ``to_dict``. A key that this version does not know is refused: the model it shaped is another one."""
        assert is_dataclass(cls)
        if not isinstance(values, dict):
            raise TypeError(f"configuration is {values!r} ({type(values).__name__}); expected a dict, as {cls.__name__}.to_dict() makes it")
        known = [field.name for field in fields(cls)]
        unknown = sorted(set(values) - set(known))
        if unknown:
            raise ValueError(f"configuration has unknown keys {', '.join(unknown)}; {cls.__name__} knows {', '.join(known)}")
        missing = [x.name for x in fields(cls) if x.default is MISSING and x.default_factory is MISSING and x.name not in values]
        if missing:
            raise ValueError(f"configuration has no {', '.join(missing)}; {cls.__name__} needs it, and to_dict() writes it")
        return cls(**values)

    def save(self, path: str | Path) -> None:
        Path(path).write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls: type[ConfigT], path: str | Path) -> ConfigT:
        return cls.from_dict(json.loads(Path(path).read_text(encoding="utf-8")))


def _plain(name: str, value: Any) -> Any:
    if isinstance(value, ModelConfig):
        return value.to_dict()
    if isinstance(value, BlockPattern):
        if value.holds_objects:
            raise ValueError(
                f"{name} is {value!r}, which holds a function or a tensor and cannot be written to a file; use a pattern of numbers"
            )
        return value.spec()
    if isinstance(value, tuple):
        return [_plain(name, x) for x in value]
    return value


class Pretrained(nn.Module):
    """A model built as ``cls(config, **options)`` that saves itself as a folder and loads from one.

    A subclass names its configuration's class in ``config_class``. What lies in buffers that are not persistent must be made anew in
    ``__init__`` from the configuration alone, or at each call.
    """

    config_class: ClassVar[type[ModelConfig]]
    config: Any

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())

    def summary(self, lengths: tuple[int, ...] | None = None, *, memory: int | None = None) -> Summary:
        """Parameters, keys per query, memory of training and of the cache, and what fits. ``print`` it.

        Args:
            lengths: positions to tell of; None for a few orders of magnitude.
            memory: bytes of the device; None for this machine's GPU, or its RAM.

        >>> print(create_model("longnet-125m", device="meta").summary())
        """
        from dilated_attention.models.summary import summarise

        sizes = {name: parameter.numel() for name, parameter in self.named_parameters()}
        return summarise(type(self).__name__, getattr(self.config, "encoder", self.config), sizes, lengths, memory)

    def save_pretrained(self, path: str | Path) -> None:
        """Write ``config.json`` and ``model.safetensors`` into the folder ``path``, made if need be."""
        safetensors = _safetensors()
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        self.config.save(folder / CONFIG_FILE)
        safetensors.save_file(_apart(self.state_dict()), str(folder / WEIGHTS_FILE), metadata={"format": "pt"})

    @classmethod
    def from_pretrained(
        cls: type[ModelT], path: str | Path, *, device: Any = None, dtype: torch.dtype | None = None, **options: Any
    ) -> ModelT:
        """The model that ``save_pretrained`` wrote, in eval mode and in the stored dtype unless ``dtype`` says another.

        Args:
            path: the folder.
            device, dtype: of the parameters.
            options: of the constructor: ``backend``; ``group``, ``mesh``, ``layout`` …

        Raises:
            FileNotFoundError: not such a folder.
            ValueError: a configuration of another model or of a later version.
            RuntimeError: weights that do not fit the configuration.
        """
        safetensors = _safetensors()
        folder = Path(path)
        for name in (CONFIG_FILE, WEIGHTS_FILE):
            if not (folder / name).is_file():
                raise FileNotFoundError(
                    f"{folder / name} does not exist; expected a folder written by save_pretrained, with {CONFIG_FILE} and {WEIGHTS_FILE}"
                )
        weights = safetensors.load_file(str(folder / WEIGHTS_FILE), device=str(torch.device(device or "cpu")))
        # on meta nothing is allocated or drawn for values that are replaced at once
        model = cls(cls.config_class.load(folder / CONFIG_FILE), device="meta", **options)
        model.load_state_dict(weights, assign=True)
        model.requires_grad_()
        return model.to(dtype=dtype).eval() if dtype is not None else model.eval()


def _apart(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same without gaps, each with memory of its own: a file has no weight that is another's, and a model made from it needs them all."""
    taken: set[int] = set()
    apart = {}
    for name, weight in weights.items():
        x = weight.contiguous()
        if x.numel() and x.untyped_storage().data_ptr() in taken:
            x = x.clone()
        taken.add(x.untyped_storage().data_ptr())
        apart[name] = x
    return apart


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError('saving and loading models needs safetensors: pip install safetensors, or "dilated-attention[hf]"') from error
    return safetensors.torch
