"""What a model's own layers hold at a time: MLPs in tiles of positions, and the loss in chunks, both recomputed in the backward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from dilated_attention.models.loss import summed_cross_entropy


def replace(undo: contextlib.ExitStack, owner: Any, name: str, value: Any) -> None:
    """Sets an attribute of this object, not of its class, until ``undo`` is closed."""
    before = vars(owner)
    if name in before:
        undo.callback(vars(owner).__setitem__, name, before[name])
    else:
        undo.callback(vars(owner).pop, name, None)
    vars(owner)[name] = value


def tile_mlps(model: nn.Module, tile: int, undo: contextlib.ExitStack) -> None:
    """Lets every module named ``mlp`` take ``tile`` positions of (B, n, E) at a time.

    Its intermediate tensors, (B, n, 4·E) and more, then exist for one tile only; outputs are equal, and gradients of weights are summed
    tile by tile in their dtype.

    Raises:
        ValueError: if there is no such module.
    """
    found = [module for name, module in model.named_modules() if name.rpartition(".")[2] == "mlp"]
    if not found:
        raise ValueError(f"tiled_mlp is {tile}, and {type(model).__name__} has no module named 'mlp'; expected tiled_mlp=None")
    for module in found:
        replace(undo, module, "forward", _tiled(module, module.forward, tile))


def _tiled(module: nn.Module, forward: Callable[..., Any], tile: int) -> Callable[..., Any]:
    def tiled(x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] <= tile:
            return _same_rows(module, x, forward(x))
        parts = []
        for rows in x.split(tile, dim=1):
            needs_grad = torch.is_grad_enabled()
            out = checkpoint(forward, rows, use_reentrant=False) if needs_grad else forward(rows)
            parts.append(_same_rows(module, rows, out))
        return torch.cat(parts, dim=1)

    return tiled


def _same_rows(module: nn.Module, x: torch.Tensor, out: Any) -> torch.Tensor:
    if not isinstance(out, torch.Tensor) or out.shape[:2] != x.shape[:2]:
        what = tuple(out.shape) if isinstance(out, torch.Tensor) else type(out).__name__
        raise ValueError(f"{type(module).__name__} returns {what} for {tuple(x.shape)}, so it has no tiles; expected tiled_mlp=None")
    return out


class Head:
    """An output layer that hands the hidden states on, from which ``summed_loss`` makes the logits chunk by chunk.

    Args:
        module: the layer, without a bias.
    """

    def __init__(self, module: nn.Linear) -> None:
        self.module = module
        self._hidden: torch.Tensor | None = None

    def hold(self, hidden: torch.Tensor) -> torch.Tensor:
        # where FSDP2 wraps the layer, it warns of a view
        self._hidden = hidden.clone() if hasattr(self.module, "unshard") and hidden._is_view() else hidden
        return self._hidden

    def take(self) -> torch.Tensor | None:
        hidden, self._hidden = self._hidden, None
        return hidden

    def summed_loss(self, logits: torch.Tensor, targets: torch.Tensor, chunk: int) -> torch.Tensor:
        """Returns the sum of the cross-entropies of this process's targets.

        Raises:
            ValueError: if the model changed what its output layer returned, or other processes hold parts of the layer's weight.
        """
        if logits is not self._hidden:
            raise ValueError(
                "chunked_loss with a model that changes its logits after the output layer, e.g. by a softcap or a scale; expected "
                "chunked_loss=None"
            )
        weight = self.module.weight
        if hasattr(weight, "full_tensor"):
            raise ValueError("chunked_loss with an output layer whose weight FSDP2 has sharded again by then; expected chunked_loss=None")
        # transformers' losses are in float32, whatever the logits' dtype
        return summed_cross_entropy(logits, weight, targets, chunk=chunk, dtype=torch.float32)


def chunked_head(model: Any, is_wanted: Callable[[], bool], undo: contextlib.ExitStack) -> Head:
    """Replaces the forward of the model's output layer by one that, where it ``is_wanted``, hands the hidden states on.

    Raises:
        ValueError: if the model has no output layer, or it is more than a matrix product.
    """
    module = model.get_output_embeddings()
    if type(module) is not nn.Linear or module.bias is not None:
        raise ValueError(f"chunked_loss with the output layer {module}; expected a torch.nn.Linear without a bias, or chunked_loss=None")
    head, whole = Head(module), module.forward

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        return head.hold(hidden) if is_wanted() else whole(hidden)

    replace(undo, module, "forward", forward)
    return head
