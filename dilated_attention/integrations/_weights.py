"""Reads weights from a dict, a module or a file, and takes them one by one so that none is forgotten. Never runs pickled code."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dilated_attention.models.saving import read_safetensors

# parts of torch.load's messages about objects that it refuses to make
_REFUSED_BY_TORCH = ("GLOBAL", "Can only create new object", "Can only build", "unrecognized function")
# keys under which training programs store the weights
WRAPPERS = ("model", "module", "state_dict", "teacher", "student")
# parts that torch.compile and activation checkpointing insert into names
_INSIDE = ("_orig_mod.", "_checkpoint_wrapped_module.")


def read_weights(source: Any, part: str | None = None) -> dict[str, torch.Tensor]:
    """Returns name → tensor of a module, of a dict, or of a file written by ``torch.save`` or safetensors.

    Args:
        source: nn.Module, mapping, or path.
        part: key of the weights in a dict of several things; None to use the one of ``WRAPPERS`` that exists, or the dict itself.

    Raises:
        ValueError: if there are no such weights, or several; or a file is damaged or holds more than tensors.
        FileNotFoundError, PermissionError: if the file cannot be read.
    """
    if isinstance(source, (str, Path)):
        path = Path(source)
        found = _load_file(path)
        if not isinstance(found, Mapping):
            raise ValueError(f"{path} holds a {type(found).__name__}; expected a state dict, names with tensors: save module.state_dict()")
        try:
            return _named(found, part)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
    if isinstance(source, nn.Module):
        source = source.state_dict()
    if not isinstance(source, Mapping):
        raise TypeError(f"source is a {type(source).__name__}; expected a state dict, a module, or the path of a file")
    return _named(source, part)


def _named(source: Mapping[Any, Any], part: str | None) -> dict[str, torch.Tensor]:
    source = _unwrap(source, part)
    weights: dict[str, torch.Tensor] = {}
    for name, value in source.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor):
            raise ValueError(
                f"{name!r} is a {type(value).__name__}; expected names with tensors, or such a dict under one of {', '.join(WRAPPERS)}"
            )
        for wrapper in _INSIDE:
            name = name.replace(wrapper, "")
        if name in weights:
            raise ValueError(f"{name} occurs twice, with and without the names of wrappers such as {_INSIDE[0]!r}; remove one")
        weights[name] = value.detach()
    if not weights:
        raise ValueError("source holds no tensors; expected the weights of a model")
    while all(name.startswith("module.") for name in weights):
        weights = {name.removeprefix("module."): value for name, value in weights.items()}
    return weights


def _unwrap(source: Mapping[Any, Any], part: str | None) -> Mapping[Any, Any]:
    dicts = [name for name, value in source.items() if isinstance(value, Mapping)]
    if part is not None:
        if part not in dicts:
            raise ValueError(f"part is {part!r}; this file has {', '.join(map(repr, dicts)) or 'weights and no parts'}")
        return source[part]
    found = [name for name in WRAPPERS if name in dicts]
    if len(found) > 1:
        raise ValueError(f"this file has the weights of {' and '.join(found)}; say which with part={found[0]!r}")
    beside = [name for name, value in source.items() if isinstance(value, torch.Tensor)]
    if found and beside:
        raise ValueError(
            f"this file has weights under {found[0]!r} and also others ({_some(map(str, beside))}); pass the dict that is meant, or "
            f"part={found[0]!r}"
        )
    return source[found[0]] if found else source


def _load_file(path: Path) -> Any:
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not a file; expected one with weights, .safetensors or written by torch.save")
    if path.suffix == ".safetensors":
        return read_safetensors(path)[0]
    # torch.load's error for a file without read permission depends on its format
    with path.open("rb"):
        pass
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        # bytes that are not a pickle raise any kind of error: KeyError, IndexError, struct.error, OSError, RuntimeError …
        reason = " ".join(str(error).split("WeightsUnpickler error:")[-1].split())
        # without torch's advice, which is to unpickle the file anyway
        reason = reason.split(" In PyTorch 2.6")[0].split(" Check the documentation")[0][:300]
        # compared by name, because this package does not import pickle
        if type(error).__name__ == "UnpicklingError" and any(word in reason for word in _REFUSED_BY_TORCH):
            raise ValueError(
                f"{path} holds more than tensors, and unpickling it could run any code in it: {reason}. If you trust where it comes from, "
                "write its weights alone once, torch.save(torch.load(path, weights_only=False)['model'], 'weights.pt'), and load that file"
            ) from error
        raise ValueError(
            f"{path} cannot be read as a file of torch.save with only weights ({type(error).__name__}: {reason}); it is empty, damaged, "
            "cut off or of another format: copy or download it again, or give it the suffix .safetensors if that is what it is"
        ) from error


def without(names: dict[str, torch.Tensor], ignore: Sequence[str]) -> dict[str, torch.Tensor]:
    """Returns ``names`` without those that start with a prefix in ``ignore``; each prefix must match some name."""
    if isinstance(ignore, str):
        raise TypeError(f"ignore is {ignore!r}; expected a list of prefixes, such as [{ignore!r}]")
    for prefix in ignore:
        if not any(name.startswith(prefix) for name in names):
            raise ValueError(f"ignore has {prefix!r}, and no weight's name starts with it")
    return {name: value for name, value in names.items() if not name.startswith(tuple(ignore))}


class Weights:
    """Weights that are taken by name, each once, under the names of another model; at the end none may be left.

    Args:
        weights: name → tensor.
        prefix: a prefix of all names passed to the methods.
    """

    def __init__(self, weights: Mapping[str, torch.Tensor], prefix: str = "") -> None:
        self._all = weights
        self._left = set(weights)
        self.prefix = prefix
        self.taken: dict[str, torch.Tensor] = {}

    def __contains__(self, name: str) -> bool:
        return self.prefix + name in self._all

    def peek(self, name: str, ndim: int) -> torch.Tensor:
        """Returns a weight, which must exist, without taking it."""
        value = self._all.get(self.prefix + name)
        if value is None:
            raise ValueError(f"there is no {self.prefix}{name} among the weights; they are {_some(self._all)}")
        if value.ndim != ndim:
            raise ValueError(f"{self.prefix}{name} has shape {tuple(value.shape)}; expected {ndim} dimensions")
        return value

    def take(self, name: str, into: str, ndim: int) -> torch.Tensor:
        """Takes the weight ``name`` under the name ``into`` and returns it."""
        value = self.peek(name, ndim)
        self._left.discard(self.prefix + name)
        self.taken[into] = value
        return value

    def take_linear(self, name: str, into: str, *, order: torch.Tensor | None = None) -> None:
        """Takes the weight and bias of a linear layer, with the rows in ``order``."""
        for kind, ndim in (("weight", 2), ("bias", 1)):
            value = self.take(f"{name}.{kind}", f"{into}.{kind}", ndim)
            if order is not None:
                if value.shape[0] != order.numel():
                    raise ValueError(
                        f"{self.prefix}{name}.{kind} has shape {tuple(value.shape)}; "
                        f"expected {order.numel()} rows, as many as the model is wide"
                    )
                self.taken[f"{into}.{kind}"] = value[order.to(value.device)]

    def take_norm(self, name: str, into: str) -> None:
        for kind in ("weight", "bias"):
            self.take(f"{name}.{kind}", f"{into}.{kind}", 1)

    def drop(self, names: Iterable[str]) -> None:
        """Drops weights that are left out on purpose; the names include the prefix."""
        self._left -= set(names)

    def finish(self) -> dict[str, torch.Tensor]:
        """Returns all that was taken; raises an error that names what was not."""
        if self._left:
            raise ValueError(
                f"{len(self._left)} of {len(self._all)} weights have no place in this model: {_some(self._left)}; "
                "leave them out with ignore=(…), prefixes of their names, if that is right"
            )
        return self.taken


def place(weights: Mapping[str, torch.Tensor], device: Any, dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    """Copies the weights to ``device`` and ``dtype``; None keeps their device, and their dtype, which must be the same for all."""
    odd = [name for name, value in weights.items() if not value.is_floating_point()]
    if odd:
        raise ValueError(f"{_some(odd)} hold integers; expected weights of a floating dtype: quantised ones have to be dequantised first")
    found = sorted({str(value.dtype) for value in weights.values()})
    if dtype is None and len(found) > 1:
        raise ValueError(f"these weights have the dtypes {', '.join(found)}; say which with dtype=")
    return {name: value.to(device=device, dtype=dtype, copy=True) for name, value in weights.items()}


def _some(names: Iterable[str]) -> str:
    ordered = sorted(names)
    return ", ".join(ordered[:8]) + (f" and {len(ordered) - 8} more" if len(ordered) > 8 else "")
